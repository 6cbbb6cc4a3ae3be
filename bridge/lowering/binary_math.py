"""Element-wise mathematics of two tensors beyond arithmetic: hypot, logaddexp, copysign, heaviside, nextafter, ldexp."""
from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax

from .arithmetic import aten_mul, aten_pow_of_scalar
from .elementwise import absolute, isinf, signbit
from .pointwise import binary, choose, define_slopes, like, number
from .promotion import is_complex
from .registry import lowering


@jax.custom_jvp
def _hypot(a: Any, b: Any) -> Any:
    a, b = lax.abs(a), lax.abs(b)
    large, small = lax.max(a, b), lax.min(a, b)
    infinite = lax.bitwise_or(lax.eq(a, number(math.inf, a.dtype)), lax.eq(b, number(math.inf, b.dtype)))
    ratio = lax.div(small, choose(lax.eq(large, number(0, a.dtype)), 1, large))
    size = lax.mul(large, lax.sqrt(lax.add(lax.mul(ratio, ratio), number(1, a.dtype))))
    return choose(infinite, math.inf, size)


define_slopes(_hypot, lambda a, b, size: lax.div(a, size), lambda a, b, size: lax.div(b, size))


def _copysign(a: Any, b: Any) -> Any:
    size = absolute(a)
    return lax.select_n(signbit(b), size, lax.neg(size))


def _heaviside(x: Any, at_zero: Any) -> Any:
    zero = number(0, x.dtype)
    step = lax.convert_element_type(lax.gt(x, zero), x.dtype)
    return lax.select_n(lax.eq(x, zero), step, at_zero)


@jax.custom_jvp
def _logaddexp(a: Any, b: Any) -> Any:
    swap = lax.lt(lax.real(a), lax.real(b)) if is_complex(a) else lax.lt(a, b)
    low, high = lax.select_n(swap, b, a), lax.select_n(swap, a, b)
    # two equal infinities have no difference
    infinite = lax.bitwise_and(lax.eq(low, high), isinf(low))
    gap = choose(infinite, 0, lax.sub(low, high))
    return lax.select_n(infinite, lax.add(high, lax.log1p(lax.exp(gap))), high)


define_slopes(_logaddexp, lambda a, b, y: lax.logistic(lax.sub(a, b)), lambda a, b, y: lax.logistic(lax.sub(b, a)))


def _logaddexp2(a: Any, b: Any) -> Any:
    ln2 = number(math.log(2), a.dtype)
    return lax.div(_logaddexp(lax.mul(a, ln2), lax.mul(b, ln2)), ln2)


@jax.custom_jvp
def _nextafter(a: Any, b: Any) -> Any:
    return lax.nextafter(a, b)


define_slopes(_nextafter, lambda a, b, y: like(1, a), lambda a, b, y: like(0, b))


lowering("aten.hypot")(binary(_hypot, floating=True))
lowering("aten.copysign.Tensor", "aten.copysign.Scalar")(binary(_copysign, floating=True))
lowering("aten.heaviside")(binary(_heaviside))
lowering("aten.nextafter")(binary(_nextafter))
lowering("aten.logaddexp")(binary(_logaddexp, floating=True))
lowering("aten.logaddexp2")(binary(_logaddexp2, floating=True))


@lowering("aten.ldexp.Tensor")
def aten_ldexp(self: Any, other: Any) -> Any:
    """ldexp.Tensor(Tensor self, Tensor other) -> Tensor"""
    return aten_mul(self, aten_pow_of_scalar(2.0, other))
