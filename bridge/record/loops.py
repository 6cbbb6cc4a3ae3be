"""Finds parts of a record that repeat, and makes loops of them: thirty equal steps are traced and
compiled as one step.

A step is a sequence of operators that repeats several times without a gap, with the same static
arguments and shapes. Each operand is the same tensor in all repetitions, or a value of the
repetition before (it is carried), or a value of the same repetition. Python numbers may differ
between repetitions.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from bridge.record.entries import Op, Out

# fewer repetitions, or fewer operators in all of them, are not worth a loop
_TIMES, _ENTRIES = 4, 48
_PERIODS = 6  # how many step lengths are tried at one entry


@dataclasses.dataclass(slots=True, eq=False)
class Loop:
    """A step that repeats.

    Attributes:
        entries: those of the first repetition: (operator, operands, first number of its results);
            an operand is the number of a value that all repetitions share, or ("carried", k), or
            ("own", number in the first repetition).
        carried: for each carried value, its number before the first repetition, and its number
            after it.
        last: for each carried value, its number after the last repetition.
        plain: the entries of all repetitions, as they stand in the record.
    """

    entries: list[Any]
    carried: list[tuple[int, int]]
    last: list[int]
    plain: list[Any]
    times: int

    @property
    def numbers(self) -> int:
        """How many Python numbers one repetition takes."""
        return sum(what.numbers for what, _, _ in self.entries)


def rolled(entries: list[Any], uses: dict[int, int], since: int) -> list[Any]:
    """The entries of a block, with a loop in place of each part that repeats.

    Args:
        entries: those of the block.
        uses: how often each value is used in the whole record.
        since: the number of the first value that may be made in a loop.
    """
    marks = [
        id(e[0]) if type(e) is tuple and e[2] >= since and _simple(e[0]) else -k
        for k, e in enumerate(entries, 1)
    ]
    places: dict[int, list[int]] = {}
    for at, mark in enumerate(marks):
        places.setdefault(mark, []).append(at)
    found: list[Any] = []
    at = 0
    while at < len(entries):
        loop = _loop_at(entries, marks, places, at, uses)
        found.append(loop or entries[at])
        at += len(loop.plain) if loop else 1
    return found


def _simple(what: object) -> bool:
    """Whether it is an operator under grad mode that writes nothing and whose results are all
    tensors.
    """
    if type(what) is not Op or what.changed or not what.grad:
        return False
    outs = [what.outs] if type(what.outs) is Out else what.outs
    return type(outs) in (list, tuple) and all(type(o) is Out for o in outs)


def _loop_at(
    entries: list[Any],
    marks: list[int],
    places: dict[int, list[int]],
    at: int,
    uses: dict[int, int],
) -> Loop | None:
    later = places[marks[at]]
    for place in later[(k := later.index(at)) + 1 : k + 1 + _PERIODS]:
        period = place - at
        same = 0
        while place + same < len(marks) and marks[at + same] == marks[place + same]:
            same += 1
        # without the last one, which stays outside: later entries may use any of its values
        times = same // period
        if times >= _TIMES - 1 and (times + 1) * period >= _ENTRIES:
            loop = _made(entries[at : at + period * times], period, times, uses)
            if loop is not None:
                return loop
    return None


def _made(entries: list[Any], period: int, times: int, uses: dict[int, int]) -> Loop | None:
    # by a value's number: the repetition, entry and result that makes it
    made: dict[int, tuple[int, int, int]] = {}
    for at, (what, _, first) in enumerate(entries):
        made.update((first + k, (at // period, at % period, k)) for k in range(what.made))

    def own(entry: int, k: int, repetition: int = 0) -> int:
        return entries[repetition * period + entry][2] + k

    # how often each value is used in the repetitions
    inside = collections.Counter(ref for _, refs, _ in entries for ref in refs)
    carried: dict[tuple[int, int, int], int] = {}
    steps: list[Any] = []
    for at in range(period):
        what, refs, first = entries[at]
        operands: list[Any] = []
        for position, ref in enumerate(refs):
            again = [entries[at + r * period][1][position] for r in range(1, times)]
            where = [made.get(r) for r in again]
            if ref in made:  # a value of the same repetition
                _, entry, k = made[ref]
                if where != [(r, entry, k) for r in range(1, times)]:
                    return None
                operands.append(("own", ref))
            elif all(r == ref for r in again):
                operands.append(ref)
            else:  # a value of the repetition before
                if where[0] is None or where != [(r, *where[0][1:]) for r in range(times - 1)]:
                    return None
                _, entry, k = where[0]
                operands.append(("carried", carried.setdefault((ref, entry, k), len(carried))))
        steps.append((what, tuple(operands), first))
    ends = {own(entry, k, times - 1) for _, entry, k in carried}
    if any(inside[ref] != uses.get(ref, 0) and ref not in ends for ref in made):
        return None  # a value made in the loop is used after it
    return Loop(
        steps,
        [(ref, own(entry, k)) for ref, entry, k in carried],
        [own(entry, k, times - 1) for _, entry, k in carried],
        entries,
        times,
    )
