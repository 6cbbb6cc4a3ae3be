"""autograd.Functions whose methods change Python objects: a list has what plain PyTorch and
torch.func put into it, at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from agreement import same

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
