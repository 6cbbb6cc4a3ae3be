"""Small modules and an input for them, which several tests use, and when two arrays are close."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
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
