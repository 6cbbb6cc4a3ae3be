"""Attention inside a trace: which operator computes scaled_dot_product_attention, and
flex_attention on arrays.

PyTorch's function chooses an operator by device, shapes and dropout before a trace sees it. Here it
is one operator where its lowering computes by blocks, and wherever the user has registered a
lowering of their own. FlexAttention is computed by blocks where there are many scores.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import lax

from bridge import private_calls
from bridge.boundary.calls import apply, plain
from bridge.boundary.results import Result
from bridge.intercepted.control_flow import _Body
from bridge.lowering.common.promotion import cast, opmath
from bridge.lowering.linalg.matmul import precision
from bridge.lowering.nn.attention import blocks, by_blocks, weighed
from bridge.lowering.registry import OVERRIDDEN
from bridge.trace.torch_random import drawing
from bridge.trace.tracing import plan_of, wrap

_WHOLE = getattr(torch.ops.aten, "scaled_dot_product_attention", None)


def _by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention of CUDA tensors, for which PyTorch's fused kernels draw dropout's numbers and have
    derivatives of their own.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            attn_mask.logical_not(), float("-inf")
        )
    if enable_gqa and query.dim() == key.dim() == value.dim() and query.dim() >= 3:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )[0]


_SIGNATURE = inspect.signature(_by_formula)


def _attention(func: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The rule of scaled_dot_product_attention."""
    try:
        call = _SIGNATURE.bind(*args, **kwargs)
    except TypeError:
        return func(*args, **kwargs)  # which says what is wrong
    query = call.arguments["query"]
    if isinstance(query, torch.Tensor) and (
        _WHOLE.default in OVERRIDDEN or _by_blocks(**call.arguments)
    ):
        call.apply_defaults()
        *given, scale, enable_gqa = call.args
        # the schema's defaults
        while len(given) > 3 and not (isinstance(given[-1], torch.Tensor) or given[-1]):
            given.pop()
        named = {"scale": scale, "enable_gqa": enable_gqa}
        named = {k: x for k, x in named.items() if x is not None and x is not False}
        return plain(plan_of(_WHOLE.default))(tuple(cast_by_autocast(given)), named)
    on_cuda = isinstance(query, torch.Tensor) and query.device.type == "cuda"
    return _by_formula(*call.args, **call.kwargs) if on_cuda else func(*args, **kwargs)


def _by_blocks(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether the lowering of the whole operator computes attention, by blocks: there are many
    scores, and PyTorch accepts the arguments.

    Where torch draws dropout's numbers, it draws those of all scores at once.
    """
    tensors = query, key, value
    if isinstance(scale, torch.Tensor) or not all(
        isinstance(t, torch.Tensor) and t.dim() > 1 and t.numel() for t in tensors
    ):
        return False
    if dropout_p and (drawing() is not None or not 0 <= dropout_p <= 1):
        return False
    (length, width), (keys, _) = query.shape[-2:], key.shape[-2:]
    if (
        blocks(length, keys) == 1
        or key.shape[-1] != width
        or value.shape[-2] != keys
        or not query.is_floating_point()
    ):
        return False
    if len({(t.device, t.dtype) for t in tensors}) > 1:
        return False
    leads = [t.shape[:-2] for t in tensors]
    if enable_gqa:
        if not all(leads) or any(query.shape[-3] % lead[-1] for lead in leads):
            return False
        leads = [torch.Size((*lead[:-1], query.shape[-3])) for lead in leads]
    try:
        scores = (*torch.broadcast_shapes(*leads), length, keys)
        if attn_mask is None:
            return True
        return (
            not is_causal
            and attn_mask.device == query.device
            and attn_mask.dtype in (torch.bool, torch.float32, query.dtype)
            and attn_mask.dim() > 1
            and torch.broadcast_shapes(attn_mask.shape, scores) == scores
        )
    except RuntimeError:  # the shapes do not fit
        return False


def cast_by_autocast(args: Sequence[Any]) -> list[Any]:
    """Attention's arguments, the tensors among them in the dtype that autocast gives them where it
    is on; the first is a tensor.
    """
    kind = args[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(args)
    dtype = torch.get_autocast_dtype(kind)
    wide = torch.float64
    return [
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not wide
        else x
        for x in args
    ]


def multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """torch.nn.functional.multi_head_attention_forward, which calls the rule above: it would not
    ask for it.
    """
    rule = functools.partial(_attention, F.scaled_dot_product_attention)
    own = private_calls.with_globals("multi_head_attention", scaled_dot_product_attention=rule)
    return own(*args, **kwargs)


# -- flex_attention --------------------------------------------------------------------------------
# PyTorch would pass its higher-order operator to torch.compile, which does not know traced tensors,
# and has no backward on CPUs. Here PyTorch's own checks and outputs are around attention on arrays.
# ``jax.vmap`` maps the two functions of one element, score_mod and mask_mod, over batches, heads,
# queries and keys. The numbers are those of PyTorch's eager reference,
# ``torch._higher_order_ops.flex_attention.math_attention``.
def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """torch.nn.attention.flex_attention.flex_attention on traced tensors."""
    return private_calls.flex_attention_around(_flexible)(*args, **kwargs)


def _flexible(
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
            return _flexible(
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


#: torch function -> the function that is called in its place.
FUNCTIONS: dict[Any, Any] = {
    function: _attention
    for function in (F.scaled_dot_product_attention, _WHOLE, getattr(_WHOLE, "default", None))
    if function is not None  # in a version of PyTorch without the operator
}
private_calls.IN_TRACES["multi_head_attention"] = private_calls.Ours(
    multi_head_attention, recorded=True
)
private_calls.IN_TRACES["flex_attention"] = private_calls.Ours(flex_attention)
