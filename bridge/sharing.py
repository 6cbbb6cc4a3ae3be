"""Which tensors lie in the same memory: asked before a compiled program that writes to its inputs is run.

A program takes each input as memory of its own, so what it writes to one is not seen in another.
"""
from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

_Span = tuple[int, int, bool]  # first byte, the one after the last, whether it is written to


def _spans(tensors: Sequence[Any], written: frozenset[int]) -> list[_Span]:
    found = []
    for i, t in enumerate(tensors):
        if isinstance(t, torch.Tensor) and t.numel():
            count = t.numel() if t.is_contiguous() else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            first = t.data_ptr()
            found.append((first, first + count * t.element_size(), i in written))
    return found


class Sharing:
    """Whether two inputs of a program share memory and one of them is written to.

    Args:
        written: ("argument" or "captured", index) of the inputs that the program writes to.
    """

    __slots__ = ("_arguments", "_captured", "_known", "_spans")

    def __init__(self, written: Sequence[tuple[str, int]]) -> None:
        self._arguments = frozenset(i for kind, i in written if kind == "argument")
        self._captured = frozenset(i for kind, i in written if kind == "captured")
        self._known: list[Any] = []  # the memory of the captured tensors when their spans were looked at
        self._spans: list[_Span] = []

    def overlap(self, arguments: Sequence[Any], captured: Sequence[torch.Tensor]) -> bool:
        """Whether any two share a byte and one of the two is written to; strided tensors count as all that lies between their ends."""
        where = [(id(t), t.data_ptr()) for t in captured]
        if where != self._known:
            self._known, self._spans = where, sorted(_spans(captured, self._captured), key=itemgetter(0))
        every = sorted([*self._spans, *_spans(arguments, self._arguments)], key=itemgetter(0))
        end = end_of_written = 0
        for first, last, is_written in every:
            if first < end_of_written or (is_written and first < end):
                return True
            end = max(end, last)
            if is_written:
                end_of_written = max(end_of_written, last)
        return False


__all__ = ["Sharing"]
