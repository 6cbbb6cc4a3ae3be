"""Containers of tensors that are no nodes of trees and that torch.func.vmap maps, because their
library has taught it to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.vmap as torchs
from agreement import same
from torch import nn
from torch.utils import _pytree as pytree

import torchfunc_jax
from torchfunc_jax import jit

X = torch.linspace(-1, 1, 15).reshape(5, 3)
ROWS = torch.linspace(-2, 1, 45).reshape(3, 5, 3)


class Weights(nn.Module):
    """Parameters under names; inside of a vmap they are a dict."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, t in tensors.items():
            self.register_parameter(name, nn.Parameter(t))


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.func.vmap maps Weights, in the way in which tensordict teaches it its own."""
    process, create = torchs._process_batched_inputs, torchs._create_batched_inputs

    def opened(args: Any) -> Any:
        return pytree.tree_map(
            lambda x: dict(x.named_parameters()) if isinstance(x, Weights) else x, args
        )

    def processed(in_dims: Any, args: Any, func: Any) -> Any:
        flat, spec = pytree.tree_flatten(args)
        dims = torchs._broadcast_to_and_flatten(in_dims, spec)
        given = zip(flat, dims, strict=True)
        (size, *_), *_ = [
            x.shape if not isinstance(x, Weights) else next(x.parameters()).shape
            for x, d in given
            if d is not None
        ]
        return size, dims, flat, spec

    def created(dims: Any, flat: Any, level: int, spec: Any) -> Any:
        lanes = [
            pytree.tree_map(
                lambda t, d=d: t if d is None else torchs._add_batch_dim(t, d, level), opened(x)
            )
            for x, d in zip(flat, dims, strict=True)
        ]
        return pytree.tree_unflatten(lanes, spec)

    monkeypatch.setattr(torchs, "_process_batched_inputs", processed)
    monkeypatch.setattr(torchs, "_create_batched_inputs", created)
    yield
    assert (process, create) != (processed, created)


def _model(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def _weights() -> Weights:
    return Weights(
        w=torch.linspace(-1, 2, 18).reshape(3, 3, 2), b=torch.linspace(0, 1, 6).reshape(3, 2)
    )


def _trained(F: Any) -> Any:
    weights = _weights()
    F.vmap(_model, (0, None))(weights, X).square().sum().backward()
    return [p.grad for p in weights.parameters()]


CALLS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda F: F.vmap(_model, (0, None))(_weights(), X),
    "every argument": lambda F: F.vmap(_model)(_weights(), ROWS),
    "in a tuple": lambda F: F.vmap(lambda both: _model(*both), ((0, None),))((_weights(), X)),
    "beside a dict": lambda F: F.vmap(lambda p, q: _model(p, q["x"]), (0, {"x": 1}))(
        _weights(), {"x": ROWS.movedim(0, 1)}
    ),
    "vmap of vmap": lambda F: F.vmap(lambda x: F.vmap(_model, (0, None))(_weights(), x))(X),
    "vmap of grad": lambda F: F.vmap(F.grad(lambda p, x: _model(p, x).sum()), (0, None))(
        _weights(), X
    ),
    "backward": _trained,
}


@pytest.mark.parametrize("way", ["recorded", "jit"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("taught")
def test_a_container(name: str, way: str) -> None:
    call, F = CALLS[name], torchfunc_jax
    found = jit(lambda: call(F))() if way == "jit" else call(F)
    same(found, call(torch.func), graph=False)


def test_torch_func_has_not_been_taught() -> None:
    for F in (torch.func, torchfunc_jax):
        with pytest.raises(ValueError, match="We cannot vmap over non-Tensor arguments"):
            F.vmap(_model, (0, None))(_weights(), X)


@pytest.mark.parametrize("way", ["recorded", "jit"])
def test_critics_of_tensordict(way: str) -> None:
    tensordict = pytest.importorskip("tensordict")
    torch.manual_seed(0)
    critics = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(3)]
    params = tensordict.TensorDict.from_modules(*critics, as_module=True)

    def call(p: Any, x: torch.Tensor) -> torch.Tensor:
        with p.to_module(critics[0]):
            return critics[0](x)

    def trained(F: Any, how: str) -> Any:
        params.zero_grad()
        step = lambda x: F.vmap(call, (0, None))(params, x)
        values = jit(step)(X) if how == "jit" else step(X)
        values.min(0).values.square().sum().backward()
        return (
            values,
            [p.grad.clone() for p in params.parameters()],
            F.vmap(call, (0, None))(params.data, X),
        )

    same(trained(torchfunc_jax, way), trained(torch.func, "recorded"))
