"""Tensors on a CUDA device: results stay there, numbers are PyTorch's, and what the CPU tests promise holds there too."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_functions import SetupContext
from torch import nn
from torch.nn import functional as F

import torchfunc_jax
from torchfunc_jax import functional_call, grad, jit, vmap

pytestmark = pytest.mark.gpu


def cuda(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, **options)


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, e in zip(torch.utils._pytree.tree_leaves(actual), torch.utils._pytree.tree_leaves(expected), strict=True):
        assert a.device == e.device and a.dtype == e.dtype and a.shape == e.shape
        torch.testing.assert_close(a.detach(), e.detach(), rtol=tolerance, atol=tolerance)


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    y.register_hook(lambda g: g * 7)
    return (y * y).sum()


def written(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[1:] = x[:-1].exp()
    return (y.mul_(2) * x).sum()


SCALARS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elementwise": lambda x: (x.sin() * x.sigmoid()).sum(),
    "matmul": lambda x: (x @ x.T).logsumexp(1).sum(),
    "softmax": lambda x: (x.softmax(-1) ** 2).sum(),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]).pow(3).sum(),
    "sort": lambda x: (x.sort(-1).values * torch.arange(x.shape[-1], device=x.device)).sum(),
    "cumsum": lambda x: x.cumsum(-1).tanh().sum(),
    "Function": lambda x: SetupContext.apply(x).sum(),
    "hook": hooked,
    "in place": written,
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]).pow(2).sum(),
    "linalg": lambda x: torch.linalg.slogdet(x @ x.T + torch.eye(x.shape[0], device=x.device)).logabsdet,
}
WAYS: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {
    "grad": lambda T, f: T.grad(f),
    "vmap(grad)": lambda T, f: lambda x: T.vmap(T.grad(f))(torch.stack([x, 2 * x])),
    "jvp": lambda T, f: lambda x: T.jvp(f, (x,), (x,)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCALARS)
def test_as_torch_func(name: str, way: str, compiled: bool) -> None:
    f = SCALARS[name]
    if way == "jvp" and name in ("Function", "hook"):
        pytest.skip("torch.func has no forward derivative of it")
    torch.manual_seed(0)
    x = cuda(6, 4)
    mine = WAYS[way](torchfunc_jax, f)
    # un-jitted linear algebra and products differ from cuBLAS's by rounding
    close((jit(mine) if compiled else mine)(x), WAYS[way](torch.func, f)(x), 2e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_training_step(compiled: bool) -> None:
    def trained(wrap: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = wrap(lambda x, y: F.cross_entropy(model(x), y))
        x, y = cuda(5, 1, 8, 8), torch.arange(5, device="cuda") % 3
        for _ in range(3):
            optimizer.zero_grad()
            loss(x, y).backward()
            optimizer.step()
        return [*model.parameters(), *model.buffers()]

    torch.manual_seed(1)
    close(trained(jit if compiled else torchfunc_jax.functionalize), trained(lambda f: f), 2e-3)


def test_per_sample_gradients_of_a_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).cuda()
    params = {k: p.detach() for k, p in model.named_parameters()}

    def run(T: Any) -> Any:
        def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
            return T.functional_call(model, p, (x,)).pow(2).sum()

        return T.vmap(T.grad(loss), (None, 0))

    x = cuda(5, 4)
    expected = run(torch.func)(params, x)
    close(run(torchfunc_jax)(params, x), expected, 2e-4)
    close(jit(run(torchfunc_jax))(params, x), expected, 2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = cuda(8, 8, dtype=dtype)
    f = lambda x: (x @ x.softmax(-1)).sum()
    close(jit(grad(f))(x), torch.func.grad(f)(x), {torch.float64: 1e-10}.get(dtype, 3e-2))


@pytest.mark.parametrize("setting", ["highest", "high"])
def test_float32_products_follow_pytorchs_setting(setting: str) -> None:
    """By default full float32; TF32 only where PyTorch is told so."""
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    a, b = cuda(256, 512), cuda(512, 256)
    truth = a.double() @ b.double()
    try:
        torch.set_float32_matmul_precision(setting)
        error = (jit(torch.matmul)(a, b).double() - truth).abs().max().item()
    finally:
        torch.set_float32_matmul_precision(before)
    assert error < 2e-4 if setting == "highest" else error < 1e-1


def test_devices_mix() -> None:
    x, scale = cuda(3), torch.tensor(2.0)  # a CPU number beside a CUDA tensor, as in PyTorch
    f = lambda x: (x * scale).sum()
    close(grad(f)(x), torch.func.grad(f)(x))
    close(jit(grad(f))(x), torch.func.grad(f)(x))
    assert vmap(torch.sin)(torch.ones(3)).device.type == "cpu"
    params = {"weight": cuda(2, 3), "bias": cuda(2)}
    assert functional_call(nn.Linear(3, 2).cuda(), params, (cuda(4, 3),)).is_cuda


def test_an_argument_changed_after_the_call_leaves_the_result_alone() -> None:
    x = cuda(1 << 20)
    expected = x.sin() * 2
    y = jit(lambda x: x.sin() * 2)(x)
    x.zero_()
    close(y, expected)
    z = vmap(lambda x: x.sin() * 2)(expected)
    kept = expected.sin() * 2
    expected.zero_()
    close(z, kept)
