"""functorch's functions that take a module apart into a function and a tuple of tensors, with
functorch's names and file name.

New code uses ``functional_call`` and ``stack_module_state``; these functions are for programs
written for functorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
import torch
from torch import Tensor, nn

from bridge.boundary.calls import plain
from bridge.convert import trees
from torchfunc_jax.functional_call import SWAPPING, check_alike

Names = tuple[str, ...]
Tensors = tuple[Tensor, ...]
NamesMap = dict[str, list[str]]


def raise_parameter_tying_error() -> NoReturn:
    """Raise functorch's error about tied parameters. Nothing here calls it: tied parameters are
    supported.

    Raises:
        RuntimeError: always.

    Source: ``torch._functorch.make_functional.raise_parameter_tying_error``.

    Example:
        >>> from torchfunc_jax.make_functional import raise_parameter_tying_error
        >>> raise_parameter_tying_error()
        Traceback (most recent call last):
        RuntimeError: make_functional(module): we don't yet support models that do parameter
        tying ...
    """
    raise RuntimeError(
        "make_functional(module): we don't yet support models that do parameter tying (also "
        "sometimes known as weight sharing). Please rewrite the model by replacing all instances "
        "of the tied parameter with another"
    )


# -- one tensor of a module, by its dotted name ----------------------------------------------------
def _place(mod: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return mod.get_submodule(path), attribute


def _get(mod: nn.Module, name: str) -> Any:
    owner, attribute = _place(mod, name)
    return getattr(owner, attribute)


def _set(mod: nn.Module, name: str, value: Tensor | None) -> None:
    """Replace a parameter or buffer by a tensor,
    which keeps its type and so its autograd history.
    """
    if value is not None and not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value)}")
    owner, attribute = _place(mod, name)
    stores: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
    for store in stores:
        if attribute in store:
            store[attribute] = value
            return
    setattr(owner, attribute, value)


def _set_all(
    mod: nn.Module, names: Sequence[str], values: Sequence[Tensor], what: str = ""
) -> None:
    if len(names) != len(values):
        raise AssertionError(
            f"expected one tensor for each of the {len(names)} {what}names, got {len(values)}"
        )
    for name, value in zip(names, values):
        _set(mod, name, value)


def _swap_state(mod: nn.Module, names_map: NamesMap, values: Iterable[Any]) -> list[Any]:
    """Put values under every alias of each name, and return the earlier values, which are restored
    if a value does not fit.
    """
    values = list(values)
    if len(values) != len(names_map):
        raise RuntimeError(
            f"expected {len(names_map)} tensors ({', '.join(names_map)}), got {len(values)}"
        )
    before = [_get(mod, aliases[0]) for aliases in names_map.values()]
    try:
        _fill(mod, names_map, values)
    except BaseException:
        _fill(mod, names_map, before)
        raise
    return before


def _fill(mod: nn.Module, names_map: NamesMap, values: Sequence[Any]) -> None:
    for aliases, value in zip(names_map.values(), values):
        for name in aliases:
            _set(mod, name, value)


# -- a module's tensors, taken out and put in again ------------------------------------------------
def create_names_map(
    named_params: dict[str, Tensor] | Iterable[tuple[str, Tensor]],
    tied_named_params: dict[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> NamesMap:
    """All names of each tensor.

    Args:
        named_params: name -> tensor, with one name of each tensor.
        tied_named_params: name -> tensor, with all names of each tensor.

    Returns:
        dict: name in named_params -> list of the names of its tensor in tied_named_params.

    Raises:
        AssertionError: tied_named_params lacks a name, or named_params lacks a tensor.

    Source: ``torch._functorch.make_functional.create_names_map``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.make_functional import create_names_map
        >>> a, b = torch.ones(1), torch.ones(1)
        >>> create_names_map({"A": a, "B": b}, {"A": a, "B": b, "B_tied": b})
        {'A': ['A'], 'B': ['B', 'B_tied']}
    """
    unique, every = dict(named_params), dict(tied_named_params)
    if not unique.keys() <= every.keys():
        raise AssertionError(
            f"named_params: {sorted(unique.keys() - every.keys())} not among tied_named_params"
        )
    aliases: dict[int, tuple[str, list[str]]] = {id(t): (name, []) for name, t in unique.items()}
    for name, t in every.items():
        if id(t) not in aliases:
            raise AssertionError(
                f"tied_named_params: the tensor of {name!r} is not among named_params"
            )
        aliases[id(t)][1].append(name)
    return dict(aliases.values())


def _extract(
    mod: nn.Module, members: Callable[..., Any], kind: Callable[[Tensor], Tensor]
) -> tuple[Tensors, Names, NamesMap]:
    every, unique = dict(members(remove_duplicate=False)), dict(members(remove_duplicate=True))
    names_map = create_names_map(unique, every)
    _fill(mod, names_map, [kind(torch.empty_like(t, device="meta")) for t in unique.values()])
    return tuple(unique.values()), tuple(unique), names_map


def extract_weights(mod: nn.Module) -> tuple[Tensors, Names, NamesMap]:
    """Take all parameters out of a module; tensors on the device "meta", with shapes and dtypes but
    no values, replace them.

    Args:
        mod: changed in place; unusable until ``load_weights``.

    Returns:
        (params, names, names_map): each parameter once, its name, and a dict from its name to all
            its names.

    Source: ``torch._functorch.make_functional.extract_weights``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.make_functional import extract_weights
        >>> params, names, _ = extract_weights(torch.nn.Linear(3, 2))
        >>> names
        ('weight', 'bias')
    """
    return _extract(mod, mod.named_parameters, nn.Parameter)


def extract_buffers(mod: nn.Module) -> tuple[Tensors, Names, NamesMap]:
    """Take all buffers out of a module, as ``extract_weights`` does its parameters.

    Args:
        mod: changed in place; unusable until ``load_buffers``.

    Returns:
        (buffers, names, names_map): as in ``extract_weights``.

    Source: ``torch._functorch.make_functional.extract_buffers``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.make_functional import extract_buffers
        >>> extract_buffers(torch.nn.BatchNorm1d(3))[1]
        ('running_mean', 'running_var', 'num_batches_tracked')
    """
    return _extract(mod, mod.named_buffers, lambda t: t)


def load_weights(
    mod: nn.Module, names: Sequence[str], params: Sequence[Tensor], as_params: bool = False
) -> None:
    """Put parameters into a module: the inverse of ``extract_weights``.

    Args:
        mod: changed in place.
        names: dotted names.
        params: a tensor for each name; they keep their autograd history.
        as_params: make each an ``nn.Parameter`` first.

    Raises:
        AssertionError: the numbers of tensors and names differ.
        AttributeError: the module has no such submodule.
        TypeError: a value is not a tensor.

    Source: ``torch._functorch.make_functional.load_weights``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.make_functional import load_weights
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> load_weights(model, ("weight",), (torch.ones(1, 2),), as_params=True)
        >>> model(torch.ones(1, 2))
        tensor([[2.]], grad_fn=...)
    """
    _set_all(mod, names, [nn.Parameter(p) for p in params] if as_params else params)


def load_buffers(
    mod: nn.Module, names: Sequence[str], buffers: Sequence[Tensor], as_params: bool = False
) -> None:
    """Put buffers into a module: the inverse of ``extract_buffers``.

    Args:
        mod: changed in place.
        names: dotted names.
        buffers: a tensor for each name.
        as_params: has no effect, as in functorch.

    Raises:
        AssertionError, AttributeError, TypeError: as in ``load_weights``.

    Source: ``torch._functorch.make_functional.load_buffers``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.make_functional import load_buffers
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> load_buffers(norm, ["running_mean"], [torch.ones(2)])
        >>> norm.running_mean
        tensor([1., 1.])
    """
    _set_all(mod, names, buffers)


def load_state(
    model: nn.Module,
    weights: Sequence[Tensor],
    weight_names: Sequence[str],
    buffers: Sequence[Tensor] = (),
    buffer_names: Sequence[str] = (),
) -> nn.Module:
    """Put parameters and buffers into a module: the inverse of ``make_functional_deprecated_v1``.

    Args:
        model: changed in place.
        weights, weight_names: the parameters and their names.
        buffers, buffer_names: the buffers and their names.

    Returns:
        nn.Module: the model.

    Raises:
        AssertionError: the numbers of tensors and names differ.

    Source: ``torch._functorch.make_functional.load_state``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.make_functional import load_state, make_functional_deprecated_v1
        >>> model = torch.nn.Linear(2, 1)
        >>> weights, func, names = make_functional_deprecated_v1(model)
        >>> load_state(model, weights, names)(torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """
    _set_all(model, weight_names, weights, "weight ")
    if len(buffers) > 0:
        _set_all(model, buffer_names, buffers, "buffer ")
    return model


# -- make_functional -------------------------------------------------------------------------------
def _refuse_buffers(model: nn.Module, api: str) -> None:
    if next(iter(model.buffers()), None) is not None:
        with_buffers = api.replace("make_functional", "make_functional_with_buffers")
        raise RuntimeError(
            f"{api}(model): `model` has buffers. Please use {with_buffers}(model) instead."
        )


def _call_with(
    model: nn.Module, names_map: NamesMap, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module that has no state of its own with this state; jax.Arrays give jax.Arrays, as in
    ``functional_call``.
    """
    if any(isinstance(x, jax.Array) for x in trees.flatten((state, args, kwargs))[0]):
        return plain(lambda state, args, kwargs: _call_with(model, names_map, state, args, kwargs))(
            state, args, kwargs
        )
    with SWAPPING:
        before = _swap_state(model, names_map, state)
        try:
            return model(*args, **kwargs)
        finally:
            _fill(model, names_map, before)


def _taken_apart(
    model: nn.Module, disable_autograd_tracking: bool, *kinds: Callable[[nn.Module], Any]
) -> tuple[nn.Module, list[Any]]:
    """A copy of the model without these kinds of members, and the result of each extraction."""
    stateless = copy.deepcopy(model)
    parts = [extract(stateless) for extract in kinds]
    if disable_autograd_tracking:
        for p in parts[0][0]:
            p.requires_grad_(False)
    return stateless, parts


class FunctionalModule(nn.Module):
    """The module without parameters that ``make_functional`` returns; it takes the parameters
    before the module's own arguments.

    Args:
        stateless_model: the module.
        param_names: the parameters' names in order.
        names_map: name -> all names of that parameter.

    Source: ``torch._functorch.make_functional.FunctionalModule``.

    Example:
        >>> import torch
        >>> from torchfunc_jax import FunctionalModule, make_functional
        >>> func, params = make_functional(torch.nn.Linear(3, 2))
        >>> isinstance(func, FunctionalModule), func.param_names
        (True, ('weight', 'bias'))
    """

    def __init__(self, stateless_model: nn.Module, param_names: Names, names_map: NamesMap) -> None:
        super().__init__()
        self.stateless_model, self.param_names, self.names_map = (
            stateless_model,
            param_names,
            names_map,
        )

    @staticmethod
    def _create_from(
        model: nn.Module, disable_autograd_tracking: bool = False
    ) -> tuple[FunctionalModule, Tensors]:
        stateless, [(params, names, names_map)] = _taken_apart(
            model, disable_autograd_tracking, extract_weights
        )
        return FunctionalModule(stateless, names, names_map), params

    def forward(self, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        return _call_with(self.stateless_model, self.names_map, tuple(params), args, kwargs)


class FunctionalModuleWithBuffers(nn.Module):
    """The module without parameters and buffers that ``make_functional_with_buffers`` returns.

    Args:
        stateless_model: the module.
        param_names, buffer_names: names in order.
        param_names_map, buffer_names_map: name -> all names of that parameter or buffer.

    Source: ``torch._functorch.make_functional.FunctionalModuleWithBuffers``.

    Example:
        >>> import torch
        >>> from torchfunc_jax import FunctionalModuleWithBuffers, make_functional_with_buffers
        >>> func, params, buffers = make_functional_with_buffers(torch.nn.BatchNorm1d(2))
        >>> isinstance(func, FunctionalModuleWithBuffers), func.buffer_names
        (True, ('running_mean', 'running_var', 'num_batches_tracked'))
    """

    def __init__(
        self,
        stateless_model: nn.Module,
        param_names: Names,
        buffer_names: Names,
        param_names_map: NamesMap,
        buffer_names_map: NamesMap,
    ) -> None:
        super().__init__()
        self.stateless_model, self.param_names, self.buffer_names = (
            stateless_model,
            param_names,
            buffer_names,
        )
        self.all_names_map = {**param_names_map, **buffer_names_map}

    @staticmethod
    def _create_from(
        model: nn.Module, disable_autograd_tracking: bool = False
    ) -> tuple[FunctionalModuleWithBuffers, Tensors, Tensors]:
        stateless, parts = _taken_apart(
            model, disable_autograd_tracking, extract_weights, extract_buffers
        )
        (params, param_names, param_map), (buffers, buffer_names, buffer_map) = parts
        return (
            FunctionalModuleWithBuffers(
                stateless, param_names, buffer_names, param_map, buffer_map
            ),
            params,
            buffers,
        )

    def forward(
        self, params: Iterable[Tensor], buffers: Iterable[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        return _call_with(
            self.stateless_model, self.all_names_map, (*params, *buffers), args, kwargs
        )


def make_functional(
    model: nn.Module, disable_autograd_tracking: bool = False
) -> tuple[FunctionalModule, Tensors]:
    """A module without buffers as a function of its parameters.

    Args:
        model: it is copied; later changes of the copy or the model do not affect the other.
        disable_autograd_tracking: the returned parameters do not require grad, which
            ``torchfunc_jax.grad`` does not need.

    Returns:
        (func, params): ``func(params, *args, **kwargs)`` computes ``model(*args, **kwargs)``. Tied
            parameters appear once.

    Raises:
        RuntimeError: the model has buffers.

    Source: https://docs.pytorch.org/functorch/stable/generated/functorch.make_functional.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import grad, make_functional
        >>> func, params = make_functional(torch.nn.Linear(3, 3), disable_autograd_tracking=True)
        >>> x, t = torch.randn(4, 3), torch.randn(4, 3)
        >>> weight, bias = grad(lambda params: torch.nn.functional.mse_loss(func(params, x), t))(
        ...     params
        ... )
        >>> weight.shape, bias.shape
        (torch.Size([3, 3]), torch.Size([3]))
    """
    _refuse_buffers(model, "make_functional")
    return FunctionalModule._create_from(model, disable_autograd_tracking)


def make_functional_with_buffers(
    model: nn.Module, disable_autograd_tracking: bool = False
) -> tuple[FunctionalModuleWithBuffers, Tensors, Tensors]:
    """A module as a function of its parameters and buffers.

    Args:
        model, disable_autograd_tracking: as in ``make_functional``.

    Returns:
        (func, params, buffers): ``func(params, buffers, *args, **kwargs)`` computes
            ``model(*args, **kwargs)``; buffers that the module
        updates are changed in place.

    Source: https://docs.pytorch.org/functorch/stable/generated/functorch.make_functional_with_buffers.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import make_functional_with_buffers
        >>> func, params, buffers = make_functional_with_buffers(torch.nn.BatchNorm1d(3))
        >>> func(params, buffers, torch.randn(4, 3)).shape
        torch.Size([4, 3])
    """
    return FunctionalModuleWithBuffers._create_from(model, disable_autograd_tracking)


def _bare_copy(model: nn.Module) -> nn.Module:
    """A copy that shares its tensors with the model, because they will be replaced and may have no
    values to copy.
    """
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def make_functional_deprecated_v1(model: nn.Module) -> tuple[Tensors, Callable[..., Any], Names]:
    """functorch's first ``make_functional``, which takes the parameters out of the model itself.

    Args:
        model: changed in place, see ``extract_weights``; ``load_state`` repairs it.

    Returns:
        (weights, func, weight_names): ``func(weights, (x,))`` takes the model's arguments in a
            tuple.

    Raises:
        RuntimeError: the model has buffers.

    Source: ``torch._functorch.make_functional.make_functional_deprecated_v1``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.make_functional import make_functional_deprecated_v1
        >>> weights, func, _ = make_functional_deprecated_v1(torch.nn.Linear(3, 2))
        >>> func(weights, (torch.ones(4, 3),)).shape
        torch.Size([4, 2])
    """
    _refuse_buffers(model, "make_functional_deprecated_v1")
    weights, names, names_map = extract_weights(model)

    def fun(weights: Sequence[Tensor], data: tuple[Any, ...]) -> Any:
        return _call_with(_bare_copy(model), names_map, tuple(weights), data, {})

    return weights, fun, names


def make_functional_with_buffers_deprecated_v1(
    model: nn.Module,
) -> tuple[Tensors, Tensors, Callable[..., Any], Names, Names]:
    """functorch's first ``make_functional_with_buffers``, which takes parameters and buffers out of
    the model itself.

    Args:
        model: changed in place, see ``extract_weights`` and ``extract_buffers``; ``load_state``
            repairs it.

    Returns:
        (weights, buffers, func, weight_names, buffer_names): ``func(weights, buffers, (x,))`` takes
            the model's
        arguments in a tuple.

    Source: ``torch._functorch.make_functional.make_functional_with_buffers_deprecated_v1``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.make_functional import make_functional_with_buffers_deprecated_v1
        >>> weights, buffers, func, _, _ = make_functional_with_buffers_deprecated_v1(
        ...     torch.nn.BatchNorm1d(3)
        ... )
        >>> func(weights, buffers, (torch.randn(4, 3),)).shape
        torch.Size([4, 3])
    """
    weights, names, names_map = extract_weights(model)
    buffers, buffer_names, buffer_map = extract_buffers(model)

    def fun(weights: Sequence[Tensor], buffers: Sequence[Tensor], data: tuple[Any, ...]) -> Any:
        return _call_with(
            _bare_copy(model), {**names_map, **buffer_map}, (*weights, *buffers), data, {}
        )

    return weights, buffers, fun, names, buffer_names


# -- ensembles -------------------------------------------------------------------------------------
def transpose_stack(tuple_of_tuple_of_tensors: tuple[Tensors, ...]) -> Tensors:
    """Stack the first tensors of all tuples, the second ones, and so on, without autograd history.

    Args:
        tuple_of_tuple_of_tensors: M tuples of N tensors.

    Returns:
        tuple: N tensors of shape ``[M, *shape]``.

    Source: ``torch._functorch.make_functional.transpose_stack``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.make_functional import transpose_stack
        >>> transpose_stack(
        ...     ((torch.tensor(1), torch.tensor(2)), (torch.tensor(3), torch.tensor(4)))
        ... )
        (tensor([1, 3]), tensor([2, 4]))
    """
    return tuple(torch.stack(column).detach() for column in zip(*tuple_of_tuple_of_tensors))


def combine_state_for_ensemble(
    models: Sequence[nn.Module],
) -> tuple[FunctionalModuleWithBuffers, Tensors, Tensors]:
    """Stack the parameters and buffers of many modules, with one function for all of them.

    Args:
        models: M modules of the same class and mode, at least one.

    Returns:
        (func, params, buffers): for ``vmap(func, (0, 0, None))(params, buffers, x)``; each tensor
            has a new first dimension of size M.

    Raises:
        RuntimeError: there are no models, or they differ in class or mode.

    Source: https://docs.pytorch.org/functorch/stable/generated/functorch.combine_state_for_ensemble.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import combine_state_for_ensemble, vmap
        >>> func, params, buffers = combine_state_for_ensemble(
        ...     [torch.nn.Linear(3, 3) for _ in range(5)]
        ... )
        >>> vmap(func, (0, 0, None))(params, buffers, torch.randn(64, 3)).shape
        torch.Size([5, 64, 3])
    """
    check_alike(models, "combine_state_for_ensemble")
    funcs, params, buffers = zip(*map(make_functional_with_buffers, models))
    return funcs[0], transpose_stack(params), transpose_stack(buffers)


def _ensemble(
    model_class: Callable[..., nn.Module],
    ensemble_shape: tuple[int, ...],
    device: torch.device | str,
    take_apart: Callable[[nn.Module], Any],
    states: int,
) -> Callable[..., Any]:
    """A constructor of functional ensembles; the first ``states`` results of take_apart are stacked
    over the members.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if len(ensemble_shape) >= 2:
            raise ValueError(
                f"ensemble_shape: expected () or (n,), got {ensemble_shape}: not implemented for "
                "more than 1 element"
            )
        if not ensemble_shape:
            return make_functional_deprecated_v1(model_class(*args, **kwargs).to(device))
        if ensemble_shape[0] <= 0:
            raise ValueError(f"ensemble_shape: num_models {ensemble_shape[0]} should be > 0")
        members = [
            take_apart(model_class(*args, **kwargs).to(device)) for _ in range(ensemble_shape[0])
        ]
        rest = take_apart(model_class(*args, **kwargs))[states:]
        return *(transpose_stack(column) for column in zip(*(m[:states] for m in members))), *rest

    return wrapped


def functional_init(
    model_class: type[nn.Module],
    ensemble_shape: tuple[int, ...] = (),
    device: torch.device | str = "cpu",
) -> Callable[..., Any]:
    """A constructor of a functional module, or of an ensemble of them, from a class of modules
    without buffers.

    Args:
        model_class: a function that makes a module.
        ensemble_shape: () for a single module, (n,) for n of them.
        device: the parameters' device.

    Returns:
        Callable: takes the constructor's arguments, returns (weights, func, weight_names); see
            ``make_functional_deprecated_v1``.
        The weights of an ensemble have a new first dimension of size n.

    Raises:
        ValueError: (by the constructor) ensemble_shape has two or more elements, or n < 1.
        RuntimeError: (by the constructor) the module has buffers.

    Source: ``torch._functorch.make_functional.functional_init``.

    Example:
        >>> import torch
        >>> from torchfunc_jax import vmap
        >>> from torchfunc_jax.make_functional import functional_init
        >>> weights, func, names = functional_init(torch.nn.Linear, (5,))(3, 2)
        >>> vmap(func, (0, None))(weights, (torch.ones(4, 3),)).shape
        torch.Size([5, 4, 2])
    """
    return _ensemble(model_class, ensemble_shape, device, make_functional_deprecated_v1, 1)


def functional_init_with_buffers(
    model_class: type[nn.Module],
    ensemble_shape: tuple[int, ...] = (),
    device: torch.device | str = "cpu",
) -> Callable[..., Any]:
    """A constructor of an ensemble of functional modules with buffers.

    Args:
        model_class, ensemble_shape, device: as in ``functional_init``; with ``()`` it is
            ``functional_init``, as in functorch.

    Returns:
        Callable: takes the constructor's arguments, returns (weights, buffers, func, weight_names,
            buffer_names); see
        ``make_functional_with_buffers_deprecated_v1``.

    Raises:
        ValueError: (by the constructor) ensemble_shape has two or more elements, or n < 1.
        RuntimeError: (by the constructor) ``()`` and a module with buffers.

    Source: ``torch._functorch.make_functional.functional_init_with_buffers``.

    Example:
        >>> import torch
        >>> from torchfunc_jax import vmap
        >>> from torchfunc_jax.make_functional import functional_init_with_buffers
        >>> weights, buffers, func, _, _ = functional_init_with_buffers(torch.nn.BatchNorm1d, (5,))(
        ...     3
        ... )
        >>> vmap(func, (0, 0, None))(weights, buffers, (torch.randn(4, 3),)).shape
        torch.Size([5, 4, 3])
    """
    return _ensemble(
        model_class, ensemble_shape, device, make_functional_with_buffers_deprecated_v1, 2
    )
