"""What a function reaches without being given it: tensors and modules in its closure, globals, defaults, bound object.

A tensor is found together with its place (a dict or cell and the key in it), so that a compiled function can look at the place
again at each call: after ``model.weight = new`` it sees the new tensor.  The containers and objects on the way to it, and the Python
numbers beside it, are found with their places too, for ``guards``.
"""
from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

_DEPTH, _DEEPER = 4, 16  # objects within objects that are looked into, and where a tensor was used that is not among what was found
_FUNCTION = type(torch.autograd.Function)
_TRANSPARENT = (types.FunctionType, types.MethodType, functools.partial, _FUNCTION)  # what they hold is no deeper than they are
_SKIP = (types.ModuleType, type, str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
_NUMBERS = (bool, int, float, complex, str, type(None))
_LIBRARIES = frozenset({"torch", "jax", "jaxlib", "numpy", "builtins", "typing", "functools", "collections", "abc"})
_OURS = frozenset({"bridge", "torchfunc_jax"})
#: Names that give access to attributes that the code names as strings, and to any attribute.
_BY_STRING, _ANY_NAME = frozenset({"getattr", "hasattr"}), frozenset({"vars", "__dict__"})
#: Methods that Python calls without their names in the code that uses them; those that only make or show an object are not among them.
_IMPLICIT = frozenset({
    "__call__", "forward", "__getitem__", "__iter__", "__next__", "__len__", "__contains__", "__bool__", "__enter__", "__exit__",
    "__getattr__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__matmul__", "__rmatmul__", "__truediv__", "__rtruediv__",
    "__pow__", "__neg__", "__eq__", "__lt__", "__gt__", "__le__", "__ge__", "__float__", "__int__", "__index__", "__torch_function__",
})  # fmt: skip


class Place:
    """Where something was found; ``get()`` is what is there now.

    Attributes:
        container, key: a dict, list or tuple and the key in it; key None: a cell, or the thing itself.
        owner: what the container belongs to, to be read in messages.
    """

    __slots__ = ("container", "key", "owner")

    def __init__(self, container: Any, key: Any, owner: str = "") -> None:
        self.container, self.key, self.owner = container, key, owner

    def get(self) -> Any:
        if self.key is None:
            return self.container.cell_contents if isinstance(self.container, types.CellType) else self.container
        return self.container[self.key]

    def __str__(self) -> str:
        if self.key is None:
            return self.owner or "a value that the function uses"
        return f"{self.owner}.{self.key}" if self.owner else f"the entry {self.key!r} of a {type(self.container).__name__}"


class _Slots:
    """The attributes of an object without a ``__dict__``, as a container."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self.owner, name)


class _Edge:
    """A step from a container to what it holds, taken on the way to a tensor or a module."""

    __slots__ = ("attribute", "child", "parent", "place")

    def __init__(self, place: Place, child: Any, parent: _Edge | None, attribute: bool) -> None:
        self.place, self.child, self.parent = place, child, parent
        self.attribute = attribute  # of an object: of interest only if the function's code names it

    def named(self, names: set[str] | None) -> bool:
        edge: _Edge | None = self
        while edge is not None:
            if edge.attribute and names is not None and edge.place.key not in names:
                return False
            edge = edge.parent
        return True


class Found:
    """Tensors (by id, with their places) and modules that a function reaches, and the way to them."""

    def __init__(self, depth: int = _DEPTH) -> None:
        self.depth = depth
        self.tensors: dict[int, tuple[torch.Tensor, Place]] = {}
        self.modules: dict[int, torch.nn.Module] = {}
        self.generators: list[torch.Generator] = []
        self._holds: dict[int, bool] = {}  # by the id of what was visited: whether there is a tensor or a module in it
        self._edges: list[_Edge] = []
        self._numbers: list[_Edge] = []
        self._sizes: list[tuple[Any, int, _Edge | None]] = []
        self._names: set[str] = set(_IMPLICIT)
        self._classes: dict[type, None] = {}
        self._alive: list[Any] = []  # what was visited: no id may be given to another object meanwhile

    def visit_methods(self) -> None:
        """Look into the methods that the function may call, by their names, and into what those reach."""
        done: set[tuple[type, str]] = set()
        while True:
            new = [(c, n) for c in list(self._classes) for n in list(self._names) if (c, n) not in done]
            if not new:
                return
            done.update(new)
            for cls, name in new:
                for owner in cls.__mro__:
                    method = owner.__dict__.get(name)
                    if method is None or owner in (object, torch.nn.Module) or _ours(owner.__module__):
                        continue
                    function = _function_of(method)
                    if function is None:
                        continue
                    if _of_library(owner.__module__):
                        self._names.update(set(_global_names(function.__code__)) - _ANY_NAME)
                    else:
                        _visit(function, Place(function, None), self, self.depth, None)

    @property
    def _named(self) -> set[str] | None:
        """Names of attributes that the function, and the methods that it calls, may read; None: any."""
        return None if not _ANY_NAME.isdisjoint(self._names) else self._names

    def names(self, name: str) -> bool:
        """Whether the function, or a method that it calls, uses that name."""
        return self._named is None or name in self._named

    def edges(self) -> list[tuple[Place, Any]]:
        """The containers and objects on the way to tensors and modules, and tensors found at a second place."""
        return [(e.place, e.child) for e in self._edges if e.named(self._named)]

    def numbers(self) -> list[tuple[Place, Any]]:
        """Numbers, strings and None in attributes of objects and modules, if the function's code names the attribute."""
        return [(e.place, e.child) for e in self._numbers if e.named(self._named)]

    def sizes(self) -> list[tuple[Any, int]]:
        """Containers of tensors or modules, and empty ones, with how much they hold."""
        return [(c, n) for c, n, e in self._sizes if e is None or e.named(self._named)]


def scan(*roots: Any, deeper: bool = False) -> Found:
    """Everything reachable from these functions, modules and objects, to a small depth; or to one that is not small."""
    found = Found(_DEEPER if deeper else _DEPTH)
    for r in roots:
        _visit(r, Place(r, None), found, found.depth, None)
    found.visit_methods()
    return found


def _visit(x: Any, place: Place, found: Found, depth: int, edge: _Edge | None) -> bool:
    """Whether there is a tensor, a module or a generator in x."""
    if isinstance(x, torch.Generator):
        found.generators.append(x)
        if edge is not None:
            found._edges.append(edge)
        return True
    if isinstance(x, torch.Tensor):
        first = found.tensors.setdefault(id(x), (x, place))[1]
        if first is not place:  # one tensor at two places: as long as it is at both, the first is read
            found._edges.append(_Edge(_Together(first, place), True, edge.parent if edge else None, edge is not None and edge.attribute))
        return True
    if isinstance(x, _SKIP) and not isinstance(x, _FUNCTION):
        return False
    if id(x) in found._holds:
        holds = found._holds[id(x)]
        if holds and edge is not None:
            found._edges.append(edge)
        return holds
    found._holds[id(x)] = True  # in progress
    found._alive.append(x)
    if isinstance(x, torch.nn.Module):
        _visit_module(x, found, depth, edge)
        holds = True
    elif depth == 0:
        holds = False
    else:
        holds = _visit_children(x, found, depth, edge)
    found._holds[id(x)] = holds
    if holds and edge is not None:
        found._edges.append(edge)
    return holds


class _Together(Place):
    """Two places; ``get()`` is whether one thing is at both."""

    __slots__ = ("other",)

    def __init__(self, place: Place, other: Place) -> None:
        super().__init__(place.container, place.key, place.owner)
        self.other = other

    def get(self) -> Any:
        return super().get() is self.other.get()

    def __str__(self) -> str:
        return f"whether one tensor is at {self.other} and at another place"


def _visit_children(x: Any, found: Found, depth: int, edge: _Edge | None) -> bool:
    holds = False
    transparent = isinstance(x, _TRANSPARENT) or "__wrapped__" in getattr(x, "__dict__", ())
    attributes = not transparent and not isinstance(x, dict | list | tuple)
    if isinstance(x, types.FunctionType):
        if not _of_library(x.__module__) and not _ours(x.__module__):
            found._names.update(_global_names(x.__code__))
    elif attributes:
        found._classes[type(x)] = None
    for child, where in _children(x):
        constant = where.key is None and not isinstance(where.container, types.CellType)
        step = edge if constant else _Edge(where, child, edge, attributes)
        if attributes and type(child) in _NUMBERS:
            found._numbers.append(_Edge(where, child, edge, True))
            continue
        holds = _visit(child, where, found, depth if transparent else depth - 1, step) or holds
    if isinstance(x, dict | list) and (holds or not x):
        found._sizes.append((x, len(x), edge))
    return holds


def _visit_module(module: torch.nn.Module, found: Found, depth: int, edge: _Edge | None) -> None:
    for m in module.modules():
        if id(m) in found.modules:
            continue
        found.modules[id(m)] = m
        found._holds[id(m)] = True
        found._classes[type(m)] = None
        name = type(m).__name__
        listed = isinstance(m, torch.nn.ParameterList | torch.nn.ParameterDict)
        for store in (m._parameters, m._buffers):
            missing = False
            for key, t in store.items():
                place = Place(store, key, name)
                if t is None:
                    missing = True
                    found._numbers.append(_Edge(place, None, edge, False))
                else:
                    _visit(t, place, found, depth, None)
            if missing or listed:
                found._sizes.append((store, len(store), edge))
        for key, value in m.__dict__.items():
            if key in _OWN:
                continue
            place = Place(m.__dict__, key, name)
            if type(value) in _NUMBERS:
                found._numbers.append(_Edge(place, value, edge, True))
            elif depth and (not key.startswith("_") or isinstance(value, torch.Tensor)):
                _visit(value, place, found, depth - 1, _Edge(place, value, edge, True))


#: Attributes that every module has.
_OWN = frozenset(torch.nn.Module().__dict__)


def _children(x: Any) -> Iterator[tuple[Any, Place]]:
    if isinstance(x, types.FunctionType):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            try:
                yield cell.cell_contents, Place(cell, None, f"the variable {name}")
            except ValueError:  # a variable not yet bound
                continue
        inside = _ours(x.__module__) or _of_library(x.__module__)  # what its own module holds is none of the user's
        for name in () if inside else _global_names(x.__code__):
            if name in x.__globals__:
                yield x.__globals__[name], Place(x.__globals__, name, "the global variable")
        for i, value in enumerate(x.__defaults__ or ()):
            yield value, Place(x.__defaults__, i)
        for key, value in (x.__kwdefaults__ or {}).items():
            yield value, Place(x.__kwdefaults__, key)
        if hasattr(x, "__wrapped__"):
            yield x.__wrapped__, Place(x.__dict__, "__wrapped__")
    elif isinstance(x, types.MethodType):
        yield x.__self__, Place(x.__self__, None)
        yield x.__func__, Place(x.__func__, None)
    elif isinstance(x, _FUNCTION):
        for owner in () if _of_library(x.__module__) else x.__mro__:
            for method in () if _of_library(owner.__module__) else owner.__dict__.values():
                if isinstance(method, staticmethod):
                    yield method.__func__, Place(method.__func__, None)
    elif isinstance(x, functools.partial):
        yield x.func, Place(x.func, None)
        for i, value in enumerate(x.args):
            yield value, Place(x.args, i)
        for key, value in x.keywords.items():
            yield value, Place(x.keywords, key)
    elif "__wrapped__" in getattr(x, "__dict__", ()):  # a jitted function: not what it has compiled
        yield x.__wrapped__, Place(x.__dict__, "__wrapped__")
    elif isinstance(x, dict):
        for key, value in x.items():
            yield value, Place(x, key)
    elif isinstance(x, list | tuple):
        for i, value in enumerate(x):
            yield value, Place(x, i)
    elif _of_library(type(x).__module__):
        return
    elif type(getattr(x, "__dict__", None)) is dict:
        for key, value in x.__dict__.items():
            yield value, Place(x.__dict__, key, type(x).__name__)
    else:
        for cls in type(x).__mro__:
            for name in getattr(cls, "__slots__", ()):
                if not name.startswith("__") and hasattr(x, name):
                    yield getattr(x, name), Place(_Slots(x), name, type(x).__name__)


def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _OURS


def _function_of(attribute: Any) -> types.FunctionType | None:
    """The function that an attribute of a class runs."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    attribute = getattr(attribute, "__func__", attribute)
    while hasattr(attribute, "__wrapped__"):
        attribute = attribute.__wrapped__
    return attribute if isinstance(attribute, types.FunctionType) else None


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals and attributes that a function, or a function inside it, may read."""
    names = list(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names += _global_names(const)
        elif isinstance(const, str) and const.isidentifier() and not _BY_STRING.isdisjoint(code.co_names):
            names.append(const)
    return tuple(dict.fromkeys(names))
