"""torch's autograd through a vmap outside of compilation, beside torch.vmap."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import same
from autograd_functions import Cubed
from torch import nn
from torch.utils import _pytree as pytree

import torchfunc_jax
from torchfunc_jax import stack_module_state, vmap


def floats(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype, requires_grad=True
    )


def in_place(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = a * 1
    y[0] = w[0]
    y[1:] *= w[1:]
    return y.add_(1).sin_()


def without_grad(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = (a * w).sum()
    return a * scale + w


# of (transforms, a lane a [3], a tensor w [3] that lanes share)
FUNCTIONS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "element-wise": lambda T, a, w: (a * w).sin() + a,
    "a product": lambda T, a, w: torch.outer(a, w) @ a,
    "shared alone, then not": lambda T, a, w: w.exp().cumsum(0) * a,
    "several outputs, of other shapes and kinds": lambda T, a, w: {
        "m": (a * w).max(),
        "i": (a * w).argmax(),
        "s": torch.sort(a * w),
    },
    "detached": lambda T, a, w: a.detach() * w + (a * w).detach(),
    "no_grad": lambda T, a, w: without_grad(a, w),
    "in place": lambda T, a, w: in_place(a, w),
    "views": lambda T, a, w: a[1:].unsqueeze(0).expand(2, 2) * w[:2].flip(0),
    "used twice": lambda T, a, w: (a * a + a).prod() * w + w.sum() * w,
    "made inside": lambda T, a, w: (
        torch.zeros_like(a).index_fill(0, torch.tensor([1]), 2.0) * a + torch.arange(3) * w
    ),
    "complex": lambda T, a, w: (torch.complex(a, w) ** 2 * torch.complex(w, a)).abs(),
    "an output that is an input": lambda T, a, w: (a, a * w),
    "vmap in vmap": lambda T, a, w: T.vmap(lambda b: (b * a * w).sin())(torch.stack([w, a])),
    "grad in vmap": lambda T, a, w: T.grad(lambda b: (b**3 * w).sum())(a),
    "jvp in vmap": lambda T, a, w: T.jvp(lambda b: b.exp() * w, (a,), (w,))[1],
    "a Function": lambda T, a, w: Cubed.apply(a * w),
    "a loss": lambda T, a, w: F.cross_entropy((a * w)[None], torch.tensor([1])),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dims", [(0, None), (1, None), (None, 0), (0, 0)])
def test_backward_of_a_vmap(name: str, dims: tuple[int | None, int | None]) -> None:
    def sizes(d: int | None) -> torch.Tensor:
        return floats(3) if d is None else floats(*[(4, 3), (3, 4)][d])

    def run(T: Any) -> Any:
        a, w = sizes(dims[0]), sizes(dims[1])
        out = T.vmap(lambda a, w: FUNCTIONS[name](T, a, w), dims)(a, w)
        leaves = pytree.tree_leaves(out)
        total = sum((t.abs() ** 2).sum() for t in leaves if t.requires_grad)
        return (
            out,
            [t.requires_grad for t in leaves],
            torch.autograd.grad(total, (a, w), allow_unused=True, materialize_grads=True),
        )

    if name == "in place" and dims[0] is None:
        dims = (0, 0)  # torch.func writes no mapped value into one that is not
    expected = run(torch.func)
    for _ in range(2):
        same(run(torchfunc_jax), expected)


def test_a_captured_tensor_changed_since_is_an_error_as_in_torch() -> None:
    x, w = floats(4, 3), floats(3).detach()
    out = vmap(lambda a: a * w)(x)
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_result_is_the_callers_to_change() -> None:
    def run(T: Any) -> Any:
        x = floats(4, 3)
        out = T.vmap(lambda a: a.exp())(x)
        kept = out.detach().clone()
        y = out * 2
        with torch.no_grad():
            (out if T is torchfunc_jax else kept).zero_()
        return torch.autograd.grad(y.sum(), x)

    same(run(torchfunc_jax), run(torch.func))


def test_gradients_of_gradients() -> None:
    def run(T: Any) -> Any:
        x, w = floats(4, 3), floats(3)
        out = T.vmap(lambda a: (a * w).sin().sum())(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return torch.autograd.grad((g**2).sum(), (x, w))

    same(run(torchfunc_jax), run(torch.func))


def test_training_an_ensemble_without_jit() -> None:
    def run(T: Any) -> Any:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(3)]
        params, buffers = T.stack_module_state(models)
        optimizer = torch.optim.Adam(params.values(), 0.1)
        x, y = floats(8, 3, dtype=torch.float32).detach(), torch.randint(0, 2, (8,))
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            each = T.vmap(
                lambda p, b: F.cross_entropy(T.functional_call(models[0], (p, b), (x,)), y)
            )(params, buffers)
            each.sum().backward()
            optimizer.step()
            losses.append(each.detach())
        return torch.stack(losses)

    same(run(torchfunc_jax), run(torch.func), rtol=1e-4, atol=1e-5)


def test_what_was_recorded_goes_with_the_graph() -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]
    params, _ = stack_module_state(models)
    x = torch.randn(2, 3)
    seen = weakref.ref(x)
    out = vmap(lambda p, a: torchfunc_jax.functional_call(models[0], p, (a,)))(params, x)
    out.sum().backward()
    del out, x
    gc.collect()
    assert seen() is None
