"""Jacobians and Hessians: jacrev, jacfwd and hessian."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge import private
from bridge.boundary import handing_over, meshes
from bridge.boundary.calls import apply
from bridge.boundary.results import Result, as_gradients
from bridge.convert import trees
from bridge.lowering.common import varying
from bridge.record import transforms
from bridge.record.in_torch import Level
from bridge.record.recorder import Recorder
from bridge.record.tensor import aval_of, fresh
from bridge.transform_kinds import JACREV
from torchfunc_jax import _args
from torchfunc_jax._args import argnums_t
from torchfunc_jax._forward import jvp_with_argnums
from torchfunc_jax._reverse import Differentiated
from torchfunc_jax._vmap import vmap


@handing_over.transform(torch.func.jacrev)
def jacrev(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable[..., Any]:
    """The Jacobian, computed row by row in reverse mode, which suits functions with fewer outputs
    than inputs.

    Args:
        func: returns real floating tensors in any pytree; with has_aux a tuple of it and a tree of
            tensors.
        argnums: which positional argument(s) to differentiate with respect to; each may be any
            pytree of real floating tensors.
        has_aux: whether func returns (output, aux).
        chunk_size: how many rows are computed at a time; None: all at once.

    Returns:
        Callable: takes func's arguments and returns a tree of the output's structure. Each output
            in it is replaced by a tree, with the
        structure of the arguments that argnums picks, of tensors of shape
            ``output.shape + input.shape`` and the input's dtype. With
        has_aux it returns (Jacobian, aux).

    Raises:
        ValueError: chunk_size < 1; an input to differentiate is not a tensor; there is no input to
            differentiate.
        RuntimeError: an input or output is complex; an input to differentiate has an integer dtype;
            an output is not a floating tensor.

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

    return functools.partial(_jacobian_by_rows, func, argnums, has_aux, chunk_size)


def _jacobian_by_rows(
    func: Callable[..., Any], argnums: argnums_t, has_aux: bool, chunk_size: int | None, *args: Any
) -> Any:
    _args.check(argnums)
    _args.real("jacrev", args, "inputs")
    leaves, spec = trees.flatten((args, {}))

    def finish(out: Any) -> tuple[list[Any], Any]:
        return _args.to_pull_back(
            out, has_aux, "vjp(f, *primals)", lambda leaves: _args.real("jacrev", leaves, "outputs")
        )

    def differentiated() -> Differentiated:
        target = Differentiated(func, leaves, spec, argnums, "vjp(f, *primals)")
        if not target.active:
            raise ValueError(
                f"jacrev: expected the arguments that argnums={argnums} picks to contain at least "
                f"one tensor, got a tree with none: {target.diff_spec}; pick an argument that has "
                "tensors"
            )
        return target

    def build(target: Differentiated, outs: Sequence[Any], meta: tuple[Any, int, Any]) -> Any:
        out_spec, n, aux_spec = meta
        width = len(target.active)
        per_output = [
            trees.unflatten(target.diff_spec, outs[k * width : (k + 1) * width]) for k in range(n)
        ]
        jacobian = trees.unflatten(out_spec, per_output)
        return (jacobian, trees.unflatten(aux_spec, outs[n * width :])) if has_aux else jacobian

    def record(recorder: Recorder) -> Any:
        target = differentiated()
        tensors, meta = target.entered(recorder, JACREV, (target.active, chunk_size), finish)
        n = meta[1]
        blocks = [
            aval_of(x).like(o.shape + x.shape) for o in tensors[:n] for x in target.diff_leaves
        ]
        outs = recorder.end(n, tensors, [*blocks, *fresh(tensors[n:])])
        return outs, lambda outs: build(target, outs, meta)

    done = transforms.transform(func, leaves, record)
    if done is not transforms.NOT_RECORDED:
        return done
    target = differentiated()

    def compute(values: list[Any]) -> Result:
        found: list[Result] = []
        body = target.body(values, JACREV, finish, found, lambda meta: meta[1])
        outs, pull, rest = varying.vjp(body, *target.split(values), has_aux=True)
        blocks = [
            b
            for k in range(len(outs))
            for b in as_gradients(_rows(pull, outs, k, chunk_size), "jacrev")
        ]
        return found[0].after([*blocks, *rest], len(blocks) - len(outs), len(outs))

    return build(target, *apply(compute, target.call.arrays))


def _jacrev_again(
    body: Callable[..., Any], operands: list[Any], params: tuple[Any, int | None], n: int
) -> Any:
    active, chunk_size = params

    def f(*arguments: Any) -> Any:
        outs = body(*arguments)
        return outs[:n], outs[n:]

    jacobian, aux = jacrev(f, active, has_aux=True, chunk_size=chunk_size)(*operands)
    return [*[block for row in jacobian for block in row], *aux], None


def _jacrev_in_torch(
    operands: Sequence[torch.Tensor], params: tuple[tuple[int, ...], int | None]
) -> Level:
    active, chunk_size = params
    with private.grad_level() as level, torch.enable_grad():
        arguments = private.differentiated(operands, active, level)
        results, n = yield arguments
        wanted = [arguments[k] for k in active]
        outs = private.out_of(level, results)

    def pull(cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
        return private.pulled_back(
            results[:n], wanted, cotangents, create_graph=torch.is_grad_enabled()
        )

    def rows(first: int, stop: int) -> list[torch.Tensor]:
        """These rows of all outputs' Jacobian; for each input they are the first dimension."""
        numbers = torch.arange(first, stop)[:, None]
        units = [
            (numbers == torch.arange(k.start, k.stop)).to(o).reshape(-1, *o.shape)
            for o, k in zip(outs, places, strict=False)
        ]
        return (
            [x[None] for x in pull([u[0] for u in units])]
            if chunk_size == 1
            else _torch_vmap(pull)(units)
        )

    places = spans(outs[:n])
    count = places[-1].stop if places else 0
    chunks = (
        [
            rows(k, min(k + (chunk_size or count), count))
            for k in range(0, count, chunk_size or count)
        ]
        if count
        else []
    )
    columns = [torch.cat(c) for c in zip(*chunks, strict=True)] or [
        x.new_zeros((0, *x.shape)) for x in private.out_of(level, wanted)
    ]
    blocks = [
        c[k].reshape(*o.shape, *c.shape[1:])
        for o, k in zip(outs, places, strict=False)
        for c in columns
    ]
    return [*blocks, *outs[n:]], None


JACREV.again, JACREV.in_torch = _jacrev_again, _jacrev_in_torch


def _rows(pull: Callable[..., Any], outs: list[Any], k: int, chunk_size: int | None) -> list[Any]:
    """The Jacobian blocks of one output, of shape output.shape + input.shape for each
    differentiated input.
    """
    out = outs[k]
    size = out.size
    zeros = [jnp.zeros(o.shape, o.dtype) for o in outs]

    def row(basis: jax.Array) -> tuple[Any, ...]:
        return pull([basis if i == k else z for i, z in enumerate(zeros)])

    def rows(first: int, n: int) -> tuple[Any, ...]:
        basis = jnp.eye(n, size, first, dtype=out.dtype).reshape(n, *out.shape)
        # a hook may ask for the values of one row, as in torch.func, but not for those of a mapped
        # one
        return jax.vmap(row)(basis) if n > 1 else tuple([g[None] for g in row(basis[0])])

    step = size if chunk_size is None else min(chunk_size, size)
    if size == 0:
        return [jnp.zeros(out.shape + g.shape, g.dtype) for g in jax.eval_shape(pull, outs)]
    parts = [rows(start, min(step, size - start)) for start in range(0, size, step)]
    pieces = (
        parts[0]
        if len(parts) == 1
        else [jnp.concatenate(column) for column in zip(*parts, strict=True)]
    )
    return [p.reshape(out.shape + p.shape[1:]) for p in pieces]


# torch's own, even after ``patch()`` has replaced them
_torch_jacfwd, _torch_vmap = torch.func.jacfwd, torch.func.vmap


@handing_over.transform(
    lambda func, *args, chunk_size=None, **kwargs: _torch_jacfwd(func, *args, **kwargs)
)
def jacfwd(
    func: Callable[..., Any],
    argnums: argnums_t = 0,
    has_aux: bool = False,
    *,
    randomness: str = "error",
    chunk_size: int | str | None = None,
) -> Callable[..., Any]:
    """The Jacobian, computed column by column in forward mode, which suits functions with fewer
    inputs than outputs.

    Args:
        func, argnums, has_aux: as in ``jacrev``.
        randomness: the randomness of the ``vmap`` that computes the columns.
        chunk_size: how many columns are computed at a time, as in ``vmap``; torch.func has it in
            ``jacrev`` alone.

    Returns:
        Callable: as in ``jacrev``.

    Raises:
        RuntimeError: an input or output is complex; a random operator runs while randomness is
            "error".
        ValueError: an input to differentiate is not a tensor, or has an integer dtype; chunk_size
            < 1.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.jacfwd.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import jacfwd
        >>> jacfwd(lambda x: (x * x).sum())(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """

    def jacobian_of(*args: Any) -> Any:
        _args.real("jacfwd", args, "inputs")
        diff = _args.select(args, argnums)
        primals, spec = trees.flatten((diff,) if isinstance(argnums, int) else diff)
        _args.differentiable(primals, "jacfwd(f)(*args)")

        def push(tangents: list[torch.Tensor]) -> Any:
            output = jvp_with_argnums(
                func, args, trees.unflatten(spec, tangents), argnums, False, has_aux
            )
            _args.real("jacfwd", output[0], "outputs")
            return output[1:] if has_aux else output[1]

        pushed = along_units(push, func, primals, randomness=randomness, chunk_size=chunk_size)
        if has_aux:
            pushed, aux = pushed
            aux = trees.map_leaves(lambda a: a[0], aux)
        outs, out_spec = trees.flatten(pushed)
        jacobians = []
        for out in outs:
            moved = (
                out.movedim(0, -1) if isinstance(out, torch.Tensor) else jnp.moveaxis(out, 0, -1)
            )
            blocks = [
                moved[..., k].reshape(tuple(moved.shape[:-1]) + tuple(p.shape))
                for p, k in zip(primals, spans(primals), strict=True)
            ]
            tree = trees.unflatten(spec, blocks)
            jacobians.append(tree[0] if isinstance(argnums, int) else tree)
        jacobian = trees.unflatten(out_spec, jacobians)
        return (jacobian, aux) if has_aux else jacobian

    return jacobian_of


def along_units(
    push: Callable[[list[torch.Tensor]], Any],
    func: Callable[..., Any],
    primals: list[Any],
    *,
    randomness: str,
    chunk_size: int | str | None,
) -> Any:
    """``push`` for each unit vector of the space of all primals together, mapped by ``vmap``.

    push: takes a unit vector as one tangent for each primal. The vector is made from its number,
    inside, so that a chunk of the vectors
        takes a chunk's memory.
    func: the user's function, which push calls.
    """
    cuts = spans(primals)

    def lane(number: torch.Tensor) -> Any:
        places = [
            torch.arange(k.start, k.stop, device=number.device).reshape(p.shape)
            for p, k in zip(primals, cuts, strict=True)
        ]
        return push(
            [
                (place == number).to(_args.dtype_of(p))
                for p, place in zip(primals, places, strict=True)
            ]
        )

    # whether a call can be recorded depends on it (bridge/record/transforms.py)
    lane.transforms = func  # type: ignore[attr-defined]
    count, first = cuts[-1].stop if cuts else 0, primals[0] if primals else None
    device = getattr(first, "device", None)
    in_jax = transforms.has_arrays(primals) and isinstance(first, jax.Array)
    numbers = (
        meshes.beside(jnp.arange(count), primals) if in_jax else torch.arange(count, device=device)
    )
    return vmap(lane, randomness=randomness, chunk_size=chunk_size)(numbers)


def spans(primals: list[Any]) -> list[slice]:
    """The places of each primal's elements among those of all primals together."""
    found, start = [], 0
    for p in primals:
        n = p.numel() if isinstance(p, torch.Tensor) else p.size
        found.append(slice(start, start + n))
        start += n
    return found


def hessian(
    func: Callable[..., Any], argnums: argnums_t = 0, *, chunk_size: int | None = None
) -> Callable[..., Any]:
    """The Hessian, forward over reverse: ``jacfwd(jacrev(func))``.

    Args:
        func: returns real floating tensors in any pytree.
        argnums: which positional argument(s) to differentiate with respect to; each may be any
            pytree of real floating tensors.
        chunk_size: how many columns, and how many of their rows, are computed at a time; torch.func
            does not have it.

    Returns:
        Callable: takes func's arguments and returns a tree nested by output, input and input, of
            tensors of shape
        ``output.shape + input.shape + input.shape`` and the input's dtype.

    Raises:
        RuntimeError: an input or output is complex; an output is not a floating tensor.
        ValueError: an input to differentiate is not a tensor, or has an integer dtype; chunk_size
            < 1.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.hessian.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import hessian
        >>> hessian(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
        tensor([[ 6.,  0.],
                [ 0., 12.]])
    """
    return jacfwd(jacrev(func, argnums, chunk_size=chunk_size), argnums, chunk_size=chunk_size)
