"""Helpers of element-wise lowerings: fused functions, shape alignment, and builders of one- and
two-operand operators.

Measured on CPU: outside jit, a function of several primitives costs two to four times less as one
``jax.jit`` call, also under vmap and grad, because JAX caches its derivative; a single primitive is
cheapest called bare. ``inline=True`` keeps user programs flat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from bridge.lowering.common.promotion import (
    cast,
    default_float,
    is_array,
    opmath,
    result_dtype,
    saturated,
)

#: Compile a lowering of several primitives as one call; ``static_argnums``/``static_argnames`` as
#: in jax.jit.
fused = functools.partial(jax.jit, inline=True)

_FLOATS = frozenset(map(np.dtype, (np.float32, np.float64, np.complex64, np.complex128)))
_BOOL = np.dtype(np.bool_)


def number(value: Any, dtype: np.dtype) -> Any:
    """A Python number as a scalar of that dtype; integers wrap around as a cast tensor does. Arrays
    pass unchanged.
    """
    if is_array(value):
        return value
    if hasattr(value, "as_array"):  # its value is known only when the program runs
        return value.as_array(dtype)
    dtype = np.dtype(dtype)
    if dtype in _FLOATS:
        return dtype.type(value)
    if dtype.kind in "iu" and isinstance(value, int):
        bits = 8 * dtype.itemsize
        value &= (1 << bits) - 1
        return dtype.type(
            value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value
        )
    return np.asarray(saturated(value, dtype)).astype(dtype)[()]


def align(*arrays: Any) -> list[Array]:
    """The arrays broadcast to their common shape, which lax needs."""
    shape = lax.broadcast_shapes(*(np.shape(a) for a in arrays))
    return [a if np.shape(a) == shape else expand(a, shape) for a in arrays]


def expand(x: ArrayLike, shape: Sequence[int]) -> Array:
    """x broadcast to a shape, in one primitive."""
    ndim = np.ndim(x)
    return lax.broadcast_in_dim(x, tuple(shape), tuple(range(len(shape) - ndim, len(shape))))


def spread(values: Array, shape: Sequence[int], axes: Sequence[int]) -> Array:
    """Values without axes as an array of the whole shape, which has them: one operation, and one
    sum in its transpose, unlike keepdims.
    """
    return lax.broadcast_in_dim(values, shape, [d for d in range(len(shape)) if d not in axes])


def like(value: Any, x: Array) -> Array:
    """A number as an array of x's dtype and shape."""
    return lax.broadcast(number(value, x.dtype), x.shape)


def choose(mask: Array, a: Any, b: Array) -> Array:
    """a if mask is true, else b.  b has the shape of mask; a has it too, or is a number."""
    return lax.select_n(mask, b, a if np.shape(a) == b.shape and is_array(a) else like(a, b))


def scaled(x: Array, factor: float) -> Array:
    """x times a Python number, in x's dtype."""
    return lax.mul(x, number(factor, x.dtype))


def affine(x: Array, factor: float, shift: float) -> Array:
    """factor * x + shift, in x's dtype."""
    return lax.add(scaled(x, factor), number(shift, x.dtype))


def define_slopes(function: jax.custom_jvp, *slopes: Callable) -> None:
    """Give a custom_jvp function its partial derivatives, one per operand, each a function of
    (operands..., result).

    An operand that is not differentiated costs nothing, and its infinite or NaN derivative does not
    meet a zero tangent (0 * inf is NaN).
    """

    def jvp(primals: tuple, tangents: tuple) -> tuple:
        result = function(*primals)
        terms = [
            lax.mul(slope(*primals, result), t)
            for slope, t in zip(slopes, tangents, strict=True)
            if not isinstance(t, SymbolicZero)
        ]
        return result, functools.reduce(lax.add, terms) if terms else like(0, result)

    function.defjvp(jvp, symbolic_zeros=True)


@jax.custom_jvp
def with_slope(value: Array, x: Array, slope: Array) -> Array:
    """value, whose derivative in x is slope, element by element, where JAX would derive another
    one; all three have one shape.

    slope may depend on x: its own derivative is then value's second.
    """
    return value


@functools.partial(with_slope.defjvp, symbolic_zeros=True)
def _with_slope_jvp(primals: tuple, tangents: tuple) -> tuple:
    result, dx = with_slope(*primals), tangents[1]
    return result, like(0, result) if isinstance(dx, SymbolicZero) else lax.mul(primals[2], dx)


def unary(fn: Callable, wide: bool = False) -> Callable:
    """A lowering of one floating operand; integers and bools become the default float first.

    Args:
        fn: function of one array.
        wide: fn consists of several primitives; they are fused, and float16 and bfloat16 are
            computed in float32 and rounded once.
    """

    @fused
    def widened(x: Array) -> Array:
        return cast(fn(cast(x, opmath(x.dtype))), x.dtype)

    call = widened if wide else fn

    def apply(self: Array) -> Array:
        return call(
            lax.convert_element_type(self, default_float()) if self.dtype.kind in "iub" else self
        )

    return apply


def binary(
    fn: Callable,
    floating: bool = False,
    boolean: bool = False,
    primitive: bool = False,
    wide: bool = True,
) -> Callable:
    """A two-operand lowering with torch's type promotion and broadcasting.

    Args:
        fn: function of two arrays of one dtype and one shape.
        floating: integers are promoted to the default float (true division, atan2 ...).
        boolean: fn returns bools; else its result has the operands' common dtype.
        primitive: fn is one lax primitive, which broadcasts scalars itself, and is called directly
            if types and shapes allow it.
        wide: half types are computed in float32.
    """

    @functools.partial(fused, static_argnums=(2, 3))
    def mixed(a: Array, b: Array, work: np.dtype, dtype: np.dtype) -> Array:
        result = fn(*align(cast(a, work), cast(b, work)))
        return result if boolean else cast(result, dtype)

    def apply(self: Any, other: Any) -> Array:
        if is_array(self) and is_array(other):
            dtype = self.dtype
            if (
                primitive
                and dtype == other.dtype
                and self.shape == other.shape
                and (dtype in _FLOATS or not floating)
            ):
                return fn(self, other)
        elif primitive and is_array(self) and self.dtype in _FLOATS and type(other) in (int, float):
            return fn(self, self.dtype.type(other))
        dtype = result_dtype(self, other)
        if floating and dtype.kind in "iub":
            dtype = default_float()
        work = dtype if boolean or not wide else opmath(dtype)
        return mixed(number(self, work), number(other, work), work, dtype)

    return apply
