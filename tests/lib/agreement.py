"""What the tests share: when two results are the same, how often Python runs, and the transforms by
name, ours and torch.func's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

import torchfunc_jax


def same(
    actual: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    graph: bool = True,
) -> None:
    """Same tree, same types, shapes, dtypes, and, within torch's own tolerances for the dtype,
    values; if graph, what requires grad does so here.

    Strides are not compared: ours are those of the operator that gives the result (see
    docs/semantics.md), torch.func's those of a dimension of lanes in front.
    """
    mine, my_spec = pytree.tree_flatten(actual)
    theirs, their_spec = pytree.tree_flatten(expected)
    assert my_spec == their_spec, f"{my_spec} is not {their_spec}"
    for a, e in zip(mine, theirs, strict=True):
        if isinstance(e, torch.Tensor):
            assert isinstance(a, torch.Tensor), f"a {type(a)} in the place of a tensor"
            torch.testing.assert_close(a.detach(), e.detach(), rtol=rtol, atol=atol, equal_nan=True)
            if graph:
                assert a.requires_grad == e.requires_grad, (
                    f"requires_grad: {a.requires_grad} in the place of {e.requires_grad}"
                )
        else:
            assert type(a) is type(e) and a == e


class Runs:
    """Counts how often Python runs, in C's memory: jit repeats at each call what a function does to
    Python objects.
    """

    def __init__(self) -> None:
        self._number = ctypes.c_long(0)

    def add(self) -> None:
        self._number.value += 1

    @property
    def count(self) -> int:
        return self._number.value


class Traces(Runs):
    """A function that counts how often its Python runs."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn, self.__name__ = fn, "counted"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.add()
        return self.fn(*args, **kwargs)


def floats(*shape: int) -> torch.Tensor:
    """Random numbers in float64, the same at each call."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


def fresh(tree: Any) -> Any:
    """The tree with every tensor replaced by a copy of its own memory, strides and requires_grad
    kept.
    """

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        new = (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())
            if 0 not in x.stride()
            else x.detach().clone()
        )
        return new.requires_grad_(x.requires_grad)

    return pytree.tree_map(copy, tree)


def as_numpy(tree: Any) -> Any:
    """The tree with torch tensors and jax.Arrays as numpy arrays."""
    return pytree.tree_map(
        lambda x: (
            np.asarray(x.detach() if isinstance(x, torch.Tensor) else x)
            if isinstance(x, torch.Tensor | jax.Array)
            else x
        ),
        tree,
    )


class Case:
    """A function of the transforms' namespace (torch.func or ours) that gives a callable, and the
    arguments to call it with.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[Any], Callable[..., Any]],
        arguments: Callable[[], tuple[Any, ...]],
        jit: bool,
    ) -> None:
        self.name, self.build, self.arguments, self.jit = name, build, arguments, jit


class Table:
    """Cases, each declared by a decorated function, to be the parameters of one test."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def __call__(self, *arguments: Any, jit: bool = True) -> Callable[..., Any]:
        """Declare a case; arguments are shapes (float32 normal numbers) or functions without
        arguments that make one.
        """

        def declare(build: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
            def make() -> tuple[Any, ...]:
                return tuple(a() if callable(a) else torch.randn(a) for a in arguments)

            self.cases.append(Case(build.__name__, build, make, jit))
            return build

        return declare

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.cases]


def theirs(case: Case, arguments: tuple[Any, ...]) -> Any:
    """torch.func's result."""
    return case.build(torch.func)(*fresh(arguments))


def ours(case: Case, arguments: tuple[Any, ...]) -> Any:
    """Ours, un-jitted."""
    return case.build(torchfunc_jax)(*fresh(arguments))


def ours_jitted(case: Case, arguments: tuple[Any, ...]) -> Any:
    """Ours as one program."""
    return torchfunc_jax.jit(case.build(torchfunc_jax))(*fresh(arguments))
