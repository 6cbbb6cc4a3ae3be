"""Un-jitted derivatives inside a vmap: done for all lanes at once, with torch.func's values, and again by JAX where that cannot be.

Which way a function went is asked of the bridge: a row says which one it must be, so that none of them is taken unseen.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import same
from torch import nn

import torchfunc_jax
from bridge import calls, eager

torch.manual_seed(0)
X, Y, W = torch.randn(5, 4), torch.randn(5, 4), torch.randn(4, 4)
LABELS = torch.tensor([0, 3, 1, 1, 2])
NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4)).requires_grad_(False)
PARAMS = dict(NET.named_parameters())
PAIR = {k: torch.stack([v, v + 1]) for k, v in PARAMS.items()}
CNN = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 4)).requires_grad_(False)
IMAGES = torch.randn(5, 1, 4, 4)


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.func.functional_call(NET, params, (x[None],)), y[None])


def cnn_loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.func.functional_call(CNN, params, (x[None],)), y[None])


def written(x: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z[1:3] += x[:2].sin()
    z.mul_(x)
    return z.sum()


def received(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * y + y.sum()
    z[0] = (x * y).sum()
    return (z * x).sum()


def filled(x: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(4)
    z[1] = x.sum()  # torch.func refuses it: a value of each lane in a tensor that all share
    z[2:] += x[:2] * x[3]
    return (z * x).sum()


def each(api: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Mapped, and in torch.func one after the other."""
    if api is torchfunc_jax:
        return api.vmap(api.grad(function))
    return lambda xs: torch.stack([api.grad(function)(x) for x in xs])


def stopped(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.norm()
    return (x * x.detach() * scale).sum()


def detached_view(x: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z.detach()[0] = 2.0
    return (z * x).sum()


def tables(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return x.pow(3).sum(), {"norm": x.norm(), "constant": torch.ones(2), "x": x}


def pulled(api: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor, c: torch.Tensor) -> Any:
        out, pull = api.vjp(lambda v: (v @ W).tanh(), x)
        return out, pull(c), pull(torch.ones(4))

    return run


def pull_outside(api: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        _, pull = api.vjp(lambda v: (v @ W).tanh() * v.sum(), x)
        return api.vmap(pull)(torch.eye(4))

    return run


# name: (build(api) -> callable, arguments, the function whose way is asked for, whether lanes take it)
ROWS: dict[str, tuple[Callable[[Any], Callable[..., Any]], tuple[Any, ...], Any, bool]] = {
    "per_sample": (lambda t: t.vmap(t.grad(loss), (None, 0, 0)), (PARAMS, X, LABELS), loss, True),
    "ensemble": (lambda t: t.vmap(t.grad(loss), (0, None, None)), (PAIR, X[0], LABELS[0]), loss, True),
    "cnn": (lambda t: t.vmap(t.grad_and_value(cnn_loss), (None, 0, 0)), (dict(CNN.named_parameters()), IMAGES, LABELS), cnn_loss, True),
    "in_place": (lambda t: t.vmap(t.grad(written)), (X,), written, True),
    "first_mapped": (lambda t: t.vmap(t.grad(received), (0, None)), (X, Y[0]), received, True),
    "second_mapped": (lambda t: t.vmap(t.grad(received), (None, 0)), (X[0], Y), received, True),
    "mapped_into_shared": (lambda t: each(t, filled), (X,), filled, True),
    "no_grad": (lambda t: t.vmap(t.grad(stopped)), (X,), stopped, True),
    "detached_view": (lambda t: t.vmap(t.grad(detached_view)), (X,), detached_view, True),
    "has_aux": (lambda t: t.vmap(t.grad(tables, has_aux=True)), (X,), tables, True),
    "argnums": (lambda t: t.vmap(t.grad(received, argnums=(0, 1)), in_dims=(1, 1)), (X[:4].T.contiguous(), Y[:4]), received, True),
    "out_dims": (lambda t: t.vmap(t.grad(stopped), out_dims=1), (X,), stopped, True),
    "unused": (lambda t: t.vmap(t.grad(lambda x, y: (y * y).sum()), (0, 0)), (X, Y), None, True),
    "vjp": (lambda t: t.vmap(pulled(t)), (X, Y), None, True),
    "pull_mapped": (pull_outside, (X[0],), None, True),
    "jacrev": (lambda t: t.jacrev(lambda x: (x @ W).tanh()), (X[0],), None, True),
    "jacrev_chunks": (lambda t: t.jacrev(lambda x: ((x @ W).tanh(), x[:3] * 2), chunk_size=3), (X[0],), None, True),
    "second": (lambda t: t.vmap(t.grad(lambda x: t.grad(stopped)(x).sum())), (X,), None, False),
    "inner_vmap": (lambda t: t.vmap(t.grad(lambda x: t.vmap(torch.sin)(x).sum())), (X,), None, False),
    "complex": (lambda t: t.vmap(t.grad(lambda x: (x * x.conj()).real.sum())), (torch.randn(3, 2, dtype=torch.complex64),), None, False),
    "jacrev_in_vmap": (lambda t: t.vmap(t.jacrev(lambda x: (x @ W).tanh())), (X,), None, False),
}


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_untapeable", set())


@pytest.mark.parametrize("name", ROWS)
def test_values_and_way(name: str) -> None:
    build, arguments, function, by_lanes = ROWS[name]
    same(build(torchfunc_jax)(*arguments), build(torch.func)(*arguments), rtol=1e-5, atol=1e-6)
    gave_up = eager._untapeable if function is None else eager._untapeable & {calls.code_of(function)}
    assert bool(gave_up) is not by_lanes


def test_random_numbers_are_the_same_the_second_way() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rand(4)).sum()

    def mapped() -> torch.Tensor:
        torch.manual_seed(3)
        return torchfunc_jax.vmap(torchfunc_jax.grad(noisy), randomness="same")(X)

    first, second = mapped(), mapped()  # the first call may start again, the second knows
    assert torch.equal(first, second)
    assert torch.equal(first, first[:1].expand(5, 4))


@pytest.mark.parametrize(
    "function",
    [lambda x: x, lambda x: (x.sum(), 1), lambda x: x.sum().item(), lambda x: x[x > 0].sum(), lambda x: x.view(3).sum()],
    ids=["no_scalar", "no_tensor", "item", "boolean_index", "shape"],
)
def test_same_class_of_error(function: Callable[..., Any]) -> None:
    with pytest.raises(Exception) as theirs:
        torch.func.vmap(torch.func.grad(function))(X)
    with pytest.raises(type(theirs.value)):
        torchfunc_jax.vmap(torchfunc_jax.grad(function))(X)
    same(torchfunc_jax.vmap(torchfunc_jax.grad(written))(X), torch.func.vmap(torch.func.grad(written))(X))


def test_scalars_that_change_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_LIMIT", 8)
    monkeypatch.setattr(eager, "_seen", {})
    for k in range(12):
        same(torchfunc_jax.vmap(lambda x, k=k: x * (k + 0.5))(X), X * (k + 0.5))
    assert 0 < len(eager._seen) <= 8
