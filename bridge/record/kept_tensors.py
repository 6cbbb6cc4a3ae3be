"""Gives the tensors of a record that the function has kept elsewhere, in a module or a list, their
values when its transform returns.

torch.func does the same with a tensor that no vmap maps. One whose value cannot be had raises
EscapedTensorError when it is used.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import torch

from bridge import private
from bridge.process import process
from bridge.record.recorder import Recorder
from bridge.record.tensor import referred_to
from bridge.trace.tracing import Traced, settled

_LIMIT = 1024  # records whose kept tensors are remembered


class Left:
    """The tensors that the function of a record still refers to, besides its results.

    Attributes:
        refs: the numbers of these, and of those that it has kept in other calls of the same record:
            what a cycle of Python's keeps alive depends on when that was collected last, and each
            set of results has its own program.
    """

    def __init__(self, recorder: Recorder, outs: Sequence[int]) -> None:
        self.tensors = {
            t.ref: t
            for t, kept in zip(recorder.tensors, referred_to(recorder.tensors), strict=True)
            if kept and t.level is not None and recorder.leaves(t) and private.only_python_refers(t)
        }
        self.refs: list[int] = []
        if self.tensors:
            self.record = hash((tuple(recorder.trace), tuple(outs)))
            if len(process.kept) >= _LIMIT:
                process.kept.clear()
            known = process.kept.setdefault(self.record, {})
            known.update({ref: True for ref in self.tensors if ref not in known})
            self.refs = sorted([ref for ref, exists in known.items() if exists])

    def without(self, refs: Sequence[int]) -> None:
        """Note that these values exist only inside of the transforms: the numbers that a vmap draws
        for each of its lanes, for example.
        """
        process.kept[self.record].update(dict.fromkeys(refs, False))
        self.refs = [ref for ref in self.refs if ref not in refs]

    def fill_in(self, recorder: Recorder, values: Sequence[torch.Tensor]) -> None:
        """Make plain tensors of them; values: those with the numbers ``refs``."""
        # one tensor may be several values
        others = collections.Counter(map(id, [*recorder.inputs, *values]))
        for ref, value in zip(self.refs, values, strict=True):
            if ref in self.tensors and (type(value) is not Traced or settled((value,))):
                own = others[id(value)] == 1 and private.only_python_refers(value)
                torch.utils.swap_tensors(self.tensors[ref], value if own else value.view_as(value))
