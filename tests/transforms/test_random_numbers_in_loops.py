"""Random operators in the bodies of torch's loops draw other numbers in each step, and a seed
repeats them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch._higher_order_ops import map, scan, while_loop

import bridge
from torchfunc_jax import grad, jit, vmap

X = torch.linspace(1, 2, 5)


def scanned(x: torch.Tensor) -> torch.Tensor:
    return scan(lambda c, row: (c + row, row * torch.rand(3).mean()), torch.zeros(()), x)[1] / x


def mapped(x: torch.Tensor) -> torch.Tensor:
    return map(lambda row: row * torch.rand(()), x) / x


def looped(x: torch.Tensor) -> torch.Tensor:
    def body(k: torch.Tensor, out: torch.Tensor) -> Any:
        return k + 1, torch.where(torch.arange(5) == k, torch.rand(()), out)

    start = (x[0] * 0).long(), 0 * x
    return while_loop(lambda k, _: k < 5, body, start)[1]


LOOPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scan": scanned,
    "map": mapped,
    "while_loop": looped,
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_step_draws_its_own_numbers(name: str) -> None:
    fast = jit(LOOPS[name])
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn += [fast(X), fast(X)]
    for numbers in drawn:
        assert ((numbers > 0) & (numbers < 1)).all() and len(numbers.unique()) == 5
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
    assert len(torch.cat([drawn[0], drawn[1], drawn[4], drawn[5]]).unique()) == 20


@pytest.mark.parametrize("name", LOOPS)
def test_with_a_key(name: str) -> None:
    class Drawing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([LOOPS[name](x), torch.rand(2), LOOPS[name](x)])

    call = jax.jit(
        lambda key: bridge.call(Drawing(), {}, {}, (jnp.asarray(X.numpy()),), rng=key)[0]
    )
    with bridge.compiling.correctly():
        one, two, three = (call(jax.random.key(seed)) for seed in (0, 0, 1))
    assert (one == two).all() and len({*one.tolist(), *three.tolist()}) == 24


def test_derivatives_have_the_numbers_of_the_values() -> None:
    slopes = jit(grad(lambda w, x: (scanned(x) * x * w).sum(), argnums=(0, 1)))
    torch.manual_seed(0)
    values = jit(lambda x: scanned(x))(X)
    torch.manual_seed(0)
    _, found = slopes(torch.ones(5), X)
    torch.testing.assert_close(found, values)


@pytest.mark.parametrize(("randomness", "different"), [("different", 15), ("same", 5)])
def test_lanes(randomness: str, different: int) -> None:
    found = jit(vmap(mapped, randomness=randomness))(X.expand(3, 5))
    assert len(found.unique()) == different
