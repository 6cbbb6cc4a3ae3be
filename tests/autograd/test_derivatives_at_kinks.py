"""Derivatives at special values (kinks, ties, zeros of both signs, infinities, NaN, bounds):
torch.func's reverse mode, in every mode.

torch.func's forward mode has other values than its reverse mode at some kinks, and NaN in second
derivatives where it multiplies 0 by an infinity; ours has one value in all modes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numpy import polynomial
from torch import linalg, special

import torchfunc_jax

_NAN, _INF = math.nan, math.inf
_VALUES = [_NAN, _INF, -_INF, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0]
_TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-7, torch.bfloat16: 5e-2}


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([a, b], -1)


#: functions of one tensor, with further values at which they are special
_ONE: dict[str, tuple[Callable, list[float]]] = {
    **{
        name: (getattr(torch, name), [])
        for name in (
            "abs",
            "sign",
            "sgn",
            "sqrt",
            "rsqrt",
            "exp",
            "expm1",
            "log",
            "log2",
            "log10",
            "log1p",
            "tan",
            "asin",
            "acos",
            "atan",
            "sinh",
            "cosh",
            "tanh",
            "asinh",
            "acosh",
            "atanh",
            "reciprocal",
            "relu",
            "sigmoid",
            "square",
            "floor",
            "round",
            "trunc",
            "frac",
            "erf",
            "erfinv",
            "lgamma",
            "nan_to_num",
            "logit",
        )
    },
    **{
        name: (getattr(F, name), [6.0, -6.0, 20.0, 21.0])
        for name in (
            "hardsigmoid",
            "hardswish",
            "hardtanh",
            "relu6",
            "leaky_relu",
            "elu",
            "selu",
            "celu",
            "gelu",
            "silu",
            "mish",
            "softplus",
            "softsign",
            "tanhshrink",
            "hardshrink",
            "softshrink",
            "logsigmoid",
        )
    },
    **{
        f"pow {p}": (lambda x, p=p: x**p, [])
        for p in (0, 1, 2, 3, -1, -2, 0.5, -0.5, 1.5, 2.5, _INF, _NAN)
    },
    **{f"power of {b}": (lambda x, b=b: b**x, []) for b in (0.0, 1.0, 2.0, -2.0)},
    **{
        f"norm {p}": (lambda x, p=p: linalg.vector_norm(_pair(x, x), p, -1), [])
        for p in (0, 0.5, 1, 1.5, 2, 3, _INF, -_INF, -1)
    },
    "softplus of a low threshold": (lambda x: F.softplus(x, 2, 1), []),
    "threshold": (lambda x: F.threshold(x, 1.0, 5.0), []),
    "clamp": (lambda x: x.clamp(-1, 1), []),
    "clamp_min": (lambda x: x.clamp(min=0), []),
    "clamp between tensors": (lambda x: x.clamp(torch.full_like(x, -1), torch.full_like(x, 1)), []),
    "clamp by NaN": (lambda x: x.clamp(torch.full_like(x, _NAN), torch.full_like(x, 1)), []),
    "where of a logarithm": (lambda x: torch.where(x > 0, x.log(), torch.zeros_like(x)), []),
    "masked_fill with -inf": (lambda x: x.masked_fill(x > 0, -_INF), []),
    "xlogy of zero": (lambda x: torch.xlogy(torch.zeros_like(x), x), []),
    "xlogy by zero": (lambda x: torch.xlogy(x, torch.zeros_like(x)), []),
    "log_ndtr": (
        lambda x: special.log_ndtr(x.float() if x.dtype is torch.bfloat16 else x).to(x.dtype),
        [20.0, 100.0],
    ),
    "xlog1py": (lambda x: special.xlog1py(x, torch.full_like(x, -1.0)), []),
    "copysign": (lambda x: torch.copysign(x, torch.full_like(x, -0.0)), []),
    "prelu": (lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype)), []),
    "std of one": (lambda x: x[..., None].std(-1), []),
    "var of one": (lambda x: x[..., None].var(-1, correction=0), []),
    "normalize": (lambda x: F.normalize(_pair(x, x), dim=-1)[..., 0], []),
}

#: functions of two tensors, called with all pairs of values
_TWO: dict[str, Callable] = {
    **{
        name: getattr(torch, name)
        for name in (
            "maximum",
            "minimum",
            "fmax",
            "fmin",
            "max",
            "min",
            "atan2",
            "hypot",
            "logaddexp",
            "pow",
            "xlogy",
            "fmod",
            "div",
            "mul",
            "copysign",
        )
    },
    **{
        f"loss {name}": lambda a, b, loss=getattr(F, name): loss(a, b, reduction="none")
        for name in (
            "huber_loss",
            "smooth_l1_loss",
            "l1_loss",
            "mse_loss",
            "poisson_nll_loss",
            "hinge_embedding_loss",
            "kl_div",
        )
    },
    **{
        f"distance {p}": lambda a, b, p=p: linalg.vector_norm(_pair(a - b, a - b), p, -1)
        for p in (1.0, 1.5, 2.0, 3.0, _INF)
    },
    "where": lambda a, b: torch.where(a > b, a, b),
    "clamp below": lambda a, b: torch.clamp(a, min=b),
    "clamp above": lambda a, b: torch.clamp(a, max=b),
    "clamp between": lambda a, b: torch.clamp(a, b - 1, b + 1),
    "clamp of zero": lambda a, b: torch.clamp(torch.zeros_like(a), a, b),
    "prelu of weights": torch._prelu_kernel,
    "amax": lambda a, b: _pair(a, b).amax(-1),
    "max over a dimension": lambda a, b: _pair(a, b).max(-1).values,
    "median": lambda a, b: torch.stack([a, b, b], -1).median(-1).values,
    "sort": lambda a, b: (
        _pair(a, b).sort(stable=True).values * torch.tensor([1.0, 2.0], dtype=a.dtype)
    ).sum(-1),
    "prod": lambda a, b: _pair(a, b).prod(-1),
    "cummax": lambda a, b: torch.stack([a, b, a], -1).cummax(-1).values.sum(-1),
    "cumprod": lambda a, b: _pair(a, b).cumprod(-1).sum(-1),
    "logsumexp": lambda a, b: _pair(a, b).logsumexp(-1),
    "softmax": lambda a, b: _pair(a, b).softmax(-1)[..., 0],
    "log_softmax": lambda a, b: _pair(a, b).log_softmax(-1)[..., 0],
    "var": lambda a, b: _pair(a, b).var(-1),
    "std": lambda a, b: _pair(a, b).std(-1),
    "max_pool": lambda a, b: F.max_pool1d(_pair(a, b)[:, None], 2)[:, 0, 0],
    "layer_norm": lambda a, b: F.layer_norm(_pair(a, b), (2,))[..., 0],
}

#: function: (which derivatives may differ, why), at the inputs that the second function selects
_OPEN: dict[str, tuple[str, str, Callable[..., torch.Tensor]]] = {
    "hardsigmoid": ("grad jvp", "PyTorch's 1/6 is a float32 number", lambda x: x.abs() < 3),
    **dict.fromkeys(
        ("hardtanh", "relu6", "hardshrink", "softshrink"),
        (
            "grad jvp",
            "at NaN 0 or 1, in PyTorch by whether the element is in a vector of the processor's",
            torch.isnan,
        ),
    ),
    "where of a logarithm": (
        "jvp",
        "reverse mode multiplies 0 by the infinite slope",
        lambda x: (x == 0) | x.isnan(),
    ),
    **dict.fromkeys(
        ("loss huber_loss", "loss smooth_l1_loss"),
        ("second", "infinity minus infinity", lambda a, b: (a - b).isnan()),
    ),
    "logsumexp": (
        "jvp",
        "an infinity of a tangent 0 is in the sum",
        lambda a, b: a.isinf() | b.isinf(),
    ),
    "var": ("jvp", "an infinity of a tangent 0 is in the sum", lambda a, b: a.isinf() | b.isinf()),
    "log_ndtr": ("grad jvp", "PyTorch has NaN for an infinite slope", lambda x: x == -_INF),
    "lgamma": (
        "second",
        "PyTorch has a large number at a pole",
        lambda x: (x < 0) & (x == x.round()),
    ),
    "prod": (
        "grad jvp second",
        "PyTorch has others beside an infinity or NaN under vmap",
        lambda a, b: ~(a.isfinite() & b.isfinite()),
    ),
    "cumprod": (
        "grad jvp second",
        "PyTorch divides by the factor",
        lambda a, b: ~(a.isfinite() & b.isfinite()),
    ),
    "prelu of weights": (
        "second",
        "PyTorch's mixed derivative at 0 is 0, though the slope there is the weight",
        lambda a, b: a == 0,
    ),
    "pow": (
        "second",
        (
            "the derivative by the base and then by the exponent is NaN in "
            "PyTorch, the other way round 0"
        ),
        lambda a, b: b == 0,
    ),
}


def _inputs(name: str, dtype: torch.dtype) -> tuple[Callable, tuple[torch.Tensor, ...]]:
    if name in _ONE:
        fn, further = _ONE[name]
        return fn, (torch.tensor([*_VALUES, *further], dtype=dtype),)
    values = torch.tensor(_VALUES, dtype=dtype)
    return _TWO[name], (values.repeat_interleave(len(values)), values.repeat(len(values)))


def _derivatives(T: Any, fn: Callable, count: int, forward: bool) -> dict[str, Callable]:
    """By each mode, the derivatives by each argument of a function that works
    element by element.
    """
    places = tuple(range(count))

    def total(*args: torch.Tensor) -> torch.Tensor:
        return fn(*args).sum()

    def by_one(f: Callable, args: tuple, i: int) -> torch.Tensor:
        return T.jvp(
            lambda x: f(*args[:i], x, *args[i + 1 :]), (args[i],), (torch.ones_like(args[i]),)
        )[1]

    def slopes(i: int) -> Callable:
        return T.grad(total, i)

    ways = {
        "grad": lambda *args: T.grad(total, places)(*args),
        "vmap(grad)": lambda *args: T.vmap(
            T.grad(lambda *rows: fn(*(x[None] for x in rows)).sum(), places)
        )(*args),
        "grad(grad)": lambda *args: sum(
            (T.grad(lambda *a, f=slopes(i): f(*a).sum(), places)(*args) for i in places), ()
        ),
        "jvp(grad)": lambda *args: sum(
            (tuple(by_one(slopes(i), args, j) for j in places) for i in places), ()
        ),
    }
    if forward:
        ways["jvp"] = lambda *args: tuple(by_one(fn, args, i) for i in places)
    return ways


def _wrong(
    found: torch.Tensor, right: list[torch.Tensor], skip: torch.Tensor, tolerance: float
) -> torch.Tensor:
    near = [
        torch.isclose(found.double(), x.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        for x in right
    ]
    return ~torch.stack(near).any(0) & ~skip


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    "jitted", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["jit", "plain"]
)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.bfloat16)),
    ],
    ids=lambda d: str(d)[6:],
)
@pytest.mark.parametrize("name", [*_ONE, *_TWO])
def test_in_every_mode(name: str, dtype: torch.dtype, jitted: bool) -> None:
    fn, args = _inputs(name, dtype)
    theirs = {}
    for way, f in _derivatives(torch.func, fn, len(args), False).items():
        # some derivatives have no second one in PyTorch, or no forward mode
        with contextlib.suppress(*(RuntimeError,) * (way != "grad")):
            theirs[way] = f(*args)
    ours = _derivatives(torchfunc_jax, fn, len(args), True)
    if jitted:
        found = torchfunc_jax.jit(lambda *args: {way: f(*args) for way, f in ours.items()})(*args)
    else:
        found = {way: f(*args) for way, f in ours.items()}
    kinds, _, open_at = _OPEN.get(name, ("", "", None))
    nothing = torch.zeros(args[0].shape, dtype=torch.bool)
    unknown = torch.stack([x.isnan() for x in args]).any(0)
    wrong = []
    for way, slopes in found.items():
        first = way in ("grad", "jvp", "vmap(grad)")
        free = (
            open_at(*args)
            if open_at is not None
            and ("jvp" if way == "jvp" else "grad" if first else "second") in kinds
            else nothing
        )
        for i, slope in enumerate(slopes):
            assert slope.dtype is dtype
            right = [
                theirs[w][i]
                for w in (("grad",) if first else ("grad(grad)", "jvp(grad)"))
                if w in theirs
            ]
            if not right:
                continue
            # a derivative at NaN may be NaN, and a second derivative anything there and where
            # PyTorch has none
            skip = (
                free | (unknown & slope.isnan())
                if first
                else free | unknown | ~torch.stack([x.isfinite() for x in right]).any(0)
            )
            where = _wrong(slope, right, skip, _TOLERANCE[dtype]).nonzero()[:, 0].tolist()
            at = lambda tensors, k: [x[k].item() for x in tensors]
            wrong += [
                f"{way}[{i}] at {at(args, k)}: expected {at(right, k)}, got {slope[k].item()}"
                for k in where
            ]
    assert not wrong, "\n".join(wrong[:12])


_CLASSICAL = {
    "chebyshev_polynomial_t": polynomial.Chebyshev,
    "hermite_polynomial_h": polynomial.Hermite,
    "hermite_polynomial_he": polynomial.HermiteE,
    "laguerre_polynomial_l": polynomial.Laguerre,
    "legendre_polynomial_p": polynomial.Legendre,
}


@pytest.mark.parametrize("name", _CLASSICAL)
@pytest.mark.parametrize("of_a_tensor", [False, True])
def test_polynomials_have_derivatives_of_every_order(name: str, of_a_tensor: bool) -> None:
    """Beside NumPy's; PyTorch has none and gives zeros."""
    degrees = [0, 1, 2, 3, 6]
    x = torch.tensor([0.3, -0.7, 0.2, 0.9, -0.4], dtype=torch.float64)

    def value(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if of_a_tensor:
            return getattr(special, name)(x, n)
        return torch.stack([getattr(special, name)(a, d) for a, d in zip(x, degrees, strict=True)])

    slope = lambda x: torchfunc_jax.grad(lambda x: value(x, torch.tensor(degrees)).sum())(x)
    curvature = lambda x: torchfunc_jax.grad(lambda x: slope(x).sum())(x)
    for order, found in ((1, slope(x)), (2, curvature(x)), (2, torchfunc_jax.jit(curvature)(x))):
        expected = [
            _CLASSICAL[name].basis(n).deriv(order)(float(a))
            for n, a in zip(degrees, x, strict=True)
        ]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    if of_a_tensor:
        torch.testing.assert_close(
            torchfunc_jax.vmap(torchfunc_jax.grad(value))(x, torch.tensor(degrees)), slope(x)
        )
