"""A value whose cotangent is changed, where the derivative of PyTorch's reverse mode is not the
transpose of its forward mode's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_changed_p = Primitive("with_cotangent")
_changed_p.def_impl(lambda x, *others, change: x)
_changed_p.def_abstract_eval(lambda x, *others, change: x)
mlir.register_lowering(_changed_p, lambda _, x, *others, change: [x])


def with_cotangent(x: Array, change: Callable[..., Array], *others: Array) -> Array:
    """x, with ``change(cotangent, *others)`` for its cotangent; change is linear in the cotangent
    and captures no array.

    A ``lax.custom_linear_solve`` could state this too, but its transpose's transpose is itself: in
    a second derivative, change would not be differentiated.
    """
    return _changed_p.bind(x, *others, change=change)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], *, change: Callable[..., Array]
) -> tuple[Array, Any]:
    x, *others = primals
    dx = tangents[0]
    return with_cotangent(x, change, *others), dx if isinstance(dx, ad.Zero) else with_cotangent(
        dx, change, *others
    )


def _transpose(ct: Any, x: Any, *others: Array, change: Callable[..., Array]) -> list[Any]:
    return [ct if isinstance(ct, ad.Zero) else change(ct, *others), *[None] * len(others)]


@functools.lru_cache(maxsize=1024)
def _mapped(change: Callable[..., Array], axes: tuple[int | None, ...]) -> Callable[..., Array]:
    return jax.vmap(change, in_axes=(0, *axes))


def _batch(
    values: Sequence[Array], dims: Sequence[Any], *, change: Callable[..., Array]
) -> tuple[Array, int]:
    size = next(v.shape[d] for v, d in zip(values, dims, strict=True) if d is not None)
    x, *others = (
        v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(values, dims, strict=True)
    )
    x = jnp.broadcast_to(x, (size, *x.shape)) if dims[0] is None else x
    return with_cotangent(
        x, _mapped(change, tuple(None if d is None else 0 for d in dims[1:])), *others
    ), 0


ad.primitive_jvps[_changed_p] = _jvp
ad.primitive_transposes[_changed_p] = _transpose
batching.primitive_batchers[_changed_p] = _batch

__all__ = ["with_cotangent"]
