"""Eight threads calling different transforms, jitted and not, at once."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest
import torch
from agreement import Traces, same
from torch import nn

import torchfunc_jax
from bridge.process import Recent, process
from bridge.trace.levels import state
from bridge.xla import tiers
from torchfunc_jax import jit

THREADS, ROUNDS = 8, 4


def together(work: Callable[[int], None]) -> None:
    """Run work(0), work(1), … at the same time; raise what any of them raised."""
    barrier, errors = threading.Barrier(THREADS), []

    def run(n: int) -> None:
        try:
            barrier.wait()
            work(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


WORK: list[Callable[[Any, torch.Tensor, nn.Module], Any]] = [
    lambda T, x, m: T.vmap(torch.sin)(x),
    lambda T, x, m: T.grad(lambda a: (a**3).sum())(x),
    lambda T, x, m: T.jacrev(lambda a: a[0].exp())(x),
    lambda T, x, m: T.vmap(T.grad(lambda a: a.sin().prod()))(x),
    lambda T, x, m: T.jvp(lambda a: a.cumsum(0), (x,), (x,)),
    lambda T, x, m: T.vmap(
        lambda a: T.functional_call(m, {"weight": torch.ones(2, 4), "bias": torch.zeros(2)}, (a,))
    )(x),
    lambda T, x, m: T.hessian(lambda a: (a[0] ** 3).sum())(x),
    lambda T, x, m: T.vjp(lambda a: a.softmax(-1), x)[1](x),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_different_transforms_at_once(compiled: bool, shared: bool) -> None:
    common = nn.Linear(4, 2)
    before = [(id(p), p.detach().clone()) for p in common.parameters()]
    inputs = [torch.randn(3, 4) for _ in range(THREADS)]
    models = [common if shared else nn.Linear(4, 2) for _ in range(THREADS)]
    expected = [WORK[n](torch.func, inputs[n].clone(), nn.Linear(4, 2)) for n in range(THREADS)]

    def work(n: int) -> None:
        fn = lambda a: WORK[n](torchfunc_jax, a, models[n])
        fn = jit(fn) if compiled else fn
        for _ in range(ROUNDS):
            same(fn(inputs[n]), expected[n], rtol=1e-4, atol=1e-5)

    together(work)
    assert [id(p) for p in common.parameters()] == [i for i, _ in before]
    same([p.detach() for p in common.parameters()], [p for _, p in before])
    assert state.level is None and not jax.config.jax_enable_x64


def test_one_compiled_function_from_all_threads() -> None:
    traced = Traces(lambda x: (x * 2).sin())
    compiled = jit(traced)

    def work(n: int) -> None:
        for r in range(ROUNDS):
            x = torch.full((5,), float(n * ROUNDS + r))
            same(compiled(x), (x * 2).sin())

    together(work)
    assert traced.count == 1


def test_backward_in_every_thread() -> None:
    def work(n: int) -> None:
        x, w = torch.randn(3, 4), torch.randn(4, requires_grad=True)
        for wrap in (lambda f: f, jit):
            out = wrap(torchfunc_jax.vmap(lambda a: (a * w).sin()))(x)
            same(torch.autograd.grad(out.sum(), w)[0], ((x * w).cos() * x).sum(0), graph=False)

    together(work)


def test_a_failing_thread_does_not_disturb_the_others() -> None:
    def work(n: int) -> None:
        x = torch.randn(3, 4)
        for _ in range(ROUNDS):
            if n % 2:
                with pytest.raises(RuntimeError, match="scalar Tensor"):
                    torchfunc_jax.grad(torch.sin)(x)
            else:
                same(torchfunc_jax.grad(lambda a: a.sin().sum())(x), x.cos())

    together(work)


class _Key(int):
    """Another thread's turn comes while Python hashes it."""

    def __hash__(self) -> int:
        time.sleep(0)
        return int(self)


def test_entries_of_a_cache_go_while_other_threads_use_it() -> None:
    """As compiled records do, whose keys may have hashes in Python."""
    cache = Recent(2)

    def work(n: int) -> None:
        for r in range(500):
            if cache.get(_Key((n + r) % 5)) is None:
                cache.add(_Key((n + r) % 5), r)

    together(work)
    assert len(cache) == 2


def _refuse(lowered: Any) -> Any:
    raise jax.errors.JaxRuntimeError("INTERNAL: refused for a test")


@pytest.mark.parametrize("calls", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_second_compilations_that_fail(
    calls: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls go on with the first compilations, the thread with the next ones, and the log says it
    once.
    """
    lost: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lost.append)
    monkeypatch.setattr(process, "logged", {})
    monkeypatch.setattr(tiers, "_well", _refuse)
    monkeypatch.setattr(tiers, "_WORTH", 1e9)
    monkeypatch.setattr(tiers, "_WORTH_OF_JITTED", 1e9)
    w = torch.linspace(0.5, 1.5, 4, requires_grad=True)

    def work(n: int) -> None:
        for r in range(calls):
            x = torch.randn(1 + (n * 3 + r) % (calls // 10), 4)
            if (n + r) % 3:
                same(
                    torchfunc_jax.vmap(torchfunc_jax.grad(lambda a: (a.sin() * w.detach()).sum()))(
                        x
                    ),
                    x.cos() * w.detach(),
                )
            else:
                out = torchfunc_jax.vmap(lambda a: a.sin() * w)(x)
                same(torch.autograd.grad(out.sum(), w)[0], x.sin().sum(0), rtol=1e-4, atol=1e-5)

    with caplog.at_level(logging.WARNING, "torchfunc_jax"):
        together(work)
        waiting = threading.Event()
        process.compiler.later(waiting.set)
        assert waiting.wait(60)
    (message,) = caplog.messages
    assert not lost and "with all optimizations" in message and "refused for a test" in caplog.text


def test_what_jitted_functions_change_is_changed_once_by_each_call() -> None:
    """While one is traced, another one's changes are not taken for its own, nor taken back."""
    log, counts, last = list[int](), collections.Counter[int](), dict[int, torch.Tensor]()

    def made(n: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def fn(x: torch.Tensor) -> torch.Tensor:
            for _ in range(30):
                x = x.sin() * n
            log.append(n)
            counts[n] += 1
            time.sleep(0.01)  # another thread goes on while this one traces
            last[n] = x.sum()
            return x.cos()

        return jit(fn)

    fns = [made(n) for n in range(THREADS)]

    def work(n: int) -> None:
        for _ in range(ROUNDS):
            fns[n](torch.ones(3))

    together(work)
    assert collections.Counter(log) == counts == dict.fromkeys(range(THREADS), ROUNDS)
    assert {type(t) for t in last.values()} == {torch.Tensor} and len(last) == THREADS


def test_threads_count_the_calls_of_one_jitted_function() -> None:
    counts = {"calls": 0}

    @jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        counts["calls"] += 1
        return x * counts["calls"]

    def work(_: int) -> None:
        for _ in range(20 * ROUNDS):
            fn(torch.ones(3))

    together(work)
    assert counts == {"calls": THREADS * 20 * ROUNDS}


@pytest.mark.parametrize("wrap", [jit, torchfunc_jax.vmap, torchfunc_jax.functionalize])
def test_a_thread_that_the_function_starts_cannot_use_its_tensors(wrap: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.sin, x).result()

    with pytest.raises(RuntimeError, match="a transform that another thread runs"):
        wrap(f)(torch.ones(2, 3))
    assert state.level is None and state.recorder is None
    same(wrap(torch.sin)(torch.ones(2, 3)), torch.ones(2, 3).sin())
