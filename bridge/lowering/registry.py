"""The table of operators: torch operator -> pure function on JAX arrays and what else is known of
it, and the decorator that fills it.

A lowering receives what PyTorch's dispatcher passes: JAX arrays (or tracers) where the schema says
Tensor, lists of them for Tensor[], None for an absent optional, Python numbers for Scalar, and
torch's own dtypes, devices, layouts and memory formats. Trailing arguments that equal the schema's
default are left out, so its Python signature repeats those defaults. It returns arrays of exactly
the dtype PyTorch would return. 64-bit types are always enabled while one runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Lowering = Callable[..., Any]
#: a view operator's name and its arguments after the tensor
Part = tuple[str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """What is known of an operator: its lowering, and what its schema does not say. To call it is
    to call the lowering.

    Attributes:
        lowering: the function on arrays.
        view_inverse: of an operator whose result is a view: (base, value, *args, **kwargs) -> base
            with value in the place of the view. Without one, elements go where a view of their
            numbers says that they come from.
        view_parts: of an operator whose results are several views: (shape of the base, *args,
            **kwargs) -> for each the view operator that makes it, by name, and that operator's
            arguments after the tensor.
        writes: arguments that are written, though the schema may not say so, and the place of each
            one's new value among the results of the lowering, which are not results of the
            operator. A new value that is None is not written.
        no_grad_outputs: places of results that never require grad, even if an argument does; no
            derivative goes through them.
        apart: arguments that may share no memory with what the in-place or out= variant writes;
            other tensors may share all of it but not a part. None: PyTorch does not look at memory.
            It always does for a pointwise operator.
        pointwise: the operator promotes its operands and computes element by element, as
            ``torch.Tag.pointwise`` says of others.
        exact_out: out= must have the result's dtype, which PyTorch's kernel for the device meta
            does not check.
        takes_contiguous: the lowering takes contiguous=, whether the first argument is contiguous,
            which arrays do not tell.
        draws: a random operator whose numbers depend on no tensor's values; torch draws them, and
            the lowering does where torch may not.
        ordered: a random operator whose numbers follow how the first argument lies in memory, which
            its lowering leaves to torch_random.
        presumed: of a comparison: what PyTorch's C++ (cov, istft) takes its value for when it asks
            for one that is not known.
        info: its last result says with a number other than 0 which matrices could not be factored;
            where that is not known, a program goes on as if all could, and raises if one could not.
    """

    lowering: Lowering
    view_inverse: Callable[..., Any] | None = None
    view_parts: Callable[..., Sequence[Part]] | None = None
    writes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    no_grad_outputs: tuple[int, ...] = ()
    apart: tuple[str, ...] | None = None
    pointwise: bool = False
    exact_out: bool = False
    takes_contiguous: bool = False
    presumed: bool | None = None
    info: bool = False
    draws: bool = False
    ordered: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.lowering(*args, **kwargs)


#: OpOverload -> what is known of it.
LOWERINGS: dict[Any, Operator] = {}
#: operators whose lowering a user has registered, which takes the dtypes that it takes
OVERRIDDEN: set[Any] = set()


def overload(name: str) -> Any:
    """The ``OpOverload`` called ``"aten.add.Tensor"``; without a third part, the ``default``
    overload.

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
        raise ValueError(
            f"name: torch {torch.__version__} has no operator {name!r}; expected "
            "'namespace.operator.overload'"
        ) from None


def of_this_torch(table: dict[str, Any]) -> dict[Any, Any]:
    """A table with operators in the place of their names; those that this version of torch does not
    have are left out.

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
    """The lowering of an ATen operator, looked up when it runs: the families are imported in no
    particular order.

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


def lowering(*names: str, **facts: Any) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as the lowering of each named overload; facts: the other
    attributes of its ``Operator``.

    Names that this version of torch does not have are passed over, so that one table serves every
    supported version.
    """

    def register(fn: Lowering) -> Lowering:
        LOWERINGS.update(of_this_torch(dict.fromkeys(names, Operator(fn, **facts))))
        return fn

    return register
