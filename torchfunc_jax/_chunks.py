"""Chunks of a vmap: how many lanes fit into the memory (``chunk_size="auto"``), by what XLA says of
programs; and chunks as a loop.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from bridge import devices, private
from bridge.boundary import autograd
from bridge.boundary.results import is_array, put_together, replaced, split_arrays, take_apart
from bridge.convert import tensors, trees
from bridge.errors import NotInLoopError
from bridge.jit.compiled import memory_of
from bridge.jit.program import aval
from bridge.trace.levels import Unrecordable, push, state
from bridge.trace.tracing import value_of, wrap
from bridge.transform_kinds import LOOP, PLAIN

_TRIALS = 6  # how many programs are compiled at most


def fitting(
    size: int,
    run: Callable[[list[Any], int], Any],
    leaves: list[Any],
    dims: list[int | None],
    limit: int | None,
    chosen: dict[Any, int],
) -> int:
    """The size of equal chunks, as large as fits into the memory.

    Args:
        size: the number of lanes.
        run: maps leaves of that many lanes.
        leaves, dims: the arguments and the mapped dimension of each.
        limit: in bytes; None: half of what is free.
        chosen: the sizes that were found earlier, by shapes.

    Raises:
        RuntimeError: one lane does not fit.
    """
    if state.recorder is not None:
        state.recorder.go_on(Unrecordable("chunk_size='auto', which needs programs of its own"))
    if size < 2 or private.transformed_by_torch():
        return size
    key = tuple([(tuple(x.shape), x.dtype) if is_array(x) else None for x in leaves])
    if key in chosen:
        return chosen[key]
    device = tensors.common_device(leaves)
    where = (
        jax.devices()[0]
        if device is None
        else devices.jax_device(device) or devices.find(str(device))
    )
    most = devices.free_memory(where) // 2 if limit is None else limit
    needed = functools.partial(_needed, run, leaves, dims)
    too_many, whole = size, needed(size)
    if whole <= most:
        chosen[key] = size
        return size
    fits, least = 1, needed(1)
    if least > most:
        raise RuntimeError(
            f'vmap: chunk_size="auto": expected a chunk to take at most {most:,} bytes '
            "(memory_limit, or half of the free memory), but one "
            f"lane alone takes {least:,}; raise memory_limit, or give the function smaller "
            "arguments or fewer outputs"
        )
    for _ in range(_TRIALS):  # the bytes grow with the lanes, nearly in a straight line
        if too_many - fits <= max(1, fits // 8):
            break
        guess = fits + int((most - least) / (whole - least) * (too_many - fits))
        guess = min(max(guess, fits + 1), too_many - 1)
        taken = needed(guess)
        if taken <= most:
            fits, least = guess, taken
        else:
            too_many, whole = guess, taken
    chosen[key] = -(-size // -(-size // fits))  # equal chunks need one program
    return chosen[key]


def _needed(
    run: Callable[[list[Any], int], Any], leaves: list[Any], dims: list[int | None], lanes: int
) -> int:
    """The bytes that a program of that many lanes takes; nothing is computed, and torch's generator
    stays as it is.
    """
    places = split_arrays(leaves)
    avals = []
    for i in places:
        a, d = aval(leaves[i]), dims[i]
        avals.append(
            a
            if d is None
            else jax.ShapeDtypeStruct((*a.shape[:d], lanes, *a.shape[d + 1 :]), a.dtype)
        )

    def values(*arrays: Any) -> list[Any]:
        given = replaced(leaves, places, arrays)
        # a level of its own takes back writes to tensors of outer levels, and has a key of its own
        inside = (
            contextlib.nullcontext()
            if state.level is None
            else push(PLAIN, key=lambda: jax.random.key(0))
        )
        with inside:
            outs = [x for x in trees.flatten(run(given, lanes))[0] if is_array(x)]
            return [value_of(x) if isinstance(x, torch.Tensor) else x for x in outs]

    generator = torch.get_rng_state() if state.level is None else None
    try:
        return memory_of(values, avals)
    finally:
        if generator is not None:
            torch.set_rng_state(generator)


def looped(
    run: Callable[[list[Any], int], Any],
    leaves: list[Any],
    dims: list[int | None],
    out_dims: Any,
    lanes: int,
    count: int,
) -> Any:
    """The first ``count`` chunks of that many lanes as one loop of a program that is being traced;
    their results together.

    Raises:
        NotInLoopError: the function writes, draws random numbers, or checks values.
    """
    places = [i for i, d in enumerate(dims) if d is not None]
    found: list[Any] = []

    def rows(i: int) -> jax.Array:
        value = value_of(leaves[i]) if isinstance(leaves[i], torch.Tensor) else leaves[i]
        value = jnp.moveaxis(value, dims[i], 0)[: count * lanes]
        return value.reshape(count, lanes, *value.shape[1:])

    def step(_: None, chunk: list[jax.Array]) -> tuple[None, list[jax.Array]]:
        with push(LOOP) as level:
            part = list(leaves)
            for i, value in zip(places, chunk, strict=True):
                value = jnp.moveaxis(value, 0, dims[i])
                if isinstance(leaves[i], torch.Tensor):
                    part[i] = wrap(value, leaves[i].device, level).requires_grad_(
                        leaves[i].requires_grad
                    )
                else:
                    part[i] = value
            outs, meta = take_apart(run(part, lanes))
            if level.writes:
                raise NotInLoopError("a write, in a loop")
            axes = [
                d
                for d, x in zip(
                    trees.broadcast(out_dims, meta[0]) or [out_dims], meta[2], strict=True
                )
                if x
            ]
            found[:] = [meta, axes, [(x.device, x.requires_grad) for x in outs]]
            return None, [
                value_of(x) if d is None else jnp.moveaxis(value_of(x), d, 0)
                for x, d in zip(outs, axes, strict=True)
            ]

    _, stacked = lax.scan(step, None, [rows(i) for i in places])
    meta, axes, kinds = found
    results = []
    for value, d, (device, grad) in zip(stacked, axes, kinds, strict=True):
        whole = (
            value[0]
            if d is None
            else jnp.moveaxis(value.reshape(count * lanes, *value.shape[2:]), 0, d)
        )
        out = wrap(whole, device)
        if grad:
            out.requires_grad_()
        results.append(autograd.computed(out) if grad else out)
    return put_together(results, meta)


__all__ = ["fitting", "looped"]
