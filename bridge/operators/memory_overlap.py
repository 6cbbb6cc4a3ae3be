"""Writes that PyTorch refuses because an operand partly overlaps the memory that the result is written to."""
from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch

from bridge.errors import at_line
from bridge.trace.tracing import Traced

_MESSAGE = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


def _extent(t: torch.Tensor) -> tuple[int, int] | None:
    """The offset of a tensor's first element in its memory and the offset after its last; None if it has gaps or overlaps itself."""
    dense = 1
    for n, s in sorted(((n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1), key=lambda p: p[1]):
        if s != dense:
            return None
        dense *= n
    return (int(t.storage_offset()), int(t.storage_offset()) + t.numel()) if t.numel() else None


def refuse_overlap(apart: Container[str], targets: Iterable[Any], operands: Iterable[tuple[str, Any]]) -> None:
    """Raise PyTorch's RuntimeError if an operand partly overlaps a target that is written, or lies in the same memory and may not.

    apart: names of operands that must not share a target's memory at all.  operands: (name, tensor) of the tensors that are read.
    """
    named = [(name, t) for name, t in operands if type(t) is Traced]
    for target in targets:
        if type(target) is not Traced:
            continue
        for name, t in named:
            if t.node.root is not target.node.root or (t is target and name not in apart):
                continue
            mine, theirs = _extent(target), _extent(t)
            if mine is None or theirs is None or mine[1] <= theirs[0] or theirs[1] <= mine[0]:
                continue
            if name in apart or mine != theirs or target.stride() != t.stride():
                raise RuntimeError(_MESSAGE + at_line())
