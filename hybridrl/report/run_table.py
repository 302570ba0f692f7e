"""The table of the runs in a folder, one row a run, for comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.changed import read_setting
from hybridrl.config.presets import algorithm_of
from hybridrl.report.live_report import CachedPart, read_file_stamps
from hybridrl.report.metric_curves import thin_curve
from hybridrl.report.report_content import find_last_step
from hybridrl.run_files.evaluation_log import find_latest_by_set
from hybridrl.run_files.metric_reader import extract_series
from hybridrl.run_files.run_paths import EVALUATIONS, METRICS, STATUS
from hybridrl.run_files.run_reader import RunReader, list_runs

_MAX_RUNS = 300
"""The newest; a folder with more is better cleaned up."""
_SPARKLINE_POINTS = 40
_FILES = (METRICS, STATUS, EVALUATIONS)
_COLUMN_METRICS = {
    "reward": "reward/mean",
    "accuracy": "accuracy",
    "length": "response/length_mean",
    "seconds": "time/step",
    "speed": "throughput/tokens_per_second",
}
"""Columns of the table, and the metrics that are their newest values."""


class RunTable:
    """A table of the runs in a folder that may gain and lose runs.

    Args:
        folder: Runs may come and go in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[Path, RunReader] = {}
        self._lines: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self.part = CachedPart(self._table, self._stamp)

    def named(self, name: str) -> RunReader | None:
        """Return the run with this name, or None."""
        found = next((one for one in list_runs(self.folder) if one.name == name), None)
        return None if found is None else RunReader(found)

    def _stamp(self) -> list[Any]:
        return [
            (one.name, *read_file_stamps([one], _FILES))
            for one in list_runs(self.folder)[:_MAX_RUNS]
        ]

    def _table(self) -> dict[str, Any]:
        found = list_runs(self.folder)
        note = f"The newest {_MAX_RUNS} of {len(found)} runs." if len(found) > _MAX_RUNS else ""
        lines = []
        for path in found[:_MAX_RUNS]:
            with contextlib.suppress(PermissionError):  # somebody else's
                lines.append(self._line(path))
        return {"folder": str(self.folder), "runs": lines, "note": note}

    def _line(self, path: Path) -> dict[str, Any]:
        """Return the row of a run; only files that changed are read again."""
        stamp = read_file_stamps([path], _FILES)
        known = self._lines.get(path)
        if known is None or known[0] != stamp:
            known = self._lines[path] = (
                stamp,
                _build_row(self._readers.setdefault(path, RunReader(path))),
            )
        return known[1]


def _build_row(run: RunReader) -> dict[str, Any]:
    rows, settings = run.rows(), run.settings()
    _, rewards = thin_curve(*extract_series(rows, _COLUMN_METRICS["reward"]), _SPARKLINE_POINTS)
    return {
        "name": run.name,
        "status": run.status(),
        "step": find_last_step(rows),
        "steps": read_setting(settings, "trainer.steps"),
        "algorithm": algorithm_of(settings),
        "rewards": rewards,
        "evaluations": _newest_evaluation_values(find_latest_by_set(run.evaluations())),
        **{
            column: next((row[metric] for row in reversed(rows) if metric in row), None)
            for column, metric in _COLUMN_METRICS.items()
        },
    }


def _newest_evaluation_values(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of the newest evaluation of each set, by `<set>/<metric>`."""
    return {
        f"{name}/{metric}": figure.get("value")
        for name, one in sets.items()
        for metric, figure in (one.get("metrics") or {}).items()
    }
