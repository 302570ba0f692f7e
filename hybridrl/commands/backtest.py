"""`hybridrl plan --backtest RUN ...`: how accurate predictions for recorded runs would have
been."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from hybridrl.commands.output import print_for_people, print_json
from hybridrl.planner.what_if.recorded_run import RecordedRun

if TYPE_CHECKING:
    from hybridrl.planner.what_if.backtest import BacktestResult


def run(chosen: argparse.Namespace) -> int:
    """Compare predictions with measurements, store the errors, and print both.

    Raises:
        ConfigError: if a folder is that of no run, or of one that recorded no step.
    """
    runs = [RecordedRun.at(Path(folder)) for folder in chosen.backtest]
    # It brings torch, which takes seconds; a wrong folder is refused without it.
    from hybridrl.planner.what_if.backtest import backtest_runs, save_errors
    from hybridrl.systems.operator_costs.cost_source import offer_costs

    offer_costs()
    found = backtest_runs(runs)
    save_errors(found)
    if chosen.json:
        return print_json([one._asdict() | {"error": one.error} for one in found])
    return print_for_people(_build_backtest_table(found), "", *_summarize_errors(found))


def _build_backtest_table(found: list[BacktestResult]) -> Table:
    table = Table(title="seconds of a step", title_justify="left", box=None)
    for column in ("", "", "predicted", "measured", "off by"):
        table.add_column(column, justify="right" if table.columns[1:] else "left")
    for one in found:
        numbers = (f"{one.predicted:.4g}", f"{one.measured:.4g}", f"{one.error:+.1%}")
        table.add_row(one.kind, one.what, *numbers)
    return table


def _summarize_errors(found: list[BacktestResult]) -> list[str]:
    from hybridrl.planner.what_if.backtest import (
        PLAN_PREDICTION,
        REPLAY_PREDICTION,
        WHAT_IF_PREDICTION,
    )

    lines = []
    for kind in (PLAN_PREDICTION, REPLAY_PREDICTION, WHAT_IF_PREDICTION):
        if errors := [abs(one.error) for one in found if one.kind == kind]:
            lines.append(
                f"{kind}: off by {statistics.median(errors):.1%} in the median of {len(errors)}, "
                f"{max(errors):.1%} at worst"
            )
    lines += [
        f"plans are by {source}"
        for source in dict.fromkeys(one.source for one in found if one.source)
    ]
    return lines
