"""Walks over an operator's arguments, in which tensors stand alone and in lists, tuples, dicts and
slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def mapped(fn: Callable[[Any], Any], x: Any) -> Any:
    """An operator's arguments with fn applied to everything in them that is no list, tuple, dict or
    slice.
    """
    kind = type(x)
    if kind is list:
        return [mapped(fn, v) for v in x]
    if isinstance(x, tuple):
        return tuple([mapped(fn, v) for v in x])
    if kind is dict:
        return {k: mapped(fn, v) for k, v in x.items()}
    if kind is slice:
        return slice(mapped(fn, x.start), mapped(fn, x.stop), mapped(fn, x.step))
    return fn(x)


def tensors_in(x: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, in order."""
    found: list[torch.Tensor] = []
    mapped(lambda v: found.append(v) if isinstance(v, torch.Tensor) else None, x)
    return found


def with_values(x: Any, values: Sequence[torch.Tensor]) -> Any:
    """An operator's arguments with these in place of the tensors among them."""
    source = iter(values)
    return mapped(lambda v: next(source) if isinstance(v, torch.Tensor) else v, x)
