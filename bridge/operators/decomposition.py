"""Operators without a lowering run PyTorch's own decomposition, or in PyTorch, or raise an error
that says how to register a lowering.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge import private
from bridge.errors import NoLoweringError, at_line
from bridge.operators.dtype_refusals import Plan
from bridge.trace.tracing import HANDED_IN, traced_python


def fallback(func: torch._ops.OpOverload) -> Plan:
    """The plan that runs PyTorch's own decomposition on traced tensors, or the operator itself if
    it is one of torch.library.

    Where neither is possible, the plan raises an error that says what to do.
    """
    decomposition = (
        func.decompose
        if private.has_kernel(func, "CompositeImplicitAutograd")
        else private.decompositions().get(func)
    )
    if decomposition is None and (plan := HANDED_IN["library_operator"](func)) is not None:
        return plan

    def decomposed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if decomposition is None:
            raise NoLoweringError(
                f"{func}: this operator has no lowering to JAX and no decomposition{at_line()}. "
                f"Register one: @bridge.register_lowering({str(func)!r}) above a function that "
                "takes and returns jax.Arrays"
            )
        with traced_python():
            return decomposition(*args, **kwargs)

    return decomposed
