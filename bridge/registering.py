"""The public way to add a lowering; and what lowerings are given by the bridge."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge import checks, eager, private, random, tracing
from bridge.lowering.common.provided import PROVIDED
from bridge.lowering.registry import LOWERINGS, OVERRIDDEN, Lowering, Operator, overload

PROVIDED.update(check=checks.check, next_key=random.next_key, float32_precision=private.float32_precision)


def register_lowering(*operators: Any) -> Callable[[Lowering], Lowering]:
    """Decorator: the function is how these torch operators are computed in JAX, from now on and in place of what was.

    The function gets what PyTorch's dispatcher passes: jax.Arrays (or tracers) where the schema says Tensor, lists of them for Tensor[],
    None for an absent optional, Python numbers for Scalar, torch's own dtypes and devices. Trailing arguments that equal the schema's
    defaults are left out, so it repeats the defaults. It returns arrays of exactly the shape and dtype that torch would return, and is
    made of jax.numpy and jax.lax, so that every transform goes through it. 64-bit types are enabled while it runs. In-place and out=
    variants are made from the functional one. Functions compiled by ``jit`` before keep the lowering they were compiled with.

    Args:
        operators: "namespace.operator", "namespace.operator.overload", or an OpOverload such as ``torch.ops.aten.sin.default``.

    Returns:
        Callable: takes the function and returns it.

    Raises:
        ValueError: none given, or torch has no such operator.

    Source: https://docs.pytorch.org/docs/stable/library.html, for operators of one's own.

    Example:
        >>> import jax.numpy as jnp, torch, torchfunc_jax
        >>> from bridge import register_lowering
        >>> @torch.library.custom_op("bridge_example::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> @register_lowering("bridge_example.double")
        ... def bridge_example_double(x):
        ...     return x * 2
        >>> torchfunc_jax.grad(lambda x: double(x) * x)(torch.tensor(3.0))
        tensor(12.)
    """
    if not operators:
        raise ValueError("operators: expected at least one name such as 'aten.sin'")
    found = [overload(op) if isinstance(op, str) else op for op in operators]
    for op in found:
        if not hasattr(op, "_schema"):
            raise ValueError(f"operators: expected a name or an OpOverload such as torch.ops.aten.sin.default, got {op!r}")

    def register(fn: Lowering) -> Lowering:
        for op in found:
            LOWERINGS[op] = fn if isinstance(fn, Operator) else Operator(fn)
            OVERRIDDEN.add(op)
        tracing._plans.clear()  # what was decided about operators while they had another lowering, or none
        eager.forget()
        return fn

    return register
