"""Metric curves of a run, thinned to a bounded number of points that keeps the extremes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.run_files.metric_reader import extract_series

_MAX_POINTS = 1000
"""Of a series; of a longer one the least and the greatest value of each stretch are kept."""
_MAX_SECONDARY_POINTS = 200
"""Of a series that is not among the first ones that are looked at."""
_SIGNIFICANT_DIGITS = 5

CURVE_PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Reward", "", (("reward/mean", "reward"), ("cost/mean", "cost"))),
    (
        "Response length",
        "tokens",
        (("response/length_mean", "mean"), ("response/length_max", "longest")),
    ),
    ("Cut at the limit", "share", (("response/truncated", "share"),)),
    ("Entropy", "nats per token", (("policy/entropy", "entropy"),)),
    (
        "KL",
        "nats per token",
        (("policy/kl", "to the reference"), ("policy/approx_kl", "of the update")),
    ),
    ("Mismatch with the generator", "k3", (("mismatch/k3", "k3"),)),
    ("Clip fraction", "share", (("policy/clip_fraction", "share"),)),
    (
        "Gradient norm",
        "",
        (("policy/grad_norm", "policy"), ("critic/grad_norm", "critic")),
    ),
    ("Loss", "", (("policy/loss", "policy"), ("critic/loss", "critic"))),
    (
        "Learning rate search",
        "log10 of the rate",
        (("search/stage_log10_rate", "of the stage"), ("search/trial_log10_rate", "of trials")),
    ),
    ("Throughput", "tokens/s", (("throughput/tokens_per_second", "tokens/s"),)),
    ("Staleness", "updates", (("staleness/mean", "mean"), ("staleness/max", "most"))),
)
"""The curves that are shown first: title, unit, and the metrics with their labels."""
_PANEL_METRICS = {name for _, _, shown in CURVE_PANELS for name, _ in shown}


def build_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the curve of each metric, `{"x": steps, "y": values}`, and a note on points left
    out."""
    names = sorted({name for row in rows for name in row if name != "step"})
    found, thinned = {}, 0
    for name in names:
        is_first = (
            name in _PANEL_METRICS or name.startswith(("time/", "eval/")) or name == "accuracy"
        )
        steps, values = extract_series(rows, name)
        if not steps:
            continue
        x, y = thin_curve(steps, values, _MAX_POINTS if is_first else _MAX_SECONDARY_POINTS)
        thinned += len(x) < len(steps) and is_first
        found[name] = {"x": x, "y": [float(f"{value:.{_SIGNIFICANT_DIGITS}g}") for value in y]}
    note = f"Of long curves {_MAX_POINTS:,} points are drawn, extremes included." if thinned else ""
    return {"series": found, "steps": [row["step"] for row in rows][-1:], "note": note}


def thin_curve(
    steps: Sequence[int], values: Sequence[float], most: int
) -> tuple[list[int], list[float]]:
    """Thin a series to at most `most` points: the minimum and the maximum of each equal stretch."""
    if len(steps) <= most:
        return list(steps), list(values)
    stretches = most // 2
    kept: list[int] = []
    for part in range(stretches):
        first, end = part * len(steps) // stretches, (part + 1) * len(steps) // stretches
        inner = range(first, end)
        ends = {min(inner, key=values.__getitem__), max(inner, key=values.__getitem__)}
        kept += sorted(ends)
    return [steps[index] for index in kept], [values[index] for index in kept]
