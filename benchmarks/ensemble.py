"""Times a training step of an ensemble, Adam included, in one process, taking turns, on one device.

    python benchmarks/ensemble.py                            MLPs and CNNs
    python benchmarks/ensemble.py --only cnn --seconds 10    one of them
    python benchmarks/ensemble.py --systems native,ours      without torch

- torch.func: vmap of grad_and_value, and Adam of the stacked parameters written in torch.
- compile: the same under torch.compile.
- native: the step written by hand in JAX, shard_map over a mesh of one device, with donated state.
- ours: ``Trainer.step``, from torch tensors to a torch tensor of losses.

All start with the same members; losses that differ are an error. Best and median of the times, each
also as a multiple of native's.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from run import describe, say, take_turns
from torch import nn
from workloads import affine, native_cross_entropy, native_perceptron, perceptron

from bridge import compiling
from torchfunc_jax._machine import machine
from torchfunc_jax.ensemble import Ensemble, Trainer
from torchfunc_jax.examples.digits import DigitNet

LR, A, B, EPS = 1e-3, 0.9, 0.999, 1e-8


def native_digits(p: dict[str, Any], x: jax.Array) -> jax.Array:
    for name, stride in (("conv1", 1), ("conv2", 2)):
        x = jax.lax.conv_general_dilated(
            x,
            p[f"{name}.weight"],
            (stride, stride),
            "VALID",
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )
        x = jax.nn.relu(x + p[f"{name}.bias"][:, None, None])
    return affine(p, "head", jax.nn.relu(affine(p, "hidden", x.reshape(x.shape[0], -1))))


WORKLOADS: dict[
    str, tuple[Callable[[], nn.Module], Callable[..., jax.Array], int, tuple[int, ...]]
] = {
    "mlp": (lambda: perceptron([64, 128, 128, 10], nn.Tanh), native_perceptron, 32, (128, 64)),
    "cnn": (DigitNet, native_digits, 32, (64, 1, 8, 8)),
}


def in_torch(ens: Ensemble, x: torch.Tensor, y: torch.Tensor, compiled: bool) -> Callable[[], Any]:
    p = {k: torch.from_numpy(np.array(v)) for k, v in ens.params.items()}
    state = [
        p,
        {k: torch.zeros_like(v) for k, v in p.items()},
        {k: torch.zeros_like(v) for k, v in p.items()},
        torch.zeros(()),
    ]

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(ens.template, p, (x,)), y)

    def step(p: Any, m: Any, v: Any, t: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        grads, losses = torch.func.vmap(torch.func.grad_and_value(loss), (0, None, None))(p, x, y)
        t = t + 1
        m = {k: A * m[k] + (1 - A) * g for k, g in grads.items()}
        v = {k: B * v[k] + (1 - B) * g * g for k, g in grads.items()}
        return (
            {k: p[k] - LR / (1 - A**t) * m[k] / ((v[k] / (1 - B**t)).sqrt() + EPS) for k in p},
            m,
            v,
            t,
            losses,
        )

    run = torch.compile(step) if compiled else step

    def call() -> np.ndarray:
        *state[:], losses = run(*state, x, y)
        return losses.numpy()

    return call


def by_hand(
    ens: Ensemble, forward: Callable[..., jax.Array], x: torch.Tensor, y: torch.Tensor
) -> Callable[[], Any]:
    mesh = jax.make_mesh(
        (1,), ("member",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    rows = jax.NamedSharding(mesh, jax.P("member"))
    p = jax.tree.map(lambda v: jax.device_put(np.array(v), rows), ens.params)
    zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p), out_shardings=rows)
    state = [p, zeros(p), zeros(p), jnp.zeros((), jnp.int32)]

    def one(p: Any, m: Any, v: Any, t: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        loss, g = jax.value_and_grad(lambda p: native_cross_entropy(forward(p, x), y))(p)
        t = t.astype(jnp.float32)
        m = jax.tree.map(lambda m, g: A * m + (1 - A) * g, m, g)
        v = jax.tree.map(lambda v, g: B * v + (1 - B) * g * g, v, g)
        return (
            jax.tree.map(
                lambda p, m, v: p - LR / (1 - A**t) * m / (jnp.sqrt(v / (1 - B**t)) + EPS), p, m, v
            ),
            m,
            v,
            loss,
        )

    def step(p: Any, m: Any, v: Any, t: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        p, m, v, losses = jax.vmap(one, (0, 0, 0, None, None, None))(p, m, v, t + 1, x, y)
        return p, m, v, t + 1, losses

    P = jax.P
    specs = (P("member"), P("member"), P("member"), P(), P(), P())
    over = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(*specs[:4], P("member")))
    run = jax.jit(over, donate_argnums=(0, 1, 2, 3), compiler_options=compiling.options())
    arrays = jnp.asarray(x.numpy()), jnp.asarray(y.numpy().astype(np.int32))

    def call() -> np.ndarray:
        *state[:], losses = run(*state, *arrays)
        return np.asarray(losses)

    return call


def measured(name: str, systems: list[str], seconds: float) -> dict[str, dict[str, float]]:
    make, forward, n, shape = WORKLOADS[name]
    torch.manual_seed(0)
    x, y = torch.randn(shape), torch.randint(10, shape[:1])
    ens = Ensemble(make, n)
    trainer = Trainer(ens.copy(), F.cross_entropy, "adam", lr=LR)
    build = {
        "torch.func": lambda: in_torch(ens, x, y, False),
        "compile": lambda: in_torch(ens, x, y, True),
        "native": lambda: by_hand(ens, forward, x, y),
        "ours": lambda: functools.partial(trainer.step, x, y),
    }
    calls, firsts = {system: build[system]() for system in systems}, {}
    for system, call in calls.items():
        for _ in range(5):
            firsts[system] = np.asarray(call())
    for system, losses in firsts.items():
        np.testing.assert_allclose(
            losses,
            firsts[systems[0]],
            rtol=1e-4,
            atol=1e-5,
            err_msg=f"{name}: {system} beside {systems[0]}",
        )
    times = take_turns(calls, seconds)
    found = {
        s: {"best_ms": 1e3 * min(v), "median_ms": 1e3 * float(np.median(v)), "calls": len(v)}
        for s, v in times.items()
    }
    for row in found.values():
        for kind in ("best", "median"):
            row[f"{kind}_of_native"] = (
                row[f"{kind}_ms"] / found["native"][f"{kind}_ms"]
                if "native" in found
                else float("nan")
            )
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(WORKLOADS), help=f"of {','.join(WORKLOADS)}")
    parser.add_argument(
        "--systems",
        default="torch.func,compile,native,ours",
        help="of torch.func,compile,native,ours",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="per ensemble and system")
    options = parser.parse_args(argv)
    where, results = machine(), {}
    for name in options.only.split(","):
        results[name] = measured(name, options.systems.split(","), options.seconds)
        for system, row in results[name].items():
            kinds = [
                f"{kind} {row[f'{kind}_ms']:8.3f} ms ({row[f'{kind}_of_native']:.2f}x)"
                for kind in ("best", "median")
            ]
            say(f"{name:4} {system:10} {'  '.join(kinds)}")
    say(describe(where))
    json.dump(results, sys.stdout)
    return results


if __name__ == "__main__":
    main()
