"""Numbers of the members, as the user gives them: one for all of them or one for each, alone or in
dicts and tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch


def mapped(f: Callable[[Any, str], Any], value: Any, name: str) -> Any:
    """``f(number, name)`` of each number in dicts and tuples."""
    if isinstance(value, Mapping):
        return {key: mapped(f, x, f"{name}[{key!r}]") for key, x in value.items()}
    return tuple(mapped(f, x, name) for x in value) if isinstance(value, tuple) else f(value, name)


def each(name: str, value: Any, n: int) -> np.ndarray:
    """A number of each member, [n]; ValueError if it is neither a float nor [n]."""
    found = np.asarray(
        value.detach().cpu() if isinstance(value, torch.Tensor) else value,
        jax.dtypes.canonicalize_dtype(np.float64),
    )
    if np.isnan(found).any() or (
        found.min(initial=0) < 0 and name in ("lr", "weight_decay", "clip")
    ):
        raise ValueError(f"{name}: expected numbers that are not negative, got {value}")
    if name == "temperature" and not (found > 0).all():
        raise ValueError(f"temperature: expected positive numbers, got {value}")
    if found.shape not in ((), (n,)):
        raise ValueError(
            f"{name}: expected a number, or {n} numbers, one for each member; got shape "
            f"{found.shape}"
        )
    return np.broadcast_to(found, (n,))


__all__ = ["each", "mapped"]
