"""What every test starts from: the same seeds, few threads, JAX's compilations kept between runs, and the user's JAX settings untouched."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
import torch

_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"

jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(_CACHE)))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
torch.set_num_threads(1)  # the tests run in several processes

hypothesis.settings.register_profile("default", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.manual_seed(0)
    np.random.seed(0)
    before = jax.config.jax_enable_x64, torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    after = jax.config.jax_enable_x64, torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_dtype(before[1])
    assert after == before, "the test left JAX's 64-bit setting, torch's default dtype or torch's grad mode changed"


#: The files that ask every operator of PyTorch's test database, or every dtype of each: what `make test-versions` leaves out.
SWEEPS = frozenset(
    {
        "test_ambient.py", "test_operators.py", "test_variants.py", "test_special_values.py", "test_numbers.py", "test_refused_dtypes.py",
        "test_modules_db.py", "test_lowerings_run.py",
    }
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="needs a CUDA device that torch and JAX both see")
    for item in items:
        if item.path.name in SWEEPS:
            item.add_marker("sweep")
        if "gpu" in item.keywords and not (torch.cuda.is_available() and jax.default_backend() == "gpu"):
            item.add_marker(missing)
