"""Runs each lowering as one compiled piece, outside of compilation and of records.

Without jit, JAX differentiates and batches primitive by primitive, in Python.  As one jitted piece, whose derivative and batched form JAX
keeps, a lowering of five primitives costs one rule instead of five.  An operator runs uncompiled the first time it is called with certain
static arguments, so that a program that runs only once compiles nothing more.
"""
from __future__ import annotations

import contextlib
import ctypes
import math
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

_MET = 8192  # how many (operator, static arguments) are remembered: scalars that change at every call must not fill memory


def forget() -> None:
    """Compile every piece anew from now on, because a lowering has changed."""
    process.lowerings_changed += 1
    process.operators_met.clear()
    process.pieces.clear()
    process.no_pieces.clear()


def trim() -> None:
    """Return the memory that XLA's compiler has freed to the system: glibc keeps 60 MB after 200 shapes.  It takes milliseconds."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


class NotPure(Exception):
    """Raised inside a compiled piece by an operation that must not be compiled into it, such as drawing a random key."""


_ARRAY = object()  # marks the place of an array among static arguments


def _static(x: Any, arrays: list[jax.Array]) -> Any:
    if isinstance(x, jax.Array):
        arrays.append(x)
        return _ARRAY
    if type(x) is list or type(x) is tuple:
        return (type(x), *[_static(v, arrays) for v in x])
    return (type(x), x) if type(x) in _EXACT else (Same, Same(x))


#: Types for which equality suffices as a key; ``Same`` compares the others, numbers above all.
_EXACT = frozenset({int, bool, str, type(None), torch.dtype, torch.device, np.dtype, torch.Size, torch.layout, torch.memory_format})


def _fill(s: Any, source: Iterator[jax.Array]) -> Any:
    if s is _ARRAY:
        return next(source)
    if s[0] is list or s[0] is tuple:
        return s[0](_fill(v, source) for v in s[1:])
    return s[1].value if s[0] is Same else s[1]


def _piece(lower: Callable[..., Any], static: tuple[Any, ...], names: tuple[str, ...], arrays: list[jax.Array]) -> tuple[Any, bool]:
    """A lowering with its static arguments as a jitted function of its arrays, and whether it is a single primitive.

    A single primitive gains nothing from compilation under JAX's own transforms.  names: the names of the lowering's keyword arguments,
    which come last among the static arguments.
    """
    positional = len(static) - len(names)

    def fn(*arrays: Any) -> Any:
        source = iter(arrays)
        args = [_fill(s, source) for s in static]
        out = lower(*args[:positional], **dict(zip(names, args[positional:], strict=True)))
        if not all(isinstance(x, jax.Array) for x in jax.tree_util.tree_leaves(out)):
            raise NotPure
        return out

    return value_checks.compiled(fn), bool(arrays) and len(jax.make_jaxpr(fn)(*arrays).eqns) <= 1


def run(func: Any, lower: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """lower(*args, **kwargs), compiled as one piece if that is possible and pays.

    func: the key of the piece: the operator, or any hashable that stands for ``lower``.
    """
    if state.level.root.staged:
        return _folded(lower, args, kwargs)
    arrays: list[Any] = []
    try:
        static = tuple([_static(x, arrays) for x in (*args, *kwargs.values())])
        # the key includes the settings that a lowering may read while it is traced
        key = (func, static, tuple(kwargs), torch.get_default_dtype(), private.float32_precision())
        met = process.operators_met.get(key)
    except TypeError:  # an unhashable argument
        return lower(*args, **kwargs)
    never = process.no_pieces.get(func)
    if never is not None and _kinds(arrays) in never:
        return lower(*args, **kwargs)
    if met is None:
        if len(process.operators_met) >= _MET:
            process.operators_met.clear()
        met = process.operators_met.setdefault(key, object())
        if not private.bits_are_compared():
            return lower(*args, **kwargs)
    shapes = (met, *[(a.shape, a.dtype) for a in arrays])
    found = process.pieces.get(shapes)
    state.compiling = True
    try:
        piece, small = found or _piece(lower, static, tuple(kwargs), arrays)
        for old, _ in process.pieces.add(shapes, (piece, small)) if found is None else ():
            old.clear_cache()
            trim()
        if not (small and isinstance(arrays[0], jax.core.Tracer)):
            return piece(*arrays)
    except (NotPure, jax.errors.JAXTypeError):  # the lowering looks at values or draws random numbers
        _bar(func, arrays)
    finally:
        state.compiling = False
    return lower(*args, **kwargs)


def _kinds(arrays: list[jax.Array]) -> tuple[Any, ...]:
    """The key of operands with which an operator cannot be a piece: indexing by a mask looks at values, indexing by integers does not."""
    return tuple([(a.dtype, a.ndim) for a in arrays])


def _bar(func: Any, arrays: list[jax.Array]) -> None:
    process.no_pieces.setdefault(func, set()).add(_kinds(arrays))


def _folded(lower: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a lowering in a program to be compiled; a small computation on constants is done now (``torch.tensor(3).item()``)."""
    operands = [v for x in (*args, *kwargs.values()) for v in (x if type(x) in (list, tuple) else (x,))]
    if any(isinstance(v, jax.core.Tracer) or python_numbers.is_input(v) for v in operands):
        return _inlined(lower, args, kwargs)
    size = sum(math.prod(n for n in x if isinstance(n, int) and n > 0) for x in args if type(x) in (list, tuple))
    if size + sum(v.size for v in operands if isinstance(v, jax.Array)) > state.folded:
        return _inlined(lower, args, kwargs)
    try:
        with jax.ensure_compile_time_eval():
            return lower(*args, **kwargs)
    except (NotPure, jax.errors.JAXTypeError):  # the lowering draws random numbers, or a key, which are inputs of the program
        return _inlined(lower, args, kwargs)


def _inlined(lower: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a lowering without JAX's inner jits: a program is traced once, and each inner jit would be a trace of its own.

    Those on empty arrays stay.  JAX drops such operands, and only the call of a jitted function still shows what PyTorch goes back to.
    """
    if any(isinstance(x, jax.Array) and not x.size for x in args):
        return lower(*args, **kwargs)
    with jax.disable_jit():
        return lower(*args, **kwargs)
