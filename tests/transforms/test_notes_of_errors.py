"""The notes of errors say what helps: not jit, which refuses to ask a vmapped tensor for its
values, as torch.func does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from torchfunc_jax import grad, jit, vmap

CASES: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item()": (lambda x: x * x.item(), "Keep it a tensor"),
    "float()": (lambda x: x * math.sin(x), "Keep it a tensor"),
    "a branch": (lambda x: x if x > 0 else -x, "torch.where"),
    "tolist()": (lambda x: x * x.tolist(), "NumPy"),
    "a dynamic shape": (lambda x: x.nonzero(), "mask"),
}


@pytest.mark.parametrize("inner", [lambda f: f, grad], ids=["vmap", "vmap of grad"])
@pytest.mark.parametrize("name", CASES)
def test_what_helps_is_said_and_jit_is_not(
    name: str, inner: Callable[..., Callable[..., object]]
) -> None:
    f, helps = CASES[name]
    with pytest.raises(RuntimeError) as theirs:
        torch.func.vmap(f)(torch.ones(3))
    with pytest.raises(RuntimeError) as ours:
        vmap(inner(f))(torch.ones(3))
    notes = getattr(ours.value, "__notes__", [])
    assert [note for note in notes if helps in note], notes
    assert not [note for note in notes if "jit" in note], notes
    with pytest.raises(type(theirs.value)):
        jit(vmap(inner(f)))(torch.ones(3))
