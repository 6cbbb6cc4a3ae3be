"""jit's keys: which values are one and which are two, Python numbers as inputs, how many programs
are kept, copies of a jitted function.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import Traces, same
from torch import nn

from torchfunc_jax import explain, grad, jit, vmap

NAN = float("nan")


def identical(mine: Any, theirs: Any) -> None:
    """Equal trees: tensors bit by bit (NaN is NaN), other leaves of one type and value."""
    a, b = torch.utils._pytree.tree_leaves(mine), torch.utils._pytree.tree_leaves(theirs)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert type(x) is type(y), (x, y)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and x.shape == y.shape
            known = ~y.isnan()
            assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x[known], y[known])
            if x.is_floating_point():
                assert torch.equal(torch.signbit(x[known]), torch.signbit(y[known]))
        else:
            assert repr(x) == repr(y)


def alike(mine: Any, theirs: Any) -> None:
    """Equal trees but for rounding; other leaves of one type and value, NaN too."""
    for a, b in zip(
        torch.utils._pytree.tree_leaves(mine), torch.utils._pytree.tree_leaves(theirs), strict=True
    ):
        if isinstance(b, torch.Tensor):
            same(a, b, rtol=1e-6, atol=1e-6)
        else:
            assert type(a) is type(b) and repr(a) == repr(b)


# -- identical, not equal --------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Options:
    scale: Any


def _of(value: Any) -> float:
    """Some number that tells values apart which Python takes for equal."""
    while isinstance(value, tuple | Options):
        value = value[0] if isinstance(value, tuple) else value.scale
    value = value.real if isinstance(value, complex) else value
    return (
        10.0 if isinstance(value, bool) else 20.0 if isinstance(value, int) else 30.0
    ) + math.copysign(1.0, float(value))


SAME_BY_EQUALITY: dict[str, list[Any]] = {
    "zeros": [0.0, -0.0, 0, False],
    "ones": [1, True, 1.0],
    "in a tuple": [(0.0,), (-0.0,), (0,), (False,)],
    "in nested tuples": [((1, 2),), ((True, 2),), ((1.0, 2),)],
    "complex": [complex(0.0, 1.0), complex(-0.0, 1.0)],
    "numpy": [np.float64(0.0), np.float64(-0.0), 0.0, np.float32(0.0)],
    "a frozen dataclass": [Options(0.0), Options(-0.0), Options(0), Options(False)],
    "nan": [NAN, -NAN],
}


@pytest.mark.parametrize("name", SAME_BY_EQUALITY)
@pytest.mark.parametrize("how", ["argument", "keyword", "static_argnums", "in a dict", "twice"])
def test_equal_values_that_are_not_identical(name: str, how: str) -> None:
    def fn(x: torch.Tensor, s: Any) -> torch.Tensor:
        return x * _of(s["s"] if isinstance(s, dict) else s)

    compiled, x = jit(fn, static_argnums=1 if how == "static_argnums" else ()), torch.ones(2)
    for value in [*SAME_BY_EQUALITY[name]] * 2:
        given = {"s": value} if how == "in a dict" else value
        if how == "keyword":
            same(compiled(x, s=given), fn(x, s=given))
        else:
            same(compiled(x, given), fn(x, given))


def test_one_program_for_a_value_that_is_given_again() -> None:
    for value in (
        NAN,
        -0.0,
        np.float32(2.0),
        1.5,
        (NAN, 1),
        "text",
        Decimal("-0"),
        slice(0, 2),
        torch.float32,
    ):
        traced = Traces(lambda x, s: x * 2)
        compiled = jit(traced, static_argnums=1)
        for _ in range(3):
            compiled(torch.ones(2), copy.copy(value))
        assert traced.count == 1, value
        assert len(compiled.programs()) == 1


COPYSIGN: dict[str, Callable[..., Any]] = {
    "copysign": torch.copysign,
    "division": lambda x, s: x / s,
    "fill": lambda x, s: x.clone().fill_(s),
    "atan2": lambda x, s: torch.atan2(x, torch.full_like(x, s)),
}


@pytest.mark.parametrize("name", COPYSIGN)
def test_unjitted_calls_take_no_zero_for_another(name: str) -> None:
    fn, x = COPYSIGN[name], torch.tensor([1.0, -2.0, 3.0])
    for _ in range(3):
        for s in (0.0, -0.0, NAN, -0.0, 0.0):
            identical(vmap(lambda t, s=s: fn(t, s))(x), fn(x, s))
            same(vmap(lambda t, s=s: fn(t, s).abs())(x), fn(x, s).abs())


def test_keys_of_dicts_are_told_apart() -> None:
    fn, x = jit(lambda d: {k: t * 2 for k, t in d.items()}), torch.ones(2)
    for key in (1, True, 1.0, 0.0, -0.0):
        identical(list(fn({key: x})), [key])


def test_gradients_wanted_of_other_arguments() -> None:
    """The positions of arguments that require grad are not taken for the shapes of others."""
    fn = jit(lambda *xs: sum(x.sum() for x in xs))
    shapes = [torch.ones(n) for n in range(1, 5)]
    for x in shapes:
        for y in shapes:
            for a, b in ((False, False), (True, False), (False, True), (True, True)):
                assert fn(
                    x.clone().requires_grad_(a), y.clone().requires_grad_(b)
                ).requires_grad == (a or b)


# -- Python numbers as inputs ----------------------------------------------------------------------
# the function, whether one program does for all numbers
NUMBERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "multiplied": (lambda x, s: x * s, True),
    "from the left": (lambda x, s: s * x, True),
    "added": (lambda x, s: x + s, True),
    "subtracted from": (lambda x, s: s - x, True),
    "divided": (lambda x, s: x / s, True),
    "divided by": (lambda x, s: s / x, True),
    "alpha": (lambda x, s: torch.sub(x, x.sin(), alpha=s), True),
    "arithmetic": (lambda x, s: x * (1 - s) + s * s - abs(s) / 3, True),
    "compared with a tensor": (lambda x, s: x.where(x > s, s), True),
    "addcdiv": (lambda x, s: torch.addcdiv(x, x, x + 5, value=s), True),
    "in place": (lambda x, s: x.clone().mul_(s).add_(x, alpha=s), True),
    "returned": (lambda x, s: (x, s, [s * 2, {"a": -s}]), True),
    "in a transform": (lambda x, s: grad(lambda t: (t * t * s).sum())(x), True),
    "in two transforms": (lambda x, s: vmap(grad(lambda t: t.sin() * s))(x), True),
    "type by isinstance": (lambda x, s: x * s if isinstance(s, float) else x * s + 1, True),
    "branch": (lambda x, s: x * s if s > 1 else x - s, False),
    "shape": (lambda x, s: x.sum() + torch.ones(abs(int(s)) + 1), False),
    "range": (lambda x, s: sum(x * i for i in range(abs(int(s)) + 1)), False),
    "format": (lambda x, s: (x, f"{s:.3f}"), False),
    "hash": (lambda x, s: x * {s: 3.0}[s], False),
    "type": (lambda x, s: x * s if type(s) is float else x * s + 1, False),
    "math": (lambda x, s: x * math.sin(s), False),
    "caught": (lambda x, s: x * _caught(s), False),
}


def _caught(s: Any) -> float:
    try:
        return math.sqrt(abs(s))
    except Exception:
        return 0.0


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "how",
    [
        "argument",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("keyword", "in containers")),
    ],
)
@pytest.mark.parametrize(
    "numbers",
    [[0.5, 2.0, -0.0, 0.1, math.inf, NAN, 7.25], [3, 1, -2, 0, 7]],
    ids=["floats", "ints"],
)
def test_a_number_that_changes(name: str, how: str, numbers: list[Any]) -> None:
    fn, once = NUMBERS[name]
    if name in ("shape", "range", "math"):
        numbers = [n for n in numbers if math.isfinite(n)]
    traced = Traces(
        fn if how != "in containers" else lambda given: fn(given["x"][0], given["s"][0])
    )
    compiled, x = jit(traced), torch.tensor([1.0, -2.0, 0.5])
    for s in [*numbers, *numbers[:2]]:
        mine = (
            compiled({"x": [x], "s": (s,)})
            if how == "in containers"
            else compiled(x, s=s)
            if how == "keyword"
            else compiled(x, s)
        )
        theirs = fn(x, s)
        alike(mine, theirs)
    if once and not (name == "type by isinstance" and isinstance(numbers[0], int)):
        assert traced.count == 2 and len(compiled.programs()) == 2


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_are_those_of_a_number(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, s: Any) -> Any:
        return (
            x * s,
            s * x.sum(),
            x.sum().to(x.dtype) + s,
            torch.full((2,), s),
            x.new_full((2,), s) if type(s) is int else x / s,
        )

    compiled, x = jit(fn), torch.tensor([1, 0, 2]).to(dtype)
    for numbers in ([0.5, 2.0, 3.0, 0.25], [1, 3, 2, 5]):
        for s in numbers:
            mine, theirs = compiled(x, s), fn(x, s)
            assert [t.dtype for t in mine] == [t.dtype for t in theirs]
            same(
                mine,
                theirs,
                rtol=1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6,
                atol=1e-6,
            )


def test_a_number_is_as_precise_as_in_torch() -> None:
    fn = jit(lambda x, s: x * s)
    for s in (0.1, 1 / 3, 1e-200, math.pi):
        same(
            fn(torch.ones(2, dtype=torch.float64), s),
            torch.full((2,), s, dtype=torch.float64),
            rtol=0,
            atol=0,
        )
    fn = jit(lambda x, n: (x + n, n * n, n**20))
    for n in (2, 3, 10**9, 2**62, -(2**63), 2**63 - 1):
        mine = fn(torch.zeros(2, dtype=torch.int64), n)
        assert mine[1:] == (n * n, n**20) and mine[0].tolist() == [n, n]
    data: Any = lambda x, n: (
        torch.tensor(n),
        torch.as_tensor([n, 1]),
        x.new_tensor([[n]]),
        torch.asarray(n + 1),
        torch.tensor(data=n / 3),
    )
    fn, x = jit(data), torch.zeros(2, dtype=torch.int64)
    for n in (1, 2**31 + 1, 2**40 + 5, -(2**33) - 1, 7):
        same(fn(x, n), data(x, n), rtol=0, atol=0)


@pytest.mark.parametrize(
    "make", [torch.tensor, torch.as_tensor, lambda s: torch.tensor(s / 3, dtype=torch.float64)]
)
@pytest.mark.parametrize("numbers", [(1.0, 2.5, -3.0, 1e300, math.inf, 0.5), (1, 2, 2**40 + 1, -7)])
def test_a_tensor_of_a_number_is_compiled_once(make: Any, numbers: Sequence[float]) -> None:
    data: Any = lambda x, s: (make(s), x * make(s))
    fn, x = jit(data), torch.ones(2)
    for s in numbers:
        mine, theirs = fn(x, s), data(x, s)
        assert [t.dtype for t in mine] == [t.dtype for t in theirs]
        same(mine, theirs, rtol=0, atol=0)
    # the first number, all numbers, and one that float32 cannot hold
    assert len(fn.programs()) <= 3


REFUSED = {
    "too large for int64": (lambda x, s: x + s, [1, 2, 2**70]),
    "too large for float32": (lambda x, s: (x * 0).fill_(s), [1.0, 2.0, 1e300]),
    "division by zero": (lambda x, s: x * (1.0 / s), [1.0, 2.0, 0.0]),
    "complex": (lambda x, s: x * s**0.5, [1.0, 2.0, -1.0, 4.0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_fit_no_input_are_static(name: str) -> None:
    fn, numbers = REFUSED[name]
    compiled, x = jit(fn), torch.tensor([1, 2]) if "int64" in name else torch.ones(2)
    for s in [*numbers, *numbers]:
        try:
            expected: Any = fn(x, s)
        except (RuntimeError, ArithmeticError):
            # PyTorch refuses to fill, and so must the program if it is compiled for that number
            if name == "too large for float32":
                continue
            with pytest.raises((RuntimeError, ArithmeticError)):
                compiled(x, s)
        else:
            same(compiled(x, s), expected)


def test_backward_and_optimizer_with_a_learning_rate() -> None:
    """A training step whose learning rate changes at each call, as torch does it."""

    def train(step: Any) -> torch.Tensor:
        torch.manual_seed(0)
        w = torch.randn(3, requires_grad=True)
        x = torch.randn(8, 3)
        for i in range(6):
            loss = step(w, x, 0.1 / (i + 1))
            (g,) = torch.autograd.grad(loss, w)
            w = (w - 0.1 * g).detach().requires_grad_()
        return w

    traced = Traces(lambda w, x, s: ((x @ w) ** 2).mean() * s)
    same(train(jit(traced)), train(traced.fn), rtol=1e-5, atol=1e-6)
    assert traced.count == 2


def test_side_effects_see_numbers() -> None:
    """What a function keeps of a number when it is traced is a number when the trace is over."""
    kept: list[Any] = []

    def fn(x: torch.Tensor, s: float) -> torch.Tensor:
        kept.append(s * 2)
        return x * s

    compiled = jit(fn)
    compiled(torch.ones(2), 1.0), compiled(torch.ones(2), 2.0)
    assert [float(k) + 1 for k in kept] == [3.0, 5.0] and kept[1] > 3


# -- programs --------------------------------------------------------------------------------------
def test_the_programs_that_were_not_used_for_longest_go() -> None:
    traced = Traces(lambda x: x * 2)
    compiled = jit(traced, max_programs=3)
    with pytest.warns(
        RuntimeWarning,
        match=r"max_programs=3 programs were compiled, the last because args\[0\] was float32",
    ) as told:
        for n in (1, 2, 3, 1, 4, 1, 2):
            same(compiled(torch.ones(n)), torch.full((n,), 2.0))
    assert len(told) == 1
    assert traced.count == 5  # 2 went when 4 came; 3 when 2 came again
    assert [p.arguments for p in compiled.programs()] == [
        (f"args[0]: float32[{n}]",) for n in (2, 1, 4)
    ]
    assert [p.calls for p in compiled.programs()] == [1, 3, 1]
    with pytest.raises(ValueError, match="max_programs"):
        jit(torch.sin, max_programs=0)


def test_why_a_program_was_compiled() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    class Scaled:
        factor = 1.0

        def __init__(self) -> None:
            self.factor = 2.0

        def __call__(self, x: torch.Tensor, how: str = "a") -> torch.Tensor:
            return model(x) * self.factor

    scaled = Scaled()
    fn, x = jit(scaled), torch.ones(2, 3)
    steps: list[tuple[Callable[[], Any], str]] = [
        (lambda: None, "it is the first one"),
        (lambda: fn(torch.ones(4, 3)), "args[0] was float32[2, 3] and now is float32[4, 3]"),
        (lambda: fn(x, "b"), "'b'"),
        (
            lambda: model.eval(),
            "the module Sequential was in training mode and now is in evaluation mode",
        ),
        (lambda: setattr(scaled, "factor", 3.0), "Scaled.factor was 2.0 and now is 3.0"),
        (
            lambda: model.append(nn.ReLU()),
            "submodule '2' of the module Sequential was missing and now is ReLU",
        ),
        (lambda: model.register_forward_hook(lambda *_: None), "hooks of the module Sequential"),
        (
            lambda: torch.set_default_dtype(torch.float64),
            "the default dtype was torch.float32 and now is torch.float64",
        ),
    ]
    try:
        for change, expected in steps:
            with explain(io.StringIO()) as log:
                change()
                fn(x)
            assert len(log) in (1, 2) and any(expected in line for line in log), (log, expected)
            assert all(line.startswith("jit of Scaled: a program was compiled: ") for line in log)
    finally:
        torch.set_default_dtype(torch.float32)
    with explain(io.StringIO()) as log:
        fn(x)
    assert not log or "default dtype" not in log[0]


def test_explain_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHFUNC_JAX_EXPLAIN", "1")
    jit(torch.cos)(torch.ones(2))
    assert capsys.readouterr().err == "jit of cos: a program was compiled: it is the first one\n"
    monkeypatch.setenv("TORCHFUNC_JAX_EXPLAIN", "0")
    jit(torch.cos)(torch.ones(2))
    assert not capsys.readouterr().err


# -- objects are not kept alive --------------------------------------------------------------------
class Plain:
    def __init__(self) -> None:
        self.w = torch.ones(3)

    @jit
    def call(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    @jit
    def call(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("cls", [Plain, Module])
def test_a_jitted_method_keeps_no_instance(cls: Any) -> None:
    made = [cls() for _ in range(3)]
    for m in made:
        m.call(torch.ones(3))
    assert len(cls.call.programs()) == 3
    refs = [weakref.ref(m) for m in made]
    del made, m
    gc.collect()
    assert [r() for r in refs] == [None] * 3
    assert not cls.call.programs()


def test_functions_and_modules_as_arguments_are_not_kept() -> None:
    fn = jit(lambda f, x: f(x))
    for make in (lambda: nn.Linear(2, 2), lambda: lambda x: x * 2, lambda: nn.Linear(2, 2).forward):
        given = make()
        fn(given, torch.ones(2))
        ref = weakref.ref(getattr(given, "__self__", given))
        del given
        gc.collect()
        assert ref() is None and not fn.programs()


# -- copies ----------------------------------------------------------------------------------------
@jit
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Holder(nn.Module):
    """A module that keeps jitted functions, of a function, of its part and of a method."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)
        self.fast = jit(self.part)
        self.method = jit(self.plain)
        self.free = doubled
        self.sine = jit(torch.sin, max_programs=5)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.sine(self.free(self.part(x)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.fast(x), self.method(x), self.free(x), self.sine(x)


@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "copy", "pickle"],
)
@pytest.mark.parametrize("called", [False, True])
def test_copies_of_a_module_that_holds_jitted_functions(how: Any, called: bool) -> None:
    model, x = Holder(), torch.randn(3)
    if called:
        model(x)
    other = how(model)
    same(other(x), model(x), rtol=1e-6, atol=1e-6)
    assert other.free is doubled
    if how is not copy.copy:
        with torch.no_grad():
            other.part.weight.fill_(0.0)
        assert not torch.equal(other(x)[0], model(x)[0])
        (
            same(other(x)[0], other.part(x)),
            same(other(x)[1], other.plain(x)),
            same(model(x)[0], model.part(x), rtol=1e-6, atol=1e-6),
        )
        assert other.fast.__wrapped__ is other.part


def test_a_jitted_module_of_a_class_of_the_users_is_pickled() -> None:
    """Its class has annotations that cannot be pickled; functools.update_wrapper copies them."""
    fn, x = jit(Holder()), torch.randn(3)
    fn(x)
    for other in (pickle.loads(pickle.dumps(fn)), copy.deepcopy(fn)):
        assert (
            type(other.__wrapped__) is Holder
            and other.__wrapped__ is not fn.__wrapped__
            and other.__module__ == fn.__module__
        )
        same(other(x), fn(x), rtol=1e-6, atol=1e-6)


def test_a_jitted_function_by_itself() -> None:
    assert pickle.loads(pickle.dumps(doubled)) is doubled and copy.deepcopy(doubled) is doubled
    fn = jit(F.relu, static_argnums=1, max_programs=7)
    fn(torch.ones(2), True)
    for other in (copy.deepcopy(fn), pickle.loads(pickle.dumps(fn)), copy.copy(fn)):
        assert not other.programs() and other._most == 7 and len(fn.programs()) == 1
        same(other(-torch.ones(2), False), torch.zeros(2))
