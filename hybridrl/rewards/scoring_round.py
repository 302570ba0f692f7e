"""One round of scoring: which function calls are pending, their results, and the sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from hybridrl.config.setting import Setting
from hybridrl.errors import RewardError
from hybridrl.processes.pool import WorkItem
from hybridrl.rewards.options import REWARD
from hybridrl.rewards.returned_scores import RowScore, StepRewards
from hybridrl.rewards.signature import merge_all_rows, merge_group_rows


@dataclass(frozen=True)
class RewardResult:
    """The scores of all rows of a round.

    Attributes:
        scores: the weighted sum of the functions' scores, one per row; NaN for a dropped row, and
            for one of which no function has anything to say.
        columns: `reward/<function>` for each function, and `reward/<function>/<key>` for each
            further number it returned (NaN where it did not), one value per row; `check/...` for
            those that are only looked at.
        failures: calls that raised, returned something unusable, died or timed out.
        timeouts: the failures that were time-outs.
        first_failure: the first failure with its traceback, or None.
        outcomes: the scores without the rewards of steps; NaN where no function gave more.
        steps: of each row, where its steps end (characters) and their weighted rewards, in order.
    """

    scores: list[float]
    columns: dict[str, list[float]]
    failures: int
    timeouts: int
    first_failure: str | None
    outcomes: list[float]
    steps: list[StepRewards]


class ScoringRound:
    """The function calls of one round. A call's number is `row * functions + function`; functions
    called once for several rows have a call for the first of them only.

    Args:
        columns: Of the functions' scores, `reward/<function>` or `check/<function>`.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        columns: Sequence[str],
        modes: Sequence[tuple[bool, str]],
        on_error: str,
        error_value: float,
        groups: Sequence[int] | None = None,
        group: Setting = REWARD.group,
    ) -> None:
        self._group = group
        self._rows = rows
        self._columns = columns
        self._on_error = on_error
        self._failed_value = error_value if on_error == "value" else math.nan
        self._called_for = [kind for _, kind in modes]
        self._together = {
            "row": {row: [row] for row in range(len(rows))},
            "group": {
                members[0]: members
                for members in group_neighbors(range(len(rows)) if groups is None else groups)
            },
            "rows": {0: list(range(len(rows)))} if rows else {},
        }
        self._modes = modes
        self._tasks = [
            row * len(columns) + function
            for row in range(len(rows))
            for function, kind in enumerate(self._called_for)
            if row in self._together[kind]
        ]
        self._unanswered = len(self._tasks)
        nothing = RowScore(math.nan, math.nan)
        self._answers = [[nothing] * len(rows) for _ in columns]
        self._further: dict[str, list[float]] = {}
        self._failures = self._timeouts = 0
        self._first_failure: str | None = None

    @property
    def is_done(self) -> bool:
        return self._unanswered == 0

    def items(self, limit_s: float) -> list[WorkItem]:
        """Return the calls as items of work, with the seconds that each may take."""
        items = []
        for task in self._tasks:
            is_async, _ = self._modes[task % len(self._columns)]
            items.append(WorkItem(task, partial(self.payload, task), limit_s, not is_async))
        return items

    def payload(self, task: int, attempt: int = 0) -> tuple[int, dict[str, Any]]:
        """Return the function of a call, and the row or merged rows that it gets."""
        row, function = divmod(task, len(self._columns))
        kind = self._called_for[function]
        if kind == "row":
            return function, self._rows[row]
        together = [self._rows[number] for number in self._together[kind][row]]
        merge = merge_all_rows if kind == "rows" else merge_group_rows
        return function, merge(together)

    def score(self, task: int, answers: Sequence[RowScore]) -> None:
        first, function = divmod(task, len(self._columns))
        self._unanswered -= 1
        rows = self._together[self._called_for[function]][first]
        for row, answer in zip(rows, answers, strict=True):
            self._answers[function][row] = answer
            for key, value in (answer.further or {}).items():
                column = f"{self._columns[function]}/{key}"
                if column not in self._further:
                    self._further[column] = [math.nan] * len(self._rows)
                self._further[column][row] = value

    def fail(self, task: int, reason: str, is_timeout: bool = False) -> None:
        """Record a failed call.

        Raises:
            RewardError: if `on_error` is `fail`.
        """
        row, function = divmod(task, len(self._columns))
        self._unanswered -= 1
        self._failures += 1
        self._timeouts += is_timeout
        for failed in self._together[self._called_for[function]][row]:
            self._answers[function][failed] = RowScore(self._failed_value, self._failed_value)
        if self._first_failure is None:
            self._first_failure = self._describe(row, function, reason)
        if self._on_error == "fail":
            raise RewardError(
                f"{self._first_failure.rstrip()}\nTo go on in spite of such rows, set "
                f"`{self._group}.on_error` to `drop` (leave them out) or `value` (score them "
                f"`{self._group}.error_value`)."
            )

    def result(self, weights: Sequence[float]) -> RewardResult:
        """Return the weighted sums and the columns, once every call has a result."""
        columns = {
            column: [math.nan if a.score is None else a.score for a in answers]
            for column, answers in zip(self._columns, self._answers, strict=True)
        }
        by_row = list(zip(*self._answers, strict=True))
        return RewardResult(
            scores=[_weighted_sum(weights, [answer.score for answer in row]) for row in by_row],
            outcomes=[
                _weighted_sum(weights, [answer.outcome for answer in row], math.nan)
                for row in by_row
            ],
            steps=[
                sorted(
                    (end, weight * reward)
                    for weight, answer in zip(weights, row, strict=True)
                    for end, reward in (answer.steps if weight else ())
                )
                for row in by_row
            ],
            columns=columns | self._further,
            failures=self._failures,
            timeouts=self._timeouts,
            first_failure=self._first_failure,
        )

    def _describe(self, row: int, function: int, reason: str) -> str:
        prompt, response = (self._rows[row].get(key, "") for key in ("prompt", "response"))
        return (
            f"The reward function `{self._columns[function].partition('/')[2]}` failed on row "
            f"{row + 1} of {len(self._rows)}.\nprompt: {_excerpt(prompt)}\nresponse: "
            f"{_excerpt(response)}\n{reason}"
        )


def _weighted_sum(
    weights: Sequence[float], scores: Sequence[float | None], unasked: float = 0.0
) -> float:
    """Return the weighted sum of the scores that functions gave; NaN if none gave any, `unasked` if
    all weights are 0, which are those of functions that are only recorded."""
    if not any(weights):
        return unasked
    every = zip(weights, scores, strict=True)
    counted = [weight * score for weight, score in every if weight and score is not None]
    return sum(counted) if counted else math.nan


def group_neighbors(groups: Iterable[int]) -> list[list[int]]:
    """Return the rows of each run of adjacent rows of one group."""
    return [
        [row for row, _ in members] for _, members in groupby(enumerate(groups), lambda at: at[1])
    ]


def _excerpt(text: Any, length: int = 200) -> str:
    shown = repr(text)
    return shown if len(shown) <= length else f"{shown[:length]}... ({len(shown)} characters)"
