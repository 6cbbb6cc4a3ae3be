"""Records of un-jitted code (bridge/record), an engine that is switched off until it can replace the one in bridge/eager.py."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import same
from autograd_functions import ContextInForward, Cubed, Function, SavesItsOutput, SetupContext
from torch import nn

import torchfunc_jax
from torchfunc_jax import _recording

X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[list[str]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_recording, "_on", True)
    monkeypatch.setattr(_recording, "_why", reasons := [])
    yield reasons
    assert not reasons, f"not recorded: {reasons}"


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
    "a value that Python asks for": lambda T, x, s: T.grad(lambda t: (t * 2).sum() if t.sum() > s else (t * s).sum())(x),
    "vjp": lambda T, x, s: T.vjp(lambda t, u: ((t * s).sin() * u, u.sum()), x, x + 1)[1]((x, torch.tensor(s))),
    "vjp inside grad": lambda T, x, s: T.grad(lambda t: T.vjp(lambda u: (u * s).exp(), t)[1](t)[0].sum())(x),
    "vjp inside vmap": lambda T, x, s: T.vmap(lambda r: T.vjp(lambda u: (u * s).exp(), r)[1](r * 2)[0])(x),
    "a pullback under vmap": lambda T, x, s: T.vmap(T.vjp(lambda t: (t * s).tanh(), x[0])[1])(torch.eye(3)),
    "linearize": lambda T, x, s: T.linearize(lambda t: (t * s).sin(), x)[1](x + 1),
    "linearize twice": lambda T, x, s: [T.vmap(T.linearize(lambda t: (t * s).cos(), r)[1])(torch.eye(3)) for r in x[:2]],
    "in place": lambda T, x, s: T.vmap(lambda r: r.clone().mul_(s).add_(r[0]))(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_shapes_that_change(name: str) -> None:
    for x, s in ((X, 0.5), (X, 0.25), (X[:3], 0.25), (X + 1, -2.0), (X, 0.5)):
        same(PROGRAMS[name](torchfunc_jax, x, s), PROGRAMS[name](torch.func, x, s), rtol=1e-4, atol=1e-5)


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
    theirs = getattr(torch.func, name)(lambda x: loss(lambda function, *args, **kwargs: function(*args, **kwargs), x))(X)
    same(mine, theirs, rtol=1e-4, atol=1e-4)
    same(torch.autograd.grad(mine.sum(), weight), torch.autograd.grad(theirs.sum(), weight), rtol=1e-3, atol=1e-3)


class Scaled(Function):
    """sin(x) with FACTOR times its derivative; a number, a tuple and None among its arguments, and two outputs."""

    generate_vmap_rule = True
    runs = 0

    @staticmethod
    def forward(x: torch.Tensor, scale: float, more: tuple[int, ...], nothing: None) -> tuple[torch.Tensor, torch.Tensor]:
        Scaled.runs += 1
        return x.sin() * scale, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.mark_non_differentiable(output[1])
        ctx.scale, ctx.kept = inputs[1], {"cos": inputs[0].cos()}

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: torch.Tensor) -> Any:
        return FACTOR * g * ctx.kept["cos"] * ctx.scale, None, None, None


FACTOR = 2.0
CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "context in forward": ContextInForward.apply, "setup_context": SetupContext.apply, "saves its output": SavesItsOutput.apply,
    "rules of its own": Cubed.apply, "arguments that are no tensors": lambda x: Scaled.apply(x, 0.5, (1, 2), None)[0],
}  # fmt: skip
WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, x: torchfunc_jax.grad(lambda t: f(t * 2).sum())(x),
    "grad of grad": lambda f, x: torchfunc_jax.grad(lambda t: torchfunc_jax.grad(lambda u: f(u).sum())(t).sin().sum())(x),
    "vjp": lambda f, x: torchfunc_jax.vjp(f, x)[1](x),
    "jacrev": lambda f, x: torchfunc_jax.jacrev(f)(x),
    "vmap": lambda f, x: torchfunc_jax.vmap(f)(x),
    "vmap of grad": lambda f, x: torchfunc_jax.vmap(torchfunc_jax.grad(lambda r: f(r).sum()))(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_functions_with_derivatives_of_their_own(name: str, way: str, _switched_on: list[str]) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def call(x: torch.Tensor) -> Any:
        out = WAYS[way](lambda t: CALLS[name](t * weight), x)
        total = sum(t.sum() for t in torch.utils._pytree.tree_leaves(out))
        return out, torch.autograd.grad(total, weight) if total.requires_grad else None

    for x in (X, X + 1):
        mine = call(x)
        with _recording.off():
            same(mine, call(x), rtol=1e-4, atol=1e-5)


def test_a_function_runs_once_at_each_call_and_its_rules_see_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    derivative = torchfunc_jax.grad(lambda t: Scaled.apply(t, 0.5, (), None)[0].sum())
    monkeypatch.setattr(Scaled, "runs", 0)
    for n, factor in enumerate((2.0, 2.0, 3.0, 2.0), 1):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        same(derivative(X), factor * 0.5 * X.cos())
        assert Scaled.runs == n


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
