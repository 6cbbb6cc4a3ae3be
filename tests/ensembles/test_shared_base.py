"""Ensembles over one frozen base: it is one array, each member is what torch trains, and a
checkpoint does not repeat it.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bridge.checkpoints import CheckpointError
from torchfunc_jax.ensemble import Checkpoints, Ensemble, Trainer, dry_run

FEATURES, WIDTH, CLASSES = 8, 32, 3


class LoRA(nn.Module):
    """A frozen linear layer and what it adds: a product of two small matrices."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def base(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def adapters(frozen: nn.Sequential) -> Callable[[], nn.Module]:
    """A function that makes a member by hand."""

    def make() -> nn.Module:
        model = copy.deepcopy(frozen).requires_grad_(False)
        model[0], model[2] = LoRA(model[0]), LoRA(model[2])
        return model

    return make


def peft_adapters(frozen: nn.Sequential) -> Callable[[], nn.Module]:
    """The same by pip's peft."""
    from peft import LoraConfig, get_peft_model

    def make() -> nn.Module:
        model = get_peft_model(
            copy.deepcopy(frozen), LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.0)
        )
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
        return model

    return make


def batches(n: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, rows, FEATURES), torch.randint(0, CLASSES, (n, rows))


def size(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("make", [adapters, peft_adapters])
def test_32_adapters_are_32_runs_of_torch(make):
    if make is peft_adapters and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    n, rates = 32, np.geomspace(1e-4, 1e-2, 32)
    ens = Ensemble(make(base()), n, shared=True)
    assert (
        len(ens.params) == 4
        and len(ens.shared) == 6
        and all(x.shape[0] == n for x in ens.params.values())
    )
    trainer, members = Trainer(ens, cross_entropy, "adam", lr=rates), list(ens)
    optimizers = [
        torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=lr)
        for m, lr in zip(members, rates, strict=True)
    ]
    inputs, labels = batches(n)
    before = dict(ens.shared)
    for _ in range(20):
        losses = trainer.step(inputs, labels, own=True)
        for i, (member, optimizer) in enumerate(zip(members, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = cross_entropy(member(inputs[i]), labels[i])
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-4, atol=1e-5)
    for i, member in enumerate(members):
        torch.testing.assert_close(ens.state_dict(i), member.state_dict(), rtol=1e-3, atol=1e-4)
    assert all(
        ens.shared[name] is before[name] and not x.is_deleted() for name, x in before.items()
    )
    torch.testing.assert_close(
        ens.logits(inputs[0])[5], members[5].eval()(inputs[0]).detach(), rtol=1e-3, atol=1e-3
    )


def test_the_compiled_step_holds_the_base_once():
    def planned(width: int, n: int, shared: bool) -> tuple[int, int]:
        ens = Ensemble(adapters(base(width)), n, shared=shared)
        trainer = Trainer(ens, cross_entropy)
        found = trainer.compiled_step(*batches(n), own=True).memory_analysis()
        return found.argument_size_in_bytes + found.temp_size_in_bytes, size(ens.shared)

    n, width = 16, 256
    together, bytes_of_base = planned(width, n, True)
    apart, _ = planned(width, n, False)
    alone, _ = planned(width, 1, True)
    assert bytes_of_base > 4 * width**2
    assert apart - together > 0.9 * (n - 1) * bytes_of_base
    # n members take the base, and n times what one of them takes beside it: adapters, moments and
    # activations
    assert together < 1.1 * (bytes_of_base + n * (alone - bytes_of_base))


def test_members_come_and_go_over_one_base(tmp_path):
    make = adapters(base())
    ens = Ensemble(make, 4, shared=True)
    want = ens.state_dict(2)
    shared = ens.shared["0.base.weight"]
    snapshot = ens.copy()
    ens.take([2, 0])
    ens.append(make(), make())
    ens.drop(3)
    assert (
        len(ens) == 3 and ens.shared["0.base.weight"] is shared is snapshot.shared["0.base.weight"]
    )
    torch.testing.assert_close(ens.state_dict(0), want)
    ens.save(tmp_path / "members.pt")
    loaded = Ensemble.load(tmp_path / "members.pt", make)
    assert loaded.shared.keys() == ens.shared.keys() and loaded.params["0.up"].shape[0] == 3
    torch.testing.assert_close(loaded.state_dicts(), ens.state_dicts())
    trainer = Trainer(loaded, cross_entropy)
    trainer.take([1, 1, 0])
    trainer.reseed(0, seed=3)
    trainer.step(*batches(3), own=True)
    assert (
        trainer.state.shared["0.base.weight"].shape == shared.shape and len(trainer.snapshot()) == 3
    )


@pytest.mark.parametrize("chunk", [None, 2])
def test_on_a_mesh_and_in_chunks_the_numbers_are_the_same(chunk):
    mesh = jax.make_mesh((1, 1), ("member", "data"))
    ensembles = [Ensemble(adapters(base()), 4, mesh=m, shared=True) for m in (None, mesh)]
    trainers = [
        Trainer(ens, cross_entropy, chunk=c)
        for ens, c in zip(ensembles, (None, chunk), strict=True)
    ]
    losses = [
        torch.stack([trainer.step(*batches(4), own=True) for _ in range(3)]) for trainer in trainers
    ]
    torch.testing.assert_close(*losses)
    assert (
        trainers[1].ensemble.shared["0.base.weight"].sharding.spec == jax.sharding.PartitionSpec()
    )


def test_dry_run_counts_the_base_once():
    def make_trainer(n, mesh):
        return Trainer(Ensemble(adapters(base()), n, mesh=mesh, shared=True), cross_entropy)

    price = dry_run(make_trainer, 64, tuple(x[0] for x in batches(1, 8)), {"member": 4, "data": 2})
    own = Ensemble(adapters(base()), 1, shared=True)
    assert price.state["shared"] == size(own.shared) and price.state["params"] == 16 * size(
        own.params
    )


def test_a_checkpoint_has_the_digest_of_the_base_alone(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    frozen = base()
    trainer = Trainer(Ensemble(adapters(frozen), 2, shared=True), cross_entropy)
    trainer.step(*batches(2), own=True)
    trainer.position = 1
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, wait=True)
        again = Trainer(Ensemble(adapters(frozen), 2, seed=9, shared=True), cross_entropy)
        assert checkpoints.restore(again) == 1
        torch.testing.assert_close(again.ensemble.state_dicts(), trainer.ensemble.state_dicts())
        torch.testing.assert_close(
            again.step(*batches(2), own=True), trainer.step(*batches(2), own=True)
        )
        with torch.no_grad():
            frozen[0].bias += 1
        with pytest.raises(
            CheckpointError, match=r"'0\.base\.bias', which all members share, has other values"
        ):
            checkpoints.restore(Trainer(Ensemble(adapters(frozen), 2, shared=True), cross_entropy))


def normalized(trained: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    model[0].requires_grad_(trained)
    return model


def test_what_cannot_be_shared_is_refused():
    for shared, error, words in [
        (
            True,
            ValueError,
            "shared: all members must have the same values in '0.weight', and member 1 has others",
        ),
        (["2"], ValueError, "shared: '2.weight' requires grad"),
        (
            ["nothing"],
            ValueError,
            "no parameter, buffer or submodule of a member is named 'nothing'",
        ),
        ("0", TypeError, "expected True, False or a list of names"),
    ]:
        with pytest.raises(error, match=words):
            Ensemble(normalized, 2, shared=shared)
    with pytest.raises(ValueError, match="all parameters of the members require grad"):
        Ensemble(lambda: nn.Linear(2, 2), 2, shared=True)
    one = normalized()
    inputs, labels = (x[0] for x in batches(1))
    with pytest.raises(ValueError, match=r"writes to '1\.\w+', which all members share"):
        Trainer(
            Ensemble.of([copy.deepcopy(one) for _ in range(2)], shared=True), cross_entropy
        ).step(inputs, labels)
    ens = Ensemble.of([copy.deepcopy(one) for _ in range(2)], shared=["0"])
    assert list(ens.shared) == ["0.weight", "0.bias"]
    assert Trainer(ens, cross_entropy).step(inputs, labels).shape == (2,)
