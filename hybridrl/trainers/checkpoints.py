"""Checkpoints of whole steps, and the state of a run that goes on from one.

`<run>/checkpoints/step-000020/` holds a folder for each role that trains, written by its workers,
and `driver.json`: what the driver knows at the end of the step. No call is under way then, so
nothing else is to be kept.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import ConfigError, DataError, HybridRLError
from hybridrl.observe.step_folders import StepFolders
from hybridrl.observe.storage import explain_write_errors
from hybridrl.trainers.resumed import Resumed
from hybridrl.trainers.warmup import load_copies, warms_up

if TYPE_CHECKING:
    from hybridrl.core.batch import Batch
    from hybridrl.job import Job
    from hybridrl.trainers.base import Trainer

DRIVER = "driver.json"
TOKENS = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids")
"""Columns by which a data set is known again."""
KNOWN_ROWS = 100
"""So many of the first and of the last rows are compared."""


class Checkpoints:
    """Saves the steps of a job and brings one back.

    Args:
        trainer: The job's driver program.
        summary: Of the run so far; what is brought back is put into it.
    """

    def __init__(self, job: Job, trainer: Trainer, summary: dict[str, Any]) -> None:
        self.job, self.trainer, self.summary = job, trainer, summary
        self._folders = StepFolders(job.directory.path)
        self._warmed_up = warms_up(job)

    def is_due(self, step: int, last: int) -> bool:
        """Whether this step is to be saved."""
        every = self.job.config.checkpoint.every
        return bool(every) and (step % every == 0 or step == last)

    def save(self, step: int) -> float:
        """Saves a step, after which no call may be under way, and removes the oldest; gives the
        seconds that it took.

        Raises:
            ConfigError: if a part of the user's has a state that is no plain data.
            StorageError: if it cannot be written; the checkpoint before it stays.
        """
        begin = time.perf_counter()
        part = self._folders.begin(step)
        try:
            saving = [
                self.job.groups[role].save_state(str((part / role).absolute()))
                for role in self._roles()
            ]
            for handle in saving:
                handle.get()
            self._write_driver(part / DRIVER, step)
            self._folders.complete(step)
        except (HybridRLError, OSError):
            self._folders.discard(step)
            raise
        self._folders.prune(self.job.config.checkpoint.keep_last)
        self.job.executor.take_records()
        # Samples of later steps must not depend on weights that a resumed run does not have.
        self.job.publish()
        return time.perf_counter() - begin

    def newest(self) -> Resumed:
        """What a run that has lost its workers goes on from: its newest whole step, or its
        beginning.

        Raises:
            ConfigError: if there are steps and none of them is whole.
        """
        step, notices = self._folders.newest()
        run = self.job.directory.path
        if step is None:
            return Resumed(run)
        return Resumed(run, step, self._folders.at(step), notices)

    def load(self, found: Resumed) -> int:
        """Goes on from a checkpoint, or from the beginning if there is none; gives the number of
        steps that are done. Later ones leave nothing behind.

        Raises:
            ConfigError: if it is of another model or program.
            DataError: if it is of other data.
        """
        if found.folder is not None:
            state = json.loads((found.folder / DRIVER).read_text(encoding="utf-8"))
            if _fingerprint(self.trainer.data) != state["data"]:
                raise DataError(
                    f"{found.folder} was written by a run on other data than this one's "
                    f"{len(self.trainer.data)} rows, or on other tokens of them. Resume with the "
                    "data and the tokenizer of that run, or train on from its model in a new run."
                )
            self.job.feed.load_state(state["feed"])
            self.trainer.load_state(state["trainer"])
            self.trainer.figures |= state["figures"]
            loading = [
                self.job.groups[role].load_state(str((found.folder / role).absolute()))
                for role in self._roles()
            ]
            for handle in loading:
                handle.get()
            # As that run did, whatever the settings of this one say.
            self._warmed_up = state["warmed_up"]
            if self._warmed_up:
                load_copies(self.job, but=self._roles())
            self.job.publish()
            self.job.executor.take_records()
            self.summary |= state["summary"]
        if found.run is not None:  # only now, when nothing can be wrong any more
            self.job.directory.forget_after(found.step if found.folder else -1)
            self._folders.forget_after(found.step)
        return found.step

    def _roles(self) -> list[str]:
        return [role for role, spec in self.job.roles.items() if spec.keeps_state]

    def _write_driver(self, file: Path, step: int) -> None:
        config, feed, trainer = self.job.config, self.job.feed.state(), self.trainer.state()
        _check_plain(f"data.sampler={config.data.sampler}", feed.get("sampler"))
        _check_plain(f"trainer.name={config.trainer.name}", trainer)
        state = {
            "step": step,
            "feed": feed,
            "trainer": trainer,
            "figures": self.trainer.figures,
            "summary": self.summary,
            "warmed_up": self._warmed_up,
            "data": _fingerprint(self.trainer.data),
        }
        with explain_write_errors(file), file.open("w", encoding="utf-8") as written:
            json.dump(state, written)
            written.flush()
            os.fsync(written.fileno())


def _check_plain(whose: str, state: Any) -> None:
    """Refuses what would come back from a file as something else.

    Raises:
        ConfigError: naming whose it is.
    """
    if not _is_plain(state):
        raise ConfigError(
            f"{whose}: its state() cannot be written to a checkpoint. It must be plain data: "
            "Python's numbers, texts, lists, and dictionaries whose keys are texts; it is "
            f"{str(state)[:200]}"
        )


def _is_plain(state: Any) -> bool:
    if isinstance(state, dict):
        return all(isinstance(key, str) and _is_plain(value) for key, value in state.items())
    if isinstance(state, list | tuple):
        return all(map(_is_plain, state))
    return state is None or isinstance(state, bool | int | float | str)


def _fingerprint(rows: Batch) -> int:
    """Equal for equal data."""
    number = len(rows)
    first = range(min(KNOWN_ROWS, number))
    last = range(max(0, number - KNOWN_ROWS), number)
    columns = [name for name in TOKENS if name in rows.columns]
    known = rows.take([*first, *last]).select(columns).to_pylist()
    return zlib.crc32(repr([number, known]).encode())
