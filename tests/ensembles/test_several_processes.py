"""Ensembles in several real processes: the numbers of one device, and what the others do when one
is killed, fails, stops or is missing.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ensemble_jobs as jobs
import numpy as np
import pytest

from torchfunc_jax.ensemble import LOST, ProcessError, initialize, launch
from torchfunc_jax.ensemble import processes as launching

LIMIT = 20.0  # seconds in which the others end; the machine of the tests may be busy
STEPS = 24


def worst(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> float:
    """The largest difference, relative to numbers above 1; of numbers that are no floats, whether
    they differ.
    """
    assert some.keys() == others.keys()
    found = 0.0
    for name, x in some.items():
        y = others[name]
        assert x.shape == y.shape and x.dtype == y.dtype
        if x.dtype.kind == "f" and x.size:
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            far = np.abs(np.where(same, 0, x) - np.where(same, 0, y)) / np.maximum(np.abs(y), 1)
            found = max(found, float(far[~same].max(initial=0)))
        else:
            np.testing.assert_array_equal(x, y)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The run on one device, in this process."""
    return jobs.train(devices=1)


def compared(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for run in found:
        assert run["first"] == 0 and run["losses"].shape == (STEPS, jobs.MEMBERS)
        np.testing.assert_allclose(run["losses"], alone["losses"], rtol=2e-6, atol=2e-6)
        far = (
            worst({"losses": run["losses"]}, {"losses": alone["losses"]}),
            worst(run["values"], alone["values"]),
        )
        print(
            f"largest difference from one device: of losses {far[0]:.1e}, of parameters and "
            f"optimizer {far[1]:.1e}"
        )
        assert far[1] < 1e-5


@pytest.mark.parametrize(
    ("processes", "data"),
    [(2, 1), *(pytest.param(4, data, marks=pytest.mark.slow) for data in (1, 2))],
)
def test_numbers_are_those_of_one_device(processes: int, data: int, alone: dict[str, Any]) -> None:
    compared(launch(jobs.train, None, 5, 0.0, data, processes=processes, limit=LIMIT), alone)


# -- faults ----------------------------------------------------------------------------------------
class Killer(threading.Thread):
    """Kills one process of a launch, when a condition holds."""

    def __init__(self, victim: int, when: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.victim, self.when, self.moment = victim, when, float("inf")
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            process = {p.name: p for p in multiprocessing.active_children()}.get(
                f"process {self.victim}"
            )
            if process is not None and process.pid and self.when():
                self.moment = time.monotonic()
                os.kill(process.pid, signal.SIGKILL)
                return
            time.sleep(0.002)


def killed(folder: Path, victim: int, when: Callable[[], bool], count: int = 4) -> float | None:
    """A run in which one process is killed; the seconds until all have ended, or None if it was
    done before.
    """
    killer = Killer(victim, when)
    killer.start()
    try:
        launch(
            jobs.train,
            str(folder / "run"),
            5,
            0.03,
            processes=count,
            limit=LIMIT,
            logs=folder / "logs",
        )
    except ProcessError as error:
        assert error.process == victim and f"process {victim} of {count}" in str(error)
        return time.monotonic() - killer.moment
    finally:
        killer.over.set()
        killer.join()
    assert killer.moment == float("inf")
    return None


def reached(folder: Path) -> int:
    path = folder / "run" / "reached.txt"
    return int((path.read_text() if path.exists() else "") or 0)


def said(folder: Path, process: int) -> str:
    return (folder / "logs" / f"process_{process}.txt").read_text()


def whole(folder: Path) -> list[int]:
    """The positions of the run's checkpoints."""
    return sorted(int(path.name) for path in (folder / "run").glob("*") if path.name.isdigit())


def test_a_process_is_killed_and_the_run_goes_on_with_one(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    seconds = killed(tmp_path, 1, lambda: 10 in whole(tmp_path), count=3)
    assert seconds is not None and seconds < LIMIT
    for p in (0, 2):
        assert (
            f"process {p} of 3 ends because another one is lost: process 1 of 3 (number "
            in said(tmp_path, p)
        )
    newest = whole(tmp_path)[-1]
    run = jobs.train(str(tmp_path / "run"), devices=1)
    assert run["first"] == newest >= 10  # nothing is lost but the steps since the newest checkpoint
    assert worst(run["values"], alone["values"]) < 1e-5
    np.testing.assert_allclose(run["losses"], alone["losses"][newest:], rtol=2e-6, atol=2e-6)


@pytest.mark.slow
def test_processes_are_killed_at_random_moments(tmp_path: Path, alone: dict[str, Any]) -> None:
    """One of four, twenty times; resumed on four the parameters are bit for bit those of a run
    without a fault, on three to 1e-6.
    """
    begin = time.monotonic()
    four = launch(jobs.train, str(tmp_path / "whole"), 5, 0.03, processes=4, limit=LIMIT)[0][
        "values"
    ]
    usual = time.monotonic() - begin
    assert worst(four, alone["values"]) < 1e-5
    draw, rows = random.Random(0), []
    while len(rows) < 20:
        folder = tmp_path / str(len(rows))
        victim, moment = draw.randrange(4), time.monotonic() + draw.uniform(0.05, 1) * usual
        if draw.random() < 0.7:  # while it trains; otherwise at any time, also at the start
            position, extra = draw.randrange(1, STEPS - 1), draw.uniform(0, 0.03)
            when = lambda folder=folder, position=position, extra=extra: (
                reached(folder) >= position and not time.sleep(extra)
            )
        else:
            when = lambda moment=moment: time.monotonic() >= moment
        taken = killed(folder, victim, when)
        if taken is None:
            continue
        # if process 0 is lost, JAX's own client may be first, which ends the process without our
        # words
        lost = (f"process {victim} of 4", *["the leader task was preempted/died"] * (victim == 0))
        named = [
            p for p in range(4) if p != victim and any(words in said(folder, p) for words in lost)
        ]
        at, saved, count = reached(folder), [0, *whole(folder)][-1], draw.choice([3, 3, 4])
        run = launch(jobs.train, str(folder / "run"), processes=count, limit=LIMIT)[0]
        rows.append((victim, at, taken, named, run["first"], count, worst(run["values"], four)))
        print("| {} | {} | {:.2f} s | {} | {} | {} | {:.1e} |".format(*rows[-1]), flush=True)
        assert (
            taken < LIMIT
            and run["first"] == saved
            and rows[-1][-1] <= (0.0 if count == 4 else 1e-6)
        )
    # each of the others says which was killed, unless training was over
    assert all(len(named) == 3 or at == STEPS for _, at, _, named, *_ in rows)


def test_a_process_fails(tmp_path: Path) -> None:
    with pytest.raises(
        ProcessError, match=r"process 1 of 3 has failed: ValueError: no such number"
    ) as failed:
        launch(jobs.failing, 1, processes=3, limit=LIMIT, logs=tmp_path / "logs")
    assert failed.value.process == 1 and "another one is lost: process 1 of 3 (number" in said(
        tmp_path, 0
    )
    assert "has failed: ValueError: no such number" in said(tmp_path, 2)


class Ending:
    """A process of launch that ends, and says its last words, when it has been asked a second time
    whether it runs.
    """

    def __init__(self, code: int, words: Any) -> None:
        self.code, self.words, self.asked = code, words, 0
        self.pipe, self.other = multiprocessing.Pipe(duplex=False)
        self.sentinel, self.kept = multiprocessing.Pipe(duplex=False)

    @property
    def exitcode(self) -> int | None:
        self.asked += 1
        if self.asked == 2:
            if self.words is not None:
                self.other.send(self.words)
            self.other.close()
        return None if self.asked <= 2 else self.code


@pytest.mark.parametrize(("code", "words"), [(0, ("result", 5)), (-9, None)])
def test_a_process_ends_while_nobody_looks(code: int, words: Any) -> None:
    process = Ending(code, words)
    running = launching._Running.__new__(launching._Running)
    running.limit, running.processes, running.pipes = 5.0, [process], [process.pipe]
    if code == 0:
        assert running.results() == [5]
    else:
        with pytest.raises(ProcessError, match="process 0 of 1 was ended by signal 9"):
            running.results()


@pytest.mark.slow
def test_a_process_stops(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(ProcessError, match="process 0 of 3 did not answer"):
        launch(jobs.stopping, 0, processes=3, limit=4, logs=tmp_path / "logs")
    assert time.monotonic() - begin < 60
    for p in (1, 2):
        assert re.search(
            r"is lost: process 0 of 3 \(number .* has not answered for \d", said(tmp_path, p)
        )


def test_a_missing_process_is_named() -> None:
    context = multiprocessing.get_context("forkserver")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    answers = context.Queue()
    processes = [
        context.Process(target=jobs.start, args=(me, 4, port, 3.0, answers)) for me in (0, 1, 3)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        text, seconds = answers.get(timeout=120)
        assert (
            re.fullmatch(
                r"initialize: process 2 of 4 did not come to 127.0.0.1:\d+ within 3 seconds; .*",
                text,
            )
            and seconds < 3 + 15
        )
    for process in processes:
        process.join()


def test_wrong_arguments() -> None:
    for error, words, call in [
        (TypeError, "target: expected", lambda: launch(3)),
        (TypeError, "args: a script takes none", lambda: launch("train.py", 1)),
        (ValueError, "processes: expected", lambda: launch(print, processes=0)),
        (
            ValueError,
            "devices_per_process: expected",
            lambda: launch(print, devices_per_process=True),
        ),
        (ValueError, "limit: expected", lambda: initialize("127.0.0.1:1", 1, 0, limit=0)),
        (ValueError, "coordinator_address: expected", lambda: initialize("0.0.0.0:1", 2, 0)),
        (ValueError, "JAX finds no cluster", lambda: initialize()),
    ]:
        with pytest.raises(error, match=words):
            call()
    assert LOST == 85
