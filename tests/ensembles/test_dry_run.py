"""A dry run's numbers beside those of the program that XLA compiles for the mesh, on 8 simulated
devices.
"""

from __future__ import annotations

import io
from typing import Any

import ensemble_jobs as jobs
import pytest
import torch
from rich.console import Console
from torch import nn

from torchfunc_jax.ensemble import Ensemble, Trainer, dry_run, launch


@pytest.mark.parametrize(
    "shape",
    [
        (4, 2),
        pytest.param((8, 1), marks=pytest.mark.slow),
        pytest.param((1, 8), marks=pytest.mark.slow),
    ],
)
def test_numbers_are_those_of_the_compiled_program(shape: tuple[int, int]) -> None:
    (compiled,) = launch(jobs.compiled, shape, processes=1, devices_per_process=8)
    for kind, (make, batch, own) in jobs.PRICED.items():
        price, real = (
            dry_run(make, 16, batch, {"member": shape[0], "data": shape[1]}, own=own),
            compiled[kind],
        )
        reduced = sum(c.bytes for c in price.collectives)
        ratios = (
            f"memory {price.memory / real['memory']:.3f}, FLOPs {price.flops / real['flops']:.3f}"
        )
        print(f"{kind} on {shape}, beside the compiled program's: {ratios}")
        assert (
            price.members_per_device == 16 // shape[0] and price.rows_per_device == 256 // shape[1]
        )
        # no step gets these
        unread = sum(
            price.state.get(name, 0) for name in ("order", "best", "waited", "best_params")
        )
        assert sum(price.state.values()) - unread + price.batch == real["arguments"]  # exactly
        assert price.memory == pytest.approx(real["memory"], rel=0.01), kind
        assert price.flops == pytest.approx(real["flops"], rel=0.03), kind
        # each all-reduce of the compiled program has this many bytes on a device, exactly
        assert (
            reduced == real["reduced"] and real["gathered"] == 0 and (reduced > 0) == (shape[1] > 1)
        )


def test_what_is_sent_is_counted_by_a_formula() -> None:
    """Members without a data axis say nothing; with one, each sends its gradients round a ring."""

    def make(n: int, mesh: Any) -> Trainer:
        return Trainer(
            Ensemble(lambda: nn.Linear(100, 10), n, mesh=mesh), nn.functional.mse_loss, "sgd"
        )

    batch = torch.empty(4096, 100, device="meta"), torch.empty(4096, 10, device="meta")
    alone = dry_run(make, 4096, batch, {"member": 256})
    assert (
        alone.sent == 0
        and alone.devices == 256
        and alone.state["params"] == 16 * 1010 * 4
        and alone.parameters == 1010
    )
    price = dry_run(make, 4096, batch, {"member": 64, "data": 4})
    gradients = 64 * 1010 * 4
    losses = 64 * 4
    assert price.sent == round(2 * 3 / 4 * (gradients + losses))
    forward_and_weights = 2 * 2 * 64 * 1024 * 100 * 10
    assert (
        price.flops == pytest.approx(forward_and_weights, rel=0.05)
        and price.total_flops == 256 * price.flops
    )
    console = Console(width=120, file=io.StringIO())
    console.print(price.table())
    text = console.file.getvalue()
    assert (
        "4,096 members on 256 devices (member=64 x data=4)" in text and "psum over 'data'" in text
    )


def test_loops_of_the_trainer_count_in_full() -> None:
    """XLA counts one round of a loop, and a dry run all of them."""

    def price(**options: Any) -> Any:
        make = lambda n, mesh: Trainer(
            Ensemble(jobs.member, n, mesh=mesh), nn.functional.mse_loss, **options
        )
        return dry_run(make, 16, jobs.data(), {"member": 2, "data": 2})

    whole, looped = price(), price(chunk=2, accumulate=4)
    assert looped.flops == whole.flops and looped.temporary < whole.temporary
    assert looped.sent == whole.sent  # the gradients are joined after the last part


def test_wrong_arguments() -> None:
    make, batch, _ = jobs.PRICED["cnn"]
    for words, args in [
        ("mesh: expected positive numbers", (make, 16, batch, {"rows": 4})),
        ("mesh: expected positive numbers", (make, 16, batch, {"member": 0})),
        ("members: expected a positive multiple of the 3", (make, 16, batch, {"member": 3})),
        ("a multiple of the 5 devices", (make, 16, batch, {"member": 4, "data": 5})),
        (
            "batch: expected tensors of as many rows",
            (make, 16, (batch[0], batch[1][1:]), {"member": 4}),
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            dry_run(*args)
    with pytest.raises(
        ValueError, match=r"batch: expected tensors \[32, rows, ...\] with own=True"
    ):
        dry_run(make, 32, jobs.PRICED["mlp"][1], {"member": 4}, own=True)
