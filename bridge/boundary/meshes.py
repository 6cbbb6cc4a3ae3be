"""Explicit meshes: torch code that is called with jax.Arrays on one runs on Auto axes, and its
results are explicitly sharded again.

On an explicit mesh (the default of ``jax.make_mesh``) a value's sharding is part of its type, and
JAX refuses an operator whose result's sharding it cannot tell: convolutions, many reshapes, matrix
products over a sharded dimension. Code written for torch has no place to say it. So the border
casts the arguments to Auto axes, where XLA chooses, and says for each result what it came from:
``spread`` follows the dimensions through the program. What it does not know is replicated; the
numbers never depend on it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bridge import private_jax
from bridge.lowering.common import varying

Spec = tuple[Any, ...]  # for each dimension a mesh axis, a tuple of them, or None


def explicit(values: Sequence[Any]) -> Any:
    """The mesh of the values if it has explicit axes, an abstract one where all of them are traced;
    else None.
    """
    found = None
    for v in values:
        if not isinstance(v, jax.core.Tracer):
            sharding = getattr(v, "sharding", None)
            if (
                isinstance(sharding, NamedSharding)
                and AxisType.Explicit in sharding.mesh.axis_types
            ):
                return sharding.mesh
        elif AxisType.Explicit in (mesh := jax.typeof(v).sharding.mesh).axis_types:
            found = mesh
    return found


def axes_in(part: Any) -> tuple[str, ...]:
    """The axes of the mesh in a part of a PartitionSpec."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def spec_of(v: Any, mesh: Any) -> Spec:
    """A value's sharding over the explicit axes of a mesh, a part for each dimension; all None if
    it is on none.
    """
    sharding = jax.typeof(v).sharding if isinstance(v, jax.core.Tracer) else v.sharding
    spec: Spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    spec += (None,) * (len(v.shape) - len(spec))
    free = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    return tuple(_kept(part, free) for part in spec)


def run(
    body: Callable[[list[Any]], list[Any]],
    values: Sequence[Any],
    like: Callable[[], Sequence[Any]],
    again: bool,
) -> list[Any]:
    """``body`` of values, whose arrays may be on an explicit mesh; so are its results then.

    Args:
        body: a function of JAX values that returns a list of them.
        values: its arguments.
        like: called afterwards; arrays whose shardings the first results get.
        again: body keeps values for later, so that it must run itself and not only its trace;
            inside of a user's jit it runs twice.
    """
    mesh = explicit(values)
    if mesh is None:
        with varying.cast_by_jax():
            return body(list(values))
    specs = [spec_of(v, mesh) if isinstance(v, jax.Array) else (None,) * v.dim() for v in values]
    with jax.enable_x64(True), varying.cast_by_jax(), _entered(auto := _automatic(mesh)):
        values = [_cast(v, auto, ()) if isinstance(v, jax.Array) else v for v in values]
        if private_jax.staged(values):
            arrays = [v for v in values if isinstance(v, jax.Array)]
            with torch.random.fork_rng(devices=[]) if again else contextlib.nullcontext():
                closed = jax.make_jaxpr(lambda given: body(_filled(values, given)))(arrays)
            given = [s for v, s in zip(values, specs, strict=True) if isinstance(v, jax.Array)]
            found = spread(
                closed.jaxpr, given, dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
            )
            outs = (
                body(values) if again else jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *arrays)
            )
        else:
            outs = body(values)
            found = [_observed(v, mesh) for v in outs]
    found[: len(like())] = [spec_of(v, mesh) for v in like()]
    with jax.enable_x64(True), _entered(mesh):
        return [_cast(v, mesh, s) for v, s in zip(outs, found, strict=True)]


def entering(v: jax.Array) -> jax.Array:
    """An array that code inside a trace has from outside, on Auto axes."""
    mesh = explicit([v])
    return v if mesh is None else _cast(v, _automatic(mesh), ())


def beside(v: jax.Array, others: Sequence[Any]) -> jax.Array:
    """An array, on the explicit mesh of others if they are on one."""
    mesh = explicit(others)
    return v if mesh is None else _cast(v, mesh, ())


@contextlib.contextmanager
def on_auto_axes() -> Iterator[None]:
    """While entered, the mesh that JAX traces on has Auto axes for its explicit ones, and JAX casts
    operands inside of ``shard_map`` by itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    with contextlib.ExitStack() as entered:
        entered.enter_context(varying.cast_by_jax())
        if AxisType.Explicit in mesh.axis_types:
            entered.enter_context(_entered(_automatic(mesh)))
        yield


def _automatic(mesh: Any) -> Any:
    """The mesh with Auto axes for its explicit ones."""
    kinds = tuple(AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    return (
        Mesh(mesh.devices, mesh.axis_names, kinds)
        if isinstance(mesh, Mesh)
        else mesh.update(axis_types=kinds)
    )


def _entered(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh)


def _cast(v: Any, mesh: Any, spec: Spec) -> Any:
    """A value with that sharding over the mesh; on one with Auto axes it stays where it is."""
    automatic = AxisType.Explicit not in mesh.axis_types
    if not isinstance(v, jax.core.Tracer) and isinstance(mesh, Mesh):
        return jax.device_put(
            v,
            NamedSharding(
                mesh,
                v.sharding.spec
                if automatic and isinstance(v.sharding, NamedSharding)
                else P(*spec),
            ),
        )
    return jax.sharding.reshard(
        v, NamedSharding(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh, P(*spec))
    )


def _filled(values: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """The values, with other jax.Arrays in the places of theirs."""
    source = iter(arrays)
    return [next(source) if isinstance(v, jax.Array) else v for v in values]


def _observed(v: Any, mesh: Any) -> Spec:
    """The sharding that XLA chose for a value that is computed, perhaps inside of tracers of vmap
    and grad.
    """
    for _, dim, inner in private_jax.peeled(v):
        spec = list(_observed(inner, mesh))
        if dim is not None:
            del spec[dim]
        return tuple(spec)
    return spec_of(v, mesh)


# -- where the dimensions of a program's results come from -----------------------------------------
def spread(jaxpr: Any, specs: Sequence[Spec], sizes: dict[str, int]) -> list[Spec]:
    """The shardings of a jaxpr's results, from those of its arguments: a dimension keeps its axis
    until it is reduced or taken apart.
    """
    env: dict[Any, Spec] = dict(zip(jaxpr.invars, specs, strict=True))

    def read(v: Any) -> Spec:
        return (
            env.get(v, (None,) * len(v.aval.shape))
            if not hasattr(v, "val")
            else (None,) * len(v.aval.shape)
        )

    for eqn in jaxpr.eqns:
        found = _rule(eqn, [read(v) for v in eqn.invars], sizes)
        for v, spec in zip(eqn.outvars, found, strict=True):
            env[v] = _valid(spec, v.aval.shape, sizes)
    return [read(v) for v in jaxpr.outvars]


def _rule(eqn: Any, given: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    name, inner = private_jax.called(eqn)
    params = eqn.params
    shapes = [v.aval.shape for v in eqn.invars]
    out = eqn.outvars[0].aval.shape if eqn.outvars else ()
    if name == "scan":
        inner, consts, carry = private_jax.scanned(eqn)
        rows = [s if i < consts + carry else s[1:] for i, s in enumerate(given)]
        return [s if i < carry else (None, *s) for i, s in enumerate(spread(inner, rows, sizes))]
    if name == "while":
        first = params["cond_nconsts"]
        return spread(params["body_jaxpr"].jaxpr, given[first:], sizes)
    if name == "cond":
        return spread(params["branches"][0].jaxpr, given[1:], sizes)
    if inner is not None:
        inner = getattr(inner, "jaxpr", inner)
        if len(inner.invars) == len(given) and len(inner.outvars) == len(eqn.outvars):
            return spread(inner, given, sizes)
    x = given[0] if given else ()
    found: list[Any] = [None] * len(out)
    match name:
        case "broadcast_in_dim":
            for i, d in enumerate(params["broadcast_dimensions"]):
                found[d] = x[i] if shapes[0][i] == out[d] else None
            return [tuple(found)]
        case "transpose":
            return [tuple(x[d] for d in params["permutation"])]
        case "squeeze":
            gone = {d % len(x) for d in params["dimensions"]}
            return [tuple(s for d, s in enumerate(x) if d not in gone)]
        case "reshape":
            return [_reshaped(x, shapes[0], out)]
        case "dot_general":
            (left, right), (left_batch, right_batch) = params["dimension_numbers"]
            y = given[1]
            batch = [x[a] or y[b] for a, b in zip(left_batch, right_batch, strict=True)]
            free = [s for d, s in enumerate(x) if d not in left and d not in left_batch]
            return [
                (
                    *batch,
                    *free,
                    *[s for d, s in enumerate(y) if d not in right and d not in right_batch],
                )
            ]
        case "conv_general_dilated":
            numbers = params["dimension_numbers"]
            found[numbers.out_spec[0]], found[numbers.out_spec[1]] = (
                x[numbers.lhs_spec[0]],
                given[1][numbers.rhs_spec[0]],
            )
            return [tuple(found)]
        case "gather":
            numbers, along = params["dimension_numbers"], iter(given[1][:-1])
            gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
            whole = iter(
                [
                    s if params["slice_sizes"][d] == shapes[0][d] else None
                    for d, s in enumerate(x)
                    if d not in gone
                ]
            )
            return [
                tuple(
                    next(whole) if d in numbers.offset_dims else next(along)
                    for d in range(len(out))
                )
            ]
    if "axes" in params and len(out) < len(x):  # reductions
        gone = set(params["axes"])
        return [tuple(s for d, s in enumerate(x) if d not in gone)] * len(eqn.outvars)
    return [_alike(v.aval.shape, shapes, given) for v in eqn.outvars]


def _alike(out: Sequence[int], shapes: Sequence[Sequence[int]], given: Sequence[Spec]) -> Spec:
    """The sharding of a result whose dimensions are those of its operands, where their sizes are
    the same.
    """
    found: list[Any] = [None] * len(out)
    for shape, spec in zip(shapes, given, strict=True):
        if len(shape) == len(out):
            found = [
                f or (s if n == m else None)
                for f, s, n, m in zip(found, spec, shape, out, strict=True)
            ]
    return tuple(found)


def _reshaped(spec: Spec, before: Sequence[int], after: Sequence[int]) -> Spec:
    """Of dimensions that a reshape splits or puts together, the first one keeps the axis."""
    found: list[Any] = [None] * len(after)
    i = j = 0
    while i < len(before) and j < len(after):
        first, second = i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right and (i < len(before) if left < right else j < len(after)):
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        source = next((d for d in range(first, i) if before[d] != 1), first)
        target = next((d for d in range(second, j) if after[d] != 1), second)
        found[target] = spec[source]
    return tuple(found)


def _valid(spec: Spec, shape: Sequence[int], sizes: dict[str, int]) -> Spec:
    """The sharding without axes that occur twice, or that do not divide their dimension."""
    used: set[str] = set()
    found = []
    for part, n in zip(spec, shape, strict=True):
        names = axes_in(part)
        if used.intersection(names) or n == 0 or n % math.prod(sizes[a] for a in names):
            names, part = (), None
        used.update(names)
        found.append(part)
    return tuple(found)


def _kept(part: Any, free: set[str]) -> Any:
    names = tuple(a for a in axes_in(part) if a in free)
    return names[0] if len(names) == 1 else names or None
