"""scaled_dot_product_attention inside a trace: which operator computes it.

PyTorch's function chooses an operator by device, shapes and dropout before a trace sees it. Here it
is one operator where its lowering computes by blocks, and wherever the user has registered a
lowering of their own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bridge import private_calls
from bridge.boundary.calls import plain
from bridge.lowering.nn.attention import blocks
from bridge.lowering.registry import OVERRIDDEN
from bridge.trace.torch_random import drawing
from bridge.trace.tracing import plan_of

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
    """torch.nn.functional.multi_head_attention_forward, which calls the function above: it would
    not ask for a rule.
    """
    return _with_rule()(*args, **kwargs)


@functools.cache
def _with_rule() -> Callable[..., Any]:
    function: Any = private_calls.original("multi_head_attention")
    space = {
        **function.__globals__,
        "scaled_dot_product_attention": functools.partial(
            _attention, F.scaled_dot_product_attention
        ),
    }
    return types.FunctionType(function.__code__, space, function.__name__, function.__defaults__)


#: torch function -> the function that is called in its place.
FUNCTIONS: dict[Any, Any] = dict.fromkeys(
    (F.scaled_dot_product_attention, _WHOLE, getattr(_WHOLE, "default", None)), _attention
)
FUNCTIONS.pop(None, None)  # a version of PyTorch without the operator
private_calls.IN_TRACES["multi_head_attention"] = private_calls.Ours(
    multi_head_attention, recorded=True
)
