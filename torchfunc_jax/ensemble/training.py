"""``Trainer``: all members take a step of training in one compiled program."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

import bridge
from bridge import compiling
from bridge.errors import public_methods
from bridge.modules import as_tensor
from bridge.xla import products
from torchfunc_jax.ensemble import life, optimizers
from torchfunc_jax.ensemble.loaders import Agreement, Batches, copied
from torchfunc_jax.ensemble.members import Ensemble, lanes, wide_types
from torchfunc_jax.ensemble.meshes import DATA, MEMBER, gathered, gathered_tensor
from torchfunc_jax.ensemble.numbers import each, mapped
from torchfunc_jax.ensemble.objective import Objective, Settings
from torchfunc_jax.ensemble.profiling import Window
from torchfunc_jax.ensemble.sinks import Log, Sink
from torchfunc_jax.ensemble.state import FIELDS, TrainState

_log = logging.getLogger("torchfunc_jax")
Wide = tuple[torch.dtype | None, ...]  # of each tensor of a batch: see ``wide_types``
# what ``fit`` does next: (the arguments of a step or None, whether an epoch has ended with it)
Source = Callable[[], Iterator[tuple[Any, bool]]]
Part = dict[str, Any]  # some fields of a ``TrainState``
# by a step; it also changes the members
_CHANGED, _READ = ("optimizer", "step", "active", "average", "averaged"), ("numbers", "keys")
# numbers folded into a member's key: the order of its data, its bootstrap sample
_ORDER, _BOOTSTRAP = 0x6F726465, 0x626F6F74


@public_methods
class Trainer:
    """Trains all members of an ensemble at once: a step is one compiled program, in which each
    member has its own settings.

    Of a number "[n]" each member has its own; a float is the same for all. Numbers may be functions
    of the member's step, a JAX integer, which return a float.

    Args:
        ensemble: its ``params`` and ``buffers`` are replaced at each step, and their memory is used
            again.
        loss: ``loss(outputs, *targets)`` of one member's outputs, a torch function that returns a
            tensor without dimensions, a mean over the batch; or a dict of such tensors, whose sum
            is minimized.
        optimizer: "sgd", "adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adagrad",
            "adadelta" or "rprop", as in torch.optim; or Optax's: a function that makes one of
            numbers (``optax.adam``), or a finished one (``optax.adam(1e-3)``).
        lr, weight_decay: float or [n]; None: the optimizer's default.
        schedule: from the member's step to a factor of lr.
        clip: float or [n]; the gradient of each member is scaled so that its norm is at most this,
            as ``clip_grad_norm_`` does.
        temperature: float or [n]; the member's output is divided by it before the loss.
        loss_weights: float or [n], a factor of the loss; if the loss is a dict, a dict of them by
            the same names.
        augment: ``augment(*batch)`` returns a batch, another one for each member: a torch function
            whose random numbers are the member's.
        loss_of: "outputs", or "module": the loss is then ``loss(member, *batch)`` and calls the
            member itself.
        reduction: "mean" or "sum": what the loss is over the batch; the parts of a batch on several
            devices are joined by it.
        dtype: torch.bfloat16 or torch.float16: the members run under torch.autocast with it, and
            the parameters stay as they are.
        accumulate: the batch is run in so many equal parts, one after another, and their gradients
            are joined.
        chunk: how many members of a device run at a time; None: all. It is halved when the device's
            memory does not suffice.
        ema: the decay of an exponential moving average of the parameters; None: none is kept.
        freeze_diverged: a member whose loss or gradient is not finite is frozen, with the values
            before that step.
        sync_batch_norm: BatchNorm's statistics are of the whole batch, not of the part on each
            device.
        training: the members' mode; None: as it is in ``ensemble.template``.
        seed: of the order of the data, of bootstrap samples, and of all random numbers that members
            draw.
        options: further numbers and switches of the optimizer by their names: ``betas``,
            ``momentum``, ``nesterov``, ...

    Attributes:
        position: how many batches ``fit`` has taken.
        chunk: as given, or smaller.

    Raises:
        ValueError: no such optimizer; a number that is neither a float nor of shape [n]; a setting
            that is not possible.
        TypeError: a number or switch that the optimizer does not have.

    Source: ``torch.optim``; https://docs.jax.dev/en/latest/notebooks/shard_map.html

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Ensemble, Trainer
        >>> ens = Ensemble(lambda: torch.nn.Linear(3, 1), n=4)
        >>> trainer = Trainer(
        ...     ens, torch.nn.functional.mse_loss, "sgd", lr=[0.0, 0.01, 0.1, 1.0], momentum=0.9
        ... )
        >>> trainer.step(torch.ones(8, 3), torch.ones(8, 1)).shape
        torch.Size([4])
    """

    def __init__(
        self,
        ensemble: Ensemble,
        loss: Callable[..., Any],
        optimizer: Any = "adam",
        *,
        lr: Any = None,
        weight_decay: Any = None,
        schedule: Callable[[Any], Any] | None = None,
        clip: Any = None,
        temperature: Any = None,
        loss_weights: Any = None,
        augment: Callable[..., Any] | None = None,
        loss_of: str = "outputs",
        reduction: str = "mean",
        dtype: torch.dtype | None = None,
        accumulate: int = 1,
        chunk: int | None = None,
        ema: float | None = None,
        freeze_diverged: bool = False,
        sync_batch_norm: bool = True,
        training: bool | None = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name, value, known in (
            ("loss_of", loss_of, ("outputs", "module")),
            ("reduction", reduction, ("mean", "sum")),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected {known[0]!r} or {known[1]!r}, got {value!r}")
        if dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype: expected torch.bfloat16, torch.float16 or None, got {dtype}")
        for name, count in (("accumulate", accumulate), ("chunk", chunk)):
            if count is not None and (
                isinstance(count, bool) or not isinstance(count, int) or count < 1
            ):
                raise ValueError(f"{name}: expected a positive integer, got {count!r}")
        if ema is not None and not 0 <= ema < 1:
            raise ValueError(f"ema: expected a number from 0 to below 1, got {ema}")
        if loss_of == "module" and temperature is not None:
            raise ValueError(
                'temperature: with loss_of="module" the loss calls the member; divide there'
            )
        self.ensemble, self.reduction = ensemble, reduction
        self.accumulate, self.chunk, self.ema, self.freeze_diverged = (
            accumulate,
            chunk,
            ema,
            freeze_diverged,
        )
        self.training, self.position = training, 0
        self._batches: Batches | None = None  # of the loader that ``fit`` had last
        self._data_state: dict[str, Any] | None = None
        place, n = ensemble.placement, len(ensemble)
        self._data_axis = DATA if place.size(DATA) > 1 else None
        self.sync_batch_norm, synced = (
            sync_batch_norm,
            sync_batch_norm and self._data_axis is not None,
        )
        self._objective = Objective(
            ensemble.template,
            Settings(loss, loss_of, augment, dtype, synced, tuple(ensemble.shared)),
        )
        self._trained = [
            name for name, p in ensemble.template.named_parameters() if p.requires_grad
        ]
        if not self._trained:
            raise ValueError("ensemble: no parameter requires grad, so there is nothing to train")
        if wrong := [
            name
            for name, p in ensemble.template.named_parameters()
            if p.requires_grad and not p.is_floating_point()
        ]:
            raise ValueError(
                f"ensemble: parameter {wrong[0]!r} is not real; optimizers here "
                "train real parameters"
            )
        given = {
            name: x for name, x in (("lr", lr), ("weight_decay", weight_decay)) if x is not None
        } | options
        self._optimizer = optimizers.find(optimizer, given)
        more = {"clip": clip, "temperature": temperature, "loss_weights": loss_weights}
        numbers = {
            **self._optimizer.numbers,
            **{name: x for name, x in more.items() if x is not None},
        }
        if schedule is not None and "lr" not in numbers:
            raise ValueError("schedule: it is a factor of lr, and lr is not given")
        self._functions = {
            name: mapped(lambda f, _: f if callable(f) else None, x, name)
            for name, x in numbers.items()
        }
        self._schedule = schedule
        arrays = {
            name: mapped(lambda x, who: None if callable(x) else each(who, x, n), x, name)
            for name, x in numbers.items()
        }
        arrays = {name: x for name, x in arrays.items() if x is not None}
        placed = jax.tree.map(lambda x: place.put_rows(x, MEMBER), arrays)
        self._n, self._changes, order = (
            n,
            ensemble.changes,
            np.asarray(jax.random.key_data(jax.random.key(seed))),
        )
        self._keep({**self._begun(placed, seed), "order": place.put_rows(order)})
        self._programs: dict[Any, Any] = {}
        self._check_vma = True
        # the last batch: what its check depends on, and what was found
        self._last: tuple[Any, Wide] = None, ()

    def _begun(self, numbers: Any, seed: int) -> dict[str, Any]:
        """All of the state at the first step but the members, and the order of the data that they
        share.
        """
        begin = jax.jit(
            self._start, static_argnums=2, out_shardings=self.ensemble.placement.sharding(MEMBER)
        )
        return begin(self.ensemble.params, numbers, seed)

    def _start(self, params: Any, numbers: Any, seed: int) -> dict[str, Any]:
        n = len(self.ensemble)
        trained = {name: params[name] for name in self._trained}
        every = jnp.arange(n)
        zeros = jnp.zeros(n, jnp.int32)

        def optimizer(params: Any, numbers: Any) -> Any:
            return self._optimizer.init(
                params, self._now(numbers, jnp.int32(0), self._optimizer.numbers)
            )

        return {
            "optimizer": jax.vmap(optimizer)(trained, numbers),
            "numbers": numbers,
            "step": zeros,
            "active": jnp.ones(n, bool),
            "keys": jax.vmap(
                lambda i: jax.random.key_data(jax.random.fold_in(jax.random.key(seed), i))
            )(every),
            "best": jnp.full(n, jnp.inf, jnp.float32),
            "waited": zeros,
            "best_params": {},
            "average": {} if self.ema is None else jax.tree.map(jnp.copy, trained),
            "averaged": zeros,
        }

    # -- the state ---------------------------------------------------------------------------------
    @property
    def state(self) -> TrainState:
        """All that training changes; it may be set. Its arrays are used up by the next step."""
        changed, read, shared = self._arguments()
        return TrainState(**changed, **read, shared=shared, **self._rest)

    @state.setter
    def state(self, state: TrainState) -> None:
        fields = {name: getattr(state, name) for name in FIELDS}
        self._n = self.ensemble._n = state.step.shape[0]
        self._put_members(fields.pop("params"), fields.pop("buffers"))
        shared = fields.pop("shared")
        self.ensemble.shared = {name: shared[name] for name in self.ensemble.shared}
        self._keep(fields)

    def _put_members(self, params: Part, buffers: Part) -> None:
        # JAX sorts the names of a dict; here they keep the module's order
        self.ensemble.params = {name: params[name] for name in self.ensemble.params}
        self.ensemble.buffers = {name: buffers[name] for name in self.ensemble.buffers}

    def _keep(self, fields: Part) -> None:
        """Keep all of a state but the members: what a step changes, what it reads, and the rest."""
        self._changed = {name: fields.pop(name) for name in _CHANGED}
        self._read = {name: fields.pop(name) for name in _READ}
        self._rest = fields

    def _arguments(self) -> tuple[Part, Part, Part]:
        """What a program gets of the state: what a step changes, whose memory it uses again, what
        it only reads, and what members share.

        They are kept as they are passed: Python is slow while the processor's caches are full of a
        step's arrays.
        """
        ensemble = self.ensemble
        if ensemble.changes != self._changes:
            raise RuntimeError(
                "the ensemble's members were changed, and this trainer has the optimizer's state "
                f"and the settings of those before (it has {len(ensemble)} members, and had "
                f"{self._n}); use Trainer.take or Trainer.reseed, or make another trainer"
            )
        return (
            {"params": ensemble.params, "buffers": ensemble.buffers, **self._changed},
            self._read,
            ensemble.shared,
        )

    @property
    def state_shardings(self) -> TrainState:
        """The sharding of each array of the state, in the same tree."""
        return jax.tree.map(lambda x: x.sharding, self.state)

    # -- one member's step, a JAX function of its part of the state --------------------------------
    def _now(
        self, numbers: Mapping[str, Any], step: jax.Array, names: Iterable[str]
    ) -> dict[str, Any]:
        """The values at a step of those of these numbers that were given."""
        wide = jax.dtypes.canonicalize_dtype(np.float64)

        def one(f: Any, x: Any) -> Any:
            return x if f is None else jnp.asarray(f(step), wide)

        given = [name for name in names if name in self._functions]
        now = {
            name: jax.tree.map(
                one, self._functions[name], numbers.get(name), is_leaf=lambda f: f is None
            )
            for name in given
        }
        if self._schedule is not None and "lr" in now:
            now["lr"] = now["lr"] * jnp.asarray(self._schedule(step), wide)
        return now

    def _loss(
        self,
        params: Any,
        state: TrainState,
        batch: Any,
        key: Any,
        wide: Wide,
        training: Any,
        augmented: bool,
    ) -> Any:
        """(loss, buffers) of a batch; ``params`` has the parameters that are trained."""
        whole = self.ensemble.whole({**state.params, **params}, state.buffers, state.shared)
        named, buffers = ({f"member.{name}": x for name, x in some.items()} for some in whole)
        numbers = self._now(state.numbers, state.step, ("temperature", "loss_weights"))
        loss, after = bridge.call(
            self._objective,
            named,
            buffers,
            (numbers, batch, wide, augmented),
            training=training,
            rng=key,
        )
        return loss, {name: after[f"member.{name}"] for name in state.buffers}

    def _key(self, state: TrainState) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.keys), state.step)
        return key if self._data_axis is None else jax.random.fold_in(key, lax.axis_index(DATA))

    def _gradients(self, state: TrainState, batch: Any, wide: Wide) -> tuple[jax.Array, Any, Any]:
        """The loss, the gradient and the buffers after it,
        of the part of the batch on this device.
        """
        key, trained = self._key(state), {name: state.params[name] for name in self._trained}

        def of(buffers: Any, batch: Any, key: Any) -> Any:
            each = dataclasses.replace(state, buffers=buffers)
            return jax.value_and_grad(self._loss, has_aux=True)(
                trained, each, batch, key, wide, self.training, True
            )

        if self.accumulate == 1:
            (loss, buffers), grads = of(state.buffers, batch, key)
            return loss, grads, buffers
        parts = jax.tree.map(lambda x: x.reshape(self.accumulate, -1, *x.shape[1:]), batch)

        def add(carry: Any, part: Any) -> Any:
            (loss, grads), buffers = carry
            i, batch = part
            (more, buffers), new = of(buffers, batch, jax.random.fold_in(key, i))
            # each part's gradient is added at once, and its factors are not kept for all parts
            new = lax.optimization_barrier(new)
            return (jax.tree.map(jnp.add, (loss, grads), (more, new)), buffers), None

        shapes = jax.eval_shape(of, state.buffers, jax.tree.map(lambda x: x[0], parts), key)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        ((loss, grads), buffers), _ = lax.scan(
            add, ((zero[0][0], zero[1]), state.buffers), (jnp.arange(self.accumulate), parts)
        )
        if self.reduction == "mean":
            loss, grads = jax.tree.map(lambda x: x / self.accumulate, (loss, grads))
        return loss, grads, buffers

    def _joined(self, parts: Any) -> Any:
        """Losses and gradients of the devices along the axis "data" as those of the whole batch."""
        return (
            parts
            if self._data_axis is None
            else (lax.pmean if self.reduction == "mean" else lax.psum)(parts, DATA)
        )

    def _member_step(
        self, state: TrainState, batch: Any, wide: Wide
    ) -> tuple[TrainState, jax.Array]:
        if self._data_axis is None:
            loss, grads, buffers = self._gradients(state, batch, wide)
        else:
            # each device's own copies: else JAX would sum the gradients over the devices itself
            own = jax.tree.map(
                lambda x: lax.pcast(x, DATA, to="varying"),
                {"params": state.params, "buffers": state.buffers},
            )
            loss, grads, buffers = self._gradients(dataclasses.replace(state, **own), batch, wide)
            loss, grads = self._joined((loss, grads))
            buffers = jax.tree.map(
                lambda x: (
                    lax.pmean(x, DATA)
                    if jnp.issubdtype(x.dtype, jnp.inexact)
                    else lax.pmax(x, DATA)
                ),
                buffers,
            )
        take = state.active
        clip = self._now(state.numbers, state.step, ("clip",)).get("clip")
        if self.freeze_diverged or clip is not None:
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in grads.values()))
        if self.freeze_diverged:
            take = take & jnp.isfinite(loss) & jnp.isfinite(norm)
        if clip is not None:
            scale = jnp.minimum(clip / (norm + 1e-6), 1.0)
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        trained = {name: state.params[name] for name in self._trained}
        now = self._now(state.numbers, state.step, self._optimizer.numbers)
        params, optimizer = self._optimizer.update(grads, state.optimizer, trained, now, take)
        average, averaged = state.average, state.averaged
        if self.ema is not None:
            average, averaged = (
                jax.tree.map(lambda a, p: self.ema * a + (1 - self.ema) * p, average, params),
                averaged + 1,
            )
        after = {
            "buffers": buffers,
            "step": state.step + 1,
            "average": average,
            "averaged": averaged,
        }
        after = jax.tree.map(
            lambda new, old: jnp.where(take, new, old),
            after,
            {name: getattr(state, name) for name in after},
        )
        after |= {"params": {**state.params, **params}, "optimizer": optimizer}
        return dataclasses.replace(
            state, active=take if self.freeze_diverged else state.active, **after
        ), loss

    # -- programs ----------------------------------------------------------------------------------
    def _program(self, key: tuple[Any, ...]) -> Any:
        """The compiled program of a kind: made by the method of that name, of what follows."""
        if key not in self._programs:
            kind, *how = key
            self._programs[key] = getattr(self, f"_{kind}_program")(*how)
        return self._programs[key]

    def _of_members(
        self, one: Callable[..., Any], own: bool, chunk: int | None
    ) -> Callable[..., Any]:
        """A function of one member's state and batch, which returns the state after it and a loss,
        as a program's of all members.
        """

        def member(changed: Part, read: Part, shared: Part, batch: Any) -> Any:
            after, loss = one(_whole(changed, read, shared), batch)
            return {name: getattr(after, name) for name in changed}, loss

        return lanes(member, (0, 0, None, 0 if own else None), chunk)

    def _over_devices(
        self, every: Callable[..., Any], own: bool, check_vma: bool, data: bool = False
    ) -> Any:
        place = self.ensemble.placement
        members = place.spec(MEMBER)
        given = (
            members,
            members,
            place.spec(),
            *[place.spec()] * data,
            place.spec(MEMBER, DATA) if own else place.spec(DATA),
        )
        return jax.jit(
            products.rearranging(place.over(every, given, (members, members), check_vma)),
            donate_argnums=0,
        )

    def _step_program(
        self, own: bool, wide: Wide, chunk: int | None, check_vma: bool, modes: Any
    ) -> Any:
        every = self._of_members(
            lambda state, batch: self._member_step(state, batch, wide), own, chunk
        )
        return self._over_devices(every, own, check_vma)

    def _epoch_program(
        self, own: bool, wide: Wide, chunk: int | None, check_vma: bool, modes: Any
    ) -> Any:
        """A step on rows of data that lie on the devices."""

        def every(changed: Part, read: Part, shared: Part, data: Any, rows: jax.Array) -> Any:
            def taken(rows: jax.Array) -> Any:
                return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), data)

            def one(state: TrainState, batch: Any) -> Any:
                return self._member_step(state, taken(batch) if own else batch, wide)

            return self._of_members(one, own, chunk)(
                changed, read, shared, rows if own else taken(rows)
            )

        return self._over_devices(every, own, check_vma, data=True)

    def _losses_program(
        self,
        own: bool,
        wide: Wide,
        chunk: int | None,
        check_vma: bool,
        modes: Any,
        split: bool = True,
    ) -> Any:
        def one(changed: Part, read: Part, shared: Part, batch: Any) -> Any:
            state = _whole(changed, read, shared)
            loss, _ = self._loss({}, state, batch, self._key(state), wide, False, False)
            return self._joined(loss) if split else loss

        place = self.ensemble.placement
        every, members, rows = (
            lanes(one, (0, 0, None, 0 if own else None), chunk),
            place.spec(MEMBER),
            (DATA,) if split else (),
        )
        given = (
            members,
            members,
            place.spec(),
            place.spec(MEMBER, *rows) if own else place.spec(*rows),
        )
        return jax.jit(products.rearranging(place.over(every, given, members, check_vma)))

    _whole_losses_program = functools.partialmethod(_losses_program, split=False)

    def _attempt(self, kind: str, own: bool, wide: Wide, use: Callable[[Any], Any]) -> Any:
        """What is done with a program; if shard_map's check stumbles,
        with one that is not checked.
        """
        modes = (
            None
            if self.training is not None
            else tuple(m.training for m in self.ensemble.template.modules())
        )
        try:
            with compiling.correctly():
                return use(self._program((kind, own, wide, self.chunk, self._check_vma, modes)))
        except Exception as error:
            if self.ensemble.mesh is None or not self._check_vma or not _of_vma(error):
                raise
            _log.info(
                "shard_map cannot check over which axes values vary, because "
                "of an operator of the member: %s",
                error,
            )
            self._check_vma = False
        return self._attempt(kind, own, wide, use)

    def _run(self, kind: str, own: bool, wide: Wide, *args: Any) -> Any:
        """Run a program; if memory does not suffice, with half as many members at a time."""
        while True:
            try:
                return self._attempt(
                    kind, own, wide, lambda program: program(*self._arguments(), *args)
                )
            except Exception as error:
                if not self._halve(error):
                    raise

    def _halve(self, error: Exception) -> bool:
        """Whether to try again with half as many members at a time."""
        there = self._n // self.ensemble.placement.size(MEMBER)
        if (
            "RESOURCE_EXHAUSTED" not in str(error)
            or min(self.chunk or there, there) == 1
            or jax.process_count() > 1
        ):
            return False
        if any(x.is_deleted() for x in jax.tree.leaves(self.state)):
            raise RuntimeError(
                "the device's memory did not suffice, and the step has used the state up; begin "
                f"again from a checkpoint, with chunk={min(self.chunk or there, there) // 2}"
            ) from error
        self.chunk = min(self.chunk or there, there) // 2
        _log.warning(
            "the device's memory does not suffice: members run in chunks of %d from now on",
            self.chunk,
        )
        return True

    def compiled_step(self, *batch: Any, own: bool = False) -> jax.stages.Compiled:
        """The program of a step on such a batch, compiled, for ``memory_analysis``,
        ``cost_analysis`` and ``as_text``; it is not run.

        Args:
            batch: as in ``step``; its values are not used.
            own: as in ``step``.
        """
        arrays, wide = self._arrays(batch, own, self.accumulate)
        return self._attempt(
            "step", own, wide, lambda program: program.lower(*self._arguments(), arrays).compile()
        )

    def _arrays(
        self, batch: tuple[Any, ...], own: bool, parts: int, split: bool = True, whole: bool = False
    ) -> tuple[Any, Wide]:
        """A batch on the devices, whose parts run one after another; split: each device along the
        axis "data" has a part of its rows; whole: each process has all of its rows.
        """
        place = self.ensemble.placement
        leaves, tree = jax.tree.flatten(batch)
        size = place.size(DATA) if split else 1
        asked = (
            self._n,
            own,
            parts,
            size,
            whole,
            [(type(x), getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves],
        )
        if asked != self._last[0]:
            self._check_batch(leaves, own, parts, size, whole or jax.process_count() == 1)
            self._last = asked, wide_types(leaves, self.ensemble.template)
        axes = (*(MEMBER,) * own, *(DATA,) * split)
        put = place.put_rows if whole and place.mesh is not None else place.argument
        return jax.tree.unflatten(tree, [put(x, *axes) for x in leaves]), self._last[1]

    def _check_batch(
        self, leaves: list[Any], own: bool, parts: int, size: int, whole: bool
    ) -> None:
        """Refuse a batch that does not fit the members or the mesh."""
        first = int(own)
        if not leaves:
            raise ValueError("batch: expected inputs and targets, got nothing")
        for x in leaves:
            if not isinstance(x, torch.Tensor | jax.Array | np.ndarray) or x.ndim <= first:
                raise ValueError(
                    f"batch: expected tensors of at least {first + 1} dimensions, got "
                    f"{getattr(x, 'shape', type(x).__name__)}"
                )
            if own and x.shape[0] != self._n and x.shape[0] != len(self.ensemble.local):
                raise ValueError(
                    f"batch: expected {self._n} rows, one for each member, got shape "
                    f"{tuple(x.shape)}"
                )
            here = size if whole or isinstance(x, jax.Array) else max(1, size // self.batch_part[1])
            if x.shape[first] % (here * parts):
                raise ValueError(
                    f"batch: expected a multiple of {here * parts} rows, for {size} devices along "
                    'the axis "data" and '
                    f"accumulate={parts}, got shape {tuple(x.shape)}"
                )

    # -- steps -------------------------------------------------------------------------------------
    def step(self, *batch: Any, own: bool = False) -> torch.Tensor:
        """All members take a step.

        Args:
            batch: inputs and targets: tensors [B, ...], which all members share. The first is the
                member's argument; a tuple or dict is taken as its arguments. With several processes
                each gives the rows that its own devices keep.
            own: each member has a batch of its own: tensors [n, B, ...].

        Returns:
            torch.Tensor: [n], each member's loss before the step, also of members that are frozen.

        Raises:
            ValueError: the batch does not fit the members or the mesh; the loss is no tensor
                without dimensions.
        """
        arrays, wide = self._arrays(batch, own, self.accumulate)
        return gathered_tensor(self._step("step", own, wide, arrays))

    def _step(self, kind: str, own: bool, wide: Wide, *args: Any) -> jax.Array:
        """Run a program that takes a step, and keep the state after it; the losses."""
        after, losses = self._run(kind, own, wide, *args)
        self._put_members(after.pop("params"), after.pop("buffers"))
        self._changed = after
        return losses

    def losses(self, *batch: Any, own: bool = False) -> torch.Tensor:
        """Each member's loss on a batch in evaluation mode, [n], without augmentation; nothing is
        trained. As ``step``.

        In one process the rows need not be a multiple of the devices along the axis "data": then
        each of these has all rows.
        """
        split = jax.process_count() > 1 or self._splits(batch, own)
        return self._losses(*self._arrays(batch, own, parts=1, split=split), own, split)

    def _losses(self, arrays: Any, wide: Wide, own: bool, split: bool) -> torch.Tensor:
        return gathered_tensor(self._run("losses" if split else "whole_losses", own, wide, arrays))

    def _splits(self, batch: Any, own: bool) -> bool:
        """Whether the devices along the axis "data" can have equal parts of these rows."""
        size = self.ensemble.placement.size(DATA)
        return all(
            np.ndim(x) > own and x.shape[int(own)] % size == 0 for x in jax.tree.leaves(batch)
        )

    def order(
        self, size: int, epoch: int, own: bool = False, bootstrap: bool = False
    ) -> torch.Tensor:
        """The order in which ``fit`` takes ``size`` rows of data in an epoch: [size], or [n, size]
        if each member has its own.

        Args:
            size: the number of rows.
            epoch: from 0.
            own: each member has its own order.
            bootstrap: each member has its own sample of the rows, drawn with replacement, the same
                in all epochs.
        """
        return as_tensor(gathered(self._order(size, epoch, own, bootstrap))).long()

    def _order(self, size: int, epoch: int, own: bool, bootstrap: bool) -> jax.Array:
        if own or bootstrap:
            return self._program(("own_order", size, bootstrap))(self.state.keys, epoch)
        return self._program(("shared_order", size))(self.state.order, epoch)

    def _shared_order_program(self, size: int) -> Any:
        place = self.ensemble.placement

        def order(key: jax.Array, epoch: Any) -> jax.Array:
            return jax.random.permutation(
                jax.random.fold_in(jax.random.wrap_key_data(key), epoch), size
            ).astype(jnp.int32)

        return jax.jit(place.over(order, (place.spec(), place.spec()), place.spec(), False))

    def _own_order_program(self, size: int, bootstrap: bool) -> Any:
        place = self.ensemble.placement

        def one(data: jax.Array, epoch: Any) -> jax.Array:
            key = jax.random.wrap_key_data(data)
            order = jax.random.permutation(
                jax.random.fold_in(jax.random.fold_in(key, _ORDER), epoch), size
            )
            if bootstrap:
                order = jax.random.randint(jax.random.fold_in(key, _BOOTSTRAP), (size,), 0, size)[
                    order
                ]
            return order.astype(jnp.int32)

        return jax.jit(
            place.over(
                jax.vmap(one, (0, None)),
                (place.spec(MEMBER), place.spec()),
                place.spec(MEMBER),
                False,
            )
        )

    @property
    def batch_part(self) -> tuple[int, int]:
        """(index, count): in how many parts the processes share the rows of a batch, and which one
        the devices of this process keep; what a ``DistributedSampler`` calls rank and num_replicas,
        and Grain's ``ShardOptions`` shard_index and shard_count.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble, Trainer
            >>> ens = Ensemble(lambda: torch.nn.Linear(3, 1), n=4)
            >>> Trainer(ens, torch.nn.functional.mse_loss).batch_part
            (0, 1)
        """
        return self.ensemble.placement.batch_part

    @property
    def data_state(self) -> dict[str, Any] | None:
        """Where ``fit`` is in the batches of a loader, which a checkpoint keeps; None: at the first
        batch. It may be set.
        """
        return self._data_state if self._batches is None else self._batches.state()

    @data_state.setter
    def data_state(self, state: dict[str, Any] | None) -> None:
        self._batches, self._data_state = None, state

    def fit(
        self,
        data: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        own: bool = False,
        bootstrap: bool = False,
        whole_batches: bool = True,
        validation: tuple[Any, ...] | None = None,
        patience: int | None = None,
        min_delta: float = 0.0,
        keep_best: bool = False,
        checkpoint: Any = None,
        on_step: Callable[[Trainer, jax.Array], None] | None = None,
        sinks: Sink | Iterable[Sink] = (),
        log_every: int = 10,
        profile: tuple[int, int, str | os.PathLike[str]] | None = None,
    ) -> torch.Tensor:
        """Train on data that the devices keep, in an order that comes from the state, or on the
        batches of a loader; it goes on from ``position``.

        A loader is torch's DataLoader, torchdata's StatefulDataLoader, a dataset, loader or
        iterator of Grain's, or any object that can be iterated over anew for each epoch. Its
        batches are what ``step`` takes: a tuple or list of inputs and targets, or the inputs alone.
        Its position is part of a checkpoint, with the random states of torch, NumPy and Python, so
        that a resumed run gets the batches that it would have got. What has no ``state_dict`` or
        ``get_state`` loads again the batches of the epoch that were taken.

        Args:
            data: inputs and targets: tensors [N, ...], all of them in each process, of which rows
                that do not fill a batch are left out of the epoch; or a loader.
            epochs: passes over the data, counted from position 0; None: one, or with ``steps`` as
                many as it takes.
            steps: the position at which training ends, in the middle of an epoch too.
            batch_size: rows in a batch of tensors; None: all.
            own: each member has its own order of the data; a loader gives batches [n, B, ...].
            bootstrap: each member has its own sample of the tensors, drawn with replacement.
            whole_batches: with several processes the loader of each gives whole batches, the same
                in all of them, whose rows are shared out; False: it gives the rows of
                ``batch_part`` alone.
            validation: inputs and targets on which the members' losses are computed after each
                epoch; ``state.best`` has the smallest.
            patience: a member whose validation loss has not become smaller for so many epochs is
                frozen; training ends when all are.
            min_delta: by how much it has to become smaller.
            keep_best: keep the parameters at the smallest validation loss: ``snapshot("best")``.
            checkpoint: ``Checkpoints``, which restore the newest checkpoint and save others.
            on_step: called after each step with the trainer and the members' losses, a jax.Array
                [n] that may not be computed yet.
            sinks: where metrics are logged: ``JsonLines``, ``TensorBoard``, ``Wandb``, or objects
                with ``log(step, metrics)`` and ``close()``; they are closed at the end. Each
                process passes them, and those of process 0 are used.
            log_every: steps between two logs of the losses, for which training waits.
            profile: (first step, last step, folder): JAX's profiler traces these steps, counted
                from 1, into the folder, for TensorBoard, XProf or Perfetto; process 0 alone does.

        Returns:
            torch.Tensor: [steps, n], the losses of the steps that this call has taken.

        Raises:
            ValueError: the data's lengths differ, a batch has more rows than the data, or does not
                fit the mesh; the loaders of several processes do not go together, or a loader is
                not the one of the position.
            TypeError: the data are neither a tuple of tensors nor a loader whose position can be
                kept; a sink lacks a method.
            RuntimeError: a sink has failed; the message names it.

        Source: https://google-grain.readthedocs.io; https://docs.pytorch.org/docs/stable/data.html

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble, Trainer
            >>> trainer = Trainer(
            ...     Ensemble(lambda: torch.nn.Linear(3, 1), n=4),
            ...     torch.nn.functional.mse_loss,
            ...     lr=0.1,
            ... )
            >>> data = torch.randn(40, 3), torch.randn(40, 1)
            >>> trainer.fit(data, epochs=2, batch_size=8, bootstrap=True).shape
            torch.Size([10, 4])

            Three epochs more, by torch's DataLoader:

            >>> loader = torch.utils.data.DataLoader(
            ...     torch.utils.data.TensorDataset(*data), batch_size=8, shuffle=True
            ... )
            >>> trainer.fit(loader, epochs=3).shape
            torch.Size([15, 4])
        """
        if (patience is not None or keep_best) and validation is None:
            raise ValueError(
                "validation: patience and keep_best need data on which losses are computed"
            )
        for name, count in (("epochs", epochs), ("steps", steps)):
            if count is not None and count < 0:
                raise ValueError(f"{name}: expected a number that is not negative, got {count}")
        place = self.ensemble.placement
        passes = epochs if epochs is not None else 1 if steps is None else math.inf
        last = math.inf if steps is None else steps
        source = (
            self._from_tensors(tuple(data), passes, last, batch_size, own, bootstrap)
            if isinstance(data, tuple | list)
            else self._from_loader(data, passes, last, batch_size, own, bootstrap, whole_batches)
        )
        if validation is not None:
            split, seen = (
                self._splits(validation, False),
                wide_types(jax.tree.leaves(validation), self.ensemble.template),
            )
            held_out = jax.tree.map(
                lambda x: place.put_rows(x, *(DATA,) * split), tuple(validation)
            )
        history: list[jax.Array] = []
        log, window = Log(sinks, log_every), Window(profile)
        with contextlib.ExitStack() as stack:
            stack.callback(window.close)
            stepped = (
                stack.enter_context(checkpoint.training(self))
                if checkpoint is not None
                else lambda: None
            )
            stack.enter_context(log.open(self.position))
            for step, ends in source():
                if step is not None:
                    losses = window.run(self.position + 1, self._step, *step)
                    history.append(losses)
                    self.position += 1
                    log.step(self.position, losses)
                    if on_step is not None:
                        on_step(self, losses)
                done = False
                if ends and validation is not None:
                    found = self._losses(held_out, seen, False, split)
                    log.metrics(self.position, {"validation_loss": found.cpu().numpy()})
                    done = not life.early_stop(self, found, patience, min_delta, keep_best).any()
                if step is not None:
                    stepped()
                if done:
                    break
        return (
            torch.stack([as_tensor(gathered(x)) for x in history])
            if history
            else torch.empty(0, self._n)
        )

    def _from_tensors(
        self,
        data: tuple[Any, ...],
        epochs: float,
        last: float,
        batch_size: int | None,
        own: bool,
        bootstrap: bool,
    ) -> Source:
        """The steps on tensors, which the devices keep, from the position to the last one."""
        place = self.ensemble.placement
        leaves, tree = jax.tree.flatten(data)
        sizes = {x.shape[0] for x in leaves}
        if len(sizes) != 1:
            raise ValueError(
                "data: expected tensors with the same number of rows, got "
                f"{[tuple(x.shape) for x in leaves]}"
            )
        size = sizes.pop()
        rows = size if batch_size is None else batch_size
        if not 0 < rows <= size or rows % (place.size(DATA) * self.accumulate):
            raise ValueError(
                f"batch_size: expected at most the {size} rows of the data, and a multiple of "
                f"{place.size(DATA) * self.accumulate}, for "
                f'{place.size(DATA)} devices along the axis "data" and '
                f"accumulate={self.accumulate}; got {rows}"
            )
        each_own, wide, steps = (
            own or bootstrap,
            wide_types(leaves, self.ensemble.template),
            size // rows,
        )
        arrays = jax.tree.unflatten(tree, [place.put_rows(x) for x in leaves])
        cut = self._program(("cut", each_own, rows))

        def source() -> Iterator[tuple[Any, bool]]:
            epoch, order = -1, None
            while self.position < min(epochs * steps, last):
                if order is None or self.position // steps != epoch:
                    epoch = self.position // steps
                    order = self._order(size, epoch, own, bootstrap)
                i = self.position % steps
                yield ("epoch", each_own, wide, arrays, cut(order, i)), i == steps - 1

        return source

    def _from_loader(
        self,
        loader: Any,
        epochs: float,
        last: float,
        batch_size: int | None,
        own: bool,
        bootstrap: bool,
        whole: bool,
    ) -> Source:
        """The steps on the batches of a loader, from its position; that an epoch has ended is known
        after its last step.
        """
        if batch_size is not None or bootstrap:
            raise ValueError(
                "data: a loader makes the batches itself; leave batch_size and bootstrap out, or "
                "pass a tuple of tensors"
            )
        new = Batches(loader, whole)
        agreement = Agreement(0 if whole else self.batch_part[0])

        def source() -> Iterator[tuple[Any, bool]]:
            if self.position == 0:
                self.data_state = None
            batches = self._batches
            if batches is None or batches.loader is not loader or batches.whole != whole:
                batches, state = new, self.data_state
                if state is not None:
                    batches.restore(state)
                self._batches = batches
            while batches.epoch < min(epochs, batches.passes) and self.position < last:
                if batches.waiting is None or batches.waiting[0] != self.position:
                    batches.waiting = self.position, batches.next()
                batch = batches.waiting[1]
                agreement.check(batches, batch)
                if batch is None:
                    batches.waiting = None
                    yield None, True
                    continue
                # a step reads the memory of a batch later, when the loader may use it again
                batch = jax.tree.map(copied, batch)
                args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
                arrays, wide = self._arrays(args, own, self.accumulate, whole=whole)
                yield ("step", own, wide, arrays), False

        return source

    def _cut_program(self, own: bool, rows: int) -> Any:
        place = self.ensemble.placement
        axes = (MEMBER, DATA) if own else (DATA,)

        def cut(order: jax.Array, i: Any) -> jax.Array:
            found = lax.dynamic_slice_in_dim(order, i * rows, rows, -1)
            if self._data_axis is None:
                return found
            here = rows // place.size(DATA)
            return lax.dynamic_slice_in_dim(found, lax.axis_index(DATA) * here, here, -1)

        given = place.spec(MEMBER) if own else place.spec()
        return jax.jit(place.over(cut, (given, place.spec()), place.spec(*axes), False))

    # -- copies ------------------------------------------------------------------------------------
    def take(self, indices: Iterable[int], keys: bool = True) -> None:
        """Continue with copies of these members, their optimizer's state and settings, in this
        order, by one program.

        Args:
            indices: which; as many as there are members, or more, or fewer.
            keys: their random states go with them; False: lane i keeps its own, so that copies of
                one member go different ways. There must be as many indices as members then.

        Raises:
            IndexError: there is no such member.
            ValueError: a number of members that the mesh cannot keep; or that differs, and keys is
                False.
        """
        found = self.ensemble._indices(list(indices))
        place = self.ensemble.placement
        place.check(len(found))
        if not keys and len(found) != self._n:
            raise ValueError(
                f"indices: expected {self._n} with keys=False, one for each "
                f"member, got {len(found)}"
            )
        state = self.state
        kept = dataclasses.replace(
            state, order=None, shared=None, keys=state.keys if keys else None
        )
        after = place.taken(kept, np.array(found))
        self.state = dataclasses.replace(
            after, order=state.order, shared=state.shared, keys=after.keys if keys else state.keys
        )
        self._members_changed()

    def reseed(self, indices: int | Iterable[int], seed: int) -> None:
        """Let members begin anew: with the initial values and random states that they have with
        this seed, and no optimizer's state.

        They keep their settings, and become active if they were frozen.

        Args:
            indices: which.
            seed: as of an ``Ensemble`` and a ``Trainer``.

        Raises:
            IndexError: there is no such member.
            ValueError: the ensemble was made of modules, not of a function that makes them.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble, Trainer
            >>> trainer = Trainer(
            ...     Ensemble(lambda: torch.nn.Linear(3, 1), n=2), torch.nn.functional.mse_loss
            ... )
            >>> losses = trainer.step(torch.ones(8, 3), torch.ones(8, 1))
            >>> trainer.reseed(1, seed=7)
            >>> trainer.state.step.tolist()
            [1, 0]
        """
        found, before = self.ensemble._indices(indices), self.state
        self.ensemble.reseed(found, seed)
        self._members_changed()
        params = self.ensemble.params
        copies = {
            field: {name: params[name] for name in getattr(before, field)}
            for field in ("average", "best_params")
        }
        new = {**self._begun(before.numbers, seed), "numbers": before.numbers, **copies}
        old = {name: getattr(before, name) for name in new}
        anew = self.ensemble.placement.put_rows(np.isin(np.arange(self._n), found), MEMBER)
        self.state = dataclasses.replace(self.state, **_where(anew, new, old))

    def _members_changed(self) -> None:
        self.ensemble.changes += 1
        self._changes = self.ensemble.changes

    def snapshot(self, what: str = "now") -> Ensemble:
        """A copy of the ensemble: as it is "now", with the "average" of the parameters, or with the
        "best" that early stopping has kept.

        BatchNorm's running statistics are those of now.

        Raises:
            ValueError: these parameters are not kept.
        """
        state = self.state
        params = {"now": state.params, "average": state.average, "best": state.best_params}.get(
            what
        )
        if not params:
            raise ValueError(
                'what: expected "now", "average" (with ema=, or after average()) or "best" (with '
                f"keep_best), got {what!r}"
            )
        return self.ensemble.like({**state.params, **params}, state.buffers)

    def average(self) -> None:
        """Take the parameters of the active members into their average over time, each time with
        the same weight (SWA).

        Raises:
            ValueError: the trainer keeps an exponential moving average.

        Source: ``torch.optim.swa_utils.AveragedModel``
        """
        if self.ema is not None:
            raise ValueError("average: with ema= the average is taken at each step")
        state = self.state
        now = {name: state.params[name] for name in self._trained}
        average, averaged = _averaged(state.average or now, now, state.averaged, state.active)
        self.state = dataclasses.replace(state, average=average, averaged=averaged)


@jax.jit
def _where(members: jax.Array, new: Any, old: Any) -> Any:
    """The new values of these members, and the old ones of the others."""
    return jax.tree.map(
        lambda x, y: jnp.where(members.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old
    )


@jax.jit
def _averaged(average: Any, now: Any, count: jax.Array, active: jax.Array) -> Any:
    def one(a: jax.Array, p: jax.Array) -> jax.Array:
        return a + (p - a) / (count + 1).reshape(-1, *[1] * (a.ndim - 1)).astype(a.dtype)

    return _where(active, jax.tree.map(one, average, now), average), count + active


def _whole(changed: Part, read: Part, shared: Part) -> TrainState:
    """The state of which a program gets three parts."""
    return TrainState(**dict.fromkeys(FIELDS) | changed | read | {"shared": shared})


def _of_vma(error: Exception) -> bool:
    """Whether shard_map's check of varying axes stumbled over an operator; a program without the
    check may be right.
    """
    return any(
        words in str(error) for words in ("{V:", "varying", "manual axis types", "check_vma")
    )


__all__ = ["Trainer"]
