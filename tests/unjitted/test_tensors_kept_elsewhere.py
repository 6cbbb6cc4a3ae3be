"""What a function keeps elsewhere, in a dict, a list, an attribute, a buffer or a variable, and
what is read there after the call.

torch.func gives a tensor its value that no vmap maps, and raises for one that a vmap maps; so do
we, recorded or run by PyTorch.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchfunc_jax
from bridge.errors import EscapedTensorError
from bridge.process import process

D = torch.float64
P = torch.tensor([0.6, 1.1, -0.4], dtype=D)
ROWS = torch.tensor([[0.3, -1.0, 0.5], [0.7, 0.2, -0.9], [1.0, 2.0, 3.0], [0.1, 0.1, 0.4]], dtype=D)
CAPTURED = torch.tensor([1.0, 2.0, 3.0], dtype=D)
Kept = types.SimpleNamespace


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=D))
        self.register_buffer("mean", torch.zeros(3, dtype=D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = x * self.weight
        self.mean = 0.9 * self.mean + self.weight.detach()
        return self.hidden


def _written(F: Any, kept: Kept, p: torch.Tensor, x: torch.Tensor) -> None:
    kept.a = torch.zeros(3, dtype=D)
    kept.b = kept.a[1:]
    kept.a[:2] = p[1:] * 2
    kept.a.mul_(3)


def _of_each_other(F: Any, kept: Kept, p: torch.Tensor, x: torch.Tensor) -> None:
    kept.a = p * 2
    kept.b = kept.a.sin()
    kept.c = kept.a[1:] * kept.b[1:]


def _listed(F: Any, kept: Kept, p: torch.Tensor, x: torch.Tensor) -> None:
    kept.a = [*getattr(kept, "a", []), p.exp()]


def _from_the_last_call(F: Any, kept: Kept, p: torch.Tensor, x: torch.Tensor) -> None:
    kept.a = getattr(kept, "a", CAPTURED) * 0.5 + p


def _in_a_module(F: Any, kept: Kept, p: torch.Tensor, x: torch.Tensor) -> None:
    F.functional_call(kept.layer, {"weight": p}, (CAPTURED,))


def _inside_of_grad(F: Any, kept: Kept, p: torch.Tensor, x: torch.Tensor) -> None:
    def inner(q: torch.Tensor) -> torch.Tensor:
        kept.a, kept.b = q, q * p
        kept.c = torch.rand(3, dtype=D) * q
        return kept.b.sum()

    kept.d = F.grad(inner)(p * 2)
    kept.b.mul_(3)
    kept.e = kept.b + kept.c


def _inside_of_vmap(F: Any, kept: Kept, p: torch.Tensor, x: torch.Tensor) -> None:
    def inner(q: torch.Tensor) -> torch.Tensor:
        kept.a = p.cos()
        return q * p

    kept.b = F.vmap(inner)(torch.ones(2, 3, dtype=D))


def _in_the_next_transform(F: Any, kept: Kept, p: torch.Tensor, x: torch.Tensor) -> None:
    F.grad(lambda q: vars(kept).update(a=q * 3) or q.sum())(p)
    F.vmap(lambda q: q * kept.a)(torch.ones(2, 3, dtype=D))
    kept.b = F.grad(lambda q: (q * kept.a).sum())(p)


def _pulled(F: Any, kept: Kept, p: torch.Tensor, x: torch.Tensor) -> None:
    kept.a, pull = F.vjp(lambda q: (q * p).sin(), p * 2)
    kept.b = pull(torch.ones(3, dtype=D))[0]


#: By name, what is kept: a function of torch.func's names, of what keeps it, of an argument p that
#: no vmap maps, and of one that it maps.
KEEPS: dict[str, Callable[[Any, Kept, torch.Tensor, torch.Tensor], Any]] = {
    "a view of the argument": lambda F, kept, p, x: vars(kept).update(a=p[0:1]),
    "the argument": lambda F, kept, p, x: vars(kept).update(a=p),
    "a value": lambda F, kept, p, x: vars(kept).update(a=p.sin() * 2),
    "values of each other": _of_each_other,
    "what is written to": _written,
    "a constant": lambda F, kept, p, x: vars(kept).update(a=torch.arange(3) * 2, b=p > 0),
    "views of a captured tensor": lambda F, kept, p, x: vars(kept).update(
        a=CAPTURED[1:], b=CAPTURED * 2
    ),
    "random numbers": lambda F, kept, p, x: vars(kept).update(
        a=torch.rand(3, dtype=D), b=torch.rand(3, dtype=D) * p
    ),
    "detached": lambda F, kept, p, x: vars(kept).update(a=p.detach() * 2),
    "what a vmap maps": lambda F, kept, p, x: vars(kept).update(a=x * p, b=p * 2),
    "in a list": _listed,
    "from the last call": _from_the_last_call,
    "in a module": _in_a_module,
    "inside of grad": _inside_of_grad,
    "inside of vmap": _inside_of_vmap,
    "in the next transform": _in_the_next_transform,
    "what vjp gives": _pulled,
}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CALLS: dict[str, Callable[[Any, Loss, torch.Tensor], Any]] = {
    "vmap": lambda F, f, p: F.vmap(f, (None, 0), randomness="different")(p, ROWS),
    "vmap of grad": lambda F, f, p: F.vmap(F.grad(f), (None, 0), randomness="same")(p, ROWS),
    "vmap of vmap": lambda F, f, p: F.vmap(
        lambda x: F.vmap(lambda y: f(p, x + y), randomness="same")(ROWS), randomness="same"
    )(ROWS),
    "grad": lambda F, f, p: F.grad(f)(p, ROWS[0]),
    "grad of vmap": lambda F, f, p: F.grad(
        lambda p: F.vmap(f, (None, 0), randomness="same")(p, ROWS).sum()
    )(p),
    "jacrev": lambda F, f, p: F.jacrev(f)(p, ROWS[0]),
    "jacfwd": lambda F, f, p: F.jacfwd(f, randomness="same")(p, ROWS[0]),
    "hessian": lambda F, f, p: F.jacfwd(F.jacrev(f), randomness="same")(p, ROWS[0]),
    "vjp": lambda F, f, p: F.vjp(f, p, ROWS[0])[1](torch.tensor(2.0, dtype=D)),
    "jvp": lambda F, f, p: F.jvp(lambda p: f(p, ROWS[0]), (p,), (CAPTURED,)),
}
#: torch.func takes what the last call has kept for a tensor of its own level of the same number.
WRONG_IN_TORCH = {("hessian", "from the last call"), ("hessian", "in a module")}
HOW = ("recorded", "given up")


def _seen(x: Any) -> Any:
    """A kept tensor times 2, and whether that requires grad; the name of the error if it has no
    value.
    """
    if isinstance(x, list):
        return [*map(_seen, x)]
    if isinstance(x, nn.Module):
        return [_seen(x.mean), _seen(x.hidden)]
    try:
        value = x * 2
    except RuntimeError:
        return "no value"
    return [value.detach(), value.requires_grad]


def _given_up(y: torch.Tensor, how: str) -> torch.Tensor:
    return y.as_strided(y.shape, y.stride()) if how == "given up" else y  # which cannot be recorded


def _run(F: Any, call: str, name: str, how: str, p: torch.Tensor) -> Any:
    kept = types.SimpleNamespace(**({"layer": Layer()} if name == "in a module" else {}))
    torch.manual_seed(0)

    def loss(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        KEEPS[name](F, kept, p, x)
        return _given_up((p * x).sin(), how).sum()

    found = []
    for times in (1.0, 2.5):
        CALLS[call](F, loss, (p.detach() * times).requires_grad_(p.requires_grad))
        found.append({name: _seen(x) for name, x in vars(kept).items()})
    return found


@pytest.mark.thin(12)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", KEEPS)
def test_what_is_kept_is_read_after_the_call(name: str, call: str, how: str) -> None:
    if (call, name) in WRONG_IN_TORCH:
        pytest.skip("torch.func raises for it in the second call")
    same(_run(torchfunc_jax, call, name, how, P), _run(torch.func, call, name, how, P))


@pytest.mark.thin(3)
@pytest.mark.parametrize("call", ["vmap", "grad", "vmap of grad", "jvp"])
@pytest.mark.parametrize("name", KEEPS)
def test_it_requires_grad_if_it_does_outside(name: str, call: str) -> None:
    p = P.clone().requires_grad_()
    same(
        _run(torchfunc_jax, call, name, "recorded", p), _run(torch.func, call, name, "recorded", p)
    )


@pytest.mark.parametrize("how", HOW)
def test_a_view_of_an_argument_shares_its_memory(how: str) -> None:
    def call(F: Any) -> Any:
        kept, p = types.SimpleNamespace(), P.clone()
        loss = lambda p, x: vars(kept).update(a=p[1:]) or _given_up((p * x).sum(), how)
        F.vmap(F.grad(loss), (None, 0))(p, ROWS)
        p.add_(1)
        first = kept.a.clone()
        kept.a.mul_(3)
        return first, p

    same(call(torchfunc_jax), call(torch.func))


def test_a_gradient_flows_through_it() -> None:
    def call(F: Any) -> Any:
        kept, p = types.SimpleNamespace(), P.clone().requires_grad_()
        F.grad(lambda q: vars(kept).update(a=(q * 2).sin()) or (q * q).sum())(p)
        return torch.autograd.grad(kept.a.sum(), p)

    same(call(torchfunc_jax), call(torch.func))


def test_inside_of_a_checkpoint_and_of_a_function() -> None:
    kept = types.SimpleNamespace()

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            kept.b = x * 3
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            return cotangent * ctx.saved_tensors[0].cos()

    def inner(p: torch.Tensor) -> torch.Tensor:
        kept.a = p * 2
        return kept.a.cos()

    g = torchfunc_jax.grad(
        lambda p: (checkpoint(inner, Sine.apply(p), use_reentrant=False) + kept.a).sum()
    )(P)
    same((g, kept.a, kept.b), ((2 - 2 * (P.sin() * 2).sin()) * P.cos(), P.sin() * 2, P * 3))


def test_what_an_exception_has_removed_has_no_value_of_another_tensor() -> None:
    kept = types.SimpleNamespace()

    def raising(q: torch.Tensor) -> torch.Tensor:
        kept.a = q * 3
        raise ValueError

    def loss(p: torch.Tensor) -> torch.Tensor:
        F.grad(lambda q: vars(kept).update(b=q * 5) or q.sum())(p)
        with pytest.raises(ValueError, match=r"^$"):
            F.grad(lambda q: raising(q * kept.b))(p)
        return (p.cos() * 7 * kept.b).sum()

    F = torchfunc_jax
    F.grad(loss)(P)
    same(kept.b, P * 5)
    with pytest.raises(EscapedTensorError):
        kept.a * 2


def test_garbage_needs_no_programs_of_its_own() -> None:
    """Which garbage is still there depends on when Python has collected it last."""
    collected = 0

    def loss(p: torch.Tensor) -> torch.Tensor:
        for k in range(3):
            if k == collected:
                gc.collect()
            cycle = [p * (2 + k)]
            cycle.append(cycle)  # type: ignore[arg-type]
        return (p * 1.25).sum()

    gc.disable()
    try:
        for collected in (0, 1, 2, 0, 2):
            torchfunc_jax.grad(loss)(P)
            if not collected:
                before = len(process.programs.records)
    finally:
        gc.enable()
    assert len(process.programs.records) == before


def test_a_variable_of_the_caller() -> None:
    def call(F: Any) -> Any:
        mean = None

        def loss(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            nonlocal mean
            mean = p[:2] * 1 if mean is None else 0.5 * mean + p[:2]
            return (p * x).sum()

        for lanes in (4, 3, 2, 1):
            F.vmap(F.grad(loss), (None, 0))(P * lanes, ROWS[:lanes])
        return mean

    same(call(torchfunc_jax), call(torch.func), graph=False)


def test_no_search_of_the_whole_process_for_a_kept_tensor() -> None:
    """A collection of all objects takes a second in a process with large libraries."""

    def loss(p: torch.Tensor) -> torch.Tensor:
        kept.append(p * P)
        return kept[-1][1:].sin().sum()  # a view refers to it

    kept: list[torch.Tensor] = []
    collected: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(info["generation"])

    gc.disable()  # what is collected is asked for
    gc.callbacks.append(note)
    try:
        torchfunc_jax.vmap(lambda v: torchfunc_jax.jvp(torchfunc_jax.jacrev(loss), (P,), (v,))[1])(
            ROWS
        )
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert 2 not in collected
    same(kept[0], P * P)
