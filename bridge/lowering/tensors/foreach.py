"""The _foreach operators: an element-wise operator over lists of tensors, one lowering call per
entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jax import Array

from bridge.lowering.common.promotion import cast, jdtype, opmath, real_dtype, require_inexact
from bridge.lowering.registry import aten_lowering, lowering

_UNARY = (
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "clone",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
    "zero",
)
# the operator for a list of tensors, and the one for numbers
_BINARY = {
    "add": ("add.Tensor", "add.Tensor"),
    "clamp_max": ("clamp_max.Tensor", "clamp_max"),
    "clamp_min": ("clamp_min.Tensor", "clamp_min"),
    "div": ("div.Tensor", "div.Tensor"),
    "maximum": ("maximum", "clamp_min"),
    "minimum": ("minimum", "clamp_max"),
    "mul": ("mul.Tensor", "mul.Tensor"),
    "pow": ("pow.Tensor_Tensor", "pow.Tensor_Scalar"),
    "sub": ("sub.Tensor", "sub.Tensor"),
}


def _check(tensors: Sequence, *others: Any) -> None:
    for other in others:
        if isinstance(other, list | tuple) and len(other) != len(tensors):
            raise RuntimeError(
                f"lists: expected the same length everywhere, got {len(tensors)} and {len(other)}"
            )


def _each(fn: Callable) -> Callable:
    """fn for each entry of a list; further lists are taken entry by entry, and other arguments are
    passed to each call.
    """

    def run(self: Sequence, *others: Any, **options: Any) -> list[Array]:
        _check(self, *others)
        rows = (
            zip(
                *(o if isinstance(o, list | tuple) else [o] * len(self) for o in others),
                strict=True,
            )
            if others
            else [()] * len(self)
        )
        return [fn(x, *row, **options) for x, row in zip(self, rows, strict=True)]

    return run


for _name in _UNARY:
    lowering(f"aten._foreach_{_name}")(_each(aten_lowering(_name)))
for _name, (_tensors, _numbers) in _BINARY.items():
    lowering(f"aten._foreach_{_name}.List", f"aten._foreach_{_name}.Tensor")(
        _each(aten_lowering(_tensors))
    )
    lowering(f"aten._foreach_{_name}.Scalar", f"aten._foreach_{_name}.ScalarList")(
        _each(aten_lowering(_numbers))
    )
lowering("aten._foreach_copy")(_each(aten_lowering("copy")))
lowering("aten._foreach_mm")(_each(aten_lowering("mm")))
lowering("aten._foreach_lerp.List")(_each(aten_lowering("lerp.Tensor")))
lowering("aten._foreach_lerp.Scalar", "aten._foreach_lerp.ScalarList")(
    _each(aten_lowering("lerp.Scalar"))
)


@lowering("aten._foreach_pow.ScalarAndTensor")
def aten_foreach_pow_of_scalar(self: Any, exponent: Sequence) -> list[Array]:
    """_foreach_pow.ScalarAndTensor(Scalar self, Tensor[] exponent) -> Tensor[]"""
    return [aten_lowering("pow.Scalar")(self, e) for e in exponent]


def _three(name: str) -> Callable:
    operator = aten_lowering(name)

    def run(self: Sequence, tensor1: Sequence, tensor2: Sequence, values: Any = 1) -> list[Array]:
        """_foreach_addcmul.Scalar(Tensor[] self, Tensor[] tensor1, Tensor[] tensor2, Scalar
        value=1) -> Tensor[]
        """
        if hasattr(values, "dtype"):  # a 1-D tensor of numbers
            values = [values[i] for i in range(len(self))]
        elif not isinstance(values, list | tuple):
            values = [values] * len(self)
        _check(self, tensor1, tensor2, values)
        return [
            operator(x, a, b, value=v)
            for x, a, b, v in zip(self, tensor1, tensor2, values, strict=True)
        ]

    return run


for _name in ("addcmul", "addcdiv"):
    lowering(*(f"aten._foreach_{_name}.{kind}" for kind in ("Scalar", "ScalarList", "Tensor")))(
        _three(_name)
    )


@lowering("aten._foreach_norm.Scalar")
def aten_foreach_norm(
    self: Sequence, ord: Any = 2, dtype: torch.dtype | None = None
) -> list[Array]:
    """_foreach_norm.Scalar(Tensor[] self, Scalar ord=2, ScalarType? dtype=None) -> Tensor[]"""
    return [aten_lowering("linalg_vector_norm")(x, ord, dtype=dtype) for x in self]


@lowering("aten._foreach_powsum.Scalar")
def aten_foreach_powsum(
    self: Sequence, ord: Any = 2, dtype: torch.dtype | None = None
) -> list[Array]:
    """_foreach_powsum.Scalar(Tensor[] self, Scalar ord=2, ScalarType? dtype=None) -> Tensor[]"""
    return [_power_sum(x, ord, jdtype(dtype, x.dtype)) for x in self]


def _power_sum(x: Array, ord: int, out: np.dtype) -> Array:
    """The sum of |x| ** ord, rounded once."""
    require_inexact(x, "_foreach_powsum")
    sizes = aten_lowering("abs")(cast(x, opmath(out)))
    return cast(
        aten_lowering("sum")(aten_lowering("pow.Tensor_Scalar")(sizes, ord)), real_dtype(out)
    )


@lowering("aten._foreach_max")
def aten_foreach_max(self: Sequence) -> list[Array]:
    """_foreach_max(Tensor[] self) -> Tensor[]"""
    return [aten_lowering("max")(x) for x in self]
