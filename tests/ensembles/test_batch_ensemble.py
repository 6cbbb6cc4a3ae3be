"""BatchEnsemble by ``Ensemble(shared=...)``: step by step what plain torch trains, with the shared
weights fixed and with the shared weights trained by all members.
"""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from torchfunc_jax.ensemble import Ensemble, Trainer, predict
from torchfunc_jax.examples.batch_ensemble import JointSteps, RankOneLinear, with_rank_one_factors

N, FEATURES, WIDTH, CLASSES, STEPS = 4, 6, 16, 3, 12


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(20, FEATURES, generator=draw)
    return x, (x[:, :CLASSES] + x[:, CLASSES:]).argmax(1)


def ensemble() -> Ensemble:
    base = model()
    return Ensemble(lambda: with_rank_one_factors(base), N, seed=3, shared=True)


def close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_a_layer_is_a_linear_one_with_a_rank_one_factor_of_its_weight() -> None:
    torch.manual_seed(1)
    layer = RankOneLinear(nn.Linear(5, 3))
    with torch.no_grad():
        layer.r.normal_(), layer.s.normal_()
    x = torch.randn(7, 5)
    close(layer(x), x @ (layer.weight * torch.outer(layer.s, layer.r)).T + layer.bias)
    assert RankOneLinear(nn.Linear(5, 3, bias=False)).bias is None


def test_members_cost_two_vectors_and_a_bias() -> None:
    ens = ensemble()
    size = lambda rows: sum(x.size for x in rows.values())
    weights = FEATURES * WIDTH + WIDTH * CLASSES
    assert size(ens.shared) == weights
    # r, s and the bias of each layer
    assert size(ens.params) == N * ((FEATURES + 2 * WIDTH) + (WIDTH + 2 * CLASSES))


def test_over_fixed_weights_each_member_is_a_run_of_torch() -> None:
    ens, rates = ensemble(), np.geomspace(1e-3, 1e-1, N)
    trainer, members = Trainer(ens, cross_entropy, "adam", lr=rates), list(ens)
    optimizers = [
        torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=lr)
        for m, lr in zip(members, rates, strict=True)
    ]
    for step in range(STEPS):
        losses = trainer.step(*batch(step))
        for i, (member, optimizer) in enumerate(zip(members, optimizers, strict=True)):
            optimizer.zero_grad()
            inputs, labels = batch(step)
            loss = cross_entropy(member(inputs), labels)
            loss.backward()
            optimizer.step()
            close(losses[i], loss.detach())
            close(ens.state_dict(i), member.state_dict())


@pytest.mark.parametrize("mesh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_trained_weights_it_is_one_model_of_torch(mesh: bool) -> None:
    """In torch the members hold the same weight tensors, and one loss is the sum over the members;
    the gradient of a weight is divided by their number.
    """
    base = model()
    ens = Ensemble(
        lambda: with_rank_one_factors(base),
        N,
        seed=3,
        mesh=jax.make_mesh((1, 1), ("member", "data")) if mesh else None,
        shared=True,
    )
    members = list(ens)
    trainer = Trainer(ens, cross_entropy, "adam", lr=0.02)
    take = JointSteps(trainer, cross_entropy, optax.sgd(0.3, momentum=0.9))
    weights = [copy.deepcopy(members[0][k].weight).requires_grad_() for k in (0, 2)]
    for member in members:
        member[0].weight, member[2].weight = weights
    own = [p for m in members for name, p in m.named_parameters() if "weight" not in name]
    first = torch.optim.Adam(own, lr=0.02)
    second = torch.optim.SGD(weights, lr=0.3, momentum=0.9)
    began = [w.detach().clone() for w in weights]
    for step in range(STEPS):
        losses = take(*batch(step))
        inputs, labels = batch(step)
        every = torch.stack([cross_entropy(m(inputs), labels) for m in members])
        first.zero_grad(), second.zero_grad()
        every.sum().backward()
        for weight in weights:
            weight.grad /= N
        first.step(), second.step()
        close(losses, every.detach())
        for i, member in enumerate(members):
            close(ens.state_dict(i), member.state_dict())
    assert all((w - b).abs().max() > 0.01 for w, b in zip(weights, began, strict=True))
    assert predict(ens, batch(0)[0]).probability.shape == (20, CLASSES)
