"""Errors that leave torchfunc_jax.ensemble: no frame of this library is in them, and the last line
is the user's.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bridge
import torchfunc_jax
from torchfunc_jax.ensemble import (
    Classification,
    Ensemble,
    Trainer,
    dry_run,
    exploit,
    fit_temperature,
    metrics,
    predict,
)

OF_US = tuple(str(Path(package.__file__).parent) for package in (bridge, torchfunc_jax))
DATA = torch.ones(8, 3), torch.ones(8, 2)


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFUNC_JAX_TRACEBACK", raising=False)  # the tests have whole tracebacks


def members() -> Ensemble:
    return Ensemble(lambda: nn.Linear(3, 2), n=2)


def trainer(loss: Callable[..., Any] = F.mse_loss) -> Trainer:
    return Trainer(members(), loss, lr=0.1)


def wrong(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (predictions @ targets).sum()


def on_mesh(n: int, mesh: Any) -> Trainer:
    return Trainer(Ensemble(lambda: nn.Linear(3, 2), n, mesh=mesh), wrong)


#: a call -> the class of its error, and the function whose line is the last, None for one of
#: PyTorch's
CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str | None]] = {
    "a member that is no module": (lambda: Ensemble(lambda: 1, n=2), TypeError, "<lambda>"),  # type: ignore[arg-type,return-value]
    "a module in the place of a function": (
        lambda: Ensemble(nn.Linear(3, 2), n=2),
        TypeError,
        "<lambda>",
    ),
    "no members": (lambda: Ensemble(lambda: nn.Linear(3, 2), n=0), ValueError, "<lambda>"),
    "a member that is not there": (lambda: members()[5], IndexError, "<lambda>"),
    "members of two architectures": (
        lambda: Ensemble.of([nn.Linear(3, 2), nn.Linear(3, 1)]),
        ValueError,
        "<lambda>",
    ),
    "inputs of another width": (lambda: members().logits(torch.ones(5, 4)), RuntimeError, None),
    "another optimizer": (
        lambda: Trainer(members(), F.mse_loss, optimizer="none"),
        ValueError,
        "<lambda>",
    ),
    "a loss that raises, in fit": (lambda: trainer(wrong).fit(DATA), RuntimeError, "wrong"),
    "a loss that raises, in step": (lambda: trainer(wrong).step(*DATA), RuntimeError, "wrong"),
    "a loss that raises, in losses": (lambda: trainer(wrong).losses(*DATA), RuntimeError, "wrong"),
    "a loss that raises, in dry_run": (
        lambda: dry_run(on_mesh, 4, DATA, {"member": 2}),
        RuntimeError,
        "wrong",
    ),
    "data of two lengths": (
        lambda: trainer().fit((torch.ones(8, 3), torch.ones(7, 2))),
        ValueError,
        "<lambda>",
    ),
    "data of another width": (
        lambda: trainer().fit((torch.ones(8, 4), DATA[1])),
        RuntimeError,
        None,
    ),
    "a snapshot that is not kept": (lambda: trainer().snapshot("best"), ValueError, "<lambda>"),
    "scores of too few": (lambda: exploit(trainer(), torch.ones(1)), ValueError, "<lambda>"),
    "labels that are no classes": (
        lambda: metrics.accuracy(torch.ones(2, 3), torch.tensor([0, 7])),
        ValueError,
        "<lambda>",
    ),
    "labels of too few": (
        lambda: fit_temperature(torch.ones(4, 3), torch.zeros(3, dtype=torch.int64)),
        ValueError,
        "<lambda>",
    ),
    "a temperature of 0": (
        lambda: Classification.of(torch.ones(2, 4, 3), temperature=0.0),
        ValueError,
        "<lambda>",
    ),
    "predictions of inputs of another width": (
        lambda: predict(members(), torch.ones(5, 4)),
        RuntimeError,
        None,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_traceback_has_no_frame_of_ours_and_ends_in_the_users_code(name: str) -> None:
    call, kind, last = CALLS[name]
    with pytest.raises(kind) as found:
        call()
    error: BaseException | None = found.value
    frames = traceback.extract_tb(error.__traceback__)
    assert (
        "/torch/nn/" in frames[-1].filename
        if last is None
        else (frames[-1].filename, frames[-1].name) == (__file__, last)
    )
    while error is not None:
        assert not [
            f.filename
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename.startswith(OF_US)
        ]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_all_frames_are_there_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFUNC_JAX_TRACEBACK", "full")
    with pytest.raises(ValueError) as found:
        trainer().snapshot("best")
    assert [
        f for f in traceback.extract_tb(found.value.__traceback__) if f.filename.startswith(OF_US)
    ]


def test_methods_keep_their_names_and_documentation() -> None:
    assert Trainer.fit.__qualname__ == "Trainer.fit" and "passes over the data" in (
        Trainer.fit.__doc__ or ""
    )
    assert Ensemble.of([nn.Linear(3, 2)])[0].weight.shape == (2, 3)
