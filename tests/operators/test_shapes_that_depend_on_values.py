"""Operators whose results have a shape that depends on values, under vmap: as plain PyTorch lane by
lane; under jit an error.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torchfunc_jax as tf
from bridge.errors import DataDependentError
from torchfunc_jax.testing import assert_parity

X = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 4.0]])
REPEATS = torch.tensor([[1, 2, 1], [2, 1, 1]])

CASES = {
    "argwhere": (lambda x: torch.argwhere(x), (X,)),
    "argwhere, method": (lambda x: x.argwhere(), (X,)),
    "argwhere of what was computed": (lambda x: torch.argwhere(x.sin().abs() > 0.01), (X,)),
    "repeat_interleave": (torch.repeat_interleave, (X, REPEATS)),
    "repeat_interleave of numbers": (lambda r: torch.repeat_interleave(r), (REPEATS,)),
    "repeat_interleave along a dimension": (
        lambda x, r: torch.repeat_interleave(x.outer(x), r, dim=1).exp(),
        (X, REPEATS),
    ),
    "bincount": (lambda i: torch.bincount(i), (torch.tensor([[1, 2], [0, 2]]),)),
    "bincount with weights": (
        lambda i, w: torch.bincount(i, w, minlength=2),
        (torch.tensor([[1, 3], [3, 2]]), X[:, :2]),
    ),
    "gradient through repeat_interleave": (
        torch.func.grad(lambda x, r: (torch.repeat_interleave(x, r) ** 3).sum()),
        (X, REPEATS),
    ),
}


def lane_by_lane(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What torch.func.vmap gives; torch 2.14's refuses repeat_interleave by a tensor."""
    return lambda *args: torch.stack([f(*lane) for lane in zip(*args, strict=True)])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("depth", [1, 2])
def test_agrees_with_a_loop(name: str, depth: int) -> None:
    f, args = CASES[name]
    got, truth = tf.vmap(f), lane_by_lane(f)
    if depth == 2:
        got, truth, args = (
            tf.vmap(got),
            lane_by_lane(truth),
            tuple(torch.stack([a, a.flip(0)]) for a in args),
        )
    if "repeat_interleave" in name and torch.__version__ >= (2, 14):
        with pytest.raises(RuntimeError, match="output_size"):
            got(*args)
        return
    torch.testing.assert_close(got(*args), truth(*args))


@pytest.mark.parametrize("name", [n for n in CASES if n != "gradient through repeat_interleave"])
def test_jit_says_that_the_shape_is_not_known(name: str) -> None:
    f, args = CASES[name]
    with pytest.raises(DataDependentError, match="output of dynamic shape"):
        tf.jit(f)(*[a[0] for a in args])
    with pytest.raises(DataDependentError, match="output of dynamic shape"):
        tf.jit(tf.vmap(f))(*args)


@pytest.mark.parametrize(
    "name, args",
    {
        "repeat_interleave": (X, torch.tensor([[1, 2, 1], [1, 1, 1]])),
        "argwhere": (torch.tensor([[1.0, 0.0], [0.0, 0.0]]),),
        "bincount": (torch.tensor([[1, 2], [0, 1]]),),
    }.items(),
)
def test_lanes_of_different_shapes(name: str, args: tuple[torch.Tensor, ...]) -> None:
    assert_parity(CASES[name][0], *args, transforms=["vmap"], jit=False, raises=RuntimeError)
    with pytest.raises(
        RuntimeError, match=r"stack expects each tensor to be equal size|output_size"
    ):
        tf.vmap(CASES[name][0])(*args)


def test_nothing_to_loop_over() -> None:
    for T in (torch.func, tf, tf):
        with pytest.raises(
            RuntimeError, match="The fallback path does not support vmap over dims of size 0"
        ):
            T.vmap(torch.bincount)(torch.empty(0, 3, dtype=torch.int64))
