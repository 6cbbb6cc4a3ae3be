"""Un-jitted derivatives inside a vmap, with torch.func's values: at the first call, at the next
ones, and with other numbers of lanes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import same
from torch import nn
from torch.utils import _pytree as pytree

import torchfunc_jax
from bridge.process import process
from bridge.record import lanes, programs

torch.manual_seed(0)
X, Y, W = torch.randn(5, 4), torch.randn(5, 4), torch.randn(4, 4)
LABELS = torch.tensor([0, 3, 1, 1, 2])
NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4)).requires_grad_(
    False
)
PARAMS = dict(NET.named_parameters())
PAIR = {k: torch.stack([v, v + 1]) for k, v in PARAMS.items()}
CNN = nn.Sequential(
    nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 4)
).requires_grad_(False)
IMAGES = torch.randn(5, 1, 4, 4)


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.func.functional_call(NET, params, (x[None],)), y[None])


def cnn_loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.func.functional_call(CNN, params, (x[None],)), y[None])


def written(x: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z[1:3] += x[:2].sin()
    z.mul_(x)
    return z.sum()


def received(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * y + y.sum()
    z[0] = (x * y).sum()
    return (z * x).sum()


def filled(x: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(4)
    z[1] = x.sum()  # torch.func refuses it: a value of each lane in a tensor that all share
    z[2:] += x[:2] * x[3]
    return (z * x).sum()


def each(api: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Mapped, and in torch.func one after the other."""
    if api is torchfunc_jax:
        return api.vmap(api.grad(function))
    return lambda xs: torch.stack([api.grad(function)(x) for x in xs])


def stopped(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.norm()
    return (x * x.detach() * scale).sum()


def detached_view(x: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z.detach()[0] = 2.0
    return (z * x).sum()


def tables(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return x.pow(3).sum(), {"norm": x.norm(), "constant": torch.ones(2), "x": x}


def pulled(api: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor, c: torch.Tensor) -> Any:
        out, pull = api.vjp(lambda v: (v @ W).tanh(), x)
        return out, pull(c), pull(torch.ones(4))

    return run


def pull_outside(api: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        _, pull = api.vjp(lambda v: (v @ W).tanh() * v.sum(), x)
        return api.vmap(pull)(torch.eye(4))

    return run


# name: (build(api) -> callable, arguments)
ROWS: dict[str, tuple[Callable[[Any], Callable[..., Any]], tuple[Any, ...]]] = {
    "per_sample": (lambda t: t.vmap(t.grad(loss), (None, 0, 0)), (PARAMS, X, LABELS)),
    "ensemble": (lambda t: t.vmap(t.grad(loss), (0, None, None)), (PAIR, X[0], LABELS[0])),
    "cnn": (
        lambda t: t.vmap(t.grad_and_value(cnn_loss), (None, 0, 0)),
        (dict(CNN.named_parameters()), IMAGES, LABELS),
    ),
    "in_place": (lambda t: t.vmap(t.grad(written)), (X,)),
    "first_mapped": (lambda t: t.vmap(t.grad(received), (0, None)), (X, Y[0])),
    "second_mapped": (lambda t: t.vmap(t.grad(received), (None, 0)), (X[0], Y)),
    "mapped_into_shared": (lambda t: each(t, filled), (X,)),
    "no_grad": (lambda t: t.vmap(t.grad(stopped)), (X,)),
    "detached_view": (lambda t: t.vmap(t.grad(detached_view)), (X,)),
    "has_aux": (lambda t: t.vmap(t.grad(tables, has_aux=True)), (X,)),
    "argnums": (
        lambda t: t.vmap(t.grad(received, argnums=(0, 1)), in_dims=(1, 1)),
        (X[:4].T.contiguous(), Y[:4]),
    ),
    "out_dims": (lambda t: t.vmap(t.grad(stopped), out_dims=1), (X,)),
    "unused": (lambda t: t.vmap(t.grad(lambda x, y: (y * y).sum()), (0, 0)), (X, Y)),
    "vjp": (lambda t: t.vmap(pulled(t)), (X, Y)),
    "pull_mapped": (pull_outside, (X[0],)),
    "jacrev": (lambda t: t.jacrev(lambda x: (x @ W).tanh()), (X[0],)),
    "jacrev_chunks": (
        lambda t: t.jacrev(lambda x: ((x @ W).tanh(), x[:3] * 2), chunk_size=3),
        (X[0],),
    ),
    "second": (lambda t: t.vmap(t.grad(lambda x: t.grad(stopped)(x).sum())), (X,)),
    "inner_vmap": (lambda t: t.vmap(t.grad(lambda x: t.vmap(torch.sin)(x).sum())), (X,)),
    "complex": (
        lambda t: t.vmap(t.grad(lambda x: (x * x.conj()).real.sum())),
        (torch.randn(3, 2, dtype=torch.complex64),),
    ),
    "jacrev_in_vmap": (lambda t: t.vmap(t.jacrev(lambda x: (x @ W).tanh())), (X,)),
}


@pytest.mark.parametrize("name", ROWS)
def test_values(name: str) -> None:
    build, arguments = ROWS[name]
    expected = build(torch.func)(*arguments)
    for _ in range(2):
        same(build(torchfunc_jax)(*arguments), expected, rtol=1e-4, atol=1e-5)


def test_random_numbers_are_the_same_at_the_second_call() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rand(4)).sum()

    def mapped() -> torch.Tensor:
        torch.manual_seed(3)
        return torchfunc_jax.vmap(torchfunc_jax.grad(noisy), randomness="same")(X)

    first, second = mapped(), mapped()
    assert torch.equal(first, second)
    assert torch.equal(first, first[:1].expand(5, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: (x.sum(), 1),
        lambda x: x.sum().item(),
        lambda x: x[x > 0].sum(),
        lambda x: x.view(3).sum(),
    ],
    ids=["no_scalar", "no_tensor", "item", "boolean_index", "shape"],
)
def test_same_class_of_error(function: Callable[..., Any]) -> None:
    with pytest.raises(Exception) as theirs:
        torch.func.vmap(torch.func.grad(function))(X)
    with pytest.raises(type(theirs.value)):
        torchfunc_jax.vmap(torchfunc_jax.grad(function))(X)
    same(
        torchfunc_jax.vmap(torchfunc_jax.grad(written))(X),
        torch.func.vmap(torch.func.grad(written))(X),
    )


# -- other numbers of lanes ------------------------------------------------------------------------
def infinite(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """With a derivative that is infinite in lanes of zeros."""
    return (x.abs().sqrt() * w).sum()


# of (transforms, x [n, 3], y [3, n], w [3])
MAPPED: dict[str, Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "of the first dimension": lambda T, x, y, w: T.vmap(lambda a: (a * w).sin())(x),
    "of the last dimension": lambda T, x, y, w: T.vmap(lambda a: (a * w).sin(), 1, 1)(y),
    "two inputs": lambda T, x, y, w: T.vmap(lambda a, b: torch.outer(a, b * w), (0, 1))(x, y),
    "one input twice": lambda T, x, y, w: T.vmap(lambda a, b: a * b.sum() + w)(x, x),
    "an input also captured": lambda T, x, y, w: T.vmap(lambda a: (a * w + x).mean(0))(x),
    "an output that is shared": lambda T, x, y, w: T.vmap(
        lambda a: (a * w, w * 2), out_dims=(0, None)
    )(x),
    "several outputs": lambda T, x, y, w: T.vmap(
        lambda a: {"max": (a * w).max(), "at": a.argmax(), "rest": a}
    )(x),
    "out_dims": lambda T, x, y, w: T.vmap(lambda a: torch.outer(a, w), out_dims=-1)(x),
    "a gradient": lambda T, x, y, w: T.vmap(T.grad(lambda a: (a * w).prod()))(x),
    "a map inside": lambda T, x, y, w: T.vmap(
        lambda a: T.vmap(lambda b: b * a * w)(torch.stack([a, w]))
    )(x),
    "an infinite derivative": lambda T, x, y, w: T.vmap(lambda a: infinite(a, w))(x),
    "in place": lambda T, x, y, w: T.vmap(lambda a: a.clone().mul_(2).add_(w))(x),
    "a step that repeats": lambda T, x, y, w: T.vmap(
        lambda a: functools.reduce(lambda s, _: s + 0.1 * (s * w).sin(), range(30), a)
    )(x),
}


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("name", MAPPED)
def test_numbers_of_lanes_that_change(name: str, differentiated: bool) -> None:
    """From the second number on, a program with more lanes runs; the values and gradients are those
    of the lanes that there are.
    """

    def run(T: Any, n: int) -> Any:
        generator = torch.Generator().manual_seed(n)
        x, y, w = (
            torch.randn(shape, generator=generator, requires_grad=differentiated)
            for shape in ((n, 3), (3, n), (3,))
        )
        if name == "an infinite derivative":
            with torch.no_grad():
                x[-1] = 0
        out = MAPPED[name](T, x, y, w)
        outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        contiguous = [t.is_contiguous() for t in outs]
        if not differentiated:
            return out, contiguous
        total = sum(
            (t * (1 + torch.arange(t.numel()).reshape(t.shape))).sum()
            for t in outs
            if t.requires_grad
        )
        return out, torch.autograd.grad(total, (x, y, w), allow_unused=True)

    for n in (4, 5, 6, 1, 7, 5, 17):
        mine, theirs = run(torchfunc_jax, n), run(torch.func, n)
        same(mine[0], theirs[0], rtol=1e-4, atol=1e-5)
        if differentiated:
            for m, t in zip(mine[1], theirs[1], strict=True):
                assert (m is None) is (t is None)
                if t is not None:
                    torch.testing.assert_close(m, t, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_lanes_that_fill_up_are_no_lanes() -> None:
    """Nothing of them is seen: not in a count of what is read from a table, not as an index that is
    out of range.
    """
    table = torch.randn(3, requires_grad=True)
    for n in (2, 5, 7):
        index = torch.arange(n) % 3
        out = torchfunc_jax.vmap(lambda i: table[i])(index)
        (counted,) = torch.autograd.grad(out.sum(), table)
        same(counted, torch.bincount(index, minlength=3).float())


def test_a_number_of_lanes_that_stays_gets_a_program_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide: list[int] = []
    record = lanes.Wide.record
    monkeypatch.setattr(
        lanes.Wide, "record", lambda self: (wide.append(self.lanes), record(self))[1]
    )
    clock = iter(range(10**6))
    monkeypatch.setattr(programs.time, "perf_counter", lambda: float(next(clock)))
    function = torchfunc_jax.vmap(lambda a: (a * 1.5).sin().sum() - a[0])
    for _ in range(30):
        function(torch.ones(4, 2))
    assert not wide
    for _ in range(30):
        same(
            function(torch.ones(5, 2)),
            torch.func.vmap(lambda a: (a * 1.5).sin().sum() - a[0])(torch.ones(5, 2)),
        )
    assert 0 < len(wide) < 30


def test_programs_that_are_used_once_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = programs._Kept()
    monkeypatch.setattr(process, "programs", kept)
    monkeypatch.setattr(programs, "_ALIKE", 4)
    monkeypatch.setattr(programs, "_ALL", 6)

    def square(n: int) -> None:
        same(torchfunc_jax.grad(lambda t: (t * t).sum())(torch.ones(n)), 2 * torch.ones(n))

    def sine(n: int) -> None:
        same(torchfunc_jax.grad(lambda t: t.sin().sum())(torch.ones(n)), torch.ones(n).cos())

    def by_use() -> list[tuple[Any, Any]]:
        return sorted(kept.records.items(), key=lambda item: item[1].used)

    def shapes() -> list[tuple[int, ...]]:
        return [trace[0][0].aval.shape for (trace, *_), _ in by_use()]

    for n in range(1, 6):  # of one function's shapes, those used last
        square(n)
    assert shapes() == [(2,), (3,), (4,), (5,)]
    square(2)
    square(6)
    assert shapes() == [(4,), (5,), (2,), (6,)]
    gone = [weakref.ref(program) for _, family in by_use() for program in family.programs]
    for n in range(10, 13):  # of all functions, those used last
        sine(n)
    assert shapes() == [(5,), (2,), (6,), (10,), (11,), (12,)]
    # at once, without the garbage collector
    assert [program() is None for program in gone] == [True, False, False, False]
    operators = len(process.recorded)
    kept.trim()
    assert len(process.recorded) < operators
    sine(12)
    assert len(kept.records) == 6


def test_a_number_that_changes_needs_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "programs", kept := programs._Kept())
    for k in range(12):
        same(torchfunc_jax.vmap(lambda x, k=k: x * (k + 0.5))(X), X * (k + 0.5))
    assert len(kept.records) == 1
