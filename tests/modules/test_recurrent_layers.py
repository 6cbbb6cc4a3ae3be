"""LSTM, GRU and Elman layers: one loop over the steps in every way to call them, beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import torchfunc_jax
from torchfunc_jax import grad, jit

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "LSTM with projections": lambda *args, **options: nn.LSTM(*args, proj_size=2, **options),
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "batch first, no bias": {"batch_first": True, "bias": False},
    "dropout": {"num_layers": 3, "dropout": 0.5, "bidirectional": True},
    "dropout, batch first": {"num_layers": 2, "dropout": 0.5, "batch_first": True},
}


def _layer(kind: str, form: str) -> nn.RNNBase:
    torch.manual_seed(0)
    return KINDS[kind](3, 4, **FORMS[form])


def _loss(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y, state = layer(x)
    y = y if isinstance(y, torch.Tensor) else y.data
    weights = torch.linspace(0.5, 1.5, y.shape[-1])
    return (y * weights).pow(2).sum() + sum(s.sin().sum() for s in _states(state))


def _states(state: Any) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else list(state)


def _of_parameters(T: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    def loss(params: Any) -> torch.Tensor:
        return _loss_of_call(T, layer, params, x)

    return T.grad(loss)(dict(layer.named_parameters()))


def _loss_of_call(T: Any, layer: nn.Module, params: Any, x: torch.Tensor) -> torch.Tensor:
    y, state = T.functional_call(layer, params, (x,))
    return y.pow(2).sum() + sum(s.sin().sum() for s in _states(state))


def _inside(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(_loss(layer, x), list(layer.parameters())))


def _twice_inside(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(_loss(layer, x), x, create_graph=True)
    return torch.autograd.grad(g.pow(2).sum(), x)[0]


#: What is computed: by PyTorch or torch.func, and by us.
WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "jit": (_loss, lambda layer, x: jit(lambda x: _loss(layer, x))(x)),
    "grad": (
        lambda layer, x: _of_parameters(torch.func, layer, x),
        lambda layer, x: _of_parameters(torchfunc_jax, layer, x),
    ),
    "jit of grad": (
        lambda layer, x: _of_parameters(torch.func, layer, x),
        lambda layer, x: jit(lambda x: _of_parameters(torchfunc_jax, layer, x))(x),
    ),
    "autograd inside jit": (_inside, lambda layer, x: jit(lambda x: _inside(layer, x))(x)),
    "twice inside jit": (_twice_inside, lambda layer, x: jit(lambda x: _twice_inside(layer, x))(x)),
    "autograd after jit": (
        _inside,
        lambda layer, x: list(
            torch.autograd.grad(jit(lambda x: _loss(layer, x))(x), list(layer.parameters()))
        ),
    ),
    "grad of grad": (
        lambda layer, x: torch.func.grad(lambda x: torch.func.grad(_of(layer))(x).sin().sum())(x),
        lambda layer, x: grad(lambda x: grad(_of(layer))(x).sin().sum())(x),
    ),
}


def _of(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: _loss(layer, x)


@pytest.mark.thin(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_pytorchs(kind: str, form: str, way: str) -> None:
    layer = _layer(kind, form).double()
    theirs, mine = WAYS[way]
    x = torch.linspace(-1, 1, 5 * 2 * 3, dtype=torch.float64).reshape(5, 2, 3)
    torch.manual_seed(1)
    expected = theirs(layer, x)
    torch.manual_seed(1)
    torch.testing.assert_close(mine(layer, x), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["jit", "autograd inside jit", "autograd after jit"])
def test_a_packed_sequence(kind: str, way: str) -> None:
    layer = _layer(kind, "two layers, both directions").double()

    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(pack_padded_sequence(x, [5, 3]))

    theirs, mine = WAYS[way]
    x = torch.linspace(-1, 1, 5 * 2 * 3, dtype=torch.float64).reshape(5, 2, 3)
    torch.testing.assert_close(mine(Packs(), x), theirs(Packs(), x))


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_does_not_grow_with_the_steps(kind: str) -> None:
    layer = _layer(kind, "one layer")
    of_length = [
        len(jit(grad(_of(layer))).jaxpr(torch.zeros(steps, 2, 3)).eqns) for steps in (4, 40)
    ]
    assert of_length[0] == of_length[1] < 100


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_chooses_the_dtypes_as_without_a_trace(kind: str) -> None:
    layer, x = _layer(kind, "one layer"), torch.linspace(-1, 1, 30).reshape(5, 2, 3)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)[0]

    out = jit(run)(x)
    try:
        expected = run(x)
    except RuntimeError as error:
        if "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip("PyTorch has no LSTM of bfloat16 for this processor")
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
