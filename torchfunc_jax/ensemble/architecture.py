"""What all members of an ensemble have in common: their architecture, which is compared, and the
module that stands for all of them.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import type_before_parametrizations

__all__ = ["compare", "computed", "different", "duplicate", "kinds", "shared_names", "unchanged"]

#: what stands behind the names of the parameters of which a hook computes a tensor before each call
_HOOKED = ("_orig", "_g")  # torch.nn.utils: spectral_norm and prune, weight_norm
_OF_EVERY_MODULE = set(vars(nn.Module())) - {"training"}
_COMPARED = (
    list,
    tuple,
    Mapping,
    np.ndarray,
    FunctionType,
    functools.partial,
    type,
    enum.Enum,
    torch.dtype,
    type(None),
)


# -- one module for all members --------------------------------------------------------------------
def _hooked(layer: nn.Module) -> list[str]:
    """The tensors of a layer that hooks of torch.nn.utils compute of its parameters before each
    call.
    """
    own = dict(layer.named_parameters(recurse=False))
    return [
        name
        for name, x in vars(layer).items()
        if isinstance(x, torch.Tensor) and any(name + end in own for end in _HOOKED)
    ]


def duplicate(module: nn.Module) -> nn.Module:
    """A deep copy, in which hooks have still to compute their tensors; ``copy.deepcopy`` refuses
    tensors that are results of a call.
    """
    known: dict[int, torch.Tensor] = {}
    for layer in module.modules():
        # results again
        known |= {
            id(x): x.detach().requires_grad_().clone()
            for x in vars(layer).values()
            if _is_result(x)
        }
        known |= {id(vars(layer)[name]): torch.empty(0) for name in _hooked(layer)}
    return copy.deepcopy(module, known)


def computed(module: nn.Module) -> nn.Module:
    """The module, in which hooks have computed their tensors of the values that it has now."""
    for layer in module.modules():
        for name in _hooked(layer):
            # else spectral_norm takes a step of its iteration
            mode, layer.training = layer.training, False
            for hook in layer._forward_pre_hooks.values():
                if name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None)):
                    hook(layer, ())
            layer.training = mode
    return module


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """While entered, the module is called in a trace; what it stores in its attributes has no
    values afterwards, and is taken back.
    """
    before = [(layer, dict(vars(layer))) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, attributes in before:
            vars(layer).clear()
            vars(layer).update(attributes)


# -- what all members share ------------------------------------------------------------------------
def shared_names(module: nn.Module, shared: bool | Iterable[str]) -> list[str]:
    """The parameters and buffers that the argument ``shared`` of an ensemble means; ValueError for
    one that is trained, or is not there.
    """
    frozen = {name: not p.requires_grad for name, p in module.named_parameters()} | {
        name: True for name, _ in module.named_buffers()
    }
    if shared is True:
        if not any(frozen.values()):
            raise ValueError(
                "shared: all parameters of the members require grad; call requires_grad_(False) on "
                "those that are shared"
            )
        return [name for name, one in frozen.items() if one]
    if isinstance(shared, str):
        raise TypeError(f"shared: expected True, False or a list of names, got {shared!r}")
    found: set[str] = set()
    for asked in shared or ():
        below = [name for name in frozen if name == asked or name.startswith(f"{asked}.")]
        if not below:
            raise ValueError(
                f"shared: no parameter, buffer or submodule of a member is named {asked!r}; it has "
                f"{', '.join(frozen)}"
            )
        if trained := next((name for name in below if not frozen[name]), None):
            raise ValueError(
                f"shared: {trained!r} requires grad, and so is trained in each member; call "
                "requires_grad_(False) on it first"
            )
        found.update(below)
    return [name for name in frozen if name in found]


def different(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have other values; NaN is the same as NaN."""
    if a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return False
    a, b = a.detach(), b.detach().to(a.device)
    return not torch.equal(a, b) and not bool(((a == b) | ((a != a) & (b != b))).all())


# -- one architecture ------------------------------------------------------------------------------
def kinds(module: nn.Module) -> dict[str, Any]:
    """What must be the same in all members: the layers' classes, their attributes, their tensors'
    shapes and dtypes.
    """
    found: dict[str, Any] = {}
    for path, layer in module.named_modules():
        # torch makes a class for each parametrized layer
        found[path or "the module"] = type_before_parametrizations(layer)
        left_out = {*_OF_EVERY_MODULE, *_hooked(layer)}
        for name, value in vars(layer).items():
            if name not in left_out and not name.startswith("__") and _is_compared(value):
                found[f"{path}.{name}" if path else name] = value
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(t):
            raise TypeError(
                f"make_member: {name!r} is not initialized; call the module "
                "once, so that it has a shape"
            )
        found[name] = (tuple(t.shape), t.dtype, t.requires_grad)
    return found


def compare(template: nn.Module, expected: Mapping[str, Any], module: nn.Module, who: str) -> None:
    """ValueError if ``kinds(module)`` is not what is expected, with the name of what differs."""
    if module is template:
        return
    found = kinds(module)
    tensors = dict([*template.named_parameters(), *template.named_buffers()])
    own = {id(t) for one in (template, module) for t in (*one.parameters(), *one.buffers())}
    for name in {**expected, **found}:
        ours, theirs = expected.get(name, "missing"), found.get(name, "missing")
        if _same(ours, theirs, own):
            continue
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            raise ValueError(
                f"{who}: the tensor {name!r} is neither a parameter nor a buffer, and it differs; "
                "use register_buffer"
            )
        what = "parameter or buffer" if name in tensors else "attribute or layer"
        raise ValueError(
            f"all members must have one architecture, and the {what} {name!r} is {_shown(ours)} in "
            f"member 0, {_shown(theirs)} in {who}"
        )


def _is_result(value: Any) -> bool:
    """Whether it is what a call has stored, which may be anything."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _is_compared(value: Any) -> bool:
    return isinstance(value, _COMPARED) or type(value).__eq__ is not object.__eq__


def _same(a: Any, b: Any, own: set[int]) -> bool:
    """Whether two attributes say the same; own: the ids of parameters and buffers, which are
    compared by themselves.
    """
    if a is b or _is_result(a) or _is_result(b) or isinstance(a, weakref.ReferenceType):
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if id(a) in own and id(b) in own:
            return True
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return not _is_compared(a) and not _is_compared(b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y, own) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key], own) for key in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, functools.partial):
        return all(
            _same(x, y, own)
            for x, y in ((a.func, b.func), (a.args, b.args), (a.keywords, b.keywords))
        )
    if isinstance(a, FunctionType):  # a lambda of each member
        ours, theirs = (
            [f.__defaults__, f.__kwdefaults__, [c.cell_contents for c in f.__closure__ or ()]]
            for f in (a, b)
        )
        return a.__code__ == b.__code__ and _same(ours, theirs, own)
    if not _is_compared(a):
        return True  # such as a torch.Generator: nobody can say
    try:
        return bool(a == b)
    except Exception:  # of a class whose == gives no bool
        return True


def _shown(kind: Any) -> str:
    if isinstance(kind, tuple) and len(kind) == 3 and isinstance(kind[1], torch.dtype):
        return f"{kind[1]} of shape {kind[0]}" + ("" if kind[2] else " without requires_grad")
    return kind.__name__ if isinstance(kind, type) else repr(kind)
