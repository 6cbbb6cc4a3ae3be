"""A Python number in a tensor's place: bools, integers, floats and complex numbers beside tensors
of nine kinds, in both places.

Value, dtype and refusal are compared with plain PyTorch's.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchfunc_jax as tj

pytestmark = pytest.mark.sweep

_MASK = torch.tensor([True, False])
_INTS, _FLOATS = torch.tensor([1, 2]), torch.tensor([0.5, 1.5])
_TENSORS = (
    _MASK,
    _INTS.to(torch.int8),
    _INTS,
    torch.tensor(2),
    _FLOATS.bfloat16(),
    _FLOATS,
    torch.tensor(2.5),
    _FLOATS + 1j,
    torch.tensor(True),
)
_NUMBERS = (True, 3, 1.5, 1j)

_BOTH: dict[str, Callable] = {
    **{
        name: getattr(torch, name)
        for name in (
            "sub",
            "rsub",
            "add",
            "mul",
            "div",
            "true_divide",
            "floor_divide",
            "fmod",
            "remainder",
            "pow",
            "float_power",
            "xlogy",
            "gt",
            "lt",
            "ge",
            "le",
            "eq",
            "ne",
            "copysign",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "bitwise_left_shift",
            "bitwise_right_shift",
        )
    },
    **{
        name: getattr(torch.special, name)
        for name in ("xlog1py", "zeta", "chebyshev_polynomial_t", "hermite_polynomial_h")
    },
    "div floor": functools.partial(torch.div, rounding_mode="floor"),
    "div trunc": functools.partial(torch.div, rounding_mode="trunc"),
    **{
        name: lambda x, y, fn=getattr(torch, name): fn(torch.as_tensor(x), torch.as_tensor(y))
        for name in (
            "logaddexp",
            "atan2",
            "maximum",
            "fmax",
            "gcd",
            "hypot",
            "nextafter",
            "heaviside",
            "logical_and",
        )
    },
    "where": lambda x, y: torch.where(_MASK, x, y),
}
_RIGHT: dict[str, Callable] = {
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "masked_fill": lambda x, y: torch.masked_fill(x, _MASK, y),
    "fill": torch.fill,
    "lerp": lambda x, y: torch.lerp(x, x, y),
    **{
        name: lambda x, y, name=name: getattr(x.clone(), name)(y)
        for name in ("add_", "sub_", "mul_", "div_", "pow_", "fmod_", "bitwise_and_", "xlogy_")
    },
}


def _answer(run: Callable[[], torch.Tensor]) -> tuple[Any, Exception | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(), None
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return None, error


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    "kinds",
    [slice(0, None, 2), pytest.param(slice(1, None, 2), marks=pytest.mark.slow)],
    ids=["some", "others"],
)
@pytest.mark.parametrize("name", [*_BOTH, *_RIGHT])
def test_as_in_pytorch(name, kinds):
    fn, places = (_BOTH[name], (False, True)) if name in _BOTH else (_RIGHT[name], (False,))
    for x in _TENSORS[kinds]:
        for number in _NUMBERS:
            if torch.result_type(x, number) is getattr(torch, "bcomplex32", None):
                continue  # since PyTorch 2.15; JAX has no such dtype, and PyTorch hardly a kernel
            for swapped in places:
                call = (lambda t, n=number: fn(n, t)) if swapped else (lambda t, n=number: fn(t, n))
                (expected, refusal), (got, error) = (
                    _answer(lambda c=call, x=x: c(x)),
                    _answer(lambda c=call, x=x: tj.functionalize(c)(x)),
                )
                case = (
                    f"{name}, {x.dtype} of {x.dim()} dimensions, {number}, "
                    f"{'swapped' if swapped else 'in order'}"
                )
                assert (refusal is None) == (error is None), (
                    f"{case}: PyTorch {refusal or expected}, here {error or got}"
                )
                if refusal is None:
                    assert got.dtype is expected.dtype, case
                    torch.testing.assert_close(
                        got, expected, equal_nan=True, msg=lambda text, case=case: f"{case}: {text}"
                    )
