"""Reading `metrics.jsonl`, as one row per step."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.system.bounded_files import lines_from, open_regular, parse_json, start_near_end

MOST_BYTES = 256 << 20
"""Of a longer file the newest lines are read."""
MOST_LINE_BYTES = 1 << 20
_REMEMBERED = 64
"""Bytes by which it is known again what was read before."""


class MetricReader:
    """A reader of a file that may still be written: each call reads only what was added.

    Args:
        file: `metrics.jsonl`; it need not be there yet.

    Attributes:
        fault: Why the file could not be read; else empty.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0
        self._end = b""
        self._forget()

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows so far in the order of steps, each with `step` and all metrics that are
        numbers.

        Lines of one step are merged, the later winning. A training step that goes back in the count
        means that the run was resumed, so the steps after it, about to be made again, are dropped.
        A line that was cut short, by a kill or a full disk, is left out.
        """
        self.fault = ""
        try:
            with open_regular(self._file) as lines:
                lines.seek(max(0, self._read - len(self._end)))
                if not self._read or lines.read(len(self._end)) != self._end:
                    self._forget()  # a resumed run cut it and went on
                    self._read = start_near_end(lines, MOST_BYTES)
                for line in lines_from(lines, MOST_LINE_BYTES):
                    self._merge(line)
                    if not line.endswith(b"\n"):  # to be read again when it is whole
                        break
                    self._read = lines.tell()
                    self._end = (self._end + line)[-_REMEMBERED:]
        except FileNotFoundError:
            self._forget()
        except OSError as error:
            self._forget()
            self.fault = str(error)
        return [self._rows[step] for step in sorted(self._rows)]

    def _forget(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}
        self._read = 0
        self._end = b""
        self._newest = -1

    def _merge(self, line: bytes) -> None:
        row = _parse_row(line)
        if row is None:
            return
        step = row["step"]
        if "reward/mean" in row and step <= self._newest:
            self._rows = {earlier: kept for earlier, kept in self._rows.items() if earlier <= step}
            self._newest = step
        self._newest = max(self._newest, step)
        self._rows.setdefault(step, {}).update(row)


def find_end_of_step(metrics_file: Path, step: int) -> int:
    """Return the bytes before the first line that belongs to a later step or is incomplete."""
    length = 0
    with open_regular(metrics_file) as lines:
        for line in lines_from(lines):
            row = _parse_row(line)
            if row is None or row["step"] > step or not line.endswith(b"\n"):
                break
            length = lines.tell()
    return length


def extract_series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric, where it was measured and is finite."""
    found = [(row["step"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))]
    return [step for step, _ in found], [value for _, value in found]


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    found = {key: value for key, value in row.items() if _is_float_value(value)}
    return found if "step" in found else None


def _is_float_value(value: Any) -> bool:
    """Return whether a value is a number that fits in a float; integers of JSON have no bound."""
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)
