"""Linear algebra on LDL factors: ldl_factor and ldl_solve. XLA has no Bunch-Kaufman factorization,
so LAPACK's runs on the host, through scipy; as in PyTorch, neither has derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridge.lowering.linalg.matrices import broadcast_batch, check_matrix, report
from bridge.lowering.registry import lowering


def _routine(stem: str, dtype: np.dtype, hermitian: bool) -> Callable[..., Any]:
    """LAPACK's hetrf or sytrf (stem trf), hetrs or sytrs (stem trs), in the precision of dtype."""
    from scipy.linalg import get_lapack_funcs  # its import takes a tenth of a second

    kind = "he" if hermitian and np.issubdtype(dtype, np.complexfloating) else "sy"
    return get_lapack_funcs(kind + stem, dtype=dtype)


def _factor(hermitian: bool, A: np.ndarray) -> tuple[np.ndarray, ...]:
    trf = _routine("trf", A.dtype, hermitian)
    LD, pivots, info = (
        np.zeros_like(A),
        np.zeros(A.shape[:-1], np.int32),
        np.zeros(A.shape[:-2], np.int32),
    )
    for i in np.ndindex(A.shape[:-2]):
        factor, pivots[i], info[i] = trf(A[i], lower=1)
        LD[i] = np.tril(factor)
    return LD, pivots, info


def _solve(hermitian: bool, LD: np.ndarray, pivots: np.ndarray, B: np.ndarray) -> np.ndarray:
    trs = _routine("trs", LD.dtype, hermitian)
    X = np.zeros_like(B)
    for i in np.ndindex(B.shape[:-2]):
        X[i] = trs(LD[i], pivots[i], B[i], lower=1)[0]
    return X


def _on_host(fn: Callable[..., Any], hermitian: bool, out: Any, *args) -> Any:
    return jax.pure_callback(
        lambda *xs: fn(hermitian, *map(np.asarray, xs)), out, *args, vmap_method="broadcast_all"
    )


@lowering("aten.linalg_ldl_factor_ex")
def aten_linalg_ldl_factor_ex(
    self: Array, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[Array, ...]:
    """linalg_ldl_factor_ex(Tensor self, *, bool hermitian=False, bool check_errors=False) ->
    (Tensor LD, Tensor pivots, Tensor info)
    """
    check_matrix(self, "torch.linalg.ldl_factor_ex", square=True)
    out = tuple(
        jax.ShapeDtypeStruct(self.shape[:end], kind)
        for end, kind in ((None, self.dtype), (-1, jnp.int32), (-2, jnp.int32))
    )
    if self.size == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    LD, pivots, info = _on_host(_factor, hermitian, out, self)
    if check_errors:
        report(info, "torch.linalg.ldl_factor_ex", self.ndim == 2)
    return LD, pivots, info


@lowering("aten.linalg_ldl_solve")
def aten_linalg_ldl_solve(LD: Array, pivots: Array, B: Array, *, hermitian: bool = False) -> Array:
    """linalg_ldl_solve(Tensor LD, Tensor pivots, Tensor B, *, bool hermitian=False) -> Tensor"""
    check_matrix(LD, "torch.linalg.ldl_solve", square=True)
    LD, B = broadcast_batch(LD, B)
    if B.size == 0:
        return B
    pivots = jnp.broadcast_to(pivots, LD.shape[:-1])
    return _on_host(_solve, hermitian, jax.ShapeDtypeStruct(B.shape, B.dtype), LD, pivots, B)
