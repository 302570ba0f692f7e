"""The steps that a command line names, and how what was found of them is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from rich.console import Console

from hybridrl.checkpoint.store import StepFolders
from hybridrl.config.resume import COMPLETE, Source, named_source
from hybridrl.errors import ConfigError

_CURE = "Bring it back from a copy, or from the folder of a step."


def one_step(named: str) -> tuple[Source, StepFolders, int]:
    """The step that is named, of a run the newest that is complete.

    Raises:
        ConfigError: if it is not complete, or if there is none.
    """
    source = named_source("", named)
    folders = StepFolders(source.steps)
    steps = folders.steps()
    step = source.step if source.step is not None else max(steps, default=None)
    if step is None or step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"{named}: no such complete step is in {folders.path}; there are {known}."
        )
    try:
        folders.completed(step)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folders.at(step) / COMPLETE} could not be read ({error}). Bring it back from a "
            "copy, or name another step."
        ) from error
    return source, folders, step


def show(*what: Any) -> int:
    """Prints texts and tables for a person."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for each in what:
        console.print(each, highlight=False, markup=False, soft_wrap=isinstance(each, str))
    return 0


def show_json(found: Mapping[str, Any] | Sequence[Any]) -> int:
    """Prints data for a program."""
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


def settings_of(source: Source) -> dict[str, Any]:
    """The settings of a run, as nested dictionaries.

    Raises:
        ConfigError: if they cannot be read.
    """
    try:
        found = yaml.safe_load(source.settings.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"{source.settings} could not be read: {error}. {_CURE}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{source.settings} holds no settings. {_CURE}")
    return found
