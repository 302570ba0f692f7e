"""The steps of a trainer: their calls are made, waited for, and what they gave is written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hybridrl.batch.call_record import Record
from hybridrl.console.run_view import StepView
from hybridrl.controller import BatchRef, Handle
from hybridrl.errors import ConfigError
from hybridrl.run.sample_recorder import KeptSamples
from hybridrl.run.step_metrics import step_metrics
from hybridrl.run.watchers.watcher import FinishedStep
from hybridrl.run_files.recorded_steps import KEEPING, RecordedStep, RecordedSteps
from hybridrl.run_files.summary import RunSummary
from hybridrl.trainers.trainer import StepResult

if TYPE_CHECKING:
    from hybridrl.job.job import Job
    from hybridrl.trainers.trainer import Trainer

CLOCKS_EVERY = 50
"""Steps between two comparisons of the clocks of hosts."""


class PendingStep(NamedTuple):
    """A step whose calls are made."""

    number: int
    begin: float
    result: StepResult
    called_in: int
    groups: range

    def drawn(self) -> dict[int, str]:
        """Return the calls that made samples, by number, and how their figures' names begin."""
        result = self.result
        named = [
            *result.other_samples.items(),
            *(("", batch) for batch in (*result.scored_samples, result.batch)),
        ]
        return {number: name for name, batch in named for number in batch.calls}


class Steps:
    """Those of a run that goes on without a break.

    Args:
        job: The job, its groups built.
        trainer: Its driver program.
        view: Where they are shown.
        summary: Of the run; kept up to date.

    Attributes:
        evaluated: Figures to be shown with the next step.
        ended: When the last one ended, of `time.perf_counter`.
    """

    def __init__(self, job: Job, trainer: Trainer, view: StepView, summary: RunSummary) -> None:
        self.job, self.trainer, self.view, self.summary = job, trainer, view, summary
        self.evaluated: Mapping[str, float] = {}
        self._samples = KeptSamples(job, view)
        self.ended = self._began = time.perf_counter()
        self._ahead: dict[int, float] | None = None

    def begin(self, number: int) -> PendingStep:
        """Make the calls of a step."""
        begin, first = time.perf_counter(), self.job.feed.numbered
        result = _result_of(self.trainer)
        called_in = self.job.executor.end_step()
        return PendingStep(number, begin, result, called_in, range(first, self.job.feed.numbered))

    def finish(
        self,
        step: PendingStep,
        updates: Sequence[Mapping[str, float]],
        further: Mapping[str, float],
    ) -> FinishedStep:
        """Compute the metrics of a step whose updates are done.

        Args:
            further: Other metrics to write with them.
        """
        job, checked, result = self.job, self.job.checked, step.result
        self._began = max(step.begin, self.ended)  # before that, an earlier step was under way
        self.ended = time.perf_counter()
        records = job.executor.take_records(step.called_in)
        for record in records:
            record.metrics = checked.figures(record.metrics, f"`{record.role}.{record.method}`")
        metrics = step_metrics(records, updates, self.ended - self._began, step.drawn())
        for scored in result.scored_samples or [result.batch]:
            metrics |= job.feed.learn_scores(scored)
        job.feed.forget_groups(step.groups.stop)
        who = f"`{type(self.trainer).__qualname__}.step`"
        metrics |= checked.figures(result.metrics, who) | further
        return FinishedStep(step.number, result, records, updates, metrics, step.groups)

    def wait(self, step: PendingStep) -> list[Mapping[str, float]]:
        """Return the metrics of the updates of a step."""
        handles = step.result.updates
        updates = [handle.get() for handle in handles]
        if wrong := [update for update in updates if not isinstance(update, Mapping)]:
            raise ConfigError(
                f"{type(self.trainer).__qualname__}.step gave the handle of a call that returns a "
                f"{type(wrong[0]).__name__}: give those of updates, which are dictionaries of "
                "metrics."
            )
        return [
            self.job.checked.figures(update, f"`{handle.name}`")
            for update, handle in zip(updates, handles, strict=True)
        ]

    def write(self, step: FinishedStep) -> None:
        """Write and show what came of a step, and what it has to say to the user."""
        job, metrics, batch = self.job, step.metrics, step.result.batch
        self.summary.record_first_step(job.started)
        self.summary.record_step(step.number, metrics)
        with job.beside.doing(KEEPING):
            job.write(step.number, metrics)
            self.view.step(step.number, self.evaluated | metrics)
            self.evaluated = {}
            if self.trainer.DATA == "prompts" and len(batch):
                self._samples.keep(step.number, batch, metrics)
        self._record(step.number, step.records)
        for notice in (*step.result.notices, *choices_of(step.records)):
            self.view.message(f"step {step.number}: {notice}")

    def _record(self, step: int, records: Sequence[Record]) -> None:
        """Writes when each part of this step was, by the clocks that were compared last."""
        if step % CLOCKS_EVERY == 1 or self._ahead is None:
            self._ahead = self.job.executor.clocks_ahead()
        epoch = time.time() - time.perf_counter()
        times = epoch + self._began, epoch + self.ended
        recorded = RecordedStep(step, *times, records, self._ahead, *self.job.beside.take())
        RecordedSteps(self.job.directory.path).write(recorded)


def choices_of(records: Sequence[Record]) -> list[str]:
    """What roles decided by measuring. Ranks that share parameters decide alike; those of other
    stages of a pipeline for themselves, and the first that says something is told."""
    found: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda record: record.rank):
        if record.choices:
            found.setdefault(record.role, record.choices)
    return [f"{role}: {choice}" for role, choices in found.items() for choice in choices]


def _result_of(trainer: Trainer) -> StepResult:
    """Have a trainer make the calls of a step, which has to give its samples and its updates."""
    match trainer.step():
        case StepResult(BatchRef(), [*handles]) as result if all(
            isinstance(handle, Handle) for handle in handles
        ):
            return result
        case (BatchRef() as batch, [*handles]) if all(isinstance(h, Handle) for h in handles):
            return StepResult(batch, handles)
        case other:
            raise ConfigError(
                f"{type(trainer).__qualname__}.step gave a {type(other).__name__}: it must return "
                "a StepResult, or `batch, [handle, ...]`, the samples that it learned from and a "
                "handle on the metrics of each update."
            )
