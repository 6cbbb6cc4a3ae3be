"""Every transform beside torch.func's: one table of cases, each run under torch.func, under ours,
and under ours compiled.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import Case, Table, ours, ours_jitted, same, theirs
from torch import nn
from torch.utils import _pytree as pytree

import torchfunc_jax

table = Table()
#: Where torch's own tolerance is too narrow for sums taken in another order.
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}}
Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class State:
    position: Any
    velocity: Any
    mass: Any = None


pytree.register_dataclass(State, serialized_type_name="test_transforms.State")


def ints(*shape: int) -> Any:
    return lambda: torch.randint(0, 3, shape)


def double(*shape: int) -> Any:
    return lambda: torch.randn(shape, dtype=torch.float64)


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


# -- arguments that require grad, and arguments without leaves -------------------------------------
def requires_grad(*shape: int) -> Any:
    return lambda: torch.randn(shape, requires_grad=True)


@table(requires_grad(2, 3))
def vmap_jacfwd_of_a_constant_slope(T):
    return T.vmap(T.jacfwd(lambda x: [x * 2, x]))


@table(requires_grad(2, 3))
def vmap_jvp_of_a_constant_slope(T):
    return T.vmap(lambda x: T.vmap(lambda t: T.jvp(lambda a: a * 2, (x,), (t,)))(torch.eye(3)))


@table((3,))
def grad_by_the_parameters_of_a_module_without_any(T):
    return lambda x: T.grad_and_value(lambda p, x: T.functional_call(nn.Tanh(), p, (x,)).sum())(
        dict(nn.Tanh().named_parameters()), x
    )


@table((3,))
def vjp_without_primals(T):
    return lambda x: T.vjp(lambda: x.sin())[0]


# -- vmap ------------------------------------------------------------------------------------------
@table((3, 4), (3, 4))
def vmap_dot(T):
    return T.vmap(torch.dot)


@table((3, 4), (4, 5))
def vmap_matmul_one_mapped(T):
    return T.vmap(torch.mv, in_dims=(None, 1), out_dims=1)


@table((4, 3), (3, 4))
def vmap_in_dims(T):
    return T.vmap(lambda a, b: a * b + a.sum(), in_dims=(1, 0))


@table((2, 3, 4))
def vmap_in_dim_negative(T):
    return T.vmap(lambda a: a.cumsum(0), in_dims=-1)


@table((2, 3, 4))
def vmap_in_dims_list_inside(T):
    return lambda x: T.vmap(lambda pair: pair[0] + pair[1], in_dims=([0, None],))([x, x[0]])


@table((2, 3, 4))
def vmap_out_dims_int(T):
    return T.vmap(lambda a: (a, a.sum(0)), out_dims=1)


@table((2, 3, 4))
def vmap_out_dims_tuple(T):
    return T.vmap(lambda a: (a, a.sum(0), a.sum()), out_dims=(2, 1, 0))


@table((2, 3, 4))
def vmap_out_dims_negative(T):
    return T.vmap(lambda a: a * 2, out_dims=-1)


@table((2, 3, 4))
def vmap_out_dims_bool(T):
    return T.vmap(lambda a: a * 2, out_dims=True)


@table((2, 3, 4))
def vmap_out_dims_dict(T):
    return T.vmap(lambda a: {"a": a, "b": (a.sum(0), a.sum(1))}, out_dims={"a": 1, "b": (0, 1)})


@table((2, 3))
def vmap_out_dims_none(T):
    outside = torch.arange(3.0)
    return T.vmap(lambda a: (a * 2, outside * 1), out_dims=(0, None))


@table((3,))
def vmap_unmapped_output_is_repeated(T):
    return T.vmap(lambda a: torch.ones(2))


@table((3,))
def vmap_returns_tuple_of_one(T):
    return T.vmap(lambda a: (a,))


@table((2, 3))
def vmap_returns_namedtuple(T):
    return T.vmap(lambda a: Point(a + 1, {"k": [a, a * 2]}))


@table((2, 3))
def vmap_returns_ordered_dict(T):
    return T.vmap(lambda a: OrderedDict(z=a + 1, a=a + 2))


@table((2, 3), (3,))
def vmap_dict_input(T):
    return lambda x, y: T.vmap(lambda d: torch.dot(d["x"], d["y"]), in_dims=({"x": 0, "y": None},))(
        {"x": x, "y": y}
    )


@table((2, 3), (2, 4))
def vmap_nested_structures(T):
    return lambda x, y: T.vmap(lambda d, s: d["p"].x * s[0] + d["p"].y.sum())(
        {"p": Point(x, y)}, [x]
    )


@table((2, 3))
def vmap_namedtuple_in_dims(T):
    return lambda x: T.vmap(lambda p: p.x + p.y, in_dims=(Point(0, None),))(Point(x, x[0]))


@table((2, 3), (2, 3))
def vmap_dataclass(T):
    return lambda x, v: T.vmap(lambda s: State(s.position + s.velocity, s.velocity * 2))(
        State(x, v)
    )


@table((2, 3))
def vmap_none_argument(T):
    return lambda x: T.vmap(lambda a, nothing: a + 1 if nothing is None else a, in_dims=(0, None))(
        x, None
    )


@table((2, 3))
def vmap_python_argument(T):
    return lambda x: T.vmap(lambda a, n, flag: a * n if flag else a, in_dims=(0, None, None))(
        x, 3, True
    )


@table((2, 3), (3,))
def vmap_keyword_arguments_are_not_mapped(T):
    return lambda x, y: T.vmap(lambda a, *, scale: a * scale.sum())(x, scale=y)


@table((2, 3, 4))
def vmap_nested(T):
    return T.vmap(T.vmap(lambda a: a.softmax(0)), in_dims=1, out_dims=1)


@table((2, 3), (4, 3))
def vmap_nested_closure(T):
    return lambda x, y: T.vmap(lambda a: T.vmap(lambda b: a.dot(b))(y))(x)


@table((2, 3, 4, 5))
def vmap_three_deep(T):
    return T.vmap(T.vmap(T.vmap(torch.sum, in_dims=1), out_dims=1), in_dims=3)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8])
def test_chunk_size(chunk: int) -> None:
    from torchfunc_jax import vmap

    x, y = torch.randn(7, 3), torch.randn(3, 7)
    fn = lambda a, b: (a * b, (a + b).sum())
    same(
        vmap(fn, in_dims=(0, 1), out_dims=(1, 0), chunk_size=chunk)(x, y),
        torch.func.vmap(fn, in_dims=(0, 1), out_dims=(1, 0), chunk_size=chunk)(x, y),
    )


@table((7, 3))
def chunk_size_with_aux_tree(T):
    return T.vmap(lambda a: {"a": a, "b": [a.sum()]}, chunk_size=3)


@table((3,))
def vmap_zero_dim(T):
    return T.vmap(torch.sin)


@table((3, 0))
def vmap_empty_lane(T):
    return T.vmap(lambda a: (a.sum(), a))


@table((2, *[1] * 33))
def vmap_lanes_of_33_dimensions(T):
    return T.vmap(lambda a: (a * 2, torch.where(a > 0, a, torch.zeros(1))))


@table((2, 3), (3, 2))
def vmap_dims_with_keys_in_another_order(T):
    fn = T.vmap(
        lambda z: {"p": z["x"] + z["y"], "q": z["x"]},
        in_dims=({"y": 0, "x": 0},),
        out_dims={"q": 1, "p": 1},
    )
    return lambda x, y: fn({"x": x, "y": y.mT})


@table(ints(3, 4), (3, 5))
def vmap_integer_index(T):
    return T.vmap(lambda i, table: table[i], in_dims=(0, 0))


@table((3, 4))
def vmap_in_place(T):
    def fn(a):
        b = a.clone()
        b[1:] += 1
        b.view(2, 2)[0].mul_(3)
        return b

    return T.vmap(fn)


@table((3, 4))
def vmap_getitem_forms(T):
    return T.vmap(lambda a: (a[None, 1:, None], a[..., -1], a[[0, 2]], a[torch.tensor([1, 1])]))


@table((3, 4))
def vmap_where_comparison(T):
    return T.vmap(lambda a: torch.where(a > a.mean(), a, torch.zeros(())))


@table((3, 5, 4))
def vmap_module(T):
    return T.vmap(linear())


@table((3, 2, 1, 8, 8))
def vmap_conv(T):
    torch.manual_seed(0)
    return T.vmap(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)))


# -- grad ------------------------------------------------------------------------------------------
@table((4,))
def grad_sum_of_sines(T):
    return T.grad(lambda x: x.sin().sum())


@table(())
def grad_thrice(T):
    return T.grad(T.grad(T.grad(torch.sin)))


@table((3,), (3,))
def grad_argnums_one(T):
    return T.grad(lambda x, y: (x * y * y).sum(), argnums=1)


@table((3,), (3,))
def grad_argnums_negative(T):
    return T.grad(lambda x, y: (x * y * y).sum(), argnums=-1)


@table((3,), (3,), (3,))
def grad_argnums_tuple(T):
    return T.grad(lambda x, y, z: (x * y * y + z.exp()).sum(), argnums=(0, 2))


@table((3,), (3,))
def grad_argnums_tuple_of_one(T):
    return T.grad(lambda x, y: (x * y * y).sum(), argnums=(1,))


@table((3,), (3,))
def grad_argnums_out_of_order(T):
    return T.grad(lambda x, y: (x * y * y).sum(), argnums=(1, 0))


@table((3,), (2, 3))
def grad_tree(T):
    return lambda x, y: T.grad(lambda d: (d["a"] * d["b"][0]).sum() + d["b"][1].x.sum())(
        {"a": x, "b": (y, Point(x, x * 2))}
    )


@table((3,), (3,))
def grad_dataclass(T):
    return lambda x, v: T.grad(lambda s: (s.position * s.velocity**2).sum())(State(x, v))


@table((3,))
def grad_has_aux(T):
    return T.grad(lambda x: ((x**2).sum(), x * 2), has_aux=True)


@table((3,), (3,))
def grad_has_aux_tree_argnums(T):
    return T.grad(
        lambda x, y: ((x * y).sum(), {"a": (x + y, [y.sum()])}), argnums=(0, 1), has_aux=True
    )


@table((3,), (3,))
def grad_and_value_both(T):
    return T.grad_and_value(lambda x, y: (x * y).sum(), argnums=(0, 1))


@table((3,))
def grad_and_value_aux(T):
    return T.grad_and_value(lambda x: (x.prod(), (x.sort()[0], x.argmax())), has_aux=True)


@table((3,))
def grad_unused_input(T):
    return lambda x: T.grad(lambda a, b: (a**2).sum(), argnums=1)(x, x)


@table((3,))
def grad_constant_output(T):
    return T.grad(lambda x: torch.tensor(2.0))


@table((3,))
def grad_detach(T):
    return T.grad(lambda x: (x.detach() * x).sum())


@table((3,))
def grad_no_grad_inside(T):
    def fn(x):
        with torch.no_grad():
            c = x**2
        return (x - c).sum()

    return T.grad(fn)


@table((3,))
def grad_no_grad_inside_nested(T):
    def fn(x):
        with torch.no_grad():
            inner = T.grad(lambda a: (a**3).sum())(x)
        return (inner * x).sum()

    return T.grad(fn)


@table((3,))
def grad_nested_no_grad_cuts_only_inner(T):
    def inner(y, x):
        with torch.no_grad():
            c = x * y
        return (c * y).sum()

    return T.grad(lambda x: T.grad(inner)(x * 2, x).sum())


@table((3,))
def grad_closure_over_outer(T):
    return T.grad(lambda x: T.grad(lambda y: (x * y * y).sum())(x * 2).sum())


@table((3,))
def grad_data_dependent_branch(T):
    return T.grad(lambda x: (x**2).sum() if x.sum() > 0 else (x**3).sum())


table.cases[-1].jit = False  # a branch on values has no one program


@table((3,))
def grad_in_place(T):
    def fn(x):
        y = x * 1
        y[0] = y[1] * 2
        y[1:].mul_(x[:-1])
        y.view(-1)[::2] += x[1]
        y += x.exp()
        return (y * y).sum()

    return T.grad(fn)


@table((3,))
def grad_keyword_arguments(T):
    return lambda x: T.grad(lambda a, *, power, scale: (a**power * scale).sum())(
        x, power=3, scale=x
    )


@table(double(3))
def grad_float64(T):
    return T.grad(lambda x: x.exp().sum())


@table(lambda: torch.randn(3, dtype=torch.bfloat16))
def grad_bfloat16(T):
    return T.grad(lambda x: (x * x).sum())


@table(lambda: torch.randn(3, dtype=torch.complex64))
def grad_complex_input(T):
    return T.grad(lambda x: (x * x.conj()).real.sum() + x.imag.sum())


@table((2, 4), ints(2))
def grad_of_loss(T):
    return T.grad(F.cross_entropy)


@table((2, 4))
def grad_of_module_parameters(T):
    model = linear()
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    return lambda x: T.grad(lambda p: T.functional_call(model, p, (x,)).square().mean())(parameters)


@table((5, 3, 4))
def per_sample_gradients(T):
    model = linear()
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(p, x):
        return T.functional_call(model, p, (x,)).logsumexp(-1).sum()

    return lambda x: T.vmap(T.grad(loss), in_dims=(None, 0))(parameters, x)


# -- vjp -------------------------------------------------------------------------------------------
@table((3,), (3,))
def vjp_one(T):
    def fn(x, ct):
        out, pull = T.vjp(torch.sin, x)
        return out, pull(ct)

    return fn


@table((3,))
def vjp_cotangents_of_other_dtypes(T):
    def f(x):
        _, pull = T.vjp(torch.sin, x)
        inside = T.vmap(lambda c: pull(c.double() * 2))(torch.stack([x.detach(), -x.detach()]))
        return (
            pull(x.detach().double()),
            pull(torch.arange(3)),
            pull(x.detach() > 0),
            pull(x.detach().bfloat16()),
            inside,
        )

    return f


@table((2, 3), (3, 4), (2, 4))
def vjp_two_primals(T):
    def fn(x, y, ct):
        out, pull = T.vjp(torch.matmul, x, y)
        return out, pull(ct), pull(ct * 2)

    return fn


@table((3,))
def vjp_trees(T):
    def fn(x):
        out, pull = T.vjp(
            lambda d: {"s": d["a"].sin(), "t": [d["b"] * d["a"], d["a"].sum()]},
            {"a": x, "b": x * 2},
        )
        return out, pull({"s": x, "t": [x + 1, x.sum()]})

    return fn


@table((3,))
def vjp_aux(T):
    def fn(x):
        out, pull, aux = T.vjp(lambda a: (a * 2, {"k": a + 1}), x, has_aux=True)
        return out, pull(x), aux

    return fn


@table((4, 3))
def vjp_pull_under_vmap(T):
    def fn(x):
        _, pull = T.vjp(lambda a: a.sin(), x[0])
        return T.vmap(pull)(x)

    return fn


@table((3,))
def vjp_inside_grad(T):
    def fn(x):
        _, pull = T.vjp(lambda a: a**3, x)
        return pull(x)[0].sum()

    return T.grad(fn)


# -- jvp, linearize --------------------------------------------------------------------------------
@table((3,), (3,))
def jvp_one(T):
    return lambda x, t: T.jvp(torch.sin, (x,), (t,))


@table((3,), (3,))
def jvp_two(T):
    return lambda x, t: T.jvp(lambda a, b: (a * b, a + b), (x, t), (t, x))


@table((3,), (3,))
def jvp_trees_and_aux(T):
    return lambda x, t: T.jvp(
        lambda d: ({"o": d["a"] * 2}, [d["a"]]), ({"a": x},), ({"a": t},), has_aux=True
    )


@table((3,))
def jvp_of_jvp(T):
    return lambda x: T.jvp(
        lambda y: T.jvp(lambda z: z**3, (y,), (y,))[1], (x,), (torch.ones_like(x),)
    )


@table((3,))
def jvp_of_grad(T):
    return lambda x: T.jvp(T.grad(lambda a: (a**3).sum()), (x,), (x,))


@table((3,))
def grad_of_jvp(T):
    return T.grad(lambda x: T.jvp(lambda a: a.exp(), (x,), (x,))[1].sum())


@table((4, 3))
def vmap_of_jvp(T):
    return T.vmap(lambda x: T.jvp(lambda a: a.prod(), (x,), (torch.ones_like(x),)))


@table(double(3), double(3))
def jvp_tangents_of_narrower_dtypes(T):
    def f(x, t):
        z = torch.complex(x, t)
        written = x.clone()
        narrow = t.float()
        doubled = T.jvp(lambda a: a.mul_(2).sin(), (written,), (narrow,))
        inside = T.vmap(lambda a, b: T.grad(lambda c: T.jvp(lambda d: d**3, (a,), (c,))[1])(b))(
            x, t.bfloat16()
        )
        nested = T.jvp(lambda a: T.jvp(torch.sin, (a,), (t.half(),))[1], (x,), (t.float(),))
        complex_ = T.jvp(torch.exp, (z,), (t,)), T.jvp(torch.exp, (z,), (z.to(torch.complex64),))
        return (
            T.jvp(torch.sin, (x,), (t.float(),)),
            complex_,
            doubled,
            written,
            narrow,
            inside,
            nested,
        )

    return f


@table((3,))
def jvp_constant_output(T):
    return lambda x: T.jvp(lambda a: (a, torch.ones(2)), (x,), (x,))


@table((3,))
def linearize_one(T):
    def fn(x):
        out, push = T.linearize(lambda a: (a.sin(), a.sum()), x)
        return out, push(x), push(x * 2)

    return fn


@table((3,), (3,))
def linearize_trees(T):
    def fn(x, y):
        out, push = T.linearize(lambda a, d: {"o": a * d["k"]}, x, {"k": y})
        return out, push(y, {"k": x})

    return fn


@table((4, 3))
def linearize_under_vmap(T):
    def fn(x):
        _, push = T.linearize(torch.exp, x[0])
        return T.vmap(push)(x)

    return fn


@table((3,))
def linearize_integer_outputs(T):
    def fn(x):
        out, push = T.linearize(
            lambda a: {"sorted": a.sort(), "largest": a.max(0), "positive": a > 0}, x
        )
        return out, push(x), push(x * 2), T.vmap(push)(torch.stack([x, x * 2]))

    return fn


# -- jacrev, jacfwd, hessian -----------------------------------------------------------------------
def _jacobians(name: str, transform: Any) -> None:
    def build(suffix: str, make: Any, *arguments: Any) -> None:
        make.__name__ = f"{name}_{suffix}"
        table(*arguments)(make)

    build("square", lambda T: transform(T)(lambda x: x**2), (3,))
    build("matrix", lambda T: transform(T)(lambda x: x @ x.T), (2, 3))
    build("scalar_output", lambda T: transform(T)(lambda x: x.prod()), (3,))
    build("scalar_input", lambda T: transform(T)(lambda x: torch.stack([x, x**2])), ())
    build("argnums", lambda T: transform(T)(lambda x, y: x * y**2, argnums=1), (3,), (3,))
    build(
        "argnums_tuple",
        lambda T: transform(T)(lambda x, y: x[:, None] * y**2, argnums=(0, 1)),
        (3,),
        (2,),
    )
    build(
        "output_tree",
        lambda T: transform(T)(lambda x: {"a": x.sin(), "b": (x.sum(), x[None])}),
        (3,),
    )
    build(
        "input_tree",
        lambda T: lambda x, y: transform(T)(lambda d: d["a"] * d["b"][0].sum())({"a": x, "b": [y]}),
        (3,),
        (2,),
    )
    build(
        "both_trees",
        lambda T: (
            lambda x, y: transform(T)(lambda d: Point(d["a"].sum(), d["b"] * 2))({"a": x, "b": y})
        ),
        (3,),
        (2,),
    )
    build("aux", lambda T: transform(T)(lambda x: (x**2, {"k": x + 1}), has_aux=True), (3,))
    build("tuple_output", lambda T: transform(T)(lambda x: (x, x * 2)), (3,))
    build("twice", lambda T: transform(T)(transform(T)(lambda x: x**3)), (2,))
    build("under_vmap", lambda T: T.vmap(transform(T)(torch.sin)), (4, 3))
    build("under_grad", lambda T: T.grad(lambda x: transform(T)(lambda a: a**3)(x).sum()), (3,))
    build("float64", lambda T: transform(T)(torch.exp), double(3))
    build(
        "independent_output", lambda T: transform(T)(lambda x: (x, torch.ones(2))), (3,)
    ) if name == "jacfwd" else None


_jacobians("jacrev", lambda T: T.jacrev)
_jacobians("jacfwd", lambda T: T.jacfwd)
_jacobians("jacrev_in_chunks", lambda T: partial(T.jacrev, chunk_size=2))


@table((3,))
def hessian_of_scalar(T):
    return T.hessian(lambda x: x.sin().prod())


@table((3,), (2,))
def hessian_argnums_tuple(T):
    return T.hessian(lambda x, y: (x.prod() * y.sin()).sum(), argnums=(0, 1))


@table((2, 3))
def hessian_of_vector(T):
    return T.hessian(lambda x: x.sum(0) ** 3)


@table((4, 3))
def hessian_under_vmap(T):
    return T.vmap(T.hessian(lambda x: (x**4).sum()))


@table((3,))
def jacrev_of_jacfwd(T):
    return T.jacrev(T.jacfwd(lambda x: x.sin().sum()))


@table((2, 4))
def hessian_of_module_parameters(T):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    return lambda x: T.hessian(lambda p: T.functional_call(model, p, (x,)).tanh().sum())(parameters)


# -- modules ---------------------------------------------------------------------------------------
@table((2, 4))
def functional_call_two_dicts(T):
    model = nn.BatchNorm1d(4).eval()
    return lambda x: T.functional_call(
        model, ({"weight": x[0], "bias": x[1]}, {"running_mean": x[1], "running_var": x[0] ** 2}), x
    )


@table((3, 4))
def functional_call_tied(T):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    model.forward = lambda x: model["b"](model["a"](x))
    return lambda x: (
        T.grad(lambda w: T.functional_call(model, {"a.weight": w}, x).sum())(torch.eye(4) * 2),
        T.grad(lambda w: T.functional_call(model, {"a.weight": w}, x, tie_weights=False).sum())(
            torch.eye(4) * 2
        ),
    )


@table((3, 4))
def ensemble(T):
    models = [linear(seed) for seed in range(5)]
    params, buffers = T.stack_module_state(models)

    def call(p, b, x):
        return T.functional_call(models[0], (p, b), (x,))

    return lambda x: (T.vmap(call, in_dims=(0, 0, None))(params, buffers, x), params, buffers)


@table((3, 4))
def functionalize_in_place(T):
    def fn(x):
        y = x.clone()
        y.view(-1)[2:].add_(1)
        return y

    return T.functionalize(fn)


@table((3, 4))
def functionalize_inside_vmap(T):
    return T.vmap(T.functionalize(lambda x: x.clone().add_(1), remove="mutations_and_views"))


@table((3, 4))
def a_long_composition(T):
    def energy(x, w):
        return (torch.tanh(x @ w) ** 2).sum()

    def fn(x):
        w = x.T @ x
        h = T.hessian(energy)(x[0], w)
        j = T.jacfwd(T.grad(energy), argnums=1)(x[1], w)
        return T.vmap(
            lambda v: T.jvp(
                lambda a: T.vjp(lambda b: energy(b, w), a)[1](torch.tensor(1.0))[0], (x[0],), (v,)
            )[1]
        )(h), j

    return fn


@pytest.mark.parametrize("case", table.cases, ids=table.names)
def test_against_torch_func(case: Case) -> None:
    arguments = case.arguments()
    same(
        ours(case, arguments),
        theirs(case, arguments),
        **TOLERANCE.get(getattr(arguments[0], "dtype", None), {}),
    )


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "case", [c for c in table.cases if c.jit], ids=[c.name for c in table.cases if c.jit]
)
def test_compiled_against_torch_func(case: Case) -> None:
    arguments = case.arguments()
    same(
        ours_jitted(case, arguments),
        theirs(case, arguments),
        **TOLERANCE.get(getattr(arguments[0], "dtype", None), {}),
    )


def test_no_grad_around_a_transform_does_not_reach_into_it() -> None:
    from torchfunc_jax import grad, jacrev, jvp

    x = torch.randn(3)
    with torch.no_grad():
        same(grad(lambda a: (a**2).sum())(x), 2 * x)
        same(jacrev(lambda a: a**2)(x), torch.diag(2 * x))
        same(jvp(lambda a: a**2, (x,), (x,))[1], 2 * x * x)
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7, 9])
def test_chunk_vmap(chunks: int) -> None:
    from torch._functorch.apis import chunk_vmap as reference

    from torchfunc_jax import chunk_vmap

    x = torch.randn(9, 3)
    calls = []

    def fn(a: torch.Tensor) -> Any:
        calls.append(1)
        return a.sin(), a.sum()

    for size in range(1, 10):
        expected, many = reference(fn, chunks=chunks)(x[:size]), len(calls)
        same(chunk_vmap(fn, chunks=chunks)(x[:size]), expected)
        assert len(calls) == 2 * many
        calls.clear()
    assert chunk_vmap(fn, chunks=chunks)(x[:0])[0].shape == (0, 3)


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_randomness(randomness: str, chunk_size: int | None) -> None:
    from torchfunc_jax import vmap

    draws = lambda: vmap(
        lambda x: x + torch.randn(4), randomness=randomness, chunk_size=chunk_size
    )(torch.zeros(6, 4))
    torch.manual_seed(3)
    first, second = draws(), draws()
    torch.manual_seed(3)
    assert torch.equal(first, draws()), "manual_seed does not repeat a run"
    assert not torch.equal(first, second)
    lanes = len({tuple(lane.tolist()) for lane in first})
    assert lanes == (1 if randomness == "same" else 6)


def test_randomness_error_is_the_default() -> None:
    from torchfunc_jax import vmap

    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(lambda x: x + torch.randn(4))(torch.zeros(6, 4))


def _without_grad(x):
    with torch.no_grad():
        return x * 2


def _filled(x):
    y = x.clone()
    y[:] = torch.ones(3)
    return y


STRICT = {
    "times two": lambda x: x * 2,
    "sign": torch.sign,
    "floor": lambda x: (x.floor(), x),
    "to the power of 0": lambda x: x**0,
    "another dtype": lambda x: x.round().double(),
    "a view": lambda x: x.trunc().view(3, 1)[1:],
    "fill_": lambda x: x.clone().fill_(1.0),
    "zero_": lambda x: x.clone().zero_(),
    "copy_": lambda x: x.clone().copy_(torch.ones(3)),
    "indexed": _filled,
    "under no_grad": _without_grad,
    "a constant": lambda x: torch.ones(3),
    "one of two": lambda x: (x, torch.ones(2)),
    "zeros_like": torch.zeros_like,
    "detach": lambda x: x.detach().sign(),
    "a comparison": lambda x: x > 0,
    "where": lambda x: torch.where(x > 0, torch.ones(3), torch.zeros(3)),
    "by way of integers": lambda x: x.long().float(),
}
STRICTLY = {
    "alone": lambda T, f, x: T.jvp(f, (x[0],), (x[1],), strict=True),
    "dict": lambda T, f, x: T.jvp(
        lambda d: {"o": f(d["a"])}, ({"a": x[0]},), ({"a": x[1]},), strict=True
    ),
    "vmap": lambda T, f, x: T.vmap(lambda a, t: T.jvp(f, (a,), (t,), strict=True))(x, x),
    "vmap inside": lambda T, f, x: T.jvp(T.vmap(f), (x,), (x,), strict=True),
    "in grad": lambda T, f, x: T.grad(
        lambda a: sum(t.sum() for t in pytree.tree_leaves(T.jvp(f, (a,), (a,), strict=True)))
    )(x[0]),
    "a value asked for": lambda T, f, x: T.jvp(
        lambda a: f(a) if a.sum().item() < 99 else a, (x[0],), (x[1],), strict=True
    ),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", STRICT)
def test_strict_jvp_refuses_what_torch_funcs_refuses(name: str, jitted: bool) -> None:
    wrap = torchfunc_jax.jit if jitted else lambda f: f
    for way in STRICTLY:
        if jitted and way == "a value asked for":
            continue
        call = lambda T, x, way=way: STRICTLY[way](T, STRICT[name], x)
        for x in (
            torch.tensor([[1.5, -2.25, 0.75], [3.0, 0.5, -1.0]]),
            torch.tensor([[-0.5, 2.0, 1.0], [0.25, 4.0, 2.0]]),
        ):
            try:
                expected = call(torch.func, x)
            except RuntimeError as error:
                with pytest.raises(
                    RuntimeError, match="strict=True" if "strict=True" in str(error) else ""
                ):
                    wrap(partial(call, torchfunc_jax))(x)
            else:
                same(wrap(partial(call, torchfunc_jax))(x), expected)


def test_python_runs_at_every_call() -> None:
    from torchfunc_jax import grad, vmap

    calls = []

    def fn(x):
        calls.append(type(x))
        return (x**2).sum()

    for _ in range(3):
        grad(fn)(torch.randn(3))
        vmap(fn)(torch.randn(2, 3))
    assert len(calls) == 6


def test_torch_autograd_inside_vmap() -> None:
    from torchfunc_jax import jit, vmap

    def fn(x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return torch.autograd.grad((g * x).sum(), x)[0]

    x = torch.randn(4, 3)
    for transform in (vmap(fn), jit(vmap(fn))):
        same(transform(x), x.cos() - x * x.sin())


INSIDE: dict[str, Any] = {
    "grad": lambda T, x: T.grad(lambda a: a.sin().sum())(x),
    "grad_and_value": lambda T, x: T.grad_and_value(lambda a: (a * x).sin().sum())(x),
    "vjp": lambda T, x: T.vjp(torch.sin, x)[1](x),
    "jvp": lambda T, x: T.jvp(torch.sin, (x,), (x,)),
    "jacrev": lambda T, x: T.jacrev(lambda a: a.sin().sum(0))(x),
    "jacfwd": lambda T, x: T.jacfwd(lambda a: a.sin().sum(0))(x),
    "hessian": lambda T, x: T.hessian(lambda a: a.sin().sum())(x),
    "linearize": lambda T, x: T.linearize(torch.sin, x)[1](x),
    "vmap": lambda T, x: T.vmap(lambda a: a.sin() * x)(x),
    "vmap of grad": lambda T, x: T.vmap(T.grad(lambda a: a.sin().sum()))(x),
    "grad of grad": lambda T, x: T.grad(lambda a: T.grad(lambda b: b.sin().sum())(a).sum())(x),
}


@pytest.mark.parametrize("around", ["functionalize", "functional_call", "make_functional"])
@pytest.mark.parametrize("name", INSIDE)
def test_transforms_inside_what_is_no_transform_itself(name: str, around: str) -> None:
    """On torch tensors and on jax.Arrays, which cross the border differently."""
    x = torch.randn(2, 3)

    class Inside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            return INSIDE[name](torchfunc_jax, x * self.weight)

    def run(x: Any, weight: Any) -> Any:
        if around == "functionalize":
            return torchfunc_jax.functionalize(lambda x, w: INSIDE[name](torchfunc_jax, x * w))(
                x, weight
            )
        if around == "functional_call":
            return torchfunc_jax.functional_call(Inside(), {"weight": weight}, (x,))
        return torchfunc_jax.make_functional(Inside())[0]((weight,), x)

    expected = INSIDE[name](torch.func, x)
    for _ in range(2):
        same(run(x, torch.ones(())), expected)
    arrays = run(jnp.asarray(x.numpy()), jnp.ones(()))
    same(pytree.tree_map_only(jax.Array, lambda a: torch.from_numpy(np.array(a)), arrays), expected)


@pytest.mark.parametrize("wrap", ["un-jitted", "in grad", "in jit", "in vmap"])
def test_a_cotangent_of_none_is_one_for_a_number(wrap: str) -> None:
    def f(T: Any, v: torch.Tensor) -> torch.Tensor:
        _, pull = T.vjp(lambda a: ((a**3).sum(), (a * 2).sum(0, keepdim=True)), v)
        return pull((None, torch.ones(1) * 3))[0] + pull((None, None))[0]

    v = torch.tensor([1.0, -2.0, 3.0])
    found = {
        "un-jitted": lambda T: f(T, v),
        "in grad": lambda T: T.grad(lambda a: (f(T, a) ** 2).sum())(v),
        "in jit": lambda T: (torchfunc_jax.jit if T is torchfunc_jax else lambda g: g)(
            lambda a: f(T, a)
        )(v),
        "in vmap": lambda T: T.vmap(lambda a: f(T, a))(torch.stack([v, v * 2])),
    }[wrap]
    torch.testing.assert_close(found(torchfunc_jax), found(torch.func))
    for T in (torch.func, torchfunc_jax):
        with pytest.raises(
            RuntimeError, match="grad can be implicitly created only for scalar outputs"
        ):
            T.vjp(torch.sin, v)[1](None)
