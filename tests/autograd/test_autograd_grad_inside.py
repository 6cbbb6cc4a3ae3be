"""torch.autograd.grad inside of a function is a part of the record: nothing runs in PyTorch, and
Python runs once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same

import torchfunc_jax
from torchfunc_jax import jit

POINT = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
LANES = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
WEIGHT = torch.tensor([1.0, 2.0, -0.5], dtype=torch.float64)


def _energy(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * WEIGHT).sum() + x.prod()


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(_energy(x), x, create_graph=True)[0]


def _cut(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(_energy(x), [x])[0] * x


def _twice(x: torch.Tensor) -> torch.Tensor:
    (first,) = torch.autograd.grad(_energy(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return first * second


def _given_cotangents(x: torch.Tensor) -> torch.Tensor:
    y, z = x.exp(), x * x
    return torch.autograd.grad((y, z), (x,), (WEIGHT, x.detach()), create_graph=True)[0]


def _unused(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    found = torch.autograd.grad(_energy(y), (y, x.sin()), create_graph=True, allow_unused=True)
    assert found[1] is None
    return found[0]


def _zeros_for_what_is_unused(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return sum(
        torch.autograd.grad(_energy(y), (y, x.sin()), create_graph=True, materialize_grads=True)
    )


def _of_what_was_written(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[1:] = y[:-1].clone() * 2
    return torch.autograd.grad(_energy(y), x, create_graph=True)[0]


def _through_a_transform(F: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (
        torch.autograd.grad(F.vmap(lambda t: t * t)(x).sum(), x, create_graph=True)[0] * x
    )


FUNCTIONS: dict[str, Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "with a graph": lambda F: _gradient,
    "without one": lambda F: _cut,
    "twice": lambda F: _twice,
    "cotangents": lambda F: _given_cotangents,
    "unused": lambda F: _unused,
    "zeros for what is unused": lambda F: _zeros_for_what_is_unused,
    "of what was written": lambda F: _of_what_was_written,
    "through a transform": _through_a_transform,
}
WAYS: dict[str, Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "grad": lambda F, f: F.grad(lambda x: f(x).sum())(POINT),
    "vmap of grad": lambda F, f: F.vmap(F.grad(lambda x: (f(x) * x).sum()))(LANES),
    "jacrev": lambda F, f: F.jacrev(f)(POINT),
    "vjp": lambda F, f: F.vjp(f, POINT)[1](WEIGHT),
    "hessian": lambda F, f: F.jacfwd(F.grad(lambda x: f(x).sum()))(POINT),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_recorded(name: str, way: str, unrecorded: Callable[[], list[str]]) -> None:
    expected = WAYS[way](torch.func, FUNCTIONS[name](torch.func))
    same(WAYS[way](torchfunc_jax, FUNCTIONS[name](torchfunc_jax)), expected)
    assert unrecorded() == []
    same(jit(lambda: WAYS[way](torchfunc_jax, FUNCTIONS[name](torchfunc_jax)))(), expected)


def _force(x: torch.Tensor) -> torch.Tensor:
    """Published force fields ask for the gradient by their own argument in this way; torch.func
    refuses requires_grad_ inside.
    """
    x.requires_grad_()
    return -torch.autograd.grad(_energy(x), x, create_graph=True)[0]


def test_an_argument_that_is_made_to_require_grad(unrecorded: Callable[[], list[str]]) -> None:
    def force_of(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (_force(x) * weight).sum()

    expected = -torch.func.grad(_energy)(POINT)
    same(torchfunc_jax.grad(force_of)(WEIGHT, POINT.clone()), expected)
    same(
        torchfunc_jax.vmap(_force)(LANES.clone()), -torch.func.vmap(torch.func.grad(_energy))(LANES)
    )
    same(torchfunc_jax.jacrev(_force)(POINT.clone()), -torch.func.hessian(_energy)(POINT))
    assert unrecorded() == []


@pytest.mark.parametrize("wrong", ["no scalar", "requires no grad", "unused"])
def test_what_pytorch_refuses_it_refuses_itself(wrong: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        outs = {
            "no scalar": (y, x),
            "requires no grad": (WEIGHT.sum(), x),
            "unused": (y.sum(), x.sin()),
        }[wrong]
        return torch.autograd.grad(*outs)[0].sum()

    with pytest.raises(RuntimeError) as theirs:
        torch.func.grad(f)(POINT)
    with pytest.raises(RuntimeError) as ours:
        torchfunc_jax.grad(f)(POINT)
    assert str(ours.value) == str(theirs.value)
    assert torch.is_grad_enabled()
    same(torchfunc_jax.grad(_energy)(POINT), torch.func.grad(_energy)(POINT))
