"""vjp and linearize of functions that are not recorded: Python runs once, and what they return can
be differentiated from around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import torchfunc_jax

X = torch.tensor([0.4, -0.7, 1.3], dtype=torch.float64)


class Tripled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.doubled = inputs[0] * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return g * w.sin() * 3 + ctx.doubled, g * x * w.cos()


class Program:
    """What a function captures and changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3).double()
        self.weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        self.steps = 0


FUNCTIONS: dict[str, Callable[[Program, torch.Tensor], Any]] = {
    "a layer": lambda p, x: p.layer(x).sin() * p.weight,
    "a condition": lambda p, x: x * torch.where(x * p.weight > 0, 2, 3) + p.weight,
    "sorted": lambda p, x: (x * p.weight).sort().values.exp(),
    "complex inside": lambda p, x: (x * (1 + 2j) * p.weight).exp().abs(),
    "complex": lambda p, x: (x * (1 + 2j) * p.weight).exp(),
    "a Function": lambda p, x: Tripled.apply(x, p.weight) * x,
    "no argument": lambda p, x: p.weight * 2,
    "a view": lambda p, x: x[1:] * p.weight[1:],
    "several": lambda p, x: (x * p.weight, {"sum": (x.sum() * p.weight).cos()}),
    "dropout": lambda p, x: nn.functional.dropout(x * p.weight, 0.5).sin(),
    "no gradient": lambda p, x: x.sin() * p.weight.detach(),
}


def _total(outs: Any) -> torch.Tensor:
    return sum(
        ((torch.view_as_real(t) if t.is_complex() else t).sin().sum() for t in tree_leaves(outs)),
        torch.zeros(()),
    )


def _cotangents(out: Any, factor: Any) -> Any:
    return tree_map(lambda t: (torch.ones_like(t) * factor).to(t.dtype), out)


def _pulled(T: Any, f: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    out, pull = T.vjp(f, x)
    return _total(out) * 2 + _total(pull(_cotangents(out, factor)))


def _pulled_twice(T: Any, f: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    out, pull, aux = T.vjp(lambda x: (f(x), x * 3), x, has_aux=True)
    return (
        _total(pull(_cotangents(out, factor)))
        + _total(pull(_cotangents(out, factor * 2)))
        + _total(aux)
    )


def _pushed(T: Any, f: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    if T is torch.func:  # its linearize takes what the function captures as constants
        return sum(map(_total, T.jvp(f, (x,), (torch.ones_like(x) * factor,))), torch.zeros(()))
    out, push = T.linearize(f, x)
    return _total(out) + _total(push(torch.ones_like(x) * factor))


AROUND: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "nothing": lambda T, f: f(X),
    "autograd": lambda T, f: f(X.clone().requires_grad_()),
    "grad": lambda T, f: T.grad(f)(X).sum(),
    "vmap": lambda T, f: T.vmap(f, randomness="different")(torch.stack([X, X * 2])).sum(),
    "vmap of grad": lambda T, f: T.vmap(T.grad(f), randomness="different")(
        torch.stack([X, X * 2])
    ).sum(),
    "jvp": lambda T, f: sum(T.jvp(f, (X,), (X * 2,)), torch.zeros(())),
}


def _run(T: Any, name: str, way: Any, around: str) -> list[Any]:
    p, factor = Program(), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def f(x: torch.Tensor) -> Any:
        p.steps += 1
        return FUNCTIONS[name](p, x * p.steps)

    torch.manual_seed(3)
    out = AROUND[around](T, lambda x: way(T, f, x, factor))
    found = [out.detach()]
    if out.requires_grad:
        used = [p.weight, factor, *p.layer.parameters()]
        zeros = map(torch.zeros_like, used)
        found += [
            z if g is None else g
            for z, g in zip(zeros, torch.autograd.grad(out, used, allow_unused=True), strict=True)
        ]
    return [found, p.steps]


@pytest.mark.thin(5)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("way", [_pulled, _pulled_twice, _pushed])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_beside_torch_func(name: str, way: Any, around: str) -> None:
    if way is _pushed and (name == "a Function" or around == "jvp"):
        pytest.skip("the Function has no forward mode, and PyTorch does not nest it")
    if around == "jvp" and name == "a Function":
        pytest.skip("the Function has no forward mode")
    expected = _run(torch.func, name, way, around)
    for _ in range(2):
        same(_run(torchfunc_jax, name, way, around), expected, rtol=1e-6, atol=1e-8)
