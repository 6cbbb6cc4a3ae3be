"""Runs the entries of a record again on traced tensors, inside a program that JAX traces."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge import private
from bridge.boundary import autograd
from bridge.errors import EscapedTensorError, NotInLoopError
from bridge.lowering.common import varying
from bridge.programs.guards import within_autocast
from bridge.record import loops
from bridge.record.entries import Begin, End, Input, Left, Op, Out, Pull, Ref, filled
from bridge.trace import python_numbers, tracing
from bridge.trace.levels import Unrecordable, push
from bridge.transform_kinds import CHECKPOINT, FUNCTION, LOOP


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """A transform of the record, or the whole record: its entries,
    and the numbers of its values.
    """

    begin: Begin | None
    operands: tuple[int, ...]
    arguments: int  # the first argument of its function
    used: int  # how many Python numbers the entries before it take, and
    used_after: int = 0  # those and its own
    entries: list[Any] = dataclasses.field(default_factory=list)
    end: End | None = None
    results: tuple[int, ...] = ()  # those of its function
    first: int = 0  # its own first result
    # of a checkpoint or a Function, whose values inside cannot leave it: those that are used after
    # it
    left: tuple[int, ...] = ()


def parsed(
    trace: Sequence[tuple[Any, tuple[int, ...]]], results: Sequence[int], looped: bool = True
) -> tuple[Block, list[int]]:
    """The record as a tree, and the numbers of its inputs. The entries of a transform that has not
    ended run without the transform.

    No loop begins before the last write to a tensor: the results of a loop share no memory with its
    operands, as views would.

    results: the numbers of the values that are wanted. looped: whether steps that repeat become a
    loop.
    """
    uses = collections.Counter([*results, *[r for _, refs in trace for r in refs]])
    left = [*results, *[r for what, refs in trace if type(what) is Left for r in refs]]
    whole = Block(None, (), 0, 0)
    stack, blocks, count, used, inputs = [whole], [whole], 0, 0, []
    written = 0  # the next number after the last write
    for what, refs in trace:
        kind = type(what)
        if kind is Input:
            inputs.append(count)
        elif kind is Begin:
            stack.append(Block(what, refs, count, used))
            blocks.append(stack[-1])
        elif kind is End:
            block = stack.pop()
            block.end, block.results, block.first, block.used_after = what, refs, count, used
            if block.begin.kind in (CHECKPOINT, FUNCTION):
                block.left = tuple([r for r in left if block.arguments <= r < count])
            stack[-1].entries.append(block)
        else:
            stack[-1].entries.append((what, refs, count))
        count += what.made
        used += what.numbers if kind is Op else 0
        if kind is Op and what.changed:
            written = count
    for outer, block in itertools.pairwise(stack):
        outer.entries.append(block)
    for block in blocks if looped else ():
        if block.end is not None or block is whole:
            block.entries = loops.rolled(block.entries, uses, written)
    return whole, inputs


class OnlyInside(EscapedTensorError):
    """Raised for values that were to be used outside of the transforms that compute them, and exist
    only there; refs: their numbers.
    """

    def __init__(self, refs: list[int]) -> None:
        super().__init__("tensor: it has no value outside of the transforms that compute it")
        self.refs = refs


class Run:
    """One run of a record: the values by their numbers; numbers:
    the Python numbers of the record.
    """

    def __init__(self, numbers: Sequence[Any]) -> None:
        self.env: dict[int, Any] = {}
        self.numbers, self.used = numbers, 0
        self.pulls: dict[int, Callable[..., Any]] = {}
        self.open = False  # a transform is entered whose function is still running

    def whole(
        self, trace: Sequence[tuple[Any, tuple[int, ...]]], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Run a record that has ended, outside of programs."""
        entries, numbers = parsed(trace, [], looped=False)
        self.env.update(zip(numbers, inputs, strict=True))
        self.run(entries.entries)

    def values(self, refs: Sequence[int]) -> tuple[Any, ...]:
        """The values with these numbers, outside of all transforms."""
        inside = []
        for r in refs:
            try:
                tracing.outside(self.env[r])
            except EscapedTensorError:
                inside.append(r)
        if inside:
            raise OnlyInside(inside)
        return tuple([self.env[r] for r in refs])

    def run(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            if type(entry) is Block:
                self.enter(entry)
            elif type(entry) is loops.Loop:
                try:
                    self.scan(entry)
                except Exception:
                    # not possible as a loop; nothing has changed, and an error for another reason
                    # comes again
                    self.run(entry.plain)
            else:
                what, refs, first = entry
                if type(what) is Pull:
                    self.store(self.pulls[what.node]([self.env[r] for r in refs]), first)
                elif type(what) is Left:
                    self.store([self.outside(self.env[r]) for r in refs], first)
                else:
                    self.operator(what, [self.env[r] for r in refs], first)

    def scan(self, loop: loops.Loop) -> None:
        """Run the steps of a loop as one ``lax.scan``."""
        numbers = self.numbers[self.used : self.used + loop.numbers * loop.times]
        given = [self.env[ref] for ref, _ in loop.carried]
        devices = [t.device for t in given]

        def step(carry: Sequence[jax.Array], repetition: jax.Array) -> tuple[list[jax.Array], None]:
            with push(LOOP) as level:
                arguments = [tracing.wrap(v, d, level) for v, d in zip(carry, devices, strict=True)]
                inner = Run(python_numbers.in_repetition(numbers, loop.numbers, repetition))
                for what, operands, first in loop.entries:
                    found = [
                        self.env[x]
                        if type(x) is int
                        else arguments[x[1]]
                        if x[0] == "carried"
                        else inner.env[x[1]]
                        for x in operands
                    ]
                    inner.operator(what, found, first)
                if level.writes:
                    raise NotInLoopError("a write, in a loop")
                return [tracing.value_of(inner.env[ref]) for _, ref in loop.carried], None

        outs, _ = varying.scan(step, [tracing.value_of(t) for t in given], jnp.arange(loop.times))
        self.used += loop.numbers * loop.times
        for ref, value, t in zip(loop.last, outs, given, strict=True):
            out = tracing.wrap(value, t.device)
            if t.requires_grad:
                out.requires_grad_()
            self.env[ref] = autograd.computed(out) if t.requires_grad else out

    def operator(self, op: Op, operands: list[torch.Tensor], first: int) -> None:
        count = op.numbers
        numbers = self.numbers[self.used : self.used + count]
        self.used += count
        cast = op.autocast is not None or private.any_autocast()
        with (
            torch.set_grad_enabled(op.grad),
            within_autocast(op.autocast) if cast else contextlib.nullcontext(),
        ):
            out = self.called(
                op.func, filled(op.args, operands, numbers), filled(op.kwargs, operands, numbers)
            )
        self.store(self._made(op, op.outs, out, operands), first)

    def called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a torch function."""
        return func(*args, **kwargs)

    def _made(
        self, op: Op, outs: Any, out: Any, operands: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The new tensors among an operator's results; raises Unrecordable if the recorded function
        has seen another shape or dtype.
        """
        if type(outs) is not Out:
            pairs = zip(outs, out, strict=True) if isinstance(outs, tuple | list) else ()
            if type(outs) is Ref and out is not operands[outs.k]:
                self.other(op)
            return [t for o, v in pairs for t in self._made(op, o, v, operands)]
        if not self.open and (
            tuple(out.shape) != tuple(outs.aval.shape) or out.dtype != outs.aval.dtype
        ):
            raise Unrecordable(
                f"{op.func}: PyTorch says that its result is {outs.aval!r}, and it is "
                f"{tuple(out.shape)} {out.dtype}"
            )
        return [out]

    def other(self, op: Op) -> None:
        """Called if an operator's result is no longer the same object as an operand."""

    def outside(self, t: torch.Tensor) -> torch.Tensor:
        """The value outside of transforms that have ended of a tensor that
        their function has kept.
        """
        return tracing.outside(t)

    def store(self, values: Sequence[torch.Tensor], first: int) -> None:
        self.env.update(enumerate(values, first))

    def enter(self, block: Block) -> None:
        operands = [self.env[r] for r in block.operands]
        if block.end is None:  # its function is still running: its arguments are those of all lanes
            self.open = True
            self.store(operands[: block.begin.made], block.arguments)
            return self.run(block.entries)
        left = {}
        if block.left:
            self.store(operands[: block.begin.made], block.arguments)
            self.run(block.entries)
            if block.begin.kind is CHECKPOINT:  # without it, the values are the same
                return self.store([self.env[r] for r in block.results], block.first)
            left = {r: self.env[r] for r in block.left}

        def body(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
            before, self.used = self.used, block.used
            self.store(arguments, block.arguments)
            self.run(block.entries)
            self.used = before
            return tuple([self.env[r] for r in block.results])

        with torch.set_grad_enabled(block.begin.grad):
            outs, pull = block.begin.kind.again(
                body, operands, block.begin.params, block.end.params
            )
        # however often body has run: a Function's own vmap may run another forward, and never this
        # one
        self.used = block.used_after
        if pull is not None:
            self.pulls[block.first] = pull
        self.store(outs, block.first)
        self.env.update(left)
