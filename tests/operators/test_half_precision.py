"""float16 and bfloat16: computed in float32 and rounded once, so that an answer is as near to
float64 as PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agreement import floats

import torchfunc_jax

CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "baddbmm": (torch.baddbmm, (floats(5, 8, 9) * 8, floats(5, 8, 16) * 4, floats(5, 16, 9) * 4)),
    "baddbmm scaled": (
        lambda *xs: torch.baddbmm(*xs, beta=0.3, alpha=1.7),
        (floats(5, 8, 9) * 8, floats(5, 8, 16), floats(5, 16, 9)),
    ),
    "addbmm": (torch.addbmm, (floats(8, 9) * 8, floats(5, 8, 16), floats(5, 16, 9))),
    "addmv": (
        lambda *xs: torch.addmv(*xs, beta=0.3, alpha=1.7),
        (floats(50), floats(50, 16), floats(16)),
    ),
    "conv2d": (
        lambda *xs: F.conv2d(*xs, padding=1),
        (floats(2, 4, 9, 9), floats(6, 4, 3, 3), floats(6)),
    ),
    "conv_transpose3d": (
        lambda *xs: F.conv_transpose3d(*xs, stride=2),
        (floats(1, 3, 4, 4, 4), floats(3, 3, 3, 3, 3), floats(3)),
    ),
    "matrix_exp": (torch.matrix_exp, (floats(4, 6, 6) / 3,)),
    "atanh": (torch.atanh, (floats(300).tanh() * 0.98,)),
    "erfinv": (torch.erfinv, (floats(300).tanh() * 0.98,)),
    "kron": (torch.kron, (floats(5, 5), floats(10, 20))),
}


def _answers(
    namespace: object,
    function: Callable[..., torch.Tensor],
    args: tuple[torch.Tensor, ...],
    seed: int,
) -> list[torch.Tensor]:
    """The value and both derivatives."""
    narrow = lambda t: t.to(torch.bfloat16).to(args[0].dtype)  # the same numbers in every dtype
    tangents = tuple(narrow(floats(*x.shape)) for x in args)
    out, pull = namespace.vjp(function, *args)  # type: ignore[attr-defined]
    along = namespace.jvp(function, args, tangents)[1]  # type: ignore[attr-defined]
    return [out, along, *pull(narrow(floats(seed, *out.shape)[0]))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_as_near_to_float64_as_pytorch(name: str, dtype: torch.dtype) -> None:
    function, args = CASES[name]
    half = tuple(x.bfloat16().to(dtype) for x in args)
    exact = _answers(torch.func, function, tuple(x.double() for x in half), 3)
    theirs = _answers(torch.func, function, half, 3)
    mine = _answers(torchfunc_jax, function, half, 3)
    for m, t, e in zip(mine, theirs, exact, strict=True):
        assert m.dtype == t.dtype == dtype
        error, allowed = (m.double() - e).abs(), (t.double() - e).abs()
        once = torch.finfo(dtype).eps / 2 * e.abs()  # the error of one rounding
        known = allowed.isfinite()  # PyTorch's matrix_exp has NaN
        assert error.isfinite().all() and (known.all() or name == "matrix_exp")
        worst = allowed[known].max() if known.any() else once.max()
        assert error[known].sum() <= 1.02 * allowed[known].sum()
        assert (error <= 2 * once + worst).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": floats(6, 6).bfloat16().double()}], ids=str
)
def test_attention_is_as_near_to_float64_as_pytorchs(
    options: dict[str, object], dtype: torch.dtype
) -> None:
    """Value and gradients, at weights that are nearly one and at others; forward mode PyTorch's
    fused kernel has not.
    """
    wide = [
        x.bfloat16().double()
        for x in (floats(2, 3, 6, 8) * 3, floats(2, 3, 6, 8) * 3, floats(2, 3, 6, 8) + 5)
    ]

    def answers(namespace: object, dtype: torch.dtype) -> list[torch.Tensor]:
        named = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        out, pull = namespace.vjp(
            lambda *xs: F.scaled_dot_product_attention(*xs, **named), *(x.to(dtype) for x in wide)
        )  # type: ignore[attr-defined]
        return [out, *pull(floats(2, 3, 6, 8).bfloat16().to(dtype))]

    for m, t, e in zip(
        answers(torchfunc_jax, dtype),
        answers(torch.func, dtype),
        answers(torch.func, torch.float64),
        strict=True,
    ):
        assert m.dtype == t.dtype == dtype
        error, allowed = (m.double() - e).abs(), (t.double() - e).abs()
        # the weights are rounded before they are used
        assert error.mean() <= 1.2 * allowed.mean(), (error.mean(), allowed.mean())
        assert error.max() <= 2 * allowed.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_next_number_is_exactly_that(dtype: torch.dtype) -> None:
    """A tolerance cannot tell it from its neighbour."""
    f = torch.finfo(dtype)
    some = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        3.5,
        f.max,
        f.min,
        f.smallest_normal,
        f.smallest_normal / 2,
        math.inf,
        -math.inf,
        math.nan,
    ]
    a, b = (
        torch.tensor(x, dtype=dtype)
        for x in zip(*[(x, y) for x in some for y in some], strict=True)
    )
    truth, bits = (
        torch.nextafter(a, b),
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize],
    )
    for got in (
        torchfunc_jax.jit(torch.nextafter)(a, b),
        torchfunc_jax.vmap(torch.nextafter)(a, b),
    ):
        assert torch.equal(got.isnan(), truth.isnan())
        assert torch.equal(got[~got.isnan()].view(bits), truth[~truth.isnan()].view(bits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_mantissa_and_exponent_of_denormals(dtype: torch.dtype) -> None:
    """XLA on the CPU takes them for zeros; their derivative is infinite where 2 to the exponent is
    beyond the dtype.
    """
    f = torch.finfo(dtype)
    least = f.smallest_normal * f.eps
    some = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        3.5,
        f.max,
        f.min,
        f.smallest_normal,
        f.smallest_normal / 2,
        math.inf,
        -math.inf,
        math.nan,
    ]
    x = torch.tensor(
        [*some, least, -least, 3 * least, -7 * least, f.smallest_normal - least], dtype=dtype
    )
    theirs = torch.frexp(x.double())  # right for denormals in every version, and of bfloat16
    for mantissa, exponent in (
        torchfunc_jax.jit(torch.frexp)(x),
        torchfunc_jax.vmap(torch.frexp)(x),
    ):
        assert mantissa.dtype == dtype and exponent.dtype == torch.int32
        torch.testing.assert_close(mantissa, theirs[0].to(dtype), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(exponent, theirs[1]) and torch.equal(
            mantissa.signbit()[:-6], x.signbit()[:-6]
        )
    slopes = torchfunc_jax.vmap(torchfunc_jax.grad(lambda x: torch.frexp(x)[0]))(x)
    expected = torch.ldexp(torch.ones((), dtype=torch.float64), -theirs[1].double()).to(dtype)
    torch.testing.assert_close(slopes, expected, rtol=1e-6, atol=f.smallest_normal)


def test_a_tangent_has_its_primals_dtype() -> None:
    """torch.func.jvp's is float32 for these two."""
    x = floats(4, 5).bfloat16()
    for function in (lambda x: torch.frexp(x)[0], lambda x: torch.renorm(x, 2, 0, 1.0)):
        out, along = torchfunc_jax.jvp(function, (x,), (x,))
        assert out.dtype == along.dtype == torch.bfloat16
        theirs = torch.func.jvp(function, (x,), (x,))[1]
        torch.testing.assert_close(along, theirs.bfloat16(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("function", [lambda x: torch.complex(x, x), torch.view_as_complex])
def test_complex32_has_no_counterpart_in_any_mode(function: Callable[..., torch.Tensor]) -> None:
    x = floats(3, 2).half()
    for run in (
        torchfunc_jax.jit(function),
        torchfunc_jax.vmap(function),
        lambda x: torchfunc_jax.jvp(function, (x,), (x,)),
    ):
        with pytest.raises((TypeError, RuntimeError), match=r"no counterpart of torch\.complex32"):
            run(x[None] if function is torch.view_as_complex else x)
