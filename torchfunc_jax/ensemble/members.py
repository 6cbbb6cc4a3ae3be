"""``Ensemble``: many torch modules of one architecture, whose parameters and buffers are stacked in
jax.Arrays on one or many devices.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh
from torch import nn

import bridge
from bridge import checkpoint_files, compiling
from bridge.convert import tensors
from bridge.errors import public_methods
from bridge.modules import as_tensor
from torchfunc_jax.ensemble.architecture import (
    compare,
    computed,
    different,
    duplicate,
    kinds,
    shared_names,
    unchanged,
)
from torchfunc_jax.ensemble.meshes import DATA, MEMBER, Placement, crossing, gathered, row

Rows = dict[str, jax.Array]


@public_methods
class Ensemble:
    """``n`` torch modules of one architecture; each lies on the device that keeps it, built there
    one by one.

    Member i is what ``make_member()`` returns when torch's generator is seeded by ``seed`` and i,
    whatever n and the mesh; afterwards the generator is as it was. Without a mesh all members are
    on JAX's default device. With several processes each of them makes the same calls, and keeps the
    members of its own devices.

    Args:
        make_member: returns an nn.Module, the same architecture at each call.
        n: the number of members; with a mesh, a multiple of the size of its axis "member".
        seed: of the members' initial values.
        mesh: ``jax.make_mesh((m, d), ("member", "data"))``, with axes that are Explicit or Auto;
            the axis "data" may be missing.
        shared: which parameters and buffers are one array for all members, such as a frozen base
            under adapters: True for all parameters that do not require grad and all buffers, or
            names of parameters, buffers and submodules. They are the same in all members, and no
            step changes them.

    Attributes:
        params, buffers: name -> jax.Array [n, *shape]; 64-bit types become 32-bit unless JAX's
            ``jax_enable_x64`` is on. A ``Trainer`` reuses their memory in each of its steps.
        shared: name -> jax.Array [*shape], on each device of the mesh: the parameters and buffers
            that all members share.
        template: a module of the architecture, with the initial values of member 0.
        mesh: as given.

    Raises:
        ValueError: n is not a positive multiple of the axis "member"; another axis; members that
            differ in architecture, with the name of the parameter or layer, the member, and both
            shapes; something shared that requires grad, or that differs between members.
        TypeError: ``make_member`` is no function, or returns no module, or one without values.

    Source: ``torch.func.stack_module_state``; https://docs.jax.dev/en/latest/201/sharding.html

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Ensemble
        >>> ens = Ensemble(lambda: torch.nn.Linear(3, 2), n=4, seed=0)
        >>> len(ens), ens.params["weight"].shape, ens[1]
        (4, (4, 2, 3), Linear(in_features=3, out_features=2, bias=True))

        A base that all members share, each with a head of its own:

        >>> base = torch.nn.Linear(3, 5).requires_grad_(False)
        >>> heads = Ensemble(
        ...     lambda: torch.nn.Sequential(base, torch.nn.Linear(5, 2)), n=4, shared=True
        ... )
        >>> heads.params["1.weight"].shape, heads.shared["0.weight"].shape
        ((4, 2, 5), (5, 3))
    """

    def __init__(
        self,
        make_member: Callable[[], nn.Module],
        n: int,
        seed: int = 0,
        mesh: Mesh | None = None,
        *,
        shared: bool | Iterable[str] = False,
    ) -> None:
        if isinstance(make_member, nn.Module) or not callable(make_member):
            raise TypeError(
                "make_member: expected a function that returns a module, such as lambda: "
                f"Net(), got {type(make_member).__name__}; Ensemble.of([...]) takes modules"
            )

        def make(i: int) -> nn.Module:
            with _seeded(seed, i):
                return make_member()

        self._build(make, operator.index(n), mesh, shared, make_member)

    def __repr__(self) -> str:
        each = sum(math.prod(x.shape[1:]) for x in self.params.values())
        return f"Ensemble({len(self)} of {type(self.template).__name__}, {each:,} parameters each)"

    @classmethod
    def of(
        cls,
        modules: Iterable[nn.Module],
        mesh: Mesh | None = None,
        *,
        shared: bool | Iterable[str] = False,
    ) -> Ensemble:
        """An ensemble with the values of these modules, which are copied.

        Args:
            modules: at least one, all of one architecture.
            mesh, shared: as in ``Ensemble``.

        Raises:
            ValueError, TypeError: as in ``Ensemble``.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble
            >>> len(Ensemble.of([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]))
            2
        """
        given = list(modules)
        made = cls.__new__(cls)
        made._build(given.__getitem__, len(given), mesh, shared)
        return made

    def _build(
        self,
        make: Callable[[int], nn.Module],
        n: int,
        mesh: Mesh | None,
        shared: bool | Iterable[str],
        make_member: Any = None,
    ) -> None:
        self.mesh, self.placement = mesh, Placement(mesh)
        self.placement.check(n)
        first = make(0)
        if not isinstance(first, nn.Module):
            raise TypeError(f"expected an nn.Module as member 0, got {type(first).__name__}")
        if hasattr(first, "_orig_mod"):
            raise TypeError(
                "expected the module itself, got what torch.compile makes of it; all members are "
                "compiled as one program"
            )
        self._begin(computed(duplicate(first)), make_member)
        self._share(shared_names(self.template, shared))
        self._set(
            n,
            self.placement.stacked(
                n, lambda i: self._rows(first if i == 0 else make(i), f"member {i}")
            ),
        )

    def _begin(self, template: nn.Module, make_member: Callable[[], nn.Module] | None) -> None:
        self.template = template
        self._kinds = kinds(template)
        self._make_member = make_member
        self._programs: dict[Any, Any] = {}
        self.shared: Rows = {}
        # how often other members came into some of its places, which a trainer has to know
        self.changes = 0

    def _share(self, names: Iterable[str]) -> None:
        """Let all members share the template's tensors of these names: one array of each, on every
        device.
        """
        own = _tensors(self.template)
        # the template keeps its memory
        self.shared = {name: self.placement.put_rows(own[name].detach().clone()) for name in names}

    def _set(self, n: int, state: Rows) -> None:
        self._n = n
        self.params = {
            name: state[name]
            for name, _ in self.template.named_parameters()
            if name not in self.shared
        }
        self.buffers = {
            name: state[name]
            for name, _ in self.template.named_buffers()
            if name not in self.shared
        }

    def whole(self, params: Rows, buffers: Rows, shared: Rows) -> tuple[Rows, Rows]:
        """(params, buffers) of a module: those of its own, and those that all members share."""
        every = {**params, **buffers, **shared}
        return (
            {name: every[name] for name, _ in self.template.named_parameters()},
            {name: every[name] for name, _ in self.template.named_buffers()},
        )

    def _rows(self, module: nn.Module, who: str) -> dict[str, Any]:
        """The arrays of a module that is to be a member; ValueError if its architecture, or what is
        shared, is not the template's.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected an nn.Module as {who}, got {type(module).__name__}")
        compare(self.template, self._kinds, module, who)
        here, there = _tensors(module), _tensors(self.template)
        if unlike := next(
            (name for name in self.shared if different(here[name], there[name])), None
        ):
            raise ValueError(
                f"shared: all members must have the same values in {unlike!r}, and {who} has "
                "others than member 0; make them from one module, by copy.deepcopy, or do not "
                "share this one"
            )
        return {
            name: crossing(t.detach(), name) for name, t in here.items() if name not in self.shared
        }

    # -- members -----------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> nn.Module:
        """Member i, a module of its own; LookupError if other processes keep it."""
        i = self._index(i)
        try:
            params, buffers = (
                {name: row(x, i) for name, x in some.items()}
                for some in (self.params, self.buffers)
            )
        except LookupError:
            raise LookupError(
                f"member {i} is kept by another process, this one keeps {self.local}; ask there, "
                "or write a checkpoint"
            ) from None
        return computed(
            bridge.load(duplicate(self.template), *self.whole(params, buffers, self._shared_here()))
        )

    def _shared_here(self) -> Rows:
        """What all members share, on one device of this process."""
        return {name: x.addressable_data(0) for name, x in self.shared.items()}

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[i] for i in range(len(self)))

    def _index(self, i: int) -> int:
        index = operator.index(i)
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected the index of one of {len(self)} members, got {i}")
        return index % len(self)

    @property
    def local(self) -> list[int]:
        """The indices of the members that this process keeps."""
        where = (
            self.placement.sharding(MEMBER).addressable_devices_indices_map((len(self),)).values()
        )
        return sorted({i for (rows,) in where for i in range(*rows.indices(len(self)))})

    def state_dict(self, i: int) -> dict[str, torch.Tensor]:
        """The state dict of member i, for a module of the architecture: name -> tensor on the CPU.

        Raises:
            IndexError: there is no such member.
            LookupError: another process keeps it.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble
            >>> list(Ensemble(lambda: torch.nn.Linear(3, 2), n=4).state_dict(3))
            ['weight', 'bias']
        """
        return self[i].state_dict()

    def state_dicts(self) -> list[dict[str, torch.Tensor]]:
        """The state dicts of all members, in order; as ``state_dict``."""
        return [self.state_dict(i) for i in range(len(self))]

    # -- changes -----------------------------------------------------------------------------------
    def append(self, *modules: nn.Module) -> None:
        """Add modules, whose values are copied, as the last members.

        Raises:
            ValueError: another architecture, or a number of members that the mesh cannot keep:
                append several at once.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble
            >>> ens = Ensemble(lambda: torch.nn.Linear(3, 2), n=4)
            >>> ens.append(torch.nn.Linear(3, 2))
            >>> len(ens)
            5
        """
        before, n = len(self), len(self) + len(modules)
        self.placement.check(n)
        rows = [self._rows(module, f"member {before + k}") for k, module in enumerate(modules)]
        widened = self.placement.taken({**self.params, **self.buffers}, np.arange(n) % before)
        self._set(
            n, self.placement.replaced(widened, dict(zip(range(before, n), rows, strict=True)))
        )
        self.changes += 1

    def drop(self, indices: int | Iterable[int]) -> None:
        """Remove members; the others keep their order.

        Raises:
            IndexError: there is no such member.
            ValueError: no member would be left, or a number of them that the mesh cannot keep.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble
            >>> ens = Ensemble(lambda: torch.nn.Linear(3, 2), n=4)
            >>> ens.drop([0, -1])
            >>> len(ens)
            2
        """
        gone = set(self._indices(indices))
        self.take([i for i in range(len(self)) if i not in gone])

    def take(self, indices: Sequence[int]) -> None:
        """Make an ensemble of copies of these members of it, in this order, by one program.

        Raises:
            IndexError: there is no such member.
            ValueError: there are no indices, or a number of them that the mesh cannot keep.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble
            >>> ens = Ensemble(lambda: torch.nn.Linear(3, 2), n=4)
            >>> ens.take([2, 2])
            >>> bool((ens[0].weight == ens[1].weight).all())
            True
        """
        found = self._indices(indices)
        self.placement.check(len(found))
        self._set(
            len(found), self.placement.taken({**self.params, **self.buffers}, np.array(found))
        )
        self.changes += 1

    def _indices(self, indices: int | Iterable[int]) -> list[int]:
        return [self._index(i) for i in (indices if isinstance(indices, Iterable) else [indices])]

    def reseed(self, indices: int | Iterable[int], seed: int) -> None:
        """Give members new initial values: those that they have in an ensemble of this seed. In
        training, use ``Trainer.reseed``.

        Raises:
            IndexError: there is no such member.
            ValueError: the ensemble was made of modules, not of a function that makes them.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble
            >>> ens, other = (Ensemble(lambda: torch.nn.Linear(3, 2), n=4, seed=s) for s in (0, 1))
            >>> ens.reseed([2], seed=1)
            >>> bool((ens[2].weight == other[2].weight).all())
            True
        """
        if self._make_member is None:
            raise ValueError(
                "reseed: the ensemble was made of modules; it needs the function "
                "that makes a member"
            )
        rows = {}
        for i in set(self._indices(indices)) & set(self.local):
            with _seeded(seed, i):
                rows[i] = self._rows(self._make_member(), f"member {i}")
        self._set(len(self), self.placement.replaced({**self.params, **self.buffers}, rows))
        self.changes += 1

    def copy(self) -> Ensemble:
        """An ensemble with copies of the values, for example a snapshot of one that is being
        trained.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble
            >>> len(Ensemble(lambda: torch.nn.Linear(3, 2), n=4).copy())
            4
        """
        return self.like(self.params, self.buffers)

    def like(self, params: Rows, buffers: Rows) -> Ensemble:
        """An ensemble of this one's architecture and devices with copies of these values; what is
        shared, it shares too.
        """
        made = Ensemble.__new__(Ensemble)
        made.mesh, made.placement = self.mesh, self.placement
        made._begin(self.template, self._make_member)
        made.shared = dict(self.shared)
        made._set(len(self), _copied({**params, **buffers}))
        return made

    # -- files -------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all members to one file, as stacked tensors of ``torch.save``, and what they share
        once; the whole file or nothing.

        It needs memory for the ensemble on this host; ``Checkpoints`` write what each device keeps,
        from all processes.

        Raises:
            LookupError: other processes keep some of the members.

        Example:
            >>> import tempfile, torch
            >>> from torchfunc_jax.ensemble import Ensemble
            >>> make = lambda: torch.nn.Linear(3, 2)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Ensemble(make, n=4).save(f"{folder}/members.pt")
            ...     len(Ensemble.load(f"{folder}/members.pt", make))
            4
        """
        if len(self.local) < len(self):
            raise LookupError(
                "save: other processes keep some of the members; use Checkpoints, "
                "which write from all of them"
            )
        target = Path(path)
        types = {name: t.dtype for name, t in _tensors(self.template).items()}
        every = ({**self.params, **self.buffers}, self._shared_here())
        state, shared = (
            {name: as_tensor(gathered(x)).to(types[name]) for name, x in some.items()}
            for some in every
        )
        with checkpoint_files.staging(target) as folder:
            torch.save({"members": len(self), "state": state, "shared": shared}, folder / "members")
            checkpoint_files.sync(folder / "members")
            checkpoint_files.replace(folder / "members", target)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        make_member: Callable[[], nn.Module],
        mesh: Mesh | None = None,
    ) -> Ensemble:
        """The ensemble in a file that ``save`` has written; each device's part of it is read by
        itself.

        Args:
            path: the file.
            make_member: as in ``Ensemble``; its values are not used.
            mesh: of any shape.

        Raises:
            ValueError: the file is of another architecture; a number of members that the mesh
                cannot keep.
        """
        found = torch.load(path, mmap=True, weights_only=True)
        if not isinstance(found, dict) or set(found) | {"shared"} != {"members", "shared", "state"}:
            raise ValueError(f"{path}: expected a file that Ensemble.save has written")
        made, n, state, shared = (
            cls.__new__(cls),
            found["members"],
            found["state"],
            found.get("shared", {}),
        )
        made.mesh, made.placement = mesh, Placement(mesh)
        made.placement.check(n)
        with _seeded(0, 0):
            made._begin(make_member(), make_member)
        own, saved = _tensors(made.template), {**state, **shared}
        for name in {**own, **saved}:
            here, there = (
                list(some[name].shape) if name in some else "nothing" for some in (own, saved)
            )
            if (
                name not in own
                or name not in saved
                or list(saved[name].shape) != [*[n] * (name in state), *own[name].shape]
            ):
                raise ValueError(
                    f"{path}: {name!r} is {there} in the file of {n} members, and {here} in a "
                    "member of make_member"
                )
        made.shared = {name: made.placement.put_rows(x.clone()) for name, x in shared.items()}
        made._set(n, {name: made.placement.from_rows(x) for name, x in state.items()})
        params, buffers = (
            {name: row(x, made.local[0]) for name, x in some.items()}
            for some in (made.params, made.buffers)
        )
        computed(bridge.load(made.template, *made.whole(params, buffers, made._shared_here())))
        return made

    # -- outputs -----------------------------------------------------------------------------------
    def logits(self, inputs: Any, *, chunk: int | None = None) -> Any:
        """Every member's output in evaluation mode, by one compiled program.

        Args:
            inputs: a tensor [B, ...] that every member is called with; a tuple or dict of tensors
                is taken as the arguments.
            chunk: how many members of a device run at a time; None: all of them.

        Returns:
            torch.Tensor: [n, B, ...] on the CPU; if a member returns a tree, a tree of such
                tensors.

        Raises:
            flax.errors.InvalidRngError: the members draw random numbers in evaluation mode.

        Example:
            >>> import torch
            >>> from torchfunc_jax.ensemble import Ensemble
            >>> Ensemble(lambda: torch.nn.Linear(3, 2), n=4).logits(torch.ones(5, 3)).shape
            torch.Size([4, 5, 2])
        """
        place = self.placement
        leaves = jax.tree.leaves(inputs)
        rows, wide = (
            {x.shape[0] if x.ndim else None for x in leaves},
            wide_types(leaves, self.template),
        )

        def one(params: Rows, buffers: Rows, shared: Rows, inputs: Any) -> Any:
            with jax.enable_x64(True):
                args, kwargs = arguments(
                    widened(inputs, wide, lambda x, dtype: x.astype(tensors.dtypes.to_jax(dtype)))
                )
            with unchanged(self.template):
                return bridge.call(
                    self.template,
                    *self.whole(params, buffers, shared),
                    args,
                    kwargs,
                    training=False,
                )[0]

        def program(axis: str | None) -> Any:
            every, members = lanes(one, (0, 0, None, None), chunk), place.spec(MEMBER)
            return jax.jit(
                place.over(
                    every,
                    (members, members, place.spec(), place.spec(axis)),
                    place.spec(MEMBER, axis),
                    False,
                )
            )

        key = (
            jax.tree.structure(inputs),
            tuple((x.shape, str(x.dtype)) for x in leaves),
            wide,
            chunk,
        )
        with compiling.correctly():
            if key not in self._programs:
                axis = (
                    DATA
                    if len(rows) == 1
                    and None not in rows
                    and not rows.copy().pop() % place.size(DATA)
                    else None
                )
                # each device takes a part of the rows, if each output has these rows
                if axis is not None and place.size(DATA) > 1:
                    alone = jax.tree.map(
                        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
                        (self.params, self.buffers),
                    )
                    outs = jax.eval_shape(one, *alone, self.shared, jax.tree.map(as_shape, inputs))
                    axis = (
                        DATA
                        if all(x.shape[:1] == leaves[0].shape[:1] for x in jax.tree.leaves(outs))
                        else None
                    )
                self._programs[key] = program(axis), axis
            run, axis = self._programs[key]
            out = run(
                self.params,
                self.buffers,
                self.shared,
                jax.tree.map(lambda x: place.put_rows(x, axis), inputs),
            )
        return jax.tree.map(lambda x: as_tensor(gathered(x)), out)


@contextlib.contextmanager
def _seeded(seed: int, index: int) -> Iterator[None]:
    """While entered, torch draws the numbers of this member; afterwards its generators are as they
    were.
    """
    with torch.random.fork_rng(
        devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    ):
        torch.manual_seed(
            int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1)
        )
        yield


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return dict([*module.named_parameters(), *module.named_buffers()])


# -- functions of one member -----------------------------------------------------------------------
def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as positional and keyword arguments of a member."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def wide_types(leaves: Iterable[Any], member: nn.Module) -> tuple[torch.dtype | None, ...]:
    """The 64-bit types that a member needs of these tensors and arrays, of which JAX makes 32-bit
    ones: of integers, and its own.
    """

    def of(x: Any) -> torch.dtype | None:
        name = (
            None
            if isinstance(x, jax.Array)
            else str(getattr(x, "dtype", None)).removeprefix("torch.")
        )
        if name == "float64" and any(p.dtype is torch.float64 for p in member.parameters()):
            return torch.float64
        return torch.int64 if name == "int64" else None

    return tuple(of(x) for x in leaves)


def widened(
    tree: Any, wide: tuple[torch.dtype | None, ...], cast: Callable[[Any, torch.dtype], Any]
) -> Any:
    """A tree whose leaves are cast to what ``wide_types`` has found."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure, [cast(x, t) if t else x for x, t in zip(leaves, wide, strict=True)]
    )


def as_shape(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype that a tensor or array has on JAX's side."""
    dtype = tensors.dtypes.to_jax(x.dtype) if isinstance(x, torch.Tensor) else x.dtype
    return jax.ShapeDtypeStruct(tuple(x.shape), jax.dtypes.canonicalize_dtype(dtype))


def lanes(
    one: Callable[..., Any], in_axes: tuple[Any, ...], chunk: int | None
) -> Callable[..., Any]:
    """A function of one member as a function of all: by vmap, or chunk by chunk. Axes are 0, or
    None for what all members share.
    """
    if chunk is None:
        return jax.vmap(one, in_axes)

    def every(*args: Any) -> Any:
        mapped = [a for a, axis in zip(args, in_axes, strict=True) if axis == 0]

        def given(mapped: Any) -> Any:
            own = iter(mapped)
            return one(
                *[next(own) if axis == 0 else a for a, axis in zip(args, in_axes, strict=True)]
            )

        return jax.lax.map(given, mapped, batch_size=chunk)

    return every


@jax.jit
def _copied(state: Rows) -> Rows:
    return {name: jax.numpy.copy(x) for name, x in state.items()}


__all__ = ["Ensemble"]
