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
from hybridrl.checkpoint.resume import ResumePoint
from hybridrl.checkpoint.run_state import (
    DRIVER,
    MODEL_IDENTITY_FILE,
    DataIdentity,
    RunState,
    check_plain_data,
)
from hybridrl.checkpoint.store import CheckpointStore, resolve_checkpoint_folder
from hybridrl.checkpoint.warm_model import has_warmup, load_warm_model, save_warm_model
from hybridrl.config.schema import CheckpointConfig
from hybridrl.errors import HybridRLError, LostError, WorkerError
from hybridrl.run_files.run_paths import SETTINGS
from hybridrl.system.locations import Location, copy_files, list_file_sizes, write_atomically
from hybridrl.system.storage import explain_write_errors

if TYPE_CHECKING:
    from hybridrl.controller import Handle
    from hybridrl.job.job import Job
    from hybridrl.run.watchers.nan_guard import NanGuard
    from hybridrl.run.watchers.rate_search_watcher import RateSearchWatcher
    from hybridrl.run.watchers.tripwires import TripwireWatcher
    from hybridrl.trainers.trainer import Trainer

MINUTE = 60.0
BETWEEN_FAILURES = 50_000 * 3600.0
"""Seconds that one device works until the job is interrupted: 16,384 of them were 419 times in 54
days (The Llama 3 Herd of Models, 2024, section 3.3.4)."""


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
        watches: Mapping[str, NanGuard | TripwireWatcher | RateSearchWatcher],
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


class MemoryCopies:
    """Copies of the newest checkpoint in the memory of nodes, in folders like those of its steps.
    They are read first after a loss; if anything goes wrong with them the run continues with the
    files.

    Args:
        place: The folder that they are in.
    """

    def __init__(self, place: Location) -> None:
        self._copies = CheckpointStore(place)

    def at(self, step: int) -> Location:
        """Return the folder of a step, whether it exists or not."""
        return self._copies.at(step)

    def complete(
        self, step: int, fault: str, files: CheckpointStore, figures: Mapping[str, float]
    ) -> str:
        """Add what the ranks have not written of a step, and remove the copy before it; return why
        there is none, else an empty text.

        Args:
            fault: Why the ranks could not write their parts; empty: they have.
            files: The steps of the run.
            figures: What was evaluated after the step.
        """
        if not fault:
            try:
                there = list_file_sizes(self.at(step))
                listed = files.completed(step).files
                # Tensors have their checksums in lists of the ranks.
                small = [name for name, file in listed.items() if "crc32" in file]
                names = [name for name in small if name not in there]
                copy_files(files.at(step), self.at(step), names)
                self._copies.complete(step, figures)
                self._copies.prune(KeepRule(last=1))
                self._copies.forget_after(step)  # what losses have left
            except (HybridRLError, OSError) as error:
                fault = str(error)
        if fault:
            self.discard(step)
        return fault

    def newest(self) -> int | None:
        """Return the newest step with a complete copy, and remove what remains of others."""
        try:
            step, _ = self._copies.newest()
            self._copies.forget_after(step or 0)
        except (HybridRLError, OSError):
            return None
        return step

    def discard(self, step: int) -> None:
        self._copies.discard(step)


class PendingCheckpoint:
    """A checkpoint in progress: the workers of a job write their states to the folders of a step.

    Workers that have `start_saving` and `finish_saving` write while the program goes on; others
    have written when this is built.

    Args:
        step: Its number.
        folder: Of the step; each role gets one of its name in it.
        groups: By role.
        asynchronous: False: all of them write at once.
        copy: A second folder for the step; None: none.

    Attributes:
        step: As given.
        stall: Seconds that the program has waited for it so far; added up by who waits.
        copy_fault: Why there is no second one, though it was wanted; else empty.
    """

    def __init__(
        self,
        step: int,
        folder: Location,
        groups: Mapping[str, Any],
        asynchronous: bool,
        copy: Location | None = None,
    ) -> None:
        self.step = step
        self.stall = 0.0
        self.copy_fault = ""
        self._copies = copy is not None
        self._asked: list[Handle] = []
        self._bytes, self._seconds, self._copy_seconds = 0, 0.0, 0.0
        self._groups: list[Any] = []
        begun = []
        for role, group in groups.items():
            start = getattr(group, "start_saving", None) if asynchronous else None
            target = str((folder / role).absolute())
            if start is None:
                begun.append(group.save_state(target))
                continue
            begun.append(start(target, *([] if copy is None else [str(copy / role)])))
            self._groups.append(group)
        for handle in begun:
            handle.get()

    def ask(self) -> None:
        """Ask the workers for their progress; they answer after the calls that were made before."""
        if not self._asked:
            self._asked = [group.finish_saving(wait=False) for group in self._groups]

    def is_written(self) -> bool:
        """Return whether everything is on the disk, by the answers so far; waits for nothing.

        Raises:
            StorageError, WorkerError: if a rank could not write.
        """
        asked = self._asked
        if (self._groups and not asked) or not all(handle.done_within(0) for handle in asked):
            return False
        self._asked = []
        return self._note([answer for handle in asked for answer in handle.get()])

    def wait(self, limit: float | None) -> bool:
        """Wait at most `limit` seconds and return whether everything is on the disk. Raises as
        `is_written`."""
        until = math.inf if limit is None else time.perf_counter() + limit
        asked = [group.finish_saving(wait=True) for group in self._groups]
        for handle in asked:
            left = None if limit is None else max(0.0, until - time.perf_counter())
            if not handle.done_within(left):
                return False
        return self._note([answer for handle in asked for answer in handle.get()])

    def figures(self) -> dict[str, float]:
        """Return metrics: seconds that training waited, seconds of the slowest writer and of the
        slowest copy, and bytes of all ranks."""
        found = {
            "checkpoint/stall_seconds": self.stall,
            "checkpoint/write_seconds": self._seconds,
            "checkpoint/bytes": float(self._bytes),
        }
        if self._copies:
            found["checkpoint/copy_seconds"] = self._copy_seconds
        return found

    def _note(self, answers: list[Any]) -> bool:
        if any(answer is None for answer in answers):
            return False
        self._bytes = sum(answer.bytes for answer in answers)
        self._seconds = max((answer.seconds for answer in answers), default=0.0)
        self._copy_seconds = max((answer.copy_seconds for answer in answers), default=0.0)
        self.copy_fault = next((a.copy_fault for a in answers if a.copy_fault), "")
        return True


class SaveSchedule:
    """The schedule of one run, from its settings and from the measured cost of its checkpoints.

    Args:
        devices: How many of them may fail.
    """

    def __init__(self, settings: CheckpointConfig, devices: int) -> None:
        self._settings, self._is_wanted = settings, settings.wanted
        self._between_failures = BETWEEN_FAILURES / devices
        self._begun_at = time.monotonic()
        self._stall: float | None = None
        self._has_begun = False

    def is_due(self, step: int, last: int) -> bool:
        """Return whether this step is saved; the last one always is."""
        settings = self._settings
        passed, minutes = time.monotonic() - self._begun_at, settings.every_minutes
        return self._is_wanted and (
            step == last
            or bool(settings.every and step % settings.every == 0)
            or (self._is_worth_it(passed) if minutes is None else 0 < MINUTE * minutes <= passed)
        )

    def begins(self) -> None:
        """Record that a checkpoint was started."""
        self._begun_at, self._has_begun = time.monotonic(), True

    def ends(self, stall: float) -> None:
        """Record that a checkpoint is complete, and the seconds that training waited for it."""
        self._stall = stall

    def _is_worth_it(self, passed: float) -> bool:
        """Return whether the optimal interval has passed. The cost is known after the first
        checkpoint, which is saved at once."""
        if self._stall is None:
            return not self._has_begun
        return passed >= optimal_interval(self._stall, self._between_failures)


def optimal_interval(cost: float, between_failures: float) -> float:
    """Return the seconds between checkpoints that lose the least time to saving and to repeated
    work: Young's first-order interval with Daly's correction (J. T. Daly, "A higher order estimate
    of the optimum checkpoint interval for restart dumps", 2006, equation 37).

    Args:
        cost: Seconds that training waits for a checkpoint.
        between_failures: Seconds, in the mean.
    """
    if cost >= 2 * between_failures:
        return between_failures
    share = math.sqrt(cost / (2 * between_failures))
    return math.sqrt(2 * cost * between_failures) * (1 + share / 3 + share**2 / 9) - cost
