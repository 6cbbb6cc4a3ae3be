"""Rewrites products and sums of a program into forms that XLA computes faster, or with smaller
rounding errors.

JAX writes the gradient of a weight as an outer product and a transpose. If dimensions of lanes and
Jacobian rows come before it, XLA stores the product in the order of its computation and copies it
into the order of the result, which takes a sixth of a small program's time.

On CPUs a few rows times a transposed weight, as in each ``nn.Linear``, take XLA longer than the
weight times the transposed rows: up to 19 times if it computes them itself, and twice if it hands
them to YNNPACK. XLA turns the fast form into the slow one by itself, and
``lax.optimization_barrier`` keeps it from that.

Rows that all lanes of a vmap share, times a weight of each, are one product, in which the lanes lie
between the rows and what the weights give: [rows, lanes, out]. JAX transposes it at once into
[lanes, rows, out], but on CPUs XLA carries the first order through the operators that follow, up to
the next product, and in the backward pass, and reads memory in strides in each of them. A barrier
behind the transpose keeps it where it is.

The gradient of a weight that a loop uses in each step is a sum of products, to which JAX adds one
in each step. One product after the loop, of all steps' operands, reads and writes the weight's size
once.

On CPUs XLA computes a sum over several dimensions as one loop in a loop, which adds one number
after the other. Of a million squares it loses 0.3 %. A sum over the last dimension, then over the
one before it, and so on, loses a ten-millionth, and takes half the time. XLA makes one sum of these
by itself, and a barrier between them keeps it from that.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, subjaxprs

from bridge import private_jax

_SMALL = 2**14  # elements of a weight: below it both forms take the same time
_FEW = 2**9  # numbers that are added up one after the other: below it the rounding errors are small


def in_order(jaxpr: Any) -> Any:
    """The jaxpr, in which each outer product that is only transposed becomes a product of
    broadcasts, in the transposed order.

    Values are the same to the bit, because an outer product sums nothing.
    """
    read = itertools.chain(*[e.invars for e in jaxpr.eqns], jaxpr.outvars)
    uses = collections.Counter(v for v in read if not isinstance(v, Literal))
    # by the last variable: the product, its order, the equations between
    chains: dict[Any, tuple[Any, tuple[int, ...], list[int]]] = {}
    for i, e in enumerate(jaxpr.eqns):
        if e.primitive is lax.dot_general_p and _outer(e):
            chains[e.outvars[0]] = e, tuple(range(e.outvars[0].aval.ndim)), [i]
        elif e.primitive is lax.transpose_p and uses[e.invars[0]] == 1 and e.invars[0] in chains:
            product, order, way = chains.pop(e.invars[0])
            chains[e.outvars[0]] = (
                product,
                tuple(order[k] for k in e.params["permutation"]),
                [*way, i],
            )
    eqns: list[list[Any]] = [[e] for e in jaxpr.eqns]
    for out, (product, order, way) in chains.items():
        if order != tuple(range(len(order))):
            for i in way:
                eqns[i] = []
            eqns[way[-1]] = _written(product, order, out)
    return jaxpr.replace(eqns=list(itertools.chain(*eqns)))


def _outer(e: Any) -> bool:
    (left, right), _ = e.params["dimension_numbers"]
    a, b = (v.aval for v in e.invars)
    return (
        not left
        and not right
        and a.dtype == b.dtype == e.outvars[0].aval.dtype
        and a.size > 1 < b.size
    )


def _written(e: Any, order: tuple[int, ...], out: Any) -> list[Any]:
    """Equations that compute the product e, transposed into the given order,
    into the variable out.
    """
    _, (batch_a, batch_b) = e.params["dimension_numbers"]
    shape = tuple(np.take(e.outvars[0].aval.shape, order).tolist())

    def spread(x: jax.Array, batch: tuple[int, ...], first: int) -> jax.Array:
        free = [d for d in range(x.ndim) if d not in batch]
        at = {d: order.index(k) for k, d in enumerate(batch)} | {
            d: order.index(first + k) for k, d in enumerate(free)
        }
        dims = sorted(at, key=at.__getitem__)
        return lax.broadcast_in_dim(lax.transpose(x, dims), shape, [at[d] for d in dims])

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.mul(spread(a, batch_a, len(batch_a)), spread(b, batch_b, a.ndim))

    return equations(product, e.invars, [out])


def rearranged(jaxpr: Any, cpu: bool, final: bool = True) -> Any:
    """The jaxpr, also inside of its loops and calls, with each product of a weight written as XLA
    computes it fastest.

    A weight that is repeated for each matrix of a batch, as PyTorch expands it, is multiplied once
    with all of their rows. On a CPU, few rows times a transposed weight, ``x @ w.T`` with x of
    shape [S, K] and w of shape [L, K], become ``(w @ x.T).T`` if 4 S <= K, lanes that a transpose
    puts before the rows of a product stay there, and a long sum over several dimensions becomes one
    of each.

    Args:
        jaxpr: the jaxpr; it is returned itself if there is nothing to change.
        cpu: whether a CPU runs it.
        final: whether nobody differentiates it any more.
    """
    # of a transposed or repeated variable: the original, and its dimensions
    sources: dict[Any, tuple[Any, tuple[int | None, ...]]] = {}
    eqns = []
    products: dict[Any, Any] = {}  # by the result
    given = jaxpr.eqns
    if final:
        given = [q for e in given for q in (_summed_after(e) or [e])]
    for e in given:
        if (view := _view(e, final)) is not None and isinstance(e.invars[0], Var):
            source, dims = sources.get(e.invars[0], _itself(e.invars[0]))
            sources[e.outvars[0]] = source, tuple([None if d is None else dims[d] for d in view])
        if (
            e.primitive is lax.dot_general_p
            and (written := _rearranged(e, sources, cpu and final)) is not None
        ):
            eqns.extend(written)
        elif cpu and final and e.primitive is lax.transpose_p and _puts_lanes_first(e, products):
            eqns.extend(_held(e))
        elif (
            cpu
            and final
            and e.primitive is lax.reduce_sum_p
            and _long(e.invars[0].aval, e.params["axes"])
        ):
            eqns.extend(_dimension_by_dimension(e))
        else:
            if e.primitive is lax.dot_general_p:
                products[e.outvars[0]] = e
            inner = {k: _inside(v, cpu, final) for k, v in e.params.items() if _is_program(v)}
            eqns.append(
                e.replace(params=e.params | inner)
                if any(inner[k] is not e.params[k] for k in inner)
                else e
            )
    return (
        jaxpr
        if all(map(operator.is_, eqns, jaxpr.eqns)) and len(eqns) == len(jaxpr.eqns)
        else jaxpr.replace(eqns=eqns)
    )


def rearranging(function: Callable[..., Any], program: Any = None) -> Callable[..., Any]:
    """A new function like this one, whose own jaxpr is ``rearranged``; it is to be jitted, and not
    differentiated.

    Args:
        function: any function of pytrees of arrays.
        program: a jaxpr which it, or its derivative, is a part of: if nothing in it can be
            rearranged, the function is left as it is.
    """
    if (
        program is not None
        and not _rearranged_back(program)
        and rearranged(program, on_cpu()) is program
    ):
        return lambda *args: function(*args)

    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
        jaxpr = rearranged(closed.jaxpr, on_cpu())
        return jax.tree.unflatten(
            jax.tree.structure(out),
            jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args)),
        )

    return run


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _rearranged_back(jaxpr: Any) -> bool:
    """Whether the derivative of a program may have something to rearrange, even if the program has
    not: of loops and repeated values.
    """
    if any(e.primitive is lax.scan_p or (on_cpu() and _repeats(e)) for e in jaxpr.eqns):
        return True
    return any(map(_rearranged_back, subjaxprs(jaxpr)))


def _repeats(e: Any) -> bool:
    """Whether an operation may repeat values so often that its transpose is a long sum."""
    size = max([getattr(v.aval, "size", 0) for v in e.outvars], default=0)
    return any(size > _FEW * getattr(v.aval, "size", size) for v in e.invars if isinstance(v, Var))


def _itself(v: Any) -> tuple[Any, tuple[int | None, ...]]:
    return v, tuple(range(v.aval.ndim))


def _is_program(param: Any) -> bool:
    return isinstance(param, Jaxpr | ClosedJaxpr) or (
        isinstance(param, tuple) and len(param) > 0 and all(map(_is_program, param))
    )


def _inside(param: Any, cpu: bool, final: bool) -> Any:
    if isinstance(param, tuple):
        inner = tuple([_inside(p, cpu, final) for p in param])
        return param if all(map(operator.is_, inner, param)) else inner
    if isinstance(param, Jaxpr):
        return rearranged(param, cpu, final)
    inner = rearranged(param.jaxpr, cpu, final)
    return param if inner is param.jaxpr else param.replace(jaxpr=inner)


def _view(e: Any, final: bool) -> Sequence[int | None] | None:
    """For each dimension of the result, the operand's dimension that it is, or None if it repeats;
    None if the result is no such view.
    """
    if e.primitive is lax.transpose_p:
        return e.params["permutation"]
    if e.primitive is lax.broadcast_in_dim_p and len(e.invars) == 1:
        (v,), shape, dims = e.invars, e.params["shape"], e.params["broadcast_dimensions"]
        return [
            dims.index(d) if d in dims and v.aval.shape[dims.index(d)] == n else None
            for d, n in enumerate(shape)
        ]
    same_shape = e.primitive is lax.reshape_p and e.outvars[0].aval.shape == e.invars[0].aval.shape
    if same_shape or (final and e.primitive.name == "stopped_by_torch"):
        return range(e.outvars[0].aval.ndim)
    return None


def _rearranged(e: Any, sources: dict[Any, Any], cpu: bool) -> list[Any] | None:
    """The equations of a product of a weight; None if they are the product itself."""
    contracted, batched = e.params["dimension_numbers"]
    free = [
        [d for d in range(v.aval.ndim) if d not in (*c, *b)]
        for v, c, b in zip(e.invars, contracted, batched, strict=True)
    ]
    rows = [
        math.prod([v.aval.shape[d] for d in dims]) for v, dims in zip(e.invars, free, strict=True)
    ]
    w = int(rows[1] >= rows[0])  # which operand is the weight
    out, v, x = e.outvars[0].aval, e.invars[w], e.invars[1 - w]
    if (
        not isinstance(v, Var)
        or len(contracted[w]) != 1
        or not jnp.issubdtype(out.dtype, jnp.floating)
        or not out.sharding.mesh.empty
    ):
        return None
    source, dims = sources.get(v, _itself(v))
    repeated = [k for k, d in enumerate(batched[w]) if dims[d] is None]
    if sorted(d for d in dims if d is not None) != [*range(source.aval.ndim)] or len(
        repeated
    ) != sum(d is None for d in dims):
        return None
    length = x.aval.shape[contracted[1 - w][0]]
    few = 4 * rows[1 - w] * math.prod([x.aval.shape[batched[1 - w][k]] for k in repeated]) <= length
    first = (
        cpu
        and few
        and rows[w] * length >= _SMALL
        and dims[contracted[w][0]] == source.aval.ndim - 1
    )
    if not first and not repeated:
        return None
    kept = [k for k in range(len(batched[w])) if k not in repeated]
    # the result's
    names: list[Any] = [
        *[("batch", k) for k in range(len(batched[w]))],
        *[(i, d) for i in (0, 1) for d in free[i]],
    ]
    of_x: dict[Any, Any] = {d: ("batch", k) for k, d in enumerate(batched[1 - w])} | {
        d: (1 - w, d) for d in free[1 - w]
    }
    of_w = {dims[d]: (w, d) for d in free[w]}
    # the operand, what is contracted, what is batched, the names of all other dimensions
    both: list[Any] = [
        (source, dims[contracted[w][0]], [dims[batched[w][k]] for k in kept], of_w),
        (x, contracted[1 - w][0], [batched[1 - w][k] for k in kept], of_x),
    ]
    both = both if first else both[::-1]
    found = [("batch", k) for k in kept] + [
        of[d] for _, c, b, of in both for d in sorted(of) if d != c and d not in b
    ]
    numbers = tuple([(c,) for _, c, _, _ in both]), tuple([tuple(b) for _, _, b, _ in both])

    def product(*operands: jax.Array) -> jax.Array:
        out = lax.dot_general_p.bind(*operands, **e.params | {"dimension_numbers": numbers})
        return lax.transpose(
            lax.optimization_barrier(out) if first else out, [found.index(name) for name in names]
        )

    return equations(product, [operand for operand, *_ in both], [e.outvars[0]])


def _puts_lanes_first(e: Any, products: Mapping[Any, Any]) -> bool:
    """Whether a transpose puts lanes of the second operand of a product, which the first has not,
    before the first one's rows.
    """
    product, order = products.get(e.invars[0]), e.params["permutation"]
    if (
        product is None
        or product.params["dimension_numbers"][1][0]
        or not e.outvars[0].aval.sharding.mesh.empty
    ):
        return False
    rows = product.invars[0].aval.ndim - len(product.params["dimension_numbers"][0][0])
    return (
        rows > 0
        and e.outvars[0].aval.size >= _SMALL
        and rows <= order[0] < order[-1] == len(order) - 1
    )


def _held(e: Any) -> list[Any]:
    """The equations of a transpose that XLA leaves where it is."""
    return equations(
        lambda x: lax.optimization_barrier(lax.transpose(x, e.params["permutation"])),
        e.invars,
        e.outvars,
    )


def _long(summed: Any, axes: Sequence[int]) -> bool:
    """Whether a sum over these axes, which ascend, is one of many numbers over several dimensions,
    of which the last one is one.
    """
    if (
        len(axes) < 2
        or axes[-1] != summed.ndim - 1
        or not jnp.issubdtype(summed.dtype, jnp.inexact)
        or not summed.sharding.mesh.empty
    ):
        return False
    sizes = [summed.shape[d] for d in axes]
    return _FEW < math.prod(sizes) > max(sizes)


def _dimension_by_dimension(e: Any) -> list[Any]:
    """The equations of a sum that XLA computes one dimension after the other,
    the last one first.
    """
    first, *others = reversed(e.params["axes"])

    def summed(x: jax.Array) -> jax.Array:
        x = lax.reduce_sum(x, (first,))
        for d in others:
            x = lax.reduce_sum(lax.optimization_barrier(x), (d,))
        return x

    return equations(summed, e.invars, e.outvars)


def _summed_after(e: Any) -> list[Any] | None:
    """The equations of a loop that adds a product to a sum in each step, with one product after it;
    None if it adds none.
    """
    if e.primitive is not lax.scan_p:
        return None
    step, n, m = private_jax.scanned(e)
    uses = collections.Counter(
        v
        for v in itertools.chain(*[q.invars for q in step.eqns], step.outvars)
        if not isinstance(v, Literal)
    )
    made = {v: q for q in step.eqns for v in q.outvars}
    # by the place of the carried sum: the product, and what transposes it
    sums: dict[int, tuple[Any, list[tuple[int, ...]]]] = {}
    gone = set()

    def computed(v: Any) -> bool:
        """Whether the step computes the value, and reads it once."""
        return not isinstance(v, Literal) and v in made and uses[v] == 1

    for k in range(m):
        total, last = step.invars[n + k], step.outvars[k]
        if not computed(last) or uses[total] != 1:
            continue
        add = made[last]
        if add.primitive.name not in ("add", "add_any") or not any(v is total for v in add.invars):
            continue
        (v,) = [v for v in add.invars if v is not total] or [total]
        way, turns = [add], list[tuple[int, ...]]()
        while computed(v) and made[v].primitive is lax.transpose_p:
            way.append(made[v])
            turns.insert(0, made[v].params["permutation"])
            v = made[v].invars[0]
        if (
            computed(v)
            and made[v].primitive is lax.dot_general_p
            and _is_larger(v, made[v].invars, step.invars[:n])
        ):
            sums[k] = made[v], turns
            gone |= set(map(id, [*way, made[v]]))
    if not sums:
        return None
    xs = {v: k for k, v in enumerate(step.invars[n + m :])}
    more = list(
        dict.fromkeys([v for product, _ in sums.values() for v in product.invars if v not in xs])
    )
    carried = [k for k in range(m) if k not in sums]
    small = step.replace(
        invars=[*step.invars[:n], *[step.invars[n + k] for k in carried], *step.invars[n + m :]],
        outvars=[*[step.outvars[k] for k in carried], *step.outvars[m:], *more],
        eqns=[q for q in step.eqns if id(q) not in gone],
        debug_info=step.debug_info._replace(arg_names=None, result_paths=None),
    )

    def loop(*operands: jax.Array) -> list[jax.Array]:
        first, each = operands[n : n + m], operands[n + m :]

        def run(
            carry: list[jax.Array], x: list[jax.Array]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            outs = jax.core.eval_jaxpr(
                small, getattr(e.params["jaxpr"], "consts", ()), *operands[:n], *carry, *x
            )
            return outs[: len(carry)], outs[len(carry) :]

        settings = {name: e.params[name] for name in ("length", "reverse", "unroll")}
        last, outs = lax.scan(run, [first[k] for k in carried], list(each), **settings)
        stacked = dict(zip(more, outs[len(outs) - len(more) :], strict=True)) | {
            v: each[k] for v, k in xs.items()
        }
        found = dict(zip(carried, last, strict=True))
        for k, (product, turns) in sums.items():
            summed, batched = [
                [tuple([d + 1 for d in dims]) for dims in both]
                for both in product.params["dimension_numbers"]
            ]
            numbers = tuple([(0, *dims) for dims in summed]), tuple(batched)
            value = lax.dot_general_p.bind(
                *[stacked[v] for v in product.invars],
                **product.params | {"dimension_numbers": numbers},
            )
            found[k] = first[k] + functools.reduce(lax.transpose, turns, value)
        return [*[found[k] for k in range(m)], *outs[: len(outs) - len(more)]]

    return equations(loop, e.invars, e.outvars)


def _is_larger(product: Any, operands: Sequence[Any], consts: Sequence[Any]) -> bool:
    """Whether a product has more elements than its operands, of which none is the same in each
    step.
    """
    if (
        any(isinstance(v, Literal) or v in consts for v in operands)
        or not product.aval.sharding.mesh.empty
    ):
        return False
    return product.aval.size >= sum(v.aval.size for v in operands)


def equations(
    function: Callable[..., Any], operands: Sequence[Any], outs: Sequence[Any]
) -> list[Any]:
    """Equations that compute the function of these variables and constants
    into the variables outs.
    """
    avals = [v.aval for v in operands]
    small = jax.make_jaxpr(function)(*avals).jaxpr
    own = {v for v in small.outvars if not isinstance(v, Literal)} - {*small.invars}
    if len(own) < len(small.outvars):  # a result is an operand, or two results are one
        copied = lambda *xs: [lax.copy_p.bind(y) for y in jax.tree.leaves(function(*xs))]
        small = jax.make_jaxpr(copied)(*avals).jaxpr
    known = dict(zip(small.invars, operands, strict=True)) | dict(
        zip(small.outvars, outs, strict=True)
    )
    return [
        q.replace(
            invars=[v if isinstance(v, Literal) else known.get(v, v) for v in q.invars],
            outvars=[known.get(v, v) for v in q.outvars],
        )
        for q in small.eqns
    ]
