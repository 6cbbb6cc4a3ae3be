"""Ensembles on 8 simulated devices are those on one device; all jobs of ensemble_mesh_jobs.py run in one process."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
FAST = ["training", "programs", "life", "isolation", "refused", "built_where_it_stays"]
SLOW = ["training_on_more", "in_parts", "unchecked", "within_the_users_mesh", "dropout"]


def run(jobs: list[str]) -> dict[str, Any]:
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "ensemble_mesh_jobs.py", *jobs]
    done = subprocess.run(command, cwd=HERE, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=1200)
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
            flat = [np.concatenate([np.ravel(y) for y in x]) if name != "logits" else np.ravel(x) for x in (one[name], other[name])]
            np.testing.assert_allclose(flat[1], flat[0], rtol=2e-5, atol=2e-6, err_msg=f"{where}, {name}")


TRAINED = ("losses", "state", "logits", "member")


def test_training_is_that_of_one_device(fast):
    """Every array of the state lies as promised, too: the job asserts it."""
    agree(fast["training"], TRAINED)
    assert fast["training"]["4x2"]["checked"] and fast["training"]["8x1 Auto"]["checked"]


@pytest.mark.slow
def test_training_on_other_meshes(slow):
    agree(slow["training_on_more"], TRAINED)


@pytest.mark.slow
def test_parts_of_batches_and_of_members(slow):
    """BatchNorm sees other parts of the batch on more devices, so that only the first losses are equal."""
    one, other = (slow["in_parts"][name]["losses"][0] for name in ("one", "4x2"))
    np.testing.assert_allclose(np.shape(one), np.shape(other))


@pytest.mark.slow
def test_operators_that_shard_map_cannot_check(slow):
    agree(slow["unchecked"], TRAINED)
    assert not slow["unchecked"]["4x2"]["checked"]


@pytest.mark.slow
def test_inside_of_the_users_set_mesh(slow):
    agree({**slow["within_the_users_mesh"], "two": slow["training_on_more"]["one"]}, TRAINED, "two")


@pytest.mark.slow
def test_each_part_of_a_batch_has_random_numbers_of_its_own(slow):
    assert len({x for row in slow["dropout"]["losses"] for x in row}) == 16


def test_no_member_leaves_its_device(fast):
    """A step of 512 CNNs: no collective over members, and one reduction of gradients over "data"."""
    found = fast["programs"]
    assert [found[k]["collectives"] for k in ("1x1", "2x1", "4x1", "8x1")] == [{}] * 4
    assert set(found["4x2"]["collectives"]) == {"all-reduce"}


@pytest.mark.parametrize("what", ["arguments", "aliased", "held", "flops", "temporaries"])
def test_each_device_has_its_part_of_the_work_and_memory(fast, what):
    found = fast["programs"]
    values = [found[f"{m}x1"][what] for m in (1, 2, 4, 8)]
    parts = [values[0] / v for v in values]
    np.testing.assert_allclose(parts, [1, 2, 4, 8], rtol=0.02 if what != "temporaries" else 0.15)


def test_copies_changes_and_files(fast):
    agree(fast["life"], ("losses", "average", "params", "logits"))
    for found in fast["life"].values():
        assert found["exact"] and found["again"] and found["n"] == 4
        assert found["sources"] == fast["life"]["one"]["sources"] and found["kept"] == fast["life"]["one"]["kept"]


def test_a_nan_in_one_member_reaches_no_other(fast):
    assert fast["isolation"] == {"equal": True, "nan": True}


def test_members_are_built_one_by_one(fast):
    """While the next two members are made, memory grows by at most the two before and a device's part of the whole."""
    found = fast["built_where_it_stays"]
    assert found["calls"] == 16 and max(found["growth"]) < 5


@pytest.mark.parametrize(
    ("name", "words"), [("members", "multiple of the 4 devices"), ("drop", "multiple of the 4"), ("batch", "multiple of 2 rows"),
                        ("batch_size", "a multiple of 2")],
)
def test_refused(fast, name, words):
    assert words in fast["refused"][name]
