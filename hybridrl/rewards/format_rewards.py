"""The reward functions `format`, `length` and `target_length`, which judge the form of a response,
not its content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hybridrl.config.setting import Setting
from hybridrl.errors import ConfigError


def format(prompt: str, response: str, *, pattern: str, **row: Any) -> float:
    r"""The whole response, spaces around it aside, matches a regular expression.

    Args:
        pattern: For `re.fullmatch`; a dot also matches a line break. For instance
            `<think>.*</think>\s*<answer>.*</answer>`.
    """
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def check_format_pattern(pattern: Any, setting: Setting) -> None:
    """Raise a `ConfigError` if `format` cannot use the pattern."""
    try:
        re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"`{setting}` is {pattern!r}, which is no regular expression: {error}."
        ) from error


def length(prompt: str, response: str, *, limit: int, ramp: int = 0, **row: Any) -> float:
    """Return 0.0 for a response of at most `limit` characters, down to -1.0 for longer ones.

    Args:
        limit: Characters that cost nothing.
        ramp: Characters beyond `limit` over which the score falls to -1.0, in a straight line; 0
            lets it fall at once.
    """
    over = len(response) - limit
    return -min(1.0, over / ramp if ramp > 0 else 1.0) if over > 0 else 0.0


def target_length(
    prompt: str,
    response: str,
    response_token_ids: Sequence[int] = (),
    *,
    column: str = "target",
    factor: float = 0.0003,
    **row: Any,
) -> float:
    """Return minus `factor` times the difference in tokens between the response and the length that
    the row asks for, which the prompt should tell, too. L1-Exact, Aggarwal and Welleck 2025,
    arXiv:2503.04697, equation 1.

    Args:
        column: Of the data, with the number of tokens.
    """
    target = row.get(column)
    if isinstance(target, bool) or not isinstance(target, int | float):
        raise ValueError(
            f"The row has {target!r} in the column `{column}` (its option `column`), and "
            "`target_length` needs a number of tokens."
        )
    return -factor * abs(target - len(response_token_ids))
