"""Writes ambient_state.md: PyTorch's ambient state, and what each does to what runs in JAX.

    python docs/ambient_state.py

The table is tests/lib/ambient.py; tests/unjitted/test_ambient_state.py runs each of its cells
beside torch.func, and checks that the page is up to date.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

import ambient  # noqa: E402  found in tests/

PAGE = Path(__file__).with_suffix(".md")
_WHENS = {
    "inside": "inside the function",
    "around": "around the call",
    "between": "between two calls",
}


def page() -> str:
    """The page as Markdown."""
    notes: list[str] = []
    rows = []
    for name, state in ambient.STATES.items():
        for when in ambient.WHENS:
            lines = {
                tensors: [_cell(state, when, way, tensors, notes) for way in ambient.WAYS]
                for tensors in ambient.TENSORS
            }
            same = len({tuple(found) for found in lines.values()}) == 1
            for tensors, found in (
                {", ".join(lines): lines[ambient.TENSORS[0]]}.items() if same else lines.items()
            ):
                rows.append(f"| {name} | {_WHENS[when]} | {tensors} | {' | '.join(found)} |")
    count = sum(1 for _ in ambient.cells())
    return "\n".join(
        [
            "# PyTorch's ambient state",
            "",
            *_wrapped(
                "In PyTorch the results of a function depend on more than its arguments: on "
                "autocast, on default dtypes and devices, on modes, hooks and generators. For each "
                "such state, this page compares a function that runs in JAX with torch.func in the "
                f"same place: {len(ambient.STATES)} states, {count:,} cells. "
                "[ambient_state.py](ambient_state.py) writes it from the table in "
                "[ambient.py](../tests/lib/ambient.py), and "
                "[test_ambient_state.py](../tests/unjitted/test_ambient_state.py) runs each cell."
            ),
            "",
            *_wrapped(
                "A state is set *inside the function* (and reset there), *around the call* of "
                "a function that was transformed before, or *between two calls*: the function "
                "is called four times, without the state, with it, without it, with it. The "
                "function calls a layer; it either *captures* the layer's weight, or gets it "
                "as an argument (*passed*). `functionalize` stands for a call without `jit`. "
                'In the columns `functionalize` and `jit`, "torch.func" means the plain '
                "function in PyTorch; `jit(grad)` is compared with `torch.func.grad`. The "
                "comparison covers values, dtypes, devices, `requires_grad`, the gradients "
                "that `torch.autograd.grad` finds through the results, a module's buffers, "
                "classes of errors, and the ambient state after each call."
            ),
            "",
            *_wrapped(
                "In the names of states, *asked for* means that the function reads the state "
                "(`is_grad_enabled()`), and *left so* that it sets the state and does not "
                "reset it. *A factory* makes tensors without `device=`, *a factory alone* "
                "does nothing else, and *devices given* takes the devices from arguments and "
                "other tensors."
            ),
            "",
            "| cell | meaning |",
            "| --- | --- |",
            (
                "| as torch.func | all of these are equal; or torch.func raises an error, "
                "and this library raises it too |"
            ),
            "| refused: *class* | it works in torch.func; here it raises an error of this class |",
            (
                "| works | torch.func raises an error; here the result is that of PyTorch "
                "without a transform |"
            ),
            "| differs | the result differs; the note gives the reason |",
            "",
            f"| state | set | weight | {' | '.join(f'`{way}`' for way in ambient.WAYS)} |",
            f"| {' | '.join(['---'] * (3 + len(ambient.WAYS)))} |",
            *rows,
            "",
            "## Notes",
            "",
            *[
                line
                for k, note in enumerate(notes, 1)
                for line in _wrapped(f"{k}. {note}", f"{k}. ")
            ],
            "",
        ]
    )


def _wrapped(text: str, mark: str = "") -> list[str]:
    """Lines of the page; mark: the beginning of the text under which the next lines are not."""
    return textwrap.wrap(
        text, 100, subsequent_indent=" " * len(mark), break_long_words=False, break_on_hyphens=False
    )


def _cell(state: ambient.State, when: str, way: str, tensors: str, notes: list[str]) -> str:
    other = ambient.declared(state, when, way, tensors)
    if other is None:
        return "as torch.func"
    if other.reason not in notes:
        notes.append(other.reason)
    return f"{other.text} ({notes.index(other.reason) + 1})"


if __name__ == "__main__":
    PAGE.write_text(page())
