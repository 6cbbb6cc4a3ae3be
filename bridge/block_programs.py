"""The programs of equal blocks: what a block consists of, how two differ, and the loop over the
trace of one of them.

bridge/blocks.py decides when the loop runs, and checks the calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, subjaxprs
from torch import nn
from torch.nn.utils import parametrize

from bridge import private_jax
from bridge.boundary.calls import Call
from bridge.boundary.results import Output, Result, inexact, replaced, split_arrays, take_apart
from bridge.cache_keys import identical
from bridge.convert import trees
from bridge.intercepted.checkpointing import Policy, policy_of
from bridge.intercepted.gradient_hooks import without_changes
from bridge.process import having
from bridge.programs.closure_scan import HOOKS
from bridge.programs.holders import REBUILT
from bridge.trace.levels import push, state
from bridge.trace.random_keys import key_of_lane, source
from bridge.trace.stacks import stacked, unstacked
from bridge.trace.torch_random import Draw
from bridge.trace.tracing import Traced
from bridge.transform_kinds import BLOCK, PLAIN

_ASPECTS = "shape", "dtype", "device", "requires_grad"
_Slot = tuple[str, Any, Any]  # (its name, the container, the key in it)
#: Attributes that are compared in ways of their own, or that an RNN makes anew.
_STATE = frozenset({"_parameters", "_buffers", "_modules", *HOOKS, *REBUILT})
_CONSTANT = (
    bool
    | int
    | float
    | complex
    | str
    | bytes
    | torch.dtype
    | torch.device
    | torch.Size
    | enum.Enum
    | None
)


#: To call a compiled block takes as long as some ten operations on small arrays: smaller blocks are
#: faster one by one, and soon compiled.
_FEWEST_OPERATIONS = 16


class Differ(Exception):
    """Blocks differ; the text says which and in what."""


# -- what a block consists of ----------------------------------------------------------------------
@dataclasses.dataclass
class Parts:
    """A block's modules by their paths, and the places of its tensors; those that hold one tensor
    are together in one of ``slots``.
    """

    modules: dict[str, nn.Module]
    slots: list[list[_Slot]]
    missing: list[str]  # the names of parameters and buffers that are None

    @functools.cached_property
    def described(self) -> list[list[Any]]:
        """Each tensor's ``_ASPECTS``."""
        return [[getattr(t, key) for key in _ASPECTS] for t in self.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        return [container[key] for (_, container, key), *_ in self.slots]

    @contextlib.contextmanager
    def holding(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """While entered, the places hold these tensors; the block may write to them, but replace
        none and set no attribute.
        """
        places = [(place, t) for slot, t in zip(self.slots, tensors, strict=True) for place in slot]
        before = [(container, key, container[key]) for (_, container, key), _ in places]
        before += [
            (m.__dict__, key, m.__dict__[key])
            for m in self.modules.values()
            for key in REBUILT
            if key in m.__dict__
        ]
        for (_, container, key), t in places:
            container[key] = t
        attributes = {path: _snapshot(m) for path, m in self.modules.items()}
        try:
            yield
            for (name, container, key), t in places:
                if (
                    container.get(key) is not t
                    if isinstance(container, dict)
                    else container[key] is not t
                ):
                    raise Differ(f"replaces its {name}")
            for path, m in self.modules.items():
                if (changed := _first_change(attributes[path], _snapshot(m))) is not None:
                    raise Differ(
                        f"changes its attribute {_joined(path, changed)}, and a loop runs its "
                        "Python only once"
                    )
        finally:
            for container, key, value in before:
                container[key] = value


def parts(block: nn.Module) -> Parts:
    """The parts of a block as they are now."""
    modules = dict(block.named_modules())
    slots: dict[int, list[_Slot]] = {}
    missing = []
    for path, m in modules.items():
        for kind in ("_parameters", "_buffers"):
            for key, t in m.__dict__[kind].items():
                if t is None:
                    missing.append(_joined(path, key))
                else:
                    slots.setdefault(id(t), []).append((_joined(path, key), m.__dict__[kind], key))
        for key, value in m.__dict__.items():
            if isinstance(value, torch.Tensor):
                slots.setdefault(id(value), []).append((_joined(path, key), m.__dict__, key))
            elif isinstance(value, list) and key not in REBUILT:
                for k, t in enumerate(value):
                    if isinstance(t, torch.Tensor):
                        slots.setdefault(id(t), []).append((_joined(path, f"{key}[{k}]"), value, k))
    return Parts(modules, list(slots.values()), missing)


def unlike(a: Parts, b: Parts) -> str | None:
    """What differs between two blocks apart from the values of tensors and of Python attributes;
    None if nothing does.
    """
    if [*a.modules] != [*b.modules]:
        return f"it has the submodules {[*b.modules]}, not {[*a.modules]}"
    for path, m in a.modules.items():
        other = b.modules[path]
        # each parametrized module has a class of its own
        own, its = map(parametrize.type_before_parametrizations, (m, other))
        if own is not its:
            return f"{path or 'it'} is a {its.__name__}, not a {own.__name__}"
        for kind in HOOKS:
            hooks, others = ([*x.__dict__.get(kind, {}).values()] for x in (m, other))
            if path and (
                len(hooks) != len(others)
                or any(h is not o for h, o in zip(hooks, others, strict=True))
            ):
                return f"{path} has other {kind.strip('_').replace('_', ' ')}"
    if a.missing != b.missing:
        return f"of its parameters and buffers {b.missing} are None, not {a.missing}"
    names, others = ([[name for name, *_ in slot] for slot in x.slots] for x in (a, b))
    if names != others:
        return "it has other tensors, or ties others together"
    for slot, mine, theirs in zip(a.slots, a.described, b.described, strict=True):
        for what, x, y in zip(_ASPECTS, mine, theirs, strict=True):
            if x != y:
                return (
                    f"the {what} of {slot[0][0]} is {list(y) if what == 'shape' else y}, not "
                    f"{list(x) if what == 'shape' else x}"
                )
    return None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _attributes(a: Parts, b: Parts) -> set[tuple[str, str]]:
    """The attributes (path, name) that differ between two blocks."""
    found = set()
    for path, m in a.modules.items():
        mine, theirs = m.__dict__, b.modules[path].__dict__
        names = {*mine, *theirs} - _STATE - ({"forward"} if not path else set())
        found |= {
            (path, k)
            for k in names
            if not equal(mine.get(k, equal), theirs.get(k, equal), slots=True)
        }
    return found


def equal(a: Any, b: Any, slots: bool = False) -> bool:
    """Whether two values hold the same; traced tensors do if they are one part of one memory.

    slots: tensors in them are among the blocks' ``Parts.slots``, where they may differ.
    """
    if a is b or (slots and isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return True
    if type(a) is Traced and type(b) is Traced:
        return a.node is b.node and (a.shape, a.stride()) == (b.shape, b.stride())
    if type(a) is not type(b) or isinstance(a, torch.Tensor | weakref.ref):
        return False
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(
            equal(x, y, slots and type(a) is list and isinstance(x, torch.Tensor))
            for x, y in zip(a, b)
        )
    if isinstance(a, dict):
        return [*a] == [*b] and all(equal(x, b[k]) for k, x in a.items())
    try:
        return identical(a) == identical(b)
    except TypeError:
        return False


def _snapshot(m: nn.Module) -> dict[str, list[Any]]:
    """By an attribute's name: its value, and what that contains if it is a list, set or dict."""
    found = {k: [v] for k, v in m.__dict__.items() if k not in _STATE}
    for value in found.values():
        inside = value[0]
        value += (
            [*inside, *inside.values()]
            if isinstance(inside, dict)
            else inside
            if type(inside) in (list, set)
            else []
        )
    return found


def _first_change(before: dict[str, list[Any]], now: dict[str, list[Any]]) -> str | None:
    return next(
        (
            key
            for key in {**before, **now}
            if [*map(id, before.get(key, ()))] != [*map(id, now.get(key, ()))]
        ),
        None,
    )


def is_constant(x: Any) -> bool:
    """Whether a leaf of arguments or results is a tensor, or a value that nothing can change."""
    return isinstance(x, torch.Tensor | _CONSTANT)


# -- the trace of a block --------------------------------------------------------------------------
@contextlib.contextmanager
def _watched(block: Parts, attributes: set[tuple[str, str]]) -> Iterator[set[tuple[str, str]]]:
    """While entered, those of these attributes that are read are added to the set."""
    read: set[tuple[str, str]] = set()
    before = []

    def noting(path: str, kind: type[nn.Module]) -> Callable[[Any, str], Any]:
        def get(m: Any, key: str) -> Any:
            read.update({(path, key)} & attributes)
            return kind.__getattribute__(m, key)

        return get

    try:
        for path in sorted({path for path, _ in attributes}):
            m, kind = block.modules[path], type(block.modules[path])
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            m.__class__ = type(
                kind.__name__, (kind,), {**names, "__getattribute__": noting(path, kind)}
            )
            before.append((m, kind))
        yield read
    finally:
        for m, kind in before:
            m.__class__ = kind


class _Draws:
    """Takes the place of what makes torch's draws: those of the first trace are made, and later
    traces get the same numbers.
    """

    def __init__(self, drawn: Any) -> None:
        self.drawn, self.made, self.at = drawn, list[tuple[Draw, jax.Array, Any]](), 0
        self.first = True

    def __call__(self, draw: Draw) -> tuple[jax.Array, Any]:
        if self.first and self.at == len(self.made):
            self.made.append((draw, *self.drawn(draw)))
        elif self.at >= len(self.made) or self.made[self.at][0] != draw:
            raise Differ("draws other random numbers")
        self.at += 1
        return self.made[self.at - 1][1:]

    def mark(self) -> int:
        return self.at

    def rewind(self, mark: int) -> None:
        raise Differ("draws the same random numbers again")


@dataclasses.dataclass(slots=True)
class _Traced:
    """A block's trace: (number of the block, arguments, tensors of the block) -> outputs, then
    written values.
    """

    jaxpr: ClosedJaxpr
    result: Result
    read: set[tuple[str, str]]


class Loop:
    """A loop over equal blocks.

    Args:
        blocks, forwards, titles: the modules, their forwards, and their names in messages.
        leaves, spec: the arguments of the first block.
        feeds: by the place of an argument that changes from block to block, the place of the
            block's output that the next block takes.
        asked: whether the user has asked for the loop; if not, whatever a block does beside its
            result stands against it.
        again: whether the first block has run by itself before, and its outputs are in use.

    Attributes:
        operands: of ``compute``: the arguments that are tensors, at the places ``where`` of the
            leaves, then each block's tensors.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        forwards: Sequence[Callable[..., Any]],
        titles: Sequence[str],
        leaves: list[Any],
        spec: Any,
        feeds: dict[int, int],
        remat: bool | Policy,
        asked: bool = True,
        again: bool = False,
    ) -> None:
        self.again = again
        self.forwards, self.titles, self.leaves, self.spec, self.remat, self.asked = (
            forwards,
            titles,
            leaves,
            spec,
            remat,
            asked,
        )
        self.parts = [parts(block) for block in blocks]
        for title, other in zip(titles[1:], self.parts[1:], strict=True):
            if (reason := unlike(self.parts[0], other)) is not None:
                raise Differ(f"{title} differs from {titles[0]}: {reason}")
        for title, forward in zip(titles, forwards, strict=True):
            if getattr(forward, "__func__", forward) is not getattr(forwards[0], "__func__", None):
                raise Differ(f"{title} has a forward of its own")
        self.where = split_arrays(leaves)
        self.feeds = {self.where.index(k): out for k, out in feeds.items()}
        tensors = [part.tensors() for part in self.parts]
        # one tensor in all blocks
        self.shared = [all(t is row[0] for t in row) for row in zip(*tensors, strict=True)]
        self.operands = [leaves[k] for k in self.where] + [t for row in tensors for t in row]
        self.differing = [
            set[tuple[str, str]](),
            *[_attributes(self.parts[0], part) for part in self.parts[1:]],
        ]
        self.draws: Any = None
        self.rows: list[list[jax.Array]] = []  # of each draw, the numbers for each block
        self.first_key: list[int] = []

    def compute(self, values: list[Any]) -> Result:
        """Run all blocks; the Result has the values of one after the other, and its meta is (that
        of one block's outputs, their number).
        """
        count, (given, own) = (
            len(self.parts),
            (values[: len(self.where)], values[len(self.where) :]),
        )
        size = len(self.shared)
        rows = [own[k::size] for k in range(size)]
        one = self._verified(given, [row[0] for row in rows])
        number, wanted = len(one.result.values) - len(one.result.written), one.jaxpr.jaxpr
        self._check_feeds(given, one)
        if self.again and (
            one.result.written or any(of in self.feeds for of, _ in one.result.shared.values())
        ):
            raise Differ(f"{self.titles[0]} writes, or returns memory that it takes")
        targets = self._targets(one.result)
        consts = one.jaxpr.consts
        drawn = [next((d for d, row in enumerate(self.rows) if row[0] is c), None) for c in consts]
        places = list(self.feeds)

        def step(carry: list[Any], x: Any) -> tuple[list[Any], list[Any]]:
            index, own, numbers = x
            arguments, own = replaced(given, places, carry), iter(own)
            tensors = [
                row[0] if shared else next(own)
                for row, shared in zip(rows, self.shared, strict=True)
            ]
            found = [c if d is None else numbers[d] for c, d in zip(consts, drawn, strict=True)]
            outs = private_jax.inlined(wanted, found, index, *arguments, *tensors)
            return [outs[self.feeds[place]] for place in places], outs

        own = [stacked(row) for row, shared in zip(rows, self.shared, strict=True) if not shared]
        xs = (jnp.arange(count, dtype=np.int32), own, [stacked(row) for row in self.rows])
        last, every = lax.scan(
            jax.checkpoint(step, prevent_cse=False, policy=policy_of(self.remat))
            if self.remat
            else step,
            [given[p] for p in places],
            xs,
            count,
        )
        every = [unstacked(v) for v in every]
        end = {self.feeds[place]: v for place, v in zip(places, last, strict=True)}
        outs = [
            end[k] if k in end and n == count - 1 else every[k][n]
            for n in range(count)
            for k in range(number)
        ]
        result = Result(outs, (one.result.meta, number))
        for slot, index, detached in targets:
            for n in range(count):
                result.written.append((len(given) + n * size + slot, len(result.values), detached))
                result.values.append(every[index][n])
        for index, (of, views) in one.result.shared.items():
            for n in range(count):
                result.shared[n * number + index] = self._source(of, n, number, len(given)), views
        return result

    def _source(self, of: Any, n: int, number: int, given: int) -> Any:
        """What an output of block n shares memory with, in terms of all blocks, given that of the
        first block.
        """
        if isinstance(of, Output):
            return Output(n * number + of.index)
        if not isinstance(of, int):
            return of
        if of >= given:
            return of + n * len(self.shared)
        return Output((n - 1) * number + self.feeds[of]) if n and of in self.feeds else of

    def _targets(self, result: Result) -> list[tuple[int, int, bool]]:
        """(slot, index into the values, detached) of each tensor of its own
        that a block writes to.
        """
        found = []
        for target, index, detached in result.written:
            slot = target - len(self.where) if isinstance(target, int) else -1
            if slot < 0:
                raise Differ(f"{self.titles[0]} writes to a tensor that is not its own")
            if self.shared[slot]:
                raise Differ(
                    f"{self.titles[0]} writes to {self.parts[0].slots[slot][0][0]}, "
                    "which all blocks share"
                )
            found.append((slot, index, detached))
        return found

    def _check_feeds(self, given: Sequence[Any], one: _Traced) -> None:
        avals = one.jaxpr.out_avals
        for place, out in self.feeds.items():
            taken, made = jax.typeof(given[place]), avals[out]
            if (taken.shape, taken.dtype) != (made.shape, made.dtype):
                raise Differ(
                    f"{self.titles[0]} takes {taken.dtype}{list(taken.shape)} and returns "
                    f"{made.dtype}{list(made.shape)} for the next block"
                )

    # -- traces ------------------------------------------------------------------------------------
    def _verified(self, given: list[Any], own: list[Any]) -> _Traced:
        """The trace of the first block; raises Differ if a block that has another attribute that is
        read has another program.
        """
        root = state.level.root
        before = root.drawn
        if before is not None:
            self.draws = self.draws or _Draws(before)
        with having(root, drawn=before and self.draws):
            one = self._trace(0, given, own, set().union(*self.differing))
            for n, attributes in enumerate(self.differing):
                read = attributes & one.read
                # to trace each block takes longer than to compile them one by one may save
                if read and not self.asked:
                    raise Differ(
                        f"{self.titles[n]} reads an attribute that differs from {self.titles[0]}'s"
                    )
                if read and (reason := self._other(n, one, given, own)):
                    shown = ", ".join(sorted(_joined(*a) for a in read))
                    raise Differ(
                        f"{self.titles[n]} has another program than {self.titles[0]}, which reads "
                        f"{shown}: {reason}"
                    )
        if before is not None and not self.rows:
            others = [[before(draw)[0] for draw, *_ in self.draws.made] for _ in self.parts[1:]]
            self.rows = [
                [v, *[row[k] for row in others]] for k, (_, v, _) in enumerate(self.draws.made)
            ]
        return one

    def _other(self, n: int, one: _Traced, given: list[Any], own: list[Any]) -> str | None:
        """How the program of block n differs from that of the first one, whose tensors it is given
        here.
        """
        try:
            other = self._trace(n, given, own, set())
        except Differ as error:
            return f"it {error}"
        if (other.result.shared, other.result.written) != (one.result.shared, one.result.written):
            return "it writes to other tensors, or returns others"
        if not equal(other.result.meta, one.result.meta):
            return "it returns another structure, or other numbers"
        # functions among the parameters, such as rules for derivatives, are compared by what the
        # pullbacks compute
        return private_jax.difference(one.jaxpr, other.jaxpr, functions=True) or (
            private_jax.difference(_pullback(one.jaxpr), _pullback(other.jaxpr), functions=True)
        )

    def _trace(
        self, n: int, given: list[Any], own: list[Any], attributes: set[tuple[str, str]]
    ) -> _Traced:
        part, parent, results = self.parts[n], state.level, []
        draws = source(parent)

        def run(leaves: list[Any], tensors: list[torch.Tensor]) -> Any:
            args, kwargs = trees.unflatten(self.spec, leaves)
            with part.holding(tensors):
                return self.forwards[n](*args, **kwargs)

        def body(index: Any, given: list[Any], own: list[Any]) -> list[Any]:
            call = Call.of((self.leaves, part.tensors()), {})
            traceable = call.traceable(run)
            traceable.as_given(call.arrays)
            with push(
                PLAIN if self.asked else BLOCK, key=key_of_lane(parent, index, self.first_key)
            ) as level:
                level.lane, level.draws = index, draws.draws
                result = traceable.run(level, [*given, *own], take_apart)
                after.append(level.draws)
            results.append(result)
            return result.values

        after: list[int] = []
        if self.draws is not None:
            self.draws.at = 0
        quiet: contextlib.AbstractContextManager[Sequence[str]] = (
            contextlib.nullcontext(()) if self.asked else without_changes()
        )
        with _watched(part, attributes) as read, quiet as changes:
            closed = jax.make_jaxpr(body)(np.int32(0), given, own)
        if changes:
            raise Differ(f"a block changes {changes[0]}")
        if not self.asked and (closed.effects or not all(map(is_constant, results[0].meta[1]))):
            raise Differ("a block has effects, or returns an object")
        if not self.asked and _operations(closed.jaxpr) < _FEWEST_OPERATIONS:
            raise Differ("a block has few operations")
        draws.draws = max(draws.draws, *after)
        if self.draws is not None:
            self.draws.first = False
        result = results[0]
        result.values = [None] * len(result.values)  # tracers of a trace that has ended
        return _Traced(closed, result, read)


def _operations(jaxpr: Jaxpr) -> int:
    """How many operations a program has, those of programs that it calls included."""
    return len(jaxpr.eqns) + sum(map(_operations, subjaxprs(jaxpr)))


def _pullback(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The derivative of a program, in which the user's and JAX's rules of derivatives are written
    out.
    """

    def pull(*values: Any) -> Any:
        pure = lambda *xs: [
            v for v in jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs) if inexact(v)
        ]
        outs, back = jax.vjp(pure, *values)
        return [g for g in back([jnp.ones_like(v) for v in outs]) if inexact(g)]

    return jax.make_jaxpr(pull)(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals])
