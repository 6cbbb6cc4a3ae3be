"""Trees of arrays in files: safetensors, which torch's world reads too, and Orbax, which JAX's does. Both are optional."""
from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from bridge import modules, tensors, trees

_NEEDS = {"safetensors": "safetensors.numpy", "orbax": "orbax.checkpoint"}


def save(path: str | os.PathLike[str], tree: Any, *, format: str | None = None) -> Path:
    """Write a tree of arrays; what was there is replaced.

    Args:
        path: of the file, or with Orbax of the folder.
        tree: torch.Tensors, jax.Arrays and numpy arrays in dicts, lists, tuples, ...: a state of ``bridge.params``, an optax state, a
            ``state_dict()``.
        format: "safetensors" or "orbax"; None: by the path, ".safetensors" or anything else.

    Returns:
        Path: of what was written.

    Raises:
        ImportError: the format's package is not installed.
        TypeError: a leaf that is no array.
        ValueError: an unknown format; two leaves of one name ({"a.b": ..., "a": {"b": ...}}); with Orbax, an empty array.

    Source: https://huggingface.co/docs/safetensors, https://orbax.readthedocs.io

    Example:
        >>> import bridge, tempfile, torch
        >>> from bridge import checkpoints
        >>> model = torch.nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoints.save(f"{folder}/model.safetensors", bridge.params(model))
        ...     sorted(checkpoints.load(path))
        ['bias', 'weight']
    """
    target = Path(path).absolute()
    package, kind = _package(target, format)
    named = _named(tree)
    target.parent.mkdir(parents=True, exist_ok=True)
    if kind == "safetensors":
        partial = target.with_name(target.name + ".partial")  # never half a file under the real name
        package.save_file({name: np.require(_numpy(x), requirements="C") for name, x in named.items()}, partial)
        os.replace(partial, target)
    else:
        arrays = {_escaped(name): x if isinstance(x, jax.Array) else _numpy(x) for name, x in named.items()}
        with package.StandardCheckpointer() as checkpointer:
            checkpointer.save(target, arrays, force=True)
    return target


def load(path: str | os.PathLike[str], like: Any = None, *, format: str | None = None) -> Any:
    """Read a tree of arrays.

    Args:
        path: of the file or folder.
        like: a tree of the structure that was saved; the result has its structure, and its leaves' kinds, dtypes and devices
            (jax.Array with its sharding, torch.Tensor, numpy array).
        format: as ``save``'s.

    Returns:
        A tree like ``like``; without it a dict of jax.Arrays by name, the names of nested containers joined by dots.

    Raises:
        FileNotFoundError: there is nothing at path.
        ImportError: the format's package is not installed.
        RuntimeError: ``like`` has other names or shapes than what was saved.

    Source: as ``save``.

    Example:
        >>> import tempfile, torch
        >>> from bridge import checkpoints
        >>> state = {"w": [torch.ones(2), torch.zeros(())]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints.load(checkpoints.save(f"{folder}/state", state), like=state)
        {'w': [tensor([1., 1.]), tensor(0.)]}
    """
    source = Path(path).absolute()
    if not source.exists():
        raise FileNotFoundError(f"path: nothing at {source}")
    package, kind = _package(source, format)
    if kind == "safetensors":
        found: dict[str, np.ndarray] = package.load_file(source)
    else:
        with package.StandardCheckpointer() as checkpointer:
            saved = checkpointer.metadata(source).item_metadata.tree
            shapes = {name: np.empty(m.shape, m.dtype) for name, m in saved.items()}
            found = {_unescaped(name): np.asarray(x) for name, x in checkpointer.restore(source, shapes).items()}
    if like is None:
        return {name: _as(value, None, name) for name, value in found.items()}
    wanted = _named(like)
    if wanted.keys() != found.keys():
        missing, more = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        raise RuntimeError(f"like: has {missing or 'nothing'} that was not saved, and lacks {more or 'nothing'} that was")
    leaves, spec = trees.flatten(like)
    values = iter([_as(found[name], x, name) for name, x in wanted.items()])
    return trees.unflatten(spec, [None if x is None else next(values) for x in leaves])


def _package(path: Path, format: str | None) -> tuple[Any, str]:
    kind = format or ("safetensors" if path.suffix == ".safetensors" else "orbax")
    if kind not in _NEEDS:
        raise ValueError(f"format: expected 'safetensors' or 'orbax', got {format!r}")
    try:
        return importlib.import_module(_NEEDS[kind]), kind
    except ImportError:
        raise ImportError(f"format: {kind} is not installed; pip install 'torchfunc-jax[checkpoints]'") from None


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by name: the keys, fields and positions on the way to each, joined by dots. None is no leaf."""
    leaves, spec = trees.flatten(tree)
    named: dict[str, Any] = {}
    for steps, x in zip(trees.paths(spec), leaves, strict=True):
        if x is None:
            continue
        name = ".".join(map(str, steps)) or "value"
        if not isinstance(x, torch.Tensor | jax.Array | np.ndarray | np.generic):
            raise TypeError(f"tree: expected arrays, got {type(x)} at {name!r}")
        if name in named:
            raise ValueError(f"tree: two leaves are called {name!r}")
        named[name] = x
    return named


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")  # Orbax makes files of these names


def _unescaped(name: str) -> str:
    return name.replace("%2F", "/").replace("%25", "%")


def _numpy(x: Any) -> np.ndarray:
    return np.asarray(tensors.to_jax(x.detach()) if isinstance(x, torch.Tensor) else x)


def _as(value: np.ndarray, like: Any, name: str) -> Any:
    """The value as the same kind of array as like; None: a jax.Array."""
    if like is not None and np.shape(value) != tuple(like.shape):
        raise RuntimeError(f"like: {name!r} has shape {tuple(like.shape)}, but {np.shape(value)} was saved")
    if isinstance(like, torch.Tensor):
        return modules.as_tensor(value).to(device=like.device, dtype=like.dtype, copy=True).requires_grad_(like.requires_grad)
    if isinstance(like, np.ndarray | np.generic):
        return value.astype(like.dtype)
    with jax.enable_x64(True):
        return jax.device_put(value if like is None else value.astype(like.dtype), None if like is None else like.sharding)
