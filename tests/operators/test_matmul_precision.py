"""Products of float32 are as exact as torch.get_float32_matmul_precision() says: on a GPU or TPU
they are not unless XLA is told so.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import opinfo
import pytest
import torch
import torch.nn.functional as F
from jax import lax

import bridge

X = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0))
CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mm": lambda x: x[0, 0] @ x[0, 1],
    "bmm": lambda x: x[0] @ x[0],
    "linear": lambda x: F.linear(x, x[0, 0], x[0, 0, 0]),
    "conv2d": lambda x: F.conv2d(x, x[:, :, :2, :2]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, x.mT.reshape(2, 1, 4, 4)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention in words": lambda x: F.scaled_dot_product_attention(
        x, x, x, attn_mask=torch.zeros(4, 4)
    ),
    "gru": lambda x: torch.nn.GRU(4, 3)(x[0])[0],
    "einsum": lambda x: torch.einsum("abij,abjk->ik", x, x),
    "outer products": lambda x: torch.addmm(x[0, 0], x[0, 0], x[0, 1], alpha=2.0),
}
#: what torch.set_float32_matmul_precision takes, and what lax is told
LEVELS = {
    "highest": lax.Precision.HIGHEST,
    "high": lax.Precision.HIGH,
    "medium": lax.Precision.DEFAULT,
}


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def told(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """(the primitive, its precision) of every float32 product of a program and of the programs in
    it.
    """
    for equation in jaxpr.eqns:
        if "precision" in equation.params and equation.outvars[0].aval.dtype in (
            "float32",
            "complex64",
        ):
            found = equation.params["precision"]
            yield (
                equation.primitive,
                found[0] if isinstance(found, tuple) and len(set(found)) == 1 else found,
            )
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from told(getattr(inner, "jaxpr", inner))


def programs(function: Callable[..., Any], *args: jax.Array) -> Iterator[Any]:
    """A function of torch's forward, and its vjp."""
    run = lambda *xs: bridge.call(_Module(function), {}, {}, xs, rng=jax.random.key(0))[0]
    yield jax.make_jaxpr(run)(*args).jaxpr

    def pulled(*xs: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *xs: run(*xs), *xs)
        return pull(out)

    yield jax.make_jaxpr(pulled)(*args).jaxpr


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_products_follow_torchs_setting(name: str, level: str) -> None:
    """Forward and backward."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(level)
    try:
        found = [pair for jaxpr in programs(CASES[name], bridge.to_jax(X)) for pair in told(jaxpr)]
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(found) >= 3  # one forward; it again and one or two backward
    assert {precision for _, precision in found} == {LEVELS[level]}, found


@pytest.mark.slow
def test_products_of_every_operator_are_exact_unless_asked_otherwise() -> None:
    """PyTorch's database, three samples each."""

    def ring(*_: Any) -> None:
        raise opinfo.TookTooLong

    before, seen = signal.signal(signal.SIGALRM, ring), 0
    try:
        for key, op in opinfo.operators().items():
            if torch.float32 not in op.supported_dtypes("cpu"):
                continue
            samples = opinfo.draw(op, torch.float32, 0)
            for k in opinfo.chosen(samples, 3):
                signal.setitimer(signal.ITIMER_REAL, 30)
                # no tensors, or no static shape: other tests ask for those
                with contextlib.suppress(Exception):
                    problem = opinfo.Problem(op, samples[k], samples[k])
                    active = problem.primals(problem.values)
                    for jaxpr in programs(problem.smooth, *map(bridge.to_jax, active)):
                        for primitive, precision in told(jaxpr):
                            seen += 1
                            if precision is not lax.Precision.HIGHEST:
                                pytest.fail(f"{key}, sample {k}: {primitive} with {precision}")
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen > 1000, seen
