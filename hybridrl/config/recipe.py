"""Recipes: flat files of settings, one `key: value` a line with the names of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hybridrl.errors import ConfigError
from hybridrl.system.redaction import register_secrets

RECIPE_KEY = "recipe"
"""`recipe=<file>` stands for the settings in the file; what follows it wins."""


def read_recipe(path: Path) -> dict[str, Any]:
    """Read the settings of a recipe, by dotted name.

    Raises:
        ConfigError: if the file is missing, or is not a flat mapping of settings.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        register_secrets(text)
        settings = yaml.safe_load(text)
    except (OSError, UnicodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(
            f"recipe={path} could not be read: {why}. Name a file of settings."
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # without the line itself: it may be a secret
        place = "" if mark is None else f" in line {mark.line + 1}"
        why = getattr(error, "problem", None) or "it cannot be read"
        raise ConfigError(f"recipe={path} is not YAML{place}: {why}.") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"recipe={path} must hold lines such as `trainer.steps: 100`.")
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            raise ConfigError(
                f"recipe={path}: write `{key}.{next(iter(value))}: ...` on a line of its own; a "
                "recipe is flat, like the command line."
            )
    return {str(key): value for key, value in settings.items()}
