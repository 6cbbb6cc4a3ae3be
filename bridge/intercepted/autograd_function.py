"""torch.autograd.Function inside a trace: the user's own derivatives become JAX's custom rules.

JAX would differentiate through a Function's forward, but torch calls its backward (or jvp).  While a trace is open, the functions of
this file run instead of a Function's forward.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils.checkpoint
from torch.nn.modules._functions import BackwardHookFunction

from bridge import private
from bridge.boundary import autograd
from bridge.boundary.autograd import Untransformed
from bridge.boundary.results import conj, inexact, inexact_dtype, put_together, take_apart
from bridge.convert import trees
from bridge.errors import at_line, is_no_jvp, no_jvp
from bridge.intercepted import gradient_hooks
from bridge.intercepted.captured_by_rules import Closed, followed
from bridge.intercepted.checkpointing import rematerialized
from bridge.lowering.registry import LOWERINGS
from bridge.operators import operands
from bridge.process import process
from bridge.record import entries
from bridge.trace.aliasing import read
from bridge.trace.levels import Level, around, innermost, push, state
from bridge.trace.random_keys import SeededInside
from bridge.trace.requires_grad import stopped_by_torch
from bridge.trace.storage import Node, OutsideOfView
from bridge.trace.tracing import HANDED_IN, Traced, assign, dispatch, node_of, over, value_of, wrap

Function = torch.autograd.Function
_lock = threading.Lock()


@contextmanager
def intercepted() -> Iterator[None]:
    """While any thread has entered this, Function.apply, checkpoint and control flow check whether their thread has a trace open."""
    with _lock:
        if process.open_traces == 0:
            private.redirect(True)
            private.answer_apply(_forward_in_trace)
        process.open_traces += 1  # last: if one of these raises, the next trace tries again
    try:
        yield
    finally:
        with _lock:
            process.open_traces -= 1
            if process.open_traces == 0:
                private.answer_apply(None)
                private.redirect(False)


def _forward_in_trace(cls: type[Function], recording: bool, forward_mode: bool) -> Callable[..., Any] | None:
    """The function that PyTorch runs instead of a Function's forward if this thread has a trace open; None: the forward itself.

    PyTorch makes its own graph node for the outputs, which a ``torch.autograd.grad`` inside the trace uses; JAX differentiates by the
    rules of ``_Call``.

    Args:
        cls: the Function.
        recording, forward_mode: whether grad mode and forward-mode AD were on when it was applied.
    """
    if issubclass(cls, Untransformed):
        return None
    if state.level is None:
        if state.recorder is not None:
            return entries.PARTS["function"](cls, recording)
        private.outside_of_traces("autograd.Function")
        return None
    new_style = cls.setup_context is not Function.setup_context

    def forward(*given: Any) -> Any:
        ctx, args = (None, given) if new_style else (given[0], given[1:])
        if not any(isinstance(a, torch.Tensor) for a in args):
            return cls.forward(*given)
        with torch.set_grad_enabled(recording), private.set_forward_mode_enabled(forward_mode):
            out = _applied(cls, ctx, args)
        if new_style and not _has_node(args, recording):
            private.skip_setup_context(cls)
        return out

    return forward


def _has_node(args: Sequence[Any], recording: bool) -> bool:
    """Whether PyTorch makes a graph node for a Function that is applied to these arguments."""
    return recording and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


def _applied(cls: type[Function], ctx: Any, args: tuple[Any, ...]) -> Any:
    """The outputs of a Function; ctx: PyTorch's own context if the forward takes one, else None."""
    if cls is torch.utils.checkpoint.CheckpointFunction:
        return rematerialized(args[0], args[2:], {})
    if cls is BackwardHookFunction and ctx is not None:
        return gradient_hooks.module_hooks(ctx, args)
    op = private.operator_without_formula(cls)
    if op in LOWERINGS:  # a torch.library operator without a derivative; its lowering has one
        return dispatch(op, args[:-1], args[-1].keyword_only_args)
    if innermost("vmap") is not None:
        leaves, spec = trees.flatten(args)
        every = [value_of(x) if isinstance(x, torch.Tensor) else None for x in leaves]
        if private.mapped(every):
            if cls.setup_context is not Function.setup_context:
                private.check_vmap_rules(cls)
            lanes = private.Lanes.of(every)
            if lanes is not None and _has_own_vmap(cls):
                return _by_own_vmap(cls, lanes, leaves, every, spec)
    call = _Call(cls, args)
    values = [value_of(args[i]) for i in call.where]
    if ctx is None or not _has_node(args, torch.is_grad_enabled()):
        return call.run(values)
    with torch.no_grad(), private.set_forward_mode_enabled(False):
        out = cls.forward(ctx, *args)  # it fills PyTorch's own context
    return call.run(values, out)


def _has_own_vmap(cls: type[Function]) -> bool:
    return cls.vmap is not Function.vmap and not cls.generate_vmap_rule


def _by_own_vmap(cls: type[Function], lanes: private.Lanes, leaves: Sequence[Any], values: Sequence[Any], spec: Any) -> Any:
    """The outputs of a Function by its vmap staticmethod, which runs outside of the vmap; transforms around the vmap differentiate it.

    Args:
        leaves, spec: the flattened arguments.
        values: those of the tensors among the leaves.
    """
    inside = state.level
    assert inside is not None
    captured = followed(cls, *[x for x in leaves if not isinstance(x, torch.Tensor)])
    if any(lanes.joined(read(node, inside))[1] is not None for node in captured):
        raise RuntimeError(
            f"{cls.__name__}.vmap: one of its methods uses a tensor from outside that is mapped too, and vmap cannot tell it along which "
            f"dimension; pass that tensor to apply as an argument{at_line()}"
        )
    mapping = next((level for level in around() if level.kind == "vmap" and private.same_trace(level.probe, lanes.trace)), None)
    info = private.vmap_info(lanes.size, "error" if mapping is None else mapping.randomness or "error")
    joined = [lanes.joined(v) for v in values]
    state.level = inside if mapping is None else mapping.parent
    try:
        with lanes.outside(), push("plain") as level:
            given = [wrap(v, x.device, level) if isinstance(x, torch.Tensor) else x for x, (v, _) in zip(leaves, joined, strict=True)]
            args = trees.unflatten(spec, given)
            result = cls.vmap(info, tuple(trees.unflatten(spec, [d for _, d in joined])), *args)

            def lane(t: torch.Tensor, dim: int | None) -> torch.Tensor:
                dim = dim if dim is None or dim >= 0 else dim + t.dim()
                return wrap(lanes.apart(value_of(t), dim), t.device, inside)

            out = private.results_of_rule(result, args, trees.unflatten(spec, leaves), lane)
            written = [
                (x, lanes.apart(value_of(t), d), t.node.detached)
                for x, t, (_, d) in zip(leaves, given, joined, strict=True) if type(t) is Traced and t.node.version
            ]
    finally:
        state.level = inside
    for x, value, detached in written:
        assign(x, value, detached)
    return out


class Context:
    """The ctx argument of a Function's static methods."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self._saved: tuple[Any, ...] = ()
        self._saved_forward: tuple[Any, ...] = ()
        self._dirty: tuple[Any, ...] = ()
        self._constant: tuple[Any, ...] = ()
        self._materialize = True
        self._pushing = False  # in jvp: saved_tensors are those of save_for_forward

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self._saved = tensors

    def save_for_forward(self, *tensors: torch.Tensor | None) -> None:
        self._saved_forward = tensors

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        first, second = (self._saved_forward, self._saved) if self._pushing else (self._saved, self._saved_forward)
        return first or second

    saved_variables = saved_tensors

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        self._dirty = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self._constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._materialize = value

    def mark_shared_storage(self, *pairs: Any) -> None:
        """Has no effect; it is deprecated in torch and has none there either."""


def refuse_saved_inputs(ctx: Context, args: Sequence[Any], out: Any) -> None:
    """Raise PyTorch's error if a new-style Function saves an input that it also returns, and does not mark it as dirty."""
    saved = [s for s in (*ctx._saved, *ctx._saved_forward) if s is not None and not any(s is d for d in ctx._dirty)]
    if any(s is a and s is o for s in saved for a in args for o in trees.flatten(out)[0]):
        raise RuntimeError(
            "An input that has been returned as-is as output is being saved for backward. This is not supported if you override "
            "setup_context. You should return and save a view of the input instead, e.g. with x.view_as(x) or setup ctx inside the "
            "forward function itself."
        )


class _Call:
    """One call of a Function inside a trace."""

    def __init__(self, cls: type[Function], args: tuple[Any, ...]) -> None:
        self.cls, self.args = cls, args
        self.where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        self.device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
        self.new_style = cls.setup_context is not Function.setup_context
        self.rest: Any = None  # what ``take_apart`` leaves of the outputs
        self.dirty: list[tuple[int, int]] = []
        self.constant: list[bool] = []
        self.outer: list[Node] = []

    def _given(self, outer: Sequence[jax.Array]) -> contextlib.AbstractContextManager[None]:
        return autograd.in_place_of(self.outer, outer) if outer else contextlib.nullcontext()

    # -- the user's methods on JAX values ----------------------------------------------------------------------------------
    def _wrapped(self, values: Sequence[jax.Array], level: Level) -> list[Any]:
        args = list(self.args)
        for i, v in zip(self.where, values, strict=True):
            args[i] = wrap(v, self.args[i].device, level)
        return args

    def forward(
        self, values: Sequence[jax.Array], needs: Sequence[bool], outer: Sequence[jax.Array] = ()
    ) -> tuple[list[Any], list[Any], _Kept]:
        """Run the Function's forward: outputs, residuals (every tensor that the context keeps) and the context without its tensors.

        outer: values to use for ``self.outer`` instead of the nodes' own, here and in the methods below; empty: the nodes' own.
        """
        flags = [False] * len(self.args)
        for i, n in zip(self.where, needs, strict=True):
            flags[i] = n
        ctx = Context(tuple(flags))
        with (
            push("function") as level, self._given(outer), torch.no_grad(), private.set_forward_mode_enabled(False),
        ):  # fmt: skip
            args = self._wrapped(values, level)
            for a, n in zip(args, flags, strict=True):
                if n and inexact_dtype(a.dtype):
                    a.requires_grad_()
            if self.new_style:
                out = self._outputs(args)
                self.cls.setup_context(ctx, tuple(args), out)
                refuse_saved_inputs(ctx, args, out)
            else:
                out = self.cls.forward(ctx, *args)
            outs, self.rest = take_apart(out)
            self.constant = [any(o is c for c in ctx._constant) or not inexact_dtype(o.dtype) for o in outs]
            self.dirty = [
                (k, j) for k, o in enumerate(outs) for j, i in enumerate(self.where) if any(o is d for d in ctx._dirty) and args[i] is o
            ]
            residuals: list[Any] = []
            kept = _Kept(ctx, residuals, [*outs, *[args[i] for i in self.where]], level)
            return [value_of(o) for o in outs], residuals, kept

    def _outputs(self, args: list[Any]) -> Any:
        """What a new-style forward returns, or in a vmap the Function's own vmap."""
        if _has_own_vmap(self.cls):
            leaves, spec = trees.flatten(args)
            values = [value_of(x) if isinstance(x, torch.Tensor) else None for x in leaves]
            lanes = private.Lanes.of(values)
            if lanes is not None:
                return _by_own_vmap(self.cls, lanes, leaves, values, spec)
        return self.cls.forward(*args)

    def backward(
        self, kept: _Kept, residuals: Sequence[jax.Array], cotangents: Sequence[Any], outer: Sequence[jax.Array] = ()
    ) -> list[Any]:
        """Cotangents of the tensor arguments, with None for an argument without one; the given cotangents may be None too."""
        with push("plain") as level, self._given(outer):
            ctx = kept.restored(residuals, self.device, level)
            given = iter(cotangents)
            cts = [next(given) if is_tensor else None for is_tensor in self.rest[2]]
            cts = [None if c is None else wrap(conj(c), self.device, level) for c in cts]
            method = self.cls.vjp if self.cls.vjp is not Function.vjp else self.cls.backward
            once = private.once_differentiable_inner(method)
            with torch.no_grad() if once else contextlib.nullcontext():
                grads = (once or method)(ctx, *cts)
            grads = grads if isinstance(grads, tuple) else (grads,)
            if len(grads) < len(self.args):
                raise RuntimeError(
                    f"function {self.cls.__name__}Backward returned an incorrect number of gradients (expected {len(self.args)}, "
                    f"got {len(grads)})"
                )
            out: list[Any] = []
            for i in self.where:
                g = grads[i]
                if g is None:
                    out.append(None)
                    continue
                v = conj(value_of(g))
                if v.shape != tuple(self.args[i].shape):
                    v = _summed(v, tuple(self.args[i].shape), self.cls.__name__)
                out.append(_undifferentiable(v, *[c for c in cotangents if c is not None], *residuals) if once else v)
            return out

    def jvp(self, kept: _Kept, residuals: Sequence[jax.Array], tangents: Sequence[Any], outer: Sequence[jax.Array] = ()) -> list[Any]:
        with push("plain") as level, self._given(outer):
            ctx = kept.restored(residuals, self.device, level)
            ctx._pushing = True
            given = iter(tangents)
            every = []
            for a in self.args:
                t = next(given) if isinstance(a, torch.Tensor) else None
                every.append(None if t is None else wrap(t, self.device, level))
            out = self.cls.jvp(ctx, *every)
            leaves = list(out) if isinstance(out, tuple | list) else [out]
            return [None if t is None else value_of(t) for t in leaves]

    # -- as JAX functions with rules of their own --------------------------------------------------------------------------
    def run(self, values: Sequence[jax.Array], out: Any = None) -> Any:
        """The outputs for these values of the tensor arguments; out: the outputs of a forward that has run, which get the new values."""
        level = state.level
        differentiating = innermost("grad", "jvp")
        has_jvp = self.cls.jvp is not Function.jvp
        has_backward = self.cls.backward is not Function.backward or self.cls.vjp is not Function.vjp
        forward_mode = differentiating is not None and differentiating.kind == "jvp"
        if forward_mode and not has_jvp and has_backward and private.perturbed(values, differentiating):
            raise no_jvp(self.cls.__name__)
        staged = level.root.staged
        self.outer = followed(self.cls, *[a for a in self.args if not isinstance(a, torch.Tensor)])
        captured: Any = [read(node, level) for node in self.outer]
        if has_jvp and (forward_mode or not has_backward):
            f, *constants = self._staged_with_jvp(values) if staged else (self._with_jvp(),)
        elif has_backward:
            f, *constants = self._staged_with_vjp(values) if staged else (self._with_vjp(),)
        else:
            f, constants = self._constant, []
        try:
            outs = _called(f, (captured, *constants), values)
        except TypeError as error:
            if not is_no_jvp(error):
                raise
            raise no_jvp(self.cls.__name__) from error
        outs = outs if torch.is_grad_enabled() else operands.stop(outs)
        return self._finish(outs if private.forward_mode_enabled() else operands.stop_tangents(outs), out)

    def _constant(self, captured: Any, *values: jax.Array) -> list[Any]:
        return [jax.lax.stop_gradient(v) if inexact(v) else v for v in self.forward(values, [False] * len(values))[0]]

    def _with_vjp(self) -> Callable[..., Any]:
        @jax.custom_vjp
        def f(captured: Any, *values: jax.Array) -> list[Any]:
            return self.forward(values, [True] * len(values), captured[0])[0]

        def fwd(captured: Any, *given: Any) -> tuple[list[Any], Any]:
            captured = ([g.value for g in captured[0]],)
            values = [g.value for g in given]
            outs, residuals, kept = self.forward(values, [bool(g.perturbed) for g in given], captured[0])
            # at the enclosing levels the outputs have the Function's own derivative again
            outside = any(isinstance(v, jax.core.Tracer) for v in (*values, *captured[0]))
            again = _called(f, captured, values) if outside else outs
            return again, (captured, kept.linked(residuals, [*again, *values]), kept)

        def bwd(given: Any, cotangents: list[Any]) -> tuple[Any, ...]:
            captured, residuals, kept = given
            zero: Any = jax.custom_derivatives.SymbolicZero
            cts = []
            for c, constant in zip(cotangents, self.constant, strict=True):
                if isinstance(c, zero):
                    c = jnp.zeros(c.aval.shape, c.aval.dtype) if kept.materialize and not constant else None
                cts.append(c if c is None or c.dtype != jax.dtypes.float0 else None)
            return None, *self.backward(kept, residuals, cts, captured[0])

        f.defvjp(fwd, bwd, symbolic_zeros=True)
        return f

    def _with_jvp(self) -> Callable[..., Any]:
        @jax.custom_jvp
        def f(captured: Any, *values: jax.Array) -> list[Any]:
            return self.forward(values, [True] * len(values), captured[0])[0]

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            (captured, *primals), (_, *tangents) = primals, tangents
            zero: Any = jax.custom_derivatives.SymbolicZero
            outs, residuals, kept = self.forward(primals, [not isinstance(t, zero) for t in tangents], captured[0])
            given = [
                (jnp.zeros(t.aval.shape, t.aval.dtype) if kept.materialize else None) if isinstance(t, zero) else t for t in tangents
            ]
            given = [None if t is not None and t.dtype == jax.dtypes.float0 else t for t in given]
            again = _called(f, captured, primals)
            found = self.jvp(kept, kept.linked(residuals, [*again, *primals]), given, captured[0])
            return again, [
                jnp.zeros_like(o) if p is None and inexact(o) else jnp.zeros(o.shape, jax.dtypes.float0) if p is None else p
                for o, p in zip(outs, found, strict=True)
            ]

        f.defjvp(rule, symbolic_zeros=True)
        return f

    # If the program will be compiled, JAX calls these rules when the program is differentiated, maybe after its trace has closed.  Tensors
    # that the methods capture would then become constants.  So the methods are traced now as jaxprs, and the constants of the jaxprs, the
    # values of captured tensors among them, become operands.
    def _staged_with_vjp(self, values: Sequence[jax.Array]) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        kept: Any = None
        differentiable: list[bool] = []

        def forward(*values: jax.Array) -> tuple[list[Any], list[Any]]:
            nonlocal kept
            outs, residuals, kept = self.forward(values, [True] * len(values))
            differentiable[:] = [inexact(o) and not c for o, c in zip(outs, self.constant, strict=True)]
            return outs, residuals

        def backward(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
            given = iter(cotangents)
            cts = [next(given) if d else None for d in differentiable]
            grads = self.backward(kept, residuals, cts)
            return [jnp.zeros(v.shape, v.dtype) if g is None else g for g, v in zip(grads, values, strict=True) if inexact(v)]

        forward_jaxpr = Closed(forward, *values)
        outs, residuals = forward_jaxpr.shapes
        backward_jaxpr: Closed | None = None
        refused: Exception | None = None
        try:
            backward_jaxpr = Closed(backward, residuals, [o for o, d in zip(outs, differentiable, strict=True) if d])
        except (OutsideOfView, SeededInside):
            raise
        except Exception as error:  # raised only if JAX asks for the derivative, as PyTorch runs no backward before that
            refused = error

        @jax.custom_vjp
        def f(captured: Any, *values: jax.Array) -> list[Any]:
            return forward_jaxpr(captured[1], *values)[0]

        def fwd(captured: Any, *values: jax.Array) -> tuple[list[Any], Any]:
            _, residuals = forward_jaxpr(captured[1], *values)
            outs = _called(f, captured, values)  # at the enclosing levels the outputs have the Function's own derivative again
            return outs, (captured, kept.linked(residuals, [*outs, *values]))

        def bwd(given: Any, cotangents: list[Any]) -> tuple[Any, ...]:
            captured, residuals = given
            if backward_jaxpr is None:
                raise refused
            grads = iter(backward_jaxpr(captured[2], residuals, [c for c, d in zip(cotangents, differentiable, strict=True) if d]))
            return None, *[next(grads) if inexact(v) else None for v in values]

        f.defvjp(fwd, bwd)
        return f, forward_jaxpr.captured, [] if backward_jaxpr is None else backward_jaxpr.captured

    def _staged_with_jvp(self, values: Sequence[jax.Array]) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        kept: Any = None

        def forward(*values: jax.Array) -> tuple[list[Any], list[Any]]:
            nonlocal kept
            outs, residuals, kept = self.forward(values, [True] * len(values))
            return outs, residuals

        def push_forward(residuals: list[Any], tangents: list[Any]) -> list[Any]:
            given = iter(tangents)
            pushed = self.jvp(kept, residuals, [next(given) if inexact(v) else None for v in values])
            return [jnp.zeros(o.shape, o.dtype) if t is None else t for t, o in zip(pushed, outs, strict=True) if inexact(o)]

        forward_jaxpr = Closed(forward, *values)
        outs, residuals = forward_jaxpr.shapes
        tangent_jaxpr = Closed(push_forward, residuals, [v for v in values if inexact(v)])

        @jax.custom_jvp
        def f(captured: Any, *values: jax.Array) -> list[Any]:
            return forward_jaxpr(captured[1], *values)[0]

        @f.defjvp
        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            captured, *values = primals
            _, residuals = forward_jaxpr(captured[1], *values)
            outs = _called(f, captured, values)
            given = [t for v, t in zip(values, tangents[1:], strict=True) if inexact(v)]
            pushed = iter(tangent_jaxpr(captured[2], kept.linked(residuals, [*outs, *values]), given))
            return outs, [next(pushed) if inexact(o) else np.zeros(o.shape, jax.dtypes.float0) for o in outs]

        return f, forward_jaxpr.captured, tangent_jaxpr.captured

    def _finish(self, outs: Sequence[Any], made: Any) -> Any:
        tensors = []
        dirty = dict(self.dirty)
        earlier = [x for x in trees.flatten(made)[0] if isinstance(x, torch.Tensor)] if made is not None else None
        for k, (v, constant) in enumerate(zip(outs, self.constant, strict=True)):
            if constant and inexact(v):
                v = stopped_by_torch(v) if state.level.root.staged else jax.lax.stop_gradient(v)
            if k in dirty:
                target = self.args[self.where[dirty[k]]]
                assign(target, v)
                # PyTorch returns an input without its history, unless it makes a node and the input is marked as dirty
                tensors.append(target if _has_node(self.args, torch.is_grad_enabled()) else over(target.node, target))
            elif earlier is not None and self._is_new(earlier[k]):
                node_of(earlier[k]).value = v  # the tensor stays the same object, because the context may have kept it
                tensors.append(earlier[k])
            else:
                tensors.append(wrap(v, self.device))
        return put_together(tensors, self.rest)

    def _is_new(self, t: torch.Tensor) -> bool:
        """Whether a tensor owns its memory and is not one of the arguments."""
        return type(t) is Traced and t.node.parent is None and not any(t is a for a in self.args)


@jax.tree_util.register_static
class _Kept:
    """A context without its tensors, which are residuals; ``restored`` makes a context with new tensors for a level of transforms."""

    def __init__(self, ctx: Context, residuals: list[Any], known: Sequence[torch.Tensor], level: Level) -> None:
        self.materialize = ctx._materialize
        self.links: list[int | None] = []  # for each residual: which of the known tensors it is
        places = {id(t): k for k, t in reversed(list(enumerate(known)))}
        self.fields: dict[str, Any] = {}
        for name, held in ctx.__dict__.items():
            tensors, rest = take_apart(held)
            self.fields[name] = (slice(len(residuals), len(residuals) + len(tensors)), rest)
            for x in tensors:
                self.links.append(places.get(id(x)))
                made_here = type(x) is Traced and x.node.root.level is level and id(x) not in places
                residuals.append(operands.constant(value_of(x)) if made_here else value_of(x))

    def linked(self, residuals: Sequence[jax.Array], known: Sequence[Any]) -> list[Any]:
        """The residuals, with the given values for those that are outputs or inputs; torch's autograd differentiates these alone."""
        return [r if k is None else known[k] for r, k in zip(residuals, self.links, strict=True)]

    def restored(self, residuals: Sequence[jax.Array], device: torch.device, level: Level) -> Context:
        ctx = Context(())
        for name, (where, rest) in self.fields.items():
            ctx.__dict__[name] = put_together([wrap(r, device, level) for r in residuals[where]], rest)
        return ctx


def _summed(v: jax.Array, shape: tuple[int, ...], name: str) -> jax.Array:
    """A gradient that was broadcast against its input, summed to the input's shape, as torch's engine does."""
    try:
        jnp.broadcast_shapes(v.shape, shape)
    except ValueError:
        raise RuntimeError(
            f"Function {name}Backward returned an invalid gradient: got shape {list(v.shape)} but expected shape "
            f"compatible with {list(shape)}"
        ) from None
    lead = v.ndim - len(shape)
    v = v.sum(tuple(range(lead))) if lead > 0 else v
    axes = tuple(i for i, (a, b) in enumerate(zip(v.shape, shape, strict=True)) if b == 1 and a != 1)
    return v.sum(axes, keepdims=True) if axes else jnp.broadcast_to(v, shape)


def _called(f: Callable[..., Any], captured: Any, values: Sequence[jax.Array]) -> list[Any]:
    """f's outputs, which depend on the values but not on the captured tensors that are operands of its rules."""
    outs = f(captured, *values)
    return _of_inputs(outs, *values) if any(captured) else outs


@jax.jit
def of_inputs_alone(outs: list[jax.Array], inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """The outputs; by this function's name in a jaxpr ``bridge.jit.program`` sees that they depend on the inputs and on nothing else.

    It uses the inputs without effect, because JAX drops unused values from a program.
    """
    outs, inputs = jax.lax.stop_gradient((outs, inputs))
    nothing = sum(jnp.sum(jnp.real(v).reshape(-1)[:0]) for v in jax.tree_util.tree_leaves(inputs))
    return [jnp.where(jnp.zeros(o.shape, bool), jnp.asarray(nothing).astype(o.dtype), o) for o in outs]


@jax.custom_jvp
def _of_inputs(outs: list[jax.Array], *inputs: jax.Array) -> list[jax.Array]:
    return of_inputs_alone(outs, inputs)


def _of_inputs_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    given, *others = tangents
    if all(isinstance(t, jax.custom_derivatives.SymbolicZero) for t in others):
        given = [jax.custom_derivatives.zero_from_primal(o, symbolic_zeros=True) for o in primals[0]]
    return _of_inputs(*primals), given


_of_inputs.defjvp(_of_inputs_jvp, symbolic_zeros=True)


def _undifferentiable(v: jax.Array, *sources: jax.Array) -> jax.Array:
    """The value; its derivative raises, which in reverse mode the backward pass does, as PyTorch's."""
    return (_only_value if innermost("jvp") is not None else _only_forward)(v, *sources)


@jax.custom_jvp
def _only_value(v: jax.Array, *sources: jax.Array) -> jax.Array:
    return v


def _refused(*_: Any) -> Any:
    raise RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable")


def _refused_tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    constant = all(isinstance(t, jax.custom_derivatives.SymbolicZero) or t.dtype == jax.dtypes.float0 for t in tangents)
    return (primals[0], tangents[0]) if constant else _refused()


_only_value.defjvp(_refused_tangent, symbolic_zeros=True)


@jax.custom_vjp
def _only_forward(v: jax.Array, *sources: jax.Array) -> jax.Array:
    return v


_only_forward.defvjp(lambda v, *sources: (v, None), _refused)


HANDED_IN["intercepted"] = intercepted
