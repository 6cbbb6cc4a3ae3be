"""Results of a computation, and their way out at the border: trees taken apart, devices, and writes
to tensors from outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.convert import trees
from bridge.convert.sparse import Sparse
from bridge.lowering.common.provided import refuse
from bridge.trace.aliasing import View, again
from bridge.trace.storage import Node


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Another output of the same computation, by its index."""

    index: int


@dataclasses.dataclass(slots=True)
class Result:
    """The result of a computation."""

    values: list[Any]  # JAX values, outputs first
    # what the transform needs to rebuild its outputs from the values; it holds no arrays
    meta: Any = None
    #: (leaf index or outer node, index into values, detached) of each tensor from outside that the
    #: function wrote to
    written: list[tuple[int | Node, int, bool]] = dataclasses.field(default_factory=list)
    #: by the index of an output that shares the memory of a leaf, an outer node or another output:
    #: which one, and its views that lead there
    shared: dict[int, tuple[int | Node | Output, tuple[View, ...]]] = dataclasses.field(
        default_factory=dict
    )
    # the last operator that wrote to each of ``written``, if it is known
    writers: list[Any] = dataclasses.field(default_factory=list)
    # arrays; on an explicit mesh the first outputs are sharded as they are
    like: Sequence[Any] = ()
    # a write to one argument is not seen in another input, even if the two share memory, as under
    # torch.func
    apart: bool = False

    def after(self, values: list[Any], shift: int, first: int = 0) -> Result:
        """The same result with other values in front; of its outputs, those before ``first`` are no
        longer there.
        """
        return Result(
            values,
            self.meta,
            [(target, index + shift, detached) for target, index, detached in self.written],
            {
                index + shift: (
                    Output(source.index + shift) if isinstance(source, Output) else source,
                    views,
                )
                for index, (source, views) in self.shared.items()
                if min(index, source.index if isinstance(source, Output) else index) >= first
            },
        )


Computation = Callable[[list[Any]], Result]
#: An output at the border that shares memory: its index, the tensor from outside or the other
#: output, and the views that lead to it.
SharedOutput = tuple[int, torch.Tensor | Output, tuple[View, ...]]


ARRAYS = torch.Tensor, jax.Array  # what crosses the border


def is_array(x: Any) -> bool:
    """Whether a leaf crosses the border, as torch tensors and jax.Arrays do."""
    return isinstance(x, ARRAYS)


def split_arrays(leaves: Sequence[Any]) -> list[int]:
    """The positions of the leaves that cross the border."""
    return [i for i, x in enumerate(leaves) if isinstance(x, ARRAYS)]


@dataclasses.dataclass(frozen=True, slots=True)
class Twin:
    """Stands for a leaf that is the same tensor as an earlier one, so that the function gets one
    object in both places.
    """

    first: int


def without_twins(leaves: Sequence[Any], dims: Sequence[int | None] = ()) -> list[Any]:
    """The leaves, each tensor once, and a Twin in its other places; what a vmap maps (dims) is
    another tensor in each place.
    """
    if len({*map(id, leaves)}) == len(leaves):
        return list(leaves)
    first: dict[int, int] = {}
    once = [
        isinstance(x, torch.Tensor) and (i >= len(dims) or dims[i] is None)
        for i, x in enumerate(leaves)
    ]
    return [
        Twin(k) if o and (k := first.setdefault(id(x), i)) != i else x
        for i, (x, o) in enumerate(zip(leaves, once, strict=True))
    ]


def with_twins(leaves: list[Any]) -> list[Any]:
    """The leaves as the function gets them: ``without_twins`` undone, and sparse tensors opened."""
    leaves = [leaves[x.first] if type(x) is Twin else x for x in leaves]
    return [x.tensor() if type(x) is Sparse else x for x in leaves]


def take_apart(out: Any) -> tuple[list[Any], Any]:
    """The tensors in a function's output, and the rest for ``put_together``: (spec, the other
    leaves, each tensor's device or False).
    """
    return of_leaves(*trees.flatten(out))


def of_leaves(leaves: Sequence[Any], spec: Any) -> tuple[list[Any], Any]:
    """``take_apart`` of an output that is flattened already."""
    is_tensor = [isinstance(x, torch.Tensor) and x.device for x in leaves]
    static = [None if t else x for x, t in zip(leaves, is_tensor, strict=True)]
    return [x for x in leaves if isinstance(x, torch.Tensor)], (spec, static, is_tensor)


def put_together(tensors_: Sequence[Any], meta: Any) -> Any:
    """The tree that ``take_apart`` took apart, with the given values in the tensors' places."""
    spec, static, is_tensor = meta
    source = iter(tensors_)
    return trees.unflatten(
        spec, [_on(next(source), t) if t else x for x, t in zip(static, is_tensor, strict=True)]
    )


def _on(value: Any, device: Any) -> Any:
    """The value; a tensor is on the device where PyTorch's function leaves it."""
    if (
        isinstance(value, torch.Tensor)
        and isinstance(device, torch.device)
        and value.device.type != device.type
    ):
        return value.to(device)
    return value


def write_back(written: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Change the tensors from outside as the function would have changed them."""
    for target, value in written:
        if not value.requires_grad:
            with torch.no_grad():
                target.copy_(value)
            continue
        if not target.is_leaf and not target._is_view():
            # PyTorch may have given it a history inside the trace; the new value already has all of
            # it
            target.detach_()
        target.copy_(value)


def placed(outs: list[Any], shared: Sequence[SharedOutput]) -> list[Any]:
    """The outputs, those that share memory replaced by views of the tensors whose memory it is,
    which have been written to by now.
    """
    for i, source, views in shared:
        t = outs[source.index] if isinstance(source, Output) else source
        try:
            outs[i] = again(t, views) if views else t
        except RuntimeError:
            # PyTorch's views do not all take a tensor with a conjugate or a negative bit
            outs[i] = again(t.resolve_conj().resolve_neg(), views)
    return outs


def conj(v: jax.Array) -> jax.Array:
    """The conjugate of a complex value: torch's gradients of complex values are the conjugates of
    JAX's.
    """
    return jnp.conj(v) if jnp.issubdtype(v.dtype, jnp.complexfloating) else v


def as_gradients(found: Iterable[jax.Array], transform: str) -> list[jax.Array]:
    """What a pullback of JAX's gives, as torch's gradients; in anomaly mode NaN is refused, as by
    torch's autograd.
    """
    found = [conj(g) for g in found]
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        for k, g in enumerate(found):
            if inexact(g):
                refuse(
                    jnp.isnan(g), f"Function '{transform}' returned nan values in its {k}th output."
                )
    return found


def inexact(v: jax.Array) -> bool:
    """Whether a value has derivatives: it is floating-point or complex."""
    return bool(jnp.issubdtype(v.dtype, jnp.inexact))


def pick(values: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """The values at the places that are wanted."""
    return [v for v, w in zip(values, wanted, strict=True) if w]


def replaced(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values, with others at these places."""
    at = dict(zip(places, others, strict=True))
    return [at.get(i, v) for i, v in enumerate(values)]


def inexact_dtype(dtype: torch.dtype) -> bool:
    """Whether tensors of that dtype have derivatives: it is floating-point or complex."""
    return dtype.is_floating_point or dtype.is_complex
