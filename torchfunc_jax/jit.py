"""jit: a torch function compiled into one XLA program."""
from __future__ import annotations

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge import autograd, compiling, guards, python_numbers, staging, tensors, trees
from bridge.calls import Call, is_local, refuse_recording, write_back
from bridge.errors import at_line, reworded
from bridge.keys import Same, by_identity, identical, weak
from bridge.levels import state
from bridge.nodes import Geometry, OutsideOfView
from bridge.private import opaque
from bridge.python_numbers import Inputs, Misfit
from bridge.random import SeededInside
from bridge.record import recorder
from bridge.record.tiers import Tiered
from bridge.sharing import Sharing
from bridge.tracing import Traced
from torchfunc_jax import _explain
from torchfunc_jax.functional_call import SWAPPING


@opaque
def jit(
    func: Callable[..., Any] | None = None, *, donate: int | Sequence[int] = (), static_argnums: int | Sequence[int] = (),
    max_programs: int = 64,
) -> Any:
    """Compile a function of tensors into one XLA program; also transforms (``jit(vmap(grad(f)))``) and modules.

    The function's Python runs once for each combination of tree structure, shapes, dtypes, static arguments, PyTorch's ambient state
    (autocast, default dtype and device, ...), and the modules, hooks and Python values that it uses. Tensors it captures are inputs, read
    at each call; tensors it changes in place are changed when the call returns; random numbers are drawn from torch's generator, anew at
    each call. Arguments that share memory, of which the function writes to one, are left to the function itself, without compilation.

    A Python float or int is static when it is first seen. When it changes, it becomes an input of the program, unless the function asks
    for its value (a comparison, a shape, ``int()``): then it stays static, and each value has a program of its own. Other Python values
    that the function uses (numbers, strings, functions, objects and containers of them in variables, defaults, attributes and classes) are
    static always: when one changes, the function is traced anew. What cannot be seen from outside is read when the function is traced, and
    then never again: the environment, files, clocks, ``globals()["name"]``, the attributes of installed packages, containers of more than
    4096 numbers, and numpy arrays of more than a megabyte. docs/jit.md tells all of it; ``explain`` says why a program was compiled.

    Args:
        func: takes and returns pytrees of tensors and static values; None: returns a decorator.
        donate: positions of arguments whose memory may be reused for the results; they must not be used after the call.
        static_argnums: positions of arguments that are static as a whole; leaves that are no tensors and no numbers always are.
        max_programs: how many programs are kept; beyond it those go that were not used for longest.

    Returns:
        Jitted: callable as func; torch tensors in, torch tensors out, jax.Arrays in, jax.Arrays out.

    Raises:
        DataDependentError: the function asks for values of tensors (``if x.sum() > 0``), or for a shape that depends on them.
        RuntimeError: the function cannot be compiled for what it does to a generator or to memory that its inputs share, and its arguments
            are jax.Arrays, with which PyTorch cannot call it.
        TypeError: a static argument that is not hashable.
        ValueError: max_programs is not positive.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.jit.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import grad, jit
        >>> jit(grad(lambda x: (x ** 2).sum()))(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    if max_programs < 1:
        raise ValueError(f"max_programs: expected a positive number, got {max_programs}")
    if func is None:
        return functools.partial(jit, donate=donate, static_argnums=static_argnums, max_programs=max_programs)
    return Jitted(func, _positions(donate), _positions(static_argnums), max_programs)


def _positions(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramInfo:
    """One program that a jitted function keeps.

    Attributes:
        arguments: each argument leaf with its shape and dtype, its value, or "input" for a Python number that is one.
        why: why it was compiled, in sentences.
        operations: how many operations the program had before XLA optimized it.
        seconds: what it took to trace, to compile and to run it for the first time.
        calls: how often it has been called.
    """

    arguments: tuple[str, ...]
    why: str
    operations: int
    seconds: float
    calls: int


class _Family:
    """The programs for calls that differ in nothing but Python numbers."""

    __slots__ = ("by_value", "changing", "first", "programs", "watched")

    def __init__(self) -> None:
        self.changing: frozenset[int] = frozenset()  # which of the numbers are inputs
        self.by_value: set[int] = set()  # which ones the function asks the value of
        self.first: tuple[list[Any], _Compiled] | None = None  # a program with static numbers
        self.programs: dict[Any, list[_Compiled]] = {}
        self.watched: list[Any] = []

    def key(self, numbers: Sequence[Any]) -> Any:
        return tuple([None if k in self.changing else identical(x) for k, x in enumerate(numbers)])

    def find(self, numbers: Sequence[Any]) -> list[_Compiled]:
        """The programs for these numbers, those first that take them as inputs."""
        found = self.programs.get(self.key(numbers), [])
        return [*found, *self.programs.get(tuple(map(identical, numbers)), ())] if self.changing else found

    def to_change(self, numbers: Sequence[Any]) -> frozenset[int]:
        """Which of these numbers should be inputs."""
        if self.first is None:
            return frozenset()
        differ = {k for k, (x, y) in enumerate(zip(numbers, self.first[0], strict=True)) if identical(x) != identical(y)}
        return frozenset((self.changing | differ) - self.by_value)


class Jitted:
    """What ``jit`` returns: callable as the function, with a look at what XLA made of it.

    Copies and pickles of it hold the function and no programs.
    """

    def __init__(
        self, func: Callable[..., Any], donate: tuple[int, ...] = (), static_argnums: tuple[int, ...] = (), max_programs: int = 64
    ) -> None:
        self._func, self._donate, self._static, self._most = func, donate, static_argnums, max_programs
        self._start()
        functools.update_wrapper(self, func, updated=())

    def _start(self) -> None:
        self._families: dict[Any, _Family] = {}
        self._clock = itertools.count()
        self._warned = False
        self._lock = threading.RLock()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> Any:
        name = getattr(self, "__qualname__", None)
        found: Any = sys.modules.get(getattr(self, "__module__", None) or "")
        for part in (name or "").split("."):
            found = getattr(found, part, None)
        if found is self:  # a decorated function of a module: by its name, as Python does with functions
            return name
        state = {k: v for k, v in self.__dict__.items() if k not in ("_families", "_clock", "_lock", "_warned")}
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]  # typeshed leaves it out

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if state.level is not None or recorder.local.recorder is not None:  # inside a transform or another jit: part of its program
            return self._func(*args, **kwargs)
        refuse_recording()
        if self._static:
            try:
                args = tuple(Same(a) if i in self._static else a for i, a in enumerate(args))
            except TypeError as error:
                raise _unhashable(error) from None
        leaves, spec = trees.flatten((args, kwargs)) if kwargs else trees.flatten(args)
        inputs: list[Any] = []
        numbers: list[Any] = []
        key: list[Any] = [spec]
        recording = torch.is_grad_enabled()
        torch_out = True
        grads = False
        for x in leaves:
            if isinstance(x, torch.Tensor):
                array, signature = tensors.crossing(x)
                inputs.append(array)
                key.append(signature)
                if recording and x.requires_grad:
                    grads = True
                    key.append(-len(inputs))  # signatures are not negative
            elif isinstance(x, jax.Array):
                inputs.append(x)
                key.append((x.shape, x.dtype))
                torch_out = False
            elif type(x) is float or type(x) is int:
                numbers.append(x)
                key.append(type(x))
            else:
                try:
                    key.append(identical(x))
                except TypeError as error:
                    raise _unhashable(error) from None
        key += (torch_out, recording, guards.ambient())
        whole = tuple(key)
        try:
            family = self._families.get(whole)
        except TypeError as error:
            raise _unhashable(error) from None
        misfit = False
        tried: list[_Compiled] = []
        if family is not None:
            for entry in family.find(numbers) if numbers else family.programs.get((), ()):
                tried.append(entry)
                captured = entry.captured()
                if captured is not None:
                    try:
                        return self._run(entry, leaves, inputs, captured, grads, args, kwargs)
                    except _Changed:
                        continue
                    except Misfit:
                        misfit = True
        try:
            entry = self._compile(whole, Call.of(args, kwargs), inputs, numbers, misfit, tried)
        except (OutsideOfView, SeededInside) as error:
            return self._unjitted(str(error), torch_out, args, kwargs)
        captured = entry.captured()
        assert captured is not None
        start = time.perf_counter()
        out = self._run(entry, leaves, inputs, captured, grads, args, kwargs)
        entry.seconds += time.perf_counter() - start
        return out

    def _run(
        self, entry: _Compiled, leaves: list[Any], inputs: list[Any], captured: list[torch.Tensor], grads: bool, args: Any, kwargs: Any
    ) -> Any:
        entry.used = next(self._clock)
        entry.calls += 1
        if entry.program.written or entry.program.strided:
            reason = entry.unfit(leaves, captured)
            if reason:
                return self._unjitted(reason, entry.torch_out, args, kwargs)
        if entry.numbers is not None:
            extra = entry.numbers.evaluated([leaves[i] for i in entry.numbered])
            leaves, inputs = [*leaves, *extra], [*inputs, *extra]
        return entry.call(leaves, inputs, captured, grads)

    def _unjitted(self, reason: str, torch_out: bool, args: Any, kwargs: Any) -> Any:
        """The function itself, where no program can do what it does with its arguments' memory."""
        if not torch_out:
            raise RuntimeError(
                f"jit: {reason}, which a program for jax.Arrays cannot follow; clone what shares memory, set seeds outside of it, "
                "or pass torch tensors"
            )
        _explain.say(self, f"the function itself was called, and no program: {reason}")
        return self._unwrapped(*args, **kwargs)

    def _compile(
        self, key: Any, call: Call, inputs: list[Any], numbers: list[Any], misfit: bool, tried: list[_Compiled]
    ) -> _Compiled:
        with SWAPPING, self._lock:  # in this order everywhere: what is traced may call functional_call
            family = self._families.get(key)
            if family is None:
                family = self._families[key] = _Family()
                family.watched = [weakref.ref(x, functools.partial(_drop, self._families, key)) for x in _mortal(call.leaves)]
            for made in family.find(numbers):  # by another thread, while this one waited
                if not any(made is t for t in tried) and made.captured() is not None:
                    return made
            entry = None if misfit else self._with_inputs(family, call, inputs, numbers, key[-3])
            if entry is None:
                start = time.perf_counter()
                program = staging.stage(self._unwrapped, call)
                entry = _Compiled(program, call, key[-3], self._donated(call))
                entry.seconds = time.perf_counter() - start
                if not misfit and (family.first is None or family.first[1].captured() is None):
                    family.first = (numbers, entry)
            entry.used = next(self._clock)
            sub = family.key(numbers) if entry.numbers is not None else tuple(map(identical, numbers))
            self._describe(entry, family, key, call)
            family.programs[sub] = [*family.programs.get(sub, ()), entry]
            self._families.setdefault(key, family)  # it may have been dropped meanwhile
            self._limit()
            return entry

    def _with_inputs(
        self, family: _Family, call: Call, inputs: list[Any], numbers: list[Any], torch_out: bool
    ) -> _Compiled | None:
        """A program that takes the numbers that change as inputs, but those whose values the function asks for; None if there are none."""
        changing = family.to_change(numbers)
        if not changing or family.first is None or any(isinstance(x, jax.core.Tracer) for x in inputs):
            return None
        values, first = family.first
        captured = first.captured()
        if captured is None:
            return None
        start = time.perf_counter()
        numbered = [i for i, x in enumerate(call.leaves) if type(x) is float or type(x) is int]
        numbers_in = Inputs(numbers)
        leaves = list(call.leaves)
        for k in changing:
            leaves[numbered[k]] = numbers_in.number(k)
        vectors = [torch.zeros(python_numbers.SLOTS, dtype=d) for d in (torch.float64, torch.int64)]
        inner = Call([*leaves, *vectors], trees.joined(trees.joined(call.spec, trees.LEAF, trees.LEAF), trees.flatten({})[1]), [])
        inner.where = [*call.where, len(leaves), len(leaves) + 1]

        def with_numbers(given: Any, floats: torch.Tensor, ints: torch.Tensor) -> Any:
            with numbers_in.tracing(floats, ints):
                return self._unwrapped(*given[0], **given[1])

        try:
            traced = functools.wraps(self._func, updated=())(with_numbers)
            program = staging.stage(traced, inner)
            changing -= numbers_in.asked
            entry = _Compiled(program, inner, torch_out, self._donated(call), numbers_in, numbered, changing)
            entry.traced = traced
            if any(identical(values[k]) != identical(numbers[k]) for k in numbers_in.asked):
                right = not program.types_matter  # no program is there to be compared with
            else:
                right = entry.agrees(first, values, inputs, captured)
        except Exception:  # whatever it is, with static numbers it is seen as it is
            right = False
        family.by_value |= numbers_in.asked if right else changing
        if not right:
            return None
        family.changing = changing
        entry.seconds = time.perf_counter() - start
        return entry

    def _describe(self, entry: _Compiled, family: _Family, key: Any, call: Call) -> None:
        """Write down what the program is for, and why none of those that are there would do."""
        every = [e for f in self._families.values() for es in f.programs.values() for e in es]
        entry.facts = _facts(call, key, entry)
        entry.why = _explain.reason(entry.facts, [(e.facts, e.program.guards) for e in every])
        _explain.say(self, f"a program was compiled: {entry.why}")

    def _limit(self) -> None:
        """Forget the programs that were not used for longest."""
        while True:
            every = [(e.used, k, sub, e) for k, f in self._families.items() for sub, es in f.programs.items() for e in es]
            if len(every) <= self._most:
                return
            if not self._warned:
                self._warned = True
                latest = max(every, key=operator.itemgetter(0))[3]
                warnings.warn(
                    f"jit of {_explain.name_of(self)}: more than max_programs={self._most} programs were compiled, the last because "
                    f"{latest.why}. Those used least recently are forgotten, and compiled again if they are called. Pass what changes as a "
                    f"tensor, or as a Python number among the arguments; docs/jit.md tells more{at_line()}",
                    RuntimeWarning, stacklevel=2,
                )
            _, key, sub, entry = min(every, key=operator.itemgetter(0))
            family = self._families[key]
            family.programs[sub] = [e for e in family.programs[sub] if e is not entry]
            if not family.programs[sub]:
                del family.programs[sub]
            if family.first is not None and family.first[1] is entry:
                family.first = None
            if not family.programs:
                self._families.pop(key, None)
            entry.clear()

    def programs(self) -> list[ProgramInfo]:
        """The programs that are kept, those first that were used last.

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
        every = [e for f in list(self._families.values()) for es in list(f.programs.values()) for e in es]
        return [e.info() for e in sorted(every, key=lambda e: -e.used)]

    def _unwrapped(self, *args: Any, **kwargs: Any) -> Any:
        return self._func(*[a.value if type(a) is Same else a for a in args], **kwargs)

    def _donated(self, call: Call) -> tuple[int, ...]:
        if not self._donate:
            return ()
        args, _ = trees.unflatten(call.spec, list(range(len(call.leaves))))
        chosen = {i for n in self._donate for i in trees.flatten(args[n])[0]}
        return tuple(k for k, i in enumerate(call.where) if i in chosen)

    @opaque
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments as JAX lowers it: ``.as_text()``, ``.cost_analysis()``, ``.compile()``.

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
        call = Call.of(args, kwargs)
        program = staging.stage(self._unwrapped, call)
        with jax.enable_x64(True), compiling.correctly():
            run = jax.jit(staging.forward(program, None), compiler_options=compiling.options())
            return run.lower([staging._aval(x) for x in call.arrays], [staging._aval(p.get()) for p in program.places], staging.ANY_SEEDS)

    @opaque
    def jaxpr(self, *args: Any, **kwargs: Any) -> Any:
        """The program for these arguments as a jaxpr, to be read.

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
        return staging.stage(self._unwrapped, Call.of(args, kwargs)).jaxpr

    def cache_clear(self) -> None:
        """Forget every compiled program."""
        self._families.clear()


def _unhashable(error: TypeError) -> TypeError:
    return TypeError(f"jit: every argument that is no tensor must be hashable; {error}. Pass it inside a closure or as a tensor")


def _mortal(leaves: Sequence[Any]) -> Iterator[Any]:
    """Objects among the arguments that are compared by identity: with one of them, the programs made for it go."""
    for x in leaves:
        x = x.value if type(x) is Same else x
        x = getattr(x, "__self__", x)
        if not isinstance(x, torch.Tensor | jax.Array) and by_identity(x) and weak(x) is not x:
            yield x


def _drop(families: dict[Any, _Family], key: Any, _: Any) -> None:
    families.pop(key, None)


def _facts(call: Call, key: Any, entry: _Compiled) -> list[tuple[str, str]]:
    """What a program is for, in words: names of arguments and states, and what they are."""
    found = []
    numbered = dict(zip(entry.numbered, range(len(entry.numbered)), strict=True))
    recording = key[-2]
    for i, (path, x) in enumerate(zip(trees.paths(call.spec), call.leaves, strict=True)):
        (which, *steps) = path
        name = ("args" if which == 0 else "kwargs") + "".join(f"[{step!r}]" for step in steps)
        if isinstance(x, torch.Tensor):
            what = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            what += f" on {x.device}" if x.device.type != "cpu" else ""
            what += ", requires grad" if recording and x.requires_grad else ""
        elif isinstance(x, jax.Array):
            what = f"a jax.Array, {x.dtype}{list(x.shape)}"
        elif numbered.get(i) in entry.changing:
            what = f"{type(x).__name__}, an input"
        else:
            text = repr(x)
            what = text if len(text) < 80 else f"{text[:77]}..."
            what = f"{type(x).__name__} {what}" if isinstance(x, bool | int | float) else what
        found.append((name, what))
    structure, mode = ("the structure of the arguments", repr(call.spec)), ("grad mode", "on" if recording else "off")
    return [structure, *found, mode, *guards.describe(key[-1])]


class _Changed(Exception):
    """A captured tensor has another shape or dtype than when the program was made."""


class _Compiled:
    """One staged program with what a call needs: its compiled forms, where its captured tensors are, how results come apart."""

    def __init__(
        self, program: staging.Program, call: Call, torch_out: bool, donated: tuple[int, ...], numbers: Inputs | None = None,
        numbered: Sequence[int] = (), changing: frozenset[int] = frozenset(), tiered: bool = False,
    ) -> None:
        self.tiered = tiered
        self.program, self.torch_out, self.where, self.donated = program, torch_out, call.where, donated
        self.numbers, self.numbered = numbers, numbered  # Python numbers that are inputs, and where all numbers are among the leaves
        self.changing = changing  # which of those are inputs
        self.traced: Any = None  # the function that was traced, if nothing else keeps it: its code is looked at
        self.sharing = Sharing(program.written)
        self.facts: list[tuple[str, str]] = []
        self.why = ""
        self.seconds, self.calls, self.used = 0.0, 0, 0
        self.jitted: list[Any] = []
        self.signatures = [tensors.crossing(p.get())[1] for p in program.places]
        avals = [v.aval for v in program.jaxpr.jaxpr.outvars]
        self.packing = staging.Packing.of(avals) if torch_out and len(avals) >= 8 else None
        self.layouts = [tensors.layout(a.shape, a.dtype) for a in avals] if torch_out else []
        # jax.Arrays are computed while the caller goes on, and what they hold is checked no more than JAX does
        self.checked, self.bounds = program.checked() if torch_out else (program, None)
        self.forward = self._jit(staging.forward(self.checked, self.packing))
        self.recorded: dict[Any, Any] = {}
        self.active: dict[Any, Any] = {}
        self.device = self._device(call)
        self.one_out = (  # and it is a tensor on the CPU
            all(program.is_tensor) and program.out_spec is None and not program.written and self.packing is None
            and self.device is not None and self.device.type == "cpu"
        )

    def _jit(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if not self.donated:
            return self._kept(run)
        chosen = set(self.donated)

        def split(kept: list[Any], given: list[Any], captured: Any, seeds: Any) -> Any:
            source = iter(given), iter(kept)
            return run([next(source[0] if i in chosen else source[1]) for i in range(len(self.where))], captured, seeds)

        jitted = self._kept(split, donate_argnums=1)
        return lambda arguments, captured, seeds: jitted(
            [a for i, a in enumerate(arguments) if i not in chosen], [a for i, a in enumerate(arguments) if i in chosen], captured, seeds
        )

    def _kept(self, function: Callable[..., Any], **options: Any) -> Any:
        # jax.Arrays may be those of a user's own jax.jit, inside of which JAX takes no options: a scope at each call says the same
        jitted: Any
        if self.tiered:
            jitted = Tiered(function, self._changed)
        else:
            jitted = jax.jit(function, compiler_options=compiling.options() if self.torch_out else None, **options)
        self.jitted.append(jitted)
        return jitted

    changed: Callable[[], None] | None = None

    def _changed(self) -> None:
        if self.changed is not None:
            self.changed()

    def clear(self) -> None:
        """Give back what was compiled; who still holds the program compiles it anew."""
        for jitted in self.jitted:
            jitted.clear_cache()

    def info(self) -> ProgramInfo:
        arguments = tuple(f"{name}: {what}" for name, what in self.facts if name.startswith(("args", "kwargs")))
        return ProgramInfo(arguments, self.why, len(self.program.jaxpr.jaxpr.eqns), self.seconds, self.calls)

    def _device(self, call: Call) -> torch.device | None:
        from bridge.calls import torch_device

        return torch_device(call.arrays) if self.torch_out else None

    def captured(self) -> list[torch.Tensor] | None:
        """The captured tensors as they are now; None where this program does not fit any more."""
        program = self.program
        if program.guards.needed and not program.guards.hold():
            return None
        if not program.places:
            return []
        try:
            found = [p.get() for p in program.places]
        except (KeyError, IndexError, ValueError, AttributeError, TypeError):
            return None
        for t in found:
            if not isinstance(t, torch.Tensor):
                return None
        return found

    def unfit(self, leaves: list[Any], captured: list[torch.Tensor]) -> str:
        """Why no program can be run on these tensors; "" where there is no reason."""
        arguments = [leaves[i] for i in self.where if i < len(leaves)]
        if self.program.written and self.sharing.overlap(arguments, captured):
            return "two of its inputs share memory, and it writes to one of them"
        for kind, i in self.program.strided:
            t = arguments[i] if kind == "argument" else captured[i]
            if not Geometry.of(t).plain:
                return "it counts from where a tensor's memory begins (as_strided), and the tensor is a view or not contiguous"
        return ""

    def agrees(self, other: _Compiled, values: Sequence[Any], inputs: list[Any], captured: list[torch.Tensor]) -> bool:
        """Whether this program, which takes numbers as inputs, gives what another one does that was made for these numbers."""
        mine, theirs = self.program, other.program
        assert self.numbers is not None
        avals = [[(v.aval.shape, v.aval.dtype) for v in p.jaxpr.jaxpr.outvars] for p in (mine, theirs)]
        if (
            avals[0] != avals[1] or mine.out_spec != theirs.out_spec or mine.is_tensor != theirs.is_tensor or mine.count != theirs.count
            or mine.kinds != theirs.kinds or mine.draws != theirs.draws or mine.generators != theirs.generators
            or mine.written_places() != theirs.written_places()
            or any(x is not y and Same(x) != Same(y) for x, y in zip(self.static(values), theirs.static, strict=True))
        ):
            return False
        own = self.captured()
        if own is None:
            return False
        floats, ints = self.numbers.evaluated(values)
        return all(map(_close, self._tried([*inputs, floats, ints], own), other._tried(inputs, captured)))

    def _tried(self, inputs: list[Any], captured: list[torch.Tensor]) -> list[np.ndarray]:
        """The program's results, with nothing written anywhere."""
        values = [tensors.to_jax(t) for t in captured]
        if self.donated:
            inputs = [np.array(x) for x in inputs]
        with jax.enable_x64(True), compiling.at_call():
            outs = self.forward(inputs, values, staging.ANY_SEEDS)
        return [np.asarray(v) for v in outs]

    def static(self, numbers: Sequence[Any]) -> list[Any]:
        """The leaves of the result that are no tensors, for these numbers."""
        return [x.node.evaluate(numbers) if python_numbers.is_input(x) else x for x in self.program.static]

    def call(self, leaves: list[Any], inputs: list[Any], captured: list[torch.Tensor], grads: bool) -> Any:
        program = self.program
        values = []
        recording = grads
        for t, signature in zip(captured, self.signatures, strict=True):
            array, now = tensors.crossing(t)
            if now != signature:
                raise _Changed
            values.append(array)
            recording = recording or t.requires_grad
        if recording and torch.is_grad_enabled() and self.torch_out:
            active = self._active(leaves, captured)
            if any(self.pair(*active)[2]):
                return self._recorded(leaves, captured, *active)
        seeds = program.seeds()
        if self.torch_out and compiling.options_suffice():
            with jax.enable_x64(True):
                outs = self.forward(inputs, values, seeds)
        else:
            with jax.enable_x64(True), compiling.correctly():
                if not self.torch_out:
                    values = [jax.device_put(v) for v in values]
                outs = self.forward(inputs, values, seeds)
        if not self.torch_out:
            compiling.warn_of_jit(outs)
            return self._finish_jax(outs, leaves, captured)
        if self.bounds is not None:
            self.bounds.judge(outs.pop())
        if self.one_out:
            outs[0].block_until_ready()
            return tensors.view(outs[0], self.layouts[0])
        total = len(program.jaxpr.jaxpr.outvars)
        if self.packing:
            results = self.packing.unpack(outs, self.device, total)
        else:
            for v in outs:  # looking at them while the program runs takes a core from it, and longer than it saves
                v.block_until_ready()
            results = tensors.views(outs, self.layouts, self.device)
        if program.written:
            jax.block_until_ready(outs)
            return self._finish(results, leaves, captured)
        tree = self._finish(results, leaves, captured)  # while the program still runs
        for v in outs:
            v.block_until_ready()
        return tree

    def _finish(self, results: list[torch.Tensor], leaves: list[Any], captured: list[torch.Tensor]) -> Any:
        program = self.program
        if program.written:
            targets = [leaves[self.where[i]] if kind == "argument" else captured[i] for kind, i in program.written]
            write_back([(t, v) for t, v in zip(targets, results[program.count :], strict=True) if isinstance(t, torch.Tensor)])
        if not program.static or all(program.is_tensor):
            return trees.unflatten(program.out_spec, results[: program.count])
        source: Any = iter(results)
        static = program.static if self.numbers is None else self.static([leaves[i] for i in self.numbered])
        return trees.unflatten(program.out_spec, [next(source) if t else x for x, t in zip(static, program.is_tensor, strict=True)])

    def _finish_jax(self, outs: list[Any], leaves: list[Any], captured: list[torch.Tensor]) -> Any:
        program = self.program
        pairs = [(captured[i], v) for (kind, i), v in zip(program.written, outs[program.count :], strict=True) if kind == "captured"]
        write_back([(t, tensors.to_torch(v, t.device)) for t, v in pairs if is_local(v)])
        source = iter(outs)
        static = program.static if self.numbers is None else self.static([leaves[i] for i in self.numbered])
        return trees.unflatten(program.out_spec, [next(source) if t else x for x, t in zip(static, program.is_tensor, strict=True)])

    def _active(self, leaves: list[Any], captured: list[torch.Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which arguments and which captured tensors torch's autograd goes back to."""
        arguments = [leaves[i] for i in self.where]
        given = tuple([isinstance(x, torch.Tensor) and x.requires_grad and autograd.inexact_dtype(x.dtype) for x in arguments])
        wanted = tuple([x.requires_grad and autograd.inexact_dtype(x.dtype) for x in captured])
        found = self.active.get((given, wanted))
        if found is None:
            reached = self.program.reached([i for i, w in enumerate(given) if w], [i for i, w in enumerate(wanted) if w])
            found = self.active[given, wanted] = reached
        return found

    def _recorded(
        self, leaves: list[Any], captured: list[torch.Tensor], active: tuple[int, ...], active_captured: tuple[int, ...]
    ) -> Any:
        arguments = [leaves[i] for i in self.where]
        written = {id(arguments[i] if kind == "argument" else captured[i]) for kind, i in self.program.written}
        diff = [arguments[i] for i in active] + [captured[i] for i in active_captured]
        # what is written keeps its values of before for the backward pass, as a tensor of its own
        outs = _Program.apply(self, arguments, captured, active, active_captured, *[t.clone() if id(t) in written else t for t in diff])
        return self._finish(list(outs), leaves, captured)

    def pair(self, active: tuple[int, ...], active_captured: tuple[int, ...]) -> tuple[Any, Any, list[bool]]:
        """The compiled forward pass that keeps what the backward pass needs, the compiled backward pass, which outputs require grad."""
        key = (active, active_captured)
        if key not in self.recorded and self.tiered:
            run, back = staging.in_two(self.checked, active, active_captured)
            self.recorded[key] = (self._kept(run), self._kept(back), self.program.kinds_for(active, active_captured))
        if key not in self.recorded:
            run = self._kept(staging.differentiated(self.checked, active, active_captured))
            back = self._kept(functools.partial(staging.pull_back))  # its own: JAX keeps what one function was compiled to
            self.recorded[key] = (run, back, self.program.kinds_for(active, active_captured))
        return self.recorded[key]


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two results differ by no more than rounding."""
    if a.dtype.kind in "biu":
        return bool(np.array_equal(a, b))
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    tolerance = float(jnp.finfo(a.dtype).eps) ** 0.5
    a, b = a.astype(kind), b.astype(kind)
    finite = np.abs(b[np.isfinite(b)])
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * float(finite.max() if finite.size else 0), equal_nan=True))


class _Program(torch.autograd.Function):
    """One compiled program as one node of torch's graph; its backward is one compiled program too."""

    @staticmethod
    @opaque
    def forward(
        ctx: Any, compiled: _Compiled, arguments: list[Any], captured: list[torch.Tensor], active: Any, active_captured: Any,
        *diff: torch.Tensor,
    ) -> Any:
        run, _, kinds = compiled.pair(active, active_captured)
        seeds = compiled.program.seeds()
        inputs = [tensors.to_jax(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        values = [tensors.to_jax(t) for t in captured]
        with jax.enable_x64(True), compiling.at_call():
            outs, rest, pull = run(inputs, values, seeds)
        if compiled.bounds is not None:
            compiled.bounds.judge(rest.pop())
        floats, others = iter(outs), iter(rest)
        held = autograd.addresses(pull)
        avoid = held | {a.unsafe_buffer_pointer() for a in (*inputs, *values) if is_local(a)}
        results = [tensors.to_torch(next(floats) if kind else next(others), compiled.device, avoid) for kind in kinds]
        ctx.compiled, ctx.arguments, ctx.captured, ctx.seeds, ctx.pull = compiled, arguments, captured, seeds, pull
        ctx.active, ctx.active_captured, ctx.kinds = active, active_captured, kinds
        written = {id(arguments[i] if kind == "argument" else captured[i]) for kind, i in compiled.program.written}
        read = [t for t in (*arguments, *captured) if id(t) not in written]
        ctx.versions, ctx.every_version = autograd.kept_by(held, read), autograd.versions(read)
        ctx.save_for_backward(*diff)
        ctx.mark_non_differentiable(*[t for t, kind in zip(results, kinds, strict=True) if not kind])
        ctx.set_materialize_grads(False)
        ctx.like = [(t.shape, t.dtype, t.device) for t, kind in zip(results, kinds, strict=True) if kind]
        return tuple(results)

    @staticmethod
    @opaque
    def backward(ctx: Any, *cotangents: Any) -> Any:
        diff = ctx.saved_tensors  # raises where one was changed in place since
        autograd.check_unchanged(ctx.versions)
        given = [c for c, kind in zip(cotangents, ctx.kinds, strict=True) if kind]
        direct = ctx.compiled.program.direct(ctx.active, ctx.active_captured, [c is not None for c in cotangents])
        cts = autograd.materialized(given, ctx.like)
        if torch.is_grad_enabled() or any(type(c) is Traced for c in cts):
            autograd.check_unchanged(ctx.every_version)  # the program is run again, on the tensors as they are now
            grads = _again(ctx, diff, cts)
            if any(c is None for c in given):
                grads = [g if d else None for g, d in zip(grads, direct, strict=True)]
        else:
            _, back, _ = ctx.compiled.pair(ctx.active, ctx.active_captured)
            inputs = [tensors.to_jax(c) for c in cts]
            try:
                with jax.enable_x64(True), compiling.at_call():
                    found = back(ctx.pull, inputs)
            except ValueError as error:
                raise reworded(error) from error.__cause__
            need = [n and d for n, d in zip(ctx.needs_input_grad[5:], direct, strict=True)]
            grads = [tensors.to_torch(g, t.device) if n else None for g, t, n in zip(found, diff, need, strict=True)]
        return (None, None, None, None, None, *grads)


def _again(ctx: Any, diff: Sequence[torch.Tensor], cts: Sequence[torch.Tensor]) -> list[Any]:
    """The backward pass as a computation that torch's autograd can go back through (double backward)."""
    from bridge.calls import Result, apply

    run = staging.differentiated(ctx.compiled.program, ctx.active, ctx.active_captured)
    n = len(diff)
    split = len(ctx.active)
    arguments = [tensors.to_jax(x) if isinstance(x, torch.Tensor) else x for x in ctx.arguments]
    captured = [tensors.to_jax(t) for t in ctx.captured]

    def backward(values: list[Any]) -> Result:
        args, caps = list(arguments), list(captured)
        for i, v in zip(ctx.active, values[:split], strict=True):
            args[i] = v
        for i, v in zip(ctx.active_captured, values[split:n], strict=True):
            caps[i] = v
        _, _, pull = run(args, caps, ctx.seeds)
        return Result(staging.pull_back(pull, values[n:]))

    outs, _ = apply(backward, [*diff, *cts])
    return outs


__all__ = ["Jitted", "ProgramInfo", "Traced", "jit"]
