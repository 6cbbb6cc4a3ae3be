"""jit: a torch function compiled into one XLA program."""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridge import autograd, compiling, staging, tensors, trees
from bridge.calls import Call, is_local, refuse_recording, write_back
from bridge.errors import reworded
from bridge.levels import state
from bridge.private import opaque
from bridge.tracing import Traced
from torchfunc_jax.functional_call import SWAPPING


@opaque
def jit(
    func: Callable[..., Any] | None = None, *, donate: int | Sequence[int] = (), static_argnums: int | Sequence[int] = (),
) -> Any:
    """Compile a function of tensors into one XLA program; also transforms (``jit(vmap(grad(f)))``) and modules.

    The function's Python runs once for each combination of tree structure, shapes, dtypes, other (static) arguments, and the ``training``
    flags and hooks of the modules it uses. Tensors it captures are inputs, read at each call; tensors it changes in place are changed
    when the call returns; random numbers are drawn from torch's generator, anew at each call.

    Args:
        func: takes and returns pytrees of tensors and static values; None: returns a decorator.
        donate: positions of arguments whose memory may be reused for the results; they must not be used after the call.
        static_argnums: positions of arguments that are static as a whole; leaves that are no tensors always are, by their value.

    Returns:
        Jitted: callable as func; torch tensors in, torch tensors out, jax.Arrays in, jax.Arrays out.

    Raises:
        DataDependentError: the function asks for values of tensors (``if x.sum() > 0``), or for a shape that depends on them.
        TypeError: a static argument that is not hashable.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.jit.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import grad, jit
        >>> jit(grad(lambda x: (x ** 2).sum()))(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    if func is None:
        return functools.partial(jit, donate=donate, static_argnums=static_argnums)
    return Jitted(func, _positions(donate), _positions(static_argnums))


def _positions(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


class _Static:
    """A whole argument taken as a static value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


class Jitted:
    """What ``jit`` returns: callable as the function, with a look at what XLA made of it."""

    def __init__(self, func: Callable[..., Any], donate: tuple[int, ...] = (), static_argnums: tuple[int, ...] = ()) -> None:
        self._func, self._donate, self._static = func, donate, static_argnums
        self._entries: dict[Any, list[_Compiled]] = {}
        self._lock = threading.RLock()
        functools.update_wrapper(self, func, updated=())

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if state.level is not None:  # inside a transform or another jit: part of its program
            return self._func(*args, **kwargs)
        refuse_recording()
        if self._static:
            args = tuple(_Static(a) if i in self._static else a for i, a in enumerate(args))
        leaves, spec = trees.flatten((args, kwargs)) if kwargs else trees.flatten(args)
        inputs: list[Any] = []
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
                    key.append(len(inputs))
            elif isinstance(x, jax.Array):
                inputs.append(x)
                key.append((x.shape, x.dtype))
                torch_out = False
            else:
                key.append((type(x), x))
        key += (torch_out, recording, torch.get_default_dtype(), torch.get_float32_matmul_precision())
        try:
            entries = self._entries.get(tuple(key))
        except TypeError as error:
            raise TypeError(
                f"jit: every argument that is no tensor must be hashable; {error}. Pass it inside a closure or as a tensor"
            ) from None
        for entry in entries or ():
            captured = entry.captured()
            if captured is not None:
                return entry.call(leaves, inputs, captured, grads)
        entry = self._compile(tuple(key), Call.of(args, kwargs))
        return entry.call(leaves, inputs, entry.captured(), grads)

    def _compile(self, key: Any, call: Call) -> _Compiled:
        with SWAPPING, self._lock:  # in this order everywhere: what is traced may call functional_call
            for entry in self._entries.get(key, ()):
                if entry.captured() is not None:
                    return entry
            program = staging.stage(self._unwrapped, call)
            entry = _Compiled(program, call, key[-4], self._donated(call))
            self._entries.setdefault(key, []).append(entry)
            return entry

    def _unwrapped(self, *args: Any, **kwargs: Any) -> Any:
        return self._func(*[a.value if isinstance(a, _Static) else a for a in args], **kwargs)

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
            return run.lower([staging._aval(x) for x in call.arrays], [staging._aval(p.get()) for p in program.places], staging.NO_SEEDS)

    @opaque
    def jaxpr(self, *args: Any, **kwargs: Any) -> Any:
        """The program for these arguments as a jaxpr, to be read."""
        return staging.stage(self._unwrapped, Call.of(args, kwargs)).jaxpr

    def cache_clear(self) -> None:
        """Forget every compiled program."""
        self._entries.clear()


class _Compiled:
    """One staged program with what a call needs: its compiled forms, where its captured tensors are, how results come apart."""

    def __init__(self, program: staging.Program, call: Call, torch_out: bool, donated: tuple[int, ...]) -> None:
        self.program, self.torch_out, self.where, self.donated = program, torch_out, call.where, donated
        self.guards = [(m, *_mode(m)) for m in program.modules]
        self.signatures = [tensors.crossing(p.get())[1] for p in program.places]
        avals = [v.aval for v in program.jaxpr.jaxpr.outvars]
        self.packing = staging.Packing.of(avals) if torch_out and len(avals) >= 8 else None
        self.layouts = [tensors.layout(a.shape, a.dtype) for a in avals] if torch_out else []
        self.random = program.draws or bool(program.generators)
        self.no_seeds = staging.NO_SEEDS
        # jax.Arrays are computed while the caller goes on, and what they hold is checked no more than JAX does
        self.checked, self.bounds = program.checked() if torch_out else (program, None)
        self.forward = self._jit(staging.forward(self.checked, self.packing))
        self.recorded: dict[Any, Any] = {}
        self.active: dict[Any, Any] = {}
        self.device = self._device(call)
        self.plain_out = all(program.is_tensor) and program.out_spec is None and not program.written

    def _jit(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if not self.donated:
            return jax.jit(run)
        chosen = set(self.donated)

        def split(kept: list[Any], given: list[Any], captured: Any, seeds: Any) -> Any:
            source = iter(given), iter(kept)
            return run([next(source[0] if i in chosen else source[1]) for i in range(len(self.where))], captured, seeds)

        jitted = jax.jit(split, donate_argnums=1)
        return lambda arguments, captured, seeds: jitted(
            [a for i, a in enumerate(arguments) if i not in chosen], [a for i, a in enumerate(arguments) if i in chosen], captured, seeds
        )

    def _device(self, call: Call) -> torch.device | None:
        from bridge.calls import torch_device

        return torch_device(call.arrays) if self.torch_out else None

    def captured(self) -> list[torch.Tensor] | None:
        """The captured tensors as they are now; None where this program does not fit any more."""
        for m, training, hooks in self.guards:
            if m.training is not training or ((m._forward_hooks or m._forward_pre_hooks or hooks) and _mode(m) != (training, hooks)):
                return None
        try:
            return [p.get() for p in self.program.places]
        except (KeyError, IndexError, ValueError):
            return None

    def call(self, leaves: list[Any], inputs: list[Any], captured: list[torch.Tensor], grads: bool) -> Any:
        program = self.program
        values = []
        recording = grads
        for t, signature in zip(captured, self.signatures, strict=True):
            array, now = tensors.crossing(t)
            if now != signature:
                raise RuntimeError(
                    f"jit: a captured tensor changed its shape or dtype to {tuple(t.shape)}, {t.dtype} since the function was compiled; "
                    "pass it as an argument"
                )
            values.append(array)
            recording = recording or t.requires_grad
        if recording and torch.is_grad_enabled() and self.torch_out:
            active = self._active(leaves, captured)
            if any(self.pair(*active)[2]):
                return self._recorded(leaves, captured, *active)
        seeds = program.seeds() if self.random else self.no_seeds
        with jax.enable_x64(True), compiling.correctly():
            if not self.torch_out:
                values = [jax.device_put(v) for v in values]
            outs = self.forward(inputs, values, seeds)
        if not self.torch_out:
            compiling.warn_of_jit(outs)
            return self._finish_jax(outs, leaves, captured)
        if self.bounds is not None:
            self.bounds.judge(outs.pop())
        if self.plain_out and self.packing is None:
            return tensors.to_torch(outs[0], self.device)
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
        source = iter(results)
        return trees.unflatten(program.out_spec, [next(source) if t else x for x, t in zip(program.static, program.is_tensor, strict=True)])

    def _finish_jax(self, outs: list[Any], leaves: list[Any], captured: list[torch.Tensor]) -> Any:
        program = self.program
        pairs = [(captured[i], v) for (kind, i), v in zip(program.written, outs[program.count :], strict=True) if kind == "captured"]
        write_back([(t, tensors.to_torch(v, t.device)) for t, v in pairs if is_local(v)])
        source = iter(outs)
        return trees.unflatten(program.out_spec, [next(source) if t else x for x, t in zip(program.static, program.is_tensor, strict=True)])

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
        outs = _Program.apply(
            self, arguments, captured, active, active_captured, *[arguments[i] for i in active], *[captured[i] for i in active_captured]
        )
        return self._finish(list(outs), leaves, captured)

    def pair(self, active: tuple[int, ...], active_captured: tuple[int, ...]) -> tuple[Any, Any, list[bool]]:
        """The compiled forward pass that keeps what the backward pass needs, the compiled backward pass, which outputs require grad."""
        key = (active, active_captured)
        if key not in self.recorded:
            run = jax.jit(staging.differentiated(self.checked, active, active_captured))
            self.recorded[key] = (run, jax.jit(staging.pull_back), self.program.kinds_for(active, active_captured))
        return self.recorded[key]


def _mode(m: torch.nn.Module) -> tuple[bool, tuple[Any, ...]]:
    hooks = (*map(id, m._forward_hooks.values()), *map(id, m._forward_pre_hooks.values()))
    return m.training, hooks


class _Program(torch.autograd.Function):
    """One compiled program as one node of torch's graph; its backward is one compiled program too."""

    @staticmethod
    @opaque
    def forward(
        ctx: Any, compiled: _Compiled, arguments: list[Any], captured: list[torch.Tensor], active: Any, active_captured: Any,
        *diff: torch.Tensor,
    ) -> Any:
        run, _, kinds = compiled.pair(active, active_captured)
        seeds = compiled.program.seeds() if compiled.random else compiled.no_seeds
        inputs = [tensors.to_jax(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        values = [tensors.to_jax(t) for t in captured]
        with jax.enable_x64(True), compiling.correctly():
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
        return tuple(results)

    @staticmethod
    @opaque
    def backward(ctx: Any, *cotangents: Any) -> Any:
        diff = ctx.saved_tensors  # raises where one was changed in place since
        autograd.check_unchanged(ctx.versions)
        cts = [c for c, kind in zip(cotangents, ctx.kinds, strict=True) if kind]
        if torch.is_grad_enabled() or any(type(c) is Traced for c in cts):
            autograd.check_unchanged(ctx.every_version)  # the program is run again, on the tensors as they are now
            grads = _again(ctx, diff, cts)
        else:
            _, back, _ = ctx.compiled.pair(ctx.active, ctx.active_captured)
            inputs = [tensors.to_jax(c) for c in cts]
            try:
                with jax.enable_x64(True), compiling.correctly():
                    found = back(ctx.pull, inputs)
            except ValueError as error:
                raise reworded(error) from error.__cause__
            need = ctx.needs_input_grad[5:]
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
        _, _, pull = run(args, caps, np.asarray(ctx.seeds))
        return Result(staging.pull_back(pull, values[n:]))

    outs, _ = apply(backward, [*diff, *cts])
    return outs


__all__ = ["Jitted", "Traced", "jit"]
