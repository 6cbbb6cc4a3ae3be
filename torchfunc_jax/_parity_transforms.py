"""Transforms by name, for the parity tool: "vmap(grad, in_dims=(0, None))" becomes a function of
(torch.func or torchfunc_jax, f).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch

from bridge.convert import trees
from torchfunc_jax._vmap import name_of

#: A transform: "grad", "vmap(grad, in_dims=(None, 0))", or a function of (torch.func or
#: torchfunc_jax, fn) that returns a function.
Transform = str | Callable[[Any, Callable[..., Any]], Callable[..., Any]]
Make = Callable[[Any, Callable[..., Any]], Callable[..., Any]]


def named(transform: Transform) -> tuple[str, Make]:
    """The name of a transform, and the function that applies it.

    Raises:
        ValueError: a string that is no nesting of torch.func's transforms.
    """
    if not isinstance(transform, str):
        return name_of(transform), transform
    try:
        return transform, _parsed(ast.parse(transform.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"transforms: {transform!r} is no nesting of torch.func's transforms: {error}"
            + ("; parity itself compares with jit and without" if "jit" in transform else "")
        ) from None


def direction(x: torch.Tensor) -> torch.Tensor:
    """A tangent or cotangent without symmetries, the same wherever it is computed."""
    return torch.arange(1, x.numel() + 1, device=x.device).cos().to(x.dtype).reshape(x.shape)


def has_derivatives(x: Any) -> bool:
    """Whether x is a tensor of floating-point or complex numbers."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _vjp(api: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        rest, primals = _of_floats("vjp", f, args, kwargs)
        out, pull = api.vjp(rest, *primals)
        return out, pull(trees.map_leaves(direction, out))

    return run


def _jvp(api: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        rest, primals = _of_floats("jvp", f, args, kwargs)
        return api.jvp(rest, primals, tuple(map(direction, primals)))

    return run


def _linearize(api: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        rest, primals = _of_floats("linearize", f, args, kwargs)
        out, push = api.linearize(rest, *primals)
        return out, push(*map(direction, primals))

    return run


def _of_floats(
    name: str, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """(f as a function of the floating-point tensors in its arguments, these tensors)."""
    leaves, spec = trees.flatten((args, kwargs))
    where = [i for i, x in enumerate(leaves) if has_derivatives(x)]
    if not where:
        raise TypeError(
            f"{name}: expected a tensor of floating-point numbers among the arguments, got none; "
            "nothing can be differentiated"
        )

    def rest(*primals: torch.Tensor) -> Any:
        every = list(leaves)
        for i, value in zip(where, primals, strict=True):
            every[i] = value
        given, named_ones = trees.unflatten(spec, every)
        return f(*given, **named_ones)

    return rest, tuple(leaves[i] for i in where)


# vjp, jvp and linearize return functions or need directions: they are called with fixed made-up
# directions.
_WHOLE: dict[str, Make] = {
    "call": lambda api, f: f,
    "vjp": _vjp,
    "jvp": _jvp,
    "linearize": _linearize,
}
_NAMES = (
    "chunk_vmap",
    "functionalize",
    "grad",
    "grad_and_value",
    "hessian",
    "jacfwd",
    "jacrev",
    "vmap",
)


def _parsed(node: ast.AST) -> Make:
    if isinstance(node, ast.Name) and node.id in _WHOLE:
        return _WHOLE[node.id]
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return lambda api, f: getattr(api, node.id)(f)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) <= 1:
        inner = _parsed(node.args[0]) if node.args else _WHOLE["call"]
        options = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
        name = node.func.id
        if name in _WHOLE and not options:
            return lambda api, f: _WHOLE[name](api, inner(api, f))
        if name in _NAMES:
            return lambda api, f: getattr(api, name)(inner(api, f), **options)
    raise ValueError(f"expected one of {', '.join((*_WHOLE, *_NAMES))}, got {ast.unparse(node)}")
