"""Sparse tensors in a trace: products, as gathers and sums over the entries, and the few things of
which products are made.

Outside of jit, an operator that has only sparse tensors from outside as operands runs in PyTorch;
its result is a tensor from outside too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bridge import private
from bridge.convert.sparse import SparseOperand, is_sparse, sparse
from bridge.errors import at_line
from bridge.lowering.registry import of_this_torch
from bridge.trace import tracing
from bridge.trace.levels import state
from bridge.trace.tracing import traced_python


def _parts(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and the values of a sparse tensor."""
    made = None if state.level is None else state.level.root.sparse.get(id(t))
    if made is not None:
        return made[1:]
    entries = sparse(t)
    return entries.indices, entries.values


def _stands_for(
    indices: torch.Tensor, values: torch.Tensor, size: Any, coalesced: bool | None
) -> torch.Tensor:
    """A sparse tensor of that shape and with that many entries, all zero, that stands for one with
    these parts in the trace.
    """
    with private.below_python():
        empty = torch.zeros(indices.shape, dtype=torch.int64, device=values.device)
        zeros = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
        t = torch.sparse_coo_tensor(
            empty, zeros, size, is_coalesced=coalesced, check_invariants=False
        )
    state.level.root.sparse[id(t)] = (t, indices, values)
    return t


# -- products --------------------------------------------------------------------------------------
def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of a sparse matrix and a dense matrix or vector, in either order."""
    first = is_sparse(a)
    matrix, dense = (a, b) if first else (b, a)
    indices, values = _parts(matrix)
    if matrix.dim() != 2 or values.dim() != 1 or is_sparse(dense) or not 1 <= dense.dim() <= 2:
        raise SparseOperand(
            matrix,
            f" beside one of shape {list(dense.shape)}; of sparse tensors a matrix can be "
            f"multiplied, with a vector or a matrix: convert it with .to_dense(){at_line()}",
        )
    _check(a, b, a.shape[-1] == b.shape[0])
    rows, columns = indices.unbind()
    if first:
        summands = (values if dense.dim() == 1 else values[:, None]) * dense.index_select(
            0, columns
        )
        return _zeros(dense, matrix.shape[0], *dense.shape[1:]).index_add(0, rows, summands)
    return _zeros(dense, *dense.shape[:-1], matrix.shape[1]).index_add(
        -1, columns, dense.index_select(-1, rows) * values
    )


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bmm of a sparse tensor and a dense one."""
    if is_sparse(b) or a.dim() != 3 or b.dim() != 3:
        raise SparseOperand(
            b if is_sparse(b) else a, f" in bmm; convert it with .to_dense(){at_line()}"
        )
    _check(a, b, a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1])
    indices, values = _parts(a)
    batches, rows, columns = indices.unbind()
    summands = values[:, None] * b.flatten(0, 1).index_select(0, batches * b.shape[1] + columns)
    return (
        _zeros(b, a.shape[0] * a.shape[1], b.shape[2])
        .index_add(0, batches * a.shape[1] + rows, summands)
        .unflatten(0, a.shape[:2])
    )


def _check(a: torch.Tensor, b: torch.Tensor, fits: bool) -> None:
    """PyTorch's errors."""
    if not fits:
        shapes = " and ".join("x".join(map(str, x.shape)) for x in (a, b))
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({shapes}){at_line()}")
    if a.dtype != b.dtype:
        raise RuntimeError(
            f"expected m1 and m2 to have the same dtype, but got: {a.dtype} != {b.dtype}{at_line()}"
        )


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _addmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    found = _product(a, b)
    found = found if alpha == 1 else alpha * found
    return found if beta == 0 else found + (c if beta == 1 else beta * c)


def _linear(
    t: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    found = _product(weight, t.transpose(0, -1)).transpose(0, -1)
    return found if bias is None else found + bias


def _to_dense(
    t: torch.Tensor, dtype: torch.dtype | None = None, masked_grad: bool | None = None
) -> torch.Tensor:
    indices, values = _parts(t)
    found = _zeros(values, *t.shape).index_put(indices.unbind(), values, accumulate=True)
    return found if dtype is None else found.to(dtype)


# -- sparse tensors that are made in the trace, which are COO --------------------------------------
def _made(
    _: int,
    __: int,
    size: Any,
    indices: Any,
    values: Any,
    is_coalesced: bool | None = None,
    **more: Any,
) -> torch.Tensor:
    return _stands_for(indices, values, size, is_coalesced)


def _transposed(t: torch.Tensor, *dims: Any) -> torch.Tensor:
    """t(), transpose(dim0, dim1) or permute(dims); dims: those of the call."""
    indices, values = _parts(t)
    of_permute = bool(dims) and not isinstance(dims[0], int)
    turns = (
        [d % 2 for d in dims[0]] == [1, 0] if of_permute else not dims or dims[0] % 2 != dims[1] % 2
    )
    if t.dim() != 2 or values.dim() != 1 or not turns:
        raise SparseOperand(t, f" to transpose; convert it with .to_dense(){at_line()}")
    return _stands_for(indices.flip(0), values, (t.shape[1], t.shape[0]), False)


def _scaled(t: torch.Tensor, other: Any) -> torch.Tensor:
    t, other = (t, other) if is_sparse(t) else (other, t)
    if is_sparse(other) or (isinstance(other, torch.Tensor) and other.dim()):
        raise SparseOperand(t, f" times a tensor; convert it with .to_dense(){at_line()}")
    return _with_values(t, _parts(t)[1] * other)


def _divided(t: torch.Tensor, other: Any) -> torch.Tensor:
    if isinstance(other, torch.Tensor) and other.dim():
        raise SparseOperand(t, f" divided by a tensor; convert it with .to_dense(){at_line()}")
    return _with_values(t, _parts(t)[1] / other)


def _with_values(t: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A sparse tensor with the same entries and other values."""
    return _stands_for(
        _parts(t)[0], values, t.shape, t.is_coalesced() if t.layout is torch.sparse_coo else None
    )


def _part(k: int, t: torch.Tensor) -> torch.Tensor:
    if t.layout is not torch.sparse_coo:
        raise SparseOperand(
            t, f" to be taken apart; keep its parts as tensors of their own{at_line()}"
        )
    if not t.is_coalesced():
        raise SparseOperand(
            t,
            " that is not coalesced, to be taken apart; call .coalesce() outside of the "
            f"transform{at_line()}",
        )
    return torch.ops.aten.alias(_parts(t)[k])


def _by_operator(
    *rules: tuple[str, Callable[..., torch.Tensor]],
) -> dict[Any, Callable[..., torch.Tensor]]:
    """A table from (the names of ATen operators, their rule)."""
    return of_this_torch({f"aten.{name}": rule for names, rule in rules for name in names.split()})


#: By an ATen operator, how it runs in a trace if one of its operands, or its result, is sparse.
_OPERATORS = _by_operator(
    ("mm mv matmul _sparse_mm", _product),
    ("addmm _sparse_addmm", _addmm),
    ("bmm", _products),
    ("_to_dense to_dense", _to_dense),
    ("linear", _linear),
    ("_sparse_coo_tensor_with_dims_and_tensors", _made),
)
#: Those that run in PyTorch instead if they are called outside of jit, and no operand was made in
#: the trace.
_OF_ONE = _by_operator(
    ("t transpose.int permute", _transposed),
    ("mul.Tensor mul.Scalar", _scaled),
    ("div.Tensor", _divided),
    ("neg", lambda t: _with_values(t, -_parts(t)[1])),
    ("sum", lambda t: _parts(t)[1].sum()),
    ("_coalesce detach clone", lambda t: t),  # an entry that occurs twice is added up in products
    ("indices", lambda t: _part(0, t)),
    ("values", lambda t: _part(1, t)),
)
#: What these give depends on shapes, which a program checks.
_OF_SHAPES = frozenset({"aten::is_coalesced", "aten::_nnz", "aten::sparse_dim", "aten::dense_dim"})
#: By a torch function, how it is recorded if one of its operands is sparse.
FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    getattr(owner, name): rule
    for owner, names, rule in (
        (torch, "matmul mm mv spmm", _product),
        (torch.Tensor, "matmul mm mv __matmul__", _product),
        (torch.sparse, "mm", _product),
        (torch, "addmm", _addmm),
        (torch.Tensor, "addmm", _addmm),
        (torch.sparse, "addmm", _addmm),
        (torch, "bmm", _products),
        (torch.Tensor, "bmm", _products),
        (torch.Tensor, "__rmatmul__", lambda b, a: _product(a, b)),
        (torch.nn.functional, "linear", _linear),
    )
    for name in names.split()
    if hasattr(owner, name)
}


def _dispatched(
    refused: Exception, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an ATen operator whose plan has raised that error; it is raised again if the operator has
    nothing to do with sparse tensors.
    """
    of_sparse = [t for t in pytree.tree_leaves((args, kwargs)) if is_sparse(t)]
    rule = _OPERATORS.get(func) or _OF_ONE.get(func)
    if not of_sparse and rule is not _made:
        raise refused
    if rule is not None:
        try:
            with traced_python():
                return rule(*args, **kwargs)
        except SparseOperand as error:
            # PyTorch would take a TypeError of an operator such as * as a sign to ask the other
            # operand
            raise NotImplementedError(str(error)) from None
    if func.name() not in _OF_SHAPES or func._schema.is_mutable:
        raise NotImplementedError(
            f"{func}: got a tensor of layout {of_sparse[0].layout}; inside a transform a sparse "
            "matrix can be made of indices and values, transposed, multiplied with a number, a "
            "vector or a matrix (a @ x, torch.sparse.mm, mv, addmm, linear) and converted with "
            f".to_dense(); compute other things of it outside of the transform{at_line()}"
        ) from None
    with private.below_python():
        return func(*args, **kwargs)


tracing.HANDED_IN["sparse"] = _dispatched
