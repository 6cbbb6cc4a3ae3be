"""Python numbers as inputs of a compiled program: the objects that stand for them while a function
is traced, and their values at a call.

PyTorch takes ``Float`` and ``Int`` wherever it takes a number, because they are a SymFloat and a
SymInt. Arithmetic among them is written down and repeated by Python at each call, so ``1 - lr`` is
exact for every number. A comparison is written down with its answer: the program is right for the
numbers with these answers. Code that asks for a value (``int()``, a shape, a hash) gets it, and
that is noted: the program is then right for that value alone.
"""

from __future__ import annotations

import functools
import gc
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from bridge.cache_keys import identical
from bridge.errors import NotInLoopError
from bridge.lowering.common.builders import number as as_number
from bridge.lowering.common.promotion import cast
from bridge.process import having
from bridge.trace.levels import state

SLOTS = 64  # how many numbers of one kind a program can take
_INT = np.iinfo(np.int64)
_DTYPES: dict[type, Any] = {float: np.float64, int: np.int64}


class Misfit(Exception):
    """The numbers cannot be inputs of the program: one is too large for a dtype, or an operation
    gave another type than in the trace.
    """


class OtherAnswer(Misfit):
    """A comparison that the program contains has another answer for the numbers."""


class HashedNumber(BaseException):
    """Ends a trace in which a number is hashed. A dict, set or cache (functools.lru_cache) would
    keep it beyond the trace, and give it to whoever asks for an equal number.

    Attributes:
        origin: the numbers that it is computed from.
    """

    def __init__(self, origin: frozenset[int]) -> None:
        super().__init__()
        self.origin = origin


class Inputs:
    """The numbers of one call, floats and ints, as inputs of the program that is traced with them;
    it can take ``size`` of each kind.
    """

    def __init__(self, values: Sequence[float | int], size: int = SLOTS) -> None:
        self.values, self.size = list(values), size
        self.asked: set[int] = set()
        self.answers: dict[tuple[Any, ...], bool] = {}  # of the comparisons, by rule and operands
        self.closed = False
        self.late: list[weakref.ref[Any]] = []  # those of the trace, each ``Late``
        self.slots: dict[type, list[Number]] = {float: [], int: []}
        self._vectors: dict[type, Any] = {}
        self._value_of: Any = None
        self._where: dict[Any, int] = {}

    def number(self, k: int) -> Any:
        """The Float or Int that stands for the number at that position while the function is
        traced.
        """
        return _made(
            Number(self, type(self.values[k]), ("input", k), self.values[k], frozenset((k,)))
        )

    @contextmanager
    def tracing(
        self,
        floats: torch.Tensor,
        ints: torch.Tensor,
        value_of: Callable[[torch.Tensor], jax.Array],
    ) -> Iterator[None]:
        """While entered, the function is traced; floats and ints hold the numbers, and value_of
        gives a tensor's JAX value.
        """
        # a trace that was given up may come before
        self.closed, self._vectors, self._value_of = False, {float: floats, int: ints}, value_of
        try:
            with having(state, numbers=self):
                yield
        finally:
            self.closed, self._vectors, self._value_of = True, {}, None

    def keeps_late(self) -> bool:
        """Whether something still refers to a ``Late`` number after the trace."""
        if any(found() is not None for found in self.late):
            gc.collect(0)  # frames of exceptions are parts of cycles, as young as the trace
        return any(found() is not None for found in self.late)

    def array(self, number: Number, dtype: Any = None) -> jax.Array:
        """The number as a 0-dim JAX value of the given dtype; None: of float64 or int64."""
        if type(number) is Late:
            value = number.array
        elif type(number) is _Row:
            value = self._row(number, dtype)
        else:
            at = self._slot(number, dtype)
            if at is None:
                return as_number(number.asked(), _DTYPES[number.kind] if dtype is None else dtype)
            value = lax.index_in_dim(
                self._value_of(self._vectors[number.kind]), at, 0, keepdims=False
            )
        return value if dtype is None else cast(value, dtype)

    def _row(self, row: _Row, dtype: Any) -> jax.Array:
        """The number of the repetition in progress."""
        places = [self._slot(n, dtype) for n in row.numbers]
        if None in places:
            raise NotInLoopError("a number that is no input, in a loop")
        at = lax.dynamic_index_in_dim(np.asarray(places), row.repetition, 0, keepdims=False)
        return lax.dynamic_index_in_dim(
            self._value_of(self._vectors[row.kind]), at, 0, keepdims=False
        )

    def _slot(self, number: Number, dtype: Any) -> int | None:
        """The number's slot among the inputs of its kind, taken now if it has none; None if the
        number does not fit.
        """
        slots = self.slots[number.kind]
        at = self._where.get((number.kind, number.rule), len(slots))
        if not number.takes(number.value, dtype) or at == self.size:
            return None
        if at == len(slots):
            self._where[number.kind, number.rule] = at
            slots.append(number)
        if dtype is not None:
            slots[at].limits.add(np.dtype(dtype))
        return at

    def evaluated(self, values: Sequence[float | int]) -> tuple[np.ndarray, np.ndarray]:
        """The program's inputs for these numbers; raises Misfit if a number does not fit."""
        if not self.answered_alike(values):
            raise OtherAnswer
        out = []
        for kind, dtype in _DTYPES.items():
            vector = np.zeros(self.size, dtype)
            for i, number in enumerate(self.slots[kind]):
                value = number.evaluate(values)
                if not number.takes(value):
                    raise Misfit
                vector[i] = value
            out.append(vector)
        return out[0], out[1]

    def answered_alike(self, values: Sequence[Any]) -> bool:
        """Whether each comparison in the trace has the same answer for these numbers."""
        return all(
            rule(*_evaluated(operands, values)) is answer
            for (rule, *operands), answer in self.answers.items()
        )

    def traced_alike(self, values: Sequence[Any], numbers: Sequence[Any]) -> bool:
        """Whether a trace for these values would be the same as the one for the numbers that were
        asked about.
        """
        same = all(identical(values[k]) == identical(numbers[k]) for k in self.asked)
        try:
            return same and self.answered_alike(values)
        except Misfit:
            return False


def _evaluated(operands: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    return [o.evaluate(values) if type(o) is Number else o for o in operands]


class Number:
    """A number as a rule: ("input", k) or (function, operands). For PyTorch it is the node of a
    SymFloat or SymInt.
    """

    __slots__ = ("inputs", "kind", "limits", "origin", "rule", "value")

    def __init__(
        self, inputs: Inputs, kind: type, rule: tuple[Any, ...], value: Any, origin: frozenset[int]
    ) -> None:
        self.inputs, self.kind, self.rule, self.value, self.origin = (
            inputs,
            kind,
            rule,
            value,
            origin,
        )
        self.limits: set[Any] = set()  # the dtypes that it is cast to

    def asked(self) -> Any:
        """The value; the question is noted while the function is traced."""
        if not self.inputs.closed:
            self.inputs.asked |= self.origin
        return self.value

    def takes(self, value: Any, cast_to: Any = None) -> bool:
        """Whether a value can take this number's place: PyTorch refuses some values outside of a
        dtype's range, and wraps others around.
        """
        if self.kind is int and not _INT.min <= value <= _INT.max:
            return False
        for dtype in self.limits if cast_to is None else (np.dtype(cast_to),):
            if dtype.kind in "iu":
                if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                    return False
            elif dtype.kind != "b" and math.isfinite(value) and abs(value) > _greatest(dtype):
                return False
        return True

    def evaluate(self, values: Sequence[Any]) -> Any:
        rule, *operands = self.rule
        if rule == "input":
            return values[operands[0]]
        try:
            value = rule(*_evaluated(operands, values))
        except ArithmeticError:
            raise Misfit from None
        if type(value) is not self.kind:
            raise Misfit
        return value

    # -- methods that PyTorch's C++ calls on a node ------------------------------------------------
    is_int, is_float = (lambda self: self.kind is int), (lambda self: self.kind is float)
    is_bool = is_nested_int = lambda self: False
    is_symbolic = lambda self: True
    maybe_as_int = maybe_as_float = constant_int = lambda self: None
    clone = lambda self: self

    def __getattr__(self, name: str) -> Any:
        if name in ("guard_float", "guard_int", "int_", "float_"):
            return lambda *_: self.asked()
        raise AttributeError(name)


class _Row(Number):
    """A number of a repeated step, which is another input in each repetition."""

    __slots__ = ("numbers", "repetition")

    def __init__(self, numbers: Sequence[Number], repetition: jax.Array) -> None:
        first = numbers[0]
        super().__init__(first.inputs, first.kind, ("row",), None, frozenset())
        self.numbers, self.repetition = numbers, repetition

    def asked(self) -> Any:
        raise NotInLoopError("a number whose value is asked for, in a loop")


class Late(Number):
    """A number that ``item()`` gives of a tensor of the trace, and that is known when the program
    has run. Arithmetic with it becomes operations of the program.

    Args:
        array: its value in the trace, of float64 or int64.
        wrap: makes a traced tensor of such a value.
        refuse: raises the error for code that asks for the value.
    """

    __slots__ = ("array", "refuse", "tensor", "wrap")

    def __init__(
        self,
        inputs: Inputs,
        array: jax.Array,
        wrap: Callable[[jax.Array], Any],
        refuse: Callable[[], Any],
    ) -> None:
        kind = float if array.dtype == np.float64 else int
        super().__init__(inputs, kind, ("late",), None, frozenset())
        self.array, self.tensor, self.wrap, self.refuse = array, wrap(array), wrap, refuse

    def asked(self) -> Any:
        return self.refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: self.asked()  # whatever else C++ does with it needs its value

    def applied(self, rule: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """An operation on this number and others."""
        integers = all(
            (o.kind if isinstance(o, Number) else type(o)) is not float for o in operands
        )
        unlike_python = integers and (
            rule is operator.pow
            # an integer divided by zero is no error in a program, but some integer
            or (rule in (operator.floordiv, operator.mod) and isinstance(operands[1], Number))
        )
        if rule not in _OF_LATE or unlike_python or self.tensor.node.level.closed:
            return self.asked()
        if rule in _DIVISIONS and not isinstance(operands[1], Number):
            rule(1, operands[1])  # raises ZeroDivisionError as Python does
        values = [o.inputs.array(o) if isinstance(o, Number) else o for o in operands]
        array = values[0].astype(float) if rule is float else rule(*values)
        return late(self.inputs, array, self.wrap, self.refuse)


def in_repetition(numbers: Sequence[Any], step: int, repetition: jax.Array) -> list[Any]:
    """The ``step`` numbers of one step of a loop, made from those of one repetition after the
    other; repetition: the present index.
    """
    found = []
    for k in range(step):
        rows = list(numbers[k::step])
        if all(is_input(x) and x.node.rule[0] == "input" for x in rows):
            found.append(_made(_Row([x.node for x in rows], repetition)))
        elif any(map(is_input, rows)) or len({identical(x) for x in rows}) > 1:
            raise NotInLoopError("a number that is another one each time, in a loop")
        else:
            found.append(rows[0])
    return found


@functools.cache
def _greatest(dtype: np.dtype) -> float:
    return float(jnp.finfo(dtype).max)


def _made(number: Number) -> Any:
    return Float(number) if number.kind is float else Int(number)


def _applied(rule: Callable[..., Any], *operands: Any) -> Any:
    """An operation on numbers, or a comparison: it is written down during the trace, and done at
    once after it.
    """
    if any(type(o) is _Row for o in operands):
        raise NotInLoopError("arithmetic with a number that is another one each time, in a loop")
    late = next((o for o in operands if type(o) is Late), None)
    if late is not None:
        return late.applied(rule, operands)
    numbers = [o for o in operands if type(o) is Number]
    value = rule(*[o.value if type(o) is Number else o for o in operands])
    if all(n.inputs.closed for n in numbers):
        return value
    answers = numbers[0].inputs.answers
    if type(value) is bool and len(answers) < SLOTS:  # a loop until n is 0 would have one each time
        answers[rule, *operands] = value
        return value
    if type(value) is not float and type(value) is not int:
        return rule(*[o.asked() if type(o) is Number else o for o in operands])
    origin = frozenset().union(*[n.origin for n in numbers])
    return _made(Number(numbers[0].inputs, type(value), (rule, *operands), value, origin))


def _arithmetic(rule: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        if any(type(x) not in (Float, Int, int, float, bool) for x in others):
            return NotImplemented
        operands = [x.node if is_input(x) else x for x in (self, *others)]
        return _applied(rule, *(reversed(operands) if swapped else operands))

    return method


def _asked(name: str) -> Callable[..., Any]:
    """A method that asks for the value, and is then the value's own."""
    return lambda self, *args: getattr(self.node.asked(), name)(
        *[x.node.asked() if is_input(x) else x for x in args]
    )


_UNARY, _BINARY = ("neg", "pos", "abs"), ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_DIVISIONS = frozenset([operator.truediv, operator.floordiv, operator.mod])
#: What a program can compute of a ``Late`` as Python would.
_OF_LATE = frozenset([float, *[getattr(operator, name) for name in (*_UNARY, *_BINARY)]])
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_ASKED = (
    "reduce",
    "float",
    "int",
    "index",
    "complex",
    "str",
    "repr",
    "format",
    "round",
    "trunc",
    "floor",
    "ceil",
    "invert",
    "divmod",
    "rdivmod",
    "and",
    "rand",
    "or",
    "ror",
    "xor",
    "rxor",
    "lshift",
    "rlshift",
    "rshift",
    "rrshift",
)


def _hash(self: Any) -> int:
    number = self.node
    if state.jitting and type(number) is Number and not number.inputs.closed:
        raise HashedNumber(number.origin)
    return hash(number.asked())


def _namespace(kind: type) -> dict[str, Any]:
    def as_array(self: Any, dtype: Any = None) -> jax.Array:
        """The number as a 0-dim JAX value of a dtype, for a lowering; None: of float64 or int64."""
        return self.node.inputs.array(self.node, dtype)

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__") or not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return getattr(self.node.asked(), name)

    space: dict[str, Any] = {
        "__class__": property(lambda self: kind),
        "as_array": as_array,
        "__jax_array__": as_array,
        "__getattr__": attribute,
        "__doc__": f"Stands for a Python {kind.__name__} while a function is traced.",
        "__array__": lambda self, *args: np.asarray(self.node.asked(), *args),
        "__deepcopy__": lambda self, memo: self,
        "__copy__": lambda self: self,
        "__sym_float__": lambda self: self if kind is float else _applied(float, self.node),
    }
    both = (*_UNARY, *_BINARY, *_COMPARED)
    space |= {f"__{name}__": _arithmetic(getattr(operator, name)) for name in both}
    space["__bool__"] = _arithmetic(operator.truth)
    space |= {
        f"__r{name}__": _arithmetic(getattr(operator, name), swapped=True) for name in _BINARY
    }
    asked = [f"__{name}__" for name in _ASKED]
    # SymFloat and SymInt have methods of these names
    asked += [name for name in ("is_integer", "hex", "as_integer_ratio") if hasattr(kind, name)]
    return space | {name: _asked(name) for name in asked} | {"__hash__": _hash}


Float = type("Float", (torch.SymFloat,), _namespace(float))
Int = type("Int", (torch.SymInt,), _namespace(int))


def is_input(x: Any) -> bool:
    """Whether x stands for a number that is an input of the program being traced."""
    return type(x) is Float or type(x) is Int


def late(inputs: Inputs, *args: Any) -> Any:
    """The Float or Int that stands for a ``Late`` of these arguments."""
    found = _made(Late(inputs, *args))
    inputs.late.append(weakref.ref(found))
    return found


def is_late(x: Any) -> bool:
    """Whether x stands for a number that is known when the program has run."""
    return is_input(x) and type(x.node) is Late


def own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An operator's arguments with our own Float and Int in place of the SymFloat and SymInt that
    PyTorch passes for them.
    """
    if state.numbers is None:
        return args, kwargs
    return tuple(map(_own, args)), {name: _own(x) for name, x in kwargs.items()}


def _own(x: Any) -> Any:
    if type(x) in (torch.SymFloat, torch.SymInt) and isinstance(x.node, Number):
        return _made(x.node)
    return type(x)(map(_own, x)) if type(x) in (list, tuple) else x
