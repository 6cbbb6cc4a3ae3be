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
from typing import Any

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


def found(name: str | None, fast: bool, stored: bool) -> tuple[jax.stages.Compiled | None, bool]:
    """The executable of this name, or None, and whether XLA can serialize it: not if it was loaded
    from a cache folder itself.

    fast: compiled without optimization.  stored: look into the cache folder too.
    """
    kept = None if name is None else process.executables.get((name, fast))
    if kept is None and name is not None and stored and (path := _path(name, fast)) is not None:
        executable = _loaded(path)
        if executable is not None:
            kept = executable, False
            process.executables.add((name, fast), kept)
    return kept or (None, True)


def keep(name: str | None, fast: bool, executable: jax.stages.Compiled, storable: bool) -> None:
    """Keep an executable for other functions of this process that compute the same; storable:
    whether XLA can serialize it.
    """
    if name is not None:
        process.executables.add((name, fast), (executable, storable))


def store(name: str | None, fast: bool, executable: jax.stages.Compiled) -> None:
    """Store an executable for the next process."""
    path = None if name is None else _path(name, fast)
    if path is not None and not path.exists():
        with contextlib.suppress(disk.Refused):
            disk.save(path, {"executable": disk.packed(executable)})


def _path(name: str, fast: bool) -> Path | None:
    place = disk.place()
    if place is None:
        return None
    return place[0] / hashlib.sha256(f"{name}|{fast}|{place[1]}".encode()).hexdigest()


def _loaded(path: Path) -> jax.stages.Compiled | None:
    try:
        data = disk.load(path)
        return None if data is None else disk.unpacked(data["executable"])
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
