"""Gives the tensors of a record that the function has kept elsewhere, in a module or a list, their values when its transform returns.

torch.func does the same with a tensor that no vmap maps.  One whose value cannot be had raises EscapedTensorError when it is used.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from bridge import private
from bridge.record.entries import Begin, End, Input, Op, Pull, interned
from bridge.record.recorder import Recorder
from bridge.record.tensor import Recorded, Unrecordable


def _references(objects: Sequence[object]) -> list[int]:
    """How many references each object of a list has, with those of the list and of this function."""
    count = sys.getrefcount
    return [count(x) for x in objects]


_OWN = _references([object()])[0]  # of an object that nobody keeps; Python's versions differ


def fill_in(recorder: Recorder, outs: Sequence[Recorded]) -> None:
    """Make plain tensors of the recorded tensors that are still referred to; outs: the results, which are not meant."""
    results = {id(t) for t in outs}
    kept = [
        t for t, references in zip(recorder.tensors, _references(recorder.tensors), strict=True)
        if references > _OWN and id(t) not in results and not t.aval.lanes and private.only_python_refers(t)
    ]  # fmt: skip
    if not kept or recorder.writes:
        return
    part = _part(recorder, [t.ref for t in kept])
    if part is None:
        return
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in recorder.inputs)
    try:
        values = recorder.execute(*part, needs) if len(part[0].trace) > len(part[0].inputs) else [part[0].inputs[r] for r in part[1]]
    except Unrecordable:
        return
    inputs = set(map(id, recorder.inputs))
    for t, value in zip(kept, values, strict=True):
        own = id(value) not in inputs and private.only_python_refers(value)
        torch.utils.swap_tensors(t, value if own else value.view_as(value))


def _part(recorder: Recorder, refs: Sequence[int]) -> tuple[Recorder, list[int]] | None:
    """A record of what some values are computed from, and their numbers there; None if that is not possible.

    A transform inside of which a value was computed is left out: the arguments of its function are its operands.
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
        mine, inside = [n for n in range(first, firsts[at + 1]) if n in needed], any(firsts[begin] <= n < first for n in needed)
        if mine and (inside or type(what) is Pull or (type(what) is Begin and mine[-1] - first >= len(operands))):
            return None
        if mine and type(what) is Begin:
            same.update({n: operands[n - first] for n in mine})
            needed.update({same[n] for n in mine} - inputs.keys())
        elif mine:
            kept.update(range(begin, at + 1))
            needed.update({n for k in range(begin, at + 1) for n in trace[k][1]} - inputs.keys())
        at = at - 1 if inside or begin == at else begin - 1
    if any(type(trace[at][0]) is Op and trace[at][0].draws for at in kept):
        return None  # the numbers would be drawn twice
    part, found = Recorder(recorder.execute), dict[int, int]()

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
        found.update(zip(range(firsts[at], firsts[at + 1]), range(part.count, part.count + what.made), strict=True))
        part.count += what.made
    return part, [number(n) for n in refs]
