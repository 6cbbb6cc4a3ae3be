"""segment_reduce: sums, means, extrema and products over consecutive segments of one dimension, by
lengths or by offsets.

Lengths and offsets may be traced; they are checked if their values are known, and otherwise assumed
to be valid.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.convert import dtypes
from bridge.lowering.common import varying
from bridge.lowering.common.loops import searchsorted
from bridge.lowering.common.promotion import cast, fused, is_floating, opmath, wrap_dim
from bridge.lowering.common.provided import refuse
from bridge.lowering.registry import lowering

#: the initial value of a segment if none is given
_NEUTRAL = {
    "sum": 0.0,
    "mean": 0.0,
    "prod": 1.0,
    "max": -np.inf,
    "amax": -np.inf,
    "min": np.inf,
    "amin": np.inf,
}


def _check(
    data: Array, lengths: Array | None, offsets: Array | None, axis: int, unsafe: bool
) -> None:
    name, given = ("lengths", lengths) if offsets is None else ("offsets", offsets)
    if given is None:
        raise RuntimeError("segment_reduce(): Either lengths or offsets must be defined.")
    if not is_floating(data):
        raise RuntimeError(
            "segment_reduce(): data: expected real floating-point values, got "
            f"{dtypes.to_torch(data.dtype)}"
        )
    if given.dtype not in (np.int32, np.int64):
        raise RuntimeError(
            f"segment_reduce(): {name}: expected dtype int32 or int64, got "
            f"{dtypes.to_torch(given.dtype)}"
        )
    if axis != given.ndim - 1 or not data.ndim:
        raise RuntimeError(
            f"segment_reduce(): Expected axis to be the last dimension of {name} but got {axis}."
        )
    if given.shape[:-1] != data.shape[:axis]:
        raise RuntimeError(
            f"segment_reduce(): {name}: expected sizes {list(data.shape[:axis])} before axis, got "
            f"{list(given.shape[:-1])}"
        )
    if offsets is not None and not given.shape[-1]:
        raise RuntimeError(
            "segment_reduce(): offsets: expected one more than there are segments, got none"
        )
    n = data.shape[axis]
    if not given.size:
        return
    counts = jnp.diff(given) if offsets is not None else given
    total = jnp.sum(given, -1) if offsets is None else given[..., -1]
    refuse(
        counts < 0,
        f"segment_reduce(): {name} "
        + ("contains negative value!" if offsets is None else "decrease"),
    )
    if offsets is None and not unsafe:
        error = (
            "segment_reduce(): Expected all rows of lengths along axis to sum to "
            "data.size(lengths.dim()-1) when !unsafe."
        )
        refuse(total != n, error)
    refuse(
        (given[..., 0] < 0) | (total > n),
        f"segment_reduce(): {name} reach beyond the {n} elements along axis {axis}",
    )


@lowering("aten.segment_reduce")
def aten_segment_reduce(
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    indices: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Array:
    """segment_reduce(Tensor data, str reduce, *, Tensor? lengths=None, Tensor? indices=None,
    Tensor? offsets=None, int axis=0, bool unsafe=False, Scalar? initial=None) -> Tensor
    """
    if indices is not None:
        raise RuntimeError("segment_reduce(): indices based reduction is not supported yet.")
    if reduce not in _NEUTRAL:
        raise RuntimeError(
            f"reduce argument must be either sum, mean, max, min or prod, got {reduce}"
        )
    axis = wrap_dim(axis, data.ndim)
    _check(data, lengths, offsets, axis, unsafe)
    start = np.float64(_NEUTRAL[reduce] if initial is None else initial)
    empty = np.float64(np.nan) if reduce == "mean" and initial is None else start
    return _reduce(
        data,
        lengths if offsets is None else offsets,
        offsets is not None,
        reduce,
        axis,
        start,
        empty,
    )


@fused("by_offsets", "reduce", "axis")
def _reduce(
    data: Array, given: Array, by_offsets: bool, reduce: str, axis: int, start: Array, empty: Array
) -> Array:
    shape, n = data.shape, data.shape[axis]
    outer, inner = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
    rows = cast(given, np.int64).reshape(outer, given.shape[-1])
    if not by_offsets:
        rows = jnp.concatenate([jnp.zeros((outer, 1), np.int64), jnp.cumsum(rows, -1)], -1)
    first, ends, count = rows[:, :1], rows[:, 1:], rows.shape[1] - 1
    wide = opmath(data.dtype)
    x = cast(data, wide).reshape(outer, n, inner)
    place = jnp.arange(n, dtype=np.int64)
    # the segment of each element; elements before the first and after the last segment go to one
    # more, which is dropped
    segment = (
        jax.vmap(lambda e: searchsorted(e, place, side="right"))(ends)
        if count
        else jnp.zeros((outer, n), np.int64)
    )
    segment = jnp.where(place < first, count, segment)
    x = jnp.where((segment < count)[..., None], x, jnp.asarray(_NEUTRAL[reduce], wide))
    sizes = (ends - rows[:, :-1])[..., None]
    begin = cast(start, wide)
    if reduce in ("sum", "mean"):
        out = _sums(x, segment, count) + begin
        out = out / cast(jnp.maximum(sizes, 1), wide) if reduce == "mean" else out
    elif reduce == "prod":
        out = _products(x, segment, ends) * begin
    else:
        out = _extrema(x, segment, begin, count, reduce.endswith("max"))
    out = jnp.where(sizes == 0, cast(empty, wide), out)
    return cast(out.reshape(*shape[:axis], count, *shape[axis + 1 :]), data.dtype)


def _sums(x: Array, segment: Array, count: int) -> Array:
    return jax.vmap(lambda x, s: jax.ops.segment_sum(x, s, count + 1))(x, segment)[:, :count]


def _products(x: Array, segment: Array, ends: Array) -> Array:
    """The products, by a running product that starts anew with each segment, so that the derivative
    contains no division.
    """
    if not x.shape[1]:
        return jnp.ones((x.shape[0], ends.shape[1], x.shape[2]), x.dtype)
    anew = jnp.diff(segment, axis=1, prepend=-1)[..., None] != 0

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] | b[0], b[1] * jnp.where(b[0], jnp.ones_like(a[1]), a[1])

    running = lax.associative_scan(join, (anew, x), axis=1)[1]
    return jnp.take_along_axis(running, jnp.clip(ends - 1, 0, x.shape[1] - 1)[..., None], 1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _extrema(x: Array, segment: Array, begin: Array, count: int, largest: bool) -> Array:
    """The largest (smallest) of each segment and begin; equal elements share the derivative, and
    begin gets none of it.
    """
    scan, pair = (
        (jax.ops.segment_max, jnp.maximum) if largest else (jax.ops.segment_min, jnp.minimum)
    )
    return pair(jax.vmap(lambda x, s: scan(x, s, count + 1))(x, segment)[:, :count], begin)


@_extrema.defjvp
def _extrema_jvp(
    count: int, largest: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    (x, segment, begin), (dx, _, _) = primals, tangents
    out = _extrema(x, segment, begin, count, largest)
    padded = jnp.pad(out, ((0, 0), (0, 1), (0, 0)), constant_values=np.nan)
    hit = (x == jnp.take_along_axis(padded, segment[..., None], 1)) | jnp.isnan(x)
    ties = jnp.maximum(_sums(cast(hit, x.dtype), segment, count), 1)
    return out, _sums(jnp.where(hit, dx, jnp.zeros_like(dx)), segment, count) / ties


@lowering("aten._segment_reduce_backward")
def aten_segment_reduce_backward(
    grad: Array,
    output: Array,
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    initial: Any = None,
) -> Array:
    """_segment_reduce_backward(Tensor grad, Tensor output, Tensor data, str reduce, *, Tensor?
    lengths=None, Tensor? offsets=None, int axis=0, Scalar? initial=None) -> Tensor
    """
    kwargs = {
        "lengths": lengths,
        "offsets": offsets,
        "axis": axis,
        "unsafe": True,
        "initial": initial,
    }
    return varying.vjp(lambda x: aten_segment_reduce(x, reduce, **kwargs), data)[1](grad)[0]
