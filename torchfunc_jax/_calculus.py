"""Second and higher derivatives, and diagonals: hvp, jacobian_diagonal, laplacian and jet, which
torch.func does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge.boundary import handing_over
from bridge.boundary.calls import apply
from bridge.boundary.results import Result, is_array
from bridge.convert import trees
from bridge.jit import taylor
from bridge.record import transforms
from bridge.record.recorder import Recorder
from bridge.record.tensor import fresh
from bridge.transform_kinds import JET, JVP
from torchfunc_jax import _args, _calculus_in_torch
from torchfunc_jax._args import argnums_t
from torchfunc_jax._forward import forward_mode, jvp_with_argnums, outputs
from torchfunc_jax._jacobians import along_units, spans
from torchfunc_jax._reverse import Differentiated, gradients_and_value

_HVP, _DIAGONAL, _LAPLACIAN = (
    "hvp(f, primals, tangents)",
    "jacobian_diagonal(f)(*args)",
    "laplacian(f)(*args)",
)
_JET = "jet(f, primals, series)"


@handing_over.call(_calculus_in_torch.hvp)
def hvp(func: Callable[..., Any], primals: Any, tangents: Any, *, has_aux: bool = False) -> Any:
    """func's value and the product of its Hessian with the tangents, forward over reverse; the
    Hessian itself is never made.

    Args:
        func: returns a 0-dim floating tensor; with has_aux a tuple of it and a tree of tensors.
        primals: tuple of func's arguments, pytrees of floating tensors; all are differentiated with
            respect to.
        tangents: tuple with the primals' structure, shapes and dtypes.
        has_aux: whether func returns (output, aux).

    Returns:
        (output, product), with has_aux (output, product, aux); product is a tuple with the primals'
            structure, shapes and dtypes.

    Raises:
        RuntimeError: primals is not a tuple; tangents have another structure, shape or dtype than
            the primals; the output is not a 0-dim tensor.
        ValueError: a primal has an integer dtype.

    Source: https://docs.jax.dev/en/latest/notebooks/autodiff_cookbook.html#hessian-vector-products-using-both-forward-and-reverse-mode;
    the results are in the order of ``torch.autograd.functional.hvp``.

    Example:
        >>> import torch
        >>> from torchfunc_jax import hvp
        >>> hvp(lambda x: (x**3).sum(), (torch.tensor([1.0, 2.0]),), (torch.tensor([1.0, 0.0]),))
        (tensor(9.), (tensor([6., 0.]),))
    """

    def gradients(*args: Any) -> tuple[Any, Any]:
        return gradients_and_value(func, tuple(range(len(args))), has_aux, args, {}, _HVP)

    _, product, value = jvp_with_argnums(gradients, primals, tangents, None, has_aux=True, api=_HVP)
    return (value[0], product, value[1]) if has_aux else (value, product)


@handing_over.transform(_calculus_in_torch.jacobian_diagonal)
def jacobian_diagonal(
    func: Callable[..., Any],
    argnums: argnums_t = 0,
    *,
    randomness: str = "error",
    chunk_size: int | str | None = None,
) -> Callable[..., Any]:
    """The diagonal of the Jacobian: the derivative of each element of the output with respect to
    the same element of the input.

    All columns are computed, in forward mode, and of each one element is kept: the time is that of
    ``jacfwd``, the memory that of a chunk.

    Args:
        func: returns floating tensors, in a tree of the structure and shapes of the argument that
            it is differentiated with respect to.
        argnums: which positional argument(s) to differentiate with respect to; each may be any
            pytree of real floating tensors.
        randomness: the randomness of the ``vmap`` that computes the columns.
        chunk_size: how many columns are computed at a time, as in ``vmap``.

    Returns:
        Callable: takes func's arguments and returns the diagonal, a tree of the argument's
            structure and shapes and the output's dtypes; if
        argnums is a tuple, a tuple of these.

    Raises:
        RuntimeError: the output has another structure or other shapes than the argument; an input
            is complex; argnums is out of range; a random operator runs while randomness is "error".
        ValueError: an input to differentiate is not a tensor, or has an integer dtype; chunk_size
            < 1.

    Source: https://github.com/pytorch/pytorch/issues/87559

    Example:
        >>> import torch
        >>> from torchfunc_jax import jacobian_diagonal
        >>> jacobian_diagonal(lambda x: x**2 + x.sum())(torch.tensor([1.0, 2.0]))
        tensor([3., 5.])
    """

    def of(args: tuple[Any, ...], argnum: int) -> Any:
        primals, spec = trees.flatten(args[argnum])
        _args.differentiable(primals, _DIAGONAL)
        _args.real("jacobian_diagonal", primals, "inputs")

        def entries(tangents: list[torch.Tensor]) -> list[torch.Tensor]:
            pushed = jvp_with_argnums(
                func, args, (trees.unflatten(spec, tangents),), argnum, api=_DIAGONAL
            )[1]
            outs, out_spec = trees.flatten(pushed)
            shapes, wanted = ([tuple(t.shape) for t in leaves] for leaves in (outs, tangents))
            if out_spec != spec or shapes != wanted:
                raise RuntimeError(
                    f"{_DIAGONAL}: expected f to return tensors of argument {argnum}'s structure "
                    f"and shapes, {spec or 'a tensor'} of {wanted}, got {out_spec or 'a tensor'} "
                    f"of {shapes}; jacrev and jacfwd give the whole Jacobian of such a function"
                )
            return [
                torch.where(t != 0, out, torch.zeros_like(out)).sum()
                for t, out in zip(tangents, outs, strict=True)
            ]

        columns = along_units(entries, func, primals, randomness=randomness, chunk_size=chunk_size)
        blocks = [
            c[k].reshape(tuple(p.shape))
            for c, k, p in zip(columns, spans(primals), primals, strict=True)
        ]
        return trees.unflatten(spec, blocks)

    def wrapped(*args: Any) -> Any:
        positions = _args.positions(argnums, len(args))
        found = tuple([of(args, n) for n in positions])
        return found[0] if isinstance(argnums, int) else found

    return wrapped


@handing_over.transform(_calculus_in_torch.laplacian)
def laplacian(
    func: Callable[..., Any],
    argnums: argnums_t = 0,
    *,
    randomness: str = "error",
    chunk_size: int | str | None = None,
) -> Callable[..., Any]:
    """The Laplacian: the sum of the second derivatives with respect to each element of the input,
    which is the trace of the Hessian.

    The second derivatives are computed by forward mode over forward mode, one for each element of
    the input, and no Hessian is made.

    Args:
        func: returns floating or complex tensors in any pytree; each element of them has a
            Laplacian of its own.
        argnums: which positional argument(s) to differentiate with respect to; each may be any
            pytree of real floating tensors, and the sum goes over the elements of all of them.
        randomness: the randomness of the ``vmap`` over the elements.
        chunk_size: how many second derivatives are computed at a time, as in ``vmap``.

    Returns:
        Callable: takes func's arguments and returns the Laplacian, of the output's structure,
            shapes and dtypes.

    Raises:
        RuntimeError: an output is not a tensor; an input is complex; argnums is out of range; a
            random operator runs while randomness is "error".
        ValueError: an input to differentiate is not a tensor, or has an integer dtype; chunk_size
            < 1.

    Source: https://github.com/microsoft/folx

    Example:
        >>> import torch
        >>> from torchfunc_jax import laplacian
        >>> laplacian(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
        tensor(18.)
    """

    def wrapped(*args: Any) -> Any:
        diff = _args.select(args, argnums)
        primals, spec = trees.flatten((diff,) if isinstance(argnums, int) else diff)
        _args.differentiable(primals, _LAPLACIAN)
        _args.real("laplacian", primals, "inputs")

        def second(tangents: list[torch.Tensor]) -> Any:
            along = trees.unflatten(spec, tangents)

            def first(*args: Any) -> Any:
                return jvp_with_argnums(func, args, along, argnums, api=_LAPLACIAN)[1]

            return jvp_with_argnums(first, args, along, argnums, api=_LAPLACIAN)[1]

        every = along_units(second, func, primals, randomness=randomness, chunk_size=chunk_size)
        return trees.map_leaves(lambda t: t.sum(0), every)

    return wrapped


@handing_over.call(_calculus_in_torch.jet)
def jet(
    func: Callable[..., Any], primals: Any, series: Any, factorial_scaled: bool = True
) -> tuple[Any, Any]:
    """Taylor mode: func's value and its higher derivatives along a curve, all orders in one pass.

    The curve is given by a value for each argument and by its derivatives: ``series[i][k]`` is the
    derivative of order k + 1 of argument i. For the derivatives along a straight line, the first
    term is the direction and the others are zero.

    Args:
        func: takes tensors, returns tensors in any pytree.
        primals: tuple or list of func's arguments, floating tensors.
        series: tuple or list with, for each primal, a tuple or list of terms, tensors of the
            primal's shape and dtype; all have the same number of terms, the order.
        factorial_scaled: the terms are derivatives; if False, coefficients of the Taylor
            polynomial, derivatives over k!.

    Returns:
        (output, series_out): series_out has the output's structure with a list of terms, of its
            shape and dtype, in the place of each
        tensor.

    Raises:
        ValueError: primals is not a tuple or list; a primal or term is not a tensor; a primal has
            an integer dtype; the number of series or of terms, or a term's shape or dtype, does not
            fit.
        RuntimeError: an output is not a tensor.
        NotImplementedError: JAX has no derivative of a primitive that func needs.

    Source: https://docs.jax.dev/en/latest/jax.experimental.jet.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import jet
        >>> one, zero = torch.ones(()), torch.zeros(())
        >>> jet(lambda x: x**3, (torch.tensor(2.0),), ((one, zero, zero),))
        (tensor(8.), [tensor(12.), tensor(12.), tensor(6.)])
    """
    return _along_curve(func, primals, series, factorial_scaled)


def _along_curve(
    func: Callable[..., Any], primals: Any, series: Any, factorial_scaled: bool
) -> tuple[Any, Any]:
    terms, order = _terms(primals, series)
    primals, params = tuple(primals), (order, factorial_scaled)
    leaves, spec = trees.flatten((primals, {}))
    finish = functools.partial(outputs, has_aux=False, api=_JET)

    def build(outs: Sequence[Any], meta: tuple[Any, int, Any]) -> tuple[Any, Any]:
        spec, n, _ = meta
        return trees.unflatten(spec, outs[:n]), trees.unflatten(spec, _series(outs, n, order))

    def record(recorder: Recorder) -> Any:
        target = Differentiated(func, leaves, spec, None, _JET)
        tensors, meta = target.entered(recorder, JET, params, finish, terms)
        outs = recorder.end(
            meta[1], tensors, fresh([*tensors, *[t for t in tensors for _ in range(order)]])
        )
        return outs, lambda outs: build(outs, meta)

    done = transforms.transform(func, [*primals, *terms], record)
    if done is not transforms.NOT_RECORDED:
        return done
    target = Differentiated(func, leaves, spec, None, _JET)

    def compute(values: list[Any]) -> Result:
        found: list[Result] = []
        n = len(primals)
        body = target.body(values[:n], JVP, finish, found, lambda meta: meta[1])
        with forward_mode():
            outs, higher, rest = taylor.jet(
                body, values[:n], _series(values, n, order), order, factorial_scaled
            )
        coefficients = [c for cs in higher for c in cs]
        result = found[0]
        return Result(
            [*outs, *coefficients, *rest],
            result.meta,
            [(t, i + len(coefficients), d) for t, i, d in result.written],
        )

    return build(*apply(compute, [*target.call.arrays, *terms]))


def _terms(primals: Any, series: Any) -> tuple[list[Any], int]:
    """The terms of all series one after the other, and the order; what does not fit the primals is
    refused.
    """
    for what, given in (("primals", primals), ("series", series)):
        if not isinstance(given, tuple | list):
            raise ValueError(
                f"{_JET}: expected {what} to be a tuple or list, one entry for each argument of f, "
                f"got {type(given)}"
            )
    if not primals or len(series) != len(primals):
        raise ValueError(
            f"{_JET}: expected one series for each primal and at least one, got {len(primals)} "
            f"primals, {len(series)} series"
        )
    for i, (p, terms) in enumerate(zip(primals, series, strict=True)):
        if not is_array(p):
            raise ValueError(
                f"{_JET}: expected primal {i} to be a tensor, got {type(p)}; give each tensor as "
                "an argument of its own"
            )
        if not isinstance(terms, tuple | list):
            raise ValueError(
                f"{_JET}: expected series[{i}] to be a tuple or list of terms, got {type(terms)}"
            )
        if len(terms) != len(series[0]):
            raise ValueError(
                f"{_JET}: expected as many terms in series[{i}] as in series[0], {len(series[0])}, "
                f"got {len(terms)}; add terms of zeros"
            )
        for k, t in enumerate(terms):
            if not is_array(t):
                raise ValueError(f"{_JET}: expected series[{i}][{k}] to be a tensor, got {type(t)}")
            mine, theirs = ((tuple(x.shape), _args.dtype_of(x)) for x in (t, p))
            if mine != theirs:
                raise ValueError(
                    f"{_JET}: expected series[{i}][{k}] to have primal {i}'s shape {theirs[0]} and "
                    f"dtype {theirs[1]}, got {mine[0]} and {mine[1]}"
                )
    return [t for terms in series for t in terms], len(series[0])


def _series(values: Sequence[Any], count: int, order: int) -> list[list[Any]]:
    """The terms of each of the first ``count`` values, which come after these, one series after the
    other.
    """
    return [list(values[k : k + order]) for k in (count + i * order for i in range(count))]


def _jet_again(
    body: Callable[..., Any], operands: list[Any], params: tuple[int, bool], n: int
) -> Any:
    order, scaled = params
    count = len(operands) // (order + 1)
    outs, higher = jet(
        lambda *arguments: tuple(body(*arguments)),
        operands[:count],
        _series(operands, count, order),
        scaled,
    )
    return [*outs, *[c for cs in higher for c in cs]], None


JET.again = _jet_again

__all__ = ["hvp", "jacobian_diagonal", "jet", "laplacian"]
