"""What earlier releases wrote is read: checkpoints, exported programs, ensembles, and training that
goes on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from agreement import same
from old_files import FOLDER, data, member, trainer, tree

import bridge
from bridge import checkpoints
from torchfunc_jax.ensemble import Checkpoints, Ensemble

VERSIONS = sorted(path.name for path in FOLDER.iterdir())


def test_this_version_has_files() -> None:
    assert bridge.__version__ in VERSIONS, "python tests/lib/old_files.py writes them"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "package"), [("tree.safetensors", "safetensors"), ("tree.orbax", "orbax.checkpoint")]
)
def test_a_checkpoint(version: str, name: str, package: str) -> None:
    pytest.importorskip(package)
    kind = "orbax" if name.endswith("orbax") else None
    path, expected = FOLDER / version / name, tree()
    found, structure = jax.tree.flatten(checkpoints.load(path, expected, format=kind))
    wanted, spec = jax.tree.flatten(expected)
    assert structure == spec
    for x, y in zip(found, wanted, strict=True):
        assert type(x) is type(y) and getattr(x, "dtype", None) == getattr(y, "dtype", None)
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else np.array_equal(x, y)
    by_name = checkpoints.load(path, format=kind)
    assert (
        np.array_equal(by_name["torch"], expected["torch"])
        and by_name["names.1"] is None
        and by_name["step"] == expected["step"]
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_an_exported_program(version: str) -> None:
    folder = FOLDER / version / "exported"
    pytest.importorskip("flatbuffers")
    program = jax.export.deserialize(bytearray((folder / "program.stablehlo").read_bytes()))
    with np.load(folder / "weights.npz") as weights:
        for batch in (1, 7):
            x = torch.arange(3.0 * batch).reshape(batch, 3) / 8
            same(
                torch.from_numpy(np.array(program.call(dict(weights), x.numpy()))),
                member()(x),
                rtol=1e-5,
                atol=1e-6,
                graph=False,
            )


@pytest.mark.parametrize("version", VERSIONS)
def test_an_ensemble(version: str) -> None:
    found = Ensemble.load(FOLDER / version / "members.pt", member)
    assert len(found) == 2
    for name, p in member().named_parameters():
        for row in found.params[name]:
            same(torch.from_numpy(np.array(row)), p.detach())


@pytest.mark.parametrize("version", VERSIONS)
def test_training_goes_on(version: str, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    shutil.copytree(FOLDER / version / "training", tmp_path / "training")
    whole, resumed = trainer(), trainer()
    whole.fit(data(), epochs=3, batch_size=4)
    with Checkpoints(tmp_path / "training", every=100) as kept:
        assert kept.steps == [4]
        resumed.fit(data(), epochs=3, batch_size=4, checkpoint=kept)
    assert resumed.position == whole.position == 6
    for name, expected in whole.ensemble.params.items():
        np.testing.assert_allclose(
            np.array(resumed.ensemble.params[name]), np.array(expected), rtol=1e-4, atol=1e-6
        )
