"""Resizing images: nearest, linear, cubic and antialiased upsampling.

Each is linear and acts on one dimension after the other, so it is a product with a small matrix
known in advance, whose transpose is again a product, not a scatter; nearest picks elements instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common import varying
from bridge.lowering.common.promotion import cast, constant, fused, is_integral, opmath
from bridge.lowering.registry import lowering

_Scales = tuple[float | None, ...]


def _scale(
    size: int, out: int, align_corners: bool, given: float | None, real: type[np.floating]
) -> np.floating:
    """Input elements per output element, in the floating dtype in which PyTorch computes it."""
    if align_corners:
        return real(size - 1) / real(out - 1) if out > 1 else real(0)
    return real(1 / given) if given is not None and given > 0 else real(size) / real(out)


# -- one dimension: the matrix (out, size) of each kind --------------------------------------------
def _linear(
    size: int, out: int, align_corners: bool, given: float | None, real: type[np.floating]
) -> np.ndarray:
    scale, i = _scale(size, out, align_corners, given, real), np.arange(out, dtype=real)
    at = scale * i if align_corners else np.maximum(scale * (i + real(0.5)) - real(0.5), 0)
    low = np.minimum(at.astype(np.int64), size - 1)
    share = np.clip(at - low, 0, 1)
    matrix = np.zeros((out, size), real)
    np.add.at(matrix, (np.arange(out), low), 1 - share)
    np.add.at(matrix, (np.arange(out), np.minimum(low + 1, size - 1)), share)
    return matrix


def cubic_weights(t: Any, a: float = -0.75) -> list[Any]:
    """Weights of the elements at floor - 1, floor, floor + 1 and floor + 2 for a fraction t (Keys'
    cubic convolution).
    """
    near = lambda x: ((a + 2) * x - (a + 3)) * x * x + 1
    far = lambda x: ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _cubic(
    size: int, out: int, align_corners: bool, given: float | None, real: type[np.floating]
) -> np.ndarray:
    scale, i = _scale(size, out, align_corners, given, real), np.arange(out, dtype=real)
    at = scale * i if align_corners else scale * (i + real(0.5)) - real(0.5)
    low = np.floor(at)
    matrix = np.zeros((out, size), real)
    for j, weight in enumerate(cubic_weights(at - low)):
        np.add.at(
            matrix, (np.arange(out), np.clip(low.astype(np.int64) + j - 1, 0, size - 1)), weight
        )
    return matrix


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _keys(x: np.ndarray, a: float = -0.5) -> np.ndarray:
    x = np.abs(x)
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _antialiased(
    kernel: Callable[[np.ndarray], np.ndarray], width: int
) -> Callable[..., np.ndarray]:
    def matrix(
        size: int, out: int, align_corners: bool, given: float | None, real: type[np.floating]
    ) -> np.ndarray:
        scale = float(_scale(size, out, align_corners, given, real))
        stretch = max(scale, 1.0)
        center = scale * (np.arange(out) + 0.5)[:, None]
        first = np.maximum(np.trunc(center - width / 2 * stretch + 0.5), 0)
        last = np.minimum(np.trunc(center + width / 2 * stretch + 0.5), size)
        i = np.arange(size)[None]
        weights = np.where((i >= first) & (i < last), kernel((i - center + 0.5) / stretch), 0)
        total = weights.sum(1, keepdims=True)
        return (weights / np.where(total == 0, 1, total)).astype(real)

    return matrix


def _nearest(size: int, out: int, exact: bool, given: float | None) -> np.ndarray:
    """The index of the input element for each output element."""
    i = np.arange(out)
    if out == size:
        return i
    scale = np.float32(_scale(size, out, False, given, np.float32))
    at = (i.astype(np.float32) + np.float32(0.5)) * scale if exact else i.astype(np.float32) * scale
    return np.minimum(np.floor(at).astype(np.int64), size - 1)


# -- all dimensions --------------------------------------------------------------------------------
_MATRICES: dict[str, Callable[..., np.ndarray]] = {
    "linear": _linear,
    "cubic": _cubic,
    "linear_aa": _antialiased(_triangle, 2),
    "cubic_aa": _antialiased(_keys, 4),
    "lanczos_aa": _antialiased(_lanczos, 6),
}


def _whole(matrix: np.ndarray) -> tuple[np.ndarray, int]:
    """The matrix in whole numbers of 16 bits, and the power of two that they are multiplied by."""
    precision = next((p for p in range(22) if int(0.5 + matrix.max() * 2 ** (p + 1)) >= 2**15), 22)
    return np.trunc(matrix * 2**precision + np.where(matrix < 0, -0.5, 0.5)).astype(
        np.int32
    ), precision


@fused("kind", "output_size", "align_corners", "scales")
def _interpolate_bytes(
    x: Array, kind: str, output_size: tuple[int, ...], align_corners: bool, scales: _Scales
) -> Array:
    """Resize images of bytes as PyTorch does: in integers, rounded to bytes after the last
    dimension and after the one before.
    """
    for dim in (3, 2):
        size, out, given = x.shape[dim], output_size[dim - 2], scales[dim - 2]
        if size == out and not (kind.endswith("_aa") and given):
            continue
        matrix, precision = _whole(_MATRICES[kind](size, out, align_corners, given, np.float64))
        product = jnp.moveaxis(
            lax.dot_general(cast(x, np.int32), constant(matrix), (((dim,), (1,)), ((), ()))),
            -1,
            dim,
        )
        x = cast(
            jnp.clip(
                lax.shift_right_arithmetic(product + 2 ** (precision - 1), np.int32(precision)),
                0,
                255,
            ),
            np.uint8,
        )
    return x


@fused("kind", "output_size", "align_corners", "scales")
def _interpolate(
    x: Array, kind: str, output_size: tuple[int, ...], align_corners: bool, scales: _Scales
) -> Array:
    n = len(output_size)
    dtype = jnp.float32 if is_integral(x) else opmath(x.dtype)
    y = cast(x, dtype)
    for i, (out, given) in enumerate(zip(output_size, scales, strict=True)):
        dim, size = x.ndim - n + i, x.shape[x.ndim - n + i]
        if size == out and not (kind.endswith("_aa") and given):
            continue
        matrix = constant(_MATRICES[kind](size, out, align_corners, given, np.dtype(dtype).type))
        y = jnp.moveaxis(
            lax.dot_general(y, matrix, (((dim,), (1,)), ((), ())), precision="highest"), -1, dim
        )
    if is_integral(x):
        info = jnp.iinfo(x.dtype)
        y = jnp.clip(jnp.round(y), info.min, info.max)
    return cast(y, x.dtype)


@fused("output_size", "exact", "scales")
def _pick_nearest(x: Array, output_size: tuple[int, ...], exact: bool, scales: _Scales) -> Array:
    for i, (out, given) in enumerate(zip(output_size, scales, strict=True)):
        dim = x.ndim - len(output_size) + i
        at, size = _nearest(x.shape[dim], out, exact, given), x.shape[dim]
        if out % size == 0 and (at == np.arange(out) // (out // size)).all():
            x = jnp.repeat(x, out // size, dim)  # a broadcast, whose transpose is a sum
        else:
            x = jnp.take(x, at.astype(np.int32), dim, mode="clip")
    return x


def _checked(
    x: Array, output_size: Sequence[int], n: int, scales: Sequence[float | None]
) -> tuple[tuple[int, ...], _Scales]:
    if len(output_size) != n:
        raise RuntimeError(
            f"output_size: it is expected to have {n} elements, but got {len(output_size)}"
        )
    if x.ndim != n + 2 or 0 in x.shape[1:] or min(output_size) <= 0:
        raise RuntimeError(
            f"Input and output sizes should be greater than 0, and the input {n + 2}D, but got "
            f"input {list(x.shape)} and output {list(output_size)}"
        )
    return tuple(output_size), (*scales, *(None,) * (n - len(scales)))


def _with_corners(kind: str, n: int) -> Callable[..., Array]:
    def upsample(
        x: Array,
        output_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
        **named: float | None,
    ) -> Array:
        size, given = _checked(x, output_size, n, (*scales, *named.values()))
        resize = _interpolate_bytes if n == 2 and x.dtype == np.uint8 else _interpolate
        return resize(x, kind, size, bool(align_corners), given)

    upsample.__doc__ = (
        "upsample(Tensor self, SymInt[] output_size, bool align_corners, "
        "float? scales...) -> Tensor"
    )
    return upsample


def _without_corners(exact: bool, n: int) -> Callable[..., Array]:
    def upsample(
        x: Array, output_size: Sequence[int], *scales: float | None, **named: float | None
    ) -> Array:
        size, given = _checked(x, output_size, n, (*scales, *named.values()))
        return _pick_nearest(x, size, exact, given)

    upsample.__doc__ = "upsample(Tensor self, SymInt[] output_size, float? scales...) -> Tensor"
    return upsample


def _backward(forward: Callable[..., Array]) -> Callable[..., Array]:
    """The backward operator of a linear one: (grad_output, output_size, input_size, *rest) ->
    grad_input.
    """

    def backward(
        grad: Array, output_size: Sequence[int], input_size: Sequence[int], *rest: Any, **named: Any
    ) -> Array:
        like = jax.ShapeDtypeStruct(tuple(input_size), grad.dtype)
        return jax.linear_transpose(lambda x: forward(x, output_size, *rest, **named), like)(grad)[
            0
        ]

    return backward


_UPSAMPLES = {f"upsample_nearest{n}d": _without_corners(False, n) for n in (1, 2, 3)}
_UPSAMPLES |= {f"_upsample_nearest_exact{n}d": _without_corners(True, n) for n in (1, 2, 3)}
_UPSAMPLES |= {
    f"upsample_{name}{n}d": _with_corners("linear", n)
    for n, name in ((1, "linear"), (2, "bilinear"), (3, "trilinear"))
}
_UPSAMPLES |= {"upsample_bicubic2d": _with_corners("cubic", 2)}
_UPSAMPLES |= {
    f"_upsample_{b}{k}2d_aa": _with_corners(f"{k}_aa", 2)
    for b, k in (("bi", "linear"), ("bi", "cubic"), ("", "lanczos"))
}
for _name, _fn in _UPSAMPLES.items():
    lowering(f"aten.{_name}")(_fn)
    lowering(f"aten.{_name}_backward")(_backward(_fn))


# -- sampling at given places ----------------------------------------------------------------------
_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def _reflect(at: Array, twice_low: int, twice_high: int) -> Array:
    """Places outside [low, high], mirrored at its ends as often as needed."""
    if twice_low == twice_high:
        return jnp.zeros_like(at)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    distance = jnp.where(at < low, low - at, at - low)
    flips = jnp.floor(distance / span)
    extra = distance - flips * span
    return jnp.where(flips % 2 == 0, extra + low, span - extra + low)


def _inside(at: Array, size: int, padding_mode: int, align_corners: bool) -> Array:
    """Places moved into the image as the padding mode says; the derivative is 0 where they were
    clipped.
    """
    if padding_mode == _ZEROS:
        return at
    if padding_mode == _REFLECTION:
        at = _reflect(at, 0, 2 * (size - 1)) if align_corners else _reflect(at, -1, 2 * size - 1)
    return jnp.where(at >= size - 1, size - 1, jnp.where(at > 0, at, 0))  # a NaN gives 0


def _read(x: Array, places: Sequence[Array]) -> Array:
    """x (N, C, *image) at integer places (N, P) in each dimension; 0 outside the image."""
    valid: Any = True
    flat: Any = 0
    for at, size in zip(places, x.shape[2:], strict=True):
        valid = valid & (at >= 0) & (at <= size - 1)
        flat = flat * size + jnp.clip(at, 0, size - 1).astype(jnp.int32)
    values = jax.vmap(lambda image, i: jnp.take(image, i, 1, mode="clip"))(
        x.reshape(*x.shape[:2], -1), flat
    )
    return jnp.where(valid[:, None], values, 0)


@fused("mode", "padding_mode", "align_corners")
def _grid_sample(x: Array, grid: Array, mode: int, padding_mode: int, align_corners: bool) -> Array:
    sizes, dtype = x.shape[2:], x.dtype
    x, grid = cast(x, opmath(dtype)), cast(grid, opmath(dtype))
    n, out = len(sizes), grid.shape[1:-1]
    flat = grid.reshape(grid.shape[0], math.prod(out), n)
    places = []
    for i, size in enumerate(sizes):  # the grid's last axis counts dimensions from the last
        at = flat[..., n - 1 - i]
        at = (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2
        places.append(at if mode == _BICUBIC else _inside(at, size, padding_mode, align_corners))
    if mode == _NEAREST:
        y = _read(x, [lax.stop_gradient(jnp.round(at)) for at in places])
    else:
        corners: list[tuple[list[Array], Any]] = [([], 1)]
        for at, size in zip(places, sizes, strict=True):
            low = lax.stop_gradient(jnp.floor(at))
            t = at - low
            weights = cubic_weights(t) if mode == _BICUBIC else [1 - t, t]
            first = -1 if mode == _BICUBIC else 0
            steps = [(low + first + j, weight) for j, weight in enumerate(weights)]
            if mode == _BICUBIC:
                steps = [
                    (_inside(place, size, padding_mode, align_corners), weight)
                    for place, weight in steps
                ]
            corners = [
                ([*where, place], total * weight)
                for where, total in corners
                for place, weight in steps
            ]
        y = functools.reduce(
            lax.add, [_read(x, where) * weight[:, None] for where, weight in corners]
        )
    return cast(y.reshape(x.shape[0], x.shape[1], *out), dtype)


@lowering("aten.grid_sampler_2d", "aten.grid_sampler_3d")
def aten_grid_sampler(
    x: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Array:
    """grid_sampler_2d(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool
    align_corners) -> Tensor
    """
    return _grid_sample(x, grid, interpolation_mode, padding_mode, bool(align_corners))


@lowering("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward")
def aten_grid_sampler_backward(
    grad: Array,
    x: Array,
    grid: Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None]:
    """grid_sampler_2d_backward(Tensor grad_output, Tensor input, Tensor grid, int
    interpolation_mode, int padding_mode, bool align_corners, bool[2] output_mask) -> (Tensor,
    Tensor)
    """
    pull = varying.vjp(
        lambda x, grid: _grid_sample(
            x, grid, interpolation_mode, padding_mode, bool(align_corners)
        ),
        x,
        grid,
    )[1]
    dx, dgrid = pull(grad)
    return dx if output_mask[0] else None, dgrid
