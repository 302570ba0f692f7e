"""Evaluations as a table of metrics, intervals and differences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hybridrl.console.safe_text import sanitize_line

_SIGNIFICANT_P_VALUE = 0.05
"""A difference that chance alone makes so rarely is marked."""
_WIDTH = 120


def build_evaluation_table(sets: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """Build a table with a line for each metric of each set: value, 95% interval, and the
    difference from the baseline if there is one.

    Args:
        sets: As in `evaluations.json`.
    """
    compared = any(
        "difference" in one for each in sets.values() for one in each["metrics"].values()
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("set")
    table.add_column("metric")
    for heading in ("prompts", "value", "95%"):
        table.add_column(heading, justify="right")
    if compared:
        for heading in ("baseline", "difference", "p"):
            table.add_column(heading, justify="right")
    for name, each in sets.items():
        for row, (metric, one) in enumerate(each["metrics"].items()):
            cells = [
                sanitize_line(name, 30) if not row else "",
                sanitize_line(metric, 40),
                *_format_value_cells(one),
            ]
            table.add_row(
                *cells, *(_format_difference_cells(one.get("difference")) if compared else ())
            )
    return table


def render_plain_table(table: Table) -> str:
    """Render the table as plain lines."""
    console = Console(width=_WIDTH, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(table)
    lines = (line.rstrip() for line in captured.get().splitlines())
    return "\n".join(line for line in lines if line)


def _format_value_cells(one: Mapping[str, Any]) -> list[str]:
    low, high = one.get("low"), one.get("high")
    interval = "" if low is None else f"{_format_number(low)} to {_format_number(high)}"
    return [str(one.get("prompts", "")), _format_number(one.get("value")), interval]


def _format_difference_cells(one: Mapping[str, Any] | None) -> list[str]:
    if one is None:
        return ["", "", ""]
    p, value = one.get("p"), one.get("value")
    if p is None or math.isnan(p):
        mark, shown = "", "-"
    else:
        mark = " *" if p < _SIGNIFICANT_P_VALUE else ""
        shown = "<0.001" if p < 0.001 else f"{p:.3f}"
    return [_format_number(one.get("baseline")), _format_number(value, sign=True) + mark, shown]


def _format_number(value: float | None, sign: bool = False) -> str:
    """Format a number with three decimals if it is small, none if it is large."""
    if value is None or math.isnan(value):
        return "-"
    digits = 3 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:{'+' if sign else ''}.{digits}f}"
