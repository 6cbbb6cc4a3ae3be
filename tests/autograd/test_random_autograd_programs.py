"""Random programs of autograd.Functions, hooks, checkpoints and nested transforms, beside plain
PyTorch; and what errors leave behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import autograd_programs
import pytest
import torch
import torch.utils.checkpoint
from agreement import same
from autograd_functions import Cubed, SetupContext

import torchfunc_jax
from torchfunc_jax import functionalize, grad, jit, vmap

FAST = 25
COUNT = int(os.environ.get("TORCHFUNC_JAX_AUTOGRAD_PROGRAMS", str(FAST)))
PER_TEST = 5


def ways(seed: int, count: int) -> list[str]:
    """Some of the ways to call the program of a seed."""
    p = autograd_programs.program(seed)
    taken = [name for name, way in autograd_programs.WAYS.items() if way.takes(p)]
    return random.Random(seed).sample(taken, min(count, len(taken)))


def judge(start: int, stop: int, count: int) -> None:
    without_truth = 0
    for seed in range(start, stop):
        p = autograd_programs.program(seed)
        for name in ways(seed, count):
            way = autograd_programs.WAYS[name]
            found = autograd_programs.fault(p, way, torchfunc_jax)
            if found.startswith("no truth"):
                without_truth += 1
            elif found:
                smaller = autograd_programs.shrunk(p, way, torchfunc_jax)
                pytest.fail(
                    f"program {seed}, {name}, {sorted(p.needs)} require grad: {found}\n"
                    f"{smaller.source}"
                )
    assert without_truth <= 0.5 * count * (stop - start), "PyTorch itself raises too often to judge"


@pytest.mark.parametrize("start", range(0, FAST, PER_TEST))
def test_agrees_with_plain_pytorch(start: int) -> None:
    judge(start, start + PER_TEST, 1)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(FAST, COUNT, PER_TEST))
def test_many_agree_with_plain_pytorch(start: int) -> None:
    judge(start, min(start + PER_TEST, COUNT), 3)


# -- what random programs have found, each by itself -----------------------------------------------
W = torch.tensor([0.7, -0.4, 1.2], dtype=torch.float64)


class Weighted(torch.autograd.Function):
    """Its methods use a tensor from outside; its derivative is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin() * W

    @staticmethod
    # torch has typed any number of them
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * x * W if ctx.needs_input_grad[0] else None, g * 3 if ctx.needs_input_grad[
            1
        ] else None


class Hidden(torch.autograd.Function):
    """It saves what is neither an input nor an output: a constant in a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        t = x.tanh()
        ctx.save_for_backward(t)
        return t * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * (1 - ctx.saved_tensors[0] ** 2)


def closure_of_its_own(x: torch.Tensor) -> torch.Tensor:
    z = x * 2

    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            return a * z

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
            return g * z

    return Local.apply(x.sin())


def hook_with_captured(x: torch.Tensor) -> torch.Tensor:
    y, z = x * 2, x.cos()
    if y.requires_grad:
        y.register_hook(lambda g: g * W * z)
    return y * y


def in_place(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The change is not recorded: what was there keeps its derivative."""

    def f(x: torch.Tensor) -> torch.Tensor:
        v = x * 0.4
        with torch.no_grad():
            change(v)
        return v * v

    return f


FOUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "backward uses a captured tensor": lambda x: Weighted.apply(x, None),
    "two inputs": lambda x: Weighted.apply(x * 2, W) * x,
    "it meets the captured tensor itself": lambda x: Weighted.apply(x * W, None) + W,
    "in a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(
        Weighted.apply, x * 1, None, use_reentrant=False
    ),
    "an intermediate is saved": Hidden.apply,
    "closure of its own": closure_of_its_own,
    "hook with captured tensors": hook_with_captured,
    "copy_ in no_grad": in_place(lambda v: v.copy_(W)),
    "mul_ in no_grad": in_place(lambda v: v.mul_(W)),
    "a view in no_grad": in_place(lambda v: v[1:].mul_(W[1:])),
    "an element in no_grad": in_place(lambda v: v.__setitem__(0, W[1])),
    "out= in no_grad": in_place(lambda v: torch.mul(W, 2, out=v)),
}
#: What cannot be recorded of them: un-jitted, PyTorch runs these, as torch.func does.
IN_TORCH = frozenset(
    {
        "backward uses a captured tensor",
        "two inputs",
        "it meets the captured tensor itself",
        "in a checkpoint",
        "closure of its own",
        "hook with captured tensors",
    }
)


def raised(call: Callable[[], Any]) -> Exception | None:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


def refused_as_by_torch_func(call: Callable[[Any], Any]) -> None:
    """A call, which gets a namespace of transforms, raises torch.func's own error, at each call,
    and leaves nothing behind.
    """
    theirs = raised(lambda: call(torch.func))
    assert theirs is not None
    for _ in range(2):
        mine = raised(lambda: call(torchfunc_jax))
        assert autograd_programs.one_refusal(mine, theirs), (mine, theirs)
        assert (
            torch.is_grad_enabled()
            and torch._C._functorch.peek_interpreter_stack() is None
            and untouched()
        )


@pytest.mark.thin(2)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("entry", [functionalize, jit, vmap])
@pytest.mark.parametrize("name", FOUND)
def test_first_and_second_derivatives(name: str, entry: Any, captured: bool) -> None:
    """Of the argument and of W, which requires grad or not, in two calls with other numbers."""
    f = FOUND[name]
    mine, plain = entry(f), autograd_programs.PLAIN.vmap(f) if entry is vmap else f
    W.requires_grad_(captured)
    try:
        if entry is vmap and name in IN_TORCH:
            plain = torch.func.vmap(f)
            if raised(lambda: plain(torch.ones(2, 3, dtype=torch.float64))) is not None:
                refused_as_by_torch_func(
                    lambda T: T.vmap(f)(torch.ones(2, 3, dtype=torch.float64, requires_grad=True))
                )
                return
        for number in range(2):
            with torch.no_grad():
                W.add_(number)
            found = []
            for g in (mine, plain):
                x = torch.linspace(0.3, 1.1, 3, dtype=torch.float64) + number
                leaves = [
                    (x.expand(2, 3) * 1 if entry is vmap else x).requires_grad_(),
                    *([W] if captured else []),
                ]
                out = g(leaves[0])
                first = torch.autograd.grad(out.sum(), leaves, create_graph=True, allow_unused=True)
                total = sum(t.sin().sum() for t in first if t is not None)
                second = (
                    torch.autograd.grad(total, leaves, allow_unused=True)
                    if total.requires_grad
                    else [None] * len(leaves)
                )
                found.append(
                    [
                        torch.zeros(3, dtype=torch.float64) + (0 if t is None else t)
                        for t in (out, *first, *second)
                    ]
                )
            same(*found)
    finally:
        W.requires_grad_(False)


class ProductWithVmap(torch.autograd.Function):
    """Of two tensors, with a vmap of its own."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return 2 * g * b.tanh(), 3 * g * Cubed.apply(a)

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        a, b = (t if d is None else t.movedim(d, 0) for t, d in zip((a, b), in_dims, strict=True))
        return ProductWithVmap.apply(*torch.broadcast_tensors(a, b)), 0


#: Transforms inside a vmap of a and b that differentiate by one of them, while the other one is
#: mapped around them.
BESIDE_A_MAPPED_TENSOR: dict[str, Callable[..., Any]] = {
    "grad": lambda T, f, a, b: T.grad(lambda a: f(a, b).sum())(a),
    "grad of the second": lambda T, f, a, b: T.grad(lambda b: f(a, b).sum())(b),
    "vjp": lambda T, f, a, b: T.vjp(lambda a: f(a, b), a)[1](b)[0],
    "jacrev": lambda T, f, a, b: T.jacrev(lambda a: f(a, b))(a),
    "grad of grad": lambda T, f, a, b: T.grad(
        lambda b: T.grad(lambda a: (f(a, b) * a).sum())(a).sum()
    )(b),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", BESIDE_A_MAPPED_TENSOR)
def test_a_function_with_a_vmap_of_its_own_meets_a_mapped_tensor_inside(
    name: str, needs_grad: bool, compiled: bool
) -> None:
    found = []
    for T in (torchfunc_jax, torch.func):
        inner = BESIDE_A_MAPPED_TENSOR[name]
        f = T.vmap(lambda a, b, T=T, inner=inner: inner(T, ProductWithVmap.apply, a, b))
        f = jit(f) if compiled and T is torchfunc_jax else f
        a, b = (
            torch.linspace(k, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_(needs_grad)
            for k in (-0.5, 0.1)
        )
        out = f(a, b)
        found.append(
            [
                out,
                *(torch.autograd.grad(out.sum(), [a, b], allow_unused=True) if needs_grad else []),
            ]
        )
    same(*found)


#: Transforms of a function of y that uses W, inside a traced function: what they give depends on W.
OF_A_CAPTURED_TENSOR: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "grad": lambda T, y: T.grad(lambda a: (a * a * W).sum())(y),
    "vmap": lambda T, y: T.vmap(lambda a: a * a * W)(y.expand(2, 3)).sum(0),
    "vjp": lambda T, y: T.vjp(lambda a: a * a * W, y)[1](y)[0],
    "jvp": lambda T, y: T.jvp(lambda a: a * a * W, (y,), (y,))[1],
    "jacrev": lambda T, y: T.jacrev(lambda a: a * a * W)(y).sum(0),
    "grad of grad": lambda T, y: T.grad(lambda b: T.grad(lambda a: (a * a * W).sum())(b).sum())(y),
    "vmap of grad": lambda T, y: T.vmap(T.grad(lambda a: (a * a * W).sum()))(y.expand(2, 3)).sum(0),
    "grad of vmap": lambda T, y: T.grad(
        lambda b: T.vmap(lambda a: a * b * W)(y.expand(2, 3)).sum()
    )(y),
}


@pytest.mark.parametrize("entry", [functionalize, jit])
@pytest.mark.parametrize("name", OF_A_CAPTURED_TENSOR)
def test_a_hook_on_what_depends_on_a_captured_tensor_alone(name: str, entry: Any) -> None:
    """Inside the trace the result of an inner transform requires grad where W does, so that the
    function registers its hook.
    """
    found = []
    W.requires_grad_(True)
    try:
        for T in (torchfunc_jax, torch.func):

            def f(y: torch.Tensor, T: Any = T) -> torch.Tensor:
                v = OF_A_CAPTURED_TENSOR[name](T, y) * 1
                if v.requires_grad:
                    v.register_hook(lambda g: g * g.detach().cos())
                return v

            out = (entry(f) if T is torchfunc_jax else f)(
                torch.linspace(0.3, 1.1, 3, dtype=torch.float64)
            )
            found.append(torch.autograd.grad((out * out).sum(), W))
        same(*found)
    finally:
        W.requires_grad_(False)


def test_a_tensor_that_requires_grad_is_met_first_in_a_checkpoint() -> None:
    """jit compiles it; PyTorch, which runs it un-jitted, refuses the Function."""

    def f(T: Any, x: torch.Tensor) -> torch.Tensor:
        inner = torch.utils.checkpoint.checkpoint(
            lambda a: Weighted.apply(a, None) * W, x, use_reentrant=False
        )
        return inner + Weighted.apply(x, W) * W

    def pulled(T: Any, x: torch.Tensor) -> list[torch.Tensor]:
        out, pull = T.vjp(lambda x: f(T, x), x)
        return [out, pull(torch.ones_like(out))[0]]

    x = torch.linspace(0.3, 1.1, 3, dtype=torch.float64)
    W.requires_grad_(True)
    try:
        found = [
            f(torch.func, x),
            torch.autograd.grad(f(torch.func, x.requires_grad_()).sum(), x)[0],
        ]
        same(jit(lambda x: pulled(torchfunc_jax, x))(x.detach()), found, graph=False)
        # PyTorch runs this; torch.func itself refuses the checkpoint already, by an error of the
        # same class
        for _ in range(2):
            with pytest.raises(RuntimeError, match="setup_context"):
                pulled(torchfunc_jax, x.detach())
    finally:
        W.requires_grad_(False)


#: Functions that use a tensor which requires grad, and whose results do not depend on it.
WITHOUT_HISTORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda x: x.sin() * W.detach(),
    "computed": lambda x: x.sin() * (W * 2).detach(),
    "no_grad": lambda x: x.sin() * torch.no_grad()(lambda: W * 2)(),
    "in a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(
        lambda a: a.sin() * W.detach(), x, use_reentrant=False
    ),
    "in a vmap": lambda x: vmap(lambda a: a.sin() * W.detach())(x.expand(2, 3)).sum(0),
}


@pytest.mark.parametrize("transform", [torchfunc_jax.vjp, torchfunc_jax.linearize])
@pytest.mark.parametrize("name", WITHOUT_HISTORY)
def test_a_pullback_holds_nothing_of_a_trace_that_is_over(name: str, transform: Any) -> None:
    f, x = WITHOUT_HISTORY[name], torch.linspace(0.3, 1.1, 3, dtype=torch.float64)
    W.requires_grad_(True)
    try:
        for _ in range(2):
            out, linear = transform(f, x)
            found = linear(torch.ones_like(x))
            factor = W.detach() * (2 if name in ("computed", "no_grad", "in a vmap") else 1)
            same(
                [out.detach(), found[0] if isinstance(found, tuple) else found],
                [x.sin() * factor, x.cos() * factor],
            )
    finally:
        W.requires_grad_(False)


@pytest.mark.parametrize("entry", [lambda f: f, jit])
@pytest.mark.parametrize("inner", ["checkpoint", "direct"])
def test_a_function_with_captured_tensors_is_reached_through_a_product(
    inner: str, entry: Any
) -> None:
    """Its output is a factor of a gradient: JAX leaves out of that program what no number needs,
    autograd goes back through it.
    """

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            return a * 1

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return g * -0.4 * factor

    factor = torch.linspace(-1.0, 1.0, 3, dtype=torch.float64)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(a) * b

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = (
            product(x, y * 1)
            if inner == "direct"
            else torch.utils.checkpoint.checkpoint(product, x, y * 1, use_reentrant=False)
        )
        return (out * factor).sum()

    x, y = (torch.linspace(k, 1.1, 3, dtype=torch.float64).requires_grad_() for k in (0.3, 0.7))
    out = entry(lambda x, y: sum(grad(f, (0, 1))(x, y)))(x, y)
    same(torch.autograd.grad(out, [x, y], factor), ((-0.4 * factor**3), (-0.4 * factor**3)))


# -- errors, and other threads ---------------------------------------------------------------------
class Sometimes(torch.autograd.Function):
    """Raises where it is told to."""

    fails = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Sometimes.fails == "forward":
            raise ValueError("of the forward")
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    # torch has typed any number of them
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Sometimes.fails == "backward":
            raise ValueError("of the backward")
        (x,) = ctx.saved_tensors
        return 5 * g * x


def loss(x: torch.Tensor) -> torch.Tensor:
    return Sometimes.apply(x).sum()


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """f's gradient, by torch's backward from outside."""

    def run(x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        f(x).backward()
        return x.grad

    return run


ENTRIES: dict[str, Callable[[], Callable[..., Any]]] = {
    "functionalize": lambda: gradient(functionalize(loss)),
    "jit": lambda: gradient(jit(loss)),
    "grad": lambda: grad(loss),
    "jit(grad)": lambda: jit(grad(loss)),
    "vmap(grad)": lambda: vmap(grad(loss), in_dims=0),
}


def untouched() -> bool:
    """Whether PyTorch's own Function is as PyTorch made it."""
    return "__getattribute__" not in vars(type(torch.autograd.Function))


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_error_of_the_users_leaves_nothing_behind(
    entry: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.linspace(0.5, 2.0, 3)
    for _ in range(2):
        call = ENTRIES[entry]()
        with monkeypatch.context() as patched:
            patched.setattr(Sometimes, "fails", place)
            with pytest.raises(ValueError, match=f"of the {place}"):
                call(x)
            assert torch.is_grad_enabled()
            assert untouched()
        same(call(x), 5 * x)
        assert untouched()
    same(gradient(loss)(x), 5 * x)


@pytest.mark.parametrize("main_holds", [True, False])
def test_functions_of_other_threads_are_their_own(main_holds: bool) -> None:
    """While one thread has a trace open, another one's Functions run as PyTorch runs them, and its
    errors are its own.
    """
    inside, done = threading.Event(), threading.Event()
    x, seen, results = torch.linspace(0.5, 2.0, 3), [], []

    def held(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert done.wait(60)
        return Sometimes.apply(x).sum()

    def other() -> None:
        assert inside.wait(60)
        try:
            seen.extend([gradient(loss)(x), type(Sometimes.apply(x)), torch.is_grad_enabled()])
            with pytest.raises(ValueError, match="shape"):
                jit(grad(lambda x: _raising(Sometimes.apply(x))))(x)
            seen.extend([grad(loss)(x), grad(lambda x: SetupContext.apply(x).sum())(x)])
        finally:
            done.set()

    def holds() -> None:
        results.append(grad(held)(x))

    thread = threading.Thread(target=other if main_holds else holds)
    thread.start()
    (holds if main_holds else other)()
    thread.join()
    same(results, [5 * x])
    same(seen, [5 * x, torch.Tensor, True, 5 * x, 2 * x.cos()])
    assert untouched()


def test_the_fast_path_of_transformers_is_off_for_this_trace_alone() -> None:
    """A thread beside it keeps its own, and what the user sets meanwhile stays; a layer that meets
    captured tensors alone is followed.
    """
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x, seen = torch.randn(2, 3, 8), []

    def f() -> torch.Tensor:
        thread = threading.Thread(
            target=lambda: seen.append(torch.backends.mha.get_fastpath_enabled())
        )
        thread.start()
        thread.join()
        seen.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            return layer(x)

    with torch.no_grad():
        expected = layer(x)
    try:
        same(functionalize(f)(), expected, rtol=1e-5, atol=1e-5)
        assert seen == [True, False]
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert torch.backends.mha.get_fastpath_enabled()


def _raising(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the shape is not what was expected")


def test_a_write_without_history_to_what_is_mapped() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 0.7
        y.detach().zero_()
        return y

    x = torch.ones(2, 3, requires_grad=True)
    for call in (vmap(f), jit(vmap(f))):
        out = call(x)
        same(out, torch.zeros(2, 3), graph=False)
        same(torch.autograd.grad(out.sum(), x), (torch.full((2, 3), 0.7),))


#: Transforms through which a gradient of torch.autograd goes back inside another one.
THROUGH: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "vmap": lambda T, v: T.vmap(lambda x: x**3)(v),
    "vmap, captured": lambda T, v: T.vmap(lambda i: i * v**2)(torch.ones(3)),
    "grad": lambda T, v: T.grad(lambda x: (x**3).sum())(v),
    "grad, captured": lambda T, v: T.grad(lambda i: (i * v**2).sum())(torch.ones(2)),
    "vjp": lambda T, v: T.vjp(lambda x: x**3, v)[1](v * 1.0)[0],
    "jvp": lambda T, v: T.jvp(lambda x: x**3, (v,), (v,))[1],
    "jacrev": lambda T, v: T.jacrev(lambda x: x**3)(v),
    "hessian": lambda T, v: T.hessian(lambda x: (x**3).sum())(v),
    "linearize": lambda T, v: T.linearize(lambda x: x**3, v)[1](v * 1.0),
    "functionalize": lambda T, v: T.functionalize(lambda x: x**3)(v),
    "jit": lambda T, v: T.jit(lambda x: x**3)(v),
}
INSIDE: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda T, f: T.jit(f),
    "vmap": lambda T, f: lambda x: T.vmap(f)(x[None])[0],
    "functionalize": lambda T, f: T.functionalize(f),
    "jit of vmap": lambda T, f: lambda x: T.jit(T.vmap(f))(x[None])[0],
    "aux of grad": lambda T, f: lambda x: T.grad(lambda x: (x.sum(), f(x)), has_aux=True)(x)[1],
    "aux of grad, jit": lambda T, f: (
        lambda x: T.jit(T.grad(lambda x: (x.sum(), f(x)), has_aux=True))(x)[1]
    ),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("through", THROUGH)
def test_gradients_of_torchs_go_through_transforms_inside_another_one(
    through: str, inside: str
) -> None:
    def slope(T: Any, x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(THROUGH[through](T, leaf).sum(), leaf)[0]

    # no record: PyTorch runs these
    if through in ("jvp", "hessian") and inside in ("vmap", "aux of grad"):
        x = torch.tensor([1.0, 4.0])
        # for requires_grad_, or for the gradient that goes back no further
        with pytest.raises(RuntimeError):
            INSIDE[inside](torch.func, lambda x: slope(torch.func, x))(x)
        for _ in range(2):  # where ours computes it, from what is recorded so far, it is right
            with contextlib.suppress(RuntimeError):
                same(
                    INSIDE[inside](torchfunc_jax, lambda x: slope(torchfunc_jax, x))(x),
                    slope(torch.func, x),
                )
        return
    run = INSIDE[inside](torchfunc_jax, lambda x: slope(torchfunc_jax, x))
    # torch.func has no jit; torch goes back through no linearize
    truth = torchfunc_jax if through in ("jit", "linearize") else torch.func
    for x in (torch.tensor([1.0, 4.0]), torch.tensor([1.5, -2.0])):
        same(run(x), slope(truth, x))
