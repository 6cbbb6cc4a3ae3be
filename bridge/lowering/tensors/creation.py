"""Tensors made without operands: empty, zeros, full, their _like and new_ forms, arange, eye,
windows; and masks by position (tril, triu).

Results that depend only on Python numbers are computed by numpy in double precision, as in
PyTorch's CPU kernels, and their values stay known under jit, so that code may branch on them or
index with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from bridge.convert import dtypes
from bridge.lowering.common import promotion
from bridge.lowering.common.promotion import constant, fused
from bridge.lowering.registry import lowering

# elements: numpy makes such an array at once, and XLA would compile a program for each shape
_SMALL = 4096


def _shape(size: Sequence[int]) -> tuple[int, ...]:
    shape = tuple(int(s) for s in size)
    if min(shape, default=0) < 0:
        raise RuntimeError(f"size: expected non-negative sizes, got {list(shape)}")
    return shape


def number(value: Any, dtype: np.dtype) -> np.ndarray:
    """A Python number in a dtype, cast as C does (negative numbers wrap in an unsigned type);
    RuntimeError if it does not fit.
    """
    if hasattr(value, "as_array"):  # its value is known only when the program runs
        return value.as_array(dtype)
    if isinstance(value, complex):
        fits = promotion.is_complex(dtype) or dtype == np.bool_ or not value.imag
    elif not promotion.is_integral(dtype) or dtype == np.bool_:
        fits = True
    else:
        info = np.iinfo(dtype)
        fits = (
            math.isfinite(value)
            and (info.min if info.min or isinstance(value, float) else -info.max)
            <= value
            <= info.max
        )
    if not fits:
        raise RuntimeError(
            f"value: {value} cannot be converted to type {dtypes.to_torch(dtype)} without overflow"
        )
    return _as(
        np.asarray(
            bool(value) if dtype == np.bool_ else promotion.saturated(value, np.dtype(dtype))
        ),
        dtype,
    )


def _fill(shape: Sequence[int], value: Any, dtype: np.dtype) -> Array:
    shape = _shape(shape)
    value = promotion.cast(value, dtype) if promotion.is_array(value) else number(value, dtype)
    if isinstance(value, np.ndarray) and math.prod(shape) <= _SMALL:
        return constant(np.full(shape, value))
    return _filled(value, shape)


_filled = fused("shape")(lambda value, shape: lax.broadcast_in_dim(value, shape, ()))


_ZEROS = (
    "aten.zeros",
    "aten.empty.memory_format",
    "aten.empty_strided",
    "aten._efficientzerotensor",
)


@lowering(*_ZEROS)
def aten_zeros(
    size: Sequence[int],
    layout_or_stride: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Array:
    """zeros(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,
    bool? pin_memory=None) -> Tensor
    """
    if memory_format is torch.preserve_format:
        raise RuntimeError("unsupported memory format Preserve")
    return _fill(size, 0, promotion.jdtype(dtype, promotion.default_float()))


@lowering("aten.empty_permuted")
def aten_empty_permuted(
    size: Sequence[int],
    physical_layout: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """empty_permuted(SymInt[] size, int[] physical_layout, *, ScalarType? dtype=None, Layout?
    layout=None, ...) -> Tensor
    """
    if len(size) != len(physical_layout):
        raise RuntimeError(
            "Number of dimensions in size does not match the length of the physical_layout; i.e. "
            f"len(size) = {len(size)} is not equal to len(physical_layout) = {len(physical_layout)}"
        )
    for i, d in enumerate(physical_layout):
        if not 0 <= d < len(size):
            raise RuntimeError(
                f"Dimension out of range (expected to be between 0 and {len(size) - 1}, but got "
                f"{d} at index {i})"
            )
    if len(set(physical_layout)) != len(size):
        raise RuntimeError("Duplicate dim not allowed")
    return aten_zeros(size, dtype=dtype)


@lowering("aten.ones")
def aten_ones(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """ones(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,
    bool? pin_memory=None) -> Tensor
    """
    return _fill(size, 1, promotion.jdtype(dtype, promotion.default_float()))


@lowering("aten.full")
def aten_full(
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None,
    ...) -> Tensor
    """
    return _fill(size, fill_value, promotion.jdtype(dtype, promotion.result_dtype(fill_value)))


@lowering("aten.zeros_like", "aten.empty_like", no_grad_outputs=(0,))
def aten_zeros_like(
    x: Array,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Array:
    """zeros_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, ...) -> Tensor"""
    return _fill(x.shape, 0, promotion.jdtype(dtype, x.dtype))


@lowering("aten.ones_like", no_grad_outputs=(0,))
def aten_ones_like(
    x: Array,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Array:
    """ones_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, ...) -> Tensor"""
    return _fill(x.shape, 1, promotion.jdtype(dtype, x.dtype))


@lowering("aten.full_like", no_grad_outputs=(0,))
def aten_full_like(
    x: Array,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Array:
    """full_like(Tensor self, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None,
    ...) -> Tensor
    """
    return _fill(x.shape, fill_value, promotion.jdtype(dtype, x.dtype))


@lowering("aten.new_zeros", "aten.new_empty", "aten.new_empty_strided", no_grad_outputs=(0,))
def aten_new_zeros(
    x: Array,
    size: Sequence[int],
    stride: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """new_zeros(Tensor self, SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, ...) ->
    Tensor
    """
    # PyTorch's kernel for the device meta does not raise this
    if stride is not None and min(stride, default=0) < 0:
        raise RuntimeError(
            f"Storage size calculation overflowed with sizes={[*size]} and strides={[*stride]}"
        )
    return _fill(size, 0, promotion.jdtype(dtype, x.dtype))


@lowering("aten.new_ones", no_grad_outputs=(0,))
def aten_new_ones(
    x: Array,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """new_ones(Tensor self, SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, ...) ->
    Tensor
    """
    return _fill(size, 1, promotion.jdtype(dtype, x.dtype))


@lowering("aten.new_full", no_grad_outputs=(0,))
def aten_new_full(
    x: Array,
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """new_full(Tensor self, SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...) ->
    Tensor
    """
    return _fill(size, fill_value, promotion.jdtype(dtype, x.dtype))


@lowering("aten.scalar_tensor")
def aten_scalar_tensor(
    s: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,
    ...) -> Tensor
    """
    out = promotion.jdtype(dtype, promotion.default_float())
    return (
        promotion.cast(s, out)
        if promotion.is_array(s) or hasattr(s, "as_array")
        else constant(number(s, out))
    )


@lowering("aten.arange", "aten.arange.start", "aten.arange.start_step")
def aten_arange(
    start: Any,
    end: Any = None,
    step: Any = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, Layout?
    layout=None, ...) -> Tensor
    """
    if end is None:
        start, end = 0, start
    whole = all(isinstance(v, int) for v in (start, end, step))
    out = promotion.jdtype(dtype, np.int64 if whole else promotion.default_float())
    _check_range(start, end, step)
    if promotion.is_integral(out) and not whole:
        start, end, step = int(start), int(end), int(step)
        whole = True
        if step == 0:
            # PyTorch's other class, for a step that is truncated to 0
            raise ValueError("step must be nonzero")
        _check_range(start, end, step)
    count = -((start - end) // step) if whole else math.ceil((end - start) / step)
    return _progression(start, step, max(count, 0), out)


def _check_range(start: float, end: float, step: float) -> None:
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if not (math.isfinite(start) and math.isfinite(end)):
        raise RuntimeError(f"unsupported range: {start} -> {end}")
    if (end - start) * step < 0:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")


def _progression(start: float, step: float, count: int, dtype: np.dtype) -> Array:
    if count <= 1 << 16:
        with np.errstate(over="ignore", invalid="ignore"):
            return constant(_as(start + step * np.arange(count), dtype))
    wide = np.dtype(np.int64 if promotion.is_integral(dtype) else np.float64)
    return lax.convert_element_type(
        lax.iota(wide, count) * np.asarray(step, wide) + np.asarray(start, wide), dtype
    )


def _as(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if np.iscomplexobj(values) and not promotion.is_complex(dtype):
        values = values.real
    return values.astype(dtype)


@lowering("aten.range", "aten.range.step")
def aten_range(
    start: Any,
    end: Any,
    step: Any = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """range.step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None,
    ...) -> Tensor
    """
    _check_range(start, end, step)
    return _progression(
        start,
        step,
        int((end - start) / step) + 1,
        promotion.jdtype(dtype, promotion.default_float()),
    )


def _linspace_dtype(start: Any, end: Any, dtype: torch.dtype | None) -> np.dtype:
    complex_ends = isinstance(start, complex) or isinstance(end, complex)
    return promotion.jdtype(
        dtype, promotion.default_complex() if complex_ends else promotion.default_float()
    )


def _linspace(start: Any, end: Any, steps: int, dtype: np.dtype, *, rounded: bool) -> np.ndarray:
    """The points in the precision of dtype (rounded: also the step), counted from both ends, as in
    PyTorch.
    """
    if steps < 0:
        raise RuntimeError("number of steps must be non-negative")
    working = np.dtype(np.float64) if promotion.is_integral(dtype) else promotion.opmath(dtype)
    if promotion.is_integral(dtype):
        start, end = int(start), int(end)
    start, end = working.type(start), working.type(end)
    if steps == 1:
        return np.full(1, start)
    i = np.arange(steps)
    step = (end - start) / working.type(max(steps - 1, 1))
    if rounded and working != dtype and not promotion.is_integral(dtype):
        step = step.astype(dtype).astype(working)
    return np.where(
        i < steps // 2,
        start + step * i.astype(working),
        end - step * (steps - 1 - i).astype(working),
    )


@lowering("aten.linspace")
def aten_linspace(
    start: Any,
    end: Any,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """linspace(Scalar start, Scalar end, int steps, *, ScalarType? dtype=None, Layout? layout=None,
    ...) -> Tensor
    """
    out = _linspace_dtype(start, end, dtype)
    return constant(_as(_linspace(start, end, steps, out, rounded=True), out))


@lowering("aten.logspace")
def aten_logspace(
    start: Any,
    end: Any,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """logspace(Scalar start, Scalar end, int steps, float base=10., *, ScalarType? dtype=None,
    ...) -> Tensor
    """
    out = _linspace_dtype(start, end, dtype)
    with np.errstate(all="ignore"):
        return constant(_as(np.power(base, _linspace(start, end, steps, out, rounded=False)), out))


@lowering("aten.eye", "aten.eye.m")
def aten_eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """eye.m(SymInt n, SymInt m, *, ScalarType? dtype=None, Layout? layout=None, ...) -> Tensor"""
    n, m = _shape((n, n if m is None else m))
    return lax.convert_element_type(
        _compare(n, m, 0, lax.eq), promotion.jdtype(dtype, promotion.default_float())
    )


@lowering("aten.tril_indices")
def aten_tril_indices(
    row: int,
    col: int,
    offset: int = 0,
    *,
    dtype: torch.dtype | None = torch.int64,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """tril_indices(int row, int col, int offset=0, *, ScalarType? dtype=4, Layout? layout=None,
    ...) -> Tensor
    """
    return constant(np.stack(np.tril_indices(row, offset, col)), promotion.jdtype(dtype, np.int64))


@lowering("aten.triu_indices")
def aten_triu_indices(
    row: int,
    col: int,
    offset: int = 0,
    *,
    dtype: torch.dtype | None = torch.int64,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """triu_indices(int row, int col, int offset=0, *, ScalarType? dtype=4, Layout? layout=None,
    ...) -> Tensor
    """
    return constant(np.stack(np.triu_indices(row, offset, col)), promotion.jdtype(dtype, np.int64))


def _compare(m: int, n: int, offset: int, comparison: Callable[..., Any]) -> Array:
    """The mask of an m x n matrix: comparison(column - offset, row). A small mask has known values,
    a large one takes no memory.
    """
    if m * n <= 4096:
        rows, columns = np.arange(m)[:, None], np.arange(n) - offset
        return constant(
            {lax.eq: np.equal, lax.le: np.less_equal, lax.ge: np.greater_equal}[comparison](
                columns, rows
            )
        )
    shifted = lax.broadcasted_iota(np.int32, (m, n), 1) - np.int32(max(min(offset, n), -m))
    return comparison(shifted, lax.broadcasted_iota(np.int32, (m, n), 0))


def _triangle(x: Array, diagonal: int, comparison: Callable[..., Any], name: str) -> Array:
    if x.ndim < 2:
        raise RuntimeError(f"{name}: input tensor must have at least 2 dimensions")
    return _masked(x, diagonal, comparison)


@fused("diagonal", "comparison")
def _masked(x: Array, diagonal: int, comparison: Callable[..., Any]) -> Array:
    mask = _compare(x.shape[-2], x.shape[-1], diagonal, comparison)
    if x.ndim > 2:
        mask = lax.broadcast_in_dim(mask, x.shape, (x.ndim - 2, x.ndim - 1))
    return lax.select(mask, x, lax.full_like(x, 0))


@lowering("aten.tril")
def aten_tril(x: Array, diagonal: int = 0) -> Array:
    """tril(Tensor self, SymInt diagonal=0) -> Tensor"""
    return _triangle(x, diagonal, lax.le, "tril")


@lowering("aten.triu")
def aten_triu(x: Array, diagonal: int = 0) -> Array:
    """triu(Tensor self, SymInt diagonal=0) -> Tensor"""
    return _triangle(x, diagonal, lax.ge, "triu")


@lowering("aten.complex", exact_out=True)
def aten_complex(real: Array, imag: Array) -> Array:
    """complex(Tensor real, Tensor imag) -> Tensor"""
    if real.dtype != imag.dtype:
        raise RuntimeError(
            f"Expected object of scalar type {dtypes.to_torch(real.dtype)} but got "
            f"{dtypes.to_torch(imag.dtype)} for imag"
        )
    if real.dtype == np.float16:
        dtypes.to_jax(torch.complex32)  # raises, because JAX has no such dtype
    if real.dtype not in (np.float32, np.float64):
        raise RuntimeError(
            "Expected both inputs to be Float or Double tensors but got "
            f"{dtypes.to_torch(real.dtype)}"
        )
    return lax.complex(
        *(jnp.broadcast_arrays(real, imag) if real.shape != imag.shape else (real, imag))
    )


def _cosines(n: int, *weights: float) -> np.ndarray:
    angle = 2 * np.pi * np.arange(n) / max(n - 1, 1)
    return sum((-1) ** k * w * np.cos(k * angle) for k, w in enumerate(weights))


def _hamming(n: int, alpha: float = 0.54, beta: float = 0.46) -> np.ndarray:
    return _cosines(n, alpha, beta)


def _bartlett(n: int) -> np.ndarray:
    return 1 - np.abs(2 * np.arange(n) / max(n - 1, 1) - 1)


def _kaiser(n: int, beta: float = 12.0) -> np.ndarray:
    return np.i0(
        beta * np.sqrt(np.maximum(1 - (2 * np.arange(n) / max(n - 1, 1) - 1) ** 2, 0))
    ) / np.i0(beta)


#: operator -> the symmetric window of n points; a periodic one is the symmetric one of n + 1 points
#: without the last
_WINDOWS: dict[str, Callable[..., np.ndarray]] = {
    "hann_window": lambda n: _cosines(n, 0.5, 0.5),
    "hamming_window": _hamming,
    "blackman_window": lambda n: _cosines(n, 0.42, 0.5, 0.08),
    "bartlett_window": _bartlett,
    "kaiser_window": _kaiser,
}


def _window(name: str, formula: Callable[..., Any]) -> Callable[..., Any]:
    def window(
        window_length: int,
        periodic: bool = True,
        *parameters,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        **named,
    ) -> Array:
        """window.periodic(int window_length, bool periodic, ..., *, ScalarType? dtype=None, Layout?
        layout=None, ...) -> Tensor
        """
        out = promotion.jdtype(dtype, promotion.default_float())
        if promotion.is_integral(out):
            raise RuntimeError(f"{name} expects floating point dtypes, got: {out}")
        if window_length < 0:
            raise RuntimeError(
                f"{name} requires non-negative window_length, got window_length={window_length}"
            )
        if window_length <= 1:
            return constant(np.ones(window_length), out)
        return constant(
            formula(window_length + bool(periodic), *parameters, **named)[:window_length], out
        )

    return window


for _name, _formula in _WINDOWS.items():
    _overloads = ("", ".periodic", ".periodic_alpha", ".periodic_alpha_beta", ".beta")
    lowering(*(f"aten.{_name}{_overload}" for _overload in _overloads))(_window(_name, _formula))
