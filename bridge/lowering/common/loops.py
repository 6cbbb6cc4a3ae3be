"""Loops of lowerings.

While a program is traced, lowerings run without JAX's inner jits (``jax.disable_jit``), because
each of them costs a trace of its own. JAX would then also unroll its loops. ``kept`` and the
functions here keep a loop as one operation.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridge.lowering.common import varying


def kept() -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX keeps inner jits and loops."""
    return jax.disable_jit(False)


def kept_in(lower: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering of the user's, in which JAX keeps inner jits and loops."""

    @functools.wraps(lower)
    def run(*args: Any, **kwargs: Any) -> Any:
        with kept():
            return lower(*args, **kwargs)

    return run


def scan(*args: Any, **kwargs: Any) -> Any:
    """``lax.scan``."""
    with kept():
        return varying.scan(*args, **kwargs)


def fori_loop(*args: Any) -> Any:
    """``lax.fori_loop``."""
    with kept():
        return varying.fori_loop(*args)


def searchsorted(sequence: Array, values: Array, side: str) -> Array:
    """PyTorch's binary search. ``jnp.searchsorted`` puts NaN after all numbers, while no comparison
    with NaN holds in PyTorch's.
    """
    found = jnp.zeros(values.shape, np.int32 if len(sequence) < 2**31 else np.int64)
    if not len(sequence):
        return found
    reached = operator.ge if side == "left" else operator.gt

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        there = reached(jnp.take(sequence, middle, mode="clip"), values)
        return jnp.where(there | (low >= high), low, middle + 1), jnp.where(there, middle, high)

    return fori_loop(
        0, len(sequence).bit_length(), halve, (found, jnp.full_like(found, len(sequence)))
    )[0]


__all__ = ["fori_loop", "kept", "kept_in", "scan", "searchsorted"]
