"""Scaled dot-product attention: the CPU's fused operator and its derivative."""
from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common import varying
from bridge.lowering.common.promotion import cast, fused, opmath
from bridge.lowering.linalg.matmul import precision
from bridge.lowering.nn.activations import safe_softmax
from bridge.lowering.registry import lowering


@lowering("aten._scaled_dot_product_flash_attention_for_cpu")
def aten__scaled_dot_product_flash_attention_for_cpu(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0.0,
    bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"""
    if dropout_p != 0.0:
        raise RuntimeError(f"dropout_p: scaled_dot_product_attention on CPU does not support dropout in its fused form, got {dropout_p}")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    return _attention(query, key, value, attn_mask, bool(is_causal), scale, precision(query.dtype))


@fused("is_causal", "scale", "precise")
def _attention(
    q: Array, k: Array, v: Array, mask: Array | None, is_causal: bool, scale: float, precise: lax.Precision | None
) -> tuple[Array, Array]:
    dtype, wide = q.dtype, opmath(q.dtype)
    if k.shape[1] != q.shape[1]:  # grouped-query attention: heads of the query share a key and value
        k, v = (jnp.repeat(t, q.shape[1] // t.shape[1], 1) for t in (k, v))
    batch = ((0, 1), (0, 1))
    scores = lax.dot_general(q, k, (((3,), (3,)), batch), precise, wide) * jnp.asarray(scale, wide)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + cast(mask, wide)
    if is_causal:
        row, column = (lax.broadcasted_iota(jnp.int32, scores.shape[2:], i) for i in (0, 1))
        scores = jnp.where(row >= column, scores, -jnp.inf)
    out = _weighed(scores, v, precise)
    logsumexp = jax.scipy.special.logsumexp(lax.stop_gradient(scores), 3)
    return cast(out, dtype), cast(logsumexp, wide)


def _mean(weights: Array, v: Array, dtype: np.dtype, precise: lax.Precision | None) -> Array:
    """weights @ v; both are rounded to that dtype, and sums have the dtype of the weights."""
    return lax.dot_general(cast(weights, dtype), cast(v, dtype), (((3,), (2,)), ((0, 1), (0, 1))), precise, weights.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _weighed(scores: Array, v: Array, precise: lax.Precision | None) -> Array:
    """softmax(scores) @ v.

    The derivative with respect to the scores uses the output, as in PyTorch's kernel.  With half types nothing in it is rounded before the
    difference is taken, because the difference of two nearly equal rounded numbers has few digits.
    """
    return _mean(safe_softmax(scores, 3), v, v.dtype, precise)


@_weighed.defjvp
def _weighed_jvp(precise: lax.Precision | None, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (scores, v), (dscores, dv) = primals, tangents
    weights = safe_softmax(scores, 3)
    mean = lambda weights, v, dtype: _mean(weights, v, dtype, precise)
    moved = weights * dscores
    slope = mean(moved, v, moved.dtype) - mean(weights, v, moved.dtype) * jnp.sum(moved, 3, keepdims=True)
    return mean(weights, v, v.dtype), slope + mean(weights, dv, v.dtype)


@lowering("aten._scaled_dot_product_flash_attention_for_cpu_backward")
def aten__scaled_dot_product_flash_attention_for_cpu_backward(
    grad_out: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    """_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out,
    Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None)
    -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"""

    def forward(*qkv: Any) -> Array:
        return aten__scaled_dot_product_flash_attention_for_cpu(*qkv, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    return varying.vjp(forward, query, key, value)[1](grad_out)
