"""Loops of lowerings.

While a program is traced, lowerings run without JAX's inner jits (``jax.disable_jit``), because each of them costs a trace of its own.
JAX would then also unroll its loops.  ``kept`` and the functions here keep a loop as one operation.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    """``jnp.searchsorted``, a binary search by a loop."""
    with kept():
        return jnp.searchsorted(sequence, values, side=side)


__all__ = ["fori_loop", "kept", "kept_in", "scan", "searchsorted"]
