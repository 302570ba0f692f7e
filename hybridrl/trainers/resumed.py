"""Which checkpoint a job goes on from: found and verified before any worker is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config.resume import AUTO, differences, resumed_run, step_of
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.observe.step_folders import StepFolders
from hybridrl.trainers.role_spec import RoleSpec


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from.

    Attributes:
        run: Its folder, where what a run has left is this one's; None: it begins in a new one.
        step: The last one that is done; 0: none.
        folder: Of its checkpoint; None without one.
        notices: Sentences for the user.
    """

    run: Path | None = None
    step: int = 0
    folder: Path | None = None
    notices: list[str] = field(default_factory=list)


def find_checkpoint(
    config: Config, settings: Mapping[str, Any], roles: Mapping[str, RoleSpec]
) -> Resumed:
    """The checkpoint that `resume` asks for, with every file as it was written.

    Args:
        settings: `config` as it will be written to the run's folder.

    Raises:
        ConfigError: if there is none, or it was written with other roles.
    """
    if config.resume is None:
        return Resumed()
    run = resumed_run(config)
    if run is None:
        return Resumed(Path(config.run.directory or ""))
    wanted = None if config.resume == AUTO else step_of(Path(config.resume).resolve())
    folders = StepFolders(run)
    step, notices = folders.newest(wanted)
    if step is None:
        raise ConfigError(
            f"resume={config.resume}: no checkpoint of step {wanted} or before is in "
            f"{folders.path}; there are steps {', '.join(map(str, folders.steps()))}."
        )
    folder = folders.at(step)
    kept = {path.name for path in folder.iterdir() if path.is_dir()}
    if other := sorted(kept ^ {role for role, spec in roles.items() if spec.keeps_state}):
        has, has_not = ("it", "this job") if other[0] in kept else ("this job", "it")
        raise ConfigError(
            f"{folder} is a checkpoint of other roles: {has} trains `{other[0]}`, and {has_not} "
            "does not. Resume with the algorithm and roles of that run."
        )
    before = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    changed = differences(before, settings)
    notices = [*notices, f"resuming {run} after step {step}"]
    return Resumed(run, step, folder, notices + [f"changed: {line}" for line in changed])
