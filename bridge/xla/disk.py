"""Compiled programs in the user's cache folder: the next process loads the programs that this one
has compiled.

A file's name is a hash of what the program computes (see ``executables``, and
``bridge.record.words``) and of everything else that it depends on: the versions, our own files, the
processor.

The files are pickles of compiled programs: who can write one can run code in the process that loads
it. So a folder or a file that another user owns, or can write to, is not used (see SECURITY.md).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jaxlib
import torch
from jax.experimental import serialize_executable

from bridge.process import log_once

_BYTES = 256 * 2**20  # limit for all files together; the least recently used ones are removed first


@functools.cache
def place() -> tuple[Path, str] | None:
    """The folder, and a text of the state that all programs depend on; None if the cache is off or
    no folder can be written to.
    """
    if os.environ.get("TORCHFUNC_JAX_CACHE", "1") == "0" or jax.default_backend() != "cpu":
        return None
    here = Path(__file__).resolve().parents[2]
    files = [p for d in ("bridge", "torchfunc_jax") for p in sorted((here / d).rglob("*.py"))]
    ours = [(str(p), s.st_mtime_ns, s.st_size) for p in files if (s := p.stat())]
    flags = ""
    with contextlib.suppress(OSError):
        flags = next(
            (
                line
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("flags")
            ),
            "",
        )
    said = (
        torch.__version__,
        jax.__version__,
        jaxlib.__version__,
        sys.version,
        platform.machine(),
        flags,
        ours,
        os.environ.get("XLA_FLAGS", ""),
        os.cpu_count(),
    )
    folder = _folder()
    return None if folder is None else (folder, repr(said))


def _folder() -> Path | None:
    """The folder, which is made if there is none; None if it cannot be written to, or not by this
    user alone.
    """
    try:
        folder = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            / "torchfunc_jax"
            / "programs"
        )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        private = _is_private(folder.stat())
    except (OSError, RuntimeError):
        return None
    if not private:
        log_once(
            "%s: expected a folder that you own and nobody else can write to, because programs "
            "that are loaded from it can run code; it is not used, and programs are not kept for "
            "the next process. chmod go-w, or set XDG_CACHE_HOME to a folder of your own",
            folder,
            exc_info=None,
        )
        return None
    return folder


def _is_private(of: os.stat_result) -> bool:
    """Whether nobody but this user and root can write to a file or folder; Windows keeps others out
    of a user's folders itself.
    """
    return not hasattr(os, "geteuid") or (
        of.st_uid in (0, os.geteuid()) and not of.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def load(path: Path) -> dict[str, Any] | None:
    """The data that were saved there; None if there are none that can be used."""
    try:
        with path.open("rb") as file:
            # of what is open: another file may get this name meanwhile
            private = _is_private(os.fstat(file.fileno()))
            stored = file.read() if private else b""
        if not private:
            log_once(
                "%s: a stored program that another user owns or can write to could run that user's "
                "code: it and others like it are not read, but removed and compiled anew",
                path,
                exc_info=None,
            )
            os.unlink(path)
            return None
        os.utime(path)
    except OSError:  # there is none
        return None
    digest, data = stored[:32], stored[32:]
    # XLA would run the code of a damaged file
    return pickle.loads(data) if hashlib.sha256(data).digest() == digest else None


def save(path: Path, what: dict[str, Any]) -> None:
    """Write the data in one step; then remove the least recently used files if all together are too
    large.
    """
    data = pickle.dumps(what)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            f.write(hashlib.sha256(data).digest() + data)
        os.replace(f.name, path)
        _limit(path.parent)
    except OSError:  # everything works without the cache
        return


def _limit(folder: Path) -> None:
    files = [(s.st_mtime, s.st_size, e.path) for e in os.scandir(folder) if (s := e.stat())]
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= _BYTES:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size


class Refused(Exception):
    """XLA cannot serialize a function, such as one that calls Python, or cannot load it."""


def packed(compiled: jax.stages.Compiled) -> tuple[Any, ...]:
    """A compiled function as data, with the number of the device that it runs on."""
    try:
        used = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
        devices = {device.id for sharding in used for device in sharding.device_set}
        if len(devices) != 1:
            raise Refused
        return *serialize_executable.serialize(compiled), devices.pop()
    except (
        jax.errors.JaxRuntimeError,
        NotImplementedError,
        ValueError,
        AttributeError,
        pickle.PicklingError,
    ) as error:
        raise Refused from error  # AttributeError: pickle's for a local function


@functools.cache
def _find_lapack() -> None:
    """JAX looks for LAPACK's functions when a process lowers an operator that calls one; until then
    a call of one ends the process.
    """
    jax.jit(jax.numpy.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), "float32"))


def unpacked(data: tuple[Any, ...]) -> jax.stages.Compiled:
    serialized, in_tree, out_tree, number = data
    if b"lapack_" in serialized:
        _find_lapack()
    # JAX would take it for a program of all devices
    here = [device for device in jax.local_devices(backend="cpu") if device.id == number]
    if not here:
        raise Refused
    try:
        return serialize_executable.deserialize_and_load(
            serialized, in_tree, out_tree, here[0].client, here
        )
    except jax.errors.JaxRuntimeError as error:
        raise Refused from error
