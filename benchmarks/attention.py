"""Measures the memory of attention by its length, in each kind of derivative, and how far its
results are from the formula in float64.

    python benchmarks/attention.py                     512 to 8,192 queries and keys, 4 heads of 64,
                                                       float32, causal
    python benchmarks/attention.py --page              and put the table into docs/performance.md
    python benchmarks/attention.py --json              the results as JSON on stdout
    python benchmarks/attention.py --lengths 1024,2048 --only hvp
    python benchmarks/attention.py --at-once inf       all scores at once, as a matrix

The memory is what XLA allots to a compiled program besides its arguments and results. The error is
relative to the largest value of each result; the formula computes the whole scores of a thousand
queries of a head at a time. Results are written to benchmarks/results/, a file per machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from readme import describe, keep
from run import parser_of, say, slug
from torch import Tensor

import torchfunc_jax
from bridge.process import process
from torchfunc_jax import attention_scores, jit
from torchfunc_jax._machine import machine

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
HEADS, WIDTH = 4, 64
_QUERIES = 1024  # whose scores the formula computes together
_SUMMED = ("gradient", "hvp")  # whose results after the first are sums over the queries
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def formula(first: int) -> Attention:
    """The same, with all scores of the queries from this one on."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.arange(first, first + q.shape[-2])[:, None] >= torch.arange(k.shape[-2])
        return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf).softmax(-1) @ v

    return attend


def of_all(T: Any, attend: Attention) -> dict[str, Callable[..., Any]]:
    """What is measured, by name: functions of three tensors and of their tangents."""
    loss = lambda q, k, v: attend(q, k, v).square().sum()
    slopes = T.grad(loss, (0, 1, 2))
    return {
        "forward": lambda args, along: (attend(*args),),
        "gradient": lambda args, along: slopes(*args),
        "jvp": lambda args, along: T.jvp(attend, args, along),
        "hvp": lambda args, along: T.jvp(slopes, args, along)[1],
    }


NAMES = tuple(of_all(torchfunc_jax, attention))


def _tensors(length: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(3))
        for _ in range(2)
    ]


def memory(name: str, length: int) -> int:
    """The bytes of a program, besides those of its arguments and results."""
    program = jit(of_all(torchfunc_jax, attention)[name]).lower(*_tensors(length)).compile()
    return int(program.memory_analysis().temp_size_in_bytes)


def error(name: str, length: int) -> float:
    """The greatest difference to the formula in float64, relative to the largest value of the
    result.
    """
    args, along = _tensors(length)
    found = _flat(jit(of_all(torchfunc_jax, attention)[name])(args, along))
    truth = [torch.zeros_like(x, dtype=torch.float64) for x in found]
    for head in range(HEADS):
        for first in range(0, length, _QUERIES):
            queries = slice(first, first + _QUERIES)
            parts = [
                [
                    x[:, head].double() if k else x[:, head, queries].double()
                    for k, x in enumerate(group)
                ]
                for group in (args, along)
            ]
            computed = _flat(of_all(torch.func, formula(first))[name](*map(tuple, parts)))
            for k, (whole, part) in enumerate(zip(truth, computed, strict=True)):
                if name in _SUMMED and k:  # a gradient of keys or values
                    whole[:, head] += part
                else:
                    whole[:, head, queries] = part
    return max(
        float((x - t).abs().max() / t.abs().max()) for x, t in zip(found, truth, strict=True)
    )


def _flat(tree: Sequence[Any]) -> list[Tensor]:
    return [t for x in tree for t in (_flat(x) if isinstance(x, tuple | list) else [x])]


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lengths = results["lengths"]
    lines = [
        f"| | {' | '.join(f'{n:,}' for n in lengths)} | error at {lengths[-1]:,} |",
        "| --- |" + " ---: |" * (len(lengths) + 1),
    ]
    for name, row in results["rows"].items():
        lines.append(
            f"| {name} | {' | '.join(f'{size / 2**20:.0f} MB' for size in row['bytes'])} | "
            f"{row['error']:.0e} |"
        )
    matrix = f"{HEADS * lengths[-1] ** 2 * 4 / 2**20:,.0f}"
    said = (
        f"The scores of {lengths[-1]:,} queries and keys are {matrix} MB for all four heads. "
        f"Every number is in `{results['file']}`."
    )
    return "\n".join([*lines, "", f"{describe(results['machine'])}. {said}"])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = parser_of(__doc__, NAMES, 0.0, "docs/performance.md")
    parser.add_argument(
        "--lengths",
        default="512,1024,2048,4096,8192",
        help="numbers of queries, which are those of keys too",
    )
    parser.add_argument(
        "--at-once",
        type=float,
        default=process.attention_scores,
        help="scores of a head at once, or inf",
    )
    options = parser.parse_args(argv)
    names, lengths = options.only.split(","), [int(n) for n in options.lengths.split(",")]
    if unknown := set(names) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(NAMES)}")
    where = machine()
    path = options.output / f"attention-{slug(where)}.json"
    shown = (
        path.relative_to(HERE.parent).as_posix() if path.is_relative_to(HERE.parent) else path.name
    )
    results: dict[str, Any] = {"machine": where, "file": shown, "lengths": lengths, "rows": {}}
    with attention_scores(options.at_once):
        for name in names:
            say(f"{name} ...")
            results["rows"][name] = {
                "bytes": [memory(name, n) for n in lengths],
                "error": error(name, lengths[-1]),
            }
    return keep("attention", results, table(results), path, options, PAGE)


if __name__ == "__main__":
    main()
