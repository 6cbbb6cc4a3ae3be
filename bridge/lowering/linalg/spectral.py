"""Linear algebra on spectral factors: eigh, eig, svd, and the pseudo-inverse and least squares that
use them.

Derivatives are PyTorch's: those of the vectors are valid for distinct values and for losses that do
not depend on the vectors' phase (https://people.maths.ox.ac.uk/gilesm/files/NA-08-01.pdf).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from bridge.lowering.common import varying
from bridge.lowering.common.cotangents import with_cotangent
from bridge.lowering.common.promotion import concrete
from bridge.lowering.common.provided import refuse
from bridge.lowering.linalg.matrices import (
    check_matrix,
    diagonal,
    hermitian_part,
    matmul,
    mH,
    mT,
    skew_diagonal,
)
from bridge.lowering.registry import lowering


def _off_diagonal_ratio(x: Array, gap: Array) -> Array:
    """x / gap off the diagonal, 0 on it."""
    eye = jnp.eye(x.shape[-1], dtype=bool)
    return jnp.where(eye, 0, x / jnp.where(eye, 1, gap).astype(x.dtype))


def _gaps(values: Array) -> Array:
    """values[j] - values[i] at (i, j)."""
    return values[..., None, :] - values[..., :, None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _eigh(lower: bool, A: Array) -> tuple[Array, ...]:
    vectors, values = lax.linalg.eigh(A, lower=lower, symmetrize_input=False)
    return values, vectors


@_eigh.defjvp
def _eigh_jvp(
    lower: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    L, V = _eigh(lower, *primals)
    turned = matmul(mH(V), matmul(with_cotangent(tangents[0], hermitian_part), V))
    return (L, V), (diagonal(turned).real, matmul(V, _off_diagonal_ratio(turned, _gaps(L))))


@lowering("aten._linalg_eigh")
@functools.partial(jax.jit, static_argnames=("UPLO", "compute_v"))
def aten_linalg_eigh(A: Array, UPLO: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    """_linalg_eigh(Tensor A, str UPLO="L", bool compute_v=True) -> (Tensor eigenvalues, Tensor
    eigenvectors)
    """
    check_matrix(A, "linalg.eigh", square=True)
    values, vectors = _eigh(UPLO.upper() == "L", A)
    return values, vectors if compute_v else jnp.zeros((0,), A.dtype)


@jax.custom_jvp
def _eig(A: Array) -> tuple[Array, ...]:
    return tuple(lax.linalg.eig(A, compute_left_eigenvectors=False))


@_eig.defjvp
def _eig_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    L, V = _eig(*primals)
    turned = jnp.linalg.solve(V, matmul(tangents[0].astype(V.dtype), V))
    dV = matmul(V, _off_diagonal_ratio(turned, _gaps(L)))
    along = (jnp.conj(V) * dV).sum(-2, keepdims=True).real  # the vectors keep unit length
    return (L, V), (diagonal(turned), dV - V * along.astype(V.dtype))


_eig_jitted = jax.jit(_eig)


def _need_finite(A: Array) -> None:
    refuse(
        lax.bitwise_not(jnp.isfinite(lax.stop_gradient(A))),
        "torch.linalg.eig: input tensor should not contain infs or NaNs.",
    )


@lowering("aten.linalg_eig")
def aten_linalg_eig(self: Array) -> tuple[Array, Array]:
    """linalg_eig(Tensor self) -> (Tensor eigenvalues, Tensor eigenvectors)"""
    check_matrix(self, "linalg.eig", square=True)
    _need_finite(self)
    return _eig_jitted(self)


@lowering("aten._linalg_eigvals", "aten.linalg_eigvals")
def aten_linalg_eigvals(self: Array) -> Array:
    """_linalg_eigvals(Tensor self) -> Tensor"""
    check_matrix(self, "linalg.eigvals", square=True)
    _need_finite(self)
    return _eig_jitted(self)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _svd(full: bool, A: Array) -> tuple[Array, ...]:
    return tuple(lax.linalg.svd(A, full_matrices=full))


@_svd.defjvp
def _svd_jvp(
    full: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    (A,), (dA,) = primals, tangents
    U_all, S, Vh_all = _svd(full, A)
    k = S.shape[-1]
    U, Vh = U_all[..., :k], Vh_all[..., :k, :]
    V, s = mH(Vh), S.astype(A.dtype)[..., None, :]
    turned = matmul(mH(U), matmul(dA, V))
    dS = diagonal(turned).real
    squares = _gaps(S) * (S[..., None, :] + S[..., :, None])
    phase = skew_diagonal(turned) / (2 * s)
    right, left = turned * s, mT(s) * turned
    dU = matmul(U, _off_diagonal_ratio(right + mH(right), squares) + phase)
    dV = matmul(V, _off_diagonal_ratio(left + mH(left), squares) - phase)
    m, n = A.shape[-2:]
    if m > k:
        moved = matmul(dA, V)
        dU = dU + (moved - matmul(U, matmul(mH(U), moved))) / s
    if n > k:
        moved = matmul(mH(dA), U)
        dV = dV + (moved - matmul(V, matmul(Vh, moved))) / s
    # the vectors beyond the k-th have no derivative of their own
    return (U_all, S, Vh_all), (_padded(dU, U_all), dS, _padded(mH(dV), Vh_all))


def _padded(x: Array, like: Array) -> Array:
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, n - m, 0) for m, n in zip(x.shape, like.shape)])


@jax.custom_jvp
def _svdvals(A: Array) -> Array:
    return lax.linalg.svd(A, compute_uv=False)


@_svdvals.defjvp
def _svdvals_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    # no division by gaps: repeated singular values have this derivative too
    U, S, Vh = _svd(False, *primals)
    return S, (jnp.conj(U) * matmul(tangents[0], mH(Vh))).sum(-2).real


_svd_jitted, _svdvals_jitted = jax.jit(_svd, static_argnums=0), jax.jit(_svdvals)


@lowering("aten._linalg_svd")
def aten_linalg_svd(
    A: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Array, Array, Array]:
    """_linalg_svd(Tensor A, bool full_matrices=False, bool compute_uv=True, *, str? driver=None) ->
    (Tensor U, Tensor S, Tensor Vh)
    """
    check_matrix(A, "linalg.svd")
    error = (
        "linalg.svd: The algorithm failed to converge because the input matrix contained "
        "non-finite values."
    )
    refuse(jnp.isnan(lax.stop_gradient(A)), error, torch.linalg.LinAlgError)
    if compute_uv:
        return _svd_jitted(full_matrices, A)
    empty = jnp.zeros((0,), A.dtype)
    return empty, _svdvals_jitted(A), empty


# -- the polar decomposition and the square root, which PyTorch has from 2.15 on -------------------
@jax.custom_jvp
def _polar(A: Array) -> tuple[Array, ...]:
    U, S, Vh = _svd(False, A)
    return matmul(U, Vh), matmul(mH(Vh) * S.astype(A.dtype)[..., None, :], Vh), S, Vh


@_polar.defjvp
def _polar_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    # A = U H: with H = V S V^H and U^H dA = U^H dU H + dH, the skew part of V^H U^H dA V is that of
    # V^H U^H dU V times S
    (A,), (dA,) = primals, tangents
    U, H, S, Vh = _polar(A)
    V, s = mH(Vh), S.astype(A.dtype)[..., None, :]
    turned = matmul(Vh, matmul(matmul(mH(U), dA), V))
    skew = (turned - mH(turned)) / (mT(s) + s)
    dH = matmul(V, matmul(turned - skew * s, Vh))
    dU = matmul(U, matmul(V, matmul(skew, Vh)))
    if A.shape[-2] > A.shape[-1]:
        beside = dA - matmul(U, matmul(mH(U), dA))
        dU = dU + matmul(matmul(beside, V) / s, Vh)
    return (U, H, S, Vh), (dU, dH, jnp.zeros_like(S), jnp.zeros_like(Vh))


_polar_jitted = jax.jit(lambda A: _polar(A)[:2])


@lowering("aten.linalg_polar")
def aten_linalg_polar(A: Array) -> tuple[Array, Array]:
    """linalg_polar(Tensor A) -> (Tensor U, Tensor H)"""
    check_matrix(A, "linalg.polar")
    m, n = A.shape[-2:]
    if m < n:
        raise RuntimeError(
            "linalg.polar: input must have at least as many rows as columns, "
            f"but got {m} by {n} matrices"
        )
    error = (
        "linalg.svd: The algorithm failed to converge because the input matrix contained "
        "non-finite values."
    )
    refuse(jnp.isnan(lax.stop_gradient(A)), error, torch.linalg.LinAlgError)
    return _polar_jitted(A)


@jax.custom_jvp
def _matrix_sqrth(A: Array) -> tuple[Array, ...]:
    L, V = _eigh(True, A)
    root = jnp.sqrt(jnp.maximum(L, 0))
    return matmul(V * root.astype(A.dtype)[..., None, :], mH(V)), root, V


@_matrix_sqrth.defjvp
def _matrix_sqrth_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    X, root, V = _matrix_sqrth(*primals)
    turned = matmul(mH(V), matmul(hermitian_part(tangents[0]), V))
    sums = (root[..., None, :] + root[..., :, None]).astype(X.dtype)
    return (X, root, V), (
        matmul(V, matmul(turned / sums, mH(V))),
        jnp.zeros_like(root),
        jnp.zeros_like(V),
    )


_matrix_sqrth_jitted = jax.jit(lambda A: _matrix_sqrth(A)[0])


@lowering("aten.linalg_matrix_sqrth")
def aten_linalg_matrix_sqrth(self: Array) -> Array:
    """linalg_matrix_sqrth(Tensor self) -> Tensor"""
    check_matrix(self, "linalg.matrix_sqrth", square=True)
    return _matrix_sqrth_jitted(self)


def _default_rtol(A: Array) -> float:
    return float(jnp.finfo(A.dtype).eps) * max(A.shape[-2:])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pinv(hermitian: bool, A: Array, atol: Array, rtol: Array) -> tuple[Array, ...]:
    """(pseudo-inverse, rank, singular values): singular values up to max(atol, rtol * the largest)
    count as zero.
    """
    if hermitian:
        S, U = _eigh(True, A)
        V = U
    else:
        U, S, Vh = _svd(False, A)
        V = mH(Vh)
    size = jnp.abs(S)
    largest = size.max(-1, initial=0) if size.shape[-1] else jnp.zeros(size.shape[:-1], size.dtype)
    keep = size > jnp.maximum(atol, rtol * largest).astype(size.dtype)[..., None]
    inverse = jnp.where(keep, 1 / jnp.where(keep, S, 1), 0).astype(A.dtype)
    return matmul(V * inverse[..., None, :], mH(U)), keep.sum(-1), size


@functools.partial(_pinv.defjvp, symbolic_zeros=True)
def _pinv_jvp(
    hermitian: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    # Golub and Pereyra (1973); finite even if two singular values are close
    A, dA = primals[0], varying.instantiated(tangents[0])
    P, rank, S = _pinv(hermitian, *primals)
    first = matmul(mH(matmul(P, dA)), P)
    last = matmul(P, mH(matmul(dA, P)))
    dP = (
        -matmul(matmul(P, dA), P)
        + first
        - matmul(P, matmul(A, first))
        + last
        - matmul(matmul(last, A), P)
    )
    return (P, rank, S), (dP, varying.no_tangent(rank), jnp.zeros_like(S))


@functools.partial(jax.jit, static_argnames="hermitian")
def _pinv_with(A: Array, atol: Array, rtol: Array, hermitian: bool) -> tuple[Array, ...]:
    return _pinv(hermitian, A, atol, rtol)


@lowering("aten.linalg_pinv.atol_rtol_tensor")
def aten_linalg_pinv(
    self: Array, *, atol: Any = None, rtol: Any = None, hermitian: bool = False
) -> Array:
    """linalg_pinv.atol_rtol_tensor(Tensor self, *, Tensor? atol=None, Tensor? rtol=None, bool
    hermitian=False) -> Tensor
    """
    check_matrix(self, "linalg.pinv", square=hermitian)
    if rtol is None:
        rtol = (
            _default_rtol(self) if atol is None else jnp.where(atol > 0, 0.0, _default_rtol(self))
        )
    return _pinv_with(
        self, 0.0 if atol is None else lax.stop_gradient(atol), lax.stop_gradient(rtol), hermitian
    )[0]


@lowering("aten.linalg_lstsq", no_grad_outputs=(2, 3))
def aten_linalg_lstsq(
    self: Array, b: Array, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Array, Array, Array, Array]:
    """linalg_lstsq(Tensor self, Tensor b, float? rcond=None, *, str? driver=None) -> (Tensor,
    Tensor residuals, Tensor rank, Tensor)
    """
    check_matrix(self, "torch.linalg.lstsq")
    driver = (driver or "gelsy").lower()
    if driver not in ("gels", "gelsy", "gelsd", "gelss"):
        raise RuntimeError(
            "torch.linalg.lstsq: parameter `driver` should be one of (gels, gelsy, gelsd, gelss), "
            f"got {driver!r}"
        )
    m, n = self.shape[-2:]
    if not 0 <= self.ndim - b.ndim <= 1:
        raise RuntimeError(
            "torch.linalg.lstsq: input.dim() must be greater or equal to other.dim() and "
            "(input.dim() - other.dim()) <= 1"
        )
    vector = b.ndim < self.ndim
    rhs = b[..., None] if vector else b
    inverse, rank, values = _pinv_with(
        self, 0.0, _default_rtol(self) if rcond is None else rcond, False
    )
    solution = matmul(inverse, rhs)
    residuals = jnp.zeros((0,), values.dtype)
    if m > n and (driver == "gels" or (driver != "gelsy" and _all_full(rank, n))):
        error = matmul(self, solution) - rhs
        residuals = (error * jnp.conj(error)).real.sum(-2)
    batch = solution.shape[:-2]
    rank = (
        jnp.zeros((0,), jnp.int64)
        if driver == "gels"
        else jnp.broadcast_to(rank, batch).astype(jnp.int64)
    )
    values = (
        jnp.broadcast_to(values, (*batch, min(m, n)))
        if driver in ("gelsd", "gelss")
        else jnp.zeros((0,), values.dtype)
    )
    return solution[..., 0] if vector else solution, residuals, rank, values


def _all_full(rank: Array, n: int) -> bool:
    """Whether every matrix has full rank, which decides whether there are residuals; assumed if the
    ranks are not known.
    """
    try:
        return bool((concrete(rank) == n).all())
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return True
