"""The pytest plugin: the fixture ``parity``. A module of its own, so that pytest does not import
torch and JAX where nobody asks for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any

import pytest


class Parity:
    """What the fixture gives: ``assert_parity``, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, fn: Any, *args: Any, **options: Any) -> None:
        __tracebackhide__ = True
        from torchfunc_jax.testing import assert_parity

        self.calls += 1
        assert_parity(fn, *args, **options)


@pytest.fixture(scope="session")
def parity() -> Parity:
    """``torchfunc_jax.testing.assert_parity``: the same under torch.func and torchfunc_jax, or the
    test fails and says where.

    ``parity(fn, x, transforms=["grad"])``; a function that both must refuse:
    ``parity(fn, x, raises=ValueError)``. A test that takes this fixture and does not call it fails,
    because it compared nothing.
    """
    return Parity()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    given = pyfuncitem.funcargs.get("parity")
    asked = isinstance(given, Parity) and "parity" in inspect.signature(pyfuncitem.obj).parameters
    before = given.calls if asked else 0
    result = yield
    if asked and given.calls == before:
        pytest.fail(
            "the test takes the fixture parity and never called it, so nothing was compared",
            pytrace=False,
        )
    return result
