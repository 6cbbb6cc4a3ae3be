"""A training step priced on paper: memory, FLOPs and traffic of each device of a mesh that is not
there.

Members are independent and each device runs one program on its own shard, so that program is traced
and compiled here, on one device, with the shapes of one shard. What devices say to each other is
read from the collectives of the traced program, with its axes' names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AbstractMesh, AxisType, Mesh
from rich.table import Table

from bridge.convert import dtypes
from bridge.errors import public
from torchfunc_jax.ensemble.meshes import DATA, MEMBER, Placement

__all__ = ["Collective", "Price", "dry_run"]

#: Collectives of JAX: what a device sends of its operand's bytes to its n - 1 peers when they pass
#: it round in a ring.
_SENT: dict[str, Callable[[int], float]] = {
    "psum": lambda n: 2 * (n - 1) / n,
    "pmax": lambda n: 2 * (n - 1) / n,
    "pmin": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "ppermute": lambda n: 1,
    "pbroadcast": lambda n: 0,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """What a step says to other devices by one of JAX's collectives, over one axis of the mesh.

    Attributes:
        name: "psum", "all_gather", ...
        axis: of the mesh.
        count: how many arrays.
        bytes: of these arrays on one device.
        sent: bytes that one device sends, if they are passed round in a ring.
    """

    name: str
    axis: str
    count: int
    bytes: int
    sent: int


@dataclasses.dataclass(frozen=True)
class Price:
    """What a training step costs. Bytes and FLOPs are of one step.

    Attributes:
        members: in all.
        mesh: the devices along each axis.
        members_per_device, rows_per_device: in one shard.
        parameters: of one member.
        state: bytes of the training state on one device, by its part ("params", "optimizer", ...);
            exact.
        batch: bytes of its batch on one device; exact.
        temporary: bytes of intermediate results on one device, as XLA plans them for ``platform``.
        memory: bytes of one device: state, batch, what the step returns and does not write over the
            state, and temporary.
        flops: of one device, as XLA counts them in the program that it has compiled; the body of a
            member's own loop counts once.
        collectives: what the devices say to each other.
        platform: of the device on which the program was compiled: "cpu", "gpu" or "tpu".
    """

    members: int
    mesh: dict[str, int]
    members_per_device: int
    rows_per_device: int
    parameters: int
    state: dict[str, int]
    batch: int
    temporary: int
    memory: int
    flops: float
    collectives: tuple[Collective, ...]
    platform: str

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values())

    @property
    def total_flops(self) -> float:
        """Of all devices."""
        return self.flops * self.devices

    @property
    def sent(self) -> int:
        """Bytes that one device sends to others."""
        return sum(c.sent for c in self.collectives)

    def table(self) -> Table:
        """The numbers for ``rich.print``."""
        shape = " x ".join(f"{axis}={n}" for axis, n in self.mesh.items())
        table = Table(
            "one device, one step",
            "",
            title=f"{self.members:,} members on {self.devices:,} devices ({shape})",
        )
        small = {name: n for name, n in self.state.items() if n * 100 < self.memory}
        parts = {name: n for name, n in self.state.items() if name not in small} | {
            "rest of the state": sum(small.values())
        }
        rows = [
            ("members", f"{self.members_per_device:,} of {self.parameters:,} parameters"),
            ("rows of the batch", f"{self.rows_per_device:,}"),
            *((f"memory: {name}", _size(n)) for name, n in parts.items()),
            ("memory: batch", _size(self.batch)),
            (f"memory: temporary (XLA for {self.platform})", _size(self.temporary)),
            ("memory", _size(self.memory)),
            ("FLOPs", f"{self.flops:.4g}, {self.total_flops:.4g} on all devices"),
            *(
                (
                    f"{c.name} over {c.axis!r}",
                    f"{c.count} arrays of {_size(c.bytes)}, {_size(c.sent)} sent",
                )
                for c in self.collectives
            ),
            ("sent to other devices", _size(self.sent)),
        ]
        for row in rows:
            table.add_row(*row)
        return table


@public
def dry_run(
    make_trainer: Callable[[int, Mesh], Any],
    members: int,
    batch: tuple[Any, ...],
    mesh: Mapping[str, int] | Mesh | AbstractMesh,
    *,
    own: bool = False,
) -> Price:
    """Price a training step of many members on many devices, which need not be there.

    One shard's members are made on this machine's first device, and the step is compiled for it;
    nothing is trained. Its memory and time are those of one device of the run. Compiled on the same
    kind of device as the run's, ``temporary`` is what that run's compiler says too; compiled on a
    CPU for another kind it is an estimate, because layouts, padding and fusion differ.

    Args:
        make_trainer: makes a ``Trainer`` with a number of members on a mesh; called once, for one
            shard and a mesh of one device.
        members: in all.
        batch: the tensors of one step, all rows of them: [B, ...] each; on any device, "meta" too.
        mesh: the devices along the axes "member" and "data": {"member": 64, "data": 4}, or a mesh.
        own: each member has a batch of its own: the tensors are [members, B, ...].

    Returns:
        Price: print its ``table()`` with rich.

    Raises:
        ValueError: the axes do not divide the members or rows, or are others than "member" and
            "data".

    Source: https://docs.jax.dev/en/latest/aot.html

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Ensemble, Trainer, dry_run
        >>> def make_trainer(n, mesh):
        ...     return Trainer(
        ...         Ensemble(lambda: torch.nn.Linear(3, 1), n, mesh=mesh),
        ...         torch.nn.functional.mse_loss,
        ...     )
        >>> price = dry_run(
        ...     make_trainer,
        ...     4096,
        ...     (torch.empty(64, 3), torch.empty(64, 1)),
        ...     {"member": 64, "data": 4},
        ... )
        >>> price.members_per_device, price.rows_per_device, price.state["params"]
        (64, 16, 1024)
    """
    shape = {
        axis: int(n) for axis, n in (mesh if isinstance(mesh, Mapping) else mesh.shape).items()
    }
    along = {MEMBER: 1, DATA: 1} | shape
    if set(along) != {MEMBER, DATA} or min(along.values()) < 1:
        raise ValueError(
            f'mesh: expected positive numbers of devices along "member" and "data", got {shape}'
        )
    if members < 1 or members % along[MEMBER]:
        raise ValueError(
            f'members: expected a positive multiple of the {along[MEMBER]} devices along "member", '
            f"got {members}"
        )
    rows = {x.shape[int(own)] for x in jax.tree.leaves(batch)}
    if len(rows) != 1 or (total := rows.pop()) % along[DATA]:
        raise ValueError(
            f"batch: expected tensors of as many rows each, a multiple of the {along[DATA]} "
            'devices along "data"'
        )
    if own and any(x.shape[0] != members for x in jax.tree.leaves(batch)):
        raise ValueError(f"batch: expected tensors [{members}, rows, ...] with own=True")
    lanes, kept = members // along[MEMBER], total // along[DATA]

    def shard(x: Any) -> torch.Tensor:
        return torch.zeros(
            (lanes, kept, *x.shape[2:]) if own else (kept, *x.shape[1:]),
            dtype=dtypes.to_torch(_dtype(x)),
        )

    axes, auto = tuple(shape), (AxisType.Auto,) * len(shape)
    device = Placement(None).device
    trainer = make_trainer(
        lanes, Mesh(np.array([device]).reshape([1] * len(axes)), axes, axis_types=auto)
    )
    arrays, wide = trainer._arrays(jax.tree.map(shard, tuple(batch)), own, trainer.accumulate)
    # the same operations as with other devices: BatchNorm's statistics, say, are then of the whole
    # batch
    if along[DATA] > 1:
        _share(trainer)

    def compiled() -> jax.stages.Compiled:
        return trainer._attempt(
            "step",
            own,
            wide,
            lambda program: program.lower(*trainer._arguments(), arrays).compile(),
        )

    program = compiled()
    planned = program.memory_analysis()
    with _unrolled(trainer) as looped:
        cost = (compiled() if looped else program).cost_analysis()
    whole = AbstractMesh(tuple(shape.values()), axes, axis_types=auto)
    state = {
        field.name: _bytes(getattr(trainer.state, field.name))
        for field in dataclasses.fields(trainer.state)
    }
    rows = planned.argument_size_in_bytes - _bytes(trainer._arguments())
    return Price(
        members=members,
        mesh=shape,
        members_per_device=lanes,
        rows_per_device=kept,
        parameters=sum(p.numel() for p in trainer.ensemble.template.parameters()),
        state={name: n for name, n in state.items() if n},
        batch=rows,
        temporary=planned.temp_size_in_bytes,
        memory=rows
        + sum(state.values())
        + planned.output_size_in_bytes
        - planned.alias_size_in_bytes
        + planned.temp_size_in_bytes,
        flops=float((cost or {}).get("flops", math.nan)),
        collectives=_collectives(_whole(trainer, whole, tuple(batch), members, own, wide), along),
        platform=device.platform,
    )


def _whole(
    trainer: Any, mesh: AbstractMesh, batch: Any, members: int, own: bool, wide: tuple[bool, ...]
) -> Any:
    """The jaxpr of the step on the whole mesh, which uses the trainer up: its state has one shard's
    members.
    """
    *of_members, shared = trainer._arguments()
    parts = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((members, *x.shape[1:]), x.dtype), of_members
    )
    parts.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shared))
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(_dtype(x))), batch
    )
    trainer.ensemble.mesh, trainer.ensemble.placement = mesh, Placement(mesh)
    trainer._programs.clear()
    return trainer._attempt(
        "step", own, wide, lambda program: program.trace(*parts, arrays)
    ).jaxpr.jaxpr


@contextlib.contextmanager
def _unrolled(trainer: Any) -> Iterator[bool]:
    """Without chunks and accumulation, which are loops, of which XLA would count one round; whether
    there were any.
    """
    before = trainer.chunk, trainer.accumulate
    trainer.chunk, trainer.accumulate = None, 1
    trainer._programs.clear()
    yield before != (None, 1)
    trainer.chunk, trainer.accumulate = before


def _share(trainer: Any) -> None:
    """Let the trainer's step join what the devices along the axis "data" have,
    were there only one.
    """
    trainer._data_axis, objective = DATA, trainer._objective
    objective.settings = dataclasses.replace(objective.settings, synced=trainer.sync_batch_norm)


def _dtype(x: Any) -> Any:
    return dtypes.to_jax(x.dtype) if isinstance(x, torch.Tensor) else np.dtype(x.dtype)


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _collectives(jaxpr: Any, along: Mapping[str, int]) -> tuple[Collective, ...]:
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for name, axis, times, avals in _said(jaxpr, along, 1):
        found.setdefault((name, axis), []).extend(
            (times, math.prod(a.shape) * a.dtype.itemsize) for a in avals
        )
    made = []
    for (name, axis), parts in found.items():
        size = sum(times * n for times, n in parts)
        made.append(
            Collective(
                name,
                axis,
                sum(times for times, _ in parts),
                size,
                round(_SENT[name](along[axis]) * size),
            )
        )
    return tuple(c for c in made if c.sent)


def _said(
    jaxpr: Any, along: Mapping[str, int], times: int
) -> Iterator[tuple[str, str, int, list[Any]]]:
    """(collective, axis, how often, operands) of each that runs over an axis of the mesh."""
    for eqn in jaxpr.eqns:
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = [
            a
            for a in (axes if isinstance(axes, tuple) else (axes,))
            if isinstance(a, str) and a in along
        ]
        name = eqn.primitive.name.removesuffix("_invariant").removesuffix("2")
        if axes and name in _SENT:
            for axis in axes:
                yield name, axis, times, [v.aval for v in eqn.invars]
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _said(
                    getattr(inner, "jaxpr", inner), along, times * eqn.params.get("length", 1)
                )


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:,.0f} {unit}" if unit == "B" else f"{n:,.2f} {unit}"
        n /= 1024
    raise AssertionError
