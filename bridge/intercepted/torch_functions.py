"""Replacements for public functions whose own code in PyTorch goes wrong with traced tensors.

Most code needs none of this, because it calls ATen operators, and those are traced.  At the end are replacements for functions with
which torch's own Python code inspects values or settings; a trace needs another answer from them.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bridge import private
from bridge.errors import DataDependentError, at_line
from bridge.intercepted import gradient_hooks
from bridge.intercepted.control_flow import traced
from bridge.lowering.common.provided import refuse
from bridge.operators import views
from bridge.operators.packed_sequences import FUNCTIONS
from bridge.trace.levels import innermost, state
from bridge.trace.tracing import PYTHON_RULES, Traced, concrete, plan_of, value_of


def _is_unknown_number(x: Any) -> bool:
    """Whether it is a traced 0-dim integer tensor; as an index, PyTorch's C++ would ask for its value."""
    return type(x) is Traced and x.dim() == 0 and not x.is_floating_point() and x.dtype is not torch.bool


def _getitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x[i] with a traced 0-dim integer i: torch would read its value, which may not be known, so it is a gather here."""
    t, index = args
    parts = index if type(index) is tuple else (index,)
    if not any(_is_unknown_number(p) for p in parts):
        return func(t, index)
    if any(isinstance(p, torch.Tensor | list) and not _is_unknown_number(p) for p in parts):  # it broadcasts with the other index tensors
        return func(t, tuple(p.unsqueeze(0) if _is_unknown_number(p) else p for p in parts))
    kept = func(t, tuple(slice(None) if _is_unknown_number(p) else p for p in parts))
    dim, expanded = 0, sum(p is not None and p is not Ellipsis for p in parts)
    for p in parts:
        if p is Ellipsis:
            dim += t.dim() - expanded
        elif _is_unknown_number(p):
            kept = kept.index_select(dim, torch.where(p < 0, p + kept.shape[dim], p).reshape(1)).squeeze(dim)
        elif not isinstance(p, int) or isinstance(p, bool):
            dim += 1
    return kept


def _narrow(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """narrow with a traced start: the length is known, so the slice is a gather of consecutive indices."""
    given = dict(zip(("input", "dim", "start", "length"), args, strict=False)) | kwargs
    start, t = given["start"], given["input"]
    if not _is_unknown_number(start):
        return func(*args, **kwargs)
    size, length = t.shape[given["dim"]], given["length"]
    start = torch.where(start < 0, start + size, start)
    return t.index_select(given["dim"], start + torch.arange(length, device=t.device))


def _ctc_loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ctc_loss with lengths as lists: PyTorch's C++ would read the targets' values to choose a kernel, so they become tensors."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    given = dict(zip(names, args, strict=False)) | kwargs
    lengths = {name: torch.as_tensor(given[name]) for name in names[2:]}
    return func(given["log_probs"], given["targets"], *lengths.values(), *args[4:], **{k: v for k, v in kwargs.items() if k not in names})


def _tensor_split(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tensor_split by a tensor: PyTorch's C++ reads the tensor at its address, and a traced tensor has none."""
    given = dict(zip(("input", "indices_or_sections", "dim"), args, strict=False)) | kwargs
    where = given.get("tensor_indices_or_sections", given.get("indices_or_sections"))
    if not isinstance(where, torch.Tensor) or where.dtype is not torch.int64 or where.dim() > 1:
        return func(*args, **kwargs)
    return func(given["input"], concrete(where, "tensor_split by a tensor").tolist(), given.get("dim", 0))


def _argwhere(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """argwhere: PyTorch's C++ calls nonzero, which torch.func.vmap refuses, although it does not refuse argwhere."""
    return plan_of(torch.ops.aten.argwhere.default)((kwargs["input"] if kwargs else args[0],), {})


def _one_hot(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """one_hot: for wrapper tensors PyTorch's C++ skips the check of the classes."""
    given = dict(zip(("input", "num_classes"), args, strict=False)) | kwargs
    return plan_of(torch.ops.aten.one_hot.default)((given.get("input", given.get("self")), given.get("num_classes", -1)), {})


def _detach_(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """detach_(): PyTorch's kernel for it calls no other kernel, so the trace detaches the tensor here."""
    out = func(*args, **kwargs)
    views.detach_in_place(out)
    return out


def _truth(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """bool(x): PyTorch's C++ calls item(), which torch.func.vmap refuses in other words."""
    if innermost("vmap") is not None:
        concrete(args[0] if args else kwargs["input"], "bool()")
    return func(*args, **kwargs)


def _assert(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch._assert of a tensor; if its value is not known yet, it is checked when the program has run."""
    given = dict(zip(("condition", "message"), args, strict=False)) | kwargs
    condition = given["condition"]
    if condition.numel() != 1:
        return func(*args, **kwargs)  # PyTorch's own error
    refuse(value_of(condition).reshape(()) == 0, str(given["message"]), AssertionError)
    return None


def _bce_with_logits(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """binary_cross_entropy_with_logits with a weight or pos_weight that requires grad: PyTorch's autograd has no formula for it."""
    names: tuple[str, ...] = ("input", "target", "weight", "pos_weight", "reduction")
    if func is F.binary_cross_entropy_with_logits:
        names = ("input", "target", "weight", "size_average", "reduce", "reduction", "pos_weight")
    given = dict(zip(names, args, strict=False)) | kwargs
    weight, pos_weight = given.get("weight"), given.get("pos_weight")
    if not any(isinstance(w, torch.Tensor) and w.requires_grad for w in (weight, pos_weight)):
        return func(*args, **kwargs)
    x, target = given["input"], given["target"]
    reduction = given.get("reduction", "mean")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = torch.nn._reduction.legacy_get_string(given.get("size_average"), given.get("reduce"))
    if x.shape != target.shape:
        return func(*args, **kwargs)  # PyTorch's own error
    positive = F.logsigmoid(x) if pos_weight is None else (1 + (pos_weight - 1) * target) * F.logsigmoid(x)
    loss = (1 - target) * x - positive
    loss = loss if weight is None else loss * weight
    if reduction in ("none", 0):
        return loss
    return loss.mean() if reduction in ("mean", 1) else loss.sum()


def _linear(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """linear of a vector as one product of a matrix and a vector; PyTorch's C++ makes six operators of it."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
    if (
        not given.keys() <= {"input", "weight", "bias"} or not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor)
        or x.dim() != 1 or weight.dim() != 2 or x.shape[0] != weight.shape[1] or x.dtype is not weight.dtype or private.any_autocast()
    ):
        return func(*args, **kwargs)
    if bias is None:
        return torch.mv(weight, x)
    if bias.shape != weight.shape[:1] or bias.dtype is not weight.dtype:
        return func(*args, **kwargs)
    return torch.addmv(bias, weight, x)


def _out_by_value(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """out= of a function in which PyTorch's C++ writes through another tensor on out's memory: the result is copied into out."""
    out = kwargs.get("out")
    if out is None:
        return func(*args, **kwargs)
    result = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    if not torch.can_cast(result.dtype, out.dtype) or (func is torch.matmul and result.dtype is not out.dtype):
        raise RuntimeError(f"Expected out tensor to have dtype {result.dtype}, but got {out.dtype} instead ({func.__name__}){at_line()}")
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: torch.Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> torch.Tensor:
    """torch.nn.functional's, without the error for negative values of var, which are not known here."""
    if not traced(input, target, var):
        return private.original("gaussian_nll_loss")(input, target, var, full, eps, reduction)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    if not isinstance(var, torch.Tensor):
        var = var * torch.ones_like(input)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.ndim != var.ndim or sum(y for x, y in zip(input.shape, var.shape, strict=True) if x != y) != 1:
            raise ValueError("var is of incorrect size")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else getattr(loss, reduction)()


def causal_hint(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether nn.Transformer may treat a mask as the causal one, for speed; False if the mask's values are not known."""
    try:
        return private.original("causal_hint")(mask, is_causal, size)
    except DataDependentError:
        return False


def fused_attention() -> bool:
    """Whether transformers in eval mode may call one kernel for a whole layer; False in a trace, because JAX cannot see into it."""
    return state.level is None and state.recorder is None and private.original("fused_attention")()


def is_compiling() -> bool:
    """Whether torch.compile or torch.export is at work, or this thread traces a jitted function: libraries then ask for no values."""
    return state.jitting or private.original("is_compiling")()


PYTHON_RULES |= {
    torch.Tensor.register_hook: gradient_hooks.register_hook,
    torch.kron: _out_by_value, torch.matmul: _out_by_value, torch.linalg.matrix_rank: _out_by_value,
    torch.Tensor.__getitem__: _getitem, torch.narrow: _narrow, torch.Tensor.narrow: _narrow, torch.ctc_loss: _ctc_loss,
    F.ctc_loss: _ctc_loss, torch.tensor_split: _tensor_split, torch.Tensor.tensor_split: _tensor_split,
    torch.argwhere: _argwhere, torch.Tensor.argwhere: _argwhere, torch.Tensor.detach_: _detach_, torch.detach_: _detach_,
    F.binary_cross_entropy_with_logits: _bce_with_logits, torch.binary_cross_entropy_with_logits: _bce_with_logits,
    torch.Tensor.__bool__: _truth, torch.is_nonzero: _truth, torch.Tensor.is_nonzero: _truth, F.one_hot: _one_hot, torch._assert: _assert,
    F.linear: _linear,
}
PYTHON_RULES |= FUNCTIONS
private.IN_TRACES.update({
    "gaussian_nll_loss": gaussian_nll_loss, "causal_hint": causal_hint, "fused_attention": fused_attention, "is_compiling": is_compiling,
})  # fmt: skip
