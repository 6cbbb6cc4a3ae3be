"""PyTorch's type promotion on JAX arrays and Python numbers. Every lowering that mixes operands
goes through here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from bridge.convert import dtypes

_FLOAT8 = frozenset(d for d in map(dtypes.to_jax, dtypes._TO_JAX) if d.name.startswith("float8"))
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
#: The type in which larger numbers become the largest one; in PyTorch 2.11 they become NaN.
_SATURATES = (
    dtypes.to_jax(torch.float8_e4m3fn)
    if torch.tensor(2 * _LARGEST).to(torch.float8_e4m3fn).float() == _LARGEST
    else None
)
_LOW = frozenset(dtypes.to_jax(d) for d in (torch.float16, torch.bfloat16))


def is_array(x: Any) -> bool:
    """Whether x is an array operand, not a Python number."""
    return hasattr(x, "dtype")


@functools.cache
def _kind(dtype: np.dtype) -> int:
    return dtypes.kind(dtypes.to_torch(dtype))


def default_float() -> np.dtype:
    """torch.get_default_dtype() as a JAX dtype."""
    return dtypes.to_jax(torch.get_default_dtype())


def default_complex() -> np.dtype:
    """The complex dtype as wide as the default float."""
    return dtypes.to_jax(dtypes.of_number(1j))


def result_dtype(*operands: Any) -> np.dtype:
    """The dtype that torch.result_type gives for arrays, 0-dim arrays and Python numbers; None is
    ignored.
    """
    return dtypes.to_jax(dtypes.promoted(operands))


def cast(x: Any, dtype: DTypeLike) -> Array:
    """x as an array of that dtype, or x itself if it has the dtype. A complex array cast to a real
    type keeps its real part.
    """
    if not is_array(x):  # a number, or a stand-in for one that is known only when the program runs
        return x.as_array(dtype) if hasattr(x, "as_array") else jnp.asarray(x, dtype=dtype)
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        x = (x != 0) if dtype == np.bool_ else lax.real(x)
    if jnp.issubdtype(x.dtype, jnp.floating) and np.dtype(dtype).kind in "iu":
        return _whole(x, np.dtype(dtype))
    if np.dtype(dtype) in _FLOAT8 and x.dtype != np.bool_:
        return _to_float8(x, np.dtype(dtype))
    # XLA makes False * nan a 0 if the bool has been converted
    if x.dtype == np.bool_ and jnp.issubdtype(dtype, jnp.inexact):
        return lax.select(x, lax.full_like(x, 1, dtype), lax.full_like(x, 0, dtype))
    return lax.convert_element_type(x, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _to_float8(x: Array, dtype: np.dtype) -> Array:
    """Numbers cast by way of float32, as in PyTorch: a type that has no infinity but the sign of
    zero (e4m3fn) saturates.
    """
    x = lax.convert_element_type(x, np.float32)
    if dtype == _SATURATES:
        return lax.convert_element_type(
            jnp.where(lax.abs(x) > _LARGEST, jnp.copysign(_LARGEST, x), x), dtype
        )
    # the bits of -0.0 are NaN in these types, and XLA's quick programs write them
    if dtype.name.endswith("fnuz"):
        x = jnp.where(lax.abs(x) <= float(jnp.finfo(dtype).smallest_subnormal) / 2, 0, x)
    return lax.convert_element_type(x, dtype)


@_to_float8.defjvp
def _to_float8_jvp(dtype: np.dtype, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    # also where it saturates
    return _to_float8(*primals, dtype), lax.convert_element_type(tangents[0], dtype)


def saturated(value: Any, dtype: np.dtype) -> Any:
    """A Python number that ``_to_float8`` would change, in the type's range;
    numpy makes NaN of it.
    """
    return min(max(value, -_LARGEST), _LARGEST) if dtype == _SATURATES and value == value else value


def constant(values: ArrayLike, dtype: DTypeLike | None = None) -> Array:
    """An array whose values are known even while jit traces; for ``jnp.asarray`` XLA would compile
    a program for each shape.
    """
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.asarray(values, dtype))


def _whole(x: Array, dtype: np.dtype) -> Array:
    """Floats cast as in PyTorch on x86: towards zero; NaN and numbers beyond 32 (or 64) bits give
    the least integer; narrow dtypes wrap.
    """
    # which may have no infinity to compare with
    x = lax.convert_element_type(x, np.float32) if x.dtype in _FLOAT8 else x
    info = np.iinfo(np.int32 if dtype.itemsize < 4 else dtype)
    # XLA itself clips to the nearest integer, and makes NaN 0
    wide = lax.convert_element_type(x, info.dtype)
    if info.min:
        bound = 2.0 ** (info.bits - 1)
        fits = (
            lax.lt(x, lax.full_like(x, bound))
            if bound <= float(jnp.finfo(x.dtype).max)
            else lax.lt(x, lax.full_like(x, np.inf))
        )
        wide = lax.select(fits, wide, lax.full_like(wide, info.min))
    return lax.convert_element_type(wide, dtype)


def promote(*operands: Any) -> list[Array]:
    """The operands as arrays of their common dtype, as an element-wise torch operator sees them
    (shapes untouched).
    """
    dtype = result_dtype(*operands)
    return [None if x is None else cast(x, dtype) for x in operands]


def float_dtype(dtype: np.dtype) -> np.dtype:
    """dtype itself if it is floating or complex, else the default float dtype."""
    dtype = np.dtype(dtype)
    return default_float() if is_integral(dtype) else dtype


def opmath(dtype: np.dtype) -> np.dtype:
    """The dtype that PyTorch computes in internally: float32 for float16 and bfloat16, else the
    dtype itself.
    """
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype in _LOW else dtype


def real_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of the real part: float32 for complex64; a real dtype is itself."""
    dtype = np.dtype(dtype)
    if dtype == np.complex64:
        return np.dtype(np.float32)
    return np.dtype(np.float64) if dtype == np.complex128 else dtype


def is_floating(x: Array | np.dtype) -> bool:
    """Whether an array or a dtype is real floating-point."""
    return _kind(np.dtype(getattr(x, "dtype", x))) == dtypes.FLOAT


def is_complex(x: Array | np.dtype) -> bool:
    """Whether an array or a dtype is complex."""
    return _kind(np.dtype(getattr(x, "dtype", x))) == dtypes.COMPLEX


def is_integral(x: Array | np.dtype) -> bool:
    """Whether an array or a dtype is integer or bool."""
    return _kind(np.dtype(getattr(x, "dtype", x))) <= dtypes.INT


def jdtype(dtype: torch.dtype | None, default: DTypeLike) -> np.dtype:
    """The JAX dtype of an optional torch dtype argument."""
    return np.dtype(default) if dtype is None else dtypes.to_jax(dtype)


def concrete(x: Array) -> np.ndarray:
    """The values of an array, without derivatives; raises JAX's concretization error under vmap or
    jit.
    """
    return np.asarray(lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x)


def wrap_dim(dim: int, ndim: int) -> int:
    """A dimension made non-negative if it counts from the end; raises torch's IndexError if it is
    out of range.
    """
    low, high = -max(ndim, 1), max(ndim, 1) - 1
    if not low <= dim <= high:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{low}, {high}], but got {dim})"
        )
    return dim % max(ndim, 1)


def wrap_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """A dim argument (int, list, empty or None for all) as a tuple of non-negative dimensions; ()
    for a 0-dim array.
    """
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(ndim))
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    wrapped = tuple(wrap_dim(d, ndim) for d in dims)
    if len(set(wrapped)) != len(wrapped):
        raise RuntimeError(f"dim {dims}: a dimension appears multiple times in the list of dims")
    return wrapped if ndim else ()


def fused(*static: str) -> Callable[..., Any]:
    """A decorator that makes a lowering of several primitives one call: jitted, the named arguments
    static (hashable).

    Outside jit a transform then sees one primitive with cached rules instead of many; inside jit it
    is inlined and costs nothing.
    """
    return functools.partial(jax.jit, inline=True, static_argnames=static)


def require_inexact(x: Array, name: str) -> None:
    """Raise NotImplementedError, as PyTorch does, if an operator that needs floating or complex
    values gets integers.
    """
    if is_integral(x):
        raise NotImplementedError(
            f"{name}: not implemented for {dtypes.to_torch(x.dtype)}; expected "
            "a floating-point tensor"
        )
