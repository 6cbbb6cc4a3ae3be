"""Checks before each call what a compiled program depends on beside its arguments: PyTorch's
ambient state, modules, objects.

``ambient`` is part of the key under which programs are kept. ``Guards`` belong to one program: they
check the tree of modules, their modes and hooks, and the objects, functions and Python numbers at
their places.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridge import compiling, private
from bridge.cache_keys import identical
from bridge.convert import tensors
from bridge.process import process
from bridge.programs import closure_scan
from bridge.programs.places import Asked, Entry, GradOf, Members, OfArgument, Place, makes_entries
from bridge.trace import answers
from bridge.trace.levels import state
from bridge.trace.python_numbers import is_input

#: The names of the entries of ``ambient``.
AMBIENT = (
    "the default dtype",
    "the precision of float32 matrix products",
    "deterministic algorithms",
    "inference mode",
    "anomaly mode",
    "autocast",
    "the default device and torch function modes",
    "global module hooks",
    "hooks on saved tensors",
    "attention_scores",
)
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def ambient() -> tuple[Any, ...]:
    """The state of PyTorch that a program depends on, as part of its key; see ``AMBIENT``.

    Returns:
        a hashable tuple.

    Example:
        >>> import torch
        >>> from bridge.programs import guards
        >>> outside = guards.ambient()
        >>> with torch.autocast("cpu"):
        ...     print(guards.ambient() == outside)
        False
    """
    recording = torch.is_grad_enabled()
    scores = state.attention_scores or process.attention_scores
    unchanged, precision, entered, known = _usual[recording]
    if (
        unchanged()
        and private.float32_precision() == precision
        and torch.get_autocast_dtype("cpu") is entered
        and not torch.is_inference_mode_enabled()
        and not torch.is_anomaly_enabled()
        and not private.function_modes()
        and not any(private.GLOBAL_HOOKS)
        and private.saved_tensor_hooks() is None
        and scores == known[-1]
    ):
        return known
    found = (
        torch.get_default_dtype(),
        private.float32_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled() and (True, torch.is_anomaly_check_nan_enabled()),
        # the function may enter autocast itself
        autocast() if private.any_autocast() else torch.get_autocast_dtype("cpu"),
        tuple([private.default_device_of(m) or identical(m) for m in private.function_mode_stack()])
        or None,
        tuple(map(tuple, private.GLOBAL_HOOKS)) if any(private.GLOBAL_HOOKS) else None,
        private.saved_tensor_hooks() is not None,
        scores,
    )
    if found[3:5] == (False, False) and found[6:9] == (None, None, False):
        _usual[recording] = (
            private.state_question(),
            found[1],
            torch.get_autocast_dtype("cpu"),
            found,
        )
    return found


#: For grad mode off and on: (whether the state is as it was, float32 precision, autocast dtype, the
#: answer of ``ambient``), as they were when no mode or hook was entered.
_usual: list[tuple[Any, ...]] = [(lambda: False, None, None, ()), (lambda: False, None, None, ())]


def autocast() -> tuple[Any, ...]:
    """For each device its autocast dtype and whether autocast is on; and whether autocast keeps
    copies of weights.
    """
    found = tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in _DEVICES)
    return found, torch.is_autocast_cache_enabled()


@contextlib.contextmanager
def within_autocast(state: tuple[Any, ...] | None) -> Iterator[None]:
    """While entered, autocast is in this state, an earlier answer of ``autocast``, and keeps no
    copies; None: it is off.
    """
    before, cached = autocast()
    torch.set_autocast_cache_enabled(False)
    try:
        for device, dtype, enabled in (
            state[0] if state is not None else [(d, t, False) for d, t, _ in before]
        ):
            torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_enabled(device, enabled)
        yield
    finally:
        for device, dtype, enabled in before:
            torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_cache_enabled(cached)


# -- of one program --------------------------------------------------------------------------------
_MODULE = ("training", "_modules", "_parameters", "_buffers", *closure_scan.HOOKS)


def _hooks(d: dict[str, Any]) -> tuple[int, ...]:
    # numbers that PyTorch uses only once
    return tuple([key for name in closure_scan.HOOKS for key in d[name]])


def _sizes(d: dict[str, Any]) -> tuple[int, int]:
    # one more is read by ``parameters()`` or ``hasattr``; one less is missed at its place
    return len(d["_parameters"]), len(d["_buffers"])


class ValueOf(Place):
    """What Python asks of a value that is computed from captured tensors: a number, which may
    become an input of programs, or the bytes of several ones.

    Args:
        rule: of the value, one of ``answers.Answers``.
        known: (the captured tensor, its place) by the numbers that rules have for them.
        by_item: whether Python has got a number by ``item()``, and another one can take its place.

    Attributes:
        before: the answer in the trace.
    """

    __slots__ = ("_identity", "before", "by_item", "function", "kinds")

    def __init__(
        self, rule: answers.Rule, known: Sequence[tuple[torch.Tensor, Place]], by_item: bool
    ) -> None:
        super().__init__(rule, {k: known[k][1] for k in sorted(rule.of())})
        # without a call there are no arguments
        self.by_item = by_item and not any(
            isinstance(place.container, OfArgument) for place in self.key.values()
        )
        self._identity = rule.identity([p for _, p in known]) if self.by_item else id(self)
        # as one program: another one may round in another way
        self.function = jax.jit(lambda values: rule.evaluated(values, {}))
        given = {k: known[k][0] for k in self.key}
        self.kinds, self.before = self._kinds(given), self._answer(given)

    @staticmethod
    def _kinds(given: dict[int, torch.Tensor]) -> list[Any]:
        return [(t.dtype, t.shape, t.requires_grad) for t in given.values()]

    def _answer(self, given: dict[int, torch.Tensor]) -> Any:
        if self.container.lower is None and given[self.container.number].numel() == 1:
            return given[self.container.number].item()
        values = {k: np.array(tensors.to_jax(t)) for k, t in given.items()}
        with jax.enable_x64(True), compiling.correctly():
            found = np.asarray(self.function(values))
        return found.item() if found.size == 1 else found.tobytes()

    def get(self) -> Any:
        if self.identity in state.standing:
            return state.standing[self.identity]
        given = {k: place.get() for k, place in self.key.items()}
        if self._kinds(given) != self.kinds:
            raise LookupError
        return self._answer(given)

    def put(self, x: Any) -> None:
        others = dict(state.standing)
        others.pop(self.identity, None)  # keys in it may be tensors, which ``==`` does not compare
        state.standing = others
        if is_input(x) or identical(self.get()) != identical(x):
            state.standing = {**others, self.identity: x}

    def holds(self) -> bool:
        return self.by_item

    @property
    def identity(self) -> Any:
        return self._identity

    def __str__(self) -> str:
        captured = ", ".join(map(str, self.key.values()))
        if self.container.lower is None:
            return f"{captured}, whose values Python asked for,"
        return f"what Python asked of the values of {captured}"


class Guards:
    """The objects that a function reached when it was traced, to be compared with those that are
    there now.

    Args:
        found: the result of ``closure_scan.scan`` before the function was traced. Places that the
            trace has changed are not checked: the function itself has changed them, and a jitted
            function's Python runs only when it is traced.
        asked: what it has asked of the values of captured tensors.
        read: the places of the ``.grad``s that were read in the trace and are to be compared; None:
            those that the function names.
        same: attributes that the function sets to what they were, or does not set.
        there: places that the function reads and fills, or empties, each with whether something
            must be there before.

    Attributes:
        numbers: (the place, the number) for each number that is compared, and that can be put
            there.
    """

    __slots__ = (
        "absent",
        "codes",
        "data",
        "grouped",
        "modules",
        "needed",
        "nested",
        "numbers",
        "objects",
        "places",
        "same",
        "single",
        "sizes",
        "there",
    )

    def __init__(
        self,
        found: closure_scan.Found,
        asked: Sequence[ValueOf] = (),
        read: Sequence[tuple[Place, Any]] | None = None,
        same: Sequence[tuple[Place, Any]] = (),
        there: Sequence[tuple[Place, bool]] = (),
    ) -> None:
        self.there, self.same = there, same
        modules = [(type(m).__name__, m.__dict__) for m in found.modules.values()]
        self.modules = [
            (
                d,
                name,
                d["training"],
                [*d["_modules"].items()],
                _hooks(d),
                d.get("forward"),
                _sizes(d),
            )
            for name, d in modules
            if all(name in d for name in _MODULE)  # not ScriptModules
        ]
        self.objects = [
            (owner, cls, d)
            for owner, cls, d in found.objects()
            if d is None or owner().__dict__ is d
        ]
        edges = [(p, x) for p, x in found.edges() if read is None or type(p) is not GradOf]
        self.places = [
            (p, x)
            for p, x in [*edges, *(read or ()), *same]
            if not is_input(x) and _same(current(p), x)
        ]
        self.places += [(p, p.before) for p in asked]
        data, sizes = (
            [(p, current(p), what) for p, what in found.reached(every)]
            for every in (found.data, found.sizes)
        )
        added_to = {id(x) for _, x, _ in (*data, *sizes) if found.only_adds(x)}
        # the function may have added what such a set has; more may be in it
        self.places += [
            (Asked(_contains(p), "elements", str(p)), True)
            for p, x, _ in (*data, *sizes)
            if id(x) in added_to and isinstance(x, set)
        ]
        self.codes = [(p.container.owner, code) for p, code in self.places if _is_code(p)]
        self.grouped, self.nested, self.single = _grouped(
            [(p, x) for p, x in self.places if not _is_code(p)]
        )
        self.data = [
            (p, *closure_scan.entries(x), data)
            for p, x, data in data
            if id(x) not in added_to and closure_scan.frozen(x) == data
        ]
        self.sizes = [
            (p, keys) for p, x, keys in sizes if id(x) not in added_to and _has_keys(x, keys)
        ]
        self.numbers = [x for x in self.places if type(x[1]) in _NUMBERS and x[0].holds()]
        for p in [*[p for p, *_ in self.data], *[p for p, x in self.places if type(x) is tuple]]:
            self.numbers += _numbers_in(current(p), p)
        absent = [(p, names) for p, names in found.absent() if names.isdisjoint(p.get())]
        self.absent = [(p.container if type(p) is Place else p, names) for p, names in absent]
        self.needed = bool(
            self.modules
            or self.objects
            or self.places
            or self.data
            or self.sizes
            or self.absent
            or self.there
        )

    def hold(self) -> bool:
        """Whether everything is as it was; always True if not ``needed``."""
        try:
            for owner, cls, d in self.objects:
                x = owner()
                if type(x) is not cls or (d is not None and x.__dict__ is not d):
                    return False
            for d, _, training, children, hooks, forward, (parameters, buffers) in self.modules:
                if (
                    d["training"] is not training
                    or d.get("forward") is not forward
                    or len(d["_parameters"]) != parameters
                    or len(d["_buffers"]) != buffers
                    or ((children or d["_modules"]) and [*d["_modules"].items()] != children)
                    or (
                        (
                            hooks
                            or d["_forward_hooks"]
                            or d["_forward_pre_hooks"]
                            or d["_backward_hooks"]
                            or d["_backward_pre_hooks"]
                        )
                        and _hooks(d) != hooks
                    )
                ):
                    return False
            for function, code in self.codes:
                if function().__code__ is not code:
                    return False
            for container, getter, values in self.grouped:
                now = getter(container)
                if not all(map(operator.is_, now, values)) and not all(map(_same, now, values)):
                    return False
            for place, getter, values in self.nested:
                now = getter(place.get())
                if not all(map(operator.is_, now, values)) and not all(map(_same, now, values)):
                    return False
            for place, value in self.single:
                if not _same(place.get(), value):
                    return False
            for place, container, entries, data in self.data:
                now = place.get()
                # most functions' attributes
                if now is container and type(now) is dict and not now and not entries:
                    continue
                if (
                    not (now is container and _holds(now, entries))
                    and closure_scan.frozen(now) != data
                ):
                    return False
            for place, keys in self.sizes:
                if not _has_keys(place.get(), keys):
                    return False
            for d, names in self.absent:
                if not (d.get() if isinstance(d, Place) else d).keys().isdisjoint(names):
                    return False
        except GONE_ERRORS:
            return False
        return not self.there or all(
            (current(place) is not GONE) is there for place, there in self.there
        )

    def unset(self) -> set[Any]:
        """The identities of the places of ``same`` at which something else is now. A program for
        that shows whether the function sets them; if it does not, they are no condition of it.
        """
        return {place.identity for place, x in self.same if not _same(current(place), x)}

    def differences(self) -> Iterator[str]:
        """Yield a sentence for each thing that is not as it was."""
        for d, name, training, children, hooks, forward, sizes in self.modules:
            for which, had, has in zip(("parameters", "buffers"), sizes, _sizes(d), strict=True):
                if had != has:
                    yield f"the module {name} had {had} {which} and now has {has}"
            if d.get("forward") is not forward:
                yield f"the module {name} has been given another forward"
            if d["training"] is not training:
                yield (
                    f"the module {name} was in {_mode(training)} mode and now is in "
                    f"{_mode(d['training'])} mode"
                )
            before, now = dict(children), d["_modules"]
            for key in {**before, **now}:
                if now.get(key) is not before.get(key):
                    yield (
                        f"the submodule {key!r} of the module {name} was "
                        f"{_replaced(before.get(key), now.get(key))}"
                    )
            if now == before and [*now] != [*before]:
                yield (
                    f"the submodules of the module {name} were in the order {[*before]} and now "
                    f"are in the order {[*now]}"
                )
            if _hooks(d) != hooks:
                yield (
                    f"the hooks of the module {name} were numbers {hooks} and "
                    f"now are numbers {_hooks(d)}"
                )
        for owner, cls, d in self.objects:
            x = current(Asked(owner, None))
            if type(x) is not cls:
                now = "gone" if x is None or x is GONE else f"of the class {type(x).__name__}"
                yield f"an object of the class {cls.__name__} now is {now}"
            elif d is not None and x.__dict__ is not d:
                yield f"the __dict__ of an object of the class {cls.__name__} was replaced"
        for place, child in self.places:
            now = current(place)
            if _same(now, child):
                continue
            if type(place) is ValueOf and type(child) is bytes:
                yield f"{place} has others than before"
            elif isinstance(child, _BY_VALUE):
                yield f"{place} was {child!r} and now is {now!r}"
            else:
                yield f"{place} was one {_replaced(child, now)}"
        for place, _, _, data in self.data:
            if closure_scan.frozen(current(place)) != data:
                yield f"{place} holds other numbers than before"
        for where, names in self.absent:
            attributes = current(where) if isinstance(where, Place) else where
            for name in names.intersection(attributes if attributes is not GONE else ()):
                yield f"an object that the function uses has been given an attribute {name}"
        for place, there in self.there:
            if (current(place) is not GONE) is not there:
                yield f"{place} {'is no longer there' if there else 'now is there'}"
        for place, (kind, keys) in self.sizes:
            c = current(place)
            if type(c) is not kind:
                yield (
                    f"{place} was one {kind.__name__} and now is "
                    f"{'gone' if c is GONE else type(c).__name__}"
                )
            elif not _has_keys(c, (kind, keys)):
                n = keys if isinstance(keys, int) else len(keys)
                yield (
                    f"a {kind.__name__} that the function uses had {n} entries and now has "
                    f"{len(c) if len(c) != n else 'others'}"
                )


#: Stands for an object that is no longer at its place.
GONE = type("_Gone", (), {"__repr__": lambda self: "gone"})()
#: What looking at a place raises if the object is no longer there.
GONE_ERRORS = (LookupError, ValueError, AttributeError, TypeError)
_NUMBERS = (int, float)
#: Types whose values are compared by content.
_BY_VALUE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    tuple,
    types.NoneType,
    types.MethodType,
    np.generic,
)


def current(place: Place) -> Any:
    """What is at a place; GONE if it no longer exists."""
    try:
        return place.get()
    except GONE_ERRORS:
        return GONE


def _same(now: Any, before: Any) -> bool:
    try:
        return now is before or (
            isinstance(before, _BY_VALUE) and identical(now) == identical(before)
        )
    except TypeError:  # a tuple with an entry that is not hashable
        return False


def _contains(place: Place) -> Callable[[], bool]:
    """Whether the set at a place has all that it has now."""
    elements = frozenset(current(place))
    return lambda: elements <= place.get()


def _numbers_in(x: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    """(the place, the number) for each number in a container at a place."""
    if isinstance(x, dict):
        found = [*x.items()]
    else:
        within = isinstance(x, list | collections.deque) or (type(x) is tuple and place.holds())
        found = [*enumerate(x)] if within else []
    for key, child in found:
        if type(child) in _NUMBERS:
            yield Entry(place, key), child
        else:
            yield from _numbers_in(child, Entry(place, key))


def _holds(container: Any, entries: Any) -> bool:
    now = (*container, *container.values()) if isinstance(container, dict) else container
    return len(now) == len(entries) and all(map(operator.is_, now, entries))


def _has_keys(container: Any, found: tuple[type, Any]) -> bool:
    keys: Any = found[1]
    kind: Any = type(container)  # or mypy takes the container for one of that class
    if kind is not found[0]:
        return False
    if isinstance(keys, int):
        return len(container) == keys
    return len(container) == len(keys) and (
        all(map(operator.is_, container, keys)) or _same(tuple(container), keys)
    )


def _is_code(place: Place) -> bool:
    return place.key == "__code__" and type(place.container) is Members


def _grouped(
    places: Sequence[tuple[Place, Any]],
) -> tuple[list[Any], list[Any], list[tuple[Place, Any]]]:
    """Group the places: [(container, getter of several entries, these entries)], the same with
    places of containers, and other places.
    """
    groups: dict[Any, tuple[Any, dict[Any, Any]]] = {}
    single = []
    for place, value in places:
        if (
            type(place) in (Place, Entry)
            and place.key is not None
            and not makes_entries(place.holding())
        ):
            groups.setdefault(place.identity[:-1], (place.container, {}))[1][place.key] = value
        else:
            single.append((place, value))
    every = [
        (
            c,
            operator.itemgetter(*values, next(iter(values))),
            (*values.values(), next(iter(values.values()))),
        )
        for c, values in groups.values()
    ]
    nested = [group for group in every if isinstance(group[0], Place)]
    return [group for group in every if not isinstance(group[0], Place)], nested, single


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _replaced(before: Any, now: Any) -> str:
    old, new = ["missing" if x is None or x is GONE else type(x).__name__ for x in (before, now)]
    return f"{old} and now is {'another ' if type(before) is type(now) else ''}{new}"


def describe(state: Sequence[Any]) -> dict[str, str]:
    """Each entry of ``ambient`` in words, by its name."""
    return {name: _words(name, value) for name, value in zip(AMBIENT, state, strict=True)}


def _words(name: str, value: Any) -> str:
    if name != "autocast":
        return repr(value)
    if isinstance(value, torch.dtype):
        return f"off ({value} if it is entered)"
    devices, cached = value
    entered = [f"{dtype} on {device}" for device, dtype, on in devices if on]
    return ", ".join(entered) + ("" if cached else ", without its cache of weights")
