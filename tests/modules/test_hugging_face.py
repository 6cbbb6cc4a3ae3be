"""Models of the transformers library under jit, if it is installed: docs/hugging_face.py has all
architectures.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table() -> ModuleType:
    pytest.importorskip("transformers")
    path = Path(__file__).resolve().parents[2] / "docs" / "hugging_face.py"
    spec = importlib.util.spec_from_file_location("hugging_face", path)
    assert spec is not None and spec.loader is not None
    sys.modules["hugging_face"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "architecture", ["llama", "mixtral", "gpt2", "bert", "t5", "vit", "convnext"]
)
def test_outputs_and_gradients(table: ModuleType, architecture: str) -> None:
    row = table.row_of(architecture)
    assert row.right, row


def test_generation_with_a_static_cache(table: ModuleType) -> None:
    assert table.generation_of("llama", 16, rounds=2).equal
