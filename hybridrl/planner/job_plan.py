"""A plan: where every role lives, what it takes there, how long a step will last. Plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridrl.checks.machine.placement_checks import resolve_placement, resolve_roles
from hybridrl.config.schema import Config
from hybridrl.placement import GENERATOR_ROLE, Placement
from hybridrl.planner.computation_dtype import resolve_dtype
from hybridrl.planner.job_roles import JobRoles
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.memory.device_memory import (
    MemoryEstimate,
    choose_memory_share,
    estimate_device_memory,
    estimate_host_memory,
    find_generator_shortage,
)
from hybridrl.planner.memory.model_part import MemoryParts
from hybridrl.planner.step.step_calls import (
    MicroBatchPlan,
    SampleLengths,
    StepSizes,
    compute_step_sizes,
)
from hybridrl.planner.step.step_time import TimeEstimate, estimate_step_time
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.trainers.role_spec import RoleSpec


@dataclass(frozen=True)
class JobPlan:
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
        memory_share: `rollout.memory_share`, or what was chosen in its place; None where vLLM has
            no share of a GPU.
        host: Bytes that roles keep in the memory of a node, by what they are for, where they are
            most.
        nodes_of_a_copy: On how many nodes a checkpoint is in memory.
        times: Of a step, where rates are known.
    """

    config: Config
    cluster: ClusterSpec
    placement: Placement
    roles: Mapping[str, RoleSpec]
    notice: str
    sizes: StepSizes
    batches: Mapping[tuple[str, str], MicroBatchPlan]
    parameters: Mapping[str, int]
    active: Mapping[str, int]
    memory: Sequence[MemoryEstimate]
    lacking: str
    sync_bytes: float
    memory_share: float | None
    host: MemoryParts
    nodes_of_a_copy: int
    times: TimeEstimate | None

    @property
    def host_bytes(self) -> float:
        """Return the bytes that roles keep in the memory of a node, beside that of processes."""
        return sum(self.host.values())

    @property
    def fullest(self) -> MemoryEstimate:
        """Return the devices with the largest share of their memory in use."""
        return max(self.memory, key=lambda device: device.filled)

    def fits(self, tolerance: float = 1.0) -> bool:
        """Return whether every device has room for `1 / tolerance` of the predicted memory."""
        return not self.lacking and self.fullest.filled <= tolerance


def build_job_plan(
    config: Config,
    cluster: ClusterSpec,
    placement: Placement | None = None,
    lengths: SampleLengths | None = None,
    rates: Sequence[DeviceRates] | None = None,
    roles: Mapping[str, RoleSpec] | None = None,
) -> JobPlan:
    """Build the plan of a job whose model paths are folders.

    Args:
        placement: None: as the settings say.
        lengths: Of its samples; None: the longest that are allowed.
        rates: Of each device; None: without an estimate of time.
        roles: Of the job; None: those of its trainer.

    Raises:
        ConfigError: if there is no such placement.
    """
    config = resolve_dtype(config, cluster.kind)
    placement = placement or resolve_placement(config, cluster, roles)
    placed = [role for role in placement.roles if role != GENERATOR_ROLE]
    roles = resolve_roles(config, placed if roles is None else roles)
    planner = JobRoles(config, cluster, placement, compute_step_sizes(config, lengths), roles)
    wholes = {
        role: planner.shape(role, whole=True) for role in placement.roles if planner.has_model(role)
    }
    memory = estimate_device_memory(planner)
    has_share = bool(planner.sleeps and planner.generators)
    if has_share and planner.memory_share is None:
        planner.memory_share = choose_memory_share(planner, memory)
        memory = estimate_device_memory(planner)
    syncing = [call.role for call in planner.calls if call.phase == "sync"]
    return JobPlan(
        config=config,
        cluster=cluster,
        placement=placement,
        roles=roles,
        notice=planner.notice,
        sizes=planner.sizes,
        batches=planner.batches,
        parameters={role: shape.parameters.all for role, shape in wholes.items()},
        active={role: shape.active for role, shape in wholes.items()},
        memory=memory,
        lacking=find_generator_shortage(planner),
        sync_bytes=max((planner.sync_bytes(role) for role in syncing), default=0.0),
        memory_share=planner.memory_share if has_share else None,
        host=estimate_host_memory(planner),
        nodes_of_a_copy=planner.nodes_of_a_copy,
        times=None if rates is None else estimate_step_time(planner, rates),
    )


def job_plan_to_json(plan: JobPlan, settings: Sequence[tuple[str, Any]] = ()) -> str:
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
        "host": plan.host,
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
