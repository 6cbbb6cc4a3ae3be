"""A torch function as one JAX program: it is traced once and compiled by XLA, and its captured
tensors are inputs like any other.

This file traces the function, finds the program's other inputs (captured tensors, seeds), and
splits the program's results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from bridge import blocks, compiling, private, private_jax
from bridge.boundary import meshes, shared_memory
from bridge.boundary.calls import Call
from bridge.boundary.results import (
    Output,
    conj,
    inexact,
    is_array,
    pick,
    placed,
    replaced,
    take_apart,
)
from bridge.convert import dtypes, tensors, trees
from bridge.errors import CalledItself, DataDependentError, NeedsTorch, at_line, rewording
from bridge.intercepted.leaf_gradients import AskedForGradients
from bridge.jit.effects import Change, noted
from bridge.jit.simplify import simplified
from bridge.lowering.common import varying
from bridge.process import having
from bridge.programs import closure_scan
from bridge.programs.guards import Guards, ValueOf
from bridge.programs.places import GradOf, OfArgument, Place
from bridge.trace import python_numbers, random_keys, tracing
from bridge.trace.aliasing import View
from bridge.trace.answers import Answers
from bridge.trace.levels import push, state
from bridge.trace.requires_grad import flow, moved
from bridge.trace.stacks import joined, stack_p, stacked, unstacked
from bridge.trace.torch_random import AtEachCall, ByValue, Draw, Rewind, by_torch, made
from bridge.trace.value_checks import Bounds, ends
from bridge.transform_kinds import PLAIN
from bridge.xla import products
from bridge.xla.block_calls import rows

# how often a function is traced to find its captured tensors: those that one trace finds may lead
# the next to more
_TRACES = 8
_APART = 3  # after so many traces that a loop was not possible for, all blocks run one by one
_ASKED = 1 << 16  # elements of a captured tensor whose values a function may ask for
SEEDS = 8  # how many torch generators a program may draw from, including the default one
_ANY_SEEDS = np.zeros(SEEDS, np.int64)
#: At least so many outputs of one shape, each of at most this size, are packed into one array: the
#: stack takes the time of thirty views.
_PACK_FROM, PACK_SIZE = 32, 4096


@dataclasses.dataclass(slots=True)
class Program:
    """A staged function. Its inputs are the arguments that are arrays and then the captured
    tensors; they are numbered together.

    Attributes:
        jaxpr: (inputs, seeds, numbers that torch draws) -> outputs, then written values.
        places: where each call looks for the captured tensors.
        guards: the other conditions under which the program is right.
        out_spec, static, is_tensor: the output tree, its leaves that are not tensors, and for each
            leaf its device if it is a tensor.
        count: the number of outputs of the jaxpr, without the written values.
        written: for each written value, the input that it is written to.
        generators: the explicit torch generators that the program draws from, by seed slot.
        draws: whether the program draws a seed from the default generator.
        strided: the inputs that the function passes to ``as_strided``, which counts from where the
            memory begins.
        types_matter: whether the function may have called ``type``.
        kinds: for each output and written value, whether torch's autograd can go back through it.
        sources: for each output and written value, the inputs that autograd goes back to, as bits
            of a number. ``operands.constant`` (no_grad, detach) stops it; a derivative that is
            always zero does not, because PyTorch's sign(x) requires grad if x does.
        behind: ``sources``, and the inputs that only rules of autograd.Functions use: a second
            derivative goes back to them.
        shared: the outputs that are views and no outputs of the jaxpr, in order: (index, the input
            or Output that it is a view of, views).
        drawn: the draws that torch makes before each run.
        numbers: which of these draws are inputs of the jaxpr.
        graded: the places of the tensors whose ``.grad`` it sets, and of arguments that PyTorch's
            engine gives a gradient.
        pulls: whether it depends on which captured tensors require grad.
        once: whether it is good for one call only: a cached function of the user's has run for the
            first time in the trace, and Python objects have changed.
        flagged: the arguments that it makes require grad.
        of_arguments: whether places or guards are those of a ``.grad`` of an argument.
        changes: the changes of Python objects that it makes.
    """

    jaxpr: ClosedJaxpr
    places: list[Place]
    guards: Guards
    out_spec: Any
    static: list[Any]
    is_tensor: list[Any]
    count: int
    written: list[int]
    generators: list[torch.Generator]
    draws: bool
    strided: list[int]
    types_matter: bool
    kinds: list[bool]
    sources: list[int]
    behind: list[int]
    shared: list[tuple[int, int | Output, tuple[View, ...]]]
    drawn: list[Draw | ByValue | Rewind]
    numbers: list[int]
    graded: list[Place]
    pulls: bool
    once: bool
    flagged: list[int]
    of_arguments: bool
    changes: Sequence[Change]

    def outputs(self, computed: list[Any], inputs: Sequence[Any]) -> list[Any]:
        """All outputs, from those of the jaxpr; call it when the written values
        have been written.
        """
        found = list(computed)
        for i, *_ in self.shared:
            found.insert(i, None)
        return placed(
            found,
            [(i, inputs[of] if isinstance(of, int) else of, views) for i, of, views in self.shared],
        )

    def interface(self) -> tuple[Any, ...]:
        """What a caller sees of the program, to be compared with another one's; each captured
        tensor is given by its place.
        """
        jaxpr = self.jaxpr.jaxpr
        arguments = range(len(jaxpr.invars) - len(self.places) - 1 - len(self.numbers))
        names = [*arguments, *[p.identity for p in self.places]]
        shared = [
            (i, names[of] if isinstance(of, int) else of, views) for i, of, views in self.shared
        ]
        return (
            [(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars],
            self.out_spec,
            self.is_tensor,
            self.count,
            self.kinds,
            self.draws,
            self.generators,
            self.drawn,
            [names[i] for i in self.written],
            shared,
        )

    def reached(self, inputs: Sequence[int]) -> tuple[int, ...]:
        """Which of these inputs torch's autograd goes back to."""
        every = functools.reduce(operator.or_, itertools.compress(self.behind, self.kinds), 0)
        return tuple(i for i in inputs if every & 1 << i)

    def direct(self, inputs: Sequence[int], given: Sequence[bool]) -> list[bool]:
        """For each of these inputs, whether the first derivative of a given output goes back to it,
        and not only a second one.

        given: for each output, then for each written value, whether it has a cotangent.
        """
        every = functools.reduce(operator.or_, itertools.compress(self.sources, given), 0)
        return [bool(every & 1 << i) for i in inputs]

    def kinds_for(self, inputs: Sequence[int]) -> list[bool]:
        """``kinds`` if only these inputs require grad; a written tensor that requires grad keeps a
        history.
        """
        wanted = sum(1 << i for i in inputs)
        return [k and bool(s & wanted) for k, s in zip(self.kinds, self.sources, strict=True)]

    def packing(self) -> Packing | None:
        return Packing.of(self.jaxpr.jaxpr)

    def checked(self) -> tuple[Program, Bounds | None]:
        """The program with its checked operands as its last outputs, and the Bounds that judge
        their ``ends``; None if it checks none.
        """
        jaxpr, bounds = Bounds.of(self.jaxpr)
        return dataclasses.replace(self, jaxpr=jaxpr), bounds

    def changed(self) -> list[Change | str]:
        """What it changes although it may depend on it: Python objects, and the values of captured
        tensors that the function has asked for.
        """
        first = len(self.jaxpr.jaxpr.invars) - len(self.places) - 1 - len(self.numbers)
        written = {self.places[i - first].identity for i in self.written if i >= first}
        asked = [p for of, _ in self.guards.places if type(of) is ValueOf for p in of.key.values()]
        return [*self.changes, *[f"the values of {p}" for p in asked if p.identity in written]]

    def whole(self) -> Program:
        """This program, also if another process has stored it without its jaxpr."""
        return self

    def run(
        self, inputs: Sequence[Any], random: Any, evaluate: Any = jax.core.eval_jaxpr
    ) -> list[Any]:
        """Evaluate the program on JAX values: outputs, then written values. random: what ``random``
        or ``any_random`` gives.
        """
        seeds, numbers = (_ANY_SEEDS, []) if random is None else random
        return evaluate(self.jaxpr.jaxpr, self.jaxpr.consts, *inputs, seeds, *numbers)

    @property
    def is_random(self) -> bool:
        return bool(self.draws or self.generators or self.drawn)

    def random(self, inputs: Sequence[Any]) -> tuple[np.ndarray, list[jax.Array]] | None:
        """Fresh seeds and numbers for one call, drawn only from the generators that the program
        uses; None if it uses none.
        """
        if not self.is_random:
            return None
        if state.trying:
            return self.any_random()
        drawn = made(self.drawn, [*inputs, _ANY_SEEDS], self.numbers)
        seeds = np.zeros(SEEDS, np.int64)
        if self.draws:
            seeds[0] = random_keys.seed_from(None)
        for i, g in enumerate(self.generators, 1):
            seeds[i] = random_keys.seed_from(g)
        return seeds, tensors.on_one_device(
            [*inputs, *[tensors.to_jax(drawn[k]) for k in self.numbers]]
        )[len(inputs) :]

    def any_random(self) -> Any:
        """What ``random`` gives, with zeros for the seeds and for the numbers."""
        invars = self.jaxpr.jaxpr.invars
        numbers = [
            np.zeros(v.aval.shape, v.aval.dtype) for v in invars[len(invars) - len(self.numbers) :]
        ]
        return (_ANY_SEEDS, numbers) if self.is_random else None


# so that torch.compiler.is_compiling() is true in this thread's traces
@having(state, jitting=True)
def stage(
    fn: Callable[..., Any], call: Call, donated: Sequence[int] = (), unset: Collection[Any] = ()
) -> Program:
    """Trace fn once on the shapes of a call's arguments; donated: those whose memory no output may
    share; unset: see ``noted``.

    Raises:
        DataDependentError: the function asks for values.
    """
    # the hooks of all modules may read captured tensors
    hooks = [hook for kind in private.GLOBAL_HOOKS for hook in kind.values()]
    roots = [fn, *(x for x in call.leaves if not is_array(x)), *hooks]
    arguments = {id(x) for x in call.arrays}
    candidates: list[tuple[torch.Tensor, Place]] = []
    missing: list[torch.Tensor] = []
    for attempt in range(1 + _TRACES):
        if attempt < 2:
            found = closure_scan.scan(*roots, deeper=attempt > 0)
            for reason in found.refused():
                raise CalledItself(reason)
            if any(is_lazy(t) for t, _ in found.tensors.values()):
                raise NeedsTorch("the first call of a lazy module makes its parameters")
            plain = [x for x in call.arrays if type(x) in (torch.Tensor, torch.nn.Parameter)]
            public = [name for x in plain for name in vars(x) if not name.startswith("_")]
            if not found.code["loaded"].isdisjoint(public):  # itself, and not only any attribute
                raise CalledItself("it reads an attribute that a tensor among its arguments has")
            candidates = [
                (t, place)
                for key, (t, place) in found.tensors.items()
                if key not in arguments and tensors.crosses(t)
            ]
        # the scan cannot find the missing tensors: they become inputs too, and the program itself
        # holds them
        known = {id(t) for t, _ in candidates}
        new = [(t, Place(t, None)) for t in missing if id(t) not in known]
        given = [
            (call.leaves[i], OfArgument(None, i))
            for i in call.where
            if isinstance(call.leaves[i], torch.Tensor)
        ]
        grads = {
            id(t.grad): (t.grad, GradOf(place, "grad"))
            for t, place in [*candidates, *new, *given]
            if t.is_leaf and t.grad is not None and tensors.crosses(t.grad)
        }
        candidates += [(t, place) for t, place in new if id(t) not in grads]
        every = [*{**grads, **{id(t): (t, place) for t, place in candidates}}.values()]
        program, missing = _traced(
            noted(fn, call, found, {id(t): place for t, place in every}, donated, unset),
            call,
            every,
            found,
            donated,
        )
        if not missing:
            return program
    shapes = ", ".join(f"{list(t.shape)} of {t.dtype}" for t in missing[:4])
    raise RuntimeError(
        "jit: the function uses tensors from outside that are others each time it is traced "
        f"(shapes {shapes}), so that none can become an input of the program; pass them as "
        "arguments, or keep them"
    )


def _traced(
    fn: Callable[..., Any],
    call: Call,
    candidates: list[tuple[torch.Tensor, Place]],
    found: closure_scan.Found,
    donated: Sequence[int],
) -> tuple[Program, list[torch.Tensor]]:
    """``trace``, again until it is told enough.

    What the function asks torch's autograd for gradients by requires grad from its beginning on.
    If it asks for values that are computed from small captured tensors without a derivative, the
    answers are conditions of the program. Lists of blocks that no loop runs through run one by one.
    """
    small = [
        (t, place)
        for t, place in candidates
        if t.numel() <= _ASKED and not t.requires_grad and t.layout is torch.strided
    ]
    leaves: frozenset[int] = frozenset()
    asking: list[tuple[torch.Tensor, Place]] = []
    apart: list[Sequence[torch.nn.Module]] = []  # the blocks of lists that no loop runs through
    # programs without tiers would copy the parameters of a loop
    tiered = not donated and all(isinstance(x, torch.Tensor) for x in call.arrays)

    def looped(*args: Any, **kwargs: Any) -> Any:
        modules = found.modules.values() if tiered and len(apart) < _APART else ()
        with blocks.deep_lists(modules, apart):
            return fn(*args, **kwargs)

    while True:
        try:
            return trace(
                looped, call, candidates, found, donated=donated, asking=asking, leaves=leaves
            )
        except DataDependentError:
            if len(asking) == len(small):
                raise  # what is refused here depends on more than captured tensors
            asking = small
        except AskedForGradients as asked:
            if asked.numbers <= leaves:
                raise
            leaves |= asked.numbers
        except blocks.OneByOne as other:
            apart.append(other.blocks)


def aval(x: torch.Tensor | jax.Array) -> jax.ShapeDtypeStruct:
    if isinstance(x, torch.Tensor):
        return jax.ShapeDtypeStruct(tuple(x.shape), dtypes.to_jax(x.dtype))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, **varying.in_type(x))


def trace(
    fn: Callable[..., Any],
    call: Call,
    candidates: list[tuple[torch.Tensor, Place]],
    found: closure_scan.Found,
    donated: Sequence[int] = (),
    asking: Sequence[tuple[torch.Tensor, Place]] = (),
    watched: bool = True,
    leaves: frozenset[int] = frozenset(),
) -> tuple[Program, list[torch.Tensor]]:
    """(the program, the captured tensors that are no candidates); if there are any of these, the
    program is of no use.

    asking: those of the candidates of whose values, and of what is computed from these, the
    function may ask; the program fits as long as the answers are the same. watched: whether Python
    of the user's runs, which may change torch's generators. leaves: see ``Level.leaves``.
    """
    asked_of = {id(t): np.array(tensors.to_jax(t)) for t, _ in asking}
    traceable = call.traceable(fn)
    traceable.as_given(call.arrays)
    info: dict[str, Any] = {}
    generators: dict[int, torch.Generator] = {}
    watch = random_keys.Watch(found.generators) if watched else None
    meets = (lambda generator: None) if watch is None else watch.draw

    def staged(arguments: list[Any], captured: list[Any], seeds: Any) -> list[Any]:
        with tracing.root() as root:
            root.leaves = leaves
            root.overrides = {id(t): v for (t, _), v in zip(candidates, captured, strict=True)}
            root.constant = frozenset(asked_of)
            if asking:
                root.answers = info["answers"] = Answers(
                    [root.overrides[key] for key in asked_of],
                    [*asked_of.values()],
                    [place for _, place in asking],
                )

            def key_of(generator: torch.Generator | None) -> Any:
                slot = 0
                if generator is None:
                    info["draws"] = True
                else:
                    which = private.which_generator(generator)
                    generators.setdefault(which, generator)
                    slot = 1 + list(generators).index(which)
                    if slot >= SEEDS:
                        raise RuntimeError(
                            f"generator: a compiled function can draw from at most {SEEDS - 1} "
                            "generators of its own"
                        )
                meets(generator)
                # not kept: it may belong to an inner trace of JAX's, as that of jet
                return jax.random.key(seeds[slot])

            root.seeds = key_of
            if by_torch() and not any(isinstance(x, jax.Array) for x in call.arrays):
                info["drawn"] = root.drawn = AtEachCall(seeds, meets)
            with (
                contextlib.nullcontext() if watch is None else watch.watching(),
                push(PLAIN) as level,
                _ValuesFromOutside(),
            ):
                result = traceable.run(level, arguments, take_apart)
            met = dict(root.captured)
            info.update(
                read=root.read,
                same=root.same,
                graded=root.graded,
                pulls=root.pulls,
                once=root.once,
                changes=root.changes,
            )
            shared: list[tuple[int, Any, tuple[View, ...]]] = []
            if all(isinstance(x, torch.Tensor) for x in call.arrays):
                for i, t, views in shared_memory.outputs(result, call.arrays, met.values()):
                    source = result.shared[i][0]
                    if source not in donated:
                        shared.append((i, source if isinstance(source, int) else t, views))
            elsewhere = {i for i, *_ in shared}
            outputs = result.values[: len(result.values) - len(result.written)]
            values = [v for i, v in enumerate(outputs) if i not in elsewhere]
            of_node = {node: t for t, node in met.values()}
            written = [
                (t if isinstance(t, int) else of_node.get(t), result.values[i], alone)
                for t, i, alone in result.written
            ]
            # what is donated must not be used after the call, so that a result need not be written
            # to it too
            returned = {id(v) for v in values}
            written = [
                x
                for x in written
                if x[0] is not None and not (x[0] in donated and id(x[1]) in returned)
            ]
            info.update(
                meta=result.meta,
                count=len(values),
                written=[t for t, *_ in written],
                shared=shared,
                met=met,
                kinds=[inexact(v) for v in values]
                + [inexact(v) and not alone for _, v, alone in written],
            )
            return values + [v for _, v, _ in written]

    folded = max(state.folded, _ASKED) if asking else state.folded
    with (
        having(state, folded=folded, numbers=state.numbers),
        jax.enable_x64(True),
        compiling.correctly(),
        meshes.on_auto_axes(),
    ):
        avals = [aval(x) for x in call.arrays]
        if state.numbers is not None:
            state.numbers.late = []  # not those of a trace that was given up
        closed = jax.make_jaxpr(staged)(
            avals, [aval(t) for t, _ in candidates], jax.ShapeDtypeStruct((SEEDS,), np.int64)
        )
        if state.numbers is not None and state.numbers.keeps_late():
            raise DataDependentError(
                "item() gives a number that is known when the program has run, and the function "
                "keeps it where jit does not look: return it, or keep it in a list, a dict or an "
                f"attribute that the function's code names{at_line()}"
            )
    inputs = info["met"].keys() | {
        id(t) for t in [*info["written"], *[of for _, of, _ in info["shared"]]]
    }
    spec, static, is_tensor = info["meta"]
    drawn = info.get("drawn")
    jaxpr, numbers, by_value = (
        (closed.jaxpr, [], []) if drawn is None else drawn.as_inputs(closed.jaxpr)
    )
    met, first, known = info["met"], len(avals), {id(t) for t, _ in candidates}
    used = [k for k, (t, _) in enumerate(candidates) if id(t) in inputs]
    missing = [t for key, (t, _) in met.items() if key not in known]
    order = {id(t): i for i, t in enumerate([*[candidates[k][0] for k in used], *missing], first)}
    jaxpr = jaxpr.replace(
        invars=[
            *jaxpr.invars[:first],
            *[jaxpr.invars[first + k] for k in used],
            *jaxpr.invars[first + len(candidates) :],
        ],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    for draw, operands in by_value:
        draw.computed_by(jaxpr, closed.consts, operands)
    jaxpr = simplified(jaxpr)
    written = [t if isinstance(t, int) else order[id(t)] for t in info["written"]]
    strided = [k for k, g in enumerate(traceable.geometries) if g.asked]
    strided += [
        order[key]
        for key, (_, node) in met.items()
        if key in order and node.geometry is not None and node.geometry.asked
    ]
    bits = [1 << i for i in range(len(jaxpr.invars))]
    targets = [0] * info["count"] + [1 << i for i in written]
    sources, behind = (
        [s | t for s, t in zip(flow(jaxpr, bits, rules), targets, strict=True)]
        for rules in (False, True)
    )
    asked = (
        [ValueOf(rule, asking, rule in info["answers"].items) for rule in info["answers"].asked]
        if asking
        else []
    )
    places = [candidates[k][1] for k in used]
    program = Program(
        closed.replace(jaxpr=jaxpr),
        places,
        Guards(
            found,
            asked,
            info["read"],
            info["same"],
            [
                (c.holder.entry(c.key), c.there)
                for c in info["changes"]
                if c.there is not None and (c.key is None or found.names(c.key))
            ],
        ),
        spec,
        static,
        is_tensor,
        info["count"],
        written,
        [*generators.values()],
        info.get("draws", False),
        strided,
        found.names("type"),
        info["kinds"],
        sources,
        behind,
        [
            (i, order[id(of)] if isinstance(of, torch.Tensor) else of, views)
            for i, of, views in info["shared"]
        ],
        [] if drawn is None else drawn.draws,
        numbers,
        info["graded"],
        info["pulls"],
        info["once"],
        traceable.flagged,
        any(isinstance(p.container, OfArgument) for p in [*places, *[p for p, _ in info["read"]]]),
        info["changes"],
    )
    return program, missing


class _ValuesFromOutside(TorchFunctionMode):
    """Refuses functions that read a tensor from outside without an operator, because the program
    would keep its values for ever.

    A tensor of one number that is an input is made of the input. In other Python data such numbers
    are replaced by their values, because PyTorch's C++ keeps 32 bits of an input alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in _PROPERTIES
            and type(args[0]) is tracing.Traced
            and not args[0].node.level.closed
        ):
            with private.without_torch_function():
                return func(*args, **(kwargs or {}))
        try:
            found = self._called(func, types, args, kwargs)
        except (RuntimeError, TypeError) as error:
            # C++ does not say that a shape, or a list of numbers, is one of ``item()``
            if state.numbers is not None and (
                _NEEDS_INTEGERS in str(error)
                or (type(error) is TypeError and _is_late((args, list((kwargs or {}).values()))))
            ):
                raise tracing.unknown_value("item()") from error
            raise
        return tracing.numbered(found) if type(found) is tracing.Traced else found

    def _called(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _GRAD and state.level.root.grads is not None:
            state.level.root.grads.touch(args[0], func == _GRAD[0])
            return func(*args, **(kwargs or {}))
        if func in _FLAG:
            state.level.root.flagged.add(id(args[0]))
        if func in tracing.AT_MEMORY and type(args[0]) is not tracing.Traced:
            return tracing.at_memory(func, args, kwargs or {}, self._read)
        if func is torch.Tensor.item:
            if (number := self._number(args[0])) is not None:
                return number
            try:
                return func(*args, **(kwargs or {}))
            except DataDependentError:
                if args[0].dtype is torch.bool or args[0].is_complex():  # not kept as it is
                    raise tracing.unknown_value(f"item() of a {args[0].dtype} tensor") from None
                raise
        for name in _SCALARS.intersection(kwargs or ()):  # PyTorch takes the number of a tensor
            x = kwargs[name]
            if isinstance(x, torch.Tensor) and (name != "value" or func in _WITH_SCALAR_VALUE):
                number = self._number(x)
                kwargs = {**kwargs, name: x if number is None else number}
        if (
            func in _AS_NUMBER
            and type(args[0]) is not tracing.Traced
            and args[0].numel() == 1
            and id(args[0]) not in state.level.root.constant
            and not (func == torch.Tensor.__index__ and args[0].is_floating_point())
        ):  # torch.Tensor([x]) asks where no dispatch mode is called
            raise tracing.unknown_value("item()")
        if func in _BY_RULE and not any(issubclass(kind, tracing.Traced) for kind in types):
            return tracing.PYTHON_RULES[func](func, *args, **(kwargs or {}))
        if (
            func in (torch.tensor, torch.as_tensor)
            and len(args) == 1
            and python_numbers.is_input(args[0])
        ):
            dtype = (
                torch.get_default_dtype() if isinstance(args[0], torch.SymFloat) else torch.int64
            )
            return torch.full((), args[0], **{"dtype": dtype, **(kwargs or {})})
        if func in _OF_DATA:
            args, kwargs = (
                [self._with_values(x) for x in args],
                {name: self._with_values(x) for name, x in (kwargs or {}).items()},
            )
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _number(t: torch.Tensor) -> Any:
        """What stands for the number that a tensor holds; None if nothing does."""
        known = state.level.root.answers
        if known is not None and known.knows(value := tracing.value_of(t)):
            return known.number(value)
        return tracing.item_later(t)

    def _with_values(self, x: Any) -> Any:
        """An argument of a function of Python data, with the values of inputs, and of tensors from
        outside in lists, in their place.
        """
        if isinstance(x, list | tuple):
            return type(x)(
                [
                    self._read(torch.Tensor.item, (e,), {})
                    if isinstance(e, torch.Tensor) and type(e) is not tracing.Traced
                    else self._with_values(e)
                    for e in x
                ]
            )
        return x.node.asked() if python_numbers.is_input(x) else x

    @staticmethod
    def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(args[0]) in state.level.root.constant:
            return tracing.read_memory(func, args, kwargs)
        raise tracing.unknown_value(f"{func.__name__}()")


tracing.HANDED_IN["values_from_outside"] = _ValuesFromOutside


def _is_late(x: Any) -> bool:
    """Whether x, or what is in it, is a number that is known when the program has run."""
    return any(map(_is_late, x)) if isinstance(x, list | tuple) else python_numbers.is_late(x)


_NEEDS_INTEGERS = "expected to contain only concrete integers"
#: What PyTorch knows of a tensor whose values are not known; these are most of a trace's calls.
_PROPERTIES = frozenset(
    [
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_nested")
    ]
    + [
        getattr(torch.Tensor, name)
        for name in (
            "dim",
            "size",
            "stride",
            "storage_offset",
            "is_contiguous",
            "is_floating_point",
        )
    ]
)
_FLAG = [torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__]  # type: ignore[attr-defined]
_GRAD = [getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")]
#: Functions that read the values of a tensor from outside, or call CUDA's own kernels, if no
#: operand is traced; their rules do not.
_BY_RULE = frozenset(
    [
        torch.Tensor.__getitem__,
        torch.Tensor.__setitem__,
        torch.narrow,
        torch.Tensor.narrow,
        torch.select,
        torch.Tensor.select,
        F.one_hot,
        F.scaled_dot_product_attention,
        torch._VF.lstm,
        torch._VF.gru,
        torch._VF.rnn_tanh,
        torch._VF.rnn_relu,
        torch._VF.lstm_cell,
        torch._VF.gru_cell,
    ]
)
#: Arguments that are numbers, and functions in which ``value`` is one.
_SCALARS = frozenset(["alpha", "beta", "value"])
_WITH_SCALAR_VALUE = frozenset(
    f
    for name in ("addcdiv", "addcmul")
    for f in (getattr(torch, name), getattr(torch.Tensor, name), getattr(torch.Tensor, f"{name}_"))
)
_AS_NUMBER = frozenset(
    [torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__complex__, torch.Tensor.__index__]
)
_OF_DATA = frozenset(
    [torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, torch.Tensor.new]
)


# -- outputs: those of one shape are packed together -----------------------------------------------
@dataclasses.dataclass(slots=True)
class Packing:
    """The results that are stacked into one array before their conversion to torch (groups), and
    those that are not.
    """

    singles: list[int]
    groups: list[list[int]]

    @classmethod
    def of(cls, jaxpr: Jaxpr) -> Packing | None:
        """The packing of a jaxpr's outputs; None if each is returned by itself."""
        by_shape: dict[Any, list[int]] = {}
        avals: list[Any] = [v.aval for v in jaxpr.outvars]
        for i, a in enumerate(avals):
            if 0 < a.size <= PACK_SIZE:
                by_shape.setdefault((a.shape, a.dtype), []).append(i)
        groups = [g for g in by_shape.values() if len(g) >= _PACK_FROM]
        done = {i for g in groups for i in g}
        return cls([i for i in range(len(avals)) if i not in done], groups) if groups else None

    def pack(self, values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in self.singles] + [
            joined(*[values[i] for i in g]) for g in self.groups
        ]

    def unpack(
        self, arrays: Sequence[Any], device: torch.device | None, count: int
    ) -> list[torch.Tensor]:
        """The results as separate tensors; the caller waits for the arrays."""
        out: list[Any] = [None] * count
        for i, a in zip(self.singles, arrays, strict=False):
            out[i] = tensors.to_torch(a, device, wait=False)
        for g, a in zip(self.groups, arrays[len(self.singles) :], strict=True):
            for i, t in zip(g, tensors.to_torch(a, device, wait=False).unbind(0), strict=True):
                out[i] = t
        return out


def forward(program: Program, packing: Packing | None) -> Callable[..., list[Any]]:
    """The program as a function to be jitted; an output that is an input is copied, so that no
    result shares an input's memory.

    The ``ends`` of the checked operands come last.
    """
    ordered = products.in_order(program.jaxpr.jaxpr)
    count = len(program.sources)
    ordered = products.rearranged(ordered, products.on_cpu())
    program = dataclasses.replace(program, jaxpr=program.jaxpr.replace(jaxpr=ordered))
    seen = set(map(id, program.jaxpr.jaxpr.invars))
    copy = []
    for v in program.jaxpr.jaxpr.outvars[:count]:
        copy.append(id(v) in seen)
        seen.add(id(v))

    def run(inputs: Sequence[Any], random: Any) -> list[Any]:
        values = program.run(inputs, random, private_jax.inlined)
        results = [jnp.copy(v) if c else v for v, c in zip(values[:count], copy, strict=True)]
        return (results if packing is None else packing.pack(results)) + ends(values[count:])

    return run


def differentiated(program: Program, active: Sequence[int]) -> Callable[..., Any]:
    """(outputs, others, pullback) of a program with respect to some of its inputs, to be jitted.

    The ``ends`` of the checked operands come last among the others.
    """
    program = program.whole()
    written = products.rearranged(program.jaxpr.jaxpr, products.on_cpu(), final=False)
    program = dataclasses.replace(program, jaxpr=program.jaxpr.replace(jaxpr=written))
    count = len(program.sources)
    kinds = program.kinds_for(active)

    def run(inputs: Sequence[Any], random: Any) -> Any:
        def pure(diff: list[Any]) -> tuple[list[Any], list[Any]]:
            values = program.run(replaced(inputs, active, diff), random)
            return pick(values[:count], kinds), pick(values[:count], [not k for k in kinds]) + ends(
                values[count:]
            )

        outs, pull, rest = varying.vjp(pure, [inputs[i] for i in active], has_aux=True)
        return outs, rest, pull

    return run


def in_two(
    program: Program, active: Sequence[int]
) -> tuple[
    Callable[..., Any],
    Callable[..., Any],
    Callable[[jax.stages.Traced], tuple[tuple[Any, Any], list[int]]],
]:
    """``differentiated`` and ``pull_back`` as two functions that exchange only the arrays that the
    pullback holds.

    The third result takes the first one's trace; it gives the shapes and dtypes that the second one
    takes, and says which of the program's inputs the pullback holds, perhaps in another shape.
    """
    jaxpr = program.whole().jaxpr.jaxpr
    # the gradients of loops over blocks are computed as stacks
    looped = any(eqn.primitive is stack_p for eqn in jaxpr.eqns)
    both = products.rearranging(differentiated(program, active), jaxpr)
    pull = products.rearranging(pull_back, jaxpr)
    tree: list[Any] = []
    # of what the pullback holds: whether it is a value for each block, and the parts are exchanged
    split: list[bool] = []

    def run(inputs: Sequence[Any], random: Any) -> Any:
        if looped:
            closed, shapes = jax.make_jaxpr(both, return_shape=True)(inputs, random)
            values = private_jax.inlined(
                closed.jaxpr, closed.consts, *jax.tree.leaves((inputs, random))
            )
            outs, rest, pullback = jax.tree.unflatten(jax.tree.structure(shapes), values)
        else:
            outs, rest, pullback = both(inputs, random)
        held, structure = jax.tree.flatten(pullback)
        tree[:] = [structure]
        if looped:
            each, last = rows(closed.jaxpr)[0], closed.jaxpr.outvars[len(values) - len(held) :]
            split[:] = [not isinstance(v, Literal) and v in each for v in last]
            held = [unstacked(v) if apart else v for v, apart in zip(held, split, strict=True)]
        return outs, rest, held

    def back(held: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        if split:
            held = [stacked(v) if apart else v for v, apart in zip(held, split, strict=True)]
        return pull(jax.tree_util.tree_unflatten(tree[0], held), cotangents)

    def passed(traced: jax.stages.Traced) -> tuple[tuple[Any, Any], list[int]]:
        outs, _, held = traced.out_info
        whole = traced.jaxpr.jaxpr
        given = range(
            len(whole.invars) - 1 - len(program.numbers) if program.is_random else len(whole.invars)
        )
        found = moved(whole, [*given, *[None] * (len(whole.invars) - len(given))])
        return (held, outs), sorted(
            {k for k in found[len(found) - len(jax.tree.leaves(held)) :] if k is not None}
        )

    return run, back, passed


def backward_pass(program: Program, active: Sequence[int]) -> Program:
    """The backward pass of a program as a program, whose own backward pass is one again.

    It takes the program's inputs, its seeds and its random numbers, and then cotangents of the
    outputs that require grad; it gives the gradients of the active inputs.
    """
    program = program.whole()
    run, kinds, jaxpr = (
        differentiated(program, active),
        program.kinds_for(active),
        program.jaxpr.jaxpr,
    )
    first, last = len(jaxpr.invars) - 1 - len(program.numbers), len(jaxpr.invars)

    def gradients(*values: Any) -> list[Any]:
        _, _, pull = run(
            values[:first],
            (values[first], list(values[first + 1 : last])) if program.is_random else None,
        )
        return pull_back(pull, values[last:-1])

    taken = [*jaxpr.invars, *pick(jaxpr.outvars[: len(kinds)], kinds)]
    with rewording(), jax.enable_x64(True), compiling.correctly(), meshes.on_auto_axes():
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in taken]
        closed = jax.make_jaxpr(gradients)(*avals, jax.ShapeDtypeStruct((SEEDS,), np.int64))
    closed = closed.replace(jaxpr=simplified(closed.jaxpr))
    # relu's gradient reads the sign of its input
    read = flow(closed.jaxpr, [1 << i for i in range(len(closed.jaxpr.invars))], True)
    count = len(active)
    return Program(
        closed,
        [],
        Guards(closure_scan.Found()),
        trees.flatten([None] * count)[1],
        [None] * count,
        [torch.device("cpu")] * count,
        count,
        [],
        [],
        False,
        [],
        False,
        [True] * count,
        read,
        read,
        [],
        [],
        [],
        [],
        False,
        False,
        [],
        False,
        (),
    )


def pull_back(pull: Callable[..., Any], cotangents: Sequence[jax.Array]) -> list[jax.Array]:
    """Cotangents of the inputs in torch's convention."""
    (grads,) = pull([conj(c) for c in cotangents])
    return [conj(g) for g in grads]


def taken(
    arrays: Sequence[jax.Array], needed: Sequence[bool], device: torch.device
) -> list[torch.Tensor | None]:
    """The results of ``pull_back`` as tensors; those that are not needed are None; device: where
    they are.
    """
    wanted = pick(arrays, needed)
    if device.type == "cpu":
        for array in wanted:
            array.block_until_ready()
    made = iter(tensors.views(wanted, [tensors.layout(a.shape, a.dtype) for a in wanted], device))
    return [next(made) if need else None for need in needed]
