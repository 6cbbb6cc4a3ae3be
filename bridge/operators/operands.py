"""Arguments and results of every operator: traced tensors become values, results are wrapped, and no_grad is obeyed."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from bridge import private
from bridge.convert import tensors
from bridge.errors import at_line, in_words_of_vmap
from bridge.lowering.registry import Operator
from bridge.operators.dtype_refusals import Plan
from bridge.trace import pieces, requires_grad, saved_tensor_hooks, torch_numbers
from bridge.trace.levels import around, innermost, state
from bridge.trace.storage import strides_of
from bridge.trace.tracing import Traced, unknown_value, value_of, wrap

_CPU = torch.device("cpu")


def value_in(x: Any) -> Any:
    """An operator's argument with JAX values in the place of its tensors."""
    kind = type(x)
    if kind is Traced:
        node = x.node
        return node.value if node.parent is None and node.level is state.level else value_of(x)
    if kind is list or kind is tuple:
        return [value_in(v) for v in x]
    return value_of(x) if isinstance(x, torch.Tensor) else x


def device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    given = kwargs.get("device")
    if given is not None:
        device = torch.device(given)
        if device.type == "meta":
            raise RuntimeError(
                "meta: a function that runs in JAX asked for a tensor on the device meta, by device= or by the default device; tensors "
                f"there have no data, and JAX computes with data; give another device{at_line()}"
            )
        return device
    return tensors.common_device([x[0] if type(x) is list and x else x for x in args]) or _CPU


def wrap_all(out: Any, device: torch.device) -> Any:
    if isinstance(out, tuple | list):
        return type(out)(wrap_all(x, device) for x in out) if type(out) in (tuple, list) else tuple(wrap_all(x, device) for x in out)
    return wrap(out, device) if isinstance(out, jax.Array | np.ndarray) else out


def pure(func: torch._ops.OpOverload, row: Operator) -> Plan:
    """The plan of an operator that writes nothing and returns no view."""
    lower, no_grad = row.lowering, row.no_grad_outputs
    checks_only = not func._schema.returns and not func._schema.is_mutable  # it reads values, which a compiled piece does not have

    def run_pure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = [value_in(x) for x in args]
        named = {k: value_in(v) for k, v in kwargs.items()} if kwargs else kwargs
        if row.takes_contiguous:
            named = {**named, "contiguous": args[0].is_contiguous()}
        try:
            out = lower(*values, **named) if checks_only else pieces.run(func, lower, values, named)
        except Exception as error:
            found = _explain(func, args, kwargs, error)
            if innermost("vmap") is not None:
                found = in_words_of_vmap(func._schema.name.removeprefix("aten::"), args, found)
            raise found from error
        if no_grad:
            out = constant(out) if isinstance(out, jax.Array) else type(out)(constant(v) if i in no_grad else v for i, v in enumerate(out))
        if not torch.is_grad_enabled():
            out = stop(out)
        else:
            for x in args:
                if type(x) is Traced:
                    x.node.used = True
            if state.level.root.recorded:
                saved_tensor_hooks.refuse_hooks()
                out = requires_grad.tie(out, values, no_grad)
        if not private.forward_mode_enabled():
            out = stop_tangents(out)
        device = device_of(args, kwargs)
        return wrap(out, device, strides=_strides(func, args, kwargs, out)) if isinstance(out, jax.Array) else wrap_all(out, device)

    return run_pure


def _strides(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: jax.Array) -> tuple[int, ...] | None:
    """The strides that PyTorch gives a result if an operand is not contiguous; None: it is contiguous.

    Whether a later ``.view`` of the result is possible depends on them.  Only elementwise operators and copies are asked for: the first
    other one on the device meta, addmm for example, makes PyTorch import 800 modules, which takes longer than to compile a program.
    """
    if torch.Tag.pointwise not in func.tags and func._schema.name not in ("aten::clone", "aten::_to_copy"):
        return None
    if all(type(x) is not Traced or x.is_contiguous() for x in args):
        return None
    try:
        like = on_meta(func, args, kwargs)
    except Exception:  # the operator has no kernel for the device meta
        return None
    return strides_of(like) if tuple(like.shape) == out.shape else None


def drawn(func: torch._ops.OpOverload, otherwise: Plan) -> Plan:
    """The plan of a random operator whose numbers depend on no tensor's values; otherwise: the plan for where torch does not draw them."""
    name = str(func)

    def run_drawn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = device_of(args, kwargs)
        value = torch_numbers.numbers(name, args, kwargs) if device.type == "cpu" else None
        return otherwise(args, kwargs) if value is None else wrap(value, device)

    return run_drawn


def alike(make: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """empty_like and its kin: PyTorch's vmap maps the result if it maps the argument, although no value depends on that."""
    out = make(args, kwargs)
    if type(args[0]) is Traced and innermost("vmap") is not None:
        out.node.like = args[0].node.root
    return out


def stop(out: Any) -> Any:
    """Make values computed under no_grad constants to every enclosing grad transform and to JAX's own; our forward mode ignores no_grad."""
    level, root = state.level, state.level.root
    if level.kind == "function":  # the Function's own rule gives the derivative
        return out
    probes = [root.probe] if root.recorded else []
    probes += [each.probe for each in around() if each.kind == "grad"]
    if not (probes or root.in_jax):
        return out
    if innermost("jvp") is None:
        return jax.tree_util.tree_map(constant, out)

    def stopped(v: Any) -> Any:
        for probe in probes:
            v = private.stop_at(v, probe)
        return requires_grad.stopped_outside(v) if root.recorded and root.staged and isinstance(v, jax.core.Tracer) else v

    return jax.tree_util.tree_map(stopped, out)


def stop_tangents(out: Any) -> Any:
    """Make values computed while forward-mode AD is off constants to the innermost forward-mode transform."""
    level = innermost("jvp", "function")
    if level is None or level.kind == "function":  # the Function's own rule gives the derivative
        return out
    return jax.tree_util.tree_map(lambda v: private.stop_at(v, level.probe), out)


def constant(value: jax.Array | None) -> jax.Array | None:
    """The same value as a constant to the transforms of every level."""
    if not isinstance(value, jax.core.Tracer):
        return value
    return requires_grad.stopped_by_torch(value) if state.level.root.staged else lax.stop_gradient(value)


def _explain(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
    """The error to raise instead of one that a lowering raised: torch's own error if torch refuses the same call."""
    own = isinstance(error, RuntimeError | IndexError) and not isinstance(error, jax.errors.JaxRuntimeError)
    if own or isinstance(error, jax.errors.UnexpectedTracerError):
        return error
    if isinstance(error, jax.errors.JAXTypeError):
        return unknown_value(str(func), torch.Tag.dynamic_output_shape in func.tags)
    try:
        on_meta(func, args, kwargs)
    except Exception as theirs:
        if isinstance(theirs, RuntimeError | IndexError | ValueError | TypeError) and "meta" not in str(theirs).lower():
            return theirs
    return RuntimeError(f"{func}: {error}{at_line()}") if isinstance(error, TypeError | ValueError) else error


def on_meta(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of PyTorch's kernel for the device meta, which has a geometry and no values."""
    with private.below_python():
        return func(*_meta(args), **{k: _meta(v) for k, v in kwargs.items() if k != "device"})


def _meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return type(x)(_meta(v) for v in x) if type(x) in (list, tuple) else x
