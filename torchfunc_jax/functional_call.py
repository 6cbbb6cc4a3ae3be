"""Calling a module with other parameters, and stacking the states of many modules: torch.func's
module utilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from bridge.boundary import handing_over
from bridge.boundary.calls import plain
from bridge.convert import trees
from bridge.errors import public
from bridge.modules import SWAPPING, own_tensors

# torch's own function, even after ``patch()`` has replaced it
_torch_functional_call = torch.func.functional_call


def _restoring(module: Any, given: Any, *args: Any, **options: Any) -> Any:
    """torch's own function, after which the module has its own tensors."""
    if is_dynamo_compiling() or not isinstance(module, nn.Module):
        return _torch_functional_call(module, given, *args, **options)
    with own_tensors(module, given):
        return _torch_functional_call(module, given, *args, **options)


def _in_torch(
    module: nn.Module,
    parameter_and_buffer_dicts: Any,
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
    return_buffers: bool = False,
) -> Any:
    """functional_call of torch tensors."""
    if not return_buffers:
        try:
            return _restoring(
                module,
                parameter_and_buffer_dicts,
                args,
                kwargs,
                tie_weights=tie_weights,
                strict=strict,
            )
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            if (found := _unlike(module, parameter_and_buffer_dicts)) and found not in getattr(
                error, "__notes__", ()
            ):
                error.add_note(found)
            raise
    state, names = _copied(module, parameter_and_buffer_dicts, strict)
    # it puts into the dict the tensors with which the module replaces others
    out = _restoring(module, state, args, kwargs, tie_weights=tie_weights, strict=strict)
    return out, {name: state[name] for name in names}


@handing_over.call(_in_torch, nested=True)
def functional_call(
    module: nn.Module,
    parameter_and_buffer_dicts: dict[str, Any] | Sequence[dict[str, Any]],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
    return_buffers: bool = False,
) -> Any:
    """Call a module with these parameters and buffers instead of its own.

    Args:
        module: any nn.Module.
        parameter_and_buffer_dicts: name -> tensor (torch.Tensor or jax.Array) of any shape and
            dtype that the module can compute with, or several such dicts without common names;
            names that are missing have the module's own tensors.
        args: the arguments of the call, a tuple or a single one.
        kwargs: its keyword arguments.
        tie_weights: parameters that are tied in the module are tied in the call too.
        strict: every parameter and buffer of the module must be given, and no other.
        return_buffers: return the buffers after the call too, and change none in place: neither the
            module's nor those that are given. torch.func does not have it. For modules that update
            buffers, such as BatchNorm in training mode, under grad and vmap, which refuse in-place
            changes of captured buffers.

    Returns:
        The module's output for these arguments; its tensors are jax.Arrays if any jax.Array was
            given. With return_buffers (output,
        buffers), where buffers has each buffer of the module by its name: new tensors of the shapes
            and dtypes of those before the call.

    Raises:
        ValueError: a name is in several dicts; a value is not a dict; tied parameters have
            different values.
        RuntimeError: strict, and names are missing or unknown.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import functional_call
        >>> model = torch.nn.Linear(2, 1)
        >>> functional_call(
        ...     model, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, torch.ones(1, 2)
        ... )
        tensor([[2.]])
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> out, buffers = functional_call(norm, {}, torch.ones(4, 2), return_buffers=True)
        >>> buffers["running_mean"], norm.running_mean
        (tensor([0.1000, 0.1000]), tensor([0., 0.]))
    """
    given = (parameter_and_buffer_dicts, args, kwargs)
    if any(isinstance(x, jax.Array) for x in trees.flatten(given)[0]):

        def run(parameters: Any, args: Any, kwargs: Any) -> Any:
            return functional_call(
                module,
                parameters,
                args,
                kwargs,
                tie_weights=tie_weights,
                strict=strict,
                return_buffers=return_buffers,
            )

        return plain(run)(*given)
    with SWAPPING:
        return _in_torch(
            module,
            parameter_and_buffer_dicts,
            args,
            kwargs,
            tie_weights=tie_weights,
            strict=strict,
            return_buffers=return_buffers,
        )


def _unlike(module: Any, given: Any) -> str | None:
    """What about the arguments of functional_call may have led to an error; None if nothing is
    unusual.
    """
    if not isinstance(module, nn.Module):
        kind = (
            f"the class {module.__name__}; make a module of it"
            if isinstance(module, type)
            else str(type(module))
        )
        return f"functional_call: module: expected an nn.Module, got {kind}"
    dicts = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(d, dict) for d in dicts):
        got = ", ".join(
            "Tensor" if isinstance(d, torch.Tensor) else type(d).__name__ for d in dicts[:3]
        )
        return (
            "functional_call: parameter_and_buffer_dicts: expected a dict, such as "
            f"dict(module.named_parameters()), got {got}"
        )
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for name, t in ((name, t) for d in dicts for name, t in d.items()):
        if name not in own:
            names = ", ".join(map(repr, [*own][:6])) + (", ..." if len(own) > 6 else "")
            return (
                "functional_call: parameter_and_buffer_dicts: the module has "
                f"no {name!r}; it has {names}"
            )
        if not isinstance(t, torch.Tensor):
            return (
                f"functional_call: parameter_and_buffer_dicts: {name!r}: expected "
                f"a tensor, got {type(t)}"
            )
        if (t.shape, t.dtype) != (own[name].shape, own[name].dtype):
            return (
                f"functional_call: parameter_and_buffer_dicts: {name!r} has shape {tuple(t.shape)} "
                f"and dtype {t.dtype}, expected the module's own {tuple(own[name].shape)} and "
                f"{own[name].dtype}"
            )
    return None


def _copied(module: nn.Module, given: Any, strict: bool) -> tuple[dict[str, Any], list[str]]:
    """One dict of what is given, with copies of the buffers and, unless strict, of the module's
    buffers that are missing; their names.
    """
    known = dict(module.named_buffers(remove_duplicate=False))
    dicts = [given] if isinstance(given, dict) else list(given)
    if not all(isinstance(d, dict) for d in dicts):
        raise ValueError(
            "parameter_and_buffer_dicts: expected a dict, or several dicts, got "
            f"{[type(d).__name__ for d in dicts]}"
        )
    state = {name: t.clone() if name in known else t for d in dicts for name, t in d.items()}
    if len(state) < sum(map(len, dicts)):
        names = [name for name in state if sum(name in d for d in dicts) > 1]
        raise ValueError(
            f"parameter_and_buffer_dicts: {names} appeared in multiple dictionaries; give each "
            "name in one of them"
        )
    there = {id(known[name]) for name in state if name in known}
    state |= {
        name: t.clone() for name, t in module.named_buffers() if not strict and id(t) not in there
    }
    return state, [name for name in state if name in known]


@public
def stack_module_state(
    models: Sequence[nn.Module] | nn.ModuleList,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and buffers of many modules of one class, stacked by name along a new first
    dimension.

    Args:
        models: M modules of the same class and mode, at least one.

    Returns:
        (params, buffers): name -> tensor of shape ``[M, *shape]``; dtypes stay; params are new
            leaves that require grad if the
        modules' parameters do.

    Raises:
        RuntimeError: there are no models, or they differ in class, mode, or a parameter's
            requires_grad.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.stack_module_state.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import stack_module_state
        >>> params, buffers = stack_module_state([torch.nn.Linear(3, 2) for _ in range(5)])
        >>> params["weight"].shape
        torch.Size([5, 2, 3])
    """
    check_alike(models, "stack_module_state")
    params = [dict(m.named_parameters()) for m in models]
    buffers = [dict(m.named_buffers()) for m in models]
    return (
        {k: construct_stacked_leaf([p[k] for p in params], k) for k in params[0]},
        {k: construct_stacked_leaf([b[k] for b in buffers], k) for k in buffers[0]},
    )


def check_alike(models: Sequence[nn.Module] | nn.ModuleList, api: str) -> None:
    """Refuse modules that cannot form an ensemble: there are none,
    or they differ in class or mode.
    """
    if not isinstance(models, Sequence | nn.ModuleList):
        raise TypeError(f"{api}: models: expected a list of modules, got {type(models)}")
    if unlike := next((m for m in models if not isinstance(m, nn.Module)), None):
        raise AttributeError(
            f"{api}: models: expected modules, got a {type(unlike).__name__}; "
            "give the modules themselves"
        )
    if len(models) == 0:
        raise RuntimeError(f"{api}: Expected at least one model, got 0. Give a list of modules.")
    if len({m.training for m in models}) > 1:
        raise RuntimeError(
            f"{api}: Expected all models to have the same training/eval mode. Call train() or "
            "eval() on each."
        )
    if len({type(m) for m in models}) > 1:
        got = ", ".join(dict.fromkeys(type(m).__name__ for m in models))
        raise RuntimeError(
            f"{api}: Expected all models to be of the same class. Got {got}; "
            "stack those of each class apart."
        )


def construct_stacked_leaf(
    tensors: tuple[torch.Tensor, ...] | list[torch.Tensor], name: str
) -> torch.Tensor:
    """The tensors stacked along a new first dimension; a new leaf that requires grad if all of them
    do.

    Args:
        tensors: M tensors of one shape.
        name: the name in the error's message.

    Returns:
        torch.Tensor: of shape ``[M, *shape]``.

    Raises:
        RuntimeError: some require grad and some do not.

    Source: ``torch._functorch.functional_call.construct_stacked_leaf``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.functional_call import construct_stacked_leaf
        >>> construct_stacked_leaf([torch.ones(2), torch.zeros(2)], "weight")
        tensor([[1., 1.],
                [0., 0.]])
    """
    if len({t.requires_grad for t in tensors}) > 1:
        raise RuntimeError(f"Expected {name} from each model to have the same .requires_grad")
    shapes = list(dict.fromkeys(tuple(t.shape) for t in tensors))
    if len(shapes) > 1:
        got = ", ".join(map(str, shapes))
        raise RuntimeError(
            f"{name}: stack expects each tensor to be equal size, but the models have {got}; make "
            "all of one size"
        )
    result = torch.stack(list(tensors))
    return result.detach().requires_grad_() if tensors[0].requires_grad else result
