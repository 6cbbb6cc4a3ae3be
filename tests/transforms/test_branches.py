"""switch of torch._higher_order_ops, which PyTorch has from 2.14 on: the branch that an index
chooses, under each transform, and what is refused. The truth is the branch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Runs, floats, same
from torch import _higher_order_ops as operators

import torchfunc_jax
from torchfunc_jax import grad, hessian, jit, jvp, vmap

pytestmark = pytest.mark.skipif(
    not hasattr(operators, "switch"), reason="this PyTorch has no switch"
)
BRANCHES: tuple[Callable[[Any], Any], ...] = (torch.sin, torch.exp, lambda y: y**3)


def chosen(index: Any, x: Any) -> Any:
    return operators.switch(index, BRANCHES, (x,))


def branch(index: Any) -> Callable[[Any], Any]:
    return BRANCHES[max(0, min(int(index), 2))]


@pytest.mark.parametrize("index", [-7, 0, 1, 2, 3, 2**40])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, int])
def test_an_index_chooses_the_nearest_branch(index: int, dtype: Any) -> None:
    """An index out of range chooses the first or the last branch, also one that an int32 does not
    hold.
    """
    given = torch.tensor(index).to(dtype) if isinstance(dtype, torch.dtype) else index
    x, fn = floats(3), branch(given)
    same(jit(chosen)(given, x), fn(x))
    same(jit(grad(lambda i, x: chosen(i, x).sum(), 1))(given, x), grad(lambda x: fn(x).sum())(x))


def test_an_index_of_one_element_has_any_shape() -> None:
    x = floats(3)
    same(jit(chosen)(torch.tensor([[1]]), x), x.exp())


TRANSFORMS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "value": lambda f: f,
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "hessian": lambda f: hessian(lambda x: f(x).prod()),
    "vmap": lambda f: vmap(f),
    "vmap of grad": lambda f: vmap(grad(f)),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(x).sum()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_the_chosen_branch(name: str) -> None:
    """One compiled program for all indices."""
    transform, x, runs = TRANSFORMS[name], floats(4), Runs()

    def fn(index: Any, x: Any) -> Any:
        runs.add()
        return transform(lambda x: chosen(index, x))(x)

    compiled = jit(fn)
    for index in (0, 2, 1, 0):
        same(compiled(torch.tensor(index), x), transform(BRANCHES[index])(x))
    assert runs.count == 1


@pytest.mark.parametrize("inner", [chosen, grad(chosen, 1)], ids=["value", "grad"])
def test_each_lane_has_its_own_branch(inner: Callable[..., Any]) -> None:
    indices, x = torch.tensor([2, 0, 1, 9, -1]), floats(5)
    rows = [
        BRANCHES[min(max(int(i), 0), 2)](v) if inner is chosen else grad(branch(i))(v)
        for i, v in zip(indices, x, strict=True)
    ]
    same(jit(vmap(inner))(indices, x), torch.stack(rows))


def test_operands_and_outputs_are_trees() -> None:
    def fn(index: Any, a: Any, b: Any) -> Any:
        return operators.switch(
            index,
            [
                lambda t, u: {"sum": t["a"] + u, "pair": (u, t["a"])},
                lambda t, u: {"sum": t["a"] - u, "pair": (t["a"], u * 2)},
            ],
            ({"a": a}, b),
        )

    a, b = floats(3), floats(3) * 2
    compiled = jit(fn)
    same(compiled(torch.tensor(0), a, b), {"sum": a + b, "pair": (b, a)})
    same(compiled(torch.tensor(1), a, b), {"sum": a - b, "pair": (a, b * 2)})


def test_one_branch_is_a_call() -> None:
    x = floats(3)
    same(jit(lambda i, x: operators.switch(i, [torch.sin], (x,)))(torch.tensor(5), x), x.sin())


def test_gradients_of_captured_tensors() -> None:
    w, x = floats(3).requires_grad_(), floats(3)
    compiled = jit(
        lambda i: operators.switch(i, (lambda x: x * w, lambda x: x + w.exp()), (x,)).sum()
    )
    for index, expected in ((0, x), (1, w.detach().exp())):
        same(torch.autograd.grad(compiled(torch.tensor(index)), w)[0], expected)


def test_of_a_python_number_one_branch_is_traced() -> None:
    runs = Runs()

    def counted(x: Any) -> Any:
        runs.add()
        return x.sin()

    x = floats(3)
    same(jit(lambda x: operators.switch(1, (counted, torch.exp), (x,)))(x), x.exp())
    assert runs.count == 0


X, I = floats(3), torch.tensor(1)
WRONG: dict[str, tuple[Any, Any, str]] = {
    "no branches": (I, (), r"at least one function, got \(\)"),
    "one function": (I, torch.sin, "a tuple or list of at least one function"),
    "no function": (I, (torch.sin, 3), "a tuple or list of at least one function"),
    "a float": (torch.tensor(1.0), BRANCHES, r"a single integer, got torch.float32 of shape \[\]"),
    "two indices": (
        torch.tensor([0, 1]),
        BRANCHES,
        r"a single integer, got torch.int64 of shape \[2\]",
    ),
    "a string": ("sin", BRANCHES, "a single integer, got 'sin'"),
    "other shapes": (I, (torch.sin, torch.sum), "all branches must return tensors of the same"),
    "other dtypes": (I, (torch.sin, torch.isnan), "all branches must return tensors of the same"),
    "another structure": (
        I,
        (torch.sin, lambda x: (x,)),
        r"branches\[0\] returns .*, switch: branches\[1\] .*the same structure",
    ),
    "a write": (I, (lambda x: x.add_(X), lambda x: X.add_(1)), "must not write to tensors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    index, branches, message = WRONG[name]
    before = X.clone()
    with pytest.raises(RuntimeError, match=message):
        jit(lambda i, x: operators.switch(i, branches, (x,)))(index, X)
    assert torch.equal(X, before)
    same(jit(chosen)(I, X), X.exp())


def test_without_jit_it_is_torch_funcs() -> None:
    """torch.func of torch 2.15 refuses it: dynamo meets tensors of a transform."""
    outcomes = []
    for T in (torchfunc_jax, torch.func):
        try:
            outcomes.append(T.grad(lambda x: chosen(I, x).sum())(X))
        except Exception as error:
            outcomes.append(error)
    ours, theirs = outcomes
    if isinstance(theirs, Exception):
        assert type(ours) is type(theirs)
        assert "jit compiles all of it" in "".join(ours.__notes__)
    else:
        same(ours, theirs)
