"""Running lowerings outside of compilation: each as one compiled piece, differentiated by a tape and mapped by lanes where that is enough.

Without jit, JAX differentiates and batches primitive by primitive, in Python.  A lowering of five primitives under grad then costs
five rules; as one jitted piece, whose derivative and batched form JAX keeps, it costs one.  The first time an operator is met
with certain static arguments it runs as it is, so that a program run once compiles nothing more.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge import checks, compiling, private
from bridge.keys import Same
from bridge.levels import state
from bridge.python_numbers import is_input

_LIMIT = 8192  # remembered (operator, static arguments): scalars that change at every call must not fill memory
_WINDOW, _NEWEST = 16, 2  # calls with other shapes in which shapes are expected to come again, and how many are kept of those that do not
_seen: dict[Any, dict[Any, Piece]] = {}  # by operator and static arguments, then by shapes
_calls: OrderedDict[Any, OrderedDict[Any, Shapes]] = OrderedDict()  # by the code of the function, the oldest first
_never: dict[Any, set[Any]] = {}


def forget() -> None:
    """Compile every piece anew from now on: a lowering has changed."""
    global _generation
    _generation += 1
    _seen.clear()
    _never.clear()


_generation = 0


def local_generation() -> int:
    """How often a lowering has changed in this process."""
    return _generation


class Shapes:
    """The shapes of one call of a function; when they are forgotten, so are the pieces that were last used for them."""

    __slots__ = ("again", "released")

    def __init__(self) -> None:
        self.again = False  # they came again soon
        self.released = False


def called(code: Any, leaves: Sequence[Any]) -> None:
    """Note an un-jitted call of a function, and forget the pieces compiled for shapes that seem to be over.

    A compiled piece takes a megabyte and a half.  A function whose shapes change at each call would fill the memory with pieces that are
    never used again.
    """
    key = tuple([(x.shape, x.dtype) for x in leaves if isinstance(x, jax.Array) or (isinstance(x, torch.Tensor) and not x.is_nested)])
    known = _calls.get(code)
    if known is None:
        known = _calls[code] = OrderedDict()
        if len(_calls) > _LIMIT:
            _release(set(_calls.popitem(last=False)[1].values()))
    found = known.get(key)
    if found is None:
        found = known[key] = Shapes()
        gone = {s for s in list(known.values())[:-_NEWEST] if not s.again and not s.released}
        if len(known) > _WINDOW:
            gone.add(known.popitem(last=False)[1])
        if gone:
            _release(gone)
    elif found is not local.shapes:
        found.again, found.released = True, False
        known.move_to_end(key)
    local.shapes = found


def _release(done: set[Shapes]) -> None:
    for shapes in done:
        shapes.released = True
    for family in list(_seen.values()):
        for key, piece in list(family.items()):
            if piece.shapes in done:
                family.pop(key, None)
                piece.clear()
    for jitted in (_copies, _added, _zeros, _lane_first, place_lanes):
        jitted.clear_cache()  # type: ignore[attr-defined]
    if next(_releases) % 16 == 15:
        _trim()


_releases = itertools.count()


def _trim() -> None:
    """Give back to the system what XLA's compiler has freed: glibc keeps 60 MB of it after 200 shapes.  Takes some milliseconds."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class NotPure(Exception):
    """Raised inside a compiled piece by what must not be compiled into it (drawing a random key)."""


class _Local(threading.local):
    compiling = False
    shapes: Shapes | None = None


local = _Local()


class Unread:
    """A view nobody has read yet, as an argument: computed inside the piece that needs it instead of by one of its own."""

    __slots__ = ("read", "root", "views")

    def __init__(self, root: Any, views: tuple[Any, ...], read: Callable[[], Any]) -> None:
        self.root, self.views, self.read = root, views, read


class _Array:
    """Marks the place of an array among static arguments."""


def _static(x: Any, arrays: list[Any]) -> Any:
    if isinstance(x, jax.Array):
        arrays.append(x)
        return _Array
    if type(x) is list or type(x) is tuple:
        return (type(x), *[_static(v, arrays) for v in x])
    if type(x) is Unread:
        arrays.append(x.root)
        return (Unread, x.views)
    return (type(x), x) if type(x) in _EXACT else (Same, Same(x))


#: Types for which equality suffices as a key; ``Same`` compares the others, numbers above all.
_EXACT = frozenset({int, bool, str, type(None), torch.dtype, torch.device, np.dtype, torch.Size, torch.layout, torch.memory_format})


def _fill(s: Any, source: Any) -> Any:
    if s is _Array:
        return next(source)
    if s[0] is list or s[0] is tuple:
        return s[0](_fill(v, source) for v in s[1:])
    if s[0] is Unread:
        value = next(source)
        for view in s[1]:
            value = view.lowering(value, *view.args)
        return value
    return s[1].value if s[0] is Same else s[1]


class Piece:
    """A lowering with its static arguments, as a jitted function of its arrays; ``jitted`` is None until it was met twice."""

    __slots__ = ("backs", "fn", "jitted", "key", "mapped", "shapes", "small", "wide")

    def __init__(self, key: Any, fn: Callable[..., Any]) -> None:
        self.key, self.fn = key, fn
        self.jitted: Any = None
        self.small = False  # a single primitive: nothing is won by compiling it under JAX's own transforms
        self.backs: dict[Any, Any] = {}
        self.mapped: dict[Any, Any] = {}
        self.wide: dict[Any, Piece] = {}
        self.shapes: Shapes | None = None  # of the call that used it last

    def clear(self) -> None:
        """Free what was compiled; a later call of the piece compiles it again."""
        for jitted in (self.jitted, *self.backs.values(), *self.mapped.values()):
            if jitted is not None:
                jitted.clear_cache()
        for piece in self.wide.values():
            piece.clear()

    @classmethod
    def of(cls, key: Any, lower: Callable[..., Any], static: tuple[Any, ...], names: tuple[str, ...]) -> Piece:
        """A lowering with these static arguments; names: those of its keyword arguments, the last ones."""
        positional = len(static) - len(names)

        def fn(*arrays: Any) -> Any:
            source = iter(arrays)
            args = [_fill(s, source) for s in static]
            return lower(*args[:positional], **dict(zip(names, args[positional:], strict=True))) if names else lower(*args)

        return cls(key, fn)

    def across(self, axes: tuple[int | None, ...]) -> Piece:
        """The piece for all lanes at once as a piece of its own, for a tape outside of the lanes."""
        found = self.wide.get(axes)
        if found is None:
            found = self.wide[axes] = Piece((self.key, axes), jax.vmap(self.fn, in_axes=axes))
        return found

    def over_lanes(self, arrays: list[Any], axes: tuple[int | None, ...]) -> Any:
        """The piece for all lanes at once; axes: 0 for the arrays that have a value for each lane."""
        run = self.mapped.get(axes)
        if run is None:
            run = self.mapped[axes] = checks.compiled(jax.vmap(self.fn, in_axes=axes))
        try:
            local.compiling = True
            return run(*arrays)
        finally:
            local.compiling = False

    def compile(self, arrays: list[Any]) -> None:
        self.jitted = checks.compiled(self.fn)
        self.small = bool(arrays) and len(jax.make_jaxpr(self.fn)(*arrays).eqns) <= 1

    def __call__(self, arrays: list[Any]) -> Any:
        try:
            local.compiling = True
            if self.jitted is None:
                self.compile(arrays)
            return self.jitted(*arrays)
        finally:
            local.compiling = False

    def back(self, arrays: list[Any], wanted: tuple[bool, ...], cotangents: list[Any], lanes: Lanes | None = None) -> list[Any]:
        """Cotangents of the wanted arrays; a cotangent is None where nothing depends on that output."""
        given = tuple(c is not None for c in cotangents)
        cotangents = [c for c in cotangents if c is not None]
        axes = None if lanes is None else (tuple(lanes.axes(arrays)), tuple(lanes.axes(cotangents)))
        mapped = axes is not None and 0 in axes[0] + axes[1]
        run = self.backs.get((wanted, given, axes if mapped else None))
        if run is None:
            pullback = self._pullback(wanted, given)
            pullback = jax.vmap(pullback, [list(a) for a in axes]) if mapped else pullback
            run = self.backs[wanted, given, axes if mapped else None] = jax.jit(pullback)
        grads = run(arrays, cotangents)
        return [lanes.add(g) for g in grads] if mapped else grads

    def _pullback(self, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> Callable[..., Any]:
        def run(arrays: list[Any], cotangents: list[Any]) -> list[Any]:
            def of_wanted(*active: Any) -> list[Any]:
                source = iter(active)
                out = self.fn(*[next(source) if w else a for a, w in zip(arrays, wanted, strict=True)])
                return [o for o, g in zip(jax.tree_util.tree_leaves(out), given, strict=True) if g]

            _, pull = jax.vjp(of_wanted, *[a for a, w in zip(arrays, wanted, strict=True) if w])
            return list(pull(cotangents))

        return run


def run(func: Any, lower: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """lower(*args, **kwargs), compiled as one piece where that is possible and pays.

    func: what the piece is known by: the operator, or any hashable that stands for ``lower``.
    """
    level = state.level
    if level.root.staged:
        return _folded(lower, _read(args), kwargs)
    tape, lanes = level.tape, level.lanes
    arrays: list[Any] = []
    try:
        static = tuple([_static(x, arrays) for x in args])
        if kwargs:
            static += tuple([_static(x, arrays) for x in kwargs.values()])
        # settings a lowering may read while it is traced
        key = (func, static, tuple(kwargs), torch.get_default_dtype(), private.float32_precision())
        family = _seen.get(key)
    except TypeError:  # an unhashable argument
        return _direct(lower, args, kwargs, tape, arrays)
    never = _never.get(func)
    if never is not None and _kinds(arrays) in never:
        return _direct(lower, args, kwargs, tape, arrays)
    met = family is not None
    if family is None:
        while len(_seen) >= _LIMIT:
            for old in _seen.pop(next(iter(_seen))).values():
                old.clear()
        family = _seen[key] = {}
    shapes = tuple([(a.shape, a.dtype) for a in arrays])
    piece = family.get(shapes)
    if piece is None:
        piece = family[shapes] = Piece.of(key, lower, static, tuple(kwargs))
    piece.shapes = local.shapes
    recording = level.root.recording
    recorded = recording is not None and recording.tracks(arrays)
    tracked = recorded or (tape is not None and tape.tracks(arrays))
    if lanes is not None and lanes.tracks(arrays):
        out = lanes.run(piece, func, arrays)
        if recorded:
            recording.record(piece.across(tuple(lanes.axes(arrays))), arrays, out)
        elif tracked:
            tape.record(piece, arrays, out)
        return out
    if not (met or tracked):
        out = lower(*_read(args), **kwargs)
        if not all(isinstance(x, jax.Array) for x in jax.tree_util.tree_leaves(out)):
            _bar(func, arrays)
        return out
    if piece.small and not tracked and isinstance(arrays[0], jax.core.Tracer):
        return lower(*_read(args), **kwargs)
    try:
        out = piece(arrays)
    except (NotPure, jax.errors.JAXTypeError):  # it looks at values, or draws random numbers
        _bar(func, arrays)
        return _direct(lower, args, kwargs, tape, arrays)
    if tracked:
        (recording if recorded else tape).record(piece, arrays, out)
    return out


def _kinds(arrays: list[Any]) -> tuple[Any, ...]:
    """The key of operands for which an operator cannot be a piece: indexing by a mask looks at values, indexing by integers does not."""
    return tuple([(a.dtype, a.ndim) for a in arrays])


def _bar(func: Any, arrays: list[Any]) -> None:
    _never.setdefault(func, set()).add(_kinds(arrays))


_FOLDED = 4096  # elements; larger constants are left to XLA rather than held in the program


def _folded(lower: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """In a program to be compiled: a small computation on constants is done now: its values are known (``torch.tensor(3).item()``)."""
    size = 0
    for x in args:
        if isinstance(x, jax.Array):
            if isinstance(x, jax.core.Tracer):
                return lower(*args, **kwargs)
            size += x.size
        elif is_input(x):
            return lower(*args, **kwargs)
        elif type(x) in (list, tuple) and x:
            if isinstance(x[0], int):
                size += math.prod(n for n in x if isinstance(n, int) and n > 0)
            elif any(isinstance(v, jax.core.Tracer) for v in x):
                return lower(*args, **kwargs)
            else:
                size += sum(v.size for v in x if isinstance(v, jax.Array))
    if size > _FOLDED or any(isinstance(v, jax.Array) or is_input(v) for v in kwargs.values()):
        return lower(*args, **kwargs)
    try:
        with jax.ensure_compile_time_eval():
            return lower(*args, **kwargs)
    except jax.errors.JAXTypeError:  # a random key is an input of the program
        return lower(*args, **kwargs)


def _read(args: Any) -> Any:
    return [x.read() if type(x) is Unread else x for x in args]


def _direct(lower: Callable[..., Any], args: Any, kwargs: dict[str, Any], tape: Tape | None, arrays: list[Any]) -> Any:
    if state.level.lanes is not None:
        raise Untaped
    tape = tape or state.level.root.recording
    if tape is not None:
        found = arrays or [x for x in jax.tree_util.tree_leaves((list(_read(args)), kwargs)) if isinstance(x, jax.Array)]
        if tape.tracks(found):
            raise Untaped
    return lower(*_read(args), **kwargs)


# -- the tape -------------------------------------------------------------------------------------------------------------------------
class Untaped(BaseException):
    """Something happens that the tape cannot follow; the transform starts again with JAX's own differentiation."""


class Tape:
    """Pieces run since the tape was opened that depend on its inputs, by the identity of the arrays.

    Inside a vmap by lanes, what the lanes know is recorded, and pulled back, for all of them at once.
    """

    __slots__ = ("entries", "known")

    def __init__(self) -> None:
        self.entries: list[tuple[Piece, list[Any], list[Any]]] = []
        self.known: dict[int, Any] = {}  # the array too: its id must not be given to another

    def inputs(self, values: list[Any], lanes: Lanes | None = None) -> list[Any]:
        """The values as arrays of their own, so that the same array elsewhere is not taken for an input."""
        own = _copies(list(values))
        for v, original in zip(own, values, strict=True):
            self.known[id(v)] = like(lanes, v, original)
        return own

    def tracks(self, arrays: list[Any]) -> bool:
        known = self.known
        return any(id(a) in known for a in arrays)

    def record(self, piece: Piece, arrays: list[Any], out: Any) -> None:
        outs = jax.tree_util.tree_leaves(out)
        self.entries.append((piece, arrays, outs))
        for o in outs:
            if jnp.issubdtype(o.dtype, jnp.inexact):
                self.known[id(o)] = o

    def pull(self, inputs: list[Any], outputs: list[Any], cotangents: list[Any], lanes: Lanes | None) -> list[Any]:
        """Cotangents of the tape's inputs from those of some arrays on it; lanes know which of all these have a value for each lane."""
        found: dict[int, Any] = {}

        def add(key: int, value: Any) -> None:
            have = found.get(key)
            # lanes come first: a value that all of them share broadcasts to them
            found[key] = value if have is None else like(lanes, _added(have, value), have, value)

        for o, c in zip(outputs, cotangents, strict=True):
            if id(o) in self.known and c is not None:
                add(id(o), c)
        for piece, arrays, outs in reversed(self.entries):
            cts = [found.pop(id(o), None) for o in outs]
            if all(c is None for c in cts):
                continue
            wanted = tuple(id(a) in self.known for a in arrays)
            grads = iter(piece.back(arrays, wanted, cts, lanes))
            for a, w in zip(arrays, wanted, strict=True):
                if w:
                    add(id(a), next(grads))
        return [found[id(v)] if id(v) in found else like(lanes, _nothing(v), v) for v in inputs]


class Pull:
    """The pullback of a tape: cotangents of its outputs to cotangents of its inputs."""

    __slots__ = ("__weakref__", "inputs", "outputs", "tape")

    def __init__(self, tape: Tape, inputs: list[Any], outputs: list[Any]) -> None:
        self.tape, self.inputs, self.outputs = tape, inputs, outputs

    def __call__(self, cotangents: list[Any]) -> tuple[Any, ...]:
        lanes = None if state.level is None else state.level.lanes
        with jax.enable_x64(True), compiling.correctly():
            return tuple(self.tape.pull(self.inputs, self.outputs, cotangents, lanes))

    def arrays(self) -> list[Any]:
        """What it holds: everything the computation read, and its inputs."""
        return [*self.inputs, *(a for _, arrays, _ in self.tape.entries for a in arrays)]

    def reached(self, given: Sequence[bool]) -> list[bool]:
        """Which inputs those outputs depend on that are given."""
        found = {id(o) for o, wanted in zip(self.outputs, given, strict=True) if wanted}
        for _, arrays, outs in reversed(self.tape.entries):
            if not found.isdisjoint(map(id, outs)):
                found.update(map(id, arrays))
        return [id(v) in found for v in self.inputs]

    def rows(self, k: int, cotangents: Any) -> tuple[Any, ...]:
        """For output k alone, with several cotangents along the first dimension: as many cotangents of each input."""
        lanes = Lanes()
        given = [lanes.add(cotangents) if i == k else None for i in range(len(self.outputs))]
        grads = self.tape.pull(self.inputs, self.outputs, given, lanes)
        n = cotangents.shape[0]
        return tuple(g if lanes.tracks([g]) else jnp.broadcast_to(g, (n, *g.shape)) for g in grads)


# our own functions and not jax.numpy's: the cache of these can be cleared


@jax.jit
def _added(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.add(a, b)


def _nothing(v: jax.Array) -> jax.Array:
    """Zeros like v, which may be a tracer of a transform that has returned: its shape is still good."""
    return jnp.zeros(v.shape, v.dtype) if isinstance(v, jax.core.Tracer) else _zeros(v)


@jax.jit
def _zeros(like_it: jax.Array) -> jax.Array:
    return jnp.zeros(like_it.shape, like_it.dtype)


@jax.jit
def _copies(values: list[Any]) -> list[Any]:
    return [jnp.copy(v) for v in values]


_untapeable: set[Any] = set()  # code of functions the tape could not follow: next time JAX differentiates them at once


def vjp(body: Callable[..., Any], *primals: Any, code: Any = None) -> tuple[Any, Callable[..., Any], Any]:
    """``jax.vjp(body, *primals, has_aux=True)``; outside of compilation and of other transforms by a tape of compiled pieces."""
    level = nearest = state.level
    if level is not None and level.lanes is not None:
        return _vjp_in_lanes(body, primals, level)
    while level is not None and level.kind == "plain":
        level = level.parent
    if level is None or level.kind != "root" or level.staged or code in _untapeable:
        return jax.vjp(body, *primals, has_aux=True)
    tape = Tape()
    draws, key = level.draws, level.key
    try:
        nearest.next_tape = tape  # for the level that body enters
        inputs = tape.inputs(list(primals))
        outs, aux = body(*inputs)
    except Untaped:
        _untapeable.add(code)
        level.draws, level.key = draws, key
        nearest.next_tape = None
        return jax.vjp(body, *primals, has_aux=True)
    finally:
        nearest.next_tape = None
    return outs, Pull(tape, inputs, outs), aux


def recorded(body: Callable[..., Any], primals: list[Any], code: Any) -> tuple[Any, Any, Any]:
    """The same for torch's autograd, of a whole computation at the border; code None: not by a tape."""
    root = state.level
    if code is not None and code not in _untapeable:
        tape = Tape()
        draws, key = root.draws, root.key
        try:
            root.recording = tape
            inputs = tape.inputs(primals)
            outs, aux = body(*inputs)
            return outs, Pull(tape, inputs, outs), aux
        except Untaped:
            _untapeable.add(code)
            root.draws, root.key = draws, key
        finally:
            root.recording = None
    return jax.vjp(body, *primals, has_aux=True)


def _vjp_in_lanes(body: Callable[..., Any], primals: tuple[Any, ...], level: Any) -> tuple[Any, Callable[..., Any], Any]:
    """The same inside a vmap by lanes; what the tape cannot follow, the vmap starts again."""
    if level.tape is not None or level.root.recording is not None:
        raise Untaped
    tape = level.next_tape = Tape()
    try:
        inputs = tape.inputs(list(primals), level.lanes)
        outs, aux = body(*inputs)
    finally:
        level.next_tape = None
    if not all(jnp.issubdtype(v.dtype, jnp.floating) for v in (*primals, *outs)):
        raise Untaped  # conjugates and zeros are taken outside, where lanes are not known
    return outs, Pull(tape, inputs, outs), aux


# -- lanes ----------------------------------------------------------------------------------------------------------------------------
class Lanes:
    """Under a vmap outside of compilation: the arrays that have a value for each lane (along their first dimension), by identity."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def add(self, value: Any) -> Any:
        self.known[id(value)] = value
        return value

    def tracks(self, arrays: Any) -> bool:
        known = self.known
        return any(id(a) in known for a in arrays)

    def axes(self, arrays: list[Any]) -> list[int | None]:
        """0 for each array that has a value for each lane."""
        known = self.known
        return [0 if id(a) in known else None for a in arrays]

    def run(self, piece: Piece, func: Any, arrays: list[Any]) -> Any:
        known = self.known
        try:
            out = piece.over_lanes(arrays, tuple(self.axes(arrays)))
        except (NotPure, jax.errors.JAXTypeError):
            _bar(func, arrays)
            raise Untaped from None
        if isinstance(out, jax.Array):
            known[id(out)] = out
        else:
            for o in jax.tree_util.tree_leaves(out):
                known[id(o)] = o
        return out


def like(lanes: Lanes | None, value: Any, *others: Any) -> Any:
    """value, which has a value for each lane if one of the others has."""
    return lanes.add(value) if lanes is not None and lanes.tracks(others) else value


def vmap(
    body: Callable[..., Any], values: list[Any], in_axes: list[int | None], size: int, code: Any
) -> tuple[list[Any], list[Any]] | None:
    """A vmap by lanes: (values, axes), an axis being None where all lanes share a value; None where JAX's own vmap must do it.

    body takes one value per lane argument, in a level of its own that it tells which of them are mapped.
    """
    level = state.level
    if level.kind != "root" or level.staged or level.tape is not None or code in _untapeable or not size:
        return None
    if any(isinstance(v, jax.core.Tracer) for v in values):
        return None
    lanes = Lanes()
    draws, key = level.draws, level.key
    moved = [v if a is None else lanes.add(run("lanes first", _lane_first, (v, a), {})) for v, a in zip(values, in_axes, strict=True)]
    try:
        outs = body(lanes, *moved)
    except Untaped:
        _untapeable.add(code)
        if level.recording is not None:
            raise
        level.draws, level.key = draws, key
        return None
    return outs, [0 if id(o) in lanes.known else None for o in outs]


@functools.partial(jax.jit, static_argnums=1)
def _lane_first(value: Any, axis: int) -> Any:
    return jnp.copy(jnp.moveaxis(value, axis, 0))  # an array of its own: the same one may also be met as a captured tensor


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def place_lanes(value: Any, axis: int | None, out_axis: int, size: int) -> Any:
    """A lane-first or shared value as an output of a vmap: lanes along out_axis."""
    if axis is None:
        value = jnp.broadcast_to(value, (size, *value.shape))
    return jnp.moveaxis(value, 0, out_axis)


def copied(value: Any, lanes: Lanes | None) -> Any:
    """value as a new array that no tape knows: what detach gives where nothing but the tape differentiates."""
    return like(lanes, _copies([value])[0], value)
