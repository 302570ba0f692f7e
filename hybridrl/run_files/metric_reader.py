"""Reads `metrics.jsonl` back, as one row per step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_REMEMBERED = 64
"""Bytes by which it is known again what was read before."""


class GrowingMetrics:
    """The rows of a file that may still be written, of which each look reads what is new.

    Args:
        file: `metrics.jsonl`; it need not be there yet.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._forget()

    def rows(self) -> list[dict[str, Any]]:
        """As `read_metrics`."""
        try:
            with self._file.open("rb") as lines:
                lines.seek(max(0, self._read - len(self._end)))
                if lines.read(len(self._end)) != self._end:  # a resumed run cut it and went on
                    self._forget()
                    lines.seek(0)
                for line in lines:
                    self._merge(line)
                    if not line.endswith(b"\n"):  # to be read again when it is whole
                        break
                    self._read += len(line)
                    self._end = (self._end + line)[-_REMEMBERED:]
        except (FileNotFoundError, IsADirectoryError):
            self._forget()
        return [self._rows[step] for step in sorted(self._rows)]

    def _forget(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}
        self._read, self._end = 0, b""

    def _merge(self, line: bytes) -> None:
        row = _parsed(line.decode(errors="replace"))
        if row is None:
            return
        step = row["step"]
        if "reward/mean" in row and self._rows and step <= max(self._rows):
            self._rows = {earlier: kept for earlier, kept in self._rows.items() if earlier <= step}
        self._rows.setdefault(step, {}).update(row)


def read_metrics(metrics_file: Path) -> list[dict[str, Any]]:
    """Rows in the order of their steps, each with `step` and the metrics that are numbers.

    Lines of one step are merged, the later winning. A training step that goes back in the count
    means that the run was resumed, so the steps after it, about to be made again, are dropped.
    A line that was cut short, by a kill or a full disk, is left out.
    """
    return GrowingMetrics(metrics_file).rows()


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
    found = {key: value for key, value in row.items() if _is_figure(value)}
    return found if "step" in found else None


def _is_figure(value: Any) -> bool:
    """Whether it is a number that a float can be: whole ones of JSON have no bound."""
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)
