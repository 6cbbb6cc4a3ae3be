"""Checks that several transforms share: argnums, tuples of tensors, outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from bridge.boundary.results import ARRAYS, is_array
from bridge.convert import dtypes, trees
from bridge.convert.sparse import Sparse, SparseOperand

argnums_t = int | tuple[int, ...]
#: These raise ValueError for an integer input; reverse mode raises RuntimeError.
_FORWARD = ("jvp", "jacfwd", "linearize", "hvp", "jacobian_diagonal", "laplacian", "jet")


def positions(argnums: argnums_t, count: int) -> tuple[int, ...]:
    """The positions of the arguments that argnums picks, of this many."""
    check(argnums)
    if isinstance(argnums, int):
        return (_position(argnums, count),)
    if not argnums:
        raise RuntimeError("argnums must be non-empty")
    found = tuple([_position(n, count) for n in argnums])
    if len(set(found)) != len(found):
        raise RuntimeError(f"argnums elements must be unique, got {found}")
    return found


def select(args: tuple[Any, ...], argnums: argnums_t) -> Any:
    """The arguments that argnums picks: one, or a tuple of them."""
    found = positions(argnums, len(args))
    return args[found[0]] if isinstance(argnums, int) else tuple([args[n] for n in found])


def check(argnums: Any) -> None:
    """Refuse an argnums of another type."""
    if not isinstance(argnums, int | tuple):
        call = "the inputs are arguments of what the transform returns: grad(f)(x), not grad(f, x)"
        instead = call if is_array(argnums) else "for example (0, 1)"
        raise RuntimeError(
            f"argnums must be int or Tuple[int, ...], got: {type(argnums)}; {instead}"
        )


def _position(argnum: Any, count: int) -> int:
    if not isinstance(argnum, int):
        raise RuntimeError(f"argnum must be int, got: {type(argnum)}")
    if not -count <= argnum < count:
        raise RuntimeError(
            f"Got argnum={argnum}, but only {count} positional inputs; argnums counts them from 0, "
            "and what is differentiated is given by its position, not by its name"
        )
    return argnum % count


def dtype_of(x: torch.Tensor | jax.Array) -> torch.dtype:
    """The torch dtype of a tensor or jax.Array."""
    return x.dtype if isinstance(x, torch.Tensor) else dtypes.to_torch(x.dtype)


def differentiable(leaves: list[Any], api: str) -> None:
    """Refuse leaves that a transform cannot differentiate with respect to: only tensors of a
    floating or complex dtype pass.
    """
    for x in leaves:
        if type(x) is Sparse:
            raise SparseOperand(
                x.tensor(),
                f" among what {api} differentiates; make it inside the function, of indices and of "
                "values that are an argument",
            )
        if not isinstance(x, ARRAYS):
            raise ValueError(
                f"Thing passed to transform API must be Tensor, got {type(x)}; {api}: "
                f"{_instead_of(x)}"
            )
        if isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex()):
            if api.startswith(_FORWARD):
                raise ValueError(
                    f"{api}: Expected primal to be floating point or complex, but got: {x.dtype}; "
                    "convert it with .float()"
                )
            raise RuntimeError(
                f"{api}: only Tensors of floating point and complex dtype can require gradients, "
                f"got an input of dtype {x.dtype}; convert it with .float()"
            )


def _instead_of(x: Any) -> str:
    """What to give in the place of an argument that cannot be differentiated."""
    # a module, or what its parameters() and named_parameters() return
    if isinstance(x, nn.Module | Iterator):
        return (
            "give the parameters as a dict, dict(module.named_parameters()), and call the module "
            "by functional_call(module, params, x)"
        )
    if isinstance(x, np.ndarray | np.number | float | int | complex):
        return (
            "make a tensor of it by torch.as_tensor, or choose by argnums which arguments are "
            "differentiated"
        )
    return "choose by argnums which arguments are differentiated; all of their leaves are tensors"


def non_empty_tensors(output: list[Any], api: str) -> None:
    """Refuse a function's output without leaves, or with leaves that are not tensors."""
    if not output or (len(output) == 1 and output[0] is None):
        raise RuntimeError(
            f"{api}: Expected f to be a function that has non-empty output (got output = {output})"
        )
    for o in output:
        if not isinstance(o, torch.Tensor):
            raise RuntimeError(
                f"{api}: expected f(*primals) to return only tensors, got "
                f"unsupported type {type(o)}"
            )


def pair(output: Any, api: str) -> tuple[Any, Any]:
    """The (output, aux) of a function called with has_aux=True."""
    if not (isinstance(output, tuple) and len(output) == 2):
        raise RuntimeError(
            f"{api}: output of function f should be a tuple: (output, aux) if has_aux is True"
        )
    return output


def aux_leaves(aux: Any) -> tuple[list[Any], Any]:
    """The tensors of an aux tree and its spec; other leaves are refused, as in torch.func."""
    leaves, spec = trees.flatten(aux)
    for x in leaves:
        if not isinstance(x, torch.Tensor):
            raise RuntimeError(f"Expected tensors, got unsupported type {type(x)}")
    return leaves, spec


def real(api: str, tree: Any, what: str) -> None:
    """Refuse complex tensors, as jacrev and jacfwd do."""
    for i, x in enumerate(trees.flatten(tree)[0]):
        if isinstance(x, torch.Tensor) and x.is_complex():
            raise RuntimeError(
                f"{api}: Expected all {what} to be real but received complex tensor at flattened "
                f"input idx: {i}"
            )


def to_pull_back(
    out: Any, has_aux: bool, api: str, check: Callable[[list[Any]], None] | None = None
) -> tuple[list[Any], Any]:
    """The tensors that a function under vjp or jacrev returned, outputs first, and (spec, number of
    outputs, spec of aux).

    check: raises for outputs that the transform does not take.
    """
    aux: Any = None
    if has_aux:
        out, aux = pair(out, api)
    aux_tensors, aux_spec = aux_leaves(aux) if has_aux else ([], None)
    leaves, spec = trees.flatten(out)
    non_empty_tensors(leaves, api)
    if check is not None:
        check(leaves)
    for o in leaves:
        if not (o.is_floating_point() or o.is_complex()):
            raise RuntimeError(
                "vjp(f, ...): All outputs of f must be floating-point or complex Tensors, got "
                f"Tensor with dtype {o.dtype}"
            )
    return [*leaves, *aux_tensors], (spec, len(leaves), aux_spec)
