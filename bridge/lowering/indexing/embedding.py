"""Embedding tables: lookup, bags of lookups, renormalization, one_hot,
and the backward operators.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.convert import dtypes
from bridge.lowering.common import promotion
from bridge.lowering.common.cotangents import with_cotangent
from bridge.lowering.common.loops import searchsorted
from bridge.lowering.common.promotion import constant
from bridge.lowering.common.provided import refuse
from bridge.lowering.indexing.indexing import CHECKED, OUT_OF_RANGE, SAFE, Place, in_range
from bridge.lowering.registry import lowering


def _rows(table_shape: tuple[int, ...], index: Array, mode: lax.GatherScatterMode) -> Place:
    return Place(table_shape, (0,), (index,), (mode,))


def _spread(per_index: Array, rows: Array) -> Array:
    """One number for each row, broadcast along the rows."""
    return lax.broadcast_in_dim(per_index, rows.shape, tuple(range(per_index.ndim)))


def _without(rows: Array, index: Array, padding_idx: int) -> Array:
    """The rows, with zeros for the padding index."""
    if padding_idx < 0:
        return rows
    return lax.select(
        _spread(lax.eq(index, lax.full_like(index, padding_idx)), rows),
        lax.full_like(rows, 0),
        rows,
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _embed(
    weight: Array, index: Array, scale: Array | None, mode: lax.GatherScatterMode, padding_idx: int
) -> Array:
    """Rows of weight. In reverse mode only, as in PyTorch, the padding row gets no gradient, and
    scale, if given, weighs each row.
    """
    return _rows(weight.shape, index, mode).read(weight)


@_embed.defjvp
def _embed_jvp(
    mode: lax.GatherScatterMode,
    padding_idx: int,
    primals: tuple[Array | None, ...],
    tangents: tuple[Array | None, ...],
) -> tuple[Array, Array]:
    weight, index, scale = primals

    rows = _rows(weight.shape, index, mode).read(tangents[0])
    if scale is not None:
        # a linear solve states a transpose of its own; PyTorch does not weigh the rows of a second
        # derivative
        rows = lax.custom_linear_solve(
            lambda x: x,
            rows,
            lambda _, x: x,
            lambda _, cotangent: cotangent * _spread(scale, cotangent),
        )
    if padding_idx >= 0:
        rows = with_cotangent(rows, functools.partial(_without, padding_idx=padding_idx), index)
    return _embed(weight, index, scale, mode, padding_idx), rows


@lowering("aten.embedding")
def aten_embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool
    scale_grad_by_freq=False, bool sparse=False) -> Tensor
    """
    if weight.ndim != 2:
        raise RuntimeError(f"'weight' must be 2-D, got {weight.ndim} dimensions")
    index, mode = in_range(indices, weight.shape[0], OUT_OF_RANGE)
    scale = _per_row(weight, index, mode) if scale_grad_by_freq else None
    if padding_idx < 0 and scale is None:
        return _rows(weight.shape, index, mode).read(weight)
    return _embed(weight, index, scale, mode, padding_idx)


def _per_row(weight: Array, index: Array, mode: lax.GatherScatterMode) -> Array:
    """One over the number of times that each index occurs."""
    place = _rows(weight.shape[:1], index, mode)
    counts = place.write(
        lax.full(weight.shape[:1], 0, weight.dtype),
        lax.full(index.shape, 1, weight.dtype),
        add=True,
    )
    return 1 / place.read(counts)


@lowering("aten.embedding_dense_backward")
def aten_embedding_dense_backward(
    grad_output: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    """embedding_dense_backward(Tensor grad_output, Tensor indices, SymInt num_weights, SymInt
    padding_idx, ...) -> Tensor
    """
    index, mode = in_range(indices, num_weights, OUT_OF_RANGE)
    zeros = lax.full((num_weights, *grad_output.shape[indices.ndim :]), 0, grad_output.dtype)
    if scale_grad_by_freq:
        grad_output = grad_output * _spread(_per_row(zeros, index, mode), grad_output)
    return _rows(zeros.shape, index, mode).write(
        zeros, _without(grad_output, index, padding_idx), add=True
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _renorm(
    weight: Array, index: Array, mode: lax.GatherScatterMode, max_norm: float, norm_type: float
) -> Array:
    """The rows at index scaled to a norm of at most max_norm; its derivative is the identity's,
    because PyTorch scales under no_grad.
    """
    place = _rows(weight.shape, index, mode)
    rows = place.read(weight)
    norm = jnp.linalg.norm(rows, norm_type, axis=1, keepdims=True)
    # several writes to one row write the same values, so their order does not matter
    return place.write(
        weight,
        promotion.cast(
            jnp.where(norm > max_norm, rows * (max_norm / (norm + 1e-7)), rows), weight.dtype
        ),
    )


_renorm.defjvp(
    lambda mode, max_norm, norm_type, primals, tangents: (
        _renorm(*primals, mode, max_norm, norm_type),
        tangents[0],
    )
)


@lowering("aten.embedding_renorm")
def aten_embedding_renorm(
    weight: Array, indices: Array, max_norm: float, norm_type: float
) -> Array:
    """embedding_renorm(Tensor self, Tensor indices, float max_norm, float norm_type) -> Tensor"""
    index, mode = in_range(lax.reshape(indices, (indices.size,)), weight.shape[0], OUT_OF_RANGE)
    return _renorm(weight, index, mode, max_norm, norm_type)


@lowering("aten.one_hot")
def aten_one_hot(x: Array, num_classes: int = -1) -> Array:
    """one_hot(Tensor self, int num_classes=-1) -> Tensor"""
    if x.dtype != np.int64:
        raise RuntimeError(
            "one_hot is only applicable to index tensor of type LongTensor, got "
            f"{dtypes.to_torch(x.dtype)}"
        )
    if num_classes < 0:
        values = promotion.concrete(x)
        if not values.size:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        num_classes = int(values.max()) + 1
    error = "Class values must be non-negative and smaller than num_classes ({size}), got {index}"
    x, _ = in_range(x, num_classes, error, kind=RuntimeError)
    return lax.convert_element_type(x[..., None] == constant(np.arange(num_classes)), np.int64)


SUM, MEAN, MAX = range(3)


@lowering("aten._embedding_bag", "aten._embedding_bag_forward_only")
def aten__embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, Array, Array, Array]:
    """_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, ...) -> (Tensor, Tensor,
    Tensor, Tensor)
    """
    if per_sample_weights is not None and mode != SUM:
        raise RuntimeError(
            "embedding_bag: per_sample_weights was not None: only supported for mode='sum'"
        )
    error = (
        "Index of input takes value {index} which is not in the valid range [0, "
        f"{weight.shape[0]})"
    )
    index, checked = in_range(indices, weight.shape[0], error, kind=RuntimeError)
    if offsets.size:
        refuse(
            offsets[0] != 0,
            "offsets[0] has to be 0, i.e., the first sequence in the mini-batch "
            "has to start from position 0",
        )
        refuse(
            offsets[-1] > indices.size,
            f"offsets[-1] can not be greater than input's length, {indices.size}",
        )
    bags, count = offsets.size - bool(include_last_offset), indices.size
    bag = _bag_of(indices, offsets[:bags])
    kept = (
        lax.ne(index, lax.full_like(index, padding_idx))
        if padding_idx >= 0
        else lax.full(index.shape, True, np.bool_)
    )
    # padding goes to a bag past the last one, which is dropped
    target = lax.select(
        kept, lax.convert_element_type(bag, np.int64), lax.full((count,), bags, np.int64)
    )
    place = _rows((bags, weight.shape[1]), target, CHECKED)
    size = _rows((bags,), target, CHECKED).write(
        lax.full((bags,), 0, np.int64), lax.full((count,), 1, np.int64), add=True
    )
    rows = _embed(
        weight, index, _per_row(weight, index, checked) if scale_grad_by_freq else None, checked, -1
    )
    kind = bag.dtype
    if mode == MAX:
        out, best = _largest(weight, rows, index, target, place, bags)
        return out, bag, promotion.cast(size, kind), promotion.cast(best, kind)
    if per_sample_weights is not None:
        rows = rows * _spread(promotion.cast(per_sample_weights, rows.dtype), rows)
    exact = promotion.opmath(weight.dtype)
    out = place.write(
        lax.full((bags, weight.shape[1]), 0, exact), promotion.cast(rows, exact), add=True
    )
    if mode == MEAN:
        out = out / _spread(promotion.cast(lax.max(size, np.int64(1)), exact), out)
    size = promotion.cast(size, kind)
    return promotion.cast(out, weight.dtype), bag, size, size


def _bag_of(indices: Array, offsets: Array) -> Array:
    """The bag of each index: the last bag that does not start after it."""
    at = lax.iota(np.int64, indices.size)
    bag = searchsorted(lax.convert_element_type(offsets, np.int64), at, side="right") - 1
    return promotion.cast(bag, promotion.result_dtype(indices, offsets))


def _largest(
    weight: Array, rows: Array, index: Array, target: Array, place: Place, bags: int
) -> tuple[Array, ...]:
    """The largest entries of each bag, column by column, and the row of weight that each came from
    (the first one if they tie).
    """
    fixed = lax.stop_gradient(rows)
    lowest = lax.full((bags, weight.shape[1]), -np.inf, weight.dtype)
    numbers, start = (
        lax.ScatterDimensionNumbers((1,), (0,), (0,)),
        lax.reshape(target, (*target.shape, 1)),
    )
    top = lax.scatter_max(lowest, start, fixed, numbers, mode=CHECKED)
    is_top = lax.eq(fixed, place.read(top))
    position = lax.broadcasted_iota(np.int64, rows.shape, 0)
    last = lax.full(top.shape, rows.shape[0], np.int64)
    first = lax.scatter_min(
        last,
        start,
        lax.select(is_top, position, lax.full_like(position, rows.shape[0])),
        numbers,
        mode=CHECKED,
    )
    column = lax.broadcasted_iota(np.int64, first.shape, 1)
    empty = lax.eq(first, last)
    if not rows.shape[0]:
        return lax.full(first.shape, 0, rows.dtype), lax.full_like(first, 0)
    first = lax.select(empty, lax.full_like(first, 0), first)
    values = Place(rows.shape, (0, 1), (first, column), (SAFE, SAFE)).read(rows)
    best = Place(index.shape, (0,), (first,), (SAFE,)).read(
        lax.convert_element_type(index, np.int64)
    )
    return lax.select(empty, lax.full_like(values, 0), values), lax.select(
        empty, lax.full_like(best, 0), best
    )


@lowering("aten._embedding_bag_backward")
def aten__embedding_bag_backward(
    grad: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    """_embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, ..., int
    padding_idx=-1) -> Tensor
    """
    # PyTorch's kernel leaves it out if its own forward did not need it
    if indices.size and not offset2bag.size:
        offset2bag = _bag_of(indices, offsets[: grad.shape[0]])
    return aten__embedding_bag_dense_backward(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@lowering("aten._embedding_bag_dense_backward")
def aten__embedding_bag_dense_backward(
    grad: Array,
    indices: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    """_embedding_bag_dense_backward(Tensor grad, Tensor indices, Tensor offset2bag, Tensor
    bag_size, ...) -> Tensor
    """
    if mode == MAX:
        zeros = lax.full((num_weights, grad.shape[1]), 0, grad.dtype)
        column = lax.broadcasted_iota(maximum_indices.dtype, maximum_indices.shape, 1)
        taken = lax.select(
            _spread(lax.gt(bag_size, lax.full_like(bag_size, 0)), grad),
            grad,
            lax.full_like(grad, 0),
        )
        return Place(zeros.shape, (0, 1), (maximum_indices, column), (SAFE, SAFE)).write(
            zeros, taken, add=True
        )
    if mode == MEAN:
        grad = grad / _spread(
            promotion.cast(lax.max(bag_size, lax.full_like(bag_size, 1)), grad.dtype), grad
        )
    rows = _rows(grad.shape, offset2bag, SAFE).read(grad)
    if per_sample_weights is not None:
        rows = rows * _spread(per_sample_weights, rows)
    return aten_embedding_dense_backward(
        rows, indices, num_weights, padding_idx, scale_grad_by_freq
    )


@lowering("aten._embedding_bag_per_sample_weights_backward")
def aten__embedding_bag_per_sample_weights_backward(
    grad: Array,
    weight: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    mode: int,
    padding_idx: int = -1,
) -> Array:
    """_embedding_bag_per_sample_weights_backward(Tensor grad, Tensor weight, Tensor indices, Tensor
    offsets, ...) -> Tensor
    """
    index, checked = in_range(indices, weight.shape[0], OUT_OF_RANGE)
    if indices.size and not offset2bag.size:
        offset2bag = _bag_of(indices, offsets[: grad.shape[0]])
    rows = _without(_rows(weight.shape, index, checked).read(weight), index, padding_idx)
    return lax.reduce_sum(rows * _rows(grad.shape, offset2bag, SAFE).read(grad), (1,))
