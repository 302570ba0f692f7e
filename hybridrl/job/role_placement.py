"""The roles of a job on its devices: as the settings say, or as a search chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.config.schema import Config
from hybridrl.errors import NotPlannedError
from hybridrl.job.config_resolution import KnownJob, resolve_auto_placement
from hybridrl.run_files.run_directory import RunDirectory
from hybridrl.run_files.run_paths import CLUSTER, PLACEMENT

if TYPE_CHECKING:
    from hybridrl.controller.executor import Executor
    from hybridrl.placement import Placement
    from hybridrl.planner.job_plan import JobPlan
    from hybridrl.planner.step.step_calls import SampleLengths


class PlacedRoles(NamedTuple):
    """The roles of a job in their places.

    Attributes:
        config: The settings, with those that a search chose.
        placement: Which role lives on which devices.
        plan: What that takes of each device; None if it cannot be planned.
        plan_notice: What a person has to know of the plan, or why there is none; else empty.
        placement_notice: What `placement=auto` has chosen; else empty.
    """

    config: Config
    placement: Placement
    plan: JobPlan | None
    plan_notice: str
    placement_notice: str = ""


def place_roles(
    config: Config,
    known: KnownJob,
    usual: SampleLengths | None,
    executor: Executor,
    directory: RunDirectory,
    progress: Callable[[str], None],
) -> PlacedRoles:
    """Place the roles on the devices of the cluster, and write both to the run's folder.

    Args:
        usual: The lengths of usual samples, if they are known.
    """
    from hybridrl.planner.machine.device_catalog import add_device_memory

    directory.write_text(CLUSTER, add_device_memory(known.cluster).to_json() + "\n")
    if config.placement.strategy == "auto":
        progress("searching for a placement")
        config, best, notice = resolve_auto_placement(config, executor, known, usual)
        directory.write_text(PLACEMENT, best.to_json() + "\n")
        return PlacedRoles(config, best.placement, best.plan, best.plan.notice, notice)
    from hybridrl.planner.job_start import UNPLANNED, plan_starting_job

    placement = resolve_placement(config, known.cluster, known.roles)
    directory.write_text(PLACEMENT, placement.to_json() + "\n")
    try:
        plan = plan_starting_job(
            known.with_model(config), known.cluster, placement, known.lengths, known.roles
        )
    except NotPlannedError as error:
        return PlacedRoles(config, placement, None, UNPLANNED.format(error=error))
    return PlacedRoles(config, placement, plan, plan.notice)
