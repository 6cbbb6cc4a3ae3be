"""Records compiled: which programs are kept, which of them fits a record, and how one is made, stored and called."""
from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import torch

from bridge import capture, eager, guards, python_numbers, random, tensors, trees
from bridge.calls import Call, torch_device
from bridge.checks import Bounds
from bridge.jit.compiled import Compiled
from bridge.jit.program import trace
from bridge.keys import identical
from bridge.python_numbers import Inputs, Misfit
from bridge.record import disk, replay
from bridge.record.recorder import Begin, Recorder, local
from bridge.record.tensor import Unrecordable
from bridge.record.tiers import Tiered
from bridge.sharing import Sharing

_families: dict[Any, list[_Program]] = {}
_lock = threading.RLock()
_LIMIT = 256


class _Program:
    """A record compiled: which of its numbers are static, how the others become inputs."""

    __slots__ = ("compiled", "guards", "numbers", "path", "static", "whole")

    def __init__(self, compiled: Any, numbers: Inputs, static: list[tuple[int, Any]], whole: bool = True) -> None:
        self.guards: list[guards.Guards] = []  # of what the rules of autograd.Functions use, which are not written down
        self.compiled, self.numbers, self.static = compiled, numbers, static
        self.whole = whole  # the program itself is there, not only what it was compiled to
        self.path: Any = None

    def save(self) -> None:
        """Keep what it is compiled to for the next process."""
        c = self.compiled
        if self.path is None or not self.whole or c.program.generators or c.forward is None:
            return
        parts: dict[Any, Any] = {"forward": c.forward, **{(k, i): pair[i] for k, pair in c.recorded.items() for i in (0, 1)}}
        try:
            made = {k: disk.packed(v.executable) for k, v in parts.items() if v.executable is not None}
        except jax.errors.JaxRuntimeError:  # XLA cannot write down every program: one that sorts
            self.path = None
            return
        program = dataclasses.replace(c.program, jaxpr=_Counts(len(c.program.jaxpr.jaxpr.invars), len(c.program.jaxpr.jaxpr.outvars)))
        program.guards = program.out_spec = program.static = None
        slots = {kind: [(n.rule, n.value, n.origin, n.limits) for n in found] for kind, found in self.numbers.slots.items()}
        disk.save(self.path, {
            "program": program, "slots": slots, "size": self.numbers.size, "static": self.static, "made": made,
            "kinds": {k: pair[2] for k, pair in c.recorded.items()}, "layouts": [(x[4], str(x[5])) for x in c.layouts],
            "packing": c.packing, "bounds": None if c.bounds is None else c.bounds.ranges, "one_out": c.one_out,
        })


class _Counts:
    """In the place of a stored program's jaxpr: how many inputs and outputs it has."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.invars, self.outvars = range(inputs), range(outputs)

    @property
    def jaxpr(self) -> _Counts:
        return self


class _NotStored(Exception):
    """Of a stored program, something is needed that was not compiled when it was stored."""


def _loaded(path: Any, recorder: Recorder) -> _Program | None:
    """The program that another process has stored, for these numbers."""
    found = disk.load(path)
    if found is None or any(identical(recorder.numbers[k]) != value for k, value in found["static"]):
        return None
    try:
        program = found["program"]
        program.out_spec = trees.flatten(tuple(range(program.count)))[1]
        program.static = [None] * program.count
        numbers = Inputs([0] * found["size"], found["size"])
        for kind, slots in found["slots"].items():
            numbers.slots[kind] = [python_numbers.stored(numbers, kind, *slot) for slot in slots]
        compiled = object.__new__(Compiled)
        compiled.program = compiled.checked = program
        compiled.torch_out, compiled.donated, compiled.numbers, compiled.tiered = True, (), None, True
        compiled.where = list(range(len(recorder.inputs) + 2))
        compiled.sharing, compiled.jitted, compiled.signatures = Sharing(program.written), [], []
        compiled.packing, compiled.bounds = found["packing"], None if found["bounds"] is None else Bounds(found["bounds"])
        compiled.layouts = [tensors.layout(shape, jax.numpy.dtype(dtype)) for shape, dtype in found["layouts"]]
        compiled.active, compiled.recorded = {}, _Stored()
        compiled.device, compiled.one_out = torch_device([*recorder.inputs]) or torch.device("cpu"), False
        made = {k: Tiered(_not_there, run=disk.unpacked(v)) for k, v in found["made"].items()}
        compiled.forward = made.get("forward", Tiered(_not_there))
        for k, kinds in found["kinds"].items():
            if (k, 0) in made and (k, 1) in made:
                dict.__setitem__(compiled.recorded, k, (made[k, 0], made[k, 1], kinds))
        return _Program(compiled, numbers, found["static"], whole=False)
    except Exception:  # of another time
        return None


class _Stored(dict):
    """The derivatives that were stored."""

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key):
            raise _NotStored
        return True


def _not_there(*_: Any) -> Any:
    raise _NotStored


def run(recorder: Recorder, refs: Sequence[int], final: bool) -> Sequence[torch.Tensor]:
    """The values of these numbers of the record; final: it has ended, and what it writes to is written."""
    key = (tuple(recorder.trace), tuple(refs), guards.ambient(), torch.is_grad_enabled(), eager.local_generation())
    numbers = recorder.numbers
    for found in _families.get(key, ()):
        if all(identical(numbers[k]) == value for k, value in found.static) and all(g.hold() for g in found.guards):
            try:
                return _called(found, recorder, final)
            except (Misfit, _NotStored):
                continue
    path = disk.path_of(recorder.trace, refs, key[2:4])
    if path is not None and not any(p.path == path for p in _families.get(key, ())):
        stored = _loaded(path, recorder)
        if stored is not None:
            stored.path = path
            _families.setdefault(key, []).append(stored)
            try:
                return _called(stored, recorder, final)
            except (Misfit, _NotStored):
                _families[key].remove(stored)
    with _lock:
        try:
            program = _made(recorder, refs, frozenset())
            program.numbers.evaluated(numbers)
        except Misfit:
            program = _made(recorder, refs, frozenset(range(len(numbers))))
        del_key = next(iter(_families)) if len(_families) >= _LIMIT else None
        if del_key is not None:
            _families.pop(del_key)
        _families.setdefault(key, []).append(program)
        program.path = path
        program.compiled.changed = program.save
    return _called(program, recorder, final)


def _called(program: _Program, recorder: Recorder, final: bool) -> Sequence[torch.Tensor]:
    compiled = program.compiled
    extra = program.numbers.evaluated(recorder.numbers)
    given = recorder.inputs
    if compiled.program.written:
        if not final:
            given = list(given)
            for _, k in compiled.program.written:
                given[k] = given[k].detach().clone()
        if compiled.unfit([*given, *extra], []):
            raise Unrecordable("inputs that share memory")
    if (recorder.lasting or not final) and (compiled.program.draws or compiled.program.generators):
        raise Unrecordable("random numbers that have to be drawn twice")
    inputs = [tensors.crossing(t)[0] for t in given]
    grads = final and torch.is_grad_enabled() and any(t.requires_grad for t in given)
    start = time.perf_counter()
    with torch.set_grad_enabled(final and torch.is_grad_enabled()):
        outs = compiled.call([*given, *extra], [*inputs, *extra], [], grads)
    seconds = time.perf_counter() - start
    for tiered in compiled.jitted:
        tiered.ran(seconds)
    return outs


def _made(recorder: Recorder, refs: Sequence[int], static: frozenset[int]) -> _Program:
    whole, inputs = replay.parsed(recorder.trace, refs)
    numbers = recorder.numbers
    size = max(2 * len(numbers), 1)  # twice: of a stretch that turns out to be no loop both ways are traced
    numbers_in = Inputs(numbers, size)
    count = len(recorder.inputs)

    def record(*given: Any) -> tuple[Any, ...]:
        with numbers_in.tracing(*given[count:]):
            stand = [x if k in static else numbers_in.number(k) for k, x in enumerate(numbers)]
            again = replay.Run(stand)
            again.env.update(zip(inputs, given, strict=False))
            again.run(whole)
            return tuple([again.env[r] for r in refs])

    rules = [rule for what, _ in recorder.trace if type(what) is Begin and what.kind == "function" for rule in _rules(what.params[0])]
    watched = [guards.Guards(capture.scan(rule)) for rule in dict.fromkeys(rules)]
    vectors = [torch.zeros(size, dtype=d) for d in (torch.float64, torch.int64)]
    call = Call.of((*[t if t.requires_grad else t.detach() for t in recorder.inputs], *vectors), {})
    before, local.recorder = local.recorder, None
    try:
        program, missing = trace(record, call, [], capture.Found(), random.Unwatched())
    finally:
        local.recorder = before
    if missing:
        raise Unrecordable("a tensor that is no input")
    asked = [(k, identical(numbers[k])) for k in sorted(numbers_in.asked | static)]
    made = _Program(Compiled(program, call, True, (), tiered=True), numbers_in, asked)
    made.guards = [g for g in watched if g.needed]
    return made


def _rules(cls: Any) -> list[Any]:
    """The methods of a Function that run when a program is made, and no more when it is called."""
    found = [getattr(cls, name) for name in ("backward", "vjp", "jvp", "vmap")]
    return [rule for rule in found if not rule.__module__.startswith("torch.")]


__all__ = ["run"]
