"""autograd.Function: its rules for vmap, outputs that are inputs, and the names of its nodes,
beside torch.func.
"""

from __future__ import annotations

import itertools
import re
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
    given = {
        "forward": lambda x: x * 2,
        "setup_context": lambda ctx, inputs, output: None,
        "backward": lambda ctx, g: g * 2,
        **methods,
    }
    attributes = {name: staticmethod(m) if callable(m) else m for name, m in given.items()}
    return type("Rule", (torch.autograd.Function,), attributes)


def _told(told: list[Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        shapes = [
            tuple(x.shape)
            for x in torch.utils._pytree.tree_leaves(args)
            if isinstance(x, torch.Tensor)
        ]
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
    "nested": (
        lambda T, F, x: T.vmap(T.vmap(F.apply, in_dims=1), in_dims=2)(x),
        lambda d, x: (x * 2, d[0]),
        {},
    ),
    "nested, and the outer one alone maps": (
        lambda T, F, x: T.vmap(lambda a: T.vmap(lambda b: F.apply(a) + b)(torch.zeros(5, 3, 4)))(x),
        _double,
        {},
    ),
    "after an operator": (lambda T, F, x: T.vmap(lambda a: F.apply(a.sin().t()))(x), _double, {}),
    "one argument is not mapped": (
        lambda T, F, x: T.vmap(F.apply, in_dims=(2, None))(x, x[..., 0]),
        _sum,
        {"forward": lambda x, y: x * y},
    ),
    "numbers": (
        lambda T, F, x: T.vmap(lambda a: F.apply(a, 3))(x),
        lambda d, x, n: (x * n, d[0]),
        {"forward": lambda x, n: x * n},
    ),
    "a list of tensors": (
        lambda T, F, x: T.vmap(F.apply)(x, [x, x]),
        lambda d, x, ys: ((x, ys[0] + ys[1]), (d[0], d[1][0])),
        {"forward": lambda x, ys: None},
    ),
    "a forward without result": (
        lambda T, F, x: T.vmap(F.apply)(x),
        _double,
        {"forward": lambda x: None},
    ),
    "a forward that raises": (
        lambda T, F, x: T.vmap(F.apply)(x),
        _double,
        {"forward": lambda x: 1 / 0},
    ),
    "no out_dim": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: (torch.zeros(3, 4), None), {}),
    "no out_dim of two": (
        lambda T, F, x: T.vmap(F.apply)(x),
        lambda d, x: ((torch.zeros(3), torch.ones(4)), None),
        {"forward": lambda x: (x[0], x[1])},
    ),
    "another out_dim": (
        lambda T, F, x: T.vmap(F.apply)(x),
        lambda d, x: (x.movedim(0, -1) * 2, -1),
        {},
    ),
    "the input": (
        lambda T, F, x: T.vmap(F.apply)(x),
        lambda d, x: (x, d[0]),
        {"forward": lambda x: x.view_as(x)},
    ),
    "randomness same": (lambda T, F, x: T.vmap(F.apply, randomness="same")(x), _double, {}),
    "randomness different": (
        lambda T, F, x: T.vmap(F.apply, randomness="different")(x),
        _double,
        {},
    ),
    "chunks": (lambda T, F, x: T.vmap(F.apply, chunk_size=2, in_dims=2)(x), _double, {}),
    "nothing is mapped": (
        lambda T, F, x: T.vmap(lambda a: F.apply(torch.ones(2)) * a[0, 0])(x),
        _double,
        {},
    ),
    "gradient of vmap": (
        lambda T, F, x: T.grad(lambda a: T.vmap(F.apply, in_dims=1)(a).sin().sum())(x),
        _double,
        {},
    ),
}
ERRORS: dict[str, tuple[Any, Any, Any]] = {
    "one return": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: x, {}),
    "four returns": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: (x, x, 0, 0), {}),
    "out_dims of another tree": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: (x, (None,)), {}),
    "out_dims of another tree than a list": (
        lambda T, F, x: T.vmap(F.apply)(x),
        lambda d, x: ([x], (None,)),
        {"forward": lambda x: [x.clone()]},
    ),
    "two rules": (lambda T, F, x: T.vmap(F.apply)(x), _double, {"generate_vmap_rule": True}),
    "no rule": (lambda T, F, x: T.vmap(F.apply)(x), None, {}),
    "no rule, in grad": (lambda T, F, x: T.vmap(T.grad(lambda a: F.apply(a).sum()))(x), None, {}),
    "a rule that raises": (lambda T, F, x: T.vmap(F.apply)(x), lambda d, x: {}["missing"], {}),
    "an input that is saved": (
        lambda T, F, x: T.grad(lambda a: F.apply(a).sum())(x),
        None,
        {
            "forward": lambda x: x,
            "setup_context": lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        },
    ),
    "an input that is saved as the output": (
        lambda T, F, x: T.grad(lambda a: F.apply(a).sum())(x),
        None,
        {
            "forward": lambda x: x,
            "setup_context": lambda ctx, inputs, output: ctx.save_for_forward(output),
        },
    ),
}
WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "un-jitted": lambda f: f,
    "jit": jit,
}


def _both(case: tuple[Any, Any, Any], way: str) -> tuple[Any, Any, Any, Any]:
    """(theirs, what their rule was told, ours, what our rule was told); theirs and ours may be
    errors.
    """
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


def _without_repeats(told: list[Any]) -> list[Any]:
    return [found for found, _ in itertools.groupby(told)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_told_what_torch_tells_it(name: str, way: str) -> None:
    theirs, they_told, ours, we_told = _both(RULES[name], way)
    assert not isinstance(theirs, Exception), theirs
    if isinstance(ours, Exception):
        raise ours
    same(ours, theirs, rtol=1e-5, atol=1e-6)
    # chunks that are alike run one program, made once
    they_told, we_told = _without_repeats(they_told), _without_repeats(we_told)
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
        forward=(lambda x: x.mul_(2)) if dirty else (lambda x: x),
        setup_context=setup_context,
        backward=lambda ctx, g: g * 3,
        jvp=(lambda ctx, t: t.mul_(5)) if dirty else (lambda ctx, t: t.view_as(t)),
        generate_vmap_rule=True,
    )

    def f(x: torch.Tensor) -> Any:
        y = x.sin()
        return (F.apply(y) * y).sum()

    for call in (
        lambda T, x: T.grad(f)(x),
        lambda T, x: T.jvp(f, (x,), (x.cos(),)),
        lambda T, x: T.vmap(T.grad(f))(x),
        lambda T, x: T.vmap(lambda a: F.apply(a.cos()))(x),
        lambda T, x: T.vjp(f, x)[1](torch.tensor(2.0)),
    ):
        try:
            expected = call(torch.func, _X)
        except RuntimeError:  # its generated rules for vmap lose which argument is dirty
            assert dirty
            continue
        same(
            WAYS[way](lambda x, call=call: call(torchfunc_jax, x))(_X),
            expected,
            rtol=1e-5,
            atol=1e-5,
        )


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
        same(g, torch.tensor(12.0), graph=False)
        with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
            g.backward()


def test_numbers_after_a_function_with_its_own_vmap():
    """Its vmap applies the class itself, so that the forward that was written down, with its
    numbers, never runs again.
    """

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
    pushed = wrap(lambda x: torchfunc_jax.jvp(Squared.apply, (x,), (x,))[1])(x)
    try:
        pushed.sum().backward()
    except RuntimeError as error:
        assert "not linear in its tangents" in str(error)
    else:
        same(x.grad, 3 * x.detach() ** 2)


GIVEN_AS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: torchfunc_jax.grad(lambda x: f(x).sum()),
    "jit": lambda f: jit(torchfunc_jax.grad(lambda x: f(x).sum())),
    "vjp": lambda f: lambda x: torchfunc_jax.vjp(f, x)[1](torch.ones(3))[0],
    "vmap of grad": lambda f: (
        lambda x: torchfunc_jax.vmap(torchfunc_jax.grad(lambda x: f(x).sum()))(x[None])[0]
    ),
    "backward": lambda f: (
        lambda x: torch.autograd.grad(
            torchfunc_jax.vmap(f)(x := x.clone().requires_grad_()).sum(), x
        )[0]
    ),
    "in PyTorch": lambda f: torchfunc_jax.grad(
        lambda x: f(x.as_strided(x.shape, x.stride())).sum()
    ),
}


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int32, torch.complex64], ids=str
)
@pytest.mark.parametrize("way", GIVEN_AS)
def test_a_gradient_of_another_dtype_is_cast_or_refused(dtype: torch.dtype, way: str) -> None:
    F = function(backward=lambda ctx, g: (g * 2).to(dtype), generate_vmap_rule=True)
    x = torch.arange(3.0)
    if dtype.is_complex:
        refused = r"a complex one for an input of dtype torch\.float32"
        if way == "in PyTorch":
            with pytest.raises(RuntimeError) as theirs:
                torch.func.grad(lambda x: F.apply(x).sum())(x)
            refused = re.escape(str(theirs.value))
        with pytest.raises(RuntimeError, match=refused):
            GIVEN_AS[way](F.apply)(x)
    else:
        same(GIVEN_AS[way](F.apply)(x), torch.func.grad(lambda x: F.apply(x).sum())(x))


@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (4,), (1, 3), (2, 3), (2, 1), (3, 1), (2, 1, 3), (0, 3)]
)
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
        return (
            torchfunc_jax.jit(slope)(x)
            if way == "jit"
            else slope(x)
            if way == "grad"
            else torchfunc_jax.vmap(slope)(x[None])[0]
        )

    if expected is None:
        with pytest.raises(RuntimeError, match=r"expected shape compatible with \[3\]"):
            found()
    else:
        torch.testing.assert_close(found(), expected)


def _saves_what_is_needed(ctx: Any, inputs: Any, output: Any) -> None:
    x, w = inputs
    ctx.save_for_backward(
        w if ctx.needs_input_grad[0] else None, x if ctx.needs_input_grad[1] else None
    )


def _of_what_is_needed(ctx: Any, g: torch.Tensor) -> Any:
    w, x = ctx.saved_tensors
    return g * w if ctx.needs_input_grad[0] else None, g * x if ctx.needs_input_grad[1] else None


def _by_the_first_alone(ctx: Any, g: torch.Tensor) -> Any:
    if ctx.needs_input_grad[1]:
        raise RuntimeError("no derivative by the second argument")
    return g * ctx.saved_tensors[1], None


_saves_both = lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
#: The methods of a product x * w.
PRODUCTS: dict[str, dict[str, Any]] = {
    "saves what is needed": {
        "setup_context": _saves_what_is_needed,
        "backward": _of_what_is_needed,
    },
    "asks in backward": {
        "setup_context": lambda ctx, i, o: ctx.save_for_backward(i[1], i[0]),
        "backward": _of_what_is_needed,
    },
    "refuses the second": {"setup_context": _saves_both, "backward": _by_the_first_alone},
}
_W = torch.tensor([2.0, 3.0])
#: (T, the product, x) -> gradients; "second": those that differentiate by the second argument too.
NEEDS: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "grad": lambda T, F, x: T.grad(lambda x, w: F(x, w).sum())(x, _W),
    "grad, captured": lambda T, F, x: T.grad(lambda x: F(x, _W).sum())(x),
    "vjp": lambda T, F, x: T.vjp(lambda x: F(x, _W), x)[1](_W),
    "jacrev": lambda T, F, x: T.jacrev(lambda x: F(x, _W))(x),
    "vmap of grad": lambda T, F, x: T.vmap(T.grad(F))(x, _W),
    "grad of grad": lambda T, F, x: T.grad(
        lambda x: T.grad(lambda x: (F(x, _W) ** 2).sum())(x).sum()
    )(x),
    "backward of vmap": lambda T, F, x: _gradients(lambda x: T.vmap(F)(x, _W), x),
    "second: argnums": lambda T, F, x: T.grad(lambda x, w: F(x, w).sum(), argnums=(0, 1))(x, _W),
    "second: captured": lambda T, F, x: _gradients(
        lambda w: T.grad(lambda x: (F(x, w) ** 2).sum())(x), _W
    ),
    "second: value and gradient": lambda T, F, x: T.grad(
        lambda w: sum(map(torch.sum, T.grad_and_value(lambda x: (F(x, w) ** 2).sum())(x)))
    )(_W),
    "second: an argument that is not differentiated": lambda T, F, x: T.grad(
        lambda w: sum(map(torch.sum, T.grad_and_value(lambda x, w: (F(x, w) ** 2).sum())(x, w)))
    )(_W),
}


def _gradients(function: Callable[..., Any], *given: torch.Tensor) -> Any:
    leaves = [t.clone().requires_grad_() for t in given]
    return torch.autograd.grad(function(*leaves).sum(), leaves)


def _alike(call: Callable[[Any], Any], *given: torch.Tensor, way: str) -> None:
    """Ours, twice and with other numbers, gives what torch.func's gives,
    or raises the same error.
    """
    run = WAYS[way](lambda *given: call(torchfunc_jax, *given))
    for k in (1.0, 1.0, -0.5):
        now = [k * t for t in given]
        try:
            theirs = call(torch.func, *now)
        except (RuntimeError, NotImplementedError) as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                run(*now)
        else:
            same(run(*now), theirs)


@pytest.mark.thin(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NEEDS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_needs_input_grad(product: str, name: str, way: str) -> None:
    F = function(forward=lambda x, w: x * w, generate_vmap_rule=True, **PRODUCTS[product])
    _alike(lambda T, x: NEEDS[name](T, F.apply, x), torch.tensor([1.0, 4.0]), way=way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
@pytest.mark.parametrize("output", [0, 1, 2])
def test_cotangents_that_are_none(output: int, argnums: Any, way: str) -> None:
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        # zero by zero, if it were zeros
        return first, None if second is None else second / (2 * ctx.saved_tensors[0])

    F = function(
        forward=lambda x, y: (x * 1, y.sqrt()),
        backward=backward,
        setup_context=lambda ctx, i, o: (
            ctx.set_materialize_grads(False),
            ctx.save_for_backward(o[1]),
        ),
    )
    used = lambda outs: outs[output] ** 2 if output < 2 else outs[0] * outs[1]
    y = torch.tensor(0.0 if output == 0 else 4.0)
    call = lambda T, x: T.grad(lambda x, y: used(F.apply(x, y)), argnums=argnums)(x, y)
    _alike(call, torch.tensor(2.0), way=way)


#: Uses of a Function without derivatives.
UNDIFFERENTIATED: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "grad": lambda T, F, x: T.grad(lambda x: F(x) + x)(x),
    "vjp": lambda T, F, x: T.vjp(F, x)[1](x),
    "jvp": lambda T, F, x: T.jvp(F, (x,), (x,)),
    "jacrev": lambda T, F, x: T.jacrev(F)(x),
    "jacfwd": lambda T, F, x: T.jacfwd(F)(x),
    "value alone": lambda T, F, x: T.grad_and_value(lambda x: (x * 2, F(x)), has_aux=True)(x),
    "not used": lambda T, F, x: T.grad(lambda x: (F(x), x)[1])(x),
    "detached": lambda T, F, x: T.grad(lambda x: F(x.detach()) * x)(x),
    "vmap": lambda T, F, x: T.vmap(F)(torch.stack([x, x + 1])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", UNDIFFERENTIATED)
def test_a_function_without_derivatives(name: str, way: str) -> None:
    methods = {
        "setup_context": staticmethod(lambda ctx, i, o: None),
        "forward": staticmethod(lambda x: x**2),
        "generate_vmap_rule": True,
    }
    F = type("NoDerivative", (torch.autograd.Function,), methods)
    _alike(lambda T, x: UNDIFFERENTIATED[name](T, F.apply, x), torch.tensor(2.0), way=way)


@pytest.mark.parametrize("make", ["vmap", "jit"])
def test_the_backward_pass_of_a_function_without_derivatives(make: str) -> None:
    methods = {
        "setup_context": staticmethod(lambda ctx, i, o: None),
        "forward": staticmethod(lambda x: x**2),
        "generate_vmap_rule": True,
    }
    F = type("NoDerivative", (torch.autograd.Function,), methods)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(
        NotImplementedError, match="You must implement either the backward or vjp method"
    ):
        getattr(torchfunc_jax, make)(F.apply)(x).sum().backward()


ASKING: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "if": lambda g, x: g * 2 if x.sum() > 0 else g,
    "item": lambda g, x: g * x.sum().item(),
    "nonzero": lambda g, x: g * len(x.nonzero()),
}


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("name", ["grad", "vjp", "grad of grad", "jvp"])
def test_derivatives_that_ask_for_values(name: str, asking: str) -> None:
    ask = ASKING[asking]
    F = function(
        setup_context=lambda ctx, i, o: (ctx.save_for_backward(*i), ctx.save_for_forward(*i)),
        backward=lambda ctx, g: ask(g, ctx.saved_tensors[0]),
        jvp=lambda ctx, t: ask(t, ctx.saved_tensors[0]),
    ).apply
    calls: dict[str, Callable[[Any, torch.Tensor], Any]] = {
        "grad": lambda T, x: T.grad(lambda x: F(x).sum())(x),
        "vjp": lambda T, x: T.vjp(F, x)[1](x),
        "grad of grad": lambda T, x: T.grad(lambda x: T.grad(lambda x: (F(x) ** 2).sum())(x).sum())(
            x
        ),
        "jvp": lambda T, x: T.jvp(F, (x,), (x,)),
    }
    _alike(calls[name], torch.tensor([1.0, 2.0, 0.0]), way="un-jitted")
