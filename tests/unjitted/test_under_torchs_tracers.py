"""Where torch must look through: under its tracers, modes and transforms, a call of ours is a call
of torch.func's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch
import torch.utils.flop_counter
from agreement import same
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import torchfunc_jax
from bridge.trace.levels import state
from torchfunc_jax import patch, patching

REAL = patching.ORIGINAL  # torch.func's own, also while it is patched

torch.manual_seed(0)
_net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
_params = {name: p.detach() for name, p in _net.named_parameters()}
_stacked = {name: torch.stack([p, 2 * p]) for name, p in _params.items()}


def _loss(params: Any, row: torch.Tensor) -> torch.Tensor:
    return (torch.func.functional_call(_net, params, (row,)) ** 2).sum()


#: Programs in torch.func's names, which a patch replaces; x has shape [2, 3].
PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "vmap": lambda x: torch.vmap(lambda row: row.sin() * row.sum(), randomness="same")(x),
    "vmap with out_dims": lambda x: torch.func.vmap(
        lambda row, s: row * s, in_dims=(1, None), out_dims=1
    )(x, x[0, 0]),
    "grad": lambda x: torch.func.grad(lambda a: (a**3).sum())(x),
    "grad_and_value": lambda x: torch.func.grad_and_value(
        lambda a, b: (a * b.cos()).sum(), argnums=(0, 1)
    )(x, x + 1),
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x * 2,))[1],
    "jacrev": lambda x: torch.func.jacrev(lambda row: row.exp() * row.sum())(x[0]),
    "jacfwd": lambda x: torch.func.jacfwd(lambda row: row.exp() * row.sum())(x[0]),
    "hessian": lambda x: torch.vmap(torch.func.hessian(lambda row: (row**3).sum()))(x),
    "linearize": lambda x: torch.func.linearize(torch.sin, x)[1](x),
    "functional_call": lambda x: torch.func.functional_call(_net, _params, (x,)),
    "gradients per sample": lambda x: torch.vmap(torch.func.grad(_loss), in_dims=(None, 0))(
        _params, x
    ),
    "an ensemble": lambda x: torch.vmap(lambda p: torch.func.functional_call(_net, p, (x,)))(
        _stacked
    ),
}

#: What torch.func does not have: the truth is the call itself where torch does not look.
CALCULUS: dict[str, Callable[[torch.Tensor], Any]] = {
    "hvp": lambda x: torchfunc_jax.hvp(
        lambda a, b: ((a**3 * b).sum(), a), (x, x[0]), (x.cos(), x[1]), has_aux=True
    ),
    "jacobian_diagonal": lambda x: torchfunc_jax.jacobian_diagonal(
        lambda a, b: a.sin() * b.sum(), (0, 1)
    )(x[0], x[1]),
    "laplacian": lambda x: torchfunc_jax.laplacian(lambda a, b: (a["p"] ** 3 * b).sum(-1), (0, 1))(
        {"p": x}, x[0]
    ),
    "jet": lambda x: torchfunc_jax.jet(
        lambda a, b: {"out": a.exp() * b}, (x, x[0]), ((x, x + 1, x), (x[1], x[1], x[1]))
    ),
    "jet, coefficients": lambda x: torchfunc_jax.jet(
        torch.exp, [x], [[x, x + 1, x]], factorial_scaled=False
    ),
}

QUICK = (
    "FakeTensorMode",
    "a FakeTensor outside of its mode",
    "torch.func.vmap",
    "torch.func.grad",
    "a dispatch mode",
)
#: torch.func's own call fails there and leaves its levels behind, or reads memory that nothing was
#: written to, if nothing else is said.
FAILS = (
    {("jacfwd", "export, strict"), ("hessian", "export, strict")}
    | {
        # Dynamo fails, also without this library, and keeps a guard that switches autograd off for
        # the thread when it is garbage collected
        ("hessian", look)
        for look in ("compile, fullgraph", "compile", "compile by aot_eager")
    }
    | {
        ("linearize", look)
        for look in ("torch.func.vmap", "torch.func.grad", "torch.func.jvp", "forward_ad")
        # dynamo fails at a jvp of a jvp
    }
    | {(name, "compile, fullgraph") for name in ("jet", "jet, coefficients")}
)


def _flat(out: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(out)


def _exported(program: Callable[..., Any], x: torch.Tensor, strict: bool) -> Any:
    class Program(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return program(x)

    return torch.export.export(Program(), (x,), strict=strict).module()(x)


def _compiled(program: Callable[..., Any], x: torch.Tensor, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(program, **options)(x)


def _faked(program: Callable[..., Any], x: torch.Tensor, outside: bool = False) -> Any:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.nullcontext() if outside else mode:
        return [(type(t), t.shape, t.dtype) for t in _flat(program(mode.from_tensor(x)))]


def _dual(program: Callable[..., Any], x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return [
            tuple(forward_ad.unpack_dual(t))
            for t in _flat(program(forward_ad.make_dual(x, x.cos())))
        ]


def _counted(program: Callable[..., Any], x: torch.Tensor) -> Any:
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        out = program(x)
    return out, counter.get_total_flops()


LOOKS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "make_fx": lambda f, x: make_fx(f)(x)(x + 1),
    "make_fx with fake tensors": lambda f, x: make_fx(
        f, tracing_mode="fake", _allow_non_fake_inputs=True
    )(x)(x + 1),
    "export": lambda f, x: _exported(f, x, False),
    "export, strict": lambda f, x: _exported(f, x, True),
    "compile, fullgraph": lambda f, x: _compiled(f, x, backend="eager", fullgraph=True),
    "compile": lambda f, x: _compiled(f, x, backend="eager"),
    "compile by aot_eager": lambda f, x: _compiled(f, x, backend="aot_eager", fullgraph=True),
    "FakeTensorMode": _faked,
    "a FakeTensor outside of its mode": lambda f, x: _faked(f, x, outside=True),
    "torch.func.vmap": lambda f, x: REAL.vmap(f)(torch.stack([x, 2 * x])),
    "torch.func.grad": lambda f, x: REAL.grad(lambda a: sum(t.sum() for t in _flat(f(a))))(x),
    "torch.func.jvp": lambda f, x: REAL.jvp(f, (x,), (x.cos(),)),
    "forward_ad": _dual,
    "a dispatch mode": _counted,
}


def _outcome(look: str, program: Callable[..., Any], x: torch.Tensor) -> Any:
    try:
        out = LOOKS[look](program, x)
    except Exception as error:  # whatever torch.func's own call raises there
        return type(error)
    # torch.export of torch.func.grad
    return "fake" if any(isinstance(t, FakeTensor) for t in _flat(out)) else out


def _cases(names: Any, looks: Any, fast: Any) -> list[Any]:
    cases = [case for case in itertools.product(names, looks) if case not in FAILS]
    return [
        case if case[1] in QUICK or case in fast else pytest.param(*case, marks=pytest.mark.slow)
        for case in cases
    ]


@pytest.mark.parametrize(
    ("name", "look"),
    _cases(
        PROGRAMS,
        LOOKS,
        [
            ("vmap", "compile, fullgraph"),
            ("gradients per sample", "compile, fullgraph"),
            ("jacrev", "compile"),
            ("vmap", "export"),
            ("functional_call", "export, strict"),
        ],
    ),
)
def test_a_patched_program_is_torchs_where_torch_looks(name: str, look: str) -> None:
    program, x = PROGRAMS[name], torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    expected = _outcome(look, program, x)
    with patch():
        found = _outcome(look, program, x)
    assert state.level is None and state.recorder is None
    _agree(found, expected)


@pytest.mark.parametrize(
    ("name", "look"),
    _cases(
        CALCULUS,
        ["make_fx", "compile, fullgraph", "torch.func.vmap", "FakeTensorMode"],
        [("hvp", "compile, fullgraph"), ("jet", "make_fx")],
    ),
)
def test_what_torch_func_does_not_have_is_nested_where_torch_looks(name: str, look: str) -> None:
    program, x = CALCULUS[name], torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    given = x + 1 if look == "make_fx" else x
    if look == "torch.func.vmap":
        expected = torch.utils._pytree.tree_map(
            lambda *t: torch.stack(t), program(x), program(2 * x)
        )
    elif look == "FakeTensorMode":
        expected = [(FakeTensor, t.shape, t.dtype) for t in _flat(program(x))]
    else:
        expected = program(given)
    same(LOOKS[look](program, x), expected, rtol=1e-5, atol=1e-5)


def _agree(found: Any, expected: Any) -> None:
    if isinstance(expected, type | str):
        print(expected)
        assert found == expected
    else:
        same(found, expected, rtol=1e-6, atol=1e-6)


# -- what was made outside -------------------------------------------------------------------------
_X = torch.randn(2, 3, generator=torch.Generator().manual_seed(2))
#: (T, x) -> a function made before torch looks; jit's is the function itself where torch looks.
MADE: dict[str, Callable[[Any, Callable[[Any], Any]], Callable[[torch.Tensor], Any]]] = {
    "vmap": lambda T, jit: T.vmap(lambda row: row.sin() * row.sum()),
    "grad in vmap": lambda T, jit: T.vmap(T.grad(lambda row: (row**3).sum())),
    "functionalize": lambda T, jit: T.functionalize(lambda x: x.clone().mul_(2)),
    "chunks": lambda T, jit: T.vmap(torch.sin, chunk_size=1),
    "jit": lambda T, jit: jit(lambda x: x.exp() * 2),
    "jit of vmap": lambda T, jit: jit(T.vmap(T.grad(lambda row: (row**3).sum()))),
    "vmap of jit": lambda T, jit: T.vmap(jit(torch.sin)),
    "pullback": lambda T, jit: T.vjp(torch.sin, _X)[1],
    "pushforward": lambda T, jit: (
        T.linearize(torch.sin, _X)[1]
        if T is torchfunc_jax
        else lambda t: T.jvp(torch.sin, (_X,), (t,))[1]
    ),
    "pullback of jit": lambda T, jit: T.vjp(jit(torch.sin), _X)[1],
}


@pytest.mark.parametrize(
    ("name", "look"),
    _cases(
        MADE,
        [*QUICK, "make_fx", "compile, fullgraph", "torch.func.jvp"],
        [
            ("jit", "compile, fullgraph"),
            ("grad in vmap", "compile, fullgraph"),
            ("pushforward", "compile, fullgraph"),
            ("pullback", "torch.func.jvp"),
            ("pushforward", "torch.func.jvp"),
        ],
    ),
)
def test_what_was_made_outside_is_torchs_where_torch_looks(name: str, look: str) -> None:
    theirs = MADE[name](REAL, lambda f: f)
    ours = MADE[name](torchfunc_jax, torchfunc_jax.jit)
    ours(_X)
    expected, found = _outcome(look, theirs, _X), _outcome(look, ours, _X)
    # torch.func's own pullback cannot be recorded by make_fx, ours is made anew
    if not isinstance(expected, type):
        _agree(found, expected)
    same(ours(_X), theirs(_X), rtol=1e-6, atol=1e-6)  # and JAX's again afterwards


_MODE = FakeTensorMode(allow_non_fake_inputs=True)
_FAKE = _MODE.from_tensor(_X[0])
#: Calls that capture a FakeTensor outside of its mode.
CAPTURES: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "vmap": lambda T, jit: jit(T.vmap(lambda row: row * _FAKE))(_X),
    "grad": lambda T, jit: jit(T.grad(lambda x: (x * _FAKE).sum()))(_X),
    "vjp": lambda T, jit: jit(lambda x: T.vjp(lambda x: x * _FAKE, x)[0])(_X),
    "functionalize": lambda T, jit: jit(T.functionalize(lambda x: x * _FAKE))(_X),
    "grad in vmap": lambda T, jit: jit(T.vmap(T.grad(lambda x: (x * _FAKE).sum())))(_X),
}


@pytest.mark.parametrize("around", [lambda f: f, torchfunc_jax.jit], ids=["un-jitted", "jit"])
@pytest.mark.parametrize("name", CAPTURES)
def test_a_captured_fake_tensor_is_torchs(name: str, around: Any) -> None:
    for _ in range(2):
        found, expected = CAPTURES[name](torchfunc_jax, around), CAPTURES[name](REAL, lambda f: f)
        assert type(found) is FakeTensor and found.shape == expected.shape
    assert state.level is None and state.recorder is None


def test_jit_inside_of_what_torch_compiles() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torchfunc_jax.jit(lambda a: a.sin() * 2)(x) + 1, backend="eager", fullgraph=True
    )
    same(compiled(_X), _X.sin() * 2 + 1)


@pytest.mark.slow
def test_inductor_compiles_a_patched_program() -> None:
    with patch():
        same(
            _compiled(PROGRAMS["gradients per sample"], _X, fullgraph=True),
            PROGRAMS["gradients per sample"](_X),
            rtol=1e-4,
            atol=1e-5,
        )


def test_a_graph_break_inside() -> None:
    def breaks(row: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return row.sin()

    same(_compiled(torchfunc_jax.vmap(breaks), _X, backend="eager"), _X.sin())
    same(_compiled(lambda x: torchfunc_jax.vmap(breaks)(x) + 1, _X, backend="eager"), _X.sin() + 1)


@pytest.mark.parametrize("around", [lambda f: f, torchfunc_jax.jit], ids=["un-jitted", "jit"])
def test_torchs_transform_between_two_of_ours(around: Any) -> None:
    def f(T: Any, x: torch.Tensor) -> torch.Tensor:
        return T.grad(
            lambda a: REAL.vmap(lambda row: T.grad(lambda b: (b**3).sum())(row) * row.sum())(
                a
            ).sum()
        )(x)

    same(around(lambda x: f(torchfunc_jax, x))(_X), f(REAL, _X))


def test_jax_arrays_stay_in_jax_where_torch_looks() -> None:
    x = jnp.arange(3.0)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        for call in (torchfunc_jax.vmap(torch.sin), torchfunc_jax.jit(torch.sin)):
            assert jnp.allclose(call(x), jnp.sin(x))
