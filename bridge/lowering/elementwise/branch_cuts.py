"""Complex functions on their branch cuts, where the sign of a zero selects the side; XLA ignores
that sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np
from jax import Array, lax

from bridge.lowering.common.builders import define_slopes
from bridge.lowering.common.promotion import is_complex


def _is_minus_zero(x: Array) -> Array:
    """Whether each real number is -0.0."""
    bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    return lax.eq(bits, lax.full_like(bits, np.iinfo(bits.dtype).min))


def _mirrored(
    fn: Callable, part: Callable, mirror: Callable, slope: Callable | None = None
) -> Callable:
    """fn, which commutes with mirror: if that part of x is -0.0, it is evaluated at the mirrored
    point, on the side that XLA computes.

    slope: its derivative at a complex x, if JAX's own is that of the wrong side of a cut.
    """

    def complex_function(x: Array) -> Array:
        other = _is_minus_zero(part(x))
        y = fn(lax.select(other, mirror(x), x))
        return lax.select(other, mirror(y), y)

    if slope is not None:
        complex_function = jax.custom_jvp(complex_function)
        define_slopes(complex_function, lambda x, _: slope(x))
    return lambda x: complex_function(x) if is_complex(x) else fn(x)


def _root(x: Array) -> Array:
    """The square root, at infinities as in annex G of C99: a real infinity beside NaN stays, an
    imaginary one makes the result infinite.
    """
    if not is_complex(x):
        return lax.sqrt(x)
    y, re, im = lax.sqrt(x), lax.real(x), lax.imag(x)
    infinity, unknown = lax.full_like(re, math.inf), lax.full_like(re, math.nan)
    blurred = lax.ne(im, im)
    y = lax.select(
        lax.bitwise_and(blurred, lax.eq(re, infinity)), lax.complex(infinity, unknown), y
    )
    y = lax.select(
        lax.bitwise_and(blurred, lax.eq(re, lax.neg(infinity))), lax.complex(unknown, infinity), y
    )
    return lax.select(lax.eq(lax.abs(im), infinity), lax.complex(infinity, im), y)


sqrt = _mirrored(_root, lax.imag, lax.conj)


def _through_roots(re: Array, im: Array, flip: bool) -> Array:
    """1 / (sqrt(1 - w) sqrt(1 + w)) for w = re + im i, or with w - 1; it keeps the signs of zeros,
    which complex sums lose.
    """
    minus = lax.complex(re - 1, im) if flip else lax.complex(1 - re, lax.neg(im))
    return lax.reciprocal(lax.mul(sqrt(minus), sqrt(lax.complex(1 + re, im))))


acos = _mirrored(
    lax.acos, lax.imag, lax.conj, lambda x: lax.neg(_through_roots(lax.real(x), lax.imag(x), False))
)
asin = _mirrored(
    lax.asin, lax.imag, lax.conj, lambda x: _through_roots(lax.real(x), lax.imag(x), False)
)
acosh = _mirrored(
    lax.acosh, lax.imag, lax.conj, lambda x: _through_roots(lax.real(x), lax.imag(x), True)
)
# asinh x = -i asin(i x)
_turn = lambda x: lax.neg(lax.conj(x))
asinh = _mirrored(
    lax.asinh, lax.real, _turn, lambda x: _through_roots(lax.neg(lax.imag(x)), lax.real(x), False)
)
