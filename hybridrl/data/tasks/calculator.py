"""The task of multiplying with a tool: for `47*86=` the model writes `<47*86>`, the calculator says
`4042=`, and the answer is `4042`.

Two-digit products are more than a tiny model can do in its head; copying is not. Few of the
examples use the calculator, so that after supervised training the model guesses as a rule, and
reinforcement has to find out that asking pays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridrl.batch.turn import Turn
from hybridrl.data.row_origin import DATA, RowOrigin
from hybridrl.data.tasks import split_problems

CHARACTERS = "0123456789*=<>"
TOOL_SHARE = 0.2
"""Of the examples that use the calculator; the others give the answer at once."""

_SMALLEST, _LARGEST = 32, 99  # so that every product has four digits
_OPERANDS = _LARGEST - _SMALLEST + 1
_CALL = re.compile(r"<(\d+)\*(\d+)>$")


class Calculator:
    """An episode of one problem: `<a*b>` is answered with the product and `=`; any other turn is
    the final answer, worth 1 if it is correct."""

    async def reset(self, row: Mapping[str, Any]) -> None:
        self._answer = row["answer"]

    async def step(self, response_text: str, response_ids: list[int]) -> Turn:
        call = _CALL.search(response_text)
        if call is None:
            return Turn(reward=float(response_text == self._answer), done=True)
        return Turn(text=f"{int(call[1]) * int(call[2])}=")


def problems(
    count_held_out: int = 256, seed: int = 0, origin: RowOrigin = DATA
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return all 4,624 problems, shuffled by `seed` and split into `(train, held_out)`.

    Raises:
        ConfigError: if `count_held_out` leaves nothing to train on.
    """
    return split_problems("calculator", _OPERANDS, _problem, count_held_out, seed, origin)


def examples(
    count_held_out: int = 256, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the problems of `problems(count_held_out, seed)` answered in turns: directly, or with
    the calculator in a share of `TOOL_SHARE`."""
    random = np.random.default_rng([seed, 1])
    training, held_out = (
        [_example(problem, random.random() < TOOL_SHARE) for problem in part]
        for part in problems(count_held_out, seed)
    )
    return training, held_out


def _problem(left: int, right: int) -> dict[str, str]:
    left, right = left + _SMALLEST, right + _SMALLEST
    return {"prompt": f"{left}*{right}=", "answer": str(left * right)}


def _example(problem: dict[str, str], with_tool: bool) -> dict[str, Any]:
    prompt, answer = problem["prompt"], problem["answer"]
    turns = [f"<{prompt[:-1]}>", f"{answer}=", answer] if with_tool else [answer]
    return {"prompt": prompt, "turns": turns}
