"""Where members and batches lie: on one device, or on a mesh with an axis "member" and an axis "data", on this process and on others."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from bridge import devices
from bridge.convert import tensors

MEMBER, DATA = "member", "data"


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of an ensemble.

    Attributes:
        mesh: with an axis "member", maybe one "data"; None: everything is on one device.
    """

    mesh: Mesh | None

    def __post_init__(self) -> None:
        if self.mesh is not None and (MEMBER not in self.mesh.axis_names or set(self.mesh.axis_names) - {MEMBER, DATA}):
            raise ValueError(
                f'mesh: expected the axes "member" and "data", or "member" alone, got {self.mesh.axis_names}; make it with '
                'jax.make_mesh((m, d), ("member", "data"))'
            )

    def size(self, axis: str) -> int:
        """How many devices lie along an axis; 1 without it."""
        return 1 if self.mesh is None else self.mesh.shape.get(axis, 1)

    @functools.cached_property
    def device(self) -> jax.Device:
        """The device of everything, without a mesh."""
        return devices.default() or jax.local_devices()[0]

    def spec(self, *axes: str | None) -> PartitionSpec:
        """A PartitionSpec with those of the axes that the mesh has."""
        return PartitionSpec(*[axis if self.mesh is not None and axis in self.mesh.axis_names else None for axis in axes])

    def sharding(self, *axes: str | None) -> Sharding:
        """How an array lies whose first dimensions are spread over these axes."""
        return SingleDeviceSharding(self.device) if self.mesh is None else NamedSharding(self.mesh, self.spec(*axes))

    def check(self, n: int) -> None:
        """Refuse a number of members that the axis "member" does not divide."""
        if n < 1 or n % self.size(MEMBER):
            raise ValueError(
                f'n: expected a positive multiple of the {self.size(MEMBER)} devices along the mesh\'s axis "member", got {n} members; '
                "take another number, or a mesh of another shape"
            )

    def over(self, f: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool) -> Callable[..., Any]:
        """``f`` of local shards as a function of whole arrays: by shard_map; without a mesh it is ``f`` itself."""
        if self.mesh is None:
            return f
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)

    def stacked(self, n: int, member: Callable[[int], dict[str, jax.Array]]) -> dict[str, jax.Array]:
        """Arrays [n, ...] from the members' arrays; each is asked for one by one, by the processes that keep it, and goes to its devices."""
        lanes: dict[tuple[int, int], list[jax.Device]] = {}
        for device, (rows,) in self.sharding(MEMBER).addressable_devices_indices_map((n,)).items():
            lanes.setdefault(rows.indices(n)[:2], []).append(device)
        parts: dict[str, list[jax.Array]] = {}
        for (start, stop), where in lanes.items():
            held: list[dict[str, jax.Array]] = []
            for i in range(start, stop):
                row = member(i)
                held = held or [
                    {name: jnp.zeros((stop - start, *x.shape), x.dtype, device=d) for name, x in row.items()} for d in where
                ]
                held = [_write(all_, jax.device_put(row, d), i - start) for all_, d in zip(held, where, strict=True)]
            for one in held:
                for name, x in one.items():
                    parts.setdefault(name, []).append(x)
        return {
            name: jax.make_array_from_single_device_arrays((n, *some[0].shape[1:]), self.sharding(MEMBER), some)
            for name, some in parts.items()
        }

    def put(self, value: torch.Tensor | jax.Array | np.ndarray, *axes: str | None) -> jax.Array:
        """A tensor on the devices; with several processes, each gives those rows that its own devices keep.

        Raises:
            ValueError: an int64 does not fit into JAX's int32.
        """
        if isinstance(value, torch.Tensor):
            value = tensors.as_numpy(tensors.plain(value)) if value.device.type == "cpu" else tensors.to_jax(value)
        where = self.sharding(*axes)
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        if value.dtype != dtype:
            if value.dtype.kind in "iu" and value.size and not (np.iinfo(dtype).min <= value.min() and value.max() <= np.iinfo(dtype).max):
                raise ValueError(f"batch: {value.dtype} values do not fit into {dtype}; set jax.config.update('jax_enable_x64', True)")
            value = value.astype(dtype)
        if isinstance(value, jax.Array) or where.is_fully_addressable:
            return jax.device_put(value, where)
        return jax.make_array_from_process_local_data(where, value)


@functools.partial(jax.jit, donate_argnums=0)
def _write(whole: dict[str, jax.Array], row: dict[str, jax.Array], i: Any) -> dict[str, jax.Array]:
    return {name: lax.dynamic_update_index_in_dim(x, row[name], i, 0) for name, x in whole.items()}


def row(x: jax.Array, i: int) -> jax.Array:
    """``x[i]``, copied from the device of this process that keeps it; LookupError if none does."""
    for shard in x.addressable_shards:
        start, stop, _ = shard.index[0].indices(x.shape[0]) if shard.index else (0, x.shape[0], 1)
        if start <= i < stop:
            return lax.dynamic_index_in_dim(shard.data, i - start, 0, keepdims=False)
    raise LookupError(i)


def gathered(x: jax.Array) -> np.ndarray:
    """The values of an array on this host; if other processes keep parts of it, each of them must call this too."""
    if not x.is_fully_addressable:
        x = jax.jit(lambda y: y, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x).addressable_data(0)
    return np.asarray(x)


__all__: Sequence[str] = ["Placement"]
