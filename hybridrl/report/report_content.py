"""The parts of a run's report as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridrl import __version__
from hybridrl.checkpoint.store import list_checkpoints
from hybridrl.config.changed import read_setting
from hybridrl.config.presets import algorithm_of
from hybridrl.console.phase_colors import PHASE_COLORS, STEP_PHASES
from hybridrl.report.device_timeline import build_device_timeline
from hybridrl.report.html_page import render_report_page
from hybridrl.report.metric_curves import CURVE_PANELS, build_curves
from hybridrl.report.report_tables import (
    PlannedMemory,
    build_memory_table,
    differences,
    replan_memory,
)
from hybridrl.report.run_summary import words
from hybridrl.report.sample_browser import build_sample_browser
from hybridrl.run_files.evaluation_log import find_latest_by_set
from hybridrl.run_files.run_paths import REPORT
from hybridrl.run_files.run_reader import RunReader
from hybridrl.system.storage import replace_file

_MetricRows = Sequence[Mapping[str, Any]]
_TROUBLE_METRICS = {
    "policy/skipped_updates": "updates left out, their gradient was not finite",
    "critic/skipped_updates": "updates of the critic left out, their gradient was not finite",
    "cost_critic/skipped_updates": "updates of the cost critic left out, as those of the critic",
    "reward/failures": "samples whose reward function failed",
    "reward/timeouts": "samples whose reward function took too long",
    "reward/dropped": "samples without a reward, left out",
}
"""Metrics that are 0 in a healthy run."""


class ReportContent:
    """The data of a run's report, with other runs for comparison.

    Args:
        against: Runs that are compared with it.
    """

    def __init__(self, run: RunReader, against: Sequence[RunReader] = ()) -> None:
        self.run, self.against = run, list(against)
        self.parts: Mapping[str, Callable[[], Any]] = {
            "head": self.head,
            "words": lambda: words(self.run, self.against),
            "curves": self.curves,
            "timeline": lambda: build_device_timeline(self.run),
            "samples": lambda: build_sample_browser(self.run),
            "data": lambda: self.run.data_report(),
            "settings": self.settings,
            "state": self.state,
        }

    def data(self) -> dict[str, Any]:
        """Build all parts of the report, by name."""
        return {name: make() for name, make in self.parts.items()}

    def head(self) -> dict[str, Any]:
        """Build the header: which run this is, its state, its progress and its origin."""
        rows = self.run.rows()
        settings, summary = self.run.settings(), self.run.summary()
        return {
            "name": self.run.name,
            "folder": str(self.run.path),
            "against": [one.name for one in self.against],
            "status": self.run.status(),
            "step": find_last_step(rows),
            "steps": read_setting(settings, "trainer.steps"),
            "algorithm": algorithm_of(settings),
            "model": read_setting(settings, "model.path"),
            "tokens": summary.get("tokens_generated"),
            "seconds": sum(row["time/step"] for row in rows if "time/step" in row),
            "seed": summary.get("seed", read_setting(settings, "run.seed")),
            "command": summary.get("command"),
            "versions": summary.get("versions"),
            "commit": summary.get("git_commit"),
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "by": __version__,
        }

    def curves(self) -> dict[str, Any]:
        """Build the metric curves and evaluations of the run and of those beside it."""
        return {
            "panels": CURVE_PANELS,
            "phases": [[phase, PHASE_COLORS[phase]] for phase in STEP_PHASES],
            "runs": [
                {
                    "name": one.name,
                    **build_curves(one.rows()),
                    "evaluations": _build_evaluation_curves(one.evaluations()),
                }
                for one in (self.run, *self.against)
            ],
        }

    def settings(self) -> dict[str, Any]:
        """Build the settings part: differences from the defaults and from the other runs."""
        others = [one.settings() for one in self.against]
        return {
            "runs": [self.run.name, *(one.name for one in self.against)],
            "defaults": differences(self.run.settings()),
            "against": differences(self.run.settings(), others) if others else None,
            "text": self.run.settings_text(),
        }

    def state(self) -> dict[str, Any]:
        """Build the state part: memory, evaluations, checkpoints, and what went wrong."""
        rows = self.run.rows()
        checkpoints, checkpoints_at = list_checkpoints(self.run)
        return {
            "memory": build_memory_table(rows, self._planned),
            "evaluations": find_latest_by_set(self.run.evaluations()),
            "recoveries": self.run.recoveries(),
            "failed_episodes": self.run.failed_episodes(),
            "warnings": self.run.warnings(),
            "bad_steps": self.run.bad_steps(),
            "checkpoints": checkpoints,
            "checkpoints_at": checkpoints_at,
            "troubles": _count_troubles(rows),
        }

    @cached_property
    def _planned(self) -> PlannedMemory:
        return replan_memory(self.run)


def write_report(
    run: RunReader, against: Sequence[RunReader] = (), out: Path | None = None
) -> tuple[Path, int]:
    """Write the report of a run as a page, whole or not at all: a browser may be looking at an
    earlier one.

    Args:
        out: The file; None: that of the run's folder.

    Returns:
        The file and its bytes.

    Raises:
        StorageError: if it cannot be written; names `--out`.
    """
    out = out or run.path / REPORT
    text = render_report_page(run.name, ReportContent(run, against).data())
    with replace_file(out, "`--out`") as part:
        part.write_text(text, encoding="utf-8")
    return out, len(text.encode())


def _build_evaluation_curves(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Build a curve for each metric of each evaluation set, of points `[step, value, low,
    high]`."""
    found: dict[tuple[str, str], list[list[Any]]] = {}
    for entry in entries:
        for name, one in entry["sets"].items():
            for metric, figure in (one.get("metrics") or {}).items():
                point = [entry["step"], *(figure.get(each) for each in ("value", "low", "high"))]
                if point[1] is not None:
                    found.setdefault((name, metric), []).append(point)
    return [{"set": name, "metric": metric, "points": p} for (name, metric), p in found.items()]


def _count_troubles(rows: _MetricRows) -> list[dict[str, Any]]:
    """Sum the metrics that are 0 in a healthy run, over all steps."""
    found = []
    for name, what in _TROUBLE_METRICS.items():
        steps = [row for row in rows if row.get(name)]
        if steps:
            total = sum(row[name] for row in steps)
            found.append({"name": name, "what": what, "total": total, "steps": len(steps)})
    return found


def find_last_step(rows: _MetricRows) -> int:
    """Return the number of the last training step; 0 before the first."""
    return next((int(row["step"]) for row in reversed(rows) if "time/step" in row), 0)
