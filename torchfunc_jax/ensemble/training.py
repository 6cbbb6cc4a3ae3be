"""``Trainer``: all members take a step of training in one compiled program; ``TrainState`` is what a checkpoint keeps of it."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

import bridge
from bridge import compiling
from bridge.convert import tensors
from torchfunc_jax.ensemble import optimizers
from torchfunc_jax.ensemble.members import Ensemble
from torchfunc_jax.ensemble.meshes import DATA, MEMBER, gathered


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training changes: a pytree of jax.Arrays, [n, ...] each but ``order``.

    Attributes:
        params, buffers: name -> array.
        optimizer: the optimizer's state, a tree of arrays.
        numbers: learning rate, weight decay, ..., by name.
        step: int32, how many steps each member has taken.
        active: bool, False: the member is frozen.
        keys: uint32, the members' random state.
        order: uint32, the random state of the order of the data that all members share.
        best, waited: float32 and int32, for early stopping: the best value, and the number of values since then.
        average: name -> array, averages of params over time; empty without them.
        averaged: int32, how many have been averaged.
    """

    params: dict[str, jax.Array]
    buffers: dict[str, jax.Array]
    optimizer: Any
    numbers: dict[str, Any]
    step: jax.Array
    active: jax.Array
    keys: jax.Array
    order: jax.Array
    best: jax.Array
    waited: jax.Array
    average: dict[str, jax.Array]
    averaged: jax.Array


def _joined(x: jax.Array) -> jax.Array:
    """The mean over the axis "data"; the largest of integers, such as the number of batches that a BatchNorm counts."""
    return jax.lax.pmean(x, DATA) if jnp.issubdtype(x.dtype, jnp.inexact) else jax.lax.pmax(x, DATA)


class _Objective(nn.Module):
    """A member with its loss, a module whose forward is the number to minimize."""

    def __init__(self, member: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.member = member
        self.loss = loss

    def forward(self, inputs: Any, *targets: Any) -> Any:
        return self.loss(self.member(inputs), *targets)


class Trainer:
    """Trains an ensemble."""

    def __init__(
        self, ensemble: Ensemble, loss: Callable[..., torch.Tensor], optimizer: str = "adam", *, lr: Any = None, weight_decay: Any = None,
        seed: int = 0,
    ) -> None:
        self.ensemble = ensemble
        self.position = 0
        self._optimizer = optimizers.find(optimizer)
        self._objective = _Objective(ensemble.template, loss)
        n, place = len(ensemble), ensemble.placement
        given = {k: v for k, v in (("lr", lr), ("weight_decay", weight_decay)) if v is not None}
        numbers = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (n,)), {**self._optimizer.numbers, **given})

        def start(params: Any, numbers: Any) -> Any:
            keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(jax.random.key(seed), i)))(jnp.arange(n))
            return dict(
                optimizer=jax.vmap(self._optimizer.init)(params), numbers=numbers, step=jnp.zeros(n, jnp.int32), active=jnp.ones(n, bool),
                keys=keys, best=jnp.full(n, jnp.inf), waited=jnp.zeros(n, jnp.int32), average={}, averaged=jnp.zeros(n, jnp.int32),
            )

        rows = place.sharding(MEMBER)
        order = jax.device_put(jax.random.key_data(jax.random.key(seed)), place.sharding())
        self._rest = {**jax.jit(start, out_shardings=rows)(ensemble.params, numbers), "order": order}
        self._programs: dict[Any, Any] = {}

    @property
    def state(self) -> TrainState:
        return TrainState(params=self.ensemble.params, buffers=self.ensemble.buffers, **self._rest)

    @state.setter
    def state(self, state: TrainState) -> None:
        fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        self.ensemble.params, self.ensemble.buffers = fields.pop("params"), fields.pop("buffers")
        self._rest = fields

    @property
    def state_shardings(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding, self.state)

    def _member_step(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        """One member's step; state without the first dimension."""
        key = jax.random.fold_in(jax.random.wrap_key_data(state.keys), state.step)

        def objective(params: Any) -> Any:
            named = [{f"member.{name}": x for name, x in some.items()} for some in (params, state.buffers)]
            loss, after = bridge.call(self._objective, *named, batch, training=True, rng=key)
            return loss, {name.removeprefix("member."): x for name, x in after.items()}

        (loss, buffers), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        place = self.ensemble.placement
        if place.mesh is not None and DATA in place.mesh.axis_names:
            loss, buffers, grads = jax.tree.map(_joined, (loss, buffers, grads))
        params, optimizer = self._optimizer.update(grads, state.optimizer, state.params, state.numbers)
        return dataclasses.replace(state, params=params, buffers=buffers, optimizer=optimizer, step=state.step + 1), loss

    def _program(self, batch: Any) -> Any:
        place = self.ensemble.placement
        lanes = TrainState(**{f.name: None if f.name == "order" else 0 for f in dataclasses.fields(TrainState)})
        specs = TrainState(**{f.name: place.spec() if f.name == "order" else place.spec(MEMBER) for f in dataclasses.fields(TrainState)})
        every = jax.vmap(self._member_step, (lanes, None), (lanes, 0))
        return jax.jit(place.over(every, (specs, place.spec(DATA)), (specs, place.spec(MEMBER)), False), donate_argnums=0)

    def _arrays(self, batch: Any) -> Any:
        return jax.tree.map(lambda t: self.ensemble.placement.put(t, DATA), batch)

    def traced_step(self, *batch: Any) -> jax.stages.Traced:
        """The step on such a batch as it is traced, neither compiled nor run."""
        return self._program(batch).trace(self.state, self._arrays(batch))

    def compiled_step(self, *batch: Any) -> jax.stages.Compiled:
        with compiling.correctly():
            return self.traced_step(*batch).lower().compile()

    def step(self, *batch: Any) -> torch.Tensor:
        """A step on a batch; the members' losses, [n]."""
        program = self._programs.setdefault("step", None) or self._programs.setdefault("run", self._program(batch))
        with compiling.correctly():
            self.state, losses = program(self.state, self._arrays(batch))
        return tensors.to_torch(jnp.asarray(gathered(losses)))
