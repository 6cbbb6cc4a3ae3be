"""Values at the edge of what is defined, against plain PyTorch: zeros, infinities, NaNs, and
numbers cut off.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from torchfunc_jax import functionalize, grad, grad_and_value, jit, jvp, vjp, vmap

INF, NAN = math.inf, math.nan
PARTS = torch.tensor([0.0, -0.0, 1.0, -2.5, INF, -INF, NAN])
COMPLEX = torch.complex(*torch.meshgrid(PARTS, PARTS, indexing="ij")).reshape(-1)
SIGNED = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5])
CUT = torch.complex(*torch.meshgrid(SIGNED, SIGNED, indexing="ij")).reshape(-1)
PAIRS = torch.meshgrid(
    torch.tensor([0.0, -0.0, 0.5, 3.0, INF]),
    torch.tensor([0.0, 0.25, 2.0, 40.0, INF]),
    indexing="ij",
)
WHOLE = torch.arange(6).view(2, 3)

CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
    "igamma": (torch.special.gammainc, PAIRS),
    "igammac": (torch.special.gammaincc, PAIRS),
    "bessel_j0": (torch.special.bessel_j0, (PARTS,)),
    "bessel_j1": (torch.special.bessel_j1, (PARTS,)),
    "bessel_y0": (torch.special.bessel_y0, (PARTS,)),
    "bessel_y1": (torch.special.bessel_y1, (PARTS,)),
    "zeta": (
        torch.special.zeta,
        torch.meshgrid(PARTS, torch.tensor([2.0, 0.5, -1.0, 0.0, -INF]), indexing="ij"),
    ),
    "abs of complex": (torch.abs, (COMPLEX,)),
    "sqrt of complex": (torch.sqrt, (COMPLEX,)),
    **{
        f"{f.__name__} along its cut": (f, (CUT,))
        for f in (
            torch.sqrt,
            torch.log,
            torch.log2,
            torch.log10,
            torch.acos,
            torch.acosh,
            torch.asin,
            torch.asinh,
            torch.atan,
            torch.atanh,
        )
    },
    "addmm of whole numbers": (
        lambda x: torch.addmm(x, WHOLE, WHOLE.mT, beta=1.7, alpha=2.9),
        (torch.ones(2, 2, dtype=torch.int64),),
    ),
    "addmv of whole numbers": (
        lambda x: torch.addmv(x, WHOLE, WHOLE[0], beta=-1.5, alpha=0.6),
        (torch.ones(2, dtype=torch.int64),),
    ),
    "baddbmm of whole numbers": (
        lambda x: torch.baddbmm(x, WHOLE[None], WHOLE.mT[None], beta=2.5, alpha=-1.5),
        (torch.ones(1, 2, 2, dtype=torch.int64),),
    ),
}


@pytest.mark.parametrize("transform", [functionalize, jit])
@pytest.mark.parametrize("name", CASES)
def test_as_in_pytorch(name: str, transform: Any) -> None:
    function, given = CASES[name]
    torch.testing.assert_close(transform(function)(*given), function(*given), equal_nan=True)


@pytest.mark.thin(2)
@pytest.mark.parametrize("transform", [functionalize, jit])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[1:].add_(x[:-1]),
        lambda x: x[1:].copy_(x[:-1]),
        lambda x: x[:-1].mul_(x[1:].cos()),
        lambda x: x[1:].masked_fill_(x[:-1] > 0, 2.0),
        lambda x: torch.add(x[:-1], 1, out=x[1:]),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x[::2].add_(x[1::2]),
        lambda x: x[:3].sub_(x[3:]),
        lambda x: torch.gather(x, 0, torch.arange(3), out=x[:3]),
        lambda x: x.view(2, 3).add_(x.view(3, 2).t()),
        lambda x: x.view(2, 3).mul_(x.view(2, 3)),
        lambda x: torch.cat([x[:3], x[:3]], out=x),
        lambda x: torch.clamp(x[1:], min=x[:-1], out=x[1:]),
        lambda x: torch.cumsum(x[:-1], 0, out=x[1:]),
        lambda x: x[1:].index_add_(0, torch.arange(5), x[:-1]),
        lambda x: x[1:].index_put_((torch.arange(5),), x[:-1]),
        lambda x: x[:4].copy_(x[1]),
        lambda x: x.mul_(x[0]),
        lambda x: x.fill_(x[3]),
        lambda x: x.__setitem__(slice(0, 3), x[4]),
        lambda x: x.__setitem__(0, x[3]),
        lambda x: x.index_fill_(0, torch.tensor([0]), x[3]),
        lambda x: x[:4].clamp_(min=x[1]),
        lambda x: x[:3].scatter_(0, torch.arange(3), x[:3]),
        lambda x: x[:3].scatter_add_(0, torch.arange(3), x[:3]),
        lambda x: x[:3].scatter_(0, torch.arange(3), x[3:]),
        lambda x: torch.scatter(x[:3], 0, torch.arange(3), x[3:], out=x[:3]),
        lambda x: x[:3].scatter_reduce_(0, torch.arange(3), x[1:4], "sum"),
        lambda x: x.put_(torch.arange(3), x[:3]),
        lambda x: x[:3].index_reduce_(0, torch.arange(3), x[1:4], "prod"),
        lambda x: x.index_copy_(0, torch.arange(6), x),
        lambda x: x.__setitem__(torch.arange(6), x),
        lambda x: torch.take(x, torch.arange(3), out=x[:3]),
        lambda x: torch.cumprod(x[:-1], 0, out=x[1:]),
        lambda x: torch.cumsum(x, 0, out=x),
        lambda x: torch.sort(x, out=(x, torch.arange(6))),
        lambda x: torch.topk(x[:3], 3, out=(x[1:4], torch.arange(3))),
        lambda x: torch.stack([x[:3]], out=x[:3].view(1, 3)),
        lambda x: torch.stack([x[:3]], out=x[3:].view(1, 3)),
        lambda x: x[1:].floor_divide_(x[:-1] + 1),
        lambda x: x.floor_divide_(x + 1),
        lambda x: x[1:].floor_divide_(x[:-1]),
        lambda x: x[1:].copysign_(x[:-1]),
        lambda x: x[1:].eq_(x[:-1]),
        lambda x: torch.where(x[:4] > 0, x[:4], x[1:5], out=x[2:]),
        lambda x: x[1:5].view(2, 2).addr_(x[:2], x[:2]),
    ],
)
def test_writes_to_memory_that_is_read(write: Any, transform: Any) -> None:
    """Refused where PyTorch refuses them, else with its values."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        write(x)
        return x

    x = torch.arange(6.0)
    try:
        want = function(x)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            transform(function)(x)
    else:
        torch.testing.assert_close(transform(function)(x), want)


@pytest.mark.parametrize(
    "function",
    [torch.sqrt, torch.acos, torch.acosh, torch.asin, torch.asinh],
    ids=lambda f: f.__name__,
)
def test_derivatives_on_both_sides_of_a_cut(function: Any) -> None:
    """By finite differences along the cut, which keep the sign of the zero; PyTorch's own are those
    of the other side at some points.
    """
    real = torch.tensor(
        [-2.5, -2.5, 2.5, 2.5, -2.5, 2.5, -0.3, 0.5, 0.5, -0.7, -0.7], dtype=torch.float64
    )
    imag = torch.tensor(
        [0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 0.2, 0.0, -0.0, 0.0, -0.0], dtype=torch.float64
    )
    order = (lambda a, b: torch.complex(b, a)) if function is torch.asinh else torch.complex
    cut = lambda shift: order(real + shift, imag)
    step = 1e-6
    slope = (
        (function(cut(step)) - function(cut(-step)))
        / (2 * step)
        / (1j if function is torch.asinh else 1)
    )
    tangent = torch.full_like(slope, 0.5 - 2j)
    torch.testing.assert_close(
        jvp(function, (cut(0),), (tangent,))[1], slope * tangent, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        vjp(function, cut(0))[1](tangent)[0], slope.conj() * tangent, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("around", [lambda f: f, jit], ids=["as it is", "jit"])
@pytest.mark.parametrize(
    "views",
    [
        lambda x: x.unbind(0),
        lambda x: x.split(1),
        lambda x: x.split([1, 1]),
        lambda x: (x[0], x[1]),
    ],
    ids=["unbind", "split", "split by sizes", "select"],
)
def test_views_made_under_no_grad_have_no_derivative(views: Any, around: Any) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            first, second = views(x)
        return (first * x[0] + second).sum()

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    torch.testing.assert_close(around(grad(loss))(x), torch.func.grad(loss)(x))


@pytest.mark.parametrize("transform", [functionalize, jit])
@pytest.mark.parametrize(
    "function",
    [
        torch.histc,
        torch.zeros_like,
        torch.rand_like,
        torch.linalg.lu,
        lambda x: x.new_full((2,), 1.0),
        lambda x: torch.linalg.lstsq(x[:, :2], x, driver="gelsd"),
        lambda x: torch.native_layer_norm(x, [3], None, None, 1e-5),
        lambda x: torch.native_group_norm(x[:, :, None], None, None, 3, 3, 1, 1, 1e-5),
        lambda x: torch.native_batch_norm(
            x, None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5
        ),
    ],
)
def test_outputs_that_require_grad(function: Any, transform: Any) -> None:
    x = torch.randn(3, 3, requires_grad=True)
    mine, theirs = (
        [t.requires_grad for t in pytree.tree_leaves(f(x))] for f in (transform(function), function)
    )
    assert mine == theirs


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "classes, ignored", [(n, i) for n in (3, 300) for i in (-100, 1, 255, 400)]
)
def test_cross_entropy_of_targets_that_are_ignored(classes: int, ignored: int) -> None:
    """Targets of int64 and uint8, which has no -100 and ends before the last of 300 classes; an
    ignored one may be a class, or none.
    """
    torch.manual_seed(0)
    weights = torch.rand(classes, dtype=torch.float64)
    every = itertools.product(
        (torch.int64, torch.uint8), ((7,), (2, 5)), ("mean", "sum", "none"), (None, weights)
    )
    for dtype, shape, reduction, weight in every:
        x = torch.randn(shape[0], classes, *shape[1:], dtype=torch.float64)
        if dtype is torch.uint8 and x.dim() > 2:
            continue  # PyTorch takes none
        target = torch.randint(min(classes, 255), shape).to(dtype)
        if dtype is torch.int64 or (ignored < 256 and ignored in range(classes)):
            target.view(-1)[:2] = ignored

        def loss(
            x: torch.Tensor, target: Any = target, reduction: Any = reduction, weight: Any = weight
        ) -> torch.Tensor:
            return F.cross_entropy(
                x, target, weight, ignore_index=ignored, reduction=reduction
            ).sum()

        for found, expected in zip(
            grad_and_value(loss)(x), torch.func.grad_and_value(loss)(x), strict=True
        ):
            case = f"{dtype}, {shape}, {reduction}, {weight is None}"
            torch.testing.assert_close(
                found, expected, msg=lambda words, case=case: f"{case}: {words}"
            )


INDEXED = {
    "x[i]": lambda t, i: t[i[0, 0]],
    "x[:, i]": lambda t, i: t.t()[:, i[0, 0]],
    "index_select": lambda t, i: t.index_select(0, i[0]),
    "gather": lambda t, i: t.gather(0, i),
    "embedding": lambda t, i: F.embedding(i, t),
    "scatter": lambda t, i: t.scatter(0, i, 1.0),
    "scatter_add": lambda t, i: t.scatter_add(0, i, torch.ones(2, 3)),
    "index_put": lambda t, i: t.index_put((i[0],), torch.ones(3, 3)),
}


@pytest.mark.parametrize("transform", [vmap, lambda f: jit(vmap(f))])
@pytest.mark.parametrize("case", INDEXED)
def test_an_empty_dimension_is_indexed_in_no_lanes(case: str, transform: Any) -> None:
    t = torch.zeros(0, 3)
    given = torch.zeros(0, 2, 3, dtype=torch.int64)
    found = transform(lambda i: INDEXED[case](t, i))(given)
    assert found.shape == torch.func.vmap(lambda i: INDEXED[case](t, i))(given).shape
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        transform(lambda i: INDEXED[case](t, i))(torch.zeros(1, 2, 3, dtype=torch.int64))


@pytest.mark.parametrize("transform", [vmap, jit], ids=lambda transform: transform.__name__)
def test_a_number_that_pytorchs_own_vmap_casts(transform: Any) -> None:
    x = torch.linspace(0, 1, 6).reshape(2, 3)
    given = x if transform is vmap else x[0]
    torch.testing.assert_close(
        transform(lambda x: torch.func.vmap(lambda t: t * 2 + 1)(x))(given), given * 2 + 1
    )
