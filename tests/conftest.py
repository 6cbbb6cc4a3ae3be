"""What every test starts from: the same seeds, few threads, JAX's compilations kept between runs,
and the user's JAX settings untouched.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
import torch

from bridge.lowering.registry import LOWERINGS, OVERRIDDEN
from bridge.operators.register import register_lowering
from bridge.process import process
from bridge.xla import disk

_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"

jax.config.update(
    "jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# who develops this library wants its own frames too
os.environ.setdefault("TORCHFUNC_JAX_TRACEBACK", "full")
# the user's cache folder stays as it is; tests that start a process give it a folder of its own
disk.place = lambda: None
torch.set_num_threads(1)  # the tests run in several processes

hypothesis.settings.register_profile("default", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.manual_seed(0)
    np.random.seed(0)
    # A function that could not be recorded is remembered by its code and run by PyTorch from then
    # on. The cases of a table share functions: after the first that cannot be recorded, the others
    # would not reach the recorder, and which one is first depends on the order.
    process.unrecordable.clear()
    before = jax.config.jax_enable_x64, torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    after = jax.config.jax_enable_x64, torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_dtype(before[1])
    assert after == before, (
        "the test left JAX's 64-bit setting, torch's default dtype or torch's grad mode changed"
    )


@pytest.fixture
def lowerings_as_before() -> Iterator[None]:
    """After the test, operators have the lowerings that they had before it."""
    before, overridden = dict(LOWERINGS), set(OVERRIDDEN)
    yield
    for op in OVERRIDDEN - overridden:
        if op in before:
            register_lowering(op)(before[op])
            OVERRIDDEN.discard(op)


# bytes that a process may take before it forgets what it has compiled: without, 4.5 GB after half
# of the tests
_MEMORY = 2 * 2**30


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    """After a file of tests, forget compiled programs if they fill the memory, so that two
    processes run on a small machine.
    """
    yield
    # Linux alone says how much it is, and how to give it back
    with contextlib.suppress(OSError, AttributeError):
        if int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() > _MEMORY:
            jax.clear_caches()
            process.executables.clear()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="needs a CUDA device that torch and JAX both see")
    for item in items:
        thin = item.get_closest_marker("thin")
        # by name, so that no way to call is left out of all of them
        if thin and zlib.crc32(item.name.encode()) % thin.args[0]:
            item.add_marker("slow")
        if "gpu" in item.keywords and not (
            torch.cuda.is_available() and jax.default_backend() == "gpu"
        ):
            item.add_marker(missing)


@pytest.fixture
def unrecorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[], list[str]]]:
    """Fails if something was not recorded; gives, and forgets, what was not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(process, "unrecordable", set())
    caplog.set_level(logging.INFO, "torchfunc_jax")

    def take() -> list[str]:
        found = list(caplog.messages)
        caplog.clear()
        return found

    yield take
    assert not take()
