"""What a user's part may have as its state: what comes back from a JSON file as it was."""

from __future__ import annotations

import json
from typing import Any

from hybridrl.errors import ConfigError


def check_plain(whose: str, state: Any) -> None:
    """Refuses what would come back from a file as something else.

    Raises:
        ConfigError: naming whose it is.
    """
    shown = f"a {type(state).__name__} that contains itself, or too large a number"
    try:
        plain = _is_plain(state) and bool(json.dumps(state))
        shown = "" if plain else str(state)[:200]
    except (RecursionError, ValueError):
        plain = False
    if not plain:
        raise ConfigError(
            f"{whose}: its state() cannot be written to a checkpoint. It must be plain data: "
            "Python's numbers, texts, lists, and dictionaries whose keys are texts; it is "
            f"{shown}"
        )


def _is_plain(state: Any) -> bool:
    if isinstance(state, dict):
        return all(isinstance(key, str) and _is_plain(value) for key, value in state.items())
    if isinstance(state, list | tuple):
        return all(map(_is_plain, state))
    return state is None or isinstance(state, bool | int | float | str)
