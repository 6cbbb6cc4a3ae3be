"""Tensors that were made in inference mode, and what differentiates a function that uses them;
torch.func's results.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same
from ambient import torch_func_gives_zeros
from torch import nn

import torchfunc_jax
from torchfunc_jax import jit

Function = Callable[..., torch.Tensor]


def _made(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()


def _layer() -> nn.Module:
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).reshape(2, 3))
        layer.bias.fill_(0.5)
    return layer


#: By name: a function of a tensor that reads an inference tensor. Each is made anew, and so is the
#: tensor.
FUNCTIONS: dict[str, Callable[[torch.Tensor], Function]] = {
    "captured": lambda w: lambda x: (x * w).sin().sum(),
    "captured, in front": lambda w: lambda x: (w * x).sin().sum(),
    "a view": lambda w: lambda x: (x * w[None][0]).sin().sum(),
    "in a dict": lambda w: lambda x, d=types.MappingProxyType({"w": w}): (x * d["w"]).sin().sum(),
    "in a list": lambda w: lambda x: torch.stack([x, w]).sin().sum(),
    "by its name": lambda w: lambda x: torch.addcmul(x, x, x, value=1).mul(other=w).sum(),
    "an index": lambda w: lambda x, i=_made(lambda: torch.tensor([0, 2])): x[i].sin().sum(),
    "a mask": lambda w: (
        lambda x, m=_made(lambda: torch.tensor([True, False, True])): (
            torch.where(m, x, x * 2).sin().sum()
        )
    ),
    "a module": lambda w: lambda x, m=_made(_layer): m(x).sin().sum(),
}
CALLS: dict[str, Callable[[Any, Function, torch.Tensor], Any]] = {
    "call": lambda F, f, x: f(x),
    "grad": lambda F, f, x: F.grad(f)(x),
    "vmap": lambda F, f, x: F.vmap(f)(torch.stack([x, x * 2])),
    "vmap of grad": lambda F, f, x: F.vmap(F.grad(f))(torch.stack([x, x * 2])),
    "jvp": lambda F, f, x: F.jvp(f, (x,), (x,)),
    "vjp": lambda F, f, x: F.vjp(f, x)[1](torch.tensor(1.0)),
    "jacrev": lambda F, f, x: F.jacrev(f)(x),
    "jacfwd": lambda F, f, x: F.jacfwd(f)(x),
    "hessian": lambda F, f, x: F.hessian(f)(x),
}


def _repeated(call: Function) -> Function:
    jitted = jit(call)
    return lambda x: (jitted(x), jitted(x))[1]


@pytest.mark.parametrize("mode", [False, True], ids=["", "in inference mode"])
@pytest.mark.parametrize("how", ["recorded", "jit", "jit inside"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_in_torch_func(name: str, call: str, how: str, mode: bool) -> None:
    if mode and call not in ("call", "vmap") and torch_func_gives_zeros():
        pytest.skip("torch.func's derivatives in inference mode are zero")

    def found(F: Any, how: str) -> Any:
        f = FUNCTIONS[name](_made(lambda: torch.tensor([2.0, 3.0, 4.0])))
        x = torch.tensor([0.5, -1.0, 2.0])
        with torch.inference_mode(mode):
            if how == "jit":
                return _repeated(lambda x: CALLS[call](F, f, x))(x)
            if how == "jit inside":
                return CALLS[call](F, jit(f), x)
            return CALLS[call](F, f, x)

    if (
        name == "a module"
        and call in ("grad", "vmap of grad", "vjp", "jacrev", "hessian")
        and not mode
    ):
        # its weight requires grad
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            found(torch.func, "torch.func")
        return
    same(found(torchfunc_jax, how), found(torch.func, "torch.func"))


def test_the_target_of_a_write_is_the_result() -> None:
    w = _made(lambda: torch.zeros(3))

    def f(x: torch.Tensor) -> torch.Tensor:
        assert w.add_(x) is w
        return w * 2

    with torch.inference_mode():
        same(torchfunc_jax.functionalize(f)(torch.ones(3)), torch.full((3,), 2.0))
