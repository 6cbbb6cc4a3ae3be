"""Goes on operator by operator in the middle of a function that cannot be recorded to its end, so that its Python runs once.

JAX calls the function that it transforms, but the user's function is already running.  So another thread runs the transforms that are
entered, each with a function that repeats what is recorded of the user's.  Where the record ends, that thread waits with its trace open;
the user's thread takes part in that trace, and sends the other one what the user's functions return or raise.
"""
from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from bridge import private, private_jax
from bridge.convert import trees
from bridge.process import having
from bridge.record import replay
from bridge.record.entries import Op
from bridge.record.recorder import Level, Recorder, around
from bridge.record.tensor import Recorded, Unrecordable
from bridge.trace import tracing
from bridge.trace.levels import state

#: What a thread sends the other: how ("returned" or "raised"), what, and where the trace is then; None where no trace is open any more.
Message = tuple[str, Any, tuple[Any, Any] | None]


class _Again(replay.Run):
    """Repeats a record; the tensors that the user's functions hold become those that it computes."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.numbers)
        #: also those of transforms that have ended; inside of a Function, values have no derivative of the Function's
        self.held = {
            t.ref: t for t in recorder.tensors
            if type(t) is Recorded and all(level.open or level.kind != "function" for level in around(t.level))
        }  # fmt: skip

    def other(self, op: Op) -> None:
        raise Unrecordable(f"{op.func}, whose result is the same tensor in a record alone")

    def store(self, values: Sequence[torch.Tensor], first: int) -> None:
        for ref, t in enumerate(values, first):
            held = self.held.pop(ref, None)
            self.env[ref] = t if held is None else _became(held, t)


def _became(held: Recorded, t: torch.Tensor) -> torch.Tensor:
    """The recorded tensor, which from now on is the traced tensor t; the object that t was is a tensor on the same memory."""
    if type(t) is not tracing.Traced:  # a captured tensor
        t = t.view_as(t)
    own = {name: x for name, x in vars(held).items() if name not in ("ref", "aval", "level")}
    private.become(held, t)
    vars(held).update(own)
    return held


class Resumed:
    """The rest of a call whose function cannot be recorded to its end.

    Args:
        recorder: its record so far.
        levels: the transforms that are entered, the outermost first.
    """

    def __init__(self, recorder: Recorder, levels: Sequence[Level]) -> None:
        self.levels, self.entered = levels, list(levels)
        self.again = _Again(recorder)
        whole, inputs = replay.parsed(recorder.trace, [], looped=False)
        self.again.env.update(zip(inputs, recorder.inputs, strict=True))
        self.blocks = [whole.entries[-1]]  # the only one
        for _ in levels[1:]:
            self.blocks.append(self.blocks[-1].entries[-1])
        self.dtype, self.forward_mode = recorder.ambient[0], recorder.forward_mode
        self.modes = private.count_of_dispatch_modes() - recorder.modes  # those that the function has entered
        self.started: set[int] = set()  # the transforms whose function the other thread has called
        self.reached = False  # whether the other thread has come to the end of the record
        self.abandoned = self.waiting = False
        self.to_user: SimpleQueue[Message] = SimpleQueue()
        self.from_user: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.first: Message | None = None  # the result of the innermost transform, if its function had returned before
        self.joined = contextlib.ExitStack()

    # -- on the user's thread --------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Run the transforms up to the end of the record; raises Unrecordable if that cannot be."""
        context, settings = contextvars.copy_context(), private_jax.settings()
        args = (vars(state).copy(), settings, _stream())
        thread = threading.Thread(target=context.run, args=(self._thread, *args), name="torchfunc_jax", daemon=True)
        thread.user = threading.get_ident()  # type: ignore[attr-defined]  # ``at_line`` looks for the user's line there
        thread.start()
        try:
            how, what, place = message = self._received()
            if place is not None:
                with private.below_dispatch_modes(self.modes):
                    self.joined.enter_context(having(state, recorder=None, unrecorded=True, level=place[0]))
                    self.joined.enter_context(tracing.joined())
                    self.joined.enter_context(private_jax.at(place[1]))
            elif how == "raised" and not self.reached:
                raise Unrecordable(f"{type(what).__name__}: {what}")
            if self.levels[-1].returned:
                self.first = message
        except BaseException as error:
            self.abandoned = True
            self.joined.close()
            self.from_user.put(("raised", error))
            raise

    def _received(self) -> Message:
        self.waiting = True
        message = self.to_user.get()
        self.waiting = False
        return message

    def first_result(self) -> Any:
        """The result of the innermost transform, whose function had returned before the call was resumed."""
        first, self.first = self.first, None
        return self._result(first)

    def result(self, how: str, what: Any) -> Any:
        """The result of the innermost transform that is entered, whose function has returned or raised this."""
        if self.waiting and self._received()[2] is None:  # an interruption came meanwhile
            return self._result((how, what, None))
        if len(self.entered) == 1:
            self.joined.close()
        self.from_user.put((how, what))
        return self._result(self._received())

    def _result(self, message: Message) -> Any:
        how, what, place = message
        self.entered.pop().open = False
        if place is not None:
            state.level = place[0]
            private_jax.go_to(place[1])
        if how == "raised":
            raise what
        return what

    # -- on the other thread ---------------------------------------------------------------------------------------------------------
    def _thread(self, of_user: dict[str, Any], settings: Any, stream: contextlib.AbstractContextManager[Any]) -> None:
        try:
            vars(state).update(of_user)
            state.recorder, state.unrecorded = None, True
            if private_jax.settings() != settings:
                raise Unrecordable("settings of JAX's that hold on one thread")
            with private.set_forward_mode_enabled(self.forward_mode), stream:
                message: Message = ("returned", self._transform(0), None)
        except BaseException as error:
            message = ("raised", error, None)
        self.to_user.put(message)

    def _transform(self, k: int) -> Any:
        """Run a transform that is entered, with ``_function`` in the place of its function."""
        func, again = self.levels[k].again

        @functools.wraps(func)
        def function(*args: Any, **kwargs: Any) -> Any:
            # a transform of JAX's may call its function once more, at the latest in the backward pass
            return func(*args, **kwargs) if k in self.started else self._function(k, trees.flatten((args, kwargs))[0])

        with torch.set_grad_enabled(self.blocks[k].begin.grad):
            return again(function)

    def _function(self, k: int, leaves: Sequence[Any]) -> Any:
        """What is recorded of a transform's function, for these arguments; then what the user's thread makes of it."""
        self.started.add(k)
        block, inner = self.blocks[k], k + 1 < len(self.blocks)
        message: tuple[str, Any] = ("returned", None)
        with _default_dtype(self.dtype):
            self.again.store([x for x in leaves if isinstance(x, torch.Tensor)], block.arguments)
            self.again.run(block.entries[:-1] if inner else block.entries)
        if inner:
            try:
                message = ("returned", self._transform(k + 1))
            except BaseException as error:
                if self.abandoned or not self.reached:
                    raise
                message = ("raised", error)
        self.reached = True
        self.again.env.clear()  # the user's functions hold what they need
        if not inner and self.levels[k].returned:
            return self.levels[k].returned[0]
        self.to_user.put((*message, (state.level, private_jax.place())))
        how, what = self.from_user.get()
        if how == "raised":
            raise what
        return what


def resume(recorder: Recorder) -> Resumed:
    """Go on operator by operator with the call of which this is the record; raises Unrecordable, and does nothing, if that cannot be."""
    levels = list(around(recorder.level))[::-1]
    if not levels or any(level.again is None for level in levels):
        raise recorder.refused
    resumed = Resumed(recorder, levels)
    try:
        resumed.start()
    except AttributeError:  # this version of JAX does not have a name of ``private_jax``
        raise recorder.refused from None
    return resumed


def _stream() -> contextlib.AbstractContextManager[Any]:
    """A context in which the other thread computes on this thread's device and stream of CUDA."""
    return torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_initialized() else contextlib.nullcontext()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """While entered, the default dtype is that of the record, which the user's function may have changed since."""
    now = torch.get_default_dtype()
    if now is not dtype:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        if now is not dtype:
            torch.set_default_dtype(now)
