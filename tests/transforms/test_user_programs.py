"""Whole small programs as people write them, whose state changes from call to call: each beside
torch.func and plain PyTorch.

A program is a function of the transforms, ``api``: torch.func with a jit that does nothing, or
torchfunc_jax. It returns what it saw.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import same
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchfunc_jax

PROGRAMS: dict[str, Callable[[Any], Any]] = {}


class Eager:
    """torch.func, with a jit that gives the function back."""

    @staticmethod
    def jit(function: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.func, name)


def program(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    PROGRAMS[function.__name__] = function
    return function


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def values(*modules: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for m in modules for t in (*m.parameters(), *m.buffers())]


# -- training --------------------------------------------------------------------------------------
@program
def clipped_gradients_and_a_schedule(api: Any) -> Any:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(16, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loss = api.jit(lambda x, y, weight: F.mse_loss(model(x), y) * weight)
    losses = []
    for i in range(4):
        optimizer.zero_grad()
        found = loss(x, x.sum(1, keepdim=True), 1.0 + i / 3)
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step(), schedule.step()
        losses.append(found.detach())
    return losses, values(model)


@program
def layers_are_frozen_and_trained_again(api: Any) -> Iterator[Any]:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    loss = api.jit(lambda x: model(x).sum())
    for frozen in (True, False, True):
        model[0].requires_grad_(not frozen)
        model.zero_grad(set_to_none=True)
        loss(x).backward()
        yield gradients(model)


@program
def generator_and_critic(api: Any) -> Any:
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator)]
    noise, real = torch.randn(6, 2), torch.randn(6, 3)
    steps = [
        api.jit(
            lambda: (
                F.softplus(critic(generator(noise).detach())).mean()
                + F.softplus(-critic(real)).mean()
            )
        ),
        api.jit(lambda: F.softplus(-critic(generator(noise))).mean()),
    ]
    for _ in range(3):
        for step, optimizer in zip(steps, optimizers, strict=True):
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
    return values(generator, critic)


@program
def the_average_of_the_weights(api: Any) -> Iterator[Any]:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    difference = api.jit(lambda x: model(x) - average(x))
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(0.1)
        average.update_parameters(model)
        yield difference(x).detach()


@program
def hooks_of_parameters_come_and_go(api: Any) -> Iterator[Any]:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    loss = api.jit(lambda x: model(x).pow(2).sum())
    handle = model.weight.register_hook(lambda g: g * 2)
    loss(x).backward()
    yield gradients(model)
    handle.remove()
    loss(x).backward()
    yield gradients(model)
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 3))
    loss(x).backward()
    yield gradients(model)


@program
def checkpointed_layers(api: Any) -> Any:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(4, 3)
    api.jit(lambda x: checkpoint(model, x, use_reentrant=False).sum())(x).backward()
    return gradients(model)


@program
def one_of_two_heads(api: Any) -> Iterator[Any]:
    body, heads, x = (
        nn.Linear(3, 4),
        nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)]),
        torch.randn(5, 3),
    )
    both = api.jit(lambda x: [head(body(x).tanh()).sum() for head in heads])
    for i in (0, 1):
        heads.zero_grad(set_to_none=True)
        both(x)[i].backward()
        yield gradients(heads)


# -- modules that change ---------------------------------------------------------------------------
@program
def parametrizations(api: Any) -> Any:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 2)),
    )
    x, found = torch.randn(4, 3), []
    loss = api.jit(lambda x: model(x).pow(2).sum())
    for _ in range(3):
        found.append(loss(x))
        found[-1].backward()
    model.eval()
    found.append(loss(x))
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    found.append(loss(x))
    return [t.detach() for t in found], gradients(model)


class Adapter(nn.Module):
    """A low-rank update of a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.scale, self.on = layer, 0.5, True
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + (
            self.scale * F.linear(F.linear(x, self.down), self.up) if self.on else 0
        )


@program
def an_adapter_is_put_in_and_taken_out(api: Any) -> Iterator[Any]:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    model = nn.Sequential(layer, nn.Tanh())
    call = api.jit(lambda x: model(x))
    yield call(x).detach()
    model[0] = adapter = Adapter(layer)
    yield call(x).detach()
    adapter.scale = 2.0
    yield call(x).detach()
    adapter.on = False
    yield call(x).detach()
    model[0] = layer
    yield call(x).detach()


@program
def batch_norm_with_other_settings(api: Any) -> Iterator[Any]:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(8, 3)
    call = api.jit(lambda x: model(x))
    for momentum in (0.1, 0.5, 0.0):
        model[1].momentum = momentum
        yield call(x).detach(), values(model)
    model[1].eval()
    yield call(x).detach()
    model[1].eps = 0.1
    yield call(x).detach()
    model[1].reset_running_stats()
    yield call(x).detach()


@program
def dropout_that_is_switched(api: Any) -> Iterator[Any]:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval(), torch.randn(2, 3)
    call = api.jit(lambda x: model(x))
    yield call(x).detach()
    model.train()
    model[1].p = 0.0
    yield call(x).detach()


@program
def weights_are_loaded_and_cast(api: Any) -> Iterator[Any]:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)
    state = copy.deepcopy(model.state_dict())
    call = api.jit(lambda x: model(x))
    yield call(x).detach()
    with torch.no_grad():
        model[0].weight.mul_(3)
    yield call(x).detach()
    model.load_state_dict(state)
    yield call(x).detach()
    model.load_state_dict({name: t * 2 for name, t in state.items()}, assign=True)
    yield call(x).detach()
    model.double()
    yield call(x.double()).detach()
    model.float()
    yield call(x).detach()


@program
def a_copy_of_a_model(api: Any) -> Iterator[Any]:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    call = api.jit(model.forward)
    yield call(x).detach()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight.zero_()
    yield api.jit(other.forward)(x).detach(), call(x).detach()


@program
def recurrent_layers_with_shorter_inputs(api: Any) -> Iterator[Any]:
    model, x = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), torch.randn(2, 5, 3)
    loss = api.jit(lambda x: model(x)[0].sum())
    for n in (5, 3):
        model.zero_grad()
        loss(x[:, :n]).backward()
        yield gradients(model)


@program
def a_transformer_with_padding(api: Any) -> Iterator[Any]:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
    )
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    call = api.jit(lambda x, padding: model(x, src_key_padding_mask=padding))
    yield call(x, padding).detach()
    model.eval()
    with torch.no_grad():
        found = call(x, padding)
    # PyTorch's fast path has zeros in the padding, the slow one has not
    yield found[0], found[1, :3]


# -- Python state that changes ---------------------------------------------------------------------
SCALE: Any = None


@program
def a_global(api: Any) -> Iterator[Any]:
    global SCALE
    x, call = torch.randn(3), api.jit(lambda x: x * SCALE)
    for SCALE in (2.0, 3.0, torch.ones(3)):  # noqa: B007  # read by the function
        yield call(x)


@program
def a_variable_of_the_enclosing_function(api: Any) -> Iterator[Any]:
    scale: Any = None
    x, call = torch.randn(3), api.jit(lambda x: x * scale)
    for scale in (2.0, 5.0, torch.arange(3.0)):  # noqa: B007  # read by the function
        yield call(x)


@program
def containers_and_objects(api: Any) -> Iterator[Any]:
    class Settings:
        scale = 2.0

    settings, weights, table, x = Settings(), [1.0, 2.0], {"s": 2.0}, torch.randn(3)

    def weighted(x: torch.Tensor, table: dict[str, float] = table) -> torch.Tensor:
        return sum((w * x for w in weights), x * table["s"]) * settings.scale

    call = api.jit(weighted)
    yield call(x)
    weights.append(3.0)
    yield call(x)
    weights[0] = 9.0
    yield call(x)
    table["s"] = 3.0
    yield call(x)
    settings.scale = 4.0
    yield call(x)
    del settings.scale
    Settings.scale = 7.0
    yield call(x)


@program
def a_state_that_the_function_writes(api: Any) -> Any:
    state, x = torch.zeros(3), torch.ones(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.mul_(0.9).add_(x)
        return state * 2

    call = api.jit(step)
    return [call(x).clone() for _ in range(3)], state


@program
def arguments_that_come_and_go(api: Any) -> Any:
    call, x = (
        api.jit(lambda a, *, b=None, c=(): a + (0 if b is None else b["x"]) + sum(c)),
        torch.ones(2),
    )
    return call(x), call(x, b={"x": x}), call(x, b={"x": x}, c=[x, x]), call(x, c=(1, 2.5))


# -- derivatives -----------------------------------------------------------------------------------
@program
def meta_learning(api: Any) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    params = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(3, 5, 1)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(api.functional_call(model, params, (x,)), x.sin())

    def adapted(params: Any, x: torch.Tensor, lr: float) -> torch.Tensor:
        step = api.grad(loss)(params, x)
        return loss({name: p - lr * step[name] for name, p in params.items()}, x)

    for lr in (0.1, 0.2):
        yield api.jit(api.grad(lambda p, lr=lr: api.vmap(lambda x: adapted(p, x, lr))(x).mean()))(
            params
        )


@program
def the_tangent_kernel(api: Any) -> Any:
    model, x = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(4, 3)
    of_one = api.jacrev(lambda params, x: api.functional_call(model, params, (x[None],))[0])
    jacobians = api.vmap(of_one, (None, 0))(dict(model.named_parameters()), x)
    rows = [j.detach().flatten(2) for j in jacobians.values()]
    return sum(torch.einsum("nap,mbp->nmab", r, r) for r in rows)


@program
def products_with_the_hessian(api: Any) -> Any:
    x, direction = torch.randn(4), torch.randn(4)

    def energy(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.exp()).sum()

    return (
        api.jvp(api.grad(energy), (x,), (direction,)),
        api.jit(lambda x, d: api.vjp(api.grad(energy), x)[1](d)[0])(x, direction),
        api.hessian(energy)(x) @ direction,
    )


@program
def losses_with_weights_and_smoothing(api: Any) -> Any:
    x, target = torch.randn(4, 3), torch.tensor([0, 2, -100, 1])
    losses = [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1),
    ]
    return [api.jit(api.grad(loss))(x, target) for loss in losses]


@program
def bags_of_embeddings(api: Any) -> Any:
    bag = nn.EmbeddingBag(10, 3, mode="sum")
    api.jit(lambda i, offsets: bag(i, offsets).pow(2).sum())(
        torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 4])
    ).backward()
    return gradients(bag)


@program
def rows_by_their_largest_entry(api: Any) -> Any:
    x = torch.randn(3, 5)
    best = api.vmap(lambda row: row[row.argmax()] * 2 + row.topk(2)[0].sum())(x)
    return best, api.grad(lambda x: api.vmap(lambda row: row.logsumexp(0))(x).sum())(x)


@program
def spectra(api: Any) -> Any:
    x = torch.randn(8)

    def power(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).abs().pow(2).sum()

    return api.grad(power)(x), api.jit(api.hessian(power))(x)


def seen(name: str, api: Any) -> Any:
    torch.manual_seed(0)
    found = PROGRAMS[name](api)
    return list(found) if isinstance(found, Iterator) else found


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    same(seen(name, torchfunc_jax), seen(name, Eager()))
