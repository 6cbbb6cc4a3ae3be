"""Running a lowering outside of compilation: as one compiled piece from the second time on.

Without jit, JAX differentiates and batches primitive by primitive, in Python.  A lowering of five primitives under grad then costs
five rules; as one jitted piece, whose derivative and batched form JAX keeps, it costs one.  The first time an operator is met
with certain static arguments it runs as it is, so that a program run once compiles nothing more.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import torch

from bridge.levels import state

_LIMIT = 8192  # remembered (operator, static arguments): scalars that change at every call must not fill memory
_seen: dict[Any, Any] = {}
_never: set[Any] = set()


class NotPure(Exception):
    """Raised inside a compiled piece by what must not be compiled into it (drawing a random key)."""


class _Local(threading.local):
    compiling = False


local = _Local()


class Unread:
    """A view nobody has read yet, as an argument: computed inside the piece that needs it instead of by one of its own."""

    __slots__ = ("read", "root", "views")

    def __init__(self, root: Any, views: tuple[Any, ...], read: Callable[[], Any]) -> None:
        self.root, self.views, self.read = root, views, read


def _read(args: Any) -> Any:
    return [x.read() if type(x) is Unread else x for x in args]


def run(func: Any, lower: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """lower(*args, **kwargs), compiled as one piece where that is possible and pays."""
    if state.level.root.staged or kwargs or func in _never:
        return lower(*_read(args), **kwargs)
    arrays: list[Any] = []
    try:
        static = tuple([_static(x, arrays) for x in args])
        # settings a lowering may read while it is traced
        key = (func, static, torch.get_default_dtype(), torch.get_float32_matmul_precision())
        piece = _seen.get(key)
    except TypeError:  # an unhashable argument
        return lower(*_read(args))
    if piece is None:
        out = lower(*_read(args))
        if all(isinstance(x, jax.Array) for x in jax.tree_util.tree_leaves(out)):
            if len(_seen) >= _LIMIT:
                _seen.clear()
            _seen[key] = False
        else:
            _never.add(func)
        return out
    if piece is False:
        piece = _seen[key] = jax.jit(_piece(lower, static))
    try:
        local.compiling = True
        return piece(*arrays)
    except (NotPure, jax.errors.JAXTypeError):  # it looks at values, or draws random numbers
        _never.add(func)
        local.compiling = False
        return lower(*_read(args))
    finally:
        local.compiling = False


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
    return (type(x), x)


def _piece(lower: Callable[..., Any], static: tuple[Any, ...]) -> Callable[..., Any]:
    def piece(*arrays: Any) -> Any:
        source = iter(arrays)
        return lower(*[_fill(s, source) for s in static])

    return piece


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
    return s[1]
