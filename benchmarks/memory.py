"""How much memory calls keep: jitted ones whose Python number changes each time, and un-jitted ones
with many shapes.

    python benchmarks/memory.py                        # 10,000 jitted calls, 2,000 un-jitted ones
    python benchmarks/memory.py --calls 500 --only static

Each row: calls, what the process had grown by when the first tenth was done and at the end
(resident memory), and milliseconds a call.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchfunc_jax import grad, jit, vmap


def resident() -> float:
    """The process's resident memory in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def changing() -> Callable[[int], Any]:
    """A jitted function of a float that is another one at each call."""
    x, fn = torch.randn(8), jit(lambda x, lr: x - lr * x.sin())
    return lambda i: fn(x, 1.0 / (i + 1))


def static() -> Callable[[int], Any]:
    """The same where the function asks for its value, so that each call compiles."""
    x, fn = torch.randn(8), jit(lambda x, lr: x - lr * x.sin() if lr > 0 else x)
    return lambda i: fn(x, 1.0 / (i + 1))


def shapes() -> Callable[[int], Any]:
    """An un-jitted vmap of grad, with 200 shapes in turn."""
    fn = vmap(grad(lambda t: (t.sin() * t).sum().exp() + (t @ t)))
    data = [torch.randn(4, n) for n in range(1, 201)]
    return lambda i: fn(data[i % 200])


def numbers() -> Callable[[int], Any]:
    """An un-jitted grad in which a Python float is another one at each call."""
    x = torch.randn(8)
    return lambda i: grad(lambda t: (t * (1.0 / (i + 1))).sin().sum())(x)


WORK = {
    "changing": (changing, 10_000),
    "static": (static, 500),
    "shapes": (shapes, 2_000),
    "numbers": (numbers, 2_000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=WORK, action="append")
    parser.add_argument("--calls", type=int)
    options = parser.parse_args()
    for name in options.only or ("changing", "shapes"):
        make, calls = WORK[name]
        calls = options.calls or calls
        call = make()
        for i in range(3):
            call(i)
        gc.collect()
        before, start = resident(), time.perf_counter()
        first = before
        for i in range(calls):
            call(i)
            if i + 1 == max(1, calls // 10):
                first = resident()
        gc.collect()
        seconds = time.perf_counter() - start
        grown = f"{first - before:8.1f} MB after a tenth {resident() - before:8.1f} MB at the end"
        print(
            f"{name:10} {calls:6} calls {grown} {seconds / calls * 1e3:8.3f} ms a call", flush=True
        )


if __name__ == "__main__":
    main()
