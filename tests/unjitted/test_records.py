"""Records of un-jitted code (bridge/record)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from agreement import same
from autograd_functions import ContextInForward, Cubed, Function, SavesItsOutput, SetupContext
from jax.experimental.compilation_cache import compilation_cache
from torch import nn

import torchfunc_jax
from bridge.errors import NotInLoopError
from bridge.process import process
from bridge.record import programs, replay, transforms, words
from bridge.trace import python_numbers
from bridge.trace.python_numbers import Inputs
from bridge.xla import disk

pytestmark = pytest.mark.usefixtures("unrecorded")
X = torch.linspace(-1, 1, 12).reshape(4, 3)


def _layer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    return layer, {k: v.detach() for k, v in layer.named_parameters()}


def _inner_step(T: Any, x: torch.Tensor, lr: float) -> Any:
    layer, params = _layer()

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (T.functional_call(layer, p, (x,)) - x.sum(-1, keepdim=True)).pow(2).mean()

    def adapted(p: Any, x: torch.Tensor) -> torch.Tensor:
        grads = T.grad(loss)(p, x)
        return loss({k: p[k] - lr * grads[k] for k in p}, x)

    return T.grad(lambda p: T.vmap(adapted, (None, 0))(p, x[:, None]).mean())(params)


PROGRAMS: dict[str, Callable[[Any, torch.Tensor, float], Any]] = {
    "vmap of grad": lambda T, x, s: T.vmap(T.grad(lambda r: (r.sin() * s).sum()))(x),
    "jvp of grad": lambda T, x, s: T.jvp(T.grad(lambda t: (t.exp() * t * s).sum()), (x,), (x * s,)),
    "hessian": lambda T, x, s: T.hessian(lambda t: (t.tanh() * s).prod())(x[0]),
    "jacrev": lambda T, x, s: T.jacrev(lambda t: t.cos() @ t * s)(x[:3]),
    "a step of an inner optimizer": _inner_step,
    "a value that Python asks for": lambda T, x, s: T.grad(
        lambda t: (t * 2).sum() if t.sum() > s else (t * s).sum()
    )(x),
    "vjp": lambda T, x, s: T.vjp(lambda t, u: ((t * s).sin() * u, u.sum()), x, x + 1)[1](
        (x, torch.tensor(s))
    ),
    "vjp inside grad": lambda T, x, s: T.grad(
        lambda t: T.vjp(lambda u: (u * s).exp(), t)[1](t)[0].sum()
    )(x),
    "vjp inside vmap": lambda T, x, s: T.vmap(
        lambda r: T.vjp(lambda u: (u * s).exp(), r)[1](r * 2)[0]
    )(x),
    "a pullback under vmap": lambda T, x, s: T.vmap(T.vjp(lambda t: (t * s).tanh(), x[0])[1])(
        torch.eye(3)
    ),
    "linearize": lambda T, x, s: T.linearize(lambda t: (t * s).sin(), x)[1](x + 1),
    "linearize twice": lambda T, x, s: [
        T.vmap(T.linearize(lambda t: (t * s).cos(), r)[1])(torch.eye(3)) for r in x[:2]
    ],
    "in place": lambda T, x, s: T.vmap(lambda r: r.clone().mul_(s).add_(r[0]))(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_shapes_that_change(name: str) -> None:
    for x, s in ((X, 0.5), (X, 0.25), (X[:3], 0.25), (X + 1, -2.0), (X, 0.5)):
        same(
            PROGRAMS[name](torchfunc_jax, x, s),
            PROGRAMS[name](torch.func, x, s),
            rtol=1e-4,
            atol=1e-5,
        )


def _squared_and_moved(t: torch.Tensor) -> torch.Tensor:
    square = t * t
    t.add_(1)
    return square


def _doubled_without_grad(t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        t.mul_(2)
    return t.sin()


WRITING = {
    "write first": lambda t: t.mul_(2).sin(),
    "write last": _squared_and_moved,
    "write without grad": _doubled_without_grad,
}


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("way", ["alone", "jit", "dict"])
def test_a_pushforward_does_not_repeat_the_writes_of_its_function(way: str, name: str) -> None:
    """torch.func's own writes to the primal again, at each call;
    the expected tangents are jvp's.
    """
    f, tangents = WRITING[name], [torch.ones(2), torch.tensor([3.0, -1.0]), torch.ones(2)]

    def pushed(x: torch.Tensor) -> Any:
        given = (lambda d: f(d["a"])), {"a": x}
        out, push = torchfunc_jax.linearize(*(given if way == "dict" else (f, x)))
        wrapped = (lambda t: push({"a": t})) if way == "dict" else push
        return (
            out,
            [wrapped(t) for t in tangents],
            torchfunc_jax.vmap(wrapped)(torch.stack(tangents)),
            x.clone(),
        )

    pushed = torchfunc_jax.jit(pushed) if way == "jit" else pushed
    for start in (torch.tensor([1.0, 2.0]), torch.tensor([-2.0, 0.5])):
        x, mine = start.clone(), start.clone()
        expected = [torch.func.jvp(f, (start.clone(),), (t.clone(),))[1] for t in tangents]
        same(pushed(mine), (f(x), expected, torch.stack(expected), x))
        same(mine, x)


def test_a_write_to_the_memory_of_a_primal_with_a_history() -> None:
    def f(t: torch.Tensor) -> torch.Tensor:
        return t.detach().mul_(2) + t.sin()

    x, v = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(2)
    expected = torch.func.vjp(f, x * 1)[1](v)
    same(torchfunc_jax.vjp(f, x * 1)[1](v), expected)
    same(torchfunc_jax.linearize(f, x * 1)[1](v), torch.func.jvp(f, (x * 1,), (v,))[1])


def _written_by_mask(t: torch.Tensor) -> torch.Tensor:
    z = t * 2
    z[z > 1] = t[0]
    return z


Y = torch.linspace(-2, 2, 15).reshape(3, 5)
BY_VALUE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a mask": lambda t: t[t > 0] ** 2,
    "a mask among other indices": lambda t: (t * Y)[:, t > 0].prod(1),
    "written by a mask": _written_by_mask,
    "one mask after another": lambda t: (lambda z: z[z > 2] * t.sum())(t[t > 0] * 1.5),
    "masked_select": lambda t: t.masked_select(t > 1).sin(),
    "masked_select of a broadcast": lambda t: torch.masked_select(t * Y, t > 0),
    "nonzero": lambda t: t[(t > 0).nonzero()[:, 0]].exp(),
    "where": lambda t: t[torch.where(t > 0)] ** 2,
    "argwhere": lambda t: t[torch.argwhere(t > 0)[:, 0]].cos(),
    "unique": lambda t: t.sum() * torch.unique(t > 0),
    "repeat_interleave": lambda t: torch.repeat_interleave(t, (t > 0).long() * 2) ** 2,
    "bincount": lambda t: torch.bincount((t > 0).long()) * t.sum(),
    "a length": lambda t: t[: int((t > 0).sum())] * 3,
    "torch.tensor": lambda t: (
        t * torch.tensor([t.sum(), 1.0, t[:1], t[1].double(), X[0, 0]]).float()
    ),
    "as_tensor": lambda t: (
        t
        * torch.as_tensor([[s.sum()] for s in t], dtype=torch.float32)
        * torch.tensor((t[0], X[0, 0])).sum()
    ),
}


@pytest.mark.parametrize("name", BY_VALUE)
def test_shapes_that_depend_on_values(name: str) -> None:
    f = BY_VALUE[name]
    seen: list[int] = []

    def counted(t: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return f(t).sum()

    t = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
    for v in (t, t + 3, -t, t):
        same(
            torchfunc_jax.grad(counted)(v),
            torch.func.grad(lambda t: f(t).sum())(v),
            rtol=1e-4,
            atol=1e-5,
        )
        same(torchfunc_jax.jvp(f, (v,), (v,)), torch.func.jvp(f, (v,), (v,)), rtol=1e-4, atol=1e-5)
    assert len(seen) == 4


@pytest.mark.parametrize("again", [False, True], ids=["grad", "hessian"])
def test_checkpoint(again: bool) -> None:
    weight = torch.randn(3, 3, requires_grad=True)

    def loss(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        shift = x.sum()  # a closure over what the record made outside of the checkpointed function
        y = call(lambda x, *, by: ((x @ weight).tanh() + shift) * by, x, by=2.0)
        return call(torch.sin, y).sum()

    def checkpointed(function: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)

    name = "hessian" if again else "grad"
    mine = getattr(torchfunc_jax, name)(lambda x: loss(checkpointed, x))(X)
    theirs = getattr(torch.func, name)(
        lambda x: loss(lambda function, *args, **kwargs: function(*args, **kwargs), x)
    )(X)
    same(mine, theirs, rtol=1e-4, atol=1e-4)
    same(
        torch.autograd.grad(mine.sum(), weight),
        torch.autograd.grad(theirs.sum(), weight),
        rtol=1e-3,
        atol=1e-3,
    )


class Scaled(Function):
    """sin(x) with FACTOR times its derivative; a number, a tuple and None among its arguments; None
    and a mask among its outputs.
    """

    generate_vmap_rule = True
    runs = 0

    @staticmethod
    def forward(
        x: torch.Tensor, scale: float, more: tuple[int, ...], nothing: None
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        Scaled.runs += 1
        return x.sin() * scale, None, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.mark_non_differentiable(output[2])
        ctx.scale, ctx.kept = inputs[1], {"cos": inputs[0].cos()}

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, *_: Any) -> Any:
        return FACTOR * g * ctx.kept["cos"] * ctx.scale, None, None, None


FACTOR = 2.0
CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "context in forward": ContextInForward.apply,
    "setup_context": SetupContext.apply,
    "saves its output": SavesItsOutput.apply,
    "rules of its own": Cubed.apply,
    "arguments that are no tensors": lambda x: Scaled.apply(x, 0.5, (1, 2), None)[0],
}
WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, x: torchfunc_jax.grad(lambda t: f(t * 2).sum())(x),
    "grad of grad": lambda f, x: torchfunc_jax.grad(
        lambda t: torchfunc_jax.grad(lambda u: f(u).sum())(t).sin().sum()
    )(x),
    "vjp": lambda f, x: torchfunc_jax.vjp(f, x)[1](x),
    "jacrev": lambda f, x: torchfunc_jax.jacrev(f)(x),
    "vmap": lambda f, x: torchfunc_jax.vmap(f)(x),
    "vmap of grad": lambda f, x: torchfunc_jax.vmap(torchfunc_jax.grad(lambda r: f(r).sum()))(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_functions_with_derivatives_of_their_own(name: str, way: str) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def call(x: torch.Tensor) -> Any:
        out = WAYS[way](lambda t: CALLS[name](t * weight), x)
        total = sum(t.sum() for t in torch.utils._pytree.tree_leaves(out))
        return out, torch.autograd.grad(total, weight)[0] if total.requires_grad else torch.zeros(3)

    for x in (X, X + 1):
        same(call(x), torchfunc_jax.jit(call)(x), rtol=1e-4, atol=1e-5)


def test_a_function_runs_once_at_each_call_and_its_rules_see_what_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    derivative = torchfunc_jax.grad(lambda t: Scaled.apply(t, 0.5, (), None)[0].sum())
    monkeypatch.setattr(Scaled, "runs", 0)
    for n, factor in enumerate((2.0, 2.0, 3.0, 2.0), 1):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        same(derivative(X), factor * 0.5 * X.cos())
        assert Scaled.runs == n


def test_a_number_in_a_sentence() -> None:
    seen: list[str] = []

    def f(t: torch.Tensor) -> torch.Tensor:
        seen.append(f"{t.sum():.1f} {(t * 2).max()}")
        return t.sin().sum()

    for x in (X + 2, X + 1):
        torchfunc_jax.grad(f)(x)
        assert seen.pop() == f"{x.sum():.1f} {(x * 2).max()}"


def test_an_error_names_the_line_that_calls() -> None:
    call = torchfunc_jax.vmap(lambda t: X[0].gather(0, t))
    call(torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(
        (IndexError, RuntimeError),
        match=r"\(at .*test_records\.py:\d+: call\(torch.full\(\(2, 1\), 7\)\)  # first",
    ):
        call(torch.full((2, 1), 7))  # first
    with pytest.raises(
        (IndexError, RuntimeError),
        match=r"\(at .*test_records\.py:\d+: call\(torch.full\(\(2, 1\), 7\)\)  # second",
    ):
        call(torch.full((2, 1), 7))  # second


def test_a_pullback_is_of_the_values_that_were_there() -> None:
    x = X.clone()
    _, pull = torchfunc_jax.vjp(torch.sin, x)
    same(pull(torch.ones_like(x)), torch.func.vjp(torch.sin, X)[1](torch.ones_like(X)))
    x.add_(1)
    same(pull(torch.ones_like(x))[0], X.cos())


def test_a_pullback_that_leaves_its_transform() -> None:
    kept: list[Any] = []

    def f(t: torch.Tensor) -> torch.Tensor:
        out, pull = torchfunc_jax.vjp(torch.sin, t)
        kept.append(pull)
        return out.sum()

    torchfunc_jax.grad(f)(X)
    with pytest.raises(RuntimeError, match="inside a transform that has returned"):
        kept[0](torch.ones_like(X))


def test_the_function_runs_once_at_each_call_and_in_order() -> None:
    seen: list[str] = []

    def f(t: torch.Tensor) -> torch.Tensor:
        seen.append("f")
        return t.sin().sum()

    for _ in range(3):
        seen.append("before")
        torchfunc_jax.grad(f)(X)
    assert seen == ["before", "f"] * 3


def _in_a_profile(x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("here"):
        return x * 2


@torch.jit.script
def _scripted(t: torch.Tensor) -> torch.Tensor:
    return t.sin() * 2


#: Calls that are no operators of a tensor's values.
BESIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "record_function": _in_a_profile,
    "a scripted function": lambda x: _scripted(x) + _scripted(x),
    "new_tensor": lambda x: x * x.new_tensor([1, 2, 3]),
    "new_tensor of a number": lambda x: x * x.double().new_tensor(0.1),
    "new_tensor of another dtype": lambda x: x * x.new_tensor([1.5, 2.5, 3.5], dtype=torch.int64),
}


def _transformed(
    T: Any, transform: str, f: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    return {"vmap": T.vmap, "grad": T.grad, "vmap of grad": lambda f: T.vmap(T.grad(f))}[transform](
        f
    )


@pytest.mark.parametrize("transform", ["vmap", "grad", "vmap of grad"])
@pytest.mark.parametrize("name", BESIDE)
def test_calls_beside_operators_do_not_run_python_again(name: str, transform: str) -> None:
    runs = []

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(name)
        return BESIDE[name](x) if transform == "vmap" else BESIDE[name](x).sum()

    for scale in (1, 2):
        x = (X if "vmap" in transform else X[0]) * scale
        same(
            _transformed(torchfunc_jax, transform, f)(x), _transformed(torch.func, transform, f)(x)
        )
    assert len(runs) == 4


def test_a_function_that_cannot_be_recorded_keeps_no_other_from_it(
    unrecorded: Callable[[], list[str]],
) -> None:
    """Functions made by one helper share their code."""
    runs = []

    def counted(
        f: Callable[[torch.Tensor], torch.Tensor],
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def g(x: torch.Tensor) -> torch.Tensor:
            runs.append(type(x).__name__)
            return f(x)

        return g

    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: g * 3)
        return y.sum()

    for _ in range(2):
        same(torchfunc_jax.grad(counted(hooked))(X), torch.full_like(X, 6.0))
        same(torchfunc_jax.grad(counted(lambda x: x.sum()))(X), torch.ones_like(X))
    assert len(unrecorded()) == 1
    assert runs == ["Recorded", "Recorded", "Tensor", "Recorded"]


def test_indexing_by_a_mask_keeps_no_indexing_by_integers_from_a_record() -> None:
    x, index = torch.randn(5), torch.tensor([0, 2])

    def at(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return x[place].square().sum()

    for place in (x > 0, index):
        for _ in range(3):
            same(torchfunc_jax.grad(at)(x, place), torch.func.grad(at)(x, place))


def test_a_function_in_c_that_cannot_be_recorded_keeps_no_other_from_it(
    unrecorded: Callable[[], list[str]],
) -> None:
    with pytest.raises(RuntimeError):
        torchfunc_jax.vmap(torch.bincount)(torch.tensor([[1, 2], [0, 3]]))
    assert len(unrecorded()) == 1
    same(torchfunc_jax.vmap(torch.sin)(X), X.sin())


# -- autocast --------------------------------------------------------------------------------------
class _Half(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g @ ctx.saved_tensors[0].t(), None


_SQUARE = torch.linspace(-1, 1, 9).reshape(3, 3)
_NETWORK = nn.Sequential(
    nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
).requires_grad_(False)


def _partly_off(x: torch.Tensor) -> torch.Tensor:
    y = x[None] @ _SQUARE
    with torch.autocast("cpu", enabled=False):
        z = y.float() @ _SQUARE
    return z @ _SQUARE + y


def _written_under_autocast(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(3, 3)
    y += x
    z = y @ _SQUARE
    y.mul_(2)
    y[0] = x
    return z.add_(1) + y @ _SQUARE


def _repeated_under_autocast(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.tanh((x[None] @ _SQUARE)[0])
    return x


def _value_under_autocast(x: torch.Tensor) -> torch.Tensor:
    y = (x[None] @ _SQUARE)[0]
    return y * float((WEIGHT[None] @ _SQUARE).sum())


CAST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a product": lambda x: x[None] @ _SQUARE,
    "a network": lambda x: _NETWORK(x),
    "partly off": _partly_off,
    "another dtype later": lambda x: (x[None] @ _SQUARE).softmax(-1).log() @ _SQUARE,
    "a write": _written_under_autocast,
    "steps": _repeated_under_autocast,
    "a value": _value_under_autocast,
    "a Function": lambda x: _Half.apply(x[None], _SQUARE),
    "results of two kinds": lambda x: torch.cat([x[None] @ _SQUARE, x[None]]),
    "a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(
        lambda x: (x[None] @ _SQUARE).sin(), x, use_reentrant=False
    ),
    "a loss": lambda x: nn.functional.mse_loss(x @ _SQUARE, WEIGHT),
}


def _inside(
    f: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    def g(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return f(x)

    return g


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("name", CAST)
def test_autocast_is_recorded(name: str, where: str, dtype: torch.dtype) -> None:
    """Beside PyTorch on each row: torch.func's vmap gives some results another dtype than PyTorch
    does.
    """
    f = CAST[name]

    def called(transform: Callable[..., Any], x: torch.Tensor) -> Any:
        if where == "inside":
            return transform(_inside(f, dtype))(x)
        with torch.autocast("cpu", dtype):
            return transform(f)(x)

    def gradient(
        g: Callable[[torch.Tensor], torch.Tensor],
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        return torchfunc_jax.grad(lambda x: g(x).float().sum())

    def by_torch(
        g: Callable[[torch.Tensor], torch.Tensor],
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.autograd.grad(
            g(leaf := x.clone().requires_grad_()).float().sum(), leaf
        )[0]

    def pushed(T: Any) -> Callable[..., Any]:
        return lambda g: lambda x: T.jvp(g, (x,), (x,))

    for scale in (1.0, 0.5):  # the second call uses the first one's program
        x = X * scale
        pairs = [
            (called(torchfunc_jax.vmap, x), torch.stack([called(lambda g: g, row) for row in x])),
            (called(gradient, x[0]), called(by_torch, x[0])),
            (
                called(lambda g: torchfunc_jax.vmap(gradient(g)), x),
                torch.stack([called(by_torch, row) for row in x]),
            ),
        ]
        if name not in ("a Function", "a checkpoint"):  # they have no jvp
            pairs.append((called(pushed(torchfunc_jax), x[0]), called(pushed(torch.func), x[0])))
        for got, wanted in pairs:
            same(got, wanted, rtol=0.03, atol=0.03)
    plain = torchfunc_jax.vmap(lambda x: x @ _SQUARE)(X)  # autocast is off after it
    assert plain.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


DRAWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "randn_like": torch.randn_like,
    "rand": lambda x: torch.rand(3) * x,
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "after a product": lambda x: nn.functional.dropout(x @ _SQUARE, 0.5).float(),
}


@pytest.mark.parametrize("name", DRAWN)
def test_autocast_draws_the_same_numbers_at_each_call(name: str) -> None:
    def drawn(f: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        return torchfunc_jax.vmap(f, randomness="different")(X), torch.get_rng_state()

    plain, state = drawn(DRAWN[name])
    for _ in range(2):
        found, after = drawn(_inside(DRAWN[name], torch.bfloat16))
        same(found, plain, rtol=0.03, atol=0.03)
        assert torch.equal(after, state)


# -- what Python is told of a tensor ---------------------------------------------------------------
ANSWERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "type": lambda x: (x.type(), (x > 0).type(), x.half().t().type()),
    "type of a captured tensor": lambda x: (X.type(), _KEPT.type()),
    "a cast to another's type": lambda x: torch.ones(2).double().type(x.type()).dtype,
    "casts": lambda x: [
        x.type(to).dtype for to in (torch.float64, "torch.LongTensor", torch.HalfTensor)
    ],
    "type of a parameter": lambda x: WEIGHTS.type(),
}
WEIGHTS = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
@pytest.mark.parametrize("name", ANSWERS)
def test_what_python_is_told_of_a_tensor(name: str, transform: str) -> None:
    def told(T: Any) -> list[Any]:
        found: list[Any] = []
        getattr(T, transform)(lambda x: (found.append(ANSWERS[name](x * 2)), x.sum())[1])(X)
        return found

    assert told(torchfunc_jax) == told(torch.func)


# -- values of tensors from outside ----------------------------------------------------------------
VALUES: dict[str, Callable[[torch.Tensor], float]] = {
    "numpy": lambda w: float(w.numpy()[0]),
    "numpy.asarray": lambda w: float(np.asarray(w)[0]),
    "tolist": lambda w: w.tolist()[0],
    "numpy(force=True)": lambda w: float(w.numpy(force=True)[0]),
    "float": lambda w: float(w[0]),
    "item": lambda w: w.sum().item(),
    "iteration": lambda w: sum(float(v) for v in w),
    "of a copy": lambda w: float(torch.tensor(w)[0]),
    "in": lambda w: float(2.0 in w),
}


@pytest.mark.thin(4)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("lanes", [X, X[:, 0]], ids=["vectors", "numbers"])
@pytest.mark.parametrize("written", [None, "the tensor", "a view", "without history"])
@pytest.mark.parametrize("name", VALUES)
def test_values_of_a_captured_tensor(
    name: str, written: str | None, lanes: torch.Tensor, unrecorded: Callable[[], list[str]]
) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).sum()
        if written is not None:
            {"the tensor": w, "a view": w[:2], "without history": w.detach()}[written].mul_(2)
        return y * VALUES[name](w)

    for start in (1.0, 3.0):
        mine, theirs = torch.full((3,), start), torch.full((3,), start)
        expected = torch.func.vmap(functools.partial(f, w=theirs))(lanes)
        same(torchfunc_jax.vmap(functools.partial(f, w=mine))(lanes), expected)
        same(mine, theirs)
    unrecorded()


#: A function of a vector that looks at a mask or at indices from outside of it.
_KEPT, _ORDER = torch.tensor([True, False, True]), np.array([2, 0])
_ORDER_NUMBER = torch.tensor(3.0)
_EDGES = torch.tensor([[0, 1, 2, 2], [0, 2, 1, 0]])


def _written_at(x: torch.Tensor, index: Any) -> torch.Tensor:
    out = x.new_zeros(x.shape)
    out[index] = x[index].sin()
    return out


def _written_first(x: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    out = x.new_empty(x.shape)
    out[:] = x * 2
    out[1:].mul_(3)
    return read(out)


FROM_OUTSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a mask": lambda x: x[_KEPT].exp(),
    "places": lambda x: x[_KEPT.nonzero().squeeze(1)].exp(),
    "where": lambda x: x[torch.where(_KEPT)] ** 2,
    "masked_select": lambda x: x.masked_select(_KEPT).sin() if x.dim() > 1 else x[_KEPT].sin(),
    "an array": lambda x: x[_ORDER] ** 2,
    "an array of a mask": lambda x: x[np.array([True, False, True])] ** 2,
    "written at an array": lambda x: _written_at(x, _ORDER),
    "written at a mask": lambda x: _written_at(x, _KEPT),
    "two arrays": lambda x: torch.outer(x, x)[_ORDER, np.array([1, 1])],
    "an array in a list": lambda x: torch.outer(x, x)[..., _ORDER] * 2,
    "a computed mask": lambda x: x[(_EDGES[0] != _EDGES[1])[:3]].cos() * 2,
    "of a graph": lambda x: torch.zeros(3).index_add(
        0, _EDGES[1][_EDGES[0] != _EDGES[1]], x[_EDGES[0][_EDGES[0] != _EDGES[1]]]
    ),
    "a computed number": lambda x: x * ((_EDGES + 1).sum().item() if _EDGES.max() > 1 else 1),
    "computed places": lambda x: x[(~_KEPT).nonzero()[:, 0]].exp(),
    "places after a write": lambda x: _written_first(
        x, lambda y: y[_KEPT.nonzero().squeeze(1)].exp()
    ),
    "a mask after a write": lambda x: _written_first(x, lambda y: y[_KEPT] * y.sum()),
    "a number after a write": lambda x: _written_first(x, lambda y: y * _ORDER_NUMBER.item()),
    "as many times": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2])).cos(),
    "unique": lambda x: x * torch.unique(_KEPT).sum(),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("transform", ["vmap", "grad", "vmap of grad", "hessian", "jacfwd"])
@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_masks_and_indices_from_outside_are_recorded(name: str, transform: str) -> None:
    f = FROM_OUTSIDE[name]

    def of(T: Any) -> Any:
        cost = lambda x: (f(x) ** 3).sum()
        return {
            "vmap": lambda: T.vmap(f)(X),
            "grad": lambda: T.grad(cost)(X[1]),
            "vmap of grad": lambda: T.vmap(T.grad(cost))(X),
            "hessian": lambda: T.hessian(cost)(X[1]),
            "jacfwd": lambda: T.jacfwd(f)(X[1]),
        }[transform]()

    for _ in range(2):
        same(of(torchfunc_jax), of(torch.func), rtol=1e-5, atol=1e-6)


def _steps(
    change: Callable[[Any, torch.Tensor, torch.Tensor, float], torch.Tensor],
) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A loop of six steps that asks for a value in each of them, and passes on a state and a
    buffer.
    """

    def f(T: Any, x: torch.Tensor) -> torch.Tensor:
        state, buffer = x * 2, torch.zeros(6)
        for k in range(6):
            size = float(state.sum())
            state = change(T, state, buffer, float(k)) / (2 if size > 1 else 1)
        return (state * 3 + buffer[:3]).sum() if state.dim() else state + buffer.sum()

    return f


def _written_between(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    buffer[int(k)] = state[0] * k
    return state.sin() + buffer.sum()


def _view_kept(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    part = buffer[1:4]
    if float(part.sum()) < 10:
        buffer.add_(state.sum())
    return state.cos() + part


def _view_written(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    part = buffer[:3]
    if float(state[0]) > -10:
        part.mul_(0.5).add_(state)
    return state.cos() + part * k


def _in_place(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    before = state.clone()
    return state.mul_(1.5) + before if float(before[0]) > -10 else state


def _argument_in_place(T: Any, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for k in range(6):
        x.mul_(1.5)
        half = x[1:]
        total = total + half.sum() * (2 if float(x.sum()) > 0 else k) + (x * x).sum()
    return total


def _of_an_inner_grad(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    return T.grad(lambda s: (s.sin() * k).sum())(state) + state


def _asked_in_an_inner_grad(
    T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float
) -> torch.Tensor:
    return T.grad(lambda s: (s * (2.0 if float(s.sum()) > 0 else 3.0) * s).sum())(state)


def _pulled_later(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    out, pull = T.vjp(torch.sin, state)
    return pull(out)[0] if float(out.sum()) > 0 else pull(out * k)[0] + 1


def _of_a_vmap(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    return T.vmap(lambda s: s * state.sum() + k)(state)


def _raised_between(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    def raising(s: torch.Tensor) -> torch.Tensor:
        if float(s.exp().sum()) > -1:
            raise KeyError
        return s

    with contextlib.suppress(KeyError):
        T.grad(raising)(state.sum())
    return state.sin() * k if float(state.sum()) > -9 else state


def _of_a_function(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    return Cubed.apply(state).tanh() + k


def _dirty(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    held = state * 2
    out = Assigned.apply(held, state[0] * k, int(k) % 3)
    return out * 0.5 if float(out.sum()) > -99 else held


def _alias(T: Any, state: torch.Tensor, buffer: torch.Tensor, k: float) -> torch.Tensor:
    same = state.view(3)
    total = float(same.sum())
    state = state.add_(1)
    return same * state if total > -9 else state


class Assigned(torch.autograd.Function):
    """Puts a number at a place of its first argument, in place."""

    @staticmethod
    def forward(x: torch.Tensor, value: torch.Tensor, at: int) -> torch.Tensor:
        x[at] = value
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.at = inputs[2]
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        mask = torch.ones(3).index_fill(0, torch.tensor([ctx.at]), 0)
        return g * mask, (g * (1 - mask)).sum(), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, of_value: torch.Tensor, _: None) -> torch.Tensor:
        tangent[ctx.at] = of_value
        return tangent


STEPPED = {"an argument in place": _argument_in_place} | {
    name.strip("_").replace("_", " "): _steps(f)
    for name, f in list(globals().items())
    if name
    in {
        "_written_between",
        "_view_kept",
        "_view_written",
        "_in_place",
        "_of_an_inner_grad",
        "_asked_in_an_inner_grad",
        "_pulled_later",
        "_of_a_vmap",
        "_raised_between",
        "_of_a_function",
        "_dirty",
        "_alias",
    }
}


@pytest.mark.thin(16)
@pytest.mark.parametrize("transform", ["grad", "jvp", "functionalize", "vjp", "grad of grad"])
@pytest.mark.parametrize("name", STEPPED)
def test_values_asked_for_again_and_again(
    name: str, transform: str, unrecorded: Callable[[], list[str]]
) -> None:
    f = STEPPED[name]

    def of(T: Any, x: torch.Tensor) -> Any:
        g = functools.partial(f, T)
        return {
            "grad": lambda: T.grad_and_value(g)(x),
            "jvp": lambda: T.jvp(g, (x,), (x.cos(),)),
            "functionalize": lambda: T.functionalize(g)(x),
            "vjp": lambda: (lambda out, pull: (out, pull(out)))(*T.vjp(g, x)),
            "grad of grad": lambda: T.grad(lambda y: T.grad(g)(y).sum())(x),
        }[transform]()

    for v in (X[3], X[2], X[3] * 5, X[0]):
        x = v.clone()
        # torch.func has no rule for Functions there
        if transform == "functionalize" and name in ("dirty", "of a function"):
            expected = f(torch.func, x)
        elif "argument" in name and transform not in ("jvp", "functionalize"):
            for T in (torch.func, torchfunc_jax):
                with pytest.raises(
                    RuntimeError,
                    match=(
                        "a leaf Variable that requires grad is being used in an in-place operation"
                    ),
                ):
                    of(T, v.clone())
            continue
        else:
            expected = of(torch.func, x)
        same(of(torchfunc_jax, v.clone()), expected, rtol=1e-4, atol=1e-5)
    # its record would repeat the write
    again = name == "an argument in place" and transform == "vjp"
    assert not unrecorded() or name == "dirty" or again or transform == "functionalize", name


def test_an_array_of_numbers_is_read_at_each_call() -> None:
    order = np.array([0, 1])
    f = torchfunc_jax.vmap(lambda x: x[order] * 2)
    same(f(X), X[:, :2] * 2)
    order[:] = 2, 0
    same(f(X), X[:, [2, 0]] * 2)


def test_what_cannot_be_hashed_among_a_function_s_arguments(
    unrecorded: Callable[[], list[str]],
) -> None:
    same(
        torchfunc_jax.grad(lambda x: TimesSum.apply(x, Weights()).sum())(X), torch.full_like(X, 6.0)
    )
    assert "hashable" in unrecorded()[0]


class Weights:
    """It is equal by value, and so has no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weights)


class TimesSum(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, weights: Weights) -> torch.Tensor:
        return x * 6

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 6, None


@pytest.mark.parametrize("name", ["numpy", "numpy.asarray", "numpy(force=True)", "tolist"])
def test_values_of_a_captured_tensor_under_jit(name: str) -> None:
    """A numpy array of a tensor that JAX traces would be one of whatever stands in memory, a list
    one of the first call for ever.
    """
    w = torch.full((3,), 3.0)
    for wrap in (
        torchfunc_jax.jit,
        lambda f: torchfunc_jax.jit(torchfunc_jax.vmap(f)),
        torchfunc_jax.functionalize,
    ):
        f = wrap(lambda x: x * VALUES[name](w))
        for value in (3.0, 5.0):
            w.fill_(value)
            same(f(X), X * value)
    w.requires_grad_()
    with pytest.raises(
        RuntimeError,
        match=r"needs a tensor's values|data pointer|requires grad|Tensor in some data-dependent",
    ):
        torchfunc_jax.jit(lambda x: x * VALUES[name](w))(X)


def test_an_array_of_a_captured_tensor_is_not_written_to() -> None:
    w = torch.ones(3)
    with pytest.raises(ValueError, match="read-only"):
        torchfunc_jax.vmap(lambda x: (x * w, w.numpy().fill(2))[0])(X)


# -- numbers of lanes that change ------------------------------------------------------------------
def _to_the_other(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a * b


WRITES: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]] = {
    "an argument": (lambda a: a.mul_(2) + 1, lambda x: (x,)),
    "a slice of an argument": (lambda a: a[1:].add_(1).sum(), lambda x: (x,)),
    "a view of an argument, detached": (lambda a: a.detach().mul_(3).sum(), lambda x: (x,)),
    "a view of an argument": (lambda a: a.view(-1)[0].fill_(5) * 2, lambda x: (x,)),
    "an item": (lambda a: (a.__setitem__(0, 7.0), a * 2)[1], lambda x: (x,)),
    "an argument with strides": (lambda a: a.neg_() * 1, lambda x: (x.t().contiguous().t(),)),
    "one of two arguments": (_to_the_other, lambda x: (x, x * 2)),
    "a tensor of its own": (lambda a: a.clone().mul_(2), lambda x: (x,)),
    "an argument twice": (lambda a: (a.add_(1), a.add_(1))[1] * 1, lambda x: (x,)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_of_any_number_of_lanes(name: str) -> None:
    f, arguments = WRITES[name]
    for lanes in (4, 5, 7, 6, 5, 11):
        mine, theirs = (arguments(torch.arange(3.0 * lanes).reshape(lanes, 3)) for _ in range(2))
        same(torchfunc_jax.vmap(f)(*mine), torch.func.vmap(f)(*theirs))
        same(mine, theirs)


# -- exceptions that the function catches ----------------------------------------------------------
def _raises(*_: Any) -> Any:
    raise ValueError


RAISED: dict[str, Callable[[Any, torch.Tensor, float], Any]] = {
    "an operator with a number": lambda T, x, s: torch.add(x, torch.ones(7), alpha=s),
    "an operator with two numbers": lambda T, x, s: torch.where(
        x[:, None] > torch.ones(7), s, x + s * 2
    ),
    "a write with a number": lambda T, x, s: x.mul(s).add_(torch.ones(7), alpha=s),
    "grad": lambda T, x, s: T.grad(lambda y: _raises(y * s))(x),
    "grad of no number": lambda T, x, s: T.grad(lambda y: y * s)(x),
    "vmap": lambda T, x, s: T.vmap(lambda y: _raises(y * s))(x),
    "vmap with other out_dims": lambda T, x, s: T.vmap(lambda y: y * s, out_dims=5)(x),
    "a captured tensor is met": lambda T, x, s: T.vmap(lambda y: _raises(y * WEIGHT * s))(x),
    "two levels": lambda T, x, s: T.vmap(lambda y: T.grad(lambda z: _raises(z @ z * s))(y))(
        x.reshape(-1, 1)
    ),
    "one of two levels": lambda T, x, s: T.vmap(lambda y: _caught(T, y, "grad", s) * _raises(y))(x),
    "jvp": lambda T, x, s: T.jvp(lambda y: _raises(y * s), (x,), (x,)),
    "vjp": lambda T, x, s: T.vjp(lambda y: (y * s, 1 / 0), x),
    "linearize": lambda T, x, s: T.linearize(lambda y: (y * s).view(77), x),
    "jacrev": lambda T, x, s: T.jacrev(lambda y: _raises(y * s))(x),
    "hessian": lambda T, x, s: T.hessian(lambda y: (y * s)[99])(x),
    "a pullback": lambda T, x, s: T.vjp(lambda y: y * s, x)[1](torch.ones(99)),
    "an autograd.Function": lambda T, x, s: Cubed.apply(_raises(x * s)),
}
WEIGHT = torch.linspace(0.5, 2, 3)


def _caught(T: Any, x: torch.Tensor, name: str, s: float) -> torch.Tensor:
    for _ in range(2):
        with contextlib.suppress(ValueError, RuntimeError, IndexError, ZeroDivisionError):
            RAISED[name](T, x * 4, s)
    return (x * 3.0 + T.grad(lambda y: (y**3).sum() * s)(x) * WEIGHT - 0.25).sum()


@pytest.mark.parametrize("way", ["grad", "vmap", "vmap of grad"])
@pytest.mark.parametrize("name", RAISED)
def test_an_exception_that_the_function_catches(name: str, way: str) -> None:
    around: Callable[[Any, float], Any] = {
        "grad": lambda T, s: T.grad(lambda x: _caught(T, x, name, s))(X[0]),
        "vmap": lambda T, s: T.vmap(lambda x: _caught(T, x, name, s))(X),
        "vmap of grad": lambda T, s: T.vmap(T.grad(lambda x: _caught(T, x, name, s)))(X),
    }[way]
    for s in (2.0, 5.0):
        same(around(torchfunc_jax, s), around(torch.func, s))


def test_code_that_catches_everything(unrecorded: Callable[[], list[str]]) -> None:
    """What a record cannot say is no exception that the user's function could have met."""
    scale = torch.tensor(2.0)

    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            return (x * x.new(3).fill_(scale.item())).sum()
        except:  # noqa: E722
            return x.sum() * 0

    same(torchfunc_jax.grad(f)(X), torch.func.grad(f)(X))
    assert unrecorded()


# -- steps that repeat -----------------------------------------------------------------------------
W = torch.linspace(0.2, 0.9, 3)


def _euler(t: torch.Tensor, s: float) -> torch.Tensor:
    for i in range(20):
        h = 0.05 + 0.001 * i * s
        t = t + h * (t.roll(1) * W - t.sin() * s)
    return t


def _momentum(t: torch.Tensor, s: float) -> torch.Tensor:
    v = torch.zeros_like(t)
    for i in range(18):
        v = 0.9 * v - s * t.tanh()
        t = t + v / (i + 1)
    return t * v


def _kept(t: torch.Tensor, s: float) -> torch.Tensor:
    """What each step computes is used afterwards."""
    path = []
    for _ in range(20):
        t = t + 0.1 * (t.cos() * s)
        path.append(t)
    return torch.stack(path[3:]).sum(0) + t


def _detached(t: torch.Tensor, s: float) -> torch.Tensor:
    for _ in range(20):
        t = t + 0.1 * t.detach().cos() * s
    return t


def _unrecorded(t: torch.Tensor, s: float) -> torch.Tensor:
    for _ in range(20):
        with torch.no_grad():
            scale = 1 / (1 + t.square().sum())
        t = t * scale + s
    return t


def _written(t: torch.Tensor, s: float) -> torch.Tensor:
    t = t.clone()
    for _ in range(30):
        t.mul_(0.9).add_(s)
    return t


def _two_back(t: torch.Tensor, s: float) -> torch.Tensor:
    before = t * 2
    for _ in range(24):
        t, before = 0.5 * (t.sin() + before) * s, t
    return t


def _doubled(t: torch.Tensor, s: float) -> torch.Tensor:
    """Nothing but one operator."""
    for _ in range(60):
        t = t * s
    return t


def _by_element(t: torch.Tensor, s: float) -> torch.Tensor:
    """The parts that repeat meet other parts of one tensor."""
    total = t.sum() * s
    for k in range(3):
        for _ in range(16):
            total = total + t[k].sin() * 0.1 - t[k] ** 3
    return total * t


def _whole_numbers(t: torch.Tensor, s: float) -> torch.Tensor:
    n = torch.arange(3)
    for i in range(30):
        n, t = n * 3 + i, t * 1.01 + s
    return t * (n % 7)


STEPS = [
    _euler,
    _momentum,
    _kept,
    _detached,
    _unrecorded,
    _written,
    _two_back,
    _doubled,
    _by_element,
    _whole_numbers,
]
LOOPED = (_euler, _momentum, _detached, _two_back, _doubled, _by_element, _whole_numbers)
AROUND: dict[
    str, Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], Callable[[torch.Tensor], Any]]
] = {
    "vmap": lambda T, f: lambda x: T.vmap(f)(x),
    "grad": lambda T, f: lambda x: T.grad(lambda t: f(t).sum())(x[0]),
    "jacfwd": lambda T, f: lambda x: T.vmap(T.jacfwd(f))(x),
    "jacrev": lambda T, f: lambda x: T.jacrev(f)(x[1]),
    "hessian": lambda T, f: lambda x: T.hessian(lambda t: f(t).sum())(x[0]),
    "vjp": lambda T, f: lambda x: T.vjp(f, x[0])[1](x[1]),
    "jvp": lambda T, f: lambda x: T.jvp(T.grad(lambda t: f(t).sum()), (x[0],), (x[1],)),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("steps", STEPS, ids=lambda f: f.__name__)
def test_steps_that_repeat(steps: Any, around: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loops_run: list[int] = []
    scan = replay.Run.scan
    monkeypatch.setattr(
        replay.Run, "scan", lambda run, loop: (scan(run, loop), loops_run.append(loop.times))
    )
    for s in (0.7, 0.9, -0.4):
        x = X.double()
        got, expected = (
            AROUND[around](T, functools.partial(steps, s=s))(x) for T in (torchfunc_jax, torch.func)
        )
        same(got, expected, rtol=1e-9, atol=1e-10)
    assert bool(loops_run) == (steps in LOOPED)


@pytest.mark.parametrize("used", [True, False])
def test_gradients_of_captured_tensors_go_through_a_loop(used: bool) -> None:
    def run(T: Any) -> Any:
        w, v = (torch.linspace(k, 0.9, 3).requires_grad_() for k in (0.1, 0.4))

        def f(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = second = t
            for _ in range(20):
                first, second = (
                    first + 0.1 * (first * w).sin(),
                    second * 0.9 + 0.1 * (second * v).cos(),
                )
            return first, second

        first, second = T.vmap(f)(X)
        return torch.autograd.grad(
            (first + second if used else second).sum(), (w, v), allow_unused=True
        )

    got, expected = run(torchfunc_jax), run(torch.func)
    assert [g is None for g in got] == [g is None for g in expected]
    same(
        [g for g in got if g is not None],
        [g for g in expected if g is not None],
        rtol=1e-5,
        atol=1e-6,
    )


def _turned(t: torch.Tensor, times: int = 60) -> torch.Tensor:
    for _ in range(times):
        t = t.t()
    return t


def _write_to_the_last(x: torch.Tensor) -> torch.Tensor:
    base = x.clone()
    _turned(base).mul_(3)
    return base * x


def _write_to_the_base(x: torch.Tensor) -> torch.Tensor:
    base = x.clone()
    last = _turned(base)
    base.mul_(3)
    return last * x


def _write_to_an_argument(x: torch.Tensor) -> torch.Tensor:
    last = _turned(x)
    last.add_(1)
    return last * 2


@pytest.mark.parametrize(
    "f", [_write_to_the_last, _write_to_the_base, _write_to_an_argument], ids=lambda f: f.__name__
)
def test_views_of_views_that_are_written_to(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, theirs = torch.arange(18.0).reshape(2, 3, 3), torch.arange(18.0).reshape(2, 3, 3)
    same(torchfunc_jax.vmap(f)(x), torch.func.vmap(f)(theirs))
    same(x, theirs)


def test_numbers_of_a_loop_are_inputs_in_their_own_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are tried as a loop, and then run one by one, take the same places for their
    numbers.
    """
    made: list[Inputs] = []
    evaluated = Inputs.evaluated
    monkeypatch.setattr(
        Inputs, "evaluated", lambda self, values: made.append(self) or evaluated(self, values)
    )

    at = torch.tensor([2, 0, 1])

    def f(t: torch.Tensor, s: float) -> torch.Tensor:
        for i in range(8):
            t = 0.1 * t.sin() + t * (s + 0.01 * i)
            # an index is looked at, which the steps of a loop cannot do
            t = t + 0.1 * t.index_select(0, at)
        for i in range(24):
            t = t.cos() * (s + 0.01 * i)
        return t

    for s in (0.5, 0.25, -0.5):
        x = X.double()
        same(
            torchfunc_jax.vmap(functools.partial(f, s=s))(x),
            torch.func.vmap(functools.partial(f, s=s))(x),
            rtol=1e-9,
            atol=1e-10,
        )
    assert len(set(map(id, made))) == 1
    keys = [number.rule for number in made[0].slots[float]]
    assert len(keys) == len(set(keys))


def test_arithmetic_with_a_number_of_a_loop_is_refused() -> None:
    inputs = Inputs([1.0, 2.0])
    (number,) = python_numbers.in_repetition([inputs.number(0), inputs.number(1)], 1, 0)
    for compute in (
        lambda: 1 - number,
        lambda: number + number,
        lambda: -number,
        lambda: number * inputs.number(0),
        lambda: number > 0,
    ):
        with pytest.raises(NotInLoopError):
            compute()


def test_a_stored_program_takes_numbers_of_the_type_that_it_was_made_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with stored(monkeypatch, tmp_path):
        for number in (2, 2.5, 3, 3.5):
            monkeypatch.setattr(process, "programs", programs._Kept())  # as in another process
            same(torchfunc_jax.vmap(lambda x, s=number: (x * s).sin())(X), (X * number).sin())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_stored_program_is_made_again_for_what_was_not_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def gradients(T: Any) -> Any:
        x = X.clone().requires_grad_()
        scale = torch.tensor(1.5)  # an input without dimensions
        out = T.vmap(lambda r: (r * scale).sin().prod())(x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return first, torch.autograd.grad((first**2).sum(), x)

    with stored(monkeypatch, tmp_path):
        for _ in range(2):
            monkeypatch.setattr(process, "programs", programs._Kept())
            same(gradients(torchfunc_jax), gradients(torch.func), rtol=1e-4, atol=1e-5)


PULLED: dict[
    str, Callable[[Any, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]
] = {
    "grad": lambda T, pull, u: T.grad(lambda u: (pull(u) * u).sum())(u),
    "jvp": lambda T, pull, u: T.jvp(lambda u: pull(u) * u, (u,), (u * 2,))[1],
    "vmap": lambda T, pull, u: T.vmap(lambda s: pull(u) * s)(u).sum(0),
    "jacrev": lambda T, pull, u: T.jacrev(lambda u: pull(u) * u)(u).sum(0),
    "vjp": lambda T, pull, u: T.vjp(lambda u: pull(u) * u, u)[1](u)[0],
    "grad of grad": lambda T, pull, u: T.grad(
        lambda u: T.grad(lambda v: (pull(v) * v * u).sum())(u).sum()
    )(u),
}


@pytest.mark.parametrize("kind", ["vjp", "linearize"])
@pytest.mark.parametrize("use", PULLED)
def test_values_of_a_transform_around_a_call_of_a_pullback_made_before_it(
    use: str, kind: str
) -> None:
    """Python asks for them inside a vmap that does not map them: they are computed from the part of
    the record that they need.

    torch.func's own linearize is wrong inside a gradient. Here it is the same as vjp, because the
    function is taken element by element.
    """

    def program(T: Any, kind: str) -> torch.Tensor:
        def g(r: torch.Tensor) -> torch.Tensor:
            made = getattr(T, kind)(lambda u: u.sin() * u, torch.tensor([1.5, 3.0]))[1]
            found = PULLED[use](
                T, lambda u: made(u)[0] if kind == "vjp" else made(u), torch.tensor([0.5, 0.25])
            )
            if found.sum() > 0:
                r = r * found
            if (
                PULLED[use](T, lambda u: made(u)[0] if kind == "vjp" else made(u), found) * found
            ).sum() > 0.1:
                r = r + found
            return r

        return T.vmap(g)(torch.ones(3, 2))

    same(program(torchfunc_jax, kind), program(torch.func, "vjp"))


@pytest.mark.parametrize("of_parameter", [False, True])
def test_a_stored_program_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, of_parameter: bool
) -> None:
    """Also that of a function without a history whose inputs require grad."""
    scale, made = torch.tensor(1.5, requires_grad=of_parameter), []  # an input without dimensions
    making = programs._made_for
    monkeypatch.setattr(
        programs, "_made_for", lambda *given: (made.append(given), making(*given))[1]
    )
    function = torch.no_grad()(lambda r: (r * scale).sin())
    with stored(monkeypatch, tmp_path):
        for _ in range(2):
            monkeypatch.setattr(process, "programs", programs._Kept())
            same(torchfunc_jax.vmap(function)(X), (X * 1.5).sin())
    assert len(made) == 1


def test_a_stored_program_of_another_version_is_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Its file has another name: the versions of all packages, and of our own files, are part of
    it.
    """
    load, loaded = disk.load, list[bool]()
    monkeypatch.setattr(
        disk, "load", lambda path: (found := load(path), loaded.append(found is not None))[0]
    )
    with stored(monkeypatch, tmp_path):
        for version, known in (("0.1.0", False), ("0.1.0", True), ("0.1.1", False)):
            monkeypatch.setattr(disk, "place", lambda version=version: (tmp_path, version))
            monkeypatch.setattr(process, "programs", programs._Kept())
            loaded.clear()
            same(
                torchfunc_jax.vmap(lambda r: (r @ r) * r)(X),
                torch.func.vmap(lambda r: (r @ r) * r)(X),
            )
            assert loaded == [known]


def test_a_stored_program_that_is_not_understood_is_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything works without the cache, but a fault that switches it off must not be silent."""
    monkeypatch.setattr(process, "logged", {})
    with stored(monkeypatch, tmp_path), caplog.at_level(logging.WARNING, "torchfunc_jax"):
        for function in (torch.sin, torch.cos):
            monkeypatch.setattr(disk, "load", lambda path: {"static": ()})
            same(torchfunc_jax.vmap(function)(X), function(X))
    (record,) = caplog.records
    assert "could not be loaded" in record.getMessage() and "KeyError" in str(record.exc_info)


def test_a_damaged_program_is_not_loaded(tmp_path: Any) -> None:
    """A byte may have changed in the compiled code, which XLA does not check."""
    path = tmp_path / "program"
    disk.save(path, {"code": b"0" * 1000})
    assert disk.load(path) == {"code": b"0" * 1000}
    stored = path.read_bytes()
    for damaged in (
        stored.replace(b"000", b"010", 1),
        stored[:-1],
        stored + b"0",
        stored[:20],
        b"",
    ):
        path.write_bytes(damaged)
        assert disk.load(path) is None


@pytest.mark.skipif(
    not hasattr(os, "geteuid"), reason="Windows keeps others out of a user's folders itself"
)
def test_what_others_can_write_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A stored program is a pickle, which could run their code."""
    monkeypatch.setattr(process, "logged", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = disk._folder()
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o600, 0o644, 0o660, 0o602, 0o666):
        path = folder / f"{mode:o}"
        disk.save(path, {"code": 1})
        path.chmod(mode)
        assert disk.load(path) == ({"code": 1} if mode in (0o600, 0o644) else None)
        # what is not loaded is removed, so that a program can be stored there again
        assert path.exists() == (mode in (0o600, 0o644))
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        assert disk._folder() is None
    # each is said once
    assert ["could run that user's code" in m or "chmod go-w" in m for m in caplog.messages] == [
        True,
        True,
    ]
    owners = {0: True, os.geteuid(): True, os.geteuid() + 1: False}
    assert {
        owner: disk._is_private(os.stat_result((0o100600, 0, 0, 0, owner, *[0] * 5)))
        for owner in owners
    } == owners


def test_a_stored_program_that_does_not_run_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def broken(_: Any) -> Any:
        def run(*_: Any) -> Any:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: Function dot_general.1_kernel not found")

        return run

    with stored(monkeypatch, tmp_path):
        call = torchfunc_jax.vmap(lambda r: (r @ r) * r)
        same(call(X), torch.func.vmap(lambda r: (r @ r) * r)(X))
        (file,) = tmp_path.iterdir()
        before = file.read_bytes()
        file.write_bytes(before)
        written = file.stat().st_mtime_ns
        monkeypatch.setattr(process, "programs", programs._Kept())
        monkeypatch.setattr(disk, "unpacked", broken)
        same(call(X), torch.func.vmap(lambda r: (r @ r) * r)(X))
        assert file.stat().st_mtime_ns > written


def test_a_program_is_stored_if_the_process_ends_at_once(tmp_path: Any) -> None:
    """Programs are stored by a thread, which the end of the process wakes up: here it would wait
    for work longer than the test does.
    """
    code = (
        "import queue, time, torch, torchfunc_jax\n"
        "from bridge.process import process\n"
        "class Patient(queue.SimpleQueue):\n"
        "    def get(self, timeout):\n"
        "        return super().get(timeout=1000 if timeout == 5 else timeout)\n"
        "process.compiler.waiting = Patient()\n"
        "torchfunc_jax.vmap(lambda r: (r @ r) * r)(torch.ones(4, 3))\n"
        "time.sleep(1)\n"
        "process.compiler.end()\n"
        "print(not process.compiler.thread.is_alive())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {
        "XDG_CACHE_HOME": str(tmp_path)
    }
    for wait in (code, code.replace("time.sleep(1)", "pass")):
        done = subprocess.run(
            [sys.executable, "-c", wait],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stdout == "True\n"
        (file,) = (tmp_path / "torchfunc_jax" / "programs").iterdir()
        file.unlink()


def test_stored_programs_of_linear_algebra(tmp_path: Any) -> None:
    """A process that has lowered nothing calls LAPACK; a factorization that Python does is not
    stored, without a word.
    """
    code = (
        "import torch, torchfunc_jax\nx = torch.tensor([[[2.0, 1.0], [1.0, 3.0]]])\n"
        "print(*[torchfunc_jax.vmap(f)(x) for f in (torch.linalg.inv, torch.linalg.cholesky, "
        "torch.linalg.ldl_factor)])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {
        "XDG_CACHE_HOME": str(tmp_path)
    }
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (
            done.returncode == 0
            and done.stdout.count("tensor") == 4
            and "Traceback" not in done.stderr
        ), done.stderr
        assert len(list((tmp_path / "torchfunc_jax" / "programs").iterdir())) == 2


@contextlib.contextmanager
def stored(monkeypatch: pytest.MonkeyPatch, folder: Any) -> Iterator[None]:
    """Programs are stored in the folder, at once; JAX's own cache, which the tests use elsewhere,
    is off.
    """
    later = process.compiler.later
    monkeypatch.setattr(
        process.compiler, "later", lambda work, idle=False: work() if idle else later(work)
    )
    monkeypatch.setattr(disk, "place", lambda: (folder, ""))
    monkeypatch.setattr(words, "OVERRIDDEN", set())  # of other tests
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    # JAX looks at the setting once; what comes from its cache cannot be stored
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def test_random_numbers_are_others_in_each_step() -> None:
    def f(t: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            t = torch.nn.functional.dropout(t + 1, 0.5) * 0.5
        return t

    drawn = torchfunc_jax.vmap(f, randomness="different")(torch.zeros(64, 8))
    assert len(drawn.unique()) > 2  # one mask for all steps gives 0 and 30


def test_an_index_out_of_range_in_one_step_is_found() -> None:
    def f(t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        for k in range(20):
            t = t + torch.index_select(t, 0, at + k) * 0.1 + t.sin()
        return t

    t, at = torch.ones(21), torch.zeros(21, dtype=torch.int64)
    same(
        torchfunc_jax.grad(lambda t: f(t, at).sum())(t),
        torch.func.grad(lambda t: f(t, at).sum())(t),
        rtol=1e-5,
        atol=1e-6,
    )
    with pytest.raises((IndexError, RuntimeError), match="index"):
        torchfunc_jax.grad(lambda t: f(t, at + 3).sum())(t)


@pytest.mark.parametrize(
    "cube, slope, ahead",
    [(lambda x: x**3, lambda x: 3 * x**2, True), (Cubed.apply, lambda x: 5 * x, False)],
)
def test_the_backward_pass_is_compiled_while_the_forward_pass_is_unless_it_runs_python(
    cube, slope, ahead, monkeypatch
):
    waiting = []
    monkeypatch.setattr(
        process.compiler, "later", lambda work, idle=False: None if idle else waiting.append(work)
    )
    monkeypatch.setenv("TORCHFUNC_JAX_CACHE", "0")
    known = set(process.programs.records)
    x = torch.linspace(-1, 1, 29, requires_grad=True)
    out = torchfunc_jax.vmap(lambda v: cube(v) * 2.5)(x)
    (key,) = set(process.programs.records) - known
    (pair,) = process.programs.records[key].programs[0].compiled.recorded.values()
    _, back = pair.passes.now
    assert back.executable is None and len(waiting) == ahead
    for work in waiting:
        work()
    made = back.executable
    assert (made is not None) == ahead
    out.sum().backward()
    assert (back.executable is made) == ahead
    torch.testing.assert_close(x.grad, 2.5 * slope(x.detach()))


# few numbers are added up in one loop, many in parts
@pytest.mark.parametrize("count", [1000, 1_000_000])
def test_the_first_run_adds_up_exactly(count: int) -> None:
    x = torch.rand(2, count, generator=torch.Generator().manual_seed(0)) + 1
    total = x.double().sum(1)
    slope = torchfunc_jax.grad(lambda w, row: (w * row).sum())
    found = (
        torchfunc_jax.vmap(lambda row: row.sum())(x),
        torchfunc_jax.vmap(slope, (None, 0))(torch.tensor(1.0), x),
    )
    for sums in found:
        assert ((sums - total) / total).abs().max() < 1e-6


_TRUE, _FALSE, _MASK = torch.tensor(True), torch.tensor(False), torch.tensor([True, False, True])
_ZERO_DIMENSIONAL = {
    "true": _TRUE,
    "false": _FALSE,
    "in a tuple": (_TRUE,),
    "before a mask": (_TRUE, _MASK),
    "after a mask": (_MASK, _TRUE),
    "after an ellipsis": (..., _TRUE),
    "after None": (None, _TRUE),
    "before None": (_TRUE, None),
    "twice": (_TRUE, _TRUE),
    "a byte": (torch.tensor(2, dtype=torch.uint8),),
    "a zero byte": (None, torch.tensor(0, dtype=torch.uint8)),
    "bytes": (torch.tensor([1, 0], dtype=torch.uint8)[0], torch.tensor([0, 1])),
    "int16": torch.tensor(-1, dtype=torch.int16),
    "beside an index": (0, _TRUE),
    "beside indices": (torch.tensor([0, 1]), _TRUE),
    "false after a slice": (slice(None), _FALSE),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
@pytest.mark.parametrize("name", _ZERO_DIMENSIONAL)
def test_masks_without_dimensions(name, shape):
    index, x = _ZERO_DIMENSIONAL[name], torch.rand(shape)

    def put(x):
        y = x * 1
        y[index] = y.sum() + 1
        return y * x

    for fn in (lambda x: x[index] * x.sum(), put):
        try:
            expected = torch.func.vjp(fn, x)
        except (IndexError, RuntimeError):  # too many indices
            with pytest.raises((IndexError, RuntimeError)):
                torchfunc_jax.vjp(fn, x)
            continue
        out, pullback = torchfunc_jax.vjp(fn, x)
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(
            pullback(torch.ones_like(out)), expected[1](torch.ones_like(out))
        )
        torch.testing.assert_close(
            torchfunc_jax.vmap(lambda s, fn=fn: fn(x) * s)(torch.ones(2)),
            expected[0].expand(2, *expected[0].shape),
        )
    if isinstance(index, torch.Tensor) and index.dtype is torch.bool:
        out = torch.func.grad(lambda x: torch.masked_select(x, index).sum())(x)
        torch.testing.assert_close(
            torchfunc_jax.grad(lambda x: torch.masked_select(x, index).sum())(x), out
        )


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "lstm": lambda: nn.LSTM(4, 3),
    "gru": lambda: nn.GRU(4, 3),
    "lstm cell": lambda: nn.LSTMCell(4, 3),
    "conv": lambda: nn.Conv1d(5, 2, 1),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(1, 5), nn.RMSNorm(4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    run = transforms.run
    monkeypatch.setattr(transforms, "run", lambda *args: ran.append(1) or run(*args))
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(6, 5, 4)

    def f(t: torch.Tensor) -> torch.Tensor:
        out = layer(t, t, t, need_weights=False) if name == "attention" else layer(t)
        return (out[0] if isinstance(out, tuple) else out).sin().sum()

    x = x[0] if name == "lstm cell" else x
    same(torchfunc_jax.grad(f)(x), torch.func.grad(f)(x), rtol=1e-4, atol=1e-5)
    assert ran


#: Functions that make tensors on the default device, or give a device.
MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": lambda t: t + torch.zeros(3),
    "number": lambda t: t * torch.tensor(2.0),
    "data": lambda t: t * torch.tensor([1.0, 2.0, 3.0]),
    "like": lambda t: t * torch.full_like(t, 3.0),
    "range": lambda t: t * torch.arange(3.0),
    "given": lambda t: t + torch.ones(3, device="cpu"),
    "integers": lambda t: t[torch.arange(3) * 2 % 3],
    "as_tensor": lambda t: t + torch.as_tensor(0.5),
    "new": lambda t: t + t.new_ones(3),
    "random": lambda t: t + 0 * torch.rand(3),
}


@pytest.mark.parametrize("enter", ["with", "set"])
@pytest.mark.parametrize("name", MAKERS)
def test_calls_are_recorded_under_a_default_device(
    name: str, enter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    run = transforms.run
    monkeypatch.setattr(transforms, "run", lambda *args: ran.append(1) or run(*args))
    f = MAKERS[name]
    around = lambda T: (T.grad(lambda t: f(t).sin().sum())(X[0]), T.vmap(f, randomness="same")(X))
    expected = around(torch.func)
    with contextlib.ExitStack() as stack:
        if enter == "with":
            stack.enter_context(torch.device("cpu"))
        else:
            stack.callback(torch.set_default_device, None)
            torch.set_default_device("cpu")
        same(around(torchfunc_jax), expected)
    assert len(ran) >= 2


def test_a_default_device_that_is_set_inside_is_obeyed() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        torch.set_default_device("meta")
        try:
            return x + torch.ones(2).numel()
        finally:
            torch.set_default_device(None)

    for transform in (torchfunc_jax.vmap, lambda f: torchfunc_jax.grad(lambda x: f(x).sum())):
        transform(body)(torch.ones(3, 2))
        with pytest.raises(RuntimeError, match="on device meta"):  # and no tensor on another device
            transform(lambda x: x + body(x.to("meta")))(torch.ones(3, 2))


#: What makes constants of shapes that follow the sizes of its operand.
CONSTANTS: dict[str, Callable[[int, torch.Tensor], torch.Tensor]] = {
    "zeros": lambda n, row: row + torch.zeros(n),
    "positions": lambda n, row: row * (torch.arange(n)[:, None] / torch.arange(1, 4)).sin().sum(1),
    "a causal mask": lambda n, row: (
        (row.outer(row) + torch.full((n, n), float("-inf")).triu(1)).softmax(-1).sum(0)
    ),
    "causal attention": lambda n, row: nn.functional.scaled_dot_product_attention(
        *[row[None, :, None]] * 3, is_causal=True
    )[0, :, 0],
    "one_hot": lambda n, row: nn.functional.one_hot(torch.arange(n), n).float() @ row,
    "eye and tensor": lambda n, row: torch.eye(n) @ row * torch.tensor([2.0] * n),
    "frequencies": lambda n, row: row * torch.fft.fftfreq(n) * torch.hann_window(n),
    "interpolate": lambda n, row: nn.functional.interpolate(
        row[None, None], scale_factor=2.0, mode="linear"
    ),
    "pooling": lambda n, row: nn.functional.avg_pool1d(row[None, None], 3, 2, 1, True, False),
    "indices": lambda n, row: row[torch.arange(n - 1)].cumsum(0) / torch.arange(1, n),
    "batch norm": lambda n, row: nn.functional.batch_norm(
        row[None].expand(4, n), None, None, training=True
    ),
}


def test_a_lowering_may_need_the_values_of_constants() -> None:
    same(
        torchfunc_jax.vmap(lambda row: torch.combinations(torch.arange(3) + 0).sum() * row)(X),
        6 * X,
    )


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_new_shape_compiles_one_program(name: str) -> None:
    """Constants of new shapes are part of it; XLA would take up to 0.1 s to compute one ahead."""
    compiled: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [
        logging.getLogger("jax._src.dispatch"),
        logging.getLogger("jax._src.interpreters.pxla"),
    ]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        for n in (37, 41, 43):
            rows = torch.rand(2, n)
            compiled.clear()
            with jax.log_compiles():
                got = torchfunc_jax.vmap(lambda row: CONSTANTS[name](row.shape[0], row))(rows)
            torch.testing.assert_close(got, torch.stack([CONSTANTS[name](n, row) for row in rows]))
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
    assert sum("Finished XLA compilation" in line for line in compiled) == 1, compiled


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"bidirectional": True, "num_layers": 2},
        {"batch_first": True, "num_layers": 2, "bias": False},
        {"batch_first": True, "bidirectional": True},
    ],
)
def test_results_of_an_rnn_lie_in_memory_as_torch_func_s(
    kind: type[torch.nn.RNNBase], options: dict[str, Any]
) -> None:
    """A record knows them from two steps of the sequence."""
    net = kind(3, 4, **options).double()

    def seen(T: Any, x: torch.Tensor) -> list[Any]:
        found: list[Any] = []

        def loss(x: torch.Tensor) -> torch.Tensor:
            out, state = net(x)
            states = state if isinstance(state, tuple) else (state,)
            found.append(
                [
                    (t.shape, t.stride(), t.is_contiguous(), t.requires_grad, t.dtype)
                    for t in (out, *states)
                ]
            )
            return out.square().sum() + sum(t.sin().sum() for t in states)

        return [found, T.grad(loss)(x)]

    for shape in ((5, 2, 3), (1, 2, 3), (2, 5, 3), (7, 3)):
        x = torch.randn(shape, dtype=torch.float64)
        (mine, found), (theirs, want) = seen(torchfunc_jax, x), seen(torch.func, x)
        assert mine == theirs
        torch.testing.assert_close(found, want)
    x = torch.randn(2, 5, 2, 3, dtype=torch.float64)
    mapped = torchfunc_jax.vmap(lambda x: seen(torchfunc_jax, x)[1])(x)
    torch.testing.assert_close(mapped, torch.stack([seen(torch.func, row)[1] for row in x]))


def test_a_call_that_was_not_recorded_says_nothing_of_one_with_other_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "unrecordable", set())
    runs: list[Any] = []
    execute = transforms.run
    monkeypatch.setattr(transforms, "run", lambda *given: (runs.append(given), execute(*given))[1])

    def product(factors: tuple[Any, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
        # PyTorch runs a call with new
        return lambda x: ((x.new(3).zero_() if type(factors[0]) is float else x) + x).sum()

    for factors, recorded in (((2.0,), 0), ((torch.tensor(2.0),), 1), ((3.0,), 1)):
        found = torchfunc_jax.grad(product(factors))(torch.ones(3))
        same(found, torch.func.grad(product(factors))(torch.ones(3)))
        assert len(runs) == recorded
