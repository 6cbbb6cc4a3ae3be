"""Convolution with windows side by side (stride = kernel, no padding): one matrix product over
images cut into patches.

The axes are those of ``convolution_primitive``: x (B, N, G, C, *image), w (B, G, O, C, *kernel), y
(B, N, G, O, *out).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from bridge.lowering.common.promotion import opmath
from bridge.lowering.nn.convolution_geometry import Geometry

Array = jax.Array
_BATCH = ((0, 1), (0, 1))


def side_by_side(geometry: Geometry) -> bool:
    """Whether at most one window reads each element of the image, and windows have more than one
    element.
    """
    whole = (
        geometry.stride == geometry.kernel
        and set(geometry.dilation) == {1}
        and set(geometry.padding) == {0}
    )
    return whole and math.prod(geometry.kernel) > 1


def by_patches(face: str, left: Array, right: Array, geometry: Geometry) -> Array:
    """One face of such a convolution."""
    if face == "y":
        y = _dot(_rows_of_image(left, geometry), _flat(right), (3, 3))  # (B, G, N * out, O)
        y = y.reshape(*y.shape[:2], left.shape[1], *geometry.out, -1).astype(left.dtype)
        return jnp.moveaxis(jnp.moveaxis(y, -1, 3), 2, 1)
    if face == "x":
        rows = _dot(_rows_of_out(left), _flat(right), (3, 2))  # (B, G, N * out, C * taps)
        return _image_of_rows(rows, left.shape[1], geometry).astype(left.dtype)
    w = _dot(_rows_of_out(right), _rows_of_image(left, geometry), (2, 2))  # (B, G, O, C * taps)
    return w.reshape(*w.shape[:3], -1, *geometry.kernel).astype(right.dtype)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    return lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), _BATCH), preferred_element_type=opmath(a.dtype)
    )


def _flat(w: Array) -> Array:
    return w.reshape(*w.shape[:3], -1)


def _rows_of_out(y: Array) -> Array:
    """(B, N, G, O, *out) -> (B, G, N * out, O)."""
    rows = jnp.moveaxis(jnp.moveaxis(y, 3, -1), 1, 2)
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


def _rows_of_image(x: Array, geometry: Geometry) -> Array:
    """(B, N, G, C, *image) -> (B, G, N * out, C * taps); elements that no window reads are left
    out.
    """
    lead, dims = x.shape[:4], range(len(geometry.image))
    for i in dims:
        x = lax.slice_in_dim(x, 0, geometry.out[i] * geometry.kernel[i], 1, 4 + i)
    x = x.reshape(
        *lead, *(n for pair in zip(geometry.out, geometry.kernel, strict=True) for n in pair)
    )
    x = lax.transpose(x, (0, 2, 1, *(4 + 2 * i for i in dims), 3, *(5 + 2 * i for i in dims)))
    return x.reshape(lead[0], lead[2], lead[1] * math.prod(geometry.out), -1)


def _image_of_rows(rows: Array, images: int, geometry: Geometry) -> Array:
    """The transpose of ``_rows_of_image``."""
    (b, g), n = rows.shape[:2], len(geometry.image)
    x = rows.reshape(b, g, images, *geometry.out, -1, *geometry.kernel)
    x = lax.transpose(x, (0, 2, 1, 3 + n, *(at for i in range(n) for at in (3 + i, 4 + n + i))))
    x = x.reshape(
        *x.shape[:4], *(t * k for t, k in zip(geometry.out, geometry.kernel, strict=True))
    )
    rest = [(0, size - have, 0) for size, have in zip(geometry.image, x.shape[4:], strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 4 + rest)
