"""Orthogonal polynomials (Chebyshev of four kinds and shifted, Hermite, Laguerre, Legendre) by
their three-term recurrences.

The degree is a number, or a tensor whose values are known only when the program runs; Abramowitz
and Stegun, table 22.7.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common import varying
from bridge.lowering.common.builders import align, choose, fused, like, number
from bridge.lowering.common.loops import fori_loop
from bridge.lowering.common.promotion import cast, float_dtype, is_array, opmath, result_dtype
from bridge.lowering.registry import lowering


class _Family(NamedTuple):
    """The first-degree member, and p[k+1] from (k, x, p[k], p[k-1]); highest is the degree above
    which torch gives NaN.
    """

    first: Callable
    step: Callable
    shifted: bool = False
    highest: Callable[[np.dtype], float] = lambda dtype: math.inf


def _chebyshev_step(k: Array, x: Array, p: Array, q: Array) -> Array:
    return 2 * x * p - q


def _hermite_limit(dtype: np.dtype) -> float:
    return 512 if dtype == np.float64 else 128


_CHEBYSHEV = {
    "t": lambda x: x,
    "u": lambda x: 2 * x,
    "v": lambda x: 2 * x - 1,
    "w": lambda x: 2 * x + 1,
}
_FAMILIES = {
    "hermite_polynomial_h": _Family(
        lambda x: 2 * x, lambda k, x, p, q: 2 * (x * p - k * q), highest=_hermite_limit
    ),
    "hermite_polynomial_he": _Family(
        lambda x: x, lambda k, x, p, q: x * p - k * q, highest=_hermite_limit
    ),
    "laguerre_polynomial_l": _Family(
        lambda x: 1 - x, lambda k, x, p, q: ((2 * k + 1 - x) * p - k * q) / (k + 1)
    ),
    "legendre_polynomial_p": _Family(
        lambda x: x, lambda k, x, p, q: ((2 * k + 1) * x * p - k * q) / (k + 1)
    ),
    **{
        f"chebyshev_polynomial_{kind}": _Family(first, _chebyshev_step)
        for kind, first in _CHEBYSHEV.items()
    },
    **{
        f"shifted_chebyshev_polynomial_{kind}": _Family(first, _chebyshev_step, True)
        for kind, first in _CHEBYSHEV.items()
    },
}


@functools.partial(fused, static_argnums=(0, 2, 3, 4))
def _of_known_degree(name: str, x: Array, degree: int, work: np.dtype, dtype: np.dtype) -> Array:
    family = _FAMILIES[name]
    x = cast(x, work)
    if degree < 0:
        return cast(like(0, x), dtype)
    if degree > family.highest(work):
        return cast(like(math.nan, x), dtype)
    if family.shifted:
        x = 2 * x - 1
    if degree == 0:
        return cast(like(1, x), dtype)

    def step(k: Array, state: tuple) -> tuple:
        p, q = state
        return family.step(lax.convert_element_type(k, work), x, p, q), p

    return cast(fori_loop(1, degree, step, (family.first(x), like(1, x)))[0], dtype)


@functools.partial(fused, static_argnums=(0, 3, 4))
def _of_any_degree(name: str, x: Array, degree: Array, work: np.dtype, dtype: np.dtype) -> Array:
    x, degree = align(cast(x, work), cast(degree, work))
    return cast(
        _member(0, name, lax.convert_element_type(lax.stop_gradient(degree), np.int64), x), dtype
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _member(order: int, name: str, degree: Array, x: Array) -> Array:
    """The derivative in x of that order; JAX has no reverse mode for a loop whose number of steps
    is unknown.
    """
    compute = functools.partial(_recurrence, name, degree)
    for _ in range(order):
        compute = functools.partial(_slope, compute)
    return compute(x)


@_member.defjvp
def _member_jvp(order: int, name: str, primals: tuple, tangents: tuple) -> tuple:
    return _member(order, name, *primals), lax.mul(_member(order + 1, name, *primals), tangents[1])


def _slope(function: Callable, x: Array) -> Array:
    return jax.jvp(function, (x,), (like(1, x),))[1]


def _recurrence(name: str, degree: Array, x: Array) -> Array:
    family = _FAMILIES[name]
    work = x.dtype
    if family.shifted:
        x = 2 * x - 1
    known = choose(
        lax.gt(degree, np.int64(0)),
        family.first(x),
        choose(lax.eq(degree, np.int64(0)), 1, like(0, x)),
    )
    limit = family.highest(work)
    largest = (
        jnp.max(degree, initial=0)
        if limit == math.inf
        else lax.min(jnp.max(degree, initial=0), np.int64(limit))
    )

    def step(state: tuple) -> tuple:
        k, p, q, result = state
        new = family.step(lax.convert_element_type(k, work), x, p, q)
        return k + 1, new, p, lax.select_n(lax.eq(degree, k + 1), result, new)

    result = varying.while_loop(
        lambda state: state[0] < largest, step, (np.int64(1), family.first(x), like(1, x), known)
    )[3]
    if limit != math.inf:
        result = choose(lax.gt(degree, np.int64(limit)), math.nan, result)
    return result


def _polynomial(name: str) -> Callable:
    def polynomial(x: Any, n: Any) -> Array:
        dtype = float_dtype(result_dtype(x, n))
        work = opmath(dtype)
        if is_array(n):
            return _of_any_degree(name, number(x, work), n, work, dtype)
        return _of_known_degree(name, x, int(n), work, dtype)

    return polynomial


for _name in _FAMILIES:
    lowering(*(f"aten.special_{_name}{kind}" for kind in ("", ".x_scalar", ".n_scalar")))(
        _polynomial(_name)
    )
