"""The table of lowerings: torch operator -> pure function on JAX arrays, and the decorator that fills it.

A lowering receives what PyTorch's dispatcher passes: JAX arrays (or tracers) where the schema says Tensor, lists of them for
Tensor[], None for an absent optional, Python numbers for Scalar, and torch's own dtypes, devices, layouts and memory
formats.  Trailing arguments that equal the schema's default are left out, so its Python signature repeats those defaults.
It returns arrays of exactly the dtype PyTorch would return.  64-bit types are always enabled while one runs.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

Lowering = Callable[..., Any]

#: OpOverload -> lowering.
LOWERINGS: dict[Any, Lowering] = {}
#: operators whose lowering a user has registered, which takes the dtypes that it takes
OVERRIDDEN: set[Any] = set()


def overload(name: str) -> Any:
    """The ``OpOverload`` called ``"aten.add.Tensor"``; without a third part, the ``default`` overload.

    Args:
        name: ``namespace.operator`` or ``namespace.operator.overload``.

    Returns:
        torch._ops.OpOverload

    Raises:
        ValueError: there is no such operator in this torch.

    Example:
        >>> from bridge.lowering.registry import overload
        >>> str(overload("aten.sin"))
        'aten.sin.default'
    """
    parts = name.split(".")
    if len(parts) == 2:
        parts.append("default")
    try:
        namespace, op, kind = parts
        return getattr(getattr(getattr(torch.ops, namespace), op), kind)
    except (AttributeError, ValueError):
        raise ValueError(f"name: torch {torch.__version__} has no operator {name!r}; expected 'namespace.operator.overload'") from None


def of_this_torch(table: dict[str, Any]) -> dict[Any, Any]:
    """A table with operators in the place of their names; those that this version of torch does not have are left out.

    Args:
        table: by "namespace.operator.overload".

    Returns:
        dict: ``OpOverload`` to the table's value.

    Example:
        >>> from bridge.lowering.registry import of_this_torch
        >>> of_this_torch({"aten.sin.default": 1, "aten.no_such_operator.default": 2})
        {<OpOverload(op='aten.sin', overload='default')>: 1}
    """
    found = {}
    for name, value in table.items():
        with contextlib.suppress(ValueError):
            found[overload(name)] = value
    return found


def aten_lowering(name: str) -> Lowering:
    """The lowering of an ATen operator, looked up when it runs: the families are imported in no particular order.

    Args:
        name: "operator" or "operator.overload".

    Returns:
        Lowering

    Raises:
        ValueError: when it runs, and this torch has no such operator.

    Example:
        >>> import jax.numpy as jnp
        >>> from bridge.lowering.registry import aten_lowering
        >>> aten_lowering("neg")(jnp.ones(1)).tolist()
        [-1.0]
    """
    return lambda *args, **kwargs: LOWERINGS[overload(f"aten.{name}")](*args, **kwargs)


def lowering(*names: str) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as the lowering of each named overload.

    Names that this version of torch does not have are passed over, so that one table serves every supported version.
    """

    def register(fn: Lowering) -> Lowering:
        LOWERINGS.update(of_this_torch(dict.fromkeys(names, fn)))
        return fn

    return register
