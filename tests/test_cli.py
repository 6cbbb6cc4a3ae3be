"""The command `torchfunc-jax`, run as a user runs it: help, table, JSON, files, errors, Ctrl-C."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from torchfunc_jax.cli import app

SMALL = ["ensemble", "--members", "2", "--epochs", "1", "--batch-size", "256"]


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"})


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0 and "ensemble" in result.stdout and "info" in result.stdout


def test_help_teaches_with_examples() -> None:
    text = run("ensemble", "--help").stdout
    for option in ("--members", "--epochs", "--batch-size", "--seed", "--device", "--no-compare", "--output", "--json"):
        assert option in text, option
    assert "torchfunc-jax ensemble --members 8 --epochs 5" in text and "Ctrl-C" in text
    assert "[ones(2), 3]; repeatable" in run("parity", "--help").stdout  # no markup


def test_ensemble_prints_the_table_and_writes_the_files(tmp_path: Path) -> None:
    result = run(*SMALL, "--output", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0, result.output
    least = torch.tensor(torch.finfo(torch.float32).tiny)
    assert least * 0.5 > 0, "denormals are still flushed"
    for shown in ("torchfunc_jax", "torch.func", "first step", "final loss", "ensemble vote", "gradients", "Speed-up"):
        assert shown in result.stdout, shown
    folder = tmp_path / "new" / "folder"
    assert (folder / "ensemble.png").read_bytes().startswith(b"\x89PNG")
    assert len(torch.load(folder / "members.pt", weights_only=True)) == 2
    assert json.loads((folder / "report.json").read_text())["steps"] == 5


def test_json_is_alone_on_stdout(tmp_path: Path) -> None:
    result = run(*SMALL, "--no-compare", "--json", "--output", str(tmp_path))
    read = json.loads(result.stdout)
    assert list(read["systems"]) == ["torchfunc_jax"] and "speed_up" not in read
    assert "Wrote" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--members", "0"], "'--members'"),
        (["--batch-size", "5000"], "'--batch-size'"),
        (["--device", "abacus"], "no JAX device 'abacus'"),
        (["--member-count", "3"], "--member-count"),
    ],
)
def test_wrong_options_are_named(args: list[str], message: str) -> None:
    result = run("ensemble", *args)
    assert result.exit_code == 2 and message in re.sub(r"[\s│]+", " ", result.stderr)


def test_info() -> None:
    facts = json.loads(run("info", "--json").stdout)
    assert facts["torch"] == torch.__version__ and facts["lowered_operators"] > 100 and facts["devices"]
    assert "jax" in run("info").stdout


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_leaves_what_was_trained(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchfunc_jax.cli", *SMALL, "--epochs", "100000", "--json", "--output", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TTY_COMPATIBLE": "0"})
    assert process.stderr is not None
    while "Training" not in process.stderr.readline():
        assert process.poll() is None, "ended before it trained"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Stopping after this step" in err
    result = json.loads(out)
    assert result["interrupted"] and 0 < result["steps"] < 500000
    assert len(torch.load(tmp_path / "members.pt", weights_only=True)) == 2 and (tmp_path / "ensemble.png").exists()
