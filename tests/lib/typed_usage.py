"""How a user's typed program calls the public names; tests/tools/test_typed_names.py has type
checkers read it in their strict modes.

It is a program too: that test runs it, and so does ``make release-check`` with the wheel.
"""

# pyright: strict
from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, assert_type

import jax
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from torch.utils.data import DataLoader, TensorDataset

import bridge
import torchfunc_jax
from bridge import checkpoints
from torchfunc_jax import (
    attention_scores,
    checkpoint_policy,
    chunk_vmap,
    cold,
    combine_state_for_ensemble,
    debug_unwrap,
    explain,
    export,
    functional_call,
    functionalize,
    generate,
    grad,
    grad_and_value,
    hessian,
    hvp,
    jacfwd,
    jacobian_diagonal,
    jacrev,
    jet,
    jit,
    jvp,
    laplacian,
    linearize,
    make_functional,
    make_functional_with_buffers,
    patch,
    random_numbers,
    rearrange,
    replace_all_batch_norm_modules_,
    scan_blocks,
    stack_module_state,
    vjp,
    vmap,
)
from torchfunc_jax.ensemble import Ensemble, JsonLines, Sink, Trainer, predict
from torchfunc_jax.jit import Jitted
from torchfunc_jax.testing import assert_parity

versions: tuple[str, str] = (torchfunc_jax.__version__, bridge.__version__)


def square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def transforms(x: torch.Tensor) -> list[torch.Tensor]:
    """Every transform of a function of tensors."""
    gradient, value = grad_and_value(square)(x)
    out, pull = vjp(square, x)
    pushed = jvp(square, (x,), (x,))
    linear, push = linearize(square, x)
    product = hvp(square, (x,), (x,))
    curve, series = jet(square, (x,), ([x],))
    trace = laplacian(square)(x)
    diagonal = jacobian_diagonal(torch.sin)(x)
    rows = [
        vmap(grad(square), in_dims=0, out_dims=0, randomness="error", chunk_size=2)(
            torch.stack([x, x])
        ),
        chunk_vmap(torch.sin, chunks=2)(x),
        jacrev(torch.sin)(x),
        jacfwd(torch.sin, chunk_size=1)(x),
        hessian(square)(x),
        functionalize(torch.sin)(x),
        debug_unwrap(x),
        rearrange(x[None], "a b -> b a"),
    ]
    return [
        gradient,
        value,
        out,
        *pull(out),
        *pushed,
        linear,
        push(x),
        *product,
        curve,
        *series,
        trace,
        diagonal,
        *rows,
    ]


def compiled(x: torch.Tensor) -> torch.Tensor:
    """jit as a function, as a decorator, and as a decorator with options."""
    assert_type(jit(square), Jitted)
    assert_type(jit(donate=0), Callable[[Callable[..., Any]], Jitted])

    @jit
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @jit(static_argnums=1, max_programs=8, random_numbers="torch")
    def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
        return by * x

    with explain() as why:
        total: torch.Tensor = doubled(x) + scaled(x, 3.0)
    assert_type(why, list[str])
    for program in doubled.programs():
        print(program)
    return total


def modules(model: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The utilities for modules, here and in functorch's old names."""
    params, buffers = stack_module_state([model, model])
    assert_type(params, dict[str, Any])
    assert_type(buffers, dict[str, Any])
    fmodel, weights = make_functional(model)
    fstateful, weights, states = make_functional_with_buffers(model)
    fensemble, stacked, stacked_buffers = combine_state_for_ensemble([model, model])
    assert_type(replace_all_batch_norm_modules_(nn.Sequential(nn.BatchNorm1d(2))), nn.Module)
    with random_numbers("jax"), cold("torch"), attention_scores(1000), patch():
        out: torch.Tensor = functional_call(model, dict(model.named_parameters()), (x,))
    mapped: torch.Tensor = vmap(fensemble, (0, 0, None))(stacked, stacked_buffers, x)
    total: torch.Tensor = (
        out
        + fmodel(weights, x)
        + fstateful(weights, states, x)
        + mapped.sum(0)
        + vmap(torch.sum)(params["weight"]).sum()
    )
    return total


def bridged(model: nn.Linear, x: torch.Tensor, folder: str) -> jax.Array:
    """Modules for programs that are JAX throughout."""
    weights = bridge.params(model)
    assert_type(weights, dict[str, jax.Array])
    out, changed = bridge.call(model, weights, bridge.buffers(model), (bridge.to_jax(x),))
    assert_type(changed, dict[str, jax.Array])
    bridge.load(model, weights)
    applied: bridge.Function = bridge.Function(*bridge.function(model))
    out, _ = applied.apply(applied.params, applied.state, bridge.to_jax(x))
    checkpoints.save(f"{folder}/weights.safetensors", weights)
    restored: dict[str, jax.Array] = checkpoints.load(f"{folder}/weights.safetensors")
    sine = bridge.from_jax(jax.numpy.sin)
    assert_type(bridge.to_torch(out), torch.Tensor)
    found: jax.Array = out + restored["bias"] + bridge.to_jax(sine(x)).sum()
    return found


def on_a_mesh(model: nn.Linear, folder: str) -> dict[str, jax.Array]:
    """Weights that several devices share."""
    # JAX's own, not ours
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))  # pyright: ignore[reportUnknownMemberType]
    assert bridge.shardings(bridge.params(model), mesh)
    placed: dict[str, jax.Array] = bridge.shard(bridge.params(model), mesh)
    return placed | bridge.load_sharded(f"{folder}/weights.safetensors", mesh)


def lowering() -> Callable[..., Any]:
    """An operator of the user's own; not called by main, because it would stay registered."""

    @bridge.register_lowering("aten.sinc")
    def sinc(x: jax.Array) -> jax.Array:
        return x

    return sinc


class Printed:
    """A sink of the user's."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        print(step, *metrics)

    def close(self) -> None:
        pass


def ensemble(x: torch.Tensor, labels: torch.Tensor, folder: str) -> torch.Tensor:
    """Members, training on tensors and by a loader, with logs, predictions."""
    members = Ensemble(lambda: nn.Linear(3, 2), n=2)
    trainer = Trainer(members, F.cross_entropy, "adam", lr=1e-3)
    trainer.fit((x, labels), epochs=1)
    loader = DataLoader(TensorDataset(x, labels), batch_size=2)
    sinks: list[Sink] = [JsonLines(Path(folder, "log.jsonl")), Printed()]
    index, count = trainer.batch_part
    losses: torch.Tensor = trainer.fit(
        loader,
        steps=4,
        whole_batches=count == 1 and index == 0,
        sinks=sinks,
        log_every=2,
        profile=(2, 2, Path(folder, "trace")),
    )
    assert len(losses) == 3
    found: torch.Tensor = predict(members, x).probability
    return found


class Decoder(nn.Module):
    """A language model that sees the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        x = self.embed(ids)
        cache.update(x[:, None], x[:, None], 0)
        logits: torch.Tensor = x @ self.embed.weight.T
        return logits


def decoded(ids: torch.Tensor) -> torch.Tensor:
    """Tokens after a prompt."""
    tokens = generate(Decoder(), ids, max_new_tokens=2, do_sample=True, temperature=0.5)
    assert_type(tokens, torch.Tensor)
    assert_type(generate(Decoder(), bridge.to_jax(ids), max_new_tokens=2), jax.Array)
    return tokens


def exported(x: torch.Tensor, folder: str) -> Path:
    """A program for machines without PyTorch."""
    return export(torch.sin, x).save(f"{folder}/sine")


def main(folder: str) -> None:
    x, model = torch.ones(3), nn.Linear(3, 2)
    transforms(x)
    compiled(x)
    modules(model, x[None])
    bridged(model, x[None], folder)
    on_a_mesh(model, folder)
    ensemble(torch.ones(4, 3), torch.zeros(4, dtype=torch.long), folder)
    exported(x[None], folder)
    decoded(torch.tensor([[1, 2, 3]]))
    assert_parity(square, x, transforms=["grad"])
    quantized = bridge.quantize_int8(nn.Sequential(nn.Linear(3, 3)))
    quantized(torch.ones(2, 3))
    assert bridge.rules(bridge.rules()[0], fsdp="data")
    keep = checkpoint_policy(jax.checkpoint_policies.dots_saveable)
    checkpoint(nn.Linear(3, 3), torch.ones(2, 3), use_reentrant=False, context_fn=keep)
    with scan_blocks(nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])):
        assert versions[0] == versions[1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
