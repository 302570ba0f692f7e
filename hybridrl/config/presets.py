"""Presets: `<group>=<name>` stands for the settings of a YAML file in this folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
CHOSEN = {"rollout": "vllm", "data": "arithmetic", "placement": "flattening", "algorithm": "grpo"}
"""The groups of presets, in the order in which they count, with what is chosen in each if nothing
is said."""

DATA, FILES = "data", "jsonl"
"""The group of data, and its preset that brings no settings of a task."""


@cache
def names(group: str) -> tuple[str, ...]:
    """List the presets of a group."""
    return tuple(sorted(path.stem for path in (FOLDER / group).glob("*.yaml")))


@cache
def preset(group: str, name: str) -> Mapping[str, Any]:
    """Load a preset's settings, nested."""
    return yaml.safe_load((FOLDER / group / f"{name}.yaml").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def presets_with(group_of_settings: str) -> list[str]:
    """List the presets that set something in a group of settings, as overrides: `algorithm=dpo`."""
    return [
        f"{group}={name}"
        for group in CHOSEN
        for name in names(group)
        if group_of_settings in preset(group, name)
    ]


def algorithm_of(settings: Mapping[str, Any]) -> str | None:
    """The algorithm of a run with these settings, nested as in its config.yaml: of the presets that
    they agree with the one that says most; else the name of its trainer."""
    found = dict(leaves(settings))
    fitting = [
        (len(wanted), name)
        for name in names("algorithm")
        if (wanted := dict(leaves(preset("algorithm", name)))).items() <= found.items()
    ]
    return max(fitting)[1] if fitting else found.get("trainer.name")


def settings_of_group(group: str) -> Iterator[str]:
    """Yield the dotted names of all settings that presets of a group set."""
    for name in names(group):
        for key, _ in leaves(preset(group, name)):
            yield key


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings by dotted name."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
