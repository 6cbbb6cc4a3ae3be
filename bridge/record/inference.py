"""Infers the entry of an operator: PyTorch runs it on the meta device, or it is traced, which tells its results' shapes and dtypes."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from bridge import compiling, private
from bridge.convert import dtypes
from bridge.errors import DataDependentError
from bridge.record.entries import Number, Op, Out, Ref, filled, functions_of, mapped
from bridge.record.tensor import Aval, Unrecordable, aval, aval_of
from bridge.trace import tracing
from bridge.trace.levels import push
from bridge.trace.torch_numbers import BY_VALUE

#: Functions whose Python numbers of a type are inputs of the program: their result depends smoothly on them, its shape not at all.
_WITH_FLOATS = frozenset([
    *functions_of(
        torch.Tensor,
        "add add_ sub sub_ mul mul_ div div_ true_divide subtract multiply divide addcmul addcmul_ addcdiv addcdiv_ lerp lerp_ "
        "clamp clamp_ clamp_min clamp_max fill_ masked_fill masked_fill_ lt le gt ge eq ne "
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __iadd__ __isub__ __imul__ __itruediv__ "
        "__lt__ __le__ __gt__ __ge__ __eq__ __ne__",
    ),
    *functions_of(
        torch,
        "add sub rsub mul div true_divide subtract multiply divide addcmul addcdiv lerp clamp clamp_min clamp_max masked_fill "
        "lt le gt ge eq ne where full",
    ),
])
WITH_NUMBERS = {float: _WITH_FLOATS, int: _WITH_FLOATS - {torch.where, torch.full}}
#: Functions that make tensors from no tensors.
_FACTORIES = frozenset(functions_of(
    torch,
    "zeros ones empty full rand randn randint randperm arange linspace logspace eye empty_strided tril_indices triu_indices bernoulli "
    "normal hann_window hamming_window bartlett_window blackman_window kaiser_window",
))
#: Functions whose shapes are wrong on the meta device, in PyTorch 2.11.
_WRONG_ON_META = frozenset([torch.segment_reduce])


class ByValue(Exception):
    """The shapes of the operator's results depend on its operands' values."""


class _Draws(private.DispatchMode):
    """Notices whether an operator draws random numbers."""

    found = by_value = False

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        self.by_value = self.by_value or func._schema.name in BY_VALUE
        return func(*args, **kwargs or {})


def _template(func: Callable[..., Any], args: Any) -> tuple[Any, list[torch.Tensor], int]:
    """An operator's arguments with places for its operands and numbers, its operands, and how many numbers these are."""
    tensors: list[torch.Tensor] = []
    counted = itertools.count()

    def place(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
            return Ref(len(tensors) - 1)
        return Number(next(counted), type(x)) if func in WITH_NUMBERS.get(type(x), ()) else x

    return mapped(place, args), tensors, next(counted)


def _outs(out: Any, metas: Sequence[torch.Tensor] = (), device: torch.device | None = None) -> Any:
    if isinstance(out, torch.Tensor):
        for k, m in enumerate(metas):
            if out is m:
                return Ref(k)
        where = device if out.device.type == "meta" and device is not None else out.device
        return Out(aval(tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, where, out.requires_grad))
    if isinstance(out, tuple | list):
        return type(out)([_outs(o, metas, device) for o in out])
    if out is None or isinstance(out, bool | int | float | str | torch.dtype | torch.device):
        return out
    raise Unrecordable(f"a result of {type(out)}")


def entry(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Sequence[float]) -> Op:
    """The entry for an operator on such operands.

    Args:
        func, args, kwargs: the torch function and its arguments, with recorded tensors and tensors from outside among them.
        numbers: those of its arguments that are inputs of the program.

    Raises:
        ByValue: the shapes of its results depend on its operands' values.
        Unrecordable: it cannot be recorded.
        Exception: PyTorch's own, if it refuses the operands.
    """
    (given, kw), tensors, count = _template(func, (args, kwargs))
    avals = [aval_of(t) for t in tensors]
    if func in _WRONG_ON_META:
        return _by_tracing(func, given, kw, numbers, avals, TypeError(f"{func}: no tensors"))
    metas = [a.meta() for a in avals]
    positional, named = filled(given, metas, numbers), filled(kw, metas, numbers)
    where = named.get("device")
    if where is not None and torch.device(where).type != "cpu":
        raise Unrecordable("a tensor on another device")
    if (metas and where is not None) or (not metas and func in _FACTORIES):
        named["device"] = torch.device("meta")  # draws nothing and takes no memory
    before = [(m.shape, m.stride()) for m in metas]
    draws = _Draws()
    try:
        with draws:
            out = func(*positional, **named)
    except Exception as error:
        return _by_tracing(func, given, kw, numbers, avals, error)
    for m, (shape, stride) in zip(metas, before, strict=True):
        if m.shape != shape or m.stride() != stride:
            raise Unrecordable(f"{func}: changes its argument's shape")
    device = next((a.device for a in avals if a.shape), avals[0].device if avals else torch.device(where or "cpu"))
    outs = _outs(out, metas, device)
    # an in-place operator may have made its target require grad
    changed = []
    for k, (m, a) in enumerate(zip(metas, avals, strict=True)):
        if m._version != (1 if a.requires_grad else 0):  # Aval.meta writes once to one that requires grad
            changed.append((k, a.with_grad(m.requires_grad or a.requires_grad)))
        elif m.requires_grad is not a.requires_grad:
            changed.append((k, a.with_grad(m.requires_grad)))
    return Op(func, given, kw, torch.is_grad_enabled(), outs, tuple(changed), count, draws.found, draws.by_value)


def _by_tracing(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Sequence[float], avals: Sequence[Aval],
    error: Exception,
) -> Op:
    """The entry for an operator that the meta device does not have; error: what PyTorch raised there."""
    if not avals:
        raise error
    try:
        outs, draws, by_value = _traced(func, args, kwargs, numbers, avals)
    except DataDependentError as unknown:
        raise ByValue from unknown
    return Op(func, args, kwargs, torch.is_grad_enabled(), outs, (), len(numbers), draws, by_value)


def _traced(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Sequence[float], avals: Sequence[Aval]
) -> tuple[Any, bool, bool]:
    """Trace an operator: its results' avals, whether it draws random numbers, and whether these depend on values.

    Refused operands raise PyTorch's error.
    """
    found: list[Any] = []

    def run(*values: jax.Array) -> list[Any]:
        with tracing.root() as root:
            root.staged = True
            with push("plain") as level:
                traced = [tracing.wrap(v, a.device) for v, a in zip(values, avals, strict=True)]
                out = func(*filled(args, traced, numbers), **filled(kwargs, traced, numbers))
                found.append((_outs(out), root.draws + level.draws > 0, root.by_value))
        return []

    with jax.enable_x64(True), compiling.correctly():
        jax.eval_shape(run, *[jax.ShapeDtypeStruct(a.shape, dtypes.to_jax(a.dtype)) for a in avals])
    return found[-1]


__all__ = ["WITH_NUMBERS", "ByValue", "entry"]
