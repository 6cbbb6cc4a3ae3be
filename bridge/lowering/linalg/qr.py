"""Linear algebra on Householder reflectors: qr, geqrf, householder_product (orgqr) and ormqr."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from bridge.lowering.common import varying
from bridge.lowering.common.loops import fori_loop
from bridge.lowering.linalg.matrices import check_matrix, matmul, mH, mT, skew_diagonal
from bridge.lowering.registry import lowering


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _qr(full: bool, A: Array) -> tuple[Array, ...]:
    return tuple(lax.linalg.qr(A, full_matrices=full))


@_qr.defjvp
def _qr_jvp(
    full: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    (A,), (dA,) = primals, tangents
    m, n = A.shape[-2:]
    if full and m > n:
        raise RuntimeError(
            "The QR decomposition is not differentiable when mode='complete' and nrows > ncols"
        )
    Q, R = _qr(full, A)
    k = min(m, n)
    # Q^H dQ is skew; below the diagonal it equals Q^H dA R^-1, with R's square part
    moved = lax.linalg.triangular_solve(R[..., :k], dA[..., :k])
    turned = matmul(mH(Q), moved)
    below = jnp.tril(turned, -1)
    skew = below - mH(below) + skew_diagonal(turned)
    dQ = matmul(Q, skew)
    if m > n:
        dQ = dQ + moved - matmul(Q, turned)
    return (Q, R), (dQ, jnp.triu(matmul(mH(Q), dA) - matmul(skew, R)))


@lowering("aten.linalg_qr")
@functools.partial(jax.jit, static_argnames="mode")
def aten_linalg_qr(A: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """linalg_qr(Tensor A, str mode="reduced") -> (Tensor Q, Tensor R)"""
    check_matrix(A, "linalg.qr")
    if mode not in ("reduced", "complete", "r"):
        raise RuntimeError(
            f"qr received unrecognized mode '{mode}' but expected one of "
            "'reduced' (default), 'r', or 'complete'"
        )
    Q, R = _qr(mode == "complete", A)
    return (jnp.zeros((0,), A.dtype) if mode == "r" else Q), R


@lowering("aten.geqrf")
@jax.jit
def aten_geqrf(self: Array) -> tuple[Array, Array]:
    """geqrf(Tensor self) -> (Tensor a, Tensor tau)"""
    check_matrix(self, "geqrf")
    a, tau = jnp.linalg.qr(self, mode="raw")
    return mT(a), tau


def _reflected(left: bool, adjoint: bool, a: Array, tau: Array, C: Array) -> Array:
    """Q C (or C Q if not left), with Q = H_1 ... H_k or its adjoint, applying one reflector H = I -
    tau v v^H at a time.
    """
    m, k = a.shape[-2], tau.shape[-1]
    if not left:
        return mH(_reflected(True, not adjoint, a, tau, mH(C)))
    below = jnp.tril(a[..., :k], -1) + jnp.eye(m, k, dtype=a.dtype)
    scale = jnp.conj(tau) if adjoint else tau

    def reflect(i: Array, C: Array) -> Array:
        # the gradient of a slice by int64 is lowered with 64-bit types alone
        j = (i if adjoint else k - 1 - i).astype(jnp.int32)
        v = lax.dynamic_slice_in_dim(below, j, 1, -1)
        t = lax.dynamic_slice_in_dim(scale, j, 1, -1)[..., None]
        return C - matmul(t * v, matmul(mH(v), C))

    return fori_loop(0, k, reflect, C) if k else C


@jax.custom_jvp
def _householder_product(a: Array, tau: Array) -> Array:
    return lax.linalg.householder_product(a, tau)


@_householder_product.defjvp
def _householder_product_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    def product(a: Array, tau: Array) -> Array:
        return _reflected(
            True,
            False,
            a,
            tau,
            jnp.broadcast_to(jnp.eye(a.shape[-2], a.shape[-1], dtype=a.dtype), a.shape),
        )

    return _householder_product(*primals), varying.jvp(product, primals, tangents)[1]


@lowering("aten.linalg_householder_product", "aten.orgqr")
@jax.jit
def aten_linalg_householder_product(input: Array, tau: Array) -> Array:
    """linalg_householder_product(Tensor input, Tensor tau) -> Tensor"""
    check_matrix(input, "torch.linalg.householder_product")
    if input.shape[-2] < input.shape[-1]:
        raise RuntimeError(
            "torch.linalg.householder_product: input.shape[-2] must be greater than or equal to "
            "input.shape[-1]"
        )
    return _householder_product(input, tau)


@lowering("aten.ormqr")
@functools.partial(jax.jit, static_argnames=("left", "transpose"))
def aten_ormqr(
    self: Array, input2: Array, input3: Array, left: bool = True, transpose: bool = False
) -> Array:
    """ormqr(Tensor self, Tensor input2, Tensor input3, bool left=True, bool transpose=False) ->
    Tensor
    """
    check_matrix(self, "torch.ormqr")
    return _reflected(left, transpose, self, input2, input3)
