"""PyTorch's backward operators as functions of their own: values, first and second derivatives far
from zero, at kinks and in every dtype.

``jit`` around torch.func's own transforms runs torch's autograd inside a trace, so that a
derivative of such a call differentiates the operators that autograd calls. The reference is
PyTorch's double backward in the same dtype or in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import torchfunc_jax
from bridge import private
from bridge.lowering.registry import LOWERINGS

aten = torch.ops.aten
_VALUES = [-1e3, -100.0, -1.0, 0.0, -0.0, 1.0, 100.0, 1e3]
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
Operator = Callable[..., Any]

#: element by element, of a gradient and an input: (operator, kinks and inputs where it is not
#: trivial)
_ONE: dict[str, tuple[Operator, list[float]]] = {
    "softplus": (lambda g, x: aten.softplus_backward(g, x, 1, 20), [20.0, 21.0, -21.0]),
    "softplus of a low threshold": (lambda g, x: aten.softplus_backward(g, x, 2, 1), [0.5, 0.25]),
    "elu": (lambda g, x: aten.elu_backward(g, 1.0, 1, 1, False, x), [-0.5]),
    "elu of its result": (lambda g, x: aten.elu_backward(g, 1.5, 2, 0.5, True, x), [-0.5]),
    "celu": (lambda g, x: aten.elu_backward(g, 1.5, 1, 1 / 1.5, False, x), [-0.5]),
    "selu": (
        lambda g, x: aten.elu_backward(g, 1.6732632423543772, 1.0507009873554805, 1, False, x),
        [-0.5],
    ),
    "gelu": (lambda g, x: aten.gelu_backward(g, x), [0.5]),
    "gelu tanh": (lambda g, x: aten.gelu_backward(g, x, approximate="tanh"), [0.5]),
    "silu": (lambda g, x: aten.silu_backward(g, x), [0.5]),
    "mish": (lambda g, x: aten.mish_backward(g, x), [0.5]),
    "hardswish": (lambda g, x: aten.hardswish_backward(g, x), [3.0, -3.0]),
    "hardsigmoid": (lambda g, x: aten.hardsigmoid_backward(g, x), [3.0, -3.0]),
    "hardtanh": (lambda g, x: aten.hardtanh_backward(g, x, -1, 1), [0.5]),
    "leaky_relu": (lambda g, x: aten.leaky_relu_backward(g, x, 0.01, False), [0.5]),
    "leaky_relu of its result": (lambda g, x: aten.leaky_relu_backward(g, x, 0.01, True), [0.5]),
    "threshold": (lambda g, x: aten.threshold_backward(g, x, 1.0), [0.5]),
    "sigmoid": (lambda g, x: aten.sigmoid_backward(g, x), [0.5]),
    "tanh": (lambda g, x: aten.tanh_backward(g, x), [0.5]),
    "logit": (lambda g, x: aten.logit_backward(g, x), [0.5, 0.25]),
    "logit between": (lambda g, x: aten.logit_backward(g, x, 0.25), [0.5, 0.25, 0.75]),
    "log_sigmoid": (
        lambda g, x: aten.log_sigmoid_backward(g, x, torch.exp(-x.detach().abs())),
        [0.5],
    ),
    "glu": (lambda g, x: aten.glu_backward(g[:, None], torch.stack([x, x], -1), -1)[:, 0], [0.5]),
    "softshrink": (lambda g, x: aten.softshrink_backward(g, x, 0.5), [0.5, -0.5]),
    "hardshrink": (lambda g, x: aten.hardshrink_backward(g, x, 0.5), [0.5, -0.5]),
    "rrelu": (
        lambda g, x: aten.rrelu_with_noise_backward(
            g, x, torch.where(x <= 0, 0.25, 1.0).to(x.dtype), 0.125, 0.5, True, False
        ),
        [],
    ),
    "rrelu in evaluation": (
        lambda g, x: aten.rrelu_with_noise_backward(
            g, x, torch.ones_like(x), 0.125, 0.5, False, False
        ),
        [],
    ),
    "dropout": (lambda g, x: aten.native_dropout_backward(g * x, x.detach() > 0, 2.0), []),
}

#: of a gradient, an input and a target or weight, at all pairs of values
_TWO: dict[str, tuple[Operator, list[float]]] = {
    "mse_loss": (lambda g, x, t: aten.mse_loss_backward(g, x, t, 0), []),
    "smooth_l1_loss": (lambda g, x, t: aten.smooth_l1_loss_backward(g, x, t, 0, 1.0), [0.5]),
    "smooth_l1_loss without a curve": (
        lambda g, x, t: aten.smooth_l1_loss_backward(g, x, t, 0, 0.0),
        [],
    ),
    "huber_loss": (lambda g, x, t: aten.huber_loss_backward(g, x, t, 0, 1.0), [0.5]),
    "soft_margin_loss": (lambda g, x, t: aten.soft_margin_loss_backward(g, x, t.detach(), 0), []),
    "binary_cross_entropy": (
        lambda g, x, t: aten.binary_cross_entropy_backward(
            g, x.clamp(0, 1), t.clamp(0, 1), None, 0
        ),
        [0.5, 0.25],
    ),
    "prelu": (lambda g, x, w: aten._prelu_kernel_backward(g, x, w)[0], []),
    "prelu by weight": (lambda g, x, w: aten._prelu_kernel_backward(g, x, w)[1], []),
}

_windows = ([2, 2], [2, 2], [0, 0])
_pooled = lambda x, n: getattr(F, f"max_pool{n}d")(x.detach(), 2, return_indices=True)[1]
_moments = lambda x, d: (
    x.mean(d, keepdim=True).detach(),
    (x.var(d, correction=0, keepdim=True) + 1e-5).rsqrt().detach(),
)
_I = (1, 2, 4, 4)

#: of tensors of these shapes
_SHAPED: dict[str, tuple[Operator, tuple[tuple[int, ...], ...]]] = {
    "softmax": (
        lambda g, x: aten._softmax_backward_data(g, x.softmax(-1), -1, x.dtype),
        ((3, 4), (3, 4)),
    ),
    "log_softmax": (
        lambda g, x: aten._log_softmax_backward_data(g, x.log_softmax(-1), -1, x.dtype),
        ((3, 4), (3, 4)),
    ),
    "mse_loss mean": (lambda g, x, t: aten.mse_loss_backward(g, x, t, 1), ((), (3, 4), (3, 4))),
    "huber_loss mean": (
        lambda g, x, t: aten.huber_loss_backward(g, x, t, 1, 1.0),
        ((), (3, 4), (3, 4)),
    ),
    "smooth_l1_loss sum": (
        lambda g, x, t: aten.smooth_l1_loss_backward(g, x, t, 2, 1.0),
        ((), (3, 4), (3, 4)),
    ),
    "binary_cross_entropy mean": (
        lambda g, x, t: aten.binary_cross_entropy_backward(
            g, x / 8e3 + 0.5, t / 8e3 + 0.5, x.detach().abs(), 1
        ),
        ((), (3, 4), (3, 4)),
    ),
    "nll_loss": (
        lambda g, x: aten.nll_loss_backward(
            g, x, torch.tensor([0, 3, 1]), None, 1, 3, torch.tensor(2.0, dtype=x.dtype)
        ),
        ((), (3, 4)),
    ),
    "nll_loss2d": (
        lambda g, x: aten.nll_loss2d_backward(
            g, x, torch.zeros(1, 4, 4).long(), None, 0, -100, torch.tensor(0.0, dtype=x.dtype)
        ),
        ((1, 4, 4), _I),
    ),
    "multi_margin_loss": (
        lambda g, x: aten.multi_margin_loss_backward(g, x, torch.tensor([0, 3, 1]), 2, 1.0),
        ((), (3, 4)),
    ),
    "multilabel_margin_loss": (
        lambda g, x: aten.multilabel_margin_loss_backward(
            g, x, torch.tensor([[0, 2, -1, 0]]), 1, torch.tensor([[1, 0, 1, 0]], dtype=x.dtype)
        ),
        ((), (1, 4)),
    ),
    "layer_norm": (
        lambda g, x, w: aten.native_layer_norm_backward(
            g, x, [4], *_moments(x, -1), w, w, [True, True, True]
        ),
        ((3, 4), (3, 4), (4,)),
    ),
    "group_norm": (
        lambda g, x, w: aten.native_group_norm_backward(
            g,
            x,
            *(m.flatten()[None] for m in _moments(x.view(2, -1), 1)),
            w,
            1,
            2,
            16,
            2,
            [True, True, True],
        ),
        (_I, _I, (2,)),
    ),
    "batch_norm": (
        lambda g, x, w: aten.native_batch_norm_backward(
            g,
            x,
            w,
            None,
            None,
            *(m.flatten() for m in _moments(x, 0)),
            True,
            1e-5,
            [True, True, True],
        ),
        ((5, 4), (5, 4), (4,)),
    ),
    "batch_norm in evaluation": (
        lambda g, x, w: aten.native_batch_norm_backward(
            g,
            x,
            w,
            x.detach().mean(0),
            x.detach().var(0),
            None,
            None,
            False,
            1e-5,
            [True, True, True],
        ),
        ((5, 4), (5, 4), (4,)),
    ),
    "weight_norm": (
        lambda g, v, w: aten._weight_norm_interface_backward(
            g, v, w, v.detach().norm(dim=1, keepdim=True), 0
        ),
        ((3, 4), (3, 4), (3, 1)),
    ),
    "convolution": (
        lambda g, x, w: aten.convolution_backward(
            g, x, w, [2], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        ),
        (_I, _I, (2, 2, 3, 3)),
    ),
    "cdist": (
        lambda g, x, y: aten._cdist_backward(g, x, y, 2.0, torch.cdist(x, y).detach()),
        ((3, 2), (3, 4), (2, 4)),
    ),
    "pdist": (lambda g, x: aten._pdist_backward(g, x, 2.0, F.pdist(x).detach()), ((3,), (3, 4))),
    "embedding": (
        lambda g: aten.embedding_dense_backward(g, torch.tensor([0, 2, 0]), 4, 2, False),
        ((3, 4),),
    ),
    "embedding scaled": (
        lambda g: aten.embedding_dense_backward(g, torch.tensor([0, 2, 0]), 4, -1, True),
        ((3, 4),),
    ),
    "select": (lambda g: aten.select_backward(g, [3, 4], 0, 1), ((4,),)),
    "slice": (lambda g: aten.slice_backward(g, [5, 4], 0, 0, 5, 2), ((3, 4),)),
    "diagonal": (lambda g: aten.diagonal_backward(g, [4, 4], 0, 0, 1), ((4,),)),
    "unfold": (lambda g: aten.unfold_backward(g, [5], 0, 2, 1), ((4, 2),)),
    "masked_scatter": (
        lambda g: aten.masked_scatter_backward(g, torch.tensor([True, False, True, True]), [3]),
        ((4,),),
    ),
    "grid_sampler_2d": (
        lambda g, x, at: aten.grid_sampler_2d_backward(g, x, at.sin(), 0, 0, False, [True, True]),
        ((1, 2, 3, 3), _I, (1, 3, 3, 2)),
    ),
    "grid_sampler_3d": (
        lambda g, x, at: aten.grid_sampler_3d_backward(g, x, at.sin(), 0, 1, True, [True, True]),
        ((1, 1, 2, 1, 1), (1, 1, 2, 2, 2), (1, 2, 1, 1, 3)),
    ),
    "attention": (
        lambda g, q, k: aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g,
            q,
            k,
            k,
            *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k),
            0.0,
            False,
        ),
        ((1, 1, 3, 4),) * 3,
    ),
    "segment_reduce": (
        lambda g, x: aten._segment_reduce_backward(
            g,
            torch.segment_reduce(x, "max", lengths=torch.tensor([2, 3])).detach(),
            x,
            "max",
            lengths=torch.tensor([2, 3]),
        ),
        ((2,), (5,)),
    ),
    "avg_pool2d": (
        lambda g, x: aten.avg_pool2d_backward(g, x, *_windows, False, True, None),
        ((1, 2, 2, 2), _I),
    ),
    "avg_pool3d": (
        lambda g, x: aten.avg_pool3d_backward(g, x, [2] * 3, [2] * 3, [0] * 3, False, True, None),
        ((1, 1, 1, 2, 2), (1, 1, 2, 4, 4)),
    ),
    "adaptive_avg_pool2d": (
        lambda g, x: aten._adaptive_avg_pool2d_backward(g, x),
        ((1, 2, 3, 3), _I),
    ),
    "adaptive_avg_pool3d": (
        lambda g, x: aten._adaptive_avg_pool3d_backward(g, x),
        ((1, 1, 1, 3, 3), (1, 1, 2, 4, 4)),
    ),
    "max_pool2d": (
        lambda g, x: aten.max_pool2d_with_indices_backward(
            g, x, *_windows, [1, 1], False, _pooled(x, 2)
        ),
        ((1, 2, 2, 2), _I),
    ),
    "max_pool3d": (
        lambda g, x: aten.max_pool3d_with_indices_backward(
            g, x, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, _pooled(x, 3)
        ),
        ((1, 1, 1, 2, 2), (1, 1, 2, 4, 4)),
    ),
    "adaptive_max_pool2d": (
        lambda g, x: aten.adaptive_max_pool2d_backward(g, x, _pooled(x, 2)),
        ((1, 2, 2, 2), _I),
    ),
    "adaptive_max_pool3d": (
        lambda g, x: aten.adaptive_max_pool3d_backward(g, x, _pooled(x, 3)),
        ((1, 1, 1, 2, 2), (1, 1, 2, 4, 4)),
    ),
    "fractional_max_pool2d": (
        lambda g, x: aten.fractional_max_pool2d_backward(g, x, [2, 2], [2, 2], _pooled(x, 2)),
        ((1, 2, 2, 2), _I),
    ),
    "fractional_max_pool3d": (
        lambda g, x: aten.fractional_max_pool3d_backward(g, x, [2] * 3, [1, 2, 2], _pooled(x, 3)),
        ((1, 1, 1, 2, 2), (1, 1, 2, 4, 4)),
    ),
    **{
        f"{kind}_pad{n}d": (
            lambda g, x, op=getattr(aten, f"{kind}_pad{n}d_backward"), n=n: op(g, x, [1] * (2 * n)),
            ((1, *[5] * n), (1, *[3] * n)),
        )
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    **{
        f"upsample_{name}{n}d": (
            lambda g, op=getattr(aten, f"{private}upsample_{name}{n}d_backward"), n=n, rest=rest: (
                op(g, [5] * n, [1, 1, *[3] * n], *rest, *[None] * n)
            ),
            ((1, 1, *[5] * n),),
        )
        for private, name, n, rest in [("", "nearest", n, []) for n in (1, 2, 3)]
        + [("_", "nearest_exact", n, []) for n in (1, 2, 3)]
        + [
            ("", "linear", 1, [False]),
            ("", "bilinear", 2, [True]),
            ("", "bicubic", 2, [False]),
            ("", "trilinear", 3, [True]),
        ]
    },
    **{
        f"upsample_{name}2d_aa": (
            lambda g, op=getattr(aten, f"_upsample_{name}2d_aa_backward", None): op(
                g, [5, 5], [1, 1, 3, 3], False, None, None
            ),
            ((1, 1, 5, 5),),
        )
        for name in ("bilinear", "bicubic", "lanczos")
        if hasattr(aten, f"_upsample_{name}2d_aa_backward")
    },
}


def _gelu_tanh(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))
    return g * (s + x * s * (1 - s) * 1.5957691216057308 * (1 + 3 * 0.044715 * x * x))


def _mish(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t = torch.logaddexp(x, torch.zeros_like(x)).tanh()
    return g * (t + x * (1 - t * t) * torch.sigmoid(x))


def _normalized(dim: int) -> Operator:
    """The backward operator of a normalization; PyTorch's third derivatives take the statistics for
    constants.
    """

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(dim, keepdim=True)) / (
            x.var(dim, correction=0, keepdim=True) + 1e-5
        ).sqrt() * w + b

    return lambda g, x, w: torch.func.vjp(norm, x, w, w)[1](g)


#: the operators whose derivatives PyTorch does not have, or has wrong, in differentiable steps
_FORMULAS: dict[str, Operator] = {
    "silu": lambda g, x: g * x.sigmoid() * (1 + x * (-x).sigmoid()),
    "mish": _mish,
    "gelu tanh": _gelu_tanh,
    "hardsigmoid": lambda g, x: torch.where(x.abs() < 3, g / 6, 0 * g),
    "logit": lambda g, x: torch.where((x < 0) | (x > 1), math.nan, g / (x * (1 - x))),
    "logit between": lambda g, x: torch.where((x < 0.25) | (x > 0.75), 0 * g, g / (x * (1 - x))),
    "soft_margin_loss": lambda g, x, t: -g * t.detach() * torch.sigmoid(-t.detach() * x),
    # PyTorch's derivatives at 0 are those from above, its value is not
    "prelu": lambda g, x, w: torch.where(x > 0, g, g * w),
    "prelu by weight": lambda g, x, w: torch.where(x > 0, 0 * g, g * x),
    "embedding scaled": lambda g: torch.zeros(4, 4, dtype=g.dtype).index_add(
        0, torch.tensor([0, 2, 0]), g / torch.tensor([[2], [1], [2]])
    ),  # PyTorch forgets the scale
    "layer_norm": _normalized(-1),
    "batch_norm": _normalized(0),
}

#: where no reference is right: (of which results, why, the inputs)
_OPEN: dict[str, tuple[str, str, Operator]] = {
    "logit": (
        "value first second",
        "infinite at 0, with another sign in PyTorch's formula, or NaN",
        lambda g, x: (x <= 0) | (x > 1),
    ),
    "segment_reduce": (
        "value",
        "among equal elements PyTorch divides the gradient in some segments",
        lambda g, x: x == 0,
    ),
    "binary_cross_entropy": (
        "second",
        "PyTorch's formulas at 0 and 1 depend on the order of the derivatives",
        lambda g, x, t: (x <= 0) | (x >= 1),
    ),
}


def _filled(shape: tuple[int, ...], dtype: torch.dtype, scale: float, seed: int) -> torch.Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * scale
    ).to(dtype)


def _calls(name: str, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """The arguments at which an operator is called; the first is the gradient of the forward
    operator's result.
    """
    if name in _SHAPED:
        shapes = _SHAPED[name][1]
        scales = [1e3, 100.0, 1.0, 0.0] if dtype.itemsize > 2 else [10.0, 1.0, 0.0]
        return [
            tuple(_filled(s, dtype, scale if k else 1.5, k) for k, s in enumerate(shapes))
            for scale in scales
        ]
    x = torch.tensor([*_VALUES, *({**_ONE, **_TWO}[name][1])], dtype=dtype)
    args = (x,) if name in _ONE else (x.repeat_interleave(len(x)), x.repeat(len(x)))
    return [(torch.full_like(args[0], 1.5), *args)]


def _tensors(out: Any) -> list[torch.Tensor]:
    return [t for t in (out if isinstance(out, tuple | list) else [out]) if t is not None]


def _total(outs: Any) -> torch.Tensor:
    return sum(
        (t.flatten() * torch.cos(torch.arange(t.numel(), dtype=t.dtype))).sum()
        for t in _tensors(outs)
    )


def _derivatives(
    T: Any, operator: Operator, args: tuple[torch.Tensor, ...], known: str = "first"
) -> dict[str, list[torch.Tensor]]:
    """The value, and the first and second derivatives of a weighted sum of the results if known is
    not the value alone.
    """
    places = tuple(range(len(args)))
    found = {"value": _tensors(operator(*args))}
    if known == "value":
        return found
    first = T.grad(lambda *args: _total(operator(*args)), places)
    found["first"] = list(first(*args))
    found["second"] = [
        d for i in places for d in T.grad(lambda *args, i=i: _total(first(*args)[i]), places)(*args)
    ]
    return found


_OPERATORS = {name: row[0] for table in (_ONE, _TWO, _SHAPED) for name, row in table.items()}


def _right(
    name: str, operator: Operator, args: tuple[torch.Tensor, ...]
) -> list[dict[str, list[torch.Tensor]]]:
    """PyTorch's results in this dtype and in float64; without its derivatives, those of a formula;
    else the value alone.
    """
    wide, found = tuple(a.double() for a in args), []
    for given in (args, wide):
        try:
            found.append(_derivatives(torch.func, operator, given))
        except RuntimeError:
            found.append({"value": _tensors(operator(*given))})
    if name in _FORMULAS:
        found = [{"value": found[0]["value"]}, _derivatives(torch.func, _FORMULAS[name], wide)]
    return found


def _near(a: torch.Tensor, b: torch.Tensor, tolerance: float, shaped: bool) -> torch.Tensor:
    b = b.to(a.dtype).double()  # what is beyond the dtype is infinite
    size = b[b.isfinite()].abs().max().item() if shaped and b.isfinite().any() else 1.0
    return torch.isclose(
        a.double(), b, rtol=tolerance, atol=tolerance * max(1.0, size), equal_nan=True
    )


def _compared(name: str, dtype: torch.dtype) -> int:
    """Compares all results of one operator in one dtype; the number of elements compared, 0 if
    PyTorch does not have the dtype.
    """
    operator = _OPERATORS[name]
    kinds, _, at = _OPEN.get(name, ("", "", None))
    cells, wrong = 0, []
    for args in _calls(name, dtype):
        try:
            operator(*args)
        except RuntimeError:
            return 0
        references = _right(name, operator, args)
        known = "first" if any("first" in r for r in references) else "value"
        ours = torchfunc_jax.jit(
            lambda *args, known=known: _derivatives(torchfunc_jax, operator, args, known)
        )(*args)
        for kind, i, found in [
            (kind, i, t) for kind, results in ours.items() for i, t in enumerate(results)
        ]:
            assert found.dtype is dtype
            right = [r[kind][i] for r in references if kind in r]
            free = torch.stack([r.isnan() for r in right]).all(0) & (kind != "value")
            if kind in kinds.split():
                free = free | at(*args)
            tolerance = _TOLERANCE[dtype] * (5 if kind == "second" else 1)
            bad = (
                ~torch.stack([_near(found, r, tolerance, name in _SHAPED) for r in right]).any(0)
                & ~free
            )
            cells += int((~free).sum())
            for k in bad.flatten().nonzero()[:, 0].tolist():
                inputs = [a.flatten()[k].item() for a in args if a.numel() > k]
                expected = [r.flatten()[k].item() for r in right]
                wrong.append(
                    f"{kind} {i} at {inputs}: expected {expected}, got {found.flatten()[k].item()}"
                )
    assert not wrong, "\n".join(wrong[:12])
    return cells


_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    "dtype",
    [_DTYPES[0], *(pytest.param(d, marks=pytest.mark.slow) for d in _DTYPES[1:])],
    ids=lambda d: str(d)[6:],
)
@pytest.mark.parametrize(
    "name", [*_ONE, *(pytest.param(n, marks=pytest.mark.slow) for n in (*_TWO, *_SHAPED))]
)
def test_derivatives(name: str, dtype: torch.dtype) -> None:
    if not _compared(name, dtype):
        pytest.skip("PyTorch does not have the operator in this dtype")


#: backward operators that a row of another subject tests, or that PyTorch does not have on the CPU
_ELSEWHERE = {
    "_ctc_loss_backward",
    "_embedding_bag_backward",
    "_embedding_bag_dense_backward",
    "_embedding_bag_per_sample_weights_backward",
    "_fake_quantize_learnable_per_channel_affine_backward",
    "_fake_quantize_learnable_per_tensor_affine_backward",
    "_fused_rms_norm_backward",
    "batch_norm_backward",
    "cudnn_batch_norm_backward",
    "miopen_batch_norm_backward",
    "mkldnn_rnn_layer_backward",
}


def test_no_backward_operator_is_left_out() -> None:
    called: set[str] = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.add(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    with Names():
        for name, operator in _OPERATORS.items():
            operator(*_calls(name, torch.float64)[-1])
    handled = {
        f._schema.name
        for f in [*LOWERINGS, *private.decompositions()]
        if isinstance(f, torch._ops.OpOverload)
    }
    names = {
        n.removeprefix("aten::") for n in handled if n.startswith("aten::") and "_backward" in n
    }
    assert names - called - _ELSEWHERE == set()


def _leaf(dtype: torch.dtype, kinks: list[float]) -> torch.Tensor:
    return torch.tensor([*_VALUES, *kinks], dtype=dtype, requires_grad=True)


#: forward functions, with their kinks
_FORWARD: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[float]]] = {
    **{
        name: (getattr(F, name), [3.0, -3.0, 20.0, 21.0, 0.5, -0.5])
        for name in (
            "softplus",
            "elu",
            "celu",
            "selu",
            "gelu",
            "silu",
            "mish",
            "hardswish",
            "relu",
            "relu6",
            "leaky_relu",
            "hardtanh",
            "softshrink",
            "hardshrink",
            "logsigmoid",
            "softsign",
            "tanhshrink",
            "rrelu",
        )
    },
    "elu in place": (lambda x: F.elu(x * 1, inplace=True), [0.5, -0.5]),
    "leaky_relu in place": (lambda x: F.leaky_relu(x * 1, inplace=True), [0.5, -0.5]),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), [0.5, -0.5]),
    "softplus of a low threshold": (lambda x: F.softplus(x, 2, 1), [0.5]),
    "threshold": (lambda x: F.threshold(x, 1.0, 5.0), []),
    "rrelu in training": (lambda x: F.rrelu(x, training=True), []),
    "prelu": (lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype)), [0.5]),
    "glu": (lambda x: F.glu(torch.stack([x, x], -1))[..., 0], [0.5]),
    "huber_loss": (lambda x: F.huber_loss(x, torch.zeros_like(x)), [0.5]),
    "smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)), [0.5]),
    "mse_loss": (lambda x: F.mse_loss(x, torch.zeros_like(x)), [0.5]),
    "soft_margin_loss": (lambda x: F.soft_margin_loss(x, torch.ones_like(x)), [0.5]),
    "binary_cross_entropy": (
        lambda x: F.binary_cross_entropy(x.clamp(0, 1), torch.full_like(x, 0.3)),
        [0.5],
    ),
    "cross_entropy": (lambda x: F.cross_entropy(x[None], torch.tensor([1])), [0.5]),
    "max_pool": (lambda x: F.max_pool1d(x[None, None], 2), [0.5, 0.25]),
}


def _second(way: str, f: Callable, x: torch.Tensor) -> torch.Tensor:
    total = lambda x: f(x).sum()
    if way == "PyTorch":
        (slope,) = torch.autograd.grad(total(x), x, create_graph=True)
    elif way == "through a call":
        (slope,) = torch.autograd.grad(torchfunc_jax.jit(f)(x).sum(), x, create_graph=True)
    else:
        slope = torchfunc_jax.jit(
            (torch.func if way == "jit of torch.func" else torchfunc_jax).grad(total)
        )(x)
    return torch.autograd.grad(slope.sum(), x)[0]


@pytest.mark.parametrize(
    "way",
    [
        "through a call",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("jit of torch.func", "jit")),
    ],
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)],
    ids=lambda d: str(d)[6:],
)
@pytest.mark.parametrize("name", _FORWARD)
def test_double_backward(name: str, dtype: torch.dtype, way: str) -> None:
    """It is zero, and no error, where the derivative of a piecewise linear function only reads the
    sign of its input.
    """
    f, kinks = _FORWARD[name]
    torch.manual_seed(0)
    expected = _second("PyTorch", f, _leaf(dtype, kinks))
    torch.manual_seed(0)
    found = _second(way, f, _leaf(dtype, kinks))
    known = ~expected.isnan()  # PyTorch's mish and soft_margin_loss overflow
    torch.testing.assert_close(found[known], expected[known], rtol=1e-4, atol=1e-6)
