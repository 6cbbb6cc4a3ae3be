"""What a jitted function does to Python objects beside returning a result: it is found in the
trace, undone, and done again at each call.

All that the function reaches (its arguments, variables, globals, modules, hooks) is compared before
the trace and after it. Tensors that the function has put there become outputs of the program, other
values are put there as they are. What ``backward()`` leaves in a ``.grad`` is an output too. If a
program cannot do a change again, jit calls the function itself. holders.py says what can be
changed, and how.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import torch

from bridge import private, private_jax
from bridge.boundary.calls import Call
from bridge.cache_keys import identical
from bridge.convert import tensors, trees
from bridge.errors import CalledItself, at_line
from bridge.intercepted.leaf_gradients import LeafGradients
from bridge.process import having
from bridge.programs import closure_scan
from bridge.programs.closure_scan import Found, is_plain, slots_of
from bridge.programs.holders import MISSING, REBUILT, Difference, Holder, holders, in_arguments
from bridge.programs.places import DictOf, GradOf, OfArgument, Place
from bridge.trace import python_numbers
from bridge.trace.aliasing import views_between
from bridge.trace.levels import state
from bridge.trace.tracing import Traced, exchanged, wrap


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference that the function makes to what a holder holds.

    Attributes:
        identity: that of the holder.
        what, key: what is done, and at which key.
        there: whether an attribute or a variable that the change makes or deletes was there before;
            None: it does neither.
    """

    holder: Holder = dataclasses.field(compare=False)
    identity: Any
    what: str
    key: Any
    there: bool | None = dataclasses.field(compare=False)

    def owner(self) -> Any:
        return self.holder.owner()

    def put(self, owner: Any, value: Any) -> None:
        self.holder.put(owner, self.what, self.key, value)

    def __str__(self) -> str:
        return self.holder.named(self.key)


@dataclasses.dataclass(frozen=True)
class _Grad:
    """The ``.grad`` of the tensor at a place."""

    place: Place = dataclasses.field(compare=False)
    identity: Any

    def owner(self) -> torch.Tensor:
        return self.place.get()

    def put(self, owner: torch.Tensor, value: torch.Tensor | None) -> None:
        owner.grad = value


class Effects(NamedTuple):
    """The result of a function, and what it has changed, each change with its value; made: whether
    the result has recipes.
    """

    out: Any
    changes: list[tuple[Change | _Grad, Any]]
    made: bool = False

    def done(self) -> Any:
        """Change what the function changes, and return its result."""
        owners = [change.owner() for change, _ in self.changes]
        leaves: list[Any] = []
        if self.made:  # what is at a place may be replaced by a change
            leaves, spec = trees.flatten(self.out, is_leaf=_is_recipe)
            leaves = [_Known(x.place.get()) if type(x) is _Argument else x for x in leaves]
        made: dict[int, Any] = {}
        for owner, (change, value) in zip(owners, self.changes, strict=True):
            change.put(owner, _built(value, made))
        if not self.made:
            return self.out
        return trees.unflatten(spec, [_built(x, made) for x in leaves])


def noted(
    fn: Callable[..., Any],
    call: Call,
    found: Found,
    places: Mapping[int, Place],
    donated: Sequence[int] = (),
) -> Callable[..., Any]:
    """The function for a trace: it leaves what it changes as it was, and returns Effects if it has
    changed or returns an object.

    found: what the function reaches.  places: by id, where captured tensors were found. donated:
    the arguments whose tensors are dead after the call.
    """

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        root = state.level.root
        arguments = _arguments(call, (args, kwargs))
        names = [(t, set(vars(t))) for t in arguments.values()]
        grads = LeafGradients({id(t): i for i, t in arguments.items()})
        if not any(isinstance(x, jax.Array) for x in call.arrays):
            root.grads = grads

        def place_of(t: torch.Tensor) -> Place:
            if id(t) in grads.arguments:
                return OfArgument(None, grads.arguments[id(t)])
            return places.get(id(t)) or Place(t, None)

        with having(state, given=(args, kwargs)):
            nodes = list(in_arguments((args, kwargs), call.spec))
            owners = root.owners = [
                (h, h.owner()) for h in (*holders(found), *[h for *_, h in nodes if h is not None])
            ]
            watched = [(h, owner, h.read(owner)) for h, owner in owners]
            state.undone, raised = None, True
            try:
                out = fn(*args, **kwargs)
                if donated:  # what is returned holds no argument, but what that held at the end
                    out = trees.unflatten(*reversed(trees.flatten(out)))
                raised = False
            finally:
                root.owners = ()  # an object must not live as long as something of the trace
                every = [(h, owner, old, _undone(h, owner, old)) for h, owner, old in watched]
                changed = [(h, old, differences) for h, _, old, differences in every if differences]
                kept = [(place_of(t), value) for t, value in grads.changed()]
                root.graded = [place for place, _ in kept]
                read = [(GradOf(place_of(t), "grad"), grad) for t, grad in grads.read()]
                root.read = [
                    (p, grad)
                    for p, grad in read
                    if grad is None or type(places.get(id(grad))) is not GradOf
                ]
                recipes = _Recipes(
                    {
                        *map(id, found.alive),
                        *found.modules,
                        *[id(owner) for _, owner, _ in watched],
                    },
                    {id(node): place for node, place, _ in nodes},
                    {id(owner): h.place for h, owner, _, differences in every if differences},
                )
                # whoever catches the exception sees what was done before it, as far as no tensor of
                # the trace is in it
                if raised:
                    with contextlib.suppress(CalledItself):
                        state.undone = Effects(
                            None,
                            [
                                (c, v)
                                for c, v in recipes.changes(changed, once=True)
                                if not _of_trace(v)
                            ],
                        )
            new = [n for t, old in names for n in vars(t).keys() - old if not n.startswith("_")]
            if any(map(found.sets, new)):
                raise CalledItself("it gives attributes to a tensor among its arguments")
            both = {type(node) for node, *_ in nodes if trees.children(node) is None} & {
                *map(type, found.alive)
            }
            if changed and both:  # an object may be an argument and reached in another way too
                raise CalledItself(
                    f"it changes objects, and reaches one of the class {both.pop().__name__} that "
                    "is no argument too"
                )
            changes: list[tuple[Change | _Grad, Any]] = recipes.changes(changed)
        root.changes = [change for change, _ in changes]
        changes += [
            (_Grad(p, p.identity), _outside(value) if type(value) is Traced else value)
            for p, value in kept
        ]
        result = recipes.result(out)
        return Effects(result, changes, result is not out) if changes or result is not out else out

    return run


def _undone(holder: Holder, owner: Any, old: Any) -> list[Difference]:
    """What the function has changed, which is undone."""
    differences = [
        d
        for d in holder.differences(old, holder.read(owner))
        if holder.counts(d[1]) or _has_traced(d[2])
    ]
    if differences:
        holder.undo(owner, old, differences)
    return differences


def _has_traced(value: Any) -> bool:
    return any(type(x) is Traced for x in trees.flatten(value)[0])


# -- values: they are made anew at each call -------------------------------------------------------
class _Known:
    """An object that was there before, or that cannot be changed;
    it is the same one at each call.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Known and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """An object without its parts.

    Attributes:
        kind: its class.
        keys: of a dict its keys, of another container how many elements it has, of another object
            the names of its attributes.
        extra: the default_factory of a defaultdict, the maxlen of a deque.
    """

    kind: type
    keys: Any
    extra: Any = None


class _New(NamedTuple):
    """An object that the function makes, which is made anew at each call; where it is met again,
    its number stands for it.
    """

    number: int
    shape: _Shape
    parts: list[Any]


class _Again(NamedTuple):
    """An object that is made at another place too."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Argument:
    """An object that is an argument of the call, or at another place at which the function has
    changed it.
    """

    place: Place


_ELEMENTS = (list, tuple, set, frozenset, collections.deque)
_CONSTANT = (bool, int, float, complex, str, bytes, type(None))
# Python that has not run yet
_SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class _Recipes:
    """How the values that a function has put somewhere are made at a call.

    Args:
        known: ids of the objects that were there before.
        arguments: by id, the places of objects and containers that stand for arguments.
        changed: by id, the places of the dicts and other containers that the function changes.
    """

    def __init__(
        self, known: set[int], arguments: Mapping[int, Place], changed: Mapping[int, Place]
    ) -> None:
        self.known, self.arguments, self.made = known, arguments, dict[int, int]()
        self.changed = changed
        self.alive: list[Any] = []

    def changes(
        self, changed: Sequence[tuple[Holder, Any, list[Difference]]], once: bool = False
    ) -> list[Any]:
        """(the Change, its recipe) for each difference; raises CalledItself if there is one that no
        program can make.

        once: no program makes them.
        """
        found = []
        for holder, old, differences in changed:
            holder.counts = _any  # it holds on to nothing else that was found
            if holder.refused and not once:
                raise CalledItself(f"it {holder.refused}")
            for what, key, value in differences:
                if key in REBUILT or holder.place.key in REBUILT:
                    continue
                before = holder.at(old, key) if what == "set" else MISSING
                if what == "set" and self._alike(before, value):
                    continue
                if holder.place.key == "_parameters" and type(value) is Traced:
                    raise exchanged(f"the parameter {key}")
                there = None
                if holder.of and not holder.of_argument and before is MISSING:
                    there = what == "delete" or (None if what != "set" else False)
                recipe = self._of(value, functools.partial(holder.named, key))
                found.append((Change(holder, holder.identity, what, key, there), recipe))
        return found

    def result(self, out: Any) -> Any:
        """What the function returns, with recipes in the place of the objects that it has made or
        changed; itself if there are none.

        What it has changed, or made and kept, is itself in the result too.
        """
        kept = self._is_kept if self.changed else None
        leaves, spec = trees.flatten(out, is_leaf=kept)
        if all(
            isinstance(x, (torch.Tensor, jax.Array, *_CONSTANT)) or python_numbers.is_input(x)
            for x in leaves
        ):
            return out
        made = [
            x if isinstance(x, torch.Tensor | jax.Array) else self._of(x, lambda: "its result")
            for x in leaves
        ]
        made = [
            x if type(recipe) is _Known and not self._changes(x) else recipe
            for x, recipe in zip(leaves, made, strict=True)
        ]
        return trees.unflatten(spec, made) if any(map(_is_recipe, made)) else out

    def _of(self, x: Any, where: Callable[[], str]) -> Any:
        if type(x) is Traced:
            outside = _outside(x)
            return _Known(x) if outside is None else outside
        if isinstance(x, torch.Tensor):
            return x if tensors.crosses(x) else _Known(x)
        if isinstance(x, _CONSTANT) or python_numbers.is_input(x):
            return x
        if id(x) in self.arguments:
            return _Argument(self.arguments[id(x)])
        if id(x) in self.changed:  # another one may be there at a later call
            return _Argument(self.changed[id(x)])
        if type(attributes := self.changed.get(id(getattr(x, "__dict__", None)))) is DictOf:
            return _Argument(attributes.container)
        if id(x) in self.known:
            return _Known(x)
        if id(x) in self.made:
            return _Again(self.made[id(x)])
        if not (isinstance(x, (dict, *_ELEMENTS)) or is_plain(x)):
            if isinstance(x, types.CoroutineType):
                x.close()  # it would warn that nobody waits for it
            if isinstance(x, _SUSPENDED) or any(
                type(t) is Traced for t, _ in closure_scan.scan(x).tensors.values()
            ):
                raise CalledItself(
                    f"it keeps a {type(x).__name__} that holds tensors: {where()}{at_line()}"
                )
            return _Known(x)
        self.made[id(x)] = number = len(self.made)
        self.alive.append(x)
        shape, parts = _taken_apart(x)
        return _New(number, shape, [self._of(part, where) for part in parts])

    def _changes(self, x: Any) -> bool:
        """Whether the function has changed what an object holds."""
        return id(x) in self.changed or id(getattr(x, "__dict__", None)) in self.changed

    def _is_kept(self, x: Any) -> bool:
        return self._changes(x) or id(x) in self.made

    def _alike(self, before: Any, after: Any) -> bool:
        """Whether another object with the same content has taken the place of one, so that nothing
        but its identity has changed.
        """
        if before is after:
            return True
        if type(before) is not type(after) or before is MISSING or isinstance(after, torch.Tensor):
            return False
        if self._changes(before):
            return False
        if isinstance(after, _CONSTANT):
            return bool(identical(before) == identical(after))
        if id(after) in self.known or not (
            isinstance(after, (dict, *_ELEMENTS)) or is_plain(after)
        ):
            return False
        (shape, parts), (other, more) = _taken_apart(before), _taken_apart(after)
        return shape == other and all(map(self._alike, parts, more))


def _is_recipe(x: Any) -> bool:
    return type(x) in (_New, _Again, _Argument, _Known)


def _of_trace(recipe: Any) -> bool:
    """Whether a tensor or a number of the trace is in what a recipe makes."""
    if type(recipe) is _New:
        return any(map(_of_trace, recipe.parts))
    value = recipe.value if type(recipe) is _Known else recipe
    return type(value) is Traced or python_numbers.is_input(value)


def _any(_: Any) -> bool:
    return True


def _taken_apart(x: Any) -> tuple[_Shape, list[Any]]:
    kind = type(x)
    if isinstance(x, dict):
        return _Shape(kind, tuple(x), getattr(x, "default_factory", None)), list(x.values())
    if isinstance(x, _ELEMENTS):
        return _Shape(kind, len(x), getattr(x, "maxlen", None)), list(x)
    names = [*[n for n in slots_of(x) if hasattr(x, n)], *getattr(x, "__dict__", ())]
    return _Shape(kind, tuple(names)), [getattr(x, n) for n in names]


def _built(recipe: Any, made: dict[int, Any]) -> Any:
    """The value of a recipe; made: by their numbers,
    the objects of this call that have been made.
    """
    if type(recipe) is _Known:
        return recipe.value
    if type(recipe) is _Again:
        return made[recipe.number]
    if type(recipe) is _Argument:
        return recipe.place.get()
    if type(recipe) is not _New:
        return recipe
    kind, keys, extra = recipe.shape.kind, recipe.shape.keys, recipe.shape.extra
    if issubclass(kind, tuple | frozenset):
        parts = [_built(part, made) for part in recipe.parts]
        made[recipe.number] = kind(*parts) if hasattr(kind, "_fields") else kind(parts)
        return made[recipe.number]
    new: Any = kind(maxlen=extra) if issubclass(kind, collections.deque) else kind.__new__(kind)
    made[recipe.number] = new
    parts = [_built(part, made) for part in recipe.parts]
    if issubclass(kind, dict):
        dict.update(new, zip(keys, parts, strict=True))
        if extra is not None:
            new.default_factory = extra
    elif issubclass(kind, set):
        new.update(parts)
    elif issubclass(kind, list | collections.deque):
        new.extend(parts)
    else:
        for name, part in zip(keys, parts, strict=True):
            object.__setattr__(new, name, part)
    return new


# -- tensors ---------------------------------------------------------------------------------------
def _arguments(call: Call, given: Any) -> dict[int, Traced]:
    """The traced tensors that stand for the arguments, by their numbers among the leaves; each gets
    the ``.grad`` of its argument.
    """
    found = {i: t for i, t in enumerate(trees.flatten(given)[0]) if type(t) is Traced}
    for i, t in found.items():
        x = call.leaves[i]
        if isinstance(x, torch.Tensor) and x.is_leaf and x.grad is not None:
            with private.below_python():
                t.grad = x.grad
    return found


def _outside(t: Traced) -> Traced | None:
    """A traced tensor as it is outside of the transforms that it was computed in; None if they map
    it, or if it is one step of a loop.
    """
    if t.node.level is state.level:
        return t
    root, views = views_between(t.node)
    if private_jax.mapping(root.value):
        return None
    value = private_jax.innermost_removed(root.value, True)
    if private_jax.trace_of(value) not in (None, private_jax.current_trace()):
        return None
    return wrap(
        functools.reduce(
            lambda base, view: view.lowering(base, *view.args, **view.kwargs), views, value
        ),
        t.device,
    )
