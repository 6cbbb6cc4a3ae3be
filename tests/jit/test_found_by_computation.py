"""Programs of jitted functions are found by what they compute: by a new function of this process,
and by the next process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import torchfunc_jax
from bridge import block_programs
from bridge.process import Recent, process
from bridge.xla import disk, executables, tiers
from bridge.xla.block_calls import BlockCalls
from torchfunc_jax import functional_call, grad, jit, vmap

X = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).reshape(4, 6)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which compilations there were, "fast" and "well"."""
    found: list[str] = []
    for name in ("fast", "well"):
        compiled = getattr(tiers, f"_{name}")
        monkeypatch.setattr(
            tiers,
            f"_{name}",
            lambda *given, name=name, compiled=compiled: (found.append(name), compiled(*given))[1],
        )
    monkeypatch.setattr(process, "executables", Recent(128))
    monkeypatch.setattr(process.compiler, "later", lambda work, idle=False: None)
    return found


@contextlib.contextmanager
def storing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """What is compiled is stored in the folder, at once."""
    monkeypatch.setattr(
        process.compiler, "later", lambda work, idle=False: work() if idle else None
    )
    monkeypatch.setattr(disk, "place", lambda: (folder, ""))
    cache = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    # JAX looks at the setting once
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def _step(net: nn.Module) -> Callable[..., Any]:
    """The gradient of a training step, made anew for each network."""

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(net, params, (x,)), y)

    return grad(loss)


def test_a_new_module_of_the_same_architecture_compiles_nothing(compilations: list[str]) -> None:
    y = torch.tensor([0, 1, 2, 1])
    for seed in range(4):
        net = _network(seed)
        params = {name: p.detach() for name, p in net.named_parameters()}
        found, want = jit(_step(net))(params, X, y), _step(net)(params, X, y)
        torch.testing.assert_close(found, want)
        if not seed:
            first = len(compilations)
    assert len(compilations) == first


def test_a_module_that_is_captured_or_an_argument(compilations: list[str]) -> None:
    for make in (
        lambda net: (jit(lambda x: net(x).square().sum()), ()),
        lambda net: (jit(lambda x, net: net(x).square().sum()), (net,)),
    ):
        counts = []
        for seed in range(3):
            net = _network(seed)
            f, more = make(net)
            f(X, *more).backward()
            grads = [p.grad for p in net.parameters()]
            want = torch.autograd.grad(net(X).square().sum(), list(net.parameters()))
            torch.testing.assert_close(grads, list(want))
            counts.append(len(compilations))
        assert counts[0] == counts[2]


#: Pairs of functions that differ in what a name must tell.
DIFFERENT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "which argument is used": (lambda a, b: a.sin() * 2, lambda a, b: b.sin() * 2),
    "a constant": (lambda a, b: a * 2.5 + b, lambda a, b: a * 2.75 + b),
    "a constant of many numbers": (
        lambda a, b: a * torch.arange(6.0, dtype=torch.float64),
        lambda a, b: a * torch.arange(1.0, 7.0, dtype=torch.float64),
    ),
    "the tree of the results": (
        lambda a, b: [a + b, a * b],
        lambda a, b: {"sum": a + b, "product": a * b},
    ),
    "the order of the results": (lambda a, b: (a + b, a * b), lambda a, b: (a * b, a + b)),
    "a result that is an argument": (lambda a, b: (a, a + b), lambda a, b: (b, a + b)),
    "a write": (lambda a, b: a.clone().add_(b), lambda a, b: b.clone().sub_(a)),
    "a dtype inside": (lambda a, b: (a.float() * b.float()).double(), lambda a, b: a * b),
    "an axis": (lambda a, b: (a + b).cumsum(0), lambda a, b: (a + b).cumsum(1)),
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("derivative", [False, True])
def test_functions_that_compute_something_else(
    name: str, derivative: bool, compilations: list[str]
) -> None:
    for f in (*DIFFERENT[name], *DIFFERENT[name]):
        a, b = X.clone().requires_grad_(derivative), (X + 3).requires_grad_(derivative)
        found, want = jit(f)(a, b), f(a, b)
        torch.testing.assert_close(found, want)
        if derivative:
            leaves = [torch.utils._pytree.tree_leaves(out) for out in (found, want)]
            grads = [
                torch.autograd.grad(sum((t * t).sum() for t in ts), (a, b), allow_unused=True)
                for ts in leaves
            ]
            torch.testing.assert_close(
                *[[torch.zeros_like(a) if g is None else g for g in gs] for gs in grads]
            )


def test_what_calls_python_has_no_name() -> None:
    def called(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    aval = jax.ShapeDtypeStruct((3,), np.float32)
    assert executables.name_of(jax.jit(called).lower(aval), jax.devices()[0]) is None
    assert executables.name_of(jax.jit(lambda x: x * 2).lower(aval), jax.devices()[0]) is not None


def test_a_stored_executable_is_found_and_a_damaged_one_made_again(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    f = lambda x: ((x @ x.T).sin() * 3).sum(0)
    with storing(monkeypatch, tmp_path):
        first = jit(f)(X)
        (file,) = tmp_path.iterdir()
        assert len(compilations) == 1
        monkeypatch.setattr(process, "executables", Recent(128))
        assert torch.equal(jit(f)(X), first)
        assert len(compilations) == 1
        data = file.read_bytes()
        for damaged in (data[:-1], data[:40], b""):
            file.write_bytes(damaged)
            monkeypatch.setattr(process, "executables", Recent(128))
            assert torch.equal(jit(f)(X), first)
        assert len(compilations) == 4


def test_what_was_loaded_is_not_stored_again(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """XLA cannot serialize it, and the next process would load a program that does not run."""
    loaded, stored = [], []
    packed, unpacked = disk.packed, disk.unpacked
    monkeypatch.setattr(
        disk, "unpacked", lambda data: (found := unpacked(data), loaded.append(found))[0]
    )
    monkeypatch.setattr(
        disk, "packed", lambda executable: (stored.append(executable), packed(executable))[1]
    )
    f = lambda x: ((x @ x.T).sin() * 3).sum(0)
    with storing(monkeypatch, tmp_path):
        jit(f)(X)
        monkeypatch.setattr(process, "executables", Recent(128))
        jit(f)(X)
        assert len(loaded) == 1 and len(stored) == 1
        jit(lambda x: ((x @ x.T).sin() * 3).sum(0))(X)
    (kept,) = [process.executables.get(key) for key in process.executables]
    assert kept[:2] == (loaded[0], False) and loaded[0] not in stored and len(stored) == 1


_SCRIPT = """
import json, torch
from bridge import block_programs
from bridge.xla import tiers
block_programs._FEWEST_OPERATIONS = 0
made = []
for name in ("_fast", "_well"):
    setattr(tiers, name, lambda *a, f=getattr(tiers, name): (made.append(1), f(*a))[1])
from torchfunc_jax import grad, jit, vmap
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(DEPTH)]
net = torch.nn.Sequential(torch.nn.Sequential(*layers), torch.nn.Linear(6, 3)).double()
x = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).reshape(4, 6)
f = jit(lambda x: vmap(grad(lambda row: net(row).exp().sum()))(x).square().sum())
f(x).backward()
print(json.dumps([len(made), f(x).item(), *[p.grad.sum().item() for p in net.parameters()]]))
"""


@pytest.mark.parametrize(
    ("depth", "jax_cache", "devices"), [(1, False, 1), (1, True, 1), (1, False, 4), (9, False, 1)]
)
def test_the_next_process_compiles_nothing(
    tmp_path: Path, depth: int, jax_cache: bool, devices: int
) -> None:
    """Nine equal layers are a loop, whose pieces are compiled each by itself."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {
        "XDG_CACHE_HOME": str(tmp_path),
        "JAX_NUM_CPU_DEVICES": str(devices),
    }
    if jax_cache:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    outs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _SCRIPT.replace("DEPTH", str(depth))],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        outs.append(json.loads(done.stdout))
    assert outs[0][0] >= 2 and outs[2][0] == 0
    np.testing.assert_allclose(outs[1][1:], outs[0][1:], rtol=1e-12)
    np.testing.assert_allclose(outs[2][1:], outs[0][1:], rtol=1e-12)


def test_threads_that_compile_the_same(compilations: list[str]) -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            for k in range(5):
                net = _network(seed + k)
                torch.testing.assert_close(
                    jit(lambda x, net=net: net(x))(X).detach(), net(X).detach()
                )
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_program_that_comes_again_is_compiled_well(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_WORTH", 1e9)
    monkeypatch.setattr(tiers, "_WORTH_OF_JITTED", 1e9)
    monkeypatch.setattr(
        process.compiler, "later", lambda work, idle=False: None if idle else work()
    )
    net, rows = _network(0), X.repeat(64, 1)
    f = jit(lambda x: torchfunc_jax.vmap(torchfunc_jax.jacrev(net))(x))
    want = torch.func.vmap(torch.func.jacrev(net))(rows)
    for _ in range(4):
        torch.testing.assert_close(f(rows), want)
    assert compilations == ["fast", "well"]
    small = jit(lambda x: x.sin() * 2)
    assert torch.equal(small(X), small(X)) and compilations == 2 * ["fast", "well"]
    assert vmap(lambda row: row * 2)(X).shape == X.shape


def test_equal_blocks_are_compiled_well_piece_by_piece_and_then_as_one_program(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_programs, "_FEWEST_OPERATIONS", 0)
    monkeypatch.setattr(tiers, "_WORTH_OF_JITTED", 1e9)
    monkeypatch.setattr(
        process.compiler, "later", lambda work, idle=False: None if idle else work()
    )
    used: list[list[bool]] = []
    use = BlockCalls._use
    monkeypatch.setattr(
        BlockCalls,
        "_use",
        lambda self, pieces: (used.append([p.fast for p in pieces]), use(self, pieces))[1],
    )
    levels: list[int] = []
    fast = tiers._fast
    monkeypatch.setattr(
        tiers,
        "_fast",
        lambda lowered, jaxpr, vectorized: (
            levels.append(vectorized),
            fast(lowered, jaxpr, vectorized),
        )[1],
    )
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(9)]
    net = nn.Sequential(nn.Sequential(*layers), nn.Linear(6, 3)).double()
    params = {name: p.detach() for name, p in net.named_parameters()}
    step, y = _step(net), torch.tensor([0, 1, 2, 1])
    want = torch.func.grad(
        lambda params: functional.cross_entropy(functional_call(net, params, (X,)), y)
    )(params)
    f = jit(step)
    counts = []
    for _ in range(5):
        torch.testing.assert_close(f(params, X, y), want)
        counts.append((levels.count(False), levels.count(True), compilations.count("well")))
    pieces = counts[0][0]
    assert counts[0] == (pieces, pieces, 0) and 3 <= pieces <= 6
    assert counts[1:] == [(pieces, pieces, 1)] * 4
    assert used == [[True] * pieces, [False] * pieces]


@pytest.mark.parametrize("rows, operations, level", [(4, 20, 0), (128, 20, 1), (128, 400, 0)])
def test_few_operations_on_large_arrays_are_vectorized_at_once(
    rows: int, operations: int, level: int, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[Any] = []
    compiled = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda self, given=None: (options.append(given), compiled(self, given))[1],
    )

    def steps(x: torch.Tensor) -> torch.Tensor:
        for k in range(operations):
            x = (x if k % 2 else x.roll(1)).sin()
        return x

    x = torch.rand(rows, 128)
    torch.testing.assert_close(jit(steps)(x), steps(x))
    assert compilations == ["fast"] and options[-1]["xla_backend_optimization_level"] == level
