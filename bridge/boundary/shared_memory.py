"""Finds tensors that share memory: inputs, before a compiled program that writes to its inputs runs
and after a transform has run.

Both treat each input as memory of its own, so a write to one is not seen in another. Also finds
outputs that share an input's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from bridge import private
from bridge.boundary.results import Output, Result, SharedOutput
from bridge.convert import dtypes
from bridge.convert.strides import span
from bridge.errors import NeedsTorch
from bridge.operators.views import can_repeat
from bridge.trace.storage import Node

_Span = tuple[int, int, bool]  # (first byte, the byte after the last, whether it is written to)


def _spans(tensors: Sequence[Any], written: frozenset[int]) -> list[_Span]:
    found = []
    for i, t in enumerate(tensors):
        if isinstance(t, torch.Tensor) and t.numel():
            count = (
                t.numel()
                if t.is_contiguous()
                else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            )
            first = t.data_ptr()
            found.append((first, first + count * t.element_size(), i in written))
    return found


class Sharing:
    """Whether two inputs of a program share memory and one of them is written to.

    Args:
        written: the inputs that the program writes to.
        count: how many of the inputs are arguments; the others are captured tensors.
    """

    __slots__ = ("_arguments", "_captured", "_known", "_spans")

    def __init__(self, written: Sequence[int], count: int) -> None:
        self._arguments, self._captured = frozenset(written), frozenset(i - count for i in written)
        # the identities and addresses of the captured tensors to which the spans belong
        self._known: list[Any] = []
        self._spans: list[_Span] = []

    def overlap(self, arguments: Sequence[Any], captured: Sequence[torch.Tensor]) -> bool:
        """Whether any two share a byte and one of the two is written to; a strided tensor counts as
        all bytes between its ends.
        """
        where = [(id(t), t.data_ptr()) for t in captured]
        if where != self._known:
            self._known, self._spans = (
                where,
                sorted(_spans(captured, self._captured), key=itemgetter(0)),
            )
        every = sorted([*self._spans, *_spans(arguments, self._arguments)], key=itemgetter(0))
        end = end_of_written = 0
        for first, last, is_written in every:
            if first < end_of_written or (is_written and first < end):
                return True
            end = max(end, last)
            if is_written:
                end_of_written = max(end_of_written, last)
        return False


def outputs(
    result: Result, leaves: Sequence[Any], met: Iterable[tuple[torch.Tensor, Node]]
) -> list[SharedOutput]:
    """The outputs at the border that share memory; met: the captured tensors with their nodes."""
    of_node = {node: t for t, node in met}
    found: list[SharedOutput] = []
    with private.without_modes():
        for i, (source, views) in result.shared.items():
            if isinstance(source, Output):
                v = result.values[source.index]
                if can_repeat(
                    torch.empty(v.shape, dtype=dtypes.to_torch(v.dtype), device="meta"), views
                ):
                    found.append((i, source, views))
                continue
            t = leaves[source] if isinstance(source, int) else of_node.get(source)
            if isinstance(t, torch.Tensor) and can_repeat(t, views):
                found.append((i, t, views))
    return found


def refuse(
    result: Result,
    arguments: Sequence[Any],
    met: Sequence[tuple[torch.Tensor, Node]],
    inside: bool = False,
) -> None:
    """Raise NeedsTorch if a computation has written to one of two inputs that share memory, because
    the other did not see it.

    Args:
        result: the computation's result, before its writes are carried out.
        arguments: leaves of the call.
        met: tensors from outside that the function used, each with its node.
        inside: the call was made inside another transform, in which nodes may have been written to
            before.
    """
    given = [t for t in arguments if isinstance(t, torch.Tensor)]
    changed = (
        [] if result.apart else [arguments[t] for t, _, _ in result.written if isinstance(t, int)]
    )
    nodes = [t for t, _, _ in result.written if not isinstance(t, int)]
    changed += [
        t for t, node in met if (node.version and not inside) or any(node.root is n for n in nodes)
    ]
    inputs = [
        (t, k < len(given))
        for k, t in enumerate([*given, *[t for t, _ in met]])
        if t.layout is torch.strided and t.numel()
    ]
    for target in changed:
        ways = [is_argument for t, is_argument in inputs if t is target]  # how the function gets it
        for other, is_argument in [
            *[x for x in inputs if x[0] is not target],
            *[(target, way) for way in ways[1:]],
        ]:
            of_one_trace = (
                hasattr(target, "node")
                and hasattr(other, "node")
                and not is_argument
                and not (ways and ways[0])
            )
            if ways and not of_one_trace and _overlap(target, other):
                raise NeedsTorch(
                    f"two inputs of a transform share memory (shapes {list(target.shape)} and "
                    f"{list(other.shape)}), and the function writes to one of them, which the "
                    "other would not see; pass clones (.clone()), or make the view inside the "
                    "function"
                )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a byte; views of one traced tensor are compared in its memory."""
    roots = [None if (node := getattr(t, "node", None)) is None else node.root for t in (a, b)]
    return roots[0] is roots[1] and np.shares_memory(_memory(a), _memory(b))


def _memory(t: torch.Tensor) -> np.ndarray:
    """An array that lies as a tensor does, and is not to be read; that of a traced tensor is
    counted from where its memory begins.
    """
    size, strides = t.element_size(), t.stride()
    at = t.data_ptr() if getattr(t, "node", None) is None else 1 + t.storage_offset() * size
    whole: Any = (ctypes.c_char * (size * span(t.shape, strides))).from_address(int(at))
    return np.ndarray(t.shape, f"V{size}", whole, 0, [size * s for s in strides])
