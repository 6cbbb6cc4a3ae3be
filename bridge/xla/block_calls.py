"""Runs a program with loops over equal blocks as calls of one compiled block after the other.

XLA would run such a loop on arrays that hold the parameters of all blocks: it copies them there at
each call, and out of there in each step. Here the program is cut at its loops. What lies between
them is compiled as one function each, and so is the step of a loop, which is then called once for
each block, on the block's own arrays. Compile time does not grow with the number of blocks, nothing
is copied, and memory is as in a program without loops.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from bridge import private, private_jax
from bridge.trace.stacks import stack_p, unstack_p
from bridge.xla.products import equations

#: (the number of a piece, what it takes, what it gives) with numbers of values.
_Step = tuple[int, list[int], list[int]]


def rows(jaxpr: Jaxpr) -> tuple[set[Any], list[Any]]:
    """The variables that hold a value for each block, and the loops over blocks, which take such
    values or give some that are split.
    """
    split = {e.invars[0] for e in jaxpr.eqns if e.primitive is unstack_p}
    found: set[Any] = set()
    loops = []
    for e in jaxpr.eqns:
        if e.primitive is stack_p:
            found.add(e.outvars[0])
        elif e.primitive is lax.scan_p:
            _, consts, carried = private_jax.scanned(e)
            each = e.outvars[carried:]
            if not (
                found.isdisjoint(_variables(e.invars[consts + carried :]))
                and split.isdisjoint(each)
            ):
                found.update(each)
                loops.append(e)
    return found, loops


class BlockCalls:
    """A program that is called piece by piece; it takes and gives what the program does.

    Args:
        closed: the program's jaxpr, which has loops over blocks and no effects.
        out: the tree of its results.
        compiled: makes of a function of arrays one that is compiled when it is called first,
            ``tiers.Once``.
        later: does work in a thread.

    Attributes:
        functions, pieces: what the program is cut into, as functions of arrays, and compiled.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        out: Any,
        compiled: Callable[[Callable[..., Any]], Any],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self.out, self._later = out, later
        self.numbers: dict[Any, int] = {}
        self.constants: list[tuple[int, Any]] = [
            (self._number(v), c) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        ]
        self.given = [self._number(v) for v in closed.jaxpr.invars]
        calls, outs = _cut(closed.jaxpr)
        self.functions = [*dict.fromkeys(function for function, *_ in calls)]
        self.pieces = [compiled(function) for function in self.functions]
        self.steps: list[_Step] = []
        for function, operands, results in calls:
            which = self.functions.index(function)
            self.pieces[which].compiled(*[_like(v) for v in operands])
            self.steps.append(
                (which, [self._number(v) for v in operands], [self._number(v) for v in results])
            )
        self.calls: list[Any] = []  # what the pieces call, after the first call
        #: by their numbers, the pieces that are compiled well, until a call takes them into use
        self.better: dict[int, Any] = {}
        self.results = [self._number(v) for v in outs]
        self.done = self._last_uses()

    def _number(self, v: Any) -> int:
        if isinstance(v, Literal):
            self.constants.append((len(self.numbers), np.asarray(v.val, _like(v).dtype)))
            return self.numbers.setdefault(object(), len(self.numbers))
        return self.numbers.setdefault(v, len(self.numbers))

    def _last_uses(self) -> list[list[int]]:
        """For each step, the values that nothing uses after it."""
        seen = {*self.results, *self.given, *[k for k, _ in self.constants]}
        found: list[list[int]] = []
        for _, operands, results in reversed(self.steps):
            last = {*operands, *results} - seen
            seen |= last
            found.append([*last])
        return found[::-1]

    def name(self) -> str | None:
        """A name of what it computes, the same in each process (see ``executables.name_of``)."""
        names = [piece.name for piece in self.pieces]
        keys = [x for _, x in self.constants if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)]
        if None in names or keys:
            return None
        arrays = [(k, np.asarray(x)) for k, x in self.constants]
        constants = [(k, x.dtype, x.shape, x.tobytes()) for k, x in arrays]
        said = names, self.steps, self.given, self.results, self.out, constants
        return hashlib.sha256(repr(said).encode()).hexdigest()

    @property
    def repeated(self) -> float:
        """How often a piece is called, on average."""
        return len(self.steps) / len(self.pieces)

    def in_one(self, *args: Any) -> Any:
        """The same as one function, with the blocks one after the other."""
        return self._run(self.functions, args)

    def __call__(self, *args: Any) -> Any:
        if not self.calls:
            found = self._run(self.pieces, args)
            self._use(self.pieces)
            self._later(self._improve)
            return found
        if self.better and not private.bits_are_compared():
            self._use([self.better.pop(k, piece) for k, piece in enumerate(self.pieces)])
        return self._run(self.calls, args)

    def _use(self, pieces: list[Any]) -> None:
        self.pieces = pieces
        self.calls = [private_jax.without_wrapper(piece.executable) for piece in pieces]

    def _improve(self) -> None:
        """Compile the pieces well: first those that are called most often."""
        often = collections.Counter(which for which, *_ in self.steps)
        for which, _ in often.most_common():
            if self.pieces[which].fast:
                self.better[which] = self.pieces[which].well()

    def _run(self, calls: Sequence[Callable[..., Any]], args: tuple[Any, ...]) -> Any:
        values: list[Any] = [None] * len(self.numbers)
        for k, value in self.constants:
            values[k] = value
        for k, value in zip(self.given, jax.tree.leaves(args), strict=True):
            values[k] = value
        for (which, operands, results), done in zip(self.steps, self.done, strict=True):
            for k, value in zip(results, calls[which](*[values[k] for k in operands]), strict=True):
                values[k] = value
            for k in done:
                values[k] = None
        return jax.tree.unflatten(self.out, [values[k] for k in self.results])


def _cut(jaxpr: Jaxpr) -> tuple[list[tuple[Callable[..., Any], list[Any], list[Any]]], list[Any]]:
    """The program as (function, its operands, the variables for its results), one after the other,
    and the variables of its results.
    """
    loops = set(map(id, rows(jaxpr)[1]))
    # by a variable that holds a value for each block: the variables, or constants, of these values
    parts: dict[Any, list[Any]] = {}
    same: dict[Any, Any] = {}
    # by such a variable, one that holds them all, for equations that take it
    whole: dict[Any, Any] = {}
    pending: list[Any] = []  # equations since the last loop
    found: list[Any] = []

    def all_of(v: Any) -> Any:
        """The variable by which an equation takes a value."""
        if isinstance(v, Literal) or v not in parts:
            return v if isinstance(v, Literal) else same.get(v, v)
        if v not in whole:
            whole[v] = Var(v.aval)
            pending.extend(equations(lambda *xs: stack_p.bind(*xs), parts[v], [whole[v]]))
        return whole[v]

    def each_of(v: Any) -> list[Any]:
        """The variables of the parts of a value."""
        if v not in parts:
            found = [Var(v.aval.update(shape=v.aval.shape[1:])) for _ in range(v.aval.shape[0])]
            pending.extend(equations(unstack_p.bind, [all_of(v)], found))
            return found
        return parts[v]

    used = {v for e in jaxpr.eqns for v in _variables(e.invars)} | set(_variables(jaxpr.outvars))
    for e in jaxpr.eqns:
        if e.primitive is stack_p:
            parts[e.outvars[0]] = [all_of(v) for v in e.invars]
        elif e.primitive is unstack_p and e.invars[0] in parts:
            same.update(zip(e.outvars, parts[e.invars[0]], strict=True))
        elif id(e) in loops:
            step, consts, carried = private_jax.scanned(e)
            kept = [True] * carried + [v in used for v in e.outvars[carried:]]
            step, taken = _needed(step, kept)
            fixed, carry = (
                [all_of(v) for v in e.invars[:consts]],
                [all_of(v) for v in e.invars[consts : consts + carried]],
            )
            every = [
                each_of(v) if take else []
                for v, take in zip(
                    e.invars[consts + carried :], taken[consts + carried :], strict=True
                )
            ]
            if pending:
                found.append(pending)
                pending = []
            length = e.params["length"]
            ys: list[list[Any]] = [[None] * length for _ in e.outvars[carried:]]
            body = _Body(step, getattr(e.params["jaxpr"], "consts", ()))
            for n in reversed(range(length)) if e.params["reverse"] else range(length):
                operands = [*fixed, *carry, *[each[n] if each else None for each in every]]
                made = iter(
                    body.called(found, [v for v, take in zip(operands, taken, strict=True) if take])
                )
                results = [next(made) if keep else None for keep in kept]
                carry = results[:carried]
                for each, v in zip(ys, results[carried:], strict=True):
                    each[n] = v
            same.update(zip(e.outvars[:carried], carry, strict=True))
            parts.update(zip(e.outvars[carried:], ys, strict=True))
        else:
            pending.append(e.replace(invars=[all_of(v) for v in e.invars]))
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    outs: list[Any] = []
    for v in jaxpr.outvars:
        out = all_of(v)
        # no two results, and no argument, share memory
        if isinstance(out, Literal) or ((out in inputs or out in outs) and out is not v):
            copy = Var(v.aval)
            pending.extend(equations(lambda x: lax.copy_p.bind(x), [out], [copy]))
            out = copy
        outs.append(out)
    return list(_functions(found + ([pending] if pending else []), outs, jaxpr)), outs


def _functions(
    cut: Sequence[Any], outs: Sequence[Any], jaxpr: Jaxpr
) -> Iterator[tuple[Callable[..., Any], list[Any], list[Any]]]:
    """The calls of loops as they are, and each list of equations as a function."""
    needed = {v for v in outs if isinstance(v, Var)}
    after: list[set[Any]] = []  # for each, what is used after it
    for what in reversed(cut):
        after.append(set(needed))
        needed.update(v for e in what for v in _variables(e.invars)) if isinstance(
            what, list
        ) else needed.update(_variables(what[1]))
    for what, later in zip(cut, after[::-1], strict=True):
        if not isinstance(what, list):
            yield what
            continue
        made = dict.fromkeys(v for e in what for v in e.outvars)
        operands = dict.fromkeys(v for e in what for v in _variables(e.invars) if v not in made)
        results = [v for v in made if v in later]
        if results:
            yield _evaluating(_small(jaxpr, [*operands], results, what), ()), [*operands], results


class _Body:
    """The step of a loop as a function; what it gives as it takes it is not computed."""

    def __init__(self, step: Jaxpr, consts: Sequence[Any]) -> None:
        places = {v: k for k, v in enumerate(step.invars)}
        # None: it is computed
        self.outs = [v if isinstance(v, Literal) else places.get(v) for v in step.outvars]
        self.computed = [
            v for v, place in zip(step.outvars, self.outs, strict=True) if place is None
        ]
        self.function = _evaluating(
            _small(step, step.invars, self.computed, step.eqns, step.constvars), consts
        )

    def called(self, calls: list[Any], operands: list[Any]) -> list[Any]:
        """The variables of the results of one more step."""
        fresh = [Var(v.aval) for v in self.computed]
        if fresh:
            calls.append((self.function, operands, fresh))
        made = iter(fresh)
        return [
            next(made) if out is None else operands[out] if isinstance(out, int) else out
            for out in self.outs
        ]


def _needed(step: Jaxpr, kept: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """The step with only these results, and which of its operands it then takes."""
    outs = list(itertools.compress(step.outvars, kept))
    needed, eqns = set(_variables(outs)), []
    for e in reversed(step.eqns):
        if e.effects or not needed.isdisjoint(e.outvars):
            needed.update(_variables(e.invars))
            eqns.append(e)
    taken = [v in needed for v in step.invars]
    return _small(
        step, list(itertools.compress(step.invars, taken)), outs, eqns[::-1], step.constvars
    ), taken


def _small(
    jaxpr: Jaxpr,
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[Any],
    constvars: Sequence[Any] = (),
) -> Jaxpr:
    return jaxpr.replace(
        constvars=list(constvars),
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _evaluating(jaxpr: Jaxpr, consts: Sequence[Any]) -> Callable[..., list[Any]]:
    return lambda *operands: private_jax.inlined(jaxpr, consts, *operands)


def _like(v: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]
