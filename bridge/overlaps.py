"""Writes that PyTorch refuses because of where their operands lie in memory: in part where the result goes."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bridge.errors import at_line
from bridge.tracing import Traced

aten = torch.ops.aten
#: operators that are no pointwise ones and look at where their operands lie too
_LOOKING = frozenset({
    "aten::copy_", "aten::scatter_", "aten::scatter_add_", "aten::index_add_", "aten::index_copy_", "aten::index_put_", "aten::addr_",
    "aten::cumsum", "aten::sort", "aten::gather", "aten::take", "aten::cat", "aten::kthvalue", "aten::index_select",
    "aten::where",
})  # fmt: skip
#: operators whose out= may not be an operand either
_APART = frozenset({"aten::gather", "aten::take", "aten::cat", "aten::kthvalue", "aten::index_select"})
_MESSAGE = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


def _extent(t: torch.Tensor) -> tuple[int, int] | None:
    """The first place of a tensor in its memory and the one after its last; None where it leaves gaps or meets itself."""
    dense = 1
    for n, s in sorted(((n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1), key=lambda p: p[1]):
        if s != dense:
            return None
        dense *= n
    return (int(t.storage_offset()), int(t.storage_offset()) + t.numel()) if t.numel() else None


def refuse_overlap(func: Any, targets: Iterable[Any], operands: Iterable[Any], out: bool = False) -> None:
    """Raise PyTorch's RuntimeError if an operand partly overlaps a target; the same memory as a whole is allowed, but for some out=.

    Args:
        func: the operator that writes.
        targets, operands: what it writes and reads; only traced tensors can share memory.
        out: whether the targets are out= arguments.
    """
    name = func._schema.name
    if torch.Tag.pointwise not in func.tags and name not in _LOOKING:
        return
    operands = [t for t in operands if type(t) is Traced]
    for target in targets:
        if type(target) is not Traced:
            continue
        for t in operands:
            if t.node.root is not target.node.root or (t is target and not (out and name in _APART)):
                continue
            mine, theirs = _extent(target), _extent(t)
            if mine is None or theirs is None or mine[1] <= theirs[0] or theirs[1] <= mine[0]:
                continue
            if (out and name in _APART) or mine != theirs or target.stride() != t.stride():
                raise RuntimeError(_MESSAGE + at_line())
