"""Replacements for public functions whose own code in PyTorch goes wrong with traced tensors.

Most code needs none of this, because it calls ATen operators, and those are traced. At the end are
replacements for functions with which torch's own Python code inspects values or settings; a trace
needs another answer from them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import Array
from torch.utils import _pytree as pytree

from bridge import private, private_calls, private_jax
from bridge.convert import tensors
from bridge.errors import DataDependentError, at_line
from bridge.intercepted import attention, gradient_hooks, recurrent_layers
from bridge.intercepted.control_flow import traced
from bridge.lowering.common.provided import Range, check, refuse
from bridge.operators import special_cases, views
from bridge.operators.special_cases import presumed
from bridge.private_calls import Ours, in_call, in_trace, intercepted
from bridge.process import having
from bridge.trace import python_numbers
from bridge.trace.aliasing import conjugates, views_between
from bridge.trace.levels import Unrecordable, innermost, state
from bridge.trace.torch_random import refuse_unmapped
from bridge.trace.tracing import (
    NO_KERNEL,
    PYTHON_RULES,
    Traced,
    concrete,
    exchanged,
    has_rules,
    plan_of,
    unknown_value,
    value_of,
)
from bridge.transform_kinds import MAPPING


def _is_unknown_number(x: Any) -> bool:
    """Whether it is a 0-dim integer tensor that a program reads, and no mask; as an index,
    PyTorch's C++ would ask for its value.
    """
    if type(x) is not Traced and not (isinstance(x, torch.Tensor) and state.level is not None):
        return False
    return (
        x.dim() == 0
        and not (x.is_floating_point() or x.is_complex())
        and x.dtype not in (torch.bool, torch.uint8)
    )


def _indexed(func: Callable[..., Any], t: torch.Tensor, index: Any, *value: Any) -> Any:
    """x[i] or x[i] = v with a 0-dim integer i whose value may not be known: torch would read it.
    value: v, if there is one.
    """
    parts = index if type(index) is tuple else (index,)
    late = [python_numbers.is_late(p) and p.node.kind is int for p in parts]
    parts = tuple([p.node.tensor if n else p for p, n in zip(parts, late, strict=True)])
    unknown = [_is_unknown_number(p) for p in parts]
    if not any(unknown):
        return func(t, index, *value)
    each = [*zip(parts, unknown, strict=True)]
    # it broadcasts with the other index tensors
    if any(isinstance(p, torch.Tensor | list) and not u for p, u in each):
        return func(t, tuple(p.unsqueeze(0) if u else p for p, u in each), *value)
    kept = torch.Tensor.__getitem__(t, tuple(slice(None) if u else p for p, u in each))
    dim, expanded = 0, sum(p is not None and p is not Ellipsis for p in parts)
    words = "index {{index}} is out of bounds for dimension {dim} with size {size}"
    for p, u in each:
        if p is Ellipsis:
            dim += t.dim() - expanded
        elif u:
            kept = _part(kept, dim, p, 1, words, written=bool(value)).squeeze(dim)
        elif not isinstance(p, int) or isinstance(p, bool):
            dim += 1
    if not value:
        return kept
    (new,) = value
    if not isinstance(new, torch.Tensor):
        return kept.fill_(new)
    extra = new.dim() - kept.dim()  # dimensions of size 1 in front may be too many
    return kept.copy_(new.squeeze(tuple(range(extra))) if extra > 0 else new)


def _narrow(
    func: Callable[..., Any], input: torch.Tensor, dim: int, start: Any, length: int
) -> Any:
    """narrow with a start whose value may not be known; the length is known."""
    if not _is_unknown_number(start):
        return func(input, dim, start, length)
    return _part(
        input,
        dim,
        start,
        length,
        f"start ({{{{index}}}}) + length ({length}) exceeds dimension size ({{size}}).",
    )


def _select(func: Callable[..., Any], input: torch.Tensor, dim: int, index: Any) -> Any:
    """select with an index whose value may not be known."""
    if not _is_unknown_number(index) or not input.dim():
        return func(input, dim, index)
    at = (*[slice(None)] * (dim % input.dim()), index)
    return _indexed(torch.Tensor.__getitem__, input, at)


def _fill_diagonal(
    func: Callable[..., Any], input: torch.Tensor, fill_value: Any, wrap: bool = False
) -> torch.Tensor:
    """fill_diagonal_ by views: PyTorch's C++ uses as_strided, which is refused where a tensor's
    place in memory is not known.
    """
    if input.dim() < 2 or (input.dim() > 2 and len(set(input.shape)) > 1):
        return func(input, fill_value, wrap)
    rows, columns = input.shape[0], input.shape[-1]
    for first in range(0, rows if wrap and input.dim() == 2 else 1, columns + 1):
        diagonal = input[first:] if first else input
        while diagonal.dim() > 1:
            diagonal = diagonal.diagonal(0, 0, -1)
        diagonal.fill_(fill_value)
    return input


def _bernoulli_(func: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    refuse_unmapped(input)
    with having(state, filling=True):
        return func(input, *args, **kwargs)


def _part(
    t: torch.Tensor, dim: int, start: torch.Tensor, length: int, words: str, written: bool = False
) -> torch.Tensor:
    """The part of a dimension that begins at start: a view, as in PyTorch.

    If a vmap maps start, it is a copy, as in torch.func, unless it is written to at once. words:
    the error for a start out of range.
    """
    dim, size = dim % max(t.dim(), 1), t.shape[dim]
    value: Array = value_of(start.long())
    # without lanes, the dimension may be empty
    if (private_jax.mapped([value]) and not written) or not size:
        first = torch.where(start < 0, start.long() + size, start)
        return t.index_select(dim, first + torch.arange(length, device=t.device))
    value = check(value, Range(-size, size - length + 1, words.format(dim=dim, size=size)))
    place = jnp.where(value < 0, value + size, value)
    if length > 1:
        place = check(place, Range(0, size - length + 1, words.format(dim=dim, size=size)))
    return views.part(t, dim, place, length)


def _ctc_loss(
    func: Callable[..., Any],
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """ctc_loss with lengths as lists: PyTorch's C++ would read the targets' values to choose a
    kernel, so they become tensors.
    """
    return func(
        log_probs,
        targets,
        torch.as_tensor(input_lengths),
        torch.as_tensor(target_lengths),
        *args,
        **kwargs,
    )


def _tensor_split(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """tensor_split by a tensor: PyTorch's C++ reads the tensor at its address, and a traced tensor
    has none.
    """
    given = dict(zip(("input", "indices_or_sections", "dim"), args, strict=False)) | kwargs
    where = given.get("tensor_indices_or_sections", given.get("indices_or_sections"))
    if not isinstance(where, torch.Tensor) or where.dtype is not torch.int64 or where.dim() > 1:
        return func(*args, **kwargs)
    return func(
        given["input"], concrete(where, "tensor_split by a tensor").tolist(), given.get("dim", 0)
    )


def _argwhere(func: Callable[..., Any], input: torch.Tensor) -> Any:
    """argwhere: PyTorch's C++ calls nonzero, which torch.func.vmap refuses, although it does not
    refuse argwhere.
    """
    return plan_of(torch.ops.aten.argwhere.default)((input,), {})


def _one_hot(func: Callable[..., Any], input: torch.Tensor, num_classes: int = -1) -> Any:
    """one_hot: for wrapper tensors PyTorch's C++ skips the check of the classes."""
    return plan_of(torch.ops.aten.one_hot.default)((input, num_classes), {})


def _detach_(func: Callable[..., Any], input: Traced) -> Any:
    """detach_(): PyTorch's kernel for it calls no other kernel, so the trace detaches the tensor
    here.
    """
    out = func(input)
    views.detach_in_place(out)
    return out


def _is_conj(func: Callable[..., Any], input: torch.Tensor) -> bool:
    """is_conj(): PyTorch marks a view as conjugated, and a trace has its numbers; those of an
    argument are conjugated before it begins.
    """
    if type(input) is not Traced:
        return func(input)
    return input.is_complex() and sum(map(conjugates, views_between(input.node)[1])) % 2 == 1


def _resolve_conj(func: Callable[..., Any], input: torch.Tensor) -> torch.Tensor:
    """resolve_conj(): the tensor itself, or a copy of it if it is a conjugated view."""
    return input.clone() if _is_conj(torch.is_conj, input) else func(input)


def _truth(func: Callable[..., Any], input: torch.Tensor) -> Any:
    """bool(x): PyTorch's C++ calls item(), which torch.func.vmap refuses in other words."""
    if presumed(input) is not None:
        return func(input)
    if innermost(MAPPING) is not None:
        concrete(input, "bool()")
    return _number(func, input)


def _number(func: Callable[..., Any], input: torch.Tensor) -> Any:
    """bool(x), float(x), int(x): torch.tensor([x]) asks for it where PyTorch's C++ calls no
    dispatch mode, and item() would read memory.
    """
    if type(input) is not Traced or input.numel() != 1:
        return func(input)
    with private.below_python(), jax.ensure_compile_time_eval():
        asked = "bool()" if func is torch.Tensor.__bool__ else "item()"
        return func(tensors.to_torch(jnp.array(concrete(input, asked)), input.device))


def _new_tensor(
    func: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """x.new_tensor([y]), x.new([y]): the values of tensors in a list are read before PyTorch's C++
    reads their memory.
    """

    def with_values(data: Any) -> Any:
        return (
            pytree.tree_map_only(Traced, lambda t: t.item(), data)
            if type(data) in (list, tuple)
            else data
        )

    return func(
        input, *map(with_values, args), **{name: with_values(x) for name, x in kwargs.items()}
    )


def _where(func: Callable[..., Any], condition: torch.Tensor, *values: Any, **options: Any) -> Any:
    """where of a condition alone: PyTorch's C++ calls nonzero,
    and torch.func.vmap refuses where.
    """
    try:
        return func(condition, *values, **options)
    except DataDependentError:
        if values or options:
            raise
        raise unknown_value("aten.where", True) from None


def _assert(func: Callable[..., Any], condition: torch.Tensor, message: Any) -> Any:
    """torch._assert of a tensor; if its value is not known yet, it is checked when the program has
    run.
    """
    if condition.numel() != 1:
        return func(condition, message)  # PyTorch's own error
    refuse(value_of(condition).reshape(()) == 0, str(message), AssertionError)


def _bce_with_logits(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """binary_cross_entropy_with_logits with a weight or pos_weight that requires grad: PyTorch's
    autograd has no formula for it.
    """
    options = (
        "size_average reduce reduction pos_weight"
        if func is F.binary_cross_entropy_with_logits
        else "pos_weight reduction"
    )
    given = dict(zip(["input", "target", "weight", *options.split()], args, strict=False)) | kwargs
    x, target, weight, pos_weight, *legacy = map(
        given.get, ("input", "target", "weight", "pos_weight", "size_average", "reduce")
    )
    if (
        not any(isinstance(w, torch.Tensor) and w.requires_grad for w in (weight, pos_weight))
        or x.shape != target.shape
    ):
        return func(*args, **kwargs)
    reduction = (
        given.get("reduction", "mean")
        if legacy == [None, None]
        else torch.nn._reduction.legacy_get_string(*legacy)
    )
    number = torch.nn._reduction.get_enum(reduction) if isinstance(reduction, str) else reduction
    return private.decompositions()[torch.ops.aten.binary_cross_entropy_with_logits.default](
        x, target, weight, pos_weight, number
    )


def _linear(func: Callable[..., Any], input: Any, weight: Any, bias: Any = None, **out: Any) -> Any:
    """linear of a vector as one product of a matrix and a vector; PyTorch's C++ makes six operators
    of it.
    """
    if (
        out
        or not isinstance(input, torch.Tensor)
        or not isinstance(weight, torch.Tensor)
        or input.dim() != 1
        or weight.dim() != 2
        or input.shape[0] != weight.shape[1]
        or input.dtype is not weight.dtype
        or private.any_autocast()
        or (bias is not None and (bias.shape != weight.shape[:1] or bias.dtype is not weight.dtype))
    ):
        return func(input, weight, bias, **out)
    return torch.mv(weight, input) if bias is None else torch.addmv(bias, weight, input)


def _addcdiv_(
    func: Callable[..., Any], input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1
) -> Any:
    """addcdiv_ with a value that a program computes, as optimizers call it; PyTorch's C++ would ask
    for the number.
    """
    return (
        input.add_(tensor1 / tensor2 * value)
        if isinstance(value, torch.Tensor)
        else func(input, tensor1, tensor2, value=value)
    )


def _out_by_value(func: Callable[..., Any], *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """out= of a function in which PyTorch's C++ writes through another tensor on out's memory: the
    result is copied into out.
    """
    result = func(*args, **kwargs)
    if out is None:
        return result
    if not torch.can_cast(result.dtype, out.dtype) or (
        func is torch.matmul and result.dtype is not out.dtype
    ):
        raise RuntimeError(
            f"Expected out tensor to have dtype {result.dtype}, but got {out.dtype} instead "
            f"({func.__name__}){at_line()}"
        )
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def gaussian_nll_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.nn.functional's, whose only question, whether any value of var is negative, is
    answered with no: the values are not known here.
    """
    without_question = types.SimpleNamespace(**{**vars(torch), "any": lambda mask: False})
    return private_calls.with_globals("gaussian_nll_loss", torch=without_question)(*args, **kwargs)


def causal_hint(
    mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Whether nn.Transformer may treat a mask as the causal one, for speed; False if the mask's
    values are not known.
    """
    try:
        return private_calls.original("causal_hint")(mask, is_causal, size)
    except DataDependentError:
        return False


def jiterator(*args: Any, **kwargs: Any) -> Any:
    """A kernel of torch.cuda.jiterator, which reads at the addresses of tensors and does not ask
    whether they have memory.
    """
    raise RuntimeError(f"torch.cuda.jiterator: {NO_KERNEL}{at_line()}")


def compile(*args: Any, **kwargs: Any) -> Any:
    """torch.compile; a function that it compiles inside of a trace runs there as the plain
    function.
    """
    return private_calls.compile_in_trace(private_calls.original("compile"), *args, **kwargs)


def compiler_of_frames(compiler: Any) -> Any:
    """What torch.compile compiles the frames of a function with; None in a trace, where it would
    compile the trace's own Python.
    """
    private_calls.count_no_compiled_frames()
    return None


def deepcopy(t: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy of a leaf from outside that belongs to the trace; PyTorch's own code copies its
    memory.
    """
    if id(t) not in memo:
        copied = t.detach().clone()
        memo[id(t)] = copied.requires_grad_() if t.requires_grad else copied
    return memo[id(t)]


def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """torch.utils.swap_tensors, which would put a tensor of the trace in the place of a tensor from
    outside.
    """
    raise exchanged("swap_tensors")


def register_parameter(
    module: torch.nn.Module, name: str, param: torch.nn.Parameter | None
) -> None:
    """That of Module, which would put a tensor of the trace in the place of a parameter from
    outside.
    """
    old = module.__dict__.get("_parameters", {}).get(name)
    if type(param) is Traced and old is not None and type(old) is not Traced:
        raise exchanged(f"the parameter {name}")
    private_calls.original("register_parameter")(module, name, param)


def in_class(result: Any, cls: type) -> Any:
    """An operator's result in the class of its operands, a subclass of torch.Tensor from outside; a
    traced result stays a plain tensor.
    """
    if has_rules(cls):
        raise NotImplementedError(  # PyTorch's operators, such as *, would catch a TypeError
            "tensor: expected a tensor of a class without a __torch_function__ of its own, got a "
            f"{cls.__name__}, whose rules would not hold for what a transform computes with it; "
            f"pass or capture x.as_subclass(torch.Tensor){at_line()}"
        )
    return result


def batch_norm_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """That of BatchNorm; with momentum=None the number of batches, one over which is the weight of
    this one, stays a tensor if unknown.
    """
    counted = (
        layer.momentum is None
        and layer.training
        and layer.track_running_stats
        and layer.num_batches_tracked is not None
    )
    if counted and state.recorder is not None and state.recorder.mapped():
        state.recorder.go_on(Unrecordable("values inside vmap"))
    if not (state.level is not None and counted and layer.running_mean is not None):
        return private_calls.original("batch_norm_forward")(layer, input)
    layer._check_input_dim(input)
    layer.num_batches_tracked.add_(1)
    weight = layer.num_batches_tracked.double().reciprocal()
    mean, var = torch.zeros_like(layer.running_mean), torch.zeros_like(layer.running_var)
    # with momentum 1 they are those of the batch
    out = F.batch_norm(input, mean, var, layer.weight, layer.bias, True, 1.0, layer.eps)
    with torch.no_grad():
        for running, now in ((layer.running_mean, mean), (layer.running_var, var)):
            running.mul_(1 - weight).add_(now * weight)
    return out


# TorchScript's functions and methods run without its own derivatives, which would detach traced
# tensors
class _Unoptimized:
    """A TorchScript function or method that calls PyTorch's operators one after the other; a
    recorder takes it for an operator.
    """

    def __init__(self, callee: Any) -> None:
        # what PyTorch has optimized already stays optimized, so this is a new function of the same
        # code
        self.function = private_calls.script_of_graph(callee)

    def __call__(self, *args: Any) -> Any:
        with torch.jit.optimized_execution(False):
            return private_calls.script_itself(self.function)(*args)


def script_called(callee: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a TorchScript function or method; a recorder refuses methods, because their modules have
    parameters that it does not see.
    """
    given = private_calls.script_arguments(callee, args, kwargs) if in_call() else None
    if given is None:
        return private_calls.script_itself(callee)(*args, **kwargs)
    unoptimized = vars(callee).get("_torchfunc_jax") or _Unoptimized(callee)
    # kept with it, so that a recorder meets the same object again
    callee._torchfunc_jax = unoptimized
    return (
        unoptimized(*given) if state.level is not None else state.recorder.call(unoptimized, given)
    )


PYTHON_RULES |= {
    torch.Tensor.register_hook: gradient_hooks.register_hook,
    torch.Tensor.retain_grad: gradient_hooks.retain_grad,
    torch.kron: _out_by_value,
    torch.matmul: _out_by_value,
    torch.linalg.matrix_rank: _out_by_value,
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.__setitem__: _indexed,
    torch.narrow: _narrow,
    torch.Tensor.narrow: _narrow,
    torch.select: _select,
    torch.Tensor.select: _select,
    torch.Tensor.fill_diagonal_: _fill_diagonal,
    torch.ctc_loss: _ctc_loss,
    F.ctc_loss: _ctc_loss,
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
    torch.argwhere: _argwhere,
    torch.Tensor.argwhere: _argwhere,
    torch.Tensor.detach_: _detach_,
    torch.detach_: _detach_,
    F.binary_cross_entropy_with_logits: _bce_with_logits,
    torch.binary_cross_entropy_with_logits: _bce_with_logits,
    torch.Tensor.is_conj: _is_conj,
    torch.is_conj: _is_conj,
    torch.Tensor.resolve_conj: _resolve_conj,
    torch.resolve_conj: _resolve_conj,
    torch.Tensor.__bool__: _truth,
    torch.is_nonzero: _truth,
    torch.Tensor.is_nonzero: _truth,
    F.one_hot: _one_hot,
    torch._assert: _assert,
    torch.where: _where,
    F.linear: _linear,
    torch.Tensor.__float__: _number,
    torch.Tensor.__int__: _number,
    torch.Tensor.__index__: _number,
    torch.Tensor.__complex__: _number,
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.new: _new_tensor,
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.Tensor.addcdiv_: _addcdiv_,
    **special_cases.PACKING,
    **attention.FUNCTIONS,
    **recurrent_layers.FUNCTIONS,
}
private_calls.IN_TRACES.update(
    {
        "gaussian_nll_loss": Ours(gaussian_nll_loss, traced, recorded=True),
        "causal_hint": Ours(causal_hint, recorded=True),
        # whether transformers in eval mode may call one kernel for a whole layer, into which JAX
        # cannot see
        "fused_attention": Ours(lambda: False, in_call),
        # whether torch.compile or torch.export is at work: libraries then ask for no values
        "is_compiling": Ours(lambda: True, lambda: state.jitting, recorded=True),
        "jiterator": Ours(jiterator, lambda *_, **__: in_trace() and torch.cuda.is_available()),
        "batch_norm_forward": Ours(batch_norm_forward, in_call, recorded=True),
        "deepcopy": Ours(deepcopy, lambda t, _: in_call() and t.is_leaf, recorded=True),
        "in_class": Ours(in_class, lambda result, _: type(result) is Traced),
        "compile": Ours(compile, in_call, recorded=True),
        "swap_tensors": Ours(
            swap_tensors, lambda t1, t2: in_trace() and not type(t1) is type(t2) is Traced
        ),
        "register_parameter": Ours(register_parameter, recorded=True),
        "compiler_of_frames": Ours(compiler_of_frames, in_call),
    }
)
intercepted.scripts = script_called
