"""Makes captured tensors inputs of the derivative of a whole call, at the moment when its function meets them.

``jax.vjp`` takes its inputs before the function runs, but which tensors a function captures shows only while it runs: from an iterator or
a pool it takes others each time.  So the derivative has one input more, a token.  The value of a captured tensor is computed from the
token by an operation whose tangent is not the token's, but a new one, and whose cotangent ends here: ``pulled`` gives it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad

from bridge import private_jax
from bridge.process import having
from bridge.trace.levels import Level, state

_value_p = Primitive("captured_tensor")
_value_p.def_impl(lambda token, value, number: value)
_value_p.def_abstract_eval(lambda token, value, number: value)
_tangent_p = Primitive("tangent_of_captured_tensor")
_tangent_p.def_abstract_eval(lambda token, aval, number: aval)


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], number: int) -> tuple[Any, Any]:
    """The value of a captured tensor depends on nothing but the token."""
    out, aval = _value_p.bind(*primals, number=number), jax.typeof(primals[1]).to_tangent_aval()
    return out, ad.Zero(aval) if type(tangents[0]) is ad.Zero else _tangent_p.bind(tangents[0], aval=aval, number=number)


def _transposed(cotangent: Any, token: Any, aval: Any, number: int) -> list[Any]:
    if type(cotangent) is not ad.Zero:
        state.cotangents[number] = cotangent
    return [ad.Zero(token.aval)]


ad.primitive_jvps[_value_p] = _differentiated
ad.primitive_transposes[_tangent_p] = _transposed


def token() -> jax.Array:
    return jnp.zeros((), jnp.float32)


def met(root: Level, t: torch.Tensor, value: jax.Array) -> jax.Array:
    """The value of a captured tensor, as a further input of the derivative to which ``root.token`` belongs."""
    root.late_inputs.append(t)
    return private_jax.bound_outside([root.token, value], _value_p, {"number": len(root.late_inputs) - 1})


def pulled(pull: Callable[..., Any], cotangents: Any, late: Sequence[torch.Tensor], like: Callable[[torch.Tensor], Any]) -> list[Any]:
    """What the pullback gives for its inputs but the token, which comes first, and then for these tensors, all that were met.

    like: gives the zeros for a tensor to which no cotangent comes.
    """
    with having(state, cotangents={}):
        grads = list(pull(cotangents))[1:]
        return grads + [state.cotangents[k] if k in state.cotangents else like(t) for k, t in enumerate(late)]


def opened(jaxpr: Jaxpr) -> tuple[Jaxpr, list[int]]:
    """The linear program of a pullback with the tangents of captured tensors as its last inputs; the numbers of those tensors."""
    late = {eqn.params["number"]: eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive is _tangent_p}
    rest = [eqn for eqn in jaxpr.eqns if eqn.primitive is not _tangent_p]
    names = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(invars=[*jaxpr.invars, *late.values()], eqns=rest, debug_info=names), list(late)
