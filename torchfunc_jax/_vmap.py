"""vmap and chunk_vmap: the checks are torch.func's, and jax.vmap maps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from bridge import private
from bridge.boundary import handing_over
from bridge.boundary.calls import Call, apply
from bridge.boundary.results import (
    ARRAYS,
    Output,
    Result,
    of_leaves,
    put_together,
    split_arrays,
    without_twins,
)
from bridge.convert import trees
from bridge.errors import NotInLoopError
from bridge.private_jax import mapping, same_trace, trace_of
from bridge.record import transforms
from bridge.record.in_torch import Level
from bridge.record.recorder import Recorder
from bridge.record.tensor import avals_of
from bridge.trace.aliasing import Inner, View, expanded
from bridge.trace.levels import push, state
from bridge.trace.random_keys import key_of_lane, source
from bridge.trace.torch_random import UNMAPPED_RANDOMNESS
from bridge.transform_kinds import VMAP
from torchfunc_jax._chunks import fitting, looped

in_dims_t = int | tuple[Any, ...]
out_dims_t = int | tuple[Any, ...] | None


def name_of(func: Callable[..., Any]) -> str:
    """The function's name as torch.func shows it in messages."""
    if hasattr(func, "__name__"):
        return func.__name__
    if isinstance(func, functools.partial):
        return f"functools.partial({name_of(func.func)}, ...)"
    return repr(func)


_torch_vmap = torch.func.vmap  # torch's own, even after ``patch()`` has replaced it


def _in_torch(
    func: Callable[..., Any],
    *args: Any,
    chunk_size: Any = None,
    memory_limit: int | None = None,
    **kwargs: Any,
) -> Any:
    return _torch_vmap(
        func, *args, chunk_size=None if chunk_size == "auto" else chunk_size, **kwargs
    )


@handing_over.transform(_in_torch)
def vmap(
    func: Callable[..., Any],
    in_dims: in_dims_t = 0,
    out_dims: out_dims_t = 0,
    randomness: str = "error",
    *,
    chunk_size: int | str | None = None,
    memory_limit: int | None = None,
) -> Callable[..., Any]:
    """Map ``func`` over a dimension of its inputs, all lanes at once; without ``jit``, its Python
    runs at each call.

    Args:
        func: takes one or more tensors, in any pytree, without the mapped dimension; returns
            tensors in any pytree.
        in_dims: which dimension to map over, for each input: an int, None (not mapped), or a tree
            of them that is a prefix of the inputs.
        out_dims: where the mapped dimension appears in the outputs.
        randomness: "error", "same" (all lanes draw the same numbers) or "different".
        chunk_size: map so many lanes at a time, one call of ``func`` for each chunk; None: all of
            them; "auto": as many as the memory allows. torch.func does not have "auto".
        memory_limit: with chunk_size="auto", how many bytes the program of one chunk may take: its
            arguments, its results and what it computes in between, as XLA reports them. None: half
            of the memory that is free on the device, or on the machine for CPUs.

    Returns:
        Callable: takes func's arguments, each mapped one with its extra dimension, and returns
            func's outputs, each with the mapped
        dimension at its out_dim; dtypes are those of func's outputs.

    Raises:
        ValueError: in_dims or out_dims do not fit; there is nothing to map over; mapped sizes
            differ; an output is not a tensor; chunk_size < 1 or another word than "auto";
            memory_limit without "auto", or < 1.
        IndexError: an out_dim is out of range.
        RuntimeError: with chunk_size="auto", not even one lane fits into the memory; an unknown
            randomness; a random operator while randomness is "error".
        DataDependentError: (a RuntimeError) func asks for the value of a mapped tensor, or for a
            shape that depends on it.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.vmap.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import vmap
        >>> batched_dot = vmap(torch.dot)
        >>> batched_dot(torch.ones(2, 5), torch.ones(2, 5))
        tensor([5., 5.])
    """
    _check_randomness(randomness)
    if isinstance(chunk_size, str) and chunk_size != "auto":
        raise ValueError(
            f'vmap: chunk_size should be None, greater than 0, or "auto". (got {chunk_size})'
        )
    if not isinstance(chunk_size, int | str | None):
        raise TypeError(
            f'vmap: chunk_size should be None, an integer, or "auto". (got {chunk_size!r})'
        )
    if not (chunk_size is None or isinstance(chunk_size, str) or chunk_size > 0):
        raise ValueError(f"vmap: chunk_size should be None or greater than 0. (got {chunk_size})")
    if memory_limit is not None and (chunk_size != "auto" or memory_limit < 1):
        raise ValueError(
            'vmap: memory_limit should be greater than 0, and needs chunk_size="auto". (got '
            f"{memory_limit}, {chunk_size})"
        )
    chosen: dict[Any, int] = {}  # the chunk sizes that were found for "auto"

    def cut(
        size: int, run: Callable[[list[Any], int], Any], leaves: list[Any], dims: list[int | None]
    ) -> list[int]:
        chunk = (
            fitting(size, run, leaves, dims, memory_limit, chosen)
            if isinstance(chunk_size, str)
            else chunk_size
        )
        return [size] if chunk is None else _in_parts(size, chunk)

    return _mapped(func, in_dims, out_dims, randomness, cut)


@handing_over.transform(private.torch_chunk_vmap)
def chunk_vmap(
    func: Callable[..., Any],
    in_dims: in_dims_t = 0,
    out_dims: out_dims_t = 0,
    randomness: str = "error",
    chunks: int = 2,
) -> Callable[..., Any]:
    """``vmap`` with the mapped dimension cut into a number of chunks, one after the other, to save
    memory.

    Args:
        func, in_dims, out_dims, randomness: as in ``vmap``.
        chunks: the largest number of chunks; as with ``torch.chunk``, all but the last have the
            same size, so there may be fewer.

    Returns:
        Callable: as in ``vmap``.

    Raises:
        RuntimeError: chunks < 1.
        ValueError, IndexError, RuntimeError, DataDependentError: as in ``vmap``.

    Source: ``torch._functorch.apis.chunk_vmap``.

    Example:
        >>> import torch
        >>> from torchfunc_jax import chunk_vmap
        >>> chunk_vmap(torch.sum, chunks=3)(torch.ones(5, 2))
        tensor([2., 2., 2., 2., 2.])
    """
    _check_randomness(randomness)
    if chunks < 1:
        raise RuntimeError(
            f"chunk_vmap: chunk expects `chunks` to be greater than 0, got: {chunks}"
        )

    return _mapped(
        func, in_dims, out_dims, randomness, lambda size, *_: _in_parts(size, -(-size // chunks))
    )


def _check_randomness(randomness: str) -> None:
    if randomness not in ("error", "different", "same"):
        raise RuntimeError(
            "Only allowed values for randomness are 'error', 'different', or "
            f"'same'. Got {randomness}"
        )


def _in_parts(size: int, chunk: int) -> list[int]:
    """The sizes of the chunks if each but the last has this size."""
    return (
        [len(range(k, min(k + chunk, size))) for k in range(0, size, chunk)]
        if chunk < size
        else [size]
    )


def _mapped(
    func: Callable[..., Any],
    in_dims: in_dims_t,
    out_dims: out_dims_t,
    randomness: str,
    cut: Callable[..., list[int]],
) -> Callable[..., Any]:
    """func as a function of mapped arguments; cut: takes the mapped size and the call as
    ``fitting`` does, returns the chunks' sizes.
    """

    def mapped(*args: Any, **kwargs: Any) -> Any:
        _check_out_dims(out_dims, func)
        leaves, dims, spec, size = _check_inputs(in_dims, args, kwargs, func)

        def run(part: list[Any], n: int) -> Any:
            return _map(func, part, dims, spec, out_dims, randomness, n)

        sizes = cut(size, run, leaves, dims)
        return (
            run(leaves, size)
            if len(sizes) == 1
            else _in_chunks(run, leaves, dims, out_dims, randomness, sizes)
        )

    return mapped


def _check_out_dims(out_dims: out_dims_t, func: Callable[..., Any]) -> None:
    if isinstance(out_dims, int):
        return
    for x in trees.flatten(out_dims)[0]:
        if x is not None and not isinstance(x, int):
            raise ValueError(
                f"vmap({name_of(func)}, ..., out_dims={out_dims}): `out_dims` must be an int, None "
                "or a python collection of ints representing where in the outputs the vmapped "
                "dimension should appear."
            )


def _check_inputs(
    in_dims: in_dims_t, args: tuple[Any, ...], kwargs: dict[str, Any], func: Callable[..., Any]
) -> tuple[list[Any], list[int | None], Any, int]:
    """(the flattened arguments, the mapped dimension of each, their spec, the mapped size); keyword
    arguments are never mapped.
    """

    def refused(reason: str) -> ValueError:
        return ValueError(f"vmap({name_of(func)}, in_dims={in_dims}, ...)(<inputs>): {reason}")

    if not isinstance(in_dims, int | tuple):
        raise refused(
            f"expected `in_dims` to be int or a (potentially nested) tuple matching the "
            f"structure of inputs, got: {type(in_dims)}. For example in_dims=(0, None): map over "
            "dimension 0 of the first input, and give all lanes the whole second one."
        )
    if not args:
        raise ValueError(
            f"vmap({name_of(func)})(<inputs>): got no inputs. Maybe you forgot to add inputs, or "
            "you are trying to vmap over a function with no inputs. The latter is unsupported."
        )
    leaves, spec = trees.flatten((args, kwargs))
    positional, named = spec.children
    dims = trees.broadcast(in_dims, positional)
    if dims is None:
        raise refused(
            f"in_dims is not compatible with the structure of `inputs`. in_dims has "
            f"structure {trees.flatten(in_dims)[1]} but inputs has structure {positional}. Give "
            f"one of int, None or a tree of them for each input.{_counts(in_dims, args)}"
        )
    leaves, dims, spec = _with_containers(leaves, [*dims, *[None] * named.count], spec)
    sizes: list[int] = []
    mapped: list[int] = []
    for i, (x, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            continue
        if not isinstance(dim, int):
            raise refused(
                f"Got in_dim={dim} for an input but in_dim must be either an integer dimension or "
                "None."
            )
        if not isinstance(x, ARRAYS):
            numbers = isinstance(x, np.ndarray | np.number | float | int)
            raise refused(
                f"Got in_dim={dim} for an input but the input is of type {type(x)}. We "
                "cannot vmap over non-Tensor arguments, please use None as the respective "
                f"in_dim{', or torch.as_tensor to make a tensor of it' if numbers else ''}"
            )
        if isinstance(dim, bool):
            raise TypeError(
                str(
                    refused(
                        f"Got in_dim={dim} for an input, but argument 'dim' must be int, not bool."
                    )
                )
            )
        if not -x.ndim <= dim < x.ndim:
            raise refused(
                (
                    f"Got in_dim={dim} for some input, but that input is a Tensor of "
                    f"dimensionality {x.ndim} so expected in_dim to satisfy -{x.ndim} <= in_dim < "
                    f"{x.ndim}. It is in {_argument(spec, i)}."
                )
                + ("" if x.ndim else " It has no dimension to map over: use None for it.")
            )
        dims[i] = dim % x.ndim
        sizes.append(x.shape[dim])
        mapped.append(i)
    if not sizes:
        raise ValueError(
            f"vmap: Expected at least one Tensor to vmap over, but in_dims={in_dims} has None for "
            "all of them; give the dimension to map"
        )
    if sizes.count(sizes[0]) != len(sizes):
        raise ValueError(
            "vmap: Expected all tensors to have the same size in the mapped dimension, got sizes "
            f"{sizes} for the mapped dimension; use None in in_dims for an input that is the same "
            f"for all lanes ({_by_argument(spec, mapped, sizes)})"
        )
    return leaves, dims, spec, sizes[0]


def _by_argument(spec: Any, mapped: list[int], sizes: list[int]) -> str:
    """``argument 0: 64, 3; argument 1: 16``: the sizes that each argument has."""
    found: dict[str, dict[int, None]] = {}
    for leaf, size in zip(mapped, sizes, strict=True):
        found.setdefault(_argument(spec, leaf), {})[size] = None
    return "; ".join(f"{name}: {', '.join(map(str, own))}" for name, own in found.items())


def _argument(spec: Any, leaf: int) -> str:
    """``argument 1``: the one that has this leaf of the tree of (args, kwargs)."""
    return f"argument {trees.paths(spec)[leaf][1]!r}"


def _counts(in_dims: Any, args: tuple[Any, ...]) -> str:
    """What is wrong, if in_dims has not one entry for each argument."""
    if not isinstance(in_dims, tuple) or len(in_dims) == len(args):
        return ""
    return f" The number of entries in in_dims is {len(in_dims)}, that of inputs {len(args)}."


def _with_containers(
    leaves: list[Any], dims: list[Any], spec: Any
) -> tuple[list[Any], list[Any], Any]:
    """Flattened arguments in which the containers that torch.func.vmap maps, although they are no
    nodes of trees, have become trees.
    """
    wanted = [
        type(dim) is int and not isinstance(x, ARRAYS) for x, dim in zip(leaves, dims, strict=True)
    ]
    if True not in wanted:
        return leaves, dims, spec
    parts: list[Any] = []
    found: list[tuple[Any, Any]] = []
    with transforms.unwatched():
        for x, dim, may_open in zip(leaves, dims, wanted, strict=True):
            opened = (
                private.mapped_container(x, dim, lambda tree: trees.flatten(tree)[0])
                if may_open
                else None
            )
            tree, inside = (x, [(x, dim)]) if opened is None else opened
            parts.append(tree)
            found += inside
    leaves, dims = map(list, zip(*found, strict=True))
    return leaves, dims, trees.flatten(trees.unflatten(spec, parts))[1]


def _check_outputs(
    out: Any, out_dims: out_dims_t, func: Callable[..., Any]
) -> tuple[list[Any], tuple[Any, list[int | None]]]:
    """The tensors of an output tree, and (what ``put_together`` needs to rebuild it, an out_dim for
    each tensor).
    """
    leaves, spec = trees.flatten(out)
    if isinstance(out, torch.Tensor):
        fits = (
            out_dims is None
            or isinstance(out_dims, int)
            or (isinstance(out_dims, tuple) and len(out_dims) == 1)
        )
        dims = ([out_dims[0]] if isinstance(out_dims, tuple) else [out_dims]) if fits else None
    else:
        dims = trees.broadcast(out_dims, spec)
    if dims is None:
        raise ValueError(
            f"vmap({name_of(func)}, ..., out_dims={out_dims})(<inputs>): out_dims is not "
            "compatible with the structure of `outputs`. out_dims has structure "
            f"{trees.flatten(out_dims)[1]} but outputs has structure {spec}."
        )
    for x, dim in zip(leaves, dims, strict=True):
        if dim is not None and not isinstance(x, torch.Tensor):
            raise ValueError(
                f"vmap({name_of(func)}, ...): `{name_of(func)}` must only return Tensors, got type "
                f"{type(x)}. Did you mean to set out_dims= to None for output?"
            )
        if dim is not None and not -x.dim() - 1 <= dim <= x.dim():
            raise IndexError(
                f"vmap({name_of(func)}, ..., out_dims={out_dims}): Dimension out of range "
                f"(expected to be in range of [{-x.dim() - 1}, {x.dim()}], but got {dim})"
            )
    tensors, meta = of_leaves(leaves, spec)
    return tensors, (
        meta,
        [
            None if d is None else int(d)
            for x, d in zip(leaves, dims, strict=True)
            if isinstance(x, torch.Tensor)
        ],
    )


def _map(
    func: Callable[..., Any],
    leaves: list[Any],
    dims: list[int | None],
    spec: Any,
    out_dims: out_dims_t,
    randomness: str,
    size: int,
) -> Any:
    finish = functools.partial(_check_outputs, out_dims=out_dims, func=func)
    leaves = without_twins(leaves, dims)
    where = split_arrays(leaves)
    arrays, in_axes = [leaves[i] for i in where], [dims[i] for i in where]

    def record(recorder: Recorder) -> Any:
        depth = recorder.mapped()
        avals = [
            a if d is None else a.lane(d, depth)
            for a, d in zip(avals_of(arrays), in_axes, strict=True)
        ]
        params = (tuple(in_axes), randomness)
        tensors, (meta, out_axes) = transforms.entered(
            recorder, func, VMAP, params, leaves, spec, avals, (), finish
        )
        avals, placed = [], []
        for t, a, d in zip(tensors, avals_of(tensors), out_axes, strict=True):
            if d is None and (a.outside(depth) is not a or private.is_mapped(t)):
                raise _mapped_output(name_of(func))
            d = d if d is None or d >= 0 else d + len(a.shape) + 1
            placed.append(d)
            avals.append(a.outside(depth) if d is None else a.whole(d, size, depth))
        return recorder.end(tuple(placed), tensors, avals), lambda outs: put_together(outs, meta)

    done = transforms.transform(func, leaves, record)
    if done is not transforms.NOT_RECORDED:
        return done
    traceable = Call(leaves, spec, where).traceable(func)
    traceable.as_given(arrays)
    traceable.geometries = [g.lane(d) for g, d in zip(traceable.geometries, in_axes, strict=True)]
    traceable.sources = [x if d is None else None for x, d in zip(arrays, in_axes, strict=True)]
    lane_axis = [0] if randomness == "different" else []
    name = name_of(func)

    def compute(values: list[Any]) -> Result:
        found: list[Result] = []
        probes: list[Any] = []
        out_axes: list[Any] = []
        parent = state.level

        def body(*lanes: Any) -> list[Any]:
            with push(VMAP, randomness) as level:
                level.size = size
                if randomness == "different":
                    lanes, lane = lanes[:-1], lanes[-1]
                    level.key, level.lane = key_of_lane(parent, lane), lane
                level.probe = next(
                    trace_of(v) for v, d in zip(lanes, in_axes, strict=True) if d is not None
                )
                result = traceable.run(level, lanes, finish)
            axes = result.meta[1]
            result.values[: len(axes)] = [
                jnp.asarray(v) if d is None else v
                for v, d in zip(result.values, axes, strict=False)
            ]
            # this is filled while tracing, and jax.vmap reads it afterwards
            out_axes.extend(
                d if d is None or d >= 0 else d + v.ndim + 1
                for v, d in zip(result.values, axes, strict=False)
            )
            out_axes.extend(
                in_axes[t] if isinstance(t, int) else None for t, _, _ in result.written
            )
            found.append(result)
            probes.append(level.probe)
            return result.values

        inputs = list(values) + ([lax.iota("int32", size)] if lane_axis else [])
        try:
            mapped = jax.vmap(body, in_axes=in_axes + lane_axis, out_axes=out_axes, axis_size=size)(
                *inputs
            )
        except ValueError as error:
            raise _unmapped(error, name, found, probes, randomness) from error
        result = found[0]
        return Result(mapped, result.meta, result.written, _shared(result, in_axes, mapped))

    outs, (meta, _) = apply(compute, arrays)
    return put_together(outs, meta)


def _shared(
    result: Result, in_axes: list[int | None], mapped: list[Any]
) -> dict[int, tuple[Any, tuple[View, ...]]]:
    """``Result.shared`` of the mapped results, from that of a lane's."""
    found = {}
    for i, (origin, views) in result.shared.items():
        in_dim, out_dim = in_axes[origin] if isinstance(origin, int) else None, result.meta[1][i]
        if isinstance(origin, Output) and (in_dim := result.meta[1][origin.index]) is not None:
            in_dim %= mapped[origin.index].ndim
        if out_dim is not None:
            out_dim %= mapped[i].ndim
            if in_dim is None:  # each lane has the same memory
                views = (*views, *expanded(out_dim, mapped[i].shape))
            elif views or in_dim != out_dim:
                views = (Inner(views, in_dim, out_dim),)
        found[i] = (origin, views)
    return found


def _again(
    body: Callable[..., Any],
    operands: list[Any],
    params: tuple[Any, str],
    placed: tuple[int | None, ...],
) -> Any:
    in_dims, randomness = params
    outs = vmap(body, in_dims, placed, randomness)(*operands)
    return outs, None


def _mapped_in_torch(
    operands: Sequence[torch.Tensor], params: tuple[tuple[int | None, ...], str]
) -> Level:
    in_dims, randomness = params
    size = next(t.shape[d] for t, d in zip(operands, in_dims, strict=False) if d is not None)
    with private.vmap_level(size, randomness) as level:
        outs, out_dims = yield [
            t if d is None else private.lane(t, d, level)
            for t, d in zip(operands, in_dims, strict=True)
        ]
        found = [
            t if d is None else private.all_lanes(t, level, size, d)
            for t, d in zip(outs, out_dims, strict=True)
        ]
    return found, None


VMAP.again, VMAP.in_torch = _again, _mapped_in_torch


#: Operators whose writes to an unmapped tensor torch.func's errors call "inplace arithmetic", and
#: those that they call by a bare name.
_ARITHMETIC, _BARE = (
    ("add_", "sub_", "mul_", "div_", "copy_"),
    ("fill_", "index_fill_", "index_put_"),
)


def _unmapped(
    error: ValueError, name: str, found: list[Result], probes: list[Any], randomness: str
) -> Exception:
    """torch.func's error for JAX's error about a mapped value in the place of an unmapped one."""
    if "out_axes" not in str(error) or not found:
        return error
    result = found[0]
    if any(d is None for d in result.meta[1]):
        return _mapped_output(name)
    values = result.values[len(result.meta[1]) :]
    mapped = [any(same_trace(probes[0], trace) for trace in mapping(v)) for v in values]
    writers = [
        writer
        for writer, is_mapped in zip(result.writers, mapped, strict=True)
        if writer is not None and is_mapped
    ]
    writer = writers[0]._schema.name.removeprefix("aten::") if writers else "add_"
    if "batch_norm" in writer:
        return RuntimeError(
            "Batch norm got a batched tensor as input while the running_mean or running_var, which "
            "will be updated in place, were not batched.\nIf you are using a module and do not "
            "need eval mode, please set `track_running_stats` to be False. If you are using a "
            "prebuilt module and do not need eval mode, use "
            "torchfunc_jax.replace_all_batch_norm_modules_(model); functional_call(..., "
            "return_buffers=True) returns the buffers instead of changing them."
        )
    if (
        writers
        and randomness == "different"
        and torch.Tag.nondeterministic_seeded in writers[0].tags
    ):
        return RuntimeError(UNMAPPED_RANDOMNESS)
    written = (
        "inplace arithmetic"
        if writer in _ARITHMETIC
        else writer
        if writer in _BARE
        else f"aten::{writer}"
    )
    return RuntimeError(
        f"vmap: {written}(self, *extra_args) is not possible because there exists a Tensor `other` "
        "in extra_args that has more elements than `self`. This happened due to `other` being "
        "vmapped over but `self` not being vmapped over in a vmap. Please try to use out-of-place "
        f"operators instead of {written}. If said operator is being called inside the PyTorch "
        "framework, please file a bug report instead."
    )


def _mapped_output(name: str) -> ValueError:
    return ValueError(
        f"vmap({name}, ...): `{name}` can not return a BatchedTensor when out_dim is None"
    )


def _in_chunks(
    run: Callable[[list[Any], int], Any],
    leaves: list[Any],
    dims: list[int | None],
    out_dims: out_dims_t,
    randomness: str,
    sizes: list[int],
) -> Any:
    pieces = []
    start = 0
    level = state.level
    alike = sizes.index(sizes[-1]) if sizes[-1] != sizes[0] else len(sizes)
    # one step instead of a program as long as all chunks together
    if level is not None and alike > 2:
        with contextlib.suppress(NotInLoopError):
            pieces.append(looped(run, leaves, dims, out_dims, sizes[0], alike))
            start, sizes = sizes[0] * alike, sizes[alike:]
    draws = source(level).draws if level is not None else 0
    drawn = level.root.drawn if level is not None and randomness == "same" else None
    seed = torch.get_rng_state() if randomness == "same" and level is None else None
    before = None if drawn is None else drawn.mark()
    for n in sizes:
        if randomness == "same" and level is not None:
            source(level).draws = draws
            if drawn is not None:
                drawn.rewind(before)
        elif seed is not None:
            torch.set_rng_state(seed)
        part = [
            x if d is None else _narrow(x, d, start, n) for x, d in zip(leaves, dims, strict=True)
        ]
        pieces.append(run(part, n))
        start += n
    flat = [trees.flatten(p) for p in pieces]
    out_spec = flat[0][1]
    axes = trees.broadcast(out_dims, out_spec) or [out_dims]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [c[0] if d is None else _cat(list(c), d) for c, d in zip(columns, axes, strict=True)]
    return trees.unflatten(out_spec, joined)


def _narrow(x: torch.Tensor | jax.Array, dim: int, start: int, n: int) -> torch.Tensor | jax.Array:
    return (
        lax.slice_in_dim(x, start, start + n, axis=dim)
        if isinstance(x, jax.Array)
        else x.narrow(dim, start, n)
    )


def _cat(pieces: list[Any], dim: int) -> Any:
    return (
        jnp.concatenate(pieces, dim) if isinstance(pieces[0], jax.Array) else torch.cat(pieces, dim)
    )
