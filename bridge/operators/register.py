"""register_lowering, the public way to add a lowering, and the functions that the bridge provides
to lowerings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bridge import private
from bridge.lowering.common import loops
from bridge.lowering.common.provided import PROVIDED
from bridge.lowering.registry import LOWERINGS, OVERRIDDEN, Lowering, Operator, Part, overload
from bridge.process import process
from bridge.trace import attention_scores, random_keys, torch_random, value_checks
from bridge.trace.levels import state

PROVIDED.update(
    check=value_checks.check,
    next_key=random_keys.next_key,
    torch_random=torch_random.of_arrays,
    torch_random_by_value=torch_random.by_value,
    float32_precision=private.float32_precision,
    any_size=lambda: state.any_size,
    attention_scores=attention_scores.at_once,
)


def register_lowering(
    *operators: str | torch._ops.OpOverload,
    view_inverse: Callable[..., Any] | None = None,
    view_parts: Callable[..., Sequence[Part]] | None = None,
    writes: Mapping[str, int] | None = None,
    no_grad_outputs: Sequence[int] | None = None,
    apart: Sequence[str] | None = None,
    pointwise: bool | None = None,
    exact_out: bool | None = None,
    takes_contiguous: bool | None = None,
) -> Callable[[Lowering], Lowering]:
    """Decorator: from now on JAX computes these torch operators with the decorated function,
    instead of as before.

    The function gets what PyTorch's dispatcher passes: jax.Arrays (or tracers) if the schema says
    Tensor, lists of them for Tensor[], None for an absent optional, Python numbers for Scalar,
    torch's own dtypes and devices. Trailing arguments that equal the schema's defaults are left
    out, so it repeats the defaults. It returns arrays of exactly the shape and dtype that torch
    would return. It calls jax.numpy and jax.lax, so that every transform works on it. 64-bit types
    are enabled while it runs. In-place and out= variants are made from the functional one.
    Functions that ``jit`` has compiled keep the lowering that they were compiled with.

    PyTorch computes some operators, such as ``aten.einsum``, by others before JAX sees them, so
    that a lowering of these has no effect. One of them is an exception: a lowering of
    ``aten.scaled_dot_product_attention`` computes every call of the function in
    torch.nn.functional.

    An operator whose schema says that it writes arguments (``mutates_args=`` of
    ``torch.library.custom_op``) is a function too: it returns the operator's new results, followed
    by the new value of each written argument, in the schema's order. An operator whose schema says
    that its result shares memory with its first argument (``Tensor(a) x -> Tensor(a)``) is a view;
    PyTorch's kernel for the device meta gives its geometry. The keywords give further facts; a fact
    that is not given stays as it was.

    Args:
        operators: "namespace.operator", "namespace.operator.overload", or an OpOverload such as
            ``torch.ops.aten.sin.default``.
        view_inverse: of an operator that returns a view: (base, value, *args, **kwargs) -> base
            with value in the place of the view, used to write through the view. Without one the
            view must only select elements of its base, each of them unchanged.
        view_parts: of an operator that returns several views: (shape of the base, *args,
            **kwargs) -> a list with, for each of them, the view operator that makes it and its
            arguments after the tensor, such as ``("aten.select.int", (0, 1))``.
        writes: argument name -> place of its new value among the function's results, for each
            argument that is written. Needed only if the schema does not say so, or for another
            order. A new value that is None is not written.
        no_grad_outputs: places of those results of the function that never require grad and have no
            derivative. A written argument whose new value is among them keeps no autograd history
            either.
        apart: names of arguments that must not share memory with what the in-place or out= variant
            writes; any other tensor may have exactly that memory, but not a part of it. Without
            names memory is not checked, except for ``torch.Tag.pointwise``.
        pointwise: the operator computes element by element, and has no ``torch.Tag.pointwise``.
        exact_out: out= must have the result's dtype, although PyTorch's kernel for the device meta
            accepts another.
        takes_contiguous: the function takes contiguous=, a bool that says whether its first
            argument is contiguous.

    Returns:
        Callable: the decorator, which takes the function and returns it.

    Raises:
        ValueError: no operator is given, torch has no such operator, or a fact does not fit the
            operator's schema.

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

        An operator that writes its first argument, and whose result requires no grad:

        >>> @torch.library.custom_op("bridge_example::count_", mutates_args=("counter",))
        ... def count_(counter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ...     counter += 1
        ...     return x.sign()
        >>> @register_lowering("bridge_example.count_", no_grad_outputs=(0, 1))
        ... def bridge_example_count_(counter, x):
        ...     return jnp.sign(x), counter + 1
        >>> counter = torch.zeros(())
        >>> torchfunc_jax.vmap(lambda x: count_(counter.clone(), x))(torch.tensor([-2.0, 3.0]))
        tensor([-1.,  1.])
        >>> torchfunc_jax.jit(lambda x: count_(counter, x))(torch.tensor(-2.0)), counter
        (tensor(-1.), tensor(1.))
    """
    if not operators:
        raise ValueError("operators: expected at least one name such as 'aten.sin'")
    if writes is not None and not isinstance(writes, Mapping):
        raise ValueError(
            "writes: expected names of arguments and places such as {'running_mean': "
            f"1}}, got {writes!r}"
        )
    given = {
        "view_inverse": view_inverse,
        "view_parts": view_parts,
        "writes": writes,
        "pointwise": pointwise,
        "exact_out": exact_out,
        "takes_contiguous": takes_contiguous,
        "apart": _tuple("apart", apart, "names of arguments such as ('index',)"),
        "no_grad_outputs": _tuple("no_grad_outputs", no_grad_outputs, "places such as (1,)"),
    }
    facts: dict[str, Any] = {name: fact for name, fact in given.items() if fact is not None}
    found = [overload(op) if isinstance(op, str) else op for op in operators]
    for op in found:
        if not hasattr(op, "_schema"):
            raise ValueError(
                "operators: expected a name or an OpOverload such as "
                f"torch.ops.aten.sin.default, got {op!r}"
            )
        _check_facts(op, Operator(op, **facts))

    def register(fn: Lowering) -> Lowering:
        for op in found:  # an Operator is a row of the table that is put back as it was
            known = LOWERINGS.get(op, Operator(fn))
            LOWERINGS[op] = (
                fn
                if isinstance(fn, Operator)
                else dataclasses.replace(known, lowering=loops.kept_in(fn), **facts)
            )
            OVERRIDDEN.add(op)
        process.plans.clear()  # plans made while these operators had another lowering, or none
        process.lowerings_changed += 1
        return fn

    return register


def _tuple(name: str, given: Sequence[Any] | None, expected: str) -> tuple[Any, ...] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"{name}: expected {expected}, got {given!r}")
    return tuple(given)


def _check_facts(op: torch._ops.OpOverload, row: Operator) -> None:
    """Raise ValueError if a fact cannot be true of an operator with such a schema."""
    _check_views(op, row)
    kinds = {a.name: str(a.type) for a in op._schema.arguments}
    tensors = [name for name, kind in kinds.items() if "Tensor" in kind]
    for fact, name in [
        *(("writes", name) for name in row.writes),
        *(("apart", name) for name in row.apart or ()),
    ]:
        if name not in tensors:
            raise ValueError(
                f"{fact}: {op} takes no tensor {name!r}; expected some of "
                f"{', '.join(tensors) or 'none'}"
            )
    for name, place in row.writes.items():
        if "List" in kinds[name]:
            raise ValueError(
                f"writes: {name!r} of {op} is a list of tensors; only single tensors can be named"
            )
        if not _is_place(place):
            raise ValueError(
                f"writes: expected the place of the new value of {name!r}, a "
                f"number from 0, got {place!r}"
            )
    if len(set(row.writes.values())) < len(row.writes):
        raise ValueError(f"writes: expected a place of its own for each argument, got {row.writes}")
    written = {
        a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    }
    if row.writes and not written <= set(row.writes):
        raise ValueError(
            f"writes: {op} writes {', '.join(sorted(written))} by its schema; expected all of "
            f"them, got {row.writes}"
        )
    count = sum(r.alias_info is None for r in op._schema.returns) + len(row.writes or written)
    for place in row.no_grad_outputs:
        if not _is_place(place):
            raise ValueError(
                f"no_grad_outputs: expected places of results, numbers from 0, got {place!r}"
            )
        if place >= count and not _returns_list(op):
            raise ValueError(
                f"no_grad_outputs: expected places below {count}, the number of results of {op}'s "
                f"function, got {place}"
            )


def _check_views(op: torch._ops.OpOverload, row: Operator) -> None:
    for name, fact in (("view_inverse", row.view_inverse), ("view_parts", row.view_parts)):
        if fact is not None and not callable(fact):
            raise ValueError(f"{name}: expected a function, got {fact!r}")
        if fact is not None and not op.is_view:
            raise ValueError(
                f"{name}: {op} is no view by its schema, {op._schema}; expected one such as "
                "'f(Tensor(a) x) -> Tensor(a)'"
            )
    if (
        op.is_view
        and _returns_list(op)
        and row.view_parts is None
        and LOWERINGS.get(op, row).view_parts is None
    ):
        raise ValueError(f"view_parts: expected a function, as {op} returns several views")
    if op.is_view and not _returns_list(op) and row.view_parts is not None:
        raise ValueError(f"view_parts: {op} returns one view; expected view_inverse=, or neither")


def _returns_list(op: torch._ops.OpOverload) -> bool:
    return len(op._schema.returns) == 1 and "List" in str(op._schema.returns[0].type)


def _is_place(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0
