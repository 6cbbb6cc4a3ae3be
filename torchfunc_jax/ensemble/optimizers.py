"""The optimizers of torch.optim by name, with its defaults and its numbers, and optax's, as updates of one member."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any


class Optimizer(NamedTuple):
    """An update rule of one member.

    Attributes:
        init: params -> state.
        update: (gradients, state, params, numbers by name) -> (new params, new state).
        numbers: the defaults of the numbers that may differ from member to member.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree, Mapping[str, Any]], tuple[Tree, Tree]]
    numbers: Mapping[str, Any]


def _adam() -> Optimizer:
    def init(params: Tree) -> Tree:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"count": jnp.zeros((), jnp.int32), "mean": zeros, "square": zeros}

    def update(grads: Tree, state: Tree, params: Tree, h: Mapping[str, Any]) -> tuple[Tree, Tree]:
        count = state["count"] + 1
        (a, b), t = h["betas"], count.astype(jnp.float32)
        grads = jax.tree.map(lambda g, p: g + h["weight_decay"] * p, grads, params)
        mean = jax.tree.map(lambda m, g: m + (1 - a) * (g - m), state["mean"], grads)
        square = jax.tree.map(lambda v, g: b * v + (1 - b) * g * g, state["square"], grads)
        scale, root = h["lr"] / (1 - a**t), jnp.sqrt(1 - b**t)
        after = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) / root + h["eps"]), params, mean, square)
        return after, {"count": count, "mean": mean, "square": square}

    return Optimizer(init, update, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})


def find(optimizer: str) -> Optimizer:
    return {"adam": _adam}[optimizer]()
