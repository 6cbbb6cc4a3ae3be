"""Dtypes that PyTorch has no kernel for are refused in its own words, and no others."""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import refused_dtypes
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import bridge
from bridge.lowering.registry import LOWERINGS, OVERRIDDEN
from bridge.operators import dtype_refusals_table as committed
from bridge.operators.dtype_refusals import guarded
from bridge.process import process
from torchfunc_jax import functionalize, jit, vmap

pytestmark = pytest.mark.sweep

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
INTS, BOOLS, COMPLEX = (X * 3).int(), X > 0, X.to(torch.complex64)

CASES: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "abs of bools": (torch.abs, BOOLS),
    "abs_ of bools": (lambda x: x.clone().abs_(), BOOLS),
    "softmax of complex": (lambda x: torch.softmax(x, 0), COMPLEX),
    "softmax of ints": (lambda x: torch.softmax(x, 0), INTS),
    "log_softmax of ints": (lambda x: torch.log_softmax(x, 0), INTS),
    "relu of complex": (torch.relu, COMPLEX),
    "relu of bools": (torch.relu, BOOLS),
    "sign of complex": (torch.sign, COMPLEX),
    "floor of complex": (torch.floor, COMPLEX),
    "max of complex": (torch.max, COMPLEX),
    "sort of complex": (lambda x: torch.sort(x)[0], COMPLEX),
    "median of bools": (torch.median, BOOLS),
    "argmax of bools": (torch.argmax, BOOLS),
    "topk of bools": (lambda x: torch.topk(x, 1)[0], BOOLS),
    "mean of ints": (torch.mean, INTS),
    "matmul of bools": (lambda x: x @ x, BOOLS),
    "trace of bools": (torch.trace, BOOLS),
    "pow of bools": (lambda x: x**x, BOOLS),
    "clamp of complex": (lambda x: torch.clamp(x, 0.0, 1.0), COMPLEX),
    "isneginf of complex": (torch.isneginf, COMPLEX),
    "atan2 of complex": (lambda x: torch.atan2(x, x), COMPLEX),
    "hypot of ints": (lambda x: torch.hypot(x, x), INTS),
    "lerp of ints": (lambda x: torch.lerp(x, x, 1), INTS),
    "lerp of two dtypes": (lambda x: torch.lerp(x, x.double(), 0.5), X),
    "logcumsumexp of ints": (lambda x: torch.logcumsumexp(x, 0), INTS),
    "floats shifted": (lambda x: x << 1, X),
    "floats shifted by floats": (lambda x: x >> x, X),
    "& of floats": (lambda x: x & x, X),
    "xlogy by a complex number": (lambda x: torch.xlogy(x, 1j), X),
    "xlog1py of a complex number": (lambda x: torch.special.xlog1py(1j, x), X),
    "zeta of bfloat16 by a number": (lambda x: torch.special.zeta(x.bfloat16(), 2.0), X),
    "fmod by a complex number": (lambda x: torch.fmod(x, 1j), X),
    "greater than a complex number": (lambda x: x > 1j, X),
    "gcd of floats": (lambda x: torch.gcd(x, x), X),
    "mse_loss of ints": (lambda x: F.mse_loss(x, x), INTS),
    "mse_loss of complex": (lambda x: F.mse_loss(x, 2 * x), COMPLEX),
    "nll_loss of ints": (lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.int64)), INTS),
    "interpolate of ints": (lambda x: F.interpolate(x[None, None], scale_factor=2), INTS),
    "avg_pool2d of ints": (lambda x: F.avg_pool2d(x[None, None], 2), INTS),
    "max_pool2d of bools": (lambda x: F.max_pool2d(x[None, None], 2), BOOLS),
    "prelu of ints": (lambda x: F.prelu(x, x[0, :1]), INTS),
    "softshrink of ints": (F.softshrink, INTS),
    "grid of another dtype": (
        lambda x: F.grid_sample(x[None, None], x.double().reshape(1, 2, 4, 2), align_corners=False),
        X,
    ),
    "embedding by floats": (lambda x: F.embedding(x, x), X),
    "norm into a narrower dtype": (
        lambda x: torch.linalg.vector_norm(x.double(), dtype=torch.float32),
        X,
    ),
    "norm of complex as real": (
        lambda x: torch.linalg.vector_norm(x, dtype=torch.float32),
        COMPLEX,
    ),
    "norm of reals as complex": (lambda x: torch.linalg.vector_norm(x, dtype=torch.complex64), X),
    "norm as ints": (lambda x: torch.linalg.vector_norm(x, dtype=torch.int64), X),
    "a layer_norm whose weight is wider": (lambda x: F.layer_norm(x, (4,), x[0].double()), X),
    "a batch_norm whose weight is wider": (
        lambda x: F.batch_norm(x, None, None, x[0].double(), training=True),
        X,
    ),
    "a group_norm whose weight is wider": (lambda x: F.group_norm(x, 2, x[0].double()), X),
    "binary_cross_entropy of two dtypes": (
        lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid().double()),
        X,
    ),
    "nll_loss whose weight is wider": (
        lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.int64), x[0].double()),
        X,
    ),
    "cross_entropy by int16": (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int16)), X),
    "cdist of two dtypes": (lambda x: torch.cdist(x, x.double()), X),
    "lstsq of two dtypes": (lambda x: torch.linalg.lstsq(x, x.double())[0], X),
    "index_select by int16": (lambda x: x.index_select(0, torch.tensor([1], dtype=torch.int16)), X),
    "index_fill by int16": (
        lambda x: x.index_fill(0, torch.tensor([1], dtype=torch.int16), 0.0),
        X,
    ),
    "unfold of ints": (lambda x: F.unfold(x[None, None], 2), INTS),
    "geometric_ of bools": (lambda x: x.clone().geometric_(0.5), BOOLS),
    "exponential_ of ints": (lambda x: x.clone().exponential_(), INTS),
    "abs_ of complex": (lambda x: x.clone().abs_(), COMPLEX),
    "_foreach_abs of bools": (lambda x: torch._foreach_abs([x]), BOOLS),
    "_foreach_floor_ of complex": (lambda x: torch._foreach_floor_([x.clone()]), COMPLEX),
    "arange of complex": (lambda x: x + torch.arange(4, dtype=torch.complex64), X),
    "linspace of bools": (lambda x: x + torch.linspace(0, 1, 4, dtype=torch.bool), X),
    "erfcx of halves": (torch.special.erfcx, X.half()),
    "softmax of a complex number": (lambda x: torch.softmax(x[0, 0], 0), COMPLEX),
    "argmax of one bool": (lambda x: torch.argmax(x[0, 0]), BOOLS),
    "mse_loss of numbers": (lambda x: F.mse_loss(x[0, 0], x[0, 1]), INTS),
    "logcumsumexp of a number": (lambda x: torch.logcumsumexp(x[0, 0], 0), INTS),
    "floor division of complex": (lambda x: torch.div(x, x + 2, rounding_mode="floor"), COMPLEX),
    "truncated division of bools": (lambda x: torch.div(x, x | True, rounding_mode="trunc"), BOOLS),
    "bools clamped on both sides": (lambda x: torch.clamp(x, x[0], x[1]), BOOLS),
    "scatter_reduce of complex": (
        lambda x: x.scatter_reduce(0, torch.zeros(4, 4, dtype=torch.int64), x, "amax"),
        COMPLEX,
    ),
    "index_reduce of complex": (
        lambda x: x.index_reduce(0, torch.tensor([0, 1, 2, 3]), x, "amin", include_self=False),
        COMPLEX,
    ),
    "conv_transpose2d of ints": (lambda x: F.conv_transpose2d(x[None, None], x[None, None]), INTS),
    "a complex batch_norm with statistics": (
        lambda x: F.batch_norm(x, x[0].real.clone(), x[0].real.clone()),
        COMPLEX,
    ),
    "embeddings of ints renormed": (
        lambda x: F.embedding(torch.tensor([0, 1]), x.clone(), max_norm=1.0),
        INTS,
    ),
    "mvlgamma of bools": (lambda x: torch.mvlgamma(x, 1), BOOLS),
    "atan2 by a complex number": (lambda x: torch.atan2(x, torch.tensor(2j)), X),
    "the larger of reals and complex": (lambda x: torch.maximum(x, x + 1j), X),
    "heaviside of two dtypes": (lambda x: torch.heaviside(x, torch.tensor(2)), X),
    "atan2 of two complex dtypes": (lambda x: torch.atan2(x, x.to(torch.complex128)), COMPLEX),
}
WAYS: dict[str, Callable[..., Any]] = {
    "un-jitted": lambda f, x: functionalize(f)(x),
    "jit": lambda f, x: jit(f)(x),
    "vmap": lambda f, x: vmap(f, randomness="different")(torch.stack([x, x])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_dtype_without_kernel_is_refused_as_by_pytorch(name: str, way: str) -> None:
    """The class of error is PyTorch's own, and it names the dtype that PyTorch names."""
    function, x = CASES[name]
    with pytest.raises((RuntimeError, IndexError, TypeError)) as theirs:
        function(x)
    with pytest.raises((RuntimeError, IndexError, TypeError)) as ours:
        WAYS[way](function, x)
    assert ours.type is theirs.type, (ours.value, theirs.value)
    if found := re.search(r"not implemented for '(\w+)'", str(theirs.value)):
        assert found[1] in str(ours.value) or str(x.dtype).removeprefix("torch.") in str(
            ours.value
        ), (ours.value, theirs.value)


def test_the_message_is_pytorchs_and_names_the_line() -> None:
    """The kernel, the dtype, the operator and where it was called."""
    with pytest.raises(
        NotImplementedError,
        match=(
            r"^\"abs_cpu\" not implemented for 'Bool' "
            r"\(aten\.abs\.default\).*test_refused_dtypes"
        ),
    ):
        jit(lambda x: torch.abs(x))(BOOLS)


def test_what_is_empty_or_promoted_passes() -> None:
    """As in PyTorch: no kernel is asked, or one for another dtype."""
    empty = torch.zeros(0, 2, dtype=torch.bool)
    assert jit(lambda x: x @ x.mT)(empty).shape == (0, 0)
    torch.testing.assert_close(jit(lambda b, i: b**i)(BOOLS, INTS.abs()), BOOLS ** INTS.abs())
    torch.testing.assert_close(
        jit(lambda i: torch.softmax(i, 0, torch.float32))(INTS),
        torch.softmax(INTS, 0, torch.float32),
    )
    half = X.bfloat16()
    torch.testing.assert_close(
        jit(lambda x: F.layer_norm(x, (4,), X[0], X[1]))(half), F.layer_norm(half, (4,), X[0], X[1])
    )
    assert jit(lambda x: F.huber_loss(x, x.double()))(X).dtype is F.huber_loss(X, X.double()).dtype
    torch.testing.assert_close(
        jit(lambda b: torch.div(b, b, rounding_mode=None))(BOOLS | True), torch.ones(4, 4)
    )
    for divided in (
        lambda b: torch.div(b, -2, rounding_mode="floor"),
        lambda b: torch.div(b, 2.5, rounding_mode="trunc"),
    ):
        torch.testing.assert_close(jit(divided)(BOOLS), divided(BOOLS))
    torch.testing.assert_close(jit(lambda x: torch.lerp(x, 2 * x, torch.tensor(2)))(X), 3 * X)


def test_jax_arrays_are_held_to_the_same() -> None:
    """A function of torch run on arrays is the same function."""
    with pytest.raises(NotImplementedError, match="abs_cpu"):
        jit(torch.abs)(bridge.to_jax(BOOLS))


def test_whole_numbers_as_jax_makes_them_are_indices() -> None:
    """int32, also where PyTorch takes int64 alone."""
    labels = torch.tensor([0, 3, 1, 2])
    loss = jit(F.cross_entropy)(bridge.to_jax(X), jnp.asarray(labels.numpy(), "int32"))
    torch.testing.assert_close(bridge.to_torch(loss), F.cross_entropy(X, labels))


def test_a_lowering_of_ones_own_takes_what_it_likes() -> None:
    """Who registers one answers for it."""
    op, own = torch.ops.aten.frac.default, LOWERINGS[torch.ops.aten.frac.default]
    try:
        bridge.register_lowering(op)(lambda x: x)
        torch.testing.assert_close(jit(torch.frac)(INTS), INTS)
    finally:
        bridge.register_lowering(op)(own)
        OVERRIDDEN.discard(op)
        process.plans.clear()
    with pytest.raises(NotImplementedError, match="frac_cpu"):
        jit(lambda x: torch.frac(x))(INTS)


class _Asking(TorchDispatchMode):
    """Every call that a kernel of PyTorch has answered is asked of the refusals."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        try:
            guarded(func, lambda args, kwargs: None)(args, kwargs or {})
        except RuntimeError as error:
            self.refused.append(str(error))
        return out


@pytest.mark.slow  # test_operators.py asks one sample of each
@pytest.mark.parametrize("dtype", refused_dtypes.DTYPES, ids=str)
def test_no_dtype_is_refused_that_pytorch_computes_with(dtype: torch.dtype) -> None:
    """Every operator of PyTorch's database that takes the dtype, on its samples: where PyTorch has
    a value nothing is refused.
    """
    asked, asking = 0, _Asking()
    for op in op_db:
        if dtype not in op.dtypes:
            continue
        with warnings.catch_warnings(), contextlib.suppress(_NotOurs):
            warnings.simplefilter("ignore")
            for sample in itertools.islice(_samples(op, dtype), 4):
                with contextlib.suppress(Exception), asking:
                    op(sample.input, *sample.args, **sample.kwargs)
                    asked += 1
    assert asked > 500, asked
    assert asking.refused == []


class _NotOurs(Exception):
    """The database has no samples of an operator here."""


def _samples(op: Any, dtype: torch.dtype) -> Any:
    try:
        yield from op.sample_inputs("cpu", dtype, requires_grad=False)
    except Exception as error:
        raise _NotOurs from error


@pytest.mark.slow
def test_the_table_is_what_pytorch_says() -> None:
    """Asked anew, PyTorch refuses what bridge/operators/dtype_refusals_table.py says, and nothing
    else that is refused every time.
    """
    made_by = (committed.__doc__ or "").partition("(torch ")[2].partition(")")[0]
    if torch.__version__.split("+")[0] != made_by:
        pytest.skip(f"the table was written with torch {made_by}; this is {torch.__version__}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert refused_dtypes.tables() == {
            name: getattr(committed, name) for name in refused_dtypes.TABLES
        }
