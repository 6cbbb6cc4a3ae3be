"""Deep ensembles of small torch CNNs on scikit-learn's handwritten digits: one XLA program, and torch.func beside it.

`torchfunc-jax ensemble` and `notebooks/ensembling.ipynb` run this; `torchfunc_jax.cli` has the command line, `digits_plots` the figures.
It needs the extra `demo`: `pip install "torchfunc-jax[demo]"`.
"""
from __future__ import annotations

import dataclasses
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
from bridge import compiling, devices
from torchfunc_jax._machine import machine

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
    """

    members: int = 32
    epochs: int = 40
    batch_size: int = 64
    learning_rate: float = 8e-3
    seed: int = 0
    device: str | None = None
    compare: bool = True


# ---- data and model ---------------------------------------------------------------------------------------------------------


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
    """The 1,797 digits that scikit-learn ships; a fifth of each class, chosen by the seed, is for testing.

    Source: https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits

    Example:
        >>> from torchfunc_jax.examples.digits import load_digits
        >>> load_digits(seed=0).test_images.shape
        torch.Size([360, 1, 8, 8])
    """
    from sklearn import datasets, model_selection

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    a, b, c, d = model_selection.train_test_split(images, labels.astype(np.int64), test_size=0.2, random_state=seed, stratify=labels)
    return Digits(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (a, c, b, d)))


def batches(digits: Digits, settings: Settings) -> Iterator[Batch]:
    """The training batches of the whole run; each epoch is shuffled, and each digit slightly turned, moved and scaled."""
    draw = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.epochs):
        order = torch.randperm(len(digits.train_labels), generator=draw)
        for i in range(steps_per_epoch(digits, settings)):
            chosen = order[i * settings.batch_size : (i + 1) * settings.batch_size]
            yield jitter(digits.train_images[chosen], draw), digits.train_labels[chosen]


def steps_per_epoch(digits: Digits, settings: Settings) -> int:
    """The number of whole batches in the training digits; an epoch leaves out the remaining digits."""
    steps = len(digits.train_labels) // settings.batch_size
    if steps == 0:
        raise ValueError(f"batch_size: expected at most the {len(digits.train_labels)} training digits, got {settings.batch_size}")
    return steps


def jitter(images: torch.Tensor, draw: torch.Generator, degrees: float = 8, shift: float = 0.1, scale: float = 0.08) -> torch.Tensor:
    """Each image turned by at most ``degrees``, moved by at most ``shift`` of half its width, and scaled by at most ``scale``."""
    most = torch.tensor([math.radians(degrees), scale, shift, shift])[:, None]
    angle, size, dx, dy = (torch.rand(4, len(images), generator=draw) * 2 - 1) * most
    cos, sin = (1 + size) * angle.cos(), (1 + size) * angle.sin()
    maps = torch.stack([torch.stack([cos, -sin, dx], -1), torch.stack([sin, cos, dy], -1)], 1)
    return F.grid_sample(images, F.affine_grid(maps, list(images.shape), align_corners=False), align_corners=False)


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


# ---- the ensemble under one system ------------------------------------------------------------------------------------------


def members_loss(func: ModuleType, model: nn.Module) -> Callable[..., Any]:
    """The gradient and the loss of every member on one batch. The code is the same for `torch.func` and for `torchfunc_jax`.

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
    return func.vmap(lambda weights, images: func.functional_call(model, weights, (images,)), in_dims=(0, None))


def learning_rates(settings: Settings, steps: int) -> Callable[[Any], Any]:
    """A function from the step to the learning rate, which falls along a cosine from the settings' rate to zero."""
    return optax.cosine_decay_schedule(settings.learning_rate, steps)


class System(Protocol):
    """An ensemble in training. Both systems start from the same weights and get the same batches."""

    name: str

    def step(self, batch: Batch) -> np.ndarray:
        """Take one step of Adam; the losses [members] before it."""

    def gradients(self, weights: Weights, batch: Batch) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Gradients and losses of members with these weights; nothing is trained."""

    def probabilities(self, images: torch.Tensor) -> np.ndarray:
        """The probabilities of each member: [members, B, 10]."""

    def weights(self) -> Weights:
        """A copy of the current weights."""


class OnJax:
    """torchfunc_jax: forward, backward, Adam and the update of all members are one compiled XLA program.

    The weights stay JAX arrays. A transformed function that gets JAX arrays is a JAX function, which `jax.jit` and optax can use.
    """

    name = "torchfunc_jax"

    def __init__(self, model: nn.Module, weights: Weights, rates: Callable[[Any], Any], device: jax.Device | None = None) -> None:
        self._device = device
        self._params = self._put(weights)
        optimizer = optax.adam(rates)
        self._state = optimizer.init(self._params)
        loss = members_loss(torchfunc_jax, model)

        def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
            grads, losses = loss(params, images, labels)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, losses

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._gradients = torchfunc_jax.jit(loss)
        self._logits = torchfunc_jax.jit(members_logits(torchfunc_jax, model))

    def _put(self, tree: Any) -> Any:
        # this copies, because the program may reuse the memory of its arguments, and torch must not see that
        return jax.tree.map(lambda t: jax.device_put(t.numpy().copy(), self._device), tree)

    def step(self, batch: Batch) -> np.ndarray:
        with compiling.correctly():
            self._params, self._state, losses = self._step(self._params, self._state, *self._put(batch))
        return np.asarray(losses)

    def gradients(self, weights: Weights, batch: Batch) -> tuple[dict[str, np.ndarray], np.ndarray]:
        grads, losses = self._gradients(self._put(weights), *self._put(batch))
        return {k: np.asarray(v) for k, v in grads.items()}, np.asarray(losses)

    def probabilities(self, images: torch.Tensor) -> np.ndarray:
        with compiling.correctly():
            return np.asarray(jax.nn.softmax(self._logits(self._params, self._put(images)), -1))

    def weights(self) -> Weights:
        return {k: torch.from_numpy(np.array(v)) for k, v in self._params.items()}


class OnTorch:
    """torch.func: PyTorch runs the same code operator by operator, with torch.optim's Adam on the stacked weights."""

    name = "torch.func"

    def __init__(self, model: nn.Module, weights: Weights, rates: Callable[[Any], Any], device: str = "cpu") -> None:
        self._device = device
        self._params = self._put({k: v.clone() for k, v in weights.items()})
        self._optimizer = torch.optim.Adam(list(self._params.values()))
        self._rates, self._taken = rates, 0
        model = model.to(device)
        self._loss, self._logits = members_loss(torch.func, model), members_logits(torch.func, model)

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

    def probabilities(self, images: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            return self._logits(self._params, self._put(images)).softmax(-1).cpu().numpy()

    def weights(self) -> Weights:
        return {k: v.detach().cpu().clone() for k, v in self._params.items()}


# ---- training both ----------------------------------------------------------------------------------------------------------


class Training:
    """A training run of one or two systems, step by step, with its losses and times.

    Args:
        settings: the settings of the run.
        digits: the data; None: `load_digits(settings.seed)`.

    Attributes:
        systems: name -> System; "torchfunc_jax", and "torch.func" if the settings compare.
        losses: name -> a list with an array [members] for each step taken.
        seconds: name -> the time of each step taken; the first step includes tracing and compiling.
        steps: the number of steps of the whole run.
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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.members = [DigitNet() for _ in range(settings.members)]
        stacked, _ = torchfunc_jax.stack_module_state(self.members)
        self.initial = {k: v.detach() for k, v in stacked.items()}
        self.device = jax.devices()[0] if settings.device is None else devices.find(settings.device)
        rates = learning_rates(settings, self.steps)
        self.systems: dict[str, System] = {"torchfunc_jax": OnJax(DigitNet(), self.initial, rates, self.device)}
        if settings.compare:
            torch_device = "cuda" if self.device.platform == "gpu" and torch.cuda.is_available() else "cpu"
            self.systems["torch.func"] = OnTorch(DigitNet(), self.initial, rates, torch_device)
        self.losses: dict[str, list[np.ndarray]] = {name: [] for name in self.systems}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.systems}
        self.interrupted = False
        self.first_batch = self.last_batch = next(batches(self.digits, settings))

    def run(self, on_step: Callable[[Training], None] = lambda _: None, stop: Callable[[], bool] = lambda: False) -> None:
        """Train to the end, or until `stop()`; the systems take turns at every step. `on_step` is called after each step."""
        for batch in batches(self.digits, self.settings):
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

    def save(self, folder: Path) -> Path:
        """Write the current members to `members.pt`, a list of state dicts for DigitNet; the file is written as a whole or not at all."""
        weights = self.systems["torchfunc_jax"].weights()
        states = [{k: v[i].clone() for k, v in weights.items()} for i in range(self.settings.members)]
        folder.mkdir(parents=True, exist_ok=True)
        path, part = folder / "members.pt", folder / "members.pt.part"
        torch.save(states, part)
        os.replace(part, path)
        return path


# ---- what came out ----------------------------------------------------------------------------------------------------------


def report(training: Training) -> dict[str, Any]:
    """The report of a run, ready for JSON: settings, machine, and for each system times, losses and test accuracies.

    With two systems it also has their largest relative differences in losses and gradients (see `difference`), and the speed-up.
    Comments below describe the keys.
    """
    settings, digits = training.settings, training.digits
    labels = digits.test_labels.numpy()
    per_epoch = steps_per_epoch(digits, settings)
    out: dict[str, Any] = {
        "settings": dataclasses.asdict(settings),
        "machine": machine(training.device),
        "interrupted": training.interrupted,
        "steps": len(training.losses["torchfunc_jax"]),
        "train_images": len(digits.train_labels),
        "test_images": len(labels),
        "parameters_per_member": sum(v[0].numel() for v in training.initial.values()),
        "systems": {},
    }
    votes = {}
    for name, system in training.systems.items():
        beliefs = system.probabilities(digits.test_images)  # [members, N, 10]
        votes[name] = beliefs.mean(0)
        correct = (beliefs.argmax(-1) == labels).mean(-1)
        losses, seconds = np.array(training.losses[name]), training.seconds[name]
        out["systems"][name] = {
            "first_step_s": seconds[0] if seconds else None,  # with tracing and compiling
            "step_ms": 1e3 * float(np.median(seconds[1:])) if len(seconds) > 1 else None,  # the median of the others
            "final_loss": float(losses[-per_epoch:].mean()) if len(losses) else None,  # over members and the last epoch's batches
            "test_accuracy": {
                "mean_member": float(correct.mean()),
                "worst_member": float(correct.min()),
                "best_member": float(correct.max()),
                "vote": float((votes[name].argmax(-1) == labels).mean()),
            },
            "calibration": calibration(votes[name], labels),
            "losses": [[float(f"{x:.7g}") for x in member] for member in losses.T],  # [members][steps]
        }
    sure = votes["torchfunc_jax"].max(-1)
    beliefs = training.systems["torchfunc_jax"].probabilities(digits.test_images)
    out["least_sure"] = [
        {
            "test_index": int(i),
            "label": int(labels[i]),
            "probability": [round(float(p), 6) for p in votes["torchfunc_jax"][i]],
            "votes": np.bincount(beliefs[:, i].argmax(-1), minlength=10).tolist(),  # members for each digit
            "pixels": [[round(float(v), 4) for v in row] for row in digits.test_images[i, 0]],
        }
        for i in np.argsort(sure)[:12]
    ]
    if settings.compare:
        ours, theirs = out["systems"]["torchfunc_jax"], out["systems"]["torch.func"]
        out["difference"] = differences(training)
        out["speed_up"] = theirs["step_ms"] / ours["step_ms"] if ours["step_ms"] else None
    return out


def differences(training: Training) -> dict[str, dict[str, float]]:
    """The differences between the two systems at the first step, at the end with the same weights, and at the end with their own weights.

    The last difference adds up the rounding errors of all steps, which training magnifies; the first two are those of one step.
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
        flat = [np.concatenate([g[k].reshape(len(our_losses), -1) for k in sorted(g)], 1) for g in (our_grads, their_grads)]
        out[name] = {"loss": difference(our_losses[:, None], their_losses[:, None]), "gradient": difference(*flat)}
    return out


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest |a - b| of a row, as a part of the largest |b| of that row; the worst row counts."""
    return float((np.abs(a - b).max(1) / np.maximum(np.abs(b).max(1), np.finfo(b.dtype).tiny)).max())


def calibration(probabilities: np.ndarray, labels: np.ndarray, bins: int = 10) -> dict[str, Any]:
    """The accuracy of the vote among digits of similar confidence.

    Args:
        probabilities: the vote's, floating-point, [N, classes].
        labels: integers, [N].
        bins: the number of bins of equal width from 0 to 1.

    Returns:
        {"confidence", "accuracy": of each bin, None for an empty one; "count"; "error": the expected calibration error,
        the mean distance of the two over all digits}.

    Source: Guo et al., On Calibration of Modern Neural Networks, 2017, https://arxiv.org/abs/1706.04599

    Example:
        >>> import numpy as np
        >>> from torchfunc_jax.examples.digits import calibration
        >>> round(calibration(np.array([[0.75, 0.25], [0.25, 0.75]]), np.array([0, 0]))["error"], 2)
        0.25
    """
    sure, right = probabilities.max(-1), probabilities.argmax(-1) == labels
    which = np.minimum((sure * bins).astype(int), bins - 1)
    count = np.bincount(which, minlength=bins)
    confidence, accuracy = np.bincount(which, sure, bins), np.bincount(which, right, bins)

    def mean(total: np.ndarray) -> list[float | None]:
        return [float(t / n) if n else None for t, n in zip(total, count, strict=True)]

    return {
        "confidence": mean(confidence),
        "accuracy": mean(accuracy),
        "count": count.tolist(),
        "error": float(np.abs(confidence - accuracy).sum() / len(labels)),
    }
