"""Random functions, for the parity tool: many draws decide whether two libraries draw from the same
distribution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from torchfunc_jax._parity_compare import (
    Difference,
    Found,
    Options,
    Outcome,
    group,
    shown_error,
    tensors_of,
    tolerances,
    wide,
)
from torchfunc_jax._parity_transforms import has_derivatives

#: The greatest probability with which parity reports equal distributions as different.
FALSE_ALARM = 1e-6
_ELEMENTS = 32  # the number of elements of a tensor that are compared one by one
_PAIRS = 10  # the number of pairs of tensors that are compared together

Draws = list[dict[str, torch.Tensor]]


def drawn(
    call: Callable[[], Outcome], count: int, side: str, step: Callable[[int], None]
) -> Draws | Difference:
    """The tensors that each of ``count`` calls returns, or the difference to report if a call
    raises.
    """
    draws: Draws = []
    for i in range(count):
        outcome = call()
        if outcome.error is not None:
            shown = shown_error(outcome.error)
            return Difference(
                "raised",
                f"the function is random, and in draw {i + 1} of {count} {side} raised {shown}",
            )
        draws.append({name: t.detach() for name, t in tensors_of(outcome).items()})
        step(i)
    return draws


def varying(draws: Draws) -> bool:
    """Whether the tensors' shapes are random too."""
    return any(
        t.shape != draws[0][name].shape
        for draw in draws
        for name, t in draw.items()
        if name in draws[0]
    )


def alike(theirs: Draws, ours: Draws, options: Options, tests: int) -> Found:
    """Whether two samples of outputs, as many each, come from one distribution.

    Each draw is described by numbers: a tensor's elements, the mean of them and of their squares,
    of squared differences of neighbours along each dimension (do the lanes of a vmap draw the
    same?), of two tensors' product and squared difference (is the gradient that of the same dropout
    mask?), the counts of NaN and of elements. For each such number the two samples' empirical
    distributions are compared by Kolmogorov and Smirnov's largest distance.

    Args:
        theirs, ours: what torch.func and this library drew.
        options: its tolerances say how far rounding may move a number.
        tests: into how many comparisons the probability of a false alarm is divided.

    Source: two-sample Kolmogorov-Smirnov test with the bound P(D > d) <= e exp(-n d^2) for n draws
    each, true for every n (Wei and Dudley, "Two-sample Dvoretzky-Kiefer-Wolfowitz inequalities",
    2012), divided by the number of comparisons (Bonferroni).
    """
    n = len(theirs)
    scale = {
        name: max(_size(draw[name]) for draw in (*theirs, *ours) if name in draw)
        for name in theirs[0]
    }
    gradients = max(
        (size for name, size in scale.items() if group(name) == "gradient"), default=1.0
    )
    rounding = {  # of what may be left of larger numbers
        name: 16
        * torch.finfo(t.dtype).eps
        * max(1.0, gradients if group(name) == "gradient" else 1.0)
        if has_derivatives(t)
        else 0.0
        for name, t in theirs[0].items()
    }
    kinds = {
        name: tolerances(t.dtype, options) if has_derivatives(t) else (0.0, 0.0)
        for name, t in theirs[0].items()
    }
    a, b = _numbers(theirs), _numbers(ours)
    names = [name for name in a if name in b]
    allowed = threshold(n, max(1, len(names)) * tests)
    largest, first = 0.0, None
    for name in names:
        size = max(scale[leaf] for leaf in name.leaves) ** name.degree
        rtol, atol = (max(kinds[leaf][i] for leaf in name.leaves) for i in (0, 1))
        left = max(rounding[leaf] for leaf in name.leaves) * max(
            1.0, size if name.degree == 2 else 1.0
        )
        d = distance(
            a[name], b[name], 4 ** (name.degree - 1) * (rtol * size + atol * min(1.0, size)) + left
        )
        if d > largest:
            largest, first = d, name
    if first is None or largest <= allowed:
        how = f"{n} draws, Kolmogorov-Smirnov distance {largest:.2f} of {allowed:.2f} allowed"
        return Found(None, None, f"random, same distribution ({how})")
    x, y = a[first], b[first]
    shown = [f"{v.mean():.4g} (standard deviation {v.std():.2g})" for v in (x, y)]
    frozen = (
        f" It is the same in every draw of {options.sides[1]}'s."
        if np.ptp(y) == 0 < np.ptp(x)
        else ""
    )
    return Found(
        Difference(
            "distribution",
            f"{first.leaves[0]} is random and has another distribution: {first.what} is on average "
            f"{shown[0]} under {options.sides[0]}, {shown[1]} under {options.sides[1]}\n  The "
            f"Kolmogorov-Smirnov distance of {n} draws each is {largest:.2f}, allowed is "
            f"{allowed:.2f}.{frozen}",
            first.leaves[0],
            shown[0],
            shown[1],
        )
    )


def threshold(draws: int, comparisons: int) -> float:
    """The Kolmogorov-Smirnov distance that equal distributions exceed with a probability below
    FALSE_ALARM / comparisons.
    """
    return math.sqrt((1 + math.log(comparisons / FALSE_ALARM)) / draws)


def distance(x: np.ndarray, y: np.ndarray, tolerance: float = 0.0) -> float:
    """The largest distance of two samples' empirical distributions, if each number may be moved by
    the tolerance in one's favour.
    """
    x, y = (np.sort(v) for v in _finite(x, y))
    ranks = np.arange(1, len(x) + 1) / len(x)
    above = ranks - np.searchsorted(y, x + tolerance, side="right") / len(y)
    below = ranks - np.searchsorted(x, y + tolerance, side="right") / len(x)
    return float(max(above.max(), below.max(), 0.0))


def _finite(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values, with infinities and NaN replaced by numbers beyond the others."""
    both = np.concatenate([x, y])
    far = 4 * float(np.abs(both[np.isfinite(both)]).max(initial=1.0))
    found = np.nan_to_num(both, nan=2 * far, posinf=far, neginf=-far)
    return found[: len(x)], found[len(x) :]


class _Number(NamedTuple):
    """A number that describes a draw: of which tensors, what it is, and its degree in their
    elements.
    """

    leaves: tuple[str, ...]
    what: str
    degree: int


def _numbers(draws: Draws) -> dict[_Number, np.ndarray]:
    """Each describing number's value in each draw."""
    columns: dict[_Number, list[float]] = {}
    steady = not varying(draws)
    for draw in draws:
        values = {leaf: _array(t) for leaf, t in draw.items()}
        for leaf, v in values.items():
            for what, degree, number in _of_one(v, steady):
                columns.setdefault(_Number((leaf,), what, degree), []).append(number)
        for one, two in itertools.islice(itertools.combinations(values, 2), _PAIRS):
            v, w = values[one], values[two]
            if v.shape == w.shape and v.size and steady:
                with np.errstate(all="ignore"):
                    for what, number in (
                        ("product with", v * w),
                        ("squared difference from", (v - w) ** 2),
                    ):
                        columns.setdefault(
                            _Number((one, two), f"the mean of its {what} {two}", 2), []
                        ).append(float(number.mean()))
    return {name: np.array(column) for name, column in columns.items() if len(column) == len(draws)}


def _array(t: torch.Tensor) -> np.ndarray:
    t = wide(t)
    return (torch.view_as_real(t) if t.is_complex() else t).double().cpu().numpy()


def _size(t: torch.Tensor) -> float:
    """The largest absolute value of the finite elements."""
    v = np.abs(_array(t))
    return float(v[np.isfinite(v)].max(initial=0.0))


def _of_one(v: np.ndarray, steady: bool) -> Iterator[tuple[str, int, float]]:
    yield "the number of its elements", 1, float(v.size)
    yield "the number of NaN in it", 1, float(np.isnan(v).sum())
    if not v.size:
        return
    with np.errstate(all="ignore"):
        yield "its mean", 1, float(v.mean())
        yield "the mean of its squares", 2, float((v * v).mean())
        if steady:
            for k in np.linspace(0, v.size - 1, min(v.size, _ELEMENTS)).astype(int):
                place = [int(i) for i in np.unravel_index(k, v.shape)]
                yield f"the element {place}" if place else "the number", 1, float(v.flat[k])
            for d in range(v.ndim):
                if v.shape[d] > 1:
                    yield (
                        f"the mean of squared differences of neighbours along dimension {d}",
                        2,
                        float((np.diff(v, axis=d) ** 2).mean()),
                    )
