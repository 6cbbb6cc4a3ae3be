"""Images as patches and back: unfold, fold, and the shuffles between channels and space."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from bridge.lowering.common.promotion import fused
from bridge.lowering.nn.convolution_primitive import Geometry, gather, spread
from bridge.lowering.nn.pooling import expand
from bridge.lowering.registry import lowering

Array = jax.Array


def _geometry(
    image: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Geometry:
    given = {"kernel_size": kernel_size, "dilation": dilation, "padding": padding, "stride": stride}
    k, d, p, s = (expand(name, value, 2) for name, value in given.items())
    if min(*k, *d, *s) <= 0 or min(p) < 0:
        raise RuntimeError(
            f"kernel_size {k}, dilation {d} and stride {s} should be greater than zero, padding "
            f"{p} not negative"
        )
    out = tuple((image[i] + 2 * p[i] - d[i] * (k[i] - 1) - 1) // s[i] + 1 for i in range(2))
    if min(out) < 1:
        raise RuntimeError(
            f"Given input with spatial size {list(image)}, kernel_size={list(k)}, "
            f"dilation={list(d)}, padding={list(p)}, calculated shape of the array of sliding "
            f"blocks as {list(out)}, but its components must be at least one."
        )
    return Geometry(tuple(image), k, out, s, p, d)


@lowering("aten.im2col")
def aten_im2col(
    x: Array,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    """im2col(Tensor self, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) ->
    Tensor
    """
    if x.ndim not in (3, 4):
        raise RuntimeError(
            "Expected 3D or 4D (batch mode) tensor for input with possibly 0 batch size, but got: "
            f"{list(x.shape)}"
        )
    return _im2col(x, _geometry(x.shape[-2:], kernel_size, dilation, padding, stride))


@fused("geometry")
def _im2col(x: Array, geometry: Geometry) -> Array:
    return spread(x, x.ndim - 2, geometry).reshape(
        *x.shape[:-3], x.shape[-3] * math.prod(geometry.kernel), math.prod(geometry.out)
    )


@lowering("aten.col2im")
def aten_col2im(
    x: Array,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    """col2im(Tensor self, SymInt[2] output_size, int[2] kernel_size, int[2] dilation, int[2]
    padding, int[2] stride) -> Tensor
    """
    geometry = _geometry(
        expand("output_size", output_size, 2), kernel_size, dilation, padding, stride
    )
    taps, blocks = math.prod(geometry.kernel), math.prod(geometry.out)
    if x.ndim not in (2, 3) or x.shape[-2] % taps or x.shape[-1] != blocks:
        raise RuntimeError(
            "Expected size of input's dimension 1 to be divisible by the product of kernel_size "
            f"({taps}) and its dimension 2 to be {blocks}, but got input {list(x.shape)}"
        )
    return _col2im(x, geometry)


@fused("geometry")
def _col2im(x: Array, geometry: Geometry) -> Array:
    columns = x.reshape(
        *x.shape[:-2], x.shape[-2] // math.prod(geometry.kernel), *geometry.kernel, *geometry.out
    )
    return gather(columns, x.ndim - 1, geometry)


@lowering("aten.pixel_shuffle")
def aten_pixel_shuffle(x: Array, upscale_factor: int) -> Array:
    """pixel_shuffle(Tensor self, int upscale_factor) -> Tensor"""
    r = upscale_factor
    if x.ndim < 3:
        raise RuntimeError(
            "pixel_shuffle expects input to have at least 3 dimensions, but got input with "
            f"{x.ndim} dimension(s)"
        )
    if r <= 0 or x.shape[-3] % (r * r):
        raise RuntimeError(
            "pixel_shuffle expects its input's channels to be divisible by the square of "
            f"upscale_factor, got {r}"
        )
    (*lead, c, h, w), n = x.shape, x.ndim - 3
    x = x.reshape(*lead, c // (r * r), r, r, h, w)
    x = jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return x.reshape(*lead, c // (r * r), h * r, w * r)


@lowering("aten.pixel_unshuffle")
def aten_pixel_unshuffle(x: Array, downscale_factor: int) -> Array:
    """pixel_unshuffle(Tensor self, int downscale_factor) -> Tensor"""
    r = downscale_factor
    if x.ndim < 3:
        raise RuntimeError(
            "pixel_unshuffle expects input to have at least 3 dimensions, but got input with "
            f"{x.ndim} dimension(s)"
        )
    if r <= 0 or x.shape[-2] % r or x.shape[-1] % r:
        raise RuntimeError(
            "pixel_unshuffle expects height and width to be divisible by downscale_factor, got "
            f"{list(x.shape)} and {r}"
        )
    (*lead, c, h, w), n = x.shape, x.ndim - 3
    x = x.reshape(*lead, c, h // r, r, w // r, r)
    x = jnp.transpose(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return x.reshape(*lead, c * r * r, h // r, w // r)


@lowering("aten.channel_shuffle", "aten.native_channel_shuffle")
def aten_channel_shuffle(x: Array, groups: int) -> Array:
    """channel_shuffle(Tensor self, SymInt groups) -> Tensor"""
    if x.ndim < 3 or groups <= 0 or x.shape[1] % groups:
        raise RuntimeError(
            f"channel_shuffle: expected channels of {list(x.shape)} to be "
            f"divisible by groups, got {groups}"
        )
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return jnp.swapaxes(split, 1, 2).reshape(x.shape)
