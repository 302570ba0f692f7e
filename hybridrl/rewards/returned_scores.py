"""Parsing the return values of reward functions into `RowScore`s."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybridrl.batch.call_record import fault_of_name

MAX_SCORE = 3.4028234e38
"""Scores become float32, in which anything larger is infinite."""
StepRewards = list[tuple[int, float]]


class RowScore(NamedTuple):
    """The scores that a function returned for one row.

    Attributes:
        score: The whole of it, its steps included; None: it has nothing to say of this row.
        outcome: The same without the steps; None: there is nothing else.
        further: Numbers to be kept beside it.
        steps: Of each step of the response, the character behind its end, and its reward.
    """

    score: float | None
    outcome: float | None
    further: Mapping[str, float] | None = None
    steps: Sequence[tuple[int, float]] = ()


def parse_row_score(returned: Any, response: str) -> RowScore | str:
    """Parse what a function returned for one row: a number, or a dictionary with `score`, `steps`
    and further numbers. Return the end of an error sentence if it is neither."""
    if not isinstance(returned, Mapping):
        score = _read_number(returned)
        if score is None:
            hint = ", which is no number"
            if inspect.iscoroutine(returned):
                returned.close()
                hint = "; a function that returns a coroutine must be declared `async def`"
            return _format_value(returned) + hint
        return _build_row_score(score, {}, [])
    if not {"score", "steps"} & returned.keys():
        keys = ", ".join(repr(key) for key in returned)
        return f"a dictionary without the key 'score'; its keys are: {keys or 'none'}"
    score = _read_number(returned["score"]) if "score" in returned else math.nan
    if score is None:
        return (
            f"a dictionary whose 'score' is {_format_value(returned['score'])}, which is no number"
        )
    for key in map(str, returned):
        if not key or key.split("/")[-1] == "std":
            return (
                f"a dictionary with the key {key!r}, and each number has a metric of its name, "
                "beside which `/std` is its standard deviation: call it otherwise"
            )
        if fault := fault_of_name(key):
            return f"a dictionary with a number {fault}"
    steps = _parse_steps(returned.get("steps", ()), len(response))
    if isinstance(steps, str):
        return steps
    beside = {str(k): _read_number(v) for k, v in returned.items() if k not in ("score", "steps")}
    known = {key: value for key, value in beside.items() if value is not None}
    if "score" not in returned:
        total = sum(reward for _, reward in steps)
        return RowScore(total, None, known, steps)
    return _build_row_score(score, known, steps)


def parse_batch_scores(returned: Any, responses: list[str]) -> list[RowScore] | str:
    """Parse what a function that is called for several rows returned: a list with a number, a
    dictionary or None for each row."""
    if hasattr(returned, "tolist"):  # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return f"{_format_value(returned)}, and one that is called for several rows returns a list"
    if len(returned) != len(responses):
        return f"{len(returned)} scores for {len(responses)} completions"
    found = []
    for row, (value, response) in enumerate(zip(returned, responses, strict=True), start=1):
        answer = RowScore(None, None) if value is None else parse_row_score(value, response)
        if isinstance(answer, str):
            return f"for completion {row} {answer}"
        found.append(answer)
    return found


def _build_row_score(score: float, further: dict[str, float], steps: StepRewards) -> RowScore | str:
    total = score + sum(reward for _, reward in steps)
    if not abs(total) <= MAX_SCORE:
        return f"{total}, and a score must be a finite number of 32 bits"
    return RowScore(total, score, further, steps)


def _parse_steps(given: Any, length: int) -> StepRewards | str:
    expected = "expected pairs of the character behind a step's end, and its reward"
    if hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, list | tuple):
        return f"a dictionary whose 'steps' are {_format_value(given)}, {expected}"
    steps: StepRewards = []
    for pair in given:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return f"a dictionary with {_format_value(pair)} among its 'steps', {expected}"
        end, reward = map(_read_number, pair)
        if end is None or reward is None or not end.is_integer() or not abs(reward) <= MAX_SCORE:
            return f"a dictionary with {_format_value(pair)} among its 'steps', {expected}"
        if not 0 < end <= length:
            return (
                f"a step that ends at character {end:g}, and the response has {length}: a step "
                "ends behind its last character"
            )
        steps.append((int(end), reward))
    return sorted(steps)


def _read_number(value: Any) -> float | None:
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # an array or tensor of one number
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:  # a whole number that no float holds
        return math.inf


def _format_value(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:80] + '...'} ({type(value).__name__})"
