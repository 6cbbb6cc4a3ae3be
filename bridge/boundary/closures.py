"""Tensors that a function captures and that require grad; they are found before the function runs, so that it runs once."""
from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from bridge.convert import tensors
from bridge.process import process
from bridge.programs import closure_scan


def code_of(fn: Callable[..., Any]) -> Any:
    """The code object that a function runs, which all closures made from it share; a C function itself; for any other callable its type."""
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__wrapped__
    if isinstance(fn, types.BuiltinFunctionType):
        return fn
    return getattr(fn, "__code__", type(fn))


def _identity(fn: Any) -> Any:
    """A key that differs between functions made from the same code: it has the identities of the objects that they close over."""
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    if isinstance(fn, functools.partial):
        return (_identity(fn.func), *map(id, fn.args), *map(id, fn.keywords.values()))
    if isinstance(fn, types.MethodType):
        return (fn.__func__, id(fn.__self__))
    code = getattr(fn, "__code__", None)
    if code is None:
        return (type(fn), id(fn))
    try:
        return (id(code), *[id(cell.cell_contents) for cell in fn.__closure__ or ()])
    except ValueError:  # a variable not yet bound
        return id(fn)


def known(fn: Callable[..., Any]) -> list[torch.Tensor]:
    """The tensors that fn captures and that require grad: those that its last run used, and all that it reaches, used or not."""
    last = [t for t in (ref() for ref in process.captured.get(_identity(fn), ())) if t is not None and t.requires_grad]
    ids = set(map(id, last))
    found = [t for t, _ in closure_scan.scan(fn).tensors.values() if t.requires_grad and tensors.crosses(t)]
    return last + [t for t in found if id(t) not in ids]


def remember(fn: Callable[..., Any], captured: list[torch.Tensor]) -> None:
    """Note the captured tensors that require grad and that this run of fn used, for ``known``."""
    if len(process.captured) >= 4096:
        process.captured.clear()
    process.captured[_identity(fn)] = tuple(map(weakref.ref, captured))
