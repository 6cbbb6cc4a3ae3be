"""Hooks on gradients inside a trace: ``Tensor.register_hook`` and full backward hooks of modules.

PyTorch's engine calls a hook when a gradient reaches a tensor. JAX's derivatives do not pass
through that engine, so a hook becomes a part of the computation: an identity whose derivative calls
it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import torch
from torch.utils.hooks import RemovableHandle

from bridge import private, private_calls
from bridge.boundary.results import conj
from bridge.errors import CalledItself, at_line
from bridge.intercepted.captured_by_rules import Closed
from bridge.private_calls import intercepted
from bridge.process import having
from bridge.programs.holders import undone
from bridge.trace.levels import Level, innermost, push, refuse_in_loop, state
from bridge.trace.tracing import HANDED_IN, Traced, traced_python, value_of, wrap
from bridge.transform_kinds import BLOCK, DIFFERENTIATING, PLAIN, REVERSE


def _refuse_forward_mode() -> None:
    """Refuse a hook if the innermost differentiating transform is a forward-mode one: JAX has no
    tangent of a value with a hook.
    """
    inner = innermost(DIFFERENTIATING)
    if inner is not None and inner.kind.forward:
        raise NotImplementedError(
            "a hook on gradients (Tensor.register_hook, register_full_backward_hook) inside jvp: "
            "JAX has no forward-mode derivative of a value with a hook; register it outside of "
            f"jvp, or use a reverse-mode transform{at_line()}"
        )


def refuse_inside_blocks(t: Any) -> None:
    """Refuse to give the gradient of what a block of a loop hands on to the next one."""
    if type(t) is Traced and t.node.loop is not None:
        raise t.node.loop("the gradient is asked for of what a block hands on to the next one")


def retain_grad(func: Callable[..., Any], t: Any) -> None:
    """``Tensor.retain_grad`` of a traced tensor."""
    refuse_inside_blocks(t)
    func(t)


def register_hook(func: Callable[..., Any], t: Any, hook: Callable[..., Any]) -> RemovableHandle:
    """``Tensor.register_hook`` of a traced tensor: PyTorch registers the hook for its engine, and
    JAX's derivatives call it too.
    """
    refuse_inside_blocks(t)
    if t.node.used:
        _refuse(
            "register_hook: the tensor has been used already, and inside a transform a hook sees "
            "the gradients of later uses only; register it right after the tensor is made"
        )
    refuse_in_loop("a hook on gradients", BLOCK)
    hooked, value, hooks = t.node.hooked or (None, None, [])
    if value_of(t) is not hooked:
        value, hooks = value_of(t), []
    _refuse_forward_mode()
    new = _TensorHook(hook, t, value)
    handle = new.handle = func(t, new.by_engine())
    new.hooks = handle.hooks_dict_ref()
    hooks = [*hooks, new]
    t.node.value = hooked = _observed(value, hooks, private.saved_by_its_operator(t))
    t.node.seen = t.node.root.version
    t.node.hooked = (hooked, value, hooks)
    return handle


def _register_multi_grad_hook(*_: Any, **__: Any) -> NoReturn:
    _refuse(
        "register_multi_grad_hook: inside a transform the derivative is JAX's, which does not "
        "tell PyTorch's engine which gradients are still to come; register a hook on each "
        "tensor, with Tensor.register_hook"
    )


def _refuse(reason: str) -> NoReturn:
    """Refuse a hook that JAX's derivative cannot call; jit calls the function itself then."""
    if state.level.root.grads is not None:
        raise CalledItself(reason)
    raise NotImplementedError(reason + at_line())


class _TensorHook:
    """A hook on the gradient of one tensor, as a function of JAX's cotangents.

    It is traced now: the tensors that it captures must become inputs of the program. What it does
    to Python objects is done when PyTorch's engine calls it.
    """

    handle: RemovableHandle
    hooks: Any  # all that are registered

    def __init__(self, hook: Callable[..., Any], t: torch.Tensor, value: jax.Array) -> None:
        self.hook, self.device, self.called = hook, t.device, False
        with without_changes() as changes:
            self.closed = Closed(self._call, value)
        grads = state.level.root.grads
        if changes and grads is not None:
            grads.hooks.append(self)

    def by_engine(self) -> Callable[[torch.Tensor], Any]:
        """The hook as PyTorch's engine is to call it."""

        @functools.wraps(self.hook)
        def run(gradient: torch.Tensor) -> Any:
            self.called = True
            return self.hook(gradient)

        return run

    def __call__(self, captured: Any, cotangent: jax.Array) -> jax.Array:
        return self.closed(captured, cotangent) if self.handle.id in self.hooks else cotangent

    def _call(self, cotangent: jax.Array) -> jax.Array:
        with push(PLAIN) as level, torch.enable_grad(), in_users_code():
            return _replaced(self.hook, wrap(conj(cotangent), self.device, level), cotangent)


@contextlib.contextmanager
def without_changes() -> Iterator[list[str]]:
    """While entered, a hook, a backward or a block may change the objects that a jitted function
    reaches; at the end the changes are undone, and the list says what they are.
    """
    before = [(holder, owner, holder.read(owner)) for holder, owner in state.level.root.owners]
    changes: list[str] = []
    try:
        yield changes
    finally:
        changes += [each[0].named(key) for each in before for _, key, _ in undone(*each)]


@contextlib.contextmanager
def in_users_code() -> Iterator[None]:
    """Where a hook runs, torch's functions are what they are outside of ``backward()``."""
    with (
        private.with_torch_function(),
        HANDED_IN["values_from_outside"]() if state.jitting else contextlib.nullcontext(),
    ):
        yield


def _observed(value: jax.Array, hooks: Sequence[_TensorHook], saved: bool) -> jax.Array:
    """The value, whose cotangent passes through the hooks in their order; saved: its operator's
    derivative is computed from it.
    """
    # plain PyTorch calls a hook in a second backward pass too; inside a transform that
    # differentiates, only that transform calls it
    again = innermost(DIFFERENTIATING) is None
    where = at_line() if again and saved else ""

    @jax.custom_vjp
    def observed(value: jax.Array, captured: Any) -> jax.Array:
        return value

    def forward(value: jax.Array, captured: Any) -> tuple[jax.Array, Any]:
        return (
            (observed(value, captured), (value if saved else None, captured))
            if again
            else (value, (None, captured))
        )

    def backward(kept: tuple[Any, Any], cotangent: jax.Array) -> tuple[jax.Array, None]:
        before, captured = kept
        for hook, met in zip(hooks, captured, strict=True):
            cotangent = hook(met, cotangent)
        return cotangent if before is None else refused_in_backward(
            cotangent, [before], twice
        ), None

    def twice(*_: Any) -> Any:
        raise NotImplementedError(
            "a second derivative through a hook on the result of an operator whose derivative "
            "PyTorch computes from that result (tanh, exp, softmax, ...): PyTorch would also call "
            "the hook for that use of the result, and JAX's derivative does not pass there; "
            "register the hook on a copy (y = y.clone(); y.register_hook(...)), which is not "
            f"called there{where}"
        )

    observed.defvjp(forward, backward)
    return observed(value, [hook.closed.captured for hook in hooks])


def refused_in_backward(
    value: jax.Array, sources: Sequence[jax.Array], refuse: Callable[..., Any]
) -> jax.Array:
    """The value, as a function of the sources too; its backward pass calls ``refuse``, which
    raises.
    """

    @jax.custom_vjp
    def refused(value: jax.Array, sources: Sequence[jax.Array]) -> jax.Array:
        return value

    refused.defvjp(lambda value, sources: (value, None), refuse)
    return refused(value, sources)


def _replaced(hook: Callable[..., Any], gradient: torch.Tensor, cotangent: jax.Array) -> jax.Array:
    """The cotangent after a hook, checked as PyTorch's engine checks it."""
    found = hook(gradient)
    if found is None:
        return cotangent
    name = getattr(hook, "__name__", type(hook).__name__)
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"hook '{name}': expected Tensor or None, but got {type(found).__name__}")
    if found.shape != gradient.shape:
        raise RuntimeError(f"hook '{name}' has changed the size of value")
    if found.dtype != gradient.dtype:
        raise RuntimeError(
            f"hook '{name}' has changed the type of value (was {gradient.type()} got "
            f"{found.type()})"
        )
    return conj(value_of(found))


# -- nodes of PyTorch's graph, as a program inside a trace sees them -------------------------------
class GraphNode:
    """A tensor's ``grad_fn`` inside a trace: PyTorch's own node, except for hooks, which JAX's
    derivatives must call too.

    hooks: by the method that registers them, if JAX's derivative passes through this node.
    """

    def __init__(self, node: Any, hooks: dict[str, list[Callable[..., Any]]] | None) -> None:
        self._node, self._hooks = node, hooks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __repr__(self) -> str:
        return repr(self._node)

    def name(self) -> str:
        return (
            type(self).__name__
            if isinstance(self._node, torch.autograd.function.BackwardCFunction)
            else self._node.name()
        )

    def __eq__(self, other: object) -> bool:
        return self._node == (other._node if isinstance(other, GraphNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def _add(self, kind: str, hook: Callable[..., Any]) -> Any:
        if self._hooks is None:
            _refuse(
                f"grad_fn.{kind}: inside a transform the derivative is JAX's, which does not pass "
                "through this node; register the hook on the tensor, with Tensor.register_hook"
            )
        handle = getattr(self._node, kind)(hook)
        registered = handle.hooks_dict_ref()
        self._hooks[kind].append(
            lambda *gradients: hook(*gradients) if handle.id in registered else None
        )
        return handle

    register_hook = functools.partialmethod(_add, "register_hook")
    register_prehook = functools.partialmethod(_add, "register_prehook")


def graph_node(node: Any) -> Any:
    """The ``grad_fn`` of a traced tensor, made from PyTorch's own node."""
    return (
        None
        if node is None
        else _node_class(_name_of(node))(node, getattr(node, "hooks_in_jax", None))
    )


def _name_of(node: Any) -> str:
    """The name of a node's class, which for a user's autograd.Function under grad is another one,
    as in torch.func.
    """
    name = type(node).__name__
    of_function = (
        isinstance(node, torch.autograd.function.BackwardCFunction)
        and innermost(REVERSE) is not None
    )
    # PyTorch looks for its own by that name
    of_function = of_function and name != "BackwardHookFunctionBackward"
    return f"{name.removesuffix('Backward')}GeneratedBackward" if of_function else name


@functools.lru_cache(4096)
def _node_class(name: str) -> type[GraphNode]:
    return type(name, (GraphNode,), {})


def module_hooks(ctx: Any, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The node that PyTorch puts around a module with full backward hooks: an identity, to which it
    adds the hooks afterwards.
    """
    hooks: dict[str, list[Callable[..., Any]]] = {"register_prehook": [], "register_hook": []}
    ctx.hooks_in_jax = hooks
    values = [value_of(t) for t in tensors]
    _refuse_forward_mode()
    needed = [t.requires_grad for t in tensors]
    devices = [t.device for t in tensors]

    @jax.custom_vjp
    def observed(*values: jax.Array) -> list[jax.Array]:
        return list(values)

    def pulled(level: Level, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        given = tuple(
            wrap(conj(c), d, level) if n else None
            for c, d, n in zip(cotangents, devices, needed, strict=True)
        )
        for hook in hooks["register_prehook"]:
            given = hook(given) or given
        left = given  # the node's own derivative is the identity
        for hook in hooks["register_hook"]:
            left = hook(left, given) or left
        return tuple(
            conj(value_of(g)) if n and g is not None else None
            for g, n in zip(left, needed, strict=True)
        )

    def backward(_: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        with _late() as level, torch.enable_grad():
            return pulled(level, cotangents)

    again = innermost(DIFFERENTIATING) is None
    if again and state.level.root.grads is not None:
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        state.level.root.grads.of_modules.append((pulled, avals))
    observed.defvjp(lambda *values: (observed(*values) if again else list(values), None), backward)
    outs = tuple(wrap(v, d) for v, d in zip(observed(*values), devices, strict=True))
    ctx.mark_non_differentiable(*[o for o, n in zip(outs, needed, strict=True) if not n])
    return outs


def module_hooks_depend(nodes: Sequence[tuple[Callable[..., Any], Sequence[Any]]]) -> bool:
    """Whether the backward hooks of modules change Python objects, or use tensors from outside.

    nodes: what ``module_hooks`` has noted of each node: (what the node does in a level, the avals
        of its cotangents), in the order of the forward pass.
    """
    met: dict[int, Any] = {}

    def pull_back(cotangents: Sequence[Sequence[jax.Array]]) -> None:
        with push(PLAIN) as level, torch.enable_grad(), in_users_code():
            for (pulled, _), given in reversed([*zip(nodes, cotangents, strict=True)]):
                pulled(level, given)
            met.update(level.met)

    with without_changes() as changes:
        jax.eval_shape(pull_back, [avals for _, avals in nodes])
    return bool(changes or met)


@contextlib.contextmanager
def _late() -> Iterator[Level]:
    """The level in which a hook runs: the level that pulls back, or one level for all hooks of a
    compiled program.
    """
    if state.level is not None:
        yield state.level
        return
    if state.late is None:
        state.late = Level(PLAIN, None)
    level = state.late
    with having(state, level=level), jax.enable_x64(True), intercepted, traced_python():
        yield level
    if level.captured:
        t = next(iter(level.captured.values()))[0]
        level.captured.clear()
        raise RuntimeError(
            "a backward hook of a module inside a jitted function used a tensor of shape "
            f"{list(t.shape)} from outside, which would become a constant of the program; use "
            "Tensor.register_hook there, or call the function without jit"
        )


HANDED_IN["graph_node"] = graph_node
private_calls.IN_TRACES["multi_grad_hook"] = private_calls.Ours(
    _register_multi_grad_hook,
    lambda tensors, *_, **__: state.level is not None and any(type(t) is Traced for t in tensors),
)
