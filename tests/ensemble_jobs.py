"""What the processes of the tests of ensembles run: a small training run, and what each process has of it afterwards."""
from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh
from torch import nn

from torchfunc_jax.ensemble import Checkpoints, Ensemble, Preempted, Trainer
from torchfunc_jax.ensemble.meshes import gathered

MEMBERS, BATCH = 12, 8


def trainer_of(data: int = 1, devices: Any = None, members: int = MEMBERS) -> Trainer:
    """A trainer over all devices, of which ``data`` share each batch; devices: 1: one device without a mesh."""
    devices = jax.devices() if devices is None else devices
    mesh = None if devices == 1 else Mesh(np.array(devices).reshape(-1, data), ("member", "data"))
    ensemble = Ensemble(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), members, seed=3, mesh=mesh)
    return Trainer(ensemble, nn.functional.mse_loss, lr=np.linspace(0.01, 0.05, members).astype(np.float32))


def batch(position: int, data: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch at a position; with a data axis over processes, the rows of this process."""
    draw = torch.Generator().manual_seed(position)
    x = torch.randn(BATCH, 4, generator=draw)
    return x, x.prod(1, keepdim=True)


def values(trainer: Trainer) -> dict[str, np.ndarray]:
    """All parameters and states, whole, in each process."""
    leaves = jax.tree_util.tree_flatten_with_path(trainer.state)[0]
    return {jax.tree_util.keystr(path): gathered(x) for path, x in leaves}


def train(steps: int, folder: str | None = None, every: int = 5, pause: float = 0.0, data: int = 1, devices: Any = None) -> dict[str, Any]:
    """Train to a position, from the newest checkpoint if there is a folder."""
    trainer = trainer_of(data, devices)
    losses: dict[int, list[float]] = {}

    def step() -> None:
        losses[trainer.position] = trainer.step(*batch(trainer.position, data)).tolist()
        trainer.position += 1
        time.sleep(pause)

    if folder is None:
        while trainer.position < steps:
            step()
    else:
        with Checkpoints(folder, every=every, keep=2) as checkpoints, checkpoints.training(trainer) as stepped:
            while trainer.position < steps:
                step()
                if jax.process_index() == 0:
                    Path(folder, "reached.txt").write_text(str(trainer.position))
                stepped()
    return {"first": min(losses, default=steps), "losses": losses, "values": values(trainer)}


def preempted(steps: int, folder: str, at: int, who: int) -> dict[str, Any]:
    """A run in which one process gets SIGTERM."""
    def stop(position: int) -> None:
        if position == at and jax.process_index() == who:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = trainer_of()
    try:
        with Checkpoints(folder, every=0) as checkpoints, checkpoints.training(trainer) as stepped:
            while trainer.position < steps:
                trainer.step(*batch(trainer.position))
                trainer.position += 1
                stop(trainer.position)
                time.sleep(0.05)
                stepped()
    except Preempted as error:
        return {"position": error.position, "code": error.code, "values": values(trainer)}
    return {"position": None}
