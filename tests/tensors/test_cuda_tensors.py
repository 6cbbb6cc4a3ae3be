"""Tensors on a CUDA device: results stay there, numbers are PyTorch's, and what the CPU tests
promise holds there too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_functions import SetupContext
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import torchfunc_jax
from torchfunc_jax import functional_call, grad, jit, vmap

pytestmark = pytest.mark.gpu


def cuda(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, **options)


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, e in zip(
        torch.utils._pytree.tree_leaves(actual),
        torch.utils._pytree.tree_leaves(expected),
        strict=True,
    ):
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
    "attention": lambda x: (
        F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]).pow(2).sum()
    ),
    "linalg": lambda x: (
        torch.linalg.slogdet(x @ x.T + torch.eye(x.shape[0], device=x.device)).logabsdet
    ),
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
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused kernels have no forward mode
        expected = WAYS[way](torch.func, f)(x)
    close((jit(mine) if compiled else mine)(x), expected, 2e-4)


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = layer(5, 7, **options)
        self.readout = nn.Linear(14 if options.get("bidirectional") else 7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(self.layer(x)[0])


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(5, 7), nn.GRUCell(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.first(x)
        return self.second(h)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.linear.register_forward_hook(lambda module, args, out: out * 5)
        self.linear.weight.register_hook(lambda grad: grad * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2), nn.Flatten()
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 16), layer, nn.Linear(16, 11))


BOTH_WAYS: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "batch_first": True}
#: A module and the shape of its input; integers are numbers of words.
TRAINED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (cnn, (4, 3, 8, 8)),
    "norms": (
        lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.LayerNorm(5), nn.RMSNorm(5), nn.Softmax(-1)),
        (4, 6, 5),
    ),
    "cells": (Cells, (4, 5)),
    "checkpoint": (Checkpointed, (4, 5)),
    "hooks": (Hooked, (4, 5)),
    "transformer": (transformer, (3, 8)),
    **{
        layer.__name__: (functools.partial(Recurrent, layer), (6, 4, 5))
        for layer in (nn.LSTM, nn.GRU, nn.RNN)
    },
    **{
        f"{layer.__name__}, both ways": (
            functools.partial(Recurrent, layer, **BOTH_WAYS),
            (4, 6, 5),
        )
        for layer in (nn.LSTM, nn.GRU)
    },
}


@pytest.mark.parametrize("how", ["not compiled", "loss compiled", "step compiled"])
@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str, how: str) -> None:
    """With the backward pass outside of the compiled function, and inside of it, where PyTorch's
    engine must stay in the trace's thread.
    """
    make, shape = TRAINED[name]
    torch.manual_seed(0)
    data = [
        torch.randint(11, shape, device="cuda") if name == "transformer" else cuda(*shape)
        for _ in range(3)
    ]

    def trained(wrap: Callable[..., Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        module = make().cuda()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        loss = lambda x: module(x).pow(2).mean()
        loss = wrap(loss) if wrap and how != "step compiled" else loss

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(x)
            value.backward()
            return value.detach()

        step = wrap(step) if wrap and how == "step compiled" else step
        values = []
        for x in data:
            values.append(step(x).clone())
            optimizer.step()
        return [*values, *module.parameters(), *module.buffers()]

    close(
        trained(torchfunc_jax.functionalize if how == "not compiled" else jit), trained(None), 2e-3
    )


MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": ...},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_attention(dtype: torch.dtype, mask: str) -> None:
    torch.manual_seed(0)
    q, k, v = (cuda(2, 4, 16, 32, dtype=dtype) for _ in range(3))
    options = (
        {"attn_mask": torch.rand(16, 16, device="cuda") > 0.3} if mask == "mask" else MASKS[mask]
    )
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)

    def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        given = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(f(*given).float().pow(2).sum(), given)

    tolerance = {torch.float64: 1e-7, torch.float32: 3e-4}.get(dtype, 3e-2)
    close(jit(f)(q, k, v), f(q, k, v), tolerance)
    close(vmap(f)(q[:, None], k[:, None], v[:, None]), f(q, k, v)[:, None], tolerance)
    close(jit(gradients)(q, k, v), gradients(q, k, v), 10 * tolerance)
    close(
        grad(lambda *x: f(*x).float().pow(2).sum(), (0, 1, 2))(q, k, v),
        gradients(q, k, v),
        10 * tolerance,
    )


#: Functions that make tensors, or move them to another device.
ON_DEVICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": lambda x: x + torch.zeros(4, device="cuda"),
    "like": lambda x: torch.full_like(x, 2.0) * x,
    "data": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda"),
    "a number on the CPU": lambda x: x * torch.tensor(2.0),
    "to the CPU": lambda x: x.cpu() * 2,
    "and back": lambda x: (x.cpu() * 2).to("cuda"),
    "indices on the CPU": lambda x: x[torch.tensor([0, 2])],
    "double": lambda x: (x * 2).to("cuda", torch.float64),
    "made on the CPU": lambda x: x.sum().cpu() + torch.ones(()),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "jit": jit,
    "vmap": lambda f: lambda x: vmap(f)(x[None])[0],
    "grad": lambda f: grad(lambda x: f(x).double().sum()),
    "jit(grad)": lambda f: jit(grad(lambda x: f(x).double().sum())),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ON_DEVICES)
def test_devices_of_results(name: str, around: str) -> None:
    f, x = ON_DEVICES[name], cuda(4)
    expected = torch.func.grad(lambda x: f(x).double().sum())(x) if "grad" in around else f(x)
    close(AROUND[around](f)(x), expected)


@pytest.mark.parametrize("around", AROUND)
def test_default_device(around: str) -> None:
    f = lambda x: (
        (x + torch.zeros(4)) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        + torch.arange(4.0) * torch.tensor(2.0)
    )
    x = cuda(4)
    with torch.device("cuda"):
        expected = torch.func.grad(lambda x: f(x).double().sum())(x) if "grad" in around else f(x)
        close(AROUND[around](f)(x), expected)


@pytest.mark.parametrize("around", ["jit", "vmap"])
def test_random_numbers_are_those_of_torchs_generator(around: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.randn_like(x) + torch.rand(x.shape, device="cuda")

    mine = jit(f) if around == "jit" else lambda x: vmap(f, randomness="different")(x[None])[0]
    for seed in range(3):
        x = cuda(100)
        torch.manual_seed(seed)
        found, state = mine(x), torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        expected = f(x)
        close(found, expected)
        assert torch.equal(state, torch.cuda.get_rng_state())


@pytest.mark.parametrize("around", ["jit", "vmap"])
def test_memory_that_begins_anywhere(around: str) -> None:
    """XLA takes no input at an odd address; strides, empty tensors and every dtype cross too."""
    run = jit(lambda x: x + x) if around == "jit" else lambda x: vmap(lambda x: x + x)(x[None])[0]
    whole = cuda(64)
    views = [
        whole[1:],
        whole[3:].view(61),
        whole.view(8, 8).T,
        whole[::2],
        whole[:0],
        whole[:4].expand(3, 4),
        whole.view(8, 8)[1:, 1:],
    ]
    for x in views:
        close(run(x), x + x)
    for dtype in (
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    ):
        close(run((whole * 3).to(dtype)), (whole * 3).to(dtype) * 2)
    close(run(torch.polar(whole.abs(), whole).conj()), 2 * torch.polar(whole.abs(), whole).conj())


def test_torchs_work_is_waited_for() -> None:
    """JAX has streams of its own: a result that is not computed yet goes in, and a tensor that is
    written to right afterwards.
    """
    f, x = jit(lambda a: (a @ a).sum(1)), cuda(3000, 3000) / 3000
    side = torch.cuda.Stream()
    for k in range(5):
        for stream in (torch.cuda.current_stream(), side):
            with torch.cuda.stream(stream):
                y = x + k
                for _ in range(6):
                    y = y @ x + k
                found, expected = f(y), (y @ y).sum(1)
                y.zero_()
            stream.synchronize()
            assert (found - expected).abs().max() < 1e-3 * expected.abs().max() + 1e-3


def test_tensors_on_the_cpu_beside_a_gpu() -> None:
    model, x = nn.Linear(3, 4), torch.randn(5, 3)
    close(jit(lambda x: model(x))(x), model(x))
    for _ in range(3):
        close(
            vmap(grad(lambda x: model(x).sum()))(x),
            torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x),
        )


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
