"""The optimizers of PyTorch as functions, torch.optim.functional from torch 2.15 on: a step under
jit, on lanes, and differentiated. The truth is the step that PyTorch makes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import floats, same

from bridge.errors import DataDependentError
from torchfunc_jax import grad, jit, vmap

_PLAIN = {"lr": 0.1, "weight_decay": 0.1, "maximize": False, "foreach": False}
_BETAS = _PLAIN | {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
#: By the name of an optimizer: how it is called with lists of parameters, gradients, two moments,
#: numbers of steps, and two numbers of its own.
STEPS: dict[str, Callable[..., Any]] = {
    "sgd": lambda f, p, g, m, v, n, a, b: f(
        p, g, m, momentum=0.9, dampening=0.0, nesterov=True, **_PLAIN
    ),
    "adam": lambda f, p, g, m, v, n, a, b: f(p, g, m, v, [], n, amsgrad=False, **_BETAS),
    "adamw": lambda f, p, g, m, v, n, a, b: f(p, g, m, v, [], n, amsgrad=False, **_BETAS),
    "adadelta": lambda f, p, g, m, v, n, a, b: f(p, g, m, v, n, rho=0.9, eps=1e-6, **_PLAIN),
    "adagrad": lambda f, p, g, m, v, n, a, b: f(p, g, m, n, lr_decay=0.1, eps=1e-6, **_PLAIN),
    "adamax": lambda f, p, g, m, v, n, a, b: f(p, g, m, v, n, **_BETAS),
    "asgd": lambda f, p, g, m, v, n, a, b, **own: f(
        p, g, m, a, b, n, lambd=1e-4, t0=2.0, alpha=0.75, **_PLAIN, **own
    ),
    "nadam": lambda f, p, g, m, v, n, a, b: f(p, g, m, v, a, n, momentum_decay=0.004, **_BETAS),
    "radam": lambda f, p, g, m, v, n, a, b, **own: f(p, g, m, v, n, **_BETAS, **own),
    "rmsprop": lambda f, p, g, m, v, n, a, b: f(
        p, g, m, [], v, n, alpha=0.9, eps=1e-6, momentum=0.9, centered=False, **_PLAIN
    ),
    "rprop": lambda f, p, g, m, v, n, a, b: f(
        p,
        g,
        m,
        v,
        n,
        step_size_min=1e-6,
        step_size_max=50.0,
        etaminus=0.5,
        etaplus=1.2,
        maximize=False,
        foreach=False,
    ),
}
#: They ask for the number of a step unless capturable=True says that it stays a tensor.
CAPTURABLE = ("asgd", "radam")


def function(name: str) -> Callable[..., Any]:
    """The function of torch.optim.functional, or of the file in which older versions have it."""
    home = getattr(torch.optim, "functional", None)
    return getattr(home or importlib.import_module(f"torch.optim.{name}"), name)


def step_of(name: str, **own: Any) -> Callable[..., Any]:
    """A step as a pure function of a parameter, its gradient, and the optimizer's state."""

    def step(p: Any, g: Any, state: Any) -> Any:
        new = [p.clone(), *[s.clone() for s in state]]
        STEPS[name](function(name), [new[0]], [g], *[[s] for s in new[1:]], **own)
        return new

    return step


def arguments() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    p, numbers = floats(3, 4), [torch.tensor(3.0), torch.tensor(0.9), torch.tensor(0.8)]
    return p, p.sin(), [p.cos() * 0.2, p.square() * 0.3, *numbers]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_under_jit_and_on_lanes(name: str) -> None:
    p, g, state = arguments()
    compiled = step_of(name, **({"capturable": True} if name in CAPTURABLE else {}))
    expected = step_of(name)(p, g, state)
    same(jit(compiled)(p, g, state), expected)
    lanes = [(p * k, g * k, state) for k in (1.0, 0.5)]
    rows = [step_of(name)(*lane) for lane in lanes]
    stacked = jit(vmap(compiled, (0, 0, None)))(
        torch.stack([p * k for k in (1.0, 0.5)]), torch.stack([g * k for k in (1.0, 0.5)]), state
    )
    same(stacked, [torch.stack(each) for each in zip(*rows, strict=True)])


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_gradient_of_a_step(name: str) -> None:
    p, g, state = arguments()

    def loss(g: Any) -> Any:
        return step_of(name)(p, g, state)[0].square().sum()

    expected = torch.func.grad(loss)(g)
    same(grad(loss)(g), expected)
    same(jit(grad(loss))(g), expected)


@pytest.mark.parametrize("name", CAPTURABLE)
def test_an_optimizer_that_asks_for_a_number_says_how_it_need_not(name: str) -> None:
    with pytest.raises(DataDependentError, match="under jit") as raised:
        jit(step_of(name))(*arguments())
    assert "With capturable=True" in "".join(raised.value.__notes__)
