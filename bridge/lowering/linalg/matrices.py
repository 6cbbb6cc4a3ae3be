"""Helpers of the factorizations: checks of matrices, error reports, transposes; and the matrix
exponential.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from bridge.lowering.common.loops import kept
from bridge.lowering.common.promotion import cast, concrete, opmath
from bridge.lowering.common.provided import Range, check
from bridge.lowering.registry import lowering

#: derivatives and solves never run in TF32, whatever torch.set_float32_matmul_precision is
matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)

_NUMERIC = ("float32", "float64", "complex64", "complex128")


def check_matrix(x: Array, name: str, square: bool = False) -> None:
    """Raise torch.linalg's error unless x is a batch of (square) matrices of a dtype that LAPACK
    knows.
    """
    if str(x.dtype) not in _NUMERIC:
        low = str(x.dtype) in ("float16", "bfloat16")
        expected = (
            "Low precision dtypes not supported."
            if low
            else "Expected a floating point or complex tensor as input."
        )
        raise RuntimeError(f"{name}: {expected} Got {x.dtype}")
    if x.ndim < 2:
        raise RuntimeError(f"{name}: The input tensor A must have at least 2 dimensions.")
    if square and x.shape[-1] != x.shape[-2]:
        raise RuntimeError(
            f"{name}: A must be batches of square matrices, but they are {x.shape[-2]} by "
            f"{x.shape[-1]} matrices"
        )


def mT(x: Array) -> Array:
    """Transpose of each matrix."""
    return jnp.swapaxes(x, -1, -2)


def mH(x: Array) -> Array:
    """Conjugate transpose of each matrix."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def diagonal(x: Array) -> Array:
    """Diagonal of each matrix."""
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def skew_diagonal(x: Array) -> Array:
    """Each matrix with all but the imaginary part of its diagonal made zero (zeros for a real
    matrix).
    """
    if not jnp.iscomplexobj(x):
        return jnp.zeros_like(x)
    return jnp.where(
        jnp.eye(x.shape[-2], x.shape[-1], dtype=bool),
        lax.complex(jnp.zeros_like(x.real), x.imag),
        0,
    )


def broadcast_batch(*xs: Any) -> list[Array]:
    """The matrices with their leading dimensions broadcast to one another."""
    batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in xs))
    return [x if x.shape[:-2] == batch else jnp.broadcast_to(x, batch + x.shape[-2:]) for x in xs]


def hermitian_part(x: Array) -> Array:
    """(x + x^H) / 2."""
    return (x + mH(x)) / 2


# as in PyTorch, the name of the function selects the reason; the first entry that it contains
# counts
_REASONS = {
    "inv": (
        "The diagonal element {0} is zero, the inversion could not be completed because the input "
        "matrix is singular."
    ),
    "solve": "The solver failed because the input matrix is singular.",
    "cholesky": (
        "The factorization could not be completed because the input is not positive-definite (the "
        "leading minor of order {0} is not positive-definite)."
    ),
    "svd": (
        "The algorithm failed to converge because the input matrix contained non-finite values "
        "(error code: {0})."
    ),
    "eig": (
        "The algorithm failed to converge because the input matrix contained non-finite values "
        "(error code: {0})."
    ),
    "lstsq": (
        "The least squares solution could not be computed because the input matrix does not have "
        "full rank (error code: {0})."
    ),
    "lu_factor": "U[{0},{0}] is zero and using it on lu_solve would result in a division by zero.",
    "": "The algorithm failed (error code: {0}).",
}


def report(info: Array, name: str, is_matrix: bool) -> None:
    """Raise LinAlgError, now or when the program has run, if info holds the code of a failure."""
    reason = next(text for key, text in _REASONS.items() if key in name)
    try:
        values = concrete(info).reshape(-1)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        if info.size:
            check(
                info,
                Range(
                    0, 1, f"{name}: {reason.replace('{0}', '{index}')}", torch.linalg.LinAlgError
                ),
            )
        return
    failed = values.nonzero()[0]
    if not failed.size:
        return
    reason = reason.format(values[failed[0]])
    raise torch.linalg.LinAlgError(
        f"{name}: {'' if is_matrix else f'(Batch element {failed[0]}): '}{reason}"
    )


@lowering("aten._linalg_check_errors")
def aten_linalg_check_errors(info: Array, api_name: str, *, is_matrix: bool) -> None:
    """_linalg_check_errors(Tensor info, str api_name, *, bool is_matrix) -> ()"""
    report(info, api_name, is_matrix)


#: The largest 1-norm for which the Pade approximant of ``jax.scipy.linalg.expm`` is exact, in
#: double and in single precision (Higham 2005, "The Scaling and Squaring Method for the Matrix
#: Exponential Revisited", table 2.3).
_EXACT = {"float64": 5.371920351148152, "float32": 3.925724783138660}
_SQUARINGS = 24  # of a matrix whose 1-norm is 9e7; JAX's limit is 16, and beyond it there is NaN


@lowering("aten.linalg_matrix_exp")
def aten_linalg_matrix_exp(self: Array) -> Array:
    """linalg_matrix_exp(Tensor self) -> Tensor"""
    # the only linear algebra operator that takes half types
    matrix = cast(self, opmath(self.dtype))
    check_matrix(matrix, "linalg.matrix_exp", square=True)
    # JAX scales a matrix to twice the norm up to which its approximant is exact: the error is 1e-8
    # in double precision, and 1e-3 in single
    norm = lax.stop_gradient(jnp.abs(matrix).sum(-2).max(-1, initial=0))
    powers = jnp.ceil(jnp.log2(norm / _EXACT[str(norm.dtype)]))
    count = jnp.where(jnp.isfinite(powers), jnp.maximum(powers, 0), 0).astype("int32")
    each = count[..., None, None]

    def step(found: Array, k: Array) -> tuple[Array, None]:
        square = lambda v: jnp.where(k < each, matmul(v, v), v)
        return lax.cond(k < count.max(initial=0), square, lambda v: v, found), None

    with kept():
        scaled = matrix * jnp.ldexp(jnp.ones_like(norm), -count)[..., None, None]
        found = jax.scipy.linalg.expm(scaled, max_squarings=0)
        found, _ = lax.scan(step, found, jnp.arange(_SQUARINGS, dtype="int32"))
    return cast(jnp.where(each > _SQUARINGS, jnp.nan, found), self.dtype)
