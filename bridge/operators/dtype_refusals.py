"""Dtypes for which PyTorch has no CPU kernel are refused here in PyTorch's own words, although JAX
could compute with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bridge import private
from bridge.convert import dtypes
from bridge.errors import at_line
from bridge.lowering.registry import LOWERINGS
from bridge.operators.dtype_refusals_table import INDICES, REFUSED, TOGETHER
from bridge.trace.python_numbers import is_input

Plan = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_EACH = "aten._foreach_"
_HALF = (torch.bfloat16, torch.float16)
#: names of overloads of pointwise operators that take a number instead of a tensor
_SCALAR_KINDS = frozenset(
    {
        "Scalar",
        "Scalar_Other",
        "Scalar_Self",
        "Scalar_Tensor",
        "other_scalar",
        "self_scalar",
        "Tensor_Scalar",
        "n_scalar",
        "x_scalar",
    }
)
_OPERANDS = ("self", "other", "exponent", "x", "n")
#: Whether PyTorch is to be asked about the operands of a call, or the words of the refusal.
Check = Callable[[tuple[Any, ...], dict[str, Any]], bool | str]


def _by_overload(table: Mapping[Any, str]) -> dict[str, list[Any]]:
    """A table of the generated file, whose groups list their overloads: the groups of each
    overload.
    """
    found: dict[str, list[Any]] = {}
    for group, names in table.items():
        for name in names.split():
            found.setdefault(f"aten.{name}" if "." in name else f"aten.{name}.default", []).append(
                group
            )
    return found


_REFUSED, _TOGETHER, _INDICES = _by_overload(REFUSED), _by_overload(TOGETHER), _by_overload(INDICES)


def guarded(func: torch._ops.OpOverload, run: Plan) -> Plan:
    """The plan of an operator, which refuses the dtypes that PyTorch refuses.

    Empty tensors and tensors on other devices are not checked. Promoted operands pass. 0-dim
    tensors pass unless the table lists them, because some kernels return early for them.
    """
    name = str(func)
    checks: list[Check] = []
    if own := _REFUSED.get(_entry(func)):
        checks.append(_own(func, own))
    checks += [_shared(func, *group) for group in _TOGETHER.get(name, ())]
    checks += [_index(place, _dtypes(refused)) for place, refused in _INDICES.get(name, ())]
    if name.startswith(_EACH) and (
        each := _REFUSED.get(f"aten.{name.removeprefix(_EACH).partition('.')[0]}.default")
    ):
        check_one = _own(
            func,
            [(place, "", refused) for place, modes, refused in each if "" in modes.split(" | ")],
        )
        checks.append(lambda args, kwargs: any(check_one((t,), kwargs) for t in args[0]))
    if not checks:
        return run

    def run_guarded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = next(filter(None, (check(args, kwargs) for check in checks)), None)
        if found:
            _refuse(func, args, kwargs, found)
        return run(args, kwargs)

    return run_guarded


def _refuse(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], found: bool | str
) -> None:
    """Raise the error of the installed PyTorch for operands of these shapes and dtypes; a version
    with further kernels raises none.
    """

    def alike(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.ones(x.shape, dtype=x.dtype, device="cpu")
        return x.node.value if is_input(x) else x

    try:
        with private.without_modes():
            func(*pytree.tree_map(alike, args), **pytree.tree_map(alike, kwargs))
    except Exception as error:
        said = (
            found
            if isinstance(found, str)
            else str(error).partition("\n")[0].partition("; but got")[0].strip()
        )
        raise type(error)(f"{said} ({func}){at_line()}") from None


def is_pointwise(func: torch._ops.OpOverload) -> bool:
    """Whether an operator is pointwise (it promotes its operands), by PyTorch's tags or by its
    registration.
    """
    return torch.Tag.pointwise in func.tags or (func in LOWERINGS and LOWERINGS[func].pointwise)


def _counts(t: torch.Tensor) -> bool:
    """Whether a CPU kernel would compute with this tensor."""
    return t.device.type == "cpu" and t.numel() > 0


def _asked(args: tuple[Any, ...], place: int) -> Any:
    """The argument at that place if it is a tensor with dimensions whose dtype is to be checked,
    else None.
    """
    t = args[place] if len(args) > place else None
    return t if isinstance(t, torch.Tensor) and t.dim() and _counts(t) else None


def _dtypes(names: str) -> frozenset[torch.dtype]:
    return frozenset(getattr(torch, name) for name in names.split())


def _entry(func: torch._ops.OpOverload) -> str:
    """The name of the overload in the tables; an overload that takes numbers has the entry of the
    one that takes tensors.
    """
    names = [str(func)]
    if func._overloadname in _SCALAR_KINDS and is_pointwise(func):
        names += [f"{func.overloadpacket}.Tensor", f"{func.overloadpacket}.default"]
    return next((name for name in names if name in _REFUSED), names[0])


def _own(func: torch._ops.OpOverload, groups: Sequence[tuple[int, str, str]]) -> Check:
    """Check the dtype of one argument, or the promoted dtype of a pointwise operator, always and in
    some modes.
    """
    place = groups[0][0]
    refused = {mode: _dtypes(names) for _, modes, names in groups for mode in modes.split(" | ")}
    always = refused.pop("", frozenset())
    suspects = always.union(*refused.values())
    pointwise = is_pointwise(func)

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if place < 0:  # a factory
            return kwargs.get("dtype") in always
        operands = args[place:] if pointwise else args[place : place + 1]
        if not any(
            x.dtype in suspects if isinstance(x, torch.Tensor) else type(x) is complex
            for x in operands
        ):
            return False
        if kwargs.get("dtype") is not None or not all(
            _counts(x) for x in operands if isinstance(x, torch.Tensor)
        ):
            return False
        dtype = _common(func, args, place) if pointwise else args[place].dtype
        if dtype in always and (pointwise or args[place].dim()):
            return True
        return bool(refused) and dtype in refused.get(mode(func, args, kwargs, place), ())

    return check


def mode(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], place: int
) -> str:
    """What decides which kernel runs, besides the dtype: a 0-dim argument, strings, optional
    tensors, the kind of convolution.
    """
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
    # other numbers, such as alpha= or a weight, are not promoted
    replaced = _OPERANDS if func._overloadname in _SCALAR_KINDS else ()
    return dtypes.promoted(
        x
        for a, x in given
        if isinstance(x, torch.Tensor) or str(a.type) == "Tensor" or a.name in replaced
    )


def _shared(func: torch._ops.OpOverload, place: int, *others: int) -> Check:
    """Check arguments that must have the dtype of another argument; float32 is allowed beside a
    half-precision dtype.
    """
    names = [a.name for a in func._schema.arguments]

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | str:
        t = _asked(args, place)
        for other in others if t is not None else ():
            x = _asked(args, other)
            if (
                x is not None
                and x.dtype is not t.dtype
                and not (t.dtype in _HALF and x.dtype is torch.float32)
            ):
                return (
                    f"{names[other]}: expected {t.dtype}, as {names[place]} has, but got {x.dtype}"
                )
        return False

    return check


def _index(place: int, refused: frozenset[torch.dtype]) -> Check:
    """Check the dtype of an index."""
    return lambda args, kwargs: (t := _asked(args, place)) is not None and t.dtype in refused
