"""Every dtype cast to every other at its edges, and every way to cast, beside PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import torchfunc_jax

_FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
_FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, *_FLOAT8]
_INTEGERS = [getattr(torch, f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)]
_DTYPES = [*_FLOATS, *_INTEGERS, torch.bool, torch.complex64, torch.complex128]

_EDGES = [
    240, 248, 256, 448, 464, 465, 480, 500, 57344, 61440, 61441, 65504, 65519, 65520, 65536, 1e5,
    1e10, 3.4e38, 3.5e38, 1e39, 1e300,
]  # fmt: skip
# halfway between narrow numbers, and denormal
_EDGES += [m * 2.0**e for e in range(-30, 3) for m in (1, 1.0625, 1.125, 1.1875, 1.25, 1.5)]
_REALS = [0.0, -0.0, math.nan, math.inf, -math.inf, *_EDGES, *(-x for x in _EDGES)]
_WHOLE = [
    0, 1, -1, 127, 128, 255, 256, 448, 449, 464, 465, 500, 32767, 57344, 61440, 65504, 65520, 2**24
    + 1, 2**31, -(2**31), 2**53 + 1,
]  # fmt: skip


def _edges(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a dtype; none is denormal in float32 or wider, because XLA's programs for CPUs
    take those for zeros.
    """
    if dtype is torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point or dtype.is_complex:
        info = torch.finfo(dtype)
        return torch.tensor(
            [*_REALS, info.max, info.min, info.tiny, info.eps, 1 + info.eps], dtype=torch.float64
        ).to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor(
        [v for v in (*_WHOLE, info.max, info.max - 1, info.min) if info.min <= v <= info.max],
        dtype=dtype,
    )


def _defined(x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Where a cast is defined in C++, in which that of a float to an integer type in which it does
    not fit is not; and nothing denormal.
    """
    x = x.real if x.is_complex() else x
    if not x.is_floating_point():
        return torch.ones(len(x), dtype=torch.bool)
    wide = x.double()
    if to in _INTEGERS:
        return (wide > torch.iinfo(to).min - 1.0) & (wide < torch.iinfo(to).max + 1.0)
    return (wide == 0) | ~(wide.abs() < torch.finfo(torch.float32).tiny) | (x.dtype in _FLOAT8)


def _same(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where two tensors have the same numbers, with their signs; a NaN is like every other."""
    assert found.dtype is expected.dtype
    if found.is_complex():
        return _same(found.real, expected.real) & _same(found.imag, expected.imag)
    if not found.is_floating_point():
        return found == expected
    a, b = found.double(), expected.double()
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "vmap"])
@pytest.mark.parametrize("source", _DTYPES, ids=lambda d: str(d)[6:])
def test_every_dtype_to_every_other(source: torch.dtype, jitted: bool) -> None:
    x = _edges(source)
    casts = lambda x: [x.to(d) for d in _DTYPES]
    found = (torchfunc_jax.jit if jitted else torchfunc_jax.vmap)(casts)(x)
    wrong = []
    for to, got, expected in zip(_DTYPES, found, casts(x), strict=True):
        bad = ~_same(got, expected) & _defined(x, to)
        wrong += [
            f"{x[k].item()} to {to}: expected {expected[k].item()}, got {got[k].item()}"
            for k in bad.nonzero()[:, 0].tolist()[:3]
        ]
    assert not wrong, "\n".join(wrong)


def _set(x: torch.Tensor, d: torch.dtype) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=d)
    y[:] = x
    return y


_WAYS: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "to": lambda x, d: x.to(d),
    "to like another": lambda x, d: x.to(torch.zeros(1, dtype=d)),
    "type": lambda x, d: x.type(d),
    "type_as": lambda x, d: x.type_as(torch.zeros(1, dtype=d)),
    "copy_": lambda x, d: torch.zeros(x.shape, dtype=d).copy_(x),
    "setitem": _set,
    "_to_copy": lambda x, d: torch.ops.aten._to_copy(x, dtype=d),
    "empty_like": lambda x, d: torch.empty_like(x, dtype=d).copy_(x),
    "full": lambda x, d: torch.full((3,), 500.0, dtype=d),
    "full of an infinity": lambda x, d: torch.full((3,), -math.inf, dtype=d),
    "full_like": lambda x, d: torch.full_like(x, 500, dtype=d),
    "new_full": lambda x, d: x.new_full((2,), -500.0, dtype=d),
    "fill_": lambda x, d: torch.zeros(3, dtype=d).fill_(500.0),
    "tensor": lambda x, d: torch.tensor([500.0, -math.inf, math.nan, 0.1], dtype=d),
    "scalar_tensor": lambda x, d: torch.scalar_tensor(1e9, dtype=d),
    "as_tensor": lambda x, d: torch.as_tensor(x, dtype=d),
    "in a loop": lambda x, d: x.to(d).float().to(d),
}


@pytest.mark.parametrize("to", _FLOAT8, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("way", _WAYS)
def test_every_way_to_cast_to_eight_bits(way: str, to: torch.dtype) -> None:
    x = _edges(torch.float32)
    x = x[_defined(x, torch.float32)]
    cast = _WAYS[way]
    try:
        expected = cast(x, to)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"PyTorch: {error}")
    for found in (
        torchfunc_jax.jit(cast)(x, to),
        torchfunc_jax.vmap(lambda x: cast(x, to))(x[None])[0],
    ):
        assert _same(found, expected).all()


def test_a_gradient_goes_through_where_a_cast_saturates() -> None:
    x = torch.tensor([1.0, 500.0, -1e9])
    loss = lambda x: (x.to(torch.float8_e4m3fn).float() * 3).sum()
    assert torch.equal(torchfunc_jax.jit(torchfunc_jax.grad(loss))(x), torch.func.grad(loss)(x))
