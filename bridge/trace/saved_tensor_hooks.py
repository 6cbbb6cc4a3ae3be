"""Hooks on saved tensors are refused: the values that JAX keeps for its derivatives do not pass
through them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from bridge import private

_REFUSED = (
    "torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks. What a function "
    "that runs in JAX keeps for its backward pass is not PyTorch's; call it outside of "
    "torch.autograd.graph.saved_tensors_hooks."
)


def _unchanged(t: torch.Tensor) -> torch.Tensor:
    return t


def _pytorchs(pack: Callable[..., Any]) -> bool:
    """Whether PyTorch itself has entered these hooks (a checkpoint, save_on_cpu): they change no
    values.
    """
    return pack is _unchanged or (getattr(pack, "__module__", None) or "").startswith("torch.")


def refuse_hooks() -> None:
    """Raise a RuntimeError if the user has entered ``saved_tensors_hooks``; PyTorch's own hooks
    pass.
    """
    hooks = private.saved_tensor_hooks()
    if hooks is not None and not _pytorchs(hooks[0]):
        raise RuntimeError(_REFUSED)


def hidden_from_pytorch() -> contextlib.AbstractContextManager[Any]:
    """While entered, PyTorch's own hooks see nothing: a checkpoint counts what is saved, and a
    trace is not made when it runs again.
    """
    hooks = private.saved_tensor_hooks()
    if hooks is None or not _pytorchs(hooks[0]):
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)


def without_hooks() -> contextlib.AbstractContextManager[None]:
    """While entered, a program that enters ``torch.autograd.graph.saved_tensors_hooks`` is refused,
    as by torch.func.
    """
    # PyTorch's own hooks are already entered and can no longer be refused
    if private.saved_tensor_hooks() is not None:
        return contextlib.nullcontext()
    return torch.autograd.graph.disable_saved_tensors_hooks(_REFUSED)
