"""BatchEnsemble: members that share each weight matrix and differ by a rank-one factor of it, which
costs a member little more than two vectors for each layer.

Wen, Tran and Ba 2020, https://arxiv.org/abs/2002.06715. With W of the shape [out, in], member i has
the weight W * outer(s_i, r_i), so that its layer is ``((x * r_i) @ W.T) * s_i + b_i``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
import torch
from torch import nn

from torchfunc_jax import functional_call, grad, jit, vmap
from torchfunc_jax.ensemble import Trainer

__all__ = ["JointSteps", "RankOneLinear", "with_rank_one_factors"]


class RankOneLinear(nn.Module):
    """A linear layer with a weight that is not trained and may be shared, and two factors and a
    bias that are trained.

    Args:
        layer: whose weight and bias it begins with.

    Attributes:
        weight: [out, in], without a gradient.
        r, s: [in] and [out], the factors, 1 or -1 at first, by torch's random numbers.
        bias: [out], or None.

    Example:
        >>> import torch
        >>> from torchfunc_jax.examples.batch_ensemble import RankOneLinear
        >>> layer = RankOneLinear(torch.nn.Linear(3, 2))
        >>> layer(torch.ones(5, 3)).shape, [name for name, p in layer.named_parameters()]
        (torch.Size([5, 2]), ['weight', 'r', 's', 'bias'])
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        outputs, inputs = layer.weight.shape
        self.r = nn.Parameter(torch.randint(2, (inputs,)) * 2.0 - 1)
        self.s = nn.Parameter(torch.randint(2, (outputs,)) * 2.0 - 1)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(x * self.r, self.weight) * self.s
        return out if self.bias is None else out + self.bias


def with_rank_one_factors(model: nn.Module) -> nn.Module:
    """A copy of a model in which each linear layer is a ``RankOneLinear``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Ensemble
        >>> from torchfunc_jax.examples.batch_ensemble import with_rank_one_factors
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        ... )
        >>> ens = Ensemble(lambda: with_rank_one_factors(model), n=16, shared=True)
        >>> ens.shared["0.weight"].shape, ens.params["0.r"].shape
        ((64, 8), (16, 8))
    """
    if isinstance(model, nn.Linear):
        return RankOneLinear(model)
    found = copy.deepcopy(model)
    for name, layer in list(found.named_modules()):
        if isinstance(layer, nn.Linear):
            found.set_submodule(name, RankOneLinear(layer))
    return found


class JointSteps:
    """Steps in which what the members share is trained too, by the mean of their gradients, as in
    the paper.

    The trainer takes its step of the members; beside it a program of torchfunc_jax's transforms has
    the gradient of the shared parameters, at the values before the step. A checkpoint of the
    trainer has a digest of what is shared alone: ``Ensemble.save`` keeps the values.

    Args:
        trainer: of an ensemble whose members share parameters.
        loss: ``loss(outputs, *targets)``, as the trainer's.
        optimizer: Optax's, of the shared parameters.

    Example:
        >>> import optax, torch
        >>> from torchfunc_jax.ensemble import Ensemble, Trainer
        >>> from torchfunc_jax.examples.batch_ensemble import JointSteps, with_rank_one_factors
        >>> model = torch.nn.Linear(3, 1)
        >>> ens = Ensemble(lambda: with_rank_one_factors(model), n=4, shared=True)
        >>> loss = torch.nn.functional.mse_loss
        >>> step = JointSteps(Trainer(ens, loss, lr=0.01), loss, optax.adam(1e-3))
        >>> step(torch.ones(8, 3), torch.ones(8, 1)).shape
        torch.Size([4])
    """

    def __init__(
        self, trainer: Trainer, loss: Callable[..., Any], optimizer: optax.GradientTransformation
    ) -> None:
        self.trainer, template = trainer, trainer.ensemble.template
        names = {name for name, _ in template.named_parameters()} & trainer.ensemble.shared.keys()

        def mean_loss(
            weights: Any, rest: Any, params: Any, buffers: Any, inputs: Any, targets: Any
        ) -> Any:
            def one(params: Any, buffers: Any) -> Any:
                values = {**weights, **rest, **params, **buffers}
                return loss(functional_call(template, values, (inputs,)), *targets)

            return vmap(one)(params, buffers).mean()

        gradient = jit(grad(mean_loss))

        def update(weights: Any, moments: Any, gradient: Any) -> Any:
            updates, moments = optimizer.update(gradient, moments, weights)
            return optax.apply_updates(weights, updates), moments

        self._names, self._gradient, self._update = names, gradient, jax.jit(update)
        self._moments = optimizer.init(self._weights())

    def _weights(self) -> dict[str, jax.Array]:
        return {name: x for name, x in self.trainer.ensemble.shared.items() if name in self._names}

    def __call__(self, inputs: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        """All members take a step, and what they share takes one.

        Args:
            inputs, targets: [B, ...], which all members see.

        Returns:
            torch.Tensor: [n], each member's loss before the step.
        """
        ensemble, weights = self.trainer.ensemble, self._weights()
        rest = {name: x for name, x in ensemble.shared.items() if name not in weights}
        gradient = self._gradient(weights, rest, ensemble.params, ensemble.buffers, inputs, targets)
        losses = self.trainer.step(inputs, *targets)
        weights, self._moments = self._update(weights, self._moments, gradient)
        state = self.trainer.state
        self.trainer.state = dataclasses.replace(state, shared={**state.shared, **weights})
        return losses
