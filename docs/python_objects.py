"""Writes python_objects.md: what functions do to Python objects, under jit and in un-jitted
transforms, beside PyTorch and torch.func.

    python docs/python_objects.py               the whole table, and the page; about two minutes
    python docs/python_objects.py "a deque"     this kind, printed
    python docs/python_objects.py --json        as JSON

Each cell is a function that changes an object, called eight times with other tensors. What it
returns, and what the object holds after each call, must be what the same function leaves without
jit in PyTorch, or in torch.func's transform. Ends with 1 if a cell differs.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import sys
from pathlib import Path

import torch
import torch.func
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

from python_objects import KINDS, REACHED, WAYS, outcome, same  # noqa: E402

import torchfunc_jax  # noqa: E402
from torchfunc_jax import explain, jit  # noqa: E402
from torchfunc_jax._machine import machine  # noqa: E402

PAGE = Path(__file__).with_suffix(".md")
CALLS = 8  # jit calls the function itself after six programs that served one call each
TEXT = """# What jit does to Python objects

A function may keep a state in a dict, append to a list, or count its calls. Under `jit` its Python
runs only when a program is made, but its changes of Python objects happen at every call.
[jit.md](jit.md#what-a-function-does-to-python-objects) says how. `python docs/python_objects.py`
writes this page: it calls each of {cells} small functions eight times with different tensors, and
compares their results, and the contents of the objects after each call, with PyTorch's, or with
torch.func's. {verdict}

A row is a kind of object and a change of it; a column is a way to call the function. The function
reaches the object in {ways} ways:

{reached}

- **program**: every call but the first ones runs a program.
- **itself**: after a few programs jit calls the function itself, because its behaviour depends on
  the object that it has changed.
- **refused**: jit raises an error, because such an argument is not hashable.
- **as torch.func**: there is no jit; Python runs at each call.

These are the changes:

- **set**: the function stores a tensor at a name, key or index. **a state**: it computes a tensor
  from the one that the last call stored.
- **append**, **delete**: it adds a tensor to a list, or deletes an entry. **slide**: it does both.
- **rebind**: it replaces a tuple and a list by new ones. **add**: it adds a string to a set.
- **count**: it adds 1 to a number and uses it in arithmetic. **ask for a count**: it uses the
  number in an `if`. **make, then count**: the first call makes the number. **count in the class**:
  the number is an attribute of the class.

| object: change | {columns} |
| --- | {line} |
{rows}

Measured with {machine}.
"""


def tried(kind: str, reached: str, action: str, way: str) -> str:
    """How one function is called, or "wrong"."""
    try:
        theirs = outcome(torch.func, None, kind, reached, action, way, CALLS)
        with explain(io.StringIO()) as log:
            mine = outcome(torchfunc_jax, jit, kind, reached, action, way, CALLS)
    except TypeError as error:
        return "refused" if "hashable" in str(error) else f"wrong: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    if not same(mine, theirs):
        return "wrong"
    if not WAYS[way][1]:
        return "as torch.func"
    return "itself" if any("the function itself" in line for line in log) else "program"


def cell(found: dict[str, str]) -> str:
    """The outcomes of one cell, by how the object is reached, in words."""
    counted = collections.Counter(found.values())
    usual, _ = counted.most_common(1)[0]
    others = [f"{what} as {reached}" for reached, what in found.items() if what != usual]
    return "; ".join([usual, *others])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help="kinds of objects; without, all of them, and the page is written",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the outcomes as JSON, and write no page"
    )
    options = parser.parse_args()
    kinds = options.kinds or list(KINDS)
    unknown = [k for k in kinds if k not in KINDS]
    if unknown:
        parser.error(f"KIND: expected one of {', '.join(KINDS)}; got {unknown[0]!r}")
    lines = [(kind, action, way) for kind in kinds for action in KINDS[kind][1] for way in WAYS]
    found: dict[tuple[str, str], dict[str, str]] = collections.defaultdict(dict)
    count, wrong = 0, []
    for kind, action, way in track(lines, "cells", disable=options.json):
        outcomes = {reached: tried(kind, reached, action, way) for reached in REACHED}
        count += len(outcomes)
        wrong += [
            f"{kind}, {reached}, {action}, {way}: {what}"
            for reached, what in outcomes.items()
            if what.startswith("wrong")
        ]
        found[kind, action][way] = cell(outcomes)
    if options.json:
        print(
            json.dumps(
                {f"{kind}: {action}": ways for (kind, action), ways in found.items()}, indent=1
            )
        )
    else:
        rows = "\n".join(
            f"| {kind}: {action} | {' | '.join(ways.values())} |"
            for (kind, action), ways in found.items()
        )
        verdict = (
            f"{len(wrong)} of the results are wrong."
            if wrong
            else "All results are right, except where the call is refused."
        )
        page = TEXT.format(
            cells=f"{count:,}",
            verdict=verdict,
            ways=len(REACHED),
            reached="\n".join(f"- {way}" for way in REACHED),
            columns=" | ".join(WAYS),
            line=" | ".join("---" for _ in WAYS),
            rows=rows,
            machine="{cpu}, {cores} cores; torch {torch}, JAX {jax}, Python {python}".format(
                **machine()
            ),
        )
        print(rows)
        if not options.kinds:
            PAGE.write_text(page)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
