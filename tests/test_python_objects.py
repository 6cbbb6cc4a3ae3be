"""What a function does to Python objects, it does at each call, under jit as without: beside PyTorch and torch.func."""
from __future__ import annotations

import pytest
import torch
import torch.func
from python_objects import KINDS, REACHED, WAYS, outcome, same

import torchfunc_jax
from torchfunc_jax import jit

UNHASHABLE = ("a set", "a NumPy array", "a dataclass", "a namespace")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_table(kind: str, reached: str, way: str) -> None:
    if reached == "an argument" and WAYS[way][1] and kind in UNHASHABLE:
        with pytest.raises(TypeError, match="every argument that is no tensor must be hashable"):
            outcome(torchfunc_jax, jit, kind, reached, next(iter(KINDS[kind][1])), way)
        return
    for action in KINDS[kind][1]:
        theirs = outcome(torch.func, None, kind, reached, action, way)
        mine = outcome(torchfunc_jax, jit, kind, reached, action, way)
        assert same(mine, theirs), action
