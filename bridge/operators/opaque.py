"""Operators on objects that are not tensors: the profiler's marks and the collectives of a process
group.

A mark computes nothing, so PyTorch runs it itself. A collective in a group of one process leaves
its tensors as they are. In a larger group it is refused, because a traced tensor has no memory to
send.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
import torch.distributed

from bridge import private
from bridge.errors import at_line
from bridge.operators.dtype_refusals import Plan
from bridge.process import process

#: Collectives that overwrite each tensor of their first argument with the values of all processes.
_IN_PLACE = ("broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_")


def opaque_plan(func: torch._ops.OpOverload) -> Plan | None:
    """The plan of a profiler mark or a collective; None for any other operator."""
    if func.namespace == "profiler":
        return functools.partial(_mark, func)
    if func.namespace == "c10d" and func._schema.name.removeprefix("c10d::") in _IN_PLACE:
        return functools.partial(_collective, func)
    return None


def _mark(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module = private.marked_distributed()
    if module is not None:
        _local_forward(module, entered=type(args[0]) is str)
    return func(*args, **kwargs)


_lock = threading.Lock()


def _local_forward(module: torch.nn.parallel.DistributedDataParallel, entered: bool) -> None:
    """Make DistributedDataParallel call only the module that it wraps, from the mark that opens its
    forward to the mark that closes it.

    Its buckets and hooks belong to torch's own backward.
    """
    if entered and module.process_group.size() > 1:
        raise _several("DistributedDataParallel")
    with _lock:
        count = process.distributed.get(id(module), 0) + (1 if entered else -1)
        if count < 0 or (count == 1 and entered and private.is_local(module)):
            return  # it was local already
        private.make_local(module, count > 0)
        process.distributed[id(module)] = count
        if not count:
            del process.distributed[id(module)]


def _collective(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, group = args[:2]
    if private.processes(group) > 1:
        raise _several(str(func))
    # PyTorch makes the object that a caller waits for, from tensors without elements
    out = func([torch.empty(0, dtype=t.dtype) for t in tensors], group, *args[2:], **kwargs)
    return (tensors, out[1]) if isinstance(out, tuple) else out


def _several(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what}: expected a process group of one process inside a transform, got several; a "
        "traced tensor cannot be sent to another process. Call the module that is wrapped "
        f"(.module), and average the gradients after the transform{at_line()}"
    )
