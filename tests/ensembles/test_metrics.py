"""The metrics of torchfunc_jax.ensemble against scikit-learn's values, and against the formulas as
plain Python loops in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from sklearn import metrics as sk

from torchfunc_jax.ensemble import fit_joint_temperature, fit_temperature, metrics

Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def draw(seed: int, n: int = 200, classes: int = 5, members: int = 4, scale: float = 2.0) -> Drawn:
    """Logits [members, n, classes] that know something of the labels, their probabilities, and
    labels [n].
    """
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=rng)
    shared = torch.randn(n, classes, generator=rng) + 1.5 * torch.nn.functional.one_hot(
        labels, classes
    )
    logits = scale * (shared + 0.7 * torch.randn(members, n, classes, generator=rng)).double()
    return logits, logits.softmax(-1), labels


# ---- formulas, one row at a time -----------------------------------------------------------------
def ece(
    p: np.ndarray, y: np.ndarray, norm: str = "l1", adaptive: bool = False, bins: int = 15
) -> float:
    rows = sorted(
        (float(row.max()), float(row.argmax() == label)) for row, label in zip(p, y, strict=True)
    )
    groups: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
    for k, (sure, right) in enumerate(rows):
        sizes = [len(rows) // bins + (i < len(rows) % bins) for i in range(bins)]
        edges = list(itertools.accumulate(sizes))
        groups[
            next(i for i, e in enumerate(edges) if k < e)
            if adaptive
            else min(int(sure * bins), bins - 1)
        ].append((sure, right))
    gaps = [
        (len(g) / len(rows), abs(np.mean([c for c, _ in g]) - np.mean([r for _, r in g])))
        for g in groups
        if g
    ]
    if norm == "max":
        return float(max(g for _, g in gaps))
    return (
        float(sum(w * g for w, g in gaps))
        if norm == "l1"
        else math.sqrt(sum(w * g * g for w, g in gaps))
    )


def risks(p: np.ndarray, y: np.ndarray) -> list[float]:
    wrong = [int(p[i].argmax() != y[i]) for i in sorted(range(len(y)), key=lambda i: -p[i].max())]
    return [sum(wrong[: k + 1]) / (k + 1) for k in range(len(y))]


def area(p: np.ndarray, y: np.ndarray, generalized: bool) -> float:
    n, r = len(y), risks(p, y)
    heights = [r[k] * (k + 1) / n if generalized else r[k] for k in range(n)]
    return sum((a + b) / 2 / n for a, b in itertools.pairwise(heights)) / (1 - 1 / n)


def covered(p: np.ndarray, y: np.ndarray, risk: float) -> float:
    return max((k + 1) / len(y) for k, r in enumerate(risks(p, y)) if r <= risk)


ROWS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[np.ndarray, np.ndarray], float]]] = {
    "accuracy": (metrics.accuracy, lambda p, y: sk.accuracy_score(y, p.argmax(-1))),
    "nll": (metrics.categorical_nll, lambda p, y: sk.log_loss(y, p, labels=range(5))),
    "brier": (
        metrics.brier_score,
        lambda p, y: sk.brier_score_loss(y, p, labels=range(5), scale_by_half=False),
    ),
    "brier by rows": (
        metrics.brier_score,
        lambda p, y: float(np.mean([((row - np.eye(5)[k]) ** 2).sum() for row, k in zip(p, y)])),
    ),
    "ece": (metrics.calibration_error, ece),
    "ece l2": (
        lambda p, y: metrics.calibration_error(p, y, norm="l2"),
        lambda p, y: ece(p, y, "l2"),
    ),
    "ece max": (
        lambda p, y: metrics.calibration_error(p, y, norm="max"),
        lambda p, y: ece(p, y, "max"),
    ),
    "ece 7": (
        lambda p, y: metrics.calibration_error(p, y, num_bins=7),
        lambda p, y: ece(p, y, bins=7),
    ),
    "adaptive": (metrics.adaptive_calibration_error, lambda p, y: ece(p, y, adaptive=True)),
    "adaptive l2": (
        lambda p, y: metrics.adaptive_calibration_error(p, y, norm="l2"),
        lambda p, y: ece(p, y, "l2", adaptive=True),
    ),
    "aurc": (metrics.aurc, lambda p, y: area(p, y, False)),
    "augrc": (metrics.augrc, lambda p, y: area(p, y, True)),
    "coverage": (lambda p, y: metrics.cov_at_risk(p, y, 0.2), lambda p, y: covered(p, y, 0.2)),
    "risk": (
        lambda p, y: metrics.risk_at_cov(p, y, 0.8),
        lambda p, y: risks(p, y)[math.ceil(0.8 * len(y)) - 1],
    ),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("seed", "n"), [(0, 200), (1, 37), (2, 15)])
def test_metrics_of_rows(name: str, seed: int, n: int) -> None:
    ours, expected = ROWS[name]
    _, members, labels = draw(seed, n)
    found = ours(members, labels)
    assert found.shape == (4,) and found.dtype == torch.float64
    for member, value in zip(members, found, strict=True):
        assert float(value) == pytest.approx(expected(member.numpy(), labels.numpy()), abs=1e-6)
        torch.testing.assert_close(ours(member, labels), value)
    rounded = ours(members.float(), labels)
    torch.testing.assert_close(rounded, found, rtol=1e-5, atol=1e-6)


SCORES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[np.ndarray, np.ndarray], float]]] = {
    "auroc": (metrics.auroc, lambda s, t: sk.roc_auc_score(t, s)),
    "precision": (metrics.average_precision, lambda s, t: sk.average_precision_score(t, s)),
    "fpr95": (metrics.fpr95, lambda s, t: fpr(s, t, 0.95)),
    "fpr80": (lambda s, t: metrics.fpr_at_recall(s, t, 0.8), lambda s, t: fpr(s, t, 0.8)),
    "fpr100": (lambda s, t: metrics.fpr_at_recall(s, t, 1.0), lambda s, t: fpr(s, t, 1.0)),
}


def fpr(scores: np.ndarray, targets: np.ndarray, recall: float) -> float:
    false, true, _ = sk.roc_curve(targets, scores, drop_intermediate=False)
    return float(false[true >= recall - 1e-12].min())


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("tied", [False, True])
def test_metrics_of_scores(name: str, tied: bool) -> None:
    ours, expected = SCORES[name]
    rng = torch.Generator().manual_seed(3)
    targets = torch.rand(160, generator=rng) < 0.4
    scores = torch.randn(3, 160, generator=rng) + targets
    scores = scores.round() if tied else scores
    found = ours(scores, targets)
    for row, value in zip(scores, found, strict=True):
        assert float(value) == pytest.approx(
            expected(row.double().numpy(), targets.numpy()), abs=1e-9
        )
    torch.testing.assert_close(ours(scores, targets.long()), found)


def test_equally_sure_rows_count_as_their_mean_in_every_order() -> None:
    p = torch.tensor([[0.9, 0.1]] * 6 + [[0.6, 0.4]] * 4)
    labels = torch.tensor([0, 1, 0, 0, 1, 0, 0, 1, 1, 1])
    for metric in (metrics.aurc, metrics.augrc, metrics.adaptive_calibration_error):
        orders = [torch.randperm(10, generator=torch.Generator().manual_seed(s)) for s in range(5)]
        values = [float(metric(p[o], labels[o])) for o in orders]
        assert max(values) - min(values) < 1e-12
    risk = metrics.risk_coverage(p, labels)[1]
    torch.testing.assert_close(risk[:6], torch.full((6,), 1 / 3, dtype=torch.float64))


def test_risk_by_another_confidence() -> None:
    _, p, labels = draw(0)
    by_entropy = metrics.risk_coverage(p[0], labels, -metrics.entropy(p[0]))[1]
    order = metrics.entropy(p[0]).argsort()
    wrong = (p[0].argmax(-1) != labels)[order].double()
    torch.testing.assert_close(by_entropy, wrong.cumsum(0) / torch.arange(1, 201))


def test_metrics_of_members() -> None:
    _, p, _ = draw(5, n=20)
    votes = p.argmax(-1)
    for i in range(20):
        mean = p[:, i].mean(0).numpy()
        assert float(metrics.entropy(p.mean(0))[i]) == pytest.approx(stats.entropy(mean), abs=1e-12)
        expected = stats.entropy(mean) - np.mean([stats.entropy(row) for row in p[:, i].numpy()])
        assert float(metrics.mutual_information(p)[i]) == pytest.approx(expected, abs=1e-12)
        pairs = list(itertools.combinations(votes[:, i].tolist(), 2))
        assert float(metrics.disagreement(p)[i]) == pytest.approx(
            np.mean([a != b for a, b in pairs]), abs=1e-12
        )
        assert float(metrics.variation_ratio(p)[i]) == pytest.approx(1 - mean.max(), abs=1e-12)
        most = stats.mode(votes[:, i].numpy()).count / 4
        assert float(metrics.variation_ratio(p, probabilistic=False)[i]) == pytest.approx(
            1 - most, abs=1e-12
        )


@pytest.mark.parametrize("points", [True, False])
def test_crps_is_the_integral(points: bool) -> None:
    rng = np.random.default_rng(0)
    mu, std, y = rng.normal(size=(5, 6)), rng.uniform(0.3, 2, size=(5, 6)), rng.normal(size=6) * 2
    variances = None if points else torch.from_numpy(std**2)
    found = metrics.crps(torch.from_numpy(mu), variances, torch.from_numpy(y))
    for i in range(6):

        def square(x: float, i: int = i) -> float:
            below = (
                (mu[:, i] <= x).mean() if points else stats.norm.cdf(x, mu[:, i], std[:, i]).mean()
            )
            return float((below - (x >= y[i])) ** 2)

        edges = sorted([-12.0, 12.0, y[i], *mu[:, i]])
        whole = sum(
            integrate.quad(square, a, b, epsabs=1e-11)[0] for a, b in itertools.pairwise(edges)
        )
        assert float(found[i]) == pytest.approx(whole, abs=1e-8)


def test_a_variance_of_zero_is_a_point() -> None:
    mu, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(metrics.crps(mu, torch.zeros_like(mu), y), metrics.crps(mu, None, y))


def test_nll_of_a_mixture() -> None:
    mu, var, y = torch.randn(4, 7), torch.rand(4, 7) + 0.1, torch.randn(7)
    density = stats.norm.pdf(y.numpy(), mu.numpy(), var.sqrt().numpy()).mean(0)
    np.testing.assert_allclose(metrics.distribution_nll(mu, var, y), -np.log(density), rtol=1e-5)


def test_against_size_is_the_mean_of_drawn_members() -> None:
    _, p, labels = draw(7, members=6)
    sizes, values = metrics.against_size(p, labels, subsets=8, seed=1)
    assert sizes == [1, 2, 3, 4, 6] and set(values) == {"accuracy", "nll", "brier", "ece"}
    again = metrics.against_size(p, labels, subsets=8, seed=1)[1]
    for name, found in values.items():
        assert found.shape == (5, 8) and torch.equal(found, again[name])
        whole = metrics.USUAL[name](p.mean(0), labels)
        torch.testing.assert_close(found[-1], whole.expand(8))
        singles = metrics.USUAL[name](p, labels)
        assert all((v - singles).abs().min() < 1e-12 for v in found[0])
    pairs = [
        metrics.categorical_nll(p[list(c)].mean(0), labels)
        for c in itertools.combinations(range(6), 2)
    ]
    assert all(min(abs(v - q) for q in pairs) < 1e-12 for v in values["nll"][1])


def test_values_of_torch_uncertainty() -> None:
    """On the same predictions, where it is installed. No confidence is 1 here, and no two are
    equal: docs/ensembles.md has what differs.
    """
    theirs = pytest.importorskip(
        "torch_uncertainty.metrics", reason="torch-uncertainty is not installed"
    )
    torchmetrics = pytest.importorskip(
        "torchmetrics.functional.classification", reason="torchmetrics is not installed"
    )
    _, p, labels = draw(7)
    mean, far = p.mean(0), draw(8, scale=0.5)[1]
    score, is_far = (
        torch.cat([metrics.entropy(mean), metrics.entropy(far.mean(0))]),
        torch.arange(400) >= 200,
    )
    classes = {"task": "multiclass", "num_classes": 5, "num_bins": 15}
    rows: dict[str, tuple[torch.Tensor, Any]] = {
        "NLL": (metrics.categorical_nll(mean, labels), theirs.CategoricalNLL()),
        "Brier": (metrics.brier_score(mean, labels), theirs.BrierScore(num_classes=5)),
        "ECE": (metrics.calibration_error(mean, labels), theirs.CalibrationError(**classes)),
        "ACE": (
            metrics.adaptive_calibration_error(mean, labels),
            theirs.AdaptiveCalibrationError(**classes),
        ),
        "AURC": (metrics.aurc(mean, labels), theirs.AURC()),
        "AUGRC": (metrics.augrc(mean, labels), theirs.AUGRC()),
        "coverage": (metrics.cov_at_risk(mean, labels, 0.05), theirs.CovAt5Risk()),
        "risk": (metrics.risk_at_cov(mean, labels, 0.8), theirs.RiskAt80Cov()),
    }
    for name, (ours, metric) in rows.items():
        metric.update(mean.float(), labels)
        assert float(ours) == pytest.approx(float(metric.compute()), abs=1e-6), name
    metric = theirs.FPR95(pos_label=1)
    metric.update(score.float(), is_far.long())
    assert float(metrics.fpr95(score, is_far)) == pytest.approx(float(metric.compute()), abs=1e-6)
    for ours, metric in (
        (metrics.auroc, torchmetrics.binary_auroc),
        (metrics.average_precision, torchmetrics.binary_average_precision),
    ):
        assert float(ours(score, is_far)) == pytest.approx(
            float(metric(score.float(), is_far.long())), abs=1e-6
        )
    for ours, name in (
        (metrics.mutual_information, "MutualInformation"),
        (metrics.disagreement, "Disagreement"),
    ):
        metric = getattr(theirs, name)(reduction="none")
        metric.update(p.transpose(0, 1).float())
        torch.testing.assert_close(ours(p), metric.compute().double(), rtol=0, atol=1e-6)


# ---- temperatures --------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [0.3, 1.0, 8.0])
def test_temperatures_minimize_the_likelihood(scale: float) -> None:
    logits, _, labels = draw(9, scale=scale)
    found = fit_temperature(logits, labels)

    def nll(t: float, z: torch.Tensor) -> float:
        return float(metrics.categorical_nll((z / t).softmax(-1), labels))

    for z, t in zip(logits, found, strict=True):
        best = optimize.minimize_scalar(nll, (float(t) / 2, float(t) * 2), args=(z,), tol=1e-12)
        assert float(t) == pytest.approx(best.x, rel=1e-5) and nll(float(t), z) <= best.fun + 1e-12
    log_mean = logits.softmax(-1).mean(0).log()
    assert nll(float(fit_temperature(log_mean, labels)), log_mean) <= nll(1.0, log_mean)

    def joint(t: float) -> float:
        return float(metrics.categorical_nll((logits / t).softmax(-1).mean(0), labels))

    t = float(fit_joint_temperature(logits, labels))
    assert joint(t) <= optimize.minimize_scalar(joint, (t / 2, t * 2), tol=1e-10).fun + 1e-12


def test_temperatures_beyond_the_limits() -> None:
    right = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    assert float(fit_temperature(right, torch.tensor([0, 1]))) == pytest.approx(0.01)
    assert float(fit_temperature(right, torch.tensor([1, 0]))) == pytest.approx(100)
    masked = torch.tensor([[2.0, 0.0, -math.inf]] * 4)
    assert float(fit_temperature(masked, torch.tensor([0, 0, 0, 1]))) == pytest.approx(
        2 / math.log(3)
    )


# ---- errors --------------------------------------------------------------------------------------
P, Y = torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1])
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: metrics.categorical_nll(torch.tensor([[2.0, -1.0], [0.0, 1.0]]), Y),
        ValueError,
        "are they logits",
    ),
    (lambda: metrics.brier_score(P * 0.9, Y), ValueError, "rows sum to 1"),
    (lambda: metrics.brier_score(P * math.nan, Y), ValueError, "rows sum to 1"),
    (lambda: metrics.accuracy(P.long(), Y), TypeError, "floating-point"),
    (lambda: metrics.accuracy(P, torch.tensor([0, 2])), ValueError, "classes from 0 to 1, got 2"),
    (lambda: metrics.accuracy(P, torch.tensor([0, -100])), ValueError, "got -100"),
    (lambda: metrics.accuracy(P, Y.double()), TypeError, "labels: expected a tensor of integers"),
    (
        lambda: metrics.accuracy(P, torch.tensor([0])),
        ValueError,
        "labels: expected one for each row",
    ),
    (lambda: metrics.accuracy(P[:0], Y[:0]), ValueError, "labels: expected at least one"),
    (
        lambda: metrics.calibration_error(P, Y, num_bins=0),
        ValueError,
        "num_bins: expected at least 1",
    ),
    (lambda: metrics.calibration_error(P, Y, norm="l3"), ValueError, "norm: expected"),
    (lambda: metrics.aurc(P, Y, torch.ones(3)), ValueError, "confidence: expected the shape"),
    (lambda: metrics.cov_at_risk(P, Y, 2.0), ValueError, "risk: expected a number from 0 to 1"),
    (
        lambda: metrics.auroc(P[:, 0], torch.tensor([1, 1])),
        ValueError,
        "positive and negative rows, got 2",
    ),
    (lambda: metrics.auroc(P[:, 0], torch.tensor([1, 2])), ValueError, "0 and 1, got other"),
    (lambda: metrics.auroc(P[:, 0] * math.nan, Y), ValueError, "NaN in 2 of 2"),
    (
        lambda: metrics.auroc(P, torch.tensor([0, 1, 1])),
        ValueError,
        "targets: expected one for each score",
    ),
    (lambda: metrics.disagreement(P[None]), ValueError, "at least two"),
    (lambda: metrics.crps(P, -P, P[0]), ValueError, "variances: expected no negative"),
    (lambda: metrics.crps(P, None, P), ValueError, "targets: expected the shape"),
    (lambda: metrics.distribution_nll(P, P * 0, P[0]), ValueError, "variances: expected positive"),
    (lambda: metrics.against_size(P, Y), ValueError, "members: expected the shape"),
    (
        lambda: metrics.against_size(P[None], Y, sizes=[2]),
        ValueError,
        "sizes: expected numbers from 1 to 1",
    ),
    (lambda: fit_temperature(P * math.nan, Y), ValueError, "logits: expected finite"),
    (
        lambda: fit_temperature(torch.tensor([[0.0, -math.inf]]), torch.tensor([1])),
        ValueError,
        "probability 0 at every",
    ),
    (lambda: fit_joint_temperature(P, Y), ValueError, "logits: expected the shape"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_arguments_are_named(case: int) -> None:
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()
