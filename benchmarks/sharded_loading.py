"""How much memory ``bridge.load_sharded`` takes in each of several processes that read one model
onto a mesh over the devices of all.

    python benchmarks/sharded_loading.py                           # 400 MB, two processes with four
                                                                   simulated devices each
    python benchmarks/sharded_loading.py --megabytes 64 --processes 1 --json

Each row: the way, the process, MB of its own parts of the arrays, and by how much its resident
memory had grown at most. ``whole`` is what it takes without: every process reads all weights and
places them by ``bridge.shard``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file, save_file

import bridge
from torchfunc_jax.distributed import initialize

ROW, FILES, DEVICES = 4096, 4, 8  # a tensor has 16 MB or less
RULES = {"*.rows": P("model"), "*.columns": P(None, "model"), "*.norm": P()}


def write(folder: Path, megabytes: int) -> None:
    """A model in several files with an index, as of Hugging Face: matrices to be split by rows and
    by columns, and small vectors.
    """
    count = max(1, megabytes * 10**6 // (2 * 1024 * ROW * 4))
    places = {}
    for k in range(FILES):
        layers = range(k, count, FILES)
        made = {
            f"{i}.{name}": torch.full(shape, float(i))
            for i in layers
            for name, shape in SHAPES.items()
        }
        save_file(made, folder / f"model-{k}.safetensors")
        places.update(dict.fromkeys(made, f"model-{k}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


SHAPES = {"rows": (1024, ROW), "columns": (ROW, 1024), "norm": (ROW,)}


def most() -> float:
    """The most resident memory that this process had since ``forget``, in MB."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def forget() -> float:
    """Let the most begin at what it is now, and return it."""
    Path("/proc/self/clear_refs").write_text("5")
    return most()


def work(way: str, folder: Path, port: int, count: int, me: int) -> dict[str, Any]:
    """What one process measures."""
    if count > 1:
        initialize(f"127.0.0.1:{port}", count, me, timeout=120)
    mesh = jax.make_mesh((DEVICES,), ("model",))
    jax.block_until_ready(jax.device_put(1.0, jax.NamedSharding(mesh, P())))
    before = forget()
    if way == "shards":
        weights = bridge.load_sharded(folder, mesh, RULES)
    else:
        weights = bridge.shard(
            {
                k: v.numpy()
                for f in sorted(folder.glob("*.safetensors"))
                for k, v in load_file(f).items()
            },
            mesh,
            RULES,
        )
    jax.block_until_ready(weights)
    grown = most() - before
    parts = [(name, s) for name, w in weights.items() for s in w.addressable_shards]
    right = all((s.data == int(name.partition(".")[0])).all() for name, s in parts)
    largest = max(
        sum(s.data.nbytes for _, s in parts if s.device == d) for d in jax.local_devices()
    )
    whole, own = sum(w.nbytes for w in weights.values()), sum(s.data.nbytes for _, s in parts)
    sizes = {"whole": whole / 1e6, "parts": own / 1e6, "device": largest / 1e6, "grown": grown}
    return {"way": way, "process": me, **sizes, "right": bool(right)}


def measure(way: str, folder: Path, count: int) -> list[dict[str, Any]]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // count}",
    }
    running = []
    for me in range(count):
        command = [
            sys.executable,
            __file__,
            "--work",
            json.dumps([way, str(folder), port, count, me]),
        ]
        running.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    try:
        return [
            json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in running
        ]
    finally:
        for process in running:
            process.kill()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--processes", type=int, choices=[1, 2, 4, 8], default=2)
    parser.add_argument("--only", choices=["shards", "whole"])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        way, folder, port, count, me = json.loads(options.work)
        print(json.dumps(work(way, Path(folder), port, count, me)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.megabytes)
        ways = [options.only] if options.only else ["shards", "whole"]
        rows = [row for way in ways for row in measure(way, Path(folder), options.processes)]
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"{rows[0]['whole']:.0f} MB in {FILES} files onto {DEVICES} devices "
        f"of {options.processes} processes"
    )
    for row in rows:
        print(
            f"{row['way']:7} process {row['process']}: {row['parts']:6.1f} MB are its parts "
            f"({row['device']:.1f} MB of each device), it grew by {row['grown']:6.1f} "
            f"MB{'' if row['right'] else '; the values are wrong'}"
        )


if __name__ == "__main__":
    main()
