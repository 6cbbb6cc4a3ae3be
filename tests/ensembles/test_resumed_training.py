"""Checkpoints of ensembles: what is resumed is the run that was not interrupted, on any mesh;
SIGTERM; damage; killed writers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ensemble_jobs as jobs
import jax
import numpy as np
import pytest
from test_several_processes import reached, said, worst
from torch import nn

from bridge.checkpoints import CheckpointError
from torchfunc_jax.ensemble import Checkpoints, Ensemble, Preempted, ProcessError, Trainer, launch


class Interrupted(Exception):
    pass


def fit(
    trainer: Trainer,
    checkpoint: Checkpoints | None = None,
    until: int = 24,
    on: Any = None,
    **options: Any,
) -> Any:
    """Train to a position; ``on`` maps a position to what is done after its step."""

    def on_step(trainer: Trainer, _: Any) -> None:
        (on or {}).get(trainer.position, lambda: None)()

    return trainer.fit(
        jobs.data(),
        epochs=until // 8,
        batch_size=8,
        checkpoint=checkpoint,
        on_step=on_step,
        **options,
    )


def interrupt() -> None:
    raise Interrupted


@pytest.mark.parametrize(
    "options",
    [{}, {"bootstrap": True}, {"own": True, "keep_best": True, "validation": jobs.data()}],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, options: dict[str, Any]) -> None:
    make = lambda: Trainer(
        Ensemble(jobs.member, 3, seed=1),
        nn.functional.mse_loss,
        "adam",
        lr=[0.01, 0.02, 0.03],
        ema=0.9,
        seed=5,
    )
    whole = make()
    losses = fit(whole, **options)
    with Checkpoints(tmp_path, every=5, keep=2) as checkpoints:
        with pytest.raises(Interrupted):
            fit(make(), checkpoints, on={13: interrupt}, **options)
        assert checkpoints.steps == [5, 10]
    with Checkpoints(tmp_path, every=5, keep=2) as checkpoints:  # as in a new process
        resumed = make()
        rest = fit(resumed, checkpoints, **options)
        assert checkpoints.steps == [20, 24] and resumed.position == 24
        np.testing.assert_array_equal(rest.numpy(), losses[10:].numpy())
        assert worst(jobs.values(resumed), jobs.values(whole)) == 0
        # nothing is left to do
        assert len(fit(resumed, checkpoints, **options)) == 0 and checkpoints.steps == [20, 24]
        again = make()
        assert checkpoints.restore(again, 20) == again.position == 20


@pytest.mark.slow
def test_on_other_meshes(tmp_path: Path) -> None:
    (found,) = launch(jobs.layouts, str(tmp_path), processes=1, devices_per_process=8)
    whole = found.pop("whole")
    far = {name: worst(run, whole) for name, run in found.items()}
    assert far.pop("4x2") == 0  # the same layout
    assert max(far.values()) < 1e-6 and len(far) == 2


def test_a_killed_writer_leaves_no_checkpoint_that_is_taken_for_whole(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="process 0 of 1 was ended by signal 9"):
        launch(jobs.killed_while_writing, str(tmp_path), processes=1)
    with Checkpoints(tmp_path) as checkpoints:
        trainer = Trainer(Ensemble(lambda: nn.Linear(1000, 1000), 8), nn.functional.mse_loss, "sgd")
        found = checkpoints.restore(trainer)
        assert found == checkpoints.steps[-1]
        assert all((np.asarray(x) == found).all() for x in trainer.state.params.values())


# -- what cannot be restored -----------------------------------------------------------------------
def test_other_trainers_and_damage_are_refused(tmp_path: Path) -> None:
    small = lambda n=2, optimizer="adam", width=8: Trainer(
        Ensemble(lambda: jobs.member(width), n), nn.functional.mse_loss, optimizer
    )
    with Checkpoints(tmp_path) as checkpoints:
        trainer = small()
        assert checkpoints.restore(trainer) is None
        for trainer.position in (3, 7):
            checkpoints.save(trainer, wait=True)
        for other, words in [
            (
                small(3),
                (
                    r"step 7: 'params.0.bias' is float32\[2, 8\] in it and "
                    r"float32\[3, 8\] in the trainer"
                ),
            ),
            (
                small(2, "sgd"),
                (
                    r"step 7: it lacks .*'numbers.momentum'.* and has .*'optimizer.mean.0.bias'.* "
                    r"that the trainer lacks"
                ),
            ),
            (small(2, width=9), r"'params.0.bias' is float32\[2, 8\] in it and float32\[2, 9\]"),
        ]:
            before = jobs.values(other)
            with pytest.raises(CheckpointError, match=words):
                checkpoints.restore(other)
            assert worst(before, jobs.values(other)) == 0 and other.position == 0
        with pytest.raises(
            CheckpointError, match=r"there is no checkpoint of step 4, but of \[3, 7\]"
        ):
            checkpoints.restore(trainer, 4)
        for file in (tmp_path / "7").rglob("*"):
            if file.is_file() and file.parent.name == "d":
                file.write_bytes(file.read_bytes()[:-40] + bytes(40))
        with pytest.raises(CheckpointError, match="step 7: damaged: "):
            checkpoints.restore(trainer)
        assert checkpoints.restore(trainer, 3) == 3


def test_wrong_arguments(tmp_path: Path) -> None:
    for words, options in [("every: expected", {"every": -1}), ("keep: expected", {"keep": 0})]:
        with pytest.raises(ValueError, match=words):
            Checkpoints(tmp_path, **options)


# -- SIGTERM ---------------------------------------------------------------------------------------
@contextmanager
def handled(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("at", [6, 24])
def test_sigterm_saves_and_ends(tmp_path: Path, at: int) -> None:
    made = lambda: Trainer(Ensemble(jobs.member, 2), nn.functional.mse_loss)
    met: list[Any] = []
    with Checkpoints(tmp_path, every=0) as checkpoints:
        with handled(lambda number, frame: met.append((number, checkpoints.steps))):
            mine = signal.getsignal(signal.SIGTERM)
            with pytest.raises(Preempted) as ended:
                fit(made(), checkpoints, on={at: terminate})
            assert signal.getsignal(signal.SIGTERM) is mine
        assert (ended.value.position, ended.value.code) == (at, 143) and met == [
            (signal.SIGTERM, [at])
        ]
        with handled(signal.SIG_IGN):
            trainer = made()
            assert (
                len(fit(trainer, checkpoints, on={8: terminate})) == 24 - at
                and trainer.position == 24
            )


@pytest.mark.slow
def test_sigterm_to_one_process_saves_and_ends_all(tmp_path: Path) -> None:
    found = launch(jobs.preempted, str(tmp_path), 5, 1, processes=2)
    (position,) = {run["position"] for run in found}
    assert position >= 5 and all(run["code"] == 143 for run in found)
    with Checkpoints(tmp_path) as checkpoints:
        trainer = jobs.trainer_of(devices=1)
        assert checkpoints.restore(trainer) == position
        assert worst(found[0]["values"], jobs.values(trainer)) == 0


def test_sigterm_to_the_launching_process_is_passed_on(tmp_path: Path) -> None:
    def terminated() -> None:
        while reached(tmp_path) < 5:
            time.sleep(0.01)
        terminate()

    threading.Thread(target=terminated, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        launch(jobs.train, str(tmp_path / "run"), 0, 0.3, processes=2, logs=tmp_path / "logs")
    assert ended.value.code == 143
    assert not any("lost" in said(tmp_path, p) for p in range(2))
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.restore(jobs.trainer_of(devices=1)) >= 5


def test_sharding_is_the_trainers(tmp_path: Path) -> None:
    """An array that is restored lies where the one was that it replaces."""
    with Checkpoints(tmp_path) as checkpoints:
        mesh = jax.make_mesh((1, 1), ("member", "data"))
        first, second = (
            Trainer(Ensemble(jobs.member, 2, mesh=m), nn.functional.mse_loss) for m in (None, mesh)
        )
        checkpoints.save(first)
        before = second.state_shardings
        checkpoints.restore(second)
        assert jax.tree.leaves(second.state_shardings) == jax.tree.leaves(before)
