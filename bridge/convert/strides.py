"""The strides of tensors."""

from __future__ import annotations

import torch


def strides_of(t: object) -> tuple[int, ...] | None:
    """The strides of a tensor that is not contiguous; None for one that is contiguous or has no
    strides.
    """
    if (
        not isinstance(t, torch.Tensor)
        or t.layout is not torch.strided
        or t.is_nested
        or t.is_contiguous()
    ):
        return None
    return t.stride()


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many elements of memory a tensor reaches over."""
    return 0 if 0 in shape else 1 + sum([(n - 1) * s for n, s in zip(shape, strides, strict=True)])
