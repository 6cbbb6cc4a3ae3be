"""What un-jitted code remembers of an operator that could not be compiled as one piece: that use, and no other."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import same

from bridge import eager
from torchfunc_jax import grad, vmap


@pytest.fixture(autouse=True)
def _nothing_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_never", {})
    monkeypatch.setattr(eager, "_untapeable", set())


def test_indexing_by_a_mask_does_not_bar_indexing_by_integers() -> None:
    x, index = torch.randn(5), torch.tensor([0, 2])

    def by_integers(x: torch.Tensor) -> torch.Tensor:
        return x[index].square().sum()

    expected = torch.func.grad(by_integers)(x)
    for _ in range(3):
        grad(lambda x: x[x > 0].sum())(x)
        same(grad(by_integers)(x), expected)
    assert by_integers.__code__ not in eager._untapeable


def test_a_function_in_c_that_cannot_be_followed_bars_no_other() -> None:
    with pytest.raises(RuntimeError):
        vmap(torch.bincount)(torch.tensor([[1, 2], [0, 3]]))
    x: Any = torch.randn(3, 2)
    same(vmap(torch.sin)(x), x.sin())
    assert torch.sin not in eager._untapeable
