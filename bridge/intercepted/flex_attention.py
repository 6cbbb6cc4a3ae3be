"""FlexAttention inside a trace: PyTorch's own checks and outputs around attention on arrays, by
blocks where there are many scores.

PyTorch would pass its higher-order operator to torch.compile, which does not know traced tensors,
and has no backward on CPUs. ``jax.vmap`` maps the two functions of one element, score_mod and
mask_mod, over batches, heads, queries and keys. The numbers are those of PyTorch's eager reference,
``torch._higher_order_ops.flex_attention.math_attention``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from bridge import private_calls
from bridge.boundary.calls import apply
from bridge.boundary.results import Result
from bridge.intercepted.attention import cast_by_autocast
from bridge.intercepted.control_flow import _Body
from bridge.lowering.common.promotion import cast, opmath
from bridge.lowering.linalg.matmul import precision
from bridge.lowering.nn.attention import blocks, by_blocks, weighed
from bridge.trace.tracing import wrap


def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """torch.nn.attention.flex_attention.flex_attention on traced tensors."""
    return private_calls.flex_attention_around(_attention)(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    *buffers: Any,
) -> tuple[torch.Tensor, ...]:
    """The results of the higher-order operator: output, logsumexp and greatest scores; the last two
    are divided by log(2).
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = cast_by_autocast((query, key, value))
        with torch.autocast(kind, enabled=False):
            return _attention(
                query, key, value, score_mod, block_mask, scale, kernel_options, *buffers
            )
    if query.shape[0] != key.shape[0] and key.shape[0] != 1:
        raise RuntimeError(
            f"Bq and Bkv must broadcast. Got Bq={query.shape[0]} and Bkv={key.shape[0]}"
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (
        t.repeat_interleave(groups, 1).expand(query.shape[0], -1, -1, -1) for t in (key, value)
    )
    attend = functools.partial(
        _on_arrays, score_mod=score_mod, mask_mod=block_mask[-1], scale=scale
    )
    return tuple(apply(lambda values: Result([*attend(*values)]), [query, key, value])[0])


def _on_arrays(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    score_mod: Callable[..., Any],
    mask_mod: Callable[..., Any],
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide, batch = opmath(q.dtype), ((0, 1), (0, 1))
    precise = precision(wide)
    dtype = q.dtype
    q, k, v = (cast(t, wide) for t in (q, k, v))
    change, shows = _everywhere("score_mod", score_mod, wide), _everywhere("mask_mod", mask_mod)

    def rows(first: jax.Array | None, q: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores = lax.dot_general(q, k, (((3,), (3,)), batch), precise) * jnp.asarray(scale, wide)
        places = [jnp.arange(n, dtype=jnp.int64) for n in scores.shape]
        places[2] = places[2] if first is None else places[2] + first
        scores = jnp.where(shows(*places), change(scores, *places), -jnp.inf)
        hidden = (scores == -jnp.inf).all(-1, keepdims=True)
        # rows without a visible key get zeros first, because the derivative of a logsumexp of -inf
        # alone would be NaN
        safe = jnp.where(hidden, 0, scores)
        logsumexp = jnp.where(
            hidden, -jnp.inf, jax.scipy.special.logsumexp(safe, -1, keepdims=True)
        )
        return (
            cast(weighed(scores, v, None, precise), dtype),
            logsumexp,
            scores.max(-1, keepdims=True),
        )

    out, logsumexp, greatest = by_blocks(rows, blocks(q.shape[2], k.shape[2]), q)
    return out, logsumexp[..., 0] / math.log(2), greatest[..., 0] / math.log(2)


def _everywhere(what: str, fn: Callable[..., Any], *dtypes: Any) -> Callable[..., jax.Array]:
    """fn as a function of all scores, if their dtype is given, and of the batches, heads, queries
    and keys, one array of indices each.
    """
    body = _Body(
        fn, tuple(wrap(jnp.zeros((), dtype)) for dtype in [*dtypes, *[jnp.int64] * 4]), what
    )

    def at(*values: jax.Array) -> Any:
        outs = body(values)
        if len(outs) != 1 or outs[0].shape != ():
            raise RuntimeError(
                f"{what}: expected one tensor without dimensions, got shapes "
                f"{[list(o.shape) for o in outs]}"
            )
        return outs[0]

    for place in reversed(range(4)):
        at = jax.vmap(at, [*[0] * len(dtypes), *(0 if i == place else None for i in range(4))])
    return at


private_calls.IN_TRACES["flex_attention"] = private_calls.Ours(flex_attention)
