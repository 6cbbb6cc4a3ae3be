"""Times the gradient of the digits ensemble with dropout under jit: random numbers that torch draws
beside numbers from JAX's keys.

    python benchmarks/random_numbers.py            dropout after the hidden layer, and after every
                                                   layer
    python benchmarks/random_numbers.py --page     and put the table into docs/semantics.md
    python benchmarks/random_numbers.py --json     the results as JSON on stdout
    python benchmarks/random_numbers.py --members 8 --only none,hidden

Losses with torch's numbers are compared with torch.func's from the same seed; the mean loss with
JAX's must be near it. Results are written to benchmarks/results/, a file per machine.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from readme import describe, keep
from run import milliseconds, parser_of, say, slug

import torchfunc_jax
from torchfunc_jax._machine import machine
from torchfunc_jax.examples.digits import DigitNet, load_digits

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "semantics.md"
SYSTEMS = {"torch.func": "torch.func", "torch": "jit, torch's numbers", "jax": "jit, JAX's numbers"}
PLACES = {  # the layers that dropout follows, and the numbers that it draws for one image
    "none": ("no dropout", (), 0),
    "hidden": ("after the hidden layer", ("hidden",), 64),
    "every": ("after every layer", ("conv1", "conv2", "hidden"), 16 * 6 * 6 + 32 * 3 * 3 + 64),
}
BATCH = 64


class DropoutNet(DigitNet):
    """The member of the digits ensemble, with dropout after some of its layers."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.dropped = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("conv1", "conv2", "hidden"):
            x = F.relu(getattr(self, name)(x.flatten(1) if name == "hidden" else x))
            x = F.dropout(x) if name in self.dropped else x
        return self.head(x)


def gradients(func: Any, model: torch.nn.Module) -> Callable[..., Any]:
    """(stacked weights, images, labels) -> (stacked gradients, losses [members]); each member drops
    its own features.
    """

    def loss(
        weights: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        return F.cross_entropy(func.functional_call(model, weights, (images,)), labels)

    return func.vmap(func.grad_and_value(loss), in_dims=(0, None, None), randomness="different")


def measure(place: str, members: int, seconds: float) -> dict[str, dict[str, float]]:
    """System -> milliseconds of a call (median) and seconds of the first one, both of jit's taking
    turns.
    """
    torch.manual_seed(0)
    models = [DropoutNet(PLACES[place][1]) for _ in range(members)]
    weights, _ = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    weights = {name: weight.detach() for name, weight in weights.items()}
    digits = load_digits()
    args = weights, digits.train_images[:BATCH], digits.train_labels[:BATCH]
    ours = gradients(torchfunc_jax, models[0])
    systems = {
        "torch.func": gradients(torch.func, models[0]),
        **{source: torchfunc_jax.jit(ours, random_numbers=source) for source in ("torch", "jax")},
    }
    calls = {name: functools.partial(system, *args) for name, system in systems.items()}
    firsts, losses = {}, {}
    for name, call in calls.items():
        torch.manual_seed(1)
        start = time.perf_counter()
        losses[name] = call()[1]
        firsts[name] = time.perf_counter() - start
    torch.testing.assert_close(losses["torch"], losses["torch.func"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses["jax"].mean(), losses["torch.func"].mean(), rtol=0.05, atol=0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    # apart, because torch's threads spin for a while after a call
    for turns in (["torch.func"], ["torch", "jax"]):
        end = time.perf_counter() + seconds * len(turns)
        while time.perf_counter() < end or len(times[turns[0]]) < 3:
            turns.reverse()
            for name in turns:
                start = time.perf_counter()
                calls[name]()
                times[name].append(time.perf_counter() - start)
    return {
        name: {"ms": 1e3 * statistics.median(one), "first_s": firsts[name], "calls": len(one)}
        for name, one in times.items()
    }


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    titles = list(SYSTEMS.values())
    lines = [
        f"| dropout | numbers in a call | {' | '.join(titles)} | torch's numbers, times JAX's |",
        "| --- | ---: |" + " ---: |" * (len(titles) + 1),
    ]
    for row in results["rows"]:
        one = row["systems"]
        cells = [f"{milliseconds(one[system]['ms'])} ms" for system in SYSTEMS]
        ratio = f"{one['torch']['ms'] / one['jax']['ms']:.2f}x"
        lines.append(
            f"| {PLACES[row['dropout']][0]} | {row['numbers']:,} | {' | '.join(cells)} | {ratio} |"
        )
    load = (
        f" The machine's load average was {results['load']} at the start."
        if results["load"] > 1
        else ""
    )
    notes = (
        f"{describe(results['machine'])}. Median time of the gradient of {results['members']} "
        f"members on {BATCH} digits.{load}"
    )
    return "\n".join([*lines, "", notes, f"Every number is in `{results['file']}`."])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = parser_of(__doc__, PLACES, 4.0, "docs/semantics.md")
    parser.add_argument("--members", type=int, default=32, help="networks of the ensemble")
    options = parser.parse_args(argv)
    places = options.only.split(",")
    if unknown := set(places) - set(PLACES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(PLACES)}")
    where = machine()
    path = options.output / f"random-numbers-{slug(where)}.json"
    shown = (
        path.relative_to(HERE.parent).as_posix() if path.is_relative_to(HERE.parent) else path.name
    )
    results: dict[str, Any] = {
        "machine": where,
        "load": round(os.getloadavg()[0], 1),
        "file": shown,
        "members": options.members,
        "rows": [],
    }
    for place in places:
        say(f"{PLACES[place][0]} ...")
        systems = measure(place, options.members, options.seconds)
        results["rows"].append(
            {
                "dropout": place,
                "numbers": PLACES[place][2] * BATCH * options.members,
                "systems": systems,
            }
        )
        say(
            "  "
            + "  ".join(f"{name} {milliseconds(one['ms'])} ms" for name, one in systems.items())
        )
    return keep("random-numbers", results, table(results), path, options, PAGE)


if __name__ == "__main__":
    main()
