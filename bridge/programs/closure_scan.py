"""Finds the tensors and modules that a function reaches beside its arguments: by its closure,
globals, defaults and bound object.

A tensor is found together with its place (a dict or cell and the key in it), so that a compiled
function can look at the place again at each call: after ``model.weight = new`` it sees the new
tensor. The containers and objects on the way to it, and the Python numbers, functions and other
objects that the function reads, are found with their places too, for ``guards``.
"""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import io
import itertools
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from bridge import private
from bridge.cache_keys import identical
from bridge.convert import sparse
from bridge.convert.sparse import Sparse, is_sparse
from bridge.programs.code_names import GRAD, Read, entry_of, read_by
from bridge.programs.places import (
    GLOBAL,
    VARIABLE,
    Asked,
    Context,
    DictOf,
    Entry,
    GradOf,
    Members,
    Place,
    Referent,
    Slots,
)
from bridge.trace.python_numbers import Inputs, is_input

# how many objects within objects are searched at first, and after a tensor was used that was not
# found
_DEPTH, _DEEPER = 4, 16
#: How many objects a search beyond the first depth begins with at most.
_MANY = 20_000
_FUNCTION = type(torch.autograd.Function)


class Unsearched:
    """Base class of objects that are not searched: what they run is constant, as a function under
    ``jax.jit`` is.
    """


#: Objects whose contents count as just as deep as they themselves.
_TRANSPARENT = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    contextvars.ContextVar,
    weakref.ReferenceType,
    torch.library.CustomOpDef,
    _FUNCTION,
)
#: Objects of PyTorch's classes whose attributes the function may read.
_HOLDERS = (
    torch.distributions.Distribution,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    functools.partialmethod,
    functools.singledispatchmethod,
)
_SKIP = (
    type,
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    Unsearched,
    Inputs,
)
# larger containers of numbers (entries) and numpy arrays (bytes) are not compared at each call
_DATA, _BYTES = 4096, 1 << 20
_LIBRARIES = frozenset(
    {"torch", "jax", "jaxlib", "numpy", "builtins", "typing", "functools", "abc"}
)
_OURS = frozenset({"bridge", "torchfunc_jax"})
#: Names by which code reads, or sets, any attribute.
_ANY_NAME = frozenset(
    {"vars", "__dict__", "attrgetter", "__getattribute__", "__setattr__", "__delattr__"}
)
#: Names of functions by which PyTorch's engine calls the hooks of tensors, which are in these
#: attributes.
_PULLING = frozenset({"backward", "grad"})
HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
#: Methods that Python calls to make an object; they count for classes that the code names.
_MAKERS = frozenset({"__new__", "__init__", "__post_init__"})
#: Methods that Python calls although the code does not name them.
_IMPLICIT = frozenset(
    {
        "__call__",
        "forward",
        "__get__",
        "__getitem__",
        "__iter__",
        "__next__",
        "__len__",
        "__contains__",
        "__bool__",
        "__enter__",
        "__exit__",
        "__getattr__",
        "__missing__",
        "__reversed__",
        "__hash__",
        "__ne__",
        "__abs__",
        "__invert__",
        "__round__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__floordiv__",
        "__rfloordiv__",
        "__mod__",
        "__rmod__",
        "__rpow__",
        "__set__",
        "__setitem__",
        "__complex__",
        "__array__",
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__mul__",
        "__rmul__",
        "__matmul__",
        "__rmatmul__",
        "__truediv__",
        "__rtruediv__",
        "__pow__",
        "__neg__",
        "__eq__",
        "__lt__",
        "__gt__",
        "__le__",
        "__ge__",
        "__float__",
        "__int__",
        "__index__",
        "__torch_function__",
    }
)


class _Edge(NamedTuple):
    """A step from a container to an object in it."""

    place: Place
    child: Any
    parent: _Way
    # whether place is an attribute of an object, which counts only if the function's code names it
    attribute: bool


#: The way to an object: the last step, or a list of the ways to the object that is its container;
#: None: it is always reached.
_Way = _Edge | list[Any] | None


class Found:
    """The tensors (by id, with their places) and modules that a function reaches, and the path to
    them.
    """

    def __init__(self, depth: int = _DEPTH) -> None:
        self.depth = depth
        self.tensors: dict[int, tuple[torch.Tensor, Place]] = {}
        self.modules: dict[int, torch.nn.Module] = {}
        self.generators: list[torch.Generator] = []
        # (place, object) of those whose state Python cannot compare, or not put back
        self.opaque: list[tuple[Place, Any, _Way]] = []
        # how deep an object was searched, and the ways to it
        self._visited: dict[int, tuple[int, list[_Way]]] = {}
        self._edges: list[_Edge] = []
        # objects, with their places and the steps to them, that were too deep to be searched
        self._too_deep: list[tuple[Any, Place, _Way]] = []
        #: with the step to each: (place, ``frozen`` key) of numpy arrays and containers of numbers,
        #: strings and the like
        self.data: list[tuple[Place, Any, _Way]] = []
        self.sizes: list[tuple[Place, Any, _Way]] = []  # (place, ``keys``) of other containers
        # by id, where lists, dicts and other containers were found
        self.containers: dict[int, list[Place]] = {}
        #: the names that the code uses, by the fields of ``Read``
        self.code: dict[str, set[Any]] = {field: set() for field in Read._fields}
        self.code["names"] |= _IMPLICIT
        self.code["loaded"] |= _IMPLICIT | _MAKERS
        self._objects: list[tuple[Any, Place, _Way]] = []  # (object, the place of its attributes)
        # classes and Python modules; only attributes that the code names count
        self._spaces: dict[type | types.ModuleType, None] = {}
        self._named_classes: set[type] = set()  # those that the code may make objects of
        self._done: set[tuple[Any, str]] = set()  # names in these that have been searched
        self._inherited: dict[type, set[str]] = {}  # names that a class inherits
        # of functions of installed packages, whose names are noted
        self._codes: set[types.CodeType] = set()
        #: the visited objects, so that no other object gets one of their ids
        self.alive: list[Any] = []

    def visit_named(self) -> None:
        """Search the attributes and methods of classes and Python modules that the function names,
        and the objects that those reach.
        """
        while new := [
            (c, n)
            for c in list(self._spaces)
            for n in self._names_in(c)
            if (c, n) not in self._done
        ]:
            self._done.update(new)
            for space, name in new:
                if isinstance(space, types.ModuleType):
                    _step(
                        space.__dict__[name],
                        Place(space.__dict__, name, space.__name__),
                        self,
                        self.depth,
                        None,
                        True,
                    )
                    continue
                for at, owner in enumerate(space.__mro__):
                    if name not in owner.__dict__ or owner is object:
                        continue
                    for heir in space.__mro__[:at]:
                        if not of_library(heir.__module__) and name not in heir.__dict__:
                            self._inherited.setdefault(heir, set()).add(name)
                    if owner is torch.nn.Module or is_ours(owner.__module__):
                        continue
                    functions = _functions_of(owner.__dict__[name])
                    self.alive.append(
                        getattr(owner.__dict__[name], "__func__", owner.__dict__[name])
                    )
                    if _installed(owner.__module__):
                        for function in functions:
                            self.read(function)
                        continue
                    where = Place(owner.__dict__, name, owner.__name__)
                    if not functions:
                        _step(where.get(), where, self, self.depth, None, True)
                    elif (owner, name) not in self._done or owner is space:
                        self._edges.append(_Edge(where, where.get(), None, True))
                        for function in functions:
                            _visit(function, Place(function, None), self, self.depth, None)

    def visit_deep(self) -> None:
        """Search objects that are deeper than ``depth``, one level more, as far as the names that
        the function uses lead to them.
        """
        self.__dict__.pop("_reaches", None)  # more names are known by now, and more ways
        waiting = self._too_deep
        deep = [self._reaches(way) for _, _, way in waiting]
        self._too_deep = [
            found for found, reached in zip(waiting, deep, strict=True) if not reached
        ]
        for x, place, way in itertools.compress(waiting, deep):
            _visit(x, place, self, 1, way)
        self.__dict__.pop("_reaches", None)

    def read(self, function: types.FunctionType) -> None:
        """Note the names that a function of an installed package reads, and those of the functions
        that it calls by their global names.

        What else such a function reaches is constant: a large package would be searched for
        minutes.
        """
        waiting = [function]
        while waiting:
            function = waiting.pop()
            read, library = read_by(function.__code__), of_library(function.__module__)
            if function.__code__ not in self._codes:
                self._codes.add(function.__code__)
                self.note(read, library)
                called = (
                    () if library else (function.__globals__.get(name) for name in read.globals)
                )
                waiting += [f for f in called if isinstance(f, types.FunctionType)]

    def note(self, read: Read, library: bool = False) -> None:
        """Note the names that a code uses; library: it is PyTorch's or another one whose names as
        strings say nothing.
        """
        if library:
            read = Read(*[tuple({*names} - _ANY_NAME) for names in read])._replace(optional=())
        for field, names in read._asdict().items():
            self.code[field].update(names)

    def at(self, x: Any, place: Place) -> None:
        """Note where a container, or an object that may be replaced, was found."""
        self.containers.setdefault(id(x), []).append(place)
        self.alive.append(x)

    def sets(self, name: str) -> bool:
        """Whether the function, or a method that it calls, sets an attribute or a global variable
        of that name.
        """
        stored = self.code["stored"]
        return name in stored or not _ANY_NAME.isdisjoint(stored) or self._named is None

    def only_sets(self, name: str) -> bool:
        """Whether the function, or a method that it calls, sets an attribute or a global variable
        of that name, and reads none.
        """
        return self.sets(name) and not self.names(name)

    def refused(self) -> Iterator[str]:
        """What no program can follow, in words."""
        for place, x in self.reached(self.opaque):
            if isinstance(x, contextvars.ContextVar):
                if "set" in self.code["names"]:
                    yield f"it may set the context variable {x.name}, which has no value yet"
            elif not isinstance(x, _IN_MEMORY) or not _READING.isdisjoint(self.code["names"]):
                yield f"{place} is a {type(x).__name__}, which gives something else each time"

    def python_generators(self) -> list[Any]:
        """The generators of random numbers of Python's and NumPy's that the
        function may draw from.
        """
        found = [
            x
            for x in self.alive
            if isinstance(x, random.Random | np.random.Generator | np.random.RandomState)
        ]
        return [*found, *((random, np.random) if "random" in self.code["names"] else ())]

    def misses(self) -> int:
        """How often the caches of functions that it reaches (functools.lru_cache) had no answer."""
        caches = {id(x): x for x in self.alive if isinstance(x, functools._lru_cache_wrapper)}
        return sum(x.cache_info().misses for x in caches.values())

    def only_adds(self, container: Any) -> bool:
        """Whether the function adds to a container, and reads nothing of it: what is in it is then
        no condition.
        """
        places = self.containers.get(id(container), ())
        used, opened, added = (self.code[field] for field in ("used", "opened", "added"))
        return (
            bool(places)
            and self._named is not None
            and all(
                None not in names
                and used.isdisjoint(names)
                and opened.issuperset(names[:-1])
                and not added.isdisjoint((names[-1], *map(entry_of, names[-2:-1])))
                and names[-1] not in opened
                for names in [p.names for p in places]
            )
        )

    def set_in_spaces(self) -> Iterator[tuple[type | types.ModuleType, list[str]]]:
        """The user's classes and Python modules, each with the names of its attributes that the
        function sets.
        """
        for space in self._spaces:
            name = space.__name__ if isinstance(space, types.ModuleType) else space.__module__
            if self.code["stored"] and _of_user(name):
                yield space, sorted(self.code["stored"])

    def _names_in(self, space: type | types.ModuleType) -> list[str]:
        """The names of a class, or of a Python module, that the function uses."""
        if isinstance(space, types.ModuleType):
            return [n for n in self.code["names"] if n in space.__dict__]
        names = [*self.code["names"], *(_MAKERS if space in self._named_classes else ())]
        if self._named is not None:
            return names
        return [
            *names,
            *[
                n
                for c in space.__mro__
                if not of_library(c.__module__)
                for n in c.__dict__
                if not n.startswith("__")
            ],
        ]

    def visit_tensors(self) -> None:
        """Search the attributes of the tensors that the function may read beside their values."""
        pulls = not _PULLING.isdisjoint(self.code["names"]) or any(
            is_ours(type(module).__module__)
            for module in self.modules.values()  # a TrainingStep
        )
        without_hooks: list[Place] = []
        for t, place in list(self.tensors.values()):
            if type(t) not in (torch.Tensor, torch.nn.Parameter):
                continue
            wanted = [n for n in vars(t) if not n.startswith("_")]
            if "requires_grad" in self.code["names"]:
                wanted.append("requires_grad")
            if GRAD in self.code["names"] and t.is_leaf:
                wanted.append("grad")
            if t.requires_grad and pulls:
                if has_hooks(t):
                    wanted += HOOKS_OF_TENSORS
                else:
                    without_hooks.append(place)
            for name in wanted:
                read = Asked(
                    functools.partial(lambda p, n: getattr(p.get(), n), place, name),
                    name,
                    "a tensor",
                )
                where = GradOf(place, name) if name == "grad" else read
                named = name != "grad" and name not in HOOKS_OF_TENSORS
                _step(getattr(t, name), where, self, self.depth, None, named)
        if without_hooks:  # one question for all of them, because it is asked at each call
            hooked = Asked(
                lambda: any(has_hooks(place.get()) for place in without_hooks),
                "hooks",
                "the tensors",
            )
            _step(False, hooked, self, self.depth, None, False)

    @property
    def _named(self) -> set[str] | None:
        """Names of attributes that the function, and the methods that it calls, may read; None if
        it may read any.
        """
        return None if not _ANY_NAME.isdisjoint(self.code["loaded"]) else self.code["loaded"]

    def names(self, name: str) -> bool:
        """Whether the function, or a method that it calls, uses that name."""
        return self._named is None or name in self._named

    @functools.cached_property
    def _reaches(self) -> Callable[[_Way], bool]:
        """Whether the attributes on a way are among the names that the function uses; to be asked
        when the search is over.
        """
        named, reached = self._named, set[int]()

        def reaches(way: _Way) -> bool:
            if isinstance(way, _Edge):
                return (not way.attribute or named is None or way.place.key in named) and reaches(
                    way.parent
                )
            return way is None or id(way) in reached

        before = -1
        while len(reached) > before:  # an object may have several ways, and they may go in circles
            before = len(reached)
            reached.update(
                id(ways) for _, ways in self._visited.values() if any(map(reaches, ways))
            )
        return reaches

    def edges(self) -> list[tuple[Place, Any]]:
        """(place, object) for everything else on the way to tensors and modules, and for numbers,
        functions and other objects.

        A container or a plain object that is at one place is left out: another one that is like it
        may take its place.
        """
        return [
            (e.place, e.child)
            for e in self._edges
            if self._reaches(e) and not self._may_be_replaced(e.child)
        ]

    def _may_be_replaced(self, x: Any) -> bool:
        places, opened = self.containers.get(id(x), ()), self._visited.get(id(x), (0, []))[0] > 0
        return (
            bool(places)
            and opened
            and _replaceable(x)
            and (len({p.identity for p in places}) == 1 or _of_inputs(x))
        )

    def reached(self, found: Sequence[tuple[Any, Any, _Way]]) -> list[tuple[Any, Any]]:
        """Those of ``data``, ``sizes`` or objects that the function reaches by attributes that it
        names.
        """
        return [(x, y) for x, y, way in found if self._reaches(way)]

    def objects(self) -> list[tuple[Callable[[], Any], type, dict[str, Any] | None]]:
        """(a function that returns the object, its class, its attributes) of the modules, and of
        the objects of the user's classes.

        The attributes are None if another object of that class may take its place.
        """
        found: dict[int, tuple[Any, Callable[[], Any], bool]] = {
            id(m): (m, Members(m).owner, True) for m in self.modules.values()
        }
        for x, attributes in self.reached(self._objects):
            fixed = type(attributes) is not DictOf
            found[id(x)] = (x, Members(x).owner if fixed else attributes.container.get, fixed)
        return [
            (owner, type(x), x.__dict__ if fixed else None)
            for x, owner, fixed in found.values()
            if type(getattr(x, "__dict__", None)) is dict and not is_ours(type(x).__module__)
        ]

    def absent(self) -> list[tuple[Place, frozenset[str]]]:
        """(the place of an object's or a class' attributes, names missing there): one more would
        change what the function reads.
        """
        found = [
            (Place(cls.__dict__, None), frozenset(names)) for cls, names in self._inherited.items()
        ]
        for x, attributes in self.reached(self._objects):
            cls = type(x)
            names = {n for n in self.code["optional"] if not hasattr(cls, n)}
            for owner in cls.__mro__:
                if not of_library(owner.__module__):
                    names.update(
                        n
                        for n, v in owner.__dict__.items()
                        if n in self.code["loaded"] and not hasattr(type(v), "__set__")
                    )
                    names.update(self.code["loaded"] if "__getattr__" in owner.__dict__ else ())
            names.difference_update(x.__dict__, _IMPLICIT)
            if names:
                found.append((attributes, frozenset(names)))
        return found


def scan(*roots: Any, deeper: bool = False) -> Found:
    """Search what these functions, modules and objects reach: to a depth of 4 everything, and to a
    depth of 16 what the functions name; deeper: that deep everything.
    """
    found = Found(_DEEPER if deeper else _DEPTH)
    for r in roots:
        _visit(r, Place(r, None), found, found.depth, None)
    found.visit_named()
    for _ in range(_DEEPER - found.depth):
        before = len(found._visited), len(found.code["names"])
        found.visit_deep()
        found.visit_named()
        if before == (len(found._visited), len(found.code["names"])) or before[0] > _MANY:
            break
    found.visit_tensors()
    found.visit_named()
    if found._named is None:  # it may read any attribute, also one that is not there yet
        found.sizes += [(place, keys(x.__dict__), way) for x, place, way in found._objects]
    return found


def _visit(x: Any, place: Place, found: Found, depth: int, edge: _Way) -> None:
    """Search x, and note the step that leads to it; edge None: the place never changes."""
    if isinstance(x, torch.Tensor):
        first = found.tensors.setdefault(id(x), (x, place))[1]
        # one tensor at two places: it is read at the first one
        if first is not place and first.identity != place.identity:
            both = Asked(
                lambda: first.get() is place.get(),
                None,
                f"whether one tensor is at {place} and at another place",
            )
            found._edges.append(_Edge(both, True, edge, False))
        elif first is place and is_sparse(x):
            _visit_sparse(x, place, found, depth, edge)
        return
    if isinstance(x, Sparse):  # an argument that is a sparse tensor
        _visit(x.tensor(), Referent(x.tensor, None, "a sparse argument"), found, depth, edge)
        return
    if is_input(x):  # a number that the function counts
        return
    if isinstance(x, type) and _of_user(x.__module__):
        found._spaces[x] = None
        found._named_classes.add(x)
        if not of_library(type(x).__module__):  # a metaclass of the user's
            found._spaces[type(x)] = None
    # a context manager as a decorator makes its generator anew
    if _opaque(x) and place.key != "gen":
        found.opaque.append((place, x, edge))
    if isinstance(x, torch.Generator):
        found.generators.append(x)
    elif isinstance(x, types.ModuleType):
        if _of_user(x.__name__):
            found._spaces[x] = None
        return
    elif isinstance(x, _FUNCTION) or not isinstance(x, _SKIP) or _has_attributes(x):
        data = frozen(x) if isinstance(x, _CONTAINERS) else None
        if _replaceable(x) or (isinstance(x, _CONTAINERS) and not isinstance(x, tuple | frozenset)):
            found.at(x, place)
        if data is not None:
            _note_containers(x, place, found)
        if data is None or _has_attributes(x):
            before, ways = found._visited.get(id(x), (-1, []))
            ways.append(edge)
            if depth > before:
                found._visited[id(x)] = depth, ways
                found.alive.append(x)
                if isinstance(x, torch.nn.Module):
                    _visit_module(x, found, max(depth, 1), ways)
                elif depth:
                    _visit_children(
                        x, found.containers.get(id(x), [place])[0], found, depth, ways, data is None
                    )
                else:
                    found._too_deep.append((x, place, edge))
        if data is not None and (not isinstance(x, tuple) or not _hashable(x)):
            found.data.append((place, data, edge))
            return
    if isinstance(edge, _Edge):
        found._edges.append(edge)


def _note_containers(x: Any, place: Place, found: Found) -> None:
    """Note the containers in a container of numbers, which is compared as a whole: the function may
    change each of them.
    """
    for child, where in _children(x):
        if isinstance(child, _CONTAINERS):
            found.at(child, inner := Entry(place, where.key))
            _note_containers(child, inner, found)


def _replaceable(x: Any) -> bool:
    """Whether another container of its type with the same keys, or another object of its class with
    such attributes, may take its place.
    """
    return (isinstance(x, _TREES) and not _has_attributes(x) and frozen(x) is None) or (
        is_plain(x) and not slots_of(x)
    )


def _of_inputs(x: Any) -> bool:
    """Whether a list would be compared by content, if there were no inputs among its numbers."""
    return isinstance(x, list) and frozen([0 if is_input(v) else v for v in x]) is not None


def _opaque(x: Any) -> bool:
    """Whether C or a library keeps the state of an object where it cannot be compared, as that of
    an iterator, or not put back, as that of a context variable that has no value yet; files are
    outside of the process.
    """
    if isinstance(x, contextvars.ContextVar):
        return x.get(x) is x
    return isinstance(x, _IN_MEMORY) or (
        isinstance(x, Iterator)
        and not isinstance(x, io.IOBase)
        and (of_library(type(x).__module__) or not hasattr(x, "__dict__"))
    )


def is_plain(x: Any) -> bool:
    """Whether an object of a class in Python is its attributes, and nothing else."""
    cls = type(x)
    return (
        (type(getattr(x, "__dict__", None)) is dict or bool(slots_of(x)))
        and all(
            getattr(cls, name) is getattr(object, name)
            for name in ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")
        )
        and not of_library(cls.__module__)
        and not is_ours(cls.__module__)
        and not isinstance(x, torch.nn.Module | Unsearched)
    )


def _visit_sparse(t: torch.Tensor, place: Place, found: Found, depth: int, edge: _Way) -> None:
    """Search the parts of a sparse tensor; its layout and its shape must stay the same, and it
    stays coalesced or not.
    """
    kind = Asked(lambda: _kind(place.get()), None, f"the layout and the shape of {place}")
    found.data.append((kind, frozen(_kind(t)), edge))
    if sparse.can_be_taken_apart(t):
        for part in ("indices", "values"):
            where = Asked(
                lambda part=part: getattr(sparse.sparse(place.get()), part),
                None,
                f"the {part} of {place}",
            )
            _visit(where.get(), where, found, depth, edge)


def _kind(x: Any) -> tuple[Any, ...] | None:
    if not isinstance(x, torch.Tensor):
        return None
    return (
        str(x.layout),
        *x.shape,
        x.requires_grad,
        x.layout is torch.sparse_coo and x.is_coalesced(),
    )


def _step(x: Any, place: Place, found: Found, depth: int, parent: _Way, attribute: bool) -> None:
    """Search x, which may later be replaced at its place."""
    _visit(x, place, found, depth, _Edge(place, x, parent, attribute))


def frozen(x: object) -> Any:
    """The content of a numpy array, or of a container of numbers, strings and such containers, as a
    key; None for all other objects.
    """
    try:
        return _frozen(x, iter(range(_DATA)))
    except TypeError:
        return None


def entries(x: object) -> tuple[Any, tuple[Any, ...]]:
    """A container with its keys and values, to be compared by identity; (None, ()) if that
    comparison cannot see every change.
    """
    found = (
        (*x, *x.values())
        if isinstance(x, _MAPPINGS)
        else tuple(x)
        if isinstance(x, list | collections.deque)
        else (x,)
    )
    return (x, found) if all(isinstance(v, _PLAIN) for v in found) else (None, ())


def keys(x: Any) -> tuple[type, Any]:
    """What a container has beside its values: its type, the keys of a dict in order, the members of
    a set; of others how many it has.
    """
    return type(x), len(x) if isinstance(x, list | tuple | collections.deque) or len(
        x
    ) > _DATA else tuple(x)


def _has_attributes(x: object) -> bool:
    """Whether a container, a number or a string can hold more than its content: a class of the
    user's, a defaultdict.
    """
    if of_library(type(x).__module__) or type(x).__module__ == "collections":
        return isinstance(x, collections.defaultdict)
    return isinstance(x, _CONTAINERS) or (
        isinstance(x, str | bytes | int | float) and type(getattr(x, "__dict__", None)) is dict
    )


def _hashable(x: object) -> bool:
    try:
        hash(x)
    except (TypeError, ValueError):  # a view of memory that can be written to
        return False
    return True


def _frozen(x: object, room: Iterator[int]) -> Any:
    if isinstance(x, _PLAIN):
        if next(room, None) is None or is_input(x):
            raise TypeError
        return identical(x)
    if isinstance(x, _MAPPINGS):
        return type(x), *[(_frozen(k, room), _frozen(v, room)) for k, v in x.items()]
    if isinstance(x, list | tuple | collections.deque):
        return (
            type(x),
            x.maxlen if isinstance(x, collections.deque) else None,
            *[_frozen(v, room) for v in x],
        )
    if isinstance(x, set | frozenset):
        return type(x), frozenset([_frozen(v, room) for v in x])
    if isinstance(x, np.ndarray) and x.nbytes <= _BYTES:
        return (
            x.dtype,
            x.shape,
            x.strides,
            x.tobytes() if x.dtype.kind != "O" else tuple([_frozen(v, room) for v in x.flat]),
        )
    if isinstance(x, _BUFFERS) and memoryview(x).nbytes <= _BYTES:
        return type(x), memoryview(x).format, bytes(memoryview(x))
    raise TypeError


#: Files in memory, and methods by which code reads from them.
_IN_MEMORY = io.StringIO | io.BytesIO
_READING = frozenset({"read", "read1", "readinto", "readline", "readlines", "next"})


#: The cell of a variable that is not bound: no other cell is equal to it.
_UNBOUND = types.CellType()
#: Types that are compared by content.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_MAPPINGS, _BUFFERS = (dict, types.MappingProxyType), (bytearray, array.array, memoryview)
_CONTAINERS = (*_MAPPINGS, list, tuple, set, frozenset, collections.deque, np.ndarray, *_BUFFERS)
_TREES = (dict, list, tuple, collections.deque)


def _visit_children(
    x: Any, place: Place, found: Found, depth: int, edge: _Way, entries: bool
) -> None:
    transparent = isinstance(x, _TRANSPARENT) or "__wrapped__" in getattr(x, "__dict__", ())
    attributes = not transparent and (not isinstance(x, _CONTAINERS) or _has_attributes(x))
    contained = isinstance(x, _CONTAINERS)
    found_at = place.key is not None or place.get() is not place.container
    nested = found_at and _replaceable(x)
    # another defaultdict may not take the place of one, but names lead to its entries too
    keyed = found_at and isinstance(x, collections.defaultdict)
    if isinstance(x, types.FunctionType):
        if is_ours(_defined_in(x)) or of_library(x.__module__):
            pass
        elif _installed(x.__module__):
            found.read(x)
        else:
            found.note(read_by(x.__code__))
            found._edges.append(
                _Edge(Place(Members(x), "__code__", x.__name__), x.__code__, edge, False)
            )
            _visit_attributes(x, x.__name__, found, depth, edge)
    elif isinstance(x, functools.partial):
        _visit_attributes(x, "functools.partial", found, depth, edge)
    elif isinstance(x, operator.attrgetter | operator.methodcaller):
        for field in ("names", "loaded"):
            texts = [text for text in x.__reduce__()[1] if isinstance(text, str)]
            found.code[field].update(*[text.split(".") for text in texts])
    elif attributes:
        found._spaces[type(x)] = None
        if type(getattr(x, "__dict__", None)) is dict and not of_library(type(x).__module__):
            found._objects.append(
                (x, DictOf(place, None) if nested else Place(x.__dict__, None), edge)
            )
    for child, where in (
        *(_children(x) if entries else ()),
        *(_attributes(x) if contained and attributes else ()),
    ):
        constant = (
            where.key is None
            and not isinstance(where.container, types.CellType)
            and type(where) not in (Asked, Context)
        )
        attribute = attributes and (
            not contained or where.container is getattr(x, "__dict__", None)
        )
        if not constant and (nested or (keyed and where.container is x)):
            where = Entry(
                place if where.container is x else DictOf(place, None), where.key, where.owner
            )
        step = edge if constant else _Edge(where, child, edge, attribute)
        _visit(child, where, found, depth if transparent else depth - 1, step)
    if entries and isinstance(x, (*_MAPPINGS, *_TREES, set)):
        found.sizes.append((place, keys(x), edge))


def _visit_attributes(x: Any, name: str, found: Found, depth: int, edge: _Way) -> None:
    """Search the attributes that a function, or a functools.partial, has been given."""
    if x.__dict__:
        found._edges.append(_Edge(Place(Members(x), "__dict__", name), x.__dict__, edge, False))
    for key, value in x.__dict__.items():
        if key != "__wrapped__":
            _step(value, Place(x.__dict__, key, name), found, depth - 1, edge, True)


def _visit_module(module: torch.nn.Module, found: Found, depth: int, edge: _Way) -> None:
    for m in module.modules():
        if id(m) in found.modules:
            continue
        found.modules[id(m)] = m
        found._visited.setdefault(id(m), (depth, [edge]))
        found._spaces[type(m)] = None
        name = type(m).__name__
        users = not of_library(type(m).__module__)
        if users:
            found._objects.append((m, Place(m.__dict__, None), edge))
        listed = isinstance(m, torch.nn.ParameterList | torch.nn.ParameterDict)
        for store in (m._parameters, m._buffers):
            for key, t in store.items():
                place = Place(store, key, name)
                _visit(
                    t, place, found, depth, _Edge(place, None, edge, False) if t is None else None
                )
            if listed or any(t is None for t in store.values()):
                found.sizes.append((Place(store, None), keys(store), edge))
        for hooks in HOOKS:
            for hook in m.__dict__.get(hooks, {}).values():
                _visit(hook, Place(hook, None), found, depth, None)
        for key, value in m.__dict__.items():
            if (
                depth
                and key not in _OWN
                and (users or not key.startswith("_") or isinstance(value, torch.Tensor))
            ):
                _step(value, Place(m.__dict__, key, name), found, depth - 1, edge, True)


#: Attributes in which a module keeps the hooks of its forward and backward.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Attributes that every module has.
_OWN = frozenset(torch.nn.Module().__dict__)


def _children(x: Any) -> Iterator[tuple[Any, Place]]:
    if isinstance(x, types.FunctionType):
        ours = is_ours(_defined_in(x))
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if cell == _UNBOUND:
                unbound = functools.partial(operator.eq, cell, _UNBOUND)
                yield True, Asked(unbound, None, f"whether the variable {name} is not bound")
                continue
            content = cell.cell_contents
            if _defined_in(x) == "functools" and isinstance(content, weakref.WeakKeyDictionary):
                continue  # what singledispatch has found already
            # our own variables are bound once
            yield content, Place(content, None) if ours else Place(cell, None, VARIABLE + name)
        if not ours and not _installed(x.__module__):  # globals of its module are the user's
            there, read = x.__globals__, read_by(x.__code__)
            yield from [(there[n], Place(there, n, GLOBAL)) for n in read.globals if n in there]
            imported = [sys.modules[n] for n in read.imports if n in sys.modules]
            yield from [(module, Place(module, None)) for module in imported]
            for name in ("__defaults__", "__kwdefaults__"):
                if getattr(x, name):
                    yield getattr(x, name), Place(Members(x), name, x.__name__)
        if hasattr(x, "__wrapped__"):
            yield (
                x.__wrapped__,
                Place(x.__wrapped__, None) if ours else Place(x.__dict__, "__wrapped__"),
            )
    elif isinstance(x, types.MethodType):
        yield x.__self__, Place(x.__self__, None)
        yield x.__func__, Place(x.__func__, None)
    elif isinstance(x, types.BuiltinMethodType):
        # of a function of a module, __self__ is the module
        if not isinstance(x.__self__, types.ModuleType | type):
            yield x.__self__, Place(x.__self__, None)
    elif isinstance(x, _FUNCTION):
        for owner in () if of_library(x.__module__) else x.__mro__:
            for method in () if of_library(owner.__module__) else owner.__dict__.values():
                if isinstance(method, staticmethod):
                    yield method.__func__, Place(method.__func__, None)
    elif isinstance(x, contextvars.ContextVar):
        yield x.get(None), Context(x, None, f"the context variable {x.name}")
    elif isinstance(x, weakref.ReferenceType):
        referent = x()
        yield (
            referent is None,
            Asked(lambda: x() is None, None, "whether the referent of a weak reference is dead"),
        )
        if referent is not None:
            yield referent, Referent(x, None, "the referent of a weak reference")
    elif isinstance(x, functools.partial):
        for name in ("func", "args", "keywords"):
            yield getattr(x, name), Place(Members(x), name, "functools.partial")
    elif "__wrapped__" in getattr(x, "__dict__", ()):
        # a jitted function: its programs are skipped, and its function never changes
        yield x.__wrapped__, Place(x.__wrapped__, None)
    elif isinstance(x, _MAPPINGS):
        for key, value in x.items():
            yield key, Place(key, None)
            yield value, Place(x, key)
    elif isinstance(x, list | tuple | collections.deque):
        for i, value in enumerate(x):
            yield value, Place(x, i)
    elif isinstance(x, set | frozenset):
        for value in x:
            yield value, Place(value, None)
    elif isinstance(x, np.ndarray):
        for index, value in np.ndenumerate(x) if x.dtype.kind == "O" else ():
            yield value, Place(x, index)
    elif isinstance(x, torch.library.CustomOpDef):  # PyTorch itself runs its other functions
        for name in private.RULES_OF_CUSTOM_OPS:
            yield x.__dict__.get(name), Place(x.__dict__, name, "a custom_op")
    else:
        yield from _attributes(x)


def _attributes(x: Any) -> Iterator[tuple[Any, Place]]:
    if isinstance(x, collections.defaultdict):
        yield x.default_factory, Place(Members(x), "default_factory", "a defaultdict")
    if of_library(type(x).__module__) and not isinstance(x, _HOLDERS):
        return
    if type(getattr(x, "__dict__", None)) is dict:
        for key, value in x.__dict__.items():
            yield value, Place(x.__dict__, key, type(x).__name__)
    for name in slots_of(x):
        there = functools.partial(hasattr, x, name)
        yield there(), Asked(there, name, type(x).__name__)
        if there():
            yield getattr(x, name), Place(Slots(x), name, type(x).__name__)


def has_hooks(t: torch.Tensor) -> bool:
    """Whether a tensor has hooks on its gradient."""
    return bool(t._backward_hooks or t._post_accumulate_grad_hooks)


def of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.cache
def _installed(module: str | None) -> bool:
    """Whether a Python module, by its name, is of a library or of an installed package, whose code
    and globals count as constant.
    """
    if of_library(module):
        return True
    top = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or next(
        iter(getattr(sys.modules.get(top), "__path__", ())), ""
    )
    return (
        top in sys.stdlib_module_names - {"__main__"}
        or "site-packages" in file
        or "dist-packages" in file
    )


def is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _OURS


def _defined_in(function: types.FunctionType) -> str | None:
    """The name of the Python module that defines a function; ``__module__`` names that of the
    function it wraps.
    """
    return function.__globals__.get("__name__")


def _of_user(module: str | None) -> bool:
    """Whether the user has written a Python module."""
    return not _installed(module) and not is_ours(module)


def _functions_of(attribute: Any) -> list[types.FunctionType]:
    """The functions that an attribute of a class runs when it is read or called, set or deleted."""
    if isinstance(attribute, property):
        return [
            function
            for accessor in (attribute.fget, attribute.fset, attribute.fdel)
            for function in _functions_of(accessor)
        ]
    if isinstance(attribute, functools.cached_property):
        attribute = attribute.func
    attribute = getattr(attribute, "__func__", attribute)
    while hasattr(attribute, "__wrapped__"):
        attribute = attribute.__wrapped__
    return [attribute] if isinstance(attribute, types.FunctionType) else []


def slots_of(x: Any) -> list[str]:
    """The names of the attributes of an object that are slots of classes that are no library's."""
    return [
        name
        for cls in type(x).__mro__
        if "__slots__" in cls.__dict__ and not of_library(cls.__module__)
        for name, slot in cls.__dict__.items()
        if isinstance(slot, types.MemberDescriptorType)
    ]
