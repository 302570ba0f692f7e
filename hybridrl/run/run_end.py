"""The end of a run, however it comes: it leaves models and a summary."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hybridrl.errors import HybridRLError, PreemptionInterrupt
from hybridrl.run_files.final_sentence import interrupted_sentence
from hybridrl.run_files.provenance import collect_provenance
from hybridrl.run_files.run_paths import SUMMARY
from hybridrl.run_files.run_status import classify_outcome
from hybridrl.system.formatting import format_seconds
from hybridrl.system.storage import replace_folder

if TYPE_CHECKING:
    from hybridrl.checkpoint.pending_checkpoint import PendingCheckpoint
    from hybridrl.checkpoint.saver import CheckpointSaver
    from hybridrl.config.schema import Config
    from hybridrl.console.run_view import RunView
    from hybridrl.job.job import Job
    from hybridrl.run.evaluation_runner import EvaluationRunner
    from hybridrl.run_files.metric_writers import RunSummary
    from hybridrl.trainers.trainer import Trainer

SAVE_SECONDS_AFTER_ERROR = 60.0
"""How long the workers may take to save the model when the program has failed."""


class _TooBusyError(Exception):
    """The workers were too busy to save a model in time."""


class RunEnd:
    """The parts of a run that its end needs.

    Attributes:
        began: Whether there is anything to save.
        saved: The step of the newest checkpoint; 0: there is none.
        interrupted: The signal that ends the run at once.
    """

    job: Job
    view: RunView
    config: Config
    summary: RunSummary
    trainer: Trainer
    checkpoints: CheckpointSaver
    evaluations: EvaluationRunner
    began: bool
    saved: int
    interrupted: str
    _saved_figures: dict[str, float]

    @contextmanager
    def ended_in_order(self) -> Iterator[None]:
        """Around a run: raise what ends it early again when all there is has been saved. An error
        saves a model if the workers are still there."""
        try:
            yield
        except PreemptionInterrupt as preempted:
            self.summary["interrupted"] = True
            self._write_summary(preempted)
            if self.saved:
                self._say_how_to_go_on(f"{preempted}: ended")
            else:
                self.view.close(f"{preempted}: ended before the first checkpoint.")
            raise
        except KeyboardInterrupt as error:
            # Ray raises one of its own in place of the one that was raised in its calls.
            signal = KeyboardInterrupt(self.interrupted or str(error))
            if self.began:
                limit = self.config.recover.save_s
                self.view.message(
                    f"Interrupted: saving the model, for {limit:g} s at most; Ctrl-C again ends at "
                    "once."
                )
                self.summary["interrupted"] = True
                with suppress(KeyboardInterrupt):  # a second signal, or the end of the time to save
                    self.finish(limit, signal)
                    self._say_how_to_go_on("Interrupted")
            raise signal from None
        except Exception as error:
            if self.began:  # else the folder is as good as new
                with suppress(HybridRLError):  # the first error is the one to be told
                    self._write_summary(error)
            if self.began and self.trainer.TRAINS and self.job.executor.takes_calls:
                self.view.message("The program failed: saving the model as it is.")
                with suppress(HybridRLError, OSError):
                    until = time.monotonic() + SAVE_SECONDS_AFTER_ERROR
                    self.note_saved(self.checkpoints.finish(SAVE_SECONDS_AFTER_ERROR))
                    self._save_models(until)
            raise

    def finish(self, limit: float | None = None, error: BaseException | None = None) -> None:
        """Save the checkpoint that is being written, the models and the summary.

        Args:
            limit: Seconds to wait for workers; None: as long as it takes.
            error: What has ended the run early.
        """
        until = math.inf if limit is None else time.monotonic() + limit
        self.note_saved(self.checkpoints.finish(limit))
        self._save_models(until)
        if compared := self.evaluations.compared():
            self.summary["against_baseline"] = compared
        if doubts := self.evaluations.doubts():
            self.summary["evaluation_doubts"] = doubts
        self._write_summary(error)
        self.evaluations.show()

    def _save_models(self, until: float) -> None:
        """Save the models of roles that leave one, until this moment of the monotonic clock."""
        self.view.phase("saving")
        for role, spec in self.job.roles.items():
            if spec.saves_as is None:
                continue
            try:
                with replace_folder(self.job.directory.path / spec.saves_as) as folder:
                    saved = self.job.groups[role].save_model(str(folder.absolute()))
                    left = None if until == math.inf else max(0.0, until - time.monotonic())
                    if not saved.done_within(left):
                        raise _TooBusyError
            except _TooBusyError:
                self.view.message(f"The workers were busy for too long; the {role} was not saved.")

    def _write_summary(self, error: BaseException | None) -> None:
        """Write what there is to say of a run, what it came from, and what has ended it."""
        state, why = classify_outcome(error)
        made_by = collect_provenance(self.config.run.seed, self.job.command)
        summary = {**self.summary, "state": state, "why": why, **made_by}
        self.job.directory.write_json(SUMMARY, summary)

    def _say_how_to_go_on(self, why: str) -> None:
        steps, folder = self.summary["steps"], self.job.directory.path
        self.view.close(interrupted_sentence(why, steps, self.saved, folder))

    def note_saved(self, saved: PendingCheckpoint | None) -> None:
        """Tell of a checkpoint that is complete, if it is."""
        if saved is None:
            return
        self.saved = saved.step
        figures = saved.figures()
        waited = format_seconds(figures["checkpoint/stall_seconds"])
        self.view.message(f"step {saved.step}: checkpoint saved; training waited {waited} for it")
        self._saved_figures |= figures
        if saved.copy_fault:
            self.view.message(
                f"step {saved.step}: no copy of it is in memory ({saved.copy_fault}); after a loss "
                "its files would be read"
            )
