"""Operators whose result shares memory with their argument; the result is a node that is computed
when it is first read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge import private, private_jax
from bridge.convert import dtypes, tensors
from bridge.convert.strides import contiguous, span
from bridge.errors import at_line
from bridge.lowering.registry import LOWERINGS, Operator, overload
from bridge.operators.dtype_refusals import Plan
from bridge.operators.operands import constant, pure, stop
from bridge.trace.aliasing import Inner, Part, View, read, repeated
from bridge.trace.levels import innermost, state
from bridge.trace.storage import Geometry, Node, OutsideOfView
from bridge.trace.tracing import (
    Traced,
    node_of,
    note_outer,
    over,
    own_rule,
    plan_of,
    unknown_value,
    value_of,
    wrap,
)
from bridge.transform_kinds import REVERSE

aten = torch.ops.aten


def meta_of(t: torch.Tensor) -> torch.Tensor:
    if t.layout is not torch.strided or t.is_nested:
        tensors.plain(t)  # raises the error for its layout
    if t.storage_offset():
        size = int(t.storage_offset()) + span(t.shape, t.stride())
        return torch.empty(size, dtype=t.dtype, device="meta").as_strided(
            t.shape, t.stride(), t.storage_offset()
        )
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def view_plan(func: torch._ops.OpOverload, row: Operator) -> Plan:
    """The plan of an operator whose results share its input's memory; each is computed when it is
    first read.
    """
    parts = row.view_parts

    def run_view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base, rest = args[0], args[1:]
        if isinstance(base, complex):  # autograd takes the conjugate of a number too
            base = wrap(jnp.asarray(base, jnp.complex128))
        meta = func(meta_of(base), *rest, **kwargs)
        if parts is None:
            return _viewed(base, meta, View(func, rest, kwargs), base.device)
        views = [
            View(overload(name), own, {}) for name, own in parts(tuple(base.shape), *rest, **kwargs)
        ]
        return [
            _viewed(base, each, view, base.device) for each, view in zip(meta, views, strict=True)
        ]

    return run_view


def _viewed(
    base: torch.Tensor | Node, meta: torch.Tensor, view: View, device: torch.device
) -> Traced:
    """The view of a tensor or node; meta: a tensor on the device meta with the view's geometry."""
    parent = base if isinstance(base, Node) else node_of(base)
    parent.used = True
    if isinstance(base, torch.Tensor):
        note_outer(base, parent)
    node = Node(None, state.level, parent, view)
    if not torch.is_grad_enabled():  # the same memory, no derivative through it
        node.value, node.seen = (
            stop(
                view.forward(read(base, state.level) if isinstance(base, Node) else value_of(base))
            ),
            node.root.version,
        )
    return over(node, meta, device)


class _Place:
    """The node of a SymInt for the beginning of a part, which only the program knows; torch's
    autograd keeps it for its backward.
    """

    is_int = is_symbolic = lambda self: True
    is_float = is_bool = is_nested_int = lambda self: False
    maybe_as_int = constant_int = lambda self: None
    clone = lambda self: self

    def __init__(self, start: jax.Array, length: int) -> None:
        self.start, self.length = start, length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unknown_value("item()")


def part(base: torch.Tensor, dim: int, start: jax.Array, length: int) -> torch.Tensor:
    """The part of a dimension that begins at a place which only the program knows; start: a 0-dim
    integer.

    torch's autograd may go back through it: for its C++ the place is a SymInt.
    """
    if not (base.requires_grad and torch.is_grad_enabled()):
        return _part(base, Part(dim, start, length))
    place = torch.SymInt(_Place(start, length))
    with private.replaying_views(True):  # PyTorch knows no offset in memory
        return aten.slice.Tensor(base, dim, place, place, 1)


def _place(args: tuple[Any, ...], at: int) -> _Place | None:
    """The place that an operator was given as this argument, if it is one."""
    node = args[at].node if len(args) > at and type(args[at]) is torch.SymInt else None
    return node if type(node) is _Place else None


@own_rule("aten.slice.Tensor")
def _slice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = _place(args, 2)
    if place is None:
        return view_plan(aten.slice.Tensor, LOWERINGS[aten.slice.Tensor])(args, kwargs)
    return _part(args[0], Part(args[1], place.start, place.length))


@own_rule("aten.slice_backward")
def _slice_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = _place(args, 3)
    if place is None:
        return pure(aten.slice_backward.default, LOWERINGS[aten.slice_backward.default])(
            args, kwargs
        )
    grad, sizes, dim = args[:3]
    value = value_of(grad)
    return wrap(
        Part(dim, place.start, place.length).inverse(jnp.zeros(sizes, value.dtype), value),
        grad.device,
    )


def _part(base: torch.Tensor, view: Part) -> Traced:
    dim, _, length = view.args
    with private.without_modes():
        meta = meta_of(base).narrow(dim, 0, length)
    return _viewed(base, meta, view, base.device)


def view_again(t: torch.Tensor | Node, views: tuple[View, ...]) -> Traced | None:
    """The views that a transform's function has taken of a tensor, or of a root node, as views of
    it where the transform was called.

    None: PyTorch's own transforms have no such view.
    """
    with private.without_modes():
        base, device = _of_root(t) if isinstance(t, Node) else (meta_of(t), t.device)
        meta = repeated(base, views)
    if meta is None:
        return None
    if views:
        return _viewed(t, meta, Inner(views), device)
    return over(t if isinstance(t, Node) else node_of(t), meta, device)


def can_repeat(t: torch.Tensor, views: tuple[View, ...]) -> bool:
    """Whether PyTorch's own transforms take the same views of a tensor."""
    return not views or repeated(meta_of(t), views) is not None


def _of_root(node: Node) -> tuple[torch.Tensor, torch.device]:
    """A tensor on the device meta with the geometry of a root node, and the device of the node's
    tensor.
    """
    found = next((t for t, other in state.level.root.captured.values() if other is node), None)
    if found is not None:
        return meta_of(found), found.device
    strides = contiguous(node.value.shape) if node.geometry is None else node.geometry.strides
    return torch.empty_strided(
        node.value.shape, strides, dtype=dtypes.to_torch(node.value.dtype), device="meta"
    ), torch.device("cpu")


@own_rule("aten.detach")
def detach(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    # also a captured tensor's .data, which autograd keeps as it is
    if private.by_user() or type(base) is not Traced:
        return over(_detached_node(base, constant), base)
    return over(Node(None, state.level, node_of(base), View(aten.alias.default, (), {})), base)


def _detached_node(base: torch.Tensor, stopped: Callable[[Any], Any]) -> Node:
    """A node on the same memory, without derivatives."""
    with torch.no_grad():  # the tensor becomes a captured one, but this use needs no derivative
        value, parent = value_of(base), node_of(base)
    view = View(aten.detach.default, (), {}, stopped)
    if stopped is not constant:
        view.recording = None  # it detaches from one transform alone
    node = Node(stopped(value), state.level, parent, view)
    node.seen = node.root.version
    return node


def detach_in_place(t: Traced) -> None:
    """Detach a tensor from the innermost grad transform, as detach_() does: PyTorch's kernel
    changes only that transform's metadata.
    """
    level = innermost(REVERSE)
    t.node = _detached_node(
        t, constant if level is None else lambda v: private_jax.stop_at(v, level.probe)
    )


@own_rule("aten.as_strided")
def as_strided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    offset = base.storage_offset() if offset is None else offset
    node = node_of(base)
    root = node.root
    if _is_part(node):
        raise OutsideOfView(
            "as_strided: only the program knows where in memory this view, x[i] with a tensor i, "
            f"begins; call .clone() first{at_line()}"
        )
    first = _first_place(root)
    if offset < first:
        raise OutsideOfView(
            f"as_strided: offset {offset} lies before the start of the tensor from outside, "
            f"{first}{at_line()}"
        )
    end = (
        offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=False))
        if 0 not in size
        else 0
    )
    if end > first + root.value.size:
        raise OutsideOfView(
            f"as_strided: sizes {list(size)}, strides {list(stride)} and offset {offset} reach "
            f"element {end - 1}, and only elements {first} to {first + root.value.size - 1} of the "
            f"tensor's memory are known{at_line()}"
        )
    meta = torch.empty(first + root.value.size, dtype=base.dtype, device="meta").as_strided(
        size, stride, offset
    )
    view = View(aten.as_strided.default, (tuple(size), tuple(stride), offset - first), {})
    ordered = _in_order(root)
    if first or ordered is not root:
        view.recording = None  # it counts from where the tensor's memory begins
    return over(Node(None, state.level, ordered, view), meta, base.device)


def _is_part(node: Node | None) -> bool:
    return node is not None and (isinstance(node.view, Part) or _is_part(node.parent))


def _in_order(root: Node) -> Node:
    """A computed tensor, or the view of it that has its dimensions in the order in which they lie
    in memory.
    """
    strides = contiguous(root.value.shape) if root.geometry is None else root.geometry.strides
    if strides == contiguous(root.value.shape):
        return root
    dims = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    shape = [root.value.shape[d] for d in dims]
    if any(
        n != 1 and strides[d] != s
        for d, n, s in zip(dims, shape, contiguous(tuple(shape)), strict=True)
    ):
        raise OutsideOfView(
            f"as_strided: the tensor has gaps in its memory; call .contiguous() first{at_line()}"
        )
    return Node(None, state.level, root, View(aten.permute.default, (dims,), {}))


@own_rule("aten.as_strided_copy")
def as_strided_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return plan_of(aten.clone.default)(
        (as_strided(args, kwargs),), {"memory_format": torch.contiguous_format}
    )


@own_rule("aten.as_strided_scatter")
def as_strided_scatter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, src, *rest = args
    root = node_of(base).root
    _first_place(root)
    whole = root.value.size == base.numel()
    if base.is_contiguous() and (whole or (len(rest) < 3 and "storage_offset" not in kwargs)):
        return pure(aten.as_strided_scatter.default, LOWERINGS[aten.as_strided_scatter.default])(
            args, kwargs
        )
    if not whole:
        raise OutsideOfView(
            "as_strided_scatter: it counts from where the memory of a view's base begins; call "
            f".clone() first{at_line()}"
        )
    out = plan_of(aten.clone.default)((base,), {})
    plan_of(aten.copy_.default)((as_strided((out, *rest), kwargs), src), {})
    return out


def _first_place(root: Node) -> int:
    """The offset in memory of a root's tensor from outside; only the tensor's own elements are
    known, not the memory before it.
    """
    found = next((t for t, node in state.level.root.captured.values() if node is root), None)
    if root.geometry is None and found is not None:
        root.geometry = Geometry.of(found)
    if root.geometry is None or root.geometry.ask():
        return 0
    if not root.geometry.known:
        raise OutsideOfView(
            "as_strided: it is not known how PyTorch lays this computed tensor out in memory; call "
            f".clone(memory_format=torch.contiguous_format) first{at_line()}"
        )
    if found is None:
        raise OutsideOfView(
            "as_strided: it counts from where a tensor's memory begins, and only the own elements "
            "are known of an argument that is a view or is not contiguous; pass the whole tensor "
            f"and take the view inside the function, or call .clone() first{at_line()}"
        )
    if not found.is_contiguous():
        raise OutsideOfView(
            "as_strided: a tensor from outside must be contiguous; call .contiguous() "
            f"first{at_line()}"
        )
    return int(found.storage_offset())


@own_rule("aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes")
def unsafe_split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In PyTorch the parts lie in the tensor's memory, although the schema does not say so."""
    of_sizes = isinstance(args[1], list | tuple)
    return plan_of(aten.split_with_sizes.default if of_sizes else aten.split.Tensor)(args, kwargs)
