"""The reward function `reasoning_gym`: the verifier of the task that generated the problem."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybridrl.system.reasoning_gym_library import (
    build_reasoning_gym_dataset,
    check_reasoning_gym_installed,
)

TASKS_WITH_TUPLES = ("arc_agi", "rearc")
"""Tasks that compare their problems' tuples, which JSON writes as lists."""


def reasoning_gym(
    prompt: str, response: str, answer: str, entry: str, *, strict: bool = False, **row: Any
) -> float:
    """Return the score of the task's own verifier, from 0.0 to 1.0.

    Most tasks give 1.0 to the answer alone and, to a response that holds it among other text, the
    share of its characters that are the answer; many give something for the right form.

    Args:
        entry: The column of the problem, as `data=reasoning_gym` makes it.
        strict: 1.0 if the verifier gives all it has, else 0.0.

    Raises:
        MissingPackageError: if reasoning-gym is not installed.
    """
    problem = json.loads(entry)
    verifier = build_reasoning_gym_dataset(
        problem["task"], json.dumps(problem["options"], sort_keys=True)
    )
    if problem["task"] in TASKS_WITH_TUPLES:
        problem["metadata"] = _lists_to_tuples(problem["metadata"])
    score = float(verifier.score_answer(response.strip(), problem))
    return float(score >= 1.0) if strict else score


def check_reward(options: Mapping[str, Any], timeout_s: float) -> None:
    """Import reasoning-gym, which takes seconds, before a response waits for it.

    Raises:
        MissingPackageError: if it is not installed.
    """
    check_reasoning_gym_installed()
    import reasoning_gym  # noqa: F401


def _lists_to_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_lists_to_tuples, value))
    return {k: _lists_to_tuples(v) for k, v in value.items()} if isinstance(value, dict) else value
