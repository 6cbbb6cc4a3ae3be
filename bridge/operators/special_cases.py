"""Operators that a lowering cannot express: they read values (the lengths of packed sequences too),
exchange a tensor's memory, or are about objects that are not tensors, the profiler's marks and
process groups.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.distributed

from bridge import private, private_jax
from bridge.convert import dtypes, tensors
from bridge.errors import DataDependentError, at_line
from bridge.lowering.common.promotion import cast, constant
from bridge.lowering.common.provided import refuse
from bridge.lowering.registry import LOWERINGS, of_this_torch
from bridge.operators.mutation import refuse_overlap, store
from bridge.operators.operands import note_use, pure, stop, value_in
from bridge.process import process
from bridge.trace import folding
from bridge.trace.tracing import (
    OWN_RULES,
    Traced,
    concrete,
    exchanged,
    node_of,
    over,
    own_rule,
    traced_python,
    unknown_value,
    wrap,
)

own_rule("aten.is_same_size")(lambda args, kwargs: args[0].shape == args[1].shape)
own_rule("aten._has_same_storage_numel")(lambda args, kwargs: args[0].numel() == args[1].numel())
# DLPack asks; inside a transform a tensor is in JAX's memory
own_rule("aten.is_pinned")(lambda args, kwargs: False)
# whether PyTorch's ctc_loss calls a library
own_rule(
    "aten._use_cudnn_ctc_loss",
    "aten._use_cudnn_ctc_loss.Tensor",
    "aten._use_miopen_ctc_loss",
    "aten._use_miopen_ctc_loss.Tensor",
)(lambda args, kwargs: False)


@own_rule("aten.copy_")
def _copy_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    refuse_overlap((), [target], [("src", source)])
    value, dtype = value_in(source), dtypes.to_jax(target.dtype)
    if value.dtype != dtype:
        value = folding.run(cast, (value, dtype), {})
    if value.shape != tuple(target.shape):
        try:
            value = folding.run(jnp.broadcast_to, (value, tuple(target.shape)), {})
        except ValueError:
            raise RuntimeError(
                f"The expanded size of the tensor ({list(target.shape)}) must match the existing "
                f"size ({list(value.shape)}){at_line()}"
            ) from None
    if torch.is_grad_enabled():
        note_use((source,))
    else:
        value = stop(value)
    store(target, value)
    return target


@own_rule("aten.lift_fresh", "aten.lift")
def lift_fresh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    if type(t) is Traced or t.is_meta:  # torch 2.15 finds the default device by making a tensor
        return t
    # a tensor just made from Python data is a constant: it is not read again at the next call
    with private.below_python():
        return wrap(constant(tensors.as_numpy(tensors.plain(t).cpu()).copy()), t.device)


#: the presumed truth of a tensor -> what is raised when the program has run and it is another
_UNEXPECTED: dict[bool, tuple[str, type[Exception]]] = {
    True: (
        (
            "torch.distributions: expected every value to be within its constraint; something is "
            "outside of its own"
        ),
        ValueError,
    ),
    False: (
        (
            "torch.any(info): the program was traced as if each matrix could be factored, and one "
            "could not; add to its diagonal, or call the function outside of jit"
        ),
        torch.linalg.LinAlgError,
    ),
}


def presumed(t: torch.Tensor) -> bool | None:
    """The truth of a tensor for which a program goes on if its value is not known, and which is
    checked when it has run; None: it asks.

    True of what torch.distributions asks of its arguments, False of ``torch.any(info)`` of an
    operator that factors matrices.
    """
    if type(t) is not Traced or t.dtype is not torch.bool or t.dim():
        return None
    if t.node.maker is torch.ops.aten._is_all_true.default:
        return True
    return False if _of_info(t) else None


def _of_info(t: Any) -> bool:
    """Whether this says which matrices could not be factored, or whether there is one."""
    maker = LOWERINGS.get(t.node.maker) if type(t) is Traced else None
    return maker is not None and maker.info and not t.is_floating_point() and not t.is_complex()


@own_rule("aten._local_scalar_dense")
def _item(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return concrete(args[0], "item()").item()
    except DataDependentError:
        truth = presumed(args[0])
        if truth is None:
            raise
    refuse(value_in(args[0]) != truth, *_UNEXPECTED[truth])
    return truth


@own_rule("aten.any")
def _any(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    func = torch.ops.aten.any.default
    result = pure(func, LOWERINGS[func])(args, kwargs)
    if _of_info(args[0]):
        result.node.maker = args[0].node.maker
    return result


@own_rule("aten._is_all_true")
def _is_all_true(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = value_in(args[0])
    with (
        contextlib.nullcontext()
        if isinstance(value, jax.core.Tracer)
        else jax.ensure_compile_time_eval()
    ):
        return wrap(jnp.all(value), args[0].device)


@own_rule("aten._assert_async", "aten._assert_async.msg", "aten._functional_assert_async.msg")
def _assert(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch._assert_async: the value is checked now, or when the program has run if it is not
    known.
    """
    value = value_in(args[0])
    refuse(
        value == 0,
        args[1] if len(args) > 1 else "Expected Tensor with single nonzero value, but got zero",
    )
    return args[2] if len(args) > 2 else None


@own_rule("aten.equal")
def _equal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    a, b = args
    if a.shape != b.shape:
        return False
    with contextlib.suppress(DataDependentError):
        return bool((concrete(a, "torch.equal") == concrete(b, "torch.equal")).all())
    one, other = value_in(a), value_in(b)
    if one.dtype == other.dtype and private_jax.same_computation(one, other):
        if a.is_floating_point() or a.is_complex():
            unexpected = (
                "torch.equal: the program was traced as if two tensors that are computed alike "
                "were equal, and they are NaN"
            )
            refuse(jnp.isnan(one), unexpected)
        return True
    maker = LOWERINGS.get(a.node.maker) if type(a) is Traced else None
    if a.dim() == 0 and a.dtype is torch.bool and maker is not None and maker.presumed is not None:
        unexpected = (
            "cov: weights cannot be negative nor sum to zero; istft: the "
            "window's overlap-add must not be zero"
        )
        refuse(value_in(a) != maker.presumed, unexpected)
        return maker.presumed
    raise unknown_value("torch.equal")


@own_rule("aten._new_zeros_with_same_feature_meta")
def _feature_zeros(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    other = args[1]
    return wrap(jnp.zeros(tuple(other.shape), dtypes.to_jax(other.dtype)), other.device)


@own_rule("aten.set_.source_Tensor")
def _set_data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if source is target:
        return target
    node = target.node.root if type(target) is Traced else None
    if (
        node is None
        or node.geometry is not None
        or not target.is_leaf
        or private_jax.differentiations(node.value)
    ):
        raise exchanged("data")
    like = over(node_of(source), source)
    with private.below_python():
        # the target's geometry and dtype
        torch.Tensor.data.__set__(target, like)  # type: ignore[attr-defined]
    target.node = like.node
    return target


# -- packed sequences of torch.nn.utils.rnn --------------------------------------------------------
# The lengths alone decide which rows of a padded tensor the packed one has. PyTorch itself packs or
# pads the row numbers, and the rows are then gathered by them.
def ordinary(t: torch.Tensor, what: str) -> torch.Tensor:
    """An ordinary tensor with the values of a traced one;
    DataDependentError if they are not known.
    """
    found = concrete(t, what)
    with private.below_python():
        return torch.from_numpy(found.copy())


def _constant(t: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor as a traced tensor whose values are known."""
    return lift_fresh((t,), {})


def _pack(
    input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    steps = input.transpose(0, 1) if batch_first else input
    known = ordinary(
        lengths, "pack_padded_sequence by lengths that are a tensor (give them as a list of ints)"
    )
    with private.below_python():
        rows = (
            torch.arange(steps.shape[0] * steps.shape[1]).reshape(steps.shape[:2])
            if steps.numel()
            else torch.empty(steps.shape)
        )
        places, sizes = torch._VF._pack_padded_sequence(rows, known, False)
    return steps.flatten(0, 1).index_select(0, _constant(places)), _constant(sizes)


def _pad(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = ordinary(batch_sizes, "pad_packed_sequence")
    with private.below_python():
        places, lengths = torch._VF._pad_packed_sequence(
            torch.arange(data.shape[0]), sizes, batch_first, -1, total_length
        )
        kept = (places >= 0).reshape(*places.shape, *[1] * (data.dim() - 1))
        flat = places.clamp(min=0).reshape(-1)
    rows = data.index_select(0, _constant(flat)).unflatten(0, tuple(places.shape))
    return torch.where(
        _constant(kept), rows, torch.full((), padding_value, dtype=data.dtype, device=data.device)
    ), _constant(lengths)


@own_rule("aten._pack_padded_sequence")
def _pack_plan(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The plan of the operator, which runs if both tensors come from outside the trace."""
    with traced_python():
        return _pack(*args, **kwargs)


#: torch function -> the function that is called in its place.
PACKING: dict[Any, Any] = {
    torch._VF._pack_padded_sequence: lambda func, *args, **kwargs: _pack(*args, **kwargs),
    torch._VF._pad_packed_sequence: lambda func, *args, **kwargs: _pad(*args, **kwargs),
}


# -- the profiler's marks, and the collectives of a process group ----------------------------------
def _mark(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A mark computes nothing, so PyTorch runs it itself."""
    module = private.marked_distributed()
    if module is not None:
        _local_forward(module, entered=type(args[0]) is str)
    return func(*args, **kwargs)


_lock = threading.Lock()


def _local_forward(module: torch.nn.parallel.DistributedDataParallel, entered: bool) -> None:
    """Make DistributedDataParallel call only the module that it wraps, from the mark that opens its
    forward to the mark that closes it.

    Its buckets and hooks belong to torch's own backward.
    """
    if entered and module.process_group.size() > 1:
        raise _several("DistributedDataParallel")
    with _lock:
        count = process.distributed.get(id(module), 0) + (1 if entered else -1)
        if count < 0 or (count == 1 and entered and private.is_local(module)):
            return  # it was local already
        private.make_local(module, count > 0)
        process.distributed[id(module)] = count
        if not count:
            del process.distributed[id(module)]


def _collective(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In a group of one process a collective leaves its tensors as they are; in a larger group it
    is refused, because a traced tensor has no memory to send.
    """
    written, group = args[:2]
    if torch.distributed.ProcessGroup.unbox(group).size() > 1:
        raise _several(str(func))
    # PyTorch makes the object that a caller waits for, from tensors without elements
    out = func([torch.empty(0, dtype=t.dtype) for t in written], group, *args[2:], **kwargs)
    return (written, out[1]) if isinstance(out, tuple) else out


def _several(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what}: expected a process group of one process inside a transform, got several; a "
        "traced tensor cannot be sent to another process. Call the module that is wrapped "
        f"(.module), and average the gradients after the transform{at_line()}"
    )


_RULES = {
    **dict.fromkeys(
        (
            "profiler._record_function_enter",
            "profiler._record_function_enter_new",
            "profiler._record_function_exit",
            "profiler._record_function_exit._RecordFunction",
            "profiler._call_end_callbacks_on_jit_fut",
            "profiler._call_end_callbacks_on_jit_fut._RecordFunction",
        ),
        _mark,
    ),
    # these overwrite each tensor of their first argument with the values of all processes
    **dict.fromkeys(
        ("c10d.broadcast_", "c10d.allreduce_", "c10d.allreduce_coalesced_", "c10d.reduce_"),
        _collective,
    ),
}
OWN_RULES.update(
    {func: functools.partial(rule, func) for func, rule in of_this_torch(_RULES).items()}
)
