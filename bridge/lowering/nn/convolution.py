"""Convolutions of one, two and three dimensions, transposed ones, and their derivative."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from bridge.convert.dtypes import to_torch
from bridge.lowering.common.promotion import cast
from bridge.lowering.linalg.matmul import precision
from bridge.lowering.nn.convolution_geometry import Geometry
from bridge.lowering.nn.convolution_primitive import conv
from bridge.lowering.nn.pooling import expand
from bridge.lowering.registry import lowering

Array = jax.Array


def _check(
    x: Array,
    weight: Array,
    stride: tuple,
    padding: tuple,
    dilation: tuple,
    transposed: bool,
    groups: int,
) -> None:
    n = weight.ndim - 2
    if x.ndim != n + 2:
        raise RuntimeError(
            f"Expected {n + 2}D (batched) input to conv{n}d, but got input of size: {list(x.shape)}"
        )
    if x.dtype != weight.dtype:
        raise RuntimeError(
            f"Input type ({to_torch(x.dtype)}) and weight type ({to_torch(weight.dtype)}) "
            "should be the same"
        )
    if groups <= 0:
        raise RuntimeError("non-positive groups is not supported")
    if min(stride) <= 0:
        raise RuntimeError("non-positive stride is not supported")
    if min(padding) < 0:
        raise RuntimeError("negative padding is not supported")
    if min(dilation) <= 0:
        raise RuntimeError("dilation should be greater than zero")
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.shape[1] != channels or weight.shape[0] % groups:
        raise RuntimeError(
            f"Given groups={groups}, weight of size {list(weight.shape)}, expected "
            f"input{list(x.shape)} to have {channels} channels, but got {x.shape[1]} channels "
            "instead"
        )


@lowering("aten.convolution", "aten._convolution")
def aten_convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_flags: bool,
) -> Array:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding,
    SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor
    """
    n = weight.ndim - 2
    stride, padding, dilation = (
        expand(name, v, n)
        for name, v in (("stride", stride), ("padding", padding), ("dilation", dilation))
    )
    _check(x, weight, stride, padding, dilation, transposed, groups)
    size, kernel = x.shape[2:], weight.shape[2:]
    grouped = x.reshape(1, x.shape[0], groups, x.shape[1] // groups, *size)
    kernels = weight.reshape(1, groups, weight.shape[0] // groups, *weight.shape[1:])
    if transposed:
        extra = expand("output_padding", output_padding, n)
        if any(e >= s and e >= d for e, s, d in zip(extra, stride, dilation, strict=True)):
            raise RuntimeError(
                "output padding must be smaller than either stride or dilation, but got "
                f"output_padding: {list(extra)}, stride: {list(stride)}, dilation: "
                f"{list(dilation)}"
            )
        image = tuple(
            (t - 1) * s - 2 * p + d * (k - 1) + e + 1
            for t, k, s, p, d, e in zip(size, kernel, stride, padding, dilation, extra, strict=True)
        )
        _check_size(image, size, kernel, padding)
        geometry = Geometry(image, kernel, size, stride, padding, dilation)
        y = conv("x", grouped, kernels, geometry, precision(x.dtype), wide=True)
    else:
        out = tuple(
            (m + 2 * p - d * (k - 1) - 1) // s + 1
            for m, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
        )
        _check_size(out, size, kernel, padding)
        y = conv(
            "y",
            grouped,
            kernels,
            Geometry(size, kernel, out, stride, padding, dilation),
            precision(x.dtype),
            wide=True,
        )
    y = y.reshape(y.shape[1], groups * y.shape[3], *y.shape[4:])
    if bias is not None:
        # half types are wide, so that the sum and the bias's gradient round once
        y = y + cast(bias, y.dtype).reshape(-1, *(1,) * n)
    return cast(y, x.dtype)


def _check_size(out: tuple, size: tuple, kernel: tuple, padding: tuple) -> None:
    if min(out) <= 0:
        padded = [m + 2 * p for m, p in zip(size, padding, strict=True)]
        raise RuntimeError(
            f"Calculated padded input size per channel: {padded}. Kernel size: {list(kernel)}. "
            "Kernel size can't be greater than actual input size (the output would have size "
            f"{list(out)})"
        )


@lowering("aten.convolution_backward")
def aten_convolution_backward(
    grad: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes,
    SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding,
    SymInt groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """

    def forward(x: Array, weight: Array) -> Array:
        return aten_convolution(
            x, weight, None, stride, padding, dilation, transposed, output_padding, groups
        )

    dx = jax.linear_transpose(lambda x: forward(x, weight), x)(grad)[0] if output_mask[0] else None
    dw = jax.linear_transpose(lambda w: forward(x, w), weight)(grad)[0] if output_mask[1] else None
    db = jnp.sum(grad, (0, *range(2, grad.ndim)), dtype=grad.dtype) if output_mask[2] else None
    return dx, dw, db


@lowering("aten.conv_tbc")
def aten_conv_tbc(x: Array, weight: Array, bias: Array, pad: int = 0) -> Array:
    """conv_tbc(Tensor self, Tensor weight, Tensor bias, int pad=0) -> Tensor"""
    y = aten_convolution(
        jnp.moveaxis(x, 0, 2),
        jnp.transpose(weight, (2, 1, 0)),
        bias,
        (1,),
        (pad,),
        (1,),
        False,
        (0,),
        1,
    )
    return jnp.moveaxis(y, 2, 0)
