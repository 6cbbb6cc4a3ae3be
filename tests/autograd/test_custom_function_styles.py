"""autograd.Function in every state: how it is written, how it is called and how its tensors are
passed, beside plain PyTorch.

The derivatives that the Functions give are not the true ones, so that it is seen which was taken;
numbers change between calls.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same
from autograd_functions import ContextInForward, Function, SavesItsOutput, SetupContext
from torch import nn

import torchfunc_jax
from torchfunc_jax import functionalize, grad, jit, vmap

FACTOR = torch.tensor(2.0)  # captured by the methods of some


class CapturesATensor(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * FACTOR

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 5 * x * FACTOR * torch.ones(3)


class CapturesWithASetup(Function):
    """As CapturesATensor, in the way that torch.func takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x * FACTOR

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * 5 * x * FACTOR * torch.ones(3)


class Composed(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return SavesItsOutput.apply(x) + 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 7 * g * SetupContext.apply(x)


FUNCTIONS = [
    ContextInForward,
    SetupContext,
    SavesItsOutput,
    CapturesATensor,
    CapturesWithASetup,
    Composed,
]
WEIGHT = torch.tensor([0.3, -0.5, 0.8], requires_grad=True)
# of a Function's apply: a function of one tensor
PASSED: dict[str, Callable[[Any], Callable[..., torch.Tensor]]] = {
    "the argument": lambda c: lambda x: c(x) * x,
    "made of both": lambda c: lambda x: c(x * WEIGHT) + x,
    "a captured tensor": lambda c: lambda x: c(WEIGHT) * x + WEIGHT,
    "both, and the result again": lambda c: lambda x: c(c(x) * c(WEIGHT)),
    "under no_grad": lambda c: lambda x: without_grad(c, x) * x * WEIGHT,
}


def without_grad(c: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return c(x * WEIGHT)


CALLED: dict[str, Callable[[Any], Callable[..., torch.Tensor]]] = {
    "functionalize": functionalize,
    "jit": jit,
    "vmap": lambda f: lambda x: vmap(f)(x[None])[0],
    "jit(vmap)": lambda f: jit(lambda x: vmap(f)(x[None])[0]),
}


def gradients(f: Callable[..., torch.Tensor], x: torch.Tensor, twice: bool) -> list[Any]:
    """The value, its gradients for the argument and the captured tensor, and those of the
    gradients.
    """
    out = f(x)
    first = torch.autograd.grad(
        (out * out).sum(), (x, WEIGHT), create_graph=twice, allow_unused=True
    )
    found = [out, *first]
    if twice:
        found += torch.autograd.grad(
            sum((g * g).sum() for g in first if g is not None), (x, WEIGHT), allow_unused=True
        )
    return [torch.zeros(3) if v is None else v for v in found]


def refused_as_by_torch_func(call: Callable[[Any], Any]) -> None:
    """A call that PyTorch runs, and which gets a namespace of transforms, raises torch.func's own
    error and leaves nothing behind.
    """
    with pytest.raises(RuntimeError) as theirs:
        call(torch.func)
    for _ in range(2):
        with pytest.raises(type(theirs.value), match=re.escape(str(theirs.value))):
            call(torchfunc_jax)
        assert "__getattribute__" not in vars(type(Function))
        assert torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None


@pytest.mark.thin(6)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize("passed", PASSED)
@pytest.mark.parametrize("cls", FUNCTIONS)
def test_backward_from_outside(cls: Any, passed: str, called: str, twice: bool) -> None:
    f = PASSED[passed](cls.apply)
    if cls is CapturesATensor and called == "vmap":
        return refused_as_by_torch_func(lambda T: T.vmap(f)(torch.ones(1, 3, requires_grad=True)))
    mine = CALLED[called](f)
    for k in range(2):
        with torch.no_grad():
            WEIGHT.add_(0.1)
            FACTOR.mul_(1.5)
        x = (torch.linspace(-0.5, 1.0, 3) + k).requires_grad_()
        same(gradients(mine, x, twice), gradients(f, x, twice))
    with torch.no_grad():
        WEIGHT.sub_(0.2)
        FACTOR.div_(2.25)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("passed", PASSED)
@pytest.mark.parametrize("cls", FUNCTIONS)
def test_grad(cls: Any, passed: str, compiled: bool) -> None:
    """As plain PyTorch's: torch.func refuses Functions whose forward takes a context, and so does
    what cannot be recorded.
    """
    f = PASSED[passed](cls.apply)
    if cls is CapturesATensor and not compiled:
        return refused_as_by_torch_func(
            lambda T: T.grad(lambda x: (f(x) ** 2).sum())(torch.ones(3))
        )
    mine = grad(lambda x: (f(x) ** 2).sum())
    mine = jit(mine) if compiled else mine
    for k in range(2):
        x = torch.linspace(-0.5, 1.0, 3) + k
        needs = x.clone().requires_grad_()
        same(mine(x).detach(), torch.autograd.grad((f(needs) ** 2).sum(), needs)[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cls", FUNCTIONS)
def test_torchs_own_grad_inside(cls: Any, compiled: bool) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad((cls.apply(x) * x).sum(), x, create_graph=True)
        return (g * g).sum()

    if cls is CapturesATensor and not compiled:
        return refused_as_by_torch_func(lambda T: T.grad(inner)(torch.ones(3)))
    mine = jit(grad(inner)) if compiled else grad(inner)
    for k in range(2):
        x = (torch.linspace(-0.5, 1.0, 3) + k).requires_grad_()
        same(mine(x.detach()), torch.autograd.grad(inner(x), x)[0])


class Squared(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        ctx.before = x.clone()
        return x.mul_(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 5 * g * ctx.before


@pytest.mark.parametrize("called", CALLED)
def test_written_in_place(called: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * WEIGHT
        z = Squared.apply(y)
        return z + y  # y has the new values and the Function's derivative

    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    if called == "vmap":
        return refused_as_by_torch_func(lambda T: T.vmap(f)(x[None]))
    same(gradients(CALLED[called](f), x, False), gradients(f, x, False))


class SineInPlace(Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin_()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return g * (1 - y**2).sqrt()

    @staticmethod
    def jvp(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return t.mul_((1 - y**2).sqrt())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("needs", [(), ("x",), ("t",), ("x", "t")])
def test_written_in_place_in_forward_mode(needs: tuple[str, ...], compiled: bool) -> None:
    """The values and the tangents both keep their history, which here requires grad and in the
    function does not.
    """

    def results(transforms: Any) -> list[Any]:
        def f(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return SineInPlace.apply(y) + y

        x, t = (
            torch.linspace(k, 0.6, 3, dtype=torch.float64).requires_grad_(name in needs)
            for k, name in ((0.1, "x"), (1.0, "t"))
        )
        call = lambda x, t: transforms.jvp(f, (x,), (t,))
        out, tangent = (jit(call) if compiled and transforms is torchfunc_jax else call)(x, t)
        leaves = [v for v, name in ((x, "x"), (t, "t")) if name in needs]
        total = out.sum() + (tangent**2).sum()
        return [
            out.detach(),
            tangent.detach(),
            *(torch.autograd.grad(total, leaves, allow_unused=True) if leaves else ()),
        ]

    same(results(torchfunc_jax), results(torch.func))


@pytest.mark.parametrize("jitted", [False, True])
def test_modules(jitted: bool) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.apply_sin = ContextInForward.apply

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.apply_sin(self.linear(x))

    def trained(wrap: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Layer(), Layer())
        optimizer, loss = (
            torch.optim.SGD(model.parameters(), 0.1),
            wrap(lambda x: (model(x) ** 2).sum()),
        )
        for k in range(3):
            optimizer.zero_grad()
            loss(torch.linspace(-1, 1, 6).reshape(2, 3) + k).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    same(trained(jit if jitted else functionalize), trained(lambda f: f))


COPIES = """
import torch
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): ctx.save_for_backward(x); return x**3
    @staticmethod
    def backward(ctx, g): return 5 * g * ctx.saved_tensors[0]
cube = Cube.apply
import torchfunc_jax
f = lambda x: cube(x).sum()
for transformed in (torchfunc_jax.grad(f), torchfunc_jax.jit(torchfunc_jax.grad(f))):
    for k in range(2):
        x = torch.arange(3.0) + k
        assert torch.equal(transformed(x), 5 * x), transformed(x)
assert "__getattribute__" not in vars(type(torch.autograd.Function))
"""


def test_a_copy_made_before_the_import() -> None:
    subprocess.run([sys.executable, "-c", COPIES], check=True)


class Broken(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the user's own")

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


@pytest.mark.parametrize("transform", [grad, vmap, jit, functionalize])
def test_an_error_leaves_nothing_behind(transform: Any) -> None:
    with pytest.raises(ValueError, match="of the user's own"):
        transform(lambda x: Broken.apply(x).sum())(torch.ones(3))
    assert "__getattribute__" not in vars(type(Function))
    assert torch.is_grad_enabled()
    same(grad(lambda x: ContextInForward.apply(x).sum())(torch.zeros(2)), torch.full((2,), 2.0))


def test_forward_mode_switched_off() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.forward_ad._set_fwd_grad_enabled(False):
            y = x.sin()
        return y * x

    x = torch.tensor([1.0, 2.0])
    for transformed in (
        lambda T, f: T.jvp(f, (x,), (x,)),
        lambda T, f: T.jacfwd(f)(x),
        lambda T, f: T.hessian(lambda x: f(x).sum())(x),
    ):
        expected = transformed(torch.func, f)
        same(transformed(torchfunc_jax, f), expected)
        # called at once
        same(jit(lambda x: transformed(torchfunc_jax, f))(x), expected)  # noqa: B023
