"""Where a run leaves its files, and the checkpoint that it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridrl.checkpoint.resume import find_resume_point
from hybridrl.config.schema import Config
from hybridrl.run_files.run_directory import RunDirectory
from hybridrl.trainers.role_spec import RoleSpec


def check_run_folder(config: Config) -> None:
    """Refuse a folder that a start could not make, or that is an earlier run's."""
    RunDirectory.check(config.run.directory, config.run.root, config.resume is not None)


def check_source(
    config: Config, roles: Mapping[str, RoleSpec], plain_settings: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint that is not there, or does not fit the job."""
    find_resume_point(config, plain_settings, roles)
