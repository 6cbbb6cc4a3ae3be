"""Flax modules in torch: twelve layers there and back, training against optax, modes, keys,
buffers, the transforms, errors.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from agreement import same
from flax import linen, nnx

import bridge
import torchfunc_jax
from bridge.flax import NNX, FromLinen, FromNNX, Frozen, Linen

KEY = jax.random.key(0)
IMAGE, ROWS = (
    jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 6, 4)), jnp.float32),
    jnp.linspace(-1, 1, 20).reshape(5, 4),
)
CARRY = (jnp.ones((5, 3)), jnp.zeros((5, 3)))

#: By a name: a linen layer and its arguments.
LINEN: dict[str, tuple[linen.Module, tuple[Any, ...]]] = {
    "Dense": (linen.Dense(3), (ROWS,)),
    "Dense in bfloat16": (linen.Dense(3, param_dtype=jnp.bfloat16), (ROWS,)),
    "DenseGeneral": (linen.DenseGeneral((2, 3)), (ROWS,)),
    "Conv": (linen.Conv(3, (2, 2)), (IMAGE,)),
    "ConvTranspose": (linen.ConvTranspose(3, (2, 2), strides=(2, 2)), (IMAGE,)),
    "BatchNorm": (linen.BatchNorm(), (ROWS,)),
    "LayerNorm": (linen.LayerNorm(), (ROWS,)),
    "RMSNorm": (linen.RMSNorm(), (ROWS,)),
    "GroupNorm": (linen.GroupNorm(2), (IMAGE,)),
    "Embed": (linen.Embed(7, 3), (jnp.array([1, 6, 0]),)),
    "MultiHeadDotProductAttention": (linen.MultiHeadDotProductAttention(2), (ROWS[None],)),
    "LSTMCell": (linen.LSTMCell(3), (CARRY, ROWS)),
    "GRUCell": (linen.GRUCell(3), (CARRY[0], ROWS)),
    "Dropout": (linen.Dropout(0.5), (ROWS,)),
    "PReLU": (linen.PReLU(), (ROWS,)),
}
#: The same of nnx.
NNX_LAYERS: dict[str, tuple[Callable[[nnx.Rngs], nnx.Module], tuple[Any, ...]]] = {
    "Linear": (lambda rngs: nnx.Linear(4, 3, rngs=rngs), (ROWS,)),
    "Conv": (lambda rngs: nnx.Conv(4, 3, (2, 2), rngs=rngs), (IMAGE,)),
    "ConvTranspose": (lambda rngs: nnx.ConvTranspose(4, 3, (2, 2), rngs=rngs), (IMAGE,)),
    "BatchNorm": (lambda rngs: nnx.BatchNorm(4, rngs=rngs), (ROWS,)),
    "LayerNorm": (lambda rngs: nnx.LayerNorm(4, rngs=rngs), (ROWS,)),
    "GroupNorm": (lambda rngs: nnx.GroupNorm(4, 2, rngs=rngs), (IMAGE,)),
    "Embed": (lambda rngs: nnx.Embed(7, 3, rngs=rngs), (jnp.array([1, 6, 0]),)),
    "MultiHeadAttention": (
        lambda rngs: nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs),
        (ROWS[None],),
    ),
    "LSTMCell": (lambda rngs: nnx.LSTMCell(4, 3, rngs=rngs), (CARRY, ROWS)),
    "GRUCell": (lambda rngs: nnx.GRUCell(4, 3, rngs=rngs), (CARRY[0], ROWS)),
    "Dropout": (lambda rngs: nnx.Dropout(0.5, rngs=rngs), (ROWS,)),
    "PReLU": (lambda rngs: nnx.PReLU(0.1), (ROWS,)),
}


def to_torch(tree: Any) -> Any:
    return jax.tree.map(lambda a: bridge.to_torch(a).clone(), tree)


def identical(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def modes_of(module: linen.Module) -> dict[str, bool]:
    return {"BatchNorm": {"use_running_average": True}, "Dropout": {"deterministic": True}}.get(
        type(module).__name__, {}
    )


# -- there and back --------------------------------------------------------------------------------
@pytest.mark.thin(4)
@pytest.mark.parametrize("name", LINEN)
def test_linen_layers(name: str) -> None:
    """Bit by bit the same variables, also after state_dict; the same outputs; gradients of every
    parameter as JAX's.
    """
    module, args = LINEN[name]
    variables = module.init(KEY, *args, **modes_of(module))
    model = FromLinen(module, variables).eval()
    identical(model.variables(), variables)
    other = FromLinen(module, jax.tree.map(jnp.zeros_like, variables))
    other.load_state_dict(model.state_dict())
    identical(other.variables(), variables)
    run = lambda v: module.apply(v, *args, **modes_of(module))
    out = model(*to_torch(args))
    same(out, to_torch(run(variables)), rtol=1e-5, atol=1e-6, graph=False)
    grads = jax.grad(
        lambda p: sum((x**2).sum() for x in jax.tree.leaves(run({**variables, "params": p})))
    )(variables.get("params", {}))
    if any(p.requires_grad for p in model.parameters()):
        sum((x**2).sum() for x in jax.tree.leaves(out)).backward()
    for path, g in jax.tree.leaves_with_path(grads):
        p = model.get_parameter(".".join(k.key for k in path))
        same(
            p.grad, bridge.to_torch(g), rtol=2e-2 if p.dtype is torch.bfloat16 else 1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("Linear", "BatchNorm") else pytest.param(n, marks=pytest.mark.slow)
        for n in NNX_LAYERS
    ],
)
def test_nnx_layers(name: str) -> None:
    make, args = NNX_LAYERS[name]
    module = make(nnx.Rngs(0))
    module.eval()
    model = FromNNX(module)
    assert not model.training or name not in ("BatchNorm", "Dropout")
    model.eval()
    state = lambda m: nnx.to_pure_dict(nnx.state(m, nnx.Not(nnx.RngState)))
    identical(state(model.save_to()), state(module))
    other = make(nnx.Rngs(1))
    assert model.save_to(other) is other
    identical(state(other), state(module))
    same(model(*to_torch(args)), to_torch(module(*args)), rtol=1e-5, atol=1e-6, graph=False)


def test_torch_in_flax_in_torch() -> None:
    """A torch module as a Flax module as a torch module again: parameters, frozen parameters and
    buffers keep their kinds.
    """
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    net[0].bias.requires_grad_(False)
    x = bridge.to_torch(ROWS)
    for model in (FromLinen(Linen(net), Linen(net).init(KEY, ROWS)), FromNNX(NNX(net))):
        kinds = {p.requires_grad for name, p in model.named_parameters() if name.endswith("0_bias")}
        assert (
            kinds == {False}
            and sum(p.requires_grad for p in model.parameters()) == 3
            and len(list(model.buffers())) == 3
        )
        same(model.eval()(x), net.eval()(x), rtol=1e-5, atol=1e-6)
    assert isinstance(nnx.state(model.save_to(), Frozen)["frozen"]["0.bias"], Frozen)


# -- training --------------------------------------------------------------------------------------
class MLP(linen.Module):
    rate: float = 0.5

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = linen.relu(linen.Dense(8)(x))
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(self.rate, deterministic=not train)(x)
        return linen.Dense(2)(x)


class Twin(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm, self.last = (
            nnx.Linear(4, 8, rngs=rngs),
            nnx.BatchNorm(8, rngs=rngs),
            nnx.Linear(8, 2, rngs=rngs),
        )
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(self.norm(nnx.relu(self.first(x)))))


X, TARGET = bridge.to_torch(ROWS).clone(), torch.linspace(0, 1, 10).reshape(5, 2)


def mlp(rate: float = 0.5) -> FromLinen:
    return FromLinen(MLP(rate), MLP(rate).init(KEY, ROWS))


def _by_optax(module: MLP, variables: Any, steps: int) -> tuple[list[float], Any]:
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss(params: Any, stats: Any) -> Any:
        out, after = module.apply(
            {"params": params, "batch_stats": stats}, ROWS, train=True, mutable=["batch_stats"]
        )
        return ((out - jnp.asarray(TARGET)) ** 2).mean(), after["batch_stats"]

    params, stats, losses = variables["params"], variables["batch_stats"], []
    state = optimizer.init(params)
    for _ in range(steps):
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, {"params": params, "batch_stats": stats}


def _by_torch_optim(model: FromLinen, steps: int, run: Callable[..., Any]) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (run(X) - TARGET).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _by_our_jit(model: FromLinen, steps: int) -> list[float]:
    def loss(params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> Any:
        buffers = {name: b.clone() for name, b in buffers.items()}
        return (
            torch.func.functional_call(model, (params, buffers), (X,)) - TARGET
        ).square().mean(), buffers

    @torchfunc_jax.jit
    def step(
        params: dict[str, torch.Tensor],
        buffers: dict[str, torch.Tensor],
        momentum: dict[str, torch.Tensor],
    ) -> Any:
        grads, (value, buffers) = torchfunc_jax.grad_and_value(loss, has_aux=True)(params, buffers)
        momentum = {name: 0.9 * m + grads[name] for name, m in momentum.items()}
        return (
            {name: p - 0.1 * momentum[name] for name, p in params.items()},
            buffers,
            momentum,
            value,
        )

    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    momentum, losses = {name: torch.zeros_like(p) for name, p in params.items()}, []
    for _ in range(steps):
        params, buffers, momentum, value = step(params, buffers, momentum)
        losses.append(value.item())
    bridge.load(model, params, buffers)
    return losses


@pytest.mark.parametrize(
    "how",
    [
        "torch.optim",
        pytest.param("torch.optim and our jit", marks=pytest.mark.slow),
        "our jit alone",
    ],
)
def test_training_gives_the_losses_of_optax(how: str) -> None:
    model = mlp(0.0)
    losses, variables = _by_optax(MLP(0.0), model.variables(), 10)
    if how == "our jit alone":
        found = _by_our_jit(model, 10)
    else:
        found = _by_torch_optim(
            model, 10, model if how == "torch.optim" else torchfunc_jax.jit(model)
        )
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(model.variables()), jax.tree.leaves(variables), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    assert losses[-1] < losses[0]


SLOW_NNX = pytest.param(lambda: FromNNX(Twin(nnx.Rngs(0))), marks=pytest.mark.slow)


# -- modes, keys, buffers --------------------------------------------------------------------------
@pytest.mark.parametrize("make", [mlp, lambda: FromNNX(Twin(nnx.Rngs(0)))], ids=["linen", "nnx"])
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_modes_and_keys(make: Callable[[], Any], jit: bool) -> None:
    model = make()
    run = torchfunc_jax.jit(model) if jit else model
    ((name, mean),) = [(name, b) for name, b in model.named_buffers() if name.endswith("mean")]
    before = mean.clone()
    torch.manual_seed(1)
    first, second = run(X), run(X)
    torch.manual_seed(1)
    assert not torch.equal(first, second) and torch.equal(run(X), first)
    assert not torch.equal(mean, before) and model.state_dict()[name].data_ptr() == mean.data_ptr()
    model.eval()
    before, state = mean.clone(), torch.get_rng_state()
    assert (
        torch.equal(run(X), run(X))
        and torch.equal(mean, before)
        and torch.equal(torch.get_rng_state(), state)
    )
    assert model(X).requires_grad and model.train().training


def test_a_mode_that_the_caller_passes() -> None:
    model = mlp()
    same(model(X, train=False), model.eval()(X))
    same(model(X, False), model(X))
    same(
        FromLinen(
            linen.BatchNorm(use_running_average=True),
            linen.BatchNorm().init(KEY, ROWS, use_running_average=True),
        )(X),
        X,
        rtol=1e-4,
        atol=1e-4,
        graph=False,
    )


class Counter(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        count = self.variable("cache", "train", lambda: jnp.zeros((), jnp.int32))
        count.value += 1
        return x * count.value

    def twice(self, x: jax.Array) -> jax.Array:
        return 2 * x


def test_collections_that_are_mutable() -> None:
    variables = {"cache": {"train": jnp.zeros((), jnp.int32)}}
    model = FromLinen(Counter(), variables, mutable=["cache"]).eval()
    assert [model(torch.ones(())).item() for _ in range(2)] == [1, 2]
    assert list(model.state_dict()) == ["cache_train"]  # torch's modules have a method called train
    assert model.variables()["cache"]["train"] == 2
    assert FromLinen(Counter(), {}, method="twice")(X).equal(2 * X)


# -- with torch and with our transforms ------------------------------------------------------------
@pytest.mark.parametrize("make", [mlp, SLOW_NNX], ids=["linen", "nnx"])
def test_transforms(make: Callable[[], Any]) -> None:
    """Gradients for each sample, un-jitted, jitted and by torch.func, against torch's autograd; an
    ensemble against its members.
    """
    model = make().eval()
    params = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda p, x: torch.func.functional_call(model, p, (x[None],)).square().sum()
    rows = []
    for x in X:
        model.zero_grad()
        model(x[None]).square().sum().backward()
        rows.append({name: p.grad.clone() for name, p in model.named_parameters()})
    expected = {name: torch.stack([row[name] for row in rows]) for name in params}
    for space in (torch.func, torchfunc_jax):
        same(space.vmap(space.grad(loss), (None, 0))(params, X), expected, rtol=1e-4, atol=1e-5)
    same(
        torchfunc_jax.jit(torchfunc_jax.vmap(torchfunc_jax.grad(loss), (None, 0)))(params, X),
        expected,
        rtol=1e-4,
        atol=1e-5,
    )
    members = [make().eval() for _ in range(2)]
    with torch.no_grad():
        for p in members[1].parameters():
            p.add_(1)
    stacked, buffers = torchfunc_jax.stack_module_state(members)
    outs = torchfunc_jax.vmap(lambda p, b: torch.func.functional_call(model, (p, b), (X,)))(
        stacked, buffers
    )
    same(outs, torch.stack([m(X) for m in members]), rtol=1e-5, atol=1e-5)


def test_copies_and_pickles() -> None:
    for model in (mlp().eval(), FromNNX(Twin(nnx.Rngs(0))).eval()):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            same(other(X), model(X))
            with torch.no_grad():
                next(other.parameters()).add_(1)
            assert not torch.equal(next(other.parameters()), next(model.parameters()))


def test_flax_values_are_copied() -> None:
    variables = jax.tree.map(jnp.array, linen.Dense(2).init(KEY, ROWS))
    before = jax.tree.map(np.array, variables)
    with torch.no_grad():
        for p in FromLinen(linen.Dense(2), variables).parameters():
            p.zero_()
    identical(variables, jax.tree.map(jnp.asarray, before))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nnx for linen": (
        lambda: FromLinen(nnx.PReLU(0.1), {}),
        TypeError,
        "module: expected a flax.linen.Module, got .*FromNNX takes",
    ),
    "linen for nnx": (
        lambda: FromNNX(linen.PReLU()),
        TypeError,
        "module: expected a flax.nnx.Module, got .*FromLinen takes",
    ),
    "no collections": (
        lambda: FromLinen(linen.Dense(2), {"kernel": ROWS}),
        TypeError,
        "variables: expected a dict of collections",
    ),
    "a missing variable": (
        lambda: FromLinen(linen.Dense(2), {"params": {}})(X),
        Exception,
        "(?i)kernel",
    ),
    "another shape": (
        lambda: FromLinen(linen.Dense(2), linen.Dense(3).init(KEY, ROWS))(X),
        Exception,
        "(?i)shape",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    run, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        run()
