"""Stands for PyTorch's storage and aliasing in a trace, whose arrays cannot be written to.

A ``Node`` is a root that owns a value, or a view of another node; aliasing.py reads and writes them.  Tensors and traces are elsewhere.
"""
from __future__ import annotations

from typing import Any

import torch


class Node:
    """A value, or a view of one.  ``level`` is the trace level that made it."""

    __slots__ = (
        "__weakref__", "detached", "geometry", "hooked", "level", "maker", "parent", "root", "seen", "used", "value", "version",
        "view",
    )

    def __init__(self, value: Any, level: Any, parent: Node | None = None, view: Any = None) -> None:
        self.value = value
        self.level = level
        self.parent = parent
        self.view = view  # of a view: the aliasing.View that made it
        self.root: Node = self if parent is None else parent.root
        self.version = 0
        self.seen = -1
        self.maker: Any = None  # the operator that computed it, if any
        self.geometry: Geometry | None = None  # of a root that stands for a tensor from outside
        self.hooked: Any = None  # the value with hooks on its gradient, the value without, the hooks (bridge/intercepted/gradient_hooks.py)
        self.used = False  # an operator with a derivative has read it since it was last written
        self.detached = False  # torch's autograd does not record the last write


class Geometry:
    """How an argument tensor lies in its memory; only the tensor's own elements were converted to JAX, not the memory around them.

    Attributes:
        plain: whether it is contiguous and begins where its memory begins.
        asked: whether the function called ``as_strided``, which counts from where the memory begins.
        outer: the geometry of the tensor that this one stands for at the next outer level.
    """

    __slots__ = ("asked", "outer", "plain")

    def __init__(self, plain: bool, outer: Geometry | None = None) -> None:
        self.plain, self.outer, self.asked = plain, outer, False

    @classmethod
    def of(cls, t: object) -> Geometry:
        node = getattr(t, "node", None)
        try:
            plain = not isinstance(t, torch.Tensor) or bool(t.is_contiguous() and t.storage_offset() == 0)
        except (RuntimeError, AttributeError):  # a tensor without strides, which cannot be converted
            plain = True
        return cls(plain, None if node is None else node.root.geometry)

    def ask(self) -> bool:
        """Note a call of ``as_strided``, and return whether it is possible: the tensor must be plain here and at every outer level."""
        self.asked = True
        return (self.outer is None or self.outer.ask()) and self.plain


class OutsideOfView(RuntimeError):
    """``as_strided`` may read the memory around a tensor, and only the tensor's own elements are known."""
