"""Files and folders are replaced so that a complete one, the old or the new, exists at every moment.

The new one is written into a staging folder beside its target and then renamed.  One rename replaces a file.  A folder needs two, and
between them the old folder is at ``set_aside(target)``, where ``current`` finds it if the process ended there.
"""
from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def set_aside(target: Path) -> Path:
    """The path of the old folder between the two renames."""
    return target.with_name(f".{target.name}.replaced")


def current(target: Path) -> Path:
    """The path itself, or if nothing is there, the folder that an interrupted ``replace`` has set aside."""
    aside = set_aside(target)
    return aside if not os.path.lexists(target) and aside.is_dir() else target


def empty(target: Path) -> bool:
    """Whether replacing the target loses nothing: it does not exist, or is a folder without entries."""
    return not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir()))


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A new folder beside the target to write in, removed at the end; folders left by dead processes of this host are removed too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix, host = f".{target.name}.partial-", socket.gethostname()
    for left in target.parent.iterdir():
        owner = left.name.removeprefix(prefix).split("-", 2)  # process, thread, host
        if left.name.startswith(prefix) and owner[0].isdigit() and owner[2:] == [host] and not _alive(int(owner[0])):
            shutil.rmtree(left, ignore_errors=True)
    folder = target.with_name(f"{prefix}{os.getpid()}-{threading.get_native_id()}-{host}")
    shutil.rmtree(folder, ignore_errors=True)  # a thread saves one thing at a time, so this belongs to a dead process with the same id
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process belongs to another user
        pass
    return True


def replace(new: Path, target: Path, *, keep: bool = False) -> Path | None:
    """Move a new file or folder, written to disk (``sync``), from a staging folder to the target; OSError leaves the target unchanged.

    An old file or folder there is removed; keep: it is renamed instead, and its new path returned.
    """
    with locked(target.parent):
        return _replace(new, target, keep)


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """While entered, nobody else replaces entries of the folder, or reads them if not shared; only on file systems with locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(new: Path, target: Path, keep: bool) -> Path | None:
    aside = set_aside(target)
    kept = None
    if keep and os.path.lexists(target):
        numbered = (target.with_name(f"{target.name}.replaced-{n}") for n in itertools.count(1))
        kept = aside = next(path for path in numbered if not os.path.lexists(path))
    if new.is_dir() or kept is not None:
        moved = os.path.lexists(target)
        if moved:
            _remove(set_aside(target), new.parent)  # left by a save that ended after its second rename
            os.rename(target, aside)
        try:
            os.rename(new, target)
        except OSError:
            if moved:
                os.rename(aside, target)
            raise
    else:
        if target.is_file():
            new.chmod(stat.S_IMODE(target.stat().st_mode))
        elif target.is_dir():
            target.rmdir()  # an empty folder; a folder with entries raises
        os.replace(new, target)
    _sync(target.parent)
    if kept is None:
        _remove(aside, new.parent)
    return kept


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
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def files(path: Path) -> list[Path]:
    """The files below a folder, sorted; for a file, the file alone."""
    return sorted(Path(folder, name) for folder, _, names in os.walk(path) for name in names) if path.is_dir() else [path]


def digest(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
