"""The pytest plugin: the fixture ``parity``. A module of its own, so that pytest does not import torch and JAX where nobody asks for it."""
from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def parity() -> Callable[..., None]:
    """``torchfunc_jax.testing.assert_parity``: the same under torch.func and torchfunc_jax, or the test fails and says where."""
    from torchfunc_jax.testing import assert_parity

    return assert_parity
