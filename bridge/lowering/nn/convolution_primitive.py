"""Convolution as one bilinear JAX primitive with three faces, closed under differentiation and
batching.

With x the image, w the kernel and y the output, ``y = conv(x, w)`` is bilinear, and so are its two
transposes ``x = conv(y, w)`` and ``w = conv(x, y)``; the derivative of each is one of the others.
All carry explicit axes::

    x: (B, N, G, C, *image)      w: (B, G, O, C, *kernel)      y: (B, N, G, O, *out)

B counts kernels (vmap over parameters, or over the gradients of single samples), N images, G
groups. vmap of any face merges the new axis into one of these, so that it never becomes a
convolution with B groups, which XLA runs very slowly on CPU. On the CPU each face is a matrix
product with the shifted images ("taps"), a few images at a time so that they stay in cache;
elsewhere it is XLA's own.

A face may return PyTorch's internal dtype (``wide``): a half result that is added to others is then
rounded once, after the sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from bridge.lowering.common.loops import kept, scan
from bridge.lowering.common.promotion import opmath
from bridge.lowering.nn.convolution_as_matmul import by_patches, side_by_side
from bridge.lowering.nn.convolution_geometry import Geometry

_CACHE_BYTES = 1 << 20


# face: its operands and result, and the axes that take the batch if only the left, or only the
# right, operand is batched
_FACES = {"y": ("x", "w", "N", "O"), "x": ("y", "w", "N", "C"), "w": ("x", "y", "C", "O")}
_AXES = {"x": "BNGC", "w": "BGOC", "y": "BNGO"}


def conv(
    face: str,
    left: Array,
    right: Array,
    geometry: Geometry,
    precision: lax.Precision | None,
    wide: bool = False,
) -> Array:
    """One face of the convolution: "y" of (x, w), "x" of (y, w) or "w" of (x, y); the axes are
    those of this module.
    """
    if 0 in left.shape or 0 in right.shape:
        return jnp.zeros(
            _shape(face, left.shape, right.shape, geometry),
            opmath(left.dtype) if wide else left.dtype,
        )
    wide = wide and opmath(left.dtype) != left.dtype
    if not (_unsharded(left) and _unsharded(right)):  # XLA's own operator has sharding rules
        return _native(left, right, face=face, geometry=geometry, precision=precision, wide=wide)
    return _conv_p.bind(left, right, face=face, geometry=geometry, precision=precision, wide=wide)


def _unsharded(x: Array) -> bool:
    mesh = jax.typeof(x).sharding.mesh
    return mesh.empty or mesh.are_all_axes_auto


def _shape(
    face: str, left: tuple[int, ...], right: tuple[int, ...], geometry: Geometry
) -> tuple[int, ...]:
    names = _FACES[face]
    sizes = dict(zip(_AXES[names[0]], left, strict=False)) | dict(
        zip(_AXES[names[1]], right, strict=False)
    )
    spatial = {"x": geometry.image, "w": geometry.kernel, "y": geometry.out}[face]
    return (*(sizes[a] for a in _AXES[face]), *spatial)


# -- as XLA's convolution --------------------------------------------------------------------------
def _native(
    left: Array,
    right: Array,
    *,
    face: str,
    geometry: Geometry,
    precision: lax.Precision | None,
    wide: bool,
) -> Array:
    if wide:  # XLA's half kernels are fast, so their rounded result is used
        narrow = _native(left, right, face=face, geometry=geometry, precision=precision, wide=False)
        return narrow.astype(opmath(left.dtype))
    if face == "y":
        return _native_forward(left, right, geometry, precision)
    shape = jax.ShapeDtypeStruct(_shape(face, left.shape, right.shape, geometry), left.dtype)
    if face == "x":
        return jax.linear_transpose(
            lambda x: _native_forward(x, right, geometry, precision), shape
        )(left)[0]
    return jax.linear_transpose(lambda w: _native_forward(left, w, geometry, precision), shape)(
        right
    )[0]


def _native_forward(
    x: Array, w: Array, geometry: Geometry, precision: lax.Precision | None
) -> Array:
    (b, n, g, c), o = x.shape[:4], w.shape[2]
    y = lax.conv_general_dilated(
        jnp.moveaxis(x, 0, 1).reshape(n, b * g * c, *geometry.image),
        w.reshape(b * g * o, c, *geometry.kernel),
        geometry.stride,
        geometry.paddings(),
        rhs_dilation=geometry.dilation,
        feature_group_count=b * g,
        precision=precision,
    )
    return jnp.moveaxis(y.reshape(n, b, g, o, *geometry.out), 1, 0)


# -- as matrix products ----------------------------------------------------------------------------
def spread(x: Array, at: int, geometry: Geometry, first: int = 0) -> Array:
    """The elements that each window of an image reads: (..., *image) -> (..., *kernel, ..., *out),
    the kernel's axes put in at ``at``.

    It goes from the last dimension to ``first``, and pads these only.
    """
    n = len(geometry.image)
    for i in reversed(range(first, n)):
        dim, (low, high) = x.ndim - n + i, geometry.paddings()[i]
        k, out, s, d = geometry.kernel[i], geometry.out[i], geometry.stride[i], geometry.dilation[i]
        x = _pad(x, dim, low, high, 0)
        if k == 1:
            x = jnp.expand_dims(lax.slice_in_dim(x, 0, (out - 1) * s + 1, s, dim), at)
        elif s == k and d == 1:  # side by side: a reshape tells them apart
            x = jnp.moveaxis(x.reshape(*x.shape[:dim], out, k, *x.shape[dim + 1 :]), dim + 1, at)
        else:
            x = jnp.stack(
                [lax.slice_in_dim(x, j * d, j * d + (out - 1) * s + 1, s, dim) for j in range(k)],
                at,
            )
    return x


def gather(x: Array, at: int, geometry: Geometry) -> Array:
    """The transpose of spread: every element put back in its place in the image, and summed."""
    n = len(geometry.image)
    for i in range(n):
        dim, (low, high) = x.ndim - n + i - 1, geometry.paddings()[i]
        k, out, s, d = geometry.kernel[i], geometry.out[i], geometry.stride[i], geometry.dilation[i]
        if s == k and d == 1:
            x = jnp.moveaxis(x, at, dim + 1)
            x = x.reshape(*x.shape[:dim], out * k, *x.shape[dim + 2 :])
            x = _pad(x, dim, -low, -high, 0)
        else:
            size, reach = geometry.image[i], (out - 1) * s + 1
            parts = [lax.index_in_dim(x, j, at, keepdims=False) for j in range(k)]
            placed = [
                _pad(part, dim, j * d - low, size - (j * d - low) - reach, s - 1)
                for j, part in enumerate(parts)
            ]
            x = functools.reduce(lax.add, placed)
    return x


def _pad(x: Array, dim: int, low: int, high: int, interior: int) -> Array:
    if low == high == interior == 0:
        return x
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (low, high, interior)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """The product of two (G, ., .) arrays over those axes, summed in PyTorch's internal dtype."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((0,), (0,))),
        preferred_element_type=opmath(a.dtype),
    )


def _inward(x: Array) -> Array:
    """(n, G, C, ...) -> (G, C, n, ...). If n is 1, a reshape,
    because XLA may copy for a transpose.
    """
    return x.reshape(*x.shape[1:3], 1, *x.shape[3:]) if x.shape[0] == 1 else jnp.moveaxis(x, 0, 2)


def _outward(x: Array) -> Array:
    """(G, C, n, ...) -> (n, G, C, ...)."""
    return x.reshape(1, *x.shape[:2], *x.shape[3:]) if x.shape[2] == 1 else jnp.moveaxis(x, 2, 0)


def _columns(x: Array, geometry: Geometry) -> list[Array]:
    """Images (n, G, C, *image) as a matrix (G, taps * C, n * out), in one piece or one for each row
    of the kernel.

    Pieces need one pass less over the columns, but one more over the product for each piece: they
    are faster if they are deep.
    """
    x = _inward(x)
    g, c, n = x.shape[:3]
    depth, width = c * math.prod(geometry.kernel[1:]), n * math.prod(geometry.out)
    if depth < 64 or geometry.kernel[0] == 1 or geometry.stride[0] > 1:
        return [spread(x, 1, geometry).reshape(g, -1, width)]
    x = spread(x, 1, geometry, first=1)
    dim, out, d = x.ndim - len(geometry.image), geometry.out[0], geometry.dilation[0]
    x = _pad(x, dim, *geometry.paddings()[0], 0)
    return [
        lax.slice_in_dim(x, j * d, j * d + out, 1, dim).reshape(g, depth, width)
        for j in range(geometry.kernel[0])
    ]


def _images_to_rows(y: Array) -> Array:
    """(n, G, O, *out) -> (G, O, n * out)."""
    return _inward(y).reshape(*y.shape[1:3], -1)


def _kernel_to_rows(w: Array) -> Array:
    """(G, O, C, *kernel) -> (G, O, taps * C)."""
    g, o, c = w.shape[:3]
    return jnp.moveaxis(w.reshape(g, o, c, -1), 3, 2).reshape(g, o, -1)


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is not above most (at least 1)."""
    return next(d for d in range(max(1, min(n, most)), 0, -1) if n % d == 0)


def _loop(fn: Callable[..., Array], *operands: Array) -> Array:
    """fn of the leading elements, one after the other; axes of size 1 stay outside, because XLA
    copies arrays with them into a loop.
    """
    shapes = [a.shape[1:] for a in operands]
    lean = tuple(a.reshape(len(a), *(n for n in a.shape[1:] if n != 1)) for a in operands)
    with kept():
        return lax.map(
            lambda args: fn(*(a.reshape(shape) for a, shape in zip(args, shapes, strict=True))),
            lean,
        )


def _mapped(fn: Callable[..., Array], chunk: int, *operands: Array) -> Array:
    """fn of chunk leading elements at a time; the results are concatenated."""
    n = operands[0].shape[0]
    if chunk == n:
        return fn(*operands)
    if chunk == 1:
        return _loop(lambda *args: fn(*(a[None] for a in args))[0], *operands)
    parts = _loop(fn, *(a.reshape(n // chunk, chunk, *a.shape[1:]) for a in operands))
    return parts.reshape(n, *parts.shape[2:])


def _product_y(x: Array, w: Array, geometry: Geometry, chunk: int) -> Array:
    rows = _kernel_to_rows(w)

    def some(x: Array) -> Array:
        columns = _columns(x, geometry)
        parts = zip(jnp.split(rows, len(columns), 2), columns, strict=True)
        y = functools.reduce(lax.add, [_dot(a, b, (2, 1)) for a, b in parts]).astype(x.dtype)
        return _outward(y.reshape(*y.shape[:2], x.shape[0], *geometry.out))

    return _mapped(some, chunk, x)


def _product_x(y: Array, w: Array, geometry: Geometry, chunk: int) -> Array:
    rows = _kernel_to_rows(w)

    def some(y: Array) -> Array:
        columns = _dot(rows, _images_to_rows(y), (1, 1))
        columns = columns.reshape(
            w.shape[0], *geometry.kernel, w.shape[2], y.shape[0], *geometry.out
        )
        x = gather(columns, 1, geometry)
        return _outward(x.astype(y.dtype))

    return _mapped(some, chunk, y)


def _product_w(x: Array, y: Array, geometry: Geometry, chunk: int) -> Array:
    def some(x: Array, y: Array) -> Array:
        rows = _images_to_rows(y)
        return jnp.concatenate(
            [_dot(rows, columns, (2, 2)) for columns in _columns(x, geometry)], 2
        )

    parts = x.shape[0] // chunk
    if parts == 1:
        rows = some(x, y)
    else:
        x, y = (a.reshape(parts, chunk, *a.shape[1:]) for a in (x, y))
        rows, _ = scan(
            lambda total, xy: (total + some(*xy), None), some(x[0], y[0]), (x[1:], y[1:])
        )
    g, o, _ = rows.shape
    w = jnp.moveaxis(rows.reshape(g, o, math.prod(geometry.kernel), -1), 2, 3)
    return w.reshape(g, o, -1, *geometry.kernel).astype(y.dtype)


def _depthwise(face: str, left: Array, right: Array, geometry: Geometry) -> Array:
    """A face with one channel in and out in each group: element-wise products with the shifted
    images, not matrix products.
    """
    wide, n = opmath(left.dtype), len(geometry.image)
    left, right = left.astype(wide), right.astype(wide)
    if face == "w":  # (B, N, G, 1, *kernel, *out) with (B, N, G, 1, *out)
        spread_y = jnp.expand_dims(right, range(4, 4 + n))
        w = jnp.sum(spread(left, 4, geometry) * spread_y, (1, *range(4 + n, 4 + 2 * n)))
        return w.reshape(*w.shape[:2], 1, 1, *geometry.kernel)
    weights = jnp.expand_dims(
        right.reshape(right.shape[0], 1, right.shape[1], 1, *geometry.kernel),
        range(4 + n, 4 + 2 * n),
    )
    if face == "x":
        return gather(jnp.expand_dims(left, range(4, 4 + n)) * weights, 4, geometry)
    return jnp.sum(spread(left, 4, geometry) * weights, range(4, 4 + n))


def _by_products(
    left: Array,
    right: Array,
    *,
    face: str,
    geometry: Geometry,
    precision: lax.Precision | None,
    wide: bool,
) -> Array:
    if wide:  # XLA on CPU always computes half products in float32
        left, right = left.astype(opmath(left.dtype)), right.astype(opmath(right.dtype))
    names = _FACES[face]
    sizes = dict(zip(_AXES[names[0]], left.shape, strict=False)) | dict(
        zip(_AXES[names[1]], right.shape, strict=False)
    )
    if sizes["C"] == sizes["O"] == 1:
        return _depthwise(face, left, right, geometry).astype(left.dtype)
    if side_by_side(geometry):
        return by_patches(face, left, right, geometry)
    # as many images, and then as many kernels, at a time as fit their columns in cache
    columns = (
        sizes["G"]
        * sizes["C"]
        * math.prod(geometry.kernel)
        * math.prod(geometry.out)
        * left.dtype.itemsize
    )
    images = _divisor(sizes["N"], _CACHE_BYTES // columns)
    kernels = _divisor(sizes["B"], _CACHE_BYTES // (columns * sizes["N"]))
    product = {"y": _product_y, "x": _product_x, "w": _product_w}[face]
    one = functools.partial(product, geometry=geometry, chunk=images)
    if sizes["B"] == 1:
        return one(left[0], right[0])[None]
    if kernels == 1:
        return _loop(one, left, right)
    return _mapped(jax.vmap(one), kernels, left, right)


# -- the primitive ---------------------------------------------------------------------------------
_conv_p = Primitive("conv")
_conv_p.def_impl(jax.jit(_conv_p.bind, static_argnames=("face", "geometry", "precision", "wide")))


@_conv_p.def_abstract_eval
def _conv_aval(
    left: Any,
    right: Any,
    *,
    face: str,
    geometry: Geometry,
    precision: lax.Precision | None,
    wide: bool,
) -> Any:
    return jax.core.ShapedArray(
        _shape(face, left.shape, right.shape, geometry), opmath(left.dtype) if wide else left.dtype
    )


mlir.register_lowering(_conv_p, mlir.lower_fun(_native, multiple_results=False))
mlir.register_lowering(
    _conv_p, mlir.lower_fun(_by_products, multiple_results=False), platform="cpu"
)


def _transpose_left(
    ct: Array, left: Any, right: Array, *, face: str, wide: bool, **params: Any
) -> Array:
    ct = ct.astype(right.dtype)
    if face == "w":
        return conv("x", right, ct, **params)
    return conv("x" if face == "y" else "y", ct, right, **params)


def _transpose_right(
    ct: Array, left: Array, right: Any, *, face: str, wide: bool, **params: Any
) -> Array:
    ct = ct.astype(left.dtype)
    if face == "w":
        return conv("y", left, ct, **params)
    return conv("w", left, ct, **params) if face == "y" else conv("w", ct, left, **params)


ad.defbilinear(_conv_p, _transpose_left, _transpose_right)


def _merge(x: Array, dim: int, at: int) -> Array:
    """x with its batch axis dim merged into the axis ``at`` (counted without the batch axis)."""
    x = jnp.moveaxis(x, dim, at)
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])


def _batch(
    args: tuple[Array, Array], dims: tuple[Any, Any], *, face: str, **params: Any
) -> tuple[Array, int]:
    left_name, right_name, *into = _FACES[face]
    operands: list[Any] = []
    batched = [dim is not None for dim in dims]
    axis = "B" if all(batched) else into[0] if batched[0] else into[1]
    for x, dim, name in zip(args, dims, (left_name, right_name), strict=True):
        operands.append(x if dim is None else _merge(x, dim, _AXES[name].index(axis)))
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    out, at = conv(face, operands[0], operands[1], **params), _AXES[face].index(axis)
    return out.reshape(*out.shape[:at], size, out.shape[at] // size, *out.shape[at + 1 :]), at


batching.primitive_batchers[_conv_p] = _batch


# -- for exported programs -------------------------------------------------------------------------
def of_any_size(
    left: Array,
    right: Array,
    *,
    face: str,
    geometry: Geometry,
    precision: lax.Precision | None,
    wide: bool,
) -> Array:
    """A face without a choice by size: XLA's convolution, or for a symbolic number of kernels,
    which XLA lacks, one matrix product each.
    """
    kernels = left.shape[0]
    if isinstance(kernels, int):
        return _native(left, right, face=face, geometry=geometry, precision=precision, wide=wide)
    dtype = opmath(left.dtype) if wide else left.dtype
    left, right = (a.astype(opmath(a.dtype)) for a in (left, right)) if wide else (left, right)
    product = {"y": _product_y, "x": _product_x, "w": _product_w}[face]

    def one(left: Array, right: Array) -> Array:
        images = right.shape[0] if face == "w" else left.shape[0]
        return product(left, right, geometry=geometry, chunk=images)

    return jax.vmap(one)(left, right).astype(dtype)
