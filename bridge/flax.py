"""torch modules as Flax modules, linen and nnx.

``bridge/flax_layouts.py`` converts torch's layers to Flax's own layouts,
``bridge/flax_in_torch.py`` makes torch modules of Flax's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from flax import linen, nnx
from flax.errors import InvalidRngError
from torch import nn

from bridge import modules, private_jax
from bridge.convert import dtypes
from bridge.flax_in_torch import FromLinen, FromNNX, Frozen
from bridge.flax_layouts import from_variables, to_variables
from bridge.flax_names import NameMap, name_map

__all__ = [
    "NNX",
    "FromLinen",
    "FromNNX",
    "Frozen",
    "Linen",
    "NameMap",
    "from_variables",
    "name_map",
    "to_variables",
]

_ALIKE = (
    "torch initializes a module once, in Python: under vmap all members would have the same "
    "values. Make them one by one and stack "
)


class Linen(linen.Module):
    """A torch module as a ``flax.linen.Module``; its parameters are the collection "params", its
    buffers "buffers", under torch's names.

    Parameters with ``requires_grad=False`` are a collection of their own, "frozen", so that no
    optimizer trains them. ``init`` returns the torch module's values. In ``apply``, buffers are
    updated if "buffers" is mutable, and dropout and other random operators draw from the key
    "dropout". The torch module itself is not changed; write the variables into it with
    ``bridge.load(module, {**variables["params"], **variables.get("frozen", {})},
    variables.get("buffers"))``.

    Args:
        module: any nn.Module; the arguments of ``__call__`` are passed to its forward.
        deterministic: True for eval mode, False for training, None for the module's own mode;
            ``__call__`` takes it too.

    Returns:
        jax.Arrays, from ``apply``.

    Raises:
        flax.errors.InvalidRngError: (by ``apply``) a random operator draws, and there is no key
            "dropout".
        flax.errors.ScopeParamNotFoundError, ScopeVariableNotFoundError, ScopeParamShapeError: (by
            ``apply``) variables are missing or have other shapes than the module's.
        RuntimeError: (by ``init``) it is mapped over keys, as in ``jax.vmap(model.init)``; all
            members would have the same values.

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
        own, initial = (
            dict(self.module.named_parameters()),
            functools.partial(_initial, self.is_initializing()),
        )
        params = {name: self.param(name, initial(p)) for name, p in own.items() if p.requires_grad}
        frozen = {
            name: self.variable("frozen", name, initial(p)).value
            for name, p in own.items()
            if not p.requires_grad
        }
        buffers = {
            name: self.variable("buffers", name, initial(b))
            for name, b in self.module.named_buffers()
        }
        out, after = modules.call(
            self.module,
            {**params, **frozen},
            {name: b.value for name, b in buffers.items()},
            args,
            kwargs,
            training=None if mode is None else not mode,
            rng=self._key() if self.has_rng("dropout") or self.has_rng("params") else self._key,
        )
        if self.is_mutable_collection("buffers") and not self.is_initializing():
            for name, variable in buffers.items():
                variable.value = after[name]
        return out

    @linen.nowrap
    def _key(self) -> jax.Array:
        try:
            # falls back to the key "params", and raises if there is neither
            return self.make_rng("dropout")
        except InvalidRngError as error:
            raise InvalidRngError(
                f"{modules.drawing_layer(self.module)} draws random numbers: {error}"
            ) from None


def _initial(starting: bool, t: torch.Tensor) -> Callable[..., jax.Array]:
    """The initializer of a variable; while Flax initializes the variables, it raises if the key is
    mapped.
    """

    def initial(*keys: jax.Array) -> jax.Array:
        if starting and any(private_jax.mapped_by_jax(key) for key in keys):
            raise RuntimeError(
                f"Linen: {_ALIKE}the variables: jax.tree.map(lambda *xs: jnp.stack(xs), "
                "*[m.init(key, x) for m in members])"
            )
        return modules.as_array(t)

    return initial


class NNX(nnx.Module):
    """A torch module as a ``flax.nnx.Module``; parameters are ``nnx.Param``, buffers
    ``nnx.BatchStat``, under torch's names.

    Parameters with ``requires_grad=False`` are ``Frozen``. ``train()`` and ``eval()`` of this
    module, or of a module that contains it, set the mode. Buffers are updated when the call changes
    them. The torch module itself is not changed; write the state into it with ``save_to``.

    Args:
        module: any nn.Module; its values are the initial ones, and the arguments of ``__call__``
            are passed to its forward. Or a function without arguments that makes the module: its
            initial values are then drawn from a key of rngs, so that under ``nnx.vmap`` each member
            of an ensemble has values of its own.
        rngs: dropout and other random operators draw from its stream "dropout", or "default"; what
            initializes a module from "params", or "default".

    Returns:
        jax.Arrays, from ``__call__``.

    Raises:
        AttributeError: (by ``__call__``) a random operator draws, and rngs has neither stream.
        RuntimeError: it is made of a module under vmap; all members would have the same values.
        ValueError: (by ``__call__``) a random operator draws, and there are no rngs; module is a
            function, and there are no rngs.

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/module.html

    Example:
        >>> import jax.numpy as jnp, torch
        >>> from flax import nnx
        >>> from bridge.flax import NNX
        >>> model = NNX(torch.nn.Linear(3, 2))
        >>> nnx.jit(lambda model, x: model(x))(model, jnp.ones((4, 3))).shape
        (4, 2)
        >>> nnx.grad(lambda model, x: model(x).sum())(model, jnp.ones((4, 3)))["params"][
        ...     "weight"
        ... ].shape
        (2, 3)
        >>> make = lambda rngs: NNX(lambda: torch.nn.Linear(3, 2), rngs=rngs)
        >>> members = nnx.split_rngs(splits=5)(nnx.vmap(make))(nnx.Rngs(0))
        >>> nnx.vmap(lambda model, x: model(x), in_axes=(0, None))(members, jnp.ones((4, 3))).shape
        (5, 4, 2)
    """

    def __init__(
        self, module: nn.Module | Callable[[], nn.Module], *, rngs: nnx.Rngs | None = None
    ) -> None:
        if not isinstance(module, nn.Module):
            if rngs is None:
                raise ValueError(
                    "NNX: a function that makes the module draws its values; pass rngs, as "
                    "NNX(make, rngs=nnx.Rngs(0))"
                )
            module, arrays, buffers = _initialized(module, rngs.params())
            # each member of an ensemble has its own; those that were given are joined again by
            # nnx.split_rngs
            rngs = rngs.fork()
        elif private_jax.mapped_by_jax():
            raise RuntimeError(
                f"NNX: {_ALIKE}their states: nnx.merge(nnx.graphdef(members[0]), "
                "jax.tree.map(lambda *xs: jnp.stack(xs), *map(nnx.state, members))), or give the "
                "function that makes the module instead of the module: NNX(make, rngs=rngs)"
            )
        else:
            arrays, buffers = modules.params(module), modules.buffers(module)
        own = dict(module.named_parameters())
        self.module = module
        self.deterministic = not module.training
        self.params = nnx.Dict(
            {name: nnx.Param(a) for name, a in arrays.items() if own[name].requires_grad}
        )
        self.frozen = nnx.Dict(
            {name: Frozen(a) for name, a in arrays.items() if not own[name].requires_grad}
        )
        self.buffers = nnx.Dict({name: nnx.BatchStat(a) for name, a in buffers.items()})
        self.rngs = rngs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        draws = (
            not self.deterministic
            and self.rngs is not None
            and any(stream in self.rngs for stream in ("dropout", "default"))
        )
        before = self._values(self.buffers)
        out, after = modules.call(
            self.module,
            self._parameters(),
            before,
            args,
            kwargs,
            training=not self.deterministic,
            rng=self._key() if draws else self._key,
        )
        for name, value in after.items():
            # nnx lets a model that changes nothing be called in any trace
            if value is not before[name]:
                self.buffers[name][...] = value
        return out

    def _key(self) -> jax.Array:
        layer = modules.drawing_layer(self.module)
        if self.rngs is None:
            raise ValueError(
                f"NNX: a random operator (dropout in training mode, say) of {layer} draws, but no "
                "`rngs` argument was provided; make it with NNX(module, rngs=nnx.Rngs(dropout=0)), "
                "or call eval()"
            )
        try:
            return self.rngs.dropout()
        except AttributeError as error:
            raise AttributeError(f"{error}; {layer} draws random numbers from it") from None

    def _parameters(self) -> dict[str, jax.Array]:
        return self._values(self.params) | self._values(self.frozen)

    @staticmethod
    def _values(variables: Mapping[str, Any]) -> dict[str, jax.Array]:
        return {name: v[...] for name, v in variables.items()}

    def save_to(self, module: nn.Module | None = None) -> nn.Module:
        """Write the state into a torch module, by default the one that this was made from, and
        return it.
        """
        return modules.load(module or self.module, self._parameters(), self._values(self.buffers))


def _initialized(
    make: Callable[[], nn.Module], key: jax.Array
) -> tuple[nn.Module, dict[str, jax.Array], dict[str, jax.Array]]:
    """A module, and the parameters and buffers that it has with a seed from the key.

    torch draws them when the program runs, one member after the other: Python code such as the loop
    of ``trunc_normal_`` needs values.
    """

    def seeded(seed: Any) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed))
            return make()

    named = lambda made: (dict(made.named_parameters()), dict(made.named_buffers()))
    draw = lambda seed: jax.tree.map(_bits, named(seeded(seed)))
    module = seeded(0)
    shapes = jax.tree.map(
        lambda t: jax.eval_shape(lambda: jax.numpy.asarray(_bits(t))), named(module)
    )
    params, buffers = jax.pure_callback(
        draw, shapes, jax.random.bits(key), vmap_method="sequential"
    )
    if not isinstance(key, jax.core.Tracer):
        jax.block_until_ready((params, buffers))  # torch's generator has its earlier state again
    return module, params, buffers


def _bits(t: torch.Tensor) -> np.ndarray:
    """A tensor's values in a dtype that JAX's configuration allows, without a call of JAX."""
    flat = (
        t.detach()
        .cpu()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .view(dtypes.to_jax(t.dtype))
        .reshape(t.shape)
    )
    return flat.astype(jax.dtypes.canonicalize_dtype(flat.dtype))
