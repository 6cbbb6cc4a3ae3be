"""Hooks on saved tensors are refused: the values that JAX keeps for its derivatives do not pass through them."""
from __future__ import annotations

import contextlib

import torch

from bridge import private

_REFUSED = (
    "torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks. What a function that runs in JAX keeps for its backward "
    "pass is not PyTorch's; call it outside of torch.autograd.graph.saved_tensors_hooks."
)


def refuse_hooks() -> None:
    """Raise a RuntimeError if the user has entered ``saved_tensors_hooks``; PyTorch's own hooks change no values, so they pass."""
    pack = private.saved_tensor_pack()
    if pack is not None and not (getattr(pack, "__module__", None) or "").startswith("torch."):
        raise RuntimeError(_REFUSED)


def without_hooks() -> contextlib.AbstractContextManager[None]:
    """While entered, a program that enters ``torch.autograd.graph.saved_tensors_hooks`` is refused, as by torch.func."""
    if private.saved_tensor_pack() is not None:  # PyTorch's own hooks are already entered and can no longer be refused
        return contextlib.nullcontext()
    return torch.autograd.graph.disable_saved_tensors_hooks(_REFUSED)
