"""torch's control-flow operators inside a trace: cond, switch, while_loop, map, scan and
associative_scan run as JAX's.

If the values that decide are known (outside of compilation and vmap), the Python functions run as
they are, step by step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from bridge.boundary.calls import apply
from bridge.boundary.results import Result, put_together, take_apart
from bridge.convert import trees
from bridge.errors import at_line, is_no_jvp
from bridge.lowering.common import varying
from bridge.private_calls import IN_TRACES, Ours
from bridge.trace.levels import push, state
from bridge.trace.random_keys import key_of_lane
from bridge.trace.tracing import Traced, value_of, wrap
from bridge.transform_kinds import PLAIN


def traced(*args: Any, **kwargs: Any) -> bool:
    """Whether a transform is in progress, or one of the tensors belongs to a trace."""
    return state.level is not None and (
        state.level.parent is not None
        or any(type(x) is Traced for x in trees.flatten((args, kwargs))[0])
    )


class _Body:
    """A Python function on trees of tensors as a function on flat lists of JAX values; it notes the
    structure of the output.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], what: str) -> None:
        self.fn, self.what = fn, what
        self.out_spec: trees.Spec | None = None
        self.first_key: list[int] = []
        self.given, self.rest = take_apart(args)
        self.device = self.given[0].device if self.given else torch.device("cpu")

    def run(self, compute: Callable[[list[Any]], list[Any]]) -> list[torch.Tensor]:
        """The tensors that compute makes of the values of the arguments; torch's autograd may go
        back to these and to captured tensors.

        Each call of compute must give JAX other functions, because JAX would not trace the same
        ones again with other captured values.
        """
        return apply(lambda values: Result(compute(values)), self.given)[0]

    def __call__(self, values: Sequence[Any], step: Any = None) -> list[Any]:
        """step: the number of this run of several, in which random operators draw other numbers
        than in the others.
        """
        key = None if step is None else key_of_lane(state.level, step, self.first_key)
        with push(PLAIN, key=key) as level:
            level.keyed, level.lane = True, step  # it may run several times, or not at all
            outs, spec = trees.flatten(
                self.fn(*put_together([wrap(v, self.device, level) for v in values], self.rest))
            )
            if self.out_spec is not None and spec != self.out_spec:
                raise RuntimeError(
                    f"{self.what}: expected an output of structure {self.out_spec}, got "
                    f"{spec}{at_line()}"
                )
            self.out_spec = spec
            outs = [_tensor(x) for x in outs]
            if level.writes:
                raise RuntimeError(
                    f"{self.what}: must not write to tensors from outside it; return the new "
                    f"values instead{at_line()}"
                )
            return [value_of(x) for x in outs]


def _tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)


@contextlib.contextmanager
def _explained(rule: str) -> Iterator[None]:
    """While entered, JAX's TypeError about results that do not fit is raised as a RuntimeError that
    begins with the rule.
    """
    try:
        yield
    except TypeError as error:
        if is_no_jvp(error):
            raise
        raise RuntimeError(f"{rule}; {error}") from error


def _known(x: Any, kind: Callable[[Any], Any]) -> Any:
    """A value that decides, as a Python bool or int (kind), or None if it is not known."""
    if not isinstance(x, torch.Tensor):
        return kind(x)
    try:
        return kind(lax.stop_gradient(value_of(x)).reshape(())) if x.numel() == 1 else None
    except jax.errors.JAXTypeError:
        return None


def cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()
) -> Any:
    """torch.cond: both branches are traced, and ``lax.cond`` chooses one."""
    known = _known(pred, bool)
    if known is not None:
        return (true_fn if known else false_fn)(*operands)
    if pred.numel() != 1 or pred.dtype != torch.bool:
        raise RuntimeError(
            f"cond: expected pred to be a bool or a tensor with a single bool, got {pred.dtype} of "
            f"shape {list(pred.shape)}{at_line()}"
        )
    value = value_of(pred).reshape(())
    return _chosen(
        "cond: true_fn and false_fn",
        {"cond: true_fn": true_fn, "cond: false_fn": false_fn},
        operands,
        lambda branches, values: varying.cond(value, *branches, values),
    )


def switch(index: Any, branches: Any, operands: Any = ()) -> Any:
    """torch.switch: all branches are traced, and ``lax.switch`` chooses one; an index out of range
    chooses the first or the last.
    """
    if (
        not isinstance(branches, tuple | list)
        or not branches
        or not all(callable(b) for b in branches)
    ):
        raise RuntimeError(
            "switch: expected branches to be a tuple or list of at least one function, got "
            f"{branches!r}{at_line()}"
        )
    if isinstance(index, torch.Tensor):
        fits = index.numel() == 1 and not (index.is_floating_point() or index.is_complex())
        got = f"{index.dtype} of shape {list(index.shape)}"
    else:
        fits, got = isinstance(index, int), repr(index)
    if not fits:
        raise RuntimeError(
            "switch: expected index to be an int or a tensor with a single integer, got "
            f"{got}{at_line()}"
        )
    last = len(branches) - 1
    known = _known(index, int) if last else 0
    if known is not None:
        return branches[max(0, min(known, last))](*operands)
    # in its own dtype: an int32 does not hold each index that is out of range
    value = jnp.clip(value_of(index).reshape(()), 0, last)
    return _chosen(
        "switch: all branches",
        {f"switch: branches[{i}]": branch for i, branch in enumerate(branches)},
        operands,
        lambda branches, values: varying.switch(value, branches, values),
    )


def _chosen(
    what: str,
    branches: dict[str, Callable[..., Any]],
    operands: Any,
    choose: Callable[[list[Callable[..., Any]], list[Any]], list[Any]],
) -> Any:
    """The output of the branch that choose takes, of functions of the list of the operands' values.

    Args:
        what: the branches, for an error.
        branches: by what errors call them.
        operands: a list or tuple, the arguments of each branch.
        choose: takes functions of the list of the operands' values, and this list.
    """
    bodies = [_Body(fn, tuple(operands), name) for name, fn in branches.items()]
    with _explained(f"{what} must return tensors of the same structure, shapes and dtypes"):
        # JAX would not trace the same functions again with other captured values
        outs = bodies[0].run(
            lambda values: choose([functools.partial(body) for body in bodies], values)
        )
    for body in bodies[1:]:
        if body.out_spec != bodies[0].out_spec:
            raise RuntimeError(
                f"{bodies[0].what} returns {bodies[0].out_spec}, {body.what} {body.out_spec}; they "
                "must have the same structure"
            )
    return trees.unflatten(bodies[0].out_spec, outs)


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Any,
    additional_inputs: Any = (),
) -> Any:
    """torch's while_loop as ``lax.while_loop``; it has forward mode only, as in JAX, unless the
    number of steps is known.
    """
    carry = tuple(carried_inputs)
    while known := _known(cond_fn(*carry, *additional_inputs), bool):
        out = body_fn(*carry, *additional_inputs)
        carry = tuple(out) if isinstance(out, tuple | list) else (out,)
    if known is not None:
        return carry
    carry = trees.map_leaves(_tensor, carry)
    test = _Body(lambda *xs: cond_fn(*xs, *additional_inputs), carry, "while_loop: cond_fn")
    body = _Body(lambda *xs: body_fn(*xs, *additional_inputs), carry, "while_loop: body_fn")
    with _explained(
        "while_loop: body_fn must return tensors of the shapes and dtypes that it is given"
    ):
        outs = body.run(
            lambda values: varying.while_loop(
                lambda vs: test(vs[1:], vs[0])[0].reshape(()),
                lambda vs: [vs[0] + 1, *body(vs[1:], vs[0])],
                [jnp.int32(0), *values],
            )[1:]
        )
    return tuple(trees.unflatten(trees.flatten(carry)[1], outs))


def map(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    """torch's map: f is called for each index of the first dimension of xs, one after the other, by
    ``scan``.
    """
    return scan(lambda _, x: ((), f(x, *args)), (), xs)[1]


def scan(
    combine_fn: Callable[..., Any],
    init: Any,
    xs: Any,
    *,
    dim: int = 0,
    reverse: bool = False,
    **_: Any,
) -> tuple[Any, Any]:
    """torch's scan as ``lax.scan`` along dim."""
    flat_xs = trees.flatten(xs)[0]
    if not flat_xs or not all(isinstance(x, torch.Tensor) for x in flat_xs):
        raise RuntimeError(
            "scan() operator requires xs leaves: expected at least one tensor, and tensors only"
        )
    lengths = {x.shape[dim] for x in flat_xs}
    if len(lengths) != 1 or 0 in lengths:
        raise RuntimeError(
            f"scan: expected all xs to have the same size, at least 1, along dim {dim}, got "
            f"{sorted(lengths)}"
        )
    n = len(trees.flatten(init)[0])
    body = _Body(combine_fn, (init, xs), "scan: combine_fn")

    def compute(values: list[Any]) -> list[Any]:
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = body([*carry, *x[1:]], x[0])
            return outs[:n], outs[n:]

        moved = [jnp.moveaxis(v, dim, 0) for v in values[-len(flat_xs) :]]
        steps = jnp.arange(moved[0].shape[0], dtype=jnp.int32)
        carry, ys = varying.scan(step, values[: -len(flat_xs)], [steps, *moved], reverse=reverse)
        return [*carry, *[jnp.moveaxis(y, 0, dim) for y in ys]]

    with _explained(
        "scan: combine_fn must return a carry of the structure, shapes and dtypes of init"
    ):
        outs = body.run(compute)
    out = trees.unflatten(body.out_spec, outs)
    return out[0], out[1]


def associative_scan(
    combine_fn: Callable[..., Any],
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    """torch's associative_scan as ``lax.associative_scan`` along dim."""
    body = _Body(combine_fn, (xs, xs), "associative_scan: combine_fn")

    def compute(values: list[Any]) -> list[Any]:
        # combine_fn gets slices without dim, as in torch, while JAX combines many slices at once
        combine = jax.vmap(lambda a, b: body([*a, *b]))
        moved = [jnp.moveaxis(v, dim, 0) for v in values[: len(values) // 2]]
        return [
            jnp.moveaxis(o, 0, dim) for o in lax.associative_scan(combine, moved, reverse=reverse)
        ]

    return trees.unflatten(trees.flatten(xs)[1], body.run(compute))


IN_TRACES.update(
    {
        "cond": Ours(cond),
        "switch": Ours(switch),
        "while_loop": Ours(while_loop),
        "map": Ours(map, traced),
        "scan": Ours(scan, traced),
        "associative_scan": Ours(associative_scan, traced),
    }
)
