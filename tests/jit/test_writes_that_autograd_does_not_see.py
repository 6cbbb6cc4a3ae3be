"""What a jitted function writes to parameters and buffers where torch's autograd does not look: by
.data, by detach(), under no_grad; and states that it both asks for and changes. Beside PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from torchfunc_jax import jit

Write = Callable[[torch.Tensor, torch.Tensor], Any]


def _without_grad(p: torch.Tensor, x: torch.Tensor) -> None:
    with torch.no_grad():
        p.mul_(x)


def _detached_without_grad(p: torch.Tensor, x: torch.Tensor) -> None:
    with torch.no_grad():
        p.detach().mul_(x)


def _two_ways(p: torch.Tensor, x: torch.Tensor) -> None:
    p.data.add_(1)
    _without_grad(p, x)
    p.detach()[1:].zero_()


#: How a function writes to a parameter.
WRITES: dict[str, Write] = {
    "data": lambda p, x: p.data.mul_(x),
    "a view of data": lambda p, x: p.data[1:].mul_(2),
    "data of a view": lambda p, x: p[:1].data.add_(1),
    "data set": lambda p, x: setattr(p, "data", p.data * x),
    "detach": lambda p, x: p.detach().copy_(x),
    "a view of detach": lambda p, x: p.detach().view(1, 2)[0, 1:].fill_(3.0),
    "foreach": lambda p, x: torch._foreach_lerp_([p.detach()], [x], 0.5),
    "clamp": lambda p, x: p.data.clamp_(0.5, 1.5),
    "no_grad": _without_grad,
    "detach under no_grad": _detached_without_grad,
    "two ways": _two_ways,
}


def _after(write: Write) -> Callable[..., torch.Tensor]:
    def f(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        write(p, x)
        return (p * x).sum()

    return f


def _before(write: Write) -> Callable[..., torch.Tensor]:
    def f(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = (p + x).sum()
        write(p, x)
        return y

    return f


def _not_used(write: Write) -> Callable[..., torch.Tensor]:
    def f(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        write(p, x)
        return x * 2

    return f


USES = {"after": _after, "before": _before, "not at all": _not_used}


@pytest.mark.parametrize("argument", [False, True], ids=["captured", "argument"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_leaves_the_parameter_a_leaf_with_its_gradient(
    write: str, use: str, argument: bool
) -> None:
    if argument and write == "data set":
        pytest.skip("jit refuses to give an argument other memory")
    f = USES[use](WRITES[write])
    mine, theirs = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
    jitted = jit(f) if argument else jit(lambda x: f(mine, x))
    for k in range(3):
        x = torch.tensor([0.5, 2.0]) + k
        out, expected = jitted(mine, x) if argument else jitted(x), f(theirs, x)
        torch.testing.assert_close(out, expected)
        assert out.requires_grad == expected.requires_grad
        torch.testing.assert_close(mine.data, theirs.data)
        assert mine.is_leaf
        if out.requires_grad:
            out.backward()
            expected.backward()
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_target_network_follows_inside_of_a_step() -> None:
    """As published agents do it: the target's parameters require grad and are written by .data."""

    def step(net: nn.Module, target: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = (net(x) - target(x).detach()).pow(2).mean()
        for p, q in zip(net.parameters(), target.parameters(), strict=True):
            q.data.copy_(0.1 * p.data + 0.9 * q.data)
        return loss

    torch.manual_seed(0)
    net, target = nn.Linear(3, 2), nn.Linear(3, 2)
    net2, target2 = copy.deepcopy((net, target))
    jitted = jit(step)
    for k in range(3):
        x = torch.randn(4, 3)
        for n in (net, net2):
            n.zero_grad()
        jitted(net, target, x).backward()
        step(net2, target2, x).backward()
        for p, q in zip(
            [*net.parameters(), *target.parameters()],
            [*net2.parameters(), *target2.parameters()],
            strict=True,
        ):
            torch.testing.assert_close(p, q, msg=str(k))
            torch.testing.assert_close(p.grad, q.grad)


# -- states whose values the function asks for and changes -----------------------------------------
class _Initialized(nn.Module):
    """A layer that takes its bias from its first batch, as ActNorm does."""

    initialized: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initialized", torch.tensor(0))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.initialized == 0:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
            self.initialized.fill_(1)
        return x + self.bias


class _Averaged(nn.Module):
    """A layer with an average of its weights, which it uses."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(2))
            self.layer.bias.zero_()
        self.average = swa_utils.AveragedModel(self.layer, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.data.mul_(0.5)
        self.average.update_parameters(self.layer)
        return self.average(x)


class _Returned(nn.Module):
    """A layer that returns the state that it asks for."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.count < 2:
            self.count.add_(1)
            x = x * 3
        return x * 2, self.count


#: What makes a module; how many programs six calls need.
STATES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "initialized by the first batch": (_Initialized, 2),
    "an average": (_Averaged, 2),
    "an exponential average": (
        lambda: _Averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        2,
    ),
    "an average with buffers": (lambda: _Averaged(use_buffers=True), 2),
    "a count that is returned": (_Returned, 2),
    "BatchNorm without a momentum": (lambda: nn.BatchNorm1d(2, momentum=None), 1),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_asked_for_and_changed(name: str) -> None:
    make, programs = STATES[name]
    mine, theirs = make(), make()
    jitted = jit(mine)
    for k in range(8):
        x = torch.tensor([[1.0, 2.0], [3.0, 5.0]]) * (k + 1)
        torch.testing.assert_close(jitted(x), theirs(x))
        torch.testing.assert_close([*mine.buffers()], [*theirs.buffers()])
        torch.testing.assert_close([*mine.parameters()], [*theirs.parameters()])
    assert len(jitted.programs()) == programs
