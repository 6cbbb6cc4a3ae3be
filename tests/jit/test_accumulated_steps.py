"""Training steps that run a batch in parts: the losses, weights and buffers are those of the parts
one after another, in the memory of one; adapters on weights of eight bits are trained so, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import same
from decoder import TOKENS, Decoder, with_adapters
from torch import nn

import bridge
from torchfunc_jax import export, jit
from torchfunc_jax.training_step import TrainingStep

PARTS, ROWS = 4, 12


def squares(module: nn.Module, batch: dict[str, torch.Tensor], scale: Any = 1.0) -> torch.Tensor:
    return F.mse_loss(module(batch["x"]), batch["y"]) * scale


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x.sum(1, keepdim=True)}


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), *middle, nn.Tanh(), nn.Linear(8, 1))


def by_torch(module: nn.Module, loss: Any, batches: list[Any]) -> list[torch.Tensor]:
    """The losses of gradient accumulation as it is written in PyTorch."""
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=0.1, momentum=0.9), []
    for batch in batches:
        parts = zip(*(t.chunk(PARTS) for t in batch.values()), strict=True)
        losses.append(torch.zeros(()))
        for part in parts:
            value = loss(module, dict(zip(batch, part, strict=True))) / PARTS
            value.backward()
            losses[-1] += value.detach()
        optimizer.step()
        optimizer.zero_grad()
    return losses


WAYS: dict[str, Callable[[nn.Module], Any]] = {"as it is": lambda step: step, "jit": jit}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("middle", [(), (nn.BatchNorm1d(8),)], ids=["plain", "with buffers"])
def test_it_is_what_torch_does_part_by_part(way: str, middle: Any) -> None:
    theirs, ours = (network(*copy.deepcopy(middle)) for _ in range(2))
    batches = [batch_of(k) for k in range(4)]
    expected = by_torch(theirs, squares, batches)
    step = TrainingStep(ours, squares, "sgd", accumulate=PARTS, lr=0.1, momentum=0.9)
    run = WAYS[way](step)
    same([run(batch) for batch in batches], expected, rtol=1e-5, atol=1e-6)
    same(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)
    assert way == "as it is" or len(run.programs()) == 1


def test_without_statistics_of_the_batch_it_is_the_whole_batch() -> None:
    whole, parts = (
        TrainingStep(network(), squares, "adam", accumulate=n, lr=0.01) for n in (1, PARTS)
    )
    fast = jit(parts)
    for k in range(3):
        # what has no dimensions goes to each part
        scale = torch.tensor(0.5 + k)
        same(fast(batch_of(k), scale), whole(batch_of(k), scale), rtol=1e-5, atol=1e-6)
        same(fast(batch_of(k), 2.0), whole(batch_of(k), 2.0), rtol=1e-5, atol=1e-6)
    same(parts.state_dict(), whole.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_each_part_draws_its_own_numbers(way: str) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (F.dropout(torch.ones(64), 0.5) * self.weight).sum() + 0 * x.sum()

    step = TrainingStep(Dropped(), lambda m, x: m(x), "sgd", accumulate=PARTS, lr=1.0)
    WAYS[way](step)(torch.ones(PARTS))
    means = (-step.module.weight.detach()).unique()  # of masks of 0 and 2
    assert {*means.tolist()} <= {0.0, 0.5, 1.0, 1.5, 2.0} and len(means) > 2


def test_the_memory_is_that_of_a_part() -> None:
    planned = {}
    for n in (1, 16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
        step = TrainingStep(model, squares, "sgd", accumulate=n, lr=0.1)
        batch = {"x": torch.ones(4096, 16), "y": torch.ones(4096, 1)}
        planned[n] = jit(step).lower(batch).compile().memory_analysis().temp_size_in_bytes
    assert planned[16] < planned[1] / 8, planned


def test_exported() -> None:
    step = TrainingStep(network(), squares, "sgd", accumulate=PARTS, lr=0.1)
    exported = export(step, batch_of(0), batch=None)
    value, _ = exported.program.call(
        exported.weights, {name: t.numpy() for name, t in batch_of(0).items()}
    )
    assert float(value) == pytest.approx(float(step(batch_of(0))), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (0, None, "accumulate: expected a positive integer, got 0"),
        (True, None, "accumulate: expected a positive integer, got True"),
        (
            5,
            lambda step: step(batch_of(0)),
            r"batch: expected a multiple of 5 rows, for accumulate=5, got shape \(12, 3\)",
        ),
        (
            5,
            lambda step: jit(step)(batch_of(0)),
            r"batch: expected a multiple of 5 rows, for accumulate=5, got shape \(12, 3\)",
        ),
        (3, lambda step: step(2.0), "batch: expected a tensor to divide, for accumulate=3"),
    ],
)
def test_what_cannot_be_divided(make: Any, call: Any, message: str) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        call(TrainingStep(model, squares, accumulate=make))
    same(model.state_dict(), before)


# -- adapters --------------------------------------------------------------------------------------
def by_peft(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False, lora_dropout=0.0
    )
    return peft.get_peft_model(model, config)


def next_token(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["x"])[0]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("add", [with_adapters, by_peft])
def test_adapters_alone_are_trained(add: Callable[[nn.Module], nn.Module], quantized: bool) -> None:
    torch.manual_seed(0)
    model = Decoder()
    model = add(bridge.quantize_int8(model) if quantized else model)
    theirs = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    tokens = [
        {"x": torch.randint(0, TOKENS, (8, 9), generator=torch.Generator().manual_seed(k))}
        for k in range(3)
    ]
    expected = by_torch(theirs, next_token, tokens)
    step = TrainingStep(model, next_token, "sgd", accumulate=PARTS, lr=0.1, momentum=0.9)
    run = jit(step)
    same([run(batch) for batch in tokens], expected, rtol=1e-4, atol=1e-5)
    same(model.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)
    changed = {k for k, t in model.state_dict().items() if not torch.equal(t, before[k])}
    assert changed == {k for k in before if "lora_" in k} and len(changed) == 8
    assert all("lora_" in name for name, _ in step.optimizer.named_buffers() if "/" in name)
