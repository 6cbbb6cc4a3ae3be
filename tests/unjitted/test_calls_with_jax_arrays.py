"""Un-jitted calls with jax.Arrays: they are recorded as those with tensors are, and their results
are jax.Arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import bridge
from torchfunc_jax import (
    functionalize,
    grad,
    grad_and_value,
    hessian,
    hvp,
    jacfwd,
    jacrev,
    jet,
    jvp,
    linearize,
    vjp,
    vmap,
)

SCALE = torch.tensor([1.5, -0.5, 2.0], requires_grad=True)


def _wave(x: Any) -> Any:
    return (x.sin() * SCALE).cumsum(-1)


def _energy(x: Any) -> Any:
    return _wave(x).square().sum()


CALLS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda x: vmap(_wave)(x),
    "vmap, a dict": lambda x: vmap(lambda d: {"out": d["x"] * 2, "sum": d["x"].sum()})({"x": x}),
    "grad": lambda x: grad(_energy)(x),
    "vmap of grad": lambda x: vmap(grad(_energy))(x),
    "grad_and_value": lambda x: grad_and_value(_energy)(x),
    "jacrev": lambda x: jacrev(_wave)(x),
    "jacfwd": lambda x: jacfwd(_wave)(x),
    "hessian": lambda x: hessian(_energy)(x),
    "hvp": lambda x: hvp(_energy, (x,), (x,)),
    "jvp": lambda x: jvp(_wave, (x,), (x,)),
    "jet": lambda x: jet(torch.sin, (x,), ([x],)),
    "vjp": lambda x: vjp(_wave, x)[1](x),
    "linearize": lambda x: linearize(_wave, x)[1](x),
    "functionalize": lambda x: functionalize(lambda x: x.clone().mul_(2))(x),
}


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_the_results_are_those_of_tensors(
    name: str, dtype: torch.dtype, unrecorded: Callable[[], list[str]]
) -> None:
    x = torch.linspace(-1, 1, 6).reshape(2, 3).to(dtype)
    want, found = _leaves(CALLS[name](x)), _leaves(CALLS[name](bridge.to_jax(x)))
    assert len(want) == len(found) and want
    for t, array in zip(want, found, strict=True):
        assert isinstance(array, jax.Array)
        torch.testing.assert_close(bridge.to_torch(array), t.detach())
    assert unrecorded() == []


def test_a_function_that_cannot_be_recorded_runs_in_pytorch() -> None:
    x = torch.linspace(-1, 1, 6).reshape(2, 3)

    def asks(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.as_strided((3,), (1,)).sum() > 0 else x.exp()

    found = jvp(asks, (bridge.to_jax(x[1]),), (jnp.ones(3),))
    for array, t in zip(found, torch.func.jvp(asks, (x[1],), (torch.ones(3),)), strict=True):
        np.testing.assert_allclose(array, t)


def test_a_write_to_an_argument_does_not_change_the_array() -> None:
    x, counts = jnp.arange(3.0), torch.zeros(())

    def f(x: torch.Tensor) -> torch.Tensor:
        counts.add_(1)
        return x.mul_(2).sum()

    assert float(functionalize(f)(x)) == 6.0
    assert x.tolist() == [0.0, 1.0, 2.0] and counts == 1


def test_pulled_back_tensors_and_tracers() -> None:
    x = jnp.linspace(-1, 1, 3)
    out, pull = vjp(torch.sin, x)
    (back,) = pull(torch.ones(3))
    assert isinstance(out, jax.Array) and isinstance(back, jax.Array)
    np.testing.assert_allclose(back, np.cos(x), rtol=1e-6)
    for inside in (pull, vjp(torch.sin, bridge.to_torch(x))[1]):  # what JAX traces is JAX's
        np.testing.assert_allclose(jax.jit(inside)(jnp.ones(3))[0], np.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(grad(_energy))(x), grad(_energy)(x), rtol=1e-5)


def test_modules_are_called_as_functions_of_arrays_inside() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4)
    )
    params, buffers = bridge.params(model), bridge.buffers(model)

    def loss(params: Any, x: Any) -> Any:
        out, _ = bridge.call(model, params, buffers, (x,), rng=jax.random.key(0))
        return (out**2).sum()

    x = jnp.linspace(-1, 1, 15).reshape(5, 3)
    for mine, theirs in zip(
        _leaves(grad(loss)(params, x)), _leaves(jax.grad(loss)(params, x)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_errors_are_those_of_tensors() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        vmap(lambda x: x.reshape(7))(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="in_dims"):
        vmap(torch.sin, in_dims=2)(jnp.ones((2, 3)))
