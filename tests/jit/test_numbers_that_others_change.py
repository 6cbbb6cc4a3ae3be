"""Python numbers that a jitted function reads and that change from call to call are inputs of its
programs, wherever they are: beside the function without jit.
"""

from __future__ import annotations

import collections
import functools
import queue
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchfunc_jax import explain, grad, jit, vmap

Function = Callable[[torch.Tensor], torch.Tensor]
_FACTOR: Any = 1.0


def _global() -> tuple[Function, Callable[[Any], None]]:
    def put(x: Any) -> None:
        global _FACTOR
        _FACTOR = x

    return lambda x: x * _FACTOR + 1, put


def _variable() -> tuple[Function, Callable[[Any], None]]:
    factor: Any = 1.0

    def put(x: Any) -> None:
        nonlocal factor
        factor = x

    return lambda x: x * factor + 1, put


def _entry() -> tuple[Function, Callable[[Any], None]]:
    options: dict[str, Any] = {"factor": 1.0, "name": "a"}
    return lambda x: x * options["factor"], lambda v: options.__setitem__("factor", v)


def _element() -> tuple[Function, Callable[[Any], None]]:
    held: list[Any] = [torch.ones(3), 1.0]
    return lambda x: x * held[1] * held[0], lambda v: held.__setitem__(1, v)


def _attribute() -> tuple[Function, Callable[[Any], None]]:
    held = types.SimpleNamespace(factor=1.0)
    return lambda x: (x * held.factor).exp(), lambda v: setattr(held, "factor", v)


class _Scaled(nn.Module):
    factor: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * self.factor


def _of_a_module() -> tuple[Function, Callable[[Any], None]]:
    layer = _Scaled()
    return layer, lambda v: setattr(layer, "factor", v)


def _of_an_optimizer() -> tuple[Function, Callable[[Any], None]]:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return weight.detach() * 1

    return step, lambda v: optimizer.param_groups[0].__setitem__("lr", v)


def _two() -> tuple[Function, Callable[[Any], None]]:
    held = types.SimpleNamespace(a=1.0, b=2)

    def put(x: Any) -> None:
        held.a, held.b = x, int(10 * x)

    return lambda x: x * held.a + held.b, put


#: By where a number is: a function that reads it, and what changes it.
PLACES: dict[str, Callable[[], tuple[Function, Callable[[Any], None]]]] = {
    "a global variable": _global,
    "a variable": _variable,
    "an entry of a dict": _entry,
    "an element of a list": _element,
    "an attribute": _attribute,
    "an attribute of a module": _of_a_module,
    "the rate of an optimizer": _of_an_optimizer,
    "two attributes": _two,
}
WAYS: dict[str, Callable[[Function], Function]] = {
    "jit": lambda f: f,
    "jit of grad": lambda f: grad(lambda x: f(x).sum()),
    "jit of vmap": lambda f: lambda x: vmap(f)(torch.stack([x, -x])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_changes_at_each_call_needs_one_more_program(place: str, way: str) -> None:
    if place == "the rate of an optimizer" and way != "jit":
        pytest.skip("backward() is refused in a transform")
    (f, put), (g, put_too) = PLACES[place](), PLACES[place]()
    mine, theirs = jit(WAYS[way](f)), WAYS[way](g)
    x = torch.tensor([1.0, -2.0, 0.5])
    for v in (1.0, 0.5, 0.25, -2.0, 0.125, 1.0):
        put(v)
        put_too(v)
        torch.testing.assert_close(mine(x), theirs(x))
    assert len(mine.programs()) == 2


def test_a_number_whose_value_is_asked_for_has_a_program_for_each_value() -> None:
    held = types.SimpleNamespace(n=1)

    @jit
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(held.n):
            x = x * 2
        return x

    for held.n in (1, 3, 2, 3):
        assert float(f(torch.ones(()))) == 2**held.n
    assert len(f.programs()) == 3


#: Functions of a tensor and a number that is compared, and in how many ways the comparisons come
#: out for the numbers from 0 to 11.
COMPARED: dict[str, tuple[Callable[[torch.Tensor, Any], torch.Tensor], int]] = {
    "if": (lambda x, n: x * 2 if n > 3 else x + n, 2),
    "every third": (lambda x, n: x * n if n % 3 == 0 else x - n, 2),
    "min": (lambda x, n: x * min(1.0, n / 5), 2),
    "between": (lambda x, n: x.sin() if 2 <= n < 7 else x.cos() * n, 3),
    "not": (lambda x, n: x + n if not n else x * n, 2),
    "in": (lambda x, n: x + n if n in (1, 4) else x * n, 3),
    "another type": (lambda x, n: x / n if n != "a" and n is not None and n >= 1 else x, 2),
    "after another": (lambda x, n: (x if n < 6 else x * 2) * (n if n // 2 != 1 else 1), 3),
}


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("way", ["argument", "attribute"])
@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_of_a_number_needs_a_program_for_each_answer(
    name: str, way: str, kind: type
) -> None:
    f, ways = COMPARED[name]
    held, x = types.SimpleNamespace(n=None), torch.tensor([1.0, -2.0, 0.5])
    fast = jit(f) if way == "argument" else jit(lambda x: f(x, held.n))
    for n in [*range(12), *reversed(range(12)), 3, 9, 0]:
        held.n = kind(n)
        found = fast(x, held.n) if way == "argument" else fast(x)
        torch.testing.assert_close(found, f(x, held.n))
    assert len(fast.programs()) <= 2 * ways + 1


def test_a_loop_until_a_number_is_zero() -> None:
    @jit
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        while n > 0:
            x, n = x + 1, n - 1
        return x

    for n in (3, 4, 200, 201, 700, 3, 200):
        assert float(f(torch.zeros(()), n)) == n


def test_steps_that_are_taken_every_third_time() -> None:
    weight, calls = nn.Parameter(torch.ones(3)), {"n": 0}
    optimizer = torch.optim.SGD([weight], lr=0.5)

    @jit
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).square().sum()
        loss.backward()
        calls["n"] += 1
        if calls["n"] % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    other, total = torch.ones(3), torch.zeros(3)
    for k in range(1, 13):
        x = torch.tensor([0.1, 0.2, 0.3]) * k / 4
        torch.testing.assert_close(step(x), (other * x).square().sum())
        total += 2 * other * x**2
        if k % 3 == 0:
            other, total = other - 0.5 * total, torch.zeros(3)
    torch.testing.assert_close(weight.detach(), other)
    assert len(step.programs()) <= 6 and sum(p.calls for p in step.programs()) == 12


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_that_are_stepped_in_the_function(name: str) -> None:
    def trained(wrap: Callable[..., Any]) -> list[Any]:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        schedule = SCHEDULES[name](optimizer)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            (weight * x).square().sum().backward()
            optimizer.step()
            schedule.step()

        call = wrap(step)
        for k in range(9):
            call(torch.tensor([0.1, 0.2, 0.3]) * k)
        if wrap is jit and name != "CosineAnnealingLR":
            assert sum(p.calls for p in call.programs()) == 9 > len(call.programs()) + 2
        return [weight.detach(), optimizer.param_groups[0]["lr"], schedule.last_epoch]

    torch.testing.assert_close(trained(jit), trained(lambda f: f))


@pytest.mark.parametrize("kind", ["deque", "list", "queue"])
def test_numbers_that_are_taken_out_of_what_held_them(kind: str) -> None:
    held: Any = queue.Queue() if kind == "queue" else collections.deque() if kind == "deque" else []
    for k in range(9):
        held.put(k) if kind == "queue" else held.append(k)
    take = {
        "deque": lambda: held.popleft(),
        "list": lambda: held.pop(0),
        "queue": lambda: held.get(),
    }
    f = jit(lambda x: x * take[kind]())
    assert [float(f(torch.ones(()))) for _ in range(9)] == list(range(9))


def test_a_number_that_becomes_something_else() -> None:
    held = types.SimpleNamespace(factor=1.0)
    f = jit(lambda x: x * held.factor)
    x = torch.ones(2)
    for held.factor in (1.0, 2.0, 3, torch.tensor(4.0), True, 5.0, 6.0):
        torch.testing.assert_close(f(x), x * held.factor)
    del held.factor
    with pytest.raises(AttributeError):
        f(x)
    held.factor = 7.0
    torch.testing.assert_close(f(x), x * 7)


def test_a_number_that_the_function_and_others_change() -> None:
    held = types.SimpleNamespace(n=0)

    @jit
    def f(x: torch.Tensor) -> torch.Tensor:
        held.n += 1
        return x * held.n

    for k in (0, 10, 3, 3, 20):
        held.n = k
        assert float(f(torch.ones(()))) == k + 1 == held.n
    assert len(f.programs()) <= 3


def test_explain_says_which_number() -> None:
    held = types.SimpleNamespace(factor=1.0)
    f = jit(lambda x: x * held.factor)
    with explain() as log:
        for held.factor in (1.0, 2.0, 3.0, 4.0):
            f(torch.ones(2))
    assert len(log) == 2
    assert "SimpleNamespace.factor was 1.0 and now is 2.0" in log[1]


class _Twice:
    def __init__(self, value: float) -> None:
        self.value = value

    @functools.cached_property
    def twice(self) -> float:
        return self.value * 2


@pytest.mark.parametrize("wrap", [jit, lambda f: jit(grad(lambda x: f(x).sum()))], ids=["", "grad"])
def test_a_cached_property_of_a_number_that_changes(wrap: Any) -> None:
    """What the trace puts into the object's attributes holds no number of the trace."""
    held = _Twice(2.0)
    fast = wrap(lambda x: x * held.twice)
    for k in (2.0, 1, 2, 3, 2.5):
        held.value = k
        vars(held).pop("twice", None)
        assert fast(torch.ones(2)).tolist() == [2 * k, 2 * k]
        assert vars(held) == {"value": k, "twice": 2 * k} and type(held.twice) is type(k)
