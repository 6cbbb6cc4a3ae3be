"""Grouped matrix products: each group of rows, columns or terms of a sum has a matrix of its own
(mixtures of experts).

``jax.lax.ragged_dot`` has no batching rule for most combinations of operands, and lacks
derivatives. Here every group is a dense product in which the elements of other groups are zero, as
in XLA's own ragged_dot on CPUs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from bridge.convert import dtypes
from bridge.lowering.common.promotion import cast, fused, opmath
from bridge.lowering.linalg.matmul import precision
from bridge.lowering.registry import Operator, lowering

Array = jax.Array


@lowering("aten._grouped_mm")
def aten__grouped_mm(
    x: Array,
    mat2: Array,
    offs: Array | None = None,
    bias: Array | None = None,
    out_dtype: torch.dtype | None = None,
) -> Array:
    """_grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType?
    out_dtype=None) -> Tensor

    Group g ends at offs[g].  Elements after the last group are zero; in PyTorch they are undefined.
    """
    _refuse(x, mat2, offs, bias, out_dtype)
    return _product(x, mat2, offs, precision(x.dtype))


def _refuse(
    x: Array, y: Array, offs: Array | None, bias: Array | None, out_dtype: torch.dtype | None
) -> None:
    """Raise PyTorch's errors."""
    for name, mat in (("mat_a", x), ("mat_b", y)):
        if dtypes.to_torch(mat.dtype) not in (torch.float32, torch.bfloat16, torch.float16):
            raise RuntimeError(
                f"Expected {name} to be Float32, BFloat16 or Float16 matrix, got {mat.dtype}"
            )
        if mat.ndim not in (2, 3):
            raise RuntimeError(f"{name} has to be 2 or 3d, got {mat.ndim}d")
    if x.dtype != y.dtype:
        raise RuntimeError(
            f"expected m1 and m2 to have the same dtype, but got: {x.dtype} != {y.dtype}"
        )
    if x.shape[-1] != y.shape[-2]:
        raise RuntimeError(
            f"contraction dimension of mat_a and mat_b must match, got {x.shape[-1]} and "
            f"{y.shape[-2]}"
        )
    if (offs is None) != (x.ndim == y.ndim == 3):
        raise RuntimeError(
            "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d"
        )
    if offs is not None:
        if offs.dtype != jnp.int32:
            raise RuntimeError(f"Offsets have to be int32, got {offs.dtype}")
        if offs.ndim != 1:
            raise RuntimeError(f"offs has to be 1D, got {offs.ndim}D")
        if any(mat.ndim == 3 and mat.shape[0] != offs.shape[0] for mat in (x, y)):
            raise RuntimeError(
                f"matrix batch sizes have to match: {offs.shape[0]} offsets, matrices "
                f"{list(x.shape)} and {list(y.shape)}"
            )
    elif x.shape[0] != y.shape[0]:
        raise RuntimeError(f"batched dimension has to match, got {x.shape[0]} and {y.shape[0]}")
    if bias is not None:
        raise RuntimeError("Bias not supported yet")
    if out_dtype is not None and dtypes.to_jax(out_dtype) != x.dtype:
        raise RuntimeError(f"Grouped gemm output dtype must match `mat_a` dtype, got {out_dtype}")


@fused("precise")
def _product(x: Array, y: Array, offs: Array | None, precise: lax.Precision | None) -> Array:
    def each(x: Array, y: Array) -> Array:
        return lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))), precise, opmath(x.dtype))

    if offs is None:
        return cast(each(x, y), x.dtype)
    size = x.shape[-1] if x.ndim == y.ndim == 2 else x.shape[0] if x.ndim == 2 else y.shape[1]
    starts, place = (
        jnp.concatenate([jnp.zeros_like(offs[:1]), offs[:-1]]),
        jnp.arange(size, dtype=offs.dtype),
    )
    mine = (place >= starts[:, None]) & (place < offs[:, None])  # (groups, size)
    rows, columns = mine[:, :, None], mine[:, None, :]
    if x.ndim == y.ndim == 2:  # the terms of the sum are grouped
        return cast(each(jnp.where(columns, x, 0), jnp.where(rows, y, 0)), x.dtype)
    kept = rows if x.ndim == 2 else columns
    # operands and results are both masked, so that a NaN stays in its group, also in derivatives
    out = each(jnp.where(kept, x, 0), y) if x.ndim == 2 else each(x, jnp.where(kept, y, 0))
    return cast(jnp.sum(jnp.where(kept, out, 0), 0), x.dtype)


def _grouped_mm_fallback(input: Array, weight: Array, offs: Array) -> Array:
    """grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor"""
    return _product(input, weight, offs, precision(input.dtype))


def _grouped_mm_fallback_backward(
    input: Array, weight: Array, offs: Array, grad_output: Array
) -> tuple[Array, Array]:
    """grouped_mm_fallback_backward(Tensor input, Tensor weight, Tensor offs, Tensor grad_output) ->
    (Tensor, Tensor)
    """
    precise = precision(input.dtype)
    return _product(grad_output, weight.swapaxes(1, 2), offs, precise), _product(
        input.T, grad_output, offs, precise
    )


#: operators that transformers registers when it is imported, and calls in functions that are being
#: compiled
OF_TRANSFORMERS = {
    "transformers.grouped_mm_fallback.default": Operator(_grouped_mm_fallback),
    "transformers.grouped_mm_fallback_backward.default": Operator(_grouped_mm_fallback_backward),
}
