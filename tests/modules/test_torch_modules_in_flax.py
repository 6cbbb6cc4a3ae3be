"""torch modules in Flax: states, keys, frozen parameters, members of an ensemble, Flax's layouts,
twins whose channels are last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from flax import linen, nnx
from networks import X, close, net, randomized, tied
from torch import nn

import bridge
from bridge.flax import NNX, Frozen, Linen, from_variables, to_variables


# -- states and calls ------------------------------------------------------------------------------
def test_linen() -> None:
    torch_model = net().eval()
    model = Linen(torch_model)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    assert set(variables["params"]) == {name for name, _ in torch_model.named_parameters()}
    close(jax.jit(model.apply)(variables, X), torch_model(torch.tensor(X)))
    gradient = jax.grad(lambda p: model.apply({**variables, "params": p}, X).sum())(
        variables["params"]
    )
    torch_model(torch.tensor(X)).sum().backward()
    for name, p in torch_model.named_parameters():
        close(gradient[name], p.grad)


def test_linen_updates_buffers_and_draws_from_its_key() -> None:
    torch_model = net()
    model = Linen(torch_model, deterministic=True)
    variables = model.init(jax.random.key(0), X)
    step = jax.jit(
        lambda v, key: model.apply(
            v, X, deterministic=False, mutable=["buffers"], rngs={"dropout": key}
        )
    )
    (a, after), (b, _), (c, _) = (
        step(variables, jax.random.key(1)),
        step(variables, jax.random.key(1)),
        step(variables, jax.random.key(2)),
    )
    assert (a == b).all() and (a != c).any()
    torch_model(torch.tensor(X))
    for name, buffer in torch_model.named_buffers():
        close(after["buffers"][name], buffer)
    close(model.apply(variables, X), model.apply(variables, X))
    bridge.load(torch_model, variables["params"], after["buffers"])


class Around(linen.Module):
    """A Flax module with a torch module in it."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(2)(Linen(nn.Linear(3, 4), name="torch")(x))


def test_linen_inside_linen() -> None:
    variables = Around().init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, variables["params"]["torch"]) == {"weight": (4, 3), "bias": (4,)}
    assert Around().apply(variables, X).shape == (4, 2)


def test_nnx() -> None:
    torch_model = net()
    model = NNX(torch_model, rngs=nnx.Rngs(dropout=1))
    assert {path[-1] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))} == {
        name for name, _ in torch_model.named_parameters()
    }
    run = nnx.jit(lambda model, x: model(x))
    first, second = run(model, X), run(model, X)
    assert (first != second).any()
    assert (
        int(model.buffers["1.num_batches_tracked"][...]) == 2
        and torch_model[1].num_batches_tracked == 0
    )
    model.eval()
    assert model.deterministic and torch_model.training
    model.save_to()
    close(run(model, X), torch_model.eval()(torch.tensor(X)))


def test_nnx_trains_as_torch_does() -> None:
    torch_model = tied()
    model = NNX(torch_model)
    x, target = jnp.asarray(X), jnp.ones((4, 3))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(lambda m: ((m(x) - target) ** 2).mean())(model))

    torch_optimizer = torch.optim.SGD(torch_model.parameters(), 0.1)
    for _ in range(3):
        step(model, optimizer)
        torch_optimizer.zero_grad()
        (torch_model(torch.tensor(X)) - 1).square().mean().backward()
        torch_optimizer.step()
    for name, p in torch_model.named_parameters():
        close(model.params[name][...], p)


# -- keys ------------------------------------------------------------------------------------------
class Noise(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x)


GENERATOR = torch.Generator()
RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "dropout in a checkpoint": lambda: Noise(
        lambda x: torch.utils.checkpoint.checkpoint(F.dropout, x, use_reentrant=False)
    ),
    "functional dropout in eval mode": lambda: Noise(lambda x: F.dropout(x, 0.5)).eval(),
    "randn": lambda: Noise(lambda x: x + torch.randn(4, 3)),
    "randn_like": lambda: Noise(lambda x: x + torch.randn_like(x)),
    "in place": lambda: Noise(lambda x: x + torch.empty(4, 3).uniform_()),
    "bernoulli": lambda: Noise(lambda x: torch.bernoulli(torch.full_like(x, 0.5))),
    "of a generator": lambda: Noise(lambda x: x + torch.randn(4, 3, generator=GENERATOR)),
    "attention": lambda: Noise(
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)
    ),
    "in a vmap": lambda: Noise(
        lambda x: torch.func.vmap(lambda row: row + torch.randn(3), randomness="different")(x)
    ),
    "LSTM": lambda: nn.LSTM(3, 3, num_layers=2, dropout=0.5),
}


def first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.thin(4)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", RANDOM)
def test_without_a_key_nothing_is_drawn(name: str, jit: bool) -> None:
    """With a key other numbers for each key; without one Flax's own errors."""
    module = RANDOM[name]()
    compiled, compiled_nnx = (jax.jit, nnx.jit) if jit else (lambda f: f, lambda f: f)
    params, a, b = bridge.params(module), jax.random.key(0), jax.random.key(1)
    run = compiled(lambda key: first(bridge.call(module, params, {}, (X,), rng=key)[0]))
    assert (run(a) == run(a)).all() and (run(a) != run(b)).any()
    with pytest.raises(
        flax.errors.InvalidRngError, match=r"needs a PRNG key: pass rng=jax.random.key\(seed\)"
    ):
        compiled(lambda x: bridge.call(module, params, {}, (x,))[0])(X)

    linen_model = Linen(module)
    variables = linen_model.init(jax.random.key(0), X)
    apply = compiled(lambda key: first(linen_model.apply(variables, X, rngs={"dropout": key})))
    assert (apply(a) == apply(a)).all() and (apply(a) != apply(b)).any()
    with pytest.raises(flax.errors.InvalidRngError, match='needs PRNG for "dropout"'):
        compiled(linen_model.apply)(variables, X)

    call = compiled_nnx(lambda model, x: first(model(x)))
    for rngs in (nnx.Rngs(dropout=0), nnx.Rngs(0)):
        model = NNX(module, rngs=rngs)
        assert (call(model, X) != call(model, X)).any()
    with pytest.raises(ValueError, match="no `rngs` argument was provided"):
        call(NNX(module), X)
    with pytest.raises(AttributeError, match="No RngStream named 'dropout'"):
        call(NNX(module, rngs=nnx.Rngs(params=0)), X)


def test_the_error_names_the_layer() -> None:
    module = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.0), nn.TransformerEncoderLayer(3, 1, 4))
    )
    module[1][1].self_attn.dropout = 0.0
    module[1][1].dropout.eval()
    module[1][0].eval()
    model = Linen(module)
    variables = model.init(jax.random.key(0), X)
    for call, error in (
        (lambda: bridge.call(module, bridge.params(module), {}, (X,)), flax.errors.InvalidRngError),
        (lambda: model.apply(variables, X), flax.errors.InvalidRngError),
        (lambda: NNX(module)(X), ValueError),
        (lambda: NNX(module, rngs=nnx.Rngs(params=0))(X), AttributeError),
    ):
        with pytest.raises(error, match=r"'1\.1\.dropout1' \(Dropout\)"):
            call()


def test_what_draws_nothing_needs_no_key() -> None:
    for module in (
        nn.Linear(3, 2),
        nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).eval(),
        nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()),
    ):
        bridge.call(module, bridge.params(module), bridge.buffers(module), (X,))
        model = Linen(module)
        model.apply(model.init(jax.random.key(0), X), X)
        for rngs in (None, nnx.Rngs(params=0)):
            NNX(module, rngs=rngs)(X)


def test_a_key_drawn_twice_in_a_checkpoint() -> None:
    module = Noise(
        lambda x: sum(
            torch.utils.checkpoint.checkpoint(F.dropout, x, use_reentrant=False) for _ in range(2)
        )
    )
    loss = jax.jit(jax.grad(lambda x, key: bridge.call(module, {}, {}, (x,), rng=key)[0].sum()))
    assert set(np.unique(loss(np.ones((50, 50), np.float32), jax.random.key(0)))) == {0.0, 2.0, 4.0}
    model = Linen(module)
    model.init(jax.random.key(0), X)


# -- frozen parameters -----------------------------------------------------------------------------
def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].requires_grad_(False)
    module[3].weight = module[2].weight
    return module


def test_frozen_parameters_of_linen() -> None:
    module = half_frozen()
    model = Linen(module)
    variables = model.init(jax.random.key(0), X)
    assert {c: set(v) for c, v in variables.items()} == {
        "params": {"2.weight", "2.bias", "3.bias"},
        "frozen": {"0.weight", "0.bias"},
    }
    rest = {c: v for c, v in variables.items() if c != "params"}
    optimizer = optax.adamw(0.1)
    params, state = variables["params"], optimizer.init(variables["params"])
    for _ in range(3):
        gradient = jax.grad(lambda p: (model.apply({"params": p, **rest}, X) ** 2).sum())(params)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    before = copy.deepcopy(module.state_dict())
    bridge.load(module, {**params, **variables["frozen"]})
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("0.")
    with pytest.raises(flax.errors.FlaxError, match="frozen"):
        model.apply({"params": params}, X)


def test_frozen_parameters_of_nnx() -> None:
    module = half_frozen()
    model = NNX(module)
    assert set(nnx.state(model, nnx.Param)["params"]) == {"2.weight", "2.bias", "3.bias"}
    assert set(nnx.state(model, Frozen)["frozen"]) == {"0.weight", "0.bias"}
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    for _ in range(3):
        optimizer.update(model, nnx.grad(lambda m: (m(X) ** 2).sum())(model))
    before = copy.deepcopy(module.state_dict())
    model.save_to()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("0.")


@pytest.mark.parametrize("kind", [Linen, NNX])
def test_lazy_modules(kind: Any) -> None:
    module = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(TypeError, match="not initialized; call it once"):
        model = kind(module)
        model.init(jax.random.key(0), X)
    for f in (bridge.params, bridge.buffers):
        with pytest.raises(TypeError, match="not initialized"):
            f(module)
    module(torch.tensor(X))
    assert bridge.params(module)["0.weight"].shape == (2, 3)


class Lists(nn.Module):
    """Parameters and buffers held in lists and dicts, of several dtypes, one of them under two
    names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(
            [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))]
        )
        self.dict = nn.ParameterDict(
            {"a": torch.full((3,), 3.0, dtype=torch.bfloat16), "tied": self.list[0]}
        )
        self.modules_ = nn.ModuleDict({"m": nn.Linear(3, 3)})
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        for p in (*self.list, *self.dict.values()):
            x = x * p
        return self.modules_["m"](x.float()) * self.mask


def test_lists_dicts_dtypes_and_buffers() -> None:
    module = Lists()
    expected = copy.deepcopy(module)(torch.tensor(X)).detach().numpy()
    model = Linen(module)
    variables = model.init(jax.random.key(0), X)
    assert list(variables["params"]) == [name for name, _ in module.named_parameters()]
    out, after = model.apply(variables, X, mutable=["buffers"])
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    ours = NNX(module)
    np.testing.assert_allclose(ours(X), expected, rtol=1e-6)
    assert after["buffers"]["count"] == ours.buffers["count"][...] == 1 and module.count == 0


def test_buffers_are_written_where_the_module_writes() -> None:
    """In eval mode too; and what changes nothing writes nothing, so that a closure over the model
    may be jitted.
    """
    module = Lists().eval()
    model, norm = NNX(module), NNX(nn.BatchNorm1d(3).eval())
    for step in range(1, 3):
        nnx.jit(lambda m, x: m(x))(model, X)
        assert model.buffers["count"][...] == step
    jax.jit(lambda x: norm(x))(X)
    jax.vmap(jax.grad(lambda x: norm(x[None]).sum()))(X)
    for training in (False, True):
        given = bridge.buffers(norm.module)
        after = bridge.call(
            norm.module, bridge.params(norm.module), given, (X,), training=training
        )[1]
        assert all((after[name] is given[name]) != training for name in given)


# -- members ---------------------------------------------------------------------------------------
def make() -> nn.Module:
    return nn.Linear(3, 2)


def test_members_made_under_vmap_are_refused() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    for vmapped in (
        lambda: nnx.vmap(lambda key: NNX(make()))(keys),
        lambda: nnx.jit(nnx.vmap(lambda key: NNX(make())))(keys),
        lambda: nnx.vmap(nnx.jit(lambda key: NNX(make())))(keys),
        lambda: jax.vmap(lambda key: nnx.state(NNX(make())))(keys),
        lambda: jax.vmap(lambda key: Linen(make()).init(key, X))(keys),
        lambda: jax.vmap(jax.jit(lambda key: Linen(make()).init(key, X)))(keys),
        lambda: jax.jit(jax.vmap(lambda key: Linen(make()).init(key, X)))(keys),
        lambda: linen.vmap(Linen, variable_axes={"params": 0}, split_rngs={"params": True})(
            make()
        ).init(keys[0], np.stack([X, X])),
    ):
        with pytest.raises(
            RuntimeError,
            match=r"all members would have the same values\. Make them one by one and stack the",
        ):
            vmapped()


def test_members_made_one_by_one() -> None:
    """By the recipe of the error."""
    members = [NNX(make()) for _ in range(3)]
    stacked = nnx.merge(
        nnx.graphdef(members[0]), jax.tree.map(lambda *xs: jnp.stack(xs), *map(nnx.state, members))
    )
    out = nnx.vmap(lambda model, x: model(x), in_axes=(0, None))(stacked, X)
    np.testing.assert_allclose(out, np.stack([m(X) for m in members]), rtol=1e-6)
    assert (out[0] != out[1]).any()
    models = [Linen(make()) for _ in range(3)]
    variables = jax.tree.map(
        lambda *xs: jnp.stack(xs), *[m.init(jax.random.key(0), X) for m in models]
    )
    out = jax.vmap(models[0].apply, in_axes=(0, None))(variables, X)
    np.testing.assert_allclose(
        out, np.stack([m.module(torch.tensor(X)).detach() for m in models]), rtol=1e-6
    )


class Skewed(nn.Module):
    """Values that torch draws in several ways, one of them after a layer was made, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        nn.init.trunc_normal_(self.fc.weight, std=0.02)
        self.scale = nn.Parameter(torch.rand(2) + 1, requires_grad=False)
        self.register_buffer("directions", torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x) * self.scale + self.directions)


def test_members_made_by_a_function_differ() -> None:
    before = torch.get_rng_state()
    new = lambda rngs: NNX(Skewed, rngs=rngs)
    for transform in (lambda f: f, nnx.jit):
        members = transform(nnx.split_rngs(splits=3)(nnx.vmap(new)))(nnx.Rngs(0))
        for value in (
            members.params["fc.weight"],
            members.params["fc.bias"],
            members.frozen["scale"],
            members.buffers["directions"],
        ):
            assert value.shape[0] == 3 and all(
                (value[i] != value[j]).all() for i in range(3) for j in range(i)
            )
        assert (
            abs(members.params["fc.weight"][...]).max() < 0.1
            and members.buffers["norm.num_batches_tracked"].dtype == jnp.int32
        )
        assert {type(v) for v in members.frozen.values()} == {Frozen}
        out = nnx.vmap(lambda model, x: model(x), in_axes=(0, None))(members, X)
        assert (
            out.shape == (3, 4, 2) and (members.buffers["norm.num_batches_tracked"][...] == 1).all()
        )
    assert torch.equal(torch.get_rng_state(), before)
    assert (
        new(nnx.Rngs(0)).params["fc.weight"][...] == new(nnx.Rngs(0)).params["fc.weight"][...]
    ).all()
    members = nnx.split_rngs(splits=3)(nnx.vmap(new))(nnx.Rngs(0))
    optimizer = nnx.Optimizer(members, optax.sgd(0.1), wrt=nnx.Param)
    loss = lambda m: nnx.vmap(lambda model, x: (model(x) ** 3).sum(), in_axes=(0, None))(m, X).sum()
    fixed, trained = members.frozen["scale"][...], members.params["norm.bias"][...]
    optimizer.update(members, nnx.grad(loss)(members))
    assert (members.frozen["scale"][...] == fixed).all() and (
        members.params["norm.bias"][...] != trained
    ).any()
    with pytest.raises(ValueError, match="draws its values; pass rngs"):
        NNX(Skewed)


def test_what_is_no_ensemble_is_let_through() -> None:
    assert jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: NNX(make()))))[1].shape == (2, 3)
    assert nnx.jit(lambda: NNX(make()))().params["weight"][...].shape == (2, 3)
    shared = linen.vmap(Linen, variable_axes={"params": None}, split_rngs={"params": False})(make())
    assert shared.init(jax.random.key(0), np.stack([X, X]))["params"]["weight"].shape == (2, 3)
    model = Linen(make())
    jax.jit(jax.vmap(lambda x: model.init_with_output(jax.random.key(0), x)[0]))(X)


# -- layers in Flax's layouts ----------------------------------------------------------------------
LAYERS: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, ...], bool]] = {
    "Linear": (lambda: nn.Linear(3, 2), linen.Dense(2), (5, 3), False),
    "Linear without bias": (
        lambda: nn.Linear(3, 2, bias=False),
        linen.Dense(2, use_bias=False),
        (5, 3),
        False,
    ),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3), linen.Conv(4, (3,), padding="VALID"), (2, 3, 8), True),
    "Conv2d": (
        lambda: nn.Conv2d(4, 6, (3, 2), groups=2),
        linen.Conv(6, (3, 2), 1, "VALID", feature_group_count=2),
        (2, 4, 7, 8),
        True,
    ),
    "Conv3d": (
        lambda: nn.Conv3d(2, 3, 2),
        linen.Conv(3, (2, 2, 2), padding="VALID"),
        (1, 2, 4, 4, 4),
        True,
    ),
    "LayerNorm": (lambda: nn.LayerNorm(6), linen.LayerNorm(epsilon=1e-5), (3, 6), False),
    "RMSNorm": (lambda: nn.RMSNorm(6, eps=1e-6), linen.RMSNorm(), (3, 6), False),
    "GroupNorm": (
        lambda: nn.GroupNorm(2, 4),
        linen.GroupNorm(num_groups=2, epsilon=1e-5),
        (3, 4, 5),
        True,
    ),
    "BatchNorm2d": (
        lambda: nn.BatchNorm2d(4),
        linen.BatchNorm(use_running_average=True, epsilon=1e-5),
        (3, 4, 5, 5),
        True,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_flax_layouts(name: str) -> None:
    make, flax_layer, shape, channels_first = LAYERS[name]
    model = randomized(make())
    variables = to_variables(model)
    x = torch.randn(shape)
    theirs = x.movedim(1, -1) if channels_first else x
    out = flax_layer.apply(variables, jnp.asarray(theirs.numpy()))
    expected = model(x)
    np.testing.assert_allclose(
        out,
        (expected.movedim(1, -1) if channels_first else expected).detach().numpy(),
        rtol=1e-4,
        atol=1e-5,
    )
    other = from_variables(make(), variables)
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()))
    torch.testing.assert_close(other.eval()(x), expected)


def test_nested_modules_in_flax_layouts() -> None:
    model = randomized(
        nn.Sequential(
            nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4))
        )
    )
    variables = to_variables(model)
    assert variables["params"]["0"]["embedding"].shape == (5, 4) and set(
        variables["batch_stats"]["1"]["2"]
    ) == {"mean", "var"}
    other = from_variables(randomized(copy.deepcopy(model)), variables)
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    del variables["params"]["1"]["0"]["bias"]
    with pytest.raises(RuntimeError, match="params/1/0/bias missing"):
        from_variables(other, variables)
    with pytest.raises(RuntimeError, match=r"params/kernel of shape \(3, 2\), got \(2, 3\)"):
        from_variables(
            nn.Linear(3, 2), {"params": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(2)}}
        )


# -- twins whose channels are last -----------------------------------------------------------------
class Net(nn.Module):
    """What stands between a convolution and a Linear, in a forward of one's own."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], features: int) -> None:
        super().__init__()
        self.conv, self.between, self.fc = nn.Conv2d(2, 4, 3), between, nn.Linear(features, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.between(self.conv(x)))


def mean_pool(x: Any, size: int) -> Any:
    return linen.avg_pool(x, (size, size), (size, size))


flat = lambda x: x.reshape(x.shape[0], -1)
CONV, FC = linen.Conv(4, (3, 3), padding="VALID"), linen.Dense(3)
# (module, its input's shape, the twin as a list of (Flax layer, name of torch's) and functions)
TWINS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[Any]]] = {
    "Sequential": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)),
        (5, 2, 5, 6),
        [(CONV, "0"), linen.relu, flat, (FC, "3")],
    ),
    "nested, with norms and pools": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU("tanh"), nn.AvgPool2d(2)),
            nn.Dropout(),
            nn.Sequential(nn.Flatten(), nn.Linear(8, 3)),
        ),
        (5, 2, 4, 6),
        [
            (CONV, "0/0"),
            (linen.BatchNorm(use_running_average=True, epsilon=1e-5), "0/1"),
            linen.gelu,
            lambda x: mean_pool(x, 2),
            flat,
            (FC, "2/1"),
        ],
    ),
    "norms of what is flat": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Flatten(), nn.BatchNorm1d(48), nn.LayerNorm(48), nn.Linear(48, 3)
        ),
        (5, 2, 5, 6),
        [
            (CONV, "0"),
            flat,
            (linen.BatchNorm(use_running_average=True, epsilon=1e-5), "2"),
            (linen.LayerNorm(epsilon=1e-5), "3"),
            (FC, "4"),
        ],
    ),
    "Conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3),
            nn.Flatten(1),
            nn.Tanh(),
            nn.Linear(20, 3),
            nn.ReLU(),
            nn.Linear(3, 3),
        ),
        (5, 2, 7),
        [
            (linen.Conv(4, (3,), padding="VALID"), "0"),
            flat,
            jnp.tanh,
            (FC, "3"),
            linen.relu,
            (FC, "5"),
        ],
    ),
    "Conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.Flatten(), nn.Linear(48, 3)),
        (5, 2, 4, 5, 4),
        [(linen.Conv(4, (3, 3, 3), padding="VALID"), "0"), flat, (FC, "2")],
    ),
    "global pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        ),
        (5, 2, 5, 6),
        [(CONV, "0"), lambda x: x.mean((1, 2)), (FC, "3")],
    ),
    "channels moved to the end by the module": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3),
            Noise(lambda x: x.permute(0, 2, 3, 1)),
            nn.LayerNorm(4),
            nn.Linear(4, 3),
        ),
        (5, 2, 5, 6),
        [(CONV, "0"), (linen.LayerNorm(epsilon=1e-5), "2"), (FC, "3")],
    ),
    "patches as tokens": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, 3),
            nn.Flatten(2),
            Noise(lambda x: x.transpose(1, 2)),
            nn.Linear(4, 3),
        ),
        (5, 2, 6, 9),
        [
            (linen.Conv(4, (3, 3), 3, "VALID"), "0"),
            lambda x: x.reshape(x.shape[0], -1, 4),
            (FC, "3"),
        ],
    ),
    "words": (
        lambda: nn.Sequential(
            nn.Linear(6, 2),
            Noise(lambda x: x.transpose(1, 2)),
            nn.Conv1d(2, 4, 3),
            nn.Flatten(),
            nn.Linear(20, 3),
        ),
        (5, 7, 6),
        [(linen.Dense(2), "0"), (linen.Conv(4, (3,), padding="VALID"), "2"), flat, (FC, "4")],
    ),
}
FORWARDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int, Callable[[Any], Any]]] = {
    "torch.flatten": (lambda x: torch.flatten(F.relu(x), 1), 48, lambda x: flat(linen.relu(x))),
    "flatten": (lambda x: x.flatten(start_dim=1), 48, flat),
    "view": (lambda x: F.avg_pool2d(x, 2).view(x.size(0), -1), 8, lambda x: flat(mean_pool(x, 2))),
    "view of a shape": (lambda x: x.view(x.shape[0], 48), 48, flat),
    "reshape": (lambda x: (x * 2 + 1).reshape((-1, 48)), 48, lambda x: flat(x * 2 + 1)),
    "mean": (lambda x: x.mean((2, 3)), 4, lambda x: x.mean((1, 2))),
    "two means": (lambda x: x.mean(-1).mean(-1), 4, lambda x: x.mean((1, 2))),
    "mean that keeps its dimensions": (
        lambda x: x.mean((2, 3), True).flatten(1),
        4,
        lambda x: x.mean((1, 2)),
    ),
    "one mean": (lambda x: x.mean(3).flatten(1), 12, lambda x: flat(x.mean(2))),
    "residual": (lambda x: (x + F.relu(x)).flatten(1), 48, lambda x: flat(x + linen.relu(x))),
    "cat": (
        lambda x: torch.cat([x, x.relu()], 1).flatten(1),
        96,
        lambda x: flat(jnp.concatenate([x, linen.relu(x)], -1)),
    ),
    "functional dropout": (lambda x: F.dropout(x, training=False).flatten(1), 48, flat),
}
TWINS |= {
    name: (
        lambda between=between, features=features: Net(between, features),
        (5, 2, 5, 6),
        [(CONV, "conv"), theirs, (FC, "fc")],
    )
    for name, (between, features, theirs) in FORWARDS.items()
}


def run_twin(steps: list[Any], variables: dict[str, Any], x: Any) -> np.ndarray:
    for step in steps:
        if not isinstance(step, tuple):
            x = step(x)
            continue
        layer, path = step
        picked = {}
        for collection, own in variables.items():
            for part in path.split("/"):
                own = own.get(part, {})
            picked[collection] = own
        x = layer.apply(picked, x)
    return np.asarray(x)


@pytest.mark.parametrize("name", TWINS)
def test_twins(name: str) -> None:
    make, shape, steps = TWINS[name]
    module, x = randomized(make()), torch.randn(shape)
    variables = to_variables(module)
    theirs = x.numpy() if name == "words" else x.movedim(1, -1).numpy()
    expected = module(x).detach().numpy()
    out = run_twin(steps, variables, jnp.asarray(theirs))
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=1e-4)
    other = from_variables(randomized(make()), variables)
    torch.testing.assert_close(list(other.parameters()), list(module.parameters()), rtol=0, atol=0)
    torch.testing.assert_close(other(x), module(x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 4, 3), nn.Linear(48, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.fc(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Python that fx cannot follow": (
        Branches,
        r"torch.fx cannot follow .*flattened=\{'fc': 64\}.*flattened=\{\} if there is none",
    ),
    "a Linear over the last dimension": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Linear(5, 3)),
        "'1' .Linear. takes the last dim",
    ),
    "a LayerNorm of a feature map": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.LayerNorm([4, 3, 4])),
        "'1' .LayerNorm. takes the last",
    ),
    "two flattened maps in one": (
        lambda: Net(lambda x: torch.cat([x.flatten(1), x.flatten(1)], 1), 96),
        "the input of 'fc' .Linear. is",
    ),
    "channels shuffled": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.PixelShuffle(2), nn.Flatten(), nn.Linear(48, 3)
        ),
        "input of '3'",
    ),
    "three sizes": (
        lambda: Net(lambda x: x.view(x.size(0), 4, -1).flatten(1), 48),
        "the input of 'fc'",
    ),
    "transposed": (lambda: Net(lambda x: x.transpose(2, 3).flatten(1), 48), "the input of 'fc'"),
    "channels padded": (
        lambda: Net(lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)).flatten(1), 72),
        "the input of 'fc'",
    ),
    "channels pooled": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.MaxPool3d((2, 1, 1)), nn.Flatten(), nn.Linear(24, 3)
        ),
        "the input of '3' .Linear.",
    ),
    "an index": (lambda: Net(lambda x: x[:, :2].flatten(1), 24), "the input of 'fc'"),
    "a decoder": (
        lambda: nn.Sequential(nn.Linear(3, 48), nn.Unflatten(1, (4, 3, 4)), nn.Conv2d(4, 2, 3)),
        "the input of '2' .Conv2d.",
    ),
    "groups of what is flat": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Flatten(), nn.GroupNorm(2, 48), nn.Linear(48, 3)
        ),
        "the input of '2' .GroupNorm.",
    ),
    "a pool over what is flat": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.MaxPool1d(2), nn.Linear(24, 3)),
        "the input of '3' .Linear.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_twins_refused(name: str) -> None:
    make, message = REFUSED[name]
    module = make()
    for call in (lambda: to_variables(module), lambda: from_variables(module, {})):
        with pytest.raises(ValueError, match=message):
            call()
    to_variables(module, flattened={})  # on one's own word


def test_flattened_layers_by_name() -> None:
    module, x = randomized(Branches()), torch.randn(5, 2, 5, 6)
    variables = to_variables(module, flattened={"fc": 4})
    steps = [(CONV, "conv"), flat, (FC, "fc")]
    expected = module.fc(module.conv(x).flatten(1)).detach().numpy()
    np.testing.assert_allclose(
        run_twin(steps, variables, jnp.asarray(x.movedim(1, -1).numpy())),
        expected,
        rtol=2e-4,
        atol=1e-4,
    )
    other = from_variables(Branches(), variables, flattened={"fc": 4})
    torch.testing.assert_close(list(other.parameters()), list(module.parameters()), rtol=0, atol=0)
    # a twin that moves the channels to the front before it flattens
    steps = [(CONV, "conv"), lambda x: flat(jnp.moveaxis(x, -1, 1)), (FC, "fc")]
    out = run_twin(steps, to_variables(module, flattened={}), jnp.asarray(x.movedim(1, -1).numpy()))
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=1e-4)
    # images that go into a Linear at once
    images = randomized(nn.Sequential(nn.Flatten(), nn.Linear(60, 3)))
    out = run_twin(
        [flat, (FC, "1")],
        to_variables(images, flattened={"1": 2}),
        jnp.asarray(x.movedim(1, -1).numpy()),
    )
    np.testing.assert_allclose(out, images(x).detach().numpy(), rtol=2e-4, atol=1e-4)
    for given, message in (
        ({"fx": 4}, "no Linear, LayerNorm, RMSNorm or BatchNorm called 'fx'"),
        ({"fc": 5}, "48 features, which are no"),
    ):
        with pytest.raises(ValueError, match=message):
            to_variables(module, flattened=given)


def test_from_variables_refuses_and_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    variables = jax.tree.map(np.array, to_variables(module))
    before = copy.deepcopy(module.state_dict())

    def changed(path: str, value: Any) -> dict[str, Any]:
        new = copy.deepcopy(variables)
        *steps, last = path.split("/")
        node = new
        for step in steps:
            node = node.setdefault(step, {})
        node[last] = value
        return new

    eye = np.eye(3, dtype=np.float32)
    for wrong, message in (
        (
            changed("params/0/kernel", eye),
            (
                "'params/0/kernel' and 'params/2/kernel' are one tensor in the module, got "
                "different values"
            ),
        ),
        (changed("params/0/extra", eye), "the module has no place for params/0/extra"),
        (changed("params/9/kernel", eye), "no place for params/9/kernel"),
        (changed("cache/x", eye), "no place for cache/x"),
        (changed("batch_stats/1/count", eye), "no place for batch_stats/1/count"),
        (
            changed("params/0/bias", np.ones(3) * 1j),
            "'params/0/bias': expected float32, got complex128",
        ),
        (
            changed("params/0/bias", np.full(3, 1e300)),
            r"'params/0/bias': expected float32, got float64 that it cannot hold, 1e\+300",
        ),
        (
            changed("params/0/bias", np.ones(4)),
            r"expected params/0/bias of shape \(3,\), got \(4,\)",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            from_variables(module, wrong)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    both = changed("params/0/kernel", eye)
    both["params"]["2"]["kernel"] = eye
    assert (
        torch.equal(from_variables(module, both)[0].weight, torch.eye(3))
        and module[2].weight is module[0].weight
    )
