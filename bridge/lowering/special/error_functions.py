"""Special functions: error functions and the normal distribution, entropy-like products, logit,
sinc.

The gamma family and zeta are in gamma.py, Bessel and Airy functions in bessel.py, orthogonal
polynomials in polynomials.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
from jax import Array, lax

from bridge.lowering.common import varying
from bridge.lowering.common.builders import (
    binary,
    choose,
    define_slopes,
    fused,
    like,
    number,
    scaled,
    unary,
)
from bridge.lowering.common.loops import kept
from bridge.lowering.common.promotion import cast, default_float, opmath
from bridge.lowering.registry import lowering
from bridge.lowering.special.chebyshev_tables import ERFCX, clenshaw


# -- error functions -------------------------------------------------------------------------------
@jax.custom_jvp
def _erfcx(x: Array) -> Array:
    """exp(x**2) erfc(x): (1 + 2x) times it is smooth in (x - 3.75)/(x + 3.75) for x >= 0 (Shepherd
    and Laframboise, 1981).
    """
    size = lax.min(lax.abs(x), number(float(jnp.finfo(x.dtype).max) / 8, x.dtype))
    shift = number(3.75, x.dtype)
    t = lax.div(lax.sub(size, shift), lax.add(size, shift))
    right = lax.div(clenshaw(ERFCX, t), lax.add(scaled(size, 2), number(1, x.dtype)))
    left = lax.sub(scaled(lax.exp(lax.mul(x, x)), 2), right)
    right = choose(lax.eq(x, number(math.inf, x.dtype)), 0, right)
    return choose(lax.ne(x, x), math.nan, lax.select_n(lax.lt(x, number(0, x.dtype)), right, left))


def _erfcx_slope(x: Array, y: Array) -> Array:
    return lax.sub(scaled(lax.mul(x, y), 2), number(2 / math.sqrt(math.pi), y.dtype))


define_slopes(_erfcx, _erfcx_slope)


def _ndtr(x: Array) -> Array:
    return scaled(varying.erfc(scaled(x, -math.sqrt(0.5))), 0.5)


@jax.custom_jvp
def _log_ndtr(x: Array) -> Array:
    """log of _ndtr: by erfcx if that is small, by log1p if it is near 1."""
    below = lax.lt(x, number(-1, x.dtype))
    low, high = choose(below, x, like(-1, x)), choose(below, 0, x)
    t = scaled(low, -math.sqrt(0.5))
    tail = lax.sub(lax.log(scaled(_erfcx(t), 0.5)), lax.mul(t, t))
    return lax.select_n(
        below, lax.log1p(scaled(varying.erfc(scaled(high, math.sqrt(0.5))), -0.5)), tail
    )


@jax.custom_jvp
def _log_ndtr_slope(x: Array) -> Array:
    return lax.div(like(math.sqrt(2 / math.pi), x), _erfcx(scaled(x, -math.sqrt(0.5))))


def _log_ndtr_curve(x: Array, slope: Array) -> Array:
    """That of the quotient would be infinity by infinity where erfcx overflows
    and the slope is 0.
    """
    return choose(lax.eq(slope, number(0, x.dtype)), 0, lax.neg(lax.mul(slope, lax.add(x, slope))))


define_slopes(_log_ndtr, lambda x, y: _log_ndtr_slope(x))
define_slopes(_log_ndtr_slope, _log_ndtr_curve)


@jax.custom_jvp
def _ndtri(x: Array) -> Array:
    with kept():
        return jsp.ndtri(x)


define_slopes(
    _ndtri, lambda x, y: scaled(lax.exp(scaled(lax.mul(y, y), 0.5)), math.sqrt(2 * math.pi))
)


# -- products with a logarithm ---------------------------------------------------------------------
def _times_log(log: Callable[..., Any], at: float) -> Callable[..., Any]:
    """x * log(y), 0 if x is 0 and y is not NaN; the derivative there is torch's: 0 in x if log(y)
    is not finite.
    """

    @jax.custom_jvp
    def product(x: Array, y: Array) -> Array:
        zero = lax.bitwise_and(lax.eq(x, number(0, x.dtype)), lax.eq(y, y))
        return choose(zero, 0, lax.mul(x, log(choose(zero, 1, y))))

    def by_x(x: Array, y: Array, _: Array) -> Array:
        flat = lax.bitwise_and(lax.eq(x, number(0, x.dtype)), lax.le(y, number(at, x.dtype)))
        return choose(flat, 0, log(choose(flat, 1, y)))

    define_slopes(product, by_x, lambda x, y, _: lax.div(x, lax.sub(y, number(at, x.dtype))))
    return product


@jax.custom_jvp
def _entr(x: Array) -> Array:
    """-x log(x); 0 at 0, -inf below."""
    zero = number(0, x.dtype)
    positive = lax.gt(x, zero)
    y = lax.neg(lax.mul(x, lax.log(x)))
    return lax.select_n(
        positive, choose(lax.lt(x, zero), -math.inf, choose(lax.eq(x, zero), 0, x)), y
    )


define_slopes(_entr, lambda x, y: lax.sub(number(-1, x.dtype), lax.log(x)))


@jax.custom_jvp
def _sinc(x: Array) -> Array:
    zero = lax.eq(x, number(0, x.dtype))
    angle = scaled(choose(zero, 1, x), math.pi)
    return choose(zero, 1, lax.div(lax.sin(angle), angle))


def _sinc_slope(x: Array, y: Array) -> Array:
    """(cos(pi x) - sinc(x)) / x; its power series near 0, where the two cancel."""
    size = lax.abs(x)
    near = lax.lt(size, number(0.15, size.dtype))
    small, large = choose(near, x, like(0, x)), choose(near, 1, x)
    square, term, series = lax.mul(small, small), small, like(0, x)
    for k in range(1, 8):
        coefficient = (-1) ** k * 2 * k * math.pi ** (2 * k) / math.factorial(2 * k + 1)
        series, term = lax.add(series, scaled(term, coefficient)), lax.mul(term, square)
    return lax.select_n(
        near, lax.div(lax.sub(lax.cos(scaled(large, math.pi)), _sinc(large)), large), series
    )


define_slopes(_sinc, _sinc_slope)


@jax.custom_jvp
def _log_odds(x: Array) -> Array:
    return lax.log(lax.div(x, lax.sub(number(1, x.dtype), x)))


def _log_odds_slope(x: Array, y: Array) -> Array:
    slope = lax.div(like(1, x), lax.mul(x, lax.sub(number(1, x.dtype), x)))
    return choose(_below_or_above(x, 0, 1), math.nan, slope)


define_slopes(_log_odds, _log_odds_slope)


def _below_or_above(x: Array, low: float, high: float) -> Array:
    return lax.bitwise_or(lax.lt(x, number(low, x.dtype)), lax.gt(x, number(high, x.dtype)))


@lowering("aten.logit")
def aten_logit(self: Array, eps: float | None = None) -> Array:
    """logit(Tensor self, float? eps=None) -> Tensor"""
    return _logit(cast(self, default_float()) if self.dtype.kind in "iub" else self, eps)


@functools.partial(fused, static_argnums=1)
def _logit(x: Array, eps: float | None) -> Array:
    wide = cast(x, opmath(x.dtype))
    if eps is not None:
        low, high = number(eps, wide.dtype), number(1 - eps, wide.dtype)
        # low comes first if it is above high
        wide = choose(lax.lt(wide, low), low, choose(lax.gt(wide, high), high, wide))
    return cast(_log_odds(wide), x.dtype)


# name -> function of one floating array
_UNARY: dict[str, Any] = {
    "erf": varying.erf,
    "erfc": varying.erfc,
    "erfinv": lax.erf_inv,
    "sinc": _sinc,
    "special_entr": _entr,
    "special_erfcx": _erfcx,
    "special_log_ndtr": _log_ndtr,
    "special_ndtr": _ndtr,
    "special_ndtri": _ndtri,
}

#: the overloads of an operator of two operands: Python numbers may stand for either
OPERAND_KINDS = ("", ".Tensor", ".Scalar_Other", ".Scalar_Self", ".other_scalar", ".self_scalar")
# name -> function of two floating arrays
_BINARY = {"special_xlog1py": _times_log(lax.log1p, -1), "xlogy": _times_log(lax.log, 0)}
for _name, _fn in _UNARY.items():
    lowering(f"aten.{_name}")(unary(_fn, wide=True))
for _name, _fn in _BINARY.items():
    lowering(*(f"aten.{_name}{kind}" for kind in OPERAND_KINDS))(binary(_fn, floating=True))
