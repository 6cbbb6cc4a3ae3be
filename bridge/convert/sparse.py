"""Sparse tensors: JAX computes with their indices and values, which are strided tensors and cross
like any other.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from bridge import private
from bridge.convert import trees
from bridge.process import process


class SparseOperand(TypeError):
    """A sparse tensor came where a strided one is expected; what has a rule for sparse tensors
    catches it.
    """

    def __init__(self, t: torch.Tensor, more: str = "; convert it with .to_dense()") -> None:
        super().__init__(
            f"tensor: expected a strided tensor, got layout {t.layout} of shape "
            f"{list(t.shape)}{more}"
        )


class Sparse:
    """A sparse tensor and its parts; as an argument of a transform it stands for the tensor, which
    is passed on to the function.

    There is one for each tensor, and it does not keep the tensor alive.

    Attributes:
        indices: int64 [number of dimensions, entries], without the dimensions that are dense.
        values: [entries, ...] of the tensor's dtype; shares the tensor's memory.
    """

    __slots__ = ("__weakref__", "indices", "tensor", "values", "version")

    def __init__(self, t: torch.Tensor) -> None:
        self.tensor = weakref.ref(t, functools.partial(_forget, process.sparse, id(t)))
        self.version: int | None = None

    def update(self, t: torch.Tensor) -> Sparse:
        """Read the parts again if the tensor has been written to."""
        if self.version is None or t.is_inference() or self.version != t._version:
            with private.below_python(), torch.no_grad():
                self.indices, self.values = _parts(t)
            self.version = None if t.is_inference() else t._version
        return self


def _forget(known: dict[int, Sparse], key: int, _: Any) -> None:
    known.pop(key, None)


def is_sparse(x: Any) -> bool:
    """Whether it is a tensor of another layout than strided."""
    return isinstance(x, torch.Tensor) and x.layout is not torch.strided


def can_be_taken_apart(t: torch.Tensor) -> bool:
    """Whether ``sparse`` takes it."""
    known = t.layout is torch.sparse_coo or (
        t.layout in (torch.sparse_csr, torch.sparse_csc) and t.dim() == 2
    )
    return known and not (t.requires_grad and torch.is_grad_enabled())


def sparse(t: torch.Tensor) -> Sparse:
    """The parts of a sparse tensor, as they are now.

    Raises:
        SparseOperand: a layout other than COO, CSR and CSC; it requires grad.
    """
    if not can_be_taken_apart(t):
        raise (
            SparseOperand(t, " that requires grad; detach it, or convert it with .to_dense()")
            if t.requires_grad
            else SparseOperand(t)
        )
    found = process.sparse.get(id(t))
    if found is None or found.tensor() is not t:
        found = process.sparse[id(t)] = Sparse(t)
    return found.update(t)


def _parts(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if t.layout is torch.sparse_coo:
        return t._indices(), t._values()
    by_row = t.layout is torch.sparse_csr
    starts, other = (
        (t.crow_indices(), t.col_indices()) if by_row else (t.ccol_indices(), t.row_indices())
    )
    mine = torch.repeat_interleave(torch.arange(len(starts) - 1, device=t.device), starts.diff())
    return torch.stack([mine, other] if by_row else [other, mine]).long(), t.values()


def enclosed(arguments: Any, refused: SparseOperand) -> Any:
    """A tree of arguments with a ``Sparse`` in the place of each sparse tensor; raises the given
    error if there is none.
    """
    leaves, spec = trees.flatten(arguments)
    if not any(map(is_sparse, leaves)):
        raise refused
    return trees.unflatten(spec, [sparse(x) if is_sparse(x) else x for x in leaves])
