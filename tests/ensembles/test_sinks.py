"""What ``fit`` logs, read back from the files of each sink; sinks that fail; the trace of some
steps.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ensemble_jobs as jobs
import jax
import numpy as np
import pytest
import torch
from torch import nn

from torchfunc_jax.ensemble import (
    Checkpoints,
    Ensemble,
    JsonLines,
    Sink,
    TensorBoard,
    Trainer,
    Wandb,
    launch,
)

N, STEPS = 3, 16  # two epochs of eight steps


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, Mapping[str, Any]]] = []
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.logged.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


def trainer() -> Trainer:
    return Trainer(Ensemble(jobs.member, N), nn.functional.mse_loss, lr=[0.01, 0.02, 0.03])


def fit(one: Trainer, sinks: Any, **options: Any) -> np.ndarray:
    options = {"epochs": 2, "batch_size": 8, "log_every": 3} | options
    return one.fit(jobs.data(), sinks=sinks, validation=jobs.data(), **options).numpy()


def test_what_is_logged() -> None:
    sink = Kept()
    assert isinstance(sink, Sink)
    one = trainer()
    losses = fit(one, sink)
    assert [(step, sorted(metrics)) for step, metrics in sink.logged] == [
        (3, ["loss", "steps_per_second"]),
        (6, ["loss", "steps_per_second"]),
        (8, ["validation_loss"]),
        (9, ["loss", "steps_per_second"]),
        (12, ["loss", "steps_per_second"]),
        (15, ["loss", "steps_per_second"]),
        (16, ["validation_loss"]),
    ]
    for step, metrics in sink.logged:
        if "loss" in metrics:
            np.testing.assert_array_equal(metrics["loss"], losses[step - 1])
            assert metrics["steps_per_second"] > 0
    last = one.losses(*jobs.data())
    np.testing.assert_array_equal(sink.logged[-1][1]["validation_loss"], last.numpy())
    assert sink.closed == 1


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_json(tmp_path: Path) -> None:
    path, kept = tmp_path / "new" / "log.jsonl", Kept()
    fit(trainer(), [JsonLines(path), kept])
    found = lines(path)
    assert [row.pop("step") for row in found] == [step for step, _ in kept.logged]
    for row, (_, metrics) in zip(found, kept.logged, strict=True):
        assert row.keys() == metrics.keys()
        for name, values in row.items():
            np.testing.assert_array_equal(np.asarray(values, np.float32), np.float32(metrics[name]))
    # what is not finite is null, and the line is JSON by the standard
    sink = JsonLines(tmp_path / "odd.jsonl")
    sink.log(1, {"loss": np.array([1.0, math.nan, math.inf]), "rate": math.nan})
    sink.close()
    refused = lambda text: pytest.fail(f"{text} is no JSON")
    row = json.loads((tmp_path / "odd.jsonl").read_text(), parse_constant=refused)
    assert row == {"step": 1, "loss": [1.0, None, None], "rate": None}


@pytest.mark.parametrize("loader", [False, True])
def test_the_lines_of_a_resumed_run_are_those_of_one_run(tmp_path: Path, loader: bool) -> None:
    """The run is cut off after its checkpoint, in the middle of a line, and does those steps
    again.
    """

    class Killed(Exception):
        pass

    def killed(trainer: Trainer, _: Any) -> None:
        if trainer.position == 14:
            raise Killed

    def run(name: str, **options: Any) -> None:
        data: Any = jobs.data()
        if loader:
            data = torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(*data), 8, shuffle=True
            )
        with Checkpoints(tmp_path / name, every=8) as checkpoints, contextlib.suppress(Killed):
            trainer().fit(
                data,
                epochs=2,
                batch_size=None if loader else 8,
                validation=jobs.data(),
                checkpoint=checkpoints,
                sinks=JsonLines(tmp_path / f"{name}.jsonl"),
                log_every=1,
                **options,
            )

    torch.manual_seed(0)
    run("whole")
    torch.manual_seed(0)
    run("parts", on_step=killed)
    path = tmp_path / "parts.jsonl"
    path.write_text(path.read_text()[:-9])
    run("parts")
    rows = [lines(tmp_path / f"{name}.jsonl") for name in ("whole", "parts")]
    for row in rows[0] + rows[1]:
        row.pop("steps_per_second", None)
    assert rows[0] == rows[1] and len(rows[0]) == 18


def test_a_file_that_is_no_log_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("first\nsecond\n")
    with pytest.raises(
        RuntimeError, match=r"sinks: JsonLines.begin failed at step 0: .*line 1 is not one of a log"
    ):
        fit(trainer(), JsonLines(path))
    assert path.read_text() == "first\nsecond\n"


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kept = Kept()
    one, sink = trainer(), TensorBoard(tmp_path, members=2)
    fit(one, [sink, kept], epochs=1)
    fit(one, [sink, kept], epochs=2)  # another file in the folder
    events = EventAccumulator(str(tmp_path), {"histograms": 0}).Reload()
    tags = events.Tags()
    assert sorted(tags["scalars"]) == sorted(
        [f"{name}/{i}" for name in ("loss", "validation_loss") for i in range(2)]
        + ["steps_per_second"]
    )
    assert sorted(tags["histograms"]) == ["loss", "validation_loss"]
    for name in ("loss", "validation_loss"):
        told = [(step, metrics[name]) for step, metrics in kept.logged if name in metrics]
        for i in range(2):
            curve = [(event.step, event.value) for event in events.Scalars(f"{name}/{i}")]
            assert curve == [(step, pytest.approx(values[i])) for step, values in told]
        sums = [(e.step, e.histogram_value.sum) for e in events.Histograms(name)]
        assert sums == [(step, pytest.approx(values.sum(), rel=1e-5)) for step, values in told]


def test_tensorboard_hides_the_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, values in [(0, {3: 1.0, 6: 2.0}), (4, {6: 3.0})]:
        sink = TensorBoard(tmp_path)
        sink.begin(begin)
        for step, value in values.items():
            sink.log(step, {"loss": np.array([value, math.nan])})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss/0")
    assert [(event.step, event.value) for event in events] == [(3, 1.0), (6, 3.0)]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a run that is there already, and one of its own; without a network."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="tests") as run:
        sink, kept = Wandb(run, members=2), Kept()
        fit(trainer(), [sink, kept])
        run.log({}, step=STEPS + 1)  # wandb keeps a step back until the next one
        summary = dict(run.summary)
    told = {name: values for _, metrics in kept.logged for name, values in metrics.items()}
    for name in ("loss", "validation_loss"):
        assert [summary[f"{name}/{i}"] for i in range(2)] == pytest.approx(list(told[name][:2]))
        assert f"{name}/2" not in summary and sum(summary[name]["values"]) == N
    own = Wandb(mode="offline", dir=tmp_path / "own", project="tests")
    own.log(1, {"loss": np.array([1.0, math.nan])})
    own.log(2, {"loss": np.array([2.0, math.nan])})
    assert own.run.summary["loss/0"] == 1.0
    own.close()
    assert own.run is None and list((tmp_path / "own").rglob("*.wandb"))


# -- failures --------------------------------------------------------------------------------------
class Failing(Kept):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.method == "log" and step == 6:
            raise OSError("the disk is full")
        super().log(step, metrics)

    def close(self) -> None:
        super().close()
        if self.method == "close":
            raise OSError("the disk is full")


@pytest.mark.parametrize(("method", "when"), [("log", "at step 6"), ("close", "after step 0")])
def test_a_sink_that_fails_names_itself(method: str, when: str) -> None:
    one, failing, other = trainer(), Failing(method), Kept()
    with pytest.raises(
        RuntimeError, match=f"sinks: Failing.{method} failed {when}: OSError: the disk is full"
    ):
        fit(one, [failing, other])
    assert failing.closed == other.closed == 1
    # the trainer is whole, and goes on
    at = 6 if method == "log" else STEPS
    assert one.position == at and len(fit(one, other)) == STEPS - at


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no sink": (
        {"sinks": [print]},
        TypeError,
        r"sinks: expected objects with the methods log\(step, metrics\) and close\(\)",
    ),
    "an interval": ({"log_every": 0}, ValueError, "log_every: expected a positive number of steps"),
    "a window": ({"profile": (5, 4, "x")}, ValueError, r"profile: expected \(first step, last"),
    "a window without a folder": ({"profile": (5, 4)}, ValueError, "profile: expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    options, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        fit(trainer(), **{"sinks": ()} | options)


@pytest.mark.parametrize(
    ("make", "name", "module"),
    [
        (lambda: TensorBoard("x"), "TensorBoard", "torch.utils.tensorboard"),
        (Wandb, "Wandb", "wandb"),
    ],
)
def test_a_package_that_is_missing_is_named(
    make: Callable[[], Any], name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{name}: it is not installed; pip install"):
        make()


@pytest.mark.slow
def test_process_0_alone_logs_and_traces(tmp_path: Path) -> None:
    assert launch(jobs.logged, str(tmp_path), processes=2) == [[2, 4, 6, 8], []]
    assert [row["step"] for row in lines(tmp_path / "log.jsonl")] == [2, 4, 6, 8]
    assert len(traces(tmp_path / "trace")) == 1


# -- profiles --------------------------------------------------------------------------------------
def traces(folder: Path) -> list[Path]:
    return list(folder.rglob("*.xplane.pb"))


def steps_in(folder: Path) -> list[int]:
    """The numbers of the steps in a trace."""
    (path,) = traces(folder)
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    return sorted({dict(event.stats)["step_num"] for event in events if event.name == "train"})


def test_the_trace_has_the_steps_of_the_window(tmp_path: Path) -> None:
    one = trainer()
    fit(one, (), epochs=1, profile=(3, 5, tmp_path / "middle"))
    assert steps_in(tmp_path / "middle") == [3, 4, 5]
    # a run that begins in the window, and ends in it
    fit(one, (), epochs=2, profile=(7, 100, tmp_path / "rest"))
    assert steps_in(tmp_path / "rest") == list(range(9, 17))
    fit(one, (), epochs=3, profile=(7, 9, tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_an_error_in_the_window_ends_the_trace(tmp_path: Path) -> None:
    def failing(trainer: Trainer, _: Any) -> None:
        raise ValueError("no such number")

    one = trainer()
    with pytest.raises(ValueError, match="no such number"):
        fit(one, (), on_step=failing, profile=(1, 5, tmp_path / "first"))
    fit(one, (), profile=(2, 2, tmp_path / "second"))
    assert steps_in(tmp_path / "first") == [1] and steps_in(tmp_path / "second") == [2]
