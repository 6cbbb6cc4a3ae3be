"""Linear layers with weights of eight bits: how wrong weights and outputs are, compiled and not;
what can be trained; what is loaded, left alone and refused.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from agreement import floats, same
from decoder import Decoder
from torch import nn

import bridge
from bridge.int8_weights import Int8Linear
from torchfunc_jax import functional_call, grad, jit, scan_blocks, vmap


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def layer(dtype: torch.dtype = torch.float32, size: float = 0.05) -> nn.Linear:
    made = nn.Linear(512, 256, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(normal(256, 512) * size)
        made.weight[3] = 0
    return made


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The root of the mean square of the difference, relative to that of the exact numbers."""
    difference = found.double() - exact.double()
    return (difference.square().mean() / exact.double().square().mean()).sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_and_outputs_are_nearly_exact(dtype: torch.dtype) -> None:
    exact = layer(dtype)
    quantized = bridge.quantize_int8(copy.deepcopy(exact))
    assert type(quantized) is Int8Linear and isinstance(quantized, nn.Linear)
    assert quantized.weight.dtype == torch.int8 and quantized.weight_scale.shape == (256,)
    weight = exact.weight.detach().double()
    found = quantized.weight.double() * quantized.weight_scale.double()[:, None]
    largest = weight.abs().amax(1, keepdim=True)
    assert ((found - weight).abs() <= largest * (1 / 254 + 1e-6)).all()
    assert (found[3] == 0).all()
    x = (normal(64, 512) * 100).to(dtype)  # products with int8 alone would exceed float16
    y = quantized(x)
    assert y.dtype == dtype and y.isfinite().all()
    # the rounding errors of normal numbers: a twelfth of the square of a scale, about 3 / 127
    assert 0.002 < error(y, nn.functional.linear(x.double(), weight, exact.bias.double())) < 0.012
    same(jit(quantized)(x), y, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-2)


def test_a_decoder() -> None:
    torch.manual_seed(0)
    exact = Decoder()
    quantized = bridge.quantize_int8(copy.deepcopy(exact))
    tokens = torch.arange(24).reshape(2, 12)
    assert error(quantized(tokens)[0], exact(tokens)[0]) < 0.02
    same(jit(quantized)(tokens), quantized(tokens), rtol=1e-4, atol=1e-5)
    names = {name for name, _ in exact.named_parameters()}
    assert names | {f"{n}_scale" for n in names if "proj" in n or "head" in n} == {
        *quantized.state_dict()
    }
    assert all(p.is_floating_point() for p in quantized.parameters())
    small, large = (
        sum(t.numel() * t.itemsize for name, t in m.state_dict().items() if "layers" in name)
        for m in (quantized, exact)
    )
    assert small < 0.28 * large


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_inputs_and_adapters(compiled: bool) -> None:
    quantized = bridge.quantize_int8(
        nn.Sequential(layer(torch.float64), nn.Tanh(), nn.Linear(256, 4).double())
    )
    low = {"a": floats(512, 4) / 9, "b": floats(4, 256) / 9}

    def loss(low: dict[str, torch.Tensor], x: torch.Tensor, dense: bool = False) -> torch.Tensor:
        first, last = quantized[0], quantized[2]
        weights = [m.weight.double() * m.weight_scale[:, None] for m in (first, last)]
        y = x @ weights[0].T + first.bias if dense else first(x)
        y = (y + x @ low["a"] @ low["b"]).tanh()
        return (y @ weights[1].T + last.bias if dense else last(y)).square().sum()

    x = floats(6, 512)
    expected = torch.func.grad(lambda *args: loss(*args, dense=True), argnums=(0, 1))(low, x)
    found = (jit if compiled else lambda f: f)(grad(loss, argnums=(0, 1)))(low, x)
    same(found, expected, rtol=1e-8, atol=1e-8)


def test_as_a_function_of_its_state() -> None:
    quantized = bridge.quantize_int8(Decoder(1))
    params, buffers = bridge.params(quantized), bridge.buffers(quantized)
    tokens = jnp.arange(6).reshape(1, 6)

    def loss(params: Any) -> Any:
        return (bridge.call(quantized, params, buffers, (tokens,))[0][0] ** 2).mean()

    with bridge.compiling.correctly():
        gradients = jax.jit(jax.grad(loss))(params)
    assert gradients.keys() == params.keys() and all(
        jnp.abs(g).max() > 0 for g in gradients.values()
    )


def test_under_other_transforms() -> None:
    model = bridge.quantize_int8(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
    x = normal(5, 8)
    same(jit(vmap(model))(x), model(x), rtol=1e-5, atol=1e-6)
    same(jit(scan_blocks(model, "")(model.forward))(x), model(x), rtol=1e-5, atol=1e-6)
    stacked = {"0.bias": torch.stack([model[0].bias.detach(), torch.ones(8)])}
    found = vmap(lambda params: functional_call(model, params, (x,)))(stacked)
    same(found[0], model(x), rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


# -- state -----------------------------------------------------------------------------------------
def test_floating_point_weights_are_quantized_when_loaded() -> None:
    exact = nn.Sequential(layer(), nn.ReLU(), nn.Linear(256, 3))
    with torch.device("meta"):
        empty = bridge.quantize_int8(
            nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 3))
        )
    assert empty[0].weight.is_meta and empty[0].weight.dtype == torch.int8
    state = exact.state_dict()
    wanted = bridge.quantize_int8(copy.deepcopy(exact)).state_dict()
    empty.load_state_dict(state, assign=True)
    same(empty.state_dict(), wanted)
    other = bridge.quantize_int8(nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 3)))
    for given in (state, wanted):
        other.load_state_dict(given)
        same(other.state_dict(), wanted)
    assert state.keys() == exact.state_dict().keys()  # what was given is as it was
    with pytest.raises(RuntimeError, match="cannot"):
        bridge.load(other, buffers={"0.weight": state["0.weight"]}, strict=False)
    same(other.state_dict(), wanted)


def test_copies_and_pickles() -> None:
    model, x = bridge.quantize_int8(layer()), normal(2, 512)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(other(x), model(x))
        other.load_state_dict(layer().state_dict())
        assert other.weight.dtype == torch.int8


# -- which layers ----------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)
        self.lora_A, self.again = nn.Linear(8, 2), self.body
        self.head.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(8, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("names", "options", "quantized"),
    [
        ((), {}, {"body"}),
        ((), {"skip": ()}, {"body", "lora_A"}),
        (("b*",), {}, {"body"}),
        (("*",), {"skip": ("body", "nothing")}, {"lora_A"}),
    ],
)
def test_which_layers(names: Any, options: Any, quantized: set[str]) -> None:
    model = Tied()
    hooked = []
    model.body.register_forward_hook(lambda *_: hooked.append(1))
    assert bridge.quantize_int8(model, *names, **options) is model
    assert {name for name, m in model.named_modules() if type(m) is Int8Linear} == quantized
    assert model.head.weight is model.embedding.weight and model.again is model.body
    model.body(torch.ones(8))
    assert hooked


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda m: bridge.quantize_int8("m"), TypeError, "module: expected an nn.Module, got"),
        (
            lambda m: bridge.quantize_int8(m, "1", "9"),
            ValueError,
            "names: '9' fits no Linear layer that can be quantized; there are '0', '1'",
        ),
        (
            lambda m: bridge.quantize_int8(nn.ReLU()),
            ValueError,
            r"names: '\*' fits no Linear layer that can be quantized; there are none",
        ),
        (
            lambda m: bridge.quantize_int8(m),
            ValueError,
            "module: the weight of '1' has values that are not finite",
        ),
    ],
)
def test_what_is_refused(call: Any, kind: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight[0, 1] = torch.nan
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=message):
        call(model)
    assert all(type(m) is nn.Linear for m in model) and before.keys() == model.state_dict().keys()
