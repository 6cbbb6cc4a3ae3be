"""torch modules as Flax modules, linen and nnx, and torch's layers in Flax's own layouts."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch
from flax import linen, nnx
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from bridge import modules


class Linen(linen.Module):
    """A torch module as a ``flax.linen.Module``: its parameters are the collection "params", its buffers "buffers", under torch's names.

    ``init`` gives the values that the torch module has. In ``apply``, buffers are updated where "buffers" is mutable, and dropout and
    the like draw from the key "dropout" where one is given. The torch module itself is not changed; write the variables into it with
    ``bridge.load(module, variables["params"], variables["buffers"])``.

    Args:
        module: any nn.Module; what ``__call__`` gets goes to its forward.
        deterministic: True for eval mode, False for training, None for the module's own; may also be given to ``__call__``.

    Returns:
        jax.Arrays, from ``apply``.

    Raises:
        RuntimeError: (by ``apply``) variables of other shapes than the module's.

    Source: https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/module.html

    Example:
        >>> import jax, jax.numpy as jnp, torch
        >>> from bridge.flax import Linen
        >>> model = Linen(torch.nn.Linear(3, 2))
        >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables["params"])
        {'bias': (2,), 'weight': (2, 3)}
        >>> jax.jit(model.apply)(variables, jnp.ones((4, 3))).shape
        (4, 2)
    """

    module: nn.Module
    deterministic: bool | None = None

    @linen.compact
    def __call__(self, *args: Any, deterministic: bool | None = None, **kwargs: Any) -> Any:
        mode = self.deterministic if deterministic is None else deterministic
        params = {name: self.param(name, _constant(p)) for name, p in self.module.named_parameters()}
        buffers = {name: self.variable("buffers", name, _constant(b)) for name, b in self.module.named_buffers()}
        out, after = modules.call(
            self.module, params, {name: b.value for name, b in buffers.items()}, args, kwargs,
            training=None if mode is None else not mode, rng=self.make_rng("dropout") if self.has_rng("dropout") else None,
        )
        if self.is_mutable_collection("buffers") and not self.is_initializing():
            for name, variable in buffers.items():
                variable.value = after[name]
        return out


def _constant(t: torch.Tensor) -> Callable[..., jax.Array]:
    return lambda *_: modules.as_array(t)


class NNX(nnx.Module):
    """A torch module as a ``flax.nnx.Module``: parameters are ``nnx.Param``, buffers ``nnx.BatchStat``, under torch's names.

    ``train()`` and ``eval()`` set the mode, of a module around this one too. The torch module itself is not changed; write the state
    into it with ``save_to``.

    Args:
        module: any nn.Module; its values are the initial ones, and what ``__call__`` gets goes to its forward.
        rngs: dropout and the like draw from its stream "dropout"; None: from torch's generator, anew at each trace.

    Returns:
        jax.Arrays, from ``__call__``.

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/module.html

    Example:
        >>> import jax.numpy as jnp, torch
        >>> from flax import nnx
        >>> from bridge.flax import NNX
        >>> model = NNX(torch.nn.Linear(3, 2))
        >>> nnx.jit(lambda model, x: model(x))(model, jnp.ones((4, 3))).shape
        (4, 2)
        >>> nnx.grad(lambda model, x: model(x).sum())(model, jnp.ones((4, 3)))["params"]["weight"].shape
        (2, 3)
    """

    def __init__(self, module: nn.Module, *, rngs: nnx.Rngs | None = None) -> None:
        self.module = module
        self.deterministic = not module.training
        self.params = nnx.Dict({name: nnx.Param(a) for name, a in modules.params(module).items()})
        self.buffers = nnx.Dict({name: nnx.BatchStat(a) for name, a in modules.buffers(module).items()})
        self.rngs = rngs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, after = modules.call(
            self.module, self._values(self.params), self._values(self.buffers), args, kwargs, training=not self.deterministic,
            rng=None if self.rngs is None or self.deterministic else self.rngs.dropout(),
        )
        if not self.deterministic:
            for name, value in after.items():
                self.buffers[name][...] = value
        return out

    @staticmethod
    def _values(variables: Any) -> dict[str, jax.Array]:
        return {name: v[...] for name, v in variables.items()}

    def save_to(self, module: nn.Module | None = None) -> nn.Module:
        """Write the state into a torch module, by default the one this was made of; returns it."""
        return modules.load(module or self.module, self._values(self.params), self._values(self.buffers))


# -- torch's layers in Flax's layouts ----------------------------------------------------------------------------------------------
def _swapped(w: np.ndarray) -> np.ndarray:
    return w.T


def _channels_last(w: np.ndarray) -> np.ndarray:
    return np.moveaxis(w, (0, 1), (-1, -2))  # torch [out, in / groups, *kernel], Flax [*kernel, in / groups, out]


def _channels_first(w: np.ndarray) -> np.ndarray:
    return np.moveaxis(w, (-1, -2), (0, 1))


def _same(w: np.ndarray) -> np.ndarray:
    return w


# class -> torch's name -> (collection, Flax's name, there, back)
_BIAS = {"bias": ("params", "bias", _same, _same)}
_SCALE = {"weight": ("params", "scale", _same, _same)} | _BIAS
_STATS = {"running_mean": ("batch_stats", "mean", _same, _same), "running_var": ("batch_stats", "var", _same, _same)}
_LAYOUTS: list[tuple[type | tuple[type, ...], dict[str, tuple[str, str, Any, Any]]]] = [
    (nn.Linear, {"weight": ("params", "kernel", _swapped, _swapped)} | _BIAS),
    (_ConvNd, {"weight": ("params", "kernel", _channels_last, _channels_first)} | _BIAS),
    (nn.Embedding, {"weight": ("params", "embedding", _same, _same)}),
    ((nn.LayerNorm, nn.GroupNorm, nn.RMSNorm), _SCALE),
    (_BatchNorm, _SCALE | _STATS),
]
_NOT_KEPT = {"num_batches_tracked"}  # BatchNorm's; Flax has no such thing


def _layers(module: nn.Module) -> Iterator[tuple[tuple[str, ...], torch.Tensor, tuple[str, str, Any, Any]]]:
    """(path, tensor, layout) of each tensor of a module that Flax has too."""
    for path, m in module.named_modules(remove_duplicate=False):
        own = {**m._parameters, **m._buffers}
        known = not isinstance(m, _ConvTransposeNd)
        layout = next((names for kind, names in _LAYOUTS if known and isinstance(m, kind)), {})
        for name, t in own.items():
            if t is None or (name in _NOT_KEPT and layout):
                continue
            if name not in layout:
                where = ".".join(filter(None, (path, name)))
                raise TypeError(f"module: Flax has no layer like {type(m).__name__}, and so no place for {where!r}")
            yield tuple(path.split(".")) if path else (), t, layout[name]


def to_variables(module: nn.Module) -> dict[str, Any]:
    """A torch module's weights as Flax's own layers hold them: kernels transposed, channels last, "scale" for "weight" of a norm.

    Args:
        module: made of Linear, Conv, Embedding, LayerNorm, GroupNorm, RMSNorm and BatchNorm, and modules without tensors of their own.

    Returns:
        dict: {"params": ..., "batch_stats": ...}, nested by the names of the submodules.

    Raises:
        TypeError: a layer that Flax lays out otherwise or has not.

    Source: https://flax.readthedocs.io/en/latest/guides/converting_and_upgrading/convert_pytorch_to_flax.html

    Example:
        >>> import jax, torch
        >>> from bridge.flax import to_variables
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5), torch.nn.BatchNorm2d(8))
        >>> jax.tree.map(lambda a: a.shape, to_variables(net))
        {'batch_stats': {'1': {'mean': (8,), 'var': (8,)}},
         'params': {'0': {'bias': (8,), 'kernel': (5, 5, 3, 8)}, '1': {'bias': (8,), 'scale': (8,)}}}
    """
    found: dict[str, Any] = {"params": {}}
    for path, t, (collection, name, there, _) in _layers(module):
        node = found.setdefault(collection, {})
        for step in path:
            node = node.setdefault(step, {})
        node[name] = jax.numpy.asarray(there(np.asarray(modules.as_array(t))))
    return found


def from_variables(module: nn.Module, variables: Mapping[str, Any]) -> nn.Module:
    """Write weights in Flax's layouts into a torch module: the inverse of ``to_variables``.

    Args:
        module: changed in place.
        variables: {"params": ..., "batch_stats": ...}, nested by the names of the submodules.

    Returns:
        nn.Module: the module.

    Raises:
        RuntimeError: something is missing or has another shape.
        TypeError: as ``to_variables``.

    Source: as ``to_variables``.

    Example:
        >>> import torch
        >>> from bridge.flax import from_variables, to_variables
        >>> ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> torch.equal(from_variables(ours, to_variables(theirs)).weight, theirs.weight)
        True
    """
    writes = []
    for path, t, (collection, name, there, back) in _layers(module):
        where = (collection, *path, name)
        value: Any = variables
        for step in where:
            if step not in value:
                raise RuntimeError(f"variables: {'/'.join(where)} missing")
            value = value[step]
        new = modules.as_tensor(np.ascontiguousarray(back(np.asarray(value))))
        if new.shape != t.shape:
            expected = there(np.empty(t.shape, bool)).shape
            raise RuntimeError(f"variables: expected {'/'.join(where)} of shape {expected}, got {np.shape(value)}")
        writes.append((t, new))
    with torch.no_grad():
        for t, new in writes:
            t.copy_(new)
    return module
