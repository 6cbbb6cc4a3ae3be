"""The benchmarks measure what they say: every system computes the same, and the results and the
table have what was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import attention
import calculus
import crossings
import jobs
import overhead
import random_numbers
import readme
import run
import unjitted
from workloads import WORKLOADS

SLOW = {"many_params", "per_sample_cnn", "per_sample_gpt", "hessian_mlp", "ensemble_step"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in WORKLOADS],
)
def test_every_system_computes_the_same(name: str) -> None:
    calls = run.make_calls(
        WORKLOADS[name](), ["torch.func", "native", "jit", "eager"], torch.device("cpu")
    )
    truth = calls.pop("torch.func")()
    for system, call in calls.items():
        assert run.distance(call(), truth) < 1e-4, system


def test_results_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.main(
        [
            "--only",
            "tiny_call",
            "--seconds",
            "0.05",
            "--systems",
            "torch.func,native,jit",
            "--json",
            "--output",
            str(tmp_path),
        ]
    )
    printed = json.loads(capsys.readouterr().out)
    written = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert printed == written and written["machine"]["torch"] == torch.__version__
    row = written["workloads"]["tiny_call"]
    for one in row.values():
        low, high = one["ms_quartiles"]
        assert 0 < low <= one["ms"] <= high and one["calls"] > 1 and one["first_s"] > 0
    table = run.markdown_table(written)
    assert (
        f"({row['jit']['ms'] / row['native']['ms']:.2f}x)" in table
        and written["machine"]["cpu"] in table
    )


def test_a_system_that_is_wrong_or_fails_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("broken on purpose")

    calls = {"torch.func": lambda: torch.ones(2), "native": lambda: torch.zeros(2), "jit": broken}
    monkeypatch.setattr(run, "make_calls", lambda *_: dict(calls))
    result = run.measure(WORKLOADS["tiny_call"](), list(calls), 0.01, torch.device("cpu"))
    assert list(result) == ["torch.func"]
    said = capsys.readouterr().err
    assert "native: wrong by 1.0e+00" in said and "jit: RuntimeError: broken on purpose" in said


def test_only_what_is_between_the_markers_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, other, attribute in (
        ("benchmarks", "demo", "README"),
        ("demo", "benchmarks-gpu", "PAGE"),
    ):
        page = tmp_path / f"{name}.md"
        page.write_text(f"before\n<!-- {name}:start -->\nold\n<!-- {name}:end -->\nafter\n")
        monkeypatch.setattr(readme, attribute, page)
        readme.update(name, "new")
        assert (
            page.read_text() == f"before\n<!-- {name}:start -->\nnew\n<!-- {name}:end -->\nafter\n"
        )
        with pytest.raises(SystemExit, match=f"{other}:start"):
            readme.update(other, "table", page)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--only", "weather"])
    assert "unknown: weather; expected some of tiny_call" in capsys.readouterr().err


def test_overhead_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- overhead:start -->\nold\n<!-- overhead:end -->\nafter\n")
    monkeypatch.setattr(overhead, "PAGE", page)
    results = overhead.main(
        ["--operators", "3,5", "--seconds", "0.01", "--page", "--output", str(tmp_path)]
    )
    assert [(row["transform"], row["operators"]) for row in results["rows"]] == [
        (t, n) for t in overhead.PROGRAMS for n in (3, 5)
    ]
    assert results == json.loads(next(tmp_path.glob("overhead-*.json")).read_text())
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert all(f"| `{row['transform']}` | {row['operators']} |" in text for row in results["rows"])


def test_crossings_and_their_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- crossings:start -->\nold\n<!-- crossings:end -->\n")
    monkeypatch.setattr(crossings, "PAGE", page)
    found = crossings.main(
        ["--tensors", "1,3", "--seconds", "0.01", "--page", "--output", str(tmp_path)]
    )
    assert found == json.loads(next(tmp_path.glob("crossings-*.json")).read_text())
    assert [(row["kind"], row["tensors"]) for row in found["rows"]] == [
        (kind, n) for kind in crossings.KINDS for n in (1, 3)
    ]
    assert all(set(row["ms"]) == set(crossings.SYSTEMS) for row in found["rows"])
    assert all(f"| {row['kind']} | {row['tensors']} |" in page.read_text() for row in found["rows"])


def test_attention_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- attention:start -->\nold\n<!-- attention:end -->\n")
    monkeypatch.setattr(attention, "PAGE", page)
    options = [
        "--only",
        "forward,gradient",
        "--lengths",
        "64,1100",
        "--at-once",
        "65536",
        "--page",
        "--output",
        str(tmp_path),
    ]
    found = attention.main(options)
    assert found == json.loads(next(tmp_path.glob("attention-*.json")).read_text())
    for name in ("forward", "gradient"):
        short, long = found["rows"][name]["bytes"]
        assert (
            short < long < 4 * 1100**2 * attention.HEADS and 0 < found["rows"][name]["error"] < 1e-5
        )
        assert f"| {name} | " in page.read_text()
    with pytest.raises(SystemExit):
        attention.main(["--only", "nothing"])


def test_random_numbers_and_their_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- random-numbers:start -->\nold\n<!-- random-numbers:end -->\n")
    monkeypatch.setattr(random_numbers, "PAGE", page)
    found = random_numbers.main(
        [
            "--only",
            "hidden",
            "--members",
            "2",
            "--seconds",
            "0.01",
            "--page",
            "--output",
            str(tmp_path),
        ]
    )
    assert found == json.loads(next(tmp_path.glob("random-numbers-*.json")).read_text())
    assert (
        set(found["rows"][0]["systems"]) == set(random_numbers.SYSTEMS)
        and "| after the hidden layer | 8,192 |" in page.read_text()
    )


def test_jobs_and_their_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "surrogates.md"
    page.write_text("<!-- jobs:start -->\nold\n<!-- jobs:end -->\n")
    monkeypatch.setattr(jobs, "DOCS", tmp_path)
    (found,) = jobs.main(
        ["--only", "surrogates", "--small", "--seconds", "0", "--page", "--output", str(tmp_path)]
    )
    assert (
        found == json.loads(next(tmp_path.glob("jobs-surrogates-*.json")).read_text())
        and "wrong" not in capsys.readouterr().err
    )
    systems = found["rows"][0]["systems"]
    assert len(systems) == 3 and all(
        one["calls"] >= 3 and one["value"] > 0 for one in systems.values()
    )
    assert (
        all(f"| {name} |" in page.read_text() for name in systems) and "old" not in page.read_text()
    )
    systems = {
        "truth": lambda: lambda: (1, np.ones(2)),
        "other": lambda: lambda: (1, np.zeros(2)),
        "none": lambda: 1 / 0,
    }
    broken = jobs.Task("nothing", "ms", systems)
    assert list(jobs.measure(broken, 0)) == ["truth"]
    said = capsys.readouterr().err
    assert "other: wrong by 1.0e+00" in said and "none: ZeroDivisionError" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in jobs.JOBS if name != "surrogates"])
@pytest.mark.filterwarnings("ignore")
def test_each_job_is_measured(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = jobs.main(["--only", name, "--small", "--seconds", "0", "--output", str(tmp_path)])
    said = capsys.readouterr().err
    assert "wrong by" not in said and said.count("Error: ") == said.count("ModuleNotFoundError: ")
    assert any(row["systems"] for row in found["rows"])


def test_programs_by_hand_in_jax_compute_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = unjitted.main(["--only", "newton,ensemble", "--calls", "2", "--shapes", "1", "--json"])
    assert json.loads(capsys.readouterr().out) == found
    assert (
        set(found["programs"]["newton"])
        == set(found["programs"]["ensemble"])
        == {"torchfunc_jax", "jax"}
    )
    with pytest.raises(SystemExit):
        unjitted.main(["--only", "nothing"])


def test_calculus_computes_what_torch_func_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = calculus.main(["--only", "hvp,laplacian", "--seconds", "0.01"])
    assert (
        set(found["programs"]) == {"hvp", "laplacian"}
        and found["machine"]["cpu"] in capsys.readouterr().out
    )
    with pytest.raises(SystemExit):
        calculus.main(["--only", "nothing"])
