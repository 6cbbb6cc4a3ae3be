"""Times calls that compute next to nothing, by the number of tensors that go in and out: what the
crossing to JAX and back costs.

    python benchmarks/crossings.py                   1, 10, 100 and 1,000 tensors
    python benchmarks/crossings.py --page            and put the table into docs/performance.md
    python benchmarks/crossings.py --json            the results as JSON on stdout
    python benchmarks/crossings.py --tensors 1,10 --only call

Each tensor has 16 elements and is multiplied by two. The tensors of ``call`` and ``backward`` are
the same at each call, as parameters are; those of ``new tensors`` are not. ``backward`` is a sum
with its gradients, in torch by ``.backward()``. Results are compared with PyTorch's, and are
written to benchmarks/results/, a file per machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from readme import describe, keep
from run import milliseconds, parser_of, say, slug

import torchfunc_jax
from torchfunc_jax._machine import machine

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
SYSTEMS = {
    "torch": "PyTorch",
    "eager": "torchfunc_jax",
    "jit": "torchfunc_jax.jit",
    "native": "hand-written JAX",
}
Tensors = Sequence[Any]


def _doubled(tensors: Tensors) -> list[Any]:
    return [t * 2 for t in tensors]


def _sum(tensors: Tensors) -> Any:
    return sum(t.sum() for t in tensors)


def _backward(loss: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], list[torch.Tensor]]:
    def run(tensors: Tensors) -> list[torch.Tensor]:
        for t in tensors:
            t.grad = None
        loss(tensors).backward()  # type: ignore[no-untyped-call]
        return [t.grad for t in tensors]

    return run


def _in_vmap(function: Callable[[Tensors], Any]) -> Callable[[Tensors], Any]:
    """The function as an un-jitted call of a transform: it maps over no argument that it uses."""
    return lambda tensors: torchfunc_jax.vmap(
        lambda _, tensors: function(tensors), (0, None), None
    )(_LANE, tensors)


_LANE = torch.zeros(1)
_COMPUTED: dict[str, Callable[[Callable[..., Any]], Callable[[Tensors], Any]]] = {
    "torch": lambda f: f,
    "eager": _in_vmap,
    "jit": torchfunc_jax.jit,
}


def _call(system: str, kind: str, count: int) -> Callable[[], Any]:
    """A call of one system without arguments, which returns when its results are there."""
    made = [torch.arange(16.0) + k for k in range(count)]
    function = _sum if kind == "backward" else _doubled
    if system == "native":
        arrays = [jnp.asarray(t.numpy()) for t in made]
        run = jax.jit(jax.grad(_sum) if kind == "backward" else _doubled)
        if kind == "new tensors":
            return lambda: jax.block_until_ready(run([a + 0 for a in arrays]))
        return lambda: jax.block_until_ready(run(arrays))
    computed = _COMPUTED[system](function)
    if kind == "backward":
        tensors, step = [t.requires_grad_() for t in made], _backward(computed)
        return lambda: step(tensors)
    return (
        (lambda: computed([t.clone() for t in made]))
        if kind == "new tensors"
        else (lambda: computed(made))
    )


KINDS = ("call", "new tensors", "backward")


def measure(kind: str, count: int, seconds: float) -> dict[str, float]:
    """System -> median milliseconds of a call, the systems taking turns; what makes the new tensors
    is in it.
    """
    calls = {system: _call(system, kind, count) for system in SYSTEMS}
    truth = calls["torch"]()
    for call in calls.values():
        for found, wanted in zip(call(), truth, strict=True):
            torch.testing.assert_close(torch.as_tensor(found.tolist()), wanted)
    times: dict[str, list[float]] = {system: [] for system in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(times["torch"]) < 3:
        for system, call in calls.items():
            start = time.perf_counter()
            call()
            times[system].append(time.perf_counter() - start)
    return {
        system: 1e3 * statistics.median(values[len(values) // 2 :])
        for system, values in times.items()
    }


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        f"| | tensors | {' | '.join(SYSTEMS.values())} |",
        "| --- | ---: |" + " ---: |" * len(SYSTEMS),
    ]
    for row in results["rows"]:
        cells = " | ".join(f"{milliseconds(row['ms'][system])} ms" for system in SYSTEMS)
        lines.append(f"| {row['kind']} | {row['tensors']:,} | {cells} |")
    return "\n".join(
        [
            *lines,
            "",
            (
                f"{describe(results['machine'])}. Median time of a call. Every number is in "
                f"`{results['file']}`."
            ),
        ]
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = parser_of(__doc__, KINDS, 1.0, "docs/performance.md")
    parser.add_argument("--tensors", default="1,10,100,1000", help="numbers of tensors")
    options = parser.parse_args(argv)
    kinds, counts = options.only.split(","), [int(n) for n in options.tensors.split(",")]
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(KINDS)}")
    where = machine()
    path = options.output / f"crossings-{slug(where)}.json"
    shown = (
        path.relative_to(HERE.parent).as_posix() if path.is_relative_to(HERE.parent) else path.name
    )
    results: dict[str, Any] = {"machine": where, "file": shown, "rows": []}
    for kind in kinds:
        for count in counts:
            say(f"{kind}, {count} tensors ...")
            results["rows"].append(
                {"kind": kind, "tensors": count, "ms": measure(kind, count, options.seconds)}
            )
    return keep("crossings", results, table(results), path, options, PAGE)


if __name__ == "__main__":
    main()
