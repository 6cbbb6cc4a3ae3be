"""Complex numbers and their parts: polar, angle, conj, and atan2. The views as pairs of reals are
in shape.py.
"""

from __future__ import annotations

import math

import jax
from jax import Array, lax

from bridge.lowering.common.builders import (
    align,
    binary,
    choose,
    define_slopes,
    fused,
    like,
    number,
)
from bridge.lowering.common.promotion import cast, default_float, is_complex
from bridge.lowering.registry import lowering


@lowering(
    "aten._conj",
    "aten.conj_physical",
    "aten._conj_physical",
    "aten._conj_copy",
    view_inverse=lambda base, value: lax.conj(value),
)
def aten_conj(self: Array) -> Array:
    """_conj(Tensor(a) self) -> Tensor(a)"""
    return lax.conj(self) if is_complex(self) else self


@lowering("aten._neg_view", "aten._neg_view_copy", view_inverse=lambda base, value: lax.neg(value))
def aten_neg_view(self: Array) -> Array:
    """_neg_view(Tensor(a) self) -> Tensor(a)"""
    return lax.neg(self)


@lowering("aten.polar")
@fused
def aten_polar(abs: Array, angle: Array) -> Array:
    """polar(Tensor abs, Tensor angle) -> Tensor"""
    size, angle = align(abs, angle)
    return lax.complex(lax.mul(size, lax.cos(angle)), lax.mul(size, lax.sin(angle)))


@jax.custom_jvp
def atan2(y: Array, x: Array) -> Array:
    """The angle of (x, y), with derivative 0 at the origin."""
    return lax.atan2(y, x)


def _over_square(part: Array, y: Array, x: Array) -> Array:
    square = lax.add(lax.mul(x, x), lax.mul(y, y))
    origin = lax.eq(square, number(0, x.dtype))
    return choose(origin, 0, lax.div(part, choose(origin, 1, square)))


define_slopes(
    atan2,
    lambda y, x, angle: _over_square(x, y, x),
    lambda y, x, angle: _over_square(lax.neg(y), y, x),
)
aten_atan2 = lowering("aten.atan2")(binary(atan2, floating=True))


@lowering("aten.angle")
def aten_angle(self: Array) -> Array:
    """angle(Tensor self) -> Tensor"""
    return _angle(
        self
        if is_complex(self)
        else cast(self, default_float())
        if self.dtype.kind in "iub"
        else self
    )


@fused
def _angle(x: Array) -> Array:
    if is_complex(x):
        return atan2(lax.imag(x), lax.real(x))
    angle = choose(lax.lt(x, number(0, x.dtype)), math.pi, like(0, x))
    return lax.stop_gradient(choose(lax.ne(x, x), math.nan, angle))
