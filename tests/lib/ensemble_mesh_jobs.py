"""What tests/ensembles/test_eight_devices.py runs on 8 simulated devices:
``python ensemble_mesh_jobs.py JOB...`` prints a line of JSON.

Each job is a function of this file, which returns what the test compares.
"""

from __future__ import annotations

import collections
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import AxisType
from torch import nn

import bridge
from torchfunc_jax.ensemble import Ensemble, Trainer, exploit, halve


class Net(nn.Module):
    """A CNN with BatchNorm."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm, self.second = (
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 6, 2, stride=2),
        )
        self.head, self.drop = nn.Linear(6 * 4, 3), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(F.relu(self.second(F.relu(self.norm(self.conv(x))))).flatten(1)))


@bridge.from_jax
def summed(x: jax.Array) -> jax.Array:
    """The sum over the first axis by a loop of the user's, at which shard_map's check of varying
    axes stops.
    """
    return jax.lax.fori_loop(
        0, x.shape[0], lambda i, total: total + x[i], jnp.zeros(x.shape[1:], x.dtype)
    )


class Unchecked(nn.Module):
    """Max pooling, an LSTM, and a function of JAX."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(summed(self.rnn(F.max_pool2d(x, 2)[:, 0])[0].transpose(0, 1)))


DRAW = torch.Generator().manual_seed(0)
IMAGES = torch.randn(16, 1, 6, 6, generator=DRAW) + torch.arange(16.0).view(-1, 1, 1, 1) / 8
LABELS = torch.randint(3, (16,), generator=DRAW)


def mesh(members: int, data: int, kind: str = "Explicit") -> Any:
    types = (getattr(AxisType, kind),) * 2
    return jax.make_mesh(
        (members, data),
        ("member", "data"),
        axis_types=types,
        devices=jax.devices()[: members * data],
    )


def values(tree: Any) -> list[Any]:
    return [np.asarray(x).astype(float).tolist() for x in jax.tree.leaves(tree)]


def trained(where: Any, make: Any = Net, **how: Any) -> dict[str, Any]:
    """Losses, parameters and buffers of 8 members after 3 steps and an epoch, and the shardings of
    all arrays of the state.
    """
    ens = Ensemble(make, 8, seed=1, mesh=where)
    trainer = Trainer(
        ens,
        F.cross_entropy,
        "sgd",
        lr=np.linspace(0.01, 0.1, 8),
        momentum=0.9,
        clip=2.0,
        seed=3,
        **how,
    )
    losses = [trainer.step(IMAGES, LABELS).tolist() for _ in range(3)]
    losses += trainer.fit((IMAGES, LABELS), batch_size=8, bootstrap=True).tolist()
    found = {
        "losses": losses,
        "state": values((ens.params, ens.buffers)),
        "logits": ens.logits(IMAGES).tolist(),
        "evaluated": trainer.losses(IMAGES, LABELS).tolist(),
        "member": values([p.detach().numpy() for p in ens[6].parameters()]),
        "checked": trainer._check_vma,
    }
    if where is not None:
        for path, x in jax.tree_util.tree_leaves_with_path(trainer.state):
            spec = jax.P() if path[0].name == "order" else jax.P("member")
            same = x.sharding.is_equivalent_to(jax.NamedSharding(where, spec), x.ndim)
            rows = {s.data.shape[0] for s in x.addressable_shards}
            assert same and (path[0].name == "order" or rows == {8 // where.shape["member"]}), (
                path,
                x.sharding,
            )
        assert all(s.mesh == where for s in jax.tree.leaves(trainer.state_shardings))
    return found


def training() -> Any:
    return {"one": trained(None), "4x2": trained(mesh(4, 2))}


def training_on_more() -> Any:
    alone = jax.make_mesh((4,), ("member",), devices=jax.devices()[:4])
    kinds = {
        "one": None,
        "4": alone,
        "1x8": mesh(1, 8),
        "2x4 Auto": mesh(2, 4, "Auto"),
        "8x1 Auto": mesh(8, 1, "Auto"),
    }
    return {name: trained(where) for name, where in kinds.items()}


def in_parts() -> Any:
    """Without BatchNorm, whose statistics are of a part of the batch, and the parts are others on
    several devices.
    """

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))

    how = {"accumulate": 2, "chunk": 1}
    return {
        "one": trained(None, make),
        "4x2": trained(mesh(4, 2), make, **how),
        "2x4": trained(mesh(2, 4), make, **how),
    }


def unchecked() -> Any:
    return {"one": trained(None, Unchecked), "4x2": trained(mesh(4, 2), Unchecked)}


def within_the_users_mesh() -> Any:
    where = mesh(4, 2)
    with jax.set_mesh(where), tempfile.TemporaryDirectory() as folder:
        Ensemble(Net, 8, mesh=where).save(Path(folder) / "ens.pt")
        loaded = Ensemble.load(Path(folder) / "ens.pt", Net, mesh=where)
        loaded.reseed(5, seed=1)
        assert torch.equal(loaded[5].head.weight, Ensemble(Net, 8, seed=1)[5].head.weight)
        return {"one": trained(where)}


def collectives(text: str) -> dict[str, int]:
    """How often each is in the text of a program."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return dict(collections.Counter(re.findall(rf" ({names})(?:-start)?\(", text)))


def programs() -> Any:
    return priced((1, 1), (8, 1), (4, 2))


def more_programs() -> Any:
    return priced((1, 1), (2, 1), (4, 1))


def priced(*shapes: tuple[int, int]) -> Any:
    """Of a step of 512 CNNs: collectives, and bytes and FLOPs of each device."""
    found = {}
    for m, d in shapes:
        trainer = Trainer(Ensemble(Net, 512, mesh=mesh(m, d)), F.cross_entropy)
        compiled = trainer.compiled_step(IMAGES, LABELS)
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        cost = cost[0] if isinstance(cost, list) else cost
        held = collections.Counter()
        for x in jax.tree.leaves(trainer.state):
            for shard in x.addressable_shards:
                held[shard.device.id] += shard.data.nbytes
        found[f"{m}x{d}"] = {
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "flops": cost["flops"],
            "aliased": memory.alias_size_in_bytes,
            "held": max(held.values()),
            "collectives": collectives(compiled.as_text()),
        }
    return found


def life() -> Any:
    """The same copies, halvings, changes and files on a mesh as on one device."""
    found = {}
    for name, where in (("one", None), ("4x2", mesh(4, 2)), ("4x2 Auto", mesh(4, 2, "Auto"))):
        ens = Ensemble(Net, 8, seed=1, mesh=where)
        trainer = Trainer(ens, F.cross_entropy, lr=np.linspace(0.001, 0.1, 8), ema=0.9)
        before = np.asarray(ens.params["conv.weight"])
        sources = exploit(trainer, [8, 1, 7, 2, 6, 3, 5, 4])
        exact = np.array_equal(np.asarray(ens.params["conv.weight"]), before[sources])
        losses = [trainer.step(IMAGES, LABELS).tolist()]
        kept = halve(trainer, trainer.losses(IMAGES, LABELS))
        trainer.reseed(1, seed=5)
        losses += [
            trainer.step(IMAGES, LABELS).tolist(),
            trainer.losses(IMAGES[:5], LABELS[:5]).tolist(),
        ]
        losses += trainer.fit(
            (IMAGES, LABELS), validation=(IMAGES[:7], LABELS[:7]), patience=1
        ).tolist()
        average = values(trainer.snapshot("average").params)
        ens.append(*list(ens)[:4])
        ens.reseed([1, 6], seed=9)
        ens.drop([0, 1, 2, 3])
        with tempfile.TemporaryDirectory() as folder:
            ens.save(Path(folder) / "ens.pt")
            again = Ensemble.load(
                Path(folder) / "ens.pt", Net, mesh=None if where is None else mesh(2, 1)
            )
        found[name] = {
            "sources": sources,
            "exact": exact,
            "losses": losses,
            "kept": kept,
            "average": average,
            "n": len(ens),
            "params": values(ens.params),
            "again": values(again.params) == values(ens.params),
            "logits": again.logits(IMAGES[:5]).tolist(),
        }
    return found


def isolation() -> Any:
    """Member 3 made NaN on a mesh: the bits of the others with and without."""
    bits = []
    for ill in (False, True):
        trainer = Trainer(Ensemble(Net, 8, seed=1, mesh=mesh(4, 2)), F.cross_entropy)
        if ill:
            with torch.no_grad():
                members = list(trainer.ensemble)
                members[3].conv.weight.fill_(float("nan"))
            trainer = Trainer(Ensemble.of(members, mesh=mesh(4, 2)), F.cross_entropy)
        for _ in range(3):
            trainer.step(IMAGES, LABELS)
        state = trainer.state.params, trainer.state.buffers
        bits.append(
            [np.delete(np.asarray(x), 3, 0).tobytes().hex() for x in jax.tree.leaves(state)]
        )
    nan = bool(np.isnan(np.asarray(trainer.ensemble.params["conv.weight"])[3]).all())
    return {"equal": bits[0] == bits[1], "nan": nan}


def dropout() -> Any:
    """The parts of a batch on several devices draw other numbers."""
    trainer = Trainer(
        Ensemble(lambda: Net(0.5), 8, mesh=mesh(4, 2)), F.cross_entropy, "sgd", lr=0.0
    )
    same = torch.ones(16, 1, 6, 6)
    return {"losses": [trainer.step(same, LABELS).tolist() for _ in range(2)]}


def built_where_it_stays() -> Any:
    """The most members that any device or the host held while 8 were built for 8 devices."""
    made: list[Any] = []

    def make() -> nn.Module:
        made.append(sum(x.nbytes for x in jax.live_arrays()))
        return nn.Linear(512, 512)

    Ensemble(make, 16, mesh=mesh(8, 1))
    one = 4 * (512 * 512 + 512)
    return {"calls": len(made), "growth": [(b - a) / one for a, b in zip(made[2:], made[4:])]}


def refused() -> Any:
    calls = {
        "members": lambda: Ensemble(Net, 6, mesh=mesh(4, 2)),
        "drop": lambda: Ensemble(Net, 8, mesh=mesh(4, 2)).drop(0),
        "batch": lambda: Trainer(Ensemble(Net, 8, mesh=mesh(4, 2)), F.cross_entropy).step(
            IMAGES[:3], LABELS[:3]
        ),
        "batch_size": lambda: Trainer(Ensemble(Net, 8, mesh=mesh(4, 2)), F.cross_entropy).fit(
            (IMAGES, LABELS), batch_size=3
        ),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    torch.set_num_threads(1)
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
