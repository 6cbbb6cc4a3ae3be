"""The ensemble demo: its data, that both systems train the same networks, its report, its plots."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from torchfunc_jax.ensemble import Ensemble
from torchfunc_jax.examples import digits_plots as plots
from torchfunc_jax.examples.digits import (
    DigitNet,
    Settings,
    Training,
    batches,
    calibration,
    checkpoints,
    jitter,
    letters,
    load_digits,
    priced,
    report,
    speed_up,
)

SMALL = Settings(members=3, epochs=3, batch_size=256)


@pytest.fixture(scope="module")
def training() -> Training:
    done = Training(SMALL)
    done.run()
    return done


@pytest.fixture(scope="module")
def result(training: Training) -> dict[str, Any]:
    return report(training)


def test_split_is_by_seed_and_has_every_digit() -> None:
    one, again, other = load_digits(0), load_digits(0), load_digits(1)
    assert len(one.train_labels) + len(one.test_labels) == 1797
    assert len(one.test_labels) == 360 and one.train_images.shape == (1437, 1, 8, 8)
    assert torch.equal(one.test_images, again.test_images) and not torch.equal(
        one.test_labels, other.test_labels
    )
    assert torch.bincount(one.test_labels).min() >= 34
    assert one.train_images.min() == 0 and one.train_images.max() == 1


def test_batches_repeat_and_leave_the_digits_alone() -> None:
    digits = load_digits(0)
    before = digits.train_images.clone()
    a, b = list(batches(digits, SMALL)), list(batches(digits, SMALL))
    assert len(a) == 15
    for (x, y), (u, v) in zip(a, b, strict=True):
        assert torch.equal(x, u) and torch.equal(y, v) and x.shape == (256, 1, 8, 8)
    assert torch.equal(digits.train_images, before)


def test_jitter_by_nothing_is_the_image() -> None:
    images = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(
        jitter(images, torch.Generator(), degrees=0, shift=0, scale=0), images
    )


def test_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(
        ValueError, match="batch_size: expected at most the 1437 training digits, got 2000"
    ):
        Training(Settings(batch_size=2000))


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device: no JAX device 'abacus'"):
        Training(Settings(members=1, device="abacus"))


def test_the_first_step_agrees(result: dict[str, Any]) -> None:
    assert result["difference"]["first_step"]["loss"] < 1e-5
    assert result["difference"]["first_step"]["gradient"] < 1e-4
    assert result["difference"]["end_same_weights"]["loss"] < 1e-4


def test_both_train_the_same_networks(training: Training, result: dict[str, Any]) -> None:
    ours, theirs = (np.array(training.losses[name]) for name in ("torchfunc_jax", "torch.func"))
    assert ours.shape == theirs.shape == (15, 3)
    np.testing.assert_allclose(ours, theirs, rtol=1e-2)
    assert ours[-1].mean() < 0.8 * ours[0].mean()
    a, b = (result["systems"][name]["test_accuracy"] for name in ("torchfunc_jax", "torch.func"))
    assert abs(a["mean_member"] - b["mean_member"]) <= 0.01 and abs(a["vote"] - b["vote"]) <= 0.01


def test_members_differ_and_start_as_torch_starts_them(training: Training) -> None:
    weight = training.initial["conv1.weight"]
    assert weight.shape == (3, 16, 1, 3, 3)
    again = Ensemble(DigitNet, 3, seed=0)
    assert torch.equal(weight[1], again[1].conv1.weight) and not torch.equal(weight[0], weight[1])


def test_saved_members_are_the_trained_ones(training: Training, tmp_path: Any) -> None:
    states = torch.load(training.save(tmp_path), weights_only=True)
    assert len(states) == 3 and not list(tmp_path.glob("*.part"))
    member = DigitNet()
    member.load_state_dict(states[2])
    images = training.digits.test_images
    np.testing.assert_allclose(member(images).detach(), training.ours.logits(images)[2], atol=1e-4)


def test_report_is_json_with_everything_the_table_shows(result: dict[str, Any]) -> None:
    read = json.loads(json.dumps(result, allow_nan=False))
    # too few steps to tell
    assert read["speed_up"] is None and not read["interrupted"] and read["steps"] == 15
    for one in read["systems"].values():
        assert one["first_step_s"] > 0 and one["step_ms"] > 0 and one["final_loss"] > 0
        assert np.array(one["losses"]).shape == (3, 15)
    for digit in read["least_sure"]:
        assert sum(digit["votes"]) == 3 and sum(digit["probability"]) == pytest.approx(1, abs=1e-4)


def test_the_report_has_the_metrics_of_the_predictions(
    training: Training, result: dict[str, Any]
) -> None:
    labels = training.digits.test_labels
    p = training.ours.logits(training.digits.test_images).double().softmax(-1)
    found = result["systems"]["torchfunc_jax"]
    assert found["nll"] == pytest.approx(log_loss(labels, p.mean(0), labels=range(10)), rel=1e-5)
    # ties go to the higher mean probability
    votes = torch.nn.functional.one_hot(p.argmax(-1), 10).sum(0) + p.mean(0) / 2
    assert found["test_accuracy"]["vote"] == pytest.approx(
        float((votes.argmax(-1) == labels).double().mean())
    )
    curve = result["by_size"]
    assert curve["members"] == [1, 2, 3] and curve["nll"]["mean"][-1] == pytest.approx(
        found["nll"], rel=1e-5
    )
    assert set(curve) == {"members", "accuracy", "nll", "brier", "ece"}
    assert (
        curve["ece"]["mean"][-1]
        == pytest.approx(found["ece"])
        == pytest.approx(found["calibration"]["error"])
    )


def test_letters_are_turned_digits(training: Training, result: dict[str, Any]) -> None:
    digits = training.digits
    images, names = letters(digits.test_images, digits.test_labels)
    assert (
        len(images) == len(names) == sum(int((digits.test_labels == d).sum()) for d in (2, 3, 4, 7))
    )
    assert set(names) == {"N", "m", "h", "L"}
    upside_down = digits.test_images[digits.test_labels == 7].flip(-1, -2)
    assert torch.equal(images[names.index("L") :], upside_down)
    for score in result["out_of_distribution"]["scores"].values():
        both = score["digits"] + score["letters"]
        target = [0] * len(score["digits"]) + [1] * len(score["letters"])
        assert score["auroc"] == pytest.approx(roc_auc_score(target, both), abs=1e-4)


def test_a_speed_up_is_the_median_over_steps_of_its_ratio(training: Training) -> None:
    class Timed:
        seconds: ClassVar = {
            "torchfunc_jax": [9.0] + [1.0] * 60 + [2.0] * 60,
            "torch.func": [1.0] + [3.0] * 120,
        }

    found = speed_up(Timed())  # type: ignore[arg-type]
    assert found == {"median": 2.25, "low": 1.5, "high": 3.0}
    Timed.seconds = {name: times[:50] for name, times in Timed.seconds.items()}
    assert speed_up(Timed()) is None  # type: ignore[arg-type]


def test_a_run_goes_on_from_its_checkpoint(training: Training, tmp_path: Any) -> None:
    settings = dataclasses.replace(SMALL, compare=False)
    first = Training(settings)
    with checkpoints(settings, tmp_path) as kept:
        first.run(stop=lambda: len(first.losses["torchfunc_jax"]) == 7, kept=kept)
    second = Training(settings)
    with checkpoints(settings, tmp_path) as kept:
        second.run(kept=kept)
    assert first.interrupted and second.resumed_at == 7
    losses = first.losses["torchfunc_jax"] + second.losses["torchfunc_jax"]
    np.testing.assert_array_equal(losses, training.losses["torchfunc_jax"])
    assert report(second)["steps"] == 15
    with pytest.raises(ValueError, match=r"resume: .* with batch_size=256, got 128"):
        checkpoints(dataclasses.replace(settings, batch_size=128), tmp_path)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [((2, 1), "expected as many devices as there are, 1, got 2"), ((1, 3), "as many devices")],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Training(dataclasses.replace(SMALL, mesh=mesh))


def test_a_price_is_of_one_device() -> None:
    found = priced(Settings(members=64, mesh=(16, 2)))
    assert (found.members_per_device, found.rows_per_device, found.parameters) == (4, 32, 21386)


def test_stopping_keeps_what_was_trained() -> None:
    training = Training(Settings(members=2, epochs=2, batch_size=256, compare=False))
    training.run(stop=lambda: len(training.losses["torchfunc_jax"]) == 4)
    result = report(training)
    assert training.interrupted and result["interrupted"] and result["steps"] == 4
    assert "difference" not in result and list(result["systems"]) == ["torchfunc_jax"]


def test_stopping_before_the_first_step_still_reports(tmp_path: Any) -> None:
    training = Training(Settings(members=2, epochs=1, batch_size=512))
    training.run(stop=lambda: True)
    result = report(training)
    assert result["steps"] == 0 and result["speed_up"] is None
    plots.page(result).savefig(tmp_path / "page.png")


def test_page_of_plots(result: dict[str, Any], tmp_path: Any) -> None:
    figure = plots.page(result)
    figure.savefig(tmp_path / "page.png", dpi=40)
    titles = {axes.get_title(loc="left") for axes in figure.axes}
    assert titles >= {
        "Loss of every member",
        "Accuracy",
        "NLL",
        "ECE",
        "Calibration",
        "Letters, which no member has seen",
    }
    assert len([axes for axes in figure.axes if axes.images]) == 12 + 4


@pytest.mark.parametrize(
    ("probabilities", "labels", "error"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [0, 1], 0.0),
        ([[1.0, 0.0], [0.0, 1.0]], [1, 0], 1.0),
        ([[0.75, 0.25], [0.25, 0.75]], [0, 0], 0.25),
    ],
)
def test_calibration(probabilities: list[list[float]], labels: list[int], error: float) -> None:
    table = calibration(torch.tensor(probabilities), torch.tensor(labels))
    assert table["error"] == pytest.approx(error) and sum(table["count"]) == len(labels)
    assert len(table["accuracy"]) == 15 and table["accuracy"][0] is None


@pytest.mark.slow
def test_the_whole_demo_keeps_its_promises() -> None:
    training = Training(Settings())
    training.run()
    result = report(training)
    ours, theirs = (
        result["systems"][name]["test_accuracy"] for name in ("torchfunc_jax", "torch.func")
    )
    assert result["difference"]["first_step"]["loss"] <= 1e-4
    assert ours["vote"] >= 0.97
    assert (
        abs(ours["vote"] - theirs["vote"]) <= 0.01
        and abs(ours["mean_member"] - theirs["mean_member"]) <= 0.01
    )
