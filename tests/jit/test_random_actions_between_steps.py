"""Whole training steps under jit with random actions between them, on the model, its parameters and
the optimizer: beside the steps without jit, in float64.
"""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchfunc_jax import jit

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.more: nn.Module | None = None
        self.scale, self.calls = 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.norm(self.first(x).tanh())
        if self.more is not None:
            h = self.more(h)
        return self.last(h) * self.scale


class _Training:
    """A model, its optimizer, a step of training, and what a user does between the steps."""

    def __init__(self, optimizer: str, zeroes: str) -> None:
        torch.manual_seed(0)
        self.model = _Net().double()
        self.optimizer = _OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.zeroes, self.limit, self.seen = zeroes, None, list[float]()
        self.handles: list[Any] = []
        self.saved = self.copied()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.zeroes != "never":
            self.optimizer.zero_grad(set_to_none=self.zeroes == "None")
        loss = ((self.model(x) - y) ** 2).mean()
        loss.backward()
        if self.limit is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        self.optimizer.step()
        return loss.detach()

    def copied(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def parameter(self, k: int) -> nn.Parameter:
        return [*self.model.parameters()][k]

    def loads(self) -> None:
        of_model, of_optimizer = copy.deepcopy(self.saved)
        if self.model.more is None and len(self.optimizer.param_groups) == 1:
            self.model.load_state_dict(of_model)
            self.optimizer.load_state_dict(of_optimizer)

    def adds_a_layer(self) -> None:
        if len(self.optimizer.param_groups) == 1:
            self.model.more = nn.Linear(4, 4).double()
            nn.init.eye_(self.model.more.weight)
            nn.init.zeros_(self.model.more.bias)
            self.optimizer.add_param_group({"params": [*self.model.more.parameters()], "lr": 0.01})

    def replaces_a_layer(self) -> None:
        self.model.last = nn.Linear(4, 1).double()
        for p in self.model.last.parameters():
            nn.init.constant_(p, 0.1)

    def hooks(self, k: int) -> None:
        if (p := self.parameter(k)).requires_grad:
            self.handles.append(
                p.register_hook(lambda g: g * 0.5)
                if k % 2
                else p.register_post_accumulate_grad_hook(
                    lambda p: self.seen.append(p.grad.sum().item())
                )
            )

    def sets(self, name: str, values: Any) -> None:
        if name in self.optimizer.param_groups[0]:
            self.optimizer.param_groups[0][name] = values

    def outside(self) -> None:
        loss = (self.model(torch.ones(5, 3).double()) ** 2).mean()
        if loss.requires_grad:
            loss.backward()


def _exchange(t: _Training) -> None:
    with torch.no_grad():
        t.model.first.weight = nn.Parameter(t.model.first.weight * 0.5)


def _in_place(t: _Training) -> None:
    with torch.no_grad():
        t.model.first.bias.mul_(0.5)


ACTIONS: dict[str, Callable[[_Training, int], Any]] = {
    "freeze": lambda t, k: t.parameter(k).requires_grad_(False),
    "unfreeze": lambda t, k: t.model.requires_grad_(),
    "no gradient": lambda t, k: setattr(t.parameter(k), "grad", None),
    "another gradient": lambda t, k: setattr(
        t.parameter(k), "grad", torch.ones_like(t.parameter(k))
    ),
    "zero_grad": lambda t, k: t.optimizer.zero_grad(set_to_none=k % 2 == 0),
    "rate": lambda t, k: t.sets("lr", 0.04 + k / 100),
    "schedule": lambda t, k: t.schedule.step(),
    "decay": lambda t, k: t.sets("weight_decay", k % 3 / 100),
    "betas": lambda t, k: t.sets("betas", [(0.9, 0.999), (0.8, 0.99)][k % 2]),
    "eval": lambda t, k: t.model.eval(),
    "train": lambda t, k: t.model.train(),
    "eval of a part": lambda t, k: t.model.norm.eval(),
    "momentum of a part": lambda t, k: setattr(t.model.norm, "momentum", [0.1, None, 0.3][k % 3]),
    "reset statistics": lambda t, k: t.model.norm.reset_running_stats(),
    "save": lambda t, k: setattr(t, "saved", t.copied()),
    "load": lambda t, k: t.loads(),
    "another parameter": lambda t, k: _exchange(t),
    "other data": lambda t, k: setattr(t.model.last.weight, "data", t.model.last.weight.data * 0.5),
    "in place": lambda t, k: _in_place(t),
    "another layer": lambda t, k: t.replaces_a_layer(),
    "one more layer": lambda t, k: t.adds_a_layer(),
    "one layer less": lambda t, k: setattr(t.model, "more", None),
    "scale": lambda t, k: setattr(t.model, "scale", [1.0, 0.5, 2][k % 3]),
    "hook on a gradient": lambda t, k: t.hooks(k),
    "hook on a module": lambda t, k: t.handles.append(
        t.model.first.register_forward_hook(lambda m, inputs, out: out * 0.9)
    ),
    "no hook": lambda t, k: t.handles and t.handles.pop().remove(),
    "clip": lambda t, k: setattr(t, "limit", [None, 1.0, 0.1][k % 3]),
    "clear the state": lambda t, k: t.optimizer.state.clear(),
    "another state": lambda t, k: setattr(t.optimizer, "state", collections.defaultdict(dict)),
    "a step outside": lambda t, k: t.outside(),
}


def _outcome(wrap: Callable[..., Any], seed: int) -> list[Any]:
    chosen = random.Random(seed)
    training = _Training(chosen.choice([*_OPTIMIZERS]), chosen.choice(["None", "zeros", "never"]))
    step, numbers = wrap(training.step), torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for k in range(9):
        name, which = chosen.choice([*ACTIONS]), chosen.randrange(6)
        if k and chosen.random() < 0.7:
            ACTIONS[name](training, which)
        x, y = (torch.randn(5, n, generator=numbers, dtype=torch.float64) for n in (3, 1))
        try:
            loss = step(x, y).item()
        except (KeyError, RuntimeError) as error:  # of the optimizer, or nothing requires grad
            return [*found, (name, type(error))]
        model, parameters = training.model, [*training.model.parameters()]
        found.append((name, loss, model.calls, int(model.norm.num_batches_tracked)))
        found.append((len(training.seen), *training.seen[-2:]))
        found.append([len(entries) for entries in training.optimizer.state.values()])
        found.append([None if p.grad is None else p.grad.sum().item() for p in parameters])
        found.append([p.detach().sum().item() for p in parameters])
    return found


def _alike(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(_alike, mine, theirs))
    if isinstance(theirs, float):
        return bool(mine == pytest.approx(theirs, rel=1e-6, abs=1e-7, nan_ok=True))
    return bool(mine == theirs)


@pytest.mark.parametrize(
    "seed", [*range(12), *[pytest.param(k, marks=pytest.mark.slow) for k in range(12, 200)]]
)
def test_as_without_jit(seed: int) -> None:
    for mine, theirs in zip(_outcome(jit, seed), _outcome(lambda f: f, seed), strict=True):
        assert _alike(mine, theirs), (mine, theirs)
