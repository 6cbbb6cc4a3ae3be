"""What bridge remembers between calls, for all threads: one object, so that nothing of it is
hidden, and a test can begin without.

What belongs to one thread is in ``levels.state``.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch


class Recent:
    """A cache for all threads; the entries that were used least recently go."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._entries))

    def get(self, key: Hashable) -> Any:
        """The value, which becomes the one used last; None if there is none."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def add(self, key: Hashable, value: Any) -> list[Any]:
        """Add an entry, or replace it; returns the values that had to go."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            return [
                self._entries.popitem(last=False)[1] for _ in range(len(self._entries) - self.most)
            ]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


@dataclass
class Process:
    """Caches, counters and settings of this process."""

    # the JAX device that ``devices.set_default`` has set; None: JAX's own default
    default_device: Any = None
    #: the logs that ``explain`` is filling, and the files it prints to
    explanations: list[tuple[list[str], TextIO | None]] = field(default_factory=list)
    #: the JAX array that stands for a torch tensor, by the tensor's id, with what says that the
    #: tensor is unchanged
    arrays: dict[int, tuple[weakref.ref[torch.Tensor], Any, int, list[Any]]] = field(
        default_factory=dict
    )
    #: the JAX array whose memory a tensor is, for the results of programs that write into the
    #: memory of arguments, by the tensor's id
    owners: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = field(default_factory=dict)
    #: by the id of an array that was donated: the array that has its memory now, and keeps it for
    #: tensors that are views of it
    heirs: dict[int, tuple[weakref.ref[Any], Any]] = field(default_factory=dict)
    # the parts of a sparse tensor, by its id (bridge/convert/sparse.py)
    sparse: dict[int, Any] = field(default_factory=dict)
    # numbers for (shape, strides, dtype, device)
    signatures: dict[Any, int] = field(default_factory=dict)
    # one object for each structure of arguments
    treedefs: dict[Any, Any] = field(default_factory=dict)
    open_traces: int = 0  # how many traces need PyTorch's functions to be intercepted
    # how many forwards of a DistributedDataParallel are being traced, by its id
    distributed: dict[int, int] = field(default_factory=dict)
    # whether an operator without a lowering has been met, which PyTorch runs
    library_operators: bool = False
    # what is done with an operator, by operator
    plans: dict[Any, Any] = field(default_factory=dict)
    lowerings_changed: int = 0  # how often a user has registered a lowering
    # one object for each operator of a record with its static arguments and avals
    recorded: dict[Any, Any] = field(default_factory=dict)
    # the first of those objects whose avals differ at most in their strides
    alike: dict[Any, Any] = field(default_factory=dict)
    programs: Any = None  # programs of records, and
    widths: Any = None  # which numbers of lanes share one (bridge/record/programs.py)
    #: by a hash of a record and its results, the numbers of what its function has kept, and whether
    #: these have values outside
    kept: dict[int, dict[int, bool]] = field(default_factory=dict)
    #: calls that cannot be recorded, by the function's code and the kinds of its tensors
    unrecordable: set[Any] = field(default_factory=set)
    #: the derivatives of autograd.Functions that change Python objects: PyTorch is to run these
    changing: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    #: who runs a call whose program is not compiled yet: "jax" waits for XLA, "torch" does not; the
    #: last one holds
    cold: list[str] = field(default_factory=lambda: ["jax"])
    #: by the keys of records that PyTorch runs because their programs are not compiled: the seconds
    #: it took so far; -inf: a thread compiles the program; inf: it could not
    compiling: dict[Any, float] = field(default_factory=dict)
    random_numbers: str = "torch"  # who draws them: "torch" or "jax"
    attention_scores: float = 2**18  # of a head that are computed at once
    unknown_options: set[str] = field(default_factory=set)  # options of XLA that this jaxlib lacks
    patches: int = 0  # how many patches are in effect (torchfunc_jax/patching.py)
    #: what they have replaced: (namespace, name, torch's, ours)
    patched: list[tuple[dict[str, Any], str, Any, Any]] = field(default_factory=list)
    # how often each group of processes has met (bridge/processes.py)
    meetings: dict[tuple[int, ...], int] = field(default_factory=dict)
    uses_jax: bool = False  # whether JAX had started when this process forked last, and
    # whether this is a child of a process in which it had: JAX cannot compile here
    # (bridge/boundary/handing_over.py)
    forked: bool = False
    #: what XLA has compiled and whether it can be stored, by a name of what it computes and whether
    #: it was compiled fast (bridge/xla/executables.py)
    executables: Recent = field(default_factory=lambda: Recent(128))
    compiler: Any = None  # the thread that compiles programs well (bridge/xla/tiers.py)
    # the messages that were logged once (log_once)
    logged: dict[str, object] = field(default_factory=dict)


process = Process()


def log_once(message: str, *given: Any, exc_info: bool | None = True) -> None:
    """Log a warning, with the exception that is being handled, once for each message: what goes on
    without it must not be silent.
    """
    mine = object()
    # one step: another thread may come here too
    if process.logged.setdefault(message, mine) is mine:
        logging.getLogger("torchfunc_jax").warning(message, *given, exc_info=exc_info)


@contextlib.contextmanager
def having(owner: Any, **attributes: Any) -> Iterator[None]:
    """While entered, an object has these attributes; afterwards it has its earlier ones again."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """While entered, Python's garbage collector does not run: a trace makes little garbage, and a
    look at all objects takes longer.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
