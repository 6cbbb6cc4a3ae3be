"""The matrix exponential at norms of all sizes; JAX's own is wrong at most of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchfunc_jax
from torchfunc_jax import jit, vmap

NORMS = (0.0, 1e-3, 0.3, 3.0, 5.0, 8.0, 10.5, 20.0, 100.0, 1e3, 1e5)
WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "jit": jit(torch.linalg.matrix_exp),
    "vmap": vmap(torch.linalg.matrix_exp),
    "jit of vmap": jit(vmap(torch.linalg.matrix_exp)),
}


def _rotations(dtype: torch.dtype) -> torch.Tensor:
    """Skew-symmetric matrices with these 1-norms; their exponentials are rotations."""
    torch.manual_seed(0)
    a = torch.randn(5, 5, dtype=torch.float64)
    a = (a - a.T) / (a - a.T).abs().sum(0).max()
    return (torch.tensor(NORMS, dtype=torch.float64)[:, None, None] * a).to(dtype)


def _exact(matrices: torch.Tensor) -> torch.Tensor:
    """By the eigenvalues, in double precision."""
    eigenvalues, vectors = torch.linalg.eigh(1j * matrices.to(torch.complex128))
    return (vectors * torch.exp(-1j * eigenvalues)[:, None]) @ vectors.mH


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str
)
def test_values(way: str, dtype: torch.dtype) -> None:
    matrices = _rotations(dtype)
    error = (WAYS[way](matrices) - _exact(matrices)).abs().amax((1, 2))
    rounding = torch.finfo(dtype).eps * torch.tensor(NORMS, dtype=torch.float64).clamp(min=16)
    assert (error < rounding).all(), error / rounding


@pytest.mark.parametrize("norm", [0.0, 3.0, 10.5, 200.0])
def test_derivatives(norm: float) -> None:
    """Of a rotation by t: its generator times the rotation, and so on."""
    generator = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    t = torch.tensor(norm, dtype=torch.float64)
    f = lambda t: torch.linalg.matrix_exp(t * generator)
    value = torch.stack([t.cos(), -t.sin(), t.sin(), t.cos()]).reshape(2, 2)
    for transform in (torchfunc_jax.jacrev, torchfunc_jax.jacfwd):
        for run in (transform(f), jit(transform(f))):
            torch.testing.assert_close(run(t), generator @ value, rtol=0, atol=1e-12)
    second = jit(torchfunc_jax.hessian(f))(t)
    torch.testing.assert_close(second, -value, rtol=0, atol=1e-11)


def test_no_matrices_and_no_numbers() -> None:
    for shape in ((0, 3, 3), (2, 0, 0), (0, 0)):
        x = torch.zeros(shape, dtype=torch.float64)
        assert torch.equal(jit(torch.linalg.matrix_exp)(x), torch.linalg.matrix_exp(x))
    x = torch.full((2, 2), torch.nan)
    assert jit(torch.linalg.matrix_exp)(x).isnan().all()
    decay = torch.eye(2, dtype=torch.float64) * -1e6
    assert torch.equal(jit(torch.linalg.matrix_exp)(decay), torch.zeros_like(decay))
