"""Checkpoints of whole steps, and the state of a run that goes on from one.

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
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hybridrl.checkpoint.copies.memory_copies import MemoryCopies
from hybridrl.checkpoint.fingerprints import MADE_WITH
from hybridrl.checkpoint.pending_checkpoint import Saving
from hybridrl.checkpoint.plain_state import check_plain
from hybridrl.checkpoint.pruning import KeepRule, check_figure, metric_of
from hybridrl.checkpoint.resume import Resumed
from hybridrl.checkpoint.save_schedule import WhenToSave
from hybridrl.checkpoint.store import StepFolders, steps_folder
from hybridrl.errors import DataError, HybridRLError, LostError, WorkerError
from hybridrl.run.warmup import keep_copies, load_copies, warms_up
from hybridrl.run_files.run_paths import SETTINGS
from hybridrl.system.locations import write_whole
from hybridrl.system.storage import explain_write_errors

if TYPE_CHECKING:
    from hybridrl.batch.batch import Batch
    from hybridrl.job.job import Job
    from hybridrl.run.watchers.nan_guard import Guard
    from hybridrl.run.watchers.tripwires import Tripwires
    from hybridrl.trainers.trainer import Trainer

DRIVER = "driver.json"
TOKENS = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids")
"""Columns by which a data set is known again."""
MOST_TEXT = 10_000
"""Characters of the first row that a checkpoint keeps."""
KNOWN_ROWS = 100
"""So many of the first and of the last rows are compared."""


class Checkpoints:
    """Saves the steps of a job and brings one back.

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
        watches: Mapping[str, Guard | Tripwires],
    ) -> None:
        self.job, self.trainer, self.summary, self.watches = job, trainer, summary, watches
        settings = job.config.checkpoint
        self._folders = StepFolders(steps_folder(job.directory.path.absolute(), settings.folder))
        self._keep = KeepRule(settings.keep_last, settings.keep_every, settings.best)
        copies = job.keep_copies()
        self._copies = None if copies is None else MemoryCopies(copies)
        self._when = WhenToSave(settings, len(job.executor.cluster.devices))
        self._warmed_up = warms_up(job)
        self._saving: Saving | None = None

    def is_due(self, step: int, last: int) -> bool:
        """Whether this step is to be saved, however good it is."""
        return self._when.is_due(step, last)

    def is_best(self, figures: Mapping[str, float]) -> bool:
        """Whether a step is to be saved because none that was is as good.

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
        """Begins to save a step, after which no call may be under way; the one before must be
        finished. With `checkpoint.asynchronous` workers write a copy while the next steps go on.

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
            self._saving = Saving(step, part, groups, asynchronous, copy)
        self.job.beside.called(self.job.executor.take_records())
        # Samples of later steps must not depend on weights that a resumed run does not have.
        self.job.publish()
        self._when.begins()
        self._saving.stall += time.perf_counter() - begin

    def ask(self) -> None:
        """Has the workers say how far they are, for `poll`."""
        if self._saving is not None:
            with self._discarded_if_it_fails(self._saving.step):
                self._saving.ask()

    def poll(self) -> Saving | None:
        """Completes the step that is being saved, if by what `ask` has brought all of it is on the
        disk, and removes the oldest; gives it then. Waits for no worker.

        Raises:
            StorageError: if it could not be written; the checkpoint before it stays.
        """
        if self._saving is None:
            return None
        with self._discarded_if_it_fails(self._saving.step):
            return self._complete() if self._saving.is_written() else None

    def finish(self, limit: float | None = None) -> Saving | None:
        """As `poll`, but waits, `limit` seconds at most (None: as long as it takes); what is not
        written then is given up."""
        if self._saving is None:
            return None
        begin = time.perf_counter()
        with self._discarded_if_it_fails(self._saving.step):
            if self._saving.wait(limit):
                self._saving.stall += time.perf_counter() - begin
                return self._complete()
        self.abandon()
        return None

    def abandon(self) -> None:
        """Gives up what is being saved."""
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
    def _forgotten_if_unreadable(self, found: Resumed) -> Iterator[None]:
        """Where a copy in memory cannot be read, the run goes on from the files that are left.

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

    def _complete(self) -> Saving:
        saving, begin = self._saving, time.perf_counter()
        folder = self._folders.at(saving.step)
        self._check_owner()
        with explain_write_errors(folder):
            write_whole(folder / DRIVER, self._driver.encode())
            write_whole(folder / MADE_WITH, json.dumps(self.job.made_with).encode())
            write_whole(folder / SETTINGS, self.job.directory.config_file.read_bytes())
        if self.job.config.checkpoint.folder is not None:
            keep_copies(self.job, self._folders.path)
        self._folders.complete(saving.step, self._evaluated, self._roles())
        self._saving = None
        self._folders.prune(self._keep)
        if self._copies is not None:
            self._copies.complete(saving, self._folders, self._evaluated)
        saving.stall += time.perf_counter() - begin
        self._when.ends(saving.stall)
        return saving

    def newest_step(self) -> int:
        """The newest step that is complete, or where the run began. Reads no files of it."""
        return max(self._folders.steps(), default=self.job.resumed.step)

    def newest(self) -> Resumed:
        """What a run that has lost its workers goes on from: its newest whole step, or where it
        began. Where the memory of nodes has a copy of the step, no other file is read.

        Raises:
            ConfigError: if there are steps and none of them is whole.
        """
        run, missed = self.job.directory.path, list[str]()
        if self._copies is not None and (steps := self._folders.steps()):
            newest = steps[-1]
            if self._copies.newest() == newest:
                copy = self._copies.at(newest)
                return Resumed(run, newest, self._folders.at(newest), copy=copy)
            missed = [f"No whole copy of step {newest} is in memory; its files are read."]
        step, notices = self._folders.newest()
        if step is None:
            return replace(self.job.resumed, run=run)  # of a fork, the step of another run
        return Resumed(run, step, self._folders.at(step), missed + notices)

    def load(self, found: Resumed) -> int:
        """Goes on from a checkpoint, or from the beginning if there is none; gives the number of
        steps that are done. Later ones leave nothing behind.

        Raises:
            ConfigError: if it is of another model or program.
            DataError: if it is of other data.
        """
        if found.folder is not None:
            source = found.copy or found.folder
            with self._forgotten_if_unreadable(found):
                state = json.loads((source / DRIVER).read_text(encoding="utf-8"))
            if self._fingerprint != state["data"]:
                raise DataError(
                    f"{found.folder} was written by a run on other data than this one's "
                    f"{len(self.trainer.data)} rows, on other tokens of them, or with another "
                    f"run.seed, which deals them out.{self._how_data_differs(state)} Resume with "
                    "the data, tokenizer and seed of that run, or train on from its model in a "
                    "new run."
                )
            best = self._keep.best
            is_of_set = best is not None and metric_of(best).startswith("eval/")  # may come later
            if best is not None and not is_of_set and (figures := _evaluated(found)):
                check_figure("checkpoint.best", best, figures)
            self.job.feed.load_state(state["feed"])
            self.trainer.load_state(state["trainer"])
            loading = [
                self.job.groups[role].load_state(str((source / role).absolute()))
                for role in self._roles()
            ]
            with self._forgotten_if_unreadable(found):
                for handle in loading:
                    handle.get()
            # As that run did, whatever the settings of this one say.
            self._warmed_up = state["warmed_up"]
            if self._warmed_up:
                load_copies(self.job, but=self._roles(), steps=found.folder.parent)
            self.job.publish()
            self.job.executor.take_records()
            self.summary |= state["summary"]
            for name in self.watches.keys() & state.get("watches", {}) if found.run else ():
                self.watches[name].load_state(state["watches"][name])
        if found.run is not None:  # only now, when nothing can be wrong any more
            self.job.write_settings()
            self.job.directory.forget_summary()
            self.job.directory.forget_after(found.step if found.folder else -1)
            self._folders.forget_after(found.step)
        return found.step

    def _roles(self) -> list[str]:
        return [role for role, spec in self.job.roles.items() if spec.keeps_state]

    def _state_of_driver(self, step: int) -> str:
        """What is to stand in `driver.json`."""
        config, feed, trainer = self.job.config, self.job.feed.state(), self.trainer.state()
        of_samplers = feed.get("sampler", feed.get("sources"))
        check_plain(f"data.sampler={config.data.sampler}", of_samplers)
        check_plain(f"trainer.name={config.trainer.name}", trainer)
        state = {
            "step": step,
            "feed": feed,
            "trainer": trainer,
            "summary": self.summary,
            "watches": {name: watch.state() for name, watch in self.watches.items()},
            "warmed_up": self._warmed_up,
            "data": self._fingerprint,
            "rows": len(self.trainer.data),
            "first_row": self._first_row,
        }
        return json.dumps(state)

    @cached_property
    def _fingerprint(self) -> int:
        return _fingerprint(self.trainer.data)

    @cached_property
    def _first_row(self) -> str:
        """The text of the first row of the data, for the messages of later runs."""
        rows = self.trainer.data.take(range(min(1, len(self.trainer.data))))
        ids = [rows.ragged(name).values.tolist() for name in TOKENS if name in rows.columns]
        return "".join(map(self.job.tokenizer.decode, ids))[:MOST_TEXT]

    def _how_data_differs(self, state: Mapping[str, Any]) -> str:
        """A sentence on the data of a checkpoint and that of this run."""
        if state.get("first_row") is None:  # of an older version
            return ""
        before, now = state["first_row"], self._first_row
        if before == now:
            return f" Its first row is the same; it had {state['rows']} rows."
        same = next(
            (n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b),
            min(len(before), len(now)),
        )
        start = max(0, same - 40)
        return (
            f" The first row differs after {same} characters: it was "
            f"{'...' * bool(start)}{before[start : same + 80]!r} and is "
            f"{'...' * bool(start)}{now[start : same + 80]!r}."
        )


def _evaluated(found: Resumed) -> Mapping[str, float]:
    """The figures that are known of the evaluations of a run."""
    folders = StepFolders(found.folder.parent)
    return {name: value for step in folders.figures().values() for name, value in step.items()}


def _fingerprint(rows: Batch) -> int:
    """Equal for equal data."""
    number = len(rows)
    first = range(min(KNOWN_ROWS, number))
    last = range(max(0, number - KNOWN_ROWS), number)
    columns = [name for name in TOKENS if name in rows.columns]
    known = rows.take([*first, *last]).select(columns).to_pylist()
    return zlib.crc32(repr([number, known]).encode())
