"""Reads and writes values of a trace through views.

A write to a view rewrites its root by the inverse of each view operator between them. A view is
computed again if it is read after its root has changed. A result that is a view of a tensor from
outside is made by the same operators on that tensor (``again``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from bridge import private
from bridge.lowering.common.in_place import overwrite, read_first, starts
from bridge.lowering.common.promotion import cast
from bridge.lowering.registry import LOWERINGS, of_this_torch, overload
from bridge.trace import folding
from bridge.trace.levels import Level
from bridge.trace.storage import Node

Keep = Callable[[jax.Array, jax.Array], jax.Array]  # (old, new) -> new with the derivative of old


class View:
    """A view operator with its arguments: forward returns the view of a base, inverse returns the
    base with the view replaced.

    Attributes:
        recording: whether torch's autograd records it; None: it cannot be done again on a tensor of
            PyTorch's (see ``again``).
    """

    __slots__ = ("args", "func", "kwargs", "lowering", "recording")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        lowering: Callable[..., Any] | None = None,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.lowering = lowering or LOWERINGS[func].lowering
        self.recording: bool | None = (
            torch.is_grad_enabled() if _plain((args, *kwargs.values())) else None
        )

    def __reduce__(self) -> Any:
        return _stored, (
            None if type(self) is Inner else str(self.func),
            self.args,
            self.kwargs,
            self.recording,
        )

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The view of a tensor of PyTorch's."""
        return self.func(t, *self.args, **self.kwargs)

    def forward(self, base: jax.Array) -> jax.Array:
        return folding.run(self.lowering, (base, *self.args), self.kwargs)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, View)
            and self.func is other.func
            and self.args == other.args
            and self.kwargs == other.kwargs
        )

    def __hash__(self) -> int:
        return hash((self.func, _hashable(self.args)))

    def inverse(self, base: jax.Array, value: jax.Array) -> jax.Array:
        rule = LOWERINGS[self.func].view_inverse or self._scattered
        return folding.run(rule, (base, value, *self.args), self.kwargs)

    def _scattered(self, base: jax.Array, value: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """The inverse of any view that only selects elements: each element goes back to the index
        that it came from.
        """
        return _scattered(base, value, lambda places: self.lowering(places, *args, **kwargs))


class Part(View):
    """The part of a dimension that begins at a place which only the program knows; args: dimension,
    0-dim integer array, length.
    """

    __slots__ = ()

    def __init__(self, dim: int, start: jax.Array, length: int) -> None:
        super().__init__(Part, (dim, start, length), {}, _part)

    def inverse(self, base: jax.Array, value: jax.Array) -> jax.Array:
        dim, start, _ = self.args
        return overwrite(
            base,
            cast(value, base.dtype),
            [start if d == dim else jnp.zeros_like(start) for d in range(base.ndim)],
        )

    __eq__, __hash__ = object.__eq__, object.__hash__  # its place has no value to compare


def _part(base: jax.Array, dim: int, start: jax.Array, length: int) -> jax.Array:
    (at,) = starts([start], [base.shape[dim]])
    return lax.dynamic_slice_in_dim(base, at, length, dim)


class Inner(View):
    """The views that the function of a transform has taken of one of its arguments, as one view.

    Args:
        views: a view of the argument, a view of that, ...
        in_dim, out_dim: under vmap, the mapped dimension of the argument and of the result; None:
            no dimension is mapped.
    """

    __slots__ = ()

    def __init__(
        self, views: tuple[View, ...], in_dim: int | None = None, out_dim: int | None = None
    ) -> None:
        super().__init__(Inner, (views, in_dim, out_dim), {}, self._forward)

    def of(self, t: torch.Tensor) -> torch.Tensor:
        views, in_dim, out_dim = self.args
        return (
            again(t, views)
            if in_dim is None
            else private.mapped_by_torch(lambda lane: again(lane, views), t, in_dim, out_dim)
        )

    def _forward(self, base: jax.Array, *_: Any) -> jax.Array:
        views, in_dim, out_dim = self.args
        return _mapped(lambda lane: _bases(lane, views)[-1], in_dim, out_dim)(base)

    def inverse(self, base: jax.Array, value: jax.Array) -> jax.Array:
        views, in_dim, out_dim = self.args

        def back(base: jax.Array, value: jax.Array) -> jax.Array:
            parts, rest = _bases(base, views), views
            k = _overlap(views)
            if k is not None:
                value, rest = _through(parts[k], views[k:], value), views[:k]
            for view, part in reversed(list(zip(rest, parts, strict=False))):
                value = view.inverse(part, value)
            return value

        return _mapped(back, (in_dim, out_dim), in_dim)(base, value)


def _mapped(
    fn: Callable[..., jax.Array], in_dims: Any, out_dim: int | None
) -> Callable[..., jax.Array]:
    return fn if out_dim is None else jax.vmap(fn, in_dims, out_dim)


def _bases(value: jax.Array, views: tuple[View, ...]) -> list[jax.Array]:
    """A value, the first view of it, the second view of that, ..."""
    found = [value]
    for view in views:
        found.append(view.lowering(found[-1], *view.args, **view.kwargs))
    return found


def _scattered(
    base: jax.Array, value: jax.Array, forward: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The base with a view that only selects elements replaced;
    forward gives the view of an array.
    """
    index = forward(jnp.arange(base.size, dtype=jnp.int64).reshape(base.shape))
    values = read_first(cast(value, base.dtype), base)
    return base.reshape(-1).at[index.reshape(-1)].set(values.reshape(-1)).reshape(base.shape)


def _overlap(views: Sequence[View]) -> int | None:
    """The place of the first view in which an element of its base may be several elements, if
    further views select some of these.

    A write to such a part cannot go back view by view: the other elements that stand for the same
    one would bring its old value back.
    """
    k = next((k for k, view in enumerate(views[:-1]) if view.func in _OVERLAPPING), None)
    return None if k is None or any(view.func in _OF_VALUES for view in views[k:]) else k


_OVERLAPPING = frozenset(
    of_this_torch(dict.fromkeys(("aten.expand", "aten.unfold", "aten.as_strided")))
)
#: Views that change values, besides selecting elements.
_OF_VALUES = frozenset(
    of_this_torch(
        dict.fromkeys(
            (
                "aten._conj",
                "aten._neg_view",
                "aten.view_as_real",
                "aten.view_as_complex",
                "aten.view.dtype",
            )
        )
    )
)


def _through(base: jax.Array, views: Sequence[View], value: jax.Array) -> jax.Array:
    """The base with a view of a view, and so on, replaced."""
    return _scattered(base, value, lambda places: _bases(places, tuple(views))[-1])


def expanded(dim: int, shape: Sequence[int]) -> tuple[View, ...]:
    """The views that expand a tensor to this shape, which has one dimension more."""
    unsqueezed, expand = overload("aten.unsqueeze"), overload("aten.expand")
    return View(unsqueezed, (dim,), {}), View(expand, ([*shape],), {})


def again(t: torch.Tensor, views: Sequence[View]) -> torch.Tensor:
    """The same views of a tensor of PyTorch's; they share its memory and have the strides,
    ``_base`` and grad_fn that PyTorch gives.
    """
    rest = [*views]
    while rest:
        view = rest.pop(0)
        with torch.set_grad_enabled(bool(view.recording) and torch.is_grad_enabled()):
            if (
                t.is_conj()
                and view.func is overload("aten.view_as_real")
                and rest
                and _selects_part(rest[0], t)
            ):
                # view_as_real refuses a conjugate; real and imag know about it
                t = (torch.real, torch.imag)[rest.pop(0).args[1]](t)
            else:
                t = view.of(t)
    return t


def _selects_part(view: View, t: torch.Tensor) -> bool:
    """Whether a view of view_as_real(t) is its real or its imaginary part."""
    return view.func is overload("aten.select.int") and view.args in [
        (dim, k) for dim in (-1, t.dim()) for k in (0, 1)
    ]


def detaches(view: View) -> bool:
    """Whether a view has no derivative."""
    return (
        any(map(detaches, view.args[0]))
        if isinstance(view, Inner)
        else view.func is overload("aten.detach")
    )


def conjugates(view: View) -> bool:
    """Whether a view has the conjugates of what it is a view of."""
    return (
        sum(map(conjugates, view.args[0])) % 2 == 1
        if isinstance(view, Inner)
        else view.func is overload("aten._conj")
    )


def views_between(node: Node) -> tuple[Node, tuple[View, ...]]:
    """The root of a node, and the views that lead from it to the node, except for those that
    PyTorch's autograd takes by itself.
    """
    views = []
    while node.parent is not None:
        if node.view.func is not overload("aten.alias"):
            views.append(node.view)
        node = node.parent
    return node, tuple(reversed(views))


def repeated(t: torch.Tensor, views: Sequence[View]) -> torch.Tensor | None:
    """The same views of a tensor on the device meta; None if they cannot be done again on a tensor
    of PyTorch's.
    """
    if any(view.recording is None for view in views):
        return None
    try:
        return again(t, views)
    except RuntimeError:
        return None


def _plain(x: object) -> bool:
    """Whether arguments of a view are the same at each call: no tensors, and no numbers that are
    inputs of a program.
    """
    if isinstance(x, list | tuple):
        return all(map(_plain, x))
    return (
        x is None
        or type(x) in (int, bool, torch.dtype, torch.memory_format)
        or (isinstance(x, View) and x.recording is not None)
    )


def _stored(
    name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any], recording: bool | None
) -> View:
    view = Inner(*args) if name is None else View(overload(name), args, kwargs)
    view.recording = recording
    return view


def _hashable(x: object) -> object:
    return tuple(_hashable(v) for v in x) if isinstance(x, list | tuple) else x


def read(node: Node, level: Level) -> Any:
    """The node's current value, as a trace level sees it."""
    if node.parent is None:
        return node.value
    if node.seen == node.root.version:
        return node.value
    value = node.view.forward(read(node.parent, level))
    # a value computed inside a deeper level may be that level's tracer: it is not kept
    if node.level is level:
        node.value, node.seen = value, node.root.version
    return value


def write(
    node: Node, value: jax.Array, level: Level, detached: bool = False, keep: Keep | None = None
) -> None:
    """Replace a node's value, in its root and so in every view of it.

    detached: torch's autograd does not record the write. keep: gives the new value the derivative
    of the old one.
    """
    root = node.root
    if node.parent is None:
        level.before_write(root)
        if keep is not None and jnp.issubdtype(value.dtype, jnp.inexact):
            value = keep(root.value, value)
        root.value = value
        root.maker = level.operator
        root.used = False
        root.version += 1
        root.detached = detached
        return
    chain = [node]
    while chain[-1].parent is not None:
        chain.append(chain[-1].parent)
    chain.reverse()
    views = [each.view for each in chain[1:]]
    detached = detached or any(map(detaches, views))
    k = _overlap(views)
    if k is None:
        write(
            node.parent, node.view.inverse(read(node.parent, level), value), level, detached, keep
        )
    else:
        write(chain[k], _through(read(chain[k], level), views[k:], value), level, detached, keep)
    if node.level is level:
        node.value, node.seen = value, root.version
