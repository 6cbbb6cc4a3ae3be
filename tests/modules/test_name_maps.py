"""Name maps between torch modules and hand-written twins: found without rules for the layouts of
Flax's own examples, and what is not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import linen, nnx
from networks import randomized
from torch import nn

from bridge.flax import name_map

WIDTH, HEADS, WORDS, LENGTH = 8, 2, 11, 6


# -- a ResNet: torchvision's names, and those of flax/examples/imagenet ----------------------------
class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = (
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride > 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn3(self.conv3(self.bn2(self.conv2(y)).relu()))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet(nn.Module):
    def __init__(self, stages: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1, self.bn1, self.maxpool = (
            nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.MaxPool2d(3, 2, 1),
        )
        inputs = WIDTH
        for i, blocks in enumerate(stages):
            width = WIDTH * 2**i
            made = [
                Bottleneck(inputs if j == 0 else 4 * width, width, 2 if i and j == 0 else 1)
                for j in range(blocks)
            ]
            self.add_module(f"layer{i + 1}", nn.Sequential(*made))
            inputs = 4 * width
        self.stages, self.fc = len(stages), nn.Linear(inputs, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        for i in range(self.stages):
            x = self.get_submodule(f"layer{i + 1}")(x)
        return self.fc(x.mean((2, 3)))


class BottleneckResNetBlock(linen.Module):
    filters: int
    stride: int

    @linen.compact
    def __call__(self, x: Any) -> Any:
        conv = functools.partial(linen.Conv, use_bias=False)
        norm = functools.partial(linen.BatchNorm, use_running_average=True, epsilon=1e-5)
        y = linen.relu(norm()(conv(self.filters, (1, 1))(x)))
        y = linen.relu(norm()(conv(self.filters, (3, 3), self.stride, 1)(y)))
        y = norm()(conv(self.filters * 4, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="norm_proj")(
                conv(self.filters * 4, (1, 1), self.stride, name="conv_proj")(x)
            )
        return linen.relu(x + y)


class FlaxResNet(linen.Module):
    stages: tuple[int, ...]

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(WIDTH, (7, 7), 2, 3, use_bias=False, name="conv_init")(x)
        x = linen.relu(linen.BatchNorm(use_running_average=True, epsilon=1e-5, name="bn_init")(x))
        x = linen.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                x = BottleneckResNetBlock(WIDTH * 2**i, 2 if i and j == 0 else 1)(x)
        return linen.Dense(5)(x.mean((1, 2)))


def resnet_names(stages: tuple[int, ...]) -> dict[str, str]:
    """By hand: the layers of the torch module, and of the twin."""
    names = {"conv1": "conv_init", "bn1": "bn_init", "fc": "Dense_0"}
    inside = {
        f"{kind}{n + 1}": f"{theirs}_{n}"
        for kind, theirs in (("conv", "Conv"), ("bn", "BatchNorm"))
        for n in range(3)
    }
    inside |= {"downsample.0": "conv_proj", "downsample.1": "norm_proj"}
    blocks = [f"layer{i + 1}.{j}" for i, n in enumerate(stages) for j in range(n)]
    return names | {
        f"{b}.{ours}": f"BottleneckResNetBlock_{n}/{theirs}"
        for n, b in enumerate(blocks)
        for ours, theirs in inside.items()
    }


LEAVES = {
    "weight": ("kernel", "scale", "embedding"),
    "bias": ("bias",),
    "running_mean": ("mean",),
    "running_var": ("var",),
}


def assert_matched(found: Any, names: dict[str, str]) -> None:
    assert not found.unmatched and not found.unmatched_twin, str(found)
    for ours, theirs, _ in found.matched:
        layer, _, leaf = ours.rpartition(".")
        *_, theirs_leaf = theirs.split("/")
        assert (
            theirs.split("/", 1)[1] == f"{names[layer]}/{theirs_leaf}"
            and theirs_leaf in LEAVES[leaf]
        ), (ours, theirs)


@pytest.mark.parametrize("stages", [(3, 4, 6, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("init", ["in order", "sorted"])
def test_resnet(stages: tuple[int, ...], init: str) -> None:
    module = randomized(ResNet(stages))
    twin, images = FlaxResNet(stages), np.ones((1, 32, 32, 3), np.float32)
    variables = jax.eval_shape(twin.init, jax.random.key(0), images)
    # as the layers are called, which is how init returns them if it is not jitted
    if init == "in order":
        kept: list[Any] = []
        jax.eval_shape(lambda: kept.append(twin.init(jax.random.key(0), images)))
        variables = kept[0]
    assert_matched(name_map(module, variables), resnet_names(stages))


def test_resnet_computes_the_same() -> None:
    module, twin, images = randomized(ResNet((1, 1))), FlaxResNet((1, 1)), torch.randn(1, 3, 16, 16)
    found = name_map(
        module, jax.eval_shape(twin.init, jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
    )
    out = jax.jit(twin.apply)(found.to_flax(), images.movedim(1, -1).numpy())
    np.testing.assert_allclose(out, module(images).detach(), rtol=1e-4)


# -- a GPT: nanoGPT's names in torch, with one Linear for queries, keys and values, with three, and
# with torch's attention
class Attention(nn.Module):
    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        if kind == "fused":
            self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3)
            )
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = (
            self.c_attn(x).chunk(3, -1)
            if hasattr(self, "c_attn")
            else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in each)
        return self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class TorchAttention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return super().forward(x, x, x, attn_mask=mask, need_weights=False)[0]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.c_fc(x).relu())


class Block(nn.Module):
    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = (
            TorchAttention(WIDTH, HEADS, bias=bias, batch_first=True)
            if kind == "torch"
            else Attention(kind, bias)
        )
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, kind: str, layers: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList(Block(kind, bias) for _ in range(layers)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](words) + self.transformer["wpe"](torch.arange(words.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


# -- its twins: linen named as in flax/examples/lm1b, nnx named as in flax/examples/lm1b_nnx and
# gemma, and as in nanoGPT
norm = functools.partial(linen.LayerNorm, epsilon=1e-5)


class AddPositionEmbs(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return (
            x
            + self.param("pos_embedding", linen.initializers.normal(), (1, LENGTH, WIDTH))[
                :, : x.shape[1]
            ]
        )


class MlpBlock(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.relu(linen.Dense(self.width)(x))
        return linen.Dense(WIDTH)(x)


class EncoderDecoder1DBlock(linen.Module):
    mlp: int
    bias: bool

    @linen.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        x = x + linen.MultiHeadDotProductAttention(HEADS, use_bias=self.bias)(norm()(x), mask=mask)
        return x + MlpBlock(self.mlp)(norm()(x))


class Decoder(linen.Module):
    layers: int
    mlp: tuple[int, ...]
    bias: bool
    logits: bool

    @linen.compact
    def __call__(self, words: Any) -> Any:
        y = AddPositionEmbs(name="posembed_output")(linen.Embed(WORDS, WIDTH)(words))
        for i in range(self.layers):
            mlp = self.mlp[i] if self.mlp else 4 * WIDTH
            y = EncoderDecoder1DBlock(mlp, self.bias, name=f"encoderdecoderblock_{i}")(
                y, linen.make_causal_mask(words)
            )
        y = norm(name="encoderdecoder_norm")(y)
        return linen.Dense(WORDS, name="logitdense")(y) if self.logits else y


class TransformerLM(linen.Module):
    layers: int = 2
    mlp: tuple[int, ...] = ()
    bias: bool = False
    logits: bool = True

    @linen.compact
    def __call__(self, words: Any) -> Any:
        return Decoder(self.layers, self.mlp, self.bias, self.logits, name="decoder")(words)


class NNXBlock(nnx.Module):
    """Its parts are defined in the order of a call, and have other names in sorted order."""

    def __init__(self, kind: str, rngs: nnx.Rngs) -> None:
        self.kind, shape = kind, (HEADS, WIDTH, WIDTH // HEADS)
        self.pre_attention_norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        if kind == "lm1b":
            self.attention = nnx.MultiHeadAttention(
                HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs
            )
        elif kind.startswith("gemma"):
            self.attn_vec_einsum = nnx.Einsum(
                "BTNH,NHD->BTD", (HEADS, WIDTH // HEADS, WIDTH), rngs=rngs
            )
            if kind == "gemma":
                self.qkv_einsum = nnx.Einsum("BTD,SNDH->SBTNH", (3, *shape), rngs=rngs)
            else:
                self.kv_einsum = nnx.Einsum("BTD,SNDH->SBTNH", (2, *shape), rngs=rngs)
                self.q_einsum = nnx.Einsum("BTD,NDH->BTNH", shape, rngs=rngs)
        else:
            self.c_attn, self.c_proj = (
                nnx.Linear(WIDTH, n * WIDTH, use_bias=False, rngs=rngs) for n in (3, 1)
            )
        self.before_ffw_norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.linear1, self.linear2 = (
            nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
            nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        )

    def __call__(self, x: Any, mask: Any) -> Any:
        y = self.pre_attention_norm(x)
        if self.kind == "lm1b":
            y = self.attention(y, mask=mask)
        else:
            q, k, v = (
                self.qkv_einsum(y)
                if self.kind == "gemma"
                else (self.q_einsum(y), *self.kv_einsum(y))
                if self.kind == "gemma, kv"
                else (
                    part.reshape(*y.shape[:2], HEADS, -1)
                    for part in jnp.split(self.c_attn(y), 3, -1)
                )
            )
            y = nnx.dot_product_attention(q, k, v, mask=mask)
            y = (
                self.attn_vec_einsum(y)
                if self.kind.startswith("gemma")
                else self.c_proj(y.reshape(x.shape))
            )
        x = x + y
        return x + self.linear2(nnx.relu(self.linear1(self.before_ffw_norm(x))))


class NNXModel(nnx.Module):
    def __init__(self, kind: str, rngs: nnx.Rngs) -> None:
        self.embedder = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.pos_embedding = nnx.Param(jnp.zeros((LENGTH, WIDTH)))
        self.layers = nnx.List([NNXBlock(kind, rngs) for _ in range(2)])
        self.final_norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.logits = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, words: Any) -> Any:
        x = self.embedder(words) + self.pos_embedding[: words.shape[1]]
        for layer in self.layers:
            x = layer(x, nnx.make_causal_mask(words))
        return self.logits(self.final_norm(x))


SENTENCE = np.array([[1, 5, 3, 10], [2, 2, 0, 7]], np.int32)


def gpt(kind: str, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    module = GPT(kind, **kwargs)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    return module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["fused", "separate", "torch"])
def test_gpt_in_linen(kind: str, bias: bool) -> None:
    module, twin = gpt(kind, bias=bias), TransformerLM(bias=bias)
    variables = jax.eval_shape(twin.init, jax.random.key(0), SENTENCE)
    check(module, name_map(module, variables), lambda new: jax.jit(twin.apply)(new, SENTENCE))


@pytest.mark.parametrize("twin", ["lm1b", "gemma", "gemma, kv", "nanoGPT"])
@pytest.mark.parametrize("kind", ["fused", "separate", "torch"])
def test_gpt_in_nnx(kind: str, twin: str) -> None:
    module = gpt(kind)
    check(
        module,
        name_map(module, NNXModel(twin, nnx.Rngs(0))),
        lambda new: nnx.jit(lambda model: model(SENTENCE))(new),
    )


class Gated(nn.Module):
    """A layer of Gemma in torch: one head of keys and values for several queries,
    and a gated MLP.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(WIDTH, n, bias=False) for n in (16, 4, 4)
        )
        self.o_proj = nn.Linear(16, WIDTH, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 20, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(20, WIDTH, bias=False)


class GatedTwin(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attn_vec_einsum = nnx.Einsum("BTNH,NHD->BTD", (4, 4, WIDTH), rngs=rngs)
        self.q_einsum = nnx.Einsum("BTD,NDH->BTNH", (4, WIDTH, 4), rngs=rngs)
        self.kv_einsum = nnx.Einsum("BTD,SNDH->SBTNH", (2, 1, WIDTH, 4), rngs=rngs)
        self.gating_einsum = nnx.Einsum("BTD,SDF->SBTF", (2, WIDTH, 20), rngs=rngs)
        self.linear = nnx.Einsum("BTF,FD->BTD", (20, WIDTH), rngs=rngs)


def test_stacked_keys_and_values_and_gates() -> None:
    module = randomized(Gated())
    found = name_map(module, GatedTwin(nnx.Rngs(0)))
    assert not found.unmatched and not found.unmatched_twin, str(found)
    new = found.to_flax()
    q, k, v, gate, up = (
        getattr(module, f"{name}_proj").weight.detach().numpy().T
        for name in ("q", "k", "v", "gate", "up")
    )
    np.testing.assert_array_equal(new.kv_einsum.kernel[...], np.stack([k[None], v[None]]))
    np.testing.assert_array_equal(new.gating_einsum.kernel[...], np.stack([gate, up]))
    np.testing.assert_array_equal(
        new.q_einsum.kernel[...], q.reshape(WIDTH, 4, 4).transpose(1, 0, 2)
    )
    np.testing.assert_array_equal(
        new.linear.kernel[...], module.down_proj.weight.detach().numpy().T
    )
    expected = {name: t.clone() for name, t in module.state_dict().items()}
    for p in module.parameters():
        p.data.zero_()
    assert all(
        torch.equal(t, expected[name]) for name, t in found.to_torch(new).state_dict().items()
    )


def check(module: nn.Module, found: Any, call: Callable[[Any], Any]) -> None:
    """Everything matched, the twin computes the same, and the weights come back bit by bit, in both
    directions.
    """
    assert not found.unmatched and not found.unmatched_twin, str(found)
    new = found.to_flax()
    np.testing.assert_allclose(
        call(new), module(torch.tensor(SENTENCE)).detach(), rtol=2e-4, atol=2e-4
    )
    before = {name: t.clone() for name, t in module.state_dict().items()}
    arrays = jax.tree.map(np.array, new if isinstance(new, dict) else nnx.state(new))
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    found.to_torch(new)
    assert {name: t.numpy().tobytes() for name, t in module.state_dict().items()} == {
        n: t.numpy().tobytes() for n, t in before.items()
    }
    after = found.to_flax()
    same = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == b.tobytes(),
        after if isinstance(after, dict) else nnx.state(after),
        arrays,
    )
    assert all(jax.tree.leaves(same))


# -- what does not match, and rules ----------------------------------------------------------------
def shapes_of(twin: linen.Module, *args: Any) -> Any:
    return jax.eval_shape(twin.init, jax.random.key(0), *args)


DECODER = "params/decoder/encoderdecoderblock"
# the models, and all that has no counterpart in the other: name -> a part of the reason
MISMATCHES: dict[str, tuple[nn.Module, linen.Module, dict[str, str], dict[str, str]]] = {
    "a width": (
        GPT("separate", 3),
        TransformerLM(3, mlp=(32, 24, 32)),
        {
            "transformer.h.1.mlp.c_fc.weight": (
                f"and {DECODER}_1/MlpBlock_0/Dense_0/kernel in the twin has (8, 24)"
            ),
            "transformer.h.1.mlp.c_fc.bias": (
                f"shape (32,) in Flax's layout, and {DECODER}_1/MlpBlock_0/Dense_0/bias "
                "in the twin has (24"
            ),
            "transformer.h.1.mlp.c_proj.weight": (
                f"and {DECODER}_1/MlpBlock_0/Dense_1/kernel in the twin has (24, 8)"
            ),
            "transformer.h.1.mlp.c_proj.bias": (
                f"its layer does not fit that of {DECODER}_1/MlpBlock_0/Dense_1/bias in the twin"
            ),
        },
        {
            f"{DECODER}_1/MlpBlock_0/Dense_0/kernel": (
                "and transformer.h.1.mlp.c_fc.weight in the module has (8, 32)"
            ),
            f"{DECODER}_1/MlpBlock_0/Dense_0/bias": (
                "and transformer.h.1.mlp.c_fc.bias in the module has (32,)"
            ),
            f"{DECODER}_1/MlpBlock_0/Dense_1/kernel": (
                "and transformer.h.1.mlp.c_proj.weight in the module has (32, 8)"
            ),
            f"{DECODER}_1/MlpBlock_0/Dense_1/bias": (
                "its layer does not fit that of transformer.h.1.mlp.c_proj.bias in the module"
            ),
        },
    ),
    "a layer that the twin has not": (
        GPT("separate", 2),
        TransformerLM(2, logits=False),
        {
            "lm_head.weight": "the twin has no kernel of shape (8, 11) left",
            "lm_head.bias": "the twin has no bias of shape (11,) left",
        },
        {},
    ),
    "biases that the module has not": (
        GPT("torch", 1),
        TransformerLM(1, bias=True),
        {},
        {
            f"{DECODER}_0/MultiHeadDotProductAttention_0/{of}/bias": (
                f"transformer.h.0.attn.{of} has no bias of shape"
            )
            for of in ("query", "key", "value", "out")
        },
    ),
    "a block that the twin has not": (
        GPT("torch", 3),
        TransformerLM(2),
        {
            name: "the twin has 2 such blocks"
            for name, _ in GPT("separate", 3).named_parameters()
            if ".h.2." in name and "attn" not in name
        }
        | {
            f"transformer.h.2.attn.in_proj_weight[{of}]": "the twin has 2 such blocks"
            for of in ("query", "key", "value")
        }
        | {"transformer.h.2.attn.out_proj.weight": "the twin has 2 such blocks"},
        {},
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatches_are_reported_by_name(name: str) -> None:
    module, twin, ours, theirs = MISMATCHES[name]
    found = name_map(module, shapes_of(twin, SENTENCE))
    report = json.loads(found.json())
    for expected, unmatched in ((ours, found.unmatched), (theirs, found.unmatched_twin)):
        assert set(expected) == set(unmatched), str(found)
        for label, reason in expected.items():
            assert (
                reason in unmatched[label]
                and f"{label} " in str(found)
                and unmatched[label] in str(found)
            )
    assert (report["unmatched"], report["unmatched_twin"]) == (
        found.unmatched,
        found.unmatched_twin,
    )
    assert [tuple(row.values()) for row in report["matched"]] == found.matched
    for convert in (found.to_flax, found.to_torch):
        with pytest.raises(
            RuntimeError,
            match=r"are not\n(.|\n)*Give rules for what is not matched, or strict=False",
        ):
            convert()
    assert found.to_flax(strict=False)


class Same(nn.Module):
    """Two layers that no shape tells apart, below a name with a star in the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            nn.ModuleDict({"one": nn.Linear(3, 3), "other": nn.Linear(3, 3)}) for _ in range(2)
        )


def same_twin() -> dict[str, Any]:
    dense = {"bias": jnp.zeros(3), "kernel": jnp.zeros((3, 3))}
    return {
        "params": {"layers": {str(i): {"down": dict(dense), "up": dict(dense)} for i in range(2)}}
    }


def test_rules() -> None:
    # collections in some order say nothing of the order in them
    for more in ({}, {"batch_stats": {"count": {"mean": jnp.zeros(2)}}}):
        found = name_map(Same(), same_twin() | more)
        assert (
            not found.matched
            and found.unmatched["encoder.1.one.bias"]
            == "any of 2 could be layers/1/down and layers/1/up"
        )
    for rules, expected in (
        ({"encoder.*.one": "layers/*/up"}, {"one": "up", "other": "down"}),
        (
            {
                "encoder.*.other.weight": "layers/*/up/kernel",
                "encoder.*.other.bias": "params/layers/*/up/bias",
            },
            {"one": "down", "other": "up"},
        ),
    ):
        found = name_map(Same(), same_twin(), rules)
        ours = {
            torch.rpartition(".")[0]: flax.split("/", 1)[1].rpartition("/")[0]
            for torch, flax, _ in found.matched
        }
        assert ours == {
            f"encoder.{i}.{a}": f"layers/{i}/{b}" for i in range(2) for a, b in expected.items()
        }, str(found)
        assert {why for *_, why in found.matched} == {"rule", "shape"}
    found = name_map(
        Same(), same_twin(), {"encoder.*.one": "layers/*/up", "encoder.*.other": "layers/*/down"}
    )
    # nothing is left to search
    assert (
        {why for *_, why in found.matched} == {"rule"}
        and not found.unmatched
        and not found.unmatched_twin
    )
    found = name_map(Same(), same_twin(), {"encoder.*.one": "layers/*/sideways"})
    assert (
        found.unmatched["encoder.1.one.bias"]
        == "the rule 'encoder.*.one' says layers/1/sideways, which the twin does not have"
    )
    with pytest.raises(ValueError, match=r"rules: 'decoder\.\*' fits no tensor of the module"):
        name_map(Same(), same_twin(), {"decoder.*": "layers/*"})
    with pytest.raises(
        TypeError, match=r"twin: expected an nnx\.Module or the variables of a linen module"
    ):
        name_map(Same(), TransformerLM())  # type: ignore[arg-type]


def test_a_tied_tensor_may_be_one_array() -> None:
    module = gpt("fused")
    module.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
    module.lm_head.weight = module.transformer["wte"].weight
    found = name_map(module, shapes_of(TransformerLM(logits=False), SENTENCE))
    assert not found.unmatched and not found.unmatched_twin
    found.to_torch(found.to_flax())
