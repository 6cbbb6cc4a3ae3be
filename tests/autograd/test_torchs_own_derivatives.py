"""Derivatives that PyTorch defines otherwise than JAX would take them (docs/gradients.md), beside
torch's autograd and torch.func.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agreement import floats, same

import torchfunc_jax

NAN = float("nan")


def paths(
    reduction: str, zero_infinity: bool, lengths: tuple[list[int], list[int]], labels: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    targets = torch.randint(1, labels + 1, (3, 4), generator=torch.Generator().manual_seed(0))
    sizes = [torch.tensor(x) for x in lengths]
    return lambda x: F.ctc_loss(
        x, targets, *sizes, reduction=reduction, zero_infinity=zero_infinity
    )


LOG_PROBS = floats(6, 3, 5).log_softmax(-1)
SPOILT = torch.tensor([[2.0, 1, 3, NAN], [4, 5, 6, 7]], dtype=torch.float64)
WITH_ZEROS = torch.tensor([[2.0, 1, 3, NAN], [0, 0, 1, 2], [4, 5, 6, 0]], dtype=torch.float64)
# below both bounds, at the lower one, between them, at the upper one, above both, at two equal
# bounds, between two that are crossed; NaN
AT_BOUNDS = torch.tensor([-3.0, -1, 0, 2, 3, 2, 1, NAN], dtype=torch.float64)
BELOW = torch.tensor([-1.0, -1, -1, -1, -1, 2, 2, -1], dtype=torch.float64)
ABOVE = torch.tensor([2.0, 2, 2, 2, 2, 2, 0, 2], dtype=torch.float64)
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "prod of NaN": (lambda x: x.prod(1), (SPOILT,)),
    "prod of all, NaN": (torch.prod, (SPOILT,)),
    "prod of NaN and zeros": (lambda x: x.prod(0, keepdim=True), (WITH_ZEROS,)),
    "prod of rows of NaN and zeros": (lambda x: x.prod(1), (WITH_ZEROS,)),
    "prod of nothing": (lambda x: x.prod(0), (floats(0, 3),)),
    "amax of NaN": (lambda x: x.amax(1), (SPOILT,)),
    "amin of all, NaN": (lambda x: x.amin(), (SPOILT,)),
    "1-norm of NaN": (lambda x: torch.linalg.vector_norm(x, 1, dim=1), (SPOILT,)),
    "inf-norm of NaN": (lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1), (SPOILT,)),
    "inf-norm of equals": (
        lambda x: torch.linalg.vector_norm(x, float("inf"), dim=0),
        (torch.tensor([[1.0, 2], [-1, 0]]).double(),),
    ),
    "as_strided_scatter": (
        lambda x, y: x.as_strided_scatter(y, (2, 2), (3, 2), 1),
        (floats(3, 3), floats(2, 2)),
    ),
    "as_strided_scatter broadcast": (
        lambda x, y: x.as_strided_scatter(y.expand(2, 2), (2, 2), (3, 2)).exp(),
        (floats(3, 3), floats(2)),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.5),
        (floats(2, 3, 4, 5), *[floats(2, 3, 6, 5)] * 2),
    ),
    "attention, a row masked out": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, torch.tensor([[True, False, True], [False, False, False]])
        ),
        (floats(1, 1, 2, 4), floats(1, 1, 3, 4), floats(1, 1, 3, 5)),
    ),
    "clamp at its numbers": (lambda x: x.clamp(-1, 2), (AT_BOUNDS,)),
    "clamp_min at its number": (lambda x: x.clamp_min(-1), (AT_BOUNDS,)),
    "clamp_max at its number": (lambda x: x.clamp(max=2), (AT_BOUNDS,)),
    "clamp by equal numbers": (lambda x: x.clamp(2, 2), (AT_BOUNDS,)),
    "clamp in place": (lambda x: (x * 1).clamp_(-1, 2), (AT_BOUNDS,)),
    "clamp at its tensors": (torch.clamp, (AT_BOUNDS[:-1], BELOW[:-1], ABOVE[:-1])),
    "clamp_min at its tensor": (torch.clamp_min, (AT_BOUNDS[:-1], BELOW[:-1])),
    "clamp_max at its tensor": (lambda x, y: x.clamp(max=y), (AT_BOUNDS[:-1], ABOVE[:-1])),
    "ctc_loss": (paths("mean", False, ([6, 5, 4], [4, 0, 2]), 4), (LOG_PROBS,)),
    "ctc_loss of repeated labels": (paths("none", True, ([6, 5, 6], [4, 3, 1]), 1), (LOG_PROBS,)),
    "ctc_loss where no path fits": (paths("sum", False, ([6, 5, 3], [4, 1, 4]), 4), (LOG_PROBS,)),
    "ctc_loss of one that does not count": (
        paths("sum", True, ([6, 5, 3], [4, 1, 4]), 4),
        (LOG_PROBS,),
    ),
}

# no torch.func.jvp there, or, before torch 2.14, another derivative at a bound than backward's
NO_FORWARD = ("ctc_loss", "attention", "clamp_min at its tensor", "clamp_max at its tensor")


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", CASES)
def test_reverse_mode_is_autograds(name: str) -> None:
    function, args = CASES[name]
    leaves = [x.clone().requires_grad_() for x in args]
    out = function(*leaves)
    cotangent = torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    theirs = torch.autograd.grad(out, leaves, cotangent)
    pull = lambda *args: torchfunc_jax.vjp(function, *args)[1](cotangent)
    lanes = torchfunc_jax.vmap(pull)(*[torch.stack([x, x]) for x in args])
    for mine in (pull(*args), torchfunc_jax.jit(pull)(*args), [x[1] for x in lanes]):
        torch.testing.assert_close(tuple(mine), theirs, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(NO_FORWARD)])
def test_forward_mode_is_torch_funcs(name: str) -> None:
    function, args = CASES[name]
    tangents = tuple(floats(*x.shape) for x in args)
    torch.testing.assert_close(
        torchfunc_jax.jvp(function, args, tangents),
        torch.func.jvp(function, args, tangents),
        equal_nan=True,
    )


def test_aminmax_of_nan_is_as_amin_and_amax() -> None:  # PyTorch 2.11 has no derivative of aminmax
    both = lambda x: torch.cat([x.amin(1), x.amax(1)])
    x = SPOILT.clone().requires_grad_()
    cotangent = torch.linspace(1, 2, 4, dtype=torch.float64)
    (theirs,) = torch.autograd.grad(both(x), x, cotangent)
    mine = torchfunc_jax.vjp(lambda x: torch.cat(torch.aminmax(x, dim=1)), SPOILT)[1](cotangent)
    torch.testing.assert_close(mine[0], theirs, equal_nan=True)


def test_ctc_loss_rounds_as_pytorchs_kernel() -> None:
    """Log probabilities of a long path add up to hundreds, of which float32 keeps few digits: the
    order of the sums shows.
    """
    x = floats(120, 8, 20).float().log_softmax(-1)
    targets = torch.randint(1, 20, (8, 50), generator=torch.Generator().manual_seed(0))
    sizes = torch.full((8,), 120), torch.tensor([50, 20, 40, 33, 48, 50, 22, 7])
    loss = lambda x: F.ctc_loss(x, targets, *sizes, reduction="sum")
    leaf = x.clone().requires_grad_()
    theirs = torch.autograd.grad(loss(leaf), leaf)[0]
    torch.testing.assert_close(torchfunc_jax.grad(loss)(x), theirs, rtol=1e-4, atol=2e-5)


def test_ctc_loss_twice() -> None:
    gradient = torchfunc_jax.grad(CASES["ctc_loss"][0])
    direction, step = floats(6, 3, 5), 1e-6
    twice = torchfunc_jax.jvp(gradient, (LOG_PROBS,), (direction,))[1]
    near = [gradient(LOG_PROBS + sign * step * direction) for sign in (1, -1)]
    torch.testing.assert_close(twice, (near[0] - near[1]) / (2 * step), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("keepdim", [False, True])
def test_product_of_rows_of_their_own(keepdim: bool) -> None:
    """A NaN in one row leaves the others alone; mapped and differentiated row by row, more than
    once, as a program is compiled anew.
    """
    nan = float("nan")
    x = torch.tensor([[nan, 2.0, 3.0], [4.0, 2.0, 5.0], [1.0, 2.0, 3.0]])
    f = lambda x: x.prod(1, keepdim=keepdim).sum()
    active = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(active), active)
    torch.testing.assert_close(torchfunc_jax.grad(f)(x), expected, equal_nan=True)
    torch.testing.assert_close(
        torchfunc_jax.jit(torchfunc_jax.grad(f))(x), expected, equal_nan=True
    )
    g = lambda v: v.prod(0, keepdim=True).expand_as(v) + v
    y = torch.arange(1.0, 10.0).reshape(3, 3)
    expected = torch.func.jacrev(torch.func.vmap(g, out_dims=1))(y)
    for _ in range(3):
        torch.testing.assert_close(
            torchfunc_jax.jacrev(torchfunc_jax.vmap(g, out_dims=1))(y), expected
        )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("called", ["functional", "torch"])
def test_weights_of_the_cross_entropy_of_logits_have_derivatives_as_in_torch_func(
    reduction: str, called: str
) -> None:
    x, y, ct = floats(4, 3) * 5, floats(4, 3).sigmoid(), floats(4, 3)

    def loss(weight: torch.Tensor, pos_weight: torch.Tensor | None) -> torch.Tensor:
        if called == "torch":
            return (
                torch.binary_cross_entropy_with_logits(
                    x, y, weight, pos_weight, ["none", "mean", "sum"].index(reduction)
                )
                * ct
            ).sum()
        return (
            F.binary_cross_entropy_with_logits(
                x, y, weight, pos_weight=pos_weight, reduction=reduction
            )
            * ct
        ).sum()

    weight, pos_weight = floats(3).exp(), floats(4, 3).exp()
    for compiled in (lambda f: f, torchfunc_jax.jit):
        for args, argnums in (((weight, pos_weight), (0, 1)), ((weight, None), (0,))):
            for found, expected in zip(
                compiled(torchfunc_jax.grad(loss, argnums))(*args),
                torch.func.grad(loss, argnums)(*args),
                strict=True,
            ):
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pool", [F.fractional_max_pool2d, F.fractional_max_pool3d])
def test_fractional_pooling_of_no_images(pool: Callable[..., torch.Tensor]) -> None:
    n = 2 if pool is F.fractional_max_pool2d else 3
    x = torch.ones(0, 1, *[5] * n)
    assert (
        torchfunc_jax.jit(lambda x: pool(x, 2, output_size=2))(x).shape
        == pool(x, 2, output_size=2).shape
    )
    assert torchfunc_jax.grad(lambda x: pool(x, 2, output_size=2).sum())(x).shape == x.shape


@pytest.mark.parametrize("scale", [1, 10, 1000])
def test_logcumsumexp_pushed_forward(scale: float) -> None:
    """Beside the formula: torch.func.jvp's is wrong where elements lie far apart."""
    x, tangent = floats(5, 4) * scale, floats(4, 5).T
    weights = torch.exp(x[None] - x.logcumsumexp(0)[:, None]) * torch.ones(5, 5).tril()[..., None]
    expected = (weights.nan_to_num(posinf=0) * tangent[None]).sum(1)

    def push(x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        return torchfunc_jax.jvp(lambda x: x.logcumsumexp(0), (x,), (tangent,))[1]

    for run in (push, torchfunc_jax.jit(push)):
        torch.testing.assert_close(run(x, tangent), expected)


PLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "near": lambda x: x,
    "apart": lambda x: x * 10,
    "far apart": lambda x: x * 1e4,
    "at the ends": lambda x: x * 1e30,
    "near each other, far from 0": lambda x: x + 1e4,
    "rising": lambda x: x + 20 * torch.arange(60)[:, None],
}


@pytest.mark.parametrize("place", PLACED.values(), ids=PLACED)
def test_logcumsumexp_is_no_less_accurate_than_pytorchs(
    place: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Beside the weights in float64; PyTorch's kernel and gradient go through sums of logarithms,
    which round at their size.
    """
    x, cotangent = place(floats(60, 4)).float(), floats(4, 60).T.float()
    weights = (
        torch.exp(x.double()[None] - x.double().logcumsumexp(0)[:, None])
        * torch.ones(60, 60).tril()[..., None]
    )
    exact = (weights.nan_to_num(posinf=0) * cotangent[:, None].double()).sum(0)
    pulled = [
        namespace.vjp(lambda x: x.logcumsumexp(0), x)[1](cotangent)[0]
        for namespace in (torchfunc_jax, torch.func)
    ]
    errors = [(found.double() - exact).abs().max() for found in pulled]
    assert errors[0] <= errors[1]
    assert errors[0] < 1e-5
    value = torchfunc_jax.jit(lambda x: x.logcumsumexp(0))(x)
    torch.testing.assert_close(value, x.double().logcumsumexp(0).float(), rtol=3e-7, atol=1e-6)


def test_logcumsumexp_of_minus_infinity() -> None:
    """Where there is nothing yet but -inf, no element moves the result; PyTorch's gradient is NaN
    there.
    """
    x = torch.tensor([-torch.inf, -torch.inf, 1, 2, -torch.inf])
    function = lambda x: x.logcumsumexp(0)
    out, pull = torchfunc_jax.vjp(function, x)
    torch.testing.assert_close(out, function(x))
    theirs = torch.func.vjp(function, x)[1](torch.ones(5))[0]
    torch.testing.assert_close(pull(torch.ones(5))[0], theirs.where(~theirs.isnan(), 0))
    assert theirs.isnan().tolist() == [True, True, False, False, False]
    torch.testing.assert_close(
        torchfunc_jax.jvp(function, (x,), (torch.ones(5),))[1], torch.tensor([0.0, 0, 1, 1, 1])
    )


def pushed(
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    tangent: torch.Tensor,
    step: float = 1e-6,
) -> torch.Tensor:
    """The derivative by finite differences."""
    return (function(x + step * tangent) - function(x - step * tangent)) / (2 * step)


@pytest.mark.parametrize("include_self", [True, False])
def test_products_scattered_pushed_forward(include_self: bool) -> None:
    """Beside finite differences; torch.func.jvp is wrong."""
    index = torch.tensor([[0, 1, 0], [1, 1, 0], [0, 1, 2]])
    function = lambda x: x[:3].scatter_reduce(0, index, x[3:], "prod", include_self=include_self)
    x, tangent = floats(6, 3), floats(3, 6).T
    expected = pushed(function, x, tangent)
    torch.testing.assert_close(
        torchfunc_jax.jvp(function, (x,), (tangent,))[1], expected, rtol=1e-7, atol=1e-7
    )
    assert (torch.func.jvp(function, (x,), (tangent,))[1] - expected).abs().max() > 0.1
    spoilt = (
        x
        * torch.ones(6, 3)
        .index_put((torch.tensor([3, 5]), torch.tensor([0, 1])), torch.zeros(2))
        .double()
    )
    torch.testing.assert_close(
        torchfunc_jax.jvp(function, (spoilt,), (tangent,))[1],
        pushed(function, spoilt, tangent),
        rtol=1e-7,
        atol=1e-7,
    )


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.skipif(torch.__version__ >= (2, 14), reason="torch.cholesky was removed in torch 2.14")
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_cholesky_pushed_forward(dtype: torch.dtype, upper: bool) -> None:
    """PyTorch has a gradient alone: forward mode is its transpose, and along Hermitian matrices
    what finite differences say.
    """
    g = torch.Generator().manual_seed(0)
    a, tangent = (torch.randn(2, 4, 4, dtype=dtype, generator=g) for _ in range(2))
    function = lambda a: torch.cholesky(a, upper=upper)
    a = a @ a.mH + torch.eye(4)
    along = tangent + tangent.mH
    torch.testing.assert_close(
        torchfunc_jax.jvp(function, (a,), (along,))[1],
        pushed(function, a, along),
        rtol=1e-7,
        atol=1e-7,
    )
    leaf, u = a.clone().requires_grad_(), torch.zeros_like(a).requires_grad_()
    (pulled,) = torch.autograd.grad(function(leaf), leaf, u, create_graph=True)
    transposed = torch.autograd.grad(pulled, u, tangent)[0]
    torch.testing.assert_close(torchfunc_jax.jvp(function, (a,), (tangent,))[1], transposed)
    cotangent = torch.randn(2, 4, 4, dtype=dtype, generator=g)
    torch.testing.assert_close(
        torchfunc_jax.vjp(function, a)[1](cotangent), torch.func.vjp(function, a)[1](cotangent)
    )


def test_as_strided_of_a_view() -> None:
    """PyTorch runs it: as_strided counts in the memory of the whole tensor, of which the view has
    the elements from 5 to 14 alone.
    """
    x = torch.arange(20, dtype=torch.float64)[5:15]
    tangent, own = floats(10), x.clone()
    for first in (0, 7):
        function = lambda x, first=first: x.as_strided((2, 2), (1, 2), first) ** 2
        expected = torch.func.jvp(function, (x,), (tangent,))
        torch.testing.assert_close(expected[0], function(x))
        for _ in range(2):
            torch.testing.assert_close(torchfunc_jax.jvp(function, (x,), (tangent,)), expected)
    function = lambda x: x.as_strided((2, 2), (1, 2), 0) ** 2
    torch.testing.assert_close(
        torchfunc_jax.jvp(function, (own,), (tangent,)),
        (function(own), pushed(function, own, tangent)),
    )
    torch.testing.assert_close(
        torch.func.jvp(function, (own,), (tangent,))[1], pushed(function, own, tangent)
    )


def test_the_inverse_from_a_cholesky_factor_forward() -> None:
    """Finite differences say so: torch.func.jvp's formula holds near the identity alone."""
    factor, direction, step = floats(5, 5).tril() + 3 * torch.eye(5), floats(5, 5).tril(), 1e-6
    near = [torch.cholesky_inverse(factor + sign * step * direction) for sign in (1, -1)]
    along = torchfunc_jax.jvp(torch.cholesky_inverse, (factor,), (direction,))[1]
    torch.testing.assert_close(along, (near[0] - near[1]) / (2 * step), rtol=1e-6, atol=1e-7)


INF = float("inf")
COMPLEX = {
    "ordinary": [1 + 4j, 2 - 3j, 0.5 + 9j, -700 + 1j, 700 + 2j],
    "imaginary parts of many turns": [0j, 5 + 9j, 5 + 2j, 5 + 9.1j, -800 + 1j],
    "nothing at first": [complex(-INF, 1), complex(-INF, 2), 2 + 8j],
    "infinite": [1 + 2j, complex(INF, 3), 2 + 1j],
    "infinite twice": [complex(INF, 1), complex(INF, 2)],
    "NaN": [1 + 1j, complex(NAN, 1), 1 + 1j],
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("values", COMPLEX.values(), ids=COMPLEX)
def test_complex_logsumexp(values: list[complex], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype)
    for f in (
        lambda x: torch.logcumsumexp(x, 0),
        lambda x: torch.logsumexp(x, 0),
        lambda x: torch.logsumexp(x[-1], 0),
    ):
        torch.testing.assert_close(torchfunc_jax.jit(f)(x), f(x), equal_nan=True)
        torch.testing.assert_close(torchfunc_jax.vmap(f)(x[None])[0], f(x), equal_nan=True)


def test_derivatives_of_complex_logcumsumexp() -> None:
    x, tangent = (
        torch.complex(floats(7), 4 * floats(3, 4)[0].repeat(2)[:7]),
        torch.complex(floats(7).flip(0), floats(7)),
    )
    f = lambda x: torch.logcumsumexp(x, 0)
    difference = (f(x + 1e-6 * tangent) - f(x - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(
        torchfunc_jax.jvp(f, (x,), (tangent,))[1], difference, rtol=1e-7, atol=1e-7
    )
    assert torch.autograd.gradcheck(torchfunc_jax.jit(f), x.requires_grad_())


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="not in torch before 2.13")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
# in chunks from torch 2.15 on
def test_linear_cross_entropy_of_probabilities_in_chunks(reduction: str, weighted: bool) -> None:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    target, weight = (
        floats(5, 4).softmax(1),
        torch.tensor([1.0, 2, 0.5, 3]).double() if weighted else None,
    )

    def loss(x: torch.Tensor, layer: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        found = F.linear_cross_entropy(
            x, layer, target, linear_bias=bias, weight=weight, reduction=reduction, options=options
        )
        return (found * torch.linspace(1, 2, found.numel()).reshape(found.shape)).sum()

    args = floats(5, 3), floats(4, 3), floats(4)
    leaves = [x.clone().requires_grad_() for x in args]
    theirs = torch.autograd.grad(loss(*leaves), leaves)
    gradient = torchfunc_jax.grad(loss, argnums=(0, 1, 2))
    torch.testing.assert_close(gradient(*args), theirs)
    # there PyTorch 2.15's rule refuses, under jit, a target that may need a gradient
    if reduction != "none":
        torch.testing.assert_close(torchfunc_jax.jit(gradient)(*args), theirs)
    torch.testing.assert_close(torchfunc_jax.jit(loss)(*args), loss(*args))


# -- what PyTorch has from 2.15 on -----------------------------------------------------------------
@pytest.mark.skipif(
    not hasattr(torch.linalg, "polar"), reason="this version of PyTorch does not have it"
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", ["polar", "matrix_sqrth"])
def test_polar_and_the_square_root(name: str, dtype: torch.dtype) -> None:
    fn = getattr(torch.linalg, name)
    x = torch.randn(2, 4, 3, dtype=dtype)
    if name == "matrix_sqrth":
        x = x.mH @ x
    tangent = torch.randn_like(x)
    run = torchfunc_jax.jit(lambda x, tangent: torchfunc_jax.jvp(fn, (x,), (tangent,)))
    same(tuple(run(x, tangent)[1]), tuple(torch.func.jvp(fn, (x,), (tangent,))[1]))
    out, pull = torch.func.vjp(lambda x: tuple(fn(x)), x)
    cotangents = tuple(map(torch.randn_like, out))
    mine, my_pull = torchfunc_jax.vjp(lambda x: tuple(fn(x)), x)
    same((mine, my_pull(cotangents)), (out, pull(cotangents)))
    for wrong in (x[0, 0], x[..., :2, :], x.half() if dtype == torch.float64 else x[..., :0, :]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            fn(wrong)
        with pytest.raises((RuntimeError, NotImplementedError)):
            torchfunc_jax.jit(fn)(wrong)


_TABLE = torch.tensor([[5, 1], [2, 5], [1, 0]])
#: functions whose gradient in reverse mode is not the transpose of forward mode
CHANGED_GRADIENTS: dict[str, Callable[..., torch.Tensor]] = {
    "cholesky": torch.linalg.cholesky,
    "cholesky of the upper triangle": lambda a: torch.linalg.cholesky(a, upper=True),
    "eigh": lambda a: torch.linalg.eigh(a)[1].abs(),
    "triangular_solve": lambda a: torch.triangular_solve(
        torch.arange(8.0).double().cos().view(4, 2).to(a.dtype), a, upper=False
    )[0],
    "as_strided_scatter": lambda a: torch.as_strided_scatter(
        a.clone(memory_format=torch.contiguous_format), a[0].cos(), (4,), (1,), 5
    ),
    "embedding": lambda a: F.embedding(_TABLE, torch.cat([a.real, a.real.sin()]), padding_idx=5),
    "embedding by frequency": lambda a: F.embedding(
        _TABLE, torch.cat([a.real, a.real.sin()]), padding_idx=1, scale_grad_by_freq=True
    ),
}


@pytest.mark.thin(4)
@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", CHANGED_GRADIENTS)
def test_a_gradient_that_is_no_transpose_is_itself_differentiated(
    name: str, dtype: torch.dtype
) -> None:
    """The second derivative in reverse mode differentiates what PyTorch makes of the gradient,
    along directions that are not symmetric.
    """
    fn = CHANGED_GRADIENTS[name]
    a = torch.randn(3, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    a = a @ a.mH + torch.eye(4)

    def loss(a: torch.Tensor) -> torch.Tensor:
        out = fn(a)
        return ((out.abs() ** 2).flatten() * torch.arange(out.numel()).double().cos()).sum()

    def second(tf) -> Callable[[torch.Tensor], torch.Tensor]:
        def slope(a: torch.Tensor) -> torch.Tensor:
            gradient = tf.grad(loss)(a)
            return (
                (gradient if not a.is_complex() else gradient.real + 2 * gradient.imag).flatten()
                * torch.arange(16.0).sin()
            ).sum()

        return tf.grad(slope)

    expected = torch.stack([second(torch.func)(x) for x in a])
    torch.testing.assert_close(torchfunc_jax.vmap(second(torchfunc_jax))(a), expected)
    torch.testing.assert_close(
        torchfunc_jax.jit(torchfunc_jax.vmap(second(torchfunc_jax), in_dims=1))(a.movedim(0, 1)),
        expected,
    )
    through = torchfunc_jax.grad(
        lambda a: torchfunc_jax.grad(lambda a: torchfunc_jax.vmap(loss)(a).sum())(a).real.sum()
    )(a)
    beside = torch.func.grad(lambda a: torch.func.grad(lambda a: sum(map(loss, a)))(a).real.sum())(
        a
    )
    torch.testing.assert_close(through, beside)
