"""Running a torch function on JAX without any transform around it: what functionalize, and modules called with jax.Arrays, need."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bridge import trees
from bridge.calls import Call, Result, apply
from bridge.levels import push


def plain(func: Callable[..., Any]) -> Callable[..., Any]:
    """func as a JAX computation: torch tensors or jax.Arrays in, the same out; leaves that are no tensors pass through."""

    def run(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(args, kwargs)
        traceable = call.traceable(func)

        def finish(out: Any) -> tuple[list[Any], Any]:
            leaves, spec = trees.flatten(out)
            is_tensor = [isinstance(x, torch.Tensor) for x in leaves]
            static = [None if t else x for x, t in zip(leaves, is_tensor, strict=True)]
            return [x for x in leaves if isinstance(x, torch.Tensor)], (spec, static, is_tensor)

        def compute(values: list[Any]) -> Result:
            with push("plain") as level:
                return traceable.run(level, values, finish)

        outs, (spec, static, is_tensor) = apply(compute, call.arrays, func)
        source = iter(outs)
        return trees.unflatten(spec, [next(source) if t else x for x, t in zip(static, is_tensor, strict=True)])

    return run
