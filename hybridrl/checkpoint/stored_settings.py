"""The settings of a run that is resumed or forked: its own, but for what the command line gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hybridrl.composition.setting_names import without_old_settings
from hybridrl.config.presets import flatten_settings
from hybridrl.config.schema import LOSSY_WEIGHT_SYNCS
from hybridrl.errors import ConfigError
from hybridrl.system.bounded_files import load_yaml
from hybridrl.system.locations import Location

_PLACES = ("resume", "fork", "run.directory", "run.root")
COMMAND = "environment.options.command"
_CODE = re.compile(r"(?!hybridrl\.)[\w./~+ -]+:[A-Za-z_]\w*")
"""A file or module, and a name in it; of the user's, not ours."""
_SAME_LEARNING = re.compile(
    r"(observe|metrics|checkpoint|ray|controller|devices|num_devices|executor|recover|eval|warmup)\b"
    r"|run\.(?!seed)|placement\.(?!staleness|in_flight)|trainer\.steps|.*\bparallel\.(?!gradients|weights)"
    r"|actor\.tokens_per_microbatch|rollout\.(max_sequences|kv_cache_gib)"
)
"""Settings that do not change what is learned from a step on, or say only for how long."""


def load_stored(file: Location) -> dict[str, Any]:
    """Return the settings of a run or a step, nested.

    Raises:
        ConfigError: if they cannot be read.
    """
    try:
        found = load_yaml(file) or {}
        if not isinstance(found, dict):
            raise ValueError("it holds no settings")
        settings: dict[str, Any] = without_old_settings(found)
        return settings
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} could not be read: {str(error).splitlines()[0]}. Bring it back from a copy, "
            "or from the folder of a step; without it the settings of the run are not known."
        ) from error


def named_code(settings: Mapping[str, Any]) -> list[str]:
    """Return what the settings of a run name that a job with them runs, or reads of this user's
    environment, as `key=value`.

    Args:
        settings: As `config.yaml` has them.
    """
    return [
        f"{key}={text}"
        for key, value in flatten_settings(settings)
        for text in (value if isinstance(value, list) else [value])
        if isinstance(text, str) and (_CODE.fullmatch(text) or "${" in text or key == COMMAND)
    ]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each setting that changed, those that change learning first. Settings that locate or
    resume the run are left out.

    Args:
        before, now: Settings as nested mappings.
    """
    old, new = dict(flatten_settings(before)), dict(flatten_settings(now))
    keys = [key for key in {**old, **new} if key not in _PLACES and old.get(key) != new.get(key)]
    learns = {key: changes_learning(key, old.get(key), new.get(key)) for key in keys}
    keys.sort(key=lambda key: (not learns[key], key))
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        f"{' (what is learned from here on differs)' if learns[key] else ''}"
        for key in keys
    ]


def changes_learning(key: str, *values: Any) -> bool:
    """Return whether a change of this setting to or from these values changes what the run
    learns."""
    if key == "rollout.weight_sync":
        return any(value in LOSSY_WEIGHT_SYNCS for value in values)
    return _SAME_LEARNING.match(key) is None
