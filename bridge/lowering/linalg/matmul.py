"""Matrix products: mm, bmm, addmm and their kin, as dot_general.

einsum, linear, matmul, tensordot and bilinear reach this file already decomposed by PyTorch into
these operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from jax.typing import DTypeLike

from bridge.convert import dtypes
from bridge.lowering.common.promotion import cast, opmath, result_dtype
from bridge.lowering.common.provided import float32_precision
from bridge.lowering.registry import lowering

_MM = (((1,), (0,)), ((), ()))
_BMM = (((2,), (1,)), ((0,), (0,)))
_SUM_BMM = (((0, 2), (0, 1)), ((), ()))
_DOT = (((0,), (0,)), ((), ()))
# a vector is first: then a vmap of vectors is rows times the transposed matrix, without a transpose
# behind
_VM = (((0,), (1,)), ((), ()))

# "highest" requires true float32 products; the other two allow TF32 on a GPU and bfloat16 passes on
# a TPU
_PRECISION = {
    "highest": lax.Precision.HIGHEST,
    "high": lax.Precision.HIGH,
    "medium": lax.Precision.DEFAULT,
}
# XLA's products on the CPU always have the precision of float32
_OF_CUDA = {"tf32": lax.Precision.HIGH}
_SINGLE = (jnp.dtype("float32"), jnp.dtype("complex64"))


def precision(dtype: np.dtype) -> lax.Precision | None:
    """The lax precision of a product of that dtype, from the current
    torch.set_float32_matmul_precision or the setting for CUDA.
    """
    if dtype not in _SINGLE:
        return None
    found = float32_precision()
    return (
        _PRECISION[found]
        if isinstance(found, str)
        else _OF_CUDA.get(found[0], lax.Precision.HIGHEST)
    )


def _product(
    a: Array,
    b: Array,
    dims: lax.DotDimensionNumbers,
    ndims: tuple[int, int],
    out_dtype: DTypeLike | None = None,
) -> Array:
    """dot_general with checks; the caller replaces a TypeError by torch's own error.

    XLA sums float16 and bfloat16 products in float32 by default.
    """
    if a.dtype != b.dtype:
        raise TypeError(
            "expected both operands of the product to have the same dtype, "
            f"but got {a.dtype} and {b.dtype}"
        )
    if (a.ndim, b.ndim) != ndims:
        raise TypeError(
            f"expected operands of {ndims[0]} and {ndims[1]} dimensions, but got shapes {a.shape} "
            f"and {b.shape}"
        )
    return lax.dot_general(a, b, dims, precision(a.dtype), out_dtype)


def _added(
    self: Array,
    a: Array,
    b: Array,
    dims: lax.DotDimensionNumbers,
    ndims: tuple[int, int],
    beta: Any,
    alpha: Any,
) -> Array:
    """beta * self + alpha * (a @ b); half types are computed in float32 and rounded once, as in
    PyTorch's kernels.
    """
    wide = opmath(a.dtype)
    if wide == a.dtype:
        return _combine(self, _product(a, b, dims, ndims), beta, alpha)
    if self.dtype != a.dtype:
        raise RuntimeError(
            f"expected self to have the dtype of the product, {a.dtype}, but got {self.dtype}"
        )
    return cast(_combine(cast(self, wide), _product(a, b, dims, ndims, wide), beta, alpha), a.dtype)


def _combine(self: Array, product: Array, beta: Any, alpha: Any) -> Array:
    """beta * self + alpha * product; if beta is 0, self is not read, so its NaNs do not spread.

    For integer arrays beta and alpha are truncated to integers, as in PyTorch.
    """
    if product.dtype.kind in "iu":
        beta, alpha = int(beta), int(alpha)
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    if self.dtype != product.dtype:
        raise RuntimeError(
            f"expected self to have the dtype of the product, {product.dtype}, but got {self.dtype}"
        )
    if beta != 1:
        self = self * beta
    if self.shape != product.shape:
        shift = product.ndim - self.ndim
        if any(n not in (1, m) for n, m in zip(self.shape, product.shape[shift:])) or shift < 0:
            raise RuntimeError(
                f"The expanded size of the tensor {product.shape} must match "
                f"the existing size {self.shape}"
            )
        keep = [i for i, n in enumerate(self.shape) if n == product.shape[shift + i]]
        self = lax.reshape(self, [self.shape[i] for i in keep])
        self = lax.broadcast_in_dim(self, product.shape, [shift + i for i in keep])
    return lax.add(self, product)


def _addmm(self: Array | None, mat1: Array, mat2: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    """mat1 @ mat2 (+ self). A single row becomes a vector, so that its vmap has no axis of size 1
    for XLA to loop over.
    """
    if mat1.ndim == 2 and mat1.shape[0] == 1 and (self is None or self.ndim == 1):
        product = _product(lax.reshape(mat1, mat1.shape[1:]), mat2, _DOT, (1, 2))
        return lax.expand_dims(
            product if self is None else _combine(self, product, beta, alpha), (0,)
        )
    product = _product(mat1, mat2, _MM, (2, 2))
    return product if self is None else _combine(self, product, beta, alpha)


@lowering("aten.mm")
def aten_mm(self: Array, mat2: Array) -> Array:
    """mm(Tensor self, Tensor mat2) -> Tensor"""
    return _addmm(None, self, mat2)


@lowering("aten.mm.dtype")
def aten_mm_dtype(self: Array, mat2: Array, out_dtype: torch.dtype) -> Array:
    """mm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor"""
    return _product(self, mat2, _MM, (2, 2), dtypes.to_jax(out_dtype))


@lowering("aten._int_mm")
def aten_int_mm(self: Array, mat2: Array) -> Array:
    """_int_mm(Tensor self, Tensor mat2) -> Tensor"""
    return _product(self, mat2, _MM, (2, 2), jnp.int32)


@lowering("aten.bmm")
def aten_bmm(self: Array, mat2: Array) -> Array:
    """bmm(Tensor self, Tensor mat2) -> Tensor"""
    return _product(self, mat2, _BMM, (3, 3))


@lowering("aten.bmm.dtype")
def aten_bmm_dtype(self: Array, mat2: Array, out_dtype: torch.dtype) -> Array:
    """bmm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor"""
    return _product(self, mat2, _BMM, (3, 3), dtypes.to_jax(out_dtype))


@lowering("aten.mv")
def aten_mv(self: Array, vec: Array) -> Array:
    """mv(Tensor self, Tensor vec) -> Tensor"""
    return _product(vec, self, _VM, (1, 2))


@lowering("aten.dot")
def aten_dot(self: Array, tensor: Array) -> Array:
    """dot(Tensor self, Tensor tensor) -> Tensor"""
    return _product(self, tensor, _DOT, (1, 1))


@lowering("aten.vdot")
def aten_vdot(self: Array, other: Array) -> Array:
    """vdot(Tensor self, Tensor other) -> Tensor"""
    return _product(lax.conj(self) if jnp.iscomplexobj(self) else self, other, _DOT, (1, 1))


@lowering("aten.addmm")
def aten_addmm(self: Array, mat1: Array, mat2: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _addmm(self, mat1, mat2, beta, alpha)


@lowering("aten.baddbmm")
def aten_baddbmm(
    self: Array, batch1: Array, batch2: Array, *, beta: Any = 1, alpha: Any = 1
) -> Array:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) ->
    Tensor
    """
    return _added(self, batch1, batch2, _BMM, (3, 3), beta, alpha)


@lowering("aten.addbmm")
def aten_addbmm(
    self: Array, batch1: Array, batch2: Array, *, beta: Any = 1, alpha: Any = 1
) -> Array:
    """addbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1,
    Scalar alpha=1) -> Tensor
    """
    return _added(self, batch1, batch2, _SUM_BMM, (3, 3), beta, alpha)


@lowering("aten.addmv")
def aten_addmv(self: Array, mat: Array, vec: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    """addmv(Tensor self, Tensor mat, Tensor vec, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _added(self, vec, mat, _VM, (1, 2), beta, alpha)


@lowering("aten.addr", apart=())
def aten_addr(self: Array, vec1: Array, vec2: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    """addr(Tensor self, Tensor vec1, Tensor vec2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    dtype = result_dtype(self, vec1, vec2)
    for name, vec in (("vec1", vec1), ("vec2", vec2)):
        if vec.ndim != 1:
            raise RuntimeError(f"addr: Expected 1-D argument {name}, but got {vec.ndim}-D")
    for name, number in (("beta", beta), ("alpha", alpha)):
        if isinstance(number, bool) and dtype.kind != "b":
            raise RuntimeError(f"Boolean {name} only supported for Boolean results.")
        if dtype.kind in "biu" and not isinstance(number, int):
            raise RuntimeError(
                f"For integral input tensors, argument {name} must not be a floating point number."
            )
    product = jnp.outer(cast(vec1, dtype), cast(vec2, dtype))
    if dtype.kind != "b":
        return _combine(cast(self, dtype), product, beta, alpha)
    product = product & bool(alpha)
    return self | product if beta else product


@lowering("aten._trilinear")
def aten_trilinear(
    i1: Array,
    i2: Array,
    i3: Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Array:
    """_trilinear(Tensor i1, Tensor i2, Tensor i3, int[] expand1, int[] expand2, int[] expand3,
    int[] sumdim, int unroll_dim=1) -> Tensor
    """
    ndim = i1.ndim + len(expand1)
    subscripts = []
    for expand in (expand1, expand2, expand3):
        subscripts.append("".join(chr(97 + d) for d in range(ndim) if d not in expand))
    out = "".join(chr(97 + d) for d in range(ndim) if d not in sumdim)
    product = jnp.einsum(
        f"{','.join(subscripts)}->{out}", i1, i2, i3, precision=precision(i1.dtype)
    )
    return cast(product, i1.dtype)
