"""Temperature scaling: the temperature of logits that fits held-out labels best, of each member, of
the mean, or of all members at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from bridge.errors import public
from torchfunc_jax.ensemble.metric_arguments import described, labels_of

__all__ = ["fit_joint_temperature", "fit_temperature"]

_STEPS = 200  # bisection alone needs 60


@public
def fit_temperature(
    logits: torch.Tensor, labels: torch.Tensor, limits: tuple[float, float] = (0.01, 100.0)
) -> torch.Tensor:
    """The temperature T for which softmax(logits / T) has the least negative log-likelihood of
    held-out labels.

    The likelihood is convex in 1/T, so that there is one such temperature: it is found by Newton's
    method inside of a bisection.

    Args:
        logits: floating-point, [..., N, C]: the members' for a temperature of each, or the
            logarithm of the mean probability, for a temperature of the mean. They are used in
            float64.
        labels: integers from 0 to C - 1, [N]: of data that no member was trained on.
        limits: the temperatures to choose from. If every row is right the best one is 0, and if the
            logits are worse than none it is infinite: then the result is the limit.

    Returns:
        torch.Tensor: float64, [...]; divide logits by it, or pass it to
            ``predict(..., temperature=)``.

    Raises:
        ValueError, TypeError: the labels do not fit, or a logit is NaN or infinite (minus infinity
            is a probability of 0).

    Source: Guo et al. 2017, https://arxiv.org/abs/1706.04599;
    torch_uncertainty.post_processing.TemperatureScaler

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import fit_temperature
        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
        >>> fit_temperature(logits, torch.tensor([0, 0, 0, 1]))  # 3 of 4: the best logit is log 3
        tensor(3.6410, dtype=torch.float64)
    """
    z, labels = _held_out(logits, labels)
    target = z.gather(-1, labels.expand(z.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def slopes(beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = (z * beta[..., None, None]).softmax(-1)
        finite = torch.where(p > 0, z, 0.0)
        mean = (p * finite).sum(-1)
        variance = (p * (finite - mean.unsqueeze(-1)).square()).sum(-1)
        return (mean - target).mean(-1), variance.mean(-1)

    return 1 / _root(slopes, z.new_ones(z.shape[:-2]), limits)


@public
def fit_joint_temperature(
    logits: torch.Tensor, labels: torch.Tensor, limits: tuple[float, float] = (0.01, 100.0)
) -> torch.Tensor:
    """The one temperature of all members for which the mean of their probabilities has the least
    negative log-likelihood.

    Members that are each calibrated make a mean that is too unsure; this calibrates the mean, and
    keeps the members' probabilities. The likelihood need not be convex: the best of 200
    temperatures, evenly spaced in their logarithm, is refined by golden sections.

    Args:
        logits: floating-point, [members, N, C].
        labels, limits: as ``fit_temperature``'s.

    Returns:
        torch.Tensor: float64, [].

    Raises:
        ValueError, TypeError: as ``fit_temperature``.

    Source: Rahaman and Thiery 2021, https://arxiv.org/abs/2007.08792

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import fit_joint_temperature
        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
        >>> fit_joint_temperature(torch.stack([logits, logits]), torch.tensor([0, 0, 0, 1]))
        tensor(3.6410, dtype=torch.float64)
    """
    z, labels = _held_out(logits, labels)
    if z.ndim != 3:
        raise ValueError(f"logits: expected the shape [members, N, C], got {list(z.shape)}")

    def nll(log_t: float) -> float:
        log_p = (z / math.exp(log_t)).log_softmax(-1).logsumexp(0) - math.log(len(z))
        return -float(log_p.gather(-1, labels.unsqueeze(-1)).mean())

    low, high = (math.log(t) for t in limits)
    step = (high - low) / 199
    best = min((low + i * step for i in range(200)), key=nll)
    a, b = max(low, best - step), min(high, best + step)
    ratio = (math.sqrt(5) - 1) / 2
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = nll(c), nll(d)
    while b - a > 1e-9:
        if at_c < at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = nll(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = nll(d)
    return z.new_tensor(math.exp((a + b) / 2))


def _root(
    slopes: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    beta: torch.Tensor,
    limits: tuple[float, float],
) -> torch.Tensor:
    """Where a rising function of beta = 1 / T crosses zero, in each place; the limit if it does
    not.

    Newton's steps, or bisection where they leave the bracket or do not halve the step before.
    """
    low, high = torch.full_like(beta, 1 / limits[1]), torch.full_like(beta, 1 / limits[0])
    flat, steep = slopes(low)[0] >= 0, slopes(high)[0] <= 0
    high, low = torch.where(flat, low, high), torch.where(steep, high, low)
    step = high - low
    for _ in range(_STEPS):
        value, slope = slopes(beta)
        low, high = torch.where(value <= 0, beta, low), torch.where(value >= 0, beta, high)
        newton = beta - value / slope
        good = (newton >= low) & (newton <= high) & ((value / slope).abs() <= step.abs() / 2)
        after = torch.where(good, newton, (low + high) / 2)
        step, beta = after - beta, after
        if bool((step.abs() <= 1e-14 * beta).all()):
            break
    return torch.where(steep, 1 / limits[0], torch.where(flat, 1 / limits[1], beta))


def _held_out(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        raise TypeError(f"logits: expected a floating-point tensor, got {described(logits)}")
    labels_of(labels, logits)
    z = logits.detach().double()
    if z.isnan().any() or (z == math.inf).any() or (z == -math.inf).all(-1).any():
        raise ValueError(
            "logits: expected finite numbers (or minus infinity for a probability "
            "of 0), got NaN or infinity"
        )
    labels = labels.to(z.device, torch.int64)
    if (z.gather(-1, labels.expand(z.shape[:-1]).unsqueeze(-1)) == -math.inf).any():
        raise ValueError("logits: a label has the probability 0 at every temperature")
    return z - z.amax(-1, keepdim=True), labels
