"""What lowerings need of the program that they are part of: checks of values, random keys, the precision of matrix products.

The bridge puts its functions into ``PROVIDED`` when it is imported, so that lowerings know nothing of traces.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax

#: "check", "next_key", "float32_precision" -> the bridge's function of that name
PROVIDED: dict[str, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Where whole numbers must lie (low <= x < high), and what is said of one that does not; error is formatted with it as {index}."""

    low: int
    high: int
    error: str
    kind: type[Exception] = IndexError

    def judge(self, least: int, greatest: int) -> None:
        """Raise for the outermost of the numbers between these two that lies outside."""
        if greatest >= self.high or least < self.low:
            raise self.kind(self.error.format(index=int(greatest if greatest >= self.high else least)))


def check(x: Array, where: Range) -> Array:
    """x, an integer array; raises where.kind, now or when the program that computes it has run, if any of it lies outside of the range."""
    return PROVIDED["check"](x, where)


def refuse(bad: Array, error: str, kind: type[Exception] = RuntimeError) -> None:
    """Raise kind(error), now or when the program that computes it has run, if any of a boolean array is true.

    Of no effect inside of a function that is jitted by itself (``promotion.fused``): call it before.
    """
    if bad.size:
        check(lax.convert_element_type(bad, np.int32), Range(0, 1, error.replace("{", "{{").replace("}", "}}"), kind))


def outside(x: Array, low: float, high: float) -> Array:
    """Where real numbers are not within low <= x <= high, nor numbers at all; for ``refuse``."""
    return lax.bitwise_not((x >= low) & (x <= high))


def next_key(generator: torch.Generator | None = None) -> jax.Array:
    """The next JAX key of the program; each call gives another.  generator: the one that the operator was given."""
    return PROVIDED["next_key"](generator)


def float32_precision() -> str:
    """``torch.get_float32_matmul_precision()``, or the settings of CUDA and of the CPU where they differ."""
    return PROVIDED["float32_precision"]()
