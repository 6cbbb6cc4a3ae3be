"""BatchNorm whose statistics are of the whole batch where each device has a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jax import lax
from torch.overrides import TorchFunctionMode

from bridge.boundary.calls import apply
from bridge.boundary.results import Result


class SyncedBatchNorm(TorchFunctionMode):
    """While entered, ``F.batch_norm`` in training takes its mean and variance over an axis of the
    mesh too.

    Source: ``torch.nn.SyncBatchNorm``
    """

    def __init__(self, axis: str) -> None:
        super().__init__()
        self.axis = axis

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return (self.batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        # varying at once: the gradient is then summed over the devices as a mean, and not where the
        # mean has been spread over the batch
        (mean,), _ = apply(
            lambda values: Result(
                [lax.pcast(lax.pmean(values[0], self.axis), self.axis, to="varying")], None
            ),
            [x],
        )
        return mean

    def batch_norm(
        self,
        input: torch.Tensor,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        x = input if input.dtype == torch.float64 else input.float()
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        mean = self._mean(x.mean(dims))
        centered = x - mean.view(shape)
        variance = self._mean(centered.square().mean(dims))
        if running_mean is not None:
            rows = x.numel() // x.shape[1] * round(float(self._size()))
            with torch.no_grad():
                running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
                running_var.lerp_(
                    (variance.detach() * (rows / (rows - 1))).to(running_var.dtype), momentum
                )
        out = centered * (variance + eps).rsqrt().view(shape)
        out = out if weight is None else out * weight.view(shape)
        return (out if bias is None else out + bias.view(shape)).to(input.dtype)

    def _size(self) -> int:
        return lax.axis_size(self.axis)
