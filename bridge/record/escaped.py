"""Gives the tensors of a record that the function has kept elsewhere, in a module or a list, their values when its transform returns.

torch.func does the same with a tensor that no vmap maps.  One whose value cannot be had raises EscapedTensorError when it is used.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge import private
from bridge.record.parts import part_of, referred_to
from bridge.record.recorder import Recorder
from bridge.record.tensor import Recorded, Unrecordable


def fill_in(recorder: Recorder, outs: Sequence[Recorded]) -> None:
    """Make plain tensors of the recorded tensors that are still referred to; outs: the results, which are not meant."""
    results = {id(t) for t in outs}
    kept = [
        t for t, kept in zip(recorder.tensors, referred_to(recorder.tensors), strict=True)
        if kept and id(t) not in results and not t.aval.lanes and private.only_python_refers(t)
    ]
    if not kept or recorder.writes:
        return
    part = part_of(recorder, [t.ref for t in kept])
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
