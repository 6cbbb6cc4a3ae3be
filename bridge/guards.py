"""What a compiled program depends on beside its arguments, looked at before each call: PyTorch's ambient state, modules, objects.

``ambient`` is part of the key under which programs are kept.  ``Guards`` belong to one program: the tree of modules, their modes and
hooks, which object is found where, and the Python numbers kept in attributes.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bridge import capture, private
from bridge.keys import Same, identical

#: What the entries of ``ambient`` are called.
AMBIENT = (
    "the default dtype", "the precision of float32 matrix products", "deterministic algorithms", "inference mode", "anomaly mode",
    "autocast", "the default device and torch function modes", "global module hooks", "hooks on saved tensors",
)  # fmt: skip
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def ambient() -> tuple[Any, ...]:
    """The state of PyTorch that a program depends on, as part of its key; see ``AMBIENT``.

    Returns:
        tuple: hashable.

    Example:
        >>> import torch
        >>> from bridge import guards
        >>> outside = guards.ambient()
        >>> with torch.autocast("cpu"):
        ...     print(guards.ambient() == outside)
        False
    """
    return (
        torch.get_default_dtype(), private.float32_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
        _autocast() if private.any_autocast() else torch.get_autocast_dtype("cpu"),  # a function may enter it
        _modes() if private.function_modes() else None, private.global_module_hooks(), private.saved_tensor_pack() is not None,
    )  # fmt: skip


def _autocast() -> Any:
    found = tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in _DEVICES)
    return found, torch.is_autocast_cache_enabled()


def _modes() -> Any:
    modes = private.function_mode_stack()
    return tuple([private.default_device_of(m) or identical(m) for m in modes])


@contextlib.contextmanager
def without_cast_weights() -> Iterator[None]:
    """While entered, autocast keeps no copies of weights, and no parametrized ones are kept: those of before would be constants in here,
    those of a trace useless after it.
    """
    enabled = torch.is_autocast_cache_enabled()
    if private.any_autocast():
        torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with private.parametrizations_anew():
            yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        if private.any_autocast():
            torch.clear_autocast_cache()


# -- of one program -----------------------------------------------------------------------------------------------------------------
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODULE = ("training", "_modules", "_parameters", "_buffers", *_HOOKS)


def _hooks(d: dict[str, Any]) -> tuple[Any, ...]:
    return tuple([tuple(d[name]) for name in _HOOKS])  # their keys are numbers that PyTorch gives out once


class Guards:
    """What a function reached when it was traced, to be compared with what is there now.

    Args:
        found: what ``capture.scan`` found before the function was traced.  What is another one after it was changed by the function
            itself, and is not looked at: a jitted function's Python runs when it is traced.
    """

    __slots__ = ("names", "needed", "others", "places", "plain", "sizes", "values")

    def __init__(self, found: capture.Found) -> None:
        self.names: dict[int, str] = {}
        self.plain: list[tuple[dict[str, Any], bool]] = []  # modules without children and hooks
        self.others: list[tuple[dict[str, Any], bool, dict[str, Any], list[Any], tuple[Any, ...], Any]] = []
        for m in found.modules.values():
            d = m.__dict__
            if not all(name in d for name in _MODULE):  # ScriptModules
                continue
            self.names[id(d)] = type(m).__name__
            if d["_modules"] or any(d[name] for name in _HOOKS) or "forward" in d:
                children = dict(d["_modules"])
                self.others.append((d, m.training, children, [*children], _hooks(d), d.get("forward")))
            else:
                self.plain.append((d, m.training))
        self.places = [(p, child) for p, child in found.edges() if _now(p) is child]
        self.values = [(p, value) for p, value in found.numbers() if _now(p) is value or Same(_now(p)) == Same(value)]
        self.sizes = [(c, n) for c, n in found.sizes() if len(c) == n]
        self.needed = bool(self.plain or self.others or self.places or self.values or self.sizes)

    def hold(self) -> bool:
        """Whether everything is as it was; always, where nothing is ``needed``."""
        for d, training in self.plain:
            if (
                d["training"] is not training or d["_forward_hooks"] or d["_forward_pre_hooks"] or d["_backward_hooks"]
                or d["_backward_pre_hooks"] or d["_modules"] or "forward" in d
            ):
                return False
        for d, training, children, order, hooks, forward in self.others:
            now = d["_modules"]
            if (
                d["training"] is not training or now != children or [*now] != order or _hooks(d) != hooks
                or d.get("forward") is not forward
            ):
                return False
        try:
            for place, child in self.places:
                if place.get() is not child:
                    return False
            for place, value in self.values:
                now = place.get()
                if now is not value and Same(now) != Same(value):
                    return False
        except (KeyError, IndexError, ValueError, AttributeError, TypeError):
            return False
        for c, n in self.sizes:
            if len(c) != n:
                return False
        return True

    def differences(self) -> Iterator[str]:
        """What is not as it was, each as a sentence."""
        plain: list[Any] = [(d, training, {}, [], ((),) * len(_HOOKS), None) for d, training in self.plain]
        for d, training, children, order, hooks, forward in [*plain, *self.others]:
            name = self.names[id(d)]
            if d.get("forward") is not forward:
                yield f"the module {name} has been given another forward"
            if d["training"] is not training:
                yield f"the module {name} was in {_mode(training)} mode and now is in {_mode(d['training'])} mode"
            now = d["_modules"]
            for key in {**children, **now}:
                if now.get(key) is not children.get(key):
                    yield (
                        f"the submodule {key!r} of the module {name} was {_kind(children.get(key))} and now is "
                        f"{'another ' if type(now.get(key)) is type(children.get(key)) else ''}{_kind(now.get(key))}"
                    )
            if now == children and [*now] != order:
                yield f"the submodules of the module {name} were in the order {order} and now are in the order {[*now]}"
            if _hooks(d) != hooks:
                yield f"the hooks of the module {name} were numbers {sum(hooks, ())} and now are numbers {sum(_hooks(d), ())}"
        for place, child in self.places:
            now = _now(place)
            if now is not child:
                yield f"{place} was one {_kind(child)} and now is {'another ' if type(now) is type(child) else ''}{_kind(now)}"
        for place, value in self.values:
            now = _now(place)
            if now is not value and Same(now) != Same(value):
                yield f"{place} was {value!r} and now is {now!r}"
        for c, n in self.sizes:
            if len(c) != n:
                yield f"a {type(c).__name__} that the function uses had {n} entries and now has {len(c)}"


class _Gone:
    """Stands for what is no longer where it was."""

    def __repr__(self) -> str:
        return "gone"


_GONE = _Gone()


def _now(place: capture.Place) -> Any:
    try:
        return place.get()
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        return _GONE


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _kind(x: Any) -> str:
    return "missing" if x is None or x is _GONE else type(x).__name__


def describe(state: Sequence[Any]) -> list[tuple[str, str]]:
    """The entries of ``ambient`` with their names, to be read."""
    return [(name, repr(value)) for name, value in zip(AMBIENT, state, strict=True)]


__all__ = ["AMBIENT", "Guards", "ambient", "describe", "without_cast_weights"]
