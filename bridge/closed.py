"""A Python function as a jaxpr whose captured values are operands, so that nothing of it runs after its trace has closed."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


class Closed:
    """A function of JAX values, traced on these arguments; called with what it captured as its first argument.

    Attributes:
        captured: the values that it met beside its arguments.
        shapes: of its results.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        closed, self.shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        self._jaxpr, self.captured = closed.jaxpr, closed.consts

    def __call__(self, captured: Sequence[Any], *args: Any) -> Any:
        outs = jax.core.eval_jaxpr(self._jaxpr, captured, *jax.tree_util.tree_leaves(args))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(self.shapes), outs)
