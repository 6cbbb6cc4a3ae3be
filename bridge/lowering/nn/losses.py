"""Loss functions: negative log likelihood, margins, and losses that a decomposition makes slower or
differentiates otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from bridge.convert import dtypes
from bridge.lowering.common import varying
from bridge.lowering.common.builders import spread, with_slope
from bridge.lowering.common.promotion import cast, fused, opmath, promote
from bridge.lowering.common.provided import outside, refuse
from bridge.lowering.indexing.indexing import in_range
from bridge.lowering.linalg.matmul import precision
from bridge.lowering.nn.activations import log_softmax
from bridge.lowering.registry import lowering

_NONE, _MEAN, _SUM = range(3)


def _reduce(loss: Array, reduction: int, dtype: np.dtype) -> Array:
    """PyTorch's reductions (0 none, 1 mean, 2 sum) of a loss in the internal dtype, rounded once to
    dtype.
    """
    if reduction == _MEAN:
        loss = jnp.mean(loss)
    elif reduction == _SUM:
        loss = jnp.sum(loss)
    return cast(loss, dtype)


def _pointwise(fn: Callable[..., Array]) -> Callable[..., Array]:
    """A loss (input, target, reduction=1, *rest) from fn, which computes it element by element in
    PyTorch's internal dtype.
    """

    def run(x: Array, target: Array, reduction: int = _MEAN, *rest: Any, **kwargs: Any) -> Array:
        x, target = promote(x, target)
        wide = opmath(x.dtype)
        return _reduce(fn(cast(x, wide), cast(target, wide), *rest, **kwargs), reduction, x.dtype)

    # not functools.wraps: the signatures differ, and jit reads them
    run.__name__, run.__doc__ = fn.__name__, fn.__doc__
    return run


@lowering("aten.mse_loss")
@fused("reduction")
@_pointwise
def aten_mse_loss(x: Array, target: Array) -> Array:
    """mse_loss(Tensor self, Tensor target, int reduction=Mean) -> Tensor"""
    d = x - target
    return d * d


@lowering("aten.smooth_l1_loss")
def aten_smooth_l1_loss(
    x: Array, target: Array, reduction: int = _MEAN, beta: float = 1.0
) -> Array:
    """smooth_l1_loss(Tensor self, Tensor target, int reduction=Mean, float beta=1.0) -> Tensor"""
    if beta < 0:
        raise RuntimeError(
            f"beta: smooth_l1_loss does not support negative values for beta, got {beta}"
        )
    return _smooth_l1(x, target, reduction, float(beta))


@fused("reduction", "beta")
def _smooth_l1(x: Array, target: Array, reduction: int, beta: float) -> Array:
    def loss(x: Array, target: Array) -> Array:
        d = jnp.abs(x - target)
        if beta == 0:
            return with_slope(d, x - target, jnp.where(x <= target, -1.0, 1.0).astype(d.dtype))
        # the square of an infinite difference would have a derivative
        near = jnp.where(d >= beta, 0, d)
        return jnp.where(d >= beta, d - 0.5 * beta, 0.5 * near * near / beta)

    return _pointwise(loss)(x, target, reduction)


@lowering("aten.huber_loss")
@fused("reduction", "delta")
def aten_huber_loss(x: Array, target: Array, reduction: int = _MEAN, delta: float = 1.0) -> Array:
    """huber_loss(Tensor self, Tensor target, int reduction=Mean, float delta=1.0) -> Tensor"""
    if delta <= 0:
        raise RuntimeError(
            f"delta: huber_loss does not support non-positive values for delta, got {delta}"
        )

    def loss(x: Array, target: Array) -> Array:
        d = jnp.abs(x - target)
        near = jnp.where(d >= delta, 0, d)
        return jnp.where(d >= delta, delta * (d - 0.5 * delta), 0.5 * near * near)

    return cast(_pointwise(loss)(x, target, reduction), x.dtype)  # whatever the target's dtype is


@lowering("aten.soft_margin_loss")
@fused("reduction")
@_pointwise
def aten_soft_margin_loss(x: Array, target: Array) -> Array:
    """soft_margin_loss(Tensor self, Tensor target, int reduction=Mean) -> Tensor"""
    return jax.nn.softplus(-target * x)


@jax.custom_jvp
def _cross_entropy_terms(p: Array, target: Array) -> Array:
    """Binary cross entropy, with logarithms of at least -100."""
    return (target - 1) * jnp.maximum(jnp.log1p(-p), -100) - target * jnp.maximum(jnp.log(p), -100)


@jax.custom_jvp
def _cross_entropy_slope(p: Array, target: Array) -> Array:
    """The derivative by p, finite at 0 and 1, as PyTorch has it."""
    return (p - target) / jnp.maximum((1 - p) * p, 1e-12)


@_cross_entropy_terms.defjvp
def _cross_entropy_terms_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (p, target), (dp, dtarget) = primals, tangents
    target_slope = jnp.log1p(-p) - jnp.log(p)
    return _cross_entropy_terms(p, target), _cross_entropy_slope(
        p, target
    ) * dp + target_slope * dtarget


@_cross_entropy_slope.defjvp
def _cross_entropy_slope_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (p, target), (dp, dtarget) = primals, tangents
    # PyTorch's second derivatives, finite at 0 and 1; the choice keeps XLA from adding 1 and 1e-12,
    # which gives 1 in float32
    variance = (p + 1e-12) * (jnp.where(p > 1, 0, 1 - p) + 1e-12)
    return _cross_entropy_slope(p, target), (p * p - 2 * p * target + target) / (
        variance * variance
    ) * dp - dtarget / variance


@lowering("aten.binary_cross_entropy")
def aten_binary_cross_entropy(
    x: Array, target: Array, weight: Array | None = None, reduction: int = _MEAN
) -> Array:
    """binary_cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=Mean) ->
    Tensor
    """
    refuse(outside(x, 0, 1), "input: all elements of input should be between 0 and 1")
    return binary_cross_entropy(x, target, weight, reduction)


@fused("reduction")
def binary_cross_entropy(
    x: Array, target: Array, weight: Array | None = None, reduction: int = _MEAN
) -> Array:
    """aten_binary_cross_entropy, with unchecked inputs."""
    wide = opmath(x.dtype)
    loss = _cross_entropy_terms(cast(x, wide), cast(target, wide))
    return _reduce(loss if weight is None else loss * cast(weight, wide), reduction, x.dtype)


@lowering("aten.binary_cross_entropy_with_logits")
@fused("reduction")
def aten_binary_cross_entropy_with_logits(
    x: Array,
    target: Array,
    weight: Array | None = None,
    pos_weight: Array | None = None,
    reduction: int = _MEAN,
) -> Array:
    """binary_cross_entropy_with_logits(Tensor self, Tensor target, Tensor? weight=None, Tensor?
    pos_weight=None, int reduction=Mean) -> Tensor
    """
    dtype = promote(x, target)[0].dtype
    x, target = cast(x, opmath(dtype)), cast(target, opmath(dtype))
    softplus = jax.nn.softplus(-x)  # -log(sigmoid(x))
    if pos_weight is not None:
        softplus = softplus * (1 + (cast(pos_weight, x.dtype) - 1) * target)
    loss = (1 - target) * x + softplus
    return _reduce(loss if weight is None else loss * cast(weight, x.dtype), reduction, dtype)


# -- margins ---------------------------------------------------------------------------------------
@lowering("aten.multi_margin_loss")
def aten_multi_margin_loss(
    x: Array,
    target: Array,
    p: float = 1,
    margin: float = 1,
    weight: Array | None = None,
    reduction: int = _MEAN,
) -> Array:
    """multi_margin_loss(Tensor self, Tensor target, Scalar p=1, Scalar margin=1, Tensor?
    weight=None, int reduction=Mean) -> Tensor
    """
    if p not in (1, 2):
        raise RuntimeError(f"p: only p == 1 and p == 2 supported, got {p}")
    classes = x.shape[-1] if x.ndim else 1
    if x.ndim > 2 or not classes or target.size != x.size // classes or target.ndim > 1:
        raise RuntimeError(
            f"target: inconsistent target size, got {list(target.shape)} for an input of shape "
            f"{list(x.shape)}"
        )
    if weight is not None and weight.size != classes:
        raise RuntimeError(
            f"weight: inconsistent weight size, expected {classes} but got {list(weight.shape)}"
        )
    if target.dtype != np.int64:
        raise RuntimeError(
            f"target: expected scalar type Long but found {dtypes.to_torch(target.dtype)}"
        )
    labels, _ = in_range(target, classes, "target out of range: {index}", kind=RuntimeError)
    return _multi_margin(x, labels, weight, p, margin, reduction)


def _of_classes(labels: Array, classes: int, loss: Array, lowest: int = 0) -> Array:
    """The losses, with NaN for a class that does not exist (if the check of the labels could not
    raise).
    """
    return jnp.where((labels >= lowest) & (labels < classes), loss, jnp.nan)


@fused("p", "margin", "reduction")
def _multi_margin(
    x: Array, target: Array, weight: Array | None, p: float, margin: float, reduction: int
) -> Array:
    scores = cast(jnp.atleast_2d(x), opmath(x.dtype))
    hot = lax.broadcasted_iota(target.dtype, scores.shape, 1) == target.reshape(-1, 1)
    z = margin - jnp.sum(jnp.where(hot, scores, 0), 1, keepdims=True) + scores
    # at a margin that is exactly met the derivative is 0, as in PyTorch's kernel and unlike clamp's
    terms = jnp.where(~hot & (z > 0), z if p == 1 else z * z, 0)
    if weight is not None:
        terms = terms * jnp.sum(jnp.where(hot, cast(weight, terms.dtype), 0), 1, keepdims=True)
    loss = _of_classes(target.reshape(-1), scores.shape[1], jnp.mean(terms, 1))
    return _reduce(loss.reshape(target.shape) if reduction == _NONE else loss, reduction, x.dtype)


@lowering("aten.multi_margin_loss_backward")
def aten_multi_margin_loss_backward(
    grad_output: Array,
    x: Array,
    target: Array,
    p: float,
    margin: float,
    weight: Array | None = None,
    reduction: int = _MEAN,
) -> Array:
    """multi_margin_loss_backward(Tensor grad_output, Tensor self, Tensor target, Scalar p, Scalar
    margin, Tensor? weight=None, int reduction=Mean) -> Tensor
    """
    return varying.vjp(
        lambda x: aten_multi_margin_loss(x, target, p, margin, weight, reduction), x
    )[1](grad_output)[0]


@lowering("aten.multilabel_margin_loss_forward")
def aten_multilabel_margin_loss_forward(
    x: Array, target: Array, reduction: int
) -> tuple[Array, Array]:
    """multilabel_margin_loss_forward(Tensor self, Tensor target, int reduction) -> (Tensor output,
    Tensor is_target)
    """
    classes = x.shape[-1] if x.ndim else 1
    if x.ndim > 2 or not classes or target.shape != x.shape:
        raise RuntimeError(
            f"target: inconsistent target size: {list(target.shape)} for input of size: "
            f"{list(x.shape)}"
        )
    in_range(target + 1, classes + 1, "target out of range", kind=RuntimeError)
    return _multilabel_margin(x, target, reduction)


@fused("reduction")
def _multilabel_margin(x: Array, target: Array, reduction: int) -> tuple[Array, Array]:
    scores, labels = jnp.atleast_2d(cast(x, opmath(x.dtype))), jnp.atleast_2d(target)
    valid = lax.cumsum(cast(labels < 0, np.int32), 1) == 0  # labels end at the first negative one
    # (sample, label, class)
    hot = (labels[:, :, None] == lax.iota(labels.dtype, scores.shape[1])) & valid[:, :, None]
    is_target = jnp.any(hot, 1)
    z = 1 - jnp.sum(jnp.where(hot, scores[:, None], 0), 2)[:, :, None] + scores[:, None]
    counts = valid[:, :, None] & ~is_target[:, None] & (z > 0)
    loss = _of_classes(
        jnp.max(labels, 1),
        scores.shape[1],
        jnp.sum(jnp.where(counts, z, 0), (1, 2)) / scores.shape[1],
        lowest=-1,
    )
    loss = loss.reshape(target.shape[:-1]) if reduction == _NONE else loss
    return _reduce(loss, reduction, x.dtype), cast(is_target, x.dtype).reshape(target.shape)


@lowering("aten.multilabel_margin_loss_backward")
def aten_multilabel_margin_loss_backward(
    grad_output: Array, x: Array, target: Array, reduction: int, is_target: Array
) -> Array:
    """multilabel_margin_loss_backward(Tensor grad_output, Tensor self, Tensor target, int
    reduction, Tensor is_target) -> Tensor
    """
    return varying.vjp(lambda x: aten_multilabel_margin_loss_forward(x, target, reduction)[0], x)[
        1
    ](grad_output)[0]


# -- negative log likelihood -----------------------------------------------------------------------
@lowering("aten.nll_loss_forward")
def aten_nll_loss_forward(
    x: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """nll_loss_forward(Tensor self, Tensor target, Tensor? weight, int reduction, SymInt
    ignore_index) -> (Tensor output, Tensor total_weight)
    """
    if x.ndim not in (1, 2) or target.shape != x.shape[:-1]:
        raise (RuntimeError if x.ndim in (1, 2) and target.ndim > 1 else ValueError)(
            f"target: expected shape {list(x.shape[:-1])} for an input of shape {list(x.shape)}, "
            f"got {list(target.shape)}"
        )
    return _checked_nll(x, target, weight, reduction, ignore_index, x.ndim - 1)


@lowering("aten.nll_loss2d_forward")
def aten_nll_loss2d_forward(
    x: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """nll_loss2d_forward(Tensor self, Tensor target, Tensor? weight, int reduction, SymInt
    ignore_index) -> (Tensor output, Tensor total_weight)
    """
    if x.ndim != 4 or target.shape != (x.shape[0], *x.shape[2:]):
        raise RuntimeError(
            f"target: size mismatch, got input {list(x.shape)} and target {list(target.shape)}"
        )
    return _checked_nll(x, target, weight, reduction, ignore_index, 1)


def _checked_nll(
    x: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int, dim: int
) -> tuple[Array, Array]:
    classes = x.shape[dim]
    if weight is not None and weight.shape != (classes,):
        raise RuntimeError(
            f"weight: expected one weight for each of {classes} classes or nothing, got shape "
            f"{list(weight.shape)}"
        )
    if target.dtype == np.uint8:
        # in which -100 and classes beyond 255 can be said
        target = lax.convert_element_type(target, np.int32)
    ignored = lax.eq(target, lax.full_like(target, ignore_index))
    if target.size:
        in_range(
            lax.select(ignored, lax.full_like(target, 0), target),
            classes,
            "Target {index} is out of bounds.",
        )
    return _nll_loss(x, target, ignored, weight, reduction, 0 <= ignore_index < classes, dim)


@fused("reduction", "ignores_class", "dim")
def _nll_loss(
    x: Array,
    target: Array,
    ignored: Array,
    weight: Array | None,
    reduction: int,
    ignores_class: bool,
    dim: int,
) -> tuple[Array, Array]:
    """The loss and the sum of the weights; ignored: of each target, whether it is left out;
    ignores_class: whether that is a class.
    """
    wide, classes = opmath(x.dtype), x.shape[dim]
    # a mask instead of a gather: its transpose fuses with the softmax's and batches without cost,
    # unlike a scatter
    place = lax.select(ignored, lax.full_like(target, -1), target) if ignores_class else target
    hot = lax.eq(lax.broadcasted_iota(target.dtype, x.shape, dim), spread(place, x.shape, (dim,)))

    def picked(values: Array) -> Array:
        return lax.reduce_sum(lax.select(hot, values, lax.full_like(values, 0)), (dim,))

    weights = cast(lax.bitwise_not(ignored), wide)
    if weight is not None:
        weights = picked(lax.broadcast_in_dim(cast(weight, wide), x.shape, [dim]))
    loss = lax.neg(picked(cast(x, wide)))
    unsigned = np.dtype(f"u{target.dtype.itemsize}")  # a negative number is large in it
    known = lax.bitwise_or(ignored, lax.convert_element_type(target, unsigned) < classes)
    # a class that does not exist must not give a loss of zero
    loss = lax.add(loss, lax.select(known, lax.full_like(loss, 0), lax.full_like(loss, np.nan)))
    loss = loss if weight is None else loss * weights
    if reduction == _NONE:
        return cast(loss, x.dtype), jnp.zeros((), x.dtype)
    total, loss = (lax.reduce_sum(v, tuple(range(target.ndim))) for v in (weights, loss))
    return cast(loss / total if reduction == _MEAN else loss, x.dtype), cast(total, x.dtype)


# -- linear layer and cross entropy in one (torch 2.13 on) -----------------------------------------
with contextlib.suppress(ImportError):  # defines the operators
    import torch.nn.modules.linear_cross_entropy

_REDUCTIONS = {"none": _NONE, "mean": _MEAN, "sum": _SUM}


@lowering("torch_nn._linear_cross_entropy_batch_chunked_no_reduction")
def torch_nn__linear_cross_entropy_batch_chunked_no_reduction(
    x: Array,
    linear_weight: Array,
    target: Array,
    linear_bias: Array | None,
    weight: Array | None,
    ignore_index: int,
    *_plan: Any,
) -> Array:
    """_linear_cross_entropy_batch_chunked_no_reduction(Tensor input, Tensor linear_weight, Tensor
    target, Tensor? linear_bias, Tensor? weight, int ignore_index, int batch_chunk_size, str
    acc_policy, ScalarType acc_dtype) -> Tensor
    """
    return _linear_cross_entropy(x, linear_weight, linear_bias, target, weight, _NONE, ignore_index)


def _linear_cross_entropy(
    x: Array,
    linear_weight: Array,
    linear_bias: Array | None,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
) -> Array:
    wide = opmath(x.dtype)
    logits = lax.dot_general(x, linear_weight, (((1,), (1,)), ((), ())), precision(x.dtype), wide)
    if linear_bias is not None:
        logits = logits + cast(linear_bias, wide)
    weight, likely = weight if weight is None else cast(weight, wide), log_softmax(logits, 1)
    if target.ndim == 1:
        return cast(_checked_nll(likely, target, weight, reduction, ignore_index, 1)[0], x.dtype)
    # from torch 2.15 on, the target may be a probability for each class; the mean is that of the
    # rows
    loss = -jnp.sum(cast(target, wide) * (likely if weight is None else likely * weight), 1)
    return cast({_NONE: loss, _MEAN: loss.mean(), _SUM: loss.sum()}[reduction], x.dtype)


@lowering("torch_nn._linear_cross_entropy_batch_chunked")
def torch_nn__linear_cross_entropy_batch_chunked(
    x: Array,
    linear_weight: Array,
    target: Array,
    linear_bias: Array | None,
    weight: Array | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: torch.dtype,
    allow_retain_graph: bool,
    compute_input_grad: bool,
    compute_linear_weight_grad: bool,
    compute_linear_bias_grad: bool,
) -> tuple[Array, Array, Array, Array]:
    """_linear_cross_entropy_batch_chunked(Tensor input, Tensor linear_weight, Tensor target,
    Tensor? linear_bias, Tensor? weight, str reduction, int ignore_index, float label_smoothing,
    ...) -> (Tensor loss, Tensor, Tensor, Tensor)

    The gradients that it returns beside the loss are for PyTorch's own backward; they are empty
    unless requested.
    """
    if label_smoothing > 0:
        raise NotImplementedError("linear_cross_entropy does not support label smoothing")
    sources = (x, linear_weight) if linear_bias is None else (x, linear_weight, linear_bias)

    def loss(x: Array, linear_weight: Array, linear_bias: Array | None = None) -> Array:
        return _linear_cross_entropy(
            x, linear_weight, linear_bias, target, weight, _REDUCTIONS[reduction], ignore_index
        )

    value, pull = varying.vjp(loss, *sources)
    wanted = (compute_input_grad, compute_linear_weight_grad, compute_linear_bias_grad)
    grads = pull(jnp.ones_like(value)) if any(wanted) else ()
    empty = [jnp.zeros((0,) * rank, x.dtype) for rank in (2, 2, 1)]
    of_input, of_weight, of_bias = (grads[i] if wanted[i] else empty[i] for i in range(3))
    return value, of_input, of_weight, of_bias
