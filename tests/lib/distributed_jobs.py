"""What the processes of tests/distributed/test_distributed_utils.py run:
``python distributed_jobs.py PROCESS PROCESSES PORT JOB...``.

Each job is a function of this file; each process prints one line of JSON, the results by the jobs'
names.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from torchfunc_jax.distributed import initialize
from torchfunc_jax.distributed.utils import (
    recursive_to,
    sync_module_states,
    sync_params_and_buffers,
    verify_param_shape_across_processes,
)

LIMIT = 60  # seconds that processes wait for each other where nobody is missing


def error_of(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def module(seed: int) -> nn.Module:
    """A module with parameters and buffers of several dtypes, tied weights, a strided one, and
    values that arithmetic would not keep.
    """
    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
    )
    made[3].weight = made[2].weight
    made.narrow = nn.Parameter(torch.randn(3, 3).to(torch.bfloat16).t())
    made.register_buffer("mask", torch.rand(11) > 0.5)
    made.register_buffer("empty", torch.empty(0, 4))
    made.register_buffer("phase", torch.randn(3, dtype=torch.complex128))
    nan = struct.unpack("f", struct.pack("I", 0x7FC01234 + seed))[0]
    made.register_buffer(
        "odd", torch.tensor([-0.0, float("nan"), nan, 1e-45 * (seed + 1), float("-inf")])
    )
    return made


def bits(states: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, x in states.items():
        if isinstance(x, torch.Tensor):
            x = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        found[name] = np.asarray(x).tobytes().hex()
    return found


def states_of(made: nn.Module) -> dict[str, Any]:
    return {**dict(made.named_parameters()), **dict(made.named_buffers())}


def synced(me: int, n: int) -> Any:
    """A module in small buckets, but for two names; what each process must have then follows from
    the seeds alone.
    """
    made = module(me)
    sync_module_states(made, None, 64, 0, {"0.bias", "mask"}, timeout=LIMIT)
    return bits(states_of(made))


def synced_from_last(me: int, n: int) -> Any:
    """In one bucket, without the buffers, from the process that is the group's last."""
    made = module(me)
    sync_module_states(made, range(n), 2**20, n - 1, (), broadcast_buffers=False, timeout=LIMIT)
    return bits(states_of(made))


def synced_arrays(me: int, n: int) -> Any:
    """jax.Arrays, of 64 bits too and on several devices, beside a tensor: in place the tensor
    alone.
    """
    with jax.enable_x64(True):
        wide = jax.numpy.full(3, me + 0.1, "float64")
    rows = jax.sharding.NamedSharding(
        jax.make_mesh((2,), ("d",), devices=jax.local_devices()), jax.P("d")
    )
    spread = jax.device_put(np.arange(4, dtype=np.float32) + me, rows)
    states = {
        "wide": wide,
        "spread": spread,
        "tensor": torch.full((2,), float(me)),
        "kept": jax.numpy.full(2, me),
    }
    after = sync_module_states(states, None, 8, 0, ("kept",), timeout=LIMIT)
    return [
        bits(after),
        after["spread"].sharding == rows,
        after["tensor"] is states["tensor"],
        wide.tolist(),
    ]


def verified(me: int, n: int) -> Any:
    verify_param_shape_across_processes(None, dict(module(me).named_parameters()), timeout=LIMIT)
    verify_param_shape_across_processes(
        range(n), list(module(me).parameters()), None, timeout=LIMIT
    )
    return "passed"


def disagreeing(me: int, n: int) -> Any:
    """One process has another shape, another one another dtype and a parameter more."""
    layers = {
        "weight": torch.ones(3, 4 if me else 5),
        "bias": torch.ones(3),
        "scale": jax.numpy.ones(2),
    }
    if me == 1:
        layers |= {"bias": torch.ones(3, dtype=torch.float64), "more": torch.ones(1)}
    return error_of(lambda: verify_param_shape_across_processes(None, layers, timeout=LIMIT))


def disagreeing_lists(me: int, n: int) -> Any:
    return error_of(
        lambda: sync_params_and_buffers(
            None, [torch.ones(2), torch.ones(2 + (me == 1))], 8, 0, timeout=LIMIT
        )
    )


def other_source(me: int, n: int) -> Any:
    return error_of(
        lambda: sync_params_and_buffers(None, [torch.ones(1)], 8, int(me == 1), timeout=LIMIT)
    )


def other_order(me: int, n: int) -> Any:
    states = {name: torch.ones(1) for name in ("ab", "ba")[me == 1]}
    return error_of(lambda: sync_module_states(states, None, 8, 0, (), timeout=LIMIT))


def parts(me: int, n: int) -> Any:
    """The lower half of the processes and the upper one, each for itself."""
    group = [p for p in range(n) if (p < n // 2) == (me < n // 2)]
    return sync_params_and_buffers(
        group, [torch.tensor(float(me))], 8, len(group) - 1, timeout=LIMIT
    )[0].item()


def placed(me: int, n: int) -> Any:
    """The process whose device an array is on after a move to the CPU, of which each process has
    its own.
    """
    (device,) = recursive_to(jax.numpy.ones(2), torch.device("cpu"), False)[0].devices()
    return device.process_index


def refused(me: int, n: int) -> Any:
    """Wrong groups and states are refused in each process by itself."""
    one = [torch.ones(1)]
    return [
        error_of(lambda: verify_param_shape_across_processes([(me + 1) % n], one)),
        error_of(lambda: sync_params_and_buffers(None, one, 8, n)),
        error_of(lambda: sync_params_and_buffers(None, [torch.ones(1, device="meta")], 8, 0)),
    ]


def absent(me: int, n: int) -> Any:
    """The last process does not take part; the others must end within the limit."""
    begin = time.monotonic()
    if me == n - 1:
        time.sleep(4)
        return ["absent", 0]
    said = error_of(lambda: verify_param_shape_across_processes(None, [torch.ones(1)], timeout=2))
    return [said, time.monotonic() - begin]


def main() -> None:
    me, n, port, *jobs = sys.argv[1:]
    limit = 3 if jobs == ["start"] else LIMIT
    begin = time.monotonic()
    said = error_of(lambda: initialize(f"127.0.0.1:{port}", int(n), int(me), timeout=limit))
    results: dict[str, Any] = {"start": [said, time.monotonic() - begin]}
    if said == "no error":
        for job in jobs:
            results[job] = globals()[job](int(me), int(n))
        jax.distributed.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
