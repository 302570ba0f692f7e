"""The plan of a job that starts."""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.config.schema import Config
from hybridrl.core.cluster import Cluster
from hybridrl.placement import Placement
from hybridrl.planner.cures import refuse
from hybridrl.planner.devices import present
from hybridrl.planner.plan import Plan, make_plan
from hybridrl.planner.planner import shape_at

TOLERANCE = 1.15
"""A job is refused when it is expected to need more than this multiple of the memory there is:
predictions were seen to be right within as much."""


def count_models(config: Config, roles: Sequence[str]) -> None:
    """Counts what the plan of a job with these roles will ask: a second or so, which can pass while
    other things start."""
    for scalar in {"critic" in roles, False}:
        shape_at(config.model.path, config, tp=config.actor.parallel.tp, scalar=scalar, trains=True)


def plan_job(
    config: Config, cluster: Cluster, placement: Placement, lengths: tuple[int, int]
) -> Plan:
    """What the job will take.

    Args:
        config: With the model's folder.
        lengths: Tokens of its longest prompt and response.

    Raises:
        ConfigError: if that is far more than there is.
    """
    plan = make_plan(config, present(cluster), placement, lengths)
    refuse(plan, TOLERANCE)
    return plan
