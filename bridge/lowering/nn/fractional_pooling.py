"""Max pooling over windows drawn at random (fractional)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bridge.lowering.common.promotion import fused
from bridge.lowering.nn.pooling import expand, take_places
from bridge.lowering.registry import lowering

Array = jax.Array


def _starts(sample: Array, size: int, kernel: int, out: int) -> Array:
    """The first index of each window, (N, C, out), for samples (N, C) in [0, 1)."""
    last = jnp.full((*sample.shape, 1), size - kernel, jnp.int32)
    if out == 1:
        return last
    alpha = jnp.asarray((size - kernel) / (out - 1), sample.dtype)
    place = jnp.arange(out - 1, dtype=sample.dtype)
    first = jnp.trunc((place + sample[..., None]) * alpha) - jnp.trunc(sample[..., None] * alpha)
    return jnp.concatenate([first.astype(jnp.int32), last], -1)


@fused("kernel", "out")
def _fractional(
    x: Array, samples: Array, kernel: tuple[int, ...], out: tuple[int, ...]
) -> tuple[Array, Array]:
    n, image = len(kernel), x.shape[x.ndim - len(kernel) :]
    grouped = x if x.ndim == n + 2 else x[None]
    # in two dimensions PyTorch reads the width's sample first
    order = range(n) if n == 3 else reversed(range(n))
    flat: Any = 0
    for i, which in enumerate(order):
        # (N, C, out, kernel)
        at = _starts(samples[..., which], image[i], kernel[i], out[i])[..., None] + jnp.arange(
            kernel[i]
        )
        shape = [1] * (2 * n)
        shape[i], shape[n + i] = out[i], kernel[i]
        flat = flat + at.reshape(*at.shape[:2], *shape) * math.prod(image[i + 1 :])
    lead, blocks = grouped.shape[:2], math.prod(out)
    taps = math.prod(kernel)  # no -1: a batch may be empty
    flat = jnp.broadcast_to(flat, (*lead, *out, *kernel)).reshape(*lead, blocks, taps)
    elements = lax.stop_gradient(grouped).reshape(*lead, math.prod(image))
    windows = jnp.take_along_axis(elements, flat.reshape(*lead, blocks * taps), 2).reshape(
        flat.shape
    )
    place = jnp.take_along_axis(
        flat, lax.argmax(windows, windows.ndim - 1, jnp.int32)[..., None], -1
    ).reshape(*lead, *out)
    values, place = take_places(grouped, place, n), place.astype(jnp.int64)
    return (values, place) if x.ndim == n + 2 else (values[0], place[0])


def _fractional_max_pool(
    x: Array,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    random_samples: Array,
    *,
    n: int,
) -> tuple[Array, Array]:
    """fractional_max_pool2d(Tensor self, int[2] kernel_size, int[2] output_size, Tensor
    random_samples) -> (Tensor, Tensor)
    """
    kernel, out = expand("kernel_size", kernel_size, n), expand("output_size", output_size, n)
    if x.ndim not in (n + 1, n + 2):
        raise RuntimeError(
            f"fractional_max_pool{n}d: expected {n + 1}D or {n + 2}D input, got {list(x.shape)}"
        )
    for size, k, o in zip(x.shape[-n:], kernel, out, strict=True):
        if o + k - 1 > size:
            raise RuntimeError(
                f"fractional_max_pool{n}d: pool size {k} and output size {o} too large relative to "
                f"input size {size}"
            )
    return _fractional(x, random_samples, kernel, out)


def _pick_backward(
    grad: Array,
    x: Array,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    indices: Array,
    *,
    n: int,
) -> Array:
    """fractional_max_pool2d_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2]
    output_size, Tensor indices) -> Tensor
    """
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.linear_transpose(lambda a: take_places(a, indices, n), like)(grad)[0]


for _n in (2, 3):
    lowering(f"aten.fractional_max_pool{_n}d")(functools.partial(_fractional_max_pool, n=_n))
    lowering(f"aten.fractional_max_pool{_n}d_backward")(functools.partial(_pick_backward, n=_n))
