"""patch(): every name of torch.func's and functorch's is ours while it is in effect, and torch's
again afterwards, come what may.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import functorch
import functorch.experimental
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# `from` imports, as programs have them; the patch must reach these names too
from torch.func import functional_call, grad, jacrev
from torch.func import vmap as mapped

import torchfunc_jax
from bridge.process import process
from bridge.record.tensor import Recorded
from bridge.trace.tracing import Traced
from torchfunc_jax import patch, patching

EVERY = [
    *((torch.func, name) for name in torch.func.__all__ if name != "rearrange"),
    (torch, "vmap"),
    *(
        (functorch, name)
        for name, x in vars(functorch).items()
        if not (name.startswith("_") or name == "make_fx" or inspect.ismodule(x))
    ),
    *(
        (functorch.experimental, name)
        for name in dir(functorch.experimental)
        if not name.startswith("_")
    ),
]
NAMESPACES = (torch, torch.func, functorch, functorch.experimental, sys.modules[__name__])


@pytest.fixture(autouse=True)
def _left_as_it_was() -> Iterator[None]:
    before = [
        {k: v for k, v in vars(m).items() if id(v) in patching._replacements()} for m in NAMESPACES
    ]
    yield
    for m, names in zip(NAMESPACES, before, strict=True):
        assert names and all(vars(m)[k] is v for k, v in names.items())
    assert process.patches == 0 and not process.patched


def runs_on_jax(transform: Any) -> bool:
    """Whether a transform shows the function traced tensors."""
    seen = []
    transform(lambda x: seen.append(type(x)) or x.sin())(torch.tensor(0.5))
    return seen[0] in (Traced, Recorded)


@pytest.mark.parametrize(("module", "name"), EVERY, ids=lambda x: getattr(x, "__name__", x))
def test_every_name_is_ours(module: types.ModuleType, name: str) -> None:
    before = getattr(module, name)
    with patch():
        assert getattr(module, name) is getattr(torchfunc_jax, name)
    assert getattr(module, name) is before


def test_names_imported_earlier() -> None:
    assert not runs_on_jax(grad)
    with patch():
        assert (
            grad is torchfunc_jax.grad
            and mapped is torchfunc_jax.vmap
            and jacrev is torchfunc_jax.jacrev
        )
        assert runs_on_jax(grad) and runs_on_jax(torch.func.grad) and runs_on_jax(functorch.grad)
    assert not runs_on_jax(grad) and not runs_on_jax(torch.func.grad)


def test_torch_itself_is_left_alone() -> None:
    internals = [
        (m, name, value)
        for key, m in list(sys.modules.items())
        if key.startswith("torch.") and key != "torch.func"
        for name, value in list(vars(m).items())
        if id(value) in patching._replacements()
    ]
    assert len(internals) > 20
    with patch():
        assert all(vars(m)[name] is value for m, name, value in internals)


def test_values_of_a_program_with_nested_transforms_and_modules() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    params = {k: p.detach() for k, p in model.named_parameters()}

    def program() -> Any:
        loss = lambda p, x: functional_call(model, p, (x,)).square().sum()
        per_sample = torch.vmap(grad(loss), in_dims=(None, 0))(params, x)
        return (
            per_sample,
            torch.func.hessian(lambda x: loss(params, x))(x[0]),
            jacrev(torch.sin)(x[0]),
        )

    expected = program()
    with patch():
        torch.testing.assert_close(program(), expected)


def test_functional_call_does_not_call_itself() -> None:
    model = nn.Linear(2, 1)
    with patch():
        out = torch.func.functional_call(
            model, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, torch.ones(1, 2)
        )
    assert out.item() == 2


@pytest.mark.filterwarnings("error")
def test_functorch_without_its_warnings() -> None:
    with patch():
        func, params = functorch.make_functional(nn.Linear(2, 1))
        assert type(func) is torchfunc_jax.FunctionalModule
        functorch.vmap(functorch.grad(lambda x: func(params, x).sum()))(torch.ones(3, 2))


def test_the_real_torch_func_inside_a_traced_function() -> None:
    real = patching.ORIGINAL
    f = lambda x: real.vmap(real.grad(torch.sin))(x).sum()
    x = torch.linspace(0, 1, 3)
    expected = real.grad(f)(x)
    torch.testing.assert_close(torchfunc_jax.grad(f)(x), expected)
    with patch():
        torch.testing.assert_close(torch.func.grad(f)(x), expected)
        torch.testing.assert_close(
            torch.func.grad(lambda x: torch.vmap(grad(torch.sin))(x).sum())(x), expected
        )


def test_what_torch_computes_by_vmap() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    causal = lambda b, h, q, k: q >= k
    make = lambda: create_block_mask(
        causal, B=None, H=None, Q_LEN=256, KV_LEN=256, device="cpu"
    ).to_dense()
    expected = make()
    with patch():
        torch.testing.assert_close(make(), expected)


@pytest.mark.parametrize("wrap", [lambda f: f, torchfunc_jax.jit], ids=["eager", "jit"])
def test_recorders_see_torchs_own(wrap: Any) -> None:
    f, x = wrap(torchfunc_jax.vmap(torch.sin)), torch.ones(3)
    f(x)
    assert type(f(FakeTensorMode().from_tensor(x))) is FakeTensor  # outside of its mode
    with patch():
        assert "sin" in functorch.make_fx(f)(x).code
        assert "sin" in functorch.make_fx(patching.ORIGINAL.vmap(torch.sin))(x).code
    torch.testing.assert_close(f(x), x.sin())


# -- undoing ---------------------------------------------------------------------------------------
def test_as_a_function() -> None:
    patched = patch()
    assert torch.vmap is torchfunc_jax.vmap
    patched.undo()
    assert torch.vmap is not torchfunc_jax.vmap
    patched.undo()
    with patched:  # and once more
        assert torch.vmap is torchfunc_jax.vmap
    assert torch.vmap is not torchfunc_jax.vmap


def test_nested() -> None:
    with patch():
        with patch():
            assert torch.func.vmap is torchfunc_jax.vmap
        assert torch.func.vmap is torchfunc_jax.vmap


def test_the_same_one_nested() -> None:
    patched = patch()
    with patched:
        with patched:
            assert torch.vmap is torchfunc_jax.vmap
        assert torch.vmap is torchfunc_jax.vmap
    assert torch.vmap is not torchfunc_jax.vmap


def test_overlapping() -> None:
    first, second = patch(), patch()
    first.undo()
    assert torch.vmap is torchfunc_jax.vmap
    second.undo()
    assert torch.vmap is not torchfunc_jax.vmap


def test_errors_undo() -> None:
    with pytest.raises(ZeroDivisionError), patch():
        torch.func.grad(lambda x: x / (1 // 0))(torch.ones(()))
    assert torch.func.grad is not torchfunc_jax.grad


def test_threads() -> None:
    failures: list[Any] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for _ in range(5):
            with patch():
                if torch.vmap is not torchfunc_jax.vmap or functorch.grad is not torchfunc_jax.grad:
                    failures.append("not patched")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_a_name_bound_anew_meanwhile_stays() -> None:
    module = types.ModuleType("somebody_elses")
    module.vmap = torch.vmap  # type: ignore[attr-defined]
    sys.modules["somebody_elses"] = module
    try:
        with patch():
            assert module.vmap is torchfunc_jax.vmap
            module.vmap = "mine"
        assert module.vmap == "mine"
    finally:
        del sys.modules["somebody_elses"]
