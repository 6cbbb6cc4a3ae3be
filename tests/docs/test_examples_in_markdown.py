"""The Python examples in the Markdown files run, and print what their comments, or the blocks
```text that follow them, say.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.trace import tracing
from torchfunc_jax import grad, jit, vmap

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    p.relative_to(ROOT).as_posix()
    for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
]


@pytest.mark.usefixtures("lowerings_as_before")
@pytest.mark.parametrize("page", PAGES)
def test_examples(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?",
        (ROOT / page).read_text(),
        re.MULTILINE | re.DOTALL,
    )
    namespace: dict[str, object] = {"__name__": "example"}
    for block, output in blocks:
        exec(compile(block, page, "exec"), namespace)
        printed = capsys.readouterr().out.splitlines()
        promised = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        if output:
            assert printed == output.splitlines(), block
        elif promised:
            assert len(printed) == len(promised), block
        for line, promise in zip(printed, promised, strict=False):
            assert line in (promise, promise.split(": ")[0]), (
                f"{page}: {promise!r} is promised, {line!r} is printed"
            )


def test_the_figures_of_the_opening_are_those_of_the_tables() -> None:
    """`make bench` and docs/coverage.py write the tables; who writes them anew is told which
    sentence to change.
    """
    readme, coverage = (ROOT / "README.md").read_text(), (ROOT / "docs" / "coverage.md").read_text()
    opening, table = (
        readme.split("## Install")[0],
        readme.split("<!-- benchmarks:start -->")[1].split("<!-- benchmarks:end -->")[0],
    )
    rows = {
        row.split(" | ")[0].strip("| "): [cell.split(" (")[0] for cell in row.split(" | ")[1:]]
        for row in table.splitlines()
    }
    transformer = rows["per-sample gradients of a transformer, 8 texts of 64 tokens"]
    ensemble = rows["SGD step of 32 MLPs at once"]
    by_torch, by_hand, compiled, _ = transformer
    said = " ".join(opening.split())
    assert (
        f"take {compiled} under `jit`, {by_torch} under torch.func, and {by_hand} in JAX "
        "written by hand"
    ) in said
    assert f"32 MLPs takes {ensemble[2]}, and {ensemble[0]} under torch.func" in said
    ours, theirs = next(
        row for row in coverage.splitlines() if row.startswith("| float32 |")
    ).split(" | ")[-2:]
    right, every = re.findall(r"\d+", ours)[:2]
    assert (
        f"has {every} operators with a gradient" in said
        and f"right for {right} of them, and under torch.func itself for {theirs.split()[0]}."
        in said
    )


def test_links_lead_somewhere() -> None:
    for page in ["CONTRIBUTING.md", *PAGES]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_the_errors_on_their_page_are_raised() -> None:
    """Every message that the page quotes, up to its dots, stands in the code."""
    files = [
        path for package in ("bridge", "torchfunc_jax") for path in (ROOT / package).rglob("*.py")
    ]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    texts = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    texts += [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    quoted = re.findall(r"^## `(.*?)`$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert len(quoted) > 10
    for message in quoted:
        for phrase in re.sub(r"^(Runtime|Type|NotImplemented)Error: ", "", message).split("..."):
            assert any(phrase.strip(" :") in text for text in texts), f"nothing raises {message!r}"


def test_how_it_works_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    named = set(re.findall(r"`((?:bridge|torchfunc_jax)/[\w/.]*)`", page))
    assert len(named) > 25
    missing = {name for name in named if not (ROOT / name).exists()}
    files = {
        path.name
        for package in ("bridge", "torchfunc_jax")
        for path in (ROOT / package).rglob("*.py")
    }
    missing |= {name for name in re.findall(r"`(\w+\.py)`", page) if name not in files}
    assert not missing
    for room in (ROOT / "bridge").iterdir():  # no room is left out
        assert not room.is_dir() or room.name == "__pycache__" or f"bridge/{room.name}" in page, (
            room.name
        )


def test_how_it_works_names_operators_that_its_example_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    example = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    namespace: dict[str, Any] = {}
    exec(example, namespace)
    met: list[str] = []
    dispatch = tracing.dispatch
    monkeypatch.setattr(
        tracing,
        "dispatch",
        lambda func, args, kwargs: met.append(str(func)) or dispatch(func, args, kwargs),
    )
    jaxpr = jit(vmap(grad(namespace["loss"]), in_dims=(None, 0))).jaxpr(
        torch.ones(3), torch.ones(4, 3)
    )
    named = re.search(r"Here `(aten\.\w+)` becomes a `(\w+)`", page)
    assert named is not None
    operator, primitive = named.groups()
    assert operator in {name.rpartition(".")[0] for name in met}
    assert primitive in {equation.primitive.name for equation in jaxpr.eqns}
