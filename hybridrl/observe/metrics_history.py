"""Reads `metrics.jsonl` back, as one row per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_metrics(metrics_file: Path) -> list[dict[str, Any]]:
    """Rows in the order of their steps, each with `step` and the metrics that are numbers.

    Lines of one step are merged, the later winning. A training step that goes back in the count
    means that the run was resumed, so the steps after it, about to be made again, are dropped.
    A line that was cut short, by a kill or a full disk, is left out.
    """
    rows: dict[int, dict[str, Any]] = {}
    if not metrics_file.exists():
        return []
    with metrics_file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row = _parsed(line)
            if row is None:
                continue
            step = row["step"]
            if "reward/mean" in row and rows and step <= max(rows):
                rows = {earlier: kept for earlier, kept in rows.items() if earlier <= step}
            rows.setdefault(step, {}).update(row)
    return [rows[step] for step in sorted(rows)]


def length_up_to(metrics_file: Path, step: int) -> int:
    """Bytes of the file before the first line that is of a later step, or that is no whole line."""
    length = 0
    with metrics_file.open("rb") as lines:
        for line in lines:
            row = _parsed(line.decode(errors="replace"))
            if row is None or row["step"] > step or not line.endswith(b"\n"):
                break
            length += len(line)
    return length


def series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was measured."""
    found = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {key: value for key, value in row.items() if isinstance(value, int | float)}
