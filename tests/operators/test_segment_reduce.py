"""torch.segment_reduce beside plain PyTorch: every reduction, by lengths and by offsets, with empty
segments, NaN, ties and zeros.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import floats

import torchfunc_jax

NAN, INF = float("nan"), float("inf")
REDUCTIONS = ("sum", "mean", "max", "min", "prod")
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-9, torch.float16: 2e-2, torch.bfloat16: 2e-2}
LENGTHS = [[3, 0, 5], [8, 0, 0], [1, 1, 6]]


SPOILT = torch.tensor([1, 2, 2, NAN, 5, 0, 0, 7], dtype=torch.float64)
CASES: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "lengths": (SPOILT, {"lengths": torch.tensor([3, 0, 1, 2, 2])}),
    "lengths that end early": (SPOILT, {"lengths": torch.tensor([3, 0, 1, 1]), "unsafe": True}),
    "offsets": (SPOILT, {"offsets": torch.tensor([2, 3, 3, 5])}),
    "infinite initial value": (SPOILT, {"lengths": torch.tensor([3, 5]), "initial": -INF}),
    "initial value that is the greatest": (
        SPOILT,
        {"lengths": torch.tensor([3, 0, 1, 2, 2]), "initial": 2},
    ),
    "rows of lengths": (
        floats(3, 8, 2),
        {"lengths": torch.tensor(LENGTHS, dtype=torch.int32), "axis": 1, "initial": 0.5},
    ),
    "rows of offsets": (
        floats(2, 8),
        {"offsets": torch.tensor([[0, 2, 4, 8], [0, 0, 7, 8]]), "axis": -1},
    ),
    "no segments": (floats(3), {"offsets": torch.tensor([0])}),
    "nothing in a segment": (
        floats(2, 0, 3),
        {"lengths": torch.zeros(2, 4, dtype=torch.int64), "axis": 1},
    ),
}


@pytest.mark.thin(12)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in CASES] + [("lengths", dtype) for dtype in DTYPES],
    ids=str,
)
def test_values_and_gradients_are_pytorchs(name: str, reduction: str, dtype: torch.dtype) -> None:
    x, options = CASES[name][0].to(dtype), CASES[name][1]
    function = lambda x: torch.segment_reduce(x, reduction, **options)
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    cotangent = torch.linspace(1, 2, out.numel()).reshape(out.shape).to(dtype)
    theirs = out.detach(), torch.autograd.grad(out, leaf, cotangent)[0]

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, pull = torchfunc_jax.vjp(function, x)
        return value, pull(cotangent)[0]

    lanes = torchfunc_jax.vmap(both)(torch.stack([x, x]))
    for mine in (torchfunc_jax.jit(both)(x), tuple(y[1] for y in lanes)):
        torch.testing.assert_close(
            mine, theirs, equal_nan=True, rtol=DTYPES[dtype], atol=DTYPES[dtype]
        )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_lengths_may_be_traced(reduction: str) -> None:
    x, lengths = floats(8), torch.tensor(LENGTHS)
    function = lambda x, lengths: torch.segment_reduce(x, reduction, lengths=lengths)
    expected = torch.stack([function(x, row) for row in lengths])
    torch.testing.assert_close(
        torchfunc_jax.jit(torchfunc_jax.vmap(function, (None, 0)))(x, lengths),
        expected,
        equal_nan=True,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_forward_mode_which_pytorch_does_not_have(reduction: str) -> None:
    x, t, h = floats(8), floats(9)[:8], 1e-6
    function = lambda x: torch.segment_reduce(
        x, reduction, offsets=torch.tensor([0, 3, 3, 7]), initial=0.3
    )
    tangent = torchfunc_jax.jvp(function, (x,), (t,))[1]
    torch.testing.assert_close(
        tangent, (function(x + h * t) - function(x - h * t)) / (2 * h), rtol=1e-6, atol=1e-7
    )


def test_ties_share_whatever_the_cotangents_sign() -> None:
    """PyTorch divides positive cotangents alone, so that its gradient of -f is not that of f with
    the sign changed.
    """
    x = torch.tensor([1.0, 2, 2])
    function = lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([3])).sum()
    assert torchfunc_jax.grad(lambda x: -function(x))(x).tolist() == [0, -0.5, -0.5]
    assert torch.func.grad(function)(x).tolist() == [0, 0.5, 0.5]
    assert torch.func.grad(lambda x: -function(x))(x).tolist() == [0, -1, -1]


def test_factors_whose_product_overflows() -> None:
    """PyTorch divides the product by each factor; the product of the others is finite."""
    x = torch.tensor([1e200, 1e200], dtype=torch.float64)
    function = lambda x: torch.segment_reduce(x, "prod", lengths=torch.tensor([2])).sum()
    assert torchfunc_jax.grad(function)(x).tolist() == [1e200, 1e200]
    assert torch.func.grad(function)(x).tolist() == [INF, INF]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Either lengths or offsets must be defined"),
        ({"lengths": [2]}, "Expected all rows of lengths along axis to sum to"),
        ({"lengths": [4, -1]}, "lengths contains negative value"),
        ({"lengths": [4], "unsafe": True}, "reach beyond the 3 elements"),
        ({"lengths": [[3]]}, "Expected axis to be the last dimension of lengths"),
        ({"offsets": [0, 2, 1]}, "offsets decrease"),
        ({"offsets": []}, "expected one more than there are segments"),
        ({"lengths": [1.5, 1.5]}, "expected dtype int32 or int64"),
        ({"indices": [0, 0, 1]}, "indices based reduction is not supported yet"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        made = {
            k: torch.tensor(v, dtype=None if v else torch.int64) if isinstance(v, list) else v
            for k, v in options.items()
        }
        return torch.segment_reduce(x, "sum", **made)

    with pytest.raises(RuntimeError, match=message):
        torchfunc_jax.jit(function)(torch.ones(3))
