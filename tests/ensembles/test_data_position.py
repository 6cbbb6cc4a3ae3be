"""Training on the batches of a loader: a run that is stopped and resumed sees the batches that it
would have seen, and ends with the same bits; what is no loader; the parts of several processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ensemble_jobs as jobs
import numpy as np
import pytest
import torch
from test_several_processes import worst
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from bridge.checkpoints import CheckpointError
from torchfunc_jax.ensemble import Checkpoints, Ensemble, Trainer, launch

ROWS, STEPS = 20, 13  # five batches of four rows in an epoch


def dataset() -> TensorDataset:
    return TensorDataset(*(x[:ROWS] for x in jobs.data()))


class Noisy(Dataset):
    """Rows that are changed when they are loaded, by numbers that torch, NumPy and Python draw."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[torch.Tensor, ...]:
        x, y = dataset()[i]
        return x + torch.randn(4), y + np.float32(np.random.rand()) + random.random()


class Stateful:
    """An object with the protocol of torchdata's StatefulDataLoader, whose order depends on all
    epochs before; it loads no batch again.
    """

    def __init__(self) -> None:
        self.draw, self.order, self.given = np.random.default_rng(3), [], 0
        self.loaded = 0

    def __iter__(self) -> Iterator[Any]:
        if not self.order:
            self.order = self.draw.permutation(ROWS).tolist()
        while self.order:
            rows, self.order = self.order[:4], self.order[4:]
            self.loaded += 1
            yield dataset()[rows]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "draw": self.draw.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.draw.bit_generator.state = list(state["order"]), state["draw"]


class Pairs:
    """Batches in the same order in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        return iter(pairs())


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def grain_dataset(epochs: int = 1) -> Any:
    grain = pytest.importorskip("grain")
    rows = [tuple(x.numpy() for x in dataset()[i]) for i in range(ROWS)]
    made = grain.MapDataset.source(rows).seed(2).shuffle()
    return made.repeat(epochs).batch(4)


def grain_loader(workers: int = 0) -> Any:
    grain = pytest.importorskip("grain")
    if workers:  # what a program of absl's does by itself
        from absl import flags

        flags.FLAGS.mark_as_parsed()
    rows = [tuple(x.numpy() for x in dataset()[i]) for i in range(ROWS)]
    sampler = grain.samplers.IndexSampler(
        ROWS, shuffle=True, seed=1, num_epochs=1, shard_options=grain.sharding.NoSharding()
    )
    return grain.DataLoader(
        data_source=rows,
        sampler=sampler,
        operations=[grain.transforms.Batch(4)],
        worker_count=workers,
    )


def stateful_loader() -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(Noisy(), batch_size=4, shuffle=True)


LOADERS: dict[str, Callable[[], Any]] = {
    "a DataLoader with a generator": lambda: DataLoader(
        dataset(), batch_size=7, shuffle=True, generator=generator()
    ),
    "a DataLoader without a generator": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "a sampler with a generator, drawn with replacement": lambda: DataLoader(
        dataset(), 4, sampler=RandomSampler(dataset(), True, ROWS, generator())
    ),
    "a weighted sampler": lambda: DataLoader(
        dataset(), 4, sampler=WeightedRandomSampler(torch.ones(ROWS), ROWS, generator=generator())
    ),
    "a DistributedSampler": lambda: DataLoader(
        dataset(), 4, sampler=DistributedSampler(dataset(), num_replicas=1, rank=0)
    ),
    "an object that is iterable": lambda: type(
        "Pairs", (), {"__iter__": lambda self: iter(pairs())}
    )(),
    "StatefulDataLoader's protocol": Stateful,
    "torchdata's StatefulDataLoader": stateful_loader,
    "Grain's MapDataset": grain_dataset,
    "Grain's IterDataset": lambda: grain_dataset().to_iter_dataset(),
    "an iterator of Grain's": lambda: iter(grain_dataset(epochs=3)),
    "Grain's DataLoader": grain_loader,
}
LOADERS_WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "a DataLoader with workers": lambda: DataLoader(
        Noisy(),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        generator=generator(),
        multiprocessing_context="spawn",
    ),
    "Grain's DataLoader with workers": lambda: grain_loader(2),
}
FAST = (
    "a DataLoader with a generator",
    "a DataLoader without a generator",
    "a DistributedSampler",
    "StatefulDataLoader's protocol",
    "Grain's MapDataset",
    "an iterator of Grain's",
)


def pairs() -> list[tuple[torch.Tensor, ...]]:
    return [dataset()[i : i + 4] for i in range(0, ROWS, 4)]


def seeded(seed: int) -> None:
    """What a new process begins with."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def trainer(n: int = 3) -> Trainer:
    return Trainer(
        Ensemble(jobs.member, n, seed=1), nn.functional.mse_loss, "adam", lr=[0.01] * n, seed=5
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in LOADERS | LOADERS_WITH_WORKERS
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, name: str) -> None:
    """Stopped in the middle of an epoch, at the end of one, and after it."""
    make = (LOADERS | LOADERS_WITH_WORKERS)[name]
    options = {"validation": jobs.data(), "keep_best": True}
    seeded(0)
    whole = trainer()
    losses = whole.fit(make(), steps=STEPS, **options)
    assert whole.position == STEPS and losses.shape == (STEPS, 3)
    # the batches of two epochs, or of two parts of one, differ
    assert name == "an object that is iterable" or not torch.equal(losses[:5], losses[5:10])
    done = []
    for stop in (3, 5, 6, STEPS):
        seeded(len(done))
        with Checkpoints(tmp_path, every=0) as checkpoints:
            one = trainer()
            done.append(one.fit(make(), steps=stop, **options, checkpoint=checkpoints))
            assert one.position == stop
    np.testing.assert_array_equal(torch.cat(done).numpy(), losses.numpy())
    assert worst(jobs.values(one), jobs.values(whole)) == 0


class Interrupted(Exception):
    pass


def test_after_an_error_and_in_two_calls_a_loader_goes_on() -> None:
    loader = LOADERS["a DataLoader with a generator"]
    whole = trainer()
    losses = whole.fit(loader(), epochs=3)
    assert losses.shape == (9, 3)  # the last batch of an epoch has fewer rows

    def interrupted(trainer: Trainer, _: Any) -> None:
        if trainer.position == 4:
            raise Interrupted

    one, same = trainer(), loader()
    with pytest.raises(Interrupted):
        one.fit(same, epochs=3, on_step=interrupted)
    assert (one.data_state["epoch"], one.data_state["taken"]) == (1, 1)
    # the loader that is open already, then another one
    rest = [one.fit(same, epochs=2), one.fit(loader(), epochs=3), one.fit(loader(), epochs=3)]
    np.testing.assert_array_equal(torch.cat(rest).numpy(), losses[4:].numpy())
    assert worst(jobs.values(one), jobs.values(whole)) == 0
    # from the beginning again
    one.position = 0
    assert one.fit(loader(), epochs=1).shape == (3, 3) and one.data_state["epoch"] == 1
    one.data_state = None
    assert one.fit(loader(), steps=4).shape == (1, 3) and one.data_state["taken"] == 1


def test_a_batch_whose_step_was_interrupted_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, one, loader = trainer(), trainer(), LOADERS["a DataLoader with a generator"]
    losses, same, step = whole.fit(loader(), epochs=2), loader(), Trainer._step

    def interrupted(self: Trainer, *args: Any) -> Any:
        if self.position == 4:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Trainer, "_step", interrupted)
        one.fit(same, epochs=2)
    np.testing.assert_array_equal(one.fit(same, epochs=2).numpy(), losses[4:].numpy())


def test_steps_end_a_run_on_tensors_too() -> None:
    options = {"batch_size": 8, "own": True}
    one, whole = trainer(), trainer()
    losses = whole.fit(jobs.data(), epochs=2, **options)  # eight batches each
    parts = [one.fit(jobs.data(), steps=steps, **options) for steps in (3, 3, 11)]
    parts.append(one.fit(jobs.data(), epochs=2, steps=20, **options))
    assert [len(x) for x in parts] == [3, 0, 8, 5]
    np.testing.assert_array_equal(torch.cat(parts).numpy(), losses.numpy())


def test_a_loader_with_a_state_loads_no_batch_again() -> None:
    one, first, second = trainer(), Stateful(), Stateful()
    one.fit(first, steps=7)
    one.fit(second, steps=9)
    assert (first.loaded, second.loaded) == (7, 2)


def test_early_stopping_over_the_epochs_of_a_loader() -> None:
    """A rate of zero does not become better, so that the first epoch has the only improvement."""
    one = Trainer(Ensemble(jobs.member, 2), nn.functional.mse_loss, "sgd", lr=0.0)
    losses = one.fit(pairs_of(4), epochs=50, validation=jobs.data(), patience=2)
    assert losses.shape == (3 * 5, 2) and not one.state.active.any()


def pairs_of(rows: int) -> Any:
    return DataLoader(dataset(), batch_size=rows)


@pytest.mark.parametrize("form", ["dict", "tensor"])
def test_batches_of_one_value_go_to_the_loss_as_they_are(form: str) -> None:
    """A batch that is a dict or a tensor is one argument, not several."""

    def loss(member: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"] if form == "dict" else batch
        return member(x).square().mean()

    x = jobs.data()[0][:ROWS]
    rows: list[Any] = [{"x": row} if form == "dict" else row for row in x]
    found, want = (
        Trainer(Ensemble(jobs.member, 2), loss, "sgd", lr=0.1, loss_of="module") for _ in range(2)
    )
    losses = found.fit(DataLoader(rows, batch_size=5), epochs=1)
    for i in range(4):
        batch = x[5 * i : 5 * i + 5]
        one = want.step({"x": batch} if form == "dict" else batch)
        np.testing.assert_array_equal(losses[i].numpy(), one.numpy())


def test_each_member_may_have_batches_of_its_own() -> None:
    x, y = (t[: 3 * 8].reshape(2, 3, 4, -1) for t in jobs.data())
    found, want = trainer(), trainer()
    losses = found.fit(DataLoader(list(zip(x, y, strict=True)), batch_size=None), own=True)
    for i in range(2):
        np.testing.assert_array_equal(losses[i].numpy(), want.step(x[i], y[i], own=True).numpy())


class Reusing:
    """A loader that writes each batch into the memory of the one before."""

    def __init__(self) -> None:
        self.memory = np.empty((256, 256), np.float32), np.empty((256, 1), np.float32)

    def __iter__(self) -> Iterator[Any]:
        for i in range(8):
            draw = np.random.default_rng(i)
            for x in self.memory:
                x[...] = draw.normal(size=x.shape)
            yield self.memory


def test_a_loader_may_use_the_memory_of_a_batch_again() -> None:
    def make() -> Trainer:
        member = lambda: nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1))
        return Trainer(Ensemble(member, 4), nn.functional.mse_loss)

    found, want = make().fit(Reusing()), make()
    np.testing.assert_array_equal(
        found.numpy(), torch.stack([want.step(*batch) for batch in Reusing()]).numpy()
    )


# -- what is refused -------------------------------------------------------------------------------
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a generator": (
        lambda: trainer().fit(iter(pairs())),
        TypeError,
        "the position in a list_iterator cannot be kept",
    ),
    "an array": (lambda: trainer().fit(torch.ones(4, 4)), TypeError, "or a loader of batches"),
    "a size of batches": (
        lambda: trainer().fit(pairs_of(4), batch_size=4),
        ValueError,
        "a loader makes the batches itself",
    ),
    "no batches": (
        lambda: trainer().fit(DataLoader([])),
        ValueError,
        "the DataLoader gave no batch in epoch 0",
    ),
    "no tensors": (
        lambda: trainer().fit(DataLoader(["a", "b"])),
        ValueError,
        "batch: expected tensors",
    ),
    "a number of steps": (
        lambda: trainer().fit(pairs_of(4), steps=-1),
        ValueError,
        "steps: expected a number that is not negative, got -1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


def test_positions_of_other_loaders_are_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=0) as checkpoints:
        trainer().fit(pairs_of(4), steps=4, checkpoint=checkpoints)
        for loader, words in [
            (Stateful(), "the position is one in a DataLoader, got a Stateful"),
            (
                pairs_of(10),
                "4 batches of epoch 0 were taken before, and this DataLoader has only 2",
            ),
            (
                DataLoader(dataset(), 4, generator=generator()),
                "a loader with 0 generators of random numbers, got 1",
            ),
        ]:
            with pytest.raises(ValueError, match=words):
                trainer().fit(loader, steps=5, checkpoint=checkpoints)
    odd = Stateful()
    odd.state_dict = lambda: {"draw": odd.draw}  # type: ignore[method-assign]
    one = trainer()
    one.fit(odd, steps=1)
    with (
        Checkpoints(tmp_path / "odd") as checkpoints,
        pytest.raises(TypeError, match="the state of the Stateful cannot be kept in a checkpoint"),
    ):
        checkpoints.save(one)


# -- several processes -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("whole", "grain"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_two_processes_take_their_parts(tmp_path: Path, whole: bool, grain: bool) -> None:
    """The devices of the axis "data" are in two processes, whose loaders give whole batches or
    parts. Stopped and resumed, the weights are bit for bit those of the run that was not, and to
    rounding those of one device.
    """
    if grain:
        pytest.importorskip("grain")
    alone = jobs.train_by_loader(None, True, 1, grain)
    found = launch(jobs.train_by_loader, str(tmp_path), whole, None, grain, processes=2)
    for process, run in enumerate(found):
        assert run["part"] == (process, 2) and run["differ"] == []
        np.testing.assert_allclose(run["losses"], alone["losses"], rtol=2e-6, atol=2e-6)
        assert worst(run["values"], alone["values"]) < 1e-5
    seen = [run["seen"] for run in found]
    one = jobs.trainer_of(devices=1)
    with Checkpoints(tmp_path) as checkpoints:
        if whole:  # any number of processes may go on
            assert seen[0] == seen[1] == alone["seen"]
            assert checkpoints.restore(one) == 6
            assert (one.data_state["epoch"], one.data_state["taken"]) == (1, 3)
        else:  # each row is loaded by one of them
            assert sorted(seen[0] + seen[1]) == list(range(24))
            with pytest.raises(CheckpointError, match=r"of 2 processes, .* and there are 1; go on"):
                checkpoints.restore(one)


def test_loaders_of_two_processes_that_do_not_go_together() -> None:
    for run in launch(jobs.unlike_loaders, processes=2):
        assert "processes 0 and 1 must load the same rows of each batch" in run["seeds"]
        assert "the lengths [3, 4] in processes 0, 1" in run["lengths"]
        assert "that of process 0 has fewer" in run["ends"]
