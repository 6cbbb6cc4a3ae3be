"""torch.autograd.Function and torch.utils.checkpoint as parts of a record: their functions are
written down.

Of a Function, its forward is written down, with the values that its context keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from bridge import private
from bridge.boundary.results import put_together, take_apart
from bridge.cache_keys import Same
from bridge.convert import trees
from bridge.intercepted import autograd_function as intercepted
from bridge.intercepted.checkpointing import rematerialized
from bridge.process import having, process
from bridge.record.entries import FunctionEnd
from bridge.record.in_torch import Level
from bridge.record.recorder import Recorder
from bridge.record.tensor import avals_of
from bridge.record.transforms import NOT_RECORDED, Recording, entered, inside, transform
from bridge.trace.levels import Unrecordable, state
from bridge.trace.tracing import node_of
from bridge.transform_kinds import CHECKPOINT, FUNCTION, FUNCTIONALIZE, Kind


def _function(cls: type[torch.autograd.Function], args: tuple[Any, ...], recording: bool) -> Any:
    """The outputs of an autograd.Function, whose forward is written down, with what its context
    keeps.
    """
    new_style = cls.setup_context is not torch.autograd.Function.setup_context
    own_vmap = cls.vmap is not torch.autograd.Function.vmap
    if cls.__module__.startswith("torch."):
        raise Unrecordable(cls.__name__)
    if any(rule in process.changing for rule in intercepted.rules_of(cls)):
        raise Unrecordable(f"a derivative of {cls.__name__} that changes Python objects")
    if new_style and own_vmap is cls.generate_vmap_rule and state.recorder.mapped():
        raise Unrecordable(
            "a Function with two rules for vmap, or none: whether that matters shows where the "
            "values are known"
        )
    call = _Call(cls, args, recording, new_style)
    replaced = own_vmap and state.recorder.mapped() > 0
    try:
        # PyTorch is inside of the Function: it could only go on from its start
        with having(state.recorder, resumable=False):
            return transform(call.user, args, call.record)
    except Exception as error:
        if replaced:
            raise Unrecordable("a forward that the Function's own vmap may replace") from error
        raise


class _Call:
    """One call of a Function, to be written down."""

    def __init__(
        self,
        cls: type[torch.autograd.Function],
        args: tuple[Any, ...],
        recording: bool,
        new_style: bool,
    ) -> None:
        self.cls, self.args, self.recording, self.new_style = cls, args, recording, new_style
        self.ctx = intercepted.Context(
            tuple([recording and isinstance(a, torch.Tensor) and a.requires_grad for a in args])
        )
        self.attributes = set(vars(self.ctx))

    def user(self, ctx: Any, *args: Any) -> Any:
        """The user's forward, and what it keeps in the context."""
        if not self.new_style:
            return self.cls.forward(ctx, *args)
        out = self.cls.forward(*args)
        self.cls.setup_context(ctx, args, out)
        return out

    def record(self, recorder: Recorder) -> Recording:
        operands = _tensors(self.args)
        if len(take_apart(self.args)[0]) > len(operands):
            raise Unrecordable("tensors inside of a Function's argument")
        given = _meta(self.args, trees.joined(*[trees.LEAF] * len(self.args)))
        first, start, inputs = recorder.count, len(recorder.trace), len(recorder.inputs)
        with torch.set_grad_enabled(self.recording):  # the grad mode around the call
            rules = intercepted.rules_of(self.cls)  # another one may take the place of one of them
            arguments = recorder.begin(
                FUNCTION, (self.cls, given, *rules), operands, avals_of(operands)
            )
        filled = put_together(arguments, given.value)
        ctx = self.ctx

        def forward() -> Any:
            # PyTorch has switched forward mode off
            with private.set_forward_mode_enabled(recorder.forward_mode):
                return self.user(ctx, *filled)

        def finish(out: Any) -> tuple[list[Any], Any]:
            leaves, spec = trees.flatten(out)
            tensors = _tensors(leaves)
            if not tensors:
                raise Unrecordable("a Function without tensors as results")
            if self.new_style:
                intercepted.refuse_saved_inputs(ctx, filled, out)
            kept = {name: x for name, x in vars(ctx).items() if name not in self.attributes}
            kept_leaves, kept_spec = trees.flatten(
                (list(ctx.to_save), list(ctx.saved_for_forward), kept)
            )
            results = tensors + _tensors(kept_leaves)
            begun = len(recorder.inputs) - inputs == sum(
                recorder.by_id[id(t)] >= first for t in operands if id(t) in recorder.by_id
            )
            refs = [r for _, rs in recorder.trace[start:] for r in rs] + [
                recorder.ref(t) for t in results
            ]
            mine = arguments[0].ref
            if ctx.dirty_tensors or not begun or any(r < mine for r in refs[len(operands) :]):
                raise Unrecordable(
                    "a Function that writes to its arguments, or uses tensors from outside"
                )
            no_gradient = ctx.non_differentiable
            constant = tuple(
                [
                    any(t is c for c in no_gradient)
                    or not (t.is_floating_point() or t.is_complex())
                    for t in tensors
                ]
            )
            needs = self.recording and any(t.requires_grad for t in operands)
            avals = [
                a.like(a.shape, needs and not c)
                for a, c in zip(avals_of(tensors), constant, strict=True)
            ]
            outs = _meta(leaves, spec)
            asked = ctx.needs_input_grad if ctx.asked_for_needs else None
            ended = FunctionEnd(
                outs, _meta(kept_leaves, kept_spec), constant, ctx.materialize_grads, asked
            )
            return recorder.end(ended, results, avals), outs

        made, outs = inside(recorder, forward, finish)
        return made, lambda found: put_together(found, outs.value)


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _meta(leaves: Sequence[Any], spec: Any) -> Same:
    """What ``put_together`` needs of a tree with these leaves, as a key."""
    is_tensor = tuple([isinstance(x, torch.Tensor) for x in leaves])
    try:
        return Same(
            (
                spec,
                tuple([None if t else x for x, t in zip(leaves, is_tensor, strict=True)]),
                is_tensor,
            )
        )
    except TypeError:
        raise Unrecordable("an argument of a Function that is not hashable") from None


def _function_again(
    body: Callable[..., Any],
    operands: list[torch.Tensor],
    params: tuple[Any, ...],
    end: FunctionEnd,
) -> tuple[list[torch.Tensor], None]:
    cls, given, *_ = params

    def forward(ctx: Any, *args: Any) -> Any:
        # body comes from the class: as a closure variable it would be searched for tensors, and
        # those of the whole record found
        found = vars(again)["body"](*_tensors(args))
        # only here: a run that shows a tensor of the forward has no end, and does not come here
        n = len(end.constant)
        if end.needs is not None:
            if any(
                needed and not known
                for needed, known in zip(ctx.needs_input_grad, end.needs, strict=True)
            ):
                raise Unrecordable(
                    "a Function that asks which arguments need a gradient, in nested transforms"
                )
            ctx.needs_input_grad = end.needs
        saved, saved_forward, attributes = put_together(found[n:], end.kept.value)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved_forward)
        ctx.mark_non_differentiable(*[t for t, c in zip(found[:n], end.constant, strict=True) if c])
        ctx.set_materialize_grads(end.materialize)
        for name, x in attributes.items():
            setattr(ctx, name, x)
        return put_together(found[:n], end.outs.value)

    again: Any = type(
        cls.__name__,
        (cls,),
        {
            "forward": staticmethod(forward),
            "setup_context": staticmethod(torch.autograd.Function.setup_context),
            "body": body,
        },
    )
    return take_apart(again.apply(*put_together(operands, given.value)))[0], None


def _checkpoint(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write torch.utils.checkpoint down as a part of the record; its function's values are computed
    again in the backward pass.
    """
    done = called(CHECKPOINT, function, args, kwargs)
    return rematerialized(function, args, kwargs) if done is NOT_RECORDED else done


def called(
    kind: Kind, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Write down a call that changes no values, or make a record of it and run that; returns what
    ``transform`` does.
    """
    leaves, spec = trees.flatten((args, kwargs))

    def record(recorder: Recorder) -> Recording:
        avals = avals_of(_tensors(leaves))
        tensors, meta = entered(recorder, function, kind, (), leaves, spec, avals, (), take_apart)
        ended = recorder.end(
            (), tensors, [a.like(a.shape, a.requires_grad) for a in avals_of(tensors)]
        )
        return ended, lambda outs: put_together(outs, meta)

    return transform(function, leaves, record)


def _checkpoint_again(
    body: Callable[..., Any], operands: list[torch.Tensor], _: Any, __: Any
) -> tuple[list[torch.Tensor], None]:
    return list(torch.utils.checkpoint.checkpoint(body, *operands, use_reentrant=False)), None


def _functionalized(
    body: Callable[..., Any], operands: list[torch.Tensor], _: Any, __: Any
) -> tuple[list[torch.Tensor], None]:
    """torch.func writes to an argument when the function has ended: results that have the
    argument's memory are no longer it.
    """
    before = [node_of(t).root.version for t in operands]
    outs = body(*operands)
    written = {
        node_of(t).root
        for t, version in zip(operands, before, strict=True)
        if node_of(t).root.version != version
    }
    return [t.clone() if node_of(t).root in written else t for t in outs], None


def _functionalized_in_torch(operands: Sequence[torch.Tensor], _: Any) -> Level:
    before = [_version(t) for t in operands]
    results, _ = yield list(operands)
    written = {
        id(_whole(t)) for t, version in zip(operands, before, strict=True) if _version(t) != version
    }
    return [t.clone() if id(_whole(t)) in written else t for t in results], None


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version  # those of inference mode count no writes


def _whole(t: torch.Tensor) -> torch.Tensor:
    """The tensor of which this one is a view, or itself."""
    return t if t._base is None else t._base


FUNCTION.record, FUNCTION.again = _function, _function_again
CHECKPOINT.record, CHECKPOINT.again = _checkpoint, _checkpoint_again
FUNCTIONALIZE.again, FUNCTIONALIZE.in_torch = _functionalized, _functionalized_in_torch
