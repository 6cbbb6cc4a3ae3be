"""torch.compiler.is_compiling() is true while a jitted function is traced, for that thread, and
otherwise as PyTorch has it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from agreement import same
from torch import nn
from torch.compiler import is_compiling

from torchfunc_jax import grad, jit, vmap

WAYS: dict[str, tuple[bool, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "jit": (True, jit),
    "jit of vmap": (True, lambda f: jit(vmap(f))),
    "jit of grad": (True, lambda f: jit(grad(lambda x: f(x).sum()))),
    "jit inside jit": (True, lambda f: jit(lambda x: jit(f)(x))),
    "vmap": (False, vmap),
    "grad": (False, grad),
    "jit inside grad": (False, lambda f: grad(lambda x: jit(f)(x).sum())),
    "itself": (False, lambda f: f),
}


@pytest.mark.parametrize("way", WAYS)
def test_where_it_is_true(way: str) -> None:
    expected, make = WAYS[way]
    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.extend([is_compiling(), torch.compiler.is_compiling()])
        assert not torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
        return x.sin().sum()

    make(f)(torch.ones(3))
    assert set(seen) == {expected}
    assert not is_compiling()


def test_an_error_ends_it() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise LookupError(is_compiling())

    with pytest.raises(LookupError, match="True"):
        jit(fails)(torch.ones(3))
    assert not is_compiling()


def test_other_threads_do_not_see_it() -> None:
    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=lambda: seen.append(is_compiling()))
        other.start()
        other.join()
        return x.sin()

    same(jit(f)(torch.ones(3)), torch.ones(3).sin())
    assert seen == [False]


def test_a_library_takes_its_branch_without_values() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        if not is_compiling() and bool((x < 0).any()):
            raise ValueError("negative")
        return x.sqrt()

    x = torch.ones(3)
    same(jit(checked)(x), x)
    same(jit(grad(lambda a: checked(a).sum()))(x), x / 2)


# -- gradients by what requires grad only where nothing is traced ----------------------------------
POSITIONS = torch.tensor(
    [[0.0, 0.1, 0.2], [1.1, 0.0, -0.3], [0.2, 1.2, 0.4], [-0.9, 0.3, 1.0]], dtype=torch.float64
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Frame:
    positions: torch.Tensor


def _watched(t: torch.Tensor) -> torch.Tensor:
    """The tensor, which requires grad except in torch.compile's traces, and so in ours: as
    published force fields do it.
    """
    return t if is_compiling() else t.requires_grad_(True)


def _energy(positions: torch.Tensor) -> torch.Tensor:
    distances = (
        positions[:, None]
        - positions[None]
        + torch.eye(len(positions), dtype=positions.dtype)[..., None]
    ).norm(dim=-1)
    return (distances**-2 - distances**-1).sum()


def _guarded(positions: torch.Tensor) -> Any:
    _watched(positions)
    energy = _energy(positions)
    return energy, -torch.autograd.grad(energy, positions)[0]


def _strained(positions: torch.Tensor) -> Any:
    """Forces and stress, by a displacement that is made inside."""
    _watched(positions)
    displacement = _watched(torch.zeros(3, 3, dtype=positions.dtype))
    strain = 0.5 * (displacement + displacement.T)
    energy = _energy(positions + positions @ strain)
    return torch.autograd.grad(energy, [positions, displacement])


def _unused(positions: torch.Tensor) -> Any:
    _watched(positions)
    other = _watched(torch.ones(2, dtype=positions.dtype))
    found = torch.autograd.grad(_energy(positions), [positions, other], allow_unused=True)
    return found[0], found[1] is None


def _copied(positions: torch.Tensor) -> Any:
    copy = _watched(positions.detach().clone())
    return torch.autograd.grad(_energy(copy), copy)


def _detached(positions: torch.Tensor) -> Any:
    leaf = _watched(positions.detach())
    return torch.autograd.grad(_energy(leaf), leaf)


def _again(positions: torch.Tensor) -> Any:
    _watched(positions)
    force = torch.autograd.grad(_energy(positions), positions, create_graph=True)[0]
    return torch.autograd.grad(force.square().sum(), positions)


def _rows(positions: torch.Tensor) -> Any:
    _watched(positions)
    out = torch.stack([_energy(positions), positions.sin().sum()])
    return torch.autograd.grad(out, positions, torch.eye(2, dtype=out.dtype), is_grads_batched=True)


def _later(positions: torch.Tensor) -> Any:
    """A second leaf, by which gradients are asked for after the first ones."""
    _watched(positions)
    first = torch.autograd.grad(_energy(positions), positions)[0]
    moved = _watched((positions + 0.1 * first).detach())
    return first, torch.autograd.grad(_energy(moved), moved)[0]


def _backward(positions: torch.Tensor) -> Any:
    leaf = _watched(positions.detach().clone())
    _energy(leaf).backward(inputs=[leaf])
    return leaf.grad


ASKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "forces": _guarded,
    "and stress": _strained,
    "allow_unused": _unused,
    "a copy": _copied,
    "detached": _detached,
    "second derivatives": _again,
    "is_grads_batched": _rows,
    "one after the other": _later,
    "backward(inputs=)": _backward,
}


@pytest.mark.parametrize(
    "way", ["jit", "jit of vmap", "in a dict", "in a dataclass", "jit inside jit"]
)
@pytest.mark.parametrize("name", ASKS)
def test_what_gradients_are_asked_for_by_can_be_differentiated(name: str, way: str) -> None:
    ask = ASKS[name]
    expected = ask(POSITIONS.clone())
    x = POSITIONS.clone()
    if way == "jit of vmap":
        if name == "backward(inputs=)":
            pytest.skip("torch.func refuses backward() inside of vmap")
        found = jit(vmap(lambda x: [t for t in _flat(ask(x)) if isinstance(t, torch.Tensor)]))(
            torch.stack([x, x])
        )
        same(
            [t[1] for t in found],
            [t for t in _flat(expected) if isinstance(t, torch.Tensor)],
            graph=False,
        )
    elif way == "in a dict":
        same(jit(lambda d: ask(d["a"][0]))({"a": [x]}), expected, graph=False)
    elif way == "in a dataclass":
        same(jit(lambda frame: ask(frame.positions))(Frame(x)), expected, graph=False)
    else:
        jitted = jit(ask) if way == "jit" else jit(lambda x: jit(ask)(x))
        for _ in range(2):
            same(jitted(x), expected, graph=False)
        same(jitted(x * 1.5), ask(POSITIONS * 1.5), graph=False)
    assert not x.requires_grad and x.grad is None


def _flat(x: Any) -> list[Any]:
    return [*x] if isinstance(x, tuple | list) else [x]


def test_transforms_of_forces() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(_energy(x), x, create_graph=True)[0].square().sum()

    x = POSITIONS.clone().requires_grad_()
    expected = torch.autograd.grad(norm(x), x)[0]
    same(jit(grad(norm))(POSITIONS), expected)
    same(jit(vmap(grad(norm)))(torch.stack([POSITIONS, POSITIONS]))[1], expected)


def test_what_is_neither_an_argument_nor_made_inside_is_refused() -> None:
    captured = POSITIONS.clone()
    with pytest.raises(RuntimeError, match="does not require grad"):
        jit(lambda x: torch.autograd.grad(_energy(captured), captured))(torch.ones(1))
    with pytest.raises(RuntimeError, match="does not require grad"):
        jit(lambda x: torch.autograd.grad(x.sum(), x))(torch.arange(3))
    with pytest.raises(RuntimeError, match="to not have been used"):
        jit(lambda x: torch.autograd.grad(x.sin().sum(), [x, torch.ones(2)]))(torch.ones(3))


class ForceField(nn.Module):
    """Continuous filters over all pairs, as in SchNet; traced: whether it asks for requires_grad in
    traces too.
    """

    def __init__(self, traced: bool) -> None:
        super().__init__()
        self.traced, self.embedding = traced, nn.Embedding(4, 8)
        self.filters = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 8))
        self.update, self.readout = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("centers", torch.linspace(0, 3, 6))

    def forward(self, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        positions, kinds = data["positions"], data["kinds"]
        if self.traced or not torch.compiler.is_compiling():
            positions.requires_grad_(True)
        distances = (
            positions[:, None]
            - positions[None]
            + torch.eye(len(kinds), dtype=positions.dtype)[..., None]
        ).norm(dim=-1)
        filters = self.filters(torch.exp(-((distances[..., None] - self.centers) ** 2)))
        features = self.embedding(kinds)
        for _ in range(2):
            features = features + torch.tanh(self.update((features[None] * filters).sum(1)))
        energy = self.readout(features).sum()
        forces = -torch.autograd.grad(energy, positions, create_graph=self.training)[0]
        return {"energy": energy, "forces": forces}


@pytest.mark.parametrize("traced", [False, True], ids=["guarded", "not guarded"])
def test_a_force_field_is_trained_as_in_pytorch(traced: bool) -> None:
    def steps(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model = ForceField(traced).double()
        optimizer, run, losses = torch.optim.SGD(model.parameters(), 0.05), wrap(model), []
        for k in range(3):
            found = run(
                {"positions": POSITIONS * (1 + 0.1 * k), "kinds": torch.tensor([0, 1, 2, 1])}
            )
            loss = found["energy"].square() + (found["forces"] - 0.1).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, [p.detach() for p in model.parameters()]

    same(steps(jit), steps(lambda model: model))
