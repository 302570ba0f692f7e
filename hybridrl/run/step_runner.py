"""The steps of a trainer: their calls are made, waited for, and what they gave is written."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridrl.algorithms import TokenSegments
from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import LIBRARY_PREFIXES, OUTCOMES, Batch
from hybridrl.batch.call_record import CallRecord
from hybridrl.console.run_view import RunView
from hybridrl.console.sample_table_text import ShownSample
from hybridrl.controller import BatchRef, Handle
from hybridrl.errors import ConfigError
from hybridrl.run.step_metrics import compute_step_metrics
from hybridrl.run.watchers.watcher import FinishedStep
from hybridrl.run_files.metric_writers import RunSummary
from hybridrl.run_files.recorded_steps import (
    DATA,
    DRIVER_RECORDING,
    RecordedStep,
    append_recorded_step,
)
from hybridrl.trainers.trainer import StepResult
from hybridrl.trainers.update_columns import SHAPED

if TYPE_CHECKING:
    from hybridrl.job.job import Job
    from hybridrl.trainers.trainer import Trainer


_CLOCK_COMPARISON_STEPS = 50
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


class StepRunner:
    """Runs and records the steps of one attempt of a run.

    Args:
        job: The job, its groups built.
        trainer: Its driver program.
        view: Where they are shown.
        summary: Of the run; kept up to date.

    Attributes:
        evaluated: Figures to be shown with the next step.
        ended: When the last one ended, of `time.perf_counter`.
    """

    def __init__(self, job: Job, trainer: Trainer, view: RunView, summary: RunSummary) -> None:
        self.job, self.trainer, self.view, self.summary = job, trainer, view, summary
        self.evaluated: Mapping[str, float] = {}
        self.ended = self._began = time.perf_counter()
        self._ahead: dict[int, float] | None = None

    def begin(self, number: int) -> PendingStep:
        """Make the calls of a step."""
        begin, first = time.perf_counter(), self.job.feed.numbered
        result = _result_of(self.trainer)
        if self.job.executor.is_busy:  # else nothing would go on meanwhile
            self.job.feed.prefetch()
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
        seconds, for_data = self.ended - self._began, job.beside.seconds(DATA)
        metrics = compute_step_metrics(records, updates, seconds, step.drawn())
        metrics |= {"time/data": for_data, "share/data": for_data / seconds}
        for scored in result.scored_samples or [result.batch]:
            metrics |= job.feed.learn_scores(scored)
        job.feed.forget_groups(step.groups.stop)
        who = f"`{type(self.trainer).__qualname__}.step`"
        metrics = {**metrics, **checked.figures(result.metrics, who), **further}
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
        with job.beside.doing(DRIVER_RECORDING):
            job.metrics.write(step.number, metrics)
            self.view.step(step.number, {**self.evaluated, **metrics})
            self.evaluated = {}
            if self.trainer.DATA == "prompts" and len(batch):
                record_samples(job, self.view, step.number, batch, metrics)
        self._record(step.number, step.records)
        for notice in (*step.result.notices, *list_measured_choices(step.records)):
            self.view.message(f"step {step.number}: {notice}")

    def _record(self, step: int, records: Sequence[CallRecord]) -> None:
        """Write the record of a step, with the times of all calls by the clock offsets measured
        last."""
        if step % _CLOCK_COMPARISON_STEPS == 1 or self._ahead is None:
            self._ahead = self.job.executor.clocks_ahead()
        epoch = time.time() - time.perf_counter()
        times = epoch + self._began, epoch + self.ended
        recorded = RecordedStep(step, *times, records, self._ahead, *self.job.beside.take())
        append_recorded_step(self.job.directory.path, recorded)


def list_measured_choices(records: Sequence[CallRecord]) -> list[str]:
    """Return what roles have chosen by measuring. Ranks that share parameters choose alike; those
    of other pipeline stages choose for themselves, and the first rank with a choice is reported."""
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


TEXTS = (
    *("group_id", "prompt", "answer", "response", "scores", OUTCOMES, SHAPED, "costs"),
    *("advantages", "finish_reason", "policy_version"),
    *("episode", "branch", "turns", "turn_rewards"),
)
TOKENS = (
    *("group_id", "prompt_ids", "response_ids", "response_mask", "scores", SHAPED, "advantages"),
    *("rollout_log_probs", "log_probs", "ref_log_probs", "values", "returns"),
    *("episode", "branch", "turn", "turn_rewards"),
)
SAMPLES_WITH_TOKENS = 64
"""Of a step: a table of all tokens would grow with the batch, and a person looks at a few."""


def record_samples(
    job: Job, view: RunView, step: int, batch: BatchRef, metrics: Mapping[str, float]
) -> None:
    """Write the samples of a step and show those of its first prompt, as often as
    `observe.samples_every` and `observe.show_every` say.

    Args:
        metrics: Of the step: they tell which columns rewards have.
    """
    observe = job.config.observe
    kept = (*TEXTS, *(name for name in metrics if name.startswith(LIBRARY_PREFIXES)))
    if observe.samples_every and (step == 1 or step % observe.samples_every == 0):
        some = batch.take(range(min(len(batch), SAMPLES_WITH_TOKENS)))
        tokens = some.collect(TOKENS, partial=True).table
        job.directory.write_samples(step, _with_texts(job, batch, kept).table, tokens)
    if observe.show_every and (step == 1 or step % observe.show_every == 0):
        most = min(len(batch), job.config.rollout.samples_per_prompt)
        rows = _with_texts(job, batch.take(range(most)), kept).to_pylist()
        first = rows[0].get("group_id")
        shown = [_completion(row) for row in rows if row.get("group_id") == first]
        view.samples(rows[0].get("prompt", ""), shown)


def _with_texts(job: Job, batch: BatchRef, kept: tuple[str, ...]) -> Batch:
    """Return the columns of these that exist, `tokens` and `advantage` of what was sampled, and the
    responses as texts, which a reward has made of them if the program asked one; of episodes of
    several rows, the last only."""
    rows = of_sampled(batch.collect((*kept, "response_mask"), partial=True))
    is_made = "response" in rows and "branch" not in rows
    if is_made or not batch.columns.may_have("response_ids"):
        return rows
    ids = batch.collect(["response_ids"])["response_ids"].rows()
    texts = job.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return rows.with_columns({"response": texts})


def of_sampled(rows: Batch) -> Batch:
    """Return the rows with the numbers of `tokens` that the model sampled and the mean `advantage`
    over those, in place of the mask. A dropped sample has no mask left, and counts whole."""
    if "response_mask" not in rows:
        return rows
    mask, bounds = rows.ragged("response_mask")
    segments = TokenSegments.from_cu_seqlens(bounds, mask.bool())
    sampled = segments.lengths
    found = {"tokens": torch.where(sampled > 0, sampled, bounds.diff())}
    if "advantages" in rows:
        given = rows["advantages"]  # of tokens, or one of each sample
        is_of_tokens = isinstance(given, RaggedColumn)
        # NaN where there are no tokens to learn from.
        found["advantage"] = segments.sum(given.values) / sampled if is_of_tokens else given
    kept = rows.select([name for name in rows.columns if name != "response_mask"])
    return kept.with_columns(found)


def _completion(row: Mapping[str, Any]) -> ShownSample:
    advantage = row.get("advantage")
    return ShownSample(
        row.get("response", ""),
        row.get("scores", math.nan),
        {
            name.partition("/")[2]: math.nan if value is None else value
            for name, value in row.items()
            if name.startswith(LIBRARY_PREFIXES)
        },
        None if advantage is None or math.isnan(advantage) else advantage,
    )
