"""autograd.Function: its rules for vmap, outputs that are inputs, and the names of its nodes, beside torch.func."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same

import torchfunc_jax
from torchfunc_jax import jit

_X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


def function(**methods: Any) -> type[torch.autograd.Function]:
    """A Function with these static methods; forward doubles its arguments if none is given."""
    given = {"forward": lambda x: x * 2, "setup_context": lambda ctx, inputs, output: None, "backward": lambda ctx, g: g * 2, **methods}
    attributes = {name: staticmethod(m) if callable(m) else m for name, m in given.items()}
    return type("Rule", (torch.autograd.Function,), attributes)


def _told(told: list[Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        shapes = [tuple(x.shape) for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        told.append((info.batch_size, info.randomness, in_dims, shapes))
        return answer(in_dims, *args)

    return rule


_double = lambda in_dims, x: (x * 2, in_dims[0])
_sum = lambda in_dims, x, y: (x.movedim(in_dims[0], 0) * y, 0)
#: (T, Function with this vmap, x) -> the result, with the Function's vmap and forward.
RULES: dict[str, tuple[Any, Any, Any]] = {
    "dim 0": (lambda T, F, x: T.vmap(F.apply)(x), _double, {}),
    "dim 1": (lambda T, F, x: T.vmap(F.apply, in_dims=1)(x), _double, {}),
    "dim -1": (lambda T, F, x: T.vmap(F.apply, in_dims=-1, out_dims=-1)(x), _double, {}),
    "nested": (lambda T, F, x: T.vmap(T.vmap(F.apply, in_dims=1), in_dims=2)(x), lambda d, x: (x * 2, d[0]), {}),
    "nested, and the outer one alone maps": (
        lambda T, F, x: T.vmap(lambda a: T.vmap(lambda b: F.apply(a) + b)(torch.zeros(5, 3, 4)))(x), _double, {}),
    "after an operator": (lambda T, F, x: T.vmap(lambda a: F.apply(a.sin().t()))(x), _double, {}),
    "one argument is not mapped": (
        lambda T, F, x: T.vmap(F.apply, in_dims=(2, None))(x, x[..., 0]), _sum, {"forward": lambda x, y: x * y}),
    "numbers": (
        lambda T, F, x: T.vmap(lambda a: F.apply(a, 3))(x), lambda d, x, n: (x * n, d[0]), {"forward": lambda x, n: x * n}),
    "a list of tensors": (
        lambda T, F, x: T.vmap(F.apply)(x, [x, x]), lambda d, x, ys: ((x, ys[0] + ys[1]), (d[0], d[1][0])),
        {"forward": lambda x, ys: None}),
    "a forward without result": (lambda T, F, x: T.vmap(F.apply)(x), _double, {"forward": lambda x: None}),
    "a forward that raises": (lambda T, F, x: T.vmap(F.apply)(x), _double, {"forward": lambda x: 1 / 0}),
    "no out_dim": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: (torch.zeros(3, 4), None), {}),
    "no out_dim of two": (
        lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: ((torch.zeros(3), torch.ones(4)), None), {"forward": lambda x: (x[0], x[1])}),
    "another out_dim": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: (x.movedim(0, -1) * 2, -1), {}),
    "the input": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: (x, d[0]), {"forward": lambda x: x.view_as(x)}),
    "randomness same": (lambda T, F, x: T.vmap(F.apply, randomness="same")(x), _double, {}),
    "randomness different": (lambda T, F, x: T.vmap(F.apply, randomness="different")(x), _double, {}),
    "chunks": (lambda T, F, x: T.vmap(F.apply, chunk_size=2, in_dims=2)(x), _double, {}),
    "nothing is mapped": (lambda T, F, x: T.vmap(lambda a: F.apply(torch.ones(2)) * a[0, 0])(x), _double, {}),
    "gradient of vmap": (lambda T, F, x: T.grad(lambda a: T.vmap(F.apply, in_dims=1)(a).sin().sum())(x), _double, {}),
}
ERRORS: dict[str, tuple[Any, Any, Any]] = {
    "one return": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: x, {}),
    "four returns": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: (x, x, 0, 0), {}),
    "out_dims of another tree": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: (x, (None,)), {}),
    "out_dims of another tree than a list": (
        lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: ([x], (None,)), {"forward": lambda x: [x.clone()]}),
    "two rules": (lambda T, F, x: T.vmap(F.apply)(x), _double, {"generate_vmap_rule": True}),
    "no rule": (lambda T, F, x: T.vmap(F.apply)(x), None, {}),
    "no rule, in grad": (lambda T, F, x: T.vmap(T.grad(lambda a: F.apply(a).sum()))(x), None, {}),
    "a rule that raises": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: {}["missing"], {}),
    "an input that is saved": (
        lambda T, F, x: T.grad(lambda a: F.apply(a).sum())(x), None,
        {"forward": lambda x: x, "setup_context": lambda ctx, inputs, output: ctx.save_for_backward(*inputs)}),
    "an input that is saved as the output": (
        lambda T, F, x: T.grad(lambda a: F.apply(a).sum())(x), None,
        {"forward": lambda x: x, "setup_context": lambda ctx, inputs, output: ctx.save_for_forward(output)}),
}
WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {"un-jitted": lambda f: f, "jit": jit}


def _both(case: tuple[Any, Any, Any], way: str) -> tuple[Any, Any, Any, Any]:
    """(theirs, what their rule was told, ours, what our rule was told); theirs and ours may be errors."""
    call, rule, methods = case
    found: list[Any] = []
    for T, make in ((torch.func, WAYS["un-jitted"]), (torchfunc_jax, WAYS[way])):
        told: list[Any] = []
        F = function(**methods, **({} if rule is None else {"vmap": _told(told, rule)}))
        try:
            out = make(lambda x, T=T, F=F: call(T, F, x))(_X)
        except Exception as error:
            out = error
        found += [out, told]
    return tuple(found)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_told_what_torch_tells_it(name: str, way: str) -> None:
    theirs, they_told, ours, we_told = _both(RULES[name], way)
    assert not isinstance(theirs, Exception), theirs
    if isinstance(ours, Exception):
        raise ours
    same(ours, theirs, rtol=1e-5, atol=1e-6)
    assert we_told[: len(they_told)] == they_told or they_told == we_told[-len(they_told) :]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ERRORS)
def test_a_wrong_rule_raises_torchs_error(name: str, way: str) -> None:
    theirs, _, ours, _ = _both(ERRORS[name], way)
    assert isinstance(theirs, Exception), theirs
    text = str(theirs).replace("A input that", "An input that")  # torch before 2.13
    assert type(ours) is type(theirs) and str(ours) == text, (ours, theirs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("saves", ["neither", "input"])
@pytest.mark.parametrize("dirty", [True, False])
def test_an_output_that_is_an_input(dirty: bool, saves: str, way: str) -> None:
    if saves == "input" and not dirty:
        pytest.skip("refused: see above")

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        if dirty:
            ctx.mark_dirty(inputs[0])
        if saves == "input":
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

    F = function(
        forward=(lambda x: x.mul_(2)) if dirty else (lambda x: x), setup_context=setup_context, backward=lambda ctx, g: g * 3,
        jvp=(lambda ctx, t: t.mul_(5)) if dirty else (lambda ctx, t: t.view_as(t)), generate_vmap_rule=True,
    )

    def f(x: torch.Tensor) -> Any:
        y = x.sin()
        return (F.apply(y) * y).sum()

    for call in (
        lambda T, x: T.grad(f)(x), lambda T, x: T.jvp(f, (x,), (x.cos(),)), lambda T, x: T.vmap(T.grad(f))(x),
        lambda T, x: T.vmap(lambda a: F.apply(a.cos()))(x), lambda T, x: T.vjp(f, x)[1](torch.tensor(2.0)),
    ):
        try:
            expected = call(torch.func, _X)
        except RuntimeError:  # its generated rules for vmap lose which argument is dirty
            assert dirty
            continue
        same(WAYS[way](lambda x, call=call: call(torchfunc_jax, x))(_X), expected, rtol=1e-5, atol=1e-5)


def test_the_names_of_nodes() -> None:
    class Doubled(torch.autograd.Function):
        forward = staticmethod(lambda x: x * 2)
        setup_context = staticmethod(lambda ctx, inputs, output: None)
        backward = staticmethod(lambda ctx, g: g * 2)
        generate_vmap_rule = True

    def names(T: Any, x: torch.Tensor) -> list[str]:
        found: list[str] = []

        def f(x: torch.Tensor) -> torch.Tensor:
            y = Doubled.apply(x)
            for node in (y.grad_fn, (x * 2).grad_fn, x.sin().grad_fn):
                found.extend([type(node).__name__, node.name()])
            return y.sum()

        T.grad(f)(x)
        return found

    assert names(torchfunc_jax, _X) == names(torch.func, _X)
    assert names(torchfunc_jax, _X)[0] == "DoubledGeneratedBackward"


def test_once_differentiable_under_torchs_autograd() -> None:
    def forward(x: torch.Tensor) -> Any:
        array = x.cpu().numpy()
        return torch.tensor(array**3), array

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.array = output[1]

    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> torch.Tensor:
        return torch.tensor(3 * ctx.array**2)

    F = function(forward=forward, setup_context=setup_context, backward=backward)
    x = torch.tensor(2.0, requires_grad=True)
    for T in (torch.func, torchfunc_jax):
        _, pull = T.vjp(lambda a: F.apply(a)[0], x)
        (g,) = pull(torch.tensor(1.0, requires_grad=True))
        same(g, torch.tensor(12.0))
        with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
            g.backward()


def test_numbers_after_a_function_with_its_own_vmap():
    """Its vmap applies the class itself, so that the forward that was written down, with its numbers, never runs again."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(a, s):
            return (a * 4).round() / 5

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g, None

        @staticmethod
        def vmap(info, in_dims, a, s):
            return Rounded.apply(a.movedim(in_dims[0], 0), s), 0

    def f(x):
        return Rounded.apply(x * 3, -1.2) * 7 + 2.5

    for k in range(3):
        x = torch.randn(2 + k, 3)
        torch.testing.assert_close(torchfunc_jax.vmap(f)(x), torch.func.vmap(f)(x))


class Squared(torch.autograd.Function):
    """Its jvp is not linear in the tangent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_forward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g

    @staticmethod
    def jvp(ctx: Any, d: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return d * d * ctx.saved_tensors[0]


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["plain", "jit"])
def test_the_backward_pass_of_a_rule_that_is_not_linear(wrap: Callable[..., Any]) -> None:
    x = torch.tensor([0.3, -0.8], requires_grad=True)
    with pytest.raises(RuntimeError, match="not linear in its tangents"):
        wrap(lambda x: torchfunc_jax.jvp(Squared.apply, (x,), (x,))[1])(x).sum().backward()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (1, 3), (2, 3), (2, 1), (3, 1), (2, 1, 3), (0, 3)])
@pytest.mark.parametrize("way", ["grad", "jit", "vmap", "backward"])
def test_a_gradient_of_another_shape_is_summed_or_refused(shape: tuple[int, ...], way: str) -> None:
    class Gives(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + cotangent.sum()

    x = torch.arange(3.0)
    expected: Any = None
    try:
        expected = torch.func.grad(lambda x: Gives.apply(x).sum())(x)
    except RuntimeError as error:
        assert "expected shape compatible with [3]" in str(error)

    def found() -> torch.Tensor:
        if way == "backward":
            leaf = x.clone().requires_grad_()
            torchfunc_jax.jit(Gives.apply)(leaf).sum().backward()
            return leaf.grad  # type: ignore[return-value]
        slope = torchfunc_jax.grad(lambda x: Gives.apply(x).sum())
        return torchfunc_jax.jit(slope)(x) if way == "jit" else slope(x) if way == "grad" else torchfunc_jax.vmap(slope)(x[None])[0]

    if expected is None:
        with pytest.raises(RuntimeError, match=r"expected shape compatible with \[3\]"):
            found()
    else:
        torch.testing.assert_close(found(), expected)
