"""The same call gives the same bits again where somebody compares: under deterministic algorithms,
in gradcheck, in one node's backward.

Elsewhere a program is compiled anew, with all of XLA's optimizations, once it has run for a while,
and rounds differently from then on. Here that happens as early as it can: the second call of a
program makes its better tier, and the third call may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from bridge import private
from bridge.process import Recent, process
from bridge.record import programs
from bridge.xla import tiers
from torchfunc_jax import functional_call, grad, hessian, jacrev, jit, jvp, linearize, vjp, vmap

CALLS = 8
W = torch.randn(16, requires_grad=True)
NET = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
Leaves = list[torch.Tensor]


@pytest.fixture(autouse=True)
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which compilations there were, "fast" and "well"; each is done at once, and second ones as
    soon as possible.
    """
    found: list[str] = []
    for name in ("fast", "well"):
        compiled = getattr(tiers, f"_{name}")
        monkeypatch.setattr(
            tiers,
            f"_{name}",
            lambda *given, name=name, compiled=compiled: (found.append(name), compiled(*given))[1],
        )
    monkeypatch.setattr(tiers, "_WORTH", 1e9)
    monkeypatch.setattr(tiers, "_WORTH_OF_JITTED", 1e9)
    monkeypatch.setattr(
        process.compiler, "later", lambda work, idle=False: None if idle else work()
    )
    monkeypatch.setattr(process, "programs", programs._Kept())
    monkeypatch.setattr(process, "executables", Recent(128))
    monkeypatch.setattr(process, "widths", type(process.widths)())
    yield found
    torch.use_deterministic_algorithms(False)


def polynomial(v: torch.Tensor) -> torch.Tensor:
    """Products and sums, which the second tier contracts, and a sum of more than 32 numbers, which
    it adds up in parts.
    """
    return ((v * v * 0.3 + v) * v - 0.7 * v).softmax(-1)


def _asking(v: torch.Tensor) -> torch.Tensor:
    scale = polynomial(v).sum().item()
    return (polynomial(v * scale) * (v.sin() * v).sum().item())[0]


def _branching(v: torch.Tensor) -> torch.Tensor:
    return polynomial(v)[0] if v[0] > 0 else (polynomial(v) * v).sum()


def _unrecorded(v: torch.Tensor) -> torch.Tensor:
    return (polynomial(v) * W.detach()).as_strided((16,), (1,)).sum() * v.sum()


def _backward(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Leaves:
    out = f(x.requires_grad_())
    return [out.detach(), *torch.autograd.grad(out.sum(), [x, W])]


def _of_widths(x: torch.Tensor) -> torch.Tensor:
    for lanes in (13, 14, 12):
        vmap(polynomial)(x[:lanes])
    return vmap(polynomial)(x[:11])


#: A call of a tensor of 15 rows of 16 numbers.
SAME: dict[str, Callable[[torch.Tensor], Any]] = {
    "vmap of grad": vmap(
        grad(lambda v: functional_call(NET, dict(NET.named_parameters()), (v,)).squeeze().sin())
    ),
    "jacrev": jacrev(lambda x: polynomial(x).sum(0)),
    "hessian": lambda x: hessian(lambda v: polynomial(v).sin().sum())(x[0]),
    "jvp": lambda x: jvp(polynomial, (x,), (x,)),
    "vjp": lambda x: vjp(polynomial, x)[1](x),
    "linearize": lambda x: linearize(polynomial, x)[1](x),
    "values": lambda x: grad(_asking)(x[0]),
    "branch": lambda x: grad(_branching)(x[0].abs()),
    "not recorded": vmap(grad(_unrecorded)),
    "not recorded, alone": lambda x: grad(_unrecorded)(x[0]),
    "backward": lambda x: _backward(vmap(lambda v: polynomial(v * W)), x.clone()),
    "backward, not recorded": lambda x: _backward(
        vmap(lambda v: polynomial(v * W).as_strided((16,), (1,))), x.clone()
    ),
    "widths": _of_widths,
    "jit": jit(vmap(grad(lambda v: polynomial(v).sin().sum()))),
}


def _leaves(found: Any) -> Leaves:
    return [t.detach() for t in torch.utils._pytree.tree_leaves(found)]


def _same(a: Leaves, b: Leaves) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", SAME)
def test_one_tier_for_a_program_s_life_under_deterministic_algorithms(
    name: str, compilations: list[str]
) -> None:
    torch.use_deterministic_algorithms(True)
    x = torch.randn(15, 16)
    process.widths.wasted = _Endless()  # the added lanes have cost enough for a program of its own
    found = [_leaves(SAME[name](x))]
    count = len(compilations)
    found += [_leaves(SAME[name](x)) for _ in range(CALLS)]
    assert all(_same(found[0], other) for other in found), name
    assert "fast" not in compilations and len(compilations) == count


class _Endless(dict):
    def get(self, *_: Any) -> float:
        return 1e9


@pytest.mark.parametrize("retained", [False, True], ids=["compiled before", "compiled after"])
def test_a_backward_pass_is_of_the_tier_of_its_forward_pass(
    retained: bool, compilations: list[str]
) -> None:
    x, call = torch.randn(15, 16).requires_grad_(), vmap(lambda v: polynomial(v * W))

    def backward(out: torch.Tensor) -> Leaves:
        return list(
            torch.autograd.grad(out, [x, W], torch.ones_like(out) * x.detach(), retain_graph=True)
        )

    out = call(x)
    before = None if retained else backward(out)
    while "well" not in compilations:
        call(x)
    later = call(x)
    assert not torch.equal(out, later)  # the tier has changed
    assert _same(before or backward(out), backward(out)) and _same(backward(later), backward(later))
    if before is not None:
        assert not _same(backward(out), backward(later))


class _Through(torch.autograd.Function):
    """A Function whose backward calls transforms, as libraries do for their vector-Jacobian
    products.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return vmap(function)(x)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return vjp(vmap(ctx.function), x)[1](cotangent)[0], None


CHECKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vmap": vmap(polynomial),
    "grad": grad(lambda x: polynomial(x).sin().sum()),
    "vmap of grad": vmap(grad(lambda v: polynomial(v).sin().sum())),
    "jit of vmap": jit(vmap(polynomial)),
    "vmap of jit": vmap(jit(polynomial)),
    "jacrev": jacrev(lambda x: polynomial(x).sum(0)),
    "vjp": lambda x: vjp(polynomial, x)[1](x)[0],
    "a Function": lambda x: _Through.apply(x, polynomial),
    "a Function, not recorded": lambda x: _Through.apply(
        x, lambda v: polynomial(v).as_strided((5,), (1,))
    ),
}


@pytest.mark.parametrize("again", [False, True], ids=["gradcheck", "gradgradcheck"])
@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck(name: str, again: bool, compilations: list[str]) -> None:
    """It compares the backward passes of one graph bit by bit, and calls the function often enough
    for a better tier.
    """
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    CHECKED[name](x)
    (gradgradcheck if again else gradcheck)(CHECKED[name], (x,), fast_mode=again)


def test_a_better_tier_waits_until_gradcheck_is_over(compilations: list[str]) -> None:
    x = torch.randn(2, 40, dtype=torch.float64, requires_grad=True)
    outs = []

    def call(x: torch.Tensor) -> torch.Tensor:
        outs.append(vmap(polynomial)(X))
        return vmap(polynomial)(x)

    gradcheck(call, (x,), fast_mode=True)
    assert "well" in compilations and len(outs) > 3 and _same(outs, outs[:1] * len(outs))
    assert not private.bits_are_compared() and not torch.equal(vmap(polynomial)(X), outs[0])


X = torch.randn(15, 40, dtype=torch.float64)

#: Numbers of the calls of a jitted function in turn; the function.
NUMBERS: dict[str, tuple[list[tuple[float, int]], Callable[..., torch.Tensor]]] = {
    "a power": (
        [(2.0, 1), (3.0, 1), (2.0, 1), (2.5, 1), (3.0, 1), (2.0, 1)],
        lambda x, s, n: (x.abs() ** s * 0.3 + x).softmax(-1),
    ),
    "a quotient": (
        [(3.0, 1), (7.0, 1), (3.0, 1), (7.0, 1)],
        lambda x, s, n: (x / s * 0.3 + x).softmax(-1) / s,
    ),
    "two numbers": (
        [
            (3.0, 1),
            (7.0, 1),
            (7.0, 5),
            (3.0, 1),
            (7.0, 1),
            (7.0, 5),
            (7.0, 1),
            (9.0, 6),
            (7.0, 5),
            (7.0, 1),
        ],
        lambda x, s, n: (x.abs() ** s / n * 0.3 + x / s).softmax(-1) / n,
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_becomes_an_input_leaves_earlier_calls_as_they_were(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_WORTH_OF_JITTED", 0.0)  # no program gets a better tier
    calls, function = NUMBERS[name]
    compiled, x = jit(function), torch.randn(15, 40)
    found: dict[Any, torch.Tensor] = {}
    for numbers in calls:
        out = compiled(x, *numbers)
        torch.testing.assert_close(out, function(x, *numbers))
        assert torch.equal(out, found.setdefault(numbers, out)), numbers
