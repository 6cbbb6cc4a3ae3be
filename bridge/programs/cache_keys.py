"""Keys for what has been compiled: two values have one key only if no program can tell them apart.

Python's own equality is not enough for that: ``0.0 == -0.0`` and ``1 == True == 1.0`` hold, and NaN is not equal to itself.
"""
from __future__ import annotations

import dataclasses
import decimal
import functools
import struct
import types
import weakref
from typing import Any

import numpy as np

_bits = struct.Struct("d").pack
#: Types whose equality is identity of content.
_EXACT = frozenset({int, bool, str, bytes, type(None)})


def identical(x: Any) -> Any:
    """A hashable key of a value; equal for two values only if they have one type and the same content, bit by bit.

    What is compared by its identity (modules, functions, most objects) is referred to weakly: a key keeps no such object alive.

    Args:
        x: a hashable value.

    Returns:
        a hashable object.

    Raises:
        TypeError: x is not hashable.

    Example:
        >>> from bridge.programs.cache_keys import identical
        >>> identical(0.0) == identical(-0.0), identical((1, 2)) == identical((True, 2)), identical(float("nan")) == identical(float("nan"))
        (False, False, True)
    """
    kind = type(x)
    if kind is float:
        return (float, _bits(x))
    if kind in _EXACT:
        return (kind, x)
    return (kind, *_rule(kind)(x))  # type: ignore[arg-type]  # a class is hashable


@functools.lru_cache(1024)
def _rule(kind: type) -> Any:
    return next((rule for base, rule in _RULES.items() if issubclass(kind, base)), _other)


def _tuple(x: tuple[Any, ...]) -> Any:
    return map(identical, x)


def _other(x: Any) -> Any:
    hash(x)  # raises where it must
    params = getattr(type(x), "__dataclass_params__", None)
    if params is not None and params.eq and params.frozen:
        return [identical(getattr(x, f.name)) for f in dataclasses.fields(x) if f.compare]
    return (weak(x),)


def weak(x: Any) -> Any:
    """x itself, or a weak reference to it if it is compared by identity and can be referred to so."""
    if not by_identity(x):
        return x
    try:
        return weakref.ref(x)
    except TypeError:
        return x


def by_identity(x: Any) -> bool:
    """Whether x equals nothing but itself, and is no function or class of a module, which live as long as the program."""
    kind = type(x)
    return kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__ and not isinstance(x, type)


_RULES: dict[type, Any] = {
    tuple: _tuple,
    complex: lambda x: (_bits(x.real), _bits(x.imag)),
    np.generic: lambda x: (x.dtype, x.tobytes()),
    float: lambda x: (_bits(x), x),
    frozenset: lambda x: (frozenset(map(identical, x)),),
    slice: lambda x: (identical(x.start), identical(x.stop), identical(x.step)),
    decimal.Decimal: lambda x: (x.as_tuple(),),
    types.MethodType: lambda x: (x.__func__, weak(x.__self__)),
}


class Same:
    """A value as a key: equal to another one if the two are ``identical``."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.key = value, identical(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


__all__ = ["Same", "by_identity", "identical", "weak"]
