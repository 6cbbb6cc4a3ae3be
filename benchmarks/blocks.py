"""Times the first call of models of many equal blocks with and without scan_blocks: tracing, compilation and one run.

    python benchmarks/blocks.py                    a table
    python benchmarks/blocks.py --depths 4 48 --width 128
    python benchmarks/blocks.py --json             the results as JSON on stdout

The model is a decoder of pre-norm transformer blocks.  Each row is a fresh process that calls the jitted loss (forward) or its gradient
for all parameters once.  The processor's time is counted, of all its threads, so that other work on the machine matters little.
"""
from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
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
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
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


def measure(depth: int, width: int, way: str, derivative: bool, calls: int = 5) -> dict[str, Any]:
    """One row: the processor's seconds of the first call, and the median of its milliseconds for later ones."""
    torch.manual_seed(0)
    model, words = Decoder(depth, width), torch.randint(WORDS, (BATCH, LENGTH))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, params, (words,)).flatten(0, 1), words.flatten())

    wanted: Any = grad(loss) if derivative else loss
    fast = jit(wanted if way == "one by one" else scan_blocks(model, "layers", remat=way == "scanned, remat")(wanted))
    start = time.process_time()
    found = fast(params)
    first = time.process_time() - start
    expected = (torch.func.grad(loss) if derivative else loss)(params)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    times = []
    for _ in range(calls):
        start = time.process_time()
        fast(params)
        times.append(time.process_time() - start)
    return {
        "depth": depth, "way": way, "what": "gradient" if derivative else "forward", "first_s": first,
        "operations": fast.programs()[0].operations, "ms": 1e3 * statistics.median(times),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="*", default=[4, 48])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--ways", nargs="*", default=["one by one", "scanned", "scanned, remat"])
    parser.add_argument("--json", action="store_true", help="the results as JSON on stdout")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        depth, way, what = args.row
        print(json.dumps(measure(int(depth), args.width, way, what == "gradient")))
        return
    rows = []
    for what in ("forward", "gradient"):
        for way in args.ways:
            for depth in args.depths:
                command = [sys.executable, str(Path(__file__)), "--width", str(args.width), "--row", str(depth), way, what]
                rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
                print(rows[-1], file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=1))
        return
    print("| | blocks | way | first call | operations | later calls |\n| --- | ---: | --- | ---: | ---: | ---: |")
    for r in rows:
        print(f"| {r['what']} | {r['depth']} | {r['way']} | {r['first_s']:.1f} s | {r['operations']} | {r['ms']:.0f} ms |")
    found = machine()
    print(f"\n{found['cpu']}, {found['cores']} cores, torch {found['torch']}, jax {found['jax']}.")


if __name__ == "__main__":
    main()
