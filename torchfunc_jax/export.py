"""export: a torch function as a StableHLO program that needs neither PyTorch nor this project."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.export import tracing
from bridge.export.exported import Exported
from bridge.private import opaque


@opaque
def export(
    func: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    batch: Any = "b",
    constraints: Sequence[str] = (),
    weights: str = "npz",
    platforms: Sequence[str] | None = None,
) -> Exported:
    """Export a function of tensors, or a module, as a StableHLO program for sizes of its batch that
    are known only when it runs.

    Args:
        func: takes and returns pytrees of tensors and static values; transforms (``vmap(grad(f))``)
            and modules too.
        args, kwargs: an example of its arguments: dtypes, fixed sizes and static values are theirs.
        batch: the dimensions whose sizes are symbolic. "b": dimension 0 of each tensor; "b, n,
            ...": these of each tensor; a dict {dimension: name or torch.export.Dim}; a tuple with
            an entry for each positional argument, which may be a tree of entries; None: a fixed
            shape. Dimensions of one name have one size, and "2*b" is an expression of one.
        constraints: of the sizes, as ``jax.export.symbolic_shape`` takes them: "n <= 512". Sizes
            are at least 1.
        weights: the tensors that func captures are arguments of the program and are saved beside
            it, by "npz" or by "safetensors", or they are "inside" the program as constants.
        platforms: "cpu", "cuda", "rocm" or "tpu", one or more; None: the one that JAX uses here.

    Returns:
        Exported: ``.save(path)`` writes it to a folder. ``.program.call(weights, *args, **kwargs)``
            runs it; a static argument is None
        there, and containers are dicts, lists and tuples. If func writes to captured tensors or
            arguments, the program returns
        (output, {name: new value}); if it draws random numbers, the program takes ``seed=``, a
            uint32 number.

    Raises:
        DataDependentError: func asks for values of tensors, or for a shape that depends on them.
        RuntimeError: what func computes cannot be done for symbolic sizes; the message has the
            operator and the line.
        TypeError: func takes or returns containers, or objects, that JAX does not know without
            their classes.
        ValueError: batch, constraints or weights are none of these; the arguments' sizes contradict
            batch.

    Source: https://docs.jax.dev/en/latest/export/export.html, ``torch.export.export``

    Example:
        >>> import jax.numpy as jnp
        >>> import torch
        >>> from torchfunc_jax import export
        >>> exported = export(torch.nn.Linear(3, 2), torch.ones(4, 3))
        >>> exported.program.out_avals[0], sorted(exported.weights)
        (ShapedArray(float32[b,2]), ['bias', 'weight'])
        >>> exported.program.call(exported.weights, jnp.ones((7, 3))).shape
        (7, 2)
    """
    return tracing.export(func, args, dict(kwargs or {}), batch, constraints, weights, platforms)


__all__ = ["Exported", "export"]
