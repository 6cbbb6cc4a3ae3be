"""Taylor mode: the derivatives of a function along a curve, all orders in one pass through its
jaxpr.

The rules for primitives are those of ``jax.experimental.jet``. A primitive that has none there, or
one that loses digits, goes by its first derivative, which every differentiable primitive and every
``jax.custom_jvp`` has: if y = f(x), then y' = J(x) x', so the coefficients of y are those of y', of
one order less, and y' is a function of the two curves x and x'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from bridge.boundary.results import inexact, replaced
from bridge.private_jax import jet_rules

# the coefficients after the first one; None: the value is constant along the curve
Series = list[Any] | None

#: The rules of these compute the value itself less exactly (expm1 as exp(x) - 1), or by a function
#: that is undefined where it is not (pow by a logarithm), or take a derivative at a kink (abs, max)
#: that is not the primitive's own.
_BY_DERIVATIVE = frozenset(
    {
        "abs",
        "acosh",
        "asinh",
        "atanh",
        "clamp",
        "cummax",
        "cummin",
        "cumprod",
        "erf_inv",
        "erfc",
        "expm1",
        "log1p",
        "max",
        "min",
        "pow",
    }
) | {"reduce_max", "reduce_min", "rem", "rsqrt", "sqrt", "tanh"}
#: By a primitive, the operands in each of which it is linear while the others are constant.
_LINEAR_IN: dict[Any, tuple[int, ...]] = {
    lax.mul_p: (0, 1),
    lax.dot_general_p: (0, 1),
    lax.conv_general_dilated_p: (0, 1),
    lax.div_p: (0,),
}


def jet(
    fn: Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]],
    primals: Sequence[jax.Array],
    series: Sequence[Sequence[jax.Array]],
    order: int,
    factorial_scaled: bool,
) -> tuple[list[jax.Array], list[list[jax.Array]], list[jax.Array]]:
    """The outputs of fn along a curve, their higher coefficients, and the other values that fn
    returns.

    Args:
        fn: returns (outputs, other values).
        primals, series: the curve: a value for each argument of fn, and its ``order`` higher
            coefficients.
        factorial_scaled: the coefficients are derivatives, k! times those of the polynomial.
    """
    scale = [float(math.factorial(k)) if factorial_scaled else 1.0 for k in range(1, order + 1)]
    closed, (outputs, _) = jax.make_jaxpr(fn, return_shape=True)(*primals)
    given: list[Series] = [[c / s for c, s in zip(terms, scale, strict=True)] for terms in series]
    values, found = _along(closed.jaxpr, closed.consts, primals, given, order)
    n = len(outputs)
    terms = [
        [jnp.zeros_like(v)] * order
        if cs is None
        else [c * s for c, s in zip(cs, scale, strict=True)]
        for v, cs in zip(values[:n], found, strict=False)
    ]
    return values[:n], terms, values[n:]


def _along(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    primals: Sequence[Any],
    series: Sequence[Series],
    order: int,
) -> tuple[list[Any], list[Series]]:
    """The values and the coefficients of a jaxpr's outputs."""
    if not order:
        return jax.core.eval_jaxpr(jaxpr, consts, *primals), [None] * len(jaxpr.outvars)
    env: dict[Any, tuple[Any, Series]] = dict(
        zip(jaxpr.constvars, [(c, None) for c in consts], strict=True)
    )
    env.update(zip(jaxpr.invars, zip(primals, series, strict=True), strict=True))

    def read(variables: Sequence[Any]) -> tuple[list[Any], list[Series]]:
        found = [(v.val, None) if isinstance(v, Literal) else env[v] for v in variables]
        return [value for value, _ in found], [terms for _, terms in found]

    for eqn in jaxpr.eqns:
        env.update(
            zip(
                eqn.outvars,
                zip(*_equation(jaxpr, eqn, *read(eqn.invars), order), strict=True),
                strict=True,
            )
        )
    return read(jaxpr.outvars)


def _equation(
    jaxpr: Jaxpr, eqn: JaxprEqn, primals: list[Any], series: list[Series], order: int
) -> tuple[Sequence[Any], Sequence[Series]]:
    active = [i for i, terms in enumerate(series) if terms is not None]
    one, outvars = alone(jaxpr, eqn), list[Any](eqn.outvars)
    if not active or not any(inexact(v.aval) for v in outvars):
        return one(*primals), [None] * len(outvars)
    if eqn.primitive.name in ("jit", "pjit"):
        inner = eqn.params["jaxpr"]
        return _along(inner.jaxpr, inner.consts, primals, series, order)
    if len(active) == 1 and active[0] in _LINEAR_IN.get(eqn.primitive, ()):
        (i,) = active
        return one(*primals), [
            [one(*primals[:i], c, *primals[i + 1 :])[0] for c in series[i] or ()]
        ]
    rule = None if eqn.primitive.name in _BY_DERIVATIVE else jet_rules.get(eqn.primitive)
    if rule is None:
        return _derived(one, primals, series, active, order)
    full = [
        [jnp.zeros_like(p)] * order if terms is None else terms
        for p, terms in zip(primals, series, strict=True)
    ]
    out, terms = rule(primals, full, **eqn.params)
    outs, found = (out, terms) if eqn.primitive.multiple_results else ([out], [terms])
    # it has an object for a series of zeros
    return outs, [list(cs) if isinstance(cs, list | tuple) else None for cs in found]


def alone(jaxpr: Jaxpr, eqn: JaxprEqn) -> Callable[..., list[Any]]:
    """One equation of a jaxpr as a function of its operands that returns a list."""
    variables = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
    alone = jaxpr.replace(
        constvars=(),
        invars=variables,
        outvars=eqn.outvars,
        eqns=[eqn],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )

    def run(*operands: Any) -> list[Any]:
        values = {
            v: x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, Literal)
        }
        return jax.core.eval_jaxpr(alone, (), *[values[v] for v in variables])

    return run


def _derived(
    one: Callable[..., list[Any]],
    primals: list[Any],
    series: list[Series],
    active: list[int],
    order: int,
) -> tuple[list[Any], list[Series]]:
    """The outputs of a function and their coefficients by its first derivative."""
    outs = one(*primals)
    wanted = [k for k, out in enumerate(outs) if inexact(out)]
    count = len(active)

    def derivative(*curves: Any) -> list[Any]:
        def f(*xs: Any) -> list[Any]:
            found = one(*replaced(primals, active, xs))
            return [found[k] for k in wanted]

        return jax.jvp(f, curves[:count], curves[count:])[1]

    moving = [series[i] or [] for i in active]
    curves = [*[primals[i] for i in active], *[cs[0] for cs in moving]]
    terms: list[Series] = [
        *[cs[:-1] for cs in moving],
        *[[k * c for k, c in enumerate(cs, 1)][1:] for cs in moving],
    ]
    closed = jax.make_jaxpr(derivative)(*curves)
    firsts, rest = _along(closed.jaxpr, closed.consts, curves, terms, order - 1)
    found: list[Series] = [None] * len(outs)
    for k, first, cs in zip(wanted, firsts, rest, strict=True):
        later = [jnp.zeros_like(first)] * (order - 1) if cs is None else cs
        found[k] = [c / j for j, c in enumerate([first, *later], 1)]
    return outs, found
