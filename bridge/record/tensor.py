"""The tensors that a function gets while it is recorded: they have a shape and a dtype, but no
values.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch

from bridge import private
from bridge.convert import trees
from bridge.convert.sparse import SparseOperand
from bridge.convert.strides import contiguous, span
from bridge.errors import escaped
from bridge.trace.levels import Unrecordable, state

_looked_up = functools.lru_cache(65536)  # of avals, which are kept for ever themselves


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Aval:
    """The metadata of a recorded tensor; there is one object for each of these.

    Attributes:
        lanes: of one that vmaps map, each vmap's depth, its size, and the stride from lane to lane;
            size and stride are 0 if the lanes lie one behind another.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    lanes: tuple[tuple[int, int, int], ...] = ()

    def __repr__(self) -> str:
        return (
            f"{self.dtype}{list(self.shape)}{list(self.strides)}+{self.offset} "
            f"{self.device}{' grad' if self.requires_grad else ''}"
        )

    def meta(self) -> torch.Tensor:
        """A tensor on the meta device, on which PyTorch infers the shapes of
        an operator's results.
        """
        # PyTorch refuses writes under grad mode to a view made without it
        with torch.enable_grad():
            if self.offset:
                span = (
                    self.offset
                    + 1
                    + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True) if n)
                )
                t = torch.empty(span, dtype=self.dtype, device="meta").as_strided(
                    self.shape, self.strides, self.offset
                )
            else:
                t = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
            if self.requires_grad:  # such a tensor must be no leaf, or it could not be written to
                t.copy_(torch.ones((), dtype=self.dtype, device="meta", requires_grad=True))
        return t

    @_looked_up
    def like(self, shape: tuple[int, ...], requires_grad: bool = False) -> Aval:
        """The aval of a contiguous tensor of that shape, with this dtype and device."""
        lanes = tuple([(depth, 0, 0) for depth, _, _ in self.lanes])
        return aval(shape, contiguous(shape), 0, self.dtype, self.device, requires_grad, lanes)

    @_looked_up
    def lane(self, dim: int, depth: int) -> Aval:
        """The aval of one lane of a tensor that a vmap maps over this dimension; depth: how many
        vmaps are around that one.
        """
        shape, strides = (x[:dim] + x[dim + 1 :] for x in (self.shape, self.strides))
        lanes = (*self.lanes, lane_of(depth, self.shape[dim], self.strides[dim], shape, strides))
        return aval(shape, strides, 0, self.dtype, self.device, self.requires_grad, lanes)

    @_looked_up
    def whole(self, dim: int, size: int, depth: int) -> Aval:
        """The aval of the result of a vmap whose lanes are these; it is contiguous."""
        whole = self.like((*self.shape[:dim], size, *self.shape[dim:]), self.requires_grad)
        return whole.outside(depth)

    @_looked_up
    def outside(self, depth: int) -> Aval:
        """The aval of the same tensor outside of the vmap at this depth, which does not map it."""
        if all(each[0] < depth for each in self.lanes):
            return self
        lanes = tuple([each for each in self.lanes if each[0] < depth])
        return aval(
            self.shape,
            self.strides,
            self.offset,
            self.dtype,
            self.device,
            self.requires_grad,
            lanes,
        )

    @_looked_up
    def with_grad(self, requires_grad: bool) -> Aval:
        if requires_grad is self.requires_grad:
            return self
        return aval(
            self.shape,
            self.strides,
            self.offset,
            self.dtype,
            self.device,
            requires_grad,
            self.lanes,
        )


@_looked_up
def aval(*what: Any) -> Aval:
    """The one Aval with these fields, all of them."""
    return Aval(*what)


def lane_of(
    depth: int, size: int, stride: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, int, int]:
    """What ``Aval.lanes`` has of a vmap, if a lane has this shape and strides, and the stride from
    lane to lane is this.
    """
    return (depth, 0, 0) if stride >= span(shape, strides) else (depth, size, stride)


def aval_of(t: torch.Tensor) -> Aval:
    """The aval of a tensor; where one of PyTorch's begins in its memory does not matter, or each
    batch of a data set would be another.
    """
    if type(t) is Recorded:
        return t.aval
    try:
        shape, strides = tuple(t.shape), t.stride()
    except RuntimeError:
        raise (Unrecordable("a nested tensor") if t.is_nested else SparseOperand(t)) from None
    return aval(shape, strides, 0, t.dtype, t.device, t.requires_grad, ())


def avals_of(tensors: Iterable[torch.Tensor]) -> list[Aval]:
    """The aval of each of these tensors."""
    return [aval_of(t) for t in tensors]


def fresh(given: Iterable[torch.Tensor]) -> list[Aval]:
    """The avals of contiguous tensors with the same shapes, dtypes and devices that do not require
    grad.
    """
    return [a.like(a.shape) for a in map(aval_of, given)]


class Recorded(torch.Tensor):
    """A tensor of a record.

    Attributes:
        ref: its number there; -1 if what made it is no longer part of the record.
        before: if it comes from transforms that have ended, (ref, aval, level, before) that it had
            in them.
    """

    ref: int
    aval: Aval
    level: Any
    before: Any = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given, _ = trees.flatten((args, kwargs))  # collectives take lists
        levels = [x.level for x in given if type(x) is Recorded]
        if not any(level.owner is state.recorder for level in levels):
            raise escaped(*levels[:1])
        raise Unrecordable(str(func))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        recorder = self.level.owner
        if self.level.open and recorder is state.recorder:
            # modes of the user's see it first
            if private.function_modes() > recorder.ambient[-1] + 1:
                return torch.Tensor.__repr__(self)
            try:
                return recorder.shown(self)
            except Unrecordable as reason:
                recorder.go_on(reason)
                return repr(self)  # it is a tensor of PyTorch's now
        return f"Recorded(shape={tuple(self.shape)}, dtype={self.dtype}, escaped)"


trees.ATOMS.add(Recorded)


def referred_to(tensors: list[Any], start: int = 0, lists: int = 1) -> list[bool]:
    """Whether something besides these lists refers to each of these tensors, from this place in one
    of the lists on.
    """
    return [n > _OWN + lists for n in _references(tensors, start)]


def _references(objects: list[Any], start: int) -> list[int]:
    """How many references each object has, with those of the list and of this function."""
    return [sys.getrefcount(objects[k]) for k in range(start, len(objects))]


# of an object that nobody keeps, without that of the list; Python's versions differ
_OWN = _references([object()], 0)[0] - 1
