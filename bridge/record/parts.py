"""Parts of a record: what some of its values are computed from, and the values that Python has
asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge.record.entries import Begin, End, Input, Op, Pull, interned
from bridge.record.tensor import referred_to
from bridge.trace.torch_random import by_torch
from bridge.transform_kinds import FUNCTION, Kind


class Known:
    """The values of a record that were computed because Python asked for some, at the last such
    place: the next ones start there.

    Attributes:
        values: by their numbers, those of the inputs and those to which the function still refers.
        kept: the tensors of the latter.
        same: by its number, the number of the value that an argument or a result of a transform's
            function is.
        latest: by that number, the number of such a result of a Function, which may have written to
            the value.
        owners: by its number, the number of the value whose memory a value shares, maybe its own;
            None for memory from outside.
        written: whether memory from outside may have been written to; then every run starts at the
            beginning.
        drawn: the state of torch's generator after the random numbers so far.
        noted: how many entries, values and inputs these say something of.
        entries, count, numbers, tensors: how many the record had.
    """

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        self.kept: list[Any] = []
        self.same: dict[int, int] = {}
        self.latest: dict[int, int] = {}
        self.owners: dict[int, int | None] = {}
        self.written = False
        self.drawn: torch.Tensor | None = None
        self.noted = 0, 0, 0
        self.entries = self.count = self.numbers = self.tensors = 0

    def writes_outside(self, recorder: Any) -> bool:
        """Whether the record may have written to memory from outside."""
        entries, at, inputs = self.noted
        begun: list[Kind] = []
        for what, operands in recorder.trace[entries:]:
            own = range(at, at + what.made)
            at += what.made
            of = [self.same.get(r, r) for r in operands]
            if type(what) is Input:
                self.values[own[0]] = recorder.inputs[inputs]
                inputs += 1
            elif type(what) is Op:
                owners = {self.owners.get(r) for r in of}
                self.owners.update(
                    {
                        r: (owners.copy().pop() if len(owners) == 1 else None) if what.views else r
                        for r in own
                    }
                )
                self.written = self.written or any(
                    self.owners.get(of[k]) is None for k, _ in what.changed
                )
            elif type(what) is Begin:
                begun.append(what.kind)
                self.same.update(zip(own, of, strict=False))
            elif type(what) is End and begun and begun.pop() is FUNCTION and len(of) == len(own):
                self.same.update(zip(own, of, strict=True))
                self.latest.update(zip(of, own, strict=True))
        self.noted = len(recorder.trace), at, inputs
        return self.written

    def now(self, recorder: Any, refs: Sequence[int]) -> list[torch.Tensor]:
        """The values with these numbers."""
        found = None if self.writes_outside(recorder) else self._since(recorder)
        start = self.tensors if found is not None else 0
        new = [
            t
            for t, k in zip(
                recorder.tensors[start:], referred_to(recorder.tensors, start), strict=True
            )
            if k and t.level.open
        ]
        refs = [self.same.get(r, r) for r in refs]
        wanted = dict.fromkeys([*refs, *[self.same.get(t.ref, t.ref) for t in new]])
        if found is None:
            part, numbers, self.kept = recorder, [self.latest.get(r, r) for r in wanted], []
        else:
            part, number, written = found
            wanted = {
                r: None
                for r in [*written, *wanted]
                if r in number and (r not in self.values or r in written)
            }
            numbers = [number[r] for r in wanted]
        if numbers or part.watch is not None:
            outs, self.drawn = recorder.computed(
                part, numbers, None if part is recorder else self.drawn
            )
            self.values.update(zip(wanted, outs, strict=True))
        answer = [self.values[r] for r in refs]
        self.kept += new
        del new
        self._forget()
        self.entries, self.count, self.numbers = (
            len(recorder.trace),
            recorder.count,
            len(recorder.numbers),
        )
        self.tensors = len(recorder.tensors)
        return answer

    def _forget(self) -> None:
        """Forget the values to which the function no longer refers."""
        alive = [
            k and t.level.open
            for t, k in zip(self.kept, referred_to(self.kept, lists=2), strict=True)
        ]
        dead = {self.same.get(t.ref, t.ref) for t, k in zip(self.kept, alive, strict=True) if not k}
        self.kept = [t for t, k in zip(self.kept, alive, strict=True) if k]
        for r in dead - {self.same.get(t.ref, t.ref) for t in self.kept}:
            self.values.pop(r, None)

    def _since(self, recorder: Any) -> tuple[Any, dict[int, int], list[int]] | None:
        """A record of what came since then, the new numbers there, and those of older values to
        which it writes.

        None if it needs more than those values: a pullback or a transform that began before, or a
        write to memory that others share.
        """
        part, at = type(recorder)(recorder.execute), self.count
        found: dict[int, int] = {}
        written: list[int] = []
        begun = 0
        for what, operands in recorder.trace[self.entries :]:
            kind, own = type(what), range(at, at + what.made)
            at += what.made
            if kind is Input:
                continue
            of = [self.same.get(r, r) for r in operands]
            begun += (kind is Begin) - (kind is End)
            if (
                begun < 0
                or (kind is Pull and what.node not in found)
                or any(r not in found and r not in self.values for r in of)
            ):
                return None
            if kind is Op and what.draws:
                if not by_torch():  # JAX's numbers depend on how many were drawn before
                    return None
                part.watch = recorder.watch
            for owner in [self.owners[of[k]] for k, _ in what.changed] if kind is Op else ():
                if owner < self.count and not self._alone(owner):
                    return None
                if owner < self.count:
                    found[owner] = part.ref(self.values[owner])
                    written.append(owner)
            entry = interned(Pull, found[what.node], what.made) if kind is Pull else what
            refs = [
                found[r] if r in found else part.ref(self.values[known])
                for r, known in zip(operands, of, strict=True)
            ]
            part.trace.append((entry, tuple(refs)))
            found.update(zip(own, range(part.count, part.count + what.made), strict=True))
            part.count += what.made
        part.numbers += recorder.numbers[self.numbers :]
        returned = {r: found[own] for r, own in self.latest.items() if own in found}
        return part, found | returned, [*written, *returned]

    def _alone(self, owner: int) -> bool:
        """Whether a value is known, and no other one that is known shares its memory."""
        return owner in self.values and not any(
            self.owners.get(r) == owner for r in self.values if r != owner
        )


def part_of(recorder: Any, refs: Sequence[int]) -> tuple[Any, list[int]] | None:
    """A record of what some values are computed from, and their numbers there; None if that is not
    possible.

    A transform inside of which a value was computed is left out: the arguments of its function are
    its operands.
    """
    trace, firsts, taken = recorder.trace, [0], [0]
    begins: list[int] = []
    whole: dict[int, int] = {}  # where the transform begins that ends there
    inputs: dict[int, torch.Tensor] = {}
    for at, (what, _) in enumerate(trace):
        if type(what) is Input:
            inputs[firsts[-1]] = recorder.inputs[len(inputs)]
        elif type(what) is Begin:
            begins.append(at)
        elif type(what) is End:
            whole[at] = begins.pop()
        firsts.append(firsts[-1] + what.made)
        taken.append(taken[-1] + (what.numbers if type(what) is Op else 0))
    needed, same, kept, at = set(refs) - inputs.keys(), dict[int, int](), set[int](), len(trace) - 1
    while at >= 0:
        (what, operands), first, begin = trace[at], firsts[at], whole.get(at, at)
        mine, inside = (
            [n for n in range(first, firsts[at + 1]) if n in needed],
            any(firsts[begin] <= n < first for n in needed),
        )
        if mine and (
            inside
            or type(what) is Pull
            or (type(what) is Begin and mine[-1] - first >= len(operands))
        ):
            return None
        if mine and type(what) is Begin:
            same.update({n: operands[n - first] for n in mine})
            needed.update({same[n] for n in mine} - inputs.keys())
        elif mine:
            kept.update(range(begin, at + 1))
            block = trace[begin : at + 1]
            needed.update({n for _, of in block for n in of} - inputs.keys())
            # vjp or linearize may have been called outside of it
            needed.update(each.node for each, _ in block if type(each) is Pull)
        at = at - 1 if inside or begin == at else begin - 1
    if any(type(trace[at][0]) is Op and trace[at][0].draws for at in kept):
        return None  # the numbers would be drawn twice
    part, found = type(recorder)(recorder.execute), dict[int, int]()

    def number(n: int) -> int:
        while n in same:
            n = same[n]
        if n in inputs:
            found[n] = part.ref(inputs[n])
        return found[n]

    for at in sorted(kept):
        what, operands = trace[at]
        if type(what) is Input:
            continue
        if type(what) is Pull:
            what = interned(Pull, number(what.node), what.made)
        entry = what, tuple([number(n) for n in operands])
        part.trace.append(entry)
        part.numbers += recorder.numbers[taken[at] : taken[at + 1]]
        found.update(
            zip(
                range(firsts[at], firsts[at + 1]),
                range(part.count, part.count + what.made),
                strict=True,
            )
        )
        part.count += what.made
    return part, [number(n) for n in refs]
