"""Goes on in PyTorch itself where a function cannot be recorded to its end, so that its Python runs
once.

What is recorded so far is repeated on real tensors, inside of the levels by which torch.func keeps
its own transforms apart, and the recorded tensors that the function holds become these tensors.
Then the function goes on as torch.func would have run it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from bridge import private
from bridge.errors import NeedsTorch
from bridge.intercepted.library_operators import called_in_torch
from bridge.record import replay
from bridge.record.entries import Begin, Op
from bridge.record.tensor import Recorded
from bridge.trace.levels import Unrecordable
from bridge.transform_kinds import CHECKPOINT

#: What pulls cotangents back, or pushes tangents forward, through a function that vjp or linearize
#: has run.
Pull = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
#: A transform that PyTorch runs. It gives a list of the arguments of its function, in which other
#: objects may be put for the same tensors, is sent the function's results and the params of the
#: End, and returns the transform's results and a Pull.
Level = Generator[list[torch.Tensor], Any, tuple[list[torch.Tensor], Pull | None]]


def can_repeat(trace: Sequence[tuple[Any, tuple[int, ...]]]) -> bool:
    """Whether PyTorch can run the transforms of a record."""
    return all(type(what) is not Begin or what.kind.in_torch is not None for what, _ in trace)


def _called(operands: Sequence[torch.Tensor], _: Any) -> Level:
    """A call that changes no values."""
    results, _ = yield list(operands)
    return results, None


CHECKPOINT.in_torch = _called


class InTorch(replay.Run):
    """The transforms of one call that PyTorch runs; numbers: the Python numbers of the record that
    is repeated.
    """

    def __init__(self, numbers: Sequence[Any] = ()) -> None:
        super().__init__(numbers)
        self.entered: list[Level] = []
        # the recorded tensors that are to become those that PyTorch computes
        self.held: dict[int, Recorded] = {}
        self.known: set[int] = set()  # the ids of tensors that are some object already
        self.pull: Pull | None = None  # of the transform that has ended last

    def whole(
        self,
        trace: Sequence[tuple[Any, tuple[int, ...]]],
        inputs: Sequence[torch.Tensor],
        tensors: Sequence[Recorded] = (),
    ) -> None:
        """Repeat a record; its transforms that have not ended stay entered.

        Raises:
            Unrecordable: PyTorch cannot repeat it; nothing stays entered.
        """
        if not can_repeat(trace):
            raise Unrecordable("an autograd.Function or jet in the record")
        if not all(map(private.only_python_refers, tensors)):
            raise Unrecordable("a tensor to which C++ or a weak reference refers")
        self.held.update({t.ref: t for t in tensors})
        self.known.update(map(id, inputs))
        grad = torch.is_grad_enabled()
        try:
            with private.requires_grad_allowed(True):  # a Parameter that the function has made
                super().whole(trace, inputs)
        except BaseException as error:
            self.leave_all()
            if isinstance(error, Exception):
                raise Unrecordable(f"{type(error).__name__}: {error}") from None
            raise
        finally:
            torch.set_grad_enabled(grad)

    def store(self, values: Sequence[torch.Tensor], first: int) -> None:
        for ref, t in enumerate(values, first):
            held = self.held.pop(ref, None)
            if held is not None:
                own = id(t) not in self.known and private.only_python_refers(t)
                attributes = {
                    name: x
                    for name, x in vars(held).items()
                    if name not in ("ref", "aval", "level", "before")
                }
                torch.utils.swap_tensors(held, t if own else t.view_as(t))
                vars(held).update(attributes)
                t = held
            self.env[ref] = t
            self.known.add(id(t))

    def called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return called_in_torch(func, args, kwargs)

    def other(self, op: Op) -> None:
        raise Unrecordable(f"{op.func}, whose result is the same tensor in a record alone")

    def outside(self, t: torch.Tensor) -> torch.Tensor:
        return private.alive(t)

    def enter(self, block: replay.Block) -> None:
        arguments = self.begin(block.begin, [self.env[r] for r in block.operands])
        self.store(arguments, block.arguments)
        arguments[:] = [self.env[block.arguments + k] for k in range(len(arguments))]
        self.run(block.entries)
        if block.end is not None:
            outs = self.end(block.end.params, [self.env[r] for r in block.results])
            if self.pull is not None:
                self.pulls[block.first] = self.pull
            self.store(outs, block.first)

    def begin(self, what: Begin, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Enter a transform; returns the arguments of its function."""
        if what.kind.in_torch is None:
            raise NeedsTorch(f"{what.kind.name} of a function that cannot be recorded")
        torch.set_grad_enabled(what.grad)
        level = what.kind.in_torch(operands, what.params)
        arguments = next(level)
        self.entered.append(level)
        return arguments

    def end(self, params: Any, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Leave the innermost transform, whose function has these results; returns the transform's
        own, and keeps its pull.
        """
        try:
            self.entered.pop().send((results, params))
        except StopIteration as ended:
            outs, self.pull = ended.value
            return outs
        raise AssertionError("a transform runs its function once")

    def leave(self) -> None:
        """Leave the innermost transform, whose function has raised."""
        with contextlib.suppress(Exception):
            self.entered.pop().close()

    def leave_all(self) -> None:
        """Leave every transform that is still entered."""
        while self.entered:
            self.leave()
