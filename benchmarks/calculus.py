"""Times hvp, jacobian_diagonal, laplacian and jet beside the same by torch.func's own transforms.

    python benchmarks/calculus.py                 a table
    python benchmarks/calculus.py --only laplacian --seconds 1
    python benchmarks/calculus.py --json          the results as JSON on stdout

Everything is computed in float64 on a network with three hidden layers of 64, and compared to 1e-8
before it is timed. The systems take turns, and the median time of a call counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torchfunc_jax
from torchfunc_jax._machine import machine

Call = Callable[[], Any]
WIDTH = 64


def network(inputs: int, outputs: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of one point; with one output, it returns a number."""
    torch.manual_seed(0)
    sizes = [inputs, WIDTH, WIDTH, WIDTH, outputs]
    layers = [
        (torch.randn(n, m, dtype=torch.float64) / math.sqrt(m), torch.randn(n, dtype=torch.float64))
        for m, n in itertools.pairwise(sizes)
    ]

    def f(x: torch.Tensor) -> torch.Tensor:
        for w, b in layers[:-1]:
            x = torch.tanh(w @ x + b)
        w, b = layers[-1]
        out = w @ x + b
        return out[0] if outputs == 1 else out

    return f


def points(count: int, size: int) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def hvp() -> tuple[Any, ...]:
    """The product of the Hessian with a vector, at 256 points of 32 dimensions; torch.func: jvp of
    grad.
    """
    f, x, v = network(32, 1), points(256, 32), points(256, 32).cos()
    ours = torchfunc_jax.vmap(lambda x, v: torchfunc_jax.hvp(f, (x,), (v,))[1][0])
    theirs = torch.func.vmap(lambda x, v: torch.func.jvp(torch.func.grad(f), (x,), (v,))[1])
    return ours, theirs, (x, v)


def jacobian_diagonal() -> tuple[Any, ...]:
    """The diagonal of the Jacobian of a map of 32 dimensions, at 64 points; torch.func: the
    diagonal of jacfwd.
    """
    f, x = network(32, 32), points(64, 32)
    return (
        torchfunc_jax.vmap(torchfunc_jax.jacobian_diagonal(f)),
        torch.func.vmap(lambda x: torch.func.jacfwd(f)(x).diagonal()),
        (x,),
    )


def laplacian() -> tuple[Any, ...]:
    """The Laplacian in 12 dimensions at 64 points; torch.func: the trace of hessian."""
    f, x = network(12, 1), points(64, 12)
    return (
        torchfunc_jax.vmap(torchfunc_jax.laplacian(f)),
        torch.func.vmap(lambda x: torch.func.hessian(f)(x).trace()),
        (x,),
    )


def jet() -> tuple[Any, ...]:
    """The first four derivatives along a line, at 256 points of 8 dimensions; torch.func: four
    nested jvps.
    """
    f, x, v = network(8, 1), points(256, 8), points(256, 8).cos()

    def ours(x: torch.Tensor, v: torch.Tensor) -> Any:
        zero = torch.zeros_like(v)
        return torchfunc_jax.jet(f, (x,), ((v, zero, zero, zero),))[1]

    def theirs(x: torch.Tensor, v: torch.Tensor) -> Any:
        def step(g: Any) -> Any:
            return lambda x: torch.func.jvp(g, (x,), (v,))[1]

        found, g = [], f
        for _ in range(4):
            g = step(g)
            found.append(g(x))
        return found

    return torchfunc_jax.vmap(ours), torch.func.vmap(theirs), (x, v)


PROGRAMS: dict[str, Callable[[], tuple[Any, ...]]] = {
    f.__name__: f for f in (hvp, jacobian_diagonal, laplacian, jet)
}


def measure(name: str, seconds: float) -> dict[str, dict[str, float]]:
    """System -> seconds of the first call, and median milliseconds of the later ones."""
    ours, theirs, arguments = PROGRAMS[name]()
    systems = {
        "torch.func": theirs,
        "torchfunc_jax": ours,
        "torchfunc_jax.jit": torchfunc_jax.jit(ours),
    }
    results: dict[str, dict[str, float]] = {}
    expected = None
    for system, function in systems.items():
        start = time.perf_counter()
        found = function(*arguments)
        results[system] = {"first_s": time.perf_counter() - start}
        expected = found if expected is None else expected
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-8, atol=1e-8, msg=lambda text: f"{name}: {text}"
            )
    times: dict[str, list[float]] = {system: [] for system in systems}
    end = time.perf_counter() + seconds * len(systems)
    while time.perf_counter() < end or len(times["torch.func"]) < 5:
        for system, function in systems.items():
            start = time.perf_counter()
            function(*arguments)
            times[system].append(time.perf_counter() - start)
    for system, found in times.items():
        results[system]["ms"] = 1e3 * statistics.median(found)
    return results


def table(results: dict[str, Any]) -> str:
    rows = [
        "| | torch.func | torchfunc_jax | torchfunc_jax.jit | torch.func, times jit |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, row in results["programs"].items():
        ms = [row[system]["ms"] for system in ("torch.func", "torchfunc_jax", "torchfunc_jax.jit")]
        rows.append(
            f"| `{name}` | " + " | ".join(f"{t:.2f} ms" for t in ms) + f" | {ms[0] / ms[2]:.1f}x |"
        )
    where = results["machine"]
    rows += [
        "",
        (
            f"{where['cpu']}, {where['cores']} cores; torch {where['torch']}, JAX {where['jax']}, "
            f"Python {where['python']}."
        ),
    ]
    rows += [
        (
            f"PyTorch computed with {results['threads']} thread(s); the machine's load average was "
            f"{results['load']:.1f} at the start."
        )
    ]
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PROGRAMS), help="programs, by their names")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each system of a program")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(argv)
    names = options.only.split(",")
    if unknown := set(names) - set(PROGRAMS):
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(PROGRAMS)}"
        )
    results: dict[str, Any] = {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "programs": {},
    }
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results["programs"][name] = measure(name, options.seconds)
    print(json.dumps(results) if options.json else table(results))
    return results


if __name__ == "__main__":
    main()
