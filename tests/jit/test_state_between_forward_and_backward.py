"""Jitted steps that change what a transform has read before they go backward: the gradient is that
of what the transform has computed.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same

import torchfunc_jax
from torchfunc_jax import jit

State = types.SimpleNamespace


def _shift(s: State) -> None:
    s.weight = s.weight * 2


def _count(s: State) -> None:
    s.calls += 1


#: By name: a function of the state and a row, and what the step does to the state after it.
CHANGES: dict[str, tuple[Callable[[State, torch.Tensor], torch.Tensor], Callable[[State], Any]]] = {
    "a counter in a tensor": (
        lambda s, r: r * 2 if s.steps == 0 else r.cos(),
        lambda s: s.steps.add_(1),
    ),
    "a counter": (lambda s, r: r * 2 if s.calls == 0 else r.cos(), _count),
    "an element": (lambda s, r: r * s.weight.sin(), lambda s: s.weight.__setitem__(0, 5.0)),
    "an attribute": (lambda s, r: r * s.weight.sin(), _shift),
    "an entry": (lambda s, r: r * s.rates["lr"], lambda s: s.rates.update(lr=s.rates["lr"] * 3)),
    "a list": (lambda s, r: r * len(s.seen), lambda s: s.seen.append(1)),
}
TRANSFORMS: dict[str, Callable[[Any, Any, torch.Tensor], torch.Tensor]] = {
    "vmap": lambda F, f, y: F.vmap(f)(y),
    "vmap of grad": lambda F, f, y: F.vmap(F.grad(lambda r: f(r).square().sum()))(y),
    "jvp": lambda F, f, y: F.jvp(f, (y,), (y.cos(),))[1],
    "vjp": lambda F, f, y: (lambda out, pull: pull(out)[0])(*F.vjp(f, y)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_gradients_of_what_was_computed(
    name: str, transform: str, backward: bool, view: bool
) -> None:
    function, change = CHANGES[name]
    found = []
    for F, wrap in ((torch.func, lambda f: f), (torchfunc_jax, jit)):
        s = State(
            steps=torch.zeros((), dtype=torch.int64),
            calls=0,
            weight=torch.tensor([1.0, 2.0, 3.0]),
            rates={"lr": 0.5},
            seen=[0, 0],
        )
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 3)

        def step(x: torch.Tensor, F: Any = F, s: Any = s, layer: Any = layer) -> Any:
            y = layer(x)[1:] if view else layer(x)
            out = TRANSFORMS[transform](F, lambda r: function(s, r), y)
            with torch.no_grad():
                change(s)
            if not backward:
                return torch.autograd.grad(out.square().sum(), [*layer.parameters()])
            layer.zero_grad()
            out.square().sum().backward()
            return [p.grad.clone() for p in layer.parameters()]

        run = wrap(step)
        found.append([run((k + 1) * torch.arange(6.0).reshape(2, 3).cos()) for k in range(3)])
    same(found[1], found[0], rtol=1e-4, atol=1e-5)
