"""torch.utils.checkpoint inside a trace: jax.checkpoint computes the function again in the backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from bridge import private, private_calls
from bridge.boundary.calls import Call, apply
from bridge.boundary.results import Result, put_together, take_apart
from bridge.kinds import CHECKPOINT, PLAIN, Kind
from bridge.trace.levels import NotInCheckpoint, push, state


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any
) -> Any:
    """torch.utils.checkpoint.checkpoint, through jax.checkpoint if this thread has a trace open."""
    if state.level is None and state.recorder is None:
        # torch.func does not allow the hooks on saved tensors with which PyTorch's own computes
        # again
        if private.transformed_by_torch():
            return function(*args, **_without_options(kwargs))
        return private_calls.original("checkpoint")(
            function, *args, use_reentrant=use_reentrant, **kwargs
        )
    return (CHECKPOINT.record if state.level is None else rematerialized)(
        function, args, _without_options(kwargs)
    )


def _without_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a checkpoint that its function gets."""
    options = ("context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")
    return {name: x for name, x in kwargs.items() if name not in options}


def rematerialized(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """function(*args, **kwargs) under jax.checkpoint: its values are computed again in the backward
    pass instead of kept.
    """
    call = Call.of(args, kwargs)
    traceable = call.traceable(function)

    def compute(values: list[Any]) -> Result:
        found: list[Result] = []

        def body(values: list[Any], kind: Kind) -> list[Any]:
            with push(kind) as level:
                result = traceable.run(level, values, take_apart)
            found[:] = [result]
            return result.values

        try:
            outs = jax.checkpoint(body, static_argnums=1)(values, CHECKPOINT)
        except NotInCheckpoint:
            outs = body(values, PLAIN)
        return Result(outs, found[0].meta, found[0].written)

    return put_together(*apply(compute, call.arrays))


private_calls.IN_TRACES["checkpoint"] = checkpoint
