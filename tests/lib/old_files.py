"""Files as a release writes them, kept in tests/lib/old_files/<version> for the versions after it
to read (test_files_of_releases.py).

    python tests/lib/old_files.py      writes those of this version; they are committed with the
                                       release, and never written again
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import bridge
import torchfunc_jax
from bridge import checkpoints
from torchfunc_jax.ensemble import Checkpoints, Ensemble, Trainer

FOLDER = Path(__file__).resolve().parent / "old_files"


def filled(module: nn.Module) -> nn.Module:
    """The module with parameters by a formula, the same in each version of PyTorch."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.arange(p.numel()).reshape(p.shape) / 8 - i)
    return module


def member() -> nn.Module:
    """A member of the ensembles."""
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def tree() -> dict[str, Any]:
    """A tree with leaves of every kind that a checkpoint takes."""
    return {
        "torch": torch.arange(6.0).reshape(2, 3),
        "half": torch.arange(4, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "jax": jnp.arange(4.0),
        "numpy": [np.arange(3, dtype=np.int16), np.float64(0.1)],
        "step": 10**30,
        "rate": 0.1,
        "complex": 1 + 2j,
        "names": ("adam", None),
        "flag": True,
    }


def trainer() -> Trainer:
    """A trainer whose checkpoint after four steps is kept."""
    return Trainer(Ensemble(member, n=2), nn.functional.mse_loss, "adam", lr=[0.01, 0.02], seed=5)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """What it is trained on: 8 samples."""
    x = torch.arange(24.0).reshape(8, 3) / 8
    return x, x[:, :2].sin()


def write(folder: Path) -> None:
    """Write the files of this version into an empty folder."""
    # JAX writes no paths of this machine into the program
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    checkpoints.save(folder / "tree.safetensors", tree())
    checkpoints.save(folder / "tree.orbax", tree(), format="orbax")
    torchfunc_jax.export(member(), torch.ones(4, 3), batch="b").save(folder / "exported")
    Ensemble(member, n=2).save(folder / "members.pt")
    with Checkpoints(folder / "training", every=4, keep=1) as kept:
        trainer().fit(data(), epochs=2, batch_size=4, checkpoint=kept)


if __name__ == "__main__":
    target = FOLDER / bridge.__version__
    if target.exists():
        sys.exit(f"{target} exists: the files of a release stay as they are")
    with tempfile.TemporaryDirectory() as folder:  # Orbax writes the folder's path into its files
        write(Path(folder))
        shutil.copytree(folder, target)
