"""Layer, batch, group and RMS normalization.  All share one standardization, whose derivative is written by hand.

Batch norm's lowerings are pure: the running statistics come back as new arrays (``_native_batch_norm_legit_functional``).
"""
from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bridge.lowering.promotion import cast, fused, opmath, require_inexact
from bridge.lowering.registry import lowering

Array = jax.Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def standardize(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    """x with mean 0 and variance 1 over axes; its mean and reciprocal standard deviation (axes kept).

    The derivative is in closed form: it keeps the output and the deviation only, and takes two sums in place of four.
    """
    mean = jnp.mean(x, axes, keepdims=True)
    centered = x - mean
    rstd = lax.rsqrt(jnp.mean(centered * centered, axes, keepdims=True) + eps)
    return centered * rstd, mean, rstd


@standardize.defjvp
def _standardize_jvp(axes: tuple[int, ...], eps: float, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    y, mean, rstd = standardize(*primals, axes, eps)
    (dx,) = tangents
    dmean = jnp.mean(dx, axes, keepdims=True)
    along = jnp.mean(y * dx, axes, keepdims=True)
    return (y, mean, rstd), (rstd * (dx - dmean - y * along), dmean, -rstd * rstd * along)


def _scale_shift(y: Array, weight: Array | None, bias: Array | None, shape: tuple[int, ...]) -> Array:
    if weight is not None:
        y = y * cast(weight, y.dtype).reshape(shape)
    if bias is not None:
        y = y + cast(bias, y.dtype).reshape(shape)
    return y


def _stats_dtype(x: Array, weight: Array | None) -> np.dtype:
    """The dtype of the statistics returned: the parameters' where there are any (mixed precision), else the input's."""
    return x.dtype if weight is None else weight.dtype


@lowering("aten.native_layer_norm")
def aten_native_layer_norm(
    x: Array, normalized_shape: list[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)"""
    shape = tuple(normalized_shape)
    if not shape or x.shape[x.ndim - len(shape) :] != shape:
        raise RuntimeError(
            f"normalized_shape: given {list(shape)}, expected input with shape {['*', *shape]}, but got input of size {list(x.shape)}"
        )
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.shape != shape:
            raise RuntimeError(f"{name}: expected shape {list(shape)} as normalized_shape, got {list(p.shape)}")
    require_inexact(x, "native_layer_norm")
    return _layer_norm(x, weight, bias, len(shape), float(eps))


@fused("ndim", "eps")
def _layer_norm(x: Array, weight: Array | None, bias: Array | None, ndim: int, eps: float) -> tuple[Array, Array, Array]:
    axes = tuple(range(x.ndim - ndim, x.ndim))
    y, mean, rstd = standardize(cast(x, opmath(x.dtype)), axes, eps)
    stats = _stats_dtype(x, weight if weight is not None else bias)
    return cast(_scale_shift(y, weight, bias, x.shape[x.ndim - ndim :]), x.dtype), cast(mean, stats), cast(rstd, stats)


@lowering("aten._fused_rms_norm")
def aten__fused_rms_norm(
    x: Array, normalized_shape: list[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    """_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"""
    require_inexact(x, "rms_norm")
    eps = float(jnp.finfo(opmath(x.dtype)).eps) if eps is None else float(eps)
    return _rms_norm(x, weight, len(normalized_shape), eps)


@fused("ndim", "eps")
def _rms_norm(x: Array, weight: Array | None, ndim: int, eps: float) -> tuple[Array, Array]:
    wide = cast(x, opmath(x.dtype))
    axes = tuple(range(x.ndim - ndim, x.ndim))
    rstd = lax.rsqrt(jnp.mean(wide * wide, axes, keepdims=True) + eps)
    return cast(_scale_shift(wide * rstd, weight, None, x.shape[x.ndim - ndim :]), x.dtype), rstd


@lowering("aten.native_group_norm")
def aten_native_group_norm(
    x: Array, weight: Array | None, bias: Array | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Array, Array, Array]:
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group, float eps)
    -> (Tensor, Tensor, Tensor)"""
    if group <= 0 or C % group:
        raise RuntimeError(f"group: expected number of channels {C} in input to be divisible by num_groups, got {group}")
    require_inexact(x, "native_group_norm")
    return _group_norm(x, weight, bias, (N, C), group, float(eps))


@fused("lead", "group", "eps")
def _group_norm(
    x: Array, weight: Array | None, bias: Array | None, lead: tuple[int, int], group: int, eps: float
) -> tuple[Array, Array, Array]:
    (n, c), stats = lead, _stats_dtype(x, weight if weight is not None else bias)
    grouped = cast(x, opmath(x.dtype)).reshape(n, group, math.prod(x.shape) // max(n * group, 1))
    y, mean, rstd = standardize(grouped, (2,), eps)
    y = _scale_shift(y.reshape(x.shape), weight, bias, (c,) + (1,) * (x.ndim - 2))
    return cast(y, x.dtype), cast(mean.reshape(n, group), stats), cast(rstd.reshape(n, group), stats)


@lowering("aten._native_batch_norm_legit_functional")
def aten__native_batch_norm_legit_functional(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var,
    bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)"""
    require_inexact(x, "native_batch_norm")
    for name, p in (("weight", weight), ("bias", bias), ("running_mean", running_mean), ("running_var", running_var)):
        if p is not None and p.shape != (x.shape[1],):
            raise RuntimeError(f"{name} should contain {x.shape[1]} elements not {p.size}")
    if not training:
        if running_mean is None or running_var is None:
            raise RuntimeError("running_mean and running_var must be defined in evaluation mode")
        empty = jnp.zeros((0,), _stats_dtype(x, weight if weight is not None else running_mean))
        return _batch_norm_eval(x, weight, bias, running_mean, running_var, float(eps)), empty, empty, running_mean, running_var
    return _batch_norm_train(x, weight, bias, running_mean, running_var, float(momentum), float(eps))


@fused("eps")
def _batch_norm_eval(x: Array, weight: Array | None, bias: Array | None, mean: Array, var: Array, eps: float) -> Array:
    shape, dtype = (-1,) + (1,) * (x.ndim - 2), opmath(x.dtype)
    # fold the statistics and parameters, so that the array itself is read once: x * scale + shift
    scale = lax.rsqrt(cast(var, dtype) + eps)
    if weight is not None:
        scale = scale * cast(weight, dtype)
    shift = -cast(mean, dtype) * scale
    if bias is not None:
        shift = shift + cast(bias, dtype)
    return cast(cast(x, dtype) * scale.reshape(shape) + shift.reshape(shape), x.dtype)


@fused("momentum", "eps")
def _batch_norm_train(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    axes, shape = (0, *range(2, x.ndim)), (-1,) + (1,) * (x.ndim - 2)
    wide = cast(x, opmath(x.dtype))
    y, mean, rstd = standardize(wide, axes, eps)
    mean, rstd, stats = mean.reshape(-1), rstd.reshape(-1), _stats_dtype(x, weight if weight is not None else running_mean)
    if running_mean is not None:
        running_mean = _moved(running_mean, mean, momentum)
    if running_var is not None:
        n = x.size // max(x.shape[1], 1)
        var = jnp.var(lax.stop_gradient(wide), axes) * (n / (n - 1) if n > 1 else math.nan)  # the running one is unbiased
        running_var = _moved(running_var, var, momentum)
    return cast(_scale_shift(y, weight, bias, shape), x.dtype), cast(mean, stats), cast(rstd, stats), running_mean, running_var


def _moved(running: Array, new: Array, momentum: float) -> Array:
    """The running statistic moved towards a new one; no gradient flows into it."""
    new = lax.stop_gradient(new)
    return cast((1 - momentum) * cast(running, new.dtype) + momentum * new, running.dtype)


@lowering("aten.native_batch_norm", "aten._native_batch_norm_legit")
def aten_native_batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array]:
    """native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training,
    float momentum, float eps) -> (Tensor, Tensor, Tensor)"""
    return aten__native_batch_norm_legit_functional(x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@lowering("aten._native_batch_norm_legit.no_stats")
def aten__native_batch_norm_legit_no_stats(
    x: Array, weight: Array | None, bias: Array | None, training: bool, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    """_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, bool training, float momentum, float eps)
    -> (Tensor, Tensor, Tensor)"""
    return aten__native_batch_norm_legit_functional(x, weight, bias, None, None, True, momentum, eps)[:3]
