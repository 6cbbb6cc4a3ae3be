"""Weights between torch's layers and Flax's: they compute the same, and come back bit by bit, from
torch and from Flax.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen
from torch import nn
from torch.testing._internal.common_modules import module_db

from bridge.flax import from_variables, to_variables


def drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for t in module.state_dict().values():
            t.uniform_(0.1, 0.9) if t.is_floating_point() else t.fill_(3)
    return module.eval()


attend = lambda m, *xs: m(*(xs * 3)[:3])[0]
first = lambda m, x: m(x)[0]
call: Callable[..., Any] = lambda m, *xs: m(*xs)
# name -> (torch's layer, Flax's, shapes of torch's inputs, whether channels are first in torch, how
# torch's is called)
Layer = tuple[
    Callable[[], nn.Module], linen.Module, list[tuple[int, ...]], bool, Callable[..., Any]
]
LAYERS: dict[str, Layer] = {
    "Linear": (lambda: nn.Linear(3, 2), linen.Dense(2), [(5, 3)], False, call),
    "Conv2d": (
        lambda: nn.Conv2d(4, 6, (3, 2), groups=2),
        linen.Conv(6, (3, 2), 1, "VALID", feature_group_count=2),
        [(2, 4, 7, 8)],
        True,
        call,
    ),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(3, 4, 3),
        linen.ConvTranspose(4, (3,), padding="VALID"),
        [(2, 3, 7)],
        True,
        call,
    ),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(3, 4, (3, 2), (2, 1)),
        linen.ConvTranspose(4, (3, 2), (2, 1), "VALID"),
        [(2, 3, 5, 6)],
        True,
        call,
    ),
    "ConvTranspose3d": (
        lambda: nn.ConvTranspose3d(2, 3, 2, 2, bias=False),
        linen.ConvTranspose(3, (2,) * 3, (2,) * 3, use_bias=False),
        [(1, 2, 3, 4, 3)],
        True,
        call,
    ),
    "Embedding": (lambda: nn.Embedding(5, 4), linen.Embed(5, 4), [], False, call),
    "LayerNorm": (lambda: nn.LayerNorm(6), linen.LayerNorm(epsilon=1e-5), [(3, 6)], False, call),
    "RMSNorm": (lambda: nn.RMSNorm(6, eps=1e-6), linen.RMSNorm(), [(3, 6)], False, call),
    "GroupNorm": (
        lambda: nn.GroupNorm(2, 4),
        linen.GroupNorm(2, epsilon=1e-5),
        [(3, 4, 5)],
        True,
        call,
    ),
    "BatchNorm2d": (
        lambda: nn.BatchNorm2d(4),
        linen.BatchNorm(use_running_average=True, epsilon=1e-5),
        [(3, 4, 5, 5)],
        True,
        call,
    ),
    "InstanceNorm2d": (
        lambda: nn.InstanceNorm2d(4, affine=True),
        linen.InstanceNorm(epsilon=1e-5),
        [(3, 4, 5, 5)],
        True,
        call,
    ),
    "PReLU": (nn.PReLU, linen.PReLU(), [(3, 4)], False, call),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        linen.MultiHeadDotProductAttention(2),
        [(2, 5, 8)],
        False,
        attend,
    ),
    "cross attention": (
        lambda: nn.MultiheadAttention(8, 2, kdim=5, vdim=6, batch_first=True),
        linen.MultiHeadDotProductAttention(2, qkv_features=8),
        [(2, 3, 8), (2, 4, 5), (2, 4, 6)],
        False,
        attend,
    ),
}


def twin(cell: Any, both: bool) -> linen.Module:
    rnn = lambda: linen.RNN(cell(4))
    return (
        linen.Sequential([linen.Bidirectional(rnn(), rnn()) for _ in range(2)]) if both else rnn()
    )


LAYERS |= {
    f"{kind.__name__}{' of two layers and directions' * both}{'' if bias else ' without biases'}": (
        lambda kind=kind, both=both, bias=bias: kind(
            3, 4, 1 + both, bias=bias, batch_first=True, bidirectional=both
        ),
        twin(cell, both),
        [(2, 5, 3)],
        False,
        first,
    )
    for kind, cell in (
        (nn.LSTM, linen.LSTMCell),
        (nn.GRU, linen.GRUCell),
        (nn.RNN, linen.SimpleCell),
    )
    for both in (False, True)
    for bias in (True, False)
}


def bits(tree: Any) -> list[tuple[Any, ...]]:
    """The values bit by bit, for two trees to be compared."""
    leaves = jax.tree.leaves_with_path(tree)
    return [
        (jax.tree_util.keystr(path), str(x.dtype), tuple(x.shape), np.asarray(x).tobytes())
        for path, x in leaves
    ]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_twin(name: str) -> None:
    make, layer, inputs, channels_first, called = LAYERS[name]
    module = drawn(make())
    variables = to_variables(module)
    xs = [torch.randn(shape) for shape in inputs] or [torch.tensor([2, 0, 1])]
    last = lambda x: (x.movedim(1, -1) if channels_first else x).detach().numpy()
    out = jax.jit(layer.apply)(variables, *map(last, xs))
    np.testing.assert_allclose(out, last(called(module, *xs)), rtol=1e-4, atol=1e-5)

    other = from_variables(make(), variables)  # torch -> Flax -> torch
    assert bits(other.state_dict()) == bits(module.state_dict())
    # Flax -> torch -> Flax, from values that Flax drew and with a sign of zero that an addition
    # could lose
    theirs = jax.eval_shape(layer.init, jax.random.key(0), *map(last, xs))
    numbers = np.random.default_rng(0)
    theirs = jax.tree.map(
        lambda x: jnp.asarray(numbers.choice([-0.0, 0.0, 1.5, -2.0, 1e-40], x.shape), x.dtype),
        theirs,
    )
    if "without biases" in name:
        with pytest.raises(
            RuntimeError, match=f"are not zero, and torch's {type(other).__name__} has bias=False"
        ):
            from_variables(other, theirs)
        theirs = jax.tree.map_with_path(
            lambda path, x: x if "kernel" in str(path) else 0 * abs(x), theirs
        )
    back = to_variables(from_variables(other, theirs))
    assert bits({kind: back[kind] for kind in theirs}) == bits(theirs)


WITHOUT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Bilinear": (
        lambda: nn.Bilinear(2, 3, 4),
        "no layer like Bilinear, and so no place for '0.weight'",
    ),
    "groups": (
        lambda: nn.ConvTranspose2d(4, 4, 3, groups=2),
        "no place for '0.weight' .one of groups",
    ),
    "slopes": (lambda: nn.PReLU(4), "one of several slopes"),
    "statistics": (
        lambda: nn.InstanceNorm1d(4, track_running_stats=True),
        "no place for '0.running_mean' .one with running statistics",
    ),
    "zeros": (
        lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True),
        "no place for '0.in_proj_weight' .one with add_zero_attn",
    ),
    "a key": (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), "no place for '0.bias_k'"),
    "projections": (lambda: nn.LSTM(3, 4, proj_size=2), "no place for '0.weight_hr_l0'"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_flax_has_no_place_for(name: str) -> None:
    make, message = WITHOUT[name]
    with pytest.raises(TypeError, match=message):
        to_variables(nn.Sequential(make()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    "info", [info for info in module_db if "Lazy" not in info.name], ids=lambda info: info.name
)
def test_modules_of_torch_come_back_bit_by_bit(info: Any) -> None:
    made = {}
    for training in (False, True):
        for given in info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
        ):
            made[repr(given.constructor_input.args) + repr(given.constructor_input.kwargs)] = (
                given.constructor_input
            )
    for given in made.values():
        module = drawn(info.module_cls(*given.args, **given.kwargs))
        try:
            variables = to_variables(module)
        except TypeError as error:
            assert any(
                type(make()).__name__.rstrip("123d") in str(error) for make, _ in WITHOUT.values()
            ), error
            continue
        other = from_variables(
            info.module_cls(*copy.deepcopy(given.args), **given.kwargs), variables
        )
        assert bits(other.state_dict()) == bits(module.state_dict())
        assert bits(to_variables(other)) == bits(variables)


def test_two_biases_in_one() -> None:
    """Without the collection "torch": a module keeps its biases while their sum is Flax's, and
    otherwise has Flax's in one of them.
    """
    module = drawn(nn.LSTM(3, 4))
    before, params = copy.deepcopy(module.state_dict()), to_variables(module)["params"]
    assert bits(from_variables(module, {"params": params}).state_dict()) == bits(before)
    trained = {"params": jax.tree.map(lambda x: x + 1, params)}
    assert bits(to_variables(from_variables(module, trained))["params"]) == bits(trained["params"])
    assert not module.bias_ih_l0.any() and module.bias_hh_l0.any()
    # a stale collection "torch" does not win over what was trained
    stale = {**trained, "torch": to_variables(drawn(nn.LSTM(3, 4)))["torch"]}
    assert bits(to_variables(from_variables(module, stale))["params"]) == bits(trained["params"])


class Windows(nn.Module):
    """A feature map that becomes a sequence for a recurrent layer and attention, and one that is
    flattened for a Linear.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.norm = (
            nn.Conv2d(2, 4, 3),
            nn.ConvTranspose2d(4, 6, 2, 2),
            nn.InstanceNorm2d(6, affine=True),
        )
        self.act, self.fc, self.lstm = (
            nn.PReLU(),
            nn.Linear(6 * 6 * 8, 5),
            nn.LSTM(5, 4, batch_first=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.up(self.conv(x))))
        return self.lstm(self.fc(x.flatten(1))[:, None].expand(-1, 3, -1))[0]


class WindowsTwin(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.ConvTranspose(6, (2, 2), (2, 2), name="up")(
            linen.Conv(4, (3, 3), padding="VALID", name="conv")(x)
        )
        x = linen.PReLU(name="act")(linen.InstanceNorm(epsilon=1e-5, name="norm")(x))
        x = linen.Dense(5, name="fc")(x.reshape(len(x), -1))
        return linen.RNN(linen.LSTMCell(4, parent=None), name="lstm")(jnp.repeat(x[:, None], 3, 1))


def test_a_flattened_map_behind_the_new_layers() -> None:
    module, x = drawn(Windows()), torch.randn(3, 2, 5, 6)
    variables = to_variables(module)
    out = jax.jit(WindowsTwin().apply)(variables, x.movedim(1, -1).numpy())
    np.testing.assert_allclose(out, module(x).detach(), rtol=1e-4, atol=1e-5)
    assert bits(from_variables(Windows(), variables).state_dict()) == bits(module.state_dict())


@pytest.mark.parametrize(
    "layer", [nn.LSTM(6, 4), nn.GRU(6, 4), nn.RNN(6, 4)], ids=lambda m: type(m).__name__
)
def test_a_recurrent_layer_over_a_feature_map_is_refused(layer: nn.Module) -> None:
    with pytest.raises(
        ValueError, match=f"'1' .{type(layer).__name__}. takes the last dimension of a feature map"
    ):
        to_variables(nn.Sequential(nn.Conv1d(3, 4, 3), layer))
