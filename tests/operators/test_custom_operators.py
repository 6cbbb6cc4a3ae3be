"""Operators of torch.library without a lowering, which PyTorch runs: each in every way in which it
can be called.

The truth is plain PyTorch: the operator's own kernel, its registered derivative by torch.autograd,
and a loop over the lanes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from agreement import Runs, floats, same
from every_way import in_every_way
from torch.utils import _pytree as pytree

import bridge
from bridge.errors import DataDependentError, NoLoweringError
from torchfunc_jax import export, grad, jacrev, jet, jit, jvp, linearize, vjp, vmap

OWN = torch.ops.test_custom
_library = torch.library.Library("test_custom", "FRAGMENT")
RUNS, RULES = Runs(), Runs()  # of kernels, and of rules for vmap


def numpy(function: Callable[..., Any], *given: torch.Tensor) -> torch.Tensor:
    """What a function of numpy arrays gives, as a tensor; it counts as a run of a kernel."""
    RUNS.add()
    return torch.from_numpy(np.asarray(function(*[t.detach().numpy() for t in given])).copy())


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*[x for x in inputs if isinstance(x, torch.Tensor)])


# -- the operators ---------------------------------------------------------------------------------
@torch.library.custom_op("test_custom::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    """With a derivative and without a rule for vmap; the derivative calls it."""
    return numpy(np.sin, x)


sine.register_fake(torch.empty_like)
sine.register_autograd(
    lambda ctx, g: g * sine(ctx.saved_tensors[0] + torch.pi / 2), setup_context=save_inputs
)


@torch.library.custom_op("test_custom::product", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """With a derivative, which asks what it is for, and a rule for vmap."""
    return numpy(np.multiply, x, y)


def _product_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    x, y = ctx.saved_tensors
    first, second = ctx.needs_input_grad
    return g * y if first else None, g * x if second else None


@product.register_vmap
def _product_rule(
    info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, int]:
    RULES.add()
    x, y = [
        t.unsqueeze(-1) if d is None else t.movedim(d, -1)
        for t, d in zip((x, y), in_dims, strict=True)
    ]
    return product(
        x.expand(*x.shape[:-1], info.batch_size), y.expand(*y.shape[:-1], info.batch_size)
    ), x.dim() - 1


product.register_fake(lambda x, y: torch.empty_like(x))
product.register_autograd(_product_backward, setup_context=save_inputs)


@torch.library.custom_op("test_custom::cube", mutates_args=())
def cube(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results, of which one is the derivative of the other, and a rule for vmap."""
    return numpy(lambda a: a**3, x), numpy(lambda a: 3 * a**2, x)


def _save_slope(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _cube_backward(ctx: Any, g: torch.Tensor, g_slope: torch.Tensor) -> torch.Tensor:
    x, slope = ctx.saved_tensors
    return g * slope + g_slope * 6 * x


cube.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
cube.register_autograd(_cube_backward, setup_context=_save_slope)
cube.register_vmap(lambda info, in_dims, x: (cube(x), (in_dims[0], in_dims[0])))


@torch.library.custom_op("test_custom::accumulate_", mutates_args=("total",))
def accumulate_(total: torch.Tensor, x: torch.Tensor) -> None:
    """Writes to an argument and returns nothing."""
    RUNS.add()
    total += 2 * x


@torch.library.custom_op("test_custom::swap_", mutates_args=("x", "y"))
def swap_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes to two arguments and returns a tensor."""
    RUNS.add()
    x_before = x.clone()
    x.copy_(y)
    y.copy_(x_before)
    return x_before.sum()


swap_.register_fake(lambda x, y: x.new_empty(()))


@torch.library.custom_op("test_custom::weighted", mutates_args=())
def weighted(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Takes a list of tensors, and a list of numbers."""
    return numpy(lambda *arrays: sum(w * a for w, a in zip(weights, arrays, strict=True)), *tensors)


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.weights = inputs[1]


weighted.register_fake(lambda tensors, weights: torch.empty_like(tensors[0]))
weighted.register_autograd(
    lambda ctx, g: ([w * g for w in ctx.weights], None), setup_context=_save_weights
)


@torch.library.custom_op("test_custom::powers", mutates_args=())
def powers(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Returns a list of tensors."""
    return [numpy(lambda a, k=k: a**k, x) for k in range(1, count + 1)]


def _powers_backward(ctx: Any, gs: list[torch.Tensor]) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return sum(g * k * x ** (k - 1) for k, g in enumerate(gs, 1)), None


powers.register_fake(lambda x, count: [torch.empty_like(x) for _ in range(count)])
powers.register_autograd(_powers_backward, setup_context=save_inputs)


@torch.library.custom_op("test_custom::order", mutates_args=())
def order(x: torch.Tensor) -> torch.Tensor:
    """Integers of 64 bits, and no derivative."""
    return numpy(np.argsort, x)


order.register_fake(lambda x: torch.empty_like(x, dtype=torch.int64))


@torch.library.custom_op("test_custom::scaled", mutates_args=())
def scaled(x: torch.Tensor, shift: int = 1, *, by: float, mode: str = "times") -> torch.Tensor:
    """Arguments that are no tensors, with defaults, some of them by name alone."""
    return numpy(lambda a: (a * by if mode == "times" else a / by) + shift, x)


def _save_by(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    assert inputs[1] in (1, 3)
    ctx.by = (
        keyword_only_inputs["by"]
        if keyword_only_inputs["mode"] == "times"
        else 1 / keyword_only_inputs["by"]
    )


scaled.register_fake(lambda x, shift=1, *, by, mode="times": torch.empty_like(x))
scaled.register_autograd(lambda ctx, g: (g * ctx.by, None), setup_context=_save_by)


@torch.library.custom_op("test_custom::plain", mutates_args=())
def plain(x: torch.Tensor) -> torch.Tensor:
    """No derivative and no rule."""
    return numpy(np.floor, x) + x


plain.register_fake(torch.empty_like)


@torch.library.custom_op("test_custom::same_values", mutates_args=())
def same_values(x: torch.Tensor) -> torch.Tensor:
    """Of any dtype."""
    return x.clone()


same_values.register_fake(torch.empty_like)

_library.define("older(Tensor x) -> Tensor")
_library.impl("older", lambda x: numpy(np.cosh, x), "CPU")
torch.library.register_fake("test_custom::older", torch.empty_like, lib=_library)
torch.library.register_autograd(
    "test_custom::older",
    lambda ctx, g: g * ctx.saved_tensors[0].sinh(),
    setup_context=save_inputs,
    lib=_library,
)


_library.define("added(Tensor x, *, Tensor? other=None, Tensor(a!) out) -> Tensor(a!)")
_library.impl(
    "added", lambda x, *, other=None, out: out.copy_(x if other is None else x + other), "CPU"
)
torch.library.register_fake("test_custom::added", lambda x, *, other=None, out: out, lib=_library)


class _Tanh(torch.autograd.Function):
    """The autograd.Function of an operator whose autograd kernel its author has written."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return OWN.written_by_hand(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return OWN.written_by_hand(x), in_dims[0]


_library.define("written_by_hand(Tensor x) -> Tensor")
_library.impl("written_by_hand", lambda x: numpy(np.tanh, x), "CPU")
_library.impl("written_by_hand", _Tanh.apply, "Autograd")
torch.library.register_fake("test_custom::written_by_hand", torch.empty_like, lib=_library)


# -- functions of them -----------------------------------------------------------------------------
def _accumulated(x: torch.Tensor) -> torch.Tensor:
    total = torch.ones_like(x)
    accumulate_(total, x.detach())
    return total * x


def _accumulated_in_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    accumulate_(y.T, x.T.detach())
    return y


def _swapped(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x.detach().clone(), y.detach().clone()
    total = swap_(a, b)
    return a - 2 * b, total


def _nested(x: torch.Tensor) -> torch.Tensor:
    return product(sine(x), cube(x)[0]) + sine(x * 2)


X, Y = floats(2, 3), floats(3, 2).T.contiguous()
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], bool]] = {
    "sine": (sine, (X,), True),
    "sine of float32": (sine, (X.float(),), True),
    "product": (product, (X, Y), True),
    "product with a captured tensor": (lambda x: product(x, Y.to(x.dtype)) * x, (X,), True),
    "cube": (cube, (X,), True),
    "one result of cube": (lambda x: cube(x)[0], (X,), True),
    "accumulate_": (_accumulated, (X,), True),
    "accumulate_ in a view": (_accumulated_in_a_view, (X,), True),
    "swap_": (_swapped, (X, Y), False),
    "weighted": (lambda x, y: weighted([x, y, x], [0.5, 2.0, -1.0]), (X, Y), True),
    "powers": (lambda x: powers(x, 3), (X,), True),
    "order": (lambda x: (order(x), x.gather(-1, order(x))), (X,), True),
    "scaled": (lambda x: scaled(x, by=1.5) + scaled(x, 3, by=2.0, mode="over"), (X,), True),
    "plain": (plain, (X,), False),
    "plain of what has no gradient": (lambda x: plain(x.detach()) * x, (X,), True),
    "older": (lambda x: OWN.older(x), (X,), True),
    "added": (
        lambda x: (
            OWN.added(x.detach(), out=x * 0)
            + OWN.added(x.detach(), other=x.detach(), out=torch.ones_like(x))
        ),
        (X,),
        False,
    ),
    "older of float32": (lambda x: OWN.older.default(x), (X.float(),), True),
    "nested": (_nested, (X,), True),
    "transposed": (lambda x: sine(x.T).reshape(-1), (X,), True),
    "a number": (lambda x: sine(x.sum()) * x, (X,), True),
    "no elements": (lambda x: sine(x[:0]), (X,), False),
}


TEN = (
    "sine",
    "product",
    "cube",
    "accumulate_",
    "swap_",
    "weighted",
    "powers",
    "order",
    "scaled",
    "older",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TEN else pytest.mark.slow) for name in CASES]
)
def test_runs_in_every_way(name: str) -> None:
    fn, args, differentiable = CASES[name]
    in_every_way(fn, *args, grads=differentiable)


def _total(out: Any) -> torch.Tensor:
    return sum((x * x).sum() for x in pytree.tree_leaves(out) if x.dtype.is_floating_point)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", CASES)
def test_runs_in_the_users_own_jax(name: str) -> None:
    in_the_users_own_jax(*CASES[name])


def in_the_users_own_jax(
    fn: Callable[..., Any], args: tuple[torch.Tensor, ...], differentiable: bool
) -> None:
    """jax.jit, jax.vmap and jax.grad of a function of the bridge's, and these of one another;
    64-bit types are off outside of it.
    """
    stacked = [torch.stack([a, a * 0.5, a * -0.75]).float() for a in args]
    lanes = list(zip(*stacked, strict=True))

    def agree(found: Any, expected: Any) -> None:
        for a, e in zip(
            jax.tree_util.tree_leaves(found), pytree.tree_leaves(expected), strict=True
        ):
            np.testing.assert_allclose(np.asarray(a), e.detach().numpy(), rtol=1e-5, atol=1e-5)

    def check(mine: Callable[..., Any], truth: Callable[..., Any]) -> None:
        one, arrays = [bridge.to_jax(x) for x in lanes[0]], [bridge.to_jax(x) for x in stacked]
        each = [truth(*xs) for xs in lanes]
        expected = pytree.tree_map(lambda *rows: torch.stack(rows), *each)
        for run in (mine, jax.jit(mine)):
            agree(run(*one), each[0])
        for run in (jax.vmap(mine), jax.jit(jax.vmap(mine)), jax.vmap(jax.jit(mine))):
            agree(run(*arrays), expected)

    def slopes(*xs: torch.Tensor) -> Any:
        leaves = [x.clone().requires_grad_() for x in xs]
        return torch.autograd.grad(_total(fn(*leaves)), leaves)

    check(jit(fn), fn)
    if differentiable:
        total, places = jit(lambda *xs: _total(fn(*xs))), tuple(range(len(args)))
        check(jax.grad(total, places), slopes)
        check(jax.grad(jax.jit(total), places), slopes)


# -- derivatives of derivatives, and transforms of one another -------------------------------------
def _sum_of_sines(x: torch.Tensor) -> torch.Tensor:
    return sine(x).sum()


NESTED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "grad of grad": (lambda x: grad(lambda x: grad(_sum_of_sines)(x).sum())(x), lambda x: -x.sin()),
    "jacrev of jacrev": (jacrev(jacrev(_sum_of_sines)), lambda x: torch.diag(-x.sin())),
    "vmap of vmap": (lambda x: vmap(vmap(sine))(x.reshape(2, 2)), lambda x: x.reshape(2, 2).sin()),
    "vmap of vmap with a rule": (
        lambda x: vmap(vmap(product, (0, None)), (None, 0))(x, x + 1),
        lambda x: (x + 1)[:, None] * x[None],
    ),
    "vmap of grad of vmap": (
        lambda x: vmap(grad(lambda x: vmap(sine)(x).sum()))(x.reshape(2, 2)),
        lambda x: x.reshape(2, 2).cos(),
    ),
    "grad of vmap with a rule": (
        lambda x: grad(lambda x: vmap(product)(x, x * x).sum())(x),
        lambda x: 3 * x * x,
    ),
    "grad of grad of two results": (
        lambda x: grad(lambda x: grad(lambda x: cube(x)[0].sum())(x).sum())(x),
        lambda x: 6 * x,
    ),
    "vjp": (lambda x: vjp(sine, x)[1](x)[0], lambda x: x * x.cos()),
    "jacrev of a list": (
        jacrev(lambda x: weighted([x, x * x], [2.0, 3.0])),
        lambda x: torch.diag(2 + 6 * x),
    ),
    "torch.autograd.grad inside": (
        lambda x: torch.autograd.grad(sine(y := x.detach().requires_grad_()).sum(), y)[0],
        lambda x: x.cos(),
    ),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("compiled", [False, True])
def test_transforms_of_transforms(name: str, compiled: bool) -> None:
    fn, formula = NESTED[name]
    fn = jit(fn) if compiled else fn
    for x in (floats(4), floats(4) * 2, floats(4) - 1):
        same(fn(x), formula(x))


def test_gradients_of_arguments_that_need_none_are_not_computed() -> None:
    """The derivative of ``product`` asks ctx.needs_input_grad, and a program may be differentiated
    by either argument later.
    """
    x, y = floats(3), floats(3) + 1
    for fn in (product, jit(product)):
        for leaf in (0, 1):
            given = [x.clone(), y.clone()]
            given[leaf].requires_grad_()
            found = torch.autograd.grad(fn(*given).sum(), given[leaf])[0]
            same(found, (y, x)[leaf])


def test_an_autograd_kernel_that_the_user_has_written() -> None:
    """torch.func cannot apply an autograd.Function in one, so un-jitted derivatives are refused."""
    slopes = grad(lambda x: OWN.written_by_hand(x).sum())
    same(jit(slopes)(X), 1 - X.tanh() ** 2)
    same(jit(vmap(slopes))(X), 1 - X.tanh() ** 2)
    same(vmap(lambda x: OWN.written_by_hand(x))(X), X.tanh())
    with pytest.raises(
        NotImplementedError,
        match=r"test_custom::written_by_hand.*torch\.library\.register_autograd",
    ):
        slopes(X)


# -- how often a kernel runs -----------------------------------------------------------------------
def _asks(x: torch.Tensor) -> torch.Tensor:
    y = sine(x)
    return y * 2 if y.sum().item() > 0 else sine(y)


COUNTS: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "grad": (grad(lambda x: scaled(x, by=2.0).sum()), 1),
    "of unused results": (grad(lambda x: (scaled(x, by=2.0), x.sum())[1]), 1),
    "a rule for vmap": (lambda x: vmap(product)(x, x), 1),
    "lane by lane": (vmap(plain), 3),
    "vmap of grad": (vmap(grad(lambda x: scaled(x, by=2.0).sum())), 3),
    "vjp, pulled back twice": (
        lambda x: [f(x) for _, f in [vjp(lambda x: scaled(x, by=2.0), x)] for _ in range(2)],
        1,
    ),
    "jacrev": (jacrev(lambda x: scaled(x, by=2.0)), 1),
    "a value that is asked for": (grad(lambda x: _asks(x).sum()), 2),
    "two writes": (
        lambda x: vmap(lambda y: (accumulate_(t := y.clone(), y), accumulate_(t, y), t)[2])(x),
        6,
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_un_jitted_calls_run_a_kernel_as_often_as_torch(name: str) -> None:
    fn, count = COUNTS[name]
    for _ in range(3):
        before = RUNS.count
        fn(floats(3).abs())
        assert RUNS.count - before == count


def test_un_jitted_calls_run_kernels_in_the_order_of_the_program() -> None:
    order_of_calls: list[int] = []

    @torch.library.custom_op("test_custom::noted", mutates_args=())
    def noted(x: torch.Tensor, number: int) -> torch.Tensor:
        order_of_calls.append(number)
        return x * number

    noted.register_fake(lambda x, number: torch.empty_like(x))
    noted.register_autograd(lambda ctx, g: (g, None))
    for _ in range(2):
        grad(lambda x: (noted(x, 1), noted(x, 2) + noted(x, 3))[1].sum())(X)
    assert order_of_calls == [1, 2, 3, 1, 2, 3]


def test_a_program_maps_by_the_registered_rule() -> None:
    fn = jit(vmap(product))
    fn(X, Y)
    kernels, rules = RUNS.count, RULES.count
    same(fn(X, Y), X * Y)
    assert (RUNS.count - kernels, RULES.count - rules) == (1, 1)


def test_a_tensor_from_outside_is_written_to() -> None:
    total = torch.zeros(3)

    def count(x: torch.Tensor) -> torch.Tensor:
        accumulate_(total, x)
        return total * x

    x = torch.ones(3)
    for k, fn in enumerate(
        [jit(count), jit(count), lambda x: vmap(lambda y: count(x) + y)(x[None])[0] - x]
    ):
        same(fn(x), 2 * (k + 1) * x)
        same(total, 2 * (k + 1) * x)


def test_an_argument_is_written_to() -> None:
    x, y = torch.ones(2), torch.full((2,), 3.0)
    same(jit(swap_)(x, y), torch.tensor(2.0))
    same((x, y), (torch.full((2,), 3.0), torch.ones(2)))


# -- which error -----------------------------------------------------------------------------------
def define(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None
) -> Any:
    _library.define(name + schema)
    _library.impl(name, kernel, "CPU")
    if fake is not None:
        torch.library.register_fake(f"test_custom::{name}", fake, lib=_library)
    return getattr(OWN, name)


@torch.library.custom_op("test_custom::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("test_custom::too_few", mutates_args=())
def too_few(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


too_few.register_fake(lambda x, y: torch.empty_like(x))
too_few.register_autograd(lambda ctx, g: g)


@torch.library.custom_op("test_custom::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


positive.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
define("also_without_fake", "(Tensor x) -> Tensor", lambda x: x * 2)
define("viewed", "(Tensor(a) x) -> Tensor(a)", lambda x: x[0], lambda x: x[0])
define("length", "(Tensor x) -> int", len, lambda x: 7)
define("wrong_fake", "(Tensor x) -> Tensor", lambda x: x.double(), torch.empty_like)
define("failing", "(Tensor x) -> Tensor", lambda x: x[100] if x.dim() == 1 else x, torch.empty_like)

EVERY = {
    "vmap": lambda f: vmap(f)(X),
    "grad": lambda f: grad(lambda x: f(x).sum())(X),
    "jit": lambda f: jit(f)(X),
    "jit of grad": lambda f: jit(grad(lambda x: f(x).sum()))(X),
    "jax.jit": lambda f: jax.jit(jit(f))(jnp.ones((2, 3))),
}
OF_GRADIENTS = ("grad", "jit of grad")
ERRORS: dict[str, tuple[Callable[[torch.Tensor], Any], Any, str, Sequence[str]]] = {
    "no fake": (
        without_fake,
        NoLoweringError,
        r"test_custom::without_fake has no fake.*torch\.library\.register_fake",
        list(EVERY),
    ),
    "no fake, older": (
        lambda x: OWN.also_without_fake(x),
        NoLoweringError,
        (
            r"test_custom::also_without_fake has no "
            r"fake.*register_fake\('test_custom::also_without_fake'\).*test_custom_operators\.py"
        ),
        list(EVERY),
    ),
    "no derivative": (
        plain,
        RuntimeError,
        r"backward through test_custom::plain.*torch\.library\.register_autograd",
        OF_GRADIENTS,
    ),
    "a derivative of too few arguments": (
        lambda x: too_few(x, x),
        RuntimeError,
        r"test_custom::too_few.*expected 2, got 1",
        OF_GRADIENTS,
    ),
    "a view": (
        lambda x: OWN.viewed(x),
        NoLoweringError,
        "viewed.*register_lowering",
        ["vmap", "grad", "jit", "jax.jit"],
    ),
    "a Python number": (
        lambda x: x * OWN.length(x),
        NoLoweringError,
        "length.*register_lowering",
        ["vmap", "grad", "jit", "jax.jit"],
    ),
    "a wrong fake": (
        lambda x: OWN.wrong_fake(x.float()),
        RuntimeError,
        "wrong_fake.*correct the function",
        ["jit", "jax.jit"],
    ),
    "a shape that depends on values": (
        positive,
        DataDependentError,
        "dynamic shape",
        ["jit", "jit of grad", "jax.jit"],
    ),
    "a kernel that fails": (
        lambda x: OWN.failing(x[0]),
        (RuntimeError, IndexError),
        "out of bounds",
        ["jit", "jax.jit", "grad"],
    ),
}


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, case in ERRORS.items() for way in case[3]]
)
def test_what_cannot_be_done_says_why(name: str, way: str) -> None:
    fn, kind, message, _ = ERRORS[name]
    for _ in range(2):
        with pytest.raises(kind, match=rf"(?s){message}"):
            EVERY[way](fn)
    same(jit(sine)(X), X.sin())  # nothing is left behind


def test_a_vmap_without_lanes() -> None:
    """In PyTorch, only a rule knows the shapes of no results."""
    nothing = torch.zeros(0, 3)
    same(jit(vmap(sine))(nothing), nothing)
    same(vmap(product)(nothing, nothing), nothing)
    with pytest.raises(RuntimeError, match=r"test_custom::sine.*torch\.library\.register_vmap"):
        vmap(sine)(nothing)


def test_an_exported_program_has_no_kernel() -> None:
    with pytest.raises(
        NoLoweringError,
        match=r"export: test_custom::sine.*register_lowering\('test_custom\.sine'\)",
    ):
        export(lambda x: sine(x) * 2, X)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.uint64,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_every_dtype_crosses(dtype: torch.dtype) -> None:
    """JAX's own callbacks make 32 bits of 64 where 64-bit types are off outside of a trace."""
    x = (floats(2, 3) * 10).abs().to(dtype)
    x = (
        x + 2**40
        if dtype in (torch.int64, torch.float64)
        else x * (1 + 2j)
        if dtype.is_complex
        else x
    )
    for run, expected in (
        (jit(same_values), x),
        (jit(vmap(same_values)), x),
        (jit(lambda x: same_values(x[0, 1])), x[0, 1]),
    ):
        assert run(x).dtype is dtype and run(x).equal(expected)


@pytest.mark.parametrize(
    "fn",
    [sine, plain, lambda x: OWN.older(x), _accumulated],
    ids=["sine", "plain", "older", "accumulate_"],
)
def test_forward_mode_is_refused_as_by_torch(fn: Callable[..., Any]) -> None:
    """torch.func gives a tangent of zeros; torch.autograd.forward_ad raises this error for a tensor
    that requires grad.
    """
    refused = r"must implement the jvp function.*reverse mode.*register_lowering"
    through = fn if fn is not _accumulated else lambda x: (accumulate_(y := x * 1, x), y)[1]
    for run in (
        lambda: jvp(through, (X,), (X,)),
        lambda: jit(lambda x: jvp(through, (x,), (x,)))(X),
        lambda: jet(through, (X,), ((X,),)),
        lambda: jit(lambda x: linearize(through, x)[1](x))(X),
    ):
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=refused):
                run()
    if fn is sine:
        with pytest.raises(NotImplementedError, match=refused):
            jax.jvp(lambda x: vmap(through)(x), (jnp.ones(2),), (jnp.ones(2),))
        same(jvp(lambda x: x * sine(Y), (X,), (X,))[1], X * Y.sin())  # no tangent reaches it


def test_a_shape_that_depends_on_values_is_known_outside_of_jit() -> None:
    for _ in range(2):
        same(
            grad(lambda x: (positive(x.detach()).sum() * x).sum())(X),
            torch.full_like(X, X[X > 0].sum().item()),
        )


def test_an_operator_without_tensors_among_its_arguments() -> None:
    @torch.library.custom_op("test_custom::counted_up", mutates_args=())
    def made(n: int, by: float = 1.0) -> torch.Tensor:
        return numpy(lambda: np.arange(n) * by)

    made.register_fake(lambda n, by=1.0: torch.empty(n, dtype=torch.float64))
    for run in (grad(lambda x: (made(3) * x).sum()), jit(lambda x: made(3, by=1.0))):
        before = RUNS.count
        same(run(torch.ones(3, dtype=torch.float64)), torch.arange(3.0, dtype=torch.float64))
        assert RUNS.count == before + 1


# -- registrations ---------------------------------------------------------------------------------
def test_a_registered_lowering_wins() -> None:
    @torch.library.custom_op("test_custom::registered_later", mutates_args=())
    def registered_later(x: torch.Tensor) -> torch.Tensor:
        return numpy(np.exp, x)

    with pytest.raises(NoLoweringError, match="register_fake"):
        jit(registered_later)(X)
    registered_later.register_fake(torch.empty_like)
    same(jit(lambda x: registered_later(x))(X), X.exp())
    with pytest.raises(RuntimeError, match="register_autograd"):
        grad(lambda x: registered_later(x).sum())(X)
    registered_later.register_autograd(lambda ctx, g: 7 * g)
    same(grad(lambda x: registered_later(x).sum())(X), torch.full_like(X, 7.0))
    bridge.register_lowering("test_custom.registered_later")(jnp.exp)
    before = RUNS.count
    same(jit(lambda x: registered_later(x))(X), X.exp())
    assert RUNS.count == before


# -- threads ---------------------------------------------------------------------------------------
def test_threads_that_run_programs_with_kernels_wait_for_nothing() -> None:
    """A kernel takes Python's lock in a thread of XLA's, while the threads that called wait without
    it.
    """
    mapped, wrong = jit(vmap(grad(lambda x: product(sine(x), x).sum()))), []
    theirs = jax.jit(jax.grad(lambda x: jit(_sum_of_sines)(x)))

    def work(number: int) -> None:
        own = jit(lambda x: sine(x) + number)
        for k in range(10):
            x = torch.full((4, 50), float(number + k), dtype=torch.float64)
            found = [mapped(x), own(x), torch.from_numpy(np.array(theirs(jnp.full(3, float(k)))))]
            expected = [x.cos() * x + x.sin(), x.sin() + number, torch.full((3,), float(k)).cos()]
            wrong.extend(
                k
                for f, e in zip(found, expected, strict=True)
                if not torch.allclose(f, e, atol=1e-6)
            )

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


# -- C++ -------------------------------------------------------------------------------------------
_SOURCE = """
#include <torch/extension.h>
torch::Tensor softsign(const torch::Tensor& x) { return x / (1 + x.abs()); }
TORCH_LIBRARY(test_custom_cpp, m) { m.def("softsign(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(test_custom_cpp, CPU, m) { m.impl("softsign", &softsign); }
"""


@pytest.mark.slow
def test_a_kernel_in_cpp(tmp_path: Any) -> None:
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    try:
        cpp_extension.verify_ninja_availability()
        compiler = cpp_extension.check_compiler_is_gcc(cpp_extension.get_cxx_compiler())
    except Exception as error:
        pytest.skip(f"no C++ compiler that PyTorch can use: {error}")
    if not compiler:
        pytest.skip("no C++ compiler that PyTorch can use")
    cpp_extension.load_inline(
        "test_custom_cpp", _SOURCE, is_python_module=False, build_directory=str(tmp_path)
    )
    softsign = torch.ops.test_custom_cpp.softsign
    torch.library.register_fake("test_custom_cpp::softsign", torch.empty_like)
    torch.library.register_autograd(
        "test_custom_cpp::softsign",
        lambda ctx, g: g / (1 + ctx.saved_tensors[0].abs()) ** 2,
        setup_context=save_inputs,
    )
    in_every_way(lambda x: softsign(x), X)
    in_every_way(lambda x: softsign(x), X.float())
    in_the_users_own_jax(lambda x: softsign(x), (X,), True)
