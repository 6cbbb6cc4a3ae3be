"""Many adapters on one frozen model: 32 LoRA adapters of Hugging Face's peft, trained at once, with
the base in memory once.

    python docs/jobs/populations.py

The adapters are the members of an ensemble. What is frozen is shared by all of them: there is one
copy of it, and no gradient of it is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch import nn

from torchfunc_jax.ensemble import Ensemble, Trainer


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


def trainer_of(modules: Sequence[nn.Module], rates: Any) -> Trainer:
    """Adam for all adapters at once, each with a rate of its own, over the base that they share."""
    ensemble = Ensemble.of(modules, shared=True)
    return Trainer(ensemble, nn.functional.cross_entropy, "adam", lr=rates)


def size(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def batches(
    members: int, rows: int, features: int = 64, classes: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch for each member: each has a task of its own."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(members, rows, features, generator=draw)
    tasks = torch.randn(members, features, classes, generator=draw)
    return inputs, (inputs @ tasks).argmax(-1)


def main() -> None:
    members, rows = 32, 64
    torch.manual_seed(0)
    trainer = trainer_of(adapters(Base(), members), torch.logspace(-4, -2, members))
    inputs, labels = batches(members, rows)
    state = trainer.state
    print(
        f"base {size(state.shared) / 1e6:.1f} MB, adapters {size(state.params) / 1e6:.1f} MB, "
        f"their moments {size(state.optimizer) / 1e6:.1f} MB"
    )
    used = trainer.compiled_step(inputs, labels, own=True).memory_analysis()
    print(
        f"arguments {used.argument_size_in_bytes / 1e6:.1f} MB, temporary memory "
        f"{used.temp_size_in_bytes / 1e6:.1f} MB"
    )
    for number in range(100):
        losses = trainer.step(inputs, labels, own=True)
        if number % 33 == 0:
            print(f"step {number}: loss from {losses.min():.3f} to {losses.max():.3f}")


if __name__ == "__main__":
    main()
