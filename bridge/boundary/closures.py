"""Tensors captured by closure that require grad: known before the function runs, so that it runs once."""
from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import torch

from bridge.convert import tensors
from bridge.process import process
from bridge.programs import closure_scan


def code_of(fn: Any) -> Any:
    """The code object a function runs, the same for each new closure made of it; a function in C itself, else its type."""
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__wrapped__
    if isinstance(fn, types.BuiltinFunctionType):
        return fn
    return getattr(fn, "__code__", type(fn))


def _identity(fn: Any) -> Any:
    """What tells a function from others made of the same code: the objects it closes over."""
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


def known(fn: Any) -> list[torch.Tensor]:
    """Tensors that fn captures and that require grad: those it used the last time, else all that it reaches."""
    refs = process.captured.get(_identity(fn))
    if refs is None:
        code = code_of(fn)
        if isinstance(code, types.CodeType) and not process.captures.get(code, True):
            return []  # none in another closure of the same code
        found = [t for t, _ in closure_scan.scan(fn).tensors.values() if t.requires_grad and tensors.crosses(t)]
        return [t for t in found if not t._backward_hooks]  # if the tensor is not used in the end, PyTorch would call its hooks with None
    return [t for t in (r() for r in refs) if t is not None and t.requires_grad]


def remember(fn: Any, captured: list[torch.Tensor]) -> None:
    if len(process.captured) >= 4096:
        process.captured.clear()
    process.captured[_identity(fn)] = [weakref.ref(t) for t in captured]
    process.captures[code_of(fn)] = bool(captured)
