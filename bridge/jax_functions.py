"""JAX functions as torch functions: traced once for each set of shapes, compiled outside of a
trace, and a part of the program inside.

- ``from_jax`` takes a call's arguments apart and looks for its program.
- ``_Program`` is the program: a torch function of tensors, which the dispatcher's modes, our traces
  and a record see as one operator.
- ``_Node`` is a call in torch's graph and under torch's own transforms. Each of its rules is a
  program again.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, subjaxprs
from torch.overrides import handle_torch_function, has_torch_function

from bridge import modules, private, private_jax
from bridge.boundary import autograd
from bridge.boundary.calls import apply
from bridge.boundary.results import Result, conj, inexact, inexact_dtype, pick
from bridge.cache_keys import Same
from bridge.convert import dtypes, tensors, trees
from bridge.errors import public
from bridge.jit.jitted import Jitted
from bridge.jit.program import aval
from bridge.jit.simplify import simplified
from bridge.lowering.common import varying
from bridge.programs.closure_scan import Unsearched
from bridge.trace import python_numbers, tracing
from bridge.trace.levels import Unrecordable, state

_SYMBOLIC = jax.custom_derivatives.SymbolicZero
_WIDE = frozenset({torch.float64, torch.complex128})
_INT32 = np.iinfo(np.int32)
_NUMBERS = (bool, int, float, complex)


class _Program(Unsearched):
    """A JAX function of a flat list of arrays, traced for given shapes and dtypes; it is called
    with torch tensors.

    Args:
        function: from arrays to a list of arrays.
        avals: the shapes and dtypes that it is traced for; a tensor of another dtype is converted.
        wide: whether 64-bit types are enabled in it, and in its derivatives.
    """

    def __init__(
        self, function: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct], wide: bool
    ) -> None:
        self.avals: list[Any] = list(avals)
        self.wide = wide
        with jax.enable_x64(wide):
            jaxpr = jax.make_jaxpr(function)(*avals)
        self.jaxpr: ClosedJaxpr = jaxpr.replace(jaxpr=simplified(jaxpr.jaxpr))
        self.out_avals: list[Any] = list(map(aval, jaxpr.out_avals))
        self.active = tuple([k for k, a in enumerate(self.avals) if inexact(a)])
        self.kinds = list(map(inexact, self.out_avals))
        self.jitted = Jitted(self)
        self._derived: dict[Any, _Program] = {}
        run = jax.jit(self._evaluated)
        rules = set() if wide else _primitives(self.jaxpr.jaxpr)
        self._run = (
            self._with_vjp(run)
            if "custom_vjp_call" in rules
            else self._with_jvp(run)
            if "custom_jvp_call" in rules
            else run
        )

    def _evaluated(self, *values: jax.Array) -> list[jax.Array]:
        return jax.core.eval_jaxpr(self.jaxpr.jaxpr, self.jaxpr.consts, *values)

    def uses(self, k: int) -> bool:
        """Whether the function uses its k-th argument."""
        jaxpr = self.jaxpr.jaxpr
        return any(
            jaxpr.invars[k] is v
            for v in itertools.chain(jaxpr.outvars, *[eqn.invars for eqn in jaxpr.eqns])
        )

    # -- on JAX values: a rule of the user's, whenever it runs, runs with the types of the function
    def run(self, *values: jax.Array) -> list[jax.Array]:
        given = zip(values, self.avals, strict=True)
        return self._run(
            *[v if v.dtype == a.dtype else lax.convert_element_type(v, a.dtype) for v, a in given]
        )

    def _with_vjp(self, run: Callable[..., Any]) -> Callable[..., Any]:
        count, tree = len(self.kinds), list[Any]()

        def held(*values: jax.Array) -> list[jax.Array]:
            function, given = self._of(values, self.active)
            outs, pull = varying.vjp(function, *given)
            leaves, tree[:] = jax.tree.flatten(pull)[0], [jax.tree.structure(pull)]
            return [*outs, *leaves]

        def pulled(*values: jax.Array) -> list[jax.Array]:
            split = len(values) - sum(self.kinds)
            return jax.tree.unflatten(tree[0], values[:split])(self._among_outs(values[split:]))

        def forward(*values: jax.Array) -> Any:
            every = self._other("held", held, self.avals).run(*values)
            return every[:count], every[count:]

        def backward(kept: list[jax.Array], cotangents: list[Any]) -> Any:
            given = [*kept, *pick(cotangents, self.kinds)]
            found = iter(self._other("pulled", pulled, list(map(aval, given))).run(*given))
            return tuple(
                [next(found) if k in self.active else None for k in range(len(self.avals))]
            )

        rules = jax.custom_vjp(run)
        rules.defvjp(forward, backward)
        return rules

    def _with_jvp(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def push(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
            active = tuple([k for k, t in enumerate(tangents) if not isinstance(t, _SYMBOLIC)])
            every = self.pushed(active).run(*primals, *[tangents[k] for k in active])
            # the outputs come from a call of their own: JAX's linearize wants values of them that
            # depend on no tangent
            return self._run(*primals), self._among_outs(every[len(self.kinds) :])

        rules = jax.custom_jvp(run)
        rules.defjvp(push, symbolic_zeros=True)
        return rules

    def _of(
        self, values: Sequence[jax.Array], active: Sequence[int]
    ) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
        """The function of its active arguments alone, and their values."""

        def of(*those: jax.Array) -> list[jax.Array]:
            given = dict(zip(active, those, strict=True))
            return self._evaluated(*[given.get(k, v) for k, v in enumerate(values)])

        return of, tuple([values[k] for k in active])

    def _among_outs(self, values: Sequence[Any]) -> list[Any]:
        """Tangents, or cotangents, of the outputs that have some, and of the others JAX's zeros for
        those.
        """
        source = iter(values)
        return [
            next(source) if kind else np.zeros(a.shape, jax.dtypes.float0)
            for kind, a in zip(self.kinds, self.out_avals, strict=True)
        ]

    # -- on torch tensors --------------------------------------------------------------------------
    @private.opaque
    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        given = tuple(map(private.alive, given))
        if has_torch_function(given):  # a record, a mode of the user's, traced tensors
            return handle_torch_function(self, given, *given)
        if state.level is not None:
            return apply(lambda values: Result(self.run(*values)), given)[0]
        if private.transformed_by_torch() or any(t.is_meta for t in given):
            return list(_Node.apply(self, None, *given))
        if state.recorder is not None:
            state.recorder.go_on(Unrecordable("a JAX function without tensors"))
            return self(*given)
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            # what a hook on saved tensors (a checkpoint, save_on_cpu) shall see are the arguments,
            # so the backward keeps nothing else
            return list(
                _Node.apply(self, [] if private.saved_tensor_hooks() is None else None, *given)
            )
        return self.jitted(*given)

    # -- its derivatives and its map, as programs --------------------------------------------------
    def _other(
        self, key: Any, function: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct]
    ) -> _Program:
        if key not in self._derived:
            self._derived[key] = _Program(function, avals, self.wide)
        return self._derived[key]

    def pulled(self, active: tuple[int, ...]) -> _Program:
        """From the arguments and cotangents of the floating-point outputs to the gradients of the
        active arguments.
        """
        n = len(self.avals)

        def pull(*values: jax.Array) -> list[jax.Array]:
            function, given = self._of(values[:n], active)
            _, back = varying.vjp(function, *given)
            return [conj(g) for g in back(self._among_outs([conj(c) for c in values[n:]]))]

        return self._other(("vjp", active), pull, [*self.avals, *pick(self.out_avals, self.kinds)])

    def pushed(self, active: tuple[int, ...]) -> _Program:
        """From the arguments and tangents of the active ones to the outputs and the tangents of the
        floating-point ones.
        """
        n = len(self.avals)

        def push(*values: jax.Array) -> list[jax.Array]:
            outs, tangents = varying.jvp(*self._of(values[:n], active), values[n:])
            return [*outs, *pick(tangents, self.kinds)]

        return self._other(("jvp", active), push, [*self.avals, *[self.avals[k] for k in active]])

    def mapped(self, dims: tuple[int | None, ...], size: int) -> _Program:
        """Mapped over these dimensions of the arguments; the lanes are the first dimension of the
        outputs.
        """
        avals = [
            a
            if dim is None
            else jax.ShapeDtypeStruct((*a.shape[:dim], size, *a.shape[dim:]), a.dtype)
            for a, dim in zip(self.avals, dims, strict=True)
        ]
        return self._other(
            ("vmap", dims, size), jax.vmap(self._evaluated, in_axes=dims, axis_size=size), avals
        )


def _primitives(jaxpr: Jaxpr) -> set[str]:
    """The names of the primitives in a jaxpr and in the jaxprs inside it."""
    found = [private_jax.called(eqn) for eqn in jaxpr.eqns]
    inner = {*subjaxprs(jaxpr), *[inside for _, inside in found if inside is not None]}
    return {name for name, _ in found}.union(*map(_primitives, inner))


class _Node(autograd.Untransformed):
    """A call of a program as one node of torch's graph, under torch.func's transforms and
    forward-mode AD too.

    Its rules are programs, so that they have rules as well. ``held`` is an empty list if no
    transform is in progress and no hook is on saved tensors: it gets the call's arguments and
    results as a graph of their own, whose backward has kept what it needs. A derivative of the
    backward runs fn again.
    """

    @staticmethod
    def forward(
        program: _Program, held: list[Any] | None, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if any(t.is_meta for t in given):
            return tuple(
                [
                    torch.empty(a.shape, dtype=dtypes.to_torch(a.dtype), device="meta")
                    for a in program.out_avals
                ]
            )
        if held is None:
            return tuple(program(*given))
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.requires_grad) for t in given]
            held[:] = leaves, program.jitted(*leaves)
        return tuple([t.detach() for t in held[1]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.program, ctx.held, *given = inputs
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)
        kinds = [t.requires_grad for t in ctx.held[1]] if ctx.held else ctx.program.kinds
        ctx.mark_non_differentiable(*[t for t, kind in zip(output, kinds, strict=True) if not kind])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        given, program = ctx.saved_tensors, ctx.program
        active = [k for k, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        batched = [c is not None and private.mapped_by_autograd(c) for c in cotangents]
        if (
            ctx.held
            and not any(batched)
            and not torch.is_grad_enabled()
            and not private.transformed_by_torch()
        ):
            leaves, outs = ctx.held
            outs = [out for out, c in zip(outs, cotangents, strict=True) if c is not None]
            cts = [c for c in cotangents if c is not None]
            found = iter(
                torch.autograd.grad(
                    outs, [leaves[k] for k in active], cts, retain_graph=True, allow_unused=True
                )
            )
        else:
            device = tensors.common_device(given)
            like = [
                (a.shape, dtypes.to_torch(a.dtype), device)
                for a in pick(program.out_avals, program.kinds)
            ]
            cts, pulled = (
                autograd.materialized(pick(cotangents, program.kinds), like),
                program.pulled(tuple(active)),
            )
            if not any(batched):
                found = iter(pulled(*given, *cts))
            else:  # by torch.autograd.grad(is_grads_batched=True)
                lanes = [k for k, here in enumerate(pick(batched, program.kinds)) if here]

                def mapped(those: list[torch.Tensor]) -> list[torch.Tensor]:
                    every = dict(zip(lanes, those, strict=True))
                    dims = (
                        *[None] * len(given),
                        *[0 if k in every else None for k in range(len(cts))],
                    )
                    return pulled.mapped(dims, len(those[0]))(
                        *given, *[every.get(k, c) for k, c in enumerate(cts)]
                    )

                found = iter(private.below_autograds_vmap(mapped, [cts[k] for k in lanes]))
        return (None, None, *[next(found) if k in active else None for k in range(len(given))])

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        given, program, tangents = ctx.saved_tensors, ctx.program, tangents[2:]
        active = tuple(
            [k for k, t in enumerate(tangents) if t is not None and inexact_dtype(t.dtype)]
        )
        found = iter(
            program.pushed(active)(*given, *[tangents[k] for k in active])[len(program.kinds) :]
        )
        return tuple([next(found) if kind else None for kind in program.kinds])

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        program: _Program,
        held: None,
        *given: torch.Tensor,
    ) -> tuple[Any, Any]:
        outs = program.mapped(tuple(in_dims[2:]), info.batch_size)(*given)
        return tuple(outs), (0,) * len(outs)


class _Function(Unsearched):
    """What ``from_jax`` is given, and the programs of its calls."""

    def __init__(
        self,
        fn: Callable[..., Any],
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        rng: str | None,
        wide: bool | None,
    ) -> None:
        self.fn, self.argnums, self.argnames, self.rng, self.wide = (
            fn,
            static_argnums,
            static_argnames,
            rng,
            wide,
        )
        self.programs: dict[Any, tuple[_Program, Any]] = {}
        self.lock = threading.RLock()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(
            [self._static(f"args[{i}]", x) if i in self.argnums else x for i, x in enumerate(args)]
        )
        kwargs = {
            name: self._static(name, x) if name in self.argnames else x
            for name, x in kwargs.items()
        }
        leaves, spec = trees.flatten((args, kwargs))
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        in_jax = state.level is None and any(isinstance(x, jax.core.Tracer) for x in arrays)
        if in_jax or (arrays and not any(isinstance(x, torch.Tensor) for x in leaves)):
            values = [
                x.value
                if type(x) is Same
                else tensors.to_jax(x)
                if isinstance(x, torch.Tensor)
                else x
                for x in leaves
            ]
            args, kwargs = trees.unflatten(spec, values)
            return self.fn(*args, **kwargs)
        drawn = self.rng is not None and self.rng not in kwargs
        given, key, device = list[Any](), list[Any](), tensors.common_device(leaves)
        for i, x in enumerate(leaves):
            if isinstance(x, jax.Array | np.ndarray | np.generic):
                x = self._tensor(x, spec, i)
            if isinstance(x, torch.Tensor):
                given.append(x)
                kind = varying.in_type(tracing.value_of(x)) if state.level is not None else {}
                key.append((tuple(x.shape), x.dtype, *kind.items()))
            elif x is None or type(x) is Same:
                key.append(x)
            elif isinstance(x, _NUMBERS) or python_numbers.is_input(x):
                given.append(x)
                key.append(_number_type(x))
            else:
                raise TypeError(
                    f"{_where(spec, i)}: expected a tensor, an array, a number, None or a tree of "
                    f"these, as jax.jit does, got {type(x)}; name the argument in static_argnums "
                    "or static_argnames"
                )
        wide = (
            any(type(k) is tuple and k[1] in _WIDE for k in key) if self.wide is None else self.wide
        )
        program, meta = self._program(spec, tuple(key), drawn, wide)
        made = [x if isinstance(x, torch.Tensor) else self._made(x, wide, device) for x in given]
        if drawn:
            known = torch.zeros(2, dtype=torch.int64, device=device)
            made.append(
                torch.randint_like(known, int(_INT32.max)) if program.uses(len(made)) else known
            )
        out_spec, is_array = meta
        outs = iter(program(*made))
        return trees.unflatten(out_spec, [next(outs) if a else None for a in is_array])

    @staticmethod
    def _static(name: str, x: Any) -> Same:
        try:
            return Same(x)
        except TypeError:
            raise TypeError(
                f"{name}: expected a hashable value, because it is static, got {type(x)}; pass a "
                "tuple, a string, a number or a frozen dataclass, or do not name it in "
                "static_argnums or static_argnames"
            ) from None

    @staticmethod
    def _tensor(x: Any, spec: Any, i: int) -> torch.Tensor:
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{_where(spec, i)}: expected no JAX key beside torch tensors, which cannot hold "
                "one; pass a seed as an integer tensor, or name the argument in rng=, so that its "
                "key comes from torch's generator"
            )
        return tracing.wrap(x) if isinstance(x, jax.core.Tracer) else modules.as_tensor(x)

    @staticmethod
    def _made(x: Any, wide: bool, device: torch.device | None) -> torch.Tensor:
        """A Python number as a tensor, which the program converts to the dtype that JAX gives the
        number.
        """
        kind = _number_type(x)
        if (
            kind is int
            and not wide
            and not python_numbers.is_input(x)
            and not _INT32.min <= x <= _INT32.max
        ):
            raise OverflowError(
                f"expected integers of 32 bits, got {x}; from_jax(..., "
                "enable_x64=True) takes 64 bits"
            )
        return torch.full((), x, dtype=dtypes.to_torch(kind), device=device)

    def _program(
        self, spec: Any, key: tuple[Any, ...], drawn: bool, wide: bool
    ) -> tuple[_Program, Any]:
        whole = (spec, key, drawn, wide)
        with self.lock:
            found = self.programs.get(whole)
            if found is None:
                found = self._traced(*whole)
                if not any(isinstance(c, jax.core.Tracer) for c in found[0].jaxpr.consts):
                    self.programs[whole] = found
            return found

    def _traced(
        self, spec: Any, key: tuple[Any, ...], drawn: bool, wide: bool
    ) -> tuple[_Program, Any]:
        meta: list[Any] = []

        def flat(*values: jax.Array) -> list[jax.Array]:
            source = iter(values)
            args, kwargs = trees.unflatten(
                spec,
                [k.value if type(k) is Same else None if k is None else next(source) for k in key],
            )
            if drawn:
                first, second = next(source)
                kwargs[self.rng] = jax.random.fold_in(jax.random.key(first), second)
            leaves, out_spec = trees.flatten(self.fn(*args, **kwargs))
            meta[:] = out_spec, [x is not None for x in leaves]
            return [self._output(x, out_spec, i) for i, x in enumerate(leaves) if x is not None]

        with jax.enable_x64(wide):
            avals = [_aval(k) for k in key if k is not None and type(k) is not Same]
        avals += [jax.ShapeDtypeStruct((2,), np.int32)] if drawn else []
        return _Program(flat, avals, wide), tuple(meta)

    @staticmethod
    def _output(x: Any, spec: Any, i: int) -> jax.Array:
        array = (
            jnp.asarray(x)
            if isinstance(x, (jax.Array, np.ndarray, np.generic, *_NUMBERS))
            else None
        )
        if array is None or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            what = type(x) if array is None else array.dtype
            raise TypeError(
                f"fn: expected an output of arrays, numbers and None, got {what} at "
                f"{trees.paths(spec)[i]}; return arrays"
            )
        return array


def _number_type(x: Any) -> type:
    if python_numbers.is_input(x):
        return float if type(x) is python_numbers.Float else int
    return next(kind for kind in _NUMBERS if isinstance(x, kind))


def _aval(key: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype that JAX gives a tensor of this shape and dtype, or a Python number of
    this type.
    """
    if isinstance(key, type):
        return jax.ShapeDtypeStruct((), jnp.result_type(key), weak_type=key is not bool)
    return jax.ShapeDtypeStruct(
        key[0], jax.dtypes.canonicalize_dtype(dtypes.to_jax(key[1])), **dict(key[2:])
    )


def _where(spec: Any, i: int) -> str:
    """The name of the i-th leaf of (args, kwargs), such as args[0]['w']."""
    first, *rest = trees.paths(spec)[i]
    return ("kwargs" if first else "args") + "".join(f"[{step!r}]" for step in rest)


def _statics(
    fn: Callable[..., Any], argnums: int | Iterable[int], argnames: str | Iterable[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions and names of the static arguments; an argument that can be passed both ways is
    static both ways.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some functions have no signature
        return numbers, names
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in names if name not in known]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise TypeError(
            "static_argnames: expected names of fn's arguments "
            f"({', '.join(known) or 'it has none'}), got {unknown[0]!r}"
        )
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    numbers = tuple([n + len(positional) if n < 0 else n for n in numbers])
    names = (*names, *[positional[n] for n in numbers if n < len(positional)])
    return (*numbers, *[positional.index(n) for n in names if n in positional]), names


def from_jax(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    rng: str | None = None,
    enable_x64: bool | None = None,
) -> Callable[..., Any]:
    """A JAX function as a torch function: it takes and returns torch tensors, and torch can
    differentiate and map it.

    torch's autograd (backward, double backward, forward mode) and torch.func's transforms work on
    it, and so do this library's transforms and ``jit``, in whose programs it is a part of the
    program. ``jax.custom_vjp``, ``jax.custom_jvp`` and Pallas kernels keep their own rules; a
    function with a custom_vjp has no forward mode, as in JAX.

    The function is treated as ``jax.jit`` treats it: it is traced once for each structure, shapes
    and dtypes of its arguments, and must be pure. What it reads from outside is read when it is
    traced. Outside of a trace it runs compiled.

    Dtypes: a tensor becomes an array of its dtype, and an output a tensor of the array's dtype.
    64-bit types are enabled in the function if an argument is a float64 or complex128 tensor,
    whatever ``jax_enable_x64`` says; otherwise 64-bit integers become 32-bit ones, as in JAX by
    default. Devices: the function runs on the device of the first tensor with dimensions (else of
    the first tensor), as ``bridge.devices`` maps it, and the outputs are there too. Tensors on the
    device meta give tensors on the device meta.

    Args:
        fn: a function of jax.Arrays in any trees, to jax.Arrays in any tree.
        static_argnums, static_argnames: positions and names of arguments that are static: fn gets
            them as they are, and they must be hashable. Each value has a program of its own.
        rng: the name of a keyword argument of fn that is a JAX key. It is made from torch's
            generator at each call that uses it, unless the caller passes the argument; inside of
            ``vmap``, its ``randomness`` applies.
        enable_x64: whether 64-bit types are enabled in the function; None: by the rule above.

    Returns:
        Callable: of fn's arguments. Tensors, jax.Arrays, numpy arrays and Python numbers become
            JAX's; numbers are as weakly typed as in
        ``jax.jit``. The output has tensors in place of arrays and numbers. Called with jax.Arrays
            and no tensor, or inside a
        ``jax.jit`` or another transform of JAX's with its values, it is fn itself.

    Raises:
        TypeError: fn is not callable; (by the call) an argument is of another type and not static,
            a static one is not hashable, or an output is no array; a tensor is sparse, quantized or
            nested.
        OverflowError: (by the call) a Python int does not fit into 32 bits, and 64-bit types are
            not enabled.
        TypeError: (by forward mode) fn has a custom_vjp.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.jit.html

    Example:
        >>> import bridge, jax.numpy as jnp, torch
        >>> normalize = bridge.from_jax(lambda x, eps=1e-6: x / (jnp.linalg.norm(x) + eps))
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> normalize(x)[0].backward()
        >>> x.grad
        tensor([ 0.1280, -0.0960])
        >>> torch.func.vmap(normalize)(torch.eye(2) * 5)
        tensor([[1.0000, 0.0000],
                [0.0000, 1.0000]])
    """
    if not callable(fn):
        raise TypeError(
            f"fn: expected a function of jax.Arrays, got {type(fn)}; pass the function itself"
        )
    function = _Function(fn, *_statics(fn, static_argnums, static_argnames), rng, enable_x64)

    @private.opaque
    @public
    def call(*args: Any, **kwargs: Any) -> Any:
        return function.call(args, kwargs)

    functools.update_wrapper(call, fn, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    del call.__wrapped__  # type: ignore[attr-defined]  # it would be searched for tensors
    return call


__all__ = ["from_jax"]
