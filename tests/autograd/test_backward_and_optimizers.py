"""torch's autograd through the border: backward, double backward, optimizers, beside torch.func and
plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import same
from torch import nn
from torch.utils import _pytree as pytree

import torchfunc_jax
from torchfunc_jax import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jit,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

MODES = {"eager": lambda f: f, "compiled": jit}
both = pytest.mark.parametrize("mode", MODES)


def data(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


# name: a function of (transforms, x [2, 3], w [3]) -> tensor(s); w is captured by closure
FUNCTIONS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "vmap": lambda T, x, w: T.vmap(lambda a: (a * w).sin())(x),
    "vmap of two outputs": lambda T, x, w: T.vmap(
        lambda a: {"s": a.sin() * w, "c": (a * w).cos().sum()}
    )(x),
    "grad": lambda T, x, w: T.grad(lambda a: (a**3 * w).sum())(x),
    "grad of captured only": lambda T, x, w: T.grad(lambda a: (a * w.exp()).sum())(x.detach()),
    "grad_and_value": lambda T, x, w: T.grad_and_value(lambda a: (a**3 * w).sum())(x),
    "grad aux": lambda T, x, w: T.grad(lambda a: ((a**3 * w).sum(), a * w), has_aux=True)(x),
    "vjp": lambda T, x, w: T.vjp(lambda a: a.exp() * w, x)[1](x * w),
    "vjp output": lambda T, x, w: T.vjp(lambda a: a.exp() * w, x)[0],
    "jvp": lambda T, x, w: T.jvp(lambda a: a.exp() * w, (x,), (x * w,)),
    "jacrev": lambda T, x, w: T.jacrev(lambda a: (a**2).sum(0) * w)(x),
    "jacfwd": lambda T, x, w: T.jacfwd(lambda a: (a**2).sum(0) * w)(x),
    "hessian": lambda T, x, w: T.hessian(lambda a: (a**4).sum() * w.prod())(x[0]),
    "per-sample": lambda T, x, w: T.vmap(T.grad(lambda a: (a**3 * w).sum()))(x),
    "nested": lambda T, x, w: T.vmap(
        lambda a: T.jvp(T.grad(lambda b: (b**3 * w).sum()), (a,), (w,))[1]
    )(x),
}


@both
@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_to_inputs_and_captured_tensors(name: str, mode: str) -> None:
    x, w = data(2, 3), data(3)
    f = FUNCTIONS[name]

    def gradients(out: Any) -> list[torch.Tensor | None]:
        leaves = [o for o in torch.utils._pytree.tree_leaves(out) if o.requires_grad]
        assert leaves
        weights = [torch.arange(1.0, o.numel() + 1, dtype=o.dtype).reshape(o.shape) for o in leaves]
        return torch.autograd.grad(leaves, [x, w], weights, allow_unused=True)

    expected = f(torch.func, x, w)
    found = MODES[mode](lambda a: f(torchfunc_jax, a, w))(x)
    same(found, expected)
    for mine, theirs in zip(gradients(found), gradients(expected), strict=True):
        assert (mine is None) == (theirs is None), (mine, theirs)
        if mine is not None:
            same(mine, theirs)


@pytest.mark.thin(4)
@both
@pytest.mark.parametrize("again", [False, True], ids=["backward", "backward of backward"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_cotangents_that_autograd_maps_over(name: str, again: bool, mode: str) -> None:
    """is_grads_batched, with cotangents for all outputs and for the first one, and as many lanes as
    the second call has.
    """
    x, w = data(2, 3), data(3)
    f = FUNCTIONS[name]

    def gradients(out: Any, lanes: int) -> list[Any]:
        leaves = [o for o in pytree.tree_leaves(out) if o.requires_grad]
        weights = [
            torch.arange(1.0, lanes * o.numel() + 1, dtype=o.dtype).reshape(lanes, *o.shape).sin()
            for o in leaves
        ]
        options: Any = {
            "is_grads_batched": True,
            "create_graph": again,
            "retain_graph": True,
            "allow_unused": True,
        }
        found = [
            torch.autograd.grad(leaves[:n], [x, w], weights[:n], **options)
            for n in (len(leaves), 1)
        ]
        if again:
            loss = sum((g**2).sum() for g in found[0] if g is not None)
            found.append(
                torch.autograd.grad(loss, [x, w], retain_graph=True, allow_unused=True)
                if loss.requires_grad
                else ()
            )
        return [g for grads in found for g in grads]

    expected = f(torch.func, x, w)
    found = MODES[mode](lambda a: f(torchfunc_jax, a, w))(x)
    for lanes in (4, 2):
        mine, theirs = gradients(found, lanes), gradients(expected, lanes)
        assert [g is None for g in mine] == [g is None for g in theirs]
        same([g for g in mine if g is not None], [g for g in theirs if g is not None])


@both
def test_autograds_own_vectorized_jacobians(mode: str) -> None:
    x = data(2, 3)
    call = MODES[mode](vmap(lambda row: row.sin() * row.sum()))
    theirs = torch.func.vmap(lambda row: row.sin() * row.sum())
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    same(jacobian(call, x, vectorize=True), jacobian(theirs, x))
    same(
        hessian(lambda x: call(x).prod(), x, vectorize=True), hessian(lambda x: theirs(x).prod(), x)
    )
    assert torch.autograd.gradcheck(call, (x,), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (x,), check_batched_grad=True)


# of the three outputs, what each depends on: a, b and the captured c
def _three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return a * 2 + c.detach(), b * 3 + c, a.round() * 1.0


THREE: dict[str, Callable[[Any, Any], Any]] = {
    "vmap": lambda api, f: api.vmap(f),
    "vmap of some": lambda api, f: lambda a, b: api.vmap(f, (0, None))(a, b[0]),
    "vjp": lambda api, f: lambda a, b: api.vjp(f, a, b)[0],
    "jvp": lambda api, f: (
        lambda a, b: api.jvp(f, (a, b), (torch.ones_like(a), torch.ones_like(b)))[0]
    ),
    "functionalize": lambda api, f: api.functionalize(f),
}


@both
@pytest.mark.parametrize("again", [False, True], ids=["backward", "backward of backward"])
@pytest.mark.parametrize("name", THREE)
def test_an_output_gives_gradients_only_to_what_it_depends_on(
    name: str, again: bool, mode: str
) -> None:
    a, b, c = data(3, 3), data(3, 3), data(3)

    def gradients(api: Any) -> list[Any]:
        call = THREE[name](api, lambda a, b: _three(a, b, c))
        outs = (MODES[mode](call) if api is torchfunc_jax else call)(a, b)
        return [
            torch.autograd.grad(
                o.sum(), (a, b, c), retain_graph=True, create_graph=again, allow_unused=True
            )
            for o in outs
        ]

    for mine, theirs in zip(gradients(torchfunc_jax), gradients(torch.func), strict=True):
        assert [g is None for g in mine] == [g is None for g in theirs]
        same([g for g in mine if g is not None], [g for g in theirs if g is not None])


@both
def test_a_head_that_was_not_called_keeps_no_gradient(mode: str) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "other": nn.Linear(3, 2)})
    x = torch.randn(4, 3)
    lanes = vmap(
        lambda p, x: functional_call(
            model["used"], {"weight": p["used.weight"], "bias": p["used.bias"]}, (x,)
        ),
        (None, 0),
    )
    MODES[mode](lambda p, x: lanes(p, x))(dict(model.named_parameters()), x).sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == [
        "other.weight",
        "other.bias",
    ]


@both
@pytest.mark.parametrize("name", ["vmap", "grad", "vjp", "jvp", "jacrev", "nested"])
def test_gradcheck_and_gradgradcheck(name: str, mode: str) -> None:
    x, w = data(2, 3), data(3)
    fn = MODES[mode](lambda a, b: FUNCTIONS[name](torchfunc_jax, a, b))
    assert torch.autograd.gradcheck(fn, (x, w), fast_mode=True)
    assert torch.autograd.gradgradcheck(fn, (x, w), fast_mode=True)


@both
def test_complex_gradients(mode: str) -> None:
    z = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    fn = MODES[mode](vmap(lambda a: a * a.conj() + a.exp()))
    assert torch.autograd.gradcheck(fn, (z,))
    same(
        torch.autograd.grad(fn(z).abs().sum(), z),
        torch.autograd.grad((z * z.conj() + z.exp()).abs().sum(), z),
    )


@both
def test_outputs_require_grad_exactly_when_torchs_do(mode: str) -> None:
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    fn = MODES[mode](vmap(lambda a: a * 2))
    assert not fn(x).requires_grad
    assert fn(x.clone().requires_grad_()).requires_grad
    captured = MODES[mode](vmap(lambda a: a * w, in_dims=0))
    assert captured(x).requires_grad
    with torch.no_grad():
        assert not captured(x).requires_grad
    if mode == "eager":
        assert not vmap(lambda a: a * w.detach())(x).requires_grad
    integers = MODES[mode](vmap(lambda a: (a * w).argmax()))
    assert not integers(x).requires_grad


#: What is computed of an argument and a captured tensor, both of which require grad; some outputs
#: go back to them and some do not.
WATCHED: dict[str, Any] = {
    "no_grad": lambda a, w: _without_grad(lambda: a * w),
    "detach": lambda a, w: a.detach() * w.detach(),
    "data": lambda a, w: a.data * w.data,
    "detached and not": lambda a, w: (a.detach() * w.detach(), a * w, a * 2, w * 3),
    "one of them": lambda a, w: (a * w.detach(), a.detach() * w, a.sin()),
    "the argument alone": lambda a, w: a * w.detach(),
    "the captured alone": lambda a, w: a.detach() * w,
    "no_grad beside": lambda a, w: (
        _without_grad(lambda: a * w) * a,
        _without_grad(lambda: w.exp()),
    ),
    "constants": lambda a, w: (torch.ones(3, dtype=a.dtype), a * 2),
    "integers": lambda a, w: (a > 0, w.argmax(), a.detach() > 0),
    "derivative zero": lambda a, w: (
        a.floor(),
        w.sign(),
        a.sgn(),
        w.round(),
        a.trunc(),
        w.clamp(9, 9),
        a.div(w, rounding_mode="floor"),
    ),
    "new ones": lambda a, w: (torch.zeros_like(a), a.new_ones(3), torch.full_like(w, 2.0), a * 0),
    "no derivative of an empty one": lambda a, w: (
        a[:0].sin(),
        nn.functional.relu6(w[3:]),
        torch.linalg.slogdet(a[:0].reshape(0, 0))[0],
    ),
    "outputs without one": lambda a, w: torch.linalg.lu(
        torch.outer(a, w) + torch.eye(3, dtype=a.dtype)
    ),
    "detach_": lambda a, w: (a.sin().detach_(), w.cos().detach_() * a),
    "shapes": lambda a, w: torch.full(a.shape, float(w.shape[0])),
    "written": lambda a, w: _filled(a, w),
}


def _without_grad(compute: Any) -> torch.Tensor:
    with torch.no_grad():
        return compute()


def _filled(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = torch.zeros(3, dtype=a.dtype), torch.zeros(3, dtype=a.dtype)
    first[1:] = a[1:]
    second[1:] = w.detach()[1:]
    return first, second, first + second


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.parametrize("recorded", ["both", "argument", "captured"])
@pytest.mark.parametrize("how", ["jit", "vmap", "jit of vmap"])
def test_each_output_requires_grad_where_torchs_does(name: str, recorded: str, how: str) -> None:
    a, w = (
        data(3).requires_grad_(recorded != "captured"),
        data(3).requires_grad_(recorded != "argument"),
    )
    fn = WATCHED[name]
    expected = fn(a, w)
    if how == "jit":
        actual = jit(lambda b: fn(b, w))(a)
    else:  # one lane, which changes nothing else
        lane = vmap(lambda _, b: fn(b, w), (0, None))
        actual = pytree.tree_map(
            lambda t: t[0], (jit(lane) if how == "jit of vmap" else lane)(torch.zeros(1), a)
        )
    mine, theirs = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
    same(actual, expected)
    assert [o.requires_grad for o in mine] == [o.requires_grad for o in theirs]
    for m, t in zip(mine, theirs, strict=True):
        if t.requires_grad:
            inputs = [x for x in (a, w) if x.requires_grad]
            same(
                *(
                    torch.autograd.grad(
                        o.sum(),
                        inputs,
                        retain_graph=True,
                        allow_unused=True,
                        materialize_grads=True,
                    )
                    for o in (m, t)
                )
            )


LINES: dict[str, Any] = {
    "linear": lambda x: 2 * x,
    "square": lambda x: x * x,
    "half detached": lambda x: x.detach() * x,
    "detached": lambda x: x.detach() * 2,
    "sign": lambda x: x.sign(),
    "floor": lambda x: x.floor() * 3,
}
TRANSFORMED: dict[str, Any] = {
    "grad": lambda T, f, x, v: T.grad(lambda x: f(x).sum())(x),
    "grad_and_value": lambda T, f, x, v: T.grad_and_value(lambda x: f(x).sum())(x),
    "aux of grad": lambda T, f, x, v: T.grad(lambda x: ((x * x).sum(), f(x)), has_aux=True)(x)[1],
    "vjp": lambda T, f, x, v: (lambda pair: (pair[0], pair[1](v)))(T.vjp(f, x)),
    "jvp": lambda T, f, x, v: T.jvp(f, (x,), (v,)),
    "linearize": lambda T, f, x, v: (lambda pair: (pair[0], pair[1](v)))(T.linearize(f, x)),
    "jacrev": lambda T, f, x, v: T.jacrev(f)(x),
    "jacfwd": lambda T, f, x, v: T.jacfwd(f)(x),
    "hessian": lambda T, f, x, v: T.hessian(lambda x: f(x).sum())(x),
    "vmap of grad": lambda T, f, x, v: T.vmap(T.grad(f))(x),
    "grad of grad": lambda T, f, x, v: T.grad(lambda x: T.grad(lambda x: f(x).sum())(x).sum())(x),
}


@pytest.mark.thin(4)
@both
@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("transform", TRANSFORMED)
def test_what_a_transform_returns_requires_grad_where_torch_funcs_does(
    transform: str, name: str, mode: str
) -> None:
    for primal, tangent in ((True, False), (False, True)):
        if name in ("sign", "floor") and transform in ("jvp", "jacfwd"):
            # the tangent is zero whichever: torch keeps no zeros where the operator's formula is
            # zeros
            continue
        if (
            (name, transform) == ("half detached", "linearize")
            and torch.__version__ >= (2, 14)
            and primal
        ):
            continue  # torch.func's then says that it requires grad, and has None as its gradient
        x, v = data(3).detach().requires_grad_(primal), data(3).detach().requires_grad_(tangent)
        expected = TRANSFORMED[transform](torch.func, LINES[name], x, v)
        actual = MODES[mode](lambda x, v: TRANSFORMED[transform](torchfunc_jax, LINES[name], x, v))(
            x, v
        )
        same(actual, expected)
        assert [o.requires_grad for o in pytree.tree_leaves(actual)] == [
            o.requires_grad for o in pytree.tree_leaves(expected)
        ]


#: Functions of x whose derivatives do not depend on the bias b, which their values do depend on.
BIASED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": lambda x, w, b: w * x**2 + b,
    "layers": lambda x, w, b: F.linear(
        F.linear(x, w.outer(w), b).tanh(), w.outer(w), b.detach() + b.sum()
    ),
    "in place": lambda x, w, b: (w * x.sin()).add_(b),
    "cat": lambda x, w, b: torch.cat([w * x * x, b]),
}


@both
@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "jacrev", "hessian", "vmap"])
def test_what_a_derivative_does_not_depend_on_has_no_gradient(
    transform: str, name: str, mode: str
) -> None:
    """An optimizer would change a parameter that has a gradient of zeros."""
    w, b, x = data(3).detach().requires_grad_(), data(3).detach().requires_grad_(), data(3).detach()

    def gradients(T: Any, wrap: Callable[..., Any]) -> tuple[Any, ...]:
        of = TRANSFORMED.get(transform, lambda T, f, x, v: T.vmap(T.jacfwd(f))(x[None]))
        call = wrap(lambda x: of(T, lambda x: BIASED[name](x, w, b), x, x + 1))
        found = pytree.tree_leaves(call(x))[-1]
        return torch.autograd.grad(found.sum(), [w, b], allow_unused=True)

    for mine, theirs in zip(
        gradients(torchfunc_jax, MODES[mode]), gradients(torch.func, lambda f: f), strict=True
    ):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            same(mine, theirs)


#: What depends on w through integers or booleans, and perhaps in another way too.
INTEGERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "argmax": lambda x, w: (x * w).argmax() / 5,
    "cast": lambda x, w: (x * w).long().double(),
    "mask": lambda x, w: (x * w > 0).double(),
    "accuracy": lambda x, w: ((x * w).argmax() == 1).float().mean(),
    "isnan": lambda x, w: (x * w).isnan().double(),
    "one_hot": lambda x, w: F.one_hot((x * w).argmax(), 3).double(),
    "indices": lambda x, w: (x * w).topk(2).indices.double(),
    "sorted": lambda x, w: (x * w).sort(),
    "index": lambda x, w: x[(x * w).argsort()],
    "where": lambda x, w: torch.where(x * w > 0, x, 0.0),
    "where of both": lambda x, w: torch.where(x * w > 0, x * w, x),
    "masked_fill": lambda x, w: x.masked_fill(x * w > 0, 0.0),
    "bucketize": lambda x, w: torch.bucketize(x * w, torch.tensor([0.0, 1.0])).double(),
    "product": lambda x, w: x * (x * w > 0),
    "written": lambda x, w: (x * 0).long().copy_(x * w).double(),
    "count": lambda x, w: torch.count_nonzero(x * w).double(),
    "sign": lambda x, w: (x * w).sign(),
    "relu": lambda x, w: (x * w).relu(),
    "max": lambda x, w: (x * w).max(0),
}


@pytest.mark.thin(4)
@both
@pytest.mark.parametrize("way", ["function", "vmap", "aux of grad", "grad of relu"])
@pytest.mark.parametrize("name", INTEGERS)
def test_nothing_goes_back_through_integers(name: str, way: str, mode: str) -> None:
    f, found, x, start = INTEGERS[name], [], data(3).detach(), data(3).detach()
    for T in (torchfunc_jax, torch.func):
        w = start.clone().requires_grad_()
        calls: dict[str, Callable[[torch.Tensor], Any]] = {
            "function": T.functionalize(lambda x, w=w: f(x, w)),
            "vmap": lambda x, w=w, T=T: T.vmap(lambda x: f(x, w))(torch.stack([x, -x])),
            "aux of grad": lambda x, w=w, T=T: T.grad(
                lambda x: ((x * w).sum(), f(x, w)), has_aux=True
            )(x)[1],
            "grad of relu": lambda x, w=w, T=T: (
                T.grad(lambda x: (x * w).relu().sum())(x),
                f(x, w),
            ),
        }
        outs = pytree.tree_leaves(
            (MODES[mode] if T is torchfunc_jax else lambda f: f)(calls[way])(x)
        )
        total = sum(o.sum() for o in outs if o.requires_grad)
        found.append(
            (
                outs,
                [o.requires_grad for o in outs],
                torch.autograd.grad(total, w) if isinstance(total, torch.Tensor) else None,
            )
        )
    (outs, *ours), (expected, *theirs) = found
    same(outs, expected)
    same(ours, theirs)


@both
@pytest.mark.parametrize("name", ["jvp", "jacfwd", "jvp of grad"])
def test_a_tangent_that_is_zero_everywhere_does_not_require_grad(name: str, mode: str) -> None:
    forward: dict[str, Any] = {
        "jvp": lambda T, f, x: T.jvp(f, (x,), (torch.ones_like(x),))[1],
        "jacfwd": lambda T, f, x: T.jacfwd(f)(x),
        "jvp of grad": lambda T, f, x: T.jvp(
            T.grad(lambda a: f(a).sum()), (x,), (torch.ones_like(x),)
        )[1],
    }
    for primal in (False, True):
        x, w = data(3).detach().requires_grad_(primal), data(3)
        for f in (
            lambda x, w=w: w * 1,
            lambda x, w=w: x.detach() * w,
            lambda x, w=w: x * w,
            lambda x, w=w: x * x * w,
        ):
            expected = forward[name](torch.func, f, x)
            actual = MODES[mode](lambda x, f=f: forward[name](torchfunc_jax, f, x))(x)
            same(actual, expected)
            assert actual.requires_grad == expected.requires_grad


def test_what_only_no_grad_reads_gets_no_gradient_of_a_compiled_function() -> None:
    w, v = data(3), data(3)
    jit(lambda a: a * w.detach() * v)(torch.ones(3, dtype=torch.float64)).sum().backward()
    assert w.grad is None
    same(v.grad, w.detach())


@both
def test_no_grad_inside_the_function(mode: str) -> None:
    x, w = data(2, 3), data(3)

    def fn(a: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            c = a * a * w
        return a - c

    out = MODES[mode](vmap(fn))(x)
    same(out, (x - x * x * w))
    same(torch.autograd.grad(out.sum(), x)[0], torch.ones(2, 3, dtype=torch.float64))


def test_a_function_runs_once_a_call_also_where_it_captures_tensors_that_require_grad() -> None:
    runs, w = [], torch.randn(3, requires_grad=True)
    model = nn.Linear(3, 2)

    def fn(a: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return model(a * w)

    for n in range(1, 4):
        vmap(fn)(torch.randn(2, 3)).sum().backward()
        assert len(runs) == n


def test_what_a_call_does_not_use_gets_no_gradient() -> None:
    def predict(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return vmap(lambda a: model(a))(x)

    first, second, x = nn.Linear(3, 1), nn.Linear(3, 1), torch.randn(2, 3)
    for model, other in ((first, second), (second, first), (first, second)):
        first.zero_grad(), second.zero_grad()
        predict(model, x).sum().backward()
        same(model.weight.grad, x.sum(0)[None])
        assert other.weight.grad is None


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_manual_seed_repeats_the_first_call_too(randomness: str) -> None:
    w = torch.randn(3, requires_grad=True)
    fn = vmap(lambda a: a * w + torch.rand(3), randomness=randomness)
    results = []
    for _ in range(3):
        torch.manual_seed(5)
        results.append(fn(torch.ones(4, 3)))
    same(results[1], results[0])
    same(results[2], results[0])


@both
def test_gradient_penalty(mode: str) -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(6, 4)

    def penalty(transforms: Any, wrap: Any) -> list[torch.Tensor]:
        critic.zero_grad()
        slopes = wrap(transforms.vmap(transforms.grad(lambda a: critic(a).sum())))(x)
        ((slopes.norm(dim=1) - 1) ** 2).mean().backward()
        return [
            p.grad.clone() if p.grad is not None else torch.zeros_like(p)
            for p in critic.parameters()
        ]

    same(
        penalty(torchfunc_jax, MODES[mode]), penalty(torch.func, lambda f: f), rtol=1e-4, atol=1e-6
    )


@both
def test_double_backward_gradient_penalty(mode: str) -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(6, 4, requires_grad=True)

    def penalty(call: Any) -> list[torch.Tensor]:
        critic.zero_grad()
        (slopes,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        ((slopes.norm(dim=1) - 1) ** 2).mean().backward()
        return [
            p.grad.clone() if p.grad is not None else torch.zeros_like(p)
            for p in critic.parameters()
        ]

    same(penalty(MODES[mode](vmap(critic))), penalty(critic), rtol=1e-4, atol=1e-6)


@both
def test_adam_trains_an_ensemble_as_under_torch_func(mode: str) -> None:
    def train(transforms: Any, wrap: Any) -> list[float]:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(4)]
        x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        params, buffers = transforms.stack_module_state(models)
        optimizer = torch.optim.Adam(params.values(), lr=1e-2)

        def loss(p: Any, b: Any) -> torch.Tensor:
            return F.cross_entropy(transforms.functional_call(models[0], (p, b), (x,)), y)

        step = wrap(transforms.vmap(loss))
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            total = step(params, buffers).sum()
            total.backward()
            optimizer.step()
            losses.append(total.item())
        return losses

    expected = train(torch.func, lambda f: f)
    assert expected[-1] < expected[0]
    assert train(torchfunc_jax, MODES[mode]) == pytest.approx(expected, rel=1e-5)


@both
def test_a_module_trains_as_in_plain_torch(mode: str) -> None:
    def train(wrap: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        x, y = torch.randn(16, 4), torch.randn(16, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        call = wrap(model)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = F.mse_loss(call(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return [
            *losses,
            *model[1].running_mean.tolist(),
            *model[1].running_var.tolist(),
            float(model[1].num_batches_tracked),
        ]

    wrap = jit if mode == "compiled" else torchfunc_jax.functionalize
    assert train(wrap) == pytest.approx(train(lambda m: m), rel=2e-4, abs=1e-5)


@both
def test_a_saved_tensor_modified_in_place_raises(mode: str) -> None:
    x = torch.randn(3, requires_grad=True)
    inner = x * 1
    out = MODES[mode](vmap(lambda a: a.exp() * a))(inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@both
def test_retain_graph_and_accumulation(mode: str) -> None:
    x = torch.randn(3, requires_grad=True)
    out = MODES[mode](vmap(lambda a: a**2))(x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    same(x.grad, 4 * x, graph=False)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@both
def test_hooks_and_mixed_graphs(mode: str) -> None:
    x = torch.randn(3, requires_grad=True)
    seen = []
    y = x * 3
    y.register_hook(lambda g: seen.append(g.clone()))
    out = MODES[mode](vmap(torch.sin))(y) ** 2
    out.sum().backward()
    same(seen, [2 * y.sin() * y.cos()], graph=False)
    same(x.grad, 6 * y.sin() * y.cos(), graph=False)


def test_pullbacks_take_part_too() -> None:
    x, ct = data(3), data(3)
    _, pull = vjp(lambda a: a.exp(), x)
    _, push = linearize(lambda a: a.exp(), x)
    for result in (pull(ct)[0], push(ct)):
        same(torch.autograd.grad(result.sum(), [x, ct]), (ct * x.exp(), x.exp()), graph=False)


def test_jacobians_of_parameters_take_part() -> None:
    model = nn.Linear(3, 1, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)
    for transform, reference in (
        (jacrev, torch.func.jacrev),
        (jacfwd, torch.func.jacfwd),
        (hessian, torch.func.hessian),
    ):
        mine, theirs = (t(lambda a: model(a).tanh().sum())(x[0]) for t in (transform, reference))
        same(
            torch.autograd.grad(mine.sum(), model.weight),
            torch.autograd.grad(theirs.sum(), model.weight),
        )


def test_stacked_state_is_new_leaves() -> None:
    models = [nn.BatchNorm1d(3) for _ in range(2)]
    params, buffers = stack_module_state(models)
    assert all(p.is_leaf and p.requires_grad for p in params.values())
    assert not any(b.requires_grad for b in buffers.values())
    x = torch.randn(4, 3)
    out = vmap(lambda p: functional_call(models[0].eval(), p, (x,)))(params)
    grad_and_value(lambda p: vmap(lambda q: q["weight"].sum())(p).sum())(params)
    out.sum().backward()
    assert params["weight"].grad is not None and models[0].weight.grad is None


def test_jvp_and_grad_of_a_tensor_that_requires_grad_agree_with_torch_func() -> None:
    x = data(3)
    for f in (
        lambda T: T.jvp(torch.exp, (x,), (x,))[1],
        lambda T: T.grad(lambda a: (a**3).sum())(x),
    ):
        same(
            torch.autograd.grad(f(torchfunc_jax).sum(), x),
            torch.autograd.grad(f(torch.func).sum(), x),
        )
    same(grad(lambda a: jvp(torch.exp, (a,), (a,))[1].sum())(x), x.exp() * (x + 1))


class _Hidden:
    """Holds a tensor where nobody looks for it."""

    def __init__(self, t: torch.Tensor) -> None:
        self.held = iter([t])
        self.get = {id(self): t}.__getitem__

    def __call__(self) -> torch.Tensor:
        return self.get(id(self))


@pytest.mark.parametrize("wrap", [functionalize, jit, lambda f: lambda x: vmap(f)(x[None])[0]])
def test_a_run_that_does_not_count_writes_nothing(wrap: Any) -> None:
    """A tensor that requires grad is met by a way that was not looked into: the function is run
    again, and writes once.
    """
    weight, counted = torch.ones(3, requires_grad=True), torch.zeros(())
    hidden = _Hidden(weight)

    def f(x: torch.Tensor) -> torch.Tensor:
        if wrap in (functionalize, jit):
            counted.add_(1)
        return x * hidden()

    mine = wrap(f)
    for k in range(1, 4):
        weight.grad = None
        mine(torch.full((3,), float(k))).sum().backward()
        same(weight.grad, torch.full((3,), float(k)))
        assert counted.item() == (k if wrap in (functionalize, jit) else 0)


@pytest.mark.parametrize("argument_requires_grad", [False, True])
@pytest.mark.parametrize("wrap", [functionalize, jit])
def test_buffers_get_the_history_that_pytorch_gives_them(
    wrap: Any, argument_requires_grad: bool
) -> None:
    """A running mean of constants gets none, however often it is updated; a copy of what requires
    grad does.
    """
    weight = torch.arange(1.0, 4.0).requires_grad_()

    def results(wrap: Any) -> list[Any]:
        mean, copied, part = torch.zeros(3), torch.zeros(3), torch.zeros(5)

        def f(x: torch.Tensor) -> torch.Tensor:
            mean.mul_(0.9).add_(x.detach())
            copied.copy_(x * weight)
            part[1:4] = x * weight
            return (x * weight).sum()

        run, found = wrap(f), []
        for k in range(3):
            x = (torch.arange(3.0) + k).requires_grad_(argument_requires_grad)
            out = run(x)
            wanted = [weight, x] if argument_requires_grad else [weight]
            grads = torch.autograd.grad(out + 2 * copied.sum() + 3 * part.sum(), wanted)
            found += [
                out,
                mean.clone(),
                copied.clone(),
                part.clone(),
                *grads,
                mean.requires_grad,
                copied.requires_grad,
                part.requires_grad,
            ]
            copied.detach_()
            part.detach_()
        return found

    for mine, theirs in zip(results(wrap), results(lambda f: f), strict=True):
        same(mine, theirs)


def test_a_captured_tensor_with_a_history_is_changed_by_a_record() -> None:
    found = []
    for wrap in (functionalize, lambda f: f):
        leaf, x = torch.ones(3, requires_grad=True), torch.full((3,), 5.0, requires_grad=True)
        computed = leaf * 2
        out = wrap(lambda x, computed=computed: computed.mul_(x))(x)
        found.append(
            [computed, out, *torch.autograd.grad(computed.sum() + 2 * out.sum(), [leaf, x])]
        )
    same(*found)


def test_a_captured_tensor_with_a_history_is_not_changed() -> None:
    computed = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(
        RuntimeError, match="a tensor from outside that requires grad was changed in place"
    ):
        jit(lambda x: computed.mul_(x))(torch.ones(3))
    same(computed, torch.full((3,), 2.0), graph=False)
    assert computed.grad_fn is not None and "Mul" in computed.grad_fn.name()
