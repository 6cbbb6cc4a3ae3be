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
from torchfunc_jax.ensemble.optimizers import find


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
        numbers: of the optimizer, by torch.optim's names (Optax's for Optax's): ``lr``,
            ``momentum``, ``betas``, ``nesterov``, ...

    Returns:
        torch.Tensor: the loss before the step, from a call.

    Raises:
        ValueError: there is no such optimizer, or the module has no parameter to train.
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
        **numbers: Any,
    ) -> None:
        super().__init__()
        self.module, self.loss = module, loss
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

    def forward(self, *batch: Any) -> torch.Tensor:
        params = self._trained()
        with torch.enable_grad():
            loss = self.loss(self.module, *batch)
            grads = torch.autograd.grad(loss, list(params.values()))
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


__all__ = ["TrainingStep"]
