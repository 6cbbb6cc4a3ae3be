"""Element-wise mathematics of two tensors beyond arithmetic: hypot, logaddexp, copysign, heaviside,
nextafter, ldexp.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax import Array, lax

from bridge.lowering.common.builders import binary, choose, define_slopes, like, number
from bridge.lowering.common.promotion import is_complex
from bridge.lowering.elementwise.arithmetic import aten_mul, aten_pow_of_scalar
from bridge.lowering.elementwise.unary import absolute, isinf, signbit
from bridge.lowering.registry import lowering


@jax.custom_jvp
def _hypot(a: Array, b: Array) -> Array:
    a, b = lax.abs(a), lax.abs(b)
    large, small = lax.max(a, b), lax.min(a, b)
    infinite = lax.bitwise_or(
        lax.eq(a, number(math.inf, a.dtype)), lax.eq(b, number(math.inf, b.dtype))
    )
    ratio = lax.div(small, choose(lax.eq(large, number(0, a.dtype)), 1, large))
    size = lax.mul(large, lax.sqrt(lax.add(lax.mul(ratio, ratio), number(1, a.dtype))))
    return choose(infinite, math.inf, size)


define_slopes(_hypot, lambda a, b, size: lax.div(a, size), lambda a, b, size: lax.div(b, size))


@jax.custom_jvp
def _copysign(a: Array, b: Array) -> Array:
    size = absolute(a)
    return lax.select_n(signbit(b), size, lax.neg(size))


def _flipped(a: Array, b: Array, y: Array) -> Array:
    """1 or -1; 0 at zeros and NaN at infinities, as in PyTorch."""
    zero = lax.eq(a, number(0, a.dtype))
    return lax.stop_gradient(choose(zero, 0, lax.div(y, choose(zero, 1, a))))


define_slopes(_copysign, _flipped, lambda a, b, y: like(0, y))


def _heaviside(x: Array, at_zero: Array) -> Array:
    zero = number(0, x.dtype)
    step = lax.convert_element_type(lax.gt(x, zero), x.dtype)
    return lax.select_n(lax.eq(x, zero), step, at_zero)


@jax.custom_jvp
def _logaddexp(a: Array, b: Array) -> Array:
    swap = lax.lt(lax.real(a), lax.real(b)) if is_complex(a) else lax.lt(a, b)
    low, high = lax.select_n(swap, b, a), lax.select_n(swap, a, b)
    # the difference of two equal infinities is NaN
    infinite = lax.bitwise_and(lax.eq(low, high), isinf(low))
    gap = choose(infinite, 0, lax.sub(low, high))
    return lax.select_n(infinite, lax.add(high, lax.log1p(lax.exp(gap))), high)


define_slopes(
    _logaddexp,
    lambda a, b, y: lax.logistic(lax.sub(a, b)),
    lambda a, b, y: lax.logistic(lax.sub(b, a)),
)


def _logaddexp2(a: Array, b: Array) -> Array:
    ln2 = number(math.log(2), a.dtype)
    return lax.div(_logaddexp(lax.mul(a, ln2), lax.mul(b, ln2)), ln2)


@jax.custom_jvp
def _nextafter(a: Array, b: Array) -> Array:
    """Computed on bit patterns, because XLA on CPU compares denormal numbers as zeros."""
    kind = np.dtype(f"int{a.dtype.itemsize * 8}")
    bits = [lax.bitcast_convert_type(x, kind) for x in (a, b)]
    none, one, sign, rest = (
        lax.full_like(bits[0], x) for x in (0, 1, np.iinfo(kind).min, np.iinfo(kind).max)
    )
    size_a, size_b = (lax.bitwise_and(x, rest) for x in bits)
    # the other sign, or nearer to zero
    inward = lax.bitwise_or(lax.lt(lax.bitwise_xor(*bits), none), lax.gt(size_a, size_b))
    moved = lax.select_n(inward, lax.add(bits[0], one), lax.sub(bits[0], one))
    moved = lax.select_n(
        lax.eq(size_a, none), moved, lax.bitwise_or(lax.bitwise_and(bits[1], sign), one)
    )
    same = lax.bitwise_or(lax.eq(*bits), lax.eq(lax.bitwise_or(size_a, size_b), none))
    found = lax.bitcast_convert_type(lax.select_n(same, moved, bits[1]), a.dtype)
    nan = lax.bitwise_or(lax.ne(a, a), lax.ne(b, b))
    return lax.select_n(nan, found, lax.full_like(a, np.nan))


define_slopes(_nextafter, lambda a, b, y: like(1, a), lambda a, b, y: like(0, b))


lowering("aten.hypot")(binary(_hypot, floating=True))
lowering("aten.copysign.Tensor", "aten.copysign.Scalar")(binary(_copysign, floating=True))
lowering("aten.nextafter")(binary(_nextafter, wide=False))
lowering("aten.logaddexp")(binary(_logaddexp, floating=True))
lowering("aten.logaddexp2")(binary(_logaddexp2, floating=True))


_step = binary(_heaviside)


@lowering("aten.heaviside")
def aten_heaviside(self: Array, values: Array) -> Array:
    """heaviside(Tensor self, Tensor values) -> Tensor"""
    if self.dtype != values.dtype:
        raise RuntimeError("heaviside is not yet implemented for tensors with different dtypes.")
    return _step(self, values)


@lowering("aten.ldexp.Tensor")
def aten_ldexp(self: Array, other: Array) -> Array:
    """ldexp.Tensor(Tensor self, Tensor other) -> Tensor"""
    return aten_mul(self, aten_pow_of_scalar(2.0, other))
