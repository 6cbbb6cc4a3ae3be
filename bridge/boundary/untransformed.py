"""A torch function run on JAX without a transform, for functionalize and for modules that are called with jax.Arrays."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge.boundary.calls import Call, apply
from bridge.boundary.results import Result, put_together, take_apart
from bridge.private import opaque
from bridge.trace.levels import push


def plain(func: Callable[..., Any]) -> Callable[..., Any]:
    """func as a JAX computation: it takes and returns torch tensors or jax.Arrays, and passes other leaves through."""

    @opaque
    def run(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(args, kwargs)
        traceable = call.traceable(func)
        traceable.as_given(call.arrays)

        def compute(values: list[Any]) -> Result:
            with push("plain") as level:
                result = traceable.run(level, values, take_apart)
            result.apart = True
            written = {target for target, _, _ in result.written}  # torch.func copies what it writes back
            result.shared = {i: way for i, way in result.shared.items() if way[0] not in written}
            return result

        return put_together(*apply(compute, call.arrays, func))

    return run
