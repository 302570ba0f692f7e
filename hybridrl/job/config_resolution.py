"""From a command line to the settings of a job: composed, then with those of the run that it
resumes or forks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from hybridrl.checkpoint.resume import AUTO, find_source
from hybridrl.checkpoint.stored_settings import load_stored
from hybridrl.config import secrets
from hybridrl.config.load import compose_config
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError

_ABSENT = object()


def load_config(overrides: Sequence[str] = ()) -> Config:
    """Return the typed configuration of a job. With `resume` it is that of the resumed run, but for
    what the overrides say.

    Args:
        overrides: As on the command line, for example `["data=jsonl", "data.path=prompts.jsonl"]`
            or `["recipe=my.yaml"]`.

    Raises:
        ConfigError: for each unknown key (names the nearest), value of the wrong type, or value
            that has to be given; or if the run's settings cannot be read.
    """
    return apply_stored_settings(*compose_config(overrides))


def apply_stored_settings(config: Config, given_keys: Iterable[str]) -> Config:
    """Return the settings to run with: those of the run that is resumed or forked in place of
    everything that no override says.

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
    if (source := find_source(config)) is None:
        return config
    given = OmegaConf.structured(secrets.unmarked(config))
    try:
        stored = OmegaConf.create(load_stored(source.settings))
        found: Any = OmegaConf.merge(OmegaConf.structured(Config), stored)
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
            f"{source.named}: {error.full_key} of that run was {str(error).splitlines()[0]}. Set "
            f"the variable, or give {error.full_key}=<value>."
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{source.named}: {source.settings} could not be read: {str(error).splitlines()[0]}. "
            "Bring it back from a copy; without it the settings of the run are not known."
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{source.named}: {error}") from error
    secrets.check_known(settings, source.named)
    settings = secrets.as_given(settings, config)
    directory, checkpoint = config.run.directory, settings.checkpoint
    if source.forks:  # the new run must not write, nor remove, among the old one's
        checkpoint = replace(checkpoint, folder=config.checkpoint.folder)
    else:
        directory = directory or str(source.run)
    run = replace(settings.run, directory=directory)
    fork = config.fork or (None if source.forks else settings.fork)
    return replace(settings, resume=config.resume, fork=fork, run=run, checkpoint=checkpoint)
