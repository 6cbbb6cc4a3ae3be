"""Removes what a program need not compute: equations whose results are not used, and those that
repeat an earlier one.

XLA would remove them too, but only after JAX has differentiated and lowered them. Code of nested
transforms repeats much: each of ``grad(f, 0)``, ``grad(f, 1)`` and ``f`` runs f again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from bridge.trace.value_checks import is_check


def simplified(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without unused and repeated equations. Those that compute its outputs stay, so that
    two outputs stay two arrays.

    Checks of values stay too, although nothing uses their results.
    """
    outputs = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    same: dict[Any, Any] = {}  # by a variable, the one of an earlier equation that holds the same
    known: dict[Any, list[Var]] = {}
    kept = []
    for eqn in jaxpr.eqns:
        operands = [v if isinstance(v, Literal) else same.get(v, v) for v in eqn.invars]
        if (
            eqn.effects
            or not outputs.isdisjoint(eqn.outvars)
            or any(map(_is_function, eqn.params.values()))
        ):
            kept.append((eqn, operands))
            continue
        try:
            key = (
                eqn.primitive,
                tuple([_literal(v) if isinstance(v, Literal) else v for v in operands]),
                tuple(eqn.params.items()),
            )
            first = known.setdefault(key, eqn.outvars)
        except TypeError:  # params that are not hashable
            first = eqn.outvars
        if first is eqn.outvars:
            kept.append((eqn, operands))
        else:
            same.update(zip(eqn.outvars, first, strict=True))
    used, eqns = set(outputs), []
    for eqn, operands in reversed(kept):
        if eqn.effects or is_check(eqn) or not used.isdisjoint(eqn.outvars):
            used.update(v for v in operands if not isinstance(v, Literal))
            eqns.append(eqn if operands == eqn.invars else eqn.replace(invars=operands))
    return jaxpr.replace(eqns=eqns[::-1])


def _is_function(param: Any) -> bool:
    """Whether a parameter is a function or a program: two calls of one stay two, because its
    derivative may be a rule of the user's.
    """
    if isinstance(param, tuple):
        return any(map(_is_function, param))
    return isinstance(param, Jaxpr | ClosedJaxpr) or (
        callable(param) and not isinstance(param, type)
    )


def _literal(v: Literal) -> Any:
    """A key that is equal for equal constants; the bits are compared, because 0.0 == -0.0."""
    return (
        v.aval,
        type(v.val),
        v.val.tobytes() if isinstance(v.val, np.ndarray | np.generic) else repr(v.val),
    )
