"""The functions of torch/distributed/utils.py, for torch tensors and jax.Arrays alike, by their
names without the underscore.

Signatures, results and errors are those of torch's, which are private. The processes of the last
functions are those of ``jax.distributed``, and wait for each other within a time limit.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import traceback
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from bridge import devices, modules, processes
from bridge.convert import dtypes, tensors
from bridge.private import opaque

__all__ = [
    "alloc_storage",
    "apply_to_tensors",
    "cast_forward_inputs",
    "data_ptr_allocated",
    "free_storage",
    "p_assert",
    "pack_kwargs",
    "recursive_to",
    "replace_by_prefix",
    "sync_module_states",
    "sync_params_and_buffers",
    "to_kwargs",
    "unpack_kwargs",
    "verify_param_shape_across_processes",
]

Array: TypeAlias = torch.Tensor | jax.Array
Target: TypeAlias = torch.device | str | int | jax.Device | jax.sharding.Sharding


# -- arguments -------------------------------------------------------------------------------------
def pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Arguments as one flat tuple, and the keywords of the last of them; ``unpack_kwargs`` takes
    them apart again.

    Returns:
        (flat_args, kwarg_keys): the positional arguments and then the values of the keyword
            arguments; their keys, in the same order.

    Source: ``torch.distributed.utils._pack_kwargs``

    Example:
        >>> from torchfunc_jax.distributed.utils import pack_kwargs
        >>> pack_kwargs(1, 2, a=3, b=4)
        ((1, 2, 3, 4), ('a', 'b'))
    """
    return (*args, *kwargs.values()), tuple(kwargs)


def unpack_kwargs(
    flat_args: tuple[Any, ...], kwarg_keys: tuple[str, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments that ``pack_kwargs`` made one tuple of.

    Args:
        flat_args: positional arguments, then one value for each keyword.
        kwarg_keys: the keywords.

    Returns:
        (args, kwargs).

    Raises:
        AssertionError: there are more keywords than arguments.

    Source: ``torch.distributed.utils._unpack_kwargs``

    Example:
        >>> from torchfunc_jax.distributed.utils import unpack_kwargs
        >>> unpack_kwargs((1, 2, 3, 4), ("a", "b"))
        ((1, 2), {'a': 3, 'b': 4})
    """
    first = len(flat_args) - len(kwarg_keys)
    if first < 0:
        raise AssertionError(f"too many keys {len(kwarg_keys)} vs. {len(flat_args)}")
    return flat_args[:first], dict(zip(kwarg_keys, flat_args[first:], strict=True))


def cast_forward_inputs(dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Arguments with their floating-point tensors and arrays in another dtype; integers, bools and
    complex numbers stay as they are.

    Args:
        dtype: of the results, torch's or JAX's; None: the arguments are returned as they are. A
            jax.Array becomes 32-bit in place of 64-bit unless JAX's ``jax_enable_x64`` is on.
        args, kwargs: the containers that ``apply_to_tensors`` looks into.

    Returns:
        (args, kwargs): a tensor that has the dtype already is the same object; the others are
            differentiable with respect to it.

    Source: ``torch.distributed.utils._cast_forward_inputs``

    Example:
        >>> import jax.numpy as jnp, torch
        >>> from torchfunc_jax.distributed.utils import cast_forward_inputs
        >>> args, kwargs = cast_forward_inputs(
        ...     torch.bfloat16, torch.ones(2), torch.arange(2), mask=[jnp.ones(2)]
        ... )
        >>> [x.dtype for x in args], kwargs["mask"][0].dtype
        ([torch.bfloat16, torch.int64], dtype(bfloat16))
    """
    if dtype is None:
        return args, kwargs
    wanted = dtype if isinstance(dtype, torch.dtype) else dtypes.to_torch(dtype)

    def cast(x: Array) -> Array:
        if isinstance(x, torch.Tensor):
            return x.to(wanted) if x.is_floating_point() and x.dtype != wanted else x
        return (
            x.astype(dtypes.to_jax(wanted))
            if jax.numpy.issubdtype(x.dtype, np.floating) and x.dtype != dtypes.to_jax(wanted)
            else x
        )

    return apply_to_tensors(cast, args), apply_to_tensors(cast, kwargs)


def apply_to_tensors(fn: Callable[[Any], Any], container: Any) -> Any:
    """A container with a function applied to each tensor and array in it.

    Args:
        fn: takes a torch.Tensor or jax.Array.
        container: nested dataclasses, OrderedDicts, dicts, namedtuples, lists, tuples and sets;
            whatever else is in them stays as it is. A dict of another class becomes a dict. In a
            PackedSequence the function is called with the data, and its result is not used, as in
            torch.

    Returns:
        A new container of the same structure; fn's result if the container is itself a tensor or
            array.

    Source: ``torch.distributed.utils._apply_to_tensors``

    Example:
        >>> import jax.numpy as jnp, torch
        >>> from torchfunc_jax.distributed.utils import apply_to_tensors
        >>> apply_to_tensors(
        ...     lambda x: x.shape, {"a": [torch.ones(2)], "b": (jnp.ones((3, 1)), "text")}
        ... )
        {'a': [torch.Size([2])], 'b': ((3, 1), 'text')}
    """
    apply = functools.partial(apply_to_tensors, fn)
    match container:
        case torch.Tensor() | jax.Array():
            return fn(container)
        case _ if hasattr(container, "__dataclass_fields__"):
            # torch makes it anew twice, and so __post_init__ runs twice
            copy = dataclasses.replace(container)
            return dataclasses.replace(
                copy, **{f.name: apply(getattr(copy, f.name)) for f in dataclasses.fields(copy)}
            )
        case OrderedDict():
            found = type(container)()
            found.update((key, apply(value)) for key, value in container.items())
            return found
        case PackedSequence():
            apply(container.data)
            return container
        case dict():
            return {key: apply(value) for key, value in container.items()}
        case tuple() if _is_namedtuple(container):
            return type(container)(*map(apply, container))
        case list() | tuple() | set():
            return type(container)(map(apply, container))
    return container


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


# -- devices ---------------------------------------------------------------------------------------
def recursive_to(
    inputs: Any, target_device: Target, use_side_stream_for_tensor_copies: bool
) -> Any:
    """Inputs with their tensors and arrays on another device, or spread over several; copies to
    JAX's devices overlap.

    A tensor stays a tensor, and an array stays an array. Only a tensor whose target is a device or
    a sharding of JAX's becomes a jax.Array: a copy, without torch's autograd, and 32-bit in place
    of 64-bit unless JAX's ``jax_enable_x64`` is on.

    Args:
        inputs: nested lists, tuples, namedtuples and dicts; what is in other containers stays where
            it is. A tuple of another class becomes a tuple, and so for lists. Of a PackedSequence
            everything but the batch sizes is moved.
        target_device: a ``torch.device`` or what makes one, which for a jax.Array is this process's
            JAX device of that name; a ``jax.Device``; or a ``jax.sharding.Sharding``.
        use_side_stream_for_tensor_copies: True: return while copies to an accelerator run, so
            pinned memory must not be changed until they are done; False: return when they are done.

    Returns:
        list or tuple: one element, which is like the inputs; a tuple if the inputs are a tensor,
            array or PackedSequence.

    Raises:
        ValueError: there is no such JAX device; a sharding does not fit an array's shape.
        TypeError: JAX cannot hold a tensor (sparse, quantized, device "meta").

    Source: ``torch.distributed.utils._recursive_to``

    Example:
        >>> import jax, torch
        >>> from torchfunc_jax.distributed.utils import recursive_to
        >>> (moved,) = recursive_to({"x": torch.ones(4, 2), "n": 3}, torch.device("cpu"), False)
        >>> moved["x"].device, moved["n"]
        (device(type='cpu'), 3)
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        >>> (moved,) = recursive_to([torch.ones(4, 2)], rows, True)
        >>> moved[0].shape, moved[0].sharding == rows
        ((4, 2), True)
    """
    begun: list[jax.Array] = []
    wait = not use_side_stream_for_tensor_copies
    target = (
        torch.device(target_device)
        if isinstance(target_device, torch.device | str | int)
        else target_device
    )
    moved = _moved(inputs, target, wait, begun)
    if wait:
        jax.block_until_ready(begun)
    return (moved,) if isinstance(inputs, torch.Tensor | jax.Array | PackedSequence) else [moved]


def _moved(x: Any, target: Target, wait: bool, begun: list[jax.Array]) -> Any:
    move = functools.partial(_moved, target=target, wait=wait, begun=begun)
    match x:
        case torch.Tensor() if isinstance(target, torch.device):
            # the CPU does not wait before it reads
            return x.to(target, non_blocking=not wait and target.type != "cpu")
        case torch.Tensor() | jax.Array():
            source = modules.as_array(x) if isinstance(x, torch.Tensor) else x
            begun.append(
                jax.device_put(
                    source,
                    devices.find(str(target)) if isinstance(target, torch.device) else target,
                )
            )
            return begun[-1]
        case PackedSequence():
            data = move(x.data)
            return (
                x
                if data is x.data
                else PackedSequence(
                    data, x.batch_sizes, move(x.sorted_indices), move(x.unsorted_indices)
                )
            )
        case tuple() if _is_namedtuple(x):
            return type(x)(*map(move, x))
        case tuple() if x:
            return tuple(map(move, x))
        case list() if x:
            return list(map(move, x))
        case dict() if x:
            return type(x)(tuple(map(move, x.items())))
    return x


def to_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_device: Target,
    use_side_stream_for_tensor_copies: bool,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """The arguments of a call on another device, by ``recursive_to``.

    Args:
        inputs: the positional arguments.
        kwargs: the keyword arguments, or None.
        target_device, use_side_stream_for_tensor_copies: as of ``recursive_to``.

    Returns:
        (inputs, kwargs): each a tuple of one element for one call; both are empty if there are no
            arguments at all.

    Raises:
        ValueError, TypeError: as ``recursive_to``.

    Source: ``torch.distributed.utils._to_kwargs``

    Example:
        >>> import torch
        >>> from torchfunc_jax.distributed.utils import to_kwargs
        >>> to_kwargs((torch.ones(2),), {"scale": 3}, torch.device("cpu"), False)
        (((tensor([1., 1.]),),), ({'scale': 3},))
    """
    if not inputs and not kwargs:
        return (), ()
    moved = recursive_to(
        (inputs or (), kwargs or {}), target_device, use_side_stream_for_tensor_copies
    )[0]
    return moved[:1], moved[1:]


# -- storage ---------------------------------------------------------------------------------------
def p_assert(cond: Any, s: str, raise_assertion_error: bool = True) -> None:
    """``assert`` for code that a backward pass runs, where a message could get lost: it is printed,
    with the stack, before it is raised.

    Args:
        cond: anything; a true value does nothing.
        s: the message.
        raise_assertion_error: False: only print.

    Raises:
        AssertionError: cond is false.

    Source: ``torch.distributed.utils._p_assert``

    Example:
        >>> from torchfunc_jax.distributed.utils import p_assert
        >>> p_assert(1 < 2, "numbers have no order")
        >>> p_assert(False, "only printed", raise_assertion_error=False)
        only printed
    """
    if not cond:
        print(s)
        traceback.print_stack()
        if raise_assertion_error:
            raise AssertionError(s)


def _storage(tensor: torch.Tensor, what: str) -> torch.UntypedStorage:
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise RuntimeError(
            f"{what}: tensor: expected a tensor with a storage, got a {type(tensor).__name__} "
            "without one (inside of a transform, say); call it outside"
        ) from error
    return storage


def alloc_storage(tensor: torch.Tensor, size: Sequence[int]) -> None:
    """Give a tensor whose storage was freed a new one, with any values in it; nothing is done if it
    has one of that size.

    Args:
        tensor: a torch.Tensor.
        size: the shape that the storage is to hold, often tensor.shape.

    Raises:
        AssertionError: the tensor has a storage of another size.
        TypeError: tensor is a jax.Array, which cannot come back: it never changes.
        RuntimeError: the tensor has no storage of its own, as in a transform.

    Source: ``torch.distributed.utils._alloc_storage``

    Example:
        >>> import torch
        >>> from torchfunc_jax.distributed.utils import alloc_storage, free_storage
        >>> weight = torch.ones(3)
        >>> free_storage(weight)
        >>> alloc_storage(weight, weight.shape)
        >>> weight.fill_(2.0)
        tensor([2., 2., 2.])
    """
    if isinstance(tensor, jax.Array):
        raise TypeError(
            "alloc_storage: tensor: expected a torch.Tensor, got a jax.Array, which never changes "
            "and whose memory cannot come back; make another one, for example "
            f"jnp.zeros({tuple(size)}, '{tensor.dtype}')"
        )
    if torch.compiler.is_dynamo_compiling():
        return
    storage, wanted = _storage(tensor, "alloc_storage"), math.prod(size) * tensor.itemsize
    if storage.nbytes() != wanted:
        have = storage.nbytes() // tensor.itemsize
        p_assert(have == 0, f"Tensor storage should have been resized to be 0 but got {have}")
        storage.resize_(wanted)


def free_storage(tensor: Array) -> None:
    """Free a tensor's memory and keep its shape and dtype; nothing is done if it is freed already.

    Of a jax.Array this is ``array.delete()``. Arrays that ``bridge.to_jax(t, copy=False)`` made of
    the tensor must not be used any more.

    Args:
        tensor: a torch.Tensor that is alone in its storage, or a jax.Array.

    Raises:
        AssertionError: the tensor does not begin where its storage begins, so that another one may
            be there.
        RuntimeError: the tensor has no storage of its own, as in a transform, or one that cannot be
            resized (made by ``from_numpy``).

    Source: ``torch.distributed.utils._free_storage``

    Example:
        >>> import jax.numpy as jnp, torch
        >>> from torchfunc_jax.distributed.utils import data_ptr_allocated, free_storage
        >>> for x in (torch.ones(3), jnp.ones(3)):
        ...     free_storage(x)
        ...     data_ptr_allocated(x), len(x.shape)
        (False, 1)
        (False, 1)
    """
    if isinstance(tensor, jax.Array):
        tensor.delete()
        return
    if torch.compiler.is_dynamo_compiling():
        return
    storage = _storage(tensor, "free_storage")
    if storage.nbytes():
        p_assert(
            tensor.storage_offset() == 0,
            "Freeing a tensor's storage is unsafe when it is not the sole occupant\nstorage "
            f"offset: {tensor.storage_offset()}\nstorage size: "
            f"{storage.nbytes() // tensor.itemsize}\ntensor shape: {tensor.shape}",
        )
        storage.resize_(0)


def data_ptr_allocated(tensor: Array) -> bool:
    """Whether a tensor has memory; of a jax.Array: whether it is not deleted.

    Raises:
        RuntimeError: the tensor has no storage of its own, as in a transform.

    Source: ``torch.distributed.utils._data_ptr_allocated``

    Example:
        >>> import jax.numpy as jnp, torch
        >>> from torchfunc_jax.distributed.utils import data_ptr_allocated
        >>> (
        ...     data_ptr_allocated(torch.ones(3)),
        ...     data_ptr_allocated(jnp.ones(3)),
        ...     data_ptr_allocated(torch.ones(3, device="meta")),
        ... )
        (True, True, False)
    """
    return (
        not tensor.is_deleted()
        if isinstance(tensor, jax.Array)
        else _storage(tensor, "data_ptr_allocated").data_ptr() > 0
    )


# -- processes -------------------------------------------------------------------------------------
def verify_param_shape_across_processes(
    process_group: Iterable[int] | None,
    tensors: Sequence[Array] | Mapping[str, Array],
    logger: Any = None,
    *,
    timeout: float = processes.TIMEOUT,
) -> None:
    """Raise in every process if the parameters of some processes differ in number, name, shape or
    dtype from those of the others.

    Only descriptions are exchanged, through the service of ``jax.distributed``. torch compares
    number, shape and strides; strides do not matter here.

    Args:
        process_group: the indices of the processes that call this, ``jax.process_index()`` of each;
            None: all of them.
        tensors: tensors or arrays; as a dict, for example ``dict(module.named_parameters())``,
            errors have the names.
        logger: not used.
        timeout: seconds to wait for the other processes.

    Raises:
        RuntimeError: parameters differ, and the message says which ones in which processes; or a
            process did not come in time, and it says which.
        ValueError, TypeError: process_group is no group with this process in it.

    Source: ``torch.distributed.utils._verify_param_shape_across_processes``

    Example:
        >>> import torch
        >>> from torchfunc_jax.distributed.utils import verify_param_shape_across_processes
        >>> model = torch.nn.Linear(3, 2)
        >>> verify_param_shape_across_processes(None, dict(model.named_parameters()), timeout=60)
    """
    named = (
        tensors.items()
        if isinstance(tensors, Mapping)
        else ((f"params[{i}]", t) for i, t in enumerate(tensors))
    )
    _verify(
        processes.members(process_group),
        dict(named),
        timeout,
        "verify_param_shape_across_processes",
    )


def _verify(
    group: tuple[int, ...], states: Mapping[str, Array], timeout: float, what: str, **arguments: int
) -> None:
    """Raise if states differ, or arguments that decide what is sent."""
    mine = {f"argument {name}": str(value) for name, value in arguments.items()}
    mine |= {
        name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in states.items()
    }
    texts = processes.exchange(json.dumps(list(mine.items())), group, timeout, what)
    if len(set(texts.values())) == 1:
        return
    found = {p: dict(json.loads(text)) for p, text in texts.items()}
    wrong = []
    for name in dict.fromkeys(name for layout in found.values() for name in layout):
        having: dict[str, list[int]] = {}
        for p, layout in found.items():
            having.setdefault(layout.get(name, "missing"), []).append(p)
        if len(having) > 1:
            wrong.append(
                f"{name!r} is "
                + " and ".join(
                    f"{layout} in {processes.named(ps)}" for layout, ps in having.items()
                )
            )
    more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
    differ = "; ".join(wrong[:8]) or "the names come in another order in some processes"
    raise RuntimeError(
        f"{what}: {differ}{more}; every process must make the same module and the same call"
    )


def sync_module_states(
    module: nn.Module | Mapping[str, Array],
    process_group: Iterable[int] | None,
    broadcast_bucket_size: int,
    src: int,
    params_and_buffers_to_ignore: Container[str],
    broadcast_buffers: bool = True,
    *,
    timeout: float = processes.TIMEOUT,
) -> dict[str, Array]:
    """Give the parameters and buffers of a module the values that they have in one process, bit by
    bit.

    Args:
        module: an nn.Module, whose tensors are written in place; or a dict of tensors and arrays by
            name, for example ``bridge.params(module)``.
        process_group: the indices of the processes that call this, ``jax.process_index()`` of each;
            None: all of them.
        broadcast_bucket_size: bytes to send at once; a larger tensor is sent alone.
        src: which process of the group has the values, by its place in the group.
        params_and_buffers_to_ignore: names that are left as they are.
        broadcast_buffers: whether a module's buffers are sent too.
        timeout: seconds to wait for the other processes at the start.

    Returns:
        dict: name -> parameter or buffer, as ``sync_params_and_buffers`` returns it, the ignored
            ones included; a jax.Array is a new one.

    Raises:
        RuntimeError, ValueError, TypeError: as ``sync_params_and_buffers``, with the names.

    Source: ``torch.distributed.utils._sync_module_states``, which returns nothing

    Example:
        >>> import bridge, torch
        >>> from torchfunc_jax.distributed.utils import sync_module_states
        >>> model = torch.nn.BatchNorm1d(2)
        >>> synced = sync_module_states(model, None, 250 * 2**20, 0, {"num_batches_tracked"})
        >>> synced["weight"] is model.weight
        True
        >>> sorted(sync_module_states(bridge.params(model), None, 250 * 2**20, 0, ()))
        ['bias', 'weight']
    """
    if isinstance(module, nn.Module):
        states: dict[str, Array] = {
            **dict(module.named_parameters()),
            **(dict(module.named_buffers()) if broadcast_buffers else {}),
        }
    else:
        states = dict(module)
    sent = {name: x for name, x in states.items() if name not in params_and_buffers_to_ignore}
    return {
        **states,
        **_sync(process_group, sent, broadcast_bucket_size, src, timeout, "sync_module_states"),
    }


def sync_params_and_buffers(
    process_group: Iterable[int] | None,
    module_states: Sequence[Array],
    broadcast_bucket_size: int,
    src: int,
    *,
    timeout: float = processes.TIMEOUT,
) -> list[Array]:
    """Give tensors and arrays the values that they have in one process, bit by bit.

    Args:
        process_group: the indices of the processes that call this, ``jax.process_index()`` of each;
            None: all of them.
        module_states: tensors, which are written in place, and arrays of this process's devices;
            shapes and dtypes are the same in every process.
        broadcast_bucket_size: bytes to send at once; a larger tensor is sent alone.
        src: which process of the group has the values, by its place in the group.
        timeout: seconds to wait for the other processes at the start; a process that ends later is
            noticed by ``jax.distributed``.

    Returns:
        list: the same tensors, and in the place of the arrays new ones with the values and the old
            shardings.

    Raises:
        RuntimeError: shapes, dtypes or the number of states differ, and the message says which in
            which processes; or a process did not come in time, and it says which.
        ValueError: src is no place in the group; the group is none with this process in it.
        TypeError: a state has no values in this process (device "meta", an array on other
            processes' devices, a value in a transform).

    Source: ``torch.distributed.utils._sync_params_and_buffers``, which returns nothing

    Example:
        >>> import jax.numpy as jnp, torch
        >>> from torchfunc_jax.distributed.utils import sync_params_and_buffers
        >>> sync_params_and_buffers(None, [torch.ones(2), jnp.zeros(3)], 250 * 2**20, 0)
        [tensor([1., 1.]), Array([0., 0., 0.], dtype=float32)]
    """
    named = {f"module_states[{i}]": x for i, x in enumerate(module_states)}
    return list(
        _sync(
            process_group, named, broadcast_bucket_size, src, timeout, "sync_params_and_buffers"
        ).values()
    )


@opaque
def _sync(
    process_group: Iterable[int] | None,
    states: dict[str, Array],
    bucket_size: int,
    src: int,
    timeout: float,
    what: str,
) -> dict[str, Array]:
    group = processes.members(process_group)
    if not 0 <= src < len(group):
        raise ValueError(f"src: expected a place in a group of {len(group)}, got {src}")
    for name, x in states.items():  # here, where no process waits for a broadcast yet
        if reason := _unsendable(x):
            raise TypeError(f"{what}: {name!r}: {reason}")
    if not states:
        return states
    _verify(group, states, timeout, what, src=src, broadcast_bucket_size=bucket_size)
    if len(group) == 1:
        return states
    synced = dict(states)
    for bucket in _buckets(states, bucket_size):
        data = [_bytes(x) for x in bucket.values()]
        received = processes.broadcast(np.concatenate(data), group, group[src])
        if group[src] == jax.process_index():
            continue
        pieces = np.split(received, np.cumsum([piece.size for piece in data])[:-1])
        for (name, x), piece in zip(bucket.items(), pieces, strict=True):
            synced[name] = _with_bytes(x, piece)
    return synced


def _unsendable(x: Any) -> str:
    """Why the bytes of a state cannot be sent; "" if they can."""
    if isinstance(x, torch.Tensor):
        try:
            tensors.plain(x)
        except TypeError as error:
            return str(error)
    elif not isinstance(x, jax.Array):
        return f"expected a torch.Tensor or a jax.Array, got {type(x)}; pass the leaves of a tree"
    elif (
        isinstance(x, jax.core.Tracer)
        or not x.is_fully_addressable
        or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    ):
        return f"expected an array with all its values on this process's devices, got {x.aval}"
    return ""


def _buckets(states: dict[str, Array], size: int) -> Iterator[dict[str, Array]]:
    """The states in their order, in groups of at least so many bytes."""
    bucket, filled = {}, 0
    for name, x in states.items():
        bucket[name] = x
        filled += x.nbytes
        if filled >= size:
            yield bucket
            bucket, filled = {}, 0
    if bucket:
        yield bucket


def _bytes(x: Array) -> np.ndarray:
    """The bytes of a state; they are the memory itself of a contiguous tensor on the CPU."""
    if isinstance(x, torch.Tensor):
        return tensors.plain(x).cpu().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _with_bytes(x: Array, data: np.ndarray) -> Array:
    """The tensor, with these bytes written into it; or an array like x with these bytes."""
    if isinstance(x, torch.Tensor):
        value = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        _bytes(value)[:] = data
        with torch.no_grad():
            return x.copy_(value)
    with jax.enable_x64(True):
        return jax.device_put(
            data.copy().view(x.dtype).reshape(x.shape), x.sharding if x.committed else None
        )


# -- names -----------------------------------------------------------------------------------------
def replace_by_prefix(state_dict: dict[str, Any], old_prefix: str, new_prefix: str) -> None:
    """Replace a prefix of the keys of a dict by another one, in place.

    Args:
        state_dict: name -> anything.
        old_prefix: keys that do not begin with it stay as they are.
        new_prefix: what they begin with afterwards.

    Raises:
        ValueError: the prefixes are equal.

    Source: ``torch.distributed.utils._replace_by_prefix``

    Example:
        >>> from torchfunc_jax.distributed.utils import replace_by_prefix
        >>> state = {"layer.weight": 1, "head.weight": 2}
        >>> replace_by_prefix(state, "layer.", "module.layer.")
        >>> state
        {'head.weight': 2, 'module.layer.weight': 1}
    """
    if old_prefix == new_prefix:
        raise ValueError("old_prefix and new_prefix must be distinct")
    for key in [key for key in state_dict if key.startswith(old_prefix)]:
        value = state_dict.pop(key)
        state_dict[new_prefix + key.removeprefix(old_prefix)] = value
