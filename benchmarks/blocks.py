"""Times the first call of models of many equal blocks under jit, and later ones: as loops, which is
the default, and one by one.

    python benchmarks/blocks.py                    a table
    python benchmarks/blocks.py --depths 4 48 --width 128
    python benchmarks/blocks.py --settle 120       call for two minutes until programs are compiled
                                                   with all optimizations
    python benchmarks/blocks.py --runs 3           the minimum of three processes for each row
    python benchmarks/blocks.py --json             the results as JSON on stdout

The model is a decoder of pre-norm transformer blocks. Each row is a fresh process with an empty
cache folder, which calls the jitted loss (forward) or its gradient for all parameters. Of the first
call the processor's time is counted, of all its threads, so that other work on the machine matters
little; of later calls the shortest one. A hook on a layer inside each block is what keeps blocks
one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchfunc_jax import functional_call, grad, jit, scan_blocks
from torchfunc_jax._machine import machine

HEADS, LENGTH, BATCH, WORDS = 4, 16, 2, 50


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def measure(
    depth: int, width: int, way: str, derivative: bool, settle: float = 0.0, calls: int = 10
) -> dict[str, Any]:
    """One row: the processor's seconds of the first call, and the milliseconds of the shortest
    later one, at once and after ``settle``.
    """
    torch.manual_seed(0)
    model, words = Decoder(depth, width), torch.randint(WORDS, (BATCH, LENGTH))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(
            functional_call(model, params, (words,)).flatten(0, 1), words.flatten()
        )

    def shortest() -> float:
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            fast(params)
            times.append(time.perf_counter() - start)
        return 1e3 * min(times)

    wanted: Any = grad(loss) if derivative else loss
    if way == "one by one":
        for layer in (m for m in model.modules() if isinstance(m, nn.GELU)):
            layer.register_forward_hook(lambda *_: None)
    fast = jit(scan_blocks(model, "layers", remat=True)(wanted) if way == "remat" else wanted)
    start = time.process_time()
    found = fast(params)
    first = time.process_time() - start
    expected = (torch.func.grad(loss) if derivative else loss)(params)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    soon, start = shortest(), time.perf_counter()
    while time.perf_counter() - start < settle:
        fast(params)
    return {
        "depth": depth,
        "way": way,
        "what": "gradient" if derivative else "forward",
        "first_s": first,
        "operations": fast.programs()[0].operations,
        "ms": soon,
        "settled_ms": shortest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="*", default=[4, 48])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--ways", nargs="*", default=["default", "one by one", "remat"])
    parser.add_argument(
        "--settle",
        type=float,
        default=30.0,
        help="the seconds of calls before the last ones are timed",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="the processes for each row, of which the minimum is taken",
    )
    parser.add_argument("--json", action="store_true", help="the results as JSON on stdout")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        depth, way, what = args.row
        print(json.dumps(measure(int(depth), args.width, way, what == "gradient", args.settle)))
        return
    rows = []
    for what in ("forward", "gradient"):
        for way in args.ways:
            for depth in args.depths:
                given = [
                    "--width",
                    str(args.width),
                    "--settle",
                    str(args.settle),
                    "--row",
                    str(depth),
                    way,
                    what,
                ]
                found = [
                    _in_a_process([sys.executable, str(Path(__file__)), *given])
                    for _ in range(args.runs)
                ]
                rows.append(
                    found[0]
                    | {
                        key: min(row[key] for row in found)
                        for key in ("first_s", "ms", "settled_ms")
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=1))
        return
    print(
        "| | blocks | way | first call | operations | later calls | settled |\n| --- | ---: | --- "
        "| ---: | ---: | ---: | ---: |"
    )
    for r in rows:
        times = (
            f"{r['first_s']:.2f} s | {r['operations']} | {r['ms']:.1f} ms | "
            f"{r['settled_ms']:.1f} ms"
        )
        print(f"| {r['what']} | {r['depth']} | {r['way']} | {times} |")
    of = machine()
    print(f"\n{of['cpu']}, {of['cores']} cores, torch {of['torch']}, jax {of['jax']}.")


def _in_a_process(command: list[str]) -> dict[str, Any]:
    """The row that a fresh process with an empty cache folder prints."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": folder},
        )
    row: dict[str, Any] = json.loads(done.stdout)
    return row


if __name__ == "__main__":
    main()
