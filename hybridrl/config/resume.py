"""The settings of a run that is resumed: its own, but for what the command line gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError

AUTO = "auto"
CHECKPOINTS = "checkpoints"
"""The folder of a run in which its steps are."""
_ABSENT = object()
_STEP = re.compile(r"step-(\d{6,})")


def resumed_run(config: Config) -> Path | None:
    """The folder of the run that `resume` names; None where it names none, or where `auto` finds
    no checkpoint and a new run begins.

    Raises:
        ConfigError: if it is no folder of a run with checkpoints.
    """
    if config.resume is None:
        return None
    if config.resume == AUTO:
        if config.run.directory is None:
            raise ConfigError(
                "resume=auto looks for checkpoints in run.directory, which is not set. Set it to "
                "the folder that all runs of this command are to share."
            )
        run = Path(config.run.directory)
        return run if _has_steps(run) and (run / "config.yaml").is_file() else None
    named = Path(config.resume).expanduser().resolve()
    run = named if step_of(named) is None else named.parent.parent
    if not named.is_dir():
        raise ConfigError(
            f"resume={config.resume}: there is no such folder. Name the folder of a run, or one of "
            "the step folders in its `checkpoints`."
        )
    if not _has_steps(run) or not (run / "config.yaml").is_file():
        raise ConfigError(
            f"resume={config.resume}: {run} is no run with checkpoints. They are written with "
            "checkpoint.every=<steps>; name the folder of a run that had it."
        )
    directory = config.run.directory
    if directory is not None and Path(directory).resolve() != run:
        raise ConfigError(
            f"resume={config.resume} goes on in {run}, and run.directory={directory} is another "
            "folder. Leave run.directory out."
        )
    return run


def with_settings_of_run(config: Config, overrides: Sequence[str]) -> Config:
    """The settings to run with: those of the resumed run in place of everything that no override
    says.

    Args:
        config: As composed from the defaults and the overrides.
        overrides: As on the command line; of a preset (`algorithm=ppo`) all count that presets of
            its group set.

    Raises:
        ConfigError: if the run's settings cannot be read.
    """
    run = resumed_run(config)
    if run is None:
        return config
    file = run / "config.yaml"
    given = OmegaConf.structured(config)
    try:
        found: Any = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(file))
        for key in _keys(overrides):
            while True:
                value = OmegaConf.select(given, key, default=_ABSENT)
                group = key.rpartition(".")[0]
                if value is not _ABSENT and not (group and OmegaConf.select(found, group) is None):
                    break
                key = group  # that is null in one of the two, or has an option less
            OmegaConf.update(found, key, value, merge=False, force_add=True)
        settings = OmegaConf.to_object(found)
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"resume={config.resume}: {file} could not be read: {str(error).splitlines()[0]}. "
            "Bring it back from a copy; without it the settings of the run are not known."
        ) from error
    directory = config.run.directory or str(run)
    return replace(settings, resume=config.resume, run=replace(settings.run, directory=directory))


def step_of(path: Path) -> int | None:
    """The step whose folder this is by its name; None if it is none."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each setting that is another now; where the run lives and what it resumes are
    none.

    Args:
        before, now: Settings as nested mappings.
    """
    old, new = dict(_leaves(before)), dict(_leaves(now))
    keys = [key for key in {**old, **new} if key not in ("resume", "run.directory", "run.root")]
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(keys)
        if old.get(key) != new.get(key)
    ]


def _has_steps(run: Path) -> bool:
    folder = run / CHECKPOINTS
    return folder.is_dir() and any(step_of(path) is not None for path in folder.iterdir())


def _keys(overrides: Sequence[str]) -> Iterator[str]:
    """The dotted names of all settings that overrides are about."""
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~")
        presets = sorted((Path(__file__).parent / key).glob("*.yaml")) if key.isidentifier() else []
        for preset in presets:
            text = preset.read_text()
            prefix = "" if "@package _global_" in text else f"{key}."
            for name, _ in _leaves(yaml.safe_load(text) or {}):
                if name.split(".")[0] != "defaults":
                    yield prefix + name
        if not presets and not key.startswith("hydra"):
            yield key


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
