"""Extraction of the answer from a response, for majority votes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.config.constraints import RegexWithGroup
from hybridrl.errors import ConfigError
from hybridrl.rewards.builtin_rewards import find_final_number
from hybridrl.system.boxed_text import find_boxed_text

AnswerExtractor = Callable[[str], str | None]
"""The answer of a response; None: it gives none."""


def _extract_boxed(response: str) -> str | None:
    text = find_boxed_text(response)
    return None if text is None else "".join(text.split())


def _extract_number(response: str) -> str | None:
    number = find_final_number(response)
    return None if number is None else f"{number.normalize():f}"


def _extract_text(response: str) -> str | None:
    return response.strip() or None


_EXTRACTORS: dict[str, AnswerExtractor] = {
    "boxed": _extract_boxed,
    "number": _extract_number,
    "text": _extract_text,
}
_EXTRACTOR_OF_REWARD = {"boxed": "boxed", "math": "boxed", "numeric": "number"}
"""What reward functions of the library compare, where it is not the whole text."""


def resolve_extractor(setting: str, named: str | None, functions: Sequence[Any]) -> AnswerExtractor:
    """Resolve how answers are extracted.

    Args:
        setting: The dotted name of the setting, for errors.
        named: Its value: a name of `_EXTRACTORS`, or a regular expression, whose group at its last
            match is the answer; None: as the first of these reward functions does that is known.
        functions: That score the responses.

    Raises:
        ConfigError: if it is neither.
    """
    if named is None:
        known = [
            _EXTRACTOR_OF_REWARD[one] for one in map(str, functions) if one in _EXTRACTOR_OF_REWARD
        ]
        return _EXTRACTORS[known[0] if known else "text"]
    if named in _EXTRACTORS:
        return _EXTRACTORS[named]
    if refusal := RegexWithGroup().refusal(named):
        raise ConfigError(f"{setting}={named}: {refusal}; or one of {', '.join(_EXTRACTORS)}.")
    pattern = re.compile(named, re.DOTALL)

    def last_group(response: str) -> str | None:
        found = [match[1] for match in pattern.finditer(response) if match[1] is not None]
        return (found[-1].strip() or None) if found else None

    return last_group
