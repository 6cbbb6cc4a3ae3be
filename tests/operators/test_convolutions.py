"""Convolutions beside PyTorch's: every lowering's path (patches side by side, columns, depthwise),
mapped over images, kernels or both.

The derivatives of the three faces are one another's, so the second derivative is asked for too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import same

import torchfunc_jax
from torchfunc_jax import jit

# image, kernel (O, C / groups, *kernel), options
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "patches": ((2, 3, 6, 4), (4, 3, 3, 2), {"stride": (3, 2)}),
    "patches and a rest that no window reads": ((2, 3, 8, 5), (4, 3, 3, 2), {"stride": (3, 2)}),
    "patches in groups": ((2, 4, 4, 6), (6, 2, 2, 3), {"stride": (2, 3), "groups": 2}),
    "patches of a sequence": ((3, 2, 9), (5, 2, 4), {"stride": 4}),
    "patches of a volume": ((2, 2, 4, 5, 3), (3, 2, 2, 2, 3), {"stride": (2, 2, 3)}),
    "one patch": ((2, 3, 4, 4), (2, 3, 4, 4), {"stride": 4}),
    "patches with padding": ((2, 3, 5, 4), (4, 3, 2, 2), {"stride": 2, "padding": 1}),
    "a stride as wide, a dilated kernel": (
        (2, 3, 9, 9),
        (4, 3, 2, 2),
        {"stride": 2, "dilation": 2},
    ),
    "one by one": ((2, 3, 4, 4), (4, 3, 1, 1), {}),
    "one by one, strided": ((2, 3, 4, 5), (4, 3, 1, 1), {"stride": 2}),
    "three by three": ((2, 3, 5, 6), (4, 3, 3, 3), {"padding": 1}),
    "depthwise": ((2, 3, 5, 6), (3, 1, 3, 3), {"groups": 3, "padding": 1}),
    "depthwise patches": ((2, 3, 6, 6), (3, 1, 2, 2), {"groups": 3, "stride": 2}),
}
MAPPED = {"nothing": None, "images": (0, None), "kernels": (None, 0), "both": (0, 0)}


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    ("mapped", "dtype"), [*[(how, torch.float64) for how in MAPPED], ("both", torch.complex128)]
)
@pytest.mark.parametrize("name", CASES)
def test_value_and_derivatives(name: str, mapped: str, dtype: torch.dtype) -> None:
    image, kernel, options = CASES[name]
    dims, lanes = MAPPED[mapped], 3
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(image)]
    x = torch.randn(*((lanes,) if dims and dims[0] == 0 else ()), *image, dtype=dtype)
    w = torch.randn(*((lanes,) if dims and dims[1] == 0 else ()), *kernel, dtype=dtype)

    def run(T: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        def value(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return convolve(x, w, **options)

        def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (value(x, w) ** 3).real.sum()

        def second(x: torch.Tensor, w: torch.Tensor) -> Any:
            return T.grad(
                lambda x, w: sum((g.abs() ** 2).sum() for g in T.grad(loss, (0, 1))(x, w)), (0, 1)
            )(x, w)

        found = (value, T.grad(loss, (0, 1)), second)
        return [(T.vmap(f, dims) if dims else f)(x, w) for f in found]

    same(jit(lambda x, w: run(torchfunc_jax, x, w))(x, w), run(torch.func, x, w))
