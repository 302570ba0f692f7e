"""Settings that a user leaves to the planner (`null`), chosen when devices and data are known."""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.checks.machine.placement_checks import check_placement
from hybridrl.config.changed import Setting, changed
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, NotPlannedError
from hybridrl.planner.job_plan import make_plan
from hybridrl.planner.step.step_calls import Lengths
from hybridrl.system.cluster_spec import Cluster
from hybridrl.system.cpu_cores import usable_cores
from hybridrl.trainers.role_spec import RoleSpec

MOST_TOKENS = {"cpu": 16384, "cuda": 32768}
"""Of a micro-batch: with more of them nothing becomes quicker that counts."""
FILLED = 0.9
"""Of a device's memory, the share that a micro-batch may lead to."""
MOST_PROCESSES = 16
"""That score for a device: their start takes time and memory, too."""


def choose_settings(
    config: Config,
    cluster: Cluster,
    lengths: Lengths | None = None,
    roles: Mapping[str, RoleSpec] | None = None,
    *,
    is_elsewhere: bool = False,
) -> list[Setting]:
    """Of `actor.tokens_per_microbatch` and `reward.processes` those that are null.

    Args:
        config: With folders for models.
        cluster: With memory of its devices.
        lengths: Tokens of the longest prompt and response; None: those that are allowed.
        roles: Of the job; None: those of its trainer.
        is_elsewhere: Nodes may have other cores than this one, so that processes are left open.
    """
    found: list[Setting] = []
    if config.reward.processes is None and not is_elsewhere:
        found.append(("reward.processes", _processes(cluster)))
    if config.actor.tokens_per_microbatch is None:
        rest = changed(config, found)
        found.append(("actor.tokens_per_microbatch", _tokens(rest, cluster, lengths, roles)))
    return found


def _processes(cluster: Cluster) -> int:
    """The cores that each device has beside the one that its own program takes."""
    cores = usable_cores() // cluster.devices_per_node
    return min(max(1, cores - 1), MOST_PROCESSES)


def _tokens(
    config: Config,
    cluster: Cluster,
    lengths: Lengths | None,
    roles: Mapping[str, RoleSpec] | None,
) -> int:
    """The most with which the job has room, of powers of two; a search for a placement begins with
    the most of all, and lowers it where that lacks memory."""
    data, rollout = config.data, config.rollout
    allowed = data.max_prompt_tokens + max(rollout.max_tokens, data.max_response_tokens or 0)
    longest = 2 * (allowed if lengths is None else lengths.prompt + lengths.longest)  # of a pair
    tokens = MOST_TOKENS[cluster.kind]
    while tokens < longest:
        tokens *= 2
    while config.placement.strategy != "auto" and tokens // 2 >= longest:
        if _has_room(
            changed(config, [("actor.tokens_per_microbatch", tokens)]), cluster, lengths, roles
        ):
            break
        tokens //= 2
    return tokens


def _has_room(
    config: Config,
    cluster: Cluster,
    lengths: Lengths | None,
    roles: Mapping[str, RoleSpec] | None,
) -> bool:
    try:
        placement = check_placement(config, cluster, roles)
        return make_plan(config, cluster, placement, lengths, roles=roles).fits(FILLED)
    except NotPlannedError:  # so few tokens are safest
        return False
    except ConfigError:  # told when the job is placed
        return True
