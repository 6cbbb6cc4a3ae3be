"""Counting operators: histc, histogram and histogramdd, bincount. They have no derivatives, as in
PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from bridge.lowering.common.loops import searchsorted
from bridge.lowering.common.promotion import cast, concrete, is_floating, is_integral
from bridge.lowering.common.provided import refuse
from bridge.lowering.common.value_dependent_shapes import by_lane
from bridge.lowering.registry import lowering


def _count(index: Array, valid: Any, weight: Array | None, length: int, dtype: DTypeLike) -> Array:
    """Sums of weight (or counts) by index; entries that are not valid are dropped."""
    place = jnp.where(valid, index, length)
    if weight is None:
        return cast(jnp.zeros((length,), np.int64).at[place].add(1, mode="drop"), dtype)
    return (
        jnp.zeros((length,), dtype)
        .at[place]
        .add(cast(lax.stop_gradient(weight), dtype), mode="drop")
    )


def _outer(x: Array, bounds: Sequence[Any] | None, margin: float) -> tuple[Array, Array]:
    """The outer bounds of the bins: the data's range if none are given; equal bounds are moved
    apart by a margin.
    """
    if bounds is None:
        bounds = (jnp.min(x), jnp.max(x)) if x.size else (0, 1)
    low, high = (jnp.asarray(b, x.dtype) for b in bounds)
    same = low == high
    return jnp.where(same, low - margin, low), jnp.where(same, high + margin, high)


@lowering("aten.histc", no_grad_outputs=(0,))
def aten_histc(self: Array, bins: int = 100, min: float = 0, max: float = 0) -> Array:
    """histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor"""
    if bins <= 0:
        raise RuntimeError(f"torch.histc(): bins must be > 0, got {bins}")
    if min > max:
        raise RuntimeError(
            f"torch.histc(): max must be larger than min, got min={min} and max={max}"
        )
    if not is_floating(self):
        raise NotImplementedError(
            f"histc: not implemented for {self.dtype}; expected a floating point tensor"
        )
    x = lax.stop_gradient(self).reshape(-1)
    low, high = _outer(x, None if min == max else (min, max), 1.0)
    refuse(
        lax.bitwise_not(jnp.isfinite(low) & jnp.isfinite(high)),
        "torch.histc: the range of the data is not finite",
    )
    place = jnp.minimum(lax.floor((x - low) * bins / (high - low)), bins - 1)
    valid = (x >= low) & (x <= high)
    return _count(cast(jnp.where(valid, place, 0), np.int32), valid, None, bins, self.dtype)


def _histogram(points: Array, edges: list[Any], weight: Array | None, density: bool) -> Array:
    """Histogram of points (N, D) with bins between the edges of each of the D dimensions; the last
    bin is closed.
    """
    sizes = [e.shape[0] - 1 for e in edges]
    flat, valid = jnp.zeros(points.shape[:1], np.int32), jnp.ones(points.shape[:1], np.bool_)
    for d, (edge, size) in enumerate(zip(edges, sizes, strict=True)):
        x = points[:, d]
        place = jnp.minimum(searchsorted(edge, x, side="right") - 1, size - 1)
        valid = valid & (x >= edge[0]) & (x <= edge[-1])
        flat = flat * size + cast(place, np.int32)
    weight = None if weight is None else weight.reshape(-1)
    counts = _count(flat, valid, weight, math.prod(sizes), points.dtype).reshape(sizes)
    if not density:
        return counts
    counts = counts / jnp.sum(counts)
    for d, edge in enumerate(edges):
        widths = lax.stop_gradient(edge[1:] - edge[:-1])
        counts = counts / widths.reshape([-1 if a == d else 1 for a in range(len(sizes))])
    return counts


def _even_edges(x: Array, bins: int, bounds: Sequence[float] | None) -> Array:
    return jnp.linspace(*_outer(x, bounds, 0.5), bins + 1, dtype=x.dtype)


@lowering("aten._histogramdd_bin_edges")
def aten_histogramdd_bin_edges(
    self: Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> list[Array]:
    """_histogramdd_bin_edges(Tensor self, int[] bins, *, float[]? range=None, Tensor? weight=None,
    bool density=False) -> Tensor[]
    """
    points = lax.stop_gradient(self).reshape(-1, self.shape[-1])
    if len(bins) != points.shape[1]:
        raise RuntimeError(
            f"histogramdd: expected {points.shape[1]} sequences of bin edges, one for each "
            f"dimension, got {len(bins)}"
        )
    return [
        _even_edges(points[:, d], n, range[2 * d : 2 * d + 2] if range else None)
        for d, n in enumerate(bins)
    ]


@lowering("aten._histogramdd_from_bin_cts")
def aten_histogramdd_from_bin_cts(
    self: Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> Array:
    """_histogramdd_from_bin_cts(Tensor self, int[] bins, *, float[]? range=None, Tensor?
    weight=None, bool density=False) -> Tensor
    """
    return aten_histogramdd_from_bin_tensors(
        self, aten_histogramdd_bin_edges(self, bins, range=range), weight=weight, density=density
    )


@lowering("aten._histogramdd_from_bin_tensors")
def aten_histogramdd_from_bin_tensors(
    self: Array, bins: list[Any], *, weight: Array | None = None, density: bool = False
) -> Array:
    """_histogramdd_from_bin_tensors(Tensor self, Tensor[] bins, *, Tensor? weight=None, bool
    density=False) -> Tensor
    """
    return _histogram(lax.stop_gradient(self).reshape(-1, self.shape[-1]), bins, weight, density)


@lowering("aten.histogram.bin_ct")
def aten_histogram(
    self: Array,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> tuple[Array, Array]:
    """histogram.bin_ct(Tensor self, int bins=100, *, float[]? range=None, Tensor? weight=None, bool
    density=False) -> (Tensor hist, Tensor bin_edges)
    """
    points = lax.stop_gradient(self).reshape(-1, 1)
    edges = _even_edges(points[:, 0], bins, range or None)
    return _histogram(points, [edges], weight, density), edges


@lowering("aten.histogram.bins_tensor")
def aten_histogram_bins(
    self: Array, bins: Array, *, weight: Array | None = None, density: bool = False
) -> tuple[Array, Array]:
    """histogram.bins_tensor(Tensor self, Tensor bins, *, Tensor? weight=None, bool
    density=False) -> (Tensor hist, Tensor bin_edges)
    """
    return _histogram(lax.stop_gradient(self).reshape(-1, 1), [bins], weight, density), bins


@lowering("aten.bincount", no_grad_outputs=(0,))
@by_lane
def aten_bincount(self: Array, weights: Array | None = None, minlength: int = 0) -> Array:
    """bincount(Tensor self, Tensor? weights=None, SymInt minlength=0) -> Tensor"""
    if minlength < 0:
        raise RuntimeError(f"minlength should be >= 0, got {minlength}")
    if self.ndim != 1 or not is_integral(self):
        raise RuntimeError(
            "bincount only supports 1-d non-negative integral inputs, got "
            f"shape {self.shape} of {self.dtype}"
        )
    if weights is not None and weights.shape != self.shape:
        raise RuntimeError(
            "weights should be 1-d and have the same length as input, got "
            f"{weights.shape} for {self.shape}"
        )
    if self.size == 0:
        return jnp.zeros((minlength,), np.int64)
    values = concrete(self)  # the length of the result depends on them
    if values.min() < 0:
        raise RuntimeError(
            f"bincount only supports 1-d non-negative integral inputs, got {values.min()}"
        )
    dtype = (
        np.int64 if weights is None else np.float32 if weights.dtype == np.float32 else np.float64
    )
    return _count(self, True, weights, max(int(values.max()) + 1, minlength), dtype)
