"""Functions for which PyTorch calls kernels that CUDA alone has; in a trace they are lowered
operators, or formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bridge import private_calls
from bridge.boundary.calls import plain
from bridge.errors import at_line
from bridge.operators import packed_sequences
from bridge.trace.levels import state
from bridge.trace.tracing import NO_KERNEL, concrete, own_rule, plan_of


def flatten_parameters(layer: torch.nn.RNNBase) -> None:
    """RNNBase.flatten_parameters, which a recurrent layer on CUDA calls if its weights have
    changed; it asks for their addresses.
    """
    if state.level is None and state.recorder is None:
        private_calls.original("flatten_parameters")(layer)


def jiterator(*args: Any, **kwargs: Any) -> Any:
    """A kernel of torch.cuda.jiterator, which reads at the addresses of tensors and does not ask
    whether they have memory.
    """
    if state.level is None or not torch.cuda.is_available():
        return private_calls.original("jiterator")(*args, **kwargs)
    raise RuntimeError(f"torch.cuda.jiterator: {NO_KERNEL}{at_line()}")


def _recurrent(kind: str) -> Callable[..., Any]:
    on_cpu = packed_sequences.FUNCTIONS[getattr(torch._VF, kind)]

    def rule(func: Callable[..., Any], *args: Any) -> Any:
        """A recurrent layer: cuDNN wants all weights in one piece of memory."""
        if args[0].device.type != "cuda":
            return on_cpu(func, *args)
        operators = getattr(torch.ops.aten, kind)
        # of a packed sequence
        if len(args) == 9 and isinstance(args[1], torch.Tensor) and not isinstance(args[3], bool):
            data, sizes, state, weights, *options = args
            known = concrete(sizes, "a recurrent layer of a packed sequence")
            return plain(
                lambda x, hx, params: plan_of(operators.data)((x, known, hx, params, *options), {})
            )(data, state, weights)
        data, state, weights, *options = args
        return plain(lambda x, hx, params: plan_of(operators.input)((x, hx, params, *options), {}))(
            data, state, weights
        )

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


@own_rule(
    "aten._use_cudnn_ctc_loss",
    "aten._use_cudnn_ctc_loss.Tensor",
    "aten._use_miopen_ctc_loss",
    "aten._use_miopen_ctc_loss.Tensor",
)
def _by_library(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether PyTorch's ctc_loss calls a library."""
    return False


#: torch function -> the function that is called in its place.
FUNCTIONS: dict[Any, Any] = {
    torch._VF.lstm_cell: _lstm_cell,
    torch._VF.gru_cell: _gru_cell,
    **{
        getattr(torch._VF, kind): _recurrent(kind)
        for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
}
private_calls.IN_TRACES.update(jiterator=jiterator, flatten_parameters=flatten_parameters)
