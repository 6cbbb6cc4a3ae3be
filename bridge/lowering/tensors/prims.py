"""The primitives that PyTorch's Python reference implementations (torch._refs) are written in:
torch.ops.prims.*.

Most equal an ATen operator without promotion or broadcasting and share its lowering; the others
change shape, dtype or device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jax import Array, lax

from bridge.convert import dtypes
from bridge.lowering.common.builders import number
from bridge.lowering.common.promotion import result_dtype
from bridge.lowering.registry import LOWERINGS, aten_lowering, lowering, overload
from bridge.lowering.tensors.copies import aten_copy, aten_to_copy

_SAME = (
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_not",
    "ceil",
    "clone",
    "conj_physical",
    "cos",
    "cosh",
    "digamma",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "fmax",
    "fmin",
    "gcd",
    "hypot",
    "igamma",
    "igammac",
    "isfinite",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "maximum",
    "minimum",
    "neg",
    "nextafter",
    "reciprocal",
    "round",
    "rsqrt",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)
_TENSOR = (
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "eq",
    "fmod",
    "frexp",
    "ge",
    "gt",
    "le",
    "lt",
    "mul",
    "ne",
    "remainder",
    "sub",
)
_RENAMED = {
    "bessel_i0": "i0",
    "bessel_i0e": "special_i0e",
    "bessel_i1": "special_i1",
    "bessel_i1e": "special_i1e",
    "bessel_j0": "special_bessel_j0",
    "bessel_j1": "special_bessel_j1",
    "cat": "cat",
    "conj": "_conj",
    "erf_inv": "erfinv",
    "erfcx": "special_erfcx",
    "fill": "fill.Scalar",
    "ndtri": "special_ndtri",
    "pow": "pow.Tensor_Tensor",
    "reshape": "reshape",
    "rev": "flip",
    "shift_left": "bitwise_left_shift.Tensor",
    "shift_right_arithmetic": "bitwise_right_shift.Tensor",
    "spherical_bessel_j0": "special_spherical_bessel_j0",
    "view_of": "alias",
    "where": "where.self",
    "zeta": "special_zeta",
}
for _name in _SAME:
    lowering(f"prims.{_name}")(aten_lowering(_name))
for _name in _TENSOR:
    lowering(f"prims.{_name}")(aten_lowering(f"{_name}.Tensor"))
for _name, _target in _RENAMED.items():
    lowering(f"prims.{_name}")(aten_lowering(_target))
lowering("prims.cbrt")(lax.cbrt)
lowering("prims.real")(lax.real)
lowering("prims.imag")(lax.imag)


@lowering("prims.div")
def prims_div(self: Array, other: Array) -> Array:
    """div(Tensor self, Tensor other) -> Tensor: integers truncate"""
    if result_dtype(self, other).kind in "iub":
        return LOWERINGS[overload("aten.div.Tensor_mode")](self, other, rounding_mode="trunc")
    return LOWERINGS[overload("aten.div.Tensor")](self, other)


# -- types and places ------------------------------------------------------------------------------
@lowering("prims.convert_element_type")
def prims_convert_element_type(a: Array, dtype: torch.dtype) -> Array:
    """convert_element_type(Tensor a, ScalarType dtype) -> Tensor"""
    return aten_to_copy(a, dtype=dtype)


@lowering("prims.device_put")
def prims_device_put(a: Array, device: torch.device, non_blocking: bool = False) -> Array:
    """device_put(Tensor a, Device device, bool non_blocking=False) -> Tensor"""
    return a


@lowering("prims.copy_strided")
def prims_copy_strided(a: Array, stride: Sequence[int]) -> Array:
    """copy_strided(Tensor a, SymInt[] stride) -> Tensor"""
    return a


@lowering("prims.copy_to")
def prims_copy_to(a: Array, b: Array) -> Array:
    """copy_to(Tensor(a!) a, Tensor b) -> Tensor(a!)"""
    return aten_copy(a, b)


# -- shapes ----------------------------------------------------------------------------------------
@lowering("prims.broadcast_in_dim")
def prims_broadcast_in_dim(
    a: Array, shape: Sequence[int], broadcast_dimensions: Sequence[int]
) -> Array:
    """broadcast_in_dim(Tensor(a) a, SymInt[] shape, int[] broadcast_dimensions) -> Tensor(a)"""
    return lax.broadcast_in_dim(a, tuple(shape), tuple(broadcast_dimensions))


@lowering("prims.collapse", "prims.collapse_view")
def prims_collapse(a: Array, start: int, end: int) -> Array:
    """collapse_view(Tensor(a) a, int start, int end) -> Tensor(a): end is part of the range"""
    if a.ndim == 0:
        return lax.reshape(a, (1,))
    return lax.reshape(
        a, (*a.shape[:start], math.prod(a.shape[start : end + 1]), *a.shape[end + 1 :])
    )


@lowering("prims.split_dim")
def prims_split_dim(a: Array, dim: int, outer_length: int) -> Array:
    """split_dim(Tensor(a) a, int dim, SymInt outer_length) -> Tensor(a)"""
    if a.shape[dim] % outer_length:
        raise ValueError(
            f"outer_length: {outer_length} does not divide dimension {dim} of size {a.shape[dim]}"
        )
    return lax.reshape(
        a, (*a.shape[:dim], outer_length, a.shape[dim] // outer_length, *a.shape[dim + 1 :])
    )


@lowering("prims.squeeze")
def prims_squeeze(a: Array, dimensions: Sequence[int]) -> Array:
    """squeeze(Tensor(a) a, int[] dimensions) -> Tensor(a)"""
    return lax.squeeze(a, tuple(dimensions))


@lowering("prims.transpose")
def prims_transpose(a: Array, permutation: Sequence[int]) -> Array:
    """transpose(Tensor(a) a, int[] permutation) -> Tensor(a)"""
    return lax.transpose(a, tuple(permutation))


# -- reductions ------------------------------------------------------------------------------------
def _reduction(name: str) -> Callable:
    def reduce(
        inp: Array, dims: Sequence[int] | None, *, output_dtype: torch.dtype | None = None
    ) -> Array:
        axes = list(range(inp.ndim)) if dims is None else list(dims)
        result = LOWERINGS[overload(f"aten.{name}")](inp, axes) if axes else inp
        # the reduction keeps its operand's dtype, whereas ATen's widens integers
        return aten_to_copy(
            result, dtype=dtypes.to_torch(inp.dtype) if output_dtype is None else output_dtype
        )

    return reduce


for _name, _target in {"amax": "amax", "amin": "amin", "sum": "sum.dim_IntList"}.items():
    lowering(f"prims.{_name}")(_reduction(_target))


@lowering("prims.prod")
def prims_prod(
    inp: Array, dims: Sequence[int] | None, *, output_dtype: torch.dtype | None = None
) -> Array:
    """prod(Tensor inp, int[]? dims, *, ScalarType? output_dtype=None) -> Tensor"""
    result = inp
    for dim in sorted(range(inp.ndim) if dims is None else dims, reverse=True):
        result = LOWERINGS[overload("aten.prod.dim_int")](result, dim)
    return aten_to_copy(
        result, dtype=dtypes.to_torch(inp.dtype) if output_dtype is None else output_dtype
    )


@lowering("prims.var")
def prims_var(
    inp: Array,
    dims: Sequence[int] | None,
    correction: float | None = 1,
    *,
    output_dtype: torch.dtype | None = None,
) -> Array:
    """var(Tensor inp, int[]? dims, float? correction=1, *,
    ScalarType? output_dtype=None) -> Tensor
    """
    result = LOWERINGS[overload("aten.var.correction")](inp, dims, correction=correction)
    return result if output_dtype is None else aten_to_copy(result, dtype=output_dtype)


# -- creation --------------------------------------------------------------------------------------
@lowering("prims.iota")
def prims_iota(
    length: int,
    *,
    start: int,
    step: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Array:
    """iota(SymInt length, *, SymInt start, SymInt step, ScalarType dtype, Device device, bool
    requires_grad) -> Tensor
    """
    target = dtypes.to_jax(dtype)
    steps = lax.mul(lax.iota(np.int64, length), np.int64(step))
    return lax.convert_element_type(lax.add(steps, np.int64(start)), target)


@lowering("prims.full")
def prims_full(
    shape: Sequence[int],
    fill_value: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Array:
    """full(SymInt[] shape, Scalar fill_value, *, ScalarType dtype, Device device, bool
    requires_grad) -> Tensor
    """
    return lax.broadcast(number(fill_value, dtypes.to_jax(dtype)), tuple(shape))


@lowering("prims.full_like")
def prims_full_like(
    a: Array, fill_value: Any, *, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Array:
    """full_like(Tensor a, Scalar fill_value, *, ScalarType dtype, Device device, bool
    requires_grad) -> Tensor
    """
    return prims_full(a.shape, fill_value, dtype=dtype, device=device, requires_grad=requires_grad)


@lowering("prims.empty_strided", "prims.empty_permuted")
def prims_empty(
    shape: Sequence[int],
    layout: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Array:
    """empty_strided(SymInt[] shape, SymInt[] strides, *, ScalarType dtype, Device device, bool
    requires_grad) -> Tensor
    """
    return prims_full(shape, 0, dtype=dtype, device=device, requires_grad=requires_grad)


@lowering("prims.scalar_tensor")
def prims_scalar_tensor(
    s: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Array:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, Device? device=None) -> Tensor"""
    return LOWERINGS[overload("aten.scalar_tensor")](s, dtype=dtype)
