"""TorchScript functions, methods and traced modules inside transforms, against the same Python
code; and torch.jit.trace of transforms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchfunc_jax as tf

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)

X = torch.linspace(-1, 1, 24).reshape(6, 4)
WAYS: dict[str, Callable[..., Any]] = {
    "vmap": lambda f: tf.vmap(f),
    "grad": lambda f: tf.grad(lambda x: f(x).sum()),
    "vmap of grad": lambda f: tf.vmap(tf.grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: tf.jvp(f, (x,), (x.cos(),)),
    "hessian": lambda f: tf.vmap(tf.hessian(lambda x: f(x).sum())),
    "no transform": lambda f: lambda x: f(x),
}
TRUE: dict[str, Callable[..., Any]] = {
    "vmap": lambda f: torch.func.vmap(f),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),)),
    "hessian": lambda f: torch.func.vmap(torch.func.hessian(lambda x: f(x).sum())),
    "no transform": lambda f: f,
}


def products(x: torch.Tensor, scale: float = 2.0, shift: int = 1) -> torch.Tensor:
    return torch.sin(x * scale) * x.cos() + shift


def branch(x: torch.Tensor, twice: bool) -> torch.Tensor:
    if twice:
        x = x * x
    for i in range(3):
        x = x.tanh() + i
    return x


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.mul_(x)
    y[..., 0] += x[..., 1]
    return y


def listed(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(xs).prod(0)


def nested(x: torch.Tensor) -> torch.Tensor:
    return products(x, 0.5) * branch(x, True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.times = (
            nn.Linear(4, 5),
            nn.LayerNorm(5),
            nn.Linear(5, 3),
            3,
        )

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.last(self.norm(torch.tanh(self.first(x)) * scale * self.times))


torch.manual_seed(0)
NET = Net()
#: Name -> (how the scripted object is made, how the function under the transform uses it).
CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "a function": (lambda: torch.jit.script(products), lambda s: lambda x: s(x)),
    "by keyword": (lambda: torch.jit.script(products), lambda s: lambda x: s(x, shift=3)),
    "with branches": (lambda: torch.jit.script(branch), lambda s: lambda x: s(x, True)),
    "with writes": (lambda: torch.jit.script(written), lambda s: lambda x: s(x)),
    "a list": (lambda: torch.jit.script(listed), lambda s: lambda x: s([x, x.sin(), x])),
    "a nested call": (lambda: torch.jit.script(nested), lambda s: lambda x: s(x)),
    "a traced function": (lambda: torch.jit.trace(products, X[0]), lambda s: lambda x: s(x)),
    "a module": (lambda: torch.jit.script(copy.deepcopy(NET)), lambda s: lambda x: s(x, scale=0.5)),
    "a traced module": (
        lambda: torch.jit.trace(copy.deepcopy(NET), X[0]),
        lambda s: lambda x: s(x),
    ),
    "a part of a module": (
        lambda: nn.Sequential(torch.jit.script(copy.deepcopy(NET)), nn.Tanh()),
        lambda s: lambda x: s(x),
    ),
}
PLAIN: dict[str, Any] = {
    "a function": products,
    "by keyword": products,
    "with branches": branch,
    "with writes": written,
    "a list": listed,
    "a nested call": nested,
    "a traced function": products,
    "a module": NET,
    "a traced module": NET,
    "a part of a module": nn.Sequential(NET, nn.Tanh()),
}


def check(case: str, way: str, jitted: bool, used: int = 0) -> None:
    """Compare with torch.func on the Python code; used: how often the scripted object has been
    called before, outside of transforms.
    """
    make, use = CASES[case]
    scripted = make()
    for _ in range(used):
        use(scripted)(X[0].clone().requires_grad_())
    function = WAYS[way](use(scripted))
    if jitted:
        function = tf.jit(function)
    for x in (X, 2 * X, X + 0.1):
        torch.testing.assert_close(
            function(x), TRUE[way](use(PLAIN[case]))(x), rtol=1e-4, atol=1e-5
        )


@pytest.mark.thin(8)
@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_python_does(case: str, way: str, jitted: bool) -> None:
    check(case, way, jitted)


@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
@pytest.mark.parametrize("case", CASES)
def test_what_pytorch_has_optimized_for_earlier_calls_has_derivatives_too(
    case: str, jitted: bool
) -> None:
    check(case, "vmap of grad", jitted, used=4)


class Outer(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sin() * products(x).sum(-1, keepdim=True)


@pytest.mark.thin(2)
@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
@pytest.mark.parametrize("way", ["grad", "vmap of grad", "hessian"])
@pytest.mark.parametrize("of", ["functions", "a module"])
def test_what_a_script_calls_may_have_been_optimized_before(
    of: str, way: str, jitted: bool
) -> None:
    x = X[0].clone().requires_grad_()
    inner = torch.jit.script(copy.deepcopy(NET))
    for _ in range(4):
        (
            torch.jit.script(products)(x, 0.5),
            torch.jit.script(products)(x),
            torch.jit.script(branch)(x, True),
            inner(x),
        )
    script, plain = (
        (torch.jit.script(nested), nested)
        if of == "functions"
        else (torch.jit.script(Outer(inner)), Outer(NET))
    )
    function = WAYS[way](script)
    function = tf.jit(function) if jitted else function
    for given in (X, 2 * X):
        torch.testing.assert_close(function(given), TRUE[way](plain)(given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
def test_the_parameters_of_a_scripted_module_are_read_at_each_call(jitted: bool) -> None:
    """The truth is the Python code: what PyTorch has optimized for calls of the script itself may
    not run inside its vmap.
    """
    net, plain = torch.jit.script(copy.deepcopy(NET)), copy.deepcopy(NET)
    function = tf.vmap(lambda x: net(x))
    if jitted:
        function = tf.jit(function)
    for _ in range(3):
        torch.testing.assert_close(function(X), plain(X), rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            net.first.weight.mul_(1.5), plain.first.weight.mul_(1.5)


def test_the_constants_of_a_recorded_script_are_read_at_each_call() -> None:
    net, plain = (copy.deepcopy(NET).requires_grad_(False) for _ in range(2))
    net = torch.jit.script(net)
    function = tf.vmap(lambda x: net(x))
    for _ in range(3):
        torch.testing.assert_close(function(X), plain(X), rtol=1e-4, atol=1e-5)
        net.first.weight.mul_(1.5), plain.first.weight.mul_(1.5)


@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
def test_backward_reaches_the_parameters_of_a_scripted_module(jitted: bool) -> None:
    net, plain = torch.jit.script(copy.deepcopy(NET)), copy.deepcopy(NET)
    function = tf.vmap(lambda x: net(x).square().sum())
    (tf.jit(function) if jitted else function)(X).sum().backward()
    torch.func.vmap(lambda x: plain(x).square().sum())(X).sum().backward()
    for got, want in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
def test_a_captured_tensor_alone_is_an_argument(jitted: bool) -> None:
    scripted, weights = torch.jit.script(products), torch.ones(4)
    function = tf.vmap(lambda x: x * scripted(weights))
    if jitted:
        function = tf.jit(function)
    for _ in range(3):
        torch.testing.assert_close(function(X), X * products(weights))
        weights += 1


@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
def test_a_write_to_an_argument_reaches_it(jitted: bool) -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(y)

    scripted = torch.jit.script(add)
    function = tf.vmap(lambda x, y: scripted(x, y) * 2)
    for _ in range(2):
        got, want = X.clone(), X.clone()
        result = (tf.jit(function) if jitted else function)(got, X)
        torch.testing.assert_close(result, torch.func.vmap(lambda x, y: add(x, y) * 2)(want, X))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
def test_dropout_draws_torchs_numbers(jitted: bool) -> None:
    net = nn.Dropout(0.5)
    scripted = torch.jit.script(net)
    for seed in (0, 1):
        torch.manual_seed(seed)
        want = torch.func.vmap(lambda x: net(x), randomness="different")(X)
        torch.manual_seed(seed)
        function = tf.vmap(lambda x: scripted(x), randomness="different")
        assert torch.equal((tf.jit(function) if jitted else function)(X), want)


def test_a_call_that_torchscript_refuses_raises_its_error() -> None:
    scripted = torch.jit.script(products)
    wrong: list[Callable[[torch.Tensor], Any]] = [
        lambda x: scripted(),
        lambda x: scripted(x, 1.0, 2, 3),
        lambda x: scripted(x, unknown=1),
        lambda x: scripted(x, x=x),
    ]
    for function in wrong:
        with pytest.raises(RuntimeError) as there:
            function(X)
        with pytest.raises(RuntimeError) as here:
            tf.vmap(function)(X)
        assert str(here.value) == str(there.value)
    for function in (tf.vmap(lambda x: scripted("x")), tf.jit(lambda x: scripted("x"))):
        with pytest.raises(
            RuntimeError,
            match=r"products\(\) Expected a value of type 'Tensor' for argument 'x' but .* 'str'",
        ):
            function(X)


def test_torchscript_is_as_it_was_after_a_function_has_raised() -> None:
    scripted, own = torch.jit.script(products), torch._C.ScriptFunction.__call__

    def stop(x: torch.Tensor) -> torch.Tensor:
        assert torch._C.ScriptFunction.__call__ is not own
        raise ValueError(f"stop {scripted(x).shape}")

    for function in (tf.vmap(stop), tf.jit(tf.vmap(stop))):
        with pytest.raises(ValueError, match="stop"):
            function(X)
    assert torch._C.ScriptFunction.__call__ == own
    assert torch.equal(scripted(X), products(X))


@pytest.mark.parametrize("way", ["vmap", "jvp"])
@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
def test_torch_jit_trace_of_a_transform_records_its_operators(way: str, jitted: bool) -> None:
    function = WAYS[way](lambda x: x.sin() * 2)
    traced = torch.jit.trace(tf.jit(function) if jitted else function, X, check_trace=False)
    torch.testing.assert_close(traced(X + 1), function(X + 1))
