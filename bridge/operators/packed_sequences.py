"""Packed sequences of torch.nn.utils.rnn inside a trace. The lengths alone decide which rows of a
padded tensor the packed one has.

PyTorch itself packs or pads the row numbers, and the rows are then gathered by them. C++ code that
reads lengths or batch sizes from memory gets an ordinary tensor (``ordinary``).
"""

from __future__ import annotations

from typing import Any

import torch

from bridge import private
from bridge.operators.special_cases import lift_fresh
from bridge.trace.tracing import concrete, own_rule, traced_python


def ordinary(t: torch.Tensor, what: str) -> torch.Tensor:
    """An ordinary tensor with the values of a traced one;
    DataDependentError if they are not known.
    """
    found = concrete(t, what)
    with private.below_python():
        return torch.from_numpy(found.copy())


def _constant(t: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor as a traced tensor whose values are known."""
    return lift_fresh((t,), {})


def _pack(
    input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    steps = input.transpose(0, 1) if batch_first else input
    known = ordinary(
        lengths, "pack_padded_sequence by lengths that are a tensor (give them as a list of ints)"
    )
    with private.below_python():
        rows = (
            torch.arange(steps.shape[0] * steps.shape[1]).reshape(steps.shape[:2])
            if steps.numel()
            else torch.empty(steps.shape)
        )
        places, sizes = torch._VF._pack_padded_sequence(rows, known, False)
    return steps.flatten(0, 1).index_select(0, _constant(places)), _constant(sizes)


def _pad(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = ordinary(batch_sizes, "pad_packed_sequence")
    with private.below_python():
        places, lengths = torch._VF._pad_packed_sequence(
            torch.arange(data.shape[0]), sizes, batch_first, -1, total_length
        )
        kept = (places >= 0).reshape(*places.shape, *[1] * (data.dim() - 1))
        flat = places.clamp(min=0).reshape(-1)
    rows = data.index_select(0, _constant(flat)).unflatten(0, tuple(places.shape))
    return torch.where(
        _constant(kept), rows, torch.full((), padding_value, dtype=data.dtype, device=data.device)
    ), _constant(lengths)


@own_rule("aten._pack_padded_sequence")
def pack_plan(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The plan of the operator, which runs if both tensors come from outside the trace."""
    with traced_python():
        return _pack(*args, **kwargs)


#: torch function -> the function that is called in its place.
FUNCTIONS: dict[Any, Any] = {
    torch._VF._pack_padded_sequence: lambda func, *args, **kwargs: _pack(*args, **kwargs),
    torch._VF._pad_packed_sequence: lambda func, *args, **kwargs: _pad(*args, **kwargs),
}
