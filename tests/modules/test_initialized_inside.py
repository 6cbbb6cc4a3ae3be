"""Modules that are made and initialized inside of a transform: torch's own random numbers, bit by
bit, as under torch.func.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import functorch
import pytest
import torch
from agreement import same
from torch import nn
from torch.utils import _pytree as pytree

import torchfunc_jax
from torchfunc_jax import jit

LANES = torch.arange(3.0)
X = torch.linspace(-1, 1, 15).reshape(5, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def _torchs(F: Any) -> Any:
    return functorch if F is torch.func else F


def _without_buffers(F: Any, x: torch.Tensor) -> Any:
    function, params = _torchs(F).make_functional(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    )
    return params, function(params, X * x)


def _with_buffers(F: Any, x: torch.Tensor) -> Any:
    function, params, buffers = _torchs(F).make_functional_with_buffers(Net().eval())
    return params, buffers, function(params, buffers, X * x)


def _given(F: Any, x: torch.Tensor) -> Any:
    net = Net().eval()
    return F.functional_call(net, {name: p * x for name, p in net.named_parameters()}, (X,))


def _initialized(F: Any, x: torch.Tensor) -> Any:
    return [
        init(torch.empty(4, 4))
        for init in (
            nn.init.xavier_uniform_,
            nn.init.kaiming_normal_,
            nn.init.orthogonal_,
            nn.init.uniform_,
            nn.init.zeros_,
            nn.init.eye_,
        )
    ]


#: By name, what is made for one lane: a function of torch.func's names and of a number.
MAKES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a layer": lambda F, x: nn.Linear(3, 4).weight * x,
    "parameters": lambda F, x: dict(Net().named_parameters()),
    "a module that is called": lambda F, x: Net().eval()(X * x),
    "functional_call": _given,
    "make_functional": _without_buffers,
    "make_functional_with_buffers": _with_buffers,
    "torch.nn.init": _initialized,
    "other layers": lambda F, x: [
        [*m.parameters()] for m in (nn.LSTM(2, 3), nn.Conv2d(2, 3, 3), nn.MultiheadAttention(4, 2))
    ],
    "on the device meta": lambda F, x: nn.Linear(3, 4, device="meta").weight.shape[0] * x,
}
WAYS: dict[str, Callable[[Any, Callable[[torch.Tensor], Any]], Any]] = {
    "vmap, same": lambda F, f: F.vmap(f, randomness="same")(LANES),
    "vmap, different": lambda F, f: F.vmap(f, randomness="different")(LANES),
    "jvp": lambda F, f: F.jvp(lambda x: (f(x), x * 2)[1], (LANES[1],), (LANES[2],)),
    "grad": lambda F, f: F.grad(lambda x: sum(t.sum() * x for t in pytree.tree_leaves(f(x))))(
        LANES[2]
    ),
}


def _found(F: Any, name: str, way: str, how: str) -> Any:
    """What the call gives, and the next random numbers of torch's; the name of the error that it
    raises.
    """
    call = lambda: WAYS[way](F, lambda x: MAKES[name](F, x))
    torch.manual_seed(3)
    try:
        return jit(call)() if how == "jit" else call(), torch.rand(2)
    except RuntimeError:
        return "RuntimeError"


@pytest.mark.parametrize("how", ["recorded", "jit"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MAKES)
def test_made_inside(name: str, way: str, how: str) -> None:
    found, expected = (
        _found(torchfunc_jax, name, way, how),
        _found(torch.func, name, way, "torch.func"),
    )
    if (
        name in ("on the device meta", "make_functional_with_buffers")
        and expected == "RuntimeError" != found
    ):
        pytest.skip(
            "torch.func refuses to draw random numbers for tensors without data, and to copy a "
            "module under grad"
        )
    same(found, expected, graph=False)
    if "parameters" in name and way == "vmap, same":
        same(found, expected, rtol=0, atol=0, graph=False)
