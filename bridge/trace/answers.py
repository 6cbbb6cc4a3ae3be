"""What a jitted function asks of values that are computed from small captured tensors alone, such
as ``if self.steps % 10 == 0``: the program is right for all values of the tensors with the same
answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bridge import private_jax
from bridge.cache_keys import identical
from bridge.errors import DataDependentError
from bridge.trace import python_numbers
from bridge.trace.folding import NotConstant
from bridge.trace.levels import state

#: Rules with more operations give no numbers that are inputs of programs.
_LARGEST = 32


@dataclasses.dataclass(eq=False, slots=True)
class Rule:
    """A value as one of the results of a lowering whose operands may be rules, or as a captured
    tensor's.
    """

    lower: Callable[..., Any] | None  # None: it is the captured tensor of this number
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int  # of the result among the lowering's
    # how many operations it consists of, one that it takes twice counted twice
    size: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.size = 1 + sum(rule.size for rule in self.taken())

    def taken(self) -> list[Rule]:
        """The rules among its operands."""
        return [x for x in jax.tree.leaves((self.args, self.kwargs)) if isinstance(x, Rule)]

    def key(self) -> Any:
        """What two rules have in common that give the same."""
        leaves, tree = jax.tree.flatten((self.args, self.kwargs))
        try:
            return self.lower, self.number, tree, tuple(map(_identity, leaves))
        except TypeError:  # it is not hashable
            return self

    def identity(self, places: Sequence[Any]) -> Any:
        """Equal for two rules, of one trace or of two, that give the same of the same tensors;
        places: of the captured tensors.
        """
        if self.lower is None:
            return places[self.number].identity
        leaves, tree = jax.tree.flatten((self.args, self.kwargs))
        found = [x.identity(places) if isinstance(x, Rule) else _identity(x) for x in leaves]
        return self.lower, self.number, tree, *found

    def of(self) -> set[int]:
        """The numbers of the captured tensors that it takes."""
        if self.lower is None:
            return {self.number}
        return set().union(*[rule.of() for rule in self.taken()])

    def evaluated(self, tensors: Mapping[int, Any], done: dict[int, Any]) -> Any:
        """What it gives for these values of the captured tensors; done: what rules have given, by
        id.
        """
        if self.lower is None:
            return tensors[self.number]
        if id(self) not in done:
            args, kwargs = jax.tree.map(
                lambda x: x.evaluated(tensors, done) if isinstance(x, Rule) else x,
                (self.args, self.kwargs),
            )
            done[id(self)] = jax.tree.leaves(self.lower(*args, **kwargs))[self.number]
        return done[id(self)]


def _identity(x: Any) -> Any:
    if isinstance(x, Rule):
        return id(x)
    if isinstance(x, jax.Array | np.ndarray):
        return x.dtype, x.shape, np.asarray(x).tobytes()
    return identical(x)


class Answers:
    """The values that are known while a function is traced, and those that it has asked for.

    Args:
        tracers, values: of the captured tensors, their values in the trace and now.
        places: where these tensors are.

    Attributes:
        asked: the answer to each question, by the rule of what is asked for.
        items: the rules of values of which Python has got a number by ``item()``.
    """

    def __init__(
        self, tracers: Sequence[Any], values: Sequence[np.ndarray], places: Sequence[Any]
    ) -> None:
        self.places, self.items = places, set[Rule]()
        # by id: the value in the trace, which is kept alive, its value now, how it is computed
        self._known: dict[int, tuple[Any, Any, Rule]] = {
            id(t): (t, v, Rule(None, (), {}, k))
            for k, (t, v) in enumerate(zip(tracers, values, strict=True))
        }
        self._rules: dict[Any, Rule] = {}  # a value that is computed twice has one rule
        self.asked: dict[Rule, np.ndarray] = {}

    def follow(
        self, lower: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Note what a lowering has computed, if it is from known values alone."""
        operands = jax.tree.leaves((args, kwargs))
        traced = [x for x in operands if isinstance(x, jax.core.Tracer)]
        size = sum(getattr(x, "size", 0) for x in jax.tree.leaves(out))
        if not traced or size > state.folded or any(id(x) not in self._known for x in traced):
            return
        if any(map(python_numbers.is_input, operands)):
            return
        given, named = self._with(1, args, kwargs)
        rules, names = self._with(2, args, kwargs)
        # what draws random numbers is not known
        with (
            contextlib.suppress(NotConstant, DataDependentError, jax.errors.JAXTypeError),
            jax.ensure_compile_time_eval(),
        ):
            values = jax.tree.leaves(lower(*given, **named))
            for number, (t, v) in enumerate(zip(jax.tree.leaves(out), values, strict=True)):
                rule = Rule(lower, rules, names, number)
                # what has a rule of derivatives is computed in the transforms in progress
                v = private_jax.innermost_removed(v, True)
                if not isinstance(v, jax.core.Tracer):
                    self._known[id(t)] = t, v, self._rules.setdefault(rule.key(), rule)

    def _with(self, place: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The arguments with what is there of known values in their place."""
        return jax.tree.map(
            lambda x: self._known[id(x)][place] if id(x) in self._known else x,
            (tuple(args), dict(kwargs)),
        )

    def same(self, out: Any, other: Any) -> None:
        """Note that values are the same as others that may be known."""
        for t, u in zip(jax.tree.leaves(out), jax.tree.leaves(other), strict=True):
            if id(u) in self._known:
                self._known[id(t)] = t, *self._known[id(u)][1:]

    def values_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The arguments with the known values in their place, about which the function asks; None
        if there are none.
        """
        found = [self.answer(x) for x in jax.tree.leaves((args, kwargs))]
        return None if all(x is None for x in found) else self._with(1, args, kwargs)

    def knows(self, value: Any) -> bool:
        """Whether the value is known."""
        return id(value) in self._known

    def number(self, value: Any) -> Any:
        """What stands for the number that ``item()`` gives of a value; None if nothing does."""
        if id(value) not in self._known:
            return None
        rule = self._known[id(value)][2]
        if rule.size > _LARGEST:
            return None
        self.items.add(rule)
        return state.standing.get(rule.identity(self.places)) if state.standing else None

    def answer(self, value: Any) -> np.ndarray | None:
        """The value, if it is known; the question is noted."""
        if id(value) not in self._known:
            return None
        _, now, rule = self._known[id(value)]
        return self.asked.setdefault(rule, np.asarray(now))
