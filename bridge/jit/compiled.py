"""A program with everything that a call needs: its compiled forms, the places of its captured
tensors, the tree of its results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge import compiling, devices, private_jax
from bridge.boundary import meshes
from bridge.boundary.calls import Call
from bridge.boundary.results import put_together, write_back
from bridge.boundary.shared_memory import Sharing
from bridge.cache_keys import Same
from bridge.convert import tensors, trees
from bridge.convert.arrays import settle
from bridge.jit.autograd import ProgramNode
from bridge.jit.donation import Donation, own, take_over
from bridge.jit.program import (
    SEEDS,
    Program,
    backward_pass,
    differentiated,
    forward,
    in_two,
    pull_back,
)
from bridge.modules import SWAPPING
from bridge.process import having
from bridge.programs.closure_scan import has_hooks
from bridge.programs.guards import GONE_ERRORS
from bridge.programs.places import OfArgument, Place
from bridge.trace import python_numbers
from bridge.trace.levels import state
from bridge.trace.python_numbers import Inputs
from bridge.trace.storage import Geometry
from bridge.xla import products
from bridge.xla.tiers import Once, Tiers

_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramInfo:
    """One program that a jitted function keeps.

    Attributes:
        arguments: each argument leaf with its shape and dtype, its value, or "input" for a Python
            number that is an input.
        why: why the program was compiled, in sentences.
        operations: the number of operations before XLA optimized the program.
        seconds: the time that tracing, compiling and the first run took.
        calls: how often the program has been called.
    """

    arguments: tuple[str, ...]
    why: str
    operations: int
    seconds: float
    calls: int


class Pair(NamedTuple):
    """A program compiled to be differentiated.

    Attributes:
        passes: the forward pass, which keeps what the backward pass needs, and the backward pass.
        kinds: whether each output requires grad.
        inputs: which of the program's inputs the backward pass needs the earlier values of, and has
            copies of.
        read: for each gradient, the primals and cotangents that its computation reads, as bits of a
            number; filled when a double backward asks for it.
    """

    passes: Tiers
    kinds: list[bool]
    inputs: list[int]
    read: list[int]


class Executables(NamedTuple):
    """What XLA has made of a program.

    Attributes:
        made: the forward pass, by None, and by the inputs that are differentiated: the forward and
            backward passes of the Pair.
        copied: by these: ``Pair.inputs``.
    """

    made: dict[tuple[int, ...] | None, list[Any]]
    copied: dict[tuple[int, ...], list[int]]


class Compiled:
    """One staged program with everything that a call needs."""

    def __init__(
        self,
        program: Program,
        call: Call,
        torch_out: bool,
        donated: tuple[int, ...],
        numbers: Inputs | None = None,
        numbered: Sequence[int] = (),
        changing: frozenset[int] = frozenset(),
        tiered: bool = False,
        pure: bool = False,
        given: Sequence[Any] | None = None,
        counters: Sequence[Place] = (),
        executables: Executables | None = None,
        stored: bool = False,
    ) -> None:
        """given: the arguments and captured tensors, if the call has others too, which stand for
        Python numbers.

        counters: the places of numbers that the function counts, and that are inputs behind those
        among the arguments. executables: what another process has compiled of the program, instead
        of what would be compiled here. tiered: whether it is compiled when it is called, in tiers,
        and found by what it computes; else by jax.jit. stored: whether the next process finds it by
        that too.
        """
        tensors_in = [*call.arrays, *[p.get() for p in program.places]] if given is None else given
        # of the results
        self.device = tensors.common_device(tensors_in) or next(
            (d for d in program.is_tensor if d), _CPU
        )
        self.runs_on = next(
            (
                x.device
                for x in tensors_in
                if isinstance(x, torch.Tensor) and x.device.type != "cpu"
            ),
            self.device,
        )
        #: whether some of its inputs are on the CPU and others on an accelerator
        types = {x.device.type for x in tensors_in if isinstance(x, torch.Tensor)}
        self.mixed = torch_out and self.runs_on.type != "cpu" and "cpu" in types
        # pure: to differentiate it runs no Python of the user's
        self.tiered, self.pure, self.stored = tiered, pure, stored
        # whether its functions may be compiled, or their tier may change, at the next call
        self.changes = tiered
        self.program, self.torch_out, self.where, self.donated = (
            program,
            torch_out,
            call.where,
            donated,
        )
        # Python numbers that are inputs; the positions of all numbers among the leaves
        self.numbers, self.numbered = numbers, numbered
        # changing: which of these numbers are inputs
        self.changing, self.counters = changing, counters
        # the traced function, if nothing else keeps it alive: its code is looked at
        self.traced: Any = None
        self.sharing = Sharing(program.written, len(call.where))
        self.facts: dict[str, str] = {}
        self.why = ""
        self.seconds, self.calls, self.used = 0.0, 0, 0
        self.jitted: list[Any] = []
        self.changed: list[Callable[[], Any]] = []  # WeakMethods called after each compilation
        captured = [p.get() for p in program.places]
        self.signatures = tensors.crossings(captured)[1]
        #: which of the captured tensors must require grad; None: that is no condition
        self.requires_grad = [t.requires_grad for t in captured] if program.pulls else None
        avals = [v.aval for v in program.jaxpr.jaxpr.outvars]
        self.packing = program.packing() if torch_out else None
        self.layouts = [tensors.layout(a.shape, a.dtype) for a in avals] if torch_out else []
        # jax.Arrays are computed while the caller goes on; their values are checked only as much as
        # JAX does
        self.checked, self.bounds = program.checked() if torch_out else (program, None)
        self.draws = program.is_random
        #: held in a call from the reading of what it depends on to the changes of objects: another
        #: thread changes them before or after it, and no trace takes these changes for its own
        self.turn: Any = SWAPPING if program.changes else contextlib.nullcontext()
        #: whether nothing is computed, because every output is a view of an input
        self.idle = (
            bool(program.shared)
            and not self.layouts
            and self.bounds is None
            and not program.draws
            and not program.generators
        )
        self.recorded: dict[Any, Pair] = {}
        if executables is None:
            self.forward: Any = self._jit(forward(self.checked, self.packing))
        else:
            passes = {
                k: Tiers(*[Once(self.checked.run, run=run) for run in runs])
                for k, runs in executables.made.items()
            }
            self.forward = passes.pop(None, Tiers(Once(self.checked.run)))
            self.recorded = {
                k: Pair(found, program.kinds_for(k), executables.copied[k], [])
                for k, found in passes.items()
            }
        self.run = self.forward  # the forward pass; when it changes no more, its executable itself
        #: whether no input is a NumPy array, of seeds or numbers, whose dtype depends on JAX's mode
        self.of_arrays = numbers is None and not program.is_random
        self.in_any_mode = False  # whether ``run`` may be called without ``jax.enable_x64``
        # whether ``unfit`` is to be asked before each call
        self.asks = bool(program.written or program.strided or program.graded)
        self.active: dict[Any, Any] = {}
        # by the inputs that are differentiated: the backward pass as a program
        self.backward: dict[tuple[int, ...], Compiled] = {}
        # if a callback raises, XLA frees the memory of donated arguments, in which their tensors
        # are
        self.in_place = bool(donated) and "callback" not in str(program.jaxpr)
        #: whether every output is a tensor on the device of the results
        self.alike = all(program.is_tensor) and not (
            torch_out and any(d.type != self.device.type for d in program.is_tensor)
        )
        self.one_out = (  # the only output is a tensor on the CPU
            self.alike
            and program.out_spec is None
            and not program.written
            and not program.shared
            and self.packing is None
            and torch_out
            and self.device.type == "cpu"
            and not donated
        )

    def _jit(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if self.tiered:
            return Tiers(self._kept(run))
        if not self.donated:
            return self._kept(run)
        jitted = self._kept(
            lambda random, *inputs: run(inputs, random),
            donate_argnums=[i + 1 for i in self.donated],
        )
        return lambda inputs, random: jitted(random, *inputs)

    def _kept(self, function: Callable[..., Any], **options: Any) -> Any:
        # jax.Arrays may be tracers of a user's own jax.jit, inside of which JAX takes no options; a
        # scope at each call sets the same
        if self.tiered:
            return Once(
                function,
                self.changed,
                device=devices.of(self.runs_on),
                stored=self.stored,
                fast=not state.trying,
                **options,
            )
        self.jitted.append(
            jax.jit(
                function,
                compiler_options=compiling.options() if self.torch_out else None,
                **options,
            )
        )
        return self.jitted[-1]

    def tiers(self) -> list[Tiers]:
        """Of a program with tiers: what changes its tier together."""
        # calls in other threads may add a pair
        return [self.forward, *[pair.passes for pair in self.recorded.copy().values()]]

    def executables(self) -> Executables:
        """What is compiled, in the best tier that there is."""
        pairs = self.recorded.copy()
        passes: dict[Any, Tiers] = {
            None: self.forward,
            **{k: pair.passes for k, pair in pairs.items()},
        }
        compiled = {
            k: tiers.best
            for k, tiers in passes.items()
            if all(f.executable and f.storable for f in tiers.best)
        }
        made = {k: [f.executable for f in found] for k, found in compiled.items()}
        return Executables(made, {k: pair.inputs for k, pair in pairs.items() if k in made})

    def clear(self) -> None:
        """Free the compiled code; a later call through a reference to this program compiles it
        anew.
        """
        for jitted in self.jitted:
            jitted.clear_cache()

    def info(self) -> ProgramInfo:
        arguments = tuple(
            f"{name}: {what}"
            for name, what in self.facts.items()
            if name.startswith(("args", "kwargs"))
        )
        return ProgramInfo(
            arguments, self.why, len(self.program.jaxpr.jaxpr.eqns), self.seconds, self.calls
        )

    def captured(
        self, leaves: list[Any] | None = None
    ) -> tuple[list[torch.Tensor], list[Any]] | None:
        """The current captured tensors and their arrays; None if this program no longer fits.

        leaves: those of the call's arguments, if they are not in ``state.arguments`` already.
        """
        program = self.program
        if leaves is not None and program.of_arguments:
            with having(state, arguments=leaves):
                return self.captured()
        if program.guards.needed and not program.guards.hold():
            return None
        if not program.places:
            return [], []
        try:
            found = [p.get() for p in program.places]
        except GONE_ERRORS:
            return None
        if not all(isinstance(t, torch.Tensor) for t in found):
            return None
        arrays, signatures = tensors.crossings(found)
        if signatures != self.signatures or (
            self.requires_grad is not None
            and [t.requires_grad for t in found] != self.requires_grad
        ):
            return None
        return found, arrays

    def inputs(self, leaves: list[Any], captured: list[torch.Tensor]) -> list[Any]:
        """The program's inputs: the arguments among the leaves, and the captured tensors."""
        return [*[leaves[i] for i in self.where], *captured]

    def unfit(self, leaves: list[Any], captured: list[torch.Tensor]) -> str:
        """Why no program can be run on these tensors; "" if one can."""
        inputs = self.inputs(leaves, captured)
        if self.program.graded:
            with having(state, arguments=leaves):
                graded = [p.get() for p in self.program.graded]
            if len({*map(id, graded)}) < len(graded):
                return "one tensor is two of its inputs, and it sets the .grad of both"
            arguments = [
                t
                for place, t in zip(self.program.graded, graded, strict=True)
                if type(place) is OfArgument
            ]
            if any(map(has_hooks, arguments)):
                return "a tensor among its arguments has hooks on its gradient"
        if self.program.written and self.sharing.overlap(inputs[: len(self.where)], captured):
            return "two of its inputs share memory, and it writes to one of them"
        if not all(Geometry.of(inputs[i]).plain for i in self.program.strided):
            return (
                "it counts from where a tensor's memory begins (as_strided), and the tensor is a "
                "view or not contiguous"
            )
        return ""

    def agrees(
        self, other: Compiled, values: Sequence[Any], inputs: list[Any], captured: list[Any]
    ) -> bool:
        """Whether this program, which takes numbers as inputs, gives the same results as a program
        that was made for these numbers.

        captured: the arrays of the other program's captured tensors.
        """
        assert self.numbers is not None
        static = zip(self.static(values), other.program.static, strict=True)
        if self.program.interface() != other.program.interface() or any(
            x is not y and Same(x) != Same(y) for x, y in static
        ):
            return False
        own = self.captured()
        mine = (
            None
            if own is None
            else self._tried([*inputs, *self.numbers.evaluated(values), *own[1]])
        )
        return mine is not None and all(map(close, mine, other._tried([*inputs, *captured])))

    def _tried(self, values: list[Any]) -> list[np.ndarray]:
        """The program's results; its writes are not carried out."""
        with jax.enable_x64(True), compiling.at_call():
            outs = self.forward(
                [np.array(x) for x in values] if self.donated else values, self.program.any_random()
            )
        return [np.asarray(v) for v in outs]

    def static(self, numbers: Sequence[Any]) -> list[Any]:
        """The leaves of the result that are not tensors, for these numbers."""
        return [
            x.node.evaluate(numbers) if python_numbers.is_input(x) else x
            for x in self.program.static
        ]

    def call(
        self, leaves: list[Any], values: list[Any], captured: list[torch.Tensor], grads: bool
    ) -> Any:
        """Run the program; values: the arrays of the arguments among the leaves, one of which
        requires grad if grads, and of captured.
        """
        if not self.changes:
            return self._call(leaves, values, captured, grads)
        for tiers in self.tiers():
            tiers.advance()
        executables = self._executables()
        start = time.perf_counter()
        out = self._call(leaves, values, captured, grads)
        seconds = time.perf_counter() - start
        found = self.tiers()
        if executables == self._executables():  # nothing was compiled in this time
            for tiers in found:
                tiers.ran(seconds)
        changing = [tiers for tiers in found if tiers.changes]
        self.changes = bool(changing)
        if self.forward not in changing:
            executable = self.forward.now[0].executable
            self.run = private_jax.without_wrapper(executable)
            self.in_any_mode = self.of_arrays and isinstance(executable, jax.stages.Compiled)
        return out

    def _executables(self) -> list[Any]:
        return [function.executable for tiers in self.tiers() for function in tiers.now]

    def _call(
        self, leaves: list[Any], values: list[Any], captured: list[torch.Tensor], grads: bool
    ) -> Any:
        program = self.program
        if self.idle:
            return self._finish([], leaves, captured)
        if (
            self.torch_out
            and torch.is_grad_enabled()
            and (grads or (captured and any(t.requires_grad for t in captured)))
        ):
            every = self.inputs(leaves, captured)
            active = self._active(every)
            if active:
                return self._recorded(leaves, captured, every, values, active)
        values = tensors.on_one_device(values) if self.mixed else values
        random = program.random(values) if self.draws else None
        donation = None
        if self.donated and self.torch_out:
            donation = Donation(self.inputs(leaves, captured), values, self.donated, self.in_place)
            values = donation.values
        if self.in_any_mode:
            outs = self.run(values, None)
        elif self.torch_out and compiling.options_suffice():
            with jax.enable_x64(True):
                outs = self.run(values, random)
        else:
            with jax.enable_x64(True), compiling.correctly():
                if not self.torch_out:
                    first = len(values) - len(captured)
                    values = [*values[:first], *jax.device_put(values[first:])]
                outs = meshes.run(lambda given: self.forward(given, random), values, tuple, False)
        if not self.torch_out:
            if captured or any(isinstance(x, torch.Tensor) for x in leaves):
                settle(outs)
            compiling.warn_of_jit(outs)
            return self._finish_jax(outs, leaves, captured)
        if donation is None:
            return self._returned(outs, leaves, captured)
        donation.ran(outs)
        try:
            return self._returned(outs, leaves, captured)
        finally:
            donation.finish()

    def _returned(
        self, outs: list[jax.Array], leaves: list[Any], captured: list[torch.Tensor]
    ) -> Any:
        """What the call returns; outs: the program's results."""
        program = self.program
        if self.bounds is not None:
            self.bounds.judge(outs.pop())
        if self.one_out:
            outs[0].block_until_ready()
            return tensors.view(outs[0], self.layouts[0])
        # converting them while the program runs takes a core from it, and costs more than it saves;
        # elsewhere torch's stream waits for them
        for v in outs if self.runs_on.type == "cpu" else ():
            v.block_until_ready()
        results = (
            self.packing.unpack(outs, self.device, len(program.jaxpr.jaxpr.outvars))
            if self.packing
            else tensors.views(outs, self.layouts, self.device)
        )
        if self.donated:
            for t, v in zip(
                [results[i] for i in self.packing.singles] if self.packing else results,
                outs,
                strict=False,
            ):
                own(t, v)
        if program.written:
            jax.block_until_ready(outs)
        return self._finish(results, leaves, captured)

    def _finish(
        self, results: list[torch.Tensor], leaves: list[Any], captured: list[torch.Tensor]
    ) -> Any:
        program = self.program
        inputs = self.inputs(leaves, captured) if program.written or program.shared else []
        if program.written:
            found = zip(program.written, results[program.count :], strict=True)
            targets = [
                (inputs[i], v)
                for i, v in found
                if not (i in self.donated and take_over(inputs[i], v))
            ]
            write_back([(t, v) for t, v in targets if isinstance(t, torch.Tensor)])
        outs = results[: program.count]
        if program.shared:
            outs = program.outputs(outs, inputs)
        if not program.static or self.alike:
            return trees.unflatten(program.out_spec, outs)
        return self._tree(outs, leaves)

    def _tree(self, results: Sequence[Any], leaves: list[Any]) -> Any:
        program = self.program
        static = (
            program.static
            if self.numbers is None
            else self.static([leaves[i] for i in self.numbered])
        )
        return put_together(results, (program.out_spec, static, program.is_tensor))

    def _finish_jax(
        self, outs: list[jax.Array], leaves: list[Any], captured: list[torch.Tensor]
    ) -> Any:
        program = self.program
        first = len(self.where)
        pairs = [
            (captured[i - first], v)
            for i, v in zip(program.written, outs[program.count :], strict=True)
            if i >= first
        ]
        write_back([(t, tensors.to_torch(v, t.device)) for t, v in pairs if tensors.is_local(v)])
        return self._tree(outs, leaves)

    def _active(self, inputs: list[Any]) -> tuple[int, ...]:
        """The inputs that torch's autograd goes back to; none if no output requires grad."""
        wanted = tuple([isinstance(x, torch.Tensor) and x.requires_grad for x in inputs])
        if wanted not in self.active:
            found = self.program.reached([i for i, w in enumerate(wanted) if w])
            self.active[wanted] = found if any(self.program.kinds_for(found)) else ()
        return self.active[wanted]

    def _recorded(
        self,
        leaves: list[Any],
        captured: list[torch.Tensor],
        inputs: list[Any],
        values: list[Any],
        active: tuple[int, ...],
    ) -> Any:
        # the backward pass needs the earlier values of the written tensors, so these are cloned
        written = {id(inputs[i]) for i in self.program.written}
        diff = [inputs[i].clone() if id(inputs[i]) in written else inputs[i] for i in active]
        return self._finish(
            list(ProgramNode.apply(self, inputs, values, active, *diff)), leaves, captured
        )

    def gradients(
        self,
        inputs: list[Any],
        active: tuple[int, ...],
        random: Any,
        cotangents: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The backward pass for these inputs as a node of torch's graph; random: the seeds and
        numbers of the forward pass.
        """
        seeds, numbers = self.program.any_random() or ([], []) if random is None else random
        every = [
            *inputs,
            np.zeros(SEEDS, np.int64) if random is None else seeds,
            *numbers,
            *cotangents,
        ]
        if active not in self.backward:
            call = Call([], None, list(range(len(every))))
            program = backward_pass(self.program, active)
            self.backward.setdefault(
                active,
                Compiled(program, call, True, (), tiered=self.tiered, pure=self.pure, given=every),
            )
        values = [tensors.to_jax(x) if isinstance(x, torch.Tensor) else x for x in every]
        grads = any(isinstance(x, torch.Tensor) and x.requires_grad for x in every)
        return self.backward[active].call(every, values, [], grads)

    def pair(self, active: tuple[int, ...]) -> Pair:
        """The forward and backward passes for these inputs; each is compiled at its first call."""
        if active not in self.recorded:
            inputs: list[int] = []
            if self.tiered:
                run, pull_back_held, passed = in_two(self.checked, active)
                back, pure = self._kept(pull_back_held), self.pure

                def meanwhile(traced: jax.stages.Traced) -> None:
                    avals, held = passed(traced)
                    inputs.extend(held)
                    if pure:
                        back.ahead(*avals)

                run = self._kept(run, traced=meanwhile)
            else:
                jaxpr = self.checked.jaxpr.jaxpr
                run = self._kept(products.rearranging(differentiated(self.checked, active), jaxpr))
                # a new function, because JAX caches compiled programs per function
                back = self._kept(products.rearranging(pull_back, jaxpr))
            made = Pair(Tiers(run, back), self.program.kinds_for(active), inputs, [])
            self.changes = self.tiered
            self.recorded.setdefault(active, made)  # another thread may have been first
        return self.recorded[active]


def close(a: np.ndarray, b: np.ndarray, eps: float = 0.0) -> bool:
    """Whether two results differ by no more than rounding; eps: that of a coarser dtype that they
    were computed in.
    """
    if a.dtype.kind in "biu":
        return bool(np.array_equal(a, b))
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    tolerance = max(float(jnp.finfo(a.dtype).eps), eps) ** 0.5
    a, b = a.astype(kind), b.astype(kind)
    finite = np.abs(b[np.isfinite(b)])
    return bool(
        np.allclose(
            a,
            b,
            rtol=tolerance,
            atol=tolerance * float(finite.max() if finite.size else 0),
            equal_nan=True,
        )
    )


def memory_of(
    function: Callable[..., list[jax.Array]], avals: Sequence[jax.ShapeDtypeStruct]
) -> int:
    """The bytes that the compiled program of a function of arrays takes: arguments, results, and
    what it computes in between.

    The function may use tracers of a trace in progress; they count as arguments.
    """
    with jax.enable_x64(True), compiling.correctly():
        closed = jax.make_jaxpr(function)(*avals)
        consts = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(jax.typeof, closed.consts)]
        program = jax.jit(
            lambda consts, *arrays: jax.core.eval_jaxpr(closed.jaxpr, consts, *arrays),
            compiler_options=compiling.options(),
        )
        found = program.lower(consts, *avals).compile().memory_analysis()
    return int(
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )
