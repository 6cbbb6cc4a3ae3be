"""Modules beside their ports to JAX and Flax: right ports pass; of wrong ones the layer is named
where they begin to differ.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from flax import linen, nnx
from jax import lax
from torch import nn
from typer.testing import CliRunner, Result

from torchfunc_jax.cli import app
from torchfunc_jax.testing import ParityError, PortError, assert_port_parity, port_parity

QUICK: dict[str, Any] = {"dtypes": ["float64"], "modes": ["eval"]}
X = torch.linspace(-1, 1, 12).reshape(4, 3)
LINEAR = lambda: nn.Linear(3, 2)


# -- right ports -----------------------------------------------------------------------------------
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def mlp_params() -> Any:
    return [(jnp.ones((n, m)), jnp.ones(m)) for n, m in ((3, 4), (4, 4), (4, 2))]


def mlp_port(params: Any, x: Any, approximate: bool = False, turned: bool = False) -> Any:
    (w0, b0), (w1, b1), (w2, b2) = params
    x = jax.nn.gelu(x @ w0 + b0, approximate=approximate)
    x = jnp.tanh(x @ (w1.T if turned else w1) + b1)
    return x @ w2 + b2


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4)
        self.pool, self.conv2 = nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.Conv2d(4, 3, 1)
        self.drop, self.fc = nn.Dropout(0.0), nn.Linear(3 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.bn1(self.conv1(x)).relu())
        return self.fc(self.drop(self.conv2(x).flatten(1)))


class FlaxCNN(linen.Module):
    padding: Any = 1
    momentum: float = 0.9
    count: bool = False
    dropped: bool = False
    bias: bool = True

    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = linen.Conv(4, (3, 3), 2, padding=self.padding, use_bias=False)(x)
        x = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=self.momentum)(x))
        x = linen.avg_pool(x, (3, 3), padding=((1, 1), (1, 1)), count_include_pad=self.count)
        x = linen.Conv(3, (1, 1), use_bias=self.bias)(x)
        x = x.reshape(len(x), -1)
        x = linen.Dropout(0.5, deterministic=not self.dropped)(x)
        return linen.Dense(5)(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.mT / 2).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class NNXBlock(nnx.Module):
    def __init__(
        self,
        rngs: nnx.Rngs,
        axis: int = -1,
        eps: float = 1e-5,
        approximate: bool = False,
        residual: bool = True,
        heads: bool = True,
        scale: float = 0.5,
    ) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(8, epsilon=e, rngs=rngs) for e in (1e-5, eps))
        self.q, self.k, self.v, self.out = (nnx.Linear(8, 8, rngs=rngs) for _ in range(4))
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.axis, self.approximate, self.residual, self.heads = axis, approximate, residual, heads
        self.scale = scale

    def __call__(self, x: Any) -> Any:
        y = self.norm1(x)
        q, k, v = (f(y).reshape(*y.shape[:2], 2, 4) for f in (self.q, self.k, self.v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        weights = jax.nn.softmax(scores, self.axis)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        mixed = mixed.reshape(x.shape) if self.heads else mixed.swapaxes(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        y = self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=self.approximate))
        return x + y if self.residual else y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(7, 4),
            nn.LSTM(4, 5, batch_first=True),
            nn.Linear(5, 3),
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(words))[0][:, -1])


class FlaxRecurrent(linen.Module):
    """Its carry is always in float32, so that it does not run in float64."""

    @linen.compact
    def __call__(self, words: Any) -> Any:
        return linen.Dense(3)(linen.RNN(linen.LSTMCell(5))(linen.Embed(7, 4)(words))[:, -1])


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return F.scaled_dot_product_attention(x, x, x)


class NNXScaled(nnx.Linear):
    """The softmax of flax's dot_product_attention is in float32, whatever its inputs are."""

    def __call__(self, x: Any) -> Any:  # type: ignore[override]
        x = super().__call__(x)[:, :, None]
        return nnx.dot_product_attention(x, x, x)[:, :, 0]


class Case(NamedTuple):
    module: Callable[[], nn.Module]
    port: Any
    shape: tuple[int, ...]
    options: Mapping[str, Any] = MappingProxyType({})


MLP = Case(mlp, mlp_port, (5, 3), {"variables": mlp_params})
RIGHT = {
    "an MLP in plain JAX": MLP,
    "a CNN with batch norm in linen": Case(CNN, FlaxCNN(), (2, 2, 8, 8)),
    "a transformer block in nnx": Case(Block, NNXBlock, (2, 5, 8)),
}


#: In the place of an input without a shape.
WORDS = torch.tensor([[1, 5, 3, 6], [2, 2, 0, 4]])


def randomized(module: nn.Module) -> nn.Module:
    """With parameters and statistics that are no special numbers."""
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            if t.is_floating_point():
                t.uniform_(0.2, 1.0) if t.dim() == 1 else t.normal_(0, 0.7)
    return module


@functools.cache
def report(case_name: str) -> Any:
    case = RIGHT[case_name]
    torch.manual_seed(0)
    return port_parity(
        randomized(case.module()), case.port, torch.randn(case.shape), **case.options
    )


@pytest.mark.parametrize("name", RIGHT)
def test_right_ports_pass(name: str) -> None:
    found = report(name)
    assert found.equal, str(found)


def three(params: Any, x: Any) -> Any:
    for i in range(3):
        x = x @ params[i]["w"]
    return x


def three_params(turned: bool = False) -> Any:
    return [{"w": jnp.ones(shape)} for shape in ((3, 4), (4, 5), (3, 5) if turned else (5, 3))]


def test_a_port_that_does_not_run_in_float64() -> None:
    found = port_parity(randomized(Recurrent()), FlaxRecurrent(), WORDS)
    assert found.equal, str(found)
    assert [c.dtype for c in found.checks] == ["float32"] and "gradients" in found.checks[0].agreed
    assert (
        "not compared in float64: port: " in found.notes[0]
        and "sum of two tensors" in found.notes[1]
    )


def test_a_port_that_goes_on_in_float32() -> None:
    port = functools.partial(NNXScaled, 4, 4)
    found = port_parity(randomized(Scaled(4, 4)), port, torch.randn(2, 3, 4), **QUICK)
    assert found.equal and re.search(
        r"float32 at .*test_ports.py:\d+: return nnx.dot_product_attention", found.notes[0]
    ), str(found)


def test_steps_that_diverge_are_not_compared() -> None:
    wild = lambda params: torch.optim.SGD(params, 1e200)
    found = port_parity(
        mlp(), mlp_port, X, variables=mlp_params, optimizer=(wild, optax.sgd(1e200)), **QUICK
    )
    assert found.equal and "not finite" in found.notes[0] and "steps" not in found.checks[0].agreed


# -- wrong ports -----------------------------------------------------------------------------------
class Wrong(NamedTuple):
    """A case whose port has a fault: where it is to be found, and in which mode."""

    module: Callable[[], nn.Module]
    port: Any
    shape: tuple[int, ...]
    layer: str
    what: str
    mode: str = "eval"
    sure: bool = True
    words: str = ""
    options: Mapping[str, Any] = MappingProxyType({})


class Attention(nn.Module):
    """With its softmax in its own forward, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.drop = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Dropout(0.3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop((self.q(x) @ self.k(x).mT).softmax(-1)) @ self.v(x)


def attention_port(
    params: Any,
    x: Any,
    key: Any,
    train: bool,
    dropped: bool = False,
    rate: float = 0.3,
    bias: bool = True,
) -> Any:
    """With the module's names."""
    q, k, v = (
        x @ params[f"{name}.weight"].T + params[f"{name}.bias"] * (bias or name != "v")
        for name in "qkv"
    )
    weights = jax.nn.softmax(q @ k.mT, -1)
    if train or dropped:
        weights = jnp.where(
            jax.random.bernoulli(key, 1 - rate, weights.shape), weights / (1 - rate), 0
        )
    return weights @ v


def pooled(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), module)


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)


def batch_norm(params: Any, state: Any, x: Any, train: bool, momentum: float = 0.1) -> Any:
    """With the module's names; momentum is the share of the old statistics."""
    x = x @ params["0.weight"].T + params["0.bias"]
    mean, var = (
        (x.mean(0), x.var(0)) if train else (state["1.running_mean"], state["1.running_var"])
    )
    y = (x - mean) / jnp.sqrt(var + 1e-5) * params["1.weight"] + params["1.bias"]
    if train:
        new = {"1.running_mean": mean, "1.running_var": x.var(0, ddof=1)}
        state = state | {
            name: momentum * state[name] + (1 - momentum) * x for name, x in new.items()
        }
    return y, state


def recurrent_port(params: Any, words: Any, gates: str = "ifgo", start: float = 0.0) -> Any:
    """Of ``Recurrent``, with the module's names; start: the hidden state at first."""

    def linear(x: Any, name: str) -> Any:
        return x @ params[f"lstm.weight_{name}_l0"].T + params[f"lstm.bias_{name}_l0"]

    def step(carry: Any, x: Any) -> Any:
        h, c = carry
        parts = jnp.split(linear(x, "ih") + linear(h, "hh"), 4, -1)
        gate = {name: jax.nn.sigmoid(part) for name, part in zip(gates, parts, strict=True)}
        c = gate["f"] * c + gate["i"] * jnp.tanh(parts[gates.index("g")])
        return (gate["o"] * jnp.tanh(c), c), None

    x = params["embedding.weight"][words].swapaxes(0, 1)
    begin = jnp.full((x.shape[1], 5), start, x.dtype)
    (h, _), _ = lax.scan(step, (begin, jnp.zeros_like(begin)), x)
    return h @ params["head.weight"].T + params["head.bias"]


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 3, 3), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).flatten(1))


def flattened_port(params: Any, x: Any, last: bool = False) -> Any:
    """Of ``Flattened``; last: its channels are the last dimension where it is flattened."""
    x = lax.conv(x, params["conv.weight"], (1, 1), "VALID") + params["conv.bias"][:, None, None]
    x = x.transpose(0, 2, 3, 1) if last else x
    return x.reshape(len(x), -1) @ params["fc.weight"].T + params["fc.bias"]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def stacked(tensors: dict[str, jax.Array]) -> Any:
    return tuple(
        jnp.stack([tensors[f"layers.{i}.{name}"] for i in range(3)]) for name in ("weight", "bias")
    )


def deep_port(params: Any, x: Any, wrong: int = -1) -> Any:
    """Its layers are the steps of a loop."""

    def step(x: Any, each: Any) -> Any:
        i, (w, b) = each
        return jnp.tanh(x @ w.T + jnp.where(i == wrong, 0, b)), None

    return lax.scan(step, x, (jnp.arange(3), params))[0]


class WithLoss(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.mse_loss(super().forward(x), x, reduction="sum")


block = functools.partial(functools.partial, NNXBlock)
WRONG = {
    "softmax along the wrong axis": Wrong(
        Block, block(axis=-2), (2, 5, 8), "", "softmax", words=r"weights = jax.nn.softmax\(scores"
    ),
    "another eps in a layer norm": Wrong(
        Block, block(eps=1e-6), (2, 5, 8), "norm2", "layer_norm", words=r"self.down\(jax.nn.gelu"
    ),
    "gelu by tanh": Wrong(Block, block(approximate=True), (2, 5, 8), "act", "gelu"),
    "no residual": Wrong(
        Block, block(residual=False), (2, 5, 8), "", "add", words="return x \\+ self.down"
    ),
    "heads in another order": Wrong(Block, block(heads=False), (2, 5, 8), "out", "linear"),
    "batch norm's momentum as in torch": Wrong(
        CNN, FlaxCNN(momentum=0.1), (2, 2, 8, 8), "bn1", "running_mean", "train"
    ),
    "momentum of another convention, in plain JAX": Wrong(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        batch_norm,
        (6, 3),
        "1",
        "running_mean",
        "train",
    ),
    "statistics that are not updated": Wrong(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        functools.partial(batch_norm, momentum=1.0),
        (6, 3),
        "1",
        "running_mean",
        "train",
    ),
    "no scale in an attention": Wrong(
        Block, block(scale=1.0), (2, 5, 8), "", "div", words="q @ k.mT / 2"
    ),
    "the gates of an LSTM in another order": Wrong(
        Recurrent, functools.partial(recurrent_port, gates="ifog"), (), "lstm", "lstm"
    ),
    "a hidden state that begins with ones": Wrong(
        Recurrent, functools.partial(recurrent_port, start=1.0), (), "lstm", "lstm"
    ),
    "channels last where a linear layer follows": Wrong(
        Flattened, functools.partial(flattened_port, last=True), (3, 2, 4, 4), "fc", "linear"
    ),
    "a convolution padded as SAME": Wrong(
        CNN, FlaxCNN(padding="SAME"), (2, 2, 8, 8), "conv1", "conv2d"
    ),
    "an average that counts padding": Wrong(
        CNN, FlaxCNN(count=True), (2, 2, 8, 8), "pool", "avg_pool2d"
    ),
    "dropout left on in linen": Wrong(
        CNN, FlaxCNN(dropped=True), (2, 2, 8, 8), "drop", "dropout", words="draws random numbers"
    ),
    "dropout left on in plain JAX": Wrong(
        Attention,
        functools.partial(attention_port, dropped=True),
        (2, 5, 4),
        "drop",
        "dropout",
        words="draws random numbers",
    ),
    "another rate of dropout": Wrong(
        Attention,
        functools.partial(attention_port, rate=0.6),
        (2, 5, 4),
        "drop",
        "dropout",
        "train",
        False,
    ),
    "a bias that is not added": Wrong(
        Attention, functools.partial(attention_port, bias=False), (2, 5, 4), "v", "linear"
    ),
    "a layer without its bias": Wrong(
        CNN,
        FlaxCNN(bias=False),
        (2, 2, 8, 8),
        "conv2",
        "conv2d",
        words="conv2.bias: the port does not have it",
    ),
    "a square weight transposed": Wrong(
        mlp,
        functools.partial(mlp_port, turned=True),
        (5, 3),
        "2",
        "linear",
        words="With 2.weight transposed the outputs agree",
        options={"variables": mlp_params},
    ),
    "a mean in place of a sum": Wrong(
        lambda: pooled(Sum()),
        lambda p, x: jnp.tanh(x @ p["0.weight"].T + p["0.bias"]).mean(1),
        (5, 3),
        "2",
        "sum",
    ),
    "a loss that is a mean in place of a sum": Wrong(
        mlp,
        mlp_port,
        (5, 3),
        "",
        "loss",
        options={
            "variables": mlp_params,
            "loss": (lambda y: y.square().sum(), lambda y: (y**2).mean()),
        },
    ),
    "a loss inside of the module": Wrong(
        lambda: WithLoss(3, 3),
        lambda p, x: ((x @ p["weight"].T + p["bias"] - x) ** 2).mean(),
        (5, 3),
        "",
        "mse_loss",
    ),
    "a bias in the second step of a loop": Wrong(
        Deep,
        functools.partial(deep_port, wrong=1),
        (5, 3),
        "layers.1",
        "linear",
        words=r"return jnp.tanh\(x @ w.T",
        options={"names": stacked},
    ),
    "another activation before a layer": Wrong(
        lambda: pooled(nn.Linear(4, 2)),
        lambda p, x: (
            jax.nn.relu(jnp.tanh(x @ p["0.weight"].T + p["0.bias"])) @ p["2.weight"].T + p["2.bias"]
        ),
        (5, 3),
        "1",
        "tanh",
        sure=False,
        words="goes on computing with the output of layer '1'",
    ),
    "an input that is scaled": Wrong(
        LINEAR,
        lambda p, x: x / 255 @ p["weight"].T + p["bias"],
        (5, 3),
        "",
        "linear",
        sure=False,
        words="the module's input, before",
    ),
    "not a number": Wrong(
        LINEAR,
        lambda p, x: (x @ p["weight"].T + p["bias"]) * jnp.nan,
        (5, 3),
        "",
        "linear",
        words="before the end",
    ),
    "a gradient that is stopped": Wrong(
        lambda: pooled(nn.Linear(4, 2)),
        lambda p, x: (
            lax.stop_gradient(jnp.tanh(x @ p["0.weight"].T + p["0.bias"])) @ p["2.weight"].T
            + p["2.bias"]
        ),
        (5, 3),
        "0",
        "weight",
        sure=False,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_layer_of_a_fault_is_named(name: str) -> None:
    wrong = WRONG[name]
    torch.manual_seed(0)
    module = randomized(wrong.module())
    modes = ["eval"] if wrong.mode == "eval" else ["eval", "train"]
    found = port_parity(
        module,
        wrong.port,
        torch.randn(wrong.shape) if wrong.shape else WORDS,
        dtypes=["float64"],
        modes=modes,
        **wrong.options,
    )
    assert not found.equal
    departure = found.departure
    assert departure is not None, str(found)
    assert (departure.layer, departure.what, departure.sure) == (
        wrong.layer,
        wrong.what,
        wrong.sure,
    ), str(found)
    assert next(c.mode for c in found.checks if c.difference is not None) == wrong.mode
    assert re.search(wrong.words, str(found)), str(found)


# -- weights ---------------------------------------------------------------------------------------
TWICE = lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
TWICE3 = lambda: nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in ((3, 4), (4, 5), (5, 3))))


def dense(params: Any, x: Any, turned: bool = False) -> Any:
    w, b = params["w"], params["b"]
    return x @ (w.T if turned else w) + b


def two(params: Any, x: Any) -> Any:
    return (
        jnp.tanh(x @ params["first"]["w"] + params["first"]["b"]) @ params["other"]["w"]
        + params["other"]["b"]
    )


def two_params() -> Any:
    return {name: {"w": jnp.ones((3, 3)), "b": jnp.ones(3)} for name in ("first", "other")}


def converted(tensors: dict[str, jax.Array]) -> Any:
    return {"w": tensors["weight"].T, "b": tensors["bias"]}


MAPPED: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "torch's names": (LINEAR, lambda p, x: x @ p["weight"].T + p["bias"], {}),
    "shapes, in Flax's layout": (
        LINEAR,
        dense,
        {"variables": {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}},
    ),
    "shapes, in torch's layout": (
        LINEAR,
        functools.partial(dense, turned=True),
        {"variables": {"w": jnp.ones((2, 3)), "b": jnp.ones(2)}},
    ),
    "a function of a key makes them": (
        LINEAR,
        dense,
        {"variables": lambda key: {"w": jax.random.normal(key, (3, 2)), "b": jnp.ones(2)}},
    ),
    "a square weight in torch's layout": (
        lambda: nn.Linear(3, 3),
        functools.partial(dense, turned=True),
        {"variables": {"w": jnp.ones((3, 3)), "b": jnp.ones(3)}, "layout": "torch"},
    ),
    "numbered names": (
        mlp,
        lambda p, x: mlp_port([(p[f"w{i}"], p[f"b{i}"]) for i in range(3)], x),
        {
            "variables": lambda: {
                f"{k}{i}": v
                for i, wb in enumerate(mlp_params())
                for k, v in zip("wb", wb, strict=True)
            }
        },
    ),
    "a map": (TWICE, two, {"variables": two_params, "names": {"0": "first", "2": "other"}}),
    "a function": (LINEAR, dense, {"names": converted}),
    "a function that returns a tuple, for a loop": (Deep, deep_port, {"names": stacked}),
    "a linen class, and a function for it": (
        LINEAR,
        linen.Dense(2),
        {"names": lambda t: {"params": {"kernel": t["weight"].T, "bias": t["bias"]}}},
    ),
    "an nnx module, and a function for it": (
        LINEAR,
        nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
        {"names": lambda t: {"kernel": t["weight"].T, "bias": t["bias"]}},
    ),
    "a method of a module": (LINEAR, linen.Dense(2).apply, {}),
    "adam": (LINEAR, dense, {"names": converted, "optimizer": "adam"}),
    "an optimizer of one's own": (
        LINEAR,
        dense,
        {
            "names": converted,
            "optimizer": (
                lambda params: torch.optim.AdamW(params, 0.1),
                optax.adamw(0.1, weight_decay=1e-2),
            ),
        },
    ),
    "a loss, with targets": (
        LINEAR,
        dense,
        {
            "names": converted,
            "targets": [torch.tensor([0, 1, 1, 0])],
            "loss": (
                F.cross_entropy,
                lambda y, k: optax.softmax_cross_entropy_with_integer_labels(y, k).mean(),
            ),
        },
    ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_weights_find_their_arrays(name: str) -> None:
    make, port, options = MAPPED[name]
    module = randomized(make())
    before = {key: t.clone() for key, t in module.state_dict().items()}
    state = torch.get_rng_state()
    assert_port_parity(module, port, X, **QUICK, **options)
    assert (
        all(torch.equal(t, before[key]) for key, t in module.state_dict().items())
        and module.training
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_arrays_in_the_order_of_another_key_are_found_in_the_report() -> None:
    found = port_parity(randomized(mlp()), mlp_port, X, variables=mlp_params, **QUICK)
    assert found.names == {
        f"params/{i}/{j}": f"{2 * i}.{name}"
        for i in range(3)
        for j, name in enumerate(("weight", "bias"))
    }


def test_an_nnx_module_is_not_changed() -> None:
    port = nnx.Sequential(
        nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, momentum=0.9, rngs=nnx.Rngs(0))
    )
    before = jax.tree.map(np.array, nnx.state(port))
    found = port_parity(
        randomized(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))), port, X, dtypes=["float64"]
    )
    assert found.equal, str(found)
    assert "1.running_var follows the biased variance" in found.notes[0]
    layers = {
        "layers": {"0": ("weight", "bias"), "1": ("weight", "bias", "running_mean", "running_var")}
    }
    ends = {
        "0.weight": "kernel",
        "1.weight": "scale",
        "running_mean": "mean",
        "running_var": "var",
        "bias": "bias",
    }
    by_hand = lambda t: {
        "layers": {
            layer: {
                ends.get(f"{layer}.{name}", ends.get(name)): t[f"{layer}.{name}"].T
                for name in names
            }
            for layer, names in layers["layers"].items()
        }
    }
    found = port_parity(
        randomized(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))),
        port,
        X,
        dtypes=["float64"],
        names=by_hand,
    )
    assert (
        found.equal and "batch_stats/layers/1/var follows the biased variance" in found.notes[0]
    ), str(found)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, nnx.state(port)), before)


def test_the_line_of_a_port_of_integers() -> None:
    class Words(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 3))

    port = lambda p, words: jax.nn.sigmoid(p["0.weight"][words]) @ p["2.weight"].T + p["2.bias"]
    found = port_parity(randomized(Words()), port, WORDS, **QUICK)
    assert (found.departure.layer, found.departure.what) == (
        "1",
        "tanh",
    ) and "jax.nn.sigmoid" in found.departure.port_line


def test_a_tensor_that_is_two_arrays_is_trained_apart() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x).tanh())

    untied = lambda t: {"one": t["one.weight"].T, "two": t["two.weight"].T}
    found = port_parity(
        Tied(), lambda p, x: jnp.tanh(x @ p["one"]) @ p["two"], X, names=untied, **QUICK
    )
    assert not found.equal and found.checks[0].difference.where == "gradient of params/one"


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], str]] = {
    "another shape": (
        LINEAR,
        dense,
        {"variables": {"w": jnp.ones((5, 2)), "b": jnp.ones(2)}},
        r"weight +- +(.|\n)*params/w +(.|\n)*names=\{",
    ),
    "one weight is transposed": (
        TWICE3,
        three,
        {"variables": lambda: three_params(turned=True)},
        (
            r"params/2/w has the shape that 2.weight has in torch, .3, 5.; "
            r"Flax's layout is its transpose"
        ),
    ),
    "any of two": (TWICE, two, {"variables": two_params}, r"any of 2 could be"),
    "a name that is none": (
        TWICE,
        two,
        {"variables": two_params, "names": {"7": "first"}},
        "'7' fits no tensor of the module",
    ),
    "names without arrays": (LINEAR, dense, {"names": {"weight": "w"}}, "give variables="),
    "a function that raises": (
        LINEAR,
        dense,
        {"names": lambda t: t["wait"]},
        "names: the function .* raised KeyError: 'wait'",
    ),
    "a missing name": (
        LINEAR,
        dense,
        {},
        "port: with the module's arguments it raised KeyError: 'w'",
    ),
    "a port that raises": (
        LINEAR,
        lambda p, x: x @ p["weight"],
        {},
        r"it raised TypeError: .*test_ports.py:\d+",
    ),
    "no port": (LINEAR, 3, {}, "port: .*int"),
    "no state is returned": (
        LINEAR,
        lambda p, state, x: x @ p["weight"].T,
        {},
        r"has to return \(output, state\)",
    ),
    "a module that raises": (
        lambda: nn.Linear(5, 2),
        dense,
        {},
        "module: its call raised RuntimeError",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_says_why(name: str) -> None:
    make, port, options, words = REFUSED[name]
    with pytest.raises(PortError, match=words):
        port_parity(make(), port, X, **QUICK, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtypes": ["int8"]}, "dtypes: expected 'float64' or 'float32', got 'int8'"),
        ({"modes": []}, r"modes: expected 'eval' or 'train'"),
        ({"layout": "tf"}, "layout: expected 'flax' or 'torch', got 'tf'"),
        ({"optimizer": "lion"}, "optimizer: expected one of sgd, adam"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        port_parity(LINEAR(), dense, X, **options)


def test_outputs_of_another_structure_shape_or_dtype() -> None:
    weights = lambda p, x: x @ p["weight"].T + p["bias"]
    for port, words in (
        (lambda p, x: (weights(p, x), x), "output: torch has one, the port has none"),
        (
            lambda p, x: weights(p, x)[:, :1],
            r"output differs in shape: torch \(4, 2\), the port \(4, 1\)",
        ),
        (
            lambda p, x: weights(p, x).astype(jnp.float32),
            "output differs in dtype: torch torch.float64, the port torch.float32",
        ),
    ):
        with pytest.raises(ParityError, match=words):
            assert_port_parity(LINEAR(), port, X, **QUICK)


def test_a_port_without_a_mode_is_compared_in_eval_mode() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    found = port_parity(module, lambda p, x: x @ p["0.weight"].T + p["0.bias"], X, dtypes="float64")
    assert (
        found.equal
        and [c.mode for c in found.checks] == ["eval"]
        and "Only eval mode was compared" in found.notes[0]
    )


# -- the command -----------------------------------------------------------------------------------
FILES = {
    "model.py": """
        import torch
        from torch import nn

        class Net(nn.Sequential):
            def __init__(self, width=4):
                super().__init__(nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 2))

        def loss(y, k):
            return nn.functional.cross_entropy(y, k)
        """,
    "port.py": """
        import jax.numpy as jnp
        import optax
        from flax import linen

        class Port(linen.Module):
            epsilon: float = 1e-5

            @linen.compact
            def __call__(self, x):
                x = linen.LayerNorm(self.epsilon)(linen.Dense(4, name="up")(x))
                return linen.Dense(2, name="down")(x)

        wrong, dense = Port(1e-6), linen.Dense(7)

        def init():
            return {"a": jnp.ones((3, 4))}

        def apply(params, x):
            return x

        def convert(tensors):
            names = [("up", "kernel"), ("LayerNorm_0", "scale"), ("down", "kernel")]
            return {
                layer: {end: tensors[f"{i}.weight"].T, "bias": tensors[f"{i}.bias"]}
                for i, (layer, end) in enumerate(names)
            }

        def loss(y, k):
            return optax.softmax_cross_entropy_with_integer_labels(y, k).mean()
        """,
    "names.json": '{"0": "up", "2": "down"}',
    "list.json": "[]",
}
QUICKLY = ["--mode", "eval", "--steps", "2", "--shape", "5,3"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("model", "port"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def run(*args: str) -> Result:
    return CliRunner().invoke(
        app, ["parity", *args], env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    )


#: What stands after the module -> the exit code, and what is printed.
COMMANDS: dict[str, tuple[str, int, str]] = {
    "a right port": (
        "--against port.py:Port",
        0,
        "float64 .* equal: outputs, loss, gradients, optim",
    ),
    "a file of names": ("--against port.py:Port --names names.json", 0, "equal: outputs"),
    "a function for the arrays": (
        "--against port.py:Port --names port.py:convert",
        0,
        "equal: outputs",
    ),
    "losses": (
        (
            "--against port.py:Port --loss model.py:loss --port-loss port.py:loss --target "
            "randint(2,(5,)) --optimizer adam"
        ),
        0,
        "equal: outputs, loss",
    ),
    "a wrong port": (
        "--against port.py:wrong",
        1,
        r"Surely, the first difference is in layer '1' \(LayerNorm",
    ),
    "a port of another shape": ("--against port.py:dense", 2, "params/bias"),
    "a port without the parameters": (
        "--against port.py:apply --variables port.py:init",
        1,
        "2.bias: the port does not have it",
    ),
    "no such port": ("--against port.py:Prot", 2, "has no attribute 'Prot'"),
    "no file of names": (
        "--against port.py:Port --names nome.json",
        2,
        "--names: nome.json: .*No such",
    ),
    "a file of other things": ("--against port.py:Port --names list.json", 2, "expected an object"),
    "an option of ports": ("--layout flax", 2, "--layout: it is of use with --against alone"),
    "an option of functions": (
        "--against port.py:Port -t grad",
        2,
        "--transform: --against has no use for it",
    ),
    "one loss": ("--against port.py:Port --loss model.py:loss", 2, "both --loss"),
    "an optimizer that is none": ("--against port.py:Port --optimizer lion", 2, "one of sgd, adam"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command(name: str, files: None) -> None:
    args, code, words = COMMANDS[name]
    result = run("model.py:Net", *args.split(), *(QUICKLY if "--against" in args else QUICKLY[-2:]))
    said = re.sub(r"[\s│]+", " ", result.stdout + result.stderr)
    assert result.exit_code == code, result.output
    assert re.search(words, said), said


def test_json_and_help(files: None) -> None:
    assert (
        "expected an nn.Module"
        in run("torch:sin", "--against", "port.py:Port", "--shape", "3").stderr
    )
    result = run("model.py:Net", "--against", "port.py:wrong", "--json", *QUICKLY)
    read = json.loads(result.stdout)
    assert (
        result.exit_code == 1
        and not read["equal"]
        and read["departure"]["layer"] == "1"
        and read["departure"]["sure"]
    )
    assert (
        "port.py:" in read["departure"]["port_line"]
        and read["names"]["params/up/kernel"] == "0.weight"
    )
    assert [c["dtype"] for c in read["checks"]] == ["float64", "float32"] and read["checks"][0][
        "difference"
    ]["port"]
    text = re.sub(r"[\s│]+", " ", run("--help").stdout)
    assert "--against port.py:FlaxNet" in text and "Beside a port" in text and "--port-loss" in text
