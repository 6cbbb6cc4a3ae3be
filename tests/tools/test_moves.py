"""tools/moves.py counts calls of ours, and those that lead to another file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from bridge.convert import trees

_SPEC = importlib.util.spec_from_file_location(
    "moves", Path(__file__).parents[2] / "tools" / "moves.py"
)
moves = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(moves)


def test_calls_of_one_file_are_one_move() -> None:
    found = moves.moves_of(lambda: trees.unflatten(*trees.flatten((1, (2, 3)))[::-1]))
    names = [name for _, name, _ in found.calls]
    assert {"flatten", "_flatten", "unflatten"} <= {*names} and {
        file for file, *_ in found.calls
    } == {"bridge/convert/trees.py"}
    assert [name for _, name, moved in found.calls if moved] == ["flatten", "unflatten"] and (
        found.files,
        found.moves,
    ) == (1, 2)


def test_a_call_that_raises_leaves_no_profile_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        moves.moves_of(lambda: 1 / 0)
    assert sys.getprofile() is None
