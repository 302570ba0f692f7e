"""The steps of a driver program: their calls are made, waited for, and what they gave is kept."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.batch.call_record import Record
from hybridrl.console.run_view import StepView
from hybridrl.controller import BatchRef, Handle
from hybridrl.errors import ConfigError, TrainingError
from hybridrl.run.sample_recorder import KeptSamples
from hybridrl.run.step_metrics import step_metrics
from hybridrl.run.watchers.generator_mismatch import check_generator
from hybridrl.run.watchers.nan_guard import Guard
from hybridrl.run.watchers.slow_devices import SlowDevices
from hybridrl.run.watchers.tripwires import Tripwires
from hybridrl.run.watchers.unscored_samples import Unscored
from hybridrl.run_files.beside_steps import KEEPING
from hybridrl.run_files.recorded_steps import RecordedStep, RecordedSteps

if TYPE_CHECKING:
    from hybridrl.job.job import Job
    from hybridrl.trainers.trainer import Trainer

CLOCKS_EVERY = 50
"""Steps between two comparisons of the clocks of hosts."""
GAINS = {"reward": "reward/mean", "cost": "cost/mean"}
"""What the summary keeps of the first and the last step, and the metrics that it is taken from."""


class Step(NamedTuple):
    """A step whose calls are made."""

    number: int
    begin: float
    batch: BatchRef
    handles: list[Handle]
    called_in: int
    figures: dict[str, float]
    notices: list[str]
    scored: list[BatchRef]
    beside: dict[str, BatchRef]
    groups: range

    def drawn(self) -> dict[int, str]:
        """Return the calls that made samples, by number, and how their figures' names begin."""
        named = [*self.beside.items(), *(("", batch) for batch in (*self.scored, self.batch))]
        return {number: name for name, batch in named for number in batch.calls}


class Steps:
    """Those of a run that goes on without a break.

    Args:
        job: The job, its groups built.
        trainer: Its driver program.
        guard: Told of every step.
        view: Where they are shown.
        summary: Of the run; kept up to date.

    Attributes:
        evaluated: Figures to be shown with the next step.
        unscored: Told of everything that is scored.
        tripwires: Told of every step and of every evaluation.
        ended: When the last one ended, of `time.perf_counter`.
    """

    def __init__(
        self, job: Job, trainer: Trainer, guard: Guard, view: StepView, summary: dict[str, Any]
    ) -> None:
        self.job, self.trainer, self.guard, self.view = job, trainer, guard, view
        self.summary = summary
        self.evaluated: Mapping[str, float] = {}
        self.unscored = Unscored()
        held_out = job.held_out
        self.tripwires = Tripwires(job.config, 0 if held_out is None else len(held_out))
        self._samples = KeptSamples(job, view)
        self._compared = False
        self.ended = time.perf_counter()
        self._ahead: dict[int, float] | None = None
        places = {role: place.devices for role, place in job.placement.roles.items()}
        self._devices = SlowDevices(places, job.executor.cluster.devices)

    def begin(self, number: int) -> Step:
        """Makes the calls of a step."""
        begin = time.perf_counter()
        trainer, first = self.trainer, self.job.feed.numbered
        batch, handles = _step_of(trainer)
        notices, trainer.notices = trainer.notices, []
        scored, trainer.scored = trainer.scored or [batch], []
        beside, trainer.beside = trainer.beside, {}
        figures, trainer.figures = trainer.figures, {}
        return Step(
            number,
            begin,
            batch,
            handles,
            self.job.executor.end_step(),
            figures,
            notices,
            scored,
            beside,
            range(first, self.job.feed.numbered),
        )

    def wait(self, step: Step) -> list[Mapping[str, float]]:
        """The figures that the updates of a step returned."""
        updates = [handle.get() for handle in step.handles]
        if wrong := [update for update in updates if not isinstance(update, Mapping)]:
            raise ConfigError(
                f"{type(self.trainer).__qualname__}.step gave the handle of a call that returns a "
                f"{type(wrong[0]).__name__}: give those of updates, which are dictionaries of "
                "metrics."
            )
        names = [f"`{handle.name}`" for handle in step.handles]
        return list(map(self.job.checked.figures, updates, names))

    def end(
        self,
        step: Step,
        updates: Sequence[Mapping[str, float]],
        further: Mapping[str, float],
    ) -> None:
        """Keeps what came of a step, and of further figures.

        Raises:
            TrainingError, Rewind: see `Guard.act`.
            TrainingError: if the generator is not the model that is trained, or for `trip`.
            RewardError: if none of its samples could be scored.
        """
        begin = max(step.begin, self.ended)  # before that, an earlier step was under way
        self.ended = time.perf_counter()
        records = self.job.executor.take_records(step.called_in)
        for record in records:
            who = f"`{record.role}.{record.method}`"
            record.metrics = self.job.checked.figures(record.metrics, who)
        of_sources: dict[str, float] = {}
        for scored in step.scored:
            of_sources |= self.job.feed.learn_scores(scored)
        self.job.feed.forget_groups(step.groups.stop)
        metrics = step_metrics(records, updates, self.ended - begin, step.drawn()) | of_sources
        who = f"`{type(self.trainer).__qualname__}.figures`"
        metrics |= self.job.checked.figures(step.figures, who) | further
        figures, slow = self._devices.look(records)
        metrics |= figures
        bad = self.guard.look(step.number, records, updates, metrics)
        metrics["guard/skipped"] = float(bad.skipped if bad else 0)
        tripped = self.tripwires.look(step.number, metrics)
        if self.tripwires.window:
            metrics["guard/tripwires"] = float(self.tripwires.tripped)
        note_first_step(self.job, self.summary)
        for notice in [*step.notices, *slow]:
            self.view.message(f"step {step.number}: {notice}")
        for choice in choices_of(records):
            self.view.message(f"step {step.number}: {choice}")
        with self.job.beside.doing(KEEPING):
            self._keep(step.number, metrics, step.batch)
        self._record(step.number, begin, records)
        for notice in self.unscored.look(f"step {step.number}", records):
            self.view.message(notice)
        if bad is not None:
            self.guard.act(bad, step.batch, step.groups, metrics)
        if not self._compared and "mismatch/k3" in metrics:
            check_generator(self.job.config, metrics)
            self._compared = True
        self.trip(tripped)

    def trip(self, said: Sequence[str]) -> None:
        """Tells of what a tripwire has found, if it has.

        Raises:
            TrainingError: if the run is to end for it.
        """
        for notice in said:
            if self.job.config.guard.on_tripwire == "stop":
                raise TrainingError(f"{notice} The run ends, as guard.on_tripwire=stop says.")
            self.view.message(notice)

    def _keep(self, step: int, metrics: dict[str, float], batch: BatchRef) -> None:
        self.summary["steps"] = step
        self.summary["tokens_generated"] += int(
            sum(value for name, value in metrics.items() if name.endswith("response/tokens"))
        )
        self.summary["seconds_train"] += metrics["time/step"]
        for name, metric in GAINS.items():
            if metric in metrics:
                note(self.summary, name, metrics[metric])
        self.job.write(step, metrics)
        self.view.step(step, self.evaluated | metrics)
        self.evaluated = {}
        if self.trainer.DATA == "prompts" and len(batch):
            self._samples.keep(step, batch, metrics)

    def _record(self, step: int, begin: float, records: list[Record]) -> None:
        """Writes when each part of this step was, by the clocks that were compared last."""
        if step % CLOCKS_EVERY == 1 or self._ahead is None:
            self._ahead = self.job.executor.clocks_ahead()
        epoch = time.time() - time.perf_counter()
        times = epoch + begin, epoch + self.ended
        recorded = RecordedStep(step, *times, records, self._ahead, *self.job.beside.take())
        RecordedSteps(self.job.directory.path).write(recorded)


def note(summary: dict[str, Any], name: str, value: float) -> None:
    """Keeps the first and the last value of a figure; of NaN, that it is not known."""
    known = None if math.isnan(value) else value
    if summary.get(f"{name}_first") is None:
        summary[f"{name}_first"] = known
    summary[f"{name}_last"] = known


def note_first_step(job: Job, summary: dict[str, Any]) -> None:
    """The time to the first optimizer step, when that is done; later calls do nothing."""
    summary.setdefault("seconds_to_first_step", time.time() - job.started)


def choices_of(records: Sequence[Record]) -> list[str]:
    """What roles decided by measuring. Ranks that share parameters decide alike; those of other
    stages of a pipeline for themselves, and the first that says something is told."""
    found: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda record: record.rank):
        if record.choices:
            found.setdefault(record.role, record.choices)
    return [f"{role}: {choice}" for role, choices in found.items() for choice in choices]


def _step_of(trainer: Trainer) -> tuple[BatchRef, list[Handle]]:
    """One step of a program, which has to give its samples and its updates."""
    match trainer.step():
        case (BatchRef() as batch, [*handles]) if all(isinstance(h, Handle) for h in handles):
            return batch, handles
        case other:
            raise ConfigError(
                f"{type(trainer).__qualname__}.step gave a {type(other).__name__}: it must return "
                "`batch, [handle, ...]`, the samples that it learned from and a handle on the "
                "metrics of each update."
            )
