"""Presets: `<group>=<name>` stands for the settings of a YAML file in this folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PRESETS_FOLDER = Path(__file__).parent
DEFAULT_PRESETS = {
    "rollout": "vllm",
    "data": "arithmetic",
    "placement": "flattening",
    "algorithm": "grpo",
}
"""The groups of presets, in the order in which they count, with what is chosen in each if nothing
is said."""

DATA, FILES = "data", "jsonl"
"""The group of data, and its preset that brings no settings of a task."""


@cache
def list_presets(group: str) -> tuple[str, ...]:
    """List the presets of a group."""
    return tuple(sorted(path.stem for path in (PRESETS_FOLDER / group).glob("*.yaml")))


@cache
def load_preset(group: str, name: str) -> Mapping[str, Any]:
    """Load a preset's settings, nested."""
    return yaml.safe_load((PRESETS_FOLDER / group / f"{name}.yaml").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def find_presets_setting(group_of_settings: str) -> list[str]:
    """List the presets that set something in a group of settings, as overrides: `algorithm=dpo`."""
    return [
        f"{group}={name}"
        for group in DEFAULT_PRESETS
        for name in list_presets(group)
        if group_of_settings in load_preset(group, name)
    ]


def algorithm_of(settings: Mapping[str, Any]) -> str | None:
    """The algorithm of a run with these settings, nested as in its config.yaml: of the presets that
    they agree with the one that says most; else the name of its trainer."""
    found = dict(flatten_settings(settings))
    fitting = [
        (len(wanted), name)
        for name in list_presets("algorithm")
        if (wanted := dict(flatten_settings(load_preset("algorithm", name)))).items()
        <= found.items()
    ]
    return max(fitting)[1] if fitting else found.get("trainer.name")


def list_preset_settings(group: str) -> list[str]:
    """List the dotted names of all settings that presets of a group set."""
    presets = (load_preset(group, name) for name in list_presets(group))
    return [key for preset in presets for key, _ in flatten_settings(preset)]


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings by dotted name."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
