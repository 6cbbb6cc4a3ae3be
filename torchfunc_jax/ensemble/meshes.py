"""Where members and batches lie: on one device, or on a mesh with an axis "member" and an axis
"data", on this process and on others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from bridge import devices
from bridge.convert import tensors
from bridge.modules import as_tensor

MEMBER, DATA = "member", "data"
Rows = dict[str, jax.Array]
F = TypeVar("F", bound=Callable[..., Any])
_NO_MESH = Mesh(np.empty((), object), ())


def on_single_devices(f: F) -> F:
    """``f``, which computes on one device or another, whatever mesh the user has set around the
    call.
    """

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        with jax.set_mesh(_NO_MESH):
            return f(*args)

    return cast("F", run)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of an ensemble.

    Attributes:
        mesh: with an axis "member", maybe one "data"; None: everything is on one device.
    """

    mesh: Mesh | AbstractMesh | None

    def __post_init__(self) -> None:
        if self.mesh is not None and (
            MEMBER not in self.mesh.axis_names or set(self.mesh.axis_names) - {MEMBER, DATA}
        ):
            raise ValueError(
                'mesh: expected the axes "member" and "data", or "member" alone, got '
                f'{self.mesh.axis_names}; make it with jax.make_mesh((m, d), ("member", "data"))'
            )

    def size(self, axis: str) -> int:
        """How many devices lie along an axis; 1 without it."""
        return 1 if self.mesh is None else self.mesh.shape.get(axis, 1)

    @functools.cached_property
    def device(self) -> jax.Device:
        """The device of everything, without a mesh."""
        return devices.default() or jax.local_devices()[0]

    def spec(self, *axes: str | None) -> PartitionSpec:
        """A PartitionSpec with "member", and with "data" if several devices lie along it."""
        return PartitionSpec(
            *[axis if axis == MEMBER or self.size(DATA) > 1 else None for axis in axes]
        )

    def sharding(self, *axes: str | None) -> Sharding:
        """How an array lies whose first dimensions are spread over these axes."""
        return (
            SingleDeviceSharding(self.device)
            if self.mesh is None
            else NamedSharding(self.mesh, self.spec(*axes))
        )

    @functools.cached_property
    def batch_part(self) -> tuple[int, int]:
        """(index, count): in how many parts the processes share the rows of a batch, and which one
        the devices of this process keep.
        """
        rows: dict[int, set[int]] = {}
        device: Any
        if self.mesh is not None and jax.process_count() > 1:
            found = self.sharding(DATA).devices_indices_map((self.size(DATA),))
            for device, (index,) in found.items():
                rows.setdefault(device.process_index, set()).add(index.start or 0)
        parts = sorted({tuple(sorted(own)) for own in rows.values()}) or [()]
        if sum(map(len, parts)) > self.size(DATA):
            raise ValueError(
                "mesh: the processes have overlapping parts of a batch; give each of them the "
                'same number of neighbours along the axis "data"'
            )
        return parts.index(tuple(sorted(rows.get(jax.process_index(), ())))), len(parts)

    def check(self, n: int) -> None:
        """Refuse a number of members that the axis "member" does not divide."""
        if n < 1 or n % self.size(MEMBER):
            raise ValueError(
                f"n: expected a positive multiple of the {self.size(MEMBER)} devices along the "
                f'mesh\'s axis "member", got {n} members; '
                "take another number, or a mesh of another shape"
            )

    def over(
        self, f: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool
    ) -> Callable[..., Any]:
        """``f`` of local shards as a function of whole arrays: by shard_map; without a mesh it is
        ``f`` itself.
        """
        if self.mesh is None:
            return f
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )

    @on_single_devices
    def stacked(self, n: int, member: Callable[[int], dict[str, Any]]) -> Rows:
        """Arrays [n, ...] of the members' arrays; a process asks for those that it keeps, one by
        one, and puts each on its devices.
        """
        lanes: dict[tuple[int, int], list[jax.Device]] = {}
        for device, (rows,) in self.sharding(MEMBER).addressable_devices_indices_map((n,)).items():
            lanes.setdefault(rows.indices(n)[:2], []).append(device)
        parts: dict[str, list[jax.Array]] = {}
        for (start, stop), where in lanes.items():
            held: list[Rows] = []
            for i in range(start, stop):
                row = member(i)
                held = held or [
                    {
                        name: jnp.zeros((stop - start, *x.shape), x.dtype, device=d)
                        for name, x in row.items()
                    }
                    for d in where
                ]
                held = [_write(all_, row, i - start) for all_ in held]
            # the rows may be memory of modules that their owner changes
            for one in jax.block_until_ready(held):
                for name, x in one.items():
                    parts.setdefault(name, []).append(x)
        return {
            name: jax.make_array_from_single_device_arrays(
                (n, *some[0].shape[1:]), self.sharding(MEMBER), some
            )
            for name, some in parts.items()
        }

    @on_single_devices
    def from_rows(self, rows: torch.Tensor) -> jax.Array:
        """A tensor [n, ...] that is on this host, or in a file, over the axis "member"; each
        device's rows are read by themselves.
        """

        def part(index: tuple[slice, ...]) -> np.ndarray:
            return _canonical(
                tensors.as_numpy(rows[index[0] if index else slice(None)].clone()), "rows"
            )

        return jax.make_array_from_callback(tuple(rows.shape), self.sharding(MEMBER), part)

    @on_single_devices
    def replaced(self, state: Rows, rows: Mapping[int, dict[str, Any]]) -> Rows:
        """Copies of arrays [n, ...] with other values in some rows; each process gives the rows
        that it keeps, and may give others.
        """
        parts: dict[jax.Device, dict[str, jax.Array]] = {}
        for name, x in state.items():
            for shard in x.addressable_shards:
                parts.setdefault(shard.device, {})[name] = shard.data.copy()
        n = next(iter(state.values())).shape[0] if state else 0
        for device, (lanes,) in self.sharding(MEMBER).addressable_devices_indices_map((n,)).items():
            start, stop, _ = lanes.indices(n)
            for i, new in rows.items():
                if start <= i < stop:
                    parts[device] = jax.block_until_ready(_write(parts[device], new, i - start))
        return {
            name: jax.make_array_from_single_device_arrays(
                x.shape, x.sharding, [parts[s.device][name] for s in x.addressable_shards]
            )
            for name, x in state.items()
        }

    def taken(self, state: Any, indices: np.ndarray) -> Any:
        """Arrays [n, ...] of any tree with these rows of each, [len(indices), ...], as copies, by
        one program.
        """
        rows = self.put_rows(indices.astype(np.int32), MEMBER)
        return _taken(self, state, rows)

    def put_rows(
        self, value: torch.Tensor | jax.Array | np.ndarray, *axes: str | None
    ) -> jax.Array:
        """A whole array that this process has, and all others too, spread over these axes; 64-bit
        types become 32-bit as JAX says.

        Raises:
            ValueError: an integer does not fit.
        """
        whole, where = crossing(value), self.sharding(*axes)
        if isinstance(whole, jax.Array) or where.is_fully_addressable:
            return jax.device_put(whole, where)
        return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])

    def put(self, value: torch.Tensor | jax.Array | np.ndarray, *axes: str | None) -> jax.Array:
        """As ``put_rows``, but with several processes each of them gives those rows alone that its
        own devices keep.
        """
        value, where = crossing(value), self.sharding(*axes)
        if isinstance(value, jax.Array) or where.is_fully_addressable:
            return jax.device_put(value, where)
        return jax.make_array_from_process_local_data(where, value)

    def argument(
        self, value: torch.Tensor | jax.Array | np.ndarray, *axes: str | None
    ) -> jax.Array | np.ndarray:
        """As ``put``, for one call of a program: without a mesh the call itself brings an array of
        the host over, in half the time.
        """
        host = self.mesh is None and isinstance(value, torch.Tensor | np.ndarray)
        return crossing(value) if host else self.put(value, *axes)


def crossing(value: torch.Tensor | jax.Array | np.ndarray, name: str = "batch") -> Any:
    """A tensor as an array that may share its memory, in a dtype that JAX's configuration allows;
    ValueError if an integer does not fit.
    """
    if isinstance(value, torch.Tensor):
        try:
            return _canonical(value.numpy(), name)
        except (RuntimeError, TypeError):
            # on another device, requires grad, bfloat16, no memory of its own, ...
            value = (
                tensors.as_numpy(tensors.plain(value))
                if value.device.type == "cpu"
                else tensors.to_jax(value)
            )
    return _canonical(value, name)


def _canonical(value: Any, name: str) -> Any:
    """An array in a dtype that JAX's configuration allows;
    ValueError if an integer does not fit.
    """
    if value.dtype.itemsize < 8:  # 64-bit types alone may have to change
        return value
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    if value.dtype == dtype:
        return value
    cast = value.astype(dtype)
    # if no value is negative, all of them fit as soon as their union of bits does: half the time of
    # a comparison
    if (
        dtype.kind in "iu"
        and not 0 <= np.bitwise_or.reduce(value, axis=None) < 2**31
        and not (cast == value).all()
    ):
        raise ValueError(
            f"{name}: some {value.dtype} values do not fit into {dtype}; call "
            "jax.config.update('jax_enable_x64', True) first"
        )
    return cast


@functools.partial(jax.jit, static_argnums=0)
def _taken(place: Placement, state: Any, indices: jax.Array) -> Any:
    def local(state: Any, indices: jax.Array) -> Any:
        def one(x: jax.Array) -> jax.Array:
            every = x if place.mesh is None else lax.all_gather(x, MEMBER, tiled=True)
            return jnp.take(every, indices, axis=0, mode="clip")

        return jax.tree.map(one, state)

    return place.over(local, (place.spec(MEMBER), place.spec(MEMBER)), place.spec(MEMBER), False)(
        state, indices
    )


@functools.partial(jax.jit, donate_argnums=0)
def _write(whole: Rows, row: dict[str, Any], i: Any) -> Rows:
    return {name: lax.dynamic_update_index_in_dim(x, row[name], i, 0) for name, x in whole.items()}


@on_single_devices
def row(x: jax.Array, i: int) -> jax.Array:
    """``x[i]``, copied from the device of this process that keeps it; LookupError if none does."""
    for shard in x.addressable_shards:
        start, stop, _ = shard.index[0].indices(x.shape[0]) if shard.index else (0, x.shape[0], 1)
        if start <= i < stop:
            return lax.dynamic_index_in_dim(shard.data, i - start, 0, keepdims=False)
    raise LookupError(i)


def gathered(x: jax.Array) -> np.ndarray:
    """The values of an array on this host; if other processes keep parts of it, each of them must
    call this too.
    """
    if not x.is_fully_addressable:
        mesh = x.sharding.mesh  # type: ignore[attr-defined]
        x = jax.jit(lambda y: y, out_shardings=NamedSharding(mesh, PartitionSpec()))(
            x
        ).addressable_data(0)
    return np.asarray(x)


def gathered_tensor(x: jax.Array) -> torch.Tensor:
    """As ``gathered``, as a tensor, on the device of an array that one device has whole."""
    if not x.is_fully_addressable or len(x.devices()) > 1:
        return as_tensor(gathered(x))
    if x.platform() != "cpu":
        return tensors.to_torch(x)
    values = torch.empty(x.shape, dtype=tensors.dtypes.to_torch(x.dtype), device="cpu")
    into = tensors.as_numpy(values)
    into[...] = np.asarray(x)  # waits for the array, after all else is done
    return values


__all__ = ["Placement"]
