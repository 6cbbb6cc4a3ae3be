"""Records of un-jitted code (bridge/record), an engine that is switched off until it can replace the one in bridge/eager.py."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import same
from torch import nn

import torchfunc_jax
from torchfunc_jax import _recording

X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[list[str]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_recording, "_on", True)
    monkeypatch.setattr(_recording, "_why", reasons := [])
    yield reasons
    assert not reasons, f"not recorded: {reasons}"


def _layer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    return layer, {k: v.detach() for k, v in layer.named_parameters()}


def _inner_step(T: Any, x: torch.Tensor, lr: float) -> Any:
    layer, params = _layer()

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (T.functional_call(layer, p, (x,)) - x.sum(-1, keepdim=True)).pow(2).mean()

    def adapted(p: Any, x: torch.Tensor) -> torch.Tensor:
        grads = T.grad(loss)(p, x)
        return loss({k: p[k] - lr * grads[k] for k in p}, x)

    return T.grad(lambda p: T.vmap(adapted, (None, 0))(p, x[:, None]).mean())(params)


PROGRAMS: dict[str, Callable[[Any, torch.Tensor, float], Any]] = {
    "vmap of grad": lambda T, x, s: T.vmap(T.grad(lambda r: (r.sin() * s).sum()))(x),
    "jvp of grad": lambda T, x, s: T.jvp(T.grad(lambda t: (t.exp() * t * s).sum()), (x,), (x * s,)),
    "hessian": lambda T, x, s: T.hessian(lambda t: (t.tanh() * s).prod())(x[0]),
    "jacrev": lambda T, x, s: T.jacrev(lambda t: t.cos() @ t * s)(x[:3]),
    "a step of an inner optimizer": _inner_step,
    "a value that Python asks for": lambda T, x, s: T.grad(lambda t: (t * 2).sum() if t.sum() > s else (t * s).sum())(x),
    "in place": lambda T, x, s: T.vmap(lambda r: r.clone().mul_(s).add_(r[0]))(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_shapes_that_change(name: str) -> None:
    for x, s in ((X, 0.5), (X, 0.25), (X[:3], 0.25), (X + 1, -2.0), (X, 0.5)):
        same(PROGRAMS[name](torchfunc_jax, x, s), PROGRAMS[name](torch.func, x, s), rtol=1e-4, atol=1e-5)


def test_the_function_runs_once_at_each_call_and_in_order() -> None:
    seen: list[str] = []

    def f(t: torch.Tensor) -> torch.Tensor:
        seen.append("f")
        return t.sin().sum()

    for _ in range(3):
        seen.append("before")
        torchfunc_jax.grad(f)(X)
    assert seen == ["before", "f"] * 3
