"""A compiled program as one node of torch's graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import torch

from bridge import compiling, private
from bridge.boundary import autograd
from bridge.boundary.calls import apply
from bridge.boundary.results import Result, replaced
from bridge.convert import tensors
from bridge.errors import rewording
from bridge.jit.program import differentiated, pull_back, taken
from bridge.private import opaque
from bridge.trace import requires_grad
from bridge.trace.levels import state
from bridge.trace.tracing import Traced


class ProgramNode(torch.autograd.Function):
    """One compiled program as one node of torch's graph;
    its backward is one compiled program too.
    """

    @staticmethod
    @opaque
    def forward(
        ctx: Any,
        compiled: Any,
        inputs: list[Any],
        values: list[Any],
        active: tuple[int, ...],
        *diff: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """values: the arrays of the inputs."""
        passes, kinds, copied, _ = compiled.pair(active)
        # the node keeps both: the backward pass is of the tier of its forward pass, and each time
        # the same
        run, back = passes.now
        values = tensors.on_one_device(values) if compiled.mixed else values
        random = compiled.program.random(values)
        with jax.enable_x64(True), compiling.at_call():
            outs, rest, pull = run(values, random)
        if compiled.bounds is not None:
            compiled.bounds.judge(rest.pop())
        avoid = autograd.addresses(values)
        ctx.compiled, ctx.inputs, ctx.active, ctx.random, ctx.kinds = (
            compiled,
            inputs,
            active,
            random,
            kinds,
        )
        ctx.back = functools.partial(back, pull)
        written = {id(inputs[i]) for i in compiled.program.written}
        read = [t for t in inputs if id(t) not in written]
        held = autograd.addresses(pull)  # they are computed by now, at the latest
        ctx.versions = autograd.kept_by(held, read) + autograd.versions(
            [inputs[k] for k in copied if id(inputs[k]) not in written]
        )
        ctx.every_version = autograd.versions(read)
        # PyTorch saves no inference tensor
        ctx.save_for_backward(*[t.detach().clone() if t.is_inference() else t for t in diff])
        return autograd.returned(ctx, outs, rest, kinds, compiled.device, avoid | held)

    @staticmethod
    @opaque
    @autograd.by_lane
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        diff = ctx.saved_tensors  # raises if one was changed in place since
        autograd.check_unchanged(ctx.versions)
        given = [c for c, kind in zip(cotangents, ctx.kinds, strict=True) if kind]
        direct = ctx.compiled.program.direct(ctx.active, [c is not None for c in cotangents])
        cts = autograd.materialized(given, ctx.like)
        if torch.is_grad_enabled() or any(type(c) is Traced for c in cts):
            # the program runs again on the current tensors
            autograd.check_unchanged(ctx.every_version)
            if state.level is None and not any(
                type(t) is Traced or private.without_memory(t) for t in (*diff, *cts)
            ):
                grads = ctx.compiled.gradients(
                    replaced(ctx.inputs, ctx.active, diff), ctx.active, ctx.random, cts
                )
                grads = [g.to(t.device) for g, t in zip(grads, diff, strict=True)]
            else:
                grads = _again(ctx, diff, cts)
            if any(c is None for c in given):
                grads = [g if d else None for g, d in zip(grads, direct, strict=True)]
        else:
            with rewording(), jax.enable_x64(True), compiling.at_call():
                found = ctx.back(tensors.crossings(cts)[0])
            need = [n and d for n, d in zip(ctx.needs_input_grad[4:], direct, strict=True)]
            grads = taken(found, need, ctx.compiled.runs_on)
            if ctx.compiled.mixed:
                grads = [
                    g if g is None else g.to(t.device) for g, t in zip(grads, diff, strict=True)
                ]
        return (None, None, None, None, *grads)


def _again(
    ctx: Any, diff: Sequence[torch.Tensor], cts: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The backward pass as a computation that torch's autograd can differentiate
    (double backward).
    """
    run = differentiated(ctx.compiled.program, ctx.active)
    inputs = [tensors.to_jax(x) if isinstance(x, torch.Tensor) else x for x in ctx.inputs]

    def grads(values: list[jax.Array]) -> list[jax.Array]:
        _, _, pull = run(replaced(inputs, ctx.active, values[: len(diff)]), ctx.random)
        return pull_back(pull, values[len(diff) :])

    read = ctx.compiled.pair(ctx.active).read

    def backward(values: list[jax.Array]) -> Result:
        found = grads(values)
        if not all(map(requires_grad.depends, found)):
            if not read:
                read.extend(requires_grad.inputs_of(grads, values))
            found = requires_grad.tie_each(found, values, read)
        return Result(found)

    outs, _ = apply(backward, [*diff, *cts])
    return outs
