"""Fifty wrong calls of beginners: the class is torch.func's, the words name the argument, what was
expected and what to do.

Beside each are torch.func's words, and for some JAX's. The traceback ends at the user's line: no
frame of this library is in it.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bridge
import torchfunc_jax
from torchfunc_jax import jit

x, y, labels = torch.arange(6.0).reshape(2, 3) + 1, torch.ones(4, 3), torch.tensor([0, 1])
model = nn.Linear(3, 2)
params = dict(model.named_parameters())
X = jnp.ones((2, 3))


def square(a: torch.Tensor) -> torch.Tensor:
    return (a * a).sum()


class Row(NamedTuple):
    """A wrong call.

    Attributes:
        call: takes a namespace of transforms.
        theirs: words of torch.func's error; "" if torch.func does not have the function.
        argument, expected, to_do: words of ours.
    """

    call: Callable[[Any], Any]
    theirs: str
    argument: str
    expected: str
    to_do: str


NUMBER, NONE = (
    "Got in_dim=0 for an input but the input is of type",
    "please use None as the respective in_dim",
)
TENSOR, STATE = "Thing passed to transform API must be Tensor", "parameter_and_buffer_dicts"
FUNCTION = "give the function itself, and its arguments to what"

ROWS = {
    # vmap
    "in_dims a list": Row(
        lambda T: T.vmap(torch.sin, in_dims=[0])(x),
        "expected `in_dims` to be int or a",
        "in_dims=[0]",
        "int or a (potentially nested) tuple",
        "For example in_dims=(0, None)",
    ),
    "in_dims a string": Row(
        lambda T: T.vmap(torch.sin, in_dims="0")(x),
        "expected `in_dims` to be int or a",
        "in_dims",
        "got: <class 'str'>",
        "For example in_dims=(0, None)",
    ),
    "in_dims None": Row(
        lambda T: T.vmap(torch.sin, in_dims=None)(x),
        "expected `in_dims` to be int or a",
        "in_dims=None",
        "got: <class 'NoneType'>",
        "For example in_dims=(0, None)",
    ),
    "nothing to map": Row(
        lambda T: T.vmap(torch.sin, in_dims=(None,))(x),
        "Expected at least one Tensor to vmap over",
        "in_dims=(None,)",
        "Expected at least one Tensor",
        "give the dimension to map",
    ),
    "in_dims too large": Row(
        lambda T: T.vmap(torch.sin, in_dims=2)(x),
        "Got in_dim=2 for some input",
        "It is in argument 0",
        "a Tensor of dimensionality 2",
        "expected in_dim to satisfy -2 <= in_dim < 2",
    ),
    "in_dims for one of two arguments": Row(
        lambda T: T.vmap(torch.add, in_dims=(0,))(x, x),
        "in_dims is not compatible with the structure",
        "in_dims=(0,)",
        "The number of entries in in_dims is 1, that of inputs 2",
        "Give one of int, None or a tree of them for each input",
    ),
    "a number is mapped": Row(
        lambda T: T.vmap(torch.add)(x, 1.0),
        NUMBER,
        "in_dims=0",
        "cannot vmap over non-Tensor",
        NONE,
    ),
    "a string is mapped": Row(
        lambda T: T.vmap(lambda a, s: a)(x, "mean"), NUMBER, "in_dims=0", "<class 'str'>", NONE
    ),
    "None is mapped": Row(
        lambda T: T.vmap(lambda a, m: a)(x, None), NUMBER, "in_dims=0", "<class 'NoneType'>", NONE
    ),
    "a NumPy array is mapped": Row(
        lambda T: T.vmap(torch.sin)(x.numpy()),
        NUMBER,
        "in_dims=0",
        "<class 'numpy.ndarray'>",
        "torch.as_tensor to make a tensor of it",
    ),
    "a list of numbers is mapped": Row(
        lambda T: T.vmap(torch.sin)([1.0, 2.0]),
        NUMBER,
        "in_dims=0",
        "<class 'float'>",
        "torch.as_tensor",
    ),
    "a tensor without dimensions is mapped": Row(
        lambda T: T.vmap(torch.sin)(torch.tensor(1.0)),
        "a Tensor of dimensionality 0",
        "in_dims=0",
        "dimensionality 0",
        "It has no dimension to map over: use None for it",
    ),
    "sizes differ": Row(
        lambda T: T.vmap(torch.add)(x, y),
        "the same size in the mapped dimension",
        "argument 0: 2; argument 1: 4",
        "got sizes [2, 4]",
        "use None in in_dims",
    ),
    "no inputs": Row(
        lambda T: T.vmap(torch.sin)(),
        "got no inputs",
        "vmap(sin)(<inputs>)",
        "got no inputs",
        "Maybe you forgot to add inputs",
    ),
    "vmap of a result": Row(
        lambda T: T.vmap(torch.sin(x))(x),
        "'Tensor' object is not callable",
        "vmap: expected a function",
        "got <class 'torch.Tensor'>",
        FUNCTION,
    ),
    "the lane returns a number": Row(
        lambda T: T.vmap(lambda a: 1.0)(x),
        "must only return Tensors",
        "out_dims",
        "got type <class 'float'>",
        "Did you mean to set out_dims= to None",
    ),
    "the lane returns nothing": Row(
        lambda T: T.vmap(lambda a: None)(x),
        "must only return Tensors",
        "out_dims",
        "<class 'NoneType'>",
        "Did you mean to set out_dims= to None",
    ),
    "out_dims too large": Row(
        lambda T: T.vmap(torch.sin, out_dims=5)(x),
        "Dimension out of range",
        "out_dims=5",
        "expected to be in range of [-2, 1]",
        "but got 5",
    ),
    "out_dims a string": Row(
        lambda T: T.vmap(torch.sin, out_dims="0")(x),
        "`out_dims` must be an int, None or",
        "out_dims=0",
        "must be an int, None or a python collection of ints",
        "where in the outputs the vmapped dimension should appear",
    ),
    "randomness True": Row(
        lambda T: T.vmap(torch.sin, randomness=True)(x),
        "Only allowed values for randomness",
        "randomness",
        "Got True",
        "'error', 'different', or 'same'",
    ),
    "chunk_size 0": Row(
        lambda T: T.vmap(torch.sin, chunk_size=0)(x),
        "chunk_size should be None or greater than 0",
        "chunk_size",
        "(got 0)",
        "should be None or greater than 0",
    ),
    "chunk_size a float": Row(
        lambda T: T.vmap(torch.sin, chunk_size=1.5)(x),
        "float",
        "chunk_size",
        "(got 1.5)",
        "None, an integer, or",
    ),
    "dropout in a lane": Row(
        lambda T: T.vmap(lambda a: F.dropout(a))(x),
        "called random operation while in randomness error mode",
        "randomness",
        "called random operation",
        "use the 'same' or 'different' randomness flags",
    ),
    "if in a lane": Row(
        lambda T: T.vmap(lambda a: a if a.sum() > 0 else -a)(x),
        "data-dependent control flow",
        "a Tensor",
        "data-dependent control flow",
        "torch.where(condition, a, b)",
    ),
    ".item() in a lane": Row(
        lambda T: T.vmap(lambda a: a * a.sum().item())(x),
        "calling .item() on a Tensor",
        ".item()",
        "rewrite",
        "Keep it a tensor",
    ),
    "math.sin in a lane": Row(
        lambda T: T.vmap(lambda a: math.sin(a[0]))(x),
        "calling .item() on a Tensor",
        ".item()",
        "rewrite",
        "torch.sin in the place of math.sin",
    ),
    "a mask in a lane": Row(
        lambda T: T.vmap(lambda a: a[a > 1].sum())(x),
        "dynamic shape",
        "boolean mask",
        "dynamic shape",
        "torch.where(mask, x, 0.0).sum()",
    ),
    "NumPy in a lane": Row(
        lambda T: T.vmap(lambda a: torch.from_numpy(np.sin(a.numpy())))(x),
        "Cannot access data pointer",
        "Tensor",
        "NumPy cannot see the values",
        "call PyTorch's function of that name",
    ),
    "jax.numpy in a lane": Row(
        lambda T: T.vmap(jnp.sin)(x),
        "",
        "Error interpreting argument",
        "as an abstract array",
        "bridge.from_jax(f)",
    ),
    "a method that is not there": Row(
        lambda T: T.vmap(lambda a: a.sinn())(x),
        "'Tensor' object has no attribute 'sinn'",
        "sinn",
        "'Tensor'",
        "has no attribute",
    ),
    "sizes do not fit in a lane": Row(
        lambda T: T.grad(lambda a: (a @ torch.ones(4)).sum())(x),
        "size mismatch",
        "input",
        "(2x3)",
        "(4)",
    ),
    # grad and its family
    "grad of a vector": Row(
        lambda T: T.grad(torch.sin)(x),
        "return a scalar Tensor, got tensor with 2 dims",
        "f(*args)",
        "a scalar Tensor",
        "A loss is a scalar after .sum() or .mean()",
    ),
    "grad of .item()": Row(
        lambda T: T.grad(lambda a: square(a).item())(x),
        "return a Tensor, got <class 'float'>",
        "f(*args)",
        "a Tensor",
        "return the tensor itself, without .item()",
    ),
    "grad of (loss, output)": Row(
        lambda T: T.grad(lambda a: (square(a), a))(x),
        "return a Tensor, got <class 'tuple'>",
        "f(*args)",
        "a Tensor",
        "has_aux=True",
    ),
    "has_aux without aux": Row(
        lambda T: T.grad(square, has_aux=True)(x),
        "should be a tuple: (output, aux)",
        "has_aux",
        "a tuple",
        "(output, aux) if has_aux is True",
    ),
    "grad of labels": Row(
        lambda T: T.grad(lambda a: (a * 1.0).sum())(labels),
        "floating point",
        "grad_and_value(f)(*args)",
        "dtype torch.int64",
        "convert it with .float()",
    ),
    "grad of a number": Row(
        lambda T: T.grad(lambda a: a * a)(2.0),
        TENSOR,
        "(f)(*args)",
        "got <class 'float'>",
        "by torch.as_tensor",
    ),
    "grad of None": Row(
        lambda T: T.grad(lambda a: a.sum())(None),
        TENSOR,
        "(f)(*args)",
        "got <class 'NoneType'>",
        "choose by argnums",
    ),
    "grad of a NumPy array": Row(
        lambda T: T.grad(square)(x.numpy()),
        TENSOR,
        "(f)(*args)",
        "numpy.ndarray",
        "by torch.as_tensor",
    ),
    "the module in the place of its parameters": Row(
        lambda T: T.grad(lambda m, a: m(a).sum())(model, x),
        TENSOR,
        "(f)(*args)",
        "Linear",
        "dict(module.named_parameters()), and call the module by functional_call",
    ),
    "model.parameters()": Row(
        lambda T: T.grad(lambda p, a: a.sum())(model.parameters(), x),
        TENSOR,
        "(f)(*args)",
        "generator",
        "dict(module.named_parameters())",
    ),
    "model.named_parameters()": Row(
        lambda T: T.grad(lambda p, a: a.sum())(model.named_parameters(), x),
        TENSOR,
        "(f)(*args)",
        "generator",
        "dict(module.named_parameters())",
    ),
    "grad(f, x)": Row(
        lambda T: T.grad(square, x)(x),
        "argnums must be int or",
        "argnums",
        "torch.Tensor",
        "grad(f)(x), not grad(f, x)",
    ),
    "grad of a result": Row(
        lambda T: T.grad(square(x))(x),
        "'Tensor' object is not callable",
        "grad: expected a function",
        "Tensor",
        FUNCTION,
    ),
    "argnums a string": Row(
        lambda T: T.grad(square, argnums="a")(x),
        "argnums must be int or",
        "argnums",
        "<class 'str'>",
        "(0, 1)",
    ),
    "argnums a list": Row(
        lambda T: T.grad(torch.dot, argnums=[0, 1])(x[0], x[1]),
        "argnums must be int or",
        "argnums",
        "<class 'list'>",
        "for example (0, 1)",
    ),
    "argnums too large": Row(
        lambda T: T.grad(square, argnums=1)(x),
        "Got argnum=1, but only 1 positional inputs",
        "argnum=1",
        "only 1 positional inputs",
        "counts them from 0",
    ),
    "the input by its name": Row(
        lambda T: T.grad(square)(a=x),
        "Got argnum=0, but only 0 positional inputs",
        "argnum=0",
        "only 0 positional inputs",
        "by its position, not by its name",
    ),
    "a captured tensor is changed": Row(
        lambda T: T.grad(lambda a: y.add_(a.sum()).sum())(x),
        "would mutate a captured Tensor",
        "aten::add_",
        "not supported",
        "explicitly accept the mutated Tensor(s) as inputs",
    ),
    "primals no tuple": Row(
        lambda T: T.jvp(square, x, x),
        "Expected primals to be a tuple",
        "primals",
        "to be a tuple",
        "f(*primals)",
    ),
    "tangents of another size": Row(
        lambda T: T.jvp(square, (x,), (y,)),
        "different size",
        "tangent 0",
        "the primal's shape (2, 3)",
        "got (4, 3)",
    ),
    "a tangent of integers": Row(
        lambda T: T.jvp(square, (x,), (x.long(),)),
        "Expected tangent to be floating point",
        "tangent",
        "but got: torch.int64",
        "convert it with .to()",
    ),
    "cotangents of another size": Row(
        lambda T: T.vjp(torch.sin, x)[1](y),
        "Mismatch in shape",
        "grad_output[0]",
        "has a shape of (2, 3)",
        "give cotangents of the output's shape",
    ),
    "cotangents in a tuple": Row(
        lambda T: T.vjp(torch.sin, x)[1]((x,)),
        "Expected pytree structure of cotangents",
        "cotangents",
        "to be the same as pytree structure of outputs",
        "primal output",
    ),
    # modules
    "no dict": Row(
        lambda T: T.functional_call(model, list(model.parameters()), x),
        "to be dictionaries",
        STATE,
        "expected a dict",
        "such as dict(module.named_parameters())",
    ),
    "module and parameters in the wrong order": Row(
        lambda T: T.functional_call(params, model, x),
        "to be a dict, or a list/tuple of dicts",
        "module",
        "expected an nn.Module",
        "got <class 'dict'>",
    ),
    "the class in the place of a module": Row(
        lambda T: T.functional_call(nn.Linear, params, x),
        "missing 1 required positional argument",
        "module",
        "expected an nn.Module",
        "make a module of it",
    ),
    "a key of another module": Row(
        lambda T: T.functional_call(model, {"fc.weight": x}, x),
        "no attribute `fc`",
        STATE,
        "no 'fc.weight'",
        "it has 'weight', 'bias'",
    ),
    "a key with a slip": Row(
        lambda T: T.functional_call(model, {"weigth": x, "bias": x}, x, strict=True),
        "Unexpected key(s): 'weigth'",
        STATE,
        "Missing key(s): 'weight'",
        "it has 'weight', 'bias'",
    ),
    "parameters of another size": Row(
        lambda T: T.functional_call(model, {"weight": torch.ones(2, 5)}, x),
        "cannot be multiplied",
        STATE,
        "the module's own (2, 3)",
        "'weight' has shape (2, 5)",
    ),
    "parameters of another dtype": Row(
        lambda T: T.functional_call(model, {k: v.double() for k, v in params.items()}, x),
        "same dtype",
        STATE,
        "the module's own (2, 3) and torch.float32",
        "dtype torch.float64",
    ),
    "a NumPy array as parameter": Row(
        lambda T: T.functional_call(model, {"weight": np.ones((2, 3), "float32")}, x),
        "is not an instance of torch.Tensor",
        STATE,
        "expected a tensor",
        "got <class 'numpy.ndarray'>",
    ),
    "parameters that are not stacked": Row(
        lambda T: T.vmap(lambda p, a: T.functional_call(model, p, (a,)), (0, None))(params, x),
        "mm",
        STATE,
        "the module's own (2, 3)",
        "has shape (3,)",
    ),
    "no modules to stack": Row(
        lambda T: T.stack_module_state([]),
        "at least one model, got 0",
        "model",
        "at least one",
        "a list of modules",
    ),
    "one module to stack": Row(
        lambda T: T.stack_module_state(model),
        "has no len()",
        "models",
        "expected a list of modules",
        "Linear",
    ),
    "dicts to stack": Row(
        lambda T: T.stack_module_state([params]),
        "'dict' object has no attribute",
        "models",
        "expected modules",
        "give the modules themselves",
    ),
    "modules of other sizes": Row(
        lambda T: T.stack_module_state([model, nn.Linear(4, 2)]),
        "stack expects each tensor to be equal size",
        "weight",
        "(2, 3), (2, 4)",
        "make all of one size",
    ),
    "modules of other classes": Row(
        lambda T: T.stack_module_state([model, nn.ReLU()]),
        "of the same class",
        "models",
        "Got Linear, ReLU",
        "stack those of each class apart",
    ),
}

#: What torch.func does not have: the class, and the words.
OURS: dict[str, tuple[Callable[[], Any], type[Exception], str, str, str]] = {
    "jit of a result": (
        lambda: jit(square(x))(x),
        TypeError,
        "jit: expected a function",
        "torch.Tensor",
        FUNCTION,
    ),
    "if under jit": (
        lambda: jit(lambda a: a if a.sum() > 0 else -a)(x),
        RuntimeError,
        "test_wrong_calls.py",
        "bool() needs a tensor's values (`if`,",
        "torch.where or torch.cond",
    ),
    "int() under jit": (
        lambda: jit(lambda a: torch.zeros(int(a[0, 0])))(x),
        RuntimeError,
        "test_wrong_calls.py",
        "needs a tensor's values",
        "outside the transformed function",
    ),
    "NumPy under jit": (
        lambda: jit(lambda a: np.sin(a.numpy()))(x),
        RuntimeError,
        "numpy()",
        "needs a tensor's values",
        "outside the transformed function",
    ),
    "a mask under jit": (
        lambda: jit(lambda a: a[a > 1])(x),
        RuntimeError,
        "aten.index",
        "dynamic shape",
        "mask with torch.where",
    ),
    "static_argnums a name": (
        lambda: jit(square, static_argnums="a")(x),
        ValueError,
        "static_argnums",
        "positions of arguments",
        "counted from 0",
    ),
    "static_argnums too large": (
        lambda: jit(square, static_argnums=3)(x),
        ValueError,
        "static_argnums",
        "the function's 1 positional arguments",
        "got 3",
    ),
    "a list as a static argument": (
        lambda: jit(lambda a, s: a, static_argnums=1)(x, [1]),
        TypeError,
        "every argument that is no tensor",
        "must be hashable",
        "Pass it inside a closure or as a tensor",
    ),
    "a NumPy array among the arguments": (
        lambda: jit(lambda a, batch: a)(x, batch={"labels": [np.ones(3)]}),
        TypeError,
        "every argument that is no tensor",
        "must be hashable",
        "kwargs['batch']['labels'][0] is <class 'numpy.ndarray'>",
        "or as a tensor, which torch.as_tensor makes",
    ),
    "donate too large": (
        lambda: jit(square, donate=3)(x),
        ValueError,
        "donate",
        "the 1 positional arguments",
        "counted from 0",
    ),
    "no programs": (
        lambda: jit(square, max_programs=0),
        ValueError,
        "max_programs",
        "a positive number",
        "got 0",
    ),
    "another source of random numbers": (
        lambda: jit(square, random_numbers="numpy"),
        ValueError,
        "random_numbers",
        '"torch" or "jax"',
        "got 'numpy'",
    ),
    "to_jax of an array": (
        lambda: bridge.to_jax(X),
        TypeError,
        "t: ",
        "expected a torch.Tensor",
        "it is one already",
    ),
    "to_torch of a tensor": (
        lambda: bridge.to_torch(x),
        TypeError,
        "array: ",
        "expected a jax.Array",
        "it is one already",
    ),
    "params of a class": (
        lambda: bridge.params(nn.Linear),
        TypeError,
        "module: ",
        "expected an nn.Module",
        "make a module of it",
    ),
    "params of a dict": (
        lambda: bridge.params(params),
        TypeError,
        "module: ",
        "expected an nn.Module",
        "got <class 'dict'>",
    ),
    "call without parameters": (
        lambda: bridge.call(model, {}, {}, (X,)),
        RuntimeError,
        "params: ",
        "'weight', 'bias' missing",
        "give them, or strict=False",
    ),
    "load of Flax's names": (
        lambda: bridge.load(model, {"kernel": X.T, "bias": jnp.ones(2)}),
        RuntimeError,
        "params: ",
        "no 'kernel'",
        "it has 'weight', 'bias'",
    ),
    "from_jax of a function of PyTorch's": (
        lambda: bridge.from_jax(torch.sin)(x),
        TypeError,
        "'input'",
        "must be Tensor",
        "call a function of torch tensors as it is",
    ),
}

#: JAX's words for the same slip.
JAX: dict[str, tuple[Callable[[], Any], str]] = {
    "in_dims too large": (lambda: jax.vmap(jnp.sin, in_axes=2)(X), "its rank should be at least 3"),
    "in_dims for one of two arguments": (
        lambda: jax.vmap(jnp.add, in_axes=(0,))(X, X),
        "vmap in_axes must be an int, None, or a tuple",
    ),
    "sizes differ": (
        lambda: jax.vmap(jnp.add)(X, jnp.ones((4, 3))),
        "vmap got inconsistent sizes for array axes to be mapped",
    ),
    "nothing to map": (
        lambda: jax.vmap(jnp.sin, in_axes=(None,))(X),
        "vmap must have at least one non-None value in in_axes",
    ),
    "a tensor without dimensions is mapped": (
        lambda: jax.vmap(jnp.sin)(jnp.ones(())),
        "rank should be at least 1",
    ),
    "vmap of a result": (lambda: jax.vmap(jnp.sin(X))(X), "Expected a callable value"),
    "if in a lane": (
        lambda: jax.vmap(lambda a: a if a.sum() > 0 else -a)(X),
        "truth value|boolean conversion|concrete",
    ),
    "grad of a vector": (
        lambda: jax.grad(jnp.sin)(X),
        "Gradient only defined for scalar-output functions",
    ),
    "grad of (loss, output)": (
        lambda: jax.grad(lambda a: (a.sum(), a))(X),
        "Gradient only defined for scalar-output functions",
    ),
    "grad of labels": (
        lambda: jax.grad(lambda a: (a * 1.0).sum())(jnp.arange(3)),
        "requires real- or complex-valued inputs",
    ),
    "grad of None": (lambda: jax.grad(lambda a: 1.0)("x"), "not a valid JAX type|abstract array"),
    "argnums too large": (
        lambda: jax.grad(jnp.sum, argnums=1)(X),
        "requires at least 2 positional arguments|has argnums=1|argnums",
    ),
    "primals no tuple": (lambda: jax.jvp(jnp.sin, X, X), "must be tuples or lists"),
    "tangents of another size": (
        lambda: jax.jvp(jnp.sin, (X,), (jnp.ones((4, 3)),)),
        "must have equal types|shape",
    ),
    "cotangents of another size": (
        lambda: jax.vjp(jnp.sin, X)[1](jnp.ones((4, 3))),
        "shape|mismatch",
    ),
}


def said(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as found:
        call()
    return found.value


def frames(error: BaseException | None, causes: bool = True) -> list[str]:
    """The files of the traceback, the outermost first, and of those of the error's causes."""
    found: list[str] = []
    while error is not None:
        found += [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        error = (
            None
            if not causes
            else error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        )
    return found


OF_US = tuple(str(Path(package.__file__).parent) for package in (bridge, torchfunc_jax))


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFUNC_JAX_TRACEBACK", raising=False)  # the tests have whole tracebacks


def test_there_are_fifty() -> None:
    assert len(ROWS) + len(OURS) >= 50 and set(JAX) <= set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_call(name: str) -> None:
    row = ROWS[name]
    error = raised(lambda: row.call(torchfunc_jax))
    if row.theirs:
        theirs = raised(lambda: row.call(torch.func))
        assert row.theirs in said(theirs)
        assert isinstance(error, type(theirs))
    for words in (row.argument, row.expected, row.to_do):
        assert words in said(error)
    assert not [file for file in frames(error) if file.startswith(OF_US)]
    last = frames(error, causes=False)[-1]
    assert (
        last == __file__
        or "/torch/nn/modules/" in last
        or "/torch/nn/functional.py" in last
        or "/jax/" in last
    )


@pytest.mark.parametrize("name", OURS)
def test_a_wrong_call_of_what_torch_func_does_not_have(name: str) -> None:
    call, kind, *words = OURS[name]
    error = raised(call)
    assert isinstance(error, kind)
    for each in words:
        assert each in said(error)
    assert error.__cause__ is None and "JAX has removed" not in said(error)
    assert not [file for file in frames(error) if file.startswith(OF_US)]


@pytest.mark.parametrize("name", JAX)
def test_jaxs_words(name: str) -> None:
    call, words = JAX[name]
    with pytest.raises(Exception, match=words):
        call()


def test_all_frames_are_there_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFUNC_JAX_TRACEBACK", "full")
    assert [
        file
        for file in frames(raised(lambda: torchfunc_jax.vmap(torch.sin, in_dims=2)(x)))
        if file.startswith(OF_US)
    ]


def test_the_line_of_the_users_function_is_the_last() -> None:
    """Of the user's modules and of torch.nn the frames stay: they say which layer it was."""

    def broken(a: torch.Tensor) -> torch.Tensor:
        return (a @ torch.ones(5)).sum()

    for call in (
        torchfunc_jax.grad(broken),
        jit(broken),
        jit(torchfunc_jax.vmap(torchfunc_jax.grad(broken))),
    ):
        last = traceback.extract_tb(raised(lambda call=call: call(x)).__traceback__)[-1]
        assert (last.filename, last.name) == (__file__, "broken")
    files = frames(raised(lambda: jit(nn.Sequential(nn.Linear(5, 2)))(x)))
    assert any("linear.py" in file for file in files)
