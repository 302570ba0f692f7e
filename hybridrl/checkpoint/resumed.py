"""Which checkpoint a job goes on from: found and verified before any worker is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybridrl.checkpoint.store import StepFolders
from hybridrl.config.resume import AUTO, forked, resumed
from hybridrl.config.resumed_settings import differences, named_code
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.system.locations import UNREACHABLE, Location, location_of
from hybridrl.trainers.role_spec import RoleSpec


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from.

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


def find_checkpoint(
    config: Config, settings: Mapping[str, Any], roles: Mapping[str, RoleSpec]
) -> Resumed:
    """The checkpoint that `resume` or `fork` asks for, with every file as it was written.

    Args:
        settings: `config` as it will be written to the run's folder.

    Raises:
        ConfigError: if there is none, or it was written with other roles.
    """
    source = resumed(config)
    if forks := source is None:
        source = forked(config)
    # A job that may go on from what is in its folder may also begin anew over it.
    run = Path(config.run.directory or "") if config.resume is not None else None
    if source is None or forks:
        _check_unused(config)
    if source is None:
        return Resumed(run)
    named = f"fork={config.fork}" if forks else f"resume={config.resume}"
    folders = StepFolders(source.steps)
    step, notices = folders.newest(source.step)
    if step is None:
        raise ConfigError(
            f"{named}: no complete checkpoint of step {source.step} or before is in "
            f"{folders.path}; there are steps {', '.join(map(str, folders.steps()))}."
        )
    if source.step in folders.unfinished():
        notices.append(f"Step {source.step} was never completed; the step before it is taken.")
    folder = folders.at(step)
    kept = {name.split("/")[0] for name in folders.completed(step).files if "/" in name}
    if other := sorted(kept ^ {role for role, spec in roles.items() if spec.keeps_state}):
        has, has_not = ("it", "this job") if other[0] in kept else ("this job", "it")
        raise ConfigError(
            f"{folder} is a checkpoint of other roles: {has} trains `{other[0]}`, and {has_not} "
            f"does not. {'Fork' if forks else 'Resume'} with the algorithm and roles of that run."
        )
    if config.trainer.steps <= step:
        notices.append(
            f"Step {step} is done already, and trainer.steps={config.trainer.steps} asks for no "
            "more."
        )
    before = yaml.safe_load(source.settings.read_text(encoding="utf-8"))
    whose = source.run or source.steps
    notices.append(f"{'a new run from' if forks else 'resuming'} {whose} after step {step}")
    if config.resume != AUTO and (code := named_code(before)):
        notices.append(f"The settings of that run name code that this one runs: {', '.join(code)}")
    changed = [f"changed: {line}" for line in differences(before, settings)]
    return Resumed(run, step, folder, notices + changed)


def _check_unused(config: Config) -> None:
    """Refuses to begin a run among the checkpoints of another.

    Raises:
        ConfigError: names the folder.
    """
    if (folder := config.checkpoint.folder) is None:
        return
    try:
        steps = StepFolders(location_of(folder)).steps()
    except OSError as error:
        raise ConfigError(
            f"checkpoint.folder={folder} could not be read: {error}. {UNREACHABLE}"
        ) from error
    if steps:
        raise ConfigError(
            f"checkpoint.folder={folder} holds step {steps[-1]} of an earlier run, and each run "
            f"needs a folder of its own. Give another, or go on with that run: resume={folder}."
        )
