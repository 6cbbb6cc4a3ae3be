"""exp, sin, cos, tan, sinh, cosh, tanh, atan, atanh and others: complex numbers by their two parts,
real numbers by JAX's functions.

XLA's complex functions give 0.0 where C99 (annex G) and PyTorch give -0.0, and at infinities NaN in
both parts although one has a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from bridge.lowering.common.builders import choose, define_slopes, fused, like, number, scaled
from bridge.lowering.elementwise import branch_cuts


def _zero(x: Array) -> Array:
    return lax.eq(x, number(0, x.dtype))


def _signed(zero: Array, factor: Array) -> Array:
    """A zero times the sign of a factor that may be infinite; NaN counts as positive."""
    return lax.mul(
        zero, lax.select(lax.ne(factor, factor), lax.full_like(factor, 1), lax.sign(factor))
    )


def _times(p: Array, q: Array) -> Array:
    """p * q, which is zero if one of them is, even if the other is infinite or NaN."""
    y = lax.select(
        lax.bitwise_and(_zero(q), lax.bitwise_not(lax.is_finite(p))), _signed(q, p), lax.mul(p, q)
    )
    return lax.select(
        lax.bitwise_and(_zero(p), lax.bitwise_not(lax.is_finite(q))), _signed(p, q), y
    )


def _led(p: Array, q: Array, argument: Array) -> Array:
    """p * q, or |p| if q is NaN and the argument of the function that gave p is infinite."""
    lost = lax.bitwise_and(lax.eq(lax.abs(argument), number(math.inf, p.dtype)), lax.ne(q, q))
    return lax.select(lost, lax.abs(p), _times(p, q))


def _wound(size: Array, a: Array, angle: Array) -> tuple[Array, Array]:
    """size (cos angle + i sin angle); size is a power with the exponent a."""
    # stays NaN even if size is 0
    lost = lax.bitwise_and(lax.is_finite(a), lax.bitwise_not(lax.is_finite(angle)))
    angle = choose(lost, math.nan, angle)
    size = choose(lost, 1, size)
    return _led(size, lax.cos(angle), a), _times(size, lax.sin(angle))


def _parts_of(x: Array) -> tuple[Array, Array]:
    return lax.real(x), lax.imag(x)


def _by_parts(parts: Callable, real: Callable) -> tuple[Callable, Any]:
    """A function that uses parts(real, imaginary) for complex arrays and real for real ones; and
    parts alone, for define_slopes.
    """

    @jax.custom_jvp
    def of_complex(x: Array) -> Array:
        return lax.complex(*parts(lax.real(x), lax.imag(x)))

    together = fused(of_complex)
    return lambda x: together(x) if x.dtype.kind == "c" else real(x), of_complex


def _on_axes(function: Callable) -> Callable:
    """XLA's function, which maps both axes to themselves, with the sign of the part that is zero
    corrected.
    """

    def parts(a: Array, b: Array) -> tuple[Array, Array]:
        re, im = _parts_of(function(lax.complex(a, b)))
        return lax.select(_zero(a), a, re), lax.select(_zero(b), b, im)

    return parts


def _in_quadrants(function: Callable) -> Callable:
    """XLA's function, with the signs of the argument's parts, zeros included: these signs select
    the side of a cut.
    """

    def parts(a: Array, b: Array) -> tuple[Array, Array]:
        re, im = _parts_of(function(lax.complex(a, b)))
        return jnp.copysign(re, a), jnp.copysign(im, b)

    return parts


def _expm1_parts(a: Array, b: Array) -> tuple[Array, Array]:
    re, im = _parts_of(lax.expm1(lax.complex(a, b)))
    return re, lax.select(_zero(b), b, im)


exp, _exp = _by_parts(lambda a, b: _wound(lax.exp(a), a, b), lax.exp)
sin, _sin = _by_parts(
    lambda a, b: (_times(lax.sin(a), lax.cosh(b)), _led(lax.sinh(b), lax.cos(a), b)), lax.sin
)
cos, _cos = _by_parts(
    lambda a, b: (_led(lax.cosh(b), lax.cos(a), b), lax.neg(_times(lax.sin(a), lax.sinh(b)))),
    lax.cos,
)
sinh, _sinh = _by_parts(
    lambda a, b: (_led(lax.sinh(a), lax.cos(b), a), _times(lax.cosh(a), lax.sin(b))), lax.sinh
)
cosh, _cosh = _by_parts(
    lambda a, b: (_led(lax.cosh(a), lax.cos(b), a), _times(lax.sinh(a), lax.sin(b))), lax.cosh
)
tan, _tan = _by_parts(_on_axes(lax.tan), lax.tan)
tanh, _tanh = _by_parts(_on_axes(lax.tanh), lax.tanh)
atan, _atan = _by_parts(_in_quadrants(lax.atan), lax.atan)
_real_atanh = jax.custom_jvp(lax.atanh)
atanh, _atanh = _by_parts(_in_quadrants(lax.atanh), _real_atanh)
expm1, _expm1 = _by_parts(_expm1_parts, lax.expm1)

define_slopes(_exp, lambda x, y: y)
define_slopes(_sin, lambda x, y: _cos(x))
define_slopes(_cos, lambda x, y: lax.neg(_sin(x)))
define_slopes(_sinh, lambda x, y: _cosh(x))
define_slopes(_cosh, lambda x, y: _sinh(x))
define_slopes(_tan, lambda x, y: lax.add(number(1, y.dtype), lax.mul(y, y)))
define_slopes(_tanh, lambda x, y: lax.sub(number(1, y.dtype), lax.mul(y, y)))
define_slopes(_atan, lambda x, y: lax.reciprocal(lax.add(number(1, x.dtype), lax.mul(x, x))))
for _function in (_atanh, _real_atanh):
    define_slopes(
        _function, lambda x, y: lax.reciprocal(lax.sub(number(1, x.dtype), lax.mul(x, x)))
    )
define_slopes(_expm1, lambda x, y: _exp(x))


def _power_of_two(a: Array) -> Array:
    return lax.pow(number(2, a.dtype), a)  # exact if a is whole; lax.exp2 is off by 4e-6


def _exp2_parts(a: Array, b: Array) -> tuple[Array, Array]:
    return _wound(_power_of_two(a), a, scaled(b, math.log(2)))


exp2, _exp2 = _by_parts(_exp2_parts, _power_of_two)
_real_rsqrt = jax.custom_jvp(lax.rsqrt)
rsqrt, _rsqrt = _by_parts(
    lambda a, b: _parts_of(lax.div(like(1, y := branch_cuts.sqrt(lax.complex(a, b))), y)),
    _real_rsqrt,
)
define_slopes(_exp2, lambda x, y: scaled(y, math.log(2)))
define_slopes(_rsqrt, lambda x, y: scaled(lax.div(y, x), -0.5))
define_slopes(_real_rsqrt, lambda x, y: scaled(lax.mul(y, lax.mul(y, y)), -0.5))
