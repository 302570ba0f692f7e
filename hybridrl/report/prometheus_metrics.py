"""Prometheus metrics of runs (text format 0.0.4)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.run_files.run_paths import METRICS
from hybridrl.run_files.run_status import read_run_status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METRIC_PREFIX = "hybridrl_"
_STEP_GAUGE, _AGE_GAUGE, _STATE_GAUGE = (
    f"{_METRIC_PREFIX}{name}" for name in ("step", "step_age_seconds", "run_state")
)


def render_prometheus_metrics(runs: Mapping[Path, Sequence[Mapping[str, Any]]]) -> str:
    """Render the newest metrics of several runs in Prometheus' text format.

    Args:
        runs: The rows of each run, by its folder, as `RunReader.rows` gives them.
    """
    samples: dict[str, list[str]] = {}
    meanings: dict[str, str] = {}
    for folder, rows in runs.items():
        for name, meaning, labels, value in _build_samples(folder, rows):
            if meanings.setdefault(name, meaning) == meaning:  # two may be written alike
                shown = ",".join(f'{key}="{_escape_label(one)}"' for key, one in labels.items())
                samples.setdefault(name, []).append(f"{name}{{{shown}}} {value!r}")
    lines = []
    for name, found in samples.items():
        help_text = meanings[name].replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge", *found]
    return "".join(f"{line}\n" for line in lines)


def _build_samples(
    folder: Path, rows: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str, dict[str, str], float]]:
    run = {"run": folder.name}
    state = read_run_status(folder)[0] or "unknown"
    yield _STATE_GAUGE, "1, with the state of the run as a label", {**run, "state": state}, 1
    if not rows:
        return
    yield _STEP_GAUGE, "the newest step", run, rows[-1]["step"]
    try:
        age = time.time() - (folder / METRICS).stat().st_mtime
    except OSError:
        return
    yield _AGE_GAUGE, "seconds since figures were last written", run, round(age, 1)
    newest: dict[str, float] = {}
    for row in rows:
        newest.update(row)
    for name in sorted(newest.keys() - {"step"}):
        gauge = _METRIC_PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        yield gauge, name, run, newest[name]


def _escape_label(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
