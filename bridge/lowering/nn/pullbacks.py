"""Backward operators as pullbacks of the forward operators' lowerings.

torch's autograd calls them when it runs inside a trace. A second derivative differentiates them,
and the forward lowerings are written so that every derivative of theirs is right at a kink and far
from zero; PyTorch's decompositions overflow in the branch not taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from bridge.lowering.common import varying
from bridge.lowering.common.promotion import cast, promote
from bridge.lowering.nn import activations, losses
from bridge.lowering.registry import lowering
from bridge.lowering.special.error_functions import aten_logit


def _pulled(grad: Array, forward: Callable[..., Array], *primals: Array) -> tuple[Array, ...]:
    """The cotangents of the primals of a function that works element by element, brought to one
    shape and dtype as in PyTorch's kernels.
    """
    grad, *alike = jnp.broadcast_arrays(grad, *promote(*primals))
    y, pull = varying.vjp(forward, *alike)
    return pull(cast(grad, y.dtype))


def _of_input(forward: Callable[..., Array]) -> Callable[..., Array]:
    """(grad_output, self, *arguments of the forward operator) -> grad_input."""

    def backward(grad: Array, x: Array, *rest: Any, **named: Any) -> Array:
        return _pulled(grad, lambda x: forward(x, *rest, **named), x)[0]

    return backward


for _name in ("gelu", "hardsigmoid", "hardswish", "hardtanh", "mish", "silu", "softplus"):
    lowering(f"aten.{_name}_backward")(_of_input(getattr(activations, f"aten_{_name}")))
lowering("aten.logit_backward")(_of_input(aten_logit))


@lowering("aten.glu_backward")
def aten_glu_backward(grad: Array, x: Array, dim: int) -> Array:
    """glu_backward(Tensor grad_output, Tensor self, int dim) -> Tensor"""
    return varying.vjp(lambda x: activations.aten_glu(x, dim), x)[1](cast(grad, x.dtype))[0]


def _of_loss(forward: Callable[..., Array]) -> Callable[..., Array]:
    """(grad_output, self, target, *arguments of the forward operator) -> grad_input."""

    def backward(grad: Array, x: Array, target: Array, *rest: Any) -> Array:
        x, target = jnp.broadcast_arrays(*promote(x, target))
        y, pull = varying.vjp(lambda x: forward(x, target, *rest), x)
        return pull(jnp.broadcast_to(cast(grad, y.dtype), y.shape))[0]

    return backward


for _name in ("huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss"):
    lowering(f"aten.{_name}_backward")(_of_loss(getattr(losses, f"aten_{_name}")))
lowering("aten.binary_cross_entropy_backward")(_of_loss(losses.binary_cross_entropy))


def _of_likelihood(forward: Callable[..., tuple[Array, Array]]) -> Callable[..., Array]:
    """(grad_output, self, target, weight, reduction, ignore_index, total_weight) -> grad_input."""

    def backward(
        grad: Array,
        x: Array,
        target: Array,
        weight: Array | None,
        reduction: int,
        ignore_index: int,
        total_weight: Array,
    ) -> Array:
        y, pull = varying.vjp(lambda x: forward(x, target, weight, reduction, ignore_index)[0], x)
        return pull(jnp.broadcast_to(cast(grad, y.dtype), y.shape))[0]

    return backward


lowering("aten.nll_loss_backward")(_of_likelihood(losses.aten_nll_loss_forward))
lowering("aten.nll_loss2d_backward")(_of_likelihood(losses.aten_nll_loss2d_forward))


@lowering("aten.elu_backward")
def aten_elu_backward(
    grad: Array,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    self_or_result: Array,
) -> Array:
    """elu_backward(Tensor grad_output, Scalar alpha, Scalar scale, Scalar input_scale, bool
    is_result, Tensor self_or_result) -> Tensor
    """
    if not is_result:
        return _pulled(
            grad, lambda x: activations.aten_elu(x, alpha, scale, input_scale), self_or_result
        )[0]
    return activations.elu_slope_of_result(self_or_result, alpha, scale, input_scale) * grad


@lowering("aten.leaky_relu_backward")
def aten_leaky_relu_backward(
    grad: Array, x: Array, negative_slope: float, self_is_result: bool
) -> Array:
    """leaky_relu_backward(Tensor grad_output, Tensor self, Scalar negative_slope, bool
    self_is_result) -> Tensor
    """
    # the result has the input's sign
    return _pulled(grad, lambda x: activations.aten_leaky_relu(x, negative_slope), x)[0]


@lowering("aten.rrelu_with_noise_backward")
def aten_rrelu_with_noise_backward(
    grad: Array,
    x: Array,
    noise: Array,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> Array:
    """rrelu_with_noise_backward(Tensor grad_output, Tensor self, Tensor noise, Scalar lower, Scalar
    upper, bool training, bool self_is_result) -> Tensor
    """
    if training and upper - lower > 1e-6:
        return grad * noise
    return aten_leaky_relu_backward(grad, x, (lower + upper) / 2, self_is_result)


@lowering("aten.log_sigmoid_backward")
def aten_log_sigmoid_backward(grad: Array, x: Array, buffer: Array) -> Array:
    """log_sigmoid_backward(Tensor grad_output, Tensor self, Tensor buffer) -> Tensor"""
    return _pulled(grad, lambda x: activations.aten_log_sigmoid_forward(x)[0], x)[0]


@lowering("aten._prelu_kernel_backward")
def aten__prelu_kernel_backward(grad: Array, x: Array, weight: Array) -> tuple[Array, ...]:
    """_prelu_kernel_backward(Tensor grad_output, Tensor self, Tensor weight) -> (Tensor, Tensor)"""
    return _pulled(grad, activations.aten__prelu_kernel, x, weight)
