"""What one member minimizes: its loss on a batch, in torch, with its augmentation, precision,
temperature and weights of terms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch
from torch import nn

from torchfunc_jax.ensemble.architecture import unchanged
from torchfunc_jax.ensemble.members import arguments, widened
from torchfunc_jax.ensemble.meshes import DATA
from torchfunc_jax.ensemble.synced_batch_norm import SyncedBatchNorm


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of ``Trainer`` by these names; synced: BatchNorm's statistics are taken over
    the mesh's axis "data"; shared: the names of the parameters and buffers that all members share.
    """

    loss: Callable[..., Any]
    loss_of: str
    augment: Callable[..., Any] | None
    dtype: torch.dtype | None
    synced: bool
    shared: tuple[str, ...] = ()


class Objective(nn.Module):
    """A member with its loss: a module whose forward is the number to minimize."""

    def __init__(self, member: nn.Module, settings: Settings) -> None:
        super().__init__()
        self.member, self.settings = member, settings

    def forward(self, *args: Any) -> torch.Tensor:
        with unchanged(self.member):
            return self._value(*args)

    def _value(
        self,
        numbers: Mapping[str, Any],
        batch: tuple[Any, ...],
        wide: tuple[torch.dtype | None, ...],
        augmented: bool,
    ) -> torch.Tensor:
        how = self.settings
        before = {name: (t, t._version) for name, t in self._constant()}
        batch = widened(batch, wide, torch.Tensor.to)
        with contextlib.ExitStack() as modes:
            if how.synced:
                modes.enter_context(SyncedBatchNorm(DATA))
            if how.dtype is not None:
                modes.enter_context(torch.autocast("cpu", dtype=how.dtype))
            if augmented and how.augment is not None:
                batch = tuple(how.augment(*batch))
            if how.loss_of == "module":
                found = how.loss(self.member, *batch)
            else:
                args, kwargs = arguments(batch[0])
                out = self.member(*args, **kwargs)
                if how.dtype is not None:  # the loss is computed as without mixed precision
                    modes.close()
                    out = jax.tree.map(lambda x: x.float() if x.dtype == how.dtype else x, out)
                found = how.loss(self._tempered(out, numbers), *batch[1:])
        for name, t in self._constant():
            if t is not before[name][0] or t._version != before[name][1]:
                raise ValueError(
                    (
                        f"member: its forward writes to {name!r}, which all members share "
                        "(shared=), as BatchNorm does in training mode; share other parameters and "
                        "buffers by their names, or let that layer be in evaluation mode "
                        "(training=None)"
                    )
                    if name in how.shared
                    else (
                        f"member: its forward writes to the parameter {name!r} (as nn.Embedding "
                        "with max_norm does), and the step would lose what it writes; let it "
                        "compute with a changed copy, or write to a buffer"
                    )
                )
        return self._weighted(found, numbers.get("loss_weights"))

    def _constant(self) -> list[tuple[str, torch.Tensor]]:
        """What the member may not write to: its parameters,
        and the buffers that all members share.
        """
        return [
            *self.member.named_parameters(),
            *((name, t) for name, t in self.member.named_buffers() if name in self.settings.shared),
        ]

    @staticmethod
    def _tempered(out: Any, numbers: Mapping[str, Any]) -> Any:
        if "temperature" not in numbers:
            return out
        if not isinstance(out, torch.Tensor):
            raise TypeError(
                "temperature: it divides a member's output, which must be a tensor; got "
                f"{type(out).__name__}"
            )
        return out / numbers["temperature"].to(out.dtype)

    @staticmethod
    def _weighted(found: Any, weights: Any) -> torch.Tensor:
        terms = found if isinstance(found, Mapping) else {"": found}
        if not terms:
            raise ValueError(
                "loss: expected a tensor without dimensions, or a dict of them, got an empty dict"
            )
        for name, term in terms.items():
            if not isinstance(term, torch.Tensor) or term.dim():
                what = (
                    f"shape {tuple(term.shape)}"
                    if isinstance(term, torch.Tensor)
                    else type(term).__name__
                )
                raise ValueError(
                    f"loss: expected a tensor without dimensions{f' as {name!r}' if name else ''}, "
                    f"got {what}; take its mean"
                )
            if not term.is_floating_point():
                raise ValueError(
                    f"loss: expected a floating-point tensor{f' as {name!r}' if name else ''}, "
                    f"got {term.dtype}"
                )
        if weights is None:
            return functools.reduce(torch.add, terms.values())
        given = weights if isinstance(weights, Mapping) else {"": weights}
        if set(given) != set(terms):
            raise ValueError(
                f"loss_weights: expected weights of {sorted(terms)}, which the loss returns, got "
                f"{sorted(given)}"
            )
        return functools.reduce(
            torch.add, [terms[name] * given[name].to(terms[name].dtype) for name in terms]
        )
