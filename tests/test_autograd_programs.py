"""Random programs of autograd.Functions, hooks, checkpoints and nested transforms, beside plain PyTorch; and what errors leave behind."""
from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import autograd_programs
import pytest
import torch
import torch.utils.checkpoint
from agreement import same
from autograd_functions import SetupContext

import torchfunc_jax
from torchfunc_jax import functionalize, grad, jit, vmap

FAST = 25
COUNT = int(os.environ.get("TORCHFUNC_JAX_AUTOGRAD_PROGRAMS", str(FAST)))
PER_TEST = 5


def ways(seed: int, count: int) -> list[str]:
    """Some of the ways to call the program of a seed."""
    p = autograd_programs.program(seed)
    taken = [name for name, way in autograd_programs.WAYS.items() if way.takes(p)]
    return random.Random(seed).sample(taken, min(count, len(taken)))


def judge(start: int, stop: int, count: int) -> None:
    without_truth = 0
    for seed in range(start, stop):
        p = autograd_programs.program(seed)
        for name in ways(seed, count):
            way = autograd_programs.WAYS[name]
            found = autograd_programs.fault(p, way, torchfunc_jax)
            if found.startswith("no truth"):
                without_truth += 1
            elif found:
                smaller = autograd_programs.shrunk(p, way, torchfunc_jax)
                pytest.fail(f"program {seed}, {name}, {sorted(p.needs)} require grad: {found}\n{smaller.source}")
    assert without_truth <= 0.3 * count * (stop - start), "PyTorch itself raises too often to judge"


@pytest.mark.parametrize("start", range(0, FAST, PER_TEST))
def test_agrees_with_plain_pytorch(start: int) -> None:
    judge(start, start + PER_TEST, 1)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(FAST, COUNT, PER_TEST))
def test_many_agree_with_plain_pytorch(start: int) -> None:
    judge(start, min(start + PER_TEST, COUNT), 3)


# -- what random programs have found, each by itself ----------------------------------------------------
W = torch.tensor([0.7, -0.4, 1.2], dtype=torch.float64)


class Weighted(torch.autograd.Function):
    """Its methods use a tensor from outside; its derivative is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin() * W

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]  # torch has typed any number of them
        (x,) = ctx.saved_tensors
        return g * x * W if ctx.needs_input_grad[0] else None, g * 3 if ctx.needs_input_grad[1] else None


class Hidden(torch.autograd.Function):
    """It saves what is neither an input nor an output: a constant in a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        t = x.tanh()
        ctx.save_for_backward(t)
        return t * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * (1 - ctx.saved_tensors[0] ** 2)


def closure_of_its_own(x: torch.Tensor) -> torch.Tensor:
    z = x * 2

    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            return a * z

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
            return g * z

    return Local.apply(x.sin())


def hook_with_captured(x: torch.Tensor) -> torch.Tensor:
    y, z = x * 2, x.cos()
    if y.requires_grad:
        y.register_hook(lambda g: g * W * z)
    return y * y


def in_place(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The change is not recorded: what was there keeps its derivative."""

    def f(x: torch.Tensor) -> torch.Tensor:
        v = x * 0.4
        with torch.no_grad():
            change(v)
        return v * v

    return f


FOUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "backward uses a captured tensor": lambda x: Weighted.apply(x, None),
    "two inputs": lambda x: Weighted.apply(x * 2, W) * x,
    "it meets the captured tensor itself": lambda x: Weighted.apply(x * W, None) + W,
    "in a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(Weighted.apply, x * 1, None, use_reentrant=False),
    "an intermediate is saved": Hidden.apply, "closure of its own": closure_of_its_own, "hook with captured tensors": hook_with_captured,
    "copy_ in no_grad": in_place(lambda v: v.copy_(W)), "mul_ in no_grad": in_place(lambda v: v.mul_(W)),
    "a view in no_grad": in_place(lambda v: v[1:].mul_(W[1:])), "an element in no_grad": in_place(lambda v: v.__setitem__(0, W[1])),
    "out= in no_grad": in_place(lambda v: torch.mul(W, 2, out=v)),
}  # fmt: skip


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("entry", [functionalize, jit, vmap])
@pytest.mark.parametrize("name", FOUND)
def test_first_and_second_derivatives(name: str, entry: Any, captured: bool) -> None:
    """Of the argument and of W, which requires grad or not, in two calls with other numbers."""
    f = FOUND[name]
    mine, plain = entry(f), autograd_programs.PLAIN.vmap(f) if entry is vmap else f
    W.requires_grad_(captured)
    try:
        for number in range(2):
            with torch.no_grad():
                W.add_(number)
            found = []
            for g in (mine, plain):
                x = torch.linspace(0.3, 1.1, 3, dtype=torch.float64) + number
                leaves = [(x.expand(2, 3) * 1 if entry is vmap else x).requires_grad_(), *([W] if captured else [])]
                out = g(leaves[0])
                first = torch.autograd.grad(out.sum(), leaves, create_graph=True, allow_unused=True)
                total = sum(t.sin().sum() for t in first if t is not None)
                second = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
                found.append([torch.zeros(3, dtype=torch.float64) + (0 if t is None else t) for t in (out, *first, *second)])
            same(*found)
    finally:
        W.requires_grad_(False)


# -- errors, and other threads --------------------------------------------------------------------------
class Sometimes(torch.autograd.Function):
    """Raises where it is told to."""

    fails = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Sometimes.fails == "forward":
            raise ValueError("of the forward")
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # torch has typed any number of them
        if Sometimes.fails == "backward":
            raise ValueError("of the backward")
        (x,) = ctx.saved_tensors
        return 5 * g * x


def loss(x: torch.Tensor) -> torch.Tensor:
    return Sometimes.apply(x).sum()


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """f's gradient, by torch's backward from outside."""

    def run(x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        f(x).backward()
        return x.grad

    return run


ENTRIES: dict[str, Callable[[], Callable[..., Any]]] = {
    "functionalize": lambda: gradient(functionalize(loss)), "jit": lambda: gradient(jit(loss)), "grad": lambda: grad(loss),
    "jit(grad)": lambda: jit(grad(loss)), "vmap(grad)": lambda: vmap(grad(loss), in_dims=0),
}


def untouched() -> bool:
    """Whether PyTorch's own Function is as PyTorch made it."""
    return "__getattribute__" not in vars(type(torch.autograd.Function))


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_error_of_the_users_leaves_nothing_behind(entry: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(0.5, 2.0, 3)
    for _ in range(2):
        call = ENTRIES[entry]()
        with monkeypatch.context() as patched:
            patched.setattr(Sometimes, "fails", place)
            with pytest.raises(ValueError, match=f"of the {place}"):
                call(x)
            assert torch.is_grad_enabled()
            assert untouched()
        same(call(x), 5 * x)
        assert untouched()
    same(gradient(loss)(x), 5 * x)


@pytest.mark.parametrize("main_holds", [True, False])
def test_functions_of_other_threads_are_their_own(main_holds: bool) -> None:
    """While one thread has a trace open, another one's Functions run as PyTorch runs them, and its errors are its own."""
    inside, done = threading.Event(), threading.Event()
    x, seen, results = torch.linspace(0.5, 2.0, 3), [], []

    def held(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert done.wait(60)
        return Sometimes.apply(x).sum()

    def other() -> None:
        assert inside.wait(60)
        try:
            seen.extend([gradient(loss)(x), type(Sometimes.apply(x)), torch.is_grad_enabled()])
            with pytest.raises(ValueError, match="shape"):
                jit(grad(lambda x: _raising(Sometimes.apply(x))))(x)
            seen.extend([grad(loss)(x), grad(lambda x: SetupContext.apply(x).sum())(x)])
        finally:
            done.set()

    def holds() -> None:
        results.append(grad(held)(x))

    thread = threading.Thread(target=other if main_holds else holds)
    thread.start()
    (holds if main_holds else other)()
    thread.join()
    same(results, [5 * x])
    same(seen, [5 * x, torch.Tensor, True, 5 * x, 2 * x.cos()])
    assert untouched()


def _raising(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the shape is not what was expected")


def test_a_write_without_history_to_what_is_mapped() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 0.7
        y.detach().zero_()
        return y

    x = torch.ones(2, 3, requires_grad=True)
    for call in (vmap(f), jit(vmap(f))):
        out = call(x)
        same(out, torch.zeros(2, 3))
        same(torch.autograd.grad(out.sum(), x), (torch.full((2, 3), 0.7),))
