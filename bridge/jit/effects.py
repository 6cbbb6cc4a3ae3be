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
import io
import pickle
import types
from collections.abc import Callable, Collection, Mapping, Sequence
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
from bridge.programs.closure_scan import Found, is_plain
from bridge.programs.holders import (
    MISSING,
    REBUILT,
    Difference,
    Gradient,
    Holder,
    holders,
    in_arguments,
    undone,
)
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

    def __str__(self) -> str:
        return self.holder.named(self.key)


class Effects(NamedTuple):
    """What a function changes, and by what it is made at each call.

    Attributes:
        made: pickles of the values of the changes, and of the leaves of the function's result, with
            numbers in the place of the parts.
        parts: what these contain: tensors, numbers, and objects that are not made anew.
        spec: that of the result.
    """

    changes: list[Change]
    made: bytes
    parts: list[Any]
    spec: trees.Spec | None

    def done(self) -> Any:
        """Change what the function changes, and return its result."""
        owners = [change.holder.owner() for change in self.changes]
        source = _Unpickler(io.BytesIO(self.made))
        # before anything is changed: what is at a place may be replaced by a change
        source.parts = [
            x.value
            if type(x) is _Known
            else x.place.get()
            if type(x) is _Argument
            else x.tensor.item()
            if type(x) is _Item
            else x
            for x in self.parts
        ]
        for owner, change in zip(owners, self.changes, strict=True):
            change.holder.put(owner, change.what, change.key, source.load())
        return trees.unflatten(self.spec, source.load())


class _Unpickler(pickle.Unpickler):
    parts: list[Any]

    def persistent_load(self, number: int) -> Any:
        return self.parts[number]


def noted(
    fn: Callable[..., Any],
    call: Call,
    found: Found,
    places: Mapping[int, Place],
    donated: Sequence[int] = (),
    unset: Collection[Any] = (),
) -> Callable[..., Any]:
    """The function for a trace: it leaves what it changes as it was, and returns Effects if it has
    changed or returns an object.

    found: what the function reaches.  places: by id, where captured tensors were found. donated:
    the arguments whose tensors are dead after the call. unset: the identities of places that it
    does not set, although its code names them.
    """

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        root = state.level.root
        arguments = _arguments(call, (args, kwargs))
        names = [(t, set(vars(t))) for t in arguments.values()]
        # a tensor that is passed twice is at its first place, and a Twin at the other
        grads = LeafGradients({id(t): i for i, t in reversed(arguments.items())})
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
            state.undone, raised, misses = None, True, found.misses()
            try:
                out = fn(*args, **kwargs)
                grads.refuse_late_changes(out)
                if donated:  # what is returned holds no argument, but what that held at the end
                    out = trees.unflatten(*reversed(trees.flatten(out)))
                raised = False
            finally:
                root.owners = ()  # an object must not live as long as something of the trace
                every = [(h, owner, old, undone(h, owner, old)) for h, owner, old in watched]
                changed = [(h, old, differences) for h, _, old, differences in every if differences]
                left = grads.changed()
                kept = [(place_of(t), value) for t, value in left]
                pulled = grads.pulled | {id(t): t for t, _ in left}
                root.graded = [place_of(t) for t in pulled.values()]
                read = [(GradOf(place_of(t), "grad"), grad) for t, grad in grads.read()]
                root.read = [
                    (p, grad)
                    for p, grad in read
                    if grad is None or type(places.get(id(grad))) is not GradOf
                ]
                # where nothing has changed, the function may have set what was there
                root.same = [
                    (place, x)
                    for h, _, old, differences in every
                    for key, x in h.may_be_set(old, differences, found)
                    if (place := h.entry(key)).identity not in unset
                ]
                pickler = _Pickler(
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
                        done = pickler.changes(changed, found, once=True)
                        outside = [x for x in done if not pickler.is_of_trace(x.value)]
                        state.undone = pickler.effects(outside, None)
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
            changes = pickler.changes(changed, found)
        root.changes = [x.change for x in changes]
        # another call finds the answers in the caches, and changes less
        root.once = bool(changes) and found.misses() > misses
        for gradient, value in [(Gradient(place), value) for place, value in kept]:
            change = Change(gradient, gradient.identity, "set", "grad", None)
            changes.append(_Done(change, value, lambda: "a .grad"))
        return pickler.effects(changes, out)

    return run


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
class _Argument:
    """An object that is an argument of the call, or at another place at which the function has
    changed it.
    """

    place: Place


class _Item(NamedTuple):
    """The number that a tensor holds, as a part."""

    tensor: Any


class _Done(NamedTuple):
    """A change with its value in the trace, and where that is, in words."""

    change: Change
    value: Any
    where: Callable[[], str]


_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_CONSTANT = (bool, int, float, complex, str, bytes, type(None))
# Python that has not run yet
_SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class _Pickler(pickle.Pickler):
    """Writes down how the values that a function has put somewhere, and its result, are made at a
    call: containers and plain objects that it has made are made anew, and all else is a part.

    Args:
        known: ids of the objects that were there before.
        arguments: by id, the places of objects and containers that stand for arguments.
        changed: by id, the places of the dicts and other containers that the function changes.
    """

    def __init__(
        self, known: set[int], arguments: Mapping[int, Place], changed: Mapping[int, Place]
    ) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)
        self.known, self.arguments, self.changed = known, arguments, changed
        self.parts: list[Any] = []
        self.made, self.leaves = set[int](), set[int]()  # ids; the latter of the result
        self.where = lambda: "its result"

    def changes(
        self,
        changed: Sequence[tuple[Holder, Any, list[Difference]]],
        reached: Found,
        once: bool = False,
    ) -> list[_Done]:
        """What is done for each difference; raises CalledItself if no program can do that.

        reached: what the function reaches. once: no program does it.
        """
        found = []
        for holder, old, differences in changed:
            holder.counts = lambda _: True  # it holds on to nothing else that was found
            if holder.refused and not once:
                raise CalledItself(f"it {holder.refused}")
            for what, key, value in differences:
                if key in REBUILT or holder.place.key in REBUILT:
                    continue
                before = holder.at(old, key) if what == "set" else MISSING
                self.where = functools.partial(holder.named, key)
                sets = holder.of and reached.only_sets(key)
                if what == "set" and not sets and self._alike(before, value):
                    continue
                if holder.place.key == "_parameters" and type(value) is Traced:
                    raise exchanged(f"the parameter {key}")
                there = None
                if holder.of and not holder.of_argument and before is MISSING:
                    there = what == "delete" or (None if what != "set" else False)
                change = Change(holder, holder.identity, what, key, there)
                found.append(_Done(change, value, self.where))
        return found

    def effects(self, changes: Sequence[_Done], out: Any) -> Any:
        """The Effects; the result itself if there are no changes, and its leaves are no objects
        that the function has made or changed.
        """
        for _, value, where in changes:
            self.where = where
            self.dump(value)
        # what it has changed, or made and kept, is itself in the result too
        leaves, spec = trees.flatten(out, is_leaf=self._is_kept)
        self.leaves, self.where, first = {*map(id, leaves)}, lambda: "its result", len(self.parts)
        self.dump(leaves)
        if not changes and [*map(id, self.parts[first:])] == [*map(id, leaves)]:
            return out
        return Effects([change for change, *_ in changes], self.file.getvalue(), self.parts, spec)

    def persistent_id(self, x: Any) -> int | None:
        """The number of a part; None: x is made anew."""
        if self._is_new(x):
            self.made.add(id(x))
            return None
        self.parts.append(self._part(x))
        return len(self.parts) - 1

    def _is_new(self, x: Any) -> bool:
        return (isinstance(x, _CONTAINERS) or is_plain(x)) and not (
            id(x) in self.known or self._place(x)
        )

    def _part(self, x: Any) -> Any:
        if python_numbers.is_late(x):
            return _Item(_outside(x.node.tensor))
        if isinstance(x, (*_CONSTANT, type)) or python_numbers.is_input(x):
            return x
        if isinstance(x, torch.Tensor | jax.Array) and id(x) in self.leaves:
            return x
        if type(x) is Traced:
            outside = _outside(x)
            return _Known(x) if outside is None else outside
        if isinstance(x, torch.Tensor):
            return x if tensors.crosses(x) else _Known(x)
        if place := self._place(x):
            return _Argument(place)
        if id(x) not in self.known:
            if isinstance(x, types.CoroutineType):
                x.close()  # it would warn that nobody waits for it
            if isinstance(x, _SUSPENDED) or any(
                type(t) is Traced for t, _ in closure_scan.scan(x).tensors.values()
            ):
                raise CalledItself(
                    f"it keeps a {type(x).__name__} that holds tensors: {self.where()}{at_line()}"
                )
        return x if id(x) in self.leaves else _Known(x)

    def _place(self, x: Any) -> Place | None:
        """The place of an argument, or of an object that the function has changed: another one may
        be there at a later call.
        """
        attributes = self.changed.get(id(getattr(x, "__dict__", None)))
        return (
            self.arguments.get(id(x))
            or self.changed.get(id(x))
            or (attributes.container if type(attributes) is DictOf else None)
        )

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
        if python_numbers.is_late(after):
            return False
        if type(before) is not type(after) or before is MISSING or isinstance(after, torch.Tensor):
            return False
        if isinstance(after, _CONSTANT):
            return bool(identical(before) == identical(after))
        if isinstance(after, _Known | _Argument):
            return bool(before == after)
        if self._changes(before) or not self._is_new(after):
            return False
        (made, parts), (other, more) = self._content(before), self._content(after)
        return made == other and all(map(self._alike, parts, more))

    def _content(self, x: Any) -> tuple[bytes, list[Any]]:
        """How an object would be made anew, by itself."""
        pickler = _Pickler(self.known - {id(x)}, self.arguments, self.changed)
        pickler.where = self.where
        pickler.dump(x)
        return pickler.file.getvalue(), pickler.parts

    def is_of_trace(self, value: Any) -> bool:
        """Whether a tensor or a number of the trace is in a value."""
        parts = [x.value if type(x) is _Known else x for x in self._content(value)[1]]
        return any(type(x) in (Traced, _Item) or python_numbers.is_input(x) for x in parts)


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
