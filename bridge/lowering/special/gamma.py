"""The gamma family: lgamma, digamma, polygamma, the incomplete gamma functions,
and Hurwitz's zeta.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from bridge.lowering.common import varying
from bridge.lowering.common.builders import (
    affine,
    binary,
    choose,
    define_slopes,
    fused,
    like,
    number,
    scaled,
    unary,
)
from bridge.lowering.common.promotion import cast, default_float, opmath
from bridge.lowering.registry import lowering
from bridge.lowering.special.chebyshev_tables import LGAMMA, LOG1PMX, TEMME, clenshaw
from bridge.lowering.special.error_functions import OPERAND_KINDS


def _between(x: Array, low: float, high: float) -> Array:
    return lax.bitwise_and(lax.ge(x, number(low, x.dtype)), lax.le(x, number(high, x.dtype)))


# -- log gamma and its derivatives -----------------------------------------------------------------
@jax.custom_jvp
def _digamma(x: Array) -> Array:
    """Digamma with torch's poles: -inf at 0, inf at -0, NaN at negative integers."""
    pole = choose(lax.eq(x, number(0, x.dtype)), lax.div(like(-1, x), x), lax.digamma(x))
    negative_integer = lax.bitwise_and(lax.lt(x, number(0, x.dtype)), lax.eq(x, lax.floor(x)))
    return choose(negative_integer, math.nan, pole)


def _log_gamma_of_one_and(a: Array) -> Array:
    """lgamma(1 + a) for -1/4 <= a <= 5/4, to its last digits also around its
    zeros at a = 0 and 1.
    """
    humps = lax.mul(
        lax.mul(a, lax.sub(number(1, a.dtype), a)), clenshaw(LGAMMA, affine(a, 4 / 3, -2 / 3))
    )
    return lax.sub(number(0, a.dtype), humps)  # so that zeros are not -0.0


@jax.custom_jvp
def _lgamma(x: Array) -> Array:
    """lgamma. JAX's has an absolute error of several ulps of 1, which is too much if the value is
    small, for 0 < x <= 3.25.
    """
    one, zero = number(1, x.dtype), number(0, x.dtype)
    below, above = lax.lt(x, number(0.75, x.dtype)), lax.gt(x, number(2.25, x.dtype))
    small = lax.bitwise_and(lax.gt(x, zero), lax.le(x, number(3.25, x.dtype)))
    inside = choose(small, x, like(1, x))
    below, above = lax.bitwise_and(small, below), lax.bitwise_and(small, above)
    # one step up or down the recurrence gamma(1 + y) = y gamma(y)
    lower = choose(below, inside, lax.sub(inside, one))
    step = lax.log(choose(lax.bitwise_or(below, above), lower, like(1, x)))
    value = _log_gamma_of_one_and(choose(above, lax.sub(lower, one), lower))
    return choose(small, lax.add(value, choose(below, lax.neg(step), step)), lax.lgamma(x))


define_slopes(_digamma, lambda x, y: _slope_of_digamma(x))
define_slopes(_lgamma, lambda x, y: _digamma(x))


def _trigamma(x: Array) -> Array:
    """zeta(2, x), and for negative x by reflection: pi**2 / sin(pi x)**2 - trigamma(1 - x)."""
    one, half = number(1, x.dtype), number(0.5, x.dtype)
    reflected = lax.lt(x, half)
    y = lax.select_n(reflected, x, lax.sub(one, x))
    value = lax.zeta(like(2, x), y)
    sine = lax.sin(scaled(lax.sub(x, lax.round(x)), math.pi))
    ratio = lax.div(like(math.pi, x), sine)
    value = lax.select_n(reflected, value, lax.sub(lax.mul(ratio, ratio), value))
    return choose(lax.eq(x, number(math.inf, x.dtype)), 0, value)


def _slope_of_digamma(x: Array) -> Array:
    return _polygamma_at(1, x)  # rather than _trigamma, which has no derivative of its own


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _polygamma_at(n: int, x: Array) -> Array:
    if n == 0:
        return _digamma(x)
    if n == 1:
        return _trigamma(x)
    scale = (-1.0) ** (n + 1) * math.exp(math.lgamma(n + 1))
    return scaled(_zeta(like(n + 1, x), x), scale)


@_polygamma_at.defjvp
def _polygamma_jvp(n: int, primals: tuple, tangents: tuple) -> tuple:
    return _polygamma_at(n, *primals), lax.mul(_polygamma_at(n + 1, *primals), tangents[0])


@lowering("aten.polygamma")
def aten_polygamma(n: int, self: Array) -> Array:
    """polygamma(int n, Tensor self) -> Tensor"""
    if n < 0:
        raise RuntimeError(f"n: polygamma(n, x) does not support negative n, got {n}")
    return _polygamma(n, cast(self, default_float()) if self.dtype.kind in "iub" else self)


@lowering("aten.polygamma_")
def aten_polygamma_(self: Array, n: int) -> Array:
    """polygamma_(Tensor(a!) self, int n) -> Tensor(a!)"""
    return aten_polygamma(n, self)


@functools.partial(fused, static_argnums=0)
def _polygamma(n: int, x: Array) -> Array:
    return cast(_polygamma_at(n, cast(x, opmath(x.dtype))), x.dtype)


# -- incomplete gamma functions --------------------------------------------------------------------
def _eta(a: Array, x: Array) -> Array:
    """eta**2 / 2 = m - log(1 + m), eta with the sign of m = x/a - 1; without cancellation near x =
    a.
    """
    m = lax.div(lax.sub(x, a), a)
    near = _between(m, -0.5, 0.5)
    small = choose(near, m, like(0, m))
    inner = lax.mul(small, lax.sqrt(scaled(clenshaw(LOG1PMX, scaled(small, 2)), -2)))
    outer = lax.mul(lax.sign(m), lax.sqrt(scaled(lax.sub(m, lax.log1p(m)), 2)))
    return lax.select_n(near, outer, inner)


def _is_steady(a: Array, eta: Array) -> Array:
    """Whether the expansions for large a are valid."""
    return lax.bitwise_and(lax.ge(a, number(20, a.dtype)), _between(eta, -1, 1))


def _uniform(a: Array, eta: Array, sign: float) -> Array:
    """The upper function (sign 1) or the lower (-1) for large a and any x
    (https://dlmf.nist.gov/8.12).
    """
    total = like(0, a)
    for table in reversed(TEMME):
        total = lax.add(lax.div(total, a), clenshaw(table, eta))
    root = lax.sqrt(a)
    bell = lax.exp(scaled(lax.mul(a, lax.mul(eta, eta)), -0.5))
    tail = scaled(varying.erfc(scaled(lax.mul(eta, root), sign * math.sqrt(0.5))), 0.5)
    return lax.add(tail, scaled(lax.mul(lax.div(bell, root), total), sign / math.sqrt(2 * math.pi)))


def _slope_in_a(a: Array, x: Array) -> Array:
    """The derivative of the lower function in a; JAX's, which loses digits as its value does, if
    the expansions are not valid.
    """
    steady = _is_steady(a, _eta(a, x))
    b, y = (choose(steady, v, like(20, v)) for v in (a, x))
    _, slope = varying.jvp(lambda b: _uniform(b, _eta(b, y), -1), (b,), (like(1, b),))
    return choose(steady, slope, lax.igamma_grad_a(choose(steady, 1, a), choose(steady, 1, x)))


def _series(a: Array, x: Array) -> Array:
    """The upper function for a <= 5/4 and x <= 1.1: 1 - x**a / gamma(1 + a) without cancellation,
    and the rest of the series.
    """
    rest, power = like(0, x), like(1, x)
    for n in range(1, 20 if x.dtype == np.float64 else 12):
        power = scaled(lax.mul(power, x), -1 / n)
        rest = lax.add(rest, lax.div(power, lax.add(a, number(n, a.dtype))))
    exponent = lax.sub(lax.mul(a, lax.log(x)), _log_gamma_of_one_and(a))
    return lax.neg(lax.add(lax.expm1(exponent), lax.mul(a, lax.mul(lax.exp(exponent), rest))))


@jax.custom_jvp
def _density(a: Array, x: Array) -> Array:
    """x**(a - 1) exp(-x) / gamma(a); for large a by Stirling's series, because the other formula is
    then a difference of large numbers.
    """
    plain = lax.exp(
        lax.sub(lax.sub(lax.mul(lax.sub(a, number(1, a.dtype)), lax.log(x)), x), _lgamma(a))
    )
    eta = _eta(a, x)
    steady = _is_steady(a, eta)
    b, e = choose(steady, a, like(20, a)), choose(steady, eta, like(0, a))
    square = lax.mul(b, b)
    series = like(-1 / 1680, b)
    for c in (1 / 1260, -1 / 360, 1 / 12):
        series = lax.add(lax.div(series, square), number(c, b.dtype))
    exponent = lax.add(scaled(lax.mul(b, lax.mul(e, e)), 0.5), lax.div(series, b))
    head = lax.div(lax.sqrt(scaled(b, 0.5 / math.pi)), choose(steady, x, like(1, x)))
    return lax.select_n(steady, plain, lax.mul(head, lax.exp(lax.neg(exponent))))


define_slopes(
    _density,
    lambda a, x, y: lax.mul(y, lax.sub(lax.log(x), _digamma(a))),
    lambda a, x, y: lax.mul(
        y, lax.sub(lax.div(lax.sub(a, number(1, a.dtype)), x), number(1, x.dtype))
    ),
)


def _incomplete(upper: bool) -> jax.custom_jvp[Array]:
    """igammac if upper, else igamma. JAX's loses digits for large a near x = a, and for small a; it
    is used in between.
    """
    low, high = (1, 0) if upper else (0, 1)  # at x = 0 and at infinity
    sign = 1.0 if upper else -1.0

    @jax.custom_jvp
    def function(a: Array, x: Array) -> Array:
        zero, infinity = number(0, a.dtype), number(math.inf, a.dtype)
        eta = _eta(a, x)
        steady = _is_steady(a, eta)
        # PyTorch uses the series if the upper function is the smaller one, or not much larger
        small = lax.bitwise_and(_between(x, 0, 0.5), lax.le(a, lax.div(like(-0.4, x), lax.log(x))))
        small = lax.bitwise_or(
            small, lax.bitwise_and(_between(x, 0.5, 1.1), lax.le(a, scaled(x, 1.1)))
        )
        small = lax.bitwise_and(lax.bitwise_and(lax.gt(a, zero), lax.gt(x, zero)), small)
        series = _series(choose(small, a, like(1, a)), choose(small, x, like(1, x)))
        other = lax.bitwise_or(steady, small)
        y = (lax.igammac if upper else lax.igamma)(choose(other, 1, a), choose(other, 1, x))
        y = choose(small, series if upper else lax.sub(like(1, x), series), y)
        y = choose(
            steady,
            _uniform(choose(steady, a, like(20, a)), choose(steady, eta, like(0, a)), sign),
            y,
        )
        # PyTorch's tests in reverse order
        far = lax.eq(x, infinity)
        y = choose(lax.eq(a, infinity), choose(far, math.nan, like(low, y)), choose(far, high, y))
        y = choose(lax.eq(x, zero), low, y)
        y = choose(lax.eq(a, zero), choose(lax.gt(x, zero), high, like(math.nan, y)), y)
        return choose(lax.bitwise_or(lax.lt(x, zero), lax.lt(a, zero)), math.nan, y)

    define_slopes(
        function,
        lambda a, x, _: scaled(_slope_in_a(a, x), -sign),  # PyTorch has no such derivative
        lambda a, x, _: scaled(_density(a, x), -sign),
    )
    return function


# -- zeta ------------------------------------------------------------------------------------------
@jax.custom_jvp
def _zeta(x: Array, q: Array) -> Array:
    """Hurwitz zeta, the sum of (q + k)**-x; for q <= 0, x a whole number: inf at whole q, else
    shifted to q > 0 term by term.
    """
    zero = number(0, q.dtype)
    negative = lax.bitwise_and(lax.le(q, zero), lax.gt(x, number(1, x.dtype)))
    pole = lax.eq(q, lax.floor(q))
    far = lax.lt(q, number(-1e6, q.dtype))  # beyond that, a loop would take too long
    shifts = lax.bitwise_and(negative, lax.bitwise_not(lax.bitwise_or(pole, far)))

    def step(state: tuple) -> tuple:
        a, total = state
        below = lax.lt(a, zero)
        return lax.select_n(below, a, a + 1), lax.add(
            total, choose(below, lax.pow(a, lax.neg(x)), like(0, a))
        )

    start = (choose(shifts, q, choose(negative, 1, q)), like(0, q))
    shifted, total = varying.while_loop(
        lambda state: jnp.any(lax.bitwise_and(shifts, lax.lt(state[0], zero))), step, start
    )
    # the first term is the whole sum, and JAX has NaN; at infinity PyTorch has NaN too
    alone = lax.bitwise_and(lax.gt(x, number(1e4, x.dtype)), lax.lt(q, number(math.inf, q.dtype)))
    alone = lax.bitwise_and(
        alone, lax.bitwise_or(lax.le(q, number(1, q.dtype)), lax.lt(x, number(math.inf, x.dtype)))
    )
    value = lax.add(
        total, choose(alone, lax.pow(shifted, lax.neg(x)), lax.zeta(choose(alone, 2, x), shifted))
    )
    undefined = lax.bitwise_or(far, lax.ne(x, lax.floor(x)))
    one = number(1, x.dtype)
    value = choose(lax.bitwise_and(negative, undefined), math.nan, value)
    unordered = lax.bitwise_and(lax.ne(x, x), lax.le(q, zero))  # PyTorch tests q before x
    poles = lax.bitwise_and(lax.bitwise_or(negative, unordered), pole)
    value = choose(lax.bitwise_or(lax.eq(x, one), poles), math.inf, value)
    return choose(lax.lt(x, one), math.nan, value)


@functools.partial(_zeta.defjvp, symbolic_zeros=True)
def _zeta_jvp(primals: tuple, tangents: tuple) -> tuple:
    """The derivative in q; the one in x has no closed form, and torch does not have it either."""
    (x, q), (dx, dq) = primals, tangents
    if not isinstance(dx, SymbolicZero):
        raise NotImplementedError(
            "x: the derivative of zeta(x, q) with respect to x is not implemented"
        )
    slope = lax.neg(lax.mul(x, _zeta(lax.add(x, number(1, x.dtype)), q)))
    return _zeta(x, q), lax.mul(slope, dq)


for _name, _fn in {"digamma": _digamma, "lgamma": _lgamma}.items():
    lowering(f"aten.{_name}")(unary(_fn, wide=True))
for _name, _fn in {
    "igamma": _incomplete(upper=False),
    "igammac": _incomplete(upper=True),
    "special_zeta": _zeta,
}.items():
    lowering(*(f"aten.{_name}{kind}" for kind in OPERAND_KINDS))(binary(_fn, floating=True))
