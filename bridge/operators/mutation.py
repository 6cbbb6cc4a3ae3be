"""Operators that write their arguments: in-place and out= variants, derived from the functional
variant, and writes that overlap.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge import private, private_jax
from bridge.convert import dtypes
from bridge.convert.strides import contiguous
from bridge.errors import at_line
from bridge.lowering.common.promotion import cast
from bridge.lowering.registry import LOWERINGS, Operator
from bridge.lowering.tensors.copies import revalue, revalue_at
from bridge.operators.dtype_refusals import Plan, is_pointwise
from bridge.operators.operands import drawn, fallback, on_meta, pure
from bridge.trace import folding, requires_grad
from bridge.trace.levels import around, innermost, refuse_in_checkpoint, state
from bridge.trace.storage import Node
from bridge.trace.tracing import Traced, assign, node_of, own_rule, plan_of, value_of
from bridge.transform_kinds import DIFFERENTIATING, FORWARD, REVERSE


def _become_view(
    func: torch._ops.OpOverload,
    functional: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """t_(), squeeze_() and similar: the tensor object becomes a view of its own earlier memory."""
    t = args[0]
    if type(t) is not Traced:
        raise RuntimeError(
            f"{func}: a tensor from outside the transform cannot change its shape inside it; use "
            f"{functional} instead{at_line()}"
        )
    view = plan_of(functional)(args, kwargs)
    with private.below_python():
        t.as_strided_(view.shape, view.stride(), view.storage_offset())
    t.node = view.node
    return t


def _extent(t: torch.Tensor) -> range:
    """The places in memory of a tensor's elements; none if it has gaps or overlaps itself."""
    dense = 1
    for n, s in sorted(
        ((n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1), key=lambda p: p[1]
    ):
        if s != dense:
            return range(0)
        dense *= n
    first = int(t.storage_offset())
    return range(first, first + t.numel())


def refuse_overlap(
    apart: Container[str], targets: Iterable[Any], operands: Iterable[tuple[str, Any]]
) -> None:
    """Raise PyTorch's RuntimeError if an operand partly overlaps a target that is written, or lies
    in the same memory and may not.

    apart: names of operands that must not share a target's memory at all. operands: (name, tensor)
    of the tensors that are read.
    """
    for target, (name, t) in itertools.product(targets, operands):
        one_memory = type(target) is type(t) is Traced and t.node.root is target.node.root
        if not one_memory or (t is target and name not in apart):
            continue
        mine, theirs = _extent(target), _extent(t)
        overlap = max(mine.start, theirs.start) < min(mine.stop, theirs.stop)
        if overlap and (name in apart or mine != theirs or target.stride() != t.stride()):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to "
                "tensor refer to a single memory location. Please clone() the tensor before "
                f"performing the operation.{at_line()}"
            )


def store(
    target: torch.Tensor, value: jax.Array, detached: bool = False, alike: bool = False
) -> None:
    """Write a value into a tensor, cast to its dtype.

    detached: torch's autograd does not record the write. alike: all elements of the value are
    equal, so a view may overlap itself.
    """
    dtype = dtypes.to_jax(target.dtype)
    if value.dtype != dtype:
        source = dtypes.to_torch(value.dtype)
        if not torch.can_cast(source, target.dtype):
            with private.below_python():
                # raises PyTorch's own error
                torch.mul(torch.empty(0, dtype=source), 1, out=torch.empty(0, dtype=target.dtype))
        value = folding.run(cast, (value, dtype), {})
    value = requires_grad.stopped_integers(value)
    if value.shape != target.shape:
        raise RuntimeError(
            f"output with shape {list(target.shape)} doesn't match the broadcast shape "
            f"{list(value.shape)}"
        )
    if 0 in target.stride() and (several := _several(target.shape, target.stride())):
        if alike and type(target) is Traced and not _several_in_root(target.node.root):
            first = tuple([slice(1) if d in several else slice(None) for d in range(target.dim())])
            return store(target[first], value[first], detached)
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a "
            "single memory location. Please clone() the tensor before performing the operation."
        )
    root = state.level.root
    if root.strict:  # in forward mode, what was written to keeps a tangent, of zeros
        value = requires_grad.tie_strictly(value, value_of(target), ())
    keep = _kept if root.stops or innermost(REVERSE) is not None else None
    assign(
        target, value, detached or None, keep=None if detached or torch.is_grad_enabled() else keep
    )


def _kept(old: jax.Array, new: jax.Array) -> jax.Array:
    """new with old's derivative, but in forward mode, which ignores no_grad."""
    if innermost(FORWARD) is None:
        return folding.run(revalue, (old, new), {})
    refuse_in_checkpoint()
    value, inside, root = new, 0, state.level.root
    for level in around():
        if level.kind in DIFFERENTIATING and private_jax.in_trace(level.probe, (old, new)):
            value = revalue_at(old, value, inside) if level.kind.reverse else value
            inside += 1
    return revalue_at(old, value, inside) if root.stops else value


def _several(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions along which several elements are one place in memory."""
    return [d for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if s == 0 and n > 1]


def _several_in_root(root: Node) -> bool:
    return root.geometry is not None and bool(_several(root.geometry.shape, root.geometry.strides))


def write_plan(func: torch._ops.OpOverload) -> Plan:
    """The plan of an in-place or out= variant, made from its functional form, or of an operator
    registered with ``writes``.
    """
    row, functional = LOWERINGS.get(func), functional_form(func)
    if torch.Tag.inplace_view in func.tags:
        return (
            fallback(func)
            if functional is None
            else functools.partial(_become_view, func, functional)
        )
    names = [a.name for a in func._schema.arguments]
    is_out = any(a.is_out for a in func._schema.arguments)
    writes = row.writes if row is not None else {}
    if row is not None and (writes or functional is None):
        inner = pure(func, row)
    elif (
        functional in LOWERINGS
        or functional in private.decompositions()
        or (functional is not None and private.has_kernel(functional, "CompositeImplicitAutograd"))
    ):
        inner = plan_of(functional)
        row = LOWERINGS.get(functional, Operator(inner))
        if row.draws and not is_out:  # in place, PyTorch draws by other rules
            inner = drawn(func, inner)
    else:
        return fallback(func)
    # the order is that of the functional form's results: out= arguments come first
    changed = sorted(
        (a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        key=lambda a: not a.is_out,
    )
    written = list(writes) or [a.name for a in changed]
    of_dtype = is_out and _is_factory(functional)
    looks = (
        row.apart is not None
        or is_pointwise(func)
        or (functional is not None and is_pointwise(functional))
    )
    alike = func._schema.name in ("aten::fill_", "aten::zero_")
    in_turn = func._schema.name.startswith("aten::_foreach_") and not is_out

    def run_write(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        targets = [given[name] for name in written]
        flat = [t for item in targets for t in (item if isinstance(item, list | tuple) else [item])]
        # as PyTorch: an entry reads what was written by those before it
        if in_turn and len(flat) > 1 and _meet(flat, given.values()):
            for i in range(len(flat)):
                own = [
                    x[i : i + 1] if _has_length(x, len(flat)) else x
                    for x in (*args, *kwargs.values())
                ]
                run_write(tuple(own[: len(args)]), dict(zip(kwargs, own[len(args) :], strict=True)))
            return None if len(func._schema.returns) == 0 else targets[0]
        if looks:
            read = [
                (name, x if isinstance(x, list | tuple) else [x])
                for name, x in given.items()
                if name not in written
            ]
            refuse_overlap(row.apart or (), flat, [(name, t) for name, some in read for t in some])
        if is_out:
            kwargs = {k: v for k, v in kwargs.items() if k not in written}
        if of_dtype:
            kwargs = {**kwargs, "dtype": flat[0].dtype}
        results = inner(args, kwargs)
        results = list(results) if isinstance(results, tuple | list) else [results]
        # of operators with several lists
        results = [t for x in results for t in (x if isinstance(x, list | tuple) else [x])]
        places = list(writes.values()) or range(len(results) - len(flat), len(results))
        if places and not 0 <= min(places) <= max(places) < len(results):
            raise RuntimeError(
                f"{func}: its lowering returned {len(results)} results; expected its own results "
                "and after them, or at the places that writes= gives, the new values of "
                f"{', '.join(written)}{at_line()}"
            )
        for target, place in zip(flat, places, strict=True):
            result = results[place]
            if target is None or result is None:
                continue
            if is_out and target.dtype is not result.dtype:
                _refuse_dtype(
                    func, args, kwargs, dict(zip(written, targets, strict=True)), row.exact_out
                )
            if is_out and target.shape != result.shape:
                _resize(target, result.shape)
            store(target, value_of(result), not is_out and place in row.no_grad_outputs, alike)
        if len(func._schema.returns) == 0:
            return None
        fresh, kept = (r for i, r in enumerate(results) if i not in places), iter(flat)
        returned = tuple(
            next(fresh) if r.alias_info is None else next(kept) for r in func._schema.returns
        )
        return returned[0] if len(returned) == 1 else returned

    return run_write


def _has_length(x: Any, n: int) -> bool:
    return (isinstance(x, list | tuple) and len(x) == n) or (
        isinstance(x, torch.Tensor) and x.dim() == 1 and len(x) == n
    )


def _meet(targets: Sequence[torch.Tensor], given: Iterable[Any]) -> bool:
    """Whether what is written lies in the memory of another entry of the lists."""
    entries: dict[Node, set[int]] = {node_of(t).root: set() for t in targets}
    for x in given:
        for i, t in enumerate(x if isinstance(x, list | tuple) else [x]):
            if isinstance(t, torch.Tensor) and (root := node_of(t).root) in entries:
                entries[root].add(i)
    return any(len(places) > 1 for places in entries.values())


def _is_factory(func: torch._ops.OpOverload) -> bool:
    """Whether an operator makes a tensor without taking one (zeros, arange, ...)."""
    kinds = {a.name: str(a.type) for a in func._schema.arguments} if func is not None else {}
    return (
        "dtype" in kinds
        and "layout" in kinds
        and not any("Tensor" in kind for kind in kinds.values())
    )


def _refuse_dtype(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: dict[str, Any],
    exact: bool,
) -> None:
    """Raise PyTorch's own error if it does not cast the result to the dtype of out=.

    exact: PyTorch's kernel for the device meta does not raise that error, so it is raised here.
    """
    if exact:
        raise RuntimeError(
            f"{func}: expected out= to have the result's dtype, got "
            f"{', '.join(str(t.dtype) for t in out.values())}"
        )
    with contextlib.suppress(NotImplementedError):  # the operator has no kernel for the device meta
        on_meta(func, args, kwargs | out)


def _resize(target: torch.Tensor, shape: Sequence[int]) -> None:
    """Give a tensor another shape in place; its elements keep their places in memory, and new
    elements are zero.
    """
    shape = tuple(shape)
    if type(target) is not Traced or target.node.parent is not None:
        raise RuntimeError(
            "resize_: a view, or a tensor from outside the transform, of shape "
            f"{list(target.shape)} cannot be resized to {list(shape)}{at_line()}"
        )

    def resized(
        value: jax.Array, shape: tuple[int, ...], outermost_first: tuple[int, ...]
    ) -> jax.Array:
        flat, size = value.transpose(outermost_first).reshape(-1), math.prod(shape)
        return jnp.pad(flat, (0, max(0, size - flat.size)))[:size].reshape(shape)

    outermost_first = tuple(sorted(range(target.dim()), key=target.stride, reverse=True))
    value = folding.run(resized, (value_of(target), shape, outermost_first), {})
    with private.below_python():
        # resize_ on a wrapper checks no bounds, except for a shape without elements, which
        # as_strided_ sets instead
        target.as_strided_(shape, contiguous(shape), 0) if 0 in shape else target.resize_(shape)
    target.node = Node(value, state.level)


@own_rule("aten.resize_", "aten.resize_as_")
def resize_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    size = args[1].shape if isinstance(args[1], torch.Tensor) else args[1]
    if tuple(size) != tuple(args[0].shape):
        _resize(args[0], size)
    return args[0]


def functional_form(func: torch._ops.OpOverload) -> Any:
    """The overload that computes what an in-place or out= overload writes, or None if torch has
    none.
    """
    namespace, name = func._schema.name.split("::")
    mine = [str(a.type) for a in func._schema.arguments if not a.is_out]
    bare = name.removesuffix("_")
    for candidate in dict.fromkeys([name, bare, bare + "_functional"]):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        for kind in sorted(
            packet.overloads() if packet is not None else (), key=lambda k: k != func._overloadname
        ):
            other = getattr(packet, kind)
            if other is func or other._schema.is_mutable:
                continue
            # by out=
            given = ("dtype", "layout", "device", "pin_memory") if _is_factory(other) else ()
            theirs = [str(a.type) for a in other._schema.arguments if a.name not in given]
            if theirs == mine or (kind == func._overloadname and theirs[: len(mine)] == mine):
                return other
    return None
