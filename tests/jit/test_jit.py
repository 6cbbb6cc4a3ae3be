"""jit: when Python runs again, what is read at each call, what is written back,
and what XLA got.
"""

from __future__ import annotations

import io
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from agreement import Traces, same
from torch import nn

from torchfunc_jax import explain, functional_call, grad, jit, vmap

# -- when Python runs ------------------------------------------------------------------------------
# first call's arguments, second's, how often Python runs in all
RETRACES: dict[str, tuple[Any, Any, int]] = {
    "same": ((torch.ones(3),), (torch.zeros(3),), 1),
    "strides": ((torch.ones(3, 4),), (torch.ones(4, 3).T,), 2),
    "requires_grad": ((torch.ones(3),), (torch.ones(3, requires_grad=True),), 2),
    "shape": ((torch.ones(3),), (torch.ones(4),), 2),
    "dtype": ((torch.ones(3),), (torch.ones(3).double(),), 2),
    "tree": ((torch.ones(3),), ([torch.ones(3)],), 2),
    "dict order": (
        ({"a": torch.ones(3), "b": torch.ones(2)},),
        ({"b": torch.ones(2), "a": torch.ones(3)},),
        2,
    ),
    "number": ((torch.ones(3), 2), (torch.ones(3), 2), 1),
    "another number": ((torch.ones(3), 2), (torch.ones(3), 3), 2),
    "number's type": ((torch.ones(3), 2), (torch.ones(3), 2.0), 2),
    "bool and int": ((torch.ones(3), 1), (torch.ones(3), True), 2),
    "string": ((torch.ones(3), "a"), (torch.ones(3), "a"), 1),
    "none": ((torch.ones(3), None), (torch.ones(3), None), 1),
    "dtype value": ((torch.ones(3), torch.float32), (torch.ones(3), torch.float64), 2),
}


@pytest.mark.parametrize("name", RETRACES)
def test_how_often_python_runs(name: str) -> None:
    first, second, expected = RETRACES[name]
    traced = Traces(lambda x, *rest: torch.utils._pytree.tree_map(lambda t: t * 2, x))
    fn = jit(traced)
    for args in (first, second, first, second, first):
        same(fn(*args), traced.fn(*args))
    assert traced.count == expected


def test_no_grad_callers() -> None:
    w = torch.randn(3, requires_grad=True)
    fn = jit(lambda x: (x * w).sin())
    x = torch.randn(3)
    for _ in range(2):
        with torch.no_grad():
            result = fn(x)
        assert not result.requires_grad
        same(result, (x * w).sin(), graph=False)
        with torch.inference_mode():
            same(fn(x), (x * w).sin())
        assert fn(x).requires_grad


def test_static_leaves_and_static_arguments() -> None:
    traced = Traces(lambda x, shape, power=1: x.reshape(shape) ** power)
    fn = jit(traced, static_argnums=1)
    x = torch.randn(6)
    for power in (1, 2, 1):
        same(fn(x, (2, 3), power=power), x.reshape(2, 3) ** power)
    assert traced.count == 2
    same(jit(lambda x, n: (x, n, "text", None, [n + 1]))(x, 3), (x, 3, "text", None, [4]))


def test_training_flag_is_a_guard() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fn, x = jit(model), torch.randn(8, 4)
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for training in (True, False, True, False):
        reference.load_state_dict(model.state_dict())
        model.train(training), reference.train(training)
        same(fn(x), reference(x), rtol=1e-4, atol=1e-5)
        same(dict(model.named_buffers()), dict(reference.named_buffers()), rtol=1e-5, atol=1e-6)


def test_hooks_are_a_guard() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    fn = jit(model)
    same(fn(x), model(x), rtol=1e-5, atol=1e-6)
    handle = model.register_forward_hook(lambda m, args, out: out * 10)
    same(fn(x), model(x), rtol=1e-5, atol=1e-5)
    before = model.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    same(fn(x), model(x), rtol=1e-5, atol=1e-5)
    handle.remove(), before.remove()
    same(fn(x), model(x), rtol=1e-5, atol=1e-6)


# -- what is read at each call ---------------------------------------------------------------------
def test_captured_tensors_are_read_at_each_call() -> None:
    model, x, shift = nn.Linear(3, 2), torch.randn(4, 3), torch.zeros(2)
    traced = Traces(lambda a: model(a) + shift)
    fn = jit(lambda a: traced(a))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def check() -> None:
        same(fn(x), model(x) + shift, rtol=1e-5, atol=1e-6)

    check()
    model(x).sum().backward()
    optimizer.step()
    check()
    shift += 3
    check()
    model.weight = nn.Parameter(torch.randn(2, 3))
    check()
    model.weight.data = torch.randn(2, 3)
    check()
    with torch.no_grad():
        model.bias.zero_()
    check()
    model.load_state_dict(nn.Linear(3, 2).state_dict())
    check()
    assert traced.count == 1
    shift = torch.full((2,), 7.0)
    check()


def test_captured_containers_and_attributes() -> None:
    class Holder:
        def __init__(self) -> None:
            self.table = {"w": torch.ones(3)}
            self.items = [torch.ones(3)]

        def call(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table["w"] + self.items[0]

    holder, x = Holder(), torch.randn(3)
    fn = jit(holder.call)
    for scale in (1.0, 2.0, 3.0):
        holder.table["w"] = torch.full((3,), scale)
        holder.items[0] = torch.full((3,), -scale)
        same(fn(x), x * scale - scale)


def test_a_captured_tensor_of_another_shape() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    fn = jit(lambda a: model(a))
    fn(x)
    model.weight, model.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5))
    with explain(io.StringIO()) as log:
        same(fn(x), model(x), rtol=1e-5, atol=1e-6)
    assert len(log) == 1 and "a captured tensor has another shape, dtype" in log[0]


def test_weights_that_begin_to_require_grad() -> None:
    model, x = nn.Linear(3, 2).requires_grad_(False), torch.randn(4, 3)
    fn = jit(model)
    assert not fn(x).requires_grad
    model.requires_grad_(True)
    fn(x).sum().backward()
    same(model.weight.grad, x.sum(0).expand(2, 3))


# -- what is written back --------------------------------------------------------------------------
def test_mutated_arguments_are_written_back() -> None:
    def fn(x: torch.Tensor, tree: dict[str, torch.Tensor]) -> torch.Tensor:
        x[0] = 5.0
        x[1:].mul_(2)
        tree["a"].add_(x.sum())
        tree["b"].t().fill_(1.0)
        return x.sum()

    def arguments() -> tuple[Any, ...]:
        return torch.arange(4.0), {"a": torch.zeros(2), "b": torch.zeros(2, 3), "c": torch.ones(1)}

    mine, theirs = arguments(), arguments()
    compiled = jit(fn)
    for _ in range(3):
        same(compiled(*mine), fn(*theirs))
        same(mine, theirs)


def test_mutated_captured_tensors_are_written_back() -> None:
    count, history = torch.zeros((), dtype=torch.int64), torch.zeros(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        history.mul_(0.5).add_(x, alpha=0.5)
        return history * 1

    compiled = jit(fn)
    expected = torch.zeros(3)
    for n in range(1, 4):
        x = torch.randn(3)
        expected = expected * 0.5 + x * 0.5
        same(compiled(x), expected)
        same(history, expected)
        assert count.item() == n


def test_batch_norm_inside_vmap_and_jit() -> None:
    model, reference = nn.BatchNorm1d(3, track_running_stats=True), nn.BatchNorm1d(3)
    fn = jit(model)
    for _ in range(3):
        x = torch.randn(8, 3)
        same(fn(x), reference(x), rtol=1e-5, atol=1e-5)
        same(dict(model.named_buffers()), dict(reference.named_buffers()), rtol=1e-5, atol=1e-6)


def test_a_mutated_argument_that_is_returned() -> None:
    x = torch.ones(3)
    out = jit(lambda a: a.add_(1))(x)
    same(out, x)
    same(x, torch.full((3,), 2.0))


# -- random numbers --------------------------------------------------------------------------------
def test_random_numbers_differ_at_each_call_and_repeat_under_manual_seed() -> None:
    fn = jit(lambda x: (torch.rand(5), F.dropout(x, 0.5), torch.randn_like(x)))
    x = torch.ones(100)

    def run() -> list[Any]:
        torch.manual_seed(7)
        return [fn(x), fn(x)]

    first, second = run(), run()
    same(first, second)
    for a, b in zip(*first, strict=True):
        assert not torch.equal(a, b)
    kept = first[0][1]
    assert set(kept.unique().tolist()) == {0.0, 2.0} and 20 < int((kept == 0).sum()) < 80


def test_an_explicit_generator() -> None:
    generator = torch.Generator()
    fn = jit(lambda: torch.rand(5, generator=generator))
    draws = []
    for seed in (1, 1, 2):
        generator.manual_seed(seed)
        draws.append((fn(), fn()))
    same(draws[0], draws[1])
    assert not torch.equal(draws[0][0], draws[0][1]) and not torch.equal(draws[0][0], draws[2][0])


def test_a_state_that_is_set_between_two_draws() -> None:
    def fn(x):
        first = torch.rand(2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return x, first, torch.rand(2)

    compiled = jit(fn)
    for seed in (5, 6):
        torch.manual_seed(seed)
        expected = fn(torch.ones(2))
        torch.manual_seed(seed)
        for found, want in zip(compiled(torch.ones(2)), expected, strict=True):
            same(found, want)


def test_a_function_without_random_operators_leaves_the_generator_alone() -> None:
    fn = jit(torch.sin)
    fn(torch.ones(3))
    state = torch.get_rng_state()
    fn(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_backward_uses_the_forward_passs_random_numbers() -> None:
    x = torch.ones(50, requires_grad=True)
    fn = jit(lambda a: F.dropout(a, 0.5))
    for create_graph in (False, True):
        out = fn(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=create_graph)
        same(g, out, graph=False)


# -- composition -----------------------------------------------------------------------------------
def test_nested_jit() -> None:
    inner = jit(lambda x: x.sin())
    outer = jit(lambda x: inner(x) * inner(x * 2))
    x = torch.randn(3)
    same(outer(x), x.sin() * (2 * x).sin())
    same(vmap(inner)(torch.randn(2, 3).fill_(1.0)), torch.ones(2, 3).sin())
    same(grad(lambda a: inner(a).sum())(x), x.cos())
    same(jit(jit(torch.sin))(x), x.sin())


def test_as_a_decorator_and_a_method() -> None:
    @jit
    def f(x: torch.Tensor) -> torch.Tensor:
        """Doubles."""
        return x * 2

    class Model:
        scale = 3.0

        @jit
        def call(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    @jit(static_argnums=1)
    def g(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    x = torch.randn(3)
    assert f.__name__ == "f" and f.__doc__ == "Doubles."
    same(f(x), x * 2)
    same(g(x, 3), x * 3)
    same(Model().call(x), x * 3)


def test_modules_passed_as_arguments() -> None:
    fn, x = jit(lambda m, a: m(a)), torch.randn(4, 3)
    for model in (nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 5)):
        same(fn(model, x), model(x), rtol=1e-5, atol=1e-6)


def test_functions_without_tensors_and_without_outputs() -> None:
    same(jit(lambda: torch.arange(3) + 1)(), torch.arange(3) + 1)
    assert jit(lambda x: None)(torch.ones(3)) is None
    same(jit(lambda x: {})(torch.ones(3)), {})
    same(jit(lambda x: (x, 3))(torch.ones(3)), (torch.ones(3), 3))


def test_many_outputs() -> None:
    fn = jit(lambda xs: {k: (v * 2, v.sum()) for k, v in xs.items()})
    xs = {str(i): torch.randn(3, i % 3 + 1) for i in range(40)}
    result = fn(xs)
    same(result, {k: (v * 2, v.sum()) for k, v in xs.items()})
    result["0"][0].zero_()
    same(fn(xs), {k: (v * 2, v.sum()) for k, v in xs.items()})


# -- what XLA got ----------------------------------------------------------------------------------
def test_lower_and_cost_analysis() -> None:
    model, x = nn.Linear(64, 32), torch.randn(16, 64)
    fn = jit(grad(lambda p, a: functional_call(model, p, (a,)).square().sum()))
    lowered = fn.lower(dict(model.named_parameters()), x)
    assert isinstance(lowered, jax.stages.Lowered)
    assert "dot_general" in lowered.as_text()
    assert lowered.cost_analysis()["flops"] > 2 * 16 * 64 * 32
    assert lowered.compile().memory_analysis() is not None
    assert "dot_general" in str(fn.jaxpr(dict(model.named_parameters()), x))


def test_a_program_contains_no_double_precision_by_accident() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.1))
    text = jit(model).lower(torch.randn(4, 8)).as_text()
    assert "f64" not in text


def test_donated_arguments() -> None:
    fn = jit(lambda p, x: p + x, donate=0)
    p, x = torch.zeros(1024), torch.ones(1024)
    expected = torch.zeros(1024)
    for _ in range(4):
        p = fn(p, x)
        expected = expected + 1
        same(p, expected)
    same(x, torch.ones(1024))


def test_jax_arrays_stay_jax_arrays() -> None:
    w = torch.randn(3, requires_grad=True)
    fn = jit(lambda x: {"a": x * w, "n": 3})
    result = fn(jnp.ones(3))
    assert isinstance(result["a"], jax.Array) and result["n"] == 3
    same(torch.tensor(result["a"].tolist()), w, graph=False)
    assert isinstance(fn(torch.ones(3))["a"], torch.Tensor)


def test_cache_clear() -> None:
    traced = Traces(torch.sin)
    fn = jit(traced)
    fn(torch.ones(3))
    fn.cache_clear()
    fn(torch.ones(3))
    assert traced.count == 2


def test_lines_of_a_loop_and_python_state_at_trace_time() -> None:
    scale = 2.0

    def fn(x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = x * scale + i
        return x

    compiled, x = jit(fn), torch.randn(3)
    same(compiled(x), fn(x))


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.vmap,
        vmap,
        lambda f: jit(vmap(f)),
        lambda f: vmap(jit(f)),
        lambda f: jit(lambda x: torch.stack([f(row) for row in x])),
    ],
    ids=["torch.func", "vmap", "jit of vmap", "vmap of jit", "jit"],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_views_of_captured_tensors_in_inference_mode(transform: Any, requires_grad: bool) -> None:
    captured = torch.arange(6.0).reshape(2, 3).requires_grad_(requires_grad)

    def function(x: torch.Tensor) -> torch.Tensor:
        views = (
            captured[1],
            captured.view(6)[3:],
            captured.detach()[1],
            captured.t()[:, 1],
            captured.narrow(0, 1, 1).squeeze(0),
        )
        return torch.stack([(x * view).sum() for view in views])

    for size in (1, 2, 3):
        with torch.inference_mode():
            result = transform(function)(torch.ones(size, 3))
        assert result.tolist() == [[12.0] * 5] * size
