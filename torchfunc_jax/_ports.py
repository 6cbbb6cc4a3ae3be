"""What a port is, a module of flax.linen or flax.nnx or a function of arrays: its calls, and its
arrays for a torch module's values.

A port's arrays are a dict, {path: array}; the paths begin with "params/" or "batch_stats/" (or the
name of another collection).
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx, traverse_util
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bridge.flax import NameMap, name_map
from torchfunc_jax._parity_compare import shown_error

Arrays = dict[str, Any]
Args = Sequence[Any]

#: Names of a call's parameters: whether it trains, whether it does not, its key, its state.
_TRAIN = ("train", "training", "is_training")
_EVAL = ("deterministic", "inference", "use_running_average")
_KEY = ("key", "rng", "rngs")
_STATE = ("state", "buffers", "batch_stats")
LAYOUTS = ("flax", "torch")


class PortError(RuntimeError):
    """A port could not be compared: its arrays are not those of the module, or it cannot be called;
    the message says what to give.

    Example:
        >>> import jax.numpy as jnp, torch
        >>> from torchfunc_jax.testing import PortError, port_parity
        >>> def apply(params, x):
        ...     return x @ params["w"]
        >>> try:
        ...     port_parity(
        ...         torch.nn.Linear(3, 2, bias=False),
        ...         apply,
        ...         torch.ones(4, 3),
        ...         variables={"w": jnp.ones((3, 5))},
        ...     )
        ... except PortError as error:
        ...     print(str(error).splitlines()[2])
        weight  -         the twin has no kernel of shape (3, 2) left
    """


class Variables(NamedTuple):
    """A port's arrays: those that an optimizer changes, and all others."""

    params: Arrays
    state: Arrays


# -- kinds of ports --------------------------------------------------------------------------------
class _Kind:
    """How a kind of port keeps its arrays, and how it is called.

    Attributes:
        has_mode: whether a call can be told to train or not.
        template: its arrays as it makes them, which have the right paths and shapes; None if it
            takes the module's by torch's names.
    """

    has_mode: bool
    template: Arrays | None

    def twin(self) -> Any:
        """What ``name_map`` takes for it."""
        raise NotImplementedError

    def copy(self) -> Any:
        """A twin that may be written to."""
        return self.twin()

    def read(self, twin: Any) -> Arrays:
        """The arrays in what ``name_map`` has made of the twin."""
        raise NotImplementedError

    def label(self, path: str) -> str:
        """The path by which ``name_map`` knows an array."""
        return path

    def flat(self, tree: Any) -> Arrays:
        """The arrays in what a user's function makes for a call."""
        raise NotImplementedError

    def call(
        self, arrays: Arrays, args: Args, kwargs: Mapping[str, Any], train: bool, key: jax.Array
    ) -> tuple[Any, Arrays]:
        """The output, and the arrays after the call."""
        raise NotImplementedError


class _Linen(_Kind):
    def __init__(self, module: linen.Module, args: Args, kwargs: Mapping[str, Any]) -> None:
        self.module = module
        self.takes = _parameters(type(module).__call__)
        self.has_mode = _has_mode(self.takes)
        made: list[Any] = []
        make = lambda key: module.init(
            {"params": key, "dropout": key}, *args, **kwargs, **_options(self.takes, False, key)
        )
        # what eval_shape returns would be sorted by names
        jax.eval_shape(lambda key: made.append(make(key)), jax.random.key(0))
        if made[0].keys() - {"params", "batch_stats"}:  # values that the module does not have
            made = [make(jax.random.key(0))]
        self.template = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.core.Tracer) else x
            for path, x in self.flat(linen.unbox(made[0])).items()
        }

    def twin(self) -> Any:
        return traverse_util.unflatten_dict(self.template, sep="/")

    def read(self, twin: Any) -> Arrays:
        return traverse_util.flatten_dict(twin, sep="/")

    def flat(self, tree: Any) -> Arrays:
        tree = dict(tree)
        return traverse_util.flatten_dict(tree if "params" in tree else {"params": tree}, sep="/")

    def call(
        self, arrays: Arrays, args: Args, kwargs: Mapping[str, Any], train: bool, key: jax.Array
    ) -> tuple[Any, Arrays]:
        variables = traverse_util.unflatten_dict(arrays, sep="/")
        changing = (
            [collection for collection in variables if collection != "params"] if train else []
        )
        given = {**kwargs, **_options(self.takes, train, key)}
        found = self.module.apply(
            variables, *args, **given, mutable=changing or False, rngs={"dropout": key}
        )
        out, after = found if changing else (found, {})
        return out, traverse_util.flatten_dict(dict(after), sep="/")


_COLLECTIONS = {"Param": "params", "BatchStat": "batch_stats"}


class _NNX(_Kind):
    def __init__(self, module: nnx.Module) -> None:
        self.module = module
        self.takes = _parameters(type(module).__call__)
        self.has_mode = True
        self.template = self.read(self.module)

    def twin(self) -> Any:
        return self.module  # a copy would not have its attributes in the order of definition

    def copy(self) -> Any:
        return nnx.clone(self.module)

    def read(self, twin: Any) -> Arrays:
        return {path: v.get_value() for path, v in self._variables(twin)}

    def _variables(self, module: nnx.Module) -> list[tuple[str, Any]]:
        """Those that are no state of a random stream."""
        return [
            ("/".join((_COLLECTIONS.get(type(v).__name__, type(v).__name__), *map(str, path))), v)
            for path, v in nnx.to_flat_state(nnx.state(module))
            if not isinstance(v, nnx.RngState)
        ]

    def flat(self, tree: Any) -> Arrays:
        if isinstance(tree, nnx.Module):
            return self.read(tree)
        given = (
            {"/".join(map(str, path)): x for path, x in nnx.to_flat_state(tree)}
            if isinstance(tree, nnx.State)
            else (traverse_util.flatten_dict(dict(tree), sep="/"))
        )
        by_end = {path.partition("/")[2]: path for path in self.template or {}}
        return {
            by_end.get(path, path): getattr(x, "get_value", lambda x=x: x)()
            for path, x in given.items()
        }

    def call(
        self, arrays: Arrays, args: Args, kwargs: Mapping[str, Any], train: bool, key: jax.Array
    ) -> tuple[Any, Arrays]:
        module = self.copy()
        (module.train if train else module.eval)()
        for _, v in nnx.to_flat_state(nnx.state(module, nnx.RngKey)):
            v.set_value(
                jax.random.key_data(key)
                if not jnp.issubdtype(v.get_value().dtype, jax.dtypes.prng_key)
                else key
            )
        for path, v in self._variables(module):
            if path in arrays:
                v.set_value(arrays[path])
        out = module(*args, **kwargs, **_options(self.takes, train, key))
        return out, self.read(module)


class _Function(_Kind):
    """A function of a tree of arrays, and of a tree of state if its second parameter has such a
    name; then it returns (output, state).

    Args:
        variables: an example of the tree, or of (tree, state); or a function that makes it, of no
            arguments or of a key.
    """

    def __init__(self, fn: Callable[..., Any], variables: Any) -> None:
        self.fn = fn
        self.takes = _parameters(fn)
        self.has_mode = _has_mode(self.takes)
        self.has_state = len(self.takes) > 1 and self.takes[1] in _STATE
        if callable(variables):
            variables = variables(*[jax.random.key(0)] * len(_required(variables)))
        self.tree = variables
        self.template = None if variables is None else self.flat(variables)
        self._labels = {path: _split(path) for path in self.template or {}}
        if len(set(self._labels.values())) < len(self._labels):
            self._labels = {path: path for path in self._labels}

    def twin(self) -> Any:
        assert self.template is not None
        return traverse_util.unflatten_dict(
            {self._labels[path]: x for path, x in self.template.items()}, sep="/"
        )

    def read(self, twin: Any) -> Arrays:
        found = traverse_util.flatten_dict(twin, sep="/")
        return {path: found[label] for path, label in self._labels.items()}

    def label(self, path: str) -> str:
        return self._labels[path]

    def _trees(self, tree: Any) -> dict[str, Any]:
        if not self.has_state:
            return {"params": tree}
        if not isinstance(tree, tuple) or len(tree) != 2:
            raise PortError(
                "variables: the port takes a state, so (params, state) are "
                f"expected, got {type(tree)}"
            )
        return dict(zip(("params", "batch_stats"), tree, strict=True))

    def flat(self, tree: Any) -> Arrays:
        self.tree = tree if self.tree is None else self.tree
        return {
            f"{collection}/{jax.tree_util.keystr(path, simple=True, separator='/')}": x
            for collection, below in self._trees(tree).items()
            for path, x in jax.tree_util.tree_flatten_with_path(below)[0]
        }

    def _tree(self, arrays: Arrays) -> Any:
        """What the function takes."""
        if self.tree is not None:
            flat = self.flat(self.tree)
            return jax.tree.unflatten(
                jax.tree.structure(self.tree), [arrays.get(path, x) for path, x in flat.items()]
            )
        names: dict[str, Arrays] = {"params": {}, "batch_stats": {}}
        for path, x in arrays.items():
            collection, _, name = path.partition("/")
            names[collection][name] = x
        return (
            (names["params"], names["batch_stats"])
            if self.has_state
            else names["params"] | names["batch_stats"]
        )

    def call(
        self, arrays: Arrays, args: Args, kwargs: Mapping[str, Any], train: bool, key: jax.Array
    ) -> tuple[Any, Arrays]:
        tree = self._tree(arrays)
        out = self.fn(
            *(tree if self.has_state else (tree,)),
            *args,
            **kwargs,
            **_options(self.takes, train, key),
        )
        if not self.has_state:
            return out, {}
        if not isinstance(out, tuple) or len(out) != 2:
            raise PortError(
                "port: it takes a state, so it has to return (output, state), and it returned "
                f"{type(out).__name__}"
            )
        return out[0], {
            f"batch_stats/{jax.tree_util.keystr(path, simple=True, separator='/')}": x
            for path, x in jax.tree_util.tree_flatten_with_path(out[1])[0]
        }


def kind_of(port: Any, variables: Any, args: Args, kwargs: Mapping[str, Any]) -> _Kind:
    """The kind of a user's port; args, kwargs: arrays that it can be called with."""
    try:
        return _kind(port, variables, args, kwargs)
    except PortError:
        raise
    except Exception as error:
        raise PortError(f"port: making it raised {shown_error(error)}") from error


def _kind(port: Any, variables: Any, args: Args, kwargs: Mapping[str, Any]) -> _Kind:
    modules = (linen.Module, nnx.Module)
    port = (
        getattr(port, "__self__", port)
        if isinstance(getattr(port, "__self__", None), modules)
        else port
    )
    if callable(port) and not isinstance(port, modules):
        needed = _required(port)
        # a class, or a function that makes a module
        if isinstance(port, type) or not needed or needed == ["rngs"]:
            port = port(**({"rngs": nnx.Rngs(0)} if needed == ["rngs"] else {}))
    if isinstance(port, linen.Module):
        return _Linen(port, args, kwargs)
    if isinstance(port, nnx.Module):
        return _NNX(port)
    if not callable(port):
        raise PortError(
            "port: expected a module of flax.linen or flax.nnx, its class, a function that makes "
            f"one, or a function apply(params, x), got {type(port)}"
        )
    return _Function(port, variables)


def _parameters(fn: Any) -> list[str]:
    return [name for name in inspect.signature(fn).parameters if name != "self"]


def _required(fn: Any) -> list[str]:
    """The parameters that a function, a class, or a partial of one, needs."""
    called, given = (
        (fn.func, fn) if isinstance(fn, functools.partial) else (fn, functools.partial(fn))
    )
    own: Any = inspect.getattr_static(called, "__init__") if isinstance(called, type) else called
    parameters = list(inspect.signature(own).parameters.values())
    # nnx hides the signature of a class, not that of its __init__
    parameters = parameters[len(given.args) + isinstance(called, type) :]
    return [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in given.keywords
    ]


def _has_mode(takes: Sequence[str]) -> bool:
    return any(name in takes for name in (*_TRAIN, *_EVAL))


def _options(takes: Sequence[str], train: bool, key: jax.Array) -> dict[str, Any]:
    """The keyword arguments by which a call learns its mode and its key."""
    options: dict[str, Any] = {name: train for name in takes if name in _TRAIN} | {
        name: not train for name in takes if name in _EVAL
    }
    return options | {
        name: {"dropout": key} if name == "rngs" else key for name in takes if name in _KEY
    }


_ENDS = r"w|b|weights?|bias|kernel|scale|gamma|beta|embedding|mean|var|running_mean|running_var"


def _split(path: str) -> str:
    """A path whose last name is a layer's and an array's in one, with both: "params/w1" as
    "params/1/w", "fc_weight" as "fc/weight".
    """
    above, _, name = path.rpartition("/")
    said = re.fullmatch(rf"(?i)(?:({_ENDS})_?(\d+)|(.+)[_.]({_ENDS}))", name)
    if said is None:
        return path
    layer, end = (said[2], said[1]) if said[1] else (said[3].replace(".", "/"), said[4])
    return f"{above}/{layer}/{end}"


# -- a port with the module's values ---------------------------------------------------------------
class Port:
    """A port whose arrays have been found.

    Args:
        names: rules of ``name_map``, {torch's name: path in the port}; or a function from {torch's
            name: array} to what the port takes.
        layout: "flax" or "torch": in whose layouts the port keeps its arrays; None: as their names
            or shapes say.

    Attributes:
        labels: a path in the port -> the name of the module's tensor that is there.
        missing: name of a parameter of the module that the port does not have -> why.
    """

    def __init__(self, kind: _Kind, module: nn.Module, names: Any, layout: str | None) -> None:
        self.module, self.kind = copy.deepcopy(module), kind
        self.convert = names if callable(names) else None
        self.map: NameMap | None = None
        self.missing: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        if self.convert is not None:
            return
        if self.kind.template is not None:
            self._match(names, layout)
        elif names:
            raise PortError(
                "names: a port that says nothing of its arrays takes the module's under torch's "
                "names; give variables=, an example of what it takes (--variables port.py:init), "
                "or names as a function from {torch's name: array} to that"
            )
        else:
            buffers = dict(self.module.named_buffers())
            self.labels = {
                f"{'batch_stats' if name in buffers else 'params'}/{name}": name
                for name in _tensors(self.module)
            }

    def _match(self, rules: Mapping[str, str] | None, layout: str | None) -> None:
        template = self.kind.template or {}
        own = {path.partition("/")[2].replace("/", "."): path for path in template}
        tensors = {name: tuple(t.shape) for name, t in _tensors(self.module).items()}
        params = dict(self.module.named_parameters())
        if (
            layout != "flax"
            and not rules
            and params.keys() <= own.keys() <= tensors.keys()
            and all(tuple(template[path].shape) == tensors[name] for name, path in own.items())
        ):
            self.labels = {path: name for name, path in own.items()}
            return
        found: list[NameMap] = []
        failed: Exception | None = None
        for each in LAYOUTS if layout is None else (layout,):
            try:
                found.append(
                    name_map(
                        self.module if each == "flax" else _without_layouts(self.module),
                        self.kind.twin(),
                        rules,
                    )
                )
            except (TypeError, ValueError) as error:
                failed = error
        if not found:
            raise PortError(f"names: {failed}") from failed
        self.map = min(found, key=lambda m: len(m.unmatched) + len(m.unmatched_twin))
        self.map.twin = self.kind.copy()
        self.missing = {name: why for name, why in self.map.unmatched.items() if name in params}
        if self.map.unmatched_twin:
            raise PortError(
                (
                    "names: which array of the port is which tensor of the module could not be "
                    f"found:\n{self.map}\n"
                )
                + "".join(self._transposed(template, tensors))
                + (
                    'Say it: names={"torch\'s name": "path in the port"} (--names FILE.json; a '
                    "star is a part of a name), or names as a "
                    "function from {torch's name: array} to what the port takes (--names "
                    "port.py:convert)."
                )
            )
        paths = {self.kind.label(path): path for path in template}
        for ours, theirs, _ in self.map.matched:
            path, name = paths[theirs.partition("[")[0]], ours.partition("[")[0]
            before = self.labels.get(path)
            self.labels[path] = name if before in (None, name) else f"{before} and {name}"

    def _transposed(self, template: Arrays, tensors: Mapping[str, tuple[int, ...]]) -> list[str]:
        """For each tensor without a counterpart, which array would be one if it were transposed, or
        as torch has it.
        """
        assert self.map is not None
        said = []
        for name in self.map.unmatched:
            for path, x in template.items():
                if (
                    self.kind.label(path) in self.map.unmatched_twin
                    and len(x.shape) == 2
                    and len(tensors.get(name, ())) == 2
                ):
                    if tuple(x.shape) == tensors[name][::-1]:
                        said.append(
                            f"{path} has shape {tuple(x.shape)}, which is {name} of shape "
                            f"{tensors[name]}, transposed.\n"
                        )
                    elif tuple(x.shape) == tensors[name]:
                        said.append(
                            f"{path} has the shape that {name} has in torch, {tensors[name]}; "
                            "Flax's layout is its transpose.\n"
                        )
        return said

    def place(self, values: Mapping[str, np.ndarray]) -> Variables:
        """The port's arrays for values of the module's tensors, by torch's names; tensors without a
        new value have the module's.
        """
        if self.convert is not None:
            try:
                flat = self.kind.flat(
                    self.convert({name: jnp.asarray(x) for name, x in self._every(values).items()})
                )
            except Exception as error:
                raise PortError(
                    f"names: the function that makes the port's arrays raised {shown_error(error)}"
                ) from error
        elif self.map is not None:
            for name, t in _tensors(self.module).items():
                if name in values:
                    t.data = torch.from_numpy(np.array(values[name]))
            flat = self.kind.read(self.map.to_flax(strict=False))
        else:
            flat = {
                path: jnp.asarray(values[name])
                for path, name in self.labels.items()
                if name in values
            }
        frozen = {
            name
            for name, p in self.module.named_parameters(remove_duplicate=False)
            if not p.requires_grad
        }
        trained = {
            path
            for path in flat
            if path.startswith("params/") and self.labels.get(path) not in frozen
        }
        if isinstance(self.kind, _Function) and self.map is None and self.convert is None:
            trained &= {
                path
                for path, name in self.labels.items()
                if name in dict(self.module.named_parameters(remove_duplicate=False))
            }
        return Variables(
            {p: x for p, x in flat.items() if p in trained},
            {p: x for p, x in flat.items() if p not in trained},
        )

    def _every(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The values under all names that ``state_dict`` has; a tensor may have several."""
        given = {id(t): values[name] for name, t in _tensors(self.module).items() if name in values}
        every = (
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        )
        return {name: given.get(id(t), t.detach().numpy()) for name, t in every}

    def counts(self) -> Arrays:
        """How many numbers of the module's are added up in each number of the arrays that are
        trained: two in a bias of Flax's LSTM.
        """
        before = {name: t.detach().numpy().copy() for name, t in _tensors(self.module).items()}
        found = self.place({name: np.ones_like(x) for name, x in before.items()}).params
        self.place(before)
        return {path: np.maximum(np.asarray(x), 1) for path, x in found.items()}

    def name(self, path: str) -> str:
        """A path in the port, with the name of the module's tensor that is there."""
        own = self.labels.get(path)
        return path if own is None else own if own == path.partition("/")[2] else f"{own} ({path})"

    def call(
        self,
        variables: Variables,
        args: Args,
        kwargs: Mapping[str, Any],
        train: bool,
        key: jax.Array,
    ) -> tuple[Any, Arrays]:
        """The output, and the state after the call; JAX can trace it."""
        out, after = self.kind.call(
            {**variables.params, **variables.state}, args, kwargs, train, key
        )
        return out, {path: after.get(path, x) for path, x in variables.state.items()}


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


class _Plain(nn.Module):
    """Holds tensors, and is no layer of torch's."""


def _without_layouts(module: nn.Module) -> nn.Module:
    """A module of the same tensors under the same names, to whose layers (but batch norms) no
    layout of Flax's applies.
    """
    if isinstance(module, _BatchNorm):
        return module
    plain = _Plain()
    plain._parameters, plain._buffers = module._parameters, module._buffers
    plain._modules = {
        name: None if m is None else _without_layouts(m) for name, m in module._modules.items()
    }
    return plain
