"""What a function does to Python objects, it does at each call, under jit as without: beside
PyTorch and torch.func.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import copy
import dataclasses
import gc
import io
import itertools
import random
import weakref
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.func
from python_objects import KINDS, REACHED, WAYS, content, outcome, same

import torchfunc_jax
from torchfunc_jax import explain, jit

UNHASHABLE = ("a set", "a NumPy array", "a NumPy array without dimensions", "a view of memory")


@pytest.mark.thin(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_table(kind: str, reached: str, way: str) -> None:
    if reached == "an argument" and WAYS[way][1] and kind in UNHASHABLE:
        with pytest.raises(TypeError, match="every argument that is no tensor must be hashable"):
            outcome(torchfunc_jax, jit, kind, reached, next(iter(KINDS[kind][1])), way)
        return
    for action in KINDS[kind][1]:
        theirs = outcome(torch.func, None, kind, reached, action, way)
        mine = outcome(torchfunc_jax, jit, kind, reached, action, way)
        assert same(mine, theirs), action


class Kept:
    """An object to keep something in."""

    a: object = None
    b: object = None


INPUTS = [torch.ones(2) * (k + 1) for k in range(4)]


class Counter:
    """A count that is no entry of a dict, and that only a method changes."""

    __slots__ = ("__weakref__", "n")

    def __init__(self) -> None:
        object.__setattr__(self, "n", 0)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("call count()")

    def count(self) -> int:
        object.__setattr__(self, "n", self.n + 1)
        return self.n


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenCounter:
    """A frozen dataclass that changes itself all the same, as caches of such classes do."""

    n: int = 0

    count = Counter.count


@pytest.mark.parametrize("kind", [Counter, FrozenCounter])
def test_a_count_in_a_slot_is_an_input(kind: type) -> None:
    counter = kind()

    @jit
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * counter.count()

    for k in range(1, 15):
        assert same(step(INPUTS[0]), INPUTS[0] * k)
    assert counter.n == 14 and len(step.programs()) == 2


def test_programs_that_keep_a_state_serve_all_calls() -> None:
    """A state in a tuple, a count and a list that only grows need two programs, whatever they hold
    by then.
    """
    kept, log = Kept(), []
    kept.a, kept.b = (torch.zeros(2), torch.zeros(2)), 0

    @jit
    def step(x: torch.Tensor) -> torch.Tensor:
        h, c = kept.a
        kept.b += 1
        kept.a = (h + x, c * 0.5 + x / kept.b)
        log.append(kept.a[1].sum())
        return kept.a[0] * kept.b

    h = c = torch.zeros(2)
    expected = []
    for k in range(1, 6):
        x = torch.ones(2) * k
        h, c = h + x, c * 0.5 + x / k
        expected.append(c.sum())
        assert same(step(x), h * k)
    assert same(kept.a, (h, c)) and kept.b == 5 and same(log, expected)
    assert len(step.programs()) == 2


def test_what_is_kept_twice_is_one_object() -> None:
    kept = Kept()

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        new = [y]
        kept.a, kept.b = new, {"new": new, "y": y}
        new.append(x)
        return y

    compiled = jit(fn)
    for k in range(3):
        x = torch.ones(2) * k
        out = compiled(x)
        assert kept.b["new"] is kept.a and kept.a[1] is x  # type: ignore[index]
        assert kept.a[0] is out and kept.b["y"] is out  # type: ignore[index]


def _appends(
    c: collections.deque[torch.Tensor] | list[torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    c.append(x)
    c.extend([x * 2, x * 3])
    return x + 1


def _moves_to_the_end(
    c: collections.OrderedDict[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    key = next(iter(c))
    c.move_to_end(key)
    return c[key] * x


def _takes_out_and_puts_back(c: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    key = next(iter(c))
    c[key] = c.pop(key) + x
    return c[key] * x


#: What a function does to what it holds; what it holds.
ORDERED: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], object]]] = {
    "a list that gets three elements": (_appends, list),
    "a deque that gets three elements": (_appends, lambda: collections.deque([torch.zeros(2)], 5)),
    "the first key moves to the end": (
        _moves_to_the_end,
        lambda: collections.OrderedDict(a=torch.ones(2), b=torch.zeros(2)),
    ),
    "the first key is taken out and put back": (
        _takes_out_and_puts_back,
        lambda: {"a": torch.ones(2), "b": torch.zeros(2)},
    ),
}


@pytest.mark.parametrize("name", ORDERED)
def test_elements_and_keys_have_the_order_that_the_function_gives_them(name: str) -> None:
    change, make = ORDERED[name]
    mine, theirs = make(), make()
    compiled = jit(lambda x: change(mine, x))
    for x in INPUTS:
        assert same(compiled(x), change(theirs, x)) and same(content(mine), content(theirs))


def test_a_context_variable_that_is_set() -> None:
    state: contextvars.ContextVar[torch.Tensor] = contextvars.ContextVar("state")

    def fn(x: torch.Tensor) -> torch.Tensor:
        state.set(state.get() * 0.5 + x)
        return state.get() * 2

    for run in (fn, jit(fn)):
        state.set(torch.zeros(2))
        h = torch.zeros(2)
        for x in INPUTS:
            h = h * 0.5 + x
            assert same(run(x), h * 2) and same(state.get(), h)


def test_a_dict_that_is_an_argument_gets_new_keys() -> None:
    def fn(x: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
        c["new"] = x * 2
        return x + c["old"]

    compiled = jit(fn)
    for x in INPUTS:
        mine, theirs = {"old": torch.ones(2)}, {"old": torch.ones(2)}
        assert same(compiled(x, mine), fn(x, theirs)) and same(content(mine), content(theirs))


def test_a_set_that_is_emptied_gets_its_members_again() -> None:
    names = set[str]()

    def fn(x: torch.Tensor) -> torch.Tensor:
        names.add("x")
        return x * len(names)

    compiled = jit(fn)
    for x in INPUTS:
        names.clear()
        assert same(compiled(x), x) and names == {"x"}


def test_a_new_container_is_of_the_kind_that_the_function_makes() -> None:
    """A deque keeps its largest length, a defaultdict its function, a named tuple its names."""
    kept, Pair = Kept(), collections.namedtuple("Pair", "first second")

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept.a = collections.deque([x], 2), collections.defaultdict(list, x=[x])
        kept.b = Pair(x, x * 2)
        return x + 1

    compiled = jit(fn)
    for x in INPUTS:
        compiled(x)
        last, found = kept.a  # type: ignore[misc]
        last.extend([1, 2])
        found["y"].append(3)
        assert (
            last.maxlen == 2 and [*last] == [1, 2] and found["y"] == [3] and same(found["x"], [x])
        )
        assert type(kept.b) is Pair and same(kept.b.second, x * 2)  # type: ignore[attr-defined]


class Named(dict[str, torch.Tensor]):
    name = ""


def test_a_new_dict_has_the_order_and_the_attributes_that_the_function_gives_it() -> None:
    kept = Kept()

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept.a = collections.OrderedDict(b=x, a=x * 2)
        kept.b = Named(x=x)
        kept.b.name = "state"
        return x + 1

    compiled = jit(fn)
    for x in INPUTS:
        compiled(x)
        assert type(kept.a) is collections.OrderedDict
        assert [*kept.a] == ["b", "a"]
        assert same(kept.a["a"], x * 2)
        assert type(kept.b) is Named
        assert kept.b.name == "state"
        assert same(kept.b["x"], x)


def test_a_log_of_several_entries_needs_no_program_for_each_call() -> None:
    log = {"loss": [], "steps": 0, "last": None, "norms": {"x": [], "y": []}}
    every: collections.defaultdict[str, list[torch.Tensor]] = collections.defaultdict(list)

    def fn(x: torch.Tensor) -> torch.Tensor:
        log["loss"].append(x.sum())  # type: ignore[attr-defined]
        log["steps"] += 1  # type: ignore[operator]
        log["last"] = x
        for name, value in {"x": x.norm(), "y": 2 * x.norm()}.items():
            log["norms"][name].append(value)  # type: ignore[index]
            every[name].append(value)
        return x * 2

    compiled = jit(fn)
    for k in range(8):
        assert same(compiled(torch.ones(2) * k), torch.ones(2) * 2 * k)
    assert [t.item() for t in log["loss"]] == [2 * k for k in range(8)]  # type: ignore[attr-defined]
    assert log["steps"] == 8 and same(log["last"], torch.ones(2) * 7)
    assert [len(norms) for norms in log["norms"].values()] == [8, 8]  # type: ignore[attr-defined]
    assert [len(norms) for norms in every.values()] == [8, 8]
    assert sum(p.calls for p in compiled.programs()) == 8 and len(compiled.programs()) <= 3


def test_each_call_makes_what_is_new_anew() -> None:
    kept = Kept()

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept.a = Kept()
        kept.a.b = {"x": x}
        return x + 1

    compiled, found = jit(fn), []
    for k in range(3):
        compiled(torch.ones(2) * k)
        found.append(kept.a)
    assert len({id(f) for f in found}) == len({id(f.b) for f in found}) == 3
    assert [f.b["x"][0].item() for f in found] == [0, 1, 2]


def test_a_call_that_fails_leaves_objects_as_they_were() -> None:
    kept = {"h": torch.zeros(2), "log": []}

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept["h"] = x
        kept["log"].append(x)
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        jit(fn)(torch.ones(2))
    assert kept["log"] == [] and same(kept["h"], torch.zeros(2))


def test_nothing_is_kept_alive() -> None:
    def made() -> tuple[weakref.ref[object], weakref.ref[object]]:
        kept = Kept()
        kept.a, kept.b = torch.zeros(2), 0

        def fn(x: torch.Tensor) -> torch.Tensor:
            kept.a = kept.a + x  # type: ignore[operator]
            kept.b += 1  # type: ignore[operator]
            return kept.a.sum()

        compiled = jit(fn)
        for _ in range(3):
            compiled(torch.ones(2))
        return weakref.ref(kept), weakref.ref(compiled)

    found = made()
    gc.collect()
    assert [ref() for ref in found] == [None, None]


NOT_REPEATED = {
    "an iterator": (
        lambda it: lambda x: x * next(it),
        lambda: itertools.count(1),
        "is a count, which gives something else",
    ),
    "a generator": (
        lambda it: lambda x: x * next(it),
        lambda: (k for k in range(9)),
        "is a generator",
    ),
    "Python's random numbers": (
        lambda _: lambda x: x * random.random(),
        lambda: random.seed(0),
        "draws from Python's or NumPy's",
    ),
    "a Random": (
        lambda r: lambda x: x * r.random(),
        lambda: random.Random(0),
        "draws from Python's or NumPy's",
    ),
    "NumPy's random numbers": (
        lambda _: lambda x: x * np.random.rand(),
        lambda: np.random.seed(0),
        "draws from Python's or NumPy's",
    ),
    "a NumPy generator": (
        lambda r: lambda x: x * r.random(),
        lambda: np.random.default_rng(0),
        "draws from Python's or NumPy's",
    ),
    "a hook": (
        lambda layer: (
            lambda x: layer.register_forward_hook(lambda m, args, out: out * 2) and layer(x)
        ),
        lambda: torch.nn.Linear(2, 2),
        "adds or removes hooks of a module",
    ),
    "a new module": (
        lambda kept: lambda x: setattr(kept, "a", _layer(x)) or kept.a(x),
        Kept,
        "keeps a Linear that holds tensors",
    ),
}


def _layer(x: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.scale = x.sum()  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize("name", NOT_REPEATED)
def test_what_no_program_can_repeat(name: str) -> None:
    make, state, reason = NOT_REPEATED[name]
    torch.manual_seed(0)
    plain = make(state())
    theirs = [plain(x) for x in INPUTS]
    torch.manual_seed(0)
    compiled = jit(make(state()))
    with explain(io.StringIO()) as log:
        mine = [compiled(x) for x in INPUTS]
    assert same(mine, theirs)
    assert reason in log[0]
    with pytest.raises(RuntimeError, match=r"which a program for jax\.Arrays cannot follow"):
        jit(make(state()))(jnp.ones(2))


def test_objects_of_one_kind_take_each_others_places() -> None:
    """As in libraries that replace an object by a changed copy: another program only if what the
    function reads differs.
    """
    registry = Kept()
    registry.a = Kept()
    registry.a.b = ("x", 2.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        old = registry.a
        registry.a = Kept()
        registry.a.b = old.b
        return x * old.b[1]

    compiled = jit(fn)
    for factor in (2.0, 2.0, 3.0, 3.0, 2.0):
        registry.a = Kept()
        registry.a.b = ("x", factor)
        assert same(compiled(torch.ones(2)), torch.ones(2) * factor)
    assert len(compiled.programs()) == 2


SAME_TENSOR = {
    "two arguments": lambda a, b: (a, b),
    "in a dict": lambda a, b: ({"a": a, "b": b},),
    "in a list and alone": lambda a, b: ([a], b),
}


@pytest.mark.parametrize("name", SAME_TENSOR)
def test_one_tensor_in_two_places_is_one_inside(name: str) -> None:
    def fn(*args: object) -> torch.Tensor:
        a, b = torch.utils._pytree.tree_leaves(args)
        return a * 2 + b if a is b else a * 3 + b

    compiled = jit(fn)
    for k in range(2):
        a, b = torch.ones(2) + k, torch.zeros(2)
        assert same(compiled(*SAME_TENSOR[name](a, a)), a * 3)
        assert same(compiled(*SAME_TENSOR[name](a, b)), a * 3)
        w = a.clone().requires_grad_()
        compiled(*SAME_TENSOR[name](w, w)).sum().backward()
        assert same(w.grad, torch.full((2,), 3.0))


def test_a_tensor_that_is_written_is_written_in_both_places() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b

    compiled, x = jit(fn), torch.zeros(2)
    with explain(io.StringIO()) as log:
        assert same(compiled(x, x), torch.full((2,), 2.0)) and same(x, torch.ones(2))
    assert not any("the function itself" in line for line in log)


@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (0, 0, None)])
def test_what_a_vmap_does_not_map_is_one_tensor(in_dims: tuple[int | None, ...]) -> None:
    x, found = torch.ones(3), []

    def fn(*args: torch.Tensor) -> torch.Tensor:
        found.append([a is b for a, b in itertools.combinations(args, 2)])
        return sum(args)  # type: ignore[return-value]

    for tf in (torch.func, torchfunc_jax):
        tf.vmap(fn, in_dims)(x, x, x)
    assert found[0] == found[1]


_STATE: object = None
_COUNT = 0


def _of_globals(jitted: bool) -> list[object]:
    global _STATE, _COUNT
    _STATE, _COUNT = torch.zeros(2), 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        global _STATE, _COUNT
        _STATE = _STATE * 0.5 + x  # type: ignore[operator]
        _COUNT += 1
        return _STATE * _COUNT

    run, found = jit(fn) if jitted else fn, []
    for x in INPUTS:
        found += [run(x), _STATE, _COUNT]
    return found


def _of_variables(jitted: bool) -> list[object]:
    state, count = torch.zeros(2), 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal state, count
        state = state * 0.5 + x
        count += 1
        return state * count

    run, found = jit(fn) if jitted else fn, []
    for x in INPUTS:
        found += [run(x), state, count]
    return found


@pytest.mark.parametrize("calls", [_of_globals, _of_variables])
def test_variables_that_are_bound_again(calls: Callable[[bool], list[object]]) -> None:
    assert same(calls(True), calls(False))


class Scaled:
    """Its property is kept under another name, and doubled."""

    def __init__(self) -> None:
        self._scale = 1.0

    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = value * 2

    @scale.deleter
    def scale(self) -> None:
        self._scale = 0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale + 1
        if self.scale > 20:
            del self.scale
        return x * self.scale


class Lazy(torch.nn.Module):
    """It registers its buffer at the first call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(2))
        self.mean: torch.Tensor = 0.9 * self.mean + 0.1 * x
        return x - self.mean


@pytest.mark.parametrize("cls", [Scaled, Lazy])
def test_a_state_that_the_code_sets_by_other_names(cls: type) -> None:
    stateful, plain = cls(), cls()
    run = jit(stateful)
    for x in INPUTS * 2:
        torch.testing.assert_close(run(x), plain(x))
        assert same(content(stateful), content(plain))


class Stateful(torch.nn.Module):
    """A module with a state of each kind: a buffer that is bound again, a dict with a view of its
    argument, a count and a list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.n = torch.nn.Linear(2, 2), 0
        self.kept: dict[str, torch.Tensor] = {"last": torch.zeros(0)}
        self.register_buffer("mean", torch.zeros(2))
        self.log: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = self.layer(x).float() * scale
        self.n += 1
        self.kept["last"], self.kept["view"] = y, x[0]
        self.mean = self.mean * 0.5 + y.mean(0).detach()
        self.log.append(y.sum())
        return (y * self.n).sum()


AROUND = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": lambda: torch.device("cpu"),
}


def _stateful(
    jitted: bool, around: Callable[[], contextlib.AbstractContextManager[object]], changes: bool
) -> list[object]:
    torch.manual_seed(0)
    module, activations, found = Stateful(), [], list[object]()
    module.layer.register_forward_hook(lambda m, args, out: activations.append(out.float().mean()))
    run = jit(module) if jitted else module
    for k in range(6):
        x = (torch.arange(2.0 * (2 + k % 2)).reshape(-1, 2) + k).requires_grad_(k % 3 == 0)
        if changes and k == 3:
            module.eval()
            module.layer.weight = torch.nn.Parameter(torch.eye(2))
        if changes and k == 4:
            module.kept, module.n = {"last": torch.zeros(0)}, 10
        with around():
            out = run(x, 1.0 + k)
        if out.requires_grad:
            out.backward(retain_graph=True)
        found += [
            out.float(),
            x.grad,
            *[t.float() for t in module.kept.values()],
            module.mean.clone(),
            module.n,
        ]
        found += [len(module.log), module.log[-1].float(), len(activations), activations[-1]]
    return found


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_a_module_with_a_state(around: str, changes: bool) -> None:
    """Shapes, numbers, modules and what requires grad change from call to call; hooks keep
    activations.
    """
    theirs, mine = (_stateful(jitted, AROUND[around], changes) for jitted in (False, True))
    loose = 1e-2 if around == "autocast" else 1e-5
    for m, t in zip(mine, theirs, strict=True):
        if isinstance(t, torch.Tensor):
            assert m.requires_grad == t.requires_grad  # type: ignore[attr-defined]
            torch.testing.assert_close(m, t, rtol=loose, atol=loose)
        else:
            assert m == t


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_an_rnn_whose_parameters_are_replaced_is_compiled(kind: type[torch.nn.RNNBase]) -> None:
    """It makes its list of weights anew, and weak references to them, which are no changes that
    anyone can see.
    """
    net = kind(3, 4, batch_first=True).double()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torchfunc_jax.functional_call(net, params, (x,))[0].square().sum()

    f = torchfunc_jax.jit(torchfunc_jax.grad(loss))
    calls = [
        ({name: p + k for name, p in params.items()}, torch.randn(2, 5, 3, dtype=torch.float64))
        for k in range(3)
    ]
    expected = [torch.func.grad(loss)(*given) for given in calls]
    weights = list(net._flat_weights)
    torch.testing.assert_close([f(*given) for given in calls], expected)
    assert len(f.programs()) == 1
    assert sum(p.calls for p in f.programs()) == 3
    assert all(a is b for a, b in zip(net._flat_weights, weights, strict=True))


def _refused_at_two(seen: dict[str, object]) -> Callable[..., torch.Tensor]:
    def f(x: torch.Tensor, shapes: list[object], scale: float) -> torch.Tensor:
        seen["calls"] = seen["calls"] + 1  # type: ignore[operator]
        shapes.append(tuple(x.shape))
        random.random()
        if len(x) == 2:
            raise ValueError("two")
        seen["last"] = x * scale
        return seen["last"] + 1  # type: ignore[operator]

    return f


@pytest.mark.parametrize("way", [lambda f: f, jit], ids=["plain", "jit"])
def test_what_is_done_before_an_exception_stays_done(
    way: Callable[..., Callable[..., torch.Tensor]],
) -> None:
    seen: dict[str, object] = {"calls": 0}
    shapes: list[object] = []
    f = way(_refused_at_two(seen))
    random.seed(0)
    for size in (3, 2, 3, 2, 2, 4):
        if size == 2:
            with pytest.raises(ValueError, match="two"):
                f(torch.ones(2), shapes, 2.0)
        else:
            f(torch.ones(size), shapes, 2.0)
            assert torch.equal(seen["last"], 2 * torch.ones(size))  # type: ignore[arg-type]
    assert seen["calls"] == 6
    assert shapes == [(3,), (2,), (3,), (2,), (2,), (4,)]
    drawn = random.random()
    random.seed(0)
    assert drawn == [random.random() for _ in range(7)][-1]


def test_a_tensor_of_a_trace_that_raises_is_put_nowhere() -> None:
    kept: dict[str, object] = {}

    @jit
    def f(x: torch.Tensor) -> None:
        kept["list"] = [x * 2]
        kept["count"] = 1
        raise KeyError("always")

    for _ in range(2):
        with pytest.raises(KeyError, match="always"):
            f(torch.ones(2))
        assert kept == {"count": 1}


class _Pair:
    def __init__(self, first: object, second: object) -> None:
        self.first, self.second = first, second


@dataclasses.dataclass
class _Record:
    value: torch.Tensor
    step: int = 0


def _suspended(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x * 2
    yield x * 3


async def _awaited(x: torch.Tensor) -> torch.Tensor:
    return x * 2


#: A function, and the tensors in what it has returned.
RETURNED: dict[str, tuple[Callable[..., object], Callable[..., list[torch.Tensor]]]] = {
    "a dataclass": (lambda x: _Record(x * 2, 3), lambda out: [out.value * out.step]),
    "one in a list": (lambda x: [x, _Record(x + 1)], lambda out: [out[0], out[1].value]),
    "objects in objects": (
        lambda x: _Pair(_Pair(x, x * 2), {"k": x + 1}),
        lambda out: [out.first.first, out.first.second, out.second["k"]],
    ),
    "one object twice": (
        lambda x: [_Pair(x * 2, None)] * 2,
        lambda out: [out[0].first, torch.tensor(float(out[0] is out[1]))],
    ),
    "a function": (lambda x: lambda y: x * y, lambda out: [out(torch.ones(3))]),
    "a generator": (_suspended, lambda out: [*out]),
    "a coroutine": (_awaited, lambda out: [asyncio.run(out)]),
    "a distribution": (
        lambda x: torch.distributions.Normal(x, 2.0),
        lambda out: [out.mean, out.variance],
    ),
}


@pytest.mark.parametrize("kind", RETURNED)
def test_an_object_that_is_returned_has_the_tensors_of_its_call(kind: str) -> None:
    function, tensors = RETURNED[kind]
    jitted = jit(function)
    results = [(jitted(torch.arange(3.0) + k), function(torch.arange(3.0) + k)) for k in range(3)]
    for mine, theirs in results:
        assert type(mine) is type(theirs)
        torch.testing.assert_close(tensors(mine), tensors(theirs))


def test_an_object_that_is_returned_and_kept_is_one_object_and_has_gradients() -> None:
    kept, w = [], torch.ones(3, requires_grad=True)

    @jit
    def f(x: torch.Tensor, n: int) -> _Record:
        found = _Record((x * w).sum(), n)
        kept.append(found)
        return found

    for n in range(4):
        out = f(torch.arange(3.0), n)
        assert out is kept[-1]
        assert out.step == n
        out.value.backward()
    torch.testing.assert_close(w.grad, 4 * torch.arange(3.0))
    assert len(kept) == 4
    assert len({*map(id, kept)}) == 4


def test_a_jitted_module_has_the_attributes_of_the_module() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout())
    fast = jit(net)
    assert [*fast.parameters()] == [*net.parameters()]
    fast.eval()
    assert not net.training
    assert fast.state_dict().keys() == net.state_dict().keys()
    with pytest.raises(AttributeError, match="no attribute 'layers'"):
        fast.layers  # noqa: B018
    torch.testing.assert_close(copy.deepcopy(fast)(torch.ones(2)), net(torch.ones(2)))


# -- what the function makes itself, and what keeps its state out of Python's sight ----------------
Function = Callable[[torch.Tensor], torch.Tensor]


def _made_in_a_function() -> Function:
    def f(x: torch.Tensor) -> torch.Tensor:
        f.calls = getattr(f, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * f.calls  # type: ignore[attr-defined]

    return f


def _made_in_a_module() -> Function:
    module = torch.nn.Linear(2, 2)

    def f(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(module, "calls"):
            module.calls = 0
        module.calls += 1
        return x * module.calls

    return f


def _made_in_a_class() -> Function:
    class Counts:
        pass

    def f(x: torch.Tensor) -> torch.Tensor:
        Counts.calls = getattr(Counts, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * Counts.calls  # type: ignore[attr-defined]

    return f


def _made_and_taken_away() -> Function:
    kept = Kept()

    def f(x: torch.Tensor) -> torch.Tensor:
        if hasattr(kept, "seen"):
            del kept.seen
            return x * 2
        kept.seen = True  # type: ignore[attr-defined]
        return x * 3

    return f


def _filled_and_replaced() -> Function:
    kept = Kept()
    kept.a = {}

    def f(x: torch.Tensor) -> torch.Tensor:
        count = len(kept.a)
        kept.a["k"] = x
        kept.a = {}
        return x * (count + 2)

    return f


def _a_new_global() -> Function:
    globals().pop("_new_global", None)

    def f(x: torch.Tensor) -> torch.Tensor:
        global _new_global
        try:
            _new_global += 1  # type: ignore[has-type]
        except NameError:
            _new_global = 1
        return x * _new_global

    return f


def _context_with(*first: int, **options: int) -> Function:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("count", **options)
    for value in first:
        variable.set(value)

    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            before = variable.get()
        except LookupError:
            before = 10
        variable.set(before + 1)
        return x * before * variable.get()

    return f


def _of_a_captured_tensor() -> Function:
    held = torch.zeros(2)
    held.n, held.sum = 0, torch.zeros(2)  # type: ignore[attr-defined]

    def f(x: torch.Tensor) -> torch.Tensor:
        held.n += 1  # type: ignore[attr-defined]
        held.sum = held.sum + x  # type: ignore[attr-defined]
        return held.sum * held.n  # type: ignore[attr-defined]

    return f


def _of_an_argument() -> Function:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.calls = getattr(x, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * x.calls  # type: ignore[attr-defined]

    return f


def _from_a_text() -> Function:
    file = io.StringIO("1\n2\n3\n4\n5\n6\n")
    return lambda x: x * float(file.readline())


def _from_bytes() -> Function:
    file = io.BytesIO(bytes(range(9)))
    return lambda x: x * file.read(1)[0]


#: What makes a function whose result is another one at each call.
CHANGING: dict[str, Callable[[], Function]] = {
    "an attribute of a function": _made_in_a_function,
    "an attribute of a module": _made_in_a_module,
    "an attribute of a class": _made_in_a_class,
    "an attribute that comes and goes": _made_and_taken_away,
    "a dict that is filled and replaced by an empty one": _filled_and_replaced,
    "a new global variable": _a_new_global,
    "a context variable": lambda: _context_with(3),
    "a context variable with a default": lambda: _context_with(default=3),
    "a context variable without a value": _context_with,
    "attributes of a captured tensor": _of_a_captured_tensor,
    "an attribute of an argument": _of_an_argument,
    "a text that is read": _from_a_text,
    "bytes that are read": _from_bytes,
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_the_function_makes_is_there_at_the_next_call(name: str) -> None:
    plain, xs = CHANGING[name](), [torch.ones(2) * k for k in (1, 1, 2, 2, 3)]
    expected = [plain(x) for x in [*xs, xs[0]]]
    for x in xs:
        vars(x).clear()
    jitted = jit(CHANGING[name]())
    torch.testing.assert_close([jitted(x) for x in [*xs, xs[0]]], expected)


def test_an_attribute_that_is_only_set_needs_one_program() -> None:
    kept = Kept()

    @jit
    def f(x: torch.Tensor) -> torch.Tensor:
        kept.last = x * 2  # type: ignore[attr-defined]
        return x + 1

    for x in INPUTS:
        f(x)
        torch.testing.assert_close(kept.last, x * 2)  # type: ignore[attr-defined]
    assert len(f.programs()) == 1


# -- what is changed and returned ------------------------------------------------------------------
@dataclasses.dataclass
class _State:
    m: torch.Tensor
    log: list[torch.Tensor] = dataclasses.field(default_factory=list)


def _entry(d: dict[str, torch.Tensor], x: torch.Tensor) -> object:
    d["m"] = d["m"] * 0.9 + x
    return d


def _new_entries(d: dict[str, object], x: torch.Tensor) -> object:
    d["new"] = {"inner": x}
    d["new"]["m"] = d["m"]  # type: ignore[index]
    return d["new"], d


def _emptied(d: dict[str, torch.Tensor], x: torch.Tensor) -> object:
    x = x + d.pop("m")
    d.clear()
    d["x"] = x
    return d


def _in_another(d: dict[str, torch.Tensor], x: torch.Tensor) -> object:
    d["m"] = x
    return {"kept": [d, d], "x": x}


def _copied(d: dict[str, torch.Tensor], x: torch.Tensor) -> object:
    d["m"] = d["m"] + x
    before = dict(d)
    d["m"] = d["m"] * 2
    return before, {**d}, list(d.values())


def _written(d: dict[str, torch.Tensor], x: torch.Tensor) -> object:
    d["m"].add_(x)
    d["view"] = d["m"][:1]
    return d


def _elements(c: list[torch.Tensor], x: torch.Tensor) -> object:
    c.append(x)
    c[0] = c[0] * x
    return c, c[::-1]


def _attributes_of(s: _State, x: torch.Tensor) -> object:
    s.m = s.m + x
    s.log.append(s.m * 2)
    return s, s.log


def _of_lists(s: _State, x: torch.Tensor) -> object:
    s.log.append(x)
    return s.log


#: What a function does with its first argument, and what that is.
CHANGED_AND_RETURNED: dict[str, tuple[Callable[..., object], Callable[[], object]]] = {
    "an entry of a dict": (_entry, lambda: {"m": torch.ones(2), "k": torch.ones(3)}),
    "new entries": (_new_entries, lambda: {"m": torch.ones(2)}),
    "a dict that is emptied": (_emptied, lambda: {"m": torch.ones(2), "x": torch.ones(2)}),
    "twice in another one": (_in_another, lambda: {"m": torch.ones(2)}),
    "copies": (_copied, lambda: {"m": torch.ones(2)}),
    "a tensor in it is written": (_written, lambda: {"m": torch.ones(2)}),
    "a list": (_elements, lambda: [torch.ones(2)]),
    "a deque": (lambda c, x: (c.append(x), c)[1], lambda: collections.deque([torch.ones(2)], 2)),
    "a dataclass": (_attributes_of, lambda: _State(torch.ones(2))),
    "a list in it": (_of_lists, lambda: _State(torch.ones(2))),
}


def _held(x: object) -> object:
    """What an object holds, and where it holds one object twice."""
    seen: dict[int, int] = {}

    def of(x: object) -> object:
        if isinstance(x, torch.Tensor):
            return x
        number = seen.setdefault(id(x), len(seen))
        return number, content(x) if dataclasses.is_dataclass(x) else [of(v) for v in _parts(x)]

    return of(x)


def _parts(x: object) -> list[object]:
    return [*x.values()] if isinstance(x, dict) else list(x)  # type: ignore[call-overload]


@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
@pytest.mark.parametrize("name", CHANGED_AND_RETURNED)
def test_what_the_function_changes_and_returns(name: str, captured: bool) -> None:
    function, make = CHANGED_AND_RETURNED[name]
    mine, theirs = make(), make()
    jitted = jit((lambda x: function(mine, x)) if captured else function)
    for k in range(4):
        if name == "a dict that is emptied":
            for d in (mine, theirs):
                d["m"] = torch.ones(2)  # type: ignore[index]
        x = torch.tensor([0.5, 2.0]) * (k + 1)
        out = jitted(x) if captured else jitted(mine, x)
        expected = function(theirs, x)
        assert same(_held([mine, out]), _held([theirs, expected]))


def test_a_donated_state_that_is_changed_and_returned() -> None:
    """The tensors of the old state are dead, so that the result is another dict, as from JAX."""
    jitted = jit(_entry, donate=(0,))
    state = {"m": torch.ones(2), "k": torch.ones(3)}
    theirs = copy.deepcopy(state)
    for k in range(4):
        state = jitted(state, torch.ones(2) * k)
        assert same(content(state), content(_entry(theirs, torch.ones(2) * k)))


@pytest.mark.parametrize("kind", ["a dict", "a list", "an object"])
def test_another_object_that_took_its_place_is_changed_and_returned(kind: str) -> None:
    make: Callable[[float], object] = {
        "a dict": lambda v: {"m": torch.full((2,), v)},
        "a list": lambda v: [torch.full((2,), v)],
        "an object": lambda v: _State(torch.full((2,), v)),
    }[kind]
    held = Kept()

    def f(x: torch.Tensor) -> object:
        old = held.a
        if kind == "an object":
            old.m = old.m + x  # type: ignore[union-attr]
        else:
            key = "m" if kind == "a dict" else 0
            old[key] = old[key] + x  # type: ignore[index]
        return old

    jitted = jit(f)
    for k in range(4):
        held.a = make(float(k))
        out = jitted(torch.ones(2))
        assert out is held.a
        assert same(content(out), content(make(k + 1.0)))


def test_what_is_returned_is_what_was_changed_and_not_what_takes_its_place() -> None:
    held = Kept()
    held.a = {"m": torch.zeros(2)}

    @jit
    def f(x: torch.Tensor) -> object:
        old = held.a
        old["m"] = old["m"] + x
        held.a = {"m": x * 5}
        return old

    for k in range(4):
        before = held.a
        expected = before["m"] + k
        out = f(torch.ones(2) * k)
        assert out is before
        assert same(out["m"], expected)
        assert same(held.a["m"], torch.ones(2) * k * 5)
