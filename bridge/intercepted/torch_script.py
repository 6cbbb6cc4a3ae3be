"""TorchScript inside a trace: its functions and methods run without TorchScript's own derivatives,
which would detach traced tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge import private_calls
from bridge.trace.levels import state


class _Unoptimized:
    """A TorchScript function or method that calls PyTorch's operators one after the other; a
    recorder takes it for an operator.
    """

    def __init__(self, callee: Any) -> None:
        # what PyTorch has optimized already stays optimized, so this is a new function of the same
        # code
        self.function = private_calls.script_of_graph(callee)

    def __call__(self, *args: Any) -> Any:
        with torch.jit.optimized_execution(False):
            return private_calls.script_itself(self.function)(*args)


def called(callee: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a TorchScript function or method; a recorder refuses methods, because their modules have
    parameters that it does not see.
    """
    given = (
        None
        if state.level is None and state.recorder is None
        else private_calls.script_arguments(callee, args, kwargs)
    )
    if given is None:
        return private_calls.script_itself(callee)(*args, **kwargs)
    unoptimized = vars(callee).get("_torchfunc_jax") or _Unoptimized(callee)
    # kept with it, so that a recorder meets the same object again
    callee._torchfunc_jax = unoptimized
    return (
        unoptimized(*given) if state.level is not None else state.recorder.call(unoptimized, given)
    )
