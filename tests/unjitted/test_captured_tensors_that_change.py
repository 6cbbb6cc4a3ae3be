"""A function that takes other captured tensors at each run: Python runs once a call, as in
torch.func, and the tensors get gradients.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import same

import torchfunc_jax
from torchfunc_jax import grad, jit, vmap

Take = Callable[[], torch.Tensor]


def _queue(parameters: list[torch.Tensor]) -> Take:
    source: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    for p in parameters:
        source.put(p)
    return lambda: source.get(block=False)


def _generator(parameters: list[torch.Tensor]) -> Take:
    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from parameters

    return endless().__next__


def _made_anew(parameters: list[torch.Tensor]) -> Take:
    """A view of a parameter that is made outside of the trace,
    and so is another object each time.
    """
    source = (p * 2 for p in parameters)
    made = [next(source) for _ in parameters]
    return lambda: made.pop()


def _counted(parameters: list[torch.Tensor]) -> Take:
    runs = iter(range(len(parameters)))
    return lambda: parameters[next(runs)] * parameters[-1]


SOURCES: dict[str, Callable[[list[torch.Tensor]], Take]] = {
    "an iterator": lambda parameters: iter(parameters).__next__,
    "a queue": _queue,
    "a pool": lambda parameters: parameters.copy().pop,
    "a generator function": _generator,
    "a random choice": lambda parameters: lambda: random.choice(parameters),
    "results outside": _made_anew,
    "a count": _counted,
}

TRANSFORMS: dict[
    str, Callable[[Any, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], Any]
] = {
    "grad": lambda T, f, x: T.grad(f)(x),
    "grad_and_value": lambda T, f, x: T.grad_and_value(f)(x),
    "vmap": lambda T, f, x: T.vmap(f)(x.expand(2, 3)),
    "vmap of grad": lambda T, f, x: T.vmap(T.grad(f))(x.expand(2, 3)),
    "grad of vmap": lambda T, f, x: T.grad(lambda x: T.vmap(f)(x.expand(2, 3)).sum())(x),
    "jvp": lambda T, f, x: T.jvp(f, (x,), (x,)),
    "vjp": lambda T, f, x: T.vjp(f, x)[1](torch.ones_like(x[0]))[0],
    "jacrev": lambda T, f, x: T.jacrev(f)(x),
    "hessian": lambda T, f, x: T.hessian(f)(x),
    "grad of grad": lambda T, f, x: T.grad(lambda x: T.grad(f)(x).sin().sum())(x),
    "functionalize": lambda T, f, x: T.functionalize(f)(x),
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "in PyTorch"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", SOURCES)
def test_python_runs_once_with_the_tensors_that_it_takes(
    name: str, transform: str, recorded: bool
) -> None:
    def results(T: Any) -> Any:
        random.seed(3)
        parameters = [
            torch.linspace(0.5, 1.0 + k / 10, 3, dtype=torch.float64, requires_grad=True)
            for k in range(10)
        ]
        take, runs = SOURCES[name](parameters), []

        def f(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            y = (x * take()).sin()
            if not recorded:
                y = y.as_strided((3,), (1,))
            return (y * take()).sum() * x.prod()

        found = []
        for k in range(3):
            before = len(runs)
            found.append(
                TRANSFORMS[transform](T, f, torch.linspace(0.2 + k, 1.0, 3, dtype=torch.float64))
            )
            assert len(runs) == before + 1
        sum(t.sum() for t in torch.utils._pytree.tree_leaves(found)).backward()
        return found, [p.grad for p in parameters]

    ours, theirs = results(torchfunc_jax), results(torch.func)
    assert [g is None for g in ours[1]] == [g is None for g in theirs[1]]
    same(ours, theirs)


def test_an_endless_source_ends_the_trace_of_jit() -> None:
    """Each trace meets another tensor, of which none can stand for all:
    the error says what to do.
    """
    runs = []

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return (x * SOURCE.get(block=False)).sum()

    SOURCE: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    for k in range(60):
        SOURCE.put(torch.full((3,), 1.0 + k, requires_grad=True))
    x = torch.ones(3)
    for transformed, given in ((f, x), (grad(f), x), (vmap(f), x.expand(2, 3))):
        runs.clear()
        with pytest.raises(
            RuntimeError, match=r"are others each time it is traced.*pass them as arguments"
        ):
            jit(transformed)(given)
        assert len(runs) < 10
