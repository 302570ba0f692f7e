"""Watchers: what observes a run and has a say in how it goes on. This is their base.

A new watcher is a file beside this one, and a line in `RunLoop._begin_run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hybridrl.batch.call_record import CallRecord
from hybridrl.trainers.trainer import StepResult

Finding = str | Mapping[str, float]
"""A sentence for the user, or metrics that join those of the step."""


class EndRun(Exception):  # noqa: N818 (it is no error)
    """The run is to end early: after an evaluation of the sets that are due at the end, and with a
    checkpoint. Its text says why, without a full stop."""


class RewindRequest(Exception):  # noqa: N818 (it is no error: the loop goes on from a checkpoint)
    """A request to return to the newest checkpoint.

    Attributes:
        groups: Numbers of the prompts to leave out.
    """

    def __init__(self, step: int, groups: Sequence[int]) -> None:
        super().__init__(step)
        self.step, self.groups = step, groups


class FinishedStep(NamedTuple):
    """A step whose updates are done.

    Attributes:
        records: Of its calls, by every rank.
        updates: The metrics of each update.
        metrics: All that are known of the step so far.
        groups: Numbers of its prompts.
    """

    number: int
    result: StepResult
    records: Sequence[CallRecord]
    updates: Sequence[Mapping[str, float]]
    metrics: dict[str, float]
    groups: Sequence[int] = ()


class FinishedEvaluation(NamedTuple):
    """An evaluation of one or more sets after a step, 0 being before the first.

    Attributes:
        figures: Metrics of all its sets.
        calls: The records of the calls for each set, by a sentence that says which they were.
        accuracy: Of the held-out rows, the first of the run and this one, where it has them.
        covers: Whether the set that a figure is of was among those that were evaluated.
    """

    step: int
    figures: Mapping[str, float]
    calls: Mapping[str, Sequence[CallRecord]] = {}
    accuracy: tuple[float, float] | None = None
    covers: Callable[[str], bool] = lambda figure: True


class Watcher:
    """Observes a run. Its hooks yield what is to be shown and written, and raise what ends the run
    or has it go back (`EndRun`, `RewindRequest`, an error). All watchers are asked, and what was
    found is written, before the first of what they raised is raised again."""

    def on_resume(self, step: int) -> Iterable[Finding]:
        """The steps up to this one are done, and the next begins."""
        return ()

    def on_step_end(self, step: FinishedStep) -> Iterable[Finding]:
        """The updates of a step are done."""
        return ()

    def on_evaluation(self, evaluation: FinishedEvaluation) -> Iterable[Finding]:
        """Sets were evaluated."""
        return ()

    def on_rewind(self, rewind: RewindRequest, step: int) -> Iterable[Finding]:
        """The run goes back to the checkpoint of this step."""
        return ()

    def on_run_end(self) -> Iterable[Finding]:
        """Called when the last step is done."""
        return ()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, as plain data."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned in an earlier process."""
