"""The settings of a run that is resumed or forked: its own, but for what the command line gives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from hybridrl.config import secrets
from hybridrl.config.presets import leaves
from hybridrl.config.resume import AUTO, forked, resumed
from hybridrl.config.schema import LOSSY_SYNC, Config
from hybridrl.config.setting_names import without_old_settings
from hybridrl.errors import ConfigError

_ABSENT = object()
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


def with_settings_of_run(config: Config, given_keys: Iterable[str]) -> Config:
    """The settings to run with: those of the run that is resumed or forked in place of everything
    that no override says.

    Args:
        config: As composed from the defaults and the overrides.
        given_keys: The dotted names of the settings that overrides and presets give.

    Raises:
        ConfigError: if the run's settings cannot be read.
    """
    if config.fork is not None and config.resume not in (None, AUTO):
        raise ConfigError(
            f"resume={config.resume} goes on with a run, and fork={config.fork} begins a new one. "
            "Leave one of them out."
        )
    resumes = resumed(config)
    source = resumes or forked(config)
    if source is None:
        return config
    given = OmegaConf.structured(secrets.unmarked(config))
    named = f"fork={config.fork}" if resumes is None else f"resume={config.resume}"
    try:
        stored = without_old_settings(yaml.safe_load(source.settings.read_text(encoding="utf-8")))
        found: Any = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(stored))
        for key in given_keys:
            while True:
                value = OmegaConf.select(given, key, default=_ABSENT)
                group = key.rpartition(".")[0]
                if value is not _ABSENT and not (group and OmegaConf.select(found, group) is None):
                    break
                key = group  # that is null in one of the two, or has an option less
            OmegaConf.update(found, key, value, merge=False, force_add=True)
        settings = secrets.marked(OmegaConf.to_object(found), found)
    except InterpolationResolutionError as error:
        raise ConfigError(
            f"{named}: {error.full_key} of that run was {str(error).splitlines()[0]}. Set the "
            f"variable, or give {error.full_key}=<value>."
        ) from error
    except (OSError, yaml.YAMLError, UnicodeError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{named}: {source.settings} could not be read: {str(error).splitlines()[0]}. "
            "Bring it back from a copy; without it the settings of the run are not known."
        ) from error
    secrets.check_known(settings, named)
    settings = secrets.as_given(settings, config)
    directory, checkpoint = config.run.directory, settings.checkpoint
    if resumes is not None:
        directory = directory or str(resumes.run)
    else:  # the new run must not write, nor remove, among the old one's
        checkpoint = replace(checkpoint, folder=config.checkpoint.folder)
    run = replace(settings.run, directory=directory)
    fork = config.fork or (settings.fork if resumes is not None else None)
    return replace(settings, resume=config.resume, fork=fork, run=run, checkpoint=checkpoint)


def named_code(settings: Mapping[str, Any]) -> list[str]:
    """Return what the settings of a run name that a job with them runs, or reads of this user's
    environment, as `key=value`.

    Args:
        settings: As `config.yaml` has them.
    """
    return [
        f"{key}={text}"
        for key, value in leaves(settings)
        for text in (value if isinstance(value, list) else [value])
        if isinstance(text, str) and (_CODE.fullmatch(text) or "${" in text or key == COMMAND)
    ]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each setting that is another now, first those that change what is learned, which
    it says; where the run lives and what it resumes are none.

    Args:
        before, now: Settings as nested mappings.
    """
    old, new = dict(leaves(before)), dict(leaves(now))
    keys = [key for key in {**old, **new} if key not in _PLACES and old.get(key) != new.get(key)]
    learns = {key: changes_learning(key, old.get(key), new.get(key)) for key in keys}
    keys.sort(key=lambda key: (not learns[key], key))
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        f"{' (what is learned from here on differs)' if learns[key] else ''}"
        for key in keys
    ]


def changes_learning(key: str, *values: Any) -> bool:
    """Whether a run learns something else from its data if this setting has one of these values in
    place of another."""
    if key == "rollout.weight_sync":
        return any(value in LOSSY_SYNC for value in values)
    return _SAME_LEARNING.match(key) is None
