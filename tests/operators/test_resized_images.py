"""Resizing images of bytes: PyTorch's fixed-point arithmetic, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchfunc_jax

SIZES = [{"size": s} for s in ((4, 5), (14, 18), (1, 30), (7, 20))] + [
    {"scale_factor": (0.5, 0.7)},
    {"scale_factor": (2.0, 1.5)},
    {"scale_factor": (0.5, 0.7), "recompute_scale_factor": True},
]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("how", [{}, {"align_corners": True}, {"antialias": True}], ids=str)
def test_bytes_are_pytorchs(mode: str, how: dict[str, bool]) -> None:
    for channels in (3, 5):  # PyTorch has two kernels
        x = torch.randint(
            0,
            256,
            (2, channels, 7, 9),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(channels),
        )
        for size in SIZES:
            if "recompute_scale_factor" in size and "align_corners" in how:
                continue

            def resized(x: torch.Tensor, size: dict[str, Any] = size) -> torch.Tensor:
                return F.interpolate(x, mode=mode, **size, **how)

            assert torch.equal(torchfunc_jax.jit(resized)(x), resized(x)), size
