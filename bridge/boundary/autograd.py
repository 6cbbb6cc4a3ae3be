"""torch's autograd through a JAX computation: outputs at the border support backward and double
backward.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import torch
from jax.extend.core import jaxpr_as_fun

from bridge import private, private_jax
from bridge.boundary.results import Computation, Result, conj, inexact_dtype, pick
from bridge.convert import tensors
from bridge.lowering.common import varying
from bridge.trace import tracing
from bridge.trace.requires_grad import flow
from bridge.trace.storage import Node

#: The type of ``calls.apply``, which runs a computation on torch tensors. ``calls`` imports this
#: file and passes it in.
Apply = Callable[[Computation, Sequence[Any]], tuple[list[Any], Any]]


class Untransformed(torch.autograd.Function):
    """A node of our own in torch's graph; its forward is never replaced, even while a trace is
    open.
    """


def by_lane(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorator of a node's backward, which then runs once for each lane of cotangents that
    torch.autograd or torch.func.vmap maps.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        given = [(k, c) for k, c in enumerate(cotangents) if c is not None]
        lanes, below = (
            [k for k, c in given if private.mapped_by_autograd(c)],
            private.below_autograds_vmap,
        )
        if not lanes:
            lanes, below = [k for k, c in given if private.is_mapped(c)], private.below_vmap
        if not lanes:
            return backward(ctx, *cotangents)
        present: list[bool] = []

        def mapped(stacked: list[torch.Tensor]) -> list[torch.Tensor]:
            rows = [
                dict(zip(lanes, row, strict=True))
                for row in zip(*[t.unbind(0) for t in stacked], strict=True)
            ]
            found = [run(ctx, *[row.get(k, c) for k, c in enumerate(cotangents)]) for row in rows]
            present[:] = [grad is not None for grad in found[0]]
            return [torch.stack(grads) for grads in pick([*zip(*found, strict=True)], present)]

        grads = iter(below(mapped, pick(cotangents, [k in lanes for k in range(len(cotangents))])))
        return tuple([next(grads) if here else None for here in present])

    return run


class _Computed(Untransformed):
    @staticmethod
    def forward(ctx: Any, t: tracing.Traced) -> tracing.Traced:
        return tracing.over(t.node, t)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return cotangent


def computed(t: tracing.Traced) -> torch.Tensor:
    """The same traced tensor on the same memory, but not a leaf of torch's graph."""
    return _Computed.apply(t)


def returned(
    ctx: Any,
    outs: Sequence[Any],
    rest: Sequence[Any],
    kinds: Sequence[bool],
    device: torch.device | None,
    avoid: set[int | None],
) -> tuple[torch.Tensor, ...]:
    """The tensors that a node returns, of the values with derivatives, and of the rest; kinds:
    which of them have derivatives.
    """
    floats, others = iter(outs), iter(rest)
    results = [
        tensors.to_torch(next(floats) if kind else next(others), device, avoid) for kind in kinds
    ]
    ctx.mark_non_differentiable(*pick(results, [not kind for kind in kinds]))
    ctx.set_materialize_grads(False)
    ctx.like = [(t.shape, t.dtype, t.device) for t in pick(results, kinds)]
    return tuple(results)


def materialized(
    cotangents: Sequence[torch.Tensor | None],
    like: Sequence[tuple[Sequence[int], torch.dtype, torch.device]],
) -> list[torch.Tensor]:
    """The cotangents, with zeros for those that PyTorch leaves out; like: the shape, dtype and
    device of each.
    """
    return [
        torch.zeros(shape, dtype=dtype, device=device) if c is None else c
        for c, (shape, dtype, device) in zip(cotangents, like, strict=True)
    ]


def versions(leaves: Sequence[Any]) -> list[tuple[torch.Tensor, int]]:
    """The torch tensors among the leaves, each with the number of writes to it so far."""
    return [(t, t._version) for t in leaves if isinstance(t, torch.Tensor) and not t.is_inference()]


def kept_by(held: set[int | None], leaves: Sequence[Any]) -> list[tuple[torch.Tensor, int]]:
    """``versions`` of the tensors whose memory a pullback reads; held: its ``addresses``."""
    return versions([t for t in leaves if isinstance(t, torch.Tensor) and t.data_ptr() in held])


def check_unchanged(before: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Raise RuntimeError, in torch's words, if one of the tensors was written to since."""
    for t, version in before:
        if t._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{t.type()} {list(t.shape)}] is at version {t._version}; "
                f"expected version {version} instead."
            )


def addresses(arrays: Any) -> set[int | None]:
    """The addresses, in this process's memory, of the arrays in a tree, such as those that a
    pullback reads.
    """
    return {tensors.address(a) for a in jax.tree_util.tree_leaves(arrays)}


# -- torch's autograd inside a trace ---------------------------------------------------------------
def attached(
    apply: Apply,
    outs: list[Any],
    compute: Computation,
    leaves: Sequence[Any],
    values: Sequence[Any],
    draw_again: Callable[[], contextlib.AbstractContextManager[None]],
) -> list[Any]:
    """A transform's outputs inside a trace, connected in torch's graph to the inputs and captured
    tensors that require grad; values: what compute has been given for the leaves. draw_again: in
    it, compute draws the random numbers of the outputs.

    Code that calls ``torch.autograd.grad`` inside a transformed function needs this: its graph must
    not end at an inner transform.
    """
    level = tracing.state.level
    found = {id(x): x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad}
    # tensors of enclosing levels stay there, because that level's result depends on them too
    taken = {id(x): v for x, v in zip(leaves, values, strict=True) if id(x) not in level.outer}
    found.update(level.outer)
    level.outer = {
        key: t for key, t in level.outer.items() if tracing.node_of(t).level is not level
    }
    if not found or not torch.is_grad_enabled() or not any(inexact_dtype(t.dtype) for t in outs):
        return outs
    return list(_Attached.apply(apply, outs, compute, leaves, taken, draw_again, *found.values()))


class _Attached(Untransformed):
    """An inner transform as one node of the graph that torch's autograd builds inside a trace."""

    @staticmethod
    @private.opaque
    def forward(
        ctx: Any,
        apply: Apply,
        outs: list[Any],
        compute: Computation,
        leaves: Sequence[Any],
        taken: Mapping[int, Any],
        draw_again: Callable[[], contextlib.AbstractContextManager[None]],
        *watched: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.again, ctx.compute, ctx.leaves, ctx.draw_again, ctx.kinds = (
            apply,
            compute,
            leaves,
            draw_again,
            [inexact_dtype(t.dtype) for t in outs],
        )
        # as they are now: later, the function may have changed what the transform has read; a view
        # that it has captured is computed anew at each use
        whole = all(id(t) in taken or tracing.node_of(t).parent is None for t in watched)
        ctx.values = whole and (
            [tracing.value_of(t) for t in outs],
            [taken[id(t)] if id(t) in taken else tracing.value_of(t) for t in watched],
        )
        ctx.save_for_backward(*watched)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*pick(outs, [not kind for kind in ctx.kinds]))
        return tuple(outs)

    @staticmethod
    @private.opaque
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        watched = ctx.saved_tensors
        used = [c is not None for c in cotangents]
        cts = pick(cotangents, used)
        n = len(watched)
        # which of them the outputs depend on: the others have no gradient, and not one of zeros
        needed: list[bool] = []

        def back(values: list[Any]) -> Result:
            def pure(*active: jax.Array) -> list[Any]:
                nodes = [tracing.node_of(t) for t in watched]
                # in a backward pass PyTorch's engine switches grad mode off, and forward mode too
                with (
                    ctx.draw_again(),
                    in_place_of(nodes, active),
                    torch.enable_grad(),
                    private.set_forward_mode_enabled(True),
                ):
                    given = {id(t): v for t, v in zip(watched, active, strict=True)}
                    result = ctx.compute(
                        [
                            given.get(id(x), tracing.value_of(x))
                            if isinstance(x, torch.Tensor)
                            else x
                            for x in ctx.leaves
                        ]
                    )
                return pick(result.values[: len(used)], used)

            closed = None
            if ctx.values:
                closed = private_jax.computation(pick(ctx.values[0], used), ctx.values[1])
            if closed is None:
                closed = jax.make_jaxpr(pure)(*values[:n])
            if not needed:
                bits = flow(closed.jaxpr, [1 << i for i in range(n)], True)
                every = functools.reduce(operator.or_, bits, 0)
                # in PyTorch, outputs that depend on none of them would not require grad
                needed.extend(not every or bool(every & 1 << i) for i in range(n))
            _, pull = varying.vjp(jaxpr_as_fun(closed), *values[:n])
            return Result([conj(g) for g in pick(pull([conj(c) for c in values[n:]]), needed)])

        found = iter(ctx.again(back, [*watched, *cts])[0])
        grads = [next(found) if here else None for here in needed]
        return (None, None, None, None, None, None, *grads)


@contextlib.contextmanager
def in_place_of(nodes: Sequence[Node], values: Sequence[jax.Array]) -> Iterator[None]:
    """While entered, the nodes have these values, even if their trace has closed."""
    before = [(node, node.value, node.seen, node.level) for node in nodes]
    try:
        for node, v in zip(nodes, values, strict=True):
            node.value, node.seen = v, node.root.version
            if node.level.closed:
                node.level = tracing.state.level
        yield
    finally:
        for node, value, seen, level in before:
            node.value, node.seen, node.level = value, seen, level
