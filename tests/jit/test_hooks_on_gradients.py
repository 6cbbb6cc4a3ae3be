"""Hooks on the gradients of tensors under ``jit``: they are called as PyTorch calls them, also
those that were registered after the program had been compiled, and what they do to Python objects
is done at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import torchfunc_jax
from torchfunc_jax import explain, jit
from torchfunc_jax.training_step import TrainingStep

X = torch.linspace(-1.0, 1.5, 15, dtype=torch.float64).reshape(5, 3)
CALLS = 5
#: What a case gets: the network, a list for what its hooks note, ``jit`` or a function that leaves
#: its argument alone, and the module that grad is taken from.
Case = Callable[[nn.Sequential, list[Any], Callable[..., Any], Any], Any]
#: A step of a case, and what is done before each call.
Made = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[int], None]]


def _training(net: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        net.zero_grad()
        loss.backward()
        return loss.detach()

    return step


def _nothing(call: int) -> None:
    """Nothing is done between the calls."""


def _with_hook(net: nn.Sequential, hook: Any, pull: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step that registers a hook on a hidden layer; pull: what it does with the loss."""

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = net[0](x)
        hidden.register_hook(hook)
        return pull(net[1:](hidden).square().mean())

    return step


def _backward(net: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    def pull(loss: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        loss.backward()
        return loss.detach()

    return pull


def parameter(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    net[0].weight.register_hook(lambda g: notes.append(g.norm().item()))
    return fast(_training(net)), _nothing


def tensors_kept(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    net[0].weight.register_hook(lambda g: notes.append(g.norm()))
    return fast(_training(net)), _nothing


def after_accumulation(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    net[0].weight.register_post_accumulate_grad_hook(lambda p: notes.append(p.grad.norm().item()))
    return fast(_training(net)), _nothing


def of_module(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    net[2].register_full_backward_hook(lambda m, gi, go: notes.append(go[0].norm().item()))
    return fast(_training(net)), _nothing


def registered_later(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    def before(call: int) -> None:
        if call == 2:
            net[0].weight.register_hook(lambda g: g * 2)
            net[2].weight.register_post_accumulate_grad_hook(lambda p: notes.append(1))

    return fast(_training(net)), before


def removed(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    handle = net[0].weight.register_hook(lambda g: notes.append(g.norm().item()))
    return fast(_training(net)), lambda call: handle.remove() if call == 3 else None


def counter(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    count = {"calls": 0}

    def hook(g: torch.Tensor) -> None:
        count["calls"] += 1

    net[0].weight.register_hook(hook)
    return fast(_training(net)), lambda call: notes.append(count["calls"])


def by_name(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    norms: dict[str, float] = {}
    for name, p in net.named_parameters():
        p.register_hook(lambda g, name=name: norms.__setitem__(name, g.norm().item()))
    return fast(_training(net)), lambda call: notes.extend(norms.values())


def optimizers_in_hooks(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()}

    def hook(p: torch.Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    return fast(step), lambda call: notes.append(net[0].weight.detach().norm())


def registered_inside(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    def hook(g: torch.Tensor) -> torch.Tensor:
        notes.append(1)
        return g * 2

    return fast(_with_hook(net, hook, _backward(net))), _nothing


def scaled_by_item(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    return fast(_with_hook(net, lambda g: g / g.norm().item(), _backward(net))), _nothing


def asked_by_grad(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    def pull(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, [net[0].weight])[0]

    return fast(_with_hook(net, lambda g: notes.append(g.norm().item()), pull)), _nothing


def pulled_back_outside(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    step = _with_hook(net, lambda g: notes.append(g.norm().item()), lambda loss: loss)
    return fast(step), lambda call: net.zero_grad()


def in_a_transform(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    step = _with_hook(net, lambda g: notes.append(1), lambda loss: loss)
    return fast(lambda x: tf.grad(step)(x).detach()), _nothing


def scaled_in_a_transform(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    step = _with_hook(net, lambda g: g / g.norm().item(), lambda loss: loss)
    return fast(lambda x: tf.grad(step)(x).detach()), _nothing


def for_one_call(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    training = _training(net)

    def step(x: torch.Tensor) -> torch.Tensor:
        handle = net[0].weight.register_hook(lambda g: notes.append(g.norm().item()))
        loss = training(x)
        handle.remove()
        return loss

    return fast(step), _nothing


def more_at_each_call(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    training = _training(net)

    def step(x: torch.Tensor) -> torch.Tensor:
        net[0].weight.register_hook(lambda g: notes.append(g.norm().item()))
        return training(x)

    return fast(step), _nothing


def of_a_training_step(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    step = TrainingStep(net, lambda net, x: net(x).square().mean(), "sgd", lr=0.1)

    def before(call: int) -> None:
        if call == 2:
            net[0].weight.register_hook(lambda g: notes.append(g.norm().item()))

    return fast(step), before


def of_all_optimizers(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    optimizer, training, handles = torch.optim.SGD(net.parameters(), lr=0.1), _training(net), []

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = training(x)
        optimizer.step()
        return loss

    def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.mul_(0.5)

    def before(call: int) -> None:
        if call == 2:
            handles.append(register_optimizer_step_post_hook(halve))
        if call == CALLS - 1:
            handles.pop().remove()

    return fast(step), before


def of_an_argument(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss = (x @ w.T).square().mean()
        loss.backward()
        return loss.detach()

    def before(call: int) -> None:
        net.zero_grad()
        if call == 2:
            net[0].weight.register_hook(lambda g: g * 2)
            net[0].weight.register_post_accumulate_grad_hook(lambda p: notes.append(p.grad.norm()))

    compiled = fast(step)
    return lambda x: compiled(net[0].weight, x), before


def of_an_argument_of_grad(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x @ w.T).square().mean(), [w])[0]

    def before(call: int) -> None:
        if call == 2:
            net[0].weight.register_hook(lambda g: g * 2)

    compiled = fast(step)
    return lambda x: compiled(net[0].weight, x), before


def of_modules_pulled_back_outside(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    def hook(module: Any, inputs: Any, outputs: Any) -> tuple[torch.Tensor]:
        notes.append(outputs[0].norm().item())
        module.seen = inputs[0].sum()
        return (inputs[0] * 2,)

    net[1].register_full_backward_hook(hook)
    net[2].register_full_backward_pre_hook(lambda m, outputs: notes.append(outputs[0].detach()))
    return fast(lambda x: net(x).square().mean()), _nothing


def grad_cam(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    hidden, gradients = [], []
    net[1].register_forward_hook(lambda m, inputs, out: hidden.append(out.detach()))
    net[1].register_full_backward_hook(lambda m, inputs, outs: gradients.append(outs[0]))

    def before(call: int) -> None:
        if gradients:
            notes.append((hidden[-1] * gradients[-1].mean(0)).sum(1))

    return fast(net), before


def of_modules_with_a_parameter(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    net[1].register_full_backward_hook(lambda m, inputs, outs: (inputs[0] + net[2].bias.sum(),))
    return fast(net), _nothing


def of_modules_that_scale(net: Any, notes: Any, fast: Any, tf: Any) -> Made:
    net[1].register_full_backward_hook(lambda m, inputs, outs: (inputs[0] * 2 + outs[0],))
    return fast(net), _nothing


CASES: dict[Case, int] = {  # how many programs there are at most
    parameter: 1,
    tensors_kept: 1,
    after_accumulation: 1,
    of_module: 1,
    registered_later: 2,
    removed: 2,
    counter: 2,
    by_name: 2,
    optimizers_in_hooks: 2,
    registered_inside: 1,
    scaled_by_item: 1,
    asked_by_grad: 1,
    pulled_back_outside: 0,
    in_a_transform: 0,
    scaled_in_a_transform: 1,
    for_one_call: 1,
    more_at_each_call: 0,
    of_a_training_step: 4,
    of_all_optimizers: 2,
    of_an_argument: 1,
    of_an_argument_of_grad: 1,
    of_modules_pulled_back_outside: 0,
    grad_cam: 0,
    of_modules_with_a_parameter: 0,
    of_modules_that_scale: 1,
}


def _run(case: Case, fast: Callable[..., Any], tf: Any) -> list[Any]:
    """The results of some calls, what was noted, and the gradients that are left."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    notes: list[Any] = []
    outs = []
    step, before = case(net, notes, fast, tf)
    for call in range(CALLS):
        before(call)
        out = step(X * (call + 1))
        outs.append(out.detach())
        if out.requires_grad:
            out.sum().backward()
    assert all(type(x) in (int, float, torch.Tensor) for x in notes)
    return [outs, notes, [p.grad for p in net.parameters() if p.grad is not None]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_hooks_are_called_as_without_jit(case: Case) -> None:
    made: list[Any] = []

    def compiled(function: Callable[..., Any]) -> Any:
        made.append(jit(function))
        return made[-1]

    found = _run(case, compiled, torchfunc_jax)
    torch.testing.assert_close(found, _run(case, lambda function: function, torch.func))
    assert len(made[0].programs()) <= CASES[case]


def test_explain_says_that_a_hook_is_why_the_function_is_called(capsys: Any) -> None:
    with explain():
        _run(pulled_back_outside, jit, torchfunc_jax)
    assert "a hook on the gradient of a tensor, or the" in capsys.readouterr().err
