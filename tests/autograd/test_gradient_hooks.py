"""Hooks on gradients inside transforms and jitted functions, beside torch.func and plain PyTorch;
numbers change between calls.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from agreement import same
from autograd_functions import SavesItsOutput
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchfunc_jax
from bridge import from_jax
from bridge.errors import DataDependentError
from bridge.process import process
from torchfunc_jax import functionalize, grad, jit, vmap

MASK = torch.tensor([1.0, 0.0, 2.0])


def as_torch_func(call: Callable[[Any], Any], times: int = 2) -> Any:
    """Ours, un-jitted, gives what torch.func gives, or an error of the same class with torch's
    first sentence; returns torch.func's.
    """
    process.unrecordable.clear()  # the first call is recorded, and PyTorch goes on where that ends
    try:
        expected = call(torch.func)
    except Exception as error:
        for _ in range(times):
            with pytest.raises(type(error), match=re.escape(str(error).split(". ")[0])) as found:
                call(torchfunc_jax)
            assert type(found.value) is type(error)
        return error
    for _ in range(times):
        same(call(torchfunc_jax), expected)
    return expected


def without_levels(t: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor that a hook got inside of torch.func's levels."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t.detach()


class Seen:
    """What hooks get, each in turn."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []

    def add(self, g: Any) -> None:
        self.gradients.append(pytree.tree_map(torch.clone, g))

    def take(self) -> list[Any]:
        found, self.gradients = pytree.tree_map(without_levels, self.gradients), []
        return found


def on_a_result(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    y.register_hook(lambda g: g * 7 * MASK)
    return (y * y).sum()


def on_an_argument(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda g: g.clamp(-1, 3))
    return (x * x).sum()


def on_a_view(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).reshape(3, 1)
    y.register_hook(lambda g: -g)
    return (y**3).sum()


def after_a_write(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).relu_()
    y.register_hook(lambda g: g + 1)
    return (y * x).sum()


def several(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y.register_hook(lambda g: g * 2)
    y.register_hook(lambda g: g + 1)
    y.register_hook(lambda g: None)
    return (y * x).sum()


def removed(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    y.register_hook(lambda g: g * 7).remove()
    return (y * y).sum()


def through_torchs_own(x: torch.Tensor) -> torch.Tensor:
    if not x.requires_grad:
        x = x.requires_grad_()
    y = x * 3
    y.register_hook(lambda g: g * 5)
    return torch.autograd.grad((y**3).sum(), x, create_graph=True)[0].sum()


FUNCTIONS = [
    on_a_result,
    on_an_argument,
    on_a_view,
    after_a_write,
    several,
    removed,
    through_torchs_own,
]
WAYS: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {
    "grad": lambda T, f: T.grad(f),
    "grad_and_value": lambda T, f: T.grad_and_value(f),
    "vjp": lambda T, f: lambda x: T.vjp(f, x)[1](torch.tensor(1.5)),
    "jacrev": lambda T, f: T.jacrev(f),
    "hessian": lambda T, f: T.hessian(f),
    "grad of grad": lambda T, f: T.grad(lambda x: T.grad(f)(x).sum()),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_as_torch_func(f: Callable[..., Any], way: str, compiled: bool) -> None:
    mine = WAYS[way](torchfunc_jax, f)
    mine = jit(mine) if compiled else mine
    for seed in range(2):
        x = torch.linspace(0.5, 2.0, 3) + seed
        same(mine(x), WAYS[way](torch.func, f)(x))


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("f", FUNCTIONS)
def test_backward_through_a_jitted_function(f: Callable[..., Any], leaf: bool) -> None:
    compiled = jit(f)

    def gradient(g: Callable[..., Any], x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(g(x if leaf else x * 1), x)

    for seed in range(2):
        x = torch.linspace(0.5, 2.0, 3) + seed
        if leaf or f is not through_torchs_own:
            same(gradient(compiled, x), gradient(f, x))
        MASK.mul_(2)  # what a hook captures is read at each call
    MASK.div_(4)


def test_mapped() -> None:
    def f(s: torch.Tensor) -> torch.Tensor:
        y = s * 3
        y.register_hook(lambda g: g * 7)
        return (y * y).sum()

    x = torch.linspace(0.5, 2.0, 3)
    expected = torch.func.vmap(torch.func.grad(f))(x)
    same(vmap(grad(f))(x), expected)
    same(jit(vmap(grad(f)))(x), expected)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("input_needs_grad", [False, True])
def test_full_backward_hooks_of_modules(
    input_needs_grad: bool, before: bool, replaced: bool, jitted: bool
) -> None:
    if replaced and not input_needs_grad:
        replaced = False  # PyTorch refuses to replace the gradient of an input that has none

    def results(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        layer, calls = nn.Linear(3, 2), []

        def hook(_: Any, inputs: Any, outputs: Any) -> Any:
            calls.append((len(inputs), len(outputs)))
            return tuple(None if g is None else g * 3 for g in inputs) if replaced else None

        layer.register_full_backward_hook(hook)
        if before:
            layer.register_full_backward_pre_hook(lambda _, outputs: tuple(g * 5 for g in outputs))
        f, found = wrap(lambda x: (layer(x) ** 2).sum()), []
        for k in range(2):
            x = torch.full((4, 3), 1.0 + k, requires_grad=input_needs_grad)
            f(x).backward()
            found += [x.grad, *[p.grad.clone() for p in layer.parameters()]]
        return [*found, calls[0]]

    with np.errstate(all="ignore"):
        for mine, theirs in zip(
            results(jit if jitted else functionalize), results(lambda f: f), strict=True
        ):
            same(mine, theirs)


def test_a_jacobian_row_by_row_gives_a_hook_its_values() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        y.register_hook(lambda g: g * 2 if g.sum().item() > 0 else g)
        return torch.stack([(y * y).sum(), -(y * MASK).sum()])

    for x in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-2.0, 0.5, 1.0])):
        same(torchfunc_jax.jacrev(f, chunk_size=1)(x), torch.func.jacrev(f, chunk_size=1)(x))
        # the rows are mapped, and have no values
        assert isinstance(as_torch_func(lambda T, x=x: T.jacrev(f)(x)), RuntimeError)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3])
def test_a_hook_in_a_jacobian_of_several_results_is_called_as_by_torch_func(
    chunk_size: int | None,
) -> None:
    seen = Seen()

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 3
        y.register_hook(seen.add)
        return x.sum(), y.sin(), (y * y).sum()

    def call(T: Any) -> Any:
        return T.jacrev(f, chunk_size=chunk_size)(MASK), seen.take()

    as_torch_func(call)


def by(hook: Callable[..., Any]) -> Callable[..., Any]:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        y.register_hook(hook)
        return (y * y).sum()

    return f


def late(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    z = y * y
    y.register_hook(lambda g: g * 7)
    return (y + z).sum()


def on_a_node(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    y.grad_fn.register_hook(lambda inputs, _: (inputs[0] * 7, *inputs[1:]))
    return (y * y).sum()


def test_refused_under_jit() -> None:
    with pytest.raises(RuntimeError, match="has changed the size of value"):
        jit(grad(by(lambda g: g[:1])))(torch.ones(3))
    with pytest.raises(RuntimeError, match="has changed the type of value"):
        jit(grad(by(lambda g: g.double())))(torch.ones(3))
    with pytest.raises(TypeError, match="expected Tensor or None, but got float"):
        jit(grad(by(lambda g: 3.0)))(torch.ones(3))
    with pytest.raises(RuntimeError, match="register it right after the tensor is made"):
        jit(grad(late))(jnp.ones(3))
    with pytest.raises(NotImplementedError, match=r"Tensor\.register_hook"):
        jit(grad(on_a_node))(jnp.ones(3))
    for function in (late, on_a_node):  # with tensors, the function itself is called
        as_torch_func(
            lambda T, f=function: (
                jit(grad(f))(torch.ones(3)) if T is torchfunc_jax else T.grad(f)(torch.ones(3))
            )
        )
    with pytest.raises(
        RuntimeError, match="cannot register a hook on a tensor that doesn't require gradient"
    ):
        jit(vmap(lambda x: x.register_hook(print)))(torch.ones(3))


def test_pytorch_refuses_what_a_hook_returns() -> None:
    x = torch.ones(3)
    for hook, kind in (
        ((lambda g: g[:1]), RuntimeError),
        ((lambda g: g.double()), RuntimeError),
        ((lambda g: 3.0), TypeError),
    ):
        assert type(as_torch_func(lambda T, hook=hook: T.grad(by(hook))(x))) is kind
    assert (
        type(as_torch_func(lambda T: T.vmap(lambda x: x.register_hook(print))(x))) is RuntimeError
    )
    same(grad(by(lambda g: g * 7))(x), torch.full((3,), 126.0))  # no level is left behind


def test_hooks_that_only_pytorch_takes() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    for f in (late, on_a_node):
        same(
            as_torch_func(lambda T, f=f: T.grad(f)(x)),
            7 * torch.func.grad(by(lambda g: None))(x) + (21 if f is late else 0),
        )
        as_torch_func(lambda T, f=f: T.vmap(T.grad(f))(x[None]))
        as_torch_func(lambda T, f=f: T.hessian(f)(x))


def zeroed() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0, lambda t: t)


def entered(x: torch.Tensor) -> torch.Tensor:
    with zeroed():
        return (x * x).sum()


@pytest.mark.parametrize("transform", ["grad", "jacrev", "hessian", "vjp", "jacfwd", "vmap"])
@pytest.mark.parametrize("hooks", [zeroed, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("inside", [False, True])
def test_hooks_on_saved_tensors_are_refused_as_by_torch_func(
    inside: bool, hooks: Callable[[], Any], transform: str
) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with hooks() if inside else contextlib.nullcontext():
            return (x * x).sum()

    def call(T: Any) -> Any:
        with contextlib.nullcontext() if inside else hooks():
            return (
                T.vjp(f, torch.ones(3))[0]
                if transform == "vjp"
                else getattr(T, transform)(f)(torch.ones(3))
            )

    found = as_torch_func(call)
    if transform not in ("jacfwd", "vmap"):
        assert "don't yet support saved tensor hooks" in str(found)


@pytest.mark.parametrize("transform", ["grad", "jacrev", "hessian"])
def test_hooks_on_saved_tensors_are_refused_under_jit(transform: str) -> None:
    t = getattr(torchfunc_jax, transform)
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        jit(t(entered))(torch.ones(3))
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"), zeroed():
        jit(t(lambda x: (x * x).sum()))(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        jit(entered)(x)
    with torch.autograd.graph.save_on_cpu():  # changes where, and nothing else
        same(jit(grad(lambda x: (x * x).sum()))(torch.ones(3)), torch.full((3,), 2.0))


def with_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    return jit(vmap(lambda row: f(row.requires_grad_())))


@pytest.mark.parametrize("wrap", [jit, functionalize, vmap, lambda f: jit(vmap(f)), with_grad])
def test_a_checkpoint_does_not_count_what_a_trace_saves(wrap: Any) -> None:
    """The first call makes a trace, the one of the backward pass need not."""
    weight, x = torch.randn(3, 2, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    f = lambda row: (row.sin() @ weight).tanh()
    out = torch.utils.checkpoint.checkpoint(wrap(f), x, use_reentrant=False)
    same(torch.autograd.grad(out.sum(), (x, weight)), torch.autograd.grad(f(x).sum(), (x, weight)))


def test_a_checkpoint_of_what_requires_grad_in_a_vmap_is_refused_as_by_torch_func() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    error = as_torch_func(
        lambda T: checkpoint(T.vmap(lambda row: row.requires_grad_().sin()), x, use_reentrant=False)
    )
    assert "requires_grad_()" in str(error)


@pytest.mark.parametrize(
    "taken",
    [lambda t: t.numpy(), np.asarray, lambda t: np.sin(t), lambda t: np.asarray(jnp.asarray(t))],
)
@pytest.mark.parametrize("way", ["grad", "jacrev", "vjp", "jvp"])
def test_numbers_of_what_is_differentiated(way: str, taken: Callable[..., Any]) -> None:
    """An array of numbers would end the derivative in silence."""
    ways: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {
        "grad": lambda T, f: T.grad(f),
        "jacrev": lambda T, f: T.jacrev(f),
        "vjp": lambda T, f: lambda x: T.vjp(f, x)[0],
        "jvp": lambda T, f: lambda x: T.jvp(f, (x,), (x,)),
    }
    f = lambda x: (x * torch.tensor(np.array(taken(x * 1)))).sum()
    assert type(as_torch_func(lambda T: ways[way](T, f)(torch.ones(3)))) is RuntimeError
    with pytest.raises(
        (RuntimeError, TypeError), match=r"requires grad|values|Error interpreting|abstract array"
    ):
        jit(ways[way](torchfunc_jax, f))(torch.ones(3))


def test_numbers_of_what_is_detached() -> None:
    x = torch.tensor([1.0, 2.0])
    f = lambda x: (x * torch.tensor(x.sin().detach().numpy())).sum()
    # torch.func gives no numbers of its wrapped tensors
    assert "data pointer" in str(as_torch_func(lambda T: T.grad(f)(x)))
    with pytest.raises(DataDependentError, match=r"numpy\(\) needs a tensor's values"):
        jit(grad(f))(x)


SAVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "softmax": lambda x: torch.softmax(x, 0),
    "in place": lambda x: (x * 1).sigmoid_(),
    "norm": torch.norm,
    "function": SavesItsOutput.apply,
    "inside": lambda x: torch.exp(torch.sqrt(x)),
}
NOT_SAVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copied": lambda x: torch.tanh(x).clone(),
    "sin": torch.sin,
    "viewed": lambda x: torch.exp(x).view(3, 1),
    "only compared": lambda x: torch.relu(x - 0.4),
    "largest": lambda x: x.amax(),
}


@pytest.mark.parametrize("loss", [torch.sum, lambda y: (y * y).sum()])
@pytest.mark.parametrize("wrap", [jit, functionalize])
@pytest.mark.parametrize("operator", [*SAVED, *NOT_SAVED])
def test_second_derivatives_through_a_hook_on_what_an_operator_saves(
    operator: str, wrap: Any, loss: Any
) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = {**SAVED, **NOT_SAVED}[operator](x)
        y.register_hook(lambda g: g * 2)
        return loss(y)

    def first(f: Callable[..., Any]) -> Any:
        x = torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64).requires_grad_()
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        return x, g

    x, g = first(wrap(f))
    theirs, expected = first(f)
    same(g, expected, graph=False)
    if operator in SAVED and wrap is jit:  # never another number
        with pytest.raises(NotImplementedError, match=r"clone\(\)"):
            torch.autograd.grad((g * g).sum(), x)
    elif operator in SAVED or loss is not torch.sum:
        same(
            torch.autograd.grad((g * g).sum(), x),
            torch.autograd.grad((expected * expected).sum(), theirs),
        )


# -- a hook that is registered after a use ---------------------------------------------------------
def _into_zeros(y: torch.Tensor) -> torch.Tensor:
    z = y.new_zeros(4)
    z[:3] = y
    return z


class _Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0].cos()


P = torch.tensor([0.3, -0.7, 1.1])
USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "an operator": lambda T, y: y.sin(),
    "a view": lambda T, y: y[1:],
    "a write": lambda T, y: torch.zeros_like(y).add_(y),
    "an assignment": lambda T, y: _into_zeros(y),
    "a list": lambda T, y: torch.cat([y, y]),
    "unbind": lambda T, y: sum(y.unbind()),
    "a keyword": lambda T, y: torch.add(input=P, other=y),
    "grad": lambda T, y: T.grad(lambda t: (t**3).sum())(y),
    "captured by grad": lambda T, y: T.grad(lambda t: (t * y).sum())(P),
    "vjp": lambda T, y: T.vjp(torch.sin, y)[0],
    "a pullback": lambda T, y: T.vjp(torch.sin, P)[1](y)[0],
    "jvp": lambda T, y: T.jvp(torch.sin, (P,), (y,))[1],
    "vmap": lambda T, y: T.vmap(torch.sin)(y),
    "jacrev": lambda T, y: T.jacrev(torch.sin)(y).sum(0),
    "a Function": lambda T, y: _Sine.apply(y),
    "a checkpoint": lambda T, y: (
        checkpoint(torch.sin, y, use_reentrant=False) if T is torchfunc_jax else y.sin()
    ),
    "from_jax": lambda T, y: from_jax(jnp.sin)(y) if T is torchfunc_jax else y.sin(),
    "functional_call": lambda T, y: T.functional_call(torch.nn.LayerNorm(3), {"bias": y}, (P,)),
    "attention": lambda T, y: torch.nn.functional.scaled_dot_product_attention(
        *[y[None, None]] * 3
    ).flatten(),
}


@pytest.mark.parametrize("way", ["grad", "vmap of grad"])
@pytest.mark.parametrize("name", USES)
def test_a_hook_around_a_use_is_called_as_by_torch_func(name: str, way: str) -> None:
    seen = Seen()

    def f(T: Any, argument: bool, before: bool) -> torch.Tensor:
        def hook(g: torch.Tensor) -> torch.Tensor:
            seen.add(g)
            return g * 3

        def g(x: torch.Tensor) -> torch.Tensor:
            y = x if argument else x.sin() * 1.5
            if before:
                y.register_hook(hook)
            z = USES[name](T, y)
            if not before:
                y.register_hook(hook)
            return z.sin().sum() + (y**2).sum()

        return T.grad(g)(P.clone()) if way == "grad" else T.vmap(T.grad(g))(torch.stack([P, P * 2]))

    for argument in (False, True):
        before, after = (
            as_torch_func(lambda T, b=b, a=argument: (f(T, a, b), seen.take()))
            for b in (True, False)
        )
        same(before, after)
        assert len(before[1]) == 1
        for b, (wanted, _) in ((True, before), (False, after)):
            compiled = jit(lambda a=argument, b=b: f(torchfunc_jax, a, b))
            torch.testing.assert_close(compiled(), wanted, rtol=1e-4, atol=1e-5)
            assert seen.gradients
            seen.gradients.clear()


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_on_several_tensors_at_once(mode: str) -> None:
    seen = Seen()

    def f(x: torch.Tensor) -> torch.Tensor:
        a, b = x * 2, x * 3
        torch.autograd.graph.register_multi_grad_hook([a, b], seen.add, mode=mode)
        return (a * b).sum()

    for way in (
        lambda T: T.grad(f)(P),
        lambda T: T.vmap(T.grad(f))(P[None]),
        lambda T: T.vjp(f, P)[1](torch.tensor(2.0)),
        lambda T: jit(grad(f))(P) if T is torchfunc_jax else T.grad(f)(P),
    ):
        _, called = as_torch_func(lambda T, way=way: (way(T), seen.take()))
        assert len(called) == 1
    with pytest.raises(NotImplementedError, match="register a hook on each tensor"):
        jit(grad(f))(jnp.ones(3))
    assert not seen.take()
    weight = P.clone().requires_grad_()

    def on_captured(x: torch.Tensor) -> torch.Tensor:
        torch.autograd.graph.register_multi_grad_hook([weight], seen.add, mode=mode)
        return (x * weight).sum()

    vmap(on_captured)(P[None]).sum().backward()
    f(P.clone().requires_grad_()).backward()  # outside of transforms
    assert len(seen.take()) == 2
    same(weight.grad, P)
