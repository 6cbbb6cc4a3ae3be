"""A record in words that mean the same in another process, and the file that they name.

A record is not stored if it holds an object for which there are no such words.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bridge.lowering.registry import OVERRIDDEN
from bridge.record.entries import Begin, End, Input, Left, Number, Op, Out, Pull, Ref
from bridge.record.tensor import Aval
from bridge.transform_kinds import Kind
from bridge.xla import disk

_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        bytes,
        complex,
        type(None),
        type(Ellipsis),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)


class _Unsaid(Exception):
    pass


def _words(x: Any) -> str:
    kind = type(x)
    if kind in _PLAIN:
        return repr(x)
    if kind is Kind:
        return x.name
    if kind in (tuple, list, torch.Size):
        return f"{kind.__name__}({','.join(map(_words, x))})"
    if kind is dict:
        return "{" + ",".join(f"{_words(k)}:{_words(v)}" for k, v in x.items()) + "}"
    if kind is slice:
        return f"slice({_words(x.start)},{_words(x.stop)},{_words(x.step)})"
    if kind is Aval or x is int or x is float:
        return repr(x)
    if kind is Op:
        if x.words is None:
            x.words = (
                f"{_function(x.func)}{_words(x.args)}{_words(x.kwargs)}{x.grad}{_words(x.outs)}"
                f"{_words(x.autocast)}"
            )
        return x.words
    if kind in (Ref, Number, Out, Input, Begin, End, Pull, Left):
        return f"{kind.__name__}({','.join([_words(getattr(x, name)) for name in kind.__slots__])})"
    if isinstance(x, tuple):
        return f"{kind.__module__}.{kind.__qualname__}({','.join(map(_words, x))})"
    raise _Unsaid


@functools.lru_cache(4096)
def _function(func: Callable[..., Any]) -> str:
    owner = getattr(func, "__self__", None)
    module = getattr(func, "__module__", None) or getattr(
        getattr(func, "__objclass__", None), "__module__", ""
    )
    if not str(module or getattr(owner, "__module__", "")).startswith("torch") and not isinstance(
        owner, type(torch.Tensor.T)
    ):
        raise _Unsaid  # a user's function may change and keep its name
    return (
        f"{type(func).__name__}:{module}:{getattr(func, '__qualname__', '')}:"
        f"{getattr(owner, '__name__', '')}"
    )


def path_of(
    trace: Sequence[tuple[Any, tuple[int, ...]]], refs: Sequence[int], ambient: tuple[Any, ...]
) -> Path | None:
    """The file for the program of a record; None if that program cannot be stored."""
    where = disk.place()
    if where is None or OVERRIDDEN:
        return None
    try:
        words = "\n".join([f"{_words(what)}{numbers}" for what, numbers in trace])
        said = f"{words}|{tuple(refs)}|{_words(ambient)}|{where[1]}"
    except _Unsaid:
        return None
    return where[0] / hashlib.sha256(said.encode()).hexdigest()
