"""What an ensemble predicts, against the members one by one in plain PyTorch and against formulas,
row by row in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn

from torchfunc_jax.ensemble import (
    Classification,
    Ensemble,
    Regression,
    fit_temperature,
    metrics,
    predict,
)


class Net(nn.Module):
    """Has a BatchNorm and a Dropout, which evaluation mode turns off."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, outputs)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture(scope="module")
def ens() -> Ensemble:
    return Ensemble(Net, 5, seed=3)


def by_hand(ens: Ensemble, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([member.eval()(x) for member in ens])


INPUTS = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch_size", [None, 4, 11, 100])
def test_predictions_are_the_members(ens: Ensemble, batch_size: int | None) -> None:
    logits = by_hand(ens, INPUTS)
    found = predict(ens, INPUTS, batch_size=batch_size)
    torch.testing.assert_close(found.logits, logits, rtol=1e-5, atol=1e-6)
    expected = Classification.of(logits)
    for field in dataclasses.fields(Classification):
        value = getattr(found, field.name)
        assert value.dtype == (torch.int64 if field.name in ("vote", "votes") else torch.float32)
        torch.testing.assert_close(value, getattr(expected, field.name), rtol=1e-4, atol=1e-5)
    without = predict(ens, INPUTS, batch_size=batch_size, keep=False)
    assert without.logits is None and torch.equal(without.probability, found.probability)


@pytest.mark.parametrize("chunk", [1, 2])
def test_members_in_chunks_and_inputs_as_arguments(ens: Ensemble, chunk: int) -> None:
    expected = predict(ens, INPUTS)
    for inputs in (INPUTS, (INPUTS,), {"x": INPUTS}):
        torch.testing.assert_close(
            predict(ens, inputs, batch_size=4, chunk=chunk).probability, expected.probability
        )


def test_predictions_are_shown_by_their_shapes_and_take_numpy_arrays() -> None:
    members = Ensemble(lambda: torch.nn.Linear(2, 3), n=4)
    inputs = np.ones((5, 2), np.float32)
    found = predict(members, inputs, keep=False)
    assert repr(members) == "Ensemble(4 of Linear, 9 parameters each)"
    assert repr(found).startswith("Classification(mean_logits=[5, 3], probability=[5, 3], ")
    assert repr(found).endswith("disagreement=[5], logits=None)")
    assert torch.equal(found.mean_logits, predict(members, torch.from_numpy(inputs)).mean_logits)


def test_every_number_row_by_row() -> None:
    logits = 2 * torch.randn(6, 9, 4, generator=torch.Generator().manual_seed(1)).double()
    found = Classification.of(logits)
    p = logits.softmax(-1).numpy()
    for i in range(9):
        mean = p[:, i].mean(0)
        count = Counter(p[:, i].argmax(-1).tolist())
        ties = [c for c in count if count[c] == max(count.values())]
        assert found.vote[i] == max(ties, key=lambda c: mean[c])
        assert found.votes[i].tolist() == [count[c] for c in range(4)]
        np.testing.assert_allclose(found.probability[i], mean, rtol=1e-12)
        np.testing.assert_allclose(found.log_probability[i], np.log(mean), rtol=1e-12)
        np.testing.assert_allclose(found.mean_logits[i], logits[:, i].mean(0), rtol=1e-12)
        parts = np.mean([stats.entropy(row) for row in p[:, i]])
        numbers = [
            stats.entropy(mean),
            parts,
            stats.entropy(mean) - parts,
            1 - max(count.values()) / 6,
        ]
        names = ["entropy", "expected_entropy", "mutual_information", "variation_ratio"]
        np.testing.assert_allclose(
            [float(getattr(found, name)[i]) for name in names], numbers, rtol=1e-12
        )
    members = torch.from_numpy(p)
    torch.testing.assert_close(found.mutual_information, metrics.mutual_information(members))
    torch.testing.assert_close(found.disagreement, metrics.disagreement(members))
    torch.testing.assert_close(
        found.variation_ratio, metrics.variation_ratio(members, probabilistic=False)
    )


@pytest.mark.parametrize(
    ("rows", "vote"),
    [
        ([[2, 0, 0], [0, 1, 0], [0, 3, 0]], 1),  # most votes
        ([[1, 0, 0], [0, 9, 0]], 1),  # a tie: the higher mean probability
        ([[9, 0, 0], [0, 9, 0]], 0),  # likewise equal: the first
        ([[1, 0, 0], [1, 0, 0], [0, 0, 99]], 0),  # two unsure members outvote a sure one
        ([[0, 0, 0]], 0),
    ],
)
def test_the_vote_and_its_ties(rows: list[list[float]], vote: int) -> None:
    found = Classification.of(torch.tensor(rows).float().unsqueeze(1))
    assert found.vote.tolist() == [vote]


def test_what_one_member_is() -> None:
    found = Classification.of(torch.randn(1, 5, 3))
    assert (
        not found.mutual_information.any()
        and not found.disagreement.any()
        and not found.variation_ratio.any()
    )


def test_further_dimensions_and_dtypes() -> None:
    logits = torch.randn(3, 5, 2, 7, 4)
    found = Classification.of(logits)
    assert found.probability.shape == (5, 2, 7, 4) and found.vote.shape == (5, 2, 7)
    torch.testing.assert_close(
        found.entropy[2, 1, 3], Classification.of(logits[:, 2, 1, 3:4]).entropy[0]
    )
    assert Classification.of(logits.bfloat16()).probability.dtype == torch.float32
    sure = Classification.of(torch.tensor([[[0.0, -500.0]]]))
    assert sure.probability[0, 1] == 0 and sure.log_probability[0, 1] == -500
    masked = Classification.of(torch.tensor([[[1.0, 1.0, -math.inf]]]))
    assert masked.probability.tolist() == [[0.5, 0.5, 0.0]] and masked.entropy[0] == pytest.approx(
        math.log(2)
    )


def test_temperatures_divide_logits(ens: Ensemble) -> None:
    labels = torch.arange(11) % 3
    each = fit_temperature(predict(ens, INPUTS).logits, labels)
    found = predict(ens, INPUTS, temperature=each, batch_size=4)
    torch.testing.assert_close(
        found.logits, by_hand(ens, INPUTS) / each[:, None, None].float(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        predict(ens, INPUTS, temperature=1e6).probability, torch.full((11, 3), 1 / 3)
    )


def test_regression_of_means() -> None:
    ens = Ensemble(lambda: Net(1), 4, seed=1)
    means = by_hand(ens, INPUTS).squeeze(-1)
    found = predict(ens, INPUTS, task="regression", head=lambda out: out.squeeze(-1), batch_size=3)
    torch.testing.assert_close(found.means, means, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.mean, means.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.variance, means.var(0, correction=0), rtol=1e-4, atol=1e-6)
    assert not found.aleatoric.any() and torch.equal(found.variance, found.epistemic)
    for q in (0.01, 0.25, 0.3, 0.5, 0.99):
        expected = np.quantile(found.means.numpy(), q, axis=0, method="inverted_cdf")
        assert torch.equal(found.quantile(q), torch.from_numpy(expected))


def test_regression_of_means_and_variances() -> None:
    ens = Ensemble(lambda: Net(2), 4, seed=1)
    found = predict(
        ens,
        INPUTS,
        task="regression",
        head=lambda out: (out[..., 0], out[..., 1].exp()),
        batch_size=4,
    )
    out = by_hand(ens, INPUTS).double()
    mu, var = out[..., 0], out[..., 1].exp()
    torch.testing.assert_close(found.mean, mu.mean(0).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        found.variance,
        (var.mean(0) + mu.square().mean(0) - mu.mean(0).square()).float(),
        rtol=1e-4,
        atol=1e-6,
    )
    for q in (0.025, 0.5, 0.9):
        for i, value in enumerate(found.quantile(q)):

            def excess(y: float, i: int = i, q: float = q) -> float:
                return float(stats.norm.cdf(y, mu[:, i], var[:, i].sqrt()).mean()) - q

            assert float(value) == pytest.approx(
                optimize.brentq(excess, -50, 50, xtol=1e-12), rel=1e-5, abs=1e-5
            )
        torch.testing.assert_close(
            found.cdf(found.quantile(q)),
            torch.full((11,), q, dtype=torch.float64),
            rtol=0,
            atol=1e-5,
        )


def test_a_point_beside_gaussians() -> None:
    found = Regression.of(torch.tensor([[0.0], [5.0]]), torch.tensor([[0.0], [1.0]]))
    assert found.cdf(-1e-3).item() < 0.01 and found.cdf(0.0).item() == pytest.approx(0.5, abs=1e-6)
    assert found.quantile(0.25).item() == pytest.approx(0, abs=1e-6) and found.quantile(
        0.75
    ).item() == pytest.approx(5, abs=1e-5)


def diverged(ens: Ensemble) -> Any:
    class Some:
        def logits(self, x: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
            out = ens.logits(x)
            out[2, 1] = math.nan
            return out

    return Some()


WRONG: list[tuple[Callable[[Ensemble], Any], type[Exception], str]] = [
    (
        lambda e: predict(e, INPUTS, task="ranking"),
        ValueError,
        "task: expected 'classification' or 'regression', got 'ranking'",
    ),
    (lambda e: predict(e, INPUTS, batch_size=0), ValueError, "batch_size: expected at least 1"),
    (
        lambda e: predict(e, INPUTS[:0]),
        ValueError,
        r"inputs: expected tensors .* N of at least 1, got .*\[0, 4\]",
    ),
    (
        lambda e: predict(e, (INPUTS, INPUTS[:3])),
        ValueError,
        r"one row for each sample.*\[11, 4\].*\[3, 4\]",
    ),
    (
        lambda e: predict(e, INPUTS, task="regression", temperature=2.0),
        ValueError,
        "temperature: it divides logits",
    ),
    (lambda e: predict(e, INPUTS, temperature=torch.ones(4)), ValueError, "each of the 5 members"),
    (lambda e: predict(e, INPUTS, temperature=0.0), ValueError, "temperature: expected positive"),
    (
        lambda e: predict(diverged(e), INPUTS),
        ValueError,
        "logits: 1 of 5 members gave NaN or infinity: 2; leave them out",
    ),
    (
        lambda e: predict(diverged(e), INPUTS, task="regression"),
        ValueError,
        "means: 1 of 5 members gave NaN or infinity: 2;",
    ),
    (
        lambda e: Classification.of(torch.full((2, 1, 3), math.inf)),
        ValueError,
        "2 of 2 members gave NaN or infinity: 0, 1",
    ),
    (
        lambda e: Classification.of(torch.ones(2, 3).long()),
        TypeError,
        "logits: expected a floating-point tensor",
    ),
    (
        lambda e: Classification.of(torch.ones(0, 3)),
        ValueError,
        r"expected the shape \[members, ..., C\]",
    ),
    (
        lambda e: Regression.of(torch.ones(2, 3), -torch.ones(2, 3)),
        ValueError,
        "variances: expected no negative number",
    ),
    (
        lambda e: Regression.of(torch.ones(2, 3), torch.ones(2)),
        ValueError,
        "variances: expected the means' shape",
    ),
    (
        lambda e: Regression.of(torch.ones(2, 3)).quantile(1.0),
        ValueError,
        "q: expected a number between 0 and 1",
    ),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_arguments_are_named(ens: Ensemble, case: int) -> None:
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call(ens)
