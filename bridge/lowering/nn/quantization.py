"""Fake quantization: floats rounded to the values that an integer with a scale and a zero point can
represent.

The derivative is PyTorch's straight-through estimator: one if the value is within the integer's
range, else zero. For the learned scale and zero point it is that of Esser et al., Learned Step Size
Quantization (https://arxiv.org/abs/1902.08153).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common import varying
from bridge.lowering.common.promotion import cast, fused, opmath
from bridge.lowering.common.provided import refuse
from bridge.lowering.registry import lowering

_SMALLEST_SCALE = np.float32(6.1e-5)  # of PyTorch's ChooseQuantizationParams


def _check_range(low: int, high: int) -> None:
    if low > high:
        raise RuntimeError(
            f"`quant_min` should be less than or equal to `quant_max`, got {low} and {high}"
        )


def _whole(x: Array, scale: Array, zero: Array) -> Array:
    """The integer for each value, before it is clipped to the range; a floating zero point is added
    before rounding.
    """
    wide = opmath(x.dtype)
    scaled = cast(x, wide) * cast(1 / cast(scale, np.float32), wide)
    rounded = (
        jnp.round(scaled) + cast(zero, wide)
        if jnp.issubdtype(zero.dtype, jnp.integer)
        else jnp.round(scaled + cast(zero, wide))
    )
    # per tensor, the kernel compares floats; per channel, a value that does not fit gives the least
    # integer
    if scale.ndim == 0:
        rounded = jnp.where(rounded > 2.0**62, 2.0**62, rounded)
    return cast(rounded, np.int64)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _quantized(x: Array, scale: Array, zero: Array, low: int, high: int) -> tuple[Array, Array]:
    """(values, mask) of x; scale and zero broadcast against it and have no derivative."""
    whole, wide = _whole(x, scale, zero), opmath(x.dtype)
    value = (cast(jnp.clip(whole, low, high), wide) - cast(zero, wide)) * cast(
        cast(scale, np.float32), wide
    )
    return cast(value, x.dtype), (whole >= low) & (whole <= high)


@functools.partial(_quantized.defjvp, symbolic_zeros=True)
def _quantized_jvp(
    low: int, high: int, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, Array], tuple[Array, Any]]:
    value, mask = _quantized(*primals, low, high)
    dx = varying.instantiated(tangents[0])
    return (value, mask), (dx * cast(mask, dx.dtype), varying.no_tangent(mask))


def _along(t: Array, axis: int, ndim: int) -> Array:
    """A vector with one number for each channel, shaped to broadcast against the whole tensor."""
    return t.reshape([-1 if d == axis % ndim else 1 for d in range(ndim)])


@lowering("aten.fake_quantize_per_tensor_affine_cachemask")
def aten_fake_quantize_per_tensor_affine_cachemask(
    x: Array, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    """fake_quantize_per_tensor_affine_cachemask(Tensor self, float scale, int zero_point, int
    quant_min, int quant_max) -> (Tensor output, Tensor mask)
    """
    _check_range(quant_min, quant_max)
    if not quant_min <= zero_point <= quant_max:
        raise RuntimeError(
            f"`zero_point` must be between `quant_min` and `quant_max`, got {zero_point}, "
            f"{quant_min} and {quant_max}"
        )
    return _run(
        x, jnp.asarray(scale, np.float32), jnp.asarray(zero_point, np.int64), quant_min, quant_max
    )


_run = fused("low", "high")(lambda x, scale, zero, low, high: _quantized(x, scale, zero, low, high))


@lowering("aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def aten__fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
    x: Array,
    scale: Array,
    zero_point: Array,
    fake_quant_enabled: Array,
    quant_min: int,
    quant_max: int,
) -> tuple[Array, Array]:
    """_fake_quantize_per_tensor_affine_cachemask_tensor_qparams(Tensor self, Tensor scale, Tensor
    zero_point, Tensor fake_quant_enabled, int quant_min, int quant_max) -> (Tensor output, Tensor
    mask)
    """
    _check_range(quant_min, quant_max)
    value, mask = _run(x, scale.reshape(-1)[0], zero_point.reshape(-1)[0], quant_min, quant_max)
    on = fake_quant_enabled.reshape(-1)[0] != 0
    return jnp.where(on, value, x), mask | ~on


@lowering("aten.fake_quantize_per_channel_affine_cachemask")
def aten_fake_quantize_per_channel_affine_cachemask(
    x: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    """fake_quantize_per_channel_affine_cachemask(Tensor self, Tensor scale, Tensor zero_point, int
    axis, int quant_min, int quant_max) -> (Tensor output, Tensor mask)
    """
    _check_channels(x, scale, zero_point, axis, quant_min, quant_max)
    if jnp.issubdtype(zero_point.dtype, jnp.integer):
        outside = (zero_point < quant_min) | (zero_point > quant_max)
        refuse(
            outside,
            "`zero_point` must be between `quant_min` and `quant_max`: some are outside of "
            f"{quant_min} to {quant_max}",
        )
    return _run(
        x, _along(scale, axis, x.ndim), _along(zero_point, axis, x.ndim), quant_min, quant_max
    )


def _check_channels(
    x: Array, scale: Array, zero_point: Array, axis: int, low: int, high: int
) -> None:
    _check_range(low, high)
    if not 0 <= axis < x.ndim:
        raise RuntimeError(
            f"`axis` must be between 0 and number of dimensions of input, got {axis} and {x.ndim}"
        )
    if (
        scale.ndim != 1
        or zero_point.ndim != 1
        or scale.shape != zero_point.shape
        or scale.shape[0] != x.shape[axis]
    ):
        raise RuntimeError(
            "dimensions of scale and zero-point should be 1 and their sizes that of the input "
            f"along axis, {x.shape[axis]}: got {list(scale.shape)} and {list(zero_point.shape)}"
        )


# -- a learned scale and zero point ----------------------------------------------------------------
@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5, 6))
def _learned(
    x: Array, scale: Array, zero: Array, low: int, high: int, factor: float, channels: bool
) -> Array:
    rounded = cast(jnp.clip(jnp.round(cast(zero, np.float32)), low, high), np.int64)
    return _quantized(x, scale, rounded, low, high)[0]


@_learned.defjvp
def _learned_jvp(
    low: int,
    high: int,
    factor: float,
    channels: bool,
    primals: tuple[Array, ...],
    tangents: tuple[Array, ...],
) -> tuple[Array, Array]:
    x, scale, zero = primals
    at = cast(zero, np.float32)
    # PyTorch's backward rounds a zero point per tensor by adding one half, zero points per channel
    # to the nearest even number
    at = (
        jnp.clip(jnp.round(at), low, high) if channels else jnp.trunc(jnp.clip(at + 0.5, low, high))
    )
    whole = _whole(x, scale, cast(at, np.int64))
    inside = (whole >= low) & (whole <= high)
    held, step = cast(jnp.clip(whole, low, high), x.dtype) - cast(at, x.dtype), cast(scale, x.dtype)
    to_scale = jnp.where(inside, (held * step - x) / step, held) * factor
    to_zero = jnp.where(inside, 0, -step * factor)
    slope = (
        tangents[0] * cast(inside, x.dtype)
        + cast(tangents[1], x.dtype) * to_scale
        + cast(tangents[2], x.dtype) * to_zero
    )
    return _learned(*primals, low, high, factor, channels), cast(slope, x.dtype)


_run_learned = fused("low", "high", "factor", "channels")(
    lambda x, scale, zero, low, high, factor, channels: _learned(
        x, scale, zero, low, high, factor, channels
    )
)


@lowering("aten._fake_quantize_learnable_per_tensor_affine")
def aten__fake_quantize_learnable_per_tensor_affine(
    x: Array,
    scale: Array,
    zero_point: Array,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> Array:
    """_fake_quantize_learnable_per_tensor_affine(Tensor self, Tensor scale, Tensor zero_point, int
    quant_min, int quant_max, float grad_factor=1.) -> Tensor
    """
    _check_range(quant_min, quant_max)
    return _run_learned(
        x,
        scale.reshape(-1)[0],
        zero_point.reshape(-1)[0],
        quant_min,
        quant_max,
        float(grad_factor),
        False,
    )


@lowering("aten._fake_quantize_learnable_per_channel_affine")
def aten__fake_quantize_learnable_per_channel_affine(
    x: Array,
    scale: Array,
    zero_point: Array,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> Array:
    """_fake_quantize_learnable_per_channel_affine(Tensor self, Tensor scale, Tensor zero_point, int
    axis, int quant_min, int quant_max, float grad_factor=1.) -> Tensor
    """
    _check_channels(x, scale, zero_point, axis, quant_min, quant_max)
    scale, zero_point = _along(scale, axis, x.ndim), _along(zero_point, axis, x.ndim)
    return _run_learned(x, scale, zero_point, quant_min, quant_max, float(grad_factor), True)


def _learned_back(
    grad: Array, lower: Callable[..., Any], x: Array, scale: Array, zero_point: Array, *more: Any
) -> tuple[Array, Array, Array]:
    return varying.vjp(lambda *primals: lower(*primals, *more), x, scale, zero_point)[1](grad)


@lowering("aten._fake_quantize_learnable_per_tensor_affine_backward")
def aten__fake_quantize_learnable_per_tensor_affine_backward(
    grad: Array,
    x: Array,
    scale: Array,
    zero_point: Array,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> tuple[Array, Array, Array]:
    """_fake_quantize_learnable_per_tensor_affine_backward(Tensor grad, Tensor self, Tensor scale,
    Tensor zero_point, int quant_min, int quant_max, float grad_factor=1.) -> (Tensor, Tensor,
    Tensor)
    """
    lower = aten__fake_quantize_learnable_per_tensor_affine
    return _learned_back(grad, lower, x, scale, zero_point, quant_min, quant_max, grad_factor)


@lowering("aten._fake_quantize_learnable_per_channel_affine_backward")
def aten__fake_quantize_learnable_per_channel_affine_backward(
    grad: Array,
    x: Array,
    scale: Array,
    zero_point: Array,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> tuple[Array, Array, Array]:
    """_fake_quantize_learnable_per_channel_affine_backward(Tensor grad, Tensor self, Tensor scale,
    Tensor zero_point, int axis, int quant_min, int quant_max, float grad_factor=1.) -> (Tensor,
    Tensor, Tensor)
    """
    lower = aten__fake_quantize_learnable_per_channel_affine
    return _learned_back(grad, lower, x, scale, zero_point, axis, quant_min, quant_max, grad_factor)


# -- an observer and a fake quantization in one ----------------------------------------------------
def _parameters(
    least: Array, most: Array, low: int, high: int, symmetric: bool
) -> tuple[Array, Array]:
    """Scale (float32) and zero point (int64) for values from least to most, as in PyTorch's
    ChooseQuantizationParams.
    """
    both = (least < 0) & (most > 0) & symmetric
    half = (high - low) // 2
    wide = jnp.maximum(
        jnp.abs(least / np.float32(-half - 1)), jnp.abs(most / np.float32(max(half, 1)))
    )
    least = jnp.minimum(jnp.where(both, wide * np.float32(-half - 1), least), 0)
    most = jnp.maximum(jnp.where(both, wide * np.float32(half), most), 0)
    scale = (cast(most, np.float64) - cast(least, np.float64)) / (high - low)
    scale = jnp.where(
        (cast(scale, np.float32) == 0) | jnp.isinf(1 / cast(scale, np.float32)), 0.1, scale
    )
    tiny, span = scale < _SMALLEST_SCALE, _SMALLEST_SCALE * np.float32(high - low)
    larger = _SMALLEST_SCALE / cast(scale, np.float32)
    least, most = (
        jnp.where(
            tiny, jnp.where(least == 0, 0, jnp.where(most == 0, -span, least * larger)), least
        ),
        jnp.where(tiny, jnp.where(least == 0, span, jnp.where(most == 0, 0, most * larger)), most),
    )
    scale = jnp.where(tiny, np.float64(_SMALLEST_SCALE), scale)
    below, above = cast(least, np.float64) / scale, cast(most, np.float64) / scale
    zero = jnp.where(
        abs(low) - jnp.abs(below) < abs(high) - jnp.abs(above), low - below, high - above
    )
    zero = jnp.where(both, (low + high) / 2, zero)
    return cast(scale, np.float32), cast(jnp.clip(jnp.round(zero), low, high), np.int64)


@lowering("aten._fused_moving_avg_obs_fq_helper_functional", no_grad_outputs=(1, 2, 3, 4, 5))
def aten__fused_moving_avg_obs_fq_helper_functional(
    x: Array,
    observer_on: Array,
    fake_quant_on: Array,
    running_min: Array,
    running_max: Array,
    scale: Array,
    zero_point: Array,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """_fused_moving_avg_obs_fq_helper_functional(Tensor self, Tensor observer_on, Tensor
    fake_quant_on, Tensor running_min, Tensor running_max, Tensor scale, Tensor zero_point, float
    averaging_const, int quant_min, int quant_max, int ch_axis, bool per_row_fake_quant=False, bool
    symmetric_quant=False) -> (Tensor output, Tensor mask, Tensor running_min_out, Tensor
    running_max_out, Tensor scale_out, Tensor zero_point_out)
    """
    if per_row_fake_quant and any(
        t.shape != (x.shape[ch_axis],) for t in (running_min, running_max, scale, zero_point)
    ):
        raise RuntimeError(
            f"running_min, running_max, scale, zero_point: expected {x.shape[ch_axis]} elements, "
            "one for each channel, got shapes "
            f"{[list(t.shape) for t in (running_min, running_max, scale, zero_point)]}; call the "
            "module once outside of the transform, where PyTorch gives its buffers their size"
        )
    observing, quantizing = (flag.reshape(-1)[0] != 0 for flag in (observer_on, fake_quant_on))
    seen = lax.stop_gradient(x)
    axes = tuple(d for d in range(x.ndim) if d != ch_axis % x.ndim) if per_row_fake_quant else None

    def averaged(running: Array, now: Array) -> Array:
        now = cast(now, running.dtype).reshape(-1)
        before = jnp.broadcast_to(running, now.shape) if per_row_fake_quant else running
        now = now.reshape(before.shape) if not per_row_fake_quant else now
        moved = jnp.where(
            jnp.isinf(before), now, before + cast(averaging_const, running.dtype) * (now - before)
        )
        return jnp.where(observing, moved, before)

    least, most = (
        averaged(running_min, jnp.min(seen, axes)),
        averaged(running_max, jnp.max(seen, axes)),
    )
    chosen = _parameters(
        cast(least, np.float32), cast(most, np.float32), quant_min, quant_max, bool(symmetric_quant)
    )
    shape = least.shape if per_row_fake_quant else scale.shape
    step = jnp.where(quantizing, cast(chosen[0], scale.dtype).reshape(shape), scale)
    zero = jnp.where(quantizing, cast(chosen[1], zero_point.dtype).reshape(shape), zero_point)
    if per_row_fake_quant:
        value, mask = _run(
            x, _along(step, ch_axis, x.ndim), _along(zero, ch_axis, x.ndim), quant_min, quant_max
        )
    else:
        value, mask = _run(x, step.reshape(-1)[0], zero.reshape(-1)[0], quant_min, quant_max)
    return jnp.where(quantizing, value, x), mask | ~quantizing, least, most, step, zero
