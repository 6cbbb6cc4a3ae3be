"""nn.Module <-> JAX: states out and in, modules as functions, and added lowerings."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.errors import InvalidRngError
from networks import X, close, net, tied
from torch import nn

import bridge
import torchfunc_jax


# -- states ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [net, tied, nn.Tanh])
def test_params_and_buffers(make: Callable[[], nn.Module]) -> None:
    model = make()
    for state, expected in (
        (bridge.params(model), model.named_parameters()),
        (bridge.buffers(model), model.named_buffers()),
    ):
        expected = dict(expected)
        assert list(state) == list(expected)
        for name, array in state.items():
            assert isinstance(array, jax.Array)
            close(array, expected[name])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.bool,
    ],
)
@pytest.mark.parametrize(
    "take",
    [
        lambda t: t,
        lambda t: t.T,
        lambda t: t[::2],
        lambda t: t[0, 1:],
        lambda t: t[0, 0],
        lambda t: t[:0],
        torch.conj,
    ],
    ids=["whole", "transposed", "every other row", "unaligned", "number", "empty", "conj"],
)
def test_params_share_no_memory_with_the_module(
    take: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    model = nn.Module()
    model.register_buffer("state", take(torch.ones(64, 64).to(dtype)))
    if dtype.is_floating_point or dtype.is_complex:
        model.param = nn.Parameter(take(torch.ones(64, 64).to(dtype)))
    copies = bridge.params(model) | bridge.buffers(model)
    before = {name: np.array(array) for name, array in copies.items()}
    for t in (*model.parameters(), *model.buffers()):
        t.detach().zero_()
    for name, array in copies.items():
        np.testing.assert_array_equal(array, before[name])
        assert before[name].all()


def test_64_bit_types_follow_the_configuration() -> None:
    model = nn.BatchNorm1d(2).double()
    assert (
        bridge.params(model)["weight"].dtype == jnp.float32
        and bridge.buffers(model)["num_batches_tracked"].dtype == jnp.int32
    )
    with jax.enable_x64(True):
        assert (
            bridge.params(model)["weight"].dtype == jnp.float64
            and bridge.buffers(model)["num_batches_tracked"].dtype == jnp.int64
        )


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray, lambda a: torch.tensor(np.array(a))])
def test_load_writes_into_the_same_tensors(kind: Callable[[Any], Any]) -> None:
    model = net()
    weight, optimizer = model[0].weight, torch.optim.SGD(model.parameters(), 1.0)
    params = {name: kind(np.asarray(p) + 1) for name, p in bridge.params(model).items()}
    buffers = {name: kind(np.asarray(b) + 2) for name, b in bridge.buffers(model).items()}
    assert bridge.load(model, params, buffers) is model
    assert (
        model[0].weight is weight is optimizer.param_groups[0]["params"][0] and weight.requires_grad
    )
    for name, p in model.named_parameters():
        close(params[name], p)
    for name, b in model.named_buffers():
        close(buffers[name], b)
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_load_and_tied_weights() -> None:
    model = tied()
    params = bridge.params(model)
    assert list(params) == ["0.weight", "0.bias", "2.bias"]
    bridge.load(model, {**params, "0.weight": jnp.eye(3)})
    assert model[2].weight is model[0].weight
    close(jnp.eye(3), model[2].weight)
    bridge.load(model, {"2.weight": 2 * jnp.eye(3)}, strict=False)
    close(2 * jnp.eye(3), model[0].weight)
    bridge.load(model, {**params, "2.weight": params["0.weight"]})
    with pytest.raises(RuntimeError, match=r"'0.weight' and '2.weight' are one tensor"):
        bridge.load(model, {**params, "2.weight": jnp.zeros((3, 3))})


def test_load_refuses_and_changes_nothing() -> None:
    model = net()
    params, before = bridge.params(model), copy.deepcopy(model.state_dict())
    zeros = {name: jnp.zeros_like(p) for name, p in params.items()}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {**zeros, "9.weight": jnp.zeros(1)},
            RuntimeError,
            "params: the module has no '9.weight'; it has '0.weight'",
        ),
        (
            {name: v for name, v in zeros.items() if name != "4.bias"},
            RuntimeError,
            "params: '4.bias' missing",
        ),
        (
            {**zeros, "4.bias": jnp.zeros(3)},
            RuntimeError,
            r"params: '4.bias' has shape \(2,\) in the module, got \(3,\)",
        ),
        ({**zeros, "4.bias": [0.0, 0.0]}, TypeError, "list"),
    ]
    for wrong, kind, message in cases:
        with pytest.raises(kind, match=message):
            bridge.load(model, wrong)
    with pytest.raises(
        RuntimeError,
        match=r"buffers: '1.running_mean', '1.running_var', '1.num_batches_tracked' missing",
    ):
        bridge.load(model, zeros, {})
    torch.testing.assert_close(model.state_dict(), before)


# a tensor's dtype, a value, and what the tensor is then; None: refused
HELD: list[tuple[str, Any, Any]] = [
    ("float32", np.float64(0.1), np.float32(0.1)),
    ("float32", 3, 3.0),
    ("float32", 2**24 + 1, None),
    ("float32", 1e300, None),
    ("float32", np.inf, np.inf),
    ("float32", np.nan, np.nan),
    ("float32", 1 + 0j, None),
    ("float32", True, 1.0),
    ("float16", 1e5, None),
    ("float16", 65504.0, 65504.0),
    ("float16", 1 / 3, np.float16(1 / 3)),
    ("bfloat16", 1e39, None),
    ("bfloat16", 0.5, 0.5),
    ("float8_e4m3fn", 448.0, 448.0),
    ("float8_e4m3fn", 1e3, None),
    ("float8_e4m3fn", np.inf, None),
    ("complex64", 0.5, 0.5),
    ("complex64", 1e300j, None),
    ("int64", 3.0, 3),
    ("int64", 3.7, None),
    ("int64", np.nan, None),
    ("int64", 2.0**63, None),
    ("int64", 1j, None),
    ("int64", np.uint64(2**63), None),
    ("int32", 2**31, None),
    ("int8", -128, -128),
    ("uint8", -1, None),
    ("uint8", 300, None),
    ("uint8", 255.0, 255),
    ("uint64", -1, None),
    ("bool", 1, True),
    ("bool", 2, None),
    ("bool", 0.5, None),
]


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "kind",
    [np.asarray, lambda x: torch.tensor(x), lambda x: jnp.asarray(x)],
    ids=["numpy", "torch", "jax"],
)
@pytest.mark.parametrize(("dtype", "value", "expected"), HELD)
def test_load_changes_no_value_but_by_rounding(
    kind: Callable[[Any], Any], dtype: str, value: Any, expected: Any
) -> None:
    module, typed = nn.Module(), getattr(torch, dtype)
    module.register_buffer("b", torch.ones(2, 1).to(typed))
    module.register_buffer("other", torch.zeros(1))
    with jax.enable_x64(True):
        given = kind(np.array([[1], [value]]))
    if expected is None:
        with pytest.raises(
            RuntimeError,
            match=rf"buffers: 'b': expected {dtype}, got .*; convert it yourself if that is meant",
        ):
            bridge.load(module, buffers={"other": np.ones(1), "b": given})
        assert (module.b.to(torch.complex128) == 1).all() and module.other == 0
    else:
        bridge.load(module, buffers={"other": np.ones(1), "b": given})
        assert module.b.dtype == typed
        np.testing.assert_array_equal(
            np.asarray(bridge.to_jax(module.b)),
            np.array([[1], [expected]]).astype(module_dtype(module.b)),
        )


def module_dtype(t: torch.Tensor) -> Any:
    return np.asarray(bridge.to_jax(t)).dtype


def test_load_reads_everything_before_it_writes() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    a, b = (m.weight.detach().clone() for m in module)
    for convert in (lambda t: t, bridge.to_jax):  # both share the memory of the parameters
        bridge.load(
            module,
            {
                "0.weight": convert(module[1].weight.detach()),
                "1.weight": convert(module[0].weight.detach()),
            },
        )
        a, b = b, a
        assert torch.equal(module[0].weight, a) and torch.equal(module[1].weight, b)


# -- modules as functions --------------------------------------------------------------------------
def test_call_is_pure_and_gives_the_buffers_back() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    params, buffers, before = (
        bridge.params(model),
        bridge.buffers(model),
        copy.deepcopy(model.state_dict()),
    )
    out, after = jax.jit(lambda p, b, x: bridge.call(model, p, b, (x,)))(params, buffers, X)
    torch.testing.assert_close(model.state_dict(), before)
    assert {k: v.dtype for k, v in after.items()} == {k: v.dtype for k, v in buffers.items()}
    close(out, model(torch.tensor(X)))
    for name, b in model.named_buffers():
        close(after[name], b)


def test_call_under_jax_transforms() -> None:
    model = tied()
    params = bridge.params(model)
    loss = lambda p, x: (bridge.call(model, p, {}, (x,))[0] ** 2).sum()
    model(torch.tensor(X)).square().sum().backward()
    gradient = jax.jit(jax.grad(loss))(params, X)
    for name, p in model.named_parameters():
        close(gradient[name], p.grad)
    per_sample = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, X)
    close(per_sample["0.weight"].sum(0), model[0].weight.grad)


class Stops(nn.Module):
    """Some of its values are computed, or written, under no_grad."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.w = how, nn.Parameter(torch.linspace(-1, 2, 6).view(2, 3))
        self.register_buffer("v", torch.tensor([0.5, -1.0, 2.0]))
        self.register_buffer("u", torch.ones(2))

    @torch.no_grad()
    def stopped(self) -> torch.Tensor:
        if self.how == "a result":
            return self.w @ self.v
        if self.how == "out=":
            return torch.mv(self.w, self.v, out=self.u)
        if self.how == "a buffer changed":
            return self.u.copy_(self.w @ self.v)
        if self.how == "the parameter changed":
            self.w.mul_(3)
        return self.u

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.stopped().clone() * (self.w @ x).sin()).sum()


@pytest.mark.parametrize("how", ["a result", "out=", "a buffer changed", "the parameter changed"])
def test_no_grad_inside_stops_jaxs_derivatives(how: str) -> None:
    module, x = Stops(how), torch.tensor([1.0, 0.3, -0.2])
    params, buffers = bridge.params(module), bridge.buffers(module)

    def loss(params: Any) -> Any:
        return bridge.call(module, params, buffers, (jnp.asarray(x.numpy()),))[0]

    expected = copy.deepcopy(module)
    expected(x).backward()

    def mapped(params: Any) -> Any:
        return jax.vmap(loss)(jax.tree.map(lambda x: x[None], params)).sum()

    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(mapped)):
        close(gradient(params)["w"], expected.w.grad)
    with torch.no_grad():  # around the call it stops nothing
        assert np.asarray(jax.grad(loss)(params)["w"]).any()


def test_call_mode_and_key() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)).eval())
    x = jnp.ones((50, 50))
    run = jax.jit(
        lambda key, training: bridge.call(model, {}, {}, (x,), training=training, rng=key)[0],
        static_argnums=1,
    )
    a, b = jax.random.split(jax.random.key(0))
    close(run(a, False), x)
    assert (run(a, True) == run(a, True)).all() and (run(a, True) != run(b, True)).any()
    assert (run(a, True) == 0).mean() == pytest.approx(0.75, abs=0.05) and (
        run(a, None) == 0
    ).mean() == pytest.approx(0.5, abs=0.05)
    assert model.training and not model[1].training


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bias": jnp.zeros(3)}, r"'bias' of shape \(3,\).*\(2,\)"),
        ({"b": jnp.zeros(2)}, "'b'.*'weight'"),
        (
            {"bias": jnp.zeros(2)},
            "params: 'weight' missing; give them, or strict=False to use the module's own values",
        ),
        ({}, "params: 'weight', 'bias' missing"),
    ],
)
def test_call_refuses(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        bridge.call(nn.Linear(3, 2), params, {}, (X,))


def test_call_refuses_values_of_a_higher_kind() -> None:
    model = nn.BatchNorm1d(3)
    params, buffers = bridge.params(model), bridge.buffers(model)
    for changed, message in (
        (
            ({**params, "weight": jnp.ones(3) * 1j}, buffers),
            "params: 'weight' is torch.float32 in the module, got torch.complex64",
        ),
        (
            (params, {**buffers, "num_batches_tracked": jnp.array(3.7)}),
            "buffers: 'num_batches_tracked' is torch.int64 .* got torch.float32",
        ),
    ):
        for jit in (lambda f: f, jax.jit):
            with pytest.raises(RuntimeError, match=message):
                jit(lambda p, b: bridge.call(model, p, b, (X,))[0])(*changed)
    half = {name: p.astype(jnp.bfloat16) for name, p in params.items()}
    assert bridge.call(model, half, buffers, (X,))[0].dtype == jnp.float32


def test_call_with_some_of_the_names() -> None:
    """strict=False: the module's own values for the others, which stay as they are, and whose new
    values are given back.
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before, weight = copy.deepcopy(model.state_dict()), jnp.ones((4, 3))
    for missing in (
        "buffers: '1.running_mean', '1.running_var', '1.num_batches_tracked'",
        "buffers: '1.running_var'",
    ):
        given = {name: b for name, b in bridge.buffers(model).items() if name not in missing}
        with pytest.raises(RuntimeError, match=f"{missing} missing"):
            bridge.call(model, bridge.params(model), given, (X,))
        for jit in (lambda f: f, jax.jit):
            run = jit(
                lambda w, x, given=given: bridge.call(
                    model, {"0.weight": w}, given, (x,), strict=False
                )
            )
            out, after = run(weight, X)
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
            changed = copy.deepcopy(model)
            nn.init.ones_(changed[0].weight)
            close(out, changed(torch.tensor(X)))
            assert {name: int(after[name].sum()) for name in after} == {
                name: int(b.sum()) for name, b in changed.named_buffers()
            }
    gradient = jax.grad(
        lambda w: bridge.call(model, {"0.weight": w}, {}, (X,), strict=False)[0][0].sum()
    )(weight)
    assert gradient.shape == (4, 3)


def test_call_and_tied_weights() -> None:
    model, eye = tied(), jnp.eye(3)
    params = bridge.params(model)
    expected = lambda a, b: (
        np.tanh(X @ np.asarray(a).T + np.asarray(params["0.bias"])) @ np.asarray(b).T
        + np.asarray(params["2.bias"])
    )
    rest = {name: p for name, p in params.items() if name != "0.weight"}
    close(bridge.call(model, {**rest, "2.weight": eye}, {}, (X,))[0], expected(eye, eye))
    with pytest.raises(
        ValueError, match=r"got multiple values for keys \['0.weight', '2.weight'\], which are tied"
    ):
        bridge.call(model, {**params, "2.weight": eye}, {}, (X,))
    close(
        bridge.call(model, {**params, "2.weight": eye}, {}, (X,), tie_weights=False)[0],
        expected(params["0.weight"], eye),
    )
    with pytest.raises(RuntimeError, match=r"'0\.weight' missing"):
        bridge.call(model, {**rest, "2.weight": eye}, {}, (X,), tie_weights=False)
    out = bridge.call(model, {"2.weight": eye}, {}, (X,), tie_weights=False, strict=False)[0]
    close(out, expected(params["0.weight"], eye))
    close(bridge.call(model, {}, {}, (X,), strict=False)[0], model(torch.tensor(X)))


class Density(nn.Module):
    """A log density with a method of its own name, a frozen parameter, a buffer that is written,
    and dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = (
            nn.Parameter(torch.tensor([0.5, -1.0])),
            nn.Parameter(torch.tensor([1.5, 2.0]), requires_grad=False),
        )
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def log_prob(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return (
            -0.5 * factor * ((x - self.mean) / self.scale).square().sum(-1) - self.scale.log().sum()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.log_prob(self.drop(x))


POINT = np.array([0.3, -0.7], np.float32)
# in JAX, of a function of a point
TRANSFORMED: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "call": lambda f: f(POINT),
    "jit": lambda f: jax.jit(f)(POINT),
    "grad": lambda f: jax.grad(f)(jnp.asarray(POINT)),
    "hessian": lambda f: jax.jit(jax.hessian(f))(POINT),
    "vmap": lambda f: jax.vmap(f)(jnp.stack([POINT, 2 * POINT])),
    "scan": lambda f: jax.lax.scan(
        lambda x, _: (x + 0.1 * jax.grad(f)(x),) * 2, jnp.asarray(POINT), length=3
    )[1],
    "while in vmap": lambda f: jax.vmap(
        lambda x: jax.lax.while_loop(lambda x: f(x) < -1.3, lambda x: x + 0.5 * jax.grad(f)(x), x)
    )(jnp.stack([POINT * 4, POINT])),
}


@pytest.mark.parametrize(
    "method",
    ["log_prob", lambda module, x: module.log_prob(x), None],
    ids=["by name", "a function", "forward"],
)
@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_a_module_as_a_function(
    transformed: Callable[[Callable[[Any], Any]], Any], method: Any
) -> None:
    module = Density().eval()
    apply, params, state = bridge.function(module)
    before = copy.deepcopy(module.state_dict())

    def by_hand(x: Any) -> Any:
        return (
            -0.5 * (((x - params["mean"]) / state["scale"]) ** 2).sum(-1)
            - jnp.log(state["scale"]).sum()
        )

    close(transformed(lambda x: apply(params, state, x, method=method)[0]), transformed(by_hand))
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_what_is_trained_and_what_is_state() -> None:
    module = Density()
    apply, params, state = bridge.function(module)
    assert list(params) == ["mean"] and list(state) == ["scale", "calls"]
    run = jax.jit(apply, static_argnames=("training", "method"))
    for _ in range(3):
        state = run(params, state, POINT, training=False)[1]
    assert (
        set(state) == {"scale", "calls"}
        and int(state["calls"]) == 3
        and module.calls == 0
        and module.training
    )
    with pytest.raises(InvalidRngError, match="drop"):
        run(params, state, POINT)
    keys = jax.random.split(jax.random.key(0), 64)
    many = jax.vmap(lambda key: apply(params, state, POINT, rng=key)[0])(keys)
    assert len(np.unique(np.asarray(many))) == 4  # each of two coordinates is dropped or not
    close(
        apply(params, state, POINT, factor=2.0, method="log_prob")[0],
        module.log_prob(torch.tensor(POINT), factor=2.0).detach(),
    )
    bridge.load(module, {"mean": jnp.ones(2)}, {"scale": jnp.full(2, 3.0), "calls": state["calls"]})
    assert (
        module.calls == 3
        and torch.equal(module.mean, torch.ones(2))
        and torch.equal(module.scale, torch.full((2,), 3.0))
    )
    with pytest.raises(RuntimeError, match="params: 'mean' missing"):
        bridge.load(module, {}, state)
    bridge.load(module, buffers=state)
    assert torch.equal(module.scale, torch.tensor([1.5, 2.0]))
    with pytest.raises(RuntimeError, match="buffers: 'mean' of shape"):
        apply(params, {**state, "mean": params["mean"]}, POINT, training=False)
    with pytest.raises(RuntimeError, match="params: 'scale' missing"):
        apply(params, {"calls": state["calls"]}, POINT, training=False)
    with pytest.raises(TypeError, match="method: expected the name of a method of Density"):
        apply(params, state, POINT, method="logprob")


def test_members_are_lanes_with_statistics_of_their_own() -> None:
    """vmap over the parameters and the state of BatchNorm in training mode, in a scan: as each
    module by itself in torch.
    """
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    functions = [bridge.function(module) for module in modules]
    apply = functions[0].apply
    params, state = (
        jax.tree.map(lambda *xs: jnp.stack(xs), *trees)
        for trees in zip(*[f[1:] for f in functions], strict=True)
    )

    def one(params: Any, state: Any) -> Any:
        return jax.lax.scan(lambda s, x: apply(params, s, x)[::-1], state, jnp.stack([X, X + 1]))

    state, outs = jax.jit(jax.vmap(one))(params, state)
    for k, module in enumerate(modules):
        close(outs[k], torch.stack([module(torch.tensor(X)), module(torch.tensor(X + 1))]))
        for name, b in module.named_buffers():
            close(state[name][k], b)


def written(write: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        write(y)
        return y

    return run


def recurrent(cell: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    weights = {
        name: torch.linspace(-1, 1, p.numel()).view(p.shape) for name, p in cell.named_parameters()
    }
    return lambda x: torch.func.functional_call(cell, weights, (x,))


PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": written(lambda y: y[1:].mul_(2)),
    "a column": written(lambda y: y[:, 1].copy_(y[:, 0])),
    "a row that is computed": written(lambda y: y.__setitem__(y[:, 0].argmax(), y[0] * 3)),
    "reading it": lambda x: x[x[:, 0].argmax()] ** 2,
    "slice_scatter": lambda x: x.slice_scatter(x[:2] ** 2, 0, 1, 3),
    "select_scatter": lambda x: x.select_scatter(x[0] ** 2, 0, 1),
    "GRUCell": recurrent(nn.GRUCell(4, 5)),
}


@pytest.mark.parametrize(
    "place",
    [pytest.param(f, id=n, marks=[pytest.mark.slow] * (n == "GRUCell")) for n, f in PLACES.items()],
)
def test_parts_in_loops_that_jax_maps_and_differentiates(
    place: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """JAX maps and differentiates a loop after our trace of it, with 64-bit types off: a vmap of a
    scan.
    """
    module, x = nn.Module(), torch.randn(2, 3, 4)

    def loss(x: Any) -> Any:
        step = lambda carry, _: (
            carry,
            bridge.call(module, {}, {}, (carry,), method=lambda _, x: place(x))[0],
        )
        return jnp.sin(jax.lax.scan(step, x, length=1)[1]).sum()

    def total(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([place(one).sin().sum() for one in x]).sum()

    arrays = jnp.asarray(x.numpy())
    mapped, gradient = jax.jit(lambda x: (jax.vmap(loss)(x), jax.vmap(jax.grad(loss))(x)))(arrays)
    second = jax.jit(
        jax.grad(lambda x: (jax.grad(lambda x: jax.vmap(loss)(x).sum())(x) ** 2).sum())
    )(arrays)
    close(mapped.sum(), total(x))
    x.requires_grad_()
    (expected,) = torch.autograd.grad(total(x), x, create_graph=True)
    close(gradient, expected)
    np.testing.assert_allclose(
        second, torch.autograd.grad(expected.square().sum(), x)[0], rtol=1e-4, atol=1e-4
    )


def test_float64_has_to_be_on() -> None:
    module = nn.Linear(3, 2).double()
    with pytest.raises(ValueError, match=r"'weight' is torch.float64.*jax.enable_x64"):
        bridge.function(module)
    with jax.enable_x64(True):
        apply, params, state = bridge.function(module)
        x = jnp.linspace(0, 1, 12).reshape(4, 3)
        out, _ = jax.jit(apply)(params, state, x)
        assert out.dtype == x.dtype == jnp.float64
        np.testing.assert_allclose(out, module(torch.tensor(np.asarray(x))).detach(), rtol=1e-14)


def test_threads_that_call_one_module() -> None:
    """bridge.call, torchfunc_jax.functional_call, jit and the reading and writing of states, each
    in a thread, on one module.
    """
    model = nn.Linear(3, 3)
    start = copy.deepcopy(model.state_dict())
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    ones = {name: jnp.ones(p.shape) for name, p in zeros.items()}
    x, compiled = (
        torch.tensor(X),
        torchfunc_jax.jit(lambda p, x: torchfunc_jax.functional_call(model, p, (x,))),
    )
    jobs: dict[str, Callable[[], bool]] = {
        "bridge.call": lambda: np.allclose(
            bridge.call(model, ones, {}, (X,))[0], X.sum(1, keepdims=True) + 1, atol=1e-5
        ),
        "jax.jit": lambda: np.allclose(
            jax.jit(lambda p: bridge.call(model, p, {}, (X,))[0])(ones),
            X.sum(1, keepdims=True) + 1,
            atol=1e-5,
        ),
        "functional_call": lambda: bool(
            (torchfunc_jax.functional_call(model, zeros, (x,)) == 0).all()
        ),
        "grad": lambda: bool(
            (
                torchfunc_jax.grad(lambda p: torchfunc_jax.functional_call(model, p, (x,)).sum())(
                    zeros
                )["bias"]
                == 4
            ).all()
        ),
        "jit": lambda: bool((compiled(zeros, x) == 0).all()),
        "params": lambda: all(
            np.array_equal(p, start[name]) for name, p in bridge.params(model).items()
        ),
        "load": lambda: bridge.load(model, start) is model,
    }
    failed: list[str] = []

    def work(name: str) -> None:
        try:
            for _ in range(15):
                if not jobs[name]():
                    failed.append(name)
        except Exception as error:
            failed.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed and not any(thread.is_alive() for thread in threads)
    torch.testing.assert_close(model.state_dict(), start, rtol=0, atol=0)


# -- lowerings of one's own ------------------------------------------------------------------------
@torch.library.custom_op("test_modules::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


def test_register_lowering() -> None:
    x = torch.tensor([1.0, 2.0])
    # a second registration replaces the first, also where the operator has run before
    for factor in (1.0, 2.0):

        @bridge.register_lowering("test_modules.cube", torch.ops.test_modules.cube.default)
        def lowered(x: jax.Array, factor: float = factor) -> jax.Array:
            return factor * x**3

        for _ in range(3):
            for transform in (
                torchfunc_jax.vmap,
                lambda f: torchfunc_jax.jit(torchfunc_jax.vmap(f)),
            ):
                torch.testing.assert_close(transform(cube)(x), factor * x**3)
        torch.testing.assert_close(
            torchfunc_jax.grad(lambda x: cube(x).sum())(x), factor * 3 * x**2
        )


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ((), "operators: expected at least one"),
        (("aten.no_such_operator",), "has no operator 'aten.no_such_operator'"),
        (("aten.sin", "aten.sin.other"), "has no operator 'aten.sin.other'"),
        (("sin",), "expected 'namespace.operator.overload'"),
        ((torch.sin,), "expected a name or an OpOverload"),
        ((torch.ops.aten.sin,), "expected a name or an OpOverload"),
    ],
)
def test_register_lowering_refuses(operators: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bridge.register_lowering(*operators)


# -- what a function keeps -------------------------------------------------------------------------
class Keeps(nn.Module):
    """Counts its calls in a buffer that it rebinds, sets attributes, and has a buffer that is None
    at first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.hidden = nn.Linear(2, 2), None
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("total", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        hidden = self.linear(x)
        self.hidden, self.view, self.argument = hidden.sin().cos(), hidden.t(), x
        self.total = x.detach() * 2 if self.total is None else self.total + x.detach()
        return (hidden * self.steps).sum()


#: Transforms F of a module.
KEPT: dict[str, Callable[..., Any]] = {
    "call": lambda F, m: lambda x: m(x),
    "grad": lambda F, m: F.grad(m),
    "of parameters": lambda F, m: (
        lambda x: F.grad(lambda p: F.functional_call(m, p, (x,)))(dict(m.named_parameters()))
    ),
    "jvp": lambda F, m: lambda x: F.jvp(m, (x,), (x,)),
    "vjp": lambda F, m: lambda x: F.vjp(m, x)[1](torch.ones(())),
    "jacrev": lambda F, m: F.jacrev(m),
    "vmap of captured": lambda F, m: lambda x: F.vmap(lambda y: y * m(x))(torch.ones(3)),
    "grad and vmap": lambda F, m: F.grad(lambda x: F.vmap(lambda y: y * m(x))(torch.ones(3)).sum()),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("jitted", [False, True], ids=["unjitted", "jitted"])
@pytest.mark.parametrize("way", KEPT)
def test_tensors_that_forward_keeps_are_those_of_torch_func(way: str, jitted: bool) -> None:
    # a trace runs the function of vjp twice, and what the first run has kept belongs to no
    # transform
    if way == "vjp" and jitted:
        pytest.skip("refused")
    torch.manual_seed(0)
    mine, theirs = Keeps(), Keeps()
    theirs.load_state_dict(mine.state_dict(), strict=False)
    seen: list[torch.Tensor] = []
    if not jitted:  # a hook that jit traces runs once
        mine.linear.register_forward_hook(lambda module, args, out: seen.append(out))
    call, expected = KEPT[way](torchfunc_jax, mine), KEPT[way](torch.func, theirs)
    call = torchfunc_jax.jit(call) if jitted else call
    for k in range(3):
        x = torch.ones(3, 2) + k
        torch.testing.assert_close(call(x), expected(x))
        for name in ("steps", "hidden", "view", "argument", "total"):
            found = getattr(mine, name)
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found.detach(), getattr(theirs, name).detach() + 0)
    assert torch.equal(mine.state_dict()["steps"], torch.tensor(3.0))
    assert jitted or (len(seen) == 3 and torch.equal(seen[-1].detach().t(), mine.view.detach()))
    assert not jitted or len(call.programs()) <= 2


def test_kept_tensors_have_gradients_where_torch_funcs_have() -> None:
    module = Keeps()
    torchfunc_jax.grad(module)(torch.ones(3, 2))
    module.hidden.sum().backward()
    expected = Keeps()
    expected.load_state_dict(module.state_dict(), strict=False)
    expected.steps = expected.steps * 0
    expected(torch.ones(3, 2))
    expected.hidden.sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, expected.linear.weight.grad)


def test_an_argument_that_is_kept() -> None:
    kept: list[torch.Tensor] = []
    x = torch.ones(3)
    torchfunc_jax.grad(lambda x: (kept.append(x), x.sum())[1])(x)
    assert torch.equal(kept[0], x) and kept[0] is not x


def test_a_kept_lane_is_refused_when_it_is_used() -> None:
    module = Keeps()
    torchfunc_jax.vmap(module)(torch.ones(4, 2))
    assert torch.equal(module.steps, torch.tensor(1.0))
    with pytest.raises(
        bridge.errors.EscapedTensorError, match="return it from the transformed function"
    ):
        module.hidden + 1


@pytest.mark.parametrize(
    "transform",
    [
        torchfunc_jax.vmap,
        torchfunc_jax.jit,
        lambda f: lambda x: torchfunc_jax.jvp(f, (x,), (x,))[0],
    ],
)
def test_copies_of_what_is_captured_follow_its_values(transform: Callable[..., Any]) -> None:
    module, scale, x = nn.Linear(3, 3), torch.ones(3), torch.ones(2, 3)
    call = transform(lambda x: copy.deepcopy(module)(x) * copy.deepcopy({"scale": scale})["scale"])
    for _ in range(3):
        torch.testing.assert_close(call(x).detach(), (module(x) * scale).detach())
        with torch.no_grad():
            module.weight.mul_(2)
            scale.add_(1)
