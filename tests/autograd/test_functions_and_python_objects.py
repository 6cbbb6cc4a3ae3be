"""autograd.Functions whose methods change Python objects: a list has what plain PyTorch and
torch.func put into it, at every call. And those that read objects, which change between the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from agreement import same
from torch import nn

import torchfunc_jax
from torchfunc_jax import jit

X = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)
CALLS = 3


def _new_style(notes: list[Any]) -> Any:
    class New(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            notes.append("forward")
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            notes.append("setup_context")
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * ctx.saved_tensors[0].cos() * 2

    return New


def _old_style(notes: list[Any]) -> Any:
    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            notes.append("forward")
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * ctx.saved_tensors[0].cos() * 2

    return Old


def _noting_gradients(notes: list[Any]) -> Any:
    class Noting(_new_style([])):  # type: ignore[misc]
        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            notes.extend(["backward", g.sum(), g.norm().item()])
            return g * ctx.saved_tensors[0].cos() * 2

    return Noting


def _noting_values(notes: list[Any]) -> Any:
    class Noting(_new_style([])):  # type: ignore[misc]
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            notes.append(x.sum())
            return x.sin()

    return Noting


Loss = Callable[[torch.Tensor], torch.Tensor]


def _grad_inside(loss: Loss) -> Loss:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(loss(x), x)[0]

    return run


def _backward_outside(loss: Loss) -> Loss:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        loss(x).backward()
        return x.grad

    return run


#: By name, what is made of a loss with a module's transforms, and jit or what leaves it alone.
WAYS: dict[str, Callable[[Loss, Any, Any], Loss]] = {
    "un-jitted grad": lambda loss, tf, fast: tf.grad(loss),
    "un-jitted vjp": lambda loss, tf, fast: lambda x: tf.vjp(loss, x)[1](x.new_ones(()))[0],
    "un-jitted jacrev": lambda loss, tf, fast: tf.jacrev(loss),
    "un-jitted grad of grad": lambda loss, tf, fast: tf.grad(lambda x: tf.grad(loss)(x).sum()),
    "jit of grad": lambda loss, tf, fast: fast(tf.grad(loss)),
    "jit": lambda loss, tf, fast: fast(loss),
    "autograd.grad inside of jit": lambda loss, tf, fast: fast(_grad_inside(loss)),
    "backward outside of jit": lambda loss, tf, fast: _backward_outside(fast(loss)),
}
#: A Function, and the ways in which it can be called: torch.func refuses the old style and a vmap
#: over item(), and calls setup_context twice.
FUNCTIONS: dict[Callable[[list[Any]], Any], list[str]] = {
    _new_style: [way for way in WAYS if not way.startswith("un-jitted")],
    _old_style: ["jit", "autograd.grad inside of jit", "backward outside of jit"],
    _noting_values: [way for way in WAYS if way != "un-jitted grad of grad"],
    _noting_gradients: [way for way in WAYS if way != "un-jitted jacrev"],
}


def _noted(make: Any, way: str, tf: ModuleType, fast: Any) -> list[tuple[torch.Tensor, list[Any]]]:
    """For each call, its result and what was noted."""
    notes: list[Any] = []
    noting = make(notes)
    call = WAYS[way](lambda x: noting.apply(x).square().sum(), tf, fast)
    found = []
    for k in range(CALLS):
        found.append((call(X * (k + 1)).detach(), list(notes)))
        notes.clear()
    return found


@pytest.mark.parametrize(
    ("make", "way"),
    [(make, way) for make, ways in FUNCTIONS.items() for way in ways],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_methods_change_objects_once_for_each_call(make: Any, way: str) -> None:
    found = _noted(make, way, torchfunc_jax, jit)
    for (out, notes), (wanted, noted) in zip(
        found, _noted(make, way, torch.func, lambda f: f), strict=True
    ):
        same(out, wanted)
        assert len(notes) == len(noted)
        for x, y in zip(notes, noted, strict=True):
            same(x.detach(), y.detach()) if isinstance(x, torch.Tensor) else same(x, y)


# -- what a backward reads -------------------------------------------------------------------------
def _with_backward(backward: Any, setup_context: Any = lambda ctx, inputs, output: None) -> Any:
    members = {"forward": lambda x: x.sin(), "setup_context": setup_context, "backward": backward}
    return type(
        "Read", (torch.autograd.Function,), {name: staticmethod(f) for name, f in members.items()}
    )


def _tensor_replaced() -> tuple[Any, Callable[[int], Any]]:
    held = SimpleNamespace(w=X)
    function = _with_backward(lambda ctx, g: g * held.w)
    return function, lambda k: setattr(held, "w", torch.full_like(X, k))


def _tensor_of_another_shape() -> tuple[Any, Callable[[int], Any]]:
    held = SimpleNamespace(w=X)
    function = _with_backward(lambda ctx, g: g * held.w.sum())
    return function, lambda k: setattr(held, "w", torch.ones(k, dtype=torch.float64))


def _tensor_written() -> tuple[Any, Callable[[int], Any]]:
    w = X.clone()
    return _with_backward(lambda ctx, g: g * w), w.fill_


def _object_of_the_context() -> tuple[Any, Callable[[int], Any]]:
    held = SimpleNamespace(factor=1.0)
    function = _with_backward(
        lambda ctx, g: g * ctx.held.factor, lambda ctx, inputs, output: setattr(ctx, "held", held)
    )
    return function, lambda k: setattr(held, "factor", float(k))


def _module_of_the_context() -> tuple[Any, Callable[[int], Any]]:
    module = nn.Linear(5, 5).double()
    function = _with_backward(
        lambda ctx, g: ctx.module(g), lambda ctx, inputs, output: setattr(ctx, "module", module)
    )

    def change(k: int) -> None:
        if k == 2:
            module.weight = nn.Parameter(torch.eye(5, dtype=torch.float64))
        else:
            nn.init.constant_(module.weight, k)

    return function, change


def _number_of_the_class() -> tuple[Any, Callable[[int], Any]]:
    function = _with_backward(lambda ctx, g: g * function.factor)
    return function, lambda k: setattr(function, "factor", float(k))


def _backward_replaced() -> tuple[Any, Callable[[int], Any]]:
    function = _with_backward(lambda ctx, g: g)
    return function, lambda k: setattr(function, "backward", staticmethod(lambda ctx, g: g * k))


def _a_list() -> tuple[Any, Callable[[int], Any]]:
    grown: list[int] = []
    return _with_backward(lambda ctx, g: g * len(grown)), grown.append


READ = [
    _tensor_replaced,
    _tensor_of_another_shape,
    _tensor_written,
    _object_of_the_context,
    _module_of_the_context,
    _number_of_the_class,
    _backward_replaced,
    _a_list,
]


@pytest.mark.parametrize("way", ["un-jitted grad", "un-jitted vjp", "jit of grad"])
@pytest.mark.parametrize("make", READ, ids=lambda f: f.__name__)
def test_a_backward_reads_what_there_is_at_each_call(make: Any, way: str) -> None:
    torch.manual_seed(0)
    function, change = make()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return function.apply(x).sum()

    mine = WAYS[way](loss, torchfunc_jax, jit)
    theirs = WAYS[way](loss, torch.func, lambda f: f)
    for k in (1, 1, 2, 3):
        change(k)
        same(mine(X).detach(), theirs(X).detach())


class Rule:
    """What the derivative of an operator reads and changes."""

    factor = 1.0
    seen: list[torch.Tensor]


RULE = Rule()


@torch.library.custom_op("test_functions_and_objects::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@sine.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _scaled(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    return g * RULE.factor


def _noted_too(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    RULE.seen.append(g.sum())
    return g * RULE.factor


@pytest.mark.parametrize("rule", [_scaled, _noted_too], ids=lambda f: f.__name__)
def test_the_derivative_of_an_operator(rule: Any) -> None:
    sine.register_autograd(rule)
    RULE.seen = []
    inside, outside = jit(_grad_inside(lambda x: sine(x).sum())), jit(lambda x: sine(x).sum())
    calls: list[Loss] = [inside, _backward_outside(outside)]
    if rule is _scaled:  # torch.func takes no such operators
        calls += [torchfunc_jax.grad(lambda x: sine(x).sum())]
    for k in range(CALLS):
        RULE.factor = k + 1.0
        for call in calls:
            same(call(X), torch.full_like(X, k + 1.0))
    assert [x.item() for x in RULE.seen] == [5.0] * (2 * CALLS if rule is _noted_too else 0)
