"""Stands for PyTorch's storage and aliasing in a trace, whose arrays cannot be written to.

A ``Node`` is a root that owns a value, or a view of another node; aliasing.py reads and writes
them. Tensors and traces are elsewhere.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from bridge.convert.strides import contiguous, span, strides_of


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Node:
    """A value, or a view of one."""

    value: Any
    level: Any  # the trace level that made it
    parent: Node | None = None
    view: Any = None  # of a view: the aliasing.View that made it
    root: Node = field(init=False)
    version: int = 0
    seen: int = -1
    maker: Any = None  # the operator that computed it or has last written to it, if any
    # of a root: the traces of the vmaps that map it in PyTorch, if they are known
    lanes: Any = None
    # of a root: the tensor of an outer level, or from outside of the trace, whose memory it is
    source: Any = None
    # of a root that stands for a tensor from outside, or is computed and not contiguous
    geometry: Geometry | None = None
    # the value with hooks on its gradient, the value without, the hooks
    # (bridge/intercepted/gradient_hooks.py)
    hooked: Any = None
    used: bool = False  # an operator with a derivative has read it since it was last written
    detached: bool = False  # torch's autograd does not record the last write
    # of what a block of a loop hands on: makes the exception for whoever asks for its gradient
    loop: Any = None

    def __post_init__(self) -> None:
        self.root = self if self.parent is None else self.parent.root


@dataclass(slots=True, eq=False, repr=False)
class Geometry:
    """How a tensor lies in its memory; only an argument's own elements were converted to JAX, not
    the memory around them.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    plain: bool  # it is contiguous and begins where its memory begins
    # that of the tensor for which this one stands at the next outer level
    outer: Geometry | None = None
    # the strides of the dimensions that vmaps map, the outermost vmap's first: from lane to lane
    between: tuple[int, ...] = ()
    # the places of these dimensions, each among the dimensions that the vmap gets
    places: tuple[int, ...] = ()
    known: bool = True  # if the tensor is computed: its strides are those that PyTorch gives it
    # the function has called ``as_strided``, which counts from where the memory begins
    asked: bool = False

    @classmethod
    def of(cls, t: object) -> Geometry:
        node = getattr(t, "node", None)
        strides = strides_of(t)
        plain = strides is None and (
            not isinstance(t, torch.Tensor)
            or t.layout is not torch.strided
            or t.storage_offset() == 0
        )
        # jax.Arrays have one too
        shape = () if getattr(t, "is_nested", False) else tuple(t.shape)  # type: ignore[attr-defined]
        outer = None if node is None else node.root.geometry
        strides = strides or contiguous(shape)
        if outer is None:
            return cls(shape, strides, plain)
        # PyTorch's vmap makes views with its dimension in front
        places = outer.places if node.parent is None else (0,) * len(outer.places)
        return cls(shape, strides, plain, outer, outer.between, places, outer.known)

    def lane(self, dim: int | None) -> Geometry:
        """The geometry of one lane of a tensor that is mapped over this dimension."""
        if dim is None:
            return self
        shape, strides = (x[:dim] + x[dim + 1 :] for x in (self.shape, self.strides))
        plain = strides == contiguous(shape)
        return Geometry(
            shape,
            strides,
            plain,
            self,
            (*self.between, self.strides[dim]),
            (*self.places, dim),
            self.known,
        )

    def lanes_outermost(self) -> bool:
        """Whether the lanes of all vmaps lie one behind another, those of the outermost vmap
        farthest apart, also in a dense copy.
        """
        if 0 in self.strides and any(self.places):
            return False
        return not self.between or all(
            a >= b for a, b in itertools.pairwise((*self.between, span(self.shape, self.strides)))
        )

    def ask(self) -> bool:
        """Note a call of ``as_strided``, and return whether it is possible: the tensor must be
        plain here and at every outer level.
        """
        self.asked = True
        return (self.outer is None or self.outer.ask()) and self.plain and self.known


class OutsideOfView(RuntimeError):
    """``as_strided`` may read the memory around a tensor, and only the tensor's own elements are
    known.
    """
