"""Torch code on meshes of eight simulated devices, which one process of its own has (mesh_jobs.py);
sharding by patterns of names; weights from files in several processes, whose memory is measured.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mesh_jobs
import numpy as np
import pytest
import torch
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P

import bridge
from bridge import checkpoints

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import sharded_loading

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def ran(which: str) -> dict[str, Any]:
    """What mesh_jobs.py prints."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, mesh_jobs.__file__, which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def wrong(results: dict[str, Any]) -> dict[str, Any]:
    return {
        title: found
        for title, found in results.items()
        if not isinstance(found, float) or not found < 1e-6
    }


@pytest.mark.parametrize("case", mesh_jobs.BLOCKS, ids=mesh_jobs.title)
def test_a_block_by_data_and_by_tensors_is_that_of_one_device(case: Any) -> None:
    found = ran("fast")[mesh_jobs.title(case)]
    assert isinstance(found, dict), found
    assert (
        found["difference"] < 1e-6
        and found["gathers"] == 0
        and found["sharded"]
        and found["output"]
    ), found
    assert found["sums"] > 0 and found["shape"] == [8, 5, 32]


def test_ways_to_differentiate_and_to_decode_agree_with_one_device() -> None:
    results = {
        title: found
        for title, found in ran("fast").items()
        if not title.startswith("block, ") and title != "files"
    }
    assert len(results) == 2 * len(mesh_jobs.FAST) + 8 and not wrong(results)


@pytest.mark.slow
def test_every_way_agrees_with_one_device() -> None:
    results = ran("all")
    assert len(results) > 300 and not wrong(results)


def test_files_onto_meshes() -> None:
    found = ran("fast")["files"]
    assert (
        found == [{"names": True, "sharded": True, "equal": True, "rows of a device": [4, 16]}] * 2
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="Linux alone says how much memory a process had at most",
)
def test_no_process_holds_the_whole() -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        sharded_loading.main(["--megabytes", "300", "--json"])
    for row in json.loads(said.getvalue()):
        assert (
            row["right"]
            and row["whole"] > 250
            and row["parts"] < 0.51 * row["whole"]
            and row["device"] < 0.13 * row["whole"]
        ), row
        assert (
            row["grown"] < row["parts"] + 60 < row["whole"]
            if row["way"] == "shards"
            else row["grown"] > row["whole"]
        ), row


# -- patterns of names -----------------------------------------------------------------------------
MESH = AbstractMesh((2, 4), ("data", "model"))
SHAPES = {
    "layers.0.q.weight": (8, 4),
    "layers.0.q.bias": (8,),
    "layers.1.q.weight": (8, 4),
    "head.weight": (6, 8),
    "scale": (),
}


def abstract(shapes: dict[str, Any]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("rules", "split"),
    [
        (None, {}),
        (
            {"*.weight": P(None, "model")},
            {n: (None, "model") for n in SHAPES if n.endswith("weight")},
        ),
        ({"layers.?.q.*": P("model")}, {n: ("model",) for n in SHAPES if n.startswith("layers")}),
        (
            {"layers.[1].*": P(("data", "model")), "*.q.*": P("model")},
            {
                "layers.1.q.weight": (("data", "model"),),
                "layers.0.q.weight": ("model",),
                "layers.0.q.bias": ("model",),
            },
        ),
        ({"head.weight": P("data"), "*": P()}, {"head.weight": ("data",)}),
    ],
)
def test_the_first_pattern_that_fits_decides(rules: Any, split: dict[str, Any]) -> None:
    found = bridge.shardings(abstract(SHAPES), MESH, rules)
    assert list(found) == list(SHAPES) and all(s.mesh == MESH for s in found.values())
    assert {name: tuple(s.spec) for name, s in found.items()} == {
        name: split.get(name, ()) for name in SHAPES
    }


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"*.k.weight": P("model")},
            r"rules: '\*\.k\.weight' fits no parameter; there are 'head\.weight', .*'scale'",
        ),
        (
            {"*.weight": P("model"), "head*": P()},
            r"'head\*' decides nothing, .*'head\.weight' by '\*\.weight'; put it before",
        ),
        (
            {"head.weight": P("model")},
            (
                r"'head.weight' for 'head.weight': 'model' of size 4 does not "
                r"divide dimension 0 of size 6"
            ),
        ),
        (
            {"*.1.q.weight": P(None, ("data", "model"))},
            r"'layers.1.q.weight': \('data', 'model'\) of size 8 does not divide dimension 1",
        ),
        (
            {"*bias": P("tensor")},
            (
                r"'\*bias' for 'layers.0.q.bias': expected different axes of the mesh, got "
                r"'tensor': .*'data': 2"
            ),
        ),
        (
            {"*0.q.weight": P("model", "model")},
            "'layers.0.q.weight': expected different axes of the mesh, got 'model'",
        ),
        (
            {"*bias": P(None, "model")},
            "'layers.0.q.bias': the PartitionSpec has more dimensions than the parameter",
        ),
        ({"scale": P("model")}, "'scale': the PartitionSpec has more dimensions"),
        (
            {"*bias": P(PartitionSpec.UNCONSTRAINED)},
            "'layers.0.q.bias': expected axes of the mesh or None, got",
        ),
    ],
)
def test_wrong_rules(rules: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bridge.shardings(abstract(SHAPES), MESH, rules)


def one_device(*names: str) -> Mesh:
    return jax.make_mesh((1,) * len(names), names)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: bridge.shardings({"a": 1}, MESH),
            TypeError,
            "params: 'a': expected an array or an abstract value, got <class 'int'>",
        ),
        (
            lambda: bridge.shardings(abstract(SHAPES), MESH, {"*": "model"}),
            TypeError,
            r"'\*': expected a jax.sharding.PartitionSpec, got",
        ),
        (
            lambda: bridge.shardings(abstract(SHAPES), "model"),
            TypeError,
            "mesh: expected a jax.sharding.Mesh.*, got <class 'str'>",
        ),
        (
            lambda: bridge.shardings({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, MESH),
            ValueError,
            "2 leaves, but only 1 different names",
        ),
        (
            lambda: bridge.shard(abstract(SHAPES), one_device("model")),
            TypeError,
            "params: expected jax.Arrays or numpy arrays, got",
        ),
        (
            lambda: bridge.shard({"a": np.ones(1)}, MESH),
            TypeError,
            "mesh: expected a jax.sharding.Mesh",
        ),
        (
            lambda: bridge.load_sharded("nowhere", MESH),
            TypeError,
            "mesh: expected a jax.sharding.Mesh",
        ),
        (
            lambda: bridge.load_sharded("nowhere", one_device("model")),
            FileNotFoundError,
            "path: there is nothing at 'nowhere'",
        ),
    ],
)
def test_wrong_arguments(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_trees_keep_their_structure_order_and_values() -> None:
    tree = {
        "b": [np.arange(4.0, dtype=np.float32), jnp.ones((2, 2))],
        "a": (np.ones(3, np.int32), None),
    }
    placed = bridge.shard(tree, one_device("model"), {"b.0": P("model"), "b.1": P(None, "model")})
    assert list(placed) == ["b", "a"] and jax.tree.structure(placed) == jax.tree.structure(tree)
    assert [tuple(x.sharding.spec) for x in placed["b"]] == [("model",), (None, "model")]
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(tree), strict=True):
        assert isinstance(a, jax.Array) and a.dtype == b.dtype and np.array_equal(a, b)


# -- files -----------------------------------------------------------------------------------------
STATE = {
    "a": torch.randn(4, 2),
    "b": torch.randn(3).double(),
    "c": torch.arange(5),
    "d": torch.randn(2, 2).bfloat16(),
    "e": torch.tensor(2.0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files with an index."""
    index = {}
    for file, names in (("one.safetensors", "abc"), ("two.safetensors", "de")):
        checkpoints.save(tmp_path / file, {name: STATE[name] for name in names})
        index.update(dict.fromkeys(names, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


@pytest.mark.parametrize(
    ("dtype", "x64"), [(None, False), (None, True), (jnp.bfloat16, False), ("float64", True)]
)
def test_values_and_dtypes_of_files(folder: Path, dtype: Any, x64: bool) -> None:
    with jax.enable_x64(x64):
        found = bridge.load_sharded(folder, one_device("model"), {"a": P("model")}, dtype=dtype)
        for name, t in STATE.items():
            wanted = (
                torch.float64
                if dtype == "float64"
                else torch.bfloat16
                if dtype
                else t.dtype
                if x64
                else NARROW.get(t.dtype, t.dtype)
            )
            wanted = wanted if t.is_floating_point() else torch.int64 if x64 else torch.int32
            assert str(found[name].dtype) == str(wanted).removeprefix("torch."), name
            assert torch.equal(bridge.to_torch(found[name]), t.to(wanted)), name


NARROW = {torch.float64: torch.float32}


@pytest.mark.parametrize("where", ["file", "folder of one", "folder of several", "index"])
def test_where_files_are(tmp_path: Path, folder: Path, where: str) -> None:
    if where != "index":
        (folder / "model.safetensors.index.json").unlink()
    if where in ("file", "folder of one"):
        (tmp_path / "new").mkdir()
        checkpoints.save(tmp_path / "new" / "weights.safetensors", STATE)
        folder = tmp_path / "new" / ("weights.safetensors" if where == "file" else "")
    assert sorted(bridge.load_sharded(folder, one_device("model"))) == sorted(STATE)


def broken(folder: Path, name: str) -> None:
    """Break one thing in the folder."""
    index = folder / "model.safetensors.index.json"
    match name:
        case "file":
            (folder / "two.safetensors").unlink()
        case "damaged":
            (folder / "two.safetensors").write_bytes(b"nonsense")
        case "index":
            index.write_text("[]")
        case "stale":
            index.write_text(
                json.dumps(
                    {
                        "weight_map": {
                            **json.loads(index.read_text())["weight_map"],
                            "z": "one.safetensors",
                        }
                    }
                )
            )
        case "twice":
            index.unlink()
            checkpoints.save(folder / "three.safetensors", {"a": STATE["a"] + 1})
        case "empty":
            for file in folder.iterdir():
                file.unlink()


LIKE = {
    name: jax.ShapeDtypeStruct(t.shape, np.float32 if t.is_floating_point() else np.int32)
    for name, t in STATE.items()
}


@pytest.mark.parametrize(
    ("breaks", "options", "error", "message"),
    [
        ("file", {}, FileNotFoundError, r"index.json names '.*two.safetensors', which is missing"),
        ("damaged", {}, checkpoints.CheckpointError, r"two.safetensors: .*"),
        ("index", {}, checkpoints.CheckpointError, "expected an object with a weight_map"),
        ("stale", {}, checkpoints.CheckpointError, "'z' missing in the files"),
        (
            "twice",
            {},
            checkpoints.CheckpointError,
            "'a' is in one.safetensors and in three.safetensors",
        ),
        ("empty", {}, checkpoints.CheckpointError, "expected one index .*, got 0 indices"),
        (
            "",
            {"like": {**LIKE, "more": LIKE["a"]}},
            checkpoints.CheckpointError,
            "'more' missing in the files, nothing unexpected",
        ),
        (
            "",
            {"like": {"a": LIKE["a"]}},
            checkpoints.CheckpointError,
            "nothing missing in the files, 'b', 'c', 'd', 'e' unexpected",
        ),
        (
            "",
            {"like": {**LIKE, "a": LIKE["d"]}},
            checkpoints.CheckpointError,
            r"'a' has shape \(4, 2\), expected \(2, 2\)",
        ),
        (
            "",
            {"like": {**LIKE, "a": jax.ShapeDtypeStruct((4, 2), np.int32)}},
            checkpoints.CheckpointError,
            "safetensors: 'a'",
        ),
        (
            "",
            {"rules": {"z*": P("model")}},
            ValueError,
            r"rules: 'z\*' fits no parameter; there are 'a', 'b', 'c', 'd', 'e'",
        ),
    ],
)
def test_wrong_files(
    folder: Path, breaks: str, options: dict[str, Any], error: Any, message: str
) -> None:
    broken(folder, breaks)
    with pytest.raises(error, match=message):
        bridge.load_sharded(folder, one_device("model"), **options)


def test_what_is_expected(folder: Path) -> None:
    mesh = one_device("model")
    some = bridge.load_sharded(folder, mesh, like={"a": LIKE["a"], "more": LIKE["b"]}, strict=False)
    assert list(some) == ["a"]
    tied = torch.nn.ModuleDict(
        {"first": torch.nn.Linear(2, 2, bias=False), "second": torch.nn.Linear(2, 2, bias=False)}
    )
    tied["second"].weight = tied["first"].weight
    checkpoints.save(folder / "tied.safetensors", {"second.weight": tied["second"].weight.detach()})
    read = bridge.load_sharded(folder / "tied.safetensors", mesh, like=tied)
    assert torch.equal(bridge.to_torch(read["second.weight"]), tied["first"].weight)
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 4, dtype=torch.float16)
    checkpoints.save(folder / "linear.safetensors", {"weight": STATE["a"], "bias": torch.zeros(4)})
    assert (
        bridge.load_sharded(folder / "linear.safetensors", mesh, like=empty)["weight"].dtype
        == jnp.float16
    )
