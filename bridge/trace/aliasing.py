"""Reads and writes values of a trace through views.

A write to a view rewrites its root by the inverse of each view operator between them.  A view is computed again if it is read after its
root has changed.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bridge.lowering.common.promotion import cast
from bridge.lowering.registry import LOWERINGS
from bridge.lowering.tensors.copies import revalue
from bridge.trace import pieces
from bridge.trace.levels import Level
from bridge.trace.storage import Node


class View:
    """A view operator with its arguments: forward returns the view of a base, inverse returns the base with the view replaced."""

    __slots__ = ("args", "func", "kwargs", "lowering")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lowering: Callable[..., Any] | None = None) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.lowering = lowering or LOWERINGS[func].lowering

    def forward(self, base: jax.Array) -> jax.Array:
        return pieces.run(self.func, self.lowering, (base, *self.args), self.kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self.func is other.func and self.args == other.args and self.kwargs == other.kwargs

    def __hash__(self) -> int:
        return hash((self.func, _hashable(self.args)))

    def inverse(self, base: jax.Array, value: jax.Array) -> jax.Array:
        rule = LOWERINGS[self.func].view_inverse or self._scattered
        return pieces.run(("inverse", self.func), rule, (base, value, *self.args), self.kwargs)

    def _scattered(self, base: jax.Array, value: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """The inverse of any view that only selects elements: each element goes back to the index that it came from."""
        index = self.lowering(jnp.arange(base.size, dtype=jnp.int64).reshape(base.shape), *args, **kwargs)
        flat = base.reshape(-1).at[index.reshape(-1)].set(cast(value, base.dtype).reshape(-1))
        return flat.reshape(base.shape)


def _hashable(x: object) -> object:
    return tuple(_hashable(v) for v in x) if isinstance(x, list | tuple) else x


def read(node: Node, level: Level) -> Any:
    """The node's current value, as a trace level sees it."""
    if node.parent is None:
        return node.value
    if node.seen == node.root.version:
        return node.value
    value = node.view.forward(read(node.parent, level))
    if node.level is level:  # a value computed inside a deeper level may be that level's tracer: it is not kept
        node.value, node.seen = value, node.root.version
    return value


def write(node: Node, value: jax.Array, level: Level, detached: bool = False, keep: bool = False) -> None:
    """Replace a node's value, in its root and so in every view of it.

    detached: torch's autograd does not record the write.  keep: the new value keeps the derivative of the old one.
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
