"""Files and folders are replaced so that a complete one, the old or the new, exists at every
moment.

The new one is written into a staging folder beside its target and then renamed. One rename replaces
a file. A folder needs two, and between them the old folder is at ``set_aside(target)``, where
``current`` finds it if the process ended there.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def set_aside(target: Path) -> Path:
    """The path of the old folder between the two renames."""
    return target.with_name(f".{target.name}.replaced")


def current(target: Path) -> Path:
    """The path itself, or if nothing is there, the folder that an interrupted ``replace`` has set
    aside.
    """
    aside = set_aside(target)
    return aside if not os.path.lexists(target) and aside.is_dir() else target


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A new folder beside the target to write in, removed at the end; folders left by dead
    processes of this host are removed too.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix, host = f".{target.name}.partial-", socket.gethostname()
    for left in target.parent.iterdir():
        owner = left.name.removeprefix(prefix).split("-", 2)  # process, random letters, host
        if (
            left.name.startswith(prefix)
            and owner[0].isdigit()
            and owner[2:] == [host]
            and not _alive(int(owner[0]))
        ):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        f"-{host}", f"{prefix}{os.getpid()}-", target.parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:  # EPERM: the process belongs to another user
        return error.errno != errno.ESRCH
    return True


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """While entered, nobody else replaces entries of the folder, or reads them if not shared; only
    on file systems with locks.
    """
    if not folder.is_dir():
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def replace(new: Path, target: Path, *, keep: bool = False) -> Path | None:
    """Move a new file or folder, written to disk (``sync``), from a staging folder to the target;
    OSError leaves the target unchanged.

    An old file or folder there is removed; keep: it is renamed instead, and its new path returned.
    """
    with locked(target.parent):
        there, aside = os.path.lexists(target), set_aside(target)
        if keep := keep and there:
            numbered = (target.with_name(f"{target.name}.replaced-{n}") for n in itertools.count(1))
            aside = next(path for path in numbered if not os.path.lexists(path))
        if moved := there and (keep or new.is_dir()):
            # left by a save that ended after its second rename
            _remove(set_aside(target), new.parent)
            os.rename(target, aside)
        elif target.is_file():
            new.chmod(stat.S_IMODE(target.stat().st_mode))
        elif there:
            target.rmdir()  # an empty folder; a folder with entries raises
        try:
            os.rename(new, target)
        except OSError:
            if moved:
                os.rename(aside, target)
            raise
        _sync(target.parent)
        if keep:
            return aside
        _remove(aside, new.parent)
        return None


def _remove(aside: Path, staging: Path) -> None:
    """Remove a file or folder; it is renamed first, so that it is never there in part."""
    if os.path.lexists(aside):
        os.rename(aside, staging / "old")
        shutil.rmtree(staging / "old", ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or everything in a folder, is on disk."""
    for entry in (path, *path.rglob("*")):
        _sync(entry)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # some file systems cannot sync a folder
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def files(path: Path) -> list[Path]:
    """The files below a folder, sorted; for a file, the file alone."""
    return sorted(p for p in path.rglob("*") if not p.is_dir()) if path.is_dir() else [path]
