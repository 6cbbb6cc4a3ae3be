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
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from torch import nn

from torchfunc_jax.ensemble import Checkpoints, Ensemble, Preempted, Trainer, initialize
from torchfunc_jax.ensemble.meshes import gathered

MEMBERS, BATCH = 12, 8


def trainer_of(data: int = 1, devices: Any = None, members: int = MEMBERS) -> Trainer:
    """A trainer over all devices, of which ``data`` share each batch; devices: 1: one device without a mesh."""
    devices = jax.devices() if devices is None else devices
    mesh = None if devices == 1 else Mesh(np.array(devices).reshape(-1, data), ("member", "data"))
    ensemble = Ensemble(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), members, seed=3, mesh=mesh)
    return Trainer(ensemble, nn.functional.mse_loss, lr=np.linspace(0.01, 0.05, members).astype(np.float32))


def batch(position: int, data: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch at a position; with a data axis over processes, the rows of this process's device."""
    draw = torch.Generator().manual_seed(position)
    x = torch.randn(BATCH, 4, generator=draw).chunk(data)[jax.process_index() % data]
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


def start(me: int, count: int, port: int, timeout: float, answers: Any) -> None:
    """What a process hears that waits for the others."""
    begin = time.monotonic()
    try:
        initialize(f"127.0.0.1:{port}", count, me, timeout=timeout)
    except RuntimeError as error:
        answers.put((str(error), time.monotonic() - begin))


def failing(who: int) -> None:
    if jax.process_index() == who:
        raise ValueError("no such number")
    waiting()


def stopping(who: int) -> None:
    if jax.process_index() == who:
        os.kill(os.getpid(), signal.SIGSTOP)
    waiting()


def waiting() -> None:
    """Wait for all others in a collective, by which a process that does not come is never noticed."""
    multihost_utils.sync_global_devices("waiting")
