"""The one place where a trace's state lives: a stack of levels, one per active transform, per thread.

A level knows what it may write to, how it draws random numbers and which tensors it met from outside.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bridge.errors import NotInLoopError
from bridge.trace.storage import Node

_CAPTURED_WRITE = (
    "During a grad (vjp, jvp, grad, etc) transform, the function provided attempted to call in-place operation ({op}) that would "
    "mutate a captured Tensor. This is not supported; please rewrite the function being transformed to explicitly accept the "
    "mutated Tensor(s) as inputs."
)


class Level:
    """One transform in progress.

    Attributes:
        kind: "root", "vmap", "grad", "jvp", "function" (the forward of an autograd.Function), "loop" (a step
            that runs several times) or "plain".
        randomness: for vmap: "error", "same" or "different".
        key: the JAX key random operators of this level draw from; None: the parent's.
        writes: nodes of outer levels written to in here, with the values they had before.
        staged: in the root: the trace is of a whole program to be compiled.
        captured: in the root: plain torch tensors met while tracing, by id, with the node that stands for each.
        live: in the root: ids of those among them that were used while torch's grad mode was on.
        with_history: in the root: ids of those that required grad when they were met.
        behind: in the root: ids of those that rules for derivatives use, and maybe nothing else.
        recorded: in the root: torch's autograd may go back through what is traced.
        lasting: in the root: values are used after the call has returned, so they share no memory with torch tensors.
    """

    __slots__ = (
        "behind", "captured", "closed", "depth", "draws", "generators", "key", "kind", "lane", "lasting", "live", "met", "operator",
        "outer", "overrides", "parent", "probe", "randomness", "recorded", "root", "seeds", "staged", "with_history", "writes",
    )

    def __init__(self, kind: str, parent: Level | None, randomness: str | None = None, key: Any = None) -> None:
        self.kind = kind
        self.parent = parent
        self.root: Level = self if parent is None else parent.root
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.randomness = randomness
        self.key = key
        self.draws = 0
        self.writes: dict[Node, tuple[Any, int]] = {}
        self.closed = False
        self.captured: dict[int, tuple[torch.Tensor, Node]] = {}
        self.overrides: dict[int, Any] = {}
        self.generators: dict[int, Any] = {}  # in the root: explicit torch generators drawn from, with their keys
        self.seeds: Callable[[Any], Any] | None = None
        self.staged = False
        self.live: set[int] = set()
        self.behind: set[int] = set()
        self.with_history: set[int] = set()
        self.recorded = False
        self.lasting = False
        self.lane: Any = None  # in a vmap with randomness="different": the number of the lane
        self.operator: Any = None
        self.outer: dict[int, Any] = {}  # tensors of levels around this one that require grad and were read in here
        self.met: dict[int, Any] = {}  # tensors from around this level that were read or written to in here
        self.probe: Any = None

    def before_write(self, node: Node) -> None:
        """Called before a root node changes: refuses what may not change here, remembers what must be undone or passed out."""
        if node.level is self:
            return
        if self.kind in ("grad", "jvp") and not getattr(self.operator, "_overloadname", "").endswith("out"):  # torch.func lets out= pass
            raise RuntimeError(_CAPTURED_WRITE.format(op=self.operator))
        if node not in self.writes:
            self.writes[node] = (node.value, node.version)

    def undo_writes(self) -> None:
        for node, (value, _) in self.writes.items():
            node.value = value
            node.version += 1


class _State(threading.local):
    """What a thread is at; all that bridge keeps for each thread."""

    level: Level | None = None  # the innermost level of the trace in progress
    late: Level | None = None  # the level of Python that runs after its trace has closed
    recorder: Any = None  # the record.recorder.Recorder of the un-jitted call in progress
    unrecorded = False  # un-jitted calls run without a record for now
    numbers: Any = None  # the python_numbers.Inputs of the program that is being traced
    checks = 0  # how many checks of values it has met: whether a function has any is seen by tracing it
    replaying = False  # a record's program is being traced: other calls, from other lines, will run it
    compiling = False  # a piece is being compiled
    shapes: Any = None  # the eager.Shapes of the un-jitted call in progress


state = _State()


@contextlib.contextmanager
def push(kind: str, randomness: str | None = None, key: Any = None) -> Iterator[Level]:
    """Enter a level.  On exit, writes to outer levels' tensors are undone; the caller repeats them one level up with the new values."""
    parent = state.level
    level = Level(kind, parent, randomness, key)
    state.level = level
    try:
        yield level
    finally:
        state.level = parent
        level.closed = True
        level.undo_writes()
        if parent is not None and (level.outer or level.met):
            parent.outer.update(_still_open(level.outer))
            parent.met.update(_still_open(level.met))


def refuse_in_loop(what: str) -> None:
    """Raise NotInLoopError in a step of a loop: its values are not known outside of it."""
    level = state.level
    while level is not None:
        if level.kind == "loop":
            raise NotInLoopError(f"{what}, in a loop")
        level = level.parent


def _still_open(tensors: dict[int, Any]) -> dict[int, Any]:
    """Those of the tensors whose level has not closed; one from outside has none."""
    found = {}
    for key, t in tensors.items():
        node = getattr(t, "node", None)
        if node is None or not (node.level.closed or node.root.level.closed):
            found[key] = t
    return found
