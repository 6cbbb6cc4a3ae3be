"""Derivatives, loops and branches inside of ``jax.shard_map``.

There a value's type says over which axes of the mesh it varies (check_vma). JAX lets values of
different types meet in its primitives (``cast_by_jax``), but not at the seams: a cotangent must
vary over what its output varies over, a tangent over what its primal does, the carry of a loop
before a step over what it does after it, and both branches of a cond must agree. Outside of
``shard_map`` the functions here are JAX's own.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

Axes = frozenset[str]
_NOTHING: Axes = frozenset()


def axes(x: Any) -> Axes:
    """The axes of the mesh that a value, or an abstract value, varies over."""
    found = getattr(
        x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x), "manual_axis_type", None
    )
    return _NOTHING if found is None else found.varying


def over(x: Any, wanted: Axes) -> Any:
    """A value that varies over these axes, and over those that it varied over before."""
    missing = wanted - axes(x) if wanted and x.dtype != jax.dtypes.float0 else ()
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def like(x: Any, other: Any) -> Any:
    """A value that varies over the axes of another one, at least."""
    return over(x, axes(other))


def in_shard_map() -> bool:
    """Whether an axis of the mesh is manual here."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def cast_by_jax() -> contextlib.AbstractContextManager[Any]:
    """While entered inside of ``shard_map``, JAX casts operands of different types by itself, also
    with ``jax_auto_pcast=0``: code written for torch has no place to cast them.
    """
    return jax.auto_pcast(True) if in_shard_map() else contextlib.nullcontext()


def in_type(x: Any) -> dict[str, Any]:
    """What ``jax.ShapeDtypeStruct`` takes so that an abstract value varies as x does; nothing
    outside of ``shard_map``.
    """
    if not in_shard_map():
        return {}
    kind = (jax.typeof(x) if isinstance(x, jax.Array) else x).manual_axis_type
    return {
        "sharding": NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec()),
        "manual_axis_type": kind,
    }


def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """``jax.vjp``; the pullback takes cotangents that vary over fewer axes than the outputs."""
    found: Any = jax.vjp(fun, *primals, has_aux=has_aux)  # type: ignore[call-overload]
    wanted = tuple(map(axes, jax.tree.leaves(found[0]))) if in_shard_map() else ()
    if not any(wanted):
        return found
    return found[0], jax.tree_util.Partial(functools.partial(_pulled, wanted), found[1]), *found[2:]


def _pulled(wanted: Sequence[Axes], pull: Callable[..., Any], cotangents: Any) -> Any:
    leaves, tree = jax.tree.flatten(cotangents)
    return pull(jax.tree.unflatten(tree, list(map(over, leaves, wanted))))


def jvp(fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """``jax.jvp``; tangents may vary over fewer axes than the primals."""
    return jax.jvp(
        fun, primals, tuple(map(like, tangents, primals)) if in_shard_map() else tangents
    )


def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """``jax.linearize``; the pushforward takes tangents that vary over fewer
    axes than the primals.
    """
    found: Any = jax.linearize(fun, *primals, has_aux=has_aux)  # type: ignore[call-overload]
    if not in_shard_map():
        return found
    wanted = [axes(p) for p in primals]
    return found[0], jax.tree_util.Partial(functools.partial(_pushed, wanted), found[1]), *found[2:]


def _pushed(wanted: Sequence[Axes], push: Callable[..., Any], *tangents: Any) -> Any:
    return push(*map(over, tangents, wanted))


def no_tangent(x: Any) -> SymbolicZero:
    """The tangent of a result without one (an integer, say) in a rule of a custom_jvp with
    ``symbolic_zeros``.
    """
    return SymbolicZero.from_primal_value(x)


def instantiated(tangent: Any) -> Any:
    """A tangent that a rule with ``symbolic_zeros`` is given, as an array."""
    return jnp.zeros(tangent.shape, tangent.dtype) if isinstance(tangent, SymbolicZero) else tangent


def carried(step: Callable[[Any], Any], carry: Any) -> Any:
    """A carry that varies over what it varies over after a step; step: the carry before -> the
    carry after.
    """
    while in_shard_map():
        after = jax.tree.leaves(jax.eval_shape(step, carry))
        leaves, tree = jax.tree.flatten(carry)
        leaves = [jnp.asarray(x) for x in leaves]
        wider = [like(x, a) for x, a in zip(leaves, after, strict=True)]
        carry = jax.tree.unflatten(tree, wider)
        if all(x is y for x, y in zip(wider, leaves, strict=True)):
            break
    return carry


# jax 0.12 has polynomials in the derivatives of these two, whose coefficients do not vary as the
# argument does
def erf(x: Any) -> Any:
    """``lax.erf``."""
    return _erf(x) if in_shard_map() else lax.erf(x)


def erfc(x: Any) -> Any:
    """``lax.erfc``."""
    return _erfc(x) if in_shard_map() else lax.erfc(x)


_erf, _erfc = jax.custom_jvp(lambda x: lax.erf(x)), jax.custom_jvp(lambda x: lax.erfc(x))
_erf.defjvps(lambda t, out, x: 2 / math.sqrt(math.pi) * jnp.exp(-x * x) * t)
_erfc.defjvps(lambda t, out, x: -2 / math.sqrt(math.pi) * jnp.exp(-x * x) * t)


def scan(step: Callable[..., Any], init: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
    """``lax.scan``."""
    if in_shard_map():
        init = carried(lambda carry: step(carry, jax.tree.map(lambda x: x[0], xs))[0], init)
    return lax.scan(step, init, xs, *args, **kwargs)


def fori_loop(lower: Any, upper: Any, body: Callable[..., Any], init: Any) -> Any:
    """``lax.fori_loop``."""
    return lax.fori_loop(
        lower, upper, body, carried(lambda carry: body(jnp.asarray(lower), carry), init)
    )


def while_loop(test: Callable[..., Any], body: Callable[..., Any], init: Any) -> Any:
    """``lax.while_loop``."""
    return lax.while_loop(test, body, carried(body, init))


def cond(pred: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
    """``lax.cond``."""
    return lax.cond(pred, *_agreeing((yes, no), operands), *operands)


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """``lax.switch``."""
    return lax.switch(index, _agreeing(branches, operands), *operands)


def _agreeing(
    branches: Sequence[Callable[..., Any]], operands: Sequence[Any]
) -> Sequence[Callable[..., Any]]:
    """The branches, with results that vary over what those of any branch do."""
    if not in_shard_map():
        return branches
    found = [
        [axes(x) for x in jax.tree.leaves(jax.eval_shape(branch, *operands))] for branch in branches
    ]
    wanted = [_NOTHING.union(*each) for each in zip(*found, strict=False)]

    def wide(branch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            leaves, tree = jax.tree.flatten(branch(*values))
            return jax.tree.unflatten(tree, [*map(over, leaves, wanted), *leaves[len(wanted) :]])

        return run

    return [wide(branch) for branch in branches]
