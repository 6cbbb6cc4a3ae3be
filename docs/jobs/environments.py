"""PPO for a torch policy in an environment that is a JAX program: many environments, many seeds,
one compiled program.

    python docs/jobs/environments.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch
from torch import nn
from torch.distributions import Categorical

import bridge


# -- the environment: a cart with a pole, in JAX ---------------------------------------------------
def reset(key: jax.Array) -> jax.Array:
    """The state [4]: place, velocity, angle, angular velocity."""
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)


def move(key: jax.Array, state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next state after pushing left (0) or right (1), and whether the pole has fallen; it then
    begins anew.
    """
    _, v, angle, spin = state
    force, mass, length = jnp.where(action == 1, 10.0, -10.0), 0.1, 0.5
    push = (force + mass * length * spin**2 * jnp.sin(angle)) / (1.0 + mass)
    turn = (9.8 * jnp.sin(angle) - jnp.cos(angle) * push) / (
        length * (4.0 / 3.0 - mass * jnp.cos(angle) ** 2 / (1.0 + mass))
    )
    slide = push - mass * length * turn * jnp.cos(angle) / (1.0 + mass)
    state = state + 0.02 * jnp.stack([v, slide, spin, turn])
    fallen = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 12 * jnp.pi / 180)
    return jnp.where(fallen, reset(key), state), fallen


# -- the policy and its loss, in torch -------------------------------------------------------------
class Policy(nn.Module):
    """Logits of the actions [n, 2] and values [n] of observations [n, 4], which BatchNorm's running
    statistics normalize.
    """

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.normalize = nn.BatchNorm1d(4, affine=False, momentum=0.01)
        self.actor = nn.Sequential(
            nn.Linear(4, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, 2),
        )
        self.critic = nn.Sequential(
            nn.Linear(4, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, 1),
        )

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normal = self.normalize(observations)
        return self.actor(normal), self.critic(normal)[:, 0]


class Batch(NamedTuple):
    """Steps that were taken, each [n] or [n, 4]."""

    observations: Any
    actions: Any
    log_probs: Any
    advantages: Any
    returns: Any


def surrogate(logits: torch.Tensor, values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """PPO's clipped objective of what a policy says of a batch;
    https://arxiv.org/abs/1707.06347.
    """
    actions = Categorical(logits=logits, validate_args=False)
    ratio = (actions.log_prob(batch.actions) - batch.log_probs).exp()
    gain = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
    clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return (
        -clipped.mean()
        + 0.5 * (values - batch.returns).square().mean()
        - 0.01 * actions.entropy().mean()
    )


def loss(policy: nn.Module, batch: Batch) -> torch.Tensor:
    return surrogate(*policy(batch.observations), batch)


# -- training, in JAX ------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Settings:
    """Of the training: environments and steps in each of them make a batch; it is divided into
    parts, and gone through several times.
    """

    updates: int = 40
    environments: int = 16
    steps: int = 128
    parts: int = 4
    epochs: int = 4
    rate: float = 2.5e-3
    discount: float = 0.99
    trace: float = 0.95  # lambda of generalized advantage estimation


class Agent(NamedTuple):
    """What training needs of a policy: each is a pure function of JAX arrays.

    Attributes:
        init: a key -> (params, state).
        act: (params, state, observations [n, 4]) -> (logits [n, 2], values [n], state), where state
            has new statistics.
        loss: (params, state, batch) -> the number to minimize.
    """

    init: Callable[..., Any]
    act: Callable[..., Any]
    loss: Callable[..., Any]


def torch_agent(module: nn.Module) -> Agent:
    """Of a torch policy: it is in training mode while it acts, so that its statistics are those of
    what it meets.
    """
    apply, params, state = bridge.function(module)

    def init(key: jax.Array) -> Any:
        keys = dict(zip(params, jax.random.split(key, len(params)), strict=True))
        bound = {name: p.shape[-1] ** -0.5 for name, p in params.items()}
        return {
            name: jax.random.uniform(keys[name], p.shape, minval=-bound[name], maxval=bound[name])
            for name, p in params.items()
        }, state

    def act(params: Any, state: Any, observations: jax.Array) -> Any:
        _, state = apply(params, state, observations, training=True)
        (logits, values), _ = apply(params, state, observations, training=False)
        return logits, values, state

    return Agent(
        init,
        act,
        lambda params, state, batch: apply(params, state, batch, method=loss, training=False)[0],
    )


def train(agent: Agent, settings: Settings, key: jax.Array) -> tuple[Any, jax.Array]:
    """One seed: the trained (params, state), and for each update how many steps a pole stood on
    average.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(settings.rate))
    lanes = jax.vmap(move)

    def step(carry: Any, key: jax.Array) -> Any:
        params, state, places = carry
        first, second = jax.random.split(key)
        logits, values, state = agent.act(params, state, places)
        actions = jax.random.categorical(first, logits)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
        after, fallen = lanes(jax.random.split(second, len(places)), places, actions)
        return (params, state, after), (places, actions, log_probs, values, fallen)

    def advantage(carry: Any, row: Any) -> Any:
        later, following = carry
        value, fallen = row
        goes_on = 1.0 - fallen
        later = (
            1.0
            + settings.discount * following * goes_on
            - value
            + settings.discount * settings.trace * goes_on * later
        )
        return (later, value), later

    def part(carry: Any, batch: Batch) -> Any:
        params, state, moments = carry
        updates, moments = optimizer.update(jax.grad(agent.loss)(params, state, batch), moments)
        return (optax.apply_updates(params, updates), state, moments), None

    def update(carry: Any, key: jax.Array) -> Any:
        params, state, moments, places = carry
        first, second = jax.random.split(key)
        (params, state, places), rows = jax.lax.scan(
            step, (params, state, places), jax.random.split(first, settings.steps)
        )
        observations, actions, log_probs, values, fallen = rows
        _, last, _ = agent.act(params, state, places)
        _, advantages = jax.lax.scan(
            advantage, (jnp.zeros_like(last), last), (values, fallen), reverse=True
        )
        flat = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]),
            Batch(observations, actions, log_probs, advantages, advantages + values),
        )

        def epoch(carry: Any, key: jax.Array) -> Any:
            order = jax.random.permutation(key, len(flat.actions))
            return jax.lax.scan(
                part,
                carry,
                jax.tree.map(lambda x: x[order].reshape(settings.parts, -1, *x.shape[1:]), flat),
            )

        (params, state, moments), _ = jax.lax.scan(
            epoch, (params, state, moments), jax.random.split(second, settings.epochs)
        )
        return (params, state, moments, places), fallen.size / jnp.maximum(fallen.sum(), 1)

    first, second, third = jax.random.split(key, 3)
    params, state = agent.init(first)
    places = jax.vmap(reset)(jax.random.split(second, settings.environments))
    carry, stood = jax.lax.scan(
        update,
        (params, state, optimizer.init(params), places),
        jax.random.split(third, settings.updates),
    )
    return carry[:2], stood


def train_seeds(agent: Agent, settings: Settings, seeds: int) -> tuple[Any, jax.Array]:
    """All seeds at once, as one program: each output has a dimension of seeds in front."""
    with bridge.compiling.correctly():
        return jax.jit(jax.vmap(lambda key: train(agent, settings, key)))(
            jax.random.split(jax.random.key(0), seeds)
        )


def main() -> None:
    _, stood = train_seeds(torch_agent(Policy()), Settings(), seeds=16)
    print(
        "steps that the pole stands, mean of 16 seeds, every 5 updates:",
        [round(float(x)) for x in stood.mean(0)[::5]],
    )


if __name__ == "__main__":
    main()
