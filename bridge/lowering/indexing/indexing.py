"""x[indices] and x[indices] = values with tensors, index_select and its kin, take and put. Each is
one gather or scatter.

Indices are checked and raise IndexError as in PyTorch: now if they are known, else when the program
has run (see common/provided.py). If nothing checks them (inside a loop, or for jax.Arrays), a read
out of range gives NaN (the least integer) and a write out of range is dropped. gather and scatter
along a dim live in scattering.py, embedding tables in embedding.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from bridge.convert import dtypes
from bridge.lowering.common import promotion
from bridge.lowering.common.in_place import read_first
from bridge.lowering.common.promotion import constant, fused
from bridge.lowering.common.provided import Range, check
from bridge.lowering.registry import lowering
from bridge.lowering.tensors.creation import number
from bridge.lowering.tensors.shape import aten_expand

SAFE, CHECKED = lax.GatherScatterMode.PROMISE_IN_BOUNDS, lax.GatherScatterMode.FILL_OR_DROP


def known(x: Array) -> np.ndarray | None:
    """The values of an array if they are known now, else None (under vmap and jit)."""
    try:
        return promotion.concrete(x)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return None


#: PyTorch's messages, formatted with the offending index
OUT_OF_RANGE = "index out of range in self"
OUT_OF_BOUNDS = "index {index} is out of bounds for dimension {dim} with size {size}"


def in_range(
    index: Array,
    n: int,
    error: str,
    *,
    dim: int = 0,
    kind: type[Exception] = IndexError,
    wrap: bool = False,
) -> tuple[Array, lax.GatherScatterMode]:
    """Check an index into n places; returns it with its gather mode. wrap: negative indices count
    from the end.

    error is formatted with {index}, the offending one, {dim} and {size}.
    """
    if not index.size:
        return index, SAFE
    where = Range(
        -n if wrap else 0, n, error.replace("{dim}", str(dim)).replace("{size}", str(n)), kind
    )
    values = known(index)
    if values is None:
        index = check(index, where)
        return (_from_end(index, n) if wrap else index), CHECKED
    low = values.min()
    where.judge(low, values.max())
    return (constant(np.where(values < 0, values + n, values)) if low < 0 else index), SAFE


@fused("n")
def _from_end(index: Array, n: int) -> Array:
    return lax.select(
        lax.lt(index, lax.full_like(index, 0)), lax.add(index, lax.full_like(index, n)), index
    )


class Place:
    """The elements that an advanced index reads or writes: indices of one shape select along dims,
    all other dimensions are kept whole.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dims: Sequence[int],
        indices: Sequence[Any],
        modes: Sequence[Any],
        front: bool = False,
    ) -> None:
        self.dims, self.indices = tuple(dims), tuple(indices)
        self.mode = SAFE if all(m is SAFE for m in modes) else CHECKED
        # the indices' dimensions take the place of the first indexed one, or come first if the
        # indexed ones are not adjacent
        batch = self.indices[0].shape
        self.at = 0 if front else self.dims[0]
        rest = [n for d, n in enumerate(shape) if d not in self.dims]
        self.result = (*rest[: self.at], *batch, *rest[self.at :])

    def read(self, x: Array) -> Array:
        # x may be empty if there are no lanes; otherwise the check of the index raises
        if not (math.prod(self.result) and x.size):
            return lax.full(self.result, 0, x.dtype)
        return _read(x, self.indices, dims=self.dims, at=self.at, mode=self.mode)

    def write(self, x: Array, values: Array, *, add: bool = False) -> Array:
        """x with values, which have the shape of the read result, written or added there."""
        if not (math.prod(self.result) and x.size):
            return x
        return _write(x, self.indices, values, dims=self.dims, at=self.at, mode=self.mode, add=add)


def _start(indices: Sequence[Array], at: int, rank: int) -> tuple[Array, tuple[int, ...]]:
    """The indices as one array of index vectors,
    and the dimensions of the result that come from x.
    """
    batch = indices[0].shape
    columns = [lax.reshape(i, (*batch, 1)) for i in indices]
    start = columns[0] if len(columns) == 1 else lax.concatenate(columns, len(batch))
    return start, tuple(
        d for d in range(rank - len(indices) + len(batch)) if not at <= d < at + len(batch)
    )


@fused("dims", "at", "mode")
def _read(
    x: Array,
    indices: tuple[Array, ...],
    *,
    dims: tuple[int, ...],
    at: int,
    mode: lax.GatherScatterMode,
) -> Array:
    start, window = _start(indices, at, x.ndim)
    sizes = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    return lax.gather(x, start, lax.GatherDimensionNumbers(window, dims, dims), sizes, mode=mode)


@fused("dims", "at", "mode", "add")
def _write(
    x: Array,
    indices: tuple[Array, ...],
    values: Array,
    *,
    dims: tuple[int, ...],
    at: int,
    mode: lax.GatherScatterMode,
    add: bool,
) -> Array:
    start, window = _start(indices, at, x.ndim)
    numbers = lax.ScatterDimensionNumbers(window, dims, dims)
    values = read_first(values, x)
    if add:
        # a sum of bools is their disjunction
        return (lax.scatter_add if x.dtype != np.bool_ else lax.scatter_max)(
            x, start, values, numbers, mode=mode
        )
    # if several writes go to one place, PyTorch does not define which one stays, and its gradient
    # gives each the whole cotangent, which is JAX's rule for unique indices
    return lax.scatter(x, start, values, numbers, mode=mode, unique_indices=True)


def along(x: Array, dim: int, index: Array, error: str, *, wrap: bool = False) -> Place:
    """The place of one index on one dimension."""
    index, mode = in_range(index, x.shape[dim], error, dim=dim, wrap=wrap)
    return Place(x.shape, (dim,), (index,), (mode,))


def _is_mask(index: Array) -> bool:
    return index is not None and index.dtype in (np.bool_, np.uint8)


def _expand_masks(shape: Sequence[int], indices: Sequence[Any]) -> list[Array]:
    """Boolean masks replaced by the positions where they are true; their values must be known."""
    out: list[Any] = []
    for index in indices:
        if not _is_mask(index):
            if index is not None and index.dtype not in (np.int64, np.int32):
                raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
            out.append(index)
            continue
        _check_mask(shape, index, len(out))
        out += [constant(p) for p in np.nonzero(promotion.concrete(index))]
    if len(out) > len(shape):
        raise IndexError(f"too many indices for tensor of dimension {len(shape)} (got {len(out)})")
    return out


def _check_mask(shape: Sequence[int], mask: Array, at: int) -> None:
    if tuple(shape[at : at + mask.ndim]) != mask.shape:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} at index {at} does not match the shape of "
            f"the indexed tensor {list(shape)} at index {at}"
        )


def _place(x: Array, indices: Sequence[Any]) -> Place | None:
    """The place of a list of indices, which has None for dimensions that are kept whole; None if
    all are.
    """
    indices = _expand_masks(x.shape, indices)
    dims = [d for d, i in enumerate(indices) if i is not None]
    if not dims:
        return None
    pairs = [in_range(indices[d], x.shape[d], OUT_OF_BOUNDS, dim=d, wrap=True) for d in dims]
    shapes = [i.shape for i, _ in pairs]
    try:
        batch = lax.broadcast_shapes(*shapes)
    except ValueError:
        listed = ", ".join(str(list(s)) for s in shapes)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {listed}"
        ) from None
    arrays = [
        aten_expand(promotion.cast(i, np.int64) if len(pairs) > 1 else i, batch) for i, _ in pairs
    ]
    front = dims[-1] - dims[0] + 1 != len(dims)
    return Place(x.shape, dims, arrays, [mode for _, mode in pairs], front)


@lowering("aten.index.Tensor", "aten._unsafe_index.Tensor")
def aten_index(x: Array, indices: Sequence[Array | None]) -> Array:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
    place = _place(x, indices)
    return x if place is None else place.read(x)


@lowering(
    "aten.index_put", "aten._unsafe_index_put", "aten._index_put_impl", apart=("indices", "values")
)
def aten_index_put(
    x: Array,
    indices: Sequence[Array | None],
    values: Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Array:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor"""
    masks = [d for d, i in enumerate(indices) if i is not None]
    only_mask = len(masks) == 1 and _is_mask(indices[masks[0]])
    if values.dtype != x.dtype:
        if values.ndim or not only_mask:
            raise RuntimeError(
                "Index put requires the source and destination dtypes match, got "
                f"{dtypes.to_torch(x.dtype)} for the destination and "
                f"{dtypes.to_torch(values.dtype)} for the source."
            )
        values = promotion.cast(values, x.dtype)
    if only_mask:
        done = _put_masked(x, masks[0], indices[masks[0]], values, accumulate)
        if done is not None:
            return done
    place = _place(x, indices)
    if place is None:
        return x + aten_expand(values, x.shape) if accumulate else aten_expand(values, x.shape)
    return place.write(x, _fit(values, place.result), add=accumulate)


def _fit(values: Array, shape: tuple[int, ...]) -> Array:
    try:
        return aten_expand(values, shape)
    except RuntimeError:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to "
            f"indexing result of shape {list(shape)}"
        ) from None


def _put_masked(x: Array, at: int, mask: Array, values: Array, accumulate: bool) -> Array | None:
    """x[:, mask] = values without a shape that depends on the mask; None if values must be counted
    and the mask is known.
    """
    _check_mask(x.shape, mask, at)
    last = at + mask.ndim
    tail = x.ndim - last
    count = values.shape[-tail - 1] if values.ndim > tail else 1
    if not mask.ndim or (count != 1 and known(mask) is not None):
        return None
    if not count:
        return x
    if count != 1:
        values = _fit(values, (*x.shape[:at], count, *x.shape[last:]))
    else:
        # a single value, or row of values, is broadcast along the mask's dimensions
        lead = values.shape[: max(values.ndim - tail - 1, 0)]
        ones = (1,) * mask.ndim if values.ndim > tail else ()
        values = _fit(
            lax.reshape(
                values, (*lead, *ones, *values.shape[values.ndim - min(tail, values.ndim) :])
            ),
            x.shape,
        )
    return _choose(x, mask, values, at, count, accumulate)


@fused("at", "count", "accumulate")
def _choose(x: Array, mask: Array, values: Array, at: int, count: int, accumulate: bool) -> Array:
    mask = mask if mask.dtype == np.bool_ else lax.ne(mask, lax.full_like(mask, 0))
    if count != 1:
        # the k-th true element of the mask takes the k-th value; too few values read as NaN
        values = lax.reshape(
            Place(values.shape, (at,), (mask_rank(mask),), (CHECKED,)).read(values), x.shape
        )
    chosen = lax.broadcast_in_dim(mask, x.shape, tuple(range(at, at + mask.ndim)))
    if not accumulate:
        return lax.select(chosen, values, x)
    return lax.select(
        chosen, lax.bitwise_or(x, values) if x.dtype == np.bool_ else lax.add(x, values), x
    )


def mask_rank(mask: Array) -> Array:
    """For each element of a flattened mask, the number of true elements before it."""
    flat = lax.convert_element_type(lax.reshape(mask, (mask.size,)), np.int32)
    return lax.max(lax.cumsum(flat) - np.int32(1), np.int32(0))


def _flat_index(index: Array) -> Array:
    if index.ndim > 1:
        raise IndexError(f"index: expected a vector, got {index.ndim} dimensions")
    return index if index.ndim else lax.reshape(index, (1,))


def _as_vector(x: Array) -> Array:
    return x if x.ndim else lax.reshape(x, (1,))


@lowering("aten.index_select", apart=("self", "index"))
def aten_index_select(x: Array, dim: int, index: Array) -> Array:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    dim = promotion.wrap_dim(dim, x.ndim)
    out = along(_as_vector(x), dim, _flat_index(index), OUT_OF_RANGE).read(_as_vector(x))
    return out if x.ndim else lax.reshape(out, ())


def _check_source(name: str, x: Array, dim: int, index: Array, source: Array) -> None:
    want = (*x.shape[:dim], index.size, *x.shape[dim + 1 :])
    if source.dtype != x.dtype:
        raise RuntimeError(
            f"{name}: self ({x.dtype}) and source ({source.dtype}) expected to have the same dtype"
        )
    if (source.ndim and x.ndim and source.shape != want) or (
        name == "index_add" and source.ndim != x.ndim
    ):
        raise RuntimeError(f"{name}: source: expected shape {list(want)}, got {list(source.shape)}")


def index_write(name: str, x: Array, dim: int, index: Array, source: Array, *, add: bool) -> Array:
    """x with the slices of source written, or added, at index along dim."""
    dim = promotion.wrap_dim(dim, x.ndim)
    index, base = _flat_index(index), _as_vector(x)
    _check_source(name, x, dim, index, source)
    place = along(base, dim, index, OUT_OF_RANGE if add else f"{name}(): {OUT_OF_BOUNDS}")
    return lax.reshape(place.write(base, lax.reshape(source, place.result), add=add), x.shape)


@lowering("aten.index_add", apart=("index", "source"))
def aten_index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: Any = 1) -> Array:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    source = source if alpha == 1 else source * number(alpha, source.dtype)
    return index_write("index_add", x, dim, index, source, add=True)


@lowering("aten.index_copy", apart=("index", "source"))
def aten_index_copy(x: Array, dim: int, index: Array, source: Array) -> Array:
    """index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor"""
    return index_write("index_copy_", x, dim, index, source, add=False)


@lowering("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def aten_index_fill(x: Array, dim: int, index: Array, value: Any) -> Array:
    """index_fill.int_Tensor(Tensor self, int dim, Tensor index, Tensor value) -> Tensor"""
    if promotion.is_array(value) and value.ndim:
        raise RuntimeError(
            "index_fill_ only supports a 0-dimensional value tensor, but got tensor with "
            f"{value.ndim} dimension(s)."
        )
    dim = promotion.wrap_dim(dim, x.ndim)
    base = _as_vector(x)
    index, mode = in_range(_flat_index(index), base.shape[dim], OUT_OF_BOUNDS, dim=dim, wrap=True)
    value = promotion.cast(value, x.dtype) if promotion.is_array(value) else number(value, x.dtype)
    return lax.reshape(_fill_at(base, index, value, dim, mode), x.shape)


@fused("dim", "mode")
def _fill_at(x: Array, index: Array, value: Array, dim: int, mode: lax.GatherScatterMode) -> Array:
    # through a mask, so that an index that occurs twice counts once in the gradient of value
    hit = lax.full((x.shape[dim],), False, np.bool_)
    place = Place(hit.shape, (0,), (index,), (mode,))
    hit = place.write(hit, lax.full(place.result, True, np.bool_))
    return lax.select(
        lax.broadcast_in_dim(hit, x.shape, (dim,)), lax.broadcast_in_dim(value, x.shape, ()), x
    )


_TRIED = "out of range: tried to access index {index} on a tensor of {size} elements."


def _flat_place(x: Array, index: Array) -> tuple[Any, Place]:
    flat = lax.reshape(x, (x.size,))
    return flat, along(flat, 0, index, _TRIED, wrap=True)


@lowering("aten.take", apart=("self", "index"))
def aten_take(x: Array, index: Array) -> Array:
    """take(Tensor self, Tensor index) -> Tensor"""
    flat, place = _flat_place(x, index)
    return place.read(flat)


@lowering("aten.put", apart=("index", "source"))
def aten_put(x: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    """put(Tensor self, Tensor index, Tensor source, bool accumulate=False) -> Tensor"""
    if source.size != index.size:
        raise IndexError(
            "put_(): Expected source and index to have the same number of elements, but got "
            f"{source.size} and {index.size}"
        )
    if source.dtype != x.dtype:
        raise RuntimeError(
            f"put_(): self and source expected to have the same dtype, but got {x.dtype} and "
            f"{source.dtype}"
        )
    flat, place = _flat_place(x, index)
    return lax.reshape(place.write(flat, lax.reshape(source, index.shape), add=accumulate), x.shape)
