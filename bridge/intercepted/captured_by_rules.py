"""Tensors that a user's own derivative rules capture become operands, because JAX may run the rules
after their trace has closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from bridge.programs import closure_scan
from bridge.trace.levels import state
from bridge.trace.storage import Node
from bridge.trace.tracing import Traced, node_of, value_of


class Closed:
    """A function of JAX values, traced on example arguments; a call takes the captured values as
    its first argument.

    Attributes:
        captured: the values that the function used besides its arguments.
        shapes: a jax.ShapeDtypeStruct for each result, in the tree of the results.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        closed, self.shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        self._jaxpr, self.captured = closed.jaxpr, closed.consts

    def __call__(self, captured: Sequence[Any], *args: Any) -> Any:
        outs = jax.core.eval_jaxpr(self._jaxpr, captured, *jax.tree_util.tree_leaves(args))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(self.shapes), outs)


def followed(*roots: Any) -> list[Node]:
    """The nodes of tensors from outside that these functions reach and whose values are tracers."""
    root, nodes = state.level.root, []
    with torch.no_grad():
        for t, _ in closure_scan.scan(*roots).tensors.values():
            wanted = not t.node.level.closed if type(t) is Traced else id(t) in root.overrides
            if wanted and isinstance(value_of(t), jax.core.Tracer):
                nodes.append(node_of(t))
    return nodes
