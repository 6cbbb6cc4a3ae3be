"""Bessel functions (first and second kind, modified, exponentially scaled, spherical) and the Airy
function.

J, Y and K are a Chebyshev expansion near zero and one of the asymptotic modulus beyond (Abramowitz
and Stegun, 9.2 and 9.7); I is JAX's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax

from bridge.lowering.common.builders import (
    affine,
    choose,
    define_slopes,
    like,
    number,
    scaled,
    unary,
)
from bridge.lowering.elementwise.unary import sign
from bridge.lowering.registry import lowering
from bridge.lowering.special import chebyshev_tables as tables
from bridge.lowering.special.chebyshev_tables import clenshaw


def _below(x: Array, bound: float) -> Array:
    return lax.lt(x, number(bound, x.dtype))


def _piecewise(
    left: Callable[..., Any], inside_left: Array, right: Callable[..., Any], x: Array, middle: float
) -> Array:
    """left(x) if inside_left, else right(x); each gets only arguments of its own range, so that no
    NaN reaches a derivative.
    """
    return lax.select_n(
        inside_left,
        right(choose(inside_left, middle, x)),
        left(choose(inside_left, x, like(middle, x))),
    )


# -- J and Y ---------------------------------------------------------------------------------------
def _wave(x: Array, order: int, second_kind: bool) -> Array:
    """sqrt(2 / (pi x)) (P cos(c) - Q sin(c)) for J, (P sin(c) + Q cos(c)) for Y, c = x - (order/2 +
    1/4) pi; x >= 8.
    """
    p_table, q_table = ((tables.P0_LARGE, tables.Q0_LARGE), (tables.P1_LARGE, tables.Q1_LARGE))[
        order
    ]
    t = affine(lax.div(like(128, x), lax.mul(x, x)), 1, -1)
    p, q = clenshaw(p_table, t), lax.div(clenshaw(q_table, t), x)
    # sin and cos of x minus an odd multiple of pi/4 by the sum formula, because subtracting it from
    # a large x would round
    sine, cosine, root = lax.sin(x), lax.cos(x), math.sqrt(0.5)
    total, difference = scaled(lax.add(sine, cosine), root), scaled(lax.sub(sine, cosine), root)
    c_cos, c_sin = (total, difference) if order == 0 else (difference, lax.neg(total))
    wave = (
        lax.add(lax.mul(p, c_sin), lax.mul(q, c_cos))
        if second_kind
        else lax.sub(lax.mul(p, c_cos), lax.mul(q, c_sin))
    )
    return lax.mul(lax.sqrt(lax.div(like(2 / math.pi, x), x)), wave)


def _near_zero(table: tables.Table, x: Array) -> Array:
    return clenshaw(table, affine(lax.mul(x, x), 1 / 32, -1))


def _finite_or(x: Array, at_infinity: float, value: Array) -> Array:
    return choose(lax.eq(lax.abs(x), number(math.inf, x.dtype)), at_infinity, value)


@jax.custom_jvp
def _j0(x: Array) -> Array:
    size = choose(lax.eq(lax.abs(x), number(math.inf, x.dtype)), 1, lax.abs(x))
    y = _piecewise(
        lambda s: _near_zero(tables.J0_SMALL, s),
        _below(size, 8),
        lambda s: _wave(s, 0, False),
        size,
        8,
    )
    return _finite_or(x, math.nan, y)


@jax.custom_jvp
def _j1(x: Array) -> Array:
    size = choose(lax.eq(lax.abs(x), number(math.inf, x.dtype)), 1, lax.abs(x))
    y = _piecewise(
        lambda s: lax.mul(s, _near_zero(tables.J1_SMALL, s)),
        _below(size, 8),
        lambda s: _wave(s, 1, False),
        size,
        8,
    )
    return _finite_or(
        x,
        math.nan,
        choose(lax.eq(x, number(0, x.dtype)), x, lax.select_n(_below(x, 0), y, lax.neg(y))),
    )


def _y0_near_zero(x: Array) -> Array:
    return lax.add(
        _near_zero(tables.Y0_SMALL, x),
        lax.mul(scaled(lax.log(x), 2 / math.pi), _near_zero(tables.J0_SMALL, x)),
    )


def _y1_near_zero(x: Array) -> Array:
    singular = lax.sub(
        lax.mul(lax.log(x), lax.mul(x, _near_zero(tables.J1_SMALL, x))), lax.div(like(1, x), x)
    )
    return lax.add(lax.mul(x, _near_zero(tables.Y1_SMALL, x)), scaled(singular, 2 / math.pi))


def _second_kind(near_zero: Callable[..., Any], order: int) -> Callable[..., Any]:
    def function(x: Array) -> Array:
        infinite = lax.eq(x, number(math.inf, x.dtype))
        positive = choose(lax.bitwise_or(infinite, lax.le(x, number(0, x.dtype))), 1, x)
        y = _piecewise(near_zero, _below(positive, 8), lambda s: _wave(s, order, True), positive, 8)
        y = choose(infinite, math.nan, y)
        return choose(lax.eq(x, number(0, x.dtype)), -math.inf, choose(_below(x, 0), math.nan, y))

    return function


# -- K ---------------------------------------------------------------------------------------------
def _modified_near_zero(table: tables.Table, x: Array) -> Array:
    return clenshaw(table, affine(lax.mul(x, x), 0.5, -1))


def _log_of_half(x: Array) -> Array:
    # half the least normal number would be 0
    return lax.sub(lax.log(x), number(math.log(2), x.dtype))


def _k0_near_zero(x: Array) -> Array:
    return lax.sub(
        _modified_near_zero(tables.K0_SMALL, x),
        lax.mul(_log_of_half(x), _modified_near_zero(tables.I0_SMALL, x)),
    )


def _k1_near_zero(x: Array) -> Array:
    i1 = lax.mul(x, _modified_near_zero(tables.I1_SMALL, x))
    return lax.add(
        lax.mul(_log_of_half(x), i1), lax.div(_modified_near_zero(tables.K1_SMALL, x), x)
    )


def _third_kind(
    near_zero: Callable[..., Any], table: tables.Table, scaled: bool
) -> Callable[..., Any]:
    """K, or exp(x) K(x) if scaled."""

    def small(x: Array) -> Array:
        return lax.mul(near_zero(x), lax.exp(x)) if scaled else near_zero(x)

    def large(x: Array) -> Array:
        y = lax.div(clenshaw(table, affine(lax.div(like(4, x), x), 1, -1)), lax.sqrt(x))
        return y if scaled else lax.mul(y, lax.exp(lax.neg(x)))

    def function(x: Array) -> Array:
        positive = choose(lax.le(x, number(0, x.dtype)), 1, x)
        y = _piecewise(small, _below(positive, 2), large, positive, 2)
        return choose(lax.eq(x, number(0, x.dtype)), math.inf, choose(_below(x, 0), math.nan, y))

    return function


# -- I ---------------------------------------------------------------------------------------------
@jax.custom_jvp
def _i0e(x: Array) -> Array:
    return lax.bessel_i0e(x)


@jax.custom_jvp
def _i1e(x: Array) -> Array:
    return choose(lax.eq(x, number(0, x.dtype)), 0, lax.bessel_i1e(x))


@jax.custom_jvp
def _i0(x: Array) -> Array:
    return lax.mul(lax.exp(lax.abs(x)), lax.bessel_i0e(x))


@jax.custom_jvp
def _i1(x: Array) -> Array:
    return lax.mul(lax.exp(lax.abs(x)), _i1e(x))


@jax.custom_jvp
def _spherical_j0(x: Array) -> Array:
    small = _below(lax.abs(x), 0.5)
    near, far = choose(small, x, like(0, x)), choose(small, 1, x)
    square, term, series = lax.mul(near, near), like(1, x), like(1, x)
    for k in range(1, 8):
        term = scaled(lax.mul(term, square), -1 / (2 * k * (2 * k + 1)))
        series = lax.add(series, term)
    return lax.select_n(small, _finite_or(x, 0, lax.div(lax.sin(far), far)), series)


_y0, _y1 = (
    jax.custom_jvp(_second_kind(_y0_near_zero, 0)),
    jax.custom_jvp(_second_kind(_y1_near_zero, 1)),
)
_k0, _k1 = (
    jax.custom_jvp(_third_kind(*parts, False))
    for parts in ((_k0_near_zero, tables.K0_LARGE), (_k1_near_zero, tables.K1_LARGE))
)
_k0e, _k1e = (
    jax.custom_jvp(_third_kind(*parts, True))
    for parts in ((_k0_near_zero, tables.K0_LARGE), (_k1_near_zero, tables.K1_LARGE))
)


# -- derivatives (Abramowitz and Stegun, 9.1.28 and 9.6.27) ----------------------------------------
def _over(y: Array, x: Array, at_zero: float) -> Array:
    zero = lax.eq(x, number(0, x.dtype))
    return choose(zero, at_zero, lax.div(y, choose(zero, 1, x)))


_SLOPES = {
    _j0: lambda x, y: lax.neg(_j1(x)),
    _j1: lambda x, y: lax.sub(_j0(x), _over(y, x, 0.5)),
    _y0: lambda x, y: lax.neg(_y1(x)),
    _y1: lambda x, y: lax.sub(_y0(x), lax.div(y, x)),
    _k0: lambda x, y: lax.neg(_k1(x)),
    _k1: lambda x, y: lax.neg(lax.add(_k0(x), lax.div(y, x))),
    _k0e: lambda x, y: lax.sub(y, _k1e(x)),
    _k1e: lambda x, y: lax.sub(lax.sub(y, _k0e(x)), lax.div(y, x)),
    _i0: lambda x, y: _i1(x),
    _i1: lambda x, y: lax.sub(_i0(x), _over(y, x, 0.5)),
    _i0e: lambda x, y: lax.sub(_i1e(x), lax.mul(sign(x), y)),
    _i1e: lambda x, y: lax.sub(lax.sub(_i0e(x), lax.mul(sign(x), y)), _over(y, x, 0.5)),
    _spherical_j0: lambda x, y: _over(lax.sub(lax.cos(x), y), x, 0),
}


for _function, _slope in _SLOPES.items():
    define_slopes(_function, _slope)


# -- Airy ------------------------------------------------------------------------------------------
def _airy_ai(x: Array) -> Array:
    """Ai: an expansion on [-4, 2], decaying beyond, a wave below (Abramowitz and Stegun, 10.4.59
    and 10.4.60).
    """

    def zeta(z: Array) -> Array:
        return scaled(lax.mul(z, lax.sqrt(z)), 2 / 3)

    def right(z: Array) -> Array:
        exponent = zeta(z)
        y = clenshaw(
            tables.AIRY_RIGHT, affine(lax.div(like(2 * (2 / 3) * 2**1.5, z), exponent), 1, -1)
        )
        return lax.div(
            lax.mul(y, lax.exp(lax.neg(exponent))),
            scaled(lax.sqrt(lax.sqrt(z)), 2 * math.sqrt(math.pi)),
        )

    def left(z: Array) -> Array:
        angle = zeta(z)
        ratio = lax.div(like(16 / 3, z), angle)
        t = affine(lax.mul(ratio, ratio), 2, -1)
        p, q = clenshaw(tables.AIRY_LEFT_P, t), lax.div(clenshaw(tables.AIRY_LEFT_Q, t), angle)
        sine, cosine, root = lax.sin(angle), lax.cos(angle), math.sqrt(0.5)
        c_cos, c_sin = scaled(lax.add(sine, cosine), root), scaled(lax.sub(sine, cosine), root)
        return lax.div(
            lax.add(lax.mul(p, c_cos), lax.mul(q, c_sin)),
            scaled(lax.sqrt(lax.sqrt(z)), math.sqrt(math.pi)),
        )

    def middle(z: Array) -> Array:
        return clenshaw(tables.AIRY_MIDDLE, affine(z, 1 / 3, 1 / 3))

    infinite = lax.eq(lax.abs(x), number(math.inf, x.dtype))
    finite = choose(infinite, 0, x)
    low, high = _below(finite, -4), lax.gt(finite, number(2, x.dtype))
    inside = lax.bitwise_not(lax.bitwise_or(low, high))
    y = _piecewise(middle, inside, lambda s: right(choose(high, s, like(2, s))), finite, 0)
    y = lax.select_n(low, y, left(choose(low, lax.neg(finite), like(4, finite))))
    return choose(infinite, math.nan, y)


_FUNCTIONS: dict[str, Any] = {
    "i0": _i0,
    "special_airy_ai": _airy_ai,
    "special_bessel_j0": _j0,
    "special_bessel_j1": _j1,
    "special_bessel_y0": _y0,
    "special_bessel_y1": _y1,
    "special_i0e": _i0e,
    "special_i1": _i1,
    "special_i1e": _i1e,
    "special_modified_bessel_i0": _i0,
    "special_modified_bessel_i1": _i1,
    "special_modified_bessel_k0": _k0,
    "special_modified_bessel_k1": _k1,
    "special_scaled_modified_bessel_k0": _k0e,
    "special_scaled_modified_bessel_k1": _k1e,
    "special_spherical_bessel_j0": _spherical_j0,
}
for _name, _fn in _FUNCTIONS.items():
    lowering(f"aten.{_name}")(unary(_fn, wide=True))
