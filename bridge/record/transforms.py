"""Records transforms: decides whether one is recorded, runs its function meanwhile, and keeps records for later calls (vjp, linearize)."""
from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch.overrides import TorchFunctionMode

from bridge import private
from bridge.boundary import autograd
from bridge.boundary.results import split_arrays, with_twins
from bridge.convert import trees
from bridge.errors import escaped
from bridge.intercepted import autograd_function as intercepted
from bridge.process import having, process
from bridge.record import replay
from bridge.record.escaped import Left
from bridge.record.programs import run
from bridge.record.recorder import Again, Recorder
from bridge.record.resumed import resume
from bridge.record.tensor import Aval, Unrecordable, aval_of
from bridge.trace import saved_tensor_hooks
from bridge.trace.levels import state

#: The tensors among a recorded transform's results, and a function that builds the results from tensors.
Recording = tuple[list[Any], Callable[[Sequence[Any]], Any]]
NOT_RECORDED = object()
_EMPTY = types.CellType()  # of a variable that is not bound yet
_log = logging.getLogger("torchfunc_jax")


class _Returned(BaseException):
    """The function of a transform has returned this, after its call has been resumed operator by operator."""


def transform(
    func: Callable[..., Any], leaves: Sequence[Any], record: Callable[[Recorder], Recording],
    again: Callable[[Callable[..., Any]], Any] | None, lasting: bool = False,
) -> Any:
    """Run a transform: write it down as a part of the record in progress, or make a record of it and run that.

    Args:
        func: the user's function.
        leaves: those of its arguments.
        record: writes the transform down.
        again: runs the transform on the function that it is given, if nothing is recorded; None: it has nothing to run.
        lasting: whether the record, if one is made, will be repeated.

    Returns:
        The results; NOT_RECORDED if JAX has to run the function operator by operator.
    """
    if state.level is not None or state.unrecorded:
        return NOT_RECORDED
    in_jax = any(isinstance(x, jax.Array) for x in leaves)
    recorder = state.recorder
    resumable = None if again is None else (func, again)
    if recorder is None:
        return NOT_RECORDED if in_jax else _outermost(func, leaves, record, resumable, lasting)
    level = recorder.level
    with recorder.unwatched() as watched:  # only the transform's function is recorded, not its checks
        try:
            if in_jax:
                raise Unrecordable("a jax.Array")
            if not watched:
                raise Unrecordable("a transform inside of an operator")
            found, build = _recorded(recorder, record, resumable)
        except Unrecordable as reason:
            if recorder.level is not level:
                raise
            recorder.go_on(reason)
            return NOT_RECORDED
        return found if build is None else build(found)


def _recorded(recorder: Recorder, record: Callable[[Recorder], Recording], again: Again | None) -> tuple[Any, Any]:
    """What record gives; (the transform's results, None) if the call had to be resumed operator by operator."""
    outer, recorder.again = recorder.level, again
    try:
        return record(recorder)
    except _Returned as done:
        return recorder.resumed.result("returned", done.args[0]), None
    except Unrecordable as reason:
        if recorder.level is outer or not recorder.level.returned:
            raise
        recorder.go_on(reason)
        return recorder.resumed.first_result(), None
    except BaseException as error:
        if recorder.resumed is None:
            raise
        if recorder.resumed.first is not None:
            return recorder.resumed.first_result(), None
        return recorder.resumed.result("raised", error), None


def _outermost(
    func: Callable[..., Any], leaves: Sequence[Any], record: Callable[[Recorder], Recording], again: Again | None, lasting: bool
) -> Any:
    devices, modes = _function_modes() if private.function_modes() else ([], [])
    if (
        torch.is_inference_mode_enabled() or private.saved_tensor_pack() is not None
        or any(device.type not in ("cpu", "cuda") for device in devices)  # no tensors of records are there
    ):  # fmt: skip
        return NOT_RECORDED
    recorder: Recorder | None = None
    private.leave_function_modes(len(modes))  # but for the function itself, the whole call is without them
    try:
        recorder = Recorder(run, devices[-1] if devices else None, modes)
        return _in_record(recorder, func, leaves, record, again, lasting)
    finally:
        private.enter_function_modes(modes if recorder is None else recorder.above)


def _in_record(
    recorder: Recorder, func: Callable[..., Any], leaves: Sequence[Any], record: Callable[[Recorder], Recording], again: Again | None,
    lasting: bool,
) -> Any:
    if process.unrecordable and _key(recorder, func, leaves) in process.unrecordable:
        return NOT_RECORDED
    state.recorder, recorder.lasting, recorder.resume = recorder, lasting, resume
    try:
        with intercepted.intercepted(), recorder.drawing():
            outs, build = _recorded(recorder, record, again)
        if build is None:
            return outs
        state.recorder = None
        refs = [t.ref for t in outs]
        kept = Left(recorder, refs)
        try:
            found = _run(recorder, [*refs, *kept.refs])
        except replay.OnlyInside as error:
            kept.without(error.refs)
            found = _run(recorder, [*refs, *kept.refs])
        kept.fill_in(recorder, found[len(refs) :])
        if recorder.after is not None:
            torch.default_generator.set_state(recorder.after)
        if recorder.shows_many:
            process.unrecordable.add(_key(recorder, func, leaves))
        if lasting:  # later writes to its inputs change no result of later runs; a write to one that requires grad raises
            recorder.inputs = [t if t.requires_grad else t.detach().clone() for t in recorder.inputs]
        return build(found[: len(refs)])
    except Unrecordable as reason:
        recorder.refused = reason
        recorder.draw_again()
        return NOT_RECORDED
    finally:
        if recorder.refused is not None:
            process.unrecordable.add(_key(recorder, func, leaves))
            _log.info("%s runs operator by operator: %s", getattr(func, "__qualname__", func), recorder.refused)
        state.recorder = None
        recorder.tensors.clear()


def _run(recorder: Recorder, refs: Sequence[int]) -> Sequence[torch.Tensor]:
    """Run a record that has ended, operator by operator if no program can; the values with these numbers."""
    try:
        return run(recorder, refs, True)
    except Unrecordable as reason:
        if recorder.broken is not None:  # the user's code has caught an Unrecordable
            raise
        recorder.refused = reason
        recorder.draw_again()
        with off():
            again = replay.Run(recorder.numbers)
            again.whole(recorder.trace, recorder.inputs)
        recorder.pulls = again.pulls
        return [again.env[ref] for ref in refs]


def _code_of(fn: Callable[..., Any]) -> Any:
    """The code object that a function runs, which all closures made from it share; a C function itself; for any other callable its type."""
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__wrapped__
    if isinstance(fn, types.BuiltinFunctionType):
        return fn
    return getattr(fn, "__code__", type(fn))


def _key(recorder: Recorder, func: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """What the calls have in common of which one could not be recorded: code, what it closes over, modes, dtypes, numbers of dimensions."""
    func = getattr(func, "transforms", func)
    cells = [cell.cell_contents for cell in getattr(func, "__closure__", None) or () if cell != _EMPTY]
    within = tuple([x.__code__ if isinstance(x, types.FunctionType) else type(x) for x in cells])
    modes = tuple(map(type, recorder.above))
    return _code_of(func), within, modes, tuple([(x.dtype, x.dim()) for x in leaves if isinstance(x, torch.Tensor)])


def _function_modes() -> tuple[list[torch.device], list[TorchFunctionMode]]:
    """The default devices that the outermost torch function modes set, and the user's modes: those from the first on that sets none."""
    modes = private.function_mode_stack()
    devices: list[torch.device] = []
    for mode in modes:
        device = private.default_device_of(mode)
        if device is None:
            break
        devices.append(device)
    return devices, modes[len(devices) :]


def unwatched() -> contextlib.AbstractContextManager[Any]:
    """While entered, torch functions are not written down in the record in progress, and no mode of the user's sees them."""
    return contextlib.nullcontext() if state.recorder is None else state.recorder.unwatched()


def off() -> contextlib.AbstractContextManager[None]:
    """While entered, nothing is recorded on this thread."""
    return having(state, unrecorded=True)


def entered(
    recorder: Recorder, func: Callable[..., Any], kind: str, params: Any, leaves: Sequence[Any], spec: Any, avals: Sequence[Aval],
    more: Sequence[Any], finish: Callable[[Any], tuple[list[Any], Any]],
) -> tuple[list[Any], Any]:
    """Begin a transform and run func on its arguments; returns what finish makes of func's result.

    Args:
        leaves, spec: the flattened (args, kwargs).
        avals: those of the tensors among them, as the function sees them.
        more: further operands of the transform.
        finish: takes func's result; returns the tensors in it, and something else for the caller.
    """
    arguments = iter(recorder.begin(kind, params, [*[x for x in leaves if isinstance(x, torch.Tensor)], *more], avals))

    def call() -> Any:
        args, kwargs = trees.unflatten(spec, with_twins([next(arguments) if isinstance(x, torch.Tensor) else x for x in leaves]))
        with contextlib.ExitStack() as stack:
            if kind in ("grad", "jacrev", "vjp"):
                stack.enter_context(torch.enable_grad())
                stack.enter_context(saved_tensor_hooks.without_hooks())
            return func(*args, **kwargs)

    return inside(recorder, call, finish)


def inside(recorder: Recorder, call: Callable[[], Any], finish: Callable[[Any], Any]) -> Any:
    """Run the function of the transform that has just begun; what finish makes of its result."""
    try:
        with recorder.watching():
            out = call()
        if recorder.resumed is not None:
            raise _Returned(out)
        recorder.level.returned = (out,)
        return finish(out)
    except Unrecordable:  # the record is not used, or only up to here
        raise
    except BaseException:
        if recorder.resumed is None:
            recorder.leave()  # the user may catch the exception and go on
        raise


class Kept:
    """A recorded vjp or linearize, whose returned function is called later: that of vjp pulls back, that of linearize pushes forward.

    Args:
        func: the user's function.
        recorder: the record in which the transform has just ended.
        first: the number of the transform's first result.
    """

    def __init__(self, func: Callable[..., Any], recorder: Recorder, first: int) -> None:
        self.func = func
        self.recorder, self.first, self.level = recorder, first, recorder.level
        self.outermost = recorder.lasting and recorder.level is None  # the record ends with it, and is repeated for each call
        self.versions = autograd.versions([t for t in recorder.inputs if t.requires_grad]) if self.outermost else []

    def call(
        self, operands: Sequence[torch.Tensor], avals: Sequence[Aval], build: Callable[[Sequence[Any]], Any], again: Callable[[], Any]
    ) -> Any:
        """Call the returned function.

        Args:
            operands: the cotangents or tangents.
            avals: those of its results.
            build: builds the results from tensors.
            again: does all of it unrecorded, if the call cannot be recorded.
        """

        def record(recorder: Recorder) -> Recording:
            first = self.first if recorder is self.recorder else recorder.repeat(self.recorder)[self.first]
            return recorder.pull(first, operands, avals), build

        if self.first in self.recorder.pulls and (self.level is None or self.level.open):
            return build(self.recorder.pulls[self.first](operands))
        if not self.outermost and (state.recorder is not self.recorder or (self.level is not None and not self.level.open)):
            raise escaped(self.level)
        autograd.check_unchanged(self.versions)
        done = transform(self.func, operands, record, None)
        if done is not NOT_RECORDED:
            return done
        with off():
            return again()


def active_leaves(args: tuple[Any, ...], kwargs: dict[str, Any], positions: Sequence[int]) -> tuple[list[Any], Any, tuple[int, ...]]:
    """The leaves and treedef of (args, kwargs), and which of the arrays among the leaves belong to the arguments at these positions."""
    leaves, spec = trees.flatten((args, kwargs))
    starts = [0, *itertools.accumulate([len(trees.flatten(a)[0]) for a in args])]
    order = {i: k for k, i in enumerate(split_arrays(leaves))}
    return leaves, spec, tuple([order[i] for p in positions for i in range(starts[p], starts[p + 1])])


def avals_of(leaves: Sequence[Any], active: Sequence[int]) -> list[Aval]:
    """The avals of the tensors among the leaves; only the active ones, which are differentiated, require grad."""
    wanted = frozenset(active)
    return [aval_of(x).with_grad(k in wanted) for k, x in enumerate([x for x in leaves if isinstance(x, torch.Tensor)])]
