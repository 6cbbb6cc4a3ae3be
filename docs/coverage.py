"""Writes coverage.md, coverage/ and coverage.json: PyTorch's operators through every transform,
right or not, and torch.func beside them.

    python docs/coverage.py                                 float32, 4 samples an operator
    python docs/coverage.py --dtypes all --samples 20       everything
    python docs/coverage.py --only sin,svd --json           a few, on standard output; the page
                                                            stays as it is
    python docs/coverage.py --resume                        go on after a crash or an interruption
    python docs/coverage.py --samples 20 --quick            XLA compiles without optimizing: most of
                                                            the time goes there

Workers answer one operator at a time; each answer is kept in --rows when it comes, so nothing is
asked twice. Dtypes and modes that are not asked for keep what coverage.json says of them.
tests/operators/test_operators.py fails where a cell that is right there turns wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

PAGE, BASELINE = ROOT / "docs" / "coverage.md", ROOT / "docs" / "coverage.json"
PAGES = ROOT / "docs" / "coverage"
OURS, THEIRS = "torchfunc_jax", "torch.func"
MODES = ("jit", "vjp", "jvp", "vmap", "vmapvjp")
DTYPES = (
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "complex64",
    "complex128",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
)
#: For many small programs that run once; what is lowered is the same.
_QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# XLA ends the process where it does not know a flag
if metadata.version("jaxlib").startswith("0.10."):
    _QUICK += " --xla_cpu_use_fusion_emitters=false"
_GRACE = 60.0  # seconds that a worker may be silent beyond its own limits before it is ended

#: operator -> dtype -> mode -> {"ours": answer, "theirs": answer}; "right", or why not
Coverage = dict[str, dict[str, dict[str, dict[str, str]]]]


# -- workers ---------------------------------------------------------------------------------------
def _work(pipe: Connection, modes: tuple[str, ...], samples: int, limit: float) -> None:
    """Answer (operator, dtype) pairs from the pipe, one list of cells each."""
    import warnings

    warnings.filterwarnings("ignore")
    import opinfo
    import torch.func

    import torchfunc_jax

    torch.set_num_threads(1)
    ops, namespaces = opinfo.operators(), {OURS: torchfunc_jax, THEIRS: torch.func}
    pipe.send(None)
    while (item := pipe.recv()) is not None:
        key, dtype = item
        pipe.send(
            [
                dataclasses.asdict(c)
                for c in opinfo.cells(key, ops[key], namespaces, dtype, modes, samples, limit)
            ]
        )


class Worker:
    """A process of its own, and the item that it is at."""

    def __init__(self, *settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, *settings), daemon=True)
        self.process.start()
        theirs.close()
        self.item: tuple[str, str] | None = None
        self.since = time.monotonic()

    def give(self, item: tuple[str, str] | None) -> None:
        self.item, self.since = item, time.monotonic()
        self.pipe.send(item)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def sweep(
    todo: list[tuple[str, str]], modes: tuple[str, ...], samples: int, limit: float, jobs: int
) -> Iterator[tuple[tuple[str, str], list[dict[str, Any]]]]:
    """Ask every item and yield (item, its cells) as they come; an item on which a worker dies or
    hangs has cells that say so.

    Args:
        todo: (operator, dtype) pairs.
        modes, samples, limit: as in ``opinfo.cells``.
        jobs: how many processes.
    """
    settings = (modes, samples, limit)
    queue, patience = list(reversed(todo)), limit * 2 * samples * len(modes) + _GRACE
    workers = [Worker(*settings) for _ in range(min(jobs, len(todo)))]
    left = len(todo)
    while left:
        ready = wait([w.pipe for w in workers], timeout=5)
        for i, w in enumerate(workers):
            died = None
            if w.pipe in ready:
                try:
                    cells = w.pipe.recv()
                    if w.item is not None:
                        yield w.item, cells
                        left -= 1
                    w.item = None
                    if queue:
                        w.give(queue.pop())
                    continue
                except EOFError:
                    died = "the process died"
            elif w.item is not None and time.monotonic() - w.since > patience:
                died = "took too long"
            if died:
                w.end()
                if w.item is not None:
                    key, dtype = w.item
                    yield (
                        w.item,
                        [
                            {
                                "operator": key,
                                "dtype": dtype,
                                "mode": m,
                                "answers": {OURS: f"wrong: {died}"},
                                "right": {},
                                "samples": samples,
                                "seconds": 0.0,
                            }
                            for m in modes
                        ],
                    )
                    left -= 1
                workers[i] = Worker(*settings)
    for w in workers:
        w.end()


# -- what is known ---------------------------------------------------------------------------------
def merged(known: Coverage, rows: list[dict[str, Any]]) -> Coverage:
    """known, with the rows' cells in the place of its own."""
    for row in rows:
        cell = {"ours": row["answers"][OURS]}
        if THEIRS in row["answers"]:
            cell["theirs"] = row["answers"][THEIRS]
        known.setdefault(row["operator"], {}).setdefault(row["dtype"], {})[row["mode"]] = cell
    return known


def cells_of(coverage: Coverage, dtype: str, mode: str, whose: str) -> list[str]:
    """All operators' answers in one column."""
    return [
        by[dtype][mode][whose]
        for by in coverage.values()
        if whose in by.get(dtype, {}).get(mode, {})
    ]


def _short(answer: str | None) -> str:
    if answer is None:
        return ""
    return {"right": "✓", "impossible": "∅"}.get(answer.partition(":")[0], "✗")


def page(about: dict[str, Any], coverage: Coverage) -> str:
    """coverage.md."""
    dtypes = [d for d in DTYPES if any(d in by for by in coverage.values())]
    counts = ", ".join(f"{d}: {about['samples'][d]}" for d in dtypes)
    lines = [
        "# Operators",
        "",
        *textwrap.wrap(
            f"`python docs/coverage.py` runs every operator of PyTorch's own test database "
            f"(`op_db`, torch {about['torch']}, JAX {about['jax']}) under each transform, and "
            "compares the results with plain PyTorch on the CPU. It uses the samples of the "
            f"database (for each operator: {counts}), and runs torch.func on the same samples.",
            100,
        ),
        "",
        *textwrap.wrap(
            (
                "An operator counts as right in a mode if every sample agrees in shape, dtype and "
                "values. If PyTorch has no forward formula for an operator, its jvp is compared "
                "with the vjp of the vjp. For random operators, only shape and dtype are compared."
            )
            + (
                f" These dtypes were compiled without XLA's optimizations (`--quick`): "
                f"{', '.join(quick)}."
                if (quick := about.get("quick"))
                else ""
            ),
            100,
        ),
        "",
        "| dtype | " + " | ".join(f"{m} | torch.func" if m != "jit" else m for m in MODES) + " |",
        "| --- |" + " ---: |" * (2 * len(MODES) - 1),
    ]
    for d in dtypes:
        row = [d]
        for m in MODES:
            for whose in ("ours", "theirs") if m != "jit" else ("ours",):
                found = cells_of(coverage, d, m, whose)
                n = sum(a == "right" for a in found)
                row.append(f"{n} of {len(found)} ({n / len(found):.1%})" if found else "")
        lines.append("| " + " | ".join(row) + " |")
    lines += [
        "",
        "## What is not right, and why",
        "",
        "| operator | dtype | mode | why | torch.func |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key, by in sorted(coverage.items()):
        # dtypes with the same modes, reason, and answers of torch.func
        alike: dict[tuple[str, ...], list[str]] = {}
        for d in dtypes:
            whys: dict[str, list[str]] = {}
            for m, cell in by.get(d, {}).items():
                if cell["ours"] != "right":
                    whys.setdefault(cell["ours"], []).append(m)
            for why, modes in whys.items():
                theirs = " ".join(_short(by[d][m].get("theirs")) for m in modes)
                alike.setdefault((", ".join(modes), why.replace("|", "\\|"), theirs), []).append(d)
        lines += [
            f"| `{key}` | {', '.join(ds)} | {modes} | {why} | {theirs} |"
            for (modes, why, theirs), ds in alike.items()
        ]
    lines += ["", "## Each operator", "", *[f"- [{d}](coverage/{d}.md)" for d in dtypes], ""]
    return "\n".join(lines)


def dtype_page(coverage: Coverage, dtype: str) -> str:
    """coverage/DTYPE.md."""
    lines = [
        f"# Operators in {dtype}",
        "",
        (
            "✓ right, ✗ wrong, ∅ impossible, empty: PyTorch has no result for a "
            "comparison. The second sign of a"
        ),
        "pair is that of torch.func. [The reasons](../coverage.md)",
        "",
        "| operator | " + " | ".join(MODES) + " |",
        "| --- |" + " :---: |" * len(MODES),
    ]
    for key, by in sorted(coverage.items()):
        if dtype in by:
            shown = [(by[dtype].get(m) or {}) for m in MODES]
            lines.append(
                f"| `{key}` | "
                + " | ".join(
                    f"{_short(c.get('ours'))} {_short(c.get('theirs'))}".strip() for c in shown
                )
                + " |"
            )
    return "\n".join([*lines, ""])


def write(about: dict[str, Any], coverage: Coverage) -> None:
    """coverage.json, coverage.md, and coverage/DTYPE.md of each dtype."""
    BASELINE.write_text(dumped(about, coverage))
    PAGE.write_text(page(about, coverage))
    PAGES.mkdir(exist_ok=True)
    for dtype in about["samples"]:
        (PAGES / f"{dtype}.md").write_text(dtype_page(coverage, dtype))


def dumped(about: dict[str, Any], coverage: Coverage) -> str:
    """coverage.json: a line for each operator and dtype."""
    head = json.dumps(about)
    ops = [
        f" {json.dumps(key)}: {{\n"
        + ",\n".join(f"  {json.dumps(d)}: {json.dumps(modes)}" for d, modes in sorted(by.items()))
        + "\n }"
        for key, by in sorted(coverage.items())
    ]
    return f'{{"about": {head},\n"operators": {{\n' + ",\n".join(ops) + "\n}}\n"


def load() -> tuple[dict[str, Any], Coverage]:
    """What coverage.json says."""
    if not BASELINE.exists():
        return {"samples": {}}, {}
    found = json.loads(BASELINE.read_text())
    return found["about"], found["operators"]


# -- the command -----------------------------------------------------------------------------------
def summary(rows: list[dict[str, Any]]) -> str:
    """A line for each mode."""
    out = []
    for m in MODES:
        mine = [r for r in rows if r["mode"] == m]
        for whose in (OURS, THEIRS):
            found = Counter(
                r["answers"][whose].partition(":")[0] for r in mine if whose in r["answers"]
            )
            if total := sum(found.values()):
                said = ", ".join(
                    f"{n} {what}" for what, n in sorted(found.items()) if what != "right"
                )
                out.append(
                    (
                        f"{m:8} {whose:14} {found['right']:5} of {total} right "
                        f"({found['right'] / total:.1%})"
                    )
                    + (f"; {said}" if said else "")
                )
    return "\n".join(out)


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4, help="samples an operator and dtype (4)")
    parser.add_argument("--dtypes", default="float32", help="names with commas, or all (float32)")
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ",".join(MODES))
    parser.add_argument("--only", help="operators, with commas; the page is left as it is")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit", type=float, default=60, help="seconds an answer may take")
    parser.add_argument(
        "--rows",
        type=Path,
        default=ROOT / ".cache" / "coverage.jsonl",
        help="where answers are kept as they come",
    )
    parser.add_argument(
        "--quick", action="store_true", help="compile without XLA's optimizations: twice as fast"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the answers in --rows and ask only for the others",
    )
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")
    return parser.parse_args(argv)


def answered(
    rows: Path, items: set[tuple[str, str]]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The answers that an interrupted run has kept; a line that it was cut off in is taken out of
    the file.
    """
    if not rows.exists():
        return {}
    whole, newline, cut = rows.read_text().rpartition("\n")
    if cut:
        rows.write_text(whole + newline)
    kept = {
        tuple(answer["item"]): answer["cells"] for answer in map(json.loads, whole.splitlines())
    }
    return {item: cells for item, cells in kept.items() if item in items}


def main(argv: list[str] | None = None) -> int:
    asked = options(argv)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    if asked.quick:  # before jax is imported, here and in the workers
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()
    import jax
    import opinfo
    import torch

    dtypes = DTYPES if asked.dtypes == "all" else tuple(asked.dtypes.split(","))
    modes = tuple(asked.modes.split(","))
    if unknown := [m for m in modes if m not in MODES] + [d for d in dtypes if d not in DTYPES]:
        sys.exit(
            f"unknown: {', '.join(unknown)}; modes are {', '.join(MODES)}; dtypes are "
            f"{', '.join(DTYPES)}"
        )
    ops = opinfo.operators()
    keys = asked.only.split(",") if asked.only else list(ops)
    if unknown := [k for k in keys if k not in ops]:
        sys.exit(f"unknown operators: {', '.join(unknown)}")
    items = [
        (k, d) for d in dtypes for k in keys if getattr(torch, d) in ops[k].supported_dtypes("cpu")
    ]

    asked.rows.parent.mkdir(parents=True, exist_ok=True)
    done = answered(asked.rows, set(items)) if asked.resume else {}
    rows = [cell for cells in done.values() for cell in cells]
    todo = [item for item in items if item not in done]
    start = time.monotonic()
    with asked.rows.open("a" if asked.resume else "w") as kept_rows:
        for n, (item, cells) in enumerate(
            sweep(todo, modes, asked.samples, asked.limit, asked.jobs), 1
        ):
            rows += cells
            kept_rows.write(json.dumps({"item": item, "cells": cells}) + "\n")
            kept_rows.flush()
            bad = sum(r["answers"][OURS] != "right" for r in rows)
            passed = time.monotonic() - start
            line = (
                f"{n} of {len(todo)}  {bad} cells not right  {passed:.0f} s, "
                f"{passed / n * (len(todo) - n):.0f} s left  {item[0]} {item[1]}"
            )
            print(
                f"\r{line:100.100}" if sys.stderr.isatty() else line,
                end="" if sys.stderr.isatty() else "\n",
                file=sys.stderr,
                flush=True,
            )
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(json.dumps(rows) if asked.json else summary(rows))
    if asked.only:
        if not asked.json:
            for r in rows:
                for whose, why in r["answers"].items():
                    if why != "right":
                        print(
                            f"{r['operator']} {r['dtype']} {r['mode']} {whose}: {why} "
                            f"({r['right'].get(whose, 0)} of {r['samples']} right)"
                        )
        return 0
    about, known = load()
    about |= {"torch": torch.__version__.partition("+")[0], "jax": jax.__version__}
    about["samples"] |= dict.fromkeys(dtypes, asked.samples)
    about["quick"] = [
        d for d in DTYPES if (asked.quick if d in dtypes else d in about.get("quick", ()))
    ]
    for by in known.values():  # what was asked for and has no cell any more
        for d in dtypes:
            for m in modes:
                by.get(d, {}).pop(m, None)
    coverage = {k: by for k, by in merged(known, rows).items() if any(by.values())}
    write(about, coverage)
    return 0


if __name__ == "__main__":
    sys.exit(main())
