"""A compiled program as one node of torch's graph."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from bridge import compiling
from bridge.boundary import autograd
from bridge.boundary.calls import apply
from bridge.boundary.results import Result, is_local
from bridge.convert import tensors
from bridge.errors import rewording
from bridge.jit.program import differentiated, pull_back
from bridge.private import opaque
from bridge.trace.tracing import Traced


class ProgramNode(torch.autograd.Function):
    """One compiled program as one node of torch's graph; its backward is one compiled program too."""

    @staticmethod
    @opaque
    def forward(
        ctx: Any, compiled: Any, arguments: list[Any], captured: list[torch.Tensor], active: tuple[int, ...],
        active_captured: tuple[int, ...], *diff: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        run, _, kinds, copied = compiled.pair(active, active_captured)
        random = compiled.program.random()
        inputs = [tensors.to_jax(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        values = [tensors.to_jax(t) for t in captured]
        with jax.enable_x64(True), compiling.at_call():
            outs, rest, pull = run(inputs, values, random)
        if compiled.bounds is not None:
            compiled.bounds.judge(rest.pop())
        floats, others = iter(outs), iter(rest)
        held = autograd.addresses(pull)
        avoid = held | {a.unsafe_buffer_pointer() for a in (*inputs, *values) if is_local(a)}
        results = [tensors.to_torch(next(floats) if kind else next(others), compiled.device, avoid) for kind in kinds]
        ctx.compiled, ctx.arguments, ctx.captured, ctx.random, ctx.pull = compiled, arguments, captured, random, pull
        ctx.active, ctx.active_captured, ctx.kinds = active, active_captured, kinds
        written = set(map(id, compiled.program.written_to(arguments, captured)))
        every = [*arguments, *captured]
        read = [t for t in every if id(t) not in written]
        ctx.versions = autograd.kept_by(held, read) + autograd.versions([every[k] for k in copied if id(every[k]) not in written])
        ctx.every_version = autograd.versions(read)
        ctx.save_for_backward(*diff)
        ctx.mark_non_differentiable(*[t for t, kind in zip(results, kinds, strict=True) if not kind])
        ctx.set_materialize_grads(False)
        ctx.like = [(t.shape, t.dtype, t.device) for t, kind in zip(results, kinds, strict=True) if kind]
        return tuple(results)

    @staticmethod
    @opaque
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        diff = ctx.saved_tensors  # raises if one was changed in place since
        autograd.check_unchanged(ctx.versions)
        given = [c for c, kind in zip(cotangents, ctx.kinds, strict=True) if kind]
        direct = ctx.compiled.program.direct(ctx.active, ctx.active_captured, [c is not None for c in cotangents])
        cts = autograd.materialized(given, ctx.like)
        if torch.is_grad_enabled() or any(type(c) is Traced for c in cts):
            autograd.check_unchanged(ctx.every_version)  # the program runs again on the current tensors
            grads = _again(ctx, diff, cts)
            if any(c is None for c in given):
                grads = [g if d else None for g, d in zip(grads, direct, strict=True)]
        else:
            back = ctx.compiled.pair(ctx.active, ctx.active_captured).back
            inputs = [tensors.to_jax(c) for c in cts]
            with rewording(), jax.enable_x64(True), compiling.at_call():
                found = back(ctx.pull, inputs)
            need = [n and d for n, d in zip(ctx.needs_input_grad[5:], direct, strict=True)]
            grads = [tensors.to_torch(g, t.device) if n else None for g, t, n in zip(found, diff, need, strict=True)]
        return (None, None, None, None, None, *grads)


def _again(ctx: Any, diff: Sequence[torch.Tensor], cts: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The backward pass as a computation that torch's autograd can differentiate (double backward)."""
    run = differentiated(ctx.compiled.program, ctx.active, ctx.active_captured)
    n = len(diff)
    split = len(ctx.active)
    arguments = [tensors.to_jax(x) if isinstance(x, torch.Tensor) else x for x in ctx.arguments]
    captured = [tensors.to_jax(t) for t in ctx.captured]

    def backward(values: list[jax.Array]) -> Result:
        args, caps = list(arguments), list(captured)
        for i, v in zip(ctx.active, values[:split], strict=True):
            args[i] = v
        for i, v in zip(ctx.active_captured, values[split:n], strict=True):
            caps[i] = v
        _, _, pull = run(args, caps, ctx.random)
        return Result(pull_back(pull, values[n:]))

    outs, _ = apply(backward, [*diff, *cts])
    return outs


__all__ = ["ProgramNode"]
