"""Objects among the arguments of a jitted function that are their attributes and hold tensors, such
as a batch: taken apart like a dict.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import jax
import torch

from bridge.cache_keys import by_identity
from bridge.convert import trees
from bridge.convert.trees import Opened
from bridge.programs.closure_scan import is_plain, slots_of

_DEEP = 8  # objects and containers in each other
_SINGLE = (type(None), torch.dtype, torch.layout, torch.memory_format)  # each value is one object


def can_be_opened(kind: type, x: Any) -> bool:
    """Whether an object of this class is its attributes; what these are is another question."""
    if kind is types.SimpleNamespace:
        return True
    return type(getattr(x, "__dict__", None)) is dict and is_plain(x) and not slots_of(x)


def is_data(x: Any, deep: int = _DEEP) -> bool:
    """Whether an object is nothing but tensors and values that are compared by content, and no
    hash can tell it from others: it has none, or a tensor is in it.
    """
    found = [0]

    def data(value: Any, deep: int) -> bool:
        kind = type(value)
        if isinstance(value, torch.Tensor | jax.Array):
            found[0] += 1
            return True
        if deep == 0:
            return False
        if kind is list or kind is tuple or kind is dict or kind is collections.OrderedDict:
            return all(
                data(v, deep - 1) for v in (value.values() if isinstance(value, dict) else value)
            )
        if can_be_opened(kind, value):
            return all(data(v, deep - 1) for v in vars(value).values())
        return kind in _SINGLE or (
            kind.__hash__ is not None and not by_identity(value) and not callable(value)
        )

    return data(x, deep) and (found[0] > 0 or type(x).__hash__ is None)


def opened(arguments: Any, opens: Callable[[Any], bool]) -> Any:
    """A tree of arguments with a ``trees.Opened`` in the place of each leaf for which ``opens`` is
    true, and of the objects in these.

    None if one object is at two places: it could not be one object in the function.
    """
    met: list[int] = []

    def inside(x: Any) -> Opened:
        met.append(id(x))
        return Opened(
            x,
            [
                trees.map_leaves(lambda v: inside(v) if can_be_opened(type(v), v) else v, v)
                for v in vars(x).values()
            ],
        )

    found = trees.map_leaves(lambda leaf: inside(leaf) if opens(leaf) else leaf, arguments)
    return found if len({*met}) == len(met) else None
