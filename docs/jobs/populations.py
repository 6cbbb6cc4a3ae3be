"""Many adapters on one frozen model: 32 LoRA adapters of Hugging Face's peft, trained at once, with
the base in memory once.

    python docs/jobs/populations.py

Adapters are lanes of a vmap. The base is an argument that is neither mapped nor differentiated, so
that there is one copy of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from torch import nn

import bridge


class Base(nn.Module):
    """A classifier of inputs [n, features], to be adapted."""

    def __init__(self, features: int = 64, hidden: int = 512, classes: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(features, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, classes),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(inputs)))))


def adapters(base: nn.Module, count: int, rank: int = 4) -> list[nn.Module]:
    """So many models of the base with LoRA in two layers, each with initial values of its own; the
    base's values are in all of them.
    """
    from peft import LoraConfig, get_peft_model

    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(
            get_peft_model(
                copy.deepcopy(base),
                LoraConfig(r=rank, target_modules=["first", "second"], lora_dropout=0.0),
            )
        )
    return made


def stacked(modules: list[nn.Module]) -> tuple[Callable[..., Any], Any, Any]:
    """(apply, params, state) of modules that differ in what is trained alone: params [members,
    ...], state as the first module has it.
    """
    functions = [bridge.function(module) for module in modules]
    return (
        functions[0].apply,
        jax.tree.map(lambda *xs: jnp.stack(xs), *[f.params for f in functions]),
        functions[0].state,
    )


def make_step(
    apply: Callable[..., Any], rates: jax.Array
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(init, step): ``step(params, moments, state, inputs, labels)`` of all members, each on a
    batch and with a rate of its own.
    """
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.0)

    def loss(params: Any, state: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        logits, _ = apply(params, state, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def one(params: Any, moments: Any, state: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, state, inputs, labels)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    def init(params: Any) -> Any:
        moments = jax.vmap(optimizer.init)(params)
        moments.hyperparams["learning_rate"] = rates
        return moments

    return init, jax.jit(jax.vmap(one, in_axes=(0, 0, None, 0, 0)), donate_argnums=(0, 1))


def size(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def batches(
    members: int, rows: int, features: int = 64, classes: int = 4
) -> tuple[jax.Array, jax.Array]:
    """A batch for each member: each has a task of its own."""
    first, second = jax.random.split(jax.random.key(0))
    inputs = jax.random.normal(first, (members, rows, features))
    tasks = jax.random.normal(second, (members, features, classes))
    return inputs, jnp.argmax(jnp.einsum("mrf,mfc->mrc", inputs, tasks), -1)


def main() -> None:
    members, rows = 32, 64
    torch.manual_seed(0)
    apply, params, state = stacked(adapters(Base(), members))
    init, step = make_step(apply, jnp.logspace(-4, -2, members))
    inputs, labels = batches(members, rows)
    with bridge.compiling.correctly():
        moments = init(params)
        program = step.lower(params, moments, state, inputs, labels).compile()
        used = program.memory_analysis()
        print(
            f"base {size(state) / 1e6:.1f} MB, adapters {size(params) / 1e6:.1f} MB, their moments "
            f"{size(moments) / 1e6:.1f} MB"
        )
        print(
            f"arguments {used.argument_size_in_bytes / 1e6:.1f} MB, temporary memory "
            f"{used.temp_size_in_bytes / 1e6:.1f} MB"
        )
        for number in range(100):
            params, moments, losses = step(params, moments, state, inputs, labels)
            if number % 33 == 0:
                print(f"step {number}: loss from {losses.min():.3f} to {losses.max():.3f}")


if __name__ == "__main__":
    main()
