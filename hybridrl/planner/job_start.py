"""The plan of a job that starts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hybridrl.checks.machine.placement_checks import check_placement
from hybridrl.config.changed import changed
from hybridrl.config.schema import Config
from hybridrl.controller.executor import Executor
from hybridrl.errors import ConfigError, NotPlannedError
from hybridrl.placement import Placement
from hybridrl.planner.fitting_settings import choose_settings, refuse
from hybridrl.planner.job_plan import Plan, make_plan
from hybridrl.planner.job_roles import shape_at
from hybridrl.planner.machine.cluster_rates import resolve_rates
from hybridrl.planner.machine.device_catalog import is_seen, present
from hybridrl.planner.machine.job_probe import probe_job
from hybridrl.planner.search.proposals import Proposals, propose
from hybridrl.planner.step.step_calls import Lengths
from hybridrl.system.cluster_spec import Cluster
from hybridrl.trainers.role_spec import RoleSpec

SEARCH_SECONDS = 30.0
"""A job waits no longer for a placement."""
TOLERANCE = 1.15
"""A job is refused when it is expected to need more than this multiple of the memory there is:
predictions were seen to be right within as much."""


UNPLANNED = "{error} The job starts without a plan, and its memory is not checked."


def count_models(config: Config, roles: Mapping[str, RoleSpec]) -> None:
    """Count parameters and activation bytes of the job's models ahead of time, so that the plan
    finds them cached; takes about a second.

    Raises:
        NotPlannedError: if a model cannot be counted.
    """
    tp = config.actor.parallel.tp
    for role, spec in roles.items():
        if spec.has_model(role, config):
            path, scalar = spec.path(role, config) or config.model.path, bool(spec.scalar)
            shape_at(path, config, tp=tp, scalar=scalar, trains=bool(spec.trains))


def plan_job(
    config: Config,
    cluster: Cluster,
    placement: Placement,
    lengths: Lengths,
    roles: Mapping[str, RoleSpec],
) -> Plan:
    """Predict the memory of a starting job and refuse it if it needs far more than there is.

    Args:
        config: With the model's folder.
        lengths: Of its longest prompt and response.

    Raises:
        NotPlannedError: if a model cannot be counted.
        ConfigError: if that is far more than there is.
    """
    plan = make_plan(config, present(cluster), placement, lengths, roles=roles)
    refuse(plan, TOLERANCE)
    return plan


def plan_ahead(
    config: Config, cluster: Cluster, lengths: Lengths, roles: Mapping[str, RoleSpec]
) -> list[str]:
    """Plans a job that does not start, as far as this machine can tell.

    Args:
        config: With the model's folder and the precision.
        lengths: Of its longest prompt and response.

    Returns:
        A sentence if there can be no plan.

    Raises:
        ConfigError: if a start would be refused for its plan.
    """
    try:
        count_models(config, roles)
        if config.placement.strategy == "auto" or not is_seen(cluster):
            return []
        config = changed(config, choose_settings(config, present(cluster), lengths, roles))
        plan_job(config, cluster, check_placement(config, cluster, roles), lengths, roles)
    except NotPlannedError as error:
        return [UNPLANNED.format(error=error)]
    return []


def choose_placement(
    config: Config,
    executor: Executor,
    lengths: Lengths,
    roles: Mapping[str, RoleSpec],
    usual: Lengths | None = None,
) -> Proposals:
    """For `placement=auto`: the best ways to run the job on its devices, by their makers' figures,
    by what was measured before, or by a probe that the job's own hosts make now.

    Args:
        config: With the model's folder.
        lengths: Of its longest prompt and response, for which there has to be memory.
        usual: By which a step is to be short; None: all samples are as long as they may be.

    Raises:
        ConfigError: if nothing fits.
    """
    try:
        count_models(config, roles)
    except NotPlannedError as error:
        raise ConfigError(
            f"placement=auto compares plans. {error} Set placement=flattening."
        ) from error
    cluster = present(executor.cluster)
    rates = resolve_rates(
        config, cluster, usual or lengths, partial(probe_job, executor), makers_first=True
    )
    return propose(
        *(config, cluster, rates, usual or lengths, roles),
        longest=lengths,
        deadline_s=SEARCH_SECONDS,
    )
