"""One call of a transform: arguments cross in, JAX transforms a traced function, results cross out,
and writes are carried out.

``apply`` is the only way in. It takes a *computation*: a function from the flat list of the
arguments' JAX values to a ``Result``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge import compiling, private
from bridge.boundary import autograd, meshes, results, shared_memory
from bridge.boundary.results import (
    Computation,
    Output,
    Result,
    split_arrays,
    with_twins,
    without_twins,
    write_back,
)
from bridge.convert import tensors, trees
from bridge.convert.arrays import owned, settle
from bridge.errors import NeedsJax, NeedsTorch, rewording
from bridge.operators import operands
from bridge.operators.views import view_again
from bridge.trace import random_keys, tracing
from bridge.trace.aliasing import read, views_between, write
from bridge.trace.levels import Level, Unrecordable, push, state
from bridge.trace.storage import Geometry, Node
from bridge.trace.tracing import node_of, numbered, value_of, wrap
from bridge.transform_kinds import PLAIN


class Traceable:
    """A user's function with the flattened arguments of one call; it runs on JAX values, one for
    each of the positions ``where``.
    """

    __slots__ = (
        "active",
        "computed",
        "devices",
        "flagged",
        "fn",
        "geometries",
        "leaves",
        "sources",
        "spec",
        "where",
    )

    def __init__(
        self, fn: Callable[..., Any], leaves: list[Any], spec: Any, where: list[int]
    ) -> None:
        self.fn, self.leaves, self.spec, self.where = fn, list(leaves), spec, where
        self.devices = [
            leaves[i].device if isinstance(leaves[i], torch.Tensor) else torch.device("cpu")
            for i in where
        ]
        self.geometries = [Geometry.of(leaves[i]) for i in where]
        # which of the arrays require grad: a grad transform differentiates these
        self.active: frozenset[int] = frozenset()
        # which of these are not leaves of torch's graph
        self.computed: frozenset[int] = frozenset()
        self.flagged: list[int] = []  # which of these the function has made require grad
        # the arrays that a transform hands on as they are
        self.sources: Sequence[Any] = [None] * len(where)
        for i in where:
            self.leaves[i] = None  # a cache of traces must not keep the arguments alive

    def as_given(self, arrays: Sequence[Any]) -> None:
        """Make each argument require grad if its array does, and a leaf of torch's graph if its
        array is one.
        """
        if torch.is_grad_enabled():
            self.active = frozenset(
                k for k, x in enumerate(arrays) if isinstance(x, torch.Tensor) and x.requires_grad
            )
            self.computed = frozenset(k for k in self.active if not arrays[k].is_leaf)

    def run(
        self, level: Level, values: Sequence[Any], finish: Callable[[Any], tuple[list[Any], Any]]
    ) -> Result:
        """Run the function on these values.

        Args:
            level: the level just entered.
            values: one for each position in ``where``.
            finish: takes what the function returned (torch tensors in any tree), checks it, and
                gives its tensors and a meta.
        """
        leaves = list(self.leaves)
        level.root.device = level.root.device or next(
            (d for d in self.devices if d.type != "cpu"), None
        )
        arguments = [
            wrap(v, d, level, g.strides)
            for v, d, g in zip(values, self.devices, self.geometries, strict=True)
        ]
        nodes: dict[Node, int] = {}
        for k, (i, t, geometry, source) in enumerate(
            zip(self.where, arguments, self.geometries, self.sources, strict=True)
        ):
            t.node.geometry, t.node.source, nodes[t.node] = geometry, source, k
            if k in self.active:
                t.requires_grad_()
            leaves[i] = autograd.computed(t) if k in self.computed else numbered(t)
        args, kwargs = trees.unflatten(self.spec, with_twins(leaves))
        given = [t.requires_grad for t in arguments]
        outs, meta = finish(self.fn(*args, **kwargs))
        self.flagged = [
            k
            for k, t in enumerate(arguments)
            if t.requires_grad and not given[k] and id(t) in level.root.flagged
        ]
        result = Result([value_of(t) for t in outs], meta)
        ways = [views_between(node_of(t)) for t in outs]
        whole = {node: i for i, (node, views) in reversed([*enumerate(ways)]) if not views}
        for i, (node, views) in enumerate(ways):
            if node in nodes or node.level is not level:
                result.shared[i] = (nodes.get(node, node), views)
            elif whole.get(node, i) != i:
                result.shared[i] = (Output(whole[node]), views)
        # squeeze_ and detach_ have made a view of the argument's memory out of it, and a write to
        # that is one to the memory
        places = [t.node.root if t.node.root in nodes else t.node for t in arguments]
        written: list[tuple[int | Node, Node]] = [
            (k, node) for k, node in enumerate(places) if node.version
        ]
        for target, node in [*written, *[(node, node) for node in level.writes]]:
            result.written.append((target, len(result.values), node.detached))
            result.values.append(read(node, level))
            result.writers.append(node.maker)
        return result


@private.opaque
def apply(
    compute: Computation, leaves: Sequence[Any], lasting: bool = False
) -> tuple[list[Any], Any]:
    """Run a computation on torch tensors or jax.Arrays, at whatever depth of transforms.

    Args:
        compute: maps the leaves' JAX values to a Result; torch's autograd runs it again for second
            derivatives through the results.
        leaves: torch tensors (also traced ones) and jax.Arrays.
        lasting: values of the computation are used after it has returned, for example by the
            pullback of vjp.

    Returns:
        (outputs, meta): outputs are traced tensors inside another transform, jax.Arrays if one of
            the leaves is one, else torch tensors.
    """
    if state.level is None and state.of_arrays:
        raise NeedsJax
    if state.level is None and state.recorder is not None:
        state.recorder.go_on(Unrecordable(f"{compute}"))
    if state.level is not None:
        level = state.level
        if torch.is_grad_enabled():
            operands.note_use(leaves)
        values = [
            value_of(x) if isinstance(x, torch.Tensor) else meshes.entering(x) for x in leaves
        ]
        met_before, level.met = level.met, {}
        draw_again = random_keys.drawing_again()
        try:
            with rewording():
                result = compute(values)
        finally:
            met, level.met = level.met, met_before
        device = next(
            (x.device for x in leaves if isinstance(x, torch.Tensor)), torch.device("cpu")
        )
        if result.written:
            shared_memory.refuse(
                result, leaves, [(t, tracing.node_of(t)) for t in met.values()], inside=True
            )
        met_before.update(
            (key, t) for key, t in met.items() if tracing.node_of(t).level is not level
        )
        _carry_out(result, leaves)
        outs = _outputs(result)
        # no_grad around this call stops the outer transforms' gradients, not this transform's own
        if not torch.is_grad_enabled():
            outs = operands.stop(outs)
        if not private.forward_mode_enabled():
            outs = operands.stop_tangents(outs)
        made: list[torch.Tensor] = [wrap(v, device) for v in outs]
        _share(result, leaves, made)
        return autograd.attached(apply, made, compute, leaves, values, draw_again), result.meta
    return _in_jax(compute, leaves, lasting)


def _outputs(result: Result) -> list[Any]:
    return result.values[: len(result.values) - len(result.written)]


def _share(result: Result, leaves: Sequence[Any], outs: list[torch.Tensor]) -> None:
    """Replace the outputs of a call inside a trace that share memory by views of the tensors whose
    memory it is.
    """
    for i, (source, views) in result.shared.items():
        t = (
            outs[source.index]
            if isinstance(source, Output)
            else leaves[source]
            if isinstance(source, int)
            else source
        )
        out = view_again(t, views) if isinstance(t, torch.Tensor | Node) else None
        outs[i] = outs[i] if out is None else out


def _carry_out(result: Result, leaves: Sequence[Any]) -> None:
    # captured tensors are written as a whole, and an argument may be a view of a part of one, so
    # arguments come last
    for target, index, detached in sorted(
        result.written, key=lambda written: not isinstance(written[0], Node)
    ):
        if isinstance(target, Node):
            write(target, result.values[index], state.level, detached)
        elif isinstance(leaves[target], torch.Tensor):
            tracing.assign(leaves[target], result.values[index], detached)


def _in_jax(compute: Computation, leaves: Sequence[Any], lasting: bool) -> tuple[list[Any], Any]:
    """Run a computation on jax.Arrays, maybe inside a user's own jax.jit or jax.grad; the results
    are jax.Arrays too.
    """
    found: list[Any] = []

    def body(values: list[Any]) -> list[Any]:
        with tracing.root() as root:
            root.stops = torch.is_grad_enabled()  # no_grad around the call does not stop jax.grad
            given = [tensors.to_jax(x) if isinstance(x, torch.Tensor) else x for x in values]
            result = compute(given)
            _carry_out(result, leaves)
            writes = [(t, node.value) for t, node in root.captured.values() if node.version]
        found[:] = [result, [t for t, _ in writes]]
        # a result that is a tensor as it was given or captured has its memory, to which torch may
        # write
        lent = {id(v) for v, x in zip(given, values, strict=True) if isinstance(x, torch.Tensor)}
        lent |= {id(node.value) for _, node in root.captured.values() if not node.version}
        outs = [
            *[owned(v) if id(v) in lent and tensors.is_local(v) else v for v in _outputs(result)],
            *[v for _, v in writes],
        ]
        if lent:
            settle(outs)
        return outs

    try:
        outs = meshes.run(body, leaves, lambda: found[0].like, lasting)
    except NeedsTorch as reason:
        raise RuntimeError(str(reason)) from None
    result, written = found
    count = len(outs) - len(written)
    write_back(
        [
            (t, tensors.to_torch(v, t.device))
            for t, v in zip(written, outs[count:], strict=True)
            if tensors.is_local(v)
        ]
    )
    compiling.warn_of_jit(outs)
    return outs[:count], result.meta


@dataclasses.dataclass(slots=True)
class Call:
    """The arguments of a transform's call, flattened once; ``where`` has the positions of the
    leaves that are arrays.
    """

    leaves: list[Any]
    spec: Any
    where: list[int]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = trees.flatten((args, kwargs))
        return cls(leaves, spec, split_arrays(leaves))

    @classmethod
    def each_once(cls, leaves: list[Any], spec: Any, dims: Sequence[int | None] = ()) -> Call:
        """A call in which a tensor that is several leaves is one; dims:
        as for ``without_twins``.
        """
        leaves = without_twins(leaves, dims)
        return cls(leaves, spec, split_arrays(leaves))

    @property
    def arrays(self) -> list[Any]:
        return [self.leaves[i] for i in self.where]

    def traceable(self, fn: Callable[..., Any]) -> Traceable:
        return Traceable(fn, self.leaves, self.spec, self.where)


def plain(func: Callable[..., Any]) -> Callable[..., Any]:
    """func as a JAX computation without a transform: it takes and returns torch tensors or
    jax.Arrays, and passes other leaves through.
    """

    @private.opaque
    def run(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(args, kwargs)
        traceable = call.traceable(func)
        traceable.as_given(call.arrays)

        def compute(values: list[Any]) -> Result:
            with push(PLAIN) as level:
                result = traceable.run(level, values, results.take_apart)
            result.apart = True
            # torch.func copies what it writes back
            written = {target for target, _, _ in result.written}
            result.shared = {i: way for i, way in result.shared.items() if way[0] not in written}
            return result

        return results.put_together(*apply(compute, call.arrays))

    return run
