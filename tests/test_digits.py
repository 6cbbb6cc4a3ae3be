"""The ensemble demo: its data, that both systems train the same networks, its report, its plots."""
from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from torchfunc_jax.ensemble import Ensemble
from torchfunc_jax.examples import digits_plots as plots
from torchfunc_jax.examples.digits import DigitNet, Settings, Training, batches, calibration, jitter, load_digits, report

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
    assert torch.equal(one.test_images, again.test_images) and not torch.equal(one.test_labels, other.test_labels)
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
    torch.testing.assert_close(jitter(images, torch.Generator(), degrees=0, shift=0, scale=0), images)


def test_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size: expected at most the 1437 training digits, got 2000"):
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
    assert read["speed_up"] is None and not read["interrupted"] and read["steps"] == 15  # too few steps to tell
    for one in read["systems"].values():
        assert one["first_step_s"] > 0 and one["step_ms"] > 0 and one["final_loss"] > 0
        assert np.array(one["losses"]).shape == (3, 15)
    for digit in read["least_sure"]:
        assert sum(digit["votes"]) == 3 and sum(digit["probability"]) == pytest.approx(1, abs=1e-4)


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
    titles = " ".join(axes.get_title(loc="left") for axes in figure.axes)
    assert "Loss of every member" in titles and "Calibration of the vote" in titles and "least sure" in titles
    assert len([axes for axes in figure.axes if axes.images]) == 12


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
    assert len(table["accuracy"]) == 10 and table["accuracy"][0] is None


@pytest.mark.slow
def test_the_whole_demo_keeps_its_promises() -> None:
    training = Training(Settings())
    training.run()
    result = report(training)
    ours, theirs = (result["systems"][name]["test_accuracy"] for name in ("torchfunc_jax", "torch.func"))
    assert result["difference"]["first_step"]["loss"] <= 1e-4
    assert ours["vote"] >= 0.97
    assert abs(ours["vote"] - theirs["vote"]) <= 0.01 and abs(ours["mean_member"] - theirs["mean_member"]) <= 0.01
