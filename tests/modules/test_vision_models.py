"""Models of torchvision and timm under jit, if they are installed: docs/vision.py has sixty."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def vision() -> ModuleType:
    """docs/vision.py."""
    for library in ("torchvision", "timm"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
    import vision

    return vision


@pytest.mark.parametrize(
    "name",
    [
        "convmixer",
        "mixer",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("densenet121", "swin_t", "vit_b_16")),
    ],
)
def test_outputs_and_gradients_in_both_modes(vision: ModuleType, name: str) -> None:
    found = vision.measured(name, vision.COMPARED)
    assert not vision.why_wrong(found), found


def test_sixty_models_are_on_the_page(vision: ModuleType) -> None:
    assert len(set(vision.MODELS)) == 60
    stored = json.loads(vision.RESULTS.read_text())
    assert set(stored["models"]) == set(vision.MODELS)
    written = vision.page(stored["models"], stored["about"])
    assert vision.PAGE.read_text() == written, "run: python docs/vision.py"
