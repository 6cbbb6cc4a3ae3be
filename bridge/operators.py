"""What is done with each ATen operator: which are views, which write, which are lowered and which fall to a decomposition.

``plan`` looks at an operator's schema once and returns the function that runs it from then on.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from bridge import dtypes, eager, linked, private, tensors
from bridge import lowering as _lowering  # noqa: F401  fills the registry
from bridge.checks import refuse
from bridge.errors import DataDependentError, NoLoweringError, at_line
from bridge.kernels import NAMES, guarded
from bridge.levels import state
from bridge.lowering.promotion import cast
from bridge.lowering.registry import LOWERINGS, OVERRIDDEN
from bridge.nodes import Node, View, read, unread
from bridge.overlaps import refuse_overlap
from bridge.tracing import Traced, assign, concrete, node_of, shape_of, traced_python, unknown_value, value_of, wrap

aten = torch.ops.aten
Plan = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_CPU = torch.device("cpu")
_make = private.make_wrapper


def plan(func: Any) -> Plan:
    """The function (args, kwargs) -> result that runs an operator on traced tensors."""
    return _plan(func) if func in OVERRIDDEN else guarded(func, _plan(func))


def _plan(func: Any) -> Plan:
    special = _SPECIAL.get(func)
    if special is not None:
        return special
    if func.namespace not in ("aten", "prims") and func not in LOWERINGS:
        return _fallback(func)
    if func._schema.is_mutable:
        return _mutation(func)
    if func in LOWERINGS:
        return _view(func) if func.is_view else _pure(func, LOWERINGS[func])
    return _fallback(func)


# -- arguments and results ------------------------------------------------------------------------------------------------------
def _value(x: Any) -> Any:
    kind = type(x)
    if kind is Traced:
        node = x.node
        return node.value if node.parent is None and node.level is state.level else value_of(x)
    if kind is list or kind is tuple:
        return [_value(v) for v in x]
    return value_of(x) if isinstance(x, torch.Tensor) else x


def _operand(t: Traced) -> Any:
    """A traced tensor's value, or, outside of compilation, the view that it is and nobody has read."""
    node = t.node
    if node.parent is None or node.level is not state.level:
        return _value(t)
    found = unread(node, state.level)
    return read(node, state.level) if found is None else found


def _device(args: Any, kwargs: dict[str, Any]) -> torch.device:
    given = kwargs.get("device")
    if given is not None:
        return torch.device(given)
    found = None
    for x in args:
        if isinstance(x, torch.Tensor):
            if x.dim():
                return x.device
            found = found or x.device
        elif type(x) is list and x and isinstance(x[0], torch.Tensor):
            return x[0].device
    return found or _CPU


def _wrap_all(out: Any, device: torch.device) -> Any:
    if isinstance(out, tuple | list):
        return type(out)(_wrap_all(x, device) for x in out) if type(out) in (tuple, list) else tuple(_wrap_all(x, device) for x in out)
    return wrap(out, device) if isinstance(out, jax.Array | np.ndarray) else out


def _pure(func: Any, lower: Callable[..., Any]) -> Plan:
    """An operator that only computes."""

    def run_pure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        staged = state.level.root.staged
        values = [_value(x) if staged or type(x) is not Traced else _operand(x) for x in args]
        try:
            out = eager.run(func, lower, values, {k: _value(v) for k, v in kwargs.items()} if kwargs else kwargs)
        except Exception as error:
            raise _explain(func, args, kwargs, error) from error
        if not torch.is_grad_enabled():
            out = stop(out)
        elif state.level.root.recorded:
            out = linked.tie(func, out, values)
        device = _device(args, kwargs)
        return wrap(out, device) if isinstance(out, jax.Array) else _wrap_all(out, device)

    return run_pure


def stop(out: Any) -> Any:
    """Values computed under no_grad: constants to every grad transform around them (forward mode does not obey no_grad)."""
    level, innermost, kinds = state.level, None, set()
    while level is not None:
        if level.kind in ("grad", "jvp"):
            innermost = innermost or level
            kinds.add(level.kind)
        level = level.parent
    if state.level.root.recorded:
        kinds.add("grad")
    if "grad" not in kinds:
        return out
    if "jvp" not in kinds:
        return jax.tree_util.tree_map(lambda v: constant(v) if isinstance(v, jax.Array) else v, out)
    if innermost is None or innermost.kind == "jvp":
        return out
    return jax.tree_util.tree_map(lambda v: private.stop_innermost(v, innermost.probe) if isinstance(v, jax.Array) else v, out)


def _reverse_only() -> bool:
    """Whether grad transforms are in progress, and no forward-mode ones (those do not obey no_grad)."""
    level, found = state.level, False
    while level is not None:
        if level.kind == "jvp":
            return False
        found = found or level.kind == "grad"
        level = level.parent
    return found


def constant(value: Any) -> Any:
    """The value without derivatives, at every level."""
    level = state.level
    if level.root.staged and isinstance(value, jax.core.Tracer):
        return linked.stopped_by_torch(value)
    if isinstance(value, jax.core.Tracer) or (level.tape is level.root.recording is level.lanes is None):
        return lax.stop_gradient(value)
    tape = level.tape or level.root.recording
    return eager.copied(value, level.lanes) if tape is not None and tape.tracks([value]) else value


def _explain(func: Any, args: Any, kwargs: Any, error: Exception) -> Exception:
    """The error to raise in the place of one that a lowering raised: torch's own words where torch refuses the same call."""
    if isinstance(error, jax.errors.JAXTypeError):
        if isinstance(error, jax.errors.UnexpectedTracerError):
            return error
        return unknown_value(str(func), torch.Tag.dynamic_output_shape in func.tags)
    if isinstance(error, RuntimeError | NotImplementedError | IndexError) and not isinstance(error, jax.errors.JaxRuntimeError):
        return error
    try:
        with private.below_python():
            func(*_meta_tree(args), **{k: _meta_tree(v) for k, v in kwargs.items() if k != "device"})
    except (RuntimeError, IndexError, ValueError, TypeError) as theirs:
        if "meta" not in str(theirs).lower():
            return theirs
    except Exception:
        pass
    if isinstance(error, TypeError | ValueError):
        return RuntimeError(f"{func}: {error}{at_line()}")
    return error


def _meta_tree(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return type(x)(_meta_tree(v) for v in x) if type(x) in (list, tuple) else x


# -- views ----------------------------------------------------------------------------------------------------------------------
def _meta(t: torch.Tensor) -> torch.Tensor:
    if t.storage_offset():
        span = t.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True) if n)
        return torch.empty(span, dtype=t.dtype, device="meta").as_strided(t.shape, t.stride(), t.storage_offset())
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _view_tensor(meta: torch.Tensor, node: Node, device: torch.device) -> Traced:
    t: Traced = _make(Traced, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype, device=device)
    t.node = node
    return t


def _view(func: Any) -> Plan:
    """An operator whose result shares its input's memory: computed when it is first read."""
    lower = LOWERINGS[func]

    def run_view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base, rest = args[0], args[1:]
        meta = func(_meta(base), *rest, **kwargs)
        node = Node(None, state.level, node_of(base), View(func, lower, rest, kwargs))
        if not torch.is_grad_enabled():  # the same memory, no derivative through it
            node.value, node.seen = stop(node.view.forward(value_of(base))), node.root.version
        return _view_tensor(meta, node, base.device)

    return run_view


def _detach(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    t: Traced = _make(Traced, base.shape, strides=base.stride(), storage_offset=base.storage_offset(), dtype=base.dtype, device=base.device)
    if private.by_user() or type(base) is not Traced:  # a captured tensor's .data; autograd keeps those as they are
        t.node = _detached_node(base, constant)
    else:
        t.node = Node(None, state.level, node_of(base), View(aten.alias.default, LOWERINGS[aten.alias.default], (), {}))
    return t


def _detached_node(base: torch.Tensor, stopped: Callable[[Any], Any]) -> Node:
    """The same memory without derivatives."""
    with torch.no_grad():  # met, and not to be differentiated for it
        value, parent = value_of(base), node_of(base)
    node = Node(stopped(value), state.level, parent, View(aten.detach.default, stopped, (), {}))
    node.seen = node.root.version
    return node


def detach_in_place(t: Traced) -> None:
    """What detach_() leaves: PyTorch's kernel changes the innermost autograd's metadata and calls no other."""
    level: Any = state.level
    while level is not None and level.kind != "grad":
        level = level.parent
    t.node = _detached_node(t, constant if level is None or level.tape is not None else lambda v: private.stop_innermost(v, level.probe))


def _split(func: Any) -> Plan:
    """Several views at once, each a slice or select of its own so that reading one computes one."""

    def run_split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = args[0]
        dim = int(kwargs.get("dim", args[-1] if len(args) == 3 or (func is aten.unbind.int and len(args) == 2) else 0))
        dim = dim % max(base.dim(), 1)
        metas = func(_meta(base), *args[1:], **kwargs)
        out, start = [], 0
        for i, meta in enumerate(metas):
            if func is aten.unbind.int:
                view = View(aten.select.int, LOWERINGS[aten.select.int], (dim, i), {})
            else:
                end = start + meta.shape[dim]
                view = View(aten.slice.Tensor, LOWERINGS[aten.slice.Tensor], (dim, start, end), {})
                start = end
            out.append(_view_tensor(meta, Node(None, state.level, node_of(base), view), base.device))
        return out

    return run_split


def _as_strided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    size, stride = args[1], args[2]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    offset = base.storage_offset() if offset is None else offset
    root = node_of(base).root
    first = _first_place(root)
    if offset < first:
        raise RuntimeError(f"as_strided: offset {offset} is before where the tensor from outside begins, at {first}{at_line()}")
    meta = torch.empty(first + root.value.size, dtype=base.dtype, device="meta").as_strided(size, stride, offset)
    view = View(aten.as_strided.default, LOWERINGS[aten.as_strided.default], (tuple(size), tuple(stride), offset - first), {})
    return _view_tensor(meta, Node(None, state.level, root, view), base.device)


def _first_place(root: Node) -> int:
    """Where in its memory the tensor begins that a root was captured from, of which only its own elements have crossed."""
    for t, node in state.level.root.captured.values():
        if node is root:
            if not t.is_contiguous():
                raise RuntimeError(f"as_strided: a tensor from outside must be contiguous; call .contiguous() first{at_line()}")
            return int(t.storage_offset())
    return 0


_DTYPE_VIEWS = frozenset({aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default})


def _becomes_view(func: Any, functional: Any) -> Plan:
    """t_(), squeeze_() and their like: the tensor itself becomes a view of what it was."""

    def run_in_place_view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        t, rest = args[0], args[1:]
        if type(t) is not Traced:
            raise RuntimeError(
                f"{func}: a tensor from outside the transform cannot change its shape inside it; use {functional} instead{at_line()}"
            )
        node = _plan_of(functional)((t, *rest), kwargs).node
        meta = functional(_meta(t), *rest, **kwargs)
        with private.below_python():
            t.as_strided_(meta.shape, meta.stride(), meta.storage_offset())
        t.node = node
        return t

    return run_in_place_view


# -- writes ---------------------------------------------------------------------------------------------------------------------
def _plan_of(func: Any) -> Plan:
    from bridge import tracing

    found = tracing._plans.get(func)
    if found is None:
        found = tracing._plans[func] = plan(func)
    return found


def _store(target: torch.Tensor, value: Any, func: Any) -> None:
    dtype = dtypes.to_jax(target.dtype)
    if value.dtype != dtype:
        source = dtypes.to_torch(value.dtype)
        if not torch.can_cast(source, target.dtype):
            names = [NAMES.get(d, str(d)) for d in (source, target.dtype)]
            raise RuntimeError(f"result type {names[0]} can't be cast to the desired output type {names[1]}")
        value = eager.run("cast", cast, (value, dtype), {})
    shape = shape_of(value)
    if shape != target.shape:
        raise RuntimeError(
            f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(shape)}"
        )
    if len(set(target.stride())) != target.dim() and 0 in target.stride() and target.numel() > 1 and _overlaps(target):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    assign(target, value, keep=not torch.is_grad_enabled() and _reverse_only())


def _overlaps(t: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True))


def _mutation(func: Any) -> Plan:
    """In-place and out= variants, derived from the operator's functional form."""
    if torch.Tag.inplace_view in func.tags:
        functional = _functional(func)
        return _becomes_view(func, functional) if functional is not None else _fallback(func)
    changed = sorted((a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write), key=lambda a: not a.is_out)
    written = [a.name for a in changed]  # in the order of the functional form's results: those of out= first
    names = [a.name for a in func._schema.arguments]
    functional = _functional(func)
    if functional is None and func in LOWERINGS:
        inner = _pure(func, LOWERINGS[func])
    elif functional is not None and (functional in LOWERINGS or _can_fall_back(functional)):
        inner = _plan_of(functional)
    else:
        return _fallback(func)
    is_out = any(a.is_out for a in func._schema.arguments)
    of_dtype = is_out and _is_factory(functional)

    def run_write(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        targets = [given[name] for name in written]
        flat = [t for item in targets for t in (item if isinstance(item, list | tuple) else [item])]
        refuse_overlap(func, flat, _tensors(given[name] for name in given if name not in written), is_out)
        if is_out:
            kwargs = {k: v for k, v in kwargs.items() if k not in written}
        if of_dtype:
            kwargs = {**kwargs, "dtype": flat[0].dtype}
        results = inner(args, kwargs)
        results = list(results) if isinstance(results, tuple | list) else [results]
        for target, result in zip(flat, results[-len(flat) :], strict=True):
            if target is None:
                continue
            if is_out and target.dtype is not result.dtype:
                _refuse_dtype(func, args, kwargs, dict(zip(written, targets, strict=True)))
            if is_out and target.shape != result.shape:
                _resize(target, result.shape)
            _store(target, value_of(result), func)
        if len(func._schema.returns) == 0:
            return None
        fresh, kept = iter(results[: -len(flat)]), iter(flat)
        returned = tuple(next(fresh) if r.alias_info is None else next(kept) for r in func._schema.returns)
        return returned[0] if len(returned) == 1 else returned

    return run_write


def _is_factory(func: Any) -> bool:
    """Whether an operator makes a tensor of nothing but numbers."""
    kinds = {a.name: str(a.type) for a in func._schema.arguments} if func is not None else {}
    return "dtype" in kinds and "layout" in kinds and not any("Tensor" in kind for kind in kinds.values())


def _tensors(operands: Iterable[Any]) -> Iterator[Any]:
    for x in operands:
        yield from x if isinstance(x, list | tuple) else (x,)


#: of whose kernels for shapes alone PyTorch's refusal cannot be had
_EXACT_OUT = frozenset({"aten::complex", "aten::aminmax", "aten::multinomial"})


def _refuse_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: dict[str, Any]) -> None:
    """PyTorch's own error where it does not cast the result to the dtype of out=."""
    if func._schema.name in _EXACT_OUT:
        raise RuntimeError(f"{func}: expected out= to have the result's dtype, got {', '.join(str(t.dtype) for t in out.values())}")
    try:
        with private.below_python():
            func(*_meta_tree(args), **{k: _meta_tree(v) for k, v in (kwargs | out).items()})
    except NotImplementedError:  # computed by no kernel for shapes alone
        return


def _resize(target: torch.Tensor, shape: Any) -> None:
    """Give a tensor another shape in place; elements keep their place in memory, new ones are zero."""
    shape = tuple(shape)
    if type(target) is not Traced or target.node.parent is not None:
        raise RuntimeError(
            f"resize_: a view, or a tensor from outside the transform, of shape {list(target.shape)} cannot be resized to {list(shape)}"
            f"{at_line()}"
        )

    def resized(value: Any, shape: tuple[int, ...]) -> Any:
        flat, size = value.reshape(-1), math.prod(shape)
        return jnp.pad(flat, (0, max(0, size - flat.size)))[:size].reshape(shape)

    value = eager.run("resize", resized, (value_of(target), shape), {})
    with private.below_python():
        # a wrapper has no memory to check bounds against, but that of nothing
        target.as_strided_(shape, torch.empty(shape, device="meta").stride(), 0) if 0 in shape else target.resize_(shape)
    target.node = Node(value, state.level)


def _resize_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    size = args[1].shape if isinstance(args[1], torch.Tensor) else args[1]
    if tuple(size) != tuple(args[0].shape):
        _resize(args[0], size)
    return args[0]


_IRREGULAR = {
    "aten::bernoulli_.float": "aten::bernoulli.p",
    "aten::normal_": "aten::normal_functional",
    "aten::squeeze_": "aten::squeeze",
    "aten::_native_batch_norm_legit": "aten::_native_batch_norm_legit_functional",
    "aten::_batch_norm_with_update": "aten::_batch_norm_with_update_functional",
    "aten::native_batch_norm.out": "aten::native_batch_norm",
    "aten::rrelu_with_noise": "aten::rrelu_with_noise_functional",
    "aten::_fused_moving_avg_obs_fq_helper": "aten::_fused_moving_avg_obs_fq_helper_functional",
    "aten::embedding_renorm_": "aten::embedding_renorm",
}


def _functional(func: Any) -> Any:
    """The overload that computes what an in-place or out= overload writes; None where torch has none."""
    irregular = _IRREGULAR.get(func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else ""))
    if irregular is not None:
        name, _, kind = irregular.removeprefix("aten::").partition(".")
        packet = getattr(aten, name, None)
        return getattr(packet, kind or "default", None) if packet is not None else None
    namespace, name = func._schema.name.split("::")
    ops = getattr(torch.ops, namespace)
    mine = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    bare = name.removesuffix("_")
    candidates = list(dict.fromkeys([name, bare, bare + "_functional"]))
    for candidate in candidates:
        packet = getattr(ops, candidate, None)
        if packet is None:
            continue
        kinds = sorted(packet.overloads(), key=lambda k: k != func._overloadname)
        for kind in kinds:
            other = getattr(packet, kind)
            if other is func or other._schema.is_mutable:
                continue
            theirs = [(a.name, str(a.type)) for a in other._schema.arguments]
            if _is_factory(other):  # their dtype and device are those of out=
                theirs = [a for a in theirs if a[0] not in ("dtype", "layout", "device", "pin_memory")]
            same_types = [t for _, t in theirs[: len(mine)]] == [t for _, t in mine]
            if theirs == mine or (kind == func._overloadname and same_types):
                return other
    return None


# -- fall-back ------------------------------------------------------------------------------------------------------------------
def _can_fall_back(func: Any) -> bool:
    return func in private.decompositions() or private.is_composite(func) or func in LOWERINGS


def _fallback(func: Any) -> Plan:
    """PyTorch's own decomposition, run on traced tensors; where there is none, an error that says what to do."""
    table = private.decompositions()
    if private.is_composite(func):

        def composite(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with traced_python():
                return func.decompose(*args, **kwargs)

        return composite
    decomposition = table.get(func)
    if decomposition is not None:

        def decomposed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with traced_python():
                return decomposition(*args, **kwargs)

        return decomposed

    def missing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NoLoweringError(
            f"{func}: this operator has no lowering to JAX and no decomposition{at_line()}. Register one: "
            f"@bridge.register_lowering({str(func)!r}) above a function that takes and returns jax.Arrays"
        )

    return missing


# -- operators with a rule of their own -----------------------------------------------------------------------------------------
def _item(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return concrete(args[0], "item()").item()


def _copy_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    refuse_overlap(aten.copy_.default, [target], [source])
    value = _value(source)
    if not hasattr(value, "shape"):
        value = jnp.asarray(value, dtypes.to_jax(target.dtype))
    if value.dtype != dtypes.to_jax(target.dtype):
        value = eager.run("cast", cast, (value, dtypes.to_jax(target.dtype)), {})
    if shape_of(value) != tuple(target.shape):
        try:
            value = eager.run("broadcast_to", jnp.broadcast_to, (value, tuple(target.shape)), {})
        except ValueError:
            raise RuntimeError(
                f"The expanded size of the tensor ({list(target.shape)}) must match the existing size ({list(value.shape)}){at_line()}"
            ) from None
    _store(target, stop(value) if not torch.is_grad_enabled() else value, aten.copy_.default)
    return target


def _lift_fresh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    if type(t) is Traced:
        return t
    # a tensor just made from Python data: a constant, and not one to be read again at the next call
    with jax.ensure_compile_time_eval():
        return wrap(jnp.array(tensors.as_numpy(tensors.plain(t))), t.device)


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """native_batch_norm writes the running statistics though its schema does not say so."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    mean, var = given["running_mean"], given["running_var"]
    values = [_value(given[name]) for name in names]
    lower = LOWERINGS[aten._native_batch_norm_legit_functional.default]
    if mean is None:
        out = eager.run("batch_norm", lower, (values[0], values[1], values[2], None, None, *values[5:]), {})
    else:
        out = eager.run("batch_norm", lower, values, {})
        if given["training"]:
            assign(mean, constant(cast(out[3], values[3].dtype)), detached=True)
            assign(var, constant(cast(out[4], values[4].dtype)), detached=True)
    return _wrap_all(tuple(out[:3]), _device(args, kwargs))


def _same_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return tuple(args[0].shape) == tuple(args[1].shape)


def _is_all_true(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.distributions checks its arguments with this; where values are not known they are looked at when the program has run."""
    value = _value(args[0])
    known = not isinstance(value, jax.core.Tracer)
    if not known:
        refuse(~value, "torch.distributions: expected every value to be within its constraint; something is outside of its own", ValueError)
    with jax.ensure_compile_time_eval():
        return wrap(jnp.all(value) if known else jnp.asarray(True), args[0].device)


def _assert(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch._assert_async: looked at now, or when the program has run."""
    value = _value(args[0])
    refuse(value == 0, args[1] if len(args) > 1 else "Expected Tensor with single nonzero value, but got zero")
    return args[2] if len(args) > 2 else None


#: What PyTorch's C++ (cov, istft) expects when it asks ``equal(comparison, True)`` of values that are not known, by the comparison:
#: weights that are >= 0 and do not sum to 0, degrees of freedom that are not <= 0, window sums that are not < 1e-11.
_EXPECTED = {aten.ge.Scalar: True, aten.ne.Scalar: True, aten.le.Scalar: False, aten.lt.Scalar: False}

_UNEXPECTED = "cov: weights cannot be negative nor sum to zero; istft: the window's overlap-add must not be zero"


def _equal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    a, b = args
    if tuple(a.shape) != tuple(b.shape):
        return False
    with contextlib.suppress(DataDependentError):
        return bool((concrete(a, "torch.equal") == concrete(b, "torch.equal")).all())
    maker = a.node.maker if type(a) is Traced else None
    if a.dim() == 0 and a.dtype is torch.bool and maker in _EXPECTED:
        refuse(_value(a) != _EXPECTED[maker], _UNEXPECTED)
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
    return LOWERINGS[aten._linalg_check_errors.default](_value(args[0]), *args[1:], **kwargs)


def _determinant(func: Any) -> Plan:
    """PyTorch's backward of a determinant reads factors of A or of A^T, depending on the strides of A, which arrays do not have."""
    run = _pure(func, LOWERINGS[func])

    def run_pure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(args, {**kwargs, "contiguous": args[0].is_contiguous()})

    return run_pure


def _polygamma_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one in-place operator whose functional form has its arguments in another order."""
    given = dict(zip(("self", "n"), args, strict=False)) | kwargs
    _store(given["self"], value_of(_plan_of(aten.polygamma.default)((given["n"], given["self"]), {})), aten.polygamma_.default)
    return given["self"]


_SPECIAL: dict[Any, Plan] = {
    aten.polygamma_.default: _polygamma_,
    aten._linalg_check_errors.default: _linalg_errors,
    aten._linalg_det.default: _determinant(aten._linalg_det.default),
    aten._linalg_slogdet.default: _determinant(aten._linalg_slogdet.default),
    aten._local_scalar_dense.default: _item,
    aten.copy_.default: _copy_,
    aten.lift_fresh.default: _lift_fresh,
    aten.lift.default: _lift_fresh,
    aten.detach.default: _detach,
    aten.native_batch_norm.default: _batch_norm,
    aten.is_same_size.default: _same_size,
    aten._is_all_true.default: _is_all_true,
    aten._assert_async.default: _assert,
    aten._assert_async.msg: _assert,
    aten._functional_assert_async.msg: _assert,
    aten.equal.default: _equal,
    aten._has_same_storage_numel.default: _same_storage,
    aten._new_zeros_with_same_feature_meta.default: _feature_zeros,
    aten.as_strided.default: _as_strided,
    aten.unbind.int: _split(aten.unbind.int),
    aten.split.Tensor: _split(aten.split.Tensor),
    aten.split_with_sizes.default: _split(aten.split_with_sizes.default),
    aten.set_.source_Tensor: _set_data,
    aten.resize_.default: _resize_,
    aten.resize_as_.default: _resize_,
}
