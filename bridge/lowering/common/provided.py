"""Services of the traced program that lowerings use: checks of values, random keys, the precision
of matrix products.

The bridge puts its functions into ``PROVIDED`` when it is imported, so that lowerings know nothing
of traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax

#: "check", "next_key", "torch_random", "torch_random_by_value", "float32_precision", "any_size",
#: "attention_scores" -> the bridge's function with that name
PROVIDED: dict[str, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The allowed range of whole numbers (low <= x < high), and the error for a number outside;
    error is formatted with it as {index}.
    """

    low: int
    high: int
    error: str
    kind: type[Exception] = IndexError

    def judge(self, least: int, greatest: int) -> None:
        """Raise if the least or the greatest number is out of range; the error names it."""
        if greatest >= self.high or least < self.low:
            raise self.kind(
                self.error.format(index=int(greatest if greatest >= self.high else least))
            )


def check(x: Array, where: Range) -> Array:
    """The integer array x; where.kind is raised, now or when the program that computes x has run,
    if an element is out of range.
    """
    return PROVIDED["check"](x, where)


def refuse(bad: Array, error: str, kind: type[Exception] = RuntimeError) -> None:
    """Raise kind(error), now or when the program that computes it has run, if an element of a
    boolean array is true.

    It has no effect inside a function that is jitted by itself (``promotion.fused``): call it
    before that function.
    """
    if bad.size:
        check(
            lax.convert_element_type(bad, np.int32),
            Range(0, 1, error.replace("{", "{{").replace("}", "}}"), kind),
        )


def outside(x: Array, low: float, high: float) -> Array:
    """A mask for ``refuse``: true if a real number is NaN or not within low <= x <= high."""
    return lax.bitwise_not((x >= low) & (x <= high))


def next_key(generator: torch.Generator | None = None) -> jax.Array:
    """The next JAX key of the program; each call gives another. generator: the one that the
    operator was given.
    """
    return PROVIDED["next_key"](generator)


def torch_random(
    name: str,
    args: Sequence[Any],
    fill: float | None = None,
    rules: tuple[str, Sequence[Any]] | None = None,
    generator: torch.Generator | None = None,
    order: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Array | None:
    """The numbers that one of torch's operators draws; None if the lowering must draw them with
    ``next_key``.

    Args:
        name: the operator, whose numbers must not depend on its tensors' values.
        args: its arguments, with an array in the place of each tensor.
        fill: the value of each element of these tensors, if it matters.
        rules: another operator and its arguments, by whose rules torch's vmap refuses the draw.
        order: of an operator that is registered with ``ordered``: takes a tensor on the device meta
            that lies in memory as all lanes of the operator's first operand, whose shape is that of
            args[0], and gives one of the same shape that lies as the numbers.
    """
    return PROVIDED["torch_random"](name, args, fill, rules, generator, order)


def torch_random_by_value(
    name: str,
    operands: Sequence[Array],
    args: Sequence[Any] = (),
    generator: torch.Generator | None = None,
) -> Array | None:
    """What torch's random operator gives, whose numbers depend on values; None if the lowering must
    draw with ``next_key``.

    Args:
        name: the operator; its result has the shape and dtype of its first tensor.
        operands: the tensors' values.
        args: the arguments after the tensors.
    """
    return PROVIDED["torch_random_by_value"](name, operands, args, generator)


def any_size() -> bool:
    """Whether a lowering must use the same operations for all sizes, because the program is
    exported with symbolic ones.
    """
    return bool(PROVIDED["any_size"]())


def attention_scores() -> float:
    """How many scores of a head attention computes at once, at most."""
    return PROVIDED["attention_scores"]()


def float32_precision() -> str:
    """``torch.get_float32_matmul_precision()``, or the settings of CUDA and of the CPU if they
    differ.
    """
    return PROVIDED["float32_precision"]()
