"""Counts how a call moves through the house: files entered, moves from one file to another, and
Python calls.

    python tools/moves.py            a table: un-jitted and jitted, first call and again
    python tools/moves.py --trace    and each call of those that come again, in order

The call is ``vmap(grad(loss), (None, 0, 0))(params, x, y)`` with a loss of five operators, in a
process that has called another transform, which imports what is imported when it is needed. What
counts are calls of functions in files of bridge and torchfunc_jax; a move is such a call from one
file of ours to another. Comprehensions are calls before Python 3.12, so they are left out
everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple([f"{ROOT / package}/" for package in ("bridge", "torchfunc_jax")])
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")


class Moves(NamedTuple):
    """What a call has entered: its files, the moves between them, and (file, function, whether it
    is a move) of each call in order.
    """

    files: int
    moves: int
    calls: list[tuple[str, str, bool]]


def moves_of(call: Callable[[], Any]) -> Moves:
    """Run a call, and count."""
    calls: list[tuple[str, str, bool]] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and name.startswith(OURS) and function not in COMPREHENSIONS:
            back = frame.f_back
            while back is not None and not back.f_code.co_filename.startswith(OURS):
                back = back.f_back
            moved = back is None or back.f_code.co_filename != name
            calls.append((str(Path(name).relative_to(ROOT)), function, moved))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Moves(len({file for file, *_ in calls}), sum(moved for *_, moved in calls), calls)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    import torch

    import torchfunc_jax

    torchfunc_jax.jit(torchfunc_jax.vmap(torch.cos))(torch.ones(3))
    torch.manual_seed(0)
    params, x, y = (
        {"w": torch.randn(3, 2), "b": torch.randn(2)},
        torch.randn(5, 3),
        torch.randn(5, 2),
    )

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((torch.tanh(x @ params["w"] + params["b"]) - y) ** 2).sum()

    mapped = torchfunc_jax.vmap(torchfunc_jax.grad(loss), (None, 0, 0))
    jitted = torchfunc_jax.jit(mapped)
    print(f"{'call':20}{'files':>8}{'moves':>8}{'calls':>8}")
    for name, fn in (("un-jitted", mapped), ("jit", jitted)):
        for turn in ("first", "second", "again"):
            found = moves_of(lambda fn=fn: fn(params, x, y))
            if turn != "second":
                print(f"{name + ', ' + turn:20}{found.files:8}{found.moves:8}{len(found.calls):8}")
        if "--trace" in sys.argv:
            print(
                *[
                    f"{'  ->' if moved else '    '} {file}:{function}"
                    for file, function, moved in found.calls
                ],
                sep="\n",
            )


if __name__ == "__main__":
    main()
