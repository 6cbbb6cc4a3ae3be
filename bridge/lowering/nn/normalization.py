"""Layer, batch, group and RMS normalization. All share one standardization, whose derivative is
written by hand.

Batch norm's lowerings are pure: the running statistics come back as new arrays
(``_native_batch_norm_legit_functional``).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bridge.lowering.common.builders import spread
from bridge.lowering.common.promotion import cast, fused, opmath, require_inexact
from bridge.lowering.registry import lowering
from bridge.lowering.tensors.creation import number

Array = jax.Array


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    """The mean over axes, which the result does not have."""
    return lax.div(lax.reduce_sum(x, axes), number(math.prod([x.shape[d] for d in axes]), x.dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def standardize(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array, Array, Array]:
    """x with mean 0 and variance 1 over axes; its mean, variance and reciprocal standard deviation,
    without axes.

    The derivative is in closed form: it keeps only the output and the deviation, and takes two sums
    instead of four.
    """
    mean = _mean(x, axes)
    centered = lax.sub(x, spread(mean, x.shape, axes))
    var = _mean(lax.mul(centered, centered), axes)
    rstd = lax.rsqrt(var + eps)
    return lax.mul(centered, spread(rstd, x.shape, axes)), mean, var, rstd


@standardize.defjvp
def _standardize_jvp(
    axes: tuple[int, ...], eps: float, primals: tuple, tangents: tuple
) -> tuple[tuple, tuple]:
    y, mean, var, rstd = standardize(*primals, axes, eps)
    (dx,) = tangents
    dmean, along = _mean(dx, axes), _mean(lax.mul(y, dx), axes)
    rest = lax.sub(
        lax.sub(dx, spread(dmean, y.shape, axes)), lax.mul(y, spread(along, y.shape, axes))
    )
    dy = lax.mul(spread(rstd, y.shape, axes), rest)
    return (y, mean, var, rstd), (dy, dmean, 2 * along / rstd, -rstd * rstd * along)


def _scale_shift(
    y: Array, weight: Array | None, bias: Array | None, dims: tuple[int, ...]
) -> Array:
    """y * weight + bias; dims: the dimensions of y that weight and bias have."""
    if weight is not None:
        y = lax.mul(y, lax.broadcast_in_dim(cast(weight, y.dtype), y.shape, dims))
    if bias is not None:
        y = lax.add(y, lax.broadcast_in_dim(cast(bias, y.dtype), y.shape, dims))
    return y


def _stats_dtype(x: Array, weight: Array | None) -> np.dtype:
    """The dtype of the returned statistics: the parameters' if there are any (mixed precision),
    else the input's.
    """
    return x.dtype if weight is None else weight.dtype


@lowering("aten.native_layer_norm", no_grad_outputs=(1, 2))
def aten_native_layer_norm(
    x: Array, normalized_shape: list[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias,
    float eps) -> (Tensor, Tensor, Tensor)
    """
    shape = tuple(normalized_shape)
    if not shape or x.shape[x.ndim - len(shape) :] != shape:
        raise RuntimeError(
            f"normalized_shape: given {list(shape)}, expected input with shape {['*', *shape]}, "
            f"but got input of size {list(x.shape)}"
        )
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.shape != shape:
            raise RuntimeError(
                f"{name}: expected shape {list(shape)} as normalized_shape, got {list(p.shape)}"
            )
    require_inexact(x, "native_layer_norm")
    return _layer_norm(x, weight, bias, len(shape), float(eps))


@fused("ndim", "eps")
def _layer_norm(
    x: Array, weight: Array | None, bias: Array | None, ndim: int, eps: float
) -> tuple[Array, Array, Array]:
    axes = tuple(range(x.ndim - ndim, x.ndim))
    y, mean, _, rstd = standardize(cast(x, opmath(x.dtype)), axes, eps)
    stats = _stats_dtype(x, weight if weight is not None else bias)
    kept = x.shape[: x.ndim - ndim] + (1,) * ndim
    # PyTorch gives returned statistics no derivative
    mean, rstd = (lax.reshape(lax.stop_gradient(v), kept) for v in (mean, rstd))
    return cast(_scale_shift(y, weight, bias, axes), x.dtype), cast(mean, stats), cast(rstd, stats)


@lowering("aten._fused_rms_norm")
def aten__fused_rms_norm(
    x: Array, normalized_shape: list[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    """_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor,
    Tensor)
    """
    require_inexact(x, "rms_norm")
    eps = float(jnp.finfo(opmath(x.dtype)).eps) if eps is None else float(eps)
    return _rms_norm(x, weight, len(normalized_shape), eps)


@fused("ndim", "eps")
def _rms_norm(x: Array, weight: Array | None, ndim: int, eps: float) -> tuple[Array, Array]:
    wide = cast(x, opmath(x.dtype))
    axes = tuple(range(x.ndim - ndim, x.ndim))
    rstd = lax.rsqrt(jnp.mean(wide * wide, axes, keepdims=True) + eps)
    return cast(_scale_shift(wide * rstd, weight, None, axes), x.dtype), rstd


@lowering("aten.native_group_norm")
def aten_native_group_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW,
    int group, float eps) -> (Tensor, Tensor, Tensor)
    """
    if group <= 0 or C % group:
        raise RuntimeError(
            f"group: expected number of channels {C} in input to be divisible "
            f"by num_groups, got {group}"
        )
    require_inexact(x, "native_group_norm")
    return _group_norm(x, weight, bias, N, group, float(eps))


@fused("n", "group", "eps")
def _group_norm(
    x: Array, weight: Array | None, bias: Array | None, n: int, group: int, eps: float
) -> tuple[Array, Array, Array]:
    stats = _stats_dtype(x, weight if weight is not None else bias)
    grouped = cast(x, opmath(x.dtype)).reshape(n, group, math.prod(x.shape) // max(n * group, 1))
    y, mean, _, rstd = standardize(grouped, (2,), eps)
    y = _scale_shift(y.reshape(x.shape), weight, bias, (1,))
    return (
        cast(y, x.dtype),
        cast(mean.reshape(n, group), stats),
        cast(rstd.reshape(n, group), stats),
    )


@lowering("aten._native_batch_norm_legit_functional", no_grad_outputs=(1, 2, 3, 4))
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
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor
    running_mean, Tensor running_var, bool training, float momentum, float eps) -> (Tensor, Tensor,
    Tensor, Tensor running_mean_out, Tensor running_var_out)
    """
    require_inexact(x, "native_batch_norm")
    for name, p in (
        ("weight", weight),
        ("bias", bias),
        ("running_mean", running_mean),
        ("running_var", running_var),
    ):
        if p is not None and p.shape != (x.shape[1],):
            raise RuntimeError(f"{name} should contain {x.shape[1]} elements not {p.size}")
    if not training:
        if running_mean is None or running_var is None:
            raise RuntimeError("running_mean and running_var must be defined in evaluation mode")
        empty = jnp.zeros((0,), _stats_dtype(x, weight if weight is not None else running_mean))
        return (
            _batch_norm_eval(x, weight, bias, running_mean, running_var, float(eps)),
            empty,
            empty,
            running_mean,
            running_var,
        )
    return _batch_norm_train(
        x, weight, bias, running_mean, running_var, float(momentum), float(eps)
    )


@fused("eps")
def _batch_norm_eval(
    x: Array, weight: Array | None, bias: Array | None, mean: Array, var: Array, eps: float
) -> Array:
    shape, dtype = (-1,) + (1,) * (x.ndim - 2), opmath(x.dtype)
    # fold the statistics and parameters into x * scale + shift, so that x is read once
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
    y, mean, var, rstd = standardize(cast(x, opmath(x.dtype)), (0, *range(2, x.ndim)), eps)
    mean, var, rstd = map(lax.stop_gradient, (mean, var, rstd))
    stats = _stats_dtype(x, weight if weight is not None else running_mean)
    if running_mean is not None:
        running_mean = _moved(running_mean, mean, momentum)
    if running_var is not None:
        n = x.size // max(x.shape[1], 1)
        # the running variance is unbiased
        running_var = _moved(running_var, var * (n / (n - 1) if n > 1 else math.nan), momentum)
    return (
        cast(_scale_shift(y, weight, bias, (1,)), x.dtype),
        cast(mean, stats),
        cast(rstd, stats),
        running_mean,
        running_var,
    )


def _moved(running: Array, new: Array, momentum: float) -> Array:
    """The running statistic moved towards a new one, which is a constant: no gradient flows into
    it.
    """
    return cast((1 - momentum) * cast(running, new.dtype) + momentum * new, running.dtype)


@lowering(
    "aten.native_batch_norm",
    writes={"running_mean": 3, "running_var": 4},
    no_grad_outputs=(1, 2, 3, 4),
)
def aten_native_batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor?
    running_var, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)
    """
    out = aten__native_batch_norm_legit_functional(
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return out if training else (*out[:3], None, None)


@lowering("aten._native_batch_norm_legit.no_stats", no_grad_outputs=(1, 2))
def aten__native_batch_norm_legit_no_stats(
    x: Array, weight: Array | None, bias: Array | None, training: bool, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    """_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, bool training,
    float momentum, float eps) -> (Tensor, Tensor, Tensor)
    """
    return aten__native_batch_norm_legit_functional(
        x, weight, bias, None, None, True, momentum, eps
    )[:3]


@lowering("aten._batch_norm_with_update_functional", no_grad_outputs=(1, 2, 3, 4, 5))
def aten__batch_norm_with_update_functional(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array, Array | None, Array | None]:
    """_batch_norm_with_update_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor
    running_mean, Tensor running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor,
    Tensor running_mean_out, Tensor running_var_out)
    """
    out = aten__native_batch_norm_legit_functional(
        x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return *out[:3], jnp.zeros((0,), np.uint8), *out[3:]


# -- backward: of PyTorch's own autograd inside a transform ----------------------------------------
@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _statistics(x: Array, mean: Array, rstd: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """mean and rstd with their derivatives as statistics of x, which those that the forward pass
    returned do not have.
    """
    return mean, rstd


@_statistics.defjvp
def _statistics_jvp(axes: tuple[int, ...], primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    x, dx = primals[0], tangents[0]
    mean, rstd = _statistics(*primals, axes)
    along = jnp.mean((x - mean) * rstd * dx, axes, keepdims=True)
    return (mean, rstd), (jnp.mean(dx, axes, keepdims=True), -rstd * rstd * along)


@fused("shape", "axes", "scaled", "training")
def _norm_backward(
    grad: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    scaled: tuple[int, ...],
    training: bool = True,
) -> tuple[Array, Array, Array]:
    """Cotangents of the input and, flat, of weight and bias.

    shape: the input is viewed in it; axes are then its reduced dimensions, and scaled those of the
    parameters.
    """
    dtype = opmath(x.dtype)
    grad, wide = cast(grad, dtype).reshape(shape), cast(x, dtype).reshape(shape)
    kept = tuple(1 if d in axes else n for d, n in enumerate(shape))
    mean, rstd = cast(mean, dtype).reshape(kept), cast(rstd, dtype).reshape(kept)
    if training:
        mean, rstd = _statistics(wide, mean, rstd, axes)
    y = (wide - mean) * rstd
    rest = tuple(d for d in range(len(shape)) if d not in scaled)
    dweight, dbias = jnp.sum(grad * y, rest).reshape(-1), jnp.sum(grad, rest).reshape(-1)
    if weight is not None:
        grad = grad * cast(weight, dtype).reshape(
            [n if d in scaled else 1 for d, n in enumerate(shape)]
        )
    if training:
        grad = (
            grad - jnp.mean(grad, axes, keepdims=True) - y * jnp.mean(grad * y, axes, keepdims=True)
        )
    return cast((grad * rstd).reshape(x.shape), x.dtype), dweight, dbias


def _wanted(
    found: tuple[Array, Array, Array], like: Array | None, shape: tuple[int, ...], mask: list[bool]
) -> tuple[Array | None, ...]:
    dx, dweight, dbias = found
    dtype = dx.dtype if like is None else like.dtype
    out = dx, cast(dweight.reshape(shape), dtype), cast(dbias.reshape(shape), dtype)
    return tuple(g if m else None for g, m in zip(out, mask, strict=True))


@lowering("aten.native_layer_norm_backward")
def aten_native_layer_norm_backward(
    grad_out: Array,
    x: Array,
    normalized_shape: list[int],
    mean: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,
    output_mask: list[bool],
) -> tuple[Array | None, ...]:
    """native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor
    mean, Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor,
    Tensor)
    """
    inner = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    found = _norm_backward(grad_out, x, mean, rstd, weight, x.shape, inner, inner)
    return _wanted(
        found, weight if weight is not None else bias, tuple(normalized_shape), output_mask
    )


@lowering("aten.native_batch_norm_backward")
def aten_native_batch_norm_backward(
    grad_out: Array,
    x: Array,
    weight: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    save_mean: Array | None,
    save_invstd: Array | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Array | None, ...]:
    """native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor?
    running_mean, Tensor? running_var, Tensor? save_mean, Tensor? save_invstd, bool train, float
    eps, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    axes = (0, *range(2, x.ndim))
    mean, rstd = (
        (save_mean, save_invstd)
        if train
        else (running_mean, lax.rsqrt(cast(running_var, opmath(x.dtype)) + float(eps)))
    )
    return _wanted(
        _norm_backward(grad_out, x, mean, rstd, weight, x.shape, axes, (1,), bool(train)),
        weight,
        (x.shape[1],),
        output_mask,
    )
