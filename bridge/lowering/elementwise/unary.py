"""Element-wise operators of one tensor: arithmetic, exponentials, trigonometry, rounding, sign,
tests, and their backward formulas.

Operators of two tensors are in arithmetic.py and comparison.py, copies and casts in copies.py,
complex parts in complex_parts.py, exp, sin and their kin for complex numbers in complex_trig.py,
special functions in the folder special.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common.builders import align, choose, fused, like, number, unary
from bridge.lowering.common.promotion import is_complex, promote
from bridge.lowering.elementwise import branch_cuts, complex_trig
from bridge.lowering.registry import lowering


# -- functions that lax lacks, or whose values or derivatives differ from torch's ------------------
def _log_base(base: int) -> Callable:
    scale = 1 / math.log(base)

    def log(x: Array) -> Array:
        y = lax.log(x)
        if is_complex(x):  # part by part, because an infinity times 0 is NaN
            return lax.complex(
                *(lax.mul(part(y), number(scale, part(y).dtype)) for part in (lax.real, lax.imag))
            )
        y = lax.mul(y, number(scale, x.dtype))
        # log(8)/log(2) differs from 3 by one rounding, and floor(log2(x)) is common: a result next
        # to an integer becomes that integer
        gap = lax.sub(lax.round(y), y)
        near = lax.le(
            lax.abs(gap), lax.mul(lax.abs(y), number(2 * float(np.finfo(x.dtype).eps), x.dtype))
        )
        return lax.add(y, lax.stop_gradient(choose(near, gap, like(0, y))))

    return log


def trunc(x: Array) -> Array:
    """x rounded toward zero."""
    return lax.select_n(lax.lt(x, number(0, x.dtype)), lax.floor(x), lax.ceil(x))


def sign(x: Array) -> Array:
    """1, -1 or 0, by comparison, because torch gives NaN the sign 0."""
    if x.dtype == np.bool_:
        return x
    zero = number(0, x.dtype)
    return lax.sub(
        lax.convert_element_type(lax.gt(x, zero), x.dtype),
        lax.convert_element_type(lax.lt(x, zero), x.dtype),
    )


def sgn(x: Array) -> Array:
    """x / |x|, and 0 at 0 with derivative 0."""
    if not is_complex(x):
        return sign(x)
    zero = lax.eq(x, number(0, x.dtype))
    size = lax.abs(choose(zero, 1, x))
    return choose(zero, 0, lax.complex(lax.div(lax.real(x), size), lax.div(lax.imag(x), size)))


def signbit(x: Array) -> Array:
    """True for negative values, -0.0 and NaNs that carry the sign bit."""
    if x.dtype.kind in "ub":
        return lax.broadcast(np.False_, x.shape)
    bits = x if x.dtype.kind == "i" else lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    return lax.lt(bits, number(0, bits.dtype))


@jax.custom_jvp
def absolute(x: Array) -> Array:
    """|x|, with derivative 0 at 0 (JAX has 1); infinite if one part of a complex number is,
    even if the other is NaN.
    """
    if not is_complex(x):
        return x if x.dtype.kind in "ub" else lax.abs(x)
    infinite = lax.bitwise_or(isinf(lax.real(x)), isinf(lax.imag(x)))
    return choose(infinite, math.inf, lax.abs(x))


@absolute.defjvp
def _absolute_jvp(primals: tuple, tangents: tuple) -> tuple:
    (x,), (dx,) = primals, tangents
    slope = sgn(x)
    change = lax.mul(slope, dx) if not is_complex(x) else lax.real(lax.mul(lax.conj(slope), dx))
    return absolute(x), change


@jax.custom_jvp
def _relu(x: Array) -> Array:
    """relu by selection, not by a maximum, because PyTorch keeps -0.0."""
    return choose(lax.lt(x, number(0, x.dtype)), 0, x)


@_relu.defjvp
def _relu_jvp(primals: tuple, tangents: tuple) -> tuple:
    """0 at 0, and 1 at NaN, as in torch's threshold_backward of the result."""
    y = _relu(*primals)
    return y, choose(lax.le(y, number(0, y.dtype)), 0, tangents[0])


def isnan(x: Array) -> Array:
    """Whether each element is NaN; False for integers."""
    return lax.broadcast(np.False_, x.shape) if x.dtype.kind in "iub" else lax.ne(x, x)


def isinf(x: Array) -> Array:
    """Whether each element is infinite, for complex numbers in either part."""
    if x.dtype.kind in "iub":
        return lax.broadcast(np.False_, x.shape)
    if is_complex(x):
        return lax.bitwise_or(isinf(lax.real(x)), isinf(lax.imag(x)))
    return lax.eq(lax.abs(x), number(math.inf, x.dtype))


def _isfinite(x: Array) -> Array:
    if x.dtype.kind in "iub":
        return lax.broadcast(np.True_, x.shape)
    if is_complex(x):
        return lax.bitwise_and(lax.is_finite(lax.real(x)), lax.is_finite(lax.imag(x)))
    return lax.is_finite(x)


def _equals(value: float) -> Callable:
    return lambda x: (
        lax.broadcast(np.False_, x.shape)
        if x.dtype.kind in "iub"
        else lax.eq(x, number(value, x.dtype))
    )


def _keep_ints(fn: Callable) -> Callable:
    """fn for floating arrays; integers are returned unchanged."""
    return lambda x: x if x.dtype.kind in "iub" else fn(x)


def _no_bools(name: str, fn: Callable) -> Callable:
    def checked(x: Array) -> Array:
        if x.dtype == np.bool_:
            raise RuntimeError(
                f"self: {name} is not defined for torch.bool; use torch.logical_not, or convert "
                "the tensor first"
            )
        return fn(x)

    return checked


# name -> function; integers become the default float first
_FLOAT = {
    "cos": complex_trig.cos,
    "cosh": complex_trig.cosh,
    "deg2rad": lambda x: lax.mul(x, number(math.pi / 180, x.dtype)),
    "exp": complex_trig.exp,
    "log": lax.log,
    "log1p": lax.log1p,
    "rad2deg": lambda x: lax.mul(x, number(180 / math.pi, x.dtype)),
    "reciprocal": lax.reciprocal,
    "rsqrt": complex_trig.rsqrt,
    "sigmoid": lax.logistic,
    "sin": complex_trig.sin,
    "sinh": complex_trig.sinh,
    "sqrt": branch_cuts.sqrt,
    "tan": complex_trig.tan,
    "tanh": complex_trig.tanh,
    "atan": complex_trig.atan,
}
# the same, but half types are computed in float32, because XLA expands these functions into steps
# that each round
_FLOAT_WIDE = {
    "acos": fused()(branch_cuts.acos),
    "acosh": fused()(branch_cuts.acosh),
    "asin": fused()(branch_cuts.asin),
    "asinh": fused()(branch_cuts.asinh),
    "atanh": complex_trig.atanh,
    "exp2": complex_trig.exp2,
    "expm1": complex_trig.expm1,
    "log2": _log_base(2),
    "log10": _log_base(10),
}
# name -> function that takes every dtype
_ANY: dict[str, Any] = {
    "abs": fused(absolute),
    "bitwise_not": lax.bitwise_not,
    "ceil": _keep_ints(lax.ceil),
    "floor": _keep_ints(lax.floor),
    "frac": fused(lambda x: lax.sub(x, trunc(x))),
    "isfinite": fused(_isfinite),
    "isinf": fused(isinf),
    "isnan": fused(isnan),
    "isneginf": fused(_equals(-math.inf)),
    "isposinf": fused(_equals(math.inf)),
    "logical_not": lambda x: (
        lax.bitwise_not(x) if x.dtype == np.bool_ else lax.eq(x, number(0, x.dtype))
    ),
    "neg": _no_bools("neg", lax.neg),
    "relu": _no_bools("relu", fused(_relu)),
    "round": _keep_ints(
        functools.partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN)
    ),
    "sgn": fused(sgn),
    "sign": fused(sign),
    "signbit": fused(signbit),
    "trunc": _keep_ints(fused(trunc)),
}
for _name, _fn in _FLOAT.items():
    lowering(f"aten.{_name}")(unary(_fn))
for _name, _fn in _FLOAT_WIDE.items():
    lowering(f"aten.{_name}")(unary(_fn, wide=True))
for _name, _fn in _ANY.items():
    lowering(f"aten.{_name}")(_fn)


# -- with options ----------------------------------------------------------------------------------
@lowering("aten.round.decimals")
def aten_round_decimals(self: Array, *, decimals: int) -> Array:
    """round.decimals(Tensor self, *, int decimals) -> Tensor"""
    if self.dtype.kind in "iub":
        return self
    return _round_decimals(self, decimals)


@functools.partial(fused, static_argnums=1)
def _round_decimals(x: Array, decimals: int) -> Array:
    even = lax.RoundingMethod.TO_NEAREST_EVEN
    scale = number(10.0 ** abs(decimals), x.dtype)
    if decimals < 0:
        return lax.mul(lax.round(lax.div(x, scale), even), scale)
    return lax.div(lax.round(lax.mul(x, scale), even), scale)


@lowering("aten.nan_to_num")
def aten_nan_to_num(
    self: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Array:
    """nan_to_num(Tensor self, float? nan=None, float? posinf=None, float? neginf=None) -> Tensor"""
    return self if self.dtype.kind in "iub" else _nan_to_num(self, nan, posinf, neginf)


@functools.partial(fused, static_argnums=(1, 2, 3))
def _nan_to_num(x: Array, nan: float | None, posinf: float | None, neginf: float | None) -> Array:
    if is_complex(x):
        return lax.complex(
            _nan_to_num(lax.real(x), nan, posinf, neginf),
            _nan_to_num(lax.imag(x), nan, posinf, neginf),
        )
    limits = jnp.finfo(x.dtype)
    high = limits.max if posinf is None else posinf
    low = limits.min if neginf is None else neginf
    y = choose(lax.ne(x, x), 0.0 if nan is None else nan, x)
    y = choose(lax.eq(x, number(math.inf, x.dtype)), high, y)
    return choose(lax.eq(x, number(-math.inf, x.dtype)), low, y)


@lowering("aten.frexp.Tensor")
def aten_frexp(self: Array) -> tuple[Array, Array]:
    """frexp.Tensor(Tensor self) -> (Tensor mantissa, Tensor exponent)"""
    return _frexp(self)


@fused
def _frexp(x: Array) -> tuple[Array, Array]:
    return _mantissa(x), _parts(x)[1]


def _parts(x: Array) -> tuple[Array, Array]:
    """Mantissa and exponent from bit patterns, because XLA on CPU treats
    denormal numbers as zeros.
    """
    kept, size = jnp.finfo(x.dtype).nmant, x.dtype.itemsize * 8
    bias, kind = jnp.finfo(x.dtype).maxexp - 2, np.dtype(f"int{size}")
    bits = lax.bitcast_convert_type(x, kind)
    fraction = lax.bitwise_and(bits, like((1 << kept) - 1, bits))
    field = lax.bitwise_and(
        lax.shift_right_logical(bits, like(kept, bits)), like((1 << (size - 1 - kept)) - 1, bits)
    )
    # a denormal number has no leading one, so it is shifted until it has one
    denormal, shift = (
        lax.eq(field, like(0, bits)),
        lax.sub(lax.clz(fraction), like(size - 1 - kept, bits)),
    )
    shifted = lax.bitwise_and(lax.shift_left(fraction, shift), like((1 << kept) - 1, bits))
    exponent = lax.sub(
        lax.select_n(denormal, field, lax.sub(like(1, bits), shift)), like(bias, bits)
    )
    sign = lax.bitwise_and(bits, like(np.iinfo(kind).min, bits))
    mantissa = lax.bitwise_or(
        lax.bitwise_or(sign, like(bias << kept, bits)), lax.select_n(denormal, fraction, shifted)
    )
    # zeros, infinities and NaN stay as they are
    itself = lax.bitwise_or(
        lax.eq(lax.bitwise_or(field, fraction), like(0, bits)),
        lax.eq(field, like((1 << (size - 1 - kept)) - 1, bits)),
    )
    mantissa = lax.bitcast_convert_type(lax.select_n(itself, mantissa, bits), x.dtype)
    return mantissa, lax.convert_element_type(choose(itself, 0, exponent), np.int32)


@jax.custom_jvp
def _mantissa(x: Array) -> Array:
    return _parts(x)[0]


@_mantissa.defjvp
def _mantissa_jvp(primals: tuple, tangents: tuple) -> tuple:
    mantissa, (_, exponent) = _mantissa(*primals), _parts(*primals)
    half = lax.div(exponent, like(2, exponent))
    two = number(2, mantissa.dtype)  # two steps: 2**-exponent itself may overflow
    for part in (half, lax.sub(exponent, half)):
        tangents = (
            lax.mul(
                tangents[0], lax.pow(two, lax.convert_element_type(lax.neg(part), mantissa.dtype))
            ),
        )
    return mantissa, *tangents


# -- derivatives as operators: torch's autograd calls these when it runs inside a trace ------------
@lowering("aten.sigmoid_backward")
def aten_sigmoid_backward(grad_output: Array, output: Array) -> Array:
    """sigmoid_backward(Tensor grad_output, Tensor output) -> Tensor"""
    return _sigmoid_backward(*promote(grad_output, output))


@fused
def _sigmoid_backward(g: Array, y: Array) -> Array:
    slope = lax.mul(y, lax.sub(number(1, y.dtype), y))
    return lax.mul(g, lax.conj(slope) if is_complex(y) else slope)


@lowering("aten.tanh_backward")
def aten_tanh_backward(grad_output: Array, output: Array) -> Array:
    """tanh_backward(Tensor grad_output, Tensor output) -> Tensor"""
    return _tanh_backward(*promote(grad_output, output))


@fused
def _tanh_backward(g: Array, y: Array) -> Array:
    slope = lax.sub(number(1, y.dtype), lax.mul(y, y))
    return lax.mul(g, lax.conj(slope) if is_complex(y) else slope)


@lowering("aten.threshold_backward")
def aten_threshold_backward(grad_output: Array, self: Array, threshold: float) -> Array:
    """threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor"""
    return _threshold_backward(*promote(grad_output, self), threshold)


@fused
def _threshold_backward(g: Array, x: Array, threshold: Array) -> Array:
    g, x = align(g, x)
    return choose(lax.le(x, lax.convert_element_type(threshold, x.dtype)), 0, g)
