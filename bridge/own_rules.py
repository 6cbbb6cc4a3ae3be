"""Operators that need more than their values: those that read them, write beside their result, or exchange memory."""
from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge import dtypes, eager, private, tensors
from bridge.errors import DataDependentError, at_line
from bridge.kernels import Plan
from bridge.lowering.common.promotion import cast
from bridge.lowering.common.provided import refuse
from bridge.lowering.registry import LOWERINGS, of_this_torch
from bridge.operands import constant, device_of, pure, stop, value_in, wrap_all
from bridge.overlaps import refuse_overlap
from bridge.packed_sequences import pack_plan
from bridge.tracing import Traced, assign, concrete, plan_of, unknown_value, value_of, wrap
from bridge.viewing import as_strided, detach, split_plan
from bridge.writing import resize_, store

aten = torch.ops.aten


def _item(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return concrete(args[0], "item()").item()


def _copy_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    refuse_overlap(aten.copy_.default, [target], [source])
    value = value_in(source)
    if not hasattr(value, "shape"):
        value = jnp.asarray(value, dtypes.to_jax(target.dtype))
    if value.dtype != dtypes.to_jax(target.dtype):
        value = eager.run("cast", cast, (value, dtypes.to_jax(target.dtype)), {})
    if value.shape != tuple(target.shape):
        try:
            value = eager.run("broadcast_to", jnp.broadcast_to, (value, tuple(target.shape)), {})
        except ValueError:
            raise RuntimeError(
                f"The expanded size of the tensor ({list(target.shape)}) must match the existing size ({list(value.shape)}){at_line()}"
            ) from None
    store(target, stop(value) if not torch.is_grad_enabled() else value, aten.copy_.default)
    return target


def _lift_fresh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    if type(t) is Traced or t.is_meta:  # torch 2.15 asks for the default device by making a tensor
        return t
    # a tensor just made from Python data: a constant, and not one to be read again at the next call
    with jax.ensure_compile_time_eval():
        return wrap(jnp.array(tensors.as_numpy(tensors.plain(t))), t.device)


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """native_batch_norm writes the running statistics though its schema does not say so."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    mean, var = given["running_mean"], given["running_var"]
    values = [value_in(given[name]) for name in names]
    lower = LOWERINGS[aten._native_batch_norm_legit_functional.default]
    if mean is None:
        out = eager.run("batch_norm", lower, (values[0], values[1], values[2], None, None, *values[5:]), {})
    else:
        out = eager.run("batch_norm", lower, values, {})
        if given["training"]:
            assign(mean, constant(cast(out[3], values[3].dtype)), detached=True)
            assign(var, constant(cast(out[4], values[4].dtype)), detached=True)
    return wrap_all(tuple(out[:3]), device_of(args, kwargs))


def _observe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The observer's buffers that fake quantization writes take no part in autograd, though they are computed from what does."""
    names = [a.name for a in aten._fused_moving_avg_obs_fq_helper.default._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    lower = LOWERINGS[aten._fused_moving_avg_obs_fq_helper_functional.default]
    out = eager.run("observe", lower, [value_in(given[name]) for name in names if name in given], {})
    for name, value in zip(("running_min", "running_max", "scale", "zero_point"), out[2:], strict=True):
        assign(given[name], constant(value), detached=True)
    return wrap_all(tuple(out[:2] if torch.is_grad_enabled() else stop(out[:2])), device_of(args, kwargs))


def _same_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return tuple(args[0].shape) == tuple(args[1].shape)


def _is_all_true(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.distributions checks its arguments with this; where values are not known they are looked at when the program has run."""
    value = value_in(args[0])
    known = not isinstance(value, jax.core.Tracer)
    if not known:
        refuse(~value, "torch.distributions: expected every value to be within its constraint; something is outside of its own", ValueError)
    with jax.ensure_compile_time_eval():
        return wrap(jnp.all(value) if known else jnp.asarray(True), args[0].device)


def _assert(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch._assert_async: looked at now, or when the program has run."""
    value = value_in(args[0])
    refuse(value == 0, args[1] if len(args) > 1 else "Expected Tensor with single nonzero value, but got zero")
    return args[2] if len(args) > 2 else None


#: What PyTorch's C++ (cov, istft) expects when it asks ``equal(comparison, True)`` of values that are not known, by the comparison:
#: weights that are >= 0 and do not sum to 0, degrees of freedom that are not <= 0, window sums that are not < 1e-11.
_EXPECTED = of_this_torch({"aten.ge.Scalar": True, "aten.ne.Scalar": True, "aten.le.Scalar": False, "aten.lt.Scalar": False})

_UNEXPECTED = "cov: weights cannot be negative nor sum to zero; istft: the window's overlap-add must not be zero"


def _equal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    a, b = args
    if tuple(a.shape) != tuple(b.shape):
        return False
    with contextlib.suppress(DataDependentError):
        return bool((concrete(a, "torch.equal") == concrete(b, "torch.equal")).all())
    maker = a.node.maker if type(a) is Traced else None
    if a.dim() == 0 and a.dtype is torch.bool and maker in _EXPECTED:
        refuse(value_in(a) != _EXPECTED[maker], _UNEXPECTED)
        return _EXPECTED[maker]
    raise unknown_value("torch.equal")


def _same_storage(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0].numel() == args[1].numel()


def _feature_zeros(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    other = args[1]
    return wrap(jnp.zeros(tuple(other.shape), dtypes.to_jax(other.dtype)), other.device)


def _set_data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if type(target) is not Traced or type(source) is not Traced:
        raise RuntimeError(f"set_: a tensor from outside the transform cannot be given other memory inside it; use copy_{at_line()}")
    with private.below_python():
        target.as_strided_(source.shape, source.stride(), source.storage_offset())
    target.node = source.node
    return target


def _linalg_errors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Looks at values where they are known, so it is never part of a compiled piece."""
    return LOWERINGS[aten._linalg_check_errors.default](value_in(args[0]), *args[1:], **kwargs)


def _determinant(func: Any) -> Plan:
    """PyTorch's backward of a determinant reads factors of A or of A^T, depending on the strides of A, which arrays do not have."""
    run = pure(func, LOWERINGS[func])

    def run_pure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(args, {**kwargs, "contiguous": args[0].is_contiguous()})

    return run_pure


def _polygamma_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one in-place operator whose functional form has its arguments in another order."""
    given = dict(zip(("self", "n"), args, strict=False)) | kwargs
    store(given["self"], value_of(plan_of(aten.polygamma.default)((given["n"], given["self"]), {})), aten.polygamma_.default)
    return given["self"]


OWN_RULES: dict[Any, Plan] = of_this_torch({
    "aten.polygamma_.default": _polygamma_,
    "aten._linalg_check_errors.default": _linalg_errors,
    "aten._local_scalar_dense.default": _item,
    "aten.copy_.default": _copy_,
    "aten.lift_fresh.default": _lift_fresh,
    "aten.lift.default": _lift_fresh,
    "aten.detach.default": detach,
    "aten.native_batch_norm.default": _batch_norm,
    "aten._fused_moving_avg_obs_fq_helper.default": _observe,
    "aten.is_same_size.default": _same_size,
    "aten._is_all_true.default": _is_all_true,
    "aten._assert_async.default": _assert,
    "aten._assert_async.msg": _assert,
    "aten._functional_assert_async.msg": _assert,
    "aten.equal.default": _equal,
    "aten._has_same_storage_numel.default": _same_storage,
    "aten._new_zeros_with_same_feature_meta.default": _feature_zeros,
    "aten.as_strided.default": as_strided,
    "aten._pack_padded_sequence.default": pack_plan,
    "aten.set_.source_Tensor": _set_data,
    "aten.resize_.default": resize_,
    "aten.resize_as_.default": resize_,
})
OWN_RULES |= {
    func: make(func)
    for func, make in of_this_torch({
        "aten._linalg_det.default": _determinant,
        "aten._linalg_slogdet.default": _determinant,
        "aten.unbind.int": split_plan,
        "aten.split.Tensor": split_plan,
        "aten.split_with_sizes.default": split_plan,
    }).items()
}
