"""Views and rearrangements: reshape, permute, slice, split, cat, roll, diagonal, as_strided. Pure
functions of arrays.

Each view has its inverse beside it: the base with another value in the place of the view. Scatters
are in scattering.py, padding in pads.py, tril and triu in creation.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from bridge.convert import dtypes
from bridge.lowering.common import promotion
from bridge.lowering.common.in_place import overwrite, read_first
from bridge.lowering.common.promotion import fused
from bridge.lowering.registry import Part, lowering

# lax's shape primitives with their rules cached for every transform, which halves the time of
# tracing and of un-jitted calls
reshape = fused("new_sizes")(lax.reshape)
permute = fused("permutation")(lax.transpose)
squeeze = fused("dimensions")(lax.squeeze)
broadcast = fused("shape", "broadcast_dimensions")(lax.broadcast_in_dim)
cut = fused("start_indices", "limit_indices", "strides")(lax.slice)
split = fused("sizes", "axis")(lax.split)
join = fused("dimension")(lax.concatenate)
reverse = fused("dimensions")(lax.rev)


def infer_size(size: Sequence[int], numel: int) -> tuple[int, ...]:
    """The sizes with at most one -1 resolved; RuntimeError if they do not hold numel elements."""
    size = tuple(int(s) for s in size)
    if -1 in size:
        known = math.prod(s for s in size if s != -1)
        if size.count(-1) > 1:
            raise RuntimeError("size: only one dimension can be inferred")
        if known == 0:
            raise RuntimeError(
                f"cannot reshape tensor of 0 elements into shape {list(size)}: the unspecified "
                "dimension is ambiguous"
            )
        if numel % known == 0:
            size = tuple(numel // known if s == -1 else s for s in size)
    if math.prod(size) != numel or min(size, default=0) < 0:
        raise RuntimeError(f"shape '{list(size)}' is invalid for input of size {numel}")
    return size


def _write_reshaped(base: Array, value: Array, *_: Any, **__: Any) -> Array:
    return lax.reshape(value, base.shape)


_RESHAPES = (
    "aten.view",
    "aten.view_copy",
    "aten.reshape",
    "aten._unsafe_view",
    "aten._reshape_copy",
    "aten._view_copy",
)


@lowering(*_RESHAPES, view_inverse=_write_reshaped)
def aten_view(x: Array, size: Sequence[int]) -> Array:
    """view(Tensor(a) self, SymInt[] size) -> Tensor(a)"""
    size = infer_size(size, x.size)
    return x if size == x.shape else reshape(x, size)


@lowering("aten._reshape_alias", "aten._reshape_alias_copy", view_inverse=_write_reshaped)
def aten__reshape_alias(x: Array, size: Sequence[int], stride: Sequence[int]) -> Array:
    """_reshape_alias(Tensor(a) self, SymInt[] size, SymInt[] stride) -> Tensor(a)"""
    return aten_view(x, size)


@jax.custom_jvp
def _of_bits(base: Array, value: Array) -> Array:
    return aten_view_dtype(value, dtypes.to_torch(base.dtype))


# as in PyTorch, whose autograd does not see a write through a view of another dtype
_of_bits.defjvp(lambda primals, tangents: (_of_bits(*primals), tangents[0]))


def _write_bits(base: Array, value: Array, dtype: torch.dtype) -> Array:
    return value if value.dtype == base.dtype else _of_bits(base, value)


@lowering("aten.view.dtype", "aten.view_copy.dtype", view_inverse=_write_bits)
def aten_view_dtype(x: Array, dtype: torch.dtype) -> Array:
    """view.dtype(Tensor(a) self, ScalarType dtype) -> Tensor(a)"""
    target = promotion.jdtype(dtype, x.dtype)
    old, new = np.dtype(x.dtype).itemsize, target.itemsize
    if target == x.dtype:
        return x
    if old != new and not x.ndim:
        raise RuntimeError(
            "self.dim() cannot be 0 to view Tensor as a dtype of a different element size"
        )
    if new > old and x.shape[-1] * old % new:
        raise RuntimeError(
            f"self.size(-1) must be divisible by {new // old} to view {x.dtype} as {dtype}, but "
            f"got {x.shape[-1]}"
        )
    shape = x.shape if old == new else (*x.shape[:-1], x.shape[-1] * old // new)
    if promotion.is_complex(x):
        x = aten_view_as_real(x)
    elif x.dtype == np.bool_:
        x = lax.convert_element_type(x, np.uint8)
    # rows of real numbers, regrouped if the widths differ: the bits of one wide number are a row of
    # narrow ones
    part = promotion.real_dtype(target)
    wide = part.itemsize // np.dtype(x.dtype).itemsize
    x = lax.reshape(x, (x.size // wide, wide) if wide > 1 else (x.size,))
    x = lax.bitcast_convert_type(x, np.uint8 if part == np.bool_ else part)
    if target != part:
        return aten_view_as_complex(lax.reshape(x, (*shape, 2)))
    x = lax.reshape(x, shape)
    return lax.convert_element_type(x, np.bool_) if target == np.bool_ else x


@lowering("aten.resize")
def aten_resize(
    x: Array, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> Array:
    """resize(Tensor self, SymInt[] size, *, MemoryFormat? memory_format=None) -> Tensor"""
    numel = math.prod(size)
    flat = lax.reshape(x, (x.size,))
    # elements that PyTorch leaves uninitialized are zero
    flat = (
        _slice(flat, 0, 0, numel)
        if numel <= x.size
        else lax.pad(flat, np.zeros((), x.dtype), [(0, numel - x.size, 0)])
    )
    return lax.reshape(flat, tuple(size))


def _write_permuted(base: Array, value: Array, dims: Sequence[int]) -> Array:
    return lax.transpose(value, tuple(np.argsort([d % base.ndim for d in dims])))


@lowering("aten.permute", "aten.permute_copy", view_inverse=_write_permuted)
def aten_permute(x: Array, dims: Sequence[int]) -> Array:
    """permute(Tensor(a) self, int[] dims) -> Tensor(a)"""
    if len(dims) != x.ndim:
        raise RuntimeError(
            f"permute(): dims: expected {x.ndim} dimensions for a tensor of "
            f"that many, got {list(dims)}"
        )
    dims = promotion.wrap_dims(dims, x.ndim) if x.ndim else ()
    return x if dims == tuple(range(x.ndim)) else permute(x, dims)


@lowering(
    "aten.transpose.int",
    "aten.transpose_copy.int",
    view_inverse=lambda base, value, *dims: aten_transpose(value, *dims),
)
def aten_transpose(x: Array, dim0: int, dim1: int) -> Array:
    """transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)"""
    dim0, dim1 = promotion.wrap_dim(dim0, x.ndim), promotion.wrap_dim(dim1, x.ndim)
    if dim0 == dim1:
        return x
    order = list(range(x.ndim))
    order[dim0], order[dim1] = dim1, dim0
    return permute(x, tuple(order))


@lowering("aten.t", "aten.t_copy", view_inverse=lambda base, value: aten_t(value))
def aten_t(x: Array) -> Array:
    """t(Tensor(a) self) -> Tensor(a)"""
    if x.ndim > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {x.ndim}D")
    return permute(x, (1, 0)) if x.ndim == 2 else x


_SQUEEZES = tuple(
    f"aten.{name}{kind}" for name in ("squeeze", "squeeze_copy") for kind in ("", ".dim", ".dims")
)


@lowering(*_SQUEEZES, view_inverse=_write_reshaped)
def aten_squeeze(x: Array, dim: int | Sequence[int] | None = None) -> Array:
    """squeeze.dims(Tensor(a) self, int[] dim) -> Tensor(a)"""
    dims = (
        range(x.ndim)
        if dim is None
        else ()
        if not isinstance(dim, int) and not len(dim)
        else promotion.wrap_dims(dim, x.ndim)
    )
    ones = tuple(d for d in dims if x.shape[d] == 1)
    return squeeze(x, ones) if ones else x


@lowering("aten.unsqueeze", "aten.unsqueeze_copy", view_inverse=_write_reshaped)
def aten_unsqueeze(x: Array, dim: int) -> Array:
    """unsqueeze(Tensor(a) self, int dim) -> Tensor(a)"""
    dim = promotion.wrap_dim(dim, x.ndim + 1)
    return reshape(x, (*x.shape[:dim], 1, *x.shape[dim:]))


def _write_expanded(
    base: Array, value: Array, size: Sequence[int], *, implicit: bool = False
) -> Array:
    if value.size != base.size:
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a "
            "single memory location. Please clone() the tensor before performing the operation."
        )
    return lax.reshape(value, base.shape)


@lowering("aten.expand", "aten.expand_copy", view_inverse=_write_expanded)
def aten_expand(x: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    """expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)"""
    new = len(size) - x.ndim
    if new < 0:
        raise RuntimeError(
            f"expand: the number of sizes provided ({len(size)}) must be at least the number of "
            f"dimensions ({x.ndim})"
        )
    shape = tuple(int(s) for s in size[:new]) + tuple(
        n if s == -1 else int(s) for s, n in zip(size[new:], x.shape, strict=True)
    )
    if shape == x.shape:
        return x
    if min(shape) < 0 or any(n not in (1, s) for s, n in zip(shape[new:], x.shape, strict=True)):
        raise RuntimeError(
            f"The expanded size {list(size)} must match the existing size {list(x.shape)} at "
            "non-singleton dimensions"
        )
    return broadcast(x, shape, tuple(range(new, len(shape))))


def slice_bounds(n: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """start and end as torch clamps them for a dimension of size n."""
    if step <= 0:
        raise RuntimeError("slice step must be positive")
    start = 0 if start is None else start + n if start < 0 else start
    end = n if end is None else end + n if end < 0 else end
    start = min(max(start, 0), n)
    return start, min(max(end, start), n)


def _write_slice(
    base: Array,
    value: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    if value.shape == base.shape:
        return value
    dim %= base.ndim
    if step != 1:
        return base.at[(slice(None),) * dim + (slice(start, end, step),)].set(
            read_first(value, base)
        )
    start, _ = slice_bounds(base.shape[dim], start, end, step)
    return overwrite(base, value, [start if d == dim else 0 for d in range(base.ndim)])


@lowering("aten.slice.Tensor", "aten.slice_copy.Tensor", view_inverse=_write_slice)
def aten_slice(
    x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    """slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt
    step=1) -> Tensor(a)
    """
    if not x.ndim:
        raise RuntimeError("slice() cannot be applied to a 0-dim tensor.")
    dim = promotion.wrap_dim(dim, x.ndim)
    start, end = slice_bounds(x.shape[dim], start, end, step)
    return _slice(x, dim, start, end, step)


def _slice(x: Array, dim: int, start: int, end: int, step: int = 1) -> Array:
    if start == 0 and end == x.shape[dim] and step == 1:
        return x
    low, high, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    low[dim], high[dim], steps[dim] = start, end, step
    return cut(x, tuple(low), tuple(high), tuple(steps) if step != 1 else None)


@lowering("aten.narrow_copy")
def aten_narrow_copy(x: Array, dim: int, start: int, length: int) -> Array:
    """narrow_copy(Tensor self, int dim, SymInt start, SymInt length) -> Tensor"""
    if not x.ndim:
        raise RuntimeError("narrow() cannot be applied to a 0-dim tensor.")
    if dim >= x.ndim:
        raise RuntimeError(f"dim: expected a value in [{-x.ndim}, {x.ndim - 1}], got {dim}")
    dim = promotion.wrap_dim(dim, x.ndim)
    n = x.shape[dim]
    if not -n <= start <= n:
        raise IndexError(f"start: expected a value in [{-n}, {n}], got {start}")
    start += n if start < 0 else 0
    if length < 0 or start + length > n:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({n}).")
    return _slice(x, dim, start, start + length)


def _write_selected(base: Array, value: Array, dim: int, index: int) -> Array:
    dim %= base.ndim
    index = select_index(base.shape, dim, index)
    return overwrite(
        base, lax.expand_dims(value, (dim,)), [index if d == dim else 0 for d in range(base.ndim)]
    )


@lowering("aten.select.int", "aten.select_copy.int", view_inverse=_write_selected)
def aten_select(x: Array, dim: int, index: int) -> Array:
    """select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)"""
    if not x.ndim:
        raise IndexError("select() cannot be applied to a 0-dim tensor.")
    dim = promotion.wrap_dim(dim, x.ndim)
    index = select_index(x.shape, dim, index)
    return _select(x, dim, index)


@fused("dim", "index")
def _select(x: Array, dim: int, index: int) -> Array:
    return lax.squeeze(lax.slice_in_dim(x, index, index + 1, axis=dim), (dim,))


def select_index(shape: Sequence[int], dim: int, index: int) -> int:
    """A select index made non-negative; raises torch's IndexError if it is out of range."""
    if not -shape[dim] <= index < shape[dim]:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size "
            f"{list(shape)} at dimension {dim}"
        )
    return int(index) % shape[dim]


def _split(x: Array, sizes: Sequence[int], dim: int) -> list[Array]:
    # one primitive, whose transpose is one concatenation
    return [x] if len(sizes) == 1 else list(split(x, tuple(sizes), dim)) if sizes else []


def _slices_of_sizes(shape: Sequence[int], sizes: Sequence[int], dim: int = 0) -> list[Part]:
    ends = itertools.accumulate(sizes)
    return [
        ("aten.slice.Tensor", (promotion.wrap_dim(dim, len(shape)), end - size, end))
        for size, end in zip(sizes, ends, strict=True)
    ]


def _equal_sizes(n: int, split_size: int) -> list[int]:
    count = max(-(-n // split_size), 1) if split_size else 1
    return [min(split_size, n - i * split_size) for i in range(count)] if count > 1 else [n]


def _slices_of_size(shape: Sequence[int], split_size: int, dim: int = 0) -> list[Part]:
    return _slices_of_sizes(shape, _equal_sizes(shape[dim], split_size), dim)


@lowering(
    "aten.split.Tensor",
    "aten.split_copy.Tensor",
    "aten.unsafe_split.Tensor",
    view_parts=_slices_of_size,
)
def aten_split(x: Array, split_size: int, dim: int = 0) -> list[Array]:
    """split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]"""
    if not x.ndim:
        raise RuntimeError("split expects at least a 1-dimensional tensor")
    dim = promotion.wrap_dim(dim, x.ndim)
    n = x.shape[dim]
    if split_size < 0 or (split_size == 0 and n):
        raise RuntimeError(
            "split expects split_size be non-negative, and 0 only for an empty dimension, but got "
            f"split_size={split_size}"
        )
    return _split(x, _equal_sizes(n, split_size), dim)


_SPLITS = (
    "aten.split.sizes",
    "aten.split_with_sizes",
    "aten.split_with_sizes_copy",
    "aten.unsafe_split_with_sizes",
)


@lowering(*_SPLITS, view_parts=_slices_of_sizes)
def aten_split_with_sizes(x: Array, split_sizes: Sequence[int], dim: int = 0) -> list[Array]:
    """split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]"""
    dim = promotion.wrap_dim(dim, x.ndim)
    if min(split_sizes, default=0) < 0 or sum(split_sizes) != x.shape[dim]:
        raise RuntimeError(
            "split_with_sizes expects split_sizes to be non-negative and to sum exactly to "
            f"{x.shape[dim]} (input tensor's size at dimension {dim}), but got "
            f"split_sizes={list(split_sizes)}"
        )
    return _split(x, [int(s) for s in split_sizes], dim)


def _selects(shape: Sequence[int], dim: int = 0) -> list[Part]:
    dim = promotion.wrap_dim(dim, len(shape))
    return [("aten.select.int", (dim, i)) for i in range(shape[dim])]


@lowering("aten.unbind.int", "aten.unbind_copy.int", view_parts=_selects)
def aten_unbind(x: Array, dim: int = 0) -> list[Array]:
    """unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]"""
    if not x.ndim:
        raise IndexError("Dimension specified as 0 but tensor has no dimensions")
    dim = promotion.wrap_dim(dim, x.ndim)
    return _unbind(x, dim) if x.shape[dim] else []


@fused("dim")
def _unbind(x: Array, dim: int) -> list[Array]:
    return [lax.squeeze(part, (dim,)) for part in lax.split(x, (1,) * x.shape[dim], dim)]


@lowering("aten.cat", "aten.concat", apart=("tensors",))
def aten_cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""
    if not len(tensors):
        raise ValueError("torch.cat(): expected a non-empty list of Tensors")
    # an empty one-dimensional tensor is skipped, whatever the others' shape; its dtype counts
    kept = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    dtype = promotion.result_dtype(*tensors)
    if any(not x.ndim for x in kept):
        raise RuntimeError("zero-dimensional tensor cannot be concatenated")
    dim = promotion.wrap_dim(dim, kept[0].ndim)
    if any(x.ndim != kept[0].ndim for x in kept):
        raise RuntimeError(
            f"Tensors must have same number of dimensions: got {[x.ndim for x in kept]}"
        )
    kept = [promotion.cast(x, dtype) for x in kept]
    return kept[0] if len(kept) == 1 else join(kept, dim)


@lowering("aten.stack", "aten._stack", apart=("tensors",))
def aten_stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    """stack(Tensor[] tensors, int dim=0) -> Tensor"""
    if not len(tensors):
        raise RuntimeError("stack expects a non-empty TensorList")
    shape = tensors[0].shape
    for i, x in enumerate(tensors):
        if x.shape != shape:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(shape)} at entry 0 and "
                f"{list(x.shape)} at entry {i}"
            )
    dim = promotion.wrap_dim(dim, len(shape) + 1)
    dtype = promotion.result_dtype(*tensors)
    return _stack([promotion.cast(x, dtype) for x in tensors], dim)


@fused("dim")
def _stack(arrays: Sequence[Array], dim: int) -> Array:
    return lax.concatenate([lax.expand_dims(x, (dim,)) for x in arrays], dim)


@lowering("aten.flip")
def aten_flip(x: Array, dims: Sequence[int]) -> Array:
    """flip(Tensor self, int[] dims) -> Tensor"""
    dims = promotion.wrap_dims(dims, x.ndim) if len(dims) else ()
    return reverse(x, dims) if dims else x


@lowering("aten.roll")
def aten_roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    """roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor"""
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if not dims and len(shifts) == 1:
        return lax.reshape(aten_roll(lax.reshape(x, (x.size,)), shifts, (0,)), x.shape)
    if len(shifts) != len(dims) or not dims:
        raise RuntimeError(
            f"shifts and dimensions must align. shifts: {len(shifts)}, dims:{len(dims)}"
        )
    if not x.size:
        return x
    if not x.ndim:
        raise IndexError(f"Dimension specified as {dims[0]} but tensor has no dimensions")
    return _roll(
        x, tuple(int(s) for s in shifts), tuple(promotion.wrap_dim(d, x.ndim) for d in dims)
    )


@fused("shifts", "dims")
def _roll(x: Array, shifts: tuple[int, ...], dims: tuple[int, ...]) -> Array:
    for shift, dim in zip(shifts, dims, strict=True):
        start = -shift % x.shape[dim]
        parts = [
            lax.slice_in_dim(x, start, None, axis=dim),
            lax.slice_in_dim(x, 0, start, axis=dim),
        ]
        x = lax.concatenate(parts, dim) if start else x
    return x


@lowering("aten.repeat")
def aten_repeat(x: Array, repeats: Sequence[int]) -> Array:
    """repeat(Tensor self, SymInt[] repeats) -> Tensor"""
    if len(repeats) < x.ndim:
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number "
            "of dimensions of tensor"
        )
    if min(repeats, default=0) < 0:
        raise RuntimeError(f"repeats: expected non-negative numbers, got {list(repeats)}")
    return _repeat(x, tuple(int(r) for r in repeats))


@fused("repeats")
def _repeat(x: Array, repeats: tuple[int, ...]) -> Array:
    new = len(repeats) - x.ndim
    shape = (1,) * new + x.shape
    # a dimension of size one is repeated by broadcasting; any other needs a new dimension
    wide, where = [], []
    for i, (r, n) in enumerate(zip(repeats, shape, strict=True)):
        if n != 1 and r != 1:
            wide.append(r)
        if i >= new:
            where.append(len(wide))
        wide.append(n if n != 1 else r)
    out = lax.broadcast_in_dim(x, tuple(wide), tuple(where)) if tuple(wide) != x.shape else x
    final = tuple(r * n for r, n in zip(repeats, shape, strict=True))
    return out if out.shape == final else lax.reshape(out, final)


def diagonal_size(m: int, n: int, offset: int) -> int:
    """The number of elements of that diagonal of an m x n matrix."""
    return max(min(m, n - offset) if offset >= 0 else min(m + offset, n), 0)


@lowering("aten.diagonal", "aten.diagonal_copy")
def aten_diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)"""
    dim1, dim2 = promotion.wrap_dim(dim1, x.ndim), promotion.wrap_dim(dim2, x.ndim)
    if dim1 == dim2:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    return _diagonal(x, offset, dim1, dim2)


@fused("offset", "dim1", "dim2")
def _diagonal(x: Array, offset: int, dim1: int, dim2: int) -> Array:
    order = [d for d in range(x.ndim) if d not in (dim1, dim2)] + [dim1, dim2]
    m, n = x.shape[dim1], x.shape[dim2]
    x = lax.transpose(x, order)
    batch, size = x.shape[:-2], diagonal_size(m, n, offset)
    if not size:
        return lax.full((*batch, 0), 0, x.dtype)
    # a diagonal is a strided slice of the flattened matrix; its transpose is one pad
    start = offset if offset >= 0 else -offset * n
    flat = lax.reshape(x, (*batch, m * n))
    return _slice(flat, flat.ndim - 1, start, start + (size - 1) * (n + 1) + 1, n + 1)


@fused("m", "n", "offset")
def place_diagonal(values: Array, m: int, n: int, offset: int) -> Array:
    """An array [..., m, n] of zeros with values [..., k] on the last two dimensions' diagonal."""
    batch, size = values.shape[:-1], values.shape[-1]
    if not size:
        return lax.full((*batch, m, n), 0, values.dtype)
    start = offset if offset >= 0 else -offset * n
    zero = np.zeros((), values.dtype)
    config = [(0, 0, 0)] * len(batch) + [(start, m * n - start - (size - 1) * (n + 1) - 1, n)]
    return lax.reshape(lax.pad(values, zero, config), (*batch, m, n))


@lowering("aten.diag_embed")
def aten_diag_embed(x: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    """diag_embed(Tensor self, int offset=0, int dim1=-2, int dim2=-1) -> Tensor"""
    rank = x.ndim + 1
    dim1, dim2 = promotion.wrap_dim(dim1, rank), promotion.wrap_dim(dim2, rank)
    if dim1 == dim2:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    n = x.shape[-1] + abs(offset)
    out = place_diagonal(x, n, n, offset)
    return _move_last(out, dim1, dim2)


def _move_last(x: Array, dim1: int, dim2: int) -> Array:
    """The last two dimensions moved to positions dim1 and dim2."""
    order = list(range(x.ndim - 2))
    for dim, axis in sorted([(dim1, x.ndim - 2), (dim2, x.ndim - 1)]):
        order.insert(dim, axis)
    return aten_permute(x, order)


@lowering("aten.unfold", "aten.unfold_copy")
def aten_unfold(x: Array, dimension: int, size: int, step: int) -> Array:
    """unfold(Tensor(a) self, int dimension, int size, int step) -> Tensor(a)"""
    dim = promotion.wrap_dim(dimension, x.ndim)
    if not x.ndim:
        x = lax.reshape(x, (1,))
        if size == 0 or size > 1:
            return _slice(x, 0, 0, 0) if size == 0 else _unfold_error(dim, size, 1)
        return x
    if size < 0 or size > x.shape[dim]:
        _unfold_error(dim, size, x.shape[dim])
    if step <= 0:
        raise RuntimeError(f"step is {step} but must be > 0")
    return _unfold(x, dim, size, step)


@fused("dim", "size", "step")
def _unfold(x: Array, dim: int, size: int, step: int) -> Array:
    n = x.shape[dim]
    count = (n - size) // step + 1
    if size == step:
        split = lax.reshape(
            _slice(x, dim, 0, count * size), (*x.shape[:dim], count, size, *x.shape[dim + 1 :])
        )
        return jnp.moveaxis(split, dim + 1, -1)
    if size <= 16:
        # a few strided slices cost less than a gather, and their transposes are pads
        rows = [_slice(x, dim, j, j + (count - 1) * step + 1, step) for j in range(size)]
        return (
            aten_stack(rows, x.ndim)
            if rows
            else lax.full((*x.shape[:dim], count, *x.shape[dim + 1 :], 0), 0, x.dtype)
        )
    index = np.arange(count)[:, None] * step + np.arange(size)
    return jnp.moveaxis(jnp.take(x, index.astype(np.int32), axis=dim, mode="clip"), dim + 1, -1)


def _unfold_error(dim: int, size: int, n: int) -> NoReturn:
    raise RuntimeError(f"maximum size for tensor at dimension {dim} is {n} but size is {size}")


@lowering("aten.as_strided", "aten.as_strided_copy")
def aten_as_strided(
    x: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Array:
    """as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) ->
    Tensor(a)
    """
    index = strided_index(x.size, size, stride, storage_offset)
    flat = lax.reshape(x, (x.size,))
    if index.size and np.array_equal(
        index.reshape(-1), np.arange(index.flat[0], index.flat[0] + index.size)
    ):
        return lax.reshape(
            _slice(flat, 0, int(index.flat[0]), int(index.flat[0]) + index.size), index.shape
        )
    return flat[index] if index.size else lax.full(index.shape, 0, x.dtype)


def strided_index(
    numel: int, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> np.ndarray:
    """The index in a contiguous buffer of each element of a strided view."""
    if len(size) != len(stride):
        raise RuntimeError(
            f"mismatch in length of strides and shape: size {list(size)}, stride {list(stride)}"
        )
    if min(stride, default=0) < 0:
        raise RuntimeError(
            "as_strided: Negative strides are not supported at the moment, got strides: "
            f"{list(stride)}"
        )
    index = np.full(tuple(size), offset or 0, np.int64)
    for d, (n, s) in enumerate(zip(size, stride, strict=True)):
        index += (np.arange(n, dtype=np.int64) * s).reshape(
            [-1 if i == d else 1 for i in range(len(size))]
        )
    if index.size and not 0 <= index.min() <= index.max() < numel:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset or 0} "
            f"are out of bounds for storage of {numel} elements"
        )
    return index


@lowering(
    "aten.alias", "aten.alias_copy", "aten.lift_fresh_copy", view_inverse=lambda base, value: value
)
def aten_alias(x: Array) -> Array:
    """alias(Tensor(a) self) -> Tensor(a)"""
    return x


def _write_as_real(base: Array, value: Array) -> Array:
    return lax.complex(value[..., 0], value[..., 1])


@lowering("aten.view_as_real", "aten.view_as_real_copy", view_inverse=_write_as_real)
def aten_view_as_real(x: Array) -> Array:
    """view_as_real(Tensor(a) self) -> Tensor(a)"""
    if not promotion.is_complex(x):
        raise RuntimeError("view_as_real is only supported for complex tensors")
    return aten_stack([lax.real(x), lax.imag(x)], x.ndim)


def _write_as_complex(base: Array, value: Array) -> Array:
    return jnp.stack([lax.real(value), lax.imag(value)], -1)


@lowering("aten.view_as_complex", "aten.view_as_complex_copy", view_inverse=_write_as_complex)
def aten_view_as_complex(x: Array) -> Array:
    """view_as_complex(Tensor(a) self) -> Tensor(a)"""
    if x.dtype == np.float16:
        dtypes.to_jax(torch.complex32)  # raises, because JAX has no such dtype
    if x.dtype not in (np.float32, np.float64) or x.shape[-1:] != (2,):
        raise RuntimeError(
            "view_as_complex expects a float or double tensor whose last dimension is 2, got "
            f"{x.dtype}{list(x.shape)}"
        )
    real, imag = aten_unbind(x, x.ndim - 1)
    return lax.complex(real, imag)
