"""Recurrent layers inside a trace, as one operator each: a loop over the steps.

On a CPU PyTorch takes most of them apart, step by step, before a trace sees them: a program of a
hundred steps would be a hundred times as long. CUDA's kernels want all weights in one piece of
memory, and compute the gates of a cell at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bridge import private_calls
from bridge.boundary.calls import plain
from bridge.operators import special_cases
from bridge.trace.tracing import concrete, plan_of

_PACKED = "a recurrent layer of a packed sequence"


def _recurrent(kind: str) -> Callable[..., Any]:
    def rule(func: Callable[..., Any], *args: Any) -> Any:
        """A recurrent layer."""
        if len(args) != 9:
            return func(*args)  # which says what is wrong
        # of a packed sequence
        packed = isinstance(args[1], torch.Tensor) and not isinstance(args[3], bool)
        x, *sizes, state, weights = args[: 4 if packed else 3]
        _, layers, dropout, train, *directions = args[4 if packed else 3 :]
        if x.device.type != "cuda" and torch.is_autocast_enabled(x.device.type):
            # autocast chooses a dtype for each product
            lengths = [special_cases.ordinary(t, _PACKED) for t in sizes]
            return func(x, *lengths, *args[1 + packed :])
        given = [concrete(t, _PACKED) for t in sizes]
        operator = plan_of(getattr(getattr(torch.ops.aten, kind), "data" if packed else "input"))

        def run(x: torch.Tensor, state: Any, weights: Any, layers: int, *directions: bool) -> Any:
            options = (True, layers, 0.0, False, *directions)
            return plain(lambda x, *rest: operator((x, *given, *rest, *options), {}))(
                x, state, weights
            )

        if not (dropout and train and layers > 1):
            return run(x, state, weights, layers, *directions)
        # PyTorch draws between two layers, where time comes first
        both, *batch_first = directions
        y = x.transpose(0, 1) if any(batch_first) else x
        states, each, last = [state] if kind != "lstm" else state, len(weights) // layers, []
        for k in range(layers):
            own = [s.chunk(layers)[k] for s in states]
            y, *new = run(
                F.dropout(y, dropout) if k else y,
                own if kind == "lstm" else own[0],
                weights[k * each : (k + 1) * each],
                1,
                both,
                *[False for _ in batch_first],
            )
            last.append(new)
        y = y.transpose(0, 1) if any(batch_first) else y
        return y, *[torch.cat(parts) for parts in zip(*last, strict=True)]

    return rule


def _cell(
    func: Callable[..., Any],
    x: torch.Tensor,
    state: Any,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> Any:
    """lstm_cell, whose state is a tuple, and gru_cell: CUDA computes the gates in one kernel."""
    if x.device.type != "cuda":
        return func(x, state, w_ih, w_hh, b_ih, b_hh)
    if func is torch._VF.gru_cell:
        ir, iz, i_n = F.linear(x, w_ih, b_ih).chunk(3, -1)
        hr, hz, hn = F.linear(state, w_hh, b_hh).chunk(3, -1)
        n = (i_n + (ir + hr).sigmoid() * hn).tanh()
        return n + (iz + hz).sigmoid() * (state - n)
    h, c = state
    i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


#: torch function -> the function that is called in its place.
FUNCTIONS: dict[Any, Any] = {
    torch._VF.lstm_cell: _cell,
    torch._VF.gru_cell: _cell,
    **{
        getattr(torch._VF, kind): _recurrent(kind)
        for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
}
# a recurrent layer on CUDA calls it if its weights have changed; it asks for their addresses
private_calls.IN_TRACES["flatten_parameters"] = private_calls.Ours(
    lambda layer: None, private_calls.in_call
)
