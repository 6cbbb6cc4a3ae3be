"""Reductions over dimensions: sums, products, extrema and their positions, any/all, variance,
logsumexp.

Low precision is accumulated in float32 and integer sums in int64, as PyTorch does. Norms and
distances live in norms.py, order statistics in sorting.py, cumulative ones in cumulative.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from bridge.lowering.common.promotion import (
    cast,
    concrete,
    float_dtype,
    is_complex,
    is_floating,
    is_integral,
    jdtype,
    opmath,
    real_dtype,
    wrap_dim,
    wrap_dims,
)
from bridge.lowering.registry import lowering


def restore(result: Array, axes: tuple[int, ...], keepdim: bool) -> Array:
    """The result with its reduced dimensions put back, of size one, if keepdim."""
    return lax.expand_dims(result, axes) if keepdim and axes else result


def size_of(x: Array, axes: tuple[int, ...]) -> int:
    """The number of elements that a reduction over these axes combines into one."""
    return math.prod(x.shape[a] for a in axes)


def total(x: Array, axes: tuple[int, ...]) -> Array:
    """Sum over axes in the array's own dtype."""
    return lax.reduce_sum(x, axes) if axes else x


def pick(x: Array, index: Array, axis: int) -> Array:
    """x[..., index[...], ...]: one element along axis for each position of the other dimensions,
    which are those of index.
    """
    others = tuple(a for a in range(x.ndim) if a != axis)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=others,
        start_indices_batching_dims=tuple(range(x.ndim - 1)),
    )
    start = lax.expand_dims(index, (index.ndim,))
    return lax.gather(
        x, start, numbers, (1,) * x.ndim, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )


def pick_along(x: Array, index: Array, axis: int) -> Array:
    """take_along_axis for indices known to be in bounds; index has the shape of x, except for its
    length along axis.
    """
    others = tuple(a for a in range(x.ndim) if a != axis)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=others,
        start_indices_batching_dims=others,
    )
    start = lax.expand_dims(index, (index.ndim,))
    return lax.gather(
        x, start, numbers, (1,) * x.ndim, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _with_ties(x: Array, value: Array, axes: tuple[int, ...]) -> Array:
    return value


@_with_ties.defjvp
def _with_ties_jvp(
    axes: tuple[int, ...], primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    (x, value), (tangent, _) = primals, tangents
    full = lax.expand_dims(value, axes)
    hit = (x == full) | (jnp.isnan(x) & jnp.isnan(full))
    return _with_ties(x, value, axes), total(jnp.where(hit, tangent, 0), axes) / total(
        cast(hit, x.dtype), axes
    )


def spread_ties(x: Array, value: Array, axes: tuple[int, ...]) -> Array:
    """value, an extremum or median of x over axes; the elements equal to it (NaN to NaN) share its
    derivative evenly.
    """
    return _with_ties(x, lax.stop_gradient(value), axes) if is_floating(x) else value


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _peak(x: Array, axes: tuple[int, ...], largest: bool) -> Array:
    """The extremum; the elements equal to it share its derivative evenly, and all derivatives are
    NaN if it is NaN.
    """
    return (lax.reduce_max if largest else lax.reduce_min)(x, axes)


@_peak.defjvp
def _peak_jvp(
    axes: tuple[int, ...], largest: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    value = _peak(x, axes, largest)
    full = lax.expand_dims(value, axes)
    hit = cast(x == full, opmath(x.dtype))
    # 0 / 0 would be NaN too, but XLA turns a product with a converted bool into a selection, which
    # makes 0 * NaN 0
    share = jnp.where(jnp.isnan(full), jnp.nan, hit / lax.expand_dims(total(hit, axes), axes))
    return value, total(tangent * cast(share, x.dtype), axes)


def need_elements(x: Array, axes: tuple[int, ...], name: str) -> None:
    """Raise PyTorch's error if a reduction that has no identity is over no elements."""
    for a in axes:
        if x.shape[a] == 0:
            raise IndexError(f"{name}(): Expected reduction dim {a} to have non-zero size.")


def need_any_element(x: Array, name: str) -> None:
    """Raise it for a reduction over all of x."""
    if x.size == 0:
        raise RuntimeError(
            f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
            "reduction dim with the 'dim' argument."
        )


def _sum_dtype(x: Array, dtype: torch.dtype | None) -> np.dtype:
    return jdtype(dtype, np.int64 if is_integral(x) else x.dtype)


@lowering("aten.sum", "aten.sum.dim_IntList")
def aten_sum(
    self: Array,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    """sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) ->
    Tensor
    """
    out, axes = _sum_dtype(self, dtype), wrap_dims(dim, self.ndim)
    if out == np.bool_:
        return restore(lax.reduce_or(cast(self, out), axes), axes, keepdim)
    return restore(cast(total(cast(self, opmath(out)), axes), out), axes, keepdim)


@lowering("aten.mean", "aten.mean.dim")
def aten_mean(
    self: Array,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    """mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *,
    ScalarType? dtype=None) -> Tensor
    """
    out, axes = jdtype(dtype, self.dtype), wrap_dims(dim, self.ndim)
    if is_integral(out):
        what = "Input dtype" if dtype is None else "Optional dtype"
        raise RuntimeError(
            f"mean(): could not infer output dtype. {what} must be either a floating point or "
            f"complex dtype. Got: {out}"
        )
    summed = total(cast(self, opmath(out)), axes)
    return restore(cast(summed / float(size_of(self, axes)), out), axes, keepdim)


@lowering("aten.prod", "aten.prod.dim_int")
def aten_prod(
    self: Array, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Array:
    """prod.dim_int(Tensor self, int dim, bool keepdim=False, *,
    ScalarType? dtype=None) -> Tensor
    """
    out, axes = _sum_dtype(self, dtype), wrap_dims(dim, self.ndim)
    if out == np.bool_:
        return restore(lax.reduce_and(cast(self, out), axes), axes, keepdim)
    x = cast(self, opmath(out))
    if axes:
        x = lax.reduce_prod(x, axes) if is_integral(x) else _product(x, axes)
    return restore(cast(x, out), axes, keepdim)


def _product(x: Array, axes: tuple[int, ...]) -> Array:
    """Product over axes. If no factor is 0, its derivative is the result over each factor, as in
    PyTorch: a NaN makes all of it NaN.
    """
    out = lax.reduce_prod(x, axes)
    spoilt = lax.stop_gradient(jnp.isnan(out) & jnp.all(x != 0))
    return jnp.where(spoilt, total(x, axes) * jnp.where(spoilt, np.nan, 0).astype(x.dtype), out)


def need_order(x: Array, name: str) -> None:
    """Refuse complex numbers, which have no order."""
    if is_complex(x):
        raise RuntimeError(f"{name}(): does not support complex input, got {x.dtype}")


def _extremum(x: Array, dim: Sequence[int], keepdim: bool, name: str) -> Array:
    axes = wrap_dims(dim, x.ndim)
    if len(axes) == x.ndim and not dim and dim != 0:
        need_any_element(x, name)
    need_elements(x, axes, name)
    need_order(x, name)
    return restore(_peak(x, axes, name == "amax") if axes else x, axes, keepdim)


@lowering("aten.amax")
def aten_amax(self: Array, dim: Sequence[int] = (), keepdim: bool = False) -> Array:
    """amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return _extremum(self, dim, keepdim, "amax")


@lowering("aten.amin")
def aten_amin(self: Array, dim: Sequence[int] = (), keepdim: bool = False) -> Array:
    """amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return _extremum(self, dim, keepdim, "amin")


@lowering("aten.aminmax", exact_out=True)
def aten_aminmax(
    self: Array, *, dim: int | None = None, keepdim: bool = False
) -> tuple[Array, Array]:
    """aminmax(Tensor self, *, int? dim=None, bool keepdim=False) -> (Tensor min, Tensor max)"""
    axes = wrap_dims(dim, self.ndim)
    if dim is None and self.size == 0:
        raise RuntimeError(
            "aminmax(): cannot compute aminmax over an empty dimension as the "
            "operation has no identity."
        )
    need_elements(self, axes, "aminmax")
    return _extremum(self, axes, keepdim, "amin"), _extremum(self, axes, keepdim, "amax")


def _full_extremum(x: Array, name: str) -> Array:
    need_any_element(x, name)
    need_order(x, name)
    axes = tuple(range(x.ndim))
    reduce = lax.reduce_max if name == "max" else lax.reduce_min
    # max() gives its derivative to the NaNs, unlike amax, whose derivative is NaN at a NaN
    return spread_ties(x, reduce(lax.stop_gradient(x), axes), axes) if axes else x


@lowering("aten.max")
def aten_max(self: Array) -> Array:
    """max(Tensor self) -> Tensor"""
    return _full_extremum(self, "max")


@lowering("aten.min")
def aten_min(self: Array) -> Array:
    """min(Tensor self) -> Tensor"""
    return _full_extremum(self, "min")


def _position(x: Array, axis: int, largest: bool) -> Array:
    """Index (int32) of the first extremum along axis, or of the first NaN if there is one."""
    if x.dtype == np.bool_:
        x = cast(x, np.uint8)
    return (lax.argmax if largest else lax.argmin)(x, axis, np.int32)


def _extremum_dim(x: Array, dim: int, keepdim: bool, name: str) -> tuple[Array, Array]:
    need_order(x, name)
    axis = wrap_dim(dim, x.ndim)
    if not x.ndim:
        return x, jnp.zeros((), np.int64)
    need_elements(x, (axis,), name)
    index = _position(x, axis, name == "max")
    return restore(pick(x, index, axis), (axis,), keepdim), restore(
        cast(index, np.int64), (axis,), keepdim
    )


@lowering("aten.max.dim")
def aten_max_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _extremum_dim(self, dim, keepdim, "max")


@lowering("aten.min.dim")
def aten_min_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """min.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _extremum_dim(self, dim, keepdim, "min")


def _arg_extremum(x: Array, dim: int | None, keepdim: bool, name: str) -> Array:
    need_order(x, name)
    if dim is None:
        if x.size == 0:
            raise IndexError(
                f"{name}(): Expected reduction dim to be specified for input.numel() == 0."
            )
        index = _position(lax.reshape(x, (x.size,)), 0, name == "argmax")
        return restore(cast(index, np.int64), tuple(range(x.ndim)), keepdim)
    axis = wrap_dim(dim, x.ndim)
    if not x.ndim:
        return jnp.zeros((), np.int64)
    need_elements(x, (axis,), name)
    return restore(cast(_position(x, axis, name == "argmax"), np.int64), (axis,), keepdim)


@lowering("aten.argmax")
def aten_argmax(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    return _arg_extremum(self, dim, keepdim, "argmax")


@lowering("aten.argmin")
def aten_argmin(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """argmin(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    return _arg_extremum(self, dim, keepdim, "argmin")


def truth(x: Array) -> Array:
    """Each element as bool."""
    return x if x.dtype == np.bool_ else x != 0


def _logical(
    x: Array, dim: int | Sequence[int] | None, keepdim: bool, reduce: Callable[..., Any]
) -> Array:
    # an empty list of dims means none here, not all: any.dims(x, []) is x as bool
    axes = () if isinstance(dim, list | tuple) and not dim else wrap_dims(dim, x.ndim)
    result = restore(reduce(truth(x), axes) if axes else truth(x), axes, keepdim)
    return cast(result, np.uint8) if x.dtype == np.uint8 else result


@lowering("aten.any", "aten.any.dim", "aten.any.dims")
def aten_any(self: Array, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Array:
    """any.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
    return _logical(self, dim, keepdim, lax.reduce_or)


@lowering("aten.all", "aten.all.dim", "aten.all.dims")
def aten_all(self: Array, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Array:
    """all.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
    return _logical(self, dim, keepdim, lax.reduce_and)


@lowering("aten._is_any_true")
def aten_is_any_true(self: Array) -> Array:
    """_is_any_true(Tensor self) -> Tensor"""
    return aten_any(self)


@lowering("aten.allclose")
def aten_allclose(
    self: Array, other: Array, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """allclose(Tensor self, Tensor other, float rtol=1e-05, float atol=1e-08, bool
    equal_nan=False) -> bool
    """
    mine, theirs = (concrete(cast(x, opmath(x.dtype))) for x in (self, other))
    return bool(np.allclose(mine, theirs, rtol, atol, equal_nan))


@lowering("aten.count_nonzero", "aten.count_nonzero.dim_IntList")
def aten_count_nonzero(self: Array, dim: int | Sequence[int] | None = None) -> Array:
    """count_nonzero.dim_IntList(Tensor self, int[] dim) -> Tensor"""
    return total(cast(truth(self), np.int64), wrap_dims(dim, self.ndim))


@lowering("aten.hash_tensor")
def aten_hash_tensor(
    self: Array, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0
) -> Array:
    """hash_tensor(Tensor self, int[1] dim=[], *, bool keepdim=False, int mode=0) -> Tensor"""
    if mode != 0:
        raise RuntimeError(f"hash_tensor: unknown mode {mode}; 0, for xor, is the only one")
    if not dim and dim != 0:
        need_any_element(self, "hash_tensor")
    axes = wrap_dims(dim, self.ndim)
    need_elements(self, axes, "hash_tensor")
    wide = cast(lax.stop_gradient(self), np.int64 if is_integral(self) else np.float64)
    return restore(lax.reduce_xor(lax.bitcast_convert_type(wide, np.uint64), axes), axes, keepdim)


def sqrt_or_zero(x: Array) -> Array:
    """Square root with derivative 0 at 0, at every order (PyTorch's subgradient
    of std and norms).
    """
    zero = x == 0
    return jnp.where(zero, 0, lax.sqrt(jnp.where(zero, 1, x)))


def abs_square(x: Array) -> Array:
    """|x|^2 as a real array."""
    return lax.square(lax.real(x)) + lax.square(lax.imag(x)) if is_complex(x) else lax.square(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _sum_of_squares(x: Array, mean: Array, axes: tuple[int, ...]) -> Array:
    """Sum of the squared differences from the mean over axes, which has no derivative in the mean,
    because those differences sum to 0.
    """
    return total(abs_square(x - mean), axes)


@_sum_of_squares.defjvp
def _sum_of_squares_jvp(
    axes: tuple[int, ...], primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    (x, mean), change = primals, tangents[0]
    apart = lax.conj(x - mean) if is_complex(x) else x - mean
    slope = 2 * apart * change
    return _sum_of_squares(x, mean, axes), total(lax.real(slope) if is_complex(x) else slope, axes)


def _moments(
    x: Array, dim: Sequence[int], correction: float | None, keepdim: bool
) -> tuple[Array, Array]:
    """Variance and mean in the accumulation dtype, in two passes: the mean, then the mean square of
    the differences from it.
    """
    if is_integral(x):
        raise RuntimeError(
            f"std and var only support floating point and complex dtypes, got {x.dtype}"
        )
    axes = wrap_dims(dim, x.ndim)
    x = cast(x, opmath(x.dtype))
    count = size_of(x, axes)
    mean = restore(total(x, axes) / float(count), axes, True)
    freedom = max(count - (1 if correction is None else correction), 0)
    variance = _sum_of_squares(x, mean, axes) / float(freedom)
    return restore(variance, axes, keepdim), mean if keepdim or not axes else lax.squeeze(
        mean, axes
    )


@lowering("aten.var.correction")
def aten_var(
    self: Array,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Array:
    """var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool
    keepdim=False) -> Tensor
    """
    return aten_var_mean(self, dim, correction=correction, keepdim=keepdim)[0]


@lowering("aten.std.correction")
def aten_std(
    self: Array,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Array:
    """std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool
    keepdim=False) -> Tensor
    """
    return cast(sqrt_or_zero(_moments(self, dim, correction, keepdim)[0]), real_dtype(self.dtype))


@lowering("aten.var_mean.correction")
def aten_var_mean(
    self: Array,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Array, Array]:
    """var_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool
    keepdim=False) -> (Tensor, Tensor)
    """
    variance, mean = _moments(self, dim, correction, keepdim)
    if self.size == 0:  # over no elements the mean is NaN, a constant
        variance = lax.stop_gradient(variance)
    return cast(variance, real_dtype(self.dtype)), cast(mean, self.dtype)


@lowering("aten.std_mean.correction")
def aten_std_mean(
    self: Array,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Array, Array]:
    """std_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool
    keepdim=False) -> (Tensor, Tensor)
    """
    variance, mean = _moments(self, dim, correction, keepdim)
    return cast(sqrt_or_zero(variance), real_dtype(self.dtype)), cast(mean, self.dtype)


@lowering("aten.logsumexp")
def aten_logsumexp(self: Array, dim: Sequence[int], keepdim: bool = False) -> Array:
    """logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor"""
    out, axes = float_dtype(self.dtype), wrap_dims(dim, self.ndim)
    x = cast(self, opmath(out))
    # the imaginary part of a complex one is wrapped into (-pi, pi] below
    if not axes and not is_complex(x):
        return cast(self, out)
    if size_of(x, axes) == 0:
        return restore(cast(lax.log(total(x, axes)), out), axes, keepdim)
    # the shift cancels in exact arithmetic, so it needs no derivative; an infinite shift would give
    # inf - inf = NaN
    peak = lax.stop_gradient(lax.reduce_max(lax.real(x) if is_complex(x) else x, axes))
    peak = jnp.where(jnp.isfinite(peak), peak, 0)
    summed = total(lax.exp(x - lax.expand_dims(peak, axes)), axes)
    return restore(cast(lax.log(summed) + peak, out), axes, keepdim)
