"""FlexAttention inside a trace: PyTorch's own checks and outputs around a dense attention on traced tensors.

PyTorch would pass its higher-order operator to torch.compile, which does not know traced tensors, and has no backward on CPUs.
``jax.vmap`` maps the two functions of one element, score_mod and mask_mod, over batches, heads, queries and keys.  The numbers are
those of PyTorch's eager reference, ``torch._higher_order_ops.flex_attention.math_attention``.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge import private_calls
from bridge.intercepted.control_flow import _Body
from bridge.trace.levels import state
from bridge.trace.tracing import value_of, wrap


def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, on traced tensors if this thread has a trace open."""
    if state.level is None:
        return private_calls.original("flex_attention")(*args, **kwargs)
    return private_calls.flex_attention_around(_dense)(*args, **kwargs)


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Callable[..., Any], block_mask: tuple[Any, ...], scale: float,
    kernel_options: dict[str, Any], *buffers: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of the higher-order operator: output, logsumexp and greatest scores; the last two are divided by log(2)."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (t if t.dtype is torch.float64 else t.to(dtype) for t in (query, key, value))
        with torch.autocast(kind, enabled=False):
            return _dense(query, key, value, score_mod, block_mask, scale, kernel_options, *buffers)
    if query.shape[0] != key.shape[0] and key.shape[0] != 1:
        raise RuntimeError(f"Bq and Bkv must broadcast. Got Bq={query.shape[0]} and Bkv={key.shape[0]}")
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1).expand(query.shape[0], -1, -1, -1) for t in (key, value))
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)) * scale
    shown = _everywhere("mask_mod", block_mask[-1], scores.shape)
    scores = _everywhere("score_mod", score_mod, scores.shape, scores)
    scores = torch.where(shown, scores, float("-inf"))
    hidden = (scores == float("-inf")).all(-1)
    # rows without a visible key get zeros first, because the derivative of a logsumexp of -inf alone would be NaN
    safe = torch.where(hidden[..., None], 0.0, scores)
    logsumexp = torch.where(hidden, float("-inf"), safe.logsumexp(-1))
    out = torch.where(hidden[..., None], 0.0, safe.softmax(-1)).to(query.dtype) @ value.to(query.dtype)
    return out, logsumexp / math.log(2), scores.amax(-1) / math.log(2)


def _everywhere(what: str, fn: Callable[..., Any], shape: Sequence[int], *scores: torch.Tensor) -> torch.Tensor:
    """fn at each (batch, head, query, key): its arguments are the score, if scores are given, and the four indices."""
    values = [value_of(t) for t in scores]
    body = _Body(fn, tuple(wrap(jnp.zeros((), dtype)) for dtype in [*(v.dtype for v in values), *[jnp.int64] * 4]), what)

    def at(*values: jax.Array) -> Any:
        outs = body(values)
        if len(outs) != 1 or outs[0].shape != ():
            raise RuntimeError(f"{what}: expected one tensor without dimensions, got shapes {[list(o.shape) for o in outs]}")
        return outs[0]

    for place in reversed(range(4)):
        at = jax.vmap(at, [*[0] * len(values), *(0 if i == place else None for i in range(4))])
    return wrap(at(*values, *(jnp.arange(n, dtype=jnp.int64) for n in shape)))


private_calls.IN_TRACES["flex_attention"] = flex_attention
