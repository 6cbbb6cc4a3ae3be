"""Vector norms, pairwise distances and weight norm's backward. At zero every norm has subgradient
0, as in PyTorch.

PyTorch decomposes matrix norms and torch.norm into these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from bridge.convert import dtypes
from bridge.lowering.common import varying
from bridge.lowering.common.promotion import (
    cast,
    is_integral,
    jdtype,
    opmath,
    real_dtype,
    wrap_dims,
)
from bridge.lowering.elementwise.unary import absolute
from bridge.lowering.reductions.reductions import (
    abs_square,
    restore,
    spread_ties,
    sqrt_or_zero,
    total,
)
from bridge.lowering.registry import lowering


def _power_norm(size: Array, p: float, axes: tuple[int, ...]) -> Array:
    """(sum of size**p)**(1/p) over axes; entries that are 0 and sums that are
    0 pass no derivative.
    """
    zero, at_zero = size == 0, 0.0 if p > 0 else math.inf
    summed = total(jnp.where(zero, at_zero, jnp.where(zero, 1, size) ** p), axes)
    nothing = (summed == 0) & (p > 0)  # a negative power of infinities sums to 0
    return jnp.where(nothing, at_zero, jnp.where(nothing, 1, summed) ** (1 / p))


def norm_over(x: Array, p: float, axes: tuple[int, ...]) -> Array:
    """The p-norm of x over axes, in x's own (real) dtype."""
    if p == 2:
        return sqrt_or_zero(total(abs_square(x), axes))
    if p == 0:
        return total(cast(x != 0, real_dtype(x.dtype)), axes)
    size = absolute(x)
    if math.isinf(p):
        extremum = (lax.reduce_max if p > 0 else lax.reduce_min)(lax.stop_gradient(size), axes)
        return spread_ties(size, extremum, axes) if axes else size
    return total(size, axes) if p == 1 else _power_norm(size, p, axes)


def _refuse_narrowing(have: np.dtype, dtype: torch.dtype) -> None:
    """Raise PyTorch's error if a norm cannot convert an input of dtype ``have`` to ``dtype``."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(
            f"dtype: linalg.vector_norm expects a floating point or complex dtype, got {dtype}"
        )
    given = dtypes.to_torch(have)
    if given.is_complex != dtype.is_complex:
        kind = "complex" if given.is_complex else "real"
        raise RuntimeError(
            f"dtype: linalg.vector_norm expects a {kind} dtype for a {kind} input, got {dtype}"
        )
    if torch.promote_types(given, dtype) is not dtype:
        raise RuntimeError(
            f"dtype: linalg.vector_norm cannot convert an input of {given} to "
            f"{dtype} without narrowing it"
        )


@lowering("aten.linalg_vector_norm")
def aten_linalg_vector_norm(
    self: Array,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    """linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *,
    ScalarType? dtype=None) -> Tensor
    """
    if is_integral(self):
        raise RuntimeError(
            "linalg.vector_norm: Expected a floating point or complex tensor "
            f"as input. Got {self.dtype}"
        )
    if dtype is not None:
        _refuse_narrowing(self.dtype, dtype)
    axes, out, p = wrap_dims(dim, self.ndim), jdtype(dtype, self.dtype), float(ord)
    if (math.isinf(p) or p < 0) and any(self.shape[a] == 0 for a in axes):
        raise RuntimeError(
            f"linalg.vector_norm cannot compute the {ord} norm on an empty "
            "tensor because it has no identity"
        )
    return restore(
        cast(norm_over(cast(self, opmath(out)), p, axes), real_dtype(out)), axes, keepdim
    )


def _distances(x1: Array, x2: Array, p: float) -> Array:
    """p-norms of the differences of every row of x1 with every row of x2."""
    difference = lax.expand_dims(x1, (x1.ndim - 1,)) - lax.expand_dims(x2, (x2.ndim - 2,))
    if math.isinf(p) and x1.shape[-1] == 0:
        return jnp.zeros(difference.shape[:-1], x1.dtype)
    return norm_over(difference, p, (difference.ndim - 1,))


@lowering("aten._cdist_forward")
def aten_cdist_forward(x1: Array, x2: Array, p: float, compute_mode: int | None) -> Array:
    """_cdist_forward(Tensor x1, Tensor x2, float p, int? compute_mode) -> Tensor"""
    if x1.shape[-1] != x2.shape[-1]:
        raise RuntimeError(
            f"X1 and X2 must have the same number of columns. X1: {x1.shape[-1]} X2: {x2.shape[-1]}"
        )
    if p < 0:
        raise RuntimeError(f"cdist only supports non-negative p values, got {p}")
    return _distances(x1, x2, p)


@lowering("aten._cdist_backward")
def aten_cdist_backward(grad: Array, x1: Array, x2: Array, p: float, cdist: Array) -> Array:
    """_cdist_backward(Tensor grad, Tensor x1, Tensor x2, float p, Tensor cdist) -> Tensor"""
    return varying.vjp(lambda x: _distances(x, x2, p), x1)[1](grad)[0]


@lowering("aten._euclidean_dist")
def aten_euclidean_dist(x1: Array, x2: Array) -> Array:
    """_euclidean_dist(Tensor x1, Tensor x2) -> Tensor"""
    squares = jnp.sum(x1 * x1, -1)[..., :, None] + jnp.sum(x2 * x2, -1)[..., None, :]
    return sqrt_or_zero(
        jnp.maximum(squares - 2 * jnp.matmul(x1, jnp.swapaxes(x2, -1, -2), precision="highest"), 0)
    )


def _pairs(x: Array, p: float) -> Array:
    first, second = np.triu_indices(x.shape[0], 1)
    return norm_over(x[first] - x[second], p, (1,))


@lowering("aten._pdist_forward")
def aten_pdist_forward(self: Array, p: float = 2.0) -> Array:
    """_pdist_forward(Tensor self, float p=2.) -> Tensor"""
    if p < 0:
        raise RuntimeError(f"pdist only supports non-negative p values, got {p}")
    return _pairs(self, p)


@lowering("aten._pdist_backward")
def aten_pdist_backward(grad: Array, self: Array, p: float, pdist: Array) -> Array:
    """_pdist_backward(Tensor grad, Tensor self, float p, Tensor pdist) -> Tensor"""
    return varying.vjp(lambda x: _pairs(x, p), self)[1](grad)[0]


@lowering("aten._weight_norm_interface_backward")
def aten_weight_norm_interface_backward(
    grad_w: Array, saved_v: Array, saved_g: Array, saved_norms: Array, dim: int
) -> tuple[Array, Array]:
    """_weight_norm_interface_backward(Tensor grad_w, Tensor saved_v, Tensor saved_g, Tensor
    saved_norms, int dim) -> (Tensor, Tensor)
    """
    grad, v, g, norms = (cast(x, opmath(x.dtype)) for x in (grad_w, saved_v, saved_g, saved_norms))
    along = (
        jnp.sum(grad * v, tuple(d for d in range(v.ndim) if d != dim % v.ndim), keepdims=True)
        / norms
    )
    return cast(g / norms * (grad - v * (along / norms)), saved_v.dtype), cast(along, saved_g.dtype)
