"""Modules in which one submodule has two names: a call with other tensors leaves its own ones in
it, where torch.func.functional_call leaves those of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import bridge
from torchfunc_jax import functional_call, grad, jit, vmap


class Shared(nn.Module):
    """A layer and a norm with two names each; a third norm is tied to both, but a module of its
    own. It counts its calls in a buffer, and the norm replaces one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.tied = nn.Linear(2, 2), nn.LayerNorm(2), nn.LayerNorm(2)
        self.last, self.again = self.first, self.norm
        self.tied.weight = self.norm.weight
        self.norm.register_buffer("shift", torch.zeros(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        self.calls = self.calls + 1
        self.norm.shift = self.norm.shift + 1
        if fail:
            raise ZeroDivisionError
        hidden = self.tied(self.norm(self.first(x)).tanh())
        return self.last(self.again(hidden)) + self.again.shift


X = torch.randn(3, 2)
OWN = ("calls",)  # the call gives it no value, so that the module keeps what forward has put there


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return module.state_dict(keep_vars=True)


def given(module: nn.Module) -> dict[str, torch.Tensor]:
    """Other values for all but ``calls``, each under the first of its names."""
    return {
        name: t.detach() + 0.5
        for members in (module.named_parameters(), module.named_buffers())
        for name, t in members
        if name not in OWN
    }


def by_hand(values: dict[str, torch.Tensor]) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return nn.functional.layer_norm(x, (2,), values["norm.weight"], values[f"{name}.bias"])

    def linear(x: torch.Tensor) -> torch.Tensor:
        return x @ values["first.weight"].T + values["first.bias"]

    hidden = norm(norm(linear(X), "norm").tanh(), "tied")
    return linear(norm(hidden, "norm")) + values["norm.shift"] + 1


def lanes(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([t, t]) for name, t in values.items()}


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "outside": lambda f, values: f(values),
    "vmap": lambda f, values: vmap(f)(lanes(values))[1],
    "grad": lambda f, values: grad(lambda v: (f({**v}).sum(), f({**v})), has_aux=True)(values)[1],
    "jit": lambda f, values: [program({**values}) for program in [jit(f)] for _ in range(2)][1],
    "jit of vmap": lambda f, values: jit(vmap(f))(lanes(values))[1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("api", [functional_call, torch.func.functional_call])
def test_the_module_has_its_own_tensors_after_a_call(api: Callable[..., Any], way: str) -> None:
    if api is not functional_call and way == "outside":
        pytest.skip("PyTorch alone")
    module = Shared()
    own, values = tensors(module), given(module)
    expected, shift = by_hand(values), values["norm.shift"]
    torch.testing.assert_close(WAYS[way](lambda v: api(module, v, (X,)), values), expected)
    assert not kept(module, own)
    if way == "outside":  # PyTorch puts what has replaced a buffer into the dict
        torch.testing.assert_close(values["norm.shift"], shift + 1)
    assert module.calls == (2 if way in ("grad", "jit") else 1)


def kept(module: nn.Module, own: dict[str, torch.Tensor]) -> list[str]:
    """The names under which the module has other tensors than its own."""
    return [name for name, t in tensors(module).items() if t is not own[name] and name not in OWN]


@pytest.mark.parametrize("tie", [True, False])
def test_values_under_both_names(tie: bool) -> None:
    module = Shared()
    own, values = tensors(module), given(module)
    expected, both = by_hand(values), dict(values)
    both |= {name.replace("first", "last").replace("norm", "again"): t for name, t in both.items()}
    both |= {"tied.weight": values["norm.weight"], "tied.bias": values["tied.bias"]}
    found = jit(lambda v: functional_call(module, v, (X,), tie_weights=tie))(both)
    torch.testing.assert_close(found, expected)
    assert not kept(module, own)


def test_the_function_of_a_module() -> None:
    module = Shared()
    own, values = tensors(module), given(module)
    expected = by_hand(values)
    apply, _, state = bridge.function(module)
    arrays = {name: jnp.asarray(t.numpy()) for name, t in values.items()}
    fixed = {name: arrays.pop(name) if name in arrays else x for name, x in state.items()}
    call = lambda p: apply(p, fixed, jnp.asarray(X.numpy()))
    with bridge.compiling.correctly():
        for found, after in (call(arrays), jax.jit(call)(arrays)):
            torch.testing.assert_close(torch.tensor(found.tolist()), expected)
            assert after["norm.shift"].tolist() == [1.5, 1.5] and after["calls"] == 1
    assert not kept(module, own) and module.calls == 0


@pytest.mark.parametrize("transform", [lambda f: f, vmap, lambda f: jit(vmap(f))])
def test_a_call_that_raises(transform: Callable[..., Any]) -> None:
    module = Shared()
    own, values = tensors(module), lanes(given(module))
    with pytest.raises(ZeroDivisionError):
        transform(lambda v: functional_call(module, v, (X, True)))(values)
    assert not kept(module, own)
