"""One round of scoring: the tasks that wait, what came of each, and the result."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.rewards.signature import columns_of


@dataclass(frozen=True)
class RewardResult:
    """The scores of a round.

    Attributes:
        scores: the weighted sum of the functions' scores, one per row; NaN for a dropped row.
        columns: `reward/<function>` for each function, and `reward/<function>/<key>` for each
            further number it returned (NaN where it did not), one value per row.
        failures: calls that raised, returned something unusable, died or timed out.
        timeouts: the failures that were time-outs.
        first_failure: the first failure with its traceback, or None.
    """

    scores: list[float]
    columns: dict[str, list[float]]
    failures: int
    timeouts: int
    first_failure: str | None


class Round:
    """A task is one function on one row; its number is `row * functions + function`. Of a function
    that is called once for all rows there is the task on the first row only."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        names: Sequence[str],
        modes: Sequence[tuple[bool, bool]],
        on_error: str,
        error_value: float,
    ) -> None:
        self._rows = rows
        self._names = names
        self._on_error = on_error
        self._failed_value = error_value if on_error == "value" else math.nan
        self._takes_batch = [takes_batch for _, takes_batch in modes]
        tasks = [
            task
            for task in range(len(rows) * len(names))
            if task < len(names) or not self._takes_batch[task % len(names)]
        ]
        # What waits, by whether the function is asynchronous; a process runs one kind at a time.
        self.waiting = {
            kind: deque(task for task in tasks if modes[task % len(names)][0] is kind)
            for kind in (False, True)
        }
        # Asynchronous tasks of a process that died or hung: nobody knows which of them did it, so
        # each gets a process for itself.
        self.suspects: deque[int] = deque()
        self._tried_again: set[int] = set()
        self.unanswered = len(tasks)
        self._scores = [[math.nan] * len(rows) for _ in names]
        self._further: dict[str, list[float]] = {}
        self._failures = self._timeouts = 0
        self._first_failure: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether every task has an outcome."""
        return self.unanswered == 0

    def message(self, tasks: Sequence[int]) -> list[tuple[int, int, dict[str, Any]]]:
        """The tasks as a child reads them: number, function, row."""
        functions = len(self._names)
        return [
            (
                task,
                task % functions,
                columns_of(self._rows)
                if self._takes_batch[task % functions]
                else self._rows[task // functions],
            )
            for task in tasks
        ]

    def score(self, task: int, score: Any, further: dict[str, float]) -> None:
        """Records what the function returned: a number, or a list of them for all rows."""
        row, function = divmod(task, len(self._names))
        self.unanswered -= 1
        if self._takes_batch[function]:
            self._scores[function] = score
            return
        self._scores[function][row] = score
        for key, value in further.items():
            column = f"reward/{self._names[function]}/{key}"
            if column not in self._further:
                self._further[column] = [math.nan] * len(self._rows)
            self._further[column][row] = value

    def may_try_again(self, task: int) -> bool:
        """Of a task whose process was killed: whether it was for the first time, when nobody knows
        that the task was the reason."""
        if task in self._tried_again:
            return False
        self._tried_again.add(task)
        return True

    def fail(self, task: int, reason: str, is_timeout: bool = False) -> None:
        """Records a failed call.

        Raises:
            RewardError: if `on_error` is `fail`.
        """
        row, function = divmod(task, len(self._names))
        self.unanswered -= 1
        self._failures += 1
        self._timeouts += is_timeout
        rows = range(len(self._rows)) if self._takes_batch[function] else (row,)
        for failed in rows:
            self._scores[function][failed] = self._failed_value
        if self._first_failure is None:
            self._first_failure = self._describe(row, function, reason)
        if self._on_error == "fail":
            raise RewardError(
                f"{self._first_failure.rstrip()}\nTo go on in spite of such rows, set "
                "`reward.on_error` to `drop` (leave them out) or `value` (score them "
                "`reward.error_value`)."
            )

    def result(self, weights: Sequence[float]) -> RewardResult:
        """The sums and columns, once every task has an outcome."""
        columns = {
            f"reward/{name}": scores for name, scores in zip(self._names, self._scores, strict=True)
        }
        return RewardResult(
            scores=[
                sum(weight * score for weight, score in zip(weights, row, strict=True))
                for row in zip(*self._scores, strict=True)
            ],
            columns=columns | self._further,
            failures=self._failures,
            timeouts=self._timeouts,
            first_failure=self._first_failure,
        )

    def _describe(self, row: int, function: int, reason: str) -> str:
        prompt, response = (self._rows[row].get(key, "") for key in ("prompt", "response"))
        return (
            f"The reward function `{self._names[function]}` failed on row {row + 1} of "
            f"{len(self._rows)}.\nprompt: {_excerpt(prompt)}\nresponse: {_excerpt(response)}\n"
            f"{reason}"
        )


def _excerpt(text: Any, length: int = 200) -> str:
    shown = repr(text)
    return shown if len(shown) <= length else f"{shown[:length]}... ({len(shown)} characters)"
