"""What happens to members during training: early stopping, successive halving, and population based
training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.errors import public
from torchfunc_jax.ensemble.meshes import MEMBER, gathered, gathered_tensor


class _Trainer(Protocol):
    """What these functions need of a ``Trainer``."""

    ensemble: Any
    state: Any

    def take(self, indices: Any, keys: bool = True) -> None: ...


def _scores(trainer: _Trainer, values: Any, name: str) -> np.ndarray:
    """Values [n] on the host; NaN counts as the worst, infinity."""
    values = values.detach().cpu() if isinstance(values, torch.Tensor) else values
    found = gathered(values) if isinstance(values, jax.Array) else np.asarray(values)
    if found.shape != (len(trainer.ensemble),):
        raise ValueError(
            f"{name}: expected {len(trainer.ensemble)} numbers, one for each member, got shape "
            f"{found.shape}"
        )
    return np.nan_to_num(found.astype(np.float32), nan=np.inf, posinf=np.inf, neginf=-np.inf)


@public
def early_stop(
    trainer: _Trainer,
    values: Any,
    patience: int | None,
    min_delta: float = 0.0,
    keep_best: bool = False,
) -> torch.Tensor:
    """Freeze the members whose value has not become smaller for a while; a frozen member takes no
    more steps.

    Args:
        trainer: whose state is changed.
        values: [n], such as validation losses; NaN is never better.
        patience: after so many values in a row that are no better; None: no member is frozen.
        min_delta: by how much a value has to be smaller than the best.
        keep_best: keep the parameters at the best value, for ``Trainer.snapshot("best")``.

    Returns:
        torch.Tensor: bool, [n], which members are active.

    Raises:
        ValueError: the values are not [n]; patience is not positive.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Ensemble, Trainer, early_stop
        >>> trainer = Trainer(
        ...     Ensemble(lambda: torch.nn.Linear(3, 1), n=2), torch.nn.functional.mse_loss
        ... )
        >>> for values in ([1.0, 1.0], [0.5, 1.5]):
        ...     active = early_stop(trainer, values, patience=1)
        >>> active
        tensor([ True, False])
    """
    if patience is not None and patience < 1:
        raise ValueError(f"patience: expected a positive integer, got {patience}")
    state, place = trainer.state, trainer.ensemble.placement
    given = place.put_rows(_scores(trainer, values, "values"), MEMBER)
    limit = np.iinfo(np.int32).max if patience is None else patience
    best = (state.best_params or state.params) if keep_best else {}
    counters = state.best, state.waited, state.active
    *counters, best = _stopped(
        counters, given, limit, min_delta, best, state.params if keep_best else {}
    )
    after = dict(zip(("best", "waited", "active"), counters, strict=True))
    trainer.state = dataclasses.replace(state, **after, best_params=best or state.best_params)
    return gathered_tensor(after["active"])


@jax.jit
def _stopped(
    counters: Any, values: jax.Array, patience: Any, min_delta: Any, best_params: Any, params: Any
) -> Any:
    best, waited, active = counters
    better = active & (values < best - min_delta)
    waited = jnp.where(active, jnp.where(better, 0, waited + 1), waited)

    def one(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(better.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return (
        jnp.where(better, values, best),
        waited,
        active & (waited < patience),
        jax.tree.map(one, best_params, params),
    )


@public
def halve(trainer: _Trainer, scores: Any, keep: float = 0.5) -> list[int]:
    """Successive halving: go on with the best members alone, in their order.

    Args:
        trainer: whose ensemble becomes smaller.
        scores: [n]; smaller is better, NaN is worst.
        keep: which part of them remains; their number is rounded up to what the mesh can keep.

    Returns:
        list: the indices of the members that remain.

    Raises:
        ValueError: the scores are not [n]; keep is not between 0 and 1.

    Source: Jamieson and Talwalkar, https://arxiv.org/abs/1502.07943

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Ensemble, Trainer, halve
        >>> trainer = Trainer(
        ...     Ensemble(lambda: torch.nn.Linear(3, 1), n=4), torch.nn.functional.mse_loss
        ... )
        >>> halve(trainer, [0.3, 0.1, float("nan"), 0.2]), len(trainer.ensemble)
        ([1, 3], 2)
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep: expected a number above 0 and at most 1, got {keep}")
    found, step = _scores(trainer, scores, "scores"), trainer.ensemble.placement.size(MEMBER)
    kept = min(len(found), -(-max(1, round(keep * len(found))) // step) * step)
    best = sorted(np.argsort(found, kind="stable")[:kept].tolist())
    trainer.take(best)
    return best


@public
def exploit(
    trainer: _Trainer,
    scores: Any,
    fraction: float = 0.25,
    perturb: Mapping[str, tuple[float, ...]] | None = None,
    seed: int = 0,
) -> list[int]:
    """Population based training: the worst members become copies of some of the best, and their
    copied numbers are perturbed.

    Weights, buffers, optimizer state and numbers are copied by one gather; the copies keep their
    own random states.

    Args:
        trainer: whose state is changed.
        scores: [n]; smaller is better, NaN is worst.
        fraction: which part is replaced, by members drawn from the best part of the same size; at
            most a half.
        perturb: the name of a number -> factors, of which each copy draws one; None: {"lr": (0.8,
            1.2)}.
        seed: of the draws; each call with the same seed at the same step draws the same, in all
            processes.

    Returns:
        list: for each member, the index of the one it is a copy of; its own where it was kept.

    Raises:
        ValueError: the scores are not [n]; fraction is not between 0 and 0.5; the trainer has no
            such number.

    Source: Jaderberg et al., https://arxiv.org/abs/1711.09846

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Ensemble, Trainer, exploit
        >>> trainer = Trainer(
        ...     Ensemble(lambda: torch.nn.Linear(3, 1), n=4), torch.nn.functional.mse_loss, lr=0.1
        ... )
        >>> exploit(trainer, [0.3, 0.1, 0.4, 0.2], fraction=0.25)
        [0, 1, 1, 3]
    """
    if not 0 < fraction <= 0.5:
        raise ValueError(f"fraction: expected a number above 0 and at most 0.5, got {fraction}")
    factors = {"lr": (0.8, 1.2)} if perturb is None else perturb
    for name in factors:
        if not isinstance(trainer.state.numbers.get(name), jax.Array):
            raise ValueError(
                f"perturb: the trainer has no number {name!r} for each member; it has "
                f"{', '.join(trainer.state.numbers)}"
            )
    found = _scores(trainer, scores, "scores")
    n, count = len(found), max(1, int(fraction * len(found)))
    ranked = np.argsort(found, kind="stable")
    draw = np.random.default_rng([seed, int(gathered(trainer.state.step).max())])
    sources = np.arange(n)
    sources[ranked[n - count :]] = draw.choice(ranked[:count], count)
    trainer.take(sources.tolist(), keys=False)
    copied, place, state = sources != np.arange(n), trainer.ensemble.placement, trainer.state
    numbers = dict(state.numbers)
    for name, choices in factors.items():
        scale = np.where(copied, draw.choice(np.asarray(choices, np.float64), n), 1.0).astype(
            numbers[name].dtype
        )
        numbers[name] = _product(numbers[name], place.put_rows(scale, MEMBER))
    trainer.state = dataclasses.replace(state, numbers=numbers)
    return sources.tolist()


@jax.jit
def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return x * y


__all__ = ["early_stop", "exploit", "halve"]
