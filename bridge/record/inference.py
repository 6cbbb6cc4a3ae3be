"""Infers the entry of an operator: PyTorch runs it on the meta device, or it is traced, which tells
its results' shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from bridge import compiling, devices, private, private_meta
from bridge.boundary.autograd import computed
from bridge.convert import dtypes
from bridge.convert.arguments import mapped
from bridge.convert.strides import span
from bridge.errors import DataDependentError
from bridge.intercepted.library_operators import of_library
from bridge.record.entries import Number, Op, Out, Ref, filled, functions_of
from bridge.record.tensor import Aval, aval, avals_of, lane_of
from bridge.trace import tracing
from bridge.trace.levels import Unrecordable, push
from bridge.trace.random_keys import Watch
from bridge.trace.torch_random import BY_VALUE
from bridge.transform_kinds import PLAIN

#: Functions whose Python numbers of a type are inputs of the program: their result depends smoothly
#: on them, its shape not at all.
_WITH_FLOATS = frozenset(
    [
        *functions_of(
            torch.Tensor,
            "add add_ sub sub_ mul mul_ div div_ true_divide subtract multiply divide addcmul "
            "addcmul_ addcdiv addcdiv_ lerp lerp_ clamp clamp_ clamp_min clamp_max fill_ "
            "masked_fill masked_fill_ lt le gt ge eq ne __add__ __radd__ __sub__ __rsub__ __mul__ "
            "__rmul__ __truediv__ __rtruediv__ __rdiv__ __iadd__ __isub__ __imul__ __itruediv__ "
            "__lt__ __le__ __gt__ __ge__ __eq__ __ne__",
        ),
        *functions_of(
            torch,
            "add sub rsub mul div true_divide subtract multiply divide addcmul addcdiv lerp clamp "
            "clamp_min clamp_max masked_fill lt le gt ge eq ne where full",
        ),
    ]
)
WITH_NUMBERS = {float: _WITH_FLOATS, int: _WITH_FLOATS - {torch.where, torch.full}}
#: Functions that make tensors from no tensors.
_FACTORIES = frozenset(
    functions_of(
        torch,
        "zeros ones empty full rand randn randint randperm arange linspace logspace eye "
        "empty_strided tril_indices triu_indices bernoulli normal hann_window hamming_window "
        "bartlett_window blackman_window kaiser_window",
    )
)
#: Functions whose shapes are wrong on the meta device, in PyTorch 2.11.
_WRONG_ON_META = frozenset([torch.segment_reduce])
#: Functions that PyTorch runs on the meta device step by step of a sequence.
_STEPWISE = frozenset([torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu])


class ByValue(Exception):
    """The shapes of the operator's results depend on its operands' values."""


class _Draws(private.DispatchMode):
    """Notices whether an operator draws random numbers."""

    found = by_value = False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        self.by_value = self.by_value or func._schema.name in BY_VALUE
        return func(*args, **kwargs or {})


def _outs(
    out: Any,
    lanes: tuple[tuple[int, int, int], ...],
    metas: Sequence[torch.Tensor] = (),
    device: torch.device | None = None,
) -> Any:
    if isinstance(out, torch.Tensor):
        for k, m in enumerate(metas):
            if out is m:
                return Ref(k)
        where = device if out.device.type == "meta" and device is not None else out.device
        return Out(
            aval(
                tuple(out.shape),
                out.stride(),
                out.storage_offset(),
                out.dtype,
                where,
                out.requires_grad,
                lanes,
            )
        )
    if isinstance(out, tuple | list):
        return type(out)([_outs(o, lanes, metas, device) for o in out])
    if out is None or isinstance(out, bool | int | float | torch.dtype):
        return out
    if isinstance(out, torch.device) and (metas or out.type != "meta"):
        return device if out.type == "meta" else out
    # the name of a device may be the meta device's
    raise Unrecordable(f"a result of {type(out)}")


def entry(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: Sequence[float],
    autocast: tuple[Any, ...] | None = None,
) -> Op:
    """The entry for an operator on such operands.

    Args:
        func, args, kwargs: the torch function and its arguments, with recorded tensors and tensors
            from outside among them.
        numbers: those of its arguments that are inputs of the program.
        autocast: the state of autocast, if it is on.

    Raises:
        ByValue: the shapes of its results depend on its operands' values.
        Unrecordable: it cannot be recorded.
        Exception: PyTorch's own, if it refuses the operands.
    """
    tensors: list[torch.Tensor] = []
    counted = itertools.count()

    def place(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
            return Ref(len(tensors) - 1)
        return Number(next(counted), type(x)) if func in WITH_NUMBERS.get(type(x), ()) else x

    args, kwargs = mapped(place, (args, kwargs))
    avals = avals_of(tensors)
    if func not in _WRONG_ON_META:
        try:
            op = _of_steps(func, args, avals) if func in _STEPWISE else None
            op = op or _on_meta(func, args, kwargs, numbers, avals)
        except Exception:
            if not avals:
                raise
        else:
            return (
                op
                if autocast is None or not avals
                else _cast(op, autocast, _traced(func, args, kwargs, numbers, avals))
            )
    return dataclasses.replace(_traced(func, args, kwargs, numbers, avals), autocast=autocast)


def _of_steps(func: Callable[..., Any], args: tuple[Any, ...], avals: Sequence[Aval]) -> Op | None:
    """The entry for an RNN of a sequence, which two steps of it tell; None if it takes a packed
    sequence, or lanes that overlap.
    """
    a = avals[0]
    if type(args[3]) is not bool or any(size for a in avals for _, size, _ in a.lanes):
        return None
    time = int(args[8])  # batch_first: which dimension is the time
    steps = a.shape[time]
    if steps <= 2:
        return None

    def lasting(b: Aval, n: int) -> Aval:
        shape = (*b.shape[:time], n, *b.shape[time + 1 :])
        return aval(shape, b.strides, b.offset, b.dtype, b.device, b.requires_grad, b.lanes)

    op = _on_meta(func, args, {}, (), [lasting(a, 2), *avals[1:]])
    return dataclasses.replace(
        op, outs=type(op.outs)([Out(lasting(op.outs[0].aval, steps)), *op.outs[1:]])
    )


def _cast(op: Op, autocast: tuple[Any, ...], traced: Op) -> Op:
    """The entry from the meta device, where autocast does nothing, with the dtypes of the results
    of the traced operator.
    """

    def typed(out: Any, other: Any) -> Any:
        if type(out) is Out:
            if type(other) is not Out or other.aval.shape != out.aval.shape:
                raise Unrecordable(f"{op.func} has results of other shapes in autocast")
            a = out.aval
            return Out(
                aval(
                    a.shape,
                    a.strides,
                    a.offset,
                    other.aval.dtype,
                    a.device,
                    a.requires_grad,
                    a.lanes,
                )
            )
        return type(out)(map(typed, out, other)) if isinstance(out, tuple | list) else out

    return dataclasses.replace(op, outs=typed(op.outs, traced.outs), autocast=autocast)


@private_meta.of_plain_sizes()
def _on_meta(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: Sequence[float],
    avals: Sequence[Aval],
) -> Op:
    """The entry for an operator that runs on the meta device."""
    metas = [a.meta() for a in avals]
    positional, named = filled(args, metas, numbers), filled(kwargs, metas, numbers)
    if not metas and of_library(func, positional, named) is not None:
        raise Unrecordable(
            f"{func}, which takes no tensors: it would be run to see what it returns"
        )
    where = named.get("device")
    if where is not None and torch.device(where).type not in ("cpu", "cuda"):
        raise Unrecordable("a tensor on another device")
    if (metas and where is not None) or (not metas and func in _FACTORIES):
        named["device"] = torch.device("meta")  # draws nothing and takes no memory
    before = [(m.shape, m.stride()) for m in metas]
    draws = _Draws()
    with draws:
        out = func(*positional, **named)
    for m, (shape, stride) in zip(metas, before, strict=True):
        if m.shape != shape or m.stride() != stride:
            raise Unrecordable(f"{func}: changes its argument's shape")
    device = next(
        (a.device for a in avals if a.shape), avals[0].device if avals else torch.device("cpu")
    )
    device = device if where is None else devices.indexed(torch.device(where))
    # Aval.meta writes once to a tensor that requires grad; an in-place operator may make its target
    # require grad
    changed = tuple(
        [
            (k, a.with_grad(m.requires_grad or a.requires_grad))
            for k, (m, a) in enumerate(zip(metas, avals, strict=True))
            if m._version != a.requires_grad or m.requires_grad is not a.requires_grad
        ]
    )
    outs = _outs(out, _mapped(avals), metas, device)
    if any(size for a in avals for _, size, _ in a.lanes):
        _lay_out(outs, func, args, kwargs, numbers, avals)
    memory = {m.untyped_storage()._cdata for m in metas}
    results = (out,) if isinstance(out, torch.Tensor) else pytree.tree_leaves(out)
    views = any(
        t.untyped_storage()._cdata in memory for t in results if isinstance(t, torch.Tensor)
    )
    return Op(
        func,
        args,
        kwargs,
        torch.is_grad_enabled(),
        outs,
        changed,
        len(numbers),
        draws.found,
        draws.by_value,
        views,
    )


def _mapped(avals: Sequence[Aval]) -> tuple[tuple[int, int, int], ...]:
    """The lanes of what is computed from these, if they all lie one behind another."""
    return tuple(
        [(depth, 0, 0) for depth in sorted({depth for a in avals for depth, _, _ in a.lanes})]
    )


def _lay_out(
    outs: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: Sequence[float],
    avals: Sequence[Aval],
) -> None:
    """Give an operator's results the strides that PyTorch's own vmap gives them, if lanes do not
    lie one behind another.
    """
    sizes = dict.fromkeys([depth for depth, _, _ in _mapped(avals)], 2) | {
        k: size for a in avals for k, size, _ in a.lanes if size
    }
    depths = list(sizes)
    wholes = []
    for a in avals:
        reach = span(a.shape, a.strides) * math.prod(sizes.values())
        mapped = [(sizes[depth], stride if size else reach) for depth, size, stride in a.lanes]
        whole = [*[n for n, _ in mapped], *a.shape], [*[stride for _, stride in mapped], *a.strides]
        wholes.append(torch.empty_strided(*whole, dtype=a.dtype, device="meta"))

    def run(levels: Sequence[int]) -> Any:
        lanes = [
            private.lane_of_torch(whole, [levels[depths.index(depth)] for depth, _, _ in a.lanes])
            for whole, a in zip(wholes, avals, strict=True)
        ]
        return func(*filled(args, lanes, numbers), **filled(kwargs, lanes, numbers))

    try:
        found = private.lanes_by_torch(run, list(sizes.values()))
    except Exception:  # PyTorch's vmap has no rule for it
        return
    results = [out for out in pytree.tree_leaves(outs) if type(out) in (Out, Ref)]
    if len(results) != len(found):
        return
    for out, (strides, between) in zip(results, found, strict=True):
        if type(out) is Out and len(strides) == len(out.aval.shape):
            a = out.aval
            lanes = tuple(
                [
                    lane_of(depths[k], sizes[depths[k]], stride, a.shape, strides)
                    for k, stride, _ in between
                ]
            )
            out.aval = aval(a.shape, strides, a.offset, a.dtype, a.device, a.requires_grad, lanes)


def _operand(value: jax.Array, a: Aval) -> torch.Tensor:
    t = tracing.wrap(value, a.device, strides=a.strides)
    if not a.requires_grad or not torch.is_grad_enabled():
        return t
    t.requires_grad_()
    return computed(t)


def _traced(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: Sequence[float],
    avals: Sequence[Aval],
) -> Op:
    """The entry for an operator that the meta device does not have: it is traced. Refused operands
    raise PyTorch's error.
    """
    found: list[Op] = []

    def run(*values: jax.Array) -> list[Any]:
        with tracing.root() as root:
            with push(PLAIN), _Draws() as draws:
                traced = [_operand(v, a) for v, a in zip(values, avals, strict=True)]
                out = func(*filled(args, traced, numbers), **filled(kwargs, traced, numbers))
            outs = _outs(out, _mapped(avals), traced)
            found.append(
                Op(
                    func,
                    args,
                    kwargs,
                    torch.is_grad_enabled(),
                    outs,
                    (),
                    len(numbers),
                    root.draws > 0,
                    draws.by_value,
                )
            )
        return []

    try:
        # the generator keeps its state
        with jax.enable_x64(True), compiling.correctly(), Watch([]).again():
            jax.eval_shape(
                run, *[jax.ShapeDtypeStruct(a.shape, dtypes.to_jax(a.dtype)) for a in avals]
            )
    except DataDependentError as unknown:
        raise ByValue from unknown
    return found[-1]
