"""torch's control-flow operators inside a trace: cond, while_loop, map, scan and associative_scan
run as JAX's.

If the values that decide are known (outside of compilation and vmap), the Python functions run as
they are, step by step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from bridge import private_calls
from bridge.boundary.calls import apply
from bridge.boundary.results import Result, put_together, take_apart
from bridge.convert import trees
from bridge.errors import at_line, is_no_jvp
from bridge.lowering.common import varying
from bridge.trace.levels import push, state
from bridge.trace.random_keys import key_of_lane
from bridge.trace.tracing import Traced, value_of, wrap
from bridge.transform_kinds import PLAIN


def traced(*trees_: Any) -> bool:
    """Whether a transform is in progress, or one of the tensors belongs to a trace."""
    return state.level is not None and (
        state.level.parent is not None or any(type(x) is Traced for x in trees.flatten(trees_)[0])
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


def _known(pred: Any) -> bool | None:
    """A predicate's value, or None if it is not known."""
    if not isinstance(pred, torch.Tensor):
        return bool(pred)
    try:
        return bool(lax.stop_gradient(value_of(pred)))
    except jax.errors.JAXTypeError:
        return None


def cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()
) -> Any:
    """torch.cond: both branches are traced, and ``lax.cond`` chooses one."""
    if state.level is None:
        return private_calls.original("cond")(pred, true_fn, false_fn, operands)
    known = _known(pred)
    if known is not None:
        return (true_fn if known else false_fn)(*operands)
    value = value_of(pred)
    if value.size != 1 or value.dtype != jnp.bool_:
        raise RuntimeError(
            f"cond: expected pred to be a bool or a tensor with a single bool, got {pred.dtype} of "
            f"shape {list(pred.shape)}"
        )
    yes, no = (
        _Body(true_fn, tuple(operands), "cond: true_fn"),
        _Body(false_fn, tuple(operands), "cond: false_fn"),
    )
    with _explained(
        "cond: true_fn and false_fn must return tensors of the same structure, shapes and dtypes"
    ):
        outs = yes.run(
            lambda values: varying.cond(
                value.reshape(()), lambda vs: yes(vs), lambda vs: no(vs), values
            )
        )
    if yes.out_spec != no.out_spec:
        raise RuntimeError(
            f"cond: true_fn returns {yes.out_spec}, false_fn {no.out_spec}; they must have the "
            "same structure"
        )
    return trees.unflatten(yes.out_spec, outs)


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Any,
    additional_inputs: Any = (),
) -> Any:
    """torch's while_loop as ``lax.while_loop``; it has forward mode only, as in JAX, unless the
    number of steps is known.
    """
    if state.level is None:
        return private_calls.original("while_loop")(cond_fn, body_fn, carried_inputs)
    carry = tuple(carried_inputs)
    while known := _known(cond_fn(*carry, *additional_inputs)):
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
    if not traced(xs, args):
        return private_calls.original("map")(f, xs, *args)
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
    if not traced(init, xs):
        return private_calls.original("scan")(combine_fn, init, xs, dim=dim, reverse=reverse)
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
    if not traced(xs):
        return private_calls.original("associative_scan")(
            combine_fn, xs, dim, reverse, combine_mode
        )
    body = _Body(combine_fn, (xs, xs), "associative_scan: combine_fn")

    def compute(values: list[Any]) -> list[Any]:
        # combine_fn gets slices without dim, as in torch, while JAX combines many slices at once
        combine = jax.vmap(lambda a, b: body([*a, *b]))
        moved = [jnp.moveaxis(v, dim, 0) for v in values[: len(values) // 2]]
        return [
            jnp.moveaxis(o, 0, dim) for o in lax.associative_scan(combine, moved, reverse=reverse)
        ]

    return trees.unflatten(trees.flatten(xs)[1], body.run(compute))


private_calls.IN_TRACES.update(
    {
        "cond": cond,
        "while_loop": while_loop,
        "map": map,
        "scan": scan,
        "associative_scan": associative_scan,
    }
)
