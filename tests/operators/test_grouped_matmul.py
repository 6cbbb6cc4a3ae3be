"""torch.nn.functional.grouped_mm inside transforms, beside a loop over the groups."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from agreement import same
from every_way import in_every_way

from torchfunc_jax import grad, jit, vmap

#: the shapes of both matrices (of rows a multiple of 16 bytes long, as PyTorch asks), and the ends
#: of the groups
SHAPES = {
    "rows": ((8, 8), (3, 8, 16), [2, 2, 8]),
    "columns": ((3, 8, 8), (8, 16), [1, 9, 16]),
    "terms": ((8, 16), (16, 8), [4, 4, 16]),
    "batches": ((3, 8, 8), (3, 8, 16), None),
}


def _offsets(ends):
    return None if ends is None else torch.tensor(ends, dtype=torch.int32)


@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_products(name, dtype):
    left, right, ends = SHAPES[name]
    run = lambda x, y: F.grouped_mm(x, y, offs=_offsets(ends))
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    in_every_way(
        run,
        torch.randn(left).to(dtype),
        torch.randn(right).to(dtype),
        lanes=dtype is torch.float32,
        **tolerance,
    )


def _experts(x, weights, gate):
    """A mixture of experts: each row goes to the expert of its greatest score, and is weighed by
    it.
    """
    scores = (x @ gate).softmax(-1)
    best, expert = scores.max(-1)
    order = expert.argsort(stable=True)
    counts = F.one_hot(expert, weights.shape[0]).sum(0)
    out = F.grouped_mm(x[order], weights, offs=counts.cumsum(0).to(torch.int32))
    return torch.zeros_like(out).index_copy(0, order, out) * best[:, None]


def _experts_by_loop(x, weights, gate):
    best, expert = (x @ gate).softmax(-1).max(-1)
    return torch.stack([x[i] @ weights[e] * best[i] for i, e in enumerate(expert.tolist())])


def test_a_mixture_of_experts_that_is_chosen_by_each_lane():
    x, weights, gate = torch.randn(4, 12, 8), torch.randn(3, 8, 16), torch.randn(8, 3)
    loss = lambda fn: lambda w, g, x: (fn(x, w, g) ** 2).sum()
    expected = [torch.func.grad(loss(_experts_by_loop), (0, 1))(weights, gate, row) for row in x]
    expected = tuple(torch.stack(parts) for parts in zip(*expected, strict=True))
    for wrapped in (lambda f: f, jit):
        same(
            wrapped(vmap(grad(loss(_experts), (0, 1)), (None, None, 0)))(weights, gate, x),
            expected,
            rtol=1e-4,
            atol=1e-4,
        )


def test_offsets_as_an_argument_and_rows_behind_the_last_group():
    x, y = torch.randn(8, 8), torch.randn(3, 8, 16)
    run = jit(lambda x, y, offs: F.grouped_mm(x, y, offs=offs))
    for ends in ([2, 5, 8], [0, 3, 8], [2, 2, 4]):
        same(
            run(x, y, _offsets(ends))[: ends[-1]],
            F.grouped_mm(x, y, offs=_offsets(ends))[: ends[-1]],
        )
    assert not run(x, y, _offsets([2, 2, 4]))[4:].any()


def test_a_nan_stays_in_its_group():
    x, y = torch.randn(8, 8), torch.randn(3, 8, 16)
    x[1, 0] = y[2, 0, 0] = torch.nan
    run = lambda x, y: F.grouped_mm(x, y, offs=_offsets([2, 5, 8]))
    pull = lambda x, y: grad(lambda x, y: (run(x, y) * torch.arange(16)).sum(), (0, 1))(x, y)
    a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
    (
        torch.cat([p @ w for p, w in zip(a.split([2, 3, 3]), b, strict=True)]) * torch.arange(16)
    ).sum().backward()
    same(jit(run)(x, y), run(x, y))
    same(pull(x, y), (a.grad, b.grad))
    same(jit(pull)(x, y), (a.grad, b.grad))


x, y = torch.zeros(8, 8), torch.zeros(3, 8, 16)
REFUSED = {
    "float64": lambda: F.grouped_mm(x.double(), y.double(), offs=_offsets([1, 2, 3])),
    "dtypes that differ": lambda: F.grouped_mm(x, y.bfloat16(), offs=_offsets([1, 2, 3])),
    "int64 offsets": lambda: F.grouped_mm(x, y, offs=torch.tensor([1, 2, 3])),
    "no offsets": lambda: F.grouped_mm(x, y),
    "offsets of batches": lambda: F.grouped_mm(y, y.mT.contiguous(), offs=_offsets([1, 2, 3])),
    "two offsets for three groups": lambda: F.grouped_mm(x, y, offs=_offsets([1, 2])),
    "a bias": lambda: F.grouped_mm(x, y, offs=_offsets([1, 2, 3]), bias=torch.zeros(3, 16)),
    "another dtype out": lambda: F.grouped_mm(
        x, y, offs=_offsets([1, 2, 3]), out_dtype=torch.bfloat16
    ),
    "sizes that do not meet": lambda: F.grouped_mm(
        x, torch.zeros(3, 16, 8), offs=_offsets([1, 2, 3])
    ),
    "batches that differ": lambda: F.grouped_mm(torch.zeros(2, 8, 8), y),
    "one dimension": lambda: F.grouped_mm(x[0], y, offs=_offsets([1, 2, 3])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses(name):
    with pytest.raises(RuntimeError) as expected:
        REFUSED[name]()
    with pytest.raises(RuntimeError) as found:
        jit(lambda t: REFUSED[name]() * t)(torch.ones(()))
    theirs, mine = str(expected.value), str(found.value)
    # the words for dtypes that differ are a version's own
    assert theirs[:24] in mine or ("dtype" in theirs and "dtype" in mine)


def test_the_operator_that_transformers_calls_while_it_compiles() -> None:
    """transformers registers it when it is imported, after this library."""
    offs = torch.tensor([2, 3, 5], dtype=torch.int32)
    x, weight = torch.randn(5, 8), torch.randn(3, 8, 16)
    expected = torch.nn.functional.grouped_mm(x, weight, offs=offs)
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        torch.library.define(
            "transformers::grouped_mm_fallback",
            "(Tensor input, Tensor weight, Tensor offs) -> Tensor",
        )
        torch.library.register_fake("transformers::grouped_mm_fallback")(
            lambda x, weight, offs: x.new_empty(len(x), weight.shape[2])
        )
    found = jit(torch.ops.transformers.grouped_mm_fallback)(x, weight, offs)
    torch.testing.assert_close(found, expected)
