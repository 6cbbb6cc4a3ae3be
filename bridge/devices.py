"""The JAX device of each torch device, and the default device to which CPU tensors are sent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import torch

from bridge.process import having, process


def default() -> jax.Device | None:
    """The JAX device to which CPU tensors are sent; None: they stay where they are."""
    return process.default_device


def set_default(device: jax.Device | str | None) -> None:
    """Send CPU tensors to this JAX device for computation; results come back as CPU tensors.

    Args:
        device: a ``jax.Device``, a platform name ("tpu", "gpu", "cpu"), "platform:index", or None
            to switch it off.

    Raises:
        ValueError: there is no such device.

    Example:
        >>> from bridge import devices
        >>> devices.set_default("cpu:0")
        >>> devices.set_default(None)
    """
    process.default_device = None if device is None else find(device)


@contextlib.contextmanager
def use(device: jax.Device | str | None) -> Iterator[None]:
    """``set_default`` for a ``with`` block.

    Example:
        >>> from bridge import devices
        >>> with devices.use("cpu"):
        ...     devices.default().platform
        'cpu'
    """
    with having(process, default_device=process.default_device):
        set_default(device)
        yield


def find(device: jax.Device | str) -> jax.Device:
    """This process's JAX device with a name such as "tpu" or "gpu:1"; a ``jax.Device`` is returned
    as it is.
    """
    if isinstance(device, jax.Device):
        return device
    platform, _, index = str(device).partition(":")
    platform = {"cuda": "gpu"}.get(platform, platform)
    try:
        return jax.local_devices(backend=platform)[int(index or 0)]
    except (RuntimeError, IndexError, ValueError):
        have = ", ".join(f"{d.platform}:{d.id}" for d in jax.local_devices())
        raise ValueError(f"device: no JAX device {device!r}; this machine has {have}") from None


def free_memory(device: jax.Device) -> int:
    """The bytes that are free on a device; for a CPU, those that the machine, or this process's
    cgroup, still has.

    Args:
        device: any JAX device.

    Returns:
        int: a device that does not tell counts as a CPU.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.Device.html

    Example:
        >>> import jax
        >>> from bridge import devices
        >>> devices.free_memory(jax.devices()[0]) > 0
        True
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats["bytes_in_use"])
    free = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, StopIteration):  # not Linux
        line = next(
            line
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        )
        free.append(int(line.split()[1]) * 1024)
    # no cgroup, or one without a limit, which says "max"
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        free.append(
            int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        )
    return max(min(free), 0)


def indexed(device: torch.device) -> torch.device:
    """The device as tensors name theirs: torch.device("cuda") is the current one of the CUDA
    devices.
    """
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device.type == "cuda" and device.index is None
        else device
    )


def has_accelerator() -> bool:
    """Whether JAX's default device is another one than the CPU."""
    return jax.default_backend() != "cpu"


def of(device: torch.device) -> jax.Device:
    """The JAX device that computes with tensors on that torch device."""
    if device.type == "cuda":
        return jax.local_devices(backend="gpu")[device.index or 0]
    return jax_device(device) or jax.local_devices(backend="cpu")[0]


def jax_device(device: torch.device) -> jax.Device | None:
    """The JAX device that computes with tensors on that torch device; None: the device that has the
    memory, without a copy.
    """
    if device.type == "cpu":
        if process.default_device is not None:
            return process.default_device
        return jax.local_devices(backend="cpu")[0] if has_accelerator() else None
    if device.type == "cuda":
        return None
    raise TypeError(
        f"device: expected a tensor on 'cpu' or 'cuda', got {device.type!r}; move it with .cpu()"
    )
