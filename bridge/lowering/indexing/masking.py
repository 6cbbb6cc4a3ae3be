"""Selection by condition: where, masked_fill, masked_scatter; and nonzero and its kin, whose shapes
depend on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.convert import dtypes
from bridge.lowering.common import promotion, varying
from bridge.lowering.common.promotion import constant, fused
from bridge.lowering.common.provided import refuse
from bridge.lowering.common.value_dependent_shapes import by_lane
from bridge.lowering.indexing.indexing import CHECKED, Place, known, mask_rank
from bridge.lowering.registry import lowering
from bridge.lowering.tensors.creation import number
from bridge.lowering.tensors.shape import aten_expand


def _common(*arrays) -> tuple[Array, ...]:
    """The arrays broadcast to one shape."""
    shape = arrays[0].shape
    if all(a.shape == shape for a in arrays):
        return arrays
    try:
        shape = lax.broadcast_shapes(*(a.shape for a in arrays))
    except ValueError:
        raise RuntimeError(
            f"operands: the sizes {[list(a.shape) for a in arrays]} do not broadcast to one size"
        ) from None
    return tuple(aten_expand(a, shape) for a in arrays)


@lowering("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def aten_where(condition: Array, x: Any, other: Any) -> Array:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    if condition.dtype == np.uint8:
        condition = lax.ne(condition, lax.full_like(condition, 0))
    if condition.dtype != np.bool_:
        raise RuntimeError(
            "where expected condition to be a boolean tensor, but got "
            f"{dtypes.to_torch(condition.dtype)}"
        )
    if not promotion.is_array(x) or not promotion.is_array(other) or x.dtype != other.dtype:
        x, other = promotion.promote(x, other)
    return _where(condition, x, other)


@fused()
def _where(condition: Array, x: Array, other: Array) -> Array:
    return lax.select(*_common(condition, x, other))


@lowering("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def aten_masked_fill(x: Array, mask: Array, value: Any) -> Array:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    if mask.dtype != np.bool_:
        raise RuntimeError(
            "masked_fill only supports boolean masks, but got mask with dtype "
            f"{dtypes.to_torch(mask.dtype)}"
        )
    if promotion.is_array(value):
        if value.ndim:
            raise RuntimeError(
                "masked_fill_ only supports a 0-dimensional value tensor, but got tensor with "
                f"{value.ndim} dimension(s)."
            )
        if promotion.is_complex(value) and not promotion.is_complex(x):
            raise RuntimeError(
                f"value cannot be converted to type {dtypes.to_torch(x.dtype)} "
                "without overflow: it is complex"
            )
        value = promotion.cast(value, x.dtype)
    else:
        value = number(value, x.dtype)
    return _masked_fill(x, mask, value)


@fused()
def _masked_fill(x: Array, mask: Array, value: Array) -> Array:
    mask, x = _common(mask, x)
    return lax.select(mask, lax.broadcast_in_dim(value, x.shape, ()), x)


@lowering("aten.masked_scatter")
def aten_masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    """masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor"""
    if mask.dtype != np.bool_:
        raise RuntimeError(
            f"masked_scatter: expected BoolTensor for mask, got {dtypes.to_torch(mask.dtype)}"
        )
    if x.dtype != source.dtype:
        raise RuntimeError(
            f"masked_scatter: expected self and source to have same dtypes but got {x.dtype} and "
            f"{source.dtype}"
        )
    mask, x = _common(mask, x)
    values = known(mask)
    if values is not None and np.count_nonzero(values) > source.size:
        raise RuntimeError("Number of elements of source < number of ones in mask")
    if not source.size or not x.size:
        return x
    return _masked_scatter(x, mask, source)


@fused()
def _masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    taken = Place((source.size,), (0,), (mask_rank(mask),), (CHECKED,)).read(
        lax.reshape(source, (source.size,))
    )
    return lax.select(mask, lax.reshape(taken, x.shape), x)


@lowering("aten.masked_scatter_backward")
def aten_masked_scatter_backward(grad_output: Array, mask: Array, sizes: Sequence[int]) -> Array:
    """masked_scatter_backward(Tensor grad_output, Tensor mask, SymInt[] sizes) -> Tensor"""
    source = lax.full(tuple(sizes), 0, grad_output.dtype)
    grad_output, mask = _common(grad_output, mask)
    return varying.vjp(
        lambda s: aten_masked_scatter(lax.full_like(grad_output, 0), mask, s), source
    )[1](grad_output)[0]


@lowering("aten.masked_select")
def aten_masked_select(x: Array, mask: Array) -> Array:
    """masked_select(Tensor self, Tensor mask) -> Tensor"""
    if mask.dtype != np.bool_:
        raise RuntimeError(
            f"masked_select: expected BoolTensor for mask, got {dtypes.to_torch(mask.dtype)}"
        )
    mask, x = _common(mask, x)
    where = constant(np.flatnonzero(promotion.concrete(mask)))
    return Place((x.size,), (0,), (where,), (CHECKED,)).read(lax.reshape(x, (x.size,)))


@lowering("aten.nonzero")
def aten_nonzero(x: Array) -> Array:
    """nonzero(Tensor self) -> Tensor"""
    return constant(np.argwhere(promotion.concrete(x)), np.int64)


@lowering("aten.argwhere")
@by_lane
def aten_argwhere(x: Array) -> Array:
    """argwhere(Tensor self) -> Tensor"""
    return aten_nonzero(x)  # torch.func.vmap refuses nonzero, but not this operator


@lowering("aten.nonzero_numpy", "aten.where")
def aten_nonzero_numpy(x: Array) -> list[Array]:
    """nonzero_numpy(Tensor self) -> Tensor[]"""
    return [constant(p, np.int64) for p in np.nonzero(np.atleast_1d(promotion.concrete(x)))]


@lowering("aten.nonzero_static")
def aten_nonzero_static(x: Array, *, size: int, fill_value: int = -1) -> Array:
    """nonzero_static(Tensor self, *, SymInt size, int fill_value=-1) -> Tensor"""
    if size < 0:
        raise RuntimeError(
            f"nonzero_static: 'size' must be an non-negative integer, but got {size}"
        )
    if not x.ndim or not x.size:
        return lax.full((size, x.ndim), fill_value, np.int64)
    columns = jnp.nonzero(x, size=size, fill_value=fill_value)
    return lax.concatenate(
        [lax.convert_element_type(lax.reshape(c, (size, 1)), np.int64) for c in columns], 1
    )


@lowering("aten.repeat_interleave.Tensor")
def aten_repeat_interleave(repeats: Array, *, output_size: int | None = None) -> Array:
    """repeat_interleave.Tensor(Tensor repeats, *, SymInt? output_size=None) -> Tensor"""
    if repeats.ndim != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if repeats.dtype not in (np.int64, np.int32):
        raise RuntimeError("repeats has to be Long or Int tensor")
    values = known(repeats)
    if values is None:
        if output_size is None:
            return _repeated(repeats)
        refuse(repeats < 0, "repeats can not be negative")
        refuse(
            jnp.sum(repeats) != output_size,
            f"allocated size does not match required size: output_size: got {output_size}",
        )
        return jnp.repeat(
            lax.iota(repeats.dtype, repeats.size), repeats, total_repeat_length=output_size
        )
    if values.size and values.min() < 0:
        raise RuntimeError("repeats can not be negative")
    if output_size is not None and output_size != values.sum():
        raise RuntimeError(
            f"allocated size does not match required size: output_size: expected {values.sum()}, "
            f"got {output_size}"
        )
    return constant(np.repeat(np.arange(values.size, dtype=repeats.dtype), values))


@by_lane
def _repeated(repeats: Array) -> Array:
    return aten_repeat_interleave(repeats)
