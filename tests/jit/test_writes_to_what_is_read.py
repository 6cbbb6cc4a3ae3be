"""Writes to parts of what is read, compiled in every way that we have, against PyTorch, operator by
operator.

XLA for CPUs miscompiles some of them: a fused write in place reads what it has just written. The
named programs are those that a search found, reduced. The search goes on with random programs
(write_programs.py), many in one compilation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from write_programs import INDEX, Program, drawn

import torchfunc_jax
from bridge.lowering.common.in_place import overwrite

COUNT = int(os.environ.get("TORCHFUNC_JAX_WRITES", "60"))
TOGETHER = 10
Fn = Callable[..., Any]


def _run(programs: Sequence[Program]) -> Fn:
    return lambda xs, i: [p.run(x * 1, i) for p, x in zip(programs, xs, strict=True)]


def _run_on_arguments(programs: Sequence[Program]) -> Fn:
    return lambda xs, i: [p.run(x, i) for p, x in zip(programs, xs, strict=True)]


def _loss(programs: Sequence[Program]) -> Fn:
    return lambda xs, i: sum([(out * out).sum() for some in _run(programs)(xs, i) for out in some])


def _mapped(F: Any, fn: Fn) -> Fn:
    return lambda xs, i: F.vmap(fn, in_dims=(0, None))([_two(x) for x in xs], i)


def _two(x: Any) -> Any:
    return (
        torch.stack([x, x.flip(0)])
        if isinstance(x, torch.Tensor)
        else jnp.stack([x, jnp.flip(x, 0)])
    )


def _tangent(F: Any, fn: Fn) -> Fn:
    return lambda xs, i: F.jvp(lambda *xs: fn(xs, i), tuple(xs), tuple([x * 0.5 for x in xs]))[1]


def _in_jax(fn: Fn) -> Fn:
    """Under the user's own jax.jit, of jax.Arrays."""

    def call(xs: Sequence[torch.Tensor], i: torch.Tensor) -> Any:
        with jax.enable_x64(True):
            out = jax.jit(fn)([jnp.asarray(x.numpy()) for x in xs], jnp.asarray(i.numpy()))
        return jax.tree_util.tree_map(lambda a: torch.from_numpy(np.array(a)), out)

    return call


def _grad_of_jax(F: Any, fn: Fn) -> Fn:
    return F.grad(fn) if F is torch.func else jax.grad(torchfunc_jax.jit(fn))


def _as_is(fn: Fn) -> Fn:
    return fn


#: By name: whether it differentiates; the function of the programs, of the transforms F; what
#: compiles it.
WAYS: dict[str, tuple[bool, Callable[[Any, Sequence[Program]], Fn], Callable[[Fn], Fn]]] = {
    "jit": (False, lambda F, ps: _run(ps), torchfunc_jax.jit),
    "jit, of arguments": (False, lambda F, ps: _run_on_arguments(ps), torchfunc_jax.jit),
    "vmap": (False, lambda F, ps: _mapped(F, _run(ps)), _as_is),
    "jit of vmap": (False, lambda F, ps: _mapped(F, _run(ps)), torchfunc_jax.jit),
    "grad": (True, lambda F, ps: F.grad(_loss(ps)), _as_is),
    "jit of grad": (True, lambda F, ps: F.grad(_loss(ps)), torchfunc_jax.jit),
    "jit of vmap of grad": (True, lambda F, ps: _mapped(F, F.grad(_loss(ps))), torchfunc_jax.jit),
    "jit of jvp": (True, lambda F, ps: _tangent(F, _run(ps)), torchfunc_jax.jit),
    "jax.jit of jit": (False, lambda F, ps: _run(ps), lambda fn: _in_jax(torchfunc_jax.jit(fn))),
    "jax.jit of vmap": (False, lambda F, ps: _mapped(F, _run(ps)), _in_jax),
    "jax.jit of grad": (True, lambda F, ps: F.grad(_loss(ps)), _in_jax),
    "jax.jit of jax.grad": (True, lambda F, ps: _grad_of_jax(F, _loss(ps)), _in_jax),
}


def _results(
    F: Any, way: str, programs: Sequence[Program], factor: float = 1.0
) -> list[list[torch.Tensor]] | Exception:
    """The programs' results; factor: what their arguments are multiplied by."""
    _, make, compiled = WAYS[way]
    arguments = [
        x * factor if x.is_floating_point() else x for x in [p.argument() for p in programs]
    ]
    try:
        out = (compiled if F is torchfunc_jax else _as_is)(make(F, programs))(
            arguments, torch.tensor(INDEX)
        )
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        return error
    return [[t.detach() for t in pytree.tree_leaves(some)] for some in out]


def _close(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    try:
        for f, w in zip(found, want, strict=True):
            rtol = 1e-7 if w.dtype == torch.float64 else 1e-3
            torch.testing.assert_close(
                f,
                w,
                rtol=rtol,
                atol=rtol * max(1.0, float(w.abs().max())) if w.numel() else 0.0,
                equal_nan=True,
            )
    except AssertionError:
        return False
    return True


def compared(way: str, programs: Sequence[Program]) -> tuple[list[Program], list[Program]]:
    """Those of the programs that PyTorch runs in this way, and those of them for which we give
    something else by themselves.
    """
    want = {
        p: out[0]
        for p in programs
        if not isinstance(out := _results(torch.func, way, [p]), Exception)
    }
    tried = [*want]
    found = _results(torchfunc_jax, way, tried)
    if not isinstance(found, Exception):
        suspects = [p for p, some in zip(tried, found, strict=True) if not _close(some, want[p])]
    elif len(tried) > 1:
        suspects = tried
    else:
        return tried, tried
    if len(tried) > 1:
        return tried, [p for p in suspects if compared(way, [p])[1]]
    return tried, [p for p in suspects if not _rounds(way, p, want[p])]


def _rounds(way: str, program: Program, want: Sequence[torch.Tensor]) -> bool:
    """Whether rounding alone changes a program's results: those of the sine of 1e9 for example."""
    factors = (
        [1 + k * torch.finfo(program.dtype).eps for k in (2, -2, 8, -8, 64)]
        if program.dtype.is_floating_point
        else []
    )
    found = [_results(torch.func, way, [program], factor) for factor in factors]
    return any(isinstance(results, list) and not _close(results[0], want) for results in found)


def search(way: str, seeds: Sequence[int]) -> tuple[int, list[Program]]:
    """How many of the programs of these seeds PyTorch runs in this way, and those for which we give
    something else, reduced.
    """
    # rounding shows in float32's derivatives
    programs = [p for p in map(drawn, seeds) if p.dtype is torch.float64 or not WAYS[way][0]]
    tried, failing = compared(way, programs)
    return len(tried), [p.reduced(lambda q: bool(compared(way, [q])[1])) for p in failing]


@pytest.mark.parametrize("start", range(0, COUNT, TOGETHER))
def test_random_writes(start: int) -> None:
    way = list(WAYS)[start // TOGETHER % len(WAYS)]
    tried, failing = search(way, range(start, start + TOGETHER))
    assert tried, "PyTorch ran none of them"
    assert not failing, f"{way}:\n" + "\n".join([p.text for p in failing])


def _rows(*lines: str, size: int = 12, shape: str = "4, 3", returned: str = "y") -> Program:
    return Program((f"y = x.reshape({shape})", *lines), (returned,), size, torch.float32)


#: What the search found in jaxlib 0.10.2, 0.11.2 and 0.12.0.1, by kind.
PROGRAMS: dict[str, Program] = {
    "rows, one further": _rows("y[1:] = y[:-1].clone()"),
    "a history that is rolled": _rows(
        "y[1:] = y[:-1].clone()", "y[0] = 0", returned="y.reshape(-1)"
    ),
    "into a copy (token shift)": _rows(
        "y = y * 2", "z = y.clone()", "z[1:] = y[:-1]", returned="z.reshape(4, 3, 1)"
    ),
    "of the vector itself": _rows("z = y.clone()", "z[1:] = x[:9].reshape(3, 3)", returned="z"),
    "of a new last dimension": _rows("y[1:] = y[:-1].clone()", shape="12, 1"),
    "two further, multiplied by one": _rows(
        "y = y * 1.", "y[2:] = y[:-2].clone()", size=8192, shape="64, 8, 16"
    ),
    "a multiple": _rows("y[1:] = y[:-1] * 0.5"),
    "a function": _rows("y[1:] = y[:-1].sin()"),
    "added": _rows("y[1:] += y[:-1].clone()"),
    "multiplied": _rows("y[1:] *= y[:-1].clone()"),
    "a sum of two reads": _rows("y[1:] = y[:-1] + y[1:]"),
    "a choice of two reads": _rows(
        "y[2:] = torch.where(y[:-2] > 1, y[:-2], y[:-2].flip(1))", size=960, shape="10, 96"
    ),
    "rows in reverse": _rows("y[1:] = y[1:].flip(0)"),
    "transposed": _rows("y[1:] = y[:3].T.clone()"),
    "concatenated": _rows("y[1:] = torch.cat([y[3:], y[:2]])"),
    "padded": _rows("y[1:] = torch.nn.functional.pad(y[:2], (0, 0, 1, 0))"),
    "rolled, reshaped": _rows(
        "y[1:].copy_(y.reshape(2, 3, 1, 2).roll(1, 1).reshape(-1)[:8].reshape(2, 1, 4))",
        shape="3, 1, 4",
    ),
    "slice_scatter": _rows("y = y.slice_scatter(y[:-1], 0, 1)"),
    "into a copy of a tensor that lies as its operand": _rows(
        "y = y.T.flip(1)", "z = y.flatten()", "z[1:] = z[:-1].clone()"
    ),
    "into a copy with the gaps of its operand": _rows(
        "y = y[:, 1:].select_scatter(y[:, 0] * 2, 1, 0)",
        "y.reshape(-1).add_(1)",
        size=96,
        shape="2, 2, 24",
    ),
    "into a diagonal's copy with gaps": _rows(
        "y = y[:, 1:].diagonal_scatter(y[:1, 0].T * 2)",
        "y.reshape(-1).add_(1)",
        size=96,
        shape="2, 2, 24",
    ),
    "read by two names": _rows(
        "y = y * 2",
        "z = y[:18]",
        "z[1:] = z[:-1].clone().roll(1, 0)",
        "z.sub_(y.flip(0)[:18].clone())",
        size=24,
        shape="24",
        returned="z.reshape(-1)",
    ),
    "narrow at an index": _rows("y.narrow(0, i, 3).copy_(y.narrow(0, i - 1, 3).clone())"),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_kind_of_write(way: str) -> None:
    tried, failing = compared(way, [*PROGRAMS.values()])
    assert len(tried) > len(PROGRAMS) / 2, "PyTorch runs only a few of them"
    assert [name for name, p in PROGRAMS.items() if p in failing] == []


def test_a_write_exported_for_any_size() -> None:
    (n,) = jax.export.symbolic_shape("n")
    shifted = jax.jit(lambda a: overwrite(y := a.reshape(-1, 3), y[:-1], (1, 0)))
    exported = jax.export.export(shifted)(jax.ShapeDtypeStruct((3 * n,), np.float32))
    np.testing.assert_array_equal(
        exported.call(np.arange(9, dtype=np.float32)), [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    )
