"""The functorch family against functorch's own: the same tensors, names, values, gradients and
errors; tied weights; ensembles.
"""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from networks import tied
from torch import nn
from torch._functorch import batch_norm_replacement as their_batch_norm
from torch._functorch import functional_call as their_calls
from torch._functorch import make_functional as theirs

import torchfunc_jax
from torchfunc_jax.functional_call import construct_stacked_leaf

# as an attribute, the function of that name hides the module
ours = importlib.import_module("torchfunc_jax.make_functional")


class Tied(nn.Module):
    """Two layers with one weight, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("again", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh() * self.scale) + self.again


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def empty() -> nn.Module:
    return nn.Tanh()


X = torch.linspace(-1, 1, 12).reshape(4, 3)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def frozen(model: nn.Module) -> nn.Module:
    next(model.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize("disable", [False, True])
@pytest.mark.parametrize("make", [mlp, tied, empty, lambda: frozen(mlp())])
def test_make_functional(make: Callable[[], nn.Module], disable: bool) -> None:
    model = make()
    func, params = ours.make_functional(model, disable)
    their_func, their_params = theirs.make_functional(model, disable)
    assert isinstance(func, torchfunc_jax.FunctionalModule)
    assert func.param_names == their_func.param_names and func.names_map == their_func.names_map
    assert [type(p) for p in params] == [type(p) for p in their_params]
    assert [p.requires_grad for p in params] == [p.requires_grad for p in their_params]
    close(params, their_params)
    assert not any(a is b for a in params for b in model.parameters())
    close(func(params, X), model(X))
    assert all(p.is_meta for p in func.stateless_model.parameters())

    def loss(api: Any, func: Any) -> Callable[[Any], Any]:
        return api.grad(lambda params: func(params, X).square().sum())

    if params:
        close(loss(torchfunc_jax, func)(params), loss(torch.func, their_func)(their_params))
        close(
            torchfunc_jax.jit(loss(torchfunc_jax, func))(params),
            loss(torch.func, their_func)(their_params),
        )
        close(loss(torchfunc_jax, their_func)(params), loss(torch.func, their_func)(their_params))


@pytest.mark.parametrize("make", [mlp, tied, Tied, norm])
def test_make_functional_with_buffers(make: Callable[[], nn.Module]) -> None:
    model = make()
    func, params, buffers = ours.make_functional_with_buffers(model)
    their_func, their_params, their_buffers = theirs.make_functional_with_buffers(model)
    assert isinstance(func, torchfunc_jax.FunctionalModuleWithBuffers)
    for name in ("param_names", "buffer_names", "all_names_map"):
        assert getattr(func, name) == getattr(their_func, name)
    for _ in range(2):  # the running statistics of a BatchNorm change in place
        close(func(params, buffers, X), their_func(their_params, their_buffers, X))
        close(buffers, their_buffers)

    def gradient(api: Any, func: Any) -> Callable[..., Any]:
        return api.grad(lambda params, buffers: func(params, buffers, X).square().sum())

    close(
        gradient(torchfunc_jax, func)(params, buffers),
        gradient(torch.func, their_func)(their_params, their_buffers),
    )
    close(buffers, their_buffers)
    close(
        torchfunc_jax.jit(gradient(torchfunc_jax, func))(params, buffers),
        gradient(torch.func, their_func)(their_params, their_buffers),
    )
    close(buffers, their_buffers)


def test_tied_weights_are_one_parameter_and_all_aliases_are_set() -> None:
    func, _, _ = ours.make_functional_with_buffers(Tied())
    assert func.param_names == (
        "first.weight",
        "first.bias",
        "second.bias",
    ) and func.buffer_names == ("scale",)
    new, scale = torch.eye(3), torch.ones(3)
    expected = (X @ new).tanh() @ new + 1
    close(func((new, torch.zeros(3), torch.zeros(3)), (scale,), X), expected)
    seen = func.stateless_model
    assert (
        seen.second.weight is seen.first.weight and seen.again is seen.scale and seen.scale.is_meta
    )


def test_regular_autograd_goes_through() -> None:
    model = mlp()
    func, params = ours.make_functional(model)
    func(params, X).sum().backward()
    model(X).sum().backward()
    close([p.grad for p in params], [p.grad for p in model.parameters()])


def test_jax_arrays_in_jax_arrays_out() -> None:
    func, params = ours.make_functional(mlp())
    arrays = [jnp.asarray(p.detach().numpy()) for p in params]
    out = func(arrays, jnp.asarray(X.numpy()))
    assert isinstance(out, jax.Array)
    close(torch.tensor(out.tolist()), func(params, X).detach())
    gradient = jax.jit(jax.grad(lambda p: func(p, jnp.asarray(X.numpy())).sum()))(arrays)
    assert [g.shape for g in gradient] == [a.shape for a in arrays]


def test_functional_modules_can_be_copied_and_pickled() -> None:
    func, params = ours.make_functional(tied())
    for other in (copy.deepcopy(func), pickle.loads(pickle.dumps(func))):
        close(other(params, X), func(params, X))


def test_a_failed_call_leaves_the_module_without_state() -> None:
    func, params = ours.make_functional(mlp())
    for wrong in (
        params[:2],
        (*params, params[0]),
        (params[0], "no tensor", *params[2:]),
        [p[:1] for p in params],
    ):
        with pytest.raises((RuntimeError, TypeError)):
            func(wrong, X)
        assert all(p.is_meta for p in func.stateless_model.parameters())
    close(func(params, X), func(tuple(params), X))


def test_the_model_is_not_kept_alive() -> None:
    model = mlp()
    func, params = ours.make_functional(model)
    torchfunc_jax.grad(lambda p: func(p, X).sum())(params)
    gone = [weakref.ref(model), weakref.ref(params[0])]
    del model, params
    gc.collect()
    assert [r() for r in gone] == [None, None]


# -- the first versions ----------------------------------------------------------------------------
def test_make_functional_deprecated_v1() -> None:
    model = mlp()
    their_model = copy.deepcopy(model)
    weights, func, names = ours.make_functional_deprecated_v1(model)
    their_weights, their_func, their_names = theirs.make_functional_deprecated_v1(their_model)
    assert names == their_names and all(p.is_meta for p in model.parameters())
    close(weights, their_weights)
    close(func(weights, (X,)), their_func(their_weights, (X,)))
    gradient = torchfunc_jax.grad(lambda w: func(w, (X,)).sum())
    close(gradient(weights), torch.func.grad(lambda w: their_func(w, (X,)).sum())(their_weights))
    close(torchfunc_jax.jit(gradient)(weights), gradient(weights))
    assert ours.load_state(model, weights, names) is model
    close(model(X), func(weights, (X,)))


def test_make_functional_with_buffers_deprecated_v1() -> None:
    model = norm()
    their_model = copy.deepcopy(model)
    weights, buffers, func, names, buffer_names = ours.make_functional_with_buffers_deprecated_v1(
        model
    )
    theirs_ = theirs.make_functional_with_buffers_deprecated_v1(their_model)
    assert (names, buffer_names) == theirs_[3:]
    close(func(weights, buffers, (X,)), theirs_[2](theirs_[0], theirs_[1], (X,)))
    close(buffers, theirs_[1])
    ours.load_state(model, weights, names, buffers, buffer_names)
    theirs.load_state(their_model, theirs_[0], names, theirs_[1], buffer_names)
    close(model(X), their_model(X))


def test_the_first_version_too_sets_all_aliases() -> None:
    model = tied()
    expected = model(X)
    weights, func, names = ours.make_functional_deprecated_v1(model)
    assert names == ("0.weight", "0.bias", "2.bias")
    close(func(weights, (X,)), expected)


# -- a module's tensors out and in -----------------------------------------------------------------
def test_extract_and_load() -> None:
    model, their_model = Tied(), Tied()
    their_model.load_state_dict(model.state_dict())
    expected = model(X)
    params, names, names_map = ours.extract_weights(model)
    their_params, their_names, their_map = theirs.extract_weights(their_model)
    assert (names, names_map) == (their_names, their_map)
    close(params, their_params)
    buffers, buffer_names, buffer_map = ours.extract_buffers(model)
    assert theirs.extract_buffers(their_model)[1:] == (buffer_names, buffer_map)
    assert (
        model.second.weight is model.first.weight
        and model.second.weight.is_meta
        and model.again is model.scale
    )
    ours.load_weights(model, [*names, "second.weight"], [*params, params[0]], as_params=True)
    ours.load_buffers(model, [*buffer_names, "again"], [*buffers, buffers[0]])
    close(model(X), expected)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    ours.load_weights(model, names, [p.detach() * 2 for p in params])  # stay what they are
    assert type(model.first.weight) is torch.Tensor


def test_create_names_map() -> None:
    a, b = torch.ones(1), torch.ones(1)
    for arguments in (
        ({"A": a, "B": b}, {"A": a, "B": b, "C": b}),
        ([("B", b)], [("X", b), ("B", b)]),
        ({}, {}),
    ):
        assert ours.create_names_map(*arguments) == theirs.create_names_map(*arguments)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_construct_stacked_leaf(requires_grad: bool) -> None:
    tensors = [torch.full((2,), float(i), requires_grad=requires_grad) for i in range(3)]
    mine, other = (
        construct_stacked_leaf(tensors, "w"),
        their_calls.construct_stacked_leaf(tuple(tensors), "w"),
    )
    close(mine, other)
    assert (
        mine.is_leaf
        and other.is_leaf
        and mine.requires_grad == other.requires_grad == requires_grad
    )


def test_transpose_stack() -> None:
    rows = tuple((torch.full((2,), float(i)), torch.tensor(i)) for i in range(3))
    close(ours.transpose_stack(rows), theirs.transpose_stack(rows))


# -- ensembles -------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [mlp, norm, Tied])
def test_combine_state_for_ensemble(make: Callable[[], nn.Module]) -> None:
    models = [make() for _ in range(3)]
    func, params, buffers = ours.combine_state_for_ensemble(models)
    their_func, their_params, their_buffers = theirs.combine_state_for_ensemble(models)
    close((params, buffers), (their_params, their_buffers))
    assert not any(p.requires_grad for p in params)
    expected = torch.func.vmap(their_func, (0, 0, None))(their_params, their_buffers, X)
    close(torchfunc_jax.vmap(func, (0, 0, None))(params, buffers, X), expected)
    close(buffers, their_buffers)
    close(torchfunc_jax.jit(torchfunc_jax.vmap(func, (0, 0, None)))(params, buffers, X), expected)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_functional_init(shape: tuple[int, ...]) -> None:
    found = []
    for api in (ours, theirs):
        torch.manual_seed(1)
        found.append(api.functional_init(nn.Linear, shape, device="cpu")(3, 2, bias=True))
    (weights, func, names), (their_weights, their_func, their_names) = found
    assert names == their_names and [w.requires_grad for w in weights] == [
        w.requires_grad for w in their_weights
    ]
    close(weights, their_weights)
    if shape:
        mapped, their_mapped = (
            torchfunc_jax.vmap(func, (0, None)),
            torch.func.vmap(their_func, (0, None)),
        )
    else:
        mapped, their_mapped = func, their_func
    close(mapped(weights, (X,)), their_mapped(their_weights, (X,)))


def test_functional_init_on_another_device() -> None:
    weights, _, _ = ours.functional_init(nn.Linear, (2,), device="meta")(3, 2)
    assert [w.device.type for w in weights] == ["meta", "meta"] and weights[0].shape == (2, 2, 3)


def test_functional_init_with_buffers() -> None:
    found = []
    for api in (ours, theirs):
        torch.manual_seed(1)
        found.append(api.functional_init_with_buffers(nn.BatchNorm1d, (3,))(3))
    mine, other = found
    close(mine[:2], other[:2])
    assert mine[3:] == other[3:]
    expected = torch.func.vmap(other[2], (0, 0, None))(other[0], other[1], (X,))
    close(torchfunc_jax.vmap(mine[2], (0, 0, None))(mine[0], mine[1], (X,)), expected)
    close(mine[1], other[1])
    assert (
        len(ours.functional_init_with_buffers(nn.Linear)(3, 2))
        == len(theirs.functional_init_with_buffers(nn.Linear)(3, 2))
        == 3
    )


# -- errors: the same class and, in the main, the same words ---------------------------------------
def _modes() -> list[nn.Module]:
    return [mlp(), mlp().eval()]


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "buffers": (lambda api: api.make_functional(norm()), "make_functional_with_buffers"),
    "buffers, first version": (
        lambda api: api.make_functional_deprecated_v1(norm()),
        "make_functional_with_buffers_deprecated_v1",
    ),
    "tying": (lambda api: api.raise_parameter_tying_error(), "parameter tying"),
    "no models": (lambda api: api.combine_state_for_ensemble([]), "at least one model"),
    "classes": (lambda api: api.combine_state_for_ensemble([mlp(), nn.Linear(3, 2)]), "same class"),
    "modes": (lambda api: api.combine_state_for_ensemble(_modes()), "training/eval mode"),
    "two dimensions": (
        lambda api: api.functional_init(nn.Linear, (2, 2))(3, 2),
        "more than 1 element",
    ),
    "two dimensions, buffers": (
        lambda api: api.functional_init_with_buffers(nn.Linear, (2, 2))(3, 2),
        "more than 1 element",
    ),
    "nobody": (lambda api: api.functional_init(nn.Linear, (0,))(3, 2), "should be > 0"),
    "nobody, buffers": (
        lambda api: api.functional_init_with_buffers(nn.Linear, (0,))(3, 2),
        "should be > 0",
    ),
    "init of a class with buffers": (
        lambda api: api.functional_init(nn.BatchNorm1d, (2,))(3),
        "has buffers",
    ),
    "init with buffers, one": (
        lambda api: api.functional_init_with_buffers(nn.BatchNorm1d)(3),
        "has buffers",
    ),
    "weight names": (
        lambda api: api.load_state(mlp(), [torch.ones(1)], ["0.weight", "0.bias"]),
        "1",
    ),
    "buffer names": (lambda api: api.load_state(mlp(), [], [], [torch.ones(1)], []), "0"),
    "names": (lambda api: api.load_weights(mlp(), ["0.weight"], []), "names"),
    "no such submodule": (lambda api: api.load_weights(mlp(), ["9.weight"], [torch.ones(1)]), "9"),
    "no tensor": (lambda api: api.load_weights(mlp(), ["0.weight"], [3]), "Tensor"),
    "names map": (lambda api: api.create_names_map({"A": torch.ones(1)}, {}), "A"),
    "names map, unknown tensor": (lambda api: api.create_names_map({}, {"B": torch.ones(1)}), "B"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(Exception) as expected:
        call(theirs)
    with pytest.raises(type(expected.value), match=message):
        call(ours)


def test_requires_grad_must_agree() -> None:
    tensors = (torch.ones(1), torch.ones(1, requires_grad=True))
    for stack in (construct_stacked_leaf, their_calls.construct_stacked_leaf):
        with pytest.raises(
            RuntimeError, match=r"w from each model to have the same .requires_grad"
        ):
            stack(tensors, "w")


# -- the rest of torch.func's module utilities -----------------------------------------------------
def test_replace_all_batch_norm_modules_() -> None:
    mine, other = (
        nn.Sequential(nn.Conv1d(2, 2, 1), nn.Sequential(nn.BatchNorm1d(2)), nn.InstanceNorm1d(2))
        for _ in range(2)
    )
    other.load_state_dict(mine.state_dict())
    x = torch.randn(4, 2, 5)
    assert torchfunc_jax.replace_all_batch_norm_modules_(mine) is mine
    their_batch_norm.replace_all_batch_norm_modules_(other)
    assert not mine[1][0].track_running_stats and not list(mine.buffers())
    close(mine(x), other(x))
    params = dict(mine.named_parameters())

    def gradient(api: Any) -> Any:
        loss = api.grad(lambda p, x: torch.func.functional_call(mine, p, (x[None],)).square().sum())
        return api.vmap(loss, (None, 0))(params, x)

    close(gradient(torchfunc_jax), gradient(torch.func))
    root = torchfunc_jax.replace_all_batch_norm_modules_(nn.BatchNorm2d(3))
    assert root.running_mean is None


PATTERNS = [
    ("a b c -> c (b a)", {}),
    ("(a d) ... -> ... a d", {"d": 2}),
    ("a b c -> (a b c) 1", {}),
    ("a (b e) c -> e a b c", {"e": 3}),
    ("... -> ...", {}),
]


@pytest.mark.parametrize(("pattern", "sizes"), PATTERNS)
def test_rearrange(pattern: str, sizes: dict[str, int]) -> None:
    x = torch.randn(5, 4, 3, 2)
    fn = lambda x: torchfunc_jax.rearrange(x, pattern, **sizes).sin()
    expected = torch.vmap(fn)(x)
    close(torchfunc_jax.vmap(fn)(x), expected)
    close(torchfunc_jax.jit(torchfunc_jax.vmap(fn))(x), expected)
    close(
        torchfunc_jax.grad(lambda x: fn(x).sum())(x[0]),
        torch.func.grad(lambda x: fn(x).sum())(x[0]),
    )
