"""``bridge.to_jax`` and ``bridge.to_torch``: conversions whose results are the caller's own.

A jax.Array never changes, and a torch tensor may be written to at any time, so neither shares the
other's memory unless the caller says that nobody writes. Inside of the bridge, where both live for
one call only, ``bridge.convert.tensors`` shares memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge import private
from bridge.convert import tensors
from bridge.errors import public

_ALIGNED = 64  # bytes: where an array's memory begins, so that JAX takes it as it is


@private.opaque
@public
def to_jax(t: torch.Tensor, *, copy: bool = True) -> jax.Array:
    """The tensor's values as a jax.Array.

    Args:
        t: strided tensor of any shape, on cpu or cuda; conj and neg bits are resolved; may require
            grad.
        copy: False: the array shares the tensor's memory if strides, alignment and device allow it.
            It is right as long as nobody writes to the tensor: JAX takes it that an array never
            changes, and compiled programs keep arrays.

    Returns:
        jax.Array: same shape and dtype, on the device ``bridge.devices`` maps to.

    Raises:
        TypeError: what is no tensor; sparse, quantized, meta, nested tensors and dtypes that JAX
            lacks.

    Example:
        >>> t = torch.ones(2)
        >>> array = to_jax(t)
        >>> t.add_(1), array.tolist()
        (tensor([2., 2.]), [1.0, 1.0])
    """
    if not isinstance(t, torch.Tensor):
        instead = (
            "it is one already"
            if isinstance(t, jax.Array)
            else "jax.numpy.asarray makes an array of it"
        )
        raise TypeError(f"t: expected a torch.Tensor, got {type(t)}; {instead}")
    array = tensors.to_jax(t)
    if not (copy and _one_memory(array, t)):
        return array
    return owned(array)


@private.opaque
@public
def to_torch(
    array: jax.Array, device: torch.device | None = None, *, copy: bool = True
) -> torch.Tensor:
    """The array's values as a torch tensor.  Waits until the array is computed.

    Args:
        array: a concrete jax.Array.
        device: where the tensor must be; None: the array's own device, as ``bridge.devices`` maps
            it.
        copy: False: the tensor shares the array's memory if it can, and must not be written to.

    Returns:
        torch.Tensor: same shape and dtype, no grad.

    Raises:
        TypeError: it is no jax.Array; torch has no such dtype.

    Example:
        >>> array = jax.numpy.arange(3.0)
        >>> to_torch(array).add_(1), array.tolist()
        (tensor([1., 2., 3.]), [0.0, 1.0, 2.0])
    """
    if not isinstance(array, jax.Array):
        instead = (
            "it is one already"
            if isinstance(array, torch.Tensor)
            else "torch.as_tensor makes a tensor of it"
        )
        raise TypeError(f"array: expected a jax.Array, got {type(array)}; {instead}")
    t = tensors.to_torch(array, device)
    if not (copy and _one_memory(array, t)):
        return t
    if array.platform() != "cpu":
        with private.below_python():
            return t.clone()
    # numpy copies without PyTorch's threads, which take milliseconds to meet when the processor is
    # busy
    return tensors.of_numpy(np.array(array))


def owned(array: jax.Array) -> jax.Array:
    """A copy of an array that shares memory with a tensor; it is made now, before the tensor can be
    written to.
    """
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        if array.platform() != "cpu":
            return jnp.array(array, copy=True).block_until_ready()
        size = array.nbytes
        room = np.empty(size + _ALIGNED, np.uint8)
        start = -room.ctypes.data % _ALIGNED
        values = room[start : start + size].view(array.dtype).reshape(array.shape)
        values[...] = array
        # as its own memory, without a program, which a forked process could not compile
        return jax.device_put(values)


def settle(results: Sequence[Any]) -> None:
    """Wait for results that are computed from tensors' memory, to which torch may write as soon as
    they are returned.
    """
    for v in results:
        if isinstance(v, jax.Array) and not isinstance(v, jax.core.Tracer):
            v.block_until_ready()


def _one_memory(array: jax.Array, t: torch.Tensor) -> bool:
    return (
        bool(t.numel())
        and tensors.is_local(array)
        and array.unsafe_buffer_pointer() == t.data_ptr()
    )
