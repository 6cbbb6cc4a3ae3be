"""A jax.Array never changes: each way by which an array becomes a tensor, or a tensor an array, and
then torch writes to the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge
import torchfunc_jax
from bridge.convert import tensors


def _array() -> jax.Array:
    return jnp.arange(64.0) + 1  # large enough that XLA and PyTorch share its memory


def _loaded(a: jax.Array) -> torch.Tensor:
    return bridge.load(nn.Linear(8, 8, bias=False), {"weight": a.reshape(8, 8)}).weight


#: an array becomes a tensor
_TENSORS: dict[str, Callable[[jax.Array], torch.Tensor]] = {
    "to_torch": bridge.to_torch,
    "to_torch on a device": lambda a: bridge.to_torch(a, torch.device("cpu")),
    "to_torch of bfloat16": lambda a: bridge.to_torch(a.astype(jnp.bfloat16)),
    "load": _loaded,
    "what a JAX function keeps": lambda a: bridge.from_jax(lambda x: (x, a))(torch.ones(64))[1],
    "an argument of a JAX function": lambda a: bridge.from_jax(lambda x, a: (x, a))(
        torch.ones(64), a
    )[1],
    "a view of an argument of a JAX function": lambda a: bridge.from_jax(
        lambda x, a: (x, a.reshape(8, 8))
    )(torch.ones(64), a)[1],
    "a JAX function in vmap": lambda a: torchfunc_jax.vmap(bridge.from_jax(lambda x: a + 0 * x))(
        torch.ones(2)
    )[1],
    "a JAX function in jit": lambda a: torchfunc_jax.jit(bridge.from_jax(lambda x: (x, a)))(
        torch.ones(64)
    )[1],
    "a gradient through a JAX function": lambda a: torch.func.grad(
        bridge.from_jax(lambda x: (x * a).sum())
    )(torch.ones(64)),
}


def _steps(t: torch.Tensor) -> None:
    p = nn.Parameter(t.detach(), requires_grad=True)
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], 0.1, momentum=0.9).step()


_WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda t: t.add_(100),
    "index": lambda t: t.__setitem__(0, 100),
    "out=": lambda t: torch.mul(t, 2, out=t),
    "data": lambda t: t.data.zero_(),
    "view": lambda t: t.view(-1)[:3].fill_(7),
    "copy_": lambda t: t.copy_(torch.zeros_like(t)),
    "numpy": lambda t: (
        t.float().numpy().fill(0) if t.dtype is torch.bfloat16 else t.numpy().fill(0)
    ),
    "optimizer": _steps,
}


@pytest.mark.parametrize("write", _WRITES)
@pytest.mark.parametrize("way", _TENSORS)
def test_an_array_that_became_a_tensor(way: str, write: str) -> None:
    a = _array()
    program = jax.jit(lambda x: x + a)
    before = np.array(a), np.array(program(0.0))
    t = _TENSORS[way](a).detach()
    old = t.clone()
    _WRITES[write](t)
    assert write == "numpy" or not torch.equal(t, old)
    np.testing.assert_array_equal(np.asarray(a), before[0])
    np.testing.assert_array_equal(np.asarray(program(0.0)), before[1])


def _module(t: torch.Tensor) -> nn.Module:
    module = nn.Linear(64, 1, bias=False)
    module.weight = nn.Parameter(t.view(1, 64))
    return module


class _Keeps(nn.Module):
    """A module that returns a tensor that it keeps, as it is."""

    def __init__(self, t: torch.Tensor) -> None:
        super().__init__()
        self.kept = t

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, self.kept


_T = torchfunc_jax
#: a tensor becomes an array
_ARRAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "to_jax": bridge.to_jax,
    "to_jax of a part": lambda t: bridge.to_jax(t[16:]),
    "to_jax of a parameter": lambda t: bridge.to_jax(nn.Parameter(t)),
    "params": lambda t: bridge.params(_module(t)),
    "captured, under jit": lambda t: _T.jit(lambda x: (x * 2, t))(_array()),
    "captured, under vmap": lambda t: _T.vmap(lambda x: (x * 2, t), out_dims=(0, None))(_array()),
    "captured and viewed": lambda t: _T.vmap(lambda x: (x * 2, t.view(8, 8)), out_dims=(0, None))(
        _array()
    ),
    "captured, by grad": lambda t: _T.grad(lambda x: ((x * 2).sum(), t), has_aux=True)(_array()),
    "captured, by vjp": lambda t: _T.vjp(lambda x: (x * 2, t), _array())[0],
    "captured, by jvp": lambda t: _T.jvp(lambda x: (x * t, t), (_array(),), (_array(),)),
    "captured, by jacrev": lambda t: _T.jacrev(lambda x: (x.sum(), t), has_aux=True)(_array()),
    "an argument beside arrays, under jit": lambda t: _T.jit(lambda x, w: (x * 2, w))(_array(), t),
    "an argument beside arrays, under vmap": lambda t: _T.vmap(
        lambda x, w: (x * 2, w), (0, None), (0, None)
    )(_array(), t),
    "an argument beside arrays, by grad": lambda t: _T.grad(
        lambda x, w: ((x * 2).sum(), w), has_aux=True
    )(_array(), t),
    "in jax.jit": lambda t: jax.jit(_T.vmap(lambda x: (x, t), out_dims=(0, None)))(_array()),
    "of a JAX function": lambda t: jax.jit(lambda a: bridge.from_jax(lambda a, t: (a, t))(a, t))(
        _array()
    ),
    "kept by a module, by functional_call": lambda t: _T.functional_call(
        _Keeps(t), {}, (_array(),)
    ),
    "call": lambda t: bridge.call(_module(t), {}, {}, _array(), strict=False),
}


@pytest.mark.parametrize("way", _ARRAYS)
def test_a_tensor_that_became_an_array(way: str) -> None:
    t = torch.arange(64.0) + 1
    for _ in range(2):  # the second call finds what the first has remembered
        arrays = [x for x in jax.tree.leaves(_ARRAYS[way](t)) if isinstance(x, jax.Array)]
        assert arrays
        before = [np.array(x) for x in arrays]
        with torch.no_grad():
            t.add_(100)
        for array, values in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(np.asarray(array), values)


@pytest.mark.parametrize(
    "transform",
    [_T.jit, _T.vmap, lambda f: _T.grad(lambda x: f(x).sum())],
    ids=["jit", "vmap", "grad"],
)
def test_a_result_is_computed_before_torch_writes(transform: Callable) -> None:
    """XLA runs large programs while Python goes on."""
    w, a = torch.ones(1000, 1000), jnp.ones((1000, 1000))
    f = transform(lambda x: (x @ w @ w.mT) * 1e-3 if x.dim() == 2 else w.mT @ w @ x)
    expected = np.asarray(f(a))
    for _ in range(5):
        w.fill_(1.0)
        found = f(a)
        w.fill_(5.0)
        np.testing.assert_allclose(np.asarray(found), expected)


def test_without_a_copy() -> None:
    t, a = torch.ones(64), _array()
    assert bridge.to_jax(t, copy=False).unsafe_buffer_pointer() == t.data_ptr()
    assert bridge.to_torch(a, copy=False).data_ptr() == a.unsafe_buffer_pointer()


@pytest.mark.parametrize(
    "transform", [_T.jit, _T.vmap, lambda f: _T.jit(_T.vmap(f))], ids=["jit", "vmap", "jit of vmap"]
)
def test_our_own_results_are_not_copied(
    transform: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a result is that of the array that XLA returned."""
    addresses: set[int] = set()

    def noting(view: Callable) -> Callable:
        def made(array: jax.Array, *args: Any, **kwargs: Any) -> torch.Tensor:
            addresses.add(array.unsafe_buffer_pointer())
            return view(array, *args, **kwargs)

        return made

    for name in ("view", "to_torch"):
        monkeypatch.setattr(tensors, name, noting(getattr(tensors, name)))
    f = transform(lambda x: x * 2)
    for _ in range(3):
        assert f(torch.ones(8, 64)).data_ptr() in addresses
