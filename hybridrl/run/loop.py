"""The loop around a driver program: warm-up, steps, evaluations, checkpoints; and what becomes of a
run that is interrupted, loses workers, or goes back."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hybridrl.checkpoint.pruning import check_figure, metric_of
from hybridrl.checkpoint.resumed import Resumed
from hybridrl.checkpoint.saver import Checkpoints
from hybridrl.config.eval_sets import HELD_OUT
from hybridrl.console.run_view import StepView
from hybridrl.errors import HybridRLError, LostError, Preempted
from hybridrl.run.evaluation_runner import Evaluations
from hybridrl.run.left import save_models, write_summary
from hybridrl.run.recovery import Recoveries
from hybridrl.run.step_runner import Step, Steps, choices_of, note, note_first_step
from hybridrl.run.warmup import warm_up, warms_up
from hybridrl.run.watchers.accuracy_decline import Decline
from hybridrl.run.watchers.early_stop import EarlyStop
from hybridrl.run.watchers.nan_guard import Guard, Rewind
from hybridrl.run_files.beside_steps import CHECKPOINT, EVALUATION
from hybridrl.run_files.summary import accuracy_name, interrupted_sentence
from hybridrl.system.formatting import readable_seconds

if TYPE_CHECKING:
    from hybridrl.checkpoint.pending_checkpoint import Saving
    from hybridrl.job.job import Job

SAVE_SECONDS_AFTER_ERROR = 60.0
"""How long the workers may take to save the model when the program has failed."""


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
        self.summary: dict[str, Any] = {}
        self._recoveries = Recoveries(job.config, job.directory.path)
        self.guard = Guard(self.config.guard, job.directory, view.message)
        self._preempted = ""
        self._interrupted = ""
        held_out = job.held_out
        self._decline = Decline(job.config, 0 if held_out is None else len(held_out))
        self._saved = 0
        self._begin_run()

    def _begin_run(self) -> None:
        """What there is of a run before its first step."""
        self.job.executor.notify = self.view.message
        self.job.beside.take()  # of calls of before, whose numbers begin anew
        self.trainer = self.job.make_trainer()
        self._began = False  # until then there is nothing to save, but maybe a model to overwrite
        self._saved_figures: dict[str, float] = {}
        self.summary.clear()
        self.summary |= {"steps": 0, "tokens_generated": 0, "seconds_train": 0.0}
        self.steps = Steps(self.job, self.trainer, self.guard, self.view, self.summary)
        watches = {"guard": self.guard, "tripwires": self.steps.tripwires}
        self.checkpoints = Checkpoints(self.job, self.trainer, self.summary, watches)
        unscored = self.steps.unscored
        self.evaluations = Evaluations(self.job, self.trainer, self.view, unscored)
        self._early = EarlyStop(self.config.eval.stop, self.summary)

    def run(self) -> dict[str, Any]:
        """Trains; goes on from the newest checkpoint when workers are lost. Ctrl-C saves what there
        is and raises KeyboardInterrupt again; so does an error, if the workers are still there."""
        try:
            self._run_to_end()
        except Preempted as signal:
            self.summary["interrupted"] = True
            write_summary(self.job, self.summary, signal)
            if self._saved:
                self._say_how_to_go_on(f"{signal}: ended")
            else:
                self.view.close(f"{signal}: ended before the first checkpoint.")
            raise
        except KeyboardInterrupt as error:
            # Ray raises one of its own in place of the one that was raised in its calls.
            signal = KeyboardInterrupt(self._interrupted or str(error))
            if self._began:
                limit = self.config.recover.save_s
                self.view.message(
                    f"Interrupted: saving the model, for {limit:g} s at most; Ctrl-C again ends at "
                    "once."
                )
                self.summary["interrupted"] = True
                self._finish(limit, signal)
                self._say_how_to_go_on("Interrupted")
            raise signal from None
        except Exception as error:
            if self._began:  # else the folder is as good as new
                with suppress(HybridRLError):  # the first error is the one to be told
                    write_summary(self.job, self.summary, error)
            if self._began and self.trainer.TRAINS and self.job.executor.takes_calls:
                self.view.message("The program failed: saving the model as it is.")
                with suppress(HybridRLError, OSError):
                    until = time.monotonic() + SAVE_SECONDS_AFTER_ERROR
                    self._note_saved(self.checkpoints.finish(SAVE_SECONDS_AFTER_ERROR))
                    save_models(self.job, self.view, until)
            raise
        return self.summary

    def _say_how_to_go_on(self, why: str) -> None:
        steps, folder = self.summary["steps"], self.job.directory.path
        self.view.close(interrupted_sentence(why, steps, self._saved, folder))

    def preempt(self, signal: str) -> None:
        """Has the run end after the step in hand with a checkpoint and `Preempted`, or at once as
        Ctrl-C does if it has no checkpoints. A signal handler may call it."""
        if not self.config.checkpoint.wanted:
            self.interrupt(signal)
        self._preempted = signal

    def interrupt(self, signal: str = "Ctrl-C") -> None:
        """Has the run end at once. A signal handler may call it, also where Python lets go of what
        that raises, as in a finalizer: then the run ends before its next step."""
        self._interrupted = signal
        raise KeyboardInterrupt(signal)

    def _run_to_end(self) -> None:
        """Everything, on from the newest checkpoint as often as workers are lost or the guard goes
        back to it."""
        found = self.job.resumed
        while True:
            try:
                done = self._resume(found)
                if found.folder is None:
                    self._warm_up()
                    self._check_figures(self._evaluate(0, self.evaluations.due(0)))
                    if self.guard.rewinds:
                        self._checkpoint(0, {})
                self._train(done, self.config.trainer.steps if self.trainer.TRAINS else 0)
                self.guard.check_end()
                self._finish()
                return
            except LostError as lost:
                found = self._restart(lost)
            except Rewind as rewind:
                found = self._go_back(rewind)

    def _restart(self, lost: LostError) -> Resumed:
        """Has workers again after a loss, and what they go on from.

        Raises:
            LostError: this one, or one meanwhile, if the run is not to go on.
        """
        while True:
            if self._preempted:  # whoever ended the driver has ended the workers, too
                raise Preempted(self._preempted) from lost
            self.checkpoints.abandon()
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

    def _go_back(self, rewind: Rewind) -> Resumed:
        """The checkpoint to go back to; the prompts that led here are left out."""
        self.job.executor.settle()
        self._note_saved(self.checkpoints.finish())
        found = self.checkpoints.newest()
        self.guard.rewound(rewind, found.step)
        number = self.job.feed.leave_out(rewind.groups)
        self._begin_run()
        self.view.message(
            f"step {rewind.step}: going back to the checkpoint of step {found.step}, without "
            f"{number} prompts"
        )
        return found

    def _resume(self, found: Resumed) -> int:
        """The number of steps that are done before this run does any."""
        if found.folder is not None:
            self.view.phase(f"loading the checkpoint of step {found.step}")
        done = self._saved = self.checkpoints.load(found)
        self._began = True
        devices, from_memory = len(self.job.executor.cluster.devices), found.copy is not None
        if said := self._recoveries.end(done, self.summary, devices, from_memory):
            self.view.message(said)
        self._recoveries.count(self.summary)
        return done

    def _warm_up(self) -> None:
        steps = self.config.warmup.steps
        if not warms_up(self.job):
            return
        self.view.phase("supervised warm-up")
        begin = time.perf_counter()

        def progress(step: int, metrics: Mapping[str, float]) -> None:
            if self._preempted:
                raise Preempted(self._preempted)
            note_first_step(self.job, self.summary)
            self.view.phase_progress(step, steps, f"loss {metrics['loss']:.3f}")

        warm_up(self.job, progress)
        self.job.publish()
        self.summary["seconds_warmup"] = time.perf_counter() - begin
        self.summary["seconds_train"] += self.summary["seconds_warmup"]
        for choice in choices_of(self.job.executor.take_records()):
            self.view.message(choice)

    def _evaluate(self, step: int, names: Sequence[str]) -> dict[str, float]:
        """The figures of these sets; none where there are none."""
        if not names:
            return {}
        with self.job.beside.doing(EVALUATION):
            figures = self.evaluations.run(step, names)
        if not figures:
            return {}
        for name, value in figures.items():
            note(self.summary, name.removeprefix("eval/"), value)
        self.job.write(step, figures)
        self.steps.evaluated = figures | {"accuracy/step": step}
        spoken = {"accuracy": accuracy_name(self.config.reward)}
        shown = [
            f"{spoken.get(name, name)} {value:.3f}"
            for name, value in figures.items()
            if not self.evaluations.is_part(name)
        ]
        self.view.message(f"step {step}: {', '.join(shown)}")
        if (now := self.summary.get("accuracy_last")) is not None and "accuracy" in figures:
            if notice := self._decline.look(step, self.summary["accuracy_first"], now):
                self.view.message(notice)
            self.steps.trip(self.steps.tripwires.evaluated(step, now))
        if self._gives(self._early.metric, names):
            self._early.look(step, figures)
        return figures

    def _check_figures(self, figures: Mapping[str, float]) -> None:
        """Refuses to look at figures that the first evaluation does not give; of sets that were not
        due they may come."""
        named = {
            "checkpoint.best": self.config.checkpoint.best,
            "eval.stop.metric": self.config.eval.stop.metric,
        }
        for setting, figure in named.items():
            if figure is not None and self.evaluations.owner(metric_of(figure)) == HELD_OUT:
                check_figure(setting, figure, figures)

    def _is_best(self, figures: Mapping[str, float], names: Sequence[str]) -> bool:
        """Whether a step is the best by what was evaluated of these sets."""
        best = self.config.checkpoint.best
        wanted = None if best is None else metric_of(best)
        return self._gives(wanted, names) and self.checkpoints.is_best(figures)

    def _gives(self, wanted: str | None, names: Sequence[str]) -> bool:
        """Whether evaluations of these sets give a figure."""
        return wanted is not None and self.evaluations.owner(wanted) in names

    def _checkpoint(self, step: int, figures: Mapping[str, float]) -> None:
        with self.job.beside.doing(CHECKPOINT):
            self._note_saved(self.checkpoints.finish())  # the one before
            self.checkpoints.start(step, figures)
            if self._preempted or not self.config.checkpoint.asynchronous:
                self._note_saved(self.checkpoints.finish())

    def _note_saved(self, saved: Saving | None) -> None:
        if saved is None:
            return
        self._saved = saved.step
        figures = saved.figures()
        waited = readable_seconds(figures["checkpoint/stall_seconds"])
        self.view.message(f"step {saved.step}: checkpoint saved; training waited {waited} for it")
        self._saved_figures |= figures
        if saved.copy_fault:
            self.view.message(
                f"step {saved.step}: no copy of it is in memory ({saved.copy_fault}); after a loss "
                "its files would be read"
            )

    def _train(self, done: int, steps: int) -> None:
        """Makes the calls of a step while up to `placement.staleness` earlier ones are under way:
        its samples may be generated while theirs are learned from."""
        under_way: deque[Step] = deque()
        verdict = self._early.verdict()
        if verdict and done < steps:
            self._end_early(done, verdict)
            return
        self.job.executor.step = done  # it numbers from 0 the step that is the first here
        for number in range(done + 1, steps + 1):
            if self._interrupted:
                raise KeyboardInterrupt(self._interrupted)
            if self._preempted:
                self._note_saved(self.checkpoints.finish())
                raise Preempted(self._preempted)
            under_way.append(self.steps.begin(number))
            self.checkpoints.ask()  # behind the calls of the step
            evaluated = self.evaluations.due(number, number == steps)
            saves = self.checkpoints.is_due(number, steps)
            ahead = 0 if evaluated or saves else self.config.placement.staleness
            while len(under_way) > (0 if self._preempted else ahead):
                self._end(under_way.popleft())
            figures = self._evaluate(number, evaluated)
            verdict = self._early.verdict() if evaluated and number < steps else ""
            if verdict:  # sets that are to be evaluated at the end are, now
                last = self.evaluations.due(number, last=True, but=evaluated)
                figures |= self._evaluate(number, last)
                evaluated += last
                saves = self.config.checkpoint.wanted
            best = bool(evaluated) and self._is_best(figures, evaluated)
            if saves or best or (self._preempted and not under_way):
                self._checkpoint(number, figures)
                if not verdict and number < steps and self.job.may_grow():
                    self._note_saved(self.checkpoints.finish())
                    raise LostError("Devices that had been lost are there again.")

            if verdict:
                self._end_early(number, verdict)
                return

    def _end_early(self, step: int, verdict: str) -> None:
        self.summary["ended_early"] = verdict
        self.view.message(f"step {step}: the run ends here, for {verdict}.")

    def _end(self, step: Step) -> None:
        updates = self.steps.wait(step)
        self._note_saved(self.checkpoints.poll())
        saved, self._saved_figures = self._saved_figures, {}
        self.steps.end(step, updates, saved)

    def _finish(self, limit: float | None = None, error: BaseException | None = None) -> None:
        """Saves the checkpoint that is being written, the model and the summary; waits
        for workers so many seconds at most.

        Args:
            error: What has ended the run early.
        """
        until = math.inf if limit is None else time.monotonic() + limit
        self._note_saved(self.checkpoints.finish(limit))
        save_models(self.job, self.view, until)
        if compared := self.evaluations.compared():
            self.summary["against_baseline"] = compared
        if doubts := self.evaluations.doubts():
            self.summary["evaluation_doubts"] = doubts
        write_summary(self.job, self.summary, error)
        self.evaluations.show()
