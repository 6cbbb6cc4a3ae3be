"""Activation functions and softmaxes.

Each is written so that JAX's derivative is PyTorch's: it has PyTorch's value at a kink, and no NaN
from the branch that is not taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from bridge.convert.dtypes import to_jax
from bridge.lowering.common import varying
from bridge.lowering.common.builders import spread, with_slope
from bridge.lowering.common.promotion import cast, fused, opmath, require_inexact, wrap_dim
from bridge.lowering.elementwise.arithmetic import BOUNDS_NEED_NOT_FIT, bound
from bridge.lowering.registry import lowering
from bridge.lowering.tensors.creation import number


def _widened(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn computed in PyTorch's internal dtype (float32 for float16 and bfloat16) and rounded once,
    at the end.
    """

    @functools.wraps(fn)
    def run(x: Array, *args: Any, **kwargs: Any) -> Array:
        require_inexact(x, fn.__name__.removeprefix("aten_"))
        return cast(fn(cast(x, opmath(x.dtype)), *args, **kwargs), x.dtype)

    return run


@lowering("aten.gelu")
@fused("approximate")
@_widened
def aten_gelu(x: Array, *, approximate: str = "none") -> Array:
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    if approximate == "none":
        return 0.5 * x * (1 + varying.erf(x * 0.7071067811865476))
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    raise RuntimeError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")


@lowering("aten.silu")
@fused()
@_widened
def aten_silu(x: Array) -> Array:
    """silu(Tensor self) -> Tensor"""
    return x * lax.logistic(x)


@lowering("aten.mish")
@fused()
@_widened
def aten_mish(x: Array) -> Array:
    """mish(Tensor self) -> Tensor"""
    return x * jnp.tanh(jax.nn.softplus(x))


@lowering("aten.elu")
@fused("alpha", "scale", "input_scale")
@_widened
def aten_elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    """elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor"""
    # the exponential of a large positive input overflows, and so does its derivative: replace such
    # inputs first
    below = jnp.expm1(jnp.where(x > 0, 0, x) * input_scale) * (alpha * scale)
    # at 0 the first derivative is that from below, and the second is 0
    curved = jnp.exp(jnp.where(x >= 0, 0, x) * input_scale) * (alpha * scale * input_scale)
    return with_slope(jnp.where(x > 0, x * scale, below), x, jnp.where(x > 0, scale, curved))


def elu_slope_of_result(y: Array, alpha: float, scale: float, input_scale: float) -> Array:
    """The derivative of elu from its result, which autograd keeps of the in-place variant; at 0 as
    in aten_elu.
    """
    wide = cast(y, opmath(y.dtype))
    curved = (jnp.where(wide >= 0, lax.stop_gradient(wide), wide) + alpha * scale) * input_scale
    return cast(jnp.where(wide > 0, scale, curved), y.dtype)


@lowering("aten.celu")
def aten_celu(x: Array, alpha: float = 1.0) -> Array:
    """celu(Tensor self, Scalar alpha=1.0) -> Tensor"""
    if alpha == 0:
        raise RuntimeError("alpha: ZeroDivisionError, alpha cannot be 0 for CELU")
    return aten_elu(x, alpha=alpha, input_scale=1 / alpha)


@lowering("aten.selu")
def aten_selu(x: Array) -> Array:
    """selu(Tensor self) -> Tensor"""
    return aten_elu(
        x, alpha=1.6732632423543772848170429916717, scale=1.0507009873554804934193349852946
    )


@lowering("aten.leaky_relu")
@fused("negative_slope")
@_widened
def aten_leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    return jnp.where(x > 0, x, x * negative_slope)


@lowering("aten._prelu_kernel")
@fused()
def aten__prelu_kernel(x: Array, weight: Array) -> Array:
    """_prelu_kernel(Tensor self, Tensor weight) -> Tensor"""
    above = x > 0  # nothing of the other branch, whose weight or x may be infinite
    return jnp.where(above, x, jnp.where(above, 0, x) * jnp.where(above, 0, weight))


@lowering("aten.softplus")
@fused("beta", "threshold")
@_widened
def aten_softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    """softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    linear = x * beta > threshold
    value = jnp.where(linear, x, jnp.log1p(jnp.exp(jnp.where(linear, 0, x) * beta)) / beta)
    # at the threshold the second derivative is that from above
    curved = lax.logistic(jnp.where(x * beta >= threshold, lax.stop_gradient(x), x) * beta)
    return with_slope(value, x, jnp.where(linear, 1, curved))


@lowering("aten.log_sigmoid_forward")
@fused()
def aten_log_sigmoid_forward(x: Array) -> tuple[Array, Array]:
    """log_sigmoid_forward(Tensor self) -> (Tensor output, Tensor buffer)"""
    require_inexact(x, "log_sigmoid")
    wide = cast(x, opmath(x.dtype))
    return cast(0 - jax.nn.softplus(-wide), x.dtype), cast(jnp.exp(-jnp.abs(wide)), x.dtype)


def _need_numbers(name: str, x: Array) -> None:
    if x.dtype == np.bool_:
        raise NotImplementedError(
            f"{name}: not implemented for 'Bool'; expected a tensor of numbers"
        )


@lowering("aten.hardtanh")
@fused("min_val", "max_val")
def aten_hardtanh(x: Array, min_val: float = -1, max_val: float = 1) -> Array:
    """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
    _need_numbers("hardtanh", x)
    if not BOUNDS_NEED_NOT_FIT and x.dtype.kind == "u" and min(min_val, max_val) < 0:
        raise RuntimeError("cannot do hardtanh on an unsigned type with negative limits")
    low, high = bound(min_val, x.dtype, True), bound(max_val, x.dtype, False)
    # at the bounds x itself: -0.0 stays
    held = lax.stop_gradient(jnp.where(x < low, low, jnp.where(x > high, high, x)))
    return jnp.where((x <= low) | (x >= high), held, x)  # constant outside, so the gradient is 0


@lowering("aten.relu6")
def aten_relu6(x: Array) -> Array:
    """relu6(Tensor self) -> Tensor"""
    return aten_hardtanh(x, 0, 6)


@lowering("aten.hardsigmoid")
@fused()
@_widened
def aten_hardsigmoid(x: Array) -> Array:
    """hardsigmoid(Tensor self) -> Tensor"""
    inside = (x > -3) & (x < 3)
    return jnp.where(inside, (x + 3) / 6, lax.stop_gradient(jnp.clip((x + 3) / 6, 0, 1)))


@lowering("aten.hardswish")
@fused()
@_widened
def aten_hardswish(x: Array) -> Array:
    """hardswish(Tensor self) -> Tensor"""
    slope = jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, x / 3 + 0.5))
    return with_slope(x * jnp.clip(x + 3, 0, 6) / 6, x, slope)


@lowering("aten.threshold")
@fused("threshold", "value")
def aten_threshold(x: Array, threshold: float, value: float) -> Array:
    """threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor"""
    _need_numbers("threshold", x)
    return jnp.where(x <= number(threshold, x.dtype), number(value, x.dtype), x)


@lowering("aten.hardshrink")
@fused("lambd")
def aten_hardshrink(x: Array, lambd: float = 0.5) -> Array:
    """hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    return jnp.where((x >= -lambd) & (x <= lambd), 0, x)


@lowering("aten.softshrink")
@fused("lambd")
def aten_softshrink(x: Array, lambd: float = 0.5) -> Array:
    """softshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    if lambd < 0:
        raise RuntimeError(f"lambd: expected a number greater than or equal to 0, got {lambd}")
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))


@lowering("aten.hardshrink_backward", "aten.softshrink_backward")
def aten_hardshrink_backward(grad: Array, x: Array, lambd: float) -> Array:
    """hardshrink_backward(Tensor grad_out, Tensor self, Scalar lambd) -> Tensor"""
    return jnp.where((x >= -lambd) & (x <= lambd), 0, grad)


@lowering("aten.glu")
@fused("dim")
def aten_glu(x: Array, dim: int = -1) -> Array:
    """glu(Tensor self, int dim=-1) -> Tensor"""
    if x.ndim == 0:
        raise RuntimeError("glu does not support 0-dimensional tensors")
    dim = wrap_dim(dim, x.ndim)
    if x.shape[dim] % 2:
        raise RuntimeError(
            f"Halving dimension must be even, but dimension {dim} is size {x.shape[dim]}"
        )
    a, b = jnp.split(cast(x, opmath(x.dtype)), 2, axis=dim)
    return cast(a * lax.logistic(b), x.dtype)


# -- softmaxes -------------------------------------------------------------------------------------
# Derivatives are computed from the output, so that the backward pass keeps one array instead of
# three. JAX forgets these rules where it derives a loop twice. Then no derivative may go through
# the maximum: it would be zero, but JAX divides by the number of the elements that equal the
# maximum, and there are none if XLA computes the elements twice, with different roundings.


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(x: Array, axis: int) -> Array:
    """Softmax along an axis, in the dtype of x."""
    e = lax.exp(lax.sub(x, spread(lax.reduce_max(lax.stop_gradient(x), (axis,)), x.shape, (axis,))))
    return lax.div(e, spread(lax.reduce_sum(e, (axis,)), x.shape, (axis,)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def safe_softmax(x: Array, axis: int) -> Array:
    """Softmax that gives zeros, not NaN, for a slice of nothing but -inf."""
    top = jnp.max(lax.stop_gradient(x), axis, keepdims=True, initial=-jnp.inf)
    e = jnp.exp(x - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(e, axis, keepdims=True)
    return e / jnp.where(total == 0, 1, total)


def _softmax_jvp(
    of: Callable[..., Array], axis: int, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    y = of(*primals, axis)
    dy = lax.mul(y, tangents[0])
    return y, lax.sub(dy, lax.mul(y, spread(lax.reduce_sum(dy, (axis,)), y.shape, (axis,))))


softmax.defjvp(functools.partial(_softmax_jvp, softmax))
safe_softmax.defjvp(functools.partial(_softmax_jvp, safe_softmax))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def log_softmax(x: Array, axis: int) -> Array:
    """Logarithm of the softmax along an axis, in the dtype of x."""
    shifted = lax.sub(x, spread(lax.reduce_max(lax.stop_gradient(x), (axis,)), x.shape, (axis,)))
    return lax.sub(
        shifted, spread(lax.log(lax.reduce_sum(lax.exp(shifted), (axis,))), x.shape, (axis,))
    )


@log_softmax.defjvp
def _log_softmax_jvp(axis: int, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    y = log_softmax(*primals, axis)
    (dx,) = tangents
    return y, lax.sub(
        dx, spread(lax.reduce_sum(lax.mul(lax.exp(y), dx), (axis,)), y.shape, (axis,))
    )


def _along(fn: Callable[[Array, int], Array], x: Array, dim: int, dtype: np.dtype) -> Array:
    """fn along dim, computed in PyTorch's internal dtype and returned as dtype; a 0-dim array
    counts as one element.
    """
    require_inexact(x, fn.__name__)
    dim = wrap_dim(dim, x.ndim)
    wide = cast(x, opmath(x.dtype))
    y = fn(wide, dim) if x.ndim else fn(wide[None], 0)[0]
    return cast(y, dtype)


@lowering("aten._softmax")
@fused("dim", "half_to_float")
def aten__softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    """_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    return _along(softmax, x, dim, jnp.float32 if half_to_float else x.dtype)


@lowering("aten._log_softmax")
@fused("dim", "half_to_float")
def aten__log_softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    """_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    return _along(log_softmax, x, dim, jnp.float32 if half_to_float else x.dtype)


@lowering("aten._safe_softmax")
def aten__safe_softmax(x: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    """_safe_softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor"""
    return _safe_softmax(x if dtype is None else cast(x, to_jax(dtype)), dim)


@fused("dim")
def _safe_softmax(x: Array, dim: int) -> Array:
    return _along(safe_softmax, x, dim, x.dtype)
