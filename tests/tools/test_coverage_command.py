"""The command docs/coverage.py: an interrupted sweep goes on where it was, also where a line of its
answers was cut off.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COMMAND = Path(__file__).resolve().parents[2] / "docs" / "coverage.py"


def test_resume_asks_only_for_what_is_missing(tmp_path):
    answers = {"torchfunc_jax": "kept", "torch.func": "kept"}
    kept = {
        "operator": "abs",
        "dtype": "float32",
        "mode": "jit",
        "samples": 1,
        "right": {},
        "answers": answers,
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"item": ["abs", "float32"], "cells": [kept]})
        + '\n{"item": ["neg", "float32"], "cel'
    )
    options = [
        "--resume",
        "--quick",
        "--only",
        "abs,neg",
        "--samples",
        "1",
        "--modes",
        "jit",
        "--jobs",
        "1",
        "--json",
        "--rows",
        str(rows),
    ]
    done = subprocess.run(
        [sys.executable, str(COMMAND), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "1 of 1" in done.stderr  # a line of progress for each answer
    got = {cell["operator"]: cell["answers"]["torchfunc_jax"] for cell in json.loads(done.stdout)}
    assert got == {"abs": "kept", "neg": "right"}
    assert [json.loads(line)["item"][0] for line in rows.read_text().splitlines()] == ["abs", "neg"]
