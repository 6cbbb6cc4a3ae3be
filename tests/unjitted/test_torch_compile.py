"""Beside torch's own machinery: programs that torch.compile compiles, and torch's own transforms,
around ours.
"""

from __future__ import annotations

import copy
import queue
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from agreement import same
from torch import nn
from torch.autograd import forward_ad

import torchfunc_jax
from bridge.trace.levels import state
from torchfunc_jax import grad, jit, vmap

COMPILED = {
    "vmap": lambda T, a: T.vmap(torch.sin)(a * 2) + 1,
    "grad": lambda T, a: T.grad(lambda b: (b**3).sum())(a) * 2,
    "vjp": lambda T, a: T.vjp(torch.sin, a)[1](a)[0] + 1,
    "jvp": lambda T, a: T.jvp(torch.sin, (a,), (a * 2,))[1],
    "jacrev": lambda T, a: T.jacrev(torch.sin)(a[0]) + 1,
    "hessian": lambda T, a: T.hessian(lambda b: (b**3).sum())(a[0]),
    "functional_call": lambda T, a: (
        T.functional_call(_linear, {"weight": a, "bias": a[:, 0]}, (a,)) * 2
    ),
}
_linear = nn.Linear(3, 2)
_jitted = jit(vmap(lambda a: a.exp() * 2))


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compile_of_a_program_that_calls_a_transform(name: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 3)
    compiled = torch.compile(lambda a: COMPILED[name](torchfunc_jax, a), backend="eager")
    same(compiled(x), COMPILED[name](torch.func, x), rtol=1e-5, atol=1e-6)


def test_torch_compile_of_a_training_step() -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 3)

    def gradients(call: Any) -> list[torch.Tensor]:
        _linear.zero_grad()
        (call(_linear(x)) ** 2).sum().backward()
        return [p.grad.clone() for p in _linear.parameters()]

    expected = gradients(lambda a: a.exp() * 2)
    for call in (lambda a: _jitted(a), vmap(lambda a: a.exp() * 2)):
        same(torch.compile(gradients, backend="eager")(call), expected, rtol=1e-4, atol=1e-5)


def test_torch_compiles_what_is_inside_of_a_transform() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(2, 3)
    same(
        torch.compile(lambda a: _jitted(a * 2) + 1, backend=backend, fullgraph=True)(x),
        (x * 2).exp() * 2 + 1,
        rtol=1e-5,
        atol=1e-6,
    )
    assert len(graphs) == 1


#: What torch.compile is given, with the truth: (what is compiled with these options, the plain
#: function).
TO_COMPILE: dict[str, Any] = {
    "a function": lambda options: (torch.compile(_of_two, **options), _of_two),
    "a module": lambda options: (torch.compile(_layers, **options), _layers),
    "a method of a module": lambda options: (
        (m := copy.deepcopy(_layers)).compile(**options),
        (m, _layers),
    )[1],
    "a decorated function": lambda options: (torch.compile(**options)(_of_two), _of_two),
    "inside of the function": lambda options: (
        lambda x: torch.compile(_of_two, **options)(x),
        _of_two,
    ),
    "one that calls a compiled one": lambda options: (
        torch.compile(lambda x: torch.compile(_of_two, **options)(x), **options),
        _of_two,
    ),
}
TRANSFORMS = {
    "vmap": lambda T, f: T.vmap(f),
    "grad": lambda T, f: T.grad(lambda x: f(x).sum()),
    "jvp": lambda T, f: lambda x: T.jvp(f, (x,), (x,))[1],
    "vmap of grad": lambda T, f: T.vmap(T.grad(lambda x: f(x).sum())),
    "jacrev": lambda T, f: T.jacrev(f),
}
_layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())


def _of_two(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2 if x.shape[-1] == 3 else x


@pytest.mark.thin(4)
@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jit"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize("what", TO_COMPILE)
def test_a_transform_of_a_compiled_function(
    what: str, fullgraph: bool, transform: str, jitted: bool
) -> None:
    torch._dynamo.reset()
    frames: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        frames.append(graph)
        return graph.forward

    compiled, plain = TO_COMPILE[what]({"backend": backend, "fullgraph": fullgraph})
    ours, theirs = (
        TRANSFORMS[transform](torchfunc_jax, compiled),
        TRANSFORMS[transform](torch.func, plain),
    )
    if jitted:
        ours = jit(ours)
    for x in (torch.randn(2, 3), torch.randn(4, 3)):
        same(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert not frames  # a frame of ours that torch.compile compiled would take a second
    if what in ("a function", "a decorated function"):
        same(compiled(x), plain(x))
        assert len(frames) == 1


def test_another_thread_compiles_while_a_trace_is_open() -> None:
    torch._dynamo.reset()
    frames: list[Any] = []
    compiled = torch.compile(
        _of_two, backend=lambda graph, _: frames.append(graph) or graph.forward, fullgraph=True
    )
    x, answers = torch.randn(2, 3), queue.Queue[torch.Tensor]()

    def f(a: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: answers.put(compiled(x)))
        thread.start()
        thread.join()
        return compiled(a)

    same(vmap(f)(x), x.sin() * 2)
    same(answers.get(), x.sin() * 2)
    assert len(frames) == 1


def test_nothing_imports_dynamo_or_sympy() -> None:
    """They take seconds, so neither the import nor a first call does; torch.compile works
    afterwards, also on what was kept out of it.
    """
    program = """
import sys, torch
from bridge import private_meta
had = "torch._dynamo" in sys.modules or "sympy" in sys.modules
import torchfunc_jax
from torch.nn import functional as F
from torchfunc_jax import grad, jit, vmap
f = lambda t: (torch.relu(t @ t) * t.sin() + 1).softmax(0).sum()
t = torch.rand(3, 3)
found = [vmap(f)(t), grad(f)(t[0]), vmap(grad(f))(t), jit(vmap(f))(t)]
torchfunc_jax.hessian(f)(t[0])
lazy = vmap(lambda row: f(row.as_strided(row.shape, row.stride())))(t)
images, weight = torch.rand(2, 3, 8, 8), torch.rand(4, 3, 3, 3)
def loss(w, x):
    y = F.layer_norm(F.max_pool2d(F.conv2d(x[None], w).relu(), 2), (3, 3))
    return F.mse_loss(y.flatten(1), torch.zeros(1, 36))
grads = vmap(grad(loss), (None, 0))(weight, images)
def entropy(w):
    y = torch.stack([F.embedding(torch.tensor([1, 2, 0]), w)])[0]
    return F.cross_entropy(y.tanh(), torch.tensor([0, 1, 2]))
grad(entropy)(t)
shapes = "torch.fx.experimental.symbolic_shapes"
assert had or not {"torch._dynamo", "sympy", shapes} & set(sys.modules)
torch.testing.assert_close(grads, torch.stack([torch.func.grad(loss)(weight, x) for x in images]))
with private_meta.of_plain_sizes():  # what another thread may meet
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false
    assert isinstance(sympy.Integer(1), sympy.Basic) and ShapeEnv.__module__ == shapes
    assert guard_or_false(True) is True and type(sys.modules["sympy"]) is type(sys)
functions = vmap(f), f, lambda t: torch._refs.mul(t, t)
again = [torch.compile(each, backend="eager")(t) for each in functions]
torch.testing.assert_close([*again, lazy], [torch.func.vmap(f)(t), f(t), t * t, found[0]])
meta = torch.compile(lambda t: torch.mul(t, t).sin(), backend="eager")(t.to("meta"))
assert meta.shape == t.shape
normed = lambda t: F.layer_norm(torch.stack([t, t]), t.shape[1:])
sizes = torch.compile(normed, backend="eager", dynamic=True)
assert [sizes(torch.rand(2, n)).shape for n in (3, 5)] == [(2, 2, 3), (2, 2, 5)]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# -- torch's own transforms around ours ------------------------------------------------------------
AROUND = {
    "grad": lambda T, f, a: T.grad(lambda b: f(b).sum())(a),
    "vmap": lambda T, f, a: T.vmap(f)(a[None]),
    "jvp": lambda T, f, a: T.jvp(f, (a,), (a,))[1],
    "jacrev": lambda T, f, a: T.jacrev(f)(a),
    "jacfwd": lambda T, f, a: T.jacfwd(f)(a),
    "linearize": lambda T, f, a: T.linearize(f, a)[1](a),
    "functionalize": lambda T, f, a: T.functionalize(f)(a),
    "captured": lambda T, f, a: T.grad(lambda b: (f(a) * b).sum())(a),
    "captured inside": lambda T, f, a: T.grad(lambda b: T.vmap(lambda row: row * b.sum())(a).sum())(
        a
    ),
}
INNER = {
    "vmap": vmap(torch.sin),
    "jit": jit(torch.sin),
    "vmap of jit": vmap(jit(torch.sin)),
    "grad": grad(lambda a: a.sin().sum()),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("around", [name for name in AROUND if name != "captured inside"])
def test_torchs_transform_around_ours(around: str, inner: str) -> None:
    x = torch.randn(2, 3)
    expected = AROUND[around](torch.func, torch.cos if inner == "grad" else torch.sin, x)
    same(AROUND[around](torch.func, INNER[inner], x), expected)
    assert state.level is None
    same(AROUND[around](torchfunc_jax, INNER[inner], x), expected)
    with torchfunc_jax.patch():
        same(AROUND[around](torch.func, INNER[inner], x), expected)


def test_a_tensor_of_torchs_transform_captured_by_ours() -> None:
    x = torch.randn(2, 3)
    around = AROUND["captured inside"]
    expected = around(torch.func, None, x)
    for mine in (vmap, lambda f: jit(vmap(f))):
        same(
            torch.func.grad(lambda a, mine=mine: mine(lambda row: row * a.sum())(x).sum())(x),
            expected * 0 + x.sum(),
        )
    same(around(torchfunc_jax, None, x), expected)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_torchs_forward_mode_around_ours(mode: str) -> None:
    x = torch.randn(2, 3)
    call = vmap(torch.sin) if mode == "eager" else jit(torch.sin)
    with forward_ad.dual_level():
        same(
            tuple(forward_ad.unpack_dual(call(forward_ad.make_dual(x, x)))), (x.sin(), x.cos() * x)
        )
    same(call(x), x.sin())


def _tangent(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        tangent: torch.Tensor = forward_ad.unpack_dual(
            forward_ad.make_dual(x, torch.ones_like(x)).sin()
        ).tangent
        return tangent


def _diagonal(x: torch.Tensor) -> torch.Tensor:
    jacobian: Any = torch.autograd.functional.jacobian(
        torch.sin, x.flatten(), strategy="forward-mode", vectorize=True
    )
    return jacobian.diagonal().reshape(x.shape)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("forward", [_tangent, _diagonal])
def test_torchs_forward_mode_inside_ours(forward: Any, around: str) -> None:
    """torch.func refuses forward mode inside of forward mode."""
    x = torch.randn(2, 3)
    found = jit(lambda: AROUND[around](torchfunc_jax, forward, x))()
    same(found, AROUND[around](torch.func, torch.cos, x))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("forward", [_tangent, _diagonal])
def test_torchs_forward_mode_inside_ours_where_pytorch_runs_it(forward: Any, around: str) -> None:
    """As in torch.func, which also gives tensors of a vmap that has ended, with which nothing can
    be done.

    linearize and functionalize do more: the first goes backwards, and the second is the function
    itself.
    """
    x = torch.randn(2, 3)
    true = AROUND[around](torch.func, torch.cos, x)
    more = around == "functionalize" or (around, forward) == ("linearize", _tangent)
    refused = None if more else _refusal(lambda: same(AROUND[around](torch.func, forward, x), true))
    assert refused in (None, RuntimeError)
    for _ in range(2):
        assert _refusal(lambda: same(AROUND[around](torchfunc_jax, forward, x), true)) is refused
        assert (
            forward_ad._current_level == -1 and torch._C._functorch.peek_interpreter_stack() is None
        )
        assert state.level is None and state.recorder is None


def _refusal(call: Any) -> type[Exception] | None:
    """The class of the exception that a call raises, other than that the values are wrong."""
    try:
        call()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return type(error)
    return None


def test_our_vmap_of_torchs_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    for call in (vmap(torch.sin), jit(torch.sin)):
        out = call(x)
        same(
            vmap(lambda ct, out=out: torch.autograd.grad(out, x, ct, retain_graph=True)[0])(
                torch.eye(3)
            ),
            torch.diag(x.cos()),
            graph=False,
        )
