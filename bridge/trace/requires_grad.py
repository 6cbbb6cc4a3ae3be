"""Decides whether an output requires grad as in PyTorch, even if its derivative is always zero.

PyTorch's sign(x) requires grad if x does; JAX drops a derivative that is known to be zero. A
program's outputs are checked for a dependence on inputs that require grad; what PyTorch goes back
to and no formula reads is tied to the output by a derivative of zero.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import ad, batching, mlir

from bridge import private_jax
from bridge.trace.levels import Level, answers, around

_stopped_p = Primitive("stopped_by_torch")
_stopped_p.def_impl(lambda value: value)
_stopped_p.def_abstract_eval(lambda value: value)
ad.primitive_jvps[_stopped_p] = lambda primals, _: (
    stopped_by_torch(*primals),
    ad.Zero(jax.typeof(primals[0]).to_tangent_aval()),
)
batching.primitive_batchers[_stopped_p] = lambda values, dims: (stopped_by_torch(*values), *dims)
mlir.register_lowering(_stopped_p, lambda _, value: [value])


def stopped_by_torch(value: jax.Array) -> jax.Array:
    """``lax.stop_gradient`` as an operation of its own, told apart from a lowering's stop_gradient
    in a compiled program.
    """
    stopped = _stopped_p.bind(value)
    if (known := answers()) is not None:
        known.same(stopped, value)
    return stopped


def stopped_integers(out: Any) -> Any:
    """In a program: the outputs of an operator; torch's autograd does not go back through those
    that are integers or booleans.

    Masks inside of a lowering are not stopped: PyTorch's derivative of relu goes back to its input,
    which JAX's derivative only compares.
    """
    return jax.tree_util.tree_map(
        lambda v: stopped_by_torch(v) if isinstance(v, jax.core.Tracer) and not _inexact(v) else v,
        out,
    )


def stopped_outside(value: jax.Array) -> jax.Array:
    """In a program that is being traced: the value, which stops torch's autograd; transforms inside
    keep its tangents.
    """
    times = private_jax.differentiations(value)
    return (
        private_jax.at_level(value, times - 1, _both_stopped) if times else stopped_by_torch(value)
    )


def _both_stopped(value: jax.Array, tangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return stopped_by_torch(value), stopped_by_torch(tangent)


def depends(value: jax.Array) -> bool:
    """Whether JAX differentiates the array at any level."""
    return private_jax.compiled_later([value]) and bool(jnp.issubdtype(value.dtype, jnp.inexact))


def tie(out: Any, values: Any) -> Any:
    """The outputs of a backward operator, tied to its inputs; a missing derivative becomes zero.

    In PyTorch, its result depends on the operands of the forward operator even if the formula does
    not read them, as that of a pooling.
    """
    inputs = [
        v
        for v in jax.tree_util.tree_leaves(values)
        if isinstance(v, jax.core.Tracer) and _inexact(v)
    ]
    return (
        jax.tree_util.tree_map(lambda v: _tied(v, inputs) if _inexact(v) else v, out)
        if inputs
        else out
    )


def tie_strictly(out: Any, values: Any, no_grad: Sequence[int]) -> Any:
    """The same for forward mode inside jvp with strict=True, which asks whether an output depends
    on the primals.
    """
    for level in around():
        if level.strict:
            out = _tied_strictly(out, values, no_grad, level)
    return out


def _tied_strictly(out: Any, values: Any, no_grad: Sequence[int], level: Level) -> Any:
    def constant(v: Any) -> bool:
        return _inexact(v) and not private_jax.in_trace(level.probe, [v])

    linked = [v for v in jax.tree_util.tree_leaves(values) if _inexact(v) and not constant(v)]
    if not linked:
        return out
    if isinstance(out, tuple | list):
        return type(out)(
            _tied(v, linked) if i not in no_grad and constant(v) else v for i, v in enumerate(out)
        )
    return _tied(out, linked) if not no_grad and constant(out) else out


def tie_tangents(
    tangents: Sequence[jax.Array], primals: Sequence[jax.Array], requires_grad: Sequence[bool]
) -> list[jax.Array]:
    """The tangents of jvp's primals: in PyTorch, what is computed from one requires grad if its
    primal does.
    """
    return [
        _tied(t, [p]) if r and depends(p) and _inexact(t) else t
        for t, p, r in zip(tangents, primals, requires_grad, strict=True)
    ]


def inputs_of(fn: Callable[[Any], list[jax.Array]], values: list[jax.Array]) -> list[int]:
    """For each output of fn, the values that its computation reads, as bits of a number."""
    jaxpr = jax.make_jaxpr(fn)([jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]).jaxpr
    return flow(jaxpr, [1 << i for i in range(len(values))], True)


def tie_each(
    outs: list[jax.Array], values: list[jax.Array], read: Sequence[int]
) -> list[jax.Array]:
    """Gradients tied to the values that ``read`` gives for each: relu's reads the sign of its
    input, and has zeros for a derivative.
    """
    linked = [[v for i, v in enumerate(values) if bits & 1 << i and depends(v)] for bits in read]
    return [
        v if depends(v) or not inputs else _tied(v, inputs)
        for v, inputs in zip(outs, linked, strict=True)
    ]


def _inexact(v: Any) -> bool:
    return isinstance(v, jax.Array) and bool(jnp.issubdtype(v.dtype, jnp.inexact))


def _tied(value: jax.Array, inputs: Sequence[jax.Array]) -> jax.Array:
    # No custom_jvp: its derivative would be mapped where the inputs are and its value not, which
    # JAX's batching takes for one and the same. An empty sum is 0 and still depends on x, so the
    # output depends on x. It is subtracted: -0.0 - 0.0 is -0.0.
    zero = sum(jnp.sum(jnp.real(x).reshape(-1)[:0]).astype(value.dtype) for x in inputs)
    return value - jnp.broadcast_to(zero, value.shape)


def flow(jaxpr: Any, given: Sequence[int], behind: bool) -> list[int]:
    """For each output of a jaxpr, the given bits of the inputs that it depends on; behind: see
    ``bridge.jit.program.Program``.
    """
    found = dict(zip(jaxpr.invars, given, strict=True))

    def sources(variables: Sequence[Any]) -> list[int]:
        return [0 if isinstance(v, Literal) else found.get(v, 0) for v in variables]

    for eqn in jaxpr.eqns:
        if eqn.primitive is _stopped_p:
            continue
        inputs = sources(eqn.invars)
        every = functools.reduce(operator.or_, inputs, 0)
        if (inner := _followed(eqn)) is not None:
            flows = flow(inner, inputs, behind)
            # for an empty array, JAX drops operands that PyTorch goes back to
            flows = [
                bits if v.aval.size else every for v, bits in zip(eqn.outvars, flows, strict=True)
            ]
        elif eqn.primitive.name == "scan":
            flows = _scanned(eqn, inputs, behind)
        elif eqn.params.get("name") == "of_inputs_alone" and not behind:
            flows = [functools.reduce(operator.or_, inputs[len(eqn.outvars) :], 0)] * len(
                eqn.outvars
            )
        else:
            flows = [every] * len(eqn.outvars)
        found.update(zip(eqn.outvars, flows, strict=True))
    return sources(jaxpr.outvars)


#: Primitives whose result holds the same numbers as their operand, or some of them, as a view does.
_MOVING = frozenset(
    {lax.broadcast_in_dim_p, lax.reshape_p, lax.slice_p, lax.squeeze_p, lax.transpose_p}
)


def moved(jaxpr: Jaxpr, given: Sequence[int | None]) -> list[int | None]:
    """For each output of a jaxpr, the given input that it holds, perhaps in another shape or a part
    of it; None: it is computed.
    """
    found = dict(zip(jaxpr.invars, given, strict=True))

    def inputs(variables: Sequence[Any]) -> list[int | None]:
        return [None if isinstance(v, Literal) else found.get(v) for v in variables]

    for eqn in jaxpr.eqns:
        if eqn.primitive in _MOVING:
            found[eqn.outvars[0]] = inputs(eqn.invars)[0]
        elif (inner := _followed(eqn)) is not None:
            found.update(zip(eqn.outvars, moved(inner, inputs(eqn.invars)), strict=True))
    return inputs(jaxpr.outvars)


def _scanned(eqn: JaxprEqn, given: list[int], behind: bool) -> list[int]:
    """``flow`` of a loop, whose carry may take several steps to depend on an input."""
    jaxpr, consts, carried = private_jax.scanned(eqn)
    while True:
        outs = flow(jaxpr, given, behind)
        carry = [a | b for a, b in zip(given[consts : consts + carried], outs, strict=False)]
        if carry == given[consts : consts + carried]:
            return outs
        given = [*given[:consts], *carry, *given[consts + carried :]]


def _followed(eqn: JaxprEqn) -> Jaxpr | None:
    """The jaxpr inside a checkpoint, a jitted function or the outputs of an autograd.Function; None
    for other equations.

    JAX 0.12 keeps the calls of jitted functions in a derivative; earlier versions inline them.
    """
    name, inside = private_jax.called(eqn)
    inside = getattr(inside, "jaxpr", inside)  # it may be closed
    followed = (
        name == "checkpoint"
        or (name == "jit" and eqn.params["name"] != "of_inputs_alone")
        or (
            name == "custom_jvp_call"
            and [e.params.get("name") for e in inside.eqns] == ["of_inputs_alone"]
        )
    )
    return inside if followed else None
