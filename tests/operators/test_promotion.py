"""Which dtype operands promote to: torch.result_type's answer, for tensors and for JAX arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from bridge.convert import dtypes

_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
_TENSORS = [torch.ones(shape, dtype=dtype) for dtype in _DTYPES for shape in ((2,), ())]
_OPERANDS = [*_TENSORS, True, 2, 2.5, 1j]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def _array(x):
    return np.ones(x.shape, dtypes.to_jax(x.dtype)) if isinstance(x, torch.Tensor) else x


def _expected(a, b):
    """torch.result_type's, complex64 for complex32, and bcomplex32 of torch 2.15,
    which JAX lacks.
    """
    dtype = torch.result_type(a, b)
    return (
        torch.complex64 if dtype in (torch.complex32, getattr(torch, "bcomplex32", None)) else dtype
    )


def test_every_pair(default_dtype):
    for a, b in [*itertools.product(_TENSORS, _OPERANDS), *itertools.product(_OPERANDS, _TENSORS)]:
        expected = _expected(a, b)
        assert dtypes.promoted([a, b]) is expected, (a, b)
        assert dtypes.promoted([_array(a), None, _array(b)]) is expected, (a, b)


def test_a_scalar_and_a_number_count_as_one_scalar(default_dtype):
    """PyTorch looks at no more than two; where both are of a lower class, as one of their common
    dtype.
    """
    for a, b, n in itertools.product(_TENSORS[::2], _TENSORS[1::2], (True, 2, 2.5)):
        assert dtypes.promoted([a, b, n]) is _expected(
            a, torch.tensor(0, dtype=torch.result_type(b, n))
        ), (a, b, n)


def test_nothing_to_promote():
    with pytest.raises(TypeError, match="at least one"):
        dtypes.promoted([None])
