"""Running reductions along one dimension: cumsum, cumprod, logcumsumexp, cummax and cummin with
indices.

PyTorch decomposes diff, trapezoid and the backward operators of scans into these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from bridge.lowering.common.loops import scan
from bridge.lowering.common.promotion import (
    cast,
    float_dtype,
    fused,
    is_complex,
    is_floating,
    is_integral,
    jdtype,
    opmath,
    wrap_dim,
)
from bridge.lowering.common.provided import any_size
from bridge.lowering.reductions.reductions import need_order, pick_along
from bridge.lowering.registry import lowering


def _scan(x: Array, dim: int, out: np.dtype, scan: Callable[..., Any]) -> Array:
    """The running reduction in the accumulation dtype; a 0-dim array is its own result."""
    axis = wrap_dim(dim, x.ndim)
    x = cast(x, opmath(out))
    return cast(scan(x, axis) if x.ndim else x, out)


@lowering("aten.cumsum", apart=())
def aten_cumsum(self: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    """cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    return _scan(
        self, dim, jdtype(dtype, np.int64 if is_integral(self) else self.dtype), lax.cumsum
    )


@lowering("aten.cumprod", apart=())
def aten_cumprod(self: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    """cumprod(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    return _scan(
        self, dim, jdtype(dtype, np.int64 if is_integral(self) else self.dtype), lax.cumprod
    )


@lowering("aten.logcumsumexp", "aten._logcumsumexp")
def aten_logcumsumexp(self: Array, dim: int) -> Array:
    """logcumsumexp(Tensor self, int dim) -> Tensor"""
    real = _running_logsumexp_by_steps if any_size() else _running_logsumexp
    return _scan(
        self, dim, float_dtype(self.dtype), _running_complex_logsumexp if is_complex(self) else real
    )


@fused("axis")
def _running_logsumexp(x: Array, axis: int) -> Array:
    """The running maximum m plus the log of the running sum of exp(x - m), which rounds once and
    has the derivative of a weighted mean.

    Only the sum is differentiated: m is a scale on which the result does not depend.
    """
    return _joined(x, lambda join, pairs: lax.associative_scan(join, pairs, axis=axis))


@fused("axis")
def _running_logsumexp_by_steps(x: Array, axis: int) -> Array:
    """``_running_logsumexp`` one element after the other: the same operations for all sizes."""

    def in_order(join: Callable[..., Any], pairs: tuple[Array, Array]) -> tuple[Array, Array]:
        first, *rest = (jnp.moveaxis(p, axis, 0) for p in pairs)

        def step(before: Any, new: Any) -> tuple[Any, Any]:
            both = join(before, new)
            return both, both

        start = (
            jnp.full(first.shape[1:], jnp.finfo(x.dtype).min, x.dtype),
            jnp.zeros(first.shape[1:], x.dtype),
        )
        top, total = scan(step, start, (first, *rest))[1]
        return jnp.moveaxis(top, 0, axis), jnp.moveaxis(total, 0, axis)

    return _joined(x, in_order)


def _joined(x: Array, accumulate: Callable[..., Any]) -> Array:
    info = jnp.finfo(x.dtype)
    shift = jnp.where(jnp.isnan(x), info.min, jnp.clip(lax.stop_gradient(x), info.min, info.max))

    def join(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Array, Array]:
        (m, s), (n, t) = a, b
        top = lax.max(m, n)
        return top, s * jnp.exp(m - top) + t * jnp.exp(n - top)

    top, total = accumulate(join, (shift, jnp.exp(x - shift)))
    nothing = total == 0  # only -inf so far: the derivative is 0, as in logsumexp
    return jnp.where(
        nothing, -jnp.inf, top + jnp.log(jnp.where(nothing, jnp.ones_like(total), total))
    )


@fused("axis")
def _running_complex_logsumexp(x: Array, axis: int) -> Array:
    """One element after the other, as in PyTorch: the imaginary part continues that of the larger
    term, without wrapping.
    """

    def join(before: Array, new: Array) -> tuple[Array, Array]:
        later = lax.real(new) >= lax.real(before)
        big, small = jnp.where(later, new, before), jnp.where(later, before, new)
        endless = jnp.isinf(lax.real(big))
        joined = big + jnp.log1p(jnp.exp(jnp.where(endless, 0, small - big)))
        both = lax.real(big) == lax.real(small)
        joined = jnp.where(
            endless,
            jnp.where(lax.real(big) < 0, -jnp.inf, jnp.where(both, complex(jnp.inf, jnp.nan), big)),
            joined,
        )
        joined = jnp.where(jnp.isnan(before) | jnp.isnan(new), complex(jnp.nan, jnp.nan), joined)
        return joined, joined

    moved = jnp.moveaxis(x, axis, 0)
    _, running = scan(join, jnp.full(moved.shape[1:], -jnp.inf, x.dtype), moved)
    return jnp.moveaxis(running, 0, axis)


def _running_extremum(x: Array, dim: int, scan: Callable[..., Any]) -> tuple[Array, Array]:
    """The running extremum and its index: that of the last of equal elements, or of the last NaN if
    there is one.
    """
    axis = wrap_dim(dim, x.ndim)
    need_order(x, scan.__name__)
    if not x.ndim:
        return x, jnp.zeros((), np.int64)
    fixed = lax.stop_gradient(x)
    keys = cast(fixed, np.uint8) if x.dtype == np.bool_ else fixed
    hit = keys == scan(keys, axis)
    if is_floating(x):
        hit = hit | jnp.isnan(keys)
    places = jnp.where(hit, lax.broadcasted_iota(np.int32, x.shape, axis), 0)
    index = lax.cummax(places, axis)
    return pick_along(x, index, axis), cast(index, np.int64)


@lowering("aten.cummax")
def aten_cummax(self: Array, dim: int) -> tuple[Array, Array]:
    """cummax(Tensor self, int dim) -> (Tensor values, Tensor indices)"""
    return _running_extremum(self, dim, lax.cummax)


@lowering("aten.cummin")
def aten_cummin(self: Array, dim: int) -> tuple[Array, Array]:
    """cummin(Tensor self, int dim) -> (Tensor values, Tensor indices)"""
    return _running_extremum(self, dim, lax.cummin)
