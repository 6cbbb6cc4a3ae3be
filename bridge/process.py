"""What bridge remembers between calls, for all threads: one object, so that nothing of it is hidden, and a test can begin without.

What belongs to one thread is in ``levels.state``.
"""
from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from typing import Any, TextIO

import torch


class Process:
    """Caches, counters and settings of this process.

    Attributes:
        default_device: the JAX device that ``devices.set_default`` has set; None: JAX's own default.
        explanations: the logs that ``explain`` is filling, each with the file that it prints to.
        arrays: the JAX array that stands for a torch tensor, by the tensor's id, with what says that the tensor is unchanged.
        met: tensors that have crossed once, by id: only what crosses again is kept in ``arrays``.
        signatures: numbers for (shape, dtype, device).
        treedefs: one object for each structure of arguments.
        captured: captured tensors that require grad, by what a function closes over.
        captures: whether any function of some code captures one.
        open_traces: how many traces need PyTorch's functions to be intercepted.
        distributed: how many forwards of a DistributedDataParallel are being traced, by its id.
        plans: what is done with an operator, by operator.
        pieces: single operators compiled outside of programs, by operator and static arguments, then by shapes.
        piece_calls: the shapes that a function was called with, by its code.
        no_pieces: operands for which an operator cannot be compiled by itself.
        releases: counts how often pieces were forgotten.
        lowerings_changed: how often a user has registered a lowering.
        recorded: one object for each operator of a record with its static arguments and avals.
        programs, widths: programs of records, and which numbers of lanes share one (bridge/record/programs.py).
        unrecordable: calls that cannot be recorded, by the function's code and the kinds of its tensors.
        unknown_options: options of XLA that this jaxlib lacks.
        patches: how many patches are in effect (torchfunc_jax/patching.py).
        patched: what they have replaced: (namespace, name, torch's, ours).
        compiler: the thread that compiles programs well (bridge/record/tiers.py).
    """

    def __init__(self) -> None:
        self.default_device: Any = None
        self.explanations: list[tuple[list[str], TextIO | None]] = []
        self.arrays: dict[int, tuple[weakref.ref[torch.Tensor], Any, int, list[int]]] = {}
        self.met: dict[int, weakref.ref[torch.Tensor]] = {}
        self.signatures: dict[Any, int] = {}
        self.treedefs: dict[Any, Any] = {}
        self.captured: dict[Any, list[weakref.ref[torch.Tensor]]] = {}
        self.captures: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self.open_traces = 0
        self.distributed: dict[int, int] = {}
        self.plans: dict[Any, Any] = {}
        self.pieces: dict[Any, dict[Any, Any]] = {}
        self.piece_calls: OrderedDict[Any, OrderedDict[Any, Any]] = OrderedDict()
        self.no_pieces: dict[Any, set[Any]] = {}
        self.releases = itertools.count()
        self.lowerings_changed = 0
        self.recorded: dict[Any, Any] = {}
        self.programs: Any = None
        self.widths: Any = None
        self.unrecordable: set[Any] = set()
        self.unknown_options: set[str] = set()
        self.patches = 0
        self.patched: list[tuple[dict[str, Any], str, Any, Any]] = []
        self.compiler: Any = None


process = Process()
