"""Operators of torch.library without a lowering: PyTorch runs them, with the fake, the derivative
and the vmap rule registered for them.

In a trace, such an operator becomes an operation of JAX's that calls Python when the program runs.
In un-jitted calls, which PyTorch runs for the sake of such operators, it becomes an
autograd.Function that torch.func can transform, unlike the one that torch.library generates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from torch.overrides import TorchFunctionMode

from bridge import private, private_meta
from bridge.boundary.results import inexact_dtype
from bridge.cache_keys import identical
from bridge.convert import dtypes, tensors
from bridge.convert.arguments import mapped, tensors_in
from bridge.errors import DataDependentError, NoLoweringError, at_line, no_jvp
from bridge.intercepted import autograd_function
from bridge.operators import operands
from bridge.operators.mutation import store
from bridge.process import having, process
from bridge.trace.levels import Unrecordable, state
from bridge.trace.python_numbers import is_input
from bridge.trace.tracing import HANDED_IN, unknown_value, value_of, wrap
from bridge.transform_kinds import FUNCTION

#: The namespaces of PyTorch's own operators.
_OF_TORCH = frozenset(
    {
        "aten",
        "prim",
        "prims",
        "debugprims",
        "rngprims",
        "inductor",
        "inductor_prims",
        "quantized",
        "_quantized",
        "quantization",
        "onednn",
        "mkl",
        "mkldnn",
        "mkldnn_prepacked",
        "sparse",
        "static_runtime",
        "c10d",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "symm_mem",
        "_dtensor",
        "coor",
        "profiler",
        "export",
        "higher_order",
        "_native",
        "_test",
        "debug_mode_ops",
    }
)
#: The lanes of a vmap: how many there are, and for each tensor the dimension that is mapped, or
#: None.
_Lanes = tuple[int, tuple[int | None, ...]]


# -- a call ----------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class _TensorAt:
    """The place of a tensor, the k-th, among an operator's arguments or results."""

    k: int
    device: torch.device


def _without_tensors(x: Any) -> Any:
    """Arguments or results with ``_TensorAt`` for tensors; numbers that are inputs of a program
    become constants of it.
    """
    count = itertools.count()
    return mapped(
        lambda v: (
            _TensorAt(next(count), v.device)
            if isinstance(v, torch.Tensor)
            else v.node.asked()
            if is_input(v)
            else v
        ),
        x,
    )


def _filled(x: Any, values: Sequence[Any]) -> Any:
    """Arguments or results with values for their ``_TensorAt``."""
    return mapped(lambda v: values[v.k] if type(v) is _TensorAt else v, x)


def _tensors_at(x: Any) -> list[_TensorAt]:
    found: list[_TensorAt] = []
    mapped(lambda v: found.append(v) if type(v) is _TensorAt else None, x)
    return found


def _key(x: Any) -> Any:
    return (type(x), *map(_key, x)) if isinstance(x, list | tuple) else identical(x)


class OperatorCall:
    """A call of an operator without its tensors; two calls are equal if the operator and the other
    arguments are.

    Attributes:
        arguments: the positional arguments with ``_TensorAt`` for tensors, and
        named: the keyword-only ones by name.
        written: the numbers of the tensors that the operator writes to.
        outs: the new tensors among the results, in the same form; None before they are known.
        avals: the shapes and dtypes of these, and then of the written tensors.
        derivative: what is registered, with the attributes _setup_context_fn and _backward_fn; None
            if there is nothing.
    """

    def __init__(self, op: torch._ops.OpOverload, values: Sequence[Any]) -> None:
        self.op, schema = op, op._schema.arguments
        placed = _without_tensors(values)
        self.arguments = [x for a, x in zip(schema, placed, strict=True) if not a.kwarg_only]
        self.named = {a.name: x for a, x in zip(schema, placed, strict=True) if a.kwarg_only}
        writes = [
            x
            for a, x in zip(schema, placed, strict=True)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.written = [place.k for place in _tensors_at(writes)]
        self.outs: Any = None
        self.avals: list[jax.core.ShapedArray] = []
        self.derivative: Any = None
        try:
            self._identity: Any = (op, _key(placed))
        except TypeError:  # an argument that is not hashable
            self._identity = object()

    @classmethod
    def of(
        cls, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[OperatorCall, list[torch.Tensor]]:
        """The call with these arguments, and the tensors among them."""
        given = dict(zip([a.name for a in op._schema.arguments], args, strict=False)) | kwargs
        # the dispatcher leaves out what equals the default
        values = [given.get(a.name, a.default_value) for a in op._schema.arguments]
        return cls(op, values), tensors_in(values)

    def __eq__(self, other: object) -> bool:
        return type(other) is OperatorCall and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def run(
        self, *given: torch.Tensor, kernel: Callable[..., Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Call the operator, or a kernel of it, on copies of the tensors that it writes to.

        Returns:
            The new tensors among its results, and then the new values of those that it writes to.
        """
        values = [t.clone() if k in self.written else t for k, t in enumerate(given)]
        out = (kernel or self.op)(*_filled(self.arguments, values), **_filled(self.named, values))
        returns = self.op._schema.returns
        new = [
            x
            for x, r in zip([out] if len(returns) == 1 else out or (), returns, strict=True)
            if r.alias_info is None
        ]
        if self.outs is None:
            self.outs = _without_tensors(new)
        return (*tensors_in(new), *[values[k] for k in self.written])

    def returned(self, new: Sequence[Any], targets: Sequence[Any] = ()) -> Any:
        """What the operator returns; new: the new tensors; targets:
        those that it has written to.
        """
        fresh, written = iter(_filled(self.outs, new)), iter(targets)
        found = tuple(
            [
                next(fresh) if r.alias_info is None else next(written)
                for r in self.op._schema.returns
            ]
        )
        return found[0] if len(found) == 1 else found or None

    def infer(self, given: Sequence[torch.Tensor]) -> None:
        """Ask the operator's fake for the results of these tensors, and PyTorch for the derivative.

        Raises:
            NoLoweringError: there is no fake.
            DataDependentError: the shapes of the results depend on values.
            Exception: the fake's own, if it refuses the arguments.
        """
        layouts = [(t.shape, t.stride(), t.dtype) for t in given]
        try:
            with (
                private_meta.of_plain_sizes(),
                private.outside_of_transforms(),
                torch.enable_grad(),
                having(state, level=None, recorder=None),
            ):
                metas = [
                    torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                    for shape, strides, dtype in layouts
                ]
                for m in () if self.written else metas:
                    m.requires_grad_(inexact_dtype(m.dtype))
                found = self.run(*metas, kernel=None if metas else private.meta_kernel(self.op))
        except Exception as error:
            if not private.has_fake(self.op):
                raise NoLoweringError(
                    f"{self.op.name()} has no fake, which tells the shapes of its results: "
                    f"register one with torch.library.register_fake({self.op.name()!r}), so that "
                    f"PyTorch can run it, or a lowering with bridge.register_lowering{at_line()}"
                ) from None
            if "data-dependent" in str(error):  # a fake that asks for a size that only values tell
                raise unknown_value(str(self.op), dynamic_shape=True) from None
            raise
        device = tensors.common_device(given) or torch.device("cpu")
        self.outs = mapped(
            lambda x: (
                _TensorAt(x.k, device) if type(x) is _TensorAt and x.device.type == "meta" else x
            ),
            self.outs,
        )
        self.avals = [jax.core.ShapedArray(t.shape, dtypes.to_jax(t.dtype)) for t in found]
        self.derivative = private.derivative_of(self.op, found)


# -- the derivative --------------------------------------------------------------------------------
class _Operator(torch.autograd.Function):
    """An operator with its derivative: a function of a call and the tensors among its arguments,
    which returns what ``run`` does.
    """

    @staticmethod
    def forward(call: OperatorCall, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if state.level is None:
            return call.run(*given)
        # the derivative is that of this Function
        values = [lax.stop_gradient(value_of(t)) for t in given]
        found = _operator_p.bind(*values, call=call, lanes=())
        devices = [
            *[place.device for place in _tensors_at(call.outs)],
            *[given[k].device for k in call.written],
        ]
        return tuple([wrap(v, device) for v, device in zip(found, devices, strict=True)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.call, *given = inputs
        call: OperatorCall = ctx.call
        setup = getattr(call.derivative, "_setup_context_fn", None)
        if setup is not None:
            named = {"keyword_only_inputs": _filled(call.named, given)} if call.named else {}
            setup(
                ctx=ctx,
                inputs=tuple(_filled(call.arguments, given)),
                output=call.returned(output),
                **named,
            )

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        call: OperatorCall = ctx.call
        backward = getattr(call.derivative, "_backward_fn", None)
        if backward is None:
            raise RuntimeError(
                f"Trying to backward through {call.op.name()} but no autograd formula was "
                "registered: register one with "
                f"torch.library.register_autograd({call.op.name()!r}, ...){at_line()}"
            )
        given = call.returned(cotangents)
        needs = mapped(
            lambda x: ctx.needs_input_grad[x.k + 1] if type(x) is _TensorAt else False,
            call.arguments,
        )
        with (
            having(ctx, needs_input_grad=tuple(needs)),
            LibraryOperators() if state.level is None else contextlib.nullcontext(),
        ):
            found = backward(ctx, *(given if isinstance(given, tuple) else (given,)))
        found = found if isinstance(found, tuple) else (found,)
        if len(found) != len(call.arguments):
            raise RuntimeError(
                f"{call.op.name()}: its backward returned an incorrect number of gradients "
                f"(expected {len(call.arguments)}, got {len(found)}){at_line()}"
            )
        gradients = [
            x
            for argument, gradient in zip(call.arguments, found, strict=True)
            for x in _of_tensors(argument, gradient)
        ]
        return None, *gradients, *[None] * len(_tensors_at(call.named))


def _of_tensors(argument: Any, gradient: Any) -> list[Any]:
    """The gradients of the tensors in one argument of an operator; gradient: what its backward has
    returned for the argument.
    """
    if type(argument) is _TensorAt:
        return [gradient]
    if not isinstance(argument, list | tuple):
        return []
    given = [None] * len(argument) if gradient is None else gradient
    return [g for x, g in zip(argument, given, strict=True) if type(x) is _TensorAt]


# -- in a trace ------------------------------------------------------------------------------------
_operator_p = Primitive("torch_operator")
_operator_p.multiple_results = True


@_operator_p.def_abstract_eval
def _shapes(*_: Any, call: OperatorCall, lanes: tuple[_Lanes, ...]) -> list[jax.core.ShapedArray]:
    sizes = [size for size, _ in reversed(lanes)]
    return [jax.core.ShapedArray((*sizes, *aval.shape), aval.dtype) for aval in call.avals]


def _in_lanes(
    values: Sequence[Any],
    dims: Sequence[int | None],
    *,
    call: OperatorCall,
    lanes: tuple[_Lanes, ...],
) -> tuple[Any, Any]:
    size = next(v.shape[d] for v, d in zip(values, dims, strict=True) if d is not None)
    found = _operator_p.bind(*values, call=call, lanes=(*lanes, (size, tuple(dims))))
    return found, [0] * len(found)


def _one_by_one(
    run: Callable[..., Any], size: int, dims: Sequence[int | None], *given: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The results of each lane of a vmap, stacked."""
    rows = [
        run(*[t if d is None else t.select(d, i) for t, d in zip(given, dims, strict=True)])
        for i in range(size)
    ]
    return tuple(map(torch.stack, zip(*rows, strict=True)))


def _computed(
    call: OperatorCall, lanes: tuple[_Lanes, ...], avals: Sequence[Any], *values: Any
) -> list[Any]:
    """The results of an operator in a program that runs, as numpy arrays."""
    if not all(size for size, _ in lanes):
        return [np.zeros(aval.shape, aval.dtype) for aval in avals]
    run: Callable[..., Any] = call.run
    for size, dims in lanes:
        by_rule = private.has_kernel(call.op, "FuncTorchBatched")
        run = torch.vmap(run, dims) if by_rule else functools.partial(_one_by_one, run, size, dims)
    # copies, because the operator may keep them, and XLA uses its memory again
    given = [
        tensors.of_numpy(np.array(v)).to(place.device)
        for v, place in zip(values, _tensors_at((call.arguments, call.named)), strict=True)
    ]
    with private.plain_torch(), having(state, level=None, recorder=None):
        found = [tensors.as_numpy(tensors.plain(t).cpu()) for t in run(*given)]
    for v, aval in zip(found, avals, strict=True):
        if (v.shape, v.dtype) != (aval.shape, aval.dtype):
            raise RuntimeError(
                f"{call.op.name()}: its fake says that a result has shape {aval.shape} and dtype "
                f"{aval.dtype}, and it has {v.shape} and {v.dtype}; correct the function given to "
                "torch.library.register_fake"
            )
    return found


def _at_once(*values: jax.Array, call: OperatorCall, lanes: tuple[_Lanes, ...]) -> list[jax.Array]:
    with jax.enable_x64(True):
        return [
            jnp.array(v) for v in _computed(call, lanes, _shapes(call=call, lanes=lanes), *values)
        ]


# JAX makes 32 bits of what a callback returns, unless 64-bit types are on in the whole process; so
# results cross as words of 32 bits.
def _word_aval(aval: jax.core.ShapedArray) -> jax.core.ShapedArray:
    words = aval.dtype.itemsize // 4
    return jax.core.ShapedArray((*aval.shape, words), np.dtype(np.uint32)) if words > 1 else aval


def _as_words(v: np.ndarray, aval: jax.core.ShapedArray) -> np.ndarray:
    return np.ascontiguousarray(v).reshape(-1).view(aval.dtype).reshape(aval.shape)


def _of_words(v: jax.Array, dtype: np.dtype) -> jax.Array:
    return v if v.dtype == dtype else v.view(dtype).reshape(v.shape[:-1])


def _lowered(
    ctx: mlir.LoweringRuleContext, *values: Any, call: OperatorCall, lanes: tuple[_Lanes, ...]
) -> list[Any]:
    outs: Sequence[Any] = ctx.avals_out
    given: Sequence[Any] = ctx.avals_in
    avals = [_word_aval(aval) for aval in outs]

    def called(*arrays: np.ndarray) -> list[np.ndarray]:
        return [
            _as_words(v, aval)
            for v, aval in zip(_computed(call, lanes, outs, *arrays), avals, strict=True)
        ]

    crossed, _, _ = mlir.emit_python_callback(
        ctx.replace(avals_out=avals),
        called,
        None,
        list(values),
        given,
        avals,
        has_side_effect=False,
        returns_token=False,
    )
    with jax.enable_x64(True):
        return [
            mlir.lower_fun(functools.partial(_of_words, dtype=out.dtype), multiple_results=False)(
                ctx.replace(avals_in=[aval], avals_out=[out]), v
            )[0]
            for v, aval, out in zip(crossed, avals, outs, strict=True)
        ]


_operator_p.def_impl(_at_once)
batching.primitive_batchers[_operator_p] = _in_lanes
mlir.register_lowering(_operator_p, _lowered)


_WITHOUT_JVP = (
    " torch.library registers no derivative for forward mode: use reverse mode (grad, vjp, "
    "jacrev), or register a lowering with bridge.register_lowering"
)


def _differentiable(call: OperatorCall, *given: torch.Tensor) -> Any:
    """The results of an operator in a trace, with its derivative."""
    traced = autograd_function._Call(_Operator, (call, *given))
    traced.name, traced.without_jvp, traced.may_capture = call.op.name(), _WITHOUT_JVP, False
    # whatever differentiates the program later may need any of them
    traced.requires_grad = [inexact_dtype(t.dtype) for t in given]
    return traced.run([value_of(t) for t in given])


class _OperatorPlan:
    """Runs an operator in a trace; by_torch: PyTorch computes its values."""

    by_torch = True

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self.op = op

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if state.replaying:
            raise Unrecordable(f"{self.op.name()}, an operator without a lowering")
        if state.exporting:
            raise NoLoweringError(
                f"export: {self.op.name()} has no lowering, and an exported program runs where "
                "PyTorch is not: register one with "
                f"bridge.register_lowering({self.op.name().replace('::', '.')!r}){at_line()}"
            )
        call, given = OperatorCall.of(self.op, args, kwargs)
        call.infer(given)
        grad = torch.is_grad_enabled() or state.applied
        with having(state, applied=False), torch.set_grad_enabled(grad):
            if grad:
                operands.note_use(given)
            # a Function's own rule gives the derivative
            inside = not given or state.level.kind is FUNCTION
            new = (_Operator.forward if inside else _differentiable)(call, *given)
        with torch.no_grad():  # PyTorch goes back through what was there before
            for k, t in zip(call.written, new[len(new) - len(call.written) :], strict=True):
                store(given[k], value_of(t))
        return call.returned(new, [given[k] for k in call.written])


def runs_in_torch(op: torch._ops.OpOverload) -> bool:
    """Whether this file can run an operator: it is no operator of PyTorch's own, and returns new
    tensors, or those that it writes to.
    """
    returns = op._schema.returns
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return not (
        op.namespace in _OF_TORCH or private.has_kernel(op, "CompositeImplicitAutograd") or views
    ) and all("Tensor" in str(r.type) for r in returns)


def plan(op: torch._ops.OpOverload) -> _OperatorPlan | None:
    """The plan of an operator that PyTorch runs; None if this file cannot run it."""
    if not runs_in_torch(op):
        return None
    process.library_operators = True
    return _OperatorPlan(op)


# -- in transforms that PyTorch runs ---------------------------------------------------------------
class LibraryOperators(TorchFunctionMode):
    """While entered, operators that torch.func cannot differentiate, or map, are Functions that it
    can.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return called_in_torch(func, args, kwargs or {})


class _InTorch(_Operator):
    """An operator in a transform that PyTorch runs, by a rule for vmap or lane by lane."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_jvp(ctx.call.op.name(), _WITHOUT_JVP)


class _ByRule(_InTorch):
    """An operator with a rule for vmap, which torch.func finds when it maps the forward."""

    generate_vmap_rule = True


class _OneByOne(_InTorch):
    """An operator without a rule for vmap, lane by lane."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], call: OperatorCall, *given: torch.Tensor
    ) -> tuple[Any, Any]:
        if not info.batch_size:
            raise RuntimeError(
                f"vmap: expected a lane for {call.op.name()}, which has no rule for vmap, got "
                f"none: register one with torch.library.register_vmap({call.op.name()!r}, ...), or "
                f"compile the call with jit{at_line()}"
            )
        found = _one_by_one(
            functools.partial(_OneByOne.apply, call), info.batch_size, in_dims[1:], *given
        )
        return found, (0,) * len(found)


def of_library(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch._ops.OpOverload | None:
    """The operator that this torch function calls, if this file can run it; else None."""
    op = private.overload_called(func, args, kwargs, _OF_TORCH)
    return op if op is not None and runs_in_torch(op) else None


def called_in_torch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function in a transform that PyTorch runs."""
    op = of_library(func, args, kwargs)
    call, given = (None, ()) if op is None else OperatorCall.of(op, args, kwargs)
    if not given:
        return func(*args, **kwargs)
    call.derivative = private.derivative_of(op, ())
    if call.derivative is None:
        # PyTorch itself needs no fake
        with contextlib.suppress(NoLoweringError, DataDependentError):
            call.infer(given)
        # code of the operator's own decides what autograd does with it
        if call.derivative is None and any(
            private.has_kernel(op, f"Autograd{device}") for device in ("", "CPU", "CUDA")
        ):
            return _with_own_kernel(op, func, args, kwargs)
    # torch.library.register_vmap has given it a rule
    by_rule = private.has_kernel(op, "FuncTorchBatched")
    new = (_ByRule if by_rule else _OneByOne).apply(call, *given)
    with torch.no_grad():
        for k, t in zip(call.written, new[len(new) - len(call.written) :], strict=True):
            given[k].copy_(t)
    return call.returned(new, [given[k] for k in call.written])


def _with_own_kernel(
    op: torch._ops.OpOverload,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call an operator whose author has written what autograd does with it."""
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if "custom_function_call" not in str(error) and "_SingleLevelFunction" not in str(error):
            raise
        raise NotImplementedError(
            f"{op.name()} has a kernel of its own for autograd, in which torch.func cannot apply "
            "an autograd.Function: register the derivative with "
            f"torch.library.register_autograd({op.name()!r}, ...) instead, or compile the call "
            f"with jit{at_line()}"
        ) from None


HANDED_IN["library_operator"] = plan
HANDED_IN["library_operators_in_torch"] = LibraryOperators
