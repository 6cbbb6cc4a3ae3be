"""Steps of fused optimizers, which take lists of parameters, gradients and states, and what
torch.amp.GradScaler does between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from bridge.lowering.common.promotion import cast, opmath
from bridge.lowering.registry import lowering

_Lists = tuple[list[Array], ...]


def _stepped(
    step: Any, lists: Sequence[Sequence[Array]], scale: Array | None, found_inf: Array | None
) -> _Lists:
    """The new entries of the lists, of which the first are the parameters and the gradients.

    step: makes the new values of one parameter and its states from the parameter, its gradient
    without the scale of the loss, and its states. found_inf: 1 if nothing is to change, because a
    gradient of a scaled loss was not finite.
    """
    made = []
    for i, old in enumerate(zip(*[x for x in lists if len(x)], strict=True)):
        p, g, *states = [cast(x, opmath(x.dtype)) for x in old]
        if scale is not None:
            g = g / cast(scale, g.dtype)
        new = [cast(x, o.dtype) for x, o in zip(step(i, p, g, *states), old, strict=True)]
        if found_inf is not None:
            new = [jnp.where(found_inf == 1, o, x) for x, o in zip(new, old, strict=True)]
        made.append(new)
    columns = iter(zip(*made, strict=True))
    return tuple([list(next(columns)) if len(x) and made else [] for x in lists])


def _adam(decoupled: bool) -> Any:
    def lowered(
        self: Sequence[Array],
        grads: Sequence[Array],
        exp_avgs: Sequence[Array],
        exp_avg_sqs: Sequence[Array],
        max_exp_avg_sqs: Sequence[Array],
        state_steps: Sequence[Array],
        *,
        lr: Any,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Array | None = None,
        found_inf: Array | None = None,
    ) -> _Lists:
        """_fused_adam(Tensor[] self, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs,
        Tensor[] max_exp_avg_sqs, Tensor[] state_steps, *, float lr, float beta1, float beta2, float
        weight_decay, float eps, bool amsgrad, bool maximize, Tensor? grad_scale=None, Tensor?
        found_inf=None) -> (Tensor[] self_out, Tensor[] grads_out, Tensor[] exp_avgs_out, Tensor[]
        exp_avg_sqs_out, Tensor[] max_exp_avg_sqs_out)
        """

        def step(i: int, p: Array, g: Array, mean: Array, square: Array, *most: Array) -> Any:
            unscaled, dtype = g, p.dtype
            g = -g if maximize else g
            rate = jnp.asarray(lr, jnp.float64)
            if decoupled:
                p = p * cast(1 - rate * weight_decay, dtype)
            else:
                g = g + p * weight_decay
            mean = mean + (g - mean) * (1 - beta1)
            square = square * beta2 + g * g * (1 - beta2)
            most = tuple([jnp.maximum(x, square) for x in most])
            count = state_steps[i].astype(jnp.float64)
            size = cast(rate / (1 - beta1**count), dtype)
            root = cast(jnp.sqrt(1 - beta2**count), dtype)
            p = p - size * mean / (jnp.sqrt(most[0] if most else square) / root + eps)
            return p, unscaled, mean, square, *most

        states = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad else [])
        return _stepped(step, (self, grads, *states), grad_scale, found_inf)

    return lowered


lowering("aten._fused_adam", "aten._fused_adam.tensor_lr")(_adam(False))
lowering("aten._fused_adamw", "aten._fused_adamw.tensor_lr")(_adam(True))


@lowering("aten._fused_sgd", "aten._fused_sgd.tensor_lr")
def aten_fused_sgd(
    self: Sequence[Array],
    grads: Sequence[Array],
    momentum_buffer_list: Sequence[Array],
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> _Lists:
    """_fused_sgd(Tensor[] self, Tensor[] grads, Tensor[] momentum_buffer_list, *, float
    weight_decay, float momentum, float lr, float dampening, bool nesterov, bool maximize, bool
    is_first_step, Tensor? grad_scale=None, Tensor? found_inf=None) -> (Tensor[] self_out, Tensor[]
    grads_out, Tensor[] momentum_buffer_list_out)
    """

    def step(i: int, p: Array, g: Array, *velocity: Array) -> Any:
        unscaled = g
        g = (-g if maximize else g) + p * weight_decay
        if velocity:
            new = g if is_first_step else velocity[0] * momentum + g * (1 - dampening)
            velocity = (new,)
            g = g + new * momentum if nesterov else new
        return p - g * cast(jnp.asarray(lr), p.dtype), unscaled, *velocity

    return _stepped(step, (self, grads, momentum_buffer_list), grad_scale, found_inf)


@lowering("aten._fused_adagrad.tensor_lr")
def aten_fused_adagrad(
    self: Sequence[Array],
    grads: Sequence[Array],
    state_sums: Sequence[Array],
    state_steps: Sequence[Array],
    *,
    lr: Any,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> _Lists:
    """_fused_adagrad.tensor_lr(Tensor[] self, Tensor[] grads, Tensor[] state_sums, Tensor[]
    state_steps, *, Tensor lr, float lr_decay, float weight_decay, float eps, bool maximize, Tensor?
    grad_scale=None, Tensor? found_inf=None) -> (Tensor[] self_out, Tensor[] grads_out, Tensor[]
    state_sums_out)
    """

    def step(i: int, p: Array, g: Array, total: Array) -> Any:
        unscaled = g
        g = (-g if maximize else g) + p * weight_decay
        total = total + g * g
        count = state_steps[i].astype(jnp.float64)
        rate = cast(jnp.asarray(lr, jnp.float64) / (1 + (count - 1) * lr_decay), p.dtype)
        return p - rate * g / (jnp.sqrt(total) + eps), unscaled, total

    return _stepped(step, (self, grads, state_sums), grad_scale, found_inf)


@lowering("aten._fused_adagrad")
def aten_fused_adagrad_of_number(
    self: Sequence[Array],
    grads: Sequence[Array],
    state_sums: Sequence[Array],
    state_steps: Sequence[Array],
    **options: Any,
) -> _Lists:
    """The same for a number as the rate, which has the counts of steps as results too."""
    found = aten_fused_adagrad(self, grads, state_sums, state_steps, **options)
    return (*found, list(state_steps))


@lowering("aten._amp_foreach_non_finite_check_and_unscale")
def aten_amp_unscale(self: Sequence[Array], found_inf: Array, inv_scale: Array) -> Any:
    """_amp_foreach_non_finite_check_and_unscale(Tensor[] self, Tensor found_inf, Tensor inv_scale)
    -> (Tensor[] self_out, Tensor found_inf_out)
    """
    found = found_inf
    for x in self:
        found = jnp.where(jnp.isfinite(x).all(), found, jnp.ones_like(found))
    return [cast(cast(x, opmath(x.dtype)) * inv_scale, x.dtype) for x in self], found


@lowering("aten._amp_update_scale")
def aten_amp_update_scale(
    self: Array,
    growth_tracker: Array,
    found_inf: Array,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> tuple[Array, Array]:
    """_amp_update_scale(Tensor self, Tensor growth_tracker, Tensor found_inf, float
    scale_growth_factor, float scale_backoff_factor, int growth_interval) -> (Tensor, Tensor
    growth_tracker_out)
    """
    infinite = (found_inf != 0).reshape(())
    count = growth_tracker + 1
    grows = count == growth_interval
    larger = self * scale_growth_factor
    scale = jnp.where(grows & jnp.isfinite(larger), larger, self)
    return (
        cast(jnp.where(infinite, self * scale_backoff_factor, scale), self.dtype),
        cast(jnp.where(infinite | grows, 0, count), growth_tracker.dtype),
    )
