"""Keys for compiled programs: two values have one key only if no program can tell them apart.

Python's own equality is not enough for that: ``0.0 == -0.0`` and ``1 == True == 1.0`` hold, and NaN
is not equal to itself.
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
import torch
from torch.utils.weak import WeakIdRef

_bits = struct.Struct("d").pack
#: Types whose equality is identity of content.
_EXACT = frozenset({int, bool, str, bytes, type(None)})


def identical(x: Any) -> Any:
    """A hashable key of a value; two keys are equal only if the values have the same type and the
    same content, bit by bit.

    The key refers only weakly to an object that is compared by identity (a module, a function, most
    objects): it does not keep it alive.

    Args:
        x: a hashable value.

    Returns:
        a hashable object.

    Raises:
        TypeError: x is not hashable.

    Example:
        >>> from bridge.cache_keys import identical
        >>> (
        ...     identical(0.0) == identical(-0.0),
        ...     identical((1, 2)) == identical((True, 2)),
        ...     identical(float("nan")) == identical(float("nan")),
        ... )
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


def _other(x: Any) -> Any:
    hash(x)  # raises TypeError if x is not hashable
    params = getattr(type(x), "__dataclass_params__", None)
    if params is not None and params.eq and params.frozen:
        return [identical(getattr(x, f.name)) for f in dataclasses.fields(x) if f.compare]
    return (weak(x),)


def weak(x: Any) -> Any:
    """A weak reference to x if x is compared by identity and allows weak references; otherwise x
    itself.
    """
    if not by_identity(x):
        return x
    try:
        return weakref.ref(x)
    except TypeError:
        return x


def by_identity(x: Any) -> bool:
    """Whether x is equal only to itself; False for classes, which mostly live as long as the
    process.
    """
    kind = type(x)
    return (
        kind.__hash__ is object.__hash__
        and kind.__eq__ is object.__eq__
        and not isinstance(x, type)
    )


_RULES: dict[type, Any] = {
    tuple: lambda x: map(identical, x),
    complex: lambda x: (_bits(x.real), _bits(x.imag)),
    np.generic: lambda x: (x.dtype, x.tobytes()),
    float: lambda x: (_bits(x), x),
    frozenset: lambda x: (frozenset(map(identical, x)),),
    slice: lambda x: (identical(x.start), identical(x.stop), identical(x.step)),
    decimal.Decimal: lambda x: (x.as_tuple(),),
    types.MethodType: lambda x: (x.__func__, weak(x.__self__)),
    torch.Tensor: lambda x: (WeakIdRef(x),),  # == of tensors is another tensor
}


class Same:
    """A value as a key; two are equal if ``identical`` gives one key for both values."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.key = value, identical(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)
