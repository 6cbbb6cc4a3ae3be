"""What compares models of other libraries with PyTorch's: it finds each difference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchfunc_jax import jit

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
import compared_models
from compared_models import Example


def network() -> Example:
    torch.manual_seed(0)
    return Example(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).eval(),
        (torch.randn(6, 4),),
    )


WRONG = {
    "a value": lambda t: torch.cat([t.flatten()[:-1], t.flatten()[-1:] * 1.01]).reshape(t.shape),
    "the scale": lambda t: t * 1.001,
    "NaN": lambda t: t * float("nan"),
    "the shape": lambda t: t[None],
}


@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize("part", ["outputs", "gradients"])
def test_the_comparison_finds_what_differs(part: str, change: str) -> None:
    ours = network()
    theirs, exact = ours.copied(), ours.in_float64()
    found = compared_models.values_of(jit(ours.model), ours)
    expected, true = (compared_models.values_of(e.model, e) for e in (theirs, exact))
    tensors = [getattr(values, part) for values in (found, expected, true)]
    assert compared_models.distance(*tensors) <= 1
    assert compared_models.relative_difference(tensors[2], tensors[2]) == 0
    for k in range(len(tensors[0])):
        wrong = [*tensors[0][:k], WRONG[change](tensors[0][k]), *tensors[0][k + 1 :]]
        assert compared_models.distance(wrong, *tensors[1:]) > 1, k
        wide = [*tensors[2][:k], WRONG[change](tensors[2][k]), *tensors[2][k + 1 :]]
        assert compared_models.relative_difference(wide, tensors[2]) > 1e-4, k
    assert compared_models.distance(tensors[0][1:], *tensors[1:]) == float("inf")


def test_zeros_are_no_comparison() -> None:
    zeros = [torch.zeros(3)]
    with pytest.raises(ValueError, match="all numbers are zero"):
        compared_models.distance(zeros, zeros, zeros)


def test_float64_is_not_compared_with_float32() -> None:
    example = network()
    outputs = compared_models.values_of(example.model, example).outputs
    wide = [t.double() for t in outputs]
    assert compared_models.relative_difference(outputs, wide) == float("inf")


def test_running_averages_are_compared() -> None:
    example = network()
    example.model.train()
    before = compared_models.values_of(example.model, example).buffers
    after = compared_models.values_of(example.model, example).buffers
    assert compared_models.relative_difference(after, before) > 0.1


def test_outputs_in_dicts_and_tuples() -> None:
    one, two = torch.ones(1), torch.ones(2)
    outputs = {"out": one, "more": (two, [one, torch.ones(3, dtype=torch.int64)]), "none": None}
    found = compared_models.floats(outputs)
    assert [t.shape for t in found] == [(1,), (2,), (1,)]
