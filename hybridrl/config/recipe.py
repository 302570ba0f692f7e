"""Recipes: files of settings in the command line's own words, one `key: value` a line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hybridrl.errors import ConfigError

PREFIX = "recipe="


def expand(arguments: Sequence[str]) -> list[str]:
    """Replaces each `recipe=<file>` by the overrides in the file; what follows it wins.

    Raises:
        ConfigError: if the file is missing, or is not a flat mapping of settings.
    """
    expanded: list[str] = []
    for argument in arguments:
        if argument.startswith(PREFIX):
            expanded += _read(Path(argument.removeprefix(PREFIX)))
        else:
            expanded.append(argument)
    return expanded


def _read(path: Path) -> list[str]:
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"recipe={path} could not be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe={path} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"recipe={path} must hold lines such as `trainer.steps: 100`.")
    for key, value in settings.items():
        if isinstance(value, dict):
            raise ConfigError(
                f"recipe={path}: write `{key}.{next(iter(value), 'name')}: ...` on a line of its "
                "own; a recipe is flat, like the command line."
            )
    return [f"{key}={_spell(value)}" for key, value in settings.items()]


def _spell(value: Any) -> str:
    """A value in the grammar of overrides."""
    if isinstance(value, list):
        return f"[{','.join(_spell(item) for item in value)}]"
    if isinstance(value, str):
        plain = value.replace("_", "").isalnum() and not value[0].isdigit()
        # A backslash is one, except before a quote.
        escaped = re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + "\\'" * len(m[2]), value)
        return value if plain else f"'{escaped}'"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
