"""Groups of the processes of one JAX job: they tell each other a text within a time limit, and one
of them sends bytes to the others.

Texts go through the key-value store of ``jax.distributed``, whose barriers have a time limit; bytes
through a collective of XLA's.
"""

from __future__ import annotations

import functools
import hashlib
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed import TCPStore

from bridge import private_jax
from bridge.process import process

#: Seconds that processes wait for each other; as long as ``jax.distributed.initialize`` does.
TIMEOUT = 300.0


def members(process_group: Iterable[int] | None) -> tuple[int, ...]:
    """The indices of the processes of a group, of which this process must be one; None stands for
    all processes.
    """
    if process_group is None:
        return tuple(range(jax.process_count()))
    if isinstance(process_group, torch.distributed.ProcessGroup):
        raise TypeError(
            "process_group: expected indices of JAX's processes, or None for all of them, got a "
            "ProcessGroup of torch's; if the ranks are JAX's too, pass "
            "torch.distributed.get_process_group_ranks(group)"
        )
    group = tuple(process_group)
    if (
        jax.process_index() not in group
        or len(set(group)) < len(group)
        or not set(group) <= set(range(jax.process_count()))
    ):
        raise ValueError(
            f"process_group: expected different indices below {jax.process_count()}, the number of "
            f"processes, with that of this process, {jax.process_index()}; got {group}; a process "
            "that is not in the group leaves the call out"
        )
    return group


def named(indices: Iterable[int]) -> str:
    """``process 1``, ``processes 1, 2``."""
    found = sorted(indices)
    return f"process{'es' * (len(found) != 1)} {', '.join(map(str, found))}"


def exchange(text: str, group: tuple[int, ...], timeout: float, what: str) -> dict[int, str]:
    """What each process of a group passes as its text, by the process's index; each of them must
    make the same calls in the same order.

    The text may be long: equal ones are stored and sent once. The group is what ``members``
    returns; what: the name of the function, which begins the message of an error. RuntimeError: a
    process did not come within ``timeout`` seconds, and the message says which (this ends the
    group: a process that comes too late finds that the others have gone); or
    ``jax.distributed.initialize`` was not called.
    """
    if len(group) == 1:
        return {group[0]: text}
    client = private_jax.coordinator()
    if client is None:
        raise RuntimeError(
            f"{what}: it needs jax.distributed.initialize, by which {named(group)} find each "
            "other; call it first"
        )
    count = process.meetings[group] = process.meetings.get(group, 0) + 1
    place = f"torchfunc_jax/{'-'.join(map(str, group))}"
    here = f"{place}/{count}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    client.key_value_set(f"{here}/texts/{digest}", text, allow_overwrite=True)
    client.key_value_set(f"{here}/digests/{jax.process_index()}", digest)
    try:
        client.wait_at_barrier(here, max(1, round(timeout * 1000)), list(group))
    except jax.errors.JaxRuntimeError as error:
        missing = set(group) - set(_digests(client, here))
        if not missing:
            raise RuntimeError(
                f"{what}: the other processes waited {timeout:g} seconds for this one and gave up"
            ) from error
        raise RuntimeError(
            f"{what}: {named(missing)} did not come within {timeout:g} seconds; look whether it "
            "runs and makes the same calls, or pass a longer timeout"
        ) from error
    digests = _digests(client, here)
    if group[0] == jax.process_index():  # everyone has read the texts of the meeting before
        client.key_value_delete(f"{place}/{count - 1}")
    texts = {
        d: text if d == digest else client.key_value_try_get(f"{here}/texts/{d}")
        for d in set(digests.values())
    }
    return {p: texts[digests[p]] for p in group}


def _digests(client: Any, here: str) -> dict[int, str]:
    return {
        int(key.rpartition("/")[2]): value
        for key, value in client.key_value_dir_get(f"{here}/digests")
    }


def broadcast(data: np.ndarray, group: tuple[int, ...], source: int) -> np.ndarray:
    """The bytes (uint8, of one dimension and the same length in each process) of the process whose
    index is source, in each of a group.
    """
    if len(group) == 1:
        return data
    words = np.zeros(-(-data.size // 4), np.uint32)
    if jax.process_index() == source:
        words.view(np.uint8)[: data.size] = data
    first = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh(np.array([first[p] for p in group]), ("processes",))
    here = jax.device_put(words[None], first[jax.process_index()])
    split = NamedSharding(mesh, PartitionSpec("processes"))
    rows = jax.make_array_from_single_device_arrays((len(group), words.size), split, [here])
    return np.asarray(_sum(rows, mesh).addressable_data(0)).view(np.uint8)[: data.size]


@functools.partial(jax.jit, static_argnums=1)
def _sum(rows: jax.Array, mesh: Mesh) -> jax.Array:
    """All rows but the source's are zero, and unsigned integers stay as they are when zeros are
    added, whatever they stand for.
    """
    return jax.lax.with_sharding_constraint(
        jnp.sum(rows, 0, dtype=rows.dtype), NamedSharding(mesh, PartitionSpec())
    )


def initialize(
    coordinator_address: str,
    num_processes: int,
    process_id: int,
    timeout: float = TIMEOUT,
    **options: Any,
) -> None:
    """``jax.distributed.initialize``, but a process that does not come is named, and the others get
    an error; JAX ends them at once.

    Args:
        coordinator_address: "host:port" of process 0, whose port is free.
        num_processes: how many there are.
        process_id: the index of this one.
        timeout: seconds to wait for the others.
        options: further arguments of ``jax.distributed.initialize``.

    Raises:
        RuntimeError: a process did not come in time, and the message says which.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html

    Example:
        >>> from torchfunc_jax.distributed import initialize
        >>> initialize("127.0.0.1:1234", 2, 0)  # doctest: +SKIP
    """
    if absent := _absent(
        coordinator_address, num_processes, process_id, time.monotonic() + timeout
    ):
        raise RuntimeError(
            f"initialize: {named(absent)} of {num_processes} did not come to {coordinator_address} "
            f"within {timeout:g} seconds; look whether it runs with this address, or pass a longer "
            "timeout"
        )
    jax.distributed.initialize(coordinator_address, num_processes, process_id, **options)


def _absent(address: str, count: int, me: int, until: float) -> list[int]:
    """The processes that have not come by that time; they meet at the coordinator's port, before
    the coordinator is there.
    """
    host, _, port = address.rpartition(":")
    while me != 0:
        left = until - time.monotonic()
        try:
            socket.create_connection((host, int(port)), max(left, 0.001)).close()
            break
        except OSError:
            if left <= 0:
                return [0]
            time.sleep(0.1)
    # a late process must still reach the store, so that it hears who else is there
    store = TCPStore(
        host, int(port), is_master=me == 0, timeout=timedelta(seconds=5), wait_for_workers=False
    )
    store.set(str(me), "")
    absent = _awaited(store, range(count), "{}", until)
    store.set(f"{me} knows", "")
    if me == 0:  # whose store ends with this function
        _awaited(store, set(range(count)) - set(absent), "{} knows", time.monotonic() + 5)
    return absent


def _awaited(store: TCPStore, indices: Iterable[int], key: str, until: float) -> list[int]:
    """The processes whose key is not in the store at that time; an empty list as soon as all keys
    are there.
    """
    keys = {p: key.format(p) for p in indices}
    while not store.check(list(keys.values())):
        if time.monotonic() > until:
            return [p for p in keys if not store.check([keys[p]])]
        time.sleep(0.05)
    return []
