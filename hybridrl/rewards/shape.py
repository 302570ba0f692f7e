"""The reward functions `format` and `length`: how a response is written, not what it says."""

from __future__ import annotations

import re
from typing import Any

from hybridrl.errors import ConfigError


def format(prompt: str, response: str, *, pattern: str, **row: Any) -> float:
    """The whole response, spaces around it aside, matches a regular expression.

    Args:
        pattern: For `re.fullmatch`; a dot also matches a line break. For instance
            `<think>.*</think>\\s*<answer>.*</answer>`.
    """
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def check_pattern(pattern: object) -> None:
    """Raises a `ConfigError` if `format` cannot use the pattern."""
    try:
        re.compile(pattern)  # type: ignore[call-overload]
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"`reward.options.format.pattern` is {pattern!r}, which is no regular expression: "
            f"{error}."
        ) from error


def length(prompt: str, response: str, *, limit: int, ramp: int = 0, **row: Any) -> float:
    """0.0 for a response of at most `limit` characters, -1.0 for one that is too long.

    Args:
        limit: Characters that cost nothing.
        ramp: Characters beyond `limit` over which the score falls to -1.0, in a straight line; 0
            lets it fall at once.
    """
    over = len(response) - limit
    return -min(1.0, over / ramp if ramp > 0 else 1.0) if over > 0 else 0.0
