"""Models of the transformers library under jit, if it is installed: docs/hugging_face.py has all
architectures.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table() -> ModuleType:
    pytest.importorskip("transformers")
    sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
    import hugging_face

    return hugging_face


@pytest.mark.parametrize(
    "architecture", ["llama", "mixtral", "gpt2", "bert", "t5", "vit", "convnext"]
)
def test_outputs_and_gradients(table: ModuleType, architecture: str) -> None:
    row = table.row_of(architecture)
    assert row.right, row


def test_generation_with_a_static_cache(table: ModuleType) -> None:
    assert table.generation_of("llama", 16, rounds=2).equal
