"""What a jitted function sets in modules: tensors that are attributes or buffers become outputs of the program, and each call sets them."""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from bridge import private_jax
from bridge.trace.aliasing import views_between
from bridge.trace.levels import state
from bridge.trace.tracing import Traced, exchanged, wrap


class Setting(NamedTuple):
    """The result of a function, and what it has set: (a module, "_buffers" or "__dict__", a name, the value)."""

    out: Any
    found: list[tuple[weakref.ref[torch.nn.Module], str, str, Any]]

    def done(self) -> Any:
        """Set what the function sets, and return its result."""
        for module, kind, name, value in self.found:
            if (m := module()) is not None:
                getattr(m, kind)[name] = value
        return self.out


def noted(fn: Callable[..., Any], modules: Iterable[torch.nn.Module]) -> Callable[..., Any]:
    """The function for a trace: it leaves the modules as they were, and returns a Setting if it has set traced tensors in them."""
    places = [(m, kind) for m in modules for kind in ("_buffers", "__dict__", "_parameters")]

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        before = [(m, kind, dict(getattr(m, kind))) for m, kind in places]
        found: list[tuple[weakref.ref[torch.nn.Module], str, str, Any]] = []
        try:
            out = fn(*args, **kwargs)
        finally:
            for m, kind, old in before:
                there = getattr(m, kind)
                for name, value in list(there.items()):
                    outside = _outside(value) if type(value) is Traced and value is not old.get(name) else None
                    if outside is not None:
                        found.append((weakref.ref(m), kind, name, outside))
                        there.pop(name) if name not in old else there.update({name: old[name]})
        if any(kind == "_parameters" for _, kind, *_ in found):
            raise exchanged(f"the parameter {found[0][2]}")
        return Setting(out, found) if found else out

    return run


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
