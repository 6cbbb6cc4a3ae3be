"""nn.Module <-> trees of jax.Arrays: a module's state out, a module's state in, and a module as a function of its state."""
from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from bridge import dtypes, tensors, trees
from bridge.levels import state as trace
from bridge.plain import plain
from bridge.private import opaque

State = dict[str, jax.Array]

_SWAPPING = threading.RLock()  # a call changes the module's attributes and mode for its time


def params(module: nn.Module) -> State:
    """A module's parameters as jax.Arrays: copies, each once however many names it has.

    Args:
        module: any nn.Module.

    Returns:
        dict: name -> jax.Array of the parameter's shape and dtype; 64-bit types become 32-bit unless JAX's ``jax_enable_x64`` is on.

    Raises:
        TypeError: a parameter that has no values (device "meta") or that JAX cannot hold (sparse, quantized).

    Source: ``torch.nn.Module.named_parameters``, whose names and order these are.

    Example:
        >>> import bridge, torch
        >>> {name: array.shape for name, array in bridge.params(torch.nn.Linear(3, 2)).items()}
        {'weight': (2, 3), 'bias': (2,)}
    """
    return {name: as_array(p) for name, p in module.named_parameters()}


def buffers(module: nn.Module) -> State:
    """A module's buffers as jax.Arrays, likewise.

    Args:
        module: any nn.Module.

    Returns:
        dict: name -> jax.Array.

    Raises:
        TypeError: as ``params``.

    Source: ``torch.nn.Module.named_buffers``.

    Example:
        >>> import bridge, torch
        >>> list(bridge.buffers(torch.nn.BatchNorm1d(2)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return {name: as_array(b) for name, b in module.named_buffers()}


def load(
    module: nn.Module, params: Mapping[str, Any] | None = None, buffers: Mapping[str, Any] | None = None, *, strict: bool = True
) -> nn.Module:
    """Write parameters and buffers into a module: into the tensors that are there, so optimizers and tied names see it.

    Args:
        module: changed in place.
        params, buffers: name -> jax.Array, numpy array or torch.Tensor of the right shape; None: left as they are. Values are converted
            to the tensor's dtype and device. A tied parameter may be given under any of its names, or under several with the same value.
        strict: every parameter (buffer) must be given.

    Returns:
        nn.Module: the module.

    Raises:
        RuntimeError: unknown names; missing names where strict; another shape; different values for one tied tensor. The module is
            unchanged then.

    Source: ``torch.nn.Module.load_state_dict``.

    Example:
        >>> import bridge, jax, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> trained = jax.tree.map(lambda p: 0 * p + 1, bridge.params(model))
        >>> bridge.load(model, trained).weight
        Parameter containing:
        tensor([[1., 1.]], requires_grad=True)
    """
    writes: list[tuple[torch.Tensor, torch.Tensor]] = []
    for kind, given, members in (("params", params, module.named_parameters), ("buffers", buffers, module.named_buffers)):
        if given is not None:
            writes += _matched(kind, given, dict(members(remove_duplicate=False)), strict)
    with torch.no_grad():
        for target, value in writes:
            target.copy_(value)
    return module


def _matched(
    kind: str, given: Mapping[str, Any], targets: Mapping[str, torch.Tensor], strict: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tensor of the module, its new value) pairs."""
    unknown = [name for name in given if name not in targets]
    if unknown:
        raise RuntimeError(f"{kind}: the module has no {', '.join(map(repr, unknown))}; it has {', '.join(map(repr, targets)) or 'none'}")
    found: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
    for name, value in given.items():
        target, new = targets[name], as_tensor(value)
        if new.shape != target.shape:
            raise RuntimeError(f"{kind}: {name!r} has shape {tuple(target.shape)} in the module, got {tuple(new.shape)}")
        if id(target) in found and not torch.equal(found[id(target)][2], new):
            raise RuntimeError(f"{kind}: {found[id(target)][0]!r} and {name!r} are one tensor in the module, got different values")
        found[id(target)] = (name, target, new)
    missing = [name for name, t in targets.items() if id(t) not in found]
    if strict and missing:
        raise RuntimeError(f"{kind}: {', '.join(map(repr, missing))} missing; give them, or strict=False to leave them as they are")
    return [(target, new) for _, target, new in found.values()]


@opaque
def call(
    module: nn.Module,
    params: Mapping[str, Any],
    buffers: Mapping[str, Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool | None = None,
    rng: jax.Array | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A module as a pure function of its state, for JAX's own transforms: jax.jit, jax.grad, jax.vmap.

    Args:
        module: any nn.Module; itself unchanged.
        params, buffers: name -> jax.Array, as ``params`` and ``buffers`` give them. They are computed with in the module's dtypes.
        args, kwargs: of the call; jax.Arrays in any tree.
        training: the mode for this call; None: the module's own.
        rng: a JAX key that all random operators draw from; None: torch's generator, anew at each trace.

    Returns:
        (output, buffers): jax.Arrays; the buffers as the call left them.

    Raises:
        RuntimeError: names or shapes that are not the module's.

    Source: ``flax.linen.Module.apply``, for the shape of it.

    Example:
        >>> import bridge, jax, jax.numpy as jnp, torch
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> out, after = jax.jit(lambda p, b, x: bridge.call(norm, p, b, (x,)))(bridge.params(norm), bridge.buffers(norm), jnp.ones((4, 2)))
        >>> out.shape, bool(jnp.allclose(after["running_mean"], 0.1))
        ((4, 2), True)
    """
    for kind, given, members in (("params", params, module.named_parameters), ("buffers", buffers, module.named_buffers)):
        known = dict(members(remove_duplicate=False))
        for name, value in given.items():
            if name not in known or tuple(value.shape) != tuple(known[name].shape):
                expected = f"shape {tuple(known[name].shape)}" if name in known else f"one of {', '.join(map(repr, known)) or 'no names'}"
                raise RuntimeError(f"{kind}: {name!r} of shape {tuple(value.shape)} is not the module's; expected {expected}")

    def run(params: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
        if rng is not None:
            assert trace.level is not None
            trace.level.key = rng
        state = {name: v if v.dtype == dtype else v.to(dtype) for name, v, dtype in _typed(module, params, buffers)}
        with _SWAPPING, _mode(module, training):
            out = functional_call(module, state, args, kwargs)  # leaves in state what the module put in the place of a tensor
        return out, {name: state[name] for name in buffers}

    out, after = plain(run)(_arrays(params), _arrays(buffers), _arrays(args), _arrays(dict(kwargs or {})))
    return out, {name: v if v.dtype == buffers[name].dtype else v.astype(buffers[name].dtype) for name, v in after.items()}


def _typed(module: nn.Module, *states: Mapping[str, Any]) -> Iterator[tuple[str, Any, torch.dtype]]:
    known = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    for given in states:
        for name, value in given.items():
            yield name, value, known[name].dtype


@contextmanager
def _mode(module: nn.Module, training: bool | None) -> Iterator[None]:
    """The module in that mode, each submodule back in its own afterwards."""
    before = [] if training is None else [(m, m.training) for m in module.modules()]
    try:
        if training is not None:
            module.train(training)
        yield
    finally:
        for m, mode in before:
            m.training = mode


def _arrays(tree: Any) -> Any:
    return trees.map_leaves(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)


def as_array(t: torch.Tensor) -> jax.Array:
    """A tensor's values as a jax.Array that shares no memory with it, in a dtype of JAX's present configuration.

    Args:
        t: any dense tensor.

    Returns:
        jax.Array

    Raises:
        TypeError: as ``bridge.to_jax``.

    Source: ``jax.dtypes.canonicalize_dtype``.

    Example:
        >>> import torch
        >>> from bridge.modules import as_array
        >>> as_array(torch.ones(2, dtype=torch.float64)).dtype
        dtype('float32')
    """
    array = tensors.to_jax(t.detach())
    wanted = jax.dtypes.canonicalize_dtype(array.dtype)
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jnp.array(array, dtype=wanted, copy=True).block_until_ready()


def as_tensor(value: Any) -> torch.Tensor:
    """A jax.Array, numpy array or tensor as a tensor.

    Args:
        value: what a leaf of a state may be.

    Returns:
        torch.Tensor: without grad; may share memory.

    Raises:
        TypeError: anything else.

    Source: ``bridge.to_torch``.

    Example:
        >>> import numpy as np
        >>> from bridge.modules import as_tensor
        >>> as_tensor(np.ones(2, np.float32))
        tensor([1., 1.])
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic):
        with jax.enable_x64(True):
            value = jnp.asarray(value)
    if not isinstance(value, jax.Array):
        raise TypeError(f"expected a jax.Array, a numpy array or a torch.Tensor, got {type(value)}")
    dtypes.to_torch(value.dtype)
    return tensors.to_torch(value)
