"""Bad input: the class that torch.func raises, a message that names the argument, and nothing left
behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import functorch.experimental
import jax
import jax.numpy as jnp
import pytest
import torch
import torch.utils.dlpack
from agreement import same
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import torchfunc_jax
from bridge.errors import DataDependentError, EscapedTensorError, NoLoweringError
from bridge.trace.levels import state

x, y = torch.arange(6.0).reshape(2, 3) + 1, torch.ones(3, 3)
model = nn.Linear(3, 2)


def mixed(kind: str) -> list[nn.Module]:
    """Two modules that cannot be stacked."""
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    if kind == "classes":
        second = nn.Bilinear(3, 3, 2)
    elif kind == "modes":
        second.eval()
    elif kind == "requires_grad":
        second.requires_grad_(False)
    return [first, second]


# name: what is called with a namespace of transforms, words of the message
BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    # grad and its family
    "grad of a vector": (
        lambda T: T.grad(lambda a: a * 2)(x),
        r"scalar Tensor, got tensor with 2 dims",
    ),
    "grad of a one-element vector": (
        lambda T: T.grad(lambda a: a.sum()[None])(x),
        r"scalar Tensor, got tensor with 1 dims",
    ),
    "grad of a complex number": (
        lambda T: T.grad(lambda a: (a + 1j).sum())(x),
        r"only for real scalar outputs but got torch\.complex64",
    ),
    "grad of no tensor": (
        lambda T: T.grad(lambda a: 2.0)(x),
        r"return a Tensor, got <class 'float'>",
    ),
    "grad of a tuple": (
        lambda T: T.grad(lambda a: (a.sum(), a))(x),
        r"return a Tensor, got <class 'tuple'>",
    ),
    "grad has_aux without aux": (
        lambda T: T.grad(lambda a: a.sum(), has_aux=True)(x),
        r"\(output, aux\) if has_aux is True",
    ),
    "grad aux of no tensor": (
        lambda T: T.grad(lambda a: (a.sum(), 3), has_aux=True)(x),
        r"unsupported type <class 'int'>",
    ),
    "grad of an integer": (
        lambda T: T.grad(lambda a: a.sum().float())(x.long()),
        r"floating point",
    ),
    "grad of a bool": (lambda T: T.grad(lambda a: a.sum().float())(x > 1), r"floating point"),
    "grad of a Python number": (lambda T: T.grad(lambda a: x.sum() * a)(2.0), r"must be Tensor"),
    "grad argnums too large": (
        lambda T: T.grad(lambda a: a.sum(), argnums=1)(x),
        r"argnum=1, but only 1 positional inputs",
    ),
    "grad argnums too small": (
        lambda T: T.grad(lambda a: a.sum(), argnums=-2)(x),
        r"argnum=-2, but only 1 positional inputs",
    ),
    "grad argnums of a float": (lambda T: T.grad(lambda a: a.sum(), argnums=0.0)(x), r"argnums"),
    "grad argnums empty": (
        lambda T: T.grad(lambda a: a.sum(), argnums=())(x),
        r"argnums must be non-empty",
    ),
    "grad argnums twice": (
        lambda T: T.grad(lambda a: a.sum(), argnums=(0, 0))(x),
        r"argnums elements must be unique",
    ),
    "grad writes to a captured tensor": (
        lambda T: T.grad(lambda a: outside.add_(a.sum()).sum())(x),
        r"in-place operation",
    ),
    "vjp of no tensor": (
        lambda T: T.vjp(lambda a: 3, x),
        r"return only tensors, got unsupported type <class 'int'>",
    ),
    "vjp of an empty tuple": (lambda T: T.vjp(lambda a: (), x), r"non-empty output"),
    "vjp of an integer output": (
        lambda T: T.vjp(lambda a: a.long(), x)[1](x.long()),
        r"(?i)floating-point|grad|dtype",
    ),
    "vjp cotangents of another tree": (
        lambda T: T.vjp(lambda a: (a, a), x)[1](x),
        r"pytree structure of cotangents",
    ),
    "vjp cotangents of another shape": (lambda T: T.vjp(torch.sin, x)[1](y), r"shape"),
    "vjp complex cotangents": (
        lambda T: T.vjp(torch.sin, x)[1](x + 0j),
        r"For complex Tensors, .* have the same dtype",
    ),
    "vjp cotangents of no tensor": (lambda T: T.vjp(torch.sin, x)[1](1.0), r"float"),
    "vjp integer primal": (lambda T: T.vjp(lambda a: a.float(), x.long()), r"floating point"),
    "jvp primals no tuple": (
        lambda T: T.jvp(torch.sin, x, (x,)),
        r"Expected primals to be a tuple",
    ),
    "jvp tangents of another tree": (
        lambda T: T.jvp(torch.sin, (x,), (x, x)),
        r"same python structure",
    ),
    "jvp tangents of another shape": (lambda T: T.jvp(torch.sin, (x,), (y,)), r"tangent"),
    "jvp empty primals": (lambda T: T.jvp(torch.sin, (), ()), r"at least one Tensor"),
    "jvp of no tensor": (
        lambda T: T.jvp(lambda a: 3, (x,), (x,)),
        r"unsupported type <class 'int'>",
    ),
    "jvp primal of no tensor": (
        lambda T: T.jvp(torch.sin, (1.0,), (1.0,)),
        r"only contain Tensors|must be Tensor",
    ),
    "linearize tangents of another shape": (
        lambda T: T.linearize(torch.sin, x)[1](y),
        r"shape .* of the corresponding primal",
    ),
    "linearize tangents of another dtype": (
        lambda T: T.linearize(torch.sin, x)[1](x.double()),
        r"dtype .* of the corresponding primal",
    ),
    "linearize tangents of another tree": (
        lambda T: T.linearize(torch.sin, x)[1](x, x),
        r"same argspec as the primals",
    ),
    "jacrev complex input": (
        lambda T: T.jacrev(torch.sin)(x + 0j),
        r"jacrev: Expected all inputs to be real",
    ),
    "jacfwd complex input": (
        lambda T: T.jacfwd(torch.sin)(x + 0j),
        r"jacfwd: Expected all inputs to be real",
    ),
    "jacrev complex output": (
        lambda T: T.jacrev(lambda a: a + 0j)(x),
        r"jacrev: Expected all outputs to be real",
    ),
    "jacrev chunk_size 0": (lambda T: T.jacrev(torch.sin, chunk_size=0)(x), r"chunk_size"),
    "jacrev of no tensor": (
        lambda T: T.jacrev(lambda t: torch.ones(2))(()),
        r"argnums=0 picks to contain at least one tensor",
    ),
    "jacrev of no tensor under vmap": (
        lambda T: T.vmap(lambda a: T.jacrev(lambda t, b: b, (0,))({}, a))(x),
        r"argnums=\(0,\) picks to contain at least one tensor",
    ),
    "jacrev argnums too large": (lambda T: T.jacrev(torch.sin, argnums=1)(x), r"argnum=1"),
    "jacfwd argnums too large": (lambda T: T.jacfwd(torch.sin, argnums=1)(x), r"argnum=1"),
    "jvp integer primal": (
        lambda T: T.jvp(lambda a: a.float(), (x.long(),), (x.long(),)),
        r"Expected primal to be floating point",
    ),
    "jvp integer tangent": (
        lambda T: T.jvp(lambda a: a.sin(), (x,), (x.long(),)),
        r"Expected tangent to be floating point",
    ),
    "grad argnums None": (
        lambda T: T.grad(lambda a: a.sum(), argnums=None)(x),
        r"argnums must be int or Tuple.*, got: .*NoneType",
    ),
    "jacrev argnums None": (
        lambda T: T.jacrev(torch.sin, argnums=None)(x),
        r"argnums must be int or Tuple.*, got: .*NoneType",
    ),
    "linearize integer primal": (
        lambda T: T.linearize(lambda a: a.float(), x.long()),
        r"Expected primal to be floating point",
    ),
    "jacfwd integer input": (
        lambda T: T.jacfwd(lambda a: a.float())(x.long()),
        r"Expected primal to be floating point",
    ),
    "jacrev integer input": (lambda T: T.jacrev(lambda a: a.float())(x.long()), r"floating point"),
    "hessian integer input": (
        lambda T: T.hessian(lambda a: a.sum())(x.long()),
        r"Expected primal to be floating point",
    ),
    # vmap
    "vmap without arguments": (lambda T: T.vmap(lambda: x)(), r"got no inputs"),
    "vmap no tensor to map over": (
        lambda T: T.vmap(lambda a, b: a, in_dims=(None, None))(x, 1),
        r"at least one Tensor to vmap over",
    ),
    "vmap different sizes": (
        lambda T: T.vmap(torch.add)(x, y),
        r"same size in the mapped dimension, got sizes \[2, 3\]",
    ),
    "vmap over a number": (
        lambda T: T.vmap(torch.add)(x, 1.0),
        r"in_dim=0 for an input but the input is of type <class 'float'>",
    ),
    "vmap over a 0-dim tensor": (
        lambda T: T.vmap(torch.sin)(x.sum()),
        r"Tensor of dimensionality 0",
    ),
    "vmap in_dims out of range": (
        lambda T: T.vmap(torch.sin, in_dims=2)(x),
        r"in_dim=2 .* dimensionality 2",
    ),
    "vmap in_dims below range": (
        lambda T: T.vmap(torch.sin, in_dims=-3)(x),
        r"in_dim=-3 .* dimensionality 2",
    ),
    "vmap in_dims too long": (
        lambda T: T.vmap(torch.sin, in_dims=(0, 0))(x),
        r"in_dims is not compatible with the structure of `inputs`",
    ),
    "vmap in_dims of another tree": (
        lambda T: T.vmap(lambda d: d["a"], in_dims=({"b": 0},))({"a": x}),
        r"in_dims is not compatible",
    ),
    "vmap in_dims a list": (
        lambda T: T.vmap(torch.sin, in_dims=[0])(x),
        r"expected `in_dims` to be int or",
    ),
    "vmap in_dims a float": (lambda T: T.vmap(torch.sin, in_dims=(0.0,))(x), r"in_dim"),
    "vmap in_dims a bool": (
        lambda T: T.vmap(torch.sin, in_dims=(True,))(x),
        r"argument 'dim' .*must be int, not bool",
    ),
    "vmap returns no tensor": (
        lambda T: T.vmap(lambda a: 3)(x),
        r"must only return Tensors, got type <class 'int'>",
    ),
    "vmap returns none": (
        lambda T: T.vmap(lambda a: None)(x),
        r"must only return Tensors, got type <class 'NoneType'>",
    ),
    "vmap out_dims out of range": (
        lambda T: T.vmap(torch.sin, out_dims=3)(x),
        r"Dimension out of range",
    ),
    "vmap out_dims too long": (
        lambda T: T.vmap(torch.sin, out_dims=(0, 0))(x),
        r"out_dims is not compatible with the structure",
    ),
    "vmap out_dims of another tree": (
        lambda T: T.vmap(lambda a: {"a": a}, out_dims={"b": 0})(x),
        r"out_dims is not compatible",
    ),
    "vmap out_dims a float": (
        lambda T: T.vmap(torch.sin, out_dims=0.5)(x),
        r"`out_dims` must be an int",
    ),
    "vmap out_dims None for a mapped output": (
        lambda T: T.vmap(torch.sin, out_dims=None)(x),
        r"`sin` can not return a BatchedTensor",
    ),
    "vmap chunk_size 0": (
        lambda T: T.vmap(torch.sin, chunk_size=0)(x),
        r"chunk_size should be None or greater than 0. \(got 0\)",
    ),
    "vmap chunk_size -1": (
        lambda T: T.vmap(torch.sin, chunk_size=-1)(x),
        r"chunk_size should be None or greater than 0. \(got -1\)",
    ),
    "vmap randomness unknown": (
        lambda T: T.vmap(torch.sin, randomness="some")(x),
        r"randomness .*Got some",
    ),
    "vmap random operator": (lambda T: T.vmap(lambda a: a + torch.rand(3))(x), r"randomness"),
    "vmap item": (lambda T: T.vmap(lambda a: a * a.sum().item())(x), r"\.item\(\)"),
    "vmap branch on values": (
        lambda T: T.vmap(lambda a: a if a.sum() > 0 else -a)(x),
        r"data-dependent control flow",
    ),
    "vmap data-dependent shape": (lambda T: T.vmap(lambda a: a.nonzero())(x), r"nonzero"),
    "vmap writes mapped into unmapped": (
        lambda T: T.vmap(lambda a, b: b.add_(a), in_dims=(0, None))(x, y[0]),
        r"vmap: inplace arithmetic",
    ),
    "wrong shapes inside": (
        lambda T: T.vmap(lambda a: a @ torch.ones(4))(x),
        r"size|shape|dimension",
    ),
    "wrong dimension inside": (
        lambda T: T.grad(lambda a: a.sum(5).sum())(x),
        r"Dimension out of range",
    ),
    # modules
    "functional_call unknown key, strict": (
        lambda T: T.functional_call(
            model, {"weight": y[:2], "bias": y[0, :2], "other": y}, x, strict=True
        ),
        r"[Uu]nexpected key.*other",
    ),
    "functional_call missing key, strict": (
        lambda T: T.functional_call(model, {"weight": y[:2]}, x, strict=True),
        r"[Mm]issing key.*bias",
    ),
    "functional_call repeated key": (
        lambda T: T.functional_call(model, ({"weight": y}, {"weight": y}), x),
        r"weight.*appeared in multiple dictionaries",
    ),
    "functional_call no dict": (
        lambda T: T.functional_call(model, 3, x),
        r"parameter_and_buffer_dicts",
    ),
    "functional_call wrong shape": (
        lambda T: T.functional_call(model, {"weight": torch.ones(2, 5)}, x),
        r"mat1 and mat2 shapes",
    ),
    "stack_module_state empty": (lambda T: T.stack_module_state([]), r"at least one model, got 0"),
    "stack_module_state classes": (lambda T: T.stack_module_state(mixed("classes")), r"same class"),
    "stack_module_state modes": (
        lambda T: T.stack_module_state(mixed("modes")),
        r"same training/eval mode",
    ),
    "stack_module_state requires_grad": (
        lambda T: T.stack_module_state(mixed("requires_grad")),
        r"same .requires_grad",
    ),
    "functionalize remove": (
        lambda T: T.functionalize(torch.sin, remove="everything")(x),
        r"remove=everything",
    ),
}
outside = torch.zeros(2, 3)


def surroundings() -> dict[str, Any]:
    """Everything that a failed call must leave alone."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "dispatch modes": list(map(id, _get_current_dispatch_mode_stack())),
        "function modes": list(map(id, _get_current_function_mode_stack())),
        "jax_enable_x64": jax.config.jax_enable_x64,
        "jnp default": jnp.ones(1).dtype,
        "level": state.level,
        "torch.func's level": torch._C._functorch.maybe_current_level(),
        "parameters": [(k, id(v), v._version, tuple(v.shape)) for k, v in model.named_parameters()],
        "forward": model.forward.__func__,
        "inputs": [(t._version, t.tolist()) for t in (x, y, outside)],
    }


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = surroundings()
    yield
    assert surroundings() == before
    same(torchfunc_jax.vmap(torchfunc_jax.grad(lambda a: (a**3).sum()))(x), 3 * x**2)
    same(
        torchfunc_jax.jit(model)(x),
        nn.functional.linear(x, model.weight, model.bias),
        rtol=1e-5,
        atol=1e-6,
    )


def refused_as_by_torch_func(call: Callable[[Any], Any]) -> None:
    """A call that PyTorch runs raises torch.func's own error;
    call takes a namespace of transforms.
    """
    with pytest.raises(Exception) as theirs:
        call(torch.func)
    with pytest.raises(type(theirs.value)) as mine:
        call(torchfunc_jax)
    assert type(mine.value) is type(theirs.value)
    # torch.compile adds a call stack
    words = [str(error.value).partition("\n\nfrom user code:")[0] for error in (mine, theirs)]
    assert words[0] == words[1]
    if isinstance(mine.value, RuntimeError):
        notes = getattr(mine.value, "__notes__", ())
        assert any("PyTorch runs this call" in note for note in notes)


@pytest.mark.parametrize("name", BAD)
def test_raises_what_torch_func_raises(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(Exception) as reference:
        call(torch.func)
    with pytest.raises(type(reference.value), match=message):
        call(torchfunc_jax)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in BAD
        if not n.startswith(
            ("functional_call", "stack_module_state", "vmap item", "vmap data", "vmap branch")
        )
    ],
)
def test_raises_the_same_compiled(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(Exception) as reference:
        call(torch.func)
    with pytest.raises(type(reference.value), match=message):
        torchfunc_jax.jit(lambda: call(torchfunc_jax))()


@pytest.mark.parametrize("T", [torchfunc_jax, functorch.experimental])
def test_chunk_vmap_refuses_what_functorchs_refuses(T: Any) -> None:
    for chunks in (0, -1):
        with pytest.raises(
            RuntimeError, match=f"chunk expects `chunks` to be greater than 0, got: {chunks}"
        ):
            T.chunk_vmap(torch.sin, chunks=chunks)(x)
    with pytest.raises(RuntimeError, match=r"randomness .*Got some"):
        T.chunk_vmap(torch.sin, randomness="some")


@pytest.mark.parametrize(
    "operator",
    [
        "nonzero",
        "masked_select",
        "item",
        "bool",
        "tolist",
        "unique",
        "boolean index",
        "tensor_split",
    ],
)
def test_values_under_jit(operator: str) -> None:
    functions = {
        "nonzero": lambda a: a.nonzero(),
        "masked_select": lambda a: a.masked_select(a > 1),
        "item": lambda a: a if a.sum().item() > 0 else -a,
        "bool": lambda a: a if a.sum() > 0 else -a,
        "tolist": lambda a: sorted(a.flatten().tolist()),
        "unique": lambda a: a.unique(),
        "boolean index": lambda a: a[a > 1],
        "tensor_split": lambda a: a.tensor_split(a.sum().long()),
    }
    with pytest.raises(DataDependentError, match=r"under jit .*test_bad_input\.py:\d+"):
        torchfunc_jax.jit(functions[operator])(x)
    with pytest.raises(DataDependentError, match=r"under vmap .*test_bad_input\.py:\d+"):
        torchfunc_jax.jit(torchfunc_jax.vmap(functions[operator]))(x)
    refused_as_by_torch_func(lambda T: T.vmap(functions[operator])(x))


@pytest.mark.parametrize("operator", ["nonzero", "masked_select", "boolean index", "unique"])
def test_shapes_that_depend_on_values(operator: str) -> None:
    functions: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "nonzero": (r"aten\.nonzero", lambda a: a.nonzero()),
        "masked_select": (r"aten\.masked_select", lambda a: a.masked_select(a > 1)),
        "boolean index": (r"aten\.index", lambda a: a[a > 1]),
        "unique": (r"aten\._unique2", lambda a: a.unique()),
    }
    name, function = functions[operator]
    with pytest.raises(RuntimeError, match="dynamic shape") as reference:
        torch.func.vmap(functions["boolean index"][1])(x)
    for called, where in ((torchfunc_jax.vmap(function), "vmap"), (function, "jit")):
        with pytest.raises(
            type(reference.value),
            match=rf"{name}.*dynamic shape.*under {where} .*test_bad_input\.py:\d+",
        ) as mine:
            torchfunc_jax.jit(called)(x)
        assert isinstance(mine.value, DataDependentError)


class Cube(torch.autograd.Function):
    """Has no jvp."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a)
        return a**3

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        (a,) = ctx.saved_tensors
        return 3 * a**2 * ct


FORWARD_MODE: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "jvp": lambda T, f, a: T.jvp(f, (a,), (a,))[1],
    "jacfwd": lambda T, f, a: T.jacfwd(f)(a),
    "hessian": lambda T, f, a: T.hessian(lambda b: f(b).sum())(a),
    "jvp of grad": lambda T, f, a: T.jvp(T.grad(lambda b: f(b).sum()), (a,), (a,))[1],
    "grad of jvp": lambda T, f, a: T.grad(lambda b: T.jvp(f, (b,), (b,))[1].sum())(a),
    "hessian of scan": lambda T, f, a: T.hessian(
        lambda b: scan(lambda c, _: (f(c), c), b, b)[0].sum()
    )(a),
    "hessian of checkpoint": lambda T, f, a: T.hessian(
        lambda b: checkpoint(f, b, use_reentrant=False).sum()
    )(a),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_names_the_function_that_has_no_jvp(name: str) -> None:
    call = FORWARD_MODE[name]
    named = "an autograd.Function" if name.endswith(("scan", "checkpoint")) else "Cube"
    with (
        pytest.raises(NotImplementedError, match="You must implement the jvp function"),
        forward_ad.dual_level(),
    ):
        Cube.apply(forward_ad.make_dual(x[0].clone().requires_grad_(), x[0]))
    for wrap in (lambda f: f, torchfunc_jax.jit):
        if name == "jvp of grad":  # the tangent that would need it is not asked for
            same(
                wrap(lambda a: call(torchfunc_jax, Cube.apply, a))(x[0]),
                call(torch.func, lambda a: a**3, x[0]),
            )
        elif wrap is torchfunc_jax.jit or "scan" not in name:  # un-jitted its few steps just run
            with pytest.raises(
                NotImplementedError,
                match=rf"^{named}: You must implement the jvp function.*test_bad_input\.py:\d+",
            ):
                wrap(lambda a: call(torchfunc_jax, Cube.apply, a))(x[0])
    # as the page of errors says
    same(
        torchfunc_jax.jacrev(torchfunc_jax.grad(lambda a: Cube.apply(a).sum()))(x[0]),
        torch.diag(6 * x[0]),
    )


def doubled(a: torch.Tensor) -> torch.Tensor:
    """a doubled until its sum is 30: a loop whose length depends on values."""
    return while_loop(lambda b: b.sum() < 30, lambda b: (b * 2,), (a,))[0]


LOOPS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda T, a: T.jit(T.grad(lambda b: doubled(b).sum()))(a),
    "jacrev": lambda T, a: T.jit(T.jacrev(doubled))(a),
    "vjp": lambda T, a: T.jit(lambda b: T.vjp(doubled, b)[1](b))(a),
    "hessian": lambda T, a: T.jit(T.hessian(lambda b: (doubled(b) ** 2).sum()))(a),
    "backward": lambda T, a: T.jit(doubled)(a.clone().requires_grad_()).sum().backward(),
    "double backward": lambda T, a: torch.autograd.grad(
        T.jit(doubled)(b := a.clone().requires_grad_()).sum(), b, create_graph=True
    ),
}
UNJITTED_LOOPS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap of grad": lambda T, a: T.vmap(T.grad(lambda b: doubled(b).sum()))(a[None]),
    "grad of vmap": lambda T, a: T.grad(lambda b: T.vmap(doubled)(b).sum())(a[None]),
    "backward through vmap": lambda T, a: (
        T.vmap(doubled)(a[None].clone().requires_grad_()).sum().backward()
    ),
}


@pytest.mark.parametrize("name", [*LOOPS, *UNJITTED_LOOPS])
def test_reverse_mode_through_a_loop_of_unknown_length(name: str) -> None:
    call = LOOPS.get(name) or (lambda T, a: T.jit(lambda a: UNJITTED_LOOPS[name](T, a))(a))
    with pytest.raises(RuntimeError, match=r"^while_loop: .*scan .*jvp.*test_bad_input\.py:\d+"):
        call(torchfunc_jax, x[0])
    if name in UNJITTED_LOOPS:
        refused_as_by_torch_func(lambda T: UNJITTED_LOOPS[name](T, x[0]))


def test_what_that_error_says_to_do_helps() -> None:
    double = lambda a: a * 8  # three steps
    same(
        torchfunc_jax.jit(lambda a: torchfunc_jax.jvp(doubled, (a,), (a,)))(x[0]),
        torch.func.jvp(double, (x[0],), (x[0],)),
    )
    same(torchfunc_jax.jit(torchfunc_jax.jacfwd(doubled))(x[0]), torch.func.jacfwd(double)(x[0]))
    refused_as_by_torch_func(lambda T: T.grad(lambda a: doubled(a).sum())(x[0]))
    steps = lambda a: scan(lambda b, _: (b * 2, b), a, torch.ones(3))[0].sum()
    same(
        torchfunc_jax.jit(torchfunc_jax.grad(steps))(x[0]),
        torch.func.grad(lambda a: double(a).sum())(x[0]),
    )


def test_values_are_there_under_grad() -> None:
    same(
        torchfunc_jax.grad(lambda a: (a[a > 1] ** 2).sum() * a.nonzero().shape[0])(x),
        torch.where(x > 1, 2 * x * x.numel(), 0.0),
    )


def test_tensor_split_by_a_tensor_whose_values_are_known() -> None:
    places, square = (
        torch.tensor([1, 2]),
        lambda a, at: (torch.tensor_split(a, at, dim=-1)[1] ** 2).sum(),
    )
    theirs = torch.func.grad(lambda a: square(a, [1, 2]))(x)  # itself it takes no tensor here
    same(
        torchfunc_jax.jit(torchfunc_jax.grad(lambda a: square(a, torch.tensor([1, 2]))))(x), theirs
    )
    calls: list[Callable[[Any], Any]] = [
        lambda T: T.grad(square)(x, places),
        lambda T: T.grad(lambda a: square(a, places))(x),
        lambda T: T.vmap(T.grad(square), in_dims=(0, None))(x, places),
    ]
    for call in calls:
        refused_as_by_torch_func(call)
    for wrong, said in (
        (torch.tensor([1.0]), "dtype of long"),
        (places[None], "zero-dimensional or one-dimensional"),
    ):
        with pytest.raises(RuntimeError, match=said):
            torchfunc_jax.grad(square)(x, wrong)


def test_tensor_split_by_a_captured_tensor_is_not_read_once_and_for_all() -> None:
    places = torch.tensor([1, 2])
    fn = torchfunc_jax.jit(lambda a: a.tensor_split(places, -1))
    for at in (1, 2, 1):
        places[0] = at
        same(fn(x), x.tensor_split(places, -1))
    assert len(fn.programs()) == 2
    with pytest.raises(DataDependentError, match=r"tensor_split by a tensor .*under jit"):
        torchfunc_jax.jit(torch.tensor_split)(x, places)


def test_an_operator_without_lowering_or_fake_names_itself_and_the_line() -> None:
    library = torch.library.Library("torchfunc_jax_tests", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda t: t * 2, "CPU")
    for transform in (
        torchfunc_jax.vmap,
        lambda f: torchfunc_jax.grad(lambda a: f(a).sum()),
        torchfunc_jax.jit,
    ):
        with pytest.raises(
            NoLoweringError,
            match=r"torchfunc_jax_tests::opaque.*register_fake.*test_bad_input\.py:\d+",
        ):
            transform(lambda a: torch.ops.torchfunc_jax_tests.opaque(a))(x)


def test_a_tensor_that_escaped_says_so() -> None:
    kept = []
    torchfunc_jax.vmap(lambda a: kept.append(a) or a)(x)
    assert "escaped" in repr(kept[0])
    with pytest.raises(EscapedTensorError, match=r"(?i)return it from the transformed function"):
        kept[0] + 1
    with pytest.raises(EscapedTensorError, match=r"(?i)return it from the transformed function"):
        torchfunc_jax.grad(lambda a: (a * kept[0]).sum())(x[0])


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt("mine"), StopIteration("mine")]
)
def test_the_users_own_errors_pass_through(error: BaseException) -> None:
    def fail(a: torch.Tensor) -> torch.Tensor:
        torchfunc_jax.functional_call(model, {"weight": y[:2]}, a)
        raise error

    for transform in (
        torchfunc_jax.vmap,
        torchfunc_jax.grad,
        torchfunc_jax.jacrev,
        torchfunc_jax.hessian,
        torchfunc_jax.jit,
    ):
        with pytest.raises(type(error), match="mine"):
            transform(fail)(x)


def test_a_failure_deep_inside_leaves_the_module_as_it_was() -> None:
    class Fails(nn.Linear):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            super().forward(a)
            raise RuntimeError("deep")

    inner = Fails(3, 2)
    before = dict(inner.named_parameters())
    parameters = {k: v.detach() for k, v in before.items()}
    for transform in (
        torchfunc_jax.grad,
        torchfunc_jax.jacfwd,
        lambda f: torchfunc_jax.jit(torchfunc_jax.vmap(f, in_dims=(None,))),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            transform(
                lambda p: torchfunc_jax.vmap(
                    lambda a: torchfunc_jax.functional_call(inner, p, (a,))
                )(x).sum()
            )(parameters)
    assert all(v is before[k] for k, v in inner.named_parameters())


def test_unhashable_static_argument() -> None:
    with pytest.raises(TypeError, match="hashable"):
        torchfunc_jax.jit(lambda a, s: a)(x, {1, 2})


_KERNEL = torch.cuda.jiterator._create_jit_fn("template <typename T> T same(T a) { return a; }")


@pytest.mark.parametrize(
    "transform",
    [
        lambda T: T.vmap,
        lambda T: T.grad,
        lambda T: T.jit,
        lambda T: T.jacfwd,
        lambda T: lambda f: T.vmap(T.grad(f)),
    ],
    ids=["vmap", "grad", "jit", "jacfwd", "vmap of grad"],
)
@pytest.mark.parametrize(
    "what",
    [
        lambda a: a.data_ptr(),
        lambda a: a.detach().data_ptr(),
        lambda a: a[..., 1:].data_ptr(),
        lambda a: nn.Parameter(a).data_ptr(),
        lambda a: (a * 2).data_ptr(),
        lambda a: torch.ones_like(a).data_ptr(),
        lambda a: a.untyped_storage().data_ptr(),
        lambda a: torch.utils.dlpack.to_dlpack(a.detach()),
        lambda a: a.detach().__dlpack__(),
        _KERNEL,
        lambda a: _KERNEL(x),
        lambda a: jax.dlpack.from_dlpack(a.detach()),
    ],
    ids=[
        "argument",
        "detached",
        "view",
        "Parameter",
        "result",
        "made",
        "storage",
        "to_dlpack",
        "__dlpack__",
        "jiterator",
        "jiterator, captured",
        "read by JAX",
    ],
)
def test_a_tensor_inside_a_transform_has_no_address(
    what: Callable[[torch.Tensor], Any],
    transform: Callable[[Any], Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # jiterator's own error is for machines without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def function(a: torch.Tensor) -> torch.Tensor:
        what(a)
        return (a * a).sum()

    mapped, jitted = transform(torchfunc_jax)(function), request.node.callspec.id.endswith("-jit")
    with pytest.raises(
        RuntimeError, match=r"no memory|Cannot access data pointer|invalid python storage"
    ):
        (mapped if jitted else torchfunc_jax.jit(mapped))(x)
    # no operator of PyTorch's and no method: nothing hands this call to PyTorch
    if "to_dlpack" in request.node.callspec.id:
        with pytest.raises(RuntimeError, match=r"^Cannot access data pointer of Tensor"):
            mapped(x)
    elif not jitted:
        refused_as_by_torch_func(lambda T: transform(T)(function)(x))


@pytest.mark.parametrize("transform", [torchfunc_jax.vmap, torchfunc_jax.grad, torchfunc_jax.jit])
def test_a_recurrent_layer_does_not_ask_for_addresses_inside_a_transform(
    transform: Callable[..., Any],
) -> None:
    """On CUDA, it does so outside of one if its weights have changed."""

    class Weights:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    def function(a: torch.Tensor) -> torch.Tensor:
        nn.LSTM.flatten_parameters(Weights())  # type: ignore[arg-type]
        return (a * a).sum()

    transform(function)(x)
    with pytest.raises(AssertionError, match="_flat_weights"):
        nn.LSTM.flatten_parameters(Weights())  # type: ignore[arg-type]
