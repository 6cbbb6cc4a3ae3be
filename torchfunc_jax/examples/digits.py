"""Deep ensembles of small torch CNNs on scikit-learn's handwritten digits, trained by
torchfunc_jax.ensemble, and torch.func beside it.

`torchfunc-jax ensemble` runs this; `torchfunc_jax.cli` has the command line, `digits_plots` the
figures. It needs the extra `demo`: `pip install "torchfunc-jax[demo]"`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import jax
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn

import torchfunc_jax
from bridge import devices
from torchfunc_jax._machine import machine
from torchfunc_jax.ensemble import (
    Checkpoints,
    Classification,
    Ensemble,
    Price,
    Trainer,
    dry_run,
    metrics,
)
from torchfunc_jax.ensemble.meshes import DATA, gathered

Weights = dict[str, torch.Tensor]  # parameter name -> [members, *shape]
Batch = tuple[torch.Tensor, torch.Tensor]  # images [B, 1, 8, 8], labels [B]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a training run.

    Attributes:
        members: the number of networks.
        epochs: passes over the training digits.
        batch_size: digits in a batch; every member sees the same batches.
        learning_rate: Adam's at the first step; it falls to zero along a cosine.
        seed: for the split, the members' initial weights and the batches.
        device: "cpu", "gpu" or "tpu"; None: JAX's default.
        compare: train the same ensemble under torch.func too.
        mesh: how many devices share the members, and how many share each batch; None: one device.
    """

    members: int = 32
    epochs: int = 40
    batch_size: int = 64
    learning_rate: float = 8e-3
    seed: int = 0
    device: str | None = None
    compare: bool = True
    mesh: tuple[int, int] | None = None


# ---- data and model ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Digits:
    """Handwritten digits of 8x8 pixels from 0 to 1.

    Attributes:
        train_images, test_images: float32, [N, 1, 8, 8].
        train_labels, test_labels: int64, [N].
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits(seed: int = 0) -> Digits:
    """The 1,797 digits that scikit-learn ships; a fifth of each class, chosen by the seed, is for
    testing.

    Source: https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits

    Example:
        >>> from torchfunc_jax.examples.digits import load_digits
        >>> load_digits(seed=0).test_images.shape
        torch.Size([360, 1, 8, 8])
    """
    from sklearn import datasets, model_selection

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    a, b, c, d = model_selection.train_test_split(
        images, labels.astype(np.int64), test_size=0.2, random_state=seed, stratify=labels
    )
    return Digits(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (a, c, b, d)))


def batches(digits: Digits, settings: Settings) -> Iterator[Batch]:
    """The training batches of the whole run; each epoch is shuffled, and each digit slightly
    turned, moved and scaled.
    """
    draw = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.epochs):
        order = torch.randperm(len(digits.train_labels), generator=draw)
        for i in range(steps_per_epoch(digits, settings)):
            chosen = order[i * settings.batch_size : (i + 1) * settings.batch_size]
            yield jitter(digits.train_images[chosen], draw), digits.train_labels[chosen]


def steps_per_epoch(digits: Digits, settings: Settings) -> int:
    """The number of whole batches in the training digits;
    an epoch leaves out the remaining digits.
    """
    steps = len(digits.train_labels) // settings.batch_size
    if steps == 0:
        raise ValueError(
            f"batch_size: expected at most the {len(digits.train_labels)} training digits, got "
            f"{settings.batch_size}"
        )
    return steps


def jitter(
    images: torch.Tensor,
    draw: torch.Generator,
    degrees: float = 8,
    shift: float = 0.1,
    scale: float = 0.08,
) -> torch.Tensor:
    """Each image turned by at most ``degrees``, moved by at most ``shift`` of half its width, and
    scaled by at most ``scale``.
    """
    most = torch.tensor([math.radians(degrees), scale, shift, shift])[:, None]
    angle, size, dx, dy = (torch.rand(4, len(images), generator=draw) * 2 - 1) * most
    cos, sin = (1 + size) * angle.cos(), (1 + size) * angle.sin()
    maps = torch.stack([torch.stack([cos, -sin, dx], -1), torch.stack([sin, cos, dy], -1)], 1)
    return F.grid_sample(
        images, F.affine_grid(maps, list(images.shape), align_corners=False), align_corners=False
    )


def letters(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Letters, which no member has seen, made of digits by turning them: N of a 2, m of a 3, h of a
    4, L of a 7.

    Args:
        images: [N, 1, 8, 8].
        labels: integers, [N].

    Returns:
        (images, names): float32, [M, 1, 8, 8], and the letter of each.
    """
    turned = [(2, "N", 1), (3, "m", 1), (4, "h", 2), (7, "L", 2)]
    found = [
        torch.rot90(images[labels == digit], quarters, (-2, -1)) for digit, _, quarters in turned
    ]
    return torch.cat(found), [
        name for (_, name, _), some in zip(turned, found, strict=True) for _ in some
    ]


class DigitNet(nn.Module):
    """One member: two convolutions and two linear layers; 21,386 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)  # 8x8 -> 6x6
        self.conv2 = nn.Conv2d(16, 32, 2, stride=2)  # -> 3x3
        self.hidden = nn.Linear(32 * 3 * 3, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(F.relu(self.hidden(x.flatten(1))))


# ---- the ensemble under one system ---------------------------------------------------------------


def members_loss(func: ModuleType, model: nn.Module) -> Callable[..., Any]:
    """The gradient and the loss of every member on one batch. The code is the same for `torch.func`
    and for `torchfunc_jax`.

    Args:
        func: the module to take the transforms from.
        model: one member, for its forward; its own weights are not used.

    Returns:
        (stacked weights, images, labels) -> (stacked gradients, losses [members]).
    """

    def loss(weights: Weights, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(func.functional_call(model, weights, (images,)), labels)

    return func.vmap(func.grad_and_value(loss), in_dims=(0, None, None))


def members_logits(func: ModuleType, model: nn.Module) -> Callable[..., Any]:
    """(stacked weights, images) -> logits [members, B, 10]."""
    return func.vmap(
        lambda weights, images: func.functional_call(model, weights, (images,)), in_dims=(0, None)
    )


def cosine(steps: int) -> Callable[[Any], Any]:
    """A function from the step to a factor of the learning rate, which falls along a cosine from
    one to zero.
    """
    return optax.cosine_decay_schedule(1.0, steps)


class System(Protocol):
    """An ensemble in training. Both systems start from the same weights and
    get the same batches.
    """

    name: str

    def step(self, batch: Batch) -> np.ndarray:
        """Take one step of Adam; the losses [members] before it."""
        ...

    def gradients(self, weights: Weights, batch: Batch) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The gradients and the losses of members with these weights."""
        ...

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """[members, N, 10]."""
        ...

    def weights(self) -> Weights:
        """The current weights on the CPU."""
        ...


class OnJax:
    """torchfunc_jax.ensemble: forward, backward and Adam of all members are one XLA program, on one
    device or on a mesh.

    Attributes:
        ensemble: the members.
        trainer: what trains them.
    """

    name = "torchfunc_jax"

    def __init__(
        self,
        settings: Settings,
        schedule: Callable[[Any], Any] | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        with devices.use(settings.device if settings.device is not None else devices.default()):
            self.ensemble = Ensemble(DigitNet, settings.members, seed=settings.seed, mesh=mesh)
            self.trainer = trainer(self.ensemble, settings.learning_rate, schedule)
        self._gradients = torchfunc_jax.jit(members_loss(torchfunc_jax, DigitNet()))

    def step(self, batch: Batch) -> np.ndarray:
        place = self.ensemble.placement
        losses = self.trainer.step(
            *(x if place.mesh is None else place.put_rows(x, DATA) for x in batch)
        )
        self.trainer.position += 1
        return losses.numpy()

    def gradients(self, weights: Weights, batch: Batch) -> tuple[dict[str, np.ndarray], np.ndarray]:
        grads, losses = self._gradients(weights, *batch)
        return {k: v.numpy() for k, v in grads.items()}, losses.numpy()

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.ensemble.logits(images)

    def weights(self) -> Weights:
        return {k: torch.from_numpy(np.array(gathered(v))) for k, v in self.ensemble.params.items()}


def trainer(
    ensemble: Ensemble, rate: float, schedule: Callable[[Any], Any] | None = None
) -> Trainer:
    """Adam on the members' cross-entropy."""
    return Trainer(ensemble, F.cross_entropy, "adam", lr=rate, schedule=schedule)


class OnTorch:
    """torch.func: PyTorch runs the same code operator by operator, with torch.optim's Adam on the
    stacked weights.
    """

    name = "torch.func"

    def __init__(
        self, model: nn.Module, weights: Weights, rates: Callable[[Any], Any], device: str = "cpu"
    ) -> None:
        self._device = device
        self._params = self._put({k: v.clone() for k, v in weights.items()})
        self._optimizer = torch.optim.Adam(list(self._params.values()))
        self._rates, self._taken = rates, 0
        model = model.to(device)
        self._loss, self._logits = (
            members_loss(torch.func, model),
            members_logits(torch.func, model),
        )

    def _put(self, tree: Any) -> Any:
        return jax.tree.map(lambda t: t.to(self._device), tree)

    def step(self, batch: Batch) -> np.ndarray:
        grads, losses = self._loss(self._params, *self._put(batch))
        for name, param in self._params.items():
            param.grad = grads[name]
        for group in self._optimizer.param_groups:
            group["lr"] = float(self._rates(self._taken))
        self._optimizer.step()
        self._taken += 1
        return losses.cpu().numpy()

    def gradients(self, weights: Weights, batch: Batch) -> tuple[dict[str, np.ndarray], np.ndarray]:
        grads, losses = self._loss(self._put(weights), *self._put(batch))
        return {k: v.cpu().numpy() for k, v in grads.items()}, losses.cpu().numpy()

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self._logits(self._params, self._put(images)).cpu()

    def weights(self) -> Weights:
        return {k: v.detach().cpu().clone() for k, v in self._params.items()}


# ---- training both -------------------------------------------------------------------------------


class Training:
    """A training run of one or two systems, step by step, with its losses and times.

    On several processes each of them makes one, and calls its methods at the same time. Only
    process 0 compares with torch.func.

    Args:
        settings: the settings of the run.
        digits: the data; None: `load_digits(settings.seed)`.

    Attributes:
        systems: name -> System; "torchfunc_jax", and "torch.func" if the settings compare.
        losses: name -> a list with an array [members] for each step taken.
        seconds: name -> the time of each step taken; the first step includes tracing and compiling.
        steps: the number of steps of the whole run.
        resumed_at: the number of steps that an earlier run took.
        interrupted: whether `run` was stopped before the last step.

    Example:
        >>> from torchfunc_jax.examples.digits import Settings, Training
        >>> training = Training(Settings(members=2, epochs=1, batch_size=512))
        >>> training.run()
        >>> len(training.losses["torchfunc_jax"])
        2
    """

    def __init__(self, settings: Settings, digits: Digits | None = None) -> None:
        self.settings = settings
        self.digits = load_digits(settings.seed) if digits is None else digits
        self.steps = settings.epochs * steps_per_epoch(self.digits, settings)
        self.device = jax.devices()[0] if settings.device is None else devices.find(settings.device)
        self.mesh = None if settings.mesh is None else mesh_of(settings)
        schedule = cosine(self.steps)
        rates = lambda step: settings.learning_rate * schedule(step)
        self.ours = OnJax(settings, schedule, self.mesh)
        self.initial = self.ours.weights()
        self.systems: dict[str, System] = {"torchfunc_jax": self.ours}
        if settings.compare and jax.process_index() == 0:
            torch_device = (
                "cuda" if self.device.platform == "gpu" and torch.cuda.is_available() else "cpu"
            )
            self.systems["torch.func"] = OnTorch(DigitNet(), self.initial, rates, torch_device)
        self.losses: dict[str, list[np.ndarray]] = {name: [] for name in self.systems}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.systems}
        self.resumed_at = 0
        self.interrupted = False
        self.first_batch = self.last_batch = next(batches(self.digits, settings))

    def run(
        self,
        on_step: Callable[[Training], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
        kept: Checkpoints | None = None,
    ) -> None:
        """Train to the end, or until `stop()`; the systems take turns at every step. `on_step` is
        called after each step.

        With checkpoints, it goes on from the newest. They do not keep the system on torch.func.
        """
        with (
            contextlib.nullcontext(lambda: None)
            if kept is None
            else kept.training(self.ours.trainer) as stepped
        ):
            self.resumed_at = self.ours.trainer.position
            for batch in itertools.islice(
                batches(self.digits, self.settings), self.resumed_at, None
            ):
                if stop():
                    self.interrupted = True
                    return
                self.last_batch = batch
                for name, system in self.systems.items():
                    start = time.perf_counter()
                    losses = system.step(batch)
                    self.seconds[name].append(time.perf_counter() - start)
                    self.losses[name].append(losses)
                on_step(self)
                stepped()

    def save(self, folder: Path) -> Path:
        """Write the current members to `members.pt`, a list of state dicts for DigitNet; the file
        is written as a whole or not at all.
        """
        weights = self.ours.weights()
        path, part = folder / "members.pt", folder / "members.pt.part"
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(
                [
                    {k: v[i].clone() for k, v in weights.items()}
                    for i in range(self.settings.members)
                ],
                part,
            )
            os.replace(part, path)
        return path


def mesh_of(settings: Settings, devices_: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The mesh of the settings, over these devices or all.

    Raises:
        ValueError: the members, the batch or the number of devices do not fit it.
    """
    have = jax.devices() if devices_ is None else devices_
    member, data = settings.mesh
    if member * data != len(have):
        raise ValueError(
            f"mesh: expected as many devices as there are, {len(have)}, got {member} for members "
            f"times {data} for data"
        )
    if settings.members % member:
        raise ValueError(
            f"mesh: expected {settings.members} members to divide evenly among the devices of the "
            f"axis member, got {member}"
        )
    if settings.batch_size % data:
        raise ValueError(
            f"mesh: expected batches of {settings.batch_size} to divide evenly among the devices "
            f"of the axis data, got {data}"
        )
    return jax.make_mesh((member, data), ("member", "data"), devices=have)


def checkpoints(settings: Settings, folder: Path) -> Checkpoints:
    """The checkpoints of a run, one at each epoch.

    Raises:
        ImportError: Orbax is not installed.
        ValueError: the folder has those of a run with other settings, which this run would not
            continue.
    """
    same = {
        name: getattr(settings, name)
        for name in ("members", "epochs", "batch_size", "learning_rate", "seed")
    }
    page = folder / "settings.json"
    if page.exists():
        for name, before in json.loads(page.read_text()).items():
            if before != same[name]:
                raise ValueError(
                    f"resume: {folder} has checkpoints of a run with {name}={before}, got "
                    f"{same[name]}; take another output"
                )
    kept = Checkpoints(folder, every=steps_per_epoch(load_digits(settings.seed), settings), keep=2)
    if jax.process_index() == 0:
        page.write_text(json.dumps(same))
    return kept


def priced(settings: Settings) -> Price:
    """What a step of the settings takes on their mesh, whose devices need not be there: see
    `torchfunc_jax.ensemble.dry_run`.
    """
    member, data = settings.mesh or (1, 1)
    batch = (
        torch.empty(settings.batch_size, 1, 8, 8),
        torch.empty(settings.batch_size, dtype=torch.int64),
    )
    return dry_run(
        lambda n, mesh: trainer(
            Ensemble(DigitNet, n, seed=settings.seed, mesh=mesh), settings.learning_rate
        ),
        settings.members,
        batch,
        {"member": member, "data": data},
    )


def throughput(settings: Settings, digits: Digits, steps: int = 12) -> list[dict[str, Any]]:
    """Members trained per second on 1, 2, 4, ... of this process's devices: the members are shared,
    the batch is not.

    Returns:
        A list of {"devices", "step_ms": the median, "members_per_second", "flops_per_device": of a
            step, None if XLA does not say}.
    """
    batch = next(batches(digits, settings))
    out = []
    for n in (2**k for k in range(len(jax.local_devices()).bit_length())):
        if settings.members % n or n > len(jax.local_devices()):
            continue
        one = dataclasses.replace(settings, mesh=(n, 1))
        system = OnJax(one, mesh=mesh_of(one, jax.local_devices()[:n]))
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            system.step(batch)
            seconds.append(time.perf_counter() - start)
        median = float(np.median(seconds[2:]))
        cost = system.trainer.compiled_step(*batch).cost_analysis() or {}
        out.append(
            {
                "devices": n,
                "step_ms": 1e3 * median,
                "members_per_second": settings.members / median,
                "flops_per_device": cost.get("flops"),
            }
        )
    return out


# ---- what came out -------------------------------------------------------------------------------


#: Fewer steps than these tell nothing of a speed-up.
ENOUGH_STEPS = 100


def report(training: Training) -> dict[str, Any]:
    """The report of a run, ready for JSON: settings, machine, and for each system times, losses and
    metrics of the test digits.

    With two systems it also has their largest relative differences in losses and gradients (see
    `difference`), and the speed-up. Comments below describe the keys.
    """
    settings, digits = training.settings, training.digits
    labels = digits.test_labels
    strange, names = letters(digits.test_images, labels)
    ours = Classification.of(training.ours.logits(digits.test_images))
    on_letters = Classification.of(training.ours.logits(strange))
    members = ours.logits.double().softmax(-1)
    sizes, values = metrics.against_size(members, labels)
    out: dict[str, Any] = {
        "settings": dataclasses.asdict(settings),
        "machine": machine(training.device)
        | {"load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None},
        "devices": 1 if training.mesh is None else training.mesh.size,
        "processes": jax.process_count(),
        "interrupted": training.interrupted,
        "resumed_at": training.resumed_at,
        "steps": training.resumed_at + len(training.losses["torchfunc_jax"]),
        "train_images": len(digits.train_labels),
        "test_images": len(labels),
        "parameters_per_member": sum(v[0].numel() for v in training.initial.values()),
        "systems": {},
        # of the mean probability of so many members: the mean over draws of members, and their 10 %
        # and 90 % quantiles
        "by_size": {
            "members": sizes,
            **{
                name: {
                    "mean": v.mean(1).tolist(),
                    "low": v.quantile(0.1, 1).tolist(),
                    "high": v.quantile(0.9, 1).tolist(),
                }
                for name, v in values.items()
            },
        },
        "out_of_distribution": out_of_distribution(ours, on_letters, names, strange),
        "least_sure": least_sure(ours, digits),
    }
    per_epoch = steps_per_epoch(digits, settings)
    for name, system in training.systems.items():
        found = (
            ours
            if system is training.ours
            else Classification.of(system.logits(digits.test_images))
        )
        correct = (found.logits.argmax(-1) == labels).double().mean(-1)
        losses, seconds = np.array(training.losses[name]), training.seconds[name]
        p = found.probability
        out["systems"][name] = {
            "first_step_s": seconds[0] if seconds else None,  # with tracing and compiling
            # the median of the others
            "step_ms": 1e3 * float(np.median(seconds[1:])) if len(seconds) > 1 else None,
            # over members and the last epoch's batches
            "final_loss": float(losses[-per_epoch:].mean()) if len(losses) else None,
            "test_accuracy": {
                "mean_member": float(correct.mean()),
                "worst_member": float(correct.min()),
                "best_member": float(correct.max()),
                "vote": float((found.vote == labels).double().mean()),  # of the majority
                "mean_probability": float(metrics.accuracy(p, labels)),
            },
            "nll": float(metrics.categorical_nll(p, labels)),
            "brier": float(metrics.brier_score(p, labels)),
            "ece": float(metrics.calibration_error(p, labels)),
            "calibration": calibration(p, labels),
            # [members][steps]
            "losses": [[float(f"{x:.7g}") for x in member] for member in losses.T],
        }
    if "torch.func" in training.systems:
        out["difference"] = differences(training)
        out["speed_up"] = speed_up(training)
    return out


def speed_up(training: Training) -> dict[str, float] | None:
    """How many times as fast a step is as under torch.func: the median over steps, which the
    systems take in turns, and the quartiles.

    None after fewer than ENOUGH_STEPS steps.
    """
    ours, theirs = (
        np.array(training.seconds[name][1:]) for name in ("torchfunc_jax", "torch.func")
    )
    if len(ours) < ENOUGH_STEPS:
        return None
    low, median, high = np.quantile(theirs / ours, [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def out_of_distribution(
    ours: Classification, on_letters: Classification, names: list[str], images: torch.Tensor
) -> dict[str, Any]:
    """How well scores tell letters from digits: AUROC and the false positives at 95 % recall, the
    scores themselves, and a few letters.
    """
    scores = {
        "1 - confidence": [1 - x.probability.amax(-1) for x in (ours, on_letters)],
        "entropy": [x.entropy for x in (ours, on_letters)],
        "mutual information": [x.mutual_information for x in (ours, on_letters)],
    }
    single = torch.cat([metrics.entropy(x.logits.softmax(-1)) for x in (ours, on_letters)], -1)
    is_letter = torch.cat([torch.zeros(len(ours.vote)), torch.ones(len(names))]).bool()
    return {
        "letters": len(names),
        "mean_member": {
            "auroc": float(metrics.auroc(single, is_letter).mean()),
            "fpr95": float(metrics.fpr95(single, is_letter).mean()),
        },
        "scores": {
            name: {
                "auroc": float(metrics.auroc(torch.cat(pair), is_letter)),
                "fpr95": float(metrics.fpr95(torch.cat(pair), is_letter)),
                "digits": _rounded(pair[0]),
                "letters": _rounded(pair[1]),
            }
            for name, pair in scores.items()
        },
        "examples": [
            {"letter": name, "vote": int(on_letters.vote[i]), "pixels": _pixels(images[i])}
            for name, i in ((name, names.index(name)) for name in dict.fromkeys(names))
        ],
    }


def least_sure(ours: Classification, digits: Digits, count: int = 12) -> list[dict[str, Any]]:
    """The test digits with the lowest confidence: index, label, probabilities, votes, pixels."""
    return [
        {
            "test_index": int(i),
            "label": int(digits.test_labels[i]),
            "vote": int(ours.vote[i]),
            "probability": _rounded(ours.probability[i]),
            "votes": ours.votes[i].tolist(),  # members for each digit
            "pixels": _pixels(digits.test_images[i]),
        }
        for i in ours.probability.amax(-1).argsort()[:count].tolist()
    ]


def _rounded(x: torch.Tensor) -> list[float]:
    return [round(float(v), 6) for v in x]


def _pixels(image: torch.Tensor) -> list[list[float]]:
    return [[round(float(v), 4) for v in row] for row in image[0]]


def differences(training: Training) -> dict[str, dict[str, float]]:
    """The differences between the two systems at the first step, at the end with the same weights,
    and at the end with their own weights.

    The last difference adds up the rounding errors of all steps, which training magnifies; the
    first two are those of one step.
    """
    ours, theirs = training.systems["torchfunc_jax"], training.systems["torch.func"]
    reached, theirs_reached = ours.weights(), theirs.weights()
    cases = {
        "first_step": (training.initial, training.initial, training.first_batch),
        "end_same_weights": (reached, reached, training.last_batch),
        "end": (reached, theirs_reached, training.last_batch),
    }
    out = {}
    for name, (our_weights, their_weights, batch) in cases.items():
        our_grads, our_losses = ours.gradients(our_weights, batch)
        their_grads, their_losses = theirs.gradients(their_weights, batch)
        flat = [
            np.concatenate([g[k].reshape(len(our_losses), -1) for k in sorted(g)], 1)
            for g in (our_grads, their_grads)
        ]
        out[name] = {
            "loss": difference(our_losses[:, None], their_losses[:, None]),
            "gradient": difference(*flat),
        }
    return out


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest |a - b| of a row, as a part of the largest |b| of that row;
    the worst row counts.
    """
    return float(
        (np.abs(a - b).max(1) / np.maximum(np.abs(b).max(1), np.finfo(b.dtype).tiny)).max()
    )


def calibration(
    probabilities: torch.Tensor, labels: torch.Tensor, bins: int = 15
) -> dict[str, Any]:
    """The accuracy of the vote among digits of similar confidence, as lists for JSON.

    Args:
        probabilities: the vote's, floating-point, [N, classes].
        labels: integers, [N].
        bins: the number of bins of equal width from 0 to 1.

    Returns:
        {"confidence", "accuracy": of each bin, None for an empty one; "count"; "error": the
            expected calibration error,
        the mean distance of the two over all digits}.

    Source: `torchfunc_jax.ensemble.metrics.reliability`

    Example:
        >>> import torch
        >>> from torchfunc_jax.examples.digits import calibration
        >>> round(
        ...     calibration(torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 0]))[
        ...         "error"
        ...     ],
        ...     2,
        ... )
        0.25
    """
    confidence, accuracy, count = metrics.reliability(probabilities, labels, bins)
    means = ([None if math.isnan(v) else v for v in x.tolist()] for x in (confidence, accuracy))
    error = float(metrics.calibration_error(probabilities, labels, bins))
    return dict(
        zip(
            ("confidence", "accuracy", "count", "error"),
            (*means, count.tolist(), error),
            strict=True,
        )
    )
