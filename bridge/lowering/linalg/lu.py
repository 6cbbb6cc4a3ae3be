"""Linear algebra on LU factors: solve, inverse, determinants, lu_factor, lu_solve and triangular
solves.

A matrix is factored once: derivatives of every order take A and its factors as constants, so they
reuse the factors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common.cotangents import with_cotangent
from bridge.lowering.common.provided import refuse
from bridge.lowering.linalg.matrices import (
    broadcast_batch,
    check_matrix,
    diagonal,
    matmul,
    mH,
    mT,
    report,
)
from bridge.lowering.registry import lowering


def _zero_pivot(lu: Array) -> Array:
    """LAPACK's info: the 1-based index of the first zero on the diagonal, or 0."""
    zero = diagonal(lu) == 0
    if not zero.shape[-1]:
        return jnp.zeros(zero.shape[:-1], jnp.int32)
    return jnp.where(zero.any(-1), lax.argmax(zero, zero.ndim - 1, jnp.int32) + 1, 0)


def _factors(A: Array) -> tuple[Array, ...]:
    """Factors of A as constants: (LU, LAPACK's 1-based pivots, permutation)."""
    lu, pivots, permutation = lax.linalg.lu(lax.stop_gradient(A))
    return lu, pivots + 1, permutation


def _lu_solve(
    lu: Array, permutation: Array, B: Array, left: bool = True, adjoint: bool = False
) -> Array:
    """Solve M X = B, or X M = B if not left, with M = P L U given by its factors; adjoint: with M^H
    instead of M.
    """
    if not left:
        return mH(_lu_solve(lu, permutation, mH(B), adjoint=not adjoint))
    lu, B = broadcast_batch(lu, B)
    rows = jnp.broadcast_to(permutation, lu.shape[:-1])
    solve = functools.partial(lax.linalg.triangular_solve, lu, left_side=True)
    lower, upper = {"lower": True, "unit_diagonal": True}, {"lower": False}
    if not adjoint:
        return solve(solve(jnp.take_along_axis(B, rows[..., None], -2), **lower), **upper)
    turned = {"transpose_a": True, "conjugate_a": True}
    X = solve(solve(B, **upper, **turned), **lower, **turned)
    return jnp.take_along_axis(X, jnp.argsort(rows, -1)[..., None], -2)


def _solve(A: Array, lu: Array, permutation: Array, B: Array, left: bool = True) -> Array:
    """A^-1 B, or B A^-1 if not left, by the factors of A, which count as constants; differentiable
    to any order in A and B.
    """

    def solve(_: Callable[..., Any], b: Array) -> Array:
        return _lu_solve(lu, permutation, b, left)

    def transpose_solve(_: Callable[..., Any], b: Array) -> Array:
        return jnp.conj(_lu_solve(lu, permutation, jnp.conj(b), left, adjoint=True))

    batch = jnp.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    B = jnp.broadcast_to(B, batch + B.shape[-2:])
    return lax.custom_linear_solve(
        lambda x: matmul(A, x) if left else matmul(x, A), B, solve, transpose_solve
    )


@functools.partial(jax.jit, static_argnames="left")
def _solve_ex(A: Array, B: Array, left: bool) -> tuple[Array, ...]:
    lu, pivots, permutation = _factors(A)
    vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    X = _solve(A, lu, permutation, B[..., None] if vector else B, left)
    return X[..., 0] if vector else X, lu, pivots, _zero_pivot(lu)


@lowering("aten._linalg_solve_ex")
def aten_linalg_solve_ex(
    A: Array, B: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    """_linalg_solve_ex(Tensor A, Tensor B, *, bool left=True, bool check_errors=False) -> (Tensor,
    Tensor LU, Tensor, Tensor)
    """
    check_matrix(A, "linalg.solve", square=True)
    if A.dtype != B.dtype:
        raise RuntimeError(
            f"linalg.solve: Expected A and B to have the same dtype, but found {A.dtype} and "
            f"{B.dtype} instead"
        )
    result = _solve_ex(A, B, left)
    if check_errors:
        report(result[3], "torch.linalg.solve_ex", A.ndim == 2)
    return result


@jax.custom_jvp
def _inverse(A: Array, lu: Array, permutation: Array) -> Array:
    return _solve(A, lu, permutation, jnp.eye(A.shape[-1], dtype=A.dtype))


@_inverse.defjvp
def _inverse_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    X = _inverse(*primals)
    return X, -matmul(matmul(X, tangents[0]), X)


@jax.jit
def _inv_ex(A: Array) -> tuple[Array, ...]:
    lu, _, permutation = _factors(A)
    return _inverse(A, lu, permutation), _zero_pivot(lu)


@lowering("aten.linalg_inv_ex")
def aten_linalg_inv_ex(A: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    """linalg_inv_ex(Tensor A, *, bool check_errors=False) -> (Tensor inverse, Tensor info)"""
    check_matrix(A, "linalg.inv", square=True)
    inverse, info = _inv_ex(A)
    if check_errors:
        report(info, "linalg.inv_ex", A.ndim == 2)
    return inverse, info


def _parity(permutation: Array, dtype: np.dtype) -> Array:
    """The sign of each permutation, which is the determinant of its matrix."""
    later = jnp.triu(jnp.ones((permutation.shape[-1],) * 2, bool), 1)
    inversions = (later & (permutation[..., :, None] > permutation[..., None, :])).sum((-2, -1))
    return jnp.where(inversions % 2 == 0, 1, -1).astype(dtype)


def _trace_of_solve(A: Array, lu: Array, permutation: Array, dA: Array) -> Array:
    return jnp.trace(_solve(A, lu, permutation, dA), axis1=-2, axis2=-1)


@jax.custom_jvp
def _det(A: Array, lu: Array, permutation: Array) -> Array:
    return jnp.prod(diagonal(lu), -1) * _parity(permutation, A.dtype)


@_det.defjvp
def _det_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    # d det = det tr(A^-1 dA); a zero pivot is replaced by the smallest step, so that a singular
    # matrix, too, has its gradient
    (A, lu, permutation), (dA, _, _) = primals, tangents
    eye = jnp.eye(A.shape[-1], dtype=A.dtype)
    moved = jnp.where((lu == 0) & (eye == 1), jnp.finfo(A.dtype).eps * eye, lu)
    return _det(*primals), _det(A, moved, permutation) * _trace_of_solve(A, moved, permutation, dA)


def _as_factored(A: Array, contiguous: bool) -> Array:
    """A or A^T: PyTorch's own backward of a determinant, if it runs inside a trace, reads the
    factors of this one.
    """
    return mT(A) if contiguous and not jnp.iscomplexobj(A) else A


@lowering("aten._linalg_det", takes_contiguous=True)
@functools.partial(jax.jit, static_argnames="contiguous")
def aten_linalg_det(A: Array, *, contiguous: bool = True) -> tuple[Array, Array, Array]:
    """_linalg_det(Tensor A) -> (Tensor result, Tensor LU, Tensor pivots)"""
    check_matrix(A, "linalg.det", square=True)
    A = _as_factored(A, contiguous)
    lu, pivots, permutation = _factors(A)
    return _det(A, lu, permutation), lu, pivots


@jax.custom_jvp
def _slogdet(A: Array, lu: Array, permutation: Array) -> tuple[Array, Array]:
    pivots = diagonal(lu)
    size = jnp.abs(pivots)
    sign = jnp.prod(pivots / jnp.where(size == 0, 1, size).astype(A.dtype), -1) * _parity(
        permutation, A.dtype
    )
    return sign, jnp.log(size).sum(-1)


@_slogdet.defjvp
def _slogdet_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    sign, logabs = _slogdet(*primals)
    A, lu, permutation = primals
    trace = _trace_of_solve(A, lu, permutation, tangents[0])
    if not jnp.iscomplexobj(sign):
        return (sign, logabs), (jnp.zeros_like(sign), trace)
    return (sign, logabs), (lax.complex(jnp.zeros_like(logabs), trace.imag) * sign, trace.real)


@lowering("aten._linalg_slogdet", takes_contiguous=True)
@functools.partial(jax.jit, static_argnames="contiguous")
def aten_linalg_slogdet(A: Array, *, contiguous: bool = True) -> tuple[Array, Array, Array, Array]:
    """_linalg_slogdet(Tensor A) -> (Tensor sign, Tensor logabsdet, Tensor LU, Tensor pivots)"""
    check_matrix(A, "linalg.slogdet", square=True)
    A = _as_factored(A, contiguous)
    lu, pivots, permutation = _factors(A)
    return *_slogdet(A, lu, permutation), lu, pivots


def _check_pivot(pivot: bool, name: str) -> None:
    if not pivot:
        raise RuntimeError(f"{name}: LU without pivoting is not implemented; leave pivot=True")


@jax.jit
def _lu_factor_ex(A: Array) -> tuple[Array, ...]:
    lu, pivots, _ = lax.linalg.lu(A)
    return lu, pivots + 1, _zero_pivot(lu)


@lowering("aten.linalg_lu_factor_ex")
def aten_linalg_lu_factor_ex(
    A: Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array]:
    """linalg_lu_factor_ex(Tensor A, *, bool pivot=True, bool check_errors=False) -> (Tensor LU,
    Tensor pivots, Tensor info)
    """
    check_matrix(A, "torch.lu_factor")
    _check_pivot(pivot, "linalg.lu_factor")
    result = _lu_factor_ex(A)
    if check_errors:
        report(result[2], "torch.linalg.lu_factor_ex", A.ndim == 2)
    return result


def _unpack(lu: Array, unpack_data: bool = True) -> tuple[Array, Array]:
    """L (unit diagonal) and U of compact factors."""
    m, n = lu.shape[-2:]
    k = min(m, n)
    return jnp.tril(lu[..., :, :k], -1) + jnp.eye(m, k, dtype=lu.dtype), jnp.triu(lu[..., :k, :])


def _permutation_matrix(permutation: Array, dtype: np.dtype) -> Array:
    """P with A = P L U, where row i of L U is row permutation[i] of A."""
    return mT(jax.nn.one_hot(permutation, permutation.shape[-1], dtype=dtype))


@lowering("aten.linalg_lu", no_grad_outputs=(0,))
@functools.partial(jax.jit, static_argnames="pivot")
def aten_linalg_lu(A: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    """linalg_lu(Tensor A, *, bool pivot=True) -> (Tensor P, Tensor L, Tensor U)"""
    check_matrix(A, "linalg.lu")
    _check_pivot(pivot, "linalg.lu")
    lu, _, permutation = lax.linalg.lu(A)
    return _permutation_matrix(permutation, A.dtype), *_unpack(lu)


@lowering("aten.lu_unpack", no_grad_outputs=(0,))
def aten_lu_unpack(
    LU_data: Array, LU_pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Array, Array, Array]:
    """lu_unpack(Tensor LU_data, Tensor LU_pivots, bool unpack_data=True, bool
    unpack_pivots=True) -> (Tensor P, Tensor L, Tensor U)
    """
    if unpack_pivots and LU_pivots.dtype != jnp.int32:
        raise RuntimeError(
            "torch.lu_unpack: LU_pivots is expected to be a contiguous tensor of torch.int32 dtype"
        )
    if unpack_pivots:
        refuse(
            (LU_pivots < 1) | (LU_pivots > LU_data.shape[-2]),
            "pivots passed to lu_unpack must be between 1 and LU.size(-2) inclusive, which is "
            f"{LU_data.shape[-2]}; did you properly pass the result of lu_factor?",
        )
    return _lu_unpack(LU_data, LU_pivots, unpack_data, unpack_pivots)


@functools.partial(jax.jit, static_argnames=("unpack_data", "unpack_pivots"))
def _lu_unpack(
    LU_data: Array, LU_pivots: Array, unpack_data: bool, unpack_pivots: bool
) -> tuple[Array, ...]:
    P = L = U = jnp.zeros((0,), LU_data.dtype)
    if unpack_data:
        L, U = _unpack(LU_data)
    if unpack_pivots:
        P = _permutation_matrix(
            lax.linalg.lu_pivots_to_permutation(LU_pivots - 1, LU_data.shape[-2]), LU_data.dtype
        )
    return P, L, U


@lowering("aten.linalg_lu_solve")
@functools.partial(jax.jit, static_argnames=("left", "adjoint"))
def aten_linalg_lu_solve(
    LU: Array, pivots: Array, B: Array, *, left: bool = True, adjoint: bool = False
) -> Array:
    """linalg_lu_solve(Tensor LU, Tensor pivots, Tensor B, *, bool left=True, bool adjoint=False) ->
    Tensor
    """
    check_matrix(LU, "torch.linalg.lu_solve", square=True)
    return _lu_solve(
        LU, lax.linalg.lu_pivots_to_permutation(pivots - 1, LU.shape[-1]), B, left, adjoint
    )


@lowering("aten.linalg_solve_triangular")
@functools.partial(jax.jit, static_argnames=("upper", "left", "unitriangular"))
def aten_linalg_solve_triangular(
    self: Array, B: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    """linalg_solve_triangular(Tensor self, Tensor B, *, bool upper, bool left=True, bool
    unitriangular=False) -> Tensor
    """
    check_matrix(self, "linalg.solve_triangular", square=True)
    A, B = broadcast_batch(self, B)
    return lax.linalg.triangular_solve(
        A, B, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _triangular_solve(upper: bool, transpose: bool, unit: bool, A: Array, B: Array) -> Array:
    return lax.linalg.triangular_solve(
        A, B, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unit
    )


@_triangular_solve.defjvp
def _triangular_solve_jvp(
    upper: bool,
    transpose: bool,
    unit: bool,
    primals: tuple[Array, ...],
    tangents: tuple[Array, ...],
) -> tuple[Array, Array]:
    # for this older function PyTorch treats a tangent of A as triangular
    (A, B), (dA, dB) = primals, tangents
    X = _triangular_solve(upper, transpose, unit, A, B)
    dA = with_cotangent(
        dA, lambda ct: jnp.triu(ct, int(unit)) if upper else jnp.tril(ct, -int(unit))
    )
    rest = dB - matmul(mT(dA) if transpose else dA, X)
    return X, lax.linalg.triangular_solve(
        A, rest, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unit
    )


@lowering("aten.triangular_solve")
@functools.partial(jax.jit, static_argnames=("upper", "transpose", "unitriangular"))
def aten_triangular_solve(
    self: Array, A: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    """triangular_solve(Tensor self, Tensor A, bool upper=True, bool transpose=False, bool
    unitriangular=False) -> (Tensor, Tensor)
    """
    check_matrix(A, "triangular_solve", square=True)
    A, B = broadcast_batch(A, self)
    return _triangular_solve(upper, transpose, unitriangular, A, B), A
