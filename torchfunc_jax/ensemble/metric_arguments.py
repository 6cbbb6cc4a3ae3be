"""Checks of what metrics are given: each returns its tensors in float64, or raises TypeError or
ValueError which names the argument.
"""

from __future__ import annotations

import torch


def probabilities_of(p: torch.Tensor, name: str = "probabilities") -> torch.Tensor:
    if not isinstance(p, torch.Tensor) or not p.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {described(p)}")
    if p.ndim < 1 or p.shape[-1] < 1:
        raise ValueError(
            f"{name}: expected a last dimension of classes, got the shape {list(p.shape)}"
        )
    rounding = 8 * torch.finfo(p.dtype).eps
    p = p.double()
    sums = p.sum(-1)
    if not bool(((p >= 0).all() & ((sums - 1).abs() <= max(rounding, 1e-4)).all()).item()):
        raise ValueError(
            f"{name}: expected numbers from 0 to 1 whose rows sum to 1, got rows that sum to "
            f"{sums.min():.4g} up to {sums.max():.4g} and numbers from {p.min():.4g}; are they "
            "logits? Pass logits.softmax(-1)"
        )
    return p


def classified(
    probabilities: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    p = probabilities_of(probabilities)
    labels_of(labels, p)
    return p, labels.to(p.device, torch.int64)


def labels_of(labels: torch.Tensor, values: torch.Tensor) -> None:
    """Checks that labels [N] fit values [..., N, C]; raises TypeError or ValueError otherwise."""
    if (
        not isinstance(labels, torch.Tensor)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype == torch.bool
    ):
        raise TypeError(f"labels: expected a tensor of integers, got {described(labels)}")
    if values.ndim < 2 or labels.shape != values.shape[-2:-1]:
        raise ValueError(
            f"labels: expected one for each row of {list(values.shape)}, [..., N, C], got the "
            f"shape {list(labels.shape)}"
        )
    if not labels.numel():
        raise ValueError("labels: expected at least one, got none")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= values.shape[-1]:
        raise ValueError(
            f"labels: expected classes from 0 to {values.shape[-1] - 1}, got "
            f"{low if low < 0 else high}"
        )


def members_of(members: torch.Tensor) -> torch.Tensor:
    p = probabilities_of(members, "members")
    if p.ndim < 2 or not len(p):
        raise ValueError(f"members: expected the shape [members, ..., C], got {list(p.shape)}")
    return p


def scores_of(
    name: str, scores: torch.Tensor, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    if not isinstance(scores, torch.Tensor) or scores.is_complex():
        raise TypeError(f"{name}: expected a real tensor, got {described(scores)}")
    if shape is not None and scores.shape != shape:
        raise ValueError(f"{name}: expected the shape {list(shape)}, got {list(scores.shape)}")
    scores = scores.double()
    if scores.isnan().any():
        raise ValueError(
            f"{name}: expected numbers, got NaN in {int(scores.isnan().sum())} "
            f"of {scores.numel()} places"
        )
    return scores


def two_kinds(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sorted scores of the negative and of the positive rows."""
    s = scores_of("scores", scores)
    if not isinstance(targets, torch.Tensor) or s.ndim < 1 or targets.shape != s.shape[-1:]:
        raise ValueError(
            f"targets: expected one for each score of {list(s.shape)}, which is [..., N], got "
            f"{described(targets)}"
        )
    positive = targets.to(s.device, torch.bool)
    if not bool((targets.to(s.device) == positive).all()):
        raise ValueError("targets: expected True and False, or 0 and 1, got other numbers")
    if positive.all() or not positive.any():
        raise ValueError(
            f"targets: expected positive and negative rows, got {int(positive.sum())} positive "
            f"ones of {positive.numel()}"
        )
    return s[..., ~positive].sort(-1).values, s[..., positive].sort(-1).values


def gaussians(
    means: torch.Tensor, variances: torch.Tensor | None, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mu = scores_of("means", means)
    if mu.ndim < 1 or not len(mu):
        raise ValueError(f"means: expected the shape [members, ...], got {list(mu.shape)}")
    var = (
        torch.zeros_like(mu)
        if variances is None
        else scores_of("variances", variances, tuple(mu.shape))
    )
    if not (var >= 0).all():
        raise ValueError(f"variances: expected no negative number, got {var.min():.4g}")
    return mu, var, scores_of("targets", targets, tuple(mu.shape[1:])).to(mu.device)


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: expected a number from {low} to {high}, got {value}")


def described(x: object) -> str:
    """A wrong argument, in a message."""
    return (
        f"a tensor of {x.dtype}, {list(x.shape)}"
        if isinstance(x, torch.Tensor)
        else type(x).__name__
    )
