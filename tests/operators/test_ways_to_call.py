"""The other ways to call an operator: as a method, in place, as Python's operator, with out=;
PyTorch's database beside plain PyTorch.

What test_operators.py asks of the function alone; and out= of what makes tensors of numbers, which
the database has none of.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import opinfo
import pytest
import torch
from torch.utils import _pytree as pytree

import torchfunc_jax as tj
from bridge.errors import DataDependentError

pytestmark = pytest.mark.sweep

CHUNKS = 16
#: Values that are not the operator's to choose, or of which several are right: the sign of an
#: eigenvector.
_FREE = {"linalg.eigh", "normal.in_place", "normal.number_mean", "chalf"}
_INEXACT = (torch.float32, torch.complex64)
#: PyTorch writes a result of five by ten to a tensor of one element that is not to be resized.
_TORCH_RESIZES = {("addbmm", "in place")}


def _copied(x: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), x)


def _written(fn: Callable) -> Callable:
    """What an in-place function returns, and what it has written."""
    return lambda x, *args, **kwargs: (fn(x, *args, **kwargs), x)


def _with_out(fn: Callable, result: Any) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        out = pytree.tree_map_only(torch.Tensor, torch.ones_like, result)
        out = tuple(out) if isinstance(out, list | tuple) else out
        return fn(*args, **kwargs, out=out), out

    return call


def _ways(op: Any, args: tuple, kwargs: dict) -> Iterator[tuple[str, Callable]]:
    if op.method_variant:
        yield "method", op.method_variant
    if op.operator_variant:
        yield "operator", op.operator_variant
    if op.inplace_variant:
        yield "in place", _written(op.inplace_variant)
    if op.inplace_operator_variant:
        yield "operator in place", _written(op.inplace_operator_variant)
    if op.supports_out:
        yield "out", _with_out(op.op, op.op(*_copied(args), **_copied(kwargs)))


def _jitted(fn: Callable, args: tuple, kwargs: dict) -> Any:
    """fn under jit: of its tensors, all else as it is."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(places, tensors, strict=True))
        a, k = pytree.tree_unflatten([filled[i] for i in range(len(leaves))], spec)
        return [x for x in pytree.tree_leaves(fn(*a, **k)) if isinstance(x, torch.Tensor)]

    return tj.jit(of_tensors)(*_copied([leaves[i] for i in places]))


def _wrong(name: str, op: Any, dtype: torch.dtype, samples: int) -> Iterator[str]:
    found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 40))
    for sample in found[:: max(1, len(found) // samples)][:samples]:
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        for way, fn in _ways(op, args, kwargs):
            try:
                expected = [
                    x
                    for x in pytree.tree_leaves(fn(*_copied(args), **_copied(kwargs)))
                    if isinstance(x, torch.Tensor)
                ]
            except Exception:
                continue  # an integer in place of which a float would stand, say
            try:
                got = _jitted(fn, args, kwargs)
                assert [x.dtype for x in got] == [x.dtype for x in expected], "dtypes"
                # small elements beside large ones have the errors of these
                for ours, theirs in zip(got, expected, strict=True):
                    largest = (
                        theirs.abs().nan_to_num(0, 0, 0).max().item()
                        if theirs.numel() and theirs.dtype in _INEXACT
                        else 0
                    )
                    atol = max(1e-4, 1e-6 * largest)
                    torch.testing.assert_close(
                        ours, theirs, rtol=1e-3, atol=atol, equal_nan=True, check_stride=False
                    )
            except DataDependentError:
                continue  # test_operators.py has these
            except Exception as error:
                if (name, way) not in _TORCH_RESIZES:
                    yield (
                        f"{name} {way} {dtype}: {type(error).__name__}: "
                        f"{str(error).replace(chr(10), ' ')[:200]}"
                    )


def _all_wrong(names: list[str], dtypes: tuple[torch.dtype, ...], samples: int) -> list[str]:
    wrong = []
    for name in names:
        op = opinfo.operators()[name]
        for dtype in dtypes:
            if (
                name not in _FREE
                and op.name not in opinfo.RANDOM
                and dtype in op.supported_dtypes("cpu")
            ):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    wrong += _wrong(name, op, dtype, samples)
    return wrong


@pytest.mark.parametrize("chunk", range(0, CHUNKS, 4))
def test_every_way_to_call_an_operator(chunk):
    """One operator in four; the slow test has them all."""
    assert not _all_wrong(sorted(opinfo.operators())[chunk::CHUNKS], (torch.float32,), 1)


_A, _B = (
    torch.rand(2, 3, generator=torch.Generator().manual_seed(0)),
    torch.rand(3, 2, generator=torch.Generator().manual_seed(1)),
)
_HARD: dict[str, Callable] = {
    "kron": lambda a, b: torch.kron(a, b, out=torch.ones(6, 6)),
    "kron to nothing": lambda a, b: torch.kron(a, b, out=torch.empty(0)),
    "matrix_rank": lambda a, b: torch.linalg.matrix_rank(
        a @ b + torch.eye(2), out=torch.ones((), dtype=torch.int64)
    ),
    "matmul of three dimensions": lambda a, b: torch.matmul(
        a.expand(4, 2, 3), b, out=torch.ones(4, 2, 2)
    ),
    "matmul by a vector": lambda a, b: torch.matmul(
        a.expand(4, 2, 3), b[:, 0], out=torch.ones(4, 2)
    ),
    "det of nothing": lambda a, b: torch.linalg.det(a.new_ones(0, 2, 2), out=torch.ones(0)),
    "slogdet of nothing": lambda a, b: torch.linalg.slogdet(
        a.new_ones(0, 1, 1), out=(torch.ones(0), torch.ones(0))
    ),
    "logsigmoid of nothing": lambda a, b: torch._C._nn.log_sigmoid(a[:, :0], out=torch.ones(2, 0)),
    "polygamma_": lambda a, b: a.clone().polygamma_(2),
}


@pytest.mark.parametrize("transform", [tj.jit, tj.functionalize], ids=["jit", "un-jitted"])
@pytest.mark.parametrize("name", _HARD)
def test_where_the_memory_written_is_another_tensors(name, transform):
    torch.testing.assert_close(
        transform(_HARD[name])(_A, _B), _HARD[name](_A, _B), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_way_with_more_samples_and_dtypes(chunk):
    # equal elements
    names = [
        n
        for n in sorted(opinfo.operators())[chunk::CHUNKS]
        if n not in ("sort", "argsort", "topk", "kthvalue")
    ]
    wrong = _all_wrong(names, (torch.float32, torch.complex64), 4)
    assert not wrong + _all_wrong(names, (torch.int64, torch.bool), 2)


_SIZE, _NONE = (2, 3), torch.empty(0)
_FACTORIES: dict[str, tuple[Callable, torch.Tensor]] = {
    "zeros": (lambda out: torch.zeros(_SIZE, out=out), torch.ones(_SIZE)),
    "ones": (lambda out: torch.ones(_SIZE, out=out), torch.empty(0, dtype=torch.int32)),
    "full": (lambda out: torch.full(_SIZE, 2.5, out=out), torch.ones(_SIZE)),
    "eye": (lambda out: torch.eye(3, out=out), _NONE),
    "arange": (lambda out: torch.arange(1, 4, 0.5, out=out), _NONE),
    "range": (lambda out: torch.range(1, 4, out=out), _NONE),
    "linspace": (lambda out: torch.linspace(0, 1, 5, out=out), _NONE.double()),
    "logspace": (lambda out: torch.logspace(0, 1, 5, out=out), torch.ones(5)),
    "fftfreq": (lambda out: torch.fft.fftfreq(4, out=out), _NONE),
    "rfftfreq": (lambda out: torch.fft.rfftfreq(4, 0.5, out=out), _NONE),
}


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("name", _FACTORIES)
def test_a_factory_writes_to_out(name):
    fn, out = _FACTORIES[name]
    expected = out.clone()
    fn(expected)

    def program(x):
        y = x.clone()
        assert fn(y) is y
        return y

    for got in (tj.jit(program)(out), tj.functionalize(program)(out)):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("fn", "values"),
    [
        (
            lambda out: torch.rand(_SIZE, out=out),
            lambda y: ((y >= 0) & (y < 1)).all() and y.unique().numel() > 1,
        ),
        (lambda out: torch.randn(_SIZE, out=out), lambda y: y.unique().numel() > 1),
        (
            lambda out: torch.normal(100.0, 1.0, _SIZE, out=out),
            lambda y: ((y > 90) & (y < 110)).all() and y.unique().numel() > 1,
        ),
        (
            lambda out: torch.randint(3, 7, _SIZE, out=out),
            lambda y: ((y >= 3) & (y < 7) & (y == y.round())).all(),
        ),
        (lambda out: torch.randperm(6, out=out), lambda y: y.sort()[0].equal(torch.arange(6.0))),
    ],
    ids=["rand", "randn", "normal", "randint", "randperm"],
)
def test_a_random_factory_writes_to_out(fn, values):
    def program(x):
        y = x.clone()
        fn(y)
        return y

    got = tj.jit(program)(torch.ones(_SIZE))
    assert got.dtype is torch.float32 and values(got)


def test_out_of_another_dtype():
    a, b = torch.rand(2, 3), torch.rand(3, 2)
    for fn in (torch.matmul, torch.kron):
        for out in (torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int64)):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    expected = fn(a, b, out=out.clone())
            except RuntimeError:
                with pytest.raises(RuntimeError, match=r"dtype|cast"):
                    tj.jit(lambda a, b, fn=fn, out=out: fn(a, b, out=out.to(out.dtype) + 0))(a, b)
            else:
                torch.testing.assert_close(
                    tj.jit(lambda a, b, fn=fn, out=out: fn(a, b, out=out + 0))(a, b), expected
                )
