"""Everything that is refused before a job starts, in one list, by what the checks have to look at.

A check raises what it refuses, and may return remarks for the user. Its parameters are what it
reads: the settings, the roles, the data. All checks of a group are called, whatever others find. A
command names the groups that it needs: a plan makes no folder, so it does not ask for one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from hybridrl.checkpoint.resume import find_resume_point
from hybridrl.checks.data.reward_data_checks import check_eval_set_rewards, check_reward_data
from hybridrl.checks.data.row_checks import ROW_CHECKS, check_rubrics, check_teacher_columns
from hybridrl.checks.machine.placement_checks import check_devices
from hybridrl.checks.settings.algorithm_checks import check_algorithm
from hybridrl.checks.settings.checkpoint_checks import check_checkpoints
from hybridrl.checks.settings.environment_checks import check_environment
from hybridrl.checks.settings.evaluation_checks import EVALUATION_CHECKS
from hybridrl.checks.settings.job_checks import JOB_CHECKS
from hybridrl.checks.settings.role_checks import check_roles
from hybridrl.checks.settings.rollout_checks import ROLLOUT_CHECKS
from hybridrl.checks.settings.training_checks import TRAINING_CHECKS
from hybridrl.config.schema import Config
from hybridrl.config.setting_types import find_invalid_values, reset_to_defaults
from hybridrl.errors import ConfigError, ErrorCollector
from hybridrl.run_files.run_directory import RunDirectory
from hybridrl.system.open_files import check_open_files
from hybridrl.trainers.role_spec import RoleSpec


class Need(Enum):
    """A group of checks, named by what it looks at."""

    SETTINGS = auto()
    """The settings alone, and small files of the user's that they name."""
    MACHINE = auto()
    """The devices of this machine, and the folders of models that are cut over them."""
    FOLDER = auto()
    """Where the run leaves its files, and the checkpoint that it goes on from."""
    DATA = auto()
    """Rows, tokenized."""
    SCORED_DATA = auto()
    """The same, where nobody adds columns before they are scored: in programs of the library."""


def check_run_folder(config: Config) -> None:
    """Refuse a folder that a start could not make, or that is an earlier run's."""
    RunDirectory.check(config.run.directory, config.run.root, config.resume is not None)


def check_source(
    config: Config, roles: Mapping[str, RoleSpec], plain_settings: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint that is not there, or does not fit the job."""
    find_resume_point(config, plain_settings, roles)


CHECKS: Mapping[Need, tuple[Callable[..., list[str] | None], ...]] = {
    Need.SETTINGS: (
        *(*JOB_CHECKS, *TRAINING_CHECKS, *ROLLOUT_CHECKS, check_algorithm, *EVALUATION_CHECKS),
        *(check_environment, check_checkpoints, check_roles),
    ),
    Need.MACHINE: (check_open_files, check_devices),
    Need.FOLDER: (check_run_folder, check_source),
    Need.DATA: ROW_CHECKS,
    Need.SCORED_DATA: (
        check_reward_data,
        check_teacher_columns,
        check_rubrics,
        check_eval_set_rewards,
    ),
}


def run_checks(problems: ErrorCollector, *needs: Need, config: Config, **given: Any) -> list[str]:
    """Call all checks of some groups; return their remarks.

    Args:
        problems: Gets what they refuse.
        given: What they read besides the settings, by the names of their parameters.
    """
    wrong = dict(find_invalid_values(config))
    if Need.SETTINGS in needs and wrong:
        with problems.noted():
            raise ConfigError(*wrong.values())
    # The other settings are checked, too, as if the wrong ones had their defaults.
    given["config"] = reset_to_defaults(config, wrong)
    remarks: list[str] = []
    for check_one in (one for need in needs for one in CHECKS[need]):
        with problems.noted(besides=wrong):
            wanted = inspect.signature(check_one).parameters
            remarks += check_one(**{n: given[n] for n in wanted if n in given}) or ()
    return remarks


def check(config: Config, roles: Mapping[str, RoleSpec] | None = None) -> None:
    """Refuse a job that could not start on this machine, with all that is wrong in one error.

    Args:
        roles: Of a job, where they are not its trainer's.

    Raises:
        ConfigError: names each setting, its value, what was expected and what to do.
        MissingPackageError: names the extra to install, if nothing else is wrong.
    """
    problems = ErrorCollector()
    # A recipe for other machines can be looked at on this one.
    needs = (Need.SETTINGS,) if config.run.dry else (Need.SETTINGS, Need.MACHINE)
    run_checks(problems, *needs, config=config, roles=roles)
    problems.raise_if_any()
