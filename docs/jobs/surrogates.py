"""A torch network as the unknown term of a differentiable JAX simulation, and both of them exported
with their derivative as StableHLO.

    python docs/jobs/surrogates.py

The simulation is du/dt = d u'' + r(u) on a ring, in JAX. The reaction r is a torch network, which
is trained through the simulation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from jax import export
from torch import nn

import bridge


class Reaction(nn.Module):
    """r(u) at each place; u: [..., places]."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, 1),
        )

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return self.layers(u[..., None])[..., 0]


def simulate(
    reaction: Callable[[jax.Array], jax.Array], start: jax.Array, diffusion: jax.Array, steps: int
) -> jax.Array:
    """u [places] after steps of 0.02, by the midpoint rule."""

    def rate(u: jax.Array) -> jax.Array:
        return diffusion * (jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1)) + reaction(u)

    def step(u: jax.Array, _: None) -> Any:
        return u + 0.02 * rate(u + 0.01 * rate(u)), None

    return jax.lax.scan(step, start, length=steps)[0]


def by_formula(u: jax.Array) -> jax.Array:
    """What the network has to learn: a population that grows up to 1."""
    return 2 * u * (1 - u)


def starts(count: int, places: int) -> jax.Array:
    keys = jax.random.split(jax.random.key(0), count)
    waves = jnp.arange(places) * 2 * jnp.pi / places
    return jax.vmap(
        lambda key: (
            0.5
            + 0.4 * jnp.sin(waves * jax.random.randint(key, (), 1, 4) + 6 * jax.random.uniform(key))
        )
    )(keys)


def fit(
    module: nn.Module, data: jax.Array, updates: int, steps: int, diffusion: float = 0.1
) -> tuple[Any, jax.Array]:
    """Parameters with which simulations from data [count, places] end where those by formula end,
    and the loss of each update.
    """
    apply, params, state = bridge.function(module)
    optimizer = optax.adam(1e-2)

    def loss(params: Any, ends: jax.Array) -> jax.Array:
        run = lambda start: simulate(lambda u: apply(params, state, u)[0], start, diffusion, steps)
        return ((jax.vmap(run)(data) - ends) ** 2).mean()

    def train(params: Any) -> Any:
        ends = jax.vmap(lambda start: simulate(by_formula, start, diffusion, steps))(data)

        def update(carry: Any, _: None) -> Any:
            params, moments = carry
            value, gradient = jax.value_and_grad(loss)(params, ends)
            updates, moments = optimizer.update(gradient, moments)
            return (optax.apply_updates(params, updates), moments), value

        (params, _), losses = jax.lax.scan(update, (params, optimizer.init(params)), length=updates)
        return params, losses

    with bridge.compiling.correctly():
        return jax.jit(train)(params)


def save(module: nn.Module, path: Path, places: int, steps: int) -> None:
    """``end(params, start, diffusion)`` of the simulation with the network, with its derivative, as
    StableHLO.
    """
    apply, params, state = bridge.function(module)

    def end(params: Any, start: jax.Array, diffusion: jax.Array) -> jax.Array:
        return simulate(lambda u: apply(params, state, u)[0], start, diffusion, steps)

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, jnp.zeros(places), jnp.zeros(()))
    )
    with bridge.compiling.correctly():
        path.write_bytes(export.export(jax.jit(end))(*shapes).serialize(vjp_order=1))


def load(path: Path) -> Callable[..., jax.Array]:
    """What ``save`` has saved: this needs neither torch nor this project, and ``jax.grad`` goes
    through it.
    """
    return export.deserialize(bytearray(path.read_bytes())).call


def main() -> None:
    torch.manual_seed(0)
    module = Reaction()
    params, losses = fit(module, starts(8, 32), updates=1000, steps=50)
    bridge.load(module, params)
    print(f"loss {losses[0]:.1e} -> {losses[-1]:.1e}")
    for u in (0.1, 0.4, 0.7, 1.0):
        print(f"r({u}): learned {module(torch.tensor([u])).item():.3f}, true {by_formula(u):.3f}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "simulation.stablehlo")
        save(module, path, places=32, steps=50)
        start = starts(1, 32)[0]
        slope = jax.grad(lambda diffusion: load(path)(params, start, diffusion).std())(0.1)
        print(
            f"{path.stat().st_size / 1e3:.0f} kB; a pattern's contrast changes by {slope:.4f} per "
            "unit of diffusion"
        )


if __name__ == "__main__":
    main()
