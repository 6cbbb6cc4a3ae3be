"""Values and views of a trace: what PyTorch's storage and aliasing become when arrays cannot be written to.

A ``Node`` is a root that owns a value, or a view of another node.  Writing to a view rewrites its root by the inverse of each
view operator on the way; reading a view after its root has changed computes it again.  No tensor and no trace lives here.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from bridge import eager
from bridge.lowering.common.promotion import cast
from bridge.lowering.registry import LOWERINGS
from bridge.lowering.tensors.copies import revalue


class Node:
    """A value, or a view of one.  ``level`` is the trace level that made it."""

    __slots__ = (
        "__weakref__", "detached", "geometry", "hooked", "level", "maker", "parent", "root", "seen", "used", "value", "version",
        "view",
    )

    def __init__(self, value: Any, level: Any, parent: Node | None = None, view: View | None = None) -> None:
        self.value = value
        self.level = level
        self.parent = parent
        self.view = view
        self.root: Node = self if parent is None else parent.root
        self.version = 0
        self.seen = -1
        self.maker: Any = None  # the operator that computed it, where one did
        self.geometry: Geometry | None = None  # of a root that stands for a tensor from outside
        self.hooked: Any = None  # the value with hooks on its gradient, the value without, the hooks (bridge/hooks.py)
        self.used = False  # an operator with a derivative has read it since it was last written
        self.detached = False  # the last write was one that torch's autograd does not record


class Geometry:
    """How a tensor given to a function lies in its memory, of which only the tensor's own elements have crossed.

    Attributes:
        plain: whether it is contiguous and begins where its memory begins.
        asked: whether the function went by ``as_strided``, which counts from there.
        outer: the geometry of the tensor that it was made of at the next outer level.
    """

    __slots__ = ("asked", "outer", "plain")

    def __init__(self, plain: bool, outer: Geometry | None = None) -> None:
        self.plain, self.outer, self.asked = plain, outer, False

    @classmethod
    def of(cls, t: Any) -> Geometry:
        node = getattr(t, "node", None)
        try:
            plain = not isinstance(t, torch.Tensor) or bool(t.is_contiguous() and t.storage_offset() == 0)
        except (RuntimeError, AttributeError):  # a tensor without strides, which cannot cross
            plain = True
        return cls(plain, None if node is None else node.root.geometry)

    def ask(self) -> bool:
        """Whether it can be counted from where the memory begins, here and at every outer level."""
        self.asked = True
        return (self.outer is None or self.outer.ask()) and self.plain


class OutsideOfView(RuntimeError):
    """``as_strided`` may look at what lies around a tensor in memory, and only the tensor's own elements are known."""


class View:
    """A view operator with its arguments: forward gives the view of a base, inverse the base with the view replaced."""

    __slots__ = ("args", "func", "kwargs", "lowering")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lowering: Callable[..., Any] | None = None) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.lowering = lowering or LOWERINGS[func].lowering

    def forward(self, base: Any) -> Any:
        return eager.run(self.func, self.lowering, (base, *self.args), self.kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self.func is other.func and self.args == other.args and self.kwargs == other.kwargs

    def __hash__(self) -> int:
        return hash((self.func, _hashable(self.args)))

    def inverse(self, base: Any, value: Any) -> Any:
        rule = LOWERINGS[self.func].view_inverse or self._scattered
        return eager.run(("inverse", self.func), rule, (base, value, *self.args), self.kwargs)

    def _scattered(self, base: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Any view that only selects elements: where they come from tells where they go."""
        index = self.lowering(jnp.arange(base.size, dtype=jnp.int64).reshape(base.shape), *args, **kwargs)
        flat = base.reshape(-1).at[index.reshape(-1)].set(cast(value, base.dtype).reshape(-1))
        return flat.reshape(base.shape)


def _hashable(x: Any) -> Any:
    return tuple(_hashable(v) for v in x) if isinstance(x, list | tuple) else x


def read(node: Node, level: Any) -> Any:
    """The node's value now, as seen from a trace level."""
    if node.parent is None:
        return node.value
    if node.seen == node.root.version:
        return node.value
    value = node.view.forward(read(node.parent, level))
    if node.level is level:  # a value computed inside a deeper level may be that level's tracer: it is not kept
        node.value, node.seen = value, node.root.version
    return value


def write(node: Node, value: Any, level: Any, detached: bool = False, keep: bool = False) -> None:
    """Replace a node's value, in its root and so in every view of it.

    detached: torch's autograd does not record the write.  keep: the new value keeps the derivative of the old one, too.
    """
    root = node.root
    if node.parent is None:
        level.before_write(root)
        if keep and jnp.issubdtype(value.dtype, jnp.inexact):
            value = eager.run("revalue", revalue, (root.value, value), {})
        root.value = value
        root.used = False
        root.version += 1
        root.detached = detached
        return
    write(node.parent, node.view.inverse(read(node.parent, level), value), level, detached, keep)
    if node.level is level:
        node.value, node.seen = value, root.version
