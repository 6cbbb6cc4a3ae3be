"""A description of the machine on which a number was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import jax
import torch

from bridge.version import __version__


def machine(device: jax.Device | None = None) -> dict[str, Any]:
    """A description of the machine on which a number is measured: processor, cores, device and
    versions.
    """
    device = jax.devices()[0] if device is None else device
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": device.device_kind if device.platform != "cpu" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "jax": jax.__version__,
        "torchfunc_jax": __version__,
    }
