"""The examples in torch.func's docstrings, taken from the installed torch and run twice: as they
are, and with our names.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
import warnings
from typing import Any

import pytest
import torch
from agreement import same
from torch import nn
from torch.utils import _pytree as pytree

import torchfunc_jax

NAMES = (
    "vmap",
    "grad",
    "grad_and_value",
    "vjp",
    "jvp",
    "jacrev",
    "jacfwd",
    "hessian",
    "linearize",
    "functional_call",
    "stack_module_state",
)


class Counter(nn.Module):
    """The Foo of functional_call's first example."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("foo", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.foo = self.foo + 1
        return x + self.foo


class Tied(nn.Module):
    """The Foo of its second example."""

    def __init__(self) -> None:
        super().__init__()
        self.foo = self.foo_tied = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.foo + self.foo_tied


class Bar(nn.Module):
    """The nn.Bar of its third example."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.register_buffer("buffer", torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x + self.buffer


#: What an example leaves undefined, by docstring and number of the example.
GIVEN: dict[tuple[str, int], dict[str, Any]] = {
    ("functional_call", 0): {"Foo": Counter},
    ("functional_call", 1): {"Foo": Tied},
    ("functional_call", 2): {"nn": types.SimpleNamespace(Bar=Bar)},
}
#: What examples use and do not import, in torch 2.15.
MODULES = {"warnings": warnings}
#: Slips in the docstrings that plain PyTorch stumbles over as well.
SLIPS = [
    ("torch.zeros())", "torch.zeros(()), tie_weights=False)"),
    ("grad_weights.grad_fn", "grad_weights['weight'].grad_fn"),
]


def examples(name: str) -> list[str]:
    """The source of each example: runs of prompt lines, and code blocks."""
    doc = inspect.getdoc(getattr(torch.func, name)) or ""
    found: list[list[str]] = []
    block: list[str] | None = None
    indent = None
    for line in doc.split("\n"):
        prompt = re.match(r"\s*(>>>|\.\.\.)( |$)(.*)", line)
        if line.strip() == ".. code-block:: python":
            block, indent = [], None
            found.append(block)
        elif prompt:
            if block is None or indent != "prompt":
                block, indent = [], "prompt"
                found.append(block)
            block.append(prompt[3])
        elif indent == "prompt":
            if not line.strip() or not re.match(r"\s*(tensor\(|\[)", line):
                block, indent = None, None
        elif block is not None:
            if line.strip() and not line.startswith(" "):
                block = None
            else:
                block.append(line)
    for old, new in SLIPS:
        found = [[line.replace(old, new) for line in b] for b in found]
    sources = [textwrap.dedent("\n".join(b)).strip() for b in found]
    return [s for s in sources if s]


def run(name: str, source_of: Any) -> list[dict[str, Any]]:
    """What each example of a docstring computes:
    its variables and the values of its expressions.
    """
    torch.manual_seed(0)
    space: dict[str, Any] = {"torch": torch, "torchfunc_jax": torchfunc_jax, "nn": nn, **MODULES}
    source_of(f"from torch.func import {', '.join(NAMES)}", space)
    results = []
    for i, source in enumerate(examples(name)):
        space.update(GIVEN.get((name, i), {}))
        values: list[Any] = []
        space["_values_"] = values
        tree = ast.parse(source)
        Keep().visit(tree)
        code = ast.unparse(ast.fix_missing_locations(tree))
        if "SKIP(failing)" in source:  # shown as an example of what is refused
            with pytest.raises(TypeError, match="missing 1 required positional argument"):
                source_of(code, space)
        else:
            source_of(code, space)
        ours = ("_values_", "torch", "torchfunc_jax", "nn", "F", *MODULES)
        kept = {k: v for k, v in space.items() if not k.startswith("__") and k not in ours}
        results.append({"values": values, **{k: comparable(v) for k, v in kept.items()}})
    return results


class Keep(ast.NodeTransformer):
    """Turns each expression statement into one that keeps its value."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        return ast.Expr(
            ast.Call(
                ast.Attribute(ast.Name("_values_", ast.Load()), "append", ast.Load()),
                [node.value],
                [],
            )
        )


def comparable(value: Any) -> Any:
    """The tensors and numbers of a value; whatever else is in it, by its type's name."""
    return pytree.tree_map(
        lambda x: (
            x if isinstance(x, torch.Tensor | int | float | str | tuple) else type(x).__name__
        ),
        value,
    )


def with_torch(source: str, space: dict[str, Any]) -> None:
    exec(compile(source, "<example>", "exec"), space)


def with_ours(source: str, space: dict[str, Any]) -> None:
    renamed = re.sub(r"\btorch\.func\b", "torchfunc_jax", source)
    with_torch(re.sub(r"\btorch\.vmap\b", "torchfunc_jax.vmap", renamed), space)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_examples_give_the_same_numbers(name: str) -> None:
    if name != "grad_and_value":  # whose docstring points to grad's
        assert examples(name)
    for mine, reference in zip(run(name, with_ours), run(name, with_torch), strict=True):
        assert mine.keys() == reference.keys()
        for key in reference:
            values, expected = mine[key], reference[key]
            same(
                pytree.tree_map(strip, values),
                pytree.tree_map(strip, expected),
                rtol=1e-5,
                atol=1e-6,
            )


def strip(value: Any) -> Any:
    """A value as it can be compared: functions and objects by nothing but their being there."""
    return value if isinstance(value, torch.Tensor | int | float | str) or value is None else ...


def test_our_own_names_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for module in (torchfunc_jax, sys.modules["torchfunc_jax._vmap"]):
        original = module.vmap
        monkeypatch.setattr(
            module,
            "vmap",
            lambda *a, _original=original, **k: calls.append(a) or _original(*a, **k),
        )
    run("stack_module_state", with_ours)
    assert calls
