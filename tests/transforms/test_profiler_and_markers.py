"""The profiler's marks, checks and markers inside transforms have no effect on values; modules
wrapped for data parallelism run.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import same
from every_way import in_every_way
from torch.nn.parallel import DistributedDataParallel

import torchfunc_jax
from bridge.trace.levels import state
from torchfunc_jax import functional_call, grad, jit, vmap


def _nested(x: torch.Tensor) -> torch.Tensor:
    with (
        torch.profiler.record_function("outer"),
        torch.autograd.profiler.record_function("inner", "with arguments"),
    ):
        return x.sin() * x


@torch.profiler.record_function("a decorator")
def _decorated(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


def _by_operators(x: torch.Tensor) -> torch.Tensor:
    handle = torch.ops.profiler._record_function_enter("by a handle", None)
    y = x.cos()
    torch.ops.profiler._record_function_exit(handle)
    return y


def _profiled(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.profile():
        return _nested(x)


def _checked(x: torch.Tensor) -> torch.Tensor:
    torch._assert(x.dim() == 1, "one dimension")
    torch._assert((x.abs() < 100).all(), "small")
    torch._check(x.shape[0] > 1)
    torch._check_tensor_all(x < 100)
    return x * x


def _marked(x: torch.Tensor) -> torch.Tensor:
    torch.compiler.cudagraph_mark_step_begin()
    return torch.compiler.disable(_nested)(x)


FUNCTIONS = [_nested, _decorated, _by_operators, _profiled, _checked, _marked]


@pytest.mark.parametrize(
    "fn", FUNCTIONS, ids=lambda f: getattr(f, "__name__", "decorated").strip("_")
)
def test_a_mark_changes_no_value(fn):
    in_every_way(fn, torch.randn(4), lanes="jit" if fn is _checked else True)


def _refused_by_vmap(fn, x):
    """Un-jitted, vmap of fn raises what torch.func raises, and leaves nothing entered."""
    with pytest.raises(RuntimeError) as expected:
        torch.func.vmap(fn)(x)
    for _ in range(2):
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            vmap(fn)(x)
        assert torch._C._functorch.peek_interpreter_stack() is None and state.recorder is None


def test_checks_of_values_in_lanes():
    """torch.func's vmap refuses to ask for values, and so does what PyTorch runs; jit compiles the
    checks.
    """
    x = torch.randn(3, 4)
    _refused_by_vmap(_checked, x)
    with pytest.raises(RuntimeError, match="data-dependent control flow"):
        torch.func.vmap(torch.func.grad(lambda row: _checked(row).sum()))(x)
    with pytest.raises(RuntimeError, match="data-dependent control flow"):
        vmap(grad(lambda row: _checked(row).sum()))(x)
    same(jit(vmap(_checked))(x), x * x)


def test_a_profile_around_a_transform_shows_the_marks_inside_it():
    x = torch.randn(4)
    with torch.profiler.profile() as profile:
        found = grad(lambda x: _nested(x).sum())(x)
    same(found, torch.func.grad(lambda x: _nested(x).sum())(x))
    assert {"outer", "inner"} <= {event.key for event in profile.key_averages()}


def test_a_mark_is_closed_when_the_function_raises():
    def fails(x):
        with torch.profiler.record_function("fails"):
            raise KeyError("as it is")

    with torch.profiler.profile() as profile, pytest.raises(KeyError, match="as it is"):
        grad(fails)(torch.randn(2))
    assert "fails" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    "wrapped", [jit, grad, vmap, lambda f: jit(vmap(f))], ids=["jit", "grad", "vmap", "jit of vmap"]
)
def test_an_assertion_that_fails_raises_its_message(wrapped):
    def fn(x):
        torch._assert((x < 3).all(), "x: expected {less} than 3")
        return x.sum()

    run = wrapped(fn)
    x = torch.zeros(2, 3)
    run(x)
    for _ in range(2):
        with pytest.raises(AssertionError, match=r"x: expected \{less\} than 3"):
            run(x + 5)
    run(x)


@pytest.fixture(scope="module")
def _group(tmp_path_factory: Any) -> Iterator[None]:
    # by tests of another file in this process, which keep it
    if torch.distributed.is_initialized():
        yield
        return
    path: Path = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _parallel(**options: Any) -> tuple[DistributedDataParallel, torch.nn.Module]:
    """A module wrapped for data parallelism, and the same one without."""
    torch.manual_seed(1)
    inner = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    )
    torch.manual_seed(1)
    plain = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    )
    return DistributedDataParallel(inner, **options), plain


OPTIONS: list[dict[str, bool]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"broadcast_buffers": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o), "defaults"))
def test_training_a_parallel_module_jitted_and_not_in_turn(options, _group):
    parallel, plain = _parallel(**options)
    compiled = jit(parallel)
    x = torch.randn(5, 3)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (parallel, plain)]
    for call in (compiled, parallel, compiled, parallel, compiled):
        for optimizer, out in zip(optimizers, (call(x), plain(x)), strict=True):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
    same(dict(parallel.module.named_parameters()), dict(plain.named_parameters()))
    same(dict(parallel.module.named_buffers()), dict(plain.named_buffers()))
    assert not parallel._use_python_reducer


@pytest.mark.parametrize("training", [True, False])
def test_functional_call_of_a_parallel_module(training, _group):
    parallel, plain = _parallel()
    parallel.train(training), plain.train(training)
    x = torch.randn(6, 5, 3)

    def loss_of(module):
        buffers = {name: b.clone() for name, b in module.named_buffers()}
        return lambda p, x: (
            functional_call(module, (p, {k: b.clone() for k, b in buffers.items()}), (x,))
            .square()
            .sum()
        )

    def gradients(func, module):
        gradient = func.grad(loss_of(module))
        return (lambda p, x: gradient(p, x[0])) if training else func.vmap(gradient, (None, 0))

    mine, theirs = ({k: v.detach() for k, v in m.named_parameters()} for m in (parallel, plain))
    expected = gradients(torch.func, plain)(theirs, x)
    for wrapped in (lambda f: f, jit):
        found = wrapped(gradients(torchfunc_jax, parallel))(mine, x)
        same({k.removeprefix("module."): v for k, v in found.items()}, expected)


def test_threads_trace_one_parallel_module_at_once(_group):
    parallel, plain = _parallel()
    parallel.eval(), plain.eval()
    barrier, found = threading.Barrier(3), []

    def run(n):
        barrier.wait()
        found.append(jit(lambda x: parallel(x) * 1.0)(torch.full((n, 3), float(n))).detach())

    threads = [threading.Thread(target=run, args=(n,)) for n in (2, 3, 4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    same(sorted(found, key=len), [plain(torch.full((n, 3), float(n))).detach() for n in (2, 3, 4)])
    assert not parallel._use_python_reducer


def test_collectives_of_one_process(_group):
    def total(x):
        y = x * x
        torch.distributed.all_reduce(y)
        torch.distributed.broadcast(y, 0)
        return y

    x = torch.randn(4, 3)
    in_every_way(total, x[0], grads=False, lanes=False)
    same(jit(vmap(total))(x), x * x)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for c10d::"):
        torch.func.vmap(total)(x)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for c10d::"):
        vmap(total)(x)
    for collective in (torch.distributed.broadcast, torch.distributed.reduce):
        same(grad(functools.partial(_summed_after, collective))(x), 2 * x)


def _summed_after(collective, x):
    y = x.square()
    collective(y, 0)
    return y.sum()


def test_several_processes_are_refused(_group, monkeypatch):
    parallel, _ = _parallel()
    monkeypatch.setattr(type(parallel.process_group), "size", lambda group: 2)
    for call in (parallel, lambda x: torch.distributed.all_reduce(x * 1)):
        with pytest.raises(NotImplementedError, match="expected a process group of one process"):
            jit(call)(torch.randn(5, 3))
    monkeypatch.undo()
    assert jit(parallel)(torch.randn(5, 3)).shape == (5, 2)
