"""Connectionist temporal classification (https://www.cs.toronto.edu/~graves/icml_2006.pdf), with
PyTorch's gradient.

PyTorch's derivative assumes that the log probabilities come from a log_softmax: it is probability
less posterior, not minus the posterior.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common import varying
from bridge.lowering.common.loops import scan
from bridge.lowering.common.promotion import concrete, fused
from bridge.lowering.indexing.indexing import in_range
from bridge.lowering.registry import lowering

_NEVER = -1e30  # log of zero, but finite, because the derivative of logaddexp at -inf is NaN


class _Paths(NamedTuple):
    """The possible paths: labels (N, 2 S + 1) with blanks between them, their log probabilities (T,
    N, 2 S + 1), the labels that a path may skip to, and the number of each place.
    """

    labels: Array
    emitted: Array
    skips: Array
    place: Array


def _states(log_probs: Array, labels: Array, blank: int) -> _Paths:
    batch, steps = labels.shape[0], log_probs.shape[0]
    with_blanks = (
        jnp.full((batch, 2 * labels.shape[1] + 1), blank, labels.dtype).at[:, 1::2].set(labels)
    )
    at = jnp.clip(with_blanks, 0, log_probs.shape[2] - 1)
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(at, (steps, *at.shape)), 2)
    # a path may skip the blank between two labels, unless they are equal
    place = jnp.arange(at.shape[1])
    earlier = jnp.pad(with_blanks, ((0, 0), (2, 0)), constant_values=blank)[:, : at.shape[1]]
    return _Paths(
        at,
        jnp.maximum(emitted, _NEVER),
        (place % 2 == 1) & (place > 1) & (with_blanks != earlier),
        place,
    )


def _log_sum_exp(*terms: Array) -> Array:
    """The log-sum-exp of two or three terms, added in the order of PyTorch's kernel and so with its
    rounding.
    """
    most = lax.stop_gradient(functools.reduce(jnp.maximum, terms))
    return jnp.log(sum(jnp.exp(t - most) for t in terms)) + most


def _forward(paths: _Paths, input_lengths: Array, target_lengths: Array) -> tuple[Array, Array]:
    """Negative log likelihoods (N,), and the log forward variables (T, N, 2 S + 1)."""
    _, emitted, skips, place = paths

    def back(alpha: Array, by: int) -> Array:
        return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=_NEVER)[:, : alpha.shape[1]]

    def step(alpha: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        t, emitted = now
        total = _log_sum_exp(alpha, back(alpha, 1), jnp.where(skips, back(alpha, 2), _NEVER))
        new = jnp.where((t < input_lengths)[:, None], jnp.maximum(total + emitted, _NEVER), alpha)
        return new, new

    first = jnp.where(
        (place == 0) | ((place == 1) & (target_lengths[:, None] > 0)), emitted[0], _NEVER
    )
    last, rest = scan(step, first, (jnp.arange(1, emitted.shape[0]), emitted[1:]))
    end = jnp.take_along_axis(last, 2 * target_lengths[:, None], 1)[:, 0]
    label = jnp.take_along_axis(last, jnp.maximum(2 * target_lengths[:, None] - 1, 0), 1)[:, 0]
    likelihood = _log_sum_exp(end, jnp.where(target_lengths > 0, label, _NEVER))
    likelihood = jnp.where(input_lengths > 0, likelihood, jnp.where(target_lengths > 0, _NEVER, 0))
    return -likelihood, jnp.concatenate([first[None], rest])


def _backward(paths: _Paths, input_lengths: Array, target_lengths: Array) -> Array:
    """The log backward variables (T, N, 2 S + 1) of the rest of a path from each step and place on,
    inclusive.
    """
    _, emitted, skips, place = paths
    skipped = jnp.pad(skips[:, 2:], ((0, 0), (0, 2)))[:, : skips.shape[1]]
    ends = (place == 2 * target_lengths[:, None]) | (place == 2 * target_lengths[:, None] - 1)
    length = input_lengths[:, None]

    def ahead(beta: Array, by: int) -> Array:
        return jnp.pad(beta, ((0, 0), (0, by)), constant_values=_NEVER)[:, by:]

    def step(beta: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        t, emitted = now
        total = (
            _log_sum_exp(beta, ahead(beta, 1), jnp.where(skipped, ahead(beta, 2), _NEVER)) + emitted
        )
        new = jnp.where(
            t == length - 1,
            jnp.where(ends, emitted, _NEVER),
            jnp.where(t < length, jnp.maximum(total, _NEVER), _NEVER),
        )
        return new, new

    start = jnp.full_like(emitted[0], _NEVER)
    return scan(step, start, (jnp.arange(emitted.shape[0]), emitted), reverse=True)[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _loss(
    log_probs: Array,
    labels: Array,
    input_lengths: Array,
    target_lengths: Array,
    blank: int,
    zero_infinity: bool,
) -> tuple[Array, Array]:
    """Losses (N,), infinite if no path fits (their derivative is then 0 with zero_infinity), and
    forward variables (N, T, 2 S + 1).
    """
    loss, alpha = _forward(_states(log_probs, labels, blank), input_lengths, target_lengths)
    impossible = loss > -_NEVER / 2
    return jnp.where(impossible, jnp.inf, loss), jnp.swapaxes(
        jnp.where(alpha < _NEVER / 2, -jnp.inf, alpha), 0, 1
    )


@_loss.defjvp
def _loss_jvp(
    blank: int, zero_infinity: bool, primals: tuple, tangents: tuple
) -> tuple[tuple, tuple]:
    log_probs, labels, *lengths = primals
    loss, alpha = _loss(*primals, blank, zero_infinity)
    paths = _states(log_probs, labels, blank)
    raw, ahead = _forward(paths, *lengths)
    # the probability of each place at each step
    through = jnp.exp(ahead + _backward(paths, *lengths) + raw[:, None] - paths.emitted)
    steps, rows = (
        jnp.arange(log_probs.shape[0])[:, None, None],
        jnp.arange(labels.shape[0])[:, None],
    )
    posterior = jnp.zeros_like(log_probs).at[steps, rows, paths.labels].add(through)
    slope = jnp.where(
        (raw > -_NEVER / 2)[:, None],
        0 if zero_infinity else jnp.nan,
        jnp.exp(log_probs) - posterior,
    )
    slope = jnp.where(steps < lengths[0][:, None], slope, 0)
    return (loss, alpha), (jnp.sum(slope * tangents[0], (0, 2)), jnp.zeros_like(alpha))


@fused("blank", "zero_infinity")
def _ctc(
    log_probs: Array,
    labels: Array,
    input_lengths: Array,
    target_lengths: Array,
    blank: int,
    zero_infinity: bool,
) -> tuple[Array, Array]:
    return _loss(log_probs, labels, input_lengths, target_lengths, blank, zero_infinity)


def _lengths(name: str, value: Any, batch: int, most: int | None) -> Array:
    if not hasattr(value, "dtype"):
        value = np.asarray(value, np.int64)
    if value.shape != (batch,):
        raise RuntimeError(f"{name} must be of size batch_size {batch}, got {list(value.shape)}")
    if value.size:
        high = np.iinfo(np.int64).max if most is None else most + 1
        error = (
            f"Expected {name} to have value at least 0"
            + ("" if most is None else f" and at most {most}")
            + ", but got value {index}"
        )
        value, _ = in_range(value, high, error, kind=RuntimeError)
    return value


def _padded(targets: Array, target_lengths: Array, batch: int) -> Array:
    """Targets as (N, S); S is the greatest length if the lengths are known. A single row with all
    samples' targets needs known lengths.
    """
    if targets.ndim == 2 and isinstance(target_lengths, jax.core.Tracer):
        return targets
    sizes = concrete(target_lengths)
    longest = int(sizes.max(initial=0))
    if targets.ndim == 2:
        return targets[:, :longest]
    place = np.arange(longest)
    rows = np.cumsum(sizes)[:, None] - sizes[:, None] + place
    return (
        targets[np.where(place < sizes[:, None], rows, 0)]
        if targets.size
        else jnp.zeros((batch, 0), targets.dtype)
    )


@lowering("aten._ctc_loss", "aten._ctc_loss.Tensor")
def aten__ctc_loss(
    log_probs: Array,
    targets: Array,
    input_lengths: Sequence[int] | Array,
    target_lengths: Sequence[int] | Array,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Array, Array]:
    """_ctc_loss(Tensor log_probs, Tensor targets, int[] input_lengths, int[] target_lengths, int
    blank=0, bool zero_infinity=False) -> (Tensor, Tensor)
    """
    steps, batch, classes = log_probs.shape
    if not 0 <= blank < classes:
        raise RuntimeError(
            f"blank must be in label range: expected 0 <= blank < {classes}, got {blank}"
        )
    lengths = _lengths("input_lengths", input_lengths, batch, steps)
    sizes = _lengths(
        "target_lengths", target_lengths, batch, targets.shape[1] if targets.ndim == 2 else None
    )
    return _ctc(
        log_probs,
        _padded(targets, sizes, batch),
        jnp.asarray(lengths),
        jnp.asarray(sizes),
        blank,
        bool(zero_infinity),
    )


@lowering("aten._ctc_loss_backward", "aten._ctc_loss_backward.Tensor")
def aten__ctc_loss_backward(
    grad: Array,
    log_probs: Array,
    targets: Array,
    input_lengths: Sequence[int] | Array,
    target_lengths: Sequence[int] | Array,
    neg_log_likelihood: Array,
    log_alpha: Array,
    blank: int,
    zero_infinity: bool = False,
) -> Array:
    """_ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, int[] input_lengths, int[]
    target_lengths, Tensor neg_log_likelihood, Tensor log_alpha, int blank, bool
    zero_infinity=False) -> Tensor
    """
    loss = lambda x: aten__ctc_loss(
        x, targets, input_lengths, target_lengths, blank, zero_infinity
    )[0]
    return varying.vjp(loss, log_probs)[1](grad)[0]
