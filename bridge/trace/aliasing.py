"""Reading and writing values of a trace through views: writing to a view rewrites its root by the inverse of each view operator on the
way; reading a view after its root has changed computes it again.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from bridge.lowering.common.promotion import cast
from bridge.lowering.registry import LOWERINGS
from bridge.lowering.tensors.copies import revalue
from bridge.trace import pieces
from bridge.trace.storage import Node


class View:
    """A view operator with its arguments: forward gives the view of a base, inverse the base with the view replaced."""

    __slots__ = ("args", "func", "kwargs", "lowering")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lowering: Callable[..., Any] | None = None) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.lowering = lowering or LOWERINGS[func].lowering

    def forward(self, base: Any) -> Any:
        return pieces.run(self.func, self.lowering, (base, *self.args), self.kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self.func is other.func and self.args == other.args and self.kwargs == other.kwargs

    def __hash__(self) -> int:
        return hash((self.func, _hashable(self.args)))

    def inverse(self, base: Any, value: Any) -> Any:
        rule = LOWERINGS[self.func].view_inverse or self._scattered
        return pieces.run(("inverse", self.func), rule, (base, value, *self.args), self.kwargs)

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
            value = pieces.run("revalue", revalue, (root.value, value), {})
        root.value = value
        root.used = False
        root.version += 1
        root.detached = detached
        return
    write(node.parent, node.view.inverse(read(node.parent, level), value), level, detached, keep)
    if node.level is level:
        node.value, node.seen = value, root.version
