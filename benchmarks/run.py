"""Times the workloads under torch.func, by hand in JAX, and under torchfunc_jax, in one process,
taking turns.

    python benchmarks/run.py                                   every workload, on JAX's default
                                                               device
    python benchmarks/run.py --only tiny_call,hessian_mlp      some of them
    python benchmarks/run.py --systems torch.func,compile,native,jit   with torch.compile
    python benchmarks/run.py --readme                          and put the table into README.md
    python benchmarks/run.py --json                            the results as JSON on stdout

The table shows the median time of a call, and in brackets how many times that of the hand-written
JAX it is; then the time of the first call, with tracing and compiling. Every system's result is
compared with torch.func's; a wrong one is not timed. Results are written to benchmarks/results/, a
file per machine, with versions and every median.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from readme import describe, update
from workloads import WORKLOADS, Workload

import torchfunc_jax
from torchfunc_jax._machine import machine

HERE = Path(__file__).resolve().parent
TITLES = {
    "torch.func": "torch.func",
    "compile": "torch.compile(torch.func)",
    "native": "JAX by hand, jit",
    "jit": "torchfunc_jax.jit",
    "eager": "torchfunc_jax, eager",
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_calls(
    work: Workload, systems: list[str], device: torch.device
) -> dict[str, Callable[[], Any]]:
    """System -> a call of the workload without arguments, that returns when the result is there."""
    inputs = jax.tree.map(lambda t: t.to(device), work.inputs)
    arrays = jax.tree.map(lambda t: jax.device_put(t.numpy()), work.inputs)

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        result = fn(*args)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return result

    build: dict[str, Callable[[], Callable[[], Any]]] = {
        "torch.func": lambda: functools.partial(call, work.program(torch.func), *inputs),
        "compile": lambda: functools.partial(
            call, torch.compile(work.program(torch.func)), *inputs
        ),
        "native": lambda: functools.partial(
            lambda f, *a: jax.block_until_ready(f(*a)), jax.jit(work.native), *arrays
        ),
        "jit": lambda: functools.partial(
            call, torchfunc_jax.jit(work.program(torchfunc_jax)), *inputs
        ),
        "eager": lambda: functools.partial(call, work.program(torchfunc_jax), *inputs),
    }
    return {name: build[name]() for name in systems}


def as_numpy(tree: Any) -> list[np.ndarray]:
    return [
        x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
        for x in jax.tree.leaves(tree)
    ]


def distance(tree: Any, truth: Any) -> float:
    """The largest norm of a leaf's difference from the truth, as a part of that leaf's norm.

    Single elements may differ by more: rounding decides which of two nearly equal numbers a maximum
    chooses.
    """
    pairs = zip(as_numpy(tree), as_numpy(truth), strict=True)
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6)) for a, b in pairs)


def take_turns(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """The times of many calls of each, in a changing order, for so many seconds each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    end = time.perf_counter() + seconds * len(calls)
    order, shuffle = list(calls), random.Random(0).shuffle
    while time.perf_counter() < end and len(next(iter(times.values()))) < 1000:
        # torch's threads spin for a while after a call: whoever comes next must not always be the
        # same
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
    return times


def measure(
    work: Workload, systems: list[str], seconds: float, device: torch.device
) -> dict[str, dict[str, float]]:
    """System -> first_s, ms (median), ms_quartiles, calls, difference."""
    calls, out, truth = make_calls(work, systems, device), {}, None
    for name, call in list(calls.items()):
        torch.compiler.reset()
        start = time.perf_counter()
        try:
            result = call()
        except Exception as error:  # one system without a result must not cost the others theirs
            say(f"  {name}: {type(error).__name__}: {str(error)[:300]}")
            del calls[name]
            continue
        out[name] = {"first_s": time.perf_counter() - start}
        truth = result if truth is None else truth
        out[name]["difference"] = distance(result, truth)
        if out[name]["difference"] > (1e-2 if device.type == "cuda" else 1e-3):
            say(f"  {name}: wrong by {out[name]['difference']:.1e}")
            del calls[name], out[name]
    times = take_turns(calls, seconds)
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        out[name] |= {
            "ms": 1e3 * middle,
            "ms_quartiles": [1e3 * low, 1e3 * high],
            "calls": len(values),
        }
    return out


def milliseconds(ms: float) -> str:
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def cells(result: dict[str, dict[str, float]], systems: list[str]) -> list[str]:
    """A row of the table: the times with their ratio to the hand-written JAX."""
    base = result.get("native", {}).get("ms")
    out = []
    for name in systems:
        one = result.get(name)
        if one is None:
            out.append("-")
        else:
            ratio = f" ({one['ms'] / base:.2f}x)" if base and name != "native" else ""
            out.append(f"{milliseconds(one['ms'])} ms{ratio}")
    return out


def show(results: dict[str, Any]) -> None:
    """The table on stdout: rich's where rich is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(markdown_table(results))
        return
    systems = results["systems"]
    table = Table(
        title="Median time of a call (times the hand-written JAX); first call",
        caption=describe(results["machine"]),
    )
    table.add_column("workload")
    for name in systems:
        table.add_column(TITLES[name], justify="right")
    for name, row in results["workloads"].items():
        firsts = [f"{row[s]['first_s']:.2f} s" if s in row else "-" for s in systems]
        table.add_row(
            name,
            *(
                f"{cell}\n[dim]{first}[/dim]"
                for cell, first in zip(cells(row, systems), firsts, strict=True)
            ),
        )
    Console().print(table)


def markdown_table(results: dict[str, Any]) -> str:
    systems = results["systems"]
    lines = [
        "| workload | " + " | ".join(TITLES[s] for s in systems) + " |",
        "| --- |" + " ---: |" * len(systems),
        *(
            f"| {WORKLOADS[name]().what} | " + " | ".join(cells(row, systems)) + " |"
            for name, row in results["workloads"].items()
        ),
        "",
        (
            f"{describe(results['machine'])}. The table shows the median time of a call, and in "
            "brackets its multiple of the hand-written JAX's."
        ),
        f"`benchmarks/run.py` measured it; first calls and quartiles are in `{results['file']}`.",
    ]
    return "\n".join(lines)


def slug(where: dict[str, Any]) -> str:
    name = where["cpu"] if where["device"] == "cpu" else where["device"]
    return re.sub(r"[^a-z0-9]+", "-", f"{name} {where['cores']} cores".lower()).strip("-")


def parser_of(
    doc: str | None, only: Collection[str], seconds: float, page: str
) -> argparse.ArgumentParser:
    """The options that benchmarks share; page: where --page puts the table."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(only), help=f"of {','.join(only)}")
    parser.add_argument("--seconds", type=float, default=seconds, help="per row and system")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on stdout")
    parser.add_argument(
        "--page", "--readme", action="store_true", help=f"put the table into {page}"
    )
    parser.add_argument(
        "--output", type=Path, default=HERE / "results", help="folder of the results"
    )
    return parser


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = parser_of(__doc__, WORKLOADS, 4.0, "README.md, or a GPU's into docs/benchmarks.md")
    parser.add_argument(
        "--systems", default="torch.func,native,jit,eager", help=f"of {','.join(TITLES)}"
    )
    options = parser.parse_args(argv)
    systems, names = options.systems.split(","), options.only.split(",")
    for given, known in ((systems, TITLES), (names, WORKLOADS)):
        if unknown := set(given) - set(known):
            parser.error(
                f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(known)}"
            )
    # torch.func without a batching rule: that is what is measured
    warnings.filterwarnings("ignore", "There is a performance drop")
    device = torch.device(
        "cuda" if jax.devices()[0].platform == "gpu" and torch.cuda.is_available() else "cpu"
    )
    # JAX's own default is TF32, and that of PyTorch's convolutions: all compute in the same
    # precision
    if device.type == "cuda":
        jax.config.update("jax_default_matmul_precision", torch.get_float32_matmul_precision())
        torch.backends.cudnn.allow_tf32 = torch.get_float32_matmul_precision() != "highest"
    where = machine()
    path = options.output / f"{slug(where)}.json"
    shown = (
        path.relative_to(HERE.parent).as_posix() if path.is_relative_to(HERE.parent) else path.name
    )
    results: dict[str, Any] = {"machine": where, "file": shown, "systems": systems, "workloads": {}}
    for name in names:
        torch.manual_seed(0)
        say(f"{name} ...")
        results["workloads"][name] = row = measure(
            WORKLOADS[name](), systems, options.seconds, device
        )
        say(
            "  "
            + "  ".join(f"{s} {cell}" for s, cell in zip(systems, cells(row, systems), strict=True))
        )
    options.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    if options.page:
        update(
            "benchmarks" if where["device"] == "cpu" else "benchmarks-gpu", markdown_table(results)
        )
    if options.json:
        json.dump(results, sys.stdout)
    else:
        show(results)
    return results


if __name__ == "__main__":
    main()
