"""torch.nn.utils.rnn inside transforms, and recurrent layers of packed sequences, beside plain
PyTorch.
"""

from __future__ import annotations

import pytest
import torch
from agreement import same
from every_way import in_every_way
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
)

import torchfunc_jax
from bridge.errors import DataDependentError
from torchfunc_jax import grad, jit, vmap

SORTED, UNSORTED = [5, 3, 3, 1], [2, 5, 1, 4]


def _round(x, lengths, **options):
    packed = pack_padded_sequence(x * 2, lengths, batch_first=True, **options)
    return pad_packed_sequence(
        packed._replace(data=packed.data.sin()),
        batch_first=True,
        padding_value=-1.5,
        total_length=6,
    )


CASES = {
    "sorted": lambda x: pack_padded_sequence(x, SORTED)[:2],
    "not sorted": lambda x: tuple(pack_padded_sequence(x, UNSORTED, enforce_sorted=False)),
    "lengths as a tensor": lambda x: (
        pack_padded_sequence(x, torch.tensor(UNSORTED), enforce_sorted=False).data
    ),
    "there and back": lambda x: _round(x.transpose(0, 1), SORTED),
    "there and back, not sorted": lambda x: _round(
        x.transpose(0, 1), UNSORTED, enforce_sorted=False
    ),
    "a list": lambda x: pack_sequence([x[:4, 0], x[:2, 1], x[:1, 2]])[:2],
    "a list, not sorted": lambda x: pack_sequence([x[:2, 0], x[:5, 1]], enforce_sorted=False).data,
    "unpacked": lambda x: unpack_sequence(
        pack_sequence([x[:2, 0] * x[1:3, 1], x[:5, 1]], enforce_sorted=False)
    ),
    "padded list": lambda x: pad_sequence([x[:2, 0], x[:5, 1].exp()], padding_value=3.0),
    "one feature dimension less": lambda x: pack_padded_sequence(x[..., 0], SORTED).data,
    "inner autograd": lambda x: torch.autograd.grad(
        pack_padded_sequence(y := x * 1 if x.requires_grad else (x * 1).requires_grad_(), SORTED)
        .data.sin()
        .sum(),
        y,
        create_graph=True,
    )[0],
}


#: Cases that make test leaves out: they take long to compile, and prove what a neighbour proves
#: too.
SLOW = {"a list", "there and back"}


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES]
)
def test_packing(name):
    x, grads = torch.randn(5, 4, 2), "autograd" not in name
    in_every_way(CASES[name], x, grads=grads, lanes="jit" if name == "unpacked" else True)
    if name == "unpacked":
        _not_mapped_without_jit(CASES[name], x)


def _not_mapped_without_jit(run, *xs):
    """torch.func's vmap refuses a function that asks for values, and so does what PyTorch runs."""
    for T in (torch.func, torchfunc_jax, torchfunc_jax):
        with pytest.raises(
            RuntimeError,
            match=(
                r"Batching rule not implemented for aten::|vmap: It looks like "
                r"you're calling \.item\(\)"
            ),
        ):
            T.vmap(run)(*[x[None] for x in xs])
        assert torch._C._functorch.peek_interpreter_stack() is None


LAYERS = {
    "LSTM": lambda: torch.nn.LSTM(2, 3),
    "LSTM of two layers, both ways, projected": lambda: torch.nn.LSTM(
        2, 3, num_layers=2, bidirectional=True, proj_size=2
    ),
    "GRU": lambda: torch.nn.GRU(2, 3, bidirectional=True),
    "RNN": lambda: torch.nn.RNN(2, 3, bias=False),
    "RNN of relu": lambda: torch.nn.RNN(2, 3, nonlinearity="relu", num_layers=2),
}


_FAST = {("LSTM", False), ("RNN of relu", True)}


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("sorted_", "name"),
    [
        pytest.param(s, n, marks=() if (n, s) in _FAST else pytest.mark.slow)
        for s in (True, False)
        for n in LAYERS
    ],
)
def test_recurrent_layers(name, sorted_):
    layer = LAYERS[name]()
    names = [n for n, _ in layer.named_parameters()]

    def run(x, *params):
        packed = pack_padded_sequence(x, SORTED if sorted_ else UNSORTED, enforce_sorted=sorted_)
        out, state = torch.func.functional_call(
            layer, dict(zip(names, params, strict=True)), (packed,)
        )
        return pad_packed_sequence(out)[0], state

    # three models, each on its own data
    in_every_way(
        run,
        torch.randn(5, 4, 2),
        *[p.detach() for p in layer.parameters()],
        lanes=sorted_ and name in ("LSTM", "GRU"),
    )


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", [pytest.param("LSTM", marks=pytest.mark.slow), "GRU"])
def test_an_initial_state_in_the_order_of_the_batch(name):
    layer = LAYERS[name]().requires_grad_(False)
    directions = 2 if layer.bidirectional else 1

    def run(x, h):
        state = (h, h * 2) if name == "LSTM" else h
        out, last = layer(pack_padded_sequence(x, UNSORTED, enforce_sorted=False), state)
        return out.data, last

    args = torch.randn(5, 4, 2), torch.randn(directions, 4, 3)
    in_every_way(run, *args, lanes="jit" if name == "GRU" else True)
    if name == "GRU":
        _not_mapped_without_jit(run, *args)


def test_an_ensemble_of_layers():
    layers = [torch.nn.LSTM(2, 3) for _ in range(3)]
    params = {
        name: torch.stack([layer.get_parameter(name).detach() for layer in layers])
        for name, _ in layers[0].named_parameters()
    }
    x = torch.randn(5, 4, 2)
    packed = pack_padded_sequence(x, UNSORTED, enforce_sorted=False)

    def last(p, x):
        packed = pack_padded_sequence(x, UNSORTED, enforce_sorted=False)
        return torchfunc_jax.functional_call(layers[0], p, (packed,))[1][0]

    expected = torch.stack([layer(packed)[1][0].detach() for layer in layers])
    for T in (torch.func, torchfunc_jax, torchfunc_jax):
        with pytest.raises(RuntimeError, match="Batching rule not implemented for aten::lstm"):
            T.vmap(last, (0, None))(params, x)
    same(jit(vmap(last, (0, None)))(params, x), expected)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("LSTM", "RNN") else pytest.mark.slow) for n in LAYERS],
)
def test_a_captured_packed_sequence(name):
    layer = LAYERS[name]()
    packed = pack_padded_sequence(torch.randn(5, 4, 2), UNSORTED, enforce_sorted=False)

    def run(scale):
        return layer(packed)[0].data.sum() * scale, layer(
            packed._replace(data=packed.data * scale)
        )[0].data.sum()

    scales = torch.tensor([0.5, 2.0])
    same(vmap(run)(scales), torch.stack([torch.stack(run(s)) for s in scales]).unbind(1))


def test_lengths_that_change_between_calls():
    x = torch.randn(5, 4, 2)
    run = jit(
        lambda x, lengths: _round(x.transpose(0, 1), list(lengths), enforce_sorted=False)[0],
        static_argnums=1,
    )
    for lengths in (UNSORTED, SORTED, [1, 1, 1, 1], UNSORTED):
        same(run(x, tuple(lengths)), _round(x.transpose(0, 1), lengths, enforce_sorted=False)[0])


@pytest.mark.parametrize(
    "lengths, options",
    [([1, 5, 2, 2], {}), ([5, 3, 3, 0], {}), ([5, 3, 3], {}), ([5, 3, 3, 1], {"x": (5, 4, 0)})],
)
def test_what_pytorch_refuses(lengths, options):
    x = torch.randn(options.get("x", (5, 4, 2)))
    with pytest.raises(RuntimeError) as expected:
        pack_padded_sequence(x, lengths)
    for wrapped in (jit, vmap):
        with pytest.raises(RuntimeError) as found:
            wrapped(lambda x: pack_padded_sequence(x, lengths).data)(
                x[None] if wrapped is vmap else x
            )
        assert str(expected.value)[:40] in str(found.value)


def test_lengths_that_are_not_known():
    x, lengths = torch.randn(5, 4, 2), torch.tensor(SORTED)
    same(grad(lambda x: pack_padded_sequence(x, lengths).data.sum())(x).sum(), torch.tensor(24.0))
    with pytest.raises(DataDependentError, match="give them as a list"):
        jit(pack_padded_sequence)(x, lengths)
    packed = pack_padded_sequence(x, SORTED)
    with pytest.raises(DataDependentError, match="pad_packed_sequence"):
        jit(pad_packed_sequence)(PackedSequence(*packed))
