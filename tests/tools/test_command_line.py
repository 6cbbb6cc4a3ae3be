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
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from torchfunc_jax.cli import app

SMALL = ["ensemble", "--members", "2", "--epochs", "1", "--batch-size", "256"]


def run(*args: str) -> Result:
    return CliRunner().invoke(
        app, list(args), env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    )


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0 and "ensemble" in result.stdout and "info" in result.stdout


def test_help_teaches_with_examples() -> None:
    text = run("ensemble", "--help").stdout
    for option in (
        "--members",
        "--epochs",
        "--batch-size",
        "--seed",
        "--device",
        "--devices",
        "--processes",
        "--mesh",
        "--resume",
        "--dry-run",
        "--no-compare",
        "--output",
        "--json",
    ):
        assert option in text, option
    assert "torchfunc-jax ensemble --members 8 --epochs 5" in text and "Ctrl-C" in text
    assert "[ones(2), 3]; repeatable" in run("parity", "--help").stdout  # no markup


def test_ensemble_prints_the_table_and_writes_the_files(tmp_path: Path) -> None:
    result = run(*SMALL, "--output", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0, result.output
    least = torch.tensor(torch.finfo(torch.float32).tiny)
    assert least * 0.5 > 0, "denormals are still flushed"
    for shown in (
        "torchfunc_jax",
        "torch.func",
        "first step",
        "final loss",
        "ensemble vote",
        "gradients",
        "Speed-up",
        "AUROC",
        "NLL",
    ):
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
        (["--mesh", "member=0"], "--mesh: expected member=M,data=D"),
        (["--mesh", "rows=2"], "--mesh: expected member=M,data=D"),
        (["--mesh", "member=2,data=2", "--devices", "8"], "to be the 8 devices, got 2 times 2"),
        (["--devices", "3", "--processes", "2"], "a multiple of the 2 processes, got 3"),
        (
            ["--mesh", "member=3", "--processes", "2"],
            "a multiple of the 2 processes, got 3 times 1",
        ),
        (["--mesh", "member=64", "--members", "64"], "as many devices as there are"),
        (["--dry-run", "--mesh", "member=3"], "multiple of the 3 devices"),
    ],
)
def test_wrong_options_are_named(args: list[str], message: str) -> None:
    result = run("ensemble", *args)
    assert result.exit_code == 2 and message in re.sub(r"[\s│]+", " ", result.stderr)


def test_a_dry_run_needs_no_devices(tmp_path: Path) -> None:
    result = run(
        "ensemble",
        "--dry-run",
        "--members",
        "4096",
        "--mesh",
        "member=128,data=2",
        "--output",
        str(tmp_path / "none"),
        "--json",
    )
    assert result.exit_code == 0, result.output
    read = json.loads(result.stdout)
    assert (
        read["devices"] == 256
        and read["members_per_device"] == 32
        and read["flops"] > 0
        and read["sent"] > 0
    )
    assert not (tmp_path / "none").exists()
    assert (
        "4,096 members on 256 devices"
        in run("ensemble", "--dry-run", "--members", "4096", "--mesh", "member=256").stdout
    )


def test_resume_goes_on(tmp_path: Path) -> None:
    args = [*SMALL, "--resume", "--json", "--output", str(tmp_path)]
    first, again = run(*args), run(*args)
    assert first.exit_code == again.exit_code == 0, again.output
    one, two = json.loads(first.stdout), json.loads(again.stdout)
    assert (one["resumed_at"], one["steps"], two["resumed_at"], two["steps"]) == (0, 5, 5, 5)
    assert one["by_size"] == two["by_size"] and list(one["systems"]) == ["torchfunc_jax"]
    assert "resume: " in re.sub(r"[\s│]+", " ", run(*args, "--seed", "1").stderr)


def on_devices(tmp_path: Path, *args: str) -> dict[str, Any]:
    given = [*SMALL, "--members", "4", "--no-compare", "--json", "--output", str(tmp_path), *args]
    done = subprocess.run(
        [sys.executable, "-m", "torchfunc_jax.cli", *given],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert len(torch.load(tmp_path / "members.pt", weights_only=True)) == 4
    return json.loads(done.stdout)


@pytest.mark.slow
def test_devices_and_processes_train_the_same_members(tmp_path: Path) -> None:
    alone = on_devices(tmp_path / "a")
    meshed = on_devices(tmp_path / "b", "--devices", "4", "--mesh", "member=2,data=2")
    processes = on_devices(tmp_path / "c", "--devices", "4", "--processes", "2", "--resume")
    resumed = on_devices(tmp_path / "c", "--resume")
    assert [r["devices"] for r in (alone, meshed, processes, resumed)] == [
        1,
        4,
        4,
        1,
    ] and processes["processes"] == 2
    assert [row["devices"] for row in meshed["throughput"]] == [1, 2, 4]
    losses = [np.array(r["systems"]["torchfunc_jax"]["losses"]) for r in (alone, meshed, processes)]
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-3)
    assert resumed["resumed_at"] == resumed["steps"] == 5
    np.testing.assert_allclose(
        resumed["by_size"]["nll"]["mean"], processes["by_size"]["nll"]["mean"], rtol=1e-5
    )


def test_info() -> None:
    facts = json.loads(run("info", "--json").stdout)
    assert (
        facts["torch"] == torch.__version__
        and facts["lowered_operators"] > 100
        and facts["devices"]
    )
    assert "jax" in run("info").stdout


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_leaves_what_was_trained(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torchfunc_jax.cli",
        *SMALL,
        "--epochs",
        "100000",
        "--json",
        "--output",
        str(tmp_path),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TTY_COMPATIBLE": "0"},
        # a shell ignores it for what it runs in the background
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    while "Training" not in process.stderr.readline():
        assert process.poll() is None, "ended before it trained"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Stopping after this step" in err
    result = json.loads(out)
    assert result["interrupted"] and 0 < result["steps"] < 500000
    assert (
        len(torch.load(tmp_path / "members.pt", weights_only=True)) == 2
        and (tmp_path / "ensemble.png").exists()
    )
