"""Loops, checkpoints and functions with rules for derivatives under the options of JAX that give
them other primitives: what looks into programs knows these by either name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from torch import nn
from torch.utils.checkpoint import checkpoint

import bridge
from bridge import private_jax
from torchfunc_jax import export, grad

OPTIONS = ("jax_scan3", "jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")


@contextlib.contextmanager
def switched_on(option: str) -> Iterator[None]:
    """While entered, an option of JAX's is on; the test skips if JAX has no such option."""
    if not hasattr(jax.config, option):
        pytest.skip(f"JAX {jax.__version__} has no option {option}")
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


def with_vjp(table: Any = 1.0) -> Callable[..., Any]:
    rules = jax.custom_vjp(lambda x, y: x * y.sum(0) * jnp.asarray(table) / len(x))
    rules.defvjp(lambda x, y: (rules(x, y), (x, y)), lambda kept, g: (g, g))
    return lambda x: rules(x, x)


def with_jvp() -> Callable[..., Any]:
    rules = jax.custom_jvp(lambda x: jnp.sin(x) + len(x))
    rules.defjvp(lambda primals, tangents: (rules(*primals), tangents[0]))
    return rules


def scanned(x: jax.Array) -> Any:
    return lax.scan(lambda c, row: (c + row, c * 2), jnp.zeros(x.shape[1]), x)


class Sized(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0]


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: x.tanh() * x, x, use_reentrant=False).sum()


# -- exports ---------------------------------------------------------------------------------------
class Case(NamedTuple):
    option: str  # with which the program has another primitive
    make: Callable[[], Any]  # the function
    shape: tuple[int, ...]  # of its argument
    other: tuple[int, ...]  # another shape
    batch: str = "b"


EXPORTS = {
    "scan": Case("jax_scan3", lambda: bridge.from_jax(scanned), (4, 3), (7, 2), "b, n"),
    "map": Case(
        "jax_scan3", lambda: bridge.from_jax(lambda x: lax.map(jnp.sin, x)), (4, 3), (7, 3)
    ),
    "lstm": Case(
        "jax_scan3", lambda: nn.LSTM(3, 4, batch_first=True), (4, 5, 3), (7, 2, 3), "b, n, _"
    ),
    "jax.checkpoint": Case(
        "jax_remat3",
        lambda: bridge.from_jax(jax.checkpoint(lambda x: jnp.sin(x) / len(x))),
        (4, 3),
        (7, 3),
    ),
    "grad of a checkpoint": Case("jax_remat3", lambda: grad(checkpointed), (4, 3), (7, 3)),
    "custom_vjp": Case(
        "jax_custom_vjp3", lambda: bridge.from_jax(with_vjp([1.0, 2, 3])), (4, 3), (7, 3)
    ),
    "autograd.Function": Case("jax_custom_vjp3", lambda: Sized.apply, (4, 3), (7, 3)),
    "custom_jvp": Case("jax_custom_jvp3", lambda: bridge.from_jax(with_jvp()), (4, 3), (7, 3)),
    "gelu, softmax": Case(
        "jax_custom_jvp3", lambda: nn.Sequential(nn.GELU(), nn.Softmax(-1)), (4, 3), (7, 3)
    ),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_exported_for_every_size(name: str) -> None:
    case = EXPORTS[name]
    torch.manual_seed(0)
    given = torch.randn(case.other)
    with switched_on(case.option):
        function = case.make()
        exported = export(function, torch.randn(case.shape), batch=case.batch)
        weights = [exported.weights] if exported.weights else []
        found = exported.program.call(*weights, jnp.asarray(given.numpy()))
    wanted = torch.utils._pytree.tree_leaves(function(given))
    for a, b in zip(jax.tree.leaves(found), wanted, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5, atol=1e-6)


# -- results of one computation --------------------------------------------------------------------
def same(first: Callable[..., Any], second: Callable[..., Any]) -> bool:
    """Whether the results of two functions of an array are taken for those of one computation."""
    found: list[bool] = []

    def both(x: jax.Array) -> jax.Array:
        results = first(x), second(x)
        found.append(private_jax.same_computation(*results))
        return results[0]

    jax.make_jaxpr(both)(jnp.ones((4, 3)))
    return found[0]


@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_results_of_one_computation(option: str | None) -> None:
    with switched_on(option) if option else contextlib.nullcontext():
        _results_of_one_computation()


def _results_of_one_computation() -> None:
    # other rules, the same function
    assert same(with_vjp(), with_vjp()) and same(with_jvp(), with_jvp())
    assert not same(with_vjp(2.0), with_vjp(3.0)) and not same(with_vjp(), with_jvp())
    assert not same(with_jvp(), lambda x: jnp.sin(x) + len(x))
    mapped = lambda f: lambda x: lax.map(f, x)
    assert same(mapped(lambda row: row * 2), mapped(lambda row: row * 2))
    assert not same(mapped(lambda row: row * 2), mapped(lambda row: row * 3))
    inside = lambda function: lambda x: jax.jit(lambda x: function(x) * 2)(x)
    assert same(inside(with_vjp()), inside(with_vjp()))
    assert not same(inside(with_vjp(2.0)), inside(with_vjp(3.0)))


# -- other primitives of this kind -----------------------------------------------------------------
def power(by: int, name: str = "Power") -> Callable[..., Any]:
    """A function whose primitive is a class of a user's."""
    hijax = pytest.importorskip("jax.experimental.hijax")
    if not hasattr(hijax, "HiPrim"):
        pytest.skip(f"JAX {jax.__version__} has no jax.experimental.hijax.HiPrim")

    def init(self: Any, aval: Any) -> None:
        self.in_avals, self.out_aval, self.params = (aval,), aval, {"by": by}
        hijax.HiPrim.__init__(self)

    expand = lambda self, x: x**by * len(x)
    kind: Any = type(name, (hijax.HiPrim,), {"__init__": init, "expand": expand})
    return lambda x: kind(jax.typeof(x))(x)


def test_a_primitive_of_a_users_is_what_it_expands_to() -> None:
    square = power(2)
    exported = export(bridge.from_jax(square), torch.ones(4, 3))
    given = np.random.RandomState(0).randn(7, 3).astype("float32")
    np.testing.assert_allclose(exported.program.call(given), given**2 * 7, rtol=1e-5)
    assert same(square, square) and not same(square, power(3)) and not same(square, power(2))
