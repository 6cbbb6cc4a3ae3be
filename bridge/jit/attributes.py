"""What a jitted function sets beside its result becomes outputs of the program, and each call sets it.

These are tensors that it sets as attributes or buffers of modules, what ``backward()`` leaves in the ``.grad`` of tensors from outside, and
the state that an optimizer keeps for each parameter.
"""
from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import torch

from bridge import private, private_jax
from bridge.boundary.calls import Call
from bridge.convert import trees
from bridge.intercepted.leaf_gradients import LeafGradients
from bridge.programs.closure_scan import Found, GradOf, OfArgument, Place
from bridge.trace.aliasing import views_between
from bridge.trace.levels import state
from bridge.trace.tracing import Traced, exchanged, wrap


@dataclasses.dataclass(frozen=True)
class _OfModule:
    """An attribute or buffer of a module; kind: "_buffers" or "__dict__"."""

    module: weakref.ref[torch.nn.Module]
    kind: str
    name: str

    def set(self, value: Any) -> None:
        if (m := self.module()) is not None:
            getattr(m, self.kind)[self.name] = value


@dataclasses.dataclass(frozen=True)
class _OfTensor:
    """The ``.grad`` of a tensor, or the entry of that name in an optimizer's state for it; identity: that of the place."""

    place: Place = dataclasses.field(compare=False)
    identity: Any
    optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    name: str = "grad"

    def set(self, value: Any) -> None:
        t = self.place.get()
        if self.optimizer is None:
            t.grad = value
        elif (o := self.optimizer()) is not None:
            o.state[t][self.name] = value


class Setting(NamedTuple):
    """The result of a function, and what it has set, each with its value."""

    out: Any
    found: list[tuple[_OfModule | _OfTensor, Any]]

    def done(self) -> Any:
        """Set what the function sets, and return its result."""
        for target, value in self.found:
            target.set(value)
        return self.out


def noted(fn: Callable[..., Any], call: Call, found: Found, places: Mapping[int, Place]) -> Callable[..., Any]:
    """The function for a trace: it leaves what it sets as it was, and returns a Setting if it has set something.

    found: the modules and optimizers that the function reaches.  places: by id, where captured tensors were found.
    """
    kinds = [(m, kind) for m in found.modules.values() for kind in ("_buffers", "__dict__", "_parameters")]

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        before = [(m, kind, dict(getattr(m, kind))) for m, kind in kinds]
        states = [(o, {p: dict(entries) for p, entries in o.state.items()}) for o in found.optimizers.values()]
        arguments = _arguments(call, (args, kwargs))
        grads = LeafGradients({id(t): i for i, t in arguments.items()})
        if not any(isinstance(x, jax.Array) for x in call.arrays):
            state.level.root.grads = grads

        def place_of(t: torch.Tensor) -> Place:
            if id(t) in grads.arguments:
                return OfArgument(None, grads.arguments[id(t)])
            return places.get(id(t)) or Place(t, None)

        kept: list[tuple[_OfModule | _OfTensor, Any]] = []
        try:
            out = fn(*args, **kwargs)
        finally:
            for m, kind, old in before:
                kept += [(_OfModule(weakref.ref(m), kind, name), value) for name, value in _taken_back(getattr(m, kind), old)]
            for o, known in states:
                for p, entries in list(o.state.items()):
                    place = place_of(p)
                    new = _taken_back(entries, known.get(p, {}))
                    kept += [(_OfTensor(place, place.identity, weakref.ref(o), name), value) for name, value in new]
                    if not entries and p not in known:
                        del o.state[p]
            for t, value in grads.changed():
                place = place_of(t)
                kept.append((_OfTensor(place, place.identity), _outside(value) if type(value) is Traced else value))
            state.level.root.graded = [target.place for target, _ in kept if type(target) is _OfTensor and target.optimizer is None]
            read = [(GradOf(place_of(t), "grad"), grad) for t, grad in grads.read()]
            state.level.root.read = [(p, grad) for p, grad in read if grad is None or type(places.get(id(grad))) is not GradOf]
        parameters = [target.name for target, _ in kept if type(target) is _OfModule and target.kind == "_parameters"]
        if parameters:
            raise exchanged(f"the parameter {parameters[0]}")
        return Setting(out, kept) if kept else out

    return run


def _arguments(call: Call, given: Any) -> dict[int, Traced]:
    """The traced tensors that stand for the arguments, by their numbers among the leaves; each gets the ``.grad`` of its argument."""
    found = {i: t for i, t in enumerate(trees.flatten(given)[0]) if type(t) is Traced}
    for i, t in found.items():
        x = call.leaves[i]
        if isinstance(x, torch.Tensor) and x.is_leaf and x.grad is not None:
            with private.below_python():
                t.grad = x.grad
    return found


def _taken_back(there: dict[str, Any], old: dict[str, Any]) -> list[tuple[str, Traced]]:
    """The traced tensors that have been put into a dict, as they are outside; the dict has its old entries again in their places."""
    found = []
    for name, value in list(there.items()):
        outside = _outside(value) if type(value) is Traced and value is not old.get(name) else None
        if outside is not None:
            found.append((name, outside))
            there.pop(name) if name not in old else there.update({name: old[name]})
    return found


def _outside(t: Traced) -> Traced | None:
    """A traced tensor as it is outside of the transforms that it was computed in; None if they map it, or if it is one step of a loop."""
    if t.node.level is state.level:
        return t
    root, views = views_between(t.node)
    if private_jax.mapping(root.value):
        return None
    value = private_jax.innermost_removed(root.value, True)
    if private_jax.trace_of(value) not in (None, private_jax.current_trace()):
        return None
    return wrap(functools.reduce(lambda base, view: view.lowering(base, *view.args, **view.kwargs), views, value), t.device)
