"""Objects of a user's classes among the arguments of a jitted function, such as batches: beside the
function itself in PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ambient import torch_func_gives_zeros
from torch.overrides import TorchFunctionMode

from torchfunc_jax import grad, jit, vmap


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


def namespace(
    x: torch.Tensor, y: torch.Tensor, n: int = 1, inner: Any = None
) -> types.SimpleNamespace:
    return types.SimpleNamespace(x=x, y=y, n=n, inner=inner, log=[])


KINDS: dict[str, Callable[..., Any]] = {
    "plain": Batch,
    "dataclass": Compared,
    "frozen": Frozen,
    "slots": Slotted,
    "namespace": namespace,
}


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


ACTIONS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    f.__name__: f for f in (sets, replaces, deletes, appends, changes_inner)
}


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
    # the first one is compared by identity where that is possible, a number is an input from its
    # first change on
    assert len(f.programs()) <= 3
    assert max(p.calls for p in f.programs()) >= 5
    if kind != "frozen":
        assert any(
            "args[0].x" in argument or "args[0]['x']" in argument
            for p in f.programs()
            for argument in p.arguments
        )


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
    f = jit(
        lambda batches, scale: [
            grad(lambda x, y=b.y: (x * y * scale).sum())(b.x) for b in batches["all"]
        ]
    )
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


# -- what lies beside an object, and what holds it too ---------------------------------------------
def writes_to_a_dict(d: dict[str, Any], b: Batch) -> torch.Tensor:
    d["y"] = b.x * 2
    d["list"].append(b.x.sum())
    return d["y"].sum()


def test_a_dict_beside_an_object_is_written_to() -> None:
    def found(function: Callable[..., torch.Tensor]) -> list[Any]:
        dicts: list[dict[str, Any]] = [{"list": []} for _ in range(4)]
        for k, d in enumerate(dicts):
            function(d, Batch(torch.ones(2) * k, torch.ones(2)))
        return [(content(list(d)), content(d["y"]), content(d["list"])) for d in dicts]

    assert found(jit(writes_to_a_dict)) == found(writes_to_a_dict)


def test_the_function_itself_writes_to_the_dict_itself() -> None:
    @jit
    def f(d: dict[str, torch.Tensor], word: str) -> torch.Tensor:
        torch.manual_seed(0)  # which makes jit call the function itself
        d[word] = d["x"] * 2
        return d[word]

    for k in range(3):
        d = {"x": torch.ones(2) * k}
        assert f(d, "y") is d["y"]


def test_a_dict_beside_a_sparse_tensor_is_written_to() -> None:
    @jit
    def f(d: dict[str, torch.Tensor], m: torch.Tensor) -> torch.Tensor:
        d["out"] = m @ d["x"]
        return d["out"].sum()

    for k in range(3):
        d = {"x": torch.full((2, 2), float(k))}
        f(d, torch.eye(2).to_sparse())
        torch.testing.assert_close(d["out"], d["x"])


def through_the_inner(a: Batch, b: Batch) -> torch.Tensor:
    a.inner.x = a.inner.x + 1
    return b.inner.x * 1


KNOWN: list[Any] = [None]


def through_a_global(a: Batch, _: Batch) -> torch.Tensor:
    a.x = a.x + 1
    return KNOWN[0].x * 1


@pytest.mark.parametrize("function", [through_the_inner, through_a_global])
def test_an_object_that_is_reached_in_two_ways_is_one(
    function: Callable[..., torch.Tensor],
) -> None:
    def found(called: Callable[..., torch.Tensor]) -> list[Any]:
        results = []
        for k in range(4):
            inner = Batch(torch.zeros(1) + k, torch.zeros(1))
            a, b = (Batch(torch.ones(1) * k, torch.ones(1), inner=inner) for _ in range(2))
            KNOWN[0] = a
            results.append((content(called(a, b)), content(inner.x), content(a.x)))
        return results

    assert found(jit(function)) == found(function)


# -- the states of PyTorch -------------------------------------------------------------------------
class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def needing_grad(x: torch.Tensor) -> Batch:
    return Batch(x.requires_grad_(), torch.ones(3), 2)


def hooked(x: torch.Tensor) -> Batch:
    b = needing_grad(x)
    b.x.register_hook(lambda g: 3 * g)
    return b


#: How the object is made of a tensor, and what is entered around the call.
STATES: dict[str, tuple[Callable[[torch.Tensor], Batch], Callable[[], Any]]] = {
    "plain": (lambda x: Batch(x, torch.ones(3)), contextlib.nullcontext),
    "requires grad": (needing_grad, contextlib.nullcontext),
    "a result that requires grad": (
        lambda x: Batch(x.requires_grad_() * 2, torch.ones(3)),
        contextlib.nullcontext,
    ),
    "a hook": (hooked, contextlib.nullcontext),
    "a parameter": (lambda x: Batch(torch.nn.Parameter(x), torch.ones(3)), contextlib.nullcontext),
    "views of one memory": (
        lambda x: (lambda t: Batch(t[0], t[1]))(torch.stack([x, x + 1])),
        contextlib.nullcontext,
    ),
    "one tensor twice": (lambda x: Batch(x, x), contextlib.nullcontext),
    "not contiguous": (
        lambda x: Batch(torch.stack([x, x], 1)[:, 0], torch.ones(3)),
        contextlib.nullcontext,
    ),
    "no_grad": (needing_grad, torch.no_grad),
    "inference mode": (lambda x: Batch(x, torch.ones(3)), torch.inference_mode),
    "autocast": (needing_grad, lambda: torch.autocast("cpu", torch.bfloat16)),
    "a function mode": (needing_grad, Passing),
    "another default dtype": (lambda x: Batch(x, torch.ones(3)), in_float64),
}
LAYER = torch.nn.Linear(3, 3)


def read(b: Batch) -> torch.Tensor:
    return (LAYER(b.x) * b.y * b.n).sum() + torch.ones(())


def written(b: Batch) -> torch.Tensor:
    b.seen = b.x.detach() * 2
    b.y.mul_(2)
    return (b.x * b.y).sum()


def nested(b: Batch) -> torch.Tensor:
    return vmap(grad(lambda x: (x**2 * b.y).sum()))(torch.stack([b.x, b.x + b.n])).sum()


@pytest.mark.parametrize("function", [read, written, nested])
@pytest.mark.parametrize("state", STATES)
def test_states_of_pytorch(state: str, function: Callable[[Batch], torch.Tensor]) -> None:
    """Values, numbers and the module's weights change from call to call."""
    if (state, function) == ("inference mode", nested) and torch_func_gives_zeros():
        pytest.skip("torch.func's derivatives in inference mode are zero")
    make, around = STATES[state]

    def found(called: Callable[[Batch], torch.Tensor]) -> list[Any]:
        results: list[Any] = []
        torch.manual_seed(0)
        with torch.no_grad():
            LAYER.weight.fill_(0.5)
        for k in range(5):
            b = make(torch.arange(3.0) + k)
            LAYER.zero_grad()
            with around():
                try:
                    out = called(b)
                except RuntimeError as error:
                    results.append(type(error))
                    continue
            results += [
                out.dtype,
                out.requires_grad,
                content(out),
                content(b.y),
                content(getattr(b, "seen", None)),
            ]
            if out.requires_grad:
                out.backward()
                results += [content(b.x.grad) if b.x.is_leaf else None, content(LAYER.weight.grad)]
            with torch.no_grad():
                LAYER.weight.mul_(1.5)
        return results

    theirs, mine = found(function), found(jit(function))
    assert len(mine) == len(theirs)
    for m, t in zip(mine, theirs, strict=True):
        if isinstance(t, float | list):
            torch.testing.assert_close(
                torch.tensor(m),
                torch.tensor(t),
                rtol=1e-2 if state == "autocast" else 1e-5,
                atol=1e-5,
            )
        else:
            assert m == t
