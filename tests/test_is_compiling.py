"""torch.compiler.is_compiling() is true while a jitted function is traced, for that thread, and otherwise as PyTorch has it."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same
from torch.compiler import is_compiling

from torchfunc_jax import grad, jit, vmap

WAYS: dict[str, tuple[bool, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "jit": (True, jit),
    "jit of vmap": (True, lambda f: jit(vmap(f))),
    "jit of grad": (True, lambda f: jit(grad(lambda x: f(x).sum()))),
    "jit inside jit": (True, lambda f: jit(lambda x: jit(f)(x))),
    "vmap": (False, vmap),
    "grad": (False, grad),
    "jit inside grad": (False, lambda f: grad(lambda x: jit(f)(x).sum())),
    "itself": (False, lambda f: f),
}


@pytest.mark.parametrize("way", WAYS)
def test_where_it_is_true(way: str) -> None:
    expected, make = WAYS[way]
    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.extend([is_compiling(), torch.compiler.is_compiling()])
        assert not torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
        return x.sin().sum()

    make(f)(torch.ones(3))
    assert set(seen) == {expected}
    assert not is_compiling()


def test_an_error_ends_it() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise LookupError(is_compiling())

    with pytest.raises(LookupError, match="True"):
        jit(fails)(torch.ones(3))
    assert not is_compiling()


def test_other_threads_do_not_see_it() -> None:
    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=lambda: seen.append(is_compiling()))
        other.start()
        other.join()
        return x.sin()

    same(jit(f)(torch.ones(3)), torch.ones(3).sin())
    assert seen == [False]


def test_a_library_takes_its_branch_without_values() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        if not is_compiling() and bool((x < 0).any()):
            raise ValueError("negative")
        return x.sqrt()

    x = torch.ones(3)
    same(jit(checked)(x), x)
    same(jit(grad(lambda a: checked(a).sum()))(x), x / 2)
