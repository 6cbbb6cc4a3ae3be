"""torch.autograd.Function as a part of a record: its forward is written down, with the values that its context keeps."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge import private
from bridge.convert import trees
from bridge.intercepted import autograd_function as intercepted
from bridge.programs.cache_keys import Same
from bridge.record.entries import PARTS
from bridge.record.recorder import Recorder
from bridge.record.replay import TRANSFORMS
from bridge.record.tensor import Unrecordable, aval_of
from bridge.record.transforms import transform
from bridge.trace.levels import state


@dataclasses.dataclass(frozen=True)
class _Ended:
    """What the forward of an autograd.Function gives beside tensors: the trees of its outputs and of its context, and static leaves."""

    outs: Any  # the treedef of its outputs; static: its leaves that are no tensors
    static: tuple[Any, ...]
    kept: Any  # the treedef of the values that its context keeps; kept_static: its leaves that are no tensors
    kept_static: tuple[Any, ...]
    constant: tuple[bool, ...]  # for each output that is a tensor: whether it has no gradient
    materialize: bool


def _function(cls: type[torch.autograd.Function], recording: bool) -> Callable[..., Any]:
    """A function that PyTorch runs instead of an autograd.Function's forward; it writes the forward down, with what its context keeps."""
    if cls.__module__.startswith("torch."):
        raise Unrecordable(cls.__name__)
    new_style = cls.setup_context is not torch.autograd.Function.setup_context
    own_vmap = cls.vmap is not torch.autograd.Function.vmap
    if new_style and own_vmap is cls.generate_vmap_rule and state.recorder.mapped():
        raise Unrecordable("a Function with two rules for vmap, or none: whether that matters shows where the values are known")

    def forward(*given: Any) -> Any:
        args = given if new_style else given[1:]
        if not any(isinstance(a, torch.Tensor) for a in args):
            return cls.forward(*given)
        try:
            out = transform(cls, args, lambda recorder: (_applied(recorder, cls, args, recording, new_style), lambda found: found[0]))
        except Exception as error:
            if own_vmap and state.recorder.mapped():
                raise Unrecordable("a forward that the Function's own vmap may replace") from error
            raise
        if new_style:
            private.skip_setup_context(cls)
        return out

    return forward


def _applied(recorder: Recorder, cls: type[torch.autograd.Function], args: tuple[Any, ...], recording: bool, new_style: bool) -> list[Any]:
    """Write down one call of a Function; a list with the tree of its outputs as the only entry."""
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    others = [a for a in args if not isinstance(a, torch.Tensor)]
    if any(isinstance(x, torch.Tensor) for x in trees.flatten(others)[0]):
        raise Unrecordable("tensors inside of a Function's argument")
    operands = [args[i] for i in where]
    avals = [aval_of(t) for t in operands]
    params = (cls, tuple(where), len(args), _same(others))
    first, start = recorder.count, len(recorder.trace)
    inputs = len(recorder.inputs)
    ctx = intercepted.Context(tuple([recording and isinstance(a, torch.Tensor) and a.requires_grad for a in args]))
    attributes = set(vars(ctx))
    filled = list(args)
    with torch.set_grad_enabled(recording):  # the grad mode around the call
        arguments = recorder.begin("function", params, operands, avals)
    for i, t in zip(where, arguments, strict=True):
        filled[i] = t
    try:
        with recorder, private.set_forward_mode_enabled(recorder.forward_mode):  # PyTorch has switched forward mode off
            out = cls.forward(*filled) if new_style else cls.forward(ctx, *filled)
            if new_style:
                cls.setup_context(ctx, tuple(filled), out)
        leaves, spec = trees.flatten(out)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not tensors:
            raise Unrecordable("a Function without tensors as results")
        if new_style:
            intercepted.refuse_saved_inputs(ctx, filled, out)
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
        results = [aval_of(t) for t in tensors]
        ended = _Ended(spec, _same(leaves), kept_spec, _same(kept_leaves), constant, ctx._materialize)
        made = recorder.end(ended, [*tensors, *saved], [
            a.like(a.shape, needs and not c) for a, c in zip(results, constant, strict=True)
        ])  # fmt: skip
    except BaseException:
        recorder.leave()
        raise
    return [_merged(spec, leaves, made)]


def _same(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The leaves as keys that can be compared; None for each tensor."""
    try:
        return tuple([None if isinstance(x, torch.Tensor) else Same(x) for x in leaves])
    except TypeError:
        raise Unrecordable("an argument of a Function that is not hashable") from None


def _merged(spec: Any, leaves: Sequence[Any], found: Sequence[torch.Tensor]) -> Any:
    """The tree of the leaves; each None or tensor among them is replaced by the next of the tensors found."""
    source = iter(found)
    return trees.unflatten(spec, [x.value if type(x) is Same else next(source) if x is None or isinstance(x, torch.Tensor) else x
                                  for x in leaves])


def _function_again(
    body: Callable[..., Any], operands: list[torch.Tensor], params: tuple[Any, ...], end: _Ended
) -> tuple[list[torch.Tensor], None]:
    cls, where, count, static = params
    n = len(end.constant)

    def forward(ctx: Any, *args: Any) -> Any:
        # body comes from the class: as a closure variable it would be searched for tensors, and those of the whole record found
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
