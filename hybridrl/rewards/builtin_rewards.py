"""The built-in reward functions. Those here are 1.0 for a right response and 0.0 for a wrong one.

The functions in `__all__` are built-in ones; their keyword-only parameters are options (see
`options`).
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from hybridrl.rewards.format_rewards import format, length, target_length
from hybridrl.rewards.math_reward import math
from hybridrl.rewards.reasoning_gym_reward import reasoning_gym
from hybridrl.system.boxed_text import find_boxed_text

__all__ = [
    "boxed",
    "contains",
    "exact",
    "format",
    "length",
    "math",
    "numeric",
    "reasoning_gym",
    "target_length",
]

QUICK_FUNCTIONS = frozenset(
    ("boxed", "contains", "exact", "format", "length", "numeric", "target_length")
)
"""The built-in functions that only compare texts: hundreds of responses in the time of a call."""

_NUMBER = re.compile(
    r"(?:(?<![\w)])-)?\$?"  # a minus after a digit or a bracket is a subtraction, not a sign
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]+)?"
)


def exact(prompt: str, response: str, answer: str, **row: Any) -> float:
    """Return 1.0 if the response equals the reference answer, ignoring white space at both ends."""
    return float(response.strip() == answer.strip())


def contains(prompt: str, response: str, answer: str, **row: Any) -> float:
    """Return 1.0 if the reference answer occurs in the response."""
    if not answer.strip():
        raise ValueError("The answer is empty; `contains` would call every response right.")
    return float(answer.strip() in response)


def numeric(prompt: str, response: str, answer: str, **row: Any) -> float:
    """Return 1.0 if the last number of the response equals the last number of the reference answer.

    `1,234`, `$5` and `7.50` are read as numbers; of a text with `####`, as GSM8K writes its
    answers, the first number after the last `####` counts.
    """
    expected = find_final_number(answer)
    if expected is None:
        raise ValueError(f"The answer {answer!r} holds no number, and `numeric` compares numbers.")
    return float(find_final_number(response) == expected)


def boxed(prompt: str, response: str, answer: str, **row: Any) -> float:
    r"""The last `\boxed{...}` of the response holds the answer: the same text, spaces aside, or
    the same number.

    The answer may be boxed as well, at the end of a whole solution. For answers that may be
    written in many ways, see `math`.
    """
    expected = _normalize_answer(find_boxed_text(answer) or answer)
    if expected == "":
        raise ValueError("The answer is empty; `boxed` has nothing to compare with.")
    found = find_boxed_text(response)
    if found is None:
        return 0.0
    return float(_normalize_answer(found) == expected)


def _normalize_answer(text: str) -> str | Decimal:
    """Return the text as a number if it is one, else without white space."""
    text = "".join(text.split())
    number = find_final_number(text) if _NUMBER.fullmatch(text) else None
    return text if number is None else number


def find_final_number(text: str) -> Decimal | None:
    """Return the number that `text` ends on (see `numeric`); None if there is none."""
    _, mark, tail = text.rpartition("####")
    found = _NUMBER.findall(tail)
    if not found:
        return None
    number = found[0] if mark else found[-1]
    try:
        return Decimal(number.replace(",", "").replace("$", ""))
    except InvalidOperation:  # an exponent beyond any bound
        return None
