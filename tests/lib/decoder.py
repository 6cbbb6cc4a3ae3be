"""A small decoder with a cache of keys and values, whose layers have the names of Llama's; adapters
for it; and what a compiled program gathers from other devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, INNER, TOKENS = 64, 8, 128, 128


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(
        self, x: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        q, k, v = (
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = Attention(), Perceptron()

    def forward(
        self, x: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        y, cache = self.self_attn(self.input_layernorm(x), cache)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nn.Module):
    """Tokens (batch, length) to logits (batch, length, TOKENS), and the cache: (keys, values) of
    each layer, (batch, HEADS, length, WIDTH / HEADS), to which those of the tokens are appended.
    """

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        cache: Sequence[tuple[torch.Tensor, torch.Tensor] | None] | None = None,
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        x, after = self.embed_tokens(tokens), []
        for layer, pair in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x, pair = layer(x, pair)
            after.append(pair)
        return self.lm_head(self.norm(x)), after


class Adapted(nn.Module):
    """A layer and two small ones, as peft names them."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def with_adapters(model: nn.Module) -> nn.Module:
    """A decoder whose adapters alone require a gradient."""
    model.requires_grad_(False)
    for layer in model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    return model


def gathered(program: str) -> list[int]:
    """How many numbers each result has that a compiled program gathers from several devices, from
    its HLO.
    """
    found = []
    for line in program.splitlines():
        if (op := re.search(r" = (.*?) all-(?:gather|to-all)(?:-start)?\(", line)) is not None:
            shapes = re.findall(r"\w+\[([\d,]*)\]", op[1])
            found.append(max(math.prod(int(n) for n in s.split(",") if n) for s in shapes))
    return found
