"""A torch function as one JAX program: it is traced once and compiled by XLA, and its captured tensors are inputs like any other.

This file traces the function, finds the program's other inputs (captured tensors, seeds), and splits the program's results.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, Jaxpr
from torch.overrides import TorchFunctionMode

from bridge import compiling, private
from bridge.boundary import shared_memory
from bridge.boundary.calls import Call
from bridge.boundary.results import Output, conj, inexact, is_array, pick, placed, take_apart
from bridge.convert import dtypes, tensors
from bridge.jit import outer_products
from bridge.jit.simplify import simplified
from bridge.programs import closure_scan
from bridge.programs.guards import Guards
from bridge.trace import random_keys, tracing
from bridge.trace.aliasing import View
from bridge.trace.levels import push, state
from bridge.trace.requires_grad import flow, moved
from bridge.trace.torch_numbers import AtEachCall, Draw, Rewind, by_torch, made
from bridge.trace.value_checks import Bounds, ends

_TRACES = 8  # how often a function is traced to find its captured tensors: those that one trace finds may lead the next to more
_SEEDS = 8  # how many torch generators a program may draw from, including the default one
_ANY_SEEDS = np.zeros(_SEEDS, np.int64)
_PACK_FROM, _PACK_SIZE = 4, 4096  # at least so many outputs of one shape, each of at most this size, are packed into one array


@dataclasses.dataclass(slots=True)
class Program:
    """A staged function.

    Attributes:
        jaxpr: (arguments, captured, seeds, numbers that torch draws) -> outputs, then written values.
        places: where each call looks for the captured tensors.
        guards: the other conditions under which the program is right.
        out_spec, static, is_tensor: the output tree, its leaves that are not tensors, and which of its leaves are tensors.
        written: for each written value, ("argument", index) or ("captured", index).
        generators: the explicit torch generators that the program draws from, by seed slot.
        draws: whether the program draws a seed from the default generator.
        drawn: the draws that torch makes before each run.
        numbers: which of these draws are inputs.
        used: which of the candidates for capture are captured.
        candidates: the number of candidates.
        strided: the arguments and captured tensors that the function passes to ``as_strided``, which counts from where the memory begins.
        types_matter: whether the function may have called ``type``.
        kinds: for each output and written value, whether torch's autograd can go back through it.
        sources: for each output and written value, the inputs of the jaxpr that autograd goes back to, as bits of a number.
        behind: ``sources``, and the inputs that only rules of autograd.Functions use: a second derivative goes back to them.
        shared: the outputs that are views and no outputs of the jaxpr, in order: (index, "argument", "captured" or "output", the index of
            that of which it is a view, the views).
    """

    jaxpr: ClosedJaxpr
    places: list[closure_scan.Place]
    guards: Guards
    out_spec: Any
    static: list[Any]
    is_tensor: list[bool]
    count: int
    written: list[tuple[str, int]]
    generators: list[torch.Generator]
    draws: bool
    used: list[int]
    candidates: int
    strided: list[tuple[str, int]]
    types_matter: bool
    kinds: list[bool]
    sources: list[int]
    behind: list[int]
    shared: list[tuple[int, str, int, tuple[View, ...]]]
    drawn: list[Draw | Rewind]
    numbers: list[int]

    def written_to(self, arguments: Sequence[Any], captured: Sequence[torch.Tensor]) -> list[Any]:
        """The targets of the written values among these arguments and captured tensors."""
        return [arguments[i] if kind == "argument" else captured[i] for kind, i in self.written]

    def outputs(self, computed: list[Any], arguments: Sequence[Any], captured: Sequence[torch.Tensor]) -> list[Any]:
        """All outputs, from those of the jaxpr; call it when the written values have been written."""
        found = list(computed)
        for i, *_ in self.shared:
            found.insert(i, None)
        of: dict[str, Any] = {"argument": arguments, "captured": captured, "output": list(map(Output, range(len(found))))}
        return placed(found, [(i, of[kind][k], views) for i, kind, k, views in self.shared])

    def memory(self) -> tuple[list[Any], list[Any]]:
        """The targets of the written values, and the outputs that share memory, with each captured tensor given by its place."""
        places = [("captured", id(p.container), p.key) for p in self.places]
        return (
            [(kind, i) if kind == "argument" else places[i] for kind, i in self.written],
            [(i, kind, places[k] if kind == "captured" else k, views) for i, kind, k, views in self.shared],
        )

    def reached(self, arguments: Sequence[int], captured: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The given arguments and captured tensors that torch's autograd goes back to."""
        targets = [self._target(kind, i) for kind, i in self.written]
        every = functools.reduce(operator.or_, [*itertools.compress(self.behind, self.kinds), *targets], 0)
        return tuple(i for i in arguments if every & 1 << i), tuple(i for i in captured if every & self._bit(i))

    def direct(self, arguments: Sequence[int], captured: Sequence[int], given: Sequence[bool]) -> list[bool]:
        """For each of these tensors, whether the first derivative of a given output goes back to it, and not only a second one.

        given: for each output, then for each written value, whether it has a cotangent.
        """
        targets = [0] * self.count + [self._target(kind, i) for kind, i in self.written]
        every = 0
        for source, target, kind, wanted in zip(self.sources, targets, self.kinds, given, strict=True):
            every |= (source if kind else 0) | target if wanted else 0
        return [bool(every & 1 << i) for i in arguments] + [bool(every & self._bit(i)) for i in captured]

    def kinds_for(self, arguments: Sequence[int], captured: Sequence[int]) -> list[bool]:
        """``kinds`` if only these arguments and captured tensors require grad; a written tensor that requires grad keeps a history."""
        wanted = sum(1 << i for i in arguments) | sum(self._bit(i) for i in captured)
        targets = [0] * self.count + [self._target(kind, i) for kind, i in self.written]
        return [k and bool((s | t) & wanted) for k, s, t in zip(self.kinds, self.sources, targets, strict=True)]

    def _target(self, kind: str, i: int) -> int:
        return 1 << i if kind == "argument" else self._bit(i)

    def _bit(self, captured: int) -> int:
        return 1 << len(self.jaxpr.jaxpr.invars) - len(self.numbers) - 1 - self.candidates + self.used[captured]

    def checked(self) -> tuple[Program, Bounds | None]:
        """The program with its checked operands as its last outputs, and the Bounds that judge their ``ends``; None if it checks none."""
        jaxpr, bounds = Bounds.of(self.jaxpr)
        return dataclasses.replace(self, jaxpr=jaxpr), bounds

    def run(self, arguments: Sequence[Any], captured: Sequence[Any], random: Any) -> list[Any]:
        """Evaluate the program on JAX values: outputs, then written values.  random: what ``random`` or ``any_random`` gives."""
        every: list[Any] = [None] * (len(self.jaxpr.jaxpr.invars) - len(self.numbers))
        every[: len(arguments)] = arguments
        for position, value in zip(self.used, captured, strict=True):
            every[len(arguments) + position] = value
        every[-1], numbers = (_ANY_SEEDS, []) if random is None else random
        return jax.core.eval_jaxpr(self.jaxpr.jaxpr, self.jaxpr.consts, *every, *numbers)

    @property
    def is_random(self) -> bool:
        return bool(self.draws or self.generators or self.drawn)

    def random(self) -> tuple[np.ndarray, list[jax.Array]] | None:
        """Fresh seeds and numbers for one call, drawn only from the generators that the program uses; None if it uses none."""
        if not self.is_random:
            return None
        drawn = made(self.drawn)
        seeds = np.zeros(_SEEDS, np.int64)
        if self.draws:
            seeds[0] = random_keys.seed_from(None)
        for i, g in enumerate(self.generators, 1):
            seeds[i] = random_keys.seed_from(g)
        return seeds, [tensors.to_jax(drawn[k]) for k in self.numbers]

    def any_random(self) -> Any:
        """What ``random`` gives, with zeros for the seeds and for the numbers."""
        invars = self.jaxpr.jaxpr.invars
        numbers = [np.zeros(v.aval.shape, v.aval.dtype) for v in invars[len(invars) - len(self.numbers) :]]
        return (_ANY_SEEDS, numbers) if self.is_random else None


@contextlib.contextmanager
def _jitting() -> Iterator[None]:
    """While entered, ``torch.compiler.is_compiling()`` is true in this thread's traces."""
    before, state.jitting = state.jitting, True
    try:
        yield
    finally:
        state.jitting = before


@_jitting()
def stage(fn: Callable[..., Any], call: Call, donated: Sequence[int] = ()) -> Program:
    """Trace fn once on the shapes of a call's arguments; donated: those whose memory no output may share.

    Raises:
        DataDependentError: the function asks for values.
    """
    roots = [fn, *(x for x in call.leaves if not is_array(x)), *private.functions_of_global_hooks()]
    arguments = {id(x) for x in call.arrays}

    def those_of(found: closure_scan.Found) -> list[tuple[torch.Tensor, closure_scan.Place]]:
        return [(t, place) for key, (t, place) in found.tensors.items() if key not in arguments and tensors.crosses(t)]

    found = closure_scan.scan(*roots)
    candidates = those_of(found)
    program, missing = trace(fn, call, candidates, found, donated=donated)
    if missing:
        found = closure_scan.scan(*roots, deeper=True)
        candidates = those_of(found)
    for _ in range(_TRACES):
        if not missing:
            return program
        # the scan cannot find these tensors: they become inputs too, and the program itself holds them
        known = {id(t) for t, _ in candidates}
        candidates = candidates + [(t, closure_scan.Place(t, None)) for t in missing if id(t) not in known]
        program, missing = trace(fn, call, candidates, found, donated=donated)
    shapes = ", ".join(f"{list(t.shape)} of {t.dtype}" for t in missing[:4])
    raise RuntimeError(
        f"jit: the function uses tensors from outside that are others each time it is traced (shapes {shapes}), so that none can become an "
        "input of the program; pass them as arguments, or keep them"
    )


def aval(x: torch.Tensor | jax.Array) -> jax.ShapeDtypeStruct:
    if isinstance(x, torch.Tensor):
        return jax.ShapeDtypeStruct(tuple(x.shape), dtypes.to_jax(x.dtype))
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def trace(
    fn: Callable[..., Any], call: Call, candidates: list[tuple[torch.Tensor, closure_scan.Place]], found: closure_scan.Found,
    watch: random_keys.Watch | random_keys.Unwatched | None = None, donated: Sequence[int] = (),
) -> tuple[Program, list[torch.Tensor]]:
    traceable = call.traceable(fn)
    traceable.as_given(call.arrays)
    info: dict[str, Any] = {}
    position = {id(t): i for i, (t, _) in enumerate(candidates)}
    watch = watch or random_keys.Watch(found.generators)

    def staged(arguments: list[Any], captured: list[Any], seeds: Any) -> list[Any]:
        with tracing.root() as root:
            root.staged = root.recorded = True
            root.overrides = {id(t): v for (t, _), v in zip(candidates, captured, strict=True)}
            generators: list[torch.Generator] = []
            advanced: set[int] = set()

            def key_of(generator: torch.Generator | None) -> Any:
                slot = 0
                if generator is None:
                    info["draws"] = True
                else:
                    which = private.which_generator(generator)
                    if not any(which == private.which_generator(g) for g in generators):
                        generators.append(generator)
                    slot = 1 + next(i for i, g in enumerate(generators) if private.which_generator(g) == which)
                    if slot >= _SEEDS:
                        raise RuntimeError(f"generator: a compiled function can draw from at most {_SEEDS - 1} generators of its own")
                if slot not in advanced:
                    watch.draw(generator)
                    advanced.add(slot)
                return jax.random.key(seeds[slot])  # not kept: it may belong to an inner trace of JAX's, as that of jet

            root.seeds = key_of
            if by_torch() and not any(isinstance(x, jax.Array) for x in call.arrays):
                info["drawn"] = root.drawn = AtEachCall(seeds, watch.draw)
            with watch.watching(), push("plain") as level, _ValuesFromOutside():
                result = traceable.run(level, arguments, take_apart)
            met = root.captured
            values = result.values[: len(result.values) - len(result.written)]
            shared: list[Any] = []
            if all(isinstance(x, torch.Tensor) for x in call.arrays):
                for i, t, views in shared_memory.outputs(result, call.arrays, met.values()):
                    source = result.shared[i][0]
                    if isinstance(source, Output):
                        shared.append((i, "output", source.index, views))
                    elif source not in donated:
                        shared.append((i, *(("argument", source) if isinstance(source, int) else ("captured", id(t))), views))
            elsewhere = {i for i, *_ in shared}
            values = [v for i, v in enumerate(values) if i not in elsewhere]
            written: list[tuple[str, int]] = []
            extra: list[Any] = []
            detached: list[bool] = []
            nodes = {id(node): key for key, (_, node) in met.items()}
            for target, index, alone in result.written:
                if isinstance(target, int):
                    written.append(("argument", target))
                elif id(target) in nodes:
                    written.append(("captured", position.get(nodes[id(target)], -1)))
                else:
                    continue
                extra.append(result.values[index])
                detached.append(alone)
            kinds = [inexact(v) for v in values] + [inexact(v) and not d for v, d in zip(extra, detached, strict=True)]
            info.update(
                meta=result.meta, count=len(values), written=written, shared=shared, kinds=kinds, generators=generators,
                asked={key for key, (_, node) in met.items() if node.geometry is not None and node.geometry.asked},
                used=[position[key] for key in met if key in position], missing=[t for key, (t, _) in met.items() if key not in position],
            )
            return values + extra

    with jax.enable_x64(True), compiling.correctly():
        avals = [aval(x) for x in call.arrays]
        jaxpr = jax.make_jaxpr(staged)(avals, [aval(t) for t, _ in candidates], jax.ShapeDtypeStruct((_SEEDS,), np.int64))
    drawn = info.get("drawn")
    whole, numbers = (jaxpr.jaxpr, []) if drawn is None else drawn.as_inputs(jaxpr.jaxpr)
    jaxpr = jaxpr.replace(jaxpr=simplified(whole))
    used = sorted(info["used"])
    order = {p: i for i, p in enumerate(used)}
    spec, static, is_tensor = info["meta"]
    strided = [("argument", k) for k, g in enumerate(traceable.geometries) if g.asked]
    strided += [("captured", i) for i, p in enumerate(used) if id(candidates[p][0]) in info["asked"]]
    program = Program(
        jaxpr, [candidates[p][1] for p in used], Guards(found), spec, static, is_tensor, info["count"],
        [(k, order.get(i, -1) if k == "captured" else i) for k, i in info["written"]], info["generators"], info.get("draws", False), used,
        len(candidates), strided, found.names("type"), info["kinds"], _sources(jaxpr.jaxpr),
        _sources(jaxpr.jaxpr, behind=True),
        [(i, kind, order.get(position.get(k), -1) if kind == "captured" else k, views) for i, kind, k, views in info["shared"]],
        [] if drawn is None else drawn.draws, numbers,
    )
    return program, info["missing"]


class _ValuesFromOutside(TorchFunctionMode):
    """Refuses functions that read a tensor from outside without an operator, because the program would keep its values for ever."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_PYTHON and type(args[0]) is not tracing.Traced:
            raise tracing.unknown_value(f"{func.__name__}()")
        return func(*args, **(kwargs or {}))


_TO_PYTHON = frozenset([torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__])


def _sources(jaxpr: Jaxpr, behind: bool = False) -> list[int]:
    """For each output, the inputs that it depends on, as bits; ``operands.constant`` stops a dependence (no_grad, detach).

    A derivative that is always zero does not stop it: PyTorch's sign(x) requires grad if x does.  behind: include the inputs that only
    the rules of an autograd.Function use.
    """
    return flow(jaxpr, [1 << i for i in range(len(jaxpr.invars))], behind)


# -- outputs: small ones are packed together --------------------------------------------------------------------------------------
@dataclasses.dataclass(slots=True)
class Packing:
    """The results that are stacked into one array before their conversion to torch, and those that are not."""

    singles: list[int]
    groups: list[list[int]]

    @classmethod
    def of(cls, avals: Sequence[Any]) -> Packing:
        by_shape: dict[Any, list[int]] = {}
        for i, a in enumerate(avals):
            if 0 < a.size <= _PACK_SIZE:
                by_shape.setdefault((a.shape, a.dtype), []).append(i)
        groups = [g for g in by_shape.values() if len(g) >= _PACK_FROM]
        grouped = {i for g in groups for i in g}
        return cls([i for i in range(len(avals)) if i not in grouped], groups)

    def pack(self, values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in self.singles] + [jnp.stack([values[i] for i in g]) for g in self.groups]

    def unpack(self, arrays: Sequence[Any], device: torch.device | None, count: int) -> list[torch.Tensor]:
        """The results as separate tensors; the caller waits for the arrays."""
        out: list[Any] = [None] * count
        for i, a in zip(self.singles, arrays, strict=False):
            out[i] = tensors.to_torch(a, device, wait=False)
        for g, a in zip(self.groups, arrays[len(self.singles) :], strict=True):
            for i, t in zip(g, tensors.to_torch(a, device, wait=False).unbind(0), strict=True):
                out[i] = t
        return out


def forward(program: Program, packing: Packing | None) -> Callable[..., list[Any]]:
    """The program as a function to be jitted; an output that is an input is copied, so that no result shares an input's memory.

    The ``ends`` of the checked operands come last.
    """
    program = dataclasses.replace(program, jaxpr=program.jaxpr.replace(jaxpr=outer_products.in_order(program.jaxpr.jaxpr)))
    count = len(program.sources)
    inputs = set(map(id, program.jaxpr.jaxpr.invars))
    outvars = program.jaxpr.jaxpr.outvars
    seen: set[int] = set()
    copy = []
    for v in outvars[:count]:
        copy.append(id(v) in inputs or id(v) in seen)
        seen.add(id(v))

    def run(arguments: Sequence[Any], captured: Sequence[Any], random: Any) -> list[Any]:
        values = program.run(arguments, captured, random)
        results = [jnp.copy(v) if c else v for v, c in zip(values[:count], copy, strict=True)]
        return (results if packing is None else packing.pack(results)) + ends(values[count:])

    return run


def differentiated(program: Program, active: Sequence[int], active_captured: Sequence[int]) -> Callable[..., Any]:
    """(outputs, others, pullback) of a program with respect to some of its arguments and captured tensors, to be jitted.

    The ``ends`` of the checked operands come last among the others.
    """
    count = len(program.sources)
    kinds = program.kinds_for(active, active_captured)

    def run(arguments: Sequence[Any], captured: Sequence[Any], random: Any) -> Any:
        def pure(diff: list[Any]) -> tuple[list[Any], list[Any]]:
            args, caps = list(arguments), list(captured)
            for i, v in zip(active, diff, strict=False):
                args[i] = v
            for i, v in zip(active_captured, diff[len(active) :], strict=True):
                caps[i] = v
            values = program.run(args, caps, random)
            return pick(values[:count], kinds), pick(values[:count], [not k for k in kinds]) + ends(values[count:])

        outs, pull, rest = jax.vjp(pure, [arguments[i] for i in active] + [captured[i] for i in active_captured], has_aux=True)
        return outs, rest, pull

    return run


def in_two(
    program: Program, active: Sequence[int], active_captured: Sequence[int]
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[jax.stages.Traced], tuple[tuple[Any, Any], list[int]]]]:
    """``differentiated`` and ``pull_back`` as two functions that exchange only the arrays that the pullback holds.

    The third result takes the first one's trace; it gives the shapes and dtypes that the second one takes, and says which of
    (*arguments, *captured) the pullback holds, perhaps in another shape.
    """
    both = differentiated(program, active, active_captured)
    tree: list[Any] = []

    def run(arguments: Sequence[Any], captured: Sequence[Any], random: Any) -> Any:
        outs, rest, pull = both(arguments, captured, random)
        held, tree[:] = (found := jax.tree_util.tree_flatten(pull))[0], [found[1]]
        return outs, rest, held

    def back(held: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        return pull_back(jax.tree_util.tree_unflatten(tree[0], held), cotangents)

    def passed(traced: jax.stages.Traced) -> tuple[tuple[Any, Any], list[int]]:
        outs, _, held = traced.out_info
        jaxpr = traced.jaxpr.jaxpr
        given = range(len(jaxpr.invars) - 1 - len(program.numbers) if program.is_random else len(jaxpr.invars))
        found = moved(jaxpr, [*given, *[None] * (len(jaxpr.invars) - len(given))])
        return (held, outs), sorted({k for k in found[len(found) - tree[0].num_leaves :] if k is not None})

    return run, back, passed


def pull_back(pull: Callable[..., Any], cotangents: Sequence[jax.Array]) -> list[jax.Array]:
    """Cotangents of the inputs in torch's convention, to be jitted."""
    (grads,) = pull([conj(c) for c in cotangents])
    return [conj(g) for g in grads]
