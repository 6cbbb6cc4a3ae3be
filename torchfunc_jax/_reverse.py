"""Reverse mode: grad, grad_and_value and vjp."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge import private, private_jax
from bridge.boundary import autograd, handing_over
from bridge.boundary.calls import Call, Traceable, apply
from bridge.boundary.linear import Linear
from bridge.boundary.results import Result, as_gradients, conj, is_array, replaced, split_arrays
from bridge.convert import dtypes, trees
from bridge.lowering.common import varying
from bridge.record import transforms
from bridge.record.in_torch import Level
from bridge.record.recorder import Recorder
from bridge.record.tensor import avals_of, fresh
from bridge.trace import saved_tensor_hooks
from bridge.trace.levels import push
from bridge.transform_kinds import GRAD, VJP, Kind
from torchfunc_jax import _args
from torchfunc_jax._args import argnums_t


@handing_over.transform(torch.func.grad)
def grad(
    func: Callable[..., Any], argnums: argnums_t = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The gradient of a function that returns a scalar; without ``jit``, func's Python runs at each
    call.

    Args:
        func: returns a 0-dim floating tensor; with has_aux a tuple of it and a tree of tensors.
        argnums: which positional argument(s) to differentiate with respect to; each may be any
            pytree of floating tensors.
        has_aux: whether func returns (output, aux).

    Returns:
        Callable: takes func's arguments, returns the gradient(s), with the structure, shapes and
            dtypes of the arguments that argnums
        picks; with has_aux a tuple (gradients, aux).

    Raises:
        RuntimeError: the output is not a 0-dim tensor; argnums is out of range; an input to
            differentiate has an integer dtype.
        ValueError: an input to differentiate is not a tensor.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.grad.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import grad
        >>> grad(lambda x: x**3)(torch.tensor(2.0))
        tensor(12.)
        >>> grad(grad(lambda x: x**3))(torch.tensor(2.0))
        tensor(12.)
    """

    def gradient(*args: Any, **kwargs: Any) -> Any:
        gradients, value = gradients_and_value(func, argnums, has_aux, args, kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


@handing_over.transform(torch.func.grad_and_value)
def grad_and_value(
    func: Callable[..., Any], argnums: argnums_t = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The gradient of a function that returns a scalar, together with the function's value.

    Args:
        func: returns a 0-dim floating tensor; with has_aux a tuple of it and a tree of tensors.
        argnums: which positional argument(s) to differentiate with respect to; each may be any
            pytree of floating tensors.
        has_aux: whether func returns (output, aux).

    Returns:
        Callable: takes func's arguments, returns (gradients, output), with has_aux (gradients,
            (output, aux)); the gradients have the
        structure, shapes and dtypes of the arguments that argnums picks.

    Raises:
        RuntimeError, ValueError: as in ``grad``.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.grad_and_value.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import grad_and_value
        >>> grad_and_value(lambda x: (x**2).sum())(torch.tensor([1.0, 2.0]))
        (tensor([2., 4.]), tensor(5.))
    """

    return lambda *args, **kwargs: gradients_and_value(func, argnums, has_aux, args, kwargs)


class Differentiated:
    """A call that is differentiated with respect to the arguments at some positions; ``active`` has
    the indices of their arrays.
    """

    strict = False  # whether it will be asked which outputs depend on these arguments

    def __init__(
        self,
        func: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        argnums: argnums_t | None,
        api: str,
    ) -> None:
        """leaves, spec: the flattened (args, kwargs)."""
        args = spec.children[0].children
        positions = (
            tuple(range(len(args))) if argnums is None else _args.positions(argnums, len(args))
        )
        starts = spec.children[0].starts
        picked = [i for p in positions for i in range(starts[p], starts[p + 1])]
        self.func, self.leaves, self.spec = func, leaves, spec
        self.diff_leaves = [leaves[i] for i in picked]
        self.diff_spec = (
            args[positions[0]]
            if isinstance(argnums, int)
            else trees.joined(*[args[p] for p in positions])
        )
        _args.differentiable(self.diff_leaves, api)
        order = {i: k for k, i in enumerate(split_arrays(leaves))}
        self.active = tuple([order[i] for i in picked])

    def entered(
        self,
        recorder: Recorder,
        kind: Kind,
        params: Any,
        finish: Any,
        more: Sequence[torch.Tensor] = (),
    ) -> tuple[list[Any], Any]:
        """Begin the transform in a record and run the function in it; returns what ``finish`` makes
        of the function's result.

        In reverse mode, only those of the function's arguments that are differentiated require
        grad.
        """
        wanted = frozenset() if kind.forward else frozenset(self.active)
        avals = [
            a.with_grad(k in wanted)
            for k, a in enumerate(avals_of([x for x in self.leaves if isinstance(x, torch.Tensor)]))
        ]
        return transforms.entered(
            recorder, self.func, kind, params, self.leaves, self.spec, avals, more, finish
        )

    @functools.cached_property
    def call(self) -> Call:
        return Call(self.leaves, self.spec, split_arrays(self.leaves))

    @functools.cached_property
    def traceable(self) -> Traceable:
        traceable = self.call.traceable(self.func)
        traceable.sources = self.call.arrays
        return traceable

    def split(self, values: list[Any]) -> list[Any]:
        """The differentiated values among all values."""
        return [values[k] for k in self.active]

    def merge(self, values: list[Any], diff: Sequence[jax.Array]) -> list[Any]:
        """All values, with the differentiated ones replaced."""
        return replaced(values, self.active, diff)

    def body(
        self,
        values: list[Any],
        kind: Kind,
        finish: Any,
        found: list[Result],
        count: Callable[[Any], int],
    ) -> Callable[..., Any]:
        """The function of the differentiated values alone: (outputs to differentiate, everything
        else).
        """

        if kind.reverse:
            saved_tensor_hooks.refuse_hooks()
            self.traceable.active = frozenset(self.active)

        def run(*diff: jax.Array) -> tuple[list[Any], list[Any]]:
            with push(kind) as level:
                level.probe = private_jax.trace_of(diff[0]) if diff else None
                level.strict = self.strict
                level.root.strict = level.root.strict or self.strict
                saved = (
                    saved_tensor_hooks.without_hooks() if kind.reverse else contextlib.nullcontext()
                )
                recording = kind.reverse or torch.is_grad_enabled()
                ordinary = (
                    torch.inference_mode(False)
                    if torch.is_inference_mode_enabled()
                    else contextlib.nullcontext()
                )
                with (
                    ordinary,
                    torch.set_grad_enabled(recording),
                    private.set_forward_mode_enabled(True),
                    saved,
                ):
                    result = self.traceable.run(level, self.merge(values, diff), finish)
            found[:] = [result]
            n = count(result.meta)
            return result.values[:n], result.values[n:]

        return run


def _scalar(out: Any, has_aux: bool, api: str) -> tuple[list[Any], Any]:
    """The scalar output of a function under grad, followed by its aux tensors,
    and the spec of aux.
    """
    aux: Any = None
    if has_aux:
        out, aux = _args.pair(out, api)
    if not isinstance(out, torch.Tensor):
        instead = (
            "; return (loss, aux) with has_aux=True"
            if isinstance(out, tuple)
            else "; return the tensor itself, without .item()"
        )
        raise RuntimeError(f"{api}: Expected f(*args) to return a Tensor, got {type(out)}{instead}")
    if out.dim() != 0:
        raise RuntimeError(
            f"{api}: Expected f(*args) to return a scalar Tensor, got tensor with {out.dim()} "
            "dims. Maybe you wanted to use the vjp or jacrev APIs instead? A loss is a scalar "
            "after .sum() or .mean()."
        )
    if out.is_complex():
        raise RuntimeError(
            f"{api}: grad can be implicitly created only for real scalar outputs but got "
            f"{out.dtype}; take its .real or .abs()"
        )
    aux_tensors, aux_spec = _args.aux_leaves(aux) if has_aux else ([], None)
    return [out, *aux_tensors], aux_spec


def gradients_and_value(
    func: Callable[..., Any],
    argnums: argnums_t,
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    api: str = "grad_and_value(f)(*args)",
) -> tuple[Any, Any]:
    """The gradients and the value; api: how errors name the call."""
    _args.check(argnums)
    finish = functools.partial(_scalar, has_aux=has_aux, api=api)
    leaves, spec = trees.flatten((args, kwargs))

    def build(target: Differentiated, outs: Sequence[Any], aux_spec: Any) -> tuple[Any, Any]:
        n = len(target.active)
        gradients = trees.unflatten(target.diff_spec, outs[:n])
        return gradients, (outs[n], trees.unflatten(aux_spec, outs[n + 1 :])) if has_aux else outs[
            n
        ]

    def record(recorder: Recorder) -> Any:
        target = Differentiated(func, leaves, spec, argnums, api)
        tensors, aux_spec = target.entered(recorder, GRAD, target.active, finish)
        outs = recorder.end((), tensors, fresh([*target.diff_leaves, *tensors]))
        return outs, lambda outs: build(target, outs, aux_spec)

    done = transforms.transform(func, leaves, record)
    if done is not transforms.NOT_RECORDED:
        return done
    target = Differentiated(func, leaves, spec, argnums, api)

    def compute(values: list[Any]) -> Result:
        found: list[Result] = []
        body = target.body(values, GRAD, finish, found, lambda _: 1)
        (out,), pull, rest = varying.vjp(body, *target.split(values), has_aux=True)
        if jnp.issubdtype(out.dtype, jnp.inexact):
            grads = as_gradients(pull([jnp.ones((), out.dtype)]), "grad")
        else:
            grads = [jnp.zeros_like(v) for v in target.split(values)]
        done = found[0].after([*grads, out, *rest], len(grads))
        done.like = target.split(target.call.arrays)
        return done

    return build(target, *apply(compute, target.call.arrays))


def _grad_again(
    body: Callable[..., Any], operands: list[Any], active: tuple[int, ...], _: Any
) -> Any:
    if not active:  # the arguments have no leaves, as the parameters of a module that has none
        return list(body(*operands)), None

    def f(*arguments: Any) -> Any:
        out, *aux = body(*arguments)
        return out, tuple(aux)

    gradients, (value, aux) = gradients_and_value(f, active, True, tuple(operands), {})
    return [*gradients, value, *aux], None


def _grad_in_torch(operands: Sequence[torch.Tensor], active: tuple[int, ...]) -> Level:
    with private.grad_level() as level, torch.enable_grad():
        arguments = private.differentiated(operands, active, level)
        (out, *aux), _ = yield arguments
        wanted = [arguments[k] for k in active]
        gradients = private.pulled_back([out], wanted, None, create_graph=True)
        outs = private.out_of(level, [*gradients, out, *aux])
    return outs, None


GRAD.again, GRAD.in_torch = _grad_again, _grad_in_torch


_torchs = torch.func.vjp  # even after ``patch()``


@handing_over.call(_torchs)
def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """func's value, and the function that pulls cotangents back through func.

    Args:
        func: returns floating tensors in any pytree; with has_aux a tuple of it and a tree of
            tensors.
        primals: func's positional arguments, pytrees of floating tensors.
        has_aux: whether func returns (output, aux).

    Returns:
        (output, vjp_fn), with has_aux (output, vjp_fn, aux). vjp_fn takes cotangents of the
            output's structure and shapes, converts
        them to its dtypes, and returns a tuple with a cotangent for each primal, of the primal's
            structure, shapes and dtypes. None as
        a cotangent of one number is 1.

    Raises:
        RuntimeError: an output is not a floating tensor; a primal has an integer dtype; (by vjp_fn)
            cotangents of another structure or shape than the output, or complex ones where the
            output is real, or the other way round.
        TypeError: (by vjp_fn) a cotangent is not a tensor.
        ValueError: a primal is not a tensor.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.vjp.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import vjp
        >>> out, pull = vjp(torch.sin, torch.zeros(2))
        >>> pull(torch.ones(2))
        (tensor([1., 1.]),)
    """
    return vjp_with_argnums(func, primals, None, has_aux)


def vjp_with_argnums(
    func: Callable[..., Any], primals: tuple[Any, ...], argnums: argnums_t | None, has_aux: bool
) -> Any:
    """``vjp`` with respect to some of the primals; argnums None: all of them."""
    api = "vjp(f, *primals)"
    finish = functools.partial(_args.to_pull_back, has_aux=has_aux, api=api)
    leaves, spec = trees.flatten((primals, {}))

    def in_torch() -> Callable[..., Any]:
        return _torchs(func, *primals, has_aux=has_aux)[1]

    def build(outs: Sequence[Any], meta: tuple[Any, int, Any], vjp_fn: Callable[..., Any]) -> Any:
        out_spec, n, aux_spec = meta
        output = trees.unflatten(out_spec, outs[:n])
        return (
            (output, vjp_fn, trees.unflatten(aux_spec, outs[n:])) if has_aux else (output, vjp_fn)
        )

    def record(recorder: Recorder) -> Any:
        target = Differentiated(func, leaves, spec, argnums, api)
        tensors, meta = target.entered(recorder, VJP, target.active, finish)
        out_spec, n, _ = meta
        outs = recorder.end(n, tensors, fresh(tensors))
        kept = transforms.Kept(func, recorder, outs)
        inputs, diff_spec, shapes = (
            fresh(target.diff_leaves),
            target.diff_spec,
            _shapes(tensors[:n]),
        )

        def vjp_fn(
            cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None
        ) -> Any:
            with transforms.unwatched():
                leaves = _cotangent_leaves(cotangents, out_spec, shapes)
            return kept.call(
                _converted(leaves, shapes),
                inputs,
                lambda grads: trees.unflatten(diff_spec, grads),
                lambda: vjp_with_argnums(func, primals, argnums, has_aux)[1](cotangents),
            )

        return outs, lambda outs: build(outs, meta, kept.either(vjp_fn, in_torch))

    done = transforms.transform(func, leaves, record, lasting=True)
    if done is not transforms.NOT_RECORDED:
        return done
    target = Differentiated(func, leaves, spec, argnums, api)
    pullback = Linear(target.call.arrays)

    def compute(values: list[Any]) -> Result:
        found: list[Result] = []
        body = target.body(values, VJP, finish, found, lambda meta: meta[1])
        outs, pull, rest = varying.vjp(body, *target.split(values), has_aux=True)
        held = pullback.residuals(pull)
        return found[0].after([*held, *outs, *rest], len(held))

    before = autograd.versions(target.call.arrays)
    outs, meta = apply(compute, target.call.arrays, lasting=True)
    outs = pullback.left(outs)
    out_spec, n, _ = meta
    shapes = _shapes(outs[:n])
    versions = before if any(isinstance(o, torch.Tensor) and o.requires_grad for o in outs) else []

    def vjp_fn(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        leaves = _converted(_cotangent_leaves(cotangents, out_spec, shapes), shapes)
        autograd.check_unchanged(versions)

        def back(pull: Callable[..., Any], values: list[Any]) -> Result:
            return Result(
                as_gradients(pull([conj(c) for c in values]), "vjp"),
                like=target.split(target.call.arrays),
            )

        return trees.unflatten(target.diff_spec, pullback.call(back, leaves))

    return build(outs, meta, handing_over.either(vjp_fn, in_torch))


def _vjp_again(
    body: Callable[..., Any], operands: list[Any], active: tuple[int, ...], n: int
) -> Any:
    if not active:
        return list(body(*operands)), lambda cotangents: []

    def f(*arguments: Any) -> Any:
        outs = body(*arguments)
        return tuple(outs[:n]), tuple(outs[n:])

    output, pull, aux = vjp_with_argnums(f, tuple(operands), active, True)
    return [*output, *aux], lambda cotangents: list(pull(tuple(cotangents)))


def _vjp_in_torch(operands: Sequence[torch.Tensor], active: tuple[int, ...]) -> Level:
    with private.grad_level() as level, torch.enable_grad():
        arguments = private.differentiated(operands, active, level)
        results, n = yield arguments
        wanted = [arguments[k] for k in active]
        outs = private.out_of(level, results)

    def pull(cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return private.pulled_back(
            results[:n], wanted, cotangents, create_graph=torch.is_grad_enabled()
        )

    return outs, pull


VJP.again, VJP.in_torch = _vjp_again, _vjp_in_torch


def _shapes(outputs: Sequence[Any]) -> list[Any]:
    return [(tuple(o.shape), _args.dtype_of(o)) for o in outputs]


def _cotangent_leaves(cotangents: Any, out_spec: Any, shapes: list[Any]) -> list[Any]:
    leaves, spec = trees.flatten(cotangents)
    if spec != out_spec:
        raise RuntimeError(
            "Expected pytree structure of cotangents to be the same as pytree structure of outputs "
            f"to the function. cotangents: {spec}, primal output: {out_spec}"
        )
    for i, (c, (shape, dtype)) in enumerate(zip(leaves, shapes, strict=True)):
        if c is None:
            if math.prod(shape) != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            if dtype.is_complex:
                raise RuntimeError(
                    f"grad can be implicitly created only for real scalar outputs but got {dtype}"
                )
            leaves[i] = torch.ones(shape, dtype=dtype)
        elif not is_array(c):
            raise TypeError(
                f"vjp_fn: expected cotangents to be tensors, got {type(c)} at flattened index {i}"
            )
        elif tuple(c.shape) != shape:
            raise RuntimeError(
                f"Mismatch in shape: grad_output[{i}] has a shape of {tuple(c.shape)} and "
                f"output[{i}] has a shape of {shape}; give cotangents of the output's shape"
            )
        elif _args.dtype_of(c).is_complex != dtype.is_complex:
            raise RuntimeError(
                "For complex Tensors, both grad_output and output are required to have the same "
                f"dtype. Mismatch in dtype: grad_output[{i}] has a dtype of {_args.dtype_of(c)} "
                f"and output[{i}] has a dtype of {dtype}; give cotangents of the output's dtype"
            )
    return leaves


def _converted(cotangents: list[Any], shapes: list[Any]) -> list[Any]:
    """Cotangents in the outputs' dtypes, as PyTorch's autograd converts them."""
    given = zip(cotangents, shapes, strict=True)
    return [
        c.to(dtype) if isinstance(c, torch.Tensor) else c.astype(dtypes.to_jax(dtype))
        for c, (_, dtype) in given
    ]
