"""A plan: where every role lives, what it takes there, how long a step will last. Plain data."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridrl.checks.machine.placement_checks import check_placement, wanted_roles
from hybridrl.config.schema import Config
from hybridrl.placement import GENERATOR, Placement
from hybridrl.planner.computation_dtype import with_dtype
from hybridrl.planner.job_roles import Planner
from hybridrl.planner.machine.device_rates import Rates
from hybridrl.planner.memory.device_memory import DeviceMemory, lacking_of, memory_of
from hybridrl.planner.step.step_calls import Lengths, MicroBatches, Sizes, sizes_of
from hybridrl.planner.step.step_time import Times, estimate
from hybridrl.system.cluster_spec import Cluster
from hybridrl.trainers.role_spec import RoleSpec


@dataclass(frozen=True)
class Plan:
    """The plan of a job: its placement, memory and time.

    Attributes:
        config: Of the job, with the precision that `model.dtype=auto` means on the cluster.
        cluster: On what.
        placement: Which role lives where.
        roles: What the driver program says of them.
        notice: A sentence if the calls of a step had to be guessed; else empty.
        sizes: Of a step.
        batches: Micro-batches of each role and phase.
        parameters, active: Of each role's model: all, and those that a token meets.
        memory: Of the devices, those alike together.
        lacking: What cannot work whatever else is moved, as a sentence; empty if all can.
        sync_bytes: That a device receives at a weight sync, at most.
        host_bytes: That checkpoints take of a node's memory, at most, while training goes on.
        nodes_of_a_copy: On how many nodes a checkpoint is in memory.
        times: Of a step, where rates are known.
    """

    config: Config
    cluster: Cluster
    placement: Placement
    roles: Mapping[str, RoleSpec]
    notice: str
    sizes: Sizes
    batches: Mapping[tuple[str, str], MicroBatches]
    parameters: Mapping[str, int]
    active: Mapping[str, int]
    memory: Sequence[DeviceMemory]
    lacking: str
    sync_bytes: float
    host_bytes: float
    nodes_of_a_copy: int
    times: Times | None

    @property
    def fullest(self) -> DeviceMemory:
        """Return the devices with the largest share of their memory in use."""
        return max(self.memory, key=self.filled)

    def filled(self, device: DeviceMemory) -> float:
        """Return the share of memory that a group of equal devices uses at its peak."""
        return device.fullest.bytes / self.cluster.memory_of(device.devices[0])

    def fits(self, tolerance: float = 1.0) -> bool:
        """Return whether every device has room for `1 / tolerance` of the predicted memory."""
        return not self.lacking and self.filled(self.fullest) <= tolerance


def make_plan(
    config: Config,
    cluster: Cluster,
    placement: Placement | None = None,
    lengths: Lengths | None = None,
    rates: Rates | Sequence[Rates] | None = None,
    roles: Mapping[str, RoleSpec] | None = None,
) -> Plan:
    """Build the plan of a job whose model paths are folders.

    Args:
        placement: None: as the settings say.
        lengths: Of its samples; None: the longest that are allowed.
        rates: Of every device, or of each; None: without an estimate of time.
        roles: Of the job; None: those of its trainer.

    Raises:
        ConfigError: if there is no such placement.
    """
    config = with_dtype(config, cluster.kind)
    placement = placement or check_placement(config, cluster, roles)
    placed = [role for role in placement.roles if role != GENERATOR]
    roles = wanted_roles(config, placed if roles is None else roles)
    planner = Planner(config, cluster, placement, sizes_of(config, lengths), roles)
    wholes = {
        role: planner.shape(role, whole=True) for role in placement.roles if planner.has_model(role)
    }
    syncing = [call.role for call in planner.calls if call.phase == "sync"]
    return Plan(
        config=config,
        cluster=cluster,
        placement=placement,
        roles=roles,
        notice=planner.notice,
        sizes=planner.sizes,
        batches=planner.batches,
        parameters={role: shape.parameters.all for role, shape in wholes.items()},
        active={role: shape.active for role, shape in wholes.items()},
        memory=memory_of(planner),
        lacking=lacking_of(planner),
        sync_bytes=max((planner.sync_bytes(role) for role in syncing), default=0.0),
        host_bytes=_host_bytes(planner),
        nodes_of_a_copy=planner.nodes_of_a_copy,
        times=None if rates is None else estimate(planner, rates),
    )


def _host_bytes(planner: Planner) -> float:
    """Return the checkpoint memory of the node that has most."""
    taken: defaultdict[str, float] = defaultdict(float)
    for role, place in planner.placement.roles.items():
        for device in place.devices:
            node = planner.cluster.devices[device].node
            taken[node] += planner.checkpoint_bytes(role)
    return max(taken.values(), default=0.0)


def to_json(plan: Plan, settings: Sequence[tuple[str, Any]] = ()) -> str:
    """Return the plan as JSON; `placement=file placement.path=<file>` runs it, also after edits.

    Args:
        settings: That were left to the planner, as it chose them.
    """
    found: dict[str, Any] = {
        **json.loads(plan.placement.to_json()),
        "settings": dict(settings),
        "devices": {
            "number": len(plan.cluster.devices),
            "name": str(plan.cluster),
            "memory_bytes": plan.cluster.memory,
        },
        "dtype": plan.config.model.dtype,
        "sizes": {**asdict(plan.sizes), "tokens": plan.sizes.tokens},
        "micro_batches": {
            f"{role}/{phase}": asdict(batch) for (role, phase), batch in plan.batches.items()
        },
        "parameters": plan.parameters,
        "active_parameters": plan.active,
        "memory": [
            {
                "devices": device.devices,
                "phases": {
                    f"{phase.role}/{phase.phase}": {"bytes": phase.bytes, **phase.parts}
                    for phase in device.phases
                },
            }
            for device in plan.memory
        ],
        "sync_bytes": plan.sync_bytes,
        "host_bytes": plan.host_bytes,
        "fits": plan.fits(),
        "notice": plan.notice,
    }
    if plan.times is not None:
        calls = [
            {"role": call.role, "phase": call.phase, "seconds": seconds}
            for call, seconds in plan.times.calls
        ]
        found["time"] = {"step": plan.times.step, "source": plan.times.source, "calls": calls}
        found["gradients"] = {role: asdict(sums) for role, sums in plan.times.sums.items()}
    return json.dumps(found, indent=2)
