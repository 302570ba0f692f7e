"""Extraction of the answer from a response, for majority votes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.config.constraints import Regex
from hybridrl.errors import ConfigError
from hybridrl.rewards.builtin_rewards import boxed_text, final_number

Extract = Callable[[str], str | None]
"""The answer of a response; None: it gives none."""


def _boxed(response: str) -> str | None:
    text = boxed_text(response)
    return None if text is None else "".join(text.split())


def _number(response: str) -> str | None:
    number = final_number(response)
    return None if number is None else f"{number.normalize():f}"


def _text(response: str) -> str | None:
    return response.strip() or None


KNOWN: dict[str, Extract] = {"boxed": _boxed, "number": _number, "text": _text}
OF_FUNCTIONS = {"boxed": "boxed", "math": "boxed", "numeric": "number"}
"""What reward functions of the library compare, where it is not the whole text."""


def extraction(setting: str, named: str | None, functions: Sequence[Any]) -> Extract:
    """Resolve how answers are extracted.

    Args:
        setting: The dotted name of the setting, for errors.
        named: Its value: a name of `KNOWN`, or a regular expression, whose group at its last match
            is the answer; None: as the first of these reward functions does that is known.
        functions: That score the responses.

    Raises:
        ConfigError: if it is neither.
    """
    if named is None:
        known = [OF_FUNCTIONS[one] for one in map(str, functions) if one in OF_FUNCTIONS]
        return KNOWN[known[0] if known else "text"]
    if named in KNOWN:
        return KNOWN[named]
    if refusal := Regex().refusal(named):
        raise ConfigError(f"{setting}={named}: {refusal}; or one of {', '.join(KNOWN)}.")
    pattern = re.compile(named, re.DOTALL)

    def last_group(response: str) -> str | None:
        found = [match[1] for match in pattern.finditer(response) if match[1] is not None]
        return (found[-1].strip() or None) if found else None

    return last_group
