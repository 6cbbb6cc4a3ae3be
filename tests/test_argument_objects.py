"""Objects of a user's classes among the arguments of a jitted function, such as batches: beside the function itself in PyTorch."""
from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchfunc_jax import grad, jit


class Batch:
    def __init__(self, x: torch.Tensor, y: torch.Tensor, n: int = 1, inner: Any = None) -> None:
        self.x, self.y, self.n, self.inner, self.log = x, y, n, inner, []

    def product(self) -> torch.Tensor:
        return self.x * self.y * self.n


@dataclasses.dataclass
class Compared:
    x: torch.Tensor
    y: torch.Tensor
    n: int = 1
    inner: Any = None
    log: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    n: int = 1
    inner: Any = None
    log: list[Any] = dataclasses.field(default_factory=list)


class Slotted:
    __slots__ = ("inner", "log", "n", "x", "y")

    def __init__(self, x: torch.Tensor, y: torch.Tensor, n: int = 1, inner: Any = None) -> None:
        self.x, self.y, self.n, self.inner, self.log = x, y, n, inner, []


def namespace(x: torch.Tensor, y: torch.Tensor, n: int = 1, inner: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(x=x, y=y, n=n, inner=inner, log=[])


KINDS: dict[str, Callable[..., Any]] = {"plain": Batch, "dataclass": Compared, "frozen": Frozen, "slots": Slotted, "namespace": namespace}


def sets(b: Any, w: torch.Tensor) -> Any:
    b.out = b.x * w
    b.n += 1
    return b.out.sum() * b.n


def replaces(b: Any, w: torch.Tensor) -> Any:
    b.x = b.x * w
    b.y.add_(1)
    return (b.x * b.y).sum()


def deletes(b: Any, w: torch.Tensor) -> Any:
    out = (b.x * w).sum()
    del b.y
    return out


def appends(b: Any, w: torch.Tensor) -> Any:
    b.log.append((b.x * w).sum())
    b.log.append("end")
    return b.log[0]


def changes_inner(b: Any, w: torch.Tensor) -> Any:
    if b.inner is None:
        return (b.x * w).sum()
    b.inner.x = b.inner.x + w
    b.inner.log.append(b.inner.n)
    return b.inner.x.sum()


ACTIONS: dict[str, Callable[[Any, torch.Tensor], Any]] = {f.__name__: f for f in (sets, replaces, deletes, appends, changes_inner)}


def content(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().tolist()
    if isinstance(x, list | tuple):
        return [content(v) for v in x]
    if isinstance(x, int | str | None):
        return x
    names = getattr(type(x), "__slots__", None) or vars(x)
    return {name: content(getattr(x, name)) for name in names if hasattr(x, name)}


def outcome(function: Callable[..., Any], make: Callable[..., Any]) -> list[Any]:
    w, found = torch.full((3,), 2.0, requires_grad=True), []
    for k in range(6):
        inner = make(torch.ones(3) * k, torch.zeros(3), k) if k % 3 == 2 else None
        b = make(torch.arange(3.0) + k, torch.ones(3), k, inner)
        out = function(b, w)
        out.backward()
        found.append((content(out), content(b), content(w.grad)))
    return found


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_done_to_the_object(kind: str, action: str) -> None:
    if (kind == "frozen" and action not in ("appends",)) or (kind == "slots" and action == "sets"):
        pytest.skip("its attributes cannot be set")
    assert outcome(jit(ACTIONS[action]), KINDS[kind]) == outcome(ACTIONS[action], KINDS[kind])


@pytest.mark.parametrize("kind", ["plain", "dataclass", "frozen", "namespace"])
def test_objects_of_one_structure_share_a_program(kind: str) -> None:
    f = jit(lambda b: (b.x * b.y).sum() * b.n)
    for k in range(8):
        b = KINDS[kind](torch.full((3,), float(k)), torch.ones(3), k)
        torch.testing.assert_close(f(b), torch.tensor(3.0 * k * k))
    # the first one is compared by identity where that is possible, a number is an input from its first change on
    assert len(f.programs()) <= 3
    assert max(p.calls for p in f.programs()) >= 5
    if kind != "frozen":
        assert any("args[0].x" in argument or "args[0]['x']" in argument for p in f.programs() for argument in p.arguments)


def test_the_object_is_itself_where_it_is_returned_or_kept() -> None:
    kept: list[Any] = []

    @jit
    def f(b: Batch) -> tuple[Batch, dict[str, Batch]]:
        kept.append(b)
        b.x = b.x * 2
        return b, {"again": b}

    for k in range(4):
        b = Batch(torch.ones(2) * k, torch.ones(2))
        one, two = f(b)
        assert one is b
        assert two["again"] is b
        assert kept[-1] is b
        assert b.x.tolist() == [2.0 * k] * 2


def test_one_object_at_two_places_and_objects_that_are_more_than_data() -> None:
    f = jit(lambda a, b: (a.x + b.x, a is b))
    one, other = (Batch(torch.ones(2) * k, torch.ones(2)) for k in range(2))
    for a, b in ((one, other), (one, one), (other, other), (other, one)):
        out, same = f(a, b)
        assert same is (a is b)
        torch.testing.assert_close(out, a.x + b.x)

    class Agent(Batch):
        """It refers to itself, and to a function."""

        def __init__(self, scale: float) -> None:
            super().__init__(torch.ones(2) * scale, torch.ones(2))
            self.call = self.product

    g = jit(lambda agent: agent.call())
    agents = [Agent(float(k)) for k in range(3)]
    for agent in agents * 2:
        torch.testing.assert_close(g(agent), agent.x)


def test_nested_objects_lists_of_them_and_changing_structures() -> None:
    f = jit(lambda batches, scale: [grad(lambda x, y=b.y: (x * y * scale).sum())(b.x) for b in batches["all"]])
    for sizes in ((2, 3), (2, 3), (3, 3), (1,), (2, 3)):
        batches = {"all": [Compared(torch.ones(n), torch.arange(float(n))) for n in sizes]}
        torch.testing.assert_close(f(batches, 3.0), [3.0 * torch.arange(float(n)) for n in sizes])
    assert len(f.programs()) == 3


def test_the_function_itself_gets_the_objects_themselves() -> None:
    seen = []

    @jit
    def f(b: Compared) -> torch.Tensor:
        seen.append(b)
        torch.manual_seed(0)  # which makes jit call the function itself
        return b.x + torch.rand(())

    b = Compared(torch.zeros(1), torch.ones(1))
    first, second = f(b), f(b)
    assert torch.equal(first, second)
    assert seen[-1] is b


def test_threads_with_objects_of_their_own() -> None:
    f, wrong = jit(lambda b: (b.x * b.y).sum()), []

    def calls(k: int) -> None:
        for n in range(20):
            found = f(Batch(torch.full((2 + n % 3,), float(k)), torch.ones(2 + n % 3)))
            if found.item() != k * (2 + n % 3):
                wrong.append((k, n, found))

    threads = [threading.Thread(target=calls, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
