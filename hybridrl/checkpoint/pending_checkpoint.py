"""A checkpoint that workers write while the program goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybridrl.system.locations import Location

if TYPE_CHECKING:
    from hybridrl.checkpoint.tensors.rank_manifest import SaveResult
    from hybridrl.controller import Handle


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
        self._answers: list[SaveResult] = []
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
        return self._note(asked)

    def wait(self, limit: float | None) -> bool:
        """Wait at most `limit` seconds and return whether everything is on the disk. Raises as
        `is_written`."""
        until = math.inf if limit is None else time.perf_counter() + limit
        asked = [group.finish_saving(wait=True) for group in self._groups]
        for handle in asked:
            left = None if limit is None else max(0.0, until - time.perf_counter())
            if not handle.done_within(left):
                return False
        return self._note(asked)

    def figures(self) -> dict[str, float]:
        """Return metrics: seconds that training waited, seconds of the slowest writer and of the
        slowest copy, and bytes of all ranks."""
        found = {
            "checkpoint/stall_seconds": self.stall,
            "checkpoint/write_seconds": max((one.seconds for one in self._answers), default=0.0),
            "checkpoint/bytes": float(sum(one.bytes for one in self._answers)),
        }
        if self._copies:
            slowest = max((one.copy_seconds for one in self._answers), default=0.0)
            found["checkpoint/copy_seconds"] = slowest
        return found

    def _note(self, asked: list[Handle]) -> bool:
        answers = [answer for handle in asked for answer in handle.get()]
        if any(answer is None for answer in answers):
            return False
        self._answers = answers
        self.copy_fault = next((a.copy_fault for a in answers if a.copy_fault), "")
        return True
