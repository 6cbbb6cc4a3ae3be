"""Padding by a constant, by reflection and by the edge, and their backward operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array, lax

from bridge.lowering.common import promotion, varying
from bridge.lowering.common.promotion import fused
from bridge.lowering.registry import lowering
from bridge.lowering.tensors.creation import number


@lowering("aten.constant_pad_nd")
def aten_constant_pad_nd(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise RuntimeError(
            f"pad: expected an even number of entries, at most twice the {x.ndim} dimensions of "
            f"the tensor, got {list(pad)}"
        )
    config = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        low, high = int(pad[2 * i]), int(pad[2 * i + 1])
        n = x.shape[-1 - i]
        if n + low + high < 0:
            raise RuntimeError(
                f"The input size {n}, plus negative padding {low} and {high}, resulted in a "
                "negative output size, which is invalid."
            )
        config[x.ndim - 1 - i] = (low, high, 0)
    value = promotion.cast(value, x.dtype) if promotion.is_array(value) else number(value, x.dtype)
    return _constant_pad(x, value, tuple(config)) if any(c != (0, 0, 0) for c in config) else x


_constant_pad = fused("padding_config")(lax.pad)


def _reflect(x: Array, dim: int, low: int, high: int) -> list[Array]:
    n = x.shape[dim]
    if low >= n or high >= n:
        raise RuntimeError(
            "Padding size should be less than the corresponding input dimension, but got: padding "
            f"({low}, {high}) at dimension {dim} of input {list(x.shape)}"
        )
    left = [lax.rev(lax.slice_in_dim(x, 1, low + 1, axis=dim), (dim,))] if low > 0 else []
    right = (
        [lax.rev(lax.slice_in_dim(x, n - 1 - high, n - 1, axis=dim), (dim,))] if high > 0 else []
    )
    return [*left, x, *right]


def _replicate(x: Array, dim: int, low: int, high: int) -> list[Array]:
    n = x.shape[dim]

    def edge(at: int, times: int) -> Array:
        shape = [times if d == dim else s for d, s in enumerate(x.shape)]
        return lax.broadcast_in_dim(
            lax.slice_in_dim(x, at, at + 1, axis=dim), shape, tuple(range(x.ndim))
        )

    return [*([edge(0, low)] if low > 0 else []), x, *([edge(n - 1, high)] if high > 0 else [])]


def _pad(x: Array, padding: Sequence[int], extend: Callable[..., Any], name: str) -> Array:
    dims = len(padding) // 2
    if x.ndim not in (dims + 1, dims + 2) or 0 in x.shape[x.ndim - dims - 1 :]:
        raise RuntimeError(
            f"{name}: expected {dims + 1}D or {dims + 2}D input, none but the batch dimension "
            f"empty, got {list(x.shape)}"
        )
    for i in range(dims):
        low, high, n = int(padding[2 * i]), int(padding[2 * i + 1]), x.shape[-1 - i]
        if n + low + high < 1:
            raise RuntimeError(
                f"input (size {n} at dimension {x.ndim - 1 - i}) is too small: padding ({low}, "
                f"{high}) leaves nothing of it"
            )
    return _extend(x, tuple(int(p) for p in padding), extend)


@fused("padding", "extend")
def _extend(x: Array, padding: tuple[int, ...], extend: Callable[..., Any]) -> Array:
    for i in range(len(padding) // 2):
        low, high, dim = padding[2 * i], padding[2 * i + 1], x.ndim - 1 - i
        parts = extend(x, dim, low, high)
        x = lax.concatenate(parts, dim) if len(parts) > 1 else x
        x = lax.slice_in_dim(x, max(-low, 0), x.shape[dim] - max(-high, 0), axis=dim)
    return x


def _register(name: str, extend: Callable[..., Any]) -> None:
    def forward(x: Array, padding: Sequence[int]) -> Array:
        """reflection_pad2d(Tensor self, SymInt[4] padding) -> Tensor"""
        return _pad(x, padding, extend, name)

    def backward(grad_output: Array, x: Array, padding: Sequence[int]) -> Array:
        """reflection_pad2d_backward(Tensor grad_output, Tensor self,
        SymInt[4] padding) -> Tensor
        """
        return varying.vjp(lambda a: forward(a, padding), x)[1](grad_output)[0]

    lowering(f"aten.{name}")(forward)
    lowering(f"aten.{name}_backward")(backward)


for _d in (1, 2, 3):
    _register(f"reflection_pad{_d}d", _reflect)
    _register(f"replication_pad{_d}d", _replicate)
