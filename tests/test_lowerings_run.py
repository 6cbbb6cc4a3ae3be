"""Every overload that has a lowering is run, on its own and un-jitted, and compared with PyTorch's CPU kernel of the same overload."""
from __future__ import annotations

import json
from typing import Any

import jax
import lowerings
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from bridge import dtypes, tensors, tracing
from bridge.lowering.registry import LOWERINGS

PLACES: dict[str, list[Any]] = json.loads(lowerings.PLACES.read_text())
RUN = [f for f in LOWERINGS if f in lowerings.CASES or str(f) in PLACES]


def as_jax(tree: Any) -> Any:
    return pytree.tree_map(lambda x: tensors.to_jax(x) if isinstance(x, torch.Tensor) else x, tree)


def arrays(tree: Any) -> list[Any]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor | jax.Array | np.ndarray)]


def by_chance(func: Any) -> bool:
    """Whether the values are random, or what happened to be in memory."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in str(func)


@pytest.mark.slow
@pytest.mark.parametrize("func", RUN, ids=str)
def test_as_the_kernel(func: Any) -> None:
    args, kwargs = lowerings.CASES[func]() if func in lowerings.CASES else lowerings.call_of(func, PLACES[str(func)])
    with tracing.root():
        mine = arrays(LOWERINGS[func](*as_jax(args), **as_jax(kwargs)))
        mine = [np.asarray(x) for x in mine]
    theirs = arrays(func(*args, **kwargs))
    assert len(mine) >= len(theirs)
    for m, t in zip(mine, theirs, strict=False):
        assert m.shape == tuple(t.shape)
        assert dtypes.to_torch(m.dtype) == t.dtype
        if not by_chance(func):
            torch.testing.assert_close(torch.from_numpy(np.array(m)).to(t.dtype), t.detach(), rtol=1e-3, atol=1e-4, equal_nan=True)
