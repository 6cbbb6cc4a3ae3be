"""An exported program with its weights, and the files that it is written to."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bridge import checkpoint_files

PROGRAM = "program.stablehlo"
FORMATS = ("npz", "safetensors", "inside")


@dataclasses.dataclass(frozen=True)
class Exported:
    """A torch function as a StableHLO program with its weights.

    Attributes:
        program: ``program.call(weights, *args, **kwargs)`` runs it in JAX; without ``weights`` if
            they are None.
        weights: name -> array, of the tensors that the function captures; None if they are inside,
            or if there are none.
        format: of the weights' file: "npz" or "safetensors"; "inside" if there is none.
        written: the names of the weights and arguments that the function writes to; if there are
            any, the program returns (output, {name: new value}).
        random: whether the program draws random numbers: then it takes ``seed=``, a uint32 number.
        constraints: what holds for the symbolic sizes beside that they are at least 1.
    """

    program: jax.export.Exported
    weights: dict[str, Any] | None
    format: str
    written: tuple[str, ...]
    random: bool
    constraints: tuple[str, ...]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a folder with ``program.stablehlo`` and, unless they are inside, ``weights.npz`` or
        ``weights.safetensors``.

        A folder that ``save`` wrote there before is replaced.

        Args:
            path: of the folder.

        Returns:
            Path: of the folder.

        Raises:
            FileExistsError: there is something else at path.
            ImportError: flatbuffers, with which JAX writes programs, or safetensors is not
                installed (``torchfunc-jax[export]``).

        Source: ``jax.export.Exported.serialize``.

        Example:
            >>> import tempfile, torch, torchfunc_jax
            >>> exported = torchfunc_jax.export(torch.nn.Linear(3, 2), torch.ones(4, 3))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     sorted(file.name for file in exported.save(f"{folder}/model").iterdir())
            ['program.stablehlo', 'weights.npz']
        """
        target = Path(path).absolute()
        if (
            target.exists()
            and not (target / PROGRAM).is_file()
            and not (target.is_dir() and not any(target.iterdir()))
        ):
            raise FileExistsError(
                f"path: {target} exists, and save did not write it; give another path"
            )
        try:
            program = self.program.serialize()
        except ImportError as error:
            raise ImportError(
                f"save: {error}; it comes with pip install 'torchfunc-jax[export]'"
            ) from error
        with checkpoint_files.staging(target) as folder:
            new = folder / "new"
            new.mkdir()
            (new / PROGRAM).write_bytes(program)
            if self.weights is not None:
                _write(new / f"weights.{self.format}", self.weights)
            checkpoint_files.sync(new)
            checkpoint_files.replace(new, target)
        return target


def _write(path: Path, weights: Mapping[str, Any]) -> None:
    if path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file(dict(weights), path)
        return
    with zipfile.ZipFile(path, "w") as file:  # numpy.savez keeps some names for its own arguments
        for name, array in weights.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def stored(array: np.ndarray, format: str) -> np.ndarray:
    """The array as the file has it: numpy's own files know only numpy's dtypes, so others are
    stored as unsigned integers of their bits.
    """
    return (
        array.view(f"uint{8 * array.itemsize}")
        if format == "npz" and array.dtype.isbuiltin != 1
        else array
    )


def plain(tree: Any, what: str) -> Any:
    """The tree with dicts, tuples and lists in the place of other containers, whose classes a
    loader need not have.
    """
    if isinstance(tree, dict):
        return {key: plain(x, what) for key, x in tree.items()}
    if isinstance(tree, tuple):
        return tuple(plain(x, what) for x in tree)
    if isinstance(tree, list):
        return [plain(x, what) for x in tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {
            field.name: plain(getattr(tree, field.name), what) for field in dataclasses.fields(tree)
        }
    if not jax.tree_util.all_leaves([tree]) and tree is not None:
        raise TypeError(
            f"export: {what} contain a {type(tree).__name__}, which a loader may not have; use "
            "dicts, lists and tuples"
        )
    return tree
