"""Jacobians and Hessians: jacrev, jacfwd and hessian."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.boundary.calls import apply
from bridge.boundary.results import Result
from bridge.convert import dtypes, trees
from bridge.private import opaque
from bridge.record import replay, transforms
from bridge.record.recorder import Recorder
from bridge.record.tensor import aval_of, fresh
from torchfunc_jax import _args
from torchfunc_jax._args import argnums_t
from torchfunc_jax._forward import jvp_with_argnums
from torchfunc_jax._reverse import Differentiated
from torchfunc_jax._vmap import vmap


@opaque
def jacrev(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable[..., Any]:
    """The Jacobian, computed row by row in reverse mode, which suits functions with fewer outputs than inputs.

    Args:
        func: returns real floating tensors in any pytree; with has_aux a tuple of it and a tree of tensors.
        argnums: which positional argument(s) to differentiate with respect to; each may be any pytree of real floating tensors.
        has_aux: whether func returns (output, aux).
        chunk_size: how many rows are computed at a time; None: all at once.

    Returns:
        Callable: takes func's arguments and returns a tree of the output's structure. Each output in it is replaced by a tree, with the
        structure of the arguments that argnums picks, of tensors of shape ``output.shape + input.shape`` and the input's dtype. With
        has_aux it returns (Jacobian, aux).

    Raises:
        ValueError: chunk_size < 1; an input to differentiate is not a tensor.
        RuntimeError: an input or output is complex; an input to differentiate has an integer dtype; an output is not a floating tensor.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.jacrev.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import jacrev
        >>> jacrev(torch.sin)(torch.zeros(2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    if not (chunk_size is None or chunk_size > 0):
        raise ValueError(f"jacrev: `chunk_size` should be greater than 0. (got {chunk_size})")

    @opaque
    @functools.wraps(func)
    def wrapped(*args: Any) -> Any:
        _args.real("jacrev", args, "inputs")

        def finish(out: Any) -> tuple[list[Any], Any]:
            return _args.to_pull_back(out, has_aux, "vjp(f, *primals)", lambda leaves: _args.real("jacrev", leaves, "outputs"))

        def build(target: Differentiated, outs: Sequence[Any], meta: tuple[Any, int, Any]) -> Any:
            out_spec, n, aux_spec = meta
            width = len(target.active)
            per_output = [trees.unflatten(target.diff_spec, outs[k * width : (k + 1) * width]) for k in range(n)]
            jacobian = trees.unflatten(out_spec, per_output)
            return (jacobian, trees.unflatten(aux_spec, outs[n * width :])) if has_aux else jacobian

        def record(recorder: Recorder) -> Any:
            target = Differentiated(func, args, {}, argnums, "vjp(f, *primals)")
            tensors, meta = target.entered(recorder, "jacrev", (target.active, chunk_size), finish)
            n = meta[1]
            blocks = [aval_of(x).like(o.shape + x.shape) for o in tensors[:n] for x in target.diff_leaves]
            outs = recorder.end(n, tensors, [*blocks, *fresh(tensors[n:])])
            return outs, lambda outs: build(target, outs, meta)

        done = transforms.transform(func, trees.flatten(args)[0], record)
        if done is not transforms.NOT_RECORDED:
            return done
        target = Differentiated(func, args, {}, argnums, "vjp(f, *primals)")

        def compute(values: list[Any]) -> Result:
            found: list[Result] = []
            body = target.body(values, "grad", finish, found, lambda meta: meta[1])
            outs, pull, rest = jax.vjp(body, *target.split(values), has_aux=True)
            blocks = [b for k in range(len(outs)) for b in _rows(pull, outs, k, chunk_size)]
            return found[0].after([*blocks, *rest], len(blocks) - len(outs), len(outs))

        return build(target, *apply(compute, target.call.arrays, func))

    return wrapped


def _jacrev_again(body: Callable[..., Any], operands: list[Any], params: tuple[Any, int | None], n: int) -> Any:
    active, chunk_size = params

    def f(*arguments: Any) -> Any:
        outs = body(*arguments)
        return outs[:n], outs[n:]

    jacobian, aux = jacrev(f, active, has_aux=True, chunk_size=chunk_size)(*operands)
    return [*[block for row in jacobian for block in row], *aux], None


replay.TRANSFORMS["jacrev"] = _jacrev_again


def _rows(pull: Callable[..., Any], outs: list[Any], k: int, chunk_size: int | None) -> list[Any]:
    """The Jacobian blocks of one output, of shape output.shape + input.shape for each differentiated input."""
    out = outs[k]
    size = out.size
    zeros = [jnp.zeros(o.shape, o.dtype) for o in outs]

    def row(basis: jax.Array) -> tuple[Any, ...]:
        return pull([basis if i == k else z for i, z in enumerate(zeros)])

    def rows(first: int, n: int) -> tuple[Any, ...]:
        basis = jnp.eye(n, size, first, dtype=out.dtype).reshape(n, *out.shape)
        return jax.vmap(row)(basis)

    step = size if chunk_size is None else min(chunk_size, size)
    if size == 0:
        return [jnp.zeros(out.shape + g.shape, g.dtype) for g in jax.eval_shape(pull, outs)]
    parts = [rows(start, min(step, size - start)) for start in range(0, size, step)]
    pieces = parts[0] if len(parts) == 1 else [jnp.concatenate(column) for column in zip(*parts, strict=True)]
    return [p.reshape(out.shape + p.shape[1:]) for p in pieces]


@opaque
def jacfwd(func: Callable[..., Any], argnums: argnums_t = 0, has_aux: bool = False, *, randomness: str = "error") -> Callable[..., Any]:
    """The Jacobian, computed column by column in forward mode, which suits functions with fewer inputs than outputs.

    Args:
        func, argnums, has_aux: as in ``jacrev``.
        randomness: the randomness of the ``vmap`` that computes the columns.

    Returns:
        Callable: as in ``jacrev``.

    Raises:
        RuntimeError: an input or output is complex; a random operator runs while randomness is "error".
        ValueError: an input to differentiate is not a tensor, or has an integer dtype.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.jacfwd.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import jacfwd
        >>> jacfwd(lambda x: (x * x).sum())(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """

    @opaque
    @functools.wraps(func)
    def wrapped(*args: Any) -> Any:
        _args.real("jacfwd", args, "inputs")
        diff, _ = _args.select(args, argnums)
        primals, spec = trees.flatten((diff,) if isinstance(argnums, int) else diff)
        _args.differentiable(primals, "jacfwd(f)(*args)")
        sizes = [_numel(p) for p in primals]
        basis = trees.unflatten(spec, _basis(primals, sizes))

        def push(tangents: Any) -> Any:
            output = jvp_with_argnums(func, args, tangents, argnums, False, has_aux)
            _args.real("jacfwd", output[0], "outputs")
            return output[1:] if has_aux else output[1]

        pushed = vmap(push, randomness=randomness)(basis)
        if has_aux:
            pushed, aux = pushed
            aux = trees.map_leaves(lambda a: a[0], aux)
        outs, out_spec = trees.flatten(pushed)
        jacobians = []
        for out in outs:
            moved = out.movedim(0, -1) if isinstance(out, torch.Tensor) else jnp.moveaxis(out, 0, -1)
            blocks, start = [], 0
            for p, n in zip(primals, sizes, strict=True):
                blocks.append(moved[..., start : start + n].reshape(tuple(moved.shape[:-1]) + tuple(p.shape)))
                start += n
            tree = trees.unflatten(spec, blocks)
            jacobians.append(tree[0] if isinstance(argnums, int) else tree)
        jacobian = trees.unflatten(out_spec, jacobians)
        return (jacobian, aux) if has_aux else jacobian

    return wrapped


def _numel(p: torch.Tensor | jax.Array) -> int:
    return p.numel() if isinstance(p, torch.Tensor) else p.size


def _basis(primals: list[Any], sizes: list[int]) -> list[Any]:
    """The standard basis of all primals together, cut into a block of shape [sum of sizes, *primal.shape] for each primal."""
    total, start = sum(sizes), 0
    blocks: list[Any] = []
    for p, n in zip(primals, sizes, strict=True):
        if isinstance(p, torch.Tensor):
            block = torch.zeros(total, n, dtype=p.dtype, device=p.device)
            block.diagonal(-start).fill_(1)
            blocks.append(block.reshape(total, *p.shape))
        else:
            blocks.append(jnp.eye(total, n, -start, dtype=dtypes.to_jax(dtypes.to_torch(p.dtype))).reshape(total, *p.shape))
        start += n
    return blocks


@opaque
def hessian(func: Callable[..., Any], argnums: argnums_t = 0) -> Callable[..., Any]:
    """The Hessian, forward over reverse: ``jacfwd(jacrev(func))``.

    Args:
        func: returns real floating tensors in any pytree.
        argnums: which positional argument(s) to differentiate with respect to; each may be any pytree of real floating tensors.

    Returns:
        Callable: takes func's arguments and returns a tree nested by output, input and input, of tensors of shape
        ``output.shape + input.shape + input.shape`` and the input's dtype.

    Raises:
        RuntimeError: an input or output is complex; an output is not a floating tensor.
        ValueError: an input to differentiate is not a tensor, or has an integer dtype.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.hessian.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import hessian
        >>> hessian(lambda x: (x ** 3).sum())(torch.tensor([1.0, 2.0]))
        tensor([[ 6.,  0.],
                [ 0., 12.]])
    """
    return jacfwd(jacrev(func, argnums), argnums)
