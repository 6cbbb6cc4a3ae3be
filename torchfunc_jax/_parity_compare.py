"""Comparison of the outcomes of two runs, leaf by leaf, for the parity tool; _parity_random.py
compares random functions.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from bridge.convert import trees
from bridge.errors import is_users, shown_line
from torchfunc_jax._parity_transforms import has_derivatives

# Tolerances between two implementations of the same operators: (relative, absolute)
_TOLERANCES = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (2e-2, 2e-2),
}
_PARTS = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
}
_SIDES = ("torch.func", "torchfunc_jax")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a comparison, as data; ``str()`` of it is the same in sentences.

    Attributes:
        kind: what differs: "value", "dtype", "shape", "device", "layout", "requires_grad",
            "strides", "type", "structure", "raised" (one side raised, or both without being asked
            to), "distribution", "repetition" (a seed does not repeat the numbers), or "nothing
            compared".
        where: the leaf, as in ``output['a'][1]``; "" if it is not about a leaf.
        torch_func, torchfunc_jax: what each side has there, as text; in a comparison with a port,
            the module and the port.
        float64: what PyTorch computes there in float64; None if it was not computed.
        index: which element of the leaf is the first to differ; None if it is not about values.
        wrong, elements: how many elements of the leaf differ, and how many it has.
        largest_absolute, largest_relative: the largest differences of the leaf's elements.
        others: the other leaves that differ.
        text: all of it in sentences.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import parity
        >>> wrong = lambda x: x if type(x) is torch.Tensor else x + 1
        >>> (check,) = parity(wrong, torch.zeros(2), transforms=["vmap"], jit=False)
        >>> (
        ...     check.details.kind,
        ...     check.details.where,
        ...     check.details.index,
        ...     check.details.largest_absolute,
        ... )
        ('value', 'output', (0,), 1.0)
    """

    kind: str
    text: str
    where: str = ""
    torch_func: str | None = None
    torchfunc_jax: str | None = None
    float64: str | None = None
    index: tuple[int, ...] | None = None
    wrong: int | None = None
    elements: int | None = None
    largest_absolute: float | None = None
    largest_relative: float | None = None
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(slots=True)
class Outcome:
    """The outcome of a run: its output, inputs, module state and captured tensors afterwards, and
    gradients; or its exception.
    """

    parts: dict[str, Any] = dataclasses.field(default_factory=dict)  # by their names in a report
    error: BaseException | None = None
    no_gradient: Exception | None = None  # the error of torch's autograd for the output's gradients
    drew: bool = False  # it drew from a generator of torch's
    changed: bool = False  # it changed an input, the module's state or a captured tensor
    in_ours: bool = True  # it ran code of this library


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How a comparison judges; the fields are named as parity's arguments."""

    rtol: float | None = None
    atol: float | None = None
    values: bool = True
    strides: bool = False
    may_do_more: bool = False
    raises: type[BaseException] | tuple[type[BaseException], ...] | None = None
    allow_empty: bool = False
    shapes: bool = True
    sides: tuple[str, str] = _SIDES  # their names in sentences
    # what is as near to the float64 value as PyTorch's is right, however far it is from PyTorch's
    nearer: bool = False


@dataclasses.dataclass(slots=True)
class Found:
    """The result of a comparison: the first difference, the largest difference of values, and what
    both did.
    """

    difference: Difference | None = None
    largest: float | None = None
    agreed: str = ""


def compare(
    theirs: Outcome, ours: Outcome, options: Options, in_float64: Callable[[], Outcome], name: str
) -> Found:
    """The first difference between two outcomes; name: the function's name; in_float64: runs
    torch.func's side in float64.
    """
    if theirs.error is not None or ours.error is not None or options.raises is not None:
        return _raised(theirs.error, ours.error, options, name)
    if theirs.no_gradient is not None or ours.no_gradient is not None:
        theirs, ours = (
            dataclasses.replace(
                o, parts={k: v for k, v in o.parts.items() if group(k) != "gradient"}
            )
            for o in (theirs, ours)
        )
    leaves = list(_leaves(theirs, ours, options.sides))
    around = sizes(theirs)
    found = [
        d
        for d in (
            x if isinstance(x, Difference) else _leaf(*x, options, in_float64, around)
            for x in leaves
        )
        if d.kind
    ]
    largest = [
        d.largest_absolute for d in found if d.kind == "value" and d.largest_absolute is not None
    ]
    largest += [
        _apart(x, y)[1]
        for x, y in ((x[1], x[2]) for x in leaves if not isinstance(x, Difference))
        if _comparable(x, y)
    ]
    most = max(largest, default=None)
    if found:
        first, *rest = found
        return Found(_among(first, tuple(d.where for d in rest), len(leaves)), most)
    if ours.no_gradient is not None and theirs.no_gradient is None:
        shown = shown_error(ours.no_gradient)
        a, b = options.sides
        text = (
            f"the outputs agree, but their gradients do not: {a}'s autograd computes them, {b} "
            f"raised {shown}"
        )
        return Found(Difference("raised", text, torch_func="returned", torchfunc_jax=shown), most)
    nothing = None if options.allow_empty else _nothing(theirs)
    if nothing is not None:
        return Found(Difference("nothing compared", nothing), most)
    return Found(None, most, "same values" if options.values else "same shapes and types")


# -- exceptions ------------------------------------------------------------------------------------
def shown_error(error: BaseException) -> str:
    """``ValueError: text (at model.py:12: y = f(x))``: the class, the first line of the message,
    and the user's line.
    """
    text = str(error).strip().partition("\n")[0][:800]
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            where = shown_line(frame.f_code.co_filename, line)
    return f"{type(error).__name__}: {text}" + (
        f" (at {where})" if where and where.partition(": ")[0] not in text else ""
    )


def _raised(
    theirs: BaseException | None, ours: BaseException | None, options: Options, name: str
) -> Found:
    shown = [shown_error(e) if e is not None else "returned" for e in (theirs, ours)]
    did = [
        f"{side} {'raised ' + text if error is not None else text}"
        for side, error, text in zip(options.sides, (theirs, ours), shown)
    ]

    def differ(text: str) -> Found:
        return Found(Difference("raised", text, torch_func=shown[0], torchfunc_jax=shown[1]))

    if options.raises is not None:
        wanted = " or ".join(
            e.__name__
            for e in (options.raises if isinstance(options.raises, tuple) else (options.raises,))
        )
        if not isinstance(theirs, options.raises) or not isinstance(ours, options.raises):
            return differ(f"expected both sides to raise {wanted}, but {did[0]}, {did[1]}")
    elif theirs is None:
        return differ(f"{did[0]}, {did[1]}")
    elif ours is None:
        if options.may_do_more:
            return Found(None, None, "works, torch.func does not")
        return differ(f"{did[0]}, {did[1]}")
    if not isinstance(ours, type(theirs)):
        return differ(f"{did[0]}, {did[1]}")
    if options.raises is None:
        said = [*did, *getattr(ours, "__notes__", ())]
        if isinstance(theirs, TypeError) and "positional argument" in shown[0]:
            said.append("Give an argument for each: parity(f, a, b), or --shape for each of them.")
        said.append(
            f"If {name} should raise here, say so: raises={type(theirs).__name__} (--raises "
            f"{type(theirs).__name__} on the command line)."
        )
        return differ("\n  ".join(["both sides raised, so nothing was compared", *said]))
    return Found(None, None, f"both raise {type(theirs).__name__}")


# -- leaves ----------------------------------------------------------------------------------------
# (name, torch.func's leaf, our leaf, its part, its path)
Leaf = tuple[str, Any, Any, str, tuple[Any, ...]]


def _leaves(
    theirs: Outcome, ours: Outcome, sides: tuple[str, str] = _SIDES
) -> Iterator[Leaf | Difference]:
    """The pairs of leaves, in order; a part of another structure is a difference in their place."""
    for part in dict.fromkeys((*theirs.parts, *ours.parts)):
        missing = [part not in side.parts for side in (theirs, ours)]
        if any(missing):
            has = ["has none" if m else "has one" for m in missing]
            yield Difference(
                "structure",
                f"{part}: {sides[0]} {has[0]}, {sides[1]} {has[1]}",
                part,
                has[0],
                has[1],
            )
            continue
        a, spec_a = trees.flatten(theirs.parts[part])
        b, spec_b = trees.flatten(ours.parts[part])
        if spec_a != spec_b:
            one, other = str(spec_a or "one leaf"), str(spec_b or "one leaf")
            yield Difference(
                "structure",
                f"{part} has another structure: {sides[0]} {one}, {sides[1]} {other}",
                part,
                one,
                other,
            )
            continue
        for path, x, y in zip(trees.paths(spec_a), a, b, strict=True):
            yield part + _shown_path(path), x, y, part, path


def sizes(outcome: Outcome) -> dict[str, float]:
    """For each part the largest finite number in it and in similar parts, at least 1; rounding
    errors are relative to it.
    """
    found: dict[str, float] = {}
    for _, x, _, part, _ in (
        leaf for leaf in _leaves(outcome, outcome) if not isinstance(leaf, Difference)
    ):
        if has_derivatives(x) and x.numel():
            size = _size(x.detach())
            kind = group(part)
            found[kind] = max(
                found.get(kind, 1.0), float(torch.where(size.isfinite(), size, 0).max())
            )
    return found


def group(part: str) -> str:
    """The group of a part: all gradients are one group,
    and every other part is a group of its own.
    """
    return "gradient" if part.startswith("gradient of ") else part


def tensors_of(outcome: Outcome) -> dict[str, torch.Tensor]:
    """The tensors of all parts, by the names of their leaves."""
    return {
        x[0]: x[1]
        for x in _leaves(outcome, outcome)
        if not isinstance(x, Difference) and isinstance(x[1], torch.Tensor)
    }


def _shown_path(path: tuple[Any, ...]) -> str:
    """The path of a leaf in Python's syntax: [0]['weight'].field"""
    return "".join(f".{step}" if isinstance(step, trees.Field) else f"[{step!r}]" for step in path)


def _among(first: Difference, others: tuple[str, ...], leaves: int) -> Difference:
    if not others:
        return first
    shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
    verb = "differs" if len(others) == 1 else "differ"
    return dataclasses.replace(
        first,
        text=f"{first.text}\n  Of {leaves} leaves compared, {shown} {verb} too.",
        others=others,
    )


_SAME = Difference("", "")


def _leaf(
    where: str,
    x: Any,
    y: Any,
    part: str,
    path: tuple[Any, ...],
    options: Options,
    in_float64: Callable[[], Outcome],
    around: dict[str, float],
) -> Difference:
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return _others(where, x, y, options.sides)
    for name in (
        "dtype",
        "layout",
        *(("shape",) if options.shapes else ()),
        "device",
        "requires_grad",
    ):
        if getattr(x, name) != getattr(y, name):
            return _attribute(where, name, getattr(x, name), getattr(y, name), options.sides)
    if options.strides and part == "output" and x.stride() != y.stride():
        return _attribute(where, "strides", x.stride(), y.stride(), options.sides)
    if not options.values or x.shape != y.shape:
        return _SAME

    def truth() -> torch.Tensor | None:
        found = tensors_of(in_float64()).get(where)
        return found.detach() if found is not None and found.shape == x.shape else None

    return _values(where, x.detach(), y.detach(), options, truth, around.get(group(part), 1.0))


def _attribute(where: str, name: str, x: Any, y: Any, sides: tuple[str, str]) -> Difference:
    a, b = (str(tuple(v) if isinstance(v, torch.Size) else v) for v in (x, y))
    return Difference(
        name, f"{where} differs in {name}: {sides[0]} {a}, {sides[1]} {b}", where, a, b
    )


def _others(where: str, x: Any, y: Any, sides: tuple[str, str]) -> Difference:
    """The difference between leaves that are not both tensors."""
    if type(x) is not type(y):
        return _attribute(where, "type", type(x).__name__, type(y).__name__, sides)
    if x is y:
        return _SAME
    if isinstance(x, np.ndarray):
        same = (
            x.dtype == y.dtype
            and x.shape == y.shape
            and np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")
        )
    else:
        same = bool(x == y) or bool(x != x and y != y)
    return _SAME if same else _attribute(where, "value", repr(x), repr(y), sides)


# -- values ----------------------------------------------------------------------------------------
def tolerances(dtype: torch.dtype, options: Options) -> tuple[float, float]:
    """The relative and the absolute tolerance for a floating-point or complex dtype."""
    real = _PARTS.get(dtype, dtype)
    rtol, atol = _TOLERANCES.get(real) or (torch.finfo(real).eps,) * 2
    return (
        options.rtol if options.rtol is not None else rtol,
        options.atol if options.atol is not None else atol,
    )


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that holds all its values exactly and has
    subtraction and comparison.
    """
    x = x.to_dense() if x.layout is not torch.strided else x
    if has_derivatives(x):
        return x.to(torch.complex128 if x.is_complex() else torch.float64)
    return x.view(torch.int64) if x.dtype is torch.uint64 else x.to(torch.int64)


def _comparable(x: Any, y: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and isinstance(y, torch.Tensor)
        and x.dtype == y.dtype
        and x.shape == y.shape
    )


def _apart(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The distance of each pair of elements (0 if both are equal or NaN), and the largest finite
    distance.
    """
    a, b = wide(x.detach()), wide(y.detach())
    same = a == b
    if has_derivatives(x):
        same |= a.isnan() & b.isnan()
    else:  # the difference of two integers may overflow
        a, b = a.double(), b.double()
    apart = torch.where(same, 0, (a - b).abs()).double()
    if not has_derivatives(x):
        apart = torch.where(same, 0, apart.clamp(min=1))
    finite = apart[apart.isfinite()]
    return apart, float(finite.max()) if finite.numel() else 0.0


def _values(
    where: str,
    x: torch.Tensor,
    y: torch.Tensor,
    options: Options,
    truth: Callable[[], torch.Tensor | None],
    around: float,
) -> Difference:
    apart, largest = _apart(x, y)
    allowed = ""
    if not has_derivatives(x):
        wrong = apart > 0
    else:
        rtol, atol = tolerances(x.dtype, options)
        size = _size(x)
        size = torch.where(size.isfinite(), size, 0)
        scale = min(1.0, float(size.max())) if size.numel() and options.atol is None else 1.0
        wrong = ~(apart <= atol * scale + rtol * size)
        unsure = wrong & (
            options.nearer
            | (apart <= atol + rtol * size)
            | (apart <= 16 * torch.finfo(x.dtype).eps * around)
        )
        if bool(unsure.any()) and options.atol is None:
            wrong &= ~(unsure & _as_near(x, y, apart, atol * scale + rtol * size, truth, around))
        allowed = f"{atol * scale:.2g} + {rtol:.2g} of the value"
    count = int(wrong.sum())
    if not count:
        return _SAME
    index = _place(int(wrong.flatten().int().argmax()), x)
    theirs, ours, exact = x[index].item(), y[index].item(), _exact(truth, x)
    value = None if exact is None else exact[index].item()
    worst = torch.where(wrong, torch.where(apart.isnan(), float("inf"), apart), -1)
    relative = torch.where(wrong & (wide(x) != 0), apart / _size(x), 0).nan_to_num(
        nan=0.0, posinf=0.0
    )
    most, most_at = float(worst.max()), _place(int(worst.argmax()), x)
    text = (
        f"{where} differs in value{f' at {list(index)}' if index else ''}: {options.sides[0]} "
        f"{theirs!r}, {options.sides[1]} {ours!r}"
    )
    if value is not None:
        nearer = "" if value != value else _nearer(theirs, ours, value, options.sides)
        text += f", float64 {value!r}{nearer}"
    text += (
        f"\n  {count} of {x.numel()} element{'s' if x.numel() != 1 else ''} "
        f"{'differ' if count > 1 else 'differs'}."
    )
    if most < float("inf"):
        text += (
            " The largest absolute difference is "
            f"{most:.3g}{f' at {list(most_at)}' if most_at else ''}"
        )
        text += f", the largest relative difference is {float(relative.max()):.3g}."
    text += f" Allowed is {allowed}." if allowed else " Integers and booleans must be equal."
    return Difference(
        "value",
        text,
        where,
        repr(theirs),
        repr(ours),
        None if value is None else repr(value),
        index,
        count,
        x.numel(),
        most if most < float("inf") else largest or None,
        float(relative.max()),
    )


def _size(x: torch.Tensor) -> torch.Tensor:
    x = wide(x)
    return x.abs() if has_derivatives(x) else x.double().abs()


def _place(flat: int, x: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, x.shape)) if x.dim() else ()


def _exact(truth: Callable[[], torch.Tensor | None], x: torch.Tensor) -> torch.Tensor | None:
    return truth() if has_derivatives(x) else None


def _nearer(theirs: Any, ours: Any, value: Any, sides: tuple[str, str]) -> str:
    a, b = abs(theirs - value), abs(ours - value)
    return "" if a == b or a != a else f" ({sides[0] if a < b or b != b else sides[1]} is nearer)"


def _as_near(
    x: torch.Tensor,
    y: torch.Tensor,
    apart: torch.Tensor,
    allowed: torch.Tensor,
    truth: Callable[[], torch.Tensor | None],
    around: float,
) -> torch.Tensor:
    """Which elements of a leaf of small numbers are right although they differ more than a fraction
    of these allows.

    Small numbers may be what is left of larger ones: then PyTorch's are no nearer to float64's than
    ours. Where float64 says 0, a few roundings of the largest number around are let through; where
    it cannot say, a few roundings of 1.
    """
    eps = torch.finfo(x.dtype).eps
    if x.dtype in (torch.float64, torch.complex128):
        return apart <= 16 * eps * around
    exact = truth()
    if exact is None:
        return apart <= 16 * eps
    theirs, ours = ((wide(v) - exact).abs() for v in (x, y))
    worst = theirs[theirs.isfinite()]
    return (ours <= allowed + 4 * (worst.max() if worst.numel() else 0.0)) | (
        (apart <= 16 * eps * around) & (exact.abs() < 1e-12 * around)
    )


# -- nothing to compare ----------------------------------------------------------------------------
def _nothing(outcome: Outcome) -> str | None:
    """The reason why an agreement would mean nothing; None if something was compared."""
    leaves, _ = trees.flatten(outcome.parts.get("output"))
    if outcome.changed or any(x is not None and not isinstance(x, torch.Tensor) for x in leaves):
        return None
    held = [x for x in leaves if isinstance(x, torch.Tensor)]
    if not held:
        return (
            "nothing was compared: the function returns no tensor and no number, and changes "
            "none of its arguments"
        ) + _HOW
    if not any(x.numel() for x in held):
        return (
            "nothing was compared: every tensor in the output is empty (the first has shape "
            f"{tuple(held[0].shape)})"
        ) + _HOW
    if all(x.numel() == 0 or (has_derivatives(x) and bool(x.detach().isnan().all())) for x in held):
        return "nothing was compared: every number in the output is NaN on both sides" + _HOW
    return None


_HOW = (
    "\n  If that is what should be tested, say so: allow_empty=True "
    "(--allow-empty on the command line)."
)


def definition(fn: Any) -> str:
    """Where a function is defined, ``model.py:12``; "" if that is not known."""
    code = getattr(getattr(fn, "forward", fn), "__code__", None)
    return (
        f"{os.path.relpath(code.co_filename)}:{code.co_firstlineno}"
        if code is not None and os.path.exists(code.co_filename)
        else ""
    )
