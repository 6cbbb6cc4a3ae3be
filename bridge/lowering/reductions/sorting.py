"""Order statistics: sort, topk, kthvalue, median, mode, the unique family, searchsorted and
bucketize.

NaN sorts after every number, as in PyTorch; a value that is returned with an index gives its
derivative to that element alone.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common.loops import searchsorted
from bridge.lowering.common.promotion import (
    cast,
    concrete,
    constant,
    is_floating,
    is_integral,
    promote,
    wrap_dim,
)
from bridge.lowering.indexing.indexing import in_range
from bridge.lowering.reductions.reductions import (
    need_elements,
    need_order,
    pick,
    pick_along,
    restore,
    spread_ties,
)
from bridge.lowering.registry import lowering


def sorted_with_index(x: Array, axis: int, descending: bool = False) -> tuple[Array, Array]:
    """x sorted along axis, and the int32 positions that its elements had; equal elements keep their
    order.
    """
    places = lax.broadcasted_iota(np.int32, x.shape, axis)
    if not descending:
        values, index = lax.sort((x, places), dimension=axis, num_keys=1)
        return values, index
    # reversing before and after an ascending stable sort keeps equal elements in order and puts NaN
    # first
    flipped = (lax.rev(x, (axis,)), x.shape[axis] - 1 - places)
    values, index = lax.sort(flipped, dimension=axis, num_keys=1)
    return lax.rev(values, (axis,)), lax.rev(index, (axis,))


@lowering("aten.sort", apart=())
def aten_sort(self: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""
    axis = wrap_dim(dim, self.ndim)
    need_order(self, "sort")
    if not self.ndim:
        return self, jnp.zeros((), np.int64)
    values, index = sorted_with_index(self, axis, descending)
    return values, cast(index, np.int64)


@lowering("aten.sort.stable", apart=())
def aten_sort_stable(
    self: Array, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    """sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> (Tensor
    values, Tensor indices)
    """
    return aten_sort(self, dim, descending)


def _top_key(x: Array, largest: bool) -> Array:
    """A key whose top_k orders x as PyTorch does. XLA on CPU has a fast path only for float32, so
    narrow types are converted, exactly.
    """
    key = lax.stop_gradient(x)
    if key.dtype == np.bool_ or key.dtype.itemsize < 4:
        key = cast(key, np.float32)
    if is_integral(key):
        return key if largest else lax.bitwise_not(key)
    # top_k compares sign and bits, so a negative NaN would count as the smallest value
    key = jnp.where(jnp.isnan(key), np.nan, key)
    return key if largest else lax.neg(key)


@lowering("aten.topk", apart=())
def aten_topk(
    self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor
    values, Tensor indices)
    """
    axis = wrap_dim(dim, self.ndim)
    need_order(self, "topk")
    if not 0 <= k <= (self.shape[axis] if self.ndim else 1):
        raise RuntimeError(
            f"topk(): selected index k out of range: {k} with "
            f"{self.shape[axis] if self.ndim else 1} elements in dim {dim}"
        )
    if not self.ndim:
        return (
            (self, jnp.zeros((), np.int64))
            if k
            else (jnp.zeros((0,), self.dtype), jnp.zeros((0,), np.int64))
        )
    index = lax.top_k(_top_key(self, largest), k, axis=axis)[1]
    return pick_along(self, index, axis), cast(index, np.int64)


def _ranked(
    x: Array, axis: int, rank: Any, keepdim: bool, index: Array | None = None
) -> tuple[Array, Array]:
    """The element of that rank along axis, with its index; rank is an int, or an array of x's shape
    without the axis.
    """
    if index is None:
        index = _order(x, axis)
    if isinstance(rank, int):
        index = lax.index_in_dim(index, rank, axis, keepdims=False)
    else:
        index = pick(index, rank, axis)
    return restore(pick(x, index, axis), (axis,), keepdim), restore(
        cast(index, np.int64), (axis,), keepdim
    )


def _order(x: Array, axis: int) -> Array:
    return sorted_with_index(lax.stop_gradient(x), axis)[1]


@lowering("aten.kthvalue", apart=("self",))
def aten_kthvalue(self: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """kthvalue(Tensor self, SymInt k, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor
    indices)
    """
    axis = wrap_dim(dim, self.ndim)
    need_order(self, "kthvalue")
    size = self.shape[axis] if self.ndim else 1
    if self.ndim:
        need_elements(self, (axis,), "kthvalue")
    if not 1 <= k <= size:
        raise RuntimeError(
            f"kthvalue(): selected number k out of range for dimension {dim}: "
            f"k is {k}, the size is {size}"
        )
    if not self.ndim:
        return self, jnp.zeros((), np.int64)
    return _ranked(self, axis, k - 1, keepdim)


def _median(x: Array, axis: int, keepdim: bool, ignore_nan: bool) -> tuple[Array, Array]:
    """The lower median along axis; if there is a NaN, the first one, unless ignore_nan."""
    order = _order(x, axis)
    middle = (x.shape[axis] - 1) // 2
    if not is_floating(x):
        return _ranked(x, axis, middle, keepdim, order)
    missing = lax.reduce_sum(cast(jnp.isnan(x), np.int32), (axis,))
    if ignore_nan:
        rank = jnp.maximum(x.shape[axis] - missing - 1, 0) // 2
    else:
        # NaN sorts last and stably, so the first one is right after the numbers
        rank = jnp.where(missing > 0, x.shape[axis] - missing, middle)
    return _ranked(x, axis, rank, keepdim, order)


def _median_dim(x: Array, dim: int, keepdim: bool, ignore_nan: bool) -> tuple[Array, Array]:
    axis = wrap_dim(dim, x.ndim)
    need_order(x, "median")
    if not x.ndim:
        return x, jnp.zeros((), np.int64)
    need_elements(x, (axis,), "median")
    return _median(x, axis, keepdim, ignore_nan)


def _median_full(x: Array, ignore_nan: bool) -> Array:
    need_order(x, "median")
    if x.size == 0:
        # PyTorch's answer for no elements: NaN, and for integers what NaN converts to
        return (
            jnp.full((), np.nan, x.dtype)
            if is_floating(x)
            else jnp.full((), np.iinfo(x.dtype).min, x.dtype)
        )
    flat = lax.reshape(x, (x.size,))
    return spread_ties(flat, _median(lax.stop_gradient(flat), 0, False, ignore_nan)[0], (0,))


@lowering("aten.median")
def aten_median(self: Array) -> Array:
    """median(Tensor self) -> Tensor"""
    return _median_full(self, False)


@lowering("aten.nanmedian")
def aten_nanmedian(self: Array) -> Array:
    """nanmedian(Tensor self) -> Tensor"""
    return _median_full(self, True)


@lowering("aten.median.dim")
def aten_median_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """median.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _median_dim(self, dim, keepdim, False)


@lowering("aten.nanmedian.dim")
def aten_nanmedian_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """nanmedian.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _median_dim(self, dim, keepdim, True)


@lowering("aten.mode")
def aten_mode(self: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """mode(Tensor self, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    axis = wrap_dim(dim, self.ndim)
    need_order(self, "mode")
    if not self.ndim:
        return self, jnp.zeros((), np.int64)
    need_elements(self, (axis,), "mode")
    values, order = sorted_with_index(lax.stop_gradient(self), axis)
    size = self.shape[axis]
    places = lax.broadcasted_iota(np.int32, self.shape, axis)
    before = lax.slice_in_dim(values, 0, size - 1, axis=axis)
    differs = lax.slice_in_dim(values, 1, size, axis=axis) != before
    starts = jnp.where(
        lax.pad(differs, np.bool_(True), [(int(a == axis), 0, 0) for a in range(self.ndim)]),
        places,
        0,
    )
    run = places - lax.cummax(starts, axis)
    # the first longest run, read at its end: the smallest value among the most frequent, at its
    # last index
    rank = lax.argmax(run, axis, np.int32)
    return _ranked(self, axis, rank, keepdim, order)


def _wide(x: Array) -> np.ndarray:
    """The known values in a dtype that numpy sorts."""
    values = concrete(x)
    return values.astype(np.float32) if is_floating(x) and x.dtype.itemsize < 4 else values


def _unique_axis(self: Array, dim: int) -> int:
    axis = wrap_dim(dim, self.ndim)
    if not self.ndim:
        raise IndexError(f"unique(): dimension specified as {dim} but tensor has no dimensions")
    if 0 in self.shape[:axis] + self.shape[axis + 1 :]:
        raise RuntimeError(
            f"unique(): there are 0 sized dimensions other than dim {dim}, so unique cannot be "
            f"applied: {self.shape}"
        )
    return axis


def _unique_outputs(
    self: Array,
    values: np.ndarray,
    inverse: np.ndarray | None,
    counts: np.ndarray | None,
    shape: tuple[int, ...],
) -> tuple[Array, Array, Array]:
    empty = np.zeros((0,), np.int64)
    inverse = empty if inverse is None else np.reshape(inverse, shape)
    counts = empty if counts is None else counts
    return (
        constant(values.astype(self.dtype)),
        constant(inverse, np.int64),
        constant(counts, np.int64),
    )


@lowering("aten._unique2")
def aten_unique2(
    self: Array, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Array, Array, Array]:
    """_unique2(Tensor self, bool sorted=True, bool return_inverse=False, bool
    return_counts=False) -> (Tensor, Tensor, Tensor)
    """
    values, inverse, counts = np.unique(
        _wide(self).ravel(), return_inverse=True, return_counts=True, equal_nan=False
    )
    return _unique_outputs(
        self,
        values,
        inverse if return_inverse else None,
        counts if return_counts else None,
        self.shape,
    )


@lowering("aten._unique")
def aten_unique(
    self: Array, sorted: bool = True, return_inverse: bool = False
) -> tuple[Array, Array]:
    """_unique(Tensor self, bool sorted=True, bool return_inverse=False) -> (Tensor, Tensor)"""
    return aten_unique2(self, sorted, return_inverse)[:2]


@lowering("aten.unique_dim")
def aten_unique_dim(
    self: Array,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Array, Array, Array]:
    """unique_dim(Tensor self, int dim, bool sorted=True, bool return_inverse=False, bool
    return_counts=False) -> (Tensor, Tensor, Tensor)
    """
    axis = _unique_axis(self, dim)
    values, inverse, counts = np.unique(
        _wide(self), axis=axis, return_inverse=True, return_counts=True, equal_nan=False
    )
    # PyTorch always returns the inverse and the counts
    return _unique_outputs(self, values, inverse, counts, (self.shape[axis],))


def _consecutive(
    self: Array, axis: int | None, return_inverse: bool, return_counts: bool
) -> tuple[Array, Array, Array]:
    values = _wide(self)
    columns = 1 if axis is None else math.prod(self.shape[:axis] + self.shape[axis + 1 :])
    rows = (values if axis is None else np.moveaxis(values, axis, 0)).reshape(
        values.size // columns, columns
    )
    starts = np.ones(len(rows), np.bool_)
    starts[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    kept = values.ravel()[starts] if axis is None else np.compress(starts, values, axis=axis)
    counts = np.diff(np.append(np.flatnonzero(starts), len(rows)))
    shape = self.shape if axis is None else (len(rows),)
    return _unique_outputs(
        self,
        kept,
        np.cumsum(starts) - 1 if return_inverse else None,
        counts if return_counts else None,
        shape,
    )


@lowering("aten.unique_consecutive")
def aten_unique_consecutive(
    self: Array, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Array, Array, Array]:
    """unique_consecutive(Tensor self, bool return_inverse=False, bool return_counts=False, int?
    dim=None) -> (Tensor, Tensor, Tensor)
    """
    return _consecutive(
        self, None if dim is None else _unique_axis(self, dim), return_inverse, return_counts
    )


@lowering("aten.unique_dim_consecutive")
def aten_unique_dim_consecutive(
    self: Array, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Array, Array, Array]:
    """unique_dim_consecutive(Tensor self, int dim, bool return_inverse=False, bool
    return_counts=False) -> (Tensor, Tensor, Tensor)
    """
    return _consecutive(self, _unique_axis(self, dim), True, True)


@lowering("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def aten_searchsorted(
    sorted_sequence: Array,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    """searchsorted.Tensor(Tensor sorted_sequence, Tensor self, *, bool out_int32=False, bool
    right=False, str? side=None, Tensor? sorter=None) -> Tensor
    """
    if side not in (None, "left", "right"):
        raise RuntimeError(f"searchsorted(): side can only be 'left' or 'right' but got {side}")
    if right and side == "left":
        raise RuntimeError(
            "searchsorted(): side and right can't be set to opposites, got side of left while "
            "right was True"
        )
    where = "right" if right or side == "right" else "left"
    if sorter is not None:
        error = "torch.searchsorted(): sorter index {index} out of range"
        sorter, _ = in_range(sorter, sorted_sequence.shape[-1], error, kind=RuntimeError)
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1)
    sequence, values = promote(sorted_sequence, self)
    if sequence.ndim > 1 and sequence.shape[:-1] != values.shape[:-1]:
        raise RuntimeError(
            "searchsorted(): boundaries tensor should be 1 dimension or the first N-1 dimensions "
            "of boundaries tensor and input value tensor must match, but we got boundaries tensor "
            f"{list(sequence.shape)} and input value tensor {list(values.shape)}"
        )

    def search(sequence: Array, values: Array) -> Array:
        return searchsorted(sequence, values, side=where)

    for _ in range(sequence.ndim - 1):
        search = jax.vmap(search)
    found = search(lax.stop_gradient(sequence), lax.stop_gradient(values))
    return cast(found, np.int32 if out_int32 else np.int64)


@lowering("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def aten_bucketize(
    self: Any, boundaries: Array, *, out_int32: bool = False, right: bool = False
) -> Array:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool
    right=False) -> Tensor
    """
    if boundaries.ndim != 1:
        raise RuntimeError(
            f"bucketize(): boundaries tensor must be 1 dimension, but got dim({boundaries.ndim})"
        )
    return aten_searchsorted(boundaries, self, out_int32=out_int32, right=right)
