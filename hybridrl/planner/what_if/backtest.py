"""Comparisons of predictions with runs that were made.

Of each run what its plan says of a step, and what a replay of its own record does. Of each pair of
runs that differ in settings or in their number of devices, what a question to the one says of the
other. The errors are kept, and every later answer comes with what they were.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from hybridrl.config.presets import flatten_settings
from hybridrl.errors import ConfigError
from hybridrl.planner.machine.measurements import (
    PREDICTIONS,
    begin_measurement,
    find_measurement,
    keep_measurement,
)
from hybridrl.planner.step.graph_replay import replay_graph
from hybridrl.planner.what_if.questions import WhatIfQuestion, predict_step
from hybridrl.planner.what_if.recorded_run import RecordedRun
from hybridrl.planner.what_if.replanning import planned_times

PLAN_PREDICTION, REPLAY_PREDICTION, WHAT_IF_PREDICTION = "plan", "replay", "whatif"
_MAX_ERRORS = 500
"""Errors that are kept, the newest."""
_NO_TIME = (
    *("run.", "observe.", "metrics", "checkpoint.", "recover.", "ray.", "trainer.steps"),
    *("eval.", "warmup.", "resume", "fork", "controller.", "guard.", "num_devices"),
)
"""Settings that a step's time does not depend on, or that are looked at in another way."""


class BacktestResult(NamedTuple):
    """A prediction with the measurement that it is compared with.

    Attributes:
        kind: `PLAN_PREDICTION`, `REPLAY_PREDICTION` or `WHAT_IF_PREDICTION`.
        what: For people.
        predicted, measured: Seconds of a step.
        source: Which measurement a plan rests on; empty: the record is enough.
    """

    kind: str
    what: str
    predicted: float
    measured: float
    source: str = ""

    @property
    def error(self) -> float:
        """Return the signed error of the prediction as a share of the measurement."""
        return self.predicted / self.measured - 1


def backtest_runs(runs: Sequence[RecordedRun]) -> list[BacktestResult]:
    """Compare plans, replays and what-ifs of these runs with their measured steps; questions that
    cannot be asked are left out."""
    found = []
    runs = list({run.folder.resolve(): run for run in runs}.values())
    for run in runs:
        name = run.folder.name
        plan = planned_times(run)
        found.append(BacktestResult(PLAN_PREDICTION, name, plan.step, run.seconds, plan.source))
        again = replay_graph(run.graph).makespan / run.held
        found.append(BacktestResult(REPLAY_PREDICTION, name, again, run.seconds))
    for run in runs:
        for other in runs:
            question = None if run is other else _find_question(run, other)
            if question is None:
                continue
            with contextlib.suppress(ConfigError):  # it cannot be asked, as of other placements
                said = predict_step(run, question).seconds
                what = f"{run.folder.name} -> {other.folder.name}"
                found.append(BacktestResult(WHAT_IF_PREDICTION, what, said, other.seconds))
    return found


def _find_question(run: RecordedRun, other: RecordedRun) -> WhatIfQuestion | None:
    """Return the what-if that turns one run into the other; None if they differ in more than
    settings and devices, or not at all."""
    if run.config.algorithm != other.config.algorithm:
        return None
    was, now = (dict(flatten_settings(asdict(one.config))) for one in (run, other))
    changes = [
        (key, value)
        for key, value in now.items()
        if value != was.get(key) and not key.startswith(_NO_TIME)
    ]
    devices = len(other.cluster.devices)
    if any(key.startswith(("placement", "model.", "data", "environment")) for key, _ in changes):
        return None
    if not changes and devices == len(run.cluster.devices):
        return None  # how far two runs of the same are apart is no error of a prediction
    return WhatIfQuestion(changes, devices if devices != len(run.cluster.devices) else None)


def save_errors(found: Sequence[BacktestResult]) -> None:
    """Save the errors of what-ifs, for `median_error`."""
    errors = _kept() | {
        one.what: round(one.error, 4) for one in found if one.kind == WHAT_IF_PREDICTION
    }
    measurement = begin_measurement(PREDICTIONS, {})
    keep_measurement(replace(measurement, data=dict(list(errors.items())[-_MAX_ERRORS:])))


def median_error() -> float | None:
    """Return the median absolute error of earlier what-ifs, as a share; None if none has been
    compared."""
    errors = _kept().values()
    return statistics.median(map(abs, errors)) if errors else None


def _kept() -> dict[str, float]:
    """Load the saved errors by question; asking a question again replaces its error."""
    kept = find_measurement(PREDICTIONS, {}, oldest_s=math.inf)
    return {} if kept is None else dict(kept.data)
