"""A run's folder as evidence for advice and summaries, each file read once. Missing files count as
empty."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hybridrl.batch.trends import variance_of_sums
from hybridrl.composition.load import load_run_config
from hybridrl.config.schema import Config
from hybridrl.errors import HybridRLError
from hybridrl.planner.what_if.recorded_run import RecordedRun
from hybridrl.report.device_spans import IDLE, DeviceSpan, build_device_spans, sum_idle_by_cause
from hybridrl.run_files.metric_reader import extract_series
from hybridrl.run_files.recorded_steps import (
    CHECKPOINT,
    DRIVER_EVALUATION,
    DRIVER_RECORDING,
    RecordedStep,
)
from hybridrl.run_files.run_paths import SAMPLES, SETTINGS
from hybridrl.run_files.run_reader import RunReader, read_table
from hybridrl.trainers import PROGRAM_NAMES, load_trainer

_NEWEST_STEPS = 20
"""So many steps say where time goes."""
_NEWEST_SAMPLE_FILES = 3
"""So many tables of samples say what groups are like."""
_MAX_WINDOW = 10
FEW_STEPS = 40
"""Of fewer it is not known how much they resemble each other."""


_INTERVAL_KEYS = ("value", "low", "high")
_BETWEEN_STEPS = CHECKPOINT, DRIVER_EVALUATION, DRIVER_RECORDING


class MetricChange(NamedTuple):
    """The means of a metric over the first and the last steps."""

    first: float
    last: float


class SampleGroup(NamedTuple):
    """The scores of a prompt's samples, and their token counts where known."""

    scores: Sequence[float]
    lengths: Sequence[float]


@dataclass(frozen=True)
class RunEvidence:
    """The evidence that a run's folder holds.

    Attributes:
        run: Its files.
        last: So many of its newest steps say where time goes.
    """

    run: RunReader
    last: int = _NEWEST_STEPS

    @cached_property
    def config(self) -> Config | None:
        """The run's settings; None if they cannot be read."""
        try:
            return load_run_config(self.run.path / SETTINGS)
        except (HybridRLError, OSError):
            return None

    @cached_property
    def program(self) -> Any:
        """The class of the run's driver program; None where the settings cannot be read, and for a
        program of the user's own, which a report does not run."""
        name = "" if self.config is None else self.config.trainer.name
        return load_trainer(name) if name in PROGRAM_NAMES else None

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The metric rows of training steps."""
        return [row for row in self.all_rows if "time/step" in row]

    @cached_property
    def all_rows(self) -> list[dict[str, Any]]:
        """The metric rows of training steps and of evaluations."""
        return self.run.rows()

    @cached_property
    def steps(self) -> int:
        """The number of the last training step; 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def values(self, name: str) -> list[float]:
        """Return the finite values of a metric, in the order of steps."""
        return extract_series(self.rows, name)[1]

    def recent(self, name: str) -> float | None:
        """Return the mean of a metric over the last window of steps; None if it was never
        measured."""
        values = self.values(name)
        return statistics.fmean(values[-_window_size(len(values)) :]) if values else None

    def change(self, name: str) -> MetricChange | None:
        """Return a metric's means over the first and last windows; None with fewer than two
        steps."""
        values = self.values(name)
        if len(values) < 2:
            return None
        window = _window_size(len(values))
        return MetricChange(statistics.fmean(values[:window]), statistics.fmean(values[-window:]))

    def reward_doubt(self) -> float:
        """Return the standard error of the mean reward over a window, which counts prompts: samples
        of one prompt are not independent."""
        if self.config is None or not (spread := self.values("reward/std")):
            return 0.0
        prompts = self.config.data.prompts_per_step
        return statistics.fmean(spread) / math.sqrt(max(1, prompts) * _window_size(len(spread)))

    def scatter(self, name: str) -> float:
        """The standard error of a mean of a metric over a window, of steps that resemble each
        other; 0: not known."""
        values = np.asarray(self.values(name), np.float64)
        if len(values) < FEW_STEPS:
            return 0.0
        return math.sqrt(variance_of_sums(values) / _window_size(len(values)))

    @cached_property
    def groups(self) -> list[SampleGroup]:
        """The groups with at least two samples in the newest sample files."""
        found: list[SampleGroup] = []
        for file in self.run.files(SAMPLES, "step-*.parquet")[-_NEWEST_SAMPLE_FILES:]:
            try:
                table = read_table(file)
            except (OSError, ValueError):  # one that was cut short
                continue
            if {"group_id", "scores"} <= set(table.column_names):
                found += _read_sample_groups(table)
        return found

    @cached_property
    def evaluated(self) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
        """The metrics with intervals that were evaluated more than once: name, first and last
        result, each with `value`, `low`, `high`."""
        found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for entry in self.run.evaluations():
            for name, one in entry["sets"].items():
                for metric, figures in one.get("metrics", {}).items():
                    if all(isinstance(figures.get(k), int | float) for k in _INTERVAL_KEYS):
                        found[f"{name}/{metric}"].append({"step": entry["step"], **figures})
        return [(name, each[0], each[-1]) for name, each in found.items() if len(each) > 1]

    @cached_property
    def replayed(self) -> RecordedRun | None:
        """The newest steps, to be replayed; None where they cannot be."""
        try:
            return RecordedRun.at(self.run.path, self.last)
        except (HybridRLError, OSError, ValueError, KeyError):
            return None

    @cached_property
    def recorded(self) -> list[RecordedStep]:
        """The recorded steps that `RunReader.steps` finds; empty if there are none."""
        try:
            return self.run.steps()
        except (HybridRLError, OSError):
            return []

    @cached_property
    def spans(self) -> list[DeviceSpan]:
        """The device spans of the newest steps, without the first step, which includes one-time
        work."""
        if not self.recorded:
            return []
        spans = build_device_spans(self.recorded, self.run.devices(), self.last)
        first = min(span.step for span in spans)
        return [span for span in spans if span.step > max(1, first)] or spans

    @cached_property
    def in_steps(self) -> list[DeviceSpan]:
        """The device spans inside steps, without evaluations, checkpoints and sample writing
        between them."""
        return [span for span in self.spans if span.cause not in _BETWEEN_STEPS]

    @cached_property
    def beside(self) -> Mapping[str, float]:
        """The shares of total time that evaluations, checkpoints and writing samples took, by
        cause."""
        whole = sum(span.seconds for span in self.spans) or 1.0
        found: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.cause in _BETWEEN_STEPS:
                found[span.cause] += span.seconds / whole
        return found

    @cached_property
    def devices(self) -> list[int]:
        """The device numbers that have spans."""
        return sorted({span.device for span in self.spans})

    @cached_property
    def seconds(self) -> dict[int, float]:
        """The seconds of each device inside steps."""
        found: dict[int, float] = defaultdict(float)
        for span in self.in_steps:
            found[span.device] += span.seconds
        return found

    @cached_property
    def work(self) -> Mapping[tuple[str, str], float]:
        """The share of device time inside steps, by role and phase."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for span in self.in_steps:
            if span.phase != IDLE:
                share = span.seconds / self.seconds[span.device] / len(self.devices)
                found[span.role, span.phase] += share
        return found

    @cached_property
    def waits(self) -> Mapping[str, float]:
        """The share of device time inside steps spent idle, by cause, averaged over devices."""
        found: dict[str, float] = defaultdict(float)
        for causes in self.idle.values():
            for cause, share in causes.items():
                found[cause] += share / len(self.idle)
        return found

    @cached_property
    def idle(self) -> Mapping[int, Mapping[str, float]]:
        """The share of its time inside steps that each device was idle, by cause."""
        return sum_idle_by_cause(self.in_steps)


def _window_size(steps: int) -> int:
    return max(1, min(_MAX_WINDOW, steps // 3))


def _read_sample_groups(table: Any) -> list[SampleGroup]:
    has_lengths = "tokens" in table.column_names
    lengths = table["tokens"].to_pylist() if has_lengths else [0.0] * table.num_rows
    found: dict[Any, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    columns = table["group_id"].to_pylist(), table["scores"].to_pylist(), lengths
    for group, score, length in zip(*columns, strict=True):
        if score is not None and math.isfinite(score):
            found[group][0].append(float(score))
            found[group][1].append(float(length))
    return [SampleGroup(*group) for group in found.values() if len(group[0]) > 1]
