"""gather and scatter along a dimension in all their reductions, with PyTorch's gradients, and
writes into views (*_scatter).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common import promotion
from bridge.lowering.common.cotangents import with_cotangent
from bridge.lowering.common.in_place import overwrite, read_first
from bridge.lowering.common.promotion import fused
from bridge.lowering.indexing.indexing import OUT_OF_BOUNDS, OUT_OF_RANGE, SAFE, in_range
from bridge.lowering.registry import lowering
from bridge.lowering.tensors.shape import (
    aten_expand,
    aten_permute,
    aten_unsqueeze,
    diagonal_size,
    place_diagonal,
    select_index,
    slice_bounds,
    strided_index,
)


def _vector(x: Array) -> Array:
    return x if x.ndim else lax.reshape(x, (1,))


def _check_index(
    name: str, shape: Sequence[int], dim: int, index: Array, src_shape: Sequence[int] | None = None
) -> None:
    if index.dtype not in (np.int64, np.int32):
        raise RuntimeError(f"{name}(): Expected dtype int32/int64 for index")
    if max(index.ndim, 1) != max(len(shape), 1):
        raise RuntimeError("Index tensor must have the same number of dimensions as input tensor")
    if any(i > n for d, (i, n) in enumerate(zip(index.shape, shape, strict=False)) if d != dim):
        raise RuntimeError(
            f"Size does not match at dimension: expected index {list(index.shape)} to be no larger "
            f"than self {list(shape)} apart from dimension {dim}"
        )
    if src_shape is None:
        return
    if max(len(src_shape), 1) != max(index.ndim, 1) or any(
        i > n for i, n in zip(index.shape, src_shape, strict=False)
    ):
        raise RuntimeError(
            f"Expected index {list(index.shape)} to be no larger size than src {list(src_shape)}"
        )


def _corner(x: Array, shape: Sequence[int], but: int = -1) -> Array:
    """The first elements of x along each dimension except one, as many as shape has."""
    limit = [n if d == but else s for d, (n, s) in enumerate(zip(x.shape, shape, strict=True))]
    return x if tuple(limit) == x.shape else lax.slice(x, [0] * x.ndim, limit)


@fused("dim", "mode")
def _read(x: Array, dim: int, index: Array, mode: lax.GatherScatterMode) -> Array:
    """The elements of x at index along dim, and at their own places along the other dimensions."""
    rest = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=rest,
        start_indices_batching_dims=rest,
    )
    start = lax.reshape(index, (*index.shape, 1))
    return lax.gather(_corner(x, index.shape, dim), start, numbers, (1,) * x.ndim, mode=mode)


@fused("dim", "mode", "scatter", "unique")
def _write(
    x: Array,
    dim: int,
    index: Array,
    values: Array,
    mode: lax.GatherScatterMode,
    scatter: Callable[..., Any] = lax.scatter,
    unique: bool = False,
) -> Array:
    """x with values written (or added, …) at index along dim."""
    rest = tuple(d for d in range(x.ndim) if d != dim)
    start = lax.reshape(index, (*index.shape, 1))
    if all(x.shape[d] == index.shape[d] for d in rest):
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(),
            inserted_window_dims=(dim,),
            scatter_dims_to_operand_dims=(dim,),
            operand_batching_dims=rest,
            scatter_indices_batching_dims=rest,
        )
    else:
        columns = [
            start if d == dim else lax.broadcasted_iota(index.dtype, start.shape, d)
            for d in range(x.ndim)
        ]
        start = lax.concatenate(columns, x.ndim)
        every = tuple(range(x.ndim))
        numbers = lax.ScatterDimensionNumbers((), every, every)
    return scatter(x, start, read_first(values, x), numbers, mode=mode, unique_indices=unique)


@lowering("aten.gather", apart=("self", "index"))
def aten_gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
    dim = promotion.wrap_dim(dim, x.ndim)
    if not index.size:
        return lax.full(index.shape, 0, x.dtype)
    _check_index("gather", x.shape, dim, index)
    base, where = _vector(x), _vector(index)
    where, mode = in_range(where, base.shape[dim], OUT_OF_BOUNDS, dim=dim, kind=RuntimeError)
    # x is empty if there are no lanes
    out = _read(base, dim, where, mode) if x.size else lax.full(where.shape, 0, x.dtype)
    return out if index.ndim else lax.reshape(out, ())


def _scatter(
    name: str, x: Array, dim: int, index: Array, src: Any, operation: Callable[..., Any]
) -> Array:
    """operation(x, dim, index, src, mode) on checked operands of at least one dimension, src cut to
    the index's shape.
    """
    dim = promotion.wrap_dim(dim, x.ndim)
    if not index.size:
        return x
    if promotion.is_array(src):
        _check_index(name, x.shape, dim, index, src.shape)
        if src.dtype != x.dtype:
            raise RuntimeError(f"{name}(): Expected self.dtype to be equal to src.dtype")
        where = _vector(index)
        src = _corner(_vector(src), where.shape)
    else:
        _check_index(name, x.shape, dim, index)
        where = _vector(index)
        src = lax.full(where.shape, src, x.dtype)
    base = _vector(x)
    where, mode = in_range(where, base.shape[dim], OUT_OF_BOUNDS, dim=dim, kind=RuntimeError)
    return lax.reshape(operation(base, dim, where, src, mode), x.shape)


def _put(x: Array, dim: int, index: Array, src: Array, mode: lax.GatherScatterMode) -> Array:
    # if several writes go to one place, any may stay and each gets the whole cotangent, which is
    # JAX's rule for unique indices
    return _write(x, dim, index, src, mode, unique=True)


def _add(x: Array, dim: int, index: Array, src: Array, mode: lax.GatherScatterMode) -> Array:
    # a sum of bools is their disjunction
    return _write(
        x, dim, index, src, mode, lax.scatter_add if x.dtype != np.bool_ else lax.scatter_max
    )


@lowering("aten.scatter.src", "aten.scatter.value", apart=("index", "src"))
def aten_scatter(x: Array, dim: int, index: Array, src: Any) -> Array:
    """scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    return _scatter("scatter", x, dim, index, src, _put)


@lowering("aten.scatter_add", apart=("index", "src"))
def aten_scatter_add(x: Array, dim: int, index: Array, src: Array) -> Array:
    """scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    return _scatter("scatter_add", x, dim, index, src, _add)


@lowering("aten.scatter.reduce", "aten.scatter.value_reduce", apart=("index", "src"))
def aten_scatter_by(x: Array, dim: int, index: Array, src: Any, *, reduce: str) -> Array:
    """scatter.reduce(Tensor self, int dim, Tensor index, Tensor src, *, str reduce) -> Tensor"""
    names = {"add": "sum", "multiply": "prod"}
    if reduce not in names:
        raise RuntimeError(f"reduce argument must be either add or multiply, got {reduce}")
    return _scatter(
        "scatter",
        x,
        dim,
        index,
        src,
        functools.partial(_reduce, how=names[reduce], include_self=True),
    )


@lowering("aten.scatter_reduce.two", apart=("index", "src"))
def aten_scatter_reduce(
    x: Array, dim: int, index: Array, src: Array, reduce: str, *, include_self: bool = True
) -> Array:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, bool
    include_self=True) -> Tensor
    """
    if reduce not in ("sum", "prod", "mean", "amax", "amin"):
        raise RuntimeError(
            f"reduce argument must be either sum, prod, mean, amax or amin, got {reduce}"
        )
    return _scatter(
        "scatter_reduce",
        x,
        dim,
        index,
        src,
        functools.partial(_reduce, how=reduce, include_self=include_self),
    )


@lowering("aten.index_reduce", apart=("index", "source"))
def aten_index_reduce(
    x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    """index_reduce(Tensor self, int dim, Tensor index, Tensor source, str reduce, *, bool
    include_self=True) -> Tensor
    """
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise RuntimeError(f"reduce argument must be either prod, mean, amax or amin, got {reduce}")
    dim = promotion.wrap_dim(dim, x.ndim)
    if source.ndim != x.ndim:
        raise RuntimeError(
            f"index_reduce(): source: expected {x.ndim} dimensions, as self has, got {source.ndim}"
        )
    if index.ndim > 1 or index.size != (source.shape[dim] if source.ndim else 1):
        raise RuntimeError(
            "index_reduce(): index: expected a vector of "
            f"{source.shape[dim] if source.ndim else 1} elements"
        )
    index, _ = in_range(index, x.shape[dim] if x.ndim else 1, OUT_OF_RANGE)
    row = [1] * max(source.ndim, 1)
    row[dim] = index.size
    wide = aten_expand(lax.reshape(index, row), _vector(source).shape)
    return aten_scatter_reduce(
        x, dim, lax.reshape(wide, source.shape), source, reduce, include_self=include_self
    )


def _reduce(
    x: Array,
    dim: int,
    index: Array,
    src: Array,
    mode: lax.GatherScatterMode,
    *,
    how: str,
    include_self: bool,
) -> Array:
    if not include_self:
        neutral = {"sum": 0, "mean": 0, "prod": 1}.get(how)
        if neutral is None:
            neutral = _lowest(x.dtype) if how == "amax" else _highest(x.dtype)
        x = _put(x, dim, index, lax.full_like(src, neutral), mode)
    if how == "sum":
        return _add(x, dim, index, src, mode)
    if how == "mean":
        return _mean(x, dim, index, src, mode, include_self)
    return (_prod if how == "prod" else _extremum)(x, index, src, dim, mode, how)


def _lowest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return False
    return -np.inf if promotion.is_floating(dtype) else np.iinfo(dtype).min


def _highest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return True
    return np.inf if promotion.is_floating(dtype) else np.iinfo(dtype).max


@fused("dim", "mode", "include_self")
def _mean(
    x: Array, dim: int, index: Array, src: Array, mode: lax.GatherScatterMode, include_self: bool
) -> Array:
    if x.dtype == np.bool_:
        raise NotImplementedError("\"reduce_mean\" not implemented for 'Bool'")
    dtype = promotion.opmath(x.dtype)
    total = _add(promotion.cast(x, dtype), dim, index, promotion.cast(src, dtype), mode)
    count = _add(
        lax.full_like(total, int(include_self)), dim, index, lax.full_like(src, 1, dtype), mode
    )
    if not include_self:
        count = lax.max(
            lax.real(count) if promotion.is_complex(count) else count,
            lax.full(count.shape, 1, promotion.real_dtype(dtype)),
        )
    if promotion.is_integral(dtype):
        # rounded down, as PyTorch does
        return lax.sub(lax.div(total, count), promotion.cast((lax.rem(total, count) < 0), dtype))
    return promotion.cast(lax.div(total, promotion.cast(count, dtype)), x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def _prod(
    x: Array, index: Array, src: Array, dim: int, mode: lax.GatherScatterMode, how: str
) -> Array:
    """x times all elements of src that go to its place; the derivative is exact if factors are
    zero.
    """
    scatter = lax.scatter_mul if x.dtype != np.bool_ else lax.scatter_min
    return _write(x, dim, index, src, mode, scatter)


@_prod.defjvp
def _prod_jvp(
    dim: int,
    mode: lax.GatherScatterMode,
    how: str,
    primals: tuple[Array, ...],
    tangents: tuple[Array, ...],
) -> tuple[Array, Array]:
    x, index, src = primals
    dx, _, dsrc = tangents
    out = _prod(x, index, src, dim, mode, how)
    one, zero = lax.full_like(x, 1), lax.full_like(src, 0)
    without_x = _prod(one, index, src, dim, mode, how)
    # the product of the other factors: if one factor is zero, it is the product without that one;
    # if more are, it is zero
    is_zero = lax.eq(src, zero)
    zeros = _add(lax.full_like(x, 0, np.int32), dim, index, promotion.cast(is_zero, np.int32), mode)
    single = lax.bitwise_and(is_zero, lax.eq(_read(zeros, dim, index, mode), np.int32(1)))
    filled = lax.select(is_zero, lax.full_like(src, 1), src)
    rest = _prod(x, index, lax.select(single, lax.full_like(src, 1), src), dim, mode, how)
    others = lax.select(
        single, _read(rest, dim, index, mode), lax.div(_read(out, dim, index, mode), filled)
    )
    return out, lax.add(
        lax.mul(without_x, dx), _add(lax.full_like(x, 0), dim, index, lax.mul(others, dsrc), mode)
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def _extremum(
    x: Array, index: Array, src: Array, dim: int, mode: lax.GatherScatterMode, how: str
) -> Array:
    """The largest (smallest) of x and all elements of src that go to its place; ties share the
    derivative.
    """
    return _write(x, dim, index, src, mode, lax.scatter_max if how == "amax" else lax.scatter_min)


@_extremum.defjvp
def _extremum_jvp(
    dim: int,
    mode: lax.GatherScatterMode,
    how: str,
    primals: tuple[Array, ...],
    tangents: tuple[Array, ...],
) -> tuple[Array, Array]:
    x, index, src = primals
    dx, _, dsrc = tangents
    out = _extremum(x, index, src, dim, mode, how)
    x_is = promotion.cast(lax.eq(x, out), x.dtype)
    src_is = promotion.cast(lax.eq(src, _read(out, dim, index, mode)), x.dtype)
    ties = lax.max(_add(x_is, dim, index, src_is, mode), lax.full_like(x, 1))
    moved = _add(lax.mul(x_is, dx), dim, index, lax.mul(src_is, dsrc), mode)
    return out, lax.div(moved, ties)


@lowering("aten.slice_scatter")
def aten_slice_scatter(
    x: Array,
    src: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None,
    SymInt step=1) -> Tensor
    """
    dim = promotion.wrap_dim(dim, x.ndim)
    n = x.shape[dim]
    start, end = slice_bounds(n, start, end, step)
    count = -(-(end - start) // step)
    src = aten_expand(promotion.cast(src, x.dtype), (*x.shape[:dim], count, *x.shape[dim + 1 :]))
    if not src.size or src.shape == x.shape:
        return src if src.shape == x.shape else x
    return _overwrite(x, src, dim, start, step)


@fused("dim", "start", "step")
def _overwrite(x: Array, src: Array, dim: int, start: int, step: int) -> Array:
    if step == 1:
        return overwrite(x, src, [start if d == dim else 0 for d in range(x.ndim)])
    n, count = x.shape[dim], src.shape[dim]
    hit = np.zeros(n, np.bool_)
    hit[start : start + (count - 1) * step + 1 : step] = True
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (start, n - start - (count - 1) * step - 1, step - 1)
    return lax.select(
        lax.broadcast_in_dim(hit, x.shape, (dim,)), lax.pad(src, np.zeros((), x.dtype), config), x
    )


@lowering("aten.select_scatter")
def aten_select_scatter(x: Array, src: Array, dim: int, index: int) -> Array:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    dim = promotion.wrap_dim(dim, x.ndim)
    index = select_index(x.shape, dim, index)
    return aten_slice_scatter(
        x,
        aten_unsqueeze(aten_expand(src, (*x.shape[:dim], *x.shape[dim + 1 :])), dim),
        dim,
        index,
        index + 1,
    )


@lowering("aten.diagonal_scatter")
def aten_diagonal_scatter(
    x: Array, src: Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Array:
    """diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) -> Tensor"""
    dim1, dim2 = promotion.wrap_dim(dim1, x.ndim), promotion.wrap_dim(dim2, x.ndim)
    m, n = x.shape[dim1], x.shape[dim2]
    rest = [d for d in range(x.ndim) if d not in (dim1, dim2)]
    size = diagonal_size(m, n, offset)
    src = aten_expand(promotion.cast(src, x.dtype), (*(x.shape[d] for d in rest), size))
    return _overwrite_diagonal(x, src, offset, dim1, dim2) if size else x


@fused("offset", "dim1", "dim2")
def _overwrite_diagonal(x: Array, src: Array, offset: int, dim1: int, dim2: int) -> Array:
    m, n = x.shape[dim1], x.shape[dim2]
    order = [*(d for d in range(x.ndim) if d not in (dim1, dim2)), dim1, dim2]
    hit = (
        lax.broadcast_in_dim(np.eye(m, n, offset, np.bool_), x.shape, (dim1, dim2))
        if dim1 < dim2
        else (lax.broadcast_in_dim(np.eye(m, n, offset, np.bool_).T, x.shape, (dim2, dim1)))
    )
    placed = aten_permute(place_diagonal(src, m, n, offset), [int(i) for i in np.argsort(order)])
    return lax.select(hit, placed, x)


@lowering("aten.as_strided_scatter")
def aten_as_strided_scatter(
    x: Array,
    src: Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Array:
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, SymInt?
    storage_offset=None) -> Tensor
    """
    index = strided_index(x.size, size, stride, storage_offset)
    src = aten_expand(promotion.cast(src, x.dtype), index.shape)
    out = _overwrite_places(
        lax.reshape(x, (x.size,)), lax.reshape(src, (src.size,)), index.reshape(-1)
    )
    return lax.reshape(out, x.shape)


@jax.custom_jvp
def _overwrite_places(flat: Array, src: Array, index: Array) -> Array:
    """flat with src written at index. In reverse mode only, as in PyTorch, flat's gradient is that
    of the overwritten elements.
    """
    return _put(flat, 0, index, src, SAFE)


def _at(x: Array, hit: Array) -> Array:
    return lax.select(hit, x, jnp.zeros_like(x))


@_overwrite_places.defjvp
def _overwrite_places_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    (flat, src, index), (dflat, dsrc, _) = primals, tangents
    hit = jnp.zeros(flat.shape, np.bool_).at[index].set(True)
    # forward, the rest of dflat is kept; in reverse, the cotangent of what was overwritten
    kept = with_cotangent(dflat, _at, hit) - with_cotangent(_at(dflat, hit), jnp.zeros_like)
    return _overwrite_places(flat, src, index), kept + _put(
        jnp.zeros_like(flat), 0, index, dsrc, SAFE
    )


@lowering("aten.select_backward")
def aten_select_backward(
    grad_output: Array, input_sizes: Sequence[int], dim: int, index: int
) -> Array:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    dim = promotion.wrap_dim(dim, len(input_sizes))
    index = select_index(input_sizes, dim, index)
    return aten_slice_backward(
        aten_unsqueeze(grad_output, dim), input_sizes, dim, index, index + 1, 1
    )


@lowering("aten.slice_backward")
def aten_slice_backward(
    grad_output: Array, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Array:
    """slice_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt start, SymInt end,
    SymInt step) -> Tensor
    """
    dim = promotion.wrap_dim(dim, len(input_sizes))
    n, count = input_sizes[dim], grad_output.shape[dim]
    if not grad_output.size:
        return lax.full(tuple(input_sizes), 0, grad_output.dtype)
    start, _ = slice_bounds(n, start, end, step)
    config = [(0, 0, 0)] * grad_output.ndim
    config[dim] = (start, n - start - (count - 1) * step - 1, step - 1)
    return _pad(grad_output, np.zeros((), grad_output.dtype), tuple(config))


_pad = fused("padding_config")(lax.pad)


@lowering("aten.diagonal_backward")
def aten_diagonal_backward(
    grad_output: Array, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Array:
    """diagonal_backward(Tensor grad_output, SymInt[] input_sizes, int offset, int dim1, int
    dim2) -> Tensor
    """
    return aten_diagonal_scatter(
        lax.full(tuple(input_sizes), 0, grad_output.dtype), grad_output, offset, dim1, dim2
    )
