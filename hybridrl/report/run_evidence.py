"""What the folder of a run says, read once for all that judge it. Whatever is missing is empty."""

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
from hybridrl.config.load import read_settings
from hybridrl.config.schema import Config
from hybridrl.errors import HybridRLError
from hybridrl.planner.what_if.recorded_run import RecordedRun
from hybridrl.report.device_spans import IDLE, DeviceSpan, idle_by_cause, spans_of
from hybridrl.run_files.metric_reader import series
from hybridrl.run_files.recorded_steps import CHECKPOINT, EVALUATION, KEEPING, RecordedStep
from hybridrl.run_files.run_paths import SAMPLES, SETTINGS
from hybridrl.run_files.run_reader import RunReader, read_table

NEWEST_STEPS = 20
"""So many steps say where time goes."""
NEWEST_SAMPLES = 3
"""So many tables of samples say what groups are like."""
MOST_OF_WINDOW = 10
FEW_STEPS = 40
"""Of fewer it is not known how much they resemble each other."""


SURE = ("value", "low", "high")
BESIDE = CHECKPOINT, EVALUATION, KEEPING


class Change(NamedTuple):
    """Means of a metric over the first and the last steps."""

    first: float
    last: float


class Group(NamedTuple):
    """Samples of a prompt: their scores, and their tokens where these are known."""

    scores: Sequence[float]
    lengths: Sequence[float]


@dataclass(frozen=True)
class Evidence:
    """That of a run.

    Attributes:
        run: Its files.
        last: So many of its newest steps say where time goes.
    """

    run: RunReader
    last: int = NEWEST_STEPS

    @cached_property
    def config(self) -> Config | None:
        """Its settings, if they can be read."""
        try:
            return read_settings(self.run.path / SETTINGS)
        except (HybridRLError, OSError):
            return None

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics of its training steps."""
        return [row for row in self.all_rows if "time/step" in row]

    @cached_property
    def all_rows(self) -> list[dict[str, Any]]:
        """Those of evaluations, too."""
        return self.run.rows()

    @cached_property
    def steps(self) -> int:
        """How many it has done."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def values(self, name: str) -> list[float]:
        """Those of a metric that are finite."""
        return [value for value in series(self.rows, name)[1] if math.isfinite(value)]

    def recent(self, name: str) -> float | None:
        """The mean of a metric over the last steps."""
        values = self.values(name)
        return statistics.fmean(values[-_window(values) :]) if values else None

    def change(self, name: str) -> Change | None:
        """None where there are less than two steps."""
        values = self.values(name)
        if len(values) < 2:
            return None
        window = _window(values)
        return Change(statistics.fmean(values[:window]), statistics.fmean(values[-window:]))

    def reward_doubt(self) -> float:
        """The standard error of a mean reward over a window: prompts are drawn anew in each step,
        samples of one prompt are alike."""
        if self.config is None or not (spread := self.values("reward/std")):
            return 0.0
        prompts = self.config.data.prompts_per_step
        return statistics.fmean(spread) / math.sqrt(max(1, prompts) * _window(spread))

    def scatter(self, name: str) -> float:
        """The standard error of a mean of a metric over a window, of steps that resemble each
        other; 0: not known."""
        values = np.asarray(self.values(name), np.float64)
        if len(values) < FEW_STEPS:
            return 0.0
        return math.sqrt(variance_of_sums(values) / _window(values))

    @cached_property
    def groups(self) -> list[Group]:
        """Those of the newest tables of samples, of two samples and more."""
        found: list[Group] = []
        for file in self.run.files(SAMPLES, "step-*.parquet")[-NEWEST_SAMPLES:]:
            try:
                table = read_table(file)
            except (OSError, ValueError):  # one that was cut short
                continue
            if {"group_id", "scores"} <= set(table.column_names):
                found += _groups(table)
        return found

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """See `evaluation_log`."""
        return self.run.evaluations()

    @cached_property
    def evaluated(self) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
        """Of each figure that was evaluated more than once and of which it is known how sure it is,
        its name, what it was at first and at last: `value`, `low`, `high`."""
        found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for entry in self.evaluations:
            for name, one in entry["sets"].items():
                for metric, figures in one.get("metrics", {}).items():
                    if all(isinstance(figures.get(k), int | float) for k in SURE):
                        found[f"{name}/{metric}"].append({"step": entry["step"], **figures})
        return [(name, each[0], each[-1]) for name, each in found.items() if len(each) > 1]

    @cached_property
    def replayed(self) -> RecordedRun | None:
        """Its newest steps, to be replayed."""
        try:
            return RecordedRun.at(self.run.path, self.last)
        except (HybridRLError, OSError, ValueError, KeyError):
            return None

    @cached_property
    def recorded(self) -> list[RecordedStep]:
        """See `read_steps`."""
        try:
            return self.run.steps()
        except (HybridRLError, OSError):
            return []

    @cached_property
    def spans(self) -> list[DeviceSpan]:
        """Those of its newest steps but the first, in which everything is done for the first
        time."""
        if not self.recorded:
            return []
        spans = spans_of(self.recorded, self.run.devices(), self.last)
        first = min(span.step for span in spans)
        return [span for span in spans if span.step > max(1, first)] or spans

    @cached_property
    def in_steps(self) -> list[DeviceSpan]:
        """Without what is between steps."""
        return [span for span in self.spans if span.cause not in BESIDE]

    @cached_property
    def beside(self) -> Mapping[str, float]:
        """The shares of the time that evaluations, checkpoints and keeping samples took."""
        whole = sum(span.seconds for span in self.spans) or 1.0
        found: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.cause in BESIDE:
                found[span.cause] += span.seconds / whole
        return found

    @cached_property
    def devices(self) -> list[int]:
        """Their numbers."""
        return sorted({span.device for span in self.spans})

    @cached_property
    def seconds(self) -> dict[int, float]:
        """By device, those that it had in steps."""
        found: dict[int, float] = defaultdict(float)
        for span in self.in_steps:
            found[span.device] += span.seconds
        return found

    @cached_property
    def work(self) -> Mapping[tuple[str, str], float]:
        """By role and phase, the share of devices' time in steps."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for span in self.in_steps:
            if span.phase != IDLE:
                share = span.seconds / self.seconds[span.device] / len(self.devices)
                found[span.role, span.phase] += share
        return found

    @cached_property
    def waits(self) -> Mapping[str, float]:
        """By cause, the share of devices' time in steps that they were idle."""
        found: dict[str, float] = defaultdict(float)
        for causes in self.idle.values():
            for cause, share in causes.items():
                found[cause] += share / len(self.idle)
        return found

    @cached_property
    def idle(self) -> Mapping[int, Mapping[str, float]]:
        """By device, the share of its time in steps that it was idle, by cause."""
        return idle_by_cause(self.in_steps)


def _window(values: Sequence[float]) -> int:
    return max(1, min(MOST_OF_WINDOW, len(values) // 3))


def _groups(table: Any) -> list[Group]:
    has_lengths = "tokens" in table.column_names
    lengths = table["tokens"].to_pylist() if has_lengths else [0.0] * table.num_rows
    found: dict[Any, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    columns = table["group_id"].to_pylist(), table["scores"].to_pylist(), lengths
    for group, score, length in zip(*columns, strict=True):
        if score is not None and math.isfinite(score):
            found[group][0].append(float(score))
            found[group][1].append(float(length))
    return [Group(*group) for group in found.values() if len(group[0]) > 1]
