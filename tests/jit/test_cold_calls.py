"""cold="torch": PyTorch runs calls whose programs are not compiled yet, and XLA compiles them
meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bridge.process import process
from bridge.record import programs
from torchfunc_jax import (
    cold,
    functional_call,
    grad,
    hessian,
    jacrev,
    jvp,
    linearize,
    patch,
    vjp,
    vmap,
)
from torchfunc_jax.testing import parity

POINT, BATCH = torch.linspace(-1, 1, 4), torch.linspace(-2, 2, 12).reshape(3, 4)
DROPPED = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))


def _cubed(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() ** 3).sum() + x[0] * x[1]


def _random(randomness: str) -> Callable[[], Any]:
    params = {name: p.detach() for name, p in DROPPED.named_parameters()}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(DROPPED, params, (x,)).square().sum()

    return lambda: vmap(grad(loss), (None, 0), randomness=randomness)(params, BATCH)


def _backward() -> Any:
    x = POINT.clone().requires_grad_()
    vmap(_cubed)(torch.stack([x, x * 2])).sum().backward()
    return x.grad


def _written() -> Any:
    kept = torch.zeros(4)
    out = vmap(lambda x: kept.add_(1) * x, randomness="error")(BATCH)
    return out, kept


CASES: dict[str, Callable[[], Any]] = {
    "vmap of grad": lambda: vmap(grad(_cubed))(BATCH),
    "hessian": lambda: hessian(_cubed)(POINT),
    "jacrev, in chunks": lambda: jacrev(lambda x: x.cumprod(0), chunk_size=3)(POINT),
    "jvp": lambda: jvp(_cubed, (POINT,), (POINT,)),
    "vjp": lambda: vjp(lambda x: x.cumprod(0), POINT)[1](POINT),
    "linearize": lambda: linearize(_cubed, POINT)[1](POINT),
    "numbers that differ": _random("different"),
    "the same numbers": _random("same"),
    "backward": _backward,
    "a write": _written,
}


def _compiled() -> None:
    """Wait until the thread has compiled what it was given."""
    end = time.monotonic() + 60
    while -math.inf in process.compiling.values() and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(math.isinf, process.compiling.values()))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are compiled from the first run on."""
    monkeypatch.setattr(programs, "PATIENCE", 0.0)
    monkeypatch.setattr(process, "compiling", {})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("impatient")
def test_first_calls_in_torch_are_the_later_calls(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CASES[case]
    torch.manual_seed(3)
    want = run()
    monkeypatch.setattr(process, "programs", type(process.programs)())
    monkeypatch.setenv("TORCHFUNC_JAX_CACHE", "0")
    for again in range(3):
        torch.manual_seed(3)
        with cold("torch"):
            found = run()
        torch.testing.assert_close(found, want)
        if again:
            assert process.programs.records
        _compiled()


@pytest.mark.usefixtures("impatient")
def test_numbers_shapes_and_objects_that_change() -> None:
    with cold("torch"):
        for k in range(12):
            x, scale = torch.arange(2.0 + k % 3), [1.0, 0.5 + k]
            found = vmap(grad(lambda x, s=scale: (x**2 * s[1]).sum()))(x)
            torch.testing.assert_close(found, 2 * x * scale[1])
    _compiled()


def test_a_thread_compiles_what_has_run_for_long_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        torch.testing.assert_close(grad(lambda x: (x**5).sum() * 3)(POINT), 15 * POINT**4)

    monkeypatch.setattr(process, "programs", type(process.programs)())
    monkeypatch.setattr(process, "compiling", {})
    monkeypatch.setenv("TORCHFUNC_JAX_CACHE", "0")
    with cold("torch"):
        run()  # in which PyTorch imports what it needs
        assert list(process.compiling.values()) == [0.0]
        run()
        ((key, seconds),) = process.compiling.items()
        assert 0 < seconds < programs.PATIENCE and not process.programs.records
        process.compiling[key] = programs.PATIENCE
        run()
        _compiled()
        assert process.programs.records
        run()


def test_it_is_a_choice_of_the_block_and_of_the_patch() -> None:
    with pytest.raises(ValueError, match='expected "jax" or "torch"'), cold("numpy"):
        pass
    with pytest.raises(ValueError, match='expected "jax" or "torch"'):
        patch(cold="numpy")
    before = list(process.cold)
    with patch(cold="torch"), patch(), cold("jax"):
        assert process.cold[-1] == "torch"
    assert process.cold == before


def test_an_error_is_pytorchs_at_the_users_line() -> None:
    with cold("torch"), pytest.raises(RuntimeError, match="shape"):
        vmap(lambda x: x.reshape(5))(BATCH)
    with pytest.raises(ValueError, match="compared with itself"), cold("torch"):
        parity(torch.sin, POINT)
