"""A user's type checker knows the types of the public names: both packages have py.typed, and
tests/lib/typed_usage.py has no error.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typed_usage

import bridge
import torchfunc_jax
from torchfunc_jax.doctor import examine

ROOT = Path(__file__).resolve().parents[2]
CHECKERS = {
    "pyright": [],
    "mypy": ["--config-file=", "--strict", "--disallow-any-unimported", "--follow-imports=silent"],
}


@pytest.mark.parametrize(
    "checker",
    [pytest.param(name, marks=pytest.mark.slow if name == "mypy" else ()) for name in CHECKERS],
)
def test_a_users_program_has_known_types(checker: str) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: make release-check installs it")
    options = CHECKERS[checker] + (["--pythonpath", sys.executable] if checker == "pyright" else [])
    command = [sys.executable, "-m", checker, *options, "tests/lib/typed_usage.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_users_program_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers, of the extra export, is not installed")
    pytest.importorskip(
        "safetensors", reason="safetensors, of the extra checkpoints, is not installed"
    )
    typed_usage.main(str(tmp_path))
    assert "a program was compiled: it is the first one" in capsys.readouterr().err


def test_it_names_every_public_function() -> None:
    text = Path(typed_usage.__file__).read_text()
    older = {
        name
        for name in torchfunc_jax.__all__
        if name.endswith("_deprecated_v1") or name.startswith("functional_init")
    }
    # what make_functional returns, and a Python module
    others = {"FunctionalModule", "FunctionalModuleWithBuffers", "testing"}
    assert not [
        name
        for name in {*torchfunc_jax.__all__} - older - others
        if not re.search(rf"\b{name}\b.*\(", text)
    ]
    assert not [name for name in bridge.__all__ if not re.search(rf"\b(bridge\.)?{name}\(", text)]


def test_both_packages_say_that_they_are_typed_and_of_which_version() -> None:
    for package in (bridge, torchfunc_jax):
        assert Path(package.__file__).with_name("py.typed").exists()
        assert package.__version__ == bridge.version.__version__
    assert examine(checks=False).versions["torchfunc-jax"] == torchfunc_jax.__version__
