"""Compiles programs in two tiers: at once without optimization, and later, in a thread, with all of
XLA's optimizations.

The tiers round differently: the second one contracts a product and a sum to one operation, and adds
up in another order. No options of XLA's give both the same bits: those with which it compiles fast
are the ones that round differently. Therefore the tier changes only between two calls of a program,
a backward pass is of its forward pass's tier, and no tier changes where results are compared bit by
bit.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun, subjaxprs

from bridge import compiling, private
from bridge.process import log_once, process, without_collections
from bridge.trace.levels import state
from bridge.xla import executables, fusions, vector_products
from bridge.xla.block_calls import BlockCalls, rows

#: XLA's options for a program that may run only once: no optimization by LLVM, and the emitters
#: that compile fastest. An option that this jaxlib refuses is left out from then on.
_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_llvm_disable_expensive_passes": True,
}
#: XLA adds up more than 32 numbers in parts. That is more exact, but each part is a kernel of its
#: own: without it a small program takes two thirds of the time to compile.
_ONE_KERNEL = {"xla_disable_hlo_passes": "tree_reduction_rewriter"}
# so many numbers are added up one after the other: the relative error of float32 is about 1e-6
_FEW = 1024
#: Vectorized code takes LLVM four times as long, and runs in a third of the time: so many
#: operations at most, on so many elements, gain; in the steps of a loop, which are many, on so many
#: elements.
_VECTORIZED, _IN_LOOPS = (300, 1 << 14), 1 << 18
#: A function is compiled well when its runs, times this, have taken longer than its first
#: compilation: a third of the second one, which must not hold up short scripts. Who jits a function
#: means to call it often.
_WORTH, _WORTH_OF_JITTED = 0.3, 1.0
_IDLE = 0.3  # seconds without a program to compile, after which programs are stored


class Once:
    """A function of arrays of fixed shapes, compiled when it is first called: fast, or with all of
    XLA's optimizations.
    """

    __slots__ = (
        "_again",
        "_changed",
        "_device",
        "_function",
        "_lock",
        "_placed",
        "_traced",
        "executable",
        "fast",
        "name",
        "part",
        "storable",
        "stored",
        "took",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        changed: Sequence[Callable[[], Any]] = (),
        run: jax.stages.Compiled | None = None,
        traced: Callable[[jax.stages.Traced], None] = lambda traced: None,
        device: jax.Device | None = None,
        fast: bool = True,
        stored: bool = False,
        part: bool = False,
    ) -> None:
        """changed: WeakMethods called after each compilation; run: an executable of another
        process; traced: called before XLA compiles.

        device: where it runs; None: JAX's default device. stored: whether the next process finds it
        by what it computes; what is called for a record is stored with the record. part: whether it
        is a part of a larger program.
        """
        default = jax.devices()[0]
        self.stored, self.part = stored, part
        self.name: str | None = None  # of what it computes
        # XLA cannot serialize what was loaded from a cache folder, ours or JAX's
        self.storable = True
        self._function, self._changed, self._traced, self._device = (
            function,
            changed,
            traced,
            device or default,
        )
        # JAX keeps what it traces with another default device apart
        self._placed = (
            contextlib.nullcontext
            if self._device == default
            else functools.partial(jax.default_device, device)
        )
        # lowers it again, to compile it well, and gives its operations if it is a part
        self._again: Callable[[], tuple[Any, Jaxpr | None]] | None = None
        self.executable: Any = run  # None: it is not compiled yet
        # Whether it is, or will be, compiled fast. Whoever asks for determinism compares the first
        # call with later ones, and has programs of their own, because the setting is part of a
        # program's key: these have one tier for life, the one that later runs need.
        self.fast = (
            fast
            and run is None
            and self._device.platform == "cpu"
            and not torch.are_deterministic_algorithms_enabled()
        )
        self.took = 0.0  # the seconds of its compilation, here or where it was found
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        return (self.executable or self.compiled(*args))(*args)

    def compiled(self, *args: Any) -> Any:
        """Compile it for these arguments, or wait for the thread that does; args: arrays, or their
        shapes and dtypes.
        """
        with self._lock:
            if self.executable is None:
                start = time.perf_counter()
                with compiling.correctly(), self._placed(), without_collections():
                    # a function of its own for jit: what JAX keeps of a function's traces goes with
                    # it; the arguments that it does not use are part of its name
                    traced = jax.jit(lambda *given: self._function(*given), keep_unused=True).trace(
                        *args
                    )
                    self._traced(traced)
                    # its compile() does not declare all option types that it takes
                    lowered: Any = None
                    calls = None
                    if rows(traced.jaxpr.jaxpr)[1] and not traced.jaxpr.effects:
                        calls = self._by_blocks(traced, args)
                        self.name = calls.name()
                    else:
                        lowered = traced.lower()
                        self.name = executables.name_of(lowered, self._device)
                    kept = executables.found(self.name, False, self.stored)
                    if kept is not None:
                        self.fast = False
                    elif calls is not None:
                        kept = executables.Kept(calls, False, sum(p.took for p in calls.pieces))
                    elif self.fast:
                        self._again = _lowering(traced, args, self.part)
                        kept = executables.found(self.name, True, self.stored)
                    if kept is None:
                        kept = self._compile(lowered, traced.jaxpr.jaxpr)
                self.executable, self.storable = kept.executable, kept.storable
                # what was found has taken another function, or process, longer
                self.took = max(time.perf_counter() - start, kept.seconds)
                if isinstance(self.executable, BlockCalls):  # then XLA compiles each block
                    self.took *= self.executable.repeated
                process.compiler.later(self._stores(), idle=True)
            return self.executable

    def _by_blocks(self, traced: jax.stages.Traced, args: tuple[Any, ...]) -> BlockCalls:
        """A program with loops over blocks, compiled piece by piece; in the end it is one program,
        with its blocks one after the other.
        """
        made = functools.partial(
            Once, device=self._device, fast=self.fast, stored=self.stored, part=True
        )
        calls = BlockCalls(
            traced.jaxpr, jax.tree.structure(traced.out_info), made, process.compiler.later
        )
        avals = jax.tree.unflatten(jax.tree.structure(args), traced.jaxpr.in_avals)
        self._again = lambda: (jax.jit(calls.in_one).lower(*avals), None)
        return calls

    def _compile(self, lowered: Any, jaxpr: Jaxpr | None) -> executables.Kept:
        """Compile what is lowered; jaxpr: its operations, None if it is no part and is compiled
        well.

        A part that runs well has vectorized code and no other optimization: that is a fifth of the
        time to compile, and runs no slower, because a part is small.
        """
        start, before = time.perf_counter(), state.from_jax
        cpu = self._device.platform == "cpu"
        if cpu:
            fusions.limited(lowered)
        if cpu and jaxpr is not None and (self.fast or self.part):
            executable = _fast(lowered, jaxpr, not self.fast if self.part else _gains(jaxpr))
        else:
            executable = _well(lowered)
        seconds = time.perf_counter() - start
        kept = executables.Kept(executable, state.from_jax == before, seconds)
        executables.keep(self.name, self.fast, kept)
        return kept

    def ahead(self, *avals: Any) -> None:
        """Compile it in a thread for arguments of these shapes and dtypes, while the caller does
        something else.
        """

        def make() -> None:
            # the call itself raises the error again
            with jax.enable_x64(True), contextlib.suppress(Exception):
                self.compiled(*avals)

        process.compiler.later(make)

    def well(self) -> Once:
        """The same function compiled with all optimizations: now if this one is compiled, else when
        it is first called.
        """
        if not self.fast:
            return self
        found = Once(
            self._function,
            self._changed,
            traced=self._traced,
            device=self._device,
            fast=False,
            stored=self.stored,
            part=self.part,
        )
        if self._again is not None:
            found.name = self.name
            with jax.enable_x64(True), compiling.correctly(), self._placed():
                kept = executables.found(self.name, False, self.stored)
                found.executable, found.storable, found.took = kept or found._compile(
                    *self._again()
                )
            process.compiler.idle.append(found._stores())  # this is its thread
        return found

    def _stores(self) -> Callable[[], None]:
        """A function that stores what has been compiled, and does not keep alive the user's
        function, which this object does.
        """
        name, fast, changed = self.name, self.fast, self._changed
        kept = executables.Kept(self.executable, self.storable, self.took)
        stored = self.stored and self.storable

        def store() -> None:
            if stored:
                executables.store(name, fast, kept)
            for found in changed:
                if (call := found()) is not None:
                    call()

        return store


class Tiers:
    """The functions of a program that run one after the other, such as a forward and a backward
    pass, in the tier that is in use.

    Attributes:
        now: the functions. A caller that calls more than one takes this tuple once: a later call
            may put others there.
    """

    __slots__ = ("_asked", "_next", "_ran", "now")

    def __init__(self, *functions: Once) -> None:
        self.now = functions
        # the functions compiled well, until a call takes them into use
        self._next: tuple[Once, ...] | None = None
        self._ran, self._asked = 0.0, False

    def __call__(self, *args: Any) -> Any:
        """Call the first function."""
        return self.now[0](*args)

    @property
    def changes(self) -> bool:
        """Whether a function is not compiled yet, or not compiled well."""
        return any(f.executable is None or f.fast for f in self.now)

    @property
    def best(self) -> tuple[Once, ...]:
        return self._next or self.now

    def ran(self, seconds: float) -> None:
        """Note a call in which nothing was compiled; what has run for as long as compiling it well
        would take is compiled well.
        """
        self._ran += seconds
        took = max([f.took for f in self.now if f.fast], default=0.0)
        if not self._asked and 0.0 < took < self._ran * (
            _WORTH_OF_JITTED if self.now[0].stored else _WORTH
        ):
            self._asked = True
            process.compiler.later(self._improve)

    def _improve(self) -> None:
        self._next = tuple([f.well() for f in self.now])

    def advance(self) -> None:
        """Before a call: use the functions that are compiled well, if there are any and nobody
        compares bits.
        """
        found = self._next
        if found is not None and not private.bits_are_compared():
            self.now, self._next, self._asked = found, None, False


def _lowering(
    traced: jax.stages.Traced, args: tuple[Any, ...], part: bool
) -> Callable[[], tuple[Any, Jaxpr | None]]:
    """A function that lowers the traced one anew, see ``Once._again``. What is lowered takes a
    megabyte, and JAX keeps it as long as the trace's own jaxpr.
    """
    jaxpr, out = traced.jaxpr.replace(jaxpr=traced.jaxpr.jaxpr), jax.tree.structure(traced.out_info)
    avals = jax.tree.unflatten(jax.tree.structure(args), jaxpr.in_avals)

    def run(*given: Any) -> Any:
        return jax.tree.unflatten(out, jaxpr_as_fun(jaxpr)(*jax.tree.leaves(given)))

    return lambda: (jax.jit(run).lower(*avals), jaxpr.jaxpr if part else None)


def _longest_sum(jaxpr: Jaxpr) -> int:
    """How many numbers are added up or multiplied at most for one result of a reduction; the
    products of matrices do not count.
    """
    sums: list[Any] = [
        e for e in jaxpr.eqns if e.primitive in (lax.reduce_sum_p, lax.reduce_prod_p)
    ]
    counts = [math.prod([e.invars[0].aval.shape[d] for d in e.params["axes"]]) for e in sums]
    return max([*counts, *map(_longest_sum, subjaxprs(jaxpr))], default=0)


def _operations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Every operation, also those inside of others."""
    return [*jaxpr.eqns, *[eqn for inner in subjaxprs(jaxpr) for eqn in _operations(inner)]]


def _gains(jaxpr: Jaxpr) -> bool:
    """Whether vectorized code pays from the first run on; the time of a loop is that of its steps,
    which are mostly small.
    """
    every = _operations(jaxpr)
    found = [eqn for eqn in every if eqn.primitive.name in ("scan", "while")]
    if found:
        steps = [
            eqn for inner in subjaxprs(jaxpr.replace(eqns=found)) for eqn in _operations(inner)
        ]
        return _largest(steps) >= _IN_LOOPS
    return len(every) <= _VECTORIZED[0] and _largest(every) >= _VECTORIZED[1]


def _largest(operations: Sequence[JaxprEqn]) -> int:
    """The number of elements of the largest result."""
    return max(
        [math.prod(getattr(v.aval, "shape", ())) for eqn in operations for v in eqn.outvars],
        default=0,
    )


def _fast(lowered: Any, jaxpr: Jaxpr, vectorized: bool) -> jax.stages.Compiled:
    vector_products.as_sums(lowered, _FEW)
    options = _FAST | (_ONE_KERNEL if _longest_sum(jaxpr) <= _FEW else {})
    if vectorized:
        options["xla_backend_optimization_level"] = 1
    while True:
        try:
            fast = {
                option: value
                for option, value in options.items()
                if option not in process.unknown_options
            }
            return lowered.compile(fast)
        except jax.errors.JaxRuntimeError as error:
            unknown = {option for option in fast if f"'{option}'" in str(error)}
            if not unknown:
                raise
            process.unknown_options |= unknown


def _well(lowered: Any) -> jax.stages.Compiled:
    return lowered.compile()


class _Worker:
    """A thread that compiles the waiting programs one after the other, and ends if none has come
    for a while.

    It stores programs when nothing is to be compiled: that is work in Python, which would hold up
    the very call that has compiled one.
    """

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple[Callable[[], None], bool]] = queue.SimpleQueue()
        # what is done when nothing has come for ``_IDLE``
        self.idle: collections.deque[Callable[[], None]] = collections.deque()
        self.starting = threading.Lock()
        self.thread: threading.Thread | None = None
        self.ended = False
        atexit.register(self.end)

    def later(self, work: Callable[[], None], idle: bool = False) -> None:
        """Do this work after the work that waits already; idle: when nothing else is to be done,
        but even if the process ends first.
        """
        with self.starting:
            if self.ended:
                return
            self.waiting.put((work, idle))
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(
                    target=self.run, name="torchfunc_jax compiles", daemon=True
                )
                self.thread.start()

    def run(self) -> None:
        quiet = False  # whether nothing has come for ``_IDLE`` seconds
        while True:
            try:
                work, idle = self.waiting.get(
                    timeout=0 if self.ended or (quiet and self.idle) else _IDLE if self.idle else 5
                )
            except queue.Empty:
                if not self.idle:
                    return
                quiet = True
                self.do(self.idle.popleft())
            else:
                quiet = False
                if idle:
                    self.idle.append(work)
                elif not self.ended:
                    self.do(work)
                del work  # it keeps what it has compiled alive

    def do(self, work: Callable[[], None]) -> None:
        try:
            # all threads see the level of forward_ad's that another one is in
            with private.set_forward_mode_enabled(False):
                work()
        except Exception:  # calls go on with what there is, and the thread with what waits
            log_once(
                "a program could not be compiled with all optimizations, or not be stored: it goes "
                "on as it was compiled first"
            )

    def end(self) -> None:
        """Wait for the compilation in progress, because XLA may crash if the process exits during
        one, and do what is not done yet.
        """
        self.ended = True
        if process.forked:  # the thread belongs to the parent, and so does what it has to do
            return
        self.waiting.put((lambda: None, False))  # wakes the thread up
        if self.thread is not None:
            self.thread.join()
        self.run()


process.compiler = _Worker()
