"""Values and views of a trace: what PyTorch's storage and aliasing become when arrays cannot be written to.

A ``Node`` is a root that owns a value, or a view of another node.  Writing to a view rewrites its root by the inverse of each
view operator on the way; reading a view after its root has changed computes it again.  No tensor and no trace lives here.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from bridge import eager
from bridge.lowering.common.promotion import cast
from bridge.lowering.registry import of_this_torch


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

    def __init__(self, func: Any, lowering: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.lowering, self.args, self.kwargs = func, lowering, args, kwargs

    def forward(self, base: Any) -> Any:
        return eager.run(self.func, self.lowering, (base, *self.args), self.kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self.func is other.func and self.args == other.args and self.kwargs == other.kwargs

    def __hash__(self) -> int:
        return hash((self.func, _hashable(self.args)))

    def inverse(self, base: Any, value: Any) -> Any:
        rule = _INVERSES.get(self.func, self._scattered)
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


@jax.custom_jvp
def revalue(old: Any, new: Any) -> Any:
    """new with old's derivative: what a write that torch's autograd does not record leaves in a tensor."""
    return lax.select(jnp.zeros(new.shape, bool), old, new)  # never old, but mapped where old is, as its derivative


@revalue.defjvp
def _revalue_jvp(primals: Any, tangents: Any) -> Any:
    return revalue(*primals), tangents[0]


def _detached(base: Any, value: Any) -> Any:
    return revalue(base, value) if jnp.issubdtype(value.dtype, jnp.inexact) else value


def _reshape(base: Any, value: Any, *_: Any, **__: Any) -> Any:
    return lax.reshape(value, base.shape)


def _same(base: Any, value: Any, *_: Any, **__: Any) -> Any:
    return value


def _permute(base: Any, value: Any, dims: Any) -> Any:
    return lax.transpose(value, tuple(np.argsort([d % base.ndim for d in dims])))


def _transpose(base: Any, value: Any, *dims: int) -> Any:
    if base.ndim < 2:
        return value
    a, b = dims or (0, 1)
    return jnp.swapaxes(value, a, b)


def _select(base: Any, value: Any, dim: int, index: int) -> Any:
    at = (slice(None),) * (dim % base.ndim) + (index,)
    return base.at[at].set(value)


def _slice(base: Any, value: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if value.shape == base.shape:
        return value
    at = (slice(None),) * (dim % base.ndim) + (slice(start, end, step),)
    return base.at[at].set(value)


def _expand(base: Any, value: Any, size: Any, *, implicit: bool = False) -> Any:
    if value.size != base.size:
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    return lax.reshape(value, base.shape)


def _complex(base: Any, value: Any) -> Any:
    return lax.complex(value[..., 0], value[..., 1])


def _real(base: Any, value: Any) -> Any:
    return jnp.stack([lax.real(value), lax.imag(value)], -1)


def _bits(base: Any, value: Any, dtype: torch.dtype) -> Any:
    if value.dtype.itemsize == base.dtype.itemsize:
        return lax.bitcast_convert_type(value, base.dtype)
    ratio = max(value.dtype.itemsize, base.dtype.itemsize) // min(value.dtype.itemsize, base.dtype.itemsize)
    if value.dtype.itemsize < base.dtype.itemsize:
        return lax.bitcast_convert_type(value.reshape(*value.shape[:-1], -1, ratio), base.dtype)
    return lax.bitcast_convert_type(value, base.dtype).reshape(base.shape)


_INVERSES: dict[Any, Callable[..., Any]] = of_this_torch({
    "aten.view.default": _reshape,
    "aten._reshape_alias.default": _reshape,
    "aten.squeeze.default": _reshape,
    "aten.squeeze.dim": _reshape,
    "aten.squeeze.dims": _reshape,
    "aten.unsqueeze.default": _reshape,
    "aten.alias.default": _same,
    "aten.detach.default": _detached,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _transpose,
    "aten.select.int": _select,
    "aten.slice.Tensor": _slice,
    "aten.expand.default": _expand,
    "aten.view_as_real.default": _complex,
    "aten.view_as_complex.default": _real,
    "aten._conj.default": lambda base, value: lax.conj(value),
    "aten._neg_view.default": lambda base, value: lax.neg(value),
    "aten.view.dtype": _bits,
})
