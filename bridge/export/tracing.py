"""An export: the function is traced at several sizes, one program is made of the traces, and it is
checked at further sizes.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from bridge import compiling
from bridge.boundary.calls import Call
from bridge.boundary.results import put_together, replaced
from bridge.convert import dtypes, tensors, trees
from bridge.export.dimensions import LEAST, Dimensions, Sizes, spread
from bridge.export.exported import FORMATS, Exported, plain, stored
from bridge.export.symbolic import Differs, NoFormula, Replay, where
from bridge.jit.compiled import close
from bridge.jit.program import Program, stage
from bridge.jit.taylor import alone
from bridge.modules import SWAPPING
from bridge.process import having
from bridge.programs import closure_scan
from bridge.trace.levels import state
from bridge.trace.random_keys import SeededInside
from bridge.trace.storage import Geometry
from bridge.trace.torch_random import random_numbers

Trace = tuple[Sizes, Program]
_LARGE = 257  # a size that is tried too, because lowerings and Python may choose by size
_FOLDED = 8  # elements; fewer than the least size that is traced
# a program has this many seeds, one for each torch.Generator; those of two generators are that far
# apart
_SLOTS, _APART = 8, 2**32


def export(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch: Any,
    constraints: Sequence[str],
    weights: str,
    platforms: Sequence[str] | None,
) -> Exported:
    """Implements ``torchfunc_jax.export``."""
    if weights not in FORMATS:
        raise ValueError(
            f"weights: expected one of {', '.join(map(repr, FORMATS))}, got {weights!r}"
        )
    if state.level is not None or state.recorder is not None:
        raise RuntimeError(
            "export: it is called inside of a transform or a jitted function; call it outside"
        )
    if "seed" in kwargs:
        raise ValueError(
            "kwargs: 'seed' is an argument of the exported program itself; "
            "pass the function's by position"
        )
    found = _Export(fn, Call.of(args, dict(kwargs)), batch, constraints, weights)
    errors = []
    for least in LEAST if found.dims.names else LEAST[:1]:
        try:
            return found.exported(least, platforms)
        except Differs as error:
            errors.append(error)
    raise RuntimeError(f"export: {errors[0]}") from errors[0].__cause__


class _Export:
    """One export in progress.

    Attributes:
        tree: the tree of the arguments; each leaf is the number of an array, or None for what is no
            array and static.
        traces: those that the program is made of.
        captured, names, values: the captured tensors, their names, and by these their arrays as
            they are exported.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        call: Call,
        batch: Any,
        constraints: Sequence[str],
        weights: str,
    ) -> None:
        self.fn, self.call = _without_aliases(fn), call
        self.arrays = [
            x if isinstance(x, torch.Tensor) else tensors.to_torch(x) for x in call.arrays
        ]
        numbers = {i: k for k, i in enumerate(call.where)}
        self.tree = plain(
            trees.unflatten(call.spec, [numbers.get(i) for i in range(len(call.leaves))]),
            "the arguments",
        )
        places = sorted((k, path) for path, k in jax.tree_util.tree_leaves_with_path(self.tree))
        self.paths = [
            ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:]) for _, path in places
        ]
        specs = spread(batch, call.spec)
        self.dims = Dimensions(self.arrays, [specs[i] for i in call.where], self.paths, constraints)
        example = self.dims.example if len(self.dims.example) == len(self.dims.names) else None
        # the function's own errors are raised at the sizes that the user gave
        self.proofs = [] if example is None else [(example, self._traced(example))]
        self.name = functools.partial(_names, fn)
        self.wanted = weights

    def _trace(self, least: int) -> None:
        fixed = {
            n
            for x in [*self.arrays, *(_captured(self.proofs[0][1]) if self.proofs else ())]
            for n in x.shape
        }
        sizes = self.dims.sampled(len(self.dims.names) + 3, least, fixed) if self.dims.names else []
        self.traces = [(s, self._traced(s)) for s in sizes] or self.proofs
        self.first = self.traces[0][1]
        self.captured = _captured(self.first)
        self.names = self.name(self.captured)
        self.format = self.wanted if self.captured else "inside"
        # copies: an array that shares a parameter's memory would change with it
        arrays = [np.array(tensors.to_jax(t.detach())) for t in self.captured]
        self.values = {
            name: stored(a, self.format) for name, a in zip(self.names, arrays, strict=True)
        }
        self.random = any(p.is_random for _, p in self.traces)

    def _traced(self, sizes: Sizes) -> Program:
        """The program for these sizes."""
        leaves = list(self.call.leaves)
        for i, x, shape in zip(self.call.where, self.arrays, self.dims.at(sizes), strict=True):
            leaves[i] = torch.zeros(shape, dtype=x.dtype, device=x.device).requires_grad_(
                x.requires_grad
            )
        try:
            # operations on tables, such as positions or a mask, stay operations, because their
            # results depend on sizes
            with (
                random_numbers("jax"),
                SWAPPING,
                having(state, folded=_FOLDED, any_size=bool(self.dims.names), exporting=True),
            ):
                program = stage(self.fn, Call(leaves, self.call.spec, self.call.where))
        except SeededInside as error:
            raise RuntimeError(f"export: {error}") from None
        except Exception as error:
            if sizes != self.dims.example:
                error.add_note(
                    f"export: the function raised this at the sizes {sizes}. Name in `batch` only "
                    "the dimensions that may have other sizes, and say in `constraints` which "
                    "sizes they may have."
                )
            raise
        for i in program.strided:
            if (
                i >= len(self.arrays)
                and not Geometry.of(program.places[i - len(self.arrays)].get()).plain
            ):
                raise RuntimeError(
                    "export: as_strided counts from where the memory of a captured tensor begins, "
                    "and the tensor is a view"
                )
        return program

    # -- the program with symbolic sizes -----------------------------------------------------------
    def run(
        self,
        traces: Sequence[Trace],
        weights: Mapping[str, Any],
        /,
        *args: Any,
        seed: Any = None,
        **kwargs: Any,
    ) -> Any:
        """What the exported program returns, on JAX values of symbolic shapes."""
        first, programs = self.first, [p for _, p in traces]
        for p in programs:
            if list(map(id, _captured(p))) != list(map(id, self.captured)):
                raise Differs("the function uses other tensors from outside at other sizes")
            if (p.out_spec, p.is_tensor, p.count, p.written) != (
                first.out_spec,
                first.is_tensor,
                first.count,
                first.written,
            ):
                raise Differs(
                    "the function returns another tree, or writes to other tensors, at other sizes"
                )
        replay = Replay([sizes for sizes, _ in traces], self.dims.symbols)
        places, values = map(jax.tree_util.tree_leaves, (self.tree, (args, kwargs)))
        operands = replaced([None] * len(first.jaxpr.jaxpr.invars), places, values)
        for position, (name, t) in enumerate(
            zip(self.names, self.captured, strict=True), len(self.arrays)
        ):
            value, dtype = weights[name], dtypes.to_jax(t.dtype)
            operands[position] = (
                value if value.dtype == dtype else lax.bitcast_convert_type(value, dtype)
            )
        operands[-1] = (
            np.zeros(_SLOTS, np.int64)
            if seed is None
            else seed.astype(np.int64) + np.arange(_SLOTS) * _APART
        )
        values = replay([p.jaxpr for p in programs], operands)
        static = [
            _static(replay, found) for found in zip(*[p.static for p in programs], strict=True)
        ]
        return self._tree(values, static)

    def _tree(self, values: Sequence[Any], static: Sequence[Any]) -> Any:
        """What the exported program returns, from the program's results and the leaves of its
        output that are no tensors.
        """
        first = self.first
        out = plain(
            put_together(values[: first.count], (first.out_spec, static, first.is_tensor)),
            "the outputs",
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(out):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
                name = f"output{jax.tree_util.keystr(path)}"
                raise TypeError(
                    f"export: {name} is a {type(leaf).__name__}; expected tensors, numbers and None"
                )
        return (
            (out, dict(zip(self._written(), values[first.count :], strict=True)))
            if first.written
            else out
        )

    def _written(self) -> list[str]:
        return [[*self.paths, *self.names][i] for i in self.first.written]

    def _given(self, array: Callable[[int], Any], seed: Any) -> tuple[Any, Any]:
        """(args, kwargs) of the program after the weights; array: gives the array with a number."""
        args, kwargs = jax.tree_util.tree_map(array, self.tree)
        return args, {**kwargs, "seed": seed} if self.random else kwargs

    def _lowered(self, platforms: Sequence[str] | None) -> jax.export.Exported:
        run = functools.partial(self.run, self.traces)
        args, kwargs = self._given(self._aval, jax.ShapeDtypeStruct((), np.uint32))
        if self.format == "inside":
            run = functools.partial(run, self.values)
        else:
            args = (jax.tree_util.tree_map(jax.typeof, self.values), *args)
        try:
            return jax.export.export(jax.jit(run), platforms=platforms)(*args, **kwargs)
        except Differs:
            raise
        except Exception as error:
            raise _blamed(jax.make_jaxpr(run)(*args, **kwargs), platforms, error) from error

    def _aval(self, k: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.dims.shapes[k], dtypes.to_jax(self.arrays[k].dtype))

    # -- its proof ---------------------------------------------------------------------------------
    def exported(self, least: int, platforms: Sequence[str] | None) -> Exported:
        """The export by traces at sizes from ``least`` on."""
        self._trace(least)
        with jax.enable_x64(True), compiling.correctly():
            proofs, small = list(self.proofs), []
            large = {
                name: max(_LARGE, 2 * self.dims.example.get(name, 0)) for name in self.dims.names
            }
            if large and self.dims.allowed(large):
                with contextlib.suppress(Exception):  # the function need not take such sizes
                    proofs.append((large, self._traced(large)))
            for name in self.dims.names:
                sizes, trace = self._least(name)
                # the function refuses smaller ones
                if self.dims.allowed({**sizes, name: sizes[name] - 1}):
                    self.dims.require(f"{name} >= {sizes[name]}")
                small.append((name, sizes, trace))
            program, wrong = self._lowered(platforms), set[str]()
            mine = (
                program
                if jax.default_backend() in program.platforms
                else self._lowered([jax.default_backend()])
            )
            for name, sizes, trace in [
                ("", *self.traces[0]),
                *self._doubtful([*[("", *t) for t in proofs], *small], wrong),
            ]:
                if not self._agrees(mine, sizes, trace):
                    if not name:
                        raise Differs(
                            f"the program made of the sizes {[s for s, _ in self.traces]} gives "
                            f"other results at {sizes}"
                        )
                    wrong.add(name)
            # the least size is a case of its own: 1 broadcasts, and squeeze removes it
            for name, sizes, _ in small:
                if name in wrong:
                    self.dims.require(f"{name} >= {sizes[name] + 1}")
            if wrong:
                program = self._lowered(platforms)
        beside = None if self.format == "inside" else self.values
        return Exported(
            program,
            beside,
            self.format,
            tuple(self._written()),
            self.random,
            tuple(self.dims.constraints),
        )

    def _doubtful(
        self, proofs: Sequence[tuple[str, Sizes, Program]], wrong: set[str]
    ) -> list[tuple[str, Sizes, Program]]:
        """The further traces that are not the same program with other sizes, so that only results
        can be compared.

        Each comes with the name of the symbol of which it has the least size, or "". Names for
        which a number is wrong go into ``wrong``.
        """
        with contextlib.suppress(NoFormula):
            if self._same([(s, p) for _, s, p in proofs]):
                return []
        found = []
        for name, sizes, program in proofs:
            try:
                if not self._same([(sizes, program)]):
                    found.append((name, sizes, program))
            except NoFormula:
                if not name:
                    raise
                wrong.add(name)
        return found

    def _least(self, name: str) -> Trace:
        """The trace at the least size of a symbol at which the function can be traced."""
        found = self.traces[0]

        def works(n: int) -> bool:
            nonlocal found
            sizes = {**found[0], name: n}
            if not self.dims.allowed(sizes):
                return False
            try:
                found = sizes, self._traced(sizes)
            except Exception:  # whatever it is, PyTorch does not take this size
                return False
            return True

        high = found[0][name]
        if not any(map(works, range(1, min(high, 3)))):  # it mostly is 1 or 2
            # the last size that works is the least
            bisect.bisect_left(range(3, high), True, key=works)
        return found

    def _same(self, more: Sequence[Trace]) -> bool:
        """Whether further traces are the same program with other sizes; raises NoFormula if their
        numbers are others.
        """
        args, kwargs = self._given(self._aval, jax.ShapeDtypeStruct((), np.uint32))
        try:
            jax.eval_shape(
                functools.partial(self.run, [*self.traces, *more], self.values), *args, **kwargs
            )
        except NoFormula:
            raise
        except Differs:
            return False
        return True

    def _agrees(self, exported: jax.export.Exported, sizes: Sizes, program: Program) -> bool:
        """Whether the exported program gives what a program for these sizes gives, for the
        arguments repeated to these sizes.
        """
        given = [np.asarray(tensors.to_jax(x.detach())) for x in self.arrays]
        arrays = [_resized(x, shape) for x, shape in zip(given, self.dims.at(sizes), strict=True)]
        args, kwargs = self._given(arrays.__getitem__, np.uint32(0))
        beside = () if self.format == "inside" else (self.values,)
        try:
            found = exported.call(*beside, *args, **kwargs)
        except ValueError:  # JAX: the sizes contradict what the program has assumed
            return False
        captured = [tensors.to_jax(t.detach()) for t in self.captured]
        seeds = np.arange(_SLOTS) * _APART
        expected = jax.jit(lambda inputs: program.run(inputs, (seeds, [])))([*arrays, *captured])
        leaves = [
            jax.tree_util.tree_leaves(tree)
            for tree in (found, self._tree(expected, program.static))
        ]
        eps = _coarsest(program.jaxpr.jaxpr)
        return all(
            np.shape(a) == np.shape(b) and close(np.asarray(a), np.asarray(b), eps)
            for a, b in zip(*leaves, strict=True)
        )


def _coarsest(jaxpr: Any) -> float:
    """The largest eps of the floating dtypes that a program computes in."""
    dtypes_in = {
        v.aval.dtype
        for e in jaxpr.eqns
        for v in e.outvars
        if jnp.issubdtype(getattr(v.aval, "dtype", np.bool_), jnp.inexact)
    }
    return max((float(jnp.finfo(d).eps) for d in dtypes_in), default=0.0)


def _blamed(closed: ClosedJaxpr, platforms: Sequence[str] | None, error: Exception) -> Differs:
    """The error that names the first equation of a program that JAX cannot export; error: JAX's for
    the whole program.
    """
    for eqn in closed.jaxpr.eqns:
        avals: list[Any] = [v.aval for v in eqn.invars]
        given = [
            np.asarray(v.val, a.dtype)
            if isinstance(v, Literal)
            else jax.ShapeDtypeStruct(a.shape, a.dtype)
            for v, a in zip(eqn.invars, avals, strict=True)
        ]
        try:
            jax.export.export(jax.jit(alone(closed.jaxpr, eqn)), platforms=platforms)(*given)
        except Exception as found:
            return Differs(f"{eqn.primitive.name}{where([eqn])} cannot be exported: {found}")
    return Differs(str(error))


def _resized(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The array with its rows repeated, or some of them left out, in each dimension."""
    for k, n in enumerate(shape):
        x = np.take(x, np.arange(n) % max(x.shape[k], 1), k)
    return x


def _static(replay: Replay, found: Sequence[Any]) -> Any:
    """A leaf of the output that is no tensor: a size, or the same at all sizes."""
    if all(type(x) is int for x in found):
        return jnp.asarray(replay.size(tuple(found)))
    if any(x is not found[0] and x != found[0] for x in found):
        raise Differs(
            f"the function returns {', '.join(map(repr, found))} at the sizes {replay.sizes}"
        )
    return found[0]


def _captured(program: Program) -> list[torch.Tensor]:
    return [p.get() for p in program.places]


def _without_aliases(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn whose outputs are tensors of their own: those that share memory with an input would be no
    outputs of its program.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return trees.map_leaves(
            lambda x: x.clone() if isinstance(x, torch.Tensor) else x, fn(*args, **kwargs)
        )

    return run


def _names(fn: Callable[..., Any], captured: Sequence[torch.Tensor]) -> list[str]:
    """A name for each captured tensor: as in the state_dict of the module, else of the variable."""
    found = closure_scan.scan(fn, deeper=True)
    inner = {
        id(m) for module in found.modules.values() for m in module.modules() if m is not module
    }
    outer = [m for m in found.modules.values() if id(m) not in inner]
    names: dict[int, str] = {}
    for k, module in enumerate(outer):
        for name, t in [*module.named_parameters(), *module.named_buffers()]:
            names.setdefault(id(t), name if len(outer) == 1 else f"{k}.{name}")
    for k, t in enumerate(captured):
        key = found.tensors[id(t)][1].key if id(t) in found.tensors else None
        if id(t) not in names:
            name = key if isinstance(key, str) else f"captured.{k}"
            names[id(t)] = name if name not in names.values() else f"{name}.{k}"
    return [names[id(t)] for t in captured]
