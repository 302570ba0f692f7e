"""Where the run is that `resume` or `fork` names, and where its checkpoints are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from hybridrl.config.schema import Config
from hybridrl.config.secrets import hides_password
from hybridrl.errors import ConfigError
from hybridrl.system.locations import Location, location_of

AUTO = "auto"
CHECKPOINTS = "checkpoints"
"""The folder of a run in which its steps are, unless `checkpoint.folder` names another."""
COMPLETE = "complete.json"
"""The file that a step's folder has when it is complete."""
SETTINGS = "config.yaml"
"""The settings of a run, in its folder and in those of its steps."""
LATEST = "latest"
"""The link to the newest run, in the folder of all runs."""
_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Source:
    """A run to go on from, as `resume` and `fork` name it.

    Attributes:
        steps: The folder of its steps.
        settings: The file of its settings.
        step: The step that is named; None: the newest.
        run: Its own folder; None where only its steps are known.
    """

    steps: Location
    settings: Location
    step: int | None = None
    run: Path | None = None


def resumed(config: Config) -> Source | None:
    """What `resume` names, with the folder in which the run goes on; None where it names nothing,
    or where `auto` finds no checkpoint.

    Raises:
        ConfigError: if there are no checkpoints of a run.
    """
    directory = Path(config.run.directory) if config.run.directory else None
    if config.resume is None:
        return None
    if config.resume == AUTO:
        if directory is None:
            raise ConfigError(
                "resume=auto looks for checkpoints in run.directory, which is not set. Set it to "
                "the folder that all runs of this command are to share."
            )
        with _readable(f"run.directory={directory} or its checkpoint.folder"):
            return _in_run(directory, config.checkpoint.folder)
    found = named_source("resume", config.resume)
    if found.run is None and directory is None:
        raise ConfigError(
            f"resume={config.resume} names checkpoints that are not in a run's folder. Set "
            "run.directory to the folder in which the run is to go on, or fork="
            f"{config.resume} for a new run."
        )
    if found.run is not None and directory is not None and directory.resolve() != found.run:
        raise ConfigError(
            f"resume={config.resume} goes on in {found.run}, and run.directory={directory} is "
            "another folder. Leave run.directory out, or write fork= in place of resume= for a "
            "new run."
        )
    return replace(found, run=found.run or directory)


def forked(config: Config) -> Source | None:
    """What `fork` names, where the run does not go on from a checkpoint of its own.

    Raises:
        ConfigError: if there are no checkpoints of a run, or if the new run would write its own
            among them.
    """
    if config.fork is None or resumed(config) is not None:
        return None
    found = named_source("fork", config.fork)
    directory = config.run.directory
    if directory is not None and Path(directory).resolve() == found.run:
        raise ConfigError(
            f"fork={config.fork}: the new run needs a folder of its own, and run.directory is that "
            "of the old one. Give another, or write resume= to go on in the old one."
        )
    folder = config.checkpoint.folder
    if folder is not None and _same(location_of(folder), found.steps):
        raise ConfigError(
            f"fork={config.fork}: checkpoint.folder={folder} holds the checkpoints of the old run. "
            "Set it to another folder for those of the new one."
        )
    return found


def named_source(setting: str, named: str) -> Source:
    """What is at a place: a run, its folder of checkpoints, or one of its steps.

    Args:
        setting: Which setting names it, for messages; empty: none.

    Raises:
        ConfigError: if it is none of these.
    """
    said = f"{setting}={named}" if setting else named
    try:
        place = location_of(named)
    except ConfigError as error:
        raise ConfigError(f"{said}: {error}") from None
    if isinstance(place, Path):
        place = place.resolve()
    step = step_of(place)
    with _readable(said):
        if not place.is_dir():
            raise ConfigError(
                f"{said}: there is no such folder. Name the folder of a run, or one of "
                "the step folders in its `checkpoints`."
            )
        found = None
        if step is not None:
            found = _of_steps(place.parent, step)
        elif isinstance(place, Path) and (place / SETTINGS).is_file():
            found = _in_run(place, None)
        found = found or _of_steps(place, None)
    if found is None and isinstance(place, Path) and (place / CHECKPOINTS).is_dir():
        raise ConfigError(
            f"{said}: {place} has no complete checkpoint, or its {SETTINGS} is lost: copy one back "
            "from a step's folder."
        )
    if found is None:
        raise ConfigError(
            f"{said}: {place} is no run with checkpoints. They are written with "
            "checkpoint.every=<steps>; name the folder of a run that had it."
        )
    return found


def steps_folder(run: Path, folder: str | None) -> Location:
    """Where the steps of a run are.

    Args:
        folder: As `checkpoint.folder` says.
    """
    return run / CHECKPOINTS if folder is None else location_of(folder)


def step_of(place: Location) -> int | None:
    """The step whose folder this is by its name; None if it is none."""
    found = _STEP.fullmatch(place.name)
    return int(found[1]) if found else None


def _in_run(run: Path, folder: str | None) -> Source | None:
    """The checkpoints of a run, in the folder that is given, else that its settings name, else its
    own; None if it has none."""
    settings = run / SETTINGS
    if folder is None and settings.is_file():
        folder = _stored_folder(settings)
        if isinstance(folder, str) and hides_password(folder):
            raise ConfigError(
                f"The checkpoints of {run} are at {folder}, of which the password is not written "
                f"down. Give it again: resume=auto run.directory={run} checkpoint.folder=<URL>."
            )
    found = _of_steps(steps_folder(run, folder), None, settings)
    return None if found is None else replace(found, run=run)


def _of_steps(folder: Location, step: int | None, settings: Path | None = None) -> Source | None:
    """The complete checkpoints in a folder; None if there are none with settings.

    Args:
        settings: Of their run; else, or if they are not there, those of the newest step count.
    """
    try:
        found = [path for path in folder.iterdir() if step_of(path) is not None]
        found = [path for path in found if (path / COMPLETE).is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    run = None
    if settings is None and isinstance(folder, Path) and folder.name == CHECKPOINTS:
        run, settings = folder.parent, folder.parent / SETTINGS
    if found and settings is not None and settings.is_file():
        return Source(folder, settings, step, run)
    found.sort(key=lambda path: (step_of(path) == step, path.name), reverse=True)
    for path in found:
        if (path / SETTINGS).is_file():
            return Source(folder, path / SETTINGS, step)
    return None


@contextmanager
def _readable(said: str) -> Iterator[None]:
    """Raises `ConfigError`, naming what a setting says, in place of an `OSError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{said} could not be read: {error}. See whether it can be reached from here and may "
            "be read (address, credentials, permissions)."
        ) from error


def _stored_folder(settings: Path) -> str | None:
    try:
        return (yaml.safe_load(settings.read_text(encoding="utf-8")) or {})["checkpoint"]["folder"]
    except (OSError, yaml.YAMLError, UnicodeError, KeyError, TypeError):
        return None  # it is read again, and complained of, when its settings are wanted


def _same(one: Location, other: Location) -> bool:
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return one == other
