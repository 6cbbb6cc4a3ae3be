"""Copies, casts, fills and operators that return their operand's values (clone, detach,
resolve_conj, resolve_neg).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from bridge.convert import dtypes
from bridge.lowering.common.builders import expand
from bridge.lowering.common.promotion import cast, is_array
from bridge.lowering.registry import lowering
from bridge.lowering.tensors import creation


@lowering("aten._to_copy")
def aten_to_copy(
    self: Array,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Array:
    """_to_copy(Tensor self, *, ScalarType? dtype=None, ..., MemoryFormat? memory_format=None) ->
    Tensor
    """
    return self if dtype is None else cast(self, dtypes.to_jax(dtype))


@lowering("aten.clone", "aten.positive", "aten.resolve_conj", "aten.resolve_neg")
def aten_clone(self: Array, *, memory_format: torch.memory_format | None = None) -> Array:
    """clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor"""
    return self


@jax.custom_jvp
def revalue(old: Array, new: Array) -> Array:
    """new with old's derivative: the value of a tensor after a write that torch's autograd does not
    record.
    """
    # selects nothing of old, but is mapped if old is, as its derivative is
    return lax.select(jnp.zeros(new.shape, bool), old, new)


@revalue.defjvp
def _revalue_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return revalue(*primals), tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def revalue_at(old: Array, new: Array, inside: int) -> Array:
    """The same at one level of nesting alone: the one that has this number of differentiated levels
    inside it.
    """
    return lax.select(jnp.zeros(new.shape, bool), old, new)


@revalue_at.defjvp
def _revalue_at_jvp(
    inside: int, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    if inside:  # the tangent of an inner level is written to as well
        return revalue_at(*primals, inside - 1), revalue_at(*tangents, inside - 1)
    return lax.select(jnp.zeros(primals[1].shape, bool), *primals), tangents[0]


def _write_detached(base: Array, value: Array) -> Array:
    return revalue(base, value) if jnp.issubdtype(value.dtype, jnp.inexact) else value


@lowering("aten.detach", "aten.detach_copy", view_inverse=_write_detached)
def aten_detach(self: Array) -> Array:
    """detach(Tensor(a) self) -> Tensor(a)"""
    return lax.stop_gradient(self)


@lowering("aten.copy", apart=())
def aten_copy(self: Array, src: Array, non_blocking: bool = False) -> Array:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor"""
    x = cast(src, self.dtype)
    return x if x.shape == self.shape else expand(x, self.shape)


@lowering("aten.fill.Scalar", "aten.fill.Tensor")
def aten_fill(self: Array, value: Any) -> Array:
    """fill.Scalar(Tensor self, Scalar value) -> Tensor"""
    if is_array(value) and value.ndim:
        raise RuntimeError(
            f"value: fill only supports a 0-dimensional value tensor, got {value.ndim} dimensions"
        )
    return expand(
        cast(value, self.dtype) if is_array(value) else creation.number(value, self.dtype),
        self.shape,
    )


@lowering("aten.zero")
def aten_zero(self: Array) -> Array:
    """zero(Tensor self) -> Tensor"""
    return expand(self.dtype.type(0), self.shape)
