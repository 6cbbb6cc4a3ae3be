"""A tree as a checkpoint's header and arrays by name, and the tree again from the two; this file
knows nothing of files.

A leaf's name is its path: keys, fields and positions joined by dots.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge import modules
from bridge.convert import dtypes, tensors, trees

#: Version of the header; a checkpoint with a higher version is refused.
VERSION = 1

# Python values as JSON and back, exactly: name -> (type, encode, decode)
_VALUES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "none": (type(None), lambda x: None, lambda text: None),
    "bool": (bool, bool, bool),
    "int": (int, hex, lambda text: int(text, 16)),  # Python limits the number of decimal digits
    "float": (float, float.hex, float.fromhex),
    "complex": (
        complex,
        lambda x: [x.real.hex(), x.imag.hex()],
        lambda text: complex(*map(float.fromhex, text)),
    ),
    "str": (str, str, str),
}
_ARRAYS = {"torch": torch.Tensor, "jax": jax.Array, "numpy": np.ndarray, "numpy scalar": np.generic}
_KINDS = {kind: name for name, (kind, _, _) in _VALUES.items()}
# dtypes of every version of safetensors and of Orbax; arrays of other dtypes are stored as their
# bytes
_STORED = {
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
}


def taken_apart(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header of a tree, which JSON can hold, and its arrays by name; TypeError for other
    leaves, ValueError if two have one name.
    """
    leaves: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    named, structure = names(tree)
    for name, x in named.items():
        if type(x) in _KINDS:
            leaves[name] = {"kind": "python", "value": _encoded(x)}
            continue
        kind = next(kind for kind, classes in _ARRAYS.items() if isinstance(x, classes))
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            kind, x = f"key {jax.random.key_impl(x)}", jax.random.key_data(x)
        try:
            arrays[name] = x if isinstance(x, jax.Array) else as_numpy(x)
        except TypeError as error:
            raise TypeError(f"tree: {name!r}: {error}") from None
        leaves[name] = {"kind": kind, "dtype": arrays[name].dtype.name, "shape": list(x.shape)}
    return {"version": VERSION, "tree": structure, "leaves": leaves}, arrays


def names(tree: Any, *more: type) -> tuple[dict[str, Any], Any]:
    """The leaves by name, which may be of more classes, and the structure as ``_walk`` returns it;
    raises as ``taken_apart``.
    """
    named: dict[str, Any] = {}

    def visit(name: str, x: Any) -> None:
        if not isinstance(x, (*_ARRAYS.values(), *more)) and type(x) not in _KINDS:
            raise TypeError(
                f"tree: expected arrays, numbers, strings, bools or None, got {type(x)} at {name!r}"
            )
        if getattr(x, "dtype", None) == np.dtype(object):
            raise TypeError(f"tree: {name!r} is a numpy array of Python objects")
        if name in named or name == "__metadata__":
            raise ValueError(
                f"tree: two leaves are called {name!r}"
                if name in named
                else f"tree: no leaf can be called {name!r}"
            )
        named[name] = x

    return named, _walk(tree, visit)[1]


def stored(x: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """An array as it is written: itself, or its bytes along a new last dimension if the dtype is
    not one of ``_STORED``.
    """
    if np.dtype(x.dtype).name in _STORED:
        return x
    x = np.ascontiguousarray(x)
    return x.reshape(-1).view(np.uint8).reshape(*x.shape, x.dtype.itemsize)


def as_numpy(x: torch.Tensor | np.ndarray) -> np.ndarray:
    """A torch or numpy array as a numpy array."""
    return np.asarray(tensors.to_jax(x.detach()) if isinstance(x, torch.Tensor) else x)


def by_name(header: Mapping[str, Any] | None, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a checkpoint by name, jax.Arrays and Python values; header: None if another
    program wrote the checkpoint.
    """
    return {
        name: x if type(x) in _KINDS else _as_jax(x, kind)
        for name, (kind, x) in _leaves(header, arrays).items()
    }


def like(tree: Any, header: Mapping[str, Any] | None, arrays: Mapping[str, Any]) -> Any:
    """The checkpoint as a tree with the structure of ``tree`` and the kinds and dtypes of its
    leaves; RuntimeError if that cannot be.
    """
    found = {name: leaf for name, leaf in _leaves(header, arrays).items() if leaf[1] is not None}
    wanted = {name for name, x in names(tree, jax.ShapeDtypeStruct)[0].items() if x is not None}
    if wanted != found.keys():
        missing, more = sorted(wanted - found.keys()), sorted(found.keys() - wanted)
        raise RuntimeError(
            f"like: has {missing or 'nothing'} that was not saved, and lacks "
            f"{more or 'nothing'} that was"
        )
    return _walk(
        tree, lambda name, x: None if x is None else _as(x, *found[name], f"like: {name!r}")
    )[0]


def put_together(header: Mapping[str, Any] | None, arrays: Mapping[str, Any]) -> Any:
    """The tree that was saved; RuntimeError if it has other containers than dicts, lists and
    tuples, or if there is no header.
    """
    if header is None:
        raise RuntimeError(
            "as_saved: bridge.checkpoints.save did not write this checkpoint; give like, or neither"
        )
    leaves = _leaves(header, arrays)

    def build(node: Any) -> Any:
        if isinstance(node, str):
            kind, x = leaves[node]
            if kind == "torch":
                return modules.as_tensor(x).clone()
            return (
                x[()]
                if kind == "numpy scalar"
                else x
                if kind in ("python", "numpy")
                else _as_jax(x, kind)
            )
        kind, keys, children = node
        items = [build(child) for child in children]
        if kind in ("dict", "OrderedDict"):
            return (dict if kind == "dict" else OrderedDict)(
                zip(map(_decoded, keys), items, strict=True)
            )
        if kind not in ("list", "tuple"):
            raise RuntimeError(f"as_saved: the tree has a {kind}, which only like can make again")
        return items if kind == "list" else tuple(items)

    return build(header["tree"])


# -- walking ---------------------------------------------------------------------------------------
def _walk(
    tree: Any, visit: Callable[[str, Any], Any], path: tuple[Any, ...] = ()
) -> tuple[Any, Any]:
    """The tree with each leaf replaced by visit(name, leaf), and its structure: a leaf's name, a
    node's [kind, a dict's keys, children].
    """
    opened = _opened(tree)
    if opened is None:
        name = ".".join(map(str, path)) or "value"
        return visit(name, tree), name
    steps, children, build = opened
    below = [
        _walk(child, visit, (*path, step)) for step, child in zip(steps, children, strict=True)
    ]
    known = type(tree) in (dict, OrderedDict, list, tuple)
    kind, keys = (
        type(tree).__name__ if known else f"{type(tree).__module__}.{type(tree).__qualname__}",
        None,
    )
    if isinstance(tree, dict):
        if all(type(key) in _KINDS for key in tree):
            keys = [_encoded(key) for key in tree]
        else:
            kind = f"{kind} with keys that are neither strings nor numbers"
    return build([new for new, _ in below]), [kind, keys, [structure for _, structure in below]]


def _opened(tree: Any) -> tuple[list[Any], list[Any], Callable[[list[Any]], Any]] | None:
    """(steps to the children of a node, the children, a function that builds such a node from other
    children); None for a leaf.
    """
    children, spec = trees.flatten(tree, lambda node: node is not tree)
    if spec is not trees.LEAF:
        steps = [path[0] for path in trees.paths(spec)]
        if not isinstance(tree, dict | list | tuple):
            keyed = jax.tree_util.tree_flatten_with_path(tree, lambda node: node is not tree)[0]
            # JAX knows the names of its nodes' children
            if [id(x) for _, x in keyed] == [id(x) for x in children]:
                steps = [jax.tree_util.keystr(path, simple=True) for path, _ in keyed]
        return steps, children, functools.partial(trees.unflatten, spec)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | jax.ShapeDtypeStruct):
        steps = [field.name for field in dataclasses.fields(tree)]
        return (
            steps,
            [getattr(tree, step) for step in steps],
            lambda items: _replaced(tree, dict(zip(steps, items, strict=True))),
        )
    return None


def _replaced(tree: Any, fields: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other field values; ``dataclasses.replace`` would call __init__,
    which may not take them.
    """
    new = copy.copy(tree)
    for name, value in fields.items():
        object.__setattr__(new, name, value)
    return new


# -- leaves ----------------------------------------------------------------------------------------
def _encoded(x: Any) -> list[Any]:
    kind = _KINDS[type(x)]
    return [kind, _VALUES[kind][1](x)]


def _decoded(code: list[Any]) -> Any:
    kind, text = code
    return _VALUES[kind][2](text)


def _leaves(
    header: Mapping[str, Any] | None, arrays: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    """name -> (kind, numpy array or Python value), in the dtypes that were saved."""
    if header is None:
        return {name: ("jax" if hasattr(x, "dtype") else "python", x) for name, x in arrays.items()}
    found: dict[str, tuple[str, Any]] = {}
    for name, leaf in header["leaves"].items():
        if leaf["kind"] == "python":
            found[name] = ("python", _decoded(leaf["value"]))
            continue
        shape, dtype = tuple(leaf["shape"]), np.dtype(leaf["dtype"])
        x = np.zeros(shape, dtype) if 0 in shape else np.asarray(arrays[name])
        found[name] = (
            leaf["kind"],
            x if x.dtype == dtype else np.ascontiguousarray(x).view(dtype).reshape(shape),
        )
    return found


def _as_jax(x: np.ndarray, kind: str, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    with jax.enable_x64(True):
        if kind.startswith("key "):
            return jax.device_put(
                jax.random.wrap_key_data(jnp.asarray(x), impl=kind.removeprefix("key ")), sharding
            )
        return jax.device_put(x, sharding)


def _as(like: Any, kind: str, value: Any, where: str) -> Any:
    """A saved value converted to the kind of ``like``: an array of its kind, dtype and device, or a
    Python value.
    """
    if type(like) in _KINDS:
        return _as_python(like, value, where)
    if isinstance(value, str):
        raise RuntimeError(f"{where} is an array, but the string {value!r} was saved")
    saved = np.asarray(value)
    is_key, was_key = (
        not isinstance(like, torch.Tensor) and jnp.issubdtype(like.dtype, jax.dtypes.prng_key),
        kind.startswith("key "),
    )
    if is_key or was_key:
        made = _as_jax(saved, kind, getattr(like, "sharding", None)) if was_key else saved
        if made.dtype != like.dtype or made.shape != like.shape:
            raise RuntimeError(
                f"{where} is {like.dtype}{list(like.shape)}, but "
                f"{made.dtype}{list(made.shape)} was saved"
            )
        return made
    if saved.shape != tuple(like.shape):
        raise RuntimeError(f"{where} has shape {tuple(like.shape)}, but {saved.shape} was saved")
    held = modules.converted(
        saved,
        dtypes.to_jax(like.dtype) if isinstance(like, torch.Tensor) else np.dtype(like.dtype),
        where,
    )
    if isinstance(like, torch.Tensor):
        return (
            modules.as_tensor(held)
            .to(device=like.device, copy=True)
            .requires_grad_(like.requires_grad)
        )
    if isinstance(like, np.generic):
        return held[()]
    return held if isinstance(like, np.ndarray) else _as_jax(held, kind, like.sharding)


def _as_python(like: Any, value: Any, where: str) -> Any:
    if type(value) not in _KINDS:
        if np.shape(value):
            raise RuntimeError(
                f"{where} is a {type(like).__name__}, but an array of shape "
                f"{np.shape(value)} was saved"
            )
        value = value.item()
    if type(value) is type(like):
        return value
    try:
        new = type(like)(value)
        exact = (
            not isinstance(like, str)
            and not isinstance(value, str)
            and (new == value or (new != new and value != value))
        )
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        raise RuntimeError(f"{where} is a {type(like).__name__}, but {value!r} was saved")
    return new
