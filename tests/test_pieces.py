"""What un-jitted code remembers of a call that could not be recorded or compiled: that kind of call, and no other."""
from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from agreement import same

from bridge.process import Recent, process
from bridge.trace.levels import state
from torchfunc_jax import grad, vmap


@pytest.fixture(autouse=True)
def _nothing_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "no_pieces", {})
    monkeypatch.setattr(process, "unrecordable", set())


def test_indexing_by_a_mask_does_not_bar_indexing_by_integers(caplog: pytest.LogCaptureFixture) -> None:
    x, index = torch.randn(5), torch.tensor([0, 2])

    def at(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return x[place].square().sum()

    for _ in range(3):
        same(grad(at)(x, x > 0), torch.func.grad(at)(x, x > 0))
    with caplog.at_level(logging.INFO, "torchfunc_jax"):
        for _ in range(3):
            same(grad(at)(x, index), torch.func.grad(at)(x, index))
    assert not caplog.messages


def test_a_function_in_c_that_cannot_be_followed_bars_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError):
        vmap(torch.bincount)(torch.tensor([[1, 2], [0, 3]]))
    x: Any = torch.randn(3, 2)
    with caplog.at_level(logging.INFO, "torchfunc_jax"):
        same(vmap(torch.sin)(x), x.sin())
    assert not caplog.messages


def test_the_last_used_pieces_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that change at each call must not fill the memory."""
    monkeypatch.setattr(process, "pieces", Recent(3))
    monkeypatch.setattr(process, "operators_met", {})
    monkeypatch.setattr(state, "unrecorded", True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(x, 0) * x).exp().sum()

    for n in (2, 3, 4, 2, 3, 4):
        x = torch.randn(n)
        same(grad(f)(x), torch.func.grad(f)(x))
    assert {len(shape) for _, (shape, _), *_ in process.pieces} == {1} and len(process.pieces) == 3
