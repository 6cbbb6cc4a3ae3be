"""Calls that torch itself must see: they are handed over to torch.func's own transform.

torch.compile, torch.export, torch.jit.trace, make_fx, FakeTensorMode and other dispatch modes, and
the levels of torch.func and torch.autograd.forward_ad see torch's operators, and no computation in
JAX.

All calls are handed over in a process that was forked from one that had used JAX, such as a worker
of a DataLoader: JAX's threads do not exist in it, and a compilation would wait for them for ever. A
call whose function turns out to do what only PyTorch can do, such as giving a captured tensor other
memory, starts again in torch.func.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import torch
from torch.compiler import is_dynamo_compiling
from torch.jit import is_tracing

from bridge import private, private_jax
from bridge.convert import arrays, sparse, tensors, trees
from bridge.convert.sparse import SparseOperand
from bridge.convert.tensors import refuse_nested
from bridge.errors import NeedsJax, NeedsTorch, for_user, public
from bridge.process import having, process
from bridge.programs import closure_scan
from bridge.trace.levels import state
from bridge.trace.tracing import HANDED_IN

_log = logging.getLogger("torchfunc_jax")
_Function = TypeVar("_Function", bound=Callable[..., Any])
# each call asks for these
_transformed, _dispatch_modes = private.transformed_by_torch, private.count_of_dispatch_modes


def torch_looks(given: Any) -> bool:
    """Whether something of torch's watches the operators of a call with these arguments, or JAX
    cannot compute in this process.

    Dynamo cannot trace this function: ask ``is_dynamo_compiling`` first. Our own traces are
    dispatch modes too, but a transform of torch.func's in one of them is inside of it, and what is
    inside the transform is torch's.
    """
    looks = (
        process.forked
        or _transformed()
        or is_tracing()
        or (_dispatch_modes() and state.level is None and state.recorder is None)
    )
    if not looks:
        return False
    # torch cannot compute with them
    return not any(isinstance(x, jax.Array) for x in trees.flatten(given)[0])


def has_fake(func: Any, given: Any) -> bool:
    """Whether a FakeTensor is among the arguments of an outermost call or is captured: without
    values, it is always torch's.
    """
    if state.level is not None or state.recorder is not None:
        return False
    leaves = trees.flatten(given)[0]
    captured = closure_scan.scan(func, *filter(callable, leaves), deeper=True).tensors.values()
    return any(map(private.is_fake, [*leaves, *[t for t, _ in captured]]))


class OfArrays(Exception):
    """Raised by a transform that is called with jax.Arrays: it is one of torch tensors with their
    values.
    """


def _as_tensors(given: Any) -> Any:
    """A tree with tensors in the place of the jax.Arrays that torch can have; a write to one does
    not change the array.
    """
    return trees.map_leaves(
        lambda x: arrays.to_torch(x) if isinstance(x, jax.Array) and tensors.fits_torch(x) else x,
        given,
    )


def _as_arrays(out: Any) -> Any:
    """A tree with jax.Arrays in the place of tensors, and of functions that give tensors."""

    def converted(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return arrays.to_jax(x)
        return (
            functools.wraps(x)(lambda *args, **kwargs: _as_arrays(x(*args, **kwargs)))
            if isinstance(x, types.FunctionType)
            else x
        )

    with jax.enable_x64(True):
        return trees.map_leaves(converted, out)


def either(
    ours: Callable[..., Any], theirs: Callable[[], Callable[..., Any]], nested: bool = False
) -> Callable[..., Any]:
    """A function that runs ours, or what ``theirs`` returns if torch looks or an argument is a
    FakeTensor.

    nested: ours takes nested tensors.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or torch_looks((args, kwargs)):
            return theirs()(*args, **kwargs)
        try:
            return _attempt(run, ours, theirs, nested, args, kwargs)
        except Exception as error:
            for_user(error)
            raise

    return run


def _attempt(
    run: Callable[..., Any],
    ours: Callable[..., Any],
    theirs: Callable[[], Callable[..., Any]],
    nested: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A call of ours, or of theirs if it turns out that only torch can run it; run: the function of
    ``either`` that is called.
    """
    try:
        return _ours(ours, args, kwargs)
    except OfArrays:
        if not any(isinstance(x, jax.Array) for x in trees.flatten((args, kwargs))[0]):
            raise TypeError(
                "a transform inside of the function has jax.Arrays as arguments; convert them by "
                "bridge.to_torch"
            ) from None
        try:
            with having(state, of_arrays=True):
                return _as_arrays(run(*_as_tensors(args), **_as_tensors(kwargs)))
        except NeedsJax:
            with having(state, in_jax=True):
                return _ours(ours, args, kwargs)
    except SparseOperand as refused:
        return _ours(ours, *sparse.enclosed((args, kwargs), refused))
    except NeedsTorch as reason:
        if state.level is not None or state.recorder is not None:
            raise
        _log.info("%s runs in torch.func: %s", getattr(ours, "__qualname__", ours), reason)
        mode = HANDED_IN["library_operators_in_torch"]
        with mode() if process.library_operators else contextlib.nullcontext():
            return theirs()(*args, **kwargs)
    except TypeError:
        # asked only now: it costs a look at each argument and at what the function captures
        if has_fake(ours, (args, kwargs)):
            return theirs()(*args, **kwargs)
        raise
    except (AttributeError, IndexError, RuntimeError, ValueError):
        leaves = [] if nested else trees.flatten((args, kwargs))[0]
        if state.level is None and state.recorder is None and any(map(_is_nested, leaves)):
            return theirs()(*args, **kwargs)
        # PyTorch's own errors about the shape of a nested tensor do not say what to do
        refuse_nested(leaves)
        raise


def _is_nested(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_nested


@private.opaque
def _ours(ours: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return ours(*args, **kwargs)


def refuse_no_function(func: Any, api: str) -> None:
    """Raise TypeError, as a call of it would, for what is no function."""
    if not callable(func):
        raise TypeError(
            f"{api}: expected a function, got {type(func)}, and a {type(func).__name__} object is "
            f"not callable; give the function itself, and its arguments to what {api} returns: "
            f"{api}(f)(x), not {api}(f(x))"
        )


def transform(theirs: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorator of a transform that takes a function and returns one; theirs: torch.func's own."""

    def decorate(make: Any) -> Any:
        @functools.wraps(make)
        def made(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return theirs(func, *args, **kwargs)
            refuse_no_function(func, make.__name__)
            # a dict would be compared at each call of a jitted function that captures this one
            options = tuple(kwargs.items())
            return functools.wraps(func)(
                either(make(func, *args, **kwargs), lambda: theirs(func, *args, **dict(options)))
            )

        return public(made)

    return decorate


def call(theirs: Callable[..., Any], nested: bool = False) -> Callable[[_Function], _Function]:
    """Decorator of a function that computes at once, as vjp does; theirs: torch.func's own; nested:
    it takes nested tensors.
    """
    return lambda ours: functools.wraps(ours)(either(ours, lambda: theirs, nested))  # type: ignore[return-value]


def _before_fork() -> None:
    process.uses_jax = private_jax.has_started()


def _in_child() -> None:
    process.forked = process.forked or process.uses_jax
    if process.forked:
        private_jax.keep_threads()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
