"""`torchfunc-jax doctor`: what it knows of versions and settings, and that a check which differs,
raises, hangs or crashes is told.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from test_command_line import run

from bridge import compiling
from torchfunc_jax import doctor
from torchfunc_jax.doctor import CHECKS, Checked, Report, compare, examine

ORDINARY = Report(
    versions={"python": "3.12.1", "torch": "2.13.0+cpu", "jax": "0.11.2", "jaxlib": "0.11.2"},
    cpu={"architecture": "arm64"},
    devices=["jax cpu:0 (cpu, the default)"],
    environment={},
    settings={"jax_enable_x64": False, "torch.get_float32_matmul_precision()": "highest"},
    known=[],
    checks=[],
)
MISCOMPILED = "jaxlib 0.10.2 and 0.11.0 on x86 CPUs"
OVERWRITTEN = "writes that overlap what they read, on CPUs"


def with_versions(**versions: str) -> Report:
    return dataclasses.replace(ORDINARY, versions=ORDINARY.versions | versions)


def with_gpu(*devices: str, **changes: Any) -> Report:
    return dataclasses.replace(ORDINARY, devices=[*ORDINARY.devices, *devices], **changes)


PREALLOCATED = {"environment": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}


@pytest.mark.parametrize(
    ("facts", "titles"),
    [
        (ORDINARY, []),
        (with_versions(torch="2.11.0", jax="0.10.2", jaxlib="0.10.2"), []),
        (with_versions(python="3.13.9", torch="2.15.0", jax="0.12.0.1", jaxlib="0.12.0.1"), []),
        (with_versions(torch="2.15.1"), ["torch after 2.15.0"]),
        (with_versions(torch="2.16.0a0+git1234"), ["torch after 2.15.0"]),
        (with_versions(torch="3.0"), ["torch after 2.15.0"]),
        (with_versions(torch="2.9.1"), ["torch before 2.11.0"]),
        (with_versions(jax="0.12.1", jaxlib="0.12.1"), ["jax after 0.12.0.1"]),
        (with_versions(jax="0.12.0", jaxlib="0.12.0"), []),
        (with_versions(jax="0.9.0", jaxlib="0.9.0"), ["jax before 0.10.2"]),
        (with_versions(jaxlib="0.11.1"), ["jax and jaxlib of two versions"]),
        (with_versions(python="3.14.0"), ["python after 3.13"]),
        (with_versions(python="3.10.4"), ["python before 3.11"]),
        (with_gpu("torch cuda:0 (H100)"), ["JAX without the GPU"]),
        (with_gpu("torch cuda:0 (H100)", "jax gpu:0 (H100, the default)"), ["memory of the GPU"]),
        (with_gpu("jax gpu:0 (H100, the default)", **PREALLOCATED), []),
        (
            with_gpu(
                "jax gpu:0 (H100)",
                **PREALLOCATED,
                settings=ORDINARY.settings | {"torch.get_float32_matmul_precision()": "high"},
            ),
            ["TF32"],
        ),
        (
            dataclasses.replace(ORDINARY, settings=ORDINARY.settings | {"jax_enable_x64": True}),
            ["jax_enable_x64"],
        ),
        (
            dataclasses.replace(
                ORDINARY, environment={"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
            ),
            ["fast math in XLA_FLAGS"],
        ),
    ],
)
def test_what_is_known_of_a_combination(facts: Report, titles: list[str]) -> None:
    assert [
        row.title
        for applies, row in doctor.KNOWN
        if applies(facts) and row.title not in (MISCOMPILED, OVERWRITTEN)
    ] == titles


def test_the_miscompiling_jaxlib_is_named_where_it_is_installed() -> None:
    assert (
        MISCOMPILED in [row.title for row in examine(checks=False).known]
    ) == compiling.miscompiles()


def test_the_jaxlibs_that_overwrite_what_they_read_are_named() -> None:
    shifted = jax.jit(lambda a: (lambda y: y.at[1:].set(y[:-1]))(a.reshape(3, 2)))(
        jnp.arange(1.0, 7.0)
    )
    wrong = jax.default_backend() == "cpu" and shifted[2, 0] != 3
    assert (OVERWRITTEN in [row.title for row in examine(checks=False).known]) == wrong


def test_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setenv("JAXLESS", "is not JAX's")
    report = examine(checks=False)
    assert (
        report.versions["torch"] == torch.__version__
        and "XLA_FLAGS" in report.environment
        and "JAXLESS" not in report.environment
    )
    assert any(d.startswith("jax cpu:0") for d in report.devices) and report.checks == []


@pytest.mark.parametrize(
    "name",
    [
        "vmap",
        "vjp",
        "vmap of writes that overlap what they read",
        "autograd.Function: its backward",
        ".backward() through vmap",
        "more than 32,768 samples",
    ],
)
def test_checks_agree(name: str) -> None:
    assert compare(name) is None


@pytest.mark.slow
def test_every_check_agrees() -> None:
    seen: list[str] = []
    report = examine(on_check=lambda name, result: seen.append(name) if result is None else None)
    assert report.ok, [c for c in report.checks if c.difference]
    assert seen == list(CHECKS) == [c.name for c in report.checks]


@pytest.mark.slow
def test_the_other_process_answers_on_a_channel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor,
        "_PROGRAM",
        f"from torchfunc_jax import doctor; doctor.compare = print; {doctor._PROGRAM}",
    )
    monkeypatch.setattr(doctor, "CHECKS", {"vmap": CHECKS["vmap"]})
    assert [c.difference for c in examine().checks] == [None]


def wrong(api: Any) -> Callable[..., Any]:
    return lambda x: x if api is torch.func else x + 0.01


def wrong_in_jit(api: Any) -> Callable[..., Any]:
    return lambda x: x if type(x) is torch.Tensor else x + 0.01


def raising(api: Any) -> Callable[..., Any]:
    return lambda x: x if api is torch.func else x.reshape(7)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (wrong, "un-jitted: Tensor-likes are not close"),
        (wrong_in_jit, "compiled: Tensor-likes are not close"),
        (raising, "un-jitted: RuntimeError: shape '[7]' is invalid"),
    ],
)
def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch, program: Any, told: str) -> None:
    monkeypatch.setitem(CHECKS, "vmap", doctor._Check(program))
    difference = compare("vmap")
    assert difference is not None and difference.startswith(told)


def test_a_crash_and_a_hang_are_lines_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is started again for the next check. This one answers as the real one does,
    without its imports.
    """
    program = (
        "import os, sys, time\nprint('ready', flush=True)\ndoes = {'vmap': os.abort, 'grad': "
        "lambda: time.sleep(60), 'vjp': lambda: None, 'jvp': lambda: sys.exit('no memory')}\nfor "
        "line in sys.stdin:\n    does[line.strip().strip('\"')]()\n    print('null', flush=True)"
    )
    monkeypatch.setattr(doctor, "_PROGRAM", program)
    monkeypatch.setattr(doctor, "_PATIENCE", 1.5)
    monkeypatch.setattr(
        doctor, "CHECKS", {name: CHECKS[name] for name in ("vmap", "grad", "vjp", "jvp")}
    )
    report = examine()
    assert [(c.name, c.difference) for c in report.checks] == [
        ("vmap", "the process ended by SIGABRT"),
        ("grad", "it took longer than 1.5 seconds and was stopped"),
        ("vjp", None),
        ("jvp", "the process ended with exit code 1: no memory"),
    ]
    assert not report.ok


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("doctor", "--no-check")
    assert plain.exit_code == 0 and torch.__version__ in plain.stdout
    found = json.loads(run("doctor", "--no-check", "--json").stdout)
    assert found["ok"] and found["versions"]["torch"] == torch.__version__ and found["checks"] == []
    failed = dataclasses.replace(
        examine(checks=False),
        checks=[Checked("vmap", "compiled: [7] differs", 0.1), Checked("grad", None, 0.1)],
    )

    def pretended(checks: bool, on_check: Any) -> Report:
        for c in failed.checks:
            on_check(c.name, None)
            on_check(c.name, c)
        return failed

    monkeypatch.setattr(doctor, "examine", pretended)
    shown = run("doctor")
    assert shown.exit_code == 1
    for line in ("wrong vmap", "right grad", "vmap: compiled: [7] differs", "1 of 2 checks agree"):
        assert line in shown.stdout, shown.stdout
    assert run("doctor", "--json").exit_code == 1
    help_text = run("doctor", "--help").stdout
    assert "torchfunc-jax doctor --json > doctor.json" in help_text and "--no-check" in help_text
