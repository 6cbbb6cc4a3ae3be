"""The places at which a function finds tensors and other objects, so that a program can look at
them again at each call.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from bridge.convert import trees
from bridge.trace.levels import state

GLOBAL, VARIABLE = "the global variable", "the variable "


def makes_entries(x: Any) -> bool:
    """Whether an object is a dict that makes an entry when it is asked for a missing one."""
    return isinstance(x, dict) and hasattr(type(x), "__missing__")


def entry(container: Any, key: Any) -> Any:
    """What a container holds at a key; it makes no entry there."""
    if makes_entries(container) and key not in container:
        raise KeyError(key)
    return container[key]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Place:
    """The place of an object; ``get()`` returns the object that is there now.

    Attributes:
        container, key: a dict, list or tuple and the key in it; if key is None, the container is a
            cell, or the object itself.
        owner: the name, for messages, of the object that the container belongs to.
    """

    container: Any
    key: Any
    owner: str = ""

    def get(self) -> Any:
        if self.key is None:
            return (
                self.container.cell_contents
                if isinstance(self.container, types.CellType)
                else self.container
            )
        return entry(self.container, self.key)

    def put(self, x: Any) -> None:
        """Put another object there, if the place ``holds`` it."""
        if self.key is None:
            self.container.cell_contents = x
        else:
            self.holding()[self.key] = x

    def holds(self) -> bool:
        """Whether another object can be put there."""
        if self.key is None:
            return isinstance(self.container, types.CellType)
        return type(self) in (Place, Entry) and isinstance(
            self.holding(), dict | list | collections.deque | Slots
        )

    def holding(self) -> Any:
        """The container that holds it now."""
        return self.container

    @property
    def identity(self) -> Any:
        """Equal for two objects that stand for one place."""
        at = self.container
        return id(at.owner() if isinstance(at, Members) else at), self.key

    @property
    def names(self) -> tuple[Any, ...]:
        """The names by which code gets there: of a variable or attribute, and of entries of dicts;
        None stands for another way.
        """
        if isinstance(self.container, types.CellType):
            return (self.owner.removeprefix(VARIABLE),)
        return (self.key if self.owner and type(self.key) is str else None,)

    def __str__(self) -> str:
        if self.key is None:
            return self.owner or "a value that the function uses"
        if self.owner == GLOBAL:
            return f"{self.owner} {self.key}"
        return (
            f"{self.owner}.{self.key}"
            if self.owner
            else f"the entry {self.key!r} of a {type(self.container).__name__}"
        )


class Entry(Place):
    """The entry of a list, tuple, deque or dict that is at another place, the container, where
    another one may take its place.
    """

    __slots__ = ()

    def get(self) -> Any:
        return entry(self.container.get(), self.key)

    def put(self, x: Any) -> None:
        found = self.holding()
        if type(found) is tuple:
            self.container.put((*found[: self.key], x, *found[self.key + 1 :]))
        else:
            found[self.key] = x

    def holds(self) -> bool:
        return self.container.holds() if type(self.holding()) is tuple else super().holds()

    def holding(self) -> Any:
        return self.container.get()

    @property
    def identity(self) -> Any:
        return Entry, self.container.identity, self.key

    @property
    def names(self) -> tuple[Any, ...]:
        own = self.key if type(self.key) is str else None
        return (own,) if self.owner else (*self.container.names, own)

    def __str__(self) -> str:
        return (
            f"{self.owner}.{self.key}"
            if self.owner
            else f"the entry {self.key!r} of {self.container}"
        )


class Members:
    """The attributes of an object without a ``__dict__``, as a container; it refers to the object
    weakly if the object allows that.
    """

    def __init__(self, owner: Any) -> None:
        try:
            self.owner: Callable[[], Any] = weakref.ref(owner)
        except TypeError:
            self.owner = lambda: owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self.owner(), name)


class Slots(Members):
    """Attributes that a class in Python has declared in its ``__slots__``, and that can be set."""

    def __setitem__(self, name: str, x: Any) -> None:
        object.__setattr__(self.owner(), name, x)  # as holders.Attributes does


class Context(Place):
    """The value of a context variable, the container; None if it has none."""

    __slots__ = ()

    def get(self) -> Any:
        return self.container.get(None)

    def put(self, x: Any) -> None:
        self.container.set(x)

    def holds(self) -> bool:
        return True


class Asked(Place):
    """The answer of the container, which is called at each call, for example whether one tensor is
    at two places.
    """

    __slots__ = ()

    def get(self) -> Any:
        return self.container()


class OfArgument(Place):
    """An argument of the call in progress; key: its number among the leaves of the call."""

    __slots__ = ()

    def get(self) -> Any:
        return state.arguments[self.key]

    def __str__(self) -> str:
        return "an argument"


def _child(node: Any, i: int) -> Any:
    """A child of a node; those of an object that is taken apart are its attributes."""
    children = trees.children(node)
    return [*vars(node).values()][i] if children is None else children[i]


class InArguments(Place):
    """A node among the arguments of the call in progress; key: the path to it, by numbers."""

    __slots__ = ()

    def get(self) -> Any:
        return functools.reduce(_child, self.key, state.given)

    @property
    def identity(self) -> Any:
        return InArguments, self.key

    def __str__(self) -> str:
        return f"an argument that is a {type(self.get()).__name__}"


class DictOf(Place):
    """The attributes of the object at another place, the container."""

    __slots__ = ()

    def get(self) -> Any:
        return self.container.get().__dict__

    @property
    def identity(self) -> Any:
        return DictOf, self.container.identity


class GradOf(Place):
    """The ``.grad`` of the tensor at another place, the container."""

    __slots__ = ()

    def get(self) -> Any:
        return self.container.get().grad

    @property
    def identity(self) -> Any:
        return GradOf, self.container.identity

    def __str__(self) -> str:
        return f"the .grad of {self.container}"


class Referent(Asked):
    """The object that a weak reference, the container, refers to;
    the place does not keep it alive.
    """

    __slots__ = ()
