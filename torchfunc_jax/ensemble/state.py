"""``TrainState``: all that training changes, which a checkpoint keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training changes, and what its members share, a pytree of jax.Arrays: each is [n,
    ...] but ``order`` and ``shared``.

    Attributes:
        params, buffers: name -> array.
        shared: name -> array, the parameters and buffers that all members share; no step changes
            them.
        optimizer: the optimizer's state, a tree of arrays.
        numbers: name -> array [n], or tuple or dict of such arrays: "lr", "weight_decay", ..., and
            "clip", "temperature", "loss_weights" where they were given. Numbers that are functions
            of the step are not in it.
        step: int32, how many steps each member has taken.
        active: bool; a member that is not is frozen.
        keys: uint32, the random state of each member.
        order: uint32, the random state of the order of the data that all members share.
        best, waited: float32 and int32: the best value that early stopping has seen, and how many
            values came since.
        best_params: name -> array, the parameters at that value; empty unless they are kept.
        average: name -> array, an average of the parameters over time; empty without one.
        averaged: int32, how many parameters it is an average of.
    """

    params: dict[str, jax.Array]
    buffers: dict[str, jax.Array]
    shared: dict[str, jax.Array]
    optimizer: Any
    numbers: dict[str, Any]
    step: jax.Array
    active: jax.Array
    keys: jax.Array
    order: jax.Array
    best: jax.Array
    waited: jax.Array
    best_params: dict[str, jax.Array]
    average: dict[str, jax.Array]
    averaged: jax.Array


FIELDS = [f.name for f in dataclasses.fields(TrainState)]

__all__ = ["TrainState"]
