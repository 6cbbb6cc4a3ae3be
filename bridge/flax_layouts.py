"""torch's layers in Flax's own layouts: transposed kernels, channels last, and flattened feature
maps in a channels-last model's order.

Users import it from ``bridge.flax``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import torch.nn.functional as F
from flax import linen, traverse_util
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from bridge import modules

Path = tuple[str, ...]

_same, _swapped = (lambda w: w), np.transpose
# torch [out, in / groups, *kernel], Flax [*kernel, in / groups, out]
_channels_last = lambda w: np.moveaxis(w, (0, 1), (-1, -2))
_channels_first = lambda w: np.moveaxis(w, (-1, -2), (0, 1))
# torch [in, out, *kernel], Flax [*kernel, in, out]
_turned = lambda w: np.flip(np.moveaxis(w, (0, 1), (-2, -1)), tuple(range(w.ndim - 2)))
_turned_back = lambda w: np.moveaxis(np.flip(w, tuple(range(w.ndim - 2))), (-2, -1), (0, 1))

# class -> torch's name -> (collection, Flax's name, function from torch to Flax, function from Flax
# to torch)
_BIAS = {"bias": ("params", "bias", _same, _same)}
_SCALE = {"weight": ("params", "scale", _same, _same)} | _BIAS
_STATS = {
    "running_mean": ("batch_stats", "mean", _same, _same),
    "running_var": ("batch_stats", "var", _same, _same),
}
_LAYOUTS: list[tuple[type | tuple[type, ...], dict[str, tuple[str, str, Any, Any]]]] = [
    (nn.Linear, {"weight": ("params", "kernel", _swapped, _swapped)} | _BIAS),
    (_ConvTransposeNd, {"weight": ("params", "kernel", _turned, _turned_back)} | _BIAS),
    (_ConvNd, {"weight": ("params", "kernel", _channels_last, _channels_first)} | _BIAS),
    (nn.Embedding, {"weight": ("params", "embedding", _same, _same)}),
    ((nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _InstanceNorm), _SCALE),
    (_BatchNorm, _SCALE | _STATS),
    (
        nn.PReLU,
        {"weight": ("params", "negative_slope", lambda w: w.reshape(()), lambda w: w.reshape(1))},
    ),
]


class Leaf(NamedTuple):
    """Tensors of a layer, and the arrays that Flax has in their place; mostly one of each."""

    names: tuple[str, ...]  # torch's
    where: tuple[tuple[str, ...], ...]  # the collection, the names of the submodules, Flax's name
    tensors: tuple[torch.Tensor, ...]
    there: Callable[..., Sequence[np.ndarray]]
    back: Callable[..., Sequence[np.ndarray]]


def leaves(
    module: nn.Module, flattened: Mapping[str, int] | None, own: bool = False
) -> Iterator[Leaf]:
    """The tensors of a module; own: parameters that are in none of torch's layers are among them,
    in torch's layout.
    """
    found = []
    within: set[str] = set()  # layers that belong to the layer around them
    for path, m in module.named_modules(remove_duplicate=False):
        if path in within:
            continue
        attention = isinstance(m, nn.MultiheadAttention)
        within |= {f"{path}.{name}".strip(".") for name in m._modules} if attention else set()
        params = dict(m.named_parameters(recurse=attention, remove_duplicate=False))
        tensors = params | dict(m.named_buffers(recurse=False, remove_duplicate=False))
        layout = _layout(m)
        for name in [name for name in tensors if not any(name in names for names, *_ in layout)]:
            if _why_not(m) or (name in params and not own):
                where = ".".join(filter(None, (path, name)))
                raise TypeError(
                    f"module: Flax has no layer like {type(m).__name__}, and so no place for "
                    f"{where!r}{_why_not(m)}"
                )
            layout.append(((name,), [("params" if name in params else "torch", name)], *_ONE))
        found += [(path, m, tensors, *each) for each in layout if each[0][0] in tensors]
    channels = _flattened(module, flattened)
    for path, m, tensors, names, places, there, back in found:
        n, steps = channels.get(id(m)), tuple(filter(None, path.split(".")))
        if (
            n is not None
            and not (isinstance(m, nn.Linear) and names == ("bias",))
            and places[0][0] != "torch"
        ):
            there, back = (
                functools.partial(_features_last, n, there),
                functools.partial(_features_first, n, back),
            )
        at = tuple((kind, *steps, *name.split("/")) for kind, name in places)
        yield Leaf(
            tuple(".".join((*steps, name)) for name in names),
            at,
            tuple(tensors[name] for name in names),
            there,
            back,
        )


#: Of one layer: torch's names, (collection, Flax's name) of each array, and the functions from the
#: ones to the others.
_Places = list[tuple[tuple[str, ...], list[tuple[str, str]], Any, Any]]
_ONE = (lambda w: [w], lambda w: [w])


def _layout(m: nn.Module) -> _Places:
    if _why_not(m):
        return []
    if isinstance(m, nn.MultiheadAttention):
        return _attention(m)
    if isinstance(m, nn.RNNBase | nn.RNNCellBase):
        return _recurrent(m)
    layout = next((names for kind, names in _LAYOUTS if isinstance(m, kind)), {})
    one = lambda f: lambda w: [f(w)]
    return [
        ((name,), [(kind, theirs)], one(there), one(back))
        for name, (kind, theirs, there, back) in layout.items()
    ]


def _why_not(m: Any) -> str:
    """Why Flax's layer has no place for a layer with these arguments."""
    refused = {
        "of groups": isinstance(m, _ConvTransposeNd) and m.groups > 1,
        "of several slopes": isinstance(m, nn.PReLU) and m.num_parameters > 1,
        "with running statistics": isinstance(m, _InstanceNorm) and m.track_running_stats,
        "with add_zero_attn": isinstance(m, nn.MultiheadAttention) and m.add_zero_attn,
    }
    return next((f" (one {reason})" for reason, true in refused.items() if true), "")


def _attention(m: nn.MultiheadAttention) -> _Places:
    """torch [heads * size, in], Flax [in, heads, size]; the last Linear's [out, heads * size], Flax
    [heads, size, out].
    """
    heads = lambda w: w.T.reshape(*w.T.shape[:-1], m.num_heads, -1)
    rows = lambda w: w.reshape(*w.shape[:-2], -1).T
    each = ("query", "key", "value")
    parts = [("in_proj_weight", "kernel"), ("in_proj_bias", "bias")]
    return [
        *(
            (
                (name,),
                [("params", f"{of}/{theirs}") for of in each],
                lambda w: [heads(x) for x in np.split(w, 3)],
                lambda *w: [np.concatenate([rows(x) for x in w])],
            )
            for name, theirs in parts
        ),
        *(
            (
                (f"{of[0]}_proj_weight",),
                [("params", f"{of}/kernel")],
                lambda w: [heads(w)],
                lambda w: [rows(w)],
            )
            for of in each
        ),
        (
            ("out_proj.weight",),
            [("params", "out/kernel")],
            lambda w: [w.T.reshape(m.num_heads, -1, len(w))],
            lambda w: [w.reshape(-1, w.shape[-1]).T],
        ),
        (("out_proj.bias",), [("params", "out/bias")], *_ONE),
    ]


# classes, the gates in torch's order, the Dense layers that have a bias in Flax: "hf" is the forget
# gate's of the hidden state
_GATES: list[tuple[tuple[type, ...], Sequence[str], list[str]]] = [
    ((nn.LSTM, nn.LSTMCell), "ifgo", ["hi", "hf", "hg", "ho"]),
    ((nn.GRU, nn.GRUCell), "rzn", ["ir", "iz", "in", "hn"]),
    ((nn.RNN, nn.RNNCell), [""], ["i"]),
]


def _recurrent(m: nn.RNNBase | nn.RNNCellBase) -> _Places:
    """A cell, or linen.RNNs around cells, in linen.Bidirectional and linen.Sequential as torch's
    layer has directions and layers.
    """
    gates, biased = next((gates, biased) for kinds, gates, biased in _GATES if isinstance(m, kinds))

    def there(ih: np.ndarray, hh: np.ndarray) -> list[np.ndarray]:
        own = {
            side + gate: x
            for side, b in (("i", ih), ("h", hh))
            for gate, x in zip(gates, np.split(b, len(gates)), strict=True)
        }
        both = lambda name: {f"i{name[1:]}", f"h{name[1:]}"} <= set(biased)
        return [
            *(
                own[name] if both(name) else own[f"i{name[1:]}"] + own[f"h{name[1:]}"]
                for name in biased
            ),
            ih,
            hh,
        ]

    def back(*given: np.ndarray) -> list[np.ndarray]:
        *new, ih, hh = given
        if all(x.tobytes() == y.tobytes() for x, y in zip(new, there(ih, hh), strict=False)):
            # the sums are unchanged, so torch's two biases are those that were added
            return [ih, hh]
        # x + -0.0 is x bit by bit, x + 0.0 is not
        zero, by_name = np.full_like(new[0], -0.0), dict(zip(biased, new, strict=True))
        return [np.concatenate([by_name.get(side + gate, zero) for gate in gates]) for side in "ih"]

    def without(w: np.ndarray) -> list[np.ndarray]:
        return [x.T for x in np.split(w, len(gates))] + [np.zeros_like(w[0]) for _ in biased]

    def back_without(*given: np.ndarray) -> list[np.ndarray]:
        if any(x.any() for x in given[len(gates) :]):
            names = ", ".join(biased)
            raise RuntimeError(
                f"variables: the biases of {names} are not zero, and torch's {type(m).__name__} "
                "has bias=False"
            )
        return joined(*given[: len(gates)])

    joined = lambda *w: [np.concatenate([x.T for x in w])]
    layout: _Places = []
    for suffix, prefix in _cells(m):
        kernels = {
            side: [("params", f"{prefix}{side}{gate}/kernel") for gate in gates] for side in "ih"
        }
        biases = [("params", f"{prefix}{name}/bias") for name in biased]
        layout.append(
            (
                (f"weight_ih{suffix}",),
                kernels["i"],
                lambda w: [x.T for x in np.split(w, len(gates))],
                joined,
            )
        )
        if m.bias:
            names = (f"bias_ih{suffix}", f"bias_hh{suffix}")
            layout.append(
                (
                    (f"weight_hh{suffix}",),
                    kernels["h"],
                    lambda w: [x.T for x in np.split(w, len(gates))],
                    joined,
                )
            )
            layout.append((names, biases + [("torch", name) for name in names], there, back))
        else:
            layout.append(((f"weight_hh{suffix}",), kernels["h"] + biases, without, back_without))
    return layout


def _cells(m: Any) -> Iterator[tuple[str, str]]:
    """Of each cell: the end of its names in torch, the beginning of its names in Flax."""
    if isinstance(m, nn.RNNCellBase):
        yield "", ""
        return
    for layer in range(m.num_layers):
        for which, reverse in (("forward_rnn/", ""), ("backward_rnn/", "_reverse"))[
            : 1 + m.bidirectional
        ]:
            yield (
                f"_l{layer}{reverse}",
                f"layers_{layer}/" * (m.num_layers > 1) + which * m.bidirectional + "cell/",
            )


def _features_last(channels: int, there: Callable[..., Any], w: np.ndarray) -> Any:
    """Move features from torch's order [channels, *spatial] to [*spatial, channels], then apply
    ``there``.
    """
    return there(w.reshape(*w.shape[:-1], channels, -1).swapaxes(-1, -2).reshape(w.shape))


def _features_first(channels: int, back: Callable[..., Any], w: np.ndarray) -> list[np.ndarray]:
    return [
        x.reshape(*x.shape[:-1], -1, channels).swapaxes(-1, -2).reshape(x.shape) for x in back(w)
    ]


def arrays(leaf: Leaf) -> list[np.ndarray]:
    """The leaf's values in Flax's layout."""
    return list(leaf.there(*(np.asarray(modules.as_array(t)) for t in leaf.tensors)))


def shapes(leaf: Leaf) -> list[tuple[int, ...]]:
    return [x.shape for x in leaf.there(*(np.empty(t.shape, bool) for t in leaf.tensors))]


def to_variables(
    module: nn.Module, *, flattened: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """A torch module's weights in the layouts of Flax's own layers: transposed kernels, channels
    last, "scale" for a norm's "weight".

    The weights are for a twin, the same model in Flax, whose feature maps all have their channels
    last. If the twin flattens one for a Linear (or a norm), the features come in another order than
    in torch, and the weights of that layer are returned in that order. ``torch.fx`` finds these
    layers.

    Args:
        module: made of the layers in the table of docs/modules_and_files.md, and modules without
            tensors of their own.
        flattened: layer name -> number of channels, for each layer whose input is a flattened
            feature map; needed only if ``torch.fx`` cannot find them. {}: there are none, for a
            twin that moves the channels to the front before it flattens.

    Returns:
        dict: {"params": ..., "batch_stats": ..., "torch": ...} of jax.Arrays, nested by the names
            of the submodules. "params" has those
        with requires_grad=False too. "torch" has what Flax's layers have no place for and
            ``from_variables`` needs to restore the module
        bit by bit: other buffers, such as the counter of a BatchNorm, and the two biases of a gate
            of an LSTM, GRU or RNN, which Flax has
        the sum of. It may be left out.

    Raises:
        TypeError: Flax's layers have no place for a parameter of the module.
        ValueError: the layout of the input of a layer behind a convolution cannot be found, or the
            layer would compute something else with channels last.

    Source: https://flax.readthedocs.io/en/latest/guides/converting_and_upgrading/convert_pytorch_to_flax.html

    Example:
        >>> import jax, torch
        >>> from bridge.flax import to_variables
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5), torch.nn.BatchNorm2d(8))
        >>> jax.tree.map(lambda a: a.shape, to_variables(net))
        {'batch_stats': {'1': {'mean': (8,), 'var': (8,)}},
         'params': {'0': {'bias': (8,), 'kernel': (5, 5, 3, 8)}, '1': {'bias': (8,), 'scale':
         (8,)}},
         'torch': {'1': {'num_batches_tracked': ()}}}
    """
    known = leaves(module, flattened)
    found = {
        where: jax.numpy.asarray(x)
        for leaf in known
        for where, x in zip(leaf.where, arrays(leaf), strict=True)
    }
    return {"params": {}, **traverse_util.unflatten_dict(found)}


def from_variables(
    module: nn.Module, variables: Mapping[str, Any], *, flattened: Mapping[str, int] | None = None
) -> nn.Module:
    """Write weights in Flax's layouts into a torch module: the inverse of ``to_variables``.

    Args:
        module: changed in place.
        variables: {"params": ..., "batch_stats": ..., "torch": ...}, nested by the names of the
            submodules. Without "torch", counters stay, and so do the biases of recurrent layers if
            they add up to Flax's; else one of the two is zero.
        flattened: as in ``to_variables``.

    Returns:
        nn.Module: the module.

    Raises:
        RuntimeError: a variable is missing, unknown or of another shape; different values for one
            tied tensor; values that a tensor's dtype cannot hold. The module is then unchanged.
        TypeError, ValueError: as in ``to_variables``.

    Source: as in ``to_variables``.

    Example:
        >>> import torch
        >>> from bridge.flax import from_variables, to_variables
        >>> ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> torch.equal(from_variables(ours, to_variables(theirs)).weight, theirs.weight)
        True
    """
    write(leaves(module, flattened), {"/".join(path): x for path, x in flat(variables).items()})
    return module


def flat(variables: Mapping[str, Any]) -> dict[Path, Any]:
    """The arrays of a dict of collections, by the collection and path."""
    collections = {kind: dict(linen.unbox(below)) for kind, below in variables.items()}
    return {tuple(map(str, path)): x for path, x in traverse_util.flatten_dict(collections).items()}


def write(known: Iterable[Leaf], left: dict[str, Any]) -> None:
    """Write arrays in Flax's layouts, by their places, into tensors;
    all of them must have a place.
    """
    given, targets = {}, {}
    for leaf in known:
        values = []
        for i, (where, expected) in enumerate(
            zip(map("/".join, leaf.where), shapes(leaf), strict=True)
        ):
            if where not in left and leaf.where[i][0] != "torch":
                raise RuntimeError(f"variables: {where} missing")
            values.append(np.asarray(left.pop(where)) if where in left else arrays(leaf)[i])
            if values[-1].shape != expected:
                raise RuntimeError(
                    f"variables: expected {where} of shape {expected}, got {values[-1].shape}"
                )
        for i, value in enumerate(leaf.back(*values)):
            name = "/".join(leaf.where[0]) if len(leaf.tensors) == 1 else leaf.names[i]
            given[name], targets[name] = np.asarray(value, order="C"), leaf.tensors[i]
    if left:
        raise RuntimeError(f"variables: the module has no place for {', '.join(left)}")
    modules.write(modules.matched("variables", given, targets, strict=True))


# -- which layers get a flattened feature map ------------------------------------------------------
class _Layout(NamedTuple):
    """The meaning of a value's dimensions.

    "input": the value is made of arguments alone, which the twin gets in its own layout. "last":
    features are the last dimension. "moved": they were, and may have been moved to the front.
    "first": a feature map with its channels first. "flat": a flattened feature map. "lost": a
    feature map after some other operation.
    """

    kind: str
    channels: int = 0
    spatial: int = 0  # the number of dimensions after the channels


_INPUT, _LAST, _MOVED, _LOST = _Layout("input"), _Layout("last"), _Layout("moved"), _Layout("lost")
_FUNCTIONS = {
    getattr(F, name): name
    for name in dir(F)
    if callable(getattr(F, name)) and not name.startswith("_")
}
# these work along the spatial dimensions alone
_POOLING = {
    f"{kind}_pool{n}d"
    for kind in ("max", "avg", "adaptive_max", "adaptive_avg", "lp")
    for n in (1, 2, 3)
} | {"interpolate"}
_ELEMENTWISE = {
    "relu",
    "relu_",
    "relu6",
    "leaky_relu",
    "elu",
    "selu",
    "celu",
    "gelu",
    "silu",
    "mish",
    "softplus",
    "softsign",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "logsigmoid",
    "sigmoid",
    "sigmoid_",
    "tanh",
    "tanh_",
    "exp",
    "log",
    "sqrt",
    "square",
    "abs",
    "neg",
    "clamp",
    "clip",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "contiguous",
    "clone",
    "detach",
    "to",
    "float",
    "double",
    "half",
    "bfloat16",
    "add",
    "add_",
    "sub",
    "mul",
    "mul_",
    "div",
    "truediv",
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "pow",
    "maximum",
    "minimum",
    "where",
}
_REDUCTIONS = {"mean", "sum", "amax", "amin", "logsumexp"}
# they work along it
_LAST_DIMENSION = (
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
# of torch.nn.modules
_MODULES = ("activation", "dropout", "pooling", "padding", "upsampling", "instancenorm")


def _flattened(module: nn.Module, given: Mapping[str, int] | None) -> dict[int, int]:
    """id of a layer whose input is a flattened feature map -> the number of
    channels of that map.
    """
    if given is not None:
        named = dict(module.named_modules(remove_duplicate=False))
        unknown = [
            name
            for name in given
            if not isinstance(named.get(name), nn.Linear | nn.LayerNorm | nn.RMSNorm | _BatchNorm)
        ]
        if unknown:
            raise ValueError(
                "flattened: the module has no Linear, LayerNorm, RMSNorm or BatchNorm called "
                f"{', '.join(map(repr, unknown))}"
            )
        return {
            id(named[name]): _divided(name, named[name], channels)
            for name, channels in given.items()
        }
    has = lambda *kinds: any(isinstance(m, kinds) for m in module.modules())
    if not has(_ConvNd) or not has(*_LAST_DIMENSION, nn.BatchNorm1d):
        return {}
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception as error:  # the user's Python ran on proxies
        raise ValueError(
            f"module: torch.fx cannot follow it ({type(error).__name__}: "
            f"{error}), and so not see {_ADVICE}"
        ) from error
    found: dict[int, int] = {}
    layouts: dict[fx.Node, _Layout] = {}
    for node in graph.nodes:
        of_args = [layouts[x] for x in node.all_input_nodes]
        if node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            layouts[node] = _through_layer(
                str(node.target), layer, of_args[0] if of_args else _INPUT, found
            )
        else:
            layouts[node] = (
                _INPUT
                if node.op in ("placeholder", "get_attr")
                else _through_function(node, of_args)
            )
    return {layer: channels for layer, channels in found.items() if channels}


_ADVICE = (
    "which layers get a flattened feature map; say so with flattened={'fc': 64} for one of 64 "
    "channels that goes into the layer fc, or flattened={} if there is none"
)


def _divided(name: str, layer: Any, channels: int) -> int:
    if isinstance(layer, nn.Linear | _BatchNorm):
        features = layer.in_features if isinstance(layer, nn.Linear) else layer.num_features
    else:
        features = layer.normalized_shape[-1]
    if features % channels:
        raise ValueError(
            f"flattened: {name!r} takes {features} features, which are no "
            f"multiple of {channels} channels"
        )
    return channels


def _through_layer(name: str, layer: Any, x: _Layout, found: dict[int, int]) -> _Layout:
    """The layout of a layer's output; if its input is a flattened feature map, ``found`` gets the
    number of channels.
    """
    refused = ValueError(
        f"module: the input of {name!r} ({type(layer).__name__}) is not laid out so that it can be "
        f"told {_ADVICE}"
    )
    if isinstance(layer, nn.Flatten):
        return _flatten(x, layer.start_dim, layer.end_dim)
    if next(layer.parameters(), next(layer.buffers(), None)) is None:
        kind = type(layer).__module__.rpartition(".")[2]
        known = (kind in _MODULES and not isinstance(layer, nn.GLU)) or isinstance(
            layer, nn.Identity | _BatchNorm
        )
        return (
            _kept(x, type(layer).__name__, flat=kind not in ("pooling", "padding", "upsampling"))
            if known
            else _changed([x])
        )
    unflat = (nn.GroupNorm, _InstanceNorm, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
    taken = {"lost"} | (
        {"flat", "last"}
        if isinstance(layer, _ConvNd)
        else {"flat"}
        if isinstance(layer, unflat)
        else set()
    )
    if x.kind in taken:
        raise refused
    if isinstance(layer, _ConvNd):
        return _Layout("first", layer.out_channels, len(layer.kernel_size))
    if isinstance(layer, _LAST_DIMENSION) and x.kind == "first":
        raise ValueError(
            f"module: {name!r} ({type(layer).__name__}) takes the last dimension of a feature map "
            "whose channels are first; where they are last, it would take the channels"
        )
    if isinstance(layer, nn.Linear | nn.LayerNorm | nn.RMSNorm | _BatchNorm):
        channels = _divided(name, layer, x.channels) if x.kind == "flat" else 0
        if found.setdefault(id(layer), channels) != channels:
            raise refused
    return (
        _LAST
        if isinstance(layer, (*_LAST_DIMENSION, nn.Embedding))
        and not isinstance(layer, nn.LayerNorm | nn.RMSNorm)
        else x
    )


def _through_function(node: fx.Node, of_args: list[_Layout]) -> _Layout:
    name = (
        node.target
        if isinstance(node.target, str)
        else _FUNCTIONS.get(node.target, getattr(node.target, "__name__", ""))
    )
    args, x = node.args, of_args[0] if of_args else _INPUT
    if (
        node.op == "output"
        or name in ("size", "dim", "getattr")
        or (node.target is operator.getitem and x.kind == "input")
    ):
        return _INPUT
    if name in _ELEMENTWISE or name in _POOLING:
        maps = {layout for layout in of_args if layout.kind != "input"}
        return (
            _INPUT
            if not maps
            else _kept(maps.pop(), name, flat=name in _ELEMENTWISE)
            if len(maps) == 1
            else _LOST
        )
    if name == "flatten":
        return _flatten(
            x,
            *(
                node.kwargs.get(k, args[i] if len(args) > i else d)
                for i, k, d in ((1, "start_dim", 0), (2, "end_dim", -1))
            ),
        )
    if name in ("view", "reshape"):
        sizes = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
        if len(sizes) == 2 and not node.kwargs:
            return _flatten(x, 1, -1)
        return _LOST if x.kind in ("last", "moved") else _changed(of_args)
    if name in ("permute", "transpose", "swapaxes", "movedim", "moveaxis"):
        return _moved(
            x,
            args[1] if name == "permute" and isinstance(args[1], tuple | list) else args[1:],
            name,
        )
    if name in _REDUCTIONS and x.kind == "first":
        keep = bool(node.kwargs.get("keepdim", args[2] if len(args) > 2 else False))
        return _reduced(x, node.kwargs.get("dim", args[1] if len(args) > 1 else None), keep)
    if name in ("cat", "concat", "concatenate") and {layout.kind for layout in of_args} == {
        "first"
    }:
        spatial = {layout.spatial for layout in of_args}
        along = node.kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return (
            _Layout("first", sum(layout.channels for layout in of_args), spatial.pop())
            if along == 1 and len(spatial) == 1
            else _LOST
        )
    return _changed(of_args)


def _kept(x: _Layout, name: str, flat: bool) -> _Layout:
    """The layout after an elementwise layer (flat), or one along as many last dimensions as its
    name says (MaxPool2d, avg_pool1d).
    """
    dims = int(name[-2]) if name[-1] == "d" and name[-2:-1].isdigit() else 0
    return (
        x if flat or not (x.kind == "flat" or (x.kind == "first" and dims > x.spatial)) else _LOST
    )


def _changed(of_args: list[_Layout]) -> _Layout:
    """The layout after an unknown operation; only the layout of a feature map is lost."""
    kinds = {layout.kind for layout in of_args}
    return (
        _LOST
        if kinds & {"first", "flat", "lost"}
        else _LAST
        if kinds & {"last", "moved"}
        else _INPUT
    )


def _flatten(x: _Layout, start: Any, end: Any) -> _Layout:
    if x.kind == "first" and end in (-1, x.spatial + 1):
        return (
            _Layout("flat", x.channels)
            if start == 1
            else x._replace(spatial=1)
            if start == 2
            else _LOST
        )
    return x if x.kind in ("input", "last", "flat") and start == 1 else _changed([x])


def _moved(x: _Layout, dims: Any, name: str) -> _Layout:
    """The layout after channels are moved to the end, or features to the front; the twin does
    neither.
    """
    if x.kind != "first":
        return _MOVED if x.kind in ("last", "moved") else _changed([x])
    n = x.spatial + 2
    if not all(isinstance(d, int) for d in dims):
        return _LOST
    dims = tuple(d % n for d in dims)
    if name == "permute":
        return _LAST if dims == (0, *range(2, n), 1) else _LOST
    moved = dims == (1, n - 1) or (n == 3 and dims == (2, 1))
    return _LAST if moved and (n == 3 or name in ("movedim", "moveaxis")) else _LOST


def _reduced(x: _Layout, dims: Any, keep: bool) -> _Layout:
    dims = {
        d % (x.spatial + 2)
        for d in (dims if isinstance(dims, tuple | list) else (dims,))
        if isinstance(d, int)
    }
    if not dims or dims & {0, 1}:
        return _LOST
    left = x.spatial - (0 if keep else len(dims))
    return x._replace(spatial=left) if left else _LAST
