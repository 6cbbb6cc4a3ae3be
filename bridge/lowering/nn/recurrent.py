"""Recurrent layers (LSTM, GRU, Elman) as scans over time, of padded and of packed sequences.

One matrix product gives the input's part of every gate at every step; only the hidden state's part
is inside the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common.loops import scan
from bridge.lowering.common.promotion import cast, concrete, constant, fused
from bridge.lowering.common.provided import next_key, torch_random
from bridge.lowering.linalg.matmul import precision
from bridge.lowering.registry import lowering

_State = tuple[Array, ...]


def _times(x: Array, weight: Array) -> Array:
    """x @ weight.T over the last axis."""
    return lax.dot_general(
        x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=precision(x.dtype)
    )


# -- cells: (input's gates, state, parameters) -> new state, whose first part is the output --------
def _lstm_cell(gates: Array, state: _State, p: dict[str, Array]) -> _State:
    h, c = state
    i, f, g, o = jnp.split(gates + _times(h, p["w_hh"]), 4, -1)
    c = lax.logistic(f) * c + lax.logistic(i) * jnp.tanh(g)
    h = lax.logistic(o) * jnp.tanh(c)
    return (_times(h, p["w_hr"]) if "w_hr" in p else h), c


def _gru_cell(gates: Array, state: _State, p: dict[str, Array]) -> _State:
    (h,) = state
    hidden = _times(h, p["w_hh"])
    if "b_hh" in p:
        hidden = hidden + p["b_hh"]
    (ir, iz, i_n), (hr, hz, hn) = jnp.split(gates, 3, -1), jnp.split(hidden, 3, -1)
    r, z = lax.logistic(ir + hr), lax.logistic(iz + hz)
    n = jnp.tanh(i_n + r * hn)
    return (n + z * (h - n),)


def _elman_cell(activation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda gates, state, p: (activation(gates + _times(state[0], p["w_hh"])),)


_CELLS = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": _elman_cell(jnp.tanh),
    "rnn_relu": _elman_cell(jax.nn.relu),
}
_NAMES = {
    2: ("w_ih", "w_hh"),
    3: ("w_ih", "w_hh", "w_hr"),
    4: ("w_ih", "w_hh", "b_ih", "b_hh"),
    5: ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr"),
}


def _layer(
    kind: str, x: Array, state: _State, p: dict[str, Array], reverse: bool, active: Array | None
) -> tuple[Array, _State]:
    """One direction of one layer over x (T, B, I): outputs (T, B, H) and the last state. Inactive
    (T, B, 1) steps keep the state.
    """
    gates = _times(x, p["w_ih"])
    if "b_ih" in p:
        gates = gates + (p["b_ih"] if kind == "gru" else p["b_ih"] + p["b_hh"])
    cell = _CELLS[kind]

    def step(state: _State, inputs: tuple[Array, Array | None]) -> tuple[_State, Array]:
        gates, now = inputs
        new = cell(gates, state, p)
        if now is not None:
            new = tuple(jnp.where(now, a, b) for a, b in zip(new, state, strict=True))
        return new, new[0]

    state, outputs = scan(step, state, (gates, active), reverse=reverse)
    return outputs, state


@fused("kind", "directions")
def _stack(
    kind: str,
    x: Array,
    states: _State,
    params: list[Array],
    masks: list[Array],
    active: Array | None,
    directions: int,
) -> tuple[Array, ...]:
    """All layers over x (T, B, I); states are (layers * directions, B, H). Each layer but the last
    has a mask for its dropout.
    """
    count = states[0].shape[0]
    each = len(params) // count
    last = []
    for k in range(0, count, directions):
        outputs = []
        for d in range(directions):
            p = dict(zip(_NAMES[each], params[(k + d) * each : (k + d + 1) * each], strict=True))
            y, state = _layer(kind, x, tuple(s[k + d] for s in states), p, d == 1, active)
            outputs.append(y)
            last.append(state)
        x = jnp.concatenate(outputs, -1) if directions > 1 else outputs[0]
        if masks and k + directions < count:
            x = x * masks[k // directions]
    return (x, *(jnp.stack(parts) for parts in zip(*last, strict=True)))


def _run(
    kind: str,
    x: Array,
    states: _State,
    params: Sequence[Any],
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    active: Array | None,
) -> tuple[Array, ...]:
    directions = 2 if bidirectional else 1
    if (
        len(params) % (num_layers * directions)
        or len(params) // (num_layers * directions) not in _NAMES
    ):
        raise RuntimeError(
            f"params: expected 2 to 5 arrays for each of {num_layers} layers and {directions} "
            f"directions, got {len(params)}"
        )
    for name, state in zip(("hx", "cx"), states, strict=False):
        if state.shape[:2] != (num_layers * directions, x.shape[1]):
            raise RuntimeError(
                f"{name}: Expected hidden size ({num_layers * directions}, {x.shape[1]}, ...), got "
                f"{list(state.shape)}"
            )
    masks = []
    if train and dropout:
        like = jnp.zeros((*x.shape[:-1], directions * states[0].shape[-1]), x.dtype)
        masks = [_mask(like, 1 - dropout) for _ in range(num_layers - 1)]
    return _stack(kind, x, tuple(states), list(params), masks, active, directions)


def _mask(like: Array, keep: float) -> Array:
    drawn = torch_random("aten.bernoulli_.float", (like, keep))
    mask = jax.random.bernoulli(next_key(None), keep, like.shape) if drawn is None else drawn
    return cast(mask, like.dtype) / keep if keep > 0 else like


def _padded(kind: str) -> Callable[..., Any]:
    def lower(
        x: Array,
        hx: Array | Sequence[Array],
        params: Sequence[Array],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Array, ...]:
        """lstm.input(Tensor input, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers,
        float dropout, bool train, bool bidirectional, bool batch_first) -> (Tensor, Tensor, Tensor)
        """
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        states: Any = tuple(hx) if kind == "lstm" else (hx,)
        y, *last = _run(kind, x, states, params, num_layers, dropout, train, bidirectional, None)
        return jnp.swapaxes(y, 0, 1) if batch_first else y, *last

    return lower


def _packed(kind: str) -> Callable[..., Any]:
    def lower(
        data: Array,
        batch_sizes: Array,
        hx: Array | Sequence[Array],
        params: Sequence[Array],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Array, ...]:
        """lstm.data(Tensor data, Tensor batch_sizes, Tensor[] hx, Tensor[] params, bool has_biases,
        int num_layers, float dropout, bool train, bool bidirectional) -> (Tensor, Tensor, Tensor)
        """
        sizes = concrete(batch_sizes)
        active = np.arange(sizes[0]) < sizes[:, None]  # (T, B)
        row = np.where(active, np.cumsum(sizes)[:, None] - sizes[:, None] + np.arange(sizes[0]), 0)
        states: Any = tuple(hx) if kind == "lstm" else (hx,)
        y, *last = _run(
            kind,
            data[row],
            states,
            params,
            num_layers,
            dropout,
            train,
            bidirectional,
            constant(active[..., None]),
        )
        return y[np.nonzero(active)], *last

    return lower


for _kind in _CELLS:
    lowering(f"aten.{_kind}.input")(_padded(_kind))
    lowering(f"aten.{_kind}.data")(_packed(_kind))


@lowering("aten.mkldnn_rnn_layer")
def aten_mkldnn_rnn_layer(
    x: Array,
    weight0: Array,
    weight1: Array,
    weight2: Array,
    weight3: Array,
    hx_: Array,
    cx_: Array,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Array, Array, Array, Array]:
    """mkldnn_rnn_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor
    weight3, Tensor hx_, Tensor cx_, bool reverse, int[] batch_sizes, int mode, int hidden_size, int
    num_layers, bool has_biases, bool bidirectional, bool batch_first, bool train) -> (Tensor,
    Tensor, Tensor, Tensor)

    Time is always the first dimension, because PyTorch has transposed the input if batch_first is
    set.
    """
    weights = _weights(mode, has_biases, weight0, weight1, weight2, weight3)
    return (*_one_lstm(x, hx_, cx_, weights, bool(reverse)), jnp.zeros((0,), x.dtype))


@lowering("aten.mkldnn_rnn_layer_backward")
def aten_mkldnn_rnn_layer_backward(
    x: Array,
    weight1: Array,
    weight2: Array,
    weight3: Array,
    weight4: Array,
    hx_: Array,
    cx_tmp: Array,
    output: Array,
    hy_: Array,
    cy_: Array,
    grad_output: Array | None,
    grad_hy: Array | None,
    grad_cy: Array | None,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    batch_first: bool,
    workspace: Array,
) -> tuple[Array, ...]:
    """mkldnn_rnn_layer_backward(Tensor input, Tensor weight1, Tensor weight2, Tensor weight3,
    Tensor weight4, Tensor hx_, Tensor cx_tmp, Tensor output, Tensor hy_, Tensor cy_, Tensor?
    grad_output, Tensor? grad_hy, Tensor? grad_cy, bool reverse, int mode, int hidden_size, int
    num_layers, bool has_biases, bool train, bool bidirectional, int[] batch_sizes, bool
    batch_first, Tensor workspace) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
    """
    weights = _weights(mode, has_biases, weight1, weight2, weight3, weight4)
    outs, pull = jax.vjp(
        lambda *primals: _one_lstm(*primals, bool(reverse)), x, hx_, cx_tmp, weights
    )
    given = zip(outs, (grad_output, grad_hy, grad_cy), strict=True)
    grad_x, grad_h, grad_c, grads = pull(
        tuple([jnp.zeros_like(y) if g is None else g.reshape(y.shape) for y, g in given])
    )
    bias = grads[2] if has_biases else jnp.zeros_like(weight3)
    return grad_x, grads[0], grads[1], bias, bias, grad_h, grad_c


def _weights(mode: int, has_biases: bool, *weights: Array) -> list[Array]:
    if mode != 2:
        raise NotImplementedError(
            f"mode: mkldnn_rnn_layer is lowered for an LSTM (2) only, got {mode}"
        )
    return list(weights if has_biases else weights[:2])


@fused("reverse")
def _one_lstm(
    x: Array, h: Array, c: Array, weights: list[Array], reverse: bool
) -> tuple[Array, Array, Array]:
    p = dict(zip(_NAMES[len(weights)], weights, strict=True))
    state = tuple(s.reshape(s.shape[-2:]) for s in (h, c))
    y, (last_h, last_c) = _layer("lstm", x, state, p, reverse, None)
    return y, last_h.reshape(h.shape), last_c.reshape(c.shape)
