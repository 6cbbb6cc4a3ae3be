"""Times un-jitted transforms by the number of operators in the function, beside torch.func's: what
a transform costs per operator.

    python benchmarks/overhead.py                    vmap, grad, vmap(grad), jvp and backward of 10,
                                                     100 and 1,000 operators
    python benchmarks/overhead.py --page             and put the table into docs/overhead.md
    python benchmarks/overhead.py --json             the results as JSON on stdout
    python benchmarks/overhead.py --operators 10,50 --only grad

The operators are element-wise, on 16 numbers, so that next to nothing is spent on computing. A
Python float in them is another one at each call, as a learning rate or a time is. Results are
compared with torch.func's, and are written to benchmarks/results/, a file per machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from readme import describe, keep
from run import milliseconds, parser_of, say, slug

import torchfunc_jax
from torchfunc_jax._machine import machine

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "overhead.md"
SYSTEMS = {
    "plain": "plain PyTorch",
    "torch.func": "torch.func",
    "eager": "torchfunc_jax",
    "jit": "torchfunc_jax.jit",
}


def chain(count: int) -> Callable[[torch.Tensor, float], torch.Tensor]:
    """A function of ``count`` operators, and of a number."""
    cycle = (
        lambda x, rate: x.sin(),
        lambda x, rate: x * rate,
        lambda x, rate: x + 0.1,
        lambda x, rate: x.tanh(),
    )

    def function(x: torch.Tensor, rate: float) -> torch.Tensor:
        for i in range(count - 1):
            x = cycle[i % 4](x, rate)
        return x.sum()

    return function


PROGRAMS: dict[str, Callable[[Any, Callable[..., Any]], Callable[..., Any]]] = {
    "vmap": lambda api, f: api.vmap(f, (0, None)),
    "grad": lambda api, f: api.grad(f),
    "vmap(grad)": lambda api, f: api.vmap(api.grad(f), (0, None)),
    "jvp": lambda api, f: (
        lambda x, rate: api.jvp(lambda x: f(x, rate), (x,), (torch.ones_like(x),))
    ),
    # and torch's own backward() through it
    "backward of vmap": lambda api, f: api.vmap(f, (0, None)),
}
BACKWARD = "backward of vmap"


def program(
    name: str, api: Any, function: Callable[..., Any], compiled: Callable[..., Any] = lambda f: f
) -> Callable[..., Any]:
    """A transform by its name, of torch.func or torchfunc_jax, of the function; what is compiled
    leaves torch's own backward outside.
    """
    transformed = compiled(PROGRAMS[name](api, function))
    return (
        (lambda x, rate: torch.autograd.grad(transformed(x, rate).sum(), x)[0])
        if name == BACKWARD
        else transformed
    )


def inputs(name: str) -> torch.Tensor:
    x = torch.linspace(0, 1, 16)
    return x.reshape(4, 4).requires_grad_(name == BACKWARD) if "vmap" in name else x


def measure(name: str, count: int, seconds: float) -> dict[str, dict[str, float]]:
    """System -> median milliseconds and microseconds per operator, the systems taking turns."""
    function, x = chain(count), inputs(name)
    calls = {
        "plain": function,
        "torch.func": program(name, torch.func, function),
        "eager": program(name, torchfunc_jax, function),
        "jit": program(name, torchfunc_jax, function, torchfunc_jax.jit),
    }
    firsts = {}
    for system, call in calls.items():
        start = time.perf_counter()
        result = call(x, 1.01)
        firsts[system] = time.perf_counter() - start
        if system != "plain":
            truth = calls["torch.func"](x, 1.01)
            words = f"{system}, {name} of {count} operators: "
            torch.testing.assert_close(
                result, truth, rtol=1e-3, atol=1e-5, msg=lambda m, words=words: words + m
            )
        call(x, 1.02)
    times: dict[str, list[float]] = {system: [] for system in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(times["plain"]) < 3:
        rate = 1.0 + 1e-4 * (len(times["plain"]) % 100)
        for system, call in calls.items():
            start = time.perf_counter()
            call(x, rate)
            times[system].append(time.perf_counter() - start)
    medians = {system: statistics.median(values) for system, values in times.items()}
    return {
        system: {
            "ms": 1e3 * middle,
            "us_per_operator": 1e6 * middle / count,
            "first_s": firsts[system],
            "calls": len(times[system]),
        }
        for system, middle in medians.items()
    }


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "| transform | operators | "
        + " | ".join(SYSTEMS.values())
        + " | un-jitted, times torch.func | first call |",
        "| --- | ---: |" + " ---: |" * (len(SYSTEMS) + 2),
    ]
    for row in results["rows"]:
        one = row["systems"]
        cells = [f"{milliseconds(one[s]['ms'])} ms" for s in SYSTEMS]
        ratio, first = one["eager"]["ms"] / one["torch.func"]["ms"], one["eager"]["first_s"]
        lines.append(
            f"| `{row['transform']}` | {row['operators']:,} | "
            + " | ".join(cells)
            + f" | {ratio:.2f}x | {first:.2f} s |"
        )
    notes = (
        f"{describe(results['machine'])}. Median time of a call; plain PyTorch calls the function "
        "without any transform."
    )
    load = (
        f"The machine's load average was {results['load']} at the start. "
        if results["load"] > 1
        else ""
    )
    return "\n".join([*lines, "", notes, f"{load}Every number is in `{results['file']}`."])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = parser_of(__doc__, PROGRAMS, 1.0, "docs/overhead.md")
    parser.add_argument("--operators", default="10,100,1000", help="numbers of operators")
    options = parser.parse_args(argv)
    names, counts = options.only.split(","), [int(n) for n in options.operators.split(",")]
    if unknown := set(names) - set(PROGRAMS):
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(PROGRAMS)}"
        )
    where = machine()
    path = options.output / f"overhead-{slug(where)}.json"
    shown = (
        path.relative_to(HERE.parent).as_posix() if path.is_relative_to(HERE.parent) else path.name
    )
    results: dict[str, Any] = {
        "machine": where,
        "load": round(os.getloadavg()[0], 1),
        "file": shown,
        "rows": [],
    }
    for name in names:
        for count in counts:
            say(f"{name} of {count} operators ...")
            row = measure(name, count, options.seconds)
            results["rows"].append({"transform": name, "operators": count, "systems": row})
            say("  " + "  ".join(f"{s} {milliseconds(one['ms'])} ms" for s, one in row.items()))
    return keep("overhead", results, table(results), path, options, PAGE)


if __name__ == "__main__":
    main()
