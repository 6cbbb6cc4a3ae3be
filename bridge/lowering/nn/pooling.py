"""Max and average pooling, plain and adaptive, over the last one, two or three dimensions.

Max pooling finds the winners' places, and its derivative selects them from strided slices ("taps")
of the tangent. That is element-wise, so it fuses and batches without cost, unlike XLA's
select-and-scatter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common import varying
from bridge.lowering.common.promotion import cast, constant, fused, is_floating, is_integral, opmath
from bridge.lowering.registry import lowering


class Axis(NamedTuple):
    """The windows along one dimension of that size: regular ones, or PyTorch's adaptive ones (which
    overlap unevenly).
    """

    size: int
    out: int
    kernel: int
    stride: int = 0
    padding: int = 0
    dilation: int = 1
    adaptive: bool = False

    @property
    def tiles(self) -> bool:
        """Whether the windows lie side by side, so that a reshape separates them."""
        return (
            not self.adaptive
            and self.padding == 0
            and self.dilation == 1
            and (self.stride == self.kernel and self.out * self.kernel <= self.size)
        )

    def coordinates(self) -> np.ndarray:
        """(kernel, out): the index that each tap of each window reads; -1 in the padding and past
        the end of an adaptive window.
        """
        taps, windows = np.arange(self.kernel)[:, None], np.arange(self.out)
        if self.adaptive:
            at = windows * self.size // self.out + taps
            return np.where(at < -(-(windows + 1) * self.size // self.out), at, -1).astype(np.int32)
        at = windows * self.stride - self.padding + taps * self.dilation
        return np.where((at >= 0) & (at < self.size), at, -1).astype(np.int32)


_Axes = tuple[Axis, ...]


def expand(name: str, value: Sequence[int] | int, n: int) -> tuple[int, ...]:
    """An int[n] argument; one number stands for all dimensions, as in PyTorch."""
    value = (value,) if isinstance(value, int) else tuple(value)
    if len(value) not in (1, n):
        raise RuntimeError(f"{name}: expected a single int or {n} ints, got {list(value)}")
    return value * n if len(value) == 1 else value


def _check_rank(x: Array, n: int) -> None:
    if x.ndim not in (n + 1, n + 2) or 0 in x.shape[x.ndim - n - 1 :]:
        raise RuntimeError(
            f"input: pooling over {n} dimensions expects {n + 1}D or {n + 2}D with only the batch "
            f"possibly empty, got {list(x.shape)}"
        )


def _regular(
    x: Array,
    n: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> _Axes:
    """Check the arguments of a pooling over the last n dimensions and compute its output size."""
    _check_rank(x, n)
    kernel = expand("kernel_size", kernel, n)
    stride = expand("stride", stride, n) if stride else kernel
    padding, dilation = expand("padding", padding, n), expand("dilation", dilation, n)
    found = []
    for size, k, s, p, d in zip(x.shape[-n:], kernel, stride, padding, dilation, strict=True):
        if k <= 0 or s <= 0 or d <= 0:
            raise RuntimeError(
                "kernel_size, stride and dilation should be greater than zero, "
                f"but got {k}, {s} and {d}"
            )
        if p < 0 or p > ((k - 1) * d + 1) // 2:
            raise RuntimeError(
                "padding should be at least 0 and at most half of effective kernel size, got "
                f"pad={p}, kernel_size={k}"
            )
        room = size + 2 * p - d * (k - 1) - 1
        out = (-(-room // s) if ceil else room // s) + 1
        if ceil and (out - 1) * s >= size + p:  # a window may not start in the right padding
            out -= 1
        if out < 1:
            raise RuntimeError(
                f"input: {list(x.shape)} is too small, the calculated output "
                f"size {out} is less than 1"
            )
        found.append(Axis(size, out, k, s, p, d))
    return tuple(found)


def _adaptive(x: Array, n: int, output_size: Sequence[int]) -> _Axes:
    _check_rank(x, n)
    found = []
    for size, out in zip(x.shape[-n:], expand("output_size", output_size, n), strict=True):
        if out < 0:
            raise RuntimeError(
                f"output_size: Trying to create tensor with negative dimension {out}: "
                f"{list(output_size)}"
            )
        if out > 0 and size % out == 0:
            found.append(Axis(size, out, size // out, size // out))
        else:
            kernel = max(
                (-(-(i + 1) * size // out) - i * size // out for i in range(out)), default=1
            )
            found.append(Axis(size, out, kernel, adaptive=True))
    return tuple(found)


def _pad(x: Array, dim: int, low: int, high: int, fill: float | None) -> Array:
    """Pad one dimension with a value, or with the edge if fill is None."""
    if low == 0 and high == 0:
        return x
    widths = [(low, high) if d == dim else (0, 0) for d in range(x.ndim)]
    if fill is None:
        return jnp.pad(x, widths, mode="edge")
    return lax.pad(x, jnp.asarray(fill, x.dtype), [(a, b, 0) for a, b in widths])


def _taps(x: Array, dim: int, axis: Axis, fill: float | None) -> list[Array]:
    """For each place in the window, that element of every window; in the padding it is fill, or the
    edge if fill is None.
    """
    if axis.adaptive:
        taps = []
        for at in axis.coordinates():
            tap = jnp.take(x, np.maximum(at, 0), dim)
            inside = (at >= 0).reshape(-1, *(1,) * (x.ndim - dim - 1))
            taps.append(tap if fill is None or inside.all() else jnp.where(inside, tap, fill))
        return taps
    reach = (axis.out - 1) * axis.stride + 1
    x = _pad(
        x,
        dim,
        axis.padding,
        max(reach + (axis.kernel - 1) * axis.dilation - axis.padding - axis.size, 0),
        fill,
    )
    starts = [j * axis.dilation for j in range(axis.kernel)]
    return [lax.slice_in_dim(x, start, start + reach, axis.stride, dim) for start in starts]


# -- max pooling -----------------------------------------------------------------------------------
def _lowest(dtype: np.dtype) -> float:
    return -jnp.inf if is_floating(dtype) else int(jnp.iinfo(dtype).min)


def _reduce_windows(x: Any, fn: Callable[[Any, Any], Any], initial: Any, axes: _Axes) -> Any:
    """XLA's own reduction of regular windows over the last dimensions, of one array or several."""
    lead = (1,) * (jax.tree_util.tree_leaves(x)[0].ndim - len(axes))
    paddings = [(0, 0)] * len(lead)
    for a in axes:
        paddings.append(
            (
                a.padding,
                (a.out - 1) * a.stride + (a.kernel - 1) * a.dilation + 1 - a.size - a.padding,
            )
        )
    kernel, stride, dilation = (
        (*lead, *(getattr(a, name) for a in axes)) for name in ("kernel", "stride", "dilation")
    )
    return lax.reduce_window(x, initial, fn, kernel, stride, paddings, window_dilation=dilation)


def _flat_places(axes: _Axes) -> Array:
    """The int32 flat index of each element of the last dimensions."""
    sizes = tuple(axis.size for axis in axes)
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    places = [
        lax.broadcasted_iota(jnp.int32, sizes, i) * stride for i, stride in enumerate(strides)
    ]
    return functools.reduce(lax.add, places)


def _tiled(x: Array, axes: _Axes) -> tuple[Array, list[int]]:
    """Windows that lie side by side, each dimension split in (window, tap);
    and the tap dimensions.
    """
    lead = x.ndim - len(axes)
    x = lax.slice(x, (0,) * x.ndim, (*x.shape[:lead], *(a.out * a.kernel for a in axes)))
    taps = [lead + 2 * i + 1 for i in range(len(axes))]
    return x.reshape(*x.shape[:lead], *(size for a in axes for size in (a.out, a.kernel))), taps


# XLA repeats element-wise work in each of its readers, so places come from reductions, which it
# computes once.
def _max_tiles(x: Array, axes: _Axes) -> tuple[Array, Array]:
    """Greatest values and their places for windows that lie side by side."""
    x, taps = _tiled(x, axes)
    values = jnp.max(x, taps)
    at = _tiled(_flat_places(axes), axes)[0]
    places = jnp.where(x == jnp.expand_dims(values, taps), at, np.iinfo(np.int32).max)
    if not is_floating(x):
        return values, jnp.min(places, taps)
    # the last NaN of a window, else the first of its equal values
    places = jnp.min(jnp.where(jnp.isnan(x), ~at, places), taps)
    return values, jnp.where(places < 0, ~places, places)


def _max_places(x: Array, axes: _Axes) -> Array:
    """The places of the greatest values of windows that overlap."""

    def better(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        # PyTorch's rule: the first of equal values wins, and a NaN always wins
        wins = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        if is_floating(x):
            wins = wins | (jnp.isnan(a[0]) & ~(jnp.isnan(b[0]) & (b[1] > a[1])))
        return lax.select(wins, a[0], b[0]), lax.select(wins, a[1], b[1])

    initial = (np.asarray(_lowest(x.dtype), x.dtype), np.int32(np.iinfo(np.int32).max))
    return _reduce_windows(
        (x, jnp.broadcast_to(_flat_places(axes), x.shape)), better, initial, axes
    )[1]


def _max_taps(x: Array, axes: _Axes) -> tuple[Array, Array]:
    """Greatest values and places of any windows, one dimension at a time by comparing taps."""
    n, inner, place = len(axes), 1, None
    for i in reversed(range(n)):
        axis, dim = axes[i], x.ndim - n + i
        at = axis.coordinates()
        # the place of a window of nothing but -inf is its first element inside the image
        at = np.where(at < 0, np.take_along_axis(at, (at >= 0).argmax(0)[None], 0), at) * inner
        places = [constant(a.reshape(-1, *(1,) * (n - 1 - i)), jnp.int32) for a in at]
        if place is not None:
            places = [a + b for a, b in zip(places, _taps(place, dim, axis, None), strict=True)]
        taps = _taps(x, dim, axis, _lowest(x.dtype))
        x, place = taps[0], jnp.broadcast_to(places[0], taps[0].shape)
        for tap, where in zip(taps[1:], places[1:], strict=True):
            wins = (tap > x) | jnp.isnan(tap) if is_floating(x) else tap > x
            x, place = lax.select(wins, tap, x), jnp.where(wins, where, place)
        inner *= axis.size
    return x, place


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_pool(x: Array, axes: _Axes) -> tuple[Array, Array]:
    """The greatest value of each window over the last dimensions, and its int32 flat index into
    them.
    """
    if all(axis.tiles for axis in axes):
        return _max_tiles(x, axes)
    # no reduction of pairs on a TPU
    if any(axis.adaptive for axis in axes) or jax.default_backend() == "tpu":
        return _max_taps(x, axes)
    initial = np.asarray(_lowest(x.dtype), x.dtype)
    return _reduce_windows(x, lax.max, initial, axes), _max_places(x, axes)


@functools.partial(_max_pool.defjvp, symbolic_zeros=True)
def _max_pool_jvp(axes: _Axes, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    values, place = _max_pool(*primals, axes)
    (dx,), n = tangents, len(axes)
    if all(axis.tiles for axis in axes):
        tangent = _select_tiles(dx, place, axes)
    elif math.prod(axis.kernel for axis in axes) <= 32:
        tangent = _select_taps(dx, place, axes)
    else:
        tangent = take_places(dx, place, n)
    return (values, place), (tangent, varying.no_tangent(place))


def _select_tiles(x: Array, place: Array, axes: _Axes) -> Array:
    """The elements at each window's place, for windows that lie side by side; the transpose is
    element-wise.
    """
    x, taps = _tiled(x, axes)
    mine = jnp.expand_dims(place, taps) == _tiled(_flat_places(axes), axes)[0]
    return jnp.sum(jnp.where(mine, x, 0), taps)


def _select_taps(x: Array, place: Array, axes: _Axes) -> Array:
    """The elements at each window's place, found by comparison with the place of each tap; the
    transpose has no scatter.
    """
    n, inner = len(axes), 1
    taps, places = [x], [np.zeros((1,) * n, np.int32)]
    for i in reversed(range(n)):
        at = axes[i].coordinates()
        at = np.where(at < 0, -(2**30), at * inner).reshape(axes[i].kernel, -1, *(1,) * (n - 1 - i))
        taps = [t for tap in taps for t in _taps(tap, x.ndim - n + i, axes[i], 0)]
        places = [p + a for p in places for a in at]
        inner *= axes[i].size
    return functools.reduce(
        lax.add, [jnp.where(place == at, tap, 0) for tap, at in zip(taps, places, strict=True)]
    )


def take_places(x: Array, place: Array, n: int) -> Array:
    """The elements of x at flat indices into its last n dimensions."""
    # no -1: a batch may be empty
    flat, at = (a.reshape(*a.shape[:-n], math.prod(a.shape[-n:])) for a in (x, place))
    return jnp.take_along_axis(flat, at, -1, mode="promise_in_bounds").reshape(place.shape)


@fused("axes")
def _max_pool_with_indices(x: Array, axes: _Axes) -> tuple[Array, Array]:
    values, place = _max_pool(x, axes)
    return values, place.astype(jnp.int64)


@lowering("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices")
def aten_max_pool_with_indices(
    x: Array,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    *,
    n: int = 2,
) -> tuple[Array, Array]:
    """max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0,
    int[2] dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)
    """
    return _max_pool_with_indices(
        x, _regular(x, n, kernel_size, stride, padding, dilation, ceil_mode)
    )


lowering("aten.max_pool3d_with_indices")(functools.partial(aten_max_pool_with_indices, n=3))


@lowering("aten.max_pool2d_with_indices_backward")
def aten_max_pool2d_with_indices_backward(
    grad: Array,
    x: Array,
    kernel_size: list,
    stride: list,
    padding: list,
    dilation: list,
    ceil_mode: bool,
    indices: Array,
    *,
    n: int = 2,
) -> Array:
    """max_pool2d_with_indices_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2]
    stride, int[2] padding, int[2] dilation, bool ceil_mode, Tensor indices) -> Tensor
    """
    return _select_transpose(
        grad, indices, _regular(x, n, kernel_size, stride, padding, dilation, ceil_mode)
    )


lowering("aten.max_pool3d_with_indices_backward")(
    functools.partial(aten_max_pool2d_with_indices_backward, n=3)
)


@fused("axes")
def _select_transpose(grad: Array, indices: Array, axes: _Axes) -> Array:
    shape = (*grad.shape[: grad.ndim - len(axes)], *(axis.size for axis in axes))
    like = jax.ShapeDtypeStruct(shape, grad.dtype)
    return jax.linear_transpose(lambda x: take_places(x, indices, len(axes)), like)(grad)[0]


@lowering("aten.adaptive_max_pool2d")
def aten_adaptive_max_pool2d(
    x: Array, output_size: Sequence[int], *, n: int = 2
) -> tuple[Array, Array]:
    """adaptive_max_pool2d(Tensor self, int[2] output_size) -> (Tensor, Tensor)"""
    return _max_pool_with_indices(x, _adaptive(x, n, output_size))


lowering("aten.adaptive_max_pool3d")(functools.partial(aten_adaptive_max_pool2d, n=3))


@lowering("aten.adaptive_max_pool2d_backward")
def aten_adaptive_max_pool2d_backward(
    grad: Array, x: Array, indices: Array, *, n: int = 2
) -> Array:
    """adaptive_max_pool2d_backward(Tensor grad_output, Tensor self, Tensor indices) -> Tensor"""
    return _select_transpose(grad, indices, _adaptive(x, n, grad.shape[-n:]))


lowering("aten.adaptive_max_pool3d_backward")(
    functools.partial(aten_adaptive_max_pool2d_backward, n=3)
)


# -- average pooling -------------------------------------------------------------------------------
def _sum_windows(x: Array, axes: _Axes) -> Array:
    """The sum of each window over the last dimensions."""
    lead = x.ndim - len(axes)
    if all(axis.tiles for axis in axes):
        x, taps = _tiled(x, axes)
        return jnp.sum(x, taps, dtype=x.dtype)
    if not any(axis.adaptive for axis in axes):
        return _reduce_windows(x, lax.add, np.zeros((), x.dtype), axes)
    for i, axis in enumerate(axes):
        at = axis.coordinates()
        member = np.zeros((axis.size, axis.out), x.dtype)
        member[at[at >= 0], np.nonzero(at >= 0)[1]] = 1
        x = jnp.moveaxis(jnp.tensordot(x, member, (lead + i, 0), precision="highest"), -1, lead + i)
    return x


def _outer(sizes: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.multiply.outer, sizes)


@fused("axes", "include_pad", "divisor")
def _avg_pool(x: Array, axes: _Axes, include_pad: bool = False, divisor: Any = None) -> Array:
    total = _sum_windows(cast(x, opmath(x.dtype)), axes)
    if divisor is None:
        counts = []
        for a in axes:
            start = np.arange(a.out) * a.stride - a.padding
            padded = np.minimum(start + a.kernel, a.size + a.padding) - start
            counts.append(padded if include_pad else (a.coordinates() >= 0).sum(0))
        count = _outer(counts)
        divisor = (
            int(count.flat[0])
            if count.size and (count == count.flat[0]).all()
            else constant(count, total.dtype)
        )
    if is_integral(x):
        return jnp.asarray(
            lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, total.dtype), total.shape)),
            x.dtype,
        )
    return cast(total / divisor, x.dtype)


@lowering("aten.avg_pool2d")
def aten_avg_pool2d(
    x: Array,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    n: int = 2,
) -> Array:
    """avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool
    ceil_mode=False, bool count_include_pad=True, int? divisor_override=None) -> Tensor
    """
    if divisor_override == 0:
        raise RuntimeError("divisor_override: divisor must be not zero")
    return _avg_pool(
        x,
        _regular(x, n, kernel_size, stride, padding, (1,), ceil_mode),
        bool(count_include_pad),
        divisor_override,
    )


lowering("aten.avg_pool3d")(functools.partial(aten_avg_pool2d, n=3))


@lowering("aten._adaptive_avg_pool2d", "aten.adaptive_avg_pool2d")
def aten__adaptive_avg_pool2d(x: Array, output_size: Sequence[int], *, n: int = 2) -> Array:
    """_adaptive_avg_pool2d(Tensor self, SymInt[2] output_size) -> Tensor"""
    return _avg_pool(x, _adaptive(x, n, output_size))


for _name in ("aten._adaptive_avg_pool3d", "aten.adaptive_avg_pool3d"):
    lowering(_name)(functools.partial(aten__adaptive_avg_pool2d, n=3))


def _linear_backward(forward: Callable[..., Any], n: int) -> Callable[..., Any]:
    """The backward operator of a pooling that is linear in its input: (grad_output, self, *same
    arguments) -> grad_input.
    """

    def backward(grad: Array, x: Array, *args, **kwargs) -> Array:
        if not args and "kernel_size" not in kwargs:  # adaptive: the gradient has the output's size
            args = (grad.shape[-n:],)
        return jax.linear_transpose(
            lambda a: forward(a, *args, n=n, **kwargs), jax.ShapeDtypeStruct(x.shape, x.dtype)
        )(grad)[0]

    return backward


for _n in (2, 3):
    lowering(f"aten.avg_pool{_n}d_backward")(_linear_backward(aten_avg_pool2d, _n))
    lowering(f"aten._adaptive_avg_pool{_n}d_backward")(
        _linear_backward(aten__adaptive_avg_pool2d, _n)
    )
