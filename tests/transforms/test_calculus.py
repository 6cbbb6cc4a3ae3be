"""hvp, jacobian_diagonal, laplacian and jet beside formulas and beside torch.func's transforms
nested by hand, in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from agreement import floats, same
from torch import nn
from torch.utils import _pytree as pytree

import torchfunc_jax
from torchfunc_jax import _chunks, grad, hvp, jacobian_diagonal, jet, jit, laplacian, vmap

A, W = floats(4, 4), floats(4, 3)
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


NETWORK = network()
PARAMS = {name: p.detach() for name, p in NETWORK.named_parameters()}


# -- beside formulas -------------------------------------------------------------------------------
def logsumexp_product(x: Any, v: Any) -> Any:
    p = torch.softmax(x, 0)
    return p * v - p * (p @ v)


X, V, Y, U = floats(4), floats(4).cos(), floats(5)[:4].exp(), floats(6)[:4].sin()
#: name -> function, primals, tangents, the product with the Hessian
PRODUCTS: dict[str, Any] = {
    "cubic": (lambda x: (x**3).sum(), (X,), (V,), (6 * X * V,)),
    "quadratic": (lambda x: x @ A @ x, (X,), (V,), ((A + A.T) @ V,)),
    "logsumexp": (lambda x: x.logsumexp(0), (X,), (V,), (logsumexp_product(X, V),)),
    "two arguments": (
        lambda x, y: (x**2 * y).sum(),
        (X, Y),
        (V, U),
        (2 * Y * V + 2 * X * U, 2 * X * V),
    ),
    "a tree": (
        lambda p: (p["a"] ** 2 * p["b"][0]).sum(),
        ({"a": X, "b": [Y]},),
        ({"a": V, "b": [U]},),
        ({"a": 2 * Y * V + 2 * X * U, "b": [2 * X * V]},),
    ),
    "a number": (lambda t: t.exp(), (X[0],), (V[0],), (X[0].exp() * V[0],)),
    "linear": (lambda x: x.sum(), (X,), (V,), (torch.zeros_like(X),)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_hvp_by_formula(name: str) -> None:
    f, primals, tangents, product = PRODUCTS[name]
    for compiled in (lambda g: g, jit):
        same(
            compiled(lambda p, t: hvp(f, p, t))(primals, tangents), (f(*primals), product), **EXACT
        )
    value, found, aux = hvp(
        lambda *args: (f(*args), {"twice": 2 * f(*args)}), primals, tangents, has_aux=True
    )
    same((value, found, aux), (f(*primals), product, {"twice": 2 * f(*primals)}), **EXACT)


#: name -> transformed function, arguments, what it gives
VALUES: dict[str, Any] = {
    "diagonal": (jacobian_diagonal(lambda x: x**3 + x.sum()), (X,), 3 * X**2 + 1),
    "diagonal of a linear map": (jacobian_diagonal(lambda x: A @ x), (X,), A.diagonal()),
    "diagonal, second argument": (
        jacobian_diagonal(lambda y, x: y * x.sin(), 1),
        (Y, X),
        Y * X.cos(),
    ),
    "diagonal, both": (
        jacobian_diagonal(lambda x, y: x * y.exp(), (0, -1)),
        (X, Y),
        (Y.exp(), X * Y.exp()),
    ),
    "diagonal of a tree": (
        jacobian_diagonal(lambda p: {"a": p["a"] * p["b"], "b": p["b"] ** 2 + p["a"].sum()}),
        ({"a": A, "b": Y[0]},),
        {"a": Y[0].expand(4, 4), "b": 2 * Y[0]},
    ),
    "diagonal beside infinities": (
        jacobian_diagonal(lambda x: x.sqrt()),
        (torch.tensor([0.0, 4.0]),),
        torch.tensor([math.inf, 0.25]),
    ),
    "Laplacian of a cubic": (laplacian(lambda x: (x**3).sum()), (X,), 6 * X.sum()),
    "Laplacian of a quadratic": (laplacian(lambda x: x @ A @ x), (X,), 2 * A.trace()),
    "Laplacian of 1/r": (
        laplacian(lambda x: 1 / x.norm()),
        (Y[:3],),
        torch.zeros((), dtype=torch.float64),
    ),
    "Laplacian of a Gaussian": (
        laplacian(lambda x: (-(x @ x) / 2).exp()),
        (X,),
        (X @ X - 4) * (-(X @ X) / 2).exp(),
    ),
    "Laplacian of a vector": (
        laplacian(lambda x: torch.stack([x @ x, x.prod()])),
        (X,),
        torch.tensor([8.0, 0.0], dtype=torch.float64),
    ),
    "Laplacian of a complex wave": (
        laplacian(lambda x: torch.exp(1j * (V @ x))),
        (X,),
        -(V @ V) * torch.exp(1j * (V @ X)),
    ),
    "Laplacian, two arguments": (
        laplacian(lambda x, y, c: c * (x**2 * y**2).sum(), (0, 1)),
        (X, Y, U[0]),
        2 * U[0] * (X**2 + Y**2).sum(),
    ),
    "Laplacian of a tree": (
        laplacian(lambda p: {"u": (p["a"] ** 2).sum() * p["b"] ** 3}),
        ({"a": X, "b": Y[0]},),
        {"u": 8 * Y[0] ** 3 + 6 * Y[0] * (X @ X)},
    ),
    "Laplacian in chunks": (laplacian(lambda x: (x**3).sum(), chunk_size=3), (X,), 6 * X.sum()),
    "diagonal in chunks": (
        jacobian_diagonal(lambda x: x**3 + x.sum(), chunk_size=3),
        (X,),
        3 * X**2 + 1,
    ),
    "diagonal of dropout": (
        jacobian_diagonal(lambda x: F.dropout(x, 1.0) + x, randomness="same"),
        (X,),
        torch.ones_like(X),
    ),
    "Laplacian of dropout": (
        laplacian(lambda x: (F.dropout(x, 1.0) ** 2 + x**2).sum(), randomness="different"),
        (X,),
        2 * torch.ones_like(X).sum(),
    ),
    "jet of a product": (
        lambda x: jet(lambda x: x * x, (x,), ((V, U),)),
        (X,),
        (X * X, [2 * X * V, 2 * V * V + 2 * X * U]),
    ),
    "jet of an exponential": (
        lambda t: jet(torch.exp, (t,), ((torch.ones_like(t), *[torch.zeros_like(t)] * 5),)),
        (X,),
        (X.exp(), [X.exp()] * 6),
    ),
    "jet, coefficients": (
        lambda t: jet(
            torch.exp,
            [t],
            [[torch.ones_like(t), *[torch.zeros_like(t)] * 3]],
            factorial_scaled=False,
        ),
        (X,),
        (X.exp(), [X.exp() / math.factorial(k) for k in (1, 2, 3, 4)]),
    ),
    "jet of a tree": (
        lambda x, y: jet(lambda x, y: {"p": x * y, "s": (x.sum(), y)}, (x, y), ((V,), (U,))),
        (X, Y),
        ({"p": X * Y, "s": (X.sum(), Y)}, {"p": [V * Y + X * U], "s": ([V.sum()], [U])}),
    ),
    "jet of order 0": (lambda x: jet(torch.sin, (x,), ((),)), (X,), (X.sin(), [])),
    "jet of a constant": (
        lambda x: jet(lambda x: torch.ones(2), (x,), ((V, U),)),
        (X,),
        (torch.ones(2), [torch.zeros(2)] * 2),
    ),
    "jet of integers": (
        lambda x: jet(lambda x: x.argmax(), (x,), ((V, U),)),
        (X,),
        (X.argmax(), [torch.tensor(0)] * 2),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_by_formula(name: str) -> None:
    f, arguments, expected = VALUES[name]
    same(f(*arguments), expected, **EXACT)
    same(jit(f)(*arguments), expected, **EXACT)


# -- beside nested torch.func, in every way to call ------------------------------------------------
def along_curve(T: Any, f: Callable[..., Any], x: Any, series: tuple[Any, ...]) -> Any:
    """jet by as many nested jvps of t -> f(x(t)) as there are terms."""

    def curve(t: Any) -> Any:
        return f(x + sum(c * t ** (k + 1) / math.factorial(k + 1) for k, c in enumerate(series)))

    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    outs, g = [curve(zero)], curve
    for _ in series:
        g = (lambda h: lambda t: T.jvp(h, (t,), (one,))[1])(g)
        outs.append(g(zero))
    return outs[0], outs[1:]


def terms(x: Any) -> tuple[Any, ...]:
    return x.cos(), x.sin(), torch.ones_like(x)


#: name -> ours and the same by torch.func, as functions of f that give functions of x
TRANSFORMS: dict[str, Any] = {
    "hvp": (
        lambda f: lambda x: hvp(f, (x,), (x.cos(),)),
        lambda f: lambda x: (f(x), torch.func.jvp(torch.func.grad(f), (x,), (x.cos(),))[1:]),
    ),
    "jacobian_diagonal": (
        jacobian_diagonal,
        lambda f: lambda x: torch.func.jacrev(f)(x).diagonal(),
    ),
    "laplacian": (
        laplacian,
        lambda f: lambda x: torch.func.hessian(f)(x).diagonal(0, -2, -1).sum(-1),
    ),
    "jet": (
        lambda f: lambda x: jet(f, (x,), (terms(x),)),
        lambda f: lambda x: along_curve(torch.func, f, x, terms(x)),
    ),
}
SCALARS: dict[str, Callable[..., Any]] = {
    "energy": lambda x: (x.sin() * (A @ x)).sum().exp(),
    "network": lambda x: F.cross_entropy(
        torch.func.functional_call(NETWORK, PARAMS, x[None]), torch.tensor([1])
    ),
}
VECTORS: dict[str, Callable[..., Any]] = {
    "in place": lambda x: x.clone().mul_(x.sum())[torch.tensor([3, 1, 0, 2])],
    "products": lambda x: torch.outer(x, x.exp()) @ (A @ x).softmax(0),
}


def total(tree: Any) -> Any:
    return sum(leaf.sum() for leaf in pytree.tree_leaves(tree))


def with_autograd(F: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(total(F(x)), x)[0]

    return run


def mapped(F: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        rows = [F(x), F(x.flip(0))]
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *rows)

    return run


def pair(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x.flip(0)])


#: name -> ours, from the transformed function, and the same of the reference
WAYS: dict[str, Any] = {
    "un-jitted": (lambda F: F, lambda F: F),
    "jit": (jit, lambda F: F),
    "vmap": (lambda F: lambda x: vmap(F)(pair(x)), mapped),
    "jit of vmap": (lambda F: jit(lambda x: vmap(F)(pair(x))), mapped),
    "inside grad": (
        lambda F: grad(lambda x: total(F(x))),
        lambda F: torch.func.grad(lambda x: total(F(x))),
    ),
    "inside jvp": (
        lambda F: lambda x: torchfunc_jax.jvp(F, (x,), (x.sin(),))[1],
        lambda F: lambda x: torch.func.jvp(F, (x,), (x.sin(),))[1],
    ),
    "inside torch.autograd": (with_autograd, with_autograd),
    "jit inside torch.autograd": (lambda F: with_autograd(jit(F)), with_autograd),
}
FUNCTIONS = {
    "hvp": SCALARS,
    "jacobian_diagonal": VECTORS,
    "laplacian": SCALARS | VECTORS,
    "jet": SCALARS | VECTORS,
}
TABLE = [
    (transform, function, way)
    for transform, of in FUNCTIONS.items()
    for function in of
    for way in WAYS
]
QUICK = {"energy", "in place"}


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("transform", "function", "way"),
    [pytest.param(*row, marks=[] if row[1] in QUICK else [pytest.mark.slow]) for row in TABLE],
)
def test_as_nested_torch_func(transform: str, function: str, way: str) -> None:
    f, x = (SCALARS | VECTORS)[function], floats(4) / 4
    (mine, theirs), (call, reference) = TRANSFORMS[transform], WAYS[way]
    expected = reference(theirs(f))(x)
    same(call(mine(f))(x), expected, **EXACT)


IN_JAX: dict[str, Callable[..., Any]] = {
    "hvp": lambda f: lambda x: hvp(f, (x,), (jnp.cos(x),)),
    "jacobian_diagonal": jacobian_diagonal,
    "laplacian": laplacian,
    "jet": lambda f: lambda x: jet(f, (x,), ((jnp.cos(x), jnp.sin(x), jnp.ones_like(x)),)),
}


@pytest.mark.parametrize("transform", IN_JAX)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["un-jitted", "jax.jit"])
@pytest.mark.filterwarnings("ignore::bridge.compiling.MiscompilationWarning")
def test_jax_arrays(transform: str, wrap: Any) -> None:
    f, x = (
        VECTORS["in place"] if transform == "jacobian_diagonal" else SCALARS["energy"],
        floats(4) / 4,
    )
    with jax.enable_x64(True):
        found = wrap(IN_JAX[transform](f))(jnp.asarray(x.numpy()))
    assert all(isinstance(v, jax.Array) for v in jax.tree.leaves(found))
    same(
        pytree.tree_map(lambda v: torch.tensor(v.tolist(), dtype=torch.float64), found),
        TRANSFORMS[transform][1](f)(x),
        **EXACT,
    )


def test_nested_in_one_another() -> None:
    f, x = SCALARS["energy"], floats(4) / 4
    found, expected = (
        functools.reduce(lambda g, _: lap(g), range(2), f)(x) for lap in TRANSFORMS["laplacian"]
    )
    same(found, expected, **EXACT)
    for outer, inner in (("jet", "hvp"), ("hvp", "jet")):
        found, expected = (
            TRANSFORMS[outer][k](lambda x, F=TRANSFORMS[inner][k](f): total(F(x)))(x)
            for k in (0, 1)
        )
        same(found, expected, **EXACT)


# -- jet: every kind of primitive ------------------------------------------------------------------
class Cube(torch.autograd.Function):
    """x ** 3, whose derivative by its own rule is 30 x ** 2."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any) -> Any:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, t: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 30 * x**2 * t


def scanned(x: Any) -> Any:
    for _ in range(12):
        x = x + 0.1 * x.sin()
    return x


RULES: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(torch, name)
        for name in (
            "exp",
            "expm1",
            "exp2",
            "sin",
            "cos",
            "tan",
            "sinh",
            "cosh",
            "tanh",
            "atan",
            "asinh",
            "sigmoid",
            "erf",
            "abs",
            "square",
            "neg",
            "reciprocal",
            "sign",
            "floor",
            "relu",
            "sinc",
        )
    },
    **{
        name: lambda x, f=getattr(torch, name): f(x * x + 0.5)
        for name in ("log", "log1p", "sqrt", "rsqrt", "lgamma", "digamma", "erfc")
    },
    **{
        name: lambda x, f=getattr(torch, name): f(x / 8)
        for name in ("asin", "acos", "atanh", "erfinv")
    },
    **{
        name: getattr(F, name)
        for name in ("gelu", "silu", "softplus", "elu", "mish", "hardtanh", "logsigmoid", "selu")
    },
    "pow of a negative number": lambda x: (-x.abs() - 1) ** 3.0,
    "pow": lambda x: (x * x + 1) ** x,
    "division": lambda x: x / (2 + x.cos()),
    "atan2": lambda x: torch.atan2(x, 1 + x * x),
    "remainder": lambda x: torch.fmod(5 * x, 1.5),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "maximum": lambda x: torch.maximum(x, x.flip(0) ** 2),
    "where": lambda x: torch.where(x > 0, x**2, x**3),
    "amax": lambda x: (x * x).amax(),
    "max with indices": lambda x: x.max(0).values,
    "sort": lambda x: (x**2).sort().values,
    "cumsum": lambda x: (x**2).cumsum(0),
    "cumprod": lambda x: (x + 2).cumprod(0),
    "prod": lambda x: x.prod(),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "softmax": lambda x: x.softmax(0),
    "norm": lambda x: x.norm(),
    "std": lambda x: (x**2).std(),
    "matmul": lambda x: torch.outer(x, x) @ A @ torch.outer(x, x),
    "einsum": lambda x: torch.einsum("i,ij,j->", x, A, x),
    "conv": lambda x: F.conv1d(x.reshape(1, 1, 4), x[:2].reshape(1, 1, 2), padding=1),
    "conv of images": lambda x: F.conv2d(x.reshape(1, 1, 2, 2), A.reshape(1, 1, 4, 4), padding=2),
    "max_pool": lambda x: F.max_pool1d((x**2).reshape(1, 1, 4), 2),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "index": lambda x: (x**2)[torch.tensor([0, 2, 2])],
    "scatter": lambda x: torch.zeros(3, dtype=torch.float64).index_add(
        0, torch.tensor([0, 2, 2, 1]), x**2
    ),
    "cat, stack, roll": lambda x: torch.stack([torch.cat([x[:1] ** 2, x[1:]]), x.roll(1) ** 3]),
    "det": lambda x: torch.linalg.det(A + torch.diag(x**2)),
    "solve": lambda x: torch.linalg.solve(A + torch.diag(x**2), x),
    "inverse": lambda x: torch.linalg.inv(A + torch.diag(x**2)),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(A + A.T + torch.diag(x**2)),
    "fft": lambda x: torch.fft.rfft(x**2).abs(),
    "complex": lambda x: torch.exp(1j * x**2),
    "detach": lambda x: x.detach() * x**2,
    "in place": lambda x: x.clone().mul_(x).add_(1),
    "repeated steps": scanned,
    "autograd.Function": Cube.apply,
}


def layer_norm(x: Any) -> Any:
    centered = x - x.mean()
    return centered / (centered.square().mean() + 1e-5).sqrt()


def det(x: Any) -> Any:
    m = A + torch.diag(x**2)
    signs = [
        (p, (-1) ** sum(p[i] > p[j] for i in range(4) for j in range(i + 1, 4)))
        for p in itertools.permutations(range(4))
    ]
    return sum(sign * m[0, p[0]] * m[1, p[1]] * m[2, p[2]] * m[3, p[3]] for p, sign in signs)


#: The functions whose second derivatives torch.func's nested forward mode gets wrong, by operators
#: that it gets right.
BY_HAND: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm,
    "det": det,
    "solve": lambda x: torch.linalg.inv(A + torch.diag(x**2)) @ x,
    "autograd.Function": lambda x: 10 * x**3 - 9 * x.detach() ** 3,
}
OFTEN = {
    "exp",
    "tanh",
    "pow of a negative number",
    "matmul",
    "softmax",
    "layer_norm",
    "sort",
    "index",
    "detach",
    "autograd.Function",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in RULES],
)
def test_jet_rules(name: str) -> None:
    """Order 4 along a curve."""
    x = torch.tensor([-1.25, -0.3, 0.45, 1.7], dtype=torch.float64)
    series = (x.cos(), x.sin(), torch.full_like(x, 0.5), x)
    found = jit(lambda x: jet(RULES[name], (x,), (series,)))(x)
    tolerance = 1e-8 if name in ("lgamma", "digamma") else 1e-10  # torch's trigamma has nine digits
    same(
        found,
        along_curve(torch.func, BY_HAND.get(name, RULES[name]), x, series),
        rtol=tolerance,
        atol=tolerance,
    )


# -- errors ----------------------------------------------------------------------------------------
INTS = torch.arange(3)
XS = torch.ones(3)
#: name -> call, class of error, words
ERRORS: dict[str, Any] = {
    "hvp: primals no tuple": (
        lambda: hvp(torch.sum, XS, (XS,)),
        RuntimeError,
        "hvp(f, primals, tangents): Expected primals to be a tuple",
    ),
    "hvp: structure": (
        lambda: hvp(torch.sum, (XS,), (XS, XS)),
        RuntimeError,
        "Expected primals and tangents to have the same python structure",
    ),
    "hvp: shape": (
        lambda: hvp(torch.sum, (XS,), (XS[:2],)),
        RuntimeError,
        "tangent 0 to have the primal's shape (3,), got (2,)",
    ),
    "hvp: dtype": (
        lambda: hvp(torch.sum, (XS,), (XS.double(),)),
        RuntimeError,
        "dtype torch.float32, got torch.float64; convert it",
    ),
    "hvp: no tensor": (
        lambda: hvp(lambda x: x, (1.0,), (1.0,)),
        RuntimeError,
        "Expected primals to only contain Tensors, got <class 'float'>",
    ),
    "hvp: no scalar": (
        lambda: hvp(torch.sin, (XS,), (XS,)),
        RuntimeError,
        "hvp(f, primals, tangents): Expected f(*args) to return a scalar Tensor, got",
    ),
    "hvp: no aux": (
        lambda: hvp(torch.sum, (XS,), (XS,), has_aux=True),
        RuntimeError,
        "should be a tuple: (output, aux)",
    ),
    "hvp: ints": (
        lambda: hvp(torch.sum, (INTS,), (INTS,)),
        ValueError,
        "hvp(f, primals, tangents): Expected primal to be floating point",
    ),
    "diagonal: shape": (
        lambda: jacobian_diagonal(lambda x: x[:2])(XS),
        RuntimeError,
        "argument 0's structure and shapes, a tensor of [(3,)], got a tensor of [(2,)]",
    ),
    "diagonal: structure": (
        lambda: jacobian_diagonal(lambda x: (x, x))(XS),
        RuntimeError,
        "expected f to return tensors of argument 0's",
    ),
    "diagonal: ints": (
        lambda: jacobian_diagonal(torch.sin)(INTS),
        ValueError,
        "jacobian_diagonal(f)(*args): Expected primal to be floating",
    ),
    "diagonal: complex": (
        lambda: jacobian_diagonal(torch.sin)(XS + 1j),
        RuntimeError,
        "jacobian_diagonal: Expected all inputs to be real",
    ),
    "diagonal: argnums": (
        lambda: jacobian_diagonal(torch.sin, 1)(XS),
        RuntimeError,
        "Got argnum=1, but only 1 positional inputs",
    ),
    "diagonal: chunks": (
        lambda: jacobian_diagonal(torch.sin, chunk_size=0)(XS),
        ValueError,
        "chunk_size should be None or greater than 0",
    ),
    "Laplacian: no tensor": (
        lambda: laplacian(lambda x: 1.0)(XS),
        RuntimeError,
        "laplacian(f)(*args): expected f(*primals) to return only tensors",
    ),
    "Laplacian: ints": (
        lambda: laplacian(torch.sin)(INTS),
        ValueError,
        "laplacian(f)(*args): Expected primal to be floating point",
    ),
    "Laplacian: complex": (
        lambda: laplacian(torch.sin)(XS + 1j),
        RuntimeError,
        "laplacian: Expected all inputs to be real",
    ),
    "Laplacian: randomness": (
        lambda: laplacian(F.dropout)(XS),
        RuntimeError,
        "randomness error mode",
    ),
    "jet: primals": (
        lambda: jet(torch.sin, XS, ((XS,),)),
        ValueError,
        "expected primals to be a tuple or list, one entry for each argument",
    ),
    "jet: series": (
        lambda: jet(torch.sin, (XS,), XS),
        ValueError,
        "expected series to be a tuple or list",
    ),
    "jet: number of series": (
        lambda: jet(torch.sin, (XS,), ((XS,), (XS,))),
        ValueError,
        "got 1 primals, 2 series",
    ),
    "jet: a series": (
        lambda: jet(torch.sin, (XS,), (XS,)),
        ValueError,
        "expected series[0] to be a tuple or list of terms, got",
    ),
    "jet: number of terms": (
        lambda: jet(torch.add, (XS, XS), ((XS, XS), (XS,))),
        ValueError,
        "as many terms in series[1] as in series[0], 2, got 1; add terms of zeros",
    ),
    "jet: a tree": (
        lambda: jet(torch.sum, ([XS],), ((XS,),)),
        ValueError,
        "expected primal 0 to be a tensor, got <class 'list'>",
    ),
    "jet: a number": (
        lambda: jet(torch.sin, (XS,), ((XS, 1.0),)),
        ValueError,
        "expected series[0][1] to be a tensor, got <class 'float'>",
    ),
    "jet: shape": (
        lambda: jet(torch.sin, (XS,), ((XS[:2],),)),
        ValueError,
        "series[0][0] to have primal 0's shape (3,) and dtype torch.float32",
    ),
    "jet: dtype": (
        lambda: jet(torch.sin, (XS,), ((XS.double(),),)),
        ValueError,
        "got (3,) and torch.float64",
    ),
    "jet: ints": (
        lambda: jet(torch.sin, (INTS,), ((INTS,),)),
        ValueError,
        "jet(f, primals, series): Expected primal to be floating point",
    ),
    "jet: output": (
        lambda: jet(lambda x: 1.0, (XS,), ((XS,),)),
        RuntimeError,
        "jet(f, primals, series): expected f(*primals) to return only",
    ),
    "jacfwd: chunks": (
        lambda: torchfunc_jax.jacfwd(torch.sin, chunk_size=-1)(XS),
        ValueError,
        "should be None or greater than 0",
    ),
    "hessian: chunks": (
        lambda: torchfunc_jax.hessian(torch.sum, chunk_size=0)(XS),
        ValueError,
        "`chunk_size` should be greater than 0",
    ),
    "vmap: chunks": (
        lambda: vmap(torch.sin, chunk_size="large"),
        ValueError,
        'None, greater than 0, or "auto". (got large)',
    ),
    "vmap: limit": (
        lambda: vmap(torch.sin, memory_limit=100),
        ValueError,
        'memory_limit should be greater than 0, and needs chunk_size="auto"',
    ),
    "vmap: limit of nothing": (
        lambda: vmap(torch.sin, chunk_size="auto", memory_limit=0),
        ValueError,
        "memory_limit should be greater than 0",
    ),
    "vmap: no lane fits": (
        lambda: vmap(torch.sin, chunk_size="auto", memory_limit=100)(torch.ones(8, 1000)),
        RuntimeError,
        (
            "expected a chunk to take at most 100 bytes (memory_limit, or half of the free "
            "memory), but one lane alone takes"
        ),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, kind, words = ERRORS[name]
    with pytest.raises(kind) as info:
        call()
    assert words in str(info.value)


# -- chunks ----------------------------------------------------------------------------------------
class Lanes:
    """A function of one sample that notes, at each call of its Python, nothing but that it was
    called.
    """

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f, self.calls = f, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.f(*args)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("compiled", [False, True])
def test_chunks_of_jacobians(chunk_size: int, compiled: bool) -> None:
    f = lambda x, y: {"a": x.sin() * y.sum(), "b": (x @ y, (x.outer(y)).exp())}
    wrap = jit if compiled else (lambda g: g)
    same(
        wrap(torchfunc_jax.jacfwd(f, (0, 1), chunk_size=chunk_size))(X, Y),
        torch.func.jacfwd(f, (0, 1))(X, Y),
        **EXACT,
    )
    g = lambda x: (x.sin() * (A @ x)).exp()
    same(
        wrap(torchfunc_jax.hessian(g, chunk_size=chunk_size))(X), torch.func.hessian(g)(X), **EXACT
    )
    counted = Lanes(torch.sin)
    torchfunc_jax.jacfwd(counted, chunk_size=chunk_size)(X)
    assert counted.calls >= math.ceil(4 / chunk_size)


def test_chunks_take_less_memory() -> None:
    def taken(**options: Any) -> int:
        f = jit(laplacian(lambda x: ((x @ large) ** 3).sum(), **options))
        return f.lower(torch.ones(64)).compile().memory_analysis().temp_size_in_bytes

    large = torch.ones(64, 512)
    assert taken(chunk_size=4) < taken() / 1.5


@pytest.mark.parametrize("limit", [None, 10_000])
def test_automatic_chunks(limit: int | None) -> None:
    x, w = torch.randn(23, 8), torch.randn(8, 50)
    counted = Lanes(lambda x, w: (x @ w).sin().outer(x))
    expected = torch.func.vmap(counted.f, in_dims=(0, None))(x, w)
    mapped = vmap(counted, in_dims=(0, None), chunk_size="auto", memory_limit=limit)
    same(mapped(x, w), expected, rtol=1e-4, atol=1e-4)
    before = counted.calls
    same(mapped(x, w), expected, rtol=1e-4, atol=1e-4)  # its chunk size is known by now
    chunks = counted.calls - before
    assert chunks == 1 if limit is None else chunks > 1
    for nested in (jit(mapped), lambda x, w: vmap(mapped, in_dims=(0, None))(x[None], w)[0]):
        same(nested(x, w), expected, rtol=1e-4, atol=1e-4)
    found = grad(lambda w: mapped(x, w).square().sum())(w)
    same(
        found,
        torch.func.grad(
            lambda w: torch.func.vmap(counted.f, in_dims=(0, None))(x, w).square().sum()
        )(w),
        rtol=1e-3,
        atol=1e-1,
    )


def test_automatic_chunks_leave_no_trace() -> None:
    """Choosing a chunk size draws no random numbers and writes to nothing."""
    x, count = torch.randn(6, 2000), torch.zeros((), dtype=torch.int64)

    def f(x: Any) -> Any:
        count.add_(1)
        return F.dropout(x, 0.5)

    options: dict[str, Any] = {"randomness": "same"}
    torch.manual_seed(0)
    expected = vmap(f, chunk_size=3, **options)(x)
    assert count.item() == 2
    for call in (lambda g: g, jit):
        mapped = call(vmap(f, chunk_size="auto", memory_limit=80_000, **options))
        count.zero_()
        torch.manual_seed(0)
        found = mapped(x)
        assert found.shape == x.shape and count.item() > 1
        same(found[0] != 0, found[-1] != 0)
    assert expected.shape == x.shape
    same(vmap(torch.sin, chunk_size="auto")(x[:1]), x[:1].sin())
    same(torchfunc_jax.jacfwd(torch.sin, chunk_size="auto")(X), torch.func.jacfwd(torch.sin)(X))


@pytest.mark.parametrize("limit", [1_400, 5_000, 20_000, 31_000, 10**6])
def test_the_chunk_is_found_in_few_trials(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """With programs that take 1000 bytes and 300 for each lane, and a jump of 2000 from 40 lanes
    on.
    """
    tried: list[int] = []

    def needed(run: Any, leaves: Any, dims: Any, lanes: int) -> int:
        tried.append(lanes)
        return 1000 + 300 * lanes + 2000 * (lanes > 40)

    monkeypatch.setattr(_chunks, "_needed", needed)
    chosen: dict[Any, int] = {}
    found = _chunks.fitting(100, lambda part, n: None, [torch.ones(100)], [0], limit, chosen)
    trials = len(tried)
    most = max(n for n in range(1, 101) if n == 1 or needed(None, None, None, n) <= limit)
    assert found <= most and -(-100 // found) <= -(-100 // max(1, 7 * most // 8)) and trials <= 8
    # it is remembered
    assert _chunks.fitting(100, lambda part, n: None, [torch.ones(100)], [0], 1, chosen) == found


# -- buffers ---------------------------------------------------------------------------------------
def normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def by_torch(seed: int, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, Any, Any]:
    """The gradients, the loss and the buffers of a training step of PyTorch's own."""
    model = normed(seed)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return {k: p.grad for k, p in model.named_parameters()}, loss, dict(model.named_buffers())


def state(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return {k: p.detach().clone() for k, p in model.named_parameters()}, {
        k: b.clone() for k, b in model.named_buffers()
    }


DATA, CLASSES = floats(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["un-jitted", "jit"])
@pytest.mark.parametrize(
    "given",
    [
        "arguments",
        "captured",
        "the module's own",
        pytest.param("jax.Arrays", marks=pytest.mark.slow),
    ],
)
def test_buffers_of_a_training_step(wrap: Any, given: str) -> None:
    model = normed(0)
    params, buffers = state(model)
    kept = {k: b.clone() for k, b in buffers.items()}

    def loss(params: Any, *more: Any) -> Any:
        every = params if given == "the module's own" else (params, *(more or (buffers,)))
        out, after = torchfunc_jax.functional_call(model, every, DATA, return_buffers=True)
        value = F.cross_entropy(out, CLASSES)
        return value, (value, after)

    arguments = [params, buffers] if given in ("arguments", "jax.Arrays") else [params]
    if given == "jax.Arrays":
        with jax.enable_x64(True):
            arguments = [{k: jnp.asarray(v.numpy()) for k, v in a.items()} for a in arguments]
            gradients, (value, after) = wrap(grad(loss, has_aux=True))(*arguments)
        gradients, value, after = pytree.tree_map(
            lambda v: torch.tensor(v.tolist(), dtype=torch.float64), (gradients, value, after)
        )
        after["1.num_batches_tracked"] = after["1.num_batches_tracked"].long()
    else:
        gradients, (value, after) = wrap(grad(loss, has_aux=True))(*arguments)
    same((gradients, value, after), by_torch(0, DATA, CLASSES), **EXACT, graph=False)
    same(buffers, kept)
    same(dict(model.named_buffers()), kept)


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["un-jitted", "jit"])
@pytest.mark.parametrize("shared", [False, True])
def test_buffers_of_an_ensemble(wrap: Any, shared: bool) -> None:
    """Three members with statistics of their own, or beginning with those that they share."""
    members = [normed(k) for k in range(3)]
    params, buffers = torchfunc_jax.stack_module_state(members)
    params = {k: p.detach() for k, p in params.items()}
    x, y = torch.stack([DATA, DATA + 1, DATA * 2]), CLASSES.expand(3, 6)

    def loss(params: Any, buffers: Any, x: Any, y: Any) -> Any:
        out, after = torchfunc_jax.functional_call(
            members[0], (params, buffers), x, return_buffers=True
        )
        value = F.cross_entropy(out, y)
        return value, (value, after)

    if shared:
        buffers = state(members[0])[1]
    step = wrap(vmap(grad(loss, has_aux=True), in_dims=(0, None if shared else 0, 0, 0)))
    gradients, (values, after) = step(params, buffers, x, y)
    for k in range(3):
        mine = pytree.tree_map(lambda t, k=k: t[k], (gradients, values, after))
        same(mine, by_torch(k, x[k], y[k]), **EXACT, graph=False)


class Counter(nn.Module):
    """Its buffers: one is replaced, one has two names, one stays."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("other", self.total)
        self.register_buffer("still", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        self.total.add_(x)
        return x * self.other + self.still


@pytest.mark.parametrize("wrap", [lambda f: f, jit, vmap], ids=["un-jitted", "jit", "vmap"])
def test_which_buffers_come_back(wrap: Any) -> None:
    model, x = Counter(), torch.arange(6.0).reshape(3, 2)
    expected = {"steps": torch.tensor(1.0), "total": x[1], "still": torch.ones(2)}
    out, after = wrap(lambda x: torchfunc_jax.functional_call(model, {}, x, return_buffers=True))(
        x if wrap is vmap else x[1]
    )
    if wrap is vmap:
        out, after = out[1], {k: t[1] for k, t in after.items()}
    same((out, after), (x[1] * x[1] + 1, expected))
    given = {"other": torch.ones(2)}
    out, after = torchfunc_jax.functional_call(model, given, x[1], return_buffers=True)
    same(after, {"other": x[1] + 1, "steps": torch.tensor(1.0), "still": torch.ones(2)})
    assert model.steps == 0 and not model.total.any() and given["other"].eq(1).all()
    refused: Any = (
        (({"steps": x}, {"steps": x}), False, "appeared in multiple dictionaries"),
        ({"steps": x[0, 0]}, True, "Missing key"),
    )
    for dicts, strict, words in refused:
        with pytest.raises((ValueError, RuntimeError), match=words):
            torchfunc_jax.functional_call(model, dicts, x[1], strict=strict, return_buffers=True)
