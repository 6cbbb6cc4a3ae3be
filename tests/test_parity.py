"""Parity as a tool: it finds differences, says where they are, and is to be had as a function, a command and a pytest fixture."""
from __future__ import annotations

import json
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from bridge.tracing import Traced
from torchfunc_jax.cli import app
from torchfunc_jax.testing import ParityError, assert_parity, parity

pytest_plugins = ["pytester"]


def on_jax(x: Any) -> bool:
    """Whether this is our run, so that a function can behave otherwise there."""
    return type(x) is Traced


class Pair(NamedTuple):
    left: Any
    right: Any


X, W = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 1, 8).reshape(4, 2)

NESTINGS = [
    "call", "grad", "grad_and_value", "vjp", "jvp", "linearize", "jacrev", "jacfwd", "hessian", "functionalize",
    "vmap(in_dims=(0, None))", "vmap(grad, in_dims=(0, None))", "vmap(grad(argnums=1), in_dims=(0, None), out_dims=1)",
    "jacfwd(jacrev(argnums=1))", "vmap(vjp, in_dims=(0, None))", "vmap(jvp, in_dims=(0, None))", "chunk_vmap(in_dims=(0, None), chunks=2)",
]


@pytest.mark.parametrize("nesting", NESTINGS)
def test_transforms_by_name(nesting: str) -> None:
    assert_parity(lambda x, w: (x @ w).tanh().square().sum(), X, W, transforms=[nesting])


def test_transforms_as_functions() -> None:
    twice = lambda api, f: api.vmap(api.vmap(f), randomness="same")
    (eager, jit) = parity(torch.sin, X, transforms=[twice])
    assert (eager.transform, eager.mode, jit.mode) == ("<lambda>", "eager", "jit") and eager.agreed == "same values"


@pytest.mark.parametrize("wrong", ["gradient", "grad(", "grad(vmap, vmap)", "vmap(grad.x)", "vjp(has_aux=True)", "1 + 1", ""])
def test_names_that_are_none(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"no nesting of torch.func's transforms"):
        assert_parity(torch.sin, X, transforms=[wrong])


DIFFERENCES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "value": (
        lambda x: {"a": [x, x + on_jax(x) * (torch.arange(4) == 2)]}, {},
        r"output\['a'\]\[1\] differs in value at \[0, 2\]: .*3 of 12 elements",
    ),
    "nan": (lambda x: x / (0 if on_jax(x) else 1), {}, "differs in value"),
    "integer": (lambda x: x.long() + int(on_jax(x)), {}, "differs in value"),
    "field": (lambda x: Pair(x, x * (2 if on_jax(x) else 1)), {}, r"output\.right differs in value"),
    "dtype": (lambda x: x.half() if on_jax(x) else x, {}, "output differs in dtype: torch.func torch.float32, torchfunc_jax torch.float16"),
    "shape": (lambda x: x[:1] if on_jax(x) else x, {}, r"output differs in shape: torch.func \(3, 4\), torchfunc_jax \(1, 4\)"),
    "structure": (lambda x: (x,) if on_jax(x) else [x], {}, "output has another structure: .*list.*tuple"),
    "no tensor": (
        lambda x: (x, "ours" if on_jax(x) else "theirs"), {},
        r"output\[1\] differs in value: torch.func 'theirs', torchfunc_jax 'ours'",
    ),
    "type": (lambda x: (x, 1 if on_jax(x) else 1.0), {}, r"output\[1\] differs in type: torch.func float, torchfunc_jax int"),
    "raises": (lambda x: x.reshape(5) if on_jax(x) else x, {}, "torch.func returned, torchfunc_jax raised RuntimeError"),
    "returns": (lambda x: x if on_jax(x) else x.reshape(5), {}, "torch.func raised RuntimeError: .*, torchfunc_jax returned"),
    "class of error": (lambda x: x[5] if on_jax(x) else x.reshape(5), {}, "torch.func raised RuntimeError: .* raised IndexError"),
    "input": (
        lambda x: x.add_(1) * 0 if on_jax(x) else x * 0, {},
        r"input\[0\]\[0\] differs in value at \[\d, \d\]: .*12 of 12 elements",
    ),
    "strides": (lambda x: x.t().clone(memory_format=torch.contiguous_format) if on_jax(x) else x.t(), {"check_strides": True}, "strides"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_are_found_and_shown(name: str) -> None:
    fn, options, message = DIFFERENCES[name]
    with pytest.raises(ParityError, match=message) as raised:
        assert_parity(fn, X, transforms=["functionalize"], jit=False, **options)
    assert str(raised.value).startswith("<lambda> under functionalize, eager: ")


def test_state_of_a_module() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 2.0 if on_jax(x) else 1.0
            return x.sin()

    model = Counting()
    with pytest.raises(ParityError, match=r"state\['count'\] differs in value: torch.func 1.0, torchfunc_jax 2.0"):
        assert_parity(model, X, transforms=["functionalize"])
    assert model.count == 0
    assert_parity(nn.BatchNorm1d(4), X)


def test_inputs_are_copied_and_stay_what_they_are() -> None:
    x = X.t().clone().requires_grad_()
    seen = []

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((a is b, a.requires_grad, a.stride()))
        return a.sin()

    assert_parity(fn, x, x, jit=False)
    assert all(same == (True, True, x.stride()) for same in seen) and x.grad is None
    y = torch.zeros(2)
    assert_parity(lambda y: y.add_(1).clone(), y)
    assert y.sum() == 0


def test_same_errors_agree() -> None:
    checks = parity(lambda x: x.reshape(5), X, transforms=["vmap", "grad"])
    assert {c.agreed for c in checks} == {"both raise RuntimeError"} and all(c.difference is None and c.largest is None for c in checks)


def test_what_only_works_here() -> None:
    fn = lambda x: x if on_jax(x) else x.reshape(5)
    (check,) = parity(fn, X, transforms=["functionalize"], jit=False, may_do_more=True)
    assert check.agreed == "works, torch.func does not"


def test_random_functions_agree_in_shape_and_type() -> None:
    fn = lambda x: torch.rand_like(x)
    assert_parity(fn, X, transforms=["vmap(randomness='different')"], check_values=False)
    with pytest.raises(ParityError, match="differs in value"):
        assert_parity(fn, X, transforms=["vmap(randomness='different')"])


def test_tolerances() -> None:
    fn = lambda x: x + 1e-3 * on_jax(x)
    with pytest.raises(ParityError):
        assert_parity(fn, X, transforms=["vmap"])
    assert_parity(fn, X, transforms=["vmap"], atol=1e-2)
    (check, _) = parity(fn, X, transforms=["vmap"], atol=1e-2)
    assert check.largest == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int32, torch.bool, torch.uint8])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert_parity(lambda x: (x, x.clone().fill_(1)), x, transforms=["call", "vmap"])
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    assert_parity(lambda x: x * 1, special.to(dtype) if dtype.is_floating_point else special)


def test_call_runs_a_program_on_ours() -> None:
    seen = []

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: seen.append(on_jax(x)) or x.sin().sum())(x)

    assert_parity(program, X, jit=False)
    assert seen == [False, True]


# -- the command -------------------------------------------------------------------------------------------------------------------
FILE = """
import torch
from bridge.tracing import Traced

def loss(x, w):
    return (x @ w).square().sum()

def inputs():
    return torch.ones(3, 4), torch.ones(4)

def wrong(x):
    return x * (2 if type(x) is Traced else 1)

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
"""


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["parity", *args], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program_of_test_parity.py"
    path.write_text(FILE)
    return str(path)


def test_command_prints_a_table(program: str) -> None:
    result = run(f"{program}:loss", "-s", "3,4", "-s", "4", "-t", "vmap(grad, in_dims=(0, None))", "-t", "jacrev")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("same values") == 4 and "jit" in result.stdout and "largest difference" in result.stdout


def test_command_as_json(program: str) -> None:
    result = run(f"{program}:loss", "--inputs", f"{program}:inputs", "-t", "grad", "--no-jit", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["agree"] and [c["mode"] for c in found["checks"]] == ["eager"]


def test_command_ends_with_1_where_they_differ(program: str) -> None:
    result = run(f"{program}:wrong", "-s", "4", "-t", "vmap")
    assert result.exit_code == 1 and "output differs in value at" in result.stdout


def test_command_on_modules_and_installed_functions(program: str) -> None:
    assert run(f"{program}:Net", "-s", "3,4", "-t", "vmap", "--no-jit").exit_code == 0
    assert run("torch:mul", "-s", "3", "-s", "()", "--dtype", "float64", "-t", "jvp", "--no-jit").exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["torch.sin"], "expected MODULE:FUNCTION"),
        (["torch:sine"], "no attribute 'sine'"),
        (["no_such_module:f"], "No module named"),
        (["no_such_file.py:f"], "no_such_file.py"),
        (["torch:sin", "-s", "three"], "expected sizes such as 3,4"),
        (["torch:sin", "-s", "3", "-t", "gradient"], "no nesting"),
        (["torch:sin", "-s", "3", "--dtype", "float31"], "no dtype 'float31'"),
    ],
)
def test_command_names_what_is_wrong(args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2 and message in re.sub(r"[\s│]+", " ", result.stderr)


# -- the fixture -------------------------------------------------------------------------------------------------------------------
def test_fixture_for_other_projects(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch

        def test_same(parity):
            parity(torch.sin, torch.ones(2), transforms=["vmap"], jit=False)

        def test_other(parity):
            parity(lambda x: x * (2 if type(x) is not torch.Tensor else 1), torch.ones(2), transforms=["functionalize"], jit=False)
        """
    )
    installed = any(e.value == "_torchfunc_jax_pytest" for e in entry_points(group="pytest11"))
    result = pytester.runpytest_inprocess("-q", *([] if installed else ["-p", "_torchfunc_jax_pytest"]))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*ParityError: <lambda> under functionalize, eager: output differs in value at *0*"])
