"""The linear function of vjp and linearize: the arrays that it holds leave the call as further
results, and enter each call of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from bridge.boundary import meshes
from bridge.boundary.calls import apply
from bridge.boundary.results import Result, replaced
from bridge.trace.levels import state


class Linear:
    """A pullback or pushforward of JAX's that is called after the computation that makes it; to be
    made before that computation runs.

    The arrays that JAX's function holds may be tracers. Their trace may end before the function is
    called, and what the function returns has to be differentiable through them.
    """

    def __init__(self, primals: Sequence[Any]) -> None:
        self.primals = primals
        self.tensors: Sequence[Any] = ()

    def residuals(self, function: Callable[..., Any]) -> list[jax.Array]:
        """Called in the computation: the arrays that leave it, as its first results."""
        leaves, treedef = jax.tree.flatten(function)
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        arrays = [leaves[i] for i in places]
        kinds = [
            jax.random.key_impl(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else None
            for x in arrays
        ]
        self.count = len(arrays)
        static = replaced(leaves, places, [None] * len(places))

        def built(values: Sequence[jax.Array]) -> Callable[..., Any]:
            made = [
                v if kind is None else jax.random.wrap_key_data(v, impl=kind)
                for v, kind in zip(values, kinds, strict=True)
            ]
            return jax.tree.unflatten(treedef, replaced(static, places, made))

        self.built = built
        return [
            x if kind is None else jax.random.key_data(x)
            for x, kind in zip(arrays, kinds, strict=True)
        ]

    def left(self, outs: list[Any]) -> list[Any]:
        """The results of the computation without these first ones, which are kept."""
        self.tensors = outs[: self.count]
        return outs[self.count :]

    def call(
        self, compute: Callable[[Callable[..., Any], list[Any]], Result], operands: Sequence[Any]
    ) -> list[Any]:
        """The results of ``compute``, which takes JAX's function and the values of the operands
        (cotangents or tangents).
        """
        n = self.count
        if state.level is None:  # an array that the caller has made may be on no mesh
            apart = [isinstance(v, jax.Array) and meshes.explicit([v]) is None for v in operands]
            operands = [
                meshes.beside(v, self.primals) if each else v
                for v, each in zip(operands, apart, strict=True)
            ]
        return apply(
            lambda values: compute(self.built(values[:n]), values[n:]), [*self.tensors, *operands]
        )[0]
