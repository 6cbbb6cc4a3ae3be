"""Random numbers that torch draws, so that a seed gives what torch.func gives.

A draw is an operator of torch's on tensors whose values do not matter, inside the vmaps around it.
torch.func's own vmap carries it out, at once or at each call of a program: its rules say what each
lane gets, what is refused, and in which state the generator is afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import batching, mlir, partial_eval

from bridge import compiling, private, private_jax
from bridge.convert import dtypes, tensors
from bridge.convert.strides import contiguous, span
from bridge.lowering.registry import overload
from bridge.process import having, process
from bridge.trace import folding, python_numbers
from bridge.trace.levels import Level, around, innermost, refuse_in_loop, state, vmaps_of_draws
from bridge.trace.storage import Node
from bridge.trace.tracing import Traced
from bridge.transform_kinds import NUMBERED

ERROR = (
    "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
    "'different' randomness flags on vmap or perform the randomness operation out of vmap"
)
UNMAPPED_RANDOMNESS = (
    "vmap: Cannot ask for different inplace randomness on an unbatched tensor. This will appear "
    "like same randomness. If this is necessary for your usage, please file an issue with "
    "functorch."
)


_CPU, _META = torch.device("cpu"), torch.device("meta")


def _states() -> list[torch.Tensor]:
    """The states of torch's default generators: the CPU's, and those of the CUDA devices if they
    are in use.
    """
    return [
        torch.get_rng_state(),
        *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []),
    ]


def _set_states(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def by_torch(source: str | None = None) -> bool:
    """Whether torch draws the random numbers of a call with torch tensors that begins now; source:
    the call's own choice, if it has one.
    """
    sent = process.default_device
    return (source or state.random_numbers or process.random_numbers) == "torch" and (
        sent is None or sent.platform == "cpu"
    )


@contextlib.contextmanager
def random_numbers(source: str | None) -> Iterator[None]:
    """Choose the source of random numbers for a ``with`` block in this thread.

    Args:
        source: "torch": torch draws them, so that a seed gives torch.func's numbers; "jax": JAX
            does, from a key that is drawn from torch's generator, inside of a compiled program;
            None: no change.

    Raises:
        ValueError: another source.

    Example:
        >>> import torch
        >>> from torchfunc_jax import random_numbers, vmap
        >>> with random_numbers("jax"):
        ...     vmap(torch.rand_like, randomness="different")(torch.zeros(3)).shape
        torch.Size([3])
    """
    checked(source)
    with having(state, random_numbers=source or state.random_numbers):
        yield


def checked(source: str | None) -> None:
    """Raise ValueError if it is no source of random numbers."""
    if source not in (None, "torch", "jax"):
        raise ValueError(f'random_numbers: expected "torch" or "jax", got {source!r}')


@dataclasses.dataclass(frozen=True, slots=True)
class Blank:
    """An operand of a draw.

    Attributes:
        mapped: which of the draw's vmaps map it; the outermost is 0.
        fill: the value of each element, if it matters.
        between: the strides of the mapped dimensions; None: each holds the next ones whole.
        places: where each vmap finds its dimension, among those that it gets; without any, in
            front.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    mapped: tuple[int, ...]
    fill: float | None = None
    between: tuple[int, ...] | None = None
    places: tuple[int, ...] = ()

    def made(self, sizes: Sequence[int], device: torch.device | str) -> torch.Tensor:
        """A tensor of this shape, with a dimension in front for each vmap that maps it."""
        sized, between = [sizes[k] for k in self.mapped], self.between
        if between is None:
            reach = span(self.shape, self.strides)
            between = tuple([reach * math.prod(sized[k:]) for k in range(1, len(sized) + 1)])
        t = torch.empty_strided(
            [*sized, *self.shape], [*between, *self.strides], dtype=self.dtype, device=device
        )
        return t if self.fill is None else t.fill_(self.fill)


def _in_vmaps(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: Sequence[int],
    device: torch.device | str,
) -> Callable[[Sequence[int]], Any]:
    """Calls an operator inside torch's vmaps of these sizes, whose levels it takes, with a tensor
    in the place of each Blank.
    """
    made = {id(x): x.made(sizes, device) for x in _all_of(Blank, [*args, *kwargs.values()])}

    def lane(x: Any, levels: Sequence[int]) -> Any:
        if type(x) is Blank:
            return private.lane_of_torch(made[id(x)], [levels[k] for k in x.mapped], x.places)
        return [lane(v, levels) for v in x] if type(x) is list else x

    return lambda levels: func(
        *[lane(x, levels) for x in args], **{name: lane(x, levels) for name, x in kwargs.items()}
    )


def _all_of(kind: type, x: Any) -> list[Any]:
    """The objects of a class among arguments, which may be lists."""
    return (
        [found for v in x for found in _all_of(kind, v)]
        if type(x) in (list, tuple)
        else [x]
        if isinstance(x, kind)
        else []
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """One use of a random operator.

    Attributes:
        name: the operator's.
        args, kwargs: its arguments, with a Blank in the place of each tensor, and without the
            generator.
        vmaps: the size and the randomness of each vmap around it, the outermost first.
        generator: None for torch's default one of the device.
        device: where torch draws.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    vmaps: tuple[tuple[int, str], ...]
    generator: torch.Generator | None
    device: torch.device = _CPU

    def made(self) -> tuple[torch.Tensor, tuple[bool, ...]]:
        """The numbers, and for each vmap whether its lanes have numbers of their own: these have a
        dimension in front, as in Blank.
        """
        func, kwargs = overload(self.name), dict(self.kwargs)
        if any(a.name == "generator" for a in func._schema.arguments):
            kwargs["generator"] = self.generator
        if "device" in kwargs:
            kwargs["device"] = self.device
        run = _in_vmaps(func, self.args, kwargs, [size for size, _ in self.vmaps], self.device)

        def numbers(levels: Sequence[int]) -> torch.Tensor:
            found = run(levels)
            return found[-1] if type(found) is tuple else found  # dropout's mask

        with private.plain_torch():
            return private.vmapped_by_torch(numbers, self.vmaps)

    def tried(self) -> tuple[torch.Tensor, tuple[bool, ...]]:
        """What ``made`` gives, for its shapes and its errors: no generator advances, from which
        another thread may draw meanwhile.
        """
        try:
            return dataclasses.replace(self, device=_META, generator=None).made()
        except NotImplementedError:  # binomial, and Dirichlet's numbers
            return dataclasses.replace(self, generator=torch.Generator(self.device)).made()


@dataclasses.dataclass(frozen=True, slots=True)
class Rewind:
    """torch's default generator gets the state back that it had before an earlier draw, given by
    its place among the draws.
    """

    before: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class ByValue:
    """One use of a random operator whose numbers depend on the values of its operands, which a
    program computes.

    Attributes:
        name: the operator's.
        args: its arguments after the operands.
        generator: None for torch's default one.
        needs: on which of the program's inputs its operands depend; these may be numbers of earlier
            draws.
        operands: computes the operands from these inputs.
    """

    name: str
    args: tuple[Any, ...]
    generator: torch.Generator | None
    needs: list[int] = dataclasses.field(default_factory=list, compare=False)
    operands: Callable[..., list[jax.Array]] = dataclasses.field(
        default=lambda *_: [], compare=False
    )

    def made(self, operands: Sequence[jax.Array]) -> torch.Tensor:
        """The numbers for these operands."""
        with private.plain_torch():
            given = [tensors.to_torch(x) for x in operands]
            if self.name != "aten.rrelu":
                return overload(self.name)(*given, *self.args, self.generator)
            noise = torch.empty_like(given[0])  # what it multiplies by
            overload("aten.rrelu_with_noise")(given[0], noise, *self.args, self.generator)
            return noise

    def computed_by(self, jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any]) -> None:
        """Note how the operands, variables of a program, are computed from the program's inputs."""
        names = jaxpr.debug_info.with_unknown_names()
        whole = jaxpr.replace(outvars=[*operands], debug_info=names)
        part, used = partial_eval.dce_jaxpr(whole, [True] * len(operands))
        self.needs = [k for k, u in enumerate(used) if u]
        self.operands = jax.jit(
            lambda *given: jax.core.eval_jaxpr(part, consts, *given),
            compiler_options=compiling.options(),
        )


def made(
    draws: Sequence[Draw | ByValue | Rewind], inputs: Sequence[Any], numbers: Sequence[int]
) -> list[torch.Tensor | None]:
    """Make the draws of a program in order; None for a Rewind.

    Args:
        draws: the program's.
        inputs: the inputs of the program before the numbers.
        numbers: which of the draws give the numbers.
    """
    states = {draw.before: list[torch.Tensor]() for draw in draws if isinstance(draw, Rewind)}
    found: list[torch.Tensor | None] = []
    for k, draw in enumerate(draws):
        if k in states:
            states[k] = _states()
        if isinstance(draw, Rewind):
            _set_states(states[draw.before])
            found.append(None)
        elif isinstance(draw, Draw):
            found.append(draw.made()[0])
        else:
            with jax.enable_x64(True), compiling.correctly():
                given = [
                    inputs[i]
                    if i < len(inputs)
                    else tensors.to_jax(found[numbers[i - len(inputs)]])
                    for i in draw.needs
                ]
                found.append(draw.made(draw.operands(*given)))
    return found


class AtEachCall:
    """The draws of a program: they are made before it runs, in the order of the program, and are
    inputs of it.

    Args:
        seeds: an input of the program, in the trace of the whole program.
        meets: called with a generator before each draw from it.

    Attributes:
        at: how many draws the function has asked for; if it is set back, the same numbers come
            again.
    """

    def __init__(self, seeds: jax.Array, meets: Callable[[torch.Generator | None], None]) -> None:
        self.seeds, self.trace, self.meets = seeds, private_jax.trace_of(seeds), meets
        self.draws: list[Draw | ByValue | Rewind] = []
        self.at = 0
        #: by a draw's place: its operator, and what it gives, because JAX forgets what computes a
        #: value that nothing uses
        self.given: dict[int, tuple[str, Any]] = {}

    def place(self, draw: Draw | ByValue) -> int:
        """The place of this draw, which is the next one of the program."""
        self.meets(draw.generator)
        self.draws.append(draw)
        return len(self.draws) - 1

    def next(self, draw: Draw | ByValue, make: Callable[[], Any]) -> Any:
        """What the next draw gives, or has given before if it is asked for again; None: JAX is to
        draw.
        """
        name, found = self.given.get(self.at, ("", None))
        # the operands may look different, because inside of a trace of JAX's less is known of lanes
        if name != draw.name:
            found = make()
            if found is None:
                return None
            self.given[self.at] = draw.name, found
        self.at += 1
        return found

    def __call__(self, draw: Draw) -> tuple[jax.Array, tuple[bool, ...]]:
        def tried() -> tuple[jax.Array, tuple[bool, ...]]:
            place = self.place(draw)
            numbers, mapped = draw.tried()
            params = {
                "draw": place,
                "shape": tuple(numbers.shape),
                "dtype": dtypes.to_jax(numbers.dtype),
            }
            return private_jax.bound_outside([self.seeds], _draw_p, params), mapped

        return self.next(draw, tried)

    def mark(self) -> int:
        """A point of the program, for ``rewind``."""
        return len(self.draws)

    def rewind(self, mark: int) -> None:
        """Let torch's default generator draw the same numbers again as from that point on."""
        self.draws.append(Rewind(mark))

    def as_inputs(self, jaxpr: Jaxpr) -> tuple[Jaxpr, list[int], list[tuple[ByValue, list[Any]]]]:
        """The program with its draws as its last inputs, which of the draws these are, and those
        that depend on values with their operands.

        The program does not use the other draws.
        """
        self.given.clear()
        found = [eqn for eqn in jaxpr.eqns if eqn.primitive in (_draw_p, _by_value_p)]
        by_value = [(eqn.params["of"], eqn.invars) for eqn in found if eqn.primitive is _by_value_p]
        return (
            jaxpr.replace(
                eqns=[eqn for eqn in jaxpr.eqns if eqn.primitive not in (_draw_p, _by_value_p)],
                invars=[*jaxpr.invars, *[eqn.outvars[0] for eqn in found]],
                debug_info=jaxpr.debug_info.with_unknown_names(),
            ),
            [eqn.params["draw"] for eqn in found],
            by_value,
        )


_draw_p = Primitive("drawn_by_torch")  # the numbers of a draw, in a program that is being traced
_draw_p.def_abstract_eval(lambda _, draw, shape, dtype: jax.core.ShapedArray(shape, dtype))


def numbers(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> jax.Array | None:
    """The numbers that torch draws for the lanes of the vmaps in progress; None if JAX is to draw.

    Args:
        name: the operator that draws; it may be an in-place operator.
        args, kwargs: its arguments; of tensors, only the geometry matters.
        device: of its result.
    """
    if drawing() is None:
        return None
    vmaps = _vmaps()
    blanks = [
        _blank(x, vmaps) if isinstance(x, torch.Tensor) else tuple(x) if type(x) is list else x
        for x in args
    ]
    # it is dropout's own
    if type(args[0]) is Traced and str(args[0].node.maker) in _EMPTY and not state.filling:
        name, blanks = _in_dropout(name, blanks)
    return _drawn(
        vmaps,
        name,
        blanks,
        tuple([(k, v) for k, v in kwargs.items() if k != "generator"]),
        kwargs.get("generator"),
        device,
    )


_EMPTY = frozenset(["aten.empty_like.default", "aten.new_empty.default"])


def refuse_unmapped(t: torch.Tensor) -> None:
    """Raise the error with which torch's vmap refuses to fill a tensor that it does not map with
    numbers that differ from lane to lane.
    """
    if drawing() is not None:
        _filled_lanes(_vmaps(), _blank(t, _vmaps()))


def drawing() -> Any:
    """What makes or notes torch's draws here; None if JAX is to draw."""
    return (
        None
        if state.level is None or any(each.keyed for each in around())
        else state.level.root.drawn
    )


def _in_dropout(name: str, args: list[Any]) -> tuple[str, list[Any]]:
    """A draw of dropout's, as torch.func makes it, which replaces dropout in its transforms."""
    if name != "aten.bernoulli_.float" or innermost(NUMBERED) is None:
        return name, args
    blank = args[0]
    return "aten.bernoulli.p", [
        Blank(blank.shape, (0,) * len(blank.shape), blank.dtype, ()),
        *(args[1:] or [0.5]),
    ]


def of_arrays(
    name: str,
    args: Sequence[Any],
    fill: float | None,
    rules: tuple[str, Sequence[Any]] | None,
    generator: torch.Generator | None,
    order: Callable[[torch.Tensor], torch.Tensor] | None,
) -> jax.Array | None:
    """Implements ``bridge.lowering.common.provided.torch_random``."""
    if drawing() is None:
        return None
    vmaps = _vmaps()
    if rules is not None and vmaps:
        _refuse(vmaps, *rules, generator)
    blanks = _blanks(args, vmaps, fill)
    if order is not None:
        blanks[0] = _in_order(name, blanks[0], order, vmaps)
    else:
        name, blanks = _in_dropout(name, blanks)
    return _drawn(vmaps, name, blanks, (), generator, state.level.root.device or _CPU)


def by_value(
    name: str, operands: Sequence[jax.Array], args: Sequence[Any], generator: torch.Generator | None
) -> jax.Array | None:
    """Implements ``bridge.lowering.common.provided.torch_random_by_value``."""
    drawn = drawing()
    if type(drawn) is not AtEachCall:
        return None
    if private_jax.folds_constants():
        raise folding.NotConstant
    vmaps, draw = _vmaps(), ByValue(name, tuple(args), generator)

    def bound() -> jax.Array | None:
        if not private_jax.only_transforms_inside(drawn.trace):  # a loop's values are not known
            return None
        # torch's vmap has no rule for it: that of another operator on one tensor stands in
        if vmaps and name == "aten.rrelu":
            _refuse(vmaps, "aten.poisson", operands, generator)
        elif vmaps:
            _refuse(vmaps, name, [*operands, *args], generator)
        lanes = [each.lane for each in vmaps if each.randomness == "different"]
        params = {"of": draw, "lanes": len(lanes), "draw": drawn.place(draw)}
        return _by_value_p.bind(*map(lax.stop_gradient, operands), *lanes, **params)

    return drawn.next(draw, bound)


def _vmaps() -> list[Level]:
    refuse_in_loop("a random number")
    return vmaps_of_draws()


def _blanks(args: Sequence[Any], vmaps: Sequence[Level], fill: float | None) -> list[Any]:
    """The arguments with a Blank in the place of each array."""

    def blank(x: jax.Array) -> Blank:
        found = private_jax.mapping(x)
        mapped = [
            k
            for k, each in enumerate(vmaps)
            if each.randomness == "different" or each.probe in found
        ]
        return Blank(x.shape, contiguous(x.shape), dtypes.to_torch(x.dtype), tuple(mapped), fill)

    return [blank(x) if isinstance(x, jax.Array) else x for x in args]


def _in_order(
    name: str, blank: Blank, order: Callable[[torch.Tensor], torch.Tensor], vmaps: Sequence[Level]
) -> Blank:
    """The blank in the memory order that follows from that of the first operand of the operator in
    progress.
    """
    sizes, operand = [each.size for each in vmaps], _blank(state.first, vmaps)
    if not _writes(name):
        blank = dataclasses.replace(blank, mapped=operand.mapped)
    steps = dict(zip(operand.mapped, operand.made(sizes, "meta").stride(), strict=False))
    between = tuple([steps.get(k, 0) for k in blank.mapped])
    lying = order(
        dataclasses.replace(blank, strides=operand.strides, between=between).made(sizes, "meta")
    ).stride()
    return dataclasses.replace(blank, strides=lying[len(between) :], between=lying[: len(between)])


def _refuse(
    vmaps: Sequence[Level], name: str, args: Sequence[Any], generator: torch.Generator | None
) -> None:
    """Raise the error with which torch's vmap refuses an operator."""
    device = state.level.root.device or _CPU
    _draw(vmaps, name, _blanks(args, vmaps, 1), (), generator, device).tried()


def _draw(
    vmaps: Sequence[Level],
    name: str,
    args: Sequence[Any],
    kwargs: tuple[tuple[str, Any], ...],
    generator: torch.Generator | None,
    device: torch.device,
) -> Draw:
    # a number that a draw needs is static
    args = [x.node.asked() if python_numbers.is_input(x) else x for x in args]
    return Draw(
        name,
        tuple(args),
        kwargs,
        tuple([(each.size, str(each.randomness)) for each in vmaps]),
        generator,
        device,
    )


def _drawn(
    vmaps: Sequence[Level],
    name: str,
    args: Sequence[Any],
    kwargs: tuple[tuple[str, Any], ...],
    generator: torch.Generator | None,
    device: torch.device,
) -> jax.Array:
    if _writes(name) and vmaps:
        args, vmaps = _in_place(vmaps, args)
        value, _ = state.level.root.drawn(_draw((), name, args, kwargs, generator, device))
        mapped = (True,) * len(vmaps)
    else:
        value, mapped = state.level.root.drawn(_draw(vmaps, name, args, kwargs, generator, device))
    for each, own in zip(vmaps, mapped, strict=True):
        if own:
            value = _at_lane_p.bind(value, each.lane)
    return value


def _writes(name: str) -> bool:
    """Whether an operator, by its name, writes its numbers into its first argument."""
    return name.split(".")[1].endswith("_")


def _in_place(vmaps: Sequence[Level], args: Sequence[Any]) -> tuple[list[Any], list[Level]]:
    """The arguments of an in-place operator that fills the tensors of all lanes, and the vmaps
    whose lanes get numbers of their own.
    """
    blank, *others = args
    own = _filled_lanes(vmaps, blank)
    if own != [*blank.mapped]:  # torch draws for one lane and copies
        blank = dataclasses.replace(
            blank, strides=contiguous(blank.shape), mapped=tuple(own), between=None
        )
    whole = blank.made([each.size for each in vmaps], "meta")
    return [Blank(tuple(whole.shape), whole.stride(), whole.dtype, ()), *others], [
        vmaps[k] for k in own
    ]


def _filled_lanes(vmaps: Sequence[Level], blank: Blank) -> list[int]:
    """The vmaps whose lanes get numbers of their own where an operator fills a tensor."""
    if any(each.randomness == "error" for each in vmaps):
        raise RuntimeError(ERROR)
    own = [k for k, each in enumerate(vmaps) if each.randomness == "different"]
    if not set(own) <= set(blank.mapped):
        raise RuntimeError(
            f"{UNMAPPED_RANDOMNESS} Make the tensor from a mapped one (torch.empty_like), or enter "
            'torchfunc_jax.random_numbers("jax"), which permits it.'
        )
    return own


def _blank(t: torch.Tensor, vmaps: Sequence[Level]) -> Blank:
    if type(t) is not Traced:
        return Blank(tuple(t.shape), t.stride(), t.dtype, ())
    found, geometry = _mapped(t.node.root), t.node.root.geometry
    # all of them, if that is not known
    mapped = tuple([k for k, each in enumerate(vmaps) if found is None or each.probe in found])
    if geometry is None or len(geometry.between) != len(mapped):
        return Blank(tuple(t.shape), t.stride(), t.dtype, mapped)
    # a view has other dimensions
    places = geometry.places if any(geometry.places) and t.node is t.node.root else ()
    return Blank(tuple(t.shape), t.stride(), t.dtype, mapped, None, geometry.between, places)


def laid_out(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> tuple[Any, Iterator[Any] | None]:
    """How PyTorch's own vmap lays out in memory what an operator computes; out: the values that it
    has computed.

    The traces of the vmaps that map its results, None if they are not known; and, if an operand's
    lanes do not lie one behind another, for each result its strides, those from lane to lane, and
    the places of the mapped dimensions.
    """
    if state.level.root.drawn is None:
        return None, None
    roots = [t.node.root for t in _all_of(Traced, args)]
    lanes = [_mapped(root) for root in roots]
    found = None if None in lanes else frozenset().union(*lanes)
    lying = [root.geometry for root in roots if root.geometry is not None]
    # the order of the dimensions counts
    fixed = kwargs.get("memory_format") is torch.contiguous_format
    if all(each.lanes_outermost() and not (fixed and any(each.places)) for each in lying):
        return found, None
    vmaps = vmaps_of_draws()

    def blank(x: Any) -> Any:
        if type(x) in (list, tuple):
            return [*map(blank, x)]
        return (
            _blank(x, vmaps)
            if isinstance(x, torch.Tensor)
            else x.node.kind(1)
            if python_numbers.is_input(x)
            else x
        )

    sizes, named = [each.size for each in vmaps], {name: blank(x) for name, x in kwargs.items()}
    try:
        made = private.lanes_by_torch(_in_vmaps(func, blank(args), named, sizes, "meta"), sizes)
    except Exception:  # the operator has no kernel for the device meta
        return found, None
    ranks = [
        x.ndim for x in jax.tree_util.tree_leaves(out) if isinstance(x, jax.Array | np.ndarray)
    ]
    # a rule of PyTorch's vmap gives a wrong shape, as for argmax(keepdim=True)
    if [len(strides) for strides, _ in made] != ranks:
        return found, None
    return found, iter(
        [
            (strides, *[tuple([each[k] for each in between]) for k in (1, 2)])
            for strides, between in made
        ]
    )


def _mapped(node: Node) -> Any:
    """The traces of the vmaps that map a root; None if that is not known, because JAX forgets
    operands on which no value depends.
    """
    if node.lanes is None and not node.version and _is_factory(node.maker):
        node.lanes = private_jax.mapping(node.value)
    return node.lanes


def _is_factory(operator: Any) -> bool:
    return operator is None or not any("Tensor" in str(a.type) for a in operator._schema.arguments)


_at_lane_p = Primitive("at_lane")
_at_lane_p.def_abstract_eval(
    lambda numbers, lane: jax.core.ShapedArray(numbers.shape[1:], numbers.dtype)
)


@_at_lane_p.def_impl
def _at_lane(numbers: jax.Array, lane: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(numbers, lane, 0, keepdims=False)


def _at_lanes(args: Sequence[jax.Array], dims: Sequence[int | None]) -> tuple[jax.Array, int]:
    """The numbers of all lanes: lane k is the number k, so these are the numbers as they are."""
    numbers, lanes = args
    if dims[0] is None:
        return numbers, 0
    if dims[1] is None:
        return _at_lane_p.bind(jnp.moveaxis(numbers, dims[0], 1), lanes), 0
    return jax.vmap(_at_lane, dims)(numbers, lanes), 0


_by_value_p = Primitive("drawn_by_value")
_by_value_p.def_abstract_eval(lambda first, *_, **__: first)


def _values_of_lanes(
    given: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> tuple[jax.Array, int]:
    count = len(given) - params["lanes"]
    lane = next((k for k in range(count, len(given)) if dims[k] is not None), None)
    if lane is None:
        raise RuntimeError(
            "Vmap does not currently support same randomness with a batched tensor input. Please "
            "file an issue with functorch"
        )
    size = given[lane].shape[0]
    operands = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(given[:count], dims[:count], strict=True)
    ]
    lanes = [x for k, x in enumerate(given[count:], count) if k != lane]
    return _by_value_p.bind(*operands, *lanes, **{**params, "lanes": len(lanes)}), 0


batching.primitive_batchers[_by_value_p] = _values_of_lanes
batching.primitive_batchers[_at_lane_p] = _at_lanes
mlir.register_lowering(_at_lane_p, mlir.lower_fun(_at_lane, multiple_results=False))

#: Random operators whose numbers depend on their operands' values.
BY_VALUE = frozenset(
    f"aten::{name}"
    for name in (
        "poisson",
        "binomial",
        "_standard_gamma",
        "_sample_dirichlet",
        "rrelu_with_noise",
        "rrelu_with_noise_",
    )
)
process.random_numbers = os.environ.get("TORCHFUNC_JAX_RANDOM_NUMBERS", "torch")
checked(process.random_numbers)
