"""The workloads: a torch program that takes torch.func or torchfunc_jax, the same computation
written by hand in JAX, and inputs.

A hand-written program sees the parameters under the names that the torch module gives them, so both
start from the same numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import nn

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Workload:
    """One row of the table.

    Attributes:
        what: in a few words.
        program: the module of transforms (torch.func or torchfunc_jax) -> the function that is
            timed.
        native: the same function written in JAX, not yet jitted.
        inputs: the arguments, torch tensors in any tree; the same for every system.
    """

    what: str
    program: Callable[[Any], Callable[..., Any]]
    native: Callable[..., Any]
    inputs: tuple[Any, ...]


def detached(module: nn.Module) -> Params:
    return {name: p.detach() for name, p in module.named_parameters()}


def perceptron(widths: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers with an activation between each two."""
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), activation()]
    return nn.Sequential(*layers[:-1])


# ---- the same layers in JAX ----------------------------------------------------------------------


def affine(p: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def native_perceptron(
    p: Params, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jnp.tanh
) -> jax.Array:
    last = 2 * (len(p) // 2 - 1)
    for i in range(0, last, 2):
        x = activation(affine(p, str(i), x))
    return affine(p, str(last), x)


def native_conv(p: Params, name: str, x: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(
        x, p[f"{name}.weight"], (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )
    return y + p[f"{name}.bias"][:, None, None]


def native_norm(p: Params, name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return centred * scale * p[f"{name}.weight"] + p[f"{name}.bias"]


def native_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


# ---- workloads -----------------------------------------------------------------------------------


def tiny_call() -> Workload:
    return Workload(
        "vmap of sin(x) * 2 on 8 numbers: what a call costs",
        lambda func: func.vmap(lambda x: x.sin() * 2),
        jax.vmap(lambda x: jnp.sin(x) * 2),
        (torch.randn(8),),
    )


def many_params() -> Workload:
    net = perceptron([8] * 101, nn.ReLU)

    def program(func: Any) -> Callable[..., Any]:
        return func.grad(lambda p, x: func.functional_call(net, p, (x,)).sum())

    return Workload(
        "grad of a network of 100 tiny layers: 200 parameters cross",
        program,
        jax.grad(lambda p, x: native_perceptron(p, x, jax.nn.relu).sum()),
        (detached(net), torch.randn(4, 8)),
    )


def ensemble_step() -> Workload:
    nets = [perceptron([64, 128, 128, 10], nn.Tanh) for _ in range(32)]
    stacked = {k: v.detach() for k, v in torch.func.stack_module_state(nets)[0].items()}

    def program(func: Any) -> Callable[..., Any]:
        gradient = func.vmap(
            func.grad(lambda p, x, y: F.cross_entropy(func.functional_call(nets[0], p, (x,)), y)),
            in_dims=(0, None, None),
        )

        def step(p: Params, x: Any, y: Any) -> Params:
            g = gradient(p, x, y)
            return {k: v - 0.1 * g[k] for k, v in p.items()}

        return step

    gradient = jax.vmap(
        jax.grad(lambda p, x, y: native_cross_entropy(native_perceptron(p, x), y)),
        in_axes=(0, None, None),
    )

    def native(p: Params, x: jax.Array, y: jax.Array) -> Params:
        return jax.tree.map(lambda v, g: v - 0.1 * g, p, gradient(p, x, y))

    return Workload(
        "SGD step of 32 MLPs at once",
        program,
        native,
        (stacked, torch.randn(128, 64), torch.randint(10, (128,))),
    )


class SmallCNN(nn.Module):
    """The CNN of the per-sample-gradients tutorials: 1.2 million parameters on 28x28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(64 * 12 * 12, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def native_cnn(p: Params, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(native_conv(p, "conv2", jax.nn.relu(native_conv(p, "conv1", x))))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return affine(p, "fc2", jax.nn.relu(affine(p, "fc1", x.reshape(len(x), -1))))


def per_sample_cnn() -> Workload:
    net = SmallCNN()

    def program(func: Any) -> Callable[..., Any]:
        def loss(p: Params, x: Any, y: Any) -> Any:
            return F.cross_entropy(func.functional_call(net, p, (x[None],)), y[None])

        return func.vmap(func.grad(loss), in_dims=(None, 0, 0))

    native = jax.vmap(
        jax.grad(lambda p, x, y: native_cross_entropy(native_cnn(p, x[None]), y[None])),
        in_axes=(None, 0, 0),
    )
    inputs = (detached(net), torch.randn(64, 1, 28, 28), torch.randint(10, (64,)))
    return Workload("per-sample gradients of a CNN, 64 images", program, native, inputs)


def jacobian_params() -> Workload:
    net = perceptron([32, 64, 64, 10], nn.Tanh)

    def program(func: Any) -> Callable[..., Any]:
        return func.vmap(
            func.jacrev(lambda p, x: func.functional_call(net, p, (x,))), in_dims=(None, 0)
        )

    native = jax.vmap(jax.jacrev(native_perceptron), in_axes=(None, 0))
    return Workload(
        "Jacobian of an MLP by its parameters, 32 samples",
        program,
        native,
        (detached(net), torch.randn(32, 32)),
    )


def hessian_mlp() -> Workload:
    net = perceptron([64, 128, 128, 1], nn.Tanh)

    def program(func: Any) -> Callable[..., Any]:
        return func.vmap(
            func.hessian(lambda p, x: func.functional_call(net, p, (x,)).squeeze(-1), argnums=1),
            in_dims=(None, 0),
        )

    native = jax.vmap(
        jax.hessian(lambda p, x: native_perceptron(p, x).squeeze(-1), argnums=1), in_axes=(None, 0)
    )
    return Workload(
        "Hessian of an MLP by its input, 16 samples",
        program,
        native,
        (detached(net), torch.randn(16, 64)),
    )


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """Four such layers of width 128 on 64 tokens: 0.9 million parameters."""

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 128,
        heads: int = 4,
        layers: int = 4,
        length: int = 64,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[-1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def native_gpt(p: Params, ids: jax.Array, heads: int = 4, layers: int = 4) -> jax.Array:
    batch, length = ids.shape
    x = p["tokens.weight"][ids] + p["positions.weight"][jnp.arange(length)]
    causal = jnp.tril(jnp.ones((length, length), bool))
    for i in range(layers):
        at = f"layers.{i}"
        qkv = affine(p, f"{at}.qkv", native_norm(p, f"{at}.norm1", x))
        q, k, v = (
            t.reshape(batch, length, heads, -1).swapaxes(1, 2) for t in jnp.split(qkv, 3, -1)
        )
        scores = jnp.where(causal, q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, -jnp.inf)
        x = x + affine(p, f"{at}.out", (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape))
        hidden = jax.nn.gelu(
            affine(p, f"{at}.up", native_norm(p, f"{at}.norm2", x)), approximate=False
        )
        x = x + affine(p, f"{at}.down", hidden)
    return affine(p, "head", native_norm(p, "norm", x))


def per_sample_gpt() -> Workload:
    net, text = SmallGPT(), torch.randint(256, (8, 65))

    def program(func: Any) -> Callable[..., Any]:
        def loss(p: Params, x: Any, y: Any) -> Any:
            return F.cross_entropy(func.functional_call(net, p, (x[None],))[0], y)

        return func.vmap(func.grad(loss), in_dims=(None, 0, 0))

    native = jax.vmap(
        jax.grad(lambda p, x, y: native_cross_entropy(native_gpt(p, x[None])[0], y)),
        in_axes=(None, 0, 0),
    )
    inputs = (detached(net), text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return Workload(
        "per-sample gradients of a transformer, 8 texts of 64 tokens", program, native, inputs
    )


def few_rows() -> Workload:
    net = perceptron([1024, 1024, 1024, 256], nn.ReLU)
    return Workload(
        "grad of a batch of 8 through layers of 1,024",
        lambda func: func.grad(lambda p, x: (func.functional_call(net, p, (x,)) ** 2).sum()),
        jax.grad(lambda p, x: (native_perceptron(p, x, jax.nn.relu) ** 2).sum()),
        (detached(net), torch.randn(8, 1024)),
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {
    make.__name__: make
    for make in (
        tiny_call,
        many_params,
        ensemble_step,
        per_sample_cnn,
        jacobian_params,
        hessian_mlp,
        per_sample_gpt,
        few_rows,
    )
}
