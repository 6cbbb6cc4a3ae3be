"""Element-wise arithmetic of two and three tensors: add, mul, div and its rounding modes, pow,
clamp, lerp, maximum, bitwise.

Comparisons, logic and where are in comparison.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from bridge.convert import dtypes
from bridge.lowering.common import varying
from bridge.lowering.common.builders import (
    align,
    binary,
    choose,
    define_slopes,
    fused,
    like,
    number,
)
from bridge.lowering.common.promotion import (
    cast,
    is_array,
    is_complex,
    is_floating,
    opmath,
    result_dtype,
)
from bridge.lowering.common.provided import refuse
from bridge.lowering.elementwise.unary import trunc
from bridge.lowering.registry import lowering


# -- add, sub, mul ---------------------------------------------------------------------------------
def _add(a: Array, b: Array) -> Array:
    return lax.bitwise_or(a, b) if a.dtype == np.bool_ else lax.add(a, b)


def _sub(a: Array, b: Array) -> Array:
    return lax.sub(a, b)


def _refuse_bool(*operands: Any) -> None:
    truths = [isinstance(x, bool) or (is_array(x) and x.dtype == np.bool_) for x in operands]
    if all(truths):
        raise RuntimeError(
            "Subtraction, the `-` operator, with two bool tensors is not supported. Use the `^` or "
            "`logical_xor()` operator instead."
        )
    if any(truths):
        raise RuntimeError(
            "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying "
            "to invert a mask, use the `~` or `logical_not()` operator instead."
        )


def _mul(a: Array, b: Array) -> Array:
    return lax.bitwise_and(a, b) if a.dtype == np.bool_ else lax.mul(a, b)


_plain_add, _plain_sub = binary(_add, primitive=True), binary(_sub, primitive=True)
aten_mul = lowering("aten.mul.Tensor", "aten.mul.Scalar")(binary(_mul, primitive=True))


@functools.partial(fused, static_argnums=(3, 4, 5))
def _scaled(
    a: Array, b: Array, alpha: Any, negative: bool, work: np.dtype, dtype: np.dtype
) -> Array:
    a, b = align(cast(a, work), cast(b, work))
    return cast((_sub if negative else _add)(a, _mul(b, like(alpha, b))), dtype)


def _add_scaled(self: Array, other: Any, alpha: Any, negative: bool) -> Array:
    dtype = result_dtype(self, other)
    if dtype.kind in "iub" and isinstance(alpha, float | complex):
        raise RuntimeError(f"alpha: expected an integer for integral tensors, got {alpha}")
    if dtype != np.bool_ and isinstance(alpha, bool):
        raise RuntimeError("alpha: a bool is only accepted for bool tensors")
    work = opmath(dtype)
    return _scaled(
        number(self, work), number(other, work), number(alpha, work), negative, work, dtype
    )


@lowering("aten.add.Tensor", "aten.add.Scalar")
def aten_add(self: Array, other: Any, alpha: Any = 1) -> Array:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return (
        _plain_add(self, other)
        if type(alpha) is int and alpha == 1
        else _add_scaled(self, other, alpha, False)
    )


@lowering("aten.sub.Tensor", "aten.sub.Scalar")
def aten_sub(self: Any, other: Any, alpha: Any = 1) -> Array:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    _refuse_bool(self, other)
    return (
        _plain_sub(self, other)
        if type(alpha) is int and alpha == 1
        else _add_scaled(self, other, alpha, True)
    )


@lowering("aten.rsub.Tensor", "aten.rsub.Scalar")
def aten_rsub(self: Array, other: Any, alpha: Any = 1) -> Array:
    """rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return aten_sub(other, self, alpha=alpha)


# -- division --------------------------------------------------------------------------------------
def _div_floor(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iub":
        quotient = lax.div(a, b)
        return lax.sub(quotient, lax.convert_element_type(_rounds_below(lax.rem(a, b), b), a.dtype))
    # Python's floor division: (a - remainder) / b is whole except for rounding, also if a / b
    # itself rounds up to an integer
    zero, one = number(0, a.dtype), number(1, a.dtype)
    ratio, remainder = lax.div(a, b), lax.rem(a, b)
    quotient = lax.div(lax.sub(a, remainder), b)
    quotient = lax.select_n(_rounds_below(remainder, b), quotient, lax.sub(quotient, one))
    down = lax.floor(quotient)
    whole = lax.select_n(
        lax.gt(lax.sub(quotient, down), number(0.5, a.dtype)), down, lax.add(down, one)
    )
    signed_zero = lax.mul(lax.sign(ratio), zero)
    whole = lax.select_n(lax.eq(quotient, zero), whole, signed_zero)
    return lax.stop_gradient(lax.select_n(lax.eq(b, zero), whole, ratio))


def _rounds_below(remainder: Array, divisor: Array) -> Array:
    """Whether the truncated remainder's sign differs from the divisor's, so that the floor is one
    less.
    """
    zero = number(0, divisor.dtype)
    return lax.bitwise_and(
        lax.ne(remainder, zero), lax.ne(lax.lt(remainder, zero), lax.lt(divisor, zero))
    )


def _div_trunc(a: Array, b: Array) -> Array:
    return lax.div(a, b) if a.dtype.kind in "iub" else lax.stop_gradient(trunc(lax.div(a, b)))


@jax.custom_jvp
def _divide(a: Array, b: Array) -> Array:
    return lax.div(a, b)


@functools.partial(_divide.defjvp, symbolic_zeros=True)
def _divide_jvp(primals: tuple, tangents: tuple) -> tuple:
    """(da - (a/b) db) / b. JAX's rule contains a * b**-2, which overflows for small b (in float16
    below 0.004).
    """
    quotient, (da, db) = _divide(*primals), tangents
    if isinstance(db, SymbolicZero):
        change = like(0, quotient) if isinstance(da, SymbolicZero) else da
    else:
        change = lax.neg(lax.mul(quotient, db))
        change = change if isinstance(da, SymbolicZero) else lax.add(da, change)
    return quotient, _divide(change, primals[1])


_divide_arrays, _divide_by_number = (
    binary(_divide, floating=True),
    binary(lax.div, floating=True, primitive=True),
)
_floor_divide, _trunc_divide = binary(_div_floor), binary(_div_trunc)


@lowering("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def aten_div(self: Array, other: Any) -> Array:
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""
    return _divide_arrays(self, other) if is_array(other) else _divide_by_number(self, other)


def _checked_divisor(self: Any, other: Any) -> Any:
    if np.size(self) and result_dtype(self, other).kind in "iub":
        if is_array(other):
            refuse(
                lax.eq(other, lax.full_like(other, 0)),
                "ZeroDivisionError: other: an integer divided by zero",
            )
        elif other == 0:
            raise RuntimeError("ZeroDivisionError: other: an integer divided by zero")
    return other


@lowering("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def aten_div_mode(self: Array, other: Any, *, rounding_mode: str | None) -> Array:
    """div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"""
    if rounding_mode is None:
        return aten_div(self, other)
    if rounding_mode not in ("floor", "trunc"):
        raise RuntimeError(
            f"rounding_mode: expected None, 'trunc' or 'floor', got {rounding_mode!r}"
        )
    return (_floor_divide if rounding_mode == "floor" else _trunc_divide)(
        self, _checked_divisor(self, other)
    )


@lowering("aten.floor_divide", "aten.floor_divide.Scalar", pointwise=True)
def aten_floor_divide(self: Array, other: Any) -> Array:
    """floor_divide(Tensor self, Tensor other) -> Tensor"""
    return _floor_divide(self, _checked_divisor(self, other))


def _remainder(a: Array, b: Array) -> Array:
    rest = lax.rem(a, b)
    return lax.select_n(_rounds_below(rest, b), rest, lax.add(rest, b))


_plain_remainder, _plain_fmod = binary(_remainder), binary(lax.rem)


@lowering("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def aten_remainder(self: Any, other: Any) -> Array:
    """remainder.Tensor(Tensor self, Tensor other) -> Tensor"""
    return _plain_remainder(self, _checked_divisor(self, other))


@lowering("aten.fmod.Tensor", "aten.fmod.Scalar")
def aten_fmod(self: Array, other: Any) -> Array:
    """fmod.Tensor(Tensor self, Tensor other) -> Tensor"""
    return _plain_fmod(self, _checked_divisor(self, other))


# -- pow -------------------------------------------------------------------------------------------
def _int_pow(base: Array, exponent: Array) -> Array:
    """base ** exponent by squaring, wrapping around; a negative exponent gives 1/base**n truncated,
    as torch does.
    """
    one, zero = like(1, base), number(0, base.dtype)
    if base.dtype.kind == "i":
        odd = lax.bitwise_and(exponent, one)
        unit = choose(lax.eq(odd, one), base, one)  # the result for the bases 1 and -1
        is_unit = lax.eq(lax.abs(base), one)
        inverse = lax.select_n(is_unit, like(0, base), unit)

    def step(state: tuple) -> tuple:
        left, square, result = state
        odd = lax.eq(lax.bitwise_and(left, one), one)
        return (
            lax.shift_right_logical(left, one),
            lax.mul(square, square),
            lax.select_n(odd, result, lax.mul(result, square)),
        )

    power = exponent if base.dtype.kind == "u" else lax.max(exponent, like(0, base))
    result = varying.while_loop(lambda s: jnp.any(lax.gt(s[0], zero)), step, (power, base, one))[2]
    return (
        result if base.dtype.kind == "u" else lax.select_n(lax.lt(exponent, zero), result, inverse)
    )


@jax.custom_jvp
def _float_pow(base: Array, exponent: Array) -> Array:
    return lax.pow(base, exponent)


def _pow_by_base(x: Array, n: Array, y: Array) -> Array:
    still = lax.eq(n, number(0, n.dtype))
    return choose(
        still, 0, lax.mul(n, _float_pow(x, lax.sub(choose(still, 1, n), number(1, n.dtype))))
    )


def _pow_by_exponent(x: Array, n: Array, y: Array) -> Array:
    """The derivative with respect to the exponent; it is 0 at 0 ** (exponent >= 0)."""
    zero = number(0, x.dtype)
    flat = lax.bitwise_and(
        lax.eq(x, zero), lax.ge(lax.real(n), lax.real(zero)) if is_complex(n) else lax.ge(n, zero)
    )
    return choose(flat, 0, lax.mul(y, lax.log(choose(flat, 1, x))))


define_slopes(_float_pow, _pow_by_base, _pow_by_exponent)


def _pow(base: Array, exponent: Array) -> Array:
    if base.dtype == np.bool_:
        return lax.bitwise_or(base, lax.bitwise_not(exponent))
    return _int_pow(base, exponent) if base.dtype.kind in "iu" else _float_pow(base, exponent)


aten_pow = lowering("aten.pow.Tensor_Tensor")(binary(_pow))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _half_power(x: Array, exponent: float) -> Array:
    """x**exponent for an odd number of halves, with roots of their own functions in the derivatives
    too, as in PyTorch: NaN at -inf.
    """
    known = {0.5: lax.sqrt, -0.5: lax.rsqrt}.get(exponent)
    return known(x) if known else lax.pow(x, number(exponent, x.dtype))


@_half_power.defjvp
def _half_power_jvp(exponent: float, primals: tuple, tangents: tuple) -> tuple:
    slope = lax.mul(_half_power(primals[0], exponent - 1), number(exponent, primals[0].dtype))
    return _half_power(*primals, exponent), lax.mul(slope, tangents[0])


# exponents that have a cheaper function than pow
_POWERS: dict[float, Callable] = {
    -2.0: lambda x: lax.integer_pow(x, -2),
    -1.0: lax.reciprocal,
    -0.5: lambda x: _half_power(x, -0.5),
    0.0: fused(lambda x: lax.full_like(x, 1)),
    0.5: lambda x: _half_power(x, 0.5),
    1.0: lambda x: x,
    1.5: lambda x: _half_power(x, 1.5),
    2.0: lambda x: lax.integer_pow(x, 2),
    3.0: lambda x: lax.integer_pow(x, 3),
}


@lowering("aten.pow.Tensor_Scalar")
def aten_pow_scalar(self: Array, exponent: Any) -> Array:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    dtype = result_dtype(self, exponent)
    if dtype.kind in "iub":
        if exponent < 0:
            raise RuntimeError(
                f"exponent: integers to negative integer powers are not allowed, got {exponent}"
            )
        return aten_pow(self, exponent)
    x = cast(self, dtype)
    known = None if isinstance(exponent, complex) else _POWERS.get(float(exponent))
    if known is not None and opmath(dtype) == dtype:
        return known(x)
    return _pow_number(x, number(exponent, opmath(dtype)), float(exponent) if known else None)


@functools.partial(fused, static_argnums=2)
def _pow_number(x: Array, exponent: Any, known: float | None) -> Array:
    wide = cast(x, opmath(x.dtype))
    # lax.pow's rule for a constant exponent is torch's, n * x**(n-1)
    return cast(lax.pow(wide, exponent) if known is None else _POWERS[known](wide), x.dtype)


@lowering("aten.pow.Scalar")
def aten_pow_of_scalar(self: Any, exponent: Array) -> Array:
    """pow.Scalar(Scalar self, Tensor exponent) -> Tensor"""
    if isinstance(self, bool) and exponent.dtype.kind == "b" and exponent.size:
        raise NotImplementedError(
            "exponent: pow of a bool by bools is not implemented; expected a tensor of numbers, or "
            "a number as base"
        )
    return aten_pow(self, exponent)


# -- the larger, the smaller, clamp ----------------------------------------------------------------
def _fmax(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iub":
        return lax.max(a, b)
    return lax.select_n(lax.bitwise_or(lax.ge(a, b), lax.ne(b, b)), b, a)


def _fmin(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iub":
        return lax.min(a, b)
    return lax.select_n(lax.bitwise_or(lax.le(a, b), lax.ne(b, b)), b, a)


def _unless_beyond(beyond: Callable) -> Callable:
    """The derivative in a of maximum or minimum: 0 if the other operand is the result, half at a
    tie, and 1 in both beside a NaN.
    """
    return lambda a, b: choose(beyond(a, b), 0, choose(lax.eq(a, b), 0.5, like(1, a)))


def _extremum(fn: Callable, beyond: Callable) -> Callable:
    function, slope = jax.custom_jvp(fn), _unless_beyond(beyond)
    define_slopes(function, lambda a, b, y: slope(a, b), lambda a, b, y: slope(b, a))
    return lambda a, b: fn(a, b) if a.dtype.kind in "iub" else function(a, b)


_maximum, _minimum = _extremum(lax.max, lax.lt), _extremum(lax.min, lax.gt)
aten_maximum = lowering("aten.maximum", "aten.max.other")(binary(_maximum))
aten_minimum = lowering("aten.minimum", "aten.min.other")(binary(_minimum))
lowering("aten.fmax")(binary(_fmax))
lowering("aten.fmin")(binary(_fmin))


#: From torch 2.14 on, the derivative at a bound is 0 for a number and shared with a tensor, as
#: maximum's is; before, it goes to x.
# torch's own class compares with tuples
BOUNDS_ARE_OUTSIDE = torch.__version__ >= (2, 14)  # type: ignore[operator]


@jax.custom_jvp
def _between(x: Array, low: Array, high: Array) -> Array:
    """x between two arrays, with the derivatives that PyTorch has from 2.14 on."""
    return lax.min(lax.max(x, low), high)


def _slope_inside(x: Array, low: Array, high: Array, _: Array) -> Array:
    tie = lax.bitwise_and(lax.bitwise_or(lax.eq(x, low), lax.eq(x, high)), lax.lt(low, high))
    return choose(lax.bitwise_or(lax.lt(x, low), lax.gt(x, high)), 0, choose(tie, 0.5, like(1, x)))


def _slope_at_bound(beyond: Array, x: Array, low: Array, high: Array, at: Array) -> Array:
    return choose(
        beyond, 1, choose(lax.bitwise_and(lax.eq(x, at), lax.lt(low, high)), 0.5, like(0, x))
    )


def _slope_below(x: Array, low: Array, high: Array, _: Array) -> Array:
    return _slope_at_bound(lax.bitwise_and(lax.lt(x, low), lax.le(low, high)), x, low, high, low)


def _slope_above(x: Array, low: Array, high: Array, _: Array) -> Array:
    """If the bounds cross, the upper one is the result."""
    beyond = lax.bitwise_or(lax.lt(high, low), lax.bitwise_and(lax.gt(x, high), lax.le(low, high)))
    return _slope_at_bound(beyond, x, low, high, high)


define_slopes(_between, _slope_inside, _slope_below, _slope_above)


@functools.partial(fused, static_argnums=(3, 4, 5))
def _clamp(
    x: Array,
    low: Array | None,
    high: Array | None,
    dtype: np.dtype,
    nan_bounds: bool,
    numbers: bool,
) -> Array:
    """Clamp by selection, so that the derivative goes to the selected operand; a NaN bound gives
    NaN.
    """
    given, *bounds = align(*(cast(b, dtype) for b in (x, low, high) if b is not None))
    if BOUNDS_ARE_OUTSIDE and not numbers and is_floating(dtype):
        return (
            _between(given, *bounds)
            if len(bounds) == 2
            else (_minimum if low is None else _maximum)(given, *bounds)
        )
    tests = [(lax.lt, lax.gt if BOUNDS_ARE_OUTSIDE else lax.ge)] * (low is not None)
    tests += [(lax.gt, lax.lt if BOUNDS_ARE_OUTSIDE else lax.le)] * (high is not None)
    x, inside = given, []
    for (outside_of, inside_of), bound in zip(tests, bounds, strict=True):
        outside = outside_of(x, bound)
        if nan_bounds:
            outside = lax.bitwise_or(outside, lax.ne(bound, bound))
        inside.append(inside_of(given, bound))
        x = lax.select_n(outside, x, bound)
    if is_floating(dtype):  # a NaN is not inside
        x = lax.select_n(functools.reduce(lax.bitwise_and, inside), lax.stop_gradient(x), given)
        if not numbers:
            x = _with_bounds(
                given, x, low if low is None else bounds[0], high if high is None else bounds[-1]
            )
    return x


def _with_bounds(given: Array, clamped: Array, low: Array | None, high: Array | None) -> Array:
    """The clamped array; a bound that x is beyond gets the derivative, of two that cross the upper
    one, even if the other is NaN.
    """
    value = lax.stop_gradient(clamped)
    crossed = None if low is None or high is None else lax.lt(high, low)
    if low is not None:
        below = lax.lt(given, low)
        clamped = lax.select_n(
            below if high is None else lax.bitwise_and(below, lax.lt(low, high)), clamped, low
        )
    if high is not None:
        above = lax.gt(given, high)
        clamped = lax.select_n(
            above if crossed is None else lax.bitwise_or(above, crossed), clamped, high
        )
    return lax.select_n(lax.ne(value, value), clamped, lax.add(clamped, value))


#: From torch 2.15 on, a number beyond the dtype's range is no bound; before, it was converted to
#: the tensor's dtype.
# torch's own class compares with tuples
BOUNDS_NEED_NOT_FIT = torch.__version__ >= (2, 15)  # type: ignore[operator]


def bound(value: Any, dtype: np.dtype, least: bool) -> Any:
    """A bound of clamp as a scalar of a dtype; one that bounds nothing becomes the dtype's extreme.
    Arrays pass unchanged.
    """
    if is_array(value) or dtype.kind not in "iu":
        return number(value, dtype)
    info = np.iinfo(dtype)
    if info.min <= value <= info.max:
        return number(value, dtype)
    if not BOUNDS_NEED_NOT_FIT:
        if dtype.kind == "u" and -info.max <= value < 0:  # wraps around
            return number(value, dtype)
        raise RuntimeError(
            f"value cannot be converted to type {dtype}_t without overflow: got {value}"
        )
    if (value < info.min) == least:
        return number(info.min if least else info.max, dtype)
    raise RuntimeError(
        f"Clamp {'min' if least else 'max'} value {value} is outside the "
        f"representable range of {dtype}"
    )


@lowering("aten.clamp", "aten.clamp.Tensor", "aten.clip", "aten.clip.Tensor")
def aten_clamp(self: Array, min: Any = None, max: Any = None) -> Array:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    if min is None and max is None:
        raise RuntimeError("min, max: expected at least one of them, got None for both")
    dtype = result_dtype(self, min, max)
    if is_complex(dtype):
        raise RuntimeError("self: clamp is not supported for complex tensors")
    if dtype.kind == "b" and self.size and not (is_array(min) or is_array(max)):
        raise NotImplementedError(
            "self: clamp of bools by a bool is not implemented; expected a tensor of numbers, or "
            "of bools as bound"
        )
    numbers = not (is_array(min) or is_array(max))
    nan_bounds = is_floating(dtype) and (
        not numbers
        or any(b is not None and (hasattr(b, "as_array") or math.isnan(b)) for b in (min, max))
    )
    low, high = (
        None if b is None else bound(b, dtype, least) for b, least in ((min, True), (max, False))
    )
    return _clamp(self, low, high, dtype, nan_bounds, numbers)


@lowering("aten.clamp_min", "aten.clamp_min.Tensor")
def aten_clamp_min(self: Array, min: Any) -> Array:
    """clamp_min(Tensor self, Scalar min) -> Tensor"""
    return aten_clamp(self, min)


@lowering("aten.clamp_max", "aten.clamp_max.Tensor")
def aten_clamp_max(self: Array, max: Any) -> Array:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    return aten_clamp(self, None, max)


# -- three operands --------------------------------------------------------------------------------
def _ternary(fn: Callable) -> Callable:
    """A lowering from fn(a, b, c, number) of arrays of one dtype and shape, with promotion and
    broadcasting; half types in float32.
    """

    @functools.partial(fused, static_argnums=(4, 5))
    def mixed(a: Array, b: Array, c: Array, value: Array, work: np.dtype, dtype: np.dtype) -> Array:
        return cast(
            fn(*align(cast(a, work), cast(b, work), cast(c, work)), cast(value, work)), dtype
        )

    def apply(a: Array, b: Array, c: Any, value: Any = 1) -> Array:
        dtype = result_dtype(a, b, c)
        work = opmath(dtype)
        return mixed(a, b, number(c, work), number(value, work), work, dtype)

    return apply


def _lerp(start: Array, end: Array, weight: Array, _: Array) -> Array:
    # from the nearer end, so that both ends are hit exactly
    half, one, span = number(0.5, weight.dtype), number(1, weight.dtype), lax.sub(end, start)
    near = (
        lax.lt(lax.abs(weight), number(0.5, lax.abs(weight).dtype))
        if is_complex(weight)
        else lax.lt(weight, half)
    )
    return lax.select_n(
        near,
        lax.sub(end, lax.mul(span, lax.sub(one, weight))),
        lax.add(start, lax.mul(weight, span)),
    )


_any_lerp = _ternary(_lerp)


@lowering("aten.lerp.Tensor", "aten.lerp.Scalar")
def aten_lerp(start: Array, end: Array, weight: Any) -> Array:
    """lerp.Tensor(Tensor self, Tensor end, Tensor weight) -> Tensor"""
    for name, x in (("end", end), ("weight", weight)):
        if isinstance(x, jax.Array) and x.dtype != start.dtype and (x.ndim or name == "end"):
            raise RuntimeError(f"expected dtype {start.dtype} for `{name}` but got dtype {x.dtype}")
    if isinstance(weight, complex) and not is_complex(start):
        raise RuntimeError(
            f"weight: {weight} cannot be converted to type {dtypes.to_torch(start.dtype)} "
            "without overflow"
        )
    return _any_lerp(start, end, weight)


_multiply_add = _ternary(lambda a, b, c, value: lax.add(a, lax.mul(lax.mul(b, c), value)))
_divide_add = _ternary(lambda a, b, c, value: lax.add(a, lax.mul(lax.div(b, c), value)))


@lowering("aten.addcmul")
def aten_addcmul(self: Array, tensor1: Array, tensor2: Array, *, value: Any = 1) -> Array:
    """addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    return _multiply_add(self, tensor1, tensor2, value)


@lowering("aten.addcdiv")
def aten_addcdiv(self: Array, tensor1: Array, tensor2: Array, *, value: Any = 1) -> Array:
    """addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    if tensor1.dtype.kind in "iub" and tensor2.dtype.kind in "iub":
        raise RuntimeError(
            "tensor1, tensor2: integer division with addcdiv is not supported; convert one of them "
            "to a float dtype"
        )
    return _divide_add(self, tensor1, tensor2, value)
