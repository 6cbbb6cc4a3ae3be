"""PyTorch's ambient state: each cell of the table in ambient.py holds what it says, and the page in
docs/ is the one of the table.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ambient
import jax
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

import torchfunc_jax
from bridge import private
from bridge.process import process
from bridge.record import transforms

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).resolve().parents[2]


def _of_the_constraints() -> bool:
    return (
        f"\ntorch=={torch.__version__.partition('+')[0]}\n"
        in (ROOT / "constraints.txt").read_text()
    )


@pytest.fixture(autouse=True)
def _small_programs_are_kept_too() -> Iterator[None]:
    """JAX keeps what it has compiled on the disk, also small programs: most cells compile the same
    ones.
    """
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def cells(name: str, every: bool) -> Iterator[tuple[str, str, str]]:
    """(when, way, tensors): one cell in eighteen, others for each state; or all that are left."""
    start = list(ambient.STATES).index(name)
    for k, way in enumerate(ambient.WAYS):
        for i, (when, tensors) in enumerate(itertools.product(ambient.WHENS, ambient.TENSORS)):
            some = (start + k) % 3 == 0 and (start + k + i) % 6 == 0
            if some != every:
                yield when, way, tensors


@pytest.mark.thin(4)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ambient.STATES)
def test_the_table(name: str, every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "unrecordable", set())  # the cells share their functions' code
    state, wrong = ambient.STATES[name], []
    for when, way, tensors in cells(name, every):
        other = ambient.declared(state, when, way, tensors)
        says, detail = ambient.observed(state, when, way, tensors)
        expected = "as torch.func" if other is None else other.text
        if says != expected or (other is not None and not re.search(other.match, detail)):
            wrong.append(f"{when}, {way}, {tensors}: {says!r}, and not {expected!r}: {detail}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(
    not _of_the_constraints(), reason="the page is of the version of PyTorch in constraints.txt"
)
def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location(
        "ambient_state", ROOT / "docs" / "ambient_state.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "run: python docs/ambient_state.py"
    rows = [line for line in script.page().splitlines() if line.count("|") > 9]
    assert all(cell.strip() for row in rows for cell in row.split("|")[1:-1]), "an empty cell"


# -- torch function modes of the user's, around and inside of calls that are recorded --------------
_NAMES = frozenset(
    {
        "sin",
        "cos",
        "mul",
        "pow",
        "sum",
        "square",
        "linear",
        "tanh",
        "zeros",
        "ones",
        "randn_like",
        "mul_",
        "__setitem__",
        "__bool__",
        "__repr__",
        "__format__",
    }
)


class Sees(TorchFunctionMode):
    """Writes down each function that it sees, except for those that the transforms call too; then
    does what ``run`` does.
    """

    def __init__(
        self,
        seen: list[Any],
        run: Callable[..., Any] = lambda mode, func, args, kwargs: func(*args, **kwargs),
    ) -> None:
        super().__init__()
        self.seen, self.run, self.kept = seen, run, None
        self.T: Any = torchfunc_jax

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(resolve_name(func)).rpartition(".")[2]
        if name in _NAMES:
            self.seen.append(name)
        return self.run(self, func, args, kwargs or {})


def _of_sin(then: Callable[[Sees, torch.Tensor], Any]) -> Callable[..., Any]:
    """A mode's ``run`` that does something with the result of a sine."""

    def run(mode: Sees, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        return then(mode, out) if func is torch.sin else out

    return run


def _raises(mode: Sees, out: torch.Tensor) -> None:
    raise LookupError("a mode that raises")


def _keeps(mode: Sees, out: torch.Tensor) -> torch.Tensor:
    mode.kept = out
    return out


def _writes_down(ask: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def then(mode: Sees, out: torch.Tensor) -> torch.Tensor:
        mode.seen.append(ask(out))
        return out

    return _of_sin(then)


RUNS: dict[str, Callable[..., Any]] = {
    "watches": lambda mode, func, args, kwargs: func(*args, **kwargs),
    "sin is cos": lambda mode, func, args, kwargs: (torch.cos if func is torch.sin else func)(
        *args, **kwargs
    ),
    "scales": _of_sin(lambda mode, out: out * 10),
    "changes a keyword": lambda mode, func, args, kwargs: func(
        *args, **({**kwargs, "dim": 0} if func is torch.sum else kwargs)
    ),
    "raises": _of_sin(_raises),
    "asks for a value": _writes_down(lambda out: round(out.sum().item(), 4)),
    "shows": _writes_down(repr),
    "keeps": _of_sin(_keeps),
    "transforms": _of_sin(
        lambda mode, out: mode.T.vmap(mode.T.grad(torch.cos))(out) if out.dim() else out
    ),
    "is not recordable": _of_sin(lambda mode, out: out.as_strided(out.shape, (1,) * out.dim())),
}


def _f(x: torch.Tensor) -> torch.Tensor:
    return (torch.sin(x) * torch.arange(3.0)).pow(2).sum() + torch.sum(torch.zeros(3) + 1)


def _layer_of(T: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    return T.functional_call(_NET, p, (x,)).square().sum()


def _writes(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    y.mul_(2)
    y[0] = 1.0
    return y.sum()


def _shows(x: torch.Tensor, seen: list[Any]) -> torch.Tensor:
    y = torch.sin(x)
    seen += [repr(y), f"{y.sum()}", f"{y}"]
    return y.sum()


def _half(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    return torch.sin(y.as_strided(y.shape, (1,))).sum()


def _within(f: Callable[..., Any], *modes: TorchFunctionMode) -> Callable[..., Any]:
    """The function with these modes entered around it."""

    def g(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return f(*args)

    return g


def _in_thread(f: Callable[[], Any], seen: list[Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_within(f, Sees(seen))()))
    thread.start()
    thread.join()
    return found[0]


_V, _X = torch.tensor([0.3, 0.5, 0.7]), torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
_NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
_PARAMETERS = {k: torch.full_like(p, 0.1) for k, p in _NET.named_parameters()}
#: (library, what modes see) -> the result of a call.
CALLS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "vmap": lambda T, seen: T.vmap(_f)(_X),
    "grad": lambda T, seen: T.grad(_f)(_V),
    "vmap of grad": lambda T, seen: T.vmap(T.grad(_f))(_X),
    "grad of vmap": lambda T, seen: T.grad(lambda x: T.vmap(_f)(x).sum())(_X),
    "grad of grad": lambda T, seen: T.grad(lambda x: T.grad(_f)(x).sum())(_V),
    "jacrev": lambda T, seen: T.jacrev(lambda x: torch.sin(x) * _V)(_V),
    "jacfwd": lambda T, seen: T.jacfwd(lambda x: torch.sin(x) * _V)(_V),
    "jvp": lambda T, seen: T.jvp(_f, (_V,), (_V,)),
    "vjp": lambda T, seen: T.vjp(_f, _V)[1](torch.ones(())),
    "hessian": lambda T, seen: T.hessian(_f)(_V),
    "functional_call": lambda T, seen: T.grad(lambda p: _layer_of(T, p, _X))(_PARAMETERS),
    "vmap of functional_call": lambda T, seen: T.vmap(_layer_of, (None, None, 0))(
        T, _PARAMETERS, _X
    ),
    "values": lambda T, seen: T.grad(
        lambda x: torch.sin(x).sum() if torch.sin(x).sum() > 0 else x.sum()
    )(_V),
    "writes": lambda T, seen: T.grad(_writes)(_V),
    "shows": lambda T, seen: T.grad(_shows)(_V, seen),
    "random": lambda T, seen: T.vmap(
        lambda x: torch.sin(x) + torch.randn_like(x), randomness="different"
    )(_X),
    "given up half-way": lambda T, seen: T.grad(_half)(_V),
    "vmap, given up half-way": lambda T, seen: T.vmap(T.grad(_half))(_X),
    "in a thread": lambda T, seen: _in_thread(lambda: T.grad(_f)(_V), seen),
    "mode inside": lambda T, seen: T.grad(_within(_f, Sees(seen, RUNS["scales"])))(_V),
    "mode inside, around a transform": lambda T, seen: T.grad(
        _within(lambda x: T.vmap(T.grad(torch.sin))(x).sum(), Sees(seen))
    )(_V),
    "device inside": lambda T, seen: T.grad(_within(_f, torch.device("cpu")))(_V),  # type: ignore[arg-type]
}
#: the modes around the call, the outermost first, of the one that the case is about.
AROUND: dict[str, Callable[[Sees], list[Any]]] = {
    "one": lambda mode: [mode],
    "twice": lambda mode: [mode, mode],
    "two": lambda mode: [Sees(mode.seen, RUNS["sin is cos"]), mode],
    "a device around": lambda mode: [torch.device("cpu"), mode],
    "a device inside": lambda mode: [mode, torch.device("cpu")],
}
_SOME = (
    "vmap",
    "grad",
    "vmap of grad",
    "hessian",
    "mode inside, around a transform",
    "given up half-way",
    "shows",
)
CASES = [
    *[("one", "watches", call) for call in CALLS],
    *[
        ("one", run, call)
        for run in RUNS
        for call in _SOME
        if run != "watches" and (run, call) != ("is not recordable", "shows")
    ],
    *[
        (around, run, call)
        for around in AROUND
        for run in ("watches", "scales")
        for call in _SOME[2:]
        if around != "one"
    ],
]
#: What is not recorded; None: any.
_UNRECORDED = (
    (None, "is not recordable", None),
    (None, None, "given up half-way"),
    (None, None, "vmap, given up half-way"),
    (None, None, "device inside"),
)


@pytest.mark.parametrize(("around", "run", "call"), CASES, ids=map(", ".join, CASES))
def test_function_modes(
    around: str,
    run: str,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The user's modes see each function once, and what they do has the same effect as in
    torch.func; the call is recorded.
    """
    monkeypatch.setattr(process, "unrecordable", set())
    caplog.set_level(logging.INFO, "torchfunc_jax")
    runs: list[Any] = []
    execute = transforms.run
    monkeypatch.setattr(transforms, "run", lambda *given: (runs.append(given), execute(*given))[1])

    def observed(T: Any) -> tuple[Any, ...]:
        mode = Sees([], RUNS[run])
        mode.T, error, out = T, None, None
        torch.manual_seed(0)
        with contextlib.ExitStack() as stack:
            for each in AROUND[around](mode):
                stack.enter_context(each)
            entered = private.function_mode_stack()
            try:
                out = CALLS[call](T, mode.seen)
            except (LookupError, RuntimeError) as raised:
                error = str(raised).partition(" ")[0]
            assert private.function_mode_stack() == entered
            # no value of vmap's lanes
            kept = mode.kept if call in ("grad", "shows", "given up half-way") else None
        assert not private.function_modes()
        return out, error, mode.seen, kept

    theirs = observed(torch.func)
    for _ in range(2):  # the second call has a program, if the first one was recorded
        runs.clear()
        ours = observed(torchfunc_jax)
        assert ours[1:3] == theirs[1:3]
        torch.testing.assert_close((ours[0], ours[3]), (theirs[0], theirs[3]))
        if theirs[1] is None and not any(
            all(a in (None, b) for a, b in zip(u, (around, run, call), strict=True))
            for u in _UNRECORDED
        ):
            assert runs and not caplog.messages and not process.unrecordable
        elif call in ("given up half-way", "device inside"):
            break  # the next call is not recorded
