"""torch.autograd.Function as a part of a record: its forward is written down, with what its context keeps for its other rules."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge import private
from bridge.convert import trees
from bridge.intercepted import autograd_function as intercepted
from bridge.programs.cache_keys import Same
from bridge.record.recorder import PARTS, Recorder
from bridge.record.replay import TRANSFORMS
from bridge.record.tensor import Unrecordable
from bridge.record.transforms import transform


@dataclasses.dataclass(frozen=True)
class _Ended:
    """What the forward of an autograd.Function leaves beside tensors."""

    outs: Any  # the tree of its outputs, and of what its context keeps; what in them is no tensor
    static: tuple[Any, ...]
    kept: Any
    kept_static: tuple[Any, ...]
    constant: tuple[bool, ...]  # of the outputs that are tensors: marked as not differentiable
    materialize: bool


def _function(cls: Any, recording: bool) -> Callable[..., Any]:
    """What PyTorch runs in the place of an autograd.Function's forward: it is written down, and what its context keeps with it."""
    if cls.__module__.startswith("torch."):
        raise Unrecordable(cls.__name__)
    new_style = cls.setup_context is not torch.autograd.Function.setup_context

    def forward(*given: Any) -> Any:
        args = given if new_style else given[1:]
        if not any(isinstance(a, torch.Tensor) for a in args):
            return cls.forward(*given)
        out = transform(cls, args, lambda recorder: (_applied(recorder, cls, args, recording, new_style), lambda found: found[0]))
        if new_style:
            private.skip_setup_context(cls)
        return out

    return forward


def _applied(recorder: Recorder, cls: Any, args: tuple[Any, ...], recording: bool, new_style: bool) -> list[Any]:
    """[the outputs of a Function]"""
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    others = [a for a in args if not isinstance(a, torch.Tensor)]
    if any(isinstance(x, torch.Tensor) for x in trees.flatten(others)[0]):
        raise Unrecordable("tensors inside of a Function's argument")
    operands = [args[i] for i in where]
    avals = [recorder.aval(t) for t in operands]
    params = (cls, tuple(where), len(args), _same(others))
    first, start = recorder.count, len(recorder.trace)
    inputs = len(recorder.inputs)
    ctx = intercepted.Context(tuple([recording and isinstance(a, torch.Tensor) and a.requires_grad for a in args]))
    attributes = set(vars(ctx))
    filled = list(args)
    with torch.set_grad_enabled(recording):  # as it was around the call
        arguments = recorder.begin("function", params, operands, avals)
    for i, t in zip(where, arguments, strict=True):
        filled[i] = t
    try:
        private.enter_function_mode(recorder)
        try:
            with private.set_forward_mode_enabled(recorder.ambient.forward_mode):  # PyTorch has switched it off
                out = cls.forward(*filled) if new_style else cls.forward(ctx, *filled)
                if new_style:
                    cls.setup_context(ctx, tuple(filled), out)
        finally:
            private.leave_function_mode()
        leaves, spec = trees.flatten(out)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        kept = {name: x for name, x in vars(ctx).items() if name not in attributes}
        kept_leaves, kept_spec = trees.flatten((list(ctx._saved), list(ctx._saved_forward), kept))
        saved = [x for x in kept_leaves if isinstance(x, torch.Tensor)]
        begun = len(recorder.inputs) - inputs == sum(recorder.by_id[id(t)] >= first for t in operands if id(t) in recorder.by_id)
        refs = [r for _, rs in recorder.trace[start:] for r in rs] + [recorder.ref(t) for t in (*tensors, *saved)]
        mine = arguments[0].ref
        if ctx._dirty or not begun or any(r < mine for r in refs[len(operands) :]):
            raise Unrecordable("a Function that writes to its arguments, or uses tensors from outside")
        constant = tuple([any(t is c for c in ctx._constant) or not (t.is_floating_point() or t.is_complex()) for t in tensors])
        needs = recording and any(t.requires_grad for t in operands)
        results = [recorder.aval(t) for t in tensors]
        ended = _Ended(spec, _same(leaves), kept_spec, _same(kept_leaves), constant, ctx._materialize)
        made = recorder.end(ended, [*tensors, *saved], [
            a.like(a.shape, needs and not c) for a, c in zip(results, constant, strict=True)
        ])  # fmt: skip
    except BaseException:
        recorder.leave()
        raise
    return [_merged(spec, leaves, made)]


def _same(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What is no tensor among these, to be compared and kept."""
    try:
        return tuple([None if isinstance(x, torch.Tensor) else Same(x) for x in leaves])
    except TypeError:
        raise Unrecordable("an argument of a Function that is not hashable") from None


def _merged(spec: Any, leaves: Sequence[Any], found: Sequence[Any]) -> Any:
    """A tree of the static leaves, and of the tensors found in the places of those that are None or tensors."""
    source = iter(found)
    return trees.unflatten(spec, [x.value if type(x) is Same else next(source) if x is None or isinstance(x, torch.Tensor) else x
                                  for x in leaves])


def _function_again(body: Any, operands: list[Any], params: Any, end: _Ended) -> Any:
    cls, where, count, static = params
    n = len(end.constant)

    def forward(ctx: Any, *args: Any) -> Any:
        # by way of the class: who looks for tensors from outside that the methods reach would find those of the whole record in body
        found = vars(again)["body"](*[args[i] for i in where])
        saved, saved_forward, attributes = _merged(end.kept, end.kept_static, found[n:])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved_forward)
        ctx.mark_non_differentiable(*[t for t, c in zip(found[:n], end.constant, strict=True) if c])
        ctx.set_materialize_grads(end.materialize)
        for name, x in attributes.items():
            setattr(ctx, name, x)
        return _merged(end.outs, end.static, found[:n])

    again: Any = type(cls.__name__, (cls,), {
        "forward": staticmethod(forward), "setup_context": staticmethod(torch.autograd.Function.setup_context), "body": body,
    })  # fmt: skip
    source, given = iter(operands), iter(static)
    out = again.apply(*[next(source) if i in where else next(given).value for i in range(count)])
    return [x for x in trees.flatten(out)[0] if isinstance(x, torch.Tensor)], None


PARTS["function"] = _function
TRANSFORMS["function"] = _function_again
