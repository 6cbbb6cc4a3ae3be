"""Small modules and an input for them, which several tests use, and when two arrays are close."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(
        np.asarray(a),
        b.detach().numpy() if isinstance(b, torch.Tensor) else np.asarray(b),
        rtol=2e-5,
        atol=2e-5,
    )


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)
    )


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def randomized(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for t in model.state_dict().values():
            if t.is_floating_point():
                t.uniform_(0.5, 1.5)
    return model.eval()


class Decoder(nn.Module):
    """A language model of 40 tokens: two layers with heads, and learned positions; it follows
    generate's protocol.
    """

    def __init__(self, width: int = 16, heads: int = 4, rounded: bool = False) -> None:
        super().__init__()
        self.heads, self.rounded = heads, rounded
        self.embed, self.places = nn.Embedding(40, width), nn.Embedding(64, width)
        self.project = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.head = nn.Linear(width, 40)

    def forward(self, ids: Any, cache: Any, attention_mask: Any, position_ids: Any) -> Any:
        (b, t), before = ids.shape, cache.get_seq_length()
        x = self.embed(ids) + self.places(position_ids)
        for layer, project in enumerate(self.project):
            q, k, v = project(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            k, v = cache.update(k, v, layer)
            causal = torch.arange(k.shape[2]) <= (before + torch.arange(t))[:, None]
            seen = causal & attention_mask[:, None, None].bool()
            # padding sees itself: without any key it would be NaN
            seen = seen | torch.eye(t, k.shape[2], dtype=torch.bool) if t > 1 else seen
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + y.transpose(1, 2).reshape(b, t, -1)
        logits = self.head(x) * 4
        return logits.round() if self.rounded else logits
