"""What is done between the calls of a jitted function to the objects that it reaches: beside the
function without jit. A table of cases; each runs a loop of calls and returns what it has seen.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchfunc_jax import jit

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]
Case = Callable[[Jit], Any]


def _alike(mine: Any, theirs: Any) -> None:
    """Check two outcomes; numbers within rounding."""
    assert type(mine) is type(theirs)
    if isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs)
        for m, t in zip(mine, theirs, strict=True):
            _alike(m, t)
    elif isinstance(theirs, float):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    else:
        assert mine == theirs


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """The loss of one step of training."""
    optimizer.zero_grad()
    loss = (model(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


# -- which tensors require grad --------------------------------------------------------------------
def _frozen_in_a_step(jit: Jit) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, seen = jit(lambda x: _trained(model, optimizer, x)), []
    for k in range(6):
        if k == 3:
            model[0].weight.requires_grad_(False)
            model[0].weight.grad = None
        seen.append(step(torch.ones(5, 3)).item())
    return seen, model[0].weight.grad is None, model[0].weight.sum().item()


def _frozen_for_one_call(jit: Jit) -> Any:
    w, b = (torch.ones(3, requires_grad=True) for _ in range(2))

    @jit
    def f(x: torch.Tensor) -> torch.Tensor:
        w.grad = b.grad = None
        loss = (w * x + b).sum()
        loss.backward()
        return loss.detach()

    seen = []
    for k in range(5):
        w.requires_grad_(k != 2)
        seen.append((f(torch.ones(3)).item(), w.grad is None, b.grad is None))
    return seen


def _frozen_in_an_argument(jit: Jit) -> Any:
    layer = nn.Linear(3, 1)

    @jit
    def f(m: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        (m(x) ** 2).mean().backward()
        return x

    seen = []
    for k in range(5):
        layer.zero_grad()
        layer.weight.requires_grad_(k in (0, 3))
        f(layer, torch.ones(5, 3))
        seen.append((layer.weight.grad is None, layer.bias.grad is None))
    return seen


def _all_frozen(jit: Jit) -> Any:
    w = torch.ones(3, requires_grad=True)

    @jit
    def f(x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad((w * x).sum(), w)
        return gradient

    seen: list[Any] = [f(torch.ones(3)).sum().item()]
    w.requires_grad_(False)
    try:
        f(torch.ones(3))
    except RuntimeError as error:
        seen.append("does not require grad" in str(error))
    w.requires_grad_()
    return [*seen, f(torch.ones(3) * 2).sum().item()]


def _another_kind_of_hook(jit: Jit) -> Any:
    w, log = torch.ones(3, requires_grad=True), []
    w.register_hook(lambda g: g * 2)

    @jit
    def f(x: torch.Tensor) -> torch.Tensor:
        w.grad = None
        (w * x).sum().backward()
        return x

    for k in range(5):
        if k == 2:
            w.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.sum().item()))
        f(torch.ones(3))
    return log, w.grad.sum().item()


# -- an optimizer's state --------------------------------------------------------------------------
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
_OF_STATE: dict[str, Callable[[Any, Any], Any]] = {
    "replaced": lambda o, _: setattr(o, "state", collections.defaultdict(dict)),
    "loaded": lambda o, fresh: o.load_state_dict(copy.deepcopy(fresh)),
    "cleared": lambda o, _: o.state.clear(),
}


def _state(optimizer: str, change: str) -> Case:
    def case(jit: Jit) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        o = _OPTIMIZERS[optimizer](model.parameters())
        fresh = copy.deepcopy(o.state_dict())
        step = jit(lambda x: _trained(model, o, x))
        seen: list[Any] = []
        for k in range(7):
            if k == 4:
                _OF_STATE[change](o, fresh)
            seen.append(step(torch.ones(5, 3)).item())
            seen.append([len(entries) for entries in o.state.values()])
        return seen

    return case


# -- attributes that the function only sets --------------------------------------------------------
class _Plain:
    v: Any


class _Slotted:
    __slots__ = ("v",)


class _WithProperty:
    def __init__(self) -> None:
        self._v: Any = None

    @property
    def v(self) -> Any:
        return self._v

    @v.setter
    def v(self, value: Any) -> None:
        self._v = value


_HELD: Any = None
_OWNERS: dict[str, Callable[[], Any]] = {
    "an object": _Plain,
    "slots": _Slotted,
    "a property": _WithProperty,
    "a class": lambda: type("Held", (), {}),
    "a module": lambda: nn.Linear(1, 1),
    "a namespace": types.SimpleNamespace,
}


def _setting(owner: Any, how: str, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def by_statement(x: torch.Tensor) -> torch.Tensor:
        owner.v = copy.copy(value)
        return x * 2

    def by_setattr(x: torch.Tensor) -> torch.Tensor:
        setattr(owner, "v", copy.copy(value))  # noqa: B010
        return x * 2

    def twice(x: torch.Tensor) -> torch.Tensor:
        owner.v = "busy"
        try:
            return x * 2
        finally:
            owner.v = copy.copy(value)

    def through_a_global(x: torch.Tensor) -> torch.Tensor:
        _HELD.v = copy.copy(value)
        return x * 2

    return {
        "a statement": by_statement,
        "setattr": by_setattr,
        "twice": twice,
        "a global": through_a_global,
    }[how]


def _set_again(owner: str, how: str) -> Case:
    """The function sets an attribute to what it was when it was traced; others change it."""

    def case(jit: Jit) -> Any:
        global _HELD
        seen: list[Any] = []
        for value in (None, False, 0, 0.0, "a", [], ()):
            held = _HELD = _OWNERS[owner]()
            held.v = copy.copy(value)
            f = jit(_setting(held, how, value))
            for k in range(5):
                f(torch.ones(2))
                seen.append(repr(held.v))
                held.v = [7, "b", torch.ones(1), None, 8][k]
        return seen

    return case


def _set_in_one_branch(jit: Jit) -> Any:
    held = types.SimpleNamespace(last=None)

    def f(x: torch.Tensor, reset: bool) -> torch.Tensor:
        if reset:
            held.last = None
        return x * 2

    f = jit(f)
    seen = []
    for k in range(12):
        f(torch.ones(2), k % 5 == 4)
        seen.append(held.last is None)
        held.last = torch.ones(2) * k
    if hasattr(f, "programs"):
        assert len(f.programs()) <= 4, "an attribute that it does not set is no condition"
    return seen


def _global_set_again(jit: Jit) -> Any:
    global _HELD
    _HELD = None

    def f(x: torch.Tensor) -> torch.Tensor:
        global _HELD
        _HELD = None
        return x

    f, seen = jit(f), []
    for k in range(4):
        f(torch.ones(2))
        seen.append(_HELD)
        _HELD = k
    return seen


# -- sets and dicts --------------------------------------------------------------------------------
def _added_to_a_set(jit: Jit) -> Any:
    held: set[str] = set()

    def f(x: torch.Tensor, key: str) -> torch.Tensor:
        held.add(key)
        return x * 2

    f, seen = jit(f), []
    for k, key in enumerate("abacabbc"):
        f(torch.ones(2), key)
        if k == 3:
            held.add("z")
        if k == 5:
            held.remove("b")
        seen.append(sorted(held))
    if hasattr(f, "programs"):
        assert len(f.programs()) <= 5, "what else is in the set is no condition"
    return seen


_FACTORIES: dict[str, Callable[[], Any]] = {
    "a defaultdict of numbers": lambda: collections.defaultdict(int),
    "a defaultdict of dicts": lambda: collections.defaultdict(dict),
    "a defaultdict of lists": lambda: collections.defaultdict(list),
    "a Counter": collections.Counter,
}


def _missing_entries(kind: str) -> Case:
    def case(jit: Jit) -> Any:
        held = _FACTORIES[kind]()

        def f(x: torch.Tensor) -> torch.Tensor:
            if kind == "a defaultdict of dicts":
                held["n"]["k"] = held["n"].get("k", 0) + 1
                return x * held["n"]["k"]
            if kind == "a defaultdict of lists":
                held["n"].append(x.sum())
                return x * len(held["n"])
            held["n"] += 1
            return x * held["n"] * (2 if held.get("m") is None else 3)

        f, seen = jit(f), []
        for k in range(9):
            seen.append(f(torch.ones(2)).tolist())
            if k in (3, 6):
                held.clear()
            if k == 5:
                held["m"]
            seen.append([(key, len(repr(value)) > 2) for key, value in held.items()])
        return seen

    return case


# -- exceptions ------------------------------------------------------------------------------------
def _raised(kind: type[BaseException]) -> Case:
    def case(jit: Jit) -> Any:
        log, held = [], types.SimpleNamespace(n=0)

        @jit
        def f(x: torch.Tensor, bad: bool) -> torch.Tensor:
            log.append("begun")
            held.n += 1
            if bad:
                raise kind("as asked for")
            log.append("done")
            return x * held.n

        seen: list[Any] = []
        for bad in (False, True, False, True, True, False):
            try:
                seen.append(f(torch.ones(2), bad).tolist())
            except kind as error:
                seen.append(str(error))
            seen.append((len(log), held.n))
        return seen

    return case


# -- objects deep in others ------------------------------------------------------------------------
class _Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return _trained(self.model, self.optimizer, x)


class _Application:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def _exchanged(t: _Trainer) -> None:
    t.model.weight = nn.Parameter(t.model.weight.detach() * 0.5)


_DEEP_CHANGES: dict[str, Callable[[_Trainer], Any]] = {
    "a rate": lambda t: t.optimizer.param_groups[0].update(
        lr=t.optimizer.param_groups[0]["lr"] / 2
    ),
    "a parameter": _exchanged,
    "the list of parameters": lambda t: t.optimizer.param_groups[0]["params"].pop(),
    "requires_grad": lambda t: t.model.weight.requires_grad_(False),
}


def _deep(levels: int, change: str) -> Case:
    def case(jit: Jit) -> Any:
        held: Any = _Trainer()
        for _ in range(levels):
            held = _Application(held)

        def trainer() -> _Trainer:
            found = held
            for _ in range(levels):
                found = found.inner
            return found  # type: ignore[no-any-return]

        f, seen = jit(lambda x: trainer().step(x)), []
        for k in range(6):
            seen.append(f(torch.ones(5, 3)).item())
            if k in (2, 4) and len(trainer().optimizer.param_groups[0]["params"]) > 1:
                _DEEP_CHANGES[change](trainer())
            seen.append(trainer().model.weight.sum().item())
        return seen

    return case


# -- caches of answers -----------------------------------------------------------------------------
class _WithCache:
    def __init__(self) -> None:
        self.log: list[Any] = []

    @functools.cache  # noqa: B019
    def twice(self, k: Any) -> Any:
        self.log.append(repr(k))
        return k * 2


def _cached_method(jit: Jit) -> Any:
    held, seen = _WithCache(), []
    f = jit(lambda x, k, scale: x * held.twice(k) * scale)
    for n, k in enumerate((1, 1, 2, 2, 1, 3)):
        seen.append((f(torch.ones(2), k, n / 2).tolist(), [*held.log], repr(held.twice(k))))
    return seen


def _cached_function_without_arguments(jit: Jit) -> Any:
    log = []

    @functools.cache
    def factor() -> float:
        log.append("asked")
        return 2.0

    f = jit(lambda x: x * factor())
    return [(f(torch.ones(2)).tolist(), len(log)) for _ in range(4)]


def _numbers_as_keys(jit: Jit) -> Any:
    held: dict[Any, str] = {1: "a", 2: "b"}

    def f(x: torch.Tensor, k: int, scale: float) -> torch.Tensor:
        held[k] = held.get(k, "c") + "d"
        return x * len(held[k]) * scale

    f, seen = jit(f), []
    for n, k in enumerate((1, 2, 3, 3, 1)):
        seen.append((f(torch.ones(2), k, n / 2).tolist(), [repr(x) for x in held.items()]))
    return seen


CASES: dict[str, Case] = {
    "a cached method": _cached_method,
    "a cached function without arguments": _cached_function_without_arguments,
    "numbers as keys of a dict": _numbers_as_keys,
    **{
        f"{kind.__name__} ends a call": _raised(kind)
        for kind in (ValueError, KeyboardInterrupt, SystemExit)
    },
    "a parameter is frozen between steps": _frozen_in_a_step,
    "a tensor is frozen for one call": _frozen_for_one_call,
    "a parameter of an argument is frozen": _frozen_in_an_argument,
    "nothing requires grad any more": _all_frozen,
    "a tensor with a hook gets one of another kind": _another_kind_of_hook,
    **{f"the state of {o} is {c}": _state(o, c) for o in _OPTIMIZERS for c in _OF_STATE},
    **{
        f"{o} is set by {how}": _set_again(o, how)
        for o in _OWNERS
        for how in ("a statement", "setattr", "twice", "a global")
    },
    "an attribute is set in one branch": _set_in_one_branch,
    "a global variable is set": _global_set_again,
    "a set is added to": _added_to_a_set,
    **{
        f"{change} of an optimizer in {levels} objects": _deep(levels, change)
        for change in _DEEP_CHANGES
        for levels in (0, 1, 3, 7)
    },
    **{f"{kind} has no entry": _missing_entries(kind) for kind in _FACTORIES},
}


@pytest.mark.parametrize("case", CASES)
def test_as_without_jit(case: str) -> None:
    _alike(CASES[case](jit), CASES[case](lambda f: f))


# -- numbers that change at each call --------------------------------------------------------------
def _one_cycle(p: Any) -> Any:
    o = torch.optim.AdamW(p)
    return o, torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20)


def _sequential(p: Any) -> Any:
    o, rates = torch.optim.SGD(p, lr=0.1), torch.optim.lr_scheduler
    parts = [rates.LinearLR(o, total_iters=3), rates.CosineAnnealingLR(o, 10)]
    return o, rates.SequentialLR(o, parts, milestones=[4])


def _cyclic(p: Any) -> Any:
    o = torch.optim.SGD(p, lr=0.1, momentum=0.9)
    return o, torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=4)


@pytest.mark.parametrize("make", [_one_cycle, _sequential, _cyclic])
def test_a_schedule_of_rates_needs_few_programs(make: Callable[[Any], Any]) -> None:
    """The rates and momenta of an optimizer's groups, also those in tuples, are inputs."""

    def losses(jit: Any) -> Iterator[Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        o, schedule = make(model.parameters())

        @jit
        def step(x: torch.Tensor) -> torch.Tensor:
            if len(x) == 99:  # so that the function reaches the schedule too
                schedule.step()
            return _trained(model, o, x)

        for _ in range(14):
            yield step(torch.ones(5, 3)).item()
            schedule.step()
        yield step

    *mine, compiled = losses(jit)
    *theirs, _ = losses(lambda f: f)
    _alike(mine, theirs)
    assert len(compiled.programs()) <= 5


def test_a_number_in_a_tuple_that_changes_needs_one_more_program() -> None:
    held = types.SimpleNamespace(betas=(0.9, 0.99), deep=({"a": (1.0, 2.0)},))

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * held.betas[0] + held.betas[1] + held.deep[0]["a"][1]

    compiled = jit(f)
    for k in range(6):
        held.betas = (0.9, 0.5 + k)
        held.deep = ({"a": (1.0, k * 1.5)},)
        torch.testing.assert_close(compiled(torch.ones(3)), f(torch.ones(3)))
    assert len(compiled.programs()) <= 3


# -- objects without a hash ------------------------------------------------------------------------
@dataclasses.dataclass
class _Options:
    scale: float = 2.0
    times: int = 2
    name: str = "tanh"
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    function: Any = None


def test_a_dataclass_of_options_is_compared_by_content() -> None:
    @jit
    def f(x: torch.Tensor, options: _Options) -> torch.Tensor:
        for _ in range(options.times):
            x = x * options.scale
        return getattr(torch, options.name)(x) + sum(options.sizes)

    x = torch.ones(3)
    for given in ({}, {"scale": 0.2}, {"scale": 0.3}, {"times": 3}, {"name": "sin"}, {}):
        options = _Options(**given)  # type: ignore[arg-type]
        torch.testing.assert_close(f(x, options), f.__wrapped__(x, options))
        options.sizes.append(4)
        torch.testing.assert_close(f(x, options=options), f.__wrapped__(x, options))
    assert len(f.programs()) <= 12


def test_the_first_call_of_a_lazy_module_makes_its_parameters() -> None:
    results = []
    for wrap in (jit, lambda f: f):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(1))
        f = wrap(layer)
        results.append([f(torch.ones(2, 4) * k) for k in range(3)])
        assert type(layer[0]) is nn.Linear
    torch.testing.assert_close(*results)


def test_a_dataclass_with_a_module_is_compared_by_identity() -> None:
    options = _Options(function=nn.Linear(3, 3))
    f = jit(lambda x, options: options.function(x) * options.scale)
    x = torch.ones(3)
    for options.scale in (1.0, 2.0, 3.0):
        torch.testing.assert_close(f(x, options), options.function(x) * options.scale)
        with torch.no_grad():
            options.function.weight.add_(1)
    assert len(f.programs()) == 2
    options.function = nn.Linear(3, 3)
    torch.testing.assert_close(f(x, options), options.function(x) * 3)
    del options
    assert not f.programs(), "the programs of an object go with it"
