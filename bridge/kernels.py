"""Dtypes for which PyTorch has no kernel on the CPU: refused here in its own words, though JAX could compute with them."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bridge.errors import at_line
from bridge.refused_dtypes import INDICES, MODES, REFUSED, TOGETHER, Refusals

Plan = Callable[[tuple[Any, ...], dict[str, Any]], Any]
#: what PyTorch's messages call a dtype
NAMES = {
    torch.float32: "Float", torch.float64: "Double", torch.bfloat16: "BFloat16", torch.float16: "Half", torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.uint8: "Byte", torch.bool: "Bool",
}  # fmt: skip
_CLASSES = {"RuntimeError": RuntimeError, "NotImplementedError": NotImplementedError, "IndexError": IndexError}
_EACH = "aten._foreach_"
_HALF = (torch.bfloat16, torch.float16)
#: Python's numbers as tensors
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float32, complex: torch.complex64}
Check = Callable[[tuple[Any, ...], dict[str, Any]], None]


def guarded(func: Any, run: Plan) -> Plan:
    """The plan of an operator, with the dtypes refused that PyTorch refuses.

    What has no elements is no kernel's business, nor is what other devices hold.  What is promoted is let through, and scalars where
    PyTorch has not been seen to refuse those: some kernels answer them at once.
    """
    name = str(func)
    checks: list[Check] = []
    if name in REFUSED:
        checks.append(_own(func, *REFUSED[name]))
    if name in MODES:
        checks.append(_in_mode(func, *MODES[name]))
    if name in TOGETHER:
        checks.append(_shared(func, TOGETHER[name]))
    if name in INDICES:
        checks.append(_indices(func, INDICES[name]))
    if name.startswith(_EACH) and (entry := REFUSED.get(f"aten.{name.removeprefix(_EACH).partition('.')[0]}.default")):
        checks.append(_each(func, *entry))
    if not checks:
        return run

    @functools.wraps(run)  # tracing goes by a plan's name
    def run_guarded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for check in checks:
            check(args, kwargs)
        return run(args, kwargs)

    return run_guarded


def _asked(args: tuple[Any, ...], place: int) -> Any:
    """The tensor at that place if its dtype matters."""
    t = args[place] if len(args) > place else None
    return t if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.numel() else None


def _refuser(func: Any, lines: Refusals) -> tuple[frozenset[torch.dtype], Callable[[torch.dtype], None]]:
    refused = {getattr(torch, name): (_CLASSES[kind], message) for kind, message, names in lines for name in names}

    def refuse(dtype: torch.dtype) -> None:
        kind, message = refused[dtype]
        raise kind(f"{message.replace('{}', NAMES[dtype])} ({func}){at_line()}")

    return frozenset(refused), refuse


def _own(func: Any, place: int, lines: Refusals) -> Check:
    """The dtype of one argument, for which there is no kernel."""
    refused, refuse = _refuser(func, lines)
    pointwise = torch.Tag.pointwise in func.tags

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if place < 0:  # a factory
            if kwargs.get("dtype") in refused:
                refuse(kwargs["dtype"])
            return
        t = _asked(args, place)
        if t is None or kwargs.get("dtype") is not None:
            return
        if not pointwise:
            if t.dtype in refused and t.dim():
                refuse(t.dtype)
        elif _suspicious(args, place, refused) and (dtype := _common(func, args, place)) in refused:
            refuse(dtype)

    return check


def mode(func: Any, args: Any, kwargs: dict[str, Any], place: int) -> str:
    """What besides the dtype decides which kernel runs: a scalar at that place, words, tensors left out, a kind of convolution."""
    found = ["scalar"] if place >= 0 and not args[place].dim() and torch.Tag.pointwise not in func.tags else []
    for i, a in enumerate(func._schema.arguments):
        x, kind = args[i] if i < len(args) else kwargs.get(a.name, a.default_value), str(a.type)
        if kind in ("str", "Optional[str]"):
            found.append(f"{a.name}={x}")
        elif kind == "Optional[Tensor]":
            found.append(f"{a.name}={'None' if x is None else 'Tensor'}")
    if func is torch.ops.aten.convolution.default:
        found.append(f"{args[0].dim() - 2}d{' transposed' * args[6]}")
    return " ".join(found)


def _in_mode(func: Any, place: int, lines: dict[str, Refusals]) -> Check:
    """The dtype of one argument, for which there is no kernel in some modes."""
    checks = {name: _refuser(func, some) for name, some in lines.items()}
    suspect = frozenset().union(*(refused for refused, _ in checks.values()))
    pointwise = torch.Tag.pointwise in func.tags

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        t = _asked(args, place)
        if t is None or kwargs.get("dtype") is not None or not _suspicious(args if pointwise else (t,), place if pointwise else 0, suspect):
            return
        dtype = _common(func, args, place) if pointwise else t.dtype
        if dtype in suspect:
            refused, refuse = checks.get(mode(func, args, kwargs, place), (frozenset(), None))
            if refuse and dtype in refused:
                refuse(dtype)

    return check


def _common(func: Any, args: tuple[Any, ...], place: int) -> torch.dtype | None:
    """The dtype that a pointwise operator promotes to: tensors by the first of those with dimensions, those without, and numbers, unless
    a later one is of a higher kind."""
    found: list[torch.dtype | None] = [None, None, None]
    for a, x in zip(func._schema.arguments[place:], args[place:], strict=False):
        if isinstance(x, torch.Tensor):
            rank, dtype = 0 if x.dim() else 1, x.dtype
        elif str(a.type) == "Tensor" and type(x) in _NUMBERS:
            rank, dtype = 2, _NUMBERS[type(x)]
        else:
            continue
        have = found[rank]
        found[rank] = dtype if have is None else torch.promote_types(have, dtype)
    common = None
    for other in found:
        if other is not None and (common is None or _kind(other) > _kind(common)):
            common = other if common is None else torch.promote_types(common, other)
    return common


def _kind(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


def _suspicious(args: tuple[Any, ...], place: int, refused: frozenset[torch.dtype]) -> bool:
    """Whether a tensor has a refused dtype, or a number makes one of them."""
    return any(x.dtype in refused if isinstance(x, torch.Tensor) else type(x) is complex for x in args[place:])


def _each(func: Any, place: int, lines: Refusals) -> Check:
    """The tensors of a list, each by itself."""
    check_one = _own(func, place, lines)

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for t in args[0]:
            check_one((t,), kwargs)

    return check


def _shared(func: Any, entry: tuple[int, tuple[int, ...]]) -> Check:
    """Arguments that must have the dtype of another; parameters in float32 beside halves are another matter."""
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


def _indices(func: Any, entry: dict[int, Refusals]) -> Check:
    """The dtypes of indices."""
    refusers = {place: _refuser(func, lines) for place, lines in entry.items()}

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place, (refused, refuse) in refusers.items():
            t = _asked(args, place)
            if t is not None and t.dtype in refused and t.dim():
                refuse(t.dtype)

    return check
