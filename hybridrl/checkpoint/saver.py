"""Saves the steps of a run, and brings one back.

`<run>/checkpoints/step-000020/` holds a folder for each role that trains, written by its workers,
and `driver.json`: what the driver knows at the end of the step. No call is under way then, so
nothing else is to be kept. The workers may write while later steps go on: what they write is a copy
of that moment, and so is the driver's part.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hybridrl.checkpoint.keep_rule import KeepRule, check_figure, metric_of
from hybridrl.checkpoint.memory_copies import MemoryCopies
from hybridrl.checkpoint.pending_checkpoint import PendingCheckpoint
from hybridrl.checkpoint.resume import ResumePoint
from hybridrl.checkpoint.run_state import (
    DRIVER,
    MODEL_IDENTITY_FILE,
    DataIdentity,
    RunState,
    check_plain_data,
)
from hybridrl.checkpoint.save_schedule import SaveSchedule
from hybridrl.checkpoint.store import CheckpointStore, resolve_checkpoint_folder
from hybridrl.checkpoint.warm_model import has_warmup, load_warm_model, save_warm_model
from hybridrl.errors import HybridRLError, LostError, WorkerError
from hybridrl.run_files.run_paths import SETTINGS
from hybridrl.system.locations import write_atomically
from hybridrl.system.storage import explain_write_errors

if TYPE_CHECKING:
    from hybridrl.job.job import Job
    from hybridrl.run.watchers.watcher import Watcher
    from hybridrl.trainers.trainer import Trainer


class CheckpointSaver:
    """Saves the steps of a run as checkpoints: starts, completes and abandons them, and prunes old
    ones.

    Args:
        trainer: The job's driver program.
        summary: Of the run so far; what is brought back is put into it.
        watches: What else of the run has a state, by name; a fork begins without it.
    """

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        summary: dict[str, Any],
        watches: Mapping[str, Watcher],
    ) -> None:
        self.job, self.trainer, self.summary, self.watches = job, trainer, summary, watches
        settings = job.config.checkpoint
        self._folders = CheckpointStore(
            resolve_checkpoint_folder(job.directory.path.absolute(), settings.folder)
        )
        self._keep = KeepRule(settings.keep_last, settings.keep_every, settings.best)
        copies = job.keep_copies()
        self._copies = None if copies is None else MemoryCopies(copies)
        self._when = SaveSchedule(settings, len(job.executor.cluster.devices))
        self._warmed_up = has_warmup(job)
        self._saving: PendingCheckpoint | None = None

    def is_due(self, step: int, last: int) -> bool:
        """Return whether the schedule saves this step, whatever its metrics are."""
        return self._when.is_due(step, last)

    def is_best(self, figures: Mapping[str, float]) -> bool:
        """Return whether a step has to be saved because no saved step has metrics as good.

        Args:
            figures: What was evaluated after it.

        Raises:
            ConfigError: if `checkpoint.best` is none of them.
        """
        if self._keep.best is None:
            return False
        check_figure("checkpoint.best", self._keep.best, figures)
        saved = [*self._folders.figures().values()]
        if self._saving is not None:
            saved.append(self._evaluated)
        return self._keep.goodness(figures) > max(
            map(self._keep.goodness, saved), default=-math.inf
        )

    def start(self, step: int, figures: Mapping[str, float]) -> None:
        """Start to save a step. No call may be pending, and the checkpoint before must be finished.
        With `checkpoint.asynchronous` workers write a copy while the next steps run.

        Args:
            figures: What was evaluated after the step.

        Raises:
            ConfigError: if a part of the user's has a state that is no plain data.
            StorageError: if it cannot be written; the checkpoint before it stays.
        """
        begin = time.perf_counter()
        self._check_owner()
        part = self._folders.begin(step)
        with self._discarded_if_it_fails(step):
            self._driver, self._evaluated = self._state_of_driver(step), dict(figures)
            groups = {role: self.job.groups[role] for role in self._roles()}
            copy = None
            if self._copies is not None:
                self.job.keep_copies()
                copy = self._copies.at(step)
            asynchronous = self.job.config.checkpoint.asynchronous
            self._saving = PendingCheckpoint(step, part, groups, asynchronous, copy)
        self.job.beside.called(self.job.executor.take_records())
        # Samples of later steps must not depend on weights that a resumed run does not have.
        self.job.publish()
        self._when.begins()
        self._saving.stall += time.perf_counter() - begin

    def ask(self) -> None:
        """Ask the workers for their progress, which `poll` reads."""
        if self._saving is not None:
            with self._discarded_if_it_fails(self._saving.step):
                self._saving.ask()

    def poll(self) -> PendingCheckpoint | None:
        """Complete the pending checkpoint if all workers have reported that it is on the disk,
        prune the oldest, and return it; None if there is none or it is not written yet. Waits for
        no worker.

        Raises:
            StorageError: if it could not be written; the checkpoint before it stays.
        """
        if (saving := self._saving) is None:
            return None
        with self._discarded_if_it_fails(saving.step):
            return self._complete(saving) if saving.is_written() else None

    def finish(self, limit: float | None = None) -> PendingCheckpoint | None:
        """Wait for the pending checkpoint, at most `limit` seconds (None: without limit), and
        complete it as `poll` does. After the limit it is abandoned."""
        if (saving := self._saving) is None:
            return None
        begin = time.perf_counter()
        with self._discarded_if_it_fails(saving.step):
            if saving.wait(limit):
                saving.stall += time.perf_counter() - begin
                return self._complete(saving)
        self.abandon()
        return None

    def abandon(self) -> None:
        """Abandon the pending checkpoint."""
        if self._saving is not None:
            self._discard(self._saving.step)

    def _discard(self, step: int) -> None:
        self._saving = None
        owner = self.job.folder_owner
        if owner is None or not owner.is_taken():  # otherwise the step may be another run's
            self._folders.discard(step)

    def _check_owner(self) -> None:
        if self.job.folder_owner is not None:
            self.job.folder_owner.check()

    @contextlib.contextmanager
    def _discarded_if_it_fails(self, step: int) -> Iterator[None]:
        try:
            yield
        except (HybridRLError, OSError):
            self._discard(step)
            raise

    @contextlib.contextmanager
    def _forgotten_if_unreadable(self, found: ResumePoint) -> Iterator[None]:
        """Discard a copy in memory that cannot be read, so that the run resumes from the files.

        Raises:
            LostError: then, for workers that could not read take no more calls.
        """
        try:
            yield
        except LostError:
            raise
        except (WorkerError, OSError) as error:
            if self._copies is None or found.copy is None:
                raise
            self._copies.discard(found.step)
            raise LostError(f"The copy in memory could not be read. {error}") from error

    def _complete(self, saving: PendingCheckpoint) -> PendingCheckpoint:
        begin = time.perf_counter()
        folder = self._folders.at(saving.step)
        self._check_owner()
        with explain_write_errors(folder):
            write_atomically(folder / DRIVER, self._driver.encode())
            write_atomically(folder / MODEL_IDENTITY_FILE, json.dumps(self.job.made_with).encode())
            write_atomically(folder / SETTINGS, self.job.directory.config_file.read_bytes())
        if self.job.config.checkpoint.folder is not None:
            save_warm_model(self.job, self._folders.path)
        self._folders.complete(saving.step, self._evaluated, self._roles())
        self._saving = None
        self._folders.prune(self._keep)
        if self._copies is not None:
            saving.copy_fault = self._copies.complete(
                saving.step, saving.copy_fault, self._folders, self._evaluated
            )
        saving.stall += time.perf_counter() - begin
        self._when.ends(saving.stall)
        return saving

    def newest_step(self) -> int:
        """Return the newest complete step, or the one that the run began from. Reads no file of
        it."""
        return max(self._folders.steps(), default=self.job.resumed.step)

    def newest(self) -> ResumePoint:
        """Return what a run resumes from after losing workers: its newest intact step, or where it
        began. If a copy of the step is in the memory of nodes, no other file is read.

        Raises:
            ConfigError: if there are steps and none of them is whole.
        """
        run, missed = self.job.directory.path, list[str]()
        if self._copies is not None and (steps := self._folders.steps()):
            newest = steps[-1]
            if self._copies.newest() == newest:
                copy = self._copies.at(newest)
                return ResumePoint(run, newest, self._folders.at(newest), copy=copy)
            missed = [f"No whole copy of step {newest} is in memory; its files are read."]
        step, notices = self._folders.newest()
        if step is None:
            return replace(self.job.resumed, run=run)  # of a fork, the step of another run
        return ResumePoint(run, step, self._folders.at(step), missed + notices)

    def load(self, found: ResumePoint) -> int:
        """Restore the models and the state of a run from a resume point; without a checkpoint, from
        the beginning. Return the number of steps that are done. Files of later steps are removed.

        Raises:
            ConfigError: if it is of another model or program.
            DataError: if it is of other data.
        """
        if found.folder is not None:
            source = found.copy or found.folder
            with self._forgotten_if_unreadable(found):
                state = RunState.load(source)
            self._data.check(state, found.folder)
            best = self._keep.best
            is_of_set = best is not None and metric_of(best).startswith("eval/")  # may come later
            if best is not None and not is_of_set:
                evaluated = CheckpointStore(found.folder.parent).figures().values()
                if figures := {name: value for step in evaluated for name, value in step.items()}:
                    check_figure("checkpoint.best", best, figures)
            self.job.feed.load_state(dict(state.feed))
            self.trainer.load_state(state.trainer)
            loading = [
                self.job.groups[role].load_state(str((source / role).absolute()))
                for role in self._roles()
            ]
            with self._forgotten_if_unreadable(found):
                for handle in loading:
                    handle.get()
            # As that run did, whatever the settings of this one say.
            self._warmed_up = state.warmed_up
            if self._warmed_up:
                load_warm_model(self.job, but=self._roles(), steps=found.folder.parent)
            self.job.publish()
            self.job.executor.take_records()
            self.summary |= state.summary
            for name in self.watches.keys() & state.watches.keys() if found.run else ():
                self.watches[name].load_state(state.watches[name])
        if found.run is not None:  # only now, when nothing can be wrong any more
            self.job.write_settings()
            self.job.directory.forget_summary()
            self.job.directory.forget_after(found.step if found.folder else -1)
            self._folders.forget_after(found.step)
        return found.step

    def _roles(self) -> list[str]:
        return [role for role, spec in self.job.roles.items() if spec.keeps_state]

    @cached_property
    def _data(self) -> DataIdentity:
        return DataIdentity(self.trainer.data, self.job.tokenizer)

    def _state_of_driver(self, step: int) -> str:
        """Return what is to stand in `driver.json`."""
        config, feed, trainer = self.job.config, self.job.feed.state(), self.trainer.state()
        of_samplers = feed.get("sampler", feed.get("sources"))
        check_plain_data(f"data.sampler={config.data.sampler}", of_samplers)
        check_plain_data(f"trainer.name={config.trainer.name}", trainer)
        return RunState(
            step,
            feed,
            trainer,
            self.summary,
            self._warmed_up,
            self._data.fingerprint,
            self._data.number,
            self._data.first_row,
            {name: watch.state() for name, watch in self.watches.items()},
        ).to_json()
