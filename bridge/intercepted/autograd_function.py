"""torch.autograd.Function inside a trace: the user's own derivatives become JAX's custom rules.

JAX would differentiate through a Function's forward, but torch calls its backward (or jvp). While a
trace is open, the functions of this file run instead of a Function's forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.utils.checkpoint
from torch.autograd.function import FunctionCtx
from torch.nn.modules._functions import BackwardHookFunction

from bridge import private, private_calls, private_jax
from bridge.boundary.autograd import Untransformed
from bridge.boundary.results import (
    conj,
    inexact,
    inexact_dtype,
    pick,
    put_together,
    replaced,
    take_apart,
)
from bridge.convert import dtypes, trees
from bridge.errors import DataDependentError, at_line, is_no_jvp, no_jvp
from bridge.intercepted import gradient_hooks
from bridge.intercepted.captured_by_rules import Closed, followed
from bridge.intercepted.checkpointing import rematerialized
from bridge.lowering.common import varying
from bridge.lowering.common.promotion import cast
from bridge.lowering.registry import LOWERINGS
from bridge.operators import operands
from bridge.private_calls import intercepted
from bridge.process import having, process
from bridge.trace.aliasing import read
from bridge.trace.levels import Level, Unrecordable, answers, around, innermost, push, state
from bridge.trace.random_keys import SeededInside, drawing_again
from bridge.trace.storage import Node, OutsideOfView
from bridge.trace.tracing import Traced, assign, dispatch, lift, over, plan_of, value_of, wrap
from bridge.transform_kinds import DIFFERENTIATING, FORWARD, FUNCTION, MAPPING, PLAIN

Function = torch.autograd.Function
SymbolicZero: Any = jax.custom_derivatives.SymbolicZero
# with more operands, a traced derivative gets zeros in the place of None, because each way to leave
# some out is traced
_NONE_AMONG = 3


def forward_in_trace(
    cls: type[Function], recording: bool, forward_mode: bool
) -> Callable[..., Any] | None:
    """The function that PyTorch runs instead of a Function's forward if this thread has a trace or
    a record open; None: the forward itself.

    PyTorch makes its own graph node for the outputs, which a ``torch.autograd.grad`` inside the
    trace uses; JAX differentiates by the rules of ``_Call``. recording, forward_mode: whether grad
    mode and forward-mode AD were on when the Function was applied.
    """
    in_record = state.recorder is not None and not state.recorder.inferring
    if issubclass(cls, Untransformed) or (state.level is None and not in_record):
        return None
    new_style = cls.setup_context is not Function.setup_context

    def forward(*given: Any) -> Any:
        ctx, args = (None, given) if new_style else (given[0], given[1:])
        if not any(isinstance(a, torch.Tensor) for a in args):
            return cls.forward(*given)
        written = state.level is None
        if written:
            out = FUNCTION.record(cls, args, recording)
        else:
            with torch.set_grad_enabled(recording), private.set_forward_mode_enabled(forward_mode):
                out = _applied(cls, ctx, args)
        if new_style and (written or not _has_node(args, recording)):
            private_calls.skip_setup_context(cls)
        return out

    return forward


def rules_of(cls: type[Function]) -> list[Callable[..., Any]]:
    """The methods of a Function that run when a program is made, but not when it is called."""
    found = [getattr(cls, name) for name in ("backward", "vjp", "jvp", "vmap")]
    return [rule for rule in found if not rule.__module__.startswith("torch.")]


def _has_node(args: Sequence[Any], recording: bool) -> bool:
    """Whether PyTorch makes a graph node for a Function that is applied to these arguments."""
    return recording and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


def _applied(cls: type[Function], ctx: Any, args: tuple[Any, ...]) -> Any:
    """The outputs of a Function; ctx: PyTorch's own context if the forward takes one, else None."""
    if cls is torch.utils.checkpoint.CheckpointFunction:
        return rematerialized(args[0], args[2:], {})
    if cls is BackwardHookFunction:
        return gradient_hooks.module_hooks(ctx, args)
    if cls is private.Dirichlet:  # the lowering of the operator that it calls has its derivative
        return cls.forward(ctx, *args)
    if torch.is_grad_enabled():
        operands.note_use(trees.flatten(args)[0])
    op, derivative = private.generated_for(cls)  # of a torch.library operator
    if op in LOWERINGS and derivative._backward_fn is None:  # its lowering has a derivative
        return dispatch(op, args[:-1], args[-1].keyword_only_args)
    if op is not None and getattr(plan_of(op), "by_torch", False):
        # the operator's own derivative is not that of this forward
        with torch.no_grad(), having(state, applied=True):
            return cls.forward(ctx, *args)
    if innermost(MAPPING) is not None:
        if ctx is None and private_jax.mapped(
            value_of(x) for x in trees.flatten(args)[0] if isinstance(x, torch.Tensor)
        ):
            private.check_vmap_rules(cls)
        out = _by_own_vmap(cls, args)
        if out is not NotImplemented:
            return out
    call = _Call(cls, args)
    call.may_capture = op is None
    values = [value_of(args[i]) for i in call.where]
    if ctx is None or not _has_node(args, torch.is_grad_enabled()):
        return call.run(values)
    draw_again = drawing_again()
    with torch.no_grad(), private.set_forward_mode_enabled(False):
        out = cls.forward(ctx, *args)  # it fills PyTorch's own context
    call.has_run = True
    with draw_again():
        return call.run(values, out)


def _by_own_vmap(cls: type[Function], args: Sequence[Any]) -> Any:
    """The outputs of a Function by its vmap staticmethod, which runs outside of the vmap;
    transforms around the vmap differentiate it.

    NotImplemented: the Function has none, or no vmap maps an argument.
    """
    if cls.vmap is Function.vmap or cls.generate_vmap_rule:
        return NotImplemented
    leaves, spec = trees.flatten(args)
    values = [value_of(x) if isinstance(x, torch.Tensor) else None for x in leaves]
    lanes = private_jax.Lanes.of(values)
    if lanes is None:
        return NotImplemented
    inside = state.level
    captured = followed(cls, *[x for x in leaves if not isinstance(x, torch.Tensor)])
    if any(lanes.joined(read(node, inside))[1] is not None for node in captured):
        raise RuntimeError(
            f"{cls.__name__}.vmap: one of its methods uses a tensor from outside that is mapped "
            "too, and vmap cannot tell it along which dimension; pass that tensor to apply as an "
            f"argument{at_line()}"
        )
    mapping = next(
        (
            level
            for level in around()
            if level.kind.maps and private_jax.same_trace(level.probe, lanes.trace)
        ),
        None,
    )
    info = private.vmap_info(
        lanes.size, "error" if mapping is None else mapping.randomness or "error"
    )
    joined = [lanes.joined(v) for v in values]
    outer = inside if mapping is None else mapping.parent
    with having(state, level=outer), lanes.outside(), push(PLAIN) as level:
        given = [
            wrap(v, x.device, level) if isinstance(x, torch.Tensor) else x
            for x, (v, _) in zip(leaves, joined, strict=True)
        ]
        args = trees.unflatten(spec, given)
        result = cls.vmap(info, tuple(trees.unflatten(spec, [d for _, d in joined])), *args)

        def lane(t: torch.Tensor, dim: int | None) -> torch.Tensor:
            dim = dim if dim is None or dim >= 0 else dim + t.dim()
            return wrap(lanes.apart(value_of(t), dim), t.device, inside)

        out = private.results_of_rule(result, args, trees.unflatten(spec, leaves), lane)
        written = [
            (x, lanes.apart(value_of(t), d), t.node.detached)
            for x, t, (_, d) in zip(leaves, given, joined, strict=True)
            if type(t) is Traced and t.node.version
        ]
    for x, value, detached in written:
        assign(x, value, detached)
    return out


class Context(FunctionCtx):
    """The ctx argument of a Function's static methods; its methods, and the attributes that they
    fill, are PyTorch's.

    Attributes:
        asked_for_needs: whether the method that got this context has asked for
            ``needs_input_grad``.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save = self.saved_for_forward = self.dirty_tensors = self.non_differentiable = ()
        self.materialize_grads = True
        self._pushing = False  # in jvp: saved_tensors are those of save_for_forward

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        self.asked_for_needs = True
        return self._needs

    @needs_input_grad.setter
    def needs_input_grad(self, needs: tuple[bool, ...]) -> None:
        self._needs, self.asked_for_needs = needs, False

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        first, second = (
            (self.saved_for_forward, self.to_save)
            if self._pushing
            else (self.to_save, self.saved_for_forward)
        )
        return first or second

    saved_variables = saved_tensors


def refuse_saved_inputs(ctx: Context, args: Sequence[Any], out: Any) -> None:
    """Raise PyTorch's error if a new-style Function saves an input that it also returns, and does
    not mark it as dirty.
    """
    saved = [
        s
        for s in (*ctx.to_save, *ctx.saved_for_forward)
        if s is not None and not any(s is d for d in ctx.dirty_tensors)
    ]
    if any(s is a and s is o for s in saved for a in args for o in trees.flatten(out)[0]):
        raise RuntimeError(
            "An input that has been returned as-is as output is being saved for backward. This is "
            "not supported if you override setup_context. You should return and save a view of the "
            "input instead, e.g. with x.view_as(x) or setup ctx inside the forward function "
            "itself."
        )


class _Call:
    """One call of a Function inside a trace.

    ``forward``, ``backward`` and ``jvp`` run the user's methods on JAX values. Their argument
    ``captured`` has first the values to use for the nodes ``outer`` instead of the nodes' own; if
    it is empty, the nodes' own are used.
    """

    def __init__(self, cls: type[Function], args: tuple[Any, ...]) -> None:
        self.cls, self.args, self.name = cls, args, cls.__name__
        self.where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        self.device = args[self.where[0]].device
        self.rest: Any = None  # what ``take_apart`` leaves of the outputs
        # by the place of an output that is a dirty input: which of the tensor arguments it is
        self.dirty: dict[int, int] = {}
        self.constant: list[bool] = []
        # at the innermost transform, as PyTorch says
        self.requires_grad = [bool(args[i].requires_grad) for i in self.where]
        self.asked = False  # whether a method has asked which arguments need a gradient
        self.has_run = False  # whether the forward has run, so that what it changes is changed
        # whether PyTorch calls ``setup_context`` too, after the forward
        self.set_up_again = _has_node(args, torch.is_grad_enabled()) and (
            innermost(DIFFERENTIATING) is None  # inside of these torch.func calls it twice
        )
        self.without_jvp = ""  # what to do in forward mode without a jvp, for an error
        # whether its methods may have captured its arguments, as those of an operator have not
        self.may_capture = True
        self.constants: list[list[Any]] = []  # those of the jaxprs of ``_rules``
        self._rules: list[_Rules] = []
        self._refused: Exception | None = None  # why a second one could not be made

    def forward(
        self, values: Sequence[jax.Array], needs: Sequence[bool]
    ) -> tuple[list[Any], list[Any], _Kept]:
        """The outputs, the residuals (every tensor that the context keeps) and the context without
        its tensors.
        """
        args, flags = list(self.args), [False] * len(self.args)
        with push(FUNCTION) as level, torch.no_grad(), private.set_forward_mode_enabled(False):
            for i, v, n in zip(self.where, values, needs, strict=True):
                args[i], flags[i] = wrap(v, self.args[i].device, level), n
                if n and inexact_dtype(args[i].dtype):
                    args[i].requires_grad_()
            ctx = Context(tuple(flags))
            if self.cls.setup_context is not Function.setup_context:
                out = _by_own_vmap(self.cls, args)
                out = self.cls.forward(*args) if out is NotImplemented else out
                self.cls.setup_context(ctx, tuple(args), out)
                refuse_saved_inputs(ctx, args, out)
            else:
                out = self.cls.forward(ctx, *args)
            outs, self.rest = take_apart(out)
            tensors = [args[i] for i in self.where]
            self.asked = self.asked or ctx.asked_for_needs
            self.constant = [
                any(o is c for c in ctx.non_differentiable) or not inexact_dtype(o.dtype)
                for o in outs
            ]
            dirty = set(map(id, ctx.dirty_tensors))
            self.dirty = {
                k: j
                for k, o in enumerate(outs)
                for j, a in enumerate(tensors)
                if id(o) in dirty and a is o
            }
            residuals, kept = _Kept.of(ctx, [*outs, *tensors], level)
            return [value_of(o) for o in outs], residuals, kept

    def backward(
        self, kept: _Kept, residuals: Sequence[jax.Array], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Cotangents of the tensor arguments, with None for an argument without one; the given
        cotangents may be None too.
        """
        with push(PLAIN) as level, self._as_kept(kept, residuals, level) as tensors:
            ctx = kept.restored(tensors)
            given = iter(cotangents)
            cts = [next(given) if is_tensor else None for is_tensor in self.rest[2]]
            cts = [None if c is None else wrap(conj(c), self.device, level) for c in cts]
            method = self.cls.vjp if self.cls.vjp is not Function.vjp else self.cls.backward
            once = private.once_differentiable_inner(method)
            with torch.no_grad() if once else contextlib.nullcontext():
                grads = (once or method)(ctx, *cts)
            self.asked = self.asked or ctx.asked_for_needs
            grads = grads if isinstance(grads, tuple) else (grads,)
            if len(grads) < len(self.args):
                raise RuntimeError(
                    f"function {self.name}Backward returned an incorrect number of gradients "
                    f"(expected {len(self.args)}, got {len(grads)})"
                )
            out: list[Any] = []
            for i in self.where:
                v = (
                    None
                    if grads[i] is None
                    else _as_input(conj(value_of(grads[i])), self.args[i], self.name)
                )
                out.append(
                    _undifferentiable(v, *[c for c in cotangents if c is not None], *residuals)
                    if once and v is not None
                    else v
                )
            return out

    @contextlib.contextmanager
    def _as_kept(
        self, kept: _Kept, residuals: Sequence[jax.Array], level: Level
    ) -> Iterator[list[torch.Tensor]]:
        """While entered, the tensors that the context keeps have these values.

        An argument that requires grad is kept itself, as by PyTorch: the method may compute with it
        again, through what it has captured, and ask PyTorch's engine for gradients by it.
        """
        tensors: list[torch.Tensor] = []
        with contextlib.ExitStack() as until:
            for value, link in zip(residuals, kept.links, strict=True):
                k = -1 if link is None else link - len(self.constant)
                t = self.args[self.where[k]] if k >= 0 and self.may_capture else None
                if t is None or not t.requires_grad:
                    t = wrap(value, self.device, level)
                elif type(t) is Traced:
                    until.enter_context(having(t, node=Node(value, level)))
                else:
                    until.enter_context(having(lift(t), value=value))
                tensors.append(t)
            yield tensors

    def jvp(
        self, kept: _Kept, residuals: Sequence[jax.Array], tangents: Sequence[Any]
    ) -> list[Any]:
        """Tangents of the outputs; like the given ones, they may be None."""
        with push(PLAIN) as level:
            ctx = kept.restored([wrap(r, self.device, level) for r in residuals])
            ctx._pushing = True
            given = [None if t is None else wrap(t, self.device, level) for t in tangents]
            out = self.cls.jvp(ctx, *replaced([None] * len(self.args), self.where, given))
            return [
                None if t is None else value_of(t)
                for t in (out if isinstance(out, tuple | list) else [out])
            ]

    def run_for_changes(self) -> None:
        """Run the forward for what it does to Python objects alone."""
        args, ctx = tuple(self.args), Context((False,) * len(self.args))
        with torch.no_grad(), private.set_forward_mode_enabled(False):
            if self.cls.setup_context is Function.setup_context:
                self.cls.forward(ctx, *args)
                return
            out = self.cls.forward(*args)
            if not self.set_up_again:
                self.cls.setup_context(ctx, args, out)

    def run(self, values: Sequence[jax.Array], out: Any = None) -> Any:
        """The outputs for these values of the tensor arguments; out: the outputs of a forward that
        has run, which get the new values.
        """
        differentiating = innermost(DIFFERENTIATING)
        has_jvp = self.cls.jvp is not Function.jvp
        has_backward = (
            self.cls.backward is not Function.backward or self.cls.vjp is not Function.vjp
        )
        forward_mode = differentiating is not None and differentiating.kind.forward
        if forward_mode and not has_jvp and private_jax.in_trace(differentiating.probe, values):
            raise no_jvp(self.name, self.without_jvp)
        by_jvp = has_jvp and (forward_mode or not has_backward)
        self._stage(values, by_jvp)
        # without a backward, PyTorch's own raises its error
        f = self._with_jvp() if by_jvp else self._with_vjp()
        try:
            outs = f(self.constants, *values)
        except TypeError as error:
            if not is_no_jvp(error):
                raise
            raise no_jvp(self.name, self.without_jvp) from error
        # these are operands of the rules, and the outputs do not depend on them
        if any(self.constants):
            # each by itself: with jax_custom_jvp3, JAX makes zeros of the cotangents of outputs
            # that are not used, if another output of the same custom_jvp is used
            outs = [_of_inputs(o, *values) for o in outs]
        outs = outs if torch.is_grad_enabled() else operands.stop(outs)
        return self._finish(
            outs if private.forward_mode_enabled() else operands.stop_tangents(outs), out
        )

    def _stage(self, values: Sequence[jax.Array], by_jvp: bool) -> None:
        """Trace the methods, in a program that will be compiled.

        JAX calls the rules when the program is differentiated, maybe after its trace has closed;
        tensors that the methods capture would then become constants. So the methods are traced now,
        and the constants of their jaxprs, values of such tensors among them, are operands.
        """
        self._rules = [_Rules(self, values, self.requires_grad, by_jvp)]
        # nothing is differentiated by a constant
        every = [inexact(v) and isinstance(v, jax.core.Tracer) for v in values]
        # transforms around this program may differentiate by the others
        if self.asked and not by_jvp and self.requires_grad != every:
            try:
                self._rules.append(_Rules(self, values, every, by_jvp))
            except (OutsideOfView, SeededInside):
                raise
            except Exception as error:  # raised only if they do
                self._refused = error

    def _rules_for(self, needs: Sequence[bool]) -> _Rules:
        """The traced methods for the case that these tensor arguments need a gradient."""
        for rules in self._rules:
            if not any(n and not known for n, known in zip(needs, rules.needs, strict=True)):
                return rules
        if self._refused is not None:
            raise self._refused
        return self._rules[-1]

    def _with_vjp(self) -> Callable[..., Any]:
        @jax.custom_vjp
        def f(captured: Any, *values: jax.Array) -> list[Any]:
            return self._rules_for([False] * len(values)).forward(captured, values)[0]

        def fwd(captured: Any, *given: Any) -> tuple[list[Any], Any]:
            captured, values = (
                [[g.value for g in part] for part in captured],
                [g.value for g in given],
            )
            draw_again = drawing_again()
            rules = self._rules_for([bool(g.perturbed) for g in given])
            outs, residuals = rules.forward(captured, values)
            # at the enclosing levels the outputs have the Function's own derivative again
            if any(isinstance(v, jax.core.Tracer) for part in (values, *captured) for v in part):
                with draw_again():
                    outs = f(captured, *values)
            return outs, (captured, rules, rules.kept.linked(residuals, [*outs, *values]))

        def bwd(given: Any, cotangents: list[Any]) -> tuple[Any, ...]:
            captured, rules, residuals = given
            # PyTorch calls no backward then
            if all(isinstance(c, SymbolicZero) for c in cotangents):
                return None, *[None] * len(self.where)
            cts = [
                _materialized(c, rules.kept.materialize and not no)
                for c, no in zip(cotangents, self.constant, strict=True)
            ]
            return None, *rules.derivative(captured, residuals, cts)

        f.defvjp(fwd, bwd, symbolic_zeros=True)
        return f

    def _with_jvp(self) -> Callable[..., Any]:
        rules = self._rules_for(self.requires_grad)

        @jax.custom_jvp
        def f(captured: Any, *values: jax.Array) -> list[Any]:
            return rules.forward(captured, values)[0]

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            (captured, *values), (_, *tangents) = primals, tangents
            draw_again = drawing_again()
            _, residuals = rules.forward(captured, values)
            with draw_again():
                outs = f(captured, *values)
            given = [_materialized(t, rules.kept.materialize) for t in tangents]
            kept = rules.kept.linked(residuals, [*outs, *values])
            found = rules.derivative(captured, kept, given)
            return outs, [
                varying.no_tangent(o) if p is None else varying.like(p, o)
                for o, p in zip(outs, found, strict=True)
            ]

        f.defjvp(rule, symbolic_zeros=True)
        return f

    def _finish(self, outs: Sequence[Any], made: Any) -> Any:
        tensors = []
        earlier = take_apart(made)[0] or [None] * len(outs)
        for k, (v, constant, t) in enumerate(zip(outs, self.constant, earlier, strict=True)):
            if constant and inexact(v):
                v = operands.constant(v)
            if k in self.dirty:
                target = self.args[self.where[self.dirty[k]]]
                assign(target, v)
                # PyTorch returns an input without its history, unless it makes a node and the input
                # is marked as dirty
                tensors.append(
                    target
                    if _has_node(self.args, torch.is_grad_enabled())
                    else over(target.node, target)
                )
            elif type(t) is Traced and t.node.parent is None and not any(t is a for a in self.args):
                # the tensor stays the same object, because the context may have kept it
                t.node.value = v
                tensors.append(t)
            else:
                tensors.append(wrap(v, self.device))
        return put_together(tensors, self.rest)


@jax.tree_util.register_static
class _Rules:
    """The traced methods of a ``_Call``, which gets the constants of their jaxprs.

    Args:
        needs: for each tensor argument, what ``ctx.needs_input_grad`` says.

    Attributes:
        kept: the context without its tensors.
        called: whether only PyTorch's engine calls the user's backward before the jitted function
            returns; what it does to Python objects is done then.
    """

    kept: _Kept

    def __init__(
        self, call: _Call, values: Sequence[jax.Array], needs: Sequence[bool], by_jvp: bool
    ) -> None:
        self.called = innermost(DIFFERENTIATING) is None
        self.needs, self._constants = needs, call.constants
        self._derivatives: dict[tuple[bool, ...], Any] = {}

        # the method may ask whether two of its arguments are equal (torch.equal), which its own
        # trace cannot say of its inputs
        first = [
            next(k for k, other in enumerate(values) if private_jax.same_computation(other, v))
            for v in values
        ]

        def forward(*inputs: jax.Array) -> tuple[list[Any], list[Any]]:
            known = [_known_as(v, x) for v, x in zip(inputs, values, strict=True)]
            outs, residuals, self.kept = call.forward([known[k] for k in first], needs)
            return outs, residuals

        def derivative(
            pattern: Sequence[bool], residuals: list[Any], given: list[Any]
        ) -> list[Any]:
            source = iter(given)
            outer = [*[None] * len(call.constant), *values]
            residuals = [
                r if k is None or outer[k] is None else _known_as(r, outer[k])
                for r, k in zip(residuals, self.kept.links, strict=True)
            ]
            found = (call.jvp if by_jvp else call.backward)(
                self.kept, residuals, [next(source) if t else None for t in pattern]
            )
            return [
                jnp.zeros(x.shape, x.dtype) if v is None else v
                for v, x in pick([*zip(found, like, strict=True)], self._gives)
            ]

        draw_again = drawing_again()
        with gradient_hooks.without_changes() as changes:
            self._forward = self._closed(forward, *values)
        if changes and not call.has_run:  # what it keeps is to be of this trace
            with draw_again():
                call.run_for_changes()
        call.has_run = True
        outs, residuals = self._forward[0].shapes
        # what the derivative takes and gives: tangents of the values and of the outputs, or
        # cotangents of the outputs and of the values
        self._operands: Sequence[Any]
        self._operands, like = (values, outs) if by_jvp else (outs, values)
        self._takes, self._gives = tuple(map(inexact, self._operands)), [inexact(v) for v in like]
        if not by_jvp:
            self._takes = tuple(
                [t and not c for t, c in zip(self._takes, call.constant, strict=True)]
            )
        for pattern in self._patterns():
            try:
                with gradient_hooks.without_changes() as changes:
                    self._derivatives[pattern] = self._closed(
                        functools.partial(derivative, pattern),
                        residuals,
                        pick(self._operands, pattern),
                    )
                if changes:
                    self._note_changes(call.cls)
            except (OutsideOfView, SeededInside):
                raise
            except DataDependentError as error:
                if state.replaying:  # operator by operator, the method may ask for values
                    raise Unrecordable(str(error)) from error
                self._derivatives[pattern] = error
            except Exception as error:
                # raised only if JAX asks for the derivative, as PyTorch runs no backward before
                # that
                self._derivatives[pattern] = error

    def _note_changes(self, cls: type[Function]) -> None:
        """Note that a derivative changes Python objects, which a program does not."""
        if state.replaying:
            process.changing.update(rules_of(cls))
            raise Unrecordable(f"a derivative of {cls.__name__} that changes Python objects")
        if state.level.root.grads is not None:
            state.level.root.grads.hooks.append(self)

    def _closed(self, function: Callable[..., Any], *args: Any) -> tuple[Closed, int]:
        """The function traced on these arguments, and the place of what it captures."""
        found = Closed(function, *args)
        self._constants.append(found.captured)
        return found, len(self._constants) - 1

    def _patterns(self) -> list[tuple[bool, ...]]:
        """For each way in which the derivative may be asked for, which of its operands are arrays;
        the others are None.

        After ``set_materialize_grads(False)``, operands that are zero are None; if there are many,
        they are arrays of zeros.
        """
        if self.kept.materialize or sum(self._takes) > _NONE_AMONG:
            return [self._takes]
        return [
            p
            for p in itertools.product(*[(True, False) if t else (False,) for t in self._takes])
            if any(p)
        ]

    def forward(self, captured: Any, values: Sequence[jax.Array]) -> tuple[list[Any], list[Any]]:
        traced, place = self._forward
        return traced(captured[place], *values)

    def derivative(
        self, captured: Any, residuals: Sequence[jax.Array], given: Sequence[Any]
    ) -> list[Any]:
        pattern = tuple([t and g is not None for t, g in zip(self._takes, given, strict=True)])
        if pattern not in self._derivatives:
            pattern = self._takes
            given = [
                jnp.zeros(x.shape, x.dtype) if g is None else g
                for g, x in zip(given, self._operands, strict=True)
            ]
        rule = self._derivatives[pattern]
        if isinstance(rule, Exception):
            raise rule
        traced, place = rule
        found = iter(traced(captured[place], residuals, pick(given, pattern)))
        return [next(found) if gives else None for gives in self._gives]


def _known_as(inner: jax.Array, value: Any) -> Any:
    """A value as an input of a rule's own trace, which knows of it what the trace around knows."""
    if not isinstance(value, jax.core.Tracer):
        return value
    if (known := answers()) is not None:
        known.same(inner, value)
    return inner


def _materialized(t: Any, zeros: bool) -> Any:
    """A tangent or cotangent as a method of a Function gets it; one that JAX knows to be zero is an
    array of zeros or None.
    """
    if isinstance(t, SymbolicZero):
        t = jnp.zeros(t.aval.shape, t.aval.dtype) if zeros else None
    return None if t is not None and t.dtype == jax.dtypes.float0 else t


@dataclasses.dataclass(eq=False)
class _Kept:
    """A context without its tensors, which are residuals; ``restored`` makes a context with other
    tensors.
    """

    links: list[int | None]  # for each residual: which of the outputs and inputs it is
    rest: Any
    materialize: bool

    @classmethod
    def of(
        cls, ctx: Context, known: Sequence[torch.Tensor], level: Level
    ) -> tuple[list[Any], _Kept]:
        """The residuals and the rest of a context; known: the outputs and inputs."""
        tensors, rest = take_apart(vars(ctx))
        places = {id(t): k for k, t in reversed([*enumerate(known)])}
        made_here = [
            type(t) is Traced and t.node.root.level is level and id(t) not in places
            for t in tensors
        ]
        residuals = [
            operands.constant(value_of(t)) if made else value_of(t)
            for t, made in zip(tensors, made_here, strict=True)
        ]
        return residuals, cls([places.get(id(t)) for t in tensors], rest, ctx.materialize_grads)

    def linked(self, residuals: Sequence[jax.Array], known: Sequence[Any]) -> list[Any]:
        """The residuals, with the given values for those that are outputs or inputs; torch's
        autograd differentiates these alone.
        """
        return [r if k is None else known[k] for r, k in zip(residuals, self.links, strict=True)]

    def restored(self, tensors: Sequence[torch.Tensor]) -> Context:
        ctx = Context(())
        vars(ctx).update(put_together(tensors, self.rest))
        return ctx


def _as_input(v: jax.Array, given: torch.Tensor, name: str) -> jax.Array:
    """A gradient summed to its input's shape, against which it was broadcast, and cast to its
    dtype, as torch's engine does.
    """
    shape = tuple(given.shape)
    lead = v.ndim - len(shape)
    if lead < 0 or any(n not in (1, m) for n, m in zip(shape, v.shape[lead:], strict=True)):
        raise RuntimeError(
            f"Function {name}Backward returned an invalid gradient: got shape {list(v.shape)} but "
            f"expected shape compatible with {list(shape)}"
        )
    if jnp.iscomplexobj(v) and not given.is_complex():
        raise RuntimeError(
            f"Function {name}Backward returned an invalid gradient: a complex one for an input of "
            f"dtype {given.dtype}; return its real part"
        )
    axes = [*range(lead), *[lead + i for i, n in enumerate(shape) if n != v.shape[lead + i]]]
    total = v.sum(axes).reshape(shape) if axes else v
    return cast(total, dtypes.to_jax(given.dtype)) if inexact_dtype(given.dtype) else total


@jax.jit
def of_inputs_alone(out: jax.Array, inputs: Sequence[jax.Array]) -> jax.Array:
    """The output; by this function's name in a jaxpr ``bridge.jit.program`` sees that it depends on
    the inputs and on nothing else.

    It uses the inputs without effect, because JAX drops unused values from a program.
    """
    out, inputs = jax.lax.stop_gradient((out, inputs))
    nothing = sum(jnp.sum(jnp.real(v).reshape(-1)[:0]) for v in jax.tree_util.tree_leaves(inputs))
    return jnp.where(jnp.zeros(out.shape, bool), jnp.asarray(nothing).astype(out.dtype), out)


@jax.custom_jvp
def _of_inputs(out: jax.Array, *inputs: jax.Array) -> jax.Array:
    return of_inputs_alone(out, inputs)


@functools.partial(_of_inputs.defjvp, symbolic_zeros=True)
def _of_inputs_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    given, *others = tangents
    if all(isinstance(t, SymbolicZero) for t in others):
        given = jax.custom_derivatives.zero_from_primal(primals[0], symbolic_zeros=True)
    return _of_inputs(*primals), given


def _undifferentiable(v: jax.Array, *sources: jax.Array) -> jax.Array:
    """The value; its derivative raises, which in reverse mode the backward pass does,
    as PyTorch's.
    """
    return (
        gradient_hooks.refused_in_backward(v, sources, _refused)
        if innermost(FORWARD) is None
        else _only_value(v, *sources)
    )


@jax.custom_jvp
def _only_value(v: jax.Array, *sources: jax.Array) -> jax.Array:
    return v


def _refused(*_: Any) -> Any:
    raise RuntimeError(
        "trying to differentiate twice a function that was marked with @once_differentiable"
    )


@functools.partial(_only_value.defjvp, symbolic_zeros=True)
def _refused_tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    constant = all(isinstance(t, SymbolicZero) or t.dtype == jax.dtypes.float0 for t in tangents)
    return (primals[0], tangents[0]) if constant else _refused()


intercepted.apply = forward_in_trace
