"""Ensembles on 8 simulated devices are those on one device; all jobs of ensemble_mesh_jobs.py run
in one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FAST = ["training", "programs", "refused", "built_where_it_stays", "dropout"]
SLOW = [
    "training_on_more",
    "more_programs",
    "in_parts",
    "unchecked",
    "within_the_users_mesh",
    "life",
    "isolation",
]


def run(jobs: list[str]) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests" / "lib" / "ensemble_mesh_jobs.py"), *jobs]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def fast() -> dict[str, Any]:
    return run(FAST)


@pytest.fixture(scope="module")
def slow() -> dict[str, Any]:
    return run(SLOW)


def agree(found: dict[str, Any], names: tuple[str, ...], first: str = "one") -> None:
    one = found[first]
    for where, other in found.items():
        for name in names:
            flat = [
                np.concatenate([np.ravel(y) for y in x]) if name != "logits" else np.ravel(x)
                for x in (one[name], other[name])
            ]
            np.testing.assert_allclose(
                flat[1], flat[0], rtol=2e-5, atol=2e-6, err_msg=f"{where}, {name}"
            )


TRAINED = ("losses", "state", "logits", "member")


def test_training_is_that_of_one_device(fast):
    """Every array of the state lies as promised, too: the job asserts it."""
    agree(fast["training"], TRAINED)
    assert fast["training"]["4x2"]["checked"]


@pytest.mark.slow
def test_training_on_other_meshes(slow):
    agree(slow["training_on_more"], TRAINED)


@pytest.mark.slow
def test_parts_of_batches_and_of_members(slow):
    agree(slow["in_parts"], TRAINED)


@pytest.mark.slow
def test_operators_that_shard_map_cannot_check(slow):
    agree(slow["unchecked"], TRAINED)
    assert not slow["unchecked"]["4x2"]["checked"]


@pytest.mark.slow
def test_inside_of_the_users_set_mesh(slow):
    agree({**slow["within_the_users_mesh"], "two": slow["training_on_more"]["one"]}, TRAINED, "two")


@pytest.mark.slow
def test_each_part_of_a_batch_has_random_numbers_of_its_own(fast):
    assert len({x for row in fast["dropout"]["losses"] for x in row}) == 16


def test_no_member_leaves_its_device(fast):
    """A step of 512 CNNs: no collective at all over "member", and reductions alone over "data"."""
    found = fast["programs"]
    assert found["8x1"]["collectives"] == {} and set(found["4x2"]["collectives"]) == {"all-reduce"}


def each_has_its_part(found: dict[str, Any], *devices: int) -> None:
    for what in ("arguments", "aliased", "held", "flops", "temporaries"):
        parts = [found["1x1"][what] / found[f"{m}x1"][what] for m in devices]
        np.testing.assert_allclose(
            parts, devices, rtol=0.02 if what != "temporaries" else 0.15, err_msg=what
        )


def test_each_device_has_its_part_of_the_work_and_memory(fast):
    each_has_its_part(fast["programs"], 8)


@pytest.mark.slow
def test_each_of_fewer_devices_has_its_part(slow):
    each_has_its_part(slow["more_programs"], 2, 4)
    assert all(found["collectives"] == {} for found in slow["more_programs"].values())


@pytest.mark.slow
def test_copies_changes_and_files(slow):
    agree(slow["life"], ("losses", "average", "params", "logits"))
    for found in slow["life"].values():
        assert found["exact"] and found["again"] and found["n"] == 4
        assert (
            found["sources"] == slow["life"]["one"]["sources"]
            and found["kept"] == slow["life"]["one"]["kept"]
        )


@pytest.mark.slow
def test_a_nan_in_one_member_reaches_no_other(slow):
    assert slow["isolation"] == {"equal": True, "nan": True}


def test_members_are_built_one_by_one(fast):
    """While the next two members are made, memory grows by at most the two before and a device's
    part of the whole.
    """
    found = fast["built_where_it_stays"]
    assert found["calls"] == 16 and max(found["growth"]) < 5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("members", "multiple of the 4 devices"),
        ("drop", "multiple of the 4"),
        ("batch", "multiple of 2 rows"),
        ("batch_size", "a multiple of 2"),
    ],
)
def test_refused(fast, name, words):
    assert words in fast["refused"][name]
