"""autograd.Functions that compute with their arguments again in backward, through a function that
they keep, and ask PyTorch's engine for gradients by them: quadratures, implicit layers and adjoints
are written so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same

import torchfunc_jax

D = torch.float64
X = torch.tensor([[0.3, -1.0, 0.5], [0.7, 0.2, -0.9]], dtype=D)
W = torch.tensor([0.6, 1.1, -0.4], dtype=D)
PARAMETER = torch.nn.Parameter(torch.tensor([0.2, -0.3, 0.9], dtype=D))


class Again(torch.autograd.Function):
    """f(x), where f also computes with the parameters."""

    @staticmethod
    def forward(ctx: Any, f: Any, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.f = f
        ctx.save_for_backward(x, *params)
        return f(x)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.f(x)
        of_params = torch.autograd.grad(
            y, params, cotangent, retain_graph=True, create_graph=torch.is_grad_enabled()
        )
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.f(x)
        return None, torch.autograd.grad(y, x, cotangent)[0], *of_params


class FixedPoint(torch.autograd.Function):
    """z = f(z), where f also computes with the parameters."""

    @staticmethod
    def forward(ctx: Any, f: Any, z: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            z = f(z)
        ctx.f = f
        ctx.save_for_backward(z, *params)
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        z, *params = ctx.saved_tensors
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            y = ctx.f(z)
        whole = cotangent
        for _ in range(30):
            whole = cotangent + torch.autograd.grad(y, z, whole, retain_graph=True)[0]
        return None, None, *torch.autograd.grad(y, params, whole)


class Recomputed(torch.autograd.Function):
    """A checkpoint as diffusion models have it, which keeps its arguments in lists."""

    @staticmethod
    def forward(ctx: Any, f: Any, count: int, *args: torch.Tensor) -> torch.Tensor:
        ctx.f, ctx.inputs, ctx.params = f, list(args[:count]), list(args[count:])
        with torch.no_grad():
            return f(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            out = ctx.f(*[x.view_as(x) for x in inputs])
        found = torch.autograd.grad(out, inputs + ctx.params, cotangents, allow_unused=True)
        return None, None, *found


class Integral(torch.autograd.Function):
    """Euler's steps at times whose order both methods look at, as solvers of differential equations
    do.
    """

    @staticmethod
    def forward(ctx: Any, f: Any, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        ctx.f = f
        ctx.save_for_backward(x, times)
        sign = 1 if bool((times[1:] > times[:-1]).all()) else -1
        for step in times.diff():
            x = x + sign * step * f(x)
        return x

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        x, times = ctx.saved_tensors
        sign = 1 if times[0] < times[-1] else -1
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x
            for step in times.diff():
                y = y + sign * step * ctx.f(y)
        return None, torch.autograd.grad(y, x, cotangent)[0], None


def _of_a_result(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    u = w.exp()
    return Again.apply(lambda x: (x * u).sin(), x, u).sum()


def _of_an_argument(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Again.apply(lambda x: (x * w).sin(), x, w).sum()


def _of_a_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    u = w[1:]
    return Again.apply(lambda x: (x[..., 1:] * u).sin(), x, u).sum()


def _of_a_parameter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (Again.apply(lambda x: (x * PARAMETER).sin(), x, PARAMETER) * w).sum()


def _twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    u = w.exp()

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * u).sin()

    return (Again.apply(f, x, u) * Again.apply(f, x.cos(), u)).sum()


def _fixed_point(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a = w.diag() * 0.1
    return FixedPoint.apply(lambda z: torch.tanh(z @ a + x), torch.zeros_like(x), a, x).sum()


def _recomputed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    u = w * 2
    for _ in range(2):
        x = Recomputed.apply(lambda x: (x * PARAMETER + u).tanh(), 1, x, PARAMETER, u)
    return x.sum()


#: Those that have second derivatives.
TWICE = [_of_a_result, _of_an_argument, _of_a_view, _of_a_parameter, _twice]
FUNCTIONS = [*TWICE, _recomputed, _fixed_point]


def _gradients(f: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> Any:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    return torch.autograd.grad(f(x, w), (x, w))


def _second(f: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> Any:
    inputs = x.clone().requires_grad_(), w.clone().requires_grad_(), PARAMETER
    first = torch.autograd.grad(f(*inputs[:2]), inputs, create_graph=True, allow_unused=True)
    total = sum((g * g).sum() for g in first if g is not None)
    return torch.autograd.grad(total, inputs, allow_unused=True)


def _engine_inside(f: Callable[..., torch.Tensor]) -> Any:
    step = torchfunc_jax.jit(lambda x, w: torch.autograd.grad(f(x, w), (x, w)))
    return step(X.clone().requires_grad_(), W.clone().requires_grad_())


WAYS: dict[str, Callable[[Callable[..., torch.Tensor]], Any]] = {
    "grad": lambda f: torchfunc_jax.jit(torchfunc_jax.grad(f, (0, 1)))(X, W),
    "vjp": lambda f: torchfunc_jax.jit(
        lambda x, w: torchfunc_jax.vjp(f, x, w)[1](torch.ones((), dtype=D))
    )(X, W),
    "engine outside": lambda f: _gradients(torchfunc_jax.jit(f), X, W),
    "engine inside": _engine_inside,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients(f: Callable[..., torch.Tensor], way: str) -> None:
    # that of the function of a parameter requires grad
    same(tuple([g.detach() for g in WAYS[way](f)]), _gradients(f, X, W))


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_of_lanes(f: Callable[..., torch.Tensor]) -> None:
    found = torchfunc_jax.jit(torchfunc_jax.vmap(torchfunc_jax.grad(f, (0, 1)), (0, None)))(X, W)
    found = tuple([g.detach() for g in found])
    same(found, tuple(map(torch.stack, zip(*[_gradients(f, x, W) for x in X], strict=True))))


@pytest.mark.parametrize("f", TWICE, ids=lambda f: f.__name__)
def test_second_derivatives(f: Callable[..., torch.Tensor]) -> None:
    same(_second(torchfunc_jax.jit(f), X, W), _second(f, X, W))


TIMES = torch.tensor([0.0, 0.1, 0.3], dtype=D)


def _at_captured_times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (Integral.apply(torch.sin, x, TIMES) * w).sum()


def _at_times_made_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (Integral.apply(torch.sin, x, torch.linspace(0, 1, 4, dtype=D)) * w).sum()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", [_at_captured_times, _at_times_made_inside], ids=lambda f: f.__name__)
def test_questions_about_arguments_that_are_known(f: Callable[..., torch.Tensor], way: str) -> None:
    same(tuple(WAYS[way](f)), _gradients(f, X, W))


def test_another_answer_is_another_program() -> None:
    times = TIMES.clone()

    def f(x: torch.Tensor) -> torch.Tensor:
        return Integral.apply(torch.sin, x, times).sum()

    jitted = torchfunc_jax.jit(torchfunc_jax.grad(f))
    for change in (lambda: None, lambda: times.mul_(-2), lambda: times.mul_(0.5)):
        change()
        x = X.clone().requires_grad_()
        same(jitted(X), torch.autograd.grad(f(x), x)[0])
    assert len(jitted.programs()) == 2


NET = torch.nn.Linear(3, 3, dtype=D)


def _frozen() -> None:
    NET.weight.requires_grad_(False)


def _thawed() -> None:
    NET.weight.requires_grad_(True)


def _replaced() -> None:
    NET.weight = torch.nn.Parameter(NET.weight.detach().flip(0))


def _with_a_hook_on_a_gradient() -> None:
    NET.weight.register_hook(lambda g: g * 2)


def _with_a_forward_hook() -> None:
    NET.register_forward_hook(lambda module, args, out: out * 0.5)


CHANGES = [_frozen, _thawed, _replaced, _with_a_hook_on_a_gradient, _with_a_forward_hook]


class OfModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *params)
        return NET(x).tanh()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = NET(x).tanh()
        wanted = [p for p in params if p.requires_grad]
        of_x, *of_params = torch.autograd.grad(y, (x, *wanted), cotangent)
        found = iter(of_params)
        return of_x, *[next(found) if p.requires_grad else None for p in params]


@pytest.mark.parametrize("inside", [False, True])
def test_what_changes_between_calls(inside: bool) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return OfModule.apply(x, *NET.parameters()).square().sum()

    def gradients(f: Callable[..., torch.Tensor], x: torch.Tensor) -> Any:
        return torch.autograd.grad(f(x), [x, *[p for p in NET.parameters() if p.requires_grad]])

    jitted = torchfunc_jax.jit((lambda x: gradients(loss, x)) if inside else loss)
    before = NET.weight, NET.bias
    try:
        for step, change in enumerate([None, *CHANGES]):
            if change is not None:
                change()
            with torch.no_grad():
                NET.weight.mul_(0.9)
            x = torch.linspace(-1, 1, 3 * (2 + step % 3), dtype=D).reshape(-1, 3).requires_grad_()
            found = jitted(x) if inside else gradients(jitted, x)
            same(found, gradients(loss, x))
    finally:
        NET.weight, NET.bias = before
        NET.weight.requires_grad_(True)
        NET._forward_hooks.clear()
