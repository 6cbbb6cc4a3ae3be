"""Fourier transforms: the three ATen kernels that every torch.fft function, stft and istft are
composed of, and the bin frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from bridge.lowering.common.promotion import (
    cast,
    constant,
    default_float,
    is_complex,
    jdtype,
    real_dtype,
    wrap_dim,
)
from bridge.lowering.registry import lowering

_NONE, _BY_ROOT_N, _BY_N = range(3)
_MAX_RANK = 3  # the largest number of dimensions that lax.fft transforms at once


def _complex_dtype(dtype: np.dtype) -> np.dtype:
    return np.result_type(dtype, np.complex64)


def _checked(self: Array) -> Array:
    if self.dtype not in (np.float32, np.float64, np.complex64, np.complex128):
        raise RuntimeError(
            f"Unsupported dtype {self.dtype}: expected float32, float64, complex64 or complex128"
        )
    return self


def _scaled(x: Array, n: int, normalization: int, native: bool) -> Array:
    """x times torch's normalization of an n-point transform; native: lax.fft has already divided by
    n.
    """
    power = {_NONE: 0.0, _BY_ROOT_N: 0.5, _BY_N: 1.0}[normalization] - (1.0 if native else 0.0)
    return x if power == 0.0 else x * float(n) ** -power


def _on_last(x: Array, dims: tuple[int, ...], transform: Callable[..., Any]) -> Array:
    """transform of x with dims moved to the end, in their order; the result has them moved back."""
    last = tuple(range(x.ndim - len(dims), x.ndim))
    if dims == last:
        return transform(x)
    return jnp.moveaxis(transform(jnp.moveaxis(x, dims, last)), last, dims)


def _c2c(x: Array, dims: tuple[int, ...], forward: bool) -> Array:
    """The complex transform over dims, as lax.fft scales it."""
    kind = "FFT" if forward else "IFFT"
    for i in range(0, len(dims), _MAX_RANK):
        chunk = tuple(sorted(dims[i : i + _MAX_RANK]))
        x = _on_last(
            x, chunk, lambda y, chunk=chunk: lax.fft(y, kind, y.shape[y.ndim - len(chunk) :])
        )
    return x


@lowering("aten._fft_c2c")
def aten_fft_c2c(self: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    """_fft_c2c(Tensor self, SymInt[] dim, int normalization, bool forward) -> Tensor"""
    dims = tuple(wrap_dim(d, self.ndim) for d in dim)
    x = _checked(self)
    if x.size == 0 or not dims:
        return x
    return _scaled(
        _c2c(x, dims, forward), math.prod(x.shape[d] for d in dims), normalization, not forward
    )


@lowering("aten._fft_r2c")
def aten_fft_r2c(self: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    """_fft_r2c(Tensor self, int[] dim, int normalization, bool onesided) -> Tensor"""
    dims = tuple(wrap_dim(d, self.ndim) for d in dim)
    x = _checked(self)
    n, last = math.prod(x.shape[d] for d in dims), dims[-1]
    if x.size == 0:
        shape = list(x.shape)
        shape[last] = shape[last] // 2 + 1 if onesided else shape[last]
        return jnp.zeros(shape, _complex_dtype(x.dtype))
    if onesided:
        out = _on_last(x, (last,), lambda y: lax.fft(y, "RFFT", (x.shape[last],)))
        out = _c2c(out, dims[:-1], True)
    else:
        out = _c2c(cast(x, _complex_dtype(x.dtype)), dims, True)
    return _scaled(out, n, normalization, False)


@lowering("aten._fft_c2r")
def aten_fft_c2r(self: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """_fft_c2r(Tensor self, int[] dim, int normalization, SymInt last_dim_size) -> Tensor"""
    dims = tuple(wrap_dim(d, self.ndim) for d in dim)
    x = _checked(self)
    if not is_complex(x):
        raise RuntimeError(f"_fft_c2r: expected a complex input, got {x.dtype}")
    last = dims[-1]
    n = math.prod([*(x.shape[d] for d in dims[:-1]), last_dim_size])
    if x.size == 0:
        shape = list(x.shape)
        shape[last] = last_dim_size
        return jnp.zeros(shape, real_dtype(x.dtype))
    x = lax.slice_in_dim(x, 0, min(last_dim_size // 2 + 1, x.shape[last]), axis=last)
    x = _c2c(x, dims[:-1], False)
    out = _on_last(
        x, (last,), lambda y: lax.fft(_padded(y, last_dim_size // 2 + 1), "IRFFT", (last_dim_size,))
    )
    return _scaled(out, n, normalization, True)


def _padded(x: Array, size: int) -> Array:
    """x with zeros appended to its last dimension, up to size."""
    if x.shape[-1] == size:
        return x
    return lax.pad(
        x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1], 0)]
    )


@lowering("aten.fft_fftfreq")
def aten_fft_fftfreq(
    n: int,
    d: float = 1.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """fft_fftfreq(int n, float d=1., *, ScalarType? dtype=None, Layout? layout=None, Device?
    device=None, …) -> Tensor
    """
    return constant(np.fft.fftfreq(n, d), jdtype(dtype, default_float()))


@lowering("aten.fft_rfftfreq")
def aten_fft_rfftfreq(
    n: int,
    d: float = 1.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """fft_rfftfreq(int n, float d=1., *, ScalarType? dtype=None, Layout? layout=None, Device?
    device=None, …) -> Tensor
    """
    return constant(np.fft.rfftfreq(n, d), jdtype(dtype, default_float()))
