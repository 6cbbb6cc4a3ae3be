"""Trees of arrays and Python values in files: safetensors, which torch programs read too, and
Orbax, which JAX programs read.

Both packages are optional. This file has ``save``, ``load`` and the two formats;
``bridge/checkpoint_trees.py`` turns a tree into names, and ``bridge/checkpoint_files.py`` replaces
a file. A checkpoint has a header (the tree, its Python values, the leaves' kinds) and checksums, in
the metadata of a safetensors file or in the file ``torchfunc_jax.json`` of an Orbax folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bridge import checkpoint_files, checkpoint_trees

_EXTENSIONS = {".safetensors": "safetensors", ".orbax": "orbax", "": "orbax"}
_MARKER = "torchfunc_jax.json"  # in an Orbax folder
_HEADER, _SUM = "torchfunc_jax", "torchfunc_jax.sha256"  # in the metadata of a safetensors file


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or not as the arguments ask; the message has the path and the
    cause.
    """


def save(
    path: str | os.PathLike[str], tree: Any, *, format: str | None = None, overwrite: bool = False
) -> Path:
    """Write a tree of arrays and Python values, as a whole or not at all.

    A checkpoint that ``save`` wrote there before is replaced. ``load`` finds a complete one, the
    old or the new, at every moment, even if the process is killed or the disk is full. Any other
    file or folder at the path is left alone.

    Args:
        path: of the file, or with Orbax of the folder. Its extension gives the format:
            ".safetensors"; ".orbax" or none for Orbax.
        tree: torch.Tensors, jax.Arrays (keys too), numpy arrays, numbers, strings, bools and None,
            in dicts, lists, tuples, namedtuples, dataclasses and nodes that are registered with JAX
            or torch: a state of ``bridge.params``, an optax state, a ``state_dict()``.
        format: "safetensors" or "orbax", for a path with another extension.
        overwrite: True: a file or folder at the path that ``save`` did not write is renamed, and a
            warning gives its new name.

    Returns:
        Path: of the checkpoint.

    Raises:
        FileExistsError: there is something at the path that ``save`` did not write, and
            ``overwrite`` is False.
        ImportError: the format's package is not installed.
        OSError: the checkpoint could not be written; an old one is unchanged.
        TypeError: a leaf is neither an array nor a Python value of those kinds.
        ValueError: the extension gives no format, or another than ``format``; two leaves have one
            name ({"a.b": ..., "a": {"b": ...}}).

    Source: https://huggingface.co/docs/safetensors, https://orbax.readthedocs.io

    Example:
        >>> import bridge, tempfile, torch
        >>> from bridge import checkpoints
        >>> model = torch.nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoints.save(
        ...         f"{folder}/model.safetensors", {"model": bridge.params(model), "step": 3}
        ...     )
        ...     checkpoints.load(path)["step"]
        3
    """
    kind, package, target = _opened(path, format)
    header, arrays = checkpoint_trees.taken_apart(tree)
    with checkpoint_files.locked(target.parent, shared=True):
        whose = _whose(package, kind, target)
    if whose and not overwrite:
        raise FileExistsError(
            f"path: {target} is {whose}, which is left alone; give another path, or overwrite=True"
        )
    if kind == "orbax" and jax.process_count() > 1:
        raise RuntimeError(
            "format: one process alone saves here; with several, use Orbax's own CheckpointManager"
        )
    try:
        with checkpoint_files.staging(target) as folder:
            new = folder / "new"
            (_write_orbax if kind == "orbax" else _write_safetensors)(package, new, header, arrays)
            checkpoint_files.sync(new)
            kept = checkpoint_files.replace(new, target, keep=bool(whose))
    except Exception as error:  # the packages have exception classes of their own for a full disk
        said = "the checkpoint was not written, and what was there is as it was"
        if isinstance(error, OSError):
            raise type(error)(
                error.errno, f"{error.strerror or error}; {said}", str(target)
            ) from error
        raise OSError(f"{target}: {error}; {said}") from error
    if kept is not None:
        warnings.warn(f"path: {target} was {whose}; it is now {kept}", stacklevel=2)
    return Path(path).absolute()


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    format: str | None = None,
    as_saved: bool = False,
) -> Any:
    """Read a tree of arrays and Python values: one that ``save`` wrote, or a checkpoint of Flax,
    Orbax or safetensors.

    Args:
        path: of the file or folder; its extension gives the format, as in ``save``.
        like: a tree of the structure that was saved; the result has its structure, and its leaves'
            kinds, dtypes and devices (jax.Array or jax.ShapeDtypeStruct with its sharding,
            torch.Tensor, numpy array, number, ...). A dtype may round floating-point numbers but
            not change other values.
        format: as in ``save``.
        as_saved: True: return the dicts, lists and tuples that were saved, with leaves of the saved
            kinds; torch.Tensors are on the CPU.

    Returns:
        A tree like ``like``, or as it was saved; without either, a dict of jax.Arrays and Python
            values by name, in which the names of
        nested containers are joined by dots.

    Raises:
        FileNotFoundError: there is nothing at path.
        ImportError: the format's package is not installed.
        CheckpointError: (a RuntimeError) the file is damaged, truncated or of another format;
            ``like`` has other names or shapes than the checkpoint, or dtypes that cannot hold its
            values; ``as_saved`` is given, and the tree has other containers or ``save`` did not
            write it.
        ValueError: the extension gives no format; both ``like`` and ``as_saved`` are given.

    Source: as ``save``.

    Example:
        >>> import tempfile, torch
        >>> from bridge import checkpoints
        >>> state = {"w": [torch.ones(2), torch.zeros(())], "step": 7}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoints.save(f"{folder}/state", state)
        ...     (
        ...         checkpoints.load(path, like=state),
        ...         sorted(checkpoints.load(path)),
        ...         checkpoints.load(path, as_saved=True)["w"][0],
        ...     )
        ({'w': [tensor([1., 1.]), tensor(0.)], 'step': 7}, ['step', 'w.0', 'w.1'], tensor([1., 1.]))
    """
    if like is not None and as_saved:
        raise ValueError("as_saved: expected like or as_saved, got both")
    kind, package, target = _opened(path, format)
    with checkpoint_files.locked(target.parent, shared=True):
        source, header, arrays = _read(package, kind, target)
    if source != target:
        warnings.warn(
            f"path: the process that replaced {target} ended before it was done; the checkpoint "
            f"that was there before is loaded, from {source}",
            stacklevel=2,
        )
    try:
        if as_saved:
            return checkpoint_trees.put_together(header, arrays)
        return (
            checkpoint_trees.by_name(header, arrays)
            if like is None
            else checkpoint_trees.like(like, header, arrays)
        )
    except RuntimeError as error:
        raise CheckpointError(f"{source}: {error}") from None


# -- which format, and whose file ------------------------------------------------------------------
def _opened(path: str | os.PathLike[str], format: str | None) -> tuple[str, Any, Path]:
    """The format, its package, and the path that links lead to, where open() would write."""
    extension = Path(path).suffix
    said = _EXTENSIONS.get(extension)
    if format not in (None, *_EXTENSIONS.values()):
        raise ValueError(f"format: expected 'safetensors' or 'orbax', got {format!r}")
    if extension and said not in (None, format or said):
        raise ValueError(
            f"format: {format!r} was given, but the extension of {os.fspath(path)!r} says {said!r}"
        )
    kind, target = format or said, Path(os.path.realpath(path))
    try:
        if kind == "orbax":
            import orbax.checkpoint

            return kind, orbax.checkpoint, target
        if kind == "safetensors":
            import safetensors.numpy

            return kind, safetensors, target
    except ImportError:
        raise ImportError(
            f"format: {kind} is not installed; pip install 'torchfunc-jax[checkpoints]'"
        ) from None
    raise ValueError(
        f"path: the extension of {os.fspath(path)!r} says no format; expected '.safetensors' (a "
        "file), '.orbax' or none (a folder of Orbax), or format='safetensors' or 'orbax'"
    )


def _whose(package: Any, kind: str, target: Path) -> str:
    """A description of a file or folder at the path that must not be removed; "" if there is none,
    or if ``save`` wrote it.
    """
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return ""
    if target.is_dir():
        if kind != "orbax" or not (target / _MARKER).is_file():
            return "a folder that bridge.checkpoints.save did not write"
        try:
            written = json.loads(json.loads((target / _MARKER).read_text())[_HEADER])["files"]
        except (ValueError, KeyError, TypeError):
            return "a folder whose checkpoint is damaged"
        more = {file.relative_to(target).as_posix() for file in checkpoint_files.files(target)} - {
            *written,
            _MARKER,
        }
        return (
            f"a checkpoint with other files in its folder, {', '.join(sorted(more)[:3])}"
            if more
            else ""
        )
    if target.is_file() and kind == "safetensors":
        with suppress(package.SafetensorError, OSError), package.safe_open(target, "numpy") as file:
            if _HEADER in (file.metadata() or {}):
                return ""
    return "a file that bridge.checkpoints.save did not write"


# -- reading ---------------------------------------------------------------------------------------
def _read(
    package: Any, kind: str, target: Path
) -> tuple[Path, dict[str, Any] | None, dict[str, Any]]:
    """The checkpoint's path, its header (None if another program wrote it)
    and its arrays by name.
    """
    for _ in range(30):
        before, source, error = _identity(target), checkpoint_files.current(target), None
        try:
            header, arrays = _contents(package, kind, source)
        except (CheckpointError, FileNotFoundError) as failed:
            error = failed
        if _identity(target) != before:
            # another process has replaced it meanwhile; this happens only on file systems without
            # locks
            continue
        if error is not None:
            raise error
        return source, header, arrays
    raise CheckpointError(f"{target}: another process replaces it again and again")


def _identity(target: Path) -> tuple[int, int] | None:
    with suppress(FileNotFoundError):
        found = checkpoint_files.current(target).stat()
        return found.st_ino, found.st_ctime_ns
    return None


def _contents(
    package: Any, kind: str, source: Path
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    if not source.exists():
        raise FileNotFoundError(f"path: nothing at {source}")
    if source.is_dir() != (kind == "orbax"):
        expected, found = (
            ("a folder of Orbax", "a file")
            if kind == "orbax"
            else ("a safetensors file", "a folder")
        )
        raise CheckpointError(
            f"{source}: expected {expected}, as the path's extension says, found {found}"
        )
    try:
        return (_read_orbax if kind == "orbax" else _read_safetensors)(package, source)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        # Orbax and safetensors raise classes of many kinds for a damaged file
        raise CheckpointError(
            f"{source}: damaged, or no {kind} checkpoint: {type(error).__name__}: {error}"
        ) from error


def _checked(source: Path, text: str, digest: str | None, found: str) -> dict[str, Any]:
    if digest != found:
        raise CheckpointError(f"{source}: damaged: its checksum is not that of its contents")
    header = json.loads(text)
    if header["version"] > checkpoint_trees.VERSION:
        raise CheckpointError(
            f"{source}: of a newer torchfunc-jax (version {header['version']} of the header); "
            "update this one"
        )
    return header


# -- safetensors -----------------------------------------------------------------------------------
def _write_safetensors(
    package: Any, new: Path, header: dict[str, Any], arrays: dict[str, Any]
) -> None:
    stored = {
        name: np.require(checkpoint_trees.stored(x), requirements="C") for name, x in arrays.items()
    }
    text = json.dumps(header)
    metadata = {"format": "pt", _HEADER: text, _SUM: _sum(text, stored)}
    new.write_bytes(package.numpy.save(stored, metadata))


def _sum(text: str, arrays: dict[str, np.ndarray]) -> str:
    """The checksum of a header, and of all arrays with their names, dtypes and shapes."""
    found = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        x = arrays[name]
        found.update(json.dumps([name, x.dtype.name, x.shape]).encode())
        found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _read_safetensors(package: Any, source: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    with package.safe_open(source, "pt") as file:  # the numpy reader does not know all dtypes
        metadata = file.metadata() or {}
        # it is no dict
        arrays = {name: checkpoint_trees.as_numpy(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    if not metadata.keys() & {_HEADER, _SUM}:
        return None, arrays
    text = metadata.get(_HEADER, "")
    return _checked(source, text, metadata.get(_SUM), _sum(text, arrays)), arrays


# -- Orbax -----------------------------------------------------------------------------------------
def _write_orbax(package: Any, new: Path, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    tree = {escaped(name): checkpoint_trees.stored(x) for name, x in arrays.items() if x.size}
    package.PyTreeCheckpointer().save(new, tree or {"nothing": np.zeros(1)})
    sums = {file.relative_to(new).as_posix(): _digest(file) for file in checkpoint_files.files(new)}
    text = json.dumps({**header, "files": sums})
    (new / _MARKER).write_text(json.dumps({_HEADER: text, _SUM: _sum(text, {})}))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_orbax(package: Any, source: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    header = None
    if (source / _MARKER).exists():
        marker = json.loads((source / _MARKER).read_text())
        text = marker[_HEADER]
        header = _checked(source, text, marker[_SUM], _sum(text, {}))
        for name, digest in header["files"].items():
            if not (source / name).is_file():
                raise CheckpointError(f"{source}: damaged: the file {name} is missing")
            if _digest(source / name) != digest:
                raise CheckpointError(
                    f"{source}: damaged: the checksum of the file {name} is not "
                    "that of its contents"
                )
    elif not (source / "_METADATA").is_file():
        items = sorted(p.name for p in source.iterdir() if (p / "_METADATA").is_file())
        found = (
            f"no checkpoint, but {', '.join(items)} in it is; give that path"
            if items
            else "no Orbax checkpoint: it has no _METADATA"
        )
        raise CheckpointError(f"{source}: {found}")
    with warnings.catch_warnings():
        # the arrays are read as numpy arrays
        warnings.filterwarnings("ignore", message="Sharding info not provided")
        checkpointer = package.PyTreeCheckpointer()
        metadata = checkpointer.metadata(source).item_metadata.tree
        kinds = jax.tree.map(lambda _: package.RestoreArgs(restore_type=np.ndarray), metadata)
        restored = checkpointer.restore(source, restore_args=kinds)
    if header is None:
        return None, checkpoint_trees.names(restored)[0]
    return header, {
        name: restored[escaped(name)] for name in header["leaves"] if escaped(name) in restored
    }


def escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")  # Orbax uses these names for files
