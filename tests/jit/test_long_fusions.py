"""Long chains of operations that XLA would fuse over and over: the steps of simulations, and their
derivatives.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch

import torchfunc_jax
from bridge.xla import fusions
from torchfunc_jax import grad, jit, vmap

Steps = Callable[[torch.Tensor], torch.Tensor]


def _heat(u: torch.Tensor) -> torch.Tensor:
    return torch.cat([u[:1], u[1:-1] + 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2]), u[-1:]])


def _wave(u: torch.Tensor) -> torch.Tensor:
    return u + 0.1 * (u.roll(1, 0) - 2 * u + u.roll(-1, 0))


def _runge_kutta(y: torch.Tensor) -> torch.Tensor:
    def slope(y: torch.Tensor) -> torch.Tensor:
        return torch.stack([y[1], -torch.sin(y[0]), y[0] * y[1], -y[2]])

    k1 = slope(y)
    k2 = slope(y + 0.005 * k1)
    k3 = slope(y + 0.005 * k2)
    return y + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + slope(y + 0.01 * k3))


def _symplectic(y: torch.Tensor) -> torch.Tensor:
    p = y[2:] - 0.01 * torch.sin(y[:2])
    return torch.cat([y[:2] + 0.01 * p, p])


def _in_place(u: torch.Tensor) -> torch.Tensor:
    v = u.clone()
    v[1:-1] = u[1:-1] + 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2])
    return v * (1 + 0.01 * v.flip(0))


def _elementwise(u: torch.Tensor) -> torch.Tensor:
    return torch.sin(u) * u + 0.1 * u


STEPS: dict[str, Steps] = {
    "heat": _heat,
    "wave": _wave,
    "Runge-Kutta": _runge_kutta,
    "symplectic": _symplectic,
    "in place": _in_place,
    "elementwise": _elementwise,
}
TIMES = 16


def repeated(step: Steps, times: int = TIMES) -> Steps:
    """Steps that differ, so that no loop is made of them."""

    def run(y: torch.Tensor) -> torch.Tensor:
        for k in range(times):
            y = step(y) * (1 + 0.001 * k)
        return y

    return run


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("way", ["value", "grad", "vmap of grad", "un-jitted"])
def test_steps_agree_with_torch_func(name: str, way: str) -> None:
    run = repeated(STEPS[name])
    y = torch.linspace(0.2, 1.1, 4, dtype=torch.float64)

    def make(T: object) -> Steps:
        if way == "value":
            return run
        derivative = T.grad(lambda y: run(y).square().sum())  # type: ignore[attr-defined]
        return T.vmap(derivative) if way == "vmap of grad" else derivative  # type: ignore[attr-defined]

    given = torch.stack([y, y.flip(0)]) if way == "vmap of grad" else y
    ours = make(torchfunc_jax) if way == "un-jitted" else jit(make(torchfunc_jax))
    for _ in range(2):
        torch.testing.assert_close(ours(given), make(torch.func)(given), rtol=1e-11, atol=1e-12)


def _calls(f: Callable[..., object], *given: torch.Tensor) -> int:
    lowered = jit(f).lower(*given)
    fusions.limited(lowered)
    return lowered.as_text().count('inlineable = "false"')


def test_only_programs_with_such_chains_are_changed() -> None:
    y = torch.linspace(0.2, 1.1, 4)
    assert _calls(grad(lambda y: repeated(_wave)(y).sum()), y) > TIMES
    assert _calls(grad(lambda y: repeated(_runge_kutta)(y).sum()), y) > TIMES
    assert _calls(grad(lambda y: repeated(_wave, 2)(y).sum()), y) == 0
    layer = torch.nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=True, activation="gelu"
    )
    assert _calls(vmap(grad(lambda x: layer(x[None]).square().sum())), torch.randn(3, 5, 8)) == 0


def test_a_chain_is_compiled_in_the_time_of_its_length() -> None:
    """XLA's program of twice the steps is about twice as long, where it was four times as long, and
    more.
    """

    def size(times: int) -> int:
        lowered = jit(grad(lambda y: repeated(_runge_kutta, times)(y).sum())).lower(torch.ones(4))
        fusions.limited(lowered)
        return len(lowered.compile().as_text())

    assert size(12) < 2.6 * size(6)


def test_loops_and_functions_of_the_program_are_counted_too() -> None:
    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        for _ in range(20):
            carry = jax.numpy.concatenate([carry[1:], carry[:1]]) * carry
        return carry, None

    lowered = jax.jit(lambda x: jax.lax.scan(body, x, None, 3)[0]).lower(
        jax.ShapeDtypeStruct((4,), np.float32)
    )
    want = lowered.compile()(np.full(4, 1.01, np.float32))
    again = jax.jit(lambda x: jax.lax.scan(body, x, None, 3)[0]).lower(
        jax.ShapeDtypeStruct((4,), np.float32)
    )
    fusions.limited(again)
    assert again.as_text().count('inlineable = "false"') > 0
    np.testing.assert_allclose(again.compile()(np.full(4, 1.01, np.float32)), want, rtol=1e-5)
