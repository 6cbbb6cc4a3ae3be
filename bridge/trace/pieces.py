"""Runs each lowering as one compiled piece, outside of compilation and of records.

Without jit, JAX differentiates and batches primitive by primitive, in Python.  A lowering of five primitives under grad then costs
five rules.  As one jitted piece, whose derivative and batched form JAX keeps, it costs one.  An operator runs uncompiled the first time
it is called with certain static arguments, so that a program that runs only once compiles nothing more.
"""
from __future__ import annotations

import contextlib
import ctypes
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridge import private
from bridge.process import process
from bridge.programs.cache_keys import Same
from bridge.trace import python_numbers, value_checks
from bridge.trace.levels import state

_LIMIT = 8192  # how many (operator, static arguments) are kept: scalars that change at every call must not fill memory
_WINDOW, _NEWEST = 16, 2  # how many shapes a function remembers, and how many of those that did not come again keep their pieces


def forget() -> None:
    """Compile every piece anew from now on, because a lowering has changed."""
    process.lowerings_changed += 1
    process.pieces.clear()
    process.no_pieces.clear()


def local_generation() -> int:
    """How many times a lowering has changed in this process."""
    return process.lowerings_changed


class Shapes:
    """The shapes of one call of a function; the pieces that were last used for them are forgotten together with them."""

    __slots__ = ("again", "released")

    def __init__(self) -> None:
        self.again = False  # whether a later call had them again soon
        self.released = False


def called(code: Any, leaves: Sequence[Any]) -> None:
    """Note an un-jitted call of a function, and forget the pieces of shapes that do not seem to come again.

    A compiled piece takes 1.5 MB.  A function whose shapes change at each call would fill the memory with pieces that are never used again.
    """
    key = tuple([(x.shape, x.dtype) for x in leaves if isinstance(x, jax.Array) or (isinstance(x, torch.Tensor) and not x.is_nested)])
    known = process.piece_calls.get(code)
    if known is None:
        known = process.piece_calls[code] = OrderedDict()
        if len(process.piece_calls) > _LIMIT:
            _release(set(process.piece_calls.popitem(last=False)[1].values()))
    found = known.get(key)
    if found is None:
        found = known[key] = Shapes()
        gone = {s for s in list(known.values())[:-_NEWEST] if not s.again and not s.released}
        if len(known) > _WINDOW:
            gone.add(known.popitem(last=False)[1])
        if gone:
            _release(gone)
    elif found is not state.shapes:
        found.again, found.released = True, False
        known.move_to_end(key)
    state.shapes = found


def _release(done: set[Shapes]) -> None:
    for shapes in done:
        shapes.released = True
    for family in list(process.pieces.values()):
        for key, piece in list(family.items()):
            if piece.shapes in done:
                family.pop(key, None)
                piece.clear()
    if next(process.releases) % 16 == 15:
        trim()


def trim() -> None:
    """Return the memory that XLA's compiler has freed to the system: glibc keeps 60 MB after 200 shapes.  It takes milliseconds."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


class NotPure(Exception):
    """Raised inside a compiled piece by an operation that must not be compiled into it, such as drawing a random key."""


class _Array:
    """Marks the place of an array among static arguments."""


def _static(x: Any, arrays: list[jax.Array]) -> Any:
    if isinstance(x, jax.Array):
        arrays.append(x)
        return _Array
    if type(x) is list or type(x) is tuple:
        return (type(x), *[_static(v, arrays) for v in x])
    return (type(x), x) if type(x) in _EXACT else (Same, Same(x))


#: Types for which equality suffices as a key; ``Same`` compares the others, numbers above all.
_EXACT = frozenset({int, bool, str, type(None), torch.dtype, torch.device, np.dtype, torch.Size, torch.layout, torch.memory_format})


def _fill(s: Any, source: Iterator[jax.Array]) -> Any:
    if s is _Array:
        return next(source)
    if s[0] is list or s[0] is tuple:
        return s[0](_fill(v, source) for v in s[1:])
    return s[1].value if s[0] is Same else s[1]


class Piece:
    """A lowering with its static arguments, as a jitted function of its arrays; ``jitted`` is None until the second call."""

    __slots__ = ("fn", "jitted", "shapes", "small")

    def __init__(self, lower: Callable[..., Any], static: tuple[Any, ...], names: tuple[str, ...]) -> None:
        """names: the names of the lowering's keyword arguments, which come last among the static arguments."""
        positional = len(static) - len(names)

        def fn(*arrays: Any) -> Any:
            source = iter(arrays)
            args = [_fill(s, source) for s in static]
            return lower(*args[:positional], **dict(zip(names, args[positional:], strict=True))) if names else lower(*args)

        self.fn = fn
        self.jitted: Any = None
        self.small = False  # whether it is a single primitive, which gains nothing from compilation under JAX's own transforms
        self.shapes: Shapes | None = None  # the shapes of the call that used it last

    def clear(self) -> None:
        """Free the compiled program; a later call of the piece compiles it again."""
        if self.jitted is not None:
            self.jitted.clear_cache()

    def __call__(self, arrays: list[jax.Array]) -> Any:
        try:
            state.compiling = True
            if self.jitted is None:
                self.jitted = value_checks.compiled(self.fn)
                self.small = bool(arrays) and len(jax.make_jaxpr(self.fn)(*arrays).eqns) <= 1
            return self.jitted(*arrays)
        finally:
            state.compiling = False


def run(func: Any, lower: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """lower(*args, **kwargs), compiled as one piece if that is possible and pays.

    func: the key of the piece: the operator, or any hashable that stands for ``lower``.
    """
    if state.level.root.staged:
        return _folded(lower, args, kwargs)
    arrays: list[Any] = []
    try:
        static = tuple([_static(x, arrays) for x in args])
        if kwargs:
            static += tuple([_static(x, arrays) for x in kwargs.values()])
        # the key includes the settings that a lowering may read while it is traced
        key = (func, static, tuple(kwargs), torch.get_default_dtype(), private.float32_precision())
        family = process.pieces.get(key)
    except TypeError:  # an unhashable argument
        return lower(*args, **kwargs)
    never = process.no_pieces.get(func)
    if never is not None and _kinds(arrays) in never:
        return lower(*args, **kwargs)
    met = family is not None
    if family is None:
        while len(process.pieces) >= _LIMIT:
            for old in process.pieces.pop(next(iter(process.pieces))).values():
                old.clear()
        family = process.pieces[key] = {}
    shapes = tuple([(a.shape, a.dtype) for a in arrays])
    piece = family.get(shapes)
    if piece is None:
        piece = family[shapes] = Piece(lower, static, tuple(kwargs))
    piece.shapes = state.shapes
    if not met:
        out = lower(*args, **kwargs)
        if not all(isinstance(x, jax.Array) for x in jax.tree_util.tree_leaves(out)):
            _bar(func, arrays)
        return out
    if piece.small and isinstance(arrays[0], jax.core.Tracer):
        return lower(*args, **kwargs)
    try:
        return piece(arrays)
    except (NotPure, jax.errors.JAXTypeError):  # the lowering looks at values or draws random numbers
        _bar(func, arrays)
        return lower(*args, **kwargs)


def _kinds(arrays: list[jax.Array]) -> tuple[Any, ...]:
    """The key of operands with which an operator cannot be a piece: indexing by a mask looks at values, indexing by integers does not."""
    return tuple([(a.dtype, a.ndim) for a in arrays])


def _bar(func: Any, arrays: list[jax.Array]) -> None:
    process.no_pieces.setdefault(func, set()).add(_kinds(arrays))


_FOLDED = 4096  # elements; XLA computes larger constants, so that the program need not hold them


def _folded(lower: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a lowering in a program to be compiled; a small computation on constants is done now (``torch.tensor(3).item()``)."""
    size = 0
    for x in args:
        if isinstance(x, jax.Array):
            if isinstance(x, jax.core.Tracer):
                return lower(*args, **kwargs)
            size += x.size
        elif python_numbers.is_input(x):
            return lower(*args, **kwargs)
        elif type(x) in (list, tuple) and x:
            if isinstance(x[0], int):
                size += math.prod(n for n in x if isinstance(n, int) and n > 0)
            elif any(isinstance(v, jax.core.Tracer) for v in x):
                return lower(*args, **kwargs)
            else:
                size += sum(v.size for v in x if isinstance(v, jax.Array))
    if size > _FOLDED or any(isinstance(v, jax.Array) or python_numbers.is_input(v) for v in kwargs.values()):
        return lower(*args, **kwargs)
    try:
        with jax.ensure_compile_time_eval():
            return lower(*args, **kwargs)
    except jax.errors.JAXTypeError:  # the lowering draws a random key, which is an input of the program
        return lower(*args, **kwargs)
