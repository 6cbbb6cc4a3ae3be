"""What is installed: one version, and no other project's ``bridge`` in the place of ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bridge

ROOT = Path(__file__).resolve().parents[2]

#: Where another ``bridge`` lies, beside the folder of ours -> what the error says of it.
SHADOWS = {
    "a script of the user's": (
        "work/bridge.py",
        r"got .*work/bridge\.py\. If that is a file or folder of your own, rename it",
    ),
    "a folder of the user's": ("work/bridge/notes.txt", r"got .*work/bridge\. If"),
    "another package, installed over ours": (
        "installed/bridge/__init__.py",
        r"got .*installed/bridge, overwritten\. If",
    ),
    "none": ("work/other.py", r"got none\. If"),
}


@pytest.mark.parametrize("name", SHADOWS)
def test_another_bridge_is_refused(name: str, tmp_path: Path) -> None:
    """Before torch and JAX are imported; a user's script of that name is not run again."""
    other, words = SHADOWS[name]
    (tmp_path / "work").mkdir()
    (tmp_path / "installed" / "torchfunc_jax").mkdir(parents=True)
    for file in ("__init__.py", "_own_bridge.py"):
        shutil.copy(ROOT / "torchfunc_jax" / file, tmp_path / "installed" / "torchfunc_jax")
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).write_text("print('run')\n")
    (tmp_path / "work" / "main.py").write_text("import torchfunc_jax\n")
    done = subprocess.run(
        [sys.executable, "-S", "main.py"],
        cwd=tmp_path / "work",
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
    )
    assert done.returncode == 1
    assert re.search(
        (
            "ImportError: bridge: expected the package that torchfunc-jax installs as "
            ".*/installed/bridge, "
        )
        + words,
        done.stderr,
    )
    assert "run" not in done.stdout or other.startswith("installed")


def test_files_that_tell_of_a_version_tell_of_this_one() -> None:
    said = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert said is not None and said[1] == bridge.__version__
    assert re.search(
        rf"^## {re.escape(bridge.__version__)}\b",
        (ROOT / "docs" / "changelog.md").read_text(),
        re.MULTILINE,
    )


def test_the_import_loads_what_calls_need_and_no_more() -> None:
    """Flax, SciPy and torch's compiler together take longer to import than the library does."""
    program = """
import sys, torch, jax, jax.numpy
before = set(sys.modules)
import torchfunc_jax
late = {"flax", "optax", "scipy", "treescope", "sympy", "torch._dynamo"}
assert not late & (set(sys.modules) - before), late & (set(sys.modules) - before)
assert torchfunc_jax.testing.parity(torch.sin, torch.ones(2))
try:
    torchfunc_jax.nothing
except AttributeError as error:
    assert "'nothing'" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
