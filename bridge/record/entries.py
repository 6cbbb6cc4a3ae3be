"""The entries of a record: what an operator, a transform or an input is written down as, and walks
over an operator's arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge.cache_keys import Same
from bridge.convert.arguments import mapped
from bridge.record.tensor import Aval
from bridge.transform_kinds import Kind


@dataclasses.dataclass(slots=True, eq=False)
class Ref:
    """The place of an operand, the k-th, among an operator's arguments; among its results, the same
    tensor, changed in place.
    """

    k: int


@dataclasses.dataclass(slots=True, frozen=True)
class Value:
    """A value of a record that no function gets as a tensor: a result of the outermost transform,
    by its number.
    """

    ref: int


@dataclasses.dataclass(slots=True, eq=False)
class Number:
    """The place of a Python number, a float or an int, that is an input of the program."""

    k: int
    kind: type


@dataclasses.dataclass(slots=True, eq=False)
class Out:
    """The place of a new tensor among an operator's results."""

    aval: Aval


@dataclasses.dataclass(slots=True, eq=False)
class Op:
    """An operator with its static arguments, its operands' shapes, and a description of its
    results.

    Attributes:
        grad: the grad mode.
        changed: the positions of the operands that it writes to, with their avals afterwards.
        numbers: how many Python numbers it takes from the program's inputs.
        draws, by_value: whether it draws random numbers, and whether these depend on its operands'
            values.
        views: whether its results may share memory with its operands.
        autocast: the state of autocast (``guards.autocast``), if it is on.
        single: the aval of its only result, if it writes nothing.
        made: how many values it gives numbers to.
        alike: the first operator that differs at most in its operands' strides.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    outs: Any
    changed: tuple[tuple[int, Aval], ...]
    numbers: int
    draws: bool
    by_value: bool
    views: bool = True
    autocast: tuple[Any, ...] | None = None
    words: str | None = None  # made and used by bridge/record/words.py
    single: Aval | None = None
    made: int = 0
    alike: Any = None

    def __post_init__(self) -> None:
        self.made = _tensors(self.outs)
        self.single = self.outs.aval if type(self.outs) is Out and not self.changed else None


@dataclasses.dataclass(slots=True, eq=False)
class Begin:
    """A transform begins: its kind, its static arguments,
    and how many arguments its function gets.
    """

    kind: Kind
    params: Any
    made: int
    grad: bool


@dataclasses.dataclass(slots=True, eq=False)
class End:
    """The innermost transform ends, with these values as its function's results."""

    params: Any
    made: int


@dataclasses.dataclass(frozen=True)
class FunctionEnd:
    """What the forward of an autograd.Function gives beside tensors."""

    outs: Same  # what ``put_together`` needs of its outputs,
    kept: Same  # and of the values that its context keeps
    constant: tuple[bool, ...]  # for each output that is a tensor: whether it has no gradient
    materialize: bool
    # ``ctx.needs_input_grad``, if it was asked for: what the context keeps may follow it
    needs: tuple[bool, ...] | None

    def objects(self) -> list[Any]:
        """What the context keeps that may change."""
        return [x for x in self.kept.value[1] if not isinstance(x, _CONSTANT)]


_CONSTANT = bool | int | float | complex | str | bytes | torch.dtype | torch.device | None


@dataclasses.dataclass(slots=True, eq=False)
class Pull:
    """A call of the function that vjp or linearize has returned; node: the number of that
    transform's first result.
    """

    node: int
    made: int


@dataclasses.dataclass(slots=True, eq=False)
class Left:
    """A value from inside of transforms that have ended, which their function has kept, outside of
    them.
    """

    made: int = 1


@dataclasses.dataclass(slots=True, eq=False)
class Input:
    """A tensor from outside."""

    aval: Aval
    made: int = 1


def _tensors(outs: Any) -> int:
    if type(outs) is Out:
        return 1
    return sum(map(_tensors, outs)) if isinstance(outs, tuple | list) else 0


@functools.lru_cache(65536)
def interned(kind: Any, *what: Any) -> Any:
    """The one object of a kind (Begin, End, Pull, Left or Input) with these fields."""
    return kind(*what)


def filled(x: Any, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """An operator's arguments with these operands and numbers at their places."""
    return mapped(
        lambda v: tensors[v.k] if type(v) is Ref else numbers[v.k] if type(v) is Number else v, x
    )


def functions_of(owner: Any, names: str) -> list[Any]:
    """The functions of torch or torch.Tensor with these names, separated by spaces; those that this
    PyTorch lacks are left out.
    """
    return [f for n in names.split() if (f := getattr(owner, n, None)) is not None]
