"""Torch functions in JAX's solvers: a vector field in diffrax, residuals in optimistix, an
objective in Optax's L-BFGS.

    python docs/jobs/solvers.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from torch import nn

import bridge


class Field(nn.Module):
    """dy/dt of a point y: [size], at the time t."""

    def __init__(self, size: int = 2, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, size))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers(y**3)


def solution(
    apply: Any, params: Any, state: Any, start: jax.Array, times: jax.Array, tolerance: float = 1e-6
) -> jax.Array:
    """y [times, size] at these times, with steps of its own for each start: jax.vmap and jax.grad
    go through the solver.
    """
    import diffrax

    found = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, params: apply(params, state, t, y)[0]),
        diffrax.Tsit5(),
        times[0],
        times[-1],
        None,
        start,
        params,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
    )
    return found.ys


def fit(
    module: nn.Module,
    starts: jax.Array,
    times: jax.Array,
    wanted: jax.Array,
    steps: int,
    rate: float = 1e-2,
) -> tuple[Any, jax.Array]:
    """Parameters of a field whose solutions go through wanted [starts, times, size], and the loss
    of each step.
    """
    apply, params, state = bridge.function(module)
    optimizer = optax.adam(rate)

    def loss(params: Any) -> jax.Array:
        found = jax.vmap(lambda start: solution(apply, params, state, start, times))(starts)
        return ((found - wanted) ** 2).mean()

    def step(carry: Any, _: None) -> Any:
        params, moments = carry
        value, gradient = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), value

    with bridge.compiling.correctly():
        (params, _), losses = jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps))(
            (params, optimizer.init(params))
        )
    return params, losses


class Decay(nn.Module):
    """The residuals [n] of a sum of exponentials beside what was measured at these times."""

    def __init__(self, times: torch.Tensor, measured: torch.Tensor) -> None:
        super().__init__()
        self.amplitudes, self.log_rates = (
            nn.Parameter(times.new_tensor([1.0, 1.0])),
            nn.Parameter(times.new_tensor([0.0, 1.0])),
        )
        self.register_buffer("times", times)
        self.register_buffer("measured", measured)

    def forward(self) -> torch.Tensor:
        return (self.amplitudes * torch.exp(-self.log_rates.exp() * self.times[:, None])).sum(
            1
        ) - self.measured


def least_squares(module: nn.Module) -> Any:
    """The parameters at which the residuals' squares are least, by optimistix's
    Levenberg-Marquardt.
    """
    import optimistix

    apply, params, state = bridge.function(module)
    solver = optimistix.LevenbergMarquardt(rtol=1e-8, atol=1e-8)
    with bridge.compiling.correctly():
        return optimistix.least_squares(
            lambda params, _: apply(params, state)[0], solver, params
        ).value


def with_lbfgs(module: nn.Module, steps: int = 100) -> Any:
    """The same by Optax's L-BFGS, whose line search calls the torch function inside of its loop."""
    apply, params, state = bridge.function(module)
    optimizer = optax.lbfgs()

    def objective(params: Any) -> jax.Array:
        return (apply(params, state)[0] ** 2).sum()

    both = optax.value_and_grad_from_state(objective)

    def step(carry: Any, _: None) -> Any:
        params, memory = carry
        value, gradient = both(params, state=memory)
        updates, memory = optimizer.update(
            gradient, memory, params, value=value, grad=gradient, value_fn=objective
        )
        return (optax.apply_updates(params, updates), memory), value

    with bridge.compiling.correctly():
        (params, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps))(
            (params, optimizer.init(params))
        )
    return params


class Cubic(nn.Module):
    """The field A y^3, a spiral, which ``Field`` has to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[-0.1, -2.0], [2.0, -0.1]]))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.matrix @ y**3


def spirals(count: int, points: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Starts [count, 2], times [points], and solutions of ``Cubic`` [count, points, 2]."""
    apply, params, state = bridge.function(Cubic())
    starts = jnp.stack([jnp.linspace(0.5, 2.0, count), jnp.linspace(0.0, 0.5, count)], 1)
    times = jnp.linspace(0.0, 1.0, points)
    with bridge.compiling.correctly():
        return (
            starts,
            times,
            jax.jit(jax.vmap(lambda start: solution(apply, params, state, start, times)))(starts),
        )


def decays(count: int) -> Decay:
    """Measurements of 2 exp(-t/2) + 0.5 exp(-4t)."""
    times = torch.linspace(0, 4, count, dtype=torch.float64)
    return Decay(times, 2 * torch.exp(-0.5 * times) + 0.5 * torch.exp(-4 * times))


def main() -> None:
    torch.manual_seed(0)
    starts, times, wanted = spirals(16, 20)
    _, losses = fit(Field(), starts, times, wanted, steps=200)
    print(f"a field fitted to 16 solutions: loss {losses[0]:.4f} -> {losses[-1]:.6f}")
    with jax.enable_x64(True):
        for name, solve in (("optimistix", least_squares), ("Optax's L-BFGS", with_lbfgs)):
            found = solve(decays(50))
            print(f"{name}: amplitudes {found['amplitudes']}, rates {jnp.exp(found['log_rates'])}")


if __name__ == "__main__":
    main()
