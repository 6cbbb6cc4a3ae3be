"""What XLA has compiled, found by what it computes: in this process, and in the user's cache
folder.

A new function or module that computes what another one has computed compiles nothing, and neither
does the next process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bridge import compiling
from bridge.process import log_once, process
from bridge.trace.levels import state
from bridge.xla import disk


def _count(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        state.from_jax += 1


jax.monitoring.register_event_listener(_count)


def name_of(lowered: jax.stages.Lowered, device: jax.Device) -> str | None:
    """A name of what a lowered function computes, the same in each process; None if it calls
    Python, which only this process can.
    """
    text = lowered.as_text()
    if "callback" in text:
        return None
    said = (
        text,
        lowered.in_tree,
        lowered.out_tree,
        device,
        compiling.options(),
        len(jax.devices()),
    )
    return hashlib.sha256("|".join(map(str, said)).encode()).hexdigest()


class Kept(NamedTuple):
    """An executable.

    Attributes:
        storable: whether XLA can serialize it: not if it was loaded from a cache folder itself.
        seconds: how long the process that compiled it has needed to.
    """

    executable: Any
    storable: bool
    seconds: float


def found(name: str | None, fast: bool, stored: bool) -> Kept | None:
    """The executable of this name.

    fast: compiled without optimization.  stored: look into the cache folder too.
    """
    if name is None:
        return None
    kept = process.executables.get((name, fast))
    if kept is None and stored and (path := _path(name, fast)) is not None:
        kept = _loaded(path)
        if kept is not None:
            keep(name, fast, kept)
    return kept


def keep(name: str | None, fast: bool, kept: Kept) -> None:
    """Keep an executable for other functions of this process that compute the same."""
    if name is not None:
        process.executables.add((name, fast), kept)


def store(name: str | None, fast: bool, kept: Kept) -> None:
    """Store an executable for the next process."""
    path = None if name is None else _path(name, fast)
    if path is not None and not path.exists():
        with contextlib.suppress(disk.Refused):
            packed = disk.packed(kept.executable)
            disk.save(path, {"executable": packed, "seconds": kept.seconds})


def _path(name: str, fast: bool) -> Path | None:
    place = disk.place()
    if place is None:
        return None
    return place[0] / hashlib.sha256(f"{name}|{fast}|{place[1]}".encode()).hexdigest()


def _loaded(path: Path) -> Kept | None:
    try:
        data = disk.load(path)
        if data is None:
            return None
        return Kept(disk.unpacked(data["executable"]), False, data["seconds"])
    except disk.Refused:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    except Exception:
        log_once(
            "a stored program could not be loaded: programs that earlier "
            "processes have stored are compiled anew"
        )
        return None
