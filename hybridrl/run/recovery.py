"""Recovery from lost workers: whether the run restarts, from which step, and what the loss cost.
`RunLoop` then restarts the workers, by `Job.restart`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybridrl.config.schema import Config
from hybridrl.errors import LostError
from hybridrl.run_files.run_paths import RECOVERIES
from hybridrl.run_files.run_reader import RunReader
from hybridrl.system.formatting import format_seconds
from hybridrl.system.storage import explain_write_errors, to_json


@dataclass
class _WorkerLoss:
    """A loss that the run has not recovered from yet; times are seconds of `time.perf_counter`."""

    what: str
    after_step: int
    seconds_train: float
    since: float
    noticed: float = field(default_factory=time.perf_counter)


class RunRecovery:
    """The recoveries of a run: the limit on restarts, and `recoveries.jsonl` with a line for each,
    also of earlier processes.

    Args:
        run: The run's folder.
    """

    def __init__(self, config: Config, run: Path) -> None:
        self._config = config
        self._run = run
        self._loss: _WorkerLoss | None = None
        self._in_a_row = 0
        self._from_step = -1
        self._before = ""

    def begin(
        self, lost: LostError, from_step: int, summary: Mapping[str, Any], since: float
    ) -> None:
        """Record a loss and decide whether the run restarts.

        Args:
            from_step: What the run can go on from.
            summary: Of the run until now.
            since: When its last step ended, of `time.perf_counter`.

        Raises:
            LostError: this one, with what to do, if the run is not to go on.
        """
        self._admit(lost, from_step)
        if self._loss is not None:  # lost again before it went on
            since = self._end(from_step, 0.0, None)
        what = str(lost).partition("\n")[0]
        self._loss = _WorkerLoss(what, summary["steps"], summary["seconds_train"], since)

    def end(
        self, step: int, summary: Mapping[str, Any], devices: int, from_memory: bool = False
    ) -> str:
        """Record that the run continues from this step, and return a sentence about it; empty if
        nothing was lost. `from_memory`: whether the checkpoint was read from the memory of
        nodes."""
        if (loss := self._loss) is None:
            return ""
        again = max(0.0, loss.seconds_train - summary["seconds_train"])
        seconds = format_seconds(self._end(step, again, devices, from_memory) - loss.noticed)
        repeated = loss.after_step - step
        steps = f"{repeated} {'step is' if repeated == 1 else 'steps are'}"
        return (
            f"Going on after {seconds} from "
            f"{f'the checkpoint of step {step}' if step else 'the beginning'}"
            f"{', read from memory,' if from_memory else ''} with {devices} "
            f"{'device' if devices == 1 else 'devices'}; {steps} repeated."
        )

    def count(self, summary: dict[str, Any]) -> None:
        """Add the number of recoveries to the summary, and the seconds that they cost: without
        work, and for repeated steps."""
        if rows := RunReader(self._run).recoveries():
            summary["recoveries"] = len(rows)
            summary["seconds_lost"] = round(sum(row["seconds_lost"] for row in rows), 1)

    def _admit(self, lost: LostError, from_step: int) -> None:
        most = self._config.recover.max_restarts
        if not self._config.checkpoint.wanted:
            raise LostError(
                f"{lost}\nWith checkpoint.every=<steps> the job would go on from its newest "
                "checkpoint."
            ) from lost
        if from_step > self._from_step:
            self._in_a_row, self._before = 0, ""
        self._from_step = from_step
        self._in_a_row += 1
        if lost.if_again and lost.if_again == self._before:
            raise LostError(f"{lost}\n{lost.if_again}") from lost
        self._before = lost.if_again
        if self._in_a_row > most:
            tried = f" {most} times in a row, without a new checkpoint, workers had been lost"
            raise LostError(
                f"{lost}\nThe job does not go on (recover.max_restarts={most})."
                f"{tried + ' before.' if most else ''}"
            ) from lost

    def _end(
        self, step: int, again: float, devices: int | None, from_memory: bool = False
    ) -> float:
        """Write the entry of the loss and return the time now."""
        loss, self._loss, now = self._loss, None, time.perf_counter()
        assert loss is not None
        row = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "lost": loss.what,
            "after_step": loss.after_step,
            "from_step": step,
            "from_memory": from_memory,
            "seconds": round(now - loss.noticed, 1),
            "seconds_lost": round(now - loss.since + again, 1),
            "devices": devices,
        }
        path = self._run / RECOVERIES
        with explain_write_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(to_json(row) + "\n")
        return now
