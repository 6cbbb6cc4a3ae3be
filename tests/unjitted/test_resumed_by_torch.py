"""Functions that turn out to be no record while they run: PyTorch goes on where the record ends, so
that their Python runs once.

Each function changes the state of Python and of a module, and then does something that cannot be
recorded. The truth is torch.func.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from agreement import same
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchfunc_jax
from bridge import private
from bridge.record.in_torch import InTorch
from bridge.record.recorder import Recorder
from bridge.trace.levels import state

X = torch.tensor([0.3, -0.7, 1.1])
ROWS = torch.stack([X, X * 2])


class Program:
    """The state that a function changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.steps, self.said = 0, list[str]()
        self.layer, self.buffer = nn.Linear(3, 3), torch.zeros(3)
        self.weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        self.generator = torch.Generator().manual_seed(1)

    def seen(self) -> Any:
        return (
            self.steps,
            self.said,
            self.layer.training,
            self.buffer.tolist(),
            torch.rand(2).tolist(),
        )


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _in(context: Any, t: torch.Tensor) -> torch.Tensor:
    with context:
        return t * torch.ones(3)


def _in_float64(t: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return t * torch.tensor(2.0).float()
    finally:
        torch.set_default_dtype(torch.float32)


def _hooked(t: torch.Tensor) -> torch.Tensor:
    if t.requires_grad:
        t.register_hook(lambda g: g * 3)
    return t


def _seeded(t: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return t * torch.rand(3)


#: What cannot be recorded.
REFUSED: dict[str, Callable[[Program, torch.Tensor], torch.Tensor]] = {
    "new": lambda p, t: t + t.new(3).zero_(),
    "a generator": lambda p, t: t + torch.rand(3, generator=p.generator),
    "a default dtype": lambda p, t: _in_float64(t),
    "a device context": lambda p, t: _in(torch.device("cpu"), t),
    "a dispatch mode": lambda p, t: _in(_Mode(), t),
    "a parameter": lambda p, t: nn.Parameter(torch.full((3,), 2.0)) * t,
    "grad_fn": lambda p, t: t if t.grad_fn is None else t * 1,
    "resize_": lambda p, t: t + torch.empty(0).resize_(3).zero_(),
    "a forked generator": lambda p, t: _seeded(t),
    "a hook": lambda p, t: _hooked(t),
    "nothing": lambda p, t: t,
}


# -- functions (program, torch.func or ours, argument, what cannot be recorded) --------------------
def captured(p: Program, T: Any, x: torch.Tensor, refused: Any) -> torch.Tensor:
    return refused(p, p.layer(x) * p.weight) * p.weight


def written(p: Program, T: Any, x: torch.Tensor, refused: Any) -> torch.Tensor:
    y = x.clone()
    y.add_(1)
    y[1:].mul_(2)
    y = refused(p, y * 1) * 1
    y[0] = y[1]
    return y


def a_buffer(p: Program, T: Any, x: torch.Tensor, refused: Any) -> torch.Tensor:
    p.buffer.add_(1)
    y = refused(p, x * p.buffer)
    p.buffer.mul_(2)
    return y * p.buffer


def nested_before(p: Program, T: Any, x: torch.Tensor, refused: Any) -> torch.Tensor:
    y = T.vmap(lambda row: row.sin() * 2)(x)
    g = T.grad(lambda t: (t**3).sum())(y)
    return refused(p, y * 1) * g


def nested_around(p: Program, T: Any, x: torch.Tensor, refused: Any) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        p.said.append("inner")
        z = refused(p, t.cos())
        return (z * z * t).sum()

    return T.grad(inner)(x.sin()) * x


def nested_deep(p: Program, T: Any, x: torch.Tensor, refused: Any) -> torch.Tensor:
    def outer(t: torch.Tensor) -> torch.Tensor:
        def inner(u: torch.Tensor) -> torch.Tensor:
            p.said.append("deep")
            return (refused(p, u * t) ** 2).sum()

        return (T.vmap(T.grad(inner))(torch.stack([t, t.sin()])) * t).sum()

    return T.grad(outer)(x)


def pulled_after(p: Program, T: Any, x: torch.Tensor, refused: Any) -> torch.Tensor:
    out, pull = T.vjp(lambda t: t.sin() * 2, x)
    y = refused(p, out * 1)
    return pull(y)[0] * y


def pushed_around(p: Program, T: Any, x: torch.Tensor, refused: Any) -> torch.Tensor:
    out, pushed = T.jvp(lambda t: refused(p, t.sin()) * t, (x,), (x * 2,))
    return out + pushed


def caught(p: Program, T: Any, x: torch.Tensor, refused: Any) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        refused(p, t * 2)
        raise ValueError("mine")

    try:
        T.grad(inner)(x)
    except ValueError as error:
        p.said.append(str(error))
    with contextlib.suppress(RuntimeError):
        T.grad(lambda t: refused(p, t * 2))(x)  # no scalar
    return refused(p, x * 3)


def drawn(p: Program, T: Any, x: torch.Tensor, refused: Any) -> torch.Tensor:
    y = nn.functional.dropout(x, 0.5) + torch.rand(3)
    return refused(p, y) * torch.rand(3)


PROGRAMS = [
    captured,
    written,
    a_buffer,
    nested_before,
    nested_around,
    nested_deep,
    pulled_after,
    pushed_around,
    caught,
    drawn,
]
WAYS: dict[str, Callable[[Any, Callable[..., Any]], Any]] = {
    "vmap": lambda T, f: T.vmap(f, randomness="different")(ROWS),
    "grad": lambda T, f: T.grad_and_value(lambda x: (f(x).sum(), x * 2), has_aux=True)(X),
    "vmap of grad": lambda T, f: T.vmap(T.grad(lambda x: f(x).sum()), randomness="different")(ROWS),
    "grad of vmap": lambda T, f: T.grad(lambda rows: T.vmap(f, randomness="different")(rows).sum())(
        ROWS
    ),
    "jvp": lambda T, f: T.jvp(f, (X,), (X * 2,)),
    "vjp": lambda T, f: (lambda out, pull: (out, pull(out)))(*T.vjp(f, X)),
    "jacrev": lambda T, f: T.jacrev(f)(X),
    "hessian": lambda T, f: T.hessian(lambda x: f(x).sum())(X),
}
#: Where the function starts again; docs/semantics.md says when.
STARTS_AGAIN = {(drawn, "a forked generator")}


def _nothing_is_entered() -> None:
    """No transform, of ours or of PyTorch's, and no mode is left entered on this thread."""
    assert state.level is None and state.recorder is None
    assert torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level == -1
    assert torch.is_grad_enabled() and not private.function_modes()


def _run(T: Any, way: str, f: Callable[..., Any], refused: Callable[..., Any]) -> Any:
    p = Program()

    def counted(x: torch.Tensor) -> torch.Tensor:
        p.steps += 1
        p.layer.train(not p.layer.training)
        out = f(p, T, x * p.steps, refused)
        p.said.append("end")
        return out

    torch.manual_seed(7)
    try:
        outs = WAYS[way](T, counted)
    except RuntimeError as error:
        return type(error), p.seen()
    leaves = torch.utils._pytree.tree_leaves(outs)
    grads = [torch.zeros_like(q) for q in (*p.layer.parameters(), p.weight)]
    if any(t.requires_grad for t in leaves):
        sum(t.sum() for t in leaves if t.requires_grad).backward()
        grads = [
            g if q.grad is None else q.grad
            for q, g in zip((*p.layer.parameters(), p.weight), grads, strict=True)
        ]
    return [t.detach() for t in leaves], grads, p.seen()


@pytest.mark.thin(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", REFUSED)
def test_python_runs_once_and_in_order(what: str, way: str) -> None:
    # while it is recorded, what depends on a captured parameter requires grad in a vmap and a jvp
    # too: PyTorch refuses the first hook
    begin = 1 if what == "a hook" and way in ("vmap", "grad of vmap", "jvp") else 0
    for f in PROGRAMS:
        if (f, what) not in STARTS_AGAIN:
            expected = _run(torch.func, way, f, REFUSED[what])
            if begin:
                _run(torchfunc_jax, way, f, REFUSED[what])
            for _ in range(begin, 2):  # the second call does not try to record
                found = _run(torchfunc_jax, way, f, REFUSED[what])
                if isinstance(expected[0], list):
                    same(found, expected, rtol=1e-4, atol=1e-5)
                else:
                    assert found[0] is expected[0]
                _nothing_is_entered()


# -- autograd.Function and checkpoint --------------------------------------------------------------
# a mark for each forward that has run: PyTorch gives forward copies of the lists among its
# arguments
FORWARDS: list[str] = []


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, said: list[str]) -> torch.Tensor:
        FORWARDS.append("forward")
        ctx.factor = 3
        ctx.save_for_backward(x)
        return x * 2 + x.new(3).zero_()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g * ctx.saved_tensors[0] * ctx.factor, None


class NewStyle(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, said: list[str]) -> torch.Tensor:
        FORWARDS.append("forward")
        return x * 2 + x.new(3).zero_()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = 3
        ctx.save_for_backward(inputs[0])

    backward = OldStyle.backward


class Captures(NewStyle):
    @staticmethod
    def forward(x: torch.Tensor, said: list[str]) -> torch.Tensor:
        FORWARDS.append("forward")
        return x * 2 + torch.zeros_like(X) * X


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, said: list[str]) -> torch.Tensor:
        ctx.save_for_backward(x.cos())
        ctx.mark_dirty(x)
        return x.sin_()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g * ctx.saved_tensors[0], None


def test_a_function_that_writes_to_its_argument_beside_a_list() -> None:
    """torch.func refuses a Function without setup_context, and so does what PyTorch runs; jit
    compiles it.
    """

    def f(x: torch.Tensor) -> torch.Tensor:
        return Dirty.apply(x * 1, ["no key of a record"])

    ways: dict[str, Callable[[Any], Any]] = {
        "vmap": lambda T: T.vmap(f)(ROWS),
        "grad": lambda T: T.grad(lambda x: f(x).sum())(X),
        "a leaf": lambda T: T.vmap(f)(rows),
    }
    for _ in range(2):
        rows = ROWS.clone().requires_grad_()
        for way in ways.values():
            for T in (torch.func, torchfunc_jax):
                with pytest.raises(
                    RuntimeError, match="must override the setup_context staticmethod"
                ):
                    way(T)
                _nothing_is_entered()
        compiled = {
            name: torchfunc_jax.jit(lambda way=way: way(torchfunc_jax))
            for name, way in ways.items()
        }
        same(compiled["vmap"](), ROWS.sin())
        same(compiled["grad"](), X.cos())
        compiled["a leaf"]().sum().backward()
        same(rows.grad, ROWS.cos())


@pytest.mark.parametrize("way", ["vmap", "grad", "vmap of grad", "grad of vmap"])
@pytest.mark.parametrize("cls", [NewStyle, Captures])
def test_a_function_whose_forward_cannot_be_recorded(cls: Any, way: str) -> None:
    slope = 3 * X.sin() * X.cos()
    slopes = torch.stack([slope, 3 * (2 * X).sin() * (2 * X).cos()])
    truth = {
        "vmap": ROWS.sin() * 2,
        "grad": (slope, ((X.sin() * 2).sum(), X * 2)),
        "vmap of grad": slopes,
        "grad of vmap": slopes,
    }
    counts = []
    for T in (torch.func, torchfunc_jax, torchfunc_jax):
        FORWARDS.clear()
        same(WAYS[way](T, lambda x: cls.apply(x.sin(), [])), truth[way])
        counts.append(len(FORWARDS))
    assert counts == [1, 1, 1]  # none is for the record alone


@pytest.mark.parametrize("way", ["vmap", "grad", "vmap of grad", "grad of vmap"])
def test_a_function_of_the_old_style_whose_forward_cannot_be_recorded(way: str) -> None:
    """torch.func refuses it before its forward runs."""
    FORWARDS.clear()
    for T in (torch.func, torchfunc_jax, torchfunc_jax):
        with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
            WAYS[way](T, lambda x: OldStyle.apply(x.sin(), []))
        assert not FORWARDS
        _nothing_is_entered()


def test_a_checkpoint_that_cannot_be_recorded() -> None:
    runs = []

    def f(x: torch.Tensor) -> torch.Tensor:
        def inner(t: torch.Tensor) -> torch.Tensor:
            runs.append(t)
            return (t * t + t.new(3).zero_()).sum()

        return checkpoint(inner, x, use_reentrant=False)

    same(torchfunc_jax.grad(f)(X), 2 * X)
    first = len(runs)
    same(torchfunc_jax.grad(f)(X), 2 * X)
    assert len(runs) == 2 * first


# -- beside numbers --------------------------------------------------------------------------------
def _stopped(x: torch.Tensor) -> torch.Tensor:
    y = x * 2 + x.new(3).zero_()
    assert y.requires_grad
    return (y * y).sum()


def test_attributes_and_identity_of_a_tensor_stay() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.name_of_mine = "y"
        kept = {y: 1}
        x.new(3)
        assert (
            y.name_of_mine == "y"
            and kept[y] == 1
            and y.requires_grad
            and not y.is_leaf
            and x.is_leaf
        )
        return y.sum()

    same(torchfunc_jax.grad(f)(X), torch.full((3,), 2.0))


def test_an_exception_of_the_user_arrives_and_leaves_nothing() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.new(3)
        raise KeyError("mine")

    for transform in (
        torchfunc_jax.grad,
        torchfunc_jax.vmap,
        lambda f: torchfunc_jax.vmap(torchfunc_jax.grad(f)),
    ):
        with pytest.raises(KeyError, match="mine"):
            transform(f)(ROWS)
        _nothing_is_entered()
    same(torchfunc_jax.grad(_stopped)(X), 8 * X)


def test_an_interruption_leaves_nothing() -> None:
    before = threading.active_count()

    def f(x: torch.Tensor) -> torch.Tensor:
        x.new(3)
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            torchfunc_jax.vmap(lambda x: torchfunc_jax.grad(f)(x))(ROWS)
        _nothing_is_entered()
    assert threading.active_count() <= before
    same(torchfunc_jax.grad(_stopped)(X), 8 * X)


def test_in_several_threads_at_once() -> None:
    found: dict[int, torch.Tensor] = {}

    def work(k: int) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            y = x * k
            y.register_hook(lambda g: g * k)
            return (y * y).sum()

        found[k] = torchfunc_jax.vmap(torchfunc_jax.grad(f))(ROWS)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for k in range(1, 7):
        same(found[k], 2 * ROWS * k**3)


def test_the_error_is_torchs_and_names_the_users_line_and_the_reason() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.new(3)
        return x * 2 if x.sum() > 0 else x

    errors = []
    for T in (torch.func, torchfunc_jax):
        with pytest.raises(RuntimeError, match="data-dependent control flow") as found:
            T.vmap(f)(ROWS)
        assert [x.line for x in traceback.extract_tb(found.tb) if x.filename == __file__][
            -1
        ] == "return x * 2 if x.sum() > 0 else x"
        errors.append(found.value)
    assert type(errors[1]) is type(errors[0]) and str(errors[1]) == str(errors[0])
    assert "'new'" in errors[1].__notes__[0] and "torch.where" in errors[1].__notes__[1]


def test_a_function_runs_once_also_with_another_module_than_before() -> None:
    runs, holder = [], SimpleNamespace()

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        y = holder.layer(x)
        y.register_hook(lambda g: g * 2)
        return y.sum()

    for _ in range(3):  # the parameters that the last call has met are not those of this one
        holder.layer = nn.Linear(3, 3)
        runs.clear()
        found = torchfunc_jax.grad(f)(X)
        same(found, 2 * holder.layer.weight.sum(0))
        found.sum().backward()
        same(holder.layer.weight.grad, torch.full((3, 3), 2.0))
        assert len(runs) == 1


def test_a_function_runs_once_also_if_an_earlier_call_did_not_use_what_it_captures() -> None:
    runs, weight = [], torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    used = SimpleNamespace(now=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        with torch.set_grad_enabled(used.now):
            y = x.sin() * weight
        return (y * x + x.new(3).zero_()).sum()

    for transform in (torchfunc_jax.vmap, lambda f: torchfunc_jax.vmap(torchfunc_jax.grad(f))):
        for used.now in (False, True, False, False, True, True):
            runs.clear()
            transform(f)(ROWS)
            assert len(runs) == 1


@pytest.mark.parametrize("used", [True, False])
def test_a_function_runs_once_also_if_what_it_captures_has_a_hook(used: bool) -> None:
    runs, called = [], list[torch.Tensor]()
    weight, other = (
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        torch.ones(3, requires_grad=True),
    )
    weight.register_hook(called.append)

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        return (x.sin() * (weight if used else weight.detach()) * other + x.new(3).zero_()).sum()

    for k in range(1, 4):
        torchfunc_jax.vmap(f)(ROWS).sum().backward()
        assert len(runs) == k
        same(called, [ROWS.sin().sum(0)] * (k if used else 0))
        same(other.grad, ROWS.sin().sum(0) * weight.detach() * k)


@pytest.mark.parametrize("way", ["grad", "vmap", "vmap of grad", "grad of vmap"])
@pytest.mark.parametrize("how", ["operators", "the first use is a write", "Python"])
def test_a_module_keeps_a_table_that_it_has_made(how: str, way: str) -> None:
    if how == "the first use is a write" and way != "vmap":
        pytest.skip("a write to a captured tensor, which grad refuses")

    def run(T: Any) -> Any:
        kept, outs, said = SimpleNamespace(table=None), list[Any](), list[Any]()

        def f(x: torch.Tensor) -> torch.Tensor:
            if kept.table is None:
                kept.table = torch.stack([torch.arange(3.0), torch.ones(3)])[0] + 1
            elif how == "the first use is a write" and len(outs) == 1:
                kept.table.mul_(2)
            return x.sin() * kept.table + x.new(3).zero_()

        for _ in range(3):
            outs.append(WAYS[way](T, f))
            if how == "Python":
                said += [kept.table.tolist(), kept.table.detach().numpy().sum(), repr(kept.table)]
        return outs, kept.table * 1, said, type(kept.table)

    found, expected = run(torchfunc_jax), run(torch.func)
    same(found[:2], expected[:2])
    assert found[2:] == expected[2:]


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "detached": lambda y: y.detach(),
    "its loss": lambda y: y.detach().sum(),
    "a view": lambda y: y.detach()[1:],
    "detached, and what has a history": lambda y: (y.detach(), y)[0],
    "a mask": lambda y: y > 0,
    "under no_grad": lambda y: torch.no_grad()(torch.sin)(y),
}
LATER: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "operators": lambda T, kept: (kept + 1, torch.stack([kept, kept]), kept.requires_grad),
    "Python": lambda T, kept: (
        repr(kept * 0),
        torch.tensor(kept.tolist()),
        torch.tensor(np.asarray(kept)),
        kept.numpy().size,
    ),
    "another transform": lambda T, kept: T.grad(lambda x: (x.sin() * kept).sum())(
        torch.tensor(2.0)
    ),
}


@pytest.mark.parametrize("way", ["grad", "jvp"])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("later", LATER)
def test_a_tensor_that_depends_on_the_argument_is_kept(
    later: str, kept: str, captured: bool, way: str
) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=captured)

    def run(T: Any) -> Any:
        first = []

        def f(x: torch.Tensor) -> torch.Tensor:
            y = x.sin() * weight
            first.append(KEPT[kept](y))
            return y * y

        WAYS[way](T, f)
        return LATER[later](T, first[0])

    same(run(torchfunc_jax), run(torch.func))


def test_what_autograd_goes_back_through_does_not_lose_its_history() -> None:
    weight, kept = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), []

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * weight
        kept.extend([y.detach(), y])
        return y.sum()

    torchfunc_jax.grad(f)(X)
    same(kept[0] * 2, (X.sin() * weight).detach() * 2)
    same(torch.autograd.grad(kept[1].sum(), weight)[0], X.sin())


@pytest.mark.parametrize("captured", [True, False])
def test_nothing_stays_of_a_resumed_call(captured: bool) -> None:
    weight = torch.ones(3, requires_grad=captured)

    def f(x: torch.Tensor) -> torch.Tensor:
        before = x.sin() * weight
        after = before + x.new(3).zero_()
        alive.extend([weakref.ref(before), weakref.ref(after)])
        return after.sum()

    def machinery() -> int:
        gc.collect()
        return sum(isinstance(x, Recorder | InTorch) for x in gc.get_objects())

    alive: list[Any] = []
    torchfunc_jax.grad(lambda x: (x * 2).sum())(X)
    at_first = machinery()
    for _ in range(2):
        torchfunc_jax.grad(f)(X)
        assert machinery() == at_first
        assert [ref() for ref in alive] == [None, None]
        alive.clear()
