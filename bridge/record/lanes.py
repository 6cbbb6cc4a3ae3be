"""Runs vmaps of any number of lanes by programs for a few numbers of lanes: lanes are independent,
so 17 of them run as 24.

A program is compiled for one number of lanes, which takes up to a second; code whose batch size
changes from call to call would wait at each new size. From the second number of lanes on, a program
is compiled for the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... instead, and serves the numbers below
that too. The added lanes are copies of the last one. Its cotangent is shared among the copies:
zeros for them would be wrong, because zero times an infinite derivative is NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from bridge import private
from bridge.boundary.autograd import Untransformed
from bridge.record.entries import Begin, End, Input, Op, interned
from bridge.record.recorder import Recorder
from bridge.record.tensor import Aval, aval_of
from bridge.transform_kinds import FUNCTION

_BYTES = 2**28  # mapped inputs larger than this are not copied
_LIMIT = 256


class Wide:
    """A record that is one vmap and nothing else, and that can run with more lanes.

    Attributes:
        family: a key that is equal for records that differ only in the number of lanes.
        lanes, size: the number of lanes in the record, and in the wider one.
    """

    def __init__(
        self, recorder: Recorder, mapped: dict[int, int], placed: dict[int, int | None], lanes: int
    ) -> None:
        self.recorder, self.mapped, self.placed, self.lanes, self.size = (
            recorder,
            mapped,
            placed,
            lanes,
            _size_for(lanes),
        )
        self.family = tuple(
            [
                (_without(what.aval, mapped[number]), ())
                if type(what) is Input and number in mapped
                else (_alike(what), refs)
                for number, what, refs in _numbered(recorder.trace)
            ]
        )

    def record(self) -> Recorder:
        """The wider record."""
        wide = Recorder(self.recorder.execute)
        wide.copied = True
        wide.numbers, wide.count = self.recorder.numbers, self.recorder.count
        inputs = iter(self.recorder.inputs)
        for number, what, refs in _numbered(self.recorder.trace):
            if type(what) is Input:
                t = next(inputs)
                if number in self.mapped:
                    t = _filled_up(t, self.mapped[number], self.size)
                    what = interned(Input, aval_of(t))
                wide.inputs.append(t)
            wide.trace.append((_alike(what), refs))
        return wide

    def narrow(self, refs: Sequence[int], outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The wider record's results without the added lanes; refs: the results' numbers in the
        record.
        """
        return [
            t if (dim := self.placed[r]) is None else _narrowed(t, dim, self.lanes)
            for r, t in zip(refs, outs, strict=True)
        ]


class Widths:
    """Decides which records run by a wider program: those of a family that came with several
    numbers of lanes.

    A record gets a program of its own when its added lanes have taken longer than the wider program
    took to make. A family that writes to its inputs never runs by a wider program, which would
    write to copies.
    """

    def __init__(self) -> None:
        self.met: dict[Any, bool] = {}  # by family: whether it writes to its inputs
        # by family and size: the seconds that making the wider program took
        self.cost: dict[Any, float] = {}
        self.wasted: dict[Any, float] = {}  # by record: the seconds that the added lanes took

    def pays(self, wide: Wide, record: Hashable) -> bool:
        """Whether the record, given by a hashable key, should run by the wider program."""
        if wide.family not in self.met:
            for kept in (self.met, self.cost, self.wasted):
                if len(kept) >= _LIMIT:
                    kept.clear()
            self.met[wide.family] = False
            return False
        cost = self.cost.get((wide.family, wide.size), math.inf)
        if self.met[wide.family] or wide.size <= wide.lanes:
            return False
        return self.wasted.get(record, 0.0) < cost or private.bits_are_compared()

    def ran(self, wide: Wide, record: Hashable, seconds: float) -> None:
        """Note that the wider program has run for the record; its first run includes its
        compilation.
        """
        width = (wide.family, wide.size)
        if width in self.cost:
            self.wasted[record] = (
                self.wasted.get(record, 0.0) + seconds * (wide.size - wide.lanes) / wide.size
            )
        else:
            self.cost[width] = seconds


def wide(recorder: Recorder, refs: Sequence[int]) -> Wide | None:
    """The record with more lanes; None if it is more than one vmap, draws, writes, or also uses a
    mapped input otherwise.
    """
    if recorder.written or recorder.lasting:
        return None
    trace = list(_numbered(recorder.trace))
    of_input = dict(
        zip(
            [number for number, what, _ in trace if type(what) is Input],
            recorder.inputs,
            strict=True,
        )
    )
    (_, begin, operands), *inside = [entry for entry in trace if type(entry[1]) is not Input]
    if type(begin) is not Begin or not begin.kind.maps or begin.params[1] != "error":
        return None
    depths = list(
        itertools.accumulate(
            [(type(what) is Begin) - (type(what) is End) for _, what, _ in inside], initial=1
        )
    )
    if 0 in depths[:-1] or depths[-1]:
        return None
    functions = [
        what.params[0] for _, what, _ in inside if type(what) is Begin and what.kind is FUNCTION
    ]
    if any(cls.vmap is not torch.autograd.Function.vmap for cls in functions):
        return None  # it is told how many lanes there are
    first, end, _ = inside[-1]
    # what the function has kept has a value outside if no vmap maps it: the same for any number of
    # lanes
    placed = {**dict.fromkeys(range(inside[0][0], first)), **dict(enumerate(end.params, first))}
    dims = list(zip(operands, begin.params[0], strict=True))
    mapped = {number: dim for number, dim in dims if dim is not None}
    used = {number for _, _, refs in inside for number in refs}
    if (
        not mapped
        or any(mapped.get(number, dim) != dim for number, dim in dims)
        or not mapped.keys() <= of_input.keys() - used
        or not placed.keys() >= set(refs)
    ):
        return None
    lanes = {of_input[number].shape[dim] for number, dim in mapped.items()}
    if len(lanes) > 1 or 0 in lanes or sum(of_input[number].nbytes for number in mapped) > _BYTES:
        return None
    return Wide(recorder, mapped, placed, lanes.pop())


def _numbered(
    trace: Sequence[tuple[Any, tuple[int, ...]]],
) -> Iterator[tuple[int, Any, tuple[int, ...]]]:
    """Yield the entries of a record, each with the number of its first value."""
    count = 0
    for what, refs in trace:
        yield count, what, refs
        count += what.made


def _without(aval: Aval, dim: int) -> tuple[Any, ...]:
    return (aval.shape[:dim], aval.shape[dim + 1 :], aval.dtype, aval.device, aval.requires_grad)


def _alike(what: Any) -> Any:
    """An entry of a record without its operands' strides,
    which may depend on the number of lanes.
    """
    return what.alike if type(what) is Op else what


def _size_for(lanes: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least the number of lanes."""
    power = 1 << (lanes - 1).bit_length()
    return power * 3 // 4 if power >= 4 and lanes <= power * 3 // 4 else power


def _filled_up(t: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    lanes = t.shape[dim]
    # so that each lane is contiguous, and every view of it possible
    lanes_first = t.movedim(dim, 0)
    return torch.cat(
        [lanes_first, lanes_first[-1:].expand(size - lanes, *lanes_first.shape[1:])]
    ).movedim(0, dim)


def _narrowed(t: torch.Tensor, dim: int, lanes: int) -> torch.Tensor:
    return _Narrowed.apply(t, dim, lanes) if t.requires_grad else t.narrow(dim, 0, lanes).clone()


class _Narrowed(Untransformed):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, dim: int, lanes: int) -> torch.Tensor:
        ctx.dim, ctx.copies = dim, t.shape[dim] - lanes + 1
        return t.narrow(dim, 0, lanes).clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        lanes = cotangent.shape[ctx.dim]
        last = cotangent.narrow(ctx.dim, lanes - 1, 1) / ctx.copies
        copies = last.expand([ctx.copies if d == ctx.dim else -1 for d in range(cotangent.dim())])
        return torch.cat([cotangent.narrow(ctx.dim, 0, lanes - 1), copies], ctx.dim), None, None


class Writes(Exception):
    """The program of a wider record writes to its inputs, which are copies, or has an output that
    shares the memory of one.
    """
