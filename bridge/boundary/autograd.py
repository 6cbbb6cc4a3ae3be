"""torch's autograd through a JAX computation: outputs at the border support backward and double backward."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge import private, private_jax
from bridge.boundary import shared_memory
from bridge.boundary.results import Computation, Result, SharedOutput, conj, inexact, inexact_dtype, pick, replaced
from bridge.convert import tensors
from bridge.errors import rewording
from bridge.lowering.common import varying
from bridge.trace import late_inputs, tracing
from bridge.trace.requires_grad import depends, flow
from bridge.trace.storage import Node
from bridge.trace.torch_numbers import AtOnce

#: The type of ``calls.apply``, which runs a computation on torch tensors.  ``calls`` imports this file and passes it in.
Apply = Callable[[Computation, Sequence[Any]], tuple[list[Any], Any]]


@dataclasses.dataclass(eq=False)
class _Recorded:
    """A computation as a pure function of the tensors that require grad; its other attributes describe its last run."""

    apply: Apply
    compute: Computation
    leaves: Sequence[Any]
    drawn: AtOnce
    known: Sequence[torch.Tensor] = ()  # the captured tensors that are inputs
    kinds: list[bool] | None = None  # which results have derivatives; None: the first run finds out

    def __post_init__(self) -> None:
        leaves = enumerate(self.leaves)
        self.active = [i for i, x in leaves if isinstance(x, torch.Tensor) and x.requires_grad and inexact_dtype(x.dtype)]
        self.inputs = [self.leaves[i] for i in self.active] + list(self.known)

    def first(self, token: jax.Array, *actives: jax.Array) -> tuple[list[Any], list[Any]]:
        """The first run, which makes inputs of the captured tensors that require grad when it meets them."""
        tracing.state.level.root.token = token
        return self(*actives)

    def __call__(self, *actives: jax.Array) -> tuple[list[Any], list[Any]]:
        """Run the computation inside an open trace; returns (values with derivatives, values without)."""
        values = tensors.on_one_device([tensors.to_jax(x) if isinstance(x, torch.Tensor) else x for x in self.leaves])
        values = replaced(values, self.active, actives[: len(self.active)])
        root = tracing.state.level.root
        self.drawn.draws_in(root)
        tracing.forget_captured(root)
        root.captured.clear()
        root.live.clear()
        root.behind.clear()
        root.recorded, root.probe = True, private_jax.trace_of(actives[0] if root.token is None else root.token)
        root.overrides = {id(t): v for t, v in zip(self.known, actives[len(self.active) :], strict=True)}
        # restore the caller's modes: PyTorch switches both off for an autograd.Function's forward
        with rewording(), torch.enable_grad(), private.set_forward_mode_enabled(True):
            result = self.compute(values)
        out = list(result.values)
        self.count = len(out) - len(result.written)
        nodes = {id(node): t for t, node in root.captured.values()}
        targets = [self.leaves[t] if isinstance(t, int) else nodes.get(id(t)) for t, _, _ in result.written]
        detached = [d for _, _, d in result.written]
        for t, node in root.captured.values():  # the transform itself wrote to it
            if node.version and not any(t is x for x in targets):
                targets.append(t)
                detached.append(node.detached)
                out.append(node.value)
        self.meta, self.targets = result.meta, targets
        self.seen = [t for t, _ in root.captured.values()]
        shared_memory.refuse(result, self.leaves, [*root.captured.values()])
        self.shared = shared_memory.outputs(result, self.leaves, root.captured.values())
        self.met = [t for t, _ in root.captured.values() if id(t) in root.live or id(t) in root.behind]
        self.live, self.late = set(root.live), root.late_inputs
        if self.kinds is None:
            # a value that depends on no input, or only through detach() or no_grad, is concrete here and no tracer
            kinds = [depends(v) for v in out[: self.count]]
            kinds += [
                not d and (depends(v) or (t is not None and t.requires_grad))
                for v, t, d in zip(out[self.count :], targets, detached, strict=True)
            ]
            self.kinds = [kind and inexact(v) for kind, v in zip(kinds, out, strict=True)]
        return pick(out, self.kinds), pick(out, [not k for k in self.kinds])

    def reduced(self) -> list[bool]:
        """After the first run, know the captured tensors that it has used; for each of its inputs, whether it is still one."""
        met = set(map(id, self.met))
        kept = [True] * len(self.active) + [id(t) in met for t in self.late]
        self.inputs = pick([*self.inputs, *self.late], kept)
        self.known = self.inputs[len(self.active) :]
        return kept


def differentiable(
    apply: Apply, compute: Computation, leaves: Sequence[Any]
) -> tuple[list[Any], Any, list[tuple[torch.Tensor, torch.Tensor]], list[SharedOutput]]:
    """Run a computation at the border so that torch's autograd can go back through it; the results are those of ``calls.direct``."""
    recorded = _Recorded(apply, compute, leaves, AtOnce())
    with tracing.root():
        found = varying.vjp(recorded.first, late_inputs.token(), *map(tensors.to_jax, recorded.inputs), has_aux=True)
    outs = list(_Border.apply(recorded, found, recorded.reduced(), tensors.common_device(leaves), *recorded.inputs))
    writes = [(t, v) for t, v in zip(recorded.targets, outs[recorded.count :], strict=True) if t is not None]
    return outs[: recorded.count], recorded.meta, writes, recorded.shared


class Untransformed(torch.autograd.Function):
    """A node of our own in torch's graph; its forward is never replaced, even while a trace is open."""


def by_lane(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorator of a node's backward, which then runs once for each lane of cotangents that torch.autograd or torch.func.vmap maps."""

    @functools.wraps(backward)
    def run(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        given = [(k, c) for k, c in enumerate(cotangents) if c is not None]
        lanes, below = [k for k, c in given if private.mapped_by_autograd(c)], private.below_autograds_vmap
        if not lanes:
            lanes, below = [k for k, c in given if private.is_mapped(c)], private.below_vmap
        if not lanes:
            return backward(ctx, *cotangents)
        present: list[bool] = []

        def mapped(stacked: list[torch.Tensor]) -> list[torch.Tensor]:
            rows = [dict(zip(lanes, row, strict=True)) for row in zip(*[t.unbind(0) for t in stacked], strict=True)]
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


class _Border(Untransformed):
    """One JAX computation as one node of torch's graph."""

    @staticmethod
    @private.opaque
    def forward(
        ctx: Any, recorded: _Recorded, found: Any, kept: list[bool], device: torch.device | None, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outs, pull, rest = found
        held, seen = addresses(pull), [t for t in (*recorded.leaves, *recorded.seen) if isinstance(t, torch.Tensor)]
        avoid = held | {t.data_ptr() for t in seen}
        ctx.recorded, ctx.pull, ctx.kept, ctx.device = recorded, pull, kept, device
        written = {id(t) for t in recorded.targets if t is not None}  # results are written to these, so their earlier values are kept
        read = [t for t in seen if id(t) not in written]
        ctx.versions, ctx.every_version = kept_by(held, read), versions(read)
        ctx.changed = any(id(t) in written for t in inputs)
        ctx.save_for_backward(*[t.detach().clone() if id(t) in written or t.is_inference() else t for t in inputs])
        return returned(ctx, outs, rest, recorded.kinds, device, avoid)

    @staticmethod
    @private.opaque
    @by_lane
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors  # raises if one was changed in place since
        check_unchanged(ctx.versions)
        cts = pick(cotangents, ctx.recorded.kinds)
        reached = pick(_reached(ctx.pull, [c is not None for c in cts], len(ctx.recorded.active), len(ctx.kept)), ctx.kept)
        cts = materialized(cts, ctx.like)
        # a captured tensor that only a rule uses has a second derivative alone
        second, live = torch.is_grad_enabled(), ctx.recorded.live
        used = [True] * len(ctx.recorded.active) + [second or id(t) in live for t in ctx.recorded.known]
        used = [u and r for u, r in zip(used, reached, strict=True)]
        if torch.is_grad_enabled() or any(type(c) is tracing.Traced for c in cts):  # run again from the current tensors
            check_unchanged(ctx.every_version)
            if ctx.changed:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a function that runs "
                    "in JAX changed a tensor that requires grad, and its backward pass cannot itself be differentiated; jit the function, "
                    "or clone the tensor first"
                )
            grads = [g if u else None for g, u in zip(_double(ctx.recorded, inputs, cts), used, strict=True)]
        else:
            with rewording(), tracing.root():
                cts = [conj(tensors.to_jax(c)) for c in cts]
                found = pick(late_inputs.pulled(ctx.pull, cts, ctx.recorded.late, lambda t: jnp.zeros_like(tensors.to_jax(t))), ctx.kept)
                found = [g if g.dtype == jax.dtypes.float0 else conj(g) for g in found]
            needs = [n and u and g.dtype != jax.dtypes.float0 for n, u, g in zip(ctx.needs_input_grad[4:], used, found, strict=True)]
            grads = [tensors.to_torch(g, t.device) if need else None for g, t, need in zip(found, inputs, needs, strict=True)]
        return (None, None, None, None, *grads)


def _reached(pull: Callable[..., Any], given: Sequence[bool], first: int, count: int) -> list[bool]:
    """Whether an output with a given cotangent depends on each of ``count`` inputs; PyTorch gives the others None, not zeros.

    first: how many of these inputs are no captured tensors.
    """
    jaxpr = private_jax.linear_program(pull)
    if jaxpr is None or len(jaxpr.outvars) != len(given):
        return [True] * count
    jaxpr, late = late_inputs.opened(jaxpr)
    bits = [1 << i for i in (*range(first), *[first + k for k in late])]
    sources = flow(jaxpr, [0] * (len(jaxpr.invars) - len(bits)) + bits, False)
    every = functools.reduce(operator.or_, itertools.compress(sources, given), 0)
    return [bool(every & 1 << i) for i in range(count)]


def returned(
    ctx: Any, outs: Sequence[Any], rest: Sequence[Any], kinds: Sequence[bool], device: torch.device | None, avoid: set[int]
) -> tuple[torch.Tensor, ...]:
    """The tensors that a node returns, of the values with derivatives, and of the rest; kinds: which of them have derivatives."""
    floats, others = iter(outs), iter(rest)
    results = [tensors.to_torch(next(floats) if kind else next(others), device, avoid) for kind in kinds]
    ctx.mark_non_differentiable(*pick(results, [not kind for kind in kinds]))
    ctx.set_materialize_grads(False)
    ctx.like = [(t.shape, t.dtype, t.device) for t in pick(results, kinds)]
    return tuple(results)


def materialized(
    cotangents: Sequence[torch.Tensor | None], like: Sequence[tuple[Sequence[int], torch.dtype, torch.device]]
) -> list[torch.Tensor]:
    """The cotangents, with zeros for those that PyTorch leaves out; like: the shape, dtype and device of each."""
    return [
        torch.zeros(shape, dtype=dtype, device=device) if c is None else c
        for c, (shape, dtype, device) in zip(cotangents, like, strict=True)
    ]


def versions(leaves: Sequence[Any]) -> list[tuple[torch.Tensor, int]]:
    """The torch tensors among the leaves, each with the number of writes to it so far."""
    return [(t, t._version) for t in leaves if isinstance(t, torch.Tensor) and not t.is_inference()]


def kept_by(held: set[int], leaves: Sequence[Any]) -> list[tuple[torch.Tensor, int]]:
    """``versions`` of the tensors whose memory a pullback reads; held: its ``addresses``."""
    return versions([t for t in leaves if isinstance(t, torch.Tensor) and t.data_ptr() in held])


def check_unchanged(before: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Raise RuntimeError, in torch's words, if one of the tensors was written to since."""
    for t, version in before:
        if t._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version {version} instead."
            )


def addresses(pull: Callable[..., Any]) -> set[int]:
    """The addresses, in this process's memory, of the arrays that a pullback reads."""
    return {a.unsafe_buffer_pointer() for a in jax.tree_util.tree_leaves(pull) if tensors.is_local(a)}


def _double(recorded: _Recorded, inputs: Sequence[torch.Tensor], cts: Sequence[torch.Tensor]) -> list[Any]:
    """The backward pass as a computation that can itself be differentiated."""
    count = len(inputs)

    def backward(values: list[Any]) -> Result:
        _, pull, _ = varying.vjp(dataclasses.replace(recorded), *values[:count], has_aux=True)
        return Result([conj(g) for g in pull([conj(c) for c in values[count:]])])

    outs, _ = recorded.apply(backward, [*inputs, *cts])
    return outs


# -- torch's autograd inside a trace ------------------------------------------------------------------------------------------------------
def attached(apply: Apply, outs: list[Any], compute: Computation, leaves: Sequence[Any]) -> list[Any]:
    """A transform's outputs inside a trace, connected in torch's graph to the inputs and captured tensors that require grad.

    Code that calls ``torch.autograd.grad`` inside a transformed function needs this: its graph must not end at an inner transform.
    """
    level = tracing.state.level
    found = {id(x): x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad}
    found.update(level.outer)  # tensors of enclosing levels stay there, because that level's result depends on them too
    level.outer = {key: t for key, t in level.outer.items() if tracing.node_of(t).level is not level}
    if not found or not torch.is_grad_enabled() or not any(inexact_dtype(t.dtype) for t in outs):
        return outs
    return list(_Attached.apply(apply, outs, compute, leaves, *found.values()))


class _Attached(Untransformed):
    """An inner transform as one node of the graph that torch's autograd builds inside a trace."""

    @staticmethod
    @private.opaque
    def forward(
        ctx: Any, apply: Apply, outs: list[Any], compute: Computation, leaves: Sequence[Any], *watched: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.again, ctx.compute, ctx.leaves, ctx.kinds = apply, compute, leaves, [inexact_dtype(t.dtype) for t in outs]
        ctx.save_for_backward(*watched)
        ctx.mark_non_differentiable(*pick(outs, [not kind for kind in ctx.kinds]))
        return tuple(outs)

    @staticmethod
    @private.opaque
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        watched = ctx.saved_tensors
        cts = pick(cotangents, ctx.kinds)
        n = len(watched)

        def back(values: list[Any]) -> Result:
            def pure(*active: jax.Array) -> list[Any]:
                nodes = [tracing.node_of(t) for t in watched]
                # in a backward pass PyTorch's engine switches grad mode off, and forward mode too
                with in_place_of(nodes, active), torch.enable_grad(), private.set_forward_mode_enabled(True):
                    given = {id(t): v for t, v in zip(watched, active, strict=True)}
                    result = ctx.compute([given.get(id(x), tracing.value_of(x)) if isinstance(x, torch.Tensor) else x for x in ctx.leaves])
                return pick(result.values[: len(ctx.kinds)], ctx.kinds)

            _, pull = varying.vjp(pure, *values[:n])
            return Result([conj(g) for g in pull([conj(c) for c in values[n:]])])

        grads, _ = ctx.again(back, [*watched, *cts])
        return (None, None, None, None, *grads)


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
