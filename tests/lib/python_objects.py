"""What functions do to Python objects: a kind of object, how the function reaches it, and what it
does to it, as programs to be compared.

A step takes the object and two tensors. It changes the object by the second one, which no vmap
maps, and its result depends on the object.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

Step = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


# -- kinds of objects, and what is done to them ----------------------------------------------------
class Plain:
    count = 0

    def __init__(self) -> None:
        self.h, self.old, self.n = torch.zeros(2), torch.ones(2), 0
        self.log: list[torch.Tensor] = []
        self.pair = (torch.zeros(2), 1.0)


class Slotted:
    __slots__ = ("h", "log", "n", "old", "pair")

    def __init__(self) -> None:
        self.h, self.old, self.n = torch.zeros(2), torch.ones(2), 0
        self.log: list[torch.Tensor] = []
        self.pair = (torch.zeros(2), 1.0)


@dataclasses.dataclass
class Data:
    h: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(2))
    old: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(2))
    n: int = 0
    log: list[torch.Tensor] = dataclasses.field(default_factory=list)
    pair: tuple[torch.Tensor, float] = dataclasses.field(
        default_factory=lambda: (torch.zeros(2), 1.0)
    )


class Layer(nn.Module):
    h: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(2))
        self.old, self.n = torch.ones(2), 0
        self.log: list[torch.Tensor] = []
        self.pair = (torch.zeros(2), 1.0)


def set_attribute(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c.last = y * 2
    return (x * c.old).sum()


def state_attribute(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c.h = c.h * 0.5 + y
    return (x * c.h).sum()


def append_attribute(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c.log.append(y.sum())
    return (x * c.old).sum()


def delete_attribute(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if hasattr(c, "old"):
        x = x * c.old
        del c.old
    return (x * y).sum()


def rebind_attribute(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c.pair = (c.pair[0] + y, c.pair[1])
    c.log = [y * 3, {"y": y}]
    return (x * c.pair[0] * c.pair[1]).sum()


def count_attribute(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c.n += 1
    return (x * y * c.n).sum()


def ask_attribute(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c.n += 1
    return (x * y).sum() if c.n % 2 else (x + y).sum()


def make_attribute(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c.made = getattr(c, "made", 0) + 1
    return (x * y * c.made).sum()


def of_class(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    type(c).count += 1
    return (x * y * type(c).count).sum()


_ATTRIBUTES: dict[str, Step] = {
    "set": set_attribute,
    "a state": state_attribute,
    "append": append_attribute,
    "delete": delete_attribute,
    "rebind": rebind_attribute,
    "count": count_attribute,
    "ask for a count": ask_attribute,
    "make, then count": make_attribute,
}


def set_entry(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c["last"] = y * 2
    return (x * c["old"]).sum()


def state_entry(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c["h"] = c["h"] * 0.5 + y
    return (x * c["h"]).sum()


def append_entry(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c["log"].append(y.sum())
    return (x * c["old"]).sum()


def delete_entry(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * c.pop("old", y)).sum()


def rebind_entry(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c["pair"] = (c["pair"][0] + y, c["pair"][1])
    c["log"] = [y * 3, {"y": y}]
    return (x * c["pair"][0] * c["pair"][1]).sum()


def count_entry(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c["n"] += 1
    return (x * y * c["n"]).sum()


def ask_entry(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c["n"] += 1
    return (x * y).sum() if c["n"] % 2 else (x + y).sum()


def make_entry(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c["made"] = c.get("made", 0) + 1
    return (x * y * c["made"]).sum()


_ENTRIES: dict[str, Step] = {
    "set": set_entry,
    "a state": state_entry,
    "append": append_entry,
    "delete": delete_entry,
    "rebind": rebind_entry,
    "count": count_entry,
    "ask for a count": ask_entry,
    "make, then count": make_entry,
}


def _dict() -> dict[str, Any]:
    return {
        "h": torch.zeros(2),
        "old": torch.ones(2),
        "n": 0,
        "log": [],
        "pair": (torch.zeros(2), 1.0),
    }


def set_element(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c[1] = y * 2
    return (x * c[0]).sum()


def state_element(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c[0] = c[0] * 0.5 + y
    return (x * c[0]).sum()


def append_element(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c.append(y * 2)
    return (x * y).sum()


def delete_element(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if len(c) > 1:
        x = x * c.pop()
    return (x * y).sum()


def slide_elements(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c.append(y)
    c[0] + c[1]
    del c[0]
    return (x * torch.stack(list(c)).sum(0)).sum()


def count_element(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c[-1] += 1
    return (x * y * c[-1]).sum()


_ELEMENTS: dict[str, Step] = {
    "set": set_element,
    "a state": state_element,
    "append": append_element,
    "delete": delete_element,
    "slide": slide_elements,
    "count": count_element,
}


def add_member(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c.add(f"{y.ndim} dimensions")
    return (x * y * len(c)).sum()


def count_array(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c[0] += 1
    return (x * y * float(c[0])).sum()


def count_number(c: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c[...] += 1
    return (x * y * float(c)).sum()


#: By the name of a kind: what makes an object of it, and what functions do to it.
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Step]]] = {
    "a dict": (_dict, _ENTRIES),
    "an OrderedDict": (lambda: collections.OrderedDict(_dict()), _ENTRIES),
    "a defaultdict": (lambda: collections.defaultdict(list, _dict()), _ENTRIES),
    "a list": (
        lambda: [torch.zeros(2), torch.ones(2)],
        {k: f for k, f in _ELEMENTS.items() if k != "count"},
    ),
    "a list of numbers": (lambda: [1, 2], {"count": count_element}),
    "a deque": (
        lambda: collections.deque([torch.zeros(2), torch.ones(2)], 8),
        {k: f for k, f in _ELEMENTS.items() if k != "count"},
    ),
    "an object": (Plain, {**_ATTRIBUTES, "count in the class": of_class}),
    "an object with slots": (
        Slotted,
        {k: f for k, f in _ATTRIBUTES.items() if k not in ("set", "make, then count")},
    ),
    "a dataclass": (Data, _ATTRIBUTES),
    "a namespace": (lambda: types.SimpleNamespace(**_dict()), _ATTRIBUTES),
    "a module": (Layer, _ATTRIBUTES),
    "a set": (set, {"add": add_member}),
    "a NumPy array": (lambda: np.zeros(2), {"count": count_array}),
    "a NumPy array without dimensions": (lambda: np.zeros(()), {"count": count_number}),
    "a view of memory": (lambda: memoryview(bytearray(2)), {"count": count_array}),
}


def content(x: Any) -> Any:
    """What an object holds, to be compared: nested tuples of tensors, numbers, strings and names of
    classes.
    """
    if isinstance(x, torch.Tensor | int | float | str | bool | type(None)):
        return x
    if isinstance(x, dict):
        return (type(x).__name__, tuple(x), *[content(v) for v in x.values()])
    if isinstance(x, list | tuple | collections.deque):
        return (type(x).__name__, *map(content, x))
    if isinstance(x, set):
        return tuple(sorted(x))
    if isinstance(x, nn.Module):
        return (
            *[content(b) for b in x.buffers()],
            *[content(v) for k, v in vars(x).items() if not k.startswith("_")],
        )
    if hasattr(x, "tobytes"):
        return x.tolist()
    names = [
        *[n for n in getattr(type(x), "__slots__", ()) if hasattr(x, n)],
        *getattr(x, "__dict__", ()),
    ]
    return (
        type(x).__name__,
        tuple(names),
        *[content(getattr(x, n)) for n in names],
        getattr(type(x), "count", None),
    )


# -- how a function reaches an object --------------------------------------------------------------
Function = Callable[..., torch.Tensor]
_HELD: Any = None
_variable: contextvars.ContextVar[Any] = contextvars.ContextVar("held")


class _Holder(nn.Module):
    def __init__(self, held: Any, step: Step) -> None:
        super().__init__()
        self.held, self.step = held, step

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.step(self.held, x, y)


class _Owner:
    def __init__(self, held: Any, step: Step) -> None:
        self.held, self.step = held, step

    def method(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.step(self.held, x, y)


def _captured(c: Any, step: Step) -> Function:
    return lambda x, y: step(c, x, y)


def _global(c: Any, step: Step) -> Function:
    global _HELD
    _HELD = c
    return lambda x, y: step(_HELD, x, y)


def _default(c: Any, step: Step) -> Function:
    def function(x: torch.Tensor, y: torch.Tensor, held: Any = c) -> torch.Tensor:
        return step(held, x, y)

    return function


def _hook(c: Any, step: Step) -> Function:
    layer = nn.Identity()

    def hook(module: nn.Module, args: Any, out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return step(c, *out)

    layer.register_forward_hook(hook)
    return lambda x, y: layer((x, y))


def _context(c: Any, step: Step) -> Function:
    _variable.set(c)
    return lambda x, y: step(_variable.get(), x, y)


def _nested(c: Any, step: Step) -> Function:
    held = {"inner": [c]}
    return lambda x, y: step(held["inner"][0], x, y)


#: By how it is reached: the function of an object and a step; "an argument" is passed to the
#: function itself.
REACHED: dict[str, Callable[[Any, Step], Function]] = {
    "a variable": _captured,
    "a global variable": _global,
    "a default": _default,
    "functools.partial": lambda c, step: functools.partial(step, c),
    "an attribute of a module": lambda c, step: _Holder(c, step),
    "an attribute of an object": lambda c, step: _Owner(c, step).method,
    "a dict and a list": _nested,
    "a forward hook": _hook,
    "a context variable": _context,
    "an argument": lambda c, step: lambda x, y, c: step(c, x, y),
}


# -- ways to call ----------------------------------------------------------------------------------
def _plain(tf: Any, function: Function) -> Function:
    return function


def _grad(tf: Any, function: Function) -> Function:
    return tf.grad(function)  # type: ignore[no-any-return]


def _vmap(tf: Any, function: Function) -> Function:
    return lambda x, y, *rest: tf.vmap(lambda x: function(x, y, *rest))(torch.stack([x, x * 2]))


def _backward(tf: Any, function: Function) -> Function:
    return function


#: By the name of a way: what makes the function that is called, and whether it is jitted.
WAYS: dict[str, tuple[Callable[[Any, Function], Function], bool]] = {
    "jit": (_plain, True),
    "jit of grad": (_grad, True),
    "jit of vmap": (_vmap, True),
    "jit, and backward()": (_backward, True),
    "grad": (_grad, False),
    "vmap": (_vmap, False),
}


def outcome(
    tf: Any,
    jit: Callable[[Function], Function] | None,
    kind: str,
    reached: str,
    action: str,
    way: str,
    calls: int = 5,
) -> Any:
    """What some calls return, and what the object holds after each of them; tf: torch.func or
    torchfunc_jax.
    """
    make, actions = KINDS[kind]
    Plain.count = 0
    c, (wrap, jitted) = make(), WAYS[way]
    function = wrap(tf, REACHED[reached](c, actions[action]))
    if jitted and jit is not None:
        function = jit(function)
    found = []
    for k in range(calls):
        x, y = torch.tensor([1.0, 2.0]) + k, torch.tensor([0.5, -1.0]) * (k + 1)
        if way == "jit, and backward()":
            x.requires_grad_()
            y.requires_grad_()
        out = function(x, y, *([c] if reached == "an argument" else []))
        if way == "jit, and backward()":
            out.backward(retain_graph=True)
            found += [x.grad, y.grad]
        found += [out.detach(), content(c)]
    return found


def same(mine: Any, theirs: Any) -> bool:
    """Whether two outcomes are equal; tensors within rounding,
    and with the same ``requires_grad``.
    """
    if isinstance(theirs, torch.Tensor):
        return (
            isinstance(mine, torch.Tensor)
            and mine.requires_grad == theirs.requires_grad
            and torch.allclose(mine, theirs)
        )
    if isinstance(theirs, list | tuple):
        return (
            type(mine) is type(theirs) and len(mine) == len(theirs) and all(map(same, mine, theirs))
        )
    return type(mine) is type(theirs) and bool(mine == theirs)
