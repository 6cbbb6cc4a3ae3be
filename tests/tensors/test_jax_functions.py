"""JAX functions in torch: derivatives, maps, jit and records against the same functions written in
torch; dtypes, arguments, errors.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from agreement import Traces, same
from jax import lax
from jax.experimental import pallas as pl
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import bridge
import torchfunc_jax

Function = Callable[..., Any]


# -- derivatives and maps --------------------------------------------------------------------------
@jax.custom_vjp
def cube(x: jax.Array) -> jax.Array:
    """x ** 3; its backward is a rule with a constant of numpy's, which would be float64 if 64-bit
    types were enabled.
    """
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, ct: (ct * np.sqrt(9.0) * x**2,))


@jax.custom_jvp
def square(x: jax.Array) -> jax.Array:
    return x**2


square.defjvp(
    lambda primals, tangents: (square(primals[0]), np.sqrt(4.0) * primals[0] * tangents[0])
)


def _doubled(ref: Any, out: Any) -> None:
    out[...] = 2 * ref[...]


def _kernel(x: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    block = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        _doubled,
        out_shape=shape,
        grid=x.shape[:1],
        in_specs=[block],
        out_specs=block,
        interpret=True,
    )(x)


@jax.custom_vjp
def kernel(x: jax.Array) -> jax.Array:
    """2 * x by a Pallas kernel, and its backward by another call of it."""
    return _kernel(x)


kernel.defvjp(lambda x: (kernel(x), None), lambda _, ct: (kernel(ct),))


def _scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, row: (jnp.tanh(carry + row), carry * row), x[0], x)[1]


def _looped(x: torch.Tensor) -> torch.Tensor:
    carry, rows = x[0], []
    for row in x:
        rows.append(carry * row)
        carry = torch.tanh(carry + row)
    return torch.stack(rows)


X, Y = (
    torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3),
    torch.linspace(0.5, 1, 3, dtype=torch.float64),
)
#: By a name: a function in JAX, the same in torch, its arguments, and whether it has a forward
#: mode.
CASES: dict[str, tuple[Function, Function, tuple[torch.Tensor, ...], bool]] = {
    "operators": (
        lambda x, y: jnp.sin(x) * jnp.exp(y),
        lambda x, y: x.sin() * y.exp(),
        (X, Y),
        True,
    ),
    "a matrix product": (
        lambda x, y: jnp.tanh(x @ x.T) * y.sum(),
        lambda x, y: (x @ x.T).tanh() * y.sum(),
        (X, Y),
        True,
    ),
    "a scan": (_scanned, _looped, (X,), True),
    "a custom_vjp": (lambda x: cube(x) + x, lambda x: x**3 + x, (X,), False),
    "a custom_jvp": (lambda x: square(jnp.sin(x)), lambda x: x.sin() ** 2, (X,), True),
    "Pallas": (lambda x: kernel(jnp.sin(x)), lambda x: 2 * x.sin(), (X,), False),
    "jax.jit inside": (jax.jit(lambda x: jax.nn.softmax(x)), lambda x: x.softmax(-1), (X,), True),
}


def _loss(f: Function) -> Function:
    return lambda *args: (f(*args) * X[..., :1].cos()).square().sum()


def _lanes(args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (torch.stack([args[0], args[0] + 1]), *args[1:])


def _dims(args: tuple[torch.Tensor, ...]) -> tuple[int | None, ...]:
    return (0, *[None] * (len(args) - 1))


#: By a name: (namespace, function, arguments) -> what is compared.
REVERSE: dict[str, Callable[[Any, Function, tuple[torch.Tensor, ...]], Any]] = {
    "grad": lambda m, f, args: m.grad(_loss(f), tuple(range(len(args))))(*args),
    "vjp": lambda m, f, args: (lambda out, pull: pull(torch.ones_like(out)))(*m.vjp(f, *args)),
    "jacrev": lambda m, f, args: m.jacrev(f)(*args),
    "vmap": lambda m, f, args: m.vmap(f, _dims(args), out_dims=1)(*_lanes(args)),
    "vmap of grad": lambda m, f, args: m.vmap(m.grad(_loss(f)), _dims(args))(*_lanes(args)),
    "grad of vmap": lambda m, f, args: m.grad(lambda *a: m.vmap(f, _dims(args))(*a).square().sum())(
        *_lanes(args)
    ),
    "grad of grad": lambda m, f, args: m.grad(lambda *a: m.grad(_loss(f))(*a).square().sum())(
        *args
    ),
}
FAST = {"operators", "a custom_vjp"}  # the others run with the slow tests
WITH_FORWARD: dict[str, Callable[[Any, Function, tuple[torch.Tensor, ...]], Any]] = {
    "jvp": lambda m, f, args: m.jvp(f, args, tuple([a.cos() for a in args])),
    "jacfwd": lambda m, f, args: m.jacfwd(f)(*args),
    "hessian": lambda m, f, args: m.hessian(_loss(f))(*args),
    "jvp of vmap": lambda m, f, args: m.jvp(
        lambda x: m.vmap(lambda v: f(v, *args[1:]))(x), _lanes(args)[:1], _lanes(args)[:1]
    ),
}


@pytest.mark.parametrize(
    "name",
    [n if n in (*FAST, "Pallas") else pytest.param(n, marks=pytest.mark.slow) for n in CASES],
)
def test_torch_autograd(name: str) -> None:
    in_jax, in_torch, args, forward = CASES[name]
    f = bridge.from_jax(in_jax)
    leaves = tuple([a.clone().requires_grad_() for a in args])
    same(f(*leaves), in_torch(*leaves))
    gradcheck(f, leaves, check_forward_ad=forward)
    gradgradcheck(f, leaves)
    assert not f(*args).requires_grad
    with torch.no_grad():
        assert not f(*leaves).requires_grad


WAYS = [
    pytest.param(name, way, marks=() if name in FAST else pytest.mark.slow)
    for name, case in CASES.items()
    for way in [*REVERSE, *WITH_FORWARD]
    if case[3] or way != "hessian"
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_transforms(name: str, way: str) -> None:
    """Under torch.func's transform, under ours un-jitted and jitted."""
    in_jax, in_torch, args, forward = CASES[name]
    run = (REVERSE | WITH_FORWARD)[way]
    f = bridge.from_jax(in_jax)
    if way in WITH_FORWARD and not forward:
        for space in (torch.func, torchfunc_jax):
            with pytest.raises(
                (TypeError, NotImplementedError), match=r"\(jvp\) to a custom_vjp|forward mode AD"
            ):
                run(space, f, args)
        return
    expected = run(torch.func, in_torch, args)
    same(run(torch.func, f, args), expected)
    same(run(torchfunc_jax, f, args), expected)
    same(torchfunc_jax.jit(lambda *a: run(torchfunc_jax, f, a))(*args), expected)


def test_forward_mode_of_torch() -> None:
    f = bridge.from_jax(lambda x, y: (jnp.sin(x) * y.sum(), jnp.argmax(x)))
    with forward_ad.dual_level():
        out, place = f(forward_ad.make_dual(X, X), Y)
        same(forward_ad.unpack_dual(out).tangent, X.cos() * X * Y.sum())
        assert forward_ad.unpack_dual(place).tangent is None and int(place) == 5


@pytest.mark.parametrize("name", ["operators", "a custom_vjp"])
def test_a_backward_inside_of_a_transform_of_torch(name: str) -> None:
    """The graph is made outside of it."""
    in_jax, in_torch, args, _ = CASES[name]
    cotangents, found = torch.stack([X.sin(), X.cos()]), []
    for f in (bridge.from_jax(in_jax), in_torch):
        leaves = [a.clone().requires_grad_() for a in args]
        pull = functools.partial(torch.autograd.grad, f(*leaves), leaves, retain_graph=True)
        found.append(torch.func.vmap(lambda ct, pull=pull: pull(grad_outputs=ct))(cotangents))
    same(*found)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["operators", "a custom_vjp"])
def test_gradients_that_autograd_maps(name: str, create_graph: bool) -> None:
    """is_grads_batched and vectorize; with create_graph, the derivative of the gradients too."""
    in_jax, in_torch, args, _ = CASES[name]
    cotangents, found = torch.stack([X.sin(), X.cos()]), []
    for f in (
        bridge.from_jax(lambda *a: (in_jax(*a), 2 * a[0], a[0] > 0)),
        lambda *a: (in_torch(*a), 2 * a[0], a[0] > 0),
    ):
        leaves = [a.clone().requires_grad_() for a in args]
        first, second, _ = f(*leaves)
        pull = functools.partial(torch.autograd.grad, retain_graph=True, create_graph=create_graph)
        both = pull((first, second), leaves, (cotangents, cotangents.exp()), is_grads_batched=True)
        one = pull(first, leaves, cotangents, is_grads_batched=True)
        again = pull(sum(t.square().sum() for t in (*both, *one)), leaves) if create_graph else ()
        found.append(
            (
                both,
                one,
                again,
                torch.autograd.functional.jacobian(lambda *a, f=f: f(*a)[0], args, vectorize=True),
            )
        )
    same(*found)
    loss = _loss(bridge.from_jax(in_jax))
    same(
        torch.autograd.functional.hessian(loss, args, vectorize=True),
        torch.func.hessian(_loss(in_torch), tuple(range(len(args))))(*args),
    )


def test_graphs_inside_of_traces() -> None:
    f = bridge.from_jax(cube)

    def slope(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]

    same(torchfunc_jax.vmap(slope)(X), 3 * X**2)
    same(torchfunc_jax.jit(slope)(X), 3 * X**2)
    same(
        torchfunc_jax.grad(
            lambda x: (x * torch.no_grad()(f)(x) + x * f(x).detach() + x * f(x.detach())).sum()
        )(X),
        3 * X**3,
    )


def test_jitted_code_goes_into_torch_graph() -> None:
    f, weight = (
        bridge.from_jax(lambda x, w: jnp.sin(x) * w),
        torch.ones(3, dtype=torch.float64, requires_grad=True),
    )
    for run in (
        torchfunc_jax.jit(lambda x: f(x, weight)),
        torchfunc_jax.vmap(lambda x: f(x, weight)),
    ):
        run(X).sum().backward()
        same(weight.grad, X.sin().sum(0))
        weight.grad = None


def test_records(caplog: pytest.LogCaptureFixture) -> None:
    """Un-jitted code with a JAX function in it is one program, which other numbers and lanes use
    too.
    """
    f, traces = bridge.from_jax(lambda x, s: traces.append(s) or jnp.sin(x) * s), []  # type: ignore[func-returns-value]
    with caplog.at_level(logging.INFO, "torchfunc_jax"):
        for s in (1.0, 2.0, 3.0):
            found = torchfunc_jax.vmap(torchfunc_jax.grad(lambda x, s=s: f(x, s).sum() + x.sum()))(
                X
            )
            same(found, X.cos() * s + 1)
    assert not caplog.records and len(traces) == 1
    with caplog.at_level(logging.INFO, "torchfunc_jax"):
        same(torchfunc_jax.vmap(lambda x: x + bridge.from_jax(lambda: jnp.ones(3))())(X), X + 1)
    assert "a JAX function without tensors" in caplog.text


@pytest.mark.parametrize("jit", [False, True])
def test_checkpoints(jit: bool) -> None:
    """A checkpoint counts what is saved when it runs again; a program that is made meanwhile saves
    nothing in it.
    """
    f, weight = (
        bridge.from_jax(lambda x, w: jnp.sin(x) @ w),
        torch.eye(3, dtype=torch.float64, requires_grad=True),
    )
    run, leaf = torchfunc_jax.jit(f) if jit else f, X.clone().requires_grad_()
    for _ in range(2):
        out, expected = (
            torch.utils.checkpoint.checkpoint(run, leaf * 2, weight, use_reentrant=False),
            (leaf * 2).sin() @ weight,
        )
        same(*[torch.autograd.grad(y.square().sum(), (leaf, weight)) for y in (out, expected)])


def test_hooks_on_saved_tensors_see_the_arguments() -> None:
    seen, leaf = list[torch.Tensor](), X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: 2 * t):  # type: ignore[func-returns-value]
        out = bridge.from_jax(jnp.sin)(leaf)
    same(seen, [leaf])
    same(torch.autograd.grad(out.sum(), leaf), ((2 * leaf).cos(),), graph=False)


def test_complex() -> None:
    f, z = bridge.from_jax(lambda z: jnp.abs(z) ** 2 * z), torch.randn(3, dtype=torch.complex128)
    leaf = z.clone().requires_grad_()
    gradcheck(f, (leaf,))
    gradgradcheck(f, (leaf,))
    expected = torch.func.grad(lambda z: (z.abs() ** 2 * z).real.sum())(z)
    for space in (torch.func, torchfunc_jax):
        same(space.grad(lambda z: f(z).real.sum())(z), expected)


# -- dtypes and devices ----------------------------------------------------------------------------
scaled = bridge.from_jax(lambda x, s: x * np.sqrt(4.0) + s)


@pytest.mark.parametrize(
    ("dtype", "number", "expected"),
    [
        (torch.float32, 1.0, torch.float32),
        (torch.float64, 1.0, torch.float64),
        (torch.bfloat16, 1, torch.float32),
        (torch.float16, 1.0, torch.float32),
        (torch.int32, 1, torch.float32),
        (torch.int64, 1, torch.float32),
        (torch.bool, 1.0, torch.float32),
        (torch.complex64, 1.0, torch.complex64),
        (torch.complex128, 1.0, torch.complex128),
        (torch.float32, 1j, torch.complex64),
    ],
)
@pytest.mark.parametrize(
    "way", ["plain", "jit", pytest.param("vmap", marks=pytest.mark.slow), "operators", "torch"]
)
def test_dtypes_are_those_of_jax(
    dtype: torch.dtype, number: complex, expected: torch.dtype, way: str
) -> None:
    """The constant of numpy's makes it float64 only if 64-bit types are enabled, and numbers are
    weakly typed, inside of a trace too.
    """
    x = torch.tensor([0, 1, 2]).to(dtype)
    run: Function = lambda x: scaled(x, number)
    if way == "operators":
        # requires_grad_ is not recorded
        run = torchfunc_jax.vmap(lambda x: scaled(x.requires_grad_(x.is_floating_point()), number))
    elif way == "torch":
        run = torch.func.vmap(run)
    elif way != "plain":
        run = getattr(torchfunc_jax, way)(run)
    with jax.enable_x64(expected in (torch.float64, torch.complex128)):
        in_jax = jnp.asarray(np.asarray(bridge.to_jax(x))) * np.sqrt(4.0) + number
    out = run(x)
    assert out.dtype is expected and bridge.to_jax(out).dtype == in_jax.dtype
    same(out.to(torch.complex128), x.to(torch.complex128) * 2 + number)


@pytest.mark.parametrize("wide", [False, True])
def test_64_bits_on_request(wide: bool) -> None:
    f = bridge.from_jax(lambda i, n: i + n, enable_x64=wide)
    assert f(torch.arange(3), 1).dtype is (torch.int64 if wide else torch.int32)
    if wide:
        assert f(torch.arange(1), 2**40).item() == 2**40
    else:
        with pytest.raises(
            OverflowError,
            match=r"integers of 32 bits, got 1099511627776; from_jax\(..., enable_x64=True\)",
        ):
            f(torch.arange(1), 2**40)


@pytest.mark.parametrize("f", [cube, square], ids=["custom_vjp", "custom_jvp"])
def test_rules_keep_the_types_of_their_function(f: Function) -> None:
    """A rule that runs when the trace is over gets the same 64-bit setting as the function;
    otherwise JAX refuses its float64 result.
    """
    x, run = torch.tensor([1.0, 2.0]), bridge.from_jax(f)
    expected = torch.func.vmap(torch.func.grad(lambda x: x**3 if f is cube else x**2))(x)
    leaf = x.clone().requires_grad_()
    run(leaf).sum().backward()
    same(leaf.grad, expected)
    for way in (
        torchfunc_jax.vmap(torchfunc_jax.grad(run)),
        torchfunc_jax.jit(torchfunc_jax.vmap(torchfunc_jax.grad(run))),
    ):
        same(way(x), expected)
    same(torch.func.vmap(torch.func.grad(run))(x), expected)
    (slope,) = torch.autograd.grad(run(leaf).sum(), leaf, create_graph=True)
    same(slope, expected, graph=False)
    assert slope.dtype is torch.autograd.grad(slope.sum(), leaf)[0].dtype is torch.float32


def test_meta() -> None:
    f, x = (
        bridge.from_jax(lambda x, y: (x @ y, jnp.argmax(x))),
        torch.ones(2, 3, device="meta", requires_grad=True),
    )
    out, place = f(x, torch.ones(3, 4, device="meta"))
    assert out.shape == (2, 4) and out.is_meta and not place.requires_grad
    assert torch.autograd.grad(out.sum(), x)[0].shape == (2, 3)


# -- arguments and outputs -------------------------------------------------------------------------
def test_trees() -> None:
    f = bridge.from_jax(
        lambda tree, *, scale: {"b": (tree["x"] * scale, None), "a": [tree["none"], 3]}
    )
    for run in (f, torchfunc_jax.jit(f), torchfunc_jax.functionalize(f)):
        out = run({"x": X, "none": None}, scale=2.0)
        assert (
            list(out) == ["b", "a"]
            and out["b"][1] is None
            and out["a"][0] is None
            and int(out["a"][1]) == 3
        )
        same(out["b"][0], 2 * X)


def test_static_arguments() -> None:
    f = bridge.from_jax(
        lambda x, mode, n=1, *, flag=False: getattr(jnp, mode)(x)[:n] if flag else x,
        static_argnums=(1, -1),
        static_argnames=("flag",),
    )
    for found in (
        f(X, "sin", 1, flag=True),
        torchfunc_jax.functionalize(lambda x: f(x, mode="sin", n=1, flag=True))(X),
        torchfunc_jax.jit(f, static_argnums=(1,))(X, "sin", flag=True),
    ):
        same(found, X.sin()[:1])
    same(f(X, mode="cos", n=1, flag=True), X.cos()[:1])
    assert f(X, "cos") is not X


def test_arrays_and_numbers() -> None:
    f = bridge.from_jax(lambda x, y: x + y)
    for y in (np.ones(3), jnp.ones(3), np.float32(1), 1, 1.0, True, torch.ones(3)):
        same(f(X, y), X + 1)
        same(torchfunc_jax.vmap(lambda x: f(x, y))(X), X + 1)  # noqa: B023
    assert isinstance(f(jnp.ones(3), 1.0), jax.Array)
    assert isinstance(jax.jit(lambda a: f(a, torch.ones(3)))(jnp.ones(3)), jax.Array)
    assert jax.grad(lambda a: f(a, torch.ones(3)).sum())(jnp.ones(3)).tolist() == [1, 1, 1]


def test_numbers_of_a_jitted_function() -> None:
    f = bridge.from_jax(lambda x, s: x * s)
    traces = Traces(lambda x, s: f(x, s))
    run = torchfunc_jax.jit(traces)
    for s in (1.0, 2.0, 3.0, 4.0):
        same(run(X, s), X * s)
    assert traces.count <= 3


def test_keys_come_from_the_generator_of_torch() -> None:
    f = bridge.from_jax(
        lambda x, on, key: x * jax.random.bernoulli(key, 0.5, x.shape) if on else x,
        rng="key",
        static_argnames="on",
    )
    x = torch.ones(64)
    for run in (
        lambda x: f(x, True),
        torchfunc_jax.jit(lambda x: f(x, True)),
        torchfunc_jax.functionalize(lambda x: f(x, True)),
    ):
        torch.manual_seed(0)
        first, second = run(x), run(x)
        torch.manual_seed(0)
        assert (
            torch.equal(run(x), first) and not torch.equal(first, second) and 10 < first.sum() < 54
        )
    before = torch.get_rng_state()
    f(x, False)
    assert torch.equal(torch.get_rng_state(), before)
    lanes = x.expand(2, 64)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torchfunc_jax.vmap(lambda x: f(x, True))(lanes)
    for space in (torch.func, torchfunc_jax):
        one, other = space.vmap(lambda x: f(x, True), randomness="different")(lanes)
        assert not torch.equal(one, other)
        one, other = space.vmap(lambda x: f(x, True), randomness="same")(lanes)
        assert torch.equal(one, other)


def test_a_function_is_traced_once_for_each_signature() -> None:
    traces: list[Any] = []
    f = bridge.from_jax(lambda x: traces.append(x) or x * 2)  # type: ignore[func-returns-value]
    for x in (X, X + 1, X.clone().requires_grad_(), X[:1], X.float(), X):
        same(f(x), 2 * x)
    same(torchfunc_jax.vmap(f)(torch.stack([X, X])), torch.stack([2 * X, 2 * X]))
    assert len(traces) == 3


class Scaled(torch.nn.Module):
    """A module with a JAX function in its forward, as a method too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))

    scale = bridge.from_jax(lambda _, x, w: x * w, static_argnums=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x, self.weight)


def test_in_a_module() -> None:
    model = Scaled()
    params = dict(model.named_parameters())
    loss = lambda p, x: torch.func.functional_call(model, p, (x,)).sum()
    for run in (
        torchfunc_jax.grad(loss),
        torchfunc_jax.jit(torchfunc_jax.grad(loss)),
        torch.func.grad(loss),
    ):
        same(run(params, X)["weight"].detach(), X.sum(0))
    same(torchfunc_jax.jit(model)(X), 2 * X, graph=False)


# -- errors ----------------------------------------------------------------------------------------
plus = bridge.from_jax(lambda x, y=0: x + y)
REFUSED: dict[str, tuple[Function, type[Exception], str]] = {
    "no function": (
        lambda: bridge.from_jax(3),
        TypeError,
        "fn: expected a function of jax.Arrays, got <class 'int'>",
    ),  # type: ignore[arg-type]
    "no such name": (
        lambda: bridge.from_jax(lambda x: x, static_argnames="mode"),
        TypeError,
        r"static_argnames: expected names of fn's arguments \(x\), got 'mode'",
    ),
    "a string": (
        lambda: plus(X, "a"),
        TypeError,
        r"args\[1\]: expected a tensor, an array, a number, .* got <class 'str'>; name the",
    ),
    "deep in a tree": (
        lambda: plus(X, y={"a": [1, object()]}),
        TypeError,
        r"kwargs\['y'\]\['a'\]\[1\]: expected a tensor",
    ),
    "not hashable": (
        lambda: bridge.from_jax(lambda x, m: x, static_argnums=1)(X, [1]),
        TypeError,
        r"args\[1\]: expected a hashable value, .* 'list'",
    ),
    "an output": (
        lambda: bridge.from_jax(lambda x: {"a": "b"})(X),
        TypeError,
        r"fn: expected an output of arrays, .* 'str'> at \('a',\)",
    ),
    "a key": (
        lambda: plus(X, jax.random.key(0)),
        TypeError,
        r"args\[1\]: expected no JAX key beside torch tensors, .* rng=",
    ),
    "sparse": (lambda: plus(X.to_sparse()), TypeError, "expected a strided tensor"),
    "a value": (
        lambda: bridge.from_jax(lambda x: x if x.sum() > 0 else -x)(X),
        jax.errors.TracerBoolConversionError,
        "bool",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    run, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        run()
