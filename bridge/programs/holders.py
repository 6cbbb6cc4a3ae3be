"""What a function can change among the objects that it reaches: containers, attributes, variables.

A holder reads what it holds before a trace and after it, says what differs, undoes that, and can do
it again at a later call.
"""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import functools
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bridge.convert import trees
from bridge.programs.closure_scan import (
    HOOKS,
    HOOKS_OF_TENSORS,
    Found,
    is_ours,
    is_plain,
    of_library,
    slots_of,
)
from bridge.programs.code_names import read_by
from bridge.programs.places import VARIABLE, Context, DictOf, Entry, InArguments, Place, Slots
from bridge.trace import python_numbers
from bridge.trace.tracing import Traced

#: Stands for what is not there.
MISSING = type("_Missing", (), {"__repr__": lambda self: "nothing"})()
#: Attributes that an RNN of PyTorch's makes anew of its parameters when these have been replaced.
REBUILT = ("_flat_weights", "_flat_weight_refs")
#: What is to be done ("set", "delete" or a word of the holder's own), at which key, with which
#: value.
Difference = tuple[str, Any, Any]


class Holder:
    """The entries of a dict, or the attributes in the ``__dict__`` of an object.

    Args:
        place: where the dict is.
        of: the object's name, for messages; "" for a dict.
        counts: whether an attribute of that name is the function's if it holds no tensor of the
            trace: another thread may have set it.

    Attributes:
        refused: what a function does that changes it, if no program can do that again.
        whole: whether what it holds has no names or keys that stay while others change.
        of_argument: whether it is an argument, which is made anew for each call.
    """

    refused, whole, of_argument = "", False, False

    def __init__(
        self, place: Place, of: str = "", counts: Callable[[Any], bool] = lambda name: True
    ) -> None:
        self.place, self.of, self.counts = place, of, counts

    def owner(self) -> Any:
        """What holds it now."""
        return self.place.get()

    @property
    def identity(self) -> Any:
        return type(self), self.place.identity

    def entry(self, key: Any) -> Place:
        """The place of an entry."""
        if self.whole:
            return self.place
        return (
            Place(self.owner(), key, self.of)
            if self.of and type(self.place) is Place
            else Entry(self.place, key, self.of)
        )

    def named(self, key: Any) -> str:
        """An entry in words."""
        return str(self.entry(key))

    def read(self, owner: Any) -> Any:
        """A copy of what it holds; owner: the answer of ``owner`` before the trace, in which
        another one may take its place.
        """
        return dict(owner)

    def at(self, old: Any, key: Any) -> Any:
        """What was at a key; old: what ``read`` gave."""
        return old.get(key, MISSING)

    def differences(self, old: Any, new: Any) -> list[Difference]:
        """What has to be done to make the new out of the old."""
        both = [k for k in old if k in new]
        if both != [*new][: len(both)] and not self.of:  # the keys have another order
            return [("replace", None, new)]
        deleted: list[Difference] = [("delete", k, None) for k in old if k not in new]
        return deleted + [("set", k, v) for k, v in new.items() if v is not old.get(k, MISSING)]

    def may_be_set(
        self, old: Any, differences: Sequence[Difference], found: Found
    ) -> Iterator[tuple[Any, Any]]:
        """The attributes that the function may have set to what they were, as far as it reads
        none of their names: those that it reads are conditions of the program anyway.
        """
        if self.of and not self.whole:
            other = {key for _, key, _ in differences}
            for key, x in old.items():
                if key not in other and found.only_sets(key) and self.counts(key):
                    yield key, x

    def put(self, owner: Any, what: str, key: Any, value: Any) -> None:
        """Do a difference."""
        if what == "set":
            owner[key] = value
        elif what == "delete":
            owner.pop(key, None)
        else:
            owner.clear()
            owner.update(value)

    def undo(self, owner: Any, old: Any, differences: Sequence[Difference]) -> None:
        """Make the differences undone; old: what ``read`` gave before."""
        if self.whole or (not self.of and any(what != "set" for what, _, _ in differences)):
            self.put(owner, "replace", None, old)  # its keys have the order that they had
            return
        for _, key, _ in differences:
            before = self.at(old, key)
            self.put(owner, "delete" if before is MISSING else "set", key, before)


class Attributes(Holder):
    """Attributes with these names of an object, a class or a Python module,
    to be set past methods of its class, which may refuse that or do more.
    """

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        lasts = isinstance(owner, type | types.ModuleType)
        self.there: Any = owner.__dict__ if lasts else Slots(owner)
        self.found: Callable[[], Any] = (lambda: owner) if lasts else self.there.owner
        super().__init__(Place(self.there, None), getattr(owner, "__name__", type(owner).__name__))
        self.names = names

    def owner(self) -> Any:
        return self.found()

    def entry(self, key: Any) -> Place:
        return Place(self.there, key, self.of)

    def read(self, owner: Any) -> dict[str, Any]:
        found = {}
        for name in self.names:
            try:
                found[name] = self.there[name]
            except (KeyError, AttributeError):
                continue
        return found

    def put(self, owner: Any, what: str, key: Any, value: Any) -> None:
        plain = type if isinstance(owner, type) else object
        if what == "set":
            plain.__setattr__(owner, key, value)
        else:
            plain.__delattr__(owner, key)


class Variable(Holder):
    """A variable of the function around the function, which is a cell, or a context variable."""

    def owner(self) -> Any:
        return self.place.container

    def entry(self, key: Any) -> Place:
        return self.place

    def read(self, owner: Any) -> dict[None, Any]:
        try:
            return {None: self.place.get()}
        except ValueError:  # it is not bound
            return {}

    def put(self, owner: Any, what: str, key: Any, value: Any) -> None:
        if what == "delete" and type(owner) is types.CellType:
            del owner.cell_contents
        else:
            self.place.put(value)


class Elements(Holder):
    """The elements of a list or deque; what is appended is appended again, whatever the list has by
    then.
    """

    whole = True

    def read(self, owner: Any) -> list[Any]:
        return list(owner)

    def at(self, old: list[Any], key: Any) -> Any:
        return old[key]

    def differences(self, old: list[Any], new: list[Any]) -> list[Difference]:
        kept = _agree(old, new)
        # how many have gone from the front
        left = next(d for d in range(len(old) + 1) if _agree(old[d:], new) == len(old) - d)
        if len(old) == len(new) and left in (0, len(old)):
            return [
                ("set", i, v) for i, (u, v) in enumerate(zip(old, new, strict=True)) if u is not v
            ]
        if len(old) - left >= kept:
            steps = [("drop", left, None), ("extend", None, new[len(old) - left :])]
        else:
            steps = [("cut", len(old) - kept, None), ("extend", None, new[kept:])]
        return [step for step in steps if step[1] or step[2]]

    def put(self, owner: Any, what: str, key: Any, value: Any) -> None:
        if what == "set":
            owner[key] = value
            return
        for _ in range(len(owner) if what == "replace" else key or 0):
            del owner[0 if what == "drop" else -1]
        owner.extend(value or ())


class Content(Holder):
    """What a set, a NumPy array, another array of numbers or a view of memory contains."""

    whole = True

    def read(self, owner: Any) -> Any:
        return bytes(owner) if isinstance(owner, memoryview) else copy.copy(owner)

    def differences(self, old: Any, new: Any) -> list[Difference]:
        if isinstance(old, set):
            before, now = {id(x): x for x in old}, {id(x): x for x in new}
            if before.keys() <= now.keys():
                added = {x for key, x in now.items() if key not in before}
                return [("add", None, added)] if added else []
            return [("replace", None, new)]
        # of objects, these are their addresses
        same = old.tobytes() == new.tobytes() if isinstance(old, np.ndarray) else old == new
        return [] if same else [("replace", None, new)]

    def put(self, owner: Any, what: str, key: Any, value: Any) -> None:
        if isinstance(owner, set):
            if what == "replace":
                owner.clear()
            owner.update(value)
        elif isinstance(owner, memoryview):
            owner.cast("B")[:] = value
        else:
            owner[... if isinstance(owner, np.ndarray) else slice(None)] = value


class Draws(Holder):
    """The state of one of Python's or NumPy's generators of random numbers."""

    refused, whole = "draws from Python's or NumPy's random numbers", True

    def read(self, owner: Any) -> bytes:
        return pickle.dumps(_state_of(owner)[0]())

    def differences(self, old: bytes, new: bytes) -> list[Difference]:
        return [] if old == new else [("replace", None, new)]

    def put(self, owner: Any, what: str, key: Any, value: bytes) -> None:
        _state_of(owner)[1](pickle.loads(value))


def _state_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Reads and sets the state of a generator of Python's, of NumPy's older class or its own."""
    for read, write in (("getstate", "setstate"), ("get_state", "set_state")):
        if hasattr(generator, read):
            return getattr(generator, read), getattr(generator, write)
    bits = generator.bit_generator
    return functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")


class Gradient(Holder):
    """The ``.grad`` of the tensor at a place."""

    def put(self, owner: torch.Tensor, what: str, key: Any, value: torch.Tensor | None) -> None:
        owner.grad = value


class Hooks(Holder):
    """The hooks of a module."""

    refused = "adds or removes hooks of a module"


class HooksOfTensor(Holder):
    """The hooks on the gradient of a tensor."""

    refused = "adds or removes hooks of a tensor"

    def read(self, owner: torch.Tensor) -> dict[tuple[str, int], Any]:
        return {
            (name, number): hook
            for name in HOOKS_OF_TENSORS
            for number, hook in (getattr(owner, name) or {}).items()
        }

    def put(self, owner: torch.Tensor, what: str, key: tuple[str, int], value: Any) -> None:
        super().put(getattr(owner, key[0]), what, key[1], value)


def _agree(old: Sequence[Any], new: Sequence[Any]) -> int:
    """How many of the first elements are the same objects."""
    return next(
        (i for i, (u, v) in enumerate(zip(old, new, strict=False)) if u is not v),
        min(len(old), len(new)),
    )


def _of_container(x: Any, place: Place) -> Holder | None:
    if isinstance(x, dict):
        return Holder(place)
    if isinstance(x, list | collections.deque):
        return Elements(place)
    if (
        isinstance(x, set | bytearray | array.array)
        or (isinstance(x, np.ndarray) and x.flags.writeable)
        or (isinstance(x, memoryview) and x.c_contiguous and not x.readonly)
    ):
        return Content(place)
    return None


def holders(found: Found) -> Iterator[Holder]:
    """The holders among what a function reaches beside its arguments; another thread may have
    changed attributes that it does not name.
    """
    seen = set[int]()
    for x in [*found.alive, *found.modules.values()]:
        if id(x) not in seen and not is_ours(type(x).__module__):
            seen.add(id(x))
            yield from _of(x, found, seen)
    for t, place in found.tensors.values():
        yield Holder(DictOf(place, None), "tensor", found.sets)
        if t.requires_grad:
            yield HooksOfTensor(place, "tensor")
    for generator in found.python_generators():
        yield Draws(Place(generator, None))
    for space, names in found.set_in_spaces():
        yield Attributes(space, names)


def _of(x: Any, found: Found, seen: set[int]) -> Iterator[Holder]:
    container = _of_container(x, found.containers.get(id(x), [Place(x, None)])[0])
    if container is not None:
        yield container
    if isinstance(x, types.FunctionType) and not is_ours(x.__module__):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if id(cell) not in seen:
                seen.add(id(cell))
                yield Variable(Place(cell, None, VARIABLE + name), name)
        if names := read_by(x.__code__).set_globals:
            yield Holder(Place(x.__globals__, None), "the global variable", names.__contains__)
    elif isinstance(x, contextvars.ContextVar):
        yield Variable(Context(x, None, f"the context variable {x.name}"), x.name)
    attributes = getattr(x, "__dict__", None)
    if type(attributes) is dict and not isinstance(x, types.ModuleType):
        own = of_library(type(x).__module__)
        where = found.containers.get(id(x), [Place(x, None)])[0]
        fixed = where.key is None and where.get() is where.container
        place = Place(attributes, None) if fixed or not is_plain(x) else DictOf(where, None)
        yield Holder(
            place, type(x).__name__, lambda name: own or name in _ALWAYS or found.sets(name)
        )
    if slots := slots_of(x):
        yield Attributes(x, slots)
    if isinstance(x, torch.nn.Module):
        # not of ScriptModules
        for store in [
            name for name in ("_parameters", "_buffers", "_modules", *HOOKS) if name in x.__dict__
        ]:
            yield (Hooks if store in HOOKS else Holder)(Place(x.__dict__, store, type(x).__name__))


#: Attributes that methods of PyTorch's set, which the function's code does not name.
_ALWAYS = frozenset(["training"])


def in_arguments(
    given: Any, spec: trees.Spec | None, path: tuple[int, ...] = ()
) -> Iterator[tuple[Any, InArguments, Holder | None]]:
    """The nodes among the arguments, a tuple of the positional and the named ones: their places,
    and a Holder of what can be changed.

    spec: that of the arguments.
    """
    if spec is None:
        return
    place, opened = InArguments(None, path), spec.kind is trees.Opened
    if len(path) > 1:
        container = _of_container(given, place)
        if container is None and type(getattr(given, "__dict__", None)) is dict:
            container = Holder(DictOf(place, None), type(given).__name__)
        if container is not None:
            container.of_argument = True
        yield given, place, container
    children = (
        [getattr(given, name) for name in spec.context[1]]
        if opened
        else trees.children(given) or ()
    )
    for i, (child, inner) in enumerate(zip(children, spec.children, strict=True)):
        yield from in_arguments(child, inner, (*path, i))


def undone(holder: Holder, owner: Any, old: Any) -> list[Difference]:
    """What the function has changed, which is undone."""
    differences = [
        d
        for d in holder.differences(old, holder.read(owner))
        if holder.counts(d[1])
        or any(type(x) is Traced or python_numbers.is_input(x) for x in trees.flatten(d[2])[0])
    ]
    if differences:
        holder.undo(owner, old, differences)
    return differences
