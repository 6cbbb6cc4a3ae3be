"""Dtypes for which PyTorch has no CPU kernel are refused here in PyTorch's own words, although JAX could compute with them."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bridge import private
from bridge.convert import dtypes
from bridge.errors import at_line
from bridge.lowering.registry import LOWERINGS
from bridge.operators.dtype_refusals_table import INDICES, MODES, REFUSED, TOGETHER, Refusals
from bridge.trace.python_numbers import is_input

Plan = Callable[[tuple[Any, ...], dict[str, Any]], Any]
#: the names of dtypes in PyTorch's messages
NAMES = {
    torch.float32: "Float", torch.float64: "Double", torch.bfloat16: "BFloat16", torch.float16: "Half", torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.uint8: "Byte", torch.bool: "Bool",
}  # fmt: skip
_CLASSES = {"RuntimeError": RuntimeError, "NotImplementedError": NotImplementedError, "IndexError": IndexError}
_EACH = "aten._foreach_"
_HALF = (torch.bfloat16, torch.float16)
#: names of overloads of pointwise operators that take a number instead of a tensor
_SCALAR_KINDS = frozenset(
    {"Scalar", "Scalar_Other", "Scalar_Self", "Scalar_Tensor", "other_scalar", "self_scalar", "Tensor_Scalar", "n_scalar", "x_scalar"}
)
_OPERANDS = ("self", "other", "exponent", "x", "n")
_NO_REFUSALS: tuple[int, Any] = (0, ())
Check = Callable[[tuple[Any, ...], dict[str, Any]], None]


def guarded(func: torch._ops.OpOverload, run: Plan) -> Plan:
    """The plan of an operator, which refuses the dtypes that PyTorch refuses.

    Empty tensors and tensors on other devices are not checked.  Promoted operands pass.  0-dim tensors pass unless the table lists them,
    because some kernels return early for them.
    """
    name = str(func)
    checks: list[Check] = []
    own = _entry(func)
    if own in REFUSED or own in MODES:
        checks.append(_own(func, REFUSED.get(own, _NO_REFUSALS), MODES.get(own, _NO_REFUSALS)))
    if name in TOGETHER:
        checks.append(_shared(func, TOGETHER[name]))
    if name in INDICES:
        checks.append(_indices(func, INDICES[name]))
    if name.startswith(_EACH) and (entry := REFUSED.get(f"aten.{name.removeprefix(_EACH).partition('.')[0]}.default")):
        checks.append(_each(func, entry))
    if not checks:
        return run

    @functools.wraps(run)  # copies its attributes too
    def run_guarded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for check in checks:
            try:
                check(args, kwargs)
            except (RuntimeError, IndexError) as refusal:
                kind = _kind_here(func, args, kwargs, type(refusal))
                if kind is None:
                    break  # this version has a kernel
                if kind is type(refusal):
                    raise
                raise kind(str(refusal)) from None
        return run(args, kwargs)

    return run_guarded


_TABLES = "2.13."  # the version of PyTorch from which the tables were made
_SMALL = 4096


def _kind_here(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Exception]) -> type[Exception] | None:
    """The class of the error that the installed PyTorch raises for such operands, or None if it raises none.

    Other versions raise other classes with the same words, and have further kernels.  kind: the class that the tables give.
    """
    if torch.__version__.startswith(_TABLES):
        return kind

    def alike(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.numel() > _SMALL:
                raise _NotAskedError
            return torch.zeros(x.shape, dtype=x.dtype, device="cpu")
        if is_input(x):
            raise _NotAskedError
        return x

    with private.without_modes():
        try:
            func(*pytree.tree_map(alike, args), **pytree.tree_map(alike, kwargs))
        except _NotAskedError:
            return kind
        except Exception as error:
            return type(error)
    return None


class _NotAskedError(Exception):
    pass


def is_pointwise(func: torch._ops.OpOverload) -> bool:
    """Whether an operator is pointwise (it promotes its operands), by PyTorch's tags or by its registration."""
    return torch.Tag.pointwise in func.tags or (func in LOWERINGS and LOWERINGS[func].pointwise)


def _counts(t: torch.Tensor) -> bool:
    """Whether a CPU kernel would compute with this tensor."""
    return t.device.type == "cpu" and t.numel() > 0


def _asked(args: tuple[Any, ...], place: int) -> torch.Tensor | None:
    """The argument at that place if it is a tensor whose dtype is to be checked, else None."""
    t = args[place] if len(args) > place else None
    return t if isinstance(t, torch.Tensor) and _counts(t) else None


def _refuser(func: torch._ops.OpOverload, lines: Refusals) -> tuple[frozenset[torch.dtype], Callable[[torch.dtype], None]]:
    refused = {getattr(torch, name): (_CLASSES[kind], message) for kind, message, names in lines for name in names}

    def refuse(dtype: torch.dtype) -> None:
        kind, message = refused[dtype]
        raise kind(f"{message.replace('{}', NAMES[dtype])} ({func}){at_line()}")

    return frozenset(refused), refuse


def _entry(func: torch._ops.OpOverload) -> str:
    """The name of the overload in the tables; an overload that takes numbers has the entry of the one that takes tensors."""
    names = [str(func)]
    if func._overloadname in _SCALAR_KINDS and is_pointwise(func):
        names += [f"{func.overloadpacket}.Tensor", f"{func.overloadpacket}.default"]
    return next((name for name in names if name in REFUSED or name in MODES), names[0])


def _own(func: torch._ops.OpOverload, always: tuple[int, Refusals], sometimes: tuple[int, Any]) -> Check:
    """Check the dtype of one argument, or the promoted dtype of a pointwise operator, always and in some modes."""
    place = always[0] or sometimes[0]
    refused, refuse = _refuser(func, always[1])
    in_modes = {name: _refuser(func, lines) for name, lines in dict(sometimes[1]).items()}
    suspects = refused.union(*(some for some, _ in in_modes.values()))
    pointwise = is_pointwise(func)

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if place < 0:  # a factory
            if kwargs.get("dtype") in refused:
                refuse(kwargs["dtype"])
            return
        operands = args[place:] if pointwise else args[place : place + 1]
        if not any(x.dtype in suspects if isinstance(x, torch.Tensor) else type(x) is complex for x in operands):
            return
        if kwargs.get("dtype") is not None or not all(_counts(x) for x in operands if isinstance(x, torch.Tensor)):
            return
        dtype = _common(func, args, place) if pointwise else args[place].dtype
        if dtype in refused and (pointwise or args[place].dim()):
            refuse(dtype)
        if dtype in suspects and in_modes:
            some, refuse_some = in_modes.get(mode(func, args, kwargs, place), (frozenset(), refuse))
            if dtype in some:
                refuse_some(dtype)

    return check


def mode(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], place: int) -> str:
    """What decides which kernel runs, besides the dtype: a 0-dim argument, strings, optional tensors, the kind of convolution."""
    found = ["scalar"] if place >= 0 and not is_pointwise(func) and not args[place].dim() else []
    for i, a in enumerate(func._schema.arguments):
        x, kind = args[i] if i < len(args) else kwargs.get(a.name, a.default_value), str(a.type)
        if kind in ("str", "Optional[str]"):
            found.append(f"{a.name}={x}")
        elif kind == "Optional[Tensor]":
            found.append(f"{a.name}={'None' if x is None else 'Tensor'}")
    if func is torch.ops.aten.convolution.default:
        found.append(f"{args[0].dim() - 2}d{' transposed' * args[6]}")
    return " ".join(found)


def _common(func: torch._ops.OpOverload, args: tuple[Any, ...], place: int) -> torch.dtype:
    """The dtype that a pointwise operator promotes to."""
    given = zip(func._schema.arguments[place:], args[place:], strict=False)
    replaced = _OPERANDS if func._overloadname in _SCALAR_KINDS else ()  # other numbers, such as alpha= or a weight, are not promoted
    return dtypes.promoted(x for a, x in given if isinstance(x, torch.Tensor) or str(a.type) == "Tensor" or a.name in replaced)


def _each(func: torch._ops.OpOverload, entry: tuple[int, Refusals]) -> Check:
    """Check each tensor of a list by itself."""
    check_one = _own(func, entry, _NO_REFUSALS)

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for t in args[0]:
            check_one((t,), kwargs)

    return check


def _shared(func: torch._ops.OpOverload, entry: tuple[int, tuple[int, ...]]) -> Check:
    """Check arguments that must have the dtype of another argument; float32 is allowed beside a half-precision dtype."""
    place, others = entry
    names = [a.name for a in func._schema.arguments]

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        t = _asked(args, place)
        if t is None or not t.dim():
            return
        for other in others:
            x = _asked(args, other)
            if x is not None and x.dtype is not t.dtype and x.dim() and not (t.dtype in _HALF and x.dtype is torch.float32):
                raise RuntimeError(f"{names[other]}: expected {t.dtype}, as {names[place]} has, but got {x.dtype} ({func}){at_line()}")

    return check


def _indices(func: torch._ops.OpOverload, entry: dict[int, Refusals]) -> Check:
    """Check the dtypes of indices."""
    refusers = {place: _refuser(func, lines) for place, lines in entry.items()}

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place, (refused, refuse) in refusers.items():
            t = _asked(args, place)
            if t is not None and t.dtype in refused and t.dim():
                refuse(t.dtype)

    return check
