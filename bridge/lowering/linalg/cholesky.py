"""The Cholesky factorization, and solves and inverses with its factors.

Each factorization in this folder is one jitted function, so that it costs one dispatch outside jit,
around a custom_jvp with PyTorch's derivative.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from bridge.lowering.common import varying
from bridge.lowering.common.cotangents import with_cotangent
from bridge.lowering.linalg.matrices import (
    broadcast_batch,
    check_matrix,
    diagonal,
    hermitian_part,
    matmul,
    mH,
    report,
)
from bridge.lowering.registry import lowering


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _cholesky(upper: bool, of_gradient: bool, A: Array) -> Array:
    """The lower factor of the Hermitian matrix whose lower (or upper) triangle is A's; the other
    triangle is not read.

    PyTorch's forward mode reads one triangle of the tangent, and its gradient is Hermitian: neither
    is the other's transpose. of_gradient: forward mode is the transpose of the gradient, for the
    operator that has only a gradient.
    """
    return lax.linalg.cholesky(mH(A) if upper else A, symmetrize_input=False)


def _mirrored(x: Array) -> Array:
    """The Hermitian part of a lower triangle; the imaginary part of the diagonal stays, as in
    PyTorch.
    """
    below = jnp.tril(x, -1)
    return (below + mH(below)) / 2 + jnp.eye(x.shape[-1], dtype=x.dtype) * x


def _mirrored_transpose(x: Array) -> Array:
    """A lower triangle; its cotangent is _mirrored."""
    return jnp.tril(hermitian_part(x), -1) + jnp.eye(x.shape[-1], dtype=x.dtype) * x


@_cholesky.defjvp
def _cholesky_jvp(
    upper: bool, of_gradient: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    # L^-1 dA L^-H = X + X^H with X = L^-1 dL lower triangular (https://arxiv.org/abs/1602.07527)
    (A,), (dA,) = primals, tangents
    L = _cholesky(upper, of_gradient, A)
    solve = functools.partial(lax.linalg.triangular_solve, L, lower=True)
    X = solve(solve(dA, left_side=True), left_side=False, transpose_a=True, conjugate_a=True)
    X = _mirrored_transpose(X) if of_gradient else with_cotangent(X, _mirrored)
    return L, matmul(L, jnp.tril(X) * (1 - 0.5 * jnp.eye(L.shape[-1], dtype=L.dtype)))


def _failed_minor(A: Array, L: Array) -> Array:
    """LAPACK's info: 0, or the order of the first leading minor of A that is not positive definite,
    by bisection.

    The loop does nothing if no factorization failed, also under vmap.
    """
    n = A.shape[-1]
    good = jnp.isfinite(diagonal(L).real).all(-1)
    # the minor of order low is definite, the minor of order high is not
    low, high = jnp.where(good, n, 0), jnp.full(good.shape, n)
    eye, index = jnp.eye(n, dtype=A.dtype), jnp.arange(n)

    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = state
        mid = (low + high) // 2
        inside = index < mid[..., None]
        factor = lax.linalg.cholesky(
            jnp.where(inside[..., None] & inside[..., None, :], A, eye), symmetrize_input=False
        )
        definite = jnp.isfinite(diagonal(factor).real).all(-1)
        return jnp.where(definite, mid, low), jnp.where(definite, high, mid)

    low, high = varying.while_loop(lambda state: (state[1] - state[0] > 1).any(), body, (low, high))
    return jnp.where(good, 0, high).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("upper", "of_gradient"))
def _cholesky_ex(A: Array, upper: bool, of_gradient: bool = False) -> tuple[Array, ...]:
    L = _cholesky(upper, of_gradient, A)
    return mH(L) if upper else L, _failed_minor(*lax.stop_gradient((mH(A) if upper else A, L)))


@lowering("aten.linalg_cholesky_ex", info=True)
def aten_linalg_cholesky_ex(
    self: Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[Array, Array]:
    """linalg_cholesky_ex(Tensor self, *, bool upper=False, bool check_errors=False) -> (Tensor L,
    Tensor info)
    """
    check_matrix(self, "linalg.cholesky", square=True)
    L, info = _cholesky_ex(self, upper)
    if check_errors:
        report(info, "linalg.cholesky_ex", self.ndim == 2)
    return L, info


@lowering("aten.cholesky")
def aten_cholesky(self: Array, upper: bool = False) -> Array:
    """cholesky(Tensor self, bool upper=False) -> Tensor"""
    check_matrix(self, "cholesky", square=True)
    L, info = _cholesky_ex(self, upper, of_gradient=True)
    report(info, "linalg.cholesky", self.ndim == 2)
    return L


def _two_triangles(L: Array, B: Array) -> Array:
    solve = functools.partial(lax.linalg.triangular_solve, L, left_side=True, lower=True)
    return solve(solve(B), transpose_a=True, conjugate_a=True)


_cholesky_solve = jax.custom_jvp(_two_triangles)


@_cholesky_solve.defjvp
def _cholesky_solve_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    # PyTorch treats L as a full matrix here: A = L L^H depends on both triangles
    (L, B), (dL, dB) = primals, tangents
    X = _cholesky_solve(L, B)
    dA_half = matmul(dL, mH(L))
    return X, _two_triangles(L, dB - matmul(dA_half + mH(dA_half), X))


@functools.partial(jax.jit, static_argnames="upper")
def _cholesky_solve_batched(B: Array, L: Array, upper: bool) -> Array:
    L, B = broadcast_batch(mH(L) if upper else L, B)
    return _cholesky_solve(L, B)


@lowering("aten.cholesky_solve")
def aten_cholesky_solve(self: Array, input2: Array, upper: bool = False) -> Array:
    """cholesky_solve(Tensor self, Tensor input2, bool upper=False) -> Tensor"""
    check_matrix(self, "cholesky_solve")
    check_matrix(input2, "cholesky_solve", square=True)
    return _cholesky_solve_batched(self, input2, upper)


@lowering("aten.cholesky_inverse")
def aten_cholesky_inverse(self: Array, upper: bool = False) -> Array:
    """cholesky_inverse(Tensor self, bool upper=False) -> Tensor"""
    check_matrix(self, "cholesky_inverse", square=True)
    return _cholesky_solve_batched(jnp.eye(self.shape[-1], dtype=self.dtype), self, upper)
