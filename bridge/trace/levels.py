"""The state of a trace: each thread has a stack of levels, one per active transform.

A level knows which tensors it may write to, how it draws random numbers and which tensors from
outside it has met.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import torch

from bridge.errors import NotInLoopError
from bridge.trace.storage import Node
from bridge.transform_kinds import CHECKPOINT, DIFFERENTIATING, LOOP, Kind

_CAPTURED_WRITE = (
    "During a grad (vjp, jvp, grad, etc) transform, the function provided attempted to call "
    "in-place operation ({op}) that would mutate a captured Tensor. This is not supported; please "
    "rewrite the function being transformed to explicitly accept the mutated Tensor(s) as inputs."
)


@dataclass(slots=True, eq=False, repr=False)
class Level:
    """One transform in progress."""

    kind: Kind
    parent: Level | None
    randomness: str | None = None  # for vmap: "error", "same" or "different"
    # gives the JAX key that random operators of this level draw from; None: they draw from the
    # parent's
    key: Any = None
    root: Level = field(init=False)
    draws: int = 0
    # nodes of outer levels that this level has written to, with their earlier values
    writes: dict[Node, Any] = field(default_factory=dict)
    closed: bool = False
    lane: Any = None  # in a vmap with randomness="different": the number of the lane
    size: int = 0  # of a vmap: the number of lanes
    keyed: bool = False  # random operators draw from JAX's keys, although torch draws elsewhere
    operator: Any = None
    writer: Any = None  # the operator that wrote last
    # tensors of outer levels that require grad and that this level has read
    outer: dict[int, Any] = field(default_factory=dict)
    # tensors of outer levels that this level has read or written to
    met: dict[int, Any] = field(default_factory=dict)
    probe: Any = None  # JAX's trace of a vmap, or of what a transform differentiates
    # of a jvp: whether it asks which outputs depend on the primals; of the root: whether a jvp
    # inside does
    strict: bool = False
    # -- in the root alone -------------------------------------------------------------------------
    #: plain torch tensors met while tracing, by id, and the nodes that stand for them
    captured: dict[int, tuple[torch.Tensor, Node]] = field(default_factory=dict)
    overrides: dict[int, Any] = field(default_factory=dict)
    #: sparse tensors that stand for those made in the trace, by id, with their indices and values
    #: (bridge/operators/sparse.py)
    sparse: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    # by id, captured tensors whose values the function may ask for
    constant: frozenset[int] = frozenset()
    # the answers.Answers to what it asks of values computed from such tensors, which stay inputs
    answers: Any = None
    #: by a torch generator's identity, or None for the default one: the generator, and the JAX key
    #: that came from it
    keys: dict[int | None, Any] = field(default_factory=dict)
    seeds: Callable[[Any], Any] | None = None
    # makes or notes the draws of torch's (bridge/trace/torch_random.py); None: random operators
    # draw from JAX's keys
    drawn: Any = None
    # the captured tensors that required grad when they were met
    with_history: set[int] = field(default_factory=set)
    # whether what is computed under no_grad is a constant to transforms around the trace
    stops: bool = True
    made: int = 0  # in a program: how many arguments and results the user's functions have got, and
    # the numbers of those that require grad, because the function asks for gradients by them
    leaves: frozenset[int] = frozenset()
    # ids of the tensors whose flag requires_grad the function sets
    flagged: set[int] = field(default_factory=set)
    # the intercepted.leaf_gradients.LeafGradients of a jitted function that is called with torch
    # tensors
    grads: Any = None
    # whether it is good for one call only
    once: bool = False
    # whether PyTorch's engine has run in it: what it does depends on which tensors require grad
    pulls: bool = False
    # the places of ``.grad``s that are no inputs and that this function has read, each with what
    # was there, and
    read: Any = ()
    # the attributes that it may have set to what they were: (their places, what is there)
    same: Any = ()
    # the places of the tensors whose ``.grad`` it has set, and of arguments with a gradient
    graded: Any = ()
    # what a jitted function may change: (programs.holders.Holder, the object that it holds)
    owners: Any = ()
    changes: Any = ()  # the jit.effects.Changes of Python objects that it makes
    # the accelerator that some of its tensors are on, a torch.device: JAX computes there; None:
    # they are on the CPU
    device: Any = None

    def __post_init__(self) -> None:
        self.root = self if self.parent is None else self.parent.root

    def before_write(self, node: Node) -> None:
        """Called before a root node changes: refuses a write that is not allowed here, and
        remembers the earlier value of an outer node.
        """
        self.writer = self.operator
        if node.level is self:
            return
        # torch.func allows out=
        if self.kind in DIFFERENTIATING and not getattr(
            self.operator, "_overloadname", ""
        ).endswith("out"):
            raise RuntimeError(
                _CAPTURED_WRITE.format(op=getattr(self.operator, "name", lambda: self.operator)())
            )
        self.writes.setdefault(node, node.value)


class _State(threading.local):
    """All the state that bridge keeps for each thread."""

    level: Level | None = None  # the innermost level of the trace in progress
    late: Level | None = None  # the level of Python that runs after its trace has closed
    recorder: Any = None  # the record.recorder.Recorder of the un-jitted call in progress
    # whether the un-jitted call in progress is one of tensors in the place of jax.Arrays
    of_arrays = False
    # whether un-jitted calls belong to a trace of JAX's own, also those without jax.Arrays
    in_jax = False
    numbers: Any = None  # the python_numbers.Inputs of the program that is being traced
    # by the identity of a place, a number that stands for what is there (``guards.ValueOf``)
    standing: Mapping[Any, Any] = types.MappingProxyType({})
    arguments: Any = ()  # the leaves of the arguments of the compiled program that is called
    given: Any = ((), {})  # and the arguments themselves, the positional and the named ones
    replaying = False  # a record's program is being traced; calls from other lines will run it too
    jitting = False  # a jitted function is being traced
    undone: Any = None  # the effects.Effects of a jitted function that has raised in a trace
    # the operations of a trace may not depend on sizes, because several traces become one program
    any_size = False
    exporting = False  # the program that is traced will run in other processes, without PyTorch
    # the first operand of a random operator that runs, if its numbers follow how that operand lies
    # in memory
    first: Any = None
    filling = False  # the function has called Tensor.bernoulli_ itself, which dropout does from C++
    # elements: a program that is traced holds the results of such small computations on constants;
    # -1: of none
    folded = 4096
    from_jax = 0  # how many programs JAX has loaded from its own cache folder on this thread
    # PyTorch has entered no_grad only to call the forward that torch.library has generated for an
    # operator
    applied = False
    trying = False  # a program runs on zeros, only to be compiled
    # who runs a call whose program is not compiled yet: "jax" or "torch"; None: as everywhere
    cold: str | None = None
    # who draws random numbers on this thread: "torch" or "jax"; None: as everywhere
    random_numbers: str | None = None
    # how many of a head are computed at once on this thread; None: as everywhere
    attention_scores: float | None = None


state = _State()


@contextlib.contextmanager
def push(
    kind: Kind, randomness: str | None = None, key: Callable[[], jax.Array] | None = None
) -> Iterator[Level]:
    """Enter a level. On exit, writes to outer levels' tensors are undone; the caller repeats them
    one level up with the new values.
    """
    parent = state.level
    level = Level(kind, parent, randomness, key)
    state.level = level
    try:
        yield level
    finally:
        state.level = parent
        level.closed = True
        for node, value in level.writes.items():
            node.value = value
            node.version += 1
        if parent is not None and level.writer is not None:
            parent.operator = level.writer  # the caller repeats its writes
        if parent is not None and (level.outer or level.met):
            parent.outer.update(_still_open(level.outer))
            parent.met.update(_still_open(level.met))
        # a tensor that the function has kept has this level, and these may be views of it
        level.outer, level.met = {}, {}


def around(level: Level | None = None) -> Iterator[Level]:
    """A level, or the innermost one of the trace in progress, and the levels around it."""
    level = level or state.level
    while level is not None:
        yield level
        level = level.parent


def vmaps_of_draws() -> list[Level]:
    """The vmaps whose rules hold for a draw, the outermost first."""
    return [each for each in around() if each.kind.maps][::-1]


def innermost(kinds: Collection[Kind]) -> Level | None:
    """The innermost level of one of these kinds; None if there is none."""
    return next((level for level in around() if level.kind in kinds), None)


class Unrecordable(BaseException):
    """The function does something that cannot be recorded.

    ``Recorder.go_on`` goes on in PyTorch. Where it cannot, this is raised, and PyTorch runs the
    outermost transform from its start, even if the user's code catches this.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        if state.recorder is not None:
            state.recorder.broken = reason


class NotInCheckpoint(Exception):
    """Raised inside of a checkpoint by what differs between the transforms around it: there the
    values do not tell these apart.
    """


def refuse_in_checkpoint() -> None:
    """Raise NotInCheckpoint inside of one."""
    if innermost({CHECKPOINT}) is not None:
        raise NotInCheckpoint


def answers() -> Any:
    """The ``answers.Answers`` of the trace in progress, if there are any."""
    return None if state.level is None else state.level.root.answers


def refuse_in_loop(what: str, kind: Kind = LOOP) -> None:
    """Raise NotInLoopError inside a step of a loop, whose values are not known outside of the loop;
    kind: that of the step's level.
    """
    if innermost({kind}) is not None:
        raise NotInLoopError(f"{what}, in a loop")


def _still_open(tensors: dict[int, Any]) -> dict[int, Any]:
    """The tensors whose level has not closed; a tensor from outside has no level and stays."""
    nodes = {key: getattr(t, "node", None) for key, t in tensors.items()}
    return {
        key: tensors[key]
        for key, node in nodes.items()
        if node is None or not (node.level.closed or node.root.level.closed)
    }
