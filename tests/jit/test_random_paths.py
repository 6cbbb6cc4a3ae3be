"""A jitted function that reads or changes a value at the end of a random path of objects, while
others change the value, or replace an object on the way, between the calls: beside the function
without jit.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torchfunc_jax import jit


class _Link(NamedTuple):
    """One step of a path.

    Attributes:
        holder: the object that holds the next one.
        text: how Python code gets from one to the other.
        put: puts another one there.
    """

    holder: Any
    text: str
    put: Callable[[Any], Any]


class _Plain:
    a: Any


@dataclasses.dataclass
class _Data:
    a: Any = None


class _Slotted:
    __slots__ = ("a",)


class _WithProperty:
    @property
    def a(self) -> Any:
        return self._a

    @a.setter
    def a(self, value: Any) -> None:
        self._a = value

    def get(self) -> Any:
        return self._a

    def __call__(self) -> Any:
        return self._a


def _attribute(make: Callable[[], Any], name: str = "a", text: str = ".a") -> Any:
    def link(inner: Any) -> _Link:
        holder = make()
        setattr(holder, name, inner)
        return _Link(holder, text, lambda v: setattr(holder, name, v))

    return link


def _entry(make: Callable[[Any], Any], key: Any, text: str) -> Any:
    def link(inner: Any) -> _Link:
        holder = make(inner)
        return _Link(holder, text, lambda v: holder.__setitem__(key, v))

    return link


def _closure(inner: Any) -> _Link:
    def put(v: Any) -> None:
        nonlocal inner
        inner = v

    return _Link(lambda: inner, "()", put)


def _partial(inner: Any) -> _Link:
    entries = {"a": inner}
    return _Link(
        functools.partial(dict.get, entries), "('a')", lambda v: entries.__setitem__("a", v)
    )


#: Kinds of links, the value of which code can set.
SET: dict[str, Callable[[Any], _Link]] = {
    "an object": _attribute(_Plain),
    "a dataclass": _attribute(_Data),
    "slots": _attribute(_Slotted),
    "a namespace": _attribute(types.SimpleNamespace),
    "a property": _attribute(_WithProperty),
    "a module": _attribute(nn.Module),
    "a class": _attribute(lambda: type("Held", (), {})),
    "a dict": _entry(lambda v: {"a": v, "b": 3}, "a", "['a']"),
    "a list": _entry(lambda v: [1, v], 1, "[1]"),
    "a deque": _entry(lambda v: collections.deque([v]), 0, "[0]"),
}
LINKS = {
    **SET,
    "a method": _attribute(_WithProperty, "_a", ".get()"),
    "a callable": _attribute(_WithProperty, "_a", "()"),
    "dict.get": _entry(lambda v: {"a": v}, "a", ".get('a')"),
    "a function": _closure,
    "a partial": _partial,
}
#: By what a function does with ``V``: its code, and the value at a call.
READS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "a number": ("return x * V", lambda k: 1.5 + k),
    "a count": ("return x * V", lambda k: k + 1),
    "a tensor": ("return x + V", lambda k: torch.ones(2) * k),
    "None or a number": ("return x if V is None else x * V", lambda k: None if k % 2 else 2.0),
    "a flag": ("return x * 2 if V else x", lambda k: bool(k % 2)),
    "a text": ("return x * 2 if V == 'a' else x", lambda k: "ab"[k % 2]),
    "numbers": ("return x * sum(V)", lambda k: [1.0, k * 1.0]),
    "a function": ("return V(x)", lambda k: [torch.sin, torch.cos][k % 2]),
}
CHANGES: dict[str, tuple[str, Callable[[int], Any]]] = {
    "count": ("V += 1; return x * V", lambda k: k),
    "state": ("V = V * 0.5 + x; return V * 2", lambda k: torch.ones(2) * k),
    "append": ("V.append(x.sum()); return x * len(V)", lambda k: [1.0] * (k % 2)),
    "set": ("V = x * 3; return x", lambda k: None),
    "set a number": ("V = 0.0; return x", lambda k: k / 2),
    "ask": ("V += 1; return x * 2 if V % 3 == 0 else x", lambda k: k),
    "a tuple": ("a, b = V; V = (a + x, b * 0.5); return a * b", lambda k: (torch.ones(2) * k, 2.0)),
    "delete": (
        "v = V.pop('z', None); return x if v is None else x * v",
        lambda k: {"z": torch.ones(2)},
    ),
    "new entries": ("V[str(len(V))] = x.sum(); return x * len(V)", lambda k: {}),
    "item": ("V = x.sum().item(); return x * 2", lambda k: 0.0),
}


def _seen(x: Any) -> Any:
    """What can be compared of a value."""
    if isinstance(x, torch.Tensor):
        return x.tolist()
    if isinstance(x, list | tuple):
        return type(x), [_seen(v) for v in x]
    if isinstance(x, dict):
        return [*x], [_seen(v) for v in x.values()]
    return x if isinstance(x, int | float | str | None) else id(x)


def _outcome(wrap: Callable[..., Any], seed: int, changes: bool) -> list[Any]:
    chosen = random.Random(seed)
    kinds = [chosen.choice([*LINKS]) for _ in range(chosen.randrange(8))]
    kinds.append(chosen.choice([*(SET if changes else LINKS)]))
    table = CHANGES if changes else READS
    code, value = table[chosen.choice([*table])]

    def links(kinds: list[str], inner: Any) -> list[_Link]:
        found: list[_Link] = []
        for kind in reversed(kinds):
            found.insert(0, LINKS[kind](inner))
            inner = found[0].holder
        return found

    path = links(kinds, value(0))
    where = "root" + "".join(link.text for link in path)
    space = {"root": path[0].holder}
    body = code.replace("V", where).split("; ")
    exec("\n    ".join(["def step(x):", *body]), space)  # the paths are Python code
    step, outcome = wrap(space["step"]), []
    for k in range(7):
        outcome.append(_seen(step(torch.ones(2) * (k + 0.5))))
        outcome.append(_seen(eval(where, space)))
        if chosen.random() < (0.4 if changes else 0.9):
            at = len(kinds) - 1 if chosen.random() < 0.6 else chosen.randrange(len(kinds))
            new = links(kinds[at + 1 :], value(k + 1))
            path[at].put(new[0].holder if new else value(k + 1))
            path[at + 1 :] = new
    return outcome


def _alike(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(_alike, mine, theirs))
    if isinstance(theirs, float):
        return type(mine) is float and mine == pytest.approx(theirs, rel=1e-5)
    return type(mine) is type(theirs) and bool(mine == theirs)


@pytest.mark.parametrize("changes", [False, True], ids=["read", "changed"])
@pytest.mark.parametrize(
    "first", [0, *[pytest.param(k, marks=pytest.mark.slow) for k in range(60, 1200, 60)]]
)
def test_as_without_jit(first: int, changes: bool) -> None:
    for seed in range(first, first + 60):
        mine, theirs = _outcome(jit, seed, changes), _outcome(lambda f: f, seed, changes)
        assert _alike(mine, theirs), (seed, mine, theirs)
