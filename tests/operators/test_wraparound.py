"""Python numbers beside tensors of whole numbers and of bools: what wraps around, what is refused,
as PyTorch does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torchfunc_jax

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
VALUES, OTHERS = torch.tensor([[1, 2, 250], [7, 0, 128]]), torch.tensor([[3, 1, 4], [1, 5, 9]])
INDEX = torch.tensor([0, 1, 0])
CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + -1,
    "add, alpha": lambda x, y: torch.add(x, y, alpha=-1),
    "add of a large number": lambda x, y: x + 300,
    "sub": lambda x, y: x - 1,
    "sub of tensors": lambda x, y: x - y,
    "rsub": lambda x, y: 3 - x,
    "mul": lambda x, y: x * -2,
    "div": lambda x, y: x / -2,
    "floor division": lambda x, y: torch.div(x, -2, rounding_mode="floor"),
    "remainder": lambda x, y: x % -3,
    "fmod": lambda x, y: torch.fmod(x, -3),
    "and": lambda x, y: x & -2,
    "shift": lambda x, y: x << 9,
    "pow": lambda x, y: x**3,
    "rpow": lambda x, y: (-2) ** x,
    "equal to a number it cannot hold": lambda x, y: x == 257,
    "less than a negative number": lambda x, y: x < -1,
    "where": lambda x, y: torch.where(x > 5, x, -1),
    "clamp": lambda x, y: x.clamp(-1, 7),
    "clamp_max": lambda x, y: x.clamp_max(-1),
    "clamp_max of a large number": lambda x, y: x.clamp_max(300),
    "clamp_min of a large number": lambda x, y: x.clamp_min(300),
    "clamp by numbers that bound nothing": lambda x, y: x.clamp(-300, 2**40),
    "clamp by numbers that bound all": lambda x, y: x.clamp(-400, -300),
    "clamp_min of an empty tensor": lambda x, y: x[:0].clamp_min(300),
    "foreach clamp_max": lambda x, y: torch._foreach_clamp_max([x], 300)[0],
    "hardtanh": lambda x, y: F.hardtanh(x, -1, 1),
    "hardtanh of large numbers": lambda x, y: F.hardtanh(x, -300, 300),
    "threshold": lambda x, y: F.threshold(x, 5, -1),
    "fill_": lambda x, y: x.clone().fill_(-1),
    "full_like": lambda x, y: torch.full_like(x, -1),
    "full_like of a float": lambda x, y: torch.full_like(x, -1.0),
    "fill_diagonal_": lambda x, y: x.clone().fill_diagonal_(-1),
    "masked_fill": lambda x, y: x.masked_fill(x > 5, -1),
    "index_add": lambda x, y: x.index_add(1, INDEX, y, alpha=-1),
    "index_fill": lambda x, y: x.index_fill(1, INDEX, -1),
    "scatter": lambda x, y: x.scatter(1, INDEX[:2, None], -1),
    "pad": lambda x, y: F.pad(x, (1, 1), value=-1),
    "pad of a large number": lambda x, y: F.pad(x, (1, 1), value=300),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=-1),
    "addmm": lambda x, y: torch.addmm(x, y, y.new_ones(3, 3), alpha=-1, beta=2),
    "addr": lambda x, y: torch.addr(x, y[:, 0], y[0], alpha=-1),
    "negative": lambda x, y: -x,
    "sum in its own dtype": lambda x, y: x.sum(1, dtype=x.dtype),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_numbers_wrap_or_are_refused_as_in_pytorch(name: str, dtype: torch.dtype) -> None:
    f, args = CASES[name], (VALUES.to(dtype), OTHERS.to(dtype))
    lanes = torchfunc_jax.vmap(lambda x: f(x, args[1]))
    try:
        truth = f(*args)
    except RuntimeError:
        for refused in (lambda: torchfunc_jax.jit(f)(*args), lambda: lanes(args[0][None])):
            with pytest.raises(RuntimeError):
                refused()
        return
    for got in (torchfunc_jax.jit(f)(*args), lanes(args[0][None])[0]):
        assert got.dtype == truth.dtype
        assert torch.equal(got, truth)


FLOATS = (
    250.0,
    -1.0,
    300.0,
    -129.0,
    40000.0,
    -40000.0,
    3e9,
    -3e9,
    1e19,
    2147483647.0,
    -(2.0**31),
    0.9,
    -2.5,
    float("inf"),
    float("nan"),
)


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize(
    "source", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_floats_that_do_not_fit(source: torch.dtype, to: torch.dtype) -> None:
    """C leaves open what they become; PyTorch's code for x86 does not."""
    x = torch.tensor(FLOATS, dtype=source)
    for f in (lambda x: x.to(to), lambda x: torch.zeros(len(FLOATS), dtype=to).copy_(x)):
        truth = f(x)
        assert torch.equal(torchfunc_jax.jit(f)(x), truth)
        assert torch.equal(torchfunc_jax.vmap(f)(x[None])[0], truth)


@pytest.mark.parametrize("reduce", [torch.sum, torch.prod])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.uint8, torch.bool, torch.complex64], ids=str
)
def test_reductions_to_bool(reduce: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 2, 0], [0, 0, 0], [3, 3, 256]]).to(dtype)
    for kwargs in ({}, {"dim": 1}, {"dim": 1, "keepdim": True}):
        f = lambda x, kwargs=kwargs: reduce(x, dtype=torch.bool, **kwargs)
        assert torch.equal(torchfunc_jax.jit(f)(x), f(x))
