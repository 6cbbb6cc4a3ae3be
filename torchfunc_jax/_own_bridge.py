"""Refuses to start where Python finds another project's ``bridge`` in the place of ours;
torchfunc_jax imports this file first.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path


def check() -> None:
    """Raise ImportError unless ``bridge`` is the package that lies beside torchfunc_jax and has our
    names.
    """
    ours = Path(__file__).resolve().parents[1] / "bridge"
    # not imported: a user's own bridge.py would import us again, half of us
    spec = importlib.util.find_spec("bridge")
    places = (
        []
        if spec is None
        else [
            Path(place).resolve()
            for place in spec.submodule_search_locations or [spec.origin or ""]
        ]
    )
    if ours in places and hasattr(importlib.import_module("bridge"), "register_lowering"):
        return
    found = " and ".join(map(str, places)) or "none"
    raise ImportError(
        f"bridge: expected the package that torchfunc-jax installs as {ours}, got "
        f"{found + ', overwritten' if ours in places else found}. If that is a file or folder of "
        "your own, rename it. If another installed package brings it, the two cannot share an "
        "environment: uninstall that one and install torchfunc-jax again, or make an environment "
        "for each"
    )


check()
