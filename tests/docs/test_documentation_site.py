"""The site of the documentation: its menu has every page, its reference every public name;
`make docs` refuses broken links.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MODULES = [
    "torchfunc_jax",
    "torchfunc_jax.distributed.utils",
    "torchfunc_jax.ensemble",
    "torchfunc_jax.ensemble.metrics",
    "torchfunc_jax.testing",
    "bridge",
    "bridge.flax",
]


def test_every_page_and_notebook_is_in_the_menu() -> None:
    menu = set(
        re.findall(
            r"(?:: |- )([\w/]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
        )
    )
    pages = {
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        if "coverage/" not in path.as_posix()
    } - {"README.md"}
    notebooks = {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert menu == pages | notebooks | {"index.md", "contributing.md", "security.md"}


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_every_public_name(module: str) -> None:
    listed = {
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    }
    for name in listed:  # each of them exists
        owner, _, attribute = name.rpartition(".")
        assert hasattr(import_module(owner), attribute), name
    public = {
        name
        for name in import_module(module).__all__
        if getattr(getattr(import_module(module), name), "__doc__", None)
    }
    hidden = {  # two modules, einops's, for the fixture
        "torchfunc_jax.testing",
        "torchfunc_jax.ensemble.metrics",
        "torchfunc_jax.rearrange",
        "torchfunc_jax.testing.failed",
    }
    assert {f"{module}.{name}" for name in public} - hidden <= listed


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None,
    reason="make docs installs mkdocs",
)
def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    for name in ("docs", "tools", "notebooks", "bridge", "torchfunc_jax"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path)
    with (tmp_path / "docs" / "errors.md").open("a") as page:
        page.write("\n[nowhere](jit.md#no-such-heading)\n")
    command = [sys.executable, "-m", "mkdocs", "build"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode and "no-such-heading" in done.stdout + done.stderr
