"""Operators whose results have a shape that depends on values, under a vmap that is not compiled:
one lane after the other.

torch.func does the same for repeat_interleave, bincount and argwhere: it loops over the lanes and
stacks results of one shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching

_by_lane_p = Primitive("by_lane")


@_by_lane_p.def_impl
def _one(*arrays: Any, lower: Callable[..., Any]) -> Array:
    return lower(*arrays)


@_by_lane_p.def_abstract_eval
def _aval(*avals: Any, lower: Callable[..., Any]) -> None:
    raise jax.errors.JAXTypeError("the shape of the result depends on values")


def _batch(
    arrays: Sequence[Array], dims: Sequence[int | None], *, lower: Callable[..., Any]
) -> tuple[Any, int]:
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    if not size:
        raise RuntimeError(
            "vmap: an operator whose output has a dynamic shape needs at least "
            "one lane to know it, got none"
        )
    lanes = []
    for i in range(size):
        lane = [
            a if d is None else lax.index_in_dim(a, i, d, keepdims=False)
            for a, d in zip(arrays, dims, strict=True)
        ]
        lanes.append(_by_lane_p.bind(*lane, lower=lower))
        if lanes[i].shape != lanes[0].shape:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(lanes[0].shape)} at "
                f"entry 0 and {list(lanes[i].shape)} at entry {i}: vmap needs outputs of the same "
                "shape from every lane"
            )
    return jnp.stack(lanes), 0


batching.primitive_batchers[_by_lane_p] = _batch


def by_lane(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Make a lowering without derivative, which reads its arrays' values, run directly if they are
    known and lane by lane under vmap.
    """

    @functools.wraps(lower)
    def run(*args: Any, **kwargs: Any) -> Array | None:
        places = [i for i, a in enumerate(args) if isinstance(a, jax.Array)]
        if not any(isinstance(args[i], jax.core.Tracer) for i in places):
            return lower(*args, **kwargs)

        def one(*arrays: Any) -> Array:
            full = list(args)
            for i, a in zip(places, arrays, strict=True):
                full[i] = a
            return lower(*full, **kwargs)

        return _by_lane_p.bind(*[lax.stop_gradient(args[i]) for i in places], lower=one)

    return run
