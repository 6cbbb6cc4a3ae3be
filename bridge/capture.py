"""What a function reaches without being given it: tensors and modules in its closure, globals, defaults, bound object.

A tensor is found together with its place (a dict or cell and the key in it), so that a compiled function can look at the place
again at each call: after ``model.weight = new`` it sees the new tensor.
"""
from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

_DEPTH = 4  # objects within objects that are looked into
_TRANSPARENT = (types.FunctionType, types.MethodType, functools.partial)  # what they hold is no deeper than they are
_SKIP = (types.ModuleType, type, str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


class Place:
    """Where a tensor was found; ``get()`` is what is there now."""

    __slots__ = ("container", "key")

    def __init__(self, container: Any, key: Any) -> None:
        self.container, self.key = container, key

    def get(self) -> Any:
        if self.key is None:
            return self.container.cell_contents if isinstance(self.container, types.CellType) else self.container
        return self.container[self.key]


class Found:
    """Tensors (by id, with their places) and modules that a function reaches."""

    def __init__(self) -> None:
        self.tensors: dict[int, tuple[torch.Tensor, Place]] = {}
        self.modules: dict[int, torch.nn.Module] = {}


def scan(*roots: Any) -> Found:
    """Everything reachable from these functions, modules and objects, to a small depth."""
    found = Found()
    seen: set[int] = set()
    for r in roots:
        _visit(r, Place(r, None), found, seen, _DEPTH)
    return found


def _visit(x: Any, place: Place, found: Found, seen: set[int], depth: int) -> None:
    if isinstance(x, torch.Tensor):
        found.tensors.setdefault(id(x), (x, place))
        return
    if isinstance(x, _SKIP) or id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, torch.nn.Module):
        _visit_module(x, found, seen, depth)
        return
    if depth == 0:
        return
    for child, where in _children(x):
        _visit(child, where, found, seen, depth if isinstance(x, _TRANSPARENT) else depth - 1)


def _visit_module(module: torch.nn.Module, found: Found, seen: set[int], depth: int) -> None:
    for m in module.modules():
        if id(m) in found.modules:
            continue
        found.modules[id(m)] = m
        seen.add(id(m))
        for store in (m._parameters, m._buffers):
            for key, t in store.items():
                if t is not None:
                    found.tensors.setdefault(id(t), (t, Place(store, key)))
        if depth:
            for key, value in m.__dict__.items():
                if not key.startswith("_") or isinstance(value, torch.Tensor):
                    _visit(value, Place(m.__dict__, key), found, seen, depth - 1)


def _children(x: Any) -> Iterator[tuple[Any, Place]]:
    if isinstance(x, types.FunctionType):
        for cell in x.__closure__ or ():
            try:
                yield cell.cell_contents, Place(cell, None)
            except ValueError:  # a variable not yet bound
                continue
        for name in _global_names(x.__code__):
            if name in x.__globals__:
                yield x.__globals__[name], Place(x.__globals__, name)
        for i, value in enumerate(x.__defaults__ or ()):
            yield value, Place(x.__defaults__, i)
        for key, value in (x.__kwdefaults__ or {}).items():
            yield value, Place(x.__kwdefaults__, key)
        if hasattr(x, "__wrapped__"):
            yield x.__wrapped__, Place(x.__dict__, "__wrapped__")
    elif isinstance(x, types.MethodType):
        yield x.__self__, Place(x.__self__, None)
        yield x.__func__, Place(x.__func__, None)
    elif isinstance(x, functools.partial):
        yield x.func, Place(x.func, None)
        for i, value in enumerate(x.args):
            yield value, Place(x.args, i)
        for key, value in x.keywords.items():
            yield value, Place(x.keywords, key)
    elif "__wrapped__" in getattr(x, "__dict__", ()):  # a jitted function: not what it has compiled
        yield x.__wrapped__, Place(x.__dict__, "__wrapped__")
    elif isinstance(x, dict):
        for key, value in x.items():
            yield value, Place(x, key)
    elif isinstance(x, list | tuple):
        for i, value in enumerate(x):
            yield value, Place(x, i)
    elif type(getattr(x, "__dict__", None)) is dict and not type(x).__module__.startswith(("torch.", "jax", "numpy")):
        for key, value in x.__dict__.items():
            yield value, Place(x.__dict__, key)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals that a function, or a function inside it, may read."""
    names = list(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names += _global_names(const)
    return tuple(dict.fromkeys(names))
