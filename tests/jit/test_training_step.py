"""A training step trains as torch.optim does: as a module, under jit, and exported, where torch
cannot be imported.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from test_export import BLOCKED
from torch import nn

from torchfunc_jax import export, jit
from torchfunc_jax.training_step import TrainingStep

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "train_exported.py"
STEPS = 50


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def regressor() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1))
    module[2].requires_grad_(False)
    return module


def cross_entropy(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x), y)


def squares(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(module(x)[:, 0], y / 4)


class Case(NamedTuple):
    """A module, a loss, our optimizer with its numbers, and torch's."""

    module: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    optimizer: Any
    numbers: dict[str, Any]
    theirs: Callable[[Any], torch.optim.Optimizer]


OPTAX_SGD = "optax's sgd, made of numbers"
CASES = {
    "sgd with momentum": Case(
        classifier,
        cross_entropy,
        "sgd",
        {"lr": 0.1, "momentum": 0.9},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
    "adam": Case(regressor, squares, "adam", {"lr": 0.01}, lambda p: torch.optim.Adam(p, lr=0.01)),
    "optax's adam": Case(
        classifier, cross_entropy, optax.adam(0.01), {}, lambda p: torch.optim.Adam(p, lr=0.01)
    ),
    OPTAX_SGD: Case(
        regressor,
        squares,
        optax.sgd,
        {"learning_rate": 0.1, "momentum": 0.9},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
}


def made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.module()


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(STEPS, 16, 3)
    return x, (x @ torch.randn(3, 4)).argmax(-1)


def expected(case: Case) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """torch's losses, and its tensors after the last step."""
    module = made(case)
    optimizer, losses = case.theirs([p for p in module.parameters() if p.requires_grad]), []
    for batch in zip(*batches(), strict=True):
        loss = case.loss(module, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().item())
    assert losses[-1] < losses[0]
    return np.array(losses), module.state_dict()


@pytest.mark.parametrize("way", ["as it is", "jit"])
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_torch_does(name: str, way: str) -> None:
    case = CASES[name]
    losses, after = expected(case)
    step = TrainingStep(made(case), case.loss, case.optimizer, **case.numbers)
    call = jit(step) if way == "jit" else step
    found = [float(call(*batch)) for batch in zip(*batches(), strict=True)]
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-5)
    for key, t in step.module.state_dict().items():
        torch.testing.assert_close(t, after[key], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    importlib.util.find_spec("flatbuffers") is None,
    reason="jax.export writes files with flatbuffers",
)
@pytest.mark.parametrize(
    "name",
    [
        "optax's adam",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("sgd with momentum", "adam", OPTAX_SGD)
        ),
    ],
)
def test_exported_it_trains_without_torch(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    losses, after = expected(case)
    xs, ys = batches()
    # of another batch size
    exported = export(
        TrainingStep(made(case), case.loss, case.optimizer, **case.numbers), xs[0, :5], ys[0, :5]
    )
    exported.save(tmp_path / "step")
    (tmp_path / "train.py").write_text(BLOCKED + SCRIPT.read_text())
    found: list[float] = []
    # a second run goes on
    for part in (slice(30), slice(30, None)) if name == "sgd with momentum" else (slice(None),):
        np.savez(tmp_path / "data.npz", x0=xs[part], x1=ys[part])
        done = subprocess.run(
            [sys.executable, "train.py", "step", "data.npz"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not done.returncode, done.stderr
        found += map(float, done.stdout.split())
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-5)
    weights = np.load(tmp_path / "step" / "weights.npz")
    for key, t in after.items():
        np.testing.assert_allclose(weights[f"module.{key}"], t, rtol=1e-4, atol=1e-4)
    back = TrainingStep(made(case), case.loss, case.optimizer, **case.numbers)
    back.load_state_dict({key: torch.from_numpy(weights[key]) for key in weights.files})
    torch.testing.assert_close(back.module.state_dict(), after, rtol=1e-4, atol=1e-4)


def test_a_state_dict_goes_on_where_it_was() -> None:
    case = CASES["adam"]
    one, two = (
        TrainingStep(made(case), case.loss, case.optimizer, **case.numbers) for _ in range(2)
    )
    given = list(zip(*batches(), strict=True))
    for batch in given[:5]:
        one(*batch)
    two.load_state_dict(one.state_dict())
    assert float(one(*given[5])) == float(two(*given[5])) and float(one(*given[6])) == float(
        two(*given[6])
    )


def test_dropout_draws_from_the_seed() -> None:
    step = TrainingStep(
        nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)), squares, "sgd", lr=0.1
    )
    x, y = (t[0] for t in batches())
    exported = export(step, x, y.int(), batch=None)
    call = jax.jit(exported.program.call)
    losses = [
        float(call(exported.weights, x.numpy(), y.int().numpy(), seed=np.uint32(k))[0])
        for k in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: TrainingStep(nn.Linear(3, 1), squares, "lion"),
            ValueError,
            "optimizer: expected one of adadelta",
        ),
        (
            lambda: TrainingStep(nn.Linear(3, 1), squares, "adam", momentum=0.9),
            TypeError,
            "'adam' has no 'momentum'",
        ),
        (
            lambda: TrainingStep(nn.Tanh(), squares),
            ValueError,
            "module: expected a parameter that requires grad",
        ),
    ],
)
def test_what_cannot_be_trained(
    make: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()
