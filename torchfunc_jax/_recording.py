"""Transforms as parts of a record: what each of them is while Python runs, and what it is when the record is run by JAX."""
from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
import torch.utils.checkpoint

from bridge import autograd, capture, eager, guards, private, python_numbers, random, saved_tensors, tensors, trees
from bridge import functions as intercepted
from bridge.calls import Call, code_of, refuse_recording, torch_device
from bridge.checks import Bounds
from bridge.jit.compiled import Compiled
from bridge.jit.program import trace
from bridge.keys import Same, identical
from bridge.levels import state
from bridge.python_numbers import Inputs, Misfit
from bridge.record import disk, replay
from bridge.record.recorder import PARTS, Begin, Recorder, local
from bridge.record.tensor import Aval, Unrecordable, escaped
from bridge.record.tiers import Tiered
from bridge.sharing import Sharing

_on = os.environ.get("TORCHFUNC_JAX_RECORD", "0") == "1"
_unrecordable: set[Any] = set()
_why: list[str] = []  # for looking into while the old engine is there
NOT_RECORDED = object()
TRANSFORMS: dict[str, Callable[..., Any]] = {}


def on(func: Any, leaves: Sequence[Any], outermost: bool = True) -> bool:
    """Whether a transform of func called with these leaves is to be recorded."""
    if not _on or state.level is not None or _off.entered:
        return False
    if local.recorder is not None:
        return True
    if not outermost or code_of(func) in _unrecordable or any(isinstance(x, jax.Array) for x in leaves):
        return False
    return not (private.any_autocast() or private.function_modes() or torch.is_inference_mode_enabled() or private.saved_tensor_pack())


def transform(
    func: Any, record: Callable[[Recorder], tuple[list[Any], Callable[[Sequence[Any]], Any]]], lasting: bool = False
) -> Any:
    """Run a transform: write it down as a part of the record in progress, or make a record of it and run that.

    lasting: the record, if one is made, will be repeated.
    """
    recorder = local.recorder
    if recorder is not None:
        mode = private.leave_function_mode()  # the checks of a transform are not written down, its function is
        try:
            if mode is not recorder:
                raise Unrecordable("a torch function mode of the user's")
            outs, build = record(recorder)
            return build(outs)
        finally:
            private.enter_function_mode(mode)
    refuse_recording()
    recorder = local.recorder = Recorder(run)
    recorder.lasting = lasting
    try:
        with intercepted.intercepted():
            outs, build = record(recorder)
        local.recorder = None
        if lasting and recorder.written:
            raise Unrecordable("a function that writes, and is called again")
        return build(run(recorder, [t.ref for t in outs], True))
    except Unrecordable as reason:
        _unrecordable.add(code_of(func))
        _why.append(f"{getattr(func, '__qualname__', func)}: {reason}")
        return NOT_RECORDED
    finally:
        local.recorder = None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """While entered, the record in progress, if there is one, does not write down what is done."""
    if local.recorder is None:
        yield
        return
    mode = private.leave_function_mode()
    try:
        yield
    finally:
        private.enter_function_mode(mode)


@contextlib.contextmanager
def off() -> Iterator[None]:
    """While entered, nothing is recorded on this thread."""
    before, _off.entered = _off.entered, True
    try:
        yield
    finally:
        _off.entered = before


class _Off(threading.local):
    entered = False


_off = _Off()


# -- programs ---------------------------------------------------------------------------------------------------------------------------
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
            again = replay.Run(TRANSFORMS, stand)
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


# -- what all transforms share ------------------------------------------------------------------------------------------------------------
def entered(
    recorder: Recorder, func: Callable[..., Any], kind: str, params: Any, leaves: Sequence[Any], spec: Any, avals: Sequence[Aval],
    more: Sequence[Any], finish: Callable[[Any], tuple[list[Any], Any]],
) -> tuple[list[Any], Any]:
    """Run func on the arguments of a transform that begins; the tensors among its results, and finish's other result.

    Args:
        leaves, spec: the flattened (args, kwargs).
        avals: of the tensors among them, as the function sees them.
        more: further operands of the transform.
    """
    where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    arguments = recorder.begin(kind, params, [*[leaves[i] for i in where], *more], avals)
    filled = list(leaves)
    for i, t in zip(where, arguments, strict=True):
        filled[i] = t
    try:
        args, kwargs = trees.unflatten(spec, filled)
        private.enter_function_mode(recorder)
        try:
            if kind in ("grad", "jacrev", "vjp"):
                with torch.enable_grad(), saved_tensors.without_hooks():
                    out = func(*args, **kwargs)
            else:
                out = func(*args, **kwargs)
        finally:
            private.leave_function_mode()
        return finish(out)
    except BaseException:
        recorder.leave()
        raise


def _checkpoint(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.utils.checkpoint as a part of a record: its function's values are computed again in the backward pass."""
    options = ("context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")
    kwargs = {name: x for name, x in kwargs.items() if name not in options}

    def record(recorder: Recorder) -> Any:
        leaves, spec = trees.flatten((args, kwargs))
        avals = [recorder.aval(x) for x in leaves if isinstance(x, torch.Tensor)]
        out, _ = entered(recorder, function, "checkpoint", (), leaves, spec, avals, (), lambda out: (out, None))
        outs, out_spec = trees.flatten(out)
        where = [i for i, x in enumerate(outs) if isinstance(x, torch.Tensor)]
        results = [recorder.aval(outs[i]) for i in where]
        ended = recorder.end((), [outs[i] for i in where], [a.like(a.shape, a.requires_grad) for a in results])
        for i, t in zip(where, ended, strict=True):
            outs[i] = t
        return ended, lambda _: trees.unflatten(out_spec, outs)

    return transform(function, record)


def _checkpoint_again(body: Any, operands: list[Any], _: Any, __: Any) -> Any:
    return list(torch.utils.checkpoint.checkpoint(body, *operands, use_reentrant=False)), None


PARTS["checkpoint"] = _checkpoint
TRANSFORMS["checkpoint"] = _checkpoint_again


# -- autograd.Function ----------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Ended:
    """What the forward of an autograd.Function leaves beside tensors."""

    outs: Any  # the tree of its outputs, and of what its context keeps; what in them is no tensor
    static: tuple[Any, ...]
    kept: Any
    kept_static: tuple[Any, ...]
    constant: tuple[bool, ...]  # of the outputs that are tensors: marked as not differentiable
    materialize: bool


def _function(cls: Any, recording: bool) -> Callable[..., Any]:
    """What PyTorch runs in the place of an autograd.Function's forward: it is written down, and what its context keeps with it."""
    if cls.__module__.startswith("torch."):
        raise Unrecordable(cls.__name__)
    new_style = cls.setup_context is not torch.autograd.Function.setup_context

    def forward(*given: Any) -> Any:
        args = given if new_style else given[1:]
        if not any(isinstance(a, torch.Tensor) for a in args):
            return cls.forward(*given)
        out = transform(cls, lambda recorder: (_applied(recorder, cls, args, recording, new_style), lambda found: found[0]))
        if new_style:
            private.skip_setup_context(cls)
        return out

    return forward


def _applied(recorder: Recorder, cls: Any, args: tuple[Any, ...], recording: bool, new_style: bool) -> list[Any]:
    """[the outputs of a Function]"""
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    others = [a for a in args if not isinstance(a, torch.Tensor)]
    if any(isinstance(x, torch.Tensor) for x in trees.flatten(others)[0]):
        raise Unrecordable("tensors inside of a Function's argument")
    operands = [args[i] for i in where]
    avals = [recorder.aval(t) for t in operands]
    params = (cls, tuple(where), len(args), _same(others))
    first, start = recorder.count, len(recorder.trace)
    inputs = len(recorder.inputs)
    ctx = intercepted.Context(tuple([recording and isinstance(a, torch.Tensor) and a.requires_grad for a in args]))
    attributes = set(vars(ctx))
    filled = list(args)
    with torch.set_grad_enabled(recording):  # as it was around the call
        arguments = recorder.begin("function", params, operands, avals)
    for i, t in zip(where, arguments, strict=True):
        filled[i] = t
    try:
        private.enter_function_mode(recorder)
        try:
            out = cls.forward(*filled) if new_style else cls.forward(ctx, *filled)
            if new_style:
                cls.setup_context(ctx, tuple(filled), out)
        finally:
            private.leave_function_mode()
        leaves, spec = trees.flatten(out)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        kept = {name: x for name, x in vars(ctx).items() if name not in attributes}
        kept_leaves, kept_spec = trees.flatten((list(ctx._saved), list(ctx._saved_forward), kept))
        saved = [x for x in kept_leaves if isinstance(x, torch.Tensor)]
        begun = len(recorder.inputs) - inputs == sum(recorder.by_id[id(t)] >= first for t in operands if id(t) in recorder.by_id)
        refs = [r for _, rs in recorder.trace[start:] for r in rs] + [recorder.ref(t) for t in (*tensors, *saved)]
        mine = arguments[0].ref
        if ctx._dirty or not begun or any(r < mine for r in refs[len(operands) :]):
            raise Unrecordable("a Function that writes to its arguments, or uses tensors from outside")
        constant = tuple([any(t is c for c in ctx._constant) or not (t.is_floating_point() or t.is_complex()) for t in tensors])
        needs = recording and any(t.requires_grad for t in operands)
        results = [recorder.aval(t) for t in tensors]
        ended = _Ended(spec, _same(leaves), kept_spec, _same(kept_leaves), constant, ctx._materialize)
        made = recorder.end(ended, [*tensors, *saved], [
            a.like(a.shape, needs and not c) for a, c in zip(results, constant, strict=True)
        ])  # fmt: skip
    except BaseException:
        recorder.leave()
        raise
    return [_merged(spec, leaves, made)]


def _rules(cls: Any) -> list[Any]:
    """The methods of a Function that run when a program is made, and no more when it is called."""
    found = [getattr(cls, name) for name in ("backward", "vjp", "jvp", "vmap")]
    return [rule for rule in found if not rule.__module__.startswith("torch.")]


def _same(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What is no tensor among these, to be compared and kept."""
    try:
        return tuple([None if isinstance(x, torch.Tensor) else Same(x) for x in leaves])
    except TypeError:
        raise Unrecordable("an argument of a Function that is not hashable") from None


def _merged(spec: Any, leaves: Sequence[Any], found: Sequence[Any]) -> Any:
    """A tree of the static leaves, and of the tensors found in the places of those that are None or tensors."""
    source = iter(found)
    return trees.unflatten(spec, [x.value if type(x) is Same else next(source) if x is None or isinstance(x, torch.Tensor) else x
                                  for x in leaves])


def _function_again(body: Any, operands: list[Any], params: Any, end: _Ended) -> Any:
    cls, where, count, static = params
    n = len(end.constant)

    def forward(ctx: Any, *args: Any) -> Any:
        # by way of the class: who looks for tensors from outside that the methods reach would find those of the whole record in body
        found = vars(again)["body"](*[args[i] for i in where])
        saved, saved_forward, attributes = _merged(end.kept, end.kept_static, found[n:])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved_forward)
        ctx.mark_non_differentiable(*[t for t, c in zip(found[:n], end.constant, strict=True) if c])
        ctx.set_materialize_grads(end.materialize)
        for name, x in attributes.items():
            setattr(ctx, name, x)
        return _merged(end.outs, end.static, found[:n])

    again: Any = type(cls.__name__, (cls,), {
        "forward": staticmethod(forward), "setup_context": staticmethod(torch.autograd.Function.setup_context), "body": body,
    })  # fmt: skip
    source, given = iter(operands), iter(static)
    out = again.apply(*[next(source) if i in where else next(given).value for i in range(count)])
    return [x for x in trees.flatten(out)[0] if isinstance(x, torch.Tensor)], None


PARTS["function"] = _function
TRANSFORMS["function"] = _function_again


class Kept:
    """A transform whose record has a function of it that is called later: that of vjp pulls back, that of linearize pushes forward.

    Args:
        recorder: the record, in which the transform has just ended.
        first: the number of the transform's first result.
        outermost: whether the record ends with it, and has to be repeated for each call.
    """

    def __init__(self, recorder: Recorder, first: int) -> None:
        self.recorder, self.first, self.level = recorder, first, recorder.level
        self.outermost = recorder.lasting and recorder.level is None
        self.versions = []
        if self.outermost:  # what is written to a tensor after the call changes no later one, unless torch's autograd has to see it
            self.versions = autograd.versions([t for t in recorder.inputs if t.requires_grad])
            recorder.inputs = [t if t.requires_grad else t.detach().clone() for t in recorder.inputs]

    def call(self, func: Any, operands: Sequence[Any], avals: Sequence[Aval], build: Callable[[Sequence[Any]], Any]) -> Any:
        """Its results; NOT_RECORDED where they cannot be written down.  func: whose code is remembered if it cannot be."""

        def record(recorder: Recorder) -> Any:
            if recorder is self.recorder:
                if self.level is not None and not self.level.open:
                    raise escaped()
                first = self.first
            elif self.outermost:
                first = recorder.repeat(self.recorder)[self.first]
            else:
                raise escaped()
            return recorder.pull(first, operands, avals), build

        if not self.outermost and local.recorder is not self.recorder:
            raise escaped()
        autograd.check_unchanged(self.versions)
        return transform(func, record)


def active_leaves(args: tuple[Any, ...], kwargs: dict[str, Any], positions: Sequence[int]) -> tuple[list[Any], Any, tuple[int, ...]]:
    """The flattened (args, kwargs); and which of the tensors among the leaves belong to the arguments at these positions."""
    leaves, spec = trees.flatten((args, kwargs))
    starts = [0]
    for a in args:
        starts.append(starts[-1] + (1 if isinstance(a, torch.Tensor) else len(trees.flatten(a)[0])))
    order, k = {}, 0
    for i, x in enumerate(leaves):
        if isinstance(x, torch.Tensor):
            order[i] = k
            k += 1
    return leaves, spec, tuple([order[i] for p in positions for i in range(starts[p], starts[p + 1])])


def avals_of(recorder: Recorder, leaves: Sequence[Any], active: Sequence[int]) -> list[Aval]:
    """Of the tensors among the leaves, those that are differentiated requiring grad."""
    found = [recorder.aval(x).with_grad(False) for x in leaves if isinstance(x, torch.Tensor)]
    for k in active:
        found[k] = found[k].with_grad(True)
    return found


__all__ = ["NOT_RECORDED", "TRANSFORMS", "Kept", "active_leaves", "avals_of", "entered", "on", "transform"]
