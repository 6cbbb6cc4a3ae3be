"""requires_grad and is_leaf of the results of transforms inside a function, which user code asks
for, as torch.func has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchfunc_jax

X = torch.tensor([0.3, -0.7, 1.1])


def _without_grad(f: Callable[..., Any], *args: Any) -> Any:
    with torch.no_grad():
        return f(*args)


#: Functions (torch.func or ours, the outer transform's argument) of which the result is looked at.
LOOKED_AT: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "the argument": lambda T, x: x,
    "an operator": lambda T, x: x * 2,
    "detach": lambda T, x: (x * 2).detach(),
    "a captured constant": lambda T, x: X,
    "written": lambda T, x: x.clone().mul_(2),
    "grad": lambda T, x: T.grad(lambda t: (t**3).sum())(x),
    "grad of another tensor": lambda T, x: T.grad(lambda t: (t**3).sum())(X),
    "grad that captures it": lambda T, x: T.grad(lambda t: (t * x).sum())(X),
    "grad twice": lambda T, x: T.grad(lambda t: T.grad(lambda u: (u**3).sum())(t).sum())(x),
    "grad under no_grad": lambda T, x: _without_grad(T.grad(lambda t: (t**3).sum()), x),
    "aux": lambda T, x: T.grad(lambda t: ((t**2).sum(), x * 2), has_aux=True)(X)[1],
    "an aux of integers": lambda T, x: T.grad(lambda t: ((t**2).sum(), t.argmax()), has_aux=True)(
        x
    )[1],
    "the value": lambda T, x: T.grad_and_value(lambda t: (t * x).sum())(X)[1],
    "vjp": lambda T, x: T.vjp(torch.sin, x)[0],
    "a pullback": lambda T, x: T.vjp(torch.sin, x)[1](X)[0],
    "a pullback of it": lambda T, x: T.vjp(torch.sin, X)[1](x)[0],
    "jvp": lambda T, x: T.jvp(torch.sin, (x,), (X,))[0],
    "a tangent": lambda T, x: T.jvp(torch.sin, (X,), (x,))[1],
    "linearize": lambda T, x: T.linearize(torch.sin, x)[0],
    "a pushforward": lambda T, x: T.linearize(torch.sin, x)[1](X),
    "vmap": lambda T, x: T.vmap(torch.sin)(x),
    "a mask": lambda T, x: T.vmap(lambda t: t > 0)(x),
    "jacrev": lambda T, x: T.jacrev(torch.sin)(x),
    "jacfwd": lambda T, x: T.jacfwd(torch.sin)(x),
    "hessian": lambda T, x: T.hessian(lambda t: (t**3).sum())(x),
}
AROUND: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda T, f: T.grad(f)(X.clone()),
    "vjp": lambda T, f: T.vjp(f, X.clone()),
    "vmap of grad": lambda T, f: T.vmap(T.grad(f))(X.clone()[None]),
    "grad of grad": lambda T, f: T.grad(lambda x: T.grad(f)(x).sum())(X.clone()),
    "vmap": lambda T, f: T.vmap(f)(X.clone()[None]),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", LOOKED_AT)
def test_requires_grad_and_is_leaf(name: str, around: str) -> None:
    if around == "vmap" and name in ("linearize", "a pushforward"):
        pytest.skip("torch.func cannot do it")

    def seen(T: Any) -> tuple[bool, bool]:
        found = []

        def f(x: torch.Tensor) -> torch.Tensor:
            t = LOOKED_AT[name](T, x)
            found.append((t.requires_grad, t.is_leaf))
            return x.sum()

        AROUND[around](T, f)
        return found[-1]

    assert seen(torchfunc_jax) == seen(torch.func)


@pytest.mark.parametrize("around", ["grad", "vjp", "grad of grad"])
def test_allclose_beside_a_captured_tensor_that_requires_grad(around: str) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    found = []

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * weight
        found.append((torch.allclose(y, y * 1), torch.allclose(y, x)))
        return y.sum()

    for T in (torch.func, torchfunc_jax):
        AROUND[around](T, f)
        assert set(found) == {(True, False)}
        found.clear()
