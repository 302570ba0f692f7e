"""Find the checkpoint that a run goes on from: the newest whole one of the run or step that
`resume` or `fork` names. It is verified before any worker is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.checkpoint.store import (
    COMPLETE_FILE,
    CheckpointStore,
    parse_step_folder,
    resolve_checkpoint_folder,
    stored_steps_folder,
)
from hybridrl.checkpoint.stored_settings import differences, load_stored, named_code
from hybridrl.config.presets import flatten_settings
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.run_files.run_paths import CHECKPOINTS_FOLDER, SETTINGS
from hybridrl.system.locations import UNREACHABLE_HINT, Location, parse_location

if TYPE_CHECKING:
    from hybridrl.trainers.role_spec import RoleSpec

AUTO = "auto"


@dataclass(frozen=True)
class Source:
    """The checkpoints of a run, as `resume`, `fork` or a command names them.

    Attributes:
        named: What names them, such as `resume=runs/mine`.
        steps: The folder of its steps.
        settings: The file of its settings.
        step: The step that is named; None: the newest.
        run: Its own folder; None where only its steps are known.
        forks: A new run begins from them.
    """

    named: str
    steps: Location
    settings: Location
    step: int | None = None
    run: Path | None = None
    forks: bool = False


@dataclass(frozen=True)
class ResumePoint:
    """A point that a run resumes from.

    Attributes:
        run: Its folder, where what a run has left is this one's; None: it begins in a new one.
        step: The last one that is done; 0: none.
        folder: Of its checkpoint, this run's or the one that is forked; None without one.
        notices: Sentences for the user.
        copy: Of the same in the memory of nodes, which is read in its place; None: there is none.
    """

    run: Path | None = None
    step: int = 0
    folder: Location | None = None
    notices: list[str] = field(default_factory=list)
    copy: Location | None = None


def find_source(config: Config) -> Source | None:
    """Return what `resume` names, with the folder in which the run goes on, else what `fork` names;
    None where they name nothing, or where `auto` finds no checkpoint.

    Raises:
        ConfigError: if there are no checkpoints of a run, or if a new run would write its own
            among them.
    """
    source = _resumed(config) if config.resume is not None else None
    return _forked(config, config.fork) if source is None and config.fork is not None else source


def find_resume_source(setting: str, named: str) -> Source:
    """Return what is at a place: a run, its folder of checkpoints, or one of its steps.

    Args:
        setting: Which setting names it, for messages; empty: none.

    Raises:
        ConfigError: if it is none of these.
    """
    said = f"{setting}={named}" if setting else named
    try:
        place = parse_location(named)
    except ConfigError as error:
        raise ConfigError(f"{said}: {error}") from None
    if isinstance(place, Path):
        place = place.resolve()
    step = parse_step_folder(place)
    with _readable(said):
        if not place.is_dir():
            raise ConfigError(
                f"{said}: there is no such folder. Name the folder of a run, or one of "
                "the step folders in its `checkpoints`."
            )
        found = None
        if step is not None:
            found = _in_folder(said, place.parent, step)
        elif isinstance(place, Path) and (place / SETTINGS).is_file():
            found = _in_run(said, place, None)
        found = found or _in_folder(said, place)
    if found is None and isinstance(place, Path) and (place / CHECKPOINTS_FOLDER).is_dir():
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


def find_resume_point(
    config: Config, settings: Mapping[str, Any], roles: Mapping[str, RoleSpec]
) -> ResumePoint:
    """Return the checkpoint that `resume` or `fork` asks for, with every file as it was written.

    Args:
        settings: `config` as it will be written to the run's folder.

    Raises:
        ConfigError: if there is none, or it was written with other roles.
    """
    source = find_source(config)
    # A job that may go on from what is in its folder may also begin anew over it.
    run = Path(config.run.directory or "") if config.resume is not None else None
    if source is None or source.forks:
        _check_unused(config)
    if source is None:
        return ResumePoint(run)
    folders = CheckpointStore(source.steps)
    step, notices = folders.newest(source.step)
    if step is None:
        raise ConfigError(
            f"{source.named}: no complete checkpoint of step {source.step} or before is in "
            f"{folders.path}; there are steps {', '.join(map(str, folders.steps()))}."
        )
    if source.step in folders.unfinished():
        notices.append(f"Step {source.step} was never completed; the step before it is taken.")
    folder, kept = folders.at(step), set(folders.completed(step).roles)
    if other := sorted(kept ^ {role for role, spec in roles.items() if spec.keeps_state}):
        has, has_not = ("it", "this job") if other[0] in kept else ("this job", "it")
        raise ConfigError(
            f"{folder} is a checkpoint of other roles: {has} trains `{other[0]}`, and {has_not} "
            f"does not. {'Fork' if source.forks else 'Resume'} with the algorithm and roles of "
            "that run."
        )
    if config.trainer.known_steps <= step:
        notices.append(
            f"Step {step} is done already, and trainer.steps={config.trainer.steps} asks for no "
            "more."
        )
    before, whose = load_stored(source.settings), source.run or source.steps
    _check_optimizers(before, settings, folder)
    notices.append(f"{'a new run from' if source.forks else 'resuming'} {whose} after step {step}")
    if config.resume != AUTO and (code := named_code(before)):
        notices.append(f"The settings of that run name code that this one runs: {', '.join(code)}")
    changed = [f"changed: {line}" for line in differences(before, settings)]
    return ResumePoint(run, step, folder, notices + changed)


def _check_optimizers(before: Mapping[str, Any], now: Mapping[str, Any], folder: Location) -> None:
    """Refuse other optimizers than those of the run: none goes on from what another remembers."""
    old, new = dict(flatten_settings(before)), dict(flatten_settings(now))
    for key in sorted(key for key in {**old, **new} if key.endswith(".optimizer.name")):
        was, wanted = (
            str(said.get(key, said.get("actor.optimizer.name", "adamw"))) for said in (old, new)
        )
        # Of a class in a file its name: the file may have moved.
        if was.rpartition(":")[2] != wanted.rpartition(":")[2]:
            raise ConfigError(
                f"{key}={wanted}: {folder} has the state of {was}, from which no other optimizer "
                f"goes on. Set {key}={was}, or start a new run from the weights: model.path="
                f"{folder}/actor."
            )


def _resumed(config: Config) -> Source | None:
    directory = Path(config.run.directory) if config.run.directory else None
    if config.resume == AUTO:
        if directory is None:
            raise ConfigError(
                "resume=auto looks for checkpoints in run.directory, which is not set. Set it to "
                "the folder that all runs of this command are to share."
            )
        with _readable(f"run.directory={directory} or its checkpoint.folder"):
            return _in_run("resume=auto", directory, config.checkpoint.folder)
    found = find_resume_source("resume", str(config.resume))
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


def _forked(config: Config, fork: str) -> Source:
    found = find_resume_source("fork", fork)
    directory, folder = config.run.directory, config.checkpoint.folder
    if directory is not None and Path(directory).resolve() == found.run:
        raise ConfigError(
            f"fork={fork}: the new run needs a folder of its own, and run.directory is that "
            "of the old one. Give another, or write resume= to go on in the old one."
        )
    if folder is not None and _resolved(parse_location(folder)) == _resolved(found.steps):
        raise ConfigError(
            f"fork={fork}: checkpoint.folder={folder} holds the checkpoints of the old run. "
            "Set it to another folder for those of the new one."
        )
    return replace(found, forks=True)


def _in_run(said: str, run: Path, folder: str | None) -> Source | None:
    """Return the checkpoints of a run, in the folder that is given, else that its settings name,
    else its own; None if it has none."""
    steps = stored_steps_folder(run) if folder is None else resolve_checkpoint_folder(run, folder)
    found = _in_folder(said, steps, settings=run / SETTINGS)
    return None if found is None else replace(found, run=run)


def _in_folder(
    said: str, folder: Location, step: int | None = None, settings: Path | None = None
) -> Source | None:
    """Return the complete checkpoints in a folder; None if there are none with settings.

    Args:
        settings: Of their run; else, or if they are not there, those of the newest step count.
    """
    try:
        found = [path for path in folder.iterdir() if parse_step_folder(path) is not None]
        found = [path for path in found if (path / COMPLETE_FILE).is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    run = None
    if settings is None and isinstance(folder, Path) and folder.name == CHECKPOINTS_FOLDER:
        run, settings = folder.parent, folder.parent / SETTINGS
    if found and settings is not None and settings.is_file():
        return Source(said, folder, settings, step, run)
    found.sort(key=lambda path: (parse_step_folder(path) == step, path.name), reverse=True)
    for path in found:
        if (path / SETTINGS).is_file():
            return Source(said, folder, path / SETTINGS, step)
    return None


@contextmanager
def _readable(said: str) -> Iterator[None]:
    """Raise `ConfigError`, naming what a setting says, in place of an `OSError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{said} could not be read: {error}. See whether it can be reached from here and may "
            "be read (address, credentials, permissions)."
        ) from error


def _check_unused(config: Config) -> None:
    """Refuse to begin a run among the checkpoints of another.

    Raises:
        ConfigError: names the folder.
    """
    if (folder := config.checkpoint.folder) is None:
        return
    try:
        steps = CheckpointStore(parse_location(folder)).steps()
    except OSError as error:
        raise ConfigError(
            f"checkpoint.folder={folder} could not be read: {error}. {UNREACHABLE_HINT}"
        ) from error
    if steps:
        raise ConfigError(
            f"checkpoint.folder={folder} holds step {steps[-1]} of an earlier run, and each run "
            f"needs a folder of its own. Give another, or go on with that run: resume={folder}."
        )


def _resolved(place: Location) -> Location:
    return place.resolve() if isinstance(place, Path) else place
