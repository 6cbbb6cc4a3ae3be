"""Times programs in torch.func's style, nothing compiled by hand, beside the same programs written
by hand in JAX without jit.

    python benchmarks/unjitted.py                 Langevin steps, Newton's method, a flow's
                                                  sensitivity, a step of an ensemble
    python benchmarks/unjitted.py --only newton
    python benchmarks/unjitted.py --json          the results as JSON on stdout

The systems take turns in one process. Python numbers change from call to call; then each call
brings a batch size that was not there before. The results are compared. The step of an ensemble is
under jax.jit in JAX: its times for a new batch size are those of XLA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import torchfunc_jax
from torchfunc_jax._machine import machine

Call = Callable[[int, np.ndarray, np.ndarray], Any]


def langevin() -> tuple[Call, Call]:
    """Twenty steps of stochastic gradient Langevin dynamics, with a step size and a temperature
    that are others at each.
    """

    def ours(k: int, x: Any, y: Any) -> Any:
        x, y, w = torch.from_numpy(x), torch.from_numpy(y), torch.ones(x.shape[1])

        def energy(w: Any, temperature: float) -> Any:
            return ((x @ w - y) ** 2).sum() / temperature + 0.5 * (w**2).sum()

        for i in range(20):
            gradient, _ = torchfunc_jax.grad_and_value(energy)(w, 1.0 + 0.01 * (k + i))
            w = w - 1e-3 * (1 + k + i) ** -0.33 * gradient
        return w

    def by_hand(k: int, x: Any, y: Any) -> Any:
        x, y, w = jnp.asarray(x), jnp.asarray(y), jnp.ones(x.shape[1])

        def energy(w: Any, temperature: float) -> Any:
            return ((x @ w - y) ** 2).sum() / temperature + 0.5 * (w**2).sum()

        for i in range(20):
            _, gradient = jax.value_and_grad(energy)(w, 1.0 + 0.01 * (k + i))
            w = w - 1e-3 * (1 + k + i) ** -0.33 * gradient
        return w

    return ours, by_hand


def newton() -> tuple[Call, Call]:
    """Newton's method by conjugate gradients: Hessian-vector products as jvp of grad, numbers read
    as they come.
    """

    def steps(loss: Any, grad: Any, jvp: Any, zeros: Any, k: int) -> Any:
        w = zeros
        for _ in range(2):
            g = grad(loss)(w)
            d, r = zeros, -g
            s, rr = r, (r @ r).item()
            for _ in range(6):
                hs = jvp(grad(loss), (w,), (s,))[1]
                a = rr / (s @ hs).item()
                d, r = d + a * s, r - a * hs
                new = (r @ r).item()
                s, rr = r + new / rr * s, new
            w = w + d
        return w

    def ours(k: int, x: Any, y: Any) -> Any:
        x, y = torch.from_numpy(x), torch.from_numpy((y > 0).astype(np.float32))
        weight = 1e-2 * (1 + 0.1 * k)

        def loss(w: Any) -> Any:
            return (
                torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y)
                + weight * (w * w).sum()
            )

        return steps(loss, torchfunc_jax.grad, torchfunc_jax.jvp, torch.zeros(x.shape[1]), k)

    def by_hand(k: int, x: Any, y: Any) -> Any:
        x, y = jnp.asarray(x), jnp.asarray((y > 0).astype(np.float32))
        weight = 1e-2 * (1 + 0.1 * k)

        def loss(w: Any) -> Any:
            z = x @ w
            return (jax.nn.softplus(z) - z * y).mean() + weight * (w * w).sum()

        return steps(loss, jax.grad, jax.jvp, jnp.zeros(x.shape[1]), k)

    return ours, by_hand


def flow() -> tuple[Call, Call]:
    """A pendulum's flow and its sensitivity: thirty Runge-Kutta steps in Python under vmap(jacfwd),
    time another number at each.
    """

    def steps(f: Any, s: Any, k: int) -> Any:
        for i in range(30):
            t, h, a = 0.05 * i, 0.05, 0.1 + 0.01 * k
            u = f(s, t, a)
            s = s + h * f(s + h / 2 * u, t + h / 2, a)
        return s

    def ours(k: int, x: Any, y: Any) -> Any:
        def f(s: Any, t: float, a: float) -> Any:
            return torch.stack(
                [s[1], -torch.sin(s[0]) - 0.1 * s[1] + a * torch.cos(torch.as_tensor(t))]
            )

        return torchfunc_jax.vmap(torchfunc_jax.jacfwd(lambda s: steps(f, s, k)))(
            torch.from_numpy(x[:, :2].copy())
        )

    def by_hand(k: int, x: Any, y: Any) -> Any:
        def f(s: Any, t: float, a: float) -> Any:
            return jnp.stack(
                [s[1], -jnp.sin(s[0]) - 0.1 * s[1] + a * jnp.cos(jnp.asarray(t, jnp.float32))]
            )

        return jax.vmap(jax.jacfwd(lambda s: steps(f, s, k)))(jnp.asarray(x[:, :2]))

    return ours, by_hand


def ensemble() -> tuple[Call, Call]:
    """A training step of eight networks with batch normalization: vmap of grad; by hand it is under
    jax.jit.
    """
    generator = np.random.default_rng(0)
    shapes = {
        "0.weight": (32, 8),
        "0.bias": (32,),
        "1.weight": (32,),
        "1.bias": (32,),
        "3.weight": (3, 32),
        "3.bias": (3,),
    }
    params = {
        name: generator.normal(size=(8, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 3)
    )

    def ours(k: int, x: Any, y: Any) -> Any:
        x, y = torch.from_numpy(x), torch.from_numpy(np.digitize(y, [-0.4, 0.4]))

        def loss(p: Any, decay: float) -> Any:
            buffers = {name: b.clone() for name, b in network.named_buffers()}
            out = torchfunc_jax.functional_call(network, (p, buffers), (x,))
            return torch.nn.functional.cross_entropy(out, y) + decay * sum(
                (v**2).sum() for v in p.values()
            )

        given = {name: torch.from_numpy(p) for name, p in params.items()}
        return torchfunc_jax.vmap(torchfunc_jax.grad(lambda p: loss(p, 1e-3 * (1 + k))))(given)[
            "0.weight"
        ]

    def loss(p: Any, decay: Any, x: Any, y: Any) -> Any:
        h = x @ p["0.weight"].T + p["0.bias"]
        h = (h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-5) * p["1.weight"] + p["1.bias"]
        out = jax.nn.log_softmax(jax.nn.relu(h) @ p["3.weight"].T + p["3.bias"])
        return -jnp.take_along_axis(out, y[:, None], 1).mean() + decay * sum(
            (v**2).sum() for v in p.values()
        )

    step = jax.jit(jax.vmap(jax.grad(loss), in_axes=(0, None, None, None)))

    def by_hand(k: int, x: Any, y: Any) -> Any:
        return step(params, 1e-3 * (1 + k), x, np.digitize(y, [-0.4, 0.4]))["0.weight"]

    return ours, by_hand


PROGRAMS: dict[str, Callable[[], tuple[Call, Call]]] = {
    "langevin": langevin,
    "newton": newton,
    "flow": flow,
    "ensemble": ensemble,
}


def data(n: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(n)
    return generator.normal(size=(n, 8)).astype(np.float32), generator.normal(size=n).astype(
        np.float32
    )


def measure(name: str, calls: int, shapes: int) -> dict[str, dict[str, float]]:
    """System -> seconds of the first call, median milliseconds of the next ones, and of those with
    a new batch size.
    """
    systems = dict(zip(("torchfunc_jax", "jax"), PROGRAMS[name](), strict=True))
    times: dict[str, dict[str, list[float]]] = {
        system: {"first": [], "steady": [], "new shape": []} for system in systems
    }

    def turn(kind: str, k: int, n: int) -> None:
        x, y = data(n)
        results = {}
        for system, call in systems.items():
            start = time.perf_counter()
            results[system] = np.asarray(call(k, x, y))
            times[system][kind].append(time.perf_counter() - start)
        np.testing.assert_allclose(
            results["torchfunc_jax"],
            results["jax"],
            rtol=2e-3,
            atol=2e-3,
            err_msg=f"{name}, call {k}",
        )

    turn("first", 0, 32)
    for k in range(1, calls):
        turn("steady", k, 32)
    for i in range(shapes):
        turn("new shape", 0, 17 + 3 * i)
    return {
        system: {
            "first_s": found["first"][0],
            "steady_ms": 1e3 * statistics.median(found["steady"]),
            "new_shape_ms": 1e3 * statistics.median(found["new shape"]),
        }
        for system, found in times.items()
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PROGRAMS), help="programs, by their names")
    parser.add_argument("--calls", type=int, default=12, help="calls of the same batch size")
    parser.add_argument("--shapes", type=int, default=3, help="calls of a new batch size each")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(argv)
    names = options.only.split(",")
    if unknown := set(names) - set(PROGRAMS):
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(PROGRAMS)}"
        )
    results: dict[str, Any] = {"machine": machine(), "programs": {}}
    # what is imported late is not counted
    jax.vmap(jax.grad(lambda x: (x * x).sum()))(jnp.ones((2, 2)))
    torchfunc_jax.vmap(torchfunc_jax.grad(lambda x: (x * x).sum()))(torch.ones(2, 2))
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        row = results["programs"][name] = measure(name, options.calls, options.shapes)
        if not options.json:
            ours, by_hand = row["torchfunc_jax"], row["jax"]
            print(
                f"{name:9s}"
                + "".join(
                    (
                        f"  {key}: {ours[key]:8.2f} ours, {by_hand[key]:8.2f} JAX "
                        f"({ours[key] / by_hand[key]:.2f}x)"
                    )
                    for key in ours
                )
            )
    if options.json:
        json.dump(results, sys.stdout)
    return results


if __name__ == "__main__":
    main()
