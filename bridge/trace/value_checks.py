"""Checks of values that are known only when a program runs, such as an index out of range, which
PyTorch refuses.

A check is an operation that returns its operand. Outside of compilation it looks at the values,
through vmap and derivatives. Inside, it costs nothing by itself: the checked operands become
outputs of the program, and are looked at after the program has run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import ad, batching, mlir

from bridge.errors import HERE, at_line
from bridge.lowering.common.provided import Range
from bridge.trace.levels import refuse_in_loop, state

_check_p = Primitive("in_range")
_check_p.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[_check_p] = lambda primals, tangents, **params: (
    _check_p.bind(*primals, **params),
    tangents[0],
)
batching.primitive_batchers[_check_p] = lambda args, dims, **params: (
    _check_p.bind(*args, **params),
    dims[0],
)
mlir.register_lowering(_check_p, lambda _, x, **__: [x])


@_check_p.def_impl
def _look(x: jax.Array, *, where: Range) -> jax.Array:
    values = np.asarray(x)
    if values.size:
        where.judge(values.min(), values.max())
    return x


def check(x: jax.Array, where: Range) -> jax.Array:
    """Implements ``bridge.lowering.common.provided.check``."""
    refuse_in_loop("a check of values")
    if state.level is not None:
        line = HERE if state.replaying else at_line().replace("{", "{{").replace("}", "}}")
        where = dataclasses.replace(where, error=where.error + line)
    return _check_p.bind(x, where=where)


def is_check(eqn: JaxprEqn) -> bool:
    """Whether an equation of a jaxpr is a check."""
    return eqn.primitive is _check_p


def ends(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The least and the greatest number of each operand, as a list of one array for ``Bounds``;
    without operands, an empty list.
    """
    return (
        [jnp.stack([jnp.stack([jnp.min(v), jnp.max(v)]).astype(np.int64) for v in operands])]
        if operands
        else []
    )


class Bounds:
    """The ranges of the operands that a whole program checks."""

    __slots__ = ("high", "low", "ranges")

    def __init__(self, ranges: list[Range]) -> None:
        self.ranges = ranges
        self.low, self.high = np.array([r.low for r in ranges]), np.array([r.high for r in ranges])

    @classmethod
    def of(cls, closed: ClosedJaxpr) -> tuple[ClosedJaxpr, Bounds | None]:
        """A closed jaxpr with the checked operands as its last outputs, and their ranges;
        unchanged, and None, if it checks nothing.

        Checks inside of a loop or a branch are not seen.
        """
        jaxpr = closed.jaxpr
        checks = [
            e
            for e in jaxpr.eqns
            if is_check(e) and not isinstance(e.invars[0], Literal) and e.invars[0].aval.size
        ]
        if not checks:
            return closed, None
        taken = jaxpr.replace(
            outvars=[*jaxpr.outvars, *(e.invars[0] for e in checks)],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        return closed.replace(jaxpr=taken), cls([e.params["where"] for e in checks])

    def judge(self, found: np.ndarray | jax.Array) -> None:
        """Raise for the first operand whose ``ends`` are outside of its range."""
        found = np.asarray(found)
        wrong = (found[:, 0] < self.low) | (found[:, 1] >= self.high)
        if wrong.any():
            k = int(wrong.argmax())
            self.ranges[k].judge(*found[k])
