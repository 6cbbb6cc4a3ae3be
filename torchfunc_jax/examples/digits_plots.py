"""A page of plots of an ensemble's report: losses, metrics by size, calibration, strange inputs,
devices, the least sure digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

OURS, THEIRS, INK, FAINT, RIGHT, WRONG = (
    "#1f6fb2",
    "#e07b39",
    "#222222",
    "#c9ced6",
    "#2f8f5b",
    "#c0392b",
)
COLORS = {"torchfunc_jax": OURS, "torch.func": THEIRS}
SIZES = {"accuracy": "Accuracy", "nll": "NLL", "ece": "ECE"}


def page(report: dict[str, Any]) -> Figure:
    """All plots on one page.

    Args:
        report: the result of `torchfunc_jax.examples.digits.report`.

    Returns:
        matplotlib.figure.Figure: to show or to save.
    """
    figure = Figure(
        figsize=(15, 13.5),
        dpi=110,
        facecolor="white",
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.14),
    )
    rows = figure.add_gridspec(3, 1, height_ratios=[1, 1.05, 1.05])
    top = rows[0].subgridspec(1, 4, width_ratios=[1.9, 1, 1, 1])
    losses(figure.add_subplot(top[0]), report)
    for i, (name, title) in enumerate(SIZES.items(), 1):
        by_size(figure.add_subplot(top[i]), report, name, title)
    speeds = "throughput" in report
    middle = rows[1].subgridspec(
        1, 3 if speeds else 2, width_ratios=[1, 1.45, 0.7] if speeds else [1, 1.6]
    )
    calibration(figure, middle[0], report)
    strange(figure, middle[1], report)
    if speeds:
        throughput(figure.add_subplot(middle[2]), report)
    least_sure(figure, rows[2], report)
    settings, vote = report["settings"], report["systems"]["torchfunc_jax"]["test_accuracy"]["vote"]
    figure.suptitle(
        f"{settings['members']} CNNs on handwritten digits: the vote is right on {vote:.1%} of "
        f"{report['test_images']} test digits",
        fontsize=17,
        fontweight="bold",
        color=INK,
    )
    return figure


def losses(axes: Axes, report: dict[str, Any]) -> None:
    """The loss of every member at every step, smoothed, under each system; the second system is
    dashed.
    """
    for name, system in report["systems"].items():
        values = np.array(system["losses"])  # [members, steps]
        if not values.size:
            continue
        width = max(1, min(15, values.shape[1] // 10))
        smooth = np.stack(
            [np.convolve(member, np.ones(width) / width, "valid") for member in values]
        )
        steps = report["resumed_at"] + np.arange(smooth.shape[1]) + (width + 1) / 2
        dashed: dict[str, Any] = {} if name == "torchfunc_jax" else {"linestyle": (0, (4, 4))}
        axes.plot(steps, smooth.T, color=COLORS[name], linewidth=0.7, alpha=0.35, **dashed)
        axes.plot(
            steps,
            smooth.mean(0),
            color=COLORS[name],
            linewidth=2.4,
            label=f"{name}, mean member",
            **dashed,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    _title(axes, "Loss of every member", "thin: one member")
    if axes.lines:
        axes.legend(frameon=False, loc="upper right")
    _bare(axes)


def by_size(axes: Axes, report: dict[str, Any], name: str, title: str) -> None:
    """A metric of the mean probability of 1, 2, ... members: the mean over draws of members, and
    the band of most of them.
    """
    curve = report["by_size"]
    sizes, values = curve["members"], curve[name]
    axes.fill_between(sizes, values["low"], values["high"], color=OURS, alpha=0.15, linewidth=0)
    axes.plot(sizes, values["mean"], "o-", color=OURS, markersize=4, linewidth=1.8)
    one, all_ = (
        f"{values['mean'][i]:.3f}" if name == "nll" else f"{values['mean'][i]:.1%}" for i in (0, -1)
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([s for s in sizes if s & (s - 1) == 0] or sizes)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.08, y=0.16)
    if name != "nll":
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("members in the mean")
    _title(axes, title, f"{one} to {all_}")
    _bare(axes)


def calibration(figure: Figure, where: SubplotSpec, report: dict[str, Any]) -> None:
    """The accuracy of the vote against its confidence,
    and the number of digits at each confidence.
    """
    parts = where.subgridspec(2, 1, height_ratios=[3, 1.1], hspace=0.02)
    axes = figure.add_subplot(parts[0])
    counts = figure.add_subplot(parts[1], sharex=axes)
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1.5, zorder=0)
    axes.text(
        0.3,
        0.33,
        "as sure as right",
        color="#9aa1ab",
        rotation=38,
        rotation_mode="anchor",
        fontsize=8,
    )
    markers = {"torchfunc_jax": ("o", 8, OURS), "torch.func": ("o", 13, "none")}
    for name, system in report["systems"].items():
        table = system["calibration"]
        points = [
            (c, a)
            for c, a in zip(table["confidence"], table["accuracy"], strict=True)
            if c is not None
        ]
        marker, size, face = markers[name]
        axes.plot(
            *zip(*points, strict=True),
            marker,
            markersize=size,
            markerfacecolor=face,
            markeredgecolor=COLORS[name],
            markeredgewidth=1.5,
            label=f"{name}: error {table['error']:.1%}",
        )
    ours = report["systems"]["torchfunc_jax"]["calibration"]
    n = len(ours["count"])
    counts.bar((np.arange(n) + 0.5) / n, ours["count"], width=0.85 / n, color=OURS, alpha=0.8)
    for i, count in enumerate(ours["count"]):
        if count:
            counts.text((i + 0.5) / n, count * 1.25, str(count), ha="center", fontsize=7, color=INK)
    counts.set_yscale("log")
    counts.yaxis.set_major_formatter("{x:g}")
    counts.tick_params(which="minor", left=False)
    counts.set_ylim(0.5, 4 * max(ours["count"]))
    counts.set_xlabel("confidence")
    counts.set_ylabel("digits")
    axes.set(xlim=(0, 1.03), ylim=(-0.06, 1.06), ylabel="part that is right")
    axes.tick_params(labelbottom=False)
    _title(axes, "Calibration", "of the mean probability")
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    _bare(axes)
    _bare(counts)


def strange(figure: Figure, where: SubplotSpec, report: dict[str, Any]) -> None:
    """A few letters, the entropy of digits and of letters, and how well each score tells them
    apart.
    """
    found = report["out_of_distribution"]
    parts = where.subgridspec(3, 2, height_ratios=[0.02, 1, 2.6], width_ratios=[1.5, 1])
    heading = figure.add_subplot(parts[0, :])
    heading.axis("off")
    _title(heading, "Letters, which no member has seen", "digits 2, 3, 4 and 7, turned")
    pictures = parts[1, 0].subgridspec(1, 4)
    for i, letter in enumerate(found["examples"][:4]):
        image = figure.add_subplot(pictures[i])
        image.imshow(letter["pixels"], cmap="gray_r", vmin=0, vmax=1)
        image.set(xticks=[], yticks=[])
        image.set_xlabel(f"{letter['letter']}, read as {letter['vote']}", fontsize=8, color=INK)
        image.spines[:].set_color(FAINT)
    axes = figure.add_subplot(parts[2, 0])
    score = found["scores"]["entropy"]
    edges = np.linspace(0, max(*score["digits"], *score["letters"]), 16).tolist()
    for name, color, text in (("digits", OURS, "test digits"), ("letters", THEIRS, "letters")):
        share = np.full(len(score[name]), 1 / len(score[name]))
        axes.hist(
            score[name],
            edges,
            weights=share,
            color=color,
            alpha=0.6,
            label=f"{len(score[name])} {text}",
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="entropy of the mean probability (nats)", ylabel="part of the images")
    axes.legend(frameon=False, loc="best", fontsize=8)
    _bare(axes)
    told = figure.add_subplot(parts[1:, 1])
    rows = [
        ("entropy of\none member", found["mean_member"]),
        *((name.replace("l i", "l\ni"), s) for name, s in found["scores"].items()),
    ]
    told.barh(
        range(len(rows)),
        [s["auroc"] for _, s in rows],
        color=[FAINT] + [OURS] * (len(rows) - 1),
        alpha=0.4,
        height=0.62,
    )
    for i, (_, s) in enumerate(rows):
        told.text(
            0.515,
            i,
            f"{s['auroc']:.3f}   FPR95 {s['fpr95']:.0%}",
            va="center",
            fontsize=8,
            color=INK,
        )
    told.set(xlim=(0.5, 1), ylim=(len(rows) - 0.5, -0.5), xlabel="AUROC, letters against digits")
    told.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    told.tick_params(axis="y", length=0)
    _bare(told)


def throughput(axes: Axes, report: dict[str, Any]) -> None:
    """Members trained per second on 1, 2, 4, ... devices,
    and the FLOPs of each device's program.
    """
    rows = report["throughput"]
    x = np.arange(len(rows))
    axes.bar(x, [row["members_per_second"] for row in rows], width=0.6, color=OURS, alpha=0.8)
    axes.set_xticks(x, [str(row["devices"]) for row in rows])
    axes.set(xlabel="devices that share the members", ylabel="members per second")
    for i, row in enumerate(rows):
        work = (
            f"\n{row['flops_per_device'] / 1e6:,.0f} MFLOP\neach" if row["flops_per_device"] else ""
        )
        text = f"{row['members_per_second']:,.0f}{work}"
        axes.annotate(
            text,
            (i, row["members_per_second"]),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=INK,
        )
    axes.margins(y=0.2)
    _title(axes, "Members per second", f"{report['machine']['cores']} cores")
    _bare(axes)


def least_sure(figure: Figure, where: SubplotSpec, report: dict[str, Any]) -> None:
    """The twelve test digits on which the vote is least sure,
    with its probability for each digit.
    """
    parts = where.subgridspec(2, 1, height_ratios=[0.02, 1], hspace=0.0)
    heading = figure.add_subplot(parts[0])
    heading.axis("off")
    _title(
        heading,
        "The digits that the ensemble is least sure of",
        "bars: members that vote for each digit; green: the right one",
    )
    rows = parts[1].subgridspec(2, 6)
    for k, digit in enumerate(report["least_sure"]):
        cell = rows[k // 6, k % 6].subgridspec(1, 2, width_ratios=[1.25, 1], wspace=0.02)
        image = figure.add_subplot(cell[0])
        image.imshow(digit["pixels"], cmap="gray_r", vmin=0, vmax=1)
        image.set(xticks=[], yticks=[])
        vote = digit["vote"]
        right = vote == digit["label"]
        image.set_title(
            f"is {digit['label']}, vote {vote}",
            fontsize=9,
            color=RIGHT if right else WRONG,
            fontweight="bold",
        )
        image.set_xlabel(f"{max(digit['probability']):.0%} sure", fontsize=8, color=INK)
        for spine in image.spines.values():
            spine.set_color(FAINT)
        votes = figure.add_subplot(cell[1])
        colors = [
            RIGHT if i == digit["label"] else WRONG if i == vote else "#8892a0" for i in range(10)
        ]
        votes.barh(range(10), digit["votes"], color=colors, height=0.75)
        votes.set(
            xlim=(0, report["settings"]["members"]), yticks=range(10), xticks=[], ylim=(9.6, -0.6)
        )
        votes.tick_params(axis="y", labelsize=7, length=0, pad=1)
        _bare(votes, bottom=False)


def _title(axes: Axes, title: str, note: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.set_title(note, loc="right", fontsize=8, color="#6b7280")


def _bare(axes: Axes, bottom: bool = True) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.spines["bottom"].set_visible(bottom)
    axes.tick_params(colors="#4b5563")
