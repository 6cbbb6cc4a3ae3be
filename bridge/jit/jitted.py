"""Jitted functions: each keeps compiled programs, chooses one of them for a call, and compiles a
new one if none fits.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
import itertools
import operator
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakIdRef

from bridge import compiling
from bridge.boundary.calls import Call
from bridge.boundary.handing_over import has_fake, torch_looks
from bridge.boundary.results import without_twins
from bridge.cache_keys import Same, by_identity, identical, weak
from bridge.convert import sparse, tensors, trees
from bridge.convert.sparse import SparseOperand
from bridge.errors import CalledItself, NeedsTorch, at_line, for_user
from bridge.intercepted.leaf_gradients import OutsideGraph
from bridge.jit import explaining
from bridge.jit.compiled import Compiled, ProgramInfo
from bridge.jit.donation import within
from bridge.jit.effects import Effects
from bridge.jit.program import Program, aval, forward, stage
from bridge.lowering.common import varying
from bridge.modules import SWAPPING
from bridge.private import opaque
from bridge.process import having, without_collections
from bridge.programs import guards, objects
from bridge.programs.places import Place
from bridge.trace import python_numbers
from bridge.trace.levels import state
from bridge.trace.python_numbers import HashedNumber, Inputs, Misfit, OtherAnswer
from bridge.trace.random_keys import SeededInside
from bridge.trace.storage import OutsideOfView
from bridge.trace.torch_random import by_torch, random_numbers
from bridge.trace.tracing import value_of

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_requires_grad = operator.attrgetter("requires_grad")
# how many programs in a row may each be of use for one call only, because they change what they
# depend on
_TURNS = 6
# for how many calls the function itself is called then, before another program is tried; twice as
# many each time
_PAUSE = 8


@dataclasses.dataclass(slots=True)
class _Family:
    """The programs for calls that differ only in Python numbers.

    The numbers are those among the arguments, and then those that the function finds elsewhere, and
    that have changed since the first program.
    """

    #: which of the numbers are inputs of programs, in the order in which they became so
    ways: list[frozenset[int]] = dataclasses.field(default_factory=lambda: [frozenset()])
    # the numbers whose values the function asks for
    by_value: set[int] = dataclasses.field(default_factory=set)
    # those with which a trace did something else than an earlier one
    differed: set[int] = dataclasses.field(default_factory=set)
    # the programs with static numbers, each with these
    references: list[tuple[list[Any], Compiled]] = dataclasses.field(default_factory=list)
    programs: dict[Any, list[Compiled]] = dataclasses.field(default_factory=dict)
    watched: list[Any] = dataclasses.field(default_factory=list)
    counters: list[Place] = dataclasses.field(default_factory=list)  # where these are
    # how many programs in a row have changed what they depend on, so that they were of use for one
    # call
    turns: int = 0
    once: bool = False  # whether it has had programs for one call only
    itself: str = ""  # why the function itself is called, and no program
    pause: int = _PAUSE  # for how many calls, and
    left: int = -1  # for how many more; -1: for good

    def calls_itself(self) -> bool:
        """Whether the function itself is to be called now."""
        if self.itself and self.left:
            self.left -= self.left > 0
            return True
        self.itself = ""
        return False

    def counted(self) -> list[Any]:
        """The numbers elsewhere, as they are now."""
        return [guards.current(p) for p in self.counters]

    @contextlib.contextmanager
    def counting(self, numbers: Sequence[Any]) -> Iterator[None]:
        """While entered, the numbers elsewhere are the last ones of these."""
        before = self.counted()
        try:
            self._count(numbers[len(numbers) - len(before) :])
            yield
        finally:
            self._count(before)

    def _count(self, numbers: Sequence[Any]) -> None:
        for place, x in zip(self.counters, numbers, strict=True):
            # a list may have become shorter
            if x is not guards.GONE and guards.current(place) is not guards.GONE:
                place.put(x)

    def watch(self) -> None:
        """Take the numbers elsewhere that have changed since a program was made for inputs of the
        programs to come.
        """
        known = {p.identity for p in self.counters}
        new = {
            place.identity: place
            for _, e in self.references
            for place, x in e.program.guards.numbers
            if place.identity not in known
            and type(now := guards.current(place)) is type(x)
            and identical(now) != identical(x)
        }
        if not new or len(self.counters) + len(new) > python_numbers.SLOTS:
            return
        self.counters += new.values()

        def own(e: Compiled) -> list[Any] | None:
            """The new numbers that a program is for; None if it does not read all of them."""
            found = {p.identity: x for p, x in e.program.guards.numbers}
            return [found[at] for at in new] if found.keys() >= new.keys() else None

        self.references = [
            ([*numbers, *more], e) for numbers, e in self.references if (more := own(e)) is not None
        ]
        programs, self.programs = self.programs, {}
        for key, e in [(key, e) for key, some in programs.items() for e in some]:
            if (more := own(e)) is not None:
                self.programs.setdefault((*key, *map(identical, more)), []).append(e)

    def key(self, numbers: Sequence[Any], inputs: frozenset[int]) -> Any:
        return tuple([type(x) if k in inputs else identical(x) for k, x in enumerate(numbers)])

    def find(self, numbers: Sequence[Any]) -> list[Compiled]:
        """The programs for these numbers, the oldest first: a call that comes again runs by the
        same one, which rounds as it did.
        """
        return [
            program
            for inputs in self.ways
            for program in self.programs.get(self.key(numbers, inputs), ())
        ]

    def to_change(self, numbers: Sequence[Any]) -> frozenset[int]:
        """Which of these numbers should be inputs."""
        differ = {
            k
            for others, _ in self.references
            for k, (x, y) in enumerate(zip(numbers, others, strict=True))
            if type(x) in (int, float) and type(x) is type(y) and identical(x) != identical(y)
        }
        return frozenset((self.ways[-1] | differ) - self.by_value)

    def unset(self) -> set[Any]:
        """See ``Guards.unset``."""
        every = itertools.chain.from_iterable(self.programs.values())
        return set[Any]().union(*[entry.program.guards.unset() for entry in every])

    def reference(
        self, numbers_in: Inputs | None = None, numbers: Sequence[Any] = ()
    ) -> tuple[list[Any], Compiled, list[Any]] | None:
        """The newest program with static numbers that fits, its numbers, and the arrays of its
        captured tensors; None if there is none.

        numbers_in: as asked about in a trace for these numbers; the program is then for numbers for
        which that trace would be the same.
        """
        for values, entry in reversed(self.references):
            if numbers_in is None or numbers_in.traced_alike(values, numbers):
                with self.counting(values):
                    captured = entry.captured()
                if captured is not None:
                    return values, entry, captured[1]
        return None


class Jitted:
    """The object that ``jit`` returns: it is called like the function, and shows the function's
    programs.

    Copies and pickles of it hold the function, but no programs.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        donate: tuple[int, ...] = (),
        static_argnums: tuple[int, ...] = (),
        max_programs: int = 64,
        random: str | None = None,
    ) -> None:
        self._func, self._donate, self._static, self._most, self._random = (
            func,
            donate,
            static_argnums,
            max_programs,
            random,
        )
        self._start()
        functools.update_wrapper(self, func, updated=())

    def _start(self) -> None:
        self._families: dict[Any, _Family] = {}
        # by class: whether its objects are taken apart, or a reference to the first one
        self._objects: dict[type, Any] = {}
        self._clock = itertools.count()
        self._warned = False
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        """An attribute of the function, such as ``parameters`` of a module; it is asked for if this
        object has none of that name.
        """
        if name.startswith("__") or "_func" not in vars(self):  # the latter while a pickle is read
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._func, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> Any:
        name = getattr(self, "__qualname__", None)
        found: Any = sys.modules.get(getattr(self, "__module__", None) or "")
        for part in (name or "").split("."):
            found = getattr(found, part, None)
        # a decorated function of a module is pickled by its name, as Python pickles functions
        if found is self:
            return name
        without = {
            "_families",
            "_clock",
            "_lock",
            "_warned",
            "__wrapped__",
            *functools.WRAPPER_ASSIGNMENTS,
        }
        state = {k: v for k, v in self.__dict__.items() if k not in without}
        # typeshed leaves it out
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
        functools.update_wrapper(self, self._func, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or torch_looks((args, kwargs)):
            return self._func(*args, **kwargs)
        try:
            try:
                return self._called(args, kwargs)
            except SparseOperand as refused:
                enclosed, named = sparse.enclosed((args, kwargs), refused)
                return self._called(enclosed, named, (args, kwargs))
        except Exception as error:
            if isinstance(error, TypeError) and has_fake(self._func, (args, kwargs)):
                return self._func(*args, **kwargs)
            for_user(error)
            raise

    @opaque
    def _called(self, args: Any, kwargs: dict[str, Any], given: Any = None) -> Any:
        """Call a program; given: the arguments themselves, if others stand in their place."""
        # the call is part of the outer transform's or jit's program
        if state.level is not None or state.recorder is not None:
            return self._func(*args, **kwargs)
        given = given or (args, kwargs)
        if self._static:
            try:
                args = tuple(
                    Same(a) if i in self._static and type(a) is not Same else a
                    for i, a in enumerate(args)
                )
            except TypeError as error:
                raise _unhashable(error, given) from None
        leaves, spec = trees.flatten((args, kwargs)) if kwargs else trees.flatten(args)
        if len(leaves) > 1 and len({*map(id, leaves)}) < len(leaves):
            leaves = without_twins(leaves)
        others = () if _TENSORS.issuperset(map(type, leaves)) else leaves
        found = [x for x in leaves if isinstance(x, torch.Tensor)] if others else leaves
        crossed, signatures = tensors.crossings(found)
        recording = torch.is_grad_enabled()
        grads = recording and any(map(_requires_grad, found))
        key: list[Any] = [spec, *signatures]
        if grads:
            key.append((torch.Tensor, *map(_requires_grad, found)))
        inputs: list[Any] = [] if others else crossed
        numbers: list[Any] = []
        torch_out = True
        source = iter(crossed)
        for x in others:
            if isinstance(x, torch.Tensor):
                inputs.append(next(source))
                key.append(torch.Tensor)
            elif isinstance(x, jax.Array):
                inputs.append(x)
                key.append(
                    (
                        x.shape,
                        x.dtype,
                        *(varying.in_type(x).values() if isinstance(x, jax.core.Tracer) else ()),
                    )
                )
                torch_out = False
            elif type(x) is float or type(x) is int:
                numbers.append(x)
                key.append(type(x))
            elif (
                self._opens(x)
                and (opened := objects.opened((args, kwargs), self._opens)) is not None
            ):
                return self._called(opened[0], opened[1], given)
            else:
                try:
                    key.append(WeakIdRef(x) if _mutable(x) else identical(x))
                except (TypeError, ValueError) as error:
                    raise _unhashable(error, given) from None
        key += (by_torch(self._random), torch_out, recording, guards.ambient())
        whole = tuple(key)
        try:
            family = self._families.get(whole)
        except (TypeError, ValueError) as error:
            raise _unhashable(error, given) from None
        misfit = False
        tried: list[Compiled] = []
        if family is not None:
            if family.itself and family.calls_itself():
                return self._unjitted(family.itself, torch_out, given)
            if family.counters:
                with SWAPPING:  # another thread's trace may have other numbers there
                    numbers += family.counted()
            for entry in family.find(numbers) if numbers else family.programs.get((), ()):
                tried.append(entry)
                with entry.turn:
                    captured = entry.captured(leaves)
                    if captured is not None:
                        try:
                            return self._run(entry, leaves, inputs, captured, grads, given)
                        except OtherAnswer:
                            continue
                        except Misfit:
                            misfit = True
        start = time.perf_counter()
        with contextlib.ExitStack() as turn:
            turn.enter_context(SWAPPING)
            try:
                entry = self._compile(
                    whole,
                    Call.each_once(*trees.flatten((args, kwargs))),
                    inputs,
                    numbers,
                    misfit,
                    tried,
                )
            except (OutsideGraph, OutsideOfView, SeededInside, NeedsTorch) as error:
                turn.close()
                if (
                    isinstance(error, CalledItself)
                    and (family := self._families.get(whole)) is not None
                ):
                    family.itself = str(error)
                return self._unjitted(str(error), torch_out, given)
            except BaseException:  # also what Ctrl-C and sys.exit raise
                if state.undone is not None:
                    with having(state, arguments=leaves, given=given):
                        state.undone.done()
                raise
            finally:
                state.undone = None
            if not entry.program.changes:
                turn.close()
            captured = entry.captured(leaves)
            assert captured is not None
            out = self._run(entry, leaves, inputs, captured, grads, given)
            entry.seconds += time.perf_counter() - start
            family = self._families.get(whole)
            if family is not None and (changed := entry.program.changed()):
                family.turns = family.turns + 1 if entry.captured(leaves) is None else 0
                if family.turns == _TURNS:
                    family.turns, family.left, family.pause = (
                        _TURNS - 1,
                        family.pause,
                        2 * family.pause,
                    )
                    with having(state, arguments=leaves, given=given):
                        names = ", ".join(map(str, changed))
                    family.itself = (
                        f"at each call it changes {names}, and what it does depends on that"
                    )
        return out

    def _run(
        self,
        entry: Compiled,
        leaves: list[Any],
        inputs: list[Any],
        captured: tuple[list[torch.Tensor], list[Any]],
        grads: bool,
        given: Any,
    ) -> Any:
        if entry.numbers is not None:
            leaves = [*leaves, *map(guards.current, entry.counters)]
            extra = entry.numbers.evaluated([leaves[i] for i in entry.numbered])
            leaves, inputs = [*leaves, *extra], [*inputs, *extra]
        entry.used = next(self._clock)
        entry.calls += 1
        if entry.program.flagged:
            for k in entry.program.flagged:
                leaves[entry.where[k]].requires_grad_()
            grads = torch.is_grad_enabled()
        found, arrays = captured
        if entry.asks:
            reason = entry.unfit(leaves, found)
            if reason:
                return self._unjitted(reason, entry.torch_out, given)
        out = entry.call(leaves, [*inputs, *arrays], found, grads)
        if type(out) is not Effects:
            return out
        given = given if entry.numbers is None else ((given,), {})
        with having(state, arguments=leaves, given=given):
            return out.done()

    def _unjitted(self, reason: str, torch_out: bool, given: Any) -> Any:
        """Call the function itself, because no program can do what it does with its arguments'
        memory or with seeds.
        """
        if not torch_out:
            raise RuntimeError(
                f"jit: {reason}, which a program for jax.Arrays cannot follow; clone what shares "
                "memory, set seeds outside of it, or pass torch tensors"
            )
        explaining.say(self, f"the function itself was called, and no program: {reason}")
        with random_numbers(self._random):
            return self._func(*given[0], **given[1])

    def _opens(self, x: Any) -> bool:
        """Whether an object among the arguments is taken apart, so that another one of its
        structure runs by the same program.

        It is if it holds nothing but tensors and constants, is no object of which this is a method,
        and another one of its class has been here before: the first one may be one that the
        function knows from elsewhere too.
        """
        kind = type(x)
        first = self._objects.get(kind)
        if first is None:
            if not objects.can_be_opened(kind, x) or any(
                v is self for cls in kind.__mro__ for v in vars(cls).values()
            ):
                self._objects[kind] = False
            elif objects.is_data(x):
                self._objects[kind] = weakref.ref(x) if by_identity(x) else True
        elif first is not False and first is not True and first() is not x and objects.is_data(x):
            self._objects[kind] = True
        return self._objects.get(kind) is True and objects.is_data(x)

    def _compile(
        self,
        key: Any,
        call: Call,
        inputs: list[Any],
        numbers: list[Any],
        misfit: bool,
        tried: list[Compiled],
    ) -> Compiled:
        # the locks always in this order: a traced function may call functional_call
        with (
            random_numbers(self._random),
            SWAPPING,
            self._lock,
            having(state, arguments=call.leaves),
            without_collections(),
        ):
            family = self._families.get(key)
            if family is None:
                families, family = self._families, _Family()
                family.watched = [
                    weakref.ref(x, lambda _: families.pop(key, None)) for x in _mortal(call.leaves)
                ]
                families[key] = family
            family.watch()
            numbers = [
                *[x for x in call.leaves if type(x) is float or type(x) is int],
                *family.counted(),
            ]
            # another thread may have made it while this one waited
            for made in family.find(numbers):
                if not any(made is t for t in tried) and made.captured() is not None:
                    return made
            given = family, call, inputs, numbers, key[-3]
            entry = None if misfit or family.once else self._with_inputs(*given)
            if entry is None:
                program = stage(self._unwrapped, call, self._donated(call), family.unset())
                entry = self._compiled(program, call, key[-3])
                family.once |= program.once
                if not misfit and not program.once:
                    family.references.append((numbers, entry))
                    entry = (family.once and self._with_inputs(*given)) or entry
            entry.used = next(self._clock)
            sub = family.key(numbers, entry.changing)
            entry.facts = explaining.facts(call, key, entry)
            others = [(e.facts, e.program.guards) for *_, e in self._entries()]
            entry.why = explaining.reason(entry.facts, others)
            explaining.say(self, f"a program was compiled: {entry.why}")
            if entry.program.once:
                return entry
            family.programs[sub] = [*family.programs.get(sub, ()), entry]
            self._families.setdefault(key, family)  # it may have been dropped in the meantime
            self._limit()
            return entry

    def _with_inputs(
        self, family: _Family, call: Call, inputs: list[Any], numbers: list[Any], torch_out: bool
    ) -> Compiled | None:
        """A program whose inputs include the changing numbers, except those whose values the
        function asks for; None if there is none.
        """
        changing = family.to_change(numbers)
        if (
            not changing
            or any(isinstance(x, jax.core.Tracer) for x in inputs)
            or family.reference() is None
        ):
            return None
        counted = range(len(call.leaves), len(call.leaves) + len(family.counters))
        numbered = [
            *[i for i, x in enumerate(call.leaves) if type(x) is float or type(x) is int],
            *counted,
        ]
        numbers_in = Inputs(numbers)
        standing = [numbers_in.number(k) if k in changing else x for k, x in enumerate(numbers)]
        leaves = [*call.leaves, *[None for _ in counted]]
        for i, x in zip(numbered, standing, strict=True):
            leaves[i] = x
        vectors = [torch.zeros(python_numbers.SLOTS, dtype=d) for d in (torch.float64, torch.int64)]
        spec = trees.joined(call.spec, *[trees.LEAF for _ in (*counted, *vectors)])
        inner = Call([*leaves, *vectors], trees.joined(spec, trees.flatten({})[1]), [])
        inner.where = [*call.where, len(leaves), len(leaves) + 1]

        def with_numbers(given: Any, *others: Any) -> Any:
            with numbers_in.tracing(others[-2], others[-1], value_of):
                return self._unwrapped(*given[0], **given[1])

        try:
            traced = functools.wraps(self._func, updated=())(with_numbers)
            with family.counting(standing):
                program = stage(traced, inner, self._donated(call), family.unset())
            changing -= numbers_in.asked
            entry = self._compiled(
                program,
                inner,
                torch_out,
                numbers=numbers_in,
                numbered=numbered,
                changing=changing,
                given=call.arrays,
                counters=[*family.counters],
            )
            entry.traced = traced
            found = family.reference(numbers_in, numbers)
            other = found is not None and program.interface() != found[1].program.interface()
            if other and not changing & family.differed:
                # what the first call has set up, the later ones find: the next one is compared
                family.differed |= changing
                return None
            if found is not None:
                values, reference, arrays = found
                with family.counting(values):
                    right = entry.agrees(reference, values, inputs, arrays)
            elif program.types_matter:  # there is no program to compare it with, but will be
                family.by_value |= numbers_in.asked
                return None
            else:
                right = True
        except HashedNumber as hashed:
            family.by_value |= hashed.origin
            return self._with_inputs(family, call, inputs, numbers, torch_out)
        except Exception:  # whatever it is, the trace with static numbers shows it to the user
            right = False
        family.by_value |= numbers_in.asked if right else changing
        if not right:
            return None
        if changing not in family.ways:
            family.ways.append(changing)
        return entry

    def _compiled(self, program: Program, call: Call, torch_out: bool, **numbers: Any) -> Compiled:
        """The program with what its calls need; numbers: as for Compiled, if some are inputs."""
        donated = self._donated(call, program)
        tiered = torch_out and not donated
        return Compiled(program, call, torch_out, donated, tiered=tiered, stored=tiered, **numbers)

    def _entries(self) -> list[tuple[Any, Any, Compiled]]:
        """All programs, each with the key of its family and its key in there."""
        return [
            (k, sub, e)
            for k, f in list(self._families.items())
            for sub, es in list(f.programs.items())
            for e in es
        ]

    def _limit(self) -> None:
        """Forget the least recently used programs."""
        every = sorted(self._entries(), key=lambda found: found[2].used)
        if len(every) > self._most and not self._warned:
            self._warned = True
            warnings.warn(
                f"jit of {explaining.name_of(self)}: more than max_programs={self._most} programs "
                f"were compiled, the last because {every[-1][2].why}. Those used least recently "
                "are forgotten, and compiled again if they are called. Pass what changes as a "
                "tensor, or as a Python number among the arguments; docs/jit.md tells "
                f"more{at_line()}",
                RuntimeWarning,
                stacklevel=2,
            )
        for key, sub, entry in every[: max(0, len(every) - self._most)]:
            family = self._families[key]
            family.programs[sub] = [e for e in family.programs[sub] if e is not entry]
            if not family.programs[sub]:
                del family.programs[sub]
            family.references = [(x, e) for x, e in family.references if e is not entry]
            if not family.programs:
                self._families.pop(key, None)
            entry.clear()

    def programs(self) -> list[ProgramInfo]:
        """The programs that are kept; the most recently used one comes first.

        Returns:
            list of ProgramInfo

        Example:
            >>> import torch
            >>> from torchfunc_jax import jit
            >>> f = jit(lambda x, s: x * s)
            >>> _ = f(torch.ones(3), 2.0), f(torch.ones(3), 3.0)
            >>> f.programs()[0].arguments
            ('args[0]: float32[3]', 'args[1]: float, an input')
        """
        return [e.info() for e in sorted([e for *_, e in self._entries()], key=lambda e: -e.used)]

    def _unwrapped(self, *args: Any, **kwargs: Any) -> Any:
        return self._func(*[a.value if type(a) is Same else a for a in args], **kwargs)

    def _donated(self, call: Call, program: Program | None = None) -> tuple[int, ...]:
        """Which inputs are donated: arguments, and of a program the tensors in objects among them
        too.
        """
        if not self._donate:
            return ()
        args, _ = trees.unflatten(call.spec, list(range(len(call.leaves))))
        if (beyond := max(self._donate)) >= len(args):
            raise ValueError(
                f"donate: expected positions of the {len(args)} positional arguments, counted from "
                f"0, got {beyond}"
            )
        chosen = {i for n in self._donate for i in trees.flatten(args[n])[0]}
        found = tuple(k for k, i in enumerate(call.where) if i in chosen)
        if program is None or any(isinstance(x, jax.Array) for x in call.arrays):
            return found
        return (*found, *within([call.leaves[i] for i in chosen - {*call.where}], program))

    @opaque
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments as JAX lowers it: ``.as_text()``, ``.cost_analysis()``,
        ``.compile()``.

        Args:
            args, kwargs: as for a call; only shapes, dtypes and static values matter.

        Returns:
            jax.stages.Lowered

        Example:
            >>> import torch
            >>> from torchfunc_jax import jit
            >>> "sine" in jit(torch.sin).lower(torch.ones(2)).as_text()
            True
        """
        call, program = self._staged(args, kwargs)
        with jax.enable_x64(True), compiling.correctly(), having(state, arguments=call.leaves):
            run = jax.jit(forward(program, None), compiler_options=compiling.options())
            return run.lower(
                [aval(x) for x in (*call.arrays, *[p.get() for p in program.places])],
                program.any_random(),
            )

    @opaque
    def jaxpr(self, *args: Any, **kwargs: Any) -> ClosedJaxpr:
        """The program for these arguments as a jaxpr.

        Args:
            args, kwargs: as for a call; only shapes, dtypes and static values matter.

        Returns:
            jax.core.ClosedJaxpr

        Example:
            >>> import torch
            >>> from torchfunc_jax import jit
            >>> [str(e.primitive) for e in jit(torch.sin).jaxpr(torch.ones(2)).eqns]
            ['sin']
        """
        return self._staged(args, kwargs)[1].jaxpr

    def _staged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Program]:
        """The program for these arguments, which is not kept."""
        call = Call.each_once(*trees.flatten((args, kwargs)))
        try:
            with random_numbers(self._random), having(state, arguments=call.leaves):
                return call, stage(self._unwrapped, call)
        except NeedsTorch as error:
            raise RuntimeError(f"jit: there is no program, because {error}") from None

    def cache_clear(self) -> None:
        """Forget every compiled program."""
        self._families.clear()


def _unhashable(error: Exception, given: Any) -> TypeError:
    """The error for a call of the (args, kwargs) given, one of which has no hash."""
    leaves, spec = trees.flatten(given)
    found = [
        (f"{explaining.name_of_leaf(path)} is {type(x)}", x)
        for path, x in zip(trees.paths(spec), leaves, strict=True)
        if not isinstance(x, torch.Tensor | jax.Array | Hashable)
    ]
    reason, x = found[0] if found else (error, None)
    how = ", which torch.as_tensor makes" if isinstance(x, np.ndarray) else ""
    return TypeError(
        f"jit: every argument that is no tensor must be hashable; {reason}. Pass it inside a "
        f"closure or as a tensor{how}"
    )


def _mutable(x: Any) -> bool:
    """Whether no hash can tell an object of a user's class from others, because it may change."""
    return type(x).__hash__ is None and objects.can_be_opened(type(x), x)


def _mortal(leaves: Sequence[Any]) -> Iterator[Any]:
    """The arguments that are compared by identity, as those are that no hash can tell apart; when
    one of them is collected, its programs are dropped.
    """
    for x in leaves:
        x = x.value if type(x) is Same else x
        x = getattr(x, "__self__", x)
        if isinstance(x, torch.Tensor | jax.Array):
            continue
        if _mutable(x) or (by_identity(x) and weak(x) is not x):
            yield x
