"""The loop around a driver program: warm-up, steps, evaluations, and what is kept of them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.controller import BatchRef, Handle
from hybridrl.core.record import Record
from hybridrl.observe.curves import draw_curves
from hybridrl.observe.step_view import StepView
from hybridrl.observe.storage import explain_write_errors
from hybridrl.observe.summary import accuracy_name
from hybridrl.observe.timeline import draw_timeline
from hybridrl.trainers.step_metrics import step_metrics
from hybridrl.trainers.warmup import warm_up

if TYPE_CHECKING:
    from hybridrl.job import Job

SAVE_SECONDS_AFTER_INTERRUPT = 6.0
"""After Ctrl-C: how long the workers may take to finish the call in hand and save the model."""
GAINS = {"reward": "reward/mean", "cost": "cost/mean"}
"""What the summary keeps of the first and the last step, and the metrics that it is taken from."""
KEPT = ("prompt", "answer", "response", "scores", "advantages", "finish_reason", "policy_version")


class _Step(NamedTuple):
    """A step whose calls are made."""

    number: int
    begin: float
    batch: BatchRef
    handles: list[Handle]
    chapter: int
    figures: dict[str, float]
    notices: list[str]


class Loop:
    """Runs a job's trainer for its steps, and leaves metrics, samples, model and summary.

    Args:
        job: The job, its groups built.
        view: Where progress is shown.
    """

    def __init__(self, job: Job, view: StepView) -> None:
        self.job = job
        self.view = view
        self.config = job.config
        self.trainer = job.make_trainer()
        self.evaluated: dict[str, float] = {}
        self._ended = 0.0
        self._last_records: list[Record] = []
        self.summary: dict[str, Any] = {"steps": 0, "tokens_generated": 0, "seconds_train": 0.0}

    def run(self) -> dict[str, Any]:
        """Trains. Ctrl-C saves what there is and raises KeyboardInterrupt again."""
        steps = self.config.trainer.steps if self.trainer.TRAINS else 0
        try:
            self._warm_up()
            self._evaluate(0)
            self._train(steps)
        except KeyboardInterrupt:
            self.view.message("Interrupted: saving the model.")
            self.summary["interrupted"] = True
            self._finish(limit=SAVE_SECONDS_AFTER_INTERRUPT)
            raise
        self._finish()
        return self.summary

    def _warm_up(self) -> None:
        steps = self.config.warmup.steps
        if not steps or self.job.examples is None or not self.trainer.TRAINS:
            return
        self.view.phase("supervised warm-up")
        begin = time.perf_counter()

        def progress(step: int, metrics: Mapping[str, float]) -> None:
            self._note_first_step()
            self.view.phase_progress(step, steps, f"loss {metrics['loss']:.3f}")

        warm_up(self.job, progress)
        self.job.publish()
        self.summary["seconds_warmup"] = time.perf_counter() - begin
        self.summary["seconds_train"] += self.summary["seconds_warmup"]
        self.job.executor.take_records()

    def _evaluate(self, step: int) -> None:
        if self.job.held_out is None:
            return
        self.view.phase("evaluating")
        self.job.publish()
        figures = self.trainer.evaluate(self.job.put(self.job.held_out))
        self.job.executor.take_records()
        for name, value in figures.items():
            self._note(name.removeprefix("eval/"), value)
        self.job.write(step, figures)
        self.evaluated = figures
        spoken = {"accuracy": accuracy_name(self.config.reward)}
        shown = [f"{spoken.get(name, name)} {value:.3f}" for name, value in figures.items()]
        self.view.message(f"step {step}: {', '.join(shown)}")

    def _train(self, steps: int) -> None:
        """Makes the calls of a step while up to `placement.staleness` earlier ones are under way:
        its samples may be generated while theirs are learned from."""
        under_way: deque[_Step] = deque()
        every = self.config.eval.every
        for number in range(1, steps + 1):
            under_way.append(self._begin(number))
            evaluates = number == steps or (every and number % every == 0)
            ahead = 0 if evaluates else self.config.placement.staleness
            while len(under_way) > ahead:
                self._end(under_way.popleft())
            if evaluates:
                self._evaluate(number)

    def _begin(self, number: int) -> _Step:
        begin = time.perf_counter()
        batch, handles = self.trainer.step()
        notices, self.trainer.notices = self.trainer.notices, []
        figures = dict(self.trainer.figures)
        return _Step(
            number, begin, batch, handles, self.job.executor.end_chapter(), figures, notices
        )

    def _end(self, step: _Step) -> None:
        updates = [handle.get() for handle in step.handles]
        begin = max(step.begin, self._ended)  # before that, an earlier step was under way
        self._ended = time.perf_counter()
        records = self.job.executor.take_records(step.chapter)
        metrics = step_metrics(records, updates, self._ended - begin) | step.figures
        self._note_first_step()
        for notice in step.notices:
            self.view.message(f"step {step.number}: {notice}")
        self._keep(step.number, metrics, step.batch)
        self._draw(step.number, records)

    def _keep(self, step: int, metrics: dict[str, float], batch: BatchRef) -> None:
        self.summary["steps"] = step
        self.summary["tokens_generated"] += int(metrics.get("response/tokens", 0))
        self.summary["seconds_train"] += metrics["time/step"]
        for name, metric in GAINS.items():
            if metric in metrics:
                self._note(name, metrics[metric])
        self.job.write(step, metrics)
        self.view.step(step, self.evaluated | metrics)
        self.evaluated = {}
        if self.trainer.DATA != "prompts":
            return
        observe = self.config.observe
        if observe.samples_every and (step == 1 or step % observe.samples_every == 0):
            rows = batch.collect(KEPT, partial=True)
            self.job.directory.write_samples(step, rows.table)
        if observe.show_every and (step == 1 or step % observe.show_every == 0):
            row = batch.take([0]).collect(KEPT, partial=True).to_pylist()[0]
            self.view.sample(row["prompt"], row["response"], row.get("scores", math.nan))

    def _draw(self, step: int, records: list[Record]) -> None:
        """The timeline of this step and the one before, which it may overlap."""
        shown, self._last_records = self._last_records + records, records
        every = self.config.observe.timeline_every
        if every and step % every == 0:
            folder = self.job.directory.path / "timelines"
            folder.mkdir(exist_ok=True)
            places = self.job.placement.roles.items()
            devices = {role: list(place.devices) for role, place in places}
            draw_timeline(shown, devices, folder / f"step-{step:06d}.png", f"steps to {step}")

    def _note(self, name: str, value: float) -> None:
        self.summary.setdefault(f"{name}_first", value)
        self.summary[f"{name}_last"] = value

    def _note_first_step(self) -> None:
        self.summary.setdefault("seconds_to_first_step", time.time() - self.job.started)

    def _finish(self, limit: float | None = None) -> None:
        """Saves the model, the curves and the summary."""
        self.view.phase("saving")
        directory = self.job.directory
        for role, name in self.trainer.SAVED.items():
            folder = directory.path / name
            with explain_write_errors(folder):
                saved = self.job.groups[role].save_model(str(folder.absolute()))
                if not saved.done_within(limit):
                    self.view.message(
                        f"The workers were busy for more than {limit:g} s; the {role} was not "
                        "saved."
                    )
        directory.write_summary(self.summary)
        accuracy = accuracy_name(self.config.reward)
        draw_curves(directory.metrics_file, directory.curves_file, accuracy)
