"""Scaled dot-product attention, and the CPU's fused operator with its derivative; where there are
many scores, by blocks of queries.

A block of queries sees all keys, so its softmax is complete, and JAX derives it in every mode and
order. The scan over the blocks saves no scores: its derivatives compute those of a block again. So
the memory grows with the number of queries and keys, not with their product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common import loops, varying
from bridge.lowering.common.promotion import cast, fused, opmath
from bridge.lowering.common.provided import any_size, attention_scores, next_key
from bridge.lowering.linalg.matmul import precision
from bridge.lowering.nn.activations import safe_softmax
from bridge.lowering.registry import lowering
from bridge.lowering.tensors.random import coin

_QUERIES = 16  # of a block, at least


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
    """_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float
    dropout_p=0.0, bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor
    output, Tensor logsumexp)
    """
    if dropout_p != 0.0:
        raise RuntimeError(
            "dropout_p: scaled_dot_product_attention on CPU does not support dropout in its fused "
            f"form, got {dropout_p}"
        )
    return _attention(query, key, value, attn_mask, 0.0, is_causal, scale, True)


@lowering("aten.scaled_dot_product_attention")
def aten_scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None,
    float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False) ->
    Tensor
    """
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)[0]


def _attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> tuple[Array, Array]:
    """The output and the logarithms of the sums of the softmaxes; grouped: heads of the query may
    share a key and a value.
    """
    scale = 1 / math.sqrt(q.shape[-1] or 1) if scale is None else float(scale)
    count, coins = blocks(q.shape[-2], k.shape[-2]), next_key() if dropout_p else None
    return _in_blocks(
        q,
        k,
        v,
        mask,
        coins,
        float(dropout_p),
        bool(is_causal),
        scale,
        bool(grouped),
        precision(q.dtype),
        count,
    )


@fused("dropout_p", "is_causal", "scale", "grouped", "precise", "count")
def _in_blocks(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    coins: Array | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    grouped: bool,
    precise: lax.Precision | None,
    count: int,
) -> tuple[Array, Array]:
    dtype, wide = q.dtype, opmath(q.dtype)
    if count > 1:  # the gradients of keys and values are sums over the blocks
        q, k, v = (cast(t, wide) for t in (q, k, v))
    if grouped:
        k, v = (
            t if t.shape[-3] == q.shape[-3] else jnp.repeat(t, q.shape[-3] // t.shape[-3], -3)
            for t in (k, v)
        )
    shape = jnp.broadcast_shapes(*(t.shape[:-2] for t in (q, k, v)))
    q, k, v = (jnp.broadcast_to(t, (*shape, *t.shape[-2:])) for t in (q, k, v))
    batch = (tuple(range(len(shape))),) * 2

    def rows(first: Array | None, q: Array, mask: Array | None) -> tuple[Array, Array]:
        scores = lax.dot_general(
            q, k, (((q.ndim - 1,), (q.ndim - 1,)), batch), precise, wide
        ) * jnp.asarray(scale, wide)
        if mask is not None:
            scores = (
                jnp.where(mask, scores, -jnp.inf)
                if mask.dtype == jnp.bool_
                else scores + cast(mask, wide)
            )
        if is_causal:
            row, column = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], i) for i in (0, 1))
            scores = jnp.where((row if first is None else row + first) >= column, scores, -jnp.inf)
        factors = None
        if coins is not None:
            shown = coin(
                coins if first is None else jax.random.fold_in(coins, first),
                1 - dropout_p,
                scores.shape,
            )
            factors = jnp.where(
                shown, jnp.asarray(1 / (1 - dropout_p) if dropout_p < 1 else 0, wide), 0
            )
        out = weighed(scores, v, factors, precise)
        logsumexp = jax.scipy.special.logsumexp(lax.stop_gradient(scores), -1, keepdims=True)
        return cast(out, dtype), cast(logsumexp, wide)

    by_row = mask is not None and mask.ndim > 1 and mask.shape[-2] > 1
    out, logsumexp = by_blocks(
        rows if by_row else lambda first, q: rows(first, q, mask), count, q, *[mask][: int(by_row)]
    )
    return out, logsumexp[..., 0]


def blocks(queries: int, keys: int) -> int:
    """In how many blocks of queries attention is computed, so that a head of a block has no more
    scores than ``attention_scores`` says.

    A block has some queries also where they have more scores, because it reads all keys and values.
    """
    limit = attention_scores()
    return (
        1
        if any_size() or queries * keys <= limit
        else math.ceil(queries / max(_QUERIES, int(limit) // keys))
    )


def by_blocks(rows: Callable[..., Sequence[Array]], count: int, *arrays: Array) -> Sequence[Array]:
    """rows(first, *arrays), computed for so many blocks of queries, one after the other.

    Args:
        rows: takes the number of the first query, None if there is one block, and arrays; these and
            its results have the queries at dimension -2. Rows must not depend on one another.
        count: the number of blocks.
        arrays: what all queries have.
    """
    if count == 1:
        return rows(None, *arrays)
    queries = arrays[0].shape[-2]
    size = -(-queries // count)
    count = -(-queries // size)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, count * size - queries), (0, 0)])
        return jnp.moveaxis(x.reshape(*x.shape[:-2], count, size, x.shape[-1]), -3, 0)

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, -3)
        return x.reshape(*x.shape[:-3], count * size, x.shape[-1])[..., :queries, :]

    # a step of a scan has nothing to share with the pass that computes it again
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(first: Array, *arrays: Array) -> Sequence[Array]:
        return rows(first, *arrays)

    firsts = jnp.arange(0, count * size, size, dtype=jnp.int32)
    _, outs = loops.scan(lambda _, xs: (None, block(*xs)), None, (firsts, *map(split, arrays)))
    return [*map(joined, outs)]


def _mean(weights: Array, v: Array, dtype: np.dtype, precise: lax.Precision | None) -> Array:
    """weights @ v; both are rounded to that dtype, and sums have the dtype of the weights."""
    batch = (tuple(range(v.ndim - 2)),) * 2
    return lax.dot_general(
        cast(weights, dtype),
        cast(v, dtype),
        (((v.ndim - 1,), (v.ndim - 2,)), batch),
        precise,
        weights.dtype,
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def weighed(scores: Array, v: Array, factors: Array | None, precise: lax.Precision | None) -> Array:
    """(softmax(scores) * factors) @ v; factors: dropout's, which are constants; None: ones.

    The derivative with respect to the scores uses the output, as in PyTorch's kernel. With half
    types nothing in it is rounded before the difference is taken, because the difference of two
    nearly equal rounded numbers has few digits.
    """
    return _mean(_dropped(safe_softmax(scores, scores.ndim - 1), factors), v, v.dtype, precise)


def _dropped(weights: Array, factors: Array | None) -> Array:
    return weights if factors is None else weights * factors


@weighed.defjvp
def _weighed_jvp(
    precise: lax.Precision | None, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    (scores, v, factors), (dscores, dv, _) = primals, tangents
    weights = safe_softmax(scores, scores.ndim - 1)
    shown, moved = _dropped(weights, factors), weights * dscores
    mean = lambda weights, v, dtype: _mean(weights, v, dtype, precise)
    slope = mean(_dropped(moved, factors), v, moved.dtype) - mean(shown, v, moved.dtype) * jnp.sum(
        moved, -1, keepdims=True
    )
    return mean(shown, v, v.dtype), slope + mean(shown, dv, v.dtype)


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
    """_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor
    key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor?
    attn_mask=None, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)
    """

    def forward(*qkv: Any) -> Array:
        return aten__scaled_dot_product_flash_attention_for_cpu(
            *qkv, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]

    return varying.vjp(forward, query, key, value)[1](grad_out)
