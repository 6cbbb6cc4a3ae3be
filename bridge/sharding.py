"""Parameters on a mesh: which axes each is split over, by patterns of names, and weights read from
files straight onto the devices.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bridge.boundary.meshes import axes_in
from bridge.checkpoint_trees import as_numpy
from bridge.checkpoints import CheckpointError
from bridge.convert import dtypes
from bridge.family_rules import Pattern
from bridge.modules import converted

Rules = Mapping[str, PartitionSpec]


def shardings(params: Any, mesh: Mesh | AbstractMesh, rules: Rules | None = None) -> Any:
    """The sharding of each array of a tree over a mesh, by patterns of names.

    Args:
        params: a dict of arrays by name, as ``bridge.params`` returns it, or any tree of arrays or
            abstract values (``jax.ShapeDtypeStruct``, tensors on the device "meta"). The name of a
            leaf is its path, joined by dots.
        mesh: with Explicit or Auto axes; an AbstractMesh too.
        rules: pattern of names -> PartitionSpec. ``*`` is any part of a name, also with dots in it,
            ``?`` one character and ``[012]`` one of these. The first pattern that fits a name
            decides, in the order of the dict; an array that none fits is replicated.

    Returns:
        A tree of ``jax.sharding.NamedSharding``, for ``jax.device_put``, ``jax.jit(in_shardings=)``
            or ``checkpoints.load(like=)``.

    Raises:
        ValueError: a pattern fits no name, or only names for which earlier patterns decide, unless
            they are a family's (``rules``), of which one must fit; a PartitionSpec names an axis
            that the mesh does not have, names one twice, or has more dimensions than the array; the
            sizes of the axes do not divide the array's; two leaves have the same name.
        TypeError: a leaf has no shape; a rule is not a PartitionSpec, or the mesh no mesh.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.sharding.NamedSharding.html

    Example:
        >>> import bridge, jax, torch
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> found = bridge.shardings(
        ...     bridge.params(torch.nn.Linear(4, 2)), mesh, {"*weight": P("model", None)}
        ... )
        >>> {name: tuple(sharding.spec) for name, sharding in found.items()}
        {'weight': ('model', None), 'bias': ()}
    """
    _check_mesh(mesh, Mesh | AbstractMesh)
    rules = dict(rules or {})
    for pattern, spec in rules.items():
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"rules: {pattern!r}: expected a jax.sharding.PartitionSpec, got {type(spec)}"
            )
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    if len(named) < len(leaves):
        raise ValueError(
            f"params: {len(leaves)} leaves, but only {len(named)} different names, as of {{'a': "
            "{'b': x}, 'a.b': y}"
        )
    fitting = {name: [p for p in rules if fnmatch.fnmatchcase(name, p)] for name in named}
    _check_use(rules, fitting)
    found = []
    for name, x in named.items():
        if not hasattr(x, "shape"):
            raise TypeError(
                f"params: {name!r}: expected an array or an abstract value, got {type(x)}"
            )
        pattern = next(iter(fitting[name]), None)
        spec = PartitionSpec() if pattern is None else rules[pattern]
        _check(spec, tuple(x.shape), mesh, f"rules: {pattern!r} for {name!r}")
        found.append(NamedSharding(mesh, spec))
    return _in_order(jax.tree_util.tree_unflatten(tree, found), params)


def shard(params: Any, mesh: Mesh, rules: Rules | None = None) -> Any:
    """The arrays of a tree, placed on a mesh by patterns of names.

    Args:
        params: a tree of jax.Arrays or numpy arrays, as ``bridge.params`` returns it; names are as
            in ``shardings``.
        mesh, rules: as in ``shardings``: the first pattern that fits a name decides, and an array
            that none fits is replicated.

    Returns:
        The tree of jax.Arrays with ``NamedSharding``s; the values and dtypes are the same.

    Raises:
        ValueError, TypeError: as ``shardings``.
        TypeError: a leaf is no array; ``shardings`` takes abstract values, ``load_sharded`` reads
            files.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.device_put.html

    Example:
        >>> import bridge, jax, torch
        >>> from jax.sharding import PartitionSpec as P
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> params = bridge.shard(
        ...     bridge.params(model), mesh, {"0.*": P("model"), "1.weight": P(None, "model")}
        ... )
        >>> tuple(params["1.weight"].sharding.spec)
        (None, 'model')
    """
    _check_mesh(mesh, Mesh)
    for x in jax.tree.leaves(params):
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(
                f"params: expected jax.Arrays or numpy arrays, got {type(x)}; "
                "bridge.params gives a module's"
            )
    return _in_order(jax.device_put(params, shardings(params, mesh, rules)), params)


def load_sharded(
    path: str | os.PathLike[str],
    mesh: Mesh,
    rules: Rules | None = None,
    *,
    like: Any = None,
    dtype: Any = None,
    strict: bool = True,
) -> dict[str, jax.Array]:
    """Read weights from safetensors files onto a mesh; each device's part is read by itself, and
    nothing ever holds the whole.

    Args:
        path: of a file, or of a folder as of Hugging Face: with ``model.safetensors.index.json`` or
            another index, or with ``.safetensors`` files. Each process reads what its own devices
            need.
        mesh, rules: as in ``shardings``; names are those in the files.
        like: what is expected: an nn.Module, also on the device "meta", or a dict of arrays or
            abstract values by name; None: all that the files have, in their dtypes. A tensor that
            has several names in the module may be in the files under any of them.
        dtype: floating-point values become of it; None: of that of ``like``. Other dtypes become
            ``like``'s, if that can hold the values; 64-bit types become 32-bit unless JAX's
            ``jax_enable_x64`` is on.
        strict: every name of ``like`` must be in the files, and every name in the files in
            ``like``; False: what both have is read.

    Returns:
        dict: name -> jax.Array with a ``NamedSharding``, parameters and buffers.

    Raises:
        FileNotFoundError: there is nothing at path, or a file that the index names is missing.
        ImportError: safetensors is not installed.
        CheckpointError: (a RuntimeError) names are missing or unexpected, and strict is True; a
            shape is another one; a value cannot be held by its dtype; a file is damaged; the folder
            has no weights, or several files have the same name and there is no index.
        ValueError, TypeError: as ``shardings``.

    Source: https://huggingface.co/docs/safetensors, ``jax.make_array_from_callback``; strict is
    that of ``load_state_dict``.

    Example:
        >>> import bridge, jax, tempfile, torch
        >>> from bridge import checkpoints
        >>> from jax.sharding import PartitionSpec as P
        >>> model, mesh = torch.nn.Linear(4, 2), jax.make_mesh((1,), ("model",))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoints.save(f"{folder}/model.safetensors", model.state_dict())
        ...     params = bridge.load_sharded(path, mesh, {"weight": P("model", None)}, like=model)
        >>> tuple(params["weight"].sharding.spec), params["bias"].shape
        (('model', None), (2,))
    """
    _check_mesh(mesh, Mesh)
    try:
        import safetensors  # optional
    except ImportError:
        raise ImportError(
            "path: safetensors is not installed; pip install 'torchfunc-jax[checkpoints]'"
        ) from None
    files = _files(Path(path))
    there: dict[str, tuple[Path, tuple[int, ...]]] = {}
    try:
        for file in dict.fromkeys(files.values()) if isinstance(files, dict) else files:
            with safetensors.safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no dict
                    if not isinstance(files, dict) and name in there:
                        raise CheckpointError(
                            f"{path}: {name!r} is in {there[name][0].name} and in {file.name}; "
                            "pass the file that counts"
                        )
                    if not isinstance(files, dict) or files.get(name) == file:
                        there[name] = file, tuple(opened.get_slice(name).get_shape())
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file}: {error}") from None
    lost = [name for name in files if name not in there] if isinstance(files, dict) else []
    wanted = _wanted(like, there)
    missing = [*lost, *[name for name in wanted if name not in there]]
    more = [name for name in there if name not in wanted]
    if (strict and (missing or more)) or lost:
        lists = [", ".join(map(repr, names)) or "nothing" for names in (missing, more)]
        raise CheckpointError(
            f"{path}: {lists[0]} missing in the files, {lists[1]} unexpected; strict=False reads "
            "what both have"
        )
    for name, x in wanted.items():
        if name in there and x is not None and tuple(x.shape) != there[name][1]:
            raise CheckpointError(
                f"{path}: {name!r} has shape {there[name][1]}, expected {tuple(x.shape)}"
            )
    read = {name: there[name] for name in there if name in wanted}
    places = shardings(
        {name: jax.ShapeDtypeStruct(shape, np.float32) for name, (_, shape) in read.items()},
        mesh,
        rules,
    )
    return {
        name: _array(
            safetensors,
            file,
            name,
            shape,
            places[name],
            wanted[name],
            None if dtype is None else np.dtype(dtype),
        )
        for name, (file, shape) in read.items()
    }


def _in_order(made: Any, like: Any) -> Any:
    """A tree whose dicts have the order of those of another one; JAX sorts them, and torch's
    transforms compare the orders.
    """
    return {key: _in_order(made[key], x) for key, x in like.items()} if type(like) is dict else made


def _check_mesh(mesh: Any, kinds: Any) -> None:
    if not isinstance(mesh, kinds):
        raise TypeError(
            f"mesh: expected a jax.sharding.Mesh, as jax.make_mesh makes it, got {type(mesh)}"
        )


def _check_use(rules: Rules, fitting: Mapping[str, list[str]]) -> None:
    """Each pattern must decide for a name; of a family's, one."""
    families = [p.family for p in rules if isinstance(p, Pattern)]
    used = {p.family for fit in fitting.values() for p in fit if isinstance(p, Pattern)}
    for family in families:
        if family not in used:
            raise ValueError(
                f"rules: none of the patterns of {family!r} fits a parameter; there are "
                f"{', '.join(map(repr, fitting)) or 'none'}"
            )
    for pattern in rules:
        if isinstance(pattern, Pattern):
            continue
        names = [name for name, fit in fitting.items() if pattern in fit]
        if not names:
            raise ValueError(
                f"rules: {pattern!r} fits no parameter; there are "
                f"{', '.join(map(repr, fitting)) or 'none'}"
            )
        if all(fitting[name][0] != pattern for name in names):
            taken = ", ".join(f"{name!r} by {fitting[name][0]!r}" for name in names)
            raise ValueError(
                f"rules: {pattern!r} decides nothing, because the first pattern that fits a name "
                f"does: {taken}; put it before"
            )


def _check(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, where: str
) -> None:
    here = f"{spec}, shape {shape}, mesh {dict(mesh.shape)}"
    if len(spec) > len(shape):
        raise ValueError(
            f"{where}: the PartitionSpec has more dimensions than the parameter: {here}"
        )
    if PartitionSpec.UNCONSTRAINED in spec:
        raise ValueError(
            f"{where}: expected axes of the mesh or None, got PartitionSpec.UNCONSTRAINED: {here}"
        )
    names = [a for part in spec for a in axes_in(part)]
    wrong = [a for a in names if a not in mesh.shape or names.count(a) > 1]
    if wrong:
        raise ValueError(f"{where}: expected different axes of the mesh, got {wrong[0]!r}: {here}")
    for d, (part, n) in enumerate(zip(spec, shape, strict=False)):
        size = math.prod(mesh.shape[a] for a in axes_in(part))
        if n % size:
            raise ValueError(
                f"{where}: {part!r} of size {size} does not divide dimension "
                f"{d} of size {n}: {here}"
            )


def _files(path: Path) -> dict[str, Path] | list[Path]:
    """The file of each name, if there is an index; else the files."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"path: there is nothing at {str(path)!r}")
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1 and (path / "model.safetensors.index.json") in indices:
        indices = [path / "model.safetensors.index.json"]
    if len(indices) == 1:
        try:
            files = {
                name: path / file
                for name, file in json.loads(indices[0].read_text())["weight_map"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{indices[0]}: expected an object with a weight_map from names "
                f"to files, got {error!r}"
            ) from None
        gone = sorted({str(file) for file in files.values() if not file.is_file()})
        if gone:
            raise FileNotFoundError(
                f"path: {indices[0].name} names {', '.join(map(repr, gone))}, which is missing"
            )
        return files
    found = sorted(path.glob("*.safetensors"))
    if indices or not found:
        raise CheckpointError(
            f"{path}: expected one index (*.safetensors.index.json), or .safetensors files, got "
            f"{len(indices)} indices"
        )
    return (
        [path / "model.safetensors"]
        if len(found) > 1 and path / "model.safetensors" in found
        else found
    )


def _wanted(like: Any, there: Mapping[str, Any]) -> dict[str, Any]:
    """What is expected by name; the files decide which name a tensor has that has several in a
    module.
    """
    if like is None:
        return dict.fromkeys(there)
    if not isinstance(like, torch.nn.Module):
        return dict(like)
    groups: dict[int, list[str]] = {}
    state = {
        name: x
        for name, x in like.state_dict(keep_vars=True).items()
        if isinstance(x, torch.Tensor)
    }
    for name, x in state.items():
        groups.setdefault(id(x), []).append(name)
    names = [
        name
        for group in groups.values()
        for name in ([n for n in group if n in there] or group[:1])
    ]
    return {name: state[name] for name in names}


def _array(
    package: Any,
    file: Path,
    name: str,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    like: Any,
    dtype: np.dtype[Any] | None,
) -> jax.Array:
    known: dict[Any, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple((s.start, s.stop) for s in index)
        if key not in known:  # several devices may have the same part
            # for each part anew: the mapped file counts as the process's memory
            with package.safe_open(file, "pt") as opened:
                read = as_numpy(opened.get_slice(name)[index] if index else opened.get_tensor(name))
            wanted = (
                read.dtype
                if like is None
                else dtypes.to_jax(like.dtype)
                if isinstance(like, torch.Tensor)
                else np.dtype(like.dtype)
            )
            if dtype is not None and jax.numpy.issubdtype(read.dtype, jax.numpy.floating):
                wanted = dtype
            try:
                known[key] = np.array(
                    converted(read, jax.dtypes.canonicalize_dtype(wanted), f"{file}: {name!r}"),
                    order="C",
                )
            except RuntimeError as error:
                raise CheckpointError(str(error)) from None
        return known[key]

    return jax.make_array_from_callback(shape, sharding, part)


__all__ = ["load_sharded", "shard", "shardings"]
