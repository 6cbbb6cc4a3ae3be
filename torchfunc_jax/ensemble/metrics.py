"""Metrics of predictions and of their uncertainty, by torch-uncertainty's names in small letters:
plain functions of torch tensors.

They are computed and returned in float64. Probabilities have the shape [..., N, C], and each metric
the shape [...] of what comes before: one call gives the metric of every member, another that of the
ensemble.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from bridge.errors import public
from torchfunc_jax.ensemble import metric_arguments as given

__all__ = [
    "accuracy",
    "adaptive_calibration_error",
    "against_size",
    "augrc",
    "aurc",
    "auroc",
    "average_precision",
    "brier_score",
    "calibration_error",
    "categorical_nll",
    "cov_at_risk",
    "crps",
    "disagreement",
    "distribution_nll",
    "entropy",
    "fpr95",
    "fpr_at_recall",
    "mutual_information",
    "reliability",
    "risk_at_cov",
    "risk_coverage",
    "variation_ratio",
]


# -- are the classes right, and the probabilities --------------------------------------------------
@public
def accuracy(probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The part of the rows whose most probable class is the label; the first one counts among
    equals.

    Args:
        probabilities: floating-point, [..., N, C]; each row sums to 1.
        labels: integers from 0 to C - 1, [N].

    Returns:
        torch.Tensor: float64, [...].

    Raises:
        ValueError, TypeError: the probabilities are none (logits, for instance), or the labels do
            not fit them.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.accuracy(torch.tensor([[0.7, 0.3], [0.4, 0.6]]), torch.tensor([0, 0]))
        tensor(0.5000, dtype=torch.float64)
    """
    p, labels = given.classified(probabilities, labels)
    return (p.argmax(-1) == labels).double().mean(-1)


@public
def categorical_nll(probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood: the mean of -log p(label), in nats. It is infinite if a label
    has probability 0.

    Args, Returns, Raises: as ``accuracy``'s.

    Source: torch_uncertainty.metrics.CategoricalNLL

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.categorical_nll(torch.tensor([[0.7, 0.3], [0.4, 0.6]]), torch.tensor([0, 1]))
        tensor(0.4338, dtype=torch.float64)
    """
    p, labels = given.classified(probabilities, labels)
    return -_at(p, labels).log().mean(-1)


@public
def brier_score(probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over rows of the squared distance from the probabilities to the label's one-hot row;
    from 0 to 2.

    Args, Returns, Raises: as ``accuracy``'s.

    Source: torch_uncertainty.metrics.BrierScore

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.brier_score(torch.tensor([[0.8, 0.2], [0.3, 0.7]]), torch.tensor([0, 1]))
        tensor(0.1300, dtype=torch.float64)
    """
    p, labels = given.classified(probabilities, labels)
    return (p.square().sum(-1) - 2 * _at(p, labels) + 1).mean(-1)


# -- is the confidence the accuracy ----------------------------------------------------------------
@public
def calibration_error(
    probabilities: torch.Tensor, labels: torch.Tensor, num_bins: int = 15, norm: str = "l1"
) -> torch.Tensor:
    """The distance between confidence and accuracy over bins of equal width; the expected
    calibration error (ECE) with ``norm="l1"``.

    Args:
        probabilities, labels: as ``accuracy``'s. The confidence is the largest probability of a
            row.
        num_bins: bins from 0 to 1; each has its lower edge, and the last one the confidence 1 too.
            (torchmetrics, and so torch-uncertainty, has a further bin for the confidence 1 alone.)
        norm: "l1", the mean distance over the rows; "l2", the root of its mean square; "max", the
            distance of the worst bin.

    Returns:
        torch.Tensor: float64, [...].

    Raises:
        ValueError, TypeError: as ``accuracy``; or there is no such norm.

    Source: torch_uncertainty.metrics.CalibrationError; Guo et al. 2017,
    https://arxiv.org/abs/1706.04599

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.calibration_error(
        ...     torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 0])
        ... )
        tensor(0.2500, dtype=torch.float64)
    """
    confidence, right, count = reliability(probabilities, labels, num_bins)
    return _gap(confidence, right, count, norm)


@public
def adaptive_calibration_error(
    probabilities: torch.Tensor, labels: torch.Tensor, num_bins: int = 15, norm: str = "l1"
) -> torch.Tensor:
    """``calibration_error`` over bins with equally many rows each, by rising confidence.

    Args, Returns, Raises: as ``calibration_error``'s; rows of one confidence share their accuracy,
    whichever bins they come into.

    Source: torch_uncertainty.metrics.AdaptiveCalibrationError

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
        >>> metrics.adaptive_calibration_error(p, torch.tensor([0, 1, 1]), num_bins=3)
        tensor(0.4333, dtype=torch.float64)
    """
    p, labels = given.classified(probabilities, labels)
    given.at_least("num_bins", num_bins, 1)
    confidence, right = _by_falling_score(p.amax(-1), (p.argmax(-1) == labels).double())
    bins = zip(
        confidence.flip(-1).tensor_split(num_bins, -1),
        right.flip(-1).tensor_split(num_bins, -1),
        strict=True,
    )
    parts = [
        (c.mean(-1), r.mean(-1), c.new_full(c.shape[:-1], c.shape[-1]))
        for c, r in bins
        if c.shape[-1]
    ]
    sure, accurate, count = (torch.stack(x, -1) for x in zip(*parts, strict=True))
    return _gap(sure, accurate, count, norm)


@public
def reliability(
    probabilities: torch.Tensor, labels: torch.Tensor, num_bins: int = 15
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a reliability diagram shows: of each bin, the mean confidence, the accuracy, and the
    number of rows.

    Args, Raises: as ``calibration_error``'s.

    Returns:
        (confidence, accuracy, count): [..., num_bins]; float64 and NaN in empty bins, float64
            likewise, int64.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> confidence, accuracy, count = metrics.reliability(
        ...     torch.tensor([[0.8, 0.2], [0.3, 0.7]]), torch.tensor([0, 1]), num_bins=2
        ... )
        >>> count.tolist(), accuracy[1].item()
        ([0, 2], 1.0)
    """
    p, labels = given.classified(probabilities, labels)
    given.at_least("num_bins", num_bins, 1)
    sure, right = p.amax(-1), (p.argmax(-1) == labels).double()
    edges = torch.arange(1, num_bins, dtype=torch.float64, device=p.device) / num_bins
    which = torch.bucketize(sure, edges, right=True)
    empty = sure.new_zeros(*sure.shape[:-1], num_bins)
    count = empty.scatter_add(-1, which, torch.ones_like(sure))
    return (
        empty.scatter_add(-1, which, sure) / count,
        empty.scatter_add(-1, which, right) / count,
        count.long(),
    )


def _gap(
    confidence: torch.Tensor, right: torch.Tensor, count: torch.Tensor, norm: str
) -> torch.Tensor:
    gap = torch.where(count > 0, (confidence - right).abs(), 0.0)
    part = count / count.sum(-1, keepdim=True)
    if norm == "l1":
        return (gap * part).sum(-1)
    if norm == "l2":
        return (gap.square() * part).sum(-1).sqrt()
    if norm == "max":
        return gap.amax(-1)
    raise ValueError(f"norm: expected 'l1', 'l2' or 'max', got {norm!r}")


# -- are the sure ones right: selective classification ---------------------------------------------
@public
def risk_coverage(
    probabilities: torch.Tensor, labels: torch.Tensor, confidence: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of wrong rows among the k surest ones, for each k.

    Args:
        probabilities, labels: as ``accuracy``'s.
        confidence: of each row, larger is surer, [..., N]; None: the largest probability. For an
            entropy, pass it with a minus. Rows of one confidence count as so many parts of the mean
            of them, so that their order does not matter.

    Returns:
        (coverage, risk): float64; k / N, [N], and the risk, [..., N].

    Raises:
        ValueError, TypeError: as ``accuracy``; or the confidence has another shape, or NaN.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> p = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2]])
        >>> coverage, risk = metrics.risk_coverage(p, torch.tensor([0, 1, 0]))
        >>> risk
        tensor([0.0000, 0.0000, 0.3333], dtype=torch.float64)
    """
    p, labels = given.classified(probabilities, labels)
    sure = (
        p.amax(-1)
        if confidence is None
        else given.scores_of("confidence", confidence, tuple(p.shape[:-1]))
    )
    wrong = _by_falling_score(sure, (p.argmax(-1) != labels).double())[1]
    k = torch.arange(1, p.shape[-2] + 1, device=p.device)
    return k / p.new_tensor(p.shape[-2]), wrong.cumsum(-1) / k


@public
def aurc(
    probabilities: torch.Tensor, labels: torch.Tensor, confidence: torch.Tensor | None = None
) -> torch.Tensor:
    """The area under the risk-coverage curve, from the coverage 1/N to 1 by trapezoids, divided by
    the length 1 - 1/N.

    Args, Raises: as ``risk_coverage``'s.

    Returns:
        torch.Tensor: float64, [...]; NaN for a single row.

    Source: torch_uncertainty.metrics.AURC; Geifman and El-Yaniv 2017,
    https://arxiv.org/abs/1705.08500

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.aurc(
        ...     torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2]]), torch.tensor([0, 1, 0])
        ... )
        tensor(0.0833, dtype=torch.float64)
    """
    coverage, risk = risk_coverage(probabilities, labels, confidence)
    return torch.trapezoid(risk, coverage) / (1 - coverage[0])


@public
def augrc(
    probabilities: torch.Tensor, labels: torch.Tensor, confidence: torch.Tensor | None = None
) -> torch.Tensor:
    """As ``aurc``, of the generalized risk, which is risk times coverage: the part of all rows that
    is kept and wrong.

    Args, Returns, Raises: as ``aurc``'s.

    Source: torch_uncertainty.metrics.AUGRC; Traub et al. 2024, https://arxiv.org/abs/2407.01032

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.augrc(
        ...     torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2]]), torch.tensor([0, 1, 0])
        ... )
        tensor(0.0833, dtype=torch.float64)
    """
    coverage, risk = risk_coverage(probabilities, labels, confidence)
    return torch.trapezoid(risk * coverage, coverage) / (1 - coverage[0])


@public
def cov_at_risk(probabilities: torch.Tensor, labels: torch.Tensor, risk: float) -> torch.Tensor:
    """The largest coverage whose risk is at most a given one; NaN if there is none.

    Args:
        probabilities, labels: as ``accuracy``'s.
        risk: the part of wrong rows that is accepted, from 0 to 1.

    Returns, Raises: as ``accuracy``'s.

    Source: torch_uncertainty.metrics.CovAtxRisk

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.cov_at_risk(
        ...     torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2]]),
        ...     torch.tensor([0, 1, 0]),
        ...     risk=0.05,
        ... )
        tensor(0.6667, dtype=torch.float64)
    """
    given.between("risk", risk, 0, 1)
    coverage, risks = risk_coverage(probabilities, labels)
    most = torch.where(risks <= risk, coverage, 0.0).amax(-1)
    return torch.where(most > 0, most, math.nan)


@public
def risk_at_cov(probabilities: torch.Tensor, labels: torch.Tensor, coverage: float) -> torch.Tensor:
    """The risk of the surest rows, as many as it takes to cover a given part of all.

    Args:
        probabilities, labels: as ``accuracy``'s.
        coverage: the part of the rows that is kept, above 0, at most 1.

    Returns, Raises: as ``accuracy``'s.

    Source: torch_uncertainty.metrics.RiskAtxCov

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.risk_at_cov(
        ...     torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2]]),
        ...     torch.tensor([0, 1, 0]),
        ...     coverage=0.8,
        ... )
        tensor(0.3333, dtype=torch.float64)
    """
    given.between("coverage", coverage, 0, 1)
    risk = risk_coverage(probabilities, labels)[1]
    return risk[..., max(1, _ceil(coverage * risk.shape[-1])) - 1]


# -- do scores tell two kinds apart: out of distribution -------------------------------------------
@public
def auroc(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The probability that a positive row has a higher score than a negative one; equal scores
    count one half.

    Args:
        scores: real, [..., N]; higher for what is more likely positive (out of distribution: an
            entropy, say).
        targets: bool, or 0 and 1, [N]; True for the positive rows. Both kinds must be there.

    Returns:
        torch.Tensor: float64, [...].

    Raises:
        ValueError, TypeError: the shapes do not match, a score is NaN, or one of the two kinds is
            missing.

    Source: torchmetrics.classification.BinaryAUROC, sklearn.metrics.roc_auc_score

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        tensor(0.7500, dtype=torch.float64)
    """
    negative, positive = given.two_kinds(scores, targets)
    below = torch.searchsorted(negative, positive) + torch.searchsorted(
        negative, positive, right=True
    )
    return (below / 2).mean(-1, dtype=torch.float64) / negative.shape[-1]


@public
def average_precision(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the positive rows of the precision at their score: the area under the
    precision-recall curve, as steps.

    Args, Returns, Raises: as ``auroc``'s.

    Source: torchmetrics.classification.BinaryAveragePrecision,
    sklearn.metrics.average_precision_score

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.average_precision(
        ...     torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])
        ... )
        tensor(0.8333, dtype=torch.float64)
    """
    negative, positive = given.two_kinds(scores, targets)
    true = positive.shape[-1] - torch.searchsorted(positive, positive)
    false = negative.shape[-1] - torch.searchsorted(negative, positive)
    return (true / (true + false).double()).mean(-1)


@public
def fpr_at_recall(scores: torch.Tensor, targets: torch.Tensor, recall: float) -> torch.Tensor:
    """The part of the negative rows at or above the highest threshold that finds a given part of
    the positive rows.

    Args:
        scores, targets: as ``auroc``'s.
        recall: the part of the positive rows to find, above 0, at most 1.

    Returns, Raises: as ``auroc``'s.

    Source: torch_uncertainty.metrics.FPRx

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.fpr_at_recall(
        ...     torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]), recall=0.5
        ... )
        tensor(0., dtype=torch.float64)
    """
    given.between("recall", recall, 0, 1)
    negative, positive = given.two_kinds(scores, targets)
    threshold = positive[..., -max(1, _ceil(recall * positive.shape[-1]))].unsqueeze(-1)
    return (negative >= threshold).double().mean(-1)


@public
def fpr95(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``fpr_at_recall`` where 95 % of the positive rows are found.

    Args, Returns, Raises: as ``auroc``'s.

    Source: torch_uncertainty.metrics.FPR95

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.fpr95(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        tensor(0.5000, dtype=torch.float64)
    """
    return fpr_at_recall(scores, targets, 0.95)


# -- do the members agree --------------------------------------------------------------------------
@public
def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """The entropy of each row in nats.

    Args:
        probabilities: floating-point, [..., C]; each row sums to 1.

    Returns:
        torch.Tensor: float64, [...]. torch-uncertainty's Entropy is the mean of it over rows, and
            over members if there are any.

    Raises:
        ValueError, TypeError: the probabilities are none.

    Source: torch_uncertainty.metrics.Entropy

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    return torch.special.entr(given.probabilities_of(probabilities)).sum(-1)


@public
def mutual_information(members: torch.Tensor) -> torch.Tensor:
    """What is learned of the class by learning which member is right: the entropy of the mean less
    the mean of the entropies.

    Args:
        members: the probabilities of each member, floating-point, [members, ..., C].
            (torch-uncertainty has the members in dimension 1.)

    Returns:
        torch.Tensor: float64, [...], in nats and never negative.

    Raises:
        ValueError, TypeError: as ``entropy``.

    Source: torch_uncertainty.metrics.MutualInformation

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.mutual_information(
        ...     torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
        ... )
        tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    p = given.members_of(members)
    return (torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)).clamp(
        min=0
    )


@public
def variation_ratio(members: torch.Tensor, probabilistic: bool = True) -> torch.Tensor:
    """How much of the members is not for the class that the ensemble chooses.

    Args:
        members: as ``mutual_information``'s.
        probabilistic: one less the mean probability of the class of the highest mean; otherwise,
            the part of the members that do not vote for the class with most votes (Freeman 1965).

    Returns:
        torch.Tensor: float64, [...].

    Raises:
        ValueError, TypeError: as ``entropy``.

    Source: torch_uncertainty.metrics.VariationRatio. Version 0.13 of it takes [members, N, C],
    unlike its other metrics and its docstring;
        without ``probabilistic`` it counts the votes for the class of the highest mean probability,
        which can be another one than the class with most votes.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> p = torch.tensor([[[0.6, 0.4]], [[0.6, 0.4]], [[0.0, 1.0]]])
        >>> metrics.variation_ratio(p), metrics.variation_ratio(p, probabilistic=False)
        (tensor([0.4000], dtype=torch.float64), tensor([0.3333], dtype=torch.float64))
    """
    p = given.members_of(members)
    return 1 - (p.mean(0) if probabilistic else votes(p).double() / len(p)).amax(-1)


@public
def disagreement(members: torch.Tensor) -> torch.Tensor:
    """The part of the pairs of members that choose different classes.

    Args:
        members: as ``mutual_information``'s, at least two.

    Returns:
        torch.Tensor: float64, [...].

    Raises:
        ValueError, TypeError: as ``entropy``; or there is only one member.

    Source: torch_uncertainty.metrics.Disagreement

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.disagreement(torch.tensor([[[0.7, 0.3]], [[0.6, 0.4]], [[0.2, 0.8]]]))
        tensor([0.6667], dtype=torch.float64)
    """
    p = given.members_of(members)
    n = len(p)
    if n < 2:
        raise ValueError("members: expected at least two, which can disagree, got 1")
    count = votes(p).double()
    return 1 - (count * (count - 1)).sum(-1) / (n * (n - 1))


@public
def votes(members: torch.Tensor) -> torch.Tensor:
    """How many members choose each class: int64, [..., C], of values [members, ..., C]; the first
    class counts among equals.
    """
    count = members.new_zeros(members.shape[1:], dtype=torch.int64)
    for chosen in members.argmax(-1).unsqueeze(-1):
        count.scatter_add_(-1, chosen, torch.ones_like(chosen))
    return count


# -- regression: a mixture of one Gaussian for each member -----------------------------------------
@public
def distribution_nll(
    means: torch.Tensor, variances: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The negative log-likelihood of each target under the mixture of the members' Gaussians.

    Args:
        means, variances: floating-point, [members, ...]; the variances are positive.
        targets: real, [...].

    Returns:
        torch.Tensor: float64, [...]; the metric of a data set is the mean of it.

    Raises:
        ValueError, TypeError: shapes do not match, a variance is not positive, a value is NaN.

    Source: torch_uncertainty.metrics.DistributionNLL of a torch.distributions.MixtureSameFamily

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.distribution_nll(
        ...     torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([1.0])
        ... )
        tensor([1.4189], dtype=torch.float64)
    """
    mu, var, y = given.gaussians(means, variances, targets)
    if not (var > 0).all():
        raise ValueError("variances: expected positive numbers, for a density")
    log = -0.5 * ((y - mu).square() / var + var.log() + math.log(2 * math.pi))
    return math.log(len(mu)) - log.logsumexp(0)


@public
def crps(
    means: torch.Tensor, variances: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """The continuous ranked probability score of each target: the distance of the mixture's
    distribution function to the target's step.

    Args:
        means: floating-point, [members, ...].
        variances: likewise, not negative; None: the members are points, and E|X - y| - E|X - X'| /
            2 is computed for them.
        targets: real, [...].

    Returns:
        torch.Tensor: float64, [...], in the targets' unit; the metric of a data set is the mean of
            it.

    Raises:
        ValueError, TypeError: shapes do not match, a variance is negative, a value is NaN.

    Source: Gneiting and Raftery 2007; of mixtures, Grimit et al. 2006,
    https://doi.org/10.1256/qj.05.235

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> metrics.crps(torch.tensor([[0.0], [2.0]]), None, torch.tensor([1.0]))
        tensor([0.5000], dtype=torch.float64)
    """
    mu, var, y = given.gaussians(means, variances, targets)
    n = len(mu)
    if variances is None:
        weights = (2 * torch.arange(1, n + 1, device=mu.device) - n - 1).reshape(-1, *[1] * y.ndim)
        # the mean of |x_i - x_j| over all pairs
        between = 2 * (weights * mu.sort(0).values).sum(0) / n**2
    else:
        between = (
            sum(
                (_mean_abs(mu[i] - mu, var[i] + var).mean(0) for i in range(n)), torch.zeros_like(y)
            )
            / n
        )
    return _mean_abs(y - mu, var).mean(0) - between / 2


def _mean_abs(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """E|X| of Gaussians."""
    std = variance.sqrt()
    z = torch.where(variance > 0, mean / std, 0.0)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return torch.where(
        variance > 0, mean * torch.erf(z / math.sqrt(2)) + 2 * std * density, mean.abs()
    )


# -- against the size of the ensemble --------------------------------------------------------------
Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: What ``against_size`` computes unless it is told otherwise.
USUAL: Mapping[str, Metric] = {
    "accuracy": accuracy,
    "nll": categorical_nll,
    "brier": brier_score,
    "ece": calibration_error,
}


@public
def against_size(
    members: torch.Tensor,
    labels: torch.Tensor,
    *,
    sizes: Sequence[int] | None = None,
    metrics: Mapping[str, Metric] = USUAL,
    subsets: int = 20,
    seed: int = 0,
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Metrics of smaller ensembles: of the mean probability of some of the members, for each size
    and for several draws of members.

    Args:
        members: the probabilities of each member, floating-point, [members, N, C].
        labels: integers, [N].
        sizes: how many members; None: 1, 2, 3, 4, 6, 8, 12, 16, ... and all.
        metrics: name -> a function of (probabilities [subsets, N, C], labels [N]) that returns
            [subsets], as those of this file.
        subsets: how many sets of each size are drawn, without a member twice in one set; averages
            over them are the curve of a size.
        seed: of the draws.

    Returns:
        (sizes, values): the sizes, and name -> float64 [sizes, subsets]. All sets of the largest
            size are the same one.

    Raises:
        ValueError, TypeError: as ``accuracy``; or a size is larger than the ensemble.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import metrics
        >>> members = torch.randn(4, 100, 3).softmax(-1)
        >>> sizes, values = metrics.against_size(members, torch.randint(3, (100,)), subsets=5)
        >>> sizes, values["nll"].shape
        ([1, 2, 3, 4], torch.Size([4, 5]))
    """
    p, labels = given.classified(members, labels)
    if p.ndim != 3:
        raise ValueError(f"members: expected the shape [members, N, C], got {list(p.shape)}")
    given.at_least("subsets", subsets, 1)
    n = len(p)
    if sizes is None:
        usual = {s for k in range(n.bit_length()) for s in (2**k, 3 * 2**k)}
        sizes = sorted({s for s in usual if s < n} | {n})
    if not all(1 <= s <= n for s in sizes):
        raise ValueError(f"sizes: expected numbers from 1 to {n}, the members, got {list(sizes)}")
    draw = torch.Generator().manual_seed(seed)
    values: dict[str, list[torch.Tensor]] = {name: [] for name in metrics}
    for size in sizes:
        chosen = torch.stack([torch.randperm(n, generator=draw)[:size] for _ in range(subsets)])
        weights = torch.zeros(subsets, n, dtype=p.dtype).scatter_(1, chosen, 1 / size).to(p.device)
        means = torch.tensordot(weights, p, 1)
        for name, metric in metrics.items():
            values[name].append(metric(means, labels))
    return list(sizes), {name: torch.stack(found) for name, found in values.items()}


# -- what several metrics need ---------------------------------------------------------------------
def _by_falling_score(
    scores: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [..., N] from high to low, and values in their order; among equal scores, the mean of
    their values.
    """
    scores, order = scores.sort(-1, descending=True)
    values = values.gather(-1, order)
    low = scores.flip(-1).contiguous()
    n = scores.shape[-1]
    last = n - torch.searchsorted(low, scores)  # where a group of equals ends, and where it begins
    first = n - torch.searchsorted(low, scores, right=True)
    total = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
    return scores, (total.gather(-1, last) - total.gather(-1, first)) / (last - first)


def _at(p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The probability of each row's label, [..., N]."""
    return p.gather(-1, labels.expand(p.shape[:-1]).unsqueeze(-1)).squeeze(-1)


def _ceil(x: float) -> int:
    return math.ceil(x - 1e-9)  # 0.07 * 100 is above 7
