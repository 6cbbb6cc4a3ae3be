"""PyTorch's Python kernels for the device meta, by names that PyTorch does not document: they run
without dynamo and sympy.

An import of dynamo takes two seconds, one of sympy half a second, and neither has a part in what a
kernel computes of plain sizes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bridge.private import opaque


@functools.cache
def meta_without_dynamo() -> None:
    """Let the kernels run without an import of dynamo.

    PyTorch keeps torch.compile out of them with a wrapper that imports dynamo at its first call, to
    make what it calls from then on; that stands in an attribute of the function inside, which has
    the marks of ``opaque`` instead.
    """
    # a version without these names imports dynamo
    with contextlib.suppress(AttributeError, ValueError):
        wrapper = torch._disable_dynamo(lambda: None).__code__
        left = [
            *vars(torch._refs).values(),
            *itertools.chain(
                *[t.values() for t in torch._decomp.global_decomposition_table.values()]
            ),
        ]
        seen: set[int] = set()
        while left:
            function = left.pop()
            if isinstance(function, types.FunctionType) and id(function) not in seen:
                seen.add(id(function))
                inside = [cell.cell_contents for cell in function.__closure__ or ()]
                left += inside
                if function.__code__ is wrapper:
                    kernel = inside[wrapper.co_freevars.index("fn")]
                    kernel.__dict__.setdefault(
                        "__dynamo_disable",
                        opaque(kernel, "PyTorch's own kernel for the device meta"),
                    )


_SYMBOLIC, _SYMPY = "torch.fx.experimental.symbolic_shapes", "sympy"
_PLAIN = (bool, int, float)


def _equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(_equal, a, b)) if isinstance(a, tuple | list) else a == b


#: What the functions that kernels import from PyTorch's module of symbolic sizes give for plain
#: numbers.
_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            "guard_or_false",
            "guard_or_true",
            "guard_size_oblivious",
            "statically_known_true",
            "expect_true",
        ),
        bool,
    ),
    **dict.fromkeys(("guarding_hint_or_throw", "hint_int", "guard_int", "size_hint"), int),
    "sym_and": lambda *conds: all(conds),
    "sym_or": lambda *conds: any(conds),
    "sym_eq": _equal,
    "is_nested_int": lambda n: False,
    "has_guarding_hint": lambda n: True,
    "has_hint": lambda n: True,
    "free_unbacked_symbols": lambda n: set(),
    "has_free_unbacked_symbols": lambda n: False,
}


class _NoSymbol:
    """In the place of sympy.Basic, for a kernel that asks whether a number is one."""


class _StandIn(types.ModuleType):
    """In the place of a module that is not imported yet: it knows a few things of it, and imports
    it for all others.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import statement asks for __path__
            raise AttributeError(name)
        if type(sys.modules.get(self.__name__, self)) is _StandIn:
            by = sys._getframe(1).f_globals.get("__name__", "")
            if self.__name__ == _SYMPY and name == "Basic" and by.startswith("torch."):
                return _NoSymbol
            if self.__name__ == _SYMBOLIC and name in _OF_NUMBERS:
                return functools.partial(_of_numbers, name)
        return getattr(_imported(self.__name__), name)


def _of_numbers(name: str, *args: Any) -> Any:
    plain = all(
        type(x) in _PLAIN or (isinstance(x, tuple | list) and all(type(y) in _PLAIN for y in x))
        for x in args
    )
    return _OF_NUMBERS[name](*args) if plain else getattr(_imported(_SYMBOLIC), name)(*args)


def _imported(module: str) -> types.ModuleType:
    """The module itself, in the place of its stand-in."""
    _remove()
    return importlib.import_module(module)


def _remove() -> None:
    for module in (_SYMBOLIC, _SYMPY):
        if type(sys.modules.get(module)) is _StandIn:
            sys.modules.pop(module, None)


_open, _lock = [0], threading.Lock()


@contextlib.contextmanager
def of_plain_sizes() -> Iterator[None]:
    """While entered, what kernels import from sympy, and from PyTorch's module that needs it, are
    functions of plain numbers.
    """
    meta_without_dynamo()
    if _SYMBOLIC in sys.modules and not _open[0]:
        yield
        return
    with _lock:
        _open[0] += 1
        for module in (_SYMBOLIC, _SYMPY):
            sys.modules.setdefault(module, _StandIn(module))
    try:
        yield
    finally:
        with _lock:
            _open[0] -= 1
            if not _open[0]:
                _remove()
