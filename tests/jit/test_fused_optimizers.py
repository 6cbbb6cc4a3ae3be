"""torch.optim's fused optimizers, and a GradScaler, inside a jitted step: beside PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchfunc_jax import jit

#: By name: an optimizer of some parameters.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, maximize=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2, fused=True),
    "AdamW, a tensor as rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.01, weight_decay=0.1, maximize=True, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, fused=True),
    "SGD, nesterov": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, fused=True),
    "Adagrad, a tensor as rate": lambda p: torch.optim.Adagrad(p, torch.tensor(0.1), fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1, weight_decay=0.1, fused=True),
}


def _nets() -> list[nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return [net, copy.deepcopy(net)]


def _same(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_pytorchs(name: str, dtype: torch.dtype) -> None:
    nets = [net.to(dtype) for net in _nets()]
    mine, theirs = [OPTIMIZERS[name](net.parameters()) for net in nets]

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).float().pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss

    jitted = jit(lambda x: step(nets[0], mine, x))
    loose = dict.fromkeys(["rtol", "atol"], 2e-2 if dtype == torch.bfloat16 else 1e-5)
    for k in range(4):
        x = torch.ones(5, 3, dtype=dtype) * (k + 1) / 4
        torch.testing.assert_close(jitted(x), step(nets[1], theirs, x), **loose)
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(p, q, **loose)
            torch.testing.assert_close(mine.state[p], theirs.state[q], **loose)


def test_a_scaled_loss_that_overflows_changes_nothing_but_the_scale() -> None:
    """A fused optimizer takes the scale itself, so that nothing asks for the value of found_inf."""
    nets = _nets()
    optimizers = [torch.optim.Adam(net.parameters(), 0.1, fused=True) for net in nets]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in nets]

    def step(k: int, x: torch.Tensor) -> torch.Tensor:
        optimizers[k].zero_grad()
        loss = nets[k](x).pow(2).sum()
        scalers[k].scale(loss).backward()
        scalers[k].step(optimizers[k])
        scalers[k].update()
        return loss

    jitted = jit(lambda x: step(0, x))
    for k in range(7):
        x = torch.ones(5, 3) * (float("inf") if k == 3 else 1.0)
        _same(jitted(x).isfinite(), step(1, x).isfinite())
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            _same(p, q)
        _same(scalers[0]._scale, scalers[1]._scale)
        _same(scalers[0]._growth_tracker, scalers[1]._growth_tracker)


def test_gradients_are_unscaled_and_what_is_not_finite_is_found() -> None:
    def unscaled(x: torch.Tensor, found: torch.Tensor) -> list[torch.Tensor]:
        grads = [x.clone(), x.sum().reshape(1)]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.25))
        return [*grads, found]

    for x in (torch.ones(3), torch.tensor([1.0, float("nan"), 2.0])):
        _same(jit(unscaled)(x, torch.zeros(1)), unscaled(x, torch.zeros(1)))
