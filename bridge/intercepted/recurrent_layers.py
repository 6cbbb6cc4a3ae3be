"""Recurrent layers inside a trace, as one operator each: a loop over the steps.

On a CPU PyTorch takes GRU and Elman layers apart, step by step, before a trace sees them: a program
of a hundred steps would be a hundred times as long. Its LSTM is an operator there too. CUDA's
kernels want all weights in one piece of memory, and compute the gates of a cell at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bridge import private_calls
from bridge.boundary.calls import plain
from bridge.operators import packed_sequences
from bridge.trace.levels import state
from bridge.trace.tracing import concrete, plan_of


def flatten_parameters(layer: torch.nn.RNNBase) -> None:
    """RNNBase.flatten_parameters, which a recurrent layer on CUDA calls if its weights have
    changed; it asks for their addresses.
    """
    if state.level is None and state.recorder is None:
        private_calls.original("flatten_parameters")(layer)


def _apart(kind: str, x: torch.Tensor, dropout: float, train: bool) -> bool:
    """Whether PyTorch takes the layer apart: on a CPU its LSTM is an operator already, its dropout
    draws, and autocast chooses a dtype for each product.
    """
    return x.device.type != "cuda" and (
        kind == "lstm" or bool(dropout and train) or torch.is_autocast_enabled(x.device.type)
    )


def _recurrent(kind: str) -> Callable[..., Any]:
    on_cpu = packed_sequences.FUNCTIONS[getattr(torch._VF, kind)]

    def rule(func: Callable[..., Any], *args: Any) -> Any:
        """A recurrent layer."""
        if len(args) != 9:
            return func(*args)  # which says what is wrong
        # of a packed sequence
        packed = isinstance(args[1], torch.Tensor) and not isinstance(args[3], bool)
        x, *sizes, state, weights = args[: 4 if packed else 3]
        options = args[4 if packed else 3 :]
        if _apart(kind, x, *options[2:4]):
            return on_cpu(func, *args)
        given = [concrete(t, "a recurrent layer of a packed sequence") for t in sizes]
        operator = getattr(getattr(torch.ops.aten, kind), "data" if packed else "input")
        return plain(
            lambda x, state, weights: plan_of(operator)((x, *given, state, weights, *options), {})
        )(x, state, weights)

    return rule


def _gates(
    x: torch.Tensor,
    h: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None,
    b_hh: torch.Tensor | None,
    count: int,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    return F.linear(x, w_ih, b_ih).chunk(count, -1), F.linear(h, w_hh, b_hh).chunk(count, -1)


def _lstm_cell(
    func: Callable[..., Any],
    x: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> Any:
    """lstm_cell: CUDA computes the gates in one kernel."""
    if x.device.type != "cuda":
        return func(x, state, w_ih, w_hh, b_ih, b_hh)
    i, f, g, o = (
        a + b for a, b in zip(*_gates(x, state[0], w_ih, w_hh, b_ih, b_hh, 4), strict=True)
    )
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(
    func: Callable[..., Any],
    x: torch.Tensor,
    h: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> Any:
    """gru_cell: CUDA computes the gates in one kernel."""
    if x.device.type != "cuda":
        return func(x, h, w_ih, w_hh, b_ih, b_hh)
    (ir, iz, i_n), (hr, hz, hn) = _gates(x, h, w_ih, w_hh, b_ih, b_hh, 3)
    n = (i_n + (ir + hr).sigmoid() * hn).tanh()
    return n + (iz + hz).sigmoid() * (h - n)


#: torch function -> the function that is called in its place.
FUNCTIONS: dict[Any, Any] = {
    torch._VF.lstm_cell: _lstm_cell,
    torch._VF.gru_cell: _gru_cell,
    **{
        getattr(torch._VF, kind): _recurrent(kind)
        for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
}
private_calls.IN_TRACES["flatten_parameters"] = flatten_parameters
