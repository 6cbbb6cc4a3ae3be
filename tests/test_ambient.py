"""PyTorch's ambient state: each cell of the table in ambient.py holds what it says, and the page in docs/ is the one of the table."""
from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import ambient
import jax
import pytest
import torch

from bridge.process import process

ROOT = Path(__file__).resolve().parent.parent


def _of_the_constraints() -> bool:
    return f"\ntorch=={torch.__version__.partition('+')[0]}\n" in (ROOT / "constraints.txt").read_text()


@pytest.fixture(autouse=True)
def _small_programs_are_kept_too() -> Iterator[None]:
    """JAX keeps what it has compiled on the disk, also small programs: most cells compile the same ones."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def cells(name: str, every: bool) -> Iterator[tuple[str, str, str]]:
    """(when, way, tensors): one cell in eighteen, others for each state; or all that are left."""
    start = list(ambient.STATES).index(name)
    for k, way in enumerate(ambient.WAYS):
        for i, (when, tensors) in enumerate(itertools.product(ambient.WHENS, ambient.TENSORS)):
            some = (start + k) % 3 == 0 and (start + k + i) % 6 == 0
            if some != every:
                yield when, way, tensors


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ambient.STATES)
def test_the_table(name: str, every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "unrecordable", set())  # the cells share their functions' code
    state, wrong = ambient.STATES[name], []
    for when, way, tensors in cells(name, every):
        other = ambient.declared(state, when, way, tensors)
        says, detail = ambient.observed(state, when, way, tensors)
        expected = "as torch.func" if other is None else other.text
        if says != expected or (other is not None and not re.search(other.match, detail)):
            wrong.append(f"{when}, {way}, {tensors}: {says!r}, and not {expected!r}: {detail}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not _of_the_constraints(), reason="the page is of the version of PyTorch in constraints.txt")
def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("ambient_state", ROOT / "docs" / "ambient_state.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "run: python docs/ambient_state.py"
    rows = [line for line in script.page().splitlines() if line.count("|") > 9]
    assert all(cell.strip() for row in rows for cell in row.split("|")[1:-1]), "an empty cell"
