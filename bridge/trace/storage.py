"""What PyTorch's storage and aliasing become in a trace, where arrays cannot be written to.

A ``Node`` is a root that owns a value, or a view of another node; aliasing.py reads and writes them.  No tensor and no trace lives here.
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
        self.view = view  # of a view: the nodes.View that made it
        self.root: Node = self if parent is None else parent.root
        self.version = 0
        self.seen = -1
        self.maker: Any = None  # the operator that computed it, where one did
        self.geometry: Geometry | None = None  # of a root that stands for a tensor from outside
        self.hooked: Any = None  # the value with hooks on its gradient, the value without, the hooks (bridge/intercepted/gradient_hooks.py)
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
