"""Equations that a program need not compute are removed before it is
differentiated and compiled.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from agreement import same
from jax import lax

import torchfunc_jax
from bridge import register_lowering
from bridge.jit.simplify import simplified
from torchfunc_jax import grad, jit, vmap

X = np.linspace(0.5, 2.0, 5, dtype=np.float32)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """x, whose cotangent is clipped: the sum of two clipped cotangents is not the clipped sum."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))


@pytest.mark.parametrize(
    "fn, equations",
    [
        (lambda x: jnp.sin(x) + jnp.sin(x), 2),  # the second sine repeats the first
        (lambda x: (jnp.cos(x * 2), x + 1)[1], 1),  # nothing uses the cosine and its operand
        (lambda x: (jnp.exp(x), jnp.exp(x)), 2),  # two outputs stay two arrays
        (lambda x: x * 0.0 + x * -0.0, 3),  # constants are compared by their bits
        (lambda x: lax.reduce_sum(x, (0,)) + lax.reduce_max(x, (0,)), 3),
        (
            lambda x: clipped(x) * 2 + clipped(x) * 3,
            5,
        ),  # functions with derivatives of their own stay
        (lambda x: x, 0),
    ],
)
def test_what_is_removed(fn: Callable[..., object], equations: int) -> None:
    closed = jax.make_jaxpr(fn)(X)
    jaxpr = simplified(closed.jaxpr)
    assert len(jaxpr.eqns) == equations
    again = jax.core.eval_jaxpr(jaxpr, closed.consts, X)
    for mine, theirs in zip(again, jax.tree_util.tree_leaves(fn(X)), strict=True):
        assert np.array_equal(mine, theirs)


_jitted = jax.jit(lambda x: clipped(x) * 1)
_branches = (lambda x: clipped(x) * 1, lambda x: x)


def read_twice(x: jax.Array) -> jax.Array:
    reference = jax.new_ref(x)
    before = reference[...]
    reference[...] = before * 2
    return before + reference[...] * 3


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: _jitted(x) * 2 + _jitted(x) * 3,
        # its functions are in a tuple
        lambda x: lax.cond(x[0] > 0, *_branches, x) * 2 + lax.cond(x[0] > 0, *_branches, x) * 3,
        read_twice,
    ],
)
def test_equal_equations_that_do_not_do_the_same(fn: Callable[[jax.Array], jax.Array]) -> None:
    """Two calls of a function with a derivative of its own have two cotangents, and two reads of a
    reference may have two values.
    """
    closed = jax.make_jaxpr(fn)(X)
    jaxpr = simplified(closed.jaxpr)
    mine = jax.value_and_grad(lambda x: jax.core.eval_jaxpr(jaxpr, closed.consts, x)[0].sum())(X)
    theirs = jax.value_and_grad(lambda x: fn(x).sum())(X)
    for one, other in zip(mine, theirs, strict=True):
        assert np.array_equal(one, other)


def test_effects_and_checks_stay() -> None:
    seen: list[int] = []

    def fn(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: seen.append(1))
        jax.debug.callback(lambda: seen.append(1))
        return x

    assert len(simplified(jax.make_jaxpr(fn)(X).jaxpr).eqns) == 2
    # nothing uses the loss
    loss = jit(lambda x, target: (torch.nn.functional.nll_loss(x, target), x.sum())[1])
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        loss(torch.zeros(2, 3), torch.tensor([0, 7]))


def test_a_rule_of_an_autograd_function_runs_for_each_call() -> None:
    class Clip(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, ct):
            return ct.clamp(-1, 1)

    def f(x):
        return (Clip.apply(x) * 2 + Clip.apply(x) * 3).sum()

    x = torch.linspace(-1, 1, 4)
    for mine in (grad, lambda f: jit(grad(f)), lambda f: vmap(grad(f))):
        same(mine(f)(x), torch.full((4,), 2.0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 3), (4, 2, 3)])
def test_linear_of_vectors(shape: tuple[int, ...], bias: bool) -> None:
    layer = torch.nn.Linear(3, 2, bias)
    params = {k: v.detach() for k, v in layer.named_parameters()}
    x = torch.randn(6, *shape)

    def found(T):
        def f(p, x):
            return T.functional_call(layer, p, (x,)).tanh().sum()

        hessian = T.vmap(T.hessian(lambda x: f(params, x)))
        return (
            T.vmap(lambda x: f(params, x))(x),
            T.vmap(T.grad(f), (None, 0))(params, x),
            hessian,
            hessian(x),
        )

    mine, theirs = found(torchfunc_jax), found(torch.func)
    same(
        (*mine[:2], mine[3], jit(mine[2])(x)),
        (*theirs[:2], theirs[3], theirs[3]),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(3), torch.ones(2, 4)),
        (torch.ones(3), torch.ones(2, 3), torch.ones(5)),
        (torch.ones(()), torch.ones(2, 3)),
        (torch.ones(3), torch.ones(2, 3, dtype=torch.float64)),
        (torch.ones(3), torch.ones(3)),
    ],
)
def test_linear_refuses_what_torch_refuses(args: tuple[torch.Tensor, ...]) -> None:
    def outcome(T):
        try:
            return T.vmap(lambda *a: torch.nn.functional.linear(*a))(
                *[a.expand(2, *a.shape) for a in args]
            )
        except Exception as error:
            return type(error), str(error).split("\n")[0]

    theirs, mine = outcome(torch.func), outcome(torchfunc_jax)
    if isinstance(theirs, torch.Tensor):
        same(mine, theirs)
    else:
        assert mine[0] is theirs[0], (mine, theirs)


_library = torch.library.Library("test_simplify", "FRAGMENT")
_library.define("total(Tensor x) -> Tensor")
_library.impl("total", lambda x: x.sum(), "CompositeExplicitAutograd")


@register_lowering("test_simplify.total")
def _total(x: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, v: (carry + v, None), jnp.zeros((), x.dtype), x)[0]


LOOPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "searchsorted": lambda x: torch.searchsorted(x, x[:2]),
    "bucketize": lambda x: torch.bucketize(x[:2], x),
    "LSTM": lambda x: torch.nn.LSTM(1, 2)(x.reshape(-1, 1, 1))[0],
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x.reshape(-1, 2, 2)),
    "ndtri": torch.special.ndtri,
    "ctc_loss": lambda x: torch.nn.functional.ctc_loss(
        torch.stack([x, -x], 1).log_softmax(1),
        torch.ones(1, 1, dtype=torch.long),
        torch.tensor([len(x)]),
        torch.tensor([1]),
    ),
    "chebyshev_polynomial_t": lambda x: torch.special.chebyshev_polynomial_t(x, len(x)),
    "a lowering of the user's": lambda x: torch.ops.test_simplify.total(x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_not_unrolled(name: str) -> None:
    counts = []
    for n in (8, 64):
        f = jit(LOOPS[name])
        f(torch.linspace(0, 1, n))
        counts.append(f.programs()[0].operations)
    assert counts[0] == counts[1]
