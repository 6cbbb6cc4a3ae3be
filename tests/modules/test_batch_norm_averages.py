"""BatchNorm(momentum=None), whose running statistics are averages over all batches so far, beside
plain PyTorch, in several calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import torchfunc_jax


def _called(layer: nn.Module) -> Callable[..., Any]:
    return torchfunc_jax.jit(layer)


def _under_autograd(layer: nn.Module) -> Callable[..., Any]:
    jitted = torchfunc_jax.jit(lambda x: layer(x))

    def run(x: torch.Tensor) -> torch.Tensor:
        out = jitted(x)
        out.square().sum().backward()
        return out

    return run


def _in_a_gradient(layer: nn.Module) -> Callable[..., Any]:
    """Buffers go in and come out, as in a training step in JAX's style."""

    def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        buffers = {name: b.clone() for name, b in buffers.items()}
        out = functional_call(layer, (params, buffers), (x,))
        return out.square().sum(), (out, buffers)

    step = torchfunc_jax.jit(torchfunc_jax.grad(loss, has_aux=True))

    def run(x: torch.Tensor) -> torch.Tensor:
        _, (out, buffers) = step(dict(layer.named_parameters()), dict(layer.named_buffers()), x)
        layer.load_state_dict(buffers, strict=False)
        return out

    return run


def _of_a_lane(layer: nn.Module) -> Callable[..., Any]:
    def forward(buffers: Any, x: torch.Tensor) -> Any:
        buffers = {name: b.clone() for name, b in buffers.items()}
        return functional_call(layer, buffers, (x,)), buffers

    return forward


def _in_lanes(layer: nn.Module) -> Callable[..., Any]:
    """One lane of an ensemble, which un-jitted is refused."""
    mapped = torchfunc_jax.jit(torchfunc_jax.vmap(_of_a_lane(layer)))

    def run(x: torch.Tensor) -> torch.Tensor:
        outs, buffers = mapped({name: b[None] for name, b in layer.named_buffers()}, x[None])
        layer.load_state_dict({name: b[0] for name, b in buffers.items()}, strict=False)
        return outs[0]

    return run


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)],
    ids=["float32", "float64"],
)
@pytest.mark.parametrize("wrap", [_called, _under_autograd, _in_a_gradient, _in_lanes])
def test_every_batch_counts_alike(wrap: Callable[..., Any], dtype: torch.dtype) -> None:
    layer = nn.BatchNorm2d(3, momentum=None, dtype=dtype)
    truth = copy.deepcopy(layer)
    run = wrap(layer)
    for size in (4, 2, 4, 3):
        x = torch.randn(size, 3, 2, 2, dtype=dtype) * size + 1
        torch.testing.assert_close(run(x), truth(x))
        torch.testing.assert_close(dict(layer.named_buffers()), dict(truth.named_buffers()))
    assert layer.num_batches_tracked == 4


def test_the_number_of_batches_of_a_lane_is_refused_as_by_torch() -> None:
    layer = nn.BatchNorm2d(3, momentum=None)
    for T in (torch.func, torchfunc_jax, torchfunc_jax):
        with pytest.raises(
            RuntimeError, match=r"vmap: It looks like you're calling \.item\(\) on a Tensor"
        ):
            T.vmap(_of_a_lane(layer))(
                {name: b[None] for name, b in layer.named_buffers()}, torch.randn(1, 4, 3, 2, 2)
            )
    assert layer.num_batches_tracked == 0
