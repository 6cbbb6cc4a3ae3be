"""Times whole loops from their first call on, beside torch.func: shapes that change, modules made
anew, simulations, random numbers.

    python benchmarks/whole_loops.py                  every loop, un-jitted and jitted
    python benchmarks/whole_loops.py --only lstm      some of them
    python benchmarks/whole_loops.py --json           the results as JSON on stdout

Each loop runs in a process of its own with an empty cache folder. A line says how long the loop
took as a whole, with tracing and compiling but without imports, and the median of its last calls.
The results are compared with torch.func's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torchfunc_jax._machine import machine

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]
SYSTEMS = ("torch.func", "un-jitted", "jit")


def _mlp(*sizes: int) -> nn.Sequential:
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def _params(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


def perturbed(T: Any, jit: Jit) -> Iterator[Any]:
    """Evolutionary search: a population of networks that are perturbed by random numbers inside of
    vmap.
    """
    net, x = _mlp(8, 32, 2), torch.randn(64, 8)
    params = _params(net)

    def fitness(_: torch.Tensor) -> torch.Tensor:
        moved = {name: p + 0.1 * torch.randn_like(p) for name, p in params.items()}
        return T.functional_call(net, moved, (x,)).square().mean()

    population = jit(lambda lanes: T.vmap(fitness, randomness="different")(lanes))
    for _ in range(150):
        yield population(torch.zeros(50))


class _Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_a_mode(T: Any, jit: Jit) -> Iterator[Any]:
    """The same inside of a TorchFunctionMode of the user's."""
    with _Passing():
        yield from perturbed(T, jit)


def lstm(T: Any, jit: Jit) -> Iterator[Any]:
    """The gradient of an LSTM at forty lengths of the sequence."""
    net, head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 3)

    def loss(net_params: Any, head_params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, _ = T.functional_call(net, net_params, (x,))
        return functional.cross_entropy(T.functional_call(head, head_params, (out[:, -1],)), y)

    gradient, both = jit(T.grad(loss)), (_params(net), _params(head))
    for length in range(10, 50):
        yield gradient(*both, torch.randn(16, length, 8), torch.randint(0, 3, (16,)))


def vocabulary(T: Any, jit: Jit) -> Iterator[Any]:
    """An embedding and a cross entropy with 20,000 words."""
    net = nn.Sequential(
        nn.Embedding(20_000, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 20_000)
    )

    def loss(params: Any, words: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            T.functional_call(net, params, (words,)).flatten(0, 1), y.flatten()
        )

    gradient, params = jit(T.grad(loss)), _params(net)
    for _ in range(14):
        yield gradient(
            params, torch.randint(0, 20_000, (8, 32)), torch.randint(0, 20_000, (8, 32))
        )["1.weight"]


def new_modules(T: Any, jit: Jit) -> Iterator[Any]:
    """A module and a jitted function made anew at each step,
    as in a search for hyper-parameters.
    """
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    for _ in range(10):
        net = _mlp(8, 32, 3)

        def loss(params: Any, net: nn.Module = net) -> torch.Tensor:
            return functional.cross_entropy(T.functional_call(net, params, (x,)), y)

        yield jit(T.grad(loss))(_params(net))


def runge_kutta(T: Any, jit: Jit) -> Iterator[Any]:
    """The derivative of a hundred Runge-Kutta steps of a pendulum."""

    def slope(y: torch.Tensor) -> torch.Tensor:
        return torch.stack([y[1], -torch.sin(y[0])])

    def run(y: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            k1 = slope(y)
            k2 = slope(y + 0.005 * k1)
            k3 = slope(y + 0.005 * k2)
            y = y + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + slope(y + 0.01 * k3))
        return y.sum()

    gradient = jit(T.grad(run))
    for _ in range(30):
        yield gradient(torch.rand(2))


def wave(T: Any, jit: Jit) -> Iterator[Any]:
    """The derivative of sixty steps of a wave on a ring of 10,000 places."""

    def run(u: torch.Tensor) -> torch.Tensor:
        for k in range(60):
            u = u + 0.1 * (1 + 0.001 * k) * (u.roll(1) - 2 * u + u.roll(-1))
        return u.square().sum()

    gradient = jit(T.grad(run))
    for _ in range(30):
        yield gradient(torch.rand(10_000))


LOOPS = {
    f.__name__: f for f in (perturbed, in_a_mode, lstm, vocabulary, new_modules, runge_kutta, wave)
}


def one(name: str, system: str) -> dict[str, Any]:
    """One loop in this process."""
    torch.manual_seed(0)
    if system == "torch.func":
        import torch.func as transforms
    else:
        import torchfunc_jax as transforms  # type: ignore[no-redef]
    jit = transforms.jit if system == "jit" else lambda f: f  # type: ignore[attr-defined]
    seconds, numbers, start = [], [], time.perf_counter()
    for out in LOOPS[name](transforms, jit):
        seconds.append(time.perf_counter() - start)
        numbers.append(
            float(sum(t.double().sum() for t in (out.values() if isinstance(out, dict) else [out])))
        )
        start = time.perf_counter()
    return {
        "whole": sum(seconds),
        "steady": statistics.median(seconds[-len(seconds) // 4 :]),
        "numbers": numbers,
    }


def measured(name: str, system: str) -> dict[str, Any]:
    """One loop in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {
            "XDG_CACHE_HOME": folder
        }
        command = [sys.executable, "-W", "ignore", __file__, "--one", name, system]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"loops, separated by commas: {', '.join(LOOPS)}")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(*arguments.one)))
        return
    names = arguments.only.split(",") if arguments.only else list(LOOPS)
    if unknown := [name for name in names if name not in LOOPS]:
        parser.error(f"--only: there is no loop {unknown[0]}; there are {', '.join(LOOPS)}")
    results: dict[str, Any] = {"machine": machine()}
    for name in names:
        row = results[name] = {system: measured(name, system) for system in SYSTEMS}
        base, line = row["torch.func"], f"{name:12}"
        wanted = base["numbers"]
        for system, found in row.items():
            wrong = any(
                abs(a - b) > 2e-3 * (1.0 + abs(b))
                for a, b in zip(found.pop("numbers"), wanted, strict=True)
            )
            line += (
                f"  {system} {found['whole']:.2f} s ({found['whole'] / base['whole']:.1f}x), then "
                f"{found['steady'] * 1e3:.2f} ms "
                f"({found['steady'] / base['steady']:.1f}x){'  WRONG' if wrong else ''}"
            )
        print(line, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
