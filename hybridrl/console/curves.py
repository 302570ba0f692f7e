"""Draws the run's curves from its metrics file, as one picture of four panels."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.console.phase_colors import PHASE_COLOURS, PHASES
from hybridrl.run_files.metric_reader import read_metrics, series
from hybridrl.run_files.summary import GAINS
from hybridrl.system.storage import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REWARD, _ACCURACY, _LENGTH, _ENTROPY, _KL = "#4c8ed9", "#e0653f", "#45ada0", "#7b61b8", "#c08a1e"
_GREY = "#5c5c66"
_COLUMNS_AT_MOST = 80
_SMOOTH_FROM = 30  # with fewer steps than this the raw line is readable by itself


def draw_curves(metrics_file: Path, out: Path, accuracy: str = GAINS["accuracy"]) -> None:
    """Draws reward, length, entropy and step time over the steps, 1200 x 800 pixels, PNG.

    Works with any number of lines, none included; a metric never measured leaves its panel with a
    note. Steps below zero are drawn as the warm-up.

    Args:
        accuracy: what the metric `accuracy` is, see `accuracy_name`.

    Raises:
        StorageError: `out` cannot be written.
    """
    # Not pyplot: it keeps figures and a back end for the whole process, which is the user's.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = read_metrics(metrics_file)
    with rc_context({"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False}):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.03)
        figure = Figure(figsize=(12, 8), dpi=100, layout=layout, facecolor="white")
        panels = figure.subplots(2, 2)
        _draw_reward(panels[0, 0], rows, accuracy)
        _draw_length(panels[0, 1], rows)
        _draw_policy(panels[1, 0], rows)
        _draw_times(panels[1, 1], rows)
        for panel in panels.flat:
            _finish(panel, rows[0]["step"] if rows else 0, rows[-1]["step"] if rows else 0)
        with replacing(out) as part:
            figure.savefig(part, format="png")


def _draw_reward(panel: Axes, rows: list[dict[str, Any]], accuracy: str) -> None:
    if (
        rows
        and not any("reward/mean" in row for row in rows)
        and any("policy/loss" in r for r in rows)
    ):
        _draw_loss(panel, rows)
        return
    panel.set_title(f"Reward and {accuracy}")
    _line(panel, rows, "reward/mean", _REWARD, "reward, mean of the step")
    _line(panel, rows, "cost/mean", _KL, "cost, mean of the step")
    steps, values = series(rows, "accuracy")
    if steps:
        size = 5 if len(steps) <= 40 else 0
        panel.plot(
            steps,
            values,
            "o-",
            color=_ACCURACY,
            markersize=size,
            label=f"{accuracy}, evaluation",
        )
    panel.set_ylabel("reward, accuracy" if accuracy == GAINS["accuracy"] else "reward, share")
    if rows and rows[0]["step"] < 0:
        panel.fill_between([], [], color="#e4e4ea", label="warm-up")


def _draw_loss(panel: Axes, rows: list[dict[str, Any]]) -> None:
    """Of a run that generates nothing."""
    panel.set_title("Loss")
    _line(panel, rows, "policy/loss", _REWARD, "loss of the step")
    for key, label in (("eval/loss", "held-out loss"), ("eval/pair_accuracy", "pair accuracy")):
        steps, values = series(rows, key)
        if steps:
            panel.plot(steps, values, "o-", color=_ACCURACY, markersize=5, label=label)
    panel.set_ylabel("loss, accuracy")


def _draw_length(panel: Axes, rows: list[dict[str, Any]]) -> None:
    panel.set_title("Response length")
    _line(panel, rows, "response/length_mean", _LENGTH, "mean of the step")
    panel.set_ylabel("tokens")


def _draw_policy(panel: Axes, rows: list[dict[str, Any]]) -> None:
    panel.set_title("Entropy and KL")
    _line(panel, rows, "policy/entropy", _ENTROPY, "entropy")
    panel.set_ylabel("entropy (nats per token)")
    if series(rows, "policy/kl")[0]:
        right = panel.twinx()  # KL is often a thousandth of the entropy
        right.spines["right"].set_visible(True)
        _line(right, rows, "policy/kl", _KL, "")
        right.set_ylabel("KL (nats per token)")
        right.yaxis.set_major_formatter("{x:.3g}")
        right.locator_params(axis="y", nbins=6)
        panel.plot([], [], color=_KL, linewidth=2.0, label="KL to the reference (right axis)")


def _draw_times(panel: Axes, rows: list[dict[str, Any]]) -> None:
    panel.set_title("Time of a step")
    panel.set_ylabel("seconds")
    timed = [row for row in rows if any(f"time/{phase}" in row for phase in PHASES)]
    if not timed:
        return
    # More columns than this are a blur, so each then shows the mean of a stretch of steps.
    count = min(_COLUMNS_AT_MOST, len(timed))
    cuts = [index * len(timed) // count for index in range(count + 1)]
    stretches = [timed[first:end] for first, end in pairwise(cuts)]
    starts = [stretch[0]["step"] for stretch in stretches]
    edges = [start - 0.5 for start in starts] + [timed[-1]["step"] + 0.5]
    bottom = [0.0] * count
    for phase in PHASES:
        heights = [_mean([row.get(f"time/{phase}", 0.0) for row in part]) for part in stretches]
        top = [low + height for low, height in zip(bottom, heights, strict=True)]
        panel.stairs(
            top, edges, baseline=bottom, fill=True, color=PHASE_COLOURS[phase], label=phase
        )
        bottom = top
    panel.set_ylim(0, 1.05 * max(bottom) or 1.0)


def _line(panel: Axes, rows: list[dict[str, Any]], key: str, colour: str, label: str) -> None:
    """The metric; of a long run pale, with its running mean on top."""
    steps, values = series(rows, key)
    if not steps:
        return
    marker = "o" if len(steps) == 1 else None
    if len(steps) < _SMOOTH_FROM:
        panel.plot(steps, values, color=colour, linewidth=1.8, marker=marker, label=label)
        return
    panel.plot(steps, values, color=colour, linewidth=1.0, alpha=0.3)
    panel.plot(steps, _running_mean(values), color=colour, linewidth=2.0, label=label)


def _running_mean(values: list[float]) -> list[float]:
    """Centred, so that it does not lag, over about a twelfth of the run; one-sided at the ends."""
    reach = max(2, len(values) // 24)
    sums = [0.0, *accumulate(values)]
    means = []
    for index in range(len(values)):
        first, end = max(0, index - reach), min(len(values), index + reach + 1)
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _finish(panel: Axes, first: int, last: int) -> None:
    """The same step axis for every panel, a grid, and the legend above the panel, off the data."""
    from matplotlib.ticker import MaxNLocator

    title = panel.get_title()
    panel.set_title("")
    panel.set_title(title, loc="left", pad=28, fontweight="bold", fontsize=12.5)
    panel.set_xlabel("step")
    panel.set_axisbelow(True)
    if not panel.get_legend_handles_labels()[0]:
        panel.set_xticks([])
        panel.set_yticks([])
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", color=_GREY)
        return
    panel.set_xlim(
        first - max(0.6, 0.015 * (last - first)), last + max(0.6, 0.015 * (last - first))
    )
    panel.xaxis.set_major_locator(
        MaxNLocator(integer=True, nbins=8, min_n_ticks=1, steps=[1, 2, 5, 10])
    )
    panel.grid(True, color="#e6e6ea", linewidth=0.8)
    if first < 0:
        panel.axvspan(first, 0, color="#f1f1f4", zorder=0)
    legend = panel.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.995),
        ncols=6,
        frameon=False,
        fontsize=9.5,
        handlelength=1.3,
        columnspacing=1.3,
    )
    legend.set_in_layout(False)  # a wide legend would make its panel narrow
