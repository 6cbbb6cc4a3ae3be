"""Flax modules, linen and nnx, as torch modules: Flax's variables are parameters and buffers, and
the call is one JAX function.

Users import it from ``bridge.flax``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import torch
from flax import linen, nnx, traverse_util
from torch import nn

from bridge import modules
from bridge.boundary.results import inexact_dtype, is_array, put_together
from bridge.convert import trees
from bridge.flax_layouts import Path, flat
from bridge.jax_functions import from_jax

_TRAINING, _EVALUATING = (
    ("train", "training", "is_training"),
    ("deterministic", "use_running_average"),
)


class Frozen(nnx.Variable):
    """A parameter with ``requires_grad=False``; ``nnx.grad`` and ``nnx.Optimizer`` ignore it, as
    they take ``nnx.Param``.
    """


class _Part(nn.Module):
    """A submodule of the Flax module: its variables, and its own submodules."""

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={tuple(t.shape)}"
            for name, t in (self._parameters | self._buffers).items()
            if t is not None
        )


class _FromFlax(_Part):
    """What both kinds share: the variables as parameters and buffers, a call, and the way back.

    Attributes:
        names: by the path of a variable, which begins with its kind, its name in ``state_dict``.
    """

    def _hold(self, variables: Iterable[tuple[Path, Any]]) -> None:
        """Register the variables (path, value), whose kind is "params", "frozen", or another one,
        that of a buffer.
        """
        self.names: dict[Path, str] = {}
        for path, value in variables:
            t = modules.as_tensor(value).clone()
            kind, *above, name = path
            steps: list[str] = []
            owner: nn.Module = self
            for step in above:
                step = _free(owner, step, owner._modules)
                if step not in owner._modules:
                    owner.add_module(step, _Part())
                owner = owner._modules[step]
                steps.append(step)
            name = _free(owner, name if not hasattr(owner, name) else f"{kind}_{name}")
            if kind in ("params", "frozen") and inexact_dtype(t.dtype):
                owner.register_parameter(name, nn.Parameter(t, requires_grad=kind == "params"))
            else:
                owner.register_buffer(name, t)
            self.names[path] = ".".join([*steps, name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }

    def _values(self) -> dict[Path, jax.Array]:
        """Copies of the variables, by path."""
        found = self._tensors()
        return {path: modules.as_array(found[name]) for path, name in self.names.items()}

    #: Calls the Flax module: (state by torch's names, args, kwargs, training, key) -> (output, the
    #: variables after the call, by path).
    _called: Callable[..., tuple[Any, Mapping[Path, Any]]]

    def _start(self) -> None:
        # without a reference to this module, whose memory would else be freed by Python's collector
        proxy: Any = weakref.proxy(self)
        function = functools.partial(type(self)._function, proxy)
        self._run = from_jax(function, static_argnames=("call", "training"), rng="key")

    def _function(
        self,
        state: dict[str, jax.Array],
        given: list[jax.Array],
        *,
        call: Any,
        training: bool,
        key: jax.Array,
    ) -> Any:
        """The JAX function of a call: its output, and the new values of the variables that it has
        replaced, by their names in torch.
        """
        args, kwargs = put_together(given, call)
        out, after = self._called(state, args, kwargs, training, key)
        held = {self.names[path]: v for path, v in after.items() if path in self.names}
        return out, {name: v for name, v in held.items() if v is not state[name]}

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = trees.flatten((args, kwargs))
        call = (
            spec,
            tuple([None if is_array(x) else x for x in leaves]),
            tuple(map(is_array, leaves)),
        )
        state, buffers = self._tensors(), dict(self.named_buffers(remove_duplicate=False))
        # a buffer that is written afterwards may be needed by the backward, so the call gets a copy
        given = {name: t.detach().clone() if name in buffers else t for name, t in state.items()}
        out, changed = self._run(
            given, [x for x in leaves if is_array(x)], call=call, training=self.training
        )
        with torch.no_grad():
            for name, value in changed.items():
                state[name].copy_(value.detach())
        return out


def _free(owner: nn.Module, name: str, taken: Mapping[str, Any] | None = None) -> str:
    """The name, or the name with underscores if torch's modules have another attribute of that
    name.
    """
    name = name.replace(".", "_") or "_"
    while hasattr(owner, name) and name not in (taken or ()):
        name += "_"
    return name


class FromLinen(_FromFlax):
    """A ``flax.linen.Module`` with its variables as a ``torch.nn.Module``.

    The collection "params" are Parameters, "frozen" Parameters with ``requires_grad=False``, all
    other collections buffers; their names are Flax's with dots, such as "Dense_0.kernel". The
    values and their layouts are Flax's: inputs have their channels last. Everything that torch does
    with modules works: ``state_dict``, ``torch.optim``, ``torch.func.functional_call``, the
    transforms and ``jit`` of this library. The call itself is ``bridge.from_jax`` of
    ``module.apply``, so what it says about dtypes and devices holds.

    ``train()`` and ``eval()`` set those of the arguments ``train``, ``training``, ``is_training``,
    ``deterministic`` and ``use_running_average`` that the method has, unless the caller passes them
    or the module has them as attributes. In training mode the collections that are buffers are
    mutable, and the buffers have their new values after the call. Flax's keys come from torch's
    generator.

    Args:
        module: any linen module; a bound one is not needed.
        variables: what ``module.init`` returns. They are copied.
        rngs: the names of the streams that the module draws from, besides "params".
        mutable: names of collections that are mutable in eval mode too, such as "cache".
        method: the name of the method that is called.

    Returns:
        torch.Tensors in the trees that the module returns, from ``forward``, which takes the
            arguments of the method. Arguments that are no
        tensors or arrays are static.

    Raises:
        TypeError: module is no linen module, or variables are no dict of collections; (by the call)
            a static argument is not hashable.
        flax.errors.FlaxError: (by the call) variables are missing or do not fit.

    Source: https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/module.html

    Example:
        >>> import jax, jax.numpy as jnp, torch
        >>> from flax import linen
        >>> from bridge.flax import FromLinen
        >>> dense = linen.Dense(2)
        >>> model = FromLinen(dense, dense.init(jax.random.key(0), jnp.ones((1, 3))))
        >>> {name: tuple(p.shape) for name, p in model.named_parameters()}
        {'bias': (2,), 'kernel': (3, 2)}
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> model.bias.grad
        tensor([4., 4.])
    """

    def __init__(
        self,
        module: linen.Module,
        variables: Mapping[str, Any],
        *,
        rngs: Sequence[str] = ("dropout",),
        mutable: Sequence[str] = (),
        method: str = "__call__",
    ) -> None:
        super().__init__()
        if not isinstance(module, linen.Module):
            raise TypeError(
                f"module: expected a flax.linen.Module, got {type(module)}; "
                "FromNNX takes nnx modules"
            )
        if not isinstance(variables, Mapping) or not all(
            isinstance(v, Mapping) for v in variables.values()
        ):
            raise TypeError(
                "variables: expected a dict of collections, as module.init returns it, got "
                f"{type(variables)}"
            )
        self.module, self.rngs, self.mutable, self.method = (
            module,
            tuple(rngs),
            tuple(mutable),
            method,
        )
        self.collections = tuple(variables)
        self._hold(flat(variables).items())
        self._start()

    def _called(
        self, state: dict[str, jax.Array], args: Any, kwargs: Any, training: bool, key: jax.Array
    ) -> tuple[Any, Mapping[Path, Any]]:
        signature = inspect.signature(getattr(type(self.module), self.method))
        passed = signature.bind_partial(self.module, *args, **kwargs).arguments
        modes = dict.fromkeys(_TRAINING, training) | dict.fromkeys(_EVALUATING, not training)
        free = [m for m in modes if m in signature.parameters and m not in passed]
        out, after = self.module.apply(
            traverse_util.unflatten_dict({path: state[name] for path, name in self.names.items()}),
            *args,
            rngs={stream: jax.random.fold_in(key, i) for i, stream in enumerate(self.rngs)},
            mutable=[
                c
                for c in self.collections
                if c not in ("params", "frozen") and (training or c in self.mutable)
            ],
            method=self.method,
            **kwargs,
            **{m: modes[m] for m in free if getattr(self.module, m, None) is None},
        )
        return out, flat(after)

    def variables(self) -> dict[str, Any]:
        """Copies of the variables as Flax has them, for ``module.apply``, optax or a checkpoint of
        Flax's.

        Returns:
            dict: {"params": ..., "batch_stats": ...} of jax.Arrays, as they were given.
        """
        return {**{c: {} for c in self.collections}, **traverse_util.unflatten_dict(self._values())}


@dataclasses.dataclass
class _Structure:
    """An nnx module without its values. It is never changed, and copies of a torch module share it.

    Attributes:
        draws: by path, the variables of the random streams.
        others: by the path of any other variable: the path with its kind, as in ``names``, and the
            variable without its value.
    """

    graph: Any
    draws: dict[tuple[Any, ...], Any]
    others: dict[tuple[Any, ...], tuple[Path, Any]]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Structure:
        return self  # copy.deepcopy makes arrays of nnx's variables


class FromNNX(_FromFlax):
    """A ``flax.nnx.Module`` as a ``torch.nn.Module``.

    ``nnx.Param`` variables are Parameters, ``bridge.flax.Frozen`` ones Parameters with
    ``requires_grad=False``, all others (batch statistics, caches) are buffers; their names are the
    paths in the module with dots, such as "layers.0.kernel". The rest is as in ``FromLinen``, but
    ``train()`` and ``eval()`` are those of nnx, and a module that is in eval mode starts in it.
    Keys of dropout come from torch's generator, and not from the module's rngs. Buffers that a call
    changes are changed in eval mode too.

    Args:
        module: any nnx module; it is copied.
        method: the name of the method that is called.

    Returns:
        torch.Tensors in the trees that the module returns, from ``forward``. Arguments that are no
            tensors or arrays are static.

    Raises:
        TypeError: module is no nnx module; (by the call) a static argument is not hashable.

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/module.html

    Example:
        >>> import torch
        >>> from flax import nnx
        >>> from bridge.flax import FromNNX
        >>> model = FromNNX(
        ...     nnx.Sequential(
        ...         nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(4, 2, rngs=nnx.Rngs(1))
        ...     )
        ... )
        >>> list(model.state_dict())
        ['layers.0.bias', 'layers.0.kernel', 'layers.2.bias', 'layers.2.kernel']
        >>> model(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(self, module: nnx.Module, *, method: str = "__call__") -> None:
        super().__init__()
        if not isinstance(module, nnx.Module):
            raise TypeError(
                f"module: expected a flax.nnx.Module, got {type(module)}; "
                "FromLinen takes linen modules"
            )
        graph, state = nnx.split(module)
        self.method, self.structure, held = method, _Structure(graph, {}, {}), []
        for path, variable in nnx.to_flat_state(state):
            if isinstance(variable, nnx.RngState):
                self.structure.draws[path] = variable
                continue
            frozen, param = isinstance(variable, Frozen), isinstance(variable, nnx.Param)
            kind = "frozen" if frozen else "params" if param else type(variable).__name__
            value = variable.get_value()
            place = (kind, *map(str, path))
            self.structure.others[path] = (
                place,
                variable.replace(jax.ShapeDtypeStruct(value.shape, value.dtype)),
            )
            held.append((place, value))
        self._hold(held)
        still = ("deterministic", "use_running_average")
        self.train(
            not any(
                getattr(node, name, None) is True
                for _, node in nnx.iter_modules(module)
                for name in still
            )
        )
        self._start()

    def _called(
        self, state: dict[str, jax.Array], args: Any, kwargs: Any, training: bool, key: jax.Array
    ) -> tuple[Any, Mapping[Path, Any]]:
        others = self.structure.others
        model = _merged(
            self.structure.graph,
            {path: (v, state[self.names[place]]) for path, (place, v) in others.items()},
            {
                path: (v, _drawn(v, jax.random.fold_in(key, i)))
                for i, (path, v) in enumerate(self.structure.draws.items())
            },
        )
        model.train() if training else model.eval()
        out = getattr(model, self.method)(*args, **kwargs)
        return out, {
            others[path][0]: v.get_value()
            for path, v in nnx.to_flat_state(nnx.state(model))
            if path in others
        }

    def save_to(self, module: nnx.Module | None = None) -> nnx.Module:
        """Write copies of the values into a Flax module of the same structure, by default a new
        one, and return it.
        """
        found = self._values()
        made = _merged(
            self.structure.graph,
            {path: (v, found[place]) for path, (place, v) in self.structure.others.items()},
            {path: (v, v.get_value()) for path, v in self.structure.draws.items()},
        )
        if module is None:
            return made
        nnx.update(module, nnx.state(made, nnx.Not(nnx.RngState)))
        return module


def _merged(graph: Any, *values: Mapping[tuple[Any, ...], tuple[Any, Any]]) -> Any:
    """The Flax module with these variables, by path: the variable and its value."""
    every = {path: v.replace(value) for some in values for path, (v, value) in some.items()}
    return nnx.merge(graph, nnx.from_flat_state(every))


def _drawn(variable: Any, key: jax.Array) -> jax.Array:
    """The value of a variable of a random stream that starts at this key."""
    value = variable.get_value()
    if not isinstance(variable, nnx.RngKey):
        return jax.numpy.zeros_like(value)
    return jax.random.split(key, value.shape) if value.shape else key
