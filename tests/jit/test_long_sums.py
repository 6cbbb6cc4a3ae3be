"""Sums of many numbers over several dimensions lose no more digits than PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchfunc_jax

X = torch.randn(24, 16, 32, 32, generator=torch.Generator().manual_seed(0)).relu() * 3 + 5
COTANGENT = X.flip(0).square()

SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean of squares": lambda x: x.square().mean(),
    "sum of an image": lambda x: (x * x).sum((1, 2, 3)),
    "variance of a channel": lambda x: x.var((0, 2, 3)),
    "variance of all": lambda x: x.var(),
    "norm": lambda x: torch.linalg.vector_norm(x * 1.5, dim=(0, 2, 3)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "instance norm": F.instance_norm,
    "mean squared error": lambda x: F.mse_loss(x, torch.zeros_like(x)),
}

GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scale of a channel": lambda scale, x: (x * scale[:, None, None]).square().mean(),
    "bias of a convolution": lambda bias, x: (
        F.conv2d(x, torch.ones(16, 1, 1, 1, dtype=x.dtype), bias, groups=16).square()
    ).mean(),
    "weight of a batch norm": lambda weight, x: (
        (F.batch_norm(x, None, None, weight, weight, training=True) - x).square().mean()
    ),
}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "vmap"])
def test_values(name: str, jitted: bool) -> None:
    function, x, exact = SUMS[name], X, SUMS[name](X.double())
    if not jitted:
        x, exact = X[None], exact[None]
    called = torchfunc_jax.jit(function) if jitted else torchfunc_jax.vmap(function)
    assert error(called(x), exact) < 1e-6


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "unjitted"])
def test_gradients(name: str, jitted: bool) -> None:
    function, w = GRADIENTS[name], torch.linspace(0.5, 1.5, 16)
    gradient = torchfunc_jax.grad(function)
    found = (torchfunc_jax.jit(gradient) if jitted else gradient)(w, X)
    assert error(found, torch.func.grad(function)(w.double(), X.double())) < 1e-6


def test_backward_through_a_compiled_module() -> None:
    module = nn.Conv2d(16, 16, 1, groups=16)
    torchfunc_jax.jit(module)(X).backward(COTANGENT)
    assert error(module.bias.grad, COTANGENT.double().sum((0, 2, 3))) < 1e-6
