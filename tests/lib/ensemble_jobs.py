"""What the processes of the tests of ensembles run: a small training run, and what each process has
of it afterwards.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
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
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from torchfunc_jax.ensemble import Checkpoints, Ensemble, JsonLines, Preempted, Trainer, initialize
from torchfunc_jax.ensemble.meshes import gathered

MEMBERS, ROWS = 12, 64


def member(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def trainer_of(shared: int = 1, devices: Any = None, members: int = MEMBERS) -> Trainer:
    """A trainer over all devices, of which ``shared`` share each batch; devices: 1: one device
    without a mesh.
    """
    devices = jax.devices() if devices is None else devices
    mesh = None if devices == 1 else Mesh(np.array(devices).reshape(-1, shared), ("member", "data"))
    ensemble = Ensemble(member, members, seed=3, mesh=mesh)
    return Trainer(
        ensemble, nn.functional.mse_loss, lr=np.linspace(0.01, 0.05, members).astype(np.float32)
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same in each process."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
    return x, x.prod(1, keepdim=True)


def values(trainer: Trainer) -> dict[str, np.ndarray]:
    """All parameters and states, whole, in each process."""
    leaves = jax.tree_util.tree_flatten_with_path(trainer.state)[0]
    return {jax.tree_util.keystr(path): gathered(x) for path, x in leaves}


def train(
    folder: str | None = None,
    every: int = 5,
    pause: float = 0.0,
    data_devices: int = 1,
    devices: Any = None,
) -> dict[str, Any]:
    """Train for three epochs of eight steps, each member on a sample of its own; from the newest
    checkpoint, if there is a folder.

    The validation data have a number of rows that no two devices share.
    """
    begin = time.process_time()
    trainer = trainer_of(data_devices, devices)
    checkpoint = None if folder is None else Checkpoints(folder, every=every, keep=2)

    def reached(trainer: Trainer, _: Any) -> None:
        time.sleep(pause)
        if folder and jax.process_index() == 0:
            Path(folder, "reached.txt").write_text(str(trainer.position))

    held_out = tuple(x[:7] for x in data())
    losses = trainer.fit(
        data(),
        epochs=3,
        batch_size=8,
        bootstrap=True,
        validation=held_out,
        keep_best=True,
        checkpoint=checkpoint,
        on_step=reached,
    )
    if checkpoint is not None:
        checkpoint.close()
    first = trainer.position - len(losses)
    return {
        "first": first,
        "losses": losses.numpy(),
        "values": values(trainer),
        "cpu": time.process_time() - begin,
    }


def preempted(folder: str, at: int, who: int) -> dict[str, Any]:
    """A run in which one process gets SIGTERM."""

    def stop(trainer: Trainer, _: Any) -> None:
        if trainer.position == 1:
            waiting()  # so that no process is far ahead of the others
        if trainer.position == at and jax.process_index() == who:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)

    trainer = trainer_of()
    try:
        with Checkpoints(folder, every=0) as checkpoints:
            trainer.fit(
                data(),
                epochs=100,
                batch_size=8,
                bootstrap=True,
                checkpoint=checkpoints,
                on_step=stop,
            )
    except Preempted as error:
        return {"position": error.position, "code": error.code, "values": values(trainer)}
    return {"position": None}


def train_by_loader(
    folder: str | None, whole: bool, devices: Any = None, grain: bool = False
) -> dict[str, Any]:
    """Two epochs of a DataLoader, or of a dataset of Grain's without a length, with devices that
    share each batch; and the same run stopped after four steps and resumed, if there is a folder.
    """
    inputs, targets = (x[:24] for x in data())
    seen: list[int] = []

    class Rows(Dataset):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(i)
            return inputs[i], targets[i]

    def made() -> tuple[Trainer, Any]:
        trainer = trainer_of(shared=2, devices=devices)
        index, count = (0, 1) if whole else trainer.batch_part
        if grain:
            import grain as library

            rows = library.MapDataset.source(Rows()).map(lambda row: [x.numpy() for x in row])
            part = rows.seed(1).shuffle()[index::count].batch(8 // count)
            return trainer, part.to_iter_dataset(library.ReadOptions(1, 1))
        sampler = DistributedSampler(Rows(), num_replicas=count, rank=index, seed=1)
        return trainer, DataLoader(Rows(), batch_size=8 // count, sampler=sampler)

    trainer, loader = made()
    losses = trainer.fit(loader, epochs=2, whole_batches=whole)
    found = {
        "losses": losses.numpy(),
        "values": values(trainer),
        "part": trainer.batch_part,
        "seen": seen[: len(seen) // 2],  # of the first epoch
    }
    if folder is not None:
        for steps in (4, 6):
            with Checkpoints(folder, every=0) as checkpoints:
                again, loader = made()
                again.fit(loader, steps=steps, whole_batches=whole, checkpoint=checkpoints)
        resumed = values(again)
        found["differ"] = [k for k, x in found["values"].items() if (x != resumed[k]).any()]
    return found


def logged(folder: str) -> list[int]:
    """The steps that a sink of this process was told of; in the folder a log and a trace."""

    class Steps:
        def __init__(self) -> None:
            self.told: list[int] = []

        def log(self, step: int, metrics: Any) -> None:
            self.told.append(step)

        def close(self) -> None:
            pass

    sink = Steps()
    trainer_of().fit(
        data(),
        batch_size=8,
        sinks=[sink, JsonLines(f"{folder}/log.jsonl")],
        log_every=2,
        profile=(3, 4, f"{folder}/trace"),
    )
    return sink.told


def unlike_loaders() -> dict[str, str]:
    """What a process hears whose loader is not that of the other one."""
    me = jax.process_index()

    class Endless:
        def __iter__(self) -> Any:
            return iter([data()] * (me + 1))

    pairs = TensorDataset(*data())
    loaders = {
        "seeds": DataLoader(pairs, 16, shuffle=True, generator=torch.Generator().manual_seed(me)),
        "lengths": DataLoader(TensorDataset(*(x[: 48 + 16 * me] for x in data())), 16),
        "ends": Endless(),
    }
    found = {}
    for name, loader in loaders.items():
        try:
            trainer_of(shared=2).fit(loader)
        except ValueError as error:
            found[name] = str(error)
    return found


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
    waiting()  # until all watch each other
    if jax.process_index() == who:
        os.kill(os.getpid(), signal.SIGSTOP)
    waiting()


def waiting() -> None:
    """Wait for all others in a collective, by which a process that does not
    come is never noticed.
    """
    multihost_utils.sync_global_devices("waiting")


def layouts(folder: str) -> dict[str, Any]:
    """Half of a run on a mesh of 8 devices, the other half on others: the final values by the
    second mesh.
    """

    def run(member: int, shared: int, until: int) -> Trainer:
        trainer = trainer_of(shared, jax.devices()[: member * shared], members=8)
        with Checkpoints(copy, every=4, keep=1) as checkpoints:
            trainer.fit(
                data(), epochs=until // 8, batch_size=8, bootstrap=True, checkpoint=checkpoints
            )
        return trainer

    found = {}
    copy = f"{folder}/whole"
    found["whole"] = values(run(4, 2, 24))
    copy = f"{folder}/first"
    run(4, 2, 16)
    for member, shared in ((4, 2), (8, 1), (1, 1)):
        copy = f"{folder}/{member}x{shared}"
        shutil.copytree(f"{folder}/first", copy)
        trainer = run(member, shared, 24)
        assert len(trainer.state.params["0.weight"].sharding.device_set) == member * shared
        found[f"{member}x{shared}"] = values(trainer)
    return found


def killed_while_writing(folder: str) -> None:
    """A whole checkpoint, and another one whose writing has begun when the process ends."""
    ensemble = Ensemble(lambda: nn.Linear(1000, 1000), 8)
    trainer = Trainer(ensemble, nn.functional.mse_loss, "sgd")
    checkpoints = Checkpoints(folder)
    for trainer.position in (1, 2):
        trainer.state = dataclasses.replace(
            trainer.state,
            params=jax.tree.map(lambda x: x * 0 + trainer.position, trainer.state.params),
        )
        checkpoints.save(trainer, wait=trainer.position == 1)
    os.kill(os.getpid(), signal.SIGKILL)


# -- dry runs --------------------------------------------------------------------------------------
def _priced(make: Any, loss: Any, **options: Any) -> Any:
    return lambda n, mesh: Trainer(Ensemble(make, n, mesh=mesh), loss, **options)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)
    )


#: what is priced: (a function that makes a trainer, a batch, whether it is each member's own)
PRICED = {
    "mlp": (
        _priced(lambda: member(64), nn.functional.mse_loss),
        (torch.zeros(16, 256, 4), torch.zeros(16, 256, 1)),
        True,
    ),
    "cnn": (
        _priced(cnn, nn.functional.cross_entropy),
        (torch.zeros(256, 1, 8, 8), torch.zeros(256, dtype=torch.long)),
        False,
    ),
}


def compiled(shape: tuple[int, int]) -> dict[str, Any]:
    """What XLA says of the step's program for a real mesh."""
    found = {}
    for kind, (make, batch, own) in PRICED.items():
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("member", "data"))
        program = make(16, mesh).compiled_step(*batch, own=own)
        plan, text = program.memory_analysis(), program.as_text()
        results = re.findall(r"= (.*) all-reduce\(", text)
        shapes = [dims for line in results for dims in re.findall(r"[fs]32\[([\d,]*)\]", line)]
        found[kind] = {
            "arguments": plan.argument_size_in_bytes,
            "flops": program.cost_analysis()["flops"],
            "memory": plan.argument_size_in_bytes
            + plan.output_size_in_bytes
            - plan.alias_size_in_bytes
            + plan.temp_size_in_bytes,
            "reduced": sum(4 * math.prod(int(n) for n in dims.split(",") if n) for dims in shapes),
            "gathered": text.count("all-gather("),
        }
    return found
