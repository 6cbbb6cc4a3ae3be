"""Special functions: error functions and the normal distribution, gamma family, zeta, entropy-like products, logit, sinc.

Bessel and Airy functions are in special_bessel.py, orthogonal polynomials in special_polynomials.py.
"""
from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .chebyshev import ERFCX, clenshaw
from .pointwise import binary, choose, define_slopes, fused, like, number, unary
from .promotion import cast, default_float, opmath
from .registry import lowering


def _scaled(x: Any, factor: float) -> Any:
    return lax.mul(x, number(factor, x.dtype))


# -- error functions --------------------------------------------------------------------------------------------------
@jax.custom_jvp
def _erfcx(x: Any) -> Any:
    """exp(x**2) erfc(x): (1 + 2x) times it is smooth in (x - 3.75)/(x + 3.75) for x >= 0 (Shepherd and Laframboise, 1981)."""
    size = lax.min(lax.abs(x), number(1e18 if x.dtype == np.float32 else 1e150, x.dtype))
    shift = number(3.75, x.dtype)
    t = lax.div(lax.sub(size, shift), lax.add(size, shift))
    right = lax.div(clenshaw(ERFCX, t), lax.add(_scaled(size, 2), number(1, x.dtype)))
    left = lax.sub(_scaled(lax.exp(lax.mul(x, x)), 2), right)
    return choose(lax.ne(x, x), math.nan, lax.select_n(lax.lt(x, number(0, x.dtype)), right, left))


def _erfcx_slope(x: Any, y: Any) -> Any:
    return lax.sub(_scaled(lax.mul(x, y), 2), number(2 / math.sqrt(math.pi), y.dtype))


define_slopes(_erfcx, _erfcx_slope)


def _ndtr(x: Any) -> Any:
    return _scaled(lax.erfc(_scaled(x, -math.sqrt(0.5))), 0.5)


@jax.custom_jvp
def _ndtri(x: Any) -> Any:
    return jsp.ndtri(x)


define_slopes(_ndtri, lambda x, y: _scaled(lax.exp(_scaled(lax.mul(y, y), 0.5)), math.sqrt(2 * math.pi)))


# -- gamma family -----------------------------------------------------------------------------------------------------
@jax.custom_jvp
def _digamma(x: Any) -> Any:
    """Digamma with torch's poles: -inf at 0, inf at -0, NaN at negative integers."""
    pole = choose(lax.eq(x, number(0, x.dtype)), lax.div(like(-1, x), x), lax.digamma(x))
    negative_integer = lax.bitwise_and(lax.lt(x, number(0, x.dtype)), lax.eq(x, lax.floor(x)))
    return choose(negative_integer, math.nan, pole)


@jax.custom_jvp
def _lgamma(x: Any) -> Any:
    return lax.lgamma(x)


define_slopes(_digamma, lambda x, y: _slope_of_digamma(x))
define_slopes(_lgamma, lambda x, y: _digamma(x))


def _trigamma(x: Any) -> Any:
    """zeta(2, x), and for negative x by reflection: pi**2 / sin(pi x)**2 - trigamma(1 - x)."""
    one, half = number(1, x.dtype), number(0.5, x.dtype)
    reflected = lax.lt(x, half)
    y = lax.select_n(reflected, x, lax.sub(one, x))
    value = lax.zeta(like(2, x), y)
    sine = lax.sin(_scaled(lax.sub(x, lax.round(x)), math.pi))
    ratio = lax.div(like(math.pi, x), sine)
    return lax.select_n(reflected, value, lax.sub(lax.mul(ratio, ratio), value))


def _slope_of_digamma(x: Any) -> Any:
    return _polygamma_at(1, x)  # rather than _trigamma, which has no derivative of its own


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _polygamma_at(n: int, x: Any) -> Any:
    if n == 0:
        return _digamma(x)
    if n == 1:
        return _trigamma(x)
    scale = (-1.0) ** (n + 1) * math.exp(math.lgamma(n + 1))
    return _scaled(_zeta(like(n + 1, x), x), scale)


@_polygamma_at.defjvp
def _polygamma_jvp(n: int, primals: tuple, tangents: tuple) -> tuple:
    return _polygamma_at(n, *primals), lax.mul(_polygamma_at(n + 1, *primals), tangents[0])


@lowering("aten.polygamma")
def aten_polygamma(n: int, self: Any) -> Any:
    """polygamma(int n, Tensor self) -> Tensor"""
    if n < 0:
        raise RuntimeError(f"n: polygamma(n, x) does not support negative n, got {n}")
    return _polygamma(n, cast(self, default_float()) if self.dtype.kind in "iub" else self)


@functools.partial(fused, static_argnums=0)
def _polygamma(n: int, x: Any) -> Any:
    return cast(_polygamma_at(n, cast(x, opmath(x.dtype))), x.dtype)


@jax.custom_jvp
def _zeta(x: Any, q: Any) -> Any:
    """Hurwitz zeta, the sum of (q + k)**-x; for q <= 0, x a whole number: inf at whole q, else shifted to q > 0 term by term."""
    zero = number(0, q.dtype)
    negative = lax.bitwise_and(lax.le(q, zero), lax.gt(x, number(1, x.dtype)))
    pole = lax.eq(q, lax.floor(q))
    far = lax.lt(q, number(-1e6, q.dtype))  # further out a loop would not end in reasonable time
    shifts = lax.bitwise_and(negative, lax.bitwise_not(lax.bitwise_or(pole, far)))

    def step(state: tuple) -> tuple:
        a, total = state
        below = lax.lt(a, zero)
        return lax.select_n(below, a, a + 1), lax.add(total, choose(below, lax.pow(a, lax.neg(x)), like(0, a)))

    start = (choose(shifts, q, choose(negative, 1, q)), like(0, q))
    shifted, total = lax.while_loop(lambda state: jnp.any(lax.bitwise_and(shifts, lax.lt(state[0], zero))), step, start)
    value = lax.add(total, lax.zeta(x, shifted))
    undefined = lax.bitwise_or(far, lax.ne(x, lax.floor(x)))
    one = number(1, x.dtype)
    value = choose(lax.bitwise_and(negative, undefined), math.nan, value)
    unordered = lax.bitwise_and(lax.ne(x, x), lax.le(q, zero))  # PyTorch asks where q is before it looks at x
    poles = lax.bitwise_and(lax.bitwise_or(negative, unordered), pole)
    steep = lax.bitwise_and(lax.eq(x, like(math.inf, x)), lax.bitwise_and(lax.gt(q, zero), lax.lt(q, number(1, q.dtype))))
    value = choose(lax.bitwise_or(lax.eq(x, one), lax.bitwise_or(poles, steep)), math.inf, value)
    return choose(lax.lt(x, one), math.nan, value)


@functools.partial(_zeta.defjvp, symbolic_zeros=True)
def _zeta_jvp(primals: tuple, tangents: tuple) -> tuple:
    """In q only: the derivative in x has no closed form, and torch has none either."""
    (x, q), (dx, dq) = primals, tangents
    if not isinstance(dx, SymbolicZero):
        raise NotImplementedError("x: the derivative of zeta(x, q) with respect to x is not implemented")
    slope = lax.neg(lax.mul(x, _zeta(lax.add(x, number(1, x.dtype)), q)))
    return _zeta(x, q), lax.mul(slope, dq)


# -- products with a logarithm ----------------------------------------------------------------------------------------
def _times_log(log: Any, at: float) -> Any:
    """x * log(y), 0 where x is 0 unless y is NaN; there its derivative is torch's: 0 in x where log(y) is not finite."""

    @jax.custom_jvp
    def product(x: Any, y: Any) -> Any:
        zero = lax.bitwise_and(lax.eq(x, number(0, x.dtype)), lax.eq(y, y))
        return choose(zero, 0, lax.mul(x, log(choose(zero, 1, y))))

    def by_x(x: Any, y: Any, _: Any) -> Any:
        flat = lax.bitwise_and(lax.eq(x, number(0, x.dtype)), lax.le(y, number(at, x.dtype)))
        return choose(flat, 0, log(choose(flat, 1, y)))

    define_slopes(product, by_x, lambda x, y, _: lax.div(x, lax.sub(y, number(at, x.dtype))))
    return product


@jax.custom_jvp
def _entr(x: Any) -> Any:
    """-x log(x); 0 at 0, -inf below."""
    zero = number(0, x.dtype)
    positive = lax.gt(x, zero)
    y = lax.neg(lax.mul(x, lax.log(x)))
    return lax.select_n(positive, choose(lax.lt(x, zero), -math.inf, choose(lax.eq(x, zero), 0, x)), y)


define_slopes(_entr, lambda x, y: lax.sub(number(-1, x.dtype), lax.log(x)))


@jax.custom_jvp
def _sinc(x: Any) -> Any:
    zero = lax.eq(x, number(0, x.dtype))
    angle = _scaled(choose(zero, 1, x), math.pi)
    return choose(zero, 1, lax.div(lax.sin(angle), angle))


def _sinc_slope(x: Any, y: Any) -> Any:
    """(cos(pi x) - sinc(x)) / x; its power series near 0, where the two cancel."""
    size = lax.abs(x)
    near = lax.lt(size, number(0.15, size.dtype))
    small, large = choose(near, x, like(0, x)), choose(near, 1, x)
    square, term, series = lax.mul(small, small), small, like(0, x)
    for k in range(1, 8):
        coefficient = (-1) ** k * 2 * k * math.pi ** (2 * k) / math.factorial(2 * k + 1)
        series, term = lax.add(series, _scaled(term, coefficient)), lax.mul(term, square)
    return lax.select_n(near, lax.div(lax.sub(lax.cos(_scaled(large, math.pi)), _sinc(large)), large), series)


define_slopes(_sinc, _sinc_slope)


@jax.custom_jvp
def _log_odds(x: Any) -> Any:
    return lax.log(lax.div(x, lax.sub(number(1, x.dtype), x)))


def _log_odds_slope(x: Any, y: Any) -> Any:
    slope = lax.div(like(1, x), lax.mul(x, lax.sub(number(1, x.dtype), x)))
    return choose(_below_or_above(x, 0, 1), math.nan, slope)


define_slopes(_log_odds, _log_odds_slope)


def _below_or_above(x: Any, low: float, high: float) -> Any:
    return lax.bitwise_or(lax.lt(x, number(low, x.dtype)), lax.gt(x, number(high, x.dtype)))


@lowering("aten.logit")
def aten_logit(self: Any, eps: float | None = None) -> Any:
    """logit(Tensor self, float? eps=None) -> Tensor"""
    return _logit(cast(self, default_float()) if self.dtype.kind in "iub" else self, eps)


@functools.partial(fused, static_argnums=1)
def _logit(x: Any, eps: float | None) -> Any:
    wide = cast(x, opmath(x.dtype))
    if eps is not None:
        low, high = number(eps, wide.dtype), number(1 - eps, wide.dtype)
        wide = choose(lax.gt(wide, high), high, choose(lax.lt(wide, low), low, wide))
    return cast(_log_odds(wide), x.dtype)


# name -> function of one floating array
_UNARY: dict[str, Any] = {
    "digamma": _digamma,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "lgamma": _lgamma,
    "sinc": _sinc,
    "special_entr": _entr,
    "special_erfcx": _erfcx,
    "special_log_ndtr": jsp.log_ndtr,
    "special_ndtr": _ndtr,
    "special_ndtri": _ndtri,
}


def _at_no_shape(value: float, function: Any) -> Any:
    """An incomplete gamma function, with its value where a is 0 (all of the mass lies at 0) or infinite (none lies before x)."""

    def incomplete(a: Any, x: Any) -> Any:
        none = lax.bitwise_and(lax.eq(a, number(0, a.dtype)), lax.gt(x, number(0, x.dtype)))
        endless, far = lax.eq(a, number(math.inf, a.dtype)), lax.eq(x, number(math.inf, x.dtype))
        y = function(choose(lax.bitwise_or(none, endless), 1, a), x)
        beyond = choose(lax.bitwise_or(far, lax.ne(x, x)), math.nan, choose(lax.lt(x, number(0, x.dtype)), y, like(1 - value, y)))
        return choose(none, value, lax.select(endless, beyond, y))

    return incomplete


# name -> function of two floating arrays; Python numbers may stand for either
_BINARY = {
    "igamma": _at_no_shape(1, lax.igamma),
    "igammac": _at_no_shape(0, lax.igammac),
    "special_xlog1py": _times_log(lax.log1p, -1),
    "special_zeta": _zeta,
    "xlogy": _times_log(lax.log, 0),
}
for _name, _fn in _UNARY.items():
    lowering(f"aten.{_name}")(unary(_fn, wide=True))
for _name, _fn in _BINARY.items():
    _kinds = ("", ".Tensor", ".Scalar_Other", ".Scalar_Self", ".other_scalar", ".self_scalar")
    lowering(*(f"aten.{_name}{kind}" for kind in _kinds))(binary(_fn, floating=True))
