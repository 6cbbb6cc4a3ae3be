"""Fake quantization inside transforms, beside plain PyTorch's kernels and their straight-through
derivatives.
"""

from __future__ import annotations

import pytest
import torch
from agreement import same
from every_way import in_every_way
from torch.ao.quantization import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)

import torchfunc_jax
from torchfunc_jax import functional_call, grad, jit

_channels = torch.tensor([0.02, 0.1, 0.5])
_zeros = torch.tensor([-3, 0, 7], dtype=torch.int32)

CASES = {
    "tensor": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.03, -5, -16, 15),
    "tensor, unsigned": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.01, 128, 0, 255),
    "tensor, qparams": lambda x: torch.fake_quantize_per_tensor_affine(
        x, torch.tensor(0.03), torch.tensor(3, dtype=torch.int32), -16, 15
    ),
    "channels": lambda x: torch.fake_quantize_per_channel_affine(x, _channels, _zeros, 1, -16, 15),
    "channels, real zero points": lambda x: torch.fake_quantize_per_channel_affine(
        x, _channels, _zeros * 1.3, 1, -16, 15
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_straight_through_gradients(name):
    in_every_way(CASES[name], torch.randn(4, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["tensor", "channels"])
def test_dtypes(name, dtype):
    x = torch.randn(4, 3).to(dtype)
    try:
        expected = CASES[name](x)
    except RuntimeError:
        with pytest.raises((RuntimeError, NotImplementedError)):
            jit(CASES[name])(x)
        return
    same(jit(CASES[name])(x), expected)


def test_extreme_and_halfway_values():
    x = torch.tensor(
        [
            [torch.nan, torch.inf, -torch.inf],
            [1e30, -1e30, -0.0],
            [0.5, 1.5, 2.5],
            [0.25, -0.5, -1.5],
        ]
    )
    for run in (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 1.0, 1, -8, 7),
        lambda x: torch.fake_quantize_per_channel_affine(x, torch.ones(3), _zeros, 1, -8, 7),
    ):
        same(jit(run)(x), run(x))


LEARNED = {
    "tensor": lambda x, s, z: torch._fake_quantize_learnable_per_tensor_affine(
        x, s, z, -16, 15, 0.5
    ),
    "channels": lambda x, s, z: torch._fake_quantize_learnable_per_channel_affine(
        x, s, z, 1, -16, 15, 0.5
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_scale_and_zero_point(name):
    count = 1 if name == "tensor" else 3
    scale, zero = (
        torch.full((count,), 0.05) * torch.arange(1, count + 1),
        torch.arange(count) * 2.2 + 1.3,
    )
    in_every_way(LEARNED[name], torch.randn(4, 3), scale, zero, lanes=False, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("flags", [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_an_observer_and_a_quantization_in_one(per_row, symmetric, flags):
    n = 3 if per_row else 1

    def state():
        zeros = torch.zeros(n, dtype=torch.int32)
        return (
            torch.full((n,), -0.5),
            torch.full((n,), torch.inf * -1 if flags[0] else 0.7),
            torch.full((n,), 0.3),
            zeros,
        )

    def run(x, *buffers):
        on = [torch.tensor([f]) for f in flags]
        return torch.fused_moving_avg_obs_fake_quant(
            x, *on, *buffers, 0.1, -128, 127, 0, per_row, symmetric
        )

    mine, theirs = state(), state()
    compiled = jit(run)
    for scale in (1.0, 3.0, 1e-6):
        x = torch.randn(3, 4) * scale
        same(compiled(x, *mine), run(x, *theirs))
        same(mine, theirs)
    slope = grad(lambda x, *b: run(x, *b).square().sum())(x, *[b.clone() for b in mine])
    leaf = x.clone().requires_grad_()
    run(leaf, *[b.clone() for b in mine]).square().sum().backward()
    same(slope, leaf.grad)


def _network(per_channel):
    torch.manual_seed(0)
    options = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8}
    if per_channel:
        weight = FusedMovingAvgObsFakeQuantize(
            MovingAveragePerChannelMinMaxObserver,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
            **options,
        )
    else:
        weight = FusedMovingAvgObsFakeQuantize(
            MovingAverageMinMaxObserver, qscheme=torch.per_tensor_symmetric, **options
        )

    class Quantized(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.weight, self.out = (
                torch.nn.Linear(3, 4),
                weight,
                FusedMovingAvgObsFakeQuantize(),
            )

        def forward(self, x):
            return self.out(
                torch.nn.functional.linear(x, self.weight(self.linear.weight), self.linear.bias)
            )

    return Quantized()


@pytest.mark.parametrize("per_channel", [False, True])
def test_training_with_fused_observers(per_channel):
    mine, theirs = _network(per_channel), _network(per_channel)
    compiled = jit(mine)
    if per_channel:
        with pytest.raises(RuntimeError, match="call the module once outside"):
            compiled(torch.randn(5, 3))
        for module in (mine, theirs):
            module(torch.ones(5, 3))
    for step in range(3):
        x = torch.randn(5, 3) * (step + 1)
        for module, call in ((mine, compiled), (theirs, theirs)):
            module.zero_grad()
            call(x).square().sum().backward()
            with torch.no_grad():
                for p in module.parameters():
                    p -= 0.01 * p.grad
    same(dict(mine.named_parameters()), dict(theirs.named_parameters()), rtol=1e-4, atol=1e-5)
    same(dict(mine.named_buffers()), dict(theirs.named_buffers()), rtol=1e-4, atol=1e-5)


def test_training_with_an_observer_beside_it():
    mine, theirs = (
        FakeQuantize(MovingAverageMinMaxObserver),
        FakeQuantize(MovingAverageMinMaxObserver),
    )

    def loss(func, module):
        return lambda x, buffers: (func(module, buffers, (x,)) ** 2).sum()

    for scale in (1.0, 2.0):
        x = torch.randn(5, 3) * scale
        buffers = [{k: b.clone() for k, b in m.named_buffers()} for m in (mine, theirs)]
        found = grad(loss(functional_call, mine))(x, buffers[0])
        same(found, torch.func.grad(loss(torch.func.functional_call, theirs))(x, buffers[1]))
        same(buffers[0], buffers[1])


REFUSED = {
    "a range the wrong way round": lambda x: torch.fake_quantize_per_tensor_affine(
        x, 0.1, 0, 7, -8
    ),
    "a zero point outside": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 9, -8, 7),
    "too few scales": lambda x: torch.fake_quantize_per_channel_affine(
        x, _channels[:2], _zeros[:2], 1, -16, 15
    ),
    "an axis outside": lambda x: torch.fake_quantize_per_channel_affine(
        x, _channels, _zeros, 2, -16, 15
    ),
    "zero points outside": lambda x: torch.fake_quantize_per_channel_affine(
        x, _channels, _zeros, 1, -2, 2
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses(name):
    with pytest.raises((RuntimeError, IndexError)):
        REFUSED[name](torch.randn(4, 3))
    for wrapped in (jit, lambda f: grad(lambda x: f(x).sum()), torchfunc_jax.functionalize):
        with pytest.raises((RuntimeError, IndexError)):
            wrapped(REFUSED[name])(torch.randn(4, 3))
