"""Records transforms: decides whether one is recorded, runs its function meanwhile, and keeps
records for later calls (vjp, linearize).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch.overrides import TorchFunctionMode

from bridge import private
from bridge.boundary import autograd, handing_over
from bridge.boundary.results import with_twins
from bridge.convert import tensors, trees
from bridge.errors import NeedsTorch, advice, escaped, public
from bridge.private_calls import intercepted
from bridge.process import having, process
from bridge.record import replay
from bridge.record.in_torch import InTorch, Pull
from bridge.record.kept_tensors import Left
from bridge.record.programs import NotCompiled, run
from bridge.record.recorder import SHOWN, Recorder
from bridge.record.tensor import Aval, referred_to
from bridge.trace import saved_tensor_hooks
from bridge.trace.levels import Unrecordable, state
from bridge.transform_kinds import Kind

#: The tensors among a recorded transform's results, and a function that builds the results from
#: tensors.
Recording = tuple[list[Any], Callable[[Sequence[Any]], Any]]
NOT_RECORDED = object()
_EMPTY = types.CellType()  # of a variable that is not bound yet
_log = logging.getLogger("torchfunc_jax")


def transform(
    func: Callable[..., Any],
    leaves: Sequence[Any],
    record: Callable[[Recorder], Recording],
    lasting: bool = False,
) -> Any:
    """Run a transform: write it down as a part of the record in progress, or make a record of it
    and run that.

    What cannot be recorded is run by PyTorch itself.

    Args:
        func: the user's function.
        leaves: those of its arguments.
        record: writes the transform down.
        lasting: whether the record, if one is made, will be repeated.

    Returns:
        The results; NOT_RECORDED in a trace, and for jax.Arrays that torch cannot have, such as
            those of a trace of JAX's own.

    Raises:
        OfArrays: the leaves are other jax.Arrays; the call is one of tensors then.
    """
    if state.level is not None or state.in_jax:
        return NOT_RECORDED
    if has_arrays(leaves):
        return NOT_RECORDED
    recorder = state.recorder
    if recorder is None:
        return _outermost(func, leaves, record, lasting)
    level = recorder.level
    # only the transform's function is recorded, not its checks
    with recorder.unwatched() as watched:
        try:
            if not watched:
                raise Unrecordable("a transform inside of an operator")
            found, build = record(recorder)
        except Unrecordable as reason:
            if recorder.level is not level:
                raise
            recorder.go_on(reason)
            found, build = record(recorder)
        return build(found)


def has_arrays(leaves: Sequence[Any]) -> bool:
    """Whether there are jax.Arrays among the leaves of an un-jitted call, and JAX has to run it;
    raises OfArrays if torch can have them.
    """
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    if arrays and state.level is None and not state.in_jax:
        if state.recorder is not None:
            state.recorder.go_on(Unrecordable("a jax.Array"))
        if all(map(tensors.fits_torch, arrays)):
            raise handing_over.OfArrays
    return bool(arrays)


def _outermost(
    func: Callable[..., Any],
    leaves: Sequence[Any],
    record: Callable[[Recorder], Recording],
    lasting: bool,
) -> Any:
    devices, modes = _function_modes() if private.function_modes() else ([], [])
    recorder: Recorder | None = None
    reason: Any = None
    if modes:
        # but for the function itself, the whole call is without them
        private.leave_function_modes(len(modes))
    try:
        recorder = Recorder(run, devices[-1] if devices else None, modes)
        recorder.lasting, recorder.resumable = lasting, True
        reason = _known_reason(devices)
        if (
            reason is None
            and process.unrecordable
            and _key(recorder, func, leaves) in process.unrecordable
        ):
            reason = "an earlier call could not be recorded"
        if reason is None:
            try:
                return _in_record(recorder, record)
            except Unrecordable as found:
                if recorder.in_torch is not None:  # it had gone on in PyTorch
                    recorder.in_torch.leave_all()
                recorder.draw_again()
                reason = recorder.refused = found
            finally:
                if recorder.refused is not None:
                    process.unrecordable.add(_key(recorder, func, leaves))
                    _log.info(
                        "%s runs in PyTorch: %s",
                        getattr(func, "__qualname__", func),
                        recorder.refused,
                    )
            recorder = Recorder(run, recorder.default_device, recorder.above)
        recorder.in_torch = InTorch()
        try:
            with intercepted:
                outs, build = record(recorder)
                return build(outs)
        except Unrecordable as found:  # a tensor that only torch.func itself takes
            raise NeedsTorch(str(found)) from None
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        if recorder is not None and recorder.in_torch is not None:
            why = f"PyTorch runs this call, which cannot be recorded ({reason or recorder.refused})"
            # jit refuses these too
            error.add_note(
                f"{why}." if advice(error) else f"{why}; jit compiles all of it, and may allow it."
            )
        raise
    finally:
        if recorder is not None and recorder.in_torch is not None:
            recorder.in_torch.leave_all()
        if left := modes if recorder is None else recorder.above:
            private.enter_function_modes(left)


def _known_reason(devices: Sequence[torch.device]) -> str | None:
    """Why a call is not recorded, if the state of PyTorch at its beginning tells."""
    if private.transformed_by_torch():
        return "a transform that PyTorch runs is around it"
    if torch.is_inference_mode_enabled():
        return "inference mode"
    if private.saved_tensor_hooks() is not None:
        raise NeedsTorch("hooks on saved tensors")
    if devices and any(device.type not in ("cpu", "cuda") for device in devices):
        return "a default device on which there are no tensors of records"
    return None


def _in_record(recorder: Recorder, record: Callable[[Recorder], Recording]) -> Any:
    """Record the call of an outermost transform, and run the record; raises Unrecordable if that is
    not possible.
    """
    state.recorder = recorder
    try:
        with intercepted:
            outs, build = recorder.drawn(record)
        if recorder.in_torch is not None:
            return build(outs)
        state.recorder = None
        refs = [t.ref for t in outs]
        kept = Left(recorder, refs) if any(referred_to(recorder.tensors)) else None
        # later writes to its inputs, and its own, change no result of later runs; a write to one
        # that requires grad raises
        inputs = (
            [t if t.requires_grad else t.detach().clone() for t in recorder.inputs]
            if recorder.lasting
            else []
        )
        try:
            found = _run(recorder, [*refs, *(kept.refs if kept else ())])
        except replay.OnlyInside as error:
            kept.without(error.refs)
            found = _run(recorder, [*refs, *kept.refs])
        if kept:
            kept.fill_in(recorder, found[len(refs) :])
        if recorder.after is not None:
            torch.default_generator.set_state(recorder.after)
        if recorder.shows > SHOWN:
            recorder.refused = Unrecordable("many tensors that are shown")
        if recorder.lasting:
            recorder.inputs = inputs
        return build(found[: len(refs)])
    finally:
        state.recorder = None
        recorder.tensors.clear()


def _run(recorder: Recorder, refs: Sequence[int]) -> Sequence[torch.Tensor]:
    """Run a record that has ended, in PyTorch if no program can, or if it is not compiled yet; the
    values with these numbers.
    """
    cold = None
    try:
        return run(recorder, refs, True)
    except NotCompiled as found:
        cold, start = found, time.perf_counter()
    except Unrecordable as reason:
        if recorder.broken is not None:  # the user's code has caught an Unrecordable
            raise
        recorder.refused = reason
    recorder.draw_again()
    recorder.in_torch = in_torch = InTorch(recorder.numbers)
    try:
        in_torch.whole(recorder.trace, recorder.inputs)
    except Unrecordable as error:
        raise (recorder.refused or error) from None
    outs = [in_torch.outside(in_torch.env[ref]) for ref in refs]
    in_torch.env.clear()
    if cold is not None:
        cold.ran(time.perf_counter() - start)
    return outs


def _code_of(fn: Callable[..., Any]) -> Any:
    """The code object that a function runs, which all closures made from it share; a C function
    itself; for any other callable its type.
    """
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__wrapped__
    if isinstance(fn, types.BuiltinFunctionType):
        return fn
    return getattr(fn, "__code__", type(fn))


def _key(recorder: Recorder, func: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """What the calls have in common of which one could not be recorded: code, types of what it
    closes over, modes, dtypes, numbers of dimensions.
    """
    func = getattr(func, "transforms", func)
    cells = [
        cell.cell_contents for cell in getattr(func, "__closure__", None) or () if cell != _EMPTY
    ]
    within = tuple(
        [
            x.__code__
            if isinstance(x, types.FunctionType)
            else (type(x), frozenset(map(type, trees.flatten(x)[0])))  # lists grow
            for x in cells
        ]
    )
    modes = tuple(map(type, recorder.above))
    return (
        _code_of(func),
        within,
        modes,
        tuple([(x.dtype, x.dim()) for x in leaves if isinstance(x, torch.Tensor)]),
    )


def _function_modes() -> tuple[list[torch.device], list[TorchFunctionMode]]:
    """The default devices that the outermost torch function modes set, and the user's modes: those
    from the first on that sets none.
    """
    modes = private.function_mode_stack()
    devices: list[torch.device] = []
    for mode in modes:
        device = private.default_device_of(mode)
        if device is None:
            break
        devices.append(device)
    return devices, modes[len(devices) :]


def unwatched() -> contextlib.AbstractContextManager[Any]:
    """While entered, torch functions are not written down in the record in progress, and no mode of
    the user's sees them.
    """
    return contextlib.nullcontext() if state.recorder is None else state.recorder.unwatched()


def entered(
    recorder: Recorder,
    func: Callable[..., Any],
    kind: Kind,
    params: Any,
    leaves: Sequence[Any],
    spec: Any,
    avals: Sequence[Aval],
    more: Sequence[Any],
    finish: Callable[[Any], tuple[list[Any], Any]],
) -> tuple[list[Any], Any]:
    """Begin a transform and run func on its arguments; returns what finish makes of func's result.

    Args:
        leaves, spec: the flattened (args, kwargs).
        avals: those of the tensors among them, as the function sees them.
        more: further operands of the transform.
        finish: takes func's result; returns the tensors in it, and something else for the caller.
    """
    arguments = iter(
        recorder.begin(
            kind, params, [*[x for x in leaves if isinstance(x, torch.Tensor)], *more], avals
        )
    )

    def call() -> Any:
        args, kwargs = trees.unflatten(
            spec,
            with_twins([next(arguments) if isinstance(x, torch.Tensor) else x for x in leaves]),
        )
        return func(*args, **kwargs)

    if not kind.reverse:
        return inside(recorder, call, finish)
    with torch.enable_grad(), saved_tensor_hooks.without_hooks():
        return inside(recorder, call, finish)


def inside(recorder: Recorder, call: Callable[[], Any], finish: Callable[[Any], Any]) -> Any:
    """Run the function of the transform that has just begun; what finish makes of its result."""
    try:
        out = recorder.watched(call)
        try:
            return finish(out)
        except Unrecordable as reason:
            recorder.go_on(reason)
            return finish(out)
    except Unrecordable:  # the record is not used
        raise
    except BaseException:
        recorder.leave()  # the user may catch the exception and go on
        raise


class Kept:
    """A recorded vjp or linearize, whose returned function is called later: that of vjp pulls back,
    that of linearize pushes forward.

    Args:
        func: the user's function.
        recorder: the record in which the transform has just ended.
        outs: the transform's results there.
    """

    def __init__(self, func: Callable[..., Any], recorder: Recorder, outs: Sequence[Any]) -> None:
        self.func = func
        self.recorder, self.level = recorder, recorder.level
        self.first: int = outs[0].ref if recorder.in_torch is None else -1
        self.by_torch: Pull | None = None if recorder.in_torch is None else recorder.in_torch.pull
        # the record ends with it, and is repeated for each call
        self.outermost = recorder.lasting and recorder.level is None
        self.versions = (
            autograd.versions([t for t in recorder.inputs if t.requires_grad])
            if self.outermost
            else []
        )

    @property
    def pull(self) -> Pull | None:
        """What calls the returned function, if PyTorch has run the transform."""
        known = (
            None if self.recorder.in_torch is None else self.recorder.in_torch.pulls.get(self.first)
        )
        return self.by_torch or known

    def either(
        self, ours: Callable[..., Any], theirs: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """The returned function: ours, or if torch looks at a call and PyTorch has not run the
        transform, what theirs returns.
        """
        found = handing_over.either(ours, theirs, nested=True)
        return public(
            lambda *args, **kwargs: (found if self.pull is None else ours)(*args, **kwargs)
        )

    def call(
        self,
        operands: Sequence[torch.Tensor],
        avals: Sequence[Aval],
        build: Callable[[Sequence[Any]], Any],
        again: Callable[[], Any],
    ) -> Any:
        """Call the returned function.

        Args:
            operands: the cotangents or tangents.
            avals: those of its results.
            build: builds the results from tensors.
            again: does all of it in the trace in progress.
        """

        def record(recorder: Recorder) -> Recording:
            if recorder.in_torch is not None:
                recorder.in_torch.numbers = self.recorder.numbers
                recorder.in_torch.whole(self.recorder.trace, self.recorder.inputs)
                return recorder.in_torch.pulls[self.first](operands), build
            first = (
                self.first
                if recorder is self.recorder
                else recorder.repeat(self.recorder)[self.first]
            )
            return recorder.pull(first, operands, avals), build

        if self.pull is not None and state.level is None:
            if state.recorder is not None and state.recorder is not self.recorder:
                state.recorder.go_on(
                    Unrecordable(
                        "a function that vjp or linearize has returned, which PyTorch runs"
                    )
                )
            return build(self.pull(operands))
        if not self.outermost and (
            state.recorder is not self.recorder or (self.level is not None and not self.level.open)
        ):
            raise escaped(self.level)
        autograd.check_unchanged(self.versions)
        done = transform(self.func, operands, record)
        if done is not NOT_RECORDED:
            return done
        with having(state, in_jax=True):
            return again()
