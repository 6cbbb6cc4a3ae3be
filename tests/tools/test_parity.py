"""Parity as a tool: it judges, says what differs where, and is to be had as a function, a command
and a pytest fixture.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import time
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.stats
import torch
from autograd_functions import SetupContext
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from bridge.record.tensor import Recorded
from bridge.trace.tracing import Traced
from torchfunc_jax import _parity_random, parity_cli
from torchfunc_jax.cli import app
from torchfunc_jax.parity_specs import value
from torchfunc_jax.testing import ParityError, assert_parity, failed, parity

pytest_plugins = ["pytester"]


def on_jax(x: Any) -> bool:
    """Whether this is our run, so that a function can behave otherwise there."""
    return isinstance(x, Traced | Recorded)


def compiling(x: Any) -> bool:
    """Whether this is our run under jit, where values are not known."""
    try:
        return on_jax(x) and not isinstance(float(x.sum()), float)
    except RuntimeError:
        return True


class Pair(NamedTuple):
    left: Any
    right: Any


X, W = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 1, 8).reshape(4, 2)
EAGER = {"transforms": ["functionalize"], "jit": False}

NESTINGS = [
    "call",
    "grad",
    "grad_and_value",
    "vjp",
    "jvp",
    "linearize",
    "jacrev",
    "jacfwd",
    "hessian",
    "functionalize",
    "vmap(in_dims=(0, None))",
    "vmap(grad, in_dims=(0, None))",
    "vmap(grad(argnums=1), in_dims=(0, None), out_dims=1)",
    "jacfwd(jacrev(argnums=1))",
    "vmap(vjp, in_dims=(0, None))",
    "vmap(jvp, in_dims=(0, None))",
    "chunk_vmap(in_dims=(0, None), chunks=2)",
]


@pytest.mark.parametrize("nesting", NESTINGS)
def test_transforms_by_name(nesting: str) -> None:
    assert_parity(lambda x, w: (x @ w).tanh().square().sum(), X, W, transforms=[nesting])


def test_transforms_as_functions() -> None:
    twice = lambda api, f: api.vmap(api.vmap(f), randomness="same")
    (eager, jit) = parity(torch.sin, X, transforms=[twice])
    assert (eager.transform, eager.mode, jit.mode) == (
        "<lambda>",
        "eager",
        "jit",
    ) and eager.agreed == "same values"


@pytest.mark.parametrize(
    "wrong",
    ["gradient", "grad(", "grad(vmap, vmap)", "vmap(grad.x)", "vjp(has_aux=True)", "1 + 1", ""],
)
def test_names_that_are_none(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"no nesting of torch.func's transforms"):
        assert_parity(torch.sin, X, transforms=[wrong])


# -- functions made wrong on purpose ---------------------------------------------------------------
class Wrong(SetupContext):
    """Wrong only in the derivative, as a Function with another backward is."""

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return cotangent * x.cos() * (1.001 if on_jax(x) else 1.0)


def refuses_backward(x: torch.Tensor, on_ours: bool) -> torch.Tensor:
    """x, but one side's backward raises."""

    class Refuses(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.ours = on_jax(x)

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            if ctx.ours == on_ours:
                raise RuntimeError("too late")
            return cotangent

    return Refuses.apply(x)


DIFFERENCES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "value": (
        lambda x: {"a": [x, x + on_jax(x) * (torch.arange(4) == 2)]},
        {},
        (
            r"output\['a'\]\[1\] differs in value at \[0, 2\]: torch.func -0.\d+, torchfunc_jax "
            r"0.\d+, float64 -0.\d+ \(torch.func is nearer\)\n  3 of 12 elements differ. The "
            r"largest absolute difference is 1 at \[\d, 2\], the largest relative difference is "
            r"[\d.]+"
        ),
    ),
    "a thousandth": (
        lambda x: x.exp() * (1.001 if on_jax(x) else 1),
        {},
        r"12 of 12 elements differ.*relative difference is 0.001",
    ),
    "one leaf and another": (
        lambda x: (x, x + on_jax(x), x, x + on_jax(x)),
        {},
        r"^<lambda> .*: output\[1\] differs(.|\n)*Of \d leaves compared, output\[3\] differs too",
    ),
    "NaN for a number": (
        lambda x: x / (0 if on_jax(x) else 1) * 0,
        {},
        r"value at \[0, 0\]: torch.func -?0.0, torchfunc_jax nan",
    ),
    "a number for NaN": (
        lambda x: x * (0 if on_jax(x) else float("nan")),
        {},
        "torch.func nan, torchfunc_jax -?0.0",
    ),
    "a number for infinity": (
        lambda x: x * 0 + 5 if on_jax(x) else x * 0 + float("inf"),
        {},
        "torch.func inf, torchfunc_jax 5.0",
    ),
    "zero for small numbers": (
        lambda x: x * (0 if on_jax(x) else 1e-6),
        {},
        "float64 -1e-06.*Allowed is|float64 -1e-06",
    ),
    "integer": (
        lambda x: x.long() * 1000 + int(on_jax(x)),
        {"rtol": 1.0, "atol": 1.0},
        "Integers and booleans must be equal",
    ),
    "least integer": (
        lambda x: x.long() * 0 + (0 if on_jax(x) else -(2**63)),
        {},
        "torch.func -9223372036854775808, torchfunc_jax 0",
    ),
    "unsigned": (
        lambda x: torch.tensor(2**60 + int(on_jax(x)), dtype=torch.uint64),
        {},
        "6846976, torchfunc_jax 1152921504606846977",
    ),
    "boolean": (lambda x: (x > 0) ^ on_jax(x), {}, "torch.func False, torchfunc_jax True"),
    "field": (
        lambda x: Pair(x, x * (2 if on_jax(x) else 1)),
        {},
        r"output\.right differs in value",
    ),
    "dtype": (
        lambda x: x.half() if on_jax(x) else x,
        {},
        "output differs in dtype: torch.func torch.float32, torchfunc_jax torch.float16",
    ),
    "shape": (
        lambda x: x[:1] if on_jax(x) else x,
        {},
        r"output differs in shape: torch.func \(3, 4\), torchfunc_jax \(1, 4\)",
    ),
    "structure": (
        lambda x: (x,) if on_jax(x) else [x],
        {},
        "output has another structure: .*list.*tuple",
    ),
    "no tensor": (
        lambda x: (x, "ours" if on_jax(x) else "theirs"),
        {},
        r"output\[1\] differs in value: torch.func 'theirs', torchfunc_jax 'ours'",
    ),
    "array": (
        lambda x: (x, np.arange(3) + on_jax(x)),
        {},
        r"output\[1\] differs in value: torch.func array",
    ),
    "type": (
        lambda x: (x, 1 if on_jax(x) else 1.0),
        {},
        r"output\[1\] differs in type: torch.func float, torchfunc_jax int",
    ),
    "raises": (
        lambda x: x.reshape(5) if on_jax(x) else x,
        {},
        r"returned, torchfunc_jax raised RuntimeError: .*test_parity.py:\d+",
    ),
    "returns": (
        lambda x: x if on_jax(x) else x.reshape(5),
        {},
        "torch.func raised RuntimeError: .*test_parity.py.*jax returned",
    ),
    "class of error": (
        lambda x: x[5] if on_jax(x) else x.reshape(5),
        {},
        "torch.func raised RuntimeError: .* raised IndexError",
    ),
    "exit": (lambda x: exit(0) if on_jax(x) else x, {}, "torchfunc_jax raised SystemExit: 0"),
    "input": (
        lambda x: x.add_(1) * 0 if on_jax(x) else x * 0,
        {},
        r"input\[0\] differs in value at \[0, 0\]: (.|\n)*12 of 12 elements differ",
    ),
    "strides": (
        lambda x: x.t().clone(memory_format=torch.contiguous_format) if on_jax(x) else x.t(),
        {"check_strides": True},
        "strides",
    ),
    "a derivative": (
        lambda x: Wrong.apply(x).sum(),
        {"transforms": ["grad"]},
        "under grad, eager: (.|\n)*relative difference is 0.001",
    ),
    "one transform of two": (
        lambda x: Wrong.apply(x).sum(),
        {"transforms": ["vmap", "grad"]},
        "under grad, eager: (.|\n)*1 of 2 checks failed: grad eager. These agree: vmap eager.",
    ),
    "only under jit": (
        lambda x: x + compiling(x),
        {"jit": True},
        (
            "under functionalize, jit: (.|\n)*1 of 2 checks failed: functionalize jit. These "
            "agree: functionalize eager."
        ),
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_are_found_and_shown(name: str) -> None:
    fn, options, message = DIFFERENCES[name]
    with pytest.raises(ParityError, match=message):
        assert_parity(fn, X, **{**EAGER, **options})


def test_differences_as_data() -> None:
    (check,) = parity(lambda x: (x, x + on_jax(x) * (torch.arange(4) == 2)), X, **EAGER)
    found = dataclasses.asdict(check.details)
    text, float64 = found.pop("text"), float(found.pop("float64"))
    assert text == check.difference and abs(float64 - X[0, 2].double()) < 1e-7
    assert found.pop("largest_relative") > 1 and found.pop("largest_absolute") == pytest.approx(1)
    assert found == {
        "kind": "value",
        "where": "output[1]",
        "index": (0, 2),
        "torch_func": repr(X[0, 2].item()),
        "torchfunc_jax": repr((X + 1)[0, 2].item()),
        "wrong": 3,
        "elements": 12,
        "others": (),
    }


def test_float64_is_computed_with_float64_parameters_and_captured_tensors() -> None:
    third, model = torch.tensor(1 / 3), nn.Linear(4, 2)
    for fn, exact in (
        (lambda x: x * third + on_jax(x), lambda: (X.double() * third.double())[0, 0]),
        (
            lambda x: model(x) + on_jax(x),
            lambda: (X.double() @ model.weight.double().T + model.bias.double())[0, 0],
        ),
    ):
        (check,) = parity(fn, X, **EAGER)
        assert float(check.details.float64) == pytest.approx(float(exact()), rel=1e-14)
    assert (
        third.dtype is model.weight.dtype is torch.float32
        and torch.get_default_dtype() is torch.float32
    )


def test_small_numbers_are_compared_with_each_other_unless_large_ones_left_them() -> None:
    assert_parity(lambda x: (x + 1000).sin() * 1e-9, X, transforms=["vmap"], jit=False)
    left = lambda x: (x + 1 - (x + 1 + (1e-7 if on_jax(x) else 0))) * (1 + x)  # a rounding of 1
    assert_parity(left, X.abs(), **EAGER)
    # 0, but for rounding
    assert_parity(lambda x: F.softmax(x, -1).sum(), 3 * X, transforms=["grad", "vmap(grad)"])
    with pytest.raises(ParityError, match=r"torch.func is nearer"):
        assert_parity(lambda x: x.double().mul(1e-6).float() + 1e-7 * on_jax(x), X, **EAGER)


# -- what would be green for nothing ---------------------------------------------------------------
def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).square().sum()


NOTHING: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    "both raise: an argument is missing": (
        loss,
        (X,),
        {},
        (
            r"loss under functionalize, eager: both sides raised, so nothing was compared\n  "
            r"torch.func raised TypeError: loss\(\) missing 1 required.*'w'\n  torchfunc_jax "
            r"raised TypeError: loss\(\) missing.*\n  Give an argument for each: "
            r"parity\(f, a, b\).*\n  If loss \(.*test_parity.py:\d+\) should "
            r"raise here, say so: raises=TypeError"
        ),
    ),
    "both raise: notes that say what to do": (
        torch.func.vmap(lambda x: x if x.sum() > 0 else -x),
        (X,),
        {},
        r"choose by torch.where\(condition, a, b\), or use torch.cond.\n  If ",
    ),
    "both raise: the user's line": (
        lambda x: x.reshape(5),
        (X,),
        {},
        r"RuntimeError: shape '\[5\]'.*\(at .*test_parity.py:\d+: \"?lambda x: x.reshape",
    ),
    "nothing to differentiate": (
        torch.bitwise_not,
        (torch.arange(3),),
        {"transforms": ["vjp"]},
        "vjp: expected a tensor of floating",
    ),
    "no output": (lambda x: None, (X,), {}, "returns no tensor and no number"),
    "no tensor and no number": (lambda x: [], (X,), {}, "returns no tensor and no number"),
    "empty output": (
        lambda x: x[:0],
        (X,),
        {},
        r"every tensor in the output is empty \(the first has shape \(0, 4\)\)",
    ),
    "NaN alone": (
        lambda x: x * float("nan"),
        (X,),
        {},
        "every number in the output is NaN on both sides",
    ),
    "PyTorch on both sides": (
        torch.sin,
        (X,),
        {"transforms": ["call"]},
        "was not compared: PyTorch ran on both sides",
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_compared_is_a_failure(name: str) -> None:
    fn, args, options, message = NOTHING[name]
    with pytest.raises(ParityError, match=message):
        assert_parity(fn, *args, **{**EAGER, **options})


def test_what_is_asked_for_is_no_failure() -> None:
    assert_parity(lambda x: None, X, **EAGER, allow_empty=True)
    assert_parity(lambda x: x * float("nan"), X, **EAGER, allow_empty=True)
    assert_parity(lambda x: [x.add_(1), None][1], X, **EAGER)  # its input changes
    with pytest.raises(ValueError, match="expected at least one, got none"):
        assert_parity(torch.sin, X, transforms=[])
    with pytest.raises(ValueError, match="expected at least 100"):
        assert_parity(torch.sin, X, draws=5)


RAISES: dict[str, tuple[Any, Any, str | None]] = {
    "the class": (lambda x: x.reshape(5), RuntimeError, None),
    "one of them": (lambda x: x.reshape(5), (ValueError, RuntimeError), None),
    "another class": (
        lambda x: x.reshape(5),
        ValueError,
        "expected both sides to raise ValueError, but torch.func raised RuntimeError",
    ),
    "none": (
        lambda x: x,
        RuntimeError,
        (
            "expected both sides to raise RuntimeError, but torch.func returned, "
            "torchfunc_jax returned"
        ),
    ),
    "torch.func alone": (
        lambda x: x if on_jax(x) else x.reshape(5),
        RuntimeError,
        "torchfunc_jax returned",
    ),
    "ours alone": (
        lambda x: x.reshape(5) if on_jax(x) else x,
        RuntimeError,
        "but torch.func returned, torchfunc_jax raised",
    ),
    "a wider class of ours": (
        lambda x: x[5] if on_jax(x) else x.reshape(5),
        Exception,
        "raised RuntimeError: .* raised IndexError",
    ),
}


@pytest.mark.parametrize("name", RAISES)
def test_raises(name: str) -> None:
    fn, raises, message = RAISES[name]
    checks = parity(fn, X, transforms=["functionalize"], jit=False, raises=raises)
    assert (
        [c.agreed for c in checks] == ["both raise RuntimeError"]
        if message is None
        else re.search(message, failed(checks))
    )


def test_what_only_works_here() -> None:
    fn = lambda x: x if on_jax(x) else x.reshape(5)
    (check,) = parity(fn, X, **EAGER, may_do_more=True)
    assert check.agreed == "works, torch.func does not"


def test_a_second_call_runs_what_the_first_compiled_on_other_numbers() -> None:
    calls = []

    def stale(x: torch.Tensor) -> torch.Tensor:
        calls.append(on_jax(x))
        return x * 2 + (1 if calls.count(True) == 2 and on_jax(x) else 0)

    with pytest.raises(
        ParityError,
        match=r"The first call agrees; this is the second one, on numbers multiplied by 0.75",
    ):
        assert_parity(stale, X, **EAGER)

    class Frozen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = self.__dict__.get("kept", self.weight.detach().clone())
            return F.linear(x, self.kept if on_jax(x) else self.weight, self.bias)

    with pytest.raises(ParityError, match="this is the second one"):
        assert_parity(Frozen(4, 2).requires_grad_(False), X, **EAGER)


def test_notes_say_what_a_green_check_does_not_show() -> None:
    (check,) = parity(lambda x: x.detach().sign(), X.abs() + 1, **EAGER)
    assert check.difference is None and "does not depend on the numbers" in check.notes[0]
    (check,) = parity(
        lambda x: torch.linalg.cholesky(x - 0.9 * torch.eye(3)), torch.eye(3), **EAGER
    )
    assert (
        check.difference is None
        and "called once: with its numbers multiplied by 0.75, torch.func raised" in check.notes[0]
    )
    (check,) = parity(torch.sin, X, **EAGER)
    assert check.notes == ()


def test_gradients_of_the_output_are_compared() -> None:
    x, model = X.clone().requires_grad_(), nn.Linear(4, 1)

    with pytest.raises(
        ParityError,
        match=r"gradient of input\[0\] differs in value at(.|\n)*relative difference is 0.001",
    ):
        assert_parity(Wrong.apply, x, transforms=["vmap"], jit=False)
    (ours,) = parity(lambda x: refuses_backward(x, True), x, transforms=["vmap"], jit=False)
    assert re.search(
        r"gradients do not: torch.func's autograd computes them, torchfunc_jax "
        r"raised \w+: .*too late",
        ours.difference,
    )
    (theirs,) = parity(lambda x: refuses_backward(x, False), x, transforms=["vmap"], jit=False)
    assert theirs.difference is None and "raised RuntimeError: too late" in theirs.notes[0]
    assert_parity(torch.sin, x, transforms=["vmap"])
    assert_parity(model, X, transforms=["vmap"])
    assert_parity(lambda x: model(x), X, transforms=["vmap"], jit=False)
    assert x.grad is None and model.weight.grad is None


# -- inputs, modules, captured tensors -------------------------------------------------------------
class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 2.0 if on_jax(x) else 1.0
        return x.sin()


def test_state_of_a_module() -> None:
    model = Counting()
    for fn, args, where in (
        (model, (X,), r"state\['count'\]"),
        (lambda x: model(x), (X,), "captured tensor count"),
        (lambda m, x: m(x), (model, X), r"input\[0\].*count"),
    ):
        with pytest.raises(
            ParityError, match=rf"{where}.* differs in value: torch.func 1.0, torchfunc_jax 2.0"
        ):
            assert_parity(fn, *args, transforms=["functionalize"], jit=False)
        assert model.count == 0
    assert_parity(nn.BatchNorm1d(4), X)


def test_captured_tensors_that_change_are_put_back() -> None:
    total = torch.zeros(())
    adds = lambda x: total.add_(x.sum() * (2 if compiling(x) and wrong else 1)) * 1
    for wrong in (False, True):
        found = failed(parity(adds, X + 1))
        assert (
            found is None
            if not wrong
            else "output differs in value" in found and "captured tensor" in found
        )
        assert total == 0


def test_inputs_are_copied_and_stay_what_they_are() -> None:
    x = X.t().clone().requires_grad_()
    seen = []

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if type(a) is torch.Tensor:  # and none of a trace
            seen.append(a.stride())
        return a.sin()

    assert_parity(fn, x, x, transforms=["functionalize"])
    assert seen and all(stride == x.stride() for stride in seen) and x.grad is None
    y = torch.zeros(2)
    assert_parity(lambda y: y.add_(1).clone(), y, **EAGER)
    assert y.sum() == 0


def test_inputs_that_share_memory_share_it_in_the_copies() -> None:
    memory = torch.arange(6.0)
    seen = []
    parity(
        lambda a, b: seen.append((a.storage_offset(), a.data_ptr() == b.data_ptr() + 8)) or a * b,
        memory[2:4],
        memory[:2],
    )
    assert seen[0] == (2, True)


def test_keyword_arguments() -> None:
    fn = lambda x, *, w, scale=1.0: (x @ w * scale * (2 if scale == 3.0 and on_jax(x) else 1)).sum()
    for transform in ("grad", "vjp", "jvp", "linearize", "functionalize"):
        assert_parity(fn, X, kwargs={"w": W, "scale": 2.0}, transforms=[transform], jit=False)
        with pytest.raises(ParityError, match="differs in value"):
            assert_parity(fn, X, kwargs={"w": W, "scale": 3.0}, transforms=[transform], jit=False)


def test_derivatives_reach_floats_beside_integers_in_one_argument() -> None:
    fn = lambda batch: Wrong.apply(batch["x"]) * batch["n"]
    with pytest.raises(ParityError, match=r"relative difference is 0.001"):
        assert_parity(fn, {"x": X, "n": torch.arange(4)}, transforms=["vjp"], jit=False)


def test_tolerances() -> None:
    fn = lambda x: x + 1e-3 * on_jax(x)
    with pytest.raises(ParityError):
        assert_parity(fn, X, transforms=["vmap"], jit=False)
    assert_parity(fn, X, transforms=["vmap"], atol=1e-2)
    (check, _) = parity(fn, X, transforms=["vmap"], atol=1e-2)
    assert check.largest == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.int32,
        torch.bool,
        torch.uint8,
    ],
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert_parity(lambda x: (x, x.clone().fill_(1)), x, transforms=["call", "vmap"])
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    assert_parity(lambda x: x * 1, special.to(dtype) if dtype.is_floating_point else special)
    with pytest.raises(ParityError, match="differs in value"):
        assert_parity(
            lambda x: x.logical_not().to(x.dtype) if on_jax(x) else x,
            x,
            transforms=["vmap"],
            jit=False,
        )


def test_call_runs_a_program_on_ours() -> None:
    seen = []

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: seen.append(on_jax(x)) or x.sin().sum())(x)

    assert_parity(program, X, jit=False)
    assert set(seen) == {False, True} and seen.index(True) == len(seen) - seen.count(True)


# -- random functions ------------------------------------------------------------------------------
def dropout_and_gradient(x: torch.Tensor, same: bool = True) -> Any:
    """A dropout's value and a vector with the same mask, or another."""
    y = F.dropout(x, 0.5)
    return y, (y if same else F.dropout(x, 0.5)) * 2


ONES = torch.ones(3, 4)
DIFFERENT, SAME = "vmap(randomness='different')", "vmap(randomness='same')"
RANDOM: dict[str, tuple[Any, str]] = {
    "normal": (lambda x: torch.randn_like(x), DIFFERENT),
    "the same in each lane": (lambda x: torch.randn_like(x), SAME),
    "dropout": (lambda x: F.dropout(x / 3, 0.3), DIFFERENT),
    "noise on values": (lambda x: (x.sin(), x + 0.1 * torch.rand_like(x)), DIFFERENT),
    "integers": (lambda x: torch.randint(0, 5, (3,)), "functionalize"),
    "a permutation": (lambda x: torch.randperm(5), "functionalize"),
    "one mask for two": (dropout_and_gradient, "functionalize"),
    "a gradient of dropout": (lambda x: F.dropout(x, 0.5).square().sum(), "grad"),
    "heavy tails": (lambda x: torch.empty(3).cauchy_(), "functionalize"),
}


def slow_but(kept: set[str], names: Iterable[str]) -> list[Any]:
    """The names as parameters; those that are not kept are left to the slow tests."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but({"noise on values", "one mask for two"}, RANDOM))
def test_random_functions_that_are_alike_agree(name: str) -> None:
    fn, transform = RANDOM[name]
    checks = parity(fn, ONES, transforms=[transform], draws=200)
    assert failed(checks) is None
    assert all(
        re.match(
            r"random, (same numbers|same distribution \(200 draws, Kolmogorov-Smirnov)", c.agreed
        )
        for c in checks
    )


WRONG: dict[str, tuple[Any, str, str]] = {
    "scale": (
        lambda x: torch.randn_like(x) * (1.5 if on_jax(x) else 1),
        DIFFERENT,
        "output is random and has another distribution",
    ),
    "shift": (
        lambda x: torch.rand_like(x) + 0.5 * on_jax(x),
        DIFFERENT,
        "output is random and has another distribution: ",
    ),
    "no scaling by 1 - p": (
        lambda x: F.dropout(x, 0.5) * (0.5 if on_jax(x) else 1),
        DIFFERENT,
        "another distribution",
    ),
    "no noise": (
        lambda x: x * 0 if on_jax(x) else torch.randn_like(x),
        DIFFERENT,
        "distribution(.|\n)*It is the same in every draw",
    ),
    "the same in each lane": (
        lambda x: torch.randn_like(x[:1]).expand(3, 4) * 1 if on_jax(x) else torch.randn_like(x),
        "functionalize",
        "squared differences of neighbours along dimension 0",
    ),
    "another mask": (
        lambda x: dropout_and_gradient(x, not on_jax(x)),
        "functionalize",
        r"squared difference from output\[1\]",
    ),
    "a leaf that is not random": (
        lambda x: (x.exp() * (1 + 1e-3 * on_jax(x)), torch.rand(2)),
        "functionalize",
        "another distribution",
    ),
    "dtype": (
        lambda x: torch.randn_like(x).to(torch.float16 if on_jax(x) else torch.float32),
        DIFFERENT,
        "differs in dtype",
    ),
    "range": (
        lambda x: torch.randint(0, 4 + on_jax(x), (6,)),
        "functionalize",
        "another distribution",
    ),
    "raises": (
        lambda x: torch.randn(2) if not on_jax(x) else x.reshape(5),
        "functionalize",
        "torchfunc_jax raised RuntimeError",
    ),
}


@pytest.mark.parametrize(
    "name", slow_but({"scale", "the same in each lane", "another mask", "dtype", "raises"}, WRONG)
)
def test_random_functions_made_wrong_are_found(name: str) -> None:
    fn, transform, message = WRONG[name]
    with pytest.raises(ParityError, match=message):
        assert_parity(fn, ONES, transforms=[transform], jit=False, draws=200)


def test_randomness_that_is_not_torchs_is_recognized() -> None:
    drawing = np.random.default_rng(0)
    noise = lambda x: x + float(drawing.normal())
    (eager,) = parity(noise, ONES, **EAGER, draws=200)
    assert eager.agreed.startswith("random, same distribution (200 draws")
    (_, jit) = parity(noise, ONES, transforms=["functionalize"], draws=200)
    # jit calls the function itself
    assert jit.agreed.startswith("random, same distribution (200 draws")
    once = lambda x: x + (1.0 if on_jax(x) else float(drawing.normal()))
    (fixed,) = parity(once, ONES, **EAGER, draws=200)
    assert "It is the same in every draw of torchfunc_jax's" in fixed.difference
    generator = torch.Generator().manual_seed(0)
    assert_parity(
        lambda x, g: x + torch.rand(3, 4, generator=g), ONES, generator, **EAGER, draws=200
    )


def test_a_function_that_counts_its_calls_is_not_called_random_alone() -> None:
    kept: list[torch.Tensor] = []

    def keeps(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.sum())
        return x.sin() + len(kept)

    for transform in ("functionalize", "vmap", "jvp"):
        with pytest.raises(ParityError, match="changes a Python object that outlives the call"):
            assert_parity(keeps, X, transforms=[transform], jit=False, draws=100)
    with pytest.raises(ParityError) as found:
        assert_parity(lambda x: torch.rand(4) + (2 if on_jax(x) else 0), X, **EAGER, draws=100)
    assert "outlives the call" not in str(found.value)


def test_a_seed_repeats_the_numbers() -> None:
    own = torch.Generator()
    forgets = lambda x: x + (torch.rand(3, 4, generator=own) if on_jax(x) else torch.rand(3, 4))
    with pytest.raises(
        ParityError,
        match=r"torch.manual_seed repeats torch.func's numbers, but not torchfunc_jax's",
    ):
        assert_parity(forgets, ONES, **EAGER)


def test_values_need_not_be_compared() -> None:
    assert_parity(torch.rand_like, X, transforms=[DIFFERENT], check_values=False)
    with pytest.raises(ParityError, match="dtype"):
        assert_parity(lambda x: x.half() if on_jax(x) else x, X, **EAGER, check_values=False)


def test_what_is_drawn_is_not_the_input() -> None:
    torch.manual_seed(0)
    x = torch.randn(5)
    equal = []
    parity(
        lambda x: equal.append(torch.equal(x.detach(), torch.randn(5))) or x,
        x,
        jit=False,
        seed=0,
        check_values=False,
    )
    assert equal and not any(equal)
    state = torch.get_rng_state()
    parity(torch.rand_like, x, **EAGER, check_values=False)
    assert torch.equal(state, torch.get_rng_state()), "parity moved the caller's generator on"


@pytest.mark.parametrize("draws", [100, 400, 1000])
@pytest.mark.parametrize("comparisons", [1, 50, 1000])
def test_false_alarms_are_rarer_than_one_in_a_million(draws: int, comparisons: int) -> None:
    allowed = _parity_random.threshold(draws, comparisons)
    steps = int(np.floor(allowed * draws)) + 1  # the least distance above it
    if steps <= draws:
        x = np.arange(draws, dtype=float)
        found = scipy.stats.ks_2samp(x, x + steps - 0.5, method="exact")
        assert (
            found.statistic == pytest.approx(steps / draws) and found.pvalue * comparisons <= 1e-6
        )
        assert found.pvalue * comparisons > 1e-8  # and the bound is near


def test_distance_is_kolmogorov_and_smirnovs() -> None:
    rng = np.random.default_rng(0)
    for x, y in (
        (rng.normal(size=200), rng.normal(size=200) + 0.3),
        (rng.integers(0, 3, 200) * 1.0, rng.integers(0, 4, 200) * 1.0),
    ):
        assert _parity_random.distance(x, y) == pytest.approx(scipy.stats.ks_2samp(x, y).statistic)
    assert (
        _parity_random.distance(x, x + 1e-6) > 0.2
        and _parity_random.distance(x, x + 1e-6, 1e-5) == 0
    )


# -- the command -----------------------------------------------------------------------------------
FILE = """
import torch

class Refused(Exception):
    pass

def loss(x, w, scale=1.0):
    return (x @ w).square().sum() * scale

def inputs():
    return torch.ones(3, 4), torch.ones(4)

def no_inputs():
    raise OSError("no data here")

def wrong(x):
    return x * (1 if type(x) is torch.Tensor else 2)

def refuses(x):
    raise Refused("not today")

def echo(x):
    return x - torch.randn(5)

class Net(torch.nn.Linear):
    def __init__(self, hidden=2, bias="yes"):
        super().__init__(4, hidden, bias == "yes")

def make(hidden):
    return Net(hidden)
"""


def run(*args: str) -> Any:
    return CliRunner().invoke(
        app, ["parity", *args], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    )


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program_of_test_parity.py"
    path.write_text(FILE)
    return str(path)


def test_command_prints_a_table(program: str) -> None:
    result = run(
        f"{program}:loss",
        "-s",
        "3,4",
        "-s",
        "4",
        "-t",
        "vmap(grad, in_dims=(0, None))",
        "-t",
        "jacrev",
    )
    assert result.exit_code == 0, result.output
    assert (
        result.stdout.count("same values") == 4
        and "jit" in result.stdout
        and "largest difference" in result.stdout
    )


def test_command_as_json(program: str) -> None:
    result = run(
        f"{program}:loss", "--inputs", f"{program}:inputs", "-t", "grad", "--no-jit", "--json"
    )
    found = json.loads(result.stdout)
    assert (
        result.exit_code == 0
        and found["agree"]
        and [c["mode"] for c in found["checks"]] == ["eager"]
    )
    strict = lambda name: pytest.fail(f"{name} is no JSON")
    result = run(
        f"{program}:wrong", "--input", "tensor([1., 2.])", "-t", "vmap", "--no-jit", "--json"
    )
    found = json.loads(result.stdout, parse_constant=strict)
    assert not found["agree"] and found["failure"].startswith(
        "under vmap, eager: output differs in value"
    )
    details = found["checks"][0]["details"]
    assert (details["kind"], details["index"], details["torch_func"], details["torchfunc_jax"]) == (
        "value",
        [0],
        "1.0",
        "2.0",
    )


def test_command_ends_with_1_where_they_differ(program: str) -> None:
    result = run(f"{program}:wrong", "-s", "4", "-t", "vmap")
    assert result.exit_code == 1 and "output differs in value at" in result.stdout
    assert result.stdout.count("output differs in value at") == 1, (
        "the same difference is told once"
    )
    for args, said in (
        (
            (f"{program}:loss", "-s", "3,4", "-t", "call"),
            "missing 1 required positional argument: 'w'",
        ),
        ((f"{program}:refuses", "-s", "3", "-t", "vmap"), "Refused: not today (at "),
        (
            ("torch:sin", "-s", "3", "-t", "call", "--no-jit"),
            "was not compared: PyTorch ran on both sides",
        ),
    ):
        result = run(*args)
        assert result.exit_code == 1 and said in result.stdout, result.output


def test_command_on_what_both_refuse(program: str) -> None:
    refuses = [f"{program}:refuses", "-s", "3", "-t", "vmap", "--no-jit"]
    assert run(*refuses, "--raises", f"{program}:Refused").exit_code == 0
    assert run(*refuses, "--raises", "ValueError", "--raises", f"{program}:Refused").exit_code == 0
    assert run(*refuses, "--raises", "ValueError").exit_code == 1
    assert (
        run(
            "torch:reshape",
            "--input",
            "randn(4)",
            "--input",
            "(3,)",
            "-t",
            "functionalize",
            "--raises",
            "RuntimeError",
        ).exit_code
        == 0
    )


def test_command_draws_other_numbers_than_the_arguments(program: str) -> None:
    result = run(
        f"{program}:echo",
        "-s",
        "5",
        "--seed",
        "7",
        "-t",
        "functionalize",
        "--no-jit",
        "--draws",
        "100",
        "--json",
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["checks"][0]["agreed"].startswith("random")
    assert (
        "random"
        in run(
            "torch:randn_like", "-s", "5", "-t", "functionalize", "--no-jit", "--draws", "100"
        ).stdout
    )


@pytest.mark.parametrize(
    "args",
    [
        ["{}:Net", "-s", "3,4", "-t", "vmap"],
        [
            "{}:Net",
            "--init",
            "hidden=5",
            "--init",
            "bias=no",
            "--input",
            "randn(3, 4)",
            "-t",
            "vmap",
        ],
        ["{}:Net", "--init", "5", "--input", "randn(3, 4)", "-t", "vmap"],
        ["{}:make", "--init", "hidden=5", "-s", "3,4", "-t", "vmap"],
        [
            "{}:loss",
            "--input",
            "ones(3, 4)",
            "--kwarg",
            "w=ones(4)",
            "--kwarg",
            "scale=0.5",
            "-t",
            "vjp",
        ],
        ["torch:mul", "-s", "3", "-s", "()", "--dtype", "float64", "-t", "jvp"],
        [
            "torch:add",
            "--input",
            "randint(0, 9, (4,))",
            "--input",
            "arange(4, dtype=int32)",
            "--kwarg",
            "alpha=2",
            "-t",
            "vmap",
        ],
        ["torch:stack", "--input", "[randn(3), ones(3)]", "-t", "functionalize"],
    ],
)
def test_command_on_modules_functions_and_arguments(program: str, args: list[str]) -> None:
    result = run(*(a.format(program) for a in args), "--no-jit")
    assert result.exit_code == 0 and "same values" in result.stdout, result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["torch.sin"], "expected MODULE:FUNCTION"),
        (["torch:sine"], "no attribute 'sine'"),
        (["no_such_module:f"], "No module named"),
        (["no_such_file.py:f"], "no_such_file.py"),
        (["{exits}:f"], "importing it raised SystemExit: 0"),
        (["torch:sin", "-s", "three"], "expected sizes such as 3,4"),
        (["torch:sin", "-s", "3", "-t", "gradient"], "no nesting"),
        (["torch:sin", "-s", "3", "--dtype", "float31"], "no dtype 'float31'"),
        (["torch:sin", "--input", "open('x')"], "'open' is none of"),
        (["torch:sin", "--input", "randn(3"], "it is no Python expression"),
        (["torch:sin", "--input", "randn('a')"], "expected a value such as"),
        (
            ["torch:sin", "-s", "3", "--input", "1"],
            "expected one way to give the arguments, got --shape and --input",
        ),
        (["torch:sin", "-s", "3", "--kwarg", "3"], "expected NAME=VALUE, got '3'"),
        (["torch:sin", "-s", "3", "--raises", "Oops"], "expected an exception such as ValueError"),
        (["torch.nn:Linear", "-s", "3"], "making it raised TypeError: Linear.__init__() missing"),
        (
            ["{program}:loss", "--inputs", "{program}:no_inputs"],
            "calling it raised OSError: no data here (at",
        ),
    ],
)
def test_command_names_what_is_wrong(
    program: str, tmp_path: Path, args: list[str], message: str
) -> None:
    exits = tmp_path / "exits_of_test_parity.py"
    exits.write_text("raise SystemExit(0)")
    result = run(*(a.format(program=program, exits=exits) for a in args))
    assert result.exit_code == 2, result.output
    assert re.sub(r"\s", "", message) in re.sub(r"[\s│]+", "", result.stderr)


def test_help_names_every_option_and_the_exit_codes() -> None:
    text = run("--help").stdout
    for said in (
        "--input ",
        "--kwarg",
        "--init",
        "--raises",
        "--draws",
        "--allow-empty",
        "--json",
        "Exit codes",
        "--init hidden=32",
    ):
        assert said in text, said


SPECS = [
    "randn(2, 3)",
    "rand(3, dtype=float64)",
    "torch.ones(2)",
    "(1, -2.5, None, True)",
    "{'a': [full((2,), 3)]}",
]


@pytest.mark.parametrize("spec", SPECS)
def test_specs_are_what_torch_makes_of_them(spec: str) -> None:
    found, expected = value(spec, torch.Generator().manual_seed(3)), _evaluated(spec)
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    else:
        assert str(found) == str(expected)


def _evaluated(spec: str) -> Any:
    torch.manual_seed(3)
    names = {n: getattr(torch, n) for n in ("randn", "rand", "float64")} | {
        "full": lambda *a: torch.full(*a, dtype=torch.float32)
    }
    return eval(spec, {"torch": torch, **names})


def test_a_bar_shows_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    real: Callable[[Any], None] = parity_cli.Progress.start
    monkeypatch.setattr(
        parity_cli.Progress, "start", lambda self: started.append(time.monotonic()) or real(self)
    )
    console = parity_cli.Console(force_terminal=True, file=io.StringIO())
    begun = time.monotonic()
    with parity_cli._bar(console) as progress:
        progress(0, 2, "vmap: torch.func")
        assert not started
        time.sleep(2.3)
        progress(1, 2, "vmap: torchfunc_jax, jit")
    assert len(started) == 1 and started[0] - begun > 1.9
    with parity_cli._bar(console) as progress:
        progress(0, 2, "")
    time.sleep(0.1)
    assert len(started) == 1


def test_progress_reaches_its_end() -> None:
    told: list[tuple[float, float, str]] = []
    parity(
        torch.rand_like,
        ONES,
        transforms=["functionalize", "vmap"],
        progress=lambda *a: told.append(a),
        draws=100,
        check_values=False,
    )
    assert [t[0] for t in told] == sorted(t[0] for t in told) and all(
        done <= total == 2 for done, total, _ in told
    )


# -- the fixture -----------------------------------------------------------------------------------
def test_fixture_for_other_projects(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        import torch

        def test_same(parity):
            parity(torch.sin, torch.ones(2), transforms=["vmap"], jit=False)

        def test_other(parity):
            doubled = lambda x: x * (2 if type(x) is not torch.Tensor else 1)
            parity(doubled, torch.ones(2), transforms=["functionalize"], jit=False)

        def test_both_raise(parity):
            parity(torch.mul, torch.ones(2))

        def test_both_must_raise(parity):
            parity(torch.mul, torch.ones(2), raises=TypeError)

        def test_no_cases(parity):
            for x in []:
                parity(torch.sin, x)

        def test_skipped(parity):
            pytest.skip("not here")
        """
    )
    installed = any(e.value == "_torchfunc_jax_pytest" for e in entry_points(group="pytest11"))
    result = pytester.runpytest_inprocess(
        "-q", *([] if installed else ["-p", "_torchfunc_jax_pytest"])
    )
    result.assert_outcomes(passed=2, failed=3, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*ParityError: <lambda> under functionalize, eager: output differs in value at *0*",
            "*ParityError: mul under call, eager: both sides raised, so nothing was compared*",
            "*TypeError: mul() missing 1 required positional argument*",
            "*never called it, so nothing was compared*",
        ]
    )
