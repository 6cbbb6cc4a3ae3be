"""Torch code inside of ``jax.shard_map`` where JAX does not cast operands to the axes that others
vary over (``jax_auto_pcast=0``, which is to become its default).

One device is enough: the types of values name the axes of the mesh whatever their sizes are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import bridge
from torchfunc_jax import functional_call, grad, hessian, jacrev, jit, jvp, vjp, vmap

# JAX itself cannot compile a logistic, or a derivative of a tanh, in shard_map with this option
MODEL = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3))
X = np.random.RandomState(0).randn(5, 4).astype(np.float32)


def loss(params: Any, x: Any) -> Any:
    out = functional_call(MODEL, params, (x,))
    return F.softmax(F.pad(out, (1, 0)).clamp(-1, 0.4) * 2.0 + torch.ones(4), -1)[:, 1:].mean()


def pulled(params: Any, x: Any) -> Any:
    value, pull = vjp(loss, params, x)
    return value, pull(jnp.ones(()))


WAYS: dict[str, Callable[..., Any]] = {
    "call": lambda p, x: bridge.call(MODEL, p, {}, (x,))[0],
    "grad": grad(loss),
    "vjp": pulled,
    "jvp": lambda p, x: jvp(lambda x: loss(p, x), (x,), (jnp.ones(x.shape),)),
    "vmap(grad)": vmap(grad(lambda p, x: loss(p, x[None])), in_dims=(None, 0)),
    "jacrev": jacrev(lambda p, x: functional_call(MODEL, p, (x,)).mean(0)),
    "hessian": lambda p, x: hessian(lambda b: loss(p | {"0.bias": b}, x))(p["0.bias"]),
    "jit": jit(loss),
    "jit(grad)": jit(grad(loss)),
}


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *[(way, AxisType.Auto) for way in WAYS],
        *[(way, AxisType.Explicit) for way in ("vjp", "jit(grad)")],
    ],
)
def test_operands_are_cast_without_the_option(way: str, kind: AxisType) -> None:
    f, params = WAYS[way], bridge.params(MODEL)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,))

    def local(params: Any, x: Any) -> Any:
        outs = f(jax.lax.pcast(params, "data", to="varying"), x)
        assert all("data" in jax.typeof(v).manual_axis_type.varying for v in jax.tree.leaves(outs))
        return jax.tree.map(lambda v: v[None], outs)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    with jax.auto_pcast(False):
        found = jax.jit(mapped)(params, jax.device_put(X, NamedSharding(mesh, P("data"))))
        assert not jax.config.jax_auto_pcast
    wanted = f(params, jnp.asarray(X))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-6)


def test_an_error_leaves_the_option_as_it_was() -> None:
    mesh = jax.make_mesh((1,), ("data",))

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no value of {tuple(x.shape)}")

    mapped = jax.shard_map(grad(broken), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with jax.auto_pcast(False):
        with pytest.raises(ValueError, match="no value of"):
            jax.jit(mapped)(jax.device_put(X, NamedSharding(mesh, P("data"))))
        assert not jax.config.jax_auto_pcast
