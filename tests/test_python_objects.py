"""What a function does to Python objects, it does at each call, under jit as without: beside PyTorch and torch.func."""
from __future__ import annotations

import pytest
import torch
import torch.func
from python_objects import KINDS, REACHED, WAYS, outcome

import torchfunc_jax
from torchfunc_jax import jit


def same(mine: object, theirs: object) -> bool:
    if isinstance(theirs, torch.Tensor):
        return isinstance(mine, torch.Tensor) and mine.requires_grad == theirs.requires_grad and torch.allclose(mine, theirs)
    if isinstance(theirs, list | tuple):
        return type(mine) is type(theirs) and len(mine) == len(theirs) and all(map(same, mine, theirs))
    return type(mine) is type(theirs) and mine == theirs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_table(kind: str, reached: str, way: str) -> None:
    if reached == "an argument" and kind in ("a set", "a NumPy array"):
        with pytest.raises((TypeError, ValueError)):
            outcome(torchfunc_jax, jit, kind, reached, next(iter(KINDS[kind][1])), "jit")
        return
    for action in KINDS[kind][1]:
        theirs = outcome(torch.func, None, kind, reached, action, way)
        mine = outcome(torchfunc_jax, jit, kind, reached, action, way)
        assert same(mine, theirs), action
