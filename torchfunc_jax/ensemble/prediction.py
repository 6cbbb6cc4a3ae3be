"""What an ensemble predicts: its members' outputs, run in batches, and the means, votes and
uncertainties that are made of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch.utils import _pytree as pytree

from bridge.errors import public, public_methods
from torchfunc_jax.ensemble.members import Ensemble
from torchfunc_jax.ensemble.metric_arguments import described
from torchfunc_jax.ensemble.metrics import votes

__all__ = ["Classification", "Regression", "predict"]

Outputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class _Shown:
    """Dataclasses whose repr has the shape of each tensor in the place of its numbers."""

    def __repr__(self) -> str:
        shown = [
            f"{name}={list(x.shape) if isinstance(x, torch.Tensor) else x}"
            for name, x in vars(self).items()
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@public_methods
@dataclasses.dataclass(frozen=True, repr=False)
class Classification(_Shown):
    """The predictions of an ensemble of classifiers. They are computed in float64, and have the
    logits' dtype (float32 of a 16-bit one).

    Attributes:
        logits: each member's, divided by its temperature, [members, N, ..., C]; None if they were
            not kept.
        mean_logits: their mean over members, [N, ..., C].
        probability: the mean of the members' probabilities, [N, ..., C].
        log_probability: its logarithm, right also if the probability is 0 in its dtype.
        votes: the number of members for which each class is the most probable one (the first among
            equals), int64, [N, ..., C].
        vote: the class with most votes; among equals the one with the highest mean probability, and
            of these the first; int64, [N, ...].
        entropy: of the mean probability, in nats: the whole uncertainty, [N, ...].
        expected_entropy: the mean of the members' entropies: the part that is in the data
            (aleatoric).
        mutual_information: the difference of the two: the part that more members, or data, would
            take away (epistemic).
        variation_ratio: the part of the members that does not vote for ``vote``.
        disagreement: the part of the pairs of members that vote for different classes; 0 for one
            member.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Classification
        >>> found = Classification.of(torch.tensor([[[0.5, 0.0]], [[0.5, 0.0]], [[0.0, 9.0]]]))
        >>> found.vote, found.votes, found.probability.argmax(-1)
        (tensor([0]), tensor([[2, 1]]), tensor([1]))
    """

    mean_logits: torch.Tensor
    probability: torch.Tensor
    log_probability: torch.Tensor
    votes: torch.Tensor
    vote: torch.Tensor
    entropy: torch.Tensor
    expected_entropy: torch.Tensor
    mutual_information: torch.Tensor
    variation_ratio: torch.Tensor
    disagreement: torch.Tensor
    logits: torch.Tensor | None = None

    #: the fields whose first dimension is the members'
    by_member: ClassVar[tuple[str, ...]] = ("logits",)

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        temperature: torch.Tensor | float | None = None,
        keep: bool = True,
    ) -> Classification:
        """The predictions of members whose logits are known.

        Args:
            logits: floating-point, [members, ..., C]; minus infinity is a probability of 0.
            temperature: what the logits are divided by: a number, or [members].
            keep: whether the members' logits are kept.

        Raises:
            ValueError: a member's logits are NaN or infinite in some row, or there are no members;
                a temperature is not positive.
            TypeError: the logits are no floating-point tensor.
        """
        if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
            raise TypeError(
                "logits: expected a floating-point tensor [members, ..., C], got "
                f"{described(logits)}"
            )
        if logits.ndim < 2 or not len(logits) or not logits.shape[-1]:
            raise ValueError(
                f"logits: expected the shape [members, ..., C], got {list(logits.shape)}"
            )
        dtype = torch.promote_types(logits.dtype, torch.float32)
        n = len(logits)
        z = logits.detach().double()
        if temperature is not None:
            z = z / _temperatures(temperature, n).to(z.device).reshape(-1, *[1] * (z.ndim - 1))
        log_p = z.log_softmax(-1)
        _all_numbers(log_p, "logits")
        p = log_p.exp()
        count = votes(log_p)
        shares = count.double() / n
        log_mean = log_p.logsumexp(0) - math.log(n)
        mean = p.mean(0)
        most = count == count.amax(-1, keepdim=True)
        whole, parts = torch.special.entr(mean).sum(-1), torch.special.entr(p).sum(-1).mean(0)
        pairs = (shares * (count - 1)).sum(-1) / max(n - 1, 1)
        found = {
            "mean_logits": z.mean(0),
            "probability": mean,
            "log_probability": log_mean,
            "entropy": whole,
            "expected_entropy": parts,
            "mutual_information": (whole - parts).clamp(min=0),
            "variation_ratio": 1 - shares.amax(-1),
            "disagreement": 1 - pairs if n > 1 else torch.zeros_like(whole),
        }
        vote = torch.where(most, mean, -1.0).argmax(-1)
        return cls(
            votes=count,
            vote=vote,
            logits=z.to(dtype) if keep else None,
            **{k: v.to(dtype) for k, v in found.items()},
        )


@public_methods
@dataclasses.dataclass(frozen=True, repr=False)
class Regression(_Shown):
    """The predictions of an ensemble of regressors: the mixture of its members' Gaussians, or of
    points if they give no variance.

    Attributes:
        means: each member's, [members, N, ...].
        variances: likewise; zeros if the members give none.
        mean: of the mixture, [N, ...].
        aleatoric: the mean of the members' variances: what the members say is in the data.
        epistemic: the variance of the members' means (the mixture's, divided by the number of
            members, not by one less).
        variance: of the mixture, the sum of the two.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Regression
        >>> found = Regression.of(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]]))
        >>> found.mean, found.variance
        (tensor([1.]), tensor([3.]))
    """

    means: torch.Tensor
    variances: torch.Tensor
    mean: torch.Tensor
    aleatoric: torch.Tensor
    epistemic: torch.Tensor
    variance: torch.Tensor

    by_member: ClassVar[tuple[str, ...]] = ("means", "variances")

    @classmethod
    def of(cls, means: torch.Tensor, variances: torch.Tensor | None = None) -> Regression:
        """The predictions of members whose outputs are known.

        Args:
            means: floating-point, [members, ...].
            variances: likewise, not negative; None: none.

        Raises:
            ValueError: a member's mean or variance is no finite number, a variance is negative, or
                the shapes differ.
            TypeError: the means are no floating-point tensor.
        """
        if not isinstance(means, torch.Tensor) or not means.is_floating_point():
            raise TypeError(
                f"means: expected a floating-point tensor [members, ...], got {described(means)}"
            )
        if means.ndim < 1 or not len(means):
            raise ValueError(f"means: expected the shape [members, ...], got {list(means.shape)}")
        dtype = torch.promote_types(means.dtype, torch.float32)
        mu = means.detach().double()
        var = torch.zeros_like(mu) if variances is None else variances.detach().double()
        if var.shape != mu.shape:
            raise ValueError(
                f"variances: expected the means' shape {list(mu.shape)}, got {list(var.shape)}"
            )
        for name, values in (("means", mu), ("variances", var)):
            _all_numbers(torch.where(values.isfinite(), values, math.nan), name)
        if (var < 0).any():
            raise ValueError(
                f"variances: expected no negative number, got {var.min():.4g}; a head that gives "
                "logarithms needs exp()"
            )
        aleatoric, epistemic = var.mean(0), mu.var(0, correction=0)
        found = (mu, var, mu.mean(0), aleatoric, epistemic, aleatoric + epistemic)
        return cls(*(x.to(dtype) for x in found))

    def cdf(self, y: torch.Tensor | float) -> torch.Tensor:
        """The probability of a value of at most y: float64, [N, ...]."""
        mu, var = self.means.double(), self.variances.double()
        away = torch.as_tensor(y, dtype=torch.float64, device=mu.device) - mu
        step = (away >= 0).double()
        return torch.where(var > 0, torch.special.ndtr(away / var.sqrt()), step).mean(0)

    def quantile(self, q: float) -> torch.Tensor:
        """The smallest value whose probability is at least q, 0 < q < 1: that of the whole mixture,
        not of its mean and variance.

        Returns:
            torch.Tensor: [N, ...]; of members without variances, one of their means.

        Raises:
            ValueError: q is not inside of 0 and 1.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Regression
            >>> Regression.of(torch.tensor([[0.0], [2.0]]), torch.ones(2, 1)).quantile(0.5)
            tensor([1.])
        """
        if not 0 < q < 1:
            raise ValueError(f"q: expected a number between 0 and 1, got {q}")
        mu, std = self.means.double(), self.variances.double().sqrt()
        if not std.any():
            index = max(0, math.ceil(q * len(mu) - 1e-9) - 1)
            return self.means.sort(0).values[index]
        each = mu + std * math.sqrt(2) * torch.erfinv(torch.tensor(2 * q - 1, dtype=torch.float64))
        low, high = each.amin(0), each.amax(0)  # the mixture's quantile is among its members'
        for _ in range(80):
            middle = (low + high) / 2
            enough = self.cdf(middle) >= q
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        return high.to(self.means.dtype)


@public
def predict(
    ens: Ensemble,
    inputs: Any,
    *,
    task: str = "classification",
    head: Callable[[Any], Outputs] | None = None,
    batch_size: int | None = None,
    chunk: int | None = None,
    temperature: torch.Tensor | float | None = None,
    keep: bool = True,
) -> Any:
    """What the ensemble predicts for inputs, with all its uncertainties.

    Args:
        ens: the ensemble; its members are in evaluation mode.
        inputs: a tensor [N, ...] that every member is called with; a tuple or dict of tensors is
            taken as the arguments.
        task: "classification", or "regression".
        head: makes of the members' outputs [members, B, ...] what the task needs: logits [members,
            B, ..., C], or means, or (means, variances). None: the outputs are logits, or means. A
            mean and a logarithm of the variance in the last dimension:
            ``lambda out: (out[..., 0], out[..., 1].exp())``.
        batch_size: how many inputs are run at a time; None: all at once. The last batch is filled
            up, so that one program serves all.
        chunk: how many members of a device are run at a time; None: all.
        temperature: what logits are divided by: a number, or one for each member, [members]; see
            ``fit_temperature``.
        keep: whether the members' logits are kept; without them the memory does not grow with the
            members.

    Returns:
        Classification or Regression: their tensors are [N, ...], on the CPU.

    Raises:
        ValueError, TypeError: there are no inputs, no such task, or a member's outputs are no
            numbers; the message names the members.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Ensemble, predict
        >>> ens = Ensemble(lambda: torch.nn.Linear(4, 3), n=5, seed=0)
        >>> found = predict(ens, torch.ones(10, 4), batch_size=4)
        >>> found.probability.shape, found.mutual_information.shape, found.logits.shape
        (torch.Size([10, 3]), torch.Size([10]), torch.Size([5, 10, 3]))
    """
    if task not in ("classification", "regression"):
        raise ValueError(f"task: expected 'classification' or 'regression', got {task!r}")
    if task == "regression" and temperature is not None:
        raise ValueError("temperature: it divides logits, and a regression has none")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
    inputs = pytree.tree_map(
        lambda x: torch.as_tensor(x) if isinstance(x, np.ndarray) else x, inputs
    )
    tensors = pytree.tree_leaves(inputs)
    sizes = {len(x) if isinstance(x, torch.Tensor) and x.ndim else 0 for x in tensors}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "inputs: expected tensors with one row for each sample, [N, ...], and N of at least 1, "
            "got "
            f"{', '.join(map(described, tensors))}"
        )
    size = sizes.pop()
    found: list[Any] = []
    for start in range(0, size, batch_size or size):
        rows = torch.arange(
            start,
            start + (batch_size or size) if found else min(size, start + (batch_size or size)),
        ).clamp(max=size - 1)
        outputs = ens.logits(pytree.tree_map(lambda x, rows=rows: x[rows], inputs), chunk=chunk)
        outputs = outputs if head is None else head(outputs)
        outputs = pytree.tree_map(lambda x, kept=size - start: x[:, :kept], outputs)
        if task == "classification":
            found.append(Classification.of(outputs, temperature, keep))
        else:
            found.append(Regression.of(*(outputs if isinstance(outputs, tuple) else (outputs,))))
    return _joined(found)


def _joined(parts: list[Any]) -> Any:
    kind = type(parts[0])
    values = {f.name: [getattr(x, f.name) for x in parts] for f in dataclasses.fields(kind)}
    dims = {name: int(name in kind.by_member) for name in values}
    return kind(
        **{name: None if v[0] is None else torch.cat(v, dims[name]) for name, v in values.items()}
    )


def _temperatures(temperature: torch.Tensor | float, n: int) -> torch.Tensor:
    t = torch.as_tensor(temperature, dtype=torch.float64)
    if t.shape not in ((), (n,)):
        raise ValueError(
            f"temperature: expected a number, or one for each of the {n} members, got the shape "
            f"{list(t.shape)}"
        )
    if not ((t > 0) & t.isfinite()).all():
        raise ValueError(f"temperature: expected positive numbers, got {t.min():.4g}")
    return t


def _all_numbers(values: torch.Tensor, name: str) -> None:
    bad = values.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    if bad:
        shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
        raise ValueError(
            f"{name}: {len(bad)} of {len(values)} members gave NaN or infinity: {shown}; "
            "leave them out (Ensemble.drop), or train them again (Trainer.reseed)"
        )
