"""Whether an answer is the truth: results, shapes, dtypes, and values as far as PyTorch determines
them.

Values agree within a tolerance, with two refinements. Half types: PyTorch's own result is rounded,
often more than once; an element outside of the tolerance is right all the same where a float64
computation says that it is no farther off than PyTorch's (or, where PyTorch's overflowed, within
the tolerance), or, in a result that as a whole is as near as PyTorch's, than roundings that happen
to fall otherwise explain. Indices of a sort that is not stable: which of several equal elements
comes first is open, so the elements that the indices point at are compared. A few named operators
are judged by float64 in float32 too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

Tensors = tuple[torch.Tensor, ...]

HALF = (torch.float16, torch.bfloat16)
WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}

#: A half result is as near as PyTorch's where its mean error is at most so many times PyTorch's,
#: and no element then may be farther off than so many times PyTorch's worst. (PyTorch's own test of
#: its decompositions compares mean errors against float64, too.)
ALIKE, WORST = 1.5, 4

#: Operators with samples for which float32 rounds more than its tolerance, in PyTorch and here:
#: sums of logarithms at 10000, softmax of large numbers, gradients of 100 beside such of 0.1 and
#: the norm of two numbers cancel. No element may be farther from float64 than four times PyTorch's
#: worst in the same result: two or three roundings that happen to fall otherwise.
CANCELLING = frozenset(
    {
        "logcumsumexp",
        "nn.functional.multi_head_attention_forward",
        "grid_sampler_2d",
        "grid_sampler_3d",
        "native_layer_norm",
        "logsumexp",
        "nn.functional.scaled_dot_product_attention",
    }
)

#: Operators whose float64 results are off in PyTorch, by up to so much beyond 5
#: (test_coverage_verdicts.py compares them with SciPy's).
INEXACT = {
    "special.bessel_j0": 1e-6,
    "special.bessel_j1": 1e-6,
    "special.bessel_y0": 1e-6,
    "special.bessel_y1": 1e-6,
}

#: Operators with poles at which PyTorch's rounded pi leaves a large number: infinity is right
#: there.
POLES = frozenset({"polygamma", "special.polygamma"})

#: Relative and absolute tolerance by dtype. XLA and PyTorch add in different orders; decompositions
#: are solved by different algorithms.
_TOLERANCES = {
    torch.float32: (2e-4, 2e-5),
    torch.complex64: (2e-4, 2e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.float16: (5e-3, 5e-3),
    torch.bfloat16: (2e-2, 2e-2),
}
_SOLVED = frozenset(
    {
        "svd",
        "qr",
        "pinverse",
        "cholesky_inverse",
        "matrix_exp",
        "lu",
        "lu_solve",
        "triangular_solve",
        "geqrf",
        "cholesky_solve",
        "cholesky",
        "logdet",
        "ormqr",
    }
)

#: Operators that order elements, and the arguments that follow the tensor; PyTorch leaves open how
#: equal ones are ordered.
RANKED = {
    "sort": ("dim", "descending"),
    "argsort": ("dim", "descending"),
    "msort": (),
    "topk": ("k", "dim"),
    "kthvalue": ("k", "dim"),
    "mode": ("dim",),
}


@dataclasses.dataclass
class Terms:
    """On what terms an answer is judged.

    Attributes:
        name: the operator.
        random: values are not compared.
        exact: computes the truth in float64 from the same values; asked only where an element is
            outside of the tolerance.
        ranked: for indices that ties leave open, the tensor that they point into and its dimension.
    """

    name: str
    random: bool
    exact: Callable[[], Tensors] | None = None
    ranked: tuple[torch.Tensor, int] | None = None


def wide(tensors: Tensors) -> Tensors:
    """The tensors, those of a narrower type in float64 or complex128."""
    return tuple(t.to(WIDE.get(t.dtype, t.dtype)) for t in tensors)


def untied(t: torch.Tensor) -> torch.Tensor:
    """t, or where elements of it are equal, as many different numbers of its dtype in an order that
    t's own agrees with.
    """
    if not t.dtype.is_floating_point or t.unique().numel() == t.numel():
        return t
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    first = torch.tensor(torch.finfo(t.dtype).tiny, dtype=t.dtype).view(bits)
    rank = t.flatten().argsort(stable=True).argsort().to(bits)
    spread = (first + rank).view(t.dtype)  # successive floats
    if not spread.isfinite().all():
        raise ValueError(f"untied(): {t.dtype} has no {t.numel()} different numbers")
    return spread.reshape(t.shape)


def ranked(
    name: str, sample: Any, input: torch.Tensor, lanes: bool = False
) -> tuple[torch.Tensor, int] | None:
    """Where the indices that a sample gives point to, as in ``Terms.ranked``; None where PyTorch
    determines them all.
    """
    given = dict(zip(RANKED.get(name, ()), sample.args)) | sample.kwargs
    if name not in RANKED or given.get("stable") or not sample.input.ndim:
        return None
    dim = given.get("dim", -1)
    return input, dim + 1 if lanes and dim >= 0 else dim


def difference(got: Any, truth: Tensors, terms: Terms) -> str | None:
    """In what an answer is not the truth; None where it is."""
    got = pytree.tree_leaves(got)
    if len(got) != len(truth):
        return f"{len(got)} results instead of {len(truth)}"
    for i, (g, t) in enumerate(zip(got, truth)):
        if type(g) is not torch.Tensor:
            return f"a {type(g).__name__} instead of a tensor"
        t = t.detach() if t.layout == torch.strided else t.detach().to_dense()
        if g.shape != t.shape:
            return f"shape {tuple(g.shape)} instead of {tuple(t.shape)}"
        if g.dtype != t.dtype:
            return f"{g.dtype} instead of {t.dtype}"
        if terms.random:
            continue
        g = g.detach()
        if terms.ranked and g.dtype == torch.int64 and (terms.name == "argsort" or i == 1):
            if wrong := _misplaced(g, t, *terms.ranked):
                return wrong
            continue
        if terms.name in POLES:
            t = torch.where(g.isinf() & (t.abs() > 1e12), g, t)
        rtol, atol = _TOLERANCES.get(t.dtype, (0, 0))
        atol = max(atol, INEXACT.get(terms.name, 0)) if atol else 0
        loose = 100 if terms.name.startswith("linalg") or terms.name in _SOLVED else 1
        try:
            torch.testing.assert_close(g, t, rtol=rtol * loose, atol=atol * loose, equal_nan=True)
        except AssertionError as error:
            off = ~torch.isclose(g, t, rtol * loose, atol * loose, equal_nan=True)
            if not _as_near(g, t, i, off, terms):
                return "values: " + " ".join(str(error).split())[:120]
    return None


def _misplaced(got: torch.Tensor, truth: torch.Tensor, input: torch.Tensor, dim: int) -> str | None:
    """What is wrong with indices into input along dim: each must be there, once, and point at an
    element equal to the truth's.
    """
    if got.ndim < input.ndim:
        got, truth = got.unsqueeze(dim), truth.unsqueeze(dim)
    if got.numel() and not 0 <= int(got.min()) <= int(got.max()) < input.shape[dim]:
        return "indices: out of range"
    in_order = got.sort(dim).values
    if (in_order.diff(dim=dim) == 0).any():
        return "indices: one of them twice"
    found, expected = input.gather(dim, got), input.gather(dim, truth)
    same = found == expected
    if input.dtype.is_floating_point:
        same |= found.isnan() & expected.isnan()
    return (
        None
        if same.all()
        else f"indices: {int((~same).sum())} of {same.numel()} point at other values"
    )


def _as_near(
    got: torch.Tensor, truth: torch.Tensor, i: int, off: torch.Tensor, terms: Terms
) -> bool:
    """Whether the elements that are off are as near to a float64 computation as PyTorch's own."""
    cancelling = terms.name in CANCELLING and truth.dtype in (torch.float32, torch.complex64)
    if (truth.dtype not in HALF and not cancelling) or terms.exact is None:
        return False
    try:
        found = terms.exact()
    except Exception:  # no float64 in this operator
        return False
    if len(found) <= i or found[i].shape != off.shape or found[i].dtype != WIDE[truth.dtype]:
        return False
    exact = found[i].detach()
    ours, theirs = ((t.to(exact.dtype) - exact).abs() for t in (got, truth))
    rtol, atol = _TOLERANCES[truth.dtype]
    if cancelling:
        allowed = WORST * theirs.max().expand(exact.shape)
    else:
        finite = ours.isfinite() & theirs.isfinite()
        alike = finite.any() and ours[finite].mean() <= ALIKE * theirs[finite].mean()
        allowed = torch.maximum(theirs, WORST * theirs[finite].max()) if alike else theirs
    # PyTorch overflowed
    allowed = torch.where(theirs.isfinite(), allowed, atol + rtol * exact.abs())
    near = got.isfinite() & (ours <= allowed)
    # or too large for the dtype, and so infinite
    return bool((near | (got == exact.to(got.dtype)))[off].all())
