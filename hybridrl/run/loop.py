"""The loop of a run, and what becomes of one that is interrupted, loses workers, or goes back.

load the checkpoint to go on from  <---- Rewind, LostError, ReturnedDevices ----+
   |                                                                            |
only from the beginning: warm-up, evaluation 0, checkpoint 0                    |
   |                                                                            |
+-> start step n                its calls are made, and nothing is waited for:  |
|  |                            up to `placement.staleness` steps before it,    |
|  |                            and the writing of a checkpoint, are under way  |
|  finish step n - staleness    wait for its updates ------------> watchers ----+
|  |                                                                            |
|  evaluate, if sets are due    no step is under way ------------> watchers ----+
|  |                                                                            |
|  checkpoint, if one is due    workers copy, and write beside later steps      |
+--+                                                                            v
   +-> the end, or EndRun: sets that are due last, a checkpoint       other errors: the end
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.checkpoint.keep_rule import check_figure, metric_of
from hybridrl.checkpoint.resume import ResumePoint
from hybridrl.checkpoint.saver import CheckpointSaver
from hybridrl.checkpoint.warm_model import has_warmup
from hybridrl.config.model_schema import AUTO_SCHEDULE
from hybridrl.console.run_view import RunView
from hybridrl.errors import HybridRLError, LostError, PreemptionInterrupt
from hybridrl.evaluation.eval_sets import HELD_OUT_SET, evaluates_held_out
from hybridrl.run.evaluation_runner import EvaluationRunner
from hybridrl.run.recovery import RunRecovery
from hybridrl.run.run_end import RunEnd
from hybridrl.run.step_runner import PendingStep, StepRunner, list_measured_choices
from hybridrl.run.warmup import warm_up
from hybridrl.run.watchers.core_isolation import CoreIsolation
from hybridrl.run.watchers.evaluation_watchers import AccuracyDeclineWatcher, EarlyStopWatcher
from hybridrl.run.watchers.generator_check import GeneratorCheck
from hybridrl.run.watchers.nan_guard import NanGuard
from hybridrl.run.watchers.rate_search_watcher import RateSearchWatcher
from hybridrl.run.watchers.slow_devices import SlowDeviceWatcher
from hybridrl.run.watchers.tripwires import TripwireWatcher
from hybridrl.run.watchers.unscored_samples import UnscoredSamplesWatcher
from hybridrl.run.watchers.watcher import EndRun, FinishedEvaluation, RewindRequest, Watcher
from hybridrl.run_files.final_sentence import resolve_accuracy_name
from hybridrl.run_files.metric_writers import RunSummary
from hybridrl.run_files.recorded_steps import CHECKPOINT, DRIVER_EVALUATION

if TYPE_CHECKING:
    from hybridrl.job.job import Job


class ReturnedDevices(Exception):  # noqa: N818 (it is no error: the run goes on with them)
    """Devices that had been lost are there again."""


class RunLoop(RunEnd):
    """Runs the driver program of a job for its steps, and leaves metrics, samples, models and a
    summary.

    Args:
        job: The job, its groups built.
        view: Where progress is shown.

    Attributes:
        watchers: Asked after every step and evaluation, in this order: of what several raise, the
            first counts.
    """

    def __init__(self, job: Job, view: RunView) -> None:
        self.job, self.view, self.config = job, view, job.config
        self.summary = RunSummary()
        self._recoveries = RunRecovery(job.config, job.directory.path)
        self._guard = NanGuard(self.config.guard, job.directory)
        self._prompts = 0 if job.held_out is None else len(job.held_out)
        self._decline = AccuracyDeclineWatcher(job.config, self._prompts)
        self._preempted = self.interrupted = ""
        self.saved = 0
        self._begin_run()

    def _begin_run(self) -> None:
        """Make what there is of a run before its first step, also after a restart."""
        job = self.job
        job.executor.notify = self.view.message
        job.beside.take()  # of calls of before, whose numbers begin anew
        self.trainer = job.make_trainer()
        self.began = False  # until then there is nothing to save, but maybe a model to overwrite
        self._saved_figures: dict[str, float] = {}
        self.summary.begin()
        self.steps = StepRunner(job, self.trainer, self.view, self.summary)
        self.evaluations = EvaluationRunner(job, self.trainer, self.view)
        self._evaluates_held_out = job.held_out is not None and evaluates_held_out(
            job.config, self.trainer.TRAINS
        )
        places = {role: place.devices for role, place in job.placement.roles.items()}
        tripwires = TripwireWatcher(self.config, self._prompts)
        search: RateSearchWatcher | None = None
        if self.config.actor.optimizer.schedule == AUTO_SCHEDULE and self.trainer.TRAINS:
            search = RateSearchWatcher(job, self.trainer, self._guard)
        self._search = search
        self.watchers: list[Watcher] = [
            *([search] if search else []),
            UnscoredSamplesWatcher(self.trainer.TRAINS),
            self._guard,
            GeneratorCheck(self.config),
            SlowDeviceWatcher(places, job.executor.cluster.devices),
            *([tripwires] if tripwires.window else []),
            self._decline,
            EarlyStopWatcher(self.config.eval.stop, self.summary),
            *([CoreIsolation(job.executor)] if self.config.resources == "auto" else []),
        ]
        watches: dict[str, Watcher] = {
            "guard": self._guard,
            "tripwires": tripwires,
            **({"rate_search": search} if search else {}),
        }
        self.checkpoints = CheckpointSaver(job, self.trainer, self.summary, watches)

    def run(self) -> dict[str, Any]:
        """Train; go on from the newest checkpoint when workers are lost. Ctrl-C saves what there is
        and raises KeyboardInterrupt again; so does an error, if the workers are still there."""
        with self.ended_in_order():
            found = self.job.resumed
            while True:
                try:
                    done = self._resume(found)
                    if found.folder is None:
                        self._begin()
                    self._train(done, self.config.trainer.steps if self.trainer.TRAINS else 0)
                    self._tell(*self._ask("on_run_end"))
                    self.finish()
                    return self.summary
                except (LostError, ReturnedDevices) as lost:
                    found = self._restart(lost)
                except RewindRequest as rewind:
                    found = self._go_back(rewind)

    def _begin(self) -> None:
        """Do the work before the first step."""
        self._warm_up()
        figures, _ = self._evaluate(0, self._due_sets(0))
        named = {
            "checkpoint.best": self.config.checkpoint.best,
            "eval.stop.metric": self.config.eval.stop.metric,
        }
        for setting, figure in named.items():  # those of sets that were not due may come
            if figure is not None and self.evaluations.owner(metric_of(figure)) == HELD_OUT_SET:
                check_figure(setting, figure, figures)
        if self._guard.rewinds:
            self._checkpoint(0, {})

    def _train(self, done: int, steps: int) -> None:
        """Make the steps after those that are done."""
        pending: deque[PendingStep] = deque()
        if reason := self._tell(*self._ask("on_resume", done)) if done < steps else "":
            self._end_early(done, reason)
            return
        self.job.executor.step = done  # it numbers from 0 the step that is the first here
        for number in range(done + 1, steps + 1):
            self._raise_requested_end()
            pending.append(self.steps.begin(number))
            self.checkpoints.ask()  # behind the calls of the step
            sets = self._due_sets(number, number == steps)
            saves = self.checkpoints.is_due(number, steps)
            ahead = 0 if sets or saves else self.config.placement.staleness
            while len(pending) > (0 if self._preempted else ahead):
                self._end_step(pending.popleft())
            if self._search is not None and self._search.undone == number:
                sets = []  # what it learned is gone
            figures, reason = self._evaluate(number, sets)
            if reason and number < steps:  # sets that are to be evaluated at the end are, now
                last = self._due_sets(number, last=True, but=sets)
                figures |= self._evaluate(number, last)[0]
                sets, saves = sets + last, self.config.checkpoint.wanted
            best = bool(sets) and self._is_best(figures, sets)
            if saves or best or (self._preempted and not pending):
                self._checkpoint(number, figures)
                if not reason and number < steps and self.job.may_grow():
                    self.note_saved(self.checkpoints.finish())
                    raise ReturnedDevices("Devices that had been lost are there again.")
            if reason and number < steps:
                self._end_early(number, reason)
                return

    def _due_sets(self, step: int, last: bool = False, but: Sequence[str] = ()) -> list[str]:
        """Return the names of the sets to evaluate after this step; step 0 is before the first.

        Args:
            last: It is the last step.
            but: Sets that were evaluated at this step.
        """
        every, trains = self.config.eval.every, self.trainer.TRAINS
        is_due = step == 0 or last or bool(every and step % every == 0)
        names = [HELD_OUT_SET] if self._evaluates_held_out and is_due else []
        for name, one in self.job.eval_sets.items():
            if not trains or one.settings.is_due(step, last):
                names.append(name)
        return [name for name in names if name not in but]

    def _end_step(self, pending: PendingStep) -> None:
        updates = self.steps.wait(pending)
        if saved := self.checkpoints.poll():
            self.note_saved(saved)
        step = self.steps.finish(pending, updates, self._saved_figures)
        self._saved_figures = {}
        notices, raised = self._ask("on_step_end", step, metrics=step.metrics)
        self.steps.write(step)
        self._tell(notices, raised)

    def _evaluate(self, step: int, names: Sequence[str]) -> tuple[dict[str, float], str]:
        """The figures of these sets, and why the run is to end after them; empty: it goes on."""
        if not names:
            return {}, ""
        with self.job.beside.doing(DRIVER_EVALUATION):
            figures, calls = self.evaluations.run(step, names)
        for name, value in figures.items():
            self.summary.record_metric(name.removeprefix("eval/"), value)
        if figures:
            self.job.metrics.write(step, figures)
            self.steps.evaluated = figures | {"accuracy/step": step}
            spoken = {"accuracy": resolve_accuracy_name(self.config.reward)}
            shown = [
                f"{spoken.get(name, name)} {value:.3f}"
                for name, value in figures.items()
                if not self.evaluations.is_part(name)
            ]
            self.view.message(f"step {step}: {', '.join(shown)}")
        known = None
        if "accuracy" in figures and (now := self.summary.get("accuracy_last")) is not None:
            known = self.summary["accuracy_first"], now
        evaluation = FinishedEvaluation(
            step, figures, calls, known, lambda figure: self.evaluations.owner(figure) in names
        )
        return figures, self._tell(*self._ask("on_evaluation", evaluation))

    def _ask(
        self, hook: str, *given: Any, metrics: dict[str, float] | None = None
    ) -> tuple[list[str], Exception | None]:
        """Ask all watchers; give what they tell the user, and the first that they raised. Metrics
        join those that are given."""
        notices, raised = [], None
        for watcher in self.watchers:
            try:
                for finding in getattr(watcher, hook)(*given):
                    if isinstance(finding, str):
                        notices.append(finding)
                    elif metrics is not None:
                        metrics |= finding
            except (EndRun, RewindRequest, HybridRLError) as error:
                raised = raised or error
        return notices, raised

    def _tell(self, notices: Sequence[str], raised: Exception | None) -> str:
        """Show what watchers said and raise what they raised; give the reason of an `EndRun`."""
        for notice in notices:
            self.view.message(notice)
        if raised is None or isinstance(raised, EndRun):
            return "" if raised is None else str(raised)
        raise raised

    def _end_early(self, step: int, reason: str) -> None:
        self.summary["ended_early"] = reason
        self.view.message(f"step {step}: the run ends here, for {reason}.")

    def preempt(self, signal: str) -> None:
        """Request that the run ends after the current step with a checkpoint and
        `PreemptionInterrupt`; without checkpoints, at once as after Ctrl-C. May be called from a
        signal handler."""
        if not self.config.checkpoint.wanted:
            self.interrupt(signal)
        self._preempted = signal

    def interrupt(self, signal: str = "Ctrl-C") -> None:
        """End the run at once. May be called from a signal handler; where Python swallows the
        exception, as in a finalizer, the run ends before its next step."""
        self.interrupted = signal
        raise KeyboardInterrupt(signal)

    def _raise_requested_end(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt(self.interrupted)
        if self._preempted:
            self.note_saved(self.checkpoints.finish())
            raise PreemptionInterrupt(self._preempted)

    def _restart(self, lost: LostError | ReturnedDevices) -> ResumePoint:
        """Have workers again, on the devices that there are, and what they go on from.

        Raises:
            LostError: this one, or one meanwhile, if the run is not to go on.
        """
        while True:
            if self._preempted:  # whoever ended the driver has ended the workers, too
                raise PreemptionInterrupt(self._preempted) from lost
            self.checkpoints.abandon()
            if isinstance(lost, LostError):
                newest = self.checkpoints.newest_step()
                self._recoveries.begin(lost, newest, self.summary, self.steps.ended)
            self.view.message(str(lost).partition("\n")[0])
            try:
                self.job.restart(self.view.phase)
            except LostError as another:
                lost = another
                continue
            self._begin_run()
            found = self.checkpoints.newest()  # now it is known which nodes are left
            for notice in found.notices:
                self.view.message(notice)
            return found

    def _go_back(self, rewind: RewindRequest) -> ResumePoint:
        """Return the checkpoint to rewind to, and exclude the prompts that led to the rewind."""
        self.job.executor.settle()
        self.note_saved(self.checkpoints.finish())
        found = self.checkpoints.newest()
        self._tell(*self._ask("on_rewind", rewind, found.step))
        number = self.job.feed.leave_out(rewind.groups)
        self._begin_run()
        self.view.message(
            f"step {rewind.step}: going back to the checkpoint of step {found.step}, without "
            f"{number} prompts"
        )
        return found

    def _resume(self, found: ResumePoint) -> int:
        """Load a resume point and return the number of steps that are done."""
        if found.folder is not None:
            self.view.phase(f"loading the checkpoint of step {found.step}")
        done = self.saved = self.checkpoints.load(found)
        if number := len(self.job.feed.returned):
            self.view.message(
                f"Prompts that rollout.partial had kept with unfinished samples: {number}. They "
                "are sampled anew, first in the next steps."
            )
        self.began = True
        devices, from_memory = len(self.job.executor.cluster.devices), found.copy is not None
        if said := self._recoveries.end(done, self.summary, devices, from_memory):
            self.view.message(said)
        self._recoveries.count(self.summary)
        return done

    def _warm_up(self) -> None:
        steps = self.config.warmup.steps
        if not has_warmup(self.job):
            return
        self.view.phase("supervised warm-up")
        begin = time.perf_counter()

        def progress(step: int, metrics: Mapping[str, float]) -> None:
            if self._preempted:
                raise PreemptionInterrupt(self._preempted)
            self.summary.record_first_step(self.job.started)
            self.view.phase_progress(step, steps, f"loss {metrics['loss']:.3f}")

        warm_up(self.job, progress)
        self.job.publish()
        self.summary["seconds_warmup"] = time.perf_counter() - begin
        self.summary["seconds_train"] += self.summary["seconds_warmup"]
        for choice in list_measured_choices(self.job.executor.take_records()):
            self.view.message(choice)

    def _is_best(self, figures: Mapping[str, float], sets: Sequence[str]) -> bool:
        """Return whether a step is the best one by the evaluation of these sets."""
        best = self.config.checkpoint.best
        is_known = best is not None and self.evaluations.owner(metric_of(best)) in sets
        return is_known and self.checkpoints.is_best(figures)

    def _checkpoint(self, step: int, figures: Mapping[str, float]) -> None:
        with self.job.beside.doing(CHECKPOINT):
            self.note_saved(self.checkpoints.finish())  # the one before
            self.checkpoints.start(step, figures)
            if self._preempted or not self.config.checkpoint.asynchronous:
                self.note_saved(self.checkpoints.finish())
