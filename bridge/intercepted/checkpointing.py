"""torch.utils.checkpoint inside a trace: what is computed in it is computed again in the backward pass, by jax.checkpoint."""
from __future__ import annotations

from typing import Any

import jax

from bridge import private
from bridge.boundary.calls import Call, apply
from bridge.boundary.results import Result, put_together, take_apart
from bridge.record.recorder import PARTS
from bridge.trace.levels import push, state


def checkpoint(function: Any, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    if state.level is None:
        if state.recorder is not None:
            return PARTS["checkpoint"](function, args, kwargs)
        return private.original("checkpoint")(function, *args, use_reentrant=use_reentrant, **kwargs)
    for option in ("context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"):
        kwargs.pop(option, None)
    return rematerialized(function, args, kwargs)


def rematerialized(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs) under jax.checkpoint: computed again in the backward pass instead of kept."""
    call = Call.of(args, kwargs)
    traceable = call.traceable(function)

    def compute(values: list[Any]) -> Result:
        found: list[Result] = []

        @jax.checkpoint
        def body(values: list[Any]) -> list[Any]:
            with push("plain") as level:
                result = traceable.run(level, values, take_apart)
            found[:] = [result]
            return result.values

        outs = body(values)
        return Result(outs, found[0].meta, found[0].written)

    return put_together(*apply(compute, call.arrays, function))


private.IN_TRACES["checkpoint"] = checkpoint
