"""Jitted functions that ask for values computed from captured tensors, such as counters: the
answers are conditions of a program, the values are not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import torchfunc_jax
from torchfunc_jax import jit


class Counting(nn.Module):
    """A layer with a counter, a flag, a number, a vector and a mask."""

    steps: torch.Tensor
    ready: torch.Tensor
    scale: torch.Tensor
    total: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("mask", torch.tensor([True, False, True]))


Step = Callable[[Any, Counting, torch.Tensor], torch.Tensor]


def _asked_before_it_counts(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    y = m.lin(x)
    if m.steps % 3 == 0:
        y = y * 2
    m.steps += 1
    return y


def _asked_after_it_counts(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps.add_(1)
    y = m.lin(x)
    return y * m.steps if m.steps % 3 == 0 else y


def _made_ready_by_the_first_batch(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    if not m.ready:
        with torch.no_grad():
            m.total[:3].copy_(x.mean(0))
            m.ready.fill_(True)
    return m.lin(x) - m.total[:3]


def _a_scale_that_grows(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    y = m.lin(x) * m.scale
    if m.scale > 3.0:
        y = y.sin()
    with torch.no_grad():
        m.scale.mul_(1.3)
    return y


def _a_quotient(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return m.lin(x) * int(m.steps // 4) + m.steps


def _any_of_a_vector(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.total.add_(torch.arange(4.0))
    return m.lin(x) * m.total.sum() if (m.total > 5).any() else m.lin(x)


def _a_warm_up(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    weight = torch.clamp(m.steps.float() / 5, max=1.0)
    return m.lin(x) * weight if weight < 1 else m.lin(x)


def _in_a_vmap(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return F.vmap(lambda row: m.lin(row) * 2 if m.steps % 2 == 0 else m.lin(row))(x)


def _in_a_gradient(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = m.lin(x).sum()
        return y.sin() * m.steps if m.steps > 3 else y

    return F.grad(loss)(x)


def _in_a_checkpoint(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    run = lambda x: m.lin(x) * 2 if m.steps > 3 else m.lin(x).sin()
    return checkpoint(run, x, use_reentrant=False)


def _beside_a_mask(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    y = m.lin(x)[:, m.mask]
    return y * 3 if m.steps > 2 else y


def _two_questions(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    if m.steps == 2:
        return m.lin(x)
    return m.lin(x) * m.steps if m.steps > 5 else m.lin(x) + m.steps


def _without_gradients(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.steps += 1
        small = m.scale * 4 > m.steps
    return m.lin(x) if small else m.lin(x) * 3


def _a_number(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return m.lin(x) * m.steps.item()


def _a_decay(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    """As in packages for averages of weights."""
    step = m.steps.item()
    m.steps += 1
    if step % 2:
        return m.lin(x)
    epoch = (m.steps - 3).clamp(min=0)
    decay = 0.0 if epoch.item() <= 0 else min(1 - (1 + epoch.item() / 2.0) ** -0.66, 0.7)
    with torch.no_grad():
        m.total[:3].lerp_(x.mean(0), 1.0 - decay)
    return m.lin(x) + m.total[:3]


def _two_numbers(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 2
    with torch.no_grad():
        m.scale.mul_(1.1)
    return m.lin(x) ** 2 / m.steps.item() - m.scale.item()


def _a_number_in_a_gradient(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return F.grad(lambda x: (m.lin(x) * m.steps.item()).sin().sum())(x)


def _a_number_in_a_vmap(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return F.vmap(lambda row: m.lin(row) * 0.9 ** m.steps.item())(x)


def _a_number_that_is_kept(F: Any, m: Counting, x: torch.Tensor) -> Any:
    m.steps += 1
    m.last = m.steps.item() + 1
    return m.lin(x), m.last, m.steps.item()


def _a_number_of_repetitions(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    for _ in range(m.steps.item()):
        x = m.lin(x)
    return x * m.steps.item()


def _a_number_of_a_sum(F: Any, m: Counting, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.total.add_(torch.arange(4.0))
    return m.lin(x) * (m.total.sum() / 3).item()


#: Each with the number of its programs for ten calls.
STEPS: dict[str, tuple[Step, int]] = {
    "before it counts": (_asked_before_it_counts, 2),
    "after it counts": (_asked_after_it_counts, 2),
    "made ready by the first batch": (_made_ready_by_the_first_batch, 2),
    "a scale that grows": (_a_scale_that_grows, 2),
    "a quotient": (_a_quotient, 3),
    "any of a vector": (_any_of_a_vector, 2),
    "a warm-up": (_a_warm_up, 2),
    "in a vmap": (_in_a_vmap, 2),
    "in a gradient": (_in_a_gradient, 2),
    "in a checkpoint": (_in_a_checkpoint, 2),
    "beside a mask": (_beside_a_mask, 2),
    "two questions": (_two_questions, 3),
    "without gradients": (_without_gradients, 2),
    "a number": (_a_number, 1),
    "a decay": (_a_decay, 4),
    "two numbers": (_two_numbers, 1),
    "a number in a gradient": (_a_number_in_a_gradient, 1),
    "a number in a vmap": (_a_number_in_a_vmap, 2),
    "a number that is kept": (_a_number_that_is_kept, 2),
    "a number of repetitions": (_a_number_of_repetitions, 1),
    "a number of a sum": (_a_number_of_a_sum, 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_programs_belong_to_answers(name: str) -> None:
    step, programs = STEPS[name]
    mine, theirs = Counting(), Counting()
    theirs.load_state_dict(mine.state_dict())
    fast = jit(lambda m, x: step(torchfunc_jax, m, x))
    for k in range(10):
        x = (k + 1) * torch.arange(6.0).reshape(2, 3).cos()
        same(fast(mine, x), step(torch.func, theirs, x), rtol=1e-5, atol=1e-5)
        same(mine.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-6)
    assert len(fast.programs()) == programs


def test_numbers_that_others_set() -> None:
    """Also of other dtypes, and those that are not finite or large."""
    scale, n = torch.tensor(1.5), torch.tensor(2)
    cells = {"scale": scale}
    fast = jit(lambda x: x * cells["scale"].item() + n.item() // 2)
    for k, value in enumerate([1.5, 2.0, 2.5, -0.0, float("inf"), float("nan"), 1e30]):
        scale.fill_(value), n.fill_(3 * k)
        x = torch.tensor([1.0, -2.0])
        same(fast(x), x * scale.item() + n.item() // 2)
    assert len(fast.programs()) == 1
    for value in (3.25, 4.0):
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            cells["scale"] = torch.tensor(value, dtype=torch.float64).to(dtype)
            same(fast(x), x * cells["scale"].item() + n.item() // 2)
    cells["scale"] = torch.tensor([1.0, 2.0])
    with pytest.raises(RuntimeError, match="2 elements cannot be converted to Scalar"):
        fast(x)


def test_a_question_before_a_comparison_of_numbers() -> None:
    n = torch.tensor(3)
    fast = jit(lambda x, k: (1 if n > 1 else 0) + (x * 2 if k > 3 else x))
    found = [fast(torch.ones(()), k).item() for k in (0, 1, 2, 4, 5, 1)]
    assert found == [2.0, 2.0, 2.0, 3.0, 3.0, 2.0] and len(fast.programs()) == 3


def test_a_counter_that_others_set() -> None:
    m, fast = Counting(), jit(_asked_before_it_counts)
    for steps in (0, 1, 3, 3000, 2, 6):
        m.steps.fill_(steps)
        expected = m.lin(torch.ones(2, 3)) * (2 if steps % 3 == 0 else 1)
        same(fast(None, m, torch.ones(2, 3)), expected, rtol=1e-5, atol=1e-6)
        assert m.steps == steps + 1
    assert len(fast.programs()) == 2
    m.register_buffer("steps", torch.tensor(2.0))  # of another dtype
    same(fast(None, m, torch.ones(2, 3)), m.lin(torch.ones(2, 3)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name, programs", [("RAdam", 3), ("ASGD", 2), ("Adamax", 2), ("NAdam", 2)])
def test_optimizers_that_take_the_number_of_the_step(name: str, programs: int) -> None:
    """RAdam compares a number of it, too."""

    def trained(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        optimizer = getattr(torch.optim, name)(model.parameters(), 1e-2, weight_decay=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        losses = [run(torch.randn(5, 4).double()) for _ in range(9)]
        return losses, model.state_dict(), optimizer.state_dict()["state"], run

    *mine, fast = trained(jit)
    *theirs, _ = trained(lambda f: f)
    same(mine, theirs, rtol=1e-6, atol=1e-7)
    assert len(fast.programs()) == programs


def test_averages_of_weights_in_a_jitted_step() -> None:
    """AveragedModel asks for each parameter whether it is the first one."""

    def trained(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        averages = (
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
            AveragedModel(model),
        )

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            for average in averages:
                average.update_parameters(model)
            return loss.detach()

        run = wrap(step)
        losses = [run(torch.randn(5, 4)) for _ in range(8)]
        return losses, [copy.deepcopy(a.state_dict()) for a in averages], run

    *mine, fast = trained(jit)
    *theirs, _ = trained(lambda f: f)
    same(mine, theirs, rtol=1e-4, atol=1e-5)
    assert len(fast.programs()) == 2
    assert any("what Python asked of the values of" in p.why for p in fast.programs())
