"""Converts a torch.Tensor to a jax.Array and back, without a copy if the memory allows it.

A conversion that shares memory is remembered by the tensor's identity: the array sees later writes
to the tensor too, so it stays right as long as the tensor has the same address and shape. A
conversion that copies is not remembered.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridge import devices, private, private_jax
from bridge.convert import dtypes
from bridge.convert.sparse import SparseOperand
from bridge.convert.strides import strides_of
from bridge.process import process

# numpy has no bfloat16 or 8-bit floats of its own: they are converted as integers of the same width
_AS_INT = {
    t: (torch.int16 if j.itemsize == 2 else torch.int8, j)
    for t, j in dtypes._TO_JAX.items()
    if j.type.__module__ == "ml_dtypes"
}
_BY_BITS = frozenset(_AS_INT) - {torch.bfloat16}  # DLPack has no such types
_ONE_DEVICE = jax.sharding.SingleDeviceSharding
_CPU = torch.device("cpu")
_DLPACK_CUDA, _DLPACK_ROCM = 2, 10  # DLPack's numbers for the kinds of devices
_MOST_DIMENSIONS = 64  # of NumPy's arrays
_ALIGNMENT = 16  # bytes: XLA's programs for accelerators take no input that begins elsewhere


@private.opaque
def to_jax(t: torch.Tensor) -> jax.Array:
    """The tensor's values as a jax.Array; shares memory if strides, alignment and device allow it,
    else a copy.

    Args:
        t: strided tensor of any shape, on cpu or cuda; conj and neg bits are resolved; may require
            grad.

    Returns:
        jax.Array: same shape and dtype (64-bit types need ``jax.enable_x64``), on the device
            ``bridge.devices`` maps to.

    Raises:
        TypeError: sparse, quantized, meta, nested tensors and dtypes that JAX lacks.
    """
    return crossings([t])[0][0]


def crossings(found: Iterable[torch.Tensor]) -> tuple[list[jax.Array], list[int]]:
    """``to_jax`` of each of these tensors, and for each a number that stands for its shape,
    strides, dtype and device.
    """
    arrays: list[jax.Array] = []
    signatures: list[int] = []
    # the CUDA devices on which JAX waits already for what torch computes
    waited: list[torch.device] = []
    known = process.arrays
    for t in found:
        entry = known.get(id(t))
        if entry is not None and entry[0]() is t and entry[2] == t.data_ptr():
            seen = entry[3]
            version = t._version
            # resize_ and similar methods change the version and the shape, but not the address
            if seen[0] != version and seen[2] == t.shape and t.is_contiguous():
                seen[0] = version
            if seen[0] == version:
                arrays.append(entry[1])
                signatures.append(seen[1])
                continue
        if _is_plain(t):
            array = _shared(t, waited) if t.is_cuda else _in_place(t, t.detach())
        else:
            # these operations run on the tensor itself and now, even inside a trace or a user's own
            # jax.jit
            with private.below_python(), jax.enable_x64(True), jax.ensure_compile_time_eval():
                array = _cross(t, waited)
        arrays.append(array)
        signatures.append(_signature(t))
    return arrays, signatures


def _cross(t: torch.Tensor, waited: list[torch.device]) -> jax.Array:
    source = plain(t)
    device = devices.jax_device(t.device)
    if source.device.type != "cpu":
        return _from_accelerator(source, waited)
    return _in_place(t, source, device)


def _in_place(t: torch.Tensor, source: torch.Tensor, device: jax.Device | None = None) -> jax.Array:
    """The array with the memory of a plain tensor on the CPU; it is remembered as that of t, if it
    is t's memory.
    """
    put = None if device is not None else private_jax.takes_numpy()
    values = as_numpy(source)
    array = jax.device_put(values, device) if put is None else put(values)
    address = t.data_ptr()
    if (
        device is None
        and values.size
        and source.data_ptr() == address == array.unsafe_buffer_pointer()
        and not t.is_inference()
    ):
        forget = functools.partial(process.arrays.pop, key := id(t))
        process.arrays[key] = (
            weakref.ref(t, forget),
            array,
            address,
            [t._version, _signature(t), t.shape],
        )
    elif device is None:
        array.block_until_ready()
    return array


def _is_plain(t: torch.Tensor) -> bool:
    """Whether an array can share the memory of a tensor as it is: at once, without what ``plain``
    and JAX's device_put look at.
    """
    return (
        (type(t) is torch.Tensor or type(t) is torch.nn.Parameter)
        and t.layout is torch.strided
        and not t.is_nested
        and (
            t.is_cuda
            or (
                t.is_cpu
                and process.default_device is None
                and private_jax.takes_numpy() is not None
            )
        )
        and not private.without_memory(t)
        and not private.count_of_dispatch_modes()
        and t.is_contiguous()
        and not t.is_conj()
        and not t.is_neg()
        and not t.is_quantized
        and t.dim() <= _MOST_DIMENSIONS
        and (
            t.is_cpu
            or (t.numel() > 0 and not t.data_ptr() % _ALIGNMENT and t.dtype not in _BY_BITS)
        )
    )


def _from_accelerator(t: torch.Tensor, waited: list[torch.device]) -> jax.Array:
    if not t.numel():
        return jax.device_put(np.zeros(t.shape, dtypes.to_jax(t.dtype)), devices.of(t.device))
    if t.dtype in _BY_BITS:
        as_int, dtype = _AS_INT[t.dtype]
        return jax.lax.bitcast_convert_type(_from_accelerator(t.view(as_int), waited), dtype)
    dtypes.to_jax(t.dtype)
    waited.clear()  # plain may have copied it
    return _shared(t.clone() if t.data_ptr() % _ALIGNMENT else t, waited)


def _shared(t: torch.Tensor, waited: list[torch.device]) -> jax.Array:
    """The array with a CUDA tensor's memory. Whatever reads it waits until torch has computed the
    tensor.
    """
    ready = _ready(t.device)
    if ready is None:
        return jax.dlpack.from_dlpack(t.detach())
    device, pointer, stream = ready
    if t.device not in waited:
        stream.wait_stream(torch.cuda.current_stream(t.device))
        waited.append(t.device)
    kind = _DLPACK_ROCM if torch.version.hip else _DLPACK_CUDA
    array = private_jax.from_capsule(torch.utils.dlpack.to_dlpack(t), device, pointer, kind)
    return jax.dlpack.from_dlpack(t.detach()) if array is None else array


@functools.cache
def _ready(device: torch.device) -> tuple[jax.Device, int, torch.cuda.ExternalStream] | None:
    """JAX's device, and its stream that waits for torch's: its address, and as torch's stream; None
    if JAX has no such stream.
    """
    found = devices.of(device)
    try:
        pointer = int(found.get_stream_for_external_ready_events())
    except (AttributeError, jax.errors.JaxRuntimeError):
        return None
    return found, pointer, torch.cuda.ExternalStream(pointer, device=device)


def _signature(t: torch.Tensor) -> int:
    if t.is_nested:  # a nested tensor has no single shape: plain raises its TypeError
        plain(t)
    return process.signatures.setdefault(
        (t.shape, strides_of(t), t.dtype, t.device), len(process.signatures)
    )


def common_device(leaves: Sequence[Any]) -> torch.device | None:
    """The device of the results: that of the first tensor with dimensions, else of the first
    tensor.
    """
    found = None
    for x in leaves:
        if isinstance(x, torch.Tensor):
            if x.dim():
                return x.device
            found = found or x.device
    return found


def on_one_device(values: list[Any]) -> list[Any]:
    """Values to compute with together: if one is on an accelerator, those on the CPU are copied
    there, as PyTorch does with numbers.
    """
    if devices.has_accelerator():
        found = next((d for v in values if is_local(v) and (d := v.device).platform != "cpu"), None)
        if found is None:
            return values
        with jax.enable_x64(True):
            return [
                jax.device_put(v, found) if is_local(v) and v.device.platform == "cpu" else v
                for v in values
            ]
    return values


def is_local(v: Any) -> bool:
    """Whether a value is an array that has one address in this process's memory."""
    if not isinstance(v, jax.Array) or isinstance(v, jax.core.Tracer):
        return False
    sharding = v.sharding
    return sharding.is_fully_addressable and (
        type(sharding) is _ONE_DEVICE or len(sharding.device_set) == 1
    )


def address(v: Any) -> int | None:
    """Where the memory of an array in this process begins; None for anything else. Waits until the
    array is computed.
    """
    try:
        return int(v.unsafe_buffer_pointer())
    except (AttributeError, ValueError, jax.errors.JaxRuntimeError):
        # no array, or one on several devices
        return None


def fits_torch(v: Any) -> bool:
    """Whether torch can compute with an array where it is, and JAX's programs of torch tensors
    there too.
    """
    if not is_local(v) or v.dtype not in dtypes._TO_TORCH:
        return False
    return v.device == devices.of(_CPU) or (
        v.device.platform in ("gpu", "cuda", "rocm") and torch.cuda.is_available()
    )


def crosses(t: torch.Tensor) -> bool:
    """Whether a tensor found in a closure or module can be an input of a computation: it must be an
    ordinary tensor with values.
    """
    if t.layout is not torch.strided or t.is_nested:
        return False
    if t.is_meta or t.is_quantized or type(t) not in (torch.Tensor, torch.nn.Parameter):
        return False
    # a library may have kept one from inside of a transform of torch.func's
    return not private.without_memory(t)


def refuse_nested(leaves: Sequence[Any]) -> None:
    if any(isinstance(x, torch.Tensor) and x.is_nested for x in leaves):
        raise TypeError(
            "tensor: expected a plain tensor, got a nested one; convert it with .to_padded_tensor()"
        ) from None


def plain(t: torch.Tensor) -> torch.Tensor:
    """t as a dense contiguous tensor without grad, conj or neg bit; raises TypeError if t is not
    dense.
    """
    refuse_nested([t])
    if t.layout is not torch.strided:
        raise SparseOperand(t)
    if t.is_quantized:
        raise TypeError(
            f"tensor: expected a plain tensor, got a quantized one ({t.dtype}); "
            "convert it with .dequantize()"
        )
    if t.is_meta:
        raise TypeError(
            "tensor: expected a tensor with data, got one on device 'meta'; materialize it with "
            ".to_empty(device='cpu')"
        )
    strange = private.without_memory(t)
    if strange:
        raise TypeError(f"tensor: expected a tensor with data, got {strange}")
    if t.dim() > _MOST_DIMENSIONS:
        raise RuntimeError(
            f"only tensors with up to {_MOST_DIMENSIONS} dims are supported, got {t.dim()}"
        )
    t = t.detach()
    if t.is_conj():
        t = t.resolve_conj()
    if t.is_neg():
        t = t.resolve_neg()
    return t.contiguous()


def as_numpy(t: torch.Tensor) -> np.ndarray:
    """A plain CPU tensor as a numpy array that shares its memory."""
    other = _AS_INT.get(t.dtype)
    if other is None:
        dtypes.to_jax(t.dtype)
        return t.numpy()
    return t.view(other[0]).numpy().view(other[1])


Layout = tuple[torch.dtype, Any, bool, bool, tuple[int, ...], np.dtype]


@functools.lru_cache(4096)
def layout(shape: tuple[int, ...], dtype: np.dtype) -> Layout:
    """For arrays of this shape and dtype: torch's dtype, ctypes' buffer type, is empty, numpy knows
    torch's dtype, shape, dtype.
    """
    size = math.prod(shape)
    found = dtypes.to_torch(dtype)
    return (
        found,
        ctypes.c_char * (size * dtype.itemsize),
        size == 0,
        found not in _AS_INT,
        shape,
        dtype,
    )


@private.opaque
def to_torch(
    array: jax.Array,
    device: torch.device | None = None,
    avoid: set[int] | None = None,
    wait: bool = True,
) -> torch.Tensor:
    """The array's values as a torch tensor; shares memory if it can. Waits until the array is
    computed.

    Args:
        array: a concrete jax.Array.
        device: where the tensor must be; None: the array's own device, as ``bridge.devices`` maps
            it.
        wait: False if the caller itself waits for the array, before it returns the tensor.
        avoid: addresses that the result may not share (inputs, earlier outputs); the result's
            address is added.

    Returns:
        torch.Tensor: same shape and dtype, no grad.

    Raises:
        TypeError: torch has no such dtype.
    """
    shape = array.shape
    dtype, buffer_type, empty, known, _, _ = layout(shape, array.dtype)
    if empty:
        return torch.empty(shape, dtype=dtype, device=device)
    if (
        type(array.sharding) is not _ONE_DEVICE and len(array.devices()) > 1
    ) or array.platform() != "cpu":
        return _from_device(array, device)
    if wait or avoid is not None or not (device is None or device.type == "cpu"):
        array.block_until_ready()
    address = array.unsafe_buffer_pointer()
    buffer = buffer_type.from_address(address)
    buffer.owner = array  # the memory lives as long as the tensor does
    # the conversion through numpy takes a third of the time
    t = (
        torch.from_numpy(np.ndarray(shape, array.dtype, buffer))
        if known
        else torch.frombuffer(buffer, dtype=dtype).view(shape)
    )
    if avoid is not None:
        if address in avoid:
            t = t.clone()
        else:
            avoid.add(address)
    return t if device is None or device.type == "cpu" else t.to(device)


@private.opaque
def views(
    arrays: Sequence[jax.Array], layouts: Sequence[Layout], device: torch.device | None
) -> list[torch.Tensor]:
    """``to_torch`` of a program's results, whose layouts are known from its avals; the caller waits
    for the arrays.
    """
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        stream = torch.cuda.current_stream(device).cuda_stream
        alone = [len(a.devices()) == 1 and a.platform() != "cpu" and a.size > 0 for a in arrays]
        return [
            _from_cuda(a, device, stream) if one else to_torch(a, device)
            for a, one in zip(arrays, alone, strict=True)
        ]
    if device is None or device.type != "cpu":
        return [to_torch(a, device, wait=False) for a in arrays]
    return [view(array, found) for array, found in zip(arrays, layouts, strict=True)]


@private.opaque
def view(array: jax.Array, found: Layout) -> torch.Tensor:
    """``to_torch`` of an array on the CPU whose layout is known; the caller waits for the array."""
    dtype, buffer_type, empty, known, shape, kind = found
    if empty or not known or array.platform() != "cpu":
        return to_torch(array, _CPU, wait=False)
    try:
        address = array.unsafe_buffer_pointer()
    except (ValueError, jax.errors.JaxRuntimeError):  # the array is on several devices
        return to_torch(array, _CPU, wait=False)
    buffer = buffer_type.from_address(address)
    buffer.owner = array
    return (
        torch.frombuffer(buffer, dtype=dtype)
        if len(shape) == 1
        else torch.from_numpy(np.ndarray(shape, kind, buffer))
    )


def _from_cuda(array: jax.Array, device: torch.device | None, stream: int) -> torch.Tensor:
    """The tensor with the memory of an array on a GPU. The stream, torch's current one, waits until
    the array is computed.
    """
    dtype = dtypes.to_torch(array.dtype)
    if dtype in _BY_BITS:
        array = jax.lax.bitcast_convert_type(array, dtypes.to_jax(_AS_INT[dtype][0]))
    # 1 is CUDA's own name for the stream 0
    t = torch.from_dlpack(private_jax.to_capsule(array, stream or 1))
    t = t.view(dtype) if dtype in _BY_BITS else t
    return t if device is None or t.device == device else t.to(device)


def _from_device(array: jax.Array, device: torch.device | None) -> torch.Tensor:
    if not array.is_fully_addressable:
        raise TypeError(
            "array: expected one whose shards are all on this process's devices; gather it first"
        )
    if (
        len(array.devices()) == 1
        and array.platform() in ("gpu", "cuda", "rocm")
        and torch.cuda.is_available()
    ):
        return _from_cuda(
            array,
            device,
            torch.cuda.current_stream(next(iter(array.devices())).local_hardware_id).cuda_stream,
        )
    t = of_numpy(np.array(array))
    return t if device is None else t.to(device)


def of_numpy(values: np.ndarray) -> torch.Tensor:
    """The tensor that shares the memory of a numpy array, whose dtype may be one that numpy itself
    lacks.
    """
    dtype = dtypes.to_torch(values.dtype)
    if dtype in _AS_INT:
        values = values.view(dtypes.to_jax(_AS_INT[dtype][0]))
    return torch.from_numpy(values).view(dtype)
