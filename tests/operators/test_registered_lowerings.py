"""``bridge.register_lowering``: lowerings of one's own, and what they say of an operator beside its
values.

The truth is the same program with the operator's own kernel, in plain PyTorch or under torch.func.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.func import grad as torch_grad
from torch.func import vmap as torch_vmap

import bridge
from bridge.lowering.registry import LOWERINGS, OVERRIDDEN, Operator
from torchfunc_jax import grad, jit, jvp, vmap

_library = torch.library.Library("test_registering", "FRAGMENT")
OWN = torch.ops.test_registering
torch.manual_seed(0)
X = torch.randn(3, 4)


def define(schema: str, kernel: Callable[..., Any]) -> str:
    """An operator of one's own, with a kernel for every device."""
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    return f"test_registering.{name}"


# -- views -----------------------------------------------------------------------------------------
TAIL = define("tail(Tensor(a) x, int n) -> Tensor(a)", lambda x, n: x[..., n:])
TURNED = define("turned(Tensor(a) x) -> Tensor(a)", lambda x: x.transpose(-1, -2))
HALVES = define("halves(Tensor(a -> *) x) -> Tensor(a)[]", lambda x: list(x.split(2, -1)))
define("pieces(Tensor(a -> *) x) -> Tensor(a)[]", lambda x: list(x.unbind()))
NEGATIVE = define("negative(Tensor(a) x) -> Tensor(a)", torch._neg_view)
_inverses: list[str] = []  # the inverses that have run


def _tail(x: jax.Array, n: int) -> jax.Array:
    return x[..., n:]


def _turned_back(base: jax.Array, value: jax.Array) -> jax.Array:
    _inverses.append("turned")
    return jnp.swapaxes(value, -1, -2)


def _turned(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _negative(x: jax.Array) -> jax.Array:
    """A view that computes: only its inverse says what a write through it leaves."""
    return -x


def _slices(shape: tuple[int, ...]) -> list[tuple[str, tuple[Any, ...]]]:
    return [
        ("aten.slice.Tensor", (len(shape) - 1, i, min(i + 2, shape[-1])))
        for i in range(0, shape[-1], 2)
    ]


def _halves(x: jax.Array) -> list[jax.Array]:
    return [x[..., :2], x[..., 2:]]


def _write_tail(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    OWN.tail(y, 1).mul_(x[..., 1:])
    return (y * y).sum()


def _tail_written(x: torch.Tensor) -> torch.Tensor:
    y = torch.cat([x[..., :1] * 2, x[..., 1:] * 2 * x[..., 1:]], -1)
    return (y * y).sum()


def _read_tail_later(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    tail = OWN.tail(y, 1)
    y.mul_(x)
    return (tail * x[..., 1:]).sum()


def _write_turned(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    OWN.turned(y)[0].mul_(x[..., 0])
    return (y * x).sum()


def _column_written(x: torch.Tensor) -> torch.Tensor:
    y = torch.cat([x[..., :1].sin() * x[..., :1], x[..., 1:].sin()], -1)
    return (y * x).sum()


def _write_negative(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    OWN.negative(y)[..., 0].add_(3 * x[..., 1])
    return (y * y).sum()


def _negative_written(x: torch.Tensor) -> torch.Tensor:
    y = torch.cat([x[..., :1].sin() - 3 * x[..., 1:2], x[..., 1:].sin()], -1)
    return (y * y).sum()


def _write_halves(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    first, second = OWN.halves(y)
    first.mul_(second)
    second.add_(x[..., :2])
    return (y * x).sum()


def _halves_written(x: torch.Tensor) -> torch.Tensor:
    first, second = x.sin().split(2, -1)
    return (torch.cat([first * second, second + x[..., :2]], -1) * x).sum()


#: a program that writes through views, and the same without a write
VIEWS: dict[
    str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
] = {
    "a part is written": (_write_tail, _tail_written),
    "the base is written, the part read": (_read_tail_later, lambda x: (2 * x[..., 1:] ** 3).sum()),
    "by its inverse": (_write_turned, _column_written),
    "a view that computes": (_write_negative, _negative_written),
    "each of several views": (_write_halves, _halves_written),
}


@pytest.mark.parametrize("case", VIEWS)
def test_views(case: str) -> None:
    ours, theirs = VIEWS[case]
    stacked = torch.stack([X, 2 * X])
    for _ in range(3):  # as it is, as a compiled piece, and as one that is met again
        torch.testing.assert_close(grad(ours)(X), torch_grad(theirs)(X))
        torch.testing.assert_close(vmap(ours)(stacked), torch_vmap(theirs)(stacked))
        torch.testing.assert_close(
            vmap(grad(ours))(stacked), torch_vmap(torch_grad(theirs))(stacked)
        )
    torch.testing.assert_close(jit(ours)(X), theirs(X))
    torch.testing.assert_close(
        jit(vmap(grad(ours)))(stacked), torch_vmap(torch_grad(theirs))(stacked)
    )


def test_the_inverse_given_is_the_one_that_runs() -> None:
    _inverses.clear()
    jit(lambda x: _write_turned(x))(X)
    assert _inverses == ["turned"]


# -- writes ----------------------------------------------------------------------------------------
@torch.library.custom_op("test_registering::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, factor: float) -> None:
    """Its schema says that it writes x."""
    x *= factor


def _scale_(x: jax.Array, factor: float) -> jax.Array:
    return x * factor


def _smooth(x: torch.Tensor, mean: torch.Tensor, count: torch.Tensor, train: bool) -> torch.Tensor:
    if train:
        mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        count.add_(1)
    return x - mean


SMOOTH = define("smooth(Tensor x, Tensor mean, Tensor count, bool train) -> Tensor", _smooth)


def _lowered_smooth(
    x: jax.Array, mean: jax.Array, count: jax.Array, train: bool
) -> tuple[Any, ...]:
    """Its schema does not say that it writes mean and count, in training alone."""
    if not train:
        return x - mean, None, None
    mean = 0.5 * mean + 0.5 * jax.lax.stop_gradient(x).mean(0)
    return x - mean, mean, count + 1


def _scaled(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    scale_(y[0], 3.0)
    return (y * x).sum()


def _scaled_plainly(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y[0] *= 3.0
    return (y * x).sum()


def test_writes_that_the_schema_tells() -> None:
    stacked = torch.stack([X, 2 * X])
    for _ in range(3):
        torch.testing.assert_close(grad(_scaled)(X), torch_grad(_scaled_plainly)(X))
        torch.testing.assert_close(
            vmap(grad(_scaled))(stacked), torch_vmap(torch_grad(_scaled_plainly))(stacked)
        )
    torch.testing.assert_close(jit(grad(_scaled))(X), torch_grad(_scaled_plainly)(X))


def _trained(
    x: torch.Tensor, start: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    mean, count = start.clone(), torch.zeros((), dtype=torch.int64)
    out = OWN.smooth(x, mean, count, True)
    return (out * out * mean).sum(), (OWN.smooth(x, mean, count, False), count)


def _trained_plainly(
    x: torch.Tensor, start: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    mean = 0.5 * start + 0.5 * x.detach().mean(0)
    return ((x - mean) ** 2 * mean).sum(), (x - mean, torch.ones((), dtype=torch.int64))


def test_writes_that_the_schema_does_not_tell() -> None:
    """As of running statistics: the new values have no derivative."""
    start, stacked = torch.ones(4), torch.stack([X, 2 * X])
    wanted = torch_grad(_trained_plainly, has_aux=True)(X, start)
    mapped = torch_vmap(torch_grad(_trained_plainly, has_aux=True), (0, None))(stacked, start)
    for _ in range(3):
        torch.testing.assert_close(grad(_trained, has_aux=True)(X, start), wanted)
        torch.testing.assert_close(
            vmap(grad(_trained, has_aux=True), (0, None))(stacked, start), mapped
        )
    torch.testing.assert_close(jit(grad(_trained, has_aux=True))(X, start), wanted)
    torch.testing.assert_close(
        jit(vmap(grad(_trained, has_aux=True), (0, None)))(stacked, start), mapped
    )


@pytest.mark.parametrize("around", [lambda f: vmap(f, (0, None)), jit], ids=["vmap", "jit"])
def test_tensors_from_outside_are_written(around: Any) -> None:
    """A new value that does not depend on the mapped argument is one for all lanes."""
    mean, count, x = torch.ones(4), torch.zeros((), dtype=torch.int64), X.clone().requires_grad_()

    def run(scale: torch.Tensor, train: bool) -> torch.Tensor:
        return scale.sum() * 0 + OWN.smooth(x, mean, count, train)

    step = around(run)
    truth = torch.ones(4)
    for k in range(3):
        step(torch.ones(2), True)
        truth = 0.5 * truth + 0.5 * X.mean(0)
        torch.testing.assert_close((mean, count), (truth, torch.tensor(k + 1)))
        step(torch.ones(2), False)
        torch.testing.assert_close((mean, count), (truth, torch.tensor(k + 1)))
    assert not mean.requires_grad


def test_a_mapped_write() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, count = x[0].clone(), torch.zeros_like(x[0, 0])
        out = OWN.smooth(x, mean, count, True)
        return out, mean, count

    def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean = 0.5 * x[0] + 0.5 * x.mean(0)
        return x - mean, mean, torch.ones_like(x[0, 0])

    stacked = torch.stack([X, 2 * X])
    for transform in (vmap, lambda f: jit(vmap(f))):
        torch.testing.assert_close(transform(run)(stacked), torch_vmap(plain)(stacked))


# -- outputs that require no grad ------------------------------------------------------------------
class _Ranked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = x * 2
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(x)
        return x * x, order

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


RANKED = define("ranked(Tensor x) -> (Tensor, Tensor)", lambda x: (x * x, x * 2))
MARK = define("mark(Tensor x) -> Tensor", lambda x: x * 2)


def _ranked(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x * x, x * 2


def _mark(x: jax.Array) -> jax.Array:
    return x * 2


@pytest.mark.parametrize(
    "around", [lambda f: vmap(f), jit, lambda f: jit(vmap(f))], ids=["vmap", "jit", "jit(vmap)"]
)
def test_outputs_that_require_no_grad(around: Any) -> None:
    x = X.clone().requires_grad_()
    for _ in range(3):
        square, order = around(OWN.ranked)(x)
        assert (square.requires_grad, order.requires_grad) == (True, False)
        assert not around(OWN.mark)(x).requires_grad
        (found,) = torch.autograd.grad((square * order).sum(), x)
        torch.testing.assert_close(found, (2 * x * 2 * x).detach())


def test_no_derivative_goes_through_them() -> None:
    def ours(x: torch.Tensor) -> torch.Tensor:
        square, order = OWN.ranked(x)
        return (square * order).sum() + OWN.mark(x).sum()

    def theirs(x: torch.Tensor) -> torch.Tensor:
        square, order = _Ranked.apply(x)
        return (square * order).sum()

    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(theirs(x), x)
    for _ in range(3):
        torch.testing.assert_close(grad(ours)(X), wanted)
        torch.testing.assert_close(vmap(grad(ours))(X), wanted)
        torch.testing.assert_close(jvp(ours, (X,), (torch.ones_like(X),))[1], wanted.sum())
    torch.testing.assert_close(jit(grad(ours))(X), wanted)


#: the operators of this file, what is said of them, and their lowerings
REGISTERED: list[tuple[str, dict[str, Any], Callable[..., Any]]] = [
    (TAIL, {}, _tail),
    (TURNED, {"view_inverse": _turned_back}, _turned),
    (NEGATIVE, {"view_inverse": lambda base, value: -value}, _negative),
    (HALVES, {"view_parts": _slices}, _halves),
    ("test_registering.scale_", {}, _scale_),
    (SMOOTH, {"writes": {"mean": 1, "count": 2}, "no_grad_outputs": (1, 2)}, _lowered_smooth),
    (RANKED, {"no_grad_outputs": (1,)}, _ranked),
    (MARK, {"no_grad_outputs": (0,)}, _mark),
]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    """While the tests run, not while they are collected: other tests list the lowerings that there
    are.
    """
    for name, facts, lower in REGISTERED:
        bridge.register_lowering(name, **facts)(lower)


# -- memory ----------------------------------------------------------------------------------------
BLUR = define("blur(Tensor x, Tensor weight) -> Tensor", lambda x, weight: x * weight)
define("blur_(Tensor(a!) x, Tensor weight) -> Tensor(a!)", lambda x, weight: x.mul_(weight))


def test_memory_is_looked_at_if_the_lowering_says_so() -> None:
    def overlapping(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        OWN.blur_(y[:2], y[1:])
        return y

    def itself(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        OWN.blur_(y, y)
        return y

    x = torch.tensor([1.0, 2.0, 3.0])
    facts: list[tuple[dict[str, Any], bool, bool]] = [
        ({}, False, False),
        ({"pointwise": True}, True, False),
        ({"apart": ()}, True, False),
        ({"apart": ("weight",)}, True, True),
    ]
    for fact, part, whole in facts:
        bridge.register_lowering(BLUR, **fact)(lambda x, weight: x * weight)
        for program, refused, truth in (
            (overlapping, part, [2.0, 6.0, 3.0]),
            (itself, whole, [1.0, 4.0, 9.0]),
        ):
            if refused:
                with pytest.raises(RuntimeError, match="refer to a single memory location"):
                    jit(program)(x)
            else:
                assert jit(program)(x).tolist() == truth


# -- an operator of PyTorch's ----------------------------------------------------------------------
def test_what_is_not_given_stays_as_it_was_known() -> None:
    """Another lowering of select is still a view, which is written through."""
    select = torch.ops.aten.select.int
    before = LOWERINGS[select]
    calls = []
    try:

        @bridge.register_lowering(select)
        def lowered(x: jax.Array, dim: int, index: int) -> jax.Array:
            calls.append(index)
            return jnp.take(x, index, dim)

        def write(x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            y[1].mul_(x[0])
            return y

        torch.testing.assert_close(jit(write)(X), write(X))
        assert set(calls) == {0, 1}
        assert LOWERINGS[select].view_inverse is before.view_inverse
    finally:
        bridge.register_lowering(select)(before)
        OVERRIDDEN.discard(select)
    assert LOWERINGS[select] is before


def test_a_new_value_that_is_missing() -> None:
    forgets = define("forgets_(Tensor(a!) x) -> Tensor", lambda x: x.mul_(2).clone())
    bridge.register_lowering(forgets)(lambda x: ())
    with pytest.raises(
        RuntimeError, match=r"forgets_.*returned 0 results; expected .* the new values of x"
    ):
        jit(lambda x: OWN.forgets_(x * 1))(X)


# -- errors ----------------------------------------------------------------------------------------
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (SMOOTH, {"view_inverse": _turned_back}, "view_inverse: .*smooth.* is no view by its schema"),
    (TURNED, {"view_inverse": "turned"}, "view_inverse: expected a function, got 'turned'"),
    (TURNED, {"view_parts": _slices}, "view_parts: .* returns one view"),
    (
        "test_registering.pieces",
        {},
        "view_parts: expected a function, as .*pieces.* returns several views",
    ),
    (SMOOTH, {"writes": ("mean",)}, "writes: expected names of arguments and places"),
    (
        SMOOTH,
        {"writes": {"mode": 1}},
        "writes: .*smooth.* takes no tensor 'mode'; expected some of x, mean, count",
    ),
    (SMOOTH, {"writes": {"train": 1}}, "writes: .*smooth.* takes no tensor 'train'"),
    (
        SMOOTH,
        {"writes": {"mean": -1}},
        "writes: expected the place of the new value of 'mean', a number from 0, got -1",
    ),
    (
        SMOOTH,
        {"writes": {"mean": 1, "count": 1}},
        "writes: expected a place of its own for each argument",
    ),
    (
        "test_registering.scale_",
        {"writes": {}, "no_grad_outputs": (1,)},
        "no_grad_outputs: expected places below 1",
    ),
    (
        "test_registering.blur_",
        {"writes": {"weight": 0}},
        "writes: .*blur_.* writes x by its schema; expected all of them",
    ),
    (RANKED, {"no_grad_outputs": (2,)}, "no_grad_outputs: expected places below 2, .*got 2"),
    (
        RANKED,
        {"no_grad_outputs": (True,)},
        "no_grad_outputs: expected places of results, numbers from 0, got True",
    ),
    (RANKED, {"no_grad_outputs": 1}, r"no_grad_outputs: expected places such as \(1,\), got 1"),
    (BLUR, {"apart": "weight"}, "apart: expected names of arguments such as .*, got 'weight'"),
    (
        BLUR,
        {"apart": ("mask",)},
        "apart: .*blur.* takes no tensor 'mask'; expected some of x, weight",
    ),
]


@pytest.mark.parametrize(("operator", "facts", "message"), WRONG, ids=[m for *_, m in WRONG])
def test_wrong_facts(operator: str, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bridge.register_lowering(operator, **facts)


# -- the table -------------------------------------------------------------------------------------
def test_rows_name_arguments_that_there_are() -> None:
    """For each lowering with such a fact, an overload that it serves has the arguments."""
    rows: dict[int, list[Any]] = {}
    for func, row in LOWERINGS.items():
        rows.setdefault(id(row), []).append(func)
    for funcs in rows.values():
        row: Operator = LOWERINGS[funcs[0]]
        names = {
            a.name for func in funcs for a in func._schema.arguments if "Tensor" in str(a.type)
        }
        assert {*row.writes, *(row.apart or ())} <= names, funcs
        assert row.view_inverse is None or any(func.is_view for func in funcs), funcs
        for func in funcs:
            several = func.is_view and "List" in str(func._schema.returns[0].type)
            assert not several or row.view_parts is not None, func


# -- mistakes in a lowering ------------------------------------------------------------------------
WRONG = define("wrong(Tensor x) -> Tensor", lambda x: x.sin())
ASKING = define("asking(Tensor x) -> Tensor", lambda x: x.sin())


@bridge.register_lowering(WRONG)
def _wrong(x: jax.Array) -> jax.Array:
    return x + jnp.ones((7, 7)).reshape(3)


@bridge.register_lowering(ASKING)
def _asking(x: jax.Array) -> jax.Array:
    return x if float(x.sum()) > 0 else -x


@pytest.mark.parametrize("name, lowering", [("wrong", _wrong), ("asking", _asking)])
def test_the_line_of_a_mistake_in_a_lowering_is_shown(name: str, lowering: Any) -> None:
    with pytest.raises(RuntimeError) as found:
        jit(vmap(getattr(OWN, name)))(X)
    cause = found.value.__cause__
    assert cause is not None
    frames = [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
    assert lowering.__name__ in frames
