"""Posteriors of torch models by the samplers of BlackJAX and NumPyro: a logistic regression, and a
Gaussian process.

    python docs/jobs/samplers.py

The log density is a torch module without arguments: its parameters are what is sampled, its data
are buffers. A sampler of JAX calls it inside loops and maps it over the chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.distributions import Bernoulli, MultivariateNormal, Normal

import bridge

# name of a parameter -> its value; of samples: with [chains, draws, ...] in front
Position = dict[str, Any]


class Logistic(nn.Module):
    """The log density of the weights of a logistic regression; inputs: [n, features], labels: [n],
    zeros and ones.
    """

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.zeros_like(inputs[0])),
            nn.Parameter(torch.zeros_like(inputs[0, 0])),
        )
        self.register_buffer("inputs", inputs)
        self.register_buffer("labels", labels)

    def forward(self) -> torch.Tensor:
        prior = Normal(0.0, 2.0).log_prob(self.weight).sum() + Normal(0.0, 2.0).log_prob(self.bias)
        logits = self.inputs @ self.weight + self.bias
        return prior + Bernoulli(logits=logits, validate_args=False).log_prob(self.labels).sum()


class GaussianProcess(nn.Module):
    """The log density of the kernel's logarithms: of the length, the scale and the noise; inputs,
    targets: [n].
    """

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        super().__init__()
        for name in ("log_length", "log_scale", "log_noise"):
            self.register_parameter(name, nn.Parameter(torch.zeros_like(inputs[0])))
        self.register_buffer("inputs", inputs)
        self.register_buffer("targets", targets)

    def forward(self) -> torch.Tensor:
        prior = (
            Normal(0.0, 1.0)
            .log_prob(torch.stack([self.log_length, self.log_scale, self.log_noise]))
            .sum()
        )
        apart = (self.inputs[:, None] - self.inputs) / self.log_length.exp()
        noise = (2 * self.log_noise).exp() + 1e-6
        kernel = (2 * self.log_scale).exp() * (-0.5 * apart**2).exp() + noise * torch.eye(
            len(self.inputs), dtype=self.inputs.dtype
        )
        factor = torch.linalg.cholesky(kernel)
        zeros = torch.zeros_like(self.targets)
        return prior + MultivariateNormal(zeros, scale_tril=factor, validate_args=False).log_prob(
            self.targets
        )


def logistic_data(count: int, dtype: torch.dtype = torch.float32, features: int = 1) -> Logistic:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, features, generator=generator, dtype=dtype)
    probability = torch.sigmoid(inputs @ torch.linspace(1.0, -1.0, features, dtype=dtype) - 0.3)
    return Logistic(inputs, torch.bernoulli(probability, generator=generator))


def process_data(count: int, dtype: torch.dtype = torch.float64) -> GaussianProcess:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.linspace(0, 3, count, dtype=dtype)
    return GaussianProcess(
        inputs, torch.sin(2 * inputs) + 0.3 * torch.randn(count, generator=generator, dtype=dtype)
    )


def log_density(module: nn.Module) -> tuple[Callable[[Position], jax.Array], Position]:
    """The module as a function of its parameters, for a sampler, and its parameters."""
    apply, params, state = bridge.function(module)
    return lambda position: apply(position, state)[0], params


def with_blackjax(
    module: nn.Module, chains: int, warmup: int, draws: int
) -> Callable[[int], Position]:
    """BlackJAX's NUTS: from a seed to samples [chains, draws, ...]. Each chain adapts its own step,
    and all of them are one program.
    """
    import blackjax

    density, start = log_density(module)

    def chain(key: jax.Array) -> Position:
        first, second = jax.random.split(key)
        (state, settings), _ = blackjax.window_adaptation(blackjax.nuts, density).run(
            first, start, num_steps=warmup
        )
        step = blackjax.nuts(density, **settings).step

        def draw(state: Any, key: jax.Array) -> Any:
            state, _ = step(key, state)
            return state, state.position

        return jax.lax.scan(draw, state, jax.random.split(second, draws))[1]

    program = jax.jit(jax.vmap(chain))

    def sample(seed: int) -> Position:
        with bridge.compiling.correctly():
            return program(jax.random.split(jax.random.key(seed), chains))

    return sample


def with_numpyro(
    module: nn.Module, chains: int, warmup: int, draws: int
) -> Callable[[int], Position]:
    """The same by NumPyro's NUTS."""
    density, start = log_density(module)
    return numpyro_nuts(lambda position: -density(position), start, chains, warmup, draws)


def numpyro_nuts(
    potential: Callable[[Position], jax.Array],
    start: Position,
    chains: int,
    warmup: int,
    draws: int,
) -> Callable[[int], Position]:
    from numpyro.infer import MCMC, NUTS

    sampler = MCMC(
        NUTS(potential_fn=potential),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    starts = jax.tree.map(lambda x: jnp.broadcast_to(x, (chains, *x.shape)), start)

    @jax.jit  # or each run is compiled anew
    def run(key: jax.Array) -> Position:
        sampler.run(key, init_params=starts)
        return sampler.get_samples(group_by_chain=True)

    def sample(seed: int) -> Position:
        with bridge.compiling.correctly():
            return run(jax.random.key(seed))

    return sample


def effective(samples: Position) -> float:
    """The smallest effective sample size of all coordinates."""
    from numpyro.diagnostics import effective_sample_size

    flat = [jnp.reshape(x, (*x.shape[:2], -1)) for x in samples.values()]
    return min(
        float(effective_sample_size(jax.device_get(x[..., k])))
        for x in flat
        for k in range(x.shape[-1])
    )


def main() -> None:
    for name, module in (
        ("logistic regression", logistic_data(200, features=3)),
        ("Gaussian process", process_data(30)),
    ):
        with jax.enable_x64(next(module.parameters()).dtype == torch.float64):
            samples = jax.device_get(with_blackjax(module, chains=4, warmup=300, draws=500)(0))
        print(f"{name}: {effective(samples):.0f} effective samples of {4 * 500}")
        for parameter, x in samples.items():
            for k, value in enumerate(x.reshape(4 * 500, -1).T):
                error = value.std() / math.sqrt(len(value))
                print(
                    f"  {parameter}[{k}] {value.mean():.3f} +- {value.std():.3f} (standard error "
                    f"at least {error:.3f})"
                )


if __name__ == "__main__":
    main()
