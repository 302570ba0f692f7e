"""The built-in reward functions. Each is 1.0 for a right response and 0.0 for a wrong one."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(
    r"(?:(?<![\w)])-)?\$?"  # a minus after a digit or a bracket is a subtraction, not a sign
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]+)?"
)


def exact(prompt: str, response: str, answer: str, **row: Any) -> float:
    """The response is the answer, spaces around it aside."""
    return float(response.strip() == answer.strip())


def contains(prompt: str, response: str, answer: str, **row: Any) -> float:
    """The answer occurs somewhere in the response."""
    if not answer.strip():
        raise ValueError("The answer is empty; `contains` would call every response right.")
    return float(answer.strip() in response)


def numeric(prompt: str, response: str, answer: str, **row: Any) -> float:
    """The last number of the response equals the last number of the answer.

    `1,234`, `$5` and `7.50` are read as numbers; of a text with `####`, as GSM8K writes its
    answers, the first number after the last `####` counts.
    """
    expected = final_number(answer)
    if expected is None:
        raise ValueError(f"The answer {answer!r} holds no number, and `numeric` compares numbers.")
    return float(final_number(response) == expected)


def final_number(text: str) -> Decimal | None:
    """The number that `text` ends on; see `numeric`. None if there is none."""
    _, mark, tail = text.rpartition("####")
    found = _NUMBER.findall(tail)
    if not found:
        return None
    number = found[0] if mark else found[-1]
    try:
        return Decimal(number.replace(",", "").replace("$", ""))
    except InvalidOperation:  # an exponent beyond any bound
        return None
