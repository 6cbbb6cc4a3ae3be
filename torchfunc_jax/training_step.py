"""A training step as a module: parameters, buffers and the optimizer's state are its tensors, so
that ``export`` takes all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

import bridge
from bridge.convert import trees
from bridge.intercepted.control_flow import scan, traced
from torchfunc_jax.ensemble.optimizers import find
from torchfunc_jax.functional_call import functional_call


class TrainingStep(nn.Module):
    """One step of training: ``step(*batch)`` changes the module and the optimizer's state in place,
    and returns the loss.

    It is a module like any other: ``jit(step)`` compiles it, and ``export(step, *batch)`` makes it
    a StableHLO program with all of its tensors as weights,
    ``(weights, *batch) -> (loss, new weights)``, which trains where PyTorch is not installed.

    Args:
        module: it is trained, in the mode in which it is when the step is called; parameters with
            ``requires_grad=False`` stay.
        loss: ``loss(module, *batch)``, a torch function that returns a tensor without dimensions.
        optimizer: "sgd", "adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adagrad",
            "adadelta" or "rprop", as in torch.optim; or Optax's: a function that makes one of
            numbers (``optax.adam``), or a finished one (``optax.adam(1e-3)``).
        accumulate: the batch is run in so many equal parts, one after another, so that the memory
            is that of a part; loss and gradients are the averages over the parts. Tensors of the
            batch are divided along their first dimension; those without dimensions, and what is no
            tensor, go to each part. In a program it is a loop, in which random operators draw by
            keys, and not PyTorch's numbers. An export has a batch of fixed size then:
            ``export(step, *batch, batch=None)``.
        numbers: of the optimizer, by torch.optim's names (Optax's for Optax's): ``lr``,
            ``momentum``, ``betas``, ``nesterov``, ...

    Returns:
        torch.Tensor: the loss before the step, from a call.

    Raises:
        ValueError: there is no such optimizer, the module has no parameter to train, or accumulate
            is no positive integer; (by the call) it does not divide the batch.
        TypeError: the optimizer has no such number.
        RuntimeError: (by the call) the loss does not depend on one of the parameters.

    Source: ``torch.optim.Optimizer.step``;
    https://optax.readthedocs.io/en/latest/api/optimizers.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import export
        >>> from torchfunc_jax.training_step import TrainingStep
        >>> loss = lambda model, x, y: torch.nn.functional.mse_loss(model(x), y)
        >>> step = TrainingStep(torch.nn.Linear(3, 1), loss, "sgd", lr=0.1, momentum=0.9)
        >>> exported = export(step, torch.ones(8, 3), torch.zeros(8, 1))
        >>> sorted(exported.written)
        ['module.bias', 'module.weight', 'optimizer.buffer/bias', 'optimizer.buffer/weight',
        'optimizer.count']
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[..., torch.Tensor],
        optimizer: Any = "adam",
        *,
        accumulate: int = 1,
        **numbers: Any,
    ) -> None:
        super().__init__()
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate: expected a positive integer, got {accumulate!r}")
        self.module, self.loss, self.accumulate = module, loss, accumulate
        rule = find(optimizer, numbers)
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        if not self._names:
            raise ValueError(
                "module: expected a parameter that requires grad, got none; "
                "nothing would be trained"
            )
        values = {name: bridge.to_jax(t) for name, t in self._trained().items()}
        self.optimizer = nn.Module()
        paths, spec = jax.tree_util.tree_flatten_with_path(rule.init(values, rule.numbers))
        self._slots = []
        for path, x in paths:
            self._slots.append(
                jax.tree_util.keystr(path, simple=True, separator="/").replace(".", "/")
            )
            self.optimizer.register_buffer(self._slots[-1], bridge.to_torch(jnp.asarray(x)).clone())

        def update(
            params: dict[str, jax.Array], grads: dict[str, jax.Array], leaves: list[jax.Array]
        ) -> Any:
            every = jax.tree.map(jnp.asarray, dict(rule.numbers))
            after, state = rule.update(
                grads, jax.tree.unflatten(spec, leaves), params, every, jnp.array(True)
            )
            return after, jax.tree.leaves(state)

        self._update = bridge.from_jax(update)

    def _trained(self) -> dict[str, torch.Tensor]:
        own = dict(self.module.named_parameters())
        return {name: own[name] for name in self._names}

    def _gradients(self, batch: tuple[Any, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss, and the gradients of what is trained."""
        params = list(self._trained().values())
        if self.accumulate == 1:
            with torch.enable_grad():
                loss = self.loss(self.module, *batch)
                return loss, list(torch.autograd.grad(loss, params))
        leaves, spec = trees.flatten(batch)
        split = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.ndim]
        if not split:
            raise ValueError(
                f"batch: expected a tensor to divide, for accumulate={self.accumulate}, got none"
            )
        parts = [self._divided(leaves[k]) for k in split]
        called = _Loss(self.module, self.loss)
        own = dict(called.named_buffers())

        def step(carry: Any, rows: list[torch.Tensor]) -> Any:
            totals, buffers = carry
            given = leaves[:]
            for k, x in zip(split, rows, strict=True):
                given[k] = x
            with torch.enable_grad():
                loss = functional_call(called, buffers, tuple(trees.unflatten(spec, given)))
                grads = torch.autograd.grad(loss, params)
            return ([a + b for a, b in zip(totals, grads, strict=True)], buffers), loss.detach()

        carry: Any = (
            [torch.zeros_like(p) for p in params],
            {name: b.clone() for name, b in own.items()},
        )
        if traced(parts):
            carry, losses = scan(step, carry, parts)
        else:
            found = []
            for rows in zip(*parts, strict=True):
                carry, loss = step(carry, list(rows))
                found.append(loss)
            losses = torch.stack(found)
        totals, buffers = carry
        with torch.no_grad():
            for name, b in own.items():
                b.copy_(buffers[name])
        return losses.mean(), [t / self.accumulate for t in totals]

    def _divided(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % self.accumulate:
            raise ValueError(
                f"batch: expected a multiple of {self.accumulate} rows, for accumulate="
                f"{self.accumulate}, got shape {tuple(x.shape)}"
            )
        return x.unflatten(0, (self.accumulate, -1))

    def forward(self, *batch: Any) -> torch.Tensor:
        params = self._trained()
        loss, grads = self._gradients(batch)
        slots = [getattr(self.optimizer, name) for name in self._slots]
        with torch.no_grad():
            after, state = self._update(
                {name: p.detach() for name, p in params.items()},
                dict(zip(params, grads, strict=True)),
                [x.detach() for x in slots],
            )
            for t, new in (
                *((p, after[name]) for name, p in params.items()),
                *zip(slots, state, strict=True),
            ):
                t.copy_(new)
        return loss.detach()


class _Loss(nn.Module):
    """The loss of a module as a module, whose buffers can be others for a call."""

    def __init__(self, module: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, *batch: Any) -> torch.Tensor:
        return self.loss(self.module, *batch)


__all__ = ["TrainingStep"]
