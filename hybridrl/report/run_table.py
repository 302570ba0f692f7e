"""The table of the runs in a folder, one row a run, for comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.presets import algorithm_of
from hybridrl.report.live_report import Part, stamps
from hybridrl.report.metric_curves import thin
from hybridrl.run_files.evaluation_log import newest_of_sets
from hybridrl.run_files.metric_reader import series
from hybridrl.run_files.run_reader import RunReader, runs_in

MOST_RUNS = 300
"""The newest; a folder with more is better cleaned up."""
SPARK_POINTS = 40
_FILES = ("metrics.jsonl", "status.json", "evaluations.json")
FIGURES = {
    "reward": "reward/mean",
    "accuracy": "accuracy",
    "length": "response/length_mean",
    "seconds": "time/step",
    "speed": "throughput/tokens_per_second",
}
"""Columns of the table, and the metrics that are their newest values."""


class Runs:
    """A table of the runs in a folder that may gain and lose runs.

    Args:
        folder: Runs may come and go in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[Path, RunReader] = {}
        self._lines: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self.part = Part(self._table, self._stamp)

    def named(self, name: str) -> RunReader | None:
        """Return the run with this name, or None."""
        found = next((one for one in runs_in(self.folder) if one.name == name), None)
        return None if found is None else RunReader(found)

    def _stamp(self) -> list[Any]:
        return [(one.name, *stamps([one], _FILES)) for one in runs_in(self.folder)[:MOST_RUNS]]

    def _table(self) -> dict[str, Any]:
        found = runs_in(self.folder)
        note = f"The newest {MOST_RUNS} of {len(found)} runs." if len(found) > MOST_RUNS else ""
        lines = []
        for path in found[:MOST_RUNS]:
            with contextlib.suppress(PermissionError):  # somebody else's
                lines.append(self._line(path))
        return {"folder": str(self.folder), "runs": lines, "note": note}

    def _line(self, path: Path) -> dict[str, Any]:
        """Return the row of a run; only files that changed are read again."""
        stamp = list(stamps([path], _FILES))
        known = self._lines.get(path)
        if known is None or known[0] != stamp:
            known = self._lines[path] = (
                stamp,
                _line(self._readers.setdefault(path, RunReader(path))),
            )
        return known[1]


def _line(run: RunReader) -> dict[str, Any]:
    rows, settings = run.rows(), run.settings()
    trainer = settings.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    trained = [row["step"] for row in rows if "time/step" in row]
    _, rewards = thin(*series(rows, FIGURES["reward"]), SPARK_POINTS)
    return {
        "name": run.name,
        "status": run.status(),
        "step": trained[-1] if trained else 0,
        "steps": trainer.get("steps"),
        "algorithm": algorithm_of(settings),
        "rewards": rewards,
        "evaluations": _values(newest_of_sets(run.evaluations())),
        **{column: newest(rows, metric) for column, metric in FIGURES.items()},
    }


def newest(rows: list[dict[str, Any]], metric: str) -> float | None:
    """Return the value of the last row that has the metric."""
    return next((row[metric] for row in reversed(rows) if metric in row), None)


def _values(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of the newest evaluation of each set, by `<set>/<metric>`."""
    return {
        f"{name}/{metric}": figure.get("value")
        for name, one in sets.items()
        for metric, figure in (one.get("metrics") or {}).items()
    }
