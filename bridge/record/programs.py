"""Compiles records: makes, keeps, stores and calls their programs, and finds the program that fits
a record.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import torch

from bridge import private
from bridge.boundary.calls import Call
from bridge.cache_keys import identical
from bridge.convert import tensors, trees
from bridge.errors import DataDependentError, at_this_line
from bridge.intercepted.autograd_function import rules_of
from bridge.jit.compiled import Compiled
from bridge.jit.program import Packing, Program, trace
from bridge.process import having, log_once, process, without_collections
from bridge.programs import closure_scan, guards
from bridge.programs.holders import holders
from bridge.programs.places import Place
from bridge.record import lanes, replay, words
from bridge.record.entries import Begin, End, FunctionEnd
from bridge.record.in_torch import can_repeat
from bridge.record.recorder import Recorder
from bridge.trace import python_numbers
from bridge.trace.levels import Unrecordable, state
from bridge.trace.python_numbers import Inputs, Misfit
from bridge.trace.torch_random import by_torch
from bridge.trace.tracing import value_of
from bridge.trace.value_checks import Bounds
from bridge.transform_kinds import FUNCTION
from bridge.xla import disk

# how many records keep their programs: of those with the same operators, and of all
_ALIKE, _ALL = 128, 256
# the seconds that PyTorch may take for the runs of a record before a thread compiles its program
PATIENCE = 2.0
_WAITING = 1024  # how many records are remembered that PyTorch has run
_STATIC = 8  # how many programs one record keeps; they differ in the numbers that are static


@dataclasses.dataclass(eq=False)
class _Program:
    """A compiled record: its program, the numbers that are static in it, and the numbers that are
    inputs.
    """

    compiled: Compiled
    numbers: Inputs
    static: list[tuple[int, Any]]
    # for what the rules of autograd.Functions use; the record does not contain them
    guards: Sequence[guards.Guards] = ()
    path: Path | None = None

    def __post_init__(self) -> None:
        self.compiled.of_arrays &= isinstance((self.without_numbers or [None])[0], jax.Array)

    @functools.cached_property
    def without_numbers(self) -> tuple[Any, ...] | None:
        """The program's inputs for numbers, if it takes none of them: zeros."""
        if self.numbers.answers or any(self.numbers.slots.values()):
            return None
        zeros = self.numbers.evaluated(())
        if jax.default_backend() != "cpu":  # the call puts them where its other inputs are
            return zeros
        with jax.enable_x64(True):
            return tuple(map(jax.device_put, zeros))

    def save(self) -> None:
        """Store the executables for the next process."""
        c = self.compiled
        if (
            self.path is None
            or isinstance(c.program, _Stored)
            or c.program.generators
            or c.program.places
        ):
            return
        found = c.executables()
        try:
            found = found._replace(
                made={k: [disk.packed(f) for f in made] for k, made in found.made.items()}
            )
        except disk.Refused:
            self.path = None
            return
        disk.save(
            self.path,
            {
                "program": _Stored.of(c),
                "numbers": self.numbers,
                "static": self.static,
                "executables": found,
            },
        )


@dataclasses.dataclass
class _Stored(Program):
    """A program as another process has stored it: without its operations, of which it knows only
    what goes in and what comes out.

    If more than its executables is needed, it is made again from the record.
    """

    packed: Packing | None
    bounds: Bounds | None
    whole: Callable[[], Program]

    @classmethod
    def of(cls, c: Compiled) -> _Stored:
        fields = {
            field.name: getattr(c.program, field.name) for field in dataclasses.fields(Program)
        }
        jaxpr = c.program.jaxpr.jaxpr
        ends = {
            name: [
                SimpleNamespace(aval=jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype))
                for v in getattr(jaxpr, name)
            ]
            for name in ("invars", "outvars")
        }
        fields |= {
            "jaxpr": SimpleNamespace(jaxpr=SimpleNamespace(**ends)),
            "guards": None,
            "out_spec": None,
        }
        return cls(**fields, packed=c.packing, bounds=c.bounds, whole=_not_there)

    def packing(self) -> Packing | None:
        return self.packed

    def checked(self) -> tuple[Any, Bounds | None]:
        return SimpleNamespace(run=_not_there, whole=_not_there), self.bounds


class _NotStored(Exception):
    """A stored program lacks a part that is needed: the part was not compiled when the program was
    stored.
    """


def _not_there(*_: Any) -> NoReturn:
    raise _NotStored


def _loaded(path: Path, recorder: Recorder, refs: Sequence[int]) -> _Program | None:
    """The program that another process has stored; None if there is none for the numbers of this
    record.
    """
    try:
        found = disk.load(path)
        if found is None or any(
            identical(recorder.numbers[k]) != value for k, value in found["static"]
        ):
            return None
        program, executables, alike = found["program"], found["executables"], recorder.alike()
        executables = executables._replace(
            made={k: [disk.unpacked(f) for f in made] for k, made in executables.made.items()}
        )
        program.out_spec = trees.joined(*[trees.LEAF] * len(program.static))
        program.whole = functools.cache(lambda: _made_for(alike, refs).compiled.program)
        # the program takes the numbers as two vectors
        call = Call([], None, list(range(len(recorder.inputs) + 2)))
        compiled = Compiled(
            program, call, True, (), tiered=True, given=recorder.inputs, executables=executables
        )
        return _Program(compiled, found["numbers"], found["static"], path=path)
    except disk.Refused:
        return None
    except Exception:
        log_once(
            "a stored program could not be loaded: programs that earlier "
            "processes have stored are compiled anew"
        )
        return None


@dataclasses.dataclass(slots=True)
class _Family:
    """The programs of a record.

    Attributes:
        group: a hash of the record's operators.
        used: a later use has a larger number.
    """

    group: int
    programs: list[_Program] = dataclasses.field(default_factory=list)
    used: int = 0


class _Kept:
    """The programs of this process by their records; the least recently used ones go.

    Of the records with the same operators on operands of other shapes, only some keep their
    programs: shapes that never come again must not fill the memory.
    """

    def __init__(self) -> None:
        self.records: dict[Hashable, _Family] = {}
        self.went = 0
        self.clock = itertools.count()
        self.lock = threading.RLock()

    def of(self, key: Hashable) -> list[_Program]:
        """The programs of a record, which differ in the numbers that are static in them."""
        family = self.records.get(key)
        if family is None:
            return []
        family.used = next(self.clock)
        return family.programs

    def add(self, key: tuple[Any, ...], program: _Program) -> None:
        with self.lock:
            # what the entries do, without their static arguments and shapes
            group = hash(
                tuple(
                    [
                        getattr(what, "func", None) or getattr(what, "kind", type(what))
                        for what, _ in key[0]
                    ]
                )
            )
            family = self.records.setdefault(key, _Family(group))
            family.used = next(self.clock)
            family.programs.append(program)
            del family.programs[:-_STATIC]
            by_use = sorted(self.records.items(), key=lambda item: item[1].used)
            alike = [k for k, other in by_use if other.group == group]
            for old in alike[:-_ALIKE] or [k for k, _ in by_use[:-_ALL]]:
                del self.records[old]
                self.went += 1
                if self.went % 16 == 0:
                    self.trim()

    def trim(self) -> None:
        """Forget the operators of records that have no program any more, and return memory to the
        system.
        """
        used = {id(what) for key in self.records for what, _ in key[0]}  # type: ignore[index]
        process.recorded = {k: op for k, op in list(process.recorded.items()) if id(op) in used}
        process.alike = {k: op for k, op in list(process.alike.items()) if id(op) in used}
        with contextlib.suppress(AttributeError, OSError, TypeError):  # the C library is not glibc
            # of what XLA's compiler has freed, glibc keeps 60 MB after 200 shapes
            ctypes.CDLL(None).malloc_trim(0)


def run(recorder: Recorder, refs: Sequence[int], final: bool) -> Sequence[torch.Tensor]:
    """Run the record; the values with these numbers. final: the record has ended, and its writes
    reach the tensors from outside.
    """
    if recorder.broken is not None:
        raise Unrecordable(recorder.broken)
    ambient = (guards.ambient(), by_torch() if recorder.watch is not None else None)
    key = (
        tuple(recorder.trace),
        tuple(refs),
        ambient,
        torch.is_grad_enabled(),
        process.lowerings_changed,
    )
    numbers = recorder.numbers
    family = process.programs.of(key)
    if final and not family:
        wide = lanes.wide(recorder, refs)
        if wide is not None and process.widths.pays(wide, key):
            start = time.perf_counter()
            try:
                outs = run(wide.record(), refs, True)
            except lanes.Writes:
                process.widths.met[wide.family] = True
            else:
                process.widths.ran(wide, key, time.perf_counter() - start)
                return wide.narrow(refs, outs)
    for found in reversed(family):
        static = [k for k, value in found.static if identical(numbers[k]) != value]
        if not static and not [g for g in found.guards if not g.hold()]:
            try:
                return _called(found, recorder, final)
            except (Misfit, _NotStored):
                continue
    path = words.path_of(recorder.trace, refs, key[2:4])
    if path is not None and not any(p.path == path for p in family):
        stored = _loaded(path, recorder, refs)
        if stored is not None:
            try:
                outs = _called(stored, recorder, final)
                process.programs.add(key, stored)
                return outs
            except (Misfit, _NotStored):
                pass
            except jax.errors.JaxRuntimeError:
                # XLA has stored too little; an error for another reason comes again below
                with contextlib.suppress(OSError):
                    path.unlink()
    if (
        final
        and cold_by() == "torch"
        and can_repeat(recorder.trace)
        and not private.bits_are_compared()
    ):
        seconds = process.compiling.get(key, 0.0)
        if PATIENCE <= seconds < math.inf:
            process.compiling[key] = -math.inf
            process.compiler.later(_compiling(recorder.alike(), refs, key, path))
        if seconds < math.inf:
            raise NotCompiled(key)
    program = _program(recorder, refs, path)
    process.programs.add(key, program)
    return _called(program, recorder, final)


class NotCompiled(Exception):
    """PyTorch is to run a record, whose program is not compiled yet."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def ran(self, seconds: float) -> None:
        """Note how long PyTorch took; its first run does not count, in which it imports what
        transforms need.
        """
        known = process.compiling.get(self.key)
        if known is None and len(process.compiling) >= _WAITING:
            process.compiling.clear()
        process.compiling[self.key] = 0.0 if known is None else known + seconds


def _program(recorder: Recorder, refs: Sequence[int], path: Path | None) -> _Program:
    """Make the program of a record."""
    with _lock, without_collections():
        program = _made_for(recorder, refs)
        program.path = path
        program.compiled.changed.append(weakref.WeakMethod(program.save))
        return program


def _compiling(
    recorder: Recorder, refs: Sequence[int], key: Any, path: Path | None
) -> Callable[[], None]:
    """A function for another thread that makes and compiles the program of a record, well at once;
    the record's inputs are zeros.
    """
    grad = torch.is_grad_enabled()

    def work() -> None:
        done = False
        try:
            with torch.set_grad_enabled(grad), having(state, trying=True):
                if (guards.ambient(), grad) == (key[2][0], key[3]):  # else settings have changed
                    program = _program(recorder, refs, path)
                    _called(program, recorder, True)
                    process.programs.add(key, program)
                    done = True
        except Unrecordable:
            pass
        finally:  # if it could not, the next call compiles it, and waits or raises
            process.compiling[key] = math.inf
            if done:
                del process.compiling[key]

    return work


@contextlib.contextmanager
def cold(by: str) -> Iterator[None]:
    """Choose who runs un-jitted calls whose programs are not compiled yet, for a ``with`` block in
    this thread.

    The environment variable ``TORCHFUNC_JAX_COLD`` and ``patch(cold=...)`` choose for the whole
    process.

    Args:
        by: "jax": XLA compiles the program first; "torch": PyTorch runs the call. If its runs of
            the program after the first have taken two seconds, XLA compiles the program in a
            thread, with all optimizations; the results of first calls differ from those of later
            ones by rounding.

    Raises:
        ValueError: by is something else.

    Example:
        >>> import torch
        >>> from torchfunc_jax import cold, grad
        >>> with cold("torch"):
        ...     grad(lambda x: (x**3).sum())(torch.ones(2))
        tensor([3., 3.])
    """
    with having(state, cold=checked_cold(by)):
        yield


def cold_by() -> str:
    """Who runs a call on this thread whose program is not compiled yet."""
    return state.cold or process.cold[-1]


def checked_cold(by: str) -> str:
    """The argument of ``cold``; raises ValueError if it is something else."""
    if by not in ("jax", "torch"):
        raise ValueError(
            f'cold: expected "jax" or "torch", got {by!r}; it names who runs calls whose programs '
            "are not compiled yet"
        )
    return by


def _called(program: _Program, recorder: Recorder, final: bool) -> Sequence[torch.Tensor]:
    compiled = program.compiled
    extra = program.without_numbers or program.numbers.evaluated(recorder.numbers)
    given = recorder.inputs
    if recorder.copied and (
        compiled.program.written or any(isinstance(of, int) for _, of, _ in compiled.program.shared)
    ):
        raise lanes.Writes
    if compiled.program.written:
        if recorder.lasting and any(given[k].requires_grad for k in compiled.program.written):
            raise Unrecordable(
                "a write to a tensor that requires grad, which each later run would repeat"
            )
        if not final:
            given = list(given)
            for k in compiled.program.written:
                given[k] = given[k].detach().clone()
        if compiled.unfit([*given, *extra], []):
            raise Unrecordable("inputs that share memory")
    if recorder.lasting and compiled.program.is_random:
        raise Unrecordable("random numbers that have to be drawn twice")
    inputs = [] if compiled.idle else tensors.crossings(given)[0]
    grads = final and torch.is_grad_enabled() and any(t.requires_grad for t in given)
    captured: list[torch.Tensor] = []
    arrays: list[Any] = []
    if compiled.program.places:
        now = compiled.captured()
        if now is None:
            raise Misfit
        captured, arrays = now
    call = compiled.call if final else torch.no_grad()(compiled.call)
    try:
        return call([*given, *extra], [*inputs, *extra, *arrays], captured, grads)
    except (IndexError, RuntimeError, ValueError) as error:
        raise at_this_line(error) from None


def _made_for(recorder: Recorder, refs: Sequence[int]) -> _Program:
    # Python has asked for the values it needs, so nothing is computed on constants ahead: XLA would
    # compile each of their operators alone
    with contextlib.suppress(DataDependentError), having(state, folded=-1):
        return _with_numbers(recorder, refs)
    return _with_numbers(recorder, refs)  # a lowering needs them too


def _with_numbers(recorder: Recorder, refs: Sequence[int]) -> _Program:
    try:
        program = _made(recorder, refs, frozenset())
        program.numbers.evaluated(recorder.numbers)
        return program
    except Misfit:  # a number was used in a way that makes it static
        return _made(recorder, refs, frozenset(range(len(recorder.numbers))))


def _made(recorder: Recorder, refs: Sequence[int], static: frozenset[int]) -> _Program:
    whole, inputs = replay.parsed(recorder.trace, refs)
    numbers = recorder.numbers
    # a slot for each, and some for numbers that lowerings compute from them
    size = len(numbers) + python_numbers.SLOTS
    numbers_in = Inputs(numbers, size)
    count = len(recorder.inputs)

    def record(*given: Any) -> tuple[Any, ...]:
        floats, ints = given[count:]
        owners = [(h, h.owner()) for found in reached for h in holders(found)]
        with having(state.level.root, owners=owners), numbers_in.tracing(floats, ints, value_of):
            stand = [x if k in static else numbers_in.number(k) for k, x in enumerate(numbers)]
            again = replay.Run(stand)
            again.env.update(zip(inputs, given, strict=False))
            again.run(whole.entries)
            return again.values(refs)

    rules, objects = dict[Any, None](), dict[int, Any]()
    for what, _ in recorder.trace:
        if type(what) is Begin and what.kind is FUNCTION:
            rules.update(dict.fromkeys(rules_of(what.params[0])))
        elif type(what) is End and type(what.params) is FunctionEnd:
            objects.update({id(x): x for x in what.params.objects()})
    reached = [closure_scan.scan(rule, *objects.values()) for rule in rules]
    watched = [guards.Guards(found) for found in reached]
    vectors = [torch.zeros(size, dtype=d) for d in (torch.float64, torch.int64)]
    call = Call.of((*[t if t.requires_grad else t.detach() for t in recorder.inputs], *vectors), {})
    with having(state, recorder=None, replaying=True):
        program, missing = trace(record, call, [], closure_scan.Found(), watched=False)
        if missing:  # tensors of TorchScript functions, which the program then holds, or of rules
            places = {key: x for found in reached for key, x in found.tensors.items()}
            numbers_in = Inputs(numbers, size)
            program, missing = trace(
                record,
                call,
                [places.get(id(t), (t, Place(t, None))) for t in missing],
                closure_scan.Found(),
                watched=False,
            )
    if missing:
        raise Unrecordable("a tensor that is no input")
    asked = [(k, identical(numbers[k])) for k in sorted(numbers_in.asked | static)]
    compiled = Compiled(program, call, True, (), tiered=True, pure=not rules, given=recorder.inputs)
    return _Program(compiled, numbers_in, asked, guards=[g for g in watched if g.needed])


_lock = threading.RLock()
process.cold = [checked_cold(os.environ.get("TORCHFUNC_JAX_COLD", "jax"))]
process.programs, process.widths = _Kept(), lanes.Widths()
