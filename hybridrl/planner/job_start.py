"""The plan of a job that starts, and the probe of its own devices that a search for its placement
may need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.config.changed import apply_changes
from hybridrl.config.schema import Config
from hybridrl.controller import ONE_TO_ALL, Worker, WorkerGroup, transfer
from hybridrl.controller.executor import Executor
from hybridrl.errors import ConfigError, NotPlannedError
from hybridrl.parallel.process_group import join_group_world
from hybridrl.placement import Placement
from hybridrl.planner.fitting_settings import check_plan_fits, choose_automatic_settings
from hybridrl.planner.job_plan import JobPlan, build_job_plan
from hybridrl.planner.job_roles import load_model_shape
from hybridrl.planner.machine.cluster_rates import resolve_rates
from hybridrl.planner.machine.device_catalog import add_device_memory, is_seen
from hybridrl.planner.machine.device_probe import collectives
from hybridrl.planner.machine.layer_probe import LayerRuns, measure_layers
from hybridrl.planner.search.proposals import SearchResult, propose_placements
from hybridrl.planner.step.step_calls import SampleLengths
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.trainers.role_spec import RoleSpec

_MAX_SEARCH_SECONDS = 30.0
"""A job waits no longer for a placement."""
_MEMORY_TOLERANCE = 1.15
"""A job is refused when it is expected to need more than this multiple of the memory there is:
predictions were seen to be right within as much."""
_PROBE_ROLE = "probe"
_MESSAGE_BYTES = 8 << 20
"""Bytes that devices of a node, or all devices, gather."""

UNPLANNED = "{error} The job starts without a plan, and its memory is not checked."


def preload_model_shapes(config: Config, roles: Mapping[str, RoleSpec]) -> None:
    """Count parameters and activation bytes of the job's models ahead of time, so that the plan
    finds them cached; takes about a second.

    Raises:
        NotPlannedError: if a model cannot be counted.
    """
    tp = config.actor.parallel.tp
    for role, spec in roles.items():
        if spec.has_model(role, config):
            path, scalar = spec.path(role, config) or config.model.path, bool(spec.scalar)
            load_model_shape(str(path), config, tp=tp, scalar=scalar, trains=bool(spec.trains))


def plan_starting_job(
    config: Config,
    cluster: ClusterSpec,
    placement: Placement,
    lengths: SampleLengths,
    roles: Mapping[str, RoleSpec],
) -> JobPlan:
    """Predict the memory of a starting job and refuse it if it needs far more than there is.

    Args:
        config: With the model's folder.
        lengths: Of its longest prompt and response.

    Raises:
        NotPlannedError: if a model cannot be counted.
        ConfigError: if that is far more than there is.
    """
    plan = build_job_plan(config, add_device_memory(cluster), placement, lengths, roles=roles)
    check_plan_fits(plan, _MEMORY_TOLERANCE)
    return plan


def plan_ahead(
    config: Config, cluster: ClusterSpec, lengths: SampleLengths, roles: Mapping[str, RoleSpec]
) -> list[str]:
    """Plan a job that does not start, as far as this machine can tell.

    Args:
        config: With the model's folder and the precision.
        lengths: Of its longest prompt and response.

    Returns:
        A sentence if there can be no plan.

    Raises:
        ConfigError: if a start would be refused for its plan.
    """
    try:
        preload_model_shapes(config, roles)
        if config.placement.strategy == "auto" or not is_seen(cluster):
            return []
        config = apply_changes(
            config, choose_automatic_settings(config, add_device_memory(cluster), lengths, roles)
        )
        plan_starting_job(
            config, cluster, resolve_placement(config, cluster, roles), lengths, roles
        )
    except NotPlannedError as error:
        return [UNPLANNED.format(error=error)]
    return []


def search_placement(
    config: Config,
    executor: Executor,
    lengths: SampleLengths,
    roles: Mapping[str, RoleSpec],
    usual: SampleLengths | None = None,
) -> SearchResult:
    """Search for the best ways to run a job with `placement=auto` on its devices, by their makers'
    figures, by what was measured before, or by a probe that the job's own hosts make now.

    Args:
        config: With the model's folder.
        lengths: Of its longest prompt and response, for which there has to be memory.
        usual: By which a step is to be short; None: all samples are as long as they may be.

    Raises:
        ConfigError: if nothing fits.
    """
    try:
        preload_model_shapes(config, roles)
    except NotPlannedError as error:
        raise ConfigError(
            f"placement=auto compares plans. {error} Set placement=flattening."
        ) from error
    cluster = add_device_memory(executor.cluster)
    rates = resolve_rates(
        config, cluster, usual or lengths, partial(probe_job_devices, executor), makers_first=True
    )
    return propose_placements(
        *(config, cluster, rates, usual or lengths, roles),
        longest=lengths,
        deadline_s=_MAX_SEARCH_SECONDS,
    )


class ProbeWorker(Worker):
    """A rank of what is measured; see `layer_probe`."""

    @transfer(ONE_TO_ALL)
    def measure(self, runs: LayerRuns) -> dict[str, float]:
        """Measure layers of a model, and a gather of one of them."""
        return measure_layers(join_group_world(self.context), self.context.world_size, runs)

    @transfer(ONE_TO_ALL)
    def measure_link(self) -> dict[str, float]:
        """Measure a gather of `_MESSAGE_BYTES` bytes."""
        device = join_group_world(self.context)
        return collectives(device, self.context.world_size, _MESSAGE_BYTES)


def probe_job_devices(executor: Executor, runs: LayerRuns) -> dict[str, float]:
    """Measure layers as `layer_probe.measure_layers` does, on the job's own hosts.

    Raises:
        WorkerError: if a host fails.
    """
    cluster = executor.cluster
    group = WorkerGroup(executor, _PROBE_ROLE, ProbeWorker, range(len(cluster.devices)))
    found = group.measure(runs).get()
    mean = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    if len(cluster.nodes) > 1:
        mean |= _links(executor, cluster, mean["network"])
    return mean


def _links(executor: Executor, cluster: ClusterSpec, all_devices: float) -> dict[str, float]:
    """Measure the link of one device to others of its node, and derive its share of the network: a
    ring over all devices has the share of every device of a node."""
    node = cluster.devices[0].node
    near = [number for number, device in enumerate(cluster.devices) if device.node == node]
    link = math.inf
    if len(near) > 1:
        group = WorkerGroup(executor, f"{_PROBE_ROLE} of a node", ProbeWorker, near)
        link = min(one["link"] for one in group.measure_link().get())
    return {"link": link, "network": all_devices / len(near)}
