"""Every notebook runs from top to bottom: small here, as it is among the slow tests."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))

#: What replaces the cell tagged "parameters", so that a run takes seconds.
FAST = {"ensembling", "per_sample_gradients", "flax_layer_in_torch"}
SMALL = {
    "ensembling": "members, epochs, batch_size, seed = 3, 2, 256, 0",
    "gaussian_process_posterior": "chains, warmup, draws = 2, 30, 30",
    "policy_in_jax": "updates, seeds, steps = 6, 2, 20",
    "learned_force_field": "configurations, updates, steps = 32, 30, 50",
}
NEEDS = {"gaussian_process_posterior": ["blackjax", "numpyro"]}


def execute(path: Path, parameters: str | None = None) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if parameters and "parameters" in cell.metadata.get("tags", ()):
            cell.source = parameters
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    return notebook


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=p.stem, marks=() if p.stem in FAST else pytest.mark.slow)
        for p in NOTEBOOKS
    ],
)
def test_runs(path: Path) -> None:
    for library in NEEDS.get(path.stem, ()):
        pytest.importorskip(library)
    execute(path, SMALL.get(path.stem))


@pytest.mark.slow
def test_ensembling_keeps_its_promises() -> None:
    notebook = execute(next(p for p in NOTEBOOKS if p.stem == "ensembling"))
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", ()))
    votes = [float(v) for v in re.findall(r"vote ([\d.]+)%", printed)]
    members = [float(v) for v in re.findall(r"mean member ([\d.]+)%", printed)]
    assert len(votes) == 2 and min(votes) >= 97
    assert abs(votes[0] - votes[1]) <= 1 and abs(members[0] - members[1]) <= 1
