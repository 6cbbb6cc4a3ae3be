"""Every operator of PyTorch's database, one sample, through every transform: nothing that
docs/coverage.json calls right is wrong.

What is impossible there, for some of its samples, is right or impossible here.

``python docs/coverage.py`` writes that file; more samples and other dtypes are its business.
"""

from __future__ import annotations

import json
from pathlib import Path

import opinfo
import pytest
import torch

import torchfunc_jax

pytestmark = pytest.mark.sweep

OPERATORS = opinfo.operators()
BASELINE = json.loads((Path(__file__).resolve().parents[2] / "docs" / "coverage.json").read_text())[
    "operators"
]
NAMES = [name for name, op in OPERATORS.items() if torch.float32 in op.supported_dtypes("cpu")]


@pytest.mark.thin(20)
@pytest.mark.parametrize("name", NAMES)
def test_what_was_right_is_right(name: str) -> None:
    known = BASELINE.get(name, {}).get("float32", {})
    allowed = {
        m: (opinfo.RIGHT, cell["ours"].partition(":")[0])
        for m, cell in known.items()
        if not cell["ours"].startswith("wrong")
    }
    found = {
        cell.mode: cell.answers["ours"]
        for cell in opinfo.cells(
            name, OPERATORS[name], {"ours": torchfunc_jax}, modes=tuple(allowed), samples=1
        )
    }
    assert {
        mode: why for mode, why in found.items() if why.partition(":")[0] not in allowed[mode]
    } == {}
