"""Trainer beside a plain Python loop over the members in torch: the same numbers, whatever each
member's settings and fate.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from torchfunc_jax.ensemble import Ensemble, Trainer, early_stop, exploit, halve

N = 3
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Net(nn.Module):
    """A convolution, a BatchNorm and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.Linear(4 * 16, 3),
        )
        self.frozen = nn.Parameter(torch.rand(4 * 16) + 0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1) * self.frozen)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


IMAGES = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(3, (12,), generator=torch.Generator().manual_seed(1))


def loop(
    members: list[nn.Module],
    make: Callable[[list[Any], int], torch.optim.Optimizer],
    batches: Callable[[int, int], tuple[Any, ...]],
    steps: int,
    loss: Any = F.cross_entropy,
    before: Callable[[nn.Module, int], None] = lambda module, i: None,
    after: Callable[[nn.Module, int, int], None] = lambda module, i, step: None,
) -> torch.Tensor:
    """Train members one after another; the losses [steps, n]."""
    losses = torch.zeros(steps, len(members))
    for i, module in enumerate(members):
        optimizer = make([p for p in module.parameters() if p.requires_grad], i)
        for step in range(steps):
            inputs, *targets = batches(i, step)
            optimizer.zero_grad()
            value = loss(module(inputs), *targets)
            value.backward()
            before(module, i)
            optimizer.step()
            after(module, i, step)
            losses[step, i] = value.detach()
    return losses


def agree(ens: Ensemble, members: list[nn.Module], **close: float) -> None:
    for i, (a, b) in enumerate(zip(ens, members, strict=True)):
        for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
            torch.testing.assert_close(
                x, y, **(close or CLOSE), msg=lambda m, i=i, name=name: f"member {i}, {name}: {m}"
            )


def bits(tree: Any, but: tuple[int, ...] = ()) -> list[bytes]:
    """The values of all members but some, of each array."""
    return [np.delete(np.asarray(x), but, 0).tobytes() for x in jax.tree.leaves(tree) if x.ndim]


# -- optimizers ------------------------------------------------------------------------------------
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "sgd with momentum": (
        "SGD",
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "lr": 0.05},
    ),
    "sgd by Nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "lr": 0.05}),
    "adam": ("Adam", {}),
    "adam with all": (
        "Adam",
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True},
    ),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adamax": ("Adamax", {"weight_decay": 0.1}),
    "nadam": ("NAdam", {"weight_decay": 0.1}),
    "nadam, decoupled": ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": ("RAdam", {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 1e-3}),
    "rmsprop with all": (
        "RMSprop",
        {
            "lr": 1e-3,
            "alpha": 0.9,
            "momentum": 0.5,
            "centered": True,
            "weight_decay": 0.1,
            "eps": 1e-4,
        },
    ),
    "adagrad": (
        "Adagrad",
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
    "adadelta": ("Adadelta", {"weight_decay": 0.1}),
    "rprop": ("Rprop", {"lr": 1e-3}),
}


FAST = ("sgd with momentum", "adam with all", "rmsprop with all")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in OPTIMIZERS],
)
def test_an_optimizer_by_name_has_torchs_numbers(name):
    which, options = OPTIMIZERS[name]
    ens = Ensemble(linear, N)
    members = list(ens)
    trainer = Trainer(ens, F.cross_entropy, which.lower(), **options)
    found = [trainer.step(ROWS, LABELS) for _ in range(8)]
    expected = loop(
        members,
        lambda p, i: getattr(torch.optim, which)(p, **options),
        lambda i, step: (ROWS, LABELS),
        8,
    )
    torch.testing.assert_close(torch.stack(found), expected, **CLOSE)
    agree(ens, members)


RATES = [0.1, 0.01, 0.001]
OPTAX: dict[str, tuple[Any, Callable[..., Any], dict[str, Any]]] = {
    "with rates": (optax.adam, lambda p, i: torch.optim.Adam(p, RATES[i]), {"lr": RATES}),
    "finished": (optax.adam(1e-2), lambda p, i: torch.optim.Adam(p, 1e-2), {}),
    "partial": (
        functools.partial(optax.sgd, momentum=0.9, nesterov=True),
        lambda p, i: torch.optim.SGD(p, RATES[i], momentum=0.9, nesterov=True),
        {"lr": RATES},
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "with rates",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("finished", "partial")),
    ],
)
def test_optimizers_of_optax(name):
    make, torchs, options = OPTAX[name]
    ens = Ensemble(linear, N)
    members = list(ens)
    trainer = Trainer(ens, F.cross_entropy, make, **options)
    for _ in range(5):
        trainer.step(ROWS, LABELS)
    loop(members, torchs, lambda i, step: (ROWS, LABELS), 5)
    agree(ens, members)


# -- each member has its own -----------------------------------------------------------------------
def test_numbers_of_each_member():
    """Learning rate, weight decay, betas, clipping, temperature and a schedule, of a network with
    BatchNorm and a frozen parameter.
    """
    rates, decays, b1, clips, heat = (
        [0.0, 0.01, 0.1],
        [0.1, 0.0, 0.3],
        [0.9, 0.5, 0.8],
        [0.1, 100.0, 0.5],
        [1.0, 2.0, 0.5],
    )
    ens = Ensemble(Net, N)
    members = list(ens)
    trainer = Trainer(
        ens,
        F.cross_entropy,
        "adam",
        lr=rates,
        weight_decay=torch.tensor(decays),
        betas=(np.array(b1), 0.99),
        clip=clips,
        temperature=heat,
        schedule=lambda step: 1 / (1 + step),
        loss_weights=[1.0, 2.0, 3.0],
    )
    found = torch.stack([trainer.step(IMAGES, LABELS) for _ in range(5)])

    optimizers: dict[int, Any] = {}

    def make(p: list[Any], i: int) -> Any:
        optimizers[i] = torch.optim.Adam(p, rates[i], (b1[i], 0.99), weight_decay=decays[i])
        return optimizers[i]

    def slower(module: nn.Module, i: int, step: int) -> None:
        optimizers[i].param_groups[0]["lr"] = rates[i] / (2 + step)

    def heated(i: int) -> Any:
        return lambda out, y: F.cross_entropy(out / heat[i], y) * (i + 1)

    for i in range(N):
        one = loop(
            [members[i]],
            lambda p, _, i=i: make(p, i),
            lambda _, step: (IMAGES, LABELS),
            5,
            heated(i),
            lambda m, _, i=i: nn.utils.clip_grad_norm_(
                [p for p in m.parameters() if p.requires_grad], clips[i]
            ),
            lambda m, _, step, i=i: slower(m, i, step),
        )
        torch.testing.assert_close(found[:, i], one[:, 0], **CLOSE)
    agree(ens, members)
    assert (
        int(ens[0].norm.num_batches_tracked) == 5
        and ens[0].norm.num_batches_tracked.dtype == torch.int64
    )


def test_numbers_that_are_functions_of_the_step():
    """Of the optimizer, of clipping and of the loss; beside them numbers of each member."""

    def terms(out: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"fit": F.cross_entropy(out, y), "size": out.square().mean()}

    ens, fits = Ensemble(mlp, N), [1.0, 0.5, 2.0]
    members = list(ens)
    trainer = Trainer(
        ens,
        terms,
        "sgd",
        lr=lambda step: 0.5 / (1 + step),
        momentum=0.9,
        clip=lambda step: 0.1 * (1 + step),
        temperature=lambda step: 1 + step,
        loss_weights={"fit": fits, "size": lambda step: 0.3 * step},
    )
    found = torch.stack([trainer.step(ROWS, LABELS) for _ in range(4)])
    for i, member in enumerate(members):
        optimizer = torch.optim.SGD(member.parameters(), 0.0, momentum=0.9)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.5 / (1 + step)
            optimizer.zero_grad()
            parts = terms(member(ROWS) / (1 + step), LABELS)
            value = fits[i] * parts["fit"] + 0.3 * step * parts["size"]
            value.backward()
            nn.utils.clip_grad_norm_(member.parameters(), 0.1 * (1 + step))
            optimizer.step()
            torch.testing.assert_close(found[step, i], value.detach(), **CLOSE)
    agree(ens, members)


@pytest.mark.parametrize(
    "how", ["shared", pytest.param("own", marks=pytest.mark.slow), "bootstrap"]
)
def test_fit_takes_the_data_in_the_order_it_says(how):
    own, bootstrap = how == "own", how == "bootstrap"
    ens = Ensemble(Net, N)
    members = list(ens)
    trainer = Trainer(ens, F.cross_entropy, "sgd", lr=[0.1, 0.01, 0.05], momentum=0.9, seed=5)
    orders = [trainer.order(12, epoch, own, bootstrap).expand(N, 12) for epoch in range(2)]

    def batch(i: int, step: int) -> tuple[Any, ...]:
        rows = orders[step // 2][i][step % 2 * 5 :][:5]
        return IMAGES[rows], LABELS[rows]

    found = trainer.fit((IMAGES, LABELS), epochs=2, batch_size=5, own=own, bootstrap=bootstrap)
    expected = loop(
        members, lambda p, i: torch.optim.SGD(p, [0.1, 0.01, 0.05][i], momentum=0.9), batch, 4
    )
    torch.testing.assert_close(found, expected, **CLOSE)
    agree(ens, members)
    for row in orders[0]:
        assert (
            sorted(row.tolist()) != list(range(12))
            if bootstrap
            else sorted(row.tolist()) == list(range(12))
        )
    assert torch.equal(orders[0][0], orders[0][1]) == (how == "shared") and not torch.equal(
        orders[0], orders[1]
    )
    assert trainer.position == 4 and trainer.fit(
        (IMAGES, LABELS), epochs=2, batch_size=5
    ).shape == (0, N)
    if bootstrap:
        assert [sorted(x.tolist()) for x in orders[0]] == [sorted(x.tolist()) for x in orders[1]]


def test_fit_goes_on_where_it_was():
    """Two calls of fit, the second by another trainer that got the state, are one call."""
    whole, first = (Trainer(Ensemble(mlp, N), F.cross_entropy, seed=2) for _ in range(2))
    losses = whole.fit((ROWS, LABELS), epochs=3, batch_size=4, own=True)
    begun = first.fit((ROWS, LABELS), epochs=1, batch_size=4, own=True)
    second = Trainer(Ensemble(mlp, N, seed=9), F.cross_entropy, seed=9)
    second.state, second.position = first.state, first.position
    assert torch.equal(
        torch.cat([begun, second.fit((ROWS, LABELS), epochs=3, batch_size=4, own=True)]), losses
    )
    assert bits(second.state) == bits(whole.state)


def test_what_members_compute_under_no_grad_is_constant():
    """Spectral norm finds its vectors so, at each step anew."""
    ens = Ensemble(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), N)
    members = list(ens)
    trainer = Trainer(ens, F.cross_entropy, "sgd", lr=0.3)
    found = torch.stack([trainer.step(ROWS, LABELS) for _ in range(5)])
    expected = loop(
        members, lambda p, i: torch.optim.SGD(p, 0.3), lambda i, step: (ROWS, LABELS), 5
    )
    torch.testing.assert_close(found, expected, **CLOSE)
    agree(ens, members)


# -- kinds of members ------------------------------------------------------------------------------
class Counting(nn.Module):
    """Buffers of whole numbers and bools that its forward changes, and a parameter without
    dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("bytes", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("short", torch.zeros(2, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.bytes = self.bytes + 1
            self.seen.logical_or_(torch.tensor(True))
            self.short += self.count.to(torch.int16)
        return self.layer(x) * self.scale + 0.1 * self.count


class Tied(nn.Module):
    """An embedding with padding, whose weight is that of a linear layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out, self.head = (
            nn.Embedding(7, 6, padding_idx=0),
            nn.Linear(6, 7, bias=False),
            nn.Linear(7, 3),
        )
        self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.out(self.words(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: Any = nn.LSTM, **how: Any) -> None:
        super().__init__()
        self.rnn, self.head = (
            kind(4, 5, batch_first=True, **how),
            nn.Linear(10 if "bidirectional" in how else 5, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class OneHot(nn.Linear):
    """Takes integers, which torch wants to be int64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.one_hot(x[:, 0], 7).float())


class Of(nn.Module):
    """A function of a batch times a matrix."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x @ self.weight).flatten(1)[:, :3]


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.3)


SEQUENCES = torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(2))
WORDS = torch.randint(7, (12, 5), generator=torch.Generator().manual_seed(2))
SQUARES = torch.randn(12, 4, 4, generator=torch.Generator().manual_seed(2))
LONG = torch.arange(18) / 4
KINDS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "buffers of integers": (Counting, ROWS),
    "tied weights": (Tied, WORDS),
    "LSTM": (Recurrent, SEQUENCES),
    "two LSTMs, both ways": (lambda: Recurrent(num_layers=2, bidirectional=True), SEQUENCES),
    "GRU": (lambda: Recurrent(nn.GRU), SEQUENCES),
    "embedding with sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(20, 3)),
        WORDS,
    ),
    "bag of words": (lambda: nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 3)), WORDS),
    "one-hot rows": (lambda: OneHot(7, 3), WORDS),
    "float64": (lambda: nn.Linear(4, 3).double(), ROWS.double()),
    "spectral norm by a hook": (lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), ROWS),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), ROWS),
    "weight norm by a hook": (lambda: nn.utils.weight_norm(nn.Linear(4, 3)), ROWS),
    "pruned": (pruned, ROWS),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 3)), ROWS),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(20, 3),
        ),
        SEQUENCES,
    ),
    "GroupNorm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)
        ),
        IMAGES,
    ),
    "max pooling": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
        IMAGES,
    ),
    # indices of 64 bits, in a program without 64-bit types
    "nearest pixels": (lambda: Of(lambda x: F.interpolate(x[:, None], size=(7, 7))), SQUARES),
    "long windows": (lambda: Of(lambda x: (x.sum(2)[:, :1] * LONG).unfold(1, 17, 1)), SQUARES),
    "a part replaced": (
        lambda: Of(lambda x: torch.slice_scatter(x, x[:, :2] * 2, 1, 1, 3)),
        SQUARES,
    ),
    "fractional pooling": (
        lambda: Of(
            lambda x: F.fractional_max_pool2d(
                x[:, None], 2, output_size=2, _random_samples=torch.full((12, 1, 2), 0.3)
            )
        ),
        SQUARES,
    ),
    "log-determinant": (
        lambda: Of(
            lambda x: torch.linalg.slogdet(x + 4 * torch.eye(4))[1][:, None] * torch.arange(3.0)
        ),
        SQUARES,
    ),
}
QUICK = (
    "buffers of integers",
    "one-hot rows",
    "weight norm by a hook",
    "orthogonal",
    "nearest pixels",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]
)
def test_kinds_of_members(name, tmp_path):
    """Trained beside the loop; then predictions, a file, and the state dicts in modules of one's
    own.
    """
    make, inputs = KINDS[name]
    ens, rates = Ensemble(make, N, seed=1), [0.01, 0.1, 0.2]
    members = list(ens)
    trainer = Trainer(ens, F.cross_entropy, "sgd", lr=rates, momentum=0.9)
    found = torch.stack([trainer.step(inputs, LABELS) for _ in range(3)])
    expected = loop(
        members,
        lambda p, i: torch.optim.SGD(p, rates[i], momentum=0.9),
        lambda i, step: (inputs, LABELS),
        3,
    )
    torch.testing.assert_close(found.float(), expected, **CLOSE)
    agree(ens, members)
    ens.save(tmp_path / "ens.pt")
    logits = ens.logits(inputs)
    assert torch.equal(logits, Ensemble.load(tmp_path / "ens.pt", make).logits(inputs))
    for i, module in enumerate(make() for _ in members):
        module.load_state_dict(ens.state_dict(i))
        for one in (module, ens[i]):
            torch.testing.assert_close(
                one.eval()(inputs).detach(), logits[i].to(one(inputs).dtype), **CLOSE
            )


def test_batches_of_each_member():
    ens = Ensemble(mlp, N)
    members = list(ens)
    rows, labels = torch.randn(N, 5, 4), torch.randint(3, (N, 5))
    trainer = Trainer(ens, F.cross_entropy, lr=0.01)
    found = torch.stack([trainer.step(rows, labels, own=True) for _ in range(3)])
    expected = loop(
        members, lambda p, i: torch.optim.Adam(p, 0.01), lambda i, step: (rows[i], labels[i]), 3
    )
    torch.testing.assert_close(found, expected, **CLOSE)
    agree(ens, members)


@pytest.mark.parametrize("what", ["dropout", pytest.param("augment", marks=pytest.mark.slow)])
def test_random_numbers_of_each_member(what):
    """Another draw for each member and step, the same for the same seed, whatever the number of
    members.
    """
    member = nn.Dropout(0.5) if what == "dropout" else nn.Identity()
    member.register_parameter("unused", nn.Parameter(torch.ones(1)))
    how = {} if what == "dropout" else {"augment": lambda x, y: (x + torch.randn_like(x), y)}

    def run(n: int, seed: int) -> torch.Tensor:
        trainer = Trainer(Ensemble.of([member] * n), F.mse_loss, "sgd", lr=0.0, seed=seed, **how)
        return torch.stack(
            [
                trainer.step(torch.linspace(0, 1, 64).view(4, 16), torch.zeros(4, 16))
                for _ in range(3)
            ]
        )

    losses = run(4, 0)
    assert (
        len(set(losses.flatten().tolist())) == 12
        and torch.equal(losses[:, :2], run(2, 0))
        and not torch.equal(losses, run(4, 1))
    )


def test_a_loss_of_the_module_and_losses_of_terms():
    def of_module(member: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(member(x), y) + 0.1 * sum(
            p.square().sum() for p in member.parameters()
        )

    def terms(out: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"fit": F.cross_entropy(out, y), "size": out.square().mean()}

    for how in ("module", "terms"):
        ens = Ensemble(mlp, N)
        members = list(ens)
        weights = {"fit": [1.0, 0.5, 0.0], "size": 0.3}
        trainer = (
            Trainer(ens, of_module, loss_of="module")
            if how == "module"
            else Trainer(ens, terms, loss_weights=weights)
        )
        for _ in range(3):
            trainer.step(ROWS, LABELS)
        for i, member in enumerate(members):
            optimizer = torch.optim.Adam(member.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                found = terms(member(ROWS), LABELS)
                value = (
                    of_module(member, ROWS, LABELS)
                    if how == "module"
                    else weights["fit"][i] * found["fit"] + 0.3 * found["size"]
                )
                value.backward()
                optimizer.step()
        agree(ens, members)


def test_one_hot_labels_are_int64_in_the_loss():
    trainer = Trainer(Ensemble(mlp, N), lambda out, y: F.mse_loss(out, F.one_hot(y, 3).float()))
    expected = [F.mse_loss(m(ROWS), F.one_hot(LABELS, 3).float()) for m in trainer.ensemble]
    torch.testing.assert_close(trainer.step(ROWS, LABELS), torch.stack(expected).detach())


# -- how a step is computed ------------------------------------------------------------------------
PARTS = [{"chunk": 2}, {"accumulate": 3}, {"reduction": "sum", "accumulate": 2}]


@pytest.mark.parametrize(
    "how",
    [{"accumulate": 2, "chunk": 1}, *(pytest.param(how, marks=pytest.mark.slow) for how in PARTS)],
)
def test_parts_of_members_and_of_batches_change_nothing(how):
    loss = functools.partial(F.cross_entropy, reduction=how.get("reduction", "mean"))
    one, two = (Trainer(Ensemble(mlp, N), loss, "sgd", lr=0.1, **h) for h in ({}, how))
    for _ in range(3):
        torch.testing.assert_close(one.step(ROWS, LABELS), two.step(ROWS, LABELS), **CLOSE)
    agree(one.ensemble, list(two.ensemble))
    torch.testing.assert_close(one.losses(ROWS, LABELS), two.losses(ROWS, LABELS), **CLOSE)


def test_mixed_precision_keeps_float32_parameters():
    seen = []

    class Seen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen.append((out.dtype, self.weight.dtype))
            return out

    ens = Ensemble(lambda: nn.Sequential(nn.Linear(4, 8), Seen(8, 3)), N)
    members = list(ens)
    trainer = Trainer(ens, F.cross_entropy, dtype=torch.bfloat16, lr=0.01)
    losses = torch.stack([trainer.step(ROWS, LABELS) for _ in range(5)])
    assert seen[0] == (torch.bfloat16, torch.float32) and {
        x.dtype.name for x in ens.params.values()
    } == {"float32"}
    for i, member in enumerate(members):
        optimizer = torch.optim.Adam(member.parameters(), 0.01)
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = member(ROWS)
            value = F.cross_entropy(out.float(), LABELS)
            value.backward()
            optimizer.step()
            torch.testing.assert_close(losses[step, i], value.detach(), rtol=0.02, atol=0.02)


class Exhausted:
    """A compiled program that says the memory does not suffice while the members at a time are more
    than some.
    """

    def __init__(self, trainer: Trainer, most: int) -> None:
        self.real, self.trainer, self.most, self.asked = trainer._program, trainer, most, []

    def __call__(self, key: tuple[Any, ...]) -> Any:
        if key[0] != "step":
            return self.real(key)

        def run(*args: Any) -> Any:
            self.asked.append(self.trainer.chunk)
            if (self.trainer.chunk or N) > self.most:
                raise jax.errors.JaxRuntimeError(
                    "RESOURCE_EXHAUSTED: Out of memory allocating 1 byte"
                )
            return self.real(key)(*args)

        return run


def test_members_run_in_smaller_chunks_when_memory_does_not_suffice(monkeypatch, caplog):
    one, two = (Trainer(Ensemble(mlp, N), F.cross_entropy) for _ in range(2))
    monkeypatch.setattr(two, "_program", Exhausted(two, 1))
    torch.testing.assert_close(two.step(ROWS, LABELS), one.step(ROWS, LABELS))
    assert two.chunk == 1 and "chunks of 1" in caplog.text and two._program.asked == [None, 1]
    agree(two.ensemble, list(one.ensemble))
    monkeypatch.setattr(one, "_program", Exhausted(one, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        one.step(ROWS, LABELS)


def test_the_state_is_donated():
    trainer = Trainer(Ensemble(mlp, N), F.cross_entropy)
    before = trainer.state
    member = trainer.ensemble[1]
    kept = copy.deepcopy(member)
    trainer.step(ROWS, LABELS)
    assert all(x.is_deleted() for x in jax.tree.leaves((before.params, before.optimizer)))
    agree(Ensemble.of([member]), [kept], rtol=0, atol=0)


# -- life ------------------------------------------------------------------------------------------
def test_early_stopping_freezes_a_member():
    """Beside a loop that stops: the learning rates make one member worse at once."""
    rates = [0.05, 3.0, 0.2]
    ens = Ensemble(Net, N)
    members = list(ens)
    trainer = Trainer(ens, F.cross_entropy, "sgd", lr=rates, ema=0.9)
    valid = torch.randn(8, 1, 6, 6), torch.randint(3, (8,))
    trainer.fit((IMAGES, LABELS), epochs=8, validation=valid, patience=2, keep_best=True)
    steps, bests, averages = [], [], []
    for member, rate in zip(members, rates, strict=True):
        optimizer = torch.optim.SGD([p for p in member.parameters() if p.requires_grad], rate)
        best, waited, taken = float("inf"), 0, 0
        average = {k: p.detach().clone() for k, p in member.named_parameters() if p.requires_grad}
        while taken < 8 and waited < 2:
            optimizer.zero_grad()
            F.cross_entropy(member.train()(IMAGES), LABELS).backward()
            optimizer.step()
            average = {
                k: 0.9 * a + 0.1 * member.get_parameter(k).detach() for k, a in average.items()
            }
            value = F.cross_entropy(member.eval()(valid[0]), valid[1]).item()
            if value < best:
                best, waited, state = value, 0, copy.deepcopy(dict(member.named_parameters()))
            else:
                waited += 1
            taken += 1
        steps.append(taken)
        bests.append(state)
        averages.append(average)
        member.train()
    assert trainer.state.step.tolist() == steps and min(steps) < max(steps)
    assert trainer.state.active.tolist() == [
        s == 8 and w < 2 for s, w in zip(steps, trainer.state.waited.tolist(), strict=True)
    ]
    agree(ens, members)
    for what, expected in (("best", bests), ("average", averages)):
        for found, each in zip(trainer.snapshot(what), expected, strict=True):
            for name, value in each.items():
                torch.testing.assert_close(
                    found.get_parameter(name).detach(), value.detach(), **CLOSE
                )


def test_the_smallest_validation_loss_is_kept_without_patience():
    trainer, seen = Trainer(Ensemble(mlp, N), F.cross_entropy, "sgd", lr=[0.1, 30.0, 0.5]), []
    for epochs in range(1, 5):
        trainer.fit((ROWS, LABELS), epochs=epochs, validation=(ROWS, LABELS))
        seen.append(trainer.losses(ROWS, LABELS))
    torch.testing.assert_close(
        torch.tensor(np.asarray(trainer.state.best)), torch.stack(seen).amin(0)
    )
    assert trainer.state.active.all()


MORE = [
    pytest.param(Net, True, marks=pytest.mark.slow),
    pytest.param(mlp, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("make", "freeze"), [(Net, False), (mlp, True), *MORE])
def test_a_nan_in_one_member_reaches_no_other(make, freeze):
    inputs = IMAGES if make is Net else ROWS
    sound, ill = (
        Trainer(Ensemble(make, N), F.cross_entropy, lr=0.01, clip=1.0, freeze_diverged=freeze)
        for _ in range(2)
    )
    first = next(iter(ill.ensemble.params))
    params = dict(ill.ensemble.params)
    params[first] = params[first].at[1].set(jnp.nan)
    ill.ensemble.params = params
    for _ in range(4):
        one, two = sound.step(inputs, LABELS), ill.step(inputs, LABELS)
        assert two[1].isnan() and torch.equal(one[[0, 2]], two[[0, 2]])
    assert bits(sound.state, (1,))[:-1] == bits(ill.state, (1,))[:-1]
    assert ill.state.active.tolist() == [True, not freeze, True] and ill.state.step.tolist() == [
        4,
        0 if freeze else 4,
        4,
    ]


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "of Optax's"])
def test_a_frozen_member_keeps_its_parameters_and_the_state_of_its_optimizer(name: str) -> None:
    which, options = OPTIMIZERS.get(name, (optax.adam, {"lr": 0.01}))
    trainer = Trainer(
        Ensemble(mlp, N),
        F.mse_loss,
        which.lower() if isinstance(which, str) else which,
        freeze_diverged=True,
        **options,
    )
    inputs, targets = torch.randn(N, 8, 4), torch.randn(N, 8, 3)
    trainer.step(inputs, targets, own=True)
    before = jax.tree.map(np.array, (trainer.state.params, trainer.state.optimizer))
    inputs[1, 0, 0] = torch.nan
    trainer.step(inputs, targets, own=True)
    pairs = zip(
        *map(jax.tree.leaves, (before, (trainer.state.params, trainer.state.optimizer))),
        strict=True,
    )
    for old, new in pairs:
        assert np.array_equal(old[1], new[1]) and np.isfinite(new).all()
    assert not any(
        np.array_equal(old[0], trainer.state.params[k][0]) for k, old in before[0].items()
    )


def test_a_diverging_member_is_frozen_with_finite_values():
    trainer = Trainer(
        Ensemble(mlp, N), F.mse_loss, "sgd", lr=[0.1, 1e30, 0.1], freeze_diverged=True
    )
    for _ in range(5):
        trainer.step(ROWS, torch.randn(12, 3))
    assert trainer.state.active.tolist() == [True, False, True]
    assert all(np.isfinite(np.asarray(x)).all() for x in trainer.state.params.values())


def test_exploit_is_an_exact_copy():
    trainer = Trainer(
        Ensemble(Net, 4),
        F.cross_entropy,
        lr=[0.1, 0.01, 0.02, 0.3],
        weight_decay=[0.0, 0.1, 0.2, 0.3],
    )
    for _ in range(3):
        trainer.step(IMAGES, LABELS)
    before = jax.tree.map(np.array, trainer.state)
    sources = exploit(trainer, [0.5, 0.1, float("nan"), 0.2], perturb={"lr": (0.5, 2.0)})
    after = trainer.state
    assert sources == [0, 1, 1, 3]
    for name in ("params", "buffers", "optimizer", "step", "active", "best", "waited"):
        for old, new in zip(
            jax.tree.leaves(getattr(before, name)),
            jax.tree.leaves(getattr(after, name)),
            strict=True,
        ):
            assert old[sources].tobytes() == np.asarray(new).tobytes(), name
    assert np.array_equal(before.keys, after.keys)
    assert np.array_equal(after.numbers["weight_decay"], before.numbers["weight_decay"][sources])
    factor = np.asarray(after.numbers["lr"]) / before.numbers["lr"][sources]
    assert factor[[0, 1, 3]].tolist() == [1, 1, 1] and factor[2] in (0.5, 2.0)
    losses = trainer.step(IMAGES, LABELS)
    assert losses[1] == losses[2]
    agree(trainer.ensemble, list(trainer.ensemble))


def test_halving_keeps_the_best():
    one, two = (
        Trainer(Ensemble(mlp, 4), F.cross_entropy, "sgd", lr=[0.1, 0.01, 0.02, 0.3], momentum=0.9)
        for _ in range(2)
    )
    for _ in range(2):
        one.step(ROWS, LABELS), two.step(ROWS, LABELS)
    assert halve(two, [0.5, 0.1, 0.4, 0.2]) == [1, 3] and len(two.ensemble) == 2
    for _ in range(2):
        torch.testing.assert_close(one.step(ROWS, LABELS)[[1, 3]], two.step(ROWS, LABELS), **CLOSE)
    one.take([1, 3])
    agree(one.ensemble, list(two.ensemble))


def test_a_member_that_is_seeded_again_begins_anew():
    """As in a new ensemble and trainer of that seed, with its own settings; the others go on."""
    rates = [0.1, 1e30, 0.05]
    how = {"ema": 0.9, "freeze_diverged": True}
    make = lambda seed, rates: Trainer(
        Ensemble(Net, N, seed=seed), F.cross_entropy, lr=rates, seed=seed, **how
    )
    one, two, new = make(0, rates), make(0, rates), make(7, [0.1, 0.02, 0.05])
    for trainer in (one, two):
        trainer.fit((IMAGES, LABELS), epochs=3, validation=(IMAGES, LABELS), keep_best=True)
    assert two.state.active.tolist() == [True, False, True]
    two.reseed(1, seed=7)
    two.state = dataclasses.replace(
        two.state, numbers={**two.state.numbers, "lr": two.state.numbers["lr"].at[1].set(0.02)}
    )
    assert (
        two.state.active.all()
        and two.state.step.tolist() == [3, 0, 3]
        and np.isinf(two.state.best[1])
    )
    for _ in range(3):
        found, going_on, begun = (
            two.step(IMAGES, LABELS),
            one.step(IMAGES, LABELS),
            new.step(IMAGES, LABELS),
        )
        assert torch.equal(found[[0, 2]], going_on[[0, 2]]) and found[1] == begun[1]
    for field in ("params", "buffers", "optimizer", "keys", "average", "averaged", "waited"):
        for a, b, c in zip(
            *(jax.tree.leaves(getattr(t.state, field)) for t in (two, one, new)), strict=True
        ):
            assert np.array_equal(a[1], c[1]) and np.array_equal(
                np.delete(a, 1, 0), np.delete(b, 1, 0)
            ), field


@pytest.mark.parametrize("change", ["drop and append", "take", "reseed", "another trainer's take"])
def test_a_trainer_refuses_other_members_than_its_own(change):
    """Their optimizer's state would be that of the members before."""
    trainer = Trainer(Ensemble(mlp, N), F.cross_entropy)
    ens, other = trainer.ensemble, Trainer(trainer.ensemble, F.cross_entropy)
    trainer.step(ROWS, LABELS)
    {
        "drop and append": lambda: (ens.drop(0), ens.append(mlp())),
        "take": lambda: ens.take([1, 0, 2]),
        "reseed": lambda: ens.reseed(1, 5),
        "another trainer's take": lambda: other.take([1, 0, 2]),
    }[change]()
    with pytest.raises(
        RuntimeError,
        match=r"the ensemble's members were changed.*use Trainer.take or Trainer.reseed",
    ):
        trainer.step(ROWS, LABELS)
    members = list(ens)
    again = Trainer(ens, F.cross_entropy, "sgd", lr=0.1)
    found = torch.stack([again.step(ROWS, LABELS) for _ in range(2)])
    torch.testing.assert_close(
        found,
        loop(members, lambda p, i: torch.optim.SGD(p, 0.1), lambda i, step: (ROWS, LABELS), 2),
        **CLOSE,
    )


def test_validation_data_need_not_fit_the_parts_of_a_batch():
    one, two = (Trainer(Ensemble(mlp, N), F.cross_entropy, accumulate=parts) for parts in (1, 4))
    for trainer in (one, two):
        trainer.fit((ROWS, LABELS), validation=(ROWS[:7], LABELS[:7]), patience=3)
    torch.testing.assert_close(np.asarray(one.state.best), np.asarray(two.state.best), **CLOSE)
    torch.testing.assert_close(
        one.losses(ROWS[:5], LABELS[:5]), two.losses(ROWS[:5], LABELS[:5]), **CLOSE
    )


def test_averages():
    trainer = Trainer(Ensemble(mlp, N), F.cross_entropy, "sgd", lr=0.5)
    models = [torch.optim.swa_utils.AveragedModel(m) for m in trainer.ensemble]
    for _ in range(3):
        trainer.step(ROWS, LABELS)
        trainer.average()
        for model, member in zip(models, trainer.ensemble, strict=True):
            model.update_parameters(member)
    agree(trainer.snapshot("average"), [m.module for m in models])
    kept = trainer.snapshot()
    members = list(trainer.ensemble)
    trainer.step(ROWS, LABELS)
    agree(kept, members, rtol=0, atol=0)


# -- errors ----------------------------------------------------------------------------------------
def trained(**how: Any) -> Any:
    loss = how.pop("loss", F.cross_entropy)
    batch = how.pop("batch", (ROWS, LABELS))
    own = how.pop("own", False)
    return Trainer(Ensemble(mlp, N), loss, how.pop("optimizer", "adam"), **how).step(
        *batch, own=own
    )


def changed_length() -> Any:
    trainer = Trainer(Ensemble(mlp, N), F.cross_entropy)
    trainer.ensemble.drop(0)
    return trainer.step(ROWS, LABELS)


def fitted(**how: Any) -> Any:
    return Trainer(Ensemble(mlp, N), F.cross_entropy).fit(how.pop("data", (ROWS, LABELS)), **how)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no such optimizer": (
        lambda: trained(optimizer="lbfgs"),
        ValueError,
        "one of adadelta.*'lbfgs'",
    ),
    "no such number": (
        lambda: trained(momentum=0.9),
        TypeError,
        "'adam' has no 'momentum'; it has lr, betas",
    ),
    "no such number of Optax's": (
        lambda: trained(optimizer=optax.adam, momentum=0.9),
        TypeError,
        "adam has no 'momentum'",
    ),
    "numbers of a finished optimizer": (
        lambda: trained(optimizer=optax.adam(0.1), lr=1.0),
        TypeError,
        "lr: this optimizer has",
    ),
    "not one for each member": (
        lambda: trained(lr=[0.1, 0.2]),
        ValueError,
        r"lr: expected a number, or 3 numbers.*\(2,\)",
    ),
    "a loss of each row": (
        lambda: trained(loss=lambda out, y: out.sum(1)),
        ValueError,
        r"without dimensions, got shape \(12,\)",
    ),
    "other terms": (
        lambda: trained(loss_weights={"a": 1.0}),
        ValueError,
        r"weights of \[''\].*got \['a'\]",
    ),
    "several values": (
        lambda: trained(loss=lambda out, y: (out.sum(), y)),
        ValueError,
        "without dimensions, got tuple",
    ),
    "no terms": (lambda: trained(loss=lambda out, y: {}), ValueError, "got an empty dict"),
    "a loss of integers": (
        lambda: trained(loss=lambda out, y: out.argmax()),
        ValueError,
        "floating-point tensor, got torch.int64",
    ),
    "a class of torch.optim's": (
        lambda: trained(optimizer=torch.optim.AdamW),
        TypeError,
        "by name, 'adamw'",
    ),
    "an optimizer of torch.optim's": (
        lambda: trained(optimizer=torch.optim.SGD(mlp().parameters())),
        TypeError,
        "by name, 'sgd'",
    ),
    "groups of parameters": (
        lambda: trained(params=[{"params": []}]),
        TypeError,
        "'adam' has no 'params'",
    ),
    "numbers of groups": (
        lambda: trained(lr={"0.weight": 0.1}),
        TypeError,
        "lr: expected a number or one for each.*optax.partition",
    ),
    "a word for a number": (
        lambda: trained(lr="fast"),
        TypeError,
        "lr: expected numbers, got 'fast'",
    ),
    "a number for a switch": (
        lambda: trained(amsgrad=0.5),
        TypeError,
        "amsgrad: expected True or False, got 0.5",
    ),
    "one beta": (lambda: trained(betas=0.9), TypeError, "betas: expected a tuple of 2"),
    "a negative rate": (
        lambda: trained(lr=[0.1, -1.0, 0.1]),
        ValueError,
        "lr: expected numbers that are not negative",
    ),
    "a rate that is NaN": (
        lambda: trained(lr=float("nan")),
        ValueError,
        "lr: expected numbers that are not negative, got nan",
    ),
    "a written parameter": (
        lambda: Trainer(
            Ensemble(lambda: nn.Embedding(7, 3, max_norm=1.0), N), F.cross_entropy
        ).step(LABELS, LABELS),
        ValueError,
        "member: its forward writes to the parameter 'weight'",
    ),
    "no batch": (lambda: trained(batch=()), ValueError, "expected inputs and targets, got nothing"),
    "a data set": (
        lambda: fitted(data=torch.utils.data.TensorDataset(ROWS)),
        TypeError,
        "expected a tuple of tensors, or a loader of batches .*, got TensorDataset",
    ),
    "a setting": (
        lambda: trained(loss_of="modul"),
        ValueError,
        "loss_of: expected 'outputs' or 'module', got 'modul'",
    ),
    "parts of a batch": (lambda: trained(accumulate=5), ValueError, "multiple of 5 rows"),
    "chunk": (lambda: trained(chunk=0), ValueError, "chunk: expected a positive integer, got 0"),
    "not a batch for each": (
        lambda: trained(own=True),
        ValueError,
        "expected 3 rows, one for each member",
    ),
    "labels beyond int32": (
        lambda: trained(batch=(ROWS, LABELS + 2**40)),
        ValueError,
        "do not fit into int32",
    ),
    "a number as batch": (
        lambda: trained(batch=(3,)),
        ValueError,
        "expected tensors of at least 1 dimension",
    ),
    "nothing to train": (
        lambda: Trainer(Ensemble(nn.ReLU, N), F.mse_loss),
        ValueError,
        "nothing to train",
    ),
    "another number of members": (changed_length, RuntimeError, "has 2 members, and had 3"),
    "rows that differ": (
        lambda: fitted(data=(ROWS, LABELS[:3])),
        ValueError,
        "the same number of rows",
    ),
    "more rows than the data": (lambda: fitted(batch_size=13), ValueError, "at most the 12 rows"),
    "patience without data": (lambda: fitted(patience=1), ValueError, "validation"),
    "no average": (
        lambda: Trainer(Ensemble(mlp, N), F.mse_loss).snapshot("average"),
        ValueError,
        "with ema=",
    ),
    "scores": (
        lambda: halve(Trainer(Ensemble(mlp, N), F.mse_loss), [1.0]),
        ValueError,
        "expected 3 numbers",
    ),
    "patience": (
        lambda: early_stop(Trainer(Ensemble(mlp, N), F.mse_loss), [1.0] * N, 0),
        ValueError,
        "patience: expected a positive",
    ),
    "no such number to perturb": (
        lambda: exploit(
            Trainer(Ensemble(mlp, N), F.mse_loss), [1.0] * N, perturb={"momentum": (1,)}
        ),
        ValueError,
        "no number 'momentum'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()
