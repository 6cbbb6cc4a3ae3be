"""Linear algebra: what the linalg_*.py files share (checks, error reports, small matrix helpers), and the Cholesky family.

Each factorization is one jitted function, so that eager use costs one dispatch, around a custom_jvp that states PyTorch's derivative.
"""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from bridge.checks import Range, check
from bridge.lowering.promotion import cast, concrete, opmath
from bridge.lowering.registry import lowering

#: derivatives and solves never run in TF32, whatever torch.set_float32_matmul_precision says of mm
matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)

_NUMERIC = ("float32", "float64", "complex64", "complex128")


def check_matrix(x: Any, name: str, square: bool = False) -> None:
    """Raise as torch.linalg does unless x is a batch of (square) matrices of a dtype that LAPACK knows."""
    if str(x.dtype) not in _NUMERIC:
        low = str(x.dtype) in ("float16", "bfloat16")
        expected = "Low precision dtypes not supported." if low else "Expected a floating point or complex tensor as input."
        raise RuntimeError(f"{name}: {expected} Got {x.dtype}")
    if x.ndim < 2:
        raise RuntimeError(f"{name}: The input tensor A must have at least 2 dimensions.")
    if square and x.shape[-1] != x.shape[-2]:
        raise RuntimeError(f"{name}: A must be batches of square matrices, but they are {x.shape[-2]} by {x.shape[-1]} matrices")


def mT(x: Any) -> Any:
    """Transpose of each matrix."""
    return jnp.swapaxes(x, -1, -2)


def mH(x: Any) -> Any:
    """Conjugate transpose of each matrix."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def diagonal(x: Any) -> Any:
    """Diagonal of each matrix."""
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def skew_diagonal(x: Any) -> Any:
    """Each matrix with all but the imaginary part of its diagonal made zero (zeros for a real matrix)."""
    if not jnp.iscomplexobj(x):
        return jnp.zeros_like(x)
    return jnp.where(jnp.eye(x.shape[-2], x.shape[-1], dtype=bool), lax.complex(jnp.zeros_like(x.real), x.imag), 0)


def broadcast_batch(*xs: Any) -> list[Any]:
    """The matrices with their leading dimensions broadcast to one another."""
    batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in xs))
    return [x if x.shape[:-2] == batch else jnp.broadcast_to(x, batch + x.shape[-2:]) for x in xs]


def with_cotangent(x: Any, change: Any) -> Any:
    """x, whose cotangent passes through change.  For the arguments that PyTorch takes to be Hermitian or triangular: a tangent
    of theirs is used as it comes, and a gradient of theirs is projected.  A linear solve is the one public primitive of JAX
    that takes a transpose of its own and can be batched; here it solves x = x."""
    return lax.custom_linear_solve(lambda y: y, x, solve=lambda _, b: b, transpose_solve=lambda _, ct: change(ct))


def hermitian_part(x: Any) -> Any:
    """(x + x^H) / 2."""
    return (x + mH(x)) / 2


# as in PyTorch, the reason is chosen by what the name of the function contains; the first match counts
_REASONS = {
    "inv": "The diagonal element {0} is zero, the inversion could not be completed because the input matrix is singular.",
    "solve": "The solver failed because the input matrix is singular.",
    "cholesky": "The factorization could not be completed because the input is not positive-definite "
    "(the leading minor of order {0} is not positive-definite).",
    "svd": "The algorithm failed to converge because the input matrix contained non-finite values (error code: {0}).",
    "eig": "The algorithm failed to converge because the input matrix contained non-finite values (error code: {0}).",
    "lstsq": "The least squares solution could not be computed because the input matrix does not have full rank (error code: {0}).",
    "lu_factor": "U[{0},{0}] is zero and using it on lu_solve would result in a division by zero.",
    "": "The algorithm failed (error code: {0}).",
}


def report(info: Any, name: str, is_matrix: bool) -> None:
    """Raise LinAlgError where info, now or when the program has run, holds the code of a failure."""
    reason = next(text for key, text in _REASONS.items() if key in name)
    try:
        values = concrete(info).reshape(-1)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        if info.size:
            check(info, Range(0, 1, f"{name}: {reason.replace('{0}', '{index}')}", torch.linalg.LinAlgError))
        return
    failed = values.nonzero()[0]
    if not failed.size:
        return
    reason = reason.format(values[failed[0]])
    raise torch.linalg.LinAlgError(f"{name}: {'' if is_matrix else f'(Batch element {failed[0]}): '}{reason}")


@lowering("aten._linalg_check_errors")
def aten_linalg_check_errors(info, api_name, *, is_matrix):
    """_linalg_check_errors(Tensor info, str api_name, *, bool is_matrix) -> ()"""
    report(info, api_name, is_matrix)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _cholesky(upper, of_gradient, A):
    """The lower factor of the Hermitian matrix whose lower (or upper) triangle is A's; the other one is not read.

    PyTorch's forward mode reads a triangle of the tangent, and its gradient is Hermitian: the two are no transposes.
    of_gradient: forward mode is the transpose of the gradient, for the operator that has a gradient alone.
    """
    return lax.linalg.cholesky(mH(A) if upper else A, symmetrize_input=False)


def _mirrored(x):
    """The Hermitian part of a lower triangle; what is imaginary on the diagonal stays, as in PyTorch."""
    below = jnp.tril(x, -1)
    return (below + mH(below)) / 2 + jnp.eye(x.shape[-1], dtype=x.dtype) * x


def _mirrored_transpose(x):
    """A lower triangle; its cotangent is _mirrored."""
    return jnp.tril(hermitian_part(x), -1) + jnp.eye(x.shape[-1], dtype=x.dtype) * x


@_cholesky.defjvp
def _cholesky_jvp(upper, of_gradient, primals, tangents):
    # L^-1 dA L^-H = X + X^H with X = L^-1 dL lower triangular (https://arxiv.org/abs/1602.07527)
    (A,), (dA,) = primals, tangents
    L = _cholesky(upper, of_gradient, A)
    solve = functools.partial(lax.linalg.triangular_solve, L, lower=True)
    X = solve(solve(dA, left_side=True), left_side=False, transpose_a=True, conjugate_a=True)
    X = _mirrored_transpose(X) if of_gradient else with_cotangent(X, _mirrored)
    return L, matmul(L, jnp.tril(X) * (1 - 0.5 * jnp.eye(L.shape[-1], dtype=L.dtype)))


def _failed_minor(A, L):
    """LAPACK's info: 0, or the order of the first leading minor of A that is not positive definite, by bisection.

    The loop does nothing where no factorization failed, which holds under vmap too.
    """
    n = A.shape[-1]
    good = jnp.isfinite(diagonal(L).real).all(-1)
    low, high = jnp.where(good, n, 0), jnp.full(good.shape, n)  # the minor of order low is definite, that of order high is not
    eye, index = jnp.eye(n, dtype=A.dtype), jnp.arange(n)

    def body(state):
        low, high = state
        mid = (low + high) // 2
        inside = index < mid[..., None]
        factor = lax.linalg.cholesky(jnp.where(inside[..., None] & inside[..., None, :], A, eye), symmetrize_input=False)
        definite = jnp.isfinite(diagonal(factor).real).all(-1)
        return jnp.where(definite, mid, low), jnp.where(definite, high, mid)

    low, high = lax.while_loop(lambda state: (state[1] - state[0] > 1).any(), body, (low, high))
    return jnp.where(good, 0, high).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("upper", "of_gradient"))
def _cholesky_ex(A, upper, of_gradient=False):
    L = _cholesky(upper, of_gradient, A)
    return mH(L) if upper else L, _failed_minor(*lax.stop_gradient((mH(A) if upper else A, L)))


@lowering("aten.linalg_cholesky_ex")
def aten_linalg_cholesky_ex(self, *, upper=False, check_errors=False):
    """linalg_cholesky_ex(Tensor self, *, bool upper=False, bool check_errors=False) -> (Tensor L, Tensor info)"""
    check_matrix(self, "linalg.cholesky", square=True)
    L, info = _cholesky_ex(self, upper)
    if check_errors:
        report(info, "linalg.cholesky_ex", self.ndim == 2)
    return L, info


@lowering("aten.cholesky")
def aten_cholesky(self, upper=False):
    """cholesky(Tensor self, bool upper=False) -> Tensor"""
    check_matrix(self, "cholesky", square=True)
    L, info = _cholesky_ex(self, upper, of_gradient=True)
    report(info, "linalg.cholesky", self.ndim == 2)
    return L


def _two_triangles(L, B):
    solve = functools.partial(lax.linalg.triangular_solve, L, left_side=True, lower=True)
    return solve(solve(B), transpose_a=True, conjugate_a=True)


_cholesky_solve = jax.custom_jvp(_two_triangles)


@_cholesky_solve.defjvp
def _cholesky_solve_jvp(primals, tangents):
    # as PyTorch has it, L is a whole matrix here: A = L L^H moves with both of its triangles
    (L, B), (dL, dB) = primals, tangents
    X = _cholesky_solve(L, B)
    dA_half = matmul(dL, mH(L))
    return X, _two_triangles(L, dB - matmul(dA_half + mH(dA_half), X))


@functools.partial(jax.jit, static_argnames="upper")
def _cholesky_solve_batched(B, L, upper):
    L, B = broadcast_batch(mH(L) if upper else L, B)
    return _cholesky_solve(L, B)


@lowering("aten.cholesky_solve")
def aten_cholesky_solve(self, input2, upper=False):
    """cholesky_solve(Tensor self, Tensor input2, bool upper=False) -> Tensor"""
    check_matrix(self, "cholesky_solve")
    check_matrix(input2, "cholesky_solve", square=True)
    return _cholesky_solve_batched(self, input2, upper)


@lowering("aten.cholesky_inverse")
def aten_cholesky_inverse(self, upper=False):
    """cholesky_inverse(Tensor self, bool upper=False) -> Tensor"""
    check_matrix(self, "cholesky_inverse", square=True)
    return _cholesky_solve_batched(jnp.eye(self.shape[-1], dtype=self.dtype), self, upper)


@lowering("aten.linalg_matrix_exp")
def aten_linalg_matrix_exp(self):
    """linalg_matrix_exp(Tensor self) -> Tensor"""
    matrix = cast(self, opmath(self.dtype))  # the one linear algebra operator that takes half types
    check_matrix(matrix, "linalg.matrix_exp", square=True)
    return cast(jax.scipy.linalg.expm(matrix), self.dtype)
