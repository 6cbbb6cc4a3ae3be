"""What a derivative inside another one leaves: its value has derivatives of its own, no_grad inside
holds for reverse mode alone, and a tensor that its function keeps is a tensor of the transform
around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import opinfo
import pytest
import torch
from agreement import same
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchfunc_jax
from bridge.errors import EscapedTensorError
from torchfunc_jax import jit

X = torch.tensor([0.6, 1.1, -0.4, 0.9], dtype=torch.float64)
T = torch.tensor([0.3, -1.0, 0.5, 0.7], dtype=torch.float64)
ROWS = torch.stack([X, X * 2])
Function = Callable[[torch.Tensor], torch.Tensor]


def _weights(out: torch.Tensor) -> torch.Tensor:
    return torch.arange(1.0, out.numel() + 1, dtype=torch.float64).reshape(out.shape)


def _pulled(F: Any, function: Function, x: torch.Tensor) -> Any:
    out, pull = F.vjp(function, x)
    return out, pull(_weights(out))[0]


#: By name: a function of torch.func's names, the function, and its argument.
INSIDE: dict[str, Callable[[Any, Function, torch.Tensor], torch.Tensor]] = {
    "the value of jvp": lambda F, f, x: F.jvp(f, (x,), (T,))[0],
    "the value of vjp": lambda F, f, x: F.vjp(f, x)[0],
    "the aux of grad": lambda F, f, x: F.grad(lambda x: ((x * x).sum(), f(x)), has_aux=True)(x)[1],
    "the tangents": lambda F, f, x: F.jvp(f, (x,), (T,))[1],
    "the gradients": lambda F, f, x: _pulled(F, f, x)[1],
    "a lane's value of jvp": lambda F, f, x: F.vmap(lambda t: F.jvp(f, (x,), (t,))[0])(
        torch.stack([T, T * 2])
    ),
}
AROUND: dict[str, Callable[[Any, Function], Any]] = {
    "vjp": lambda F, f: _pulled(F, f, X),
    "jvp": lambda F, f: F.jvp(f, (X,), (T,)),
    "vmap of vjp": lambda F, f: F.vmap(lambda x: _pulled(F, f, x))(ROWS),
}
HOW = {"recorded": lambda call: call(), "jit": lambda call: jit(call)()}


FUNCTIONS: dict[str, Function] = {
    "max": lambda x: x.sin().max(),
    "min": lambda x: x.sin().min(),
    "median": lambda x: x.sin().median(),
    "nanmedian": lambda x: x.sin().nanmedian(),
    "norm": lambda x: torch.linalg.vector_norm(x.sin(), float("inf")),
    "frexp": lambda x: torch.frexp(x.sin())[0],
    "gamma": lambda x: (torch.manual_seed(0), torch._standard_gamma(x.exp()))[1],
    "dirichlet": lambda x: (torch.manual_seed(0), torch._sample_dirichlet(x.exp()))[1],
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("inside", ["the value of jvp", "the value of vjp", "the aux of grad"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_value_of_a_derivative_has_derivatives(name: str, inside: str, how: str) -> None:
    function = FUNCTIONS[name]
    nested = lambda F: HOW[how](lambda: AROUND["vjp"](F, lambda x: INSIDE[inside](F, function, x)))
    if name not in ("gamma", "dirichlet"):
        return same(nested(torchfunc_jax), AROUND["vjp"](torch.func, function))
    # PyTorch has gamma's derivative in single precision, and not dirichlet's; a vjp that draws
    # random numbers is run by PyTorch; and jit calls a function that sets the generator's state
    outcomes = []
    for call in (
        lambda: nested(torchfunc_jax),
        lambda: AROUND["vjp"](torch.func, lambda x: INSIDE[inside](torch.func, function, x)),
    ):
        try:
            outcomes.append(call())
        except RuntimeError as error:
            outcomes.append((type(error), str(error)))
    same(*outcomes)


#: JAX has no complex32, the dtype of chalf's result.
DIFFERENTIABLE = [
    n
    for n, op in opinfo.operators().items()
    if op.supports_autograd and torch.float64 in op.dtypes and n != "chalf"
]


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_value_of_any_operators_derivative_has_derivatives(name: str) -> None:
    op, F = opinfo.operators()[name], torchfunc_jax
    try:
        samples = opinfo.draw(op, torch.float64, 0)
        sample = samples[len(samples) // 2]
        problem = opinfo.Problem(op, sample, sample)
        primals, cotangents = problem.primals(problem.values), problem.cotangents()
        torch.func.vjp(problem.smooth, *primals)[1](cotangents)
    except Exception as error:
        pytest.skip(f"PyTorch has no sample, or no derivative: {error}")
    if problem.random:
        pytest.skip("its values are random")
    expected = F.vjp(problem.smooth, *primals)[1](cotangents)
    value = F.vjp(lambda *xs: F.vjp(problem.smooth, *xs)[0], *primals)[1](cotangents)
    same(value, expected, rtol=1e-6, atol=1e-8)
    try:
        torch.func.jvp(problem.smooth, primals, problem.tangents())
    except Exception:  # PyTorch has no forward mode of it
        return
    value = F.vjp(lambda *xs: F.jvp(problem.smooth, xs, problem.tangents())[0], *primals)[1](
        cotangents
    )
    same(value, expected, rtol=1e-6, atol=1e-8)


# -- no_grad ---------------------------------------------------------------------------------------
def _clamped(x: torch.Tensor) -> torch.Tensor:
    norm = x.norm().clone()
    with torch.no_grad():
        norm.clamp_min_(1e-8)
    return x / norm


def _scaled(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y.sin()


def _part(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() * 1
    with torch.no_grad():
        y[1:].mul_(x[1:])
    return y * x


def _made(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 3
    return (x * y).sin()


NO_GRAD: dict[str, Function] = {
    "a norm that is clamped": _clamped,
    "a write": _scaled,
    "a write to a part": _part,
    "a value": _made,
    "cosine_similarity": lambda x: nn.functional.cosine_similarity(x[None], x.sin()[None]),
    "gaussian_nll_loss": lambda x: nn.functional.gaussian_nll_loss(
        x, x.sin(), x.exp(), reduction="none"
    ),
}


@pytest.mark.thin(8)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", NO_GRAD)
def test_no_grad_inside_nested_derivatives(name: str, inside: str, around: str, how: str) -> None:
    function = NO_GRAD[name]
    if name == "gaussian_nll_loss" and around == "vmap of vjp":
        pytest.skip("PyTorch looks at its values, which torch.func.vmap refuses")

    def call(F: Any) -> Any:
        return AROUND[around](F, lambda x: INSIDE[inside](F, function, x))

    same(HOW[how](lambda: call(torchfunc_jax)), call(torch.func))


@pytest.mark.thin(4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("around", ["vjp", "jvp"])
@pytest.mark.parametrize("inside", ["the value of jvp", "the tangents", "the gradients"])
@pytest.mark.parametrize("name", ["a write", "a value", "cosine_similarity"])
def test_no_grad_in_a_checkpoint_in_nested_derivatives(
    name: str, inside: str, around: str, how: str
) -> None:
    """torch.func has no derivative of a checkpoint; it changes no value, so the truth is the
    function without it.
    """
    function = NO_GRAD[name]

    def call(F: Any, function: Function) -> Any:
        return AROUND[around](F, lambda x: INSIDE[inside](F, function, x))

    found = HOW[how](
        lambda: call(torchfunc_jax, lambda x: checkpoint(function, x, use_reentrant=False))
    )
    same(found, call(torch.func, function))


# -- what the function inside keeps ----------------------------------------------------------------
def _steps(F: Any, x: torch.Tensor, factor: float, kept: list[Any]) -> torch.Tensor:
    """Three steps of a learner inside, whose losses are kept."""
    p = x
    for i in range(3):

        def loss(p: torch.Tensor, i: int = i) -> torch.Tensor:
            value = ((p * x.cos()) ** 2 * (i + factor)).sum()
            kept.append(value)
            return value

        p = p - 0.1 * F.grad(loss)(p)
    F.grad(lambda w: kept.append(w) or w.sum())(WEIGHT)
    return p.sum()


WEIGHT = torch.tensor(2.0, dtype=torch.float64)
USES: dict[str, Callable[[Any, torch.Tensor, list[Any]], Any]] = {
    "their mean": lambda F, x, kept: torch.stack(kept).mean(),
    "their mean, detached": lambda F, x, kept: (
        torch.stack([v.detach() for v in kept]).mean() * x.sum()
    ),
    "an argument that is a tensor from outside": lambda F, x, kept: (x.cos() * kept[3]).sum(),
    "an argument": lambda F, x, kept: F.grad(lambda v: (v * x).sin().sum())(kept[1]),
    "captured": lambda F, x, kept: F.grad(lambda y: (y * kept[1]).sin().sum())(x).sum(),
    "captured by a vmap": lambda F, x, kept: F.vmap(lambda v: v * kept[1] + kept[0])(x).sum(),
    "a view": lambda F, x, kept: (x[None, 1:] * kept[0].reshape(1, 1)).sum(),
}


@pytest.mark.thin(6)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", USES)
def test_what_the_function_inside_keeps_is_used_outside_of_it(
    name: str, around: str, how: str
) -> None:
    def call(F: Any, factor: float) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            kept: list[Any] = []
            return _steps(F, x, factor, kept) * USES[name](F, x, kept)

        return AROUND[around](F, function)

    for factor in (1.0, 2.5, 3):
        same(HOW[how](lambda factor=factor: call(torchfunc_jax, factor)), call(torch.func, factor))


@pytest.mark.parametrize("how", HOW)
def test_a_lane_of_a_vmap_inside_has_no_value_outside(how: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        kept: list[Any] = []
        torchfunc_jax.vmap(lambda v: kept.append(v.sin()) or v)(x)
        return kept[0] * x.sum()

    with pytest.raises(EscapedTensorError, match="escaped from inside a function being vmapped"):
        HOW[how](lambda: torchfunc_jax.grad(function)(X))
