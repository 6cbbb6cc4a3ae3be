"""Beside torch's own machinery: programs that torch.compile compiles, and torch's own transforms, around ours."""
from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from agreement import same
from torch import nn

import torchfunc_jax
from torchfunc_jax import grad, jit, vmap

COMPILED = {
    "vmap": lambda T, a: T.vmap(torch.sin)(a * 2) + 1,
    "grad": lambda T, a: T.grad(lambda b: (b**3).sum())(a) * 2,
    "vjp": lambda T, a: T.vjp(torch.sin, a)[1](a)[0] + 1,
    "jvp": lambda T, a: T.jvp(torch.sin, (a,), (a * 2,))[1],
    "jacrev": lambda T, a: T.jacrev(torch.sin)(a[0]) + 1,
    "hessian": lambda T, a: T.vmap(T.hessian(lambda b: (b**3).sum()))(a),
    "functional_call": lambda T, a: T.functional_call(_linear, {"weight": a, "bias": a[:, 0]}, (a,)) * 2,
}
_linear = nn.Linear(3, 2)
_jitted = jit(vmap(lambda a: a.exp() * 2))


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compile_of_a_program_that_calls_a_transform(name: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 3)
    compiled = torch.compile(lambda a: COMPILED[name](torchfunc_jax, a), backend="eager")
    same(compiled(x), COMPILED[name](torch.func, x), rtol=1e-5, atol=1e-6)


def test_torch_compile_of_a_training_step() -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 3)

    def gradients(call: Any) -> list[torch.Tensor]:
        _linear.zero_grad()
        (call(_linear(x)) ** 2).sum().backward()
        return [p.grad.clone() for p in _linear.parameters()]

    expected = gradients(lambda a: a.exp() * 2)
    for call in (lambda a: _jitted(a), vmap(lambda a: a.exp() * 2)):
        same(torch.compile(gradients, backend="eager")(call), expected, rtol=1e-4, atol=1e-5)


def test_a_transform_is_one_graph_break_and_fullgraph_says_so() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(2, 3)
    same(torch.compile(lambda a: _jitted(a * 2) + 1, backend=backend)(x), (x * 2).exp() * 2 + 1, rtol=1e-5, atol=1e-6)
    assert len(graphs) == 2  # before and after
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs in JAX"):
        torch.compile(lambda a: _jitted(a), backend="eager", fullgraph=True)(x)


def test_a_transform_of_a_compiled_function() -> None:
    torch._dynamo.reset()
    x, compiled = torch.randn(2, 3), torch.compile(lambda a: (a.sin() * 2).sum(), backend="eager")
    for result in (vmap(grad(compiled))(x), jit(vmap(grad(compiled)))(x)):
        same(result, torch.func.vmap(torch.func.grad(lambda a: (a.sin() * 2).sum()))(x))


def test_importing_does_not_import_dynamo() -> None:
    program = "import sys, torch; had = 'torch._dynamo' in sys.modules; import torchfunc_jax; assert had or 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
