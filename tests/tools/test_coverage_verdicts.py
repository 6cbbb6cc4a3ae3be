"""The judge of docs/coverage.py: what PyTorch leaves open passes, everything else that differs
fails.
"""

from __future__ import annotations

import opinfo
import pytest
import scipy.special
import torch
import verdicts
from torch.testing._internal.opinfo.core import SampleInput

import torchfunc_jax

OPERATORS = opinfo.operators()
TIES = torch.tensor([[2.0, 1, 2, 0, 1], [3, 3, 3, 3, 4]])


def asked(
    name: str, mode: str, *args: object, input: torch.Tensor = TIES, **kwargs: object
) -> opinfo.Question:
    sample = SampleInput(input, args=args, kwargs=kwargs)
    return opinfo.question(opinfo.Problem(OPERATORS[name], sample, sample), mode)


def verdict(q: opinfo.Question, *got: torch.Tensor) -> str | None:
    return verdicts.difference(got, q.truth, q.terms)


@pytest.mark.parametrize("mode", ["jit", "vmap"])
@pytest.mark.parametrize("dim", [1, -1, 0])
def test_equal_elements_may_come_in_any_order(mode: str, dim: int) -> None:
    q = asked("sort", mode, dim)
    values, there = q.truth
    at = dim + (mode == "vmap") if dim >= 0 else dim
    input = torch.stack([TIES, TIES]) if mode == "vmap" else TIES
    # the last of equal ones first
    backwards = input.shape[at] - 1 - input.flip(at).sort(dim=at, stable=True).indices
    assert dim == 0 or not torch.equal(backwards, there)
    assert verdict(q, values, there) is None
    assert verdict(q, values, backwards) is None
    assert "other values" in str(verdict(q, values, there.flip(at)))
    assert "twice" in str(verdict(q, values, torch.zeros_like(there)))
    assert "out of range" in str(verdict(q, values, there + 1))
    assert "instead of" in str(verdict(q, values, there.int()))
    assert verdict(q, values + 1, there) is not None


def test_one_wrong_index_fails() -> None:
    q = asked("argsort", "jit")
    for place in range(5):
        wrong = q.truth[0].clone()
        # no two elements that far apart are equal
        wrong[0, [place, (place + 2) % 5]] = wrong[0, [(place + 2) % 5, place]]
        assert "point at other values" in str(verdict(q, wrong))
    q = asked("kthvalue", "jit", 3)
    assert verdict(q, q.truth[0], torch.tensor([1, 0])) is None
    assert verdict(q, q.truth[0], torch.tensor([4, 3])) is None
    assert verdict(q, q.truth[0], torch.tensor([4, 4])) is not None
    q = asked("topk", "jit", 2)
    assert verdict(q, q.truth[0], torch.tensor([[2, 0], [4, 0]])) is None
    assert verdict(q, q.truth[0], torch.tensor([[2, 2], [4, 0]])) is not None
    assert verdict(q, q.truth[0], torch.tensor([[2, 1], [4, 0]])) is not None


def test_the_order_of_a_stable_sort_is_known() -> None:
    q = asked("sort", "jit", stable=True)
    values, there = q.truth
    assert verdict(q, values, there) is None
    assert verdict(q, values, 4 - TIES.flip(1).sort(dim=1, stable=True).indices) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_of_a_sort_are_asked_without_ties(dtype: torch.dtype) -> None:
    x = TIES.to(dtype)
    spread = verdicts.untied(x)
    assert spread.dtype == dtype and spread.unique().numel() == 10
    assert (x.flatten()[spread.flatten().argsort()].diff() >= 0).all()
    assert verdicts.untied(spread) is spread
    q = asked("sort", "vjp", input=x)
    assert verdict(q, *q.truth) is None
    assert verdict(q, q.truth[0].flip(1)) is not None


def test_half_types_may_be_nearer_to_float64_than_pytorch_and_hardly_farther() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(40, 400, generator=g).bfloat16() for _ in range(2))
    q = asked("kron", "jit", torch.ones(1, 1), input=a)
    assert verdict(q, *q.truth) is None
    sample = SampleInput(a, args=(b,))
    # rounded after each part
    rough = lambda a, b: sum(
        (a[:, k : k + 20] * b[:, k : k + 20]).sum(1) for k in range(0, 400, 20)
    )
    p = opinfo.Problem(OPERATORS["mul"], sample, sample)
    p.run = rough
    p.out = p(*p.values)
    q = opinfo.question(p, "jit")
    exact = (a.double() * b.double()).sum(1)
    off = (q.truth[0].double() - exact).abs()
    assert verdict(q, exact.bfloat16()) is None
    # so it is not the tolerance that lets this pass
    assert (~torch.isclose(exact.bfloat16(), q.truth[0], 2e-2, 2e-2)).any()
    worst = off.argmax()
    # the error on the other side
    for scale, passes in ((0.9, True), (verdicts.WORST - 0.5, True), (verdicts.WORST + 1, False)):
        got = exact.bfloat16()
        got[worst] = (exact - scale * (q.truth[0].double() - exact))[worst].bfloat16()
        assert (verdict(q, got) is None) == passes
    for scale, passes in ((1.3, True), (2.0, False)):  # everywhere
        assert (
            verdict(q, (exact - scale * (q.truth[0].double() - exact)).bfloat16()) is None
        ) == passes
    got[worst] = float("nan")
    assert verdict(q, got) is not None


def test_other_types_have_their_tolerance_alone() -> None:
    sample = SampleInput(torch.ones(3))
    p = opinfo.Problem(OPERATORS["exp"], sample, sample)
    q = opinfo.question(p, "jit")
    q.truth = (q.truth[0] + 1e-2,)
    assert verdict(q, torch.ones(3).exp()) is not None


def test_some_are_judged_by_float64_in_float32_too() -> None:
    x = torch.linspace(-1e4, 1e4, 30)[
        torch.randperm(30, generator=torch.Generator().manual_seed(0))
    ].requires_grad_()
    q = asked("logcumsumexp", "vjp", 0, input=x)
    exact = q.terms.exact()[0] if q.terms.exact else q.truth[0]
    worst = (q.truth[0].double() - exact).abs().max()
    assert exact.dtype == torch.float64 and worst > 1e-4
    assert verdict(q, exact.float()) is None
    assert verdict(q, (exact + 3 * worst).float()) is None
    assert verdict(q, (exact + 5 * worst).float()) is not None
    assert verdict(q, torch.full((30,), float("nan"))) is not None


def test_where_pytorch_overflows_float64_is_the_truth() -> None:
    q = asked("matrix_exp", "jit", input=torch.eye(5).bfloat16() * 8)
    exact = q.terms.exact()[0] if q.terms.exact else q.truth[0]
    # as it does for larger matrices
    q.truth = (torch.where(torch.eye(5, dtype=torch.bool), float("nan"), exact.bfloat16()),)
    assert verdict(q, exact.bfloat16()) is None
    assert verdict(q, (exact * 1.03).bfloat16()) is not None
    assert verdict(q, torch.full((5, 5), float("inf")).bfloat16()) is not None
    q = asked("matrix_exp", "jit", input=torch.eye(5).half() * 12)  # exp(12) is beyond float16
    exact = q.terms.exact()[0] if q.terms.exact else q.truth[0]
    q.truth = (torch.full((5, 5), float("nan")).half(),)
    assert verdict(q, exact.half()) is None
    assert verdict(q, -exact.half()) is not None


def test_attention_with_dropout_in_training_is_random() -> None:
    op = OPERATORS["nn.functional.multi_head_attention_forward"]
    for sample in opinfo.draw(op, torch.float32, 0, 4):
        dropout = sample.args[9] > 0 and sample.kwargs["training"]
        assert opinfo.Problem(op, sample, sample).random == dropout


@pytest.mark.parametrize("name", verdicts.INEXACT)
def test_what_is_called_inexact_in_pytorch_is_and_here_is_not(name: str) -> None:
    x = torch.linspace(0.01, 100, 2000, dtype=torch.float64)
    truth = torch.from_numpy(
        getattr(scipy.special, name.removeprefix("special.bessel_"))(x.numpy())
    )
    theirs = getattr(torch.special, name.removeprefix("special."))
    assert 1e-7 < (theirs(x) - truth).abs().max() < verdicts.INEXACT[name]
    assert (torchfunc_jax.jit(theirs)(x) - truth).abs().max() < 1e-14


def test_poles_are_infinite() -> None:
    inf, nan = float("inf"), float("nan")
    q = asked("polygamma.polygamma_n_0", "jit", 1, input=torch.tensor([-2.0, 1, 0.5]))
    assert 1e12 < q.truth[0][0] < inf
    assert verdict(q, torch.tensor([inf, 1.644934, 4.934802])) is None
    assert verdict(q, torch.tensor([nan, 1.644934, 4.934802])) is not None
    assert verdict(q, torch.tensor([inf, inf, 4.934802])) is not None
