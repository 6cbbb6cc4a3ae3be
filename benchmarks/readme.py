"""Puts tables between markers: the CPU's benchmarks into README.md, a GPU's and the demo's into
docs/benchmarks.md.

    python benchmarks/readme.py runs/ensemble/report.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent.parent / "README.md"
PAGE = README.parent / "docs" / "benchmarks.md"


def update(name: str, table: str, page: Path | None = None) -> None:
    """Replace what stands between the markers of this name in a page: README.md has "benchmarks",
    docs/benchmarks.md what is not given.
    """
    page = page or (README if name == "benchmarks" else PAGE)
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, found, rest = page.read_text().partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page.name} has no {start} ... {end}")
    page.write_text(f"{before}{start}\n{table}\n{end}{after}")


def keep(
    name: str, results: dict[str, Any], table: str, path: Path, options: Any, page: Path
) -> dict[str, Any]:
    """Write the results of a benchmark to its file, print them, and put the table into the page if
    the options ask for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    if options.page:
        update(name, table, page)
    if options.json:
        json.dump(results, sys.stdout)
    else:
        print(table)
    return results


def describe(where: dict[str, Any]) -> str:
    """The machine, in a line."""
    device = "" if where["device"] == "cpu" else f", {where['device']}"
    return (
        f"{where['cpu']}, {where['cores']} cores{device}; torch {where['torch']}, JAX "
        f"{where['jax']}, Python {where['python']}"
    )


def demo_table(report: dict[str, Any]) -> str:
    """The two tables of the demo and its speed-up in Markdown."""
    lines = [
        "| | step | first step | final loss | accuracy, mean member | accuracy, vote |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, one in report["systems"].items():
        accuracy = one["test_accuracy"]
        times = f"{one['step_ms']:.1f} ms | {one['first_step_s']:.1f} s"
        lines.append(
            f"| `{name}` | {times} | {one['final_loss']:.5f} | {accuracy['mean_member']:.2%} | "
            f"{accuracy['vote']:.2%} |"
        )
    first = report["difference"]["first_step"]
    settings = report["settings"]
    return "\n".join(
        [
            *lines,
            "",
            (
                f"{settings['members']} members, {report['steps']} steps, {report['test_images']} "
                f"test digits. {describe(report['machine'])}."
            ),
            (
                f"At the first step losses differ by {first['loss']:.0e} and gradients by "
                f"{first['gradient']:.0e}, relative."
            ),
            f"A step is {report['speed_up']:.1f} times as fast as under torch.func.",
        ]
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    update("demo", demo_table(json.loads(Path(sys.argv[1]).read_text())))
