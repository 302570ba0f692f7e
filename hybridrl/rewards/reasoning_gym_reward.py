"""The reward function `reasoning_gym`: the verifier of the task that generated the problem."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hybridrl.errors import MissingPackageError, pip_install

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


def check_reasoning_gym_installed() -> None:
    """Raise a `MissingPackageError` if reasoning-gym is not installed; nothing is imported. Imports
    nothing."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingPackageError(
            "data.task=reasoning_gym and the reward function `reasoning_gym` need the package "
            f"reasoning-gym: {pip_install('reasoning-gym', 'math-verify')}"
        )


@lru_cache(maxsize=256)
def build_reasoning_gym_dataset(task: str, options: str) -> Any:
    """Build reasoning-gym's data set of a task, cached by its parameters.

    Args:
        options: Parameters of the task, as JSON.
    """
    check_reasoning_gym_installed()
    from reasoning_gym import create_dataset

    return create_dataset(task, **json.loads(options))


def _lists_to_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_lists_to_tuples, value))
    return {k: _lists_to_tuples(v) for k, v in value.items()} if isinstance(value, dict) else value
